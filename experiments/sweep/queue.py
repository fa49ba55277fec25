"""The work queue of a sweep: units of cells go to worker processes, and come back when their worker dies.

A worker that is killed (or runs out of memory) costs its unit one try: a stack is cut in half, a single cell is tried
once more; a cell that ends its worker twice becomes a failed result. The sweep goes on with a new worker.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from experiments.run.console import Console
from experiments.sweep.cell import RESULT, Cell, Outcome, finish_cell, read_result
from experiments.sweep.directory import await_orphans, results_of
from experiments.sweep.placing import Places, memory_of, on_cuda, place
from experiments.sweep.progress import Progress
from experiments.sweep.worker import Answer, RunUnit, Unit, run_unit, serve, was_signal
from finetune.atomic import sweep_leftovers
from finetune.errors import Interrupted
from finetune.run_directory import RunDirectory, disk_full_interrupts

_DEATHS = 2
"""Workers that a cell may end, alone, before it is taken to be the cause."""
_STILLBORN = 3
"""Workers in a row that may end before they are ready, before the sweep gives up."""


def run_cells(
    out: Path,
    cells: Sequence[Cell],
    jobs: int,
    console: Console,
    *,
    label: str = "sweep",
    stack: int | None = 1,
    devices: Sequence[str] = (),
    rerun: Collection[str] = (),
    run: RunUnit = run_unit,
) -> None:
    """Run the cells that have no result yet, in `jobs` processes that share out the cores.

    A single one is this process, unless it computes on a CUDA device: one that failed goes on failing in its process.

    stack: cells trained together on one backbone at most; None: as many as memory allows. devices: given to the workers
    in turn; none: each cell's own choice. rerun: keys of finished cells that run anew. run: how a unit is run.
    Raises Interrupted when stopped or when the disk is full; what was finished stays.
    """
    await_orphans(out)
    sweep_leftovers(out / "cells")
    unique = {cell.key: cell for cell in cells}
    results = {key: found for key, found in results_of(out, cells).items() if key not in rerun}
    todo = [cell for key, cell in unique.items() if key not in results]
    todo.sort(key=lambda cell: cell.seed)  # stable: a sweep that is stopped has whole seeds, which can be paired
    console.say(f"{label}: {len(unique)} cells, {len(results)} done before, {len(todo)} to run")
    if not todo:
        return
    places = Places(jobs, tuple(devices))
    here = jobs == 1 and not on_cuda(places, todo)
    units = units_of(todo, places, stack=stack, say=console.say)
    progress = Progress(list(unique.values()), results, console, label=label, workers=min(jobs, len(units)))
    queue = _Queue(out, deque(units), places, progress, run, rerun)
    try:
        with progress.shown():
            queue.work_here() if here else queue.work()
    except (KeyboardInterrupt, Stopped):
        done = progress.done + progress.failed
        raise Interrupted(
            f"the {label} stopped with {done} of {progress.total} cells finished; the same command goes on from there"
        ) from None


class Stopped(Exception):
    """A signal asked a cell to stop."""


def units_of(
    cells: Sequence[Cell], places: Places, *, stack: int | None, say: Callable[[str], None] = lambda line: None
) -> list[Unit]:
    """Cells in the pieces that workers take; of few cells, stacks so narrow that every worker gets one.

    say: told how many cells cannot share a backbone, and why.
    """
    if stack == 1:
        return [(cell,) for cell in cells]
    from experiments.sweep.stacking import WIDTH, stacks

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
    """Units that wait, and workers at theirs."""

    out: Path
    waiting: deque[Unit]
    places: Places
    progress: Progress
    run: RunUnit
    rerun: Collection[str] = ()
    workers: dict[int, _Worker] = field(default_factory=dict)
    deaths: Counter[str] = field(default_factory=Counter)
    stillborn: int = 0
    said: set[str] = field(default_factory=set)
    """Why stacks fell apart, as far as that was said."""

    def work_here(self) -> None:
        """Run every unit in this process, one after another."""
        while self.waiting:
            unit = self._next(self.places.device(0))
            try:
                self.run(self.out, unit, None)
            except Interrupted as error:
                if was_signal(error):
                    self._ended(unit)
                    raise Stopped from error
                raise
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
        """As many workers as there is work for."""
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
        process.start()
        there.close()  # so that the pipe ends with the worker
        return _Worker(number, process, here)

    def _hear(self, worker: _Worker) -> None:
        try:
            answer: Answer | None = worker.connection.recv()
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
        if self.waiting:
            worker.unit = self._next(self.places.device(worker.number))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died meanwhile: its pipe says so next
                worker.connection.send(worker.unit)

    def _next(self, device: str | None) -> Unit:
        """The next unit, for `device`; what other code left in its place goes."""
        unit = tuple(place(cell, device) for cell in self.waiting.popleft())
        for cell in unit:
            if cell.key in self.rerun:
                (self.out / "cells" / cell.key / RESULT).unlink(missing_ok=True)
        self.progress.began(unit)
        return unit

    def _dismiss(self, worker: _Worker) -> None:
        del self.workers[worker.number]
        worker.process.join(timeout=10)
        worker.process.kill()
        worker.process.join()
        worker.connection.close()

    def _died(self, worker: _Worker, unit: Unit) -> None:
        """A worker is gone: settle what it finished and take back the rest."""
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
        """Remove what a worker that is dead was writing of `unit`; other workers are writing theirs."""
        for cell in unit:
            for leftover in (self.out / "cells").glob(f".{cell.key}.*.tmp"):
                shutil.rmtree(leftover, ignore_errors=True)
            sweep_leftovers(self.out / "cells" / cell.key)

    def _ended(self, unit: Unit) -> Unit:
        """Count the results of a unit that its worker has left; the cells without one."""
        rest = []
        alone: Counter[str] = Counter()
        for cell in unit:
            result = read_result(self.out / "cells" / cell.key)
            if result is None:
                rest.append(cell)
                continue
            self.progress.ended(cell, result)
            if result.get("alone") is not None:
                alone[result["alone"]] += 1
        for reason, count in alone.items():
            if reason not in self.said:  # other stacks of the sweep have the same to say
                self.said.add(reason)
                self._log(f"{count} cells of a stack ran alone: {reason}")
        self.progress.returned(rest)
        return tuple(rest)

    def _settle(self, unit: Unit, how: str | None = None) -> None:
        """Count the results of a unit; cells without one go back to the queue, or fail if they end every worker.

        how: what happened to the worker; None: it is well, and a stack failed as a whole.
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
        outcome = Outcome("failed", reason)
        directory = self.out / "cells" / cell.key
        with disk_full_interrupts(f"writing {directory}"):
            finish_cell(directory, cell, outcome)
        result = read_result(directory)
        assert result is not None
        self.progress.ended(cell, result)

    def _log(self, text: str) -> None:
        RunDirectory(self.out).log(text)
        self.progress.console.say(text)


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    return f"ended with code {code}"
