"""Cells that are no recipes (a pool, its features, a selection, a run on them), run by the queue of every study.

A cell that ends its worker twice is not run for its result, which says so.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from benchmarks.studies.cells.files import Result, cell_file
from flatshift.experiments.recipe import Resolved
from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.run.console import Console
from flatshift.experiments.studies.cell import Cell as QueuedCell
from flatshift.experiments.studies.study import CellBatches


class Cell(Protocol):
    """What a study runs: frozen, and small enough to be sent to another process."""

    @property
    def key(self) -> str:
        """Names its file: the hash of its resolved settings and inputs."""

    @property
    def kind(self) -> str:
        """What it is, in a word."""

    @property
    def label(self) -> str:
        """For a person."""


class RunCell(Protocol):
    """Runs a cell and writes its result."""

    def __call__(self, directory: Path, cell: Any, threads: int, /, *, died: str | None = None) -> None:
        """directory: of the results. died: how the cell ended its workers; it does not run, and this is its result."""


@dataclass(frozen=True)
class _Queued(QueuedCell):
    """A cell as the queue takes it."""

    of: Any = None

    @property
    def label(self) -> str:
        return str(self.of.label)


def _run(run_cell: RunCell, out: Path, queued: QueuedCell, threads: int | None) -> bool:
    run_cell(out / "cells", queued.of, threads or 1)  # type: ignore[attr-defined]
    return True


class Runner:
    """Runs cells of one study in `jobs` processes of one thread each (1: in this one).

    directory: of the results. run_cell: a function that a worker can import.
    """

    def __init__(
        self,
        directory: Path,
        run_cell: RunCell,
        *,
        jobs: int,
        console: Console,
        label: str,
    ) -> None:
        self.directory, self._run_cell = directory, run_cell
        self._cells: dict[str, Cell] = {}
        self._batches = CellBatches(
            directory.parent,
            jobs=jobs,
            console=console,
            label=label,
            run=partial(_run, run_cell),
            on_cell=lambda file: self.result(self._cells[file.parent.name]),
        )

    def result(self, cell: Cell) -> Result:
        """The result of a finished cell."""
        found = self._batches.result(_queued(cell))
        if not cell_file(self.directory, cell.key).is_file():  # the queue wrote it, which knows nothing of its figures
            shutil.rmtree(self.directory / cell.key)
            self._run_cell(self.directory, cell, 1, died=found["reason"])
            found = self._batches.result(_queued(cell))
        return found

    def done(self, cell: Cell) -> bool:
        """Whether a cell needs no run."""
        return self._batches.done(_queued(cell))

    def run(self, cells: Sequence[Cell], *, again: Callable[[Any], bool] = lambda cell: False) -> None:
        """Run those of `cells` that have no result, or failed before this start. again: cells that must run anyhow."""
        self._cells |= {cell.key: cell for cell in cells}
        kinds = " and ".join(dict.fromkeys(cell.kind for cell in cells))
        self._batches.run([_queued(cell) for cell in cells], kinds, again=lambda queued: again(self._cells[queued.key]))


def _queued(cell: Cell) -> _Queued:
    recipe = Resolved(getattr(cell, "recipe", Recipe()), "", {})
    return _Queued(cell.key, {"kind": cell.kind}, getattr(cell, "seed", 0), recipe, of=cell)
