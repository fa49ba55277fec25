"""From results to the document: endpoints, intervals, corrected p-values, recall, coverage, embedders, costs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from benchmarks.studies.cells.files import Result
from benchmarks.studies.cells.rows import split_rows
from benchmarks.studies.selection_quality.answers import answers
from benchmarks.studies.selection_quality.plan import Plan
from benchmarks.studies.selection_quality.protocol import protocol
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
    budget = primary_budget(plan)
    document: dict[str, Any] = {
        "recipe": plan.resolved.name,
        "baseline": study.baseline,
        "focus": study.focus,
        "primary_budget": budget,
        "exploratory": budget != study.primary_budget or any(plan.missing.values()),
        "missing": {what: list(names) for what, names in plan.missing.items() if names},
        "unit": study.unit,
        "seeds": study.seeds,
        "protocol": protocol(plan, budget),
        "pool": {name: outcome.pool[name] for name in ("passages", "kept", "skipped", "dropped", "domains")},
        "targets": {target: _target(plan, outcome, target, budget) for target in study.targets},
        "arms": {
            arm: {"note": study.arms[arm].note, "source": study.arms[arm].source}
            | _endpoints(plan, outcome, arm, budget)
            for arm in study.arms
        },
        "against": _against(plan, outcome, budget),
        "embedders": _embedders(plan, outcome),
        "trials": [_trials(outcome, pair) for pair in outcome.chosen],
        "fine_tune_trials": {
            target: {f"{lr:g}": result["metrics"].get("accuracy") for lr, result in some.items()}
            for target, some in outcome.fine_tune_trials.items()
        },
        "failed": [_failure(result) for result in everything(outcome) if result["status"] != "done"],
        "cells": len(list(everything(outcome))),
        "cpu_s": round(math.fsum(result["cpu_s"] for result in everything(outcome)), 1),
        "costs": _costs(outcome),
    }
    for metric in metrics(plan):
        _correct([arm[metric] for name, arm in document["arms"].items() if name != study.baseline])
        _correct([found[metric] for found in document["against"].values()])
    document["answers"] = answers(document)
    return document


def metrics(plan: Plan) -> tuple[str, ...]:
    """Endpoints of a study."""
    study = plan.study
    return ("nats", "accuracy", *(("form_nats",) * study.form), *(("pool_nats",) * study.forgetting))


def primary_budget(plan: Plan) -> int | None:
    """The budget of the endpoint: the study's, or where only others run the largest that every target has."""
    shared = set.intersection(*(set(budgets) for budgets in plan.budgets.values()))
    if plan.study.primary_budget in shared:
        return plan.study.primary_budget
    return max(shared, default=None)


def everything(outcome: Outcome) -> Iterator[Result]:
    """Every result of a study, each once."""
    found: dict[str, Result] = {}
    groups: list[Sequence[Result]] = [[outcome.pool], list(outcome.features.values()), list(outcome.tuned_on.values())]
    groups += outcome.selections.values()
    groups += [list(some.values()) for some in (*outcome.trials.values(), *outcome.fine_tune_trials.values())]
    groups += [*outcome.finals.values(), *([r for pair in some for r in pair] for some in outcome.embedded.values())]
    for group in groups:
        found |= {result["cell"]: result for result in group}
    yield from found.values()


def _values(results: Sequence[Result], metric: str) -> BySeed:
    """A metric by seed, of the runs that ended."""
    return {
        int(result["seed"]): float(result["metrics"][metric])
        for result in results
        if result["status"] == "done" and metric in result["metrics"]
    }


def _point(plan: Plan, arm: str, target: str, budget: int | None) -> tuple[str, str, int | None]:
    return arm, target, budget if plan.study.has_budget(arm) else None


def _endpoints(plan: Plan, outcome: Outcome, arm: str, budget: int | None) -> dict[str, Any]:
    """Arm minus baseline, mean over targets by seed: of every metric."""
    if arm == plan.study.baseline or budget is None:
        return dict.fromkeys(metrics(plan))
    return {m: _endpoint(plan, outcome, arm, plan.study.baseline, budget, m) for m in metrics(plan)}


def _endpoint(plan: Plan, outcome: Outcome, ours: str, base: str, budget: int, metric: str) -> dict[str, Any] | None:
    sides: list[BySeed] = []
    for arm in (ours, base):
        by_target = [_values(outcome.finals[_point(plan, arm, t, budget)], metric) for t in plan.study.targets]
        seeds = set.intersection(*map(set, by_target))
        sides.append({s: math.fsum(values[s] for values in by_target) / len(by_target) for s in sorted(seeds)})
    found = paired_test(sides[0], sides[1])
    if found is None:
        return None
    if metric == "accuracy":
        found["bootstrap"] = _bootstrap(plan, outcome, ours, base, budget, sorted(set(sides[0]) & set(sides[1])))
    return {**found, "p_holm": None}


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
            runs = {r["seed"]: r for r in outcome.finals[_point(plan, arm, target, budget)] if r["status"] == "done"}
            sides.append(np.stack([parse_correctness(runs[seed]["items"]["right"]) for seed in seeds]))
        differences.append(sides[0] - sides[1])
    rng = numpy_generator(0, "quality", "bootstrap", ours, base)
    return seed_item_bootstrap(differences, resamples=_RESAMPLES, rng=rng)


def _against(plan: Plan, outcome: Outcome, budget: int | None) -> dict[str, Any]:
    """Focus minus every other arm that selects, or controls."""
    focus = plan.study.focus
    others = [arm for arm in plan.study.arms if arm not in (focus, plan.study.baseline)]
    if budget is None or focus == plan.study.baseline:
        return {}
    return {arm: {m: _endpoint(plan, outcome, focus, arm, budget, m) for m in metrics(plan)} for arm in others}


def _correct(found: Sequence[dict[str, Any] | None]) -> None:
    """Holm's p over one family, written into it; a member without a p counts as 1, so that it stays as large."""
    family = {str(i): f["p"] if f is not None and f["p"] is not None else 1.0 for i, f in enumerate(found)}
    for i, p in holm_adjust(family).items():
        member = found[int(i)]
        if member is not None and member["p"] is not None:
            member["p_holm"] = p


# --------------------------------------------------------------------------------------------- targets


def _target(plan: Plan, outcome: Outcome, target: str, primary: int | None) -> dict[str, Any]:
    study = plan.study
    spec = study.targets[target]
    cold = [outcome.finals[arm, target, None] for arm in study.arms if study.arms[arm].source == "none"]
    found: dict[str, Any] = {
        "file": spec.file,
        "domains": list(spec.domains),
        **_rows(plan, target),
        "asked": {"texts": spec.texts, "labels": spec.labels, "test": spec.test},
        "fine_tune_lr": outcome.fine_tune[target],
        "fine_tune_edge": outcome.fine_tune_edge[target],
        **_floor(outcome, target, cold[0] if cold else outcome.finals[study.baseline, target, plan.budgets[target][0]]),
        "budgets": {},
        "controls": {},
    }
    for budget in plan.budgets[target]:
        found["budgets"][str(budget)] = {
            arm: _cell(plan, outcome, arm, target, budget, budget) for arm in study.arms if study.has_budget(arm)
        }
    beside = primary if primary is not None else plan.budgets[target][-1]
    found["controls"] = {
        arm: _cell(plan, outcome, arm, target, None, beside) for arm in study.arms if not study.has_budget(arm)
    }
    return found


def _rows(plan: Plan, target: str) -> dict[str, int]:
    """How many rows a target has for what the recipe asks: its file may hold fewer."""
    cell = plan.selection(plan.study.baseline, target, 0)
    rows = cell.rows
    train, test, _ = split_rows(rows.file, cell.recipe.task, (rows.validation, rows.test, rows.test_split), "test")
    return {
        "texts": min(rows.texts, len(train)),
        "labels": min(rows.labels, len(train)),
        "validation": rows.validation,
        "test": len(test),
    }


def _floor(outcome: Outcome, target: str, results: Sequence[Result]) -> dict[str, Any]:
    """Majority floor, and by how many standard errors (seeds and test items) the given runs exceed it."""
    values = _values(results, "accuracy")
    floors = _values(results, "majority_floor")
    if not values:
        return {"floor": None, "margin_se": None, "informative": None}
    floor, mean = next(iter(floors.values())), math.fsum(values.values()) / len(values)
    items = len(next(r["items"]["right"] for r in results if r["status"] == "done"))
    spread = float(np.var(list(values.values()), ddof=1)) / len(values) if len(values) > 1 else 0.0
    error = math.sqrt(spread + mean * (1 - mean) / items)
    margin = min((mean - floor) / error, 1e6) if error else (1e6 if mean > floor else 0.0)
    return {"floor": floor, "margin_se": margin, "informative": margin >= 3}


def _cell(plan: Plan, outcome: Outcome, arm: str, target: str, budget: int | None, beside: int) -> dict[str, Any]:
    """One row of a target's table. beside: the budget of the baseline it is compared with."""
    study = plan.study
    results = outcome.finals[arm, target, budget]
    base = outcome.finals[study.baseline, target, beside]
    found: dict[str, Any] = {"lr": outcome.chosen.get((arm, target))}
    for metric in ("nats", "accuracy", "f1_macro"):
        values = _values(results, metric)
        found[metric] = asdict(t_interval(list(values.values()))) if values else None
        if metric != "f1_macro":
            same = arm == study.baseline
            found[f"{metric}_difference"] = None if same else paired_test(values, _values(base, metric))
            focus = outcome.finals.get((study.focus, target, budget if budget is not None else beside), [])
            other = None if arm == study.focus else paired_test(_values(focus, metric), values)
            found[f"{metric}_focus"] = other
    for name in ("passages", "tokens", "epochs"):
        found[name] = _mean([r["text"].get(name) for r in results if r["status"] == "done"])
    if budget is not None:
        chosen = [r["figures"][str(budget)] for r in outcome.selections[arm, target] if r["status"] == "done"]
        for name in FIGURES:
            values = {i: figures[name] for i, figures in enumerate(chosen) if figures[name] is not None}
            found[name] = asdict(t_interval(list(values.values()))) if values else None
        found["domains"] = _mix(chosen)
    return found


def _mix(chosen: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean shares of the hidden domains, the largest five."""
    total: dict[str, float] = defaultdict(float)
    for figures in chosen:
        for name, share in figures["domains"].items():
            total[name] += share / len(chosen)
    return dict(sorted(total.items(), key=lambda item: -item[1])[:5])


def _mean(values: Sequence[float | None]) -> float | None:
    there = [v for v in values if v is not None]
    return math.fsum(there) / len(there) if there else None


# --------------------------------------------------------------------------------------------- embedders, costs


def _embedders(plan: Plan, outcome: Outcome) -> dict[str, Any]:
    """Recall and nats of the focus by embedder: means over targets by seed, beside the first embedder's."""
    study = plan.study
    found: dict[str, Any] = {}
    first: BySeed = {}
    budget = str(study.embedder_budget)
    for name, embedder in study.embedders.items():
        pairs = {target: outcome.embedded[name, target] for target in study.targets}
        nats = _over_targets({t: _values([run for _, run in some], "nats") for t, some in pairs.items()})
        recalls = _over_targets(
            {
                target: {
                    int(c["seed"]): c["figures"][budget]["recall"]
                    for c, _ in some
                    if c["status"] == "done" and c["figures"][budget]["recall"] is not None
                }
                for target, some in pairs.items()
            }
        )
        first = first or nats
        features = outcome.features[name]
        found[name] = {
            "note": embedder.note,
            "rows": features["rows"],
            "dim": features["dim"],
            "features_cpu_s": features["cpu_s"],
            "budget": study.embedder_budget,
            "seeds": study.embedder_seeds,
            "recall": asdict(t_interval(list(recalls.values()))) if recalls else None,
            "recalls": {
                target: _mean([c["figures"][budget]["recall"] for c, _ in some if c["status"] == "done"])
                for target, some in pairs.items()
            },
            "nats": asdict(t_interval(list(nats.values()))) if nats else None,
            "difference": paired_test(nats, first) if nats is not first else None,
        }
    return found


def _over_targets(by_target: Mapping[str, BySeed]) -> BySeed:
    """Means over targets by seed, of the seeds that every target has."""
    seeds = set.intersection(*map(set, by_target.values()))
    return {s: math.fsum(values[s] for values in by_target.values()) / len(by_target) for s in sorted(seeds)}


def _trials(outcome: Outcome, pair: tuple[str, str]) -> dict[str, Any]:
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


def _failure(result: Result) -> dict[str, Any]:
    names = ("kind", "arm", "target", "budget", "seed", "lr", "status", "reason")
    return {name: result.get(name) for name in names}


def _costs(outcome: Outcome) -> dict[str, Any]:
    """CPU-seconds by kind of cell, by stage of training, and of one selection by arm."""
    kinds: dict[str, dict[str, float]] = defaultdict(lambda: {"cells": 0, "cpu_s": 0.0, "wall_s": 0.0})
    stages: dict[str, float] = defaultdict(float)
    for result in everything(outcome):
        kind = kinds[result["kind"]]
        kind["cells"] += 1
        for name in ("cpu_s", "wall_s"):
            kind[name] = round(kind[name] + result[name], 3)
        if "remembered" in result:
            for name, seconds in result["seconds"].items():
                stages[name] = round(stages[name] + seconds, 3)
    scores = {
        arm: _mean([r["seconds"]["scores"] for (a, _), some in outcome.selections.items() if a == arm
                    for r in some if r["status"] == "done"])
        for arm, _ in outcome.selections
    }  # fmt: skip
    return {"kinds": dict(kinds), "training": dict(stages), "scores": scores}
