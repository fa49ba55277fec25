"""Analysis of a comparison: endpoints, intervals, corrected p-values, majority baselines, costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from flatshift.experiments.recipe.schema import Comparison
from flatshift.experiments.statistics import intervals
from flatshift.experiments.studies.compare.comparison_plan import ComparisonPlan, ComparisonResults, Result
from flatshift.finetune.evaluate.metrics import find_metric
from flatshift.finetune.seeds import numpy_generator

BySeed = dict[int, float]


def analyse(plan: ComparisonPlan, outcome: ComparisonResults) -> dict[str, Any]:
    """Return the contents of comparison.json: everything on the page."""
    study = plan.study
    tables = {task: _analyse_task(plan, outcome, task) for task in study.tasks}
    counted = [task for task in study.tasks if plan.counts(task)]
    informative = [task for task in counted if tables[task]["informative"] is not False]
    methods = {name: _analyse_method(plan, outcome, name, informative, counted) for name in study.methods}
    primary = {name: m["primary"] for name, m in methods.items() if m["primary"]}  # the baseline has none
    p_values = {name: endpoint["p"] for name, endpoint in primary.items() if endpoint["p"] is not None}
    for name, p in intervals.holm_adjust(p_values).items():
        primary[name]["p_holm"] = p
    controls = []
    for control, method in study.controls.items():  # on the seeds and tasks that both have
        shared = [t for t in informative if t in study.runs_on(control) and t in study.runs_on(method)]
        difference = compute_endpoint(plan, outcome, method, control, shared)
        controls.append({"method": method, "control": control, "difference": difference, "tasks": shared})
    trials = []
    for pair in plan.pairs:
        runs, chosen = outcome.trials[pair], outcome.chosen[pair]
        trials.append(
            {
                "method": pair[0],
                "task": pair[1],
                "trials": len(runs),
                "failed": sum(result["status"] != "done" for _, result in runs),
                "chosen": chosen.overrides(),
                "on_edge": outcome.on_edge[pair],
                "lowest_lr": min(run.setting.lr for run, _ in runs),
                "highest_lr": max(run.setting.lr for run, _ in runs),
                "validation": [
                    result["metrics"][plan.metric(pair[1])] for run, result in runs if run.setting == chosen
                ],
            }
        )
    groups = [*outcome.finals.values(), *outcome.equal_time.values()]
    results = [result for trials in outcome.trials.values() for _, result in trials]
    results += [result for group in groups for result in group]
    reported = ("kind", "method", "task", "seed", "setting", "status", "reason")
    return {
        "recipe": plan.resolved.name,
        "metric": "accuracy" if study.metric == "auto" else study.metric,
        "baseline": study.baseline,
        "protocol": describe_protocol(study),
        "informative": informative,
        "tasks": tables,
        "methods": methods,
        "controls": controls,
        "trials": trials,
        "diverged": [{key: r[key] for key in reported} for r in results if r["status"] != "done"],
        "cells": len(results),
        "cpu_s": round(math.fsum(r["cpu_s"] for r in results), 1),
    }


def _majority_baseline(plan: ComparisonPlan, outcome: ComparisonResults, task: str) -> float | None:
    """Return the majority baseline of a task's test rows; None without classes."""
    if not plan.classifies(task):
        return None
    metrics = [result["metrics"] for (_, name), group in outcome.finals.items() if name == task for result in group]
    return next((float(m["majority_floor"]) for m in metrics if "majority_floor" in m), None)


def _values_by_seed(
    plan: ComparisonPlan, outcome: ComparisonResults, task: str, results: Sequence[Result], metric: str | None = None
) -> BySeed:
    """Return a metric by seed; a diverged run gets the majority baseline as accuracy, and no value of other metrics."""
    metric = metric or plan.metric(task)
    floor = _majority_baseline(plan, outcome, task) if metric == "accuracy" else None
    values = {}
    for result in results:
        value = floor if result["status"] == "diverged" else None
        if result["status"] == "done":
            value = result["metrics"][metric]
        if value is not None:
            values[int(result["seed"])] = float(value)
    return values


def _analyse_task(plan: ComparisonPlan, outcome: ComparisonResults, task: str) -> dict[str, Any]:
    study = plan.study
    base = _values_by_seed(plan, outcome, task, outcome.finals[study.baseline, task])
    floor = _majority_baseline(plan, outcome, task)
    margin = None if floor is None else _margin_over(floor, plan, outcome, task)
    methods = {}
    for method in study.methods:
        if task not in study.runs_on(method):
            continue
        finals, shorter = outcome.finals[method, task], outcome.equal_time.get((method, task))
        metrics = [result["metrics"] for result in finals if result["status"] == "done"]
        values = _values_by_seed(plan, outcome, task, finals)
        equal_time = None
        if shorter is not None:
            difference = intervals.paired_test(_values_by_seed(plan, outcome, task, shorter), base)
            equal_time = {"steps": shorter[0]["steps"], "difference": difference}
        methods[method] = {
            "mean": asdict(intervals.t_interval(list(values.values()))) if values else None,
            "difference": None if method == study.baseline else intervals.paired_test(values, base),
            "f1_macro": _mean_or_none([m.get("f1_macro") for m in metrics]),
            "loss": _mean_or_none([m.get("loss") for m in metrics]),
            "sharpness": _mean_or_none([result.get("sharpness") for result in finals]),
            "sharpness_ratio": (_sharpness_ratio(plan, outcome, method, [task]) or {}).get("ratio"),
            "train_error": _mean_or_none([result.get("train_error") for result in finals]),
            "step_cpu_s": _mean_or_none([result.get("step_cpu_s") for result in finals]),
            "equal_time": equal_time,
        }
    own = study.tasks[task]
    return {
        "metric": plan.metric(task),
        "counts": plan.counts(task),
        "file": own.file,
        "rows": plan.rows(task).counts(own),
        "steps": plan.steps(task),
        "floor": floor,
        "margin_se": margin,
        "informative": None if margin is None else margin >= 3,
        "methods": methods,
    }


def _margin_over(floor: float, plan: ComparisonPlan, outcome: ComparisonResults, task: str) -> float | None:
    """Return how far the baseline's accuracy is above the majority baseline, in standard errors; None without any."""
    finals = outcome.finals[plan.study.baseline, task]
    accuracies = list(_values_by_seed(plan, outcome, task, finals, "accuracy").values())
    if not accuracies:
        return None
    mean = intervals.t_interval(accuracies).value
    items = finals[0].get("items")
    n = len(items) if isinstance(items, str) else plan.study.tasks[task].test
    spread = float(np.var(accuracies, ddof=1)) / len(accuracies) if len(accuracies) > 1 else 0.0
    share = (mean * n + 0.5) / (n + 1)  # all rows right is no proof that none can be wrong
    return (mean - floor) / math.sqrt(spread + share * (1 - share) / n)


def _mean_or_none(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _analyse_method(
    plan: ComparisonPlan, outcome: ComparisonResults, name: str, informative: Sequence[str], counted: Sequence[str]
) -> dict[str, Any]:
    study = plan.study
    method, base = study.methods[name], study.baseline
    tasks = [task for task in informative if task in study.runs_on(name)]
    primary = compute_endpoint(plan, outcome, name, base, tasks)  # None for the baseline itself
    if primary is not None:
        primary["tasks"] = tasks
        primary["p_holm"] = None
        primary["bootstrap"] = _bootstrap_endpoint(plan, outcome, name, base, tasks)
        sign = -1 if find_metric(study.metric).lower else 1
        primary["wins"] = sum(sign * d > 0 for d in primary["by_seed"].values())
    equal_time = None  # also if a step costs about as much as the baseline's
    if tasks and all((name, task) in outcome.equal_time for task in tasks):
        shorter = [outcome.equal_time[name, task] for task in tasks]
        equal_time = _compare_sides(plan, outcome, tasks, shorter, [outcome.finals[base, task] for task in tasks])
    return {
        "note": method.note,
        "confirmatory": method.confirmatory,
        "seeds": len(study.seeds_of(name)),
        "tasks": study.runs_on(name),
        "primary": primary,
        "all_tasks": compute_endpoint(plan, outcome, name, base, [t for t in counted if t in study.runs_on(name)]),
        "equal_time": equal_time,
        "step_ratio": outcome.step_ratio.get(name),
        "sharpness": _sharpness_ratio(plan, outcome, name, tasks or study.runs_on(name)),
    }


def compute_endpoint(
    plan: ComparisonPlan, outcome: ComparisonResults, ours: str, base: str, tasks: Sequence[str]
) -> dict[str, Any] | None:
    """Compute the mean over `tasks` of (ours − base) seed by seed, with its interval and p."""
    if not tasks or ours == base:
        return None
    sides = ([outcome.finals[name, task] for task in tasks] for name in (ours, base))
    return _compare_sides(plan, outcome, tasks, *sides)


def _compare_sides(
    plan: ComparisonPlan, outcome: ComparisonResults, tasks: Sequence[str], *sides: Sequence[Sequence[Result]]
) -> dict[str, Any] | None:
    """Test the means over tasks of two sides' results, seed by seed, for the seeds that every task has on both."""
    values = [
        [_values_by_seed(plan, outcome, task, results) for task, results in zip(tasks, side, strict=True)]
        for side in sides
    ]
    seeds = sorted(set.intersection(*(set(by_seed) for side in values for by_seed in side)))
    ours, base = ({seed: math.fsum(v[seed] for v in side) / len(side) for seed in seeds} for side in values)
    return intervals.paired_test(ours, base)


def _sharpness_ratio(
    plan: ComparisonPlan, outcome: ComparisonResults, name: str, tasks: Sequence[str]
) -> dict[str, Any] | None:
    """Compute the ratio of sharpness to the baseline's over `tasks`, from means over seeds of ln; None if not measured.
    A pair of runs in which one is not positive counts in `pairs` and not in `n`."""
    base = plan.study.baseline
    logs, pairs = dict[str, list[float]](), 0
    for task in tasks:
        for ours, peer in zip(outcome.finals[name, task], outcome.finals[base, task], strict=False):
            a, b = ours.get("sharpness"), peer.get("sharpness")
            if a is None or b is None:
                continue
            pairs += 1
            if a > 0 and b > 0:
                logs.setdefault(task, []).append(math.log(a / b))
    if not logs:
        return None
    interval = intervals.t_interval([math.fsum(of_task) / len(of_task) for of_task in logs.values()])
    ends = (interval.value, interval.low, interval.high)
    ratio, low, high = (None if end is None else math.exp(end) for end in ends)
    return {"ratio": ratio, "low": low, "high": high, "n": sum(map(len, logs.values())), "pairs": pairs}


def _bootstrap_endpoint(
    plan: ComparisonPlan, outcome: ComparisonResults, ours: str, base: str, tasks: Sequence[str]
) -> dict[str, Any] | None:
    """Compute the endpoint's 95 % percentile interval over resampled seeds × test items (the same for both sides). None
    for metrics other than accuracy, which are not means over items."""
    if any(plan.metric(task) != "accuracy" for task in tasks):
        return None
    runs = [outcome.finals[method, task] for task in tasks for method in (ours, base)]
    kept = [i for i, seed in enumerate(zip(*runs, strict=False)) if all(run["status"] != "failed" for run in seed)]
    if len(kept) < 2:
        return None
    differences = []
    for task in tasks:
        floor = _majority_baseline(plan, outcome, task) or 0.0
        sides = []
        for method in (ours, base):
            texts = [outcome.finals[method, task][i].get("items") for i in kept]
            rows = [intervals.parse_correctness(text) if isinstance(text, str) else None for text in texts]
            width = next((len(row) for row in rows if row is not None), 1)
            sides.append(np.stack([np.full(width, floor) if row is None else row for row in rows]))
        if sides[0].shape != sides[1].shape:
            return None
        differences.append(sides[0] - sides[1])
    rng = numpy_generator(0, "comparison", "bootstrap", ours)
    return intervals.seed_item_bootstrap(differences, resamples=plan.study.resamples, rng=rng)


def describe_protocol(study: Comparison) -> list[str]:
    """Return the protocol as sentences for the page and the results file, in order."""
    confirmatory = [name for name, method in study.methods.items() if method.confirmatory and name != study.baseline]
    endpoint, tasks, criterion, floor, diverged = _metric_wording(study.metric)
    finalists, exploratory = ".", min(study.exploratory_seeds, study.seeds)
    if further := study.tuning_seeds[1:]:
        finalists = (
            f"; the best {study.finalists} of each method and task run again under {', '.join(map(str, further))}, and "
            "the one with the best mean over all tuning seeds is taken."
        )
    return [
        f"Primary endpoint, named beforehand: the mean over {tasks} of test {endpoint}, method minus {study.baseline}, "
        "per seed; its mean over seeds with a two-sided paired t-test. Per-task figures, generation, macro F1, "
        "sharpness and equal-time runs are secondary.",
        f"Every method, {study.baseline} included, gets {study.trials} first trials on every task it runs on and "
        f"{study.rounds} further ones: beyond the edge where its best learning rate is on one, else between its best "
        "and the better neighbour. A method's own knobs come out of the same trials.",
        f"Trials use the seed {study.tuning_seeds[0]}{finalists} No final run uses such a seed. "
        "Trials are evaluated "
        f"on validation rows by {criterion}, ties by loss. Test rows are evaluated in final runs alone; the last "
        "step's adapter is taken.",
        "A seed fixes the labelled subset, the order, the adapter's initialisation (where methods share it) and "
        "dropout for all methods.",
        f"{study.seeds} seeds: {', '.join([study.baseline, *confirmatory])}. {exploratory} seeds: the "
        "others, exploratory, compared with the baseline on the same seeds.",
        "p-values are Holm-corrected over all methods together. The detectable effect is (t.975 + t.80)·s_d/√S.",
        f"A task is informative if the accuracy of the tuned {study.baseline} exceeds the majority baseline by three "
        f"standard errors (seeds and test items){floor}.",
        "The bootstrap resamples seeds and test items, the same for both sides of a difference.",
        f"Equal time: a method whose step takes more than {study.equal_time_above:g} × the baseline's CPU time is run "
        "again, same seeds and settings, with as many steps as the baseline's time allows.",
        f"A diverged final run {diverged}",
    ]


def _metric_wording(name: str) -> tuple[str, str, str, str, str]:
    """Return the endpoint's metric, its tasks, the metric of trials, tasks without a baseline, and diverged runs."""
    if name == "auto":
        return (
            "accuracy", "informative classification tasks", "the task's metric", "",
            "counts with its task's majority baseline and is listed; a diverged trial is lost. For a generation task, "
            "where there is no majority baseline, its seed is left out for both sides.",
        )  # fmt: skip
    title = find_metric(name).title
    return (
        title, "informative tasks", title, "; one without classes has no majority baseline and counts",
        "is listed and its seed left out for both sides, of accuracy it counts with its task's majority baseline; a "
        "diverged trial is lost.",
    )  # fmt: skip
