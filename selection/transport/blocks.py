"""Sums over rows that are bit for bit independent of the division of rows among threads and processes.

Rows are summed in blocks of `BLOCK`, in order; the blocks' sums in the binary tree over block numbers 0, 1, 2, …, whose
inner nodes are computed as soon as both children exist. The owner of a range of blocks sums the largest complete
subtrees in it, some two for each doubling of its length, and only these are communicated. Scalars are added exactly
(Shewchuk's `math.fsum`), so that only their blocks need an order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from torch import Tensor

BLOCK = 4096
"""Rows per block. Any division of the pool must consist of whole blocks, except for the last."""
_AT_ONCE = 256 * BLOCK

Node = tuple[int, int, Tensor]
"""(level, number, sum): the sum of blocks [number·2^level, (number + 1)·2^level)."""


def tile_ranges(low: int, high: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most `step` rows that cover [low, high) without crossing block borders."""
    while low < high:
        end = min(low + step, high, (low // BLOCK + 1) * BLOCK)
        yield low, end
        low = end


class BlockSumTree:
    """Sums of some blocks; `nodes` are in the order of their blocks once all of a range were added in order."""

    def __init__(self, nodes: Iterable[Node] = ()):
        self.nodes: list[Node] = []
        for node in sorted(nodes, key=lambda node: node[1] << node[0]):
            self._push(node)

    def add(self, block: int, value: Tensor) -> None:
        """Add the sum of block number `block`; the tree keeps `value`."""
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
        """Return the sum of all blocks; the roots of the remaining subtrees are added from the right."""
        value = self.nodes[-1][2]
        for _, _, before in reversed(self.nodes[:-1]):
            value = before + value
        return value


def block_sums(values: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Return (⌈n / BLOCK⌉,) float64: Σ values·factors over each block of two (n,) arrays."""
    found = []
    for low in range(0, len(values), _AT_ONCE):
        product = values[low : low + _AT_ONCE] * factors[low : low + _AT_ONCE]
        whole = len(product) // BLOCK * BLOCK
        found.append(product[:whole].reshape(-1, BLOCK).sum(1))
        if whole < len(product):
            found.append(product[whole:].sum(keepdims=True))
    return np.concatenate(found)
