"""`task.kind: classify`: one class per row, or with `multi` any number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..compute.protocols import TaskTraits
from ..evaluate.metrics import metric_names
from .base import SequenceLevelTask

if TYPE_CHECKING:
    from torch import Tensor

    from ..data.encoding import RowEncoder
    from ..data.example import Example
    from ..data.labels import Units
    from ..data.rows import Row
    from ..evaluate.bootstrap import BootstrapInterval
    from ..evaluate.evaluator import Evaluator


@dataclass(frozen=True, kw_only=True)
class Classify(SequenceLevelTask):
    """Sequence classification with a new head over `text` (or the pair `text`, `text2`)."""

    kind: Literal["classify"] = "classify"
    labels: tuple[str, ...] | None = None
    """Class names in head order. Default: the sorted labels of all training rows, including those beyond `limit`."""
    multi: bool | None = None
    """Multi-label: a row has any number of classes, or none; `label` is a list, or a text split at `separator`. The
    loss of a row is the sum of binary cross entropies over classes."""
    separator: str | None = None
    """Separator of classes in a label given as text (multi); surrounding whitespace is ignored. Null: a comma."""
    loss: Literal["squared"] | None = None
    """`squared`: Σ_c (output − 1 for the row's class, 0 for the others)², as in studies of least squares; the
    prediction is still the highest output. Null: cross entropy."""

    traits: ClassVar[TaskTraits] = replace(SequenceLevelTask.traits, has_accuracy=True, loss_unit="nats per example")
    has_classes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for i, name in enumerate(self.labels or ()):
            if not name:
                raise ValueError("labels has an empty name; a class needs one")
            if name in (self.labels or ())[:i]:
                raise ValueError(f"labels has {name!r} twice; name each class once")
        if self.loss is not None and self.multi:
            raise ValueError("loss: squared is of one class a row; leave multi out")
        if self.separator is not None and not (self.multi and self.separator.strip()):
            raise ValueError("separator is for `multi: true`, and is no blank")

    @property
    def name(self) -> str:
        return f"{self.kind} with multi" if self.multi else self.kind

    @property
    def squares(self) -> bool:
        return self.loss == "squared"

    def residuals(self, logits: Tensor, labels: Tensor) -> Tensor:
        import torch.nn.functional as F

        wanted = F.one_hot(labels.clamp(min=0), logits.shape[1]).float()
        return (wanted - logits.float()) * (labels >= 0)[:, None]  # −100: a row that fills a pipeline's piece up

    @property
    def no_axes(self) -> Mapping[str, str]:
        return {axis: reason for axis, reason in super().no_axes.items() if self.multi or axis != "pp"}

    def read_label(self, value: Any) -> str | tuple[str, ...]:
        """Return a class, or with `multi` a sorted tuple of classes."""
        from ..data.labels import read_classes

        return read_classes(value, separator=self.separator or ",") if self.multi else super().read_label(value)

    def encode(self, rows: Iterable[Row], encoder: RowEncoder) -> tuple[list[Example], tuple[str, ...]]:
        """Encode a text or a pair with the tokenizer's own special tokens. If too long, the longer text is truncated
        first."""
        from ..data.labels import class_indices, encode_multi_hot

        encoded = encoder.wholes(rows)
        usable = [row for row, _, _ in encoded]
        names = tuple(encoder.label_names or self.class_names(usable) or ())
        labels = encode_multi_hot(usable, names) if self.multi else class_indices(usable, names)
        return encoder.labelled(encoded, labels), names

    def head_settings(self, *, num_labels: int | None, label_names: Sequence[str] | None) -> dict[str, Any]:
        names = list(label_names) if label_names else [str(i) for i in range(num_labels or 0)]
        if not names or (num_labels is not None and len(names) != num_labels):
            raise ValueError("load_backbone(task=Classify) needs num_labels or label_names, and they must agree")
        kind = "regression" if self.loss == "squared" else f"{'multi' if self.multi else 'single'}_label_classification"
        return {
            "num_labels": len(names),
            "id2label": dict(enumerate(names)),
            "label2id": {label: i for i, label in enumerate(names)},
            # of the checkpoint's old head otherwise; `regression`: transformers' pipeline makes no probabilities of it
            "problem_type": kind,
        }

    def example_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross entropy with classes [B]; with `multi` the sum over classes of binary cross entropies
        with 0/1 labels [B, C] (transformers' `multi_label_classification` averages: ours is C times as large)."""
        import torch.nn.functional as F

        if self.multi:
            return F.binary_cross_entropy_with_logits(logits.float(), labels, reduction="none").sum(dim=1)
        if self.squares:
            return self.residuals(logits, labels).square().sum(dim=1)
        return F.cross_entropy(logits.float(), labels, reduction="none")

    def answered_right(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compare the likeliest class; with `multi` the exact set of classes with a logit above 0 (probability above
        one half)."""
        return ((logits > 0) == (labels > 0)).all(dim=1) if self.multi else logits.argmax(dim=-1) == labels

    def format_label(self, label: Tensor, *, label_names: Sequence[str] | None, units: Units | None) -> str:
        indices = label.nonzero()[:, 0].tolist() if self.multi else [int(label)]
        return ", ".join(label_names[k] if label_names else str(k) for k in indices) or "none"

    def placeholders(self, label_names: Sequence[str] | None) -> dict[str, Any]:
        return {"label": () if self.multi else (label_names or ("",))[0]}

    def predict(self, evaluator: Evaluator, examples: Sequence[Example]) -> dict[str, list[Any]]:
        """Return `label` and its `probability` (softmax), or with `multi` the `labels` with a probability above one
        half; and `p_NAME`, the probability of each class. A squared loss has no probabilities: `label`, and
        `output_NAME` of each class."""
        from scipy.special import expit

        _, logits = evaluator.head_scores(examples)
        names = evaluator.class_names(logits.shape[1])
        if self.squares:
            outputs = {f"output_{name}": logits[:, k].tolist() for k, name in enumerate(names)}
            return {"label": [names[k] for k in logits.argmax(axis=1)]} | outputs
        if not self.multi:
            return evaluator.class_columns(logits)
        probabilities = expit(logits)
        labels = [[name for name, p in zip(names, row, strict=True) if p > 0.5] for row in probabilities]
        return {"labels": labels} | {f"p_{name}": probabilities[:, k].tolist() for k, name in enumerate(names)}

    @property
    def figure_names(self) -> tuple[str, ...]:
        unexplained = ("unexplained",) if self.squares else ()
        return ("loss", *unexplained, *metric_names("sets" if self.multi else "classes"))

    def evaluate(self, evaluator: Evaluator, examples: Sequence[Example]) -> dict[str, BootstrapInterval]:
        """Return `loss` (nats per example), for a squared loss `unexplained` (its share of the labels' variance),
        and `accuracy, f1_macro, matthews, majority_floor`; with `multi` instead the metrics of
        `flatshift.finetune.evaluate.prediction_metrics.multilabel_metrics`."""
        import numpy as np

        from ..evaluate.prediction_metrics import multilabel_metrics

        losses, logits = evaluator.head_scores(examples)
        true = np.array([example.labels for example in examples])
        if self.multi:
            figures = multilabel_metrics(true > 0, logits, figures=evaluator.figures, **evaluator.bootstrap)
        else:
            figures = evaluator.class_metrics(true.tolist(), logits, log_odds=not self.squares)
        loss = {"loss": evaluator.record_mean("loss", losses)}
        if self.squares:
            variance = 1 - float(np.square(np.bincount(true) / len(true)).sum())  # of the one-hot labels
            unexplained = losses / variance if variance else losses * np.nan
            loss["unexplained"] = evaluator.record_mean("unexplained", unexplained)
        return loss | figures
