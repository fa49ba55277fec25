"""Rows of metrics.jsonl whose values stay on the device until they are due, and are then read in one transfer.

A read waits for all queued work, so a GPU whose every step is read idles while the host prepares the next one. A CPU
has nothing queued and is read at once. Elsewhere rows are buffered until there are ten or a second has passed,
whichever is sooner, and until someone needs them, as a checkpoint does. No row is dropped or reordered.

On a mesh the read also carries what the ranks have to agree on, so that a step waits at most once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..compute.capabilities import capabilities

if TYPE_CHECKING:
    from flatshift.regularizers.protocol import MetricTensors

    from ..parallel.mesh import ProcessMesh

_PATIENCE = 1.0
"""Longest time a row is buffered, approximately, in seconds."""


@dataclass
class MetricsRow:
    """A row of metrics.jsonl that is not written yet."""

    step: int
    values: dict[str, Any]
    """Values known on the host, in the order of the row; `loss` and `grad_norm` are filled in when they are read."""
    pending: dict[str, Tensor] = field(default_factory=dict)
    """Values on the device: one number each."""
    figures: list[MetricTensors] = field(default_factory=list)
    """Metrics appended after them, in order."""
    end: dict[str, Any] = field(default_factory=dict)
    """Values at the very end of the row."""

    @property
    def vectors(self) -> list[Tensor]:
        """All tensors to read, 1-D each."""
        return [*(value.reshape(1) for value in self.pending.values()), *(part.values for part in self.figures)]

    def complete(self, numbers: Iterator[list[float]]) -> dict[str, Any]:
        """Return the complete row; numbers: those of `vectors`."""
        found = {name: next(numbers)[0] for name in self.pending}
        named = [part.named(next(numbers)) for part in self.figures]
        line = {**self.values, **found}
        for each in (*named, self.end):
            line.update(each)
        return line


def read_numbers(tensors: Sequence[Tensor]) -> list[list[float]]:
    """Return the numbers of 1-D tensors; those on a device are read in one transfer."""
    away = [i for i, tensor in enumerate(tensors) if capabilities(tensor.device).unread > 1]
    found = [[] if i in away else tensor.tolist() for i, tensor in enumerate(tensors)]
    if away:
        flat = torch.cat([tensors[i].detach().double() for i in away]).tolist()
        for i in away:
            count = tensors[i].numel()
            found[i], flat = flat[:count], flat[count:]
    return found


class MetricsBuffer:
    """Buffer of metrics rows not yet copied to the host. Every rank of a mesh calls the same methods."""

    def __init__(self, world: ProcessMesh) -> None:
        self._world = world
        self._most = self._every = capabilities(world.device).unread
        self._lines: list[MetricsRow] = []
        self._asked = False
        self._since = time.monotonic()

    @property
    def reads_are_free(self) -> bool:
        """True if reading is free, so that every step is read before it is applied."""
        return self._most == 1

    @property
    def due(self) -> bool:
        """True if enough rows are buffered."""
        return len(self._lines) >= self._every

    def add(self, line: MetricsRow) -> None:
        """Append a row; rows are written in this order."""
        self._lines.append(line)

    def request_stop(self, flag: bool) -> None:
        """Set a flag (to stop) that all ranks learn of with the next read, if any rank sets it."""
        self._asked |= flag

    def flush(self, write: Callable[[dict[str, Any]], None], *, refuse: Callable[[int, dict[str, Any]], None]) -> bool:
        """Read all buffered rows and `write` each, in order; return True if any rank set its flag. Collective.

        `refuse` is called before, with the step and the row, and raises for the first one whose loss or gradient is not
        a finite number. Later steps were already applied, on invalid weights; but every save comes after this, so
        nothing of them is kept. (An optimizer that skipped such a step on the device would continue a run that is about
        to end.)
        """
        lines, asked = self.take()
        for step, line in lines:
            if not line.get("skipped"):
                refuse(step, line)
            write(line)
        return asked

    def take(self) -> tuple[list[tuple[int, dict[str, Any]]], bool]:
        """Return step and row of all that is buffered, and True if any rank set its flag since the last call.
        Collective.

        Nothing is read if the buffer is empty.
        """
        if not self._lines:
            return [], False
        lines, self._lines = self._lines, []
        asked, self._asked = self._asked, False
        vectors = [vector for line in lines for vector in line.vectors]
        now = time.monotonic()
        each, self._since = (now - self._since) / max(len(lines), 1), now
        shared = not self.reads_are_free and self._world.size > 1
        if shared:
            agreed = torch.stack([torch.full((), value, device=self._world.device) for value in (float(asked), each)])
            dist.all_reduce(agreed, dist.ReduceOp.MAX)
            vectors.append(agreed)
        numbers = iter(read_numbers(vectors))
        made = [(line.step, line.complete(numbers)) for line in lines]
        if shared:
            told, each = next(numbers)
            asked = bool(told)
        if not self.reads_are_free:
            # adapt to the step time, so that no row waits much longer than `_PATIENCE`
            self._every = min(self._most, max(1, math.floor(_PATIENCE / max(each, 1e-9))))
        return made, asked
