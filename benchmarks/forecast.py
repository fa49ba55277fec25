"""`flatshift forecast` beside real training: tasks × ranks × rows × shares of wrong labels.

    python -m benchmarks.forecast [--tasks banking …]      # three shipped tasks; resumable
    python -m benchmarks.forecast --data DIR               # and three held out, from the task files in DIR

Every setting is trained by AdamW with cross-entropy, LoRA in all layers and a new head, as a user would; the forecast
sees the same rows and no training. Measured: order (Spearman); the sign of every predicted difference along ranks, rows
and noise beside *the larger rank*, *more rows* and *right labels are better*; what choosing the rank by forecast costs
beside the largest rank, one rank for all and a coin; CPU time; and how often the 80 % interval of a learning curve
carried on holds what twice the rows then gave. The three held-out tasks were first trained, at ranks 2 and 16, when the
rule for choosing a rank (`soonest`) and the shared kernel (`LARGEST`) had been settled on the shipped ones. They then
showed a fault of leave-one-out where one row repeats another; their rows here are those after its repair. Cost counts
tasks that this machine did both of, in one process each; imports are before the clocks.
"""

from __future__ import annotations

import argparse
import json
import lzma
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
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
from flatshift.experiments.statistics.intervals import t_interval
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
ROWS, RANKS, NOISES = (40, 80, 160, 320), (1, 2, 4, 16, 64), (0.0, 0.2)
SEEDS, DRAWS = 3, 3
CELLS, WORK = RESULTS / "forecast" / "five_ranks.json", ROOT / ".bench" / "forecast"
SETTINGS = {
    "backbone": "flatshift-encoder-3m", "regularizer": "plain", "optimizer.lr": "2e-3", "train.steps": "80",
    "train.batch_size": "16", "train.max_length": "48", "train.max_cut": "1", "train.precision": "fp32",
    "train.eval_every": "0", "train.patience": "null", "train.save_every": "0", "data.dev.files": "[]",
    "data.test.limit": "300", "eval.bootstrap": "50", "eval.train_limit": "16",
}  # fmt: skip
AXES: dict[str, tuple[float, ...]] = {"adapter.rank": RANKS, "data.train.limit": ROWS, "data.label_noise": NOISES}
LARGER = {
    "adapter.rank": ("along ranks", "the larger rank is better", -1),
    "data.train.limit": ("along rows", "more rows are better", -1),
    "data.label_noise": ("right or wrong labels", "right labels are better", 1),
}
"""Axis → (its name, what anybody would say without a forecast, the sign of the error's change by that)."""
Forecast = Mapping[str, Any]
"""What `predict` or `train` returns: `error` of every setting is a list of draws or of seeds."""


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


def train(task: str) -> Forecast:
    """{rank|rows|noise: test errors by seed} of trained cells, and their CPU-seconds."""
    grid = tuple(f"{axis}={','.join(map(str, values))}" for axis, values in AXES.items())
    began = time.process_time()
    sweep("classify", overrides(task), WORK / task, SweepOptions(grid=grid, seeds=SEEDS), quiet=True)
    data = read_sweep(WORK / task)
    assert data is not None
    errors = {key(where): data.column("test.error")[data.rows(where)].tolist() for where in settings()}
    return {"error": errors, "cpu": time.process_time() - began, "on": machine()["instructions"]}


def settings() -> list[dict[str, float]]:
    """Every setting of rank, rows and noise."""
    return [dict(zip(AXES, values, strict=True)) for values in product(*AXES.values())]


def key(where: Mapping[str, float]) -> str:
    """The name of a setting in the committed file."""
    return "|".join(f"{where[axis]:g}" for axis in AXES)


def predict(task: str) -> Forecast:
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
    for where in settings():
        own = [row for row in rows if all(row[axis] == value for axis, value in where.items())]
        decays = sorted({row["optimizer.weight_decay"] for row in own})
        best = min(
            decays, key=lambda d: np.mean([r["left_out_error"] for r in own if r["optimizer.weight_decay"] == d])
        )
        results[key(where)] = [row["test.error"] for row in own if row["optimizer.weight_decay"] == best]
        speeds[key(where)] = float(np.mean([row["speed"] for row in own]))
    return {"error": results, "speed": speeds, "cpu": cpu, "on": machine()["instructions"]}


def whole(name: str, make: Callable[[], Forecast]) -> Forecast:
    """The committed result if it has every setting, else a new one in its place."""
    errors = read(CELLS).get(name, {}).get("error", {})
    result: Forecast = once(CELLS, name, make, again=set(errors) != set(map(key, settings())))
    return result


def pairs_of(forecast: Forecast, trained: Forecast) -> np.ndarray:
    """(settings, 2): forecast and trained test error."""
    return np.array([(np.mean(forecast["error"][name]), np.mean(error)) for name, error in trained["error"].items()])


def directions(results: Mapping[str, tuple[Forecast, Forecast]], axis: str) -> dict[str, float]:
    """Agreement of forecast and training on every two values of `axis`, all else equal, over tasks and settings.

    In how many pairs it predicts one error for both; in how many of the others with a trained difference its sign is
    right, and in how many of the same the sign of `LARGER`; how often the sign of one seed's difference is that of the
    mean of the other seeds, which bounds what any forecast can reach; and the correlation (Spearman) of predicted and
    trained differences.
    """
    said, was = [], []
    for forecast, trained in results.values():
        for where in settings():
            for value in (v for v in AXES[axis] if v > where[axis]):
                two = key(where), key({**where, axis: value})
                said.append(np.mean(forecast["error"][two[1]]) - np.mean(forecast["error"][two[0]]))
                was.append(np.subtract(trained["error"][two[1]], trained["error"][two[0]]))
    predicted, seeds = np.array(said).round(12), np.array(was)
    real = seeds.mean(1).round(12)
    both = (predicted != 0) & (real != 0)
    others = (seeds.sum(1, keepdims=True) - seeds) / (seeds.shape[1] - 1)
    sure = (seeds.round(12) != 0) & (others.round(12) != 0)
    return {
        "pairs": len(real),
        "same": float((predicted == 0).sum()),
        "differ": float(both.sum()),
        "right": float((np.sign(predicted) == np.sign(real))[both].sum()),
        "larger": float((np.sign(real) == LARGER[axis][2])[both].sum()),
        "seed": float((np.sign(seeds) == np.sign(others))[sure].mean()),
        "correlation": float(spearmanr(predicted, real).statistic),
        "size": 100 * float(np.abs(real).mean()),
    }


def rank_costs(results: Mapping[str, tuple[Forecast, Forecast]]) -> dict[str, list[float]]:
    """Points of trained error that a choice of the rank costs, task by task, beside the rank that is best by the other
    seeds: the least of the same means would lie below any rank's true error.

    By the command's rule (`fastest_setting`), by the predicted error alone (the mean of the ranks that share the
    least), by a coin, always the largest rank, and always the one that is best over all tasks, unknown before.
    """
    costs: dict[str, list[float]] = {"rule": [], "predicted error": [], "coin": [], "largest": []}
    always = []
    for forecast, trained in results.values():
        places = [where for where in settings() if where["adapter.rank"] == RANKS[0]]
        keys = [[key({**where, "adapter.rank": rank}) for rank in RANKS] for where in places]
        draws = np.array([[forecast["error"][name] for name in row] for row in keys]).transpose(0, 2, 1)
        was = np.array([[trained["error"][name] for name in row] for row in keys])  # (places, ranks, seeds)
        others = (was.sum(-1, keepdims=True) - was).argmin(1)[:, None]
        lost = 100 * (was - np.take_along_axis(was, others, 1)).mean(-1)
        rule = [
            fastest_setting(errors, np.array([forecast["speed"][name] for name in row]))
            for errors, row in zip(draws, keys, strict=True)
        ]
        said = draws.mean(1)
        least = said <= said.min(1, keepdims=True) + 1e-12
        costs["rule"].append(float(np.mean(lost[np.arange(len(rule)), rule])))
        costs["predicted error"].append(float(np.mean((lost * least).sum(1) / least.sum(1))))
        costs["coin"].append(float(lost.mean()))
        costs["largest"].append(float(lost[:, -1].mean()))
        always.append(lost.mean(0))
    best = int(np.mean(always, 0).argmin())
    return {**costs, f"rank {RANKS[best]}": [float(one[best]) for one in always]}


def judge(bench: Benchmark, name: str, results: Mapping[str, tuple[Forecast, Forecast]]) -> None:
    """The rows of some tasks, each with its forecast and its trained cells."""
    pairs = np.concatenate([pairs_of(*both) for both in results.values()])
    what = f"{name}: Spearman correlation of forecast and trained test error, {len(pairs)} settings"
    bench.row(what, "correlation", ours=float(spearmanr(*pairs.T).statistic), minimum=0.8)
    apart = 100 * (pairs[:, 0] - pairs[:, 1])
    bench.row(f"{name}: forecast less trained, mean", "points", ours=float(apart.mean()))
    bench.row(f"{name}: forecast less trained, mean size", "points", ours=float(np.abs(apart).mean()))
    regret = float(np.mean(rank_costs(results)["rule"]))
    bench.row(f"{name}: regret of choosing the rank by forecast", "points", ours=regret, maximum=1.0)
    held = []
    for forecast, trained in results.values():
        for rank, noise in product(RANKS, NOISES):
            along = [key(dict(zip(AXES, (rank, rows, noise), strict=True))) for rows in ROWS]
            curves = np.array([forecast["error"][name] for name in along]).T
            change = extrapolate(ROWS[:-1], curves[:, :-1], ROWS[-1] - ROWS[-2])
            assert change.low is not None and change.high is not None
            runs = np.subtract(trained["error"][along[-1]], trained["error"][along[-2]])
            held += ((change.low <= runs) & (runs <= change.high)).tolist()
    what = f"{name}: 80 % intervals for twice the rows that hold a run's trained change"
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
    forecasts = {task: whole(f"forecast-{task}", partial(predict, task)) for task in tasks}
    trained = {task: whole(f"trained-{task}", partial(train, task)) for task in tasks}
    bench = Benchmark("forecast", packages=("torch", "transformers", "peft", "numpy", "scipy"))
    held_out = [task for task in tasks if task in HELD_OUT]
    for name, some in (("all tasks", tasks), ("held-out tasks", held_out)):
        if some:
            judge(bench, name, {task: (forecasts[task], trained[task]) for task in some})
    results = {task: (forecasts[task], trained[task]) for task in tasks}
    for axis, (where, baseline, _) in LARGER.items():
        found = directions(results, axis)
        named = f"{where}: of {found['differ']:.0f} pairs with a predicted and a trained difference"
        bench.row(f"{where}: pairs with one predicted error, of {found['pairs']:.0f}", "pairs", ours=found["same"])
        bench.row(f"{named}, sign right", "pairs", ours=found["right"], peer=found["larger"], peer_name=baseline)
        bench.row(f"{where}: sign of one seed that of the others", "share", ours=found["seed"])
        bench.row(f"{where}: Spearman correlation of differences", "correlation", ours=found["correlation"])
        bench.row(f"{where}: mean size of a trained difference", "points", ours=found["size"])
    of_rank = rank_costs(results)
    for choice, points in of_rank.items():
        bench.row(f"cost of a rank, {choice}, {len(tasks)} tasks", "points", ours=float(np.mean(points)))
    for choice in [choice for choice in of_rank if choice != "rule"] if len(tasks) > 2 else []:
        gap = t_interval(list(np.subtract(of_rank["rule"], of_rank[choice])))
        row = bench.row(f"cost of a rank, rule − {choice}, mean over tasks", "points", ours=gap.value)
        row["difference"] = {"mean": gap.value, "low": gap.low, "high": gap.high, "confidence": 0.95}
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
