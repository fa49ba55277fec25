"""Work queue of a study: cells go to worker processes, each on its device, and come back when their worker dies.

A cell whose worker is killed (or runs out of memory) is tried once more; one that ends its worker twice becomes a
failed result. The study continues with a new worker.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from typing import Literal

from flatshift.experiments.results.cells import RESULT, read_result, source_digest
from flatshift.experiments.run.console import Console
from flatshift.experiments.studies.cell import Cell, CellResult, finish_cell, run_cell
from flatshift.experiments.studies.directory import await_orphans, read_results, study_lock
from flatshift.experiments.studies.leases import Leases
from flatshift.experiments.studies.progress import CellProgress
from flatshift.finetune.atomic import remove_leftovers
from flatshift.finetune.errors import Interrupted, UserError
from flatshift.finetune.launch.spawn import THREAD_VARIABLES
from flatshift.finetune.machine import without_cwd_imports
from flatshift.finetune.run_directory import RunDirectory, disk_full_interrupts


@dataclass(frozen=True)
class DevicePlacement:
    """Workers and their devices. jobs: number of worker processes. devices: assigned in turn; none: each cell's own
    choice. own_threads: CPU threads of one worker; None: its share of the cores."""

    jobs: int
    devices: tuple[str, ...] = ()
    own_threads: int | None = None

    @property
    def threads(self) -> int:
        """CPU threads of one worker."""
        if self.own_threads is not None:
            return self.own_threads
        from flatshift.finetune.planner.devices import detect_devices

        return max(1, detect_devices("cpu").count // self.jobs)

    def device(self, worker: int) -> str | None:
        """Return the device of a worker."""
        return self.devices[worker % len(self.devices)] if self.devices else None


def with_device(cell: Cell, device: str | None) -> Cell:
    """Return the cell with its device set to `device`, which is not part of its key."""
    if device is None:
        return cell
    recipe = cell.resolved.recipe
    recipe = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, device=device))
    return dataclasses.replace(cell, resolved=dataclasses.replace(cell.resolved, recipe=recipe))


def uses_cuda(placement: DevicePlacement, cells: Sequence[Cell]) -> bool:
    """Return True if any of the cells runs on a CUDA device."""
    from flatshift.finetune.planner.devices import detect_devices

    devices = set(placement.devices) or {cell.resolved.recipe.train.device for cell in cells}
    return any(device != "cpu" and detect_devices(device).kind == "cuda" for device in devices)


def _cuda_devices() -> int:
    from flatshift.finetune.planner.devices import detect_devices

    devices = detect_devices()
    return devices.count if devices.kind == "cuda" else 0


def choose_devices(flag: str, recipe_device: str, *, count: Callable[[], int] = _cuda_devices) -> tuple[str, ...]:
    """Return the devices for the workers of a study; none: let each cell choose.

    flag: `auto` (every CUDA device, unless the recipe names one), `cpu`, or CUDA numbers `0,2`. recipe_device: its
    train.device. count: returns the number of CUDA devices. Raises UserError for a missing device.
    """
    if flag == "auto":
        return tuple(f"cuda:{i}" for i in range(count())) if recipe_device in ("auto", "cuda") else ()
    if flag == "cpu":
        return ("cpu",)
    numbers = [item.strip().removeprefix("cuda:") for item in flag.split(",")]
    if not all(number.isdecimal() for number in numbers):
        raise UserError(f"--devices {flag}: write auto, cpu, or CUDA numbers such as 0,1")
    existing = count()
    for number in numbers:
        if int(number) >= existing:
            raise UserError(f"--devices {flag}: there is no cuda:{number}; this machine has {existing} CUDA devices")
    if len(set(numbers)) < len(numbers):
        raise UserError(f"--devices {flag}: a device is given twice; several workers share one by --jobs")
    return tuple(f"cuda:{int(number)}" for number in numbers)


RunCell = Callable[[Path, Cell, int | None], bool]
"""(study directory, cell, threads) → whether the process is fit for another cell."""

_MAX_DEATHS = 2
"""Workers that a cell may end before it is taken to be the cause."""
_CHECK_INTERVAL_S = 1.0
"""Between two checks of cells that other hosts are running."""
_MAX_FAILED_STARTS = 3
"""Workers in a row that end before they are ready, after which the study gives up."""


def run_logged(out: Path, cell: Cell, threads: int | None) -> bool:
    """Run `run_cell` in its directory of the study `out`, with a line in the study's log before and after."""
    log = RunDirectory(out).log
    log(f"start {cell.key} ({cell.label}) in process {os.getpid()}")
    fit = run_cell(out / "cells" / cell.key, cell, threads)
    log(f"end {cell.key}")
    return fit


def run_cells(
    out: Path,
    cells: Sequence[Cell],
    placement: DevicePlacement,
    console: Console,
    *,
    label: str = "sweep",
    rerun: Collection[str] = (),
    run: RunCell = run_logged,
    leases: Leases | None = None,
) -> None:
    """Run the cells that have no result yet, in the processes of `placement`.

    A single process is this one, unless it uses a CUDA device, which keeps failing in its process after one failure.

    rerun: keys of finished cells to run again. run: how a cell is run. leases: where other hosts work on the same
    cells; returns when all have a result, whoever made it.
    Raises Interrupted when stopped or when the disk is full; what was finished stays.
    """
    if leases is None:
        await_orphans(out)
        remove_leftovers(out / "cells")
    unique = {cell.key: cell for cell in cells}
    results = {key: result for key, result in read_results(out, cells).items() if key not in rerun}
    todo = [cell for key, cell in unique.items() if key not in results]
    todo.sort(key=lambda cell: cell.seed)  # stable: a stopped sweep has complete seeds, which can be paired
    console.say(f"{label}: {len(unique)} cells, {len(results)} done before, {len(todo)} to run")
    if not todo:
        return
    single = placement.jobs == 1 and not uses_cuda(placement, todo)
    workers = min(placement.jobs, len(todo))
    progress = CellProgress(list(unique.values()), results, console, label=label, workers=workers)
    queue = _Queue(out, deque(todo), placement, progress, run, rerun, leases)
    try:
        with progress.displayed():
            queue.run_here() if single else queue.run_workers()
    except KeyboardInterrupt:
        done = progress.done + progress.failed
        raise Interrupted(
            f"the {label} stopped with {done} of {progress.total} cells finished; the same command continues from there"
        ) from None


@dataclass
class _Worker:
    number: int
    process: SpawnProcess
    connection: Connection
    ready: bool = False
    cell: Cell | None = None


@dataclass
class _Queue:
    """Cells that wait, and workers at theirs. reported: kinds of findings in rows, as other cells have the same."""

    out: Path
    waiting: deque[Cell]
    placement: DevicePlacement
    progress: CellProgress
    run: RunCell
    rerun: Collection[str] = ()
    leases: Leases | None = None
    workers: dict[int, _Worker] = field(default_factory=dict)
    deaths: Counter[str] = field(default_factory=Counter)
    failed_starts: int = 0
    reported: set[str] = field(default_factory=set)

    def run_here(self) -> None:
        """Run every cell in this process, one after another."""
        while self.waiting:
            cell = self._next_cell(self.placement.device(0))
            if cell is None:
                self.progress.tick()
                time.sleep(_CHECK_INTERVAL_S)
                continue
            try:
                self.run(self.out, cell, self.placement.own_threads)
            except Interrupted as error:
                if is_signal(error):
                    self._count_result(cell)
                    raise KeyboardInterrupt from error
                raise
            _freeze_imports()
            self._settle(cell)

    def run_workers(self) -> None:
        """Run every cell in worker processes."""
        try:
            while self.waiting or any(worker.cell for worker in self.workers.values()):
                self._start_workers()
                for worker in self.workers.values():
                    if worker.ready and worker.cell is None:  # idle, and another's cell may have come back
                        self._hand_out(worker)
                ready = wait([worker.connection for worker in self.workers.values()], timeout=1.0)
                for worker in [w for w in self.workers.values() if w.connection in ready]:
                    self._receive(worker)
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

    def _start_workers(self) -> None:
        busy = sum(1 for worker in self.workers.values() if worker.cell is not None)
        for number in range(self.placement.jobs):
            if len(self.workers) >= busy + len(self.waiting):
                return
            if number not in self.workers:
                self.workers[number] = self._start(number)

    def _start(self, number: int) -> _Worker:
        context = get_context("spawn")
        connection, remote = context.Pipe()
        arguments = (os.getpid(), self.placement.threads, self.out, self.run, remote)
        process = context.Process(target=run_worker, args=arguments)
        # The worker must not import a file of the user's that is named like a module.
        with without_cwd_imports():
            process.start()
        remote.close()  # so that the pipe ends with the worker
        return _Worker(number, process, connection)

    def _receive(self, worker: _Worker) -> None:
        try:
            reply: WorkerReply | None = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            reply = None
        if reply is None or not reply.fit:
            del self.workers[worker.number]
            worker.process.join(timeout=10)
            worker.process.kill()
            worker.process.join()
            worker.connection.close()
        cell, worker.cell = worker.cell, None
        if reply is None:
            self._handle_death(worker, cell)
            return
        if reply.kind == "disk full":
            raise Interrupted(reply.text)
        if not worker.ready:
            worker.ready, self.failed_starts = True, 0
        elif cell is not None:
            if reply.kind != "stopped":
                self._settle(cell)
            elif not self._count_result(cell):
                self.waiting.append(cell)
        if reply.fit:
            self._hand_out(worker)

    def _hand_out(self, worker: _Worker) -> None:
        if self.waiting and (cell := self._next_cell(self.placement.device(worker.number))) is not None:
            worker.cell = cell
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died meanwhile: its pipe says so next
                worker.connection.send(cell)

    def _next_cell(self, device: str | None) -> Cell | None:
        """Return the next cell, for `device`, without its stale result; None if others are at all that waits."""
        cell = self._claim_cell()
        if cell is None:
            return None
        if cell.key in self.rerun:
            (self.out / "cells" / cell.key / RESULT).unlink(missing_ok=True)
        self.progress.began(cell)
        return with_device(cell, device)

    def _claim_cell(self) -> Cell | None:
        """Return the next cell that no other host works on."""
        if self.leases is None:
            return self.waiting.popleft()
        for _ in range(len(self.waiting)):
            cell = self.waiting.popleft()
            if not self.leases.take(cell.key):
                self.waiting.append(cell)
                continue
            self._clear(cell)  # what a dead host left
            if not self._count_result(cell):  # asked now that nobody else can make one
                return cell
        return None

    def _handle_death(self, worker: _Worker, cell: Cell | None) -> None:
        """Count the result of a dead worker's cell, or take the cell back."""
        ending = _describe_exit(worker.process.exitcode)
        if not worker.ready:
            self.failed_starts += 1
            if self.failed_starts >= _MAX_FAILED_STARTS:
                raise Interrupted(
                    f"{_MAX_FAILED_STARTS} workers in a row {ending} before they had begun; see what stands above"
                )
            return
        text = f"a worker (process {worker.process.pid}) {ending}" + (f" at cell {cell.key}" if cell else "")
        RunDirectory(self.out).log(text)
        self.progress.console.say(text)
        if cell is not None:
            self._clear(cell)
            self._settle(cell, ending)

    def _clear(self, cell: Cell) -> None:
        """Remove what a dead worker was writing of `cell`; other workers are writing theirs."""
        for leftover in (self.out / "cells").glob(f".{cell.key}.*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        remove_leftovers(self.out / "cells" / cell.key)

    def _count_result(self, cell: Cell) -> bool:
        """Count the result of a cell that its worker has left; return False if there is none."""
        result = read_result(self.out / "cells" / cell.key)
        if result is None:
            self.progress.returned(cell)
            return False
        self.progress.ended(cell, result)
        for kind, text in (result.get("checks") or {}).items():
            if kind not in self.reported:
                self.reported.add(kind)
                self.progress.console.say(f"data: {text} (data.checks.{kind})")
        if self.leases is not None:
            self.leases.release(cell.key)
        return True

    def _settle(self, cell: Cell, ending: str | None = None) -> None:
        """Count the result of a cell; one without goes back to the queue, or fails if it ends every worker. ending:
        what happened to the worker; None: it is well."""
        if self._count_result(cell):
            return
        self.deaths[cell.key] += 1
        if self.deaths[cell.key] < _MAX_DEATHS:
            self.waiting.append(cell)
            return
        ending = ending or "left no result"
        reason = f"its worker {ending}, {_MAX_DEATHS} times; perhaps it needs more memory than there is"
        directory = self.out / "cells" / cell.key
        with disk_full_interrupts(f"writing {directory}"):
            finish_cell(directory, cell, CellResult("failed", reason))
        self._count_result(cell)


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    return f"ended with code {code}"


@dataclass(frozen=True)
class WorkerReply:
    """Outcome of one cell, as its worker reports it. kind: stopped: by a signal; disk full: the study must end. fit:
    this process can take another cell."""

    kind: Literal["done", "stopped", "disk full"]
    text: str = ""
    fit: bool = True


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
        connection.send(WorkerReply("done"))
        try:
            while (cell := connection.recv()) is not None:
                try:
                    reply = WorkerReply("done", fit=run(out, cell, threads))
                except Interrupted as error:
                    reply = WorkerReply("stopped" if is_signal(error) else "disk full", str(error), fit=False)
                _freeze_imports()
                connection.send(reply)
                if not reply.fit:
                    return
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


@functools.cache
def _freeze_imports() -> None:
    """Spare all that the first cell imported every later search for garbage (0.3 s each)."""
    gc.collect()
    gc.freeze()


def is_signal(error: Interrupted) -> bool:
    """Return True if a signal ended a cell, not a full disk (which is the error's cause)."""
    return error.__cause__ is None or isinstance(error.__cause__, KeyboardInterrupt)
