"""Failure reporting: the end of a job of several ranks is reported once, by the rank that caused it, with one exit
code.

The first rank that fails claims the *cause* on the job's board; all others exit with its code and print nothing. An
error that is only the echo of another rank's end (a closed connection, a collective that timed out) waits for the
cause. A single process prints and returns as usual.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NoReturn

from ..errors import STOP_SIGNALS, first_error_line, is_out_of_memory
from .rendezvous import KeyValueStore, RankTimeout, is_store_hosted_by_agent, job_board

CAUSE = "cause"
GRACE, PATIENT_GRACE = 3.0, 30.0
ECHO_SECONDS = 10.0
_STRANGE_ECHO_SECONDS = 1.0
_LEAVE_SECONDS = 5.0
_ECHOES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connection was likely closed",
    "broken pipe",
    "socket closed",
    "timed out waiting",
    "wait timeout",
    "read timeout",
    "failed to recv",
    "failed to send",
    "recvvalue failed",
    "sendbytes failed",
    "gloo/transport",
    "nccl communicator was aborted",
    "collective operation timeout",
    "ncclremoteerror",
    "remote process exited",
    "waitsend timeout",
)


@dataclass(frozen=True)
class FailureReason:
    """Reason and exit code of a job's end."""

    code: int
    """Exit code of every rank."""
    message: str
    """Message for the user; empty to print nothing."""
    rank: int | None = None
    """Rank that failed; None: reported by the launcher."""
    grace: float = GRACE
    """Seconds that the others get to end by themselves."""


_again = "the last checkpoint is kept, continue with `flatshift train --resume`"


def set_resume_hint(words: str) -> None:
    """Set the resume hint for an interrupted job of this process, if it is not one of `train`."""
    global _again
    _again = words


def resume_hint() -> str:
    """Return the resume hint of an interrupted job, as a clause."""
    return _again


def is_multi_rank() -> bool:
    """Return True if this process is one rank of several."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def rank() -> int:
    """Return this process's rank, 0 in a single process."""
    return int(os.environ.get("RANK", "0"))


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


def report_error(error: Exception, missing: Callable[[], list[str]]) -> int:
    """Report an unexpected `error` (in an except block); return the exit code.

    missing: returns the ranks that no longer answer (`flatshift.finetune.launch.watchdog.missing_ranks`).
    """
    _ignore_stop_signals()
    who = f"rank {rank()} " if is_multi_rank() else ""
    if is_out_of_memory(error):
        return report_failure(
            f"flatshift: interrupted: {who}ran out of memory ({first_error_line(error)}); {_MEMORY_ADVICE}", 3
        )
    if is_multi_rank() and is_secondary_failure(error):
        standing = wait_for_cause()
        if standing is not None:
            return standing.code
        other = ", ".join(missing()) or "another rank"
        return report_failure(
            f"flatshift: interrupted: {who}lost contact with {other}, which ended or cannot be reached "
            f"({first_error_line(error)}); {resume_hint()}",
            3,
        )
    text = traceback.format_exc().rstrip()
    if not is_multi_rank():
        return report_failure(text, 70)
    wait_for_cause(_STRANGE_ECHO_SECONDS)  # `report_failure` yields to it
    return report_failure(f"flatshift: {who}failed, and the fault is ours:\n{text}", 70)


_MEMORY_ADVICE = (
    "the last checkpoint is kept: continue on more ranks (`flatshift train --resume DIR --mesh.dp N`), or start again "
    "with train.checkpointing: full or a smaller train.batch_size (train.accumulate keeps the step's batch size)"
)


def is_secondary_failure(error: BaseException) -> bool:
    """True if `error` only reports that another rank or the store went away."""
    if type(error).__name__ in {"DistNetworkError", "DistStoreError", "RankTimeout"}:
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and any(sign in text for sign in _ECHOES)


def wait_for_cause(seconds: float = ECHO_SECONDS) -> FailureReason | None:
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
    """Sign off from the board. The rank that hosts the store waits until the others have left too, at most
    `seconds`."""
    board = job_board() if is_multi_rank() else None
    if board is None:
        return
    with contextlib.suppress(RankTimeout):
        board.put(f"left-{rank()}", "")
        if board.local or is_store_hosted_by_agent() or rank() != 0:
            return
        deadline = time.monotonic() + seconds
        others = set(range(1, int(os.environ["WORLD_SIZE"])))
        while others and time.monotonic() < deadline:
            others -= {r for r in others if board.get(f"left-{r}") is not None}
            time.sleep(0.05)
