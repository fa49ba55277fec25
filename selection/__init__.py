"""Pools and targets in; scored and chosen samples out. Knows no model: features come as arrays or by callables."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from selection.config import build_selector
from selection.errors import ConvergenceWarning, SelectionError
from selection.features.matrix import load_features
from selection.features.pooling import pool_features
from selection.features.static import StaticEmbedder
from selection.features.tfidf import TfIdfEmbedder
from selection.features.tokens import TokenRows
from selection.methods.auto import AutoSelector
from selection.methods.base import Pool, Selector, Target
from selection.methods.classifier import ClassifierSelector
from selection.methods.contrast import GotDContrastSelector
from selection.methods.cynical import CynicalSelector
from selection.methods.domains import DomainsSelector
from selection.methods.dsir import DSIRSelector
from selection.methods.gotd import GotDSelector
from selection.methods.knn import KNNSelector
from selection.methods.length import LengthSelector
from selection.methods.less import LessSelector
from selection.methods.loss_gap import LossGapSelector
from selection.methods.moore_lewis import MooreLewisSelector
from selection.methods.perplexity import PerplexitySelector
from selection.methods.random import RandomSelector
from selection.methods.round_robin import RoundRobinSelector
from selection.methods.tsds import TSDSSelector

if TYPE_CHECKING:
    from selection.features.cache import FeatureCache
    from selection.features.projection import RandomProjection
    from selection.transport.solver import Potentials, sinkhorn_potentials

_HEAVY = {
    "FeatureCache": "features.cache",
    "Potentials": "transport.solver",
    "RandomProjection": "features.projection",
    "sinkhorn_potentials": "transport.solver",
}
"""What brings NumPy or torch, by its module."""

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
        return getattr(importlib.import_module(f"selection.{_HEAVY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
