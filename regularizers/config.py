"""Which regularizer a run uses: one frozen dataclass each, chosen by `kind`. Imports nothing heavy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


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
    """Weight of the gradient norm in a row's share of noise power; 0 is Flat-LoRA."""
    mode: Literal["relative", "relative-product", "paper"] = "relative"
    """`relative`: a sum of norms with β scaled, noise power exactly independent of β. `relative-product`: the same
    for their product. `paper`: the literal sum of norms."""
    normalize: Literal["layer", "model"] = "layer"
    """Over which rows β is scaled: `layer` keeps each layer's noise power, `model` lets the gradient move it between
    layers."""
    control: Literal["none", "shuffled"] = "none"
    """`shuffled`: the gradient norms go to other rows of their layer, anew at every step: a control for studies."""
    rank: int | None = None
    """k, the rank of the noise; null: clip(2^⌊log2(min(m,n)/256)⌋, 8, 32)."""
    probes: int = 4
    """k_p, probe columns that estimate the row gradient norms."""
    sketch_every: int = 1
    """Steps from one estimate of the row gradient norms to the next; those between do without probe columns."""
    scope: Literal["step", "microbatch", "sample"] = "step"
    """What has a noise of its own: an optimizer step, each of its micro-batches, or each sample of them (own signs in
    the step's noise)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How σ rises over the steps: constant, or a ramp from 0 to σ."""
    ema: float = 0.95
    """Decay of the averaged squared row gradient norms, for each estimate."""
    refresh: int = 16
    """Steps between recomputations of the row norms of W0 + sBA."""
    tolerance: float = 0.0
    """A recomputation leaves a layer at the row norms of W0 where the exact bound |s b_i A| on their difference is
    within this part of them for every row; 0 always takes the product with W0."""


@dataclass(frozen=True, kw_only=True)
class FlatLora:
    """Random perturbation of the frozen weights by their own row norms (Flat-LoRA): GGPO without the gradient."""

    kind: Literal["flat-lora"] = "flat-lora"
    sigma: float = 0.05
    """Noise radius σ relative to the row norm; 0 is bit-identical to plain."""
    rank: int | None = None
    """k, the rank of the noise; null: clip(2^⌊log2(min(m,n)/256)⌋, 8, 32)."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """How σ rises over the steps; the paper ramps it up along half a cosine."""
    refresh: int = 16
    """Steps between exact recomputations of the row norms of W0 + sBA."""


@dataclass(frozen=True, kw_only=True)
class MGPO:
    """A step along the momentum of the gradient, in one pass (LoRA-MGPO, the final form of LoRA-GGPO)."""

    kind: Literal["mgpo"] = "mgpo"
    rho: float = 0.05
    """ρ, length of the step before it is divided by the averaged gradient norm; 0 is bit-identical to plain. The
    paper: 0.05 for understanding, 0.01 (with momentum and ema 0.8) for generation."""
    momentum: float = 0.9
    """μ of the gradient momentum m."""
    ema: float = 0.9
    """Decay of the averaged gradient norm by which the step is divided."""
    form: Literal["text", "code"] = "text"
    """`text`: one step in the space of the adapter's factors, as in the paper. `code`: one per layer in the space of
    the merged weight, as in the authors' repository."""
    sign: int | None = None
    """+1 goes up along the momentum, −1 down; null: +1 for `text`, −1 for `code`."""
    clamp: float = 10.0
    """Largest factor 1/averaged norm (`code` only)."""


@dataclass(frozen=True, kw_only=True)
class MSAM:
    """A step of fixed length against the momentum, in one pass (Momentum-SAM)."""

    kind: Literal["msam"] = "msam"
    rho: float = 0.05
    """ρ, length of the step in the space of the adapter's factors; 0 is bit-identical to plain."""
    momentum: float = 0.9
    """Decay of the averaged gradient (Adam's β1)."""
    sign: int = -1
    """−1 goes down along the averaged gradient, as the authors do; +1 up."""


@dataclass(frozen=True, kw_only=True)
class SAM:
    """Sharpness-aware minimisation over the adapted weights themselves, in two passes; holds their dense gradient."""

    kind: Literal["sam"] = "sam"
    rho: float = 0.05
    """ρ, length of the ascent in the space of the adapted weight matrices."""


@dataclass(frozen=True, kw_only=True)
class ASAM:
    """SAM with a radius relative to each factor entry's size, over the adapter's factors, in two passes."""

    kind: Literal["asam"] = "asam"
    rho: float = 0.5
    """ρ, length of the ascent after each entry is divided by its size."""
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
    """Balancing the two factors of each layer after the update, what SAM does to them in effect (BAR)."""

    kind: Literal["bar"] = "bar"
    form: Literal["nbar", "obar"] = "nbar"
    """`nbar`: compares the norms of the factors' gradients, grows one factor and shrinks the other. `obar`: compares
    the norms of the factors and shrinks the larger."""
    alpha: float = 0.05
    """α: a factor is scaled by 1 ± α·lr; 0 is bit-identical to plain."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """How α falls to 0 over the steps."""


@dataclass(frozen=True, kw_only=True)
class BiLora:
    """A second adapter, trained to raise the loss inside a ball of radius ρ, in the same pass (Bi-LoRA)."""

    kind: Literal["bi-lora"] = "bi-lora"
    rho: float = 0.05
    """ρ, bound of the norm of the second adapter's update over all layers."""
    rank: int = 8
    """Rank of the second adapter."""
    lr_scale: float = 1.0
    """Learning rate of the second adapter (AdamW's ascent) relative to the first's."""


@dataclass(frozen=True, kw_only=True)
class NEFTune:
    """Uniform noise on the embedded tokens (NEFTune); finds no flat minima, here for comparison."""

    kind: Literal["neftune"] = "neftune"
    alpha: float = 5.0
    """α: noise is uniform in ±α/√(T·D), T tokens of width D a row; 0 is bit-identical to plain."""


RegularizerConfig = Plain | GGPO | FlatLora | MGPO | MSAM | SAM | ASAM | LoraSAM | BAR | BiLora | NEFTune


def default_rank(rows: int, columns: int) -> int:
    """k = clip(2^⌊log2(min(m, n)/256)⌋, 8, 32): larger matrices need more columns to stay near Gaussian in norm."""
    return min(32, max(8, 2 ** math.floor(math.log2(max(1, min(rows, columns)) / 256))))
