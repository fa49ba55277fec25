"""Settings of the regularizers: one frozen dataclass each, chosen by `kind`; and of the sharpness measures. Imports
nothing heavy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


class RegularizerError(ValueError):
    """A setting or model that a regularizer does not support: one sentence with the problem, its place and the nearest
    fix."""


@dataclass(frozen=True, kw_only=True)
class Plain:
    """No regularizer: plain LoRA."""

    kind: Literal["plain"] = "plain"


@dataclass(frozen=True, kw_only=True)
class GGPO:
    """Gradient-guided perturbation of the frozen weights, as a signed low-rank branch (LoRA-GGPO)."""

    kind: Literal["ggpo"] = "ggpo"
    sigma: float = 0.05
    """Noise radius σ relative to the row norm; 0 is bit-identical to plain."""
    beta: float = 1.0
    """Weight of the gradient norm in a row's share of the noise power; 0 is Flat-LoRA."""
    mode: Literal["relative", "relative-product", "paper"] = "relative"
    """Combination of weight and gradient norms. `relative`: a sum with β scaled, so that the noise power is exactly
    independent of β. `relative-product`: the same for their product. `paper`: the literal sum."""
    normalize: Literal["layer", "model"] = "layer"
    """Rows over which β is scaled: `layer` keeps each layer's noise power, `model` lets the gradient move power between
    layers."""
    control: Literal["none", "shuffled"] = "none"
    """`shuffled`: permute the gradient norms among the rows of each layer, differently at every step; a control for
    studies."""
    rank: int | None = None
    """k, the rank of the noise; null: clip(2^⌊log2(min(m,n)/256)⌋, 8, 32)."""
    probes: int = 4
    """k_p, number of probe columns that estimate the row gradient norms."""
    sketch_every: int = 1
    """Steps between estimates of the row gradient norms; the steps between need no probe columns."""
    scope: Literal["step", "microbatch", "sample"] = "step"
    """Unit with its own noise draw: an optimizer step, each of its micro-batches, or each sample of them (its own signs
    applied to the step's noise)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of σ over the steps: constant, or a ramp from 0 to σ."""
    ema: float = 0.95
    """Decay of the exponential moving average of squared row gradient norms, per estimate."""
    refresh: int = 16
    """Steps between recomputations of the row norms of W0 + sBA."""
    tolerance: float = 0.0
    """Skip the recomputation of a layer's row norms and keep those of W0 if the exact bound |s b_i A| on the difference
    is at most this fraction of them in every row; 0 always computes the product with W0."""


@dataclass(frozen=True, kw_only=True)
class FlatLora:
    """Random perturbation of the frozen weights scaled by their row norms (Flat-LoRA): GGPO without the gradient."""

    kind: Literal["flat-lora"] = "flat-lora"
    sigma: float = 0.05
    """Noise radius σ relative to the row norm; 0 is bit-identical to plain."""
    rank: int | None = None
    """k, the rank of the noise; null: clip(2^⌊log2(min(m,n)/256)⌋, 8, 32)."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Schedule of σ over the steps; the paper ramps it up along half a cosine."""
    refresh: int = 16
    """Steps between exact recomputations of the row norms of W0 + sBA."""


@dataclass(frozen=True, kw_only=True)
class MGPO:
    """A step along the momentum of the gradient, in one pass (LoRA-MGPO, the final form of LoRA-GGPO)."""

    kind: Literal["mgpo"] = "mgpo"
    rho: float = 0.05
    """ρ, length of the step before division by the averaged gradient norm; 0 is bit-identical to plain. The paper: 0.05
    for understanding, 0.01 (with momentum and ema 0.8) for generation."""
    momentum: float = 0.9
    """μ, decay of the gradient momentum m."""
    ema: float = 0.9
    """Decay of the averaged gradient norm that divides the step."""
    form: Literal["text", "code"] = "text"
    """`text`: one step in the space of the adapter's factors, as in the paper. `code`: one per layer in the space of
    the merged weight, as in the authors' repository."""
    sign: int | None = None
    """+1 moves up along the momentum, −1 down; null: +1 for `text`, −1 for `code`."""
    clamp: float = 10.0
    """Upper limit of the factor 1/averaged norm (`code` only)."""


@dataclass(frozen=True, kw_only=True)
class MSAM:
    """A step of fixed length against the momentum, in one pass (Momentum-SAM)."""

    kind: Literal["msam"] = "msam"
    rho: float = 0.05
    """ρ, length of the step in the space of the adapter's factors; 0 is bit-identical to plain."""
    momentum: float = 0.9
    """Decay of the averaged gradient (Adam's β1)."""
    sign: int = -1
    """−1 moves down along the averaged gradient, as the authors do; +1 up."""


@dataclass(frozen=True, kw_only=True)
class SAM:
    """Sharpness-aware minimisation over the adapted weights themselves, in two passes; stores their dense gradient."""

    kind: Literal["sam"] = "sam"
    rho: float = 0.05
    """ρ, length of the ascent in the space of the adapted weight matrices."""


@dataclass(frozen=True, kw_only=True)
class ASAM:
    """SAM with a radius relative to each factor entry's size, over the adapter's factors, in two passes."""

    kind: Literal["asam"] = "asam"
    rho: float = 0.5
    """ρ, length of the ascent step after each entry is divided by its size."""
    eta: float = 0.01
    """η, added to an entry's size, so that zeros move too."""


@dataclass(frozen=True, kw_only=True)
class LoraSAM:
    """SAM over the adapter's factors (LoRA-SAM), in two passes."""

    kind: Literal["lora-sam"] = "lora-sam"
    rho: float = 0.05
    """ρ, length of the ascent in the space of the adapter's factors."""


@dataclass(frozen=True, kw_only=True)
class BAR:
    """Balancing of the two factors of each layer after the optimizer step, the implicit effect of SAM (BAR)."""

    kind: Literal["bar"] = "bar"
    form: Literal["nbar", "obar"] = "nbar"
    """`nbar`: compare the norms of the factors' gradients, grow one factor and shrink the other. `obar`: compare the
    norms of the factors and shrink the larger."""
    alpha: float = 0.05
    """α: a factor is scaled by 1 ± α·lr; 0 is bit-identical to plain."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Schedule by which α falls to 0 over the steps."""


@dataclass(frozen=True, kw_only=True)
class BiLora:
    """A second adapter, trained to raise the loss inside a ball of radius ρ, in the same pass (Bi-LoRA)."""

    kind: Literal["bi-lora"] = "bi-lora"
    rho: float = 0.05
    """ρ, bound on the norm of the second adapter's step over all layers."""
    rank: int = 8
    """Rank of the second adapter."""
    lr_scale: float = 1.0
    """Learning rate of the second adapter (AdamW's ascent) relative to the first's."""


@dataclass(frozen=True, kw_only=True)
class NEFTune:
    """Uniform noise on the embedded tokens (NEFTune); does not find flat minima, included for comparison."""

    kind: Literal["neftune"] = "neftune"
    alpha: float = 5.0
    """α: noise is uniform in ±α/√(T·D) for rows of T tokens of width D; 0 is bit-identical to plain."""


RegularizerConfig = Plain | GGPO | FlatLora | MGPO | MSAM | SAM | ASAM | LoraSAM | BAR | BiLora | NEFTune


def default_rank(rows: int, columns: int) -> int:
    """k = clip(2^⌊log2(min(m, n)/256)⌋, 8, 32): larger matrices need more columns to stay near Gaussian in norm."""
    return min(32, max(8, 2 ** math.floor(math.log2(max(1, min(rows, columns)) / 256))))


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
        def demand(holds: bool, key: str, requirement: str) -> None:
            if not holds:
                raise RegularizerError(f"sharpness.{key}: {getattr(self, key)} is not {requirement}")

        known = bool(self.spaces) and set(self.spaces) <= {"adapter", "full"}
        demand(known and len(set(self.spaces)) == len(self.spaces), "spaces", "a list of `adapter`, `full` or both")
        for key in ("sigmas", "rhos"):
            values = getattr(self, key)
            demand(all(math.isfinite(v) and v > 0 for v in values), key, "a list of numbers > 0")
            demand(len({f"{v:g}" for v in values}) == len(values), key, "a list of different numbers (of six digits)")
        for key, minimum in {"lanczos": 0, "probes": 0, "draws": 1, "ascent": 1, "lines": 0}.items():
            demand(getattr(self, key) >= minimum, key, f"a number ≥ {minimum}")
        demand(self.line_points >= 3 and self.line_points % 2 == 1, "line_points", "an odd number ≥ 3")
        planar = self.plane_points == 0 or (self.plane_points >= 3 and self.plane_points % 2 == 1)
        demand(planar, "plane_points", "0 or an odd number ≥ 3")
        demand(math.isfinite(self.reach) and self.reach > 0, "reach", "a number > 0")
        demand(math.isfinite(self.tolerance) and self.tolerance > 0, "tolerance", "a number > 0")
        demand(0 < self.confidence < 1, "confidence", "a number between 0 and 1")

    def passes(self) -> int:
        """Return the maximum number of loss evaluations (a gradient counts as three) for these settings."""
        gradients = 1 + len(self.rhos) * (self.ascent - 1)
        if self.lanczos or self.probes:
            gradients += 2 * (2 + LADDER) + 2 * (self.lanczos + self.probes) + (4 if self.lanczos else 0)
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
