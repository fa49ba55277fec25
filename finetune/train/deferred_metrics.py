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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flatshift.regularizers.protocol import MetricTensors

from ..compute.capabilities import capabilities
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
    tensors: list[MetricTensors] = field(default_factory=list)
    """Metrics appended after them, in order."""
    end: dict[str, Any] = field(default_factory=dict)
    """Values at the very end of the row."""

    @property
    def vectors(self) -> list[Tensor]:
        """All tensors to read, 1-D each."""
        return [*(value.reshape(1) for value in self.pending.values()), *(metrics.values for metrics in self.tensors)]

    def complete(self, numbers: Iterator[list[float]]) -> dict[str, Any]:
        """Return the complete row; numbers: those of `vectors`."""
        row = self.values | {name: next(numbers)[0] for name in self.pending}
        for metrics in self.tensors:
            row |= metrics.named(next(numbers))
        return row | self.end


def read_numbers(tensors: Sequence[Tensor]) -> list[list[float]]:
    """Return the numbers of 1-D tensors; those on a device are read in one transfer."""
    remote = [i for i, tensor in enumerate(tensors) if capabilities(tensor.device).unread > 1]
    numbers = [[] if i in remote else tensor.tolist() for i, tensor in enumerate(tensors)]
    if remote:
        flat = torch.cat([tensors[i].detach().double() for i in remote]).tolist()
        for i in remote:
            count = tensors[i].numel()
            numbers[i], flat = flat[:count], flat[count:]
    return numbers


class MetricsBuffer:
    """Buffer of metrics rows not yet copied to the host. Every rank of a mesh calls the same methods."""

    def __init__(self, world: ProcessMesh) -> None:
        self._world = world
        self._maximum = self._every = capabilities(world.device).unread
        self._rows: list[MetricsRow] = []
        self._stop = False
        self._since = time.monotonic()

    @property
    def reads_are_free(self) -> bool:
        """True if reading is free, so that every step is read before it is applied."""
        return self._maximum == 1

    @property
    def due(self) -> bool:
        """True if enough rows are buffered."""
        return len(self._rows) >= self._every

    def add(self, row: MetricsRow) -> None:
        """Append a row; rows are written in this order."""
        self._rows.append(row)

    def request_stop(self, flag: bool) -> None:
        """Set a flag (to stop) that all ranks learn of with the next read, if any rank sets it."""
        self._stop |= flag

    def flush(self, write: Callable[[dict[str, Any]], None], *, refuse: Callable[[int, dict[str, Any]], None]) -> bool:
        """Read all buffered rows and `write` each, in order; return True if any rank set its flag. Collective.

        `refuse` is called before, with the step and the row, and raises for the first one whose loss or gradient is not
        a finite number. Later steps were already applied, on invalid weights; but every save comes after this, so
        nothing of them is kept. (An optimizer that skipped such a step on the device would continue a run that is about
        to end.)
        """
        rows, stop = self.take()
        for step, row in rows:
            if not row.get("skipped"):
                refuse(step, row)
            write(row)
        return stop

    def take(self) -> tuple[list[tuple[int, dict[str, Any]]], bool]:
        """Return step and row of all that is buffered, and True if any rank set its flag since the last call.
        Collective; nothing is read if the buffer is empty.
        """
        if not self._rows:
            return [], False
        buffered, self._rows = self._rows, []
        stop, self._stop = self._stop, False
        vectors = [vector for row in buffered for vector in row.vectors]
        now = time.monotonic()
        seconds, self._since = (now - self._since) / len(buffered), now
        shared = not self.reads_are_free and self._world.size > 1
        if shared:
            agreed = torch.stack([torch.full((), value, device=self._world.device) for value in (float(stop), seconds)])
            dist.all_reduce(agreed, dist.ReduceOp.MAX)
            vectors.append(agreed)
        numbers = iter(read_numbers(vectors))
        rows = [(row.step, row.complete(numbers)) for row in buffered]
        if shared:
            any_stop, seconds = next(numbers)
            stop = bool(any_stop)
        if not self.reads_are_free:
            # adapt to the step time, so that no row waits much longer than `_PATIENCE`
            self._every = min(self._maximum, max(1, math.floor(_PATIENCE / max(seconds, 1e-9))))
        return rows, stop
