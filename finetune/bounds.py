"""Values that a setting may have. Imports nothing."""

from __future__ import annotations

import math
from typing import Any

MOST_STEPS = 10**9
"""Updates of a stage, at most: at a millisecond each they take twelve days."""
LONGEST = 2**24
"""Tokens of a row, at most."""


def check_bounds(config: Any, **bounds: tuple[float | None, float | None]) -> None:
    """Refuse field values outside `(low, high)`, ends included; None is unbounded but for infinities, and a None value
    passes.

    Raises ValueError that begins with the field's name, so that a recipe loader can say where it was set.
    """
    for name, (low, high) in bounds.items():
        value = getattr(config, name)
        if value is None:
            continue
        if (low is not None and not value >= low) or (high is not None and not value <= high):
            wanted = (
                f"≥ {low}" if high in (None, math.inf) else f"≤ {high}" if low is None else f"between {low} and {high}"
            )
            raise ValueError(f"{name} must be {wanted}, got {value}")
        if high is None and math.isinf(value):
            raise ValueError(f"{name} must be a finite number, got {value}")


def refuse_zero(config: Any, **meant: str) -> None:
    """Refuse the value 0 of settings at which nothing would be trained.

    meant: for each field, what 0 does and what to write instead. Raises ValueError as `check_bounds`.
    """
    for name, told in meant.items():
        if getattr(config, name) == 0:
            raise ValueError(f"{name} must be above 0, got 0: {told}")
