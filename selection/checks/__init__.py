"""Checks of a selection against its scores: realised and predicted transport distances, and target coverage."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatshift.selection.checks.check import (
        MixtureTransport,
        PoolSample,
        Refit,
        SelectionCheck,
        check_selection,
        sample_pool,
    )
    from flatshift.selection.checks.coverage import Coverage, target_coverage

__all__ = [
    "Coverage",
    "MixtureTransport",
    "PoolSample",
    "Refit",
    "SelectionCheck",
    "check_selection",
    "sample_pool",
    "target_coverage",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        home = "coverage" if name in ("Coverage", "target_coverage") else "check"
        return getattr(importlib.import_module(f"flatshift.selection.checks.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
