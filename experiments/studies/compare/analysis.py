"""Analysis of a comparison: endpoints, intervals, corrected p-values, majority baselines, costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from flatshift.experiments.recipe.schema import Comparison
from flatshift.experiments.statistics.intervals import (
    holm_adjust,
    paired_test,
    parse_correctness,
    seed_item_bootstrap,
    t_interval,
)
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
    others = {name: m for name, m in methods.items() if name != study.baseline}
    adjusted = holm_adjust(
        {name: m["primary"]["p"] for name, m in others.items() if m["primary"] and m["primary"]["p"] is not None}
    )
    for name, p in adjusted.items():
        methods[name]["primary"]["p_holm"] = p
    return {
        "recipe": plan.resolved.name,
        "metric": "accuracy" if study.metric == "auto" else study.metric,
        "baseline": study.baseline,
        "protocol": describe_protocol(study),
        "informative": informative,
        "tasks": tables,
        "methods": methods,
        "controls": [
            _control_difference(plan, outcome, control, of, informative) for control, of in study.controls.items()
        ],
        "trials": [_tuning_row(plan, outcome, pair) for pair in plan.pairs],
        "diverged": [
            {
                "kind": r["kind"],
                "method": r["method"],
                "task": r["task"],
                "seed": r["seed"],
                "setting": r["setting"],
                "status": r["status"],
                "reason": r["reason"],
            }
            for r in _all_results(outcome)
            if r["status"] != "done"
        ],
        "cells": len(list(_all_results(outcome))),
        "cpu_s": round(math.fsum(r["cpu_s"] for r in _all_results(outcome)), 1),
    }


def _all_results(outcome: ComparisonResults) -> Any:
    for trials in outcome.trials.values():
        yield from (result for _, result in trials)
    for group in (outcome.finals, outcome.equal_time):
        for results in group.values():
            yield from results


def _majority_baseline(plan: ComparisonPlan, outcome: ComparisonResults, task: str) -> float | None:
    """Return the majority baseline of a task's test rows; None without classes."""
    if not plan.classifies(task):
        return None
    for (_, where), results in outcome.finals.items():
        for result in results:
            if where == task and "majority_floor" in result["metrics"]:
                return float(result["metrics"]["majority_floor"])
    return None


def _values_by_seed(
    plan: ComparisonPlan, outcome: ComparisonResults, task: str, results: Sequence[Result], metric: str | None = None
) -> BySeed:
    """Return a metric by seed; a diverged run gets the majority baseline as accuracy, and no value of other metrics."""
    wanted = metric or plan.metric(task)
    found = {}
    for result in results:
        if result["status"] == "done":
            if result["metrics"][wanted] is not None:
                found[int(result["seed"])] = float(result["metrics"][wanted])
        elif (
            result["status"] == "diverged"
            and wanted == "accuracy"
            and (floor := _majority_baseline(plan, outcome, task)) is not None
        ):
            found[int(result["seed"])] = floor
    return found


def _interval_or_none(values: Sequence[float]) -> dict[str, Any] | None:
    return asdict(t_interval(values)) if values else None


def _analyse_task(plan: ComparisonPlan, outcome: ComparisonResults, task: str) -> dict[str, Any]:
    study = plan.study
    base = _values_by_seed(plan, outcome, task, outcome.finals[study.baseline, task])
    floor = _majority_baseline(plan, outcome, task)
    informative, margin = None, None
    right = (
        _values_by_seed(plan, outcome, task, outcome.finals[study.baseline, task], "accuracy")
        if floor is not None
        else {}
    )
    if floor is not None and right:
        mean = t_interval(list(right.values())).value
        told = outcome.finals[study.baseline, task][0].get("items")
        n = len(told) if isinstance(told, str) else study.tasks[task].test
        spread = float(np.var(list(right.values()), ddof=1)) / len(right) if len(right) > 1 else 0.0
        error = math.sqrt(spread + mean * (1 - mean) / n)
        margin = (mean - floor) / error if error else (math.inf if mean > floor else 0.0)
        margin = min(margin, 1e6)
        informative = margin >= 3
    methods = {}
    for method in study.methods:
        if task not in study.runs_on(method):
            continue
        values = _values_by_seed(plan, outcome, task, outcome.finals[method, task])
        shorter = outcome.equal_time.get((method, task))
        methods[method] = {
            "mean": _interval_or_none(list(values.values())),
            "difference": None if method == study.baseline else paired_test(values, base),
            "f1_macro": _mean_metric(plan, outcome, task, method, "f1_macro"),
            "loss": _mean_metric(plan, outcome, task, method, "loss"),
            "sharpness": _mean_or_none([r.get("sharpness") for r in outcome.finals[method, task]]),
            "step_cpu_s": _mean_or_none([r.get("step_cpu_s") for r in outcome.finals[method, task]]),
            "equal_time": None
            if shorter is None
            else {
                "steps": shorter[0]["steps"],
                "difference": paired_test(_values_by_seed(plan, outcome, task, shorter), base),
            },
        }
    return {
        "metric": plan.metric(task),
        "counts": plan.counts(task),
        "file": study.tasks[task].file,
        "rows": {
            "train": study.tasks[task].train,
            "validation": study.tasks[task].validation,
            "test": study.tasks[task].test,
        },
        "steps": plan.steps(task),
        "floor": floor,
        "margin_se": margin,
        "informative": informative,
        "methods": methods,
    }


def _mean_metric(plan: ComparisonPlan, outcome: ComparisonResults, task: str, method: str, metric: str) -> float | None:
    found = [r["metrics"].get(metric) for r in outcome.finals[method, task] if r["status"] == "done"]
    return _mean_or_none(found)


def _mean_or_none(values: Sequence[float | None]) -> float | None:
    there = [v for v in values if v is not None]
    return math.fsum(there) / len(there) if there else None


def _analyse_method(
    plan: ComparisonPlan, outcome: ComparisonResults, name: str, informative: Sequence[str], counted: Sequence[str]
) -> dict[str, Any]:
    study = plan.study
    method = study.methods[name]
    mine = [task for task in informative if task in study.runs_on(name)]
    everything = [task for task in counted if task in study.runs_on(name)]
    primary = compute_endpoint(plan, outcome, name, study.baseline, mine)
    if primary is not None and name != study.baseline:
        primary["tasks"] = mine
        primary["p_holm"] = None
        primary["bootstrap"] = _bootstrap_endpoint(plan, outcome, name, study.baseline, mine)
        sign = -1 if find_metric(study.metric).lower else 1
        primary["wins"] = sum(sign * d > 0 for d in primary["by_seed"].values())
    ratio = outcome.step_ratio.get(name)
    return {
        "note": method.note,
        "confirmatory": method.confirmatory,
        "seeds": len(study.seeds_of(name)),
        "tasks": study.runs_on(name),
        "primary": None if name == study.baseline else primary,
        "all_tasks": None
        if name == study.baseline
        else compute_endpoint(plan, outcome, name, study.baseline, everything),
        "equal_time": _equal_time_endpoint(plan, outcome, name, mine),
        "step_ratio": ratio,
        "sharpness": _sharpness_ratio(plan, outcome, name),
    }


def compute_endpoint(
    plan: ComparisonPlan, outcome: ComparisonResults, ours: str, base: str, tasks: Sequence[str]
) -> dict[str, Any] | None:
    """Compute the mean over `tasks` of (ours − base) seed by seed, with its interval and p."""
    if not tasks or ours == base:
        return None
    mine, theirs = (
        {task: _values_by_seed(plan, outcome, task, outcome.finals[m, task]) for task in tasks} for m in (ours, base)
    )
    return paired_test(*_task_means(mine, theirs))


def _task_means(mine: Mapping[str, BySeed], theirs: Mapping[str, BySeed]) -> tuple[BySeed, BySeed]:
    """Return means over tasks by seed, for the seeds that every task has on both sides."""
    seeds = set.intersection(*(set(side[t]) for side in (mine, theirs) for t in side))
    a, b = (
        {seed: math.fsum(values[seed] for values in side.values()) / len(side) for seed in sorted(seeds)}
        for side in (mine, theirs)
    )
    return a, b


def _equal_time_endpoint(
    plan: ComparisonPlan, outcome: ComparisonResults, name: str, tasks: Sequence[str]
) -> dict[str, Any] | None:
    """Compute the endpoint with the shorter runs; None if a step of the method costs about as much as the
    baseline's."""
    if not tasks or any((name, task) not in outcome.equal_time for task in tasks):
        return None
    base = plan.study.baseline
    mine = {task: _values_by_seed(plan, outcome, task, outcome.equal_time[name, task]) for task in tasks}
    theirs = {task: _values_by_seed(plan, outcome, task, outcome.finals[base, task]) for task in tasks}
    return paired_test(*_task_means(mine, theirs))


def _sharpness_ratio(plan: ComparisonPlan, outcome: ComparisonResults, name: str) -> dict[str, Any] | None:
    """Compute the ratio of sharpness to the baseline's over tasks and seeds, from ln: mean and interval; None if not
    measured."""
    base = plan.study.baseline
    logs = []
    for task in plan.study.runs_on(name):
        for ours, peer in zip(outcome.finals[name, task], outcome.finals[base, task], strict=False):
            a, b = ours.get("sharpness"), peer.get("sharpness")
            if a is not None and b is not None and a > 0 and b > 0:
                logs.append(math.log(a / b))
    if not logs:
        return None
    found = t_interval(logs)
    return {
        "ratio": math.exp(found.value),
        "low": None if found.low is None else math.exp(found.low),
        "high": None if found.high is None else math.exp(found.high),
        "n": found.n,
    }


def _bootstrap_endpoint(
    plan: ComparisonPlan, outcome: ComparisonResults, ours: str, base: str, tasks: Sequence[str]
) -> dict[str, Any] | None:
    """Compute the endpoint's 95 % percentile interval over resampled seeds × test items (the same for both sides).

    None for metrics other than accuracy, which are not means over items.
    """
    if any(plan.metric(task) != "accuracy" for task in tasks):
        return None
    count = min(len(outcome.finals[ours, tasks[0]]), len(outcome.finals[base, tasks[0]])) if tasks else 0
    if not count:
        return None
    differences = []
    for task in tasks:
        floor = _majority_baseline(plan, outcome, task) or 0.0
        sides = []
        for method in (ours, base):
            told = [result.get("items") for result in outcome.finals[method, task][:count]]
            found = [parse_correctness(text) if isinstance(text, str) else None for text in told]
            width = next((len(f) for f in found if f is not None), 1)
            sides.append(np.stack([np.full(width, floor) if f is None else f for f in found]))
        if sides[0].shape != sides[1].shape:
            return None
        differences.append(sides[0] - sides[1])
    rng = numpy_generator(0, "comparison", "bootstrap", ours)
    return seed_item_bootstrap(differences, resamples=plan.study.resamples, rng=rng)


def _control_difference(
    plan: ComparisonPlan, outcome: ComparisonResults, control: str, of: str, informative: Sequence[str]
) -> dict[str, Any]:
    """Compute method − control on the seeds and tasks that both have."""
    study = plan.study
    tasks = [t for t in informative if t in study.runs_on(control) and t in study.runs_on(of)]
    return {
        "method": of,
        "control": control,
        "difference": compute_endpoint(plan, outcome, of, control, tasks),
        "tasks": tasks,
    }


def _tuning_row(plan: ComparisonPlan, outcome: ComparisonResults, pair: tuple[str, str]) -> dict[str, Any]:
    """Return one row of the tuning table."""
    runs = outcome.trials[pair]
    chosen = outcome.chosen[pair]
    return {
        "method": pair[0],
        "task": pair[1],
        "trials": len(runs),
        "failed": sum(result["status"] != "done" for _, result in runs),
        "chosen": chosen.overrides(),
        "on_edge": outcome.edge[pair],
        "lowest_lr": min(run.setting.lr for run, _ in runs),
        "highest_lr": max(run.setting.lr for run, _ in runs),
        "validation": [result["metrics"][plan.metric(pair[1])] for run, result in runs if run.setting == chosen],
    }


def describe_protocol(study: Comparison) -> list[str]:
    """Return the protocol as sentences for the page and the results file, in order."""
    confirmatory = [name for name, method in study.methods.items() if method.confirmatory and name != study.baseline]
    what, tasks, judged, floor, diverged = _metric_wording(study.metric)
    return [
        f"Primary endpoint, named beforehand: the mean over {tasks} of test {what}, method minus {study.baseline}, per "
        "seed; its mean over seeds with a two-sided paired t-test. Per-task figures, generation, macro F1, sharpness "
        "and equal-time runs are secondary.",
        f"Every method, {study.baseline} included, gets {study.trials} first trials on every task it runs on and "
        f"{study.rounds} further ones: beyond the edge where its best learning rate is on one, else between its best "
        "and the better neighbour. A method's own knobs come out of the same trials.",
        f"Trials use the seed {study.tuning_seeds[0]}{_describe_finalists(study)} No final run uses such a seed. "
        "Trials are evaluated "
        f"on validation rows by {judged}, ties by loss. Test rows are evaluated once, in the final runs; the last "
        "step's adapter is taken.",
        "A seed fixes the labelled subset, the order, the adapter's initialisation (where methods share it) and "
        "dropout for all methods.",
        f"{study.seeds} seeds: {', '.join([study.baseline, *confirmatory])}. {study.exploratory_seeds} seeds: the "
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
    """Return the endpoint's metric, its tasks, the metric of trials, tasks without a baseline, and the diverged-run
    rule."""
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


def _describe_finalists(study: Comparison) -> str:
    """Describe the further runs of the best trials before one is chosen."""
    further = study.tuning_seeds[1:]
    if not further:
        return "."
    return (
        f"; the best {study.finalists} of each method and task run again under {', '.join(map(str, further))}, and the "
        "one with the best mean over all tuning seeds is taken."
    )
