"""Work queue of a study: units of cells go to worker processes, and return to the queue when their worker dies.

A worker that is killed (or runs out of memory) costs its unit one try: a stack is split in half, a single cell is tried
once more; a cell that ends its worker twice gets a failed result. The study continues with a new worker.
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
from flatshift.experiments.studies.cell import Cell, Result, drop_result, finish_cell, result_of, run_cell
from flatshift.experiments.studies.devices import DevicePlacement, memory_of, on_cuda, place
from flatshift.experiments.studies.directory import await_orphans, results_of, study_lock
from flatshift.experiments.studies.leases import Leases
from flatshift.experiments.studies.progress import CellProgress
from flatshift.finetune.atomic import sweep_leftovers
from flatshift.finetune.child_process import without_namesakes
from flatshift.finetune.errors import Interrupted
from flatshift.finetune.launch.spawn import THREADS
from flatshift.finetune.run_directory import RunDirectory, disk_full_interrupts

Unit = tuple[Cell, ...]
"""Cells that one worker trains at a time: one, or a stack on a shared backbone."""

RunUnit = Callable[[Path, Unit, int | None], bool]
"""(study directory, cells, threads) → True if the process can run another unit."""

_DEATHS = 2
"""Number of worker deaths, alone with a cell, after which the cell counts as the cause."""
_LOOK_S = 1.0
"""Seconds between two checks of cells that other hosts are running."""
_STILLBORN = 3
"""Number of workers in a row that end before they are ready, after which the study gives up."""


def run_unit(out: Path, unit: Unit, threads: int | None) -> bool:
    """Train and evaluate the cells of a unit; return True if this process can run another one.

    If a stack fails as a whole (out of memory), its unfinished cells are left without a result.
    """
    directories = [out / "cells" / cell.key for cell in unit]
    log = RunDirectory(out).log
    for cell in unit:
        log(f"start {cell.key} ({cell.label}) in process {os.getpid()}")
    if len(unit) == 1:
        fit = run_cell(directories[0], unit[0], threads)
    else:
        from flatshift.experiments.studies.stack import run_stack

        def measure() -> Result:
            run_stack(directories, unit, threads)
            return Result("done")

        result, fit = result_of(measure, out)
        if result.status != "done":
            log(f"a stack of {len(unit)} cells failed: {result.reason}")
    log("\n".join(f"end {cell.key}" for cell in unit))
    return fit


def run_cells(
    out: Path,
    cells: Sequence[Cell],
    places: DevicePlacement,
    console: Console,
    *,
    label: str = "sweep",
    stack: int | None = 1,
    rerun: Collection[str] = (),
    run: RunUnit = run_unit,
    on_result: Callable[[Path], None] = lambda path: None,
    leases: Leases | None = None,
) -> None:
    """Run the cells that have no result yet, in the processes of `places`.

    A single process is this one, unless it uses a CUDA device, which keeps failing in its process after one failure.

    stack: most cells trained together on one backbone; None: as many as memory allows. rerun: keys of finished cells to
    run again. run: runs one unit. on_result: called with the file of each new result. leases: for hosts that share the
    cells; returns when all have a result, from any host. Raises Interrupted when stopped or when the disk is full;
    finished cells are kept.
    """
    if leases is None:
        await_orphans(out)
        sweep_leftovers(out / "cells")
    unique = {cell.key: cell for cell in cells}
    results = {key: found for key, found in results_of(out, cells).items() if key not in rerun}
    todo = [cell for key, cell in unique.items() if key not in results]
    todo.sort(key=lambda cell: cell.seed)  # stable: a stopped sweep has complete seeds, which can be paired
    console.say(f"{label}: {len(unique)} cells, {len(results)} done before, {len(todo)} to run")
    if not todo:
        return
    here = places.jobs == 1 and not on_cuda(places, todo)
    units = units_of(todo, places, stack=stack, say=console.say)
    progress = CellProgress(list(unique.values()), results, console, label=label, workers=min(places.jobs, len(units)))
    queue = _Queue(out, deque(units), places, progress, run, on_result, rerun, leases)
    try:
        with progress.shown():
            queue.work_here() if here else queue.work()
    except (KeyboardInterrupt, Stopped):
        done = progress.done + progress.failed
        raise Interrupted(
            f"the {label} stopped with {done} of {progress.total} cells finished; the same command goes on from there"
        ) from None


class Stopped(Exception):
    """Raised when a signal asks a cell to stop."""


def units_of(
    cells: Sequence[Cell], places: DevicePlacement, *, stack: int | None, say: Callable[[str], None] = lambda line: None
) -> list[Unit]:
    """Divide cells into units for workers; with few cells, stacks are narrow enough for every worker to get one.

    say: called with the number of cells that cannot share a backbone, and the reason.
    """
    if stack == 1:
        return [(cell,) for cell in cells]
    from flatshift.experiments.studies.stack import WIDTH, stacks

    width = min(stack or WIDTH, -(-len(cells) // places.jobs))
    memory = memory_of(places, cells[0].resolved.recipe.train.device)
    found = stacks(cells, width=width, memory=memory)
    for reason, count in Counter(one.reason for one in found if one.reason is not None).items():
        say(f"{count} cell{'s' * (count > 1)} run{'s' * (count == 1)} alone: {reason}")
    return [one.cells for one in found]


@dataclass
class _Worker:
    number: int
    process: SpawnProcess
    connection: Connection
    ready: bool = False
    unit: Unit = ()


@dataclass
class _Queue:
    """Waiting units, and workers with theirs."""

    out: Path
    waiting: deque[Unit]
    places: DevicePlacement
    progress: CellProgress
    run: RunUnit
    on_result: Callable[[Path], None]
    rerun: Collection[str] = ()
    leases: Leases | None = None
    workers: dict[int, _Worker] = field(default_factory=dict)
    deaths: Counter[str] = field(default_factory=Counter)
    stillborn: int = 0
    said: set[str] = field(default_factory=set)
    """Reasons for split stacks and findings on the rows that have already been printed."""

    def work_here(self) -> None:
        """Run every unit in this process, one after another."""
        while self.waiting:
            unit = self._next(self.places.device(0))
            if not unit:
                self.progress.tick()
                time.sleep(_LOOK_S)
                continue
            try:
                self.run(self.out, unit, self.places.given)
            except Interrupted as error:
                if was_signal(error):
                    self._ended(unit)
                    raise Stopped from error
                raise
            _spare_garbage()
            self._settle(unit)

    def work(self) -> None:
        """Run every unit in worker processes."""
        try:
            while self.waiting or any(worker.unit for worker in self.workers.values()):
                self._staff()
                for worker in self.workers.values():
                    if worker.ready and not worker.unit:  # idle, and another's unit may have come back
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
                self._clear(worker.unit)

    def _staff(self) -> None:
        """Start as many workers as there is work for."""
        busy = sum(1 for worker in self.workers.values() if worker.unit)
        wanted = min(self.places.jobs, busy + len(self.waiting))
        for number in range(self.places.jobs):
            if len(self.workers) >= wanted:
                return
            if number not in self.workers:
                self.workers[number] = self._start(number)

    def _start(self, number: int) -> _Worker:
        context = get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(os.getpid(), self.places.threads, self.out, self.run, there))
        # The worker must not import a file of the user's that is named like a module.
        with without_namesakes():
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
        unit, worker.unit = worker.unit, ()
        if answer is None:
            self._died(worker, unit)
            return
        if answer.kind == "disk full":
            raise Interrupted(answer.text)
        if not worker.ready:
            worker.ready, self.stillborn = True, 0
        elif answer.kind == "stopped":
            rest = self._ended(unit)
            self.waiting += [rest] if rest else []
        else:
            self._settle(unit)
        if answer.fit:
            self._hand_out(worker)

    def _hand_out(self, worker: _Worker) -> None:
        if self.waiting and (unit := self._next(self.places.device(worker.number))):
            worker.unit = unit
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has died: noticed at its closed pipe
                worker.connection.send(worker.unit)

    def _next(self, device: str | None) -> Unit:
        """Return the next unit, for `device`, after deleting stale results; () if other hosts are running all that
        waits."""
        unit = tuple(place(cell, device) for cell in self._claimed())
        for cell in unit:
            if cell.key in self.rerun:
                drop_result(self.out / "cells" / cell.key)
        self.progress.began(unit)
        return unit

    def _claimed(self) -> Unit:
        """Return the next unit without cells that other hosts are running."""
        if self.leases is None:
            return self.waiting.popleft()
        for _ in range(len(self.waiting)):
            unit = self.waiting.popleft()
            mine = tuple(cell for cell in unit if self.leases.take(cell.key))
            self.waiting.extend((cell,) for cell in unit if cell not in mine)
            self._clear(mine)  # left by a dead host
            if rest := self._ended(mine):  # checked under the lease: nobody else can add a result now
                return rest
        return ()

    def _dismiss(self, worker: _Worker) -> None:
        del self.workers[worker.number]
        worker.process.join(timeout=10)
        worker.process.kill()
        worker.process.join()
        worker.connection.close()

    def _died(self, worker: _Worker, unit: Unit) -> None:
        """Handle a dead worker: count its finished cells and requeue the rest."""
        how = _ending(worker.process.exitcode)
        if not worker.ready:
            self.stillborn += 1
            if self.stillborn >= _STILLBORN:
                raise Interrupted(f"{_STILLBORN} workers in a row {how} before they had begun; see what stands above")
            return
        self._log(f"a worker (process {worker.process.pid}) {how}; {len(unit)} cells were with it")
        self._clear(unit)
        self._settle(unit, how)

    def _clear(self, unit: Unit) -> None:
        """Remove temporary files of a dead worker in `unit`; those of other workers are still in use."""
        for cell in unit:
            for leftover in (self.out / "cells").glob(f".{cell.key}.*.tmp"):
                shutil.rmtree(leftover, ignore_errors=True)
            sweep_leftovers(self.out / "cells" / cell.key)

    def _ended(self, unit: Unit) -> Unit:
        """Count the results of a unit after its worker is done; return the cells without one."""
        rest = []
        alone: Counter[str] = Counter()
        for cell in unit:
            result = read_result(self.out / "cells" / cell.key)
            if result is None:
                rest.append(cell)
                continue
            self._ended_one(cell, result)
            if self.leases is not None:
                self.leases.release(cell.key)
            if result.get("alone") is not None:
                alone[result["alone"]] += 1
        for reason, count in alone.items():
            if reason not in self.said:  # other stacks of the study report the same
                self.said.add(reason)
                self._log(f"{count} cells of a stack ran alone: {reason}")
        self.progress.returned(rest)
        return tuple(rest)

    def _settle(self, unit: Unit, how: str | None = None) -> None:
        """Count the results of a unit; cells without one return to the queue, or fail if they keep ending workers.

        how: what happened to the worker; None: it is fine, and a stack failed as a whole.
        """
        rest = self._ended(unit)
        if not rest:
            return
        if len(rest) > 1 or len(unit) > 1:
            middle = (len(rest) + 1) // 2
            self.waiting.extend(part for part in (rest[:middle], rest[middle:]) if part)
            return
        (cell,) = rest
        self.deaths[cell.key] += 1
        if self.deaths[cell.key] < _DEATHS:
            self.waiting.append(unit)
            return
        reason = f"its worker {how or 'left no result'}, {_DEATHS} times; perhaps it needs more memory than there is"
        directory = self.out / "cells" / cell.key
        with disk_full_interrupts(f"writing {directory}"):
            finish_cell(directory, cell, Result("failed", reason))
        result = read_result(directory)
        assert result is not None
        self._ended_one(cell, result)

    def _ended_one(self, cell: Cell, result: dict[str, Any]) -> None:
        self.progress.ended(cell, result)
        for kind, text in (result.get("checks") or {}).items():
            if kind not in self.said:  # other cells have the same rows
                self.said.add(kind)
                self.progress.console.say(f"data: {text} (data.checks.{kind})")
        self.on_result(self.out / "cells" / cell.key / RESULT)

    def _log(self, text: str) -> None:
        RunDirectory(self.out).log(text)
        self.progress.console.say(text)


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    return f"ended with code {code}"


# --------------------------------------------------------------------------------------------- in a worker process


@dataclass(frozen=True)
class WorkerReply:
    """Outcome of a unit."""

    kind: Literal["done", "stopped", "disk full"]
    """stopped: by a signal. disk full: nothing more can be written; the study must end."""
    text: str = ""
    fit: bool = True
    """True if this process can take another unit."""


READY = WorkerReply("done")


def start_worker(parent: int, threads: int) -> None:
    """Give a worker its share of the cores, and end it if its parent is killed.

    The share must be in the environment before torch and BLAS are imported: pools of all cores in every worker wait for
    each other (evaluation was eight times slower). An orphan must not write into a study that has been restarted.
    """
    os.environ.update(dict.fromkeys(THREADS, str(threads)))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(3)

    threading.Thread(target=watch, daemon=True).start()


def serve(parent: int, threads: int, out: Path, run: RunUnit, connection: Connection) -> None:
    """Run a worker: report that it is ready, then answer each unit until it receives None or loses its parent."""
    start_worker(parent, threads)
    source_digest()  # now: later edits are not the code that this worker runs
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means
    with study_lock(out):
        if os.getppid() != parent:
            return
        connection.send(READY)
        try:
            while (unit := connection.recv()) is not None:
                answer = _answer(out, unit, threads, run)
                _spare_garbage()
                connection.send(answer)
                if not answer.fit:
                    return
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


@functools.cache
def _spare_garbage() -> None:
    """Freeze, after the first unit, everything imported, which later garbage collections then skip (0.3 s each)."""
    gc.collect()
    gc.freeze()


def _answer(out: Path, unit: Unit, threads: int, run: RunUnit) -> WorkerReply:
    try:
        return WorkerReply("done", fit=run(out, unit, threads))
    except Interrupted as error:
        return WorkerReply("stopped" if was_signal(error) else "disk full", str(error), fit=False)


def was_signal(error: Interrupted) -> bool:
    """Return True if a signal ended a cell, not a full disk (which is the error's cause)."""
    return error.__cause__ is None or isinstance(error.__cause__, KeyboardInterrupt)
