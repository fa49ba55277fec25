"""Scale on which a curve is tested, chosen by the kind of metric before any value is seen.

Scatter of a loss grows with the loss, and that of an error rate with p(1 − p): on the plain scale a few scattered runs
hide a peak that all of them have. A logarithm (Bartlett 1947) and the arcsine of Anscombe (1948) make the scatter about
the same everywhere. Both are monotone, so a curve of medians has a peak on the one scale exactly if on the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

_STARTED = 0.01
"""Offset c of log(y + c) for a loss, as a share of the median seed's highest value: spikes count as ratios, and values
a hundred times below the top count as fitted, however often they are halved."""
_LOSSES = ("loss", "perplexity", "squared", "surprise")


@dataclass(frozen=True)
class MetricScale:
    """y → log(y + c), y → arcsin √((n·y + 3/8)/(n + 3/4)), or y itself."""

    name: Literal["plain", "log", "arcsine"] = "plain"
    offset: float = 0.0
    """c of the logarithm."""
    items: int | None = None
    """n of the arcsine: items behind each error rate; None: unknown, and nothing is added."""

    @property
    def variance(self) -> float:
        """Least variance of one run on the scale: 1/(4n + 2) for an error rate of n items; 0 otherwise."""
        return 1 / (4 * self.items + 2) if self.name == "arcsine" and self.items else 0.0

    def least(self, unit: float) -> float:
        """Return `variance` for values that were divided by `unit`."""
        return self.variance / unit**2 if self.variance else 0.0

    def to(self, y: np.ndarray) -> np.ndarray:
        """Return values on the scale; those that are not finite stay so."""
        y = np.asarray(y, dtype=np.float64)
        if self.name == "log":
            return np.log(y + self.offset)
        if self.name == "arcsine":
            n = self.items
            return np.arcsin(np.sqrt(y if n is None else (n * y + 0.375) / (n + 0.75)))
        return y

    def back(self, z: float) -> float:
        """Return the value at z."""
        if self.name == "log":
            # `exp` overflows above 709.
            return float(np.exp(min(z, 700.0))) - self.offset
        if self.name == "arcsine":
            p = float(np.sin(np.clip(z, 0.0, np.pi / 2)) ** 2)
            return p if self.items is None else float(np.clip((p * (self.items + 0.75) - 0.375) / self.items, 0.0, 1.0))
        return float(z)

    def above(self, z: float, height: float) -> float:
        """Return `height` on the scale above z, in the units of the values."""
        if not np.isfinite(height):
            return height
        return height if self.name == "plain" else max(0.0, self.back(z + height) - self.back(z))

    def sentence(self) -> str | None:
        """Return a sentence on the scale, so that a reader can check the numbers; None on the plain scale."""
        if self.name == "log":
            return "Evaluated on the logarithm, as every loss is; levels are geometric means."
        if self.name == "arcsine":
            known = f" with the binomial variance of {self.items} items" if self.items else ""
            return f"Evaluated on the arcsine scale{known}, as every error rate is."
        return None


def choose_scale(metric: str, values: np.ndarray, items: int | None = None) -> MetricScale:
    """Return the scale for the metric `metric`: losses log, error rates arcsine, everything else plain.

    values: [S, J], used only to check if they can be such a metric at all (a loss below 0 or a rate outside 0 to 1 gets
    the plain scale), and for the offset of the logarithm.
    """
    finite = np.isfinite(values)
    measured = values[finite]
    name = metric.lower()
    if not measured.size or name.startswith("log") or measured.min() < 0:
        return MetricScale()
    if any(word in name for word in _LOSSES):
        tops = np.where(finite, values, -np.inf).max(1)
        start = _STARTED * float(np.median(tops[np.isfinite(tops)]))
        return MetricScale("log", start) if start > 0 else MetricScale()
    return MetricScale("arcsine", items=items) if "error" in name and measured.max() <= 1 else MetricScale()
