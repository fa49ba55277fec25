"""Runs a comparison: trials, further rounds, final runs, equal-time runs. A finished cell is never run again.

Cells are files, `cells/<hash>.json`, written whole. What is decided on the way (best settings, steps at equal time) is
computed from the files, so a restart decides the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from experiments.cells.files import Result
from experiments.cells.runner import Runner, claim_study
from experiments.comparison.cell import run_cell
from experiments.comparison.plan import Plan, StudyCell
from experiments.comparison.tuning import (
    FAILED,
    Score,
    Setting,
    best_of,
    finalists,
    first_trials,
    next_trial,
    on_edge,
    together,
)
from experiments.run.console import Console
from finetune.atomic import write_json
from finetune.errors import UserError

Pair = tuple[str, str]


@dataclass
class Outcome:
    """All results of a comparison."""

    trials: dict[Pair, list[tuple[StudyCell, Result]]] = field(default_factory=dict)
    chosen: dict[Pair, Setting] = field(default_factory=dict)
    """Setting of the final runs of (method, task)."""
    edge: dict[Pair, bool] = field(default_factory=dict)
    """Whether the best learning rate still lies on an edge of those tried."""
    finals: dict[Pair, list[Result]] = field(default_factory=dict)
    """By seed."""
    step_ratio: dict[str, float] = field(default_factory=dict)
    """CPU time of a method's step ÷ the baseline's: median over tasks and seeds."""
    equal_time: dict[Pair, list[Result]] = field(default_factory=dict)


def run_study(
    plan: Plan, out: Path, *, jobs: int, console: Console, on_cell: Callable[[Path], None] = lambda path: None
) -> Outcome:
    """Run what has no result yet, in `jobs` processes of one thread each (1: in this one), and gather everything.

    on_cell: told the file of each cell that this call finished.

    Raises UserError if `out`, which the caller owns, holds something else.
    """
    plan.check_methods()
    claim_study(out, plan.resolved.to_yaml(), "comparison")
    with Runner(out / "cells", run_cell, jobs=jobs, console=console, total=_count(plan), on_cell=on_cell) as runner:
        outcome = Outcome()
        _tune(plan, runner, outcome)
        study = plan.study
        finals = {
            pair: [plan.cell("final", *pair, seed, outcome.chosen[pair]) for seed in study.seeds_of(pair[0])]
            for pair in plan.pairs
        }
        # by seed, so that an interrupted study has whole seeds
        every = [cell for cells in finals.values() for cell in cells]
        every.sort(key=lambda cell: cell.seed)
        runner.run(every)
        outcome.finals = {pair: [runner.result(c) for c in cells] for pair, cells in finals.items()}
        outcome.step_ratio = step_ratios(plan, outcome)
        shorter = {
            pair: [
                plan.cell("equal-time", *pair, seed, outcome.chosen[pair], steps=steps)
                for seed in study.seeds_of(pair[0])
            ]
            for pair in plan.pairs
            if (steps := _equal_steps(plan, out, outcome, pair)) is not None
        }
        runner.extend(sum(map(len, shorter.values())))
        runner.run([c for cells in shorter.values() for c in cells])
        outcome.equal_time = {pair: [runner.result(c) for c in cells] for pair, cells in shorter.items()}
    return outcome


def _count(plan: Plan) -> int:
    """Cells but those at equal time, whose number is not known before."""
    study = plan.study
    tuned = study.trials + study.rounds + study.finalists * (len(study.tuning_seeds) - 1)
    return sum(tuned + len(study.seeds_of(method)) for method, _ in plan.pairs)


def _tune(plan: Plan, runner: Runner, outcome: Outcome) -> None:
    study = plan.study

    def trial(pair: Pair, setting: Setting) -> StudyCell:
        return plan.cell("trial", *pair, study.tuning_seeds[0], setting)

    cells = {
        pair: {setting: trial(pair, setting) for setting in first_trials(study, study.methods[pair[0]])}
        for pair in plan.pairs
    }
    runner.run([c for grid in cells.values() for c in grid.values()])
    for _ in range(study.rounds):
        new = {}
        for pair, grid in cells.items():
            setting = next_trial(_scores(runner, plan, grid))
            new[pair] = grid[setting] = trial(pair, setting)
        runner.run(list(new.values()))
    last = {
        pair: {
            setting: [plan.cell("trial", *pair, seed, setting) for seed in study.tuning_seeds]
            for setting in finalists(_scores(runner, plan, grid), study.finalists)
        }
        for pair, grid in cells.items()
    }
    runner.run([c for some in last.values() for seeds in some.values() for c in seeds[1:]])
    for pair, grid in cells.items():
        means = {
            setting: together([score(runner.result(cell), plan.classifies(pair[1])) for cell in seeds])
            for setting, seeds in last[pair].items()
        }
        best = best_of(means)
        ran = [*grid.values(), *(cell for seeds in last[pair].values() for cell in seeds[1:])]
        outcome.trials[pair] = [(cell, runner.result(cell)) for cell in ran]
        if best is None:
            reason = next(r["reason"] for _, r in outcome.trials[pair] if r["status"] != "done")
            raise UserError(
                f"every trial of {pair[0]} on {pair[1]} failed, or every finalist under one of the tuning seeds, for "
                f"example: {reason}"
            )
        outcome.chosen[pair] = best
        outcome.edge[pair] = on_edge(grid, best)


def _scores(runner: Runner, plan: Plan, grid: Mapping[Setting, StudyCell]) -> dict[Setting, Score]:
    return {setting: score(runner.result(cell), plan.classifies(cell.task)) for setting, cell in grid.items()}


def score(result: Result, classifies: bool) -> Score:
    """How a trial did: by accuracy, else by loss."""
    if result["status"] != "done":
        return FAILED
    metrics = result["metrics"]
    return Score(metrics["accuracy"] if classifies else -metrics["loss"], metrics["loss"])


def step_ratios(plan: Plan, outcome: Outcome) -> dict[str, float]:
    """CPU time of a step ÷ the baseline's on the same task and seed: the median."""
    base = plan.study.baseline
    found = {}
    for method in plan.study.methods:
        ratios = [
            ours["step_cpu_s"] / peer["step_cpu_s"]
            for task in plan.study.runs_on(method)
            for ours, peer in zip(outcome.finals[method, task], outcome.finals[base, task], strict=False)
            if ours.get("step_cpu_s") and peer.get("step_cpu_s")
        ]
        if ratios:
            found[method] = median(ratios)
    return found


def _equal_steps(plan: Plan, out: Path, outcome: Outcome, pair: Pair) -> int | None:
    """Steps of a method in the time of the baseline's; None where its step costs about the same.

    The measured ratio is kept in equal_time.json, so that cells that are run again do not move it.
    """
    method, task = pair
    file = out / "equal_time.json"
    kept: dict[str, float] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if method not in outcome.step_ratio:
        return None
    if method not in kept:
        kept[method] = round(outcome.step_ratio[method], 2)
        write_json(file, kept)
    if kept[method] <= plan.study.equal_time_above:
        return None
    return max(1, round(plan.steps(task) / kept[method]))
