"""Processes that share a pool: each holds a shard of its rows, all hold the same target.

Communicated are sums of M numbers, scalars, the subsample's rows once and only to the first member, which solves it for
all, and error messages. Without a group every method is the identity. If every member but the last holds whole blocks
of rows (`flatshift.selection.transport.blocks`), no sum depends on the number of members, bit for bit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from flatshift.selection.errors import BadRow, SelectionError, TooLittleMemory
from flatshift.selection.transport.blocks import BLOCK, BlockSumTree, block_sums

_GRID = 4096  # grid points of a threshold that are counted at a time


class ProcessTeam:
    """`group`: a torch.distributed process group, None for a single process. Rows are ordered by rank."""

    def __init__(self, group: Any = None):
        self.group = group
        self.rank, self.size = 0, 1
        self.first_row = self.first_block = self.rows_of_all = 0
        if group is not None:
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def over(self, count: int) -> Self:
        """Return the team for each member's `count` rows, with `first_row` and `first_block` of this one, and
        `rows_of_all`."""
        counts = self.gather(count)
        team = type(self)(self.group)
        team.first_row = sum(counts[: self.rank])
        team.first_block = sum(-(-n // BLOCK) for n in counts[: self.rank])
        team.rows_of_all = sum(counts)
        return team

    def fold(self, tree: BlockSumTree) -> Tensor:
        """Return the sum of every member's blocks."""
        if self.size == 1:
            return tree.total()
        device = tree.nodes[0][2].device
        members = self.gather([(level, number, value.cpu().numpy()) for level, number, value in tree.nodes])
        nodes = ((level, number, torch.from_numpy(value)) for member in members for level, number, value in member)
        return BlockSumTree(nodes).total().to(device)

    def dot(self, values: np.ndarray, factors: np.ndarray) -> float:
        """Return Σ values·factors over every member's two arrays (n_r,) float64."""
        return math.fsum(np.concatenate(self.gather(block_sums(values, factors))).tolist())

    def gather(self, value: Any) -> list[Any]:
        """Return every member's small object, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def total(self, value: float) -> float:
        """Return the sum of every member's number, added in rank order, so that all get the same bits."""
        return math.fsum(self.gather(value)) if self.size > 1 else value

    def broadcast(self, value: Tensor) -> Tensor:
        """Return the first member's tensor: keeps members from drifting apart by different roundings."""
        if self.size == 1:
            return value
        buffer = value.clone()
        dist.broadcast(buffer, src=dist.get_global_rank(self.group, 0), group=self.group)
        return buffer

    def run_on_first(self, work: Callable[[], tuple[Any, ...]], device: torch.device) -> tuple[Any, ...]:
        """Run `work` on the first member only, and return its result (tensors on `device`, plain values) on all.

        The others meanwhile sleep in the group's broadcast, with gloo without using a processor. Raises the exception
        of `work` on the first member, and SelectionError with its message on the others.
        """
        if self.size == 1:
            return work()
        message: list[Any] = [None]
        failure: Exception | None = None
        if self.rank == 0:
            try:
                message = [tuple(value.cpu() if isinstance(value, Tensor) else value for value in work())]
            except Exception as error:  # of any kind: otherwise the others would wait for ever
                failure, message = error, [f"process 0 of {self.size}: {error}"]
        dist.broadcast_object_list(message, src=dist.get_global_rank(self.group, 0), group=self.group)
        if failure is not None:
            raise failure
        if isinstance(message[0], str):
            raise SelectionError(message[0])
        return tuple(value.to(device) if isinstance(value, Tensor) else value for value in message[0])

    def gather_rows(self, rows: np.ndarray, device: torch.device) -> np.ndarray | None:
        """Return every member's array (n_r, …), stacked by rank, on the first member; None on the others.

        device: one that the group's backend can send from.
        """
        if self.size == 1:
            return rows
        counts = self.gather(len(rows))
        width = int(np.prod(rows.shape[1:], dtype=np.int64)) * rows.dtype.itemsize
        buffer = torch.zeros(max(counts), width, dtype=torch.uint8, device=device)
        raw = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), width)
        buffer[: len(rows)] = torch.from_numpy(raw.copy()).to(device)
        buffers = [torch.empty_like(buffer) for _ in counts] if self.rank == 0 else None
        dist.gather(buffer, buffers, dst=dist.get_global_rank(self.group, 0), group=self.group)
        if buffers is None:
            return None
        shards = [shard[:count].cpu().numpy() for shard, count in zip(buffers, counts, strict=True)]
        return np.concatenate(shards).view(rows.dtype).reshape(-1, *rows.shape[1:])

    def agree(self, error: SelectionError | OSError | None) -> None:
        """Raise on every member the error of the first member that has one; no-op if none has.

        A single process raises `error` itself; so does a team for errors that include their place (BadRow,
        TooLittleMemory); for others, a SelectionError, or an OSError with the first member's errno.
        """
        if self.size == 1:
            if error is not None:
                raise error
            return
        names_place = isinstance(error, BadRow | TooLittleMemory)
        errors = self.gather(
            None if error is None
            else (type(error), vars(error)) if names_place
            else (str(error), getattr(error, "errno", None))
        )  # fmt: skip
        for rank, description in enumerate(errors):
            if description is not None:
                kind, details = description
                if isinstance(kind, type):
                    raise kind(**details)
                message = f"process {rank} of {self.size}: {kind}"
                raise SelectionError(message) if details is None else OSError(details, message)

    def check_same(self, name: str, *values: Any) -> None:
        """Raise SelectionError if members disagree about `values` (arrays or printable settings), called `name`."""
        if self.size == 1:
            return
        digest = hashlib.sha256()
        for value in values:
            digest.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
        if len(set(self.gather(digest.hexdigest()))) > 1:
            raise SelectionError(f"the processes differ in {name}; give every process the same")

    def smallest(self, *requests: tuple[Tensor, int]) -> list[float]:
        """Return for each (values, k) the k-th smallest (from 1) of all members' values: the largest score that a top-k
        selection takes. All are found by the same messages."""
        if self.size == 1:
            return [float(np.partition(values.cpu().numpy(), k - 1)[k - 1]) for values, k in requests]
        ordered = {id(values): np.sort(values.cpu().numpy()) for values, _ in requests}
        owns = [ordered[id(values)] for values, _ in requests]
        ends = self.gather([(float(own[0]), float(own[-1])) for own in owns])
        lows = [np.nextafter(min(end[i][0] for end in ends), -np.inf) for i in range(len(requests))]
        highs = [max(end[i][1] for end in ends) for i in range(len(requests))]
        # Fewer than k values are at most low, k or more are at most high: every message narrows the gap by _GRID.
        while any(np.nextafter(low, np.inf) < high for low, high in zip(lows, highs, strict=True)):
            grids = [
                np.linspace(low, high, _GRID + 2)[1:-1].clip(np.nextafter(low, np.inf), np.nextafter(high, -np.inf))
                for low, high in zip(lows, highs, strict=True)
            ]
            own_counts = [np.searchsorted(own, grid, side="right") for own, grid in zip(owns, grids, strict=True)]
            counts = torch.from_numpy(np.array(own_counts, dtype=np.int64)).to(requests[0][0].device)
            dist.all_reduce(counts, group=self.group)
            for i, (grid, count) in enumerate(zip(grids, counts.cpu().numpy(), strict=True)):
                above = int(np.searchsorted(count, requests[i][1]))
                lows[i] = grid[above - 1] if above > 0 else lows[i]
                highs[i] = grid[above] if above < len(grid) else highs[i]
        return [float(high) for high in highs]
