"""Selection of samples from a pool for a target. Knows no model: features are given as arrays or by callables."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from flatshift.selection.config import build_selector
from flatshift.selection.errors import ConvergenceWarning, SelectionError
from flatshift.selection.features.matrix import load_features
from flatshift.selection.features.pooling import pool_features
from flatshift.selection.features.static import StaticEmbedder
from flatshift.selection.features.tfidf import TfIdfEmbedder
from flatshift.selection.features.tokens import TokenRows
from flatshift.selection.methods.auto import AutoSelector
from flatshift.selection.methods.base import Pool, Selector, Target
from flatshift.selection.methods.classifier import ClassifierSelector
from flatshift.selection.methods.controls import LengthSelector, RandomSelector
from flatshift.selection.methods.cynical import CynicalSelector
from flatshift.selection.methods.domains import DomainsSelector
from flatshift.selection.methods.dsir import DSIRSelector
from flatshift.selection.methods.gotd import GotDContrastSelector, GotDSelector
from flatshift.selection.methods.knn import KNNSelector, RoundRobinSelector
from flatshift.selection.methods.less import LessSelector
from flatshift.selection.methods.moore_lewis import MooreLewisSelector
from flatshift.selection.methods.perplexity import LossGapSelector, PerplexitySelector
from flatshift.selection.methods.tsds import TSDSSelector

if TYPE_CHECKING:
    from flatshift.selection.features.cache import FeatureCache
    from flatshift.selection.features.projection import RandomProjection
    from flatshift.selection.transport.solver import Potentials, sinkhorn_potentials

_HEAVY = {
    "FeatureCache": "features.cache",
    "Potentials": "transport.solver",
    "RandomProjection": "features.projection",
    "sinkhorn_potentials": "transport.solver",
}
"""Names whose modules import NumPy or torch; loaded on first use."""

__all__ = [
    "AutoSelector",
    "ClassifierSelector",
    "ConvergenceWarning",
    "CynicalSelector",
    "DSIRSelector",
    "DomainsSelector",
    "FeatureCache",
    "GotDContrastSelector",
    "GotDSelector",
    "KNNSelector",
    "LengthSelector",
    "LessSelector",
    "LossGapSelector",
    "MooreLewisSelector",
    "PerplexitySelector",
    "Pool",
    "Potentials",
    "RandomProjection",
    "RandomSelector",
    "RoundRobinSelector",
    "SelectionError",
    "Selector",
    "StaticEmbedder",
    "TSDSSelector",
    "Target",
    "TfIdfEmbedder",
    "TokenRows",
    "build_selector",
    "load_features",
    "pool_features",
    "sinkhorn_potentials",
]


def __getattr__(name: str) -> Any:
    if name in _HEAVY:
        return getattr(importlib.import_module(f"flatshift.selection.{_HEAVY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
