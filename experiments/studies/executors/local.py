"""Executor of this machine: cells go to worker processes, each on its device, and come back when their worker dies."""

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
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Literal

from flatshift.experiments.results.cells import source_digest
from flatshift.experiments.studies.cell import Cell
from flatshift.experiments.studies.directory import study_lock
from flatshift.experiments.studies.executors import POLL_S, CellUpdate, Executor, RunCell, is_signal
from flatshift.finetune.atomic import remove_leftovers
from flatshift.finetune.errors import Interrupted, UserError
from flatshift.finetune.launch.spawn import THREAD_VARIABLES
from flatshift.finetune.machine import without_cwd_imports

_MAX_FAILED_STARTS = 3
"""Workers in a row that end before they are ready, after which the study gives up."""


def with_device(cell: Cell, device: str | None) -> Cell:
    """Return the cell with its device set to `device`, which is not part of its key."""
    if device is None:
        return cell
    recipe = cell.resolved.recipe
    recipe = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, device=device))
    return dataclasses.replace(cell, resolved=dataclasses.replace(cell.resolved, recipe=recipe))


def uses_cuda(devices: Sequence[str], cells: Sequence[Cell]) -> bool:
    """Return True if any of the cells runs on a CUDA device. devices: assigned to workers; none: each cell's own."""
    from flatshift.finetune.planner.devices import detect_devices

    names = set(devices) or {cell.resolved.recipe.train.device for cell in cells}
    return any(name != "cpu" and detect_devices(name).kind == "cuda" for name in names)


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


@dataclass
class _Worker:
    number: int
    process: SpawnProcess
    connection: Connection
    ready: bool = False
    cell: Cell | None = None


class LocalExecutor(Executor):
    """Worker processes of this machine.

    A single process is this one, unless it uses a CUDA device, which keeps failing in its process after one failure.

    jobs: number of worker processes. devices: assigned in turn; none: each cell's own choice. own_threads: CPU threads
    of one worker; None: its share of the cores.
    """

    def __init__(
        self, jobs: int = 1, devices: Sequence[str] = (), *, own_threads: int | None = None, retries: int = 1
    ) -> None:
        self.jobs, self.devices, self.own_threads, self.retries = jobs, tuple(devices), own_threads, retries
        super().__init__()
        self._workers: dict[int, _Worker] = {}
        self._updates: list[CellUpdate] = []
        self._failed_starts = 0
        self._own_process = False
        self._current: Cell | None = None

    @property
    def workers(self) -> int:
        return self.jobs

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

    def open(self, out: Path, cells: Sequence[Cell], run: RunCell, rerun: Collection[str]) -> None:
        super().open(out, cells, run, rerun)
        self._own_process = self.jobs == 1 and not uses_cuda(self.devices, cells)
        self._failed_starts = 0

    def poll(self) -> list[CellUpdate]:
        if self._own_process:
            return self._poll_here()
        self._start_workers()
        for worker in self._workers.values():
            if worker.ready and worker.cell is None:  # idle, and another's cell may have come back
                self._hand_out(worker)
        ready = wait([worker.connection for worker in self._workers.values()], timeout=POLL_S)
        for worker in [w for w in self._workers.values() if w.connection in ready]:
            self._receive(worker)
        updates, self._updates = self._updates, []
        return updates

    def cancel(self) -> None:
        self._waiting.clear()
        self._current = None
        idle = [worker for worker in self._workers.values() if worker.ready and worker.cell is None]
        for worker in idle:
            with contextlib.suppress(OSError):
                worker.connection.send(None)
        for worker in idle:
            worker.process.join(timeout=10)
        for worker in self._workers.values():
            worker.process.kill()
            worker.process.join()
            worker.connection.close()
            if worker.cell is not None:
                self._clear(worker.cell)
        self._workers.clear()
        self._updates.clear()

    def _poll_here(self) -> list[CellUpdate]:
        """Take the next cell, or run the taken one in this process."""
        if self._current is None:
            if not self._waiting:
                return []
            self._current = self._waiting.popleft()
            self.discard_result(self._current)
            return [CellUpdate(self._current, "running")]
        cell = self._current
        try:
            self.run(self.out, with_device(cell, self.device(0)), self.own_threads)
        except Interrupted as error:
            if is_signal(error):
                raise KeyboardInterrupt from error
            raise
        self._current = None
        _freeze_imports()
        return [CellUpdate(cell, "ended")]

    def _start_workers(self) -> None:
        busy = sum(1 for worker in self._workers.values() if worker.cell is not None)
        for number in range(self.jobs):
            if len(self._workers) >= busy + len(self._waiting):
                return
            if number not in self._workers:
                self._workers[number] = self._start(number)

    def _start(self, number: int) -> _Worker:
        context = get_context("spawn")
        connection, remote = context.Pipe()
        process = context.Process(target=run_worker, args=(os.getpid(), self.threads, self.out, self.run, remote))
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
            del self._workers[worker.number]
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
            worker.ready, self._failed_starts = True, 0
        elif cell is not None:
            self._updates.append(CellUpdate(cell, "stopped" if reply.kind == "stopped" else "ended"))
        if reply.fit:
            self._hand_out(worker)

    def _hand_out(self, worker: _Worker) -> None:
        if not self._waiting:
            return
        worker.cell = self._waiting.popleft()
        self.discard_result(worker.cell)
        self._updates.append(CellUpdate(worker.cell, "running"))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died meanwhile: its pipe says so next
            worker.connection.send(with_device(worker.cell, self.device(worker.number)))

    def _handle_death(self, worker: _Worker, cell: Cell | None) -> None:
        ending = _describe_exit(worker.process.exitcode)
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= _MAX_FAILED_STARTS:
                raise Interrupted(
                    f"{_MAX_FAILED_STARTS} workers in a row {ending} before they had begun; see what stands above"
                )
            return
        if cell is not None:
            self._clear(cell)
        self._updates.append(CellUpdate(cell, "lost", f"process {worker.process.pid}", ending))

    def _clear(self, cell: Cell) -> None:
        """Remove what a dead worker was writing of `cell`; other workers are writing theirs."""
        for leftover in (self.out / "cells").glob(f".{cell.key}.*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        remove_leftovers(self.out / "cells" / cell.key)


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
