"""Device capabilities: one small record for all code that would otherwise test the device type.

    torch.zeros((), dtype=capabilities(device).sums, device=device)

`override_capabilities` substitutes a record for a device's own, so that a step runs on tensors without values (`meta`)
as it would on the device of that record.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Capabilities:
    """Capabilities and suitable settings of one kind of device.

    kind: device type; also torch's name of it for autocast and process groups.
    bf16: True if its matrix units take bf16. Not meaningful for a CPU, whose rates are measured.
    sums: dtype of long sums, as of a loss over tokens: float64 is free on a CPU but runs at 1/64 of the rate on a GPU.
    short_products: True if bf16 attention over short rows uses batched products
        (`flatshift.finetune.compute.numerics.attention_kernel`).
    fused_optimizer: True if torch's AdamW updates all tensors in one pass.
    pinned: True if host memory can be pinned: copies are asynchronous, and shards may be offloaded.
    unread: steps whose loss and gradient norm may stay on the device before the host reads them all at once.
    reads_masks: True if a mask is inspected for whether it masks anything, so that attention can drop it: free on a
        CPU, a synchronisation on a GPU, where the host's knowledge of the rows is used instead.
    judged_tokens: tokens of documents evaluated at once, if more leave a CPU's caches; None: any number.
    """

    kind: Literal["cpu", "cuda"]
    bf16: bool
    sums: torch.dtype
    short_products: bool
    fused_optimizer: bool
    pinned: bool
    unread: int
    reads_masks: bool
    judged_tokens: int | None


CPU = Capabilities(
    kind="cpu", bf16=False, sums=torch.float64, short_products=True, fused_optimizer=True, pinned=False,
    unread=1, reads_masks=True, judged_tokens=2048,
)  # fmt: skip
CUDA = Capabilities(
    kind="cuda", bf16=True, sums=torch.float32, short_products=False, fused_optimizer=True, pinned=True,
    unread=10, reads_masks=False, judged_tokens=None,
)  # fmt: skip
"""Compute capability 9.0, as an H100's and an H200's; also used for any GPU since Ampere (8.0)."""
T4 = replace(CUDA, bf16=False)
"""Compute capability 7.5, and a V100's 7.0: matrix units for float16, none for bf16."""

_OVERRIDES: dict[str, Capabilities] = {}


def capabilities(device: torch.device | str) -> Capabilities:
    """Return the record of `device`; the CPU's for a type that is neither CPU nor CUDA (`meta` outside of
    `override_capabilities`)."""
    device = torch.device(device)
    if device.type in _OVERRIDES:
        return _OVERRIDES[device.type]
    return _cuda_capabilities(device.index) if device.type == "cuda" else CPU


@functools.cache
def _cuda_capabilities(index: int | None) -> Capabilities:
    return CUDA if torch.cuda.get_device_capability(index) >= (8, 0) else T4


@contextlib.contextmanager
def override_capabilities(record: Capabilities, *, on: str = "meta") -> Iterator[None]:
    """Make `capabilities` return `record` for devices of type `on` inside."""
    before = dict(_OVERRIDES)
    _OVERRIDES[on] = record
    try:
        yield
    finally:
        _OVERRIDES.clear()
        _OVERRIDES.update(before)


def _is_real_cuda(device: torch.device | str) -> bool:
    kind = torch.device(device).type
    return kind == "cuda" and kind not in _OVERRIDES


def copy_to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a host tensor on `device` without waiting for the copy; the tensor itself if it is already on it."""
    return tensor.to(device, non_blocking=capabilities(device).pinned)


def preserve_rng_state(devices: Iterable[torch.device]) -> contextlib.AbstractContextManager[None]:
    """Restore the random generators of the host and of `devices` on exit."""
    return torch.random.fork_rng(devices=[device for device in devices if _is_real_cuda(device)])


@contextlib.contextmanager
def seeded_rng(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the random generators of the host and of `device` with `seed` inside and restore their state on exit."""
    with preserve_rng_state([device]):
        torch.default_generator.manual_seed(seed)
        if _is_real_cuda(device):
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
