"""How long a pipeline of two stages idles, beside the formulas (p−1)/m and (p−1)/(vm), and what it waits for.

    python -m benchmarks.sharding_bubble

Two ranks, one thread and one core each, updates of m pieces of one row of 128 tokens, rank-8 LoRA on every linear
layer. Idle is the wall time of the shortest of several updates less the time in which the rank's computing thread ran;
the mean of both ranks. The formulas are of stages of one cost, so the first model has them: 7 blocks × 1,024 and a head
that takes as long as a block. The second, the 8 blocks × 512 of `sharding_speed`, has a head that no split evens out.

What is above the formula is parted in two: *uneven passes*, which the same passes in the same order would cost without
any transfer (each as long as the median of its kind and stage), and the rest: transfers that no computation hides,
threads that send while the core computes, and the collectives that end an update.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch.distributed.pipelining import PipelineStage

from benchmarks._harness import Benchmark, on_ranks
from benchmarks.sharding_speed import ours, save_backbone
from flatshift.finetune.parallel.pipeline import bubble_fraction
from flatshift.finetune.parallel.pipeline.stage import StageModel

PIECES = (4, 8, 16)
RUNS, STEPS = 2, 2
BARRED_RUNS = 5
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 2))
BARRED = ("1f1b", "interleaved")
ABOVE = 0.03
EVEN = {"blocks": 7, "hidden": 1024, "vocabulary": 14336}
"""The head's products of 1,024 × 14,336 take what a block of 13.6 M weights takes, measured here."""

Pass = tuple[str, int, int]
"""forward or backward, stage, piece."""


def passes(**arguments: Any) -> dict[str, Any]:
    """`ours` on this rank, with the passes of its last update in order and the seconds that each kind took."""
    seen: list[tuple[Pass, float]] = []

    def timed(cls: type, name: str, which: Any) -> None:
        usual = getattr(cls, name)

        def call(self: Any, *args: Any, **how: Any) -> Any:
            start = time.thread_time()
            out = usual(self, *args, **how)
            seen.append((which(self, args, how), time.thread_time() - start))
            return out

        setattr(cls, name, call)

    timed(StageModel, "forward", lambda stage, args, how: ("forward", stage.index, int(how["piece"])))
    timed(PipelineStage, "backward_one_chunk", lambda stage, args, how: ("backward", stage.stage_index, int(args[0])))
    figures = ours(**arguments)
    names = {name for name, _ in seen}
    seconds = defaultdict(list)
    for (kind, stage, _), spent in seen[-STEPS * len(names) :]:
        seconds[f"{kind} {stage}"].append(spent)
    order = [name for name, _ in seen[-len(names) :]]
    return {**figures, "order": order, "seconds": {kind: statistics.median(spent) for kind, spent in seconds.items()}}


def idle(wall: float, busy: Sequence[float]) -> float:
    """Idle ÷ busy, the mean of the ranks."""
    return statistics.mean((wall - spent) / spent for spent in busy)


def untransferred(ranks: Sequence[dict[str, Any]]) -> float:
    """Idle ÷ busy of the passes that the ranks did, in their order, if nothing took time but them."""
    seconds = {kind: spent for rank in ranks for kind, spent in rank["seconds"].items()}
    orders = [[tuple(one) for one in rank["order"]] for rank in ranks]
    last = max(stage for order in orders for _, stage, _ in order)
    done: dict[Pass, float] = {}
    clocks, busy = [0.0] * len(orders), [0.0] * len(orders)
    while any(orders):
        for rank, order in enumerate(orders):
            while order and (wanted := _before(order[0], last)) <= done.keys():
                kind, stage, _ = order[0]
                spent = seconds[f"{kind} {stage}"]
                clocks[rank] = max([clocks[rank], *(done[one] for one in wanted)]) + spent
                busy[rank] += spent
                done[order.pop(0)] = clocks[rank]
    return idle(max(clocks), busy)


def _before(one: Pass, last: int) -> set[Pass]:
    kind, stage, piece = one
    if kind == "forward":
        return {("forward", stage - 1, piece)} if stage else set()
    return {("forward", stage, piece)} | ({("backward", stage + 1, piece)} if stage < last else set())


def measure(bench: Benchmark, name: str, backbone: str, schedule: str, virtual: int, pieces: int, bar: bool) -> None:
    """The rows of one schedule and number of pieces."""
    what = f"{name}, {schedule}, {pieces} pieces"
    mesh = {"pp": 2, "schedule": schedule, "virtual": virtual, "microbatches": 1}
    unit, formula = "idle ÷ busy", bubble_fraction(2, virtual, pieces, schedule)
    results, wanted = [], []
    for _ in range(BARRED_RUNS if bar else RUNS):
        ranks = on_ranks(
            "benchmarks.sharding_bubble:passes", 2, backbone=backbone, mesh=mesh, rows=1, micros=pieces, steps=STEPS
        )
        results.append(statistics.mean((rank["wall"] - rank["busy"]) / rank["busy"] for rank in ranks))
        wanted.append(untransferred(ranks))
    bench.row(what, unit, ours=results, peer=formula, peer_name="formula")
    above = {"maximum": ABOVE} if bar else {}
    bench.row(f"{what}: above the formula", unit, ours=[one - formula for one in results], **above)
    bench.row(f"{what}: of it uneven passes", unit, ours=[one - formula for one in wanted])
    rest = [one - other for one, other in zip(results, wanted, strict=True)]
    bench.row(f"{what}: of it transfers and the update's end", unit, ours=rest)


def main() -> None:
    """Measure all schedules and write benchmarks/results/sharding_bubble.json."""
    bench = Benchmark("sharding_bubble", packages=("torch",))
    with tempfile.TemporaryDirectory() as even, tempfile.TemporaryDirectory() as uneven:
        save_backbone(even, **EVEN)
        save_backbone(uneven)
        for schedule, virtual in SCHEDULES:
            for pieces in PIECES:
                bar = schedule in BARRED and pieces >= 8  # four a stage
                measure(bench, "even stages", even, schedule, virtual, pieces, bar)
        for schedule, virtual in SCHEDULES:
            measure(bench, "a head on top", uneven, schedule, virtual, PIECES[-1], bar=False)
    bench.finish()


if __name__ == "__main__":
    main()
