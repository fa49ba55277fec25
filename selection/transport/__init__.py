"""Entropic optimal transport between a pool and a target: potentials and calibrated gradients."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatshift.selection.transport.progress import ProgressPrinter
    from flatshift.selection.transport.solver import Potentials, sinkhorn_potentials

_HOME = {"ProgressPrinter": "progress", "Potentials": "solver", "sinkhorn_potentials": "solver"}

__all__ = ["Potentials", "ProgressPrinter", "sinkhorn_potentials"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"flatshift.selection.transport.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
