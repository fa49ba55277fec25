"""Runs a comparison: trials, further rounds, final runs, equal-time runs. A finished cell is never run again.

Cells are files, `cells/<hash>.json`, written whole; a kill at any moment loses the cells in flight. What is decided on
the way (best settings, steps at equal time) is computed from the files, so a restart decides the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from experiments.comparison.cell import cell_file, run_cell
from experiments.comparison.plan import Plan, StudyCell
from experiments.comparison.tuning import FAILED, Score, Setting, best_of, first_trials, next_trial, on_edge
from experiments.console import Console, Task
from experiments.sweep import _start_worker
from finetune.atomic import sweep_leftovers, write_json
from finetune.errors import UserError

Pair = tuple[str, str]
Result = dict[str, Any]
FINAL_STATES = ("done", "diverged", "refused")


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

    Raises UserError if `out` holds something else.
    """
    plan.check_methods()
    claim(plan, out)
    with _Runner(out / "cells", jobs, console, _count(plan), on_cell) as runner:
        outcome = Outcome()
        _tune(plan, runner, outcome)
        study = plan.study
        finals = {
            pair: [plan.cell("final", *pair, seed, outcome.chosen[pair]) for seed in study.seeds_of(pair[0])]
            for pair in plan.pairs
        }
        # by seed, so that an interrupted study has whole seeds
        runner.run(sorted((c for cells in finals.values() for c in cells), key=lambda c: c.seed))
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


def claim(plan: Plan, out: Path) -> None:
    """Make the directory, or check that it is a comparison's; several recipes may share one, as cells have names."""
    marker = out / "study.recipe.yaml"
    if out.exists() and any(entry.name != "cells" for entry in out.iterdir()) and not marker.is_file():
        raise UserError(f"{out} is not empty and is not a comparison's directory; name another --out")
    (out / "cells").mkdir(parents=True, exist_ok=True)
    sweep_leftovers(out)
    sweep_leftovers(out / "cells")
    from finetune.atomic import write_text
    from finetune.rundir import write_provenance

    write_provenance(out)
    write_text(marker, plan.resolved.to_yaml())


def _count(plan: Plan) -> int:
    """Cells but those at equal time, whose number is not known before."""
    study = plan.study
    return sum(study.trials + study.rounds + len(study.seeds_of(method)) for method, _ in plan.pairs)


def _tune(plan: Plan, runner: _Runner, outcome: Outcome) -> None:
    study = plan.study

    def trial(pair: Pair, setting: Setting) -> StudyCell:
        return plan.cell("trial", *pair, study.tuning_seed, setting)

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
    for pair, grid in cells.items():
        scores = _scores(runner, plan, grid)
        best = best_of(scores)
        if best is None:
            reason = runner.result(next(iter(grid.values())))["reason"]
            raise UserError(f"every trial of {pair[0]} on {pair[1]} failed, for example: {reason}")
        outcome.chosen[pair] = best
        outcome.edge[pair] = on_edge(scores)
        outcome.trials[pair] = [(cell, runner.result(cell)) for cell in grid.values()]


def _scores(runner: _Runner, plan: Plan, grid: Mapping[Setting, StudyCell]) -> dict[Setting, Score]:
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


class _Runner:
    """Worker processes that live as long as the study, and the one line that says how far it is."""

    def __init__(
        self, directory: Path, jobs: int, console: Console, total: int, on_cell: Callable[[Path], None]
    ) -> None:
        self.directory, self.jobs, self.console, self.on_cell = directory, jobs, console, on_cell
        self.total = total
        self.finished: set[str] = set()
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> _Runner:
        if self.jobs > 1:
            context = get_context("spawn")
            self._pool = ProcessPoolExecutor(self.jobs, context, initializer=_start_worker, initargs=(os.getpid(), 1))
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=error[0] is None, cancel_futures=True)

    def result(self, cell: StudyCell) -> Result:
        """The result of a finished cell."""
        found: Result = json.loads(cell_file(self.directory, cell.key).read_text(encoding="utf-8"))
        return found

    def extend(self, count: int) -> None:
        """There are `count` cells more than thought."""
        self.total += count

    def run(self, cells: Sequence[StudyCell]) -> None:
        """Run those of `cells` that have no final result."""
        unique = {cell.key: cell for cell in cells if cell.key not in self.finished}
        todo = [cell for cell in unique.values() if not self._done(cell)]
        self.finished |= unique.keys()
        if not todo:
            return
        kinds = " and ".join(dict.fromkeys(cell.kind for cell in todo))
        done_before = len(self.finished) - len(todo)
        self.console.say(f"{kinds}: {len(todo)} cells to run, {len(unique) - len(todo)} done before")
        with _line(self.console, done_before, self.total) as line:
            for count, cell in enumerate(self._as_they_end(todo), start=1):
                result = self.result(cell)
                if result["status"] != "done":
                    self.console.say(f"{result['status']}: {cell.label}: {result['reason']}")
                self.on_cell(cell_file(self.directory, cell.key))
                line(count, cell.label)

    def _as_they_end(self, todo: Sequence[StudyCell]) -> Iterator[StudyCell]:
        """Run cells and give each when it has ended: in this process, or in the workers."""
        if self._pool is None:
            for cell in todo:
                run_cell(self.directory, cell, 1)
                yield cell
            return
        pending: dict[Future[None], StudyCell] = {
            self._pool.submit(run_cell, self.directory, cell, 1): cell for cell in todo
        }
        while pending:
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                cell = pending.pop(future)
                future.result()
                yield cell

    def _done(self, cell: StudyCell) -> bool:
        file = cell_file(self.directory, cell.key)
        return file.is_file() and self.result(cell)["status"] in FINAL_STATES


@contextmanager
def _line(console: Console, before: int, total: int) -> Iterator[Task]:
    """The live line of one batch of cells, counted over the whole study: its rate is this batch's own."""
    with console.task(f"compare ({before} of {total} before)", max(total - before, 1), "cells") as bar:
        yield bar
