"""`flatshift forecast` beside real training: three shipped tasks × ranks × rows × shares of wrong labels.

    python -m benchmarks.forecast [--tasks banking …]      # resumable

Every setting is trained by AdamW with cross-entropy, LoRA in all layers and a new head, as a user would; the forecast
sees the same rows and no training. Order (Spearman), what choosing the rank by forecast costs, cost, and how often the
80 % interval of a learning curve carried on holds what twice the rows then gave.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

from benchmarks._harness import RESULTS, ROOT, Benchmark
from experiments.recipe import load_recipe
from experiments.recipe.studies import SweepOptions
from experiments.recipe.tree import from_override
from experiments.results.sweep import read_sweep
from experiments.run.console import Console
from experiments.statistics.kernel import carried_on
from experiments.studies.sweep import sweep
from experiments.workflows.forecast import Axes, forecast_rows
from finetune.atomic import write_json

TASKS, ROWS, RANKS, NOISES = ("banking", "scicite", "snli"), (40, 80, 160, 320), (2, 16), (0.0, 0.2)
SEEDS, DRAWS = 3, 3
KEPT, WORK = RESULTS / "forecast", ROOT / ".bench" / "forecast"
SETTINGS = {
    "backbone": "flatshift-encoder-3m",
    "regularizer": "plain",
    "optimizer.lr": "2e-3",
    "train.steps": "80",
    "train.batch_size": "16",
    "train.max_length": "48",
    "train.max_cut": "1",
    "train.precision": "fp32",
    "train.eval_every": "0",
    "train.patience": "null",
    "train.save_every": "0",
    "data.dev.files": "[]",
    "data.test.limit": "300",
    "eval.bootstrap": "50",
    "eval.train_limit": "16",
}
AXES = ("adapter.rank", "data.train.limit", "data.label_noise")


def overrides(task: str) -> list[Any]:
    """What makes `classify` the recipe of a task."""
    files = {f"data.{split}.files": f"[sample:{task}/{split}]" for split in ("train", "test")}
    return [from_override(key, value) for key, value in (SETTINGS | files).items()]


def measured(task: str) -> dict[str, Any]:
    """{rank|rows|noise: mean test error} of trained cells, and their seconds."""
    kept = KEPT / f"trained-{task}.json"
    if not kept.is_file():
        grid = tuple(
            f"{axis}={','.join(map(str, values))}" for axis, values in zip(AXES, (RANKS, ROWS, NOISES), strict=True)
        )
        began = time.process_time()
        sweep("classify", overrides(task), WORK / task, SweepOptions(grid=grid, seeds=SEEDS, stack="1"), quiet=True)
        data = read_sweep(WORK / task)
        assert data is not None
        found = {"|".join(f"{where[a]:g}" for a in AXES): mean.value for where, mean in data.means("test.error")}
        KEPT.mkdir(parents=True, exist_ok=True)
        write_json(kept, {"error": found, "seconds": sum(data.seconds), "cpu": time.process_time() - began})
    return dict(json.loads(kept.read_text(encoding="utf-8")))


def predicted(task: str) -> dict[str, Any]:
    """The same by forecast at the ridge with the least leave-one-out error, every draw apart."""
    kept = KEPT / f"forecast-{task}.json"
    if not kept.is_file():
        changes = [*overrides(task), from_override("data.train.limit", str(ROWS[-1]))]
        began = time.process_time()
        rows = forecast_rows(
            load_recipe("classify", changes).recipe, Axes(ROWS, RANKS, NOISES, DRAWS), Console(quiet=True)
        )
        found: dict[str, list[float]] = {}
        keys = {tuple(row[axis] for axis in AXES) for row in rows}
        for key in sorted(keys):
            own = [row for row in rows if tuple(row[axis] for axis in AXES) == key]
            decays = sorted({row["optimizer.weight_decay"] for row in own})
            best = min(
                decays,
                key=lambda d: np.mean([r["left_out_error"] for r in own if r["optimizer.weight_decay"] == d]),
            )
            found["|".join(f"{value:g}" for value in key)] = [
                row["test.error"] for row in own if row["optimizer.weight_decay"] == best
            ]
        KEPT.mkdir(parents=True, exist_ok=True)
        write_json(kept, {"error": found, "cpu": time.process_time() - began})
    return dict(json.loads(kept.read_text(encoding="utf-8")))


def main() -> None:
    """Measure what is not kept, and write benchmarks/results/forecast.json."""
    from scipy.stats import spearmanr

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS, help="of the shipped ones")
    tasks = parser.parse_args().tasks
    forecasts = {task: predicted(task) for task in tasks}
    trained = {task: measured(task) for task in tasks}
    pairs = {
        (task, key): (float(np.mean(forecasts[task]["error"][key])), error)
        for task in tasks
        for key, error in trained[task]["error"].items()
    }
    bench = Benchmark("forecast", packages=("torch", "transformers", "peft", "numpy", "scipy"))
    both = np.array(list(pairs.values()))
    bench.row(
        f"Spearman correlation of forecast and trained test error, {len(both)} settings",
        ours=float(spearmanr(*both.T).statistic),
        unit="correlation",
        bar_op=">=",
        bar_value=0.8,
    )
    for task in tasks:
        own = np.array([pair for (name, _), pair in pairs.items() if name == task])
        bench.row(f"the same within {task}", ours=float(spearmanr(*own.T).statistic), unit="correlation")
    bench.row("forecast less trained, mean", ours=100 * float((both[:, 0] - both[:, 1]).mean()), unit="points")
    bench.row(
        "forecast less trained, mean size", ours=100 * float(np.abs(both[:, 0] - both[:, 1]).mean()), unit="points"
    )
    regrets, held = [], []
    for task in tasks:
        for rows in ROWS:
            for noise in NOISES:
                keys = [f"{rank:g}|{rows:g}|{noise:g}" for rank in RANKS]
                chosen = min(keys, key=lambda key: pairs[task, key][0])
                real = trained[task]["error"]
                regrets.append(real[chosen] - min(real[key] for key in keys))
        for rank in RANKS:
            for noise in NOISES:
                key = [f"{rank:g}|{rows:g}|{noise:g}" for rows in ROWS]
                curves = np.array([forecasts[task]["error"][one] for one in key]).T
                change = carried_on(ROWS[:-1], curves[:, :-1], ROWS[-1] - ROWS[-2])
                real = trained[task]["error"][key[-1]] - trained[task]["error"][key[-2]]
                held.append(change.low is not None and change.high is not None and change.low <= real <= change.high)
    bench.row(
        "regret of choosing the rank by forecast", ours=100 * float(np.mean(regrets)), unit="points", bar_op="<=",
        bar_value=1.0,
    )  # fmt: skip
    bench.row(
        "80 % intervals for twice the rows that hold the trained change", ours=float(np.mean(held)), unit="share",
        bar_op=">=", bar_value=0.7,
    )  # fmt: skip
    bench.row(
        "CPU-seconds of the forecast ÷ seconds of the sweep",
        ours=sum(f["cpu"] for f in forecasts.values()) / sum(t["seconds"] for t in trained.values()),
        unit="share",
        bar_op="<=",
        bar_value=0.02,
    )
    bench.finish()


if __name__ == "__main__":
    main()
