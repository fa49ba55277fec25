"""Lines of metrics.jsonl whose figures lie on the device until they are due, and are then read in one transfer.

A read waits for all that the device was asked to do, so a GPU whose every update is read stands still while the host
prepares the next one. A CPU has nothing under way, and is read at once. Elsewhere lines wait for each other: until ten
have come together or a second has passed, whichever is sooner, and until somebody needs them, as a checkpoint does. No
line is left out and none changes place.

On a mesh the read carries what the ranks have to agree on as well, so that an update has one wait at most.
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
"""Seconds that a line waits, about."""


@dataclass
class MetricsRow:
    """A line of metrics.jsonl that was not written yet."""

    step: int
    told: dict[str, Any]
    """What the host knows, in the order of the line; `loss` and `grad_norm` are filled in when they are read."""
    scalars: dict[str, Tensor] = field(default_factory=dict)
    """What the device knows: one number each."""
    figures: list[MetricTensors] = field(default_factory=list)
    """And what is added at the end of the line, in order."""
    end: dict[str, Any] = field(default_factory=dict)
    """What stands behind all that."""

    @property
    def vectors(self) -> list[Tensor]:
        """All that has to be read, 1-D each."""
        return [*(value.reshape(1) for value in self.scalars.values()), *(part.values for part in self.figures)]

    def complete(self, numbers: Iterator[list[float]]) -> dict[str, Any]:
        """The whole line; numbers: those of `vectors`."""
        found = {name: next(numbers)[0] for name in self.scalars}
        named = [part.named(next(numbers)) for part in self.figures]
        line = {**self.told, **found}
        for each in (*named, self.end):
            line.update(each)
        return line


def read(tensors: Sequence[Tensor]) -> list[list[float]]:
    """The numbers of 1-D tensors; of those that lie on a device in one transfer."""
    away = [i for i, tensor in enumerate(tensors) if capabilities(tensor.device).unread > 1]
    found = [[] if i in away else tensor.tolist() for i, tensor in enumerate(tensors)]
    if away:
        flat = torch.cat([tensors[i].detach().double() for i in away]).tolist()
        for i in away:
            count = tensors[i].numel()
            found[i], flat = flat[:count], flat[count:]
    return found


class MetricsBuffer:
    """The lines of one stage that wait; every rank of a mesh calls the same verbs."""

    def __init__(self, world: ProcessMesh) -> None:
        self._world = world
        self._most = self._every = capabilities(world.device).unread
        self._lines: list[MetricsRow] = []
        self._asked = False
        self._since = time.monotonic()

    @property
    def at_once(self) -> bool:
        """Whether reading costs nothing, so that every update is read before it is made."""
        return self._most == 1

    @property
    def due(self) -> bool:
        """Whether enough lines have come together."""
        return len(self._lines) >= self._every

    def add(self, line: MetricsRow) -> None:
        """The next line, in the order in which they are to be written."""
        self._lines.append(line)

    def ask(self, flag: bool) -> None:
        """Something that a rank wants all ranks to hear of with the next read (to stop)."""
        self._asked |= flag

    def tell(self, write: Callable[[dict[str, Any]], None], *, refuse: Callable[[int, dict[str, Any]], None]) -> bool:
        """Read all lines that wait and `write` each, in order; whether any rank asked. Collective.

        `refuse` is called before, with the step and the line, and raises for the first one whose loss or gradient is
        not a finite number. The updates behind it were made already, on weights that are none any more; but every
        save comes after this, so nothing of them is kept. (An optimizer that left such an update out on the device
        would go on from there with a run that is to end.)
        """
        lines, asked = self.take()
        for step, line in lines:
            if not line.get("skipped"):
                refuse(step, line)
            write(line)
        return asked

    def take(self) -> tuple[list[tuple[int, dict[str, Any]]], bool]:
        """Step and line of all that waited, and whether any rank asked since the last time; where none waited, nothing
        is read. Collective."""
        if not self._lines:
            return [], False
        lines, self._lines = self._lines, []
        asked, self._asked = self._asked, False
        vectors = [vector for line in lines for vector in line.vectors]
        now = time.monotonic()
        each, self._since = (now - self._since) / max(len(lines), 1), now
        shared = not self.at_once and self._world.size > 1
        if shared:
            agreed = torch.stack([torch.full((), value, device=self._world.device) for value in (float(asked), each)])
            dist.all_reduce(agreed, dist.ReduceOp.MAX)
            vectors.append(agreed)
        numbers = iter(read(vectors))
        made = [(line.step, line.complete(numbers)) for line in lines]
        if shared:
            told, each = next(numbers)
            asked = bool(told)
        if not self.at_once:
            self._every = min(self._most, max(1, math.floor(_PATIENCE / max(each, 1e-9))))
        return made, asked
