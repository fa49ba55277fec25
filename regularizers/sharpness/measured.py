"""All sharpness measures of one model at once: `measure(model, loss, Sharpness(...), seed=0)`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from flatshift.regularizers.errors import RegularizerError
from flatshift.regularizers.sharpness.measures import (
    Estimate,
    Hessian,
    LossLine,
    Plane,
    ascent_rise,
    expected_rise,
    hutchinson,
    lanczos,
    line,
    plane,
)
from flatshift.regularizers.sharpness.sharpness_config import Sharpness
from flatshift.regularizers.sharpness.spaces import AdapterSpace, FullSpace, Loss, LossFunction, Space

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
    lines: dict[str, LossLine] = field(default_factory=dict)
    planes: dict[str, Plane] = field(default_factory=dict)
    about: dict[str, dict[str, float]] = field(default_factory=dict)
    """`dimensions`, `weight_norm`, `gradient_norm`, `difference_length` (h), `difference_error` (relative, of Hessian
    products), `seconds`."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for a JSON file: {loss, measures: {space: {measure: {value, low, high, n}}}, slices,
        about}."""
        slices: dict[str, dict[str, Any]] = {}
        for name, found in (("line", self.lines), ("plane", self.planes)):
            for space, each in found.items():
                slices.setdefault(space, {})[name] = {
                    "at": each.at,
                    "losses": [[v if math.isfinite(v) else None for v in row] for row in each.losses],
                }
        return {
            "loss": self.loss,
            "measures": {
                space: {name: each.as_dict() for name, each in found.items()} for space, found in self.measures.items()
            },
            "slices": slices,
            "about": {
                space: {name: value if math.isfinite(value) else None for name, value in found.items()}
                for space, found in self.about.items()
            },
        }


def measure(
    model: nn.Module,
    loss: Loss,
    settings: Sharpness | None = None,
    *,
    seed: int = 0,
    progress: Callable[[int, str], None] = lambda passes, what: None,
) -> SharpnessResult:
    """Measure the neighbourhood of a PEFT model's weights, in evaluation mode; the model is not changed.

    Args:
        loss: the loss over fixed batches (`flatshift.regularizers.sharpness.spaces.Loss`).
        seed: of every random direction. The same seed gives models of one architecture the same directions, up to the
            lengths of their rows.
        progress: called for every evaluation with the number of passes done, of at most `settings.passes()`, and its
            purpose.

    Raises:
        RegularizerError: the model has no LoRA layer to measure, is merged or sharded; the loss is not finite, or not
            the same when it is computed again.
    """
    settings = settings or Sharpness()
    done, doing = 0, "loss"

    def count(passes: int) -> None:
        nonlocal done
        done += passes
        progress(done, doing)

    objective = LossFunction(model, loss, count)
    spaces = [_SPACES[name](model) for name in settings.spaces]
    base = objective.value()
    if not math.isfinite(base):
        raise RegularizerError(f"the loss at the weights themselves is {base}; sharpness needs a finite one")
    again = objective.value()
    if not math.isclose(again, base, rel_tol=1e-5):
        raise RegularizerError(
            f"the loss is {base!r} at one time and {again!r} at another, at the same weights; give the measurement "
            "fixed batches and no randomness of its own"
        )
    found = SharpnessResult(base)
    for space in spaces:
        started = time.monotonic()

        def say(what: str, space: Space = space) -> None:
            nonlocal doing
            doing = f"{space.name}: {what}"

        _measure_space(space, objective, settings, seed, base, found, say)
        found.about[space.name]["seconds"] = time.monotonic() - started
    return found


def _measure_space(
    space: Space,
    objective: LossFunction,
    settings: Sharpness,
    seed: int,
    base: float,
    found: SharpnessResult,
    say: Callable[[str], None],
) -> None:
    measures: dict[str, Estimate] = {}
    found.measures[space.name] = measures
    say("gradient")
    gradient = space.gradient(objective)[1]
    about = {
        "dimensions": float(space.size),
        "weight_norm": space.weight_norm,
        "gradient_norm": float(torch.linalg.vector_norm(gradient.double())),
    }
    found.about[space.name] = about
    if settings.lanczos or settings.probes:
        say("step length")
        start = space.signs(seed, "start", 0)
        hessian = Hessian.calibrated(space, objective, start)
        about["difference_length"] = hessian.length
        if settings.lanczos:
            say("λ_max")
            spectrum = lanczos(hessian, start, steps=settings.lanczos, tolerance=settings.tolerance)
            measures["lambda_max"], measures["lambda_min"] = spectrum.largest, spectrum.smallest
            hessian.check(spectrum.vector)
        if settings.probes:
            say("trace")
            vectors = (space.signs(seed, "trace", index) for index in range(settings.probes))
            measures["trace"] = hutchinson(hessian, vectors, confidence=settings.confidence)
        about["difference_error"] = hessian.error
    if settings.sigmas:
        say("noise")
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
    say("ascent")
    for rho in settings.rhos:
        one, several = ascent_rise(
            space, objective, rho, base=base, gradient=gradient, steps=settings.ascent, seed=seed
        )
        measures[f"sam_rho_{rho:g}"] = one
        if settings.ascent > 1:
            measures[f"sam_rho_{rho:g}_steps_{settings.ascent}"] = several
    grid: dict[str, Any] = {"base": base, "reach": settings.reach, "seed": seed}
    if settings.lines:
        say("line")
        found.lines[space.name] = line(space, objective, points=settings.line_points, directions=settings.lines, **grid)
    if settings.plane_points:
        say("plane")
        found.planes[space.name] = plane(space, objective, points=settings.plane_points, **grid)
