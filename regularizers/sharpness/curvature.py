"""Curvature from central differences of gradients: λ_max by Lanczos or power iteration, the trace by Hutchinson.

    H v = |v| · (g(w + h u) − g(w − h u)) / 2h + O(h²),   u = v/|v|

A product is two ordinary passes. h is a compromise: truncation grows with h², rounding with 1/h. `Hessian.calibrated`
begins at |w|·ε^⅓ (ε: the spacing of numbers) and climbs up or down a ladder of lengths as long as the products at h and
4h agree better than before (models that compute some of their layers in a lower precision need longer steps). The
disagreement at h and 2h, the Richardson check, is reported as `error`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from regularizers.sharpness.config import LADDER
from regularizers.sharpness.estimates import Estimate
from regularizers.sharpness.objective import Objective
from regularizers.sharpness.spaces import Space, dot, norm

Product = Callable[[Tensor], Tensor]
"""A linear map (N,) → (N,); it must not change what it is given."""


class Hessian:
    """The Hessian of `objective` in `space` at the weights as they are, as a linear map (N,) → (N,)."""

    def __init__(self, space: Space, objective: Objective, length: float) -> None:
        """length: h, how far the weights are moved for a difference, in the norm of the space."""
        self.space, self.objective, self.length = space, objective, length
        self.error = float("nan")
        """Largest relative disagreement of products at h and 2h that was seen; NaN before a `check`."""

    @classmethod
    def calibrated(cls, space: Space, objective: Objective, start: Tensor) -> Hessian:
        """The map with the best step length for directions like H·`start`, `start` (N,) being any vector."""
        middle = (space.weight_norm or 1.0) * space.resolution ** (1 / 3)
        direction = cls(space, objective, middle)(start)
        if norm(direction) == 0:
            direction = start
        products: dict[int, Tensor] = {}
        tried = 0

        def disagreement(rung: int) -> float:
            """Of the products at this rung and the next longer one."""
            nonlocal tried
            for each in {rung, rung + 1} - set(products):
                tried += 1
                products[each] = cls(space, objective, middle * 4.0**each)(direction)
            return _apart(products[rung], products[rung + 1])

        best, least = 0, disagreement(0)
        for way in (1, -1):
            while tried < LADDER and (next_one := disagreement(best + way)) < least:
                best, least = best + way, next_one
                for far in [each for each in products if abs(each - best) > 1]:
                    del products[far]
            if best != 0:
                break
        found = cls(space, objective, middle * 4.0**best)
        found.error = _apart(products[best], cls(space, objective, 2 * found.length)(direction))
        return found

    def __call__(self, v: Tensor) -> Tensor:
        """H v (N,), by two gradients."""
        length = norm(v)
        if length == 0:
            return torch.zeros_like(v)
        step = v * (self.length / length)
        _, ahead = self.space.gradient(self.objective, step)
        _, behind = self.space.gradient(self.objective, -step)
        return ahead.sub_(behind).mul_(length / (2 * self.length))

    def check(self, v: Tensor) -> float:
        """The relative disagreement of H v (N,) with the product at twice the step length, a third of which is due to
        the truncation of H v itself; kept in `error` if it is the largest so far. Four gradients."""
        apart = _apart(self(v), Hessian(self.space, self.objective, 2 * self.length)(v))
        self.error = apart if not self.error >= apart else self.error
        return apart


def _apart(product: Tensor, other: Tensor) -> float:
    return norm(product - other) / max(norm(product), 1e-300)


@dataclass(frozen=True)
class Spectrum:
    """What Lanczos found: the ends of the spectrum. `Estimate.n` are products; the interval is ± the residual |H v − λ
    v|, within which there surely is an eigenvalue of the map as computed."""

    largest: Estimate
    smallest: Estimate
    vector: Tensor
    """Unit Ritz vector (N,) of the largest eigenvalue."""


def lanczos(product: Product, start: Tensor, *, steps: int, tolerance: float = 1e-3) -> Spectrum:
    """Largest and smallest eigenvalue of a symmetric map by Lanczos with full reorthogonalisation.

    Args:
        start: any vector (N,) that is not orthogonal to the eigenvectors looked for.
        steps: most products; `steps` vectors of the space are kept.
        tolerance: ends when the residual of the largest eigenvalue is below this part of its size.
    """
    basis = [start / norm(start)]
    diagonal: list[float] = []
    beside: list[float] = []
    values, vectors = torch.zeros(1), torch.ones(1, 1)
    for step in range(min(steps, len(start))):
        w = product(basis[-1]).clone()
        diagonal.append(dot(w, basis[-1]))
        for _ in range(2):  # once is not enough in finite precision ("twice is enough", Parlett)
            for q in basis:
                w.sub_(q, alpha=dot(w, q))
        off = norm(w)
        tridiagonal = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
        for at, value in enumerate(beside):
            tridiagonal[at, at + 1] = tridiagonal[at + 1, at] = value
        values, vectors = torch.linalg.eigh(tridiagonal)
        scale = float(values.abs().max())
        residuals = off * vectors[-1].abs()
        if off <= 1e-12 * scale or float(residuals[-1]) <= tolerance * abs(float(values[-1])):
            break
        if step + 1 < min(steps, len(start)):
            beside.append(off)
            basis.append(w / off)
    ends = []
    for end in (-1, 0):
        value, residual = float(values[end]), float(residuals[end])
        ends.append(Estimate(value, value - residual, value + residual, len(diagonal)))
    top = torch.zeros_like(start)
    for q, weight in zip(basis, vectors[:, -1].tolist(), strict=False):
        top.add_(q, alpha=weight)
    return Spectrum(ends[0], ends[1], top)


def power_iteration(product: Product, start: Tensor, *, steps: int, tolerance: float = 1e-3) -> tuple[Estimate, Tensor]:
    """The eigenvalue of largest size (it may be negative) and its unit vector: the simple check of `lanczos`, keeping
    two vectors instead of one per step."""
    v = start / norm(start)
    value = residual = 0.0
    taken = 0
    while taken < steps:
        taken += 1
        w = product(v)
        value = dot(w, v)
        residual = norm(w - v * value)
        size = norm(w)
        if size == 0 or residual <= tolerance * abs(value):
            break
        v = w / size
    return Estimate(value, value - residual, value + residual, taken), v


def hutchinson(product: Product, vectors: Iterable[Tensor], *, confidence: float = 0.95) -> Estimate:
    """tr H = E zᵀHz for `vectors` z with E zzᵀ = 1 (Hutchinson 1990: random signs), with Student's interval."""
    return Estimate.mean([dot(product(z), z) for z in vectors], confidence)
