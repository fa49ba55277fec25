"""Maximiser of the semi-dual on a kernel in memory: over-relaxed Sinkhorn, then Newton where that is cheaper.

Sinkhorn relaxed in both potentials is successive over-relaxation of a two-block system (Thibault et al. 2021, arXiv
1711.01851); with λ the rate of the plain iteration, estimated from the observed errors (Young's formula), the best
factor is ω = 2/(1 + √(1 − λ)) and the rate becomes ω − 1. Near the optimum, or where Sinkhorn is slow (small ε), a
safeguarded Newton step on g ∈ R^M takes over; a Cholesky factor is reused as long as steps with it shrink the error.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from flatshift.selection.transport.kernel import Evaluation, StoredKernel

NEWTON_MAX_COLUMNS = 4096  # above this the M×M factor costs more than the iterations it saves

_REPORT_EVERY = 64  # iterations of Sinkhorn between progress reports


def solve_dense(
    kernel: StoredKernel,
    g: Tensor,
    *,
    marginal: Tensor,
    tolerance: float,
    max_iterations: int,
    newton_columns: int = NEWTON_MAX_COLUMNS,
    inverse: Tensor | None = None,
    on_iterations: Callable[[int], None] | None = None,
) -> tuple[Evaluation, int]:
    """Find g with |col(g) − marginal|₁ ≤ tolerance, starting at g (M,), or the best after `max_iterations`; return its
    exact evaluation and the iterations.

    `marginal` (M,) float64, positive, sums to 1; it need not be the kernel's own b (control variates use another).
    `newton_columns`: number of targets up to which Newton steps are used; they take some six M×M matrices. `inverse`
    (M, M): the `inverse_hessian` of a similar kernel near g; steps with it come first, as long as they pay off.
    `on_iterations`: called now and then with the iterations so far.
    """
    search = _Search(kernel, marginal, tolerance, max_iterations, newton_columns, on_iterations)
    return search.run(g, inverse), search.iterations


def inverse_hessian(kernel: StoredKernel, g: Tensor, marginal: Tensor, ridge: float = 1e-3) -> Tensor:
    """Return (M, M) float64: the inverse of −ε ∇²F at g, made definite."""
    return torch.cholesky_inverse(_cholesky_factor(kernel.curvature(g), kernel.evaluate(g).column, marginal, ridge))


class _Search:
    def __init__(
        self,
        kernel: StoredKernel,
        marginal: Tensor,
        tolerance: float,
        max_iterations: int,
        newton_columns: int,
        on_iterations: Callable[[int], None] | None,
    ):
        self.on_iterations = on_iterations or (lambda iterations: None)
        self.kernel = kernel
        self.marginal = marginal
        self.log_marginal = marginal.log()
        self.tolerance = tolerance
        self.max_iterations = max_iterations
        self.iterations = 0
        m = len(marginal)
        # Cost of a Newton step in Sinkhorn iterations: 2nM² flop at GEMM speed versus 4nM at memory speed.
        self.newton_cost = 2.0 + m / 20.0 if m <= newton_columns else math.inf

    def run(self, g: Tensor, inverse: Tensor | None) -> Evaluation:
        at = self.evaluate(g)
        self.iterations += 1
        if inverse is not None:
            at = self.approach(at, inverse)
        omega = 1.0
        while self.error(at) > self.tolerance and self.iterations < self.max_iterations:
            at, omega = self.relax(at, omega)
            if self.error(at) > self.tolerance and math.isfinite(self.newton_cost):
                at = self.newton(at)
        return at

    def evaluate(self, g: Tensor) -> Evaluation:
        return self.kernel.evaluate(g - self.marginal @ g)

    def error(self, at: Evaluation) -> float:
        return float((at.column - self.marginal).abs().sum())

    def value(self, at: Evaluation) -> float:
        return float(self.kernel.rows.a @ at.f + self.marginal @ at.g)

    def approach(self, at: Evaluation, inverse: Tensor) -> Evaluation:
        """Take steps with the Hessian of a similar problem, as long as each reduces the error by a fifth."""
        reach = 2.0 * self.kernel.epsilon
        while self.error(at) > self.tolerance and self.iterations < self.max_iterations:
            step = self.kernel.epsilon * (inverse @ (self.marginal - at.column))
            trial = self.evaluate(at.g + step.clamp_(-reach, reach))
            self.iterations += 1
            if not self.error(trial) < 0.8 * self.error(at):
                break
            at = trial
        return at

    def relax(self, at: Evaluation, omega: float) -> tuple[Evaluation, float]:
        """Run Sinkhorn iterations from `at` until the tolerance, or until Newton is the cheaper way to it."""
        kernel, epsilon = self.kernel, self.kernel.epsilon
        log_v = kernel.log_v(at.g)
        origin = kernel.origin
        log_z: Tensor | None = None
        errors: list[float] = []
        best, best_g = math.inf, at.g
        ceiling = 1.95
        window = 6
        while self.iterations < self.max_iterations:
            log_z, column = kernel.scale(log_v, log_z, omega)
            self.iterations += 1
            if self.iterations % _REPORT_EVERY == 0:
                self.on_iterations(self.iterations)
            error = float((column - self.marginal).abs().sum())
            if not error <= 8 * best:
                # Over-relaxation overshot: return to the best point with a milder factor. Plain steps always climb.
                ceiling = 1.0 + 0.6 * (min(omega, ceiling) - 1.0)
                omega, log_z, errors, best = min(1.0 + 0.5 * (ceiling - 1.0), ceiling), None, [], math.inf
                log_v = kernel.log_v(best_g)
                origin = kernel.origin
                continue
            assert origin is not None
            if error < best:
                best, best_g = error, origin + epsilon * log_v
            errors.append(error)
            if error <= 0.7 * self.tolerance:
                break
            log_v = log_v + omega * (self.log_marginal - column.clamp_min(1e-300).log())
            log_v -= self.marginal @ log_v
            if float(log_v.max() - log_v.min()) > 1.6 * kernel.reach:
                g = origin + epsilon * log_v
                kernel.absorb(g - self.marginal @ g)
                origin, log_v, log_z = kernel.origin, torch.zeros_like(log_v), None
            if len(errors) > window and len(errors) % window == 1:
                rate = (errors[-1] / errors[-1 - window]) ** (1.0 / window)
                omega = min(_relaxation_factor(rate, omega), ceiling)
                remaining = math.log(self.tolerance / error) / math.log(max(rate, 1e-3)) if rate < 1.0 else math.inf
                steps = 2 + math.log2(max(1.0, math.log(self.tolerance) / math.log(min(error, 0.5))))
                # Newton is quadratic only near the optimum; far away a few more plain iterations are better.
                if remaining > steps * self.newton_cost and (error < 0.2 or len(errors) > 10 * window):
                    break
        assert origin is not None
        return self.evaluate(origin + epsilon * log_v), omega

    def newton(self, at: Evaluation) -> Evaluation:
        """Take safeguarded Newton steps from `at` until the tolerance or a failing step (then Sinkhorn continues)."""
        ridge = min(1e-3, 0.1 * self.error(at))
        epsilon = self.kernel.epsilon
        # If clusters hardly exchange mass the dual is nearly linear: successful clamped steps allow longer ones.
        radius = 2.0 * epsilon
        while self.error(at) > self.tolerance and self.iterations < self.max_iterations:
            factor = _cholesky_factor(self.kernel.curvature(at.g), at.column, self.marginal, ridge)
            self.on_iterations(self.iterations)
            self.iterations += max(1, int(self.newton_cost) // 4)
            moved = False
            for _ in range(12):
                error = self.error(at)
                direction = torch.cholesky_solve((self.marginal - at.column).unsqueeze(1), factor).squeeze(1)
                direction.mul_(epsilon)
                cut = float(direction.abs().max()) > radius
                trial = self.attempt(at, direction.clamp_(-radius, radius))
                if trial is None:
                    radius = max(radius / 4, 2.0 * epsilon)
                    break
                moved = True
                at = trial
                if cut:
                    radius *= 2
                if self.error(at) <= self.tolerance or self.error(at) > 0.25 * error:
                    break  # a new factor pays off again
            if moved:
                ridge = min(ridge * 0.1, 0.1 * self.error(at))
            elif ridge >= 1e-2:
                return at
            else:
                ridge = max(ridge * 30, 1e-6)
        return at

    def attempt(self, at: Evaluation, direction: Tensor) -> Evaluation | None:
        """Return the first of a few shortened steps that raises the dual value or, within its rounding, shrinks the
        error."""
        slope = float((self.marginal - at.column) @ direction)
        noise = 1e-13 if self.kernel.rows.dtype == torch.float64 else 1e-7
        floor = noise * (abs(self.value(at)) + self.kernel.epsilon)
        for length in (1.0, 0.5, 0.125):
            trial = self.evaluate(at.g + length * direction)
            self.iterations += 1
            gain = self.value(trial) - self.value(at)
            if gain >= max(1e-4 * length * slope, floor) or (abs(gain) <= floor and self.error(trial) < self.error(at)):
                return trial
        return None


def _relaxation_factor(rate: float, omega: float) -> float:
    """Return the best factor for the plain rate λ behind an observed `rate`: λ = (μ + ω − 1)²/(μ ω²) for μ > ω − 1."""
    if rate >= 1.0:
        return 1.0 + 0.5 * (omega - 1.0)
    if rate <= omega - 1.0:
        return omega  # at or beyond the best factor: the error oscillates with |μ| = ω − 1
    plain = min((rate + omega - 1.0) ** 2 / (rate * omega**2), 0.9995)
    return 2.0 / (1.0 + math.sqrt(1.0 - plain))


def _cholesky_factor(curvature: Tensor, column: Tensor, marginal: Tensor, ridge: float) -> Tensor:
    """Return the Cholesky factor of H + ridge·diag + b bᵀ: definite, although H vanishes on constants."""
    weight = torch.maximum(column, marginal)
    base = curvature + torch.outer(marginal, marginal)
    assert bool(base.isfinite().all()), "curvature is not finite"
    while True:
        lower, info = torch.linalg.cholesky_ex(base + torch.diag((ridge + 1e-14) * weight + 1e-300))
        if int(info) == 0:
            return lower
        ridge = max(10 * ridge, 1e-12)
