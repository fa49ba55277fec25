"""Prefetching of micro-batches: the next step's are built and copied to a CUDA device while the current step computes.

Batches are a pure function of the step, so asking for the next one early changes nothing: the same tensors come in the
same order, and a stage that stops or jumps to another step discards at most one step's rows. One thread builds them,
pins them and queues the copy on its own stream; the computation waits for that copy on the device, not on the host. On
a CPU there is nothing to overlap, and the loop asks its batches directly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ..compute.attention import offsets_as_mask, sample_offsets
from ..compute.cuda_status import is_cuda
from ..compute.micro_batch import MicroBatch
from ..config import Train
from ..evaluate.packing_check import isolate_packed_rows

if TYPE_CHECKING:
    from ..parallel.engine import Engine

_LABELS, _STARTS, _CHOSEN = "labels", "sample starts", "chosen"
"""Names in a transfer, next to those of the inputs."""


class BatchSource(Protocol):
    """Source of batches (`flatshift.finetune.data.batches.TrainingDataLoader`)."""

    @property
    def packed(self) -> bool: ...

    def at(self, step: int) -> list[MicroBatch]: ...

    def supervised(self, step: int) -> int: ...


class DeviceTransfer(Protocol):
    """Transfer of tensors to a device in parallel with its computation."""

    device: torch.device

    def send(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
        """Queue the copies of host tensors; return the pinned ones, those on the device, and a token to wait for."""

    def join(self, tensors: dict[str, Tensor], token: Any) -> None:
        """Make the computation queued from here on wait for the copies behind `token`."""


class CudaTransfer:
    """A stream for copies from pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)

    def send(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
        """See `DeviceTransfer`."""
        pinned = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            there = {name: tensor.to(self.device, non_blocking=True) for name, tensor in pinned.items()}
            copied = torch.cuda.Event()
            copied.record(self._stream)
        return pinned, there, copied

    def join(self, tensors: dict[str, Tensor], token: Any) -> None:
        """See `DeviceTransfer`."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(token)
        for tensor in tensors.values():
            tensor.record_stream(current)  # otherwise its memory could be reused while this stream still reads it


@dataclass(frozen=True, kw_only=True)
class DeviceBatch(MicroBatch):
    """A micro-batch in pinned host memory with a copy to a device in progress."""

    lane: DeviceTransfer = field(repr=False, compare=False)
    there: dict[str, Tensor] = field(repr=False, compare=False)
    """Inputs by name, labels under `_LABELS`, indices of targets under `_CHOSEN`, offsets of samples under
    `_STARTS`."""
    token: Any = field(repr=False, compare=False)
    longest: int = 0
    """Tokens of the longest sample, if the model gets offsets of samples."""

    @classmethod
    def over(cls, lane: DeviceTransfer, micro: MicroBatch, *, apart: bool = False) -> DeviceBatch:
        """Send `micro` over `lane`; apart: with the offsets of samples in packed rows."""
        tensors, longest = {**micro.inputs, _LABELS: micro.labels}, 0
        if apart and "position_ids" in micro.inputs:
            tensors[_STARTS], longest = sample_offsets(micro.inputs["position_ids"])
        if micro.chosen is not None:
            tensors[_CHOSEN] = micro.chosen
        pinned, there, token = lane.send(tensors)
        host = {each.name: getattr(micro, each.name) for each in fields(MicroBatch)}
        host |= {"labels": pinned[_LABELS], "inputs": {name: pinned[name] for name in micro.inputs}}
        return cls(**host, lane=lane, there=there, token=token, longest=longest)

    def to(self, device: torch.device | str) -> MicroBatch:
        """Return the copy on the lane's device and make the computation wait for it; copy again for another device."""
        if torch.device(device) != self.lane.device:
            return MicroBatch(**{each.name: getattr(self, each.name) for each in fields(MicroBatch)}).to(device)
        self.lane.join(self.there, self.token)
        inputs = {name: self.there[name] for name in self.inputs}
        if self.longest:
            inputs["attention_mask"] = offsets_as_mask(self.there[_STARTS], self.longest)
        host = {each.name: getattr(self, each.name) for each in fields(MicroBatch)}
        there = {"inputs": inputs, "labels": self.there[_LABELS], "chosen": self.there.get(_CHOSEN)}
        there |= {} if self.sides is None else {"sides": self.sides.to(device)}
        return MicroBatch(**{**host, **there})


@dataclass(frozen=True)
class _StepBatches:
    step: int
    micros: list[MicroBatch]
    supervised: int


class Prefetcher:
    """Prefetching wrapper of `source`: the step after the last requested one is prepared in the background.

    All work of `source` is done by one thread, in order. An error in it is raised when its step is requested.
    """

    def __init__(self, source: BatchSource, lane: DeviceTransfer, *, apart: bool = False) -> None:
        """Start the thread. apart: the model gets the offsets of samples in packed rows
        (`flatshift.finetune.compute.attention`)."""
        self.packed = source.packed
        self._source, self._lane, self._apart = source, lane, apart
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._asked: dict[int, Future[_StepBatches]] = {}
        """The last requested step and the next one."""

    def at(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches of a step, in transfer to the device, and begin those of the next one."""
        made = self._of(step).micros
        self._begin(step + 1)
        return made

    def supervised(self, step: int) -> int:
        """Return the divisor of a step's loss."""
        return self._of(step).supervised

    def _of(self, step: int) -> _StepBatches:
        self._begin(step)
        for other in [other for other in self._asked if other not in (step, step + 1)]:
            self._asked.pop(other).cancel()
        return self._asked[step].result()

    def _begin(self, step: int) -> None:
        if step not in self._asked:
            self._asked[step] = self._thread.submit(self._make, step)

    def _make(self, step: int) -> _StepBatches:
        count = self._source.supervised(step)
        micros = [DeviceBatch.over(self._lane, micro, apart=self._apart) for micro in self._source.at(step)]
        return _StepBatches(step, list(micros), count)

    def close(self) -> None:
        """Drop unrequested batches and end the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._asked.clear()


@contextlib.contextmanager
def with_prefetch(batches: Any, engine: Engine, *, train: Train, say: Callable[[str], None]) -> Iterator[Any]:
    """Yield `batches` themselves, or on CUDA a `Prefetcher` of them, whose thread ends with the block.

    There, packed rows are attended to sample by sample where that is possible, and `say` gets a line. Pipelines,
    which cut rows on the host, ask their batches themselves.
    """
    if not is_cuda(engine.device) or engine.runner is not None:
        yield batches
        return
    with contextlib.ExitStack() as around:
        apart = batches.packed and around.enter_context(isolate_packed_rows(engine, train, engine.device, say))
        ahead = Prefetcher(batches, CudaTransfer(engine.device), apart=apart)
        around.callback(ahead.close)
        yield ahead
