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


@dataclass(frozen=True)
class LabelPairs:
    """Distinct (true, predicted) pairs of classes of a test set."""

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
    def is_right(self) -> NDArray[np.bool_]:
        """(U,)"""
        return self.true == self.predicted

    @cached_property
    def is_majority(self) -> NDArray[np.bool_]:
        """(U,) True if the true class is the most frequent one."""
        return np.asarray(self.true == np.bincount(self.true, np.bincount(self.kinds), self.num_classes).argmax())

    def count(self, weights: NDArray) -> tuple[NDArray, NDArray, NDArray]:
        """Return (R, K) examples of each class that are predicted correctly, of each true class, and of each predicted
        class."""
        one_hot = np.eye(self.num_classes)
        hits = weights[:, self.is_right] @ one_hot[self.true[self.is_right]]
        return hits, weights @ one_hot[self.true], weights @ one_hot[self.predicted]


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
    def is_right(self) -> NDArray[np.bool_]:
        """(n,) True if the whole set is correct."""
        return np.asarray((self.predicted == self.true).all(axis=1))

    @cached_property
    def is_majority(self) -> NDArray[np.bool_]:
        """(n,) True if the true set is the most frequent one."""
        (key, _), *_ = Counter(row.tobytes() for row in self.true).most_common(1) or [(b"", 0)]
        return np.asarray((self.true == np.frombuffer(key, dtype=np.bool_)).all(axis=1))

    def count(self, weights: NDArray) -> tuple[NDArray, NDArray, NDArray]:
        """Return (R, C) examples of which each class is correctly predicted, is true, and is predicted."""
        true, predicted = self.true.astype(np.float64), self.predicted.astype(np.float64)
        return weights @ (true * predicted), weights @ true, weights @ predicted

    def best_constant(self) -> NDArray[np.bool_]:
        """(C,) the set of classes with the highest micro F1 as a constant prediction: the k most frequent, for the best
        k ≥ 1."""
        counts = self.true.sum(axis=0)
        order = np.argsort(-counts, kind="stable")
        k = np.arange(1, len(counts) + 1)
        f1 = 2.0 * np.cumsum(counts[order]) / (len(self.true) * k + counts.sum())
        best = np.zeros(len(counts), dtype=np.bool_)
        best[order[: int(f1.argmax()) + 1]] = True
        return best


def classification_metrics(
    true: Sequence[int],
    predicted: Sequence[int],
    *,
    figures: dict[str, ResampledMetric] | None = None,
    **bootstrap: Any,
) -> dict[str, BootstrapInterval]:
    """Return the metrics computed from "classes", with intervals; `figures` receives each.

    bootstrap: `resamples, confidence, seed`.

    Raises UserError: no example.
    """
    pairs = LabelPairs.of(true, predicted)
    return _frequency_metrics("classes", pairs, pairs.kinds, len(pairs.true), figures=figures, **bootstrap)


def multilabel_metrics(
    true: NDArray[np.bool_],
    logits: NDArray[np.float64],
    *,
    figures: dict[str, ResampledMetric] | None = None,
    **bootstrap: Any,
) -> dict[str, BootstrapInterval]:
    """Return the metrics computed from "sets", with intervals, of n examples with C classes; `figures` receives each.

    true, logits: (n, C).
    bootstrap: `resamples, confidence, seed`.
    Raises UserError: no example.
    """
    n = len(true)
    return _frequency_metrics("sets", LabelSets(true, logits), np.arange(n), n, figures=figures, **bootstrap)


def _frequency_metrics(
    source: str, labels: LabelPairs | LabelSets, kinds: NDArray[np.int64], num_kinds: int, **options: Any
) -> dict[str, BootstrapInterval]:
    statistics = {name: partial(function, labels) for name, function in metric_functions(source).items()}
    return frequency_intervals(kinds, statistics, num_kinds=num_kinds, shares=("accuracy",), **options)


def accuracy(labels: LabelPairs | LabelSets, weights: NDArray) -> NDArray:
    """Return (R,) fraction of examples whose class, or whole set of classes, is correct."""
    return (weights @ labels.is_right.astype(np.float64)) / weights.sum(-1)


def majority_floor(labels: LabelPairs | LabelSets, weights: NDArray) -> NDArray:
    """Return (R,) accuracy of the majority baseline: always predicting these examples' most frequent class or set."""
    return (weights @ labels.is_majority.astype(np.float64)) / weights.sum(-1)


def f1_macro(labels: LabelPairs | LabelSets, weights: NDArray) -> NDArray:
    """Return (R,) mean of 2·hits / (true + predicted) over the classes that occur in the resample, true or
    predicted."""
    hits, true, predicted = labels.count(weights)
    total = true + predicted
    return _safe_ratio(_safe_ratio(2.0 * hits, total).sum(-1), (total > 0).sum(-1))


def f1_micro(sets: LabelSets, weights: NDArray) -> NDArray:
    """Return (R,) 2·hits / (true + predicted) over all classes together; 0 if there is neither."""
    hits, true, predicted = sets.count(weights)
    return _safe_ratio(2.0 * hits.sum(-1), true.sum(-1) + predicted.sum(-1))


def f1_floor(sets: LabelSets, weights: NDArray) -> NDArray:
    """Return (R,) micro F1 of the best constant prediction (some of the most frequent classes, whatever the
    example)."""
    constant = np.where(sets.best_constant(), 1.0, -1.0)
    return f1_micro(LabelSets(sets.true, np.broadcast_to(constant, sets.true.shape)), weights)


def matthews(pairs: LabelPairs, weights: NDArray) -> NDArray:
    """Return (R,) Matthews correlation for K classes, 0 if true or predicted is a single class.

    (n·Σhits − Σ tₖpₖ) / √((n² − Σtₖ²)(n² − Σpₖ²)): Gorodkin, Comput. Biol. Chem. 28 (2004), eq. 8.
    """
    (hits, true, predicted), n = pairs.count(weights), weights.sum(-1)
    covariance = hits.sum(-1) * n - (true * predicted).sum(-1)
    return _safe_ratio(covariance, np.sqrt((n**2 - (true**2).sum(-1)) * (n**2 - (predicted**2).sum(-1))))


def average_precision(sets: LabelSets, weights: NDArray) -> NDArray:
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


def _safe_ratio(top: NDArray, bottom: NDArray) -> NDArray:
    bottom = np.asarray(bottom, dtype=np.float64)
    return np.divide(top, bottom, out=np.zeros(np.broadcast(top, bottom).shape), where=bottom > 0)


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

    true, predicted: (n,) in the same units.
    bootstrap: `resamples, confidence, seed`.
    Raises UserError: no example.
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
