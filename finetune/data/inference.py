"""How a model reads examples without training on them: batches, device, precision, and this process's part of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..compute.numerics import forward_precision
from ..compute.precision import autocast_dtype
from ..config import Train
from .batches import MicroBatch, iterate_eval
from .example import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..tasks import Task


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Share:
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


ALONE = Share()


@dataclass(frozen=True)
class Inference:
    """How forward passes without gradients are made."""

    batch_size: int
    """Rows of a pass, at most; over all processes."""
    pad_id: int
    """Token under the padding."""
    device: torch.device | str = "cpu"
    autocast_dtype: torch.dtype | None = None
    """None: the model's own precision."""
    share: Share = ALONE

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        train: Train | None = None,
        *,
        batch_size: int,
        device: torch.device | str = "cpu",
        share: Share = ALONE,
    ) -> Inference:
        """With the tokenizer's padding, and in the precision of `train`, which must be settled; without one in the
        model's own."""
        dtype = None if train is None else autocast_dtype(train)
        return cls(batch_size, pad_token(tokenizer), device, dtype, share)

    def batches(
        self, examples: Sequence[Example], task: Task, *, max_tokens: int | None = None
    ) -> Iterator[MicroBatch]:
        """This process's part of every batch, as `iterate_eval` cuts them."""
        return iterate_eval(
            examples,
            task=task,
            batch_size=self.batch_size,
            pad_id=self.pad_id,
            max_tokens=max_tokens,
            share=self.share.part,
            multiple=self.share.multiple,
        )

    def precision(self) -> AbstractContextManager[Any]:
        """What surrounds a forward pass."""
        return forward_precision(self.device, self.autocast_dtype)


def pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token under the padding; of a tokenizer without one its end-of-sequence token, else 0."""
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0)
