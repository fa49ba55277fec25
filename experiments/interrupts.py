"""Ctrl-C and SIGTERM as a request to stop at the next step, with state saved; a second one stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def graceful_stop(announce: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Yield `stop()`, true once a signal came. Outside the main thread signals cannot be caught: never true there."""
    asked = False

    def on_signal(number: int, _frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        announce(f"{signal.Signals(number).name}: stopping after this step and saving; once more to stop at once")

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
