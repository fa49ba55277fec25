"""Loading of weights from safetensors files directly into this rank's part of a model that was built on meta.

No rank ever has a whole copy: of each tensor it reads the indices of its tensor-parallel slice and its FSDP2 chunk, a
few rows at a time, and casts them while reading. If transformers has to convert tensors (stacked experts), rank 0
creates them with `from_pretrained` and every rank copies its part of each.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
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

Progress = Callable[[int, int, float], None]
"""Called with (bytes read, bytes to read, bytes/s) about twice a second and at the end."""
_PIECE = 8 << 20  # bytes of the file copied at once
_OFTEN = 0.5  # seconds between two progress reports


@dataclass(frozen=True)
class LoadResult:
    """Result of `load_weights` on this rank."""

    bytes: int
    """Bytes read from the files, in their dtypes."""
    seconds: float
    unread: tuple[str, ...]
    """Full names of the model's parameters that no file has: adapters and new heads, still without values."""


def materialize(model: nn.Module, device: torch.device | str, *, offload: bool = False) -> None:
    """Allocate every meta tensor uninitialised on `device`: of a DTensor only the local shard.

    Other tensors (buffers, which were real all along) move to `device` with their values. Shared parameters stay
    shared.

    Args:
        offload: keep FSDP2's shards in host memory (`mesh.offload`), only the rest on `device`.
    """
    shared = defaultdict(list)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                shared[id(parameter)].append((module, name))

    def move(tensor: Tensor) -> Tensor:
        place = "cpu" if offload and isinstance(tensor, DTensor) else device
        return torch.empty_like(tensor, device=place) if tensor.is_meta else tensor.to(place)

    model._apply(move)  # torch's own traversal, so that FSDP2 registers the new shards
    for (first, name), *others in shared.values():
        for module, other in others:
            module._parameters[other] = first._parameters[name]


@torch.no_grad()
def load_weights(
    model: nn.Module,
    checkpoint: CheckpointFiles,
    *,
    layout: TensorParallelLayout,
    world: ProcessMesh,
    say: Progress | None = None,
) -> LoadResult:
    """Fill the base model's tensors in `model`: a whole model or a pipeline's part of it, with PEFT, sliced, sharded.

    Collective if and only if `checkpoint.converted` is not empty: then every rank of the default group calls it once.

    Raises:
        UserError: a file changed since its header was read, or transformers cannot convert it.
    """
    wanted, unread = _tensors_to_load(model, checkpoint)
    files: dict[Path, list[tuple[str, Tensor]]] = defaultdict(list)
    total = 0
    for name, tensor in wanted:
        assert checkpoint.shapes[name] == layout.shape(name, tensor.shape), name
        if name in checkpoint.keys:
            entry = checkpoint.entries[checkpoint.keys[name]]
            files[entry.file].append((name, tensor))
            total += local_part(tensor).numel() * entry.dtype.itemsize
    watch = _ProgressMeter(total, say)
    for file, tensors in files.items():
        tensors.sort(key=lambda pair: checkpoint.entries[checkpoint.keys[pair[0]]].offset)
        _read_file(file, tensors, checkpoint, layout, watch)
    if checkpoint.converted:
        converted = [(name, tensor) for name, tensor in wanted if name in checkpoint.converted]
        _broadcast_converted(converted, checkpoint, layout, world)
    return LoadResult(watch.done, watch.finish(), tuple(unread))


def _tensors_to_load(model: nn.Module, checkpoint: CheckpointFiles) -> tuple[list[tuple[str, Tensor]], list[str]]:
    """Return the tensors to fill by canonical name (a name may occur twice: a head and PEFT's copy of it), and the
    rest."""
    new = {*checkpoint.missing, *checkpoint.mismatched} - set(checkpoint.keys)
    wanted: list[tuple[str, Tensor]] = []
    unread = []
    for full, parameter in model.named_parameters():
        name = canonical_name(full)
        if name in checkpoint.keys or name in checkpoint.converted:
            wanted.append((name, parameter))
        else:
            assert name in new or name not in checkpoint.shapes, name
            unread.append(full)
    wanted += [(canonical_name(n), b) for n, b in model.named_buffers() if canonical_name(n) in checkpoint.keys]
    return [(name, tensor.detach()) for name, tensor in wanted], unread


def _read_file(
    file: Path,
    tensors: list[tuple[str, Tensor]],
    checkpoint: CheckpointFiles,
    layout: TensorParallelLayout,
    watch: _ProgressMeter,
) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as source:
            for name, tensor in tensors:
                key = checkpoint.keys[name]
                if tensor.ndim == 0:
                    local_part(tensor).copy_(source.get_tensor(key))
                    watch.add(checkpoint.entries[key].bytes)
                    continue
                view = source.get_slice(key)
                size = checkpoint.entries[key].dtype.itemsize
                for there, here in _copy_slices(local_index_runs(tensor, layout.slices.get(name)), size):
                    part = local_part(tensor)[here]
                    part.copy_(view[there])
                    watch.add(part.numel() * size)
    except (OSError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        raise UserError(f"{file} cannot be read any more ({str(error).splitlines()[0]}); was it replaced?") from error


def _copy_slices(held: list[Runs], itemsize: int) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yield slices of the file's tensor and of the local one that together cover it, each of at most `_PIECE` bytes."""
    offsets = [list(itertools.accumulate((stop - start for start, stop in runs), initial=0)) for runs in held]
    for numbers in itertools.product(*(range(len(runs)) for runs in held)):
        box = [held[dim][number] for dim, number in enumerate(numbers)]
        places = [offsets[dim][number] for dim, number in enumerate(numbers)]
        row = itemsize
        for start, stop in box[1:]:
            row *= stop - start
        rest = tuple(slice(start, stop) for start, stop in box[1:])
        target = tuple(slice(p, p + stop - start) for p, (start, stop) in zip(places[1:], box[1:], strict=True))
        step = max(1, _PIECE // row)
        start, stop = box[0]
        for first in range(start, stop, step):
            last = min(first + step, stop)
            yield (slice(first, last), *rest), (slice(places[0] + first - start, places[0] + last - start), *target)


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
    here = defaultdict(list)
    for name, tensor in tensors:
        here[name].append(tensor)
    for name in checkpoint.converted:
        whole = state.pop(name).contiguous() if world.rank == 0 else None
        if world.size > 1:
            whole = _broadcast(whole, checkpoint.shapes[name], checkpoint.dtype, world)
        for tensor in here[name]:
            assert whole is not None
            copy_local_part(tensor, whole, layout.slices.get(name))


def _broadcast(tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, world: ProcessMesh) -> Tensor:
    whole = torch.empty(shape, dtype=dtype, device=world.device) if tensor is None else tensor.to(world.device, dtype)
    dist.broadcast(whole.view(-1).view(torch.uint8), src=0)
    return whole


class _ProgressMeter:
    """Counts bytes and reports progress."""

    def __init__(self, total: int, say: Progress | None) -> None:
        self.total, self.done = total, 0
        self._say = say
        self._start = self._last = time.monotonic()

    def add(self, count: int) -> None:
        self.done += count
        now = time.monotonic()
        if self._say is not None and now - self._last >= _OFTEN:
            self._last = now
            self._say(self.done, self.total, self.done / (now - self._start))

    def finish(self) -> float:
        """Report a last time; return the seconds since the start."""
        seconds = time.monotonic() - self._start
        if self._say is not None:
            self._say(self.done, self.total, self.done / max(seconds, 1e-9))
        return seconds
