"""Parts of tensors on this rank, and exact conversion between parts and full tensors.

Tensor parallelism replaces parameters by plain local tensors (no DTensor): a layer then computes on its part, and the
collectives are at the borders of its region. The slices are recorded here, by canonical parameter name. FSDP2 then
shards the local tensors as if they were whole: a local part is FSDP2's chunk (a DTensor's placements) of a
tensor-parallel `Slice`, and so are its gradient and optimizer moments.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ..compute.capabilities import copy_to_device
from ..config import MESH_AXES
from .mesh import EXPERT_SHARDS, SHARDS, ProcessMesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Slice:
    """Indices along `dim` that this rank holds of a tensor whose `dim` has `size` entries in all."""

    dim: int
    size: int
    runs: tuple[tuple[int, int], ...]
    """Half-open runs of global indices, in local order; several for fused projections (GPT-2's qkv)."""
    axis: str = "tp"
    """The mesh's axis whose ranks have the other indices."""

    @classmethod
    def part(cls, dim: int, size: int, *, rank: int, width: int, fused: int = 1, axis: str = "tp") -> Slice:
        """Return the `rank`-th of `width` parts of each of `fused` equal blocks along `dim`: ⌈block / width⌉ indices,
        the last ones fewer."""
        assert size % fused == 0, (size, fused)
        block = size // fused
        start, stop = _chunk_bounds(block, rank, width)
        return cls(dim, size, tuple((b * block + start, b * block + stop) for b in range(fused)), axis)

    @property
    def local_size(self) -> int:
        """Number of indices on this rank."""
        return sum(stop - start for start, stop in self.runs)

    def indices(self) -> Tensor:
        """Return the global indices in local order, int64 (local size,)."""
        return torch.cat([torch.arange(start, stop) for start, stop in self.runs])

    def take(self, whole: Tensor) -> Tensor:
        """Return the local part of a full tensor."""
        return torch.cat([whole.narrow(self.dim, start, stop - start) for start, stop in self.runs], dim=self.dim)


@dataclass
class TensorParallelLayout:
    """Slices of a model along tp and ep: empty without these axes."""

    slices: dict[str, Slice] = field(default_factory=dict)
    """Slice by canonical name for every parameter of which this rank holds a part; the others are whole on every rank
    of tp and ep."""
    partial: set[str] = field(default_factory=set)
    """Trainable parameters that are whole on every tp rank but whose gradient must be summed over tp (A of a
    column-parallel layer, B of a row-parallel one)."""

    splits_tokens: bool = False
    """True if tp ranks have tokens of their own between the regions."""
    gathered: set[str] = field(default_factory=set)
    """Entry modules of regions whose inner tensors are whole on every rank."""

    def first_features(self, modules: Iterable[str]) -> dict[str, int]:
        """Return the first global feature of the input of each of these dropout modules, if features are sliced: before
        the adapter of a row layer, and between the two layers of T5's feed-forward."""
        features = {}
        for name in modules:
            layer, _, leaf = name.rpartition(".")
            next_weight = {"lora_dropout": f"{layer}.lora_A.weight", "dropout": f"{layer}.wo.weight"}.get(leaf, "")
            if (next_slice := self.slices.get(next_weight)) is not None:
                features[name] = next_slice.runs[0][0]
        return features

    def has_own_experts(self, name: str) -> bool:
        """True if `name` is a parameter of experts that this rank of ep has and others do not."""
        return name in self.slices and self.slices[name].axis == "ep"

    def divided_over(self, name: str, parameter: Tensor) -> tuple[tuple[str, ...], ...]:
        """Return the axes, in groups, over whose ranks the parts of `parameter` are spread."""
        own = self.slices.get(name)
        shards = EXPERT_SHARDS if self.has_own_experts(name) else SHARDS
        return (*([shards] if isinstance(parameter, DTensor) else ()), *(() if own is None else [(own.axis,)]))

    def shape(self, name: str, local: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """Return the full shape of the parameter `name` whose tensor-parallel part has the shape `local_part`."""
        shape = list(local)
        if name in self.slices:
            shape[self.slices[name].dim] = self.slices[name].size
        return tuple(shape)


Runs = tuple[tuple[int, int], ...]
Placed = list[tuple[int, int, int]]
"""Half-open runs of indices along a dim of a full tensor, each with its first index in the local part."""
# Entries of a packed buffer start at a multiple of this many bytes, so that they can be viewed as any dtype.
_ALIGNED = 16


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of `tensor`: writing to it writes to `tensor`."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_index_runs(parameter: Tensor, tp_slice: Slice | None) -> list[Runs]:
    """Return per dim the half-open runs of global indices that the local part of `parameter` consists of, in order."""
    runs: list[Runs] = [((0, size),) for size in parameter.shape]
    if tp_slice is not None:
        runs[tp_slice.dim] = tp_slice.runs
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for mesh_dim, dim in _sharded_dims(parameter):
            start, stop = _chunk_bounds(parameter.shape[dim], mesh.get_local_rank(mesh_dim), mesh.size(mesh_dim))
            runs[dim] = select_runs(runs[dim], start, stop)
    return runs


def _sharded_dims(tensor: DTensor) -> list[tuple[int, int]]:
    """Return pairs of mesh dim and tensor dim along which `tensor` is sharded."""
    pairs = [(i, p.dim) for i, p in enumerate(tensor.placements) if isinstance(p, Shard)]
    assert len({dim for _, dim in pairs}) == len(pairs), tensor.placements
    return pairs


def _chunk_bounds(size: int, rank: int, width: int) -> tuple[int, int]:
    """Return the indices of `size` that a `Shard` gives to `rank`: chunks of ⌈size / width⌉, the last ones short or
    empty."""
    step = -(-size // width)
    return min(rank * step, size), min((rank + 1) * step, size)


def select_runs(runs: Runs, start: int, stop: int) -> Runs:
    """Return the indices number `start` to `stop` of the concatenated `runs`."""
    selected, offset = [], 0
    for first, last in runs:
        low, high = max(first, first + start - offset), min(last, first + stop - offset)
        if low < high:
            selected.append((low, high))
        offset += last - first
    return tuple(selected)


def place_runs(runs: Iterable[tuple[int, int]]) -> Placed:
    """Return runs in local order with the local index of each."""
    placed, offset = [], 0
    for start, stop in runs:
        placed.append((start, stop, offset))
        offset += stop - start
    return placed


@torch.no_grad()
def copy_local_part(
    tensor: Tensor, whole: Tensor, tp_slice: Slice | None = None, *, parameter: Tensor | None = None
) -> None:
    """Copy this rank's part of `whole` into `tensor`, a parameter or one that is sharded like `parameter`."""
    target = local_part(tensor)
    for dim, runs in enumerate(local_index_runs(tensor if parameter is None else parameter, tp_slice)):
        parts = [whole.narrow(dim, start, stop - start) for start, stop in runs] or [whole.narrow(dim, 0, 0)]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    assert target.shape == whole.shape, (target.shape, whole.shape)
    target.copy_(whole)


@torch.no_grad()
def gather_full_tensors(
    tensors: Mapping[str, Tensor], *, parameters: Mapping[str, Tensor], layout: TensorParallelLayout, world: ProcessMesh
) -> dict[str, Tensor]:
    """Gather `tensors` (parameters, gradients or moments by canonical name, with the parameter of each), by one
    collective for each axis along which any of them is sharded.

    Collective over the FSDP axis, ep and tp: every rank there calls it with the same names in the same order, and gets
    the same full tensors on `world.device`. Unsharded tensors are returned as they are, not copied.
    """
    parts = {name: local_part(tensor).to(world.device) for name, tensor in tensors.items()}
    meshes: dict[tuple[DeviceMesh, int], dict[str, int]] = {}
    for name in parts:
        parameter = parameters[name]
        if isinstance(parameter, DTensor):
            for mesh_dim, dim in _sharded_dims(parameter):
                meshes.setdefault((parameter.device_mesh, mesh_dim), {})[name] = dim
    for (mesh, mesh_dim), dims in meshes.items():
        width = mesh.size(mesh_dim)
        shapes = {name: _chunk_shapes(parameters[name].shape, dim, width) for name, dim in dims.items()}
        chunks = _all_gather_bytes({name: parts[name] for name in dims}, shapes, mesh.get_group(mesh_dim), width)
        parts |= {name: torch.cat(chunks[name], dim) for name, dim in dims.items()}
    for axis in ("ep", "tp"):
        width = world.width(axis)
        rank_slices = {
            name: [Slice.part(own.dim, own.size, rank=rank, width=width, fused=len(own.runs)) for rank in range(width)]
            for name, own in layout.slices.items()
            if name in parts and own.axis == axis
        }
        if width > 1 and rank_slices:
            shapes = {
                name: [_resize(parts[name].shape, each.dim, each.local_size) for each in slices]
                for name, slices in rank_slices.items()
            }
            chunks = _all_gather_bytes({name: parts[name] for name in rank_slices}, shapes, world.group(axis), width)
            parts |= {name: _join_slices(chunks[name], slices) for name, slices in rank_slices.items()}
    return parts


@torch.no_grad()
def save_parts(
    file: Path, groups: Mapping[str, Mapping[str, Tensor]], *, layout: TensorParallelLayout, world: ProcessMesh
) -> None:
    """Write this rank's parts of tensors as `group/name` to a safetensors file, without those that a rank before it
    has too; no file if none is left.

    groups: tensors by the canonical name of the parameter that each is sharded like.
    """
    from safetensors.torch import save_file

    own, indices = {}, {}
    for group, tensors in groups.items():
        for name, tensor in tensors.items():
            divided = {"pp", *itertools.chain(*layout.divided_over(name, tensor))}
            part = local_part(tensor)
            if (part.numel() or not tensor.numel()) and not any(
                world.index(axis) for axis in MESH_AXES if axis not in divided
            ):
                own[f"{group}/{name}"] = part.cpu().contiguous()
                runs = local_index_runs(tensor, layout.slices.get(name))
                indices[f"{group}/{name}"] = json.dumps([layout.shape(name, tensor.shape), runs])
    if own:
        save_file(own, file, metadata=indices)


@torch.no_grad()
def join_parts(files: Iterable[Path], target: Path) -> None:
    """Write the full tensors of which `save_parts` wrote parts to `files` to `target`, with one in memory at a time."""
    from safetensors import safe_open

    with contextlib.ExitStack() as stack:
        parts: dict[str, list[tuple[Any, list[Runs]]]] = defaultdict(list)
        shapes: dict[str, list[int]] = {}
        for file in files:
            source: Any = stack.enter_context(safe_open(file, "pt"))
            for name, text in source.metadata().items():
                shapes[name], runs = json.loads(text)
                parts[name].append((source, runs))
        firsts = {name: found[0][0] for name, found in parts.items()}
        sizes = {name: firsts[name].get_tensor(name).itemsize for name in shapes}
        header, end = {}, 0
        for name in sorted(shapes, key=lambda name: (-sizes[name], name)):  # so every tensor is aligned
            dtype, start = firsts[name].get_slice(name).get_dtype(), end
            end += sizes[name] * math.prod(shapes[name])
            header[name] = {"dtype": dtype, "shape": shapes[name], "data_offsets": [start, end]}
        lines = json.dumps(header).encode()
        lines += b" " * (-len(lines) % 8)
        with target.open("wb") as output:
            output.write(len(lines).to_bytes(8, "little") + lines)
            for name in header:
                whole = _join_part_files(name, parts[name], shapes[name])
                output.write(whole.view(-1).view(torch.uint8).numpy().data)


def _join_part_files(name: str, parts: Sequence[tuple[Any, list[Runs]]], shape: Sequence[int]) -> Tensor:
    """Return the full tensor `name` from its parts, each an open file and the runs of indices per dim."""
    pieces = [(source.get_tensor(name), runs) for source, runs in parts]
    whole = pieces[0][0].new_empty(shape)
    for piece, runs in pieces:
        for placed in itertools.product(*map(place_runs, runs)):
            target = tuple(slice(start, stop) for start, stop, _ in placed)
            local = tuple(slice(first, first + stop - start) for start, stop, first in placed)
            whole[target] = piece[local]
    return whole


def sum_parts(values: Tensor, divided: Sequence[tuple[tuple[str, ...], ...]], *, world: ProcessMesh) -> Tensor:
    """Return `values` [≥ n], computed from this rank's parts of n parameters, summed over all parts of each.

    divided: of each parameter, `TensorParallelLayout.divided_over`. Collective over these axes.
    """
    for axes in dict.fromkeys(axes for kind in divided for axes in kind):
        members = [index for index, kind in enumerate(divided) if axes in kind]
        index = copy_to_device(torch.tensor(members), values.device)
        values[index] = world.sum(values[index], *axes)
    return values


def _chunk_shapes(shape: torch.Size, dim: int, width: int) -> list[torch.Size]:
    bounds = [_chunk_bounds(shape[dim], rank, width) for rank in range(width)]
    return [_resize(shape, dim, stop - start) for start, stop in bounds]


def _resize(shape: torch.Size, dim: int, size: int) -> torch.Size:
    return torch.Size([*shape[:dim], size, *shape[dim + 1 :]])


def _all_gather_bytes(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, list[torch.Size]], group: dist.ProcessGroup, width: int
) -> dict[str, list[Tensor]]:
    """Return every rank's `tensors`, by name in rank order, through one all-gather of bytes."""
    starts, size = {}, 0
    for name, tensor in tensors.items():
        starts[name] = size
        largest = max(shape.numel() for shape in shapes[name]) * tensor.itemsize
        size += -(-largest // _ALIGNED) * _ALIGNED
    own = torch.zeros(size, dtype=torch.uint8, device=next(iter(tensors.values())).device)
    for name, tensor in tensors.items():
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        own[starts[name] : starts[name] + len(flat)].copy_(flat)
    buffer = torch.empty(width * size, dtype=torch.uint8, device=own.device)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    gather(buffer, own, group=group)
    gathered: dict[str, list[Tensor]] = {name: [] for name in tensors}
    for rank in range(width):
        for name, tensor in tensors.items():
            shape, start = shapes[name][rank], rank * size + starts[name]
            piece = buffer[start : start + shape.numel() * tensor.itemsize]
            gathered[name].append(piece.view(tensor.dtype).view(shape))
    return gathered


def _join_slices(parts: list[Tensor], slices: list[Slice]) -> Tensor:
    """Return the full tensor from the parts of all tensor-parallel ranks."""
    joined = parts[0].new_empty(_resize(parts[0].shape, slices[0].dim, slices[0].size))
    for part, own in zip(parts, slices, strict=True):
        joined.index_copy_(own.dim, own.indices().to(part.device), part)
    return joined
