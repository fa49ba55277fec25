"""Executor of a Slurm cluster by submitit: cells are the jobs of an array, the tables a last job after them.

The study's directory is on a disk that all nodes see. Slurm signals a job before its time limit, and submitit puts it
back into the queue. A command that was killed leaves its jobs, and the same command waits for them again.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any

from flatshift.experiments.results.cells import SLURM
from flatshift.experiments.studies import executors
from flatshift.experiments.studies.cell import Cell
from flatshift.finetune.atomic import make_directory, read_json_object, write_json
from flatshift.finetune.errors import Interrupted, UserError
from flatshift.finetune.launch.spawn import THREAD_VARIABLES

_JOBS = "jobs.json"
_MOST_JOBS = 1000
"""Of one array: Slurm's default MaxArraySize is 1,001."""
_SIGNAL_S = 90
"""Seconds between the signal and the time limit."""
_LAST = "tables"


@dataclass(frozen=True)
class CellJob:
    """Job of a cell. Slurm runs it again from the start after its time limit. run: how a cell is run."""

    out: Path
    run: executors.RunCell
    threads: int

    def __call__(self, cell: Cell, inputs: executors.StudyInputs) -> str | None:
        """Run the cell in the study's directory; return a sentence if this node cannot run the study's cells."""
        if problem := inputs.problem(lambda: cell):
            return problem
        try:
            self.run(self.out, cell, self.threads)
        except Interrupted as error:
            if executors.is_signal(error):  # not a result: Slurm may be about to run this job again
                sys.exit(3)
            raise
        return None

    def checkpoint(self, *arguments: Any) -> Any:
        """Return the job for the next try, as submitit asks for it."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, *arguments)


def load_submitit(cluster: str) -> Any:
    """Return the package submitit. cluster: its name of the executor (`local` and `debug` need no Slurm). Raises
    UserError if it is not installed, or Slurm is not here."""
    try:
        import submitit
    except ModuleNotFoundError:
        raise UserError("--on slurm needs the package submitit; pip install 'flatshift[slurm]'") from None
    if cluster == "slurm" and submitit.SlurmExecutor.affinity() < 0:
        raise UserError("--on slurm: this machine has no srun; start the command on a login node of the cluster")
    return submitit


def submit_jobs(submit: Callable[[Any], Any], executor: Any, **parameters: Any) -> Any:
    """Return what `submit` does with submitit's `executor`. parameters: of the jobs; None: submitit's default. Raises
    UserError if Slurm refuses the jobs."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    executor.update_parameters(**{name: value for name, value in parameters.items() if value is not None})
    try:
        jobs = submit(executor)
    except (FailedJobError, FailedSubmissionError, OSError) as error:
        raise UserError(f"--on slurm: sbatch refused the jobs: {executors.last_line(error)}") from error
    for file in Path(executor.folder).glob(".submission_file_*.sh"):
        if file.is_symlink():  # an absolute one, by which a copy of the study would lead out of itself
            file.unlink()
    return jobs


class SlurmExecutor(executors.Executor):
    """Jobs of a Slurm cluster.

    partition: where jobs wait; None: Slurm's choice. minutes: time limit of a cell. jobs: most cells at the same time;
    None: as many as Slurm admits. cluster: as in `load_submitit`.
    """

    def __init__(
        self,
        resources: executors.Resources,
        *,
        partition: str | None = None,
        minutes: int = 60,
        jobs: int | None = None,
        retries: int = 1,
        cluster: str = "slurm",
    ) -> None:
        self._submitit = load_submitit(cluster)
        self.retries = retries
        self._resources, self._minutes, self._jobs, self._cluster = resources, minutes, jobs, cluster
        self._partition = partition
        super().__init__()
        self._running: dict[str, tuple[Cell, Any]] = {}
        self._last: Callable[[], int] | None = None
        self._last_job: Any = None

    @property
    def workers(self) -> int:
        return self._jobs or _MOST_JOBS

    def open(self, out: Path, cells: Sequence[Cell], run: executors.RunCell, rerun: Collection[str]) -> None:
        # No `await_orphans`: the jobs of a killed command go on.
        self.out, self.run, self.rerun = out, run, rerun
        make_directory(out / SLURM)
        for cell in cells:
            self._resources.count_gpus(cell)

    def announce(self, last: Callable[[], int]) -> None:
        self._last = last

    def poll(self) -> list[executors.CellUpdate]:
        if self._waiting:
            self._start(list(self._waiting))
            self._waiting.clear()
        else:
            time.sleep(executors.POLL_S)
        list((self.out / "cells").iterdir())  # so that a network file system shows new results
        ended = [key for key, (_, job) in self._running.items() if job.done()]
        return [self._receive(*self._running.pop(key)) for key in ended]

    def _start(self, cells: Sequence[Cell]) -> None:
        """Submit cells as arrays, except those whose jobs an earlier command left in Slurm's queue."""
        make_directory(self.out / "cells")
        earlier = self._earlier_jobs()
        for cell in cells:
            job = earlier.pop(cell.key, None)
            if job is not None and self.collect(cell) is None and is_pending(job):
                self._running[cell.key] = (cell, job)
            elif job is not None:
                job.cancel(check=False)
        new = [cell for cell in cells if cell.key not in self._running]
        for start in range(0, len(new), _MOST_JOBS):
            part = new[start : start + _MOST_JOBS]
            for cell in part:
                self.discard_result(cell)
            job = CellJob(self.out.absolute(), self.run, self._resources.cpus)
            submit = methodcaller("map_array", job, part, [executors.StudyInputs.of(cell) for cell in part])
            jobs = self._submit(submit, **self._parameters(part))
            self._running |= {cell.key: (cell, job) for cell, job in zip(part, jobs, strict=True)}
        self._continue_last(earlier.pop(_LAST, None), replaces=bool(new))
        document = {key: job.job_id for key, (_, job) in self._running.items()}
        if self._last_job is not None:
            document[_LAST] = self._last_job.job_id
        write_json(self.out / SLURM / _JOBS, document)

    def _earlier_jobs(self) -> dict[str, Any]:
        """Return the jobs that a killed command submitted, by their cells."""
        file = self.out / SLURM / _JOBS
        if self._cluster != "slurm" or self._running or not file.is_file():
            return {}
        document = read_json_object(file, fix="delete it")
        return {key: self._submitit.SlurmJob(self.out.absolute() / SLURM, job) for key, job in document.items()}

    def _continue_last(self, earlier: Any, *, replaces: bool) -> None:
        """Submit the study's last step, to begin after all running jobs, unless the `earlier` one of a killed command
        still waits for them. replaces: the earlier one does not know all of them."""
        if self._last is None or self._cluster != "slurm":
            return
        if earlier is not None and not replaces and is_pending(earlier):
            self._last_job = earlier
            return
        if earlier is not None:
            earlier.cancel(check=False)
        last, arrays = self._last, dict.fromkeys(job.job_id.partition("_")[0] for _, job in self._running.values())
        self._last_job = self._submit(
            lambda executor: executor.submit(last),
            name=f"flatshift-{_LAST}",
            timeout_min=self._minutes,
            cpus_per_task=1,
            slurm_dependency=":".join(["afterok", *arrays]),
        )

    def _parameters(self, cells: Sequence[Cell]) -> dict[str, Any]:
        memory = [needed for cell in cells if (needed := self._resources.memory_bytes(cell)) is not None]
        exports = [f"export {name}={self._resources.cpus}" for name in THREAD_VARIABLES]
        return {
            "name": "flatshift-cells",
            "timeout_min": self._minutes,
            "cpus_per_task": self._resources.cpus,
            "slurm_array_parallelism": self._jobs or len(cells),  # submitit's default is 256
            "slurm_signal_delay_s": _SIGNAL_S,
            "slurm_setup": exports,
            "local_setup": exports,
            "gpus_per_node": max(self._resources.count_gpus(cell) for cell in cells) or None,
            "mem_gb": round(max(memory) / 2**30, 3) if memory else None,
        }

    def _submit(self, submit: Callable[[Any], Any], **parameters: Any) -> Any:
        folder = self.out.absolute() / SLURM
        executor = self._submitit.AutoExecutor(folder, cluster=self._cluster, slurm_max_num_timeout=self.retries)
        return submit_jobs(submit, executor, slurm_partition=self._partition, **parameters)

    def _receive(self, cell: Cell, job: Any) -> executors.CellUpdate:
        if self.collect(cell) is not None:
            return executors.CellUpdate(cell, "ended")
        name = f"job {job.job_id}"
        try:
            problem = job.result()
        except self._submitit.core.utils.UncompletedJobError as error:
            self._drop_last()
            text = str(error)
            if "timed-out too many times" in text:
                ending = f"passed the limit of {self._minutes} minutes"
                return executors.CellUpdate(cell, "lost", name, ending, self.retries + 1, "give it a longer --time")
            if "the disk is full" in text:
                raise Interrupted(executors.last_line(error)) from error
            return executors.CellUpdate(cell, "lost", name, f"ended in state {job.state}")
        if problem is not None:
            raise UserError(problem)
        return executors.CellUpdate(cell, "ended")

    def finish(self, last: Callable[[], int]) -> int:
        job, self._last_job = self._last_job, None
        if job is None:
            return last()
        try:
            while not job.done():
                time.sleep(executors.POLL_S)
            return int(job.result())
        except self._submitit.core.utils.UncompletedJobError:
            return last()

    def _drop_last(self) -> None:
        """Leave the last step to this command: a job before it has failed, so its dependency cannot be met."""
        if self._last_job is not None:
            self._last_job.cancel(check=False)
        self._last = self._last_job = None

    def cancel(self) -> None:
        if self._running:
            self._drop_last()
        jobs = {job.job_id: job for _, job in self._running.values()}
        if self._cluster == "slurm":  # an array as a whole
            names = dict.fromkeys(name.partition("_")[0] for name in jobs)
            jobs = {name: self._submitit.SlurmJob(self.out.absolute() / SLURM, name) for name in names}
        for job in jobs.values():
            with contextlib.suppress(OSError):
                job.cancel(check=False)
        self._waiting.clear()
        self._running = {}


def is_pending(job: Any) -> bool:
    """Return True if Slurm still has a job of an earlier command, waiting or running."""
    return job.watcher.get_state(job.job_id, mode="force") != "UNKNOWN" and not job.done()
