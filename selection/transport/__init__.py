"""Entropic optimal transport between a pool and a target: potentials and calibrated gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selection.transport.solver import Potentials, sinkhorn_potentials

__all__ = ["Potentials", "sinkhorn_potentials"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from selection.transport import solver

        return getattr(solver, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
