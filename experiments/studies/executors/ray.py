"""Executor of a Ray cluster: every cell is a task, whose files come back through Ray's object store.

Only the input files have to be where the workers see them; the study's directory stays with the command.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatshift.experiments.run.ray_cluster import count_room, ray_cluster, require_ray
from flatshift.experiments.studies.cell import Cell
from flatshift.experiments.studies.executors import (
    POLL_S,
    CellUpdate,
    Executor,
    Resources,
    RunCell,
    StudyInputs,
    is_signal,
    last_line,
)
from flatshift.finetune.atomic import atomic_directory
from flatshift.finetune.errors import Interrupted, UserError
from flatshift.finetune.lock import temporary_directory
from flatshift.finetune.run_directory import LOG, disk_full_interrupts


@dataclass(frozen=True)
class CellFiles:
    """Files of a cell that a worker ran. problem: sentence on a worker that cannot run this study's cells. stopped: by
    a signal. full: sentence on a full disk. files: path in the cell's directory → content. log: lines of the study's
    log."""

    problem: str | None = None
    stopped: bool = False
    full: str | None = None
    files: dict[str, bytes] | None = None
    log: str = ""


def run_remote_cell(inputs: dict[str, Any], payload: list[Any], threads: int) -> CellFiles:
    """Run one cell in a temporary directory of this worker and return its files.

    inputs: `StudyInputs` of the cell, as plain values. payload: reference to (how a cell is run, the cell) in the
    object store, which is loaded only if this worker has the same code.
    """
    import ray

    if problem := StudyInputs(**inputs).problem(lambda: ray.get(payload[0])[1]):
        return CellFiles(problem=problem)
    run, cell = ray.get(payload[0])
    with temporary_directory("flatshift-cell-") as folder:
        try:
            run(folder, cell, threads)
        except Interrupted as error:
            return CellFiles(stopped=True) if is_signal(error) else CellFiles(full=f"{socket.gethostname()}: {error}")
        directory, log = folder / "cells" / cell.key, folder / LOG
        files = {
            path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
        }
        return CellFiles(files=files, log=log.read_text(encoding="utf-8") if log.is_file() else "")


class RayExecutor(Executor):
    """Tasks of a Ray cluster, which Ray itself places and tries again.

    address: HOST:PORT of the cluster; None: that of RAY_ADDRESS, or the one this machine belongs to. jobs: most cells
    at the same time; None: as many as fit. Raises UserError if there is no cluster.
    """

    def __init__(self, address: str | None, resources: Resources, *, jobs: int | None = None, retries: int = 1) -> None:
        self.retries = retries
        self._resources, self._jobs = resources, jobs
        super().__init__()
        self._tasks: dict[Any, Cell] = {}
        # Ray reads it once; by default it tries a task for ever that its memory monitor has killed.
        os.environ.setdefault("RAY_task_oom_retries", str(self.retries))
        self._is_shared = require_ray().is_initialized()
        self._connection = contextlib.ExitStack()
        self._ray = self._connection.enter_context(ray_cluster(address, threads=resources.cpus))

    def close(self) -> None:
        self._connection.close()

    @property
    def workers(self) -> int:
        room = int(self._ray.cluster_resources().get("CPU", 1) // self._resources.cpus)
        return max(1, min(room, self._jobs or room))

    def open(self, out: Path, cells: Sequence[Cell], run: RunCell, rerun: Collection[str]) -> None:
        super().open(out, cells, run, rerun)
        for needs in dict.fromkeys(tuple(self._resources.requests(cell).items()) for cell in cells):
            count_room(self._ray, dict(needs), "cell")

    def _start(self, cell: Cell) -> None:
        needs = self._resources.requests(cell)
        task = self._ray.remote(run_remote_cell).options(
            name=f"cell {cell.key}",
            num_cpus=needs["CPU"],
            num_gpus=needs.get("GPU", 0),
            memory=needs.get("memory"),
            max_retries=self.retries,
        )
        self.discard_result(cell)
        payload = [self._ray.put((self.run, cell))]
        self._tasks[task.remote(vars(StudyInputs.of(cell)), payload, self._resources.cpus)] = cell

    def poll(self) -> list[CellUpdate]:
        while self._waiting and (self._jobs is None or len(self._tasks) < self._jobs):
            self._start(self._waiting.popleft())
        done, _ = self._ray.wait(list(self._tasks), num_returns=1, timeout=POLL_S)
        return [self._receive(reference, self._tasks.pop(reference)) for reference in done]

    def _receive(self, reference: Any, cell: Cell) -> CellUpdate:
        errors = self._ray.exceptions
        try:
            result: CellFiles = self._ray.get(reference)
        except errors.RayTaskError as error:
            raise UserError(
                f"a Ray worker cannot run a cell: {last_line(error)}; install the same flatshift on every node"
            ) from error
        except errors.RayError as error:
            # Ray has tried it again by itself.
            return CellUpdate(cell, "lost", "Ray", f"died ({type(error).__name__})", tries=self.retries + 1)
        if result.problem is not None:
            raise UserError(result.problem)
        if result.full is not None:
            raise Interrupted(result.full)
        if result.stopped or result.files is None:
            return CellUpdate(cell, "stopped")
        directory = self.out / "cells" / cell.key
        with disk_full_interrupts(f"writing {directory}"):
            shutil.rmtree(directory, ignore_errors=True)
            with atomic_directory(directory) as temporary:
                for name, content in result.files.items():
                    (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                    (temporary / name).write_bytes(content)
            with (self.out / LOG).open("a", encoding="utf-8") as log:
                log.write(result.log)
        return CellUpdate(cell, "ended")

    def cancel(self) -> None:
        self._waiting.clear()
        if self._is_shared:  # else they end with the connection: Ray 2.60 may abort at a cancelled second attempt
            for reference in self._tasks:
                self._ray.cancel(reference, force=True)
        self._tasks.clear()
