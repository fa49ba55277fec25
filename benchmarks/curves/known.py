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


# ------------------------------------------------------------------------------------------- figures with a name

LEVEL = 60.0
"""Added to the nulls in standard deviations, so that they can be losses."""
ITEMS = 200


def log_normal(mean: Callable[[int], np.ndarray], sd: float | Callable[[int], np.ndarray] = 0.6) -> Draws:
    """Losses whose logarithm scatters by `sd` about `mean` [J]: most runs lie low, a few very high."""

    def draw(generator: np.random.Generator, count: int, seeds: int, points: int) -> np.ndarray:
        spread = sd if isinstance(sd, float) else sd(points)
        return np.exp(spread * generator.standard_normal((count, seeds, points)) + mean(points))

    return draw


def binomial(rate: Callable[[int], np.ndarray], items: int = ITEMS, spread: float = 0.0) -> Draws:
    """Error rates of `items` items with the expectation `rate` [J]; spread: sd over runs of their logit."""

    def draw(generator: np.random.Generator, count: int, seeds: int, points: int) -> np.ndarray:
        logit = np.log(rate(points) / (1 - rate(points)))
        own = logit + spread * generator.standard_normal((count, seeds, points))
        return generator.binomial(items, 1 / (1 + np.exp(-own))) / items

    return draw


def _as_loss(draw: Draws) -> Draws:
    return lambda generator, count, seeds, points: LEVEL + draw(generator, count, seeds, points)


def _threefold(points: int) -> np.ndarray:
    return np.where(np.arange(points) == points // 2, 1.2, 0.4)


def _steep(points: int) -> np.ndarray:
    return np.where(np.arange(points) == 0, 0.02, 0.4)


NAMED_NULLS: dict[str, tuple[str, int | None, Draws]] = {
    **{f"{name}, as a loss": ("test loss", None, draw) for name, draw in NULLS.items() if "without" not in name},
    "log-normal loss, flat": ("test loss", None, log_normal(np.zeros)),
    "log-normal loss, rise, then plateau": ("test loss", None, log_normal(lambda n: rise_then_plateau(n) / 10)),
    "log-normal loss, 9-fold variance at one point": (
        "test loss",
        None,
        log_normal(lambda n: rise_then_plateau(n) / 10, _threefold),
    ),
    "binomial error, flat at .1": ("test error", ITEMS, binomial(lambda n: np.full(n, 0.1))),
    "binomial error, flat at .01": ("test error", ITEMS, binomial(lambda n: np.full(n, 0.01))),
    "binomial error, rise, then plateau": ("test error", ITEMS, binomial(_steep)),
    "binomial error with runs of their own, rise, then plateau": ("test error", ITEMS, binomial(_steep, spread=0.5)),
}
"""Name → (metric, items, draws): nulls as the rule for the scale sees them."""


def log_normal_peak(points: int) -> np.ndarray:
    """[J]: logarithm of a loss that falls from 8 to 1, has one point of 4, and falls to 1 again."""
    mean = np.zeros(points)
    mean[:2] = np.log(8.0), np.log(3.0)
    mean[points // 2] = np.log(4.0)
    return mean
