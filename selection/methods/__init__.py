"""The selectors: one grammar, `fit(pool, target)`, `scores_`, `select(k)`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selection.methods.base import Pool, Selector, Target
    from selection.methods.build import build_selector
    from selection.methods.dsir import DSIRSelector
    from selection.methods.gotd import GotDSelector
    from selection.methods.knn import KNNSelector
    from selection.methods.random import RandomSelector

_HOME = {
    "DSIRSelector": "dsir",
    "GotDSelector": "gotd",
    "KNNSelector": "knn",
    "Pool": "base",
    "RandomSelector": "random",
    "Selector": "base",
    "Target": "base",
    "build_selector": "build",
}

__all__ = [
    "DSIRSelector",
    "GotDSelector",
    "KNNSelector",
    "Pool",
    "RandomSelector",
    "Selector",
    "Target",
    "build_selector",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"selection.methods.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
