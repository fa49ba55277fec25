"""Sums over rows that are bit for bit independent of the division of rows among threads and processes.

Rows are summed in blocks of `BLOCK`, in order; the blocks' sums in the binary tree over block numbers 0, 1, 2, …, whose
inner nodes are computed as soon as both children exist. The owner of a range of blocks sums the largest complete
subtrees in it, some two for each doubling of its length, and only these are communicated. Scalars are added exactly
(Shewchuk's `math.fsum`), so that only their blocks need an order.

One tile per core: a tile is a GEMM followed by some ten short operations. Run one by one on all cores, each would end
in a barrier where the faster cores spin; on a busy machine that costs several times the work itself. Here every core
keeps its own tile in its own cache, and synchronises with the others once a pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import torch
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
    sums = []
    for low in range(0, len(values), _AT_ONCE):
        product = values[low : low + _AT_ONCE] * factors[low : low + _AT_ONCE]
        whole = len(product) // BLOCK * BLOCK
        sums.append(product[:whole].reshape(-1, BLOCK).sum(1))
        if whole < len(product):
            sums.append(product[whole:].sum(keepdims=True))
    return np.concatenate(sums)


class ThreadCrew:
    """Pool of as many threads as torch uses here (one on CUDA: the device is parallel by itself)."""

    def __init__(self, device: torch.device):
        self.size = torch.get_num_threads() if device.type == "cpu" else 1
        self._pool: ThreadPoolExecutor | None = None

    def each(
        self,
        n: int,
        step: int,
        work: Callable[[int, int], Tensor | None],
        on_rows: Callable[[int, int], None] | None = None,
    ) -> Tensor | None:
        """Call `work(low, high)` for tiles of `step` rows that cover n rows; return the sum of the tensors it returns.

        A thread sums its contiguous share in order, and the shares are added in order: with the same number of threads
        the result is bit-identical. `on_rows(done, n)` is called from the caller's thread. Exceptions of `work` are
        raised for the first share that failed.
        """
        tiles = -(-n // step)
        if self.size == 1 or tiles < 2 * self.size:
            return _sum_tiles(range(0, n, step), n, step, work, on_rows)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.size, "tiles", initializer=_use_one_thread)
        stop = threading.Event()
        counts = [0] * self.size
        threads = torch.get_num_threads()

        def run(number: int) -> Tensor | None:
            def count(done: int, _: int) -> None:
                counts[number] = done

            share = range(n)[number * tiles // self.size * step : (number + 1) * tiles // self.size * step]
            with torch.inference_mode():
                return _sum_tiles(range(share.start, share.stop, step), share.stop, step, work, count, stop)

        try:
            # The number of BLAS threads is global to the process: unless it is 1 here too, every worker's GEMM would
            # start as many threads again.
            torch.set_num_threads(1)
            jobs = [self._pool.submit(run, number) for number in range(self.size)]
            _wait_with_progress(jobs, counts, n, on_rows)
            results = [job.result() for job in jobs]
        finally:
            stop.set()
            torch.set_num_threads(threads)
        sums = [result for result in results if result is not None]
        return torch.stack(sums).sum(0) if sums else None

    def tree(
        self,
        n: int,
        step: int,
        work: Callable[[int, int], Tensor],
        on_rows: Callable[[int, int], None] | None = None,
        first_block: int = 0,
    ) -> BlockSumTree:
        """Run `work` as `each`, with tiles of at most `step` rows inside blocks; return the tree of block sums
        . first_block: number of the block that begins at row 0."""
        trees: list[list[Node]] = []
        thread = threading.local()

        def sum_block(low: int, high: int) -> None:
            total: Tensor | None = None
            for tile in tile_ranges(low, high, step):
                value = work(*tile)
                total = value if total is None else total.add_(value)
            assert total is not None
            if not hasattr(thread, "tree"):
                thread.tree = BlockSumTree()
                trees.append(thread.tree.nodes)
            thread.tree.add(first_block + low // BLOCK, total)

        self.each(n, BLOCK, sum_block, on_rows)
        return BlockSumTree(node for nodes in trees for node in nodes)


_thread = threading.local()


def _use_one_thread() -> None:
    torch.set_num_threads(1)
    _thread.flushes = torch.set_flush_denormal(True)


def flushes_subnormals() -> bool:
    """True in threads of a ThreadCrew, which flush subnormal numbers (slow on many processors) to 0."""
    return getattr(_thread, "flushes", False)


def _sum_tiles(
    lows: range,
    end: int,
    step: int,
    work: Callable[[int, int], Tensor | None],
    on_rows: Callable[[int, int], None] | None,
    stop: threading.Event | None = None,
) -> Tensor | None:
    total: Tensor | None = None
    for low in lows:
        if stop is not None and stop.is_set():
            break
        high = min(low + step, end)
        value = work(low, high)
        if value is not None:
            total = value if total is None else total.add_(value)
        if on_rows:
            on_rows(high - lows.start, end - lows.start)
    return total


def _wait_with_progress(
    jobs: list[Future[Tensor | None]], counts: list[int], n: int, on_rows: Callable[[int, int], None] | None
) -> None:
    """Wait for the jobs, reporting progress from this thread. If a job fails the others still finish: the raised
    failure must not depend on which was faster."""
    reported = 0
    while True:
        pending = wait(jobs, timeout=0.1 if on_rows else None).not_done
        done = sum(counts)
        if on_rows and done > reported:
            on_rows(done, n)
            reported = done
        if not pending:
            return
