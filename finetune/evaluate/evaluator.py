"""Evaluate a model on encoded examples: every metric with a bootstrap interval over examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from ..compute.numerics import evaluation_mode
from ..compute.protocols import LossTask
from ..config import Evaluate
from ..data.eval_batching import EvalBatching
from ..data.example import IGNORE, Example, find_document_starts, sum_by_document
from ..errors import UserError
from .answers import generate_answers
from .bootstrap import BootstrapInterval, ResampledMetric, ratio_interval, ratio_statistic
from .metrics import metric_functions
from .perplexity import TokenCounts, document_nats
from .prediction_metrics import classification_metrics
from .ranking import rank_choices


class EvaluatedTask(LossTask, Protocol):
    """Task that computes its own metrics, and its settings of generated answers."""

    @property
    def max_new_tokens(self) -> int: ...

    @property
    def num_beams(self) -> int | None: ...

    @property
    def metrics(self) -> tuple[str, ...]: ...

    def evaluate(self, evaluator: Evaluator, examples: Sequence[Example]) -> dict[str, BootstrapInterval]: ...


def evaluate(
    model: Any,
    tokenizer: Any,
    examples: Sequence[Example],
    *,
    task: EvaluatedTask,
    config: Evaluate,
    inference: EvalBatching | None = None,
    label_names: Sequence[str] | None = None,
    seed: int = 0,
    figures: dict[str, ResampledMetric] | None = None,
    columns: dict[str, Any] | None = None,
) -> dict[str, BootstrapInterval]:
    """Evaluate `model` on `examples`, in evaluation mode, without gradients and without drawing random numbers.

    Returns the metrics of the task, each as `{value, low, high, n}` with n the number of examples. A metric that is not
    finite is null. On a mesh every rank calls this and gets the same metrics; `inference` assigns each rank its
    examples, and without it this is one process on a CPU. `figures` receives each metric as a `ResampledMetric` that
    can be evaluated on groups of the examples and compared with another model's; `columns` receives the model's outputs
    for each example (see `Evaluator`).

    Raises UserError: no examples, or answers that do not fit the backbone.
    """
    if not examples:
        raise UserError("there is nothing to evaluate: the split has no examples")
    evaluator = Evaluator(
        model, tokenizer, task, inference or EvalBatching.of(tokenizer, batch_size=config.batch_size),
        {"resamples": config.bootstrap, "confidence": config.confidence, "seed": seed}, label_names,
        {} if figures is None else figures, {} if columns is None else columns,
    )  # fmt: skip
    with evaluation_mode(model):
        return task.evaluate(evaluator, examples)


@dataclass(frozen=True)
class Evaluator:
    """Model under evaluation: its outputs for examples, and metrics with intervals. The task decides which are
    computed."""

    model: Any
    tokenizer: Any
    task: EvaluatedTask
    inference: EvalBatching
    bootstrap: dict[str, Any] = field(default_factory=dict)
    """Arguments of the intervals: `resamples, confidence, seed`."""
    label_names: Sequence[str] | None = None
    figures: dict[str, ResampledMetric] = field(default_factory=dict)
    """Collects every metric by name."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Collects columns with one entry per example: `label, predicted, probability` of a class or number, `reference,
    answer`, and for every metric that is Σ values / Σ counts its `NAME` and `NAME.count` (omitted if all are one). None
    if an example has no such entry."""

    def token_nll(self, examples: Sequence[Example]) -> tuple[np.ndarray, np.ndarray]:
        """Return `document_nats` of the examples."""
        return document_nats(self.model, examples, self.inference, task=self.task)

    def head_scores(self, examples: Sequence[Example]) -> tuple[np.ndarray, np.ndarray]:
        """Return `head_scores` of the examples."""
        return head_scores(self.model, examples, self.inference, task=self.task)

    def rank_choices(self, examples: Sequence[Example]) -> np.ndarray:
        """Return `rank_choices` of the examples."""
        return rank_choices(self.model, examples, self.inference, task=self.task)

    def class_names(self, count: int) -> Sequence[str]:
        """Return the names of `count` classes in head order; numbers if there are no names."""
        return self.label_names or [str(k) for k in range(count)]

    def class_columns(self, scores: np.ndarray) -> dict[str, list[Any]]:
        """Return `label`, its `probability`, and `p_NAME` of every class, from log-likelihoods or logits (N, K)."""
        from scipy.special import softmax

        names, probabilities = self.class_names(scores.shape[1]), softmax(scores, axis=1)
        best = scores.argmax(axis=1)
        return {
            "label": [names[k] for k in best],
            "probability": probabilities[np.arange(len(best)), best].tolist(),
            **{f"p_{name}": probabilities[:, k].tolist() for k, name in enumerate(names)},
        }

    def perplexity_columns(self, examples: Sequence[Example]) -> dict[str, list[Any]]:
        """Return the `nats` of each example's target tokens, their number, and their perplexity; of a document in
        pieces at the first piece."""
        nats, tokens = self.token_nll(examples)
        if (documents := self._document_starts(examples)) is not None:
            nats, tokens = (sum_by_document(values, documents) for values in (nats, tokens))
        mean = nats / np.maximum(tokens, 1)
        return {"nats": nats.tolist(), "tokens": tokens.astype(int).tolist(), "perplexity": np.exp(mean).tolist()}

    def _document_starts(self, examples: Sequence[Example]) -> np.ndarray | None:
        return find_document_starts(examples) if self.task.traits.splits_documents else None

    def record_ratio(
        self, name: str, values: Any, counts: Any, *, transform: Any = None, rows: Sequence[int] | None = None
    ) -> BootstrapInterval:
        """Compute and record the metric `name`: Σ values / Σ counts, then `transform`; of the examples at `rows`, by
        default all."""
        single = bool(np.all(np.asarray(counts) == 1))
        share = bool(transform is None and single and np.isin(values, (0.0, 1.0)).all())
        self.figures[name] = ResampledMetric.over([values, counts], ratio_statistic(transform), rows, share=share)
        if transform is None and rows is None:
            self.columns[name] = np.asarray(values, dtype=np.float64)
            if not single:
                self.columns[f"{name}.count"] = np.asarray(counts, dtype=np.float64)
        return ratio_interval(values, counts, transform=transform, share=share, **self.bootstrap)

    def record_mean(self, name: str, values: Any) -> BootstrapInterval:
        """Compute and record the metric `name`: the mean of one value per example."""
        return self.record_ratio(name, values, np.ones(len(values)))

    def class_metrics(
        self, true: Sequence[int], scores: np.ndarray, *, log_odds: bool = True
    ) -> dict[str, BootstrapInterval]:
        """Return `accuracy, f1_macro, matthews, majority_floor` of the class with the highest of the scores (N, K).

        log_odds: scores are log-likelihoods up to a constant per example, so that probabilities can be derived.
        """
        predicted = scores.argmax(-1).tolist()
        names = self.class_names(scores.shape[1])
        self.columns["label"] = [names[k] for k in true]
        self.columns["predicted"] = [names[k] for k in predicted]
        if log_odds:
            self.columns["probability"] = 1.0 / np.exp(scores - scores.max(-1, keepdims=True)).sum(-1)
        return classification_metrics(true, predicted, figures=self.figures, **self.bootstrap)

    def perplexity_metrics(
        self, examples: Sequence[Example], nats: np.ndarray, tokens: np.ndarray
    ) -> dict[str, BootstrapInterval]:
        """Return the metrics computed from "text", or from "hidden" (masked) tokens; intervals are over documents if
        these were split into pieces."""
        totals = TokenCounts(
            nats=nats, tokens=tokens, bytes=np.array([example.bytes for example in examples], dtype=np.float64)
        )
        documents = self._document_starts(examples)
        metrics = {}
        for name, function in metric_functions("hidden" if self.task.traits.masks_tokens else "text").items():
            values, counts, transform = function(totals)
            metrics[name] = self.record_ratio(name, values, counts, transform=transform)
            if documents is not None:
                starts = np.unique(documents)
                sums = [
                    sum_by_document(np.asarray(array, dtype=np.float64), documents)[starts]
                    for array in (values, counts)
                ]
                self.figures[name] = ResampledMetric.over(sums, ratio_statistic(transform))
                metrics[name] = ratio_interval(*sums, transform=transform, **self.bootstrap)
        return metrics

    def ranking_metrics(self, examples: Sequence[Example]) -> dict[str, BootstrapInterval]:
        """Return the metrics of `perplexity_metrics`, and `accuracy, f1_macro, matthews, majority_floor` of the
        likeliest choice."""
        gold = [_gold_index(example, self.label_names) for example in examples]
        scores = self.rank_choices(examples)
        # The gold completion is one of the choices, so its log-likelihood is known.
        nats = -scores[np.arange(len(gold)), gold]
        metrics = self.perplexity_metrics(examples, nats, np.array([_count_targets(example) for example in examples]))
        return metrics | self.class_metrics(gold, scores)

    def answer_metrics(self, examples: Sequence[Example]) -> dict[str, BootstrapInterval]:
        """Return the metrics computed from "answers" (of an encoder-decoder "seq2seq") that the model generates, over
        the examples that have a reference.

        Empty if none has: conversations whose last answer was cut off by `train.max_length`.
        """
        rows = [i for i, example in enumerate(examples) if example.answer is not None]
        if not rows:
            return {}
        asked = [examples[i] for i in rows]
        limits = {"max_new_tokens": self.task.max_new_tokens, "num_beams": self.task.num_beams or 1}
        answers = generate_answers(self.model, self.tokenizer, asked, self.inference, **limits)
        references = [example.answer or "" for example in asked]
        for column, texts in (("reference", references), ("answer", answers)):
            by_row = dict(zip(rows, texts, strict=True))
            self.columns[column] = [by_row.get(row) for row in range(len(examples))]
        optional = metric_functions("agreement")
        functions = metric_functions("seq2seq" if self.task.traits.encoder_decoder else "answers")
        functions |= {name: optional[name] for name in self.task.metrics}
        metrics = {}
        for name, function in functions.items():
            scores = np.array([function(*pair) for pair in zip(answers, references, strict=True)], dtype=np.float64)
            values, counts = scores.T if scores.ndim == 2 else (scores, np.ones(len(scores)))
            metrics[name] = self.record_ratio(name, values, counts, rows=None if len(rows) == len(examples) else rows)
        return metrics


@torch.no_grad()
def head_scores(
    model: torch.nn.Module, examples: Sequence[Example], inference: EvalBatching, *, task: LossTask
) -> tuple[np.ndarray, np.ndarray]:
    """Return the task's `example_losses` (N,) float64 and the head's outputs (N, C) float64, in the order of the
    examples."""
    losses, outputs = np.zeros(len(examples)), np.zeros((len(examples), 0))
    for micro in inference.batches(examples, task):
        batch = micro.to(inference.device)
        with inference.precision():
            logits = model(**batch.inputs).logits.float()
        if not outputs.shape[1]:
            outputs = np.zeros((len(examples), logits.shape[1]))
        if not micro.samples:  # no example here: this rank only took part in the collective pass
            continue
        index = [row[0] for row in micro.rows]
        losses[index] = task.example_losses(logits, batch.labels).double().cpu().numpy()
        outputs[index] = logits.double().cpu().numpy()
    return inference.share.add(losses), inference.share.add(outputs)


def _count_targets(example: Example) -> int:
    assert isinstance(example.labels, list)
    return sum(label != IGNORE for label in example.labels[1:])


def _gold_index(example: Example, label_names: Sequence[str] | None) -> int:
    if example.gold is None or (label_names is not None and len(example.choices or ()) != len(label_names)):
        raise ValueError("examples that are ranked must be encoded with task.score 'rank' and the same label names")
    return example.gold
