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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatshift.regularizers.config import BiLora
from flatshift.regularizers.errors import RegularizerError
from flatshift.regularizers.layers.forward import OutputTerm, check_whole_layers, find_linear_sites
from flatshift.regularizers.layers.sites import LoraSite
from flatshift.regularizers.mesh import ALONE, Placement
from flatshift.regularizers.methods.preconditions import (
    check_not_attached,
    check_step_entry,
    mark_hooked,
    release_hooked,
    require,
    require_nonnegative,
)
from flatshift.regularizers.protocol import MetricTensors, Regularizer

if TYPE_CHECKING:
    from typing import Self

_MOMENTS = ("exp_avg", "exp_avg_sq")


def draw_a(seed: int, layer: str, rank: int, columns: int) -> Tensor:
    """Draw A₂ (rank, columns) as PEFT draws A: uniform in ±1/√columns; the same for a layer's name on any mesh."""
    key = int.from_bytes(hashlib.sha256(f"{seed}/{layer}/bi-lora".encode()).digest()[:8], "big") >> 1
    drawn = torch.rand(rank, columns, generator=torch.Generator().manual_seed(key))
    return (2 * drawn - 1) / math.sqrt(columns)


def squared_product_norm(a: Tensor, b: Tensor) -> Tensor:
    """Return |BA|_F² = Σ (BᵀB)∘(AAᵀ), float64 (), of a (r, n) and b (m, r), without forming BA."""
    return ((b.T @ b).double() * (a @ a.T).double()).sum()


def _add_second_adapter(a: Tensor, b: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return y + F.linear(F.linear(x.to(y.dtype), a.to(y.dtype)), b.to(y.dtype)).to(y.dtype)


class BiLoraRegularizer(Regularizer):
    """Bi-LoRA (see the module docstring). One pass; with rank 8 the paper measures 1.09 of LoRA's step time.

    Ascent uses AdamW (`maximize`, no weight decay) with the step's learning rate · `lr_scale`, in
    `after_optimizer_step`; a step with non-finite gradients, or without a following optimizer step, changes nothing.
    """

    def __init__(self, config: BiLora) -> None:
        require(math.isfinite(config.rho) and config.rho > 0, "rho", config.rho, "a number > 0")
        require(config.rank >= 1, "rank", config.rank, "a number ≥ 1")
        require_nonnegative("lr_scale", config.lr_scale)
        self.config = config
        self._terms: list[OutputTerm] = []
        self._factors: dict[str, Tensor] = {}
        """A₂ and B₂ of every layer, `<layer>.A` (r, n) and `<layer>.B` (m, r), float32 (float64 for float64 layers)."""
        self._optimizer: torch.optim.AdamW | None = None
        self._placement: Placement = ALONE
        self._gradients: list[Tensor] | None = None
        """Gradients of the last step, until `after_optimizer_step`."""
        self._made: Tensor | None = None
        """On a mesh, True if any rank made a backward pass, bool ()."""
        self._inside = False
        self._seed = self._step = 0
        self._norm = self._clipped = self._skipped = torch.zeros(())
        self._on_host = True

    def attach(self, model: nn.Module, *, seed: int, total_steps: int, placement: Placement | None = None) -> Self:
        check_not_attached(bool(self._terms))
        placement = placement or ALONE
        check_whole_layers(placement, "Bi-LoRA")
        sites = find_linear_sites(model, placement, "Bi-LoRA")
        mark_hooked({site.name: site.layer for site in sites}, self)
        self._placement, self._terms = placement, [OutputTerm(site) for site in sites]
        self._factors = {name: factor for site in sites for name, factor in self._fresh(site, seed).items()}
        device = sites[0].device
        # A fused optimizer can be made to skip its step by a flag on the device; on a CPU the flag is simply read
        # first.
        self._on_host = device.type == "cpu"
        self._optimizer = torch.optim.AdamW(
            self._factors.values(), lr=0.0, weight_decay=0.0, maximize=True, fused=not self._on_host
        )
        self._seed, self._step, self._gradients = seed, 0, None
        self._norm = torch.zeros((), dtype=torch.float64, device=device)
        self._clipped = torch.zeros((), dtype=torch.int64, device=device)
        self._skipped = torch.zeros_like(self._clipped)
        return self

    def _fresh(self, site: LoraSite, seed: int) -> dict[str, Tensor]:
        rank, double = self.config.rank, site.dtype == torch.float64
        a = draw_a(seed, site.name, rank, site.columns)
        factors = {f"{site.name}.A": a, f"{site.name}.B": torch.zeros(site.rows, rank)}
        dtype = torch.float64 if double else torch.float32
        return {name: value.to(site.device, dtype).requires_grad_() for name, value in factors.items()}

    @contextmanager
    def step(self, t: int, *, loss_scale: float = 1.0) -> Iterator[Iterable[int]]:
        check_step_entry("Bi-LoRA", t, attached=bool(self._terms), inside=self._inside)
        self._step, self._gradients, self._inside = t, None, True
        try:
            for term in self._terms:
                factors = (self._factors[f"{term.site.name}.{which}"] for which in "AB")
                term.install(partial(_add_second_adapter, *factors))
            yield range(1)
            self._gradients = self._read(loss_scale)
        finally:
            self._let_go()

    @torch.no_grad()
    def _read(self, loss_scale: float) -> list[Tensor] | None:
        """Return ∂L/∂ every factor, summed over the mesh; None if no backward pass was made. Collective."""
        found = [torch.zeros_like(f) if f.grad is None else f.grad for f in self._factors.values()]
        made = any(f.grad is not None for f in self._factors.values())
        if self._placement is ALONE:
            return [gradient / loss_scale for gradient in found] if made else None
        flat = torch.cat([*(gradient.flatten() for gradient in found), found[0].new_full((1,), float(made))])
        self._placement.sum_data(flat)
        self._made = flat[-1] > 0
        if self._on_host and not self._made:
            return None
        flat /= self._placement.gradient_scale * loss_scale
        parts = flat[:-1].split([gradient.numel() for gradient in found])
        return [part.view_as(gradient) for part, gradient in zip(parts, found, strict=True)]

    def _let_go(self) -> None:
        for term in self._terms:
            term.remove()
        for factor in self._factors.values():
            factor.grad = None
        self._inside = False

    @torch.no_grad()
    def after_optimizer_step(self, rate: float) -> None:
        """Ascend and project back into the ball, unless a gradient is not finite. Does not wait for the device."""
        gradients, self._gradients = self._gradients, None
        if gradients is None or self._optimizer is None:
            return
        device = gradients[0].device
        finite = torch.stack([gradient.isfinite().all().to(device) for gradient in gradients]).all()
        self._skipped = self._skipped + ~finite
        if self._made is not None:  # on a mesh only the device knows whether any rank made a backward pass
            finite = finite & self._made
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
        self._pull_back(finite)

    def _pull_back(self, updated: Tensor) -> None:
        """Scale all factors by √(ρ/c) if c > ρ and they were `updated`, bool ()."""
        names = [term.site.name for term in self._terms]
        device = next(iter(self._factors.values())).device
        squares = [squared_product_norm(self._factors[f"{n}.A"], self._factors[f"{n}.B"]).to(device) for n in names]
        norm = torch.stack(squares).sum().sqrt()
        outside = (norm > self.config.rho) & updated
        factor = torch.where(outside, (self.config.rho / norm).sqrt(), 1.0)
        for value in self._factors.values():
            value *= factor.to(value)
        self._norm = norm.clamp(max=self.config.rho)
        self._clipped = self._clipped.to(device) + outside

    def metrics(self) -> dict[str, float]:
        """Return `auxiliary_norm` √Σ|B₂A₂|² after the last optimizer step (at most ρ), `auxiliary_clips`, the number of
        steps so far that were scaled back, and `auxiliary_skips`, the number skipped because of a non-finite
        gradient."""
        return self.metric_tensors().read()

    def metric_tensors(self) -> MetricTensors:
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
            "bi-lora.updates": self._updates(),
        }
        for name, factor in self._factors.items():
            state[name] = factor.detach().clone()
            for moment, value in self._moments(factor).items():
                state[f"{name}.{moment}"] = value.clone()
        return state

    def _updates(self) -> Tensor:
        """Return the number of steps AdamW has made, float32 () as it counts them."""
        assert self._optimizer is not None
        counts: list[Tensor] = [held["step"] for held in self._optimizer.state.values() if held]
        return counts[0].clone() if counts else torch.zeros(())

    def _moments(self, factor: Tensor) -> dict[str, Tensor]:
        assert self._optimizer is not None
        held = self._optimizer.state.get(factor, {})
        return {moment: held.get(moment, torch.zeros_like(factor)).detach() for moment in _MOMENTS}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if self._optimizer is None:
            raise RegularizerError("Bi-LoRA is not attached to a model; attach before loading its state")
        expected = self.state_dict()
        if different := set(expected) ^ set(state):
            raise RegularizerError(
                f"the saved state does not belong to Bi-LoRA on this model ({min(different)!r} is in only one of the "
                "two); resume with the regularizer, backbone and adapter that the checkpoint was written with"
            )
        for name, value in expected.items():
            if state[name].shape != value.shape:
                raise RegularizerError(
                    f"the saved state has {name} of shape {tuple(state[name].shape)} where this run has "
                    f"{tuple(value.shape)}; resume with the regularizer.rank and backbone of the checkpoint"
                )
        if int(state["bi-lora.seed"]) != self._seed:
            raise RegularizerError(
                f"the saved state was drawn from seed {int(state['bi-lora.seed'])}, this run from {self._seed}; resume "
                "with the same train.seed"
            )
        self._step = int(state["bi-lora.step"])
        self._skipped = state["bi-lora.skips"].to(self._skipped, copy=True)
        self._clipped, self._norm = (state[f"bi-lora.{what}"].clone() for what in ("clips", "norm"))
        updates = state["bi-lora.updates"].to("cpu" if self._on_host else self._norm.device, torch.float32)
        with torch.no_grad():
            for name, factor in self._factors.items():
                factor.copy_(state[name])
                moments = {moment: state[f"{name}.{moment}"].to(factor, copy=True) for moment in _MOMENTS}
                self._optimizer.state[factor] = {"step": updates.clone(), **moments} if updates > 0 else {}

    def detach(self) -> None:
        self._let_go()
        release_hooked(self)
        self._terms, self._factors, self._optimizer, self._gradients = [], {}, None, None
        self._placement = ALONE
