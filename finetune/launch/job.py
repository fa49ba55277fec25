"""Job of several ranks: a board for short messages between them, and the end of the job, reported once.

The board works outside of any collective: while every main thread is blocked, before the process group exists and after
it broke. Under our own launcher it is a local directory (the launcher reads it too, without torch); under torchrun,
accelerate launch or a cluster's launcher it is the job's TCP store, through a separate connection.

The first rank that fails claims the *cause* on the board; all others exit with its code and print nothing. An error
that is only the echo of another rank's end (a closed connection, a collective that timed out) waits for the cause. A
single process prints and returns as usual.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, Protocol

from ..errors import STOP_SIGNALS, UserError, escape_control_characters, first_error_line, is_out_of_memory, shorten
from ..redaction import redact_urls

BOARD_VARIABLE, CAUSE = "FLATSHIFT_BOARD", "cause"
JOIN_SECONDS = 180.0
"""Time that ranks wait for each other at the start; machines may import at very different speeds."""
GRACE, PATIENT_GRACE = 3.0, 30.0
_STORE_SECONDS = 10.0
_CAUSE_SECONDS, _SHORT_CAUSE_SECONDS = 10.0, 1.0
_LEAVE_SECONDS = 5.0
_SECONDARY = re.compile(
    "connection (closed|reset) by peer|connection refused|connection was likely closed|broken pipe|socket closed|"
    "timed out waiting|wait timeout|read timeout|failed to (recv|send)|recvvalue failed|sendbytes failed|"
    "gloo/transport|nccl communicator was aborted|collective operation timeout|ncclremoteerror|remote process exited|"
    "waitsend timeout"
)
"""Messages of torch if another rank ended."""
_MEMORY_ADVICE = (
    "the last checkpoint is kept: continue on more ranks (`flatshift train --resume DIR --mesh.dp N`), or start again "
    "with train.checkpointing: full or a smaller train.batch_size (train.accumulate keeps the step's batch size)"
)


class RankTimeout(Exception):
    """The board's host does not answer."""


class KeyValueStore(Protocol):
    """Texts by name, shared by all ranks; every method raises RankTimeout.

    local: True if the launcher reads it too and prints to the user itself.
    """

    local: bool

    def put(self, key: str, text: str) -> None:
        """Set `key`."""

    def get(self, key: str) -> str | None:
        """Return the text of `key`, None if it is not set."""

    def claim(self, key: str, text: str) -> bool:
        """Set `key` unless it is set; return True if this call set it."""


class DirectoryKeyValueStore:
    """Board with one file per key in a directory."""

    local = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, key: str, text: str) -> None:
        temporary = self._write_temporary(text)
        with _translate_store_errors():
            temporary.replace(self.folder / key)

    def get(self, key: str) -> str | None:
        try:
            return (self.folder / key).read_text(encoding="utf-8")
        except FileNotFoundError:
            if self.folder.is_dir():
                return None
            raise RankTimeout(str(self.folder)) from None

    def claim(self, key: str, text: str) -> bool:
        temporary = self._write_temporary(text)
        try:  # a hard link appears with its whole content or not at all, and fails if the key exists
            os.link(temporary, self.folder / key)
        except FileExistsError:
            return False
        except OSError as error:
            raise RankTimeout(str(self.folder)) from error
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def _write_temporary(self, text: str) -> Path:
        temporary = self.folder / f".{uuid.uuid4().hex}"
        with _translate_store_errors():
            temporary.write_text(text, encoding="utf-8")
        return temporary


class TorchKeyValueStore:
    """Board in a `torch.distributed.Store`, with a prefix for this attempt: torchrun's store outlives a restart."""

    local = False

    def __init__(self, store: Any) -> None:
        self.store = store

    def put(self, key: str, text: str) -> None:
        with _translate_store_errors():
            self.store.set(key, text)

    def get(self, key: str) -> str | None:
        with _translate_store_errors():
            return self.store.get(key).decode() if self.store.check([key]) else None

    def claim(self, key: str, text: str) -> bool:
        with _translate_store_errors():
            # an expected value of "" sets the key only if it is absent
            return self.store.compare_set(key, "", text) == text.encode()


@contextlib.contextmanager
def _translate_store_errors() -> Any:
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch's store errors are RuntimeErrors
        raise RankTimeout(str(error)) from error


@functools.cache
def job_board() -> KeyValueStore | None:
    """Return the board of this process's job; None if it is not one rank of several, or the store cannot be reached.

    Connects at most once per process. If no agent hosts the store, rank 0 hosts it from here on.
    """
    if not is_multi_rank():
        return None
    if BOARD_VARIABLE in os.environ:
        return DirectoryKeyValueStore(Path(os.environ[BOARD_VARIABLE]))
    import torch.distributed as dist

    with contextlib.suppress(RuntimeError, OSError, KeyError):
        if not is_store_hosted_by_agent() and rank() == 0:
            job_store()
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=JOIN_SECONDS))
        store.set_timeout(timedelta(seconds=_STORE_SECONDS))
        return TorchKeyValueStore(dist.PrefixStore(f"flatshift/{_job_name()}", store))
    return None


def require_board() -> KeyValueStore:
    """Return the board of this process's job. Raises UserError if it cannot be reached."""
    board = job_board()
    if board is None and os.environ.get("RANK") == "0" and not is_store_hosted_by_agent():
        raise UserError(
            f"rank 0 cannot listen at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}; another program "
            "may use that port: set another MASTER_PORT for all ranks"
        )
    if board is None:
        raise UserError(
            f"rank {os.environ.get('RANK')} cannot reach the other ranks at {os.environ.get('MASTER_ADDR')}:"
            f"{os.environ.get('MASTER_PORT')}; look whether rank 0 was started, and at the network"
        )
    return board


@functools.cache
def job_store() -> Any:
    """Return the store that creates the process group; rank 0 hosts it unless torchrun's agent does.

    A free port that our launcher holds open for rank 0 is passed as a file descriptor, so nobody can take it in
    between. Raises RuntimeError (of torch) if the store cannot be reached.
    """
    import torch.distributed as dist

    descriptor = os.environ.get("FLATSHIFT_STORE_FD")
    is_host = os.environ["RANK"] == "0" and not is_store_hosted_by_agent()
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=is_host,
        timeout=timedelta(seconds=JOIN_SECONDS),
        wait_for_workers=False,
        master_listen_fd=int(descriptor) if is_host and descriptor else None,
    )
    return dist.PrefixStore(f"flatshift-group/{_job_name()}", store)


def _job_name() -> str:
    """Return what keys of this job begin with in a store that another one may have reached by mistake."""
    return f"{os.environ.get('FLATSHIFT_JOB', '')}/{restart_count()}"


def is_store_hosted_by_agent() -> bool:
    """Return True if the launcher itself (torchrun) hosts the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def restart_count() -> int:
    """Return the number of times the launcher has restarted this job."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def slurm_rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of torchrun for a process that `srun` started as one of several; else none.

    None for a rank of another launcher (RANK is set), for a step of one task and for a batch script, which Slurm gives
    the variables of a task although no step runs. MASTER_ADDR and MASTER_PORT are kept; by default they are the first
    host and a port by the numbers of job and step. Raises UserError for variables that are missing or contradict each
    other.
    """
    in_batch_script = "SLURM_SUBMIT_DIR" in environment and "SLURM_STEP_ID" not in environment
    if "RANK" in environment or "SLURM_PROCID" not in environment or in_batch_script:
        return {}

    def number(*names: str) -> int:
        text = next((environment[name] for name in names if name in environment), "")
        if not re.fullmatch(r"[0-9]{1,9}", text):
            raise UserError(
                f"SLURM_PROCID is set, but {names[-1]} is {shorten(ascii(text)) if text else 'not'}; start every rank "
                "with srun, or unset SLURM_PROCID"
            )
        return int(text)

    size = number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if size == 1:
        return {}
    rank, local, hosts = number("SLURM_PROCID"), number("SLURM_LOCALID"), environment.get("SLURM_STEP_NODELIST")
    hosts = environment.get("MASTER_ADDR") or hosts or environment.get("SLURM_JOB_NODELIST")
    other = environment.get("WORLD_SIZE", str(size))
    if rank >= size or local > rank or other != str(size):
        wrong = f"WORLD_SIZE {shorten(other)}" if other != str(size) else f"SLURM_PROCID {rank}, SLURM_LOCALID {local}"
        raise UserError(f"{wrong} and SLURM_NTASKS {size} contradict each other; start every rank with one srun")
    if not hosts:
        raise UserError("SLURM_PROCID is set, but SLURM_JOB_NODELIST is not; start every rank with srun")
    first_host = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", hosts).partition(",")[0]
    job, step = (number(name) if name in environment else 0 for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    on_node = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", str(size))
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        # a task with GPUs of its own sees no others
        "LOCAL_RANK": "0" if "SLURM_GPUS_PER_TASK" in environment else str(local),
        "LOCAL_WORLD_SIZE": re.split(r"\D", on_node)[0],
        "MASTER_ADDR": first_host,
        "MASTER_PORT": environment.get("MASTER_PORT", str(15_000 + (job + 7919 * step) % 15_000)),
        "FLATSHIFT_JOB": f"{job}.{step}",
        "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", environment.get("SLURM_CPUS_PER_TASK", "1")),
    }


def is_multi_rank() -> bool:
    """Return True if this process is one rank of several."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def rank() -> int:
    """Return this process's rank, 0 in a single process."""
    return int(os.environ.get("RANK", "0"))


@dataclass(frozen=True)
class FailureReason:
    """Reason of a job's end and the exit code of every rank.

    message: for the user; empty to print nothing.
    rank: rank that failed; None: reported by the launcher.
    grace: seconds that the others get to end by themselves.
    """

    code: int
    message: str
    rank: int | None = None
    grace: float = GRACE


_resume_hint = "the last checkpoint is kept, continue with `flatshift train --resume`"


def set_resume_hint(text: str) -> None:
    """Set the resume hint for an interrupted job of this process, if it is not one of `train`."""
    global _resume_hint
    _resume_hint = text


def resume_hint() -> str:
    """Return the resume hint of an interrupted job, as a clause."""
    return _resume_hint


def read_cause(board: KeyValueStore) -> FailureReason | None:
    """Return the claimed cause, if any; raises RankTimeout."""
    text = board.get(CAUSE)
    return FailureReason(**json.loads(text)) if text is not None else None


def claim_cause(board: KeyValueStore, cause: FailureReason) -> FailureReason:
    """Claim `cause` unless another one was first; return the valid one. The claimant prints it unless a launcher does.

    Raises RankTimeout.
    """
    if board.claim(CAUSE, json.dumps(asdict(cause))):
        if not board.local and cause.message:
            print(cause.message, file=sys.stderr, flush=True)
        return cause
    standing = read_cause(board)
    assert standing is not None
    return standing


def report_failure(message: str, code: int, *, patient: bool = False) -> int:
    """Report the failure of this process, unless another rank has done so; return the exit code.

    patient: the others are ending by themselves and may still be saving.
    """
    message = escape_control_characters(redact_urls(message))
    _ignore_stop_signals()
    board = job_board() if is_multi_rank() else None
    if board is not None:
        cause = FailureReason(code, message, rank(), PATIENT_GRACE if patient else GRACE)
        with contextlib.suppress(RankTimeout):
            return claim_cause(board, cause).code
    if rank() == 0:  # a single process, or no board: rank 0 reports for all
        print(message, file=sys.stderr, flush=True)
    return code


def _ignore_stop_signals() -> None:
    """Ignore stop signals: a rank that is ending needs no further one, and must not be interrupted while it reports."""
    if is_multi_rank() and threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def report_error(error: Exception, missing_ranks: Callable[[], list[str]]) -> int:
    """Report an unexpected `error` (in an except block); return the exit code.

    missing_ranks: returns the ranks that no longer answer (`flatshift.finetune.launch.watchdog.missing_ranks`).
    """
    _ignore_stop_signals()
    subject = f"rank {rank()} " if is_multi_rank() else ""
    if is_out_of_memory(error):
        return report_failure(
            f"flatshift: interrupted: {subject}ran out of memory ({first_error_line(error)}); {_MEMORY_ADVICE}", 3
        )
    if is_multi_rank() and is_secondary_failure(error):
        standing = wait_for_cause()
        if standing is not None:
            return standing.code
        lost_ranks = ", ".join(missing_ranks()) or "another rank"
        return report_failure(
            f"flatshift: interrupted: {subject}lost contact with {lost_ranks}, which ended or cannot be reached "
            f"({first_error_line(error)}); {resume_hint()}",
            3,
        )
    text = traceback.format_exc().rstrip()
    if not is_multi_rank():
        return report_failure(text, 70)
    wait_for_cause(_SHORT_CAUSE_SECONDS)  # `report_failure` yields to it
    return report_failure(f"flatshift: {subject}failed, and the fault is ours:\n{text}", 70)


def is_secondary_failure(error: BaseException) -> bool:
    """True if `error` only reports that another rank or the store went away."""
    if type(error).__name__ in {"DistNetworkError", "DistStoreError", "RankTimeout"}:
        return True
    return isinstance(error, RuntimeError | OSError) and _SECONDARY.search(str(error).lower()) is not None


def wait_for_cause(seconds: float = _CAUSE_SECONDS) -> FailureReason | None:
    """Wait up to `seconds` for the cause and return it; None if there is none or the board does not answer."""
    board = job_board()
    deadline = time.monotonic() + seconds
    while board is not None:
        with contextlib.suppress(RankTimeout):
            cause = read_cause(board)
            if cause is not None:
                return cause
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return None


def end_rank(code: int) -> NoReturn:
    """Exit without the interpreter's own clean-up.

    A broken process group would hang there, and an intact one may abort, because gloo's threads release tensors late
    (pytorch/pytorch#179291).
    """
    if not code:
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code:  # otherwise it has signed off already (`spawn.destroy_process_group`)
        sign_off()
    os._exit(code)


def sign_off(seconds: float = _LEAVE_SECONDS) -> None:
    """Sign off from the board. The rank that hosts the store waits at most `seconds` for the others to leave."""
    board = job_board() if is_multi_rank() else None
    if board is None:
        return
    with contextlib.suppress(RankTimeout):
        board.put(f"left-{rank()}", "")
        if board.local or is_store_hosted_by_agent() or rank() != 0:
            return
        deadline = time.monotonic() + seconds
        waiting = set(range(1, int(os.environ["WORLD_SIZE"])))
        while waiting and time.monotonic() < deadline:
            waiting -= {r for r in waiting if board.get(f"left-{r}") is not None}
            time.sleep(0.05)
