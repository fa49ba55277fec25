"""A thread on every rank that notices what blocked main threads cannot: a rank that stopped, hangs, or has failed.

Each rank posts a heartbeat on the job's board. A rank whose heartbeat stands still for `mesh.stall` seconds is stopped
or its machine is gone. Where all ranks are in a phase that must get on (`progress_timeout`), hearts beat, and no rank
has made progress for that long (at least ten times the longest update so far), the one furthest behind is named. The
finder says so once, and every rank leaves by `os._exit`: the main threads are inside collectives that will never
return, and files are only ever put in place whole.

Clocks are never compared: each watcher counts its own time since a rank's heartbeat last changed, in ticks that a
pause of the watcher itself (a sleeping laptop) cannot stretch.
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

from .failure import FailureReason, again, claim_cause, rank, read_cause, several
from .rendezvous import KeyValueStore, RankTimeout, hosted_by_agent, job_board

BEAT_SECONDS, LOOK_SECONDS = 2.0, 0.5
WATCHMEN = 3
_FIRST_UPDATES = 2
_FIRST_LIMIT = 600.0


@dataclass(frozen=True)
class Beat:
    """What a rank posts."""

    number: int
    """Counts up with every post."""
    host: str
    pid: int
    count: int
    """Calls of `progress` so far."""
    step: int
    phase: str
    idle: float
    """Seconds since the last of them."""
    longest: float
    """Seconds of the longest wait between two of them so far."""
    hurried: bool
    """In a phase that must get on (updates), not in one that may take any time."""
    line: str = ""
    """Where the main thread is: the innermost Python line."""
    waits: bool = False
    """Whether that is in torch, as in a collective or a backward pass."""
    left: bool = False

    @property
    def where(self) -> str:
        """Step and phase for a reader."""
        return f"step {self.step}, {self.phase}"


class Watch:
    """The heartbeat of one rank and its eye on the others.

    stall: seconds. end: called with the exit code in the watch's own thread when the job is over.
    """

    def __init__(
        self, board: KeyValueStore, *, rank: int, size: int, stall: float, end: Callable[[int], object] = os._exit
    ) -> None:
        self.board, self.rank, self.size, self.stall, self.end = board, rank, size, stall, end
        self.numbered = 0
        self.count, self.step, self.phase = 0, 0, "start"
        self.moved, self.longest, self.hurried = time.monotonic(), 0.0, False
        self.seen: dict[int, tuple[Beat, float]] = {}
        self.silence = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flatshift-watch", daemon=True)

    def start(self) -> None:
        """Post the first heartbeat and begin."""
        self._post()
        self._thread.start()

    def stop(self) -> None:
        """Say that this rank left in good order, and end."""
        self._over.set()
        self._thread.join(timeout=5)
        with contextlib.suppress(RankTimeout):
            self._post(left=True)

    def progress(self, step: int, phase: str) -> None:
        """The main thread came this far. Costs two assignments."""
        now = time.monotonic()
        if self.count >= _FIRST_UPDATES:
            self.longest = max(self.longest, now - self.moved)
        self.count, self.step, self.phase, self.moved = self.count + 1, step, phase, now

    @contextlib.contextmanager
    def pace(self, phase: str, *, hurried: bool) -> Iterator[None]:
        """Inside, this rank is in `phase`; progress is asked of the job while every rank is in a hurried one."""
        before = self.phase, self.hurried
        self.moved, self.phase, self.hurried = time.monotonic(), phase, hurried
        try:
            yield
        finally:
            self.moved = time.monotonic()
            self.phase, self.hurried = before

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        since_beat, last = 0.0, time.monotonic()
        while not self._over.wait(LOOK_SECONDS):
            now = time.monotonic()
            tick, last = min(now - last, 2 * BEAT_SECONDS), now
            since_beat += tick
            try:
                if since_beat >= BEAT_SECONDS:
                    self._post()
                    since_beat = 0.0
                self._look(tick)
                self.silence = 0.0
            except RankTimeout:
                self.silence += max(tick, time.monotonic() - now)
                if self.silence > self.stall:
                    self._board_is_gone()
            self._end_with_an_orphan()

    def _post(self, *, left: bool = False) -> None:
        self.numbered += 1
        beat = Beat(
            self.numbered,
            socket.gethostname(),
            os.getpid(),
            self.count,
            self.step,
            self.phase,
            time.monotonic() - self.moved,
            self.longest,
            self.hurried,
            *_main_thread(),
            left,
        )
        self.board.put(f"beat-{self.rank}", json.dumps(asdict(beat)))

    def _look(self, tick: float) -> None:
        cause = read_cause(self.board)
        if cause is not None:
            self._follow(cause)
            return
        for other in self._watched():
            text = self.board.get(f"beat-{other}")
            if text is None:
                continue
            beat = Beat(**json.loads(text))
            before, still = self.seen.get(other, (None, 0.0))
            same = before is not None and before.number == beat.number
            self.seen[other] = (beat, still + tick if same else 0.0)
        present = {r: entry for r, entry in self.seen.items() if not entry[0].left}
        for other, (beat, still) in present.items():
            if other != self.rank and still > self.stall:
                self._report(other, beat, f"has not answered for {still:.0f} s (it was at {beat.where})")
                return
        self._look_for_progress({r: beat for r, (beat, _) in present.items()})

    def missing(self) -> list[str]:
        """Ranks whose heart has missed several beats, each with its host and process."""
        late = [(r, beat) for r, (beat, still) in sorted(self.seen.items()) if still > 3 * BEAT_SECONDS]
        return [f"rank {r} ({beat.host}:{beat.pid})" for r, beat in late if not beat.left]

    def _watched(self) -> range:
        """All ranks for the few first ones, these for the others: the traffic grows with the ranks, not its square."""
        return range(self.size) if self.rank < WATCHMEN else range(min(WATCHMEN, self.size))

    def _look_for_progress(self, beats: dict[int, Beat]) -> None:
        if self.rank >= WATCHMEN or not beats or not all(beat.hurried for beat in beats.values()):
            return
        idle = min(beat.idle for beat in beats.values())
        started = all(beat.count > _FIRST_UPDATES for beat in beats.values())
        longest = max(beat.longest for beat in beats.values())
        limit = max(self.stall, 10 * longest) if started else max(self.stall, _FIRST_LIMIT)
        if idle <= limit:
            return
        # The rank that others wait for has come less far, or as far but stands outside of any collective.
        place = {r: (beat.count, beat.waits) for r, beat in beats.items()}
        behind = min(place, key=place.__getitem__)
        beat = beats[behind]
        if len(set(place.values())) == 1:
            self._report(None, beat, f"no rank has made progress for {idle:.0f} s (all are at {beat.where})")
        else:
            self._report(behind, beat, f"hangs at {beat.line} ({beat.where}): no rank got on for {idle:.0f} s")

    def _report(self, who: int | None, beat: Beat, what: str) -> None:
        place = f"rank {who} ({beat.host}:{beat.pid}) " if who is not None else ""
        message = f"flatshift: interrupted: {place}{what}; {again()}"
        claim_cause(self.board, FailureReason(3, message, who, grace=0.0))
        if who is not None and beat.host == socket.gethostname():
            _end_sibling(beat.pid)

    def _follow(self, cause: FailureReason) -> None:
        """The job is over: give the main thread the cause's grace to end by itself, then leave."""
        if cause.rank == self.rank and cause.grace:
            return  # the main thread is on its way out
        if not self._over.wait(cause.grace):
            self.end(cause.code)

    def _board_is_gone(self) -> None:
        """The store is in the launcher's process or in rank 0's: then it is that one that stopped."""
        if not self.board.local and self.rank == 1:
            host = "the launcher" if hosted_by_agent() else "rank 0"
            print(
                f"flatshift: interrupted: {host} has not answered for {self.silence:.0f} s; {again()}",
                file=sys.stderr,
                flush=True,
            )
        self.end(3)

    def _end_with_an_orphan(self) -> None:
        launcher = os.environ.get("FLATSHIFT_LAUNCHER")
        if launcher is not None and os.getppid() != int(launcher):
            self.end(3)


def _main_thread() -> tuple[str, bool]:
    """The innermost Python line of the main thread, and whether it is in torch."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "its end", False
    file = Path(frame.f_code.co_filename)
    return f"{file.name}:{frame.f_lineno} in {frame.f_code.co_name}", "torch" in file.parts


def _end_sibling(pid: int) -> None:
    """SIGKILL a process that the same launcher started; a stopped process answers to nothing less."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        parent = int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[1])
        if parent == os.getppid() and pid != os.getpid():
            os.kill(pid, signal.SIGKILL)


_watch: Watch | None = None


def start(stall: float) -> None:
    """Begin to watch in this rank of several; nothing in a single process. A second call changes nothing."""
    global _watch
    board = job_board() if several() else None
    if board is None or _watch is not None:
        return
    _watch = Watch(board, rank=rank(), size=int(os.environ["WORLD_SIZE"]), stall=stall)
    _watch.start()


def stop() -> None:
    """End the watch in good order."""
    global _watch
    if _watch is not None:
        _watch.stop()
        _watch = None


def progress(step: int, phase: str) -> None:
    """Called by whatever works, after each piece of work: this rank got on. Free in a single process."""
    if _watch is not None:
        _watch.progress(step, phase)


def missing() -> list[str]:
    """Ranks whose heart has missed several beats, as this rank sees it."""
    return _watch.missing() if _watch is not None else []


def progress_timeout(phase: str) -> contextlib.AbstractContextManager[None]:
    """A phase in which `progress` is called again and again (updates): where it stays out, the job hangs."""
    return _watch.pace(phase, hurried=True) if _watch is not None else contextlib.nullcontext()


def no_progress_timeout(phase: str) -> contextlib.AbstractContextManager[None]:
    """A phase that may take any time, on every rank or on one that the others wait for (a report, a save)."""
    return _watch.pace(phase, hurried=False) if _watch is not None else contextlib.nullcontext()
