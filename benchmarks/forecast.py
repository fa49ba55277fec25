"""`flatshift forecast` beside real training: tasks × ranks × rows × shares of wrong labels.

    python -m benchmarks.forecast [--tasks banking …]      # three shipped tasks; resumable
    python -m benchmarks.forecast --data DIR               # and three held out, from the task files in DIR

Every setting is trained by AdamW with cross-entropy, LoRA in all layers and a new head, as a user would; the forecast
sees the same rows and no training. Order (Spearman), what choosing the rank by forecast costs, cost, and how often the
80 % interval of a learning curve carried on holds what twice the rows then gave. The three held-out tasks were first
trained when the rule for choosing a rank (`soonest`) and the shared kernel (`LARGEST`) had been settled on the shipped
ones. They then showed a fault of leave-one-out where one row repeats another; their rows here are those after its
repair. Cost counts tasks that this machine did both of, in one process each; imports are before the clocks.
"""

from __future__ import annotations

import argparse
import json
import lzma
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from benchmarks._harness import RESULTS, ROOT, Benchmark, machine
from benchmarks._study_results import once, read
from flatshift.experiments.recipe import load_recipe
from flatshift.experiments.recipe.schema import SweepOptions
from flatshift.experiments.recipe.tree import from_override
from flatshift.experiments.results.sweep import read_sweep
from flatshift.experiments.run.console import Console
from flatshift.experiments.statistics.kernel import extrapolate, fastest_setting
from flatshift.experiments.studies.sweep import sweep
from flatshift.experiments.workflows.error_forecast import ForecastAxes, forecast_rows
from flatshift.finetune.atomic import write_text

SHIPPED = ("banking", "scicite", "snli")
HELD_OUT = {
    "trec": "trec_qc.jsonl.xz",
    "news": "agnews_official_test_resplit.jsonl.xz",
    "reviews": "mr_polarity.jsonl.xz",
}
ROWS, RANKS, NOISES = (40, 80, 160, 320), (2, 16), (0.0, 0.2)
SEEDS, DRAWS = 3, 3
CELLS, WORK = RESULTS / "forecast" / "cells.json", ROOT / ".bench" / "forecast"
SETTINGS = {
    "backbone": "flatshift-encoder-3m", "regularizer": "plain", "optimizer.lr": "2e-3", "train.steps": "80",
    "train.batch_size": "16", "train.max_length": "48", "train.max_cut": "1", "train.precision": "fp32",
    "train.eval_every": "0", "train.patience": "null", "train.save_every": "0", "data.dev.files": "[]",
    "data.test.limit": "300", "eval.bootstrap": "50", "eval.train_limit": "16",
}  # fmt: skip
AXES = ("adapter.rank", "data.train.limit", "data.label_noise")


def overrides(task: str) -> list[Any]:
    """What makes `classify` the recipe of a task."""
    where = "[{}]" if task in HELD_OUT else "[sample:{}]"
    files = {
        f"data.{split}.files": where.format(WORK / f"{task}-{split}.jsonl" if task in HELD_OUT else f"{task}/{split}")
        for split in ("train", "test")
    }
    return [from_override(key, value) for key, value in (SETTINGS | files).items()]


def split_up(task: str, folder: Path) -> None:
    """Write the rows of a held-out task in a file a split."""
    results: dict[str, list[str]] = {"train": [], "test": []}
    with lzma.open(folder / HELD_OUT[task], "rt", encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            if row["split"] in results:
                results[row["split"]].append(json.dumps({"text": row["text"], "label": row["label"]}) + "\n")
    for split, lines in results.items():
        write_text(WORK / f"{task}-{split}.jsonl", "".join(lines))


def train(task: str) -> dict[str, Any]:
    """{rank|rows|noise: mean test error} of trained cells, and their CPU-seconds."""
    grid = tuple(
        f"{axis}={','.join(map(str, values))}" for axis, values in zip(AXES, (RANKS, ROWS, NOISES), strict=True)
    )
    began = time.process_time()
    sweep("classify", overrides(task), WORK / task, SweepOptions(grid=grid, seeds=SEEDS), quiet=True)
    data = read_sweep(WORK / task)
    assert data is not None
    return {
        "error": {"|".join(f"{where[a]:g}" for a in AXES): mean.value for where, mean in data.means("test.error")},
        "cpu": time.process_time() - began,
        "on": machine()["instructions"],
    }


def predict(task: str) -> dict[str, Any]:
    """The same by forecast at the ridge with the least leave-one-out error, every draw apart."""
    changes = [*overrides(task), from_override("data.train.limit", str(ROWS[-1]))]
    resolved = load_recipe("classify", changes)
    console = Console(quiet=True)
    forecast_rows(resolved, ForecastAxes(ROWS[:1], RANKS[:1], NOISES[:1], 1), console, WORK)  # what is imported late
    began = time.process_time()
    rows = forecast_rows(resolved, ForecastAxes(ROWS, RANKS, NOISES, DRAWS), console, WORK)
    cpu = time.process_time() - began
    results: dict[str, list[float]] = {}
    speeds: dict[str, float] = {}
    keys = {tuple(row[axis] for axis in AXES) for row in rows}
    for key in sorted(keys):
        own = [row for row in rows if tuple(row[axis] for axis in AXES) == key]
        decays = sorted({row["optimizer.weight_decay"] for row in own})
        best = min(
            decays, key=lambda d: np.mean([r["left_out_error"] for r in own if r["optimizer.weight_decay"] == d])
        )
        name = "|".join(f"{value:g}" for value in key)
        results[name] = [row["test.error"] for row in own if row["optimizer.weight_decay"] == best]
        speeds[name] = float(np.mean([row["speed"] for row in own]))
    return {"error": results, "speed": speeds, "cpu": cpu, "on": machine()["instructions"]}


def pairs_of(forecast: dict[str, Any], trained: dict[str, Any]) -> np.ndarray:
    """(settings, 2): forecast and trained test error."""
    return np.array([(np.mean(forecast["error"][key]), error) for key, error in trained["error"].items()])


def rank_choices(results: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, float]:
    """What the forecast says of the two ranks, over all settings of rows and noise: in how many it predicts one error
    for both, in how many of the others with a trained difference its sign is right, and what a choice costs in points:
    by the predicted error (where that is the same, a coin), by a coin alone, and always the larger rank."""
    predicted, real = [], []
    for forecast, trained in results.values():
        for rows in ROWS:
            for noise in NOISES:
                keys = [f"{rank:g}|{rows:g}|{noise:g}" for rank in RANKS]
                predicted.append([np.mean(forecast["error"][key]) for key in keys])
                real.append([trained["error"][key] for key in keys])
    said, was = np.array(predicted), np.array(real)
    change, wanted = np.sign(said[:, 1] - said[:, 0]), np.sign(was[:, 1] - was[:, 0])
    both = (change != 0) & (wanted != 0)
    lost = 100 * (was - was.min(1, keepdims=True))
    chosen = np.where(change == 0, lost.mean(1), np.where(change < 0, lost[:, 1], lost[:, 0]))
    return {
        "settings": len(change),
        "same": float((change == 0).sum()),
        "differ": float(both.sum()),
        "right": float((change == wanted)[both].sum()),
        "by error": float(chosen.mean()),
        "coin": float(lost.mean()),
        "largest": float(lost[:, 1].mean()),
    }


def judge(bench: Benchmark, name: str, results: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """The rows of some tasks, each with its forecast and its trained cells."""
    pairs = np.concatenate([pairs_of(*both) for both in results.values()])
    what = f"{name}: Spearman correlation of forecast and trained test error, {len(pairs)} settings"
    bench.row(what, "correlation", ours=float(spearmanr(*pairs.T).statistic), minimum=0.8)
    apart = 100 * (pairs[:, 0] - pairs[:, 1])
    bench.row(f"{name}: forecast less trained, mean", "points", ours=float(apart.mean()))
    bench.row(f"{name}: forecast less trained, mean size", "points", ours=float(np.abs(apart).mean()))
    regrets, held = [], []
    for forecast, trained in results.values():
        real = trained["error"]
        for rows in ROWS:
            for noise in NOISES:
                keys = [f"{rank:g}|{rows:g}|{noise:g}" for rank in RANKS]
                errors = np.array([forecast["error"][key] for key in keys]).T
                chosen = keys[fastest_setting(errors, np.array([forecast["speed"][key] for key in keys]))]
                regrets.append(real[chosen] - min(real[key] for key in keys))
        for rank in RANKS:
            for noise in NOISES:
                along = [f"{rank:g}|{rows:g}|{noise:g}" for rows in ROWS]
                curves = np.array([forecast["error"][key] for key in along]).T
                change = extrapolate(ROWS[:-1], curves[:, :-1], ROWS[-1] - ROWS[-2])
                wanted = real[along[-1]] - real[along[-2]]
                held.append(change.low is not None and change.high is not None and change.low <= wanted <= change.high)
    bench.row(
        f"{name}: regret of choosing the rank by forecast", "points", ours=100 * float(np.mean(regrets)), maximum=1.0
    )
    what = f"{name}: 80 % intervals for twice the rows that hold the trained change"
    bench.row(what, "share", ours=float(np.mean(held)), minimum=0.7)


def main() -> None:
    """Measure what `CELLS` has not, and write benchmarks/results/forecast.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=[*SHIPPED, *HELD_OUT], help="some of them")
    parser.add_argument("--data", type=Path, help="directory of the held-out tasks' files")
    asked = parser.parse_args()
    held_out_too = {f"{what}-{task}" for what in ("trained", "forecast") for task in HELD_OUT} <= read(CELLS).keys()
    tasks = asked.tasks or [*SHIPPED, *(HELD_OUT if asked.data or held_out_too else ())]
    for task in tasks:
        if task in HELD_OUT and asked.data:
            split_up(task, asked.data)
    forecasts = {task: once(CELLS, f"forecast-{task}", partial(predict, task)) for task in tasks}
    trained = {task: once(CELLS, f"trained-{task}", partial(train, task)) for task in tasks}
    bench = Benchmark("forecast", packages=("torch", "transformers", "peft", "numpy", "scipy"))
    held_out = [task for task in tasks if task in HELD_OUT]
    for name, some in (("all tasks", tasks), ("held-out tasks", held_out)):
        if some:
            judge(bench, name, {task: (forecasts[task], trained[task]) for task in some})
    of_rank = rank_choices({task: (forecasts[task], trained[task]) for task in tasks})
    for what, figure, unit in (
        ("settings with one predicted error for both ranks", "same", "settings"),
        (f"of the {of_rank['differ']:.0f} others, sign of the difference between ranks right", "right", "settings"),
        ("cost of the rank with the lower predicted error, a coin where they are the same", "by error", "points"),
        ("cost of a rank by a coin", "coin", "points"),
        (f"cost of always rank {RANKS[1]}", "largest", "points"),
    ):
        bench.row(f"{what}, of {of_rank['settings']:.0f}" if figure == "same" else what, unit, ours=of_rank[figure])
    for task in tasks:
        own = spearmanr(*pairs_of(forecasts[task], trained[task]).T).statistic
        bench.row(f"{task}: Spearman correlation", "correlation", ours=float(own))
    both = [task for task in tasks if forecasts[task].get("on") == trained[task].get("on", [])]
    costs = [forecasts[task]["cpu"] / trained[task]["cpu"] for task in both]
    reason = None if costs else "no task was forecast and trained on one kind of machine"
    what = f"CPU-seconds of the forecast ÷ those of the sweep, {len(both)} tasks"
    bench.row(what, "share", ours=costs or None, maximum=0.02, reason=reason)
    bench.finish()


if __name__ == "__main__":
    main()
