"""Cells of a study (the pool, its features, a selection, a training run), their results and the queue that runs them.

A result is one file in a folder named by the cell's key, `cells/<key>/result.json`, written last and whole. A cell that
ends its worker twice is not run for its result, which says so.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from flatshift.experiments.recipe import Resolved
from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.results.cells import RESULT
from flatshift.experiments.run.console import Console
from flatshift.experiments.studies.cell import Cell as QueuedCell
from flatshift.experiments.studies.executors.local import LocalExecutor
from flatshift.experiments.studies.study import CellBatches
from flatshift.finetune.digests import write_sealed
from flatshift.finetune.errors import Interrupted

Result = dict[str, Any]


@dataclass(frozen=True)
class TargetRows:
    """A target's file and how its rows are split."""

    file: str
    sha256: str
    texts: int
    labels: int
    validation: int
    test: int
    test_split: str
    domains: tuple[str, ...]

    @property
    def identity(self) -> list[Any]:
        """What its rows depend on, wherever the file lies."""
        return [self.sha256, self.texts, self.labels, self.validation, self.test, self.test_split]


@dataclass(frozen=True)
class PoolCell:
    """The pool, cleaned and stored. targets: whose texts and test rows the pool is kept clear of."""

    key: str
    file: str = field(compare=False)
    tags: str = field(compare=False)
    rows: int | None = field(compare=False)
    recipe: Recipe = field(compare=False)
    targets: tuple[TargetRows, ...] = field(compare=False)
    kind: str = field(default="pool", compare=False)

    @property
    def label(self) -> str:
        return self.kind


@dataclass(frozen=True)
class FeaturesCell:
    """The pool's features."""

    key: str
    recipe: Recipe = field(compare=False)
    pool: PoolCell = field(compare=False)
    kind: str = field(default="features", compare=False)
    name: str = field(default="", compare=False)

    @property
    def label(self) -> str:
        return self.kind


@dataclass(frozen=True)
class SelectionCell:
    """One arm's selection for one target under one seed, for all budgets.

    each: whether every budget has a selection of its own, as the method shapes it for one size; else one order serves
    all, and a smaller budget takes its beginning. like: key of the selection that a matched draw follows. unit: of
    budgets. form: whether form alone counts. times: how often a budget in tokens reads the choice. own: the budget's
    share of the target's own texts.
    """

    key: str
    arm: str
    target: str
    seed: int
    recipe: Recipe
    features: FeaturesCell
    rows: TargetRows
    budgets: tuple[int, ...]
    each: bool
    like: str | None
    unit: str = "passages"
    form: bool = False
    times: int = 1
    own: float = 0.0
    kind: str = "selection"
    embedder: None = None

    @property
    def pool(self) -> PoolCell:
        return self.features.pool

    @property
    def label(self) -> str:
        return f"selection {self.arm} for {self.target}, seed {self.seed}"


@dataclass(frozen=True)
class TrainingCell:
    """One run: warm-up, perplexity, and where asked for the fine-tune.

    kind: `trial`, `fine-tune trial` or `final`. lr: of the warm-up; None: there is none. fine_tune_lr: None: no
    fine-tune. selection: its key. form: whether it is evaluated in one plain form, too; form_after: after the same
    warm-up. forgetting: number of passages of the pool that it is evaluated on, too.
    own: share of the warm-up's rows that are the target's own texts.
    """

    key: str
    kind: str
    arm: str
    source: str
    target: str
    budget: int | None
    seed: int
    lr: float | None
    fine_tune_lr: float | None
    recipe: Recipe
    selection: str | None
    pool: PoolCell
    rows: TargetRows
    packed: int
    judged_length: int
    form: bool = False
    form_after: bool = False
    forgetting: int = 0
    own: float = 0.0
    embedder: None = None

    @property
    def judged(self) -> str:
        """Split that it is evaluated on: trials never see test rows."""
        return "validation" if self.kind.endswith("trial") else "test"

    @property
    def label(self) -> str:
        size = f" {self.budget:,}" if self.budget else ""
        rates = "".join(f", {what} {lr:g}" for what, lr in (("lr", self.lr), ("fine-tune", self.fine_tune_lr)) if lr)
        return f"{self.kind} {self.arm or 'no warm-up'}{size} on {self.target}{rates}, seed {self.seed}"


# --------------------------------------------------------------------------------------------- results


def cell_file(directory: Path, key: str) -> Path:
    """Path of a cell's result."""
    return directory / key / RESULT


def write_result(
    directory: Path,
    key: str,
    about: Mapping[str, Any],
    measure: Callable[[], Mapping[str, Any]],
    empty: Result,
    *,
    died: str | None = None,
) -> None:
    """Run `measure` and write `about`, what it returned and its time; a failure is a result with its reason.

    empty: what stands for the figures of a cell that failed. died: how the cell ended its workers; nothing is run then.
    """
    started, cpu = time.monotonic(), time.process_time()
    outcome = _outcome_of(measure) if died is None else {"status": "failed", "reason": died}
    seconds = {"cpu_s": round(time.process_time() - cpu, 3), "wall_s": round(time.monotonic() - started, 3)}
    write_sealed(cell_file(directory, key), {"cell": key, **about, "reason": None, **empty, **outcome, **seconds})


def _outcome_of(measure: Callable[[], Mapping[str, Any]]) -> Result:
    """The status of a cell, and its figures or the reason why it has none."""
    from flatshift.finetune.train.divergence import Diverged

    try:
        return {"status": "done", **measure()}
    except Interrupted as error:  # a full disk stays what it is
        if isinstance(error.__cause__, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise
    except ValueError as error:
        return {"status": "diverged" if isinstance(error, Diverged) else "failed", "reason": str(error)}
    except Exception as error:
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    finally:
        gc.collect()  # a PEFT model refers to itself: without this, each cell's weights outlive it


# --------------------------------------------------------------------------------------------- the queue


@dataclass(frozen=True)
class _Queued(QueuedCell):
    """A cell as the queue takes it."""

    of: Any = None

    @property
    def label(self) -> str:
        return str(self.of.label)


def _queued(cell: Any) -> _Queued:
    recipe = Resolved(getattr(cell, "recipe", Recipe()), "", {})
    return _Queued(cell.key, {"kind": cell.kind}, getattr(cell, "seed", 0), recipe, of=cell)


def _run(run_cell: Callable[..., None], out: Path, queued: Any, threads: int | None) -> bool:
    run_cell(out / "cells", queued.of, threads or 1)
    return True


class Runner:
    """Runs cells of one study in `jobs` processes of one thread each (1: in this one).

    run_cell: a function `(directory, cell, threads, *, died=None)` that a worker can import and that writes the result.
    """

    def __init__(
        self, directory: Path, run_cell: Callable[..., None], *, jobs: int, console: Console, label: str
    ) -> None:
        self.directory, self._run_cell = directory, run_cell
        self._batches = CellBatches(
            directory.parent,
            LocalExecutor(jobs, own_threads=1),
            console=console,
            label=label,
            run=partial(_run, run_cell),
        )

    def result(self, cell: Any) -> Result:
        """The result of a finished cell."""
        result = self._batches.result(_queued(cell))
        if "cpu_s" not in result:  # the queue wrote it, which knows nothing of its figures
            shutil.rmtree(self.directory / cell.key)
            self._run_cell(self.directory, cell, 1, died=result["reason"])
            result = self._batches.result(_queued(cell))
        return result

    def done(self, cell: Any) -> bool:
        """Return True for a cell that needs no run."""
        return self._batches.done(_queued(cell))

    def run(self, cells: Sequence[Any], *, again: bool = False) -> None:
        """Run those of `cells` that have no result, or failed before this start; again: all of them."""
        kinds = " and ".join(dict.fromkeys(cell.kind for cell in cells))
        try:
            self._batches.run([_queued(cell) for cell in cells], kinds, again=lambda queued: again)
        finally:
            for cell in cells:
                if cell_file(self.directory, cell.key).is_file():
                    self.result(cell)
