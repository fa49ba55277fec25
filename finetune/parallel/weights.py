"""Loading of weights from safetensors files directly into this rank's part of a model that was built on meta.

No rank ever has a whole copy: of each tensor it reads the indices of its tensor-parallel slice and its FSDP2 chunk, a
few rows at a time, and casts them while reading; of stacked experts, which files have one by one, only those that it
holds. If transformers has to convert tensors in another way, rank 0 creates them with `from_pretrained` and every rank
copies its part of each.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import UserError, is_out_of_memory
from ..models.backbone import REFUSED, quiet_transformers
from ..models.checkpoint import CheckpointFiles, canonical_name
from .layout import Runs, TensorParallelLayout, copy_local_part, local_index_runs, local_part
from .mesh import ProcessMesh

_PIECE = 8 << 20  # bytes of the file copied at once

Placed = list[tuple[int, int, int]]
"""Half-open runs of indices along a dim of a tensor in a file, each with its first index in the local tensor."""


@dataclass(frozen=True)
class LoadResult:
    """Result of `load_weights` on this rank: bytes read from the files, in their dtypes, and seconds.

    `unread`: full names of the model's parameters that no file has (adapters and new heads), still without values.
    """

    bytes: int
    seconds: float
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
    began, count = time.monotonic(), 0
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
    return LoadResult(count, time.monotonic() - began, tuple(unread))


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
    dims = [_place(runs) for runs in local_index_runs(tensor, layout.slices.get(name))]
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


def _place(runs: Runs) -> Placed:
    offsets = itertools.accumulate((stop - start for start, stop in runs), initial=0)
    return [(start, stop, offset) for (start, stop), offset in zip(runs, offsets, strict=False)]


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
                view = source.get_slice(part.key)
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
        row_bytes = itemsize * math.prod(high - low for low, high, _ in inner)
        step = max(1, _PIECE // row_bytes)
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
