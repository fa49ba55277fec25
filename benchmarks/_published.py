"""The published way of perturbing weights: materialise W0 + sBA, add noise in place, subtract it again (Flat-LoRA,
nblt/Flat-LoRA `logTrainer.py`, arXiv 2409.14396). A reference for timing and for what it does to a bf16 backbone;
nothing of the product uses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class AddAndSubtract:
    """ε_ij ~ N(0, σ²|W'_i|²/n) of every LoRA layer of `model`, added to its frozen weight for one step."""

    def __init__(self, model: nn.Module, sigma: float) -> None:
        self.layers: list[Any] = [module for module in model.modules() if hasattr(module, "lora_A")]
        self.sigma = sigma

    @contextmanager
    def step(self, t: int) -> Iterator[None]:
        """Perturbed inside. The noise is drawn twice from the same seed, as there, so that it need not be kept."""
        scales = [self._scales(layer) for layer in self.layers]
        self._add(scales, t, 1.0)
        yield
        self._add(scales, t, -1.0)

    @torch.no_grad()
    def _scales(self, layer: Any) -> Tensor:
        update = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        merged = layer.base_layer.weight.float() + update
        return self.sigma * merged.norm(dim=1, keepdim=True) / merged.shape[1] ** 0.5

    @torch.no_grad()
    def _add(self, scales: list[Tensor], t: int, sign: float) -> None:
        draws = torch.Generator().manual_seed(t)
        for layer, scale in zip(self.layers, scales, strict=True):
            weight = layer.base_layer.weight
            noise = torch.randn(weight.shape, generator=draws) * scale
            weight.data.add_(noise.to(weight.dtype), alpha=sign)
