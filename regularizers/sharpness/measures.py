"""The named measures: curvature, the rise of the loss around w, and its slices; and all of them at once, `measure`.

Curvature comes from central differences of gradients: λ_max by Lanczos or power iteration, the trace by Hutchinson.

    H v = |v| · (g(w + h u) − g(w − h u)) / 2h + O(h²),   u = v/|v|

A product is two ordinary passes. h is a compromise: truncation grows with h², rounding with 1/h. `Hessian.calibrated`
begins at |w|·ε^⅓ (ε: the spacing of numbers) and moves up or down a ladder of lengths as long as the products at h and
4h agree better than before (models that compute some of their layers in a lower precision need longer steps). The
disagreement at h and 2h, the Richardson check, is reported as `error`.

The rise of the loss around w is measured as a mean over random noise, and as a maximum in a ball. Slices are one- or
two-dimensional, along filter-normalised random directions (Li et al., 1712.09913).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flatshift.regularizers.config import LADDER, RegularizerError, Sharpness
from flatshift.regularizers.sharpness.spaces import AdapterSpace, FullSpace, Loss, LossFunction, Space, dot, norm


@dataclass(frozen=True)
class Estimate:
    """A measure: its value, an interval if it is random (or not converged), and the number of draws that were averaged;
    for iterative measures, of iterations."""

    value: float
    low: float | None
    high: float | None
    n: int

    @classmethod
    def exact(cls, value: float, n: int = 1) -> Estimate:
        """Return a value without an interval."""
        return cls(value, None, None, n)

    @classmethod
    def mean(cls, draws: Sequence[float], confidence: float) -> Estimate:
        """Return the mean of independent draws with Student's interval; no interval below two draws."""
        n = len(draws)
        value = math.fsum(draws) / n
        if n < 2 or not math.isfinite(value):
            return cls.exact(value, n)
        from scipy.special import stdtrit

        half = float(stdtrit(n - 1, 0.5 + confidence / 2)) * standard_error(draws)
        return cls(value, value - half, value + half, n)

    def as_dict(self) -> dict[str, float | int | None]:
        """Return {value, low, high, n}, as in eval.json; a number that is not finite becomes None."""
        return {"value": _finite(self.value), "low": _finite(self.low), "high": _finite(self.high), "n": self.n}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def standard_error(draws: Sequence[float]) -> float:
    """Return the standard error of the mean of at least two independent draws."""
    return statistics.stdev(draws) / math.sqrt(len(draws))


Product = Callable[[Tensor], Tensor]
"""A linear map (N,) → (N,); it must not modify its argument."""


class Hessian:
    """Hessian of `objective` in `space` at the current weights, as a linear map (N,) → (N,)."""

    def __init__(self, space: Space, objective: LossFunction, length: float) -> None:
        """length: h, the distance by which the weights are moved for a difference, in the norm of the space."""
        self.space, self.objective, self.length = space, objective, length
        self.error = float("nan")
        """Largest relative disagreement seen between products at h and 2h; NaN before a `check`."""

    @classmethod
    def calibrated(cls, space: Space, objective: LossFunction, start: Tensor) -> Hessian:
        """Return the map with the best step length for directions like H·`start`, `start` (N,) being any vector."""
        middle = (space.weight_norm or 1.0) * space.resolution ** (1 / 3)
        direction = cls(space, objective, middle)(start)
        if norm(direction) == 0:
            direction = start
        products: dict[int, Tensor] = {}
        tried = 0

        def disagreement(rung: int) -> float:
            """Compare the products at this rung and the next longer one."""
            nonlocal tried
            for each in {rung, rung + 1} - set(products):
                tried += 1
                products[each] = cls(space, objective, middle * 4.0**each)(direction)
            return _relative_difference(products[rung], products[rung + 1])

        best, minimum = 0, disagreement(0)
        for shift in (1, -1):
            while tried < LADDER and (value := disagreement(best + shift)) < minimum:
                best, minimum = best + shift, value
                for far in [each for each in products if abs(each - best) > 1]:
                    del products[far]
            if best != 0:
                break
        hessian = cls(space, objective, middle * 4.0**best)
        hessian.error = _relative_difference(products[best], cls(space, objective, 2 * hessian.length)(direction))
        return hessian

    def __call__(self, v: Tensor) -> Tensor:
        """Return H v (N,), by two gradients."""
        length = norm(v)
        if length == 0:
            return torch.zeros_like(v)
        step = v * (self.length / length)
        _, ahead = self.space.gradient(self.objective, step)
        _, behind = self.space.gradient(self.objective, -step)
        return ahead.sub_(behind).mul_(length / (2 * self.length))

    def check(self, v: Tensor) -> float:
        """Return the relative disagreement of H v (N,) with the product at twice the step length; four gradients. A
        third of it is due to the truncation of H v itself. Stored in `error` if it is the largest so far."""
        difference = _relative_difference(self(v), Hessian(self.space, self.objective, 2 * self.length)(v))
        self.error = difference if not self.error >= difference else self.error
        return difference


def _relative_difference(product: Tensor, reference: Tensor) -> float:
    return norm(product - reference) / max(norm(product), 1e-300)


@dataclass(frozen=True)
class Spectrum:
    """Ends of the spectrum found by Lanczos. `Estimate.n` is the number of products; the interval is ± the residual |H
    v − λ v|, which is certain to contain an eigenvalue of the map as computed."""

    largest: Estimate
    smallest: Estimate
    vector: Tensor
    """Unit Ritz vector (N,) of the largest eigenvalue."""


def lanczos(product: Product, start: Tensor, *, steps: int, tolerance: float = 1e-3) -> Spectrum:
    """Compute the largest and smallest eigenvalue of a symmetric map by Lanczos with full reorthogonalisation.

    start: any vector (N,) that is not orthogonal to the eigenvectors of interest. steps: maximum number of products;
    `steps` vectors of the space are stored. tolerance: stop when the residual of the largest eigenvalue is below this
    fraction of its size.
    """
    basis = [start / norm(start)]
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    values, vectors = torch.zeros(1), torch.ones(1, 1)
    for step in range(min(steps, len(start))):
        w = product(basis[-1]).clone()
        diagonal.append(dot(w, basis[-1]))
        for _ in range(2):  # once is not enough in finite precision ("twice is enough", Parlett)
            for q in basis:
                w.sub_(q, alpha=dot(w, q))
        off = norm(w)
        middle, beside = (torch.tensor(entries, dtype=torch.float64) for entries in (diagonal, off_diagonal))
        values, vectors = torch.linalg.eigh(middle.diag() + beside.diag(1) + beside.diag(-1))
        scale = float(values.abs().max())
        residuals = off * vectors[-1].abs()
        if off <= 1e-12 * scale or float(residuals[-1]) <= tolerance * abs(float(values[-1])):
            break
        if step + 1 < min(steps, len(start)):
            off_diagonal.append(off)
            basis.append(w / off)
    ends = []
    for end in (-1, 0):
        value, residual = float(values[end]), float(residuals[end])
        ends.append(Estimate(value, value - residual, value + residual, len(diagonal)))
    top = torch.zeros_like(start)
    for q, weight in zip(basis, vectors[:, -1].tolist(), strict=False):
        top.add_(q, alpha=weight)
    return Spectrum(ends[0], ends[1], top)


def hutchinson(product: Product, vectors: Iterable[Tensor], *, confidence: float = 0.95) -> Estimate:
    """Estimate tr H = E zᵀHz for `vectors` z with E zzᵀ = 1 (Hutchinson 1990: random signs), with Student's
    interval."""
    return Estimate.mean([dot(product(z), z) for z in vectors], confidence)


def expected_rise(
    space: Space,
    objective: LossFunction,
    sigmas: Sequence[float],
    *,
    base: float,
    draws: int,
    seed: int,
    confidence: float = 0.95,
) -> list[Estimate]:
    """Estimate E[L(w+ε)] − L(w) at each σ, the term that GGPO and Flat-LoRA add to L (β = 0, scope `step`).

    ε has the row-normalised covariance σ²|w_i|²/n; to second order the rise is ½ Σ σ²|w_i|²/n · H_ij,ij. A draw is an
    antithetic pair ±ε, which cancels the first order. All σ use the same directions. base:
    L(w). draws: pairs; the interval is over them.
    """
    rises: list[list[float]] = [[] for _ in sigmas]
    for index in range(draws):
        direction = space.draw(seed, "noise", index, exact=False)
        for values, sigma in zip(rises, sigmas, strict=True):
            pair = [space.value_along(objective, [(sign * sigma, direction)]) for sign in (1, -1)]
            values.append(sum(pair) / 2 - base)
    return [Estimate.mean(values, confidence) for values in rises]


def ascent_rise(
    space: Space, objective: LossFunction, rho: float, *, base: float, gradient: Tensor, steps: int, seed: int
) -> tuple[Estimate, Estimate]:
    """Bound max L(w+ε) − L(w) over |ε| ≤ ρ from below: (by one gradient step, by `steps` projected ones).

    The first is SAM's: ε = ρ g/|g| (Foret et al., arXiv 2010.01412). The second continues from there, ε ← P(ε + ρ
    g(w+ε)/|g(w+ε)|) with P the projection on the ball, and takes the highest loss of its path, 0 included. If the
    gradient is zero, the first direction is random. base, gradient: L(w) and its gradient (N,). steps: gradients of the
    second value, including the one at w; 1: both values are the first's.
    """
    direction = gradient if norm(gradient) > 0 else space.signs(seed, "ascent", 0)
    epsilon = direction * (rho / norm(direction))
    one_step = highest = space.value(objective, epsilon) - base
    for _ in range(steps - 1):
        value, direction = space.gradient(objective, epsilon)
        highest = max(highest, value - base)
        if norm(direction) == 0:
            break
        epsilon = torch.add(epsilon, direction, alpha=rho / norm(direction))
        epsilon *= min(1.0, rho / max(norm(epsilon), 1e-300))
    if steps > 1:
        highest = max(highest, space.value(objective, epsilon) - base, 0.0)
    return Estimate.exact(one_step), Estimate.exact(highest, steps)


@dataclass(frozen=True)
class LossGrid:
    """L on a grid. A line has one list of losses over a in `at` for each direction d: L(w + a d); the middle value is
    L(w). A plane has losses[i][j] = L(w + at[j] d₁ + at[i] d₂). |d_i| = |w_i| in every row."""

    at: list[float]
    losses: list[list[float]]

    def as_dict(self) -> dict[str, Any]:
        """Return {at, losses}; a loss that is not finite becomes None."""
        return {"at": self.at, "losses": [list(map(_finite, row)) for row in self.losses]}


def grid_points(points: int, reach: float) -> list[float]:
    """Return `points` (odd) numbers from −reach to reach, 0 exactly in the middle."""
    half = points // 2
    return [reach * (index - half) / half for index in range(points)]


def line(
    space: Space, objective: LossFunction, *, base: float, points: int, reach: float, directions: int, seed: int
) -> LossGrid:
    """Compute slices along `directions` random directions; `base` is L(w)."""
    at = grid_points(points, reach)
    losses = []
    for index in range(directions):
        direction = space.draw(seed, "slice", index, exact=True)
        losses.append([space.value_along(objective, [(a, direction)]) if a else base for a in at])
    return LossGrid(at, losses)


def plane(space: Space, objective: LossFunction, *, base: float, points: int, reach: float, seed: int) -> LossGrid:
    """Compute the slice spanned by the first two directions of `line`."""
    at = grid_points(points, reach)
    across, up = (space.draw(seed, "slice", index, exact=True) for index in (0, 1))
    losses = [[space.value_along(objective, [(a, across), (b, up)]) if a or b else base for a in at] for b in at]
    return LossGrid(at, losses)


_SPACES: dict[str, type[AdapterSpace] | type[FullSpace]] = {"adapter": AdapterSpace, "full": FullSpace}


@dataclass(frozen=True)
class SharpnessResult:
    """Results of `measure`, by space.

    Measures: `lambda_max`, `lambda_min` (interval: ± residual), `trace` and `rise_sigma_S` (interval over draws),
    `sam_rho_R` (one step) and `sam_rho_R_steps_K` (both lower bounds, no interval).
    """

    loss: float
    """L(w)."""
    measures: dict[str, dict[str, Estimate]] = field(default_factory=dict)
    lines: dict[str, LossGrid] = field(default_factory=dict)
    planes: dict[str, LossGrid] = field(default_factory=dict)
    about: dict[str, dict[str, float]] = field(default_factory=dict)
    """`dimensions`, `weight_norm`, `gradient_norm`, `difference_length` (h), `difference_error` (relative, of Hessian
    products), `seconds`."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for a JSON file: {loss, measures: {space: {measure: {value, low, high, n}}}, slices,
        about}."""
        slices: dict[str, dict[str, Any]] = {}
        for name, grids in (("line", self.lines), ("plane", self.planes)):
            for space, grid in grids.items():
                slices.setdefault(space, {})[name] = grid.as_dict()
        return {
            "loss": self.loss,
            "measures": {
                space: {name: each.as_dict() for name, each in estimates.items()}
                for space, estimates in self.measures.items()
            },
            "slices": slices,
            "about": {
                space: {name: _finite(value) for name, value in about.items()} for space, about in self.about.items()
            },
        }


def measure(
    model: nn.Module,
    loss: Loss,
    settings: Sharpness | None = None,
    *,
    seed: int = 0,
    progress: Callable[[int, str], None] = lambda passes, purpose: None,
) -> SharpnessResult:
    """Measure the neighbourhood of a PEFT model's weights, in evaluation mode; the model is not changed.

    loss: over fixed batches (`flatshift.regularizers.sharpness.spaces.Loss`). seed: of every random direction; the same
    seed gives models of one architecture the same directions, up to the lengths of their rows. progress: called for
    every evaluation with the number of passes done, of at most `settings.passes()`, and its purpose.

    Raises RegularizerError if the model has no LoRA layer to measure, is merged or sharded; the loss is not finite, or
    not the same when it is computed again.
    """
    settings = settings or Sharpness()
    done, purpose = 0, "loss"

    def count(passes: int) -> None:
        nonlocal done
        done += passes
        progress(done, purpose)

    objective = LossFunction(model, loss, count)
    spaces = [_SPACES[name](model) for name in settings.spaces]
    base = objective.value()
    if not math.isfinite(base):
        raise RegularizerError(f"the loss at the weights themselves is {base}; sharpness needs a finite one")
    repeated = objective.value()
    if not math.isclose(repeated, base, rel_tol=1e-5):
        raise RegularizerError(
            f"the loss is {base!r} at one time and {repeated!r} at another, at the same weights; give the measurement "
            "fixed batches and no randomness of its own"
        )
    result = SharpnessResult(base)
    for space in spaces:
        started = time.monotonic()

        def begin(measurement: str, space: Space = space) -> None:
            nonlocal purpose
            purpose = f"{space.name}: {measurement}"

        _measure_space(space, objective, settings, seed, base, result, begin)
        result.about[space.name]["seconds"] = time.monotonic() - started
    return result


def _measure_space(
    space: Space,
    objective: LossFunction,
    settings: Sharpness,
    seed: int,
    base: float,
    result: SharpnessResult,
    begin: Callable[[str], None],
) -> None:
    measures: dict[str, Estimate] = {}
    result.measures[space.name] = measures
    begin("gradient")
    gradient = space.gradient(objective)[1]
    about = {
        "dimensions": float(space.size),
        "weight_norm": space.weight_norm,
        "gradient_norm": float(torch.linalg.vector_norm(gradient.double())),
    }
    result.about[space.name] = about
    if settings.lanczos or settings.probes:
        begin("step length")
        start = space.signs(seed, "start", 0)
        hessian = Hessian.calibrated(space, objective, start)
        about["difference_length"] = hessian.length
        if settings.lanczos:
            begin("λ_max")
            spectrum = lanczos(hessian, start, steps=settings.lanczos, tolerance=settings.tolerance)
            measures["lambda_max"], measures["lambda_min"] = spectrum.largest, spectrum.smallest
            hessian.check(spectrum.vector)
        if settings.probes:
            begin("trace")
            vectors = (space.signs(seed, "trace", index) for index in range(settings.probes))
            measures["trace"] = hutchinson(hessian, vectors, confidence=settings.confidence)
        about["difference_error"] = hessian.error
    if settings.sigmas:
        begin("noise")
        rises = expected_rise(
            space,
            objective,
            settings.sigmas,
            base=base,
            draws=settings.draws,
            seed=seed,
            confidence=settings.confidence,
        )
        measures |= {f"rise_sigma_{sigma:g}": rise for sigma, rise in zip(settings.sigmas, rises, strict=True)}
    begin("ascent")
    for rho in settings.rhos:
        one_step, several_steps = ascent_rise(
            space, objective, rho, base=base, gradient=gradient, steps=settings.ascent, seed=seed
        )
        measures[f"sam_rho_{rho:g}"] = one_step
        if settings.ascent > 1:
            measures[f"sam_rho_{rho:g}_steps_{settings.ascent}"] = several_steps
    grid: dict[str, Any] = {"base": base, "reach": settings.reach, "seed": seed}
    if settings.lines:
        begin("line")
        result.lines[space.name] = line(
            space, objective, points=settings.line_points, directions=settings.lines, **grid
        )
    if settings.plane_points:
        begin("plane")
        result.planes[space.name] = plane(space, objective, points=settings.plane_points, **grid)
