"""Whether a selection does what its scores promise: transport distances realised beside predicted, and coverage."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selection.checks.check import Checked, Refit, check_selection
    from selection.checks.coverage import Coverage, target_coverage
    from selection.checks.mixtures import Mixtures
    from selection.checks.sampling import Sample, sample_pool

_HOME = {
    "Checked": "check",
    "Coverage": "coverage",
    "Mixtures": "mixtures",
    "Refit": "check",
    "Sample": "sampling",
    "check_selection": "check",
    "sample_pool": "sampling",
    "target_coverage": "coverage",
}

__all__ = [
    "Checked",
    "Coverage",
    "Mixtures",
    "Refit",
    "Sample",
    "check_selection",
    "sample_pool",
    "target_coverage",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"selection.checks.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
