"""Curves whose answer is known: test curves without a peak (nulls) and with one (bumps), as noise about a mean.

Units: standard deviations of one run. Every generator takes (generator, N, S, J) and returns [N, S, J].
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Draws = Callable[[np.random.Generator, int, int, int], np.ndarray]


def _gaussian(mean: Callable[[int], np.ndarray]) -> Draws:
    def draw(generator: np.random.Generator, count: int, seeds: int, points: int) -> np.ndarray:
        return generator.standard_normal((count, seeds, points)) + mean(points)

    return draw


def rise_then_plateau(points: int) -> np.ndarray:
    """[J]: one low point, then a plateau 50 higher: the least favourable null."""
    return np.where(np.arange(points) == 0, -50.0, 0.0)


def u_shape(points: int) -> np.ndarray:
    """[J]: a parabola with its minimum in the middle, 4 at both ends."""
    return 4 * np.linspace(-1, 1, points) ** 2


def descent(points: int) -> np.ndarray:
    """[J]: exponential fall from 10 towards 0."""
    return 10 * np.exp(-np.arange(points) / 1.5)


def _ninefold(mean: Callable[[int], np.ndarray]) -> Draws:
    def draw(generator: np.random.Generator, count: int, seeds: int, points: int) -> np.ndarray:
        noise = generator.standard_normal((count, seeds, points))
        noise[..., points // 2] *= 3.0
        return noise + mean(points)

    return draw


def _autoregressive(generator: np.random.Generator, count: int, seeds: int, points: int) -> np.ndarray:
    """Errors of a run correlated along the axis: stationary AR(1) with coefficient 0.9."""
    noise = generator.standard_normal((count, seeds, points))
    for j in range(1, points):
        noise[..., j] = 0.9 * noise[..., j - 1] + np.sqrt(1 - 0.81) * noise[..., j]
    return noise


def _heavy(mean: Callable[[int], np.ndarray]) -> Draws:
    def draw(generator: np.random.Generator, count: int, seeds: int, points: int) -> np.ndarray:
        return generator.standard_t(3, (count, seeds, points)) / np.sqrt(3.0) + mean(points)

    return draw


def _diverged(stays: bool) -> Draws:
    """The first seed is 20 too high at one point drawn at random, or from there to the end."""

    def draw(generator: np.random.Generator, count: int, seeds: int, points: int) -> np.ndarray:
        curves = generator.standard_normal((count, seeds, points))
        start = generator.integers(points, size=(count, 1))
        places = np.arange(points)
        curves[:, 0] += 20.0 * ((places >= start) if stays else (places == start))
        return curves

    return draw


def _missing(generator: np.random.Generator, count: int, seeds: int, points: int) -> np.ndarray:
    """The first seed has no values from a point drawn at random to the end, on rise then plateau."""
    curves = generator.standard_normal((count, seeds, points)) + rise_then_plateau(points)
    start = generator.integers(points, size=(count, 1))
    curves[:, 0][np.arange(points) >= start] = np.nan
    return curves


NULLS: dict[str, Draws] = {
    "flat": _gaussian(np.zeros),
    "rise, then plateau": _gaussian(rise_then_plateau),
    "U": _gaussian(u_shape),
    "descent": _gaussian(descent),
    "9-fold variance at one point, flat": _ninefold(np.zeros),
    "9-fold variance at one point, rise, then plateau": _ninefold(rise_then_plateau),
    "AR(1) 0.9": _autoregressive,
    "t with 3 degrees of freedom": _heavy(np.zeros),
    "t with 3 degrees of freedom, rise, then plateau": _heavy(rise_then_plateau),
    "one seed diverged at one point": _diverged(stays=False),
    "one seed diverged from a point on": _diverged(stays=True),
    "one seed without values, rise, then plateau": _missing,
}
"""Quasi-convex means under every kind of noise that training gives."""


def bump(points: int, height: float) -> np.ndarray:
    """[J ≥ 6]: a first descent from 6 over 3 to 0, one point of `height` in the middle, and a second descent to 0."""
    mean = np.zeros(points)
    mean[:2] = 6.0, 3.0
    mean[points // 2] = height
    return mean


def broad_bump(points: int, height: float) -> np.ndarray:
    """[J ≥ 8]: as `bump`, with half the height at the neighbours of the middle and a second descent below the valley.

    Harder: there is one low point on the left, and the neighbours tell little.
    """
    mean = bump(points, height)
    middle = points // 2
    mean[[middle - 1, middle + 1]] = height / 2
    mean[middle + 3 :] = -1.0
    return mean


def bumps(height: float, *, broad: bool = False) -> Draws:
    """Curves with a peak of `height` standard deviations of one run."""
    shape = broad_bump if broad else bump
    return _gaussian(lambda points: shape(points, height))
