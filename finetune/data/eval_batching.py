"""How a model reads examples without training on them: batches, device, precision, and this process's part of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..compute.numerics import forward_precision
from ..compute.precision import autocast_dtype
from ..config import Train
from .example import Example
from .micro_batch import Collator, MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..tasks import Task


def _same(value: Any) -> Any:
    return value


def _unheard(rows: int) -> None:
    pass


@dataclass(frozen=True)
class DataShard:
    """This process's part of an evaluation. All processes go through the same batches; the default takes every row."""

    index: int = 0
    """Which data rank this is."""
    width: int = 1
    """How many data ranks there are."""
    multiple: int = 1
    """Pad rows to a multiple of so many tokens (sequence parallelism)."""
    lockstep: bool = False
    """Whether every rank must run as many forward passes as the others (sharded weights are gathered in each)."""
    add: Callable[[np.ndarray], np.ndarray] = _same
    """Sum of an array over the data ranks."""
    union: Callable[[dict[int, Any]], dict[int, Any]] = _same
    """The items of all data ranks, by index."""

    @property
    def part(self) -> tuple[int, int]:
        """(index, width)."""
        return self.index, self.width

    def mine(self, batch: Sequence[int]) -> tuple[list[int], bool]:
        """This rank's items of a batch, and whether they count: a rank without any computes the first for company."""
        items = list(batch[self.index :: self.width])
        return (items, True) if items else (list(batch[:1]), False)


ALONE = DataShard()


@dataclass(frozen=True)
class EvalBatching:
    """How forward passes without gradients are made."""

    batch_size: int
    """Rows of a pass, at most; over all processes."""
    pad_id: int
    """Token under the padding."""
    device: torch.device | str = "cpu"
    autocast_dtype: torch.dtype | None = None
    """None: the model's own precision."""
    share: DataShard = ALONE
    beat: Callable[[int], None] = _unheard
    """Called after each batch with the number of examples that it finished, and in one process with 0 after each token
    that is written; what it raises ends the evaluation. Every rank of a mesh calls it at the same places."""

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
        """With the tokenizer's padding, and in the precision of `train`, which must be settled; without one in the
        model's own."""
        dtype = None if train is None else autocast_dtype(train)
        return cls(batch_size, pad_token(tokenizer), device, dtype, share)

    def batches(
        self, examples: Sequence[Example], task: Task, *, max_tokens: int | None = None
    ) -> Iterator[MicroBatch]:
        """Every example once, longest first (least padding, and memory peaks at once), in rows of one sample.

        As many batches come on every process, each with its part of the rows; one that has no row for this process
        comes with its first row and `samples` 0.

        max_tokens: fewer rows at a time where rows × length (of all sides) would be more than this.
        """
        collator = Collator(examples, task)
        work, (index, width), multiple = collator.work, self.share.part, self.share.multiple
        order = np.argsort(-work, kind="stable")
        start = 0
        while start < len(order):
            rows = self.batch_size
            if max_tokens is not None:
                rows = max(1, min(rows, max_tokens // int(work[order[start]])))
            batch = order[start : start + rows]
            mine = batch[index::width]
            some = [int(i) for i in (mine if len(mine) else batch[:1])]
            if task.by_answer:
                micro = collator.answered(some, [(i + 1) % len(order) for i in some], self.pad_id, multiple)
            else:
                micro = collator.collate([(i,) for i in some], self.pad_id, multiple)
            yield micro if len(mine) else replace(micro, samples=0, supervised=0)
            start += rows
            self.beat(len(batch))

    @property
    def is_heard(self) -> bool:
        """True if somebody follows the progress."""
        return self.beat is not _unheard

    def unheard(self) -> EvalBatching:
        """The same for a trial, whose rows are no progress."""
        return replace(self, beat=_unheard)

    def spread(self, rows: int) -> EvalBatching:
        """The same where every example is so many rows."""
        finished = 0

        def beat(more: int) -> None:
            nonlocal finished
            before, finished = finished // rows, finished + more
            if finished // rows > before:
                self.beat(finished // rows - before)

        return replace(self, beat=beat)

    def precision(self) -> AbstractContextManager[Any]:
        """What surrounds a forward pass."""
        return forward_precision(self.device, self.autocast_dtype)


def pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token under the padding; of a tokenizer without one its end-of-sequence token, else 0."""
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0)
