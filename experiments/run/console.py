"""Progress output (rich bars with rate and ETA on a terminal, plain lines elsewhere) and stop signals: Ctrl-C, SIGTERM
and SIGUSR1 request a stop at the next step, with state saved; a second signal stops at once."""

from __future__ import annotations

import os
import signal
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TextIO, cast

from flatshift.finetune.compute.memory import polling
from flatshift.finetune.errors import STOP_SIGNALS, EscapedStream, Interrupted, escape_control_characters
from flatshift.finetune.figures import format_rate

Draw = Callable[..., Path]
"""Function that draws the page of a finished directory and returns its path: `draw(directory)`, or `draw(directory,
*parts)` for one page of several. Passed in by the command line, so that the code that makes a directory does not import
the report."""


_EVERY_S = 4.0
"""Seconds between two lines of a task where there is no terminal."""


class _Output:
    """Time of the last output, number of other sources (bars of a terminal, ranks it started), and the current task."""

    last = 0.0
    sources = 0
    task = ""


@contextmanager
def pause_heartbeat() -> Iterator[None]:
    """Suppress the messages of `print_heartbeat` in the block."""
    _Output.sources += 1
    try:
        yield
    finally:
        _Output.sources -= 1
        _Output.last = time.monotonic()


@contextmanager
def print_heartbeat(name: str, every: float = _EVERY_S) -> Iterator[None]:
    """Print on stderr that `name` is at work whenever nothing else was printed for `every` seconds; without a terminal
    the interval grows up to a minute."""
    start = _Output.last = time.monotonic()
    wait, longest = every, every if sys.stderr.isatty() else 15 * every

    def print_message() -> None:
        nonlocal wait
        now = time.monotonic()
        if not _Output.sources and now - _Output.last >= wait:
            _Output.last, wait = now, min(2 * wait, longest)
            print(f"{name}: at work for {now - start:.0f} s{_Output.task}", file=sys.stderr, flush=True)

    with polling(print_message, every=every / 8):
        yield


_SAMPLE_S, _SAMPLES, _FEWEST_SAMPLES = 0.25, 15, 3
"""Shortest sample of a task's pace in seconds, recent samples that count, and samples that an estimate needs."""


class _PaceMeter:
    """Pace of a task since its first report, so that neither startup nor work done before a resume counts."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None
        self._last = (0, 0.0)
        self._seconds_each: deque[float] = deque(maxlen=_SAMPLES)
        self.rate: float | None = None
        """Mean units per second; None before anything was done."""

    def report(self, done: int) -> None:
        """Count `done` units as finished by now; fewer than before were rolled back."""
        now = time.monotonic()
        if self._first is None or done < self._last[0]:
            self._first = self._last = (done, now)
            return
        count, seconds = done - self._last[0], now - self._last[1]
        if done > self._first[0]:
            self.rate = (done - self._first[0]) / max(now - self._first[1], 1e-9)
        if count and seconds >= _SAMPLE_S:
            self._seconds_each.append(seconds / count)
            self._last = (done, now)

    def format_eta(self, units: int | None) -> str:
        """Format the remaining time of `units` at the median pace of recent samples; empty with too few samples."""
        if not units or len(self._seconds_each) < _FEWEST_SAMPLES:
            return ""
        return f"ETA {units * statistics.median(self._seconds_each):.0f} s"


class ProgressBar(Protocol):
    """Progress of one long task."""

    def __call__(self, done: int, note: str = "") -> None:
        """Report that `done` units are finished; `note` is printed next to the bar."""


class Console:
    """Printer to stderr, so that stdout stays machine-readable; also passes every line to `log`.

    quiet: print nothing, still log. verbose: print in full what is otherwise shortened. log: called with each line (for
    a run directory's log.txt).
    """

    def __init__(self, *, quiet: bool = False, verbose: bool = False, log: Callable[[str], None] | None = None) -> None:
        self.quiet = quiet
        self.verbose = verbose
        self.log = log
        self.terminal = sys.stderr.isatty() and not quiet

    def say(self, line: str = "") -> None:
        """Print and log a line."""
        self.outline([line], [line])

    def detail(self, line: str) -> None:
        """Log a line, and print it if `verbose`."""
        self.outline([], [line])

    def outline(self, short: Sequence[str], whole: Sequence[str]) -> None:
        """Print the lines `short`, or `whole` if `verbose`; the log always gets `whole`."""
        if self.log is not None:
            for line in whole:
                self.log(escape_control_characters(line))
        for line in () if self.quiet else whole if self.verbose else short:
            _Output.last = time.monotonic()
            print(escape_control_characters(line), file=sys.stderr, flush=True)

    @contextmanager
    def task(self, label: str, total: int | None, unit: str = "", *, brief: bool = False) -> Iterator[ProgressBar]:
        """Show a progress bar (terminal), or print a line every four seconds and at the end (elsewhere).

        brief: leave nothing on a terminal, and elsewhere print nothing for a task of less than four seconds.
        """
        if self.terminal:
            yield from self._bar(escape_control_characters(label), total, unit, brief)
        else:
            yield from self._lines(label, total, unit, brief)

    @contextmanager
    def evaluating(
        self, label: str, rows: int, *, stop: Callable[[], bool] = lambda: False
    ) -> Iterator[Callable[[int], None]]:
        """Show the progress of an evaluation of `rows` rows; yields
        `flatshift.finetune.data.eval_batching.EvalBatching.heartbeat`.

        Raises Interrupted at a heartbeat at which `stop()` is true.
        """
        with self.task(label, rows, "rows", brief=True) as bar:
            done = tokens = 0

            def heartbeat(finished: int) -> None:
                nonlocal done, tokens
                done, tokens = done + finished, 0 if finished else tokens + 1
                bar(min(done, rows), f"token {tokens} of the next answers" if tokens else "")
                if stop():
                    raise Interrupted(f"{label} stopped after {done:,} of {rows:,} rows")

            yield heartbeat

    def _bar(self, label: str, total: int | None, unit: str, brief: bool) -> Iterator[ProgressBar]:
        from rich import progress as bars

        columns: tuple[Any, ...] = (
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[rate]}"),
            bars.TextColumn("{task.fields[eta]}"),
            bars.TextColumn("{task.fields[note]}", style="dim"),
        )
        meter = _PaceMeter()
        bar = partial(bars.Progress, *columns, transient=brief)
        with pause_heartbeat(), drawn(lambda console: bar(console=console)) as progress:
            task = progress.add_task(label, total=total, note="", rate="", eta="")

            def update(done: int, note: str = "") -> None:
                meter.report(done)
                rate = format_rate(meter.rate, unit) if unit and meter.rate is not None else ""
                eta = meter.format_eta(None if total is None else total - done)
                progress.update(task, completed=done, note=escape_control_characters(note), rate=rate, eta=eta)

            yield update

    def _lines(self, label: str, total: int | None, unit: str, brief: bool) -> Iterator[ProgressBar]:
        start = last = time.monotonic()
        latest, meter = (0, ""), _PaceMeter()
        outer, _Output.task = _Output.task, f" ({label})"
        printed: tuple[int, str] | None = None

        def print_line(done: int, note: str) -> None:
            rate = format_rate(meter.rate, unit) if unit and meter.rate is not None else ""
            progress = [f"{done}{'' if total is None else f'/{total}'}", rate, f"{time.monotonic() - start:.0f} s"]
            progress.append(meter.format_eta(None if total is None else total - done))
            self.say(f"{label}: {', '.join(filter(None, progress))}{'  ' + note if note else ''}")

        def update(done: int, note: str = "") -> None:
            nonlocal last, latest, printed
            latest = (done, note)
            meter.report(done)
            if time.monotonic() - last > _EVERY_S:
                last, printed = time.monotonic(), latest
                print_line(*latest)

        try:
            yield update
        finally:
            _Output.task = outer
        if printed != latest and not (brief and printed is None):
            print_line(*latest)


@contextmanager
def drawn(make: Callable[[Any], Any]) -> Iterator[Any]:
    """Show the display that `make` returns for a console of rich; what others print above it is escaped."""
    from rich.console import Console as RichConsole

    console = RichConsole(file=getattr(sys.stderr, "unescaped", sys.stderr))
    with make(console) as display, redirect_stderr(cast("TextIO", EscapedStream(sys.stderr, redact=True))):
        yield display


@contextmanager
def catch_stop_signals(announce: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Yield `stop()`, which returns True once a signal came; False outside the main thread, which gets none."""
    requested = False

    def on_signal(number: int, _frame: object) -> None:
        nonlocal requested
        if requested:
            raise KeyboardInterrupt
        requested = True
        announce(f"{signal.Signals(number).name}: stopping after this step and saving; once more to stop at once")

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = {number: signal.signal(number, on_signal) for number in STOP_SIGNALS}
    try:
        yield lambda: requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def force_exit_on_signal(seconds: float = 0.5) -> Iterator[None]:
    """End the process with exit code 3 if it does not react to a stop signal within `seconds`.

    A signal raises KeyboardInterrupt only between two Python instructions; a long native call (a product, a
    factorisation) would delay it. For commands that stay resumable when killed at any moment; does nothing outside the
    main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    sender, receiver = socket.socketpair()
    sender.setblocking(False)
    finished = threading.Event()

    def wait() -> None:
        while (received := receiver.recv(1)) and received[0] not in STOP_SIGNALS:
            pass
        if received and not finished.wait(seconds):
            words = "flatshift: interrupted: stopped at once; the same command continues with what was kept"
            print(words, file=sys.stderr, flush=True)
            os._exit(3)

    before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    listener = threading.Thread(target=wait, name="prompt-end", daemon=True)
    listener.start()
    try:
        yield
    finally:
        finished.set()
        signal.set_wakeup_fd(before)
        sender.close()
        listener.join()
        receiver.close()
