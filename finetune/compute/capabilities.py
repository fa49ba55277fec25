"""What a device decides of a run: one small record, asked by all that would else ask for its type.

    able = capabilities(device)
    torch.zeros((), dtype=able.sums, device=device)

What must really touch `torch.cuda` are the functions below. `rehearsed` puts a record in the place of a device's own,
so that a step goes on tensors without values (`meta`) as it would on the device of that record.
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
    """What one kind of device can do, and what suits it."""

    kind: Literal["cpu", "cuda"]
    """Also torch's name of the device type, by which autocast and process groups are chosen."""
    bf16: bool
    """Whether its matrix units take bf16. Of a CPU this says nothing: what it does faster is measured."""
    sums: torch.dtype
    """Of long sums, as of a loss over tokens: float64 costs a CPU nothing, and a GPU a sixty-fourth of its rate."""
    short_products: bool
    """Whether bf16 attention over short rows is made of batched products
    (`flatshift.finetune.compute.numerics.attention`)."""
    fused_optimizer: bool
    """Whether torch's AdamW goes over all tensors in one pass."""
    pinned: bool
    """Whether host memory can be pinned, so that copies to the device wait for nothing."""
    pages: bool
    """Whether it can page host memory in, as paged optimizer states and offloaded shards need."""
    unread: int
    """Updates whose loss and gradient norm may stay on the device before the host reads them, all at once. A read waits
    for everything that was launched; a CPU has nothing under way, so there each update is read."""
    reads_masks: bool
    """Whether a mask is looked at for whether it masks anything, which lets attention do without it: free on a CPU, a
    wait on a GPU, where what the host knows of the rows must do."""
    judged_tokens: int | None
    """Tokens of documents that are judged at once, where more would only be slower: on a CPU activations leave the
    caches (the shipped decoder on rows of 200 tokens: 8 at a time take .71 of the time of 32); None: any number."""

    @property
    def autocast(self) -> str:
        """The device type that `torch.autocast` is to be told."""
        return self.kind


CPU = Capabilities(
    kind="cpu",
    bf16=False,
    sums=torch.float64,
    short_products=True,
    fused_optimizer=True,
    pinned=False,
    pages=False,
    unread=1,
    reads_masks=True,
    judged_tokens=2048,
)
CUDA = Capabilities(
    kind="cuda",
    bf16=True,
    sums=torch.float32,
    short_products=False,
    fused_optimizer=True,
    pinned=True,
    pages=True,
    unread=10,
    reads_masks=False,
    judged_tokens=None,
)
H200 = CUDA
"""Compute capability 9.0, as an H100's; also that of any GPU since Ampere (8.0)."""
T4 = replace(CUDA, bf16=False)
"""Compute capability 7.5, as a V100's 7.0: matrix units for float16, none for bf16."""

_REHEARSED: dict[str, Capabilities] = {}


def capabilities(device: torch.device | str) -> Capabilities:
    """The record of `device`; of a type that is neither a CPU nor CUDA (`meta` outside of `rehearsed`) a CPU's."""
    place = torch.device(device)
    if place.type in _REHEARSED:
        return _REHEARSED[place.type]
    return _of_cuda(place.index) if place.type == "cuda" else CPU


@functools.cache
def _of_cuda(index: int | None) -> Capabilities:
    return H200 if torch.cuda.get_device_capability(index) >= (8, 0) else T4


@contextlib.contextmanager
def rehearsed(record: Capabilities, *, on: str = "meta") -> Iterator[None]:
    """Inside, `capabilities` answers for devices of the type `on` with `record`."""
    before = _REHEARSED.get(on)
    _REHEARSED[on] = record
    try:
        yield
    finally:
        del _REHEARSED[on]
        if before is not None:
            _REHEARSED[on] = before


def _real(device: torch.device | str) -> bool:
    kind = torch.device(device).type
    return kind == "cuda" and kind not in _REHEARSED


def copied(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A host tensor on `device`, which the host does not wait for; itself where it lies there already."""
    return tensor.to(device, non_blocking=capabilities(device).pinned)


def kept_draws(devices: Iterable[torch.device]) -> contextlib.AbstractContextManager[None]:
    """Afterwards the generators of the host and of `devices` are as they were."""
    return torch.random.fork_rng(devices=[device for device in devices if _real(device)])


def seed_draws(seed: int, device: torch.device) -> None:
    """Begin the generators of the host and of `device` at `seed`, inside of `kept_draws`."""
    torch.default_generator.manual_seed(seed)
    if _real(device):
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
