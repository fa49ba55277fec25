"""4-bit weights of this rank, quantised from the float weights while these are read.

A layer's packed bytes and the scales of its blocks are two parameters, which FSDP2 shards and gathers like all others.
Blocks of scales never cross a row, but a shard may begin or end inside of one. Then the rows that the shard touches are
read and quantised, and bytes outside of it are dropped; so blocks are the same on every mesh.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..models.checkpoint import canonical_name
from ..models.quantize import BLOCK, import_bitsandbytes, is_four_bit
from .layout import TensorParallelLayout, gather_full_tensors, local_index_runs, local_part
from .mesh import ProcessMesh

ReadRows = Callable[[int, int], Tensor]
"""Rows `start` to `stop` of this rank's tensor-parallel part of a weight, in the files' dtype."""
_PIECE = 8 << 20  # bytes of float32 values quantised at once
_NESTED_BLOCK = 256  # scales that share a scale of their own, in nf4-double


def pack_layers(model: nn.Module, layout: TensorParallelLayout) -> dict[str, Any]:
    """Replace the float weights of 4-bit layers, on meta and sliced by `layout`, by packed ones, and return the layers
    by the canonical names of their weights.

    Raises UserError for a tensor-parallel slice that cuts blocks of scales.
    """
    layers: dict[str, Any] = {}
    for path, module in model.named_modules():
        if not is_four_bit(module):
            continue
        layer: Any = module
        name = canonical_name(f"{path}.weight")
        own = layout.slices.get(name)
        if own is not None and own.dim == 1 and any(edge % BLOCK for run in own.runs for edge in run):
            raise UserError(
                f"mesh.tp: a rank's part of the {own.size} inputs of {name} would begin inside a block of {BLOCK} "
                "values with one scale; take fewer ranks, or mesh.dp"
            )
        layer.float_shape = layer.weight.shape
        values, nested = layer.weight.numel(), layer.compress_statistics
        scale_dtype = torch.uint8 if nested else torch.float32
        layer.weight = _frozen(torch.empty(values // 2, 1, dtype=torch.uint8, device="meta"))
        layer.absmax = _frozen(torch.empty(values // BLOCK, dtype=scale_dtype, device="meta"))
        layer.register_forward_pre_hook(_use_gathered_scales)
        layers[name] = layer
    return layers


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _use_gathered_scales(layer: Any, inputs: tuple[Any, ...]) -> None:
    layer.quant_state.absmax = layer.absmax


@torch.no_grad()
def quantize_rows(layer: Any, read: ReadRows, *, dtype: torch.dtype, world: ProcessMesh) -> None:
    """Fill this rank's shard of a layer from `pack_layers`, a few rows of `dtype` at a time.

    For nf4-double collective over the ranks that share the layer: the second quantisation needs the mean of all scales.
    """
    functional = import_bitsandbytes().functional
    rows, columns = layer.float_shape
    row_bytes, row_blocks = columns // 2, columns // BLOCK
    packed = local_part(layer.weight).view(-1)
    scales = local_part(layer.absmax).to(torch.float32)  # not a copy, unless they are quantised themselves
    first_byte, first_block = _first_index(layer.weight), _first_index(layer.absmax)
    touched = [
        (first // row, -(-(first + len(part)) // row))
        for first, part, row in ((first_byte, packed, row_bytes), (first_block, scales, row_blocks))
        if len(part)
    ]
    begin, end = min((low for low, _ in touched), default=0), max((high for _, high in touched), default=0)
    step = max(1, _PIECE // (4 * columns))
    for start in range(begin, end, step):
        values = read(start, min(start + step, end)).to(device=packed.device, dtype=dtype).contiguous()
        codes, state = functional.quantize_4bit(values, blocksize=BLOCK, quant_type="nf4")
        _copy_overlap(packed, first_byte, codes.view(-1), start * row_bytes)
        _copy_overlap(scales, first_block, state.absmax, start * row_blocks)
    offset = nested = None
    if layer.compress_statistics:
        only = {"": layer.absmax}
        whole = gather_full_tensors({"": scales}, parameters=only, layout=TensorParallelLayout(), world=world)[""]
        offset = whole.mean()
        codes, nested = functional.quantize_blockwise(whole - offset, blocksize=_NESTED_BLOCK)
        local_part(layer.absmax).copy_(codes[first_block : first_block + len(scales)])
    layer.quant_state = functional.QuantState(
        absmax=layer.absmax,
        shape=torch.Size((rows, columns)),
        code=functional.get_4bit_type("nf4", device=packed.device),
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=dtype,
        offset=offset,
        state2=nested,
    )


def _first_index(parameter: Tensor) -> int:
    """Return the first index of dim 0 that this rank holds."""
    runs = local_index_runs(parameter, None)[0]
    return runs[0][0] if runs else 0


def _copy_overlap(target: Tensor, target_start: int, source: Tensor, source_start: int) -> None:
    """Copy the values with the same index: those of `target` begin at `target_start`, of `source` at `source_start`."""
    low = max(target_start, source_start)
    high = min(target_start + len(target), source_start + len(source))
    if low < high:
        target[low - target_start : high - target_start] = source[low - source_start : high - source_start]


@torch.no_grad()
def gather_dequantized(layer: Any, *, world: ProcessMesh) -> Tensor:
    """Return the values that a 4-bit layer computes with; collective over the ranks that share it."""
    parts = {"weight": layer.weight, "absmax": layer.absmax}
    whole = gather_full_tensors(parts, parameters=parts, layout=TensorParallelLayout(), world=world)
    state = copy.copy(layer.quant_state)
    state.absmax = whole["absmax"]
    values: Tensor = import_bitsandbytes().functional.dequantize_4bit(whole["weight"], state)
    return values
