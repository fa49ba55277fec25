"""The positive control: a real double descent of LoRA on a real backbone and real text, repetition by repetition.

    python -m benchmarks.positive_control [--repetitions 3] [--decays 2]        # resumable

Each repetition is `flatshift sweep positive-control` under eight seeds of its own (data drawn anew, labels made wrong
anew, factors drawn anew); with decay, the same at the weight decay that other seeds chose on dev rows. Cells lie in
.bench/positive_control, and what is judged of them in benchmarks/results/positive_control/.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from benchmarks._harness import RESULTS, ROOT, Benchmark
from experiments.recipe.tree import from_override
from experiments.results.analysis import Analysis, Judged
from experiments.results.sweep import read_sweep
from finetune.atomic import write_json
from finetune.errors import UserError
from flatshift.api import sweep

RECIPE, ROWS, SEEDS = "positive-control", 96, 8
DECAYS = (0.3, 1.0, 3.0, 10.0)
TUNING_SEED = 9000
KEPT, WORK = RESULTS / "positive_control", ROOT / ".bench" / "positive_control"
NEAR = math.log(1.2)


def swept(name: str, seed: int, *, seeds: int = SEEDS, grid: tuple[str, ...] | None = None, **settings: Any) -> Path:
    """The directory of one sweep, run as far as it is not there."""
    overrides = [from_override(key.replace("__", "."), str(value)) for key, value in settings.items()]
    overrides.append(from_override("train.seed", str(seed)))
    out = WORK / name
    if sweep(RECIPE, overrides, out, seeds=seeds, grid=grid, quiet=True):
        raise UserError(f"{out}: a cell failed")
    return out


def found(name: str, seed: int, **settings: Any) -> dict[str, Any]:
    """Verdict and means of one repetition, from its kept file or a sweep."""
    kept = KEPT / f"{name}.json"
    if kept.is_file():
        return dict(json.loads(kept.read_text(encoding="utf-8")))
    data = read_sweep(swept(name, seed, **settings))
    assert data is not None
    (judged,) = Analysis(data).judged
    told = document(judged)
    KEPT.mkdir(parents=True, exist_ok=True)
    write_json(kept, told)
    return told


def document(judged: Judged) -> dict[str, Any]:
    """What is kept of a curve."""
    curve, verdict = judged.curve, judged.verdict
    peak = verdict.peak
    return {
        "verdict": verdict.kind,
        "ranks": list(curve.values),
        "test": curve.test.mean(0).tolist(),
        "train": None if curve.train_error is None else curve.train_error.mean(0).tolist(),
        "location": list(judged.location),
        "height": None if peak is None else peak.height.estimate,
        "p": None if peak is None else peak.p_value,
        "threshold": verdict.threshold,
        "evidence": list(judged.evidence),
    }


def tuned() -> float:
    """The weight decay with the lowest mean dev error over ranks, on seeds that no repetition has."""
    kept = KEPT / "decay.json"
    if kept.is_file():
        return float(json.loads(kept.read_text(encoding="utf-8"))["decay"])
    where = {"data__test__files": "[sample:banking/dev]"}
    grid = ("adapter.rank=16,96,480", f"optimizer.weight_decay={','.join(map(str, DECAYS))}")
    data = read_sweep(swept("tuning", TUNING_SEED, seeds=3, grid=grid, **where))
    assert data is not None
    errors = {
        decay: float(data.matrix("test.error", "adapter.rank", {"optimizer.weight_decay": decay}).y.mean())
        for decay in DECAYS
    }
    best = min(errors, key=lambda decay: errors[decay])
    KEPT.mkdir(parents=True, exist_ok=True)
    write_json(kept, {"decay": best, "dev_error": {str(decay): error for decay, error in errors.items()}})
    return best


def main() -> None:
    """Measure what is not kept, and write benchmarks/results/positive_control.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--decays", type=int, default=2)
    asked = parser.parse_args()
    plain = [found(f"plain-{n}", 100 * n) for n in range(asked.repetitions)]
    decay = tuned() if asked.decays else 0.0
    decayed = [found(f"decay-{n}", 100 * n, optimizer__weight_decay=decay) for n in range(asked.decays)]
    bench = Benchmark("positive_control", packages=("torch", "transformers", "peft", "numpy"))
    count = len(plain)
    named = sum(one["verdict"] == "double descent" for one in plain)
    near = sum(any(abs(math.log(at / ROWS)) <= NEAR for at in one["location"]) for one in plain)
    bench.row(
        f"double descent named, of {count} repetitions", ours=named / count, unit="share", bar_op=">=", bar_value=0.9
    )
    bench.row("peak within 20 % of rank = rows", ours=near / count, unit="share", bar_op=">=", bar_value=0.9)
    for n, one in enumerate(plain):
        bench.row(f"repetition {n}: height of the peak", ours=one["height"], unit="test error")
    if decayed:
        gone = sum(one["p"] > 0.05 for one in decayed) / len(decayed)
        bench.row(
            f"no peak at weight decay {decay:g} (tuned), of {len(decayed)} repetitions",
            ours=gone,
            unit="share",
            bar_op=">=",
            bar_value=0.9,
        )
    bench.finish()


if __name__ == "__main__":
    main()
