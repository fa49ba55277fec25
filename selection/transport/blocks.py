"""Sums over rows whose bits do not depend on how the rows are divided among threads and processes.

Rows are added up in blocks of `BLOCK`, in order; the blocks' sums in the binary tree over block numbers 0, 1, 2, …,
whose inner nodes are there as soon as their two children are. Whoever holds a range of blocks adds up the largest
whole subtrees in it, some two for each doubling of its length, and these are what travels. Scalars are added exactly
(Shewchuk's `math.fsum`), so that only their blocks need an order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from torch import Tensor

BLOCK = 4096
"""Rows of a block. A division of the pool is one of whole blocks, but for the last."""
_AT_ONCE = 256 * BLOCK

Node = tuple[int, int, Tensor]
"""(level, number, sum): the sum of blocks [number·2^level, (number + 1)·2^level)."""


def tiles(low: int, high: int, step: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most `step` rows that cover [low, high) and cross no border of a block."""
    while low < high:
        end = min(low + step, high, (low // BLOCK + 1) * BLOCK)
        yield low, end
        low = end


class Tree:
    """The sums of some blocks; `nodes` in the order of their blocks once all of a range were added in order."""

    def __init__(self, nodes: Iterable[Node] = ()):
        self.nodes: list[Node] = []
        for node in sorted(nodes, key=lambda node: node[1] << node[0]):
            self._push(node)

    def add(self, block: int, value: Tensor) -> None:
        """The sum of block number `block`; the tree keeps `value`."""
        self._push((0, block, value))

    def _push(self, node: Node) -> None:
        while self.nodes:
            level, number, value = self.nodes[-1]
            if level != node[0] or number % 2 or number + 1 != node[1]:
                break
            self.nodes.pop()
            node = (level + 1, number // 2, value + node[2])
        self.nodes.append(node)

    def total(self) -> Tensor:
        """The sum of all blocks; what is left over of the last subtrees is added from the right."""
        value = self.nodes[-1][2]
        for _, _, before in reversed(self.nodes[:-1]):
            value = before + value
        return value


def block_sums(values: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """(⌈n / BLOCK⌉,) float64: Σ values·factors over each block of two (n,) arrays."""
    found = []
    for low in range(0, len(values), _AT_ONCE):
        product = values[low : low + _AT_ONCE] * factors[low : low + _AT_ONCE]
        whole = len(product) // BLOCK * BLOCK
        found.append(product[:whole].reshape(-1, BLOCK).sum(1))
        if whole < len(product):
            found.append(product[whole:].sum(keepdims=True))
    return np.concatenate(found)
