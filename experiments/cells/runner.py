"""Workers that live as long as a study, and the one line that says how far it is. A finished cell is never run again.

A kill at any moment loses the cells in flight; what is decided on the way is computed from the files, so a restart
decides the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

from experiments.cells.files import Result, cell_file, is_final, read_result
from experiments.console import Console, Task
from experiments.sweep import start_worker
from finetune.atomic import sweep_leftovers
from finetune.errors import UserError


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


RunCell = Callable[[Path, Any, int], None]
"""(directory of the results, cell, threads): runs the cell and writes its result."""


def claim(out: Path, recipe_yaml: str, what: str) -> None:
    """Make the directory, or check that it is a study's; several recipes may share one, as cells have names.

    what: kind of study, for the refusal. Raises UserError if `out` holds something else.
    """
    from finetune.atomic import write_text
    from finetune.rundir import write_provenance

    marker = out / "study.recipe.yaml"
    if out.exists() and any(entry.name != "cells" for entry in out.iterdir()) and not marker.is_file():
        raise UserError(f"{out} is not empty and is not a {what}'s directory; name another --out")
    (out / "cells").mkdir(parents=True, exist_ok=True)
    sweep_leftovers(out)
    sweep_leftovers(out / "cells")
    write_provenance(out)
    write_text(marker, recipe_yaml)


class Runner:
    """Runs cells of one study in `jobs` processes of one thread each (1: in this one).

    run_cell: a function that a worker can import. total: cells in all, as far as is known. on_cell: told the file of
    each cell that was run.
    """

    def __init__(
        self,
        directory: Path,
        run_cell: RunCell,
        *,
        jobs: int,
        console: Console,
        total: int,
        on_cell: Callable[[Path], None],
        label: str = "compare",
    ) -> None:
        self.directory, self.jobs, self.console, self.on_cell = directory, jobs, console, on_cell
        self.total, self.label = total, label
        self.finished: set[str] = set()
        self._run_cell = run_cell
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Runner:
        if self.jobs > 1:
            context = get_context("spawn")
            self._pool = ProcessPoolExecutor(self.jobs, context, initializer=start_worker, initargs=(os.getpid(), 1))
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=error[0] is None, cancel_futures=True)

    def result(self, cell: Cell) -> Result:
        """The result of a finished cell."""
        return read_result(self.directory, cell.key)

    def extend(self, count: int) -> None:
        """There are `count` cells more than thought."""
        self.total += count

    def done(self, cell: Cell) -> bool:
        """Whether a cell needs no run."""
        return is_final(self.directory, cell.key)

    def run(self, cells: Sequence[Cell], *, again: Callable[[Any], bool] = lambda cell: False) -> None:
        """Run those of `cells` that have no final result. again: cells that must run though they have one."""
        unique = {cell.key: cell for cell in cells if cell.key not in self.finished or again(cell)}
        todo = [cell for cell in unique.values() if again(cell) or not self.done(cell)]
        self.finished |= unique.keys()
        if not todo:
            return
        kinds = " and ".join(dict.fromkeys(cell.kind for cell in todo))
        done_before = len(self.finished) - len(todo)
        self.console.say(f"{kinds}: {len(todo)} cells to run, {len(unique) - len(todo)} done before")
        with _line(self.console, self.label, done_before, self.total) as line:
            for count, cell in enumerate(self._as_they_end(todo), start=1):
                result = self.result(cell)
                if result["status"] != "done":
                    self.console.say(f"{result['status']}: {cell.label}: {result['reason']}")
                self.on_cell(cell_file(self.directory, cell.key))
                line(count, cell.label)

    def _as_they_end(self, todo: Sequence[Cell]) -> Iterator[Cell]:
        """Run cells and give each when it has ended: in this process, or in the workers."""
        if self._pool is None:
            for cell in todo:
                self._run_cell(self.directory, cell, 1)
                yield cell
            return
        pending: dict[Future[None], Cell] = {
            self._pool.submit(self._run_cell, self.directory, cell, 1): cell for cell in todo
        }
        while pending:
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                cell = pending.pop(future)
                future.result()
                yield cell


@contextmanager
def _line(console: Console, label: str, before: int, total: int) -> Iterator[Task]:
    """The live line of one batch of cells, counted over the whole study: its rate is this batch's own."""
    with console.task(f"{label} ({before} of {total} before)", max(total - before, 1), "cells") as bar:
        yield bar
