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
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from ..compute.memory import expandable_segments_env, machine_memory
from ..config import Mesh
from ..errors import STOP_SIGNALS, UserError
from ..lock import temporary_directory
from ..machine import count_cores
from .job import (
    BOARD_VARIABLE,
    JOIN_SECONDS,
    PATIENT_GRACE,
    DirectoryKeyValueStore,
    FailureReason,
    claim_cause,
    job_store,
    rank,
    read_cause,
    require_board,
    sign_off,
)

if TYPE_CHECKING:
    import torch

    from ..parallel.mesh import ProcessMesh

_POLL_SECONDS, _KILL_SECONDS = 0.05, 5.0
_RANK_BYTES = 1 << 28  # memory of a rank before it has a model: the interpreter and torch
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_SECONDARY_SIGNALS = (signal.SIGABRT, signal.SIGTERM, signal.SIGINT)
"""Signals by which a rank more often ends because of another than by its own fault."""


def is_launched_rank() -> bool:
    """Return True if a launcher (torchrun, accelerate launch, ours) started this process as a rank."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def must_spawn_ranks(mesh: Mesh) -> bool:
    """Return True if this process has to start the ranks of `mesh` itself."""
    return mesh.size > 1 and not is_launched_rank()


def may_restart() -> bool:
    """Return True if torchrun would restart this job (`--max-restarts`)."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


@dataclass
class _Job:
    folder: Path  # contains the board and the ranks' output
    board: DirectoryKeyValueStore
    ranks: list[subprocess.Popen[bytes]]
    resume: Path | None
    resume_hint: str | None = None
    signals: int = 0  # number of stop requests by the user
    signalled_at: float = 0.0
    failed_at: float | None = None
    stage: int = 0  # last action on the remaining ranks: 0 none, 1 SIGTERM, 2 SIGKILL


def spawn(
    command: Sequence[str],
    *,
    ranks: int,
    resume: Path | None = None,
    threads: int | None = None,
    resume_hint: str | None = None,
) -> int:
    """Run `sys.executable -P *command` as `ranks` processes of one job and return the job's exit code.

    Rank 0 has the terminal; the output of the others goes to a file each, which is copied to `resume / "ranks"` if the
    job fails. One message, from the cause, goes to stderr.

    resume: run directory, named in messages about an interruption.
    resume_hint: for an interrupted job that is not one of `train`, as a clause.
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
        # a free port of the loopback is bound until rank 0 has inherited it, so that nobody takes it in between
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as port:
            port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            port.bind(("127.0.0.1", 0))
            processes = _start_ranks(command, ranks, threads, folder, port)
        job = _Job(folder, DirectoryKeyValueStore(folder / "board"), processes, resume, resume_hint)
        try:
            with _forward_stop_signals(job):
                while any(process.poll() is None for process in processes):
                    _supervise_ranks(job)
                    time.sleep(_POLL_SECONDS)
                _supervise_ranks(job)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        return _finish_job(job)


def _start_ranks(
    command: Sequence[str], ranks: int, threads: int | None, folder: Path, port: socket.socket
) -> list[subprocess.Popen[bytes]]:
    share = threads or max(1, count_cores() // ranks)
    environment = {
        **os.environ,
        **{name: str(threads or os.environ.get(name, share)) for name in THREAD_VARIABLES},
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        **expandable_segments_env(os.environ),
        **({"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")} if sys.platform == "linux" else {}),
        **{"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.getsockname()[1])},
        "FLATSHIFT_LAUNCHER": str(os.getpid()),
        BOARD_VARIABLE: str(folder / "board"),
    }
    processes: list[subprocess.Popen[bytes]] = []
    for number in range(ranks):
        rank_variables = {"RANK": str(number), "LOCAL_RANK": str(number)}
        if number == 0:
            rank_variables["FLATSHIFT_STORE_FD"] = str(port.fileno())
        with _output_file(folder, number).open("wb") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-P", *command],  # -P: the user's directory must not shadow modules
                    env={**environment, **rank_variables},
                    stdin=subprocess.DEVNULL,
                    stdout=None if number == 0 else output,
                    stderr=None if number == 0 else output,
                    pass_fds=(port.fileno(),) if number == 0 else (),
                    start_new_session=True,  # a terminal's Ctrl-C reaches the launcher alone, which forwards it once
                )
            )
    return processes


@contextlib.contextmanager
def _forward_stop_signals(job: _Job) -> Iterator[None]:
    """Forward a stop request to every rank: the first asks for a stop at a checkpoint, a second for one at once."""

    def forward(_number: int, _frame: FrameType | None) -> None:
        job.signals += 1
        job.signalled_at = time.monotonic()
        _signal_ranks(job, signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _signal_ranks(job: _Job, number: signal.Signals) -> None:
    for process in job.ranks:
        if process.poll() is None:
            process.send_signal(number)


def _supervise_ranks(job: _Job) -> None:
    """Notice the first failure, claim the cause for a rank that cannot, and end ranks after its grace period."""
    cause = read_cause(job.board)
    failed = [rank for rank, process in enumerate(job.ranks) if process.poll()]
    if failed and cause is None:
        cause = claim_cause(job.board, _infer_cause(job, failed))
    now = time.monotonic()
    if cause is not None and job.failed_at is None:
        job.failed_at = now
    if cause is not None and job.failed_at is not None:
        late = now - job.failed_at - cause.grace - _KILL_SECONDS
    elif job.signals > 1:
        late = now - job.signalled_at - _KILL_SECONDS
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
        return 2 if code >= 0 else 1 if -code in _SECONDARY_SIGNALS else 0

    rank = min(failed, key=weight)
    process = job.ranks[rank]
    run = f" {shlex.quote(str(job.resume))}" if job.resume is not None else ""
    if job.signals:
        hint = f"finished parts are kept; a run that has begun resumes with `flatshift train --resume{run}`"
        return FailureReason(3, f"flatshift: interrupted: {job.resume_hint or hint}", rank)
    if process.returncode >= 0:
        lines = _output_file(job.folder, rank).read_text(encoding="utf-8", errors="replace").strip().splitlines()[-5:]
        output = "; its last words:\n" + "\n".join(lines) if lines else ""
        message = f"flatshift: rank {rank} (pid {process.pid}) ended with exit code {process.returncode}{output}"
        # rank 0 has printed to the terminal itself
        return FailureReason(process.returncode, "" if rank == 0 else message, rank)
    number = signal.Signals(-process.returncode)
    reason = "; the kernel ends processes so when memory runs out" if number == signal.SIGKILL else ""
    hint = job.resume_hint or f"the last checkpoint is kept: continue with `flatshift train --resume{run}`"
    message = (
        f"flatshift: interrupted: rank {rank} (pid {process.pid}) was killed by signal {number:d} ({number.name})"
        f"{reason}; {hint}"
    )
    return FailureReason(3, message, rank)


def _finish_job(job: _Job) -> int:
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


def tie_to_launcher() -> None:
    """End this rank when its launcher ends, for any reason; a no-op without one of ours. On Linux only: elsewhere the
    watchdog does it."""
    launcher = os.environ.get("FLATSHIFT_LAUNCHER")
    if launcher is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != int(launcher):  # the launcher ended before prctl
        os._exit(3)


def join_mesh(mesh: Mesh, device: str) -> ProcessMesh:
    """Create the process group (gloo, on CUDA also NCCL), start the watchdog, and return this process's position in
    `mesh`.

    device: `train.device`; on CUDA each rank takes the device of its local number. A process that no launcher started
    as one of several is its own mesh.

    Raises UserError: the axes do not multiply to the number of processes, a device is not available, ranks are missing.
    """
    import torch
    import torch.distributed as dist

    from ..parallel.mesh import TIMEOUT, ProcessMesh, check_mesh_size
    from . import watchdog

    processes = int(os.environ["WORLD_SIZE"]) if is_launched_rank() else 1
    check_mesh_size(mesh, processes)
    own_device = _rank_device(device, processes)
    if processes == 1:
        return ProcessMesh.alone(own_device)
    watchdog.start(mesh.stall)
    _wait_for_all_ranks(processes)
    is_cuda = own_device.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(own_device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
        store=job_store(),
        rank=rank(),
        world_size=processes,
        timeout=TIMEOUT,
        device_id=own_device if is_cuda else None,  # NCCL connects at once, and splits a group off per axis
    )
    return ProcessMesh.of(mesh, own_device)


def _wait_for_all_ranks(processes: int) -> None:
    board, deadline = require_board(), time.monotonic() + JOIN_SECONDS
    missing = set(range(processes)) if rank() == 0 else set()
    while missing or board.get("all-here") is None:
        missing -= {number for number in missing if board.get(f"beat-{number}") is not None}
        if rank() == 0 and not missing:
            board.put("all-here", "")
        if time.monotonic() > deadline:
            absent = f"rank {min(missing)}" if missing else "some rank"
            raise UserError(
                f"{absent} did not come within {JOIN_SECONDS:.0f} s; look whether all {processes} were started"
            )
        time.sleep(0.05)


def _rank_device(name: str, processes: int) -> torch.device:
    import torch

    from ..compute.cuda_status import resolve_device

    if processes > 1 and name.startswith("cuda:"):
        raise UserError(f"train.device: {name} is one device, but {processes} ranks want one each; take cuda or cpu")
    device = resolve_device(name)
    if processes == 1 or device.type == "cpu":
        return device
    local_rank, devices = int(os.environ.get("LOCAL_RANK", os.environ["RANK"])), torch.cuda.device_count()
    if local_rank >= devices:
        raise UserError(
            f"train.device: {name} gives every rank a CUDA device of its own, and this machine has {devices} for "
            f"{os.environ.get('LOCAL_WORLD_SIZE', processes)} ranks; take a smaller mesh, or train.device: cpu"
        )
    return torch.device("cuda", local_rank)


def destroy_process_group(world: ProcessMesh) -> None:
    """Destroy the process group after all work is done; no rank waits for another in a collective."""
    import torch.distributed as dist

    from . import watchdog

    if world.size == 1 or not dist.is_initialized():
        return
    watchdog.stop()
    sign_off()
    dist.destroy_process_group()
