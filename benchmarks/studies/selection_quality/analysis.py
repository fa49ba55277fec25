"""From results to the document: endpoints, intervals, corrected p-values, recall, coverage, trials."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from benchmarks.studies.selection_quality.answers import answers, protocol
from benchmarks.studies.selection_quality.cells import Result
from benchmarks.studies.selection_quality.plan import Plan
from benchmarks.studies.selection_quality.runner import Outcome
from flatshift.experiments.statistics.intervals import (
    holm_adjust,
    paired_test,
    parse_correctness,
    seed_item_bootstrap,
    t_interval,
)
from flatshift.finetune.seeds import numpy_generator

BySeed = dict[int, float]
_RESAMPLES = 2000
FIGURES = ("recall", "precision", "words", "distance", "length")


def analyse(plan: Plan, outcome: Outcome) -> dict[str, Any]:
    """quality.json: everything that the page shows."""
    study = plan.study
    budget = study.primary_budget
    results = list(everything(outcome))
    names = ("kind", "arm", "target", "budget", "seed", "lr", "status", "reason")
    document: dict[str, Any] = {
        "recipe": plan.resolved.name,
        "baseline": study.baseline,
        "focus": study.focus,
        "primary_budget": budget,
        "exploratory": any(plan.missing.values()),
        "missing": {what: list(names) for what, names in plan.missing.items() if names},
        "unit": study.unit,
        "seeds": study.seeds,
        "protocol": protocol(plan),
        "pool": {name: outcome.pool[name] for name in ("passages", "kept", "skipped", "dropped", "domains")},
        "targets": {target: _target(plan, outcome, target) for target in study.targets},
        "arms": {
            name: {"note": arm.note, "source": arm.source, **_endpoints(plan, outcome, name, study.baseline, budget)}
            for name, arm in study.arms.items()
        },
        "against": {
            arm: _endpoints(plan, outcome, study.focus, arm, budget)
            for arm in study.arms
            if arm not in (study.focus, study.baseline) and study.focus != study.baseline
        },
        "trials": [_trials(outcome, pair) for pair in outcome.trials],
        "fine_tune_trials": {
            target: {f"{lr:g}": result["metrics"].get("accuracy") for lr, result in some.items()}
            for target, some in outcome.fine_tune_trials.items()
        },
        "failed": [{name: r.get(name) for name in names} for r in results if r["status"] != "done"],
        "cells": len(results),
        "cpu_s": round(math.fsum(result["cpu_s"] for result in results), 1),
    }
    for metric in metrics(plan):
        _correct([arm[metric] for name, arm in document["arms"].items() if name != study.baseline])
        _correct([results[metric] for results in document["against"].values()])
    document["answers"] = answers(document)
    return document


def metrics(plan: Plan) -> tuple[str, ...]:
    """Endpoints of a study."""
    study = plan.study
    return (
        "nats",
        "accuracy",
        *(("form_nats",) * (study.form or study.form_after)),
        *(("pool_nats",) * study.forgetting),
    )


def everything(outcome: Outcome) -> Iterator[Result]:
    """Every result of a study, each once."""
    groups: list[Sequence[Result]] = [[outcome.pool, outcome.features], list(outcome.tuned_on.values())]
    groups += [list(some.values()) for some in (*outcome.trials.values(), *outcome.fine_tune_trials.values())]
    groups += [*outcome.selections.values(), *outcome.finals.values()]
    yield from {result["cell"]: result for group in groups for result in group}.values()


def _values(results: Sequence[Result], metric: str) -> BySeed:
    """A metric by seed, of the runs that ended."""
    done = (result for result in results if result["status"] == "done" and metric in result["metrics"])
    return {int(result["seed"]): float(result["metrics"][metric]) for result in done}


def _finals(plan: Plan, outcome: Outcome, arm: str, target: str, budget: int | None) -> list[Result]:
    return outcome.finals.get((arm, target, budget if plan.study.has_budget(arm) else None), [])


# --------------------------------------------------------------------------------------------- endpoints


def _endpoints(plan: Plan, outcome: Outcome, ours: str, base: str, budget: int) -> dict[str, Any]:
    """An arm minus another, mean over targets by seed: of every metric."""
    if ours == base:
        return dict.fromkeys(metrics(plan))
    return {metric: _endpoint(plan, outcome, ours, base, budget, metric) for metric in metrics(plan)}


def _endpoint(plan: Plan, outcome: Outcome, ours: str, base: str, budget: int, metric: str) -> dict[str, Any] | None:
    sides: list[BySeed] = []
    for arm in (ours, base):
        by_target = [_values(_finals(plan, outcome, arm, t, budget), metric) for t in plan.study.targets]
        seeds = set.intersection(*map(set, by_target))
        sides.append({s: math.fsum(values[s] for values in by_target) / len(by_target) for s in sorted(seeds)})
    result = paired_test(sides[0], sides[1])
    if result is None:
        return None
    result["over_targets"] = _over_targets(plan, outcome, ours, base, budget, metric)
    if metric == "accuracy":
        result["bootstrap"] = _bootstrap(plan, outcome, ours, base, budget, sorted(set(sides[0]) & set(sides[1])))
    return {**result, "p_holm": None}


def _over_targets(
    plan: Plan, outcome: Outcome, ours: str, base: str, budget: int, metric: str
) -> dict[str, Any] | None:
    """t-interval of the mean over targets, from each one's mean over paired seeds. None for fewer than three."""
    differences = []
    for target in plan.study.targets:
        first, second = (_values(_finals(plan, outcome, arm, target, budget), metric) for arm in (ours, base))
        seeds = first.keys() & second.keys()
        differences.append(math.fsum(first[s] - second[s] for s in seeds) / len(seeds))
    return asdict(t_interval(differences)) if len(differences) > 2 else None


def _bootstrap(
    plan: Plan, outcome: Outcome, ours: str, base: str, budget: int, seeds: Sequence[int]
) -> dict[str, Any] | None:
    """95 % interval of an accuracy endpoint over resampled seeds × test rows; None where one seed is all there is."""
    if len(seeds) < 2:
        return None
    differences = []
    for target in plan.study.targets:
        sides = []
        for arm in (ours, base):
            runs = {r["seed"]: r for r in _finals(plan, outcome, arm, target, budget) if r["status"] == "done"}
            sides.append(np.stack([parse_correctness(runs[seed]["items"]["right"]) for seed in seeds]))
        differences.append(sides[0] - sides[1])
    rng = numpy_generator(0, "quality", "bootstrap", ours, base)
    return seed_item_bootstrap(differences, resamples=_RESAMPLES, rng=rng)


def _correct(results: Sequence[dict[str, Any] | None]) -> None:
    """Holm's p over one family, written into it; a member without a p counts as 1, so that it stays as large."""
    family = {str(i): f["p"] if f is not None and f["p"] is not None else 1.0 for i, f in enumerate(results)}
    for i, p in holm_adjust(family).items():
        member = results[int(i)]
        if member is not None and member["p"] is not None:
            member["p_holm"] = p


# --------------------------------------------------------------------------------------------- targets


def _target(plan: Plan, outcome: Outcome, target: str) -> dict[str, Any]:
    study = plan.study
    cold = [arm for arm in study.arms if study.arms[arm].source == "none"]
    results: dict[str, Any] = {
        "file": study.targets[target].file,
        "domains": list(study.targets[target].domains),
        "fine_tune_lr": outcome.fine_tune.get(target),
        "fine_tune_edge": outcome.fine_tune_edge.get(target),
        **_floor(_finals(plan, outcome, cold[0] if cold else study.baseline, target, study.budgets_of(target)[0])),
        "budgets": {},
        "controls": {},
    }
    for budget in study.budgets_of(target):
        results["budgets"][str(budget)] = {
            arm: _cell(plan, outcome, arm, target, budget) for arm in study.arms if study.has_budget(arm)
        }
    others = [arm for arm in study.arms if not study.has_budget(arm)]
    results["controls"] = {arm: _cell(plan, outcome, arm, target, study.primary_budget) for arm in others}
    return results


def _floor(results: Sequence[Result]) -> dict[str, Any]:
    """Majority baseline, and by how many standard errors (seeds and test items) the given runs exceed it."""
    values, floors = _values(results, "accuracy"), _values(results, "majority_floor")
    if not values:
        return {"floor": None, "margin_se": None, "informative": None}
    floor, mean = next(iter(floors.values())), math.fsum(values.values()) / len(values)
    items = len(next(r["items"]["right"] for r in results if r["status"] == "done"))
    spread = float(np.var(list(values.values()), ddof=1)) / len(values) if len(values) > 1 else 0.0
    error = math.sqrt(spread + mean * (1 - mean) / items)
    margin = min((mean - floor) / error, 1e6) if error else (1e6 if mean > floor else 0.0)
    return {"floor": floor, "margin_se": margin, "informative": margin >= 3}


def _cell(plan: Plan, outcome: Outcome, arm: str, target: str, budget: int) -> dict[str, Any]:
    """One row of a target's table, beside the baseline and the focus at this budget."""
    study = plan.study
    results, base, focus = (_finals(plan, outcome, a, target, budget) for a in (arm, study.baseline, study.focus))
    records: dict[str, Any] = {"lr": outcome.chosen.get((arm, target))}
    for metric in ("nats", "accuracy", "f1_macro"):
        values = _values(results, metric)
        records[metric] = _interval(values.values())
        if metric != "f1_macro":
            same = arm == study.baseline
            records[f"{metric}_difference"] = None if same else paired_test(values, _values(base, metric))
            records[f"{metric}_focus"] = None if arm == study.focus else paired_test(_values(focus, metric), values)
    for name in ("passages", "tokens", "epochs"):
        records[name] = _mean([r["text"].get(name) for r in results if r["status"] == "done"])
    if study.has_budget(arm):
        chosen = [r["figures"][str(budget)] for r in outcome.selections[arm, target] if r["status"] == "done"]
        for name in FIGURES:
            records[name] = _interval(figures[name] for figures in chosen if figures[name] is not None)
        mix: Counter[str] = Counter()
        for figures in chosen:
            mix.update({name: share / len(chosen) for name, share in figures["domains"].items()})
        records["domains"] = dict(mix.most_common(5))
    return records


def _interval(values: Any) -> dict[str, Any] | None:
    there = list(values)
    return asdict(t_interval(there)) if there else None


def _mean(values: Sequence[float | None]) -> float | None:
    there = [v for v in values if v is not None]
    return math.fsum(there) / len(there) if there else None


def _trials(outcome: Outcome, pair: tuple[str, str]) -> Mapping[str, Any]:
    """One row of the tuning table."""
    results = outcome.trials[pair]
    return {
        "arm": pair[0],
        "target": pair[1],
        "trials": len(results),
        "failed": sum(result["status"] != "done" for result in results.values()),
        "lr": outcome.chosen[pair],
        "lowest": min(results),
        "highest": max(results),
        "on_edge": outcome.edge[pair],
        "nats": results[outcome.chosen[pair]]["metrics"]["nats"],
    }
