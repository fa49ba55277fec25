"""Words of the command line."""

from __future__ import annotations

from collections.abc import Mapping


def flags(settings: Mapping[str, object]) -> list[str]:
    """Settings of a recipe as flags."""
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]
