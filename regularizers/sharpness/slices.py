"""One- and two-dimensional slices of the loss along filter-normalised random directions (Li et al., 1712.09913)."""

from __future__ import annotations

from dataclasses import dataclass

from regularizers.sharpness.objective import Objective
from regularizers.sharpness.spaces import Space


@dataclass(frozen=True)
class Line:
    """L(w + a d) on a grid of a, for several directions d with |d_i| = |w_i| in every row."""

    at: list[float]
    losses: list[list[float]]
    """One list over `at` for each direction; the middle is L(w)."""


@dataclass(frozen=True)
class Plane:
    """L(w + a d₁ + b d₂) on a square grid."""

    at: list[float]
    losses: list[list[float]]
    """losses[i][j] is at a = at[j], b = at[i]."""


def grid(points: int, reach: float) -> list[float]:
    """`points` (odd) numbers from −reach to reach, 0 exactly in the middle."""
    half = points // 2
    return [reach * (index - half) / half for index in range(points)]


def line(
    space: Space, objective: Objective, *, base: float, points: int, reach: float, directions: int, seed: int
) -> Line:
    """Slices along `directions` random directions; `base` is L(w)."""
    at = grid(points, reach)
    losses = []
    for index in range(directions):
        direction = space.draw(seed, "slice", index, exact=True)
        losses.append([space.value_along(objective, [(a, direction)]) if a else base for a in at])
    return Line(at, losses)


def plane(space: Space, objective: Objective, *, base: float, points: int, reach: float, seed: int) -> Plane:
    """The slice spanned by the first two directions of `line`."""
    at = grid(points, reach)
    across, up = (space.draw(seed, "slice", index, exact=True) for index in (0, 1))
    losses = [[space.value_along(objective, [(a, across), (b, up)]) if a or b else base for a in at] for b in at]
    return Plane(at, losses)
