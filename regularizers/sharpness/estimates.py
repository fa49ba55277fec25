"""A number with its interval, and the interval of a mean over draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A measure: its value, an interval where there is something random (or unfinished) about it, and of how many."""

    value: float
    low: float | None
    high: float | None
    n: int
    """Draws that were averaged; for what is iterated, the number of iterations."""

    @classmethod
    def exact(cls, value: float, n: int = 1) -> Estimate:
        """A value without an interval."""
        return cls(value, None, None, n)

    @classmethod
    def mean(cls, draws: Sequence[float], confidence: float) -> Estimate:
        """The mean of independent draws with Student's interval; none below two draws."""
        n = len(draws)
        value = math.fsum(draws) / n
        if n < 2 or not math.isfinite(value):
            return cls.exact(value, n)
        from scipy.special import stdtrit

        half = float(stdtrit(n - 1, 0.5 + confidence / 2)) * standard_error(draws)
        return cls(value, value - half, value + half, n)

    def as_dict(self) -> dict[str, float | int | None]:
        """{value, low, high, n}, as in eval.json; a number that is not finite becomes None."""

        def number(value: float | None) -> float | None:
            return value if value is not None and math.isfinite(value) else None

        return {"value": number(self.value), "low": number(self.low), "high": number(self.high), "n": self.n}


def standard_error(draws: Sequence[float]) -> float:
    """Of the mean of at least two independent draws."""
    n = len(draws)
    mean = math.fsum(draws) / n
    return math.sqrt(math.fsum((draw - mean) ** 2 for draw in draws) / (n - 1) / n)
