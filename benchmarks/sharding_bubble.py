"""How long a pipeline of two stages idles, beside the formulas (p−1)/m and (p−1)/(vm).

    python -m benchmarks.sharding_bubble

The model of `sharding_speed` on two ranks, one thread and one core each, an update of m pieces of one row: wall time,
the shortest of several updates, in the order m = 2, 4, 8, 16 and back. A straight line through them, t·m + c, gives
the busy time t of a piece and the idle time c of an update; the bubble is c/(t·m). What is in c beside the bubble (the
optimizer, clipping, the loss's sum over ranks) makes it larger than the formula says.
"""

from __future__ import annotations

import os
import statistics
import tempfile

from benchmarks._harness import Benchmark
from benchmarks._ranks import on_ranks
from benchmarks.sharding_speed import save_backbone

PIECES = (2, 4, 8, 16)
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 2))


def shortest_updates(backbone: str, schedule: str, virtual: int) -> dict[int, float]:
    """Wall seconds of the shortest update, by its number of pieces."""
    mesh = {"pp": 2, "schedule": schedule, "virtual": virtual, "microbatches": 1}
    walls: dict[int, float] = {}
    for pieces in (*PIECES, *reversed(PIECES)):
        ranks = on_ranks("benchmarks.sharding_speed:ours", 2, backbone=backbone, mesh=mesh, rows=1, micros=pieces)
        walls[pieces] = min(walls.get(pieces, float("inf")), max(rank["wall"] for rank in ranks))
    return walls


def main() -> None:
    """Measure all schedules and write benchmarks/results/sharding_bubble.json."""
    from finetune.parallel.pipeline import bubble

    bench = Benchmark("sharding_bubble", packages=("torch",))
    with tempfile.TemporaryDirectory() as backbone:
        save_backbone(backbone)
        for schedule, virtual in SCHEDULES:
            if (os.cpu_count() or 1) < 2:
                bench.row(f"pp 2, {schedule}", unit="idle ÷ busy", reason="needs as many cores as ranks")
                continue
            walls = shortest_updates(backbone, schedule, virtual)
            busy, idle = statistics.linear_regression(list(walls), list(walls.values()))
            for pieces in PIECES:
                bench.row(
                    f"pp 2, {schedule}, {pieces} pieces",
                    ours=idle / (busy * pieces),
                    peer=bubble(2, virtual, pieces, schedule),
                    peer_name="formula",
                    unit="idle ÷ busy",
                )
    bench.finish()


if __name__ == "__main__":
    main()
