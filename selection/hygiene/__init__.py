"""Data hygiene before a selection: filters, exact and near-duplicates, decontamination; every drop with its cause."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from flatshift.selection.hygiene.hygiene_config import (
    Decontaminate,
    Hygiene,
    Language,
    LengthFilter,
    NearDuplicates,
    Repetition,
)

if TYPE_CHECKING:
    from flatshift.selection.hygiene.steps import CleaningResult, DropList, ReferenceTexts, clean_pool

__all__ = [
    "CleaningResult",
    "Decontaminate",
    "DropList",
    "Hygiene",
    "Language",
    "LengthFilter",
    "NearDuplicates",
    "ReferenceTexts",
    "Repetition",
    "clean_pool",
]


_HEAVY = ("CleaningResult", "DropList", "ReferenceTexts", "clean_pool")
"""Names whose module imports NumPy; loaded on first use."""


def __getattr__(name: str) -> Any:
    if name in _HEAVY:
        return getattr(importlib.import_module("flatshift.selection.hygiene.steps"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
