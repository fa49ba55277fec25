"""Memory and duration of an evaluation in closed form, printed before step 1.

Nothing is kept for a backward pass: the peak is one block's activations for a batch of the longest sequences, or, when
answers are generated, the key-value cache and the logits of the last positions. The duration is measured in optimizer
steps, each of which computes about twice as much as reading its tokens (the weights are frozen).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..compute.memory import slice_rows
from ..config import WIDTHS, Train
from ..figures import format_bytes
from .footprint import BackboneSizes

if TYPE_CHECKING:
    from ..tasks import Task

_PASSES = 2
"""Forward passes over as many tokens that cost as much as a step."""
_FEWEST = 16
"""Tokens of a pass below which it takes no less time: reading the weights dominates."""


@dataclass(frozen=True)
class EvaluationPlan:
    """Cost of evaluating all splits together."""

    read: int
    """Tokens processed in parallel with others of their sequence."""
    written: int
    """Tokens generated one after the other, at most."""
    memory: int
    """Bytes on top of weights and adapter."""
    passes: float
    """Computation, in tokens read."""

    def updates(self, tokens: float) -> float:
        """Return the number of optimizer steps of `tokens` tokens that take as long."""
        return self.passes / (_PASSES * max(tokens, 1))

    def line(self, rows: str, *, tokens: float, seconds: float | None) -> str:
        """Format in one line. rows: description such as `dev 12, test 16`; tokens, seconds: of one optimizer step."""
        count = self.updates(tokens)
        word = f"{count:,.0f} steps" if count >= 1.5 else "a step" if count >= 0.5 else "a part of a step"
        took = "" if seconds is None else f" ({seconds * count:.3g} s)"
        written = f" and at most {self.written:,} written" if self.written else ""
        return (
            f"evaluation: rows of {rows}: {self.read:,} tokens are read{written}, about as long as {word}{took}; "
            f"{format_bytes(self.memory)} of memory next to the weights"
        )


def plan_evaluation(
    sizes: BackboneSizes,
    task: Task,
    train: Train,
    *,
    batch_size: int,
    rows: int,
    tokens: int,
    longest: int,
    classes: int = 0,
    device: str = "cuda",
) -> EvaluationPlan:
    """Estimate the evaluation of `rows` examples with `tokens` tokens in total, the longest with `longest`;
    `batch_size` examples at once on this rank.

    classes: completions ranked per example.
    """
    width, batch = WIDTHS[train.precision], min(batch_size, max(rows, 1))
    kept = 2 * width * len(sizes.blocks) * sizes.groups * sizes.head  # keys and values per token
    writes = task.score == "generate"
    beams = (task.num_beams or 1) if writes else 1
    new = task.max_new_tokens if writes else 0
    block = width * (3 * sizes.hidden + 3 * sizes.feed_forward + 2 * (sizes.heads + sizes.groups) * sizes.head)
    work = batch * longest * (block + 8 * sizes.hidden) + width * batch * longest**2
    whole = batch if sizes.whole_rows else min(batch * longest, slice_rows(sizes.outputs, device, width))
    reading = work + whole * sizes.outputs * (4 + width)
    caching = 0
    if writes:
        caching = batch * beams * ((longest + new) * kept + sizes.outputs * (8 + width)) + work
    elif classes:
        caching = batch * classes * (longest * kept + sizes.outputs * (4 + width)) + work
    read = tokens * (1 + (writes or bool(classes)) + task.has_reference)
    steps = -(-rows // batch) * new
    return EvaluationPlan(
        read=read,
        written=rows * new,
        memory=max(reading, caching),
        passes=read + steps * max(batch * beams, _FEWEST) + rows * classes,
    )
