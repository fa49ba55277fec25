"""The work queue of a study: cells go to worker processes, and come back when their worker dies.

A cell whose worker is killed (or runs out of memory) is tried once more; one that ends its worker twice becomes a
failed result. The study continues with a new worker.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import shutil
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Literal

from flatshift.experiments.results.cells import RESULT, read_result, source_digest
from flatshift.experiments.run.console import Console
from flatshift.experiments.studies.cell import Cell, CellResult, drop_result, finish_cell, run_cell
from flatshift.experiments.studies.devices import DevicePlacement, uses_cuda, with_device
from flatshift.experiments.studies.directory import await_orphans, read_results, study_lock
from flatshift.experiments.studies.leases import Leases
from flatshift.experiments.studies.progress import CellProgress
from flatshift.finetune.atomic import remove_leftovers
from flatshift.finetune.errors import Interrupted
from flatshift.finetune.launch.spawn import THREAD_VARIABLES
from flatshift.finetune.machine import without_cwd_imports
from flatshift.finetune.run_directory import RunDirectory, disk_full_interrupts

RunCell = Callable[[Path, Cell, int | None], bool]
"""(study directory, cell, threads) → whether the process is fit for another cell."""

_DEATHS = 2
"""Workers that a cell may end before it is taken to be the cause."""
_LOOK_S = 1.0
"""Seconds between two checks of cells that other hosts are running."""
_STILLBORN = 3
"""Number of workers in a row that end before they are ready, after which the study gives up."""


def run_logged(out: Path, cell: Cell, threads: int | None) -> bool:
    """`run_cell` in its directory of the study `out`, with a line in the study's log before and after."""
    log = RunDirectory(out).log
    log(f"start {cell.key} ({cell.label}) in process {os.getpid()}")
    fit = run_cell(out / "cells" / cell.key, cell, threads)
    log(f"end {cell.key}")
    return fit


def run_cells(
    out: Path,
    cells: Sequence[Cell],
    places: DevicePlacement,
    console: Console,
    *,
    label: str = "sweep",
    rerun: Collection[str] = (),
    run: RunCell = run_logged,
    on_result: Callable[[Path], None] = lambda path: None,
    leases: Leases | None = None,
) -> None:
    """Run the cells that have no result yet, in the processes of `places`.

    A single process is this one, unless it uses a CUDA device, which keeps failing in its process after one failure.

    rerun: keys of finished cells to run again. run: how a cell is run. on_result: called with the file of each result
    that was written. leases: where other hosts work on the same cells; returns when all have a result, whoever made it.
    Raises Interrupted when stopped or when the disk is full; what was finished stays.
    """
    if leases is None:
        await_orphans(out)
        remove_leftovers(out / "cells")
    unique = {cell.key: cell for cell in cells}
    results = {key: found for key, found in read_results(out, cells).items() if key not in rerun}
    todo = [cell for key, cell in unique.items() if key not in results]
    todo.sort(key=lambda cell: cell.seed)  # stable: a stopped sweep has complete seeds, which can be paired
    console.say(f"{label}: {len(unique)} cells, {len(results)} done before, {len(todo)} to run")
    if not todo:
        return
    here = places.jobs == 1 and not uses_cuda(places, todo)
    progress = CellProgress(list(unique.values()), results, console, label=label, workers=min(places.jobs, len(todo)))
    queue = _Queue(out, deque(todo), places, progress, run, on_result, rerun, leases)
    try:
        with progress.shown():
            queue.work_here() if here else queue.work()
    except (KeyboardInterrupt, StopRequested):
        done = progress.done + progress.failed
        raise Interrupted(
            f"the {label} stopped with {done} of {progress.total} cells finished; the same command continues from there"
        ) from None


class StopRequested(Exception):
    """Raised when a signal asks a cell to stop."""


@dataclass
class _Worker:
    number: int
    process: SpawnProcess
    connection: Connection
    ready: bool = False
    cell: Cell | None = None


@dataclass
class _Queue:
    """Cells that wait, and workers at theirs."""

    out: Path
    waiting: deque[Cell]
    places: DevicePlacement
    progress: CellProgress
    run: RunCell
    on_result: Callable[[Path], None]
    rerun: Collection[str] = ()
    leases: Leases | None = None
    workers: dict[int, _Worker] = field(default_factory=dict)
    deaths: Counter[str] = field(default_factory=Counter)
    stillborn: int = 0
    said: set[str] = field(default_factory=set)
    """Kinds of findings in the rows that were shown; other cells have the same rows."""

    def work_here(self) -> None:
        """Run every cell in this process, one after another."""
        while self.waiting:
            cell = self._next(self.places.device(0))
            if cell is None:
                self.progress.tick()
                time.sleep(_LOOK_S)
                continue
            try:
                self.run(self.out, cell, self.places.given)
            except Interrupted as error:
                if is_signal(error):
                    self._ended(cell)
                    raise StopRequested from error
                raise
            _freeze_imports()
            self._settle(cell)

    def work(self) -> None:
        """Run every cell in worker processes."""
        try:
            while self.waiting or any(worker.cell for worker in self.workers.values()):
                self._staff()
                for worker in self.workers.values():
                    if worker.ready and worker.cell is None:  # idle, and another's cell may have come back
                        self._hand_out(worker)
                ready = wait([worker.connection for worker in self.workers.values()], timeout=1.0)
                for worker in [w for w in self.workers.values() if w.connection in ready]:
                    self._hear(worker)
                self.progress.tick()
            for worker in self.workers.values():
                with contextlib.suppress(OSError):
                    worker.connection.send(None)
            for worker in self.workers.values():
                worker.process.join(timeout=10)
        finally:
            for worker in self.workers.values():
                worker.process.kill()
                worker.process.join()
                worker.connection.close()
                if worker.cell is not None:
                    self._clear(worker.cell)

    def _staff(self) -> None:
        """Start as many workers as there is work for."""
        busy = sum(1 for worker in self.workers.values() if worker.cell is not None)
        wanted = min(self.places.jobs, busy + len(self.waiting))
        for number in range(self.places.jobs):
            if len(self.workers) >= wanted:
                return
            if number not in self.workers:
                self.workers[number] = self._start(number)

    def _start(self, number: int) -> _Worker:
        context = get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=run_worker, args=(os.getpid(), self.places.threads, self.out, self.run, there))
        # The worker must not import a file of the user's that is named like a module.
        with without_cwd_imports():
            process.start()
        there.close()  # so that the pipe ends with the worker
        return _Worker(number, process, here)

    def _hear(self, worker: _Worker) -> None:
        try:
            answer: WorkerReply | None = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            answer = None
        if answer is None or not answer.fit:
            self._dismiss(worker)
        cell, worker.cell = worker.cell, None
        if answer is None:
            self._died(worker, cell)
            return
        if answer.kind == "disk full":
            raise Interrupted(answer.text)
        if not worker.ready:
            worker.ready, self.stillborn = True, 0
        elif cell is not None:
            if answer.kind != "stopped":
                self._settle(cell)
            elif not self._ended(cell):
                self.waiting.append(cell)
        if answer.fit:
            self._hand_out(worker)

    def _hand_out(self, worker: _Worker) -> None:
        if self.waiting and (cell := self._next(self.places.device(worker.number))) is not None:
            worker.cell = cell
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died meanwhile: its pipe says so next
                worker.connection.send(cell)

    def _next(self, device: str | None) -> Cell | None:
        """The next cell, for `device`; what other code left in its place goes. None: others are at all that waits."""
        cell = self._claimed()
        if cell is None:
            return None
        if cell.key in self.rerun:
            drop_result(self.out / "cells" / cell.key)
        self.progress.began(cell)
        return with_device(cell, device)

    def _claimed(self) -> Cell | None:
        """The next cell that no other host works on."""
        if self.leases is None:
            return self.waiting.popleft()
        for _ in range(len(self.waiting)):
            cell = self.waiting.popleft()
            if not self.leases.take(cell.key):
                self.waiting.append(cell)
                continue
            self._clear(cell)  # what a dead host left
            if not self._ended(cell):  # asked now that nobody else can make one
                return cell
        return None

    def _dismiss(self, worker: _Worker) -> None:
        del self.workers[worker.number]
        worker.process.join(timeout=10)
        worker.process.kill()
        worker.process.join()
        worker.connection.close()

    def _died(self, worker: _Worker, cell: Cell | None) -> None:
        """A worker is gone: count its cell's result, or take the cell back."""
        how = _describe_exit(worker.process.exitcode)
        if not worker.ready:
            self.stillborn += 1
            if self.stillborn >= _STILLBORN:
                raise Interrupted(f"{_STILLBORN} workers in a row {how} before they had begun; see what stands above")
            return
        self._log(f"a worker (process {worker.process.pid}) {how}" + (f" at cell {cell.key}" if cell else ""))
        if cell is not None:
            self._clear(cell)
            self._settle(cell, how)

    def _clear(self, cell: Cell) -> None:
        """Remove what a worker that is dead was writing of `cell`; other workers are writing theirs."""
        for leftover in (self.out / "cells").glob(f".{cell.key}.*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        remove_leftovers(self.out / "cells" / cell.key)

    def _ended(self, cell: Cell) -> bool:
        """Count the result of a cell that its worker has left; False if there is none."""
        result = read_result(self.out / "cells" / cell.key)
        if result is None:
            self.progress.returned(cell)
            return False
        self._count(cell, result)
        if self.leases is not None:
            self.leases.release(cell.key)
        return True

    def _settle(self, cell: Cell, how: str | None = None) -> None:
        """Count the result of a cell; one without goes back to the queue, or fails if it ends every worker.

        how: what happened to the worker; None: it is well.
        """
        if self._ended(cell):
            return
        self.deaths[cell.key] += 1
        if self.deaths[cell.key] < _DEATHS:
            self.waiting.append(cell)
            return
        reason = f"its worker {how or 'left no result'}, {_DEATHS} times; perhaps it needs more memory than there is"
        directory = self.out / "cells" / cell.key
        with disk_full_interrupts(f"writing {directory}"):
            finish_cell(directory, cell, CellResult("failed", reason))
        result = read_result(directory)
        assert result is not None
        self._count(cell, result)

    def _count(self, cell: Cell, result: dict[str, Any]) -> None:
        self.progress.ended(cell, result)
        for kind, text in (result.get("checks") or {}).items():
            if kind not in self.said:  # other cells have the same rows
                self.said.add(kind)
                self.progress.console.say(f"data: {text} (data.checks.{kind})")
        self.on_result(self.out / "cells" / cell.key / RESULT)

    def _log(self, text: str) -> None:
        RunDirectory(self.out).log(text)
        self.progress.console.say(text)


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    return f"ended with code {code}"


# --------------------------------------------------------------------------------------------- in a worker process


@dataclass(frozen=True)
class WorkerReply:
    """Outcome of one cell, as its worker reports it."""

    kind: Literal["done", "stopped", "disk full"]
    """stopped: by a signal. disk full: nothing more can be written; the study must end."""
    text: str = ""
    fit: bool = True
    """True if this process can take another cell."""


READY = WorkerReply("done")


def init_worker(parent: int, threads: int) -> None:
    """Give a worker its share of the cores, and end it if its parent is killed.

    The share must be in the environment before torch and BLAS are imported: pools of all cores in every worker wait for
    each other (evaluation was eight times slower). An orphan must not write into a study that has been restarted.
    """
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(3)

    threading.Thread(target=watch, daemon=True).start()


def run_worker(parent: int, threads: int, out: Path, run: RunCell, connection: Connection) -> None:
    """Run a worker: report that it is ready, then answer each cell, until it receives None or its parent is gone."""
    init_worker(parent, threads)
    source_digest()  # now: later edits are not the code that this worker runs
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means
    with study_lock(out):
        if os.getppid() != parent:
            return
        connection.send(READY)
        try:
            while (cell := connection.recv()) is not None:
                answer = _reply_to_unit(out, cell, threads, run)
                _freeze_imports()
                connection.send(answer)
                if not answer.fit:
                    return
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


@functools.cache
def _freeze_imports() -> None:
    """Once, after the first cell: what it imported stays, and is spared every later search for garbage (0.3 s each)."""
    gc.collect()
    gc.freeze()


def _reply_to_unit(out: Path, cell: Cell, threads: int, run: RunCell) -> WorkerReply:
    try:
        return WorkerReply("done", fit=run(out, cell, threads))
    except Interrupted as error:
        return WorkerReply("stopped" if is_signal(error) else "disk full", str(error), fit=False)


def is_signal(error: Interrupted) -> bool:
    """Return True if a signal ended a cell, not a full disk (which is the error's cause)."""
    return error.__cause__ is None or isinstance(error.__cause__, KeyboardInterrupt)
