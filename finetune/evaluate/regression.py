"""Metrics of predicted numbers, with bootstrap intervals over examples.

Definitions are scipy's `pearsonr` and `spearmanr` (ties share their mean rank) and scikit-learn's
`root_mean_squared_error` and `mean_absolute_error`, checked against them in the tests.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .bootstrap import BootstrapInterval, ResampledMetric, bootstrap_interval
from .metrics import metric_functions


def regression_metrics(
    true: ArrayLike,
    predicted: ArrayLike,
    *,
    mean: float,
    resamples: int,
    confidence: float,
    seed: int,
    figures: dict[str, ResampledMetric] | None = None,
) -> dict[str, BootstrapInterval]:
    """Return the metrics computed from "numbers", with intervals; the baseline predicts `mean`, that of the training
    targets.

    A correlation with constant numbers is undefined, so null. `figures` receives each.

    Args:
        true, predicted: (n,) in the same units.
    Raises:
        UserError: no example.
    """
    true = np.asarray(true, dtype=np.float64)
    items = [true, predicted, np.full(len(true), mean)]
    if figures is not None:
        figures |= {
            name: ResampledMetric.over(items, function) for name, function in metric_functions("numbers").items()
        }
    return {
        name: bootstrap_interval(items, function, resamples=resamples, confidence=confidence, seed=seed)
        for name, function in metric_functions("numbers").items()
    }


def pearson(true: NDArray, predicted: NDArray, mean: NDArray | None = None) -> NDArray:
    """Return (R,) correlations of the rows of (R, n)."""
    a = true - true.mean(-1, keepdims=True)
    b = predicted - predicted.mean(-1, keepdims=True)
    scale = np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
    alike = (np.ptp(true, axis=-1) == 0) | (np.ptp(predicted, axis=-1) == 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(alike, np.nan, (a * b).sum(-1) / scale)


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


def always_mean(true: NDArray, predicted: NDArray, mean: NDArray) -> NDArray:
    """Return (R,) the rmse of always predicting the mean of the training targets."""
    return rmse(true, mean)
