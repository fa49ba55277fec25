"""Ranks of a training run on a cluster: actors of a Ray placement group, or tasks of a Slurm job by submitit.

A rank is a process of `flatshift train` with the variables of torchrun. If one is lost, all start again from the run's
last checkpoint, and so does the same command after it was killed. The run directory is on a disk that all nodes see.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatshift.experiments.recipe import Resolved, resume_recipe
from flatshift.experiments.recipe.schema import ExecutorOptions
from flatshift.experiments.run.ray_cluster import count_room, ray_cluster
from flatshift.experiments.studies.cell import Cell
from flatshift.experiments.studies.executors import POLL_S, Resources, StudyInputs
from flatshift.experiments.studies.executors import slurm as slurm_jobs
from flatshift.experiments.studies.queue import parse_executor
from flatshift.finetune.atomic import make_directory, read_json_object, write_json
from flatshift.finetune.errors import Interrupted, UserError
from flatshift.finetune.launch.consistency import flatten_settings
from flatshift.finetune.launch.spawn import THREAD_VARIABLES
from flatshift.finetune.planner.rules import RuleSettings, check_settings
from flatshift.finetune.run_directory import METRICS, RECIPE, check_replaceable

_SAVE_S = 300
"""Seconds between Slurm's signal and the time limit, in which a checkpoint is written."""
_UNLIMITED = 1_000_000
_ROOM_S = 30.0
_JOB = "job.json"
_REPORT, _SILENT = "flatshift: ", "and last printed"


@dataclass(frozen=True)
class RankJob:
    """Ranks to start. command: words of each after `flatshift`. out: run directory. directory: that of the command.
    nodes: number of nodes that share the ranks evenly; None: as it fits. mark: file that each node must see."""

    command: tuple[str, ...]
    out: Path
    directory: Path
    cell: Cell
    resources: Resources
    nodes: int | None = None
    mark: Path | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.cell.resolved.recipe.mesh.size

    def node_problem(self) -> str | None:
        """Return a sentence on a directory that this node does not see; None if all are there."""
        for path in (self.directory, self.mark):
            if path is not None and not path.exists():
                return (
                    f"{path.parent if path == self.mark else path} is not on {socket.gethostname()}, or not that of "
                    "the command; start it from, and name as --out, a directory on a disk that all nodes see"
                )
        return None

    def start(self, variables: Mapping[str, str], **options: Any) -> subprocess.Popen[bytes]:
        """Start one rank in a process. variables: of its rank. options: those of Popen."""
        # Listed, so that a network file system shows a run that began on another node.
        has_begun = self.out in list(self.out.parent.iterdir()) and (self.out / RECIPE).is_file()
        threads = self.cell.resolved.recipe.train.threads or self.resources.cpus
        environment = {
            **os.environ,
            **dict.fromkeys(THREAD_VARIABLES, str(threads)),
            **variables,
            "TORCHELASTIC_RESTART_COUNT": str(int(has_begun)),  # by which a rank resumes
            "FLATSHIFT_LAUNCHER": str(os.getpid()),
        }
        # Slurm's signal is for submitit, which asks rank 0 to stop; ranks would end by it.
        before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        try:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "flatshift", *self.command],
                cwd=self.directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                **options,
            )
        finally:
            signal.signal(signal.SIGUSR2, before)


@dataclass(frozen=True)
class RankEnd:
    """End of a rank. code: its exit code; 3 if it or its worker was killed. reason: a clause after its name."""

    code: int
    reason: str = ""

    @classmethod
    def of(cls, code: int, output: str) -> RankEnd:
        """Return the end of a process from its code and what it printed last."""
        if code < 0:
            return cls(3, f"was killed by {signal.Signals(-code).name}")
        lines = output.strip().splitlines()
        report = next((line for line in lines[::-1] if line.startswith(_REPORT)), None)
        return cls(code, report or f"ended with code {code}, {_SILENT} {lines[-1] if lines else 'nothing'}")

    @property
    def weight(self) -> tuple[bool, bool, bool]:
        """Sorting key, the least for the cause of all ends: one rank reports it, the others end silently."""
        return self.code == 3, _SILENT in self.reason, self.reason.startswith(_REPORT)


def train_on_cluster(
    resolved: Resolved, out: Path, command: Sequence[str], options: ExecutorOptions, nodes: int | None
) -> int:
    """Run `flatshift COMMAND` as the ranks of the recipe's mesh on the cluster of `--on`; return the exit code.

    out: run directory; a run in it continues. Raises UserError for no cluster, and for a mesh or resources that it
    cannot hold; Interrupted once a rank was lost for the last time.
    """
    kind, place = parse_executor(options)
    recipe = resolved.recipe
    if recipe.mesh.auto:
        raise UserError(
            "mesh.auto chooses for this machine; with --on write the axes, as `flatshift plan` proposes them"
        )
    check_settings(RuleSettings.of(recipe))
    if nodes is not None and recipe.mesh.size % nodes:
        raise UserError(f"--nodes {nodes}: they cannot share the {recipe.mesh.size} ranks of the mesh evenly")
    memory = None if options.memory is None else round(options.memory * 2**30)
    resources = Resources(options.cpus or 1, options.gpus, memory)
    cell = Cell("", {}, recipe.train.seed, resolved)
    job = RankJob(tuple(command), out.absolute(), Path.cwd(), cell, resources, nodes)
    make_directory(job.out.parent)
    if kind == "slurm":
        jobs = SlurmRanks(job, minutes=options.time or 60, partition=place)
        return _restart_lost(jobs.run, options.retries)
    with ray_cluster(place) as ray, tempfile.NamedTemporaryFile(dir=job.out.parent, prefix=f".{out.name}-") as mark:
        job = dataclasses.replace(job, mark=Path(mark.name))
        return _restart_lost(lambda: _run_on_ray(ray, job), options.retries)


def check_same_run(out: Path, resolved: Resolved) -> None:
    """Raise UserError if `out` holds anything but a run of this recipe; its mesh may be another."""
    if not (out / RECIPE).is_file():
        check_replaceable(out, resumable=True)
        return
    before, now = (
        flatten_settings(dataclasses.asdict(recipe)) for recipe in (resume_recipe(out).recipe, resolved.recipe)
    )
    decided = {"extends", "task.pack", "task.template"}  # at the start of the run
    if resolved.recipe.train.epochs is not None:
        decided |= {"train.steps", "train.epochs"}
    for key, value in now.items():
        is_free = key in decided or key.startswith("mesh.") or value == "auto"
        if not is_free and before.get(key) != value:
            raise UserError(
                f"--out {out} holds a run with {key} {before.get(key)}, and this command says {value}; name another "
                f"directory, or continue that run with --resume {shlex.quote(str(out))}"
            )


def _restart_lost(run: Callable[[], list[RankEnd]], retries: int) -> int:
    """Run all ranks, again if one is lost, and return the exit code. Raises Interrupted after the last time."""
    for left in range(retries, -1, -1):
        try:
            ends = run()
        except UserError as error:
            if left == retries:
                raise
            raise Interrupted(
                f"{error}; the last checkpoint is kept, and the same command goes on from there"
            ) from error
        if not any(end.code for end in ends):
            return 0
        rank, end = min(((r, end) for r, end in enumerate(ends) if end.code), key=lambda pair: pair[1].weight)
        is_report = end.reason.startswith(_REPORT)
        if end.code != 3:
            if rank or not is_report:  # rank 0 has printed to the terminal itself
                print(end.reason if is_report else f"{_REPORT}rank {rank} {end.reason}", file=sys.stderr, flush=True)
            return end.code
        reason = end.reason.removeprefix(f"{_REPORT}interrupted: ") if is_report else f"rank {rank} {end.reason}"
        if left:
            message = f"{reason}; all ranks start again from the last checkpoint ({left} more times at most)"
            print(f"{_REPORT}{message}", file=sys.stderr, flush=True)
    raise Interrupted(f"{reason}; the last checkpoint is kept, and the same command goes on from there")


class RankProcess:
    """Actor that runs one rank in a process of its own."""

    def __init__(self, payload: Sequence[Any]) -> None:
        # A reference in the object store, which is loaded only if this worker has the same code.
        self._payload = payload
        self._process: subprocess.Popen[bytes] | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._port = socket.socket(socket.AF_INET, socket.SOCK_STREAM)

    def _load(self) -> RankJob:
        import ray

        job: RankJob = ray.get(self._payload[0])
        return job

    def problem(self, inputs: dict[str, Any]) -> str | None:
        """Return a sentence on what this worker lacks. inputs: `StudyInputs`, as plain values."""
        return StudyInputs(**inputs).problem(lambda: self._load().cell) or self._load().node_problem()

    def place(self) -> tuple[str, str, int]:
        """Return the node's id and address, and a free port, which rank 0 inherits, so that nobody takes it."""
        import ray

        self._port.bind(("", 0))
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), self._port.getsockname()[1]

    def start(self, variables: dict[str, str]) -> None:
        """Start the rank."""
        descriptor = self._port.fileno()
        if variables["RANK"] == "0":
            variables = {**variables, "FLATSHIFT_STORE_FD": str(descriptor)}
        self._process = self._load().start(
            variables, stdout=subprocess.DEVNULL, stderr=self._output, pass_fds=(descriptor,)
        )
        self._port.close()

    def stop(self) -> None:
        """Ask the rank to stop with a checkpoint."""
        if self._process is not None:
            self._process.terminate()

    def poll(self, offset: int) -> tuple[int | None, bytes]:
        """Return the rank's exit code, None while it runs, and what it printed from `offset` on."""
        assert self._process is not None
        code = self._process.poll()
        return code, os.pread(self._output.fileno(), 1 << 20, offset)


def _run_on_ray(ray: Any, job: RankJob) -> list[RankEnd]:
    """Run all ranks once, as actors of a placement group."""
    from ray.util import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    needs = job.resources.requests(job.cell)
    share = 1 if job.nodes is None else job.size // job.nodes
    bundles = [{name: amount * share for name, amount in needs.items()}] * (job.size // share)
    _check_room(count_room(ray, needs, "rank"), job, share)
    group = placement_group(bundles, strategy="PACK" if job.nodes is None else "STRICT_SPREAD")
    try:
        while not group.wait(_ROOM_S):
            _check_room(count_room(ray, needs, "rank"), job, share)
            print("flatshift: waiting for room on the Ray cluster", file=sys.stderr, flush=True)
        payload = [ray.put(job)]
        actors = [
            ray.remote(RankProcess)
            .options(
                num_cpus=needs["CPU"],
                num_gpus=needs.get("GPU", 0),
                memory=needs.get("memory"),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank // share),
            )
            .remote(payload)
            for rank in range(job.size)
        ]
        return _run_actors(ray, job, actors)
    finally:
        remove_placement_group(group)  # ends its actors, and they their ranks


def _check_room(room: Sequence[int], job: RankJob, share: int) -> None:
    """Raise UserError if the cluster can never hold the ranks, `share` of them together. room: ranks of each node."""
    groups = sum(count // share if job.nodes is None else count >= share for count in room)
    if groups * share < job.size:
        nodes = "" if job.nodes is None else f" on {job.nodes} nodes of {share} each"
        raise UserError(
            f"the mesh has {job.size} ranks{nodes}, and the Ray cluster room for {groups * share}; take a smaller "
            "mesh, fewer resources for each rank, or add a node"
        )


def _run_actors(ray: Any, job: RankJob, actors: Sequence[Any]) -> list[RankEnd]:
    errors, inputs = ray.exceptions, vars(StudyInputs.of(job.cell))
    try:
        places = ray.get([actor.place.remote() for actor in actors])
        first_on_node = {node: actor for (node, *_), actor in zip(places, actors, strict=True)}
        problems = ray.get([actor.problem.remote(inputs) for actor in first_on_node.values()])
    except errors.RayError as error:
        if not isinstance(error, errors.RayTaskError) and "creation task" not in str(error):
            return [RankEnd(3, f"lost its worker ({type(error).__name__})")]
        reason = str(error).strip().rpartition("\n")[2]
        raise UserError(
            f"a Ray worker cannot run a rank: {reason}; install the same flatshift on every node"
        ) from error
    if problem := next(filter(None, problems), None):
        raise UserError(problem)
    # The ranks of a node follow each other, so that the last axes of the mesh stay inside it.
    pairs = sorted(zip(places, actors, strict=True), key=lambda pair: pair[0])
    _, address, port = pairs[0][0]
    common = {"WORLD_SIZE": str(job.size), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    for rank, (_, actor) in enumerate(pairs):
        actor.start.remote({**common, "RANK": str(rank), "LOCAL_RANK": "0"})  # it sees no device but its own
    return _await_ends(ray, [actor for _, actor in pairs])


def _await_ends(ray: Any, actors: Sequence[Any]) -> list[RankEnd]:
    """Wait for all ranks, which end by themselves when one is lost, and print what rank 0 prints.

    Raises KeyboardInterrupt after a request to stop, once all have stopped with a checkpoint; at a second one at once.
    """
    ends: dict[int, RankEnd] = {}
    output, printed, request = [b""] * len(actors), 0, None
    while len(ends) < len(actors):
        try:
            for rank in set(range(len(actors))) - set(ends):
                try:
                    code, text = ray.get(actors[rank].poll.remote(len(output[rank])))
                except ray.exceptions.RayError as error:
                    ends[rank] = RankEnd(3, f"lost its worker ({type(error).__name__})")
                    continue
                output[rank] += text
                if code is not None:
                    ends[rank] = RankEnd.of(code, output[rank].decode(errors="replace"))
            printed += _print_lines(output[0][printed:], whole=0 in ends)
            time.sleep(POLL_S / 4)
        except KeyboardInterrupt as error:
            if request is not None:
                raise
            request = error
            for actor in actors:
                actor.stop.remote()
    if request is not None:
        raise request
    return [ends[rank] for rank in range(len(actors))]


def _print_lines(output: bytes, *, whole: bool) -> int:
    """Print the full lines of `output`, or the `whole` of it; return the number of bytes printed."""
    end = len(output) if whole else output.rfind(b"\n") + 1
    sys.stderr.write(output[:end].decode(errors="replace"))
    sys.stderr.flush()
    return end


@dataclass
class SlurmRank:
    """Task of a Slurm job that runs one rank. Before the job's time limit it stops with a checkpoint, from which Slurm
    starts it again."""

    job: RankJob
    process: subprocess.Popen[bytes] | None = None
    progress: int = 0

    def __call__(self, inputs: StudyInputs) -> int | str:
        """Run the rank, and return its exit code, or a sentence if this node cannot run it."""
        from submitit import JobEnvironment
        from submitit.helpers import TorchDistributedEnvironment

        JobEnvironment().paths.result_pickle.unlink(missing_ok=True)  # of an earlier start of this job
        if problem := inputs.problem(lambda: self.job.cell) or self.job.node_problem():
            return problem
        TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        self.progress = self._measure_progress()
        self.process = self.job.start({})
        while (code := self.process.poll()) is None:
            time.sleep(POLL_S / 4)
        if code == 3:  # not a result: Slurm may be about to run this job again
            sys.exit(3)
        return code

    def checkpoint(self, inputs: StudyInputs) -> Any:
        """Stop all ranks by this one; return the job for the next start, None if this one has made no step."""
        from submitit.helpers import DelayedSubmission

        if self.process is not None:
            self.process.send_signal(signal.SIGUSR1)
            with contextlib.suppress(ChildProcessError):  # `__call__`, which this interrupts, may have waited already
                os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        if self._measure_progress() == self.progress:
            return None
        return DelayedSubmission(SlurmRank(self.job), inputs)

    def _measure_progress(self) -> int:
        """Return what grows with every step."""
        file = self.job.out / METRICS
        return file.stat().st_size if file.is_file() else 0


class SlurmRanks:
    """Jobs of a Slurm cluster whose tasks are the ranks, one job after another. cluster: submitit's name of the
    executor. Scripts and logs are in a folder beside the run directory."""

    def __init__(self, job: RankJob, *, minutes: int, partition: str | None = None, cluster: str = "slurm") -> None:
        self._submitit = slurm_jobs.load_submitit(cluster)
        self._job, self._minutes, self._partition, self._cluster = job, minutes, partition, cluster
        self._folder = job.out.with_name(f"{job.out.name}.slurm")
        self._settings = [*job.command, *map(str, (job.nodes, job.resources, minutes, partition))]

    def run(self) -> list[RankEnd]:
        """Run all ranks once, or wait for the job that a killed command has left."""
        make_directory(self._folder)
        job = self._earlier_job() or self._submit()
        write_json(self._folder / _JOB, {"job": job.job_id, "settings": self._settings})
        tasks = [job.task(rank) for rank in range(self._job.size)]
        log, printed, done = tasks[0].paths.stderr, 0, False
        try:
            while not done:
                time.sleep(POLL_S)
                done = job.done()
                output = log.read_bytes()[printed:] if log.is_file() else b""
                printed += _print_lines(output, whole=done)
                ends = [self._read_end(task) for task in tasks if done or task.paths.result_pickle.exists()]
        except (KeyboardInterrupt, UserError):
            job.cancel(check=False)
            raise
        return ends

    def _earlier_job(self) -> Any:
        file = self._folder / _JOB
        if self._cluster != "slurm" or not file.is_file():
            return None
        record = read_json_object(file, fix="delete it")
        job = self._submitit.SlurmJob(self._folder, record["job"], tasks=list(range(self._job.size)))
        if not slurm_jobs.is_pending(job):
            return None
        if record["settings"] != self._settings:
            raise UserError(
                f"--on slurm: job {job.job_id} of another command is at work on {self._job.out}; wait for it, or "
                f"`scancel {job.job_id}`"
            )
        return job

    def _submit(self) -> Any:
        job, resources = self._job, self._job.resources
        share = job.size // (job.nodes or 1)
        exports = [f"export {name}={resources.cpus}" for name in THREAD_VARIABLES]
        parameters: dict[str, Any] = {
            "name": "flatshift-train",
            "timeout_min": self._minutes,
            "nodes": job.nodes or 1,
            "tasks_per_node": share,
            "cpus_per_task": resources.cpus,
            "slurm_signal_delay_s": min(_SAVE_S, 15 * self._minutes),
            "slurm_setup": exports,
            "slurm_srun_args": ["--kill-on-bad-exit=0"],  # rank 0 must live to put the job back into the queue
        }
        if gpus := resources.count_gpus(job.cell):
            parameters["gpus_per_node"] = gpus * share
        if (memory := resources.memory_bytes(job.cell)) is not None:
            parameters["mem_gb"] = round(memory * share / 2**30, 3)
        if self._partition is not None:
            parameters["slurm_partition"] = self._partition
        inputs = StudyInputs.of(job.cell)
        return slurm_jobs.submit_jobs(
            lambda executor: executor.submit(SlurmRank(job), inputs),
            self._submitit.AutoExecutor(self._folder, cluster=self._cluster, slurm_max_num_timeout=_UNLIMITED),
            **parameters,
        )

    def _read_end(self, task: Any) -> RankEnd:
        """Return the end of a rank, code 3 if it left no result. Raises UserError if its node cannot run it."""
        result, log = 3, task.paths.stderr
        if task.paths.result_pickle.exists():
            try:
                result = task.result()
            except self._submitit.core.utils.FailedJobError as error:
                if "checkpoint function returned None" in str(error):
                    return RankEnd(3, f"made no step in {self._minutes} minutes (give it a longer --time)")
                reason = str(error).partition("\n----------------------\nYou can check")[0].strip().rpartition("\n")[2]
                raise UserError(f"--on slurm: a node cannot run a rank: {reason}; its log is {log}") from error
        if isinstance(result, str):
            raise UserError(result)
        return RankEnd.of(result, log.read_text(encoding="utf-8", errors="replace") if log.is_file() else "")
