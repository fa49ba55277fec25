"""What the settings of all methods share: bounds, and the selector that is made of them. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from inspect import signature
from math import inf
from typing import Any, TypeVar

Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True)
class Around:
    """What a selector is made with beside its settings.

    seed: for those that draw. budget: for those that shape their selection for one size (gotd in rounds, domains), and
    for the overlap that gotd measures. measure: texts → mean −log p per token, for perplexity. device: of the transport
    solver. state: directory in which a long solve of gotd leaves what it needs to go on after a kill.
    """

    seed: int
    budget: int | None = None
    measure: Callable[..., Any] | None = None
    device: str = "cpu"
    state: str | None = None


def made(selector: type[Made], settings: Any, around: Around, **more: Any) -> Made:
    """`selector` with each parameter that `more`, `settings` or `around` has a value for, by name."""
    known = {field.name: getattr(part, field.name) for part in (around, settings) for field in fields(part)} | more
    return selector(**{name: known[name] for name in signature(selector).parameters if name in known})


def check(settings: Any, *names: str, above: float = -inf, least: float = -inf, most: float = inf) -> None:
    """Refuse fields that are not finite, not above `above`, below `least` or over `most`; None passes.

    Raises ValueError that begins with the field's name, so that a recipe loader can say where it was set.
    """
    for name in names:
        value = getattr(settings, name)
        if value is None or (above < value < inf and least <= value <= most):
            continue
        low = f"above {above:,g}" if above > -inf else f"at least {least:,g}"
        high = "" if most == inf else f" and at most {most:,g}"
        raise ValueError(f"{name} must be {low}{high}{' and finite' * (value == inf)}, got {value:g}")
