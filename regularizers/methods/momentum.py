"""LoRA-MGPO and Momentum-SAM: gradients are taken one step away from the adapter, along the momentum, in one pass.

θ is the vector of all trained LoRA factors, m the momentum of its gradient g, ḡ the averaged norm of g:

    MGPO   ε_t = ± ρ m_{t−1}/|m_{t−1}| · 1/ḡ_{t−1},   m_t = μ m_{t−1} + g_t,   ḡ_t = β ḡ_{t−1} + (1−β)|g_t|
    MSAM   ε_t = ± ρ m_{t−1}/|m_{t−1}|,               m_t = μ m_{t−1} + g_t

and ḡ_1 = |g_1|. g_t = ∂L/∂θ at θ_t + ε_t; m_0 = 0, so the first step is unperturbed. Only the direction of m counts,
and it is that of Adam's averaged gradient. The optimizer updates θ_t itself. One global norm and one global scalar over
all layers. g is the whole gradient of an optimizer step: after accumulation and the sums over a mesh, divided by the
loss scale, before clipping. A gradient that is zero or not finite is not averaged in.

Sources: LoRA-MGPO, EMNLP Findings 2025 #34 (arXiv 2502.14538 v3), Eqs 2–6, where the sign is +; its authors' code is
another method (`LayerMomentumRegularizer`). Momentum-SAM, Becker, Altrock & Risse, arXiv 2401.12033: its code moves
down along Adam's averaged gradient and keeps the weights moved between steps; here they are moved inside a step only.

In its authors' code, LoRA-MGPO works layer by layer, in the space of the merged weight; here nothing of it is dense.
With M the momentum of the gradient and ḡ the averaged norm of the layer's gradient, separately for every layer:

    D = s (M_B A + B M_A),   ε = ± ρ D/(|D|_F + e) · min(1/(ḡ + e), clamp),   ḡ averages |s (g_B A + B g_A)|_F

where the sign of the code is −. D = P Q with P = s [M_B, B] (m, 2r) and Q = [A; M_A] (2r, n), so that ε is a frozen
branch of rank 2r on the layer's output (`flatshift.regularizers.layers.fused`), |D|_F² = Σ (PᵀP) ∘ (QQᵀ), and W0 is
never written. The authors' repository (llm172/LoRA-MGPO, b45656c, `lora_mgpo/trainer.py`) adds a dense D to W0 in
place. Two more of its habits are not followed: ḡ there is computed at every micro-batch from a half-accumulated
gradient, and M from the optimizer's state after *clipping*; here both follow the whole, unclipped gradient of a step.
For DoRA and other variants D is that of sBA and is added to the layer's output. LoRA layers that are not linear
(embeddings) train unperturbed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Self

import torch
from torch import Tensor, nn

from flatshift.regularizers.config import MGPO, MSAM
from flatshift.regularizers.layers.adapters import AdapterParameters
from flatshift.regularizers.layers.fused import NoiseBranch
from flatshift.regularizers.layers.sites import LoraSite, check_linear_layers, find_lora_sites, whole_factor
from flatshift.regularizers.mesh import SINGLE_PROCESS, Placement
from flatshift.regularizers.methods.base import AttachedRegularizer, lora_layers, require, require_nonnegative
from flatshift.regularizers.protocol import MetricTensors


def mgpo(config: MGPO) -> MomentumRegularizer:
    """Build the regularizer of `config.form`."""
    return (LayerMomentumRegularizer if config.form == "code" else MomentumRegularizer)(config)


def check_settings(config: MGPO | MSAM) -> None:
    """Raise RegularizerError for an invalid value, naming the key."""
    require_nonnegative("rho", config.rho)
    require(0 <= config.momentum < 1, "momentum", config.momentum, "a number in [0, 1)")
    if isinstance(config, MGPO):
        require(0 <= config.ema < 1, "ema", config.ema, "a number in [0, 1)")
        require(config.form in ("text", "code"), "form", config.form, "`text` or `code`")
        require(config.sign in (None, 1, -1), "sign", config.sign, "1, -1 or null")
        require(config.clamp > 0, "clamp", config.clamp, "a number > 0")
        used = config.form == "code" or config.clamp == MGPO.clamp
        require(used, "clamp", config.clamp, f"used by form: text; leave it at {MGPO.clamp:g}, or set form: code")
    else:
        require(config.sign in (1, -1), "sign", config.sign, "1 or -1")


class MomentumRegularizer(AttachedRegularizer):
    """MGPO or Momentum-SAM (see the module docstring); created by `flatshift.regularizers.build(MGPO(...))` or
    `build(MSAM(...))`. Inert until `attach`."""

    def __init__(self, config: MGPO | MSAM) -> None:
        check_settings(config)
        super().__init__(config.kind, f"{config.kind}.")
        self.config = config
        self._sign = config.sign or 1
        self._adapters: AdapterParameters | None = None
        self._has_momentum = False
        """False until the first step is averaged in, so that there is no direction yet; known without asking the
        device."""
        self._momentum: dict[str, Tensor] = {}
        """m by parameter, with θ's layout on this process."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._average = self._updates = self._skipped = torch.zeros(())
        """ḡ of each norm (`_average_names`); number of steps averaged into m; number of steps skipped because of a
        non-finite gradient."""
        self._figures: dict[str, Tensor] = {}

    def attach(self, model: nn.Module, *, seed: int, total_steps: int, placement: Placement | None = None) -> Self:
        self._check_not_attached()
        placement = placement or SINGLE_PROCESS
        adapters = AdapterParameters(model, placement)
        self._find_layers(model, adapters, placement)
        momentum = adapters.zeros()
        self._finish_attach(lora_layers(model), seed, placement)
        self._shapes = {name: tuple(whole.shape) for name, whole in placement.full_tensors(momentum).items()}
        self._adapters, self._momentum, self._has_momentum, self._figures = adapters, momentum, False, {}
        self._updates = torch.zeros((), dtype=torch.int64, device=adapters.device)
        self._skipped = torch.zeros_like(self._updates)
        self._average = torch.zeros(len(self._average_names), dtype=torch.float64, device=adapters.device)
        return self

    def _find_layers(self, model: nn.Module, adapters: AdapterParameters, placement: Placement) -> None:
        """Read from the model what a form needs in addition to θ, or raise RegularizerError if θ does not do."""
        adapters.require_float32("a small step")

    def detach(self) -> None:
        super().detach()
        self._adapters, self._momentum, self._shapes, self._figures = None, {}, {}, {}

    @contextmanager
    def step(self, t: int, *, loss_scale: float = 1.0) -> Iterator[Iterable[int]]:
        with self._in_step(t):
            assert self._adapters is not None
            self._figures["perturbation_norm"] = torch.zeros_like(self._updates)
            perturbs = self._has_momentum and self.config.rho != 0
            with self._perturbed(self._adapters) if perturbs else nullcontext():
                yield range(1)
            self._average_gradients(self._adapters, loss_scale)

    def _perturbed(self, adapters: AdapterParameters) -> AbstractContextManager[None]:
        """Return a context in which θ is θ + ε. Does not wait for the device."""
        with torch.no_grad():
            norm = adapters.squared_norm(self._momentum).sqrt()
            divisor = norm * self._average[0] if isinstance(self.config, MGPO) else norm
            # Without momentum or gradient norm there is no direction, hence no perturbation.
            factor = torch.where(divisor > 0, self._sign * self.config.rho / divisor, 0.0)
            self._figures["perturbation_norm"] = norm * factor.abs()
        return adapters.moved(self._momentum, factor)

    @torch.no_grad()
    def _average_gradients(self, adapters: AdapterParameters, loss_scale: float) -> None:
        """Average the step's gradient into m and ḡ, on every rank or on none. Does not wait for the device."""
        gradients = adapters.gradients(loss_scale)
        norm = adapters.squared_norm(gradients).sqrt()
        usable = norm.isfinite() & (norm > 0)
        if isinstance(self.config, MGPO):
            norms = self._norms(adapters, gradients, norm)
            averaged = self.config.ema * self._average + (1 - self.config.ema) * norms
            averaged = torch.where(self._updates == 0, norms, averaged)
            self._average = torch.where(usable, averaged, self._average)
        momenta = [self._momentum[name] for name in gradients]
        sums = torch._foreach_add(list(gradients.values()), momenta, alpha=self.config.momentum) if momenta else []
        for momentum, updated in zip(momenta, sums, strict=True):
            torch.where(usable, updated, momentum, out=momentum)
        self._updates = self._updates + usable
        self._skipped = self._skipped + ~norm.isfinite()
        self._has_momentum = True
        self._figures["gradient_norm"] = norm

    def _norms(self, adapters: AdapterParameters, gradients: Mapping[str, Tensor], norm: Tensor) -> Tensor:
        """Return the norms that ḡ averages: |g| over θ, float64 (1,)."""
        return norm[None]

    def metric_tensors(self) -> MetricTensors:
        """Return the metrics of the last step.

        `perturbation_norm` |ε|, `momentum_norm` |m| after it, `gradient_norm` |g| (unclipped), `gradient_norm_average`
        ḡ (MGPO), `momentum_updates`, and `momentum_skipped`: steps with a non-finite gradient.
        """
        if self._adapters is None or not self._figures:
            return MetricTensors(torch.zeros(0), lambda numbers: {})
        figures = self._figures | {
            "momentum_norm": self._adapters.squared_norm(self._momentum).sqrt(),
            "momentum_updates": self._updates,
            "momentum_skipped": self._skipped,
        }
        if isinstance(self.config, MGPO):
            figures["gradient_norm_average"] = self._mean_average()
        values = torch.stack([each.double() for each in figures.values()])
        return MetricTensors(values, lambda numbers: dict(zip(figures, numbers, strict=True)))

    def _mean_average(self) -> Tensor:
        return self._average[0]

    @property
    def _average_names(self) -> list[str]:
        """Names of ḡ in the state, scalars in order."""
        return [f"{self._prefix}average"] if isinstance(self.config, MGPO) else []

    def state_dict(self) -> dict[str, Tensor]:
        whole = self._placement.full_tensors(self._momentum)
        counters = {"updates": self._updates, "skipped": self._skipped}
        scalars = {"seed": torch.tensor(self._seed), "step": torch.tensor(self._step), **counters}
        return {
            **{f"{self._prefix}{name}": value.clone() for name, value in scalars.items()},
            **{name: value.clone() for name, value in zip(self._average_names, self._average, strict=True)},
            **{f"{self._prefix}momentum.{name}": tensor.clone() for name, tensor in whole.items()},
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        prefix = self._prefix
        scalars = [*(f"{prefix}{name}" for name in ("seed", "step", "updates", "skipped")), *self._average_names]
        expected: dict[str, tuple[int, ...]] = dict.fromkeys(scalars, ())
        self._check_state(state, expected | {f"{prefix}momentum.{name}": shape for name, shape in self._shapes.items()})
        self._placement.copy_local_parts(
            {name: state[f"{prefix}momentum.{name}"] for name in self._shapes}, self._momentum
        )
        if self._average_names:
            self._average = torch.stack([state[name] for name in self._average_names]).to(self._average)
        self._step = int(state[f"{prefix}step"])
        self._updates = state[f"{prefix}updates"].to(self._updates, copy=True)
        self._skipped = state[f"{prefix}skipped"].to(self._skipped, copy=True)
        self._has_momentum = int(self._updates) > 0


_TINY = 1e-12
"""e of the formulas; the authors also skip a layer if its |D| is below it."""


class LayerMomentumRegularizer(MomentumRegularizer):
    """LoRA-MGPO layer by layer (see the module docstring); created by
    `flatshift.regularizers.build(MGPO(form="code"))`."""

    def __init__(self, config: MGPO) -> None:
        super().__init__(config)
        self._clamp = config.clamp
        self._sign = config.sign or -1
        self._branches: list[NoiseBranch] = []
        self._local: list[tuple[Tensor | slice, ...]] = []
        """This process's rows and columns of each layer."""
        self._layers = 0
        """Number of layers in the whole model, over all pipeline stages."""

    def _find_layers(self, model: nn.Module, adapters: AdapterParameters, placement: Placement) -> None:
        sites, others = find_lora_sites(model, placement)
        count = torch.tensor([len(sites)], device=adapters.device)
        placement.sum_pipeline(count)
        check_linear_layers(int(count), others, "regularizer.form: code", "perturbs", "; or use regularizer.form: text")
        self._branches = [NoiseBranch(site, 0, 0, torch.float32) for site in sites]
        everything = slice(None)
        self._local = [
            tuple(
                everything if cut is None else cut.indices().to(site.device) for cut in (site.row_cut, site.column_cut)
            )
            for site in sites
        ]
        self._layers = int(count)

    def detach(self) -> None:
        self._remove_branches()
        self._branches, self._local, self._layers = [], [], 0
        super().detach()

    def _remove_branches(self) -> None:
        for branch in self._branches:
            branch.remove()

    @contextmanager
    def _perturbed(self, adapters: AdapterParameters) -> Iterator[None]:
        try:
            with torch.no_grad():
                self._install(adapters)
            yield
        finally:
            self._remove_branches()

    def _install(self, adapters: AdapterParameters) -> None:
        products = self._update_products(adapters, self._momentum)
        norms = self._product_norms(products)
        factors = torch.where(
            norms > _TINY,
            self._sign * self.config.rho * (1 / (self._average + _TINY)).clamp(max=self._clamp) / (norms + _TINY),
            0.0,
        )
        for branch, (p, q), factor, (rows, columns) in zip(self._branches, products, factors, self._local, strict=True):
            noise_in = q.T[columns]
            branch.install(noise_in, p[rows] * factor, noise_in[:, :0])
        total = (norms * factors).square().sum()
        self._placement.sum_pipeline(total)
        self._figures["perturbation_norm"] = total.sqrt()

    def _update_products(
        self, adapters: AdapterParameters, direction: Mapping[str, Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        values, direction = self._placement.full_tensors(adapters.values()), self._placement.full_tensors(direction)
        return [_update_factors(branch.site, values, direction) for branch in self._branches]

    def _product_norms(self, products: list[tuple[Tensor, Tensor]]) -> Tensor:
        norms = [_product_norm(p, q) for p, q in products]
        return torch.stack(norms).to(self._average) if norms else torch.zeros_like(self._average)

    def _norms(self, adapters: AdapterParameters, gradients: Mapping[str, Tensor], norm: Tensor) -> Tensor:
        """Return |s (g_B A + B g_A)|_F of every layer, float64 (layers,)."""
        return self._product_norms(self._update_products(adapters, gradients))

    def _mean_average(self) -> Tensor:
        """Return the mean of ḡ over the layers of all stages."""
        total = self._average.sum()
        self._placement.sum_pipeline(total)
        return total / self._layers

    @property
    def _average_names(self) -> list[str]:
        return [f"{self._prefix}average.{branch.site.name}" for branch in self._branches]


def _update_factors(
    site: LoraSite, values: Mapping[str, Tensor], direction: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return P (m, 2r) and Q (2r, n) whose product is the first-order change of sBA when the factors `values` move in
    `direction`; both in full, over all active adapters that are trained."""
    left, right = [], []
    for name in site.active():
        a, b = (f"{site.name}.lora_{side}.{name}.weight" for side in "AB")
        if a in values and b in values:
            s, layer = site.layer.scaling[name], site.layer
            left += [whole_factor(layer.lora_B[name], each[b]) * s for each in (direction, values)]
            right += [whole_factor(layer.lora_A[name], each[a]) for each in (values, direction)]
    if not left:  # adapters disabled or frozen
        p = torch.zeros(site.whole_rows, 1, device=site.device)
        return p, torch.zeros(1, site.whole_columns, device=site.device)
    return torch.cat(left, 1), torch.cat(right)


def _product_norm(p: Tensor, q: Tensor) -> Tensor:
    """Return |PQ|_F, float64 (); clamped at 0, as the terms of the sum may cancel."""
    p, q = p.double(), q.double()
    return ((p.T @ p) * (q @ q.T)).sum().clamp_min(0).sqrt()
