"""Judging a model: perplexity, classes, ranking, generation, each with a bootstrap interval."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "Interval": "bootstrap",
    "interval": "bootstrap",
    "ratio_interval": "bootstrap",
    "frequency_intervals": "bootstrap",
    "judge_classes": "metrics",
    "document_nats": "perplexity",
    "token_nats": "perplexity",
    "judge_sets": "multilabel",
    "judge_numbers": "regression",
    "head_scores": "judge",
    "rank_choices": "ranking",
    "generate_answers": "generate",
    "exact_matches": "generate",
    "evaluating": "mode",
    "forward_precision": "mode",
    "evaluate": "judge",
    "Judge": "judge",
    "Share": "share",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
