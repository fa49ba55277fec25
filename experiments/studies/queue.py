"""Run of a study's cells by an executor: progress, results, and cells that come back when their worker dies.

A cell whose worker is killed (or runs out of memory) is tried again, by default once; one that ends every worker
becomes a failed result. The study continues with a new worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flatshift.experiments.recipe.schema import ExecutorOptions
from flatshift.experiments.run.console import Console
from flatshift.experiments.studies.cell import Cell, CellResult, finish_cell
from flatshift.experiments.studies.directory import read_results
from flatshift.experiments.studies.executors import CellUpdate, Executor, Resources, RunCell, run_logged
from flatshift.experiments.studies.progress import CellProgress
from flatshift.finetune.errors import Interrupted, UserError
from flatshift.finetune.run_directory import RunDirectory, disk_full_interrupts

_MOST_GIB = 1 << 20


def run_cells(
    out: Path,
    cells: Sequence[Cell],
    executor: Executor,
    console: Console,
    *,
    label: str = "sweep",
    rerun: Collection[str] = (),
    run: RunCell = run_logged,
) -> None:
    """Run the cells that have no result yet, wherever `executor` runs them.

    rerun: keys of finished cells to run again. run: how a cell is run. Raises Interrupted when stopped or when the disk
    is full; what was finished stays.
    """
    unique = {cell.key: cell for cell in cells}
    executor.open(out, list(unique.values()), run, rerun)
    results = {key: result for key, result in read_results(out, cells).items() if key not in rerun}
    todo = [cell for key, cell in unique.items() if key not in results]
    todo.sort(key=lambda cell: cell.seed)  # stable: a stopped sweep has complete seeds, which can be paired
    console.say(f"{label}: {len(unique)} cells, {len(results)} done before, {len(todo)} to run")
    if not todo:
        return
    workers = min(executor.workers, len(todo))
    progress = CellProgress(list(unique.values()), results, console, label=label, workers=workers)
    batch = _Batch(out, executor, progress)
    try:
        with progress.displayed():
            batch.run(todo)
    except KeyboardInterrupt:
        raise Interrupted(
            f"the {label} stopped with {progress.finished} of {progress.total} cells finished; the same command "
            "continues from there"
        ) from None


@dataclass
class _Batch:
    """Cells on their way through an executor. reported: kinds of findings in rows, as other cells have the same."""

    out: Path
    executor: Executor
    progress: CellProgress
    unfinished: dict[str, Cell] = field(default_factory=dict)
    running: dict[str, Cell] = field(default_factory=dict)
    deaths: Counter[str] = field(default_factory=Counter)
    reported: set[str] = field(default_factory=set)

    def run(self, cells: Sequence[Cell]) -> None:
        """Submit the cells and wait for their results."""
        self.unfinished = {cell.key: cell for cell in cells}
        try:
            for cell in cells:
                self.executor.submit(cell)
            while self.unfinished:
                for update in self.executor.poll():
                    self._handle(update)
                self.progress.tick()
        except KeyboardInterrupt:
            for cell in list(self.running.values()):
                self._count_result(cell)
            raise
        finally:
            self.executor.cancel()

    def _handle(self, update: CellUpdate) -> None:
        cell = update.cell
        if update.state == "lost":
            text = f"a worker ({update.worker}) {update.ending}" + (f" at cell {cell.key}" if cell else "")
            RunDirectory(self.out).log(text)
            self.progress.console.say(text)
        if cell is None:
            return
        if update.state == "running":
            self.running[cell.key] = cell
            self.progress.began(cell)
        elif not self._count_result(cell):
            if update.state == "stopped":
                self.executor.submit(cell)
            else:
                self._retry(cell, update)

    def _count_result(self, cell: Cell) -> bool:
        """Count the result of a cell that its worker has left; return False if there is none."""
        self.running.pop(cell.key, None)
        result = self.executor.collect(cell)
        if result is None:
            self.progress.returned(cell)
            return False
        self.unfinished.pop(cell.key, None)
        self.progress.ended(cell, result)
        for kind, text in (result.get("checks") or {}).items():
            if kind not in self.reported:
                self.reported.add(kind)
                self.progress.console.say(f"data: {text} (data.checks.{kind})")
        return True

    def _retry(self, cell: Cell, update: CellUpdate) -> None:
        """Submit a cell without a result again; it fails if it has ended every worker that had it."""
        self.deaths[cell.key] += update.tries
        if self.deaths[cell.key] <= self.executor.retries:
            self.executor.submit(cell)
            return
        tries = "once" if self.deaths[cell.key] == 1 else f"{self.deaths[cell.key]} times"
        reason = f"its worker {update.ending}, {tries}; {update.hint}"
        directory = self.out / "cells" / cell.key
        with disk_full_interrupts(f"writing {directory}"):
            finish_cell(directory, cell, CellResult("failed", reason))
        self._count_result(cell)


def parse_executor(options: ExecutorOptions) -> tuple[str, str | None]:
    """Return the kind of executor, and the address of a Ray cluster or the partition of Slurm if one is given. Raises
    UserError for another word, and for a flag that the executor has no use for."""
    kind, colon, address = options.on.partition(":")
    if kind not in ("local", "ray", "slurm") or (colon and (not address or kind == "local")):
        raise UserError(f"--on {options.on}: write local, ray, ray:HOST:PORT, slurm or slurm:PARTITION")
    if address.startswith("//"):
        raise UserError(f"--on {options.on}: start the command on a node of the cluster and write ray:HOST:PORT")
    if options.memory is not None and not 0 < options.memory <= _MOST_GIB:
        raise UserError(f"--memory must be above 0 and at most {_MOST_GIB:,} GiB, got {options.memory}")
    useless = {"local": ("cpus", "gpus", "memory", "time"), "ray": ("time",), "slurm": ()}[kind]
    for name in useless:
        if getattr(options, name) is not None:
            others = "slurm" if name == "time" else "ray or slurm"
            raise UserError(f"--{name} has a meaning with --on {others} only; leave it out")
    return kind, address or None


def open_executor(options: ExecutorOptions, local: Executor, *, jobs: int | None) -> Executor:
    """Return the executor that the options name, connected to its cluster. local: the one of this machine. jobs: most
    cells at the same time elsewhere; None: as many as there is room for. Raises UserError if there is no cluster."""
    kind, address = parse_executor(options)
    if kind == "local":
        local.retries = options.retries
        return local
    resources = Resources.of(options)
    if kind == "ray":
        from flatshift.experiments.studies.executors.ray import RayExecutor

        return RayExecutor(address, resources, jobs=jobs, retries=options.retries)
    from flatshift.experiments.studies.executors.slurm import SlurmExecutor

    return SlurmExecutor(resources, partition=address, minutes=options.time or 60, jobs=jobs, retries=options.retries)
