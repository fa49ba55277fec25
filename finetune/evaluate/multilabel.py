"""Metrics of examples with any number of classes, with bootstrap intervals over examples.

Definitions are scikit-learn's on indicator matrices, checked against it in the tests: `accuracy_score` (of whole sets),
`f1_score` with "micro" (zero_division=0) and "macro" (over the classes that occur, like zero_division=nan), and
`average_precision_score` as the mean over classes that occur in truth. A class is predicted if its logit is above 0.
All statistics take weights (R, n): the number of times each of n examples occurs in each of R resamples.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from .bootstrap import BootstrapInterval, ResampledMetric, frequency_intervals
from .metrics import ROW_SHARES, metric_functions


@dataclass(frozen=True)
class LabelSets:
    """True sets of classes and logits of n examples."""

    true: NDArray[np.bool_]
    """(n, C)"""
    logits: NDArray[np.float64]
    """(n, C)"""

    @cached_property
    def said(self) -> NDArray[np.bool_]:
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
    resamples: int,
    confidence: float,
    seed: int,
    figures: dict[str, ResampledMetric] | None = None,
) -> dict[str, BootstrapInterval]:
    """Return the metrics computed from "sets", with intervals, of n examples with C classes; `figures` receives each.

    Args:
        true, logits: (n, C).
    Raises:
        UserError: no example.
    """
    sets = LabelSets(true, logits)
    statistics = {name: partial(function, sets) for name, function in metric_functions("sets").items()}
    return frequency_intervals(
        np.arange(len(true)),
        statistics,
        num_kinds=len(true),
        shares=ROW_SHARES,
        resamples=resamples,
        confidence=confidence,
        seed=seed,
        figures=figures,
    )


def accuracy(sets: LabelSets, weights: NDArray) -> NDArray:
    """Return (R,) fraction of examples whose whole set of classes is correct."""
    return _weighted_mean((sets.said == sets.true).all(axis=1), weights)


def f1_micro(sets: LabelSets, weights: NDArray) -> NDArray:
    """Return (R,) 2·hits / (true + predicted) over all classes together; 0 if there is neither."""
    return _f1_micro(sets.true, sets.said, weights)


def f1_macro(sets: LabelSets, weights: NDArray) -> NDArray:
    """Return (R,) mean of 2·hits / (true + predicted) over the classes that occur in the resample, true or
    predicted."""
    hits, total = _hits_and_totals(sets.true, sets.said, weights)
    return _safe_ratio(_safe_ratio(2.0 * hits, total).sum(-1), (total > 0).sum(-1))


def average_precision(sets: LabelSets, weights: NDArray) -> NDArray:
    """Return (R,) mean over the classes in the resample of Σ (recallₖ − recallₖ₋₁) · precisionₖ, over the distinct
    scores in descending order."""
    true, scores = sets.true, sets.logits
    total, classes = np.zeros(len(weights)), np.zeros(len(weights))
    for k in range(true.shape[1]):
        order = np.argsort(-scores[:, k], kind="stable")
        ranked = scores[order, k]
        ends = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))  # tied scores enter together
        drawn = weights[:, order]
        hits = np.cumsum(drawn * true[order, k], axis=1)[:, ends]
        precision = _safe_ratio(hits, np.cumsum(drawn, axis=1)[:, ends])
        gained = np.diff(hits, axis=1, prepend=0.0)
        total += _safe_ratio((gained * precision).sum(-1), hits[:, -1])
        classes += hits[:, -1] > 0
    return _safe_ratio(total, classes)


def majority(sets: LabelSets, weights: NDArray) -> NDArray:
    """Return (R,) accuracy of the majority baseline: always predicting these examples' most frequent set of classes."""
    return _weighted_mean((sets.true == sets.commonest).all(axis=1), weights)


def best_constant(sets: LabelSets, weights: NDArray) -> NDArray:
    """Return (R,) micro F1 of the best constant prediction (some of the most frequent classes, whatever the
    example)."""
    return _f1_micro(sets.true, np.broadcast_to(sets.best, sets.true.shape), weights)


def _f1_micro(true: NDArray[np.bool_], said: NDArray[np.bool_], weights: NDArray) -> NDArray:
    hits, total = _hits_and_totals(true, said, weights)
    return _safe_ratio(2.0 * hits.sum(-1), total.sum(-1))


def _weighted_mean(values: NDArray, weights: NDArray) -> NDArray:
    return (weights @ values.astype(np.float64)) / weights.sum(-1)


def _hits_and_totals(true: NDArray[np.bool_], said: NDArray[np.bool_], weights: NDArray) -> tuple[NDArray, NDArray]:
    """Return (R, C) examples for which a class is both true and predicted, and the sum of true and predicted ones."""
    return weights @ (true & said).astype(np.float64), weights @ (true.astype(np.float64) + said)


def _safe_ratio(top: NDArray, bottom: NDArray) -> NDArray:
    bottom = np.asarray(bottom, dtype=np.float64)
    return np.divide(top, bottom, out=np.zeros(np.broadcast(top, bottom).shape), where=bottom > 0)
