"""Combine several adapters of one backbone into one: the exact weighted sum of their weight changes.

    Σ w_i s_i B_i A_i = [w_1 s_1 B_1, w_2 s_2 B_2, …] [A_1; A_2; …]

PEFT calls this combination `cat`; its `linear` sums factors instead, whose product is not the sum of the products.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..atomic import write_json
from ..errors import UserError
from .saved import SETTINGS, SavedAdapter

_ENDS = (("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B"))


def combine_adapters(adapters: Sequence[tuple[SavedAdapter, float]], out: Path) -> None:
    """Write Σ weight · adapter as a PEFT adapter into the existing directory `out`, read it back and compare.

    A head, a bias or another module trained in full is taken from the first adapter; only that one may have any.

    Raises:
        UserError: DoRA, adapters on experts, soft tokens, or a fully trained module outside the first adapter.
        RuntimeError: the file differs from the tensors.
    """
    from safetensors.torch import save_file

    from .adapter import WEIGHTS, check_saved, peft_tensor_name, read_adapter

    parts: dict[str, list[tuple[Tensor, Tensor]]] = {}
    kept: dict[str, Tensor] = {}
    ends: dict[str, tuple[str, str]] = {}
    for index, (saved, weight) in enumerate(adapters):
        tensors = read_adapter(saved.path)
        if saved.settings.get("use_dora") or saved.settings.get("target_parameters"):
            raise UserError(f"{saved.path}: only plain LoRA on linear layers and embeddings can be summed")
        for layer, (_, scale) in saved.scales(tensors).items():
            a, b = ends[layer] = next(pair for pair in _ENDS if f"{layer}.{pair[0]}" in tensors)
            down, up = tensors.pop(f"{layer}.{a}").float(), tensors.pop(f"{layer}.{b}").float()
            parts.setdefault(layer, []).append((down, weight * scale * up))
        if tensors and index:
            raise UserError(f"{saved.path} also holds {min(tensors)}, which is no sum; put this adapter first")
        kept |= tensors
    for layer, factors in parts.items():
        shapes = {(a.shape[1], b.shape[0]) for a, b in factors}
        if len(shapes) > 1:
            raise UserError(f"{layer} has different shapes in these adapters: they are of different backbones")
        kept[f"{layer}.{ends[layer][0]}"] = torch.cat([a for a, _ in factors])
        kept[f"{layer}.{ends[layer][1]}"] = torch.cat([b for _, b in factors], dim=1)
    first = adapters[0][0]
    host = {peft_tensor_name(name, parts): tensor.contiguous() for name, tensor in kept.items()}
    save_file(host, out / WEIGHTS, metadata={"format": "pt"})
    check_saved(read_adapter(out), kept)
    write_json(
        out / SETTINGS, _combined_settings(first, {layer: sum(len(a) for a, _ in f) for layer, f in parts.items()})
    )


def _combined_settings(first: SavedAdapter, ranks: dict[str, int]) -> dict[str, Any]:
    """Return the adapter_config.json: every layer by name, with its rank, at the scale 1."""
    common = Counter(ranks.values()).most_common(1)[0][0]
    odd = {layer: rank for layer, rank in ranks.items() if rank != common}
    changes = {
        "r": common,
        "lora_alpha": common,
        "rank_pattern": odd,
        "alpha_pattern": odd,
        "use_rslora": False,
        "init_lora_weights": True,
        "target_modules": sorted(ranks),
        "exclude_modules": None,
        "layers_to_transform": None,
    }
    return json.loads(json.dumps({**first.settings, **changes}))
