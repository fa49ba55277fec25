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
    from flatshift.selection.hygiene.listed import DropList
    from flatshift.selection.hygiene.steps import CleaningResult, ReferenceTexts, clean_pool

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


_HOME = {
    "CleaningResult": "steps",
    "ReferenceTexts": "steps",
    "clean_pool": "steps",
    "DropList": "listed",
}  # these import NumPy


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"flatshift.selection.hygiene.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
