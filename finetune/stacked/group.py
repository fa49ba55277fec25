"""The trained tensors of cells that have the same shapes, one below another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..parallel.engine import Engine


class Group:
    """Values and gradients of cells of one rank: each cell's parameters become slices of the stacked tensors."""

    def __init__(self, engines: Sequence[Engine], number: int = 0) -> None:
        """number: among the groups of a stack."""
        self.number = number
        self.values: dict[str, Tensor] = {}
        """By plain name, (cells, *shape)."""
        self.gradients: dict[str, Tensor] = {}
        for name in engines[0].parameters:
            stacked = torch.stack([engine.parameters[name].detach() for engine in engines])
            for place, engine in enumerate(engines):
                engine.parameters[name].data = stacked[place]
            self.values[name], self.gradients[name] = stacked, torch.empty_like(stacked)
        self._own = [{name: g[place] for name, g in self.gradients.items()} for place in range(len(engines))]

    def hand_out(self, place: int, engine: Engine, names: set[str]) -> None:
        """Make the gradients of one cell those that were written; the others have none, as in a loop alone."""
        own = self._own[place]
        for name, parameter in engine.parameters.items():
            parameter.grad = own[name] if name in names else None


@dataclass
class Run:
    """Neighbouring cells of a group in one pass, with equally many rows each."""

    group: Group
    cells: slice
    """Of the group."""
    rows: slice
    """Of the pass."""
    adds: bool
    """Whether the gradients of this pass come on top of those of earlier micro-batches."""
    written: set[str] = field(default_factory=set)
    """Plain names of the parameters whose gradient this pass has written already."""

    @property
    def count(self) -> int:
        """How many cells."""
        return self.cells.stop - self.cells.start

    def tokens(self, each: int) -> slice:
        """Its part of a flat batch with `each` tokens a row."""
        return slice(self.rows.start * each, self.rows.stop * each)

    def value(self, name: str) -> Tensor:
        """(cells, *shape) of a parameter."""
        return self.group.values[name][self.cells]

    def put(self, name: str, left: Tensor, right: Tensor, *, scale: float = 1.0) -> None:
        """Add scale · `left` @ `right`, (cells, p, q), to the gradient of a parameter; the first time it is set."""
        gradient = self.group.gradients[name][self.cells]
        adds = self._adds(name)
        if gradient.dtype == left.dtype:
            gradient.baddbmm_(left, right, beta=float(adds), alpha=scale)
            return
        self._store(gradient, torch.bmm(left, right).to(gradient.dtype).mul_(scale), adds)

    def put_value(self, name: str, value: Tensor) -> None:
        """Add `value`, (cells, *shape), to the gradient of a parameter; the first time it is set."""
        adds = self._adds(name)
        self._store(self.group.gradients[name][self.cells], value, adds)

    def _adds(self, name: str) -> bool:
        adds = self.adds or name in self.written
        self.written.add(name)
        return adds

    def _store(self, gradient: Tensor, value: Tensor, adds: bool) -> None:
        gradient.add_(value) if adds else gradient.copy_(value)
