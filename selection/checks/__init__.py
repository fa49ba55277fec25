"""Checks of a selection against its scores: realised and predicted transport distances, and target coverage."""

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
