"""Measurements for tests of `benchmarks.gpu.runner`: children import them by name."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from benchmarks.gpu.measurements import Figures


def counted(*, device: str, log: str, name: str, value: float = 1.0) -> Figures:
    """Note the call, and give a figure."""
    with Path(log).open("a") as file:
        file.write(f"{name}\n")
    return {"figure": {"ours": value, "peer": [2.0]}}


def killed_once(*, device: str, log: str, name: str) -> Figures:
    """End the process at the first call."""
    if name not in Path(log).read_text().split():
        counted(device=device, log=log, name=name)
        os.kill(os.getpid(), signal.SIGKILL)
    return counted(device=device, log=log, name=name)


def too_large(*, device: str, log: str, name: str) -> Figures:
    """As a GPU that is full."""
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def broken(*, device: str, log: str, name: str) -> Figures:
    """A failure that nobody expected."""
    raise RuntimeError("an illegal memory access was encountered")


def slow(*, device: str, log: str, name: str, seconds: float) -> Figures:
    """Note the call, and take long."""
    found = counted(device=device, log=log, name=name)
    time.sleep(seconds)
    return found
