"""GGPO's signed low-rank noise beside dense Gaussian noise with the same row scales, on a real backbone.

Both are added to the weights and taken away again, draw by draw, in antithetic pairs: the rise of the loss
(L(W+ε) + L(W−ε))/2 − L(W), the mean gradient of the adapter over the draws, and what a single draw looks like.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from flatshift.regularizers import FlatLora, build

GRADIENT_PAIRS = 100
FEWEST, MOST = 100, 600
"""Antithetic pairs of a family: as many as make the interval of its mean ±1.5 % wide, within these bounds."""
WANTED = 0.015


@dataclass(frozen=True)
class Draws:
    """What one family of noise did."""

    rises: Tensor
    """(pairs,)"""
    gradient: Tensor
    """Mean over draws of the adapter's gradient, flat."""
    spectral: float
    """‖ε‖₂/‖W0‖₂, mean over layers of one draw."""
    logit_sd: float
    """Largest standard deviation over draws of an attention logit (τ)."""

    @property
    def relative_sd(self) -> float:
        return float(self.rises.std() / self.rises.mean())

    @property
    def tail(self) -> float:
        """99 % quantile of a draw's rise ÷ the mean rise."""
        return float(self.rises.quantile(0.99) / self.rises.mean())


def ratio_interval(ours: Tensor, dense: Tensor) -> tuple[float, float, float]:
    """E ours / E dense with its 95 % interval (delta method, independent samples)."""
    ratio = float(ours.mean() / dense.mean())
    relative = [float(x.std() / x.mean()) / math.sqrt(len(x)) for x in (ours, dense)]
    half = 1.96 * ratio * math.hypot(*relative)
    return ratio, ratio - half, ratio + half


def weights_of(model: Any) -> dict[str, Tensor]:
    """W0 of every LoRA layer, by its name."""
    suffix = ".base_layer.weight"
    return {n.removesuffix(suffix): p for n, p in model.named_parameters() if n.endswith(suffix)}


def draws(model: Any, loss: Callable[[], Tensor], sigma: float, *, dense: bool, seed: int = 0) -> Draws:
    """Perturb `model` (float32, its adapter as it is) until the mean rise is known well enough."""
    weights = weights_of(model)
    kept = {name: weight.detach().clone() for name, weight in weights.items()}
    trained = [p for p in model.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(seed + 1)
    regularizer: Any = build(FlatLora(sigma=sigma, schedule="constant")).attach(model, seed=seed, total_steps=MOST)
    rises: list[float] = []
    gradient = torch.zeros(sum(p.numel() for p in trained))
    spectral, logits = 0.0, AttentionSpread()
    try:
        with torch.no_grad():
            base = float(loss())
        while len(rises) < FEWEST or (len(rises) < MOST and not _known(rises)):
            noise = _noise(regularizer, len(rises), sigma, generator if dense else None)
            if not rises:
                ratios = [_spectral(e) / _spectral(kept[name]) for name, e in noise.items()]
                spectral = sum(ratios) / len(ratios)
            learns = len(rises) < GRADIENT_PAIRS
            both = 0.0
            for sign in (1, -1):
                for name, weight in weights.items():
                    weight.data = kept[name] + sign * noise[name]
                with torch.set_grad_enabled(learns), logits.watching(learns):
                    value = loss()
                if learns:
                    grads = torch.autograd.grad(value, trained)
                    gradient += torch.cat([g.flatten() for g in grads]) / (2 * GRADIENT_PAIRS)
                both += float(value.detach()) / 2
            rises.append(both - base)
    finally:
        for name, weight in weights.items():
            weight.data = kept[name]
        regularizer.detach()
    return Draws(torch.tensor(rises, dtype=torch.float64), gradient, spectral, logits.largest())


def _noise(regularizer: Any, t: int, sigma: float, generator: torch.Generator | None) -> dict[str, Tensor]:
    with regularizer.step(t):
        noise: dict[str, Tensor] = regularizer.perturbations()
        if generator is None:
            return noise
        state = regularizer.state_dict()
    return {
        name: sigma * (state[f"{name}.norms"] / e.shape[1]).sqrt()[:, None] * torch.randn(e.shape, generator=generator)
        for name, e in noise.items()
    }


def _known(rises: list[float]) -> bool:
    seen = torch.tensor(rises)
    return bool(1.96 * seen.std() / math.sqrt(len(rises)) < WANTED * seen.mean())


def _spectral(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))


class AttentionSpread:
    """Standard deviation over draws of every attention logit, by transformers' attention interface."""

    current: AttentionSpread | None = None

    def __init__(self) -> None:
        self.sums: dict[int, tuple[Tensor, Tensor, int]] = {}

    @contextlib.contextmanager
    def watching(self, on: bool) -> Iterator[None]:
        """Attention inside is seen."""
        AttentionSpread.current = self if on else None
        try:
            yield
        finally:
            AttentionSpread.current = None

    def add(self, module: Any, logits: Tensor) -> None:
        zero = torch.zeros_like(logits)
        first, second, count = self.sums.get(id(module), (zero, zero, 0))
        self.sums[id(module)] = (first + logits, second + logits.square(), count + 1)

    def largest(self) -> float:
        """Of all logits."""
        variances = (second / count - (first / count).square() for first, second, count in self.sums.values())
        return max((float(variance.clamp_min(0).sqrt().max()) for variance in variances), default=math.nan)


def observed_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **settings: Any) -> Any:
    """Fused attention that lets the running `AttentionSpread` see all logits, before any mask."""
    if AttentionSpread.current is not None:
        groups = query.shape[1] // key.shape[1]
        scale = settings.get("scaling") or query.shape[-1] ** -0.5
        logits = scale * query.detach() @ key.detach().repeat_interleave(groups, 1).transpose(-1, -2)
        AttentionSpread.current.add(module, logits)
    return sdpa_attention_forward(module, query, key, value, mask, **settings)
