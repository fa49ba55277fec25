"""How long a pipeline of two stages idles, beside the formulas (p−1)/m and (p−1)/(vm).

    python -m benchmarks.sharding_bubble

The model of `sharding_speed` on two ranks, one thread and one core each, updates of m pieces of one row. Idle is the
wall time of the shortest of several updates less the time in which the rank's computing thread ran; the mean of both
ranks. Beside the bubble it holds the transfers that no computation hides and the collectives that end an update.
"""

from __future__ import annotations

import os
import statistics
import tempfile

from benchmarks._harness import Benchmark
from benchmarks._ranks import on_ranks
from benchmarks.sharding_speed import save_backbone

PIECES = (2, 4, 8, 16)
RUNS = 2
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 2))


def idle_shares(backbone: str, schedule: str, virtual: int, pieces: int) -> list[float]:
    """Idle ÷ busy, the mean of both ranks, of several runs."""
    mesh = {"pp": 2, "schedule": schedule, "virtual": virtual, "microbatches": 1}
    found = []
    for _ in range(RUNS):
        ranks = on_ranks("benchmarks.sharding_speed:ours", 2, backbone=backbone, mesh=mesh, rows=1, micros=pieces)
        found.append(statistics.mean((rank["wall"] - rank["busy"]) / rank["busy"] for rank in ranks))
    return found


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
            for pieces in PIECES:
                bench.row(
                    f"pp 2, {schedule}, {pieces} pieces",
                    ours=idle_shares(backbone, schedule, virtual, pieces),
                    peer=bubble(2, virtual, pieces, schedule),
                    peer_name="formula",
                    unit="idle ÷ busy",
                )
    bench.finish()


if __name__ == "__main__":
    main()
