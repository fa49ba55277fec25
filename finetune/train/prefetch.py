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
from typing import Any

import torch
from torch import Tensor

from ..compute.attention import offsets_as_mask, sample_offsets
from ..compute.cuda_status import is_cuda
from ..compute.micro_batch import MicroBatch
from ..config import Train
from ..data.batches import TrainingDataLoader
from ..evaluate.packing_check import isolate_packed_rows
from ..parallel.engine import Engine

_LABELS, _STARTS, _CHOSEN = "labels", "sample starts", "chosen"
"""Names in a transfer, next to those of the inputs."""


class CudaTransfer:
    """Copies of tensors from pinned memory to a device, on a stream of their own, in parallel with its computation."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)

    def send(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
        """Queue the copies of host tensors; return the pinned ones, those on the device, and a token to wait for."""
        pinned = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            on_device = {name: tensor.to(self.device, non_blocking=True) for name, tensor in pinned.items()}
            event = torch.cuda.Event()
            event.record(self._stream)
        return pinned, on_device, event

    def join(self, tensors: dict[str, Tensor], token: Any) -> None:
        """Make the computation queued from here on wait for the copies behind `token`."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(token)
        for tensor in tensors.values():
            tensor.record_stream(current)  # otherwise its memory could be reused while this stream still reads it


@dataclass(frozen=True, kw_only=True)
class DeviceBatch(MicroBatch):
    """A micro-batch in pinned host memory with a copy to a device in progress."""

    transfer: CudaTransfer = field(repr=False, compare=False)
    on_device: dict[str, Tensor] = field(repr=False, compare=False)
    """Inputs by name, labels under `_LABELS`, indices of targets under `_CHOSEN`, offsets of samples under
    `_STARTS`."""
    token: Any = field(repr=False, compare=False)
    longest: int = 0
    """Tokens of the longest sample, if the model gets offsets of samples."""

    @classmethod
    def send(cls, micro: MicroBatch, transfer: CudaTransfer, *, offsets: bool = False) -> DeviceBatch:
        """Send `micro` by `transfer`. offsets: with those of the samples in packed rows."""
        tensors, longest = {**micro.inputs, _LABELS: micro.labels}, 0
        if offsets and "position_ids" in micro.inputs:
            tensors[_STARTS], longest = sample_offsets(micro.inputs["position_ids"])
        if micro.chosen is not None:
            tensors[_CHOSEN] = micro.chosen
        pinned, on_device, token = transfer.send(tensors)
        host = _micro_batch_fields(micro) | {
            "labels": pinned[_LABELS],
            "inputs": {name: pinned[name] for name in micro.inputs},
        }
        return cls(**host, transfer=transfer, on_device=on_device, token=token, longest=longest)

    def to(self, device: torch.device | str) -> MicroBatch:
        """Return the copy on the transfer's device and make the computation wait for it; copy again for another
        device."""
        host = _micro_batch_fields(self)
        if torch.device(device) != self.transfer.device:
            return MicroBatch(**host).to(device)
        self.transfer.join(self.on_device, self.token)
        inputs = {name: self.on_device[name] for name in self.inputs}
        if self.longest:
            inputs["attention_mask"] = offsets_as_mask(self.on_device[_STARTS], self.longest)
        host |= {"inputs": inputs, "labels": self.on_device[_LABELS], "chosen": self.on_device.get(_CHOSEN)}
        host |= {} if self.preference is None else {"preference": self.preference.to(device)}
        return MicroBatch(**host)


def _micro_batch_fields(micro: MicroBatch) -> dict[str, Any]:
    return {each.name: getattr(micro, each.name) for each in fields(MicroBatch)}


class Prefetcher:
    """Prefetching wrapper of `source`: the step after the last requested one is prepared in the background.

    All work of `source` is done by one thread, in order. An error in it is raised when its step is requested.
    """

    def __init__(self, source: TrainingDataLoader, transfer: CudaTransfer, *, offsets: bool = False) -> None:
        """Start the thread. offsets: the model gets those of the samples in packed rows
        (`flatshift.finetune.compute.attention`)."""
        self.packed = source.packed
        self._source, self._transfer, self._offsets = source, transfer, offsets
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._steps: dict[int, Future[tuple[list[MicroBatch], int]]] = {}
        """Micro-batches and the loss's divisor of the last requested step and of the next one."""

    def at(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches of a step, in transfer to the device, and begin those of the next one."""
        micros, _ = self._prepared(step)
        self._begin(step + 1)
        return micros

    def supervised(self, step: int) -> int:
        """Return the divisor of a step's loss."""
        _, divisor = self._prepared(step)
        return divisor

    def _prepared(self, step: int) -> tuple[list[MicroBatch], int]:
        self._begin(step)
        for stale in self._steps.keys() - {step, step + 1}:
            self._steps.pop(stale).cancel()
        return self._steps[step].result()

    def _begin(self, step: int) -> None:
        if step not in self._steps:
            self._steps[step] = self._thread.submit(self._prepare, step)

    def _prepare(self, step: int) -> tuple[list[MicroBatch], int]:
        divisor = self._source.supervised(step)
        micros = self._source.at(step)
        return [DeviceBatch.send(micro, self._transfer, offsets=self._offsets) for micro in micros], divisor

    def close(self) -> None:
        """Drop unrequested batches and end the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._steps.clear()


@contextlib.contextmanager
def with_prefetch(batches: Any, engine: Engine, *, train: Train, log: Callable[[str], None]) -> Iterator[Any]:
    """Yield `batches` themselves, or on CUDA a `Prefetcher` of them, whose thread ends with the block.

    There, packed rows are attended to sample by sample where that is possible, and `log` gets a line. Pipelines,
    which cut rows on the host, ask their batches themselves.
    """
    if not is_cuda(engine.device) or engine.runner is not None:
        yield batches
        return
    with contextlib.ExitStack() as stack:
        offsets = batches.packed and stack.enter_context(isolate_packed_rows(engine, train, engine.device, log))
        prefetcher = Prefetcher(batches, CudaTransfer(engine.device), offsets=offsets)
        stack.callback(prefetcher.close)
        yield prefetcher
