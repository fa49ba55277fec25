"""Sharpness-aware minimisation in two passes: over the adapter's factors, or over the adapted weights themselves.

    ε = ρ g/|g|            SAM (Foret et al., ICLR 2021, arXiv 2010.01412, eq. 2), g = ∂L/∂w at w
    ε = ρ T² g/|T g|       ASAM (Kwon et al., ICML 2021, arXiv 2102.11600, eq. 8), T = |w| + η

and the optimizer uses the gradient at w + ε. Norms are over all of w: all layers, and all processes of a mesh.
LoRA-SAM, w = θ = all A and B: in the merged weight it moves by about c [BBᵀG + GAᵀA], so while B is small almost only
inside the row space of A (Bi-LoRA, arXiv 2508.19564, §3). SAM over the merged weights W' has no such restriction and
costs a dense gradient: see `WeightSAM`.

`TwoPassRegularizer` is the shared frame: a first pass at the weights, a second one at the perturbed weights (the loop:
`flatshift.regularizers.protocol`). Between them the first one's gradients are read and removed, so `.grad` ends as the
second one's alone: unlike the published code (davda54/sam), this needs no closure, and whatever scales, clips or
unscales gradients does it once, after the step, as for plain training. A pass is all micro-batches of the step, so
accumulation is right. Dropout should use the same masks in both passes, so that they evaluate the same function: our
loop and `TwoPassMixin` ensure this.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatshift.regularizers.config import ASAM, SAM, LoraSAM, RegularizerError
from flatshift.regularizers.layers.adapters import AdapterParameters
from flatshift.regularizers.layers.forward import ForwardSwap, find_whole_layers
from flatshift.regularizers.layers.frozen import accumulation_dtype
from flatshift.regularizers.layers.fused import unsafe_reshape
from flatshift.regularizers.layers.sharded import is_sharded
from flatshift.regularizers.mesh import SINGLE_PROCESS, Placement
from flatshift.regularizers.methods.base import AttachedRegularizer, lora_layers, require_nonnegative
from flatshift.regularizers.protocol import MetricTensors

_VANISHING = 1e-30
"""Gradient norms below this count as zero: ρ divided by them overflows float32."""


class TwoPassRegularizer(AttachedRegularizer):
    """Base class that counts passes, keeps metrics and state; subclasses define the perturbation."""

    passes = 2

    def __init__(self, kind: str, rho: float) -> None:
        require_nonnegative("rho", rho)
        super().__init__(kind, f"{kind}.")
        self._rho = rho
        self._theta: AdapterParameters | None = None
        self._model: nn.Module | None = None
        self._passes_begun = 0
        self._usable = torch.ones((), dtype=torch.bool)  # of the step's perturbation
        self._unperturbed = torch.zeros((), dtype=torch.int64)
        self._figures: dict[str, Tensor] = {}

    def _attach_theta(
        self, theta: AdapterParameters, model: nn.Module, layers: Mapping[str, nn.Module], seed: int
    ) -> None:
        """Finish `attach` to θ and these layers of `model`, and reset the counters."""
        self._finish_attach(layers, seed, theta.placement)
        self._theta, self._model, self._figures = theta, model, {}
        self._unperturbed = torch.zeros((), dtype=torch.int64, device=theta.device)

    def _prepare_first_pass(self, stack: ExitStack) -> None:
        """Prepare the first pass; callbacks on `stack` are undone when the step is left."""

    @abstractmethod
    def _perturb(self, stack: ExitStack, loss_scale: float) -> dict[str, Tensor]:
        """Between the passes: read the gradients and perturb until `stack` is closed; return metrics. The gradients are
        removed afterwards."""

    def _gradient_norm(self, loss_scale: float) -> Tensor:
        """Return |∂L/∂θ| of the current gradients, float64 (). Collective."""
        assert self._theta is not None
        return self._theta.squared_norm(self._theta.gradients()).sqrt() / loss_scale

    @contextmanager
    def step(self, t: int, *, loss_scale: float = 1.0) -> Iterator[Iterable[int]]:
        with self._in_step(t), ExitStack() as stack:
            self._passes_begun = 0
            self._prepare_first_pass(stack)
            yield self._passes(t, stack, loss_scale)
            if self._passes_begun < 2:
                raise RegularizerError(
                    f"{self._name} takes two passes over the micro-batches of step {t} and got {self._passes_begun}; "
                    "write `with regularizer.step(t) as passes:` and inside it `for _ in passes:` around the forward "
                    "and backward passes"
                )
            self._figures["perturbed_gradient_norm"] = self._gradient_norm(loss_scale)
            self._unperturbed = self._unperturbed.to(self._usable.device) + ~self._usable

    def _passes(self, t: int, stack: ExitStack, loss_scale: float) -> Iterator[int]:
        for index in range(2):
            if not (self._inside and self._step == t and self._passes_begun == index):
                raise RegularizerError(f"the passes of step({t}) were asked for after the step had been left")
            if index == 1:
                assert self._model is not None
                self._figures = self._perturb(stack, loss_scale)
                self._model.zero_grad(set_to_none=True)
            self._passes_begun = index + 1
            yield index

    def _step_factor(self, norm: Tensor) -> tuple[Tensor, Tensor]:
        """Return ρ/`norm`, and whether it is usable, bool (): not if the first gradient is zero or not finite, and the
        step stays unperturbed. Does not wait for the device."""
        usable = norm.isfinite() & (norm > _VANISHING)
        self._usable = usable
        return self._rho / norm, usable

    def metric_tensors(self) -> MetricTensors:
        """Return the metrics of the last step, before clipping and without the loss scale.

        `gradient_norm` |∂L/∂θ| at the weights, `perturbed_gradient_norm` at the perturbed ones, `perturbation_norm`
        |ε|, and for SAM over the weights `weight_gradient_norm` |∂L/∂W'|; `unperturbed_steps`: number of steps so far
        whose first gradient was zero or not finite, and which trained with ε = 0.
        """
        figures = {**self._figures, "unperturbed_steps": self._unperturbed}
        values = torch.stack([value.to(self._unperturbed.device, torch.float64) for value in figures.values()])
        return MetricTensors(values, lambda numbers: dict(zip(figures, numbers, strict=True)))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the counters; the method has no other memory, and draws nothing."""
        return {
            f"{self._prefix}step": torch.tensor(self._step),
            f"{self._prefix}unperturbed": self._unperturbed.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._check_state(state, dict.fromkeys(self.state_dict(), ()), whole=True)
        self._step = int(state[f"{self._prefix}step"])
        self._unperturbed = state[f"{self._prefix}unperturbed"].detach().clone()

    def detach(self) -> None:
        super().detach()
        self._theta = self._model = None


class AdapterSAM(TwoPassRegularizer):
    """LoRA-SAM and ASAM: the second pass is at θ + ε, θ the adapter's factors (and their biases, if they have any).

    θ is restored bit for bit when the step is left. Costs a second forward and backward, a copy of θ and two vectors of
    its size in float32. Works on any mesh; the backbone may be quantised.
    """

    def __init__(self, config: LoraSAM | ASAM) -> None:
        super().__init__(config.kind, config.rho)
        if isinstance(config, ASAM):
            require_nonnegative("eta", config.eta)
        self.config = config

    def attach(self, model: nn.Module, *, seed: int, total_steps: int, placement: Placement | None = None) -> Self:
        self._check_not_attached()
        theta = AdapterParameters(model, placement or SINGLE_PROCESS)
        theta.require_float32("a small step")
        self._attach_theta(theta, model, lora_layers(model), seed)
        return self

    def _perturb(self, stack: ExitStack, loss_scale: float) -> dict[str, Tensor]:
        theta = self._theta
        assert theta is not None
        direction = theta.gradients(loss_scale)
        norm = scaled_norm = theta.squared_norm(direction).sqrt()
        if isinstance(self.config, ASAM):
            eta = self.config.eta
            # a bias is not rescaled, as in the authors' code
            wide = {n: v.to(torch.promote_types(v.dtype, torch.float32)) for n, v in theta.values().items()}
            sizes = {n: torch.ones_like(v) if n.endswith(".bias") else v.abs().add_(eta) for n, v in wide.items()}
            scaled = {name: sizes[name] * g for name, g in direction.items()}
            scaled_norm = theta.squared_norm(scaled).sqrt()
            direction = {name: sizes[name] * g for name, g in scaled.items()}
        factor, usable = self._step_factor(scaled_norm)
        move = {name: torch.where(usable.to(d.device), d * factor.to(d.device), 0.0) for name, d in direction.items()}
        stack.enter_context(theta.moved(move))
        return {"gradient_norm": norm, "perturbation_norm": theta.squared_norm(move).sqrt()}


class _CollectWeightGradient(torch.autograd.Function):
    """Identity on y (..., m); its backward adds ∂L/∂W' = dYᵀX to `total` (m, n), from x (..., n)."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.total = total
        return unsafe_reshape(y, y.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        ctx.total += rows.T @ x.reshape(-1, x.shape[-1]).to(grad.dtype)
        return grad, None, None


def _collect_weight_gradient(total: Tensor, y: Tensor, x: Tensor) -> Tensor:
    collected: Tensor = _CollectWeightGradient.apply(y, x.detach(), total)
    return collected


def _add_perturbation(epsilon: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return y + F.linear(x.to(y.dtype), epsilon.to(y.dtype)).to(y.dtype)


class WeightSAM(TwoPassRegularizer):
    """SAM over the adapted weight matrices: ε = ρ G/|G|, G = ∂L/∂W' of every adapted linear layer, |G| over all.

    The first pass accumulates G = Σ dYᵀX during the layers' own backward, the second adds x εᵀ to their outputs. W0 is
    neither written nor made to require gradients. With LoRA dropout, W' multiplies the undropped input.

    Memory: one dense float32 matrix per adapted layer, 4 bytes for each adapted weight (26 GB for all linear layers of
    a 7 B model: twice its bf16 weights); G is turned into ε in place. Time: in the first pass one more matrix product
    per layer, as full fine-tuning has, in the second two. Every process of `mesh.replicate` holds all of it.
    """

    def __init__(self, config: SAM) -> None:
        super().__init__(config.kind, config.rho)
        self.config = config
        self._layers: list[ForwardSwap] = []
        self._dense: list[Tensor] = []
        """G, later ε, (m, n) of every layer; only during a step."""

    def attach(self, model: nn.Module, *, seed: int, total_steps: int, placement: Placement | None = None) -> Self:
        self._check_not_attached()
        placement = placement or SINGLE_PROCESS
        layers = find_whole_layers(model, placement, "SAM over the weights")
        for layer in layers:
            if is_sharded(layer.site.base.weight):
                raise RegularizerError(
                    f"mesh.dp: SAM over the weights holds a gradient as large as layer {layer.site.name} in every "
                    "process, which sharding is to avoid; take mesh.replicate, or regularizer.kind: lora-sam"
                )
        named = {layer.site.name: layer.site.layer for layer in layers}
        self._attach_theta(AdapterParameters(model, placement), model, named, seed)
        self._layers = layers
        return self

    def _prepare_first_pass(self, stack: ExitStack) -> None:
        stack.callback(self._restore_layers)
        for layer in self._layers:
            site = layer.site
            dtype = accumulation_dtype(site.dtype)
            self._dense.append(torch.zeros(site.rows, site.columns, dtype=dtype, device=site.device))
            layer.add_term(partial(_collect_weight_gradient, self._dense[-1]))

    @torch.no_grad()
    def _perturb(self, stack: ExitStack, loss_scale: float) -> dict[str, Tensor]:
        assert self._theta is not None
        squares = torch.zeros((), dtype=torch.float64, device=self._theta.device)
        for gradient in self._dense:
            self._placement.sum_data(gradient)
            gradient /= self._placement.gradient_scale * loss_scale
            # Row norms first: a float32 sum over a whole large matrix loses digits.
            squares += torch.linalg.vector_norm(gradient, dim=1).double().square().sum().to(squares.device)
        norm = squares.sqrt()
        factor, usable = self._step_factor(norm)
        for layer, gradient in zip(self._layers, self._dense, strict=True):
            gradient *= factor.to(gradient)
            # Not a product with 0: the factor may be infinite or NaN.
            gradient.masked_fill_(~usable.to(gradient.device), 0.0)
            layer.restore()
            layer.add_term(partial(_add_perturbation, gradient))
        return {
            "gradient_norm": self._gradient_norm(loss_scale),
            "weight_gradient_norm": norm,
            "perturbation_norm": torch.where(usable, self._rho, 0.0),
        }

    def _restore_layers(self) -> None:
        for layer in self._layers:
            layer.restore()
        self._dense = []

    def detach(self) -> None:
        self._restore_layers()
        super().detach()
        self._layers = []
