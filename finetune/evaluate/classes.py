"""Accuracy, macro F1 and Matthews correlation with bootstrap intervals, from cells of the confusion matrix.

All metrics take weights of shape (R, U): the number of times that each of U distinct (true, predicted) pairs occurs in
each of R resamples. Definitions are scikit-learn's (`accuracy_score`, `f1_score(average="macro", zero_division=0)`,
`matthews_corrcoef`), checked against it in the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from .bootstrap import BootstrapInterval, ResampledMetric, frequency_intervals
from .metrics import ROW_SHARES, metric_functions


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
        pair, kinds = np.unique(codes[: len(true)] * len(classes) + codes[len(true) :], return_inverse=True)
        return cls(pair // len(classes), pair % len(classes), len(classes), kinds)

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


def accuracy(pairs: LabelPairs, weights: NDArray) -> NDArray:
    """Return (R,) fraction of examples predicted correctly."""
    return weights[:, pairs.true == pairs.predicted].sum(-1) / weights.sum(-1)


def f1_macro(pairs: LabelPairs, weights: NDArray) -> NDArray:
    """Return (R,) mean of 2·hits / (true + predicted) over the classes that occur in the resample, true or
    predicted."""
    hits, total = pairs.hits(weights), pairs.by_true(weights) + pairs.by_predicted(weights)
    scores = np.divide(2.0 * hits, total, out=np.zeros_like(total), where=total > 0)
    return scores.sum(-1) / (total > 0).sum(-1)


def matthews(pairs: LabelPairs, weights: NDArray) -> NDArray:
    """Return (R,) Matthews correlation for K classes, 0 if true or predicted is a single class.

    (n·Σhits − Σ tₖpₖ) / √((n² − Σtₖ²)(n² − Σpₖ²)): Gorodkin, Comput. Biol. Chem. 28 (2004), eq. 8.
    """
    true, predicted, n = pairs.by_true(weights), pairs.by_predicted(weights), weights.sum(-1)
    covariance = pairs.hits(weights).sum(-1) * n - (true * predicted).sum(-1)
    scale = np.sqrt((n**2 - (true**2).sum(-1)) * (n**2 - (predicted**2).sum(-1)))
    return np.divide(covariance, scale, out=np.zeros_like(scale), where=scale > 0)


def majority(pairs: LabelPairs, weights: NDArray) -> NDArray:
    """Return (R,) accuracy of the majority baseline: always predicting the most frequent class of these examples."""
    return weights[:, pairs.true == pairs.commonest].sum(-1) / weights.sum(-1)


def classification_metrics(
    true: Sequence[int],
    predicted: Sequence[int],
    *,
    resamples: int,
    confidence: float,
    seed: int,
    figures: dict[str, ResampledMetric] | None = None,
) -> dict[str, BootstrapInterval]:
    """Return the metrics computed from "classes", with intervals; `figures` receives each.

    Raises:
        UserError: no example.
    """
    pairs = LabelPairs.of(true, predicted)
    statistics = {name: partial(function, pairs) for name, function in metric_functions("classes").items()}
    return frequency_intervals(
        pairs.kinds,
        statistics,
        num_kinds=len(pairs.true),
        shares=ROW_SHARES,
        resamples=resamples,
        confidence=confidence,
        seed=seed,
        figures=figures,
    )
