"""PEFT's rule for settings by layer (`rank_pattern`, `alpha_pattern`), without importing PEFT."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value")


def by_pattern(patterns: Mapping[str, Value] | None, layer: str, default: Value) -> Value:
    """The value of the first pattern that matches the end of the name `layer` from a dot on, else `default`."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return value
    return default
