"""Watchdog thread of every rank, which notices what blocked main threads cannot: a rank that stopped, hangs, or failed.

Each rank posts a heartbeat on the job's board. If one stands still for `mesh.stall` seconds, its rank is stopped or its
machine is gone. If all ranks are in a phase with a progress timeout and none has made progress for that long (at least
ten times the longest step so far), the one furthest behind is named. The finder reports it once, and every rank exits
by `os._exit`: the main threads are inside collectives that will never return, and files are only ever put in place
whole.

Clocks are never compared: each watcher counts its own time since a rank's heartbeat last changed, in ticks that a pause
of the watcher itself (a sleeping laptop) cannot stretch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from .job import (
    FailureReason,
    KeyValueStore,
    RankTimeout,
    claim_cause,
    is_multi_rank,
    is_store_hosted_by_agent,
    job_board,
    rank,
    read_cause,
    resume_hint,
)

HEARTBEAT_SECONDS, CHECK_SECONDS = 2.0, 0.5
WATCHERS = 3
"""Ranks that watch all others."""
_FIRST_UPDATES, _FIRST_LIMIT = 2, 600.0


@dataclass(frozen=True)
class Heartbeat:
    """Heartbeat of a rank."""

    number: int  # number of the post, counting up
    host: str
    pid: int
    count: int  # calls of `report_progress` so far
    step: int
    phase: str
    idle: float  # seconds since the last of those calls
    longest: float  # seconds of the longest wait between two calls in a phase with a timeout so far
    has_timeout: bool  # True in a phase with a progress timeout (steps), False in one that may take any time
    line: str = ""  # innermost Python line of the main thread
    is_in_torch: bool = False  # True if that line is in torch, as in a collective or a backward pass
    has_left: bool = False

    @property
    def position(self) -> str:
        """Step and phase for a reader."""
        return f"step {self.step}, {self.phase}"


class Watchdog:
    """Heartbeat of one rank, and its observation of the others.

    stall: seconds. end: called with the exit code in the watch's own thread when the job is over.
    """

    def __init__(
        self, board: KeyValueStore, *, rank: int, size: int, stall: float, end: Callable[[int], object] = os._exit
    ) -> None:
        self.board, self.rank, self.size, self.stall, self.end = board, rank, size, stall, end
        self.numbered = 0
        self.count, self.step, self.phase = 0, 0, "start"
        self.moved, self.longest, self.has_timeout = time.monotonic(), 0.0, False
        self.heartbeats: dict[int, tuple[Heartbeat, float]] = {}
        """Last heartbeat of each rank, and the seconds since it changed."""
        self.silence = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flatshift-watch", daemon=True)

    def start(self) -> None:
        """Post the first heartbeat and start the thread."""
        self._post()
        self._thread.start()

    def stop(self) -> None:
        """End the thread and post that this rank left regularly."""
        self._over.set()
        self._thread.join(timeout=5)
        with contextlib.suppress(RankTimeout):
            self._post(has_left=True)

    def progress(self, step: int, phase: str) -> None:
        """Record progress of the main thread. Costs a few assignments."""
        now = time.monotonic()
        if self.has_timeout and self.count >= _FIRST_UPDATES:
            self.longest = max(self.longest, now - self.moved)
        self.count, self.step, self.phase, self.moved = self.count + 1, step, phase, now

    @contextlib.contextmanager
    def pace(self, phase: str, *, has_timeout: bool) -> Iterator[None]:
        """Put this rank into `phase` inside; the job must make progress while every rank is in one with a timeout."""
        previous = self.phase, self.has_timeout
        self.moved, self.phase, self.has_timeout = time.monotonic(), phase, has_timeout
        try:
            yield
        finally:
            self.moved = time.monotonic()
            self.phase, self.has_timeout = previous

    def _run(self) -> None:
        since_post, last = 0.0, time.monotonic()
        while not self._over.wait(CHECK_SECONDS):
            now = time.monotonic()
            # capped: after a suspend of this machine all other ranks would seem silent
            tick, last = min(now - last, 2 * HEARTBEAT_SECONDS), now
            since_post += tick
            try:
                if since_post >= HEARTBEAT_SECONDS:
                    self._post()
                    since_post = 0.0
                self._check_ranks(tick)
                self.silence = 0.0
            except RankTimeout:
                self.silence += max(tick, time.monotonic() - now)
                if self.silence > self.stall:
                    self._report_lost_board()
            launcher = os.environ.get("FLATSHIFT_LAUNCHER")
            if launcher is not None and os.getppid() != int(launcher):
                self.end(3)

    def _post(self, *, has_left: bool = False) -> None:
        self.numbered += 1
        line, is_in_torch = _main_thread_position()
        heartbeat = Heartbeat(
            number=self.numbered, host=socket.gethostname(), pid=os.getpid(), count=self.count, step=self.step,
            phase=self.phase, idle=time.monotonic() - self.moved, longest=self.longest, has_timeout=self.has_timeout,
            line=line, is_in_torch=is_in_torch, has_left=has_left,
        )  # fmt: skip
        self.board.put(f"beat-{self.rank}", json.dumps(asdict(heartbeat)))

    def _check_ranks(self, tick: float) -> None:
        cause = read_cause(self.board)
        if cause is not None:
            self._follow(cause)
            return
        # all ranks for the first few, and these few for the others: traffic grows with the ranks, not its square
        for number in range(self.size if self.rank < WATCHERS else min(WATCHERS, self.size)):
            text = self.board.get(f"beat-{number}")
            if text is None:
                continue
            heartbeat = Heartbeat(**json.loads(text))
            before, unchanged = self.heartbeats.get(number, (None, 0.0))
            same = before is not None and before.number == heartbeat.number
            self.heartbeats[number] = (heartbeat, unchanged + tick if same else 0.0)
        present = {r: entry for r, entry in self.heartbeats.items() if not entry[0].has_left}
        for number, (heartbeat, unchanged) in present.items():
            if number != self.rank and unchanged > self.stall:
                problem = f"has not answered for {unchanged:.0f} s (it was at {heartbeat.position})"
                self._report(number, heartbeat, problem)
                return
        self._check_progress({r: heartbeat for r, (heartbeat, _) in present.items()})

    def missing(self) -> list[str]:
        """Return the ranks that missed several heartbeats, each with its host and process."""
        late = [
            (r, heartbeat)
            for r, (heartbeat, unchanged) in sorted(self.heartbeats.items())
            if unchanged > 3 * HEARTBEAT_SECONDS
        ]
        return [f"rank {r} ({heartbeat.host}:{heartbeat.pid})" for r, heartbeat in late if not heartbeat.has_left]

    def _check_progress(self, heartbeats: dict[int, Heartbeat]) -> None:
        if (
            self.rank >= WATCHERS
            or not heartbeats
            or not all(heartbeat.has_timeout for heartbeat in heartbeats.values())
        ):
            return
        idle = min(heartbeat.idle for heartbeat in heartbeats.values())
        started = all(heartbeat.count > _FIRST_UPDATES for heartbeat in heartbeats.values())
        longest = max(heartbeat.longest for heartbeat in heartbeats.values())
        limit = max(self.stall, 10 * longest) if started else max(self.stall, _FIRST_LIMIT)
        if idle <= limit:
            return
        # The rank that others wait for has made less progress, or as much but is outside of any collective.
        progress = {r: (heartbeat.count, heartbeat.is_in_torch) for r, heartbeat in heartbeats.items()}
        behind = min(progress, key=progress.__getitem__)
        slowest = heartbeats[behind]
        if len(set(progress.values())) == 1:
            problem = f"no rank has made progress for {idle:.0f} s (all are at {slowest.position})"
            self._report(None, slowest, problem)
        else:
            problem = f"hangs at {slowest.line} ({slowest.position}): no rank got on for {idle:.0f} s"
            self._report(behind, slowest, problem)

    def _report(self, rank: int | None, heartbeat: Heartbeat, problem: str) -> None:
        subject = f"rank {rank} ({heartbeat.host}:{heartbeat.pid}) " if rank is not None else ""
        message = f"flatshift: interrupted: {subject}{problem}; {resume_hint()}"
        claim_cause(self.board, FailureReason(3, message, rank, grace=0.0))
        if rank is not None and heartbeat.host == socket.gethostname():
            _kill_sibling(heartbeat.pid)

    def _follow(self, cause: FailureReason) -> None:
        if cause.rank == self.rank and cause.grace:
            return  # the main thread is exiting already
        if not self._over.wait(cause.grace):
            self.end(cause.code)

    def _report_lost_board(self) -> None:
        # rank 1 prints for all: rank 0 is gone, or the launcher is
        if not self.board.local and self.rank == 1:
            host = "the launcher" if is_store_hosted_by_agent() else "rank 0"
            print(
                f"flatshift: interrupted: {host} has not answered for {self.silence:.0f} s; {resume_hint()}",
                file=sys.stderr,
                flush=True,
            )
        self.end(3)


def _main_thread_position() -> tuple[str, bool]:
    """Return the innermost Python line of the main thread, and True if it is in torch."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "its end", False
    file = Path(frame.f_code.co_filename)
    return f"{file.name}:{frame.f_lineno} in {frame.f_code.co_name}", "torch" in file.parts


def _kill_sibling(pid: int) -> None:
    """Send SIGKILL to a process of the same launcher; a stopped process reacts to nothing less."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        parent = int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[1])
        if parent == os.getppid() and pid != os.getpid():
            os.kill(pid, signal.SIGKILL)


_watch: Watchdog | None = None


def start(stall: float) -> None:
    """Start the watchdog of this rank; does nothing in a single process or in a second call."""
    global _watch
    board = job_board() if is_multi_rank() else None
    if board is None or _watch is not None:
        return
    _watch = Watchdog(board, rank=rank(), size=int(os.environ["WORLD_SIZE"]), stall=stall)
    _watch.start()


def stop() -> None:
    """End the watchdog regularly."""
    global _watch
    if _watch is not None:
        _watch.stop()
        _watch = None


def report_progress(step: int, phase: str) -> None:
    """Record that this rank made progress; call it after each piece of work. Free in a single process."""
    if _watch is not None:
        _watch.progress(step, phase)


def missing_ranks() -> list[str]:
    """Return the ranks that missed several heartbeats, as seen by this rank."""
    return _watch.missing() if _watch is not None else []


def progress_timeout(phase: str) -> contextlib.AbstractContextManager[None]:
    """Return the context of a phase of `report_progress` calls (steps): if the calls stop, the job hangs."""
    return _watch.pace(phase, has_timeout=True) if _watch is not None else contextlib.nullcontext()


def no_progress_timeout(phase: str) -> contextlib.AbstractContextManager[None]:
    """Return the context of a phase that may take any time on a rank, as others wait for it (a report, a save)."""
    return _watch.pace(phase, has_timeout=False) if _watch is not None else contextlib.nullcontext()
