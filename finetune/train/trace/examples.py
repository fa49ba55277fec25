"""Rows that a stage's trace evaluates, the loss and errors of each of them (in evaluation mode, without gradients), and
a split's metrics computed from these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from ...compute.loss import IGNORED, Head, align_targets
from ...compute.micro_batch import MicroBatch
from ...compute.numerics import evaluation_mode
from ...config import TraceRecording
from ...data.eval_batching import EvalBatching
from ...data.example import Example
from ...data.rows import limit_rows
from ...models.anatomy import vocabulary_size
from ...seeds import derive_seed
from ...tasks import Task

_LOGITS = 1 << 26
"""Maximum logits in memory (one row is always allowed): 256 MiB in float32."""
_TOKENS = 256
"""Target tokens whose logits are widened (and, if the head can be called separately, computed) at a time."""


@torch.no_grad()
def score_examples(
    model: nn.Module, examples: Sequence[Example], inference: EvalBatching, *, task: Task, head: Head | None = None
) -> ExampleScores:
    """Evaluate every example alone in its row (packed examples are unpacked here).

    Dropout is off inside; module modes are restored, and no random state is touched.

    head: `flatshift.finetune.compute.loss.find_head` of this model, if any: logits are then computed for target tokens
    only.
    """
    loss = np.zeros(len(examples))
    wrong, supervised, predicted = (np.zeros(len(examples), dtype=np.int64) for _ in range(3))
    max_tokens = None if task.traits.is_sequence_level or head is not None else _LOGITS // vocabulary_size(model)
    with evaluation_mode(model):
        for micro in inference.batches(examples, task, max_tokens=max_tokens):
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
            for sums, values in ((loss, nats.double()), (wrong, misses.long()), (supervised, torch.ones_like(rows))):
                sums[index] = values.new_zeros(len(index)).index_add_(0, rows, values).cpu().numpy()
    return ExampleScores(loss, wrong, supervised, predicted if task.one_class else None)


def _score_tokens(model: nn.Module, batch: MicroBatch, task: Task, head: Head | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return for every target token: −log p (n,), True if another token is likelier (n,), and its row (n,)."""

    def score(values: Tensor, logits_of: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """`values` (B, T, D) become logits by `logits_of`, some target tokens at a time."""
        values, targets = align_targets(values, batch.labels, task)
        mask = targets != IGNORED
        values, targets, rows = values[mask], targets[mask], mask.nonzero()[:, 0]
        nats = torch.empty(len(targets), dtype=torch.float32, device=targets.device)
        misses = torch.empty(len(targets), dtype=torch.bool, device=targets.device)
        for start in range(0, len(targets), _TOKENS):
            tokens = slice(start, start + _TOKENS)
            logits = logits_of(values[tokens]).float()
            nats[tokens] = F.cross_entropy(logits, targets[tokens], reduction="none")
            misses[tokens] = logits.argmax(-1) != targets[tokens]
        return nats, misses, rows

    if head is None:
        return score(model(**batch.inputs).logits, lambda logits: logits)
    return head.taken(lambda hidden: score(hidden, head.logits), lambda: model(**batch.inputs))


@dataclass(frozen=True)
class ExampleScores:
    """Scores of n examples, in order, against the labels they were encoded with; (n,) each.

    loss: −log p summed over the example's target tokens (or its class), nats.
    wrong: target tokens that are not the likeliest (0 or 1 for classification).
    supervised: target tokens (1 for classification).
    predicted: the likeliest class; None for tasks that predict tokens or sets of classes.
    """

    loss: NDArray[np.float64]
    wrong: NDArray[np.int64]
    supervised: NDArray[np.int64]
    predicted: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class LabelNoise:
    """Wrong labels among n training examples."""

    mask: NDArray[np.bool_]
    """(n,) True if the label was replaced by noise."""
    true: NDArray[np.int64] | None = None
    """(n,) original class; None for tasks that predict tokens."""


def split_metrics(split: str, scores: ExampleScores, flipped: LabelNoise | None = None) -> dict[str, float | None]:
    """Return `<split>.loss, .error` and, for tasks that predict tokens, `.exact_error`, else `.error.items`.

    With `flipped` also the error on clean and on noisy examples, and the shares of the latter that were memorised or
    recovered. A share of no examples is None. Means are over target tokens, or examples for classification;
    `exact_error`, `memorised` and `recovered` count examples.
    """
    exact = scores.wrong > 0
    metrics: dict[str, float | None] = {
        "loss": _ratio(scores.loss.sum(), scores.supervised.sum()),
        "error": _ratio(scores.wrong.sum(), scores.supervised.sum()),
    }
    if scores.predicted is None:
        metrics["exact_error"] = _ratio(exact.sum(), len(exact))
    else:
        metrics["error.items"] = len(exact)
    if flipped is not None:
        noisy = flipped.mask
        recovered = None
        if scores.predicted is not None and flipped.true is not None:
            recovered = _ratio((scores.predicted == flipped.true)[noisy].sum(), noisy.sum())
        metrics |= {
            "error_clean": _ratio(scores.wrong[~noisy].sum(), scores.supervised[~noisy].sum()),
            "error_noisy": _ratio(scores.wrong[noisy].sum(), scores.supervised[noisy].sum()),
            "memorised": _ratio((~exact[noisy]).sum(), noisy.sum()),
            "recovered": recovered,
        }
    return {f"{split}.{name}": value for name, value in metrics.items()}


def _ratio(total: Any, count: Any) -> float | None:
    return float(total) / float(count) if count else None


@dataclass(frozen=True)
class Recording:
    """Settings of a stage's trace, and the rows that are evaluated for it."""

    record: TraceRecording
    splits: Mapping[str, Sequence[Example]]
    """Rows of `train`, `dev` and `test`, if not empty."""
    flipped: LabelNoise | None = None
    """Rows of `train` with a wrong label; None without label noise."""
    curved: Sequence[Example] = ()
    """Training rows whose mean loss is used for curvature."""

    @classmethod
    def choose(
        cls,
        record: TraceRecording,
        *,
        train: Sequence[Example],
        dev: Sequence[Example],
        test: Sequence[Example],
        seed: int,
        flipped: Sequence[str] | None = None,
        true_labels: Mapping[str, int] | None = None,
    ) -> Recording:
        """Choose the rows that `record` requires.

        seed: of the choice of training rows (`train.seed`); that of held-out rows is the same for every run.
        flipped: ids of the training rows with a wrong label; None without label noise.
        true_labels: original class of each of them by id, if rows have classes.
        """

        def subsample(examples: Sequence[Example], count: int | None, seed: int, name: str) -> list[Example]:
            limit = count if count is not None and count < len(examples) else None
            return limit_rows(examples, limit, seed=derive_seed(seed, "record", name))

        rows = subsample(train, record.train_rows, seed, "train")
        splits = {"train": rows}
        for name, examples in (("dev", dev), ("test", test)):
            splits[name] = subsample(examples, record.heldout_rows, 0, name)
        noise = None
        if flipped is not None:
            wrong, true = set(flipped), true_labels or {}
            classes = [true.get(row.id, row.labels) for row in rows]
            noise = LabelNoise(
                np.array([row.id in wrong for row in rows], dtype=bool),
                np.array(classes, dtype=np.int64) if all(isinstance(label, int) for label in classes) else None,
            )
        curved = subsample(rows, record.sharpness_rows, seed, "sharpness") if record.sharpness else []
        return cls(record, {name: selected for name, selected in splits.items() if selected}, noise, curved)
