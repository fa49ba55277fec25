"""Pipeline schedules: blocks and stages of each rank, number of pieces of a step, and the bubble."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import pairwise

from ..config import Mesh
from ..errors import UserError

_TWO_A_RANK = ("interleaved", "zero-bubble", "zbv")


def schedule_descriptions() -> dict[str, str]:
    """Return a sentence on each `mesh.schedule`."""
    return {
        "gpipe": "all forward passes, then all backward passes; keeps the activations of every piece (1811.06965)",
        "1f1b": "one forward, one backward in turn; keeps the activations of at most pp pieces (PipeDream-Flush)",
        "interleaved": "1f1b with several stages a rank: a smaller bubble for more messages (PTD-P, 2104.04473)",
        "zero-bubble": "interleaved with the adapters' gradients apart from the activations' (2401.10241); as there is "
        "next to no weight gradient to fill a bubble with, it is made at once and the bubble is that of interleaved",
        "zbv": "two stages a rank in a V: the rank of the first stage has the last one too (2401.10241, section 6)",
    }


def virtual_stages(schedule: str, virtual: int | None) -> int:
    """Return the number of stages per rank. Raises UserError if `virtual` does not fit `schedule`."""
    if schedule not in schedule_descriptions():
        raise UserError(f"mesh.schedule: {schedule!r} is none of {', '.join(schedule_descriptions())}")
    if schedule not in _TWO_A_RANK and virtual not in (None, 1):
        raise UserError(
            f"mesh.virtual: {schedule} holds one stage a rank, not {virtual}; take mesh.schedule interleaved"
        )
    if schedule == "zbv" and virtual not in (None, 2):
        raise UserError(f"mesh.virtual: zbv holds two stages a rank, not {virtual}; set 2 or leave it out")
    return virtual or (2 if schedule in _TWO_A_RANK else 1)


@dataclass(frozen=True)
class BlockCosts:
    """Floating-point operations per token of one training step; `last`: of the head, which only the last stage has."""

    blocks: tuple[float, ...]
    last: float


@functools.lru_cache(maxsize=256)  # a search over meshes asks for the same few splits hundreds of times
def split_blocks(costs: BlockCosts, stages: int) -> tuple[range, ...]:
    """Return runs of blocks, one per stage and none empty, that minimise the cost of the most expensive one; then the
    most even such runs. Raises UserError for more stages than blocks."""
    n = len(costs.blocks)
    if stages > n:
        raise UserError(
            f"mesh.pp, mesh.virtual: {stages} stages are more than the model's {n} blocks; set mesh.pp × mesh.virtual "
            f"to at most {n}"
        )
    sums = [0.0]
    for cost in costs.blocks:
        sums.append(sums[-1] + cost)
    sums[-1] += costs.last
    # best[k]: (most expensive stage, sum of squares, borders) of the first k blocks over the stages so far
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
    for stage in range(1, stages + 1):
        ends = [n] if stage == stages else range(stage, n - (stages - stage) + 1)
        best = {
            end: min(
                (max(dearest, sums[end] - sums[start]), squares + (sums[end] - sums[start]) ** 2, (*borders, end))
                for start, (dearest, squares, borders) in best.items()
                if start < end
            )
            for end in ends
        }
    borders = best[n][2]
    return tuple(range(start, stop) for start, stop in pairwise(borders))


def stages_of(rank: int, *, pp: int, virtual: int, schedule: str) -> tuple[int, ...]:
    """Return the stages of a pipeline rank, ascending."""
    return (rank, 2 * pp - 1 - rank) if schedule == "zbv" else tuple(rank + i * pp for i in range(virtual))


def rank_of(stage: int, *, pp: int, schedule: str) -> int:
    """Return the pipeline rank of a stage."""
    return min(stage, 2 * pp - 1 - stage) if schedule == "zbv" else stage % pp


def bubble_fraction(pp: int, virtual: int, pieces: int, schedule: str) -> float:
    """Return idle time of a rank ÷ its busy time in one step, for stages of equal cost and frozen base models.

    (pp − 1)/(virtual · pieces) by 2104.04473 §2.2. A backward pass without weight gradients takes as long as a forward
    pass, so the work that zero-bubble schedules move into the bubble (2401.10241) is next to nothing; the V of `zbv`
    has the same start and end as the loop of `interleaved`.
    """
    return (pp - 1) / (virtual_stages(schedule, virtual) * pieces)


def round_up_pieces(pieces: int, *, pp: int, schedule: str) -> int:
    """Return the least number of pieces ≥ `pieces` that the schedule accepts; the added pieces have no targets."""
    if schedule == "1f1b":
        return max(pieces, pp)
    if schedule in ("interleaved", "zero-bubble"):
        while pieces % max(1, pieces // pp):
            pieces += 1
    return pieces


@functools.lru_cache(maxsize=1024)
def pieces_per_micro(
    rows: int, micros: int, *, pp: int, virtual: int, schedule: str, requested: int | None = None
) -> int:
    """Return the number of pieces that each micro-batch of `rows` rows is cut into: as `requested`, or the number that
    makes a step shortest, counting the bubble and rows of padding, up to four pieces a rank. Raises UserError for more
    pieces than rows.
    """
    if requested is not None:
        if requested > rows:
            raise UserError(
                f"mesh.microbatches: {rows} rows of a rank cannot be cut into {requested} pieces; "
                f"set at most {rows}, or raise train.batch_size"
            )
        return requested

    def time(n: int) -> float:
        return -(-rows // n) * (round_up_pieces(micros * n, pp=pp, schedule=schedule) + (pp - 1) / virtual)

    return min(range(1, min(rows, 4 * pp) + 1), key=lambda n: (time(n), n))


def split_step(mesh: Mesh, rows: int, micros: int) -> tuple[int, int]:
    """Return the rows of a piece into which a pipeline splits micro-batches of `rows` rows, and the pieces of a step of
    `micros`; without a pipeline these themselves."""
    if mesh.pp == 1:
        return rows, micros
    pp, schedule, virtual = mesh.pp, mesh.schedule, virtual_stages(mesh.schedule, mesh.virtual)
    count = pieces_per_micro(rows, micros, pp=pp, virtual=virtual, schedule=schedule, requested=mesh.microbatches)
    return -(-rows // count), round_up_pieces(count * micros, pp=pp, schedule=schedule)
