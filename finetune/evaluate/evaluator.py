"""Evaluate a model on encoded examples: every metric with a bootstrap interval over examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from ..compute.numerics import evaluation_mode
from ..config import Evaluate
from ..data.eval_batching import EvalBatching
from ..data.example import IGNORE, Example, sum_by_document
from ..errors import UserError
from .answers import generate_answers
from .bootstrap import BootstrapInterval, ResampledMetric, ratio_interval, ratio_statistic
from .classes import classification_metrics
from .metrics import metric_functions
from .perplexity import document_nats
from .ranking import rank_choices
from .task import EvaluatedTask


class JudgedTask(EvaluatedTask, Protocol):
    """Task that computes its own metrics."""

    def judge(self, judge: Evaluator, examples: Sequence[Example]) -> dict[str, BootstrapInterval]: ...


def evaluate(
    model: Any,
    tokenizer: Any,
    examples: Sequence[Example],
    *,
    task: JudgedTask,
    config: Evaluate,
    inference: EvalBatching | None = None,
    label_names: Sequence[str] | None = None,
    seed: int = 0,
    figures: dict[str, ResampledMetric] | None = None,
    said: dict[str, Any] | None = None,
) -> dict[str, BootstrapInterval]:
    """Evaluate `model` on `examples`, in evaluation mode, without gradients and without drawing random numbers.

    Returns the metrics of the task, each as `{value, low, high, n}` with n the number of examples. A metric that is not
    finite is null. On a mesh every rank calls this and gets the same metrics; `inference` assigns each rank its
    examples, and without it this is one process on a CPU. `figures` receives each metric as a `ResampledMetric` that
    can be evaluated on groups of the examples and compared with another model's; the last argument receives the model's
    outputs for each example (see `Evaluator`).

    Raises:
        UserError: no examples, or answers that do not fit the backbone.
    """
    if not examples:
        raise UserError("there is nothing to evaluate: the split has no examples")
    draw = {"resamples": config.bootstrap, "confidence": config.confidence, "seed": seed}
    inference = inference or EvalBatching.of(tokenizer, batch_size=config.batch_size)
    with evaluation_mode(model):
        judge = Evaluator(model, tokenizer, task, inference, draw, label_names, {} if figures is None else figures)
        judge = replace(judge, said={} if said is None else said)
        return task.judge(judge, examples)


@dataclass(frozen=True)
class Evaluator:
    """Model under evaluation: its outputs for examples, and metrics with intervals. The task decides which are
    computed."""

    model: Any
    tokenizer: Any
    task: EvaluatedTask
    inference: EvalBatching
    draw: dict[str, Any]
    """Arguments of the intervals: `resamples, confidence, seed`."""
    label_names: Sequence[str] | None = None
    figures: dict[str, ResampledMetric] = field(default_factory=dict)
    """Collects every metric by name."""
    said: dict[str, Any] = field(default_factory=dict)
    """Collects columns with one entry per example: `label, predicted, probability` of a class or number, `reference,
    answer`, and for every metric that is Σ values / Σ counts its `NAME` and `NAME.count` (omitted if all are one). None
    if an example has no such entry."""

    # ------------------------------------------------------------------------------------------------- outputs

    def token_nll(self, examples: Sequence[Example]) -> tuple[np.ndarray, np.ndarray]:
        """Return `document_nats` of the examples."""
        return document_nats(self.model, examples, self.inference, task=self.task)

    def head(self, examples: Sequence[Example]) -> tuple[np.ndarray, np.ndarray]:
        """Return `head_scores` of the examples."""
        return head_scores(self.model, examples, self.inference, task=self.task)

    def ranks(self, examples: Sequence[Example]) -> np.ndarray:
        """Return `rank_choices` of the examples."""
        return rank_choices(self.model, examples, self.inference, task=self.task)

    def names(self, classes: int) -> Sequence[str]:
        """Return the class names in head order; numbers if there are no names."""
        return self.label_names or [str(k) for k in range(classes)]

    def chosen(self, scores: np.ndarray) -> dict[str, list[Any]]:
        """Return `label`, its `probability`, and `p_NAME` of every class, from log-likelihoods or logits (N, K)."""
        from scipy.special import softmax

        names, found = self.names(scores.shape[1]), softmax(scores, axis=1)
        best = scores.argmax(axis=1)
        return {
            "label": [names[k] for k in best],
            "probability": found[np.arange(len(best)), best].tolist(),
            **{f"p_{name}": found[:, k].tolist() for k, name in enumerate(names)},
        }

    @staticmethod
    def surprises(nats: np.ndarray, tokens: np.ndarray) -> dict[str, list[Any]]:
        """Return the `nats` of each example's target tokens, their number, and their perplexity."""
        mean = nats / np.maximum(tokens, 1)
        return {"nats": nats.tolist(), "tokens": tokens.astype(int).tolist(), "perplexity": np.exp(mean).tolist()}

    # ------------------------------------------------------------------------------------------------------- metrics

    def ratio(
        self, name: str, values: Any, counts: Any, *, transform: Any = None, rows: Sequence[int] | None = None
    ) -> BootstrapInterval:
        """Compute and record the metric `name`: Σ values / Σ counts, then `transform`; of the examples at `rows`, by
        default all."""
        share = bool(transform is None and np.all(np.asarray(counts) == 1) and np.isin(values, (0.0, 1.0)).all())
        self.figures[name] = ResampledMetric.over([values, counts], ratio_statistic(transform), rows, share=share)
        if transform is None and rows is None:
            self.said[name] = np.asarray(values, dtype=np.float64)
            if not np.all(np.asarray(counts) == 1):
                self.said[f"{name}.count"] = np.asarray(counts, dtype=np.float64)
        return ratio_interval(values, counts, transform=transform, share=share, **self.draw)

    def mean(self, name: str, values: Any, *, rows: Sequence[int] | None = None) -> BootstrapInterval:
        """Compute and record the metric `name`: the mean of one value per example."""
        return self.ratio(name, values, np.ones(len(values)), rows=rows)

    def classes(self, true: Sequence[int], scores: np.ndarray, *, odds: bool = True) -> dict[str, BootstrapInterval]:
        """Return `accuracy, f1_macro, matthews, majority_floor` of the class with the highest of the scores (N, K).

        odds: scores are log-likelihoods up to a constant per example, so that probabilities can be derived.
        """
        predicted = scores.argmax(-1).tolist()
        named = self.label_names or [str(place) for place in range(scores.shape[1])]
        self.said["label"] = [named[place] for place in true]
        self.said["predicted"] = [named[place] for place in predicted]
        if odds:
            self.said["probability"] = 1.0 / np.exp(scores - scores.max(-1, keepdims=True)).sum(-1)
        return classification_metrics(true, predicted, figures=self.figures, **self.draw)

    def perplexity_metrics(
        self,
        examples: Sequence[Example],
        nats: np.ndarray,
        tokens: np.ndarray,
        *,
        of: str = "text",
        documents: np.ndarray | None = None,
    ) -> dict[str, BootstrapInterval]:
        """Return the metrics computed from "text", or from "hidden" (masked) tokens.

        documents: of examples that are pieces, as `documents_of`; intervals are over those.
        """
        size = np.array([example.bytes for example in examples], dtype=np.float64)
        found = {}
        for name, function in metric_functions(of).items():
            values, counts, transform = function(nats, tokens, size)
            found[name] = self.ratio(name, values, counts, transform=transform)
            if documents is not None:
                places = np.unique(documents)
                items = [
                    sum_by_document(np.asarray(part, dtype=np.float64), documents)[places] for part in (values, counts)
                ]
                self.figures[name] = ResampledMetric.over(items, ratio_statistic(transform))
                found[name] = ratio_interval(*items, transform=transform, **self.draw)
        return found

    def ranked(self, examples: Sequence[Example]) -> dict[str, BootstrapInterval]:
        """Return the metrics of `perplexity_metrics`, and `accuracy, f1_macro, matthews, majority_floor` of the
        likeliest choice."""
        gold = [_gold_index(example, self.label_names) for example in examples]
        scores = self.ranks(examples)
        # The gold completion is one of the choices, so its log-likelihood is known.
        nats = -scores[np.arange(len(gold)), gold]
        figures = self.perplexity_metrics(examples, nats, np.array([_count_targets(example) for example in examples]))
        return figures | self.classes(gold, scores)

    def answers(
        self, examples: Sequence[Example], *, num_beams: int = 1, of: str = "answers"
    ) -> dict[str, BootstrapInterval]:
        """Return the metrics computed from "answers" (or "seq2seq") that the model generates, over the examples that
        have a reference.

        Empty if none has: conversations whose last answer was cut off by `train.max_length`.
        """
        rows = [i for i, example in enumerate(examples) if example.answer is not None]
        if not rows:
            return {}
        asked = [examples[i] for i in rows]
        answers = generate_answers(
            self.model,
            self.tokenizer,
            asked,
            self.inference,
            max_new_tokens=self.task.max_new_tokens,
            num_beams=num_beams,
        )
        pairs = [(said, example.answer or "") for said, example in zip(answers, asked, strict=True)]
        for column, texts in (("reference", [ref for _, ref in pairs]), ("answer", [said for said, _ in pairs])):
            of_row = dict(zip(rows, texts, strict=True))
            self.said[column] = [of_row.get(row) for row in range(len(examples))]
        extra = metric_functions("agreement")
        wanted = metric_functions(of) | {name: extra[name] for name in self.task.metrics}
        figures = {}
        for name, function in wanted.items():
            found = np.array([function(*pair) for pair in pairs], dtype=np.float64)
            part, whole = found.T if found.ndim == 2 else (found, np.ones(len(found)))
            figures[name] = self.ratio(name, part, whole, rows=None if len(rows) == len(examples) else rows)
        return figures


@torch.no_grad()
def head_scores(
    model: torch.nn.Module,
    examples: Sequence[Example],
    inference: EvalBatching,
    *,
    task: EvaluatedTask,
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
