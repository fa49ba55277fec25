"""Ranks of a training run on a cluster: processes of Ray Train's workers, or tasks of a Slurm job by submitit.

A rank is a process of `flatshift train` with the variables of torchrun. If one is lost, all start again from the run's
last checkpoint, and so does the same command after it was killed. The run directory is on a disk that all nodes see.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatshift.experiments.recipe import Resolved, resume_recipe
from flatshift.experiments.recipe.schema import ExecutorOptions
from flatshift.experiments.run.console import Console
from flatshift.experiments.run.ray_cluster import count_room, ray_cluster
from flatshift.experiments.studies.cell import Cell
from flatshift.experiments.studies.executors import POLL_S, Resources, StudyInputs, last_line
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
_GOES_ON = "the last checkpoint is kept, and the same command goes on from there"


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
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "flatshift", *self.command],
            cwd=self.directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            **options,
        )


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
    cell = Cell("", {}, recipe.train.seed, resolved)
    job = RankJob(tuple(command), out.absolute(), Path.cwd(), cell, Resources.of(options), nodes)
    make_directory(job.out.parent)
    if (out / RECIPE).is_file():
        Console().say(f"{out} holds a run, which continues from its last checkpoint")
    if kind == "slurm":
        return _restart_lost(SlurmRanks(job, minutes=options.time or 60, partition=place).run, options.retries)
    with ray_cluster(place) as ray, tempfile.TemporaryDirectory(dir=job.out.parent, prefix=f".{out.name}-") as mark:
        job = dataclasses.replace(job, mark=Path(mark))
        return _restart_lost(lambda: _run_on_ray(ray, job, options.retries), 0)


def check_same_run(out: Path, resolved: Resolved) -> None:
    """Raise UserError if `out` holds anything but a run of this recipe; its mesh may be another."""
    if not (out / RECIPE).is_file():
        check_replaceable(out, resumable=True)
        return
    run = resume_recipe(out)
    before, now = (flatten_settings(dataclasses.asdict(recipe)) for recipe in (run.recipe, resolved.recipe))
    decided = {"extends", "task.pack", "task.template"}  # at the start of the run
    if (epochs := resolved.recipe.train.epochs) is not None:
        decided.add("train.steps")
        counted = re.match(r"train\.epochs (\S+) of ", run.origins.get("train.steps", ""))
        before["train.epochs"], now["train.epochs"] = counted and counted[1], f"{epochs:g}"
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
            raise Interrupted(f"{error}; {_GOES_ON}") from error
        if not any(end.code for end in ends):
            return 0
        rank, end, reason = _find_cause(dict(enumerate(ends)))
        if end.code != 3:
            is_report = end.reason.startswith(_REPORT)
            if rank or not is_report:  # rank 0 has printed to the terminal itself
                print(end.reason if is_report else f"{_REPORT}{reason}", file=sys.stderr, flush=True)
            return end.code
        _announce_restart(reason, left)
    raise Interrupted(f"{reason}; {_GOES_ON}")


def _find_cause(ends: Mapping[int, RankEnd]) -> tuple[int, RankEnd, str]:
    """Return the rank whose failure is the cause of all `ends`, its end, and a clause on it."""
    rank, end = min(((rank, end) for rank, end in ends.items() if end.code), key=lambda pair: pair[1].weight)
    is_report = end.reason.startswith(_REPORT)
    return rank, end, end.reason.removeprefix(f"{_REPORT}interrupted: ") if is_report else f"rank {rank} {end.reason}"


def _announce_restart(reason: str, left: int) -> None:
    """Print that all ranks start again, unless no time is left."""
    if left:
        message = f"{reason}; all ranks start again from the last checkpoint ({left} more times at most)"
        print(f"{_REPORT}{message}", file=sys.stderr, flush=True)


@dataclass
class RayState:
    """State of the ranks on Ray. ends: by rank, since all were started last. output: what rank 0 printed. losses: ends
    of the starts that lost a rank. problem: a sentence on what a worker lacks."""

    is_running: bool = False
    must_stop: bool = False
    ends: dict[int, RankEnd] = field(default_factory=dict)
    output: bytes = b""
    losses: list[dict[int, RankEnd]] = field(default_factory=list)
    problem: str | None = None


class RayBoard:
    """Actor by which the command, Ray Train's controller and its workers share the state of the ranks."""

    def __init__(self) -> None:
        self._state = RayState()

    def change(self, **values: Any) -> None:
        """Set fields of the state."""
        self._state = dataclasses.replace(self._state, **values)

    def report(self, ends: Mapping[int, RankEnd], output: bytes) -> RayState:
        """Add ends of ranks and output of rank 0, and return the state without its output."""
        self._state.ends |= ends
        self._state.output += output
        return self.read(len(self._state.output))

    def lose(self, lost: Mapping[int, RankEnd]) -> None:
        """End a start of all ranks. lost: ends of those whose worker was lost."""
        self._state.ends |= lost
        if self._state.is_running:
            self._state.is_running = False
            self._state.losses.append(dict(self._state.ends))

    def read(self, offset: int) -> RayState:
        """Return the state with the output from `offset` on."""
        return dataclasses.replace(self._state, output=self._state.output[offset:])


def run_ray_worker(config: Mapping[str, Any]) -> None:
    """Run the ranks of one of Ray Train's workers until the ranks of all have ended, or a worker cannot run any.

    config: `board`, a `RayBoard`; `job`, a list with a reference to the job, which only the same code can load;
    `inputs`, plain values of `StudyInputs`; `share`, number of ranks of a worker. Raises Interrupted if a rank was
    lost, so that Ray Train starts all again.
    """
    import ray
    from ray.train import get_context
    from ray.train.collective import barrier, broadcast_from_rank_zero

    board, share = config["board"], config["share"]
    first = get_context().get_world_rank() * share
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as port:
        place: dict[str, str] = {}
        if first == 0:  # rank 0 inherits its free port, so that nobody takes it
            port.bind(("", 0))
            place = {"MASTER_ADDR": ray.util.get_node_ip_address(), "MASTER_PORT": str(port.getsockname()[1])}
            ray.get(board.change.remote(is_running=True, ends={}))
        place = broadcast_from_rank_zero(place)
        problem = StudyInputs(**config["inputs"]).problem(lambda: ray.get(config["job"][0]).cell)
        if problem := problem or ray.get(config["job"][0]).node_problem():
            ray.get(board.change.remote(problem=problem))
        barrier()
        if ray.get(board.read.remote(0)).problem is not None:
            return
        job: RankJob = ray.get(config["job"][0])
        processes, outputs = [], []
        for local in range(share):
            variables = {**place, "RANK": str(first + local), "LOCAL_RANK": str(local), "WORLD_SIZE": str(job.size)}
            if first + local == 0:
                variables["FLATSHIFT_STORE_FD"] = str(port.fileno())
            outputs.append(output := tempfile.TemporaryFile())  # noqa: SIM115
            options: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": output, "pass_fds": (port.fileno(),)}
            processes.append(job.start(variables, **options))
    try:
        state = _await_ray_ranks(ray, board, job.size, dict(enumerate(zip(processes, outputs, strict=True), first)))
    finally:
        for process in processes:
            process.kill()
    if any(end.code for end in state.ends.values()) and not state.must_stop:
        _, end, reason = _find_cause(state.ends)
        if end.code == 3:
            raise Interrupted(reason)


def _await_ray_ranks(
    ray: Any, board: Any, size: int, ranks: Mapping[int, tuple[subprocess.Popen[bytes], Any]]
) -> RayState:
    """Report the ends of this worker's `ranks`, rank → process and output, until all `size` ranks have ended."""
    printed, state, has_asked = 0, RayState(), False
    while len(state.ends) < size:
        time.sleep(POLL_S / 4)
        ends, text = {}, b""
        for rank, (process, output) in ranks.items():
            if rank in state.ends:
                continue
            code, length = process.poll(), os.fstat(output.fileno()).st_size
            # Not `read`: the rank writes at the position of the same open file.
            if rank == 0:
                text = os.pread(output.fileno(), length - printed, printed)
                printed += len(text)
            if code is not None:
                ends[rank] = RankEnd.of(code, os.pread(output.fileno(), length, 0).decode(errors="replace"))
        state = ray.get(board.report.remote(ends, text))
        if state.must_stop and not has_asked:
            has_asked = True
            for process, _ in ranks.values():
                process.terminate()
    return state


def _make_trainer(ray: Any, job: RankJob, board: Any, share: int, retries: int) -> Any:
    """Return a trainer of Ray Train whose workers run `share` ranks each."""
    from ray.train.v2.api.callback import UserCallback
    from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    class LossCallback(UserCallback):
        """Report of lost workers to the board."""

        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            failures = {
                worker * share: type(getattr(error, "health_check_failure", error)).__name__
                for worker, error in worker_exceptions.items()
                if not isinstance(error, Interrupted)
            }
            lost = {rank: RankEnd(3, f"lost its worker ({name})") for rank, name in failures.items()}
            ray.get(board.lose.remote(lost))

    needs = job.resources.requests(job.cell)
    config: Any = RunConfig(
        name="train",
        storage_path=str(job.mark),
        failure_config=FailureConfig(max_failures=retries, max_preemption_failures=retries),
        callbacks=[LossCallback()],
    )
    return DataParallelTrainer(
        run_ray_worker,
        train_loop_config={
            "board": board,
            "job": [ray.put(job)],
            "inputs": vars(StudyInputs.of(job.cell)),
            "share": share,
        },
        scaling_config=ScalingConfig(
            num_workers=job.size // share,
            use_gpu="GPU" in needs,
            resources_per_worker={name: amount * share for name, amount in needs.items()},
            placement_strategy="PACK" if job.nodes is None else "STRICT_SPREAD",
        ),
        run_config=config,
    )


def _run_on_ray(ray: Any, job: RankJob, retries: int) -> list[RankEnd]:
    """Run all ranks by Ray Train, which starts them again at most `retries` times; return their last ends.

    Raises KeyboardInterrupt after a request to stop, once all have stopped with a checkpoint; at a second one at once.
    """
    try:
        from ray.train.v2.api.exceptions import ControllerError
    except ImportError as error:
        raise UserError(f"--on ray: Ray Train lacks a package ({error}); pip install 'flatshift[ray]'") from error
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    share = 1 if job.nodes is None else job.size // job.nodes
    _check_room(ray, job, share)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    board = ray.remote(RayBoard).options(num_cpus=0, scheduling_strategy=here).remote()
    fit: Future[Any] = Future()
    try:
        ray.get(board.read.remote(0))
        trainer = _make_trainer(ray, job, board, share, retries)
        # Ray Train handles Ctrl-C in a main thread only, and would end the ranks without a checkpoint.
        threading.Thread(target=_fit, args=(trainer, fit), daemon=True).start()
        state = _follow_ray_ranks(ray, board, fit, lambda: _check_room(ray, job, share), retries)
        if state.problem is not None:
            raise UserError(state.problem)
        failure = fit.exception()
        if isinstance(failure, (ControllerError, ray.exceptions.RayError)):
            raise failure
    except (ControllerError, ray.exceptions.RayError) as error:
        problem = f"a Ray worker cannot run a rank: {last_line(error)}; install the same flatshift on every node"
        raise UserError(problem) from error
    ends = [state.ends[rank] if failure is None else state.ends.get(rank, RankEnd(0)) for rank in range(job.size)]
    if failure is not None and not any(end.code for end in ends):
        ends[0] = RankEnd(3, f"lost its worker ({type(failure).__name__})")
    return ends


def _fit(trainer: Any, fit: Future[Any]) -> None:
    try:
        fit.set_result(trainer.fit())
    except BaseException as error:
        fit.set_exception(error)


def _follow_ray_ranks(ray: Any, board: Any, fit: Future[Any], check_room: Callable[[], None], retries: int) -> RayState:
    """Print what rank 0 prints and the losses of ranks until Ray Train has finished; return the last state."""
    printed, losses, request, state, is_done = 0, 0, None, RayState(), False
    patience = time.monotonic() + _ROOM_S
    while not is_done:
        try:
            is_done = fit.done()
            state = ray.get(board.read.remote(printed))
            printed += _print_lines(state.output, whole=is_done)
            for ends in state.losses[losses:]:
                _announce_restart(_find_cause(ends)[2], max(0, retries - losses))
                losses += 1
            if not state.is_running and not is_done:
                if request is not None:
                    raise request
                check_room()
            if state.is_running:
                patience = time.monotonic() + _ROOM_S
            elif time.monotonic() > patience:
                patience += _ROOM_S
                print("flatshift: waiting for Ray Train to start all workers", file=sys.stderr, flush=True)
            time.sleep(POLL_S / 4)
        except KeyboardInterrupt as error:
            if request is not None:
                raise
            request = error
            board.change.remote(must_stop=True)
        except UserError as error:
            if not state.losses:
                raise
            raise Interrupted(f"{error}; {_GOES_ON}") from error
    if request is not None:
        raise request
    return state


def _check_room(ray: Any, job: RankJob, share: int) -> None:
    """Raise UserError if the cluster can never hold the ranks, `share` of them together."""
    room = count_room(ray, job.resources.requests(job.cell), "rank")
    groups = sum(count // share if job.nodes is None else count >= share for count in room)
    if groups * share < job.size:
        nodes = "" if job.nodes is None else f" on {job.nodes} nodes of {share} each"
        raise UserError(
            f"the mesh has {job.size} ranks{nodes}, and the Ray cluster has room for {groups * share} of them; take a "
            "smaller mesh, fewer resources for each rank, or add a node"
        )


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
        # Slurm's signal is for submitit, which asks rank 0 to stop; ranks would end by it.
        before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        try:
            self.process = self.job.start({})
        finally:
            signal.signal(signal.SIGUSR2, before)
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
        memory = resources.memory_bytes(job.cell)
        inputs = StudyInputs.of(job.cell)
        return slurm_jobs.submit_jobs(
            lambda executor: executor.submit(SlurmRank(job), inputs),
            self._submitit.AutoExecutor(self._folder, cluster=self._cluster, slurm_max_num_timeout=_UNLIMITED),
            name="flatshift-train",
            timeout_min=self._minutes,
            nodes=job.nodes or 1,
            tasks_per_node=share,
            cpus_per_task=resources.cpus,
            gpus_per_node=resources.count_gpus(job.cell) * share or None,
            mem_gb=None if memory is None else round(memory * share / 2**30, 3),
            slurm_partition=self._partition,
            slurm_signal_delay_s=min(_SAVE_S, 15 * self._minutes),
            slurm_setup=exports,
            slurm_srun_args=["--kill-on-bad-exit=0"],  # rank 0 must live to put the job back into the queue
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
