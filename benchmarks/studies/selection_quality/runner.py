"""Runs a study of selectors: pool, features, selections, trials, final runs. A cell leaves `cells/<key>/result.json`.

Beside them lie the pool in `pool`, features in `features`, chosen rows in `selections`. Where a finished cell's rows
are not there (its result was brought from elsewhere) and a run needs them, the cell runs again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.studies.selection_quality.cells import (
    FeaturesCell,
    PoolCell,
    Result,
    Runner,
    SelectionCell,
    TrainingCell,
    write_result,
)
from benchmarks.studies.selection_quality.plan import Plan
from flatshift.experiments.recipe.build import suggest_nearest
from flatshift.experiments.recipe.tree import Branch
from flatshift.experiments.run.console import Console
from flatshift.experiments.studies.compare.tuning import (
    FAILED,
    TrialScore,
    TrialSetting,
    best_trial,
    is_on_edge,
    mean_score,
    next_trial,
)
from flatshift.experiments.studies.study import claim_study, run_study_cells
from flatshift.finetune.atomic import remove_leftovers
from flatshift.finetune.errors import UserError

DOCUMENT = "quality.json"
Pair = tuple[str, str]
"""(arm, target)."""
Point = tuple[str, str, int | None]
"""(arm, target, budget)."""


@dataclass
class Outcome:
    """All results of a study; lists are by seed. edge: whether the chosen rate is on an edge of those tried."""

    pool: Result = field(default_factory=dict)
    features: Result = field(default_factory=dict)
    selections: dict[Pair, list[Result]] = field(default_factory=dict)
    tuned_on: dict[Pair, Result] = field(default_factory=dict)
    """The selection of the trials."""
    trials: dict[Pair, dict[float, Result]] = field(default_factory=dict)
    """By learning rate."""
    chosen: dict[Pair, float] = field(default_factory=dict)
    """Learning rate of the warm-up."""
    edge: dict[Pair, bool] = field(default_factory=dict)
    fine_tune: dict[str, float] = field(default_factory=dict)
    """Target → learning rate of the fine-tune."""
    fine_tune_trials: dict[str, dict[float, Result]] = field(default_factory=dict)
    fine_tune_edge: dict[str, bool] = field(default_factory=dict)
    finals: dict[Point, list[Result]] = field(default_factory=dict)


def study_quality(
    recipe: str,
    out: Path,
    *,
    data: Path | None = None,
    overrides: Sequence[Branch] = (),
    selectors: Sequence[str] = (),
    targets: Sequence[str] = (),
    jobs: int = 2,
    quiet: bool = False,
) -> dict[str, Any]:
    """Run the study of `recipe` into `out` and return the document of quality.json; the same call goes on.

    Args:
        recipe: file with a `quality` block.
        data: directory of pool and targets.
        selectors, targets: only these (the baseline always); empty: all.
        jobs: worker processes, one thread each.

    Raises:
        UserError: bad input, before any cell runs. Interrupted: stopped.
    """
    from benchmarks.studies.selection_quality.analysis import analyse
    from benchmarks.studies.selection_quality.page import page

    def measure(plan: Plan, console: Console) -> dict[str, Any]:
        return analyse(plan, run_study(plan, out, jobs=jobs, console=console))

    def plan() -> Plan:
        return Plan(recipe, overrides, data=data, out=out, selectors=selectors, targets=targets)

    command = f"python -m benchmarks.studies.selection_quality {recipe}"
    return run_study_cells(command, out, DOCUMENT, plan=plan, measure=measure, page=page, jobs=jobs, quiet=quiet)


def run_cell(directory: Path, cell: Any, threads: int, *, died: str | None = None) -> None:
    """Run any cell of a study and write its result into `directory`, which is `cells` of the study's."""
    names = ("kind", "name", "arm", "target", "budget", "seed", "embedder", "lr", "fine_tune_lr")
    about = {name: getattr(cell, name) for name in names if hasattr(cell, name)}
    if isinstance(cell, TrainingCell):
        about |= {"judged": cell.judged, "steps": cell.recipe.train.steps, "selection": cell.selection}
    if isinstance(cell, SelectionCell) and cell.recipe.select:
        about["method"] = cell.recipe.select.method.kind if cell.like is None else "matched"
    root = directory.parent
    write_result(directory, cell.key, about, lambda: _measure(root, cell, threads), {"metrics": {}}, died=died)


def _measure(root: Path, cell: Any, threads: int) -> Mapping[str, Any]:
    from benchmarks.studies.selection_quality import choosing, pool, training
    from flatshift.finetune.compute.numerics import cpu_threads

    with cpu_threads(cell.recipe.train.threads or threads):
        if isinstance(cell, PoolCell):
            return pool.store_pool(root, cell)
        if isinstance(cell, FeaturesCell):
            result = pool.pool_vectors(root, cell)
            return {"rows": len(result), "dim": int(result.shape[1])}
        if isinstance(cell, SelectionCell):
            return choosing.choose(root, cell)
        return training.run_training(root, cell)


def run_study(plan: Plan, out: Path, *, jobs: int, console: Console) -> Outcome:
    """Run what has no result yet, in `jobs` processes of one thread each (1: in this one), and gather everything.

    Raises UserError if `out`, which the caller owns, holds something else, or where nothing can be evaluated.
    """
    claim_study(out, plan.resolved.to_yaml(), "study")
    for result in ("pool", "selections"):
        remove_leftovers(out / result)
    stages = _Stages(plan, Runner(out / "cells", run_cell, jobs=jobs, console=console, label="quality"), out)
    stages.inputs()
    stages.tune()
    stages.finals()
    return stages.outcome


class _Stages:
    """The stages of one study, in order; each leaves its results in `outcome`."""

    def __init__(self, plan: Plan, runner: Runner, out: Path) -> None:
        self.plan, self.runner, self.out = plan, runner, out
        self.study = plan.study
        self.outcome = Outcome()

    def inputs(self) -> None:
        """The pool and its features, and the result of every selection."""
        plan, study = self.plan, self.study
        self._run([plan.pool])
        self.outcome.pool = self._good(plan.pool)
        self._check_pool()
        self._run([plan.features])
        self.outcome.features = self._good(plan.features)
        for arm in plan.arms_with_budget():
            # by seed, so that an interrupted study has whole seeds
            finals = [(target, seed) for seed in range(study.seeds) for target in study.targets]
            trials = [(target, study.tuning_seed) for group in study.tuning_groups() for target in group]
            self._run([plan.selection(arm, *point) for point in (*finals, *trials)])
            for target in study.targets:
                self.outcome.selections[arm, target] = [
                    self.runner.result(plan.selection(arm, target, seed)) for seed in range(study.seeds)
                ]
            for target, seed in trials:
                self.outcome.tuned_on[arm, target] = self.runner.result(plan.selection(arm, target, seed))

    def _check_pool(self) -> None:
        """Raise UserError for domains that the pool has not, and for budgets above it."""
        size, there = self.outcome.pool["kept"], self.outcome.pool["domains"]
        for name, target in self.study.targets.items():
            for domain in set(target.domains) - set(there):
                near = suggest_nearest(domain, there)
                raise UserError(f"quality.targets.{name}.domains: the pool has no domain {domain!r}{near}")
            if (largest := self.study.budgets_of(name)[-1]) > size and self.study.unit == "passages":
                raise UserError(
                    f"quality.budgets: {largest:,} for target {name} is above the {size:,} passages of the cleaned "
                    "pool; lower it"
                )

    def tune(self) -> None:
        """Equal trials of every arm's warm-up on every target, and of the fine-tune on every target."""
        plan, study = self.plan, self.study
        groups = [(arm, targets) for arm in plan.warm_arms() for targets in study.tuning_groups()]
        cells = {group: {TrialSetting(lr): _trials(plan, group, lr) for lr in study.lr} for group in groups}
        labelled = {
            target: {TrialSetting(lr): [plan.fine_tune_trial(target, lr)] for lr in study.fine_tune_lr}
            for target in study.targets
            if study.fine_tune
        }
        self._run([cell for grid in (*cells.values(), *labelled.values()) for some in grid.values() for cell in some])
        for _ in range(study.rounds):
            new = {group: next_trial(self._scores(grid)) for group, grid in cells.items()}
            for group, setting in new.items():
                cells[group][setting] = _trials(plan, group, setting.lr)
            self._run([cell for group, setting in new.items() for cell in cells[group][setting]])
        o = self.outcome
        for (arm, targets), grid in cells.items():
            results, best, edge = self._best(grid, f"{arm} on {', '.join(targets)}")
            for number, target in enumerate(targets):
                o.trials[arm, target] = {lr: some[number] for lr, some in results.items()}
            for target in study.targets if study.tune_on else targets:
                o.chosen[arm, target], o.edge[arm, target] = best, edge
        for target, grid in labelled.items():
            results, o.fine_tune[target], o.fine_tune_edge[target] = self._best(grid, f"the fine-tune on {target}")
            o.fine_tune_trials[target] = {lr: result for lr, (result,) in results.items()}

    def _best(
        self, grid: Mapping[TrialSetting, Sequence[TrainingCell]], name: str
    ) -> tuple[dict[float, list[Result]], float, bool]:
        """(results by rate, the best rate, whether it is on an edge of those tried)."""
        results = {setting.lr: [self.runner.result(cell) for cell in some] for setting, some in grid.items()}
        scores = self._scores(grid)
        best = best_trial(scores)
        if best is None:
            reason = next(result for some in results.values() for result in some if result["status"] != "done")
            raise UserError(f"every trial of {name} failed: {reason['reason']}")
        return results, best.lr, is_on_edge(scores, best)

    def _scores(self, grid: Mapping[TrialSetting, Sequence[TrainingCell]]) -> dict[TrialSetting, TrialScore]:
        return {
            setting: mean_score([_score(self.runner.result(cell)) for cell in some]) for setting, some in grid.items()
        }

    def finals(self) -> None:
        """Final runs, seed by seed."""
        chosen, rates = self.outcome.chosen, self.outcome.fine_tune
        cells = {
            (arm, target, budget): [
                self.plan.final(arm, target, budget, seed, lr=chosen.get((arm, target)), fine_tune_lr=rates.get(target))
                for seed in range(self.study.seeds)
            ]
            for arm, target, budget in self.plan.points()
        }
        everything = [c for some in cells.values() for c in some]
        # arms together inside a seed: a worker then remembers a warm-up that several targets share
        self._run(sorted(everything, key=lambda c: (c.seed, list(self.study.arms).index(c.arm), c.budget or 0)))
        self.outcome.finals = {point: [self.runner.result(c) for c in some] for point, some in cells.items()}

    # ---------------------------------------------------------------------------------------- running

    def _run(self, cells: Sequence[Any]) -> None:
        """Run cells; first, again, what they need and is not on this disk."""
        todo = [cell for cell in cells if not self.runner.done(cell)]
        if any(not isinstance(cell, PoolCell) for cell in todo):
            self._provide(todo)
        self.runner.run(cells)

    def _provide(self, todo: Sequence[Any]) -> None:
        from benchmarks.studies.selection_quality.choosing import selection_file
        from benchmarks.studies.selection_quality.pool import pool_file

        pool = self.plan.pool
        if not pool_file(self.out, pool.key).is_file():
            self.runner.run([pool], again=True)
            self._good(pool)
        missing = {}
        for cell in todo:
            for needed in self._selections_of(cell):
                if not selection_file(self.out, needed.key).is_file() and self.runner.done(needed):
                    missing[needed.key] = needed
        for likes in (False, True):  # what is followed comes first
            self.runner.run([cell for cell in missing.values() if (cell.like is not None) == likes], again=True)

    def _selections_of(self, cell: Any) -> list[SelectionCell]:
        """The selections that a cell reads, what they follow first."""
        if isinstance(cell, TrainingCell) and cell.selection is not None:
            own = self.plan.selection(cell.arm, cell.target, cell.seed)
            return [*self._selections_of(own), own]
        if isinstance(cell, SelectionCell) and cell.like is not None:
            return [self.plan.selection(self.study.arms[cell.arm].like, cell.target, cell.seed)]
        return []

    def _good(self, cell: Any) -> Result:
        """The result of a cell that all others need. Raises UserError if it failed."""
        result = self.runner.result(cell)
        if result["status"] != "done":
            raise UserError(f"{cell.label}: {result['reason']}")
        return result


def _trials(plan: Plan, group: tuple[str, Sequence[str]], lr: float) -> list[TrainingCell]:
    """The trials of an arm's rate on a group of targets."""
    arm, targets = group
    return [plan.trial(arm, target, lr) for target in targets]


def _score(result: Result) -> TrialScore:
    """Score of a trial: a warm-up by nats of validation texts, a fine-tune by accuracy, then loss."""
    if result["status"] != "done":
        return FAILED
    metrics = result["metrics"]
    if result["kind"] == "trial":
        return TrialScore(-metrics["nats"], metrics["nats"])
    return TrialScore(metrics["accuracy"], metrics["loss"])
