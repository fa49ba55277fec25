"""Data hygiene before a selection: filters, exact and near-duplicates, decontamination; every drop with its cause."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selection.hygiene.cleaning import Cleaned, Reference, clean
    from selection.hygiene.config import Decontaminate, Hygiene, Language, Length, NearDuplicates, Repetition

_HOME = {
    "Cleaned": "cleaning",
    "Decontaminate": "config",
    "Hygiene": "config",
    "Language": "config",
    "Length": "config",
    "NearDuplicates": "config",
    "Reference": "cleaning",
    "Repetition": "config",
    "clean": "cleaning",
}

__all__ = [
    "Cleaned",
    "Decontaminate",
    "Hygiene",
    "Language",
    "Length",
    "NearDuplicates",
    "Reference",
    "Repetition",
    "clean",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"selection.hygiene.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
