"""Batching for forward passes without gradients: batches, device, precision, and this process's share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..compute.micro_batch import MicroBatch
from ..compute.numerics import forward_precision
from ..compute.precision import autocast_dtype
from ..compute.protocols import LossTask
from ..config import Train
from .collator import Collator
from .example import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def _identity(value: Any) -> Any:
    return value


def _ignore_progress(rows: int) -> None:
    pass


@dataclass(frozen=True)
class DataShard:
    """This process's share of an evaluation. All processes iterate over the same batches; the default takes every
    row."""

    index: int = 0
    """Index of this data rank, of `width`."""
    width: int = 1
    multiple: int = 1
    """Pad rows to a multiple of this many tokens (sequence parallelism)."""
    lockstep: bool = False
    """True if every rank must run the same number of forward passes (each gathers sharded weights)."""
    add: Callable[[np.ndarray], np.ndarray] = _identity
    """Sum of an array over the data ranks."""
    union: Callable[[dict[int, Any]], dict[int, Any]] = _identity
    """Union of the items of all data ranks, by index."""

    def mine(self, batch: Sequence[int]) -> tuple[list[int], bool]:
        """Return this rank's items of a batch, and whether they count. A rank without any gets the first item, which
        does not count, so that all ranks run a forward pass."""
        items = list(batch[self.index :: self.width])
        return (items, True) if items else (list(batch[:1]), False)


ALONE = DataShard()


@dataclass(frozen=True)
class EvalBatching:
    """Settings of forward passes without gradients."""

    batch_size: int
    """Maximum rows per pass, over all processes."""
    pad_id: int
    device: torch.device | str = "cpu"
    autocast_dtype: torch.dtype | None = None
    """None: the model's own precision."""
    share: DataShard = ALONE
    heartbeat: Callable[[int], None] = _ignore_progress
    """Progress callback, called after each batch with the number of finished examples, and in a single process with
    0 after each generated token; an exception from it ends the evaluation. Every rank of a mesh calls it at the same
    points."""

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        train: Train | None = None,
        *,
        batch_size: int,
        device: torch.device | str = "cpu",
        share: DataShard = ALONE,
    ) -> EvalBatching:
        """Return settings with the tokenizer's padding and the precision of `train`, whose automatic values must be
        resolved; without `train`, the model's own precision."""
        dtype = None if train is None else autocast_dtype(train)
        return cls(batch_size, get_pad_token_id(tokenizer), device, dtype, share)

    def batches(
        self, examples: Sequence[Example], task: LossTask, *, max_tokens: int | None = None
    ) -> Iterator[MicroBatch]:
        """Yield every example once, in rows of one sample, longest first (little padding, and memory peaks at the
        start).

        Every process gets the same number of batches, each with its share of the rows; a batch without a row for this
        process has the batch's first row with `samples` 0. max_tokens: take fewer rows per batch if rows × length (over
        all sides) would exceed this.
        """
        collator = Collator(examples, task)
        multiple, work = self.share.multiple, collator.work
        order = np.argsort(-work, kind="stable")
        start = 0
        while start < len(order):
            rows = self.batch_size
            if max_tokens is not None:
                rows = max(1, min(rows, max_tokens // int(work[order[start]])))
            batch = order[start : start + rows].tolist()
            own, counts = self.share.mine(batch)
            if task.traits.is_answer_level:
                # Mismatched answers come from the next example in file order, independent of the batch size.
                micro = collator.collate_answers(own, [(i + 1) % len(order) for i in own], self.pad_id, multiple)
            else:
                micro = collator.collate([(i,) for i in own], self.pad_id, multiple)
            yield micro if counts else replace(micro, samples=0, supervised=0)
            start += rows
            self.heartbeat(len(batch))

    @property
    def has_heartbeat(self) -> bool:
        """True if a progress callback is set."""
        return self.heartbeat is not _ignore_progress

    def without_heartbeat(self) -> EvalBatching:
        """Return a copy without the callback, for trial passes that are no progress."""
        return replace(self, heartbeat=_ignore_progress)

    def spread(self, rows: int) -> EvalBatching:
        """Return a copy that counts `rows` rows as one example for the callback."""
        finished = 0

        def count(more: int) -> None:
            nonlocal finished
            before, finished = finished // rows, finished + more
            if finished // rows > before:
                self.heartbeat(finished // rows - before)

        return replace(self, heartbeat=count)

    def precision(self) -> AbstractContextManager[Any]:
        """Return the context manager for a forward pass."""
        return forward_precision(self.device, self.autocast_dtype)


def get_pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the padding token; for a tokenizer without one its end-of-sequence token, else 0."""
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0)
