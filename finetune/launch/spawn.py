"""Start of a job's ranks on this machine, their supervision, and an end with one message and one exit code.

    code = spawn(["-m", "flatshift", "train", "recipe.yaml", "--out", "runs/a"], ranks=4, resume=Path("runs/a"))

The parent never imports torch: it holds a port for the ranks' store, gives each rank its environment (that of torchrun)
and its share of the cores, forwards a request to stop once, and reads the ranks' messages from the job's board. For a
rank that died without a message (SIGKILL) it claims the cause itself.

The ranks' part: `join_mesh` creates the process group and the mesh, `destroy_process_group` takes them down.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from ..compute.memory import expandable_segments_env
from ..config import Mesh
from ..errors import STOP_SIGNALS, UserError
from ..lock import temporary_directory
from ..planner.devices import machine_memory
from .failure import PATIENT_GRACE, FailureReason, claim_cause, rank, read_cause, sign_off
from .rendezvous import FOLDER, JOIN_SECONDS, DirectoryKeyValueStore, job_store, require_board, restart_count

if TYPE_CHECKING:
    import torch

    from ..parallel.mesh import ProcessMesh

_TICK = 0.05
_KILL_SECONDS = 5.0
_RANK_BYTES = 1 << 28
"""Memory of a rank before it has a model: the interpreter and torch."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_BY_ITSELF = (signal.SIGABRT, signal.SIGTERM, signal.SIGINT)
"""Signals by which a rank more often ends because of another than by its own fault."""


def is_launched_rank() -> bool:
    """Return True if a launcher (torchrun, accelerate launch, ours) started this process as a rank, even the only
    one."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def must_spawn_ranks(mesh: Mesh) -> bool:
    """Return True if this process has to start the ranks of `mesh` itself."""
    return mesh.size > 1 and not is_launched_rank()


def was_restarted() -> bool:
    """Return True if torchrun restarted this job after a failure."""
    return restart_count() > 0


def may_restart() -> bool:
    """Return True if torchrun would restart this job (`--max-restarts`)."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


# --------------------------------------------------------------------------------------------- the parent


@dataclass
class _Job:
    folder: Path
    """Contains the board and the ranks' output."""
    board: DirectoryKeyValueStore
    ranks: list[subprocess.Popen[bytes]]
    resume: Path | None
    again: str | None = None
    signals: int = 0
    """Number of stop requests by the user."""
    asked_at: float = 0.0
    failed_at: float | None = None
    stage: int = 0
    """Last action on the remaining ranks: 0 none, 1 SIGTERM, 2 SIGKILL."""


def spawn(
    command: Sequence[str],
    *,
    ranks: int,
    resume: Path | None = None,
    threads: int | None = None,
    again: str | None = None,
) -> int:
    """Run `sys.executable -P *command` as `ranks` processes of one job and return the job's exit code.

    Rank 0 has the terminal; the output of the others goes to a file each, which is copied to `resume / "ranks"` if the
    job fails. One message, from the cause, goes to stderr.

    Args:
        resume: run directory, named in messages about an interruption.
        again: resume hint for an interrupted job that is not one of `train`, as a clause.
        threads: CPU threads of each rank; by default its share of the cores, unless the environment sets it.
    """
    memory = machine_memory()
    if memory is not None and ranks * _RANK_BYTES > memory:
        raise UserError(
            f"mesh: {ranks:,} ranks are {ranks:,} processes, more than {memory / 2**30:.0f} GiB of memory hold; "
            f"take {max(1, memory // _RANK_BYTES)} or fewer here, or start them on several machines with torchrun"
        )
    with temporary_directory("flatshift-ranks-") as folder:
        (folder / "board").mkdir()
        with _reserve_port() as held:
            processes = _start_ranks(command, ranks, threads, folder, held)
        job = _Job(folder, DirectoryKeyValueStore(folder / "board"), processes, resume, again)
        try:
            with _forward_stop_signals(job):
                while any(process.poll() is None for process in processes):
                    _supervise_ranks(job)
                    time.sleep(_TICK)
                _supervise_ranks(job)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        return _finish_job(job)


@contextlib.contextmanager
def _reserve_port() -> Iterator[socket.socket]:
    """Bind a free port of the loopback until rank 0 has inherited it, so that nobody takes it in between."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held


def _start_ranks(
    command: Sequence[str], ranks: int, threads: int | None, folder: Path, held: socket.socket
) -> list[subprocess.Popen[bytes]]:
    share = threads or max(1, _count_cores() // ranks)
    shared = {name: str(threads or os.environ.get(name, share)) for name in THREADS}
    shared |= {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
    shared |= expandable_segments_env(os.environ)
    if sys.platform == "linux":
        shared |= {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
    shared |= {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(held.getsockname()[1]),
        "FLATSHIFT_LAUNCHER": str(os.getpid()),
        FOLDER: str(folder / "board"),
    }
    processes: list[subprocess.Popen[bytes]] = []
    for number in range(ranks):
        own = {"RANK": str(number), "LOCAL_RANK": str(number)}
        if number == 0:
            own["FLATSHIFT_STORE_FD"] = str(held.fileno())
        with _output_file(folder, number).open("wb") as kept:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-P", *command],  # -P: the user's directory must not shadow modules
                    env={**os.environ, **shared, **own},
                    stdin=subprocess.DEVNULL,
                    stdout=None if number == 0 else kept,
                    stderr=None if number == 0 else kept,
                    pass_fds=(held.fileno(),) if number == 0 else (),
                    start_new_session=True,  # a terminal's Ctrl-C reaches the launcher alone, which forwards it once
                )
            )
    return processes


def _count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def _forward_stop_signals(job: _Job) -> Iterator[None]:
    """Forward a stop request to every rank: the first asks for a stop at a checkpoint, a second for an immediate
    one."""

    def forward(_number: int, _frame: FrameType | None) -> None:
        job.signals += 1
        job.asked_at = time.monotonic()
        _signal_ranks(job, signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal_ranks(job: _Job, number: signal.Signals) -> None:
    for process in job.ranks:
        if process.poll() is None:
            process.send_signal(number)


def _supervise_ranks(job: _Job) -> None:
    """Notice the first failure, claim the cause for a rank that cannot, and end the ranks that outlive its grace
    period."""
    cause = read_cause(job.board)
    failed = [rank for rank, process in enumerate(job.ranks) if process.poll()]
    if failed and cause is None:
        cause = claim_cause(job.board, _infer_cause(job, failed))
    now = time.monotonic()
    if cause is not None and job.failed_at is None:
        job.failed_at = now
    late = 0.0
    if cause is not None and job.failed_at is not None:
        late = now - job.failed_at - cause.grace - _KILL_SECONDS
    elif job.signals > 1:
        late = now - job.asked_at - _KILL_SECONDS
    else:
        return
    if late > 0 and job.stage == 0:
        _signal_ranks(job, signal.SIGTERM)
        job.stage = 1
    elif late > _KILL_SECONDS and job.stage == 1:
        _signal_ranks(job, signal.SIGKILL)
        job.stage = 2


def _infer_cause(job: _Job, failed: Sequence[int]) -> FailureReason:
    """Return the cause if ranks ended without one: killed from outside comes before crashed, before merely exited."""

    def weight(rank: int) -> int:
        code = job.ranks[rank].returncode
        return 2 if code >= 0 else 1 if -code in _BY_ITSELF else 0

    rank = min(failed, key=weight)
    process = job.ranks[rank]
    where = f" {shlex.quote(str(job.resume))}" if job.resume is not None else ""
    if job.signals:
        message = (
            job.again or f"finished parts are kept; a run that has begun resumes with `flatshift train --resume{where}`"
        )
        return FailureReason(3, f"flatshift: interrupted: {message}", rank)
    if process.returncode >= 0:
        words = _output_file(job.folder, rank).read_text(encoding="utf-8", errors="replace").strip().splitlines()[-5:]
        said = "; its last words:\n" + "\n".join(words) if words else ""
        message = f"flatshift: rank {rank} (pid {process.pid}) ended with exit code {process.returncode}{said}"
        # rank 0 has printed to the terminal itself
        return FailureReason(process.returncode, "" if rank == 0 else message, rank)
    number = signal.Signals(-process.returncode)
    reason = "; the kernel ends processes so when memory runs out" if number == signal.SIGKILL else ""
    then = job.again or f"the last checkpoint is kept: continue with `flatshift train --resume{where}`"
    message = (
        f"flatshift: interrupted: rank {rank} (pid {process.pid}) was killed by signal {number:d} ({number.name})"
        f"{reason}; {then}"
    )
    return FailureReason(3, message, rank)


def _finish_job(job: _Job) -> int:
    """Print the cause, keep the ranks' output if they did not end regularly, and return the exit code."""
    cause = read_cause(job.board)
    if cause is None:
        return 0
    if cause.code != 2 and cause.grace < PATIENT_GRACE and job.resume is not None and job.resume.is_dir():
        with contextlib.suppress(OSError):
            for rank in range(1, len(job.ranks)):
                if _output_file(job.folder, rank).stat().st_size:
                    (job.resume / "ranks").mkdir(exist_ok=True)
                    shutil.copyfile(_output_file(job.folder, rank), job.resume / "ranks" / f"rank-{rank}.txt")
    if cause.message:
        print(cause.message, file=sys.stderr, flush=True)
    return cause.code


def _output_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.txt"


# --------------------------------------------------------------------------------------------- the ranks


def tie_to_launcher() -> None:
    """End this rank when its launcher ends, for any reason; a no-op without one of ours. On Linux only: elsewhere the
    watchdog does it."""
    launcher = os.environ.get("FLATSHIFT_LAUNCHER")
    if launcher is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):  # the launcher ended before prctl
        os._exit(3)


_PR_SET_PDEATHSIG = 1


def join_mesh(mesh: Mesh, device: str) -> ProcessMesh:
    """Create the process group (gloo, on CUDA also NCCL), start the watchdog, and return this process's position in
    `mesh`.

    device: `train.device`; on CUDA each rank takes the device of its local number. A process that no launcher started
    as one of several is its own mesh.

    Raises:
        UserError: the axes do not multiply to the number of processes, a device is not available, ranks are missing.
    """
    import torch

    from ..parallel.mesh import ProcessMesh, check_mesh_size
    from . import watchdog

    processes = int(os.environ["WORLD_SIZE"]) if is_launched_rank() else 1
    check_mesh_size(mesh, processes)
    place = _rank_device(device, processes)
    if processes == 1:
        return ProcessMesh.alone(place)
    watchdog.start(mesh.stall)
    _wait_for_all_ranks(processes)
    _init_process_group(place, processes)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    return ProcessMesh.of(mesh, place)


def _wait_for_all_ranks(processes: int) -> None:
    """Return when every rank is on the board, as checked by rank 0. Raises UserError if one is missing."""
    board, deadline = require_board(), time.monotonic() + JOIN_SECONDS
    missing = set(range(processes)) if rank() == 0 else set()
    while missing or board.get("all-here") is None:
        missing -= {other for other in missing if board.get(f"beat-{other}") is not None}
        if rank() == 0 and not missing:
            board.put("all-here", "")
        if time.monotonic() > deadline:
            absent = f"rank {min(missing)}" if missing else "some rank"
            raise UserError(
                f"{absent} did not come within {JOIN_SECONDS:.0f} s; look whether all {processes} were started"
            )
        time.sleep(0.05)


def _init_process_group(device: torch.device, processes: int) -> None:
    import torch.distributed as dist

    # Practically no timeout: one rank may work for long while the others wait, and the watchdog distinguishes a slow
    # step from a hung one.
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        store=job_store(),
        rank=rank(),
        world_size=processes,
        timeout=timedelta(days=7),
    )


def _rank_device(name: str, processes: int) -> torch.device:
    import torch

    from ..compute.cuda_status import resolve_device

    if processes == 1:
        return resolve_device(name)
    if name.startswith("cuda:"):
        raise UserError(f"train.device: {name} is one device, but {processes} ranks want one each; take cuda or cpu")
    place = resolve_device(name)
    if place.type == "cpu":
        return place
    local, there = int(os.environ.get("LOCAL_RANK", os.environ["RANK"])), torch.cuda.device_count()
    if local >= there:
        raise UserError(
            f"train.device: {name} gives every rank a CUDA device of its own, and this machine has {there} for "
            f"{os.environ.get('LOCAL_WORLD_SIZE', processes)} ranks; take a smaller mesh, or train.device: cpu"
        )
    return torch.device("cuda", local)


def destroy_process_group(world: ProcessMesh) -> None:
    """Destroy the process group after all work is done; no rank waits for another in a collective."""
    import torch.distributed as dist

    from . import watchdog

    if world.size == 1 or not dist.is_initialized():
        return
    watchdog.stop()
    sign_off()
    dist.destroy_process_group()
