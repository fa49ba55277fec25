"""Settings of the sharpness measures. Imports nothing heavy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from flatshift.regularizers.errors import RegularizerError

SpaceName = Literal["adapter", "full"]


@dataclass(frozen=True, kw_only=True)
class Sharpness:
    """Settings of `flatshift.regularizers.sharpness.measure`. Raises RegularizerError for an invalid value."""

    spaces: tuple[SpaceName, ...] = ("adapter", "full")
    """`adapter`: the trained LoRA factors θ = (A, B). `full`: the adapted weights W' = W0 + sBA of linear layers."""
    lanczos: int = 12
    """Maximum number of Hessian products for λ_max; as many vectors of the space are stored. 0: not measured."""
    tolerance: float = 1e-2
    """Stop λ_max when its residual is below this fraction of it."""
    probes: int = 5
    """Random vectors for the trace. 0: not measured."""
    sigmas: tuple[float, ...] = (0.02, 0.05, 0.1)
    """Noise radii relative to the row norms, for E[L(w+ε)] − L(w)."""
    draws: int = 8
    """Antithetic pairs of noise at each σ."""
    rhos: tuple[float, ...] = (0.01, 0.05, 0.1)
    """Radii of the balls for SAM-sharpness, in the norm of the whole space."""
    ascent: int = 3
    """Gradient steps of the longer search in a ball; 1: only the one-step value."""
    lines: int = 3
    """Random directions of the one-dimensional slices. 0: none."""
    line_points: int = 11
    """Points on a line, odd."""
    plane_points: int = 9
    """Points along each side of the two-dimensional slice, odd. 0: none."""
    reach: float = 0.5
    """Extent of the slices, in units of the row norms."""
    confidence: float = 0.95
    """Coverage of the intervals."""

    def __post_init__(self) -> None:
        def demand(holds: bool, key: str, wanted: str) -> None:
            if not holds:
                raise RegularizerError(f"sharpness.{key}: {getattr(self, key)} is not {wanted}")

        known = bool(self.spaces) and set(self.spaces) <= {"adapter", "full"}
        demand(known and len(set(self.spaces)) == len(self.spaces), "spaces", "`adapter`, `full` or both")
        for key in ("sigmas", "rhos"):
            values = getattr(self, key)
            demand(all(math.isfinite(v) and v > 0 for v in values), key, "a list of numbers > 0")
            demand(len(set(values)) == len(values), key, "a list of different numbers")
        for key, least in {"lanczos": 0, "probes": 0, "draws": 1, "ascent": 1, "lines": 0}.items():
            demand(getattr(self, key) >= least, key, f"a number ≥ {least}")
        demand(self.line_points >= 3 and self.line_points % 2 == 1, "line_points", "an odd number ≥ 3")
        planar = self.plane_points == 0 or (self.plane_points >= 3 and self.plane_points % 2 == 1)
        demand(planar, "plane_points", "0 or an odd number ≥ 3")
        demand(math.isfinite(self.reach) and self.reach > 0, "reach", "a number > 0")
        demand(math.isfinite(self.tolerance) and self.tolerance > 0, "tolerance", "a number > 0")
        demand(0 < self.confidence < 1, "confidence", "a number between 0 and 1")

    def passes(self) -> int:
        """Return the maximum number of loss evaluations (a gradient counts as three) for these settings."""
        gradients = 0
        if self.lanczos or self.probes:
            gradients += 1 + 2 * (2 + LADDER) + 2 * (self.lanczos + self.probes) + (4 if self.lanczos else 0)
        gradients += len(self.rhos) * (self.ascent - 1) + (1 if self.rhos else 0)
        losses = 2 * self.draws * len(self.sigmas) + 2 * len(self.rhos) + self.lines * (self.line_points - 1)
        losses += max(self.plane_points**2 - 1, 0)
        return 2 + len(self.spaces) * (3 * gradients + losses)


LADDER = 8
"""Maximum number of step lengths tried for the finite differences."""


def measure_name(key: str) -> str:
    """Return a readable name: `rise_sigma_0.05` → `mean rise at σ = 0.05`; keys as in `SharpnessResult`."""
    fixed = {"lambda_max": "λ_max", "lambda_min": "λ_min", "trace": "trace of the Hessian"}
    if key in fixed:
        return fixed[key]
    if key.startswith("rise_sigma_"):
        return f"mean rise at σ = {key.removeprefix('rise_sigma_')}"
    radius, _, steps = key.removeprefix("sam_rho_").partition("_steps_")
    return f"highest rise within ρ = {radius}, " + (f"{steps} steps" if steps else "one step")
