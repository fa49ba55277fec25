"""Progress of long solves as plain lines with a rate and the time left."""

from __future__ import annotations

import time
from collections.abc import Callable

ITERATIONS = "transport iterations"
"""Name of the stage that counts iterations, up to their maximum; all others count rows."""


class ProgressPrinter:
    """`progress` callable for the solver: prints each stage's position, rate and time left.

    show: called with one line. every_s: seconds between lines of a stage (its end is always shown). clock: seconds.
    """

    def __init__(
        self, show: Callable[[str], None] = print, *, every_s: float = 5.0, clock: Callable[[], float] = time.monotonic
    ):
        self._show, self._every_s, self._clock = show, every_s, clock
        self._stage: str | None = None
        self._began = self._told = 0.0
        self._offset = 0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = self._clock()
        if stage != self._stage:
            # The first call comes after the first rows, whose time is unknown: rates are measured from there.
            self._stage, self._began, self._told, self._offset = stage, now, now, done
            if done < total:
                return
        elapsed = now - self._began
        if done < total and now - self._told < self._every_s:
            return
        self._told = now
        unit = "" if stage == ITERATIONS else " rows"
        if done >= total:
            self._show(f"{stage}: {total:,}{unit} in {elapsed:.1f} s")
            return
        rate = (done - self._offset) / elapsed if elapsed > 0 else 0.0
        remaining = f"{(total - done) / rate:.0f} s left" if rate > 0 else "time remaining unknown"
        self._show(f"{stage}: {done:,} of {total:,}{unit} ({done / total:.0%}), {rate:,.0f}{unit}/s, {remaining}")
