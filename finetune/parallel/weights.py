"""Loading of weights from safetensors files directly into this rank's part of a model that was built on meta.

Of each tensor a rank reads the indices of its tensor-parallel slice and its FSDP2 chunk, a few rows at a time, and of
stacked experts, which files have one by one, only those that it holds. If transformers has to convert tensors in
another way, rank 0 creates them with `from_pretrained` and every rank copies its part of each.

A 4-bit layer's packed bytes and the scales of its blocks are two parameters, which FSDP2 shards and gathers. Blocks
never cross a row; the rows that a shard touches are read and quantised, so blocks are the same on every mesh.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import UserError, first_error_line, is_out_of_memory
from ..models.backbone import REFUSED, quiet_transformers
from ..models.checkpoint import CheckpointFiles, canonical_name, open_slice
from ..models.quantize import BLOCK, import_bitsandbytes, is_four_bit
from .layout import (
    Placed,
    Runs,
    Slice,
    TensorParallelLayout,
    copy_local_part,
    gather_full_tensors,
    local_index_runs,
    local_part,
    place_runs,
    select_runs,
)
from .mesh import ProcessMesh

_PIECE = 8 << 20  # bytes copied, or float32 values quantised, at once
_NESTED_BLOCK = 256  # scales that share a scale of their own, in nf4-double
ReadRows = Callable[[int, int], Tensor]
"""Rows `start` to `stop` of this rank's tensor-parallel part of a weight, in the files' dtype."""


@dataclass(frozen=True)
class LoadResult:
    """Result of `load_weights` on this rank: bytes read from the files, in their dtypes.

    `unread`: full names of the model's parameters that no file has (adapters and new heads), still without values.
    """

    bytes: int
    unread: tuple[str, ...]


def materialize(model: nn.Module, device: torch.device | str, *, offload: bool = False) -> None:
    """Allocate every meta tensor uninitialised on `device`: of a DTensor only the local shard.

    Other tensors (buffers, which were real all along) move to `device` with their values. Shared parameters stay
    shared.

    offload: keep FSDP2's shards in host memory (`mesh.offload`), only the others on `device`.
    """
    shared = defaultdict(list)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                shared[id(parameter)].append((module, name))

    def move(tensor: Tensor) -> Tensor:
        target = "cpu" if offload and isinstance(tensor, DTensor) else device
        return torch.empty_like(tensor, device=target) if tensor.is_meta else tensor.to(target)

    model._apply(move)  # torch's own traversal, so that FSDP2 registers the new shards
    for (owner, name), *others in shared.values():
        for module, alias in others:
            module._parameters[alias] = owner._parameters[name]


@torch.no_grad()
def load_weights(
    model: nn.Module, checkpoint: CheckpointFiles, *, layout: TensorParallelLayout, world: ProcessMesh
) -> LoadResult:
    """Fill the base model's tensors in `model`: a whole model or a pipeline's part of it, with PEFT, sliced, sharded.

    Collective if and only if `checkpoint.converted` has more than stacked experts: then every rank of the default group
    calls it once.
    Raises UserError for a file that changed since its header was read, or that transformers cannot convert.
    """
    count = 0
    targets, unread = _tensors_to_load(model, checkpoint)
    files: dict[Path, list[_FilePart]] = defaultdict(list)
    others = []
    for name, tensor in targets:
        assert checkpoint.shapes[name] == layout.shape(name, tensor.shape), name
        if name in checkpoint.computed:
            copy_local_part(tensor, checkpoint.computed[name], layout.slices.get(name))
            continue
        if name not in checkpoint.keys and name not in checkpoint.stacked:
            others.append((name, tensor))
            continue
        for part in _file_parts(name, tensor, checkpoint, layout):
            files[checkpoint.entries[part.key].file].append(part)
    for file, parts in files.items():
        parts.sort(key=lambda part: checkpoint.entries[part.key].offset)
        count += _read_file(file, parts, checkpoint)
    if checkpoint.converted != tuple(checkpoint.stacked):
        _broadcast_converted(others, checkpoint, layout, world)
    return LoadResult(count, tuple(unread))


def _tensors_to_load(model: nn.Module, checkpoint: CheckpointFiles) -> tuple[list[tuple[str, Tensor]], list[str]]:
    """Return the tensors to fill by canonical name (a name may occur twice: a head and PEFT's copy of it), and the full
    names of the other parameters."""
    new = {*checkpoint.missing, *checkpoint.mismatched} - set(checkpoint.keys)
    targets: list[tuple[str, Tensor]] = []
    unread = []
    for full, parameter in model.named_parameters():
        name = canonical_name(full)
        if name in checkpoint.keys or name in checkpoint.converted or name in checkpoint.computed:
            targets.append((name, parameter))
        else:
            assert name in new or name not in checkpoint.shapes, name
            unread.append(full)
    targets += [(canonical_name(n), b) for n, b in model.named_buffers() if canonical_name(n) in checkpoint.keys]
    return [(name, tensor.detach()) for name, tensor in targets], unread


@dataclass(frozen=True)
class _FilePart:
    """Indices of one tensor of a file that fill `local`, per dim."""

    key: str
    local: Tensor
    dims: list[Placed]


def _file_parts(
    name: str, tensor: Tensor, checkpoint: CheckpointFiles, layout: TensorParallelLayout
) -> Iterator[_FilePart]:
    """Yield the parts of the files' tensors that make up this rank's part of the parameter or buffer `name`."""
    dims = [place_runs(runs) for runs in local_index_runs(tensor, layout.slices.get(name))]
    local = local_part(tensor)
    if name in checkpoint.keys:
        yield _FilePart(checkpoint.keys[name], local, dims)
        return
    experts, rows, columns = dims
    first = 0
    for keys in checkpoint.stacked[name]:
        height = checkpoint.entries[keys[0]].shape[0]
        own_rows = _clip(rows, first, first + height)
        first += height
        for start, stop, offset in experts:
            for expert in range(start, stop):
                yield _FilePart(keys[expert], local[offset + expert - start], [own_rows, columns])


def _clip(placed: Placed, first: int, last: int) -> Placed:
    """Return the runs inside [first, last), counted from `first`."""
    clipped = [(max(start, first), min(stop, last), offset - start) for start, stop, offset in placed]
    return [(start - first, stop - first, start + shift) for start, stop, shift in clipped if start < stop]


def _read_file(file: Path, parts: list[_FilePart], checkpoint: CheckpointFiles) -> int:
    from safetensors import SafetensorError, safe_open

    count = 0
    try:
        with safe_open(file, "pt") as source:
            for part in parts:
                entry = checkpoint.entries[part.key]
                if not entry.shape:
                    part.local.copy_(source.get_tensor(part.key))
                    count += entry.bytes
                    continue
                view = open_slice(source, part.key, entry)
                for file_slices, local_slices in _copy_slices(part.dims, entry.dtype.itemsize):
                    target = part.local[local_slices]
                    target.copy_(view[file_slices])
                    count += target.numel() * entry.dtype.itemsize
    except (OSError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        raise UserError(f"{file} cannot be read any more ({str(error).splitlines()[0]}); was it replaced?") from error
    return count


def _copy_slices(dims: list[Placed], itemsize: int) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yield slices of the file's tensor and of the local one that together cover it, each of at most `_PIECE` bytes."""
    for (start, stop, offset), *inner in itertools.product(*dims):
        source = tuple(slice(low, high) for low, high, _ in inner)
        target = tuple(slice(first, first + high - low) for low, high, first in inner)
        step = max(1, _PIECE // (itemsize * math.prod(high - low for low, high, _ in inner)))
        for first in range(start, stop, step):
            last = min(first + step, stop)
            yield (slice(first, last), *source), (slice(offset + first - start, offset + last - start), *target)


def _broadcast_converted(
    tensors: list[tuple[str, Tensor]], checkpoint: CheckpointFiles, layout: TensorParallelLayout, world: ProcessMesh
) -> None:
    """Load the model with transformers on rank 0 and broadcast its converted tensors one by one."""
    state: dict[str, Tensor] = {}
    problem: list[str | None] = [None]
    if world.rank == 0:
        try:
            with quiet_transformers(), torch.random.fork_rng(devices=[]):
                state = checkpoint.model_class.from_pretrained(
                    checkpoint.directory,
                    config=checkpoint.config,
                    dtype=checkpoint.dtype,
                    use_safetensors=True,
                    ignore_mismatched_sizes=True,
                ).state_dict()
        except REFUSED as error:
            problem = [f"{checkpoint.directory}: its weights cannot be converted: {str(error).splitlines()[0]}"]
    if world.size > 1:
        dist.broadcast_object_list(problem, src=0)
    if problem[0]:
        raise UserError(problem[0])
    by_name = defaultdict(list)
    for name, tensor in tensors:
        by_name[name].append(tensor)
    for name in checkpoint.converted:
        if name in checkpoint.stacked:
            continue
        if world.rank == 0:
            whole = state.pop(name).contiguous()
        else:
            whole = torch.empty(checkpoint.shapes[name], dtype=checkpoint.dtype, device=world.device)
        if world.size > 1:
            whole = whole.to(world.device, checkpoint.dtype)
            dist.broadcast(whole.view(-1).view(torch.uint8), src=0)
        for tensor in by_name[name]:
            copy_local_part(tensor, whole, layout.slices.get(name))


# ------------------------------------------------------------------------------------------------ 4-bit weights


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


def load_packed_layers(
    layers: Mapping[str, Any], checkpoint: CheckpointFiles, *, layout: TensorParallelLayout, world: ProcessMesh
) -> int:
    """Fill the layers from `pack_layers`, and return the bytes read; for nf4-double collective, see `quantize_rows`.

    Raises UserError for a file that changed since its header was read, or a weight that has to be converted first.
    """
    if converted := sorted(layers.keys() - checkpoint.keys.keys()):
        raise UserError(
            f"{checkpoint.directory}: {converted[0]} is built from several tensors of its files, which is not done in "
            "4 bits on a mesh; leave train.quantization out, or train in one process"
        )
    entries = {name: checkpoint.entries[checkpoint.keys[name]] for name in layers}
    order = sorted(layers, key=lambda name: (entries[name].file, entries[name].offset))
    return sum(_load_packed_layer(name, layers[name], checkpoint, layout, world) for name in order)


def _load_packed_layer(
    name: str, layer: Any, checkpoint: CheckpointFiles, layout: TensorParallelLayout, world: ProcessMesh
) -> int:
    from safetensors import SafetensorError, safe_open

    key = checkpoint.keys[name]
    entry = checkpoint.entries[key]
    try:
        with safe_open(entry.file, "pt") as source:
            rows = _RowReader(open_slice(source, key, entry), layer, layout.slices.get(name))
            quantize_rows(layer, rows.read, dtype=checkpoint.dtype, world=world)
    except (OSError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"{entry.file} cannot be read any more ({first_error_line(error)}); was it replaced?"
        ) from error
    return rows.count * entry.dtype.itemsize


class _RowReader:
    """Reads rows of the tensor-parallel part of a layer's weight, which GPT-2's files have with columns first."""

    def __init__(self, view: Any, layer: Any, own: Slice | None) -> None:
        """Args: view: the tensor in its file; own: the part."""
        self.view, self.transposed = view, layer.source_cls is not nn.Linear
        self.runs: list[Runs] = [((0, size),) for size in layer.float_shape]
        if own is not None:
            self.runs[own.dim] = own.runs
        self.count = 0
        """Values read so far."""

    def read(self, start: int, stop: int) -> Tensor:
        """Return the rows `start` to `stop` of the part."""
        runs = select_runs(self.runs[0], start, stop), self.runs[1]
        rows = torch.cat([torch.cat([self._view(row, column) for column in runs[1]], 1) for row in runs[0]])
        self.count += rows.numel()
        return rows

    def _view(self, row: tuple[int, int], column: tuple[int, int]) -> Tensor:
        rows, columns = slice(*row), slice(*column)
        values: Tensor = self.view[columns, rows].T if self.transposed else self.view[rows, columns]
        return values


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
    spans = [
        (first // row, -(-(first + len(part)) // row))
        for first, part, row in ((first_byte, packed, row_bytes), (first_block, scales, row_blocks))
        if len(part)
    ]
    begin, end = min((low for low, _ in spans), default=0), max((high for _, high in spans), default=0)
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
def gather_dequantized(name: str, layer: Any, *, layout: TensorParallelLayout, world: ProcessMesh) -> Tensor:
    """Return the whole weight `name` that a 4-bit layer computes with; collective over the ranks that share it."""
    parts = {"weight": layer.weight, "absmax": layer.absmax}
    packed = gather_full_tensors(parts, parameters=parts, layout=TensorParallelLayout(), world=world)
    state = copy.copy(layer.quant_state)
    state.absmax = packed["absmax"]
    only = {name: import_bitsandbytes().functional.dequantize_4bit(packed["weight"], state)}
    return gather_full_tensors(only, parameters=only, layout=layout, world=world)[name]
