"""Rises and slices of a loss whose answers are known in closed form."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flatshift.regularizers.sharpness.measures import ascent_rise, line, plane
from flatshift.regularizers.sharpness.spaces import Space


class Quadratic(Space):
    """L(x) = b·x + ½ xᵀHx around x = 0, in place of a model."""

    name, dtype, device, weight_norm, resolution = "adapter", torch.float64, torch.device("cpu"), 1.0, 1e-16

    def __init__(self, h: Tensor, b: Tensor) -> None:
        self.h, self.b, self.size = h, b, len(b)

    def gradient(self, objective: Any, at: Tensor | None = None) -> tuple[float, Tensor]:
        at = torch.zeros(self.size, dtype=self.dtype) if at is None else at
        return self.value(objective, at), self.b + self.h @ at

    def value(self, objective: Any, at: Tensor) -> float:
        return float(self.b @ at + 0.5 * at @ self.h @ at)

    def draw(self, seed: int, purpose: Any, index: int, *, exact: bool) -> Tensor:
        return self.signs(seed, purpose, index)

    def value_along(self, objective: Any, parts: Any) -> float:
        return self.value(objective, sum(c * d for c, d in parts))


def rises(space: Quadratic, rho: float, steps: int) -> tuple[float, float]:
    one, several = ascent_rise(space, Any, rho, base=0.0, gradient=space.gradient(None)[1], steps=steps, seed=0)
    return one.value, several.value


def test_highest_rise_in_a_ball_of_a_quadratic() -> None:
    b = torch.tensor([0.6, 0.8, 0.0], dtype=torch.float64)
    sphere = Quadratic(2.0 * torch.eye(3, dtype=torch.float64), b)
    assert rises(sphere, 0.5, 1) == pytest.approx((0.5 + 0.25,) * 2)  # ρ|b| + ½ h ρ²
    assert rises(sphere, 0.5, 6) == pytest.approx((0.75, 0.75))
    # an ellipse, whose maximum is not where the gradient points: ε = (λ − H)⁻¹ b with |ε| = ρ, λ > 5
    h, rho = torch.diag(torch.tensor([5.0, 1.0, 0.2], dtype=torch.float64)), 0.7
    low, high = 5.0 + 1e-9, 50.0
    for _ in range(200):
        middle = (low + high) / 2
        too_long = (b / (middle - h.diagonal())).norm() > rho
        low, high = (middle, high) if too_long else (low, middle)
    best = Quadratic(h, b).value(None, b / (low - h.diagonal()))
    one, several = rises(Quadratic(h, b), rho, 30)
    assert one < 0.9 * best and several == pytest.approx(best, rel=1e-4) and several <= best + 1e-9
    # no gradient at all: a random start, and the largest eigenvalue decides
    assert rises(Quadratic(h, 0 * b), rho, 60)[1] == pytest.approx(0.5 * 5 * rho**2, rel=1e-4)
    # a maximum: one step falls, and the best of the ball is its middle
    one, several = rises(Quadratic(-h, 0 * b), rho, 4)
    assert one < 0 and several == 0


def test_slices_of_a_quadratic() -> None:
    space = Quadratic(
        torch.diag(torch.tensor([5.0, 1.0, -0.2], dtype=torch.float64)), torch.zeros(3, dtype=torch.float64)
    )
    found = line(space, Any, base=0.0, points=5, reach=0.4, directions=2, seed=0)
    assert found.at == pytest.approx([-0.4, -0.2, 0, 0.2, 0.4]) and found.at[2] == 0
    for losses in found.losses:
        assert losses == pytest.approx([0.5 * 5.8 * a * a for a in found.at])
        assert losses == losses[::-1]
    flat = plane(space, Any, base=0.0, points=5, reach=0.4, seed=0)
    assert flat.losses[2] == found.losses[0]
    assert [row[2] for row in flat.losses] == found.losses[1]
    tilted = Quadratic(space.h, torch.tensor([1.0, 0, 0], dtype=torch.float64))
    corner = plane(tilted, Any, base=0.0, points=3, reach=1.0, seed=0).losses[0][2]  # a = 1, b = −1
    first, second = (tilted.draw(0, "slice", i, exact=True) for i in (0, 1))
    assert corner == pytest.approx(tilted.value(None, first - second))
