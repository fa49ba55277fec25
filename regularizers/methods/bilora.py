"""Bi-LoRA: a second, adversarial adapter in place of a second pass.

    y = x (W0 + sB₁A₁ + B₂A₂)ᵀ,   A₁, B₁ descend and A₂, B₂ ascend on the gradients of one and the same backward pass

and after each optimizer step all A₂, B₂ are scaled by √(ρ/c) if c = √(Σ_layers |B₂A₂|_F²) > ρ: one ball over all layers
(with one ball per layer most of the gain is lost; without any, training is hurt). The second adapter is dropped at the
end; only the first one is trained for use and saved. Source: Bi-LoRA, arXiv 2508.19564, §4 and Alg. 1.

A₂ is drawn like PEFT's A, B₂ is zero: the first step is plain. Both are plain tensors used only in the layers' outputs
and not parameters of the model, so the user's optimizer, clipping, saving and sharding never see them. They are the
same on all processes with other tokens, FSDP2's included: the layers' inputs and outputs are whole there.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatshift.regularizers.config import BiLora
from flatshift.regularizers.layers.forward import ForwardSwap, find_whole_layers
from flatshift.regularizers.layers.frozen import accumulation_dtype
from flatshift.regularizers.layers.sites import LoraSite
from flatshift.regularizers.mesh import SINGLE_PROCESS, Placement
from flatshift.regularizers.methods.base import AttachedRegularizer, require, require_nonnegative
from flatshift.regularizers.protocol import MetricTensors

_MOMENTS = ("exp_avg", "exp_avg_sq")


def draw_a(seed: int, layer: str, rank: int, columns: int) -> Tensor:
    """Draw A₂ (rank, columns) as PEFT draws A: uniform in ±1/√columns; the same for a layer's name on any mesh."""
    key = int.from_bytes(hashlib.sha256(f"{seed}/{layer}/bi-lora".encode()).digest()[:8], "big") >> 1
    uniform = torch.rand(rank, columns, generator=torch.Generator().manual_seed(key))
    return (2 * uniform - 1) / math.sqrt(columns)


def squared_product_norm(a: Tensor, b: Tensor) -> Tensor:
    """Return |BA|_F² = Σ (BᵀB)∘(AAᵀ), float64 (), of a (r, n) and b (m, r), without forming BA."""
    return ((b.T @ b).double() * (a @ a.T).double()).sum()


def _add_second_adapter(a: Tensor, b: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return y + F.linear(F.linear(x.to(y.dtype), a.to(y.dtype)), b.to(y.dtype)).to(y.dtype)


class BiLoraRegularizer(AttachedRegularizer):
    """Bi-LoRA (see the module docstring). One pass; with rank 8 the paper measures 1.09 of LoRA's step time.

    Ascent uses AdamW (`maximize`, no weight decay) with the step's learning rate · `lr_scale`, in
    `after_optimizer_step`; a step with non-finite gradients, or without a following optimizer step, changes nothing.
    """

    def __init__(self, config: BiLora) -> None:
        require(math.isfinite(config.rho) and config.rho > 0, "rho", config.rho, "a number > 0")
        require(config.rank >= 1, "rank", config.rank, "a number ≥ 1")
        require_nonnegative("lr_scale", config.lr_scale)
        super().__init__("Bi-LoRA", "bi-lora.")
        self.config = config
        self._layers: list[ForwardSwap] = []
        self._factors: dict[str, Tensor] = {}
        """A₂ and B₂ of every layer, `<layer>.A` (r, n) and `<layer>.B` (m, r), float32 (float64 for float64 layers)."""
        self._optimizer: torch.optim.AdamW | None = None
        self._gradients: list[Tensor] | None = None
        self._has_gradient: Tensor | None = None
        """On a mesh, True if any rank made a backward pass, bool ()."""
        self._norm = self._clipped = self._skipped = torch.zeros(())
        self._on_host = True

    def attach(self, model: nn.Module, *, seed: int, total_steps: int, placement: Placement | None = None) -> Self:
        self._check_not_attached()
        placement = placement or SINGLE_PROCESS
        layers = find_whole_layers(model, placement, "Bi-LoRA")
        sites = [layer.site for layer in layers]
        self._finish_attach({site.name: site.layer for site in sites}, seed, placement)
        self._layers, self._gradients = layers, None
        self._factors = {name: factor for site in sites for name, factor in self._create_factors(site, seed).items()}
        device = sites[0].device
        # A fused optimizer can be made to skip its step by a flag on the device; on a CPU the flag is simply read
        # first.
        self._on_host = device.type == "cpu"
        self._optimizer = torch.optim.AdamW(
            self._factors.values(), lr=0.0, weight_decay=0.0, maximize=True, fused=not self._on_host
        )
        self._norm = torch.zeros((), dtype=torch.float64, device=device)
        self._clipped = torch.zeros((), dtype=torch.int64, device=device)
        self._skipped = torch.zeros_like(self._clipped)
        return self

    def _create_factors(self, site: LoraSite, seed: int) -> dict[str, Tensor]:
        rank = self.config.rank
        a = draw_a(seed, site.name, rank, site.columns)
        factors = {f"{site.name}.A": a, f"{site.name}.B": torch.zeros(site.rows, rank)}
        dtype = accumulation_dtype(site.dtype)
        return {name: value.to(site.device, dtype).requires_grad_() for name, value in factors.items()}

    @contextmanager
    def step(self, t: int, *, loss_scale: float = 1.0) -> Iterator[Iterable[int]]:
        with self._in_step(t):
            self._gradients = None
            try:
                for layer in self._layers:
                    factors = (self._factors[f"{layer.site.name}.{side}"] for side in "AB")
                    layer.add_term(partial(_add_second_adapter, *factors))
                yield range(1)
                self._gradients = self._read_gradients(loss_scale)
            finally:
                self._restore_layers()

    @torch.no_grad()
    def _read_gradients(self, loss_scale: float) -> list[Tensor] | None:
        """Return ∂L/∂ every factor, summed over the mesh; None if no backward pass was made. Collective."""
        gradients = [torch.zeros_like(f) if f.grad is None else f.grad for f in self._factors.values()]
        has_gradient = any(f.grad is not None for f in self._factors.values())
        if self._placement is SINGLE_PROCESS:
            return [gradient / loss_scale for gradient in gradients] if has_gradient else None
        flags = gradients[0].new_full((1,), float(has_gradient))
        flat = torch.cat([*(gradient.flatten() for gradient in gradients), flags])
        self._placement.sum_data(flat)
        self._has_gradient = flat[-1] > 0
        if self._on_host and not self._has_gradient:
            return None
        flat /= self._placement.gradient_scale * loss_scale
        parts = flat[:-1].split([gradient.numel() for gradient in gradients])
        return [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]

    def _restore_layers(self) -> None:
        for layer in self._layers:
            layer.restore()
        for factor in self._factors.values():
            factor.grad = None

    @torch.no_grad()
    def after_optimizer_step(self, rate: float) -> None:
        """Ascend and project back into the ball, unless a gradient is not finite. Does not wait for the device."""
        gradients, self._gradients = self._gradients, None
        if gradients is None or self._optimizer is None:
            return
        device = gradients[0].device
        finite = torch.stack([gradient.isfinite().all().to(device) for gradient in gradients]).all()
        self._skipped = self._skipped + ~finite
        if self._has_gradient is not None:  # on a mesh only the device knows whether any rank made a backward pass
            finite = finite & self._has_gradient
        if not self._on_host:
            fused: Any = self._optimizer
            fused.grad_scale, fused.found_inf = None, (~finite).float()
        elif not finite:
            return
        for factor, gradient in zip(self._factors.values(), gradients, strict=True):
            factor.grad = gradient
        self._optimizer.param_groups[0]["lr"] = rate * self.config.lr_scale
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._project(finite)

    def _project(self, updated: Tensor) -> None:
        """Scale all factors by √(ρ/c) if c > ρ and they were `updated`, bool ()."""
        names = [layer.site.name for layer in self._layers]
        device = next(iter(self._factors.values())).device
        squares = [squared_product_norm(self._factors[f"{n}.A"], self._factors[f"{n}.B"]).to(device) for n in names]
        norm = torch.stack(squares).sum().sqrt()
        outside = (norm > self.config.rho) & updated
        factor = torch.where(outside, (self.config.rho / norm).sqrt(), 1.0)
        for value in self._factors.values():
            value *= factor.to(value)
        self._norm = norm.clamp(max=self.config.rho)
        self._clipped = self._clipped.to(device) + outside

    def metric_tensors(self) -> MetricTensors:
        """Return `auxiliary_norm` √Σ|B₂A₂|² after the last optimizer step (at most ρ), `auxiliary_clips`, the number of
        steps so far that were scaled back, and `auxiliary_skips`, the number skipped because of a non-finite
        gradient."""
        values = torch.stack([each.double() for each in (self._norm, self._clipped, self._skipped)])
        names = ("auxiliary_norm", "auxiliary_clips", "auxiliary_skips")
        return MetricTensors(values, lambda numbers: dict(zip(names, numbers, strict=True)))

    def state_dict(self) -> dict[str, Tensor]:
        state = {
            "bi-lora.seed": torch.tensor(self._seed),
            "bi-lora.step": torch.tensor(self._step),
            "bi-lora.skips": self._skipped.clone(),
            "bi-lora.clips": self._clipped.clone(),
            "bi-lora.norm": self._norm.clone(),
            "bi-lora.updates": torch.zeros(()),
        }
        assert self._optimizer is not None
        for name, factor in self._factors.items():
            state[name] = factor.detach().clone()
            moments = self._optimizer.state.get(factor, {})
            for moment in _MOMENTS:
                state[f"{name}.{moment}"] = moments.get(moment, torch.zeros_like(factor)).detach().clone()
            if moments:  # the number of steps AdamW has made, float32 () as it counts them
                state["bi-lora.updates"] = moments["step"].clone()
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        expected = {name: tuple(value.shape) for name, value in self.state_dict().items()} if self._attached else {}
        self._check_state(state, expected, whole=True, source="regularizer.rank and backbone of the checkpoint")
        assert self._optimizer is not None
        self._step = int(state["bi-lora.step"])
        self._skipped = state["bi-lora.skips"].to(self._skipped, copy=True)
        self._clipped, self._norm = state["bi-lora.clips"].clone(), state["bi-lora.norm"].clone()
        updates = state["bi-lora.updates"].to("cpu" if self._on_host else self._norm.device, torch.float32)
        with torch.no_grad():
            for name, factor in self._factors.items():
                factor.copy_(state[name])
                moments = {moment: state[f"{name}.{moment}"].to(factor, copy=True) for moment in _MOMENTS}
                self._optimizer.state[factor] = {"step": updates.clone(), **moments} if updates > 0 else {}

    def detach(self) -> None:
        self._restore_layers()
        super().detach()
        self._layers, self._factors, self._optimizer, self._gradients = [], {}, None, None
