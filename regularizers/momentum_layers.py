"""LoRA-MGPO as its authors' code has it: layer by layer, in the space of the merged weight, and nothing dense.

With M the momentum of the gradient and ḡ the averaged norm of the layer's gradient, of every layer by itself:

    D = s (M_B A + B M_A),   ε = ± ρ D/(|D|_F + e) · min(1/(ḡ + e), clamp),   ḡ averages |s (g_B A + B g_A)|_F

where the sign of the code is −. D = P Q with P = s [M_B, B] (m, 2r) and Q = [A; M_A] (2r, n), so that ε is a frozen
branch of rank 2r on the layer's output (`regularizers.branch`), |D|_F² = Σ (PᵀP) ∘ (QQᵀ), and W0 is never written. The
authors' repository (llm172/LoRA-MGPO, b45656c, `lora_mgpo/trainer.py`) adds a dense D to W0 in place. Two more of its
habits are not followed: ḡ there is taken at every micro-batch from a half-accumulated gradient, and M is what the
optimizer made of *clipped* gradients; here both follow the whole, unclipped gradient of a step.

For DoRA and other variants D is that of sBA and is added to the layer's output. LoRA layers that are not linear
(embeddings) train unperturbed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from regularizers.adapters import Adapters
from regularizers.branch import NoiseBranch
from regularizers.config import MGPO
from regularizers.errors import RegularizerError
from regularizers.layers import LoraSite, find_lora_sites
from regularizers.momentum import MomentumRegularizer

_log = logging.getLogger(__name__)

_TINY = 1e-12
"""e of the formulas; also the |D| under which the authors leave a layer alone."""


class LayerMomentumRegularizer(MomentumRegularizer):
    """See the module's text; made by `regularizers.build(MGPO(form="code"))`."""

    def __init__(self, config: MGPO) -> None:
        super().__init__(config)
        self._clamp = config.clamp
        self._sign = config.sign or -1
        self._branches: list[NoiseBranch] = []
        self._parts: list[tuple[Tensor | slice, ...]] = []
        """Which rows and columns of each layer this process has."""
        self._layers = 0
        """Of the whole model, on whatever stages they are."""

    def _prepare(self, model: nn.Module, adapters: Adapters) -> None:
        sites, others = find_lora_sites(model, self._placement)
        count = torch.tensor([len(sites)], device=adapters.device)
        self._placement.sum_pipeline(count)
        if int(count) == 0:
            raise RegularizerError(
                f"regularizer.form: code perturbs adapted linear layers, and the model has only other LoRA layers "
                f"({others[0]}, ...); use regularizer.form: text"
                if others
                else "regularizer.form: code perturbs adapted linear layers, and the model has none; attach a LoRA "
                "adapter to linear layers first (adapter.targets: all-linear)"
            )
        if others:
            _log.warning("MGPO leaves %d LoRA layers that are not linear alone, e.g. %s", len(others), others[0])
        self._branches = [NoiseBranch(site, 0, 0, torch.float32) for site in sites]
        everything = slice(None)
        self._parts = [
            tuple(
                everything if cut is None else cut.indices().to(site.device) for cut in (site.row_cut, site.column_cut)
            )
            for site in sites
        ]
        self._layers = int(count)

    def _first_average(self, device: torch.device) -> Tensor:
        return torch.zeros(len(self._branches), dtype=torch.float64, device=device)

    def detach(self) -> None:
        for branch in self._branches:
            branch.remove()
        self._branches, self._parts, self._layers = [], [], 0
        super().detach()

    @contextmanager
    def _perturbed(self, adapters: Adapters) -> Iterator[None]:
        try:
            with torch.no_grad():
                self._install(adapters)
            yield
        finally:
            for branch in self._branches:
                branch.remove()

    def _install(self, adapters: Adapters) -> None:
        """Switch ε on in every layer. Without a wait for the device."""
        values, momentum = self._placement.whole(adapters.values()), self._placement.whole(self._momentum)
        products = [_product(branch.site, values, momentum) for branch in self._branches]
        norms = self._stacked([_norm(p, q) for p, q in products])
        factors = torch.where(
            norms > _TINY,
            self._sign * self.config.rho * (1 / (self._average + _TINY)).clamp(max=self._clamp) / (norms + _TINY),
            0.0,
        )
        for branch, (p, q), factor, (rows, columns) in zip(self._branches, products, factors, self._parts, strict=True):
            noise_in = q.T[columns]
            branch.install(noise_in, p[rows] * factor, noise_in[:, :0])
        total = (norms * factors).square().sum()
        self._placement.sum_pipeline(total)
        self._figures["perturbation_norm"] = total.sqrt()

    def _norms(self, adapters: Adapters, gradients: Mapping[str, Tensor], norm: Tensor) -> Tensor:
        """|s (g_B A + B g_A)|_F of every layer, float64 (layers,)."""
        values, gradients = self._placement.whole(adapters.values()), self._placement.whole(gradients)
        return self._stacked([_norm(*_product(branch.site, values, gradients)) for branch in self._branches])

    def _stacked(self, scalars: list[Tensor]) -> Tensor:
        return torch.stack(scalars).to(self._average) if scalars else torch.zeros_like(self._average)

    def _mean_average(self) -> Tensor:
        """Over the layers of all stages."""
        total = self._average.sum()
        self._placement.sum_pipeline(total)
        return total / self._layers

    def perturbations(self) -> dict[str, Tensor]:
        """ε (m, n) of every layer, dense: for tests and instruments, inside a step only."""
        return {
            branch.site.name: branch.noise_out @ branch.noise_in.T
            for branch in self._branches
            if branch.noise_out is not None and branch.noise_in is not None
        }

    def _averages(self) -> dict[str, Tensor]:
        return {
            f"{self._kind}.average.{branch.site.name}": average.clone()
            for branch, average in zip(self._branches, self._average, strict=True)
        }

    def _take_averages(self, state: Mapping[str, Tensor]) -> None:
        self._average = self._stacked([state[name] for name in self._averages()])


def _product(site: LoraSite, values: Mapping[str, Tensor], along: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """P (m, 2r) and Q (2r, n) whose product is the first-order change of sBA when the factors `values` move along
    `along`; both whole, over all active adapters that are trained."""
    left, right = [], []
    for name in site.active():
        a, b = (f"{site.name}.lora_{side}.{name}.weight" for side in "AB")
        if a in values and b in values:
            s = site.layer.scaling[name]
            left += [along[b] * s, values[b] * s]
            right += [values[a], along[a]]
    if not left:  # switched off, or frozen
        return torch.zeros(site.whole_rows, 1, device=site.device), torch.zeros(
            1, site.whole_columns, device=site.device
        )
    return torch.cat(left, 1), torch.cat(right)


def _norm(p: Tensor, q: Tensor) -> Tensor:
    """|PQ|_F, float64 (); the terms of the sum may cancel."""
    p, q = p.double(), q.double()
    return ((p.T @ p) * (q @ q.T)).sum().clamp_min(0).sqrt()
