"""Distribution of GGPO's noise power over the rows of a layer, and over training.

Pure functions over flat vectors: the rows of all layers one after another; `owner` (rows,) holds each row's layer.
Sources: LoRA-GGPO (arXiv 2502.14538 v1) for the sum of weight and gradient norms, Flat-LoRA (arXiv 2409.14396) for
σ²/n·|W'_i|² and the ramp; the `relative` scalings of β are our own readings.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Mode = Literal["relative", "relative-product", "paper"]
Schedule = Literal["constant", "linear", "cosine"]


def scheduled_sigma(sigma: float, schedule: Schedule, step: int, total_steps: int) -> float:
    """Return σ of optimizer step `step` (from 0) of `total_steps`: constant, or a ramp from 0 to σ."""
    if schedule == "constant":
        return sigma
    done = min(1.0, step / total_steps)
    return sigma * (done if schedule == "linear" else 0.5 * (1 - math.cos(math.pi * done)))


def layer_means(values: Tensor, sizes: list[int]) -> Tensor:
    """Return the mean of each layer's rows, (layers,)."""
    return torch.stack([part.mean() for part in values.split(sizes)])


def debias_ema(ema: Tensor, updates: Tensor, decay: float) -> Tensor:
    """Return v = EMA / (1 − b^t) per row, zero before the first estimate (`updates` is t per row)."""
    weight = 1 - decay ** updates.to(ema.dtype)
    return torch.where(updates > 0, ema / weight.clamp_min(torch.finfo(ema.dtype).tiny), torch.zeros_like(ema))


def unscaled_gradient_share(norms: Tensor, v: Tensor, mode: Mode) -> Tensor:
    """Return the unscaled gradient part of each row's power, (rows,): v_i, or |W'_i|² v_i for the product."""
    return norms * v if mode == "relative-product" else v


def gradient_share_scale(norms: Tensor, forms: Tensor) -> Tensor:
    """Return the factor that scales `unscaled_gradient_share` to the size of |W'|², from the sums (or means) of both
    over the same rows; zero while no gradient is known."""
    known = forms > 0
    return torch.where(known, norms / torch.where(known, forms, torch.ones_like(forms)), 0.0)


def power_shares(norms: Tensor, form: Tensor, level: Tensor, *, beta: float, mode: Mode) -> tuple[Tensor, Tensor]:
    """Return n·σ_i²/σ² of every row, and its part that comes from the gradient; both (rows,).

    norms: |W'_i|²; form: `unscaled_gradient_share`; level: `gradient_share_scale` over the row's layer, or over the
    whole model.

        relative: (|W'_i|² + β v_i·Σ|W'|²/Σv)/(1+β).
        relative-product: |W'_i|² (1 + β v_i·Σ|W'|²/Σ|W'|²v)/(1+β).
        paper: |W'_i|² + β v_i; level is not used.

    For the first two, the sum over the rows that `level` was computed over does not depend on β. While no gradient is
    known they share the power by the weights alone: |W'_i|², the same sum.
    """
    if mode == "paper":
        gradient = beta * form
        return norms + gradient, gradient
    gradient = beta / (1 + beta) * level * form
    return torch.where(level > 0, norms / (1 + beta) + gradient, norms), gradient
