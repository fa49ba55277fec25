"""Interface of executors: places where the cells of a study run, here or on a cluster.

Ray and Slurm do the scheduling; an executor submits cells to it, asks for them, and cancels them. A cell's files are
those of a run on this machine, whichever executor ran it.
"""

from __future__ import annotations

import abc
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from flatshift.experiments.recipe.schema import ExecutorOptions
from flatshift.experiments.results.cells import RESULT, flatshift_version, read_result, source_digest
from flatshift.experiments.studies.cell import Cell, backbone_digests, file_digest, run_cell, settings_digests
from flatshift.experiments.studies.directory import await_orphans
from flatshift.finetune.atomic import remove_leftovers
from flatshift.finetune.errors import Interrupted, UserError
from flatshift.finetune.run_directory import RunDirectory

RunCell = Callable[[Path, Cell, int | None], bool]
"""(study directory, cell, threads) → whether the process is fit for another cell."""
POLL_S = 1.0
"""Longest wait of `Executor.poll`."""


@dataclass(frozen=True)
class CellUpdate:
    """Change of a cell's state.

    state: running; ended: it may have a result; stopped: by a signal, it waits again; lost: its worker died. worker:
    name of the worker that died. ending: what happened to it. tries: attempts that this ended. hint: probable cause.
    """

    cell: Cell | None
    state: Literal["running", "ended", "stopped", "lost"]
    worker: str = ""
    ending: str = "left no result"
    tries: int = 1
    hint: str = "perhaps it needs more memory than there is"


@dataclass(frozen=True)
class Resources:
    """Resources of one cell. memory: bytes; None: what the planner predicts for it, if this machine is calibrated."""

    cpus: int = 1
    gpus: int | None = None
    memory: int | None = None

    @classmethod
    def of(cls, options: ExecutorOptions) -> Self:
        """Return the resources that the flags request."""
        memory = None if options.memory is None else round(options.memory * 2**30)
        return cls(options.cpus or 1, options.gpus, memory)

    def count_gpus(self, cell: Cell) -> int:
        """Return the number of GPUs of a cell: by default 1 if its recipe demands CUDA. Raises UserError for a recipe
        that names one device of a machine."""
        device = cell.resolved.recipe.train.device
        if device.startswith("cuda:"):
            raise UserError(f"train.device {device} names a device of one machine; write cuda, and the cluster assigns")
        return self.gpus if self.gpus is not None else int(device == "cuda")

    def requests(self, cell: Cell) -> dict[str, float]:
        """Return the amounts to request for a cell by Ray's names of them."""
        amounts = {"CPU": self.cpus, "GPU": self.count_gpus(cell), "memory": self.memory_bytes(cell)}
        return {name: amount for name, amount in amounts.items() if amount}

    def memory_bytes(self, cell: Cell) -> int | None:
        """Return the memory to request for a cell; None if nobody can say."""
        if self.memory is not None:
            return self.memory
        return None if self.count_gpus(cell) else predict_memory(cell)


def predict_memory(cell: Cell) -> int | None:
    """Return the most memory that a cell's process takes on a CPU, as `flatshift plan` predicts it; None without a
    calibration of this machine, and for a backbone whose sizes are unknown."""
    from flatshift.finetune.planner.calibration import cached_overhead
    from flatshift.finetune.planner.footprint import recipe_footprint
    from flatshift.finetune.planner.sizes import read_sizes

    recipe, overhead = cell.resolved.recipe, cached_overhead()
    if overhead is None:
        return None
    try:
        sizes = read_sizes(recipe.backbone, recipe.adapter).under(recipe.task)
    except UserError:
        return None
    return round(overhead.interval(recipe_footprint(sizes, recipe, recipe.train, device="cpu").total)[1])


class Executor(contextlib.AbstractContextManager["Executor"]):
    """Place where the cells of one study run. retries: times that a cell is run again whose worker died."""

    retries: int = 1
    out: Path
    run: RunCell
    rerun: Collection[str] = ()

    def __init__(self) -> None:
        self._waiting: deque[Cell] = deque()

    @property
    @abc.abstractmethod
    def workers(self) -> int:
        """Number of cells that run at the same time."""

    def open(self, out: Path, cells: Sequence[Cell], run: RunCell, rerun: Collection[str]) -> None:
        """Prepare to run `cells` of the study in `out`, after the workers of a killed command have ended.

        run: how a cell is run. rerun: keys whose earlier result does not count. Raises UserError for resources that no
        machine has.
        """
        await_orphans(out)
        remove_leftovers(out / "cells")
        self.out, self.run, self.rerun = out, run, rerun

    def submit(self, cell: Cell) -> None:
        """Queue a cell."""
        self._waiting.append(cell)

    @abc.abstractmethod
    def poll(self) -> list[CellUpdate]:
        """Wait at most a second for a cell to change its state; return the changes.

        Raises UserError if a worker cannot run the study's cells at all; Interrupted if a disk is full or workers do
        not start.
        """

    @abc.abstractmethod
    def cancel(self) -> None:
        """End what runs, and forget what waits."""

    def collect(self, cell: Cell) -> dict[str, Any] | None:
        """Return the result of a cell that ended; None if it left none."""
        return read_result(self.out / "cells" / cell.key)

    def announce(self, last: Callable[[], int]) -> None:
        """Give the last step of the study, which a cluster can run without this command."""

    def finish(self, last: Callable[[], int]) -> int:
        """Run the last step once all cells have their results, and return its exit code."""
        return last()

    def close(self) -> None:
        """Leave the cluster."""

    def __exit__(self, *error: object) -> None:
        self.close()

    def discard_result(self, cell: Cell) -> None:
        """Delete the earlier result of a cell that is to run again."""
        if cell.key in self.rerun:
            (self.out / "cells" / cell.key / RESULT).unlink(missing_ok=True)


def run_logged(out: Path, cell: Cell, threads: int | None) -> bool:
    """Run `run_cell` in its directory of the study `out`, with a line in the study's log before and after."""
    log = RunDirectory(out).log
    log(f"start {cell.key} ({cell.label}) in process {os.getpid()}")
    fit = run_cell(out / "cells" / cell.key, cell, threads)
    log(f"end {cell.key}")
    return fit


def is_signal(error: Interrupted) -> bool:
    """Return True if a signal ended a cell, not a full disk (which is the error's cause)."""
    return error.__cause__ is None or isinstance(error.__cause__, KeyboardInterrupt)


def last_line(error: Exception) -> str:
    """Return the last line of a library's error: the reason, after its traceback."""
    return str(error).strip().rpartition("\n")[2]


@dataclass(frozen=True)
class StudyInputs:
    """Code and data that a cell's result depends on; a worker elsewhere must have the same."""

    version: str
    code: str
    digests: dict[str, Any]

    @classmethod
    def of(cls, cell: Cell) -> StudyInputs:
        """Return the inputs of a cell on this machine. Raises UserError for a file that is not here."""
        from flatshift.experiments.recipe import list_input_files

        recipe = cell.resolved.recipe
        digests: dict[str, Any] = {path: file_digest(path) for path in list_input_files(recipe)}
        digests[recipe.backbone] = backbone_digests(recipe.backbone)
        digests |= {name: digest for name, digest in settings_digests(recipe)}
        return cls(flatshift_version(), source_digest(), digests)

    def problem(self, cell: Callable[[], Cell]) -> str | None:
        """Return a sentence on what this process has other than these inputs; None if all is there. cell: loads the
        cell, which only the same code can do."""
        host, version, code = socket.gethostname(), flatshift_version(), source_digest()
        if (version, code) != (self.version, self.code):
            return (
                f"the worker on {host} runs flatshift {version} (code {code}), the command {self.version} (code "
                f"{self.code}); install the same on every node"
            )
        try:
            digests = StudyInputs.of(cell()).digests
        except (UserError, OSError) as error:
            return f"the worker on {host} lacks input files: {error}; put it where every node sees it"
        if other := next((name for name, digest in self.digests.items() if digests.get(name) != digest), None):
            return f"{other} on {host} differs from the command's; put the same files where every node sees them"
        return None
