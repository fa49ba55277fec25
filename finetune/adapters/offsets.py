"""Low-rank parts folded into frozen weights while an adapter trains, and written with it when it is saved.

    frozen weight of a layer = W + s·b·a        during training (s: the layer's scale)
    saved adapter            = [A; a], [B, b]   which fits the W of the backbone's files: s·(BA + ba)

PiSSA and similar methods subtract their initial product (a = A₀, b = −B₀; PEFT's `LoraModel.subtract_mutated_init`
converts adapters to the same form); a frozen adapter under the trained one is added. Folding adds no cost to a step.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..models.checkpoint import canonical_name

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

ADAPTER = "default"


@dataclass(frozen=True)
class LowRankOffset:
    """Low-rank part folded into one layer, without the layer's scale."""

    a: Tensor  # (k, n) in the layout of PEFT's file: `lora_A.weight`, or `lora_embedding_A`
    b: Tensor  # (m, k)


def lora_layers(model: nn.Module) -> dict[str, Any]:
    """Return the adapted layers by plain name."""
    return {
        canonical_name(name): m
        for name, m in model.named_modules()
        if hasattr(m, "lora_A") and hasattr(m, "base_layer")
    }


def factor_names(layer: Any, name: str) -> tuple[str, str]:
    """Return the plain names of the layer's factors A and B."""
    if ADAPTER in layer.lora_embedding_A:
        return f"{name}.lora_embedding_A", f"{name}.lora_embedding_B"
    return f"{name}.lora_A.weight", f"{name}.lora_B.weight"


def folded_offsets(model: nn.Module) -> dict[str, LowRankOffset]:
    """Return, by layer, the parts folded into the frozen weights of `model`; empty for most models."""
    offsets: dict[str, LowRankOffset] = getattr(model, "offsets", {})
    return offsets


@torch.no_grad()
def fold_offsets(model: PeftModel, offsets: Mapping[str, LowRankOffset], *, context: str) -> None:
    """Fold `offsets` into the frozen weights of `model`, in float32, rounded once to their dtype, and record them for
    `folded_offsets`. Raises UserError: a weight that is quantised or shared with another layer; starting with
    `context`."""
    layers = lora_layers(model)
    holders = Counter(p.data_ptr() for m in model.modules() for p in m._parameters.values() if p is not None)
    for name in offsets:
        weight = layers[name].get_base_layer().weight
        if not weight.is_floating_point():
            raise UserError(f"{context}: the weight of {name} is quantised and cannot be changed")
        if holders[weight.data_ptr()] > 1:
            raise UserError(
                f"{context}: {name} shares its weight with another layer, which would change too; take it out of "
                "adapter.targets"
            )
    for name, offset in offsets.items():
        layer = layers[name]
        base = layer.get_base_layer()
        delta = layer.scaling[ADAPTER] * (offset.b.float() @ offset.a.float())
        if isinstance(base, nn.Embedding) or getattr(layer, "fan_in_fan_out", False):
            delta = delta.T
        base.weight.data = (base.weight.data.float() + delta.to(base.weight.device)).to(base.weight.dtype)
    vars(model)["offsets"] = {**folded_offsets(model), **offsets}  # not part of its state_dict


def append_offsets(tensors: Mapping[str, Tensor], model: PeftModel) -> dict[str, Tensor]:
    """Return the trained `tensors` (by plain name) in the form of a file: each factor with the folded part appended."""
    joined = dict(tensors)
    for name, offset in folded_offsets(model).items():
        a, b = factor_names(lora_layers(model)[name], name)
        joined[a] = torch.cat([tensors[a].detach(), offset.a.to(tensors[a])], dim=0)
        joined[b] = torch.cat([tensors[b].detach(), offset.b.to(tensors[b])], dim=1)
    return joined


def split_offsets(
    tensors: Mapping[str, Tensor], model: PeftModel
) -> tuple[dict[str, Tensor], dict[str, LowRankOffset]]:
    """Reverse `append_offsets`: split file tensors into the factors up to the ranks of `model` and the parts beyond."""
    factors, offsets = dict(tensors), {}
    for name, layer in lora_layers(model).items():
        a, b = factor_names(layer, name)
        rank = layer.r[ADAPTER]
        if a in tensors and b in tensors and tensors[a].shape[0] > rank:
            offsets[name] = LowRankOffset(tensors[a][rank:].clone(), tensors[b][:, rank:].clone())
            factors[a], factors[b] = tensors[a][:rank].clone(), tensors[b][:, :rank].clone()
    return factors, offsets


def saved_config(model: PeftModel) -> LoraConfig:
    """Return the PEFT settings of an adapter from `append_offsets`: wider factors, each layer with its scale."""
    config: Any = copy.deepcopy(model.peft_config[ADAPTER])
    sizes: dict[str, tuple[int, float]] = {}
    for name, layer in lora_layers(model).items():
        extra = folded_offsets(model).get(name)
        rank = layer.r[ADAPTER] + (0 if extra is None else extra.a.shape[0])
        sizes[name] = rank, layer.scaling[ADAPTER] * rank
    (rank, alpha), _ = Counter(sizes.values()).most_common(1)[0]
    config.r, config.lora_alpha = rank, _int_if_whole(alpha)
    config.rank_pattern = {name: r for name, (r, _) in sizes.items() if r != rank}
    config.alpha_pattern = {name: _int_if_whole(a) for name, (_, a) in sizes.items() if a != alpha}
    config.use_rslora = False  # with per-layer ranks and alphas, the scale is alpha/r
    config.init_lora_weights = True
    return config


def _int_if_whole(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value
