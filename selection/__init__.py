"""Pools and targets in; scored and chosen samples out. Knows no model: features come as arrays or by callables."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selection.errors import ConvergenceWarning, SelectionError
    from selection.features import FeatureCache, StaticEmbedder, TfIdfEmbedder, load_features, pool_features
    from selection.features.projection import RandomProjection
    from selection.methods import (
        DomainsSelector,
        DSIRSelector,
        GotDContrastSelector,
        GotDSelector,
        KNNSelector,
        LengthSelector,
        LessSelector,
        PerplexitySelector,
        Pool,
        RandomSelector,
        Selector,
        Target,
        TSDSSelector,
        build_selector,
    )
    from selection.transport import Potentials, sinkhorn_potentials

_HOME = {
    "ConvergenceWarning": "selection.errors",
    "DSIRSelector": "selection.methods",
    "DomainsSelector": "selection.methods",
    "FeatureCache": "selection.features",
    "GotDContrastSelector": "selection.methods",
    "GotDSelector": "selection.methods",
    "KNNSelector": "selection.methods",
    "LengthSelector": "selection.methods",
    "LessSelector": "selection.methods",
    "PerplexitySelector": "selection.methods",
    "Pool": "selection.methods",
    "Potentials": "selection.transport",
    "RandomProjection": "selection.features.projection",
    "RandomSelector": "selection.methods",
    "SelectionError": "selection.errors",
    "Selector": "selection.methods",
    "StaticEmbedder": "selection.features",
    "TSDSSelector": "selection.methods",
    "Target": "selection.methods",
    "TfIdfEmbedder": "selection.features",
    "build_selector": "selection.methods",
    "load_features": "selection.features",
    "pool_features": "selection.features",
    "sinkhorn_potentials": "selection.transport",
}

__all__ = [
    "ConvergenceWarning",
    "DSIRSelector",
    "DomainsSelector",
    "FeatureCache",
    "GotDContrastSelector",
    "GotDSelector",
    "KNNSelector",
    "LengthSelector",
    "LessSelector",
    "PerplexitySelector",
    "Pool",
    "Potentials",
    "RandomProjection",
    "RandomSelector",
    "SelectionError",
    "Selector",
    "StaticEmbedder",
    "TSDSSelector",
    "Target",
    "TfIdfEmbedder",
    "build_selector",
    "load_features",
    "pool_features",
    "sinkhorn_potentials",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
