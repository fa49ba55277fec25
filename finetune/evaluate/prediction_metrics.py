"""Metrics of predicted classes, sets of classes and numbers, with bootstrap intervals over examples.

Definitions are scikit-learn's and scipy's, checked against them in the tests: `accuracy_score`, `f1_score` (for one
class with average="macro", zero_division=0; for sets "micro" with zero_division=0 and "macro" over the classes that
occur, like zero_division=nan), `matthews_corrcoef`, `average_precision_score` as the mean over classes that occur in
truth, `root_mean_squared_error`, `mean_absolute_error`, `pearsonr` and `spearmanr` (ties share their mean rank). A
class is in a predicted set if its logit is above 0.

Metrics of classes take weights (R, U): the number of times that each of U distinct (true, predicted) pairs, cells of
the confusion matrix, occurs in each of R resamples. Metrics of sets take weights (R, n) of n examples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import UserError
from .bootstrap import BootstrapInterval, ResampledMetric, bootstrap_interval, frequency_intervals
from .metrics import metric_functions

_ROW_SHARES = ("accuracy",)
"""Metrics of classes and sets that are fractions of rows
(`flatshift.finetune.evaluate.bootstrap.exact_share_interval`)."""


# -------------------------------------------------------------------------------------------------- one class a row


@dataclass(frozen=True)
class LabelPairs:
    """Distinct (true, predicted) pairs of a test set."""

    true: NDArray[np.int64]
    """(U,) classes, renumbered 0..K−1 over those that occur."""
    predicted: NDArray[np.int64]
    """(U,)"""
    num_classes: int
    """K: classes that occur as true or as predicted."""
    kinds: NDArray[np.int64]
    """(n,) index of each example's pair."""

    @classmethod
    def of(cls, true: Sequence[int], predicted: Sequence[int]) -> LabelPairs:
        """Build from two sequences of the same length n ≥ 1."""
        if len(true) != len(predicted):
            raise ValueError(f"{len(true)} labels but {len(predicted)} predictions")
        if not len(true):
            raise UserError("there is nothing to evaluate: the split has no examples")
        classes, codes = np.unique(np.concatenate([true, predicted]), return_inverse=True)
        pairs, kinds = np.unique(codes[: len(true)] * len(classes) + codes[len(true) :], return_inverse=True)
        return cls(pairs // len(classes), pairs % len(classes), len(classes), kinds)

    @cached_property
    def commonest(self) -> int:
        """Most frequent true class."""
        return int(self.by_true(np.bincount(self.kinds)[None].astype(np.float64))[0].argmax())

    def by_true(self, weights: NDArray) -> NDArray:
        """Return (R, K) examples of each true class."""
        return weights @ np.eye(self.num_classes)[self.true]

    def by_predicted(self, weights: NDArray) -> NDArray:
        """Return (R, K) examples of each predicted class."""
        return weights @ np.eye(self.num_classes)[self.predicted]

    def hits(self, weights: NDArray) -> NDArray:
        """Return (R, K) correctly predicted examples of each class."""
        right = self.true == self.predicted
        return weights[:, right] @ np.eye(self.num_classes)[self.true[right]]


def classification_metrics(
    true: Sequence[int],
    predicted: Sequence[int],
    *,
    figures: dict[str, ResampledMetric] | None = None,
    **bootstrap: Any,
) -> dict[str, BootstrapInterval]:
    """Return the metrics computed from "classes", with intervals; `figures` receives each.

    bootstrap: `resamples, confidence, seed`.

    Raises:
        UserError: no example.
    """
    pairs = LabelPairs.of(true, predicted)
    return _frequency_metrics("classes", pairs, pairs.kinds, len(pairs.true), figures=figures, **bootstrap)


def _frequency_metrics(
    source: str, labels: LabelPairs | LabelSets, kinds: NDArray[np.int64], num_kinds: int, **options: Any
) -> dict[str, BootstrapInterval]:
    statistics = {name: partial(function, labels) for name, function in metric_functions(source).items()}
    return frequency_intervals(kinds, statistics, num_kinds=num_kinds, shares=_ROW_SHARES, **options)


def accuracy(pairs: LabelPairs, weights: NDArray) -> NDArray:
    """Return (R,) fraction of examples predicted correctly."""
    return _weighted_mean(pairs.true == pairs.predicted, weights)


def f1_macro(pairs: LabelPairs, weights: NDArray) -> NDArray:
    """Return (R,) mean of 2·hits / (true + predicted) over the classes that occur in the resample, true or
    predicted."""
    return _mean_f1(pairs.hits(weights), pairs.by_true(weights) + pairs.by_predicted(weights))


def matthews(pairs: LabelPairs, weights: NDArray) -> NDArray:
    """Return (R,) Matthews correlation for K classes, 0 if true or predicted is a single class.

    (n·Σhits − Σ tₖpₖ) / √((n² − Σtₖ²)(n² − Σpₖ²)): Gorodkin, Comput. Biol. Chem. 28 (2004), eq. 8.
    """
    true, predicted, n = pairs.by_true(weights), pairs.by_predicted(weights), weights.sum(-1)
    covariance = pairs.hits(weights).sum(-1) * n - (true * predicted).sum(-1)
    return _safe_ratio(covariance, np.sqrt((n**2 - (true**2).sum(-1)) * (n**2 - (predicted**2).sum(-1))))


def majority_floor(pairs: LabelPairs, weights: NDArray) -> NDArray:
    """Return (R,) accuracy of the majority baseline: always predicting the most frequent class of these examples."""
    return _weighted_mean(pairs.true == pairs.commonest, weights)


# -------------------------------------------------------------------------------------------------- sets of classes


@dataclass(frozen=True)
class LabelSets:
    """True sets of classes and logits of n examples."""

    true: NDArray[np.bool_]
    """(n, C)"""
    logits: NDArray[np.float64]
    """(n, C)"""

    @cached_property
    def predicted(self) -> NDArray[np.bool_]:
        """(n, C) predicted classes: those with a logit above 0."""
        return np.asarray(self.logits > 0)

    @cached_property
    def commonest(self) -> NDArray[np.bool_]:
        """(C,) most frequent set of classes."""
        (key, _), *_ = Counter(row.tobytes() for row in self.true).most_common(1) or [(b"", 0)]
        return np.frombuffer(key, dtype=np.bool_)

    @cached_property
    def best(self) -> NDArray[np.bool_]:
        """(C,) the set of classes with the highest micro F1 as a constant prediction: the k most frequent, for the best
        k ≥ 1."""
        counts = self.true.sum(axis=0)
        order = np.argsort(-counts, kind="stable")
        k = np.arange(1, len(counts) + 1)
        f1 = 2.0 * np.cumsum(counts[order]) / (len(self.true) * k + counts.sum())
        best = np.zeros(len(counts), dtype=np.bool_)
        best[order[: int(f1.argmax()) + 1]] = True
        return best


def multilabel_metrics(
    true: NDArray[np.bool_],
    logits: NDArray[np.float64],
    *,
    figures: dict[str, ResampledMetric] | None = None,
    **bootstrap: Any,
) -> dict[str, BootstrapInterval]:
    """Return the metrics computed from "sets", with intervals, of n examples with C classes; `figures` receives each.

    Args:
        true, logits: (n, C).
        bootstrap: `resamples, confidence, seed`.
    Raises:
        UserError: no example.
    """
    labels = LabelSets(true, logits)
    return _frequency_metrics("sets", labels, np.arange(len(true)), len(true), figures=figures, **bootstrap)


def set_accuracy(sets: LabelSets, weights: NDArray) -> NDArray:
    """Return (R,) fraction of examples whose whole set of classes is correct."""
    return _weighted_mean((sets.predicted == sets.true).all(axis=1), weights)


def set_f1_micro(sets: LabelSets, weights: NDArray) -> NDArray:
    """Return (R,) 2·hits / (true + predicted) over all classes together; 0 if there is neither."""
    return _f1_micro(sets.true, sets.predicted, weights)


def set_f1_macro(sets: LabelSets, weights: NDArray) -> NDArray:
    """Return (R,) mean of 2·hits / (true + predicted) over the classes that occur in the resample, true or
    predicted."""
    return _mean_f1(*_hits_and_totals(sets.true, sets.predicted, weights))


def set_average_precision(sets: LabelSets, weights: NDArray) -> NDArray:
    """Return (R,) mean over the classes in the resample of Σ (recallₖ − recallₖ₋₁) · precisionₖ, over the distinct
    scores in descending order."""
    true, scores = sets.true, sets.logits
    total, classes = np.zeros(len(weights)), np.zeros(len(weights))
    for k in range(true.shape[1]):
        order = np.argsort(-scores[:, k], kind="stable")
        ranked = scores[order, k]
        ends = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))  # tied scores enter together
        occurrences = weights[:, order]
        hits = np.cumsum(occurrences * true[order, k], axis=1)[:, ends]
        precision = _safe_ratio(hits, np.cumsum(occurrences, axis=1)[:, ends])
        gains = np.diff(hits, axis=1, prepend=0.0)
        total += _safe_ratio((gains * precision).sum(-1), hits[:, -1])
        classes += hits[:, -1] > 0
    return _safe_ratio(total, classes)


def set_majority_floor(sets: LabelSets, weights: NDArray) -> NDArray:
    """Return (R,) accuracy of the majority baseline: always predicting these examples' most frequent set of classes."""
    return _weighted_mean((sets.true == sets.commonest).all(axis=1), weights)


def set_f1_floor(sets: LabelSets, weights: NDArray) -> NDArray:
    """Return (R,) micro F1 of the best constant prediction (some of the most frequent classes, whatever the
    example)."""
    return _f1_micro(sets.true, np.broadcast_to(sets.best, sets.true.shape), weights)


def _f1_micro(true: NDArray[np.bool_], predicted: NDArray[np.bool_], weights: NDArray) -> NDArray:
    hits, total = _hits_and_totals(true, predicted, weights)
    return _safe_ratio(2.0 * hits.sum(-1), total.sum(-1))


def _mean_f1(hits: NDArray, total: NDArray) -> NDArray:
    return _safe_ratio(_safe_ratio(2.0 * hits, total).sum(-1), (total > 0).sum(-1))


def _weighted_mean(values: NDArray, weights: NDArray) -> NDArray:
    return (weights @ values.astype(np.float64)) / weights.sum(-1)


def _hits_and_totals(
    true: NDArray[np.bool_], predicted: NDArray[np.bool_], weights: NDArray
) -> tuple[NDArray, NDArray]:
    """Return (R, C) examples for which a class is both true and predicted, and the sum of true and predicted ones."""
    return weights @ (true & predicted).astype(np.float64), weights @ (true.astype(np.float64) + predicted)


def _safe_ratio(top: NDArray, bottom: NDArray) -> NDArray:
    bottom = np.asarray(bottom, dtype=np.float64)
    return np.divide(top, bottom, out=np.zeros(np.broadcast(top, bottom).shape), where=bottom > 0)


# ---------------------------------------------------------------------------------------------------------- numbers


def regression_metrics(
    true: ArrayLike,
    predicted: ArrayLike,
    *,
    mean: float,
    figures: dict[str, ResampledMetric] | None = None,
    **bootstrap: Any,
) -> dict[str, BootstrapInterval]:
    """Return the metrics computed from "numbers", with intervals; the baseline predicts `mean`, that of the training
    targets.

    A correlation with constant numbers is undefined, so null. `figures` receives each.

    Args:
        true, predicted: (n,) in the same units.
        bootstrap: `resamples, confidence, seed`.
    Raises:
        UserError: no example.
    """
    true = np.asarray(true, dtype=np.float64)
    items = [true, predicted, np.full(len(true), mean)]
    functions = metric_functions("numbers")
    if figures is not None:
        figures |= {name: ResampledMetric.over(items, function) for name, function in functions.items()}
    return {name: bootstrap_interval(items, function, **bootstrap) for name, function in functions.items()}


def pearson(true: NDArray, predicted: NDArray, mean: NDArray | None = None) -> NDArray:
    """Return (R,) correlations of the rows of (R, n)."""
    a = true - true.mean(-1, keepdims=True)
    b = predicted - predicted.mean(-1, keepdims=True)
    scale = np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
    constant = (np.ptp(true, axis=-1) == 0) | (np.ptp(predicted, axis=-1) == 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(constant, np.nan, (a * b).sum(-1) / scale)


def spearman(true: NDArray, predicted: NDArray, mean: NDArray | None = None) -> NDArray:
    """Return (R,) rank correlations."""
    from scipy.stats import rankdata

    return pearson(rankdata(true, axis=-1), rankdata(predicted, axis=-1))


def rmse(true: NDArray, predicted: NDArray, mean: NDArray | None = None) -> NDArray:
    """Return (R,) root mean squared errors."""
    return np.sqrt(np.square(predicted - true).mean(-1))


def mae(true: NDArray, predicted: NDArray, mean: NDArray | None = None) -> NDArray:
    """Return (R,) mean absolute errors."""
    return np.abs(predicted - true).mean(-1)


def mean_floor(true: NDArray, predicted: NDArray, mean: NDArray) -> NDArray:
    """Return (R,) the rmse of always predicting the mean of the training targets."""
    return rmse(true, mean)
