"""How much memory updates take, to be put beside the plan (`finetune.planner.memory`).

On a CUDA device it is the allocator's own peak. On a CPU nobody counts, so a thread samples the process's anonymous
memory while an update runs, and what the process held before the first one is taken off: libraries, weights and the
adapter are then not in it, and peaks between two samples are missed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..planner.memory import MemoryPlan

_EVERY = 0.02
"""Seconds between two samples."""


@dataclass(frozen=True)
class PlannedUpdate:
    """What was said before step 1."""

    memory: MemoryPlan
    seconds: float | None = None
    """Of an update of the longest rows; None: the device's figures are not known."""


class UpdateMeter:
    """The peak of memory during updates, and their seconds without the first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peak: int | None = None
        self._reserved: int | None = None
        self._seconds: list[float] = [0.0, 0.0]  # sum and count of all but the first
        self._first = True
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._base = process_bytes("RssAnon")

    @contextlib.contextmanager
    def during(self) -> Iterator[None]:
        """Around an update."""
        began = time.monotonic()
        with self._allocator() if self._device.type == "cuda" else self._sampled():
            yield
        if not self._first:
            self._seconds[0] += time.monotonic() - began
            self._seconds[1] += 1
        self._first = False

    @contextlib.contextmanager
    def _allocator(self) -> Iterator[None]:
        """What rises outside of updates, in an evaluation, is not theirs."""
        before = torch.cuda.max_memory_allocated(self._device)
        yield
        after = torch.cuda.max_memory_allocated(self._device)
        if after > before or self._peak is None:
            self._peak, self._reserved = after, torch.cuda.max_memory_reserved(self._device)

    @contextlib.contextmanager
    def _sampled(self) -> Iterator[None]:
        done = threading.Event()

        def watch() -> None:
            while not done.wait(_EVERY):
                self._sample()

        watcher = threading.Thread(target=watch, name="memory of an update", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()
            self._sample()

    def _sample(self) -> None:
        now = process_bytes("RssAnon")
        if now is not None and self._base is not None:
            self._peak = max(self._peak or 0, now - self._base)

    def beside(self, planned: PlannedUpdate) -> dict[str, Any]:
        """Plan and measure as `stages/<name>/done.json` has them. Bytes and seconds; None: not known.

        `predicted` is of the same causes as `measured`: all of them on a CUDA device, on a CPU those that come with
        updates (gradients, optimizer state, activations).
        """
        memory, (total, count) = planned.memory, self._seconds
        cuda = self._device.type == "cuda"
        return {
            "bytes": memory.causes,
            "predicted": memory.total if cuda else memory.gradients + memory.optimizer + memory.activations,
            "measured": self._peak,
            "reserved": self._reserved,
            "what": "allocated" if cuda else "growth",
            "predicted_s": planned.seconds,
            "measured_s": round(total / count, 6) if count else None,
        }


def process_bytes(field: str) -> int | None:
    """Of this process by /proc/self/status: VmRSS all that is resident, RssAnon without mapped files; None where the
    kernel does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) << 10
    return None
