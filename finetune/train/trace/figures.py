"""From what was found of each example to the figures of a split. NumPy only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Judged:
    """What a model makes of n examples, in their order, against the labels they were encoded with."""

    loss: NDArray[np.float64]
    """(n,) −log p summed over the example's supervised tokens (or its class), nats."""
    wrong: NDArray[np.int64]
    """(n,) supervised tokens that are not the likeliest (0 or 1 for classification)."""
    supervised: NDArray[np.int64]
    """(n,) supervised tokens (1 for classification)."""
    predicted: NDArray[np.int64] | None = None
    """(n,) the likeliest class; None for tasks that predict tokens or sets of classes."""


@dataclass(frozen=True)
class Flipped:
    """Which of n training examples bear a wrong label."""

    mask: NDArray[np.bool_]
    """(n,) whether the label was replaced by noise."""
    true: NDArray[np.int64] | None = None
    """(n,) the class before it was; None for tasks that predict tokens."""


def split_figures(split: str, judged: Judged, flipped: Flipped | None = None) -> dict[str, float | None]:
    """`<split>.loss, .error` and, for tasks that predict tokens, `.exact_error`; with `flipped` also the error on clean
    and on noisy examples, and which of the latter were memorised or recovered.

    A share of no examples is None. Means are over supervised tokens, or examples for classification; `exact_error`,
    `memorised` and `recovered` count examples.
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
