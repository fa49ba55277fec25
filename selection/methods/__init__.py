"""The selectors: one grammar, `fit(pool, target)`, `scores_`, `select(k)`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selection.methods.base import Pool, Selector, Target
    from selection.methods.build import build_selector
    from selection.methods.contrast import GotDContrastSelector
    from selection.methods.domains import DomainsSelector
    from selection.methods.dsir import DSIRSelector
    from selection.methods.gotd import GotDSelector
    from selection.methods.knn import KNNSelector
    from selection.methods.length import LengthSelector
    from selection.methods.less import LessSelector
    from selection.methods.perplexity import PerplexitySelector
    from selection.methods.random import RandomSelector
    from selection.methods.tsds import TSDSSelector

_HOME = {
    "DSIRSelector": "dsir",
    "DomainsSelector": "domains",
    "GotDContrastSelector": "contrast",
    "GotDSelector": "gotd",
    "KNNSelector": "knn",
    "LengthSelector": "length",
    "LessSelector": "less",
    "PerplexitySelector": "perplexity",
    "Pool": "base",
    "RandomSelector": "random",
    "Selector": "base",
    "TSDSSelector": "tsds",
    "Target": "base",
    "build_selector": "build",
}

__all__ = [
    "DSIRSelector",
    "DomainsSelector",
    "GotDContrastSelector",
    "GotDSelector",
    "KNNSelector",
    "LengthSelector",
    "LessSelector",
    "PerplexitySelector",
    "Pool",
    "RandomSelector",
    "Selector",
    "TSDSSelector",
    "Target",
    "build_selector",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"selection.methods.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
