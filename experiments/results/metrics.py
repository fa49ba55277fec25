"""What is known of a metric by its name: how a reader calls it, what it is counted in, its bounds and its floor."""

from __future__ import annotations

import math
from typing import Any

METRICS = {
    "loss": ("loss", "nats per supervised token or example"),
    "perplexity": ("perplexity", "exp of nats per token"),
    "pseudo_perplexity": ("pseudo-perplexity", "exp of nats per hidden token"),
    "bits_per_byte": ("bits per byte", "bits per byte of text"),
    "accuracy": ("accuracy", "share correct"),
    "f1_macro": ("macro F1", "mean F1 over classes"),
    "f1_micro": ("micro F1", "F1 over all classes together"),
    "average_precision": ("average precision", "mean over classes"),
    "matthews": ("Matthews", "correlation, −1 to 1"),
    "exact_match": ("exact match", "share of answers"),
    "chrf": ("chrF", "character n-gram F-score"),
    "pearson": ("Pearson", "correlation, −1 to 1"),
    "spearman": ("Spearman", "rank correlation, −1 to 1"),
    "rmse": ("RMSE", "in the target's units"),
    "mae": ("mean absolute error", "in the target's units"),
    "error": ("error", "share wrong"),
    "exact_error": ("exact-match error", "share of examples with anything wrong"),
    "error_clean": ("error on clean labels", "share wrong"),
    "error_noisy": ("error on noisy labels", "share wrong"),
    "memorised": ("noisy labels memorised", "share"),
    "recovered": ("noisy labels recovered", "share"),
}
"""Metric: (name for a reader, unit in words)."""

FLOORS = {"accuracy": "majority_floor", "f1_micro": "f1_floor", "rmse": "mean_floor"}
"""Metric: the figure beside it of a model that has learnt nothing but what is common."""
FLOOR_NAMES = {"majority_floor": "majority floor", "f1_floor": "F1 floor", "mean_floor": "mean floor"}
LOWER_IS_BETTER = frozenset({"loss", "perplexity", "pseudo_perplexity", "bits_per_byte", "error", "rmse", "mae"})
SHARES = (
    "accuracy", "f1_micro", "f1_macro", "average_precision", "exact_match", "chrf", "matthews", "pearson", "spearman",
    "error",
)  # fmt: skip
_SIGNED = frozenset({"matthews", "pearson", "spearman"})
_RECORDED_SHARES = frozenset({"exact_error", "error_clean", "error_noisy", "memorised", "recovered"})


def bounds(metric: str) -> tuple[float, float] | None:
    """What a metric can be at all; None where nothing is known of it."""
    if metric in _SIGNED:
        return -1.0, 1.0
    if metric in SHARES or metric in _RECORDED_SHARES:
        return 0.0, 1.0
    return (0.0, math.inf) if metric in LOWER_IS_BETTER else None


HEADLINE = (
    "perplexity", "bits_per_byte", "pseudo_perplexity", "accuracy", "exact_match", "f1_macro", "spearman", "rmse",
    "loss",
)  # fmt: skip
"""Metrics in the order in which a headline takes them."""


def headline_metrics(names: Any) -> list[str]:
    """Known metrics first, in the order of a headline; then the others as they come."""
    return [m for m in HEADLINE if m in names] + [m for m in names if m not in HEADLINE]
