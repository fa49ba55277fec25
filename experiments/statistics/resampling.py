"""Intervals over two crossed sources of chance: seeds, which rerun everything, and the test rows that all share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def seeds_by_items(
    differences: Sequence[np.ndarray], *, resamples: int, rng: np.random.Generator
) -> dict[str, float | int]:
    """95 % percentile interval of the mean of the tables' means, over resampled seeds × test rows.

    Args:
        differences: for each task (S, n) ours − base, item by item; all with the same seeds in the same order. Each
            task's rows are resampled once for both sides and all seeds, as they are the same rows.
    """
    count = len(differences[0])
    seeds = rng.multinomial(count, np.full(count, 1 / count), size=resamples) / count
    total = np.zeros(resamples)
    for difference in differences:
        n = difference.shape[1]
        items = rng.multinomial(n, np.full(n, 1 / n), size=resamples) / n
        total += np.einsum("rs,si,ri->r", seeds, difference, items, optimize=True)
    low, high = np.quantile(total / len(differences), [0.025, 0.975])
    return {"low": float(low), "high": float(high), "resamples": resamples}


def right_items(text: str) -> np.ndarray:
    """(n,) float64: right (1) or wrong (0) by test row, from the text of 1 and 0 that a result keeps."""
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.float64) - 48
