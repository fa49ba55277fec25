"""Peak memory of steps, for comparison with the plan (`flatshift.finetune.planner.memory`).

On a CUDA device it is the allocator's own peak. On a CPU a thread polls the C library during a step for its bytes in
use (glibc's mallinfo2), minus their number before the step: weights, the adapter and the optimizer's state are then not
included, and peaks between two samples are missed. The first step also loads libraries, so it counts only if it is the
only one. The growth of the process's resident memory since before all steps is reported next to it: the C library keeps
freed memory, and oneDNN what it has compiled. It may be twice as much.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..compute.memory import malloc_bytes, polling, process_bytes
from ..planner.memory import MemoryPlan

_EVERY = 0.02
"""Seconds between two samples."""


@dataclass(frozen=True)
class PlannedStep:
    """Planned memory and time of a step, as printed before step 1."""

    memory: MemoryPlan
    seconds: float | None = None
    """Seconds of a step: with the longest rows on a CUDA device, with usual ones on a CPU; None: unknown."""


class StepMemoryMeter:
    """Measures peak memory during steps, and their seconds without the first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peak: int | None = None
        self._reserved: int | None = None
        self._level = 0
        """Bytes in use before the current step (CPU)."""
        self._seconds, self._steps = 0.0, 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._base = process_bytes("RssAnon")

    @contextlib.contextmanager
    def measure_step(self) -> Iterator[None]:
        """Surround a step."""
        began = time.monotonic()
        with self._read_allocator() if self._device.type == "cuda" else self._poll_process():
            yield
        if self._steps:
            self._seconds += time.monotonic() - began
        self._steps += 1

    @contextlib.contextmanager
    def _read_allocator(self) -> Iterator[None]:
        """Read the allocator's peak; one that rises outside of steps, as in an evaluation, is ignored."""
        before = torch.cuda.max_memory_allocated(self._device)
        yield
        after = torch.cuda.max_memory_allocated(self._device)
        if after > before or self._peak is None:
            self._peak, self._reserved = after, torch.cuda.max_memory_reserved(self._device)

    @contextlib.contextmanager
    def _poll_process(self) -> Iterator[None]:
        self._level = malloc_bytes() or 0
        if self._steps == 1:  # the first step also allocates one-off memory
            self._peak = None
        try:
            with polling(self._sample, every=_EVERY):
                yield
        finally:
            self._sample()

    def _sample(self) -> None:
        now, resident = malloc_bytes(), process_bytes("RssAnon")
        if now is not None:
            self._peak = max(self._peak or 0, now - self._level)
        if resident is not None and self._base is not None:
            self._reserved = max(self._reserved or 0, resident - self._base)

    def compare(self, plan: PlannedStep) -> dict[str, Any]:
        """Return plan and measurements for `stages/<name>/done.json`. Bytes and seconds; None: unknown.

        `predicted` has the same causes as `measured`: all of them on a CUDA device; on a CPU those that come and go
        with every step (gradients, activations, work, memory of the regularizer). `reserved`: memory held by the
        allocator on a CUDA device; growth of the process on a CPU.
        """
        memory, cuda = plan.memory, self._device.type == "cuda"
        temporary = memory.gradients + memory.activations + memory.work + memory.regularizer
        return {
            "bytes": memory.causes,
            "predicted": memory.total if cuda else temporary,
            "measured": self._peak,
            "reserved": self._reserved,
            "what": "allocated" if cuda else "growth",
            "predicted_s": plan.seconds,
            "measured_s": round(self._seconds / (self._steps - 1), 6) if self._steps > 1 else None,
        }
