"""Workers that live as long as a study, and the one line that says how far it is. A finished cell is never run again.

A kill at any moment loses the cells in flight; what is decided on the way is computed from the files, so a restart
decides the same. A worker that dies (killed, out of memory) costs the cells in flight one try each; they are tried
again one at a time, and a cell that ends its worker twice becomes a crashed result.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

from benchmarks.studies.cells.files import Result, cell_file, is_final, read_result
from benchmarks.studies.cells.study import RECIPE
from experiments.run.console import Bar, Console
from experiments.studies import start_worker
from finetune.atomic import is_bare, make_directory, sweep_leftovers, write_text
from finetune.errors import UserError
from finetune.lock import INSIDE


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


_DEATHS = 2
"""Workers that a cell may end before it is taken to be the cause."""


class RunCell(Protocol):
    """Runs a cell and writes its result."""

    def __call__(self, directory: Path, cell: Any, threads: int, /, *, died: str | None = None) -> None:
        """directory: of the results. died: how the cell ended its workers; it does not run, and this is its result."""


def claim_study(out: Path, recipe_yaml: str, what: str) -> None:
    """Make the directory, or check that it is a study's; the caller owns it (`finetune.lock`).

    Several recipes may share a directory, one after another, as cells have names. what: kind of study, for the refusal.
    Raises UserError if `out` holds something else.
    """
    from finetune.run_directory import write_provenance

    marker = out / RECIPE
    if out.exists() and not marker.is_file() and not (out.is_dir() and is_bare(out, but=("cells", INSIDE))):
        raise UserError(f"{out} is not empty and is not a {what}'s directory; name another --out")
    sweep_leftovers(out)
    write_text(marker, recipe_yaml)  # first: a kill from here on leaves what the same command knows as its own
    make_directory(out / "cells")
    sweep_leftovers(out / "cells")
    write_provenance(out)


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
            self._pool = self._hire()
        return self

    def _hire(self) -> ProcessPoolExecutor:
        context = get_context("spawn")
        return ProcessPoolExecutor(self.jobs, context, initializer=start_worker, initargs=(os.getpid(), 1))

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
        waiting = deque(todo)
        suspects: deque[Cell] = deque()  # one of them ended a worker
        deaths: Counter[str] = Counter()
        while waiting or suspects:
            if suspects:
                lost = yield from self._in_flight(deque([suspects.popleft()]), 1)
            else:
                lost = yield from self._in_flight(waiting, self.jobs)
            for cell in lost:
                deaths[cell.key] += 1
                if deaths[cell.key] < _DEATHS:
                    suspects.append(cell)
                    continue
                how = f"its worker process ended {_DEATHS} times; perhaps it needs more memory than there is"
                self._run_cell(self.directory, cell, 1, died=how)
                yield cell

    def _in_flight(self, waiting: deque[Cell], width: int) -> Generator[Cell, None, list[Cell]]:
        """Run cells, `width` at a time, and give each when it has ended, until `waiting` is empty or a worker dies.

        Returns the cells that were in flight when it died: with no more at a time than there are workers, one of them
        is the cause. The workers are new then.
        """
        assert self._pool is not None
        pending: dict[Future[None], Cell] = {}
        ended: list[Cell] = []
        lost: list[Cell] = []
        while not lost:
            while waiting and len(pending) < width:
                try:
                    pending[self._pool.submit(self._run_cell, self.directory, waiting[0], 1)] = waiting[0]
                except BrokenProcessPool:
                    if pending:  # they tell it next
                        break
                    self._pool = self._hire()  # a worker that had nothing to do died
                    continue
                waiting.popleft()
            yield from ended  # with the workers at work again
            if not pending:
                break
            ended = []
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                cell = pending.pop(future)
                if isinstance(future.exception(), BrokenProcessPool):
                    lost.append(cell)
                else:
                    future.result()
                    ended.append(cell)
        else:
            yield from ended
            lost += pending.values()
        if lost:
            names = ", ".join(cell.label for cell in lost)
            self.console.say(f"a worker process ended; with the workers were: {names}")
            self._pool.shutdown()
            self._pool = self._hire()
        return lost


@contextmanager
def _line(console: Console, label: str, before: int, total: int) -> Iterator[Bar]:
    """The live line of one batch of cells, counted over the whole study: its rate is this batch's own."""
    with console.task(f"{label} ({before} of {total} before)", max(total - before, 1), "cells") as bar:
        yield bar
