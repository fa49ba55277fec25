"""Where the values of a sweep's axis stand on a chart, and which of them get a tick."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.report import formats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BASES = (2, 4, 10, 16, 100, 256)
_CHARACTER = 7.2
"""Width of a digit of a tick label in px, a little generous."""


@dataclass(frozen=True)
class Scale:
    """x positions of axis values: log₂ of positive numbers that span a factor of 8, words in their order."""

    axis: str
    values: tuple[Any, ...]
    at: dict[Any, float]
    log: bool

    @property
    def title(self) -> str:
        """The axis' name with its unit and kind."""
        return formats.axis_name(self.axis) + (" (log scale)" if self.log else "")

    def place(self, value: float) -> float:
        """x position of a number that need not be one of the values."""
        return math.log2(value) if self.log else value

    def ticks(self, width: float) -> list[Any]:
        """Values to write below `width` px: all that fit, else powers of a base, else every k-th."""
        if self.log:
            regular = [[v for v in self.values if _is_power(v, base)] for base in _BASES]
        else:
            regular = []
        every = [list(self.values[::k]) for k in range(2, max(len(self.values), 3))]
        choices = [list(self.values), *(r for r in regular if len(r) > 2), *every]
        return next((c for c in choices if self._fit(c, width)), list(self.values[:1]))

    def draw(self, ax: Axes, width: float, *, names: bool = True) -> None:
        """Set the x ticks and limits of `ax`, which is `width` px wide."""
        ends = (min(self.at.values()), max(self.at.values()))
        margin = 0.03 * ((ends[1] - ends[0]) or 1.0)
        ax.set_xlim(ends[0] - margin, ends[1] + margin)
        shown = self.ticks(width)
        ax.set_xticks([self.at[v] for v in shown], [formats.axis_value(v) if names else "" for v in shown])

    def _fit(self, shown: Sequence[Any], width: float) -> bool:
        low, high = min(self.at.values()), max(self.at.values())
        per_unit = width / ((high - low) * 1.06 or 1.0)
        wide = [_CHARACTER * len(formats.axis_value(v)) for v in shown]
        places = [self.at[v] * per_unit for v in shown]
        return all(places[i + 1] - places[i] >= (wide[i] + wide[i + 1]) / 2 + 4 for i in range(len(shown) - 1))


def scale(axis: str, values: Sequence[Any]) -> Scale:
    """The scale of an axis with these values, in their order; None and words count as words."""
    numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    if numeric and min(values) > 0 and max(values) / min(values) >= 8:
        return Scale(axis, tuple(values), {v: math.log2(v) for v in values}, log=True)
    at = {v: float(v) if numeric else float(i) for i, v in enumerate(values)}
    return Scale(axis, tuple(values), at, log=False)


def _is_power(value: float, base: int) -> bool:
    power = math.log(value) / math.log(base)
    return abs(power - round(power)) < 1e-9
