"""Loss and errors of each example, in evaluation mode and without gradients, and a split's metrics computed from
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from ...compute.loss import IGNORED, Head, align_targets
from ...compute.micro_batch import MicroBatch
from ...compute.numerics import evaluation_mode
from ...data.eval_batching import EvalBatching
from ...data.example import Example
from ...models.anatomy import vocabulary_size

if TYPE_CHECKING:
    from ...tasks import Task

_LOGITS = 1 << 26
"""Maximum logits in memory (one row is always allowed): 256 MiB in float32."""
_TOKENS = 256
"""Target tokens whose logits are widened (and, if the head can be called separately, computed) at a time."""


@torch.no_grad()
def score_examples(
    model: nn.Module,
    examples: Sequence[Example],
    inference: EvalBatching,
    *,
    task: Task,
    head: Head | None = None,
) -> ExampleScores:
    """Evaluate every example alone in its row (packed examples are unpacked here).

    Dropout is off inside; module modes are restored, and no random state is touched.

    Args:
        head: `flatshift.finetune.compute.loss.find_head` of this model, if any: logits are then computed for target
            tokens only.
    """
    loss = np.zeros(len(examples))
    wrong, supervised, predicted = (np.zeros(len(examples), dtype=np.int64) for _ in range(3))
    whole = not task.traits.is_sequence_level and head is None
    most = _LOGITS // vocabulary_size(model) if whole else None
    with evaluation_mode(model):
        for micro in inference.batches(examples, task, max_tokens=most):
            batch = micro.to(inference.device)
            index = np.array([row[0] for row in micro.rows])
            with inference.precision():
                if task.traits.is_sequence_level:
                    logits = model(**batch.inputs).logits.float()
                    nats = task.example_losses(logits, batch.labels)
                    rows = torch.arange(len(index), device=nats.device)
                    misses = ~task.answered_right(logits, batch.labels)
                    predicted[index] = logits.argmax(-1).cpu().numpy()
                else:
                    nats, misses, rows = _score_tokens(model, batch, task, head)
            loss[index] = _sum_by_row(nats.double(), rows, len(index))
            wrong[index] = _sum_by_row(misses.long(), rows, len(index))
            supervised[index] = _sum_by_row(torch.ones_like(rows), rows, len(index))
    return ExampleScores(loss, wrong, supervised, predicted if task.one_class else None)


def _sum_by_row(values: Tensor, rows: Tensor, count: int) -> np.ndarray:
    return values.new_zeros(count).index_add_(0, rows, values).cpu().numpy()


def _score_tokens(model: nn.Module, batch: MicroBatch, task: Task, head: Head | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return for every target token: −log p (n,), True if another token is likelier (n,), and its row (n,)."""
    if head is None:
        return _score_values(model(**batch.inputs).logits, batch.labels, task, lambda logits: logits)
    linear = head.linear
    logits_of = lambda part: F.linear(part, linear.weight, linear.bias)  # noqa: E731
    return head.taken(
        lambda hidden: _score_values(hidden, batch.labels, task, logits_of), lambda: model(**batch.inputs)
    )


def _score_values(
    values: Tensor, labels: Tensor, task: Task, logits_of: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Score like `_score_tokens`; `values` (B, T, D) become logits by `logits_of`, some target tokens at a time."""
    values, targets = align_targets(values, labels, task)
    mask = targets != IGNORED
    kept, wanted, rows = values[mask], targets[mask], mask.nonzero()[:, 0]
    nats = torch.empty(len(wanted), dtype=torch.float32, device=wanted.device)
    misses = torch.empty(len(wanted), dtype=torch.bool, device=wanted.device)
    for start in range(0, len(wanted), _TOKENS):
        part = slice(start, start + _TOKENS)
        logits = logits_of(kept[part]).float()
        nats[part] = F.cross_entropy(logits, wanted[part], reduction="none")
        misses[part] = logits.argmax(-1) != wanted[part]
    return nats, misses, rows


@dataclass(frozen=True)
class ExampleScores:
    """Scores of n examples, in order, against the labels they were encoded with."""

    loss: NDArray[np.float64]
    """(n,) −log p summed over the example's target tokens (or its class), nats."""
    wrong: NDArray[np.int64]
    """(n,) target tokens that are not the likeliest (0 or 1 for classification)."""
    supervised: NDArray[np.int64]
    """(n,) target tokens (1 for classification)."""
    predicted: NDArray[np.int64] | None = None
    """(n,) the likeliest class; None for tasks that predict tokens or sets of classes."""


@dataclass(frozen=True)
class LabelNoise:
    """Wrong labels among n training examples."""

    mask: NDArray[np.bool_]
    """(n,) True if the label was replaced by noise."""
    true: NDArray[np.int64] | None = None
    """(n,) original class; None for tasks that predict tokens."""


def split_metrics(split: str, judged: ExampleScores, flipped: LabelNoise | None = None) -> dict[str, float | None]:
    """Return `<split>.loss, .error` and, for tasks that predict tokens, `.exact_error`.

    With `flipped` also the error on clean and on noisy examples, and the shares of the latter that were memorised or
    recovered. A share of no examples is None. Means are over target tokens, or examples for classification;
    `exact_error`, `memorised` and `recovered` count examples.
    """
    exact = judged.wrong > 0
    figures: dict[str, float | None] = {
        "loss": _ratio(judged.loss.sum(), judged.supervised.sum()),
        "error": _ratio(judged.wrong.sum(), judged.supervised.sum()),
    }
    if judged.predicted is None:
        figures["exact_error"] = _ratio(exact.sum(), len(exact))
    if flipped is not None:
        noisy = flipped.mask
        recovered = None
        if judged.predicted is not None and flipped.true is not None:
            recovered = _ratio((judged.predicted == flipped.true)[noisy].sum(), noisy.sum())
        figures |= {
            "error_clean": _ratio(judged.wrong[~noisy].sum(), judged.supervised[~noisy].sum()),
            "error_noisy": _ratio(judged.wrong[noisy].sum(), judged.supervised[noisy].sum()),
            "memorised": _ratio((~exact[noisy]).sum(), noisy.sum()),
            "recovered": recovered,
        }
    return {f"{split}.{name}": value for name, value in figures.items()}


def _ratio(total: Any, count: Any) -> float | None:
    return float(total) / float(count) if count else None
