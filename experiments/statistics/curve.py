"""One curve of a sweep: measurements along one axis under several seeds, the other axes held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from flatshift.experiments.statistics.emc import EPSILON
from flatshift.experiments.statistics.peak import MOST_POINTS, thin
from flatshift.experiments.statistics.scale import MetricScale, choose_scale
from flatshift.finetune.errors import UserError

Lost = Literal["diverged", "failed", "stopped early", "ended early"]
"""Fate of runs without values; `ended early`: some diverged, some stopped."""
_TABLES = ("test", "train_error", "train_loss", "gradient_norm", "sharpness")


@dataclass(frozen=True, eq=False, kw_only=True)
class Curve:
    """Measurements [S, J]: row s is one seed at all J points; NaN or infinity if a run diverged or was not measured.

    Raises UserError if a table does not fit the axis or has other seeds than `test`, or if the axis does not ascend.
    """

    axis: str
    """Name of the axis, such as `rank`, `steps` or `rows`."""
    values: Sequence[float]
    """[J]: ascending positions on the axis."""
    test: np.ndarray
    """[S, J]: metric to test, smaller is better, measured on held-out rows."""
    train_error: np.ndarray | None = None
    """[S, J]: share of wrong training examples or tokens; places the interpolation threshold."""
    fit: str = "training error"
    """Name of `train_error` in sentences."""
    train_loss: np.ndarray | None = None
    """[S, J]: loss on the training rows; a peak of its own means that training is unstable."""
    gradient_norm: np.ndarray | None = None
    """[S, J]: norm of the gradient at the point."""
    sharpness: np.ndarray | None = None
    """[S, J]: (preconditioned) sharpness × learning rate ÷ its stability threshold (2 for gradient descent, 38 for Adam
    with β₁ = 0.9); above 1 a quadratic diverges."""
    metric: str = "test error"
    """Name of `test` in sentences."""
    unit: str = ""
    """Unit of `test` in sentences."""
    items: int | None = None
    """Items behind each error rate of `test`; None: unknown, or not a rate."""
    epsilon: float = EPSILON
    """Mean training error up to which training data count as fitted."""
    training: bool = False
    """True if `test` is the training loss itself: a peak of it is unstable training, never double descent."""
    lost: Lost = "diverged"
    """Fate of runs without values, for sentences."""
    planned: int | None = None
    """Number of seeds in the plan if cells are still missing, for sentences; None: all cells have ended."""

    def __post_init__(self) -> None:
        try:
            x = np.asarray(self.values, dtype=np.float64)
        except (ValueError, TypeError):
            raise UserError(f"curve over {self.axis}: the positions must be numbers, got {self.values!r}") from None
        if x.ndim != 1 or not np.isfinite(x).all() or (np.diff(x) <= 0).any():
            raise UserError(f"curve over {self.axis}: the positions must be numbers that ascend")
        for name in _TABLES:
            table = getattr(self, name)
            if table is None:
                continue
            table = np.asarray(table, dtype=np.float64)
            if table.ndim != 2 or table.shape[1] != len(x):
                raise UserError(
                    f"curve over {self.axis}: {name} must be a table [seeds, {len(x)}], got shape {list(table.shape)}"
                )
            if len(table) != len(self.test):
                raise UserError(
                    f"curve over {self.axis}: {name} has {len(table)} seeds and test {len(self.test)}; row by row they "
                    "must be the same seeds"
                )
            object.__setattr__(self, name, table)

    @property
    def scale(self) -> MetricScale:
        """Scale on which `test` is tested, chosen by its `metric`."""
        return choose_scale(self.metric, self.test, self.items)

    def thinned(self, at_most: int = MOST_POINTS) -> Curve:
        """Return the curve at no more than `at_most` points, evenly spaced on a log axis and chosen without its
        values."""
        chosen = list(thin(self.values, at_most))
        tables = {name: getattr(self, name) for name in _TABLES}
        kept: dict[str, Any] = {name: None if table is None else table[:, chosen] for name, table in tables.items()}
        return replace(self, values=[self.values[j] for j in chosen], **kept)

    def at(self, point: int) -> str:
        """Format a point for sentences: `rank 16`."""
        return f"{self.axis} {self.values[point]:g}"

    def lost_sentence(self) -> str | None:
        """Return `2 of 5 seeds diverged at step 64 to 256.`, or `at rank 1 and 128`; None if every run has values."""
        gone = ~np.isfinite(self.test)
        if not gone.any():
            return None
        points = np.flatnonzero(gone.any(0)).tolist()
        named = [f"{self.values[j]:g}" for j in points]
        if len(named) > 1 and points[-1] - points[0] == len(points) - 1:  # every point between the first and the last
            said = f"{named[0]} to {named[-1]}"
        else:
            said = " and ".join(filter(None, [", ".join(named[:-1]), named[-1]]))
        return f"{int(gone.any(1).sum())} of {len(gone)} seeds {self.lost} at {self.axis} {said}."

    def amount(self, value: float) -> str:
        """Format a value of `test` with its unit, for sentences."""
        return f"{value:.3g} {self.unit}".rstrip()
