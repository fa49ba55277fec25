"""Counts what a piece of code sends over a device mesh: every collective and message, by axis and kind, in bytes.

    with Collectives(world) as seen:
        engine.forward_backward(...)
    seen.bytes["dp", "all-gather"], seen.calls["tp", "all-reduce"]

Bytes are those of the whole tensor that a collective moves: what an all-gather makes, what a reduce-scatter or an
all-reduce adds up, what is sent or broadcast. On a ring of n ranks each rank sends (n − 1)/n of it, for an all-reduce
twice that. Calls of at most 64 bytes (a loss, a norm, a verdict) are counted apart, as `SCALARS`.

torch sends every call of torch.distributed through its dispatcher, also those of FSDP2, autograd and the pipeline's
schedules; a call of a kind that is not known here is an error, so that nothing is missed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

from flatshift.finetune.parallel.mesh import ProcessMesh

SCALARS = "scalars"
_SMALL = 64
_KINDS = {
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "broadcast": "broadcast",
    "send": "send",
}
_REDUCTIONS = ("sum", "avg", "max", "min", "product", "band", "bor", "bxor")
_SILENT = ("recv", "wait_tensor", "wrap_tensor", "barrier", "monitored_barrier")


class Collectives(TorchDispatchMode):
    """See the module's text; counts of this rank while it is entered."""

    def __init__(self, world: ProcessMesh) -> None:
        super().__init__()
        self._world = world
        self._axes: dict[str, str] = {}
        self.bytes: Counter[tuple[str, str]] = Counter()
        """By (axis, kind); several axes together are joined by `+`, in mesh order."""
        self.calls: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented  # seen again with the local tensors
        if "c10d" in func.namespace:
            self._note(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        name = func._schema.name.partition("::")[2].lstrip("_")
        if name.startswith(_SILENT):
            return
        kind = next((kind for start, kind in _KINDS.items() if name.startswith(start)), None)
        assert kind is not None, f"unknown collective {name}"
        given = (*args, *kwargs.values())
        group = _group(given)
        size, axis = _largest(given), self._axis(group)
        if kind == "all-gather" and func.namespace != "c10d":  # a functional one is told its input only
            size *= group.size()
        kind = SCALARS if size <= _SMALL and kind != "send" else kind
        self.bytes[axis, kind] += size
        self.calls[axis, kind] += 1

    def _axis(self, group: dist.ProcessGroup) -> str:
        """The axes along which the ranks of `group` differ."""
        if group.group_name not in self._axes:
            assert self._world.mesh is not None
            whole = self._world.mesh.mesh
            places = [(whole == rank).nonzero()[0] for rank in dist.get_process_group_ranks(group)]
            differ = (torch.stack(places) != places[0]).any(0).tolist()
            axes: tuple[str, ...] = self._world.mesh.mesh_dim_names or ()
            self._axes[group.group_name] = "+".join(axis for axis, yes in zip(axes, differ, strict=True) if yes)
        return self._axes[group.group_name]

    def figures(self) -> dict[str, list[int]]:
        """`{"axis kind": [bytes, calls]}`, ready for JSON."""
        return {f"{axis} {kind}": [size, self.calls[axis, kind]] for (axis, kind), size in sorted(self.bytes.items())}


def _largest(given: Any) -> int:
    """Bytes of the largest argument: a tensor, or the tensors of a list together."""
    sizes = [0]
    for item in given:
        if isinstance(item, Tensor):
            sizes.append(item.nbytes)
        elif isinstance(item, list | tuple):
            sizes.append(sum(tensor.nbytes for tensor in _tensors(item)))
    return max(sizes)


def _tensors(items: Any) -> Iterator[Tensor]:
    for item in items:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, list | tuple):
            yield from _tensors(item)


def _group(given: Any) -> dist.ProcessGroup:
    for item in given:
        if isinstance(item, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(item)
            except RuntimeError:  # a reduction's kind
                continue
    name: Any = next(item for item in given if isinstance(item, str) and item not in _REDUCTIONS)
    return distributed_c10d._resolve_process_group(name)
