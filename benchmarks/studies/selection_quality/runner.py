"""Runs a study of selectors: pool, features, selections, trials, final runs. Cells are files, `cells/<hash>.json`.

Beside them lie what only the machine needs: the pool in `pool`, features in `features`, chosen rows in `selections`.
Where a finished cell's rows are not there (its result was brought from elsewhere) and a run needs them, the cell runs
again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.studies.cells.files import Result, write_result
from benchmarks.studies.cells.runner import Runner
from benchmarks.studies.selection_quality.cells import FeaturesCell, PoolCell, SelectionCell, TrainingCell
from benchmarks.studies.selection_quality.plan import Plan
from flatshift.experiments.recipe.build import suggest_nearest
from flatshift.experiments.run.console import Console
from flatshift.experiments.studies.compare.tuning import (
    FAILED,
    TrialScore,
    TrialSetting,
    best_trial,
    is_on_edge,
    next_trial,
)
from flatshift.experiments.studies.study import claim_study
from flatshift.finetune.atomic import remove_leftovers
from flatshift.finetune.errors import UserError

Pair = tuple[str, str]
Point = tuple[str, str, int | None]


@dataclass
class Outcome:
    """All results of a study."""

    pool: Result = field(default_factory=dict)
    features: dict[str, Result] = field(default_factory=dict)
    """By embedder; the study's own under the empty name."""
    selections: dict[Pair, list[Result]] = field(default_factory=dict)
    """(arm, target) → by seed."""
    tuned_on: dict[Pair, Result] = field(default_factory=dict)
    """(arm, target) → the selection of the trials."""
    trials: dict[Pair, dict[float, Result]] = field(default_factory=dict)
    """(arm, target) → learning rate → warm-up trial."""
    chosen: dict[Pair, float] = field(default_factory=dict)
    """Learning rate of the warm-up of (arm, target)."""
    edge: dict[Pair, bool] = field(default_factory=dict)
    """Whether the best learning rate still lies on an edge of those tried."""
    fine_tune: dict[str, float] = field(default_factory=dict)
    """Target → learning rate of the fine-tune."""
    fine_tune_trials: dict[str, dict[float, Result]] = field(default_factory=dict)
    fine_tune_edge: dict[str, bool] = field(default_factory=dict)
    """Target → whether that rate lies on an edge of those tried."""
    finals: dict[Point, list[Result]] = field(default_factory=dict)
    """By seed."""
    embedded: dict[Pair, list[tuple[Result, Result]]] = field(default_factory=dict)
    """(embedder, target) → by seed (selection, run)."""


def run_cell(directory: Path, cell: Any, threads: int, *, died: str | None = None) -> None:
    """Run any cell of a study and write its result into `directory`, which is `cells` of the study's."""
    root = directory.parent
    write_result(directory, cell.key, _about(cell), lambda: _measure(root, cell, threads), {"metrics": {}}, died=died)


def _measure(root: Path, cell: Any, threads: int) -> Mapping[str, Any]:
    from flatshift.finetune.compute.numerics import cpu_threads

    with cpu_threads(cell.recipe.train.threads or threads):
        if isinstance(cell, PoolCell):
            from benchmarks.studies.selection_quality.pool import store_pool

            return store_pool(root, cell)
        if isinstance(cell, FeaturesCell):
            from benchmarks.studies.selection_quality.features import pool_vectors

            _, found = pool_vectors(root, cell)
            return {"rows": len(found), "dim": int(found.shape[1])}
        if isinstance(cell, SelectionCell):
            from benchmarks.studies.selection_quality.choosing import choose

            return choose(root, cell)
        from benchmarks.studies.selection_quality.training import run_training

        return run_training(root, cell)


def _about(cell: Any) -> dict[str, Any]:
    """What a result says of its cell."""
    names = ("kind", "name", "arm", "target", "budget", "seed", "embedder", "lr", "fine_tune_lr")
    about = {name: getattr(cell, name) for name in names if hasattr(cell, name)}
    if isinstance(cell, TrainingCell):
        about |= {"judged": cell.judged, "steps": cell.recipe.train.steps, "selection": cell.selection}
    if isinstance(cell, SelectionCell):
        about |= {"method": cell.recipe.select.method.kind if cell.recipe.select and cell.like is None else "matched"}
    return about


def run_study(plan: Plan, out: Path, *, jobs: int, console: Console) -> Outcome:
    """Run what has no result yet, in `jobs` processes of one thread each (1: in this one), and gather everything.

    Raises UserError if `out`, which the caller owns, holds something else, or where nothing can be judged.
    """
    claim_study(out, plan.resolved.to_yaml(), "study")
    for made in ("pool", "selections"):
        remove_leftovers(out / made)
    runner = Runner(out / "cells", run_cell, jobs=jobs, console=console, label="quality")
    stages = _Stages(plan, runner, out)
    stages.inputs()
    stages.tune()
    stages.finals()
    stages.embedders()
    return stages.outcome


class _Stages:
    """The stages of one study, in order; each leaves its results in `outcome`."""

    def __init__(self, plan: Plan, runner: Runner, out: Path) -> None:
        self.plan, self.runner, self.out = plan, runner, out
        self.study = plan.study
        self.outcome = Outcome()

    def inputs(self) -> None:
        """The pool and its features, and the result of every selection."""
        self._run([self.plan.pool])
        self.outcome.pool = self._good(self.plan.pool)
        self._check_pool()
        cells = [self.plan.features, *self.plan.embedders.values()]
        self._run(cells)
        self.outcome.features = {cell.name: self._good(cell) for cell in cells}
        # by seed, so that an interrupted study has whole seeds
        for arm in self.plan.arms_with_budget():
            seeds = [self.study.tuning_seed, *range(self.study.seeds)]
            chosen = {
                target: [self.plan.selection(arm, target, seed) for seed in seeds] for target in self.study.targets
            }
            every = [cell for some in chosen.values() for cell in some]
            every.sort(key=lambda cell: cell.seed)
            self._run(every)
            for target, some in chosen.items():
                first, *others = map(self.runner.result, some)
                self.outcome.tuned_on[arm, target], self.outcome.selections[arm, target] = first, others

    def _check_pool(self) -> None:
        """Raise UserError for domains that the pool has not, and for budgets above it."""
        study, kept = self.study, self.outcome.pool["kept"]
        there = self.outcome.pool["domains"]
        for name, target in study.targets.items():
            for domain in target.domains:
                if domain not in there:
                    raise UserError(
                        f"quality.targets.{name}.domains: the pool has no domain "
                        f"{domain!r}{suggest_nearest(domain, there)}"
                    )
            if (largest := study.budgets_of(name)[-1]) > kept and study.unit == "passages":
                raise UserError(
                    f"quality.budgets: {largest:,} for target {name} is above the {kept:,} passages of the cleaned "
                    "pool; lower it"
                )
        part = min(kept, study.embedder_rows)
        if study.embedders and study.embedder_budget > part:
            raise UserError(
                f"quality.embedder_budget: {study.embedder_budget:,} is above the {part:,} passages that embedders "
                "choose from; lower it"
            )

    def tune(self) -> None:
        """Equal trials of every arm's warm-up on every target, and of the fine-tune on every target."""
        plan, study = self.plan, self.study
        pairs = [(arm, target) for arm in plan.warm_arms() for target in study.targets]
        cells = {pair: {TrialSetting(lr): plan.trial(*pair, lr) for lr in study.lr} for pair in pairs}
        labelled = {
            target: {lr: plan.fine_tune_trial(target, lr) for lr in study.fine_tune_lr} for target in study.targets
        }
        first = [c for grid in cells.values() for c in grid.values()]
        self._run([*first, *(c for some in labelled.values() for c in some.values())])
        for _ in range(study.rounds):
            new = {pair: next_trial(self._scores(grid)) for pair, grid in cells.items()}
            for pair, setting in new.items():
                cells[pair][setting] = plan.trial(*pair, setting.lr)
            self._run([cells[pair][setting] for pair, setting in new.items()])
        for pair, grid in cells.items():
            scores = self._scores(grid)
            best = best_trial(scores)
            self.outcome.trials[pair] = {s.lr: self.runner.result(cell) for s, cell in grid.items()}
            if best is None:
                raise UserError(f"every trial of {pair[0]} on {pair[1]} failed: {self._reason(grid.values())}")
            self.outcome.chosen[pair], self.outcome.edge[pair] = best.lr, is_on_edge(scores, best)
        for target, some in labelled.items():
            results = {lr: self.runner.result(cell) for lr, cell in some.items()}
            done = {TrialSetting(lr): _accuracy(result) for lr, result in results.items()}
            best = best_trial(done)
            if best is None:
                raise UserError(f"every trial of the fine-tune on {target} failed: {self._reason(some.values())}")
            self.outcome.fine_tune[target], self.outcome.fine_tune_trials[target] = best.lr, results
            self.outcome.fine_tune_edge[target] = is_on_edge(done, best)

    def finals(self) -> None:
        """Final runs, seed by seed."""
        cells = {
            (arm, target, budget): [
                self.plan.final(
                    arm,
                    target,
                    budget,
                    seed,
                    lr=self.outcome.chosen.get((arm, target)),
                    fine_tune_lr=self.outcome.fine_tune[target],
                )
                for seed in range(self.study.seeds)
            ]
            for arm, target, budget in self.plan.points()
        }
        everything = [c for some in cells.values() for c in some]
        # arms together inside a seed: a worker then remembers a warm-up that several targets share
        self._run(sorted(everything, key=lambda c: (c.seed, list(self.study.arms).index(c.arm), c.budget or 0)))
        self.outcome.finals = {point: [self.runner.result(c) for c in some] for point, some in cells.items()}

    def embedders(self) -> None:
        """What the focus selects with each embedder, and a warm-up on it."""
        focus = self.study.focus
        selections: dict[Pair, list[SelectionCell]] = {}
        runs: dict[Pair, list[TrainingCell]] = {}
        for name in self.study.embedders:
            for target in self.study.targets:
                lr = self.outcome.chosen[focus, target]
                seeds = range(min(self.study.embedder_seeds, self.study.seeds))
                selections[name, target] = [self.plan.selection(focus, target, s, embedder=name) for s in seeds]
                runs[name, target] = [self.plan.embedded(name, target, s, lr=lr) for s in seeds]
        self._run([c for some in selections.values() for c in some])
        self._run([c for some in runs.values() for c in some])
        for pair, some in runs.items():
            chosen = [self.runner.result(c) for c in selections[pair]]
            self.outcome.embedded[pair] = list(zip(chosen, map(self.runner.result, some), strict=True))

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
            self.runner.run([pool], again=lambda cell: True)
            self._good(pool)
        missing = {}
        for cell in todo:
            for needed in self._selections_of(cell):
                if not selection_file(self.out, needed.key).is_file() and self.runner.done(needed):
                    missing[needed.key] = needed
        for likes in (False, True):  # what is followed comes first
            some = [cell for cell in missing.values() if (cell.like is not None) == likes]
            self.runner.run(some, again=lambda cell: True)

    def _selections_of(self, cell: Any) -> list[SelectionCell]:
        """The selections that a cell reads, what they follow first."""
        if isinstance(cell, TrainingCell) and cell.selection is not None:
            own = self.plan.selection(cell.arm, cell.target, cell.seed, embedder=cell.embedder)
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

    def _scores(self, grid: Mapping[TrialSetting, TrainingCell]) -> dict[TrialSetting, TrialScore]:
        return {setting: _nats(self.runner.result(cell)) for setting, cell in grid.items()}

    def _reason(self, cells: Any) -> str:
        return next(str(self.runner.result(cell)["reason"]) for cell in cells)


def _nats(result: Result) -> TrialScore:
    """How a warm-up trial did on validation texts."""
    if result["status"] != "done":
        return FAILED
    return TrialScore(-result["metrics"]["nats"], result["metrics"]["nats"])


def _accuracy(result: Result) -> TrialScore:
    """How a fine-tune trial did on validation rows."""
    if result["status"] != "done":
        return FAILED
    return TrialScore(result["metrics"]["accuracy"], result["metrics"]["loss"])
