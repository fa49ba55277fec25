"""Backbones whose files are quantised, packed here value by value, and the floats that they stand for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs AutoAWQ packs into each four bits of an integer, the lowest first."""


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def whole_numbers(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def rewrite(source: Path, target: Path, tensors: dict[str, Tensor], settings: dict[str, Any] | None) -> Path:
    """A copy of a backbone with other weights and another `quantization_config`."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file({name: t.contiguous() for name, t in tensors.items()}, target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config", None)
    if settings is not None:
        config["quantization_config"] = settings
    (target / "config.json").write_text(json.dumps(config))
    return target


def weights_of(source: Path) -> dict[str, Tensor]:
    return {name: t for file in sorted(source.glob("*.safetensors")) for name, t in load_file(file).items()}


def is_projection(name: str) -> bool:
    return name.endswith("_proj.weight")


# ------------------------------------------------------------------------------------ formats, packed value by value


def fp8(weight: Tensor, block: int = 16) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors in the files by ending, and the floats that they stand for."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // block), -(-columns // block))
    values, floats = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    for i, top in enumerate(range(0, rows, block)):
        for j, left in enumerate(range(0, columns, block)):
            own = slice(top, top + block), slice(left, left + block)
            scales[i, j] = weight[own].abs().max() / 448
            values[own] = (weight[own] / scales[i, j]).to(torch.float8_e4m3fn)
            floats[own] = values[own].float() * scales[i, j]
    return {"weight": values, "weight_scale_inv": scales}, floats


def gptq(
    weight: Tensor, *, bits: int = 4, group: int = 16, shuffled: bool = False, version: int = 1
) -> tuple[dict[str, Tensor], Tensor]:
    outputs, inputs = weight.shape
    groups, count = inputs // group, 32 // bits
    member = torch.arange(inputs) // group
    if shuffled:
        member = member[torch.randperm(inputs, generator=torch.Generator().manual_seed(2))]
    codes = whole_numbers(2**bits, inputs, outputs, seed=3)
    zeros = whole_numbers(2**bits - 1, groups, outputs, seed=4) + 1  # the first format cannot store 0
    scales = (draw(groups, outputs, seed=5).abs() / 100).half()
    floats = torch.empty(outputs, inputs)
    for i in range(inputs):
        for o in range(outputs):
            floats[o, i] = scales[member[i], o].float() * (codes[i, o] - zeros[member[i], o])
    packed, packed_zeros = torch.zeros(inputs // count, outputs).long(), torch.zeros(groups, outputs // count).long()
    for i in range(inputs):
        packed[i // count] |= codes[i] << bits * (i % count)
    for o in range(outputs):
        packed_zeros[:, o // count] |= zeros[:, o] - (2 - version) << bits * (o % count)
    tensors = {"qweight": packed.int(), "qzeros": packed_zeros.int(), "scales": scales, "g_idx": member.int()}
    return tensors, floats


def awq(weight: Tensor, *, group: int = 16) -> tuple[dict[str, Tensor], Tensor]:
    outputs, inputs = weight.shape
    groups = inputs // group
    codes, zeros = whole_numbers(16, inputs, outputs, seed=3), whole_numbers(16, groups, outputs, seed=4)
    scales = (draw(groups, outputs, seed=5).abs() / 100).half()
    floats = torch.empty(outputs, inputs)
    for i in range(inputs):
        for o in range(outputs):
            floats[o, i] = scales[i // group, o].float() * (codes[i, o] - zeros[i // group, o])
    packed, packed_zeros = torch.zeros(inputs, outputs // 8).long(), torch.zeros(groups, outputs // 8).long()
    for word in range(outputs // 8):
        for place, column in enumerate(AWQ_COLUMNS):
            packed[:, word] |= codes[:, 8 * word + column] << 4 * place
            packed_zeros[:, word] |= zeros[:, 8 * word + column] << 4 * place
    return {"qweight": packed.int(), "qzeros": packed_zeros.int(), "scales": scales}, floats


FORMATS: dict[str, tuple[dict[str, Any], Any]] = {
    "fp8": ({"quant_method": "fp8", "weight_block_size": [16, 16]}, fp8),
    "fp8, uneven blocks": ({"quant_method": "fp8", "weight_block_size": [20, 20]}, lambda w: fp8(w, 20)),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 16}, gptq),
    "gptq, 8 bits, order of activations": (
        {"quant_method": "gptq", "bits": 8, "group_size": 16, "desc_act": True},
        lambda w: gptq(w, bits=8, shuffled=True),
    ),
    "gptq, second format": (
        {"quant_method": "gptq", "bits": 2, "group_size": 16, "checkpoint_format": "gptq_v2"},
        lambda w: gptq(w, bits=2, version=2),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}, awq),
}


def quantized_copy(source: Path, target: Path, settings: dict[str, Any], pack: Any) -> dict[str, Tensor]:
    """Write the backbone with quantised projections, and return the floats of all of its weights."""
    stored, floats = {}, {}
    for name, weight in weights_of(source).items():
        if is_projection(name):
            parts, floats[name] = pack(weight.float())
            stored |= {f"{name.removesuffix('weight')}{ending}": part for ending, part in parts.items()}
        else:
            stored[name] = floats[name] = weight
    rewrite(source, target, stored, settings)
    return floats
