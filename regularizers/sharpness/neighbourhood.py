"""How much the loss rises around w: in the mean over random noise, and at the worst in a ball."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regularizers.sharpness.estimates import Estimate
from regularizers.sharpness.objective import Objective
from regularizers.sharpness.spaces import Space, norm


def expected_rise(
    space: Space,
    objective: Objective,
    sigmas: Sequence[float],
    *,
    base: float,
    draws: int,
    seed: int,
    confidence: float = 0.95,
) -> list[Estimate]:
    """E[L(w+ε)] − L(w) at each σ: what GGPO and Flat-LoRA minimise beside L (β = 0, scope `step`).

    ε has the row-normalised covariance σ²|w_i|²/n; to second order the rise is ½ Σ σ²|w_i|²/n · H_ij,ij. A draw is an
    antithetic pair ±ε, which takes the first order out. The same directions serve all σ.

    Args:
        base: L(w).
        draws: pairs; the interval is over them.
    """
    rises: list[list[float]] = [[] for _ in sigmas]
    for index in range(draws):
        direction = space.draw(seed, "noise", index, exact=False)
        for found, sigma in zip(rises, sigmas, strict=True):
            pair = [space.value_along(objective, [(sign * sigma, direction)]) for sign in (1, -1)]
            found.append(sum(pair) / 2 - base)
    return [Estimate.mean(found, confidence) for found in rises]


def ascent_rise(
    space: Space,
    objective: Objective,
    rho: float,
    *,
    base: float,
    gradient: Tensor,
    steps: int,
    seed: int,
) -> tuple[Estimate, Estimate]:
    """max L(w+ε) − L(w) over |ε| ≤ ρ, approximated from below: (by one gradient step, by `steps` projected ones).

    The first is SAM's: ε = ρ g/|g| (Foret et al., arXiv 2010.01412). The second goes on from there,
    ε ← P(ε + ρ g(w+ε)/|g(w+ε)|) with P the projection on the ball, and keeps the highest loss of its path, 0 included.
    Where the gradient is zero the first direction is random.

    Args:
        base, gradient: L(w) and its gradient (N,).
        steps: gradients of the second value, the one at w counted; 1: both values are the first's.
    """
    direction = gradient if norm(gradient) > 0 else space.signs(seed, "ascent", 0)
    epsilon = direction * (rho / norm(direction))
    one = highest = space.value(objective, epsilon) - base
    for _ in range(steps - 1):
        value, direction = space.gradient(objective, epsilon)
        highest = max(highest, value - base)
        if norm(direction) == 0:
            break
        epsilon = torch.add(epsilon, direction, alpha=rho / norm(direction))
        epsilon *= min(1.0, rho / max(norm(epsilon), 1e-300))
    if steps > 1:
        highest = max(highest, space.value(objective, epsilon) - base, 0.0)
    return Estimate.exact(one), Estimate.exact(highest, steps)
