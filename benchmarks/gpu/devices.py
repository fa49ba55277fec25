"""The device under test: its clock, its memory, and the two peaks that a share of it may be of."""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks._harness import anonymous_rss

DENSE_BF16 = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.4,
    "H200 NVL": 835.0,
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "H800": 989.4,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10": 125.0,
}
"""TFLOP/s of dense bf16 products by the maker's data sheets (without sparsity); the first name that a device's has."""
PUBLISHED_TOKENS = 12_473.0
"""Tokens/s of the best LoRA run of an 8 B model on one H100 that we know of, at 40.6 % of the data sheet's peak."""


class Device:
    """`cpu` or a CUDA device: waits for what was asked of it before it tells the time."""

    def __init__(self, name: str) -> None:
        import torch

        self.name = name
        self.torch = torch.device(name)
        self.cuda = self.torch.type == "cuda"

    @property
    def model(self) -> str:
        """What it is called, as kept results name it."""
        import torch

        return torch.cuda.get_device_name(self.torch) if self.cuda else "cpu"

    def now(self) -> float:
        """Seconds on a clock of its own, everything done that was asked of the device."""
        import torch

        if self.cuda:
            torch.cuda.synchronize(self.torch)
        return time.perf_counter()

    def seconds(self, run: Callable[[], Any]) -> float:
        """Wall seconds of `run()` on it."""
        start = self.now()
        run()
        return self.now() - start

    def clear(self) -> None:
        """Give back whatever nobody holds, and begin a new peak."""
        import torch

        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.torch)

    def computes(self) -> bool:
        """True while it gives right results: after an illegal access nothing works in a context any more."""
        import torch

        try:
            return bool(torch.ones(8, device=self.torch).sum().item() == 8)
        except RuntimeError:
            return False

    def peak_bytes(self) -> float:
        """Most bytes given out at once since `clear`, by the device's allocator; of a CPU what is resident now."""
        import torch

        return float(torch.cuda.max_memory_allocated(self.torch) if self.cuda else anonymous_rss())


def named_device(name: str) -> str | None:
    """What the device is called, or None where it is not there."""
    import torch

    if name.startswith("cuda") and not torch.cuda.is_available():
        return None
    return Device(name).model


def out_of_memory(error: BaseException) -> bool:
    """Whether this is the device saying that a tensor does not fit."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()


def first_line(error: BaseException) -> str:
    """The first line of what an error says."""
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__


def dense_peak(model: str) -> float | None:
    """TFLOP/s of the maker's data sheet for a device of that name; None where we know none."""
    return next((peak for name, peak in DENSE_BF16.items() if name.lower() in model.lower()), None)


@functools.lru_cache(maxsize=2)
def best_product(device: str, sizes: tuple[int, ...] = (4096, 8192, 16384), repeats: int = 5) -> float:
    """TFLOP/s of the fastest bf16 matrix product: of random numbers (constant ones take less power, and so run faster),
    the median of `repeats` at each size, the best size."""
    import torch

    where, best = Device(device), 0.0
    generator = torch.Generator(where.torch).manual_seed(0)
    for size in sizes:
        a, b = (torch.randn(size, size, device=where.torch, generator=generator).bfloat16() for _ in "ab")
        out = torch.empty_like(a)
        run = functools.partial(torch.mm, a, b, out=out)
        run()
        took = statistics.median(where.seconds(run) for _ in range(repeats))
        best = max(best, 2 * size**3 / took / 1e12)
    return best


def peaks(device: str, *, sizes: tuple[int, ...] = (4096, 8192, 16384)) -> dict[str, dict[str, Any]]:
    """The best product beside the data sheet."""
    measured, promised = best_product(device, tuple(sizes)), dense_peak(Device(device).model)
    if promised is None:
        reason = "no data sheet's peak is known for this device"
        return {"product": {"ours": measured, "reason": reason}}
    return {"product": {"ours": measured, "peer": promised}}
