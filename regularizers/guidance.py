"""How GGPO's noise power is shared among the rows of a layer, over training, and how its rank is chosen.

Pure functions over flat vectors: the rows of all layers one after another, `owner` (rows,) naming each row's layer.
Sources: LoRA-GGPO (arXiv 2502.14538 v1) for the sum of weight and gradient norms, Flat-LoRA (arXiv 2409.14396) for
σ²/n·|W'_i|² and the ramp; the `relative` scaling of β is our own reading.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

Mode = Literal["relative", "paper"]
Schedule = Literal["constant", "linear", "cosine"]


def default_rank(rows: int, columns: int) -> int:
    """k = clip(2^⌊log2(min(m, n)/256)⌋, 8, 32): larger matrices need more columns to stay near Gaussian in norm."""
    return min(32, max(8, 2 ** math.floor(math.log2(max(1, min(rows, columns)) / 256))))


def scheduled_sigma(sigma: float, schedule: Schedule, step: int, total_steps: int) -> float:
    """σ of optimizer step `step` (from 0) of `total_steps`: constant, or a ramp from 0 to σ."""
    if schedule == "constant":
        return sigma
    done = min(1.0, step / total_steps)
    return sigma * (done if schedule == "linear" else 0.5 * (1 - math.cos(math.pi * done)))


def layer_means(values: Tensor, sizes: list[int]) -> Tensor:
    """Mean of each layer's rows, (layers,)."""
    return torch.stack([part.mean() for part in values.split(sizes)])


def debiased(ema: Tensor, updates: Tensor, decay: float) -> Tensor:
    """v = EMA / (1 − b^t) per row, zero where nothing was averaged yet (`updates` per row)."""
    weight = 1 - decay ** updates.to(ema.dtype)
    return torch.where(updates > 0, ema / weight.clamp_min(torch.finfo(ema.dtype).tiny), torch.zeros_like(ema))


def power_shares(
    norms: Tensor,
    v: Tensor,
    *,
    beta: float,
    mode: Mode,
    owner: Tensor,
    means: Callable[[Tensor, Tensor], Sequence[Tensor]],
) -> tuple[Tensor, Tensor]:
    """n·σ_i²/σ² of every row, and the part of it that comes from the gradient; both (rows,).

    norms: |W'_i|²; v: averaged |G_i|², zero while unknown; means: of both over each layer's rows, (layers,) each.
    relative: (|W'_i|² + β v_i·mean|W'|²/mean v)/(1+β), whose sum over a layer does not depend on β. A layer
        without a gradient yet shares its power by the weights alone: |W'_i|², the same sum.
    paper: |W'_i|² + β v_i.
    """
    if mode == "paper":
        gradient = beta * v
        return norms + gradient, gradient
    mean_norms, mean_v = means(norms, v)
    known = mean_v > 0
    scale = torch.where(known, mean_norms / torch.where(known, mean_v, torch.ones_like(mean_v)), 0.0)
    gradient = beta / (1 + beta) * scale[owner] * v
    return torch.where(known[owner], norms / (1 + beta) + gradient, norms), gradient
