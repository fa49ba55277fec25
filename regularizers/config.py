"""Which regularizer a run uses: one frozen dataclass each, chosen by `kind`. Imports nothing heavy."""

from __future__ import annotations

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
    mode: Literal["relative", "paper"] = "relative"
    """`relative`: β scaled per layer, noise power exactly independent of β. `paper`: the literal sum of norms."""
    rank: int | None = None
    """k, the rank of the noise; null: clip(2^⌊log2(min(m,n)/256)⌋, 8, 32)."""
    probes: int = 4
    """k_p, probe columns that estimate the row gradient norms."""
    scope: Literal["step"] = "step"
    """One noise per optimizer step, shared by its micro-batches."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How σ rises over the steps: constant, or a ramp from 0 to σ."""
    ema: float = 0.95
    """Decay of the averaged squared row gradient norms."""
    refresh: int = 16
    """Steps between exact recomputations of the row norms of W0 + sBA."""


RegularizerConfig = Plain | GGPO
