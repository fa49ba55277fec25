"""GGPO: train the adapter at W' + ε, where ε is gradient-guided noise on the frozen weights.

    ε = diag(σ_i) S_U S_V/√k,   S_U (m, k), S_V (k, n) independent random signs,   Cov ε_ij,ε_kl = δ_ik δ_jl σ_i²

The same covariance as dense Gaussian noise with row scales σ_i, never the same distribution. σ_i² is a sum of the row
norms of W' = W0 + sBA and of the loss gradient G with respect to W' (`flatshift.regularizers.methods.noise_scales`).
The latter come from an unbiased sketch: a second pair of factors is added to the layer, k_p probe columns S_P (k_p, n)
of random signs times U_P (m, k_p), which is zero and stays zero. It changes no output, and its gradient
∂L/∂U_P = G S_Pᵀ gives q_i = |(∂L/∂U_P)_i|²/k_p with the mean |G_i(W'+ε)|². Source: LoRA-GGPO, arXiv 2502.14538 v1 (v2
and later are another method, LoRA-MGPO).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Self, get_args, get_type_hints

import torch
from torch import Tensor, nn

from flatshift.regularizers.config import GGPO, FlatLora, RegularizerError, default_rank
from flatshift.regularizers.layers.frozen import accumulation_dtype
from flatshift.regularizers.layers.fused import NoiseBranch
from flatshift.regularizers.layers.signs import MAX_COLUMNS, SampleCounts, micro_id, step_id
from flatshift.regularizers.layers.sites import check_linear_layers, find_lora_sites
from flatshift.regularizers.mesh import SINGLE_PROCESS, Placement
from flatshift.regularizers.methods.base import AttachedRegularizer, require, require_nonnegative
from flatshift.regularizers.methods.noise_scales import METRIC_SUMS, NoiseScales, scheduled_sigma
from flatshift.regularizers.protocol import MetricTensors


def check_settings(config: GGPO) -> None:
    """Raise RegularizerError for an invalid value, naming the key."""

    def demand(holds: bool, key: str, requirement: str) -> None:
        require(holds, key, getattr(config, key), requirement)

    kinds = get_type_hints(GGPO)
    for key in ("mode", "normalize", "control", "scope", "schedule"):
        known = get_args(kinds[key])
        names = [f"`{name}`" for name in known]
        demand(getattr(config, key) in known, key, f"{', '.join(names[:-1])} or {names[-1]}")

    require_nonnegative("sigma", config.sigma)
    require_nonnegative("beta", config.beta)
    demand(0 <= config.ema < 1, "ema", "a number in [0, 1)")
    demand(config.refresh >= 1, "refresh", "a number of steps ≥ 1")
    require_nonnegative("tolerance", config.tolerance)
    demand(config.rank is None or 1 <= config.rank <= MAX_COLUMNS, "rank", f"null or a number from 1 to {MAX_COLUMNS}")
    minimum = 1 if config.beta > 0 else 0
    reason = " (β > 0 needs the gradient sketch)" if minimum else ""
    demand(minimum <= config.probes <= MAX_COLUMNS, "probes", f"a number from {minimum} to {MAX_COLUMNS}{reason}")
    demand(config.sketch_every >= 1, "sketch_every", "a number of steps ≥ 1")
    if config.mode == "paper" and config.normalize == "model":
        raise RegularizerError(
            "regularizer.normalize: model has no meaning with mode: paper, which takes both norms as they are; use "
            "mode: relative, or normalize: layer"
        )
    if config.control == "shuffled" and config.beta == 0:
        raise RegularizerError(
            "regularizer.control: shuffled shuffles the gradient's share of the noise, and with beta: 0 there is none; "
            "use beta > 0, or control: none"
        )


class GGPORegularizer(AttachedRegularizer):
    """GGPO (see the module docstring); created by `flatshift.regularizers.build(GGPO(...))`. Inert until `attach`."""

    def __init__(self, config: GGPO, name: str = "GGPO") -> None:
        check_settings(config)
        super().__init__(name, "")
        self.config = config
        self._groups: list[NoiseScales] = []
        self._device = torch.device("cpu")
        self._layers = self._rows = self._unperturbed_layers = 0
        """Counts over the whole model, on all ranks."""
        self._total_steps = 0
        self._refreshed = -1
        """Step at which the row norms were last computed; −1: not yet."""
        self._recomputed = 0
        """Number of layers whose row norms the last step computed exactly."""
        self._perturbs = False
        self._model: nn.Module | None = None
        self._batches = SampleCounts()

    def attach(self, model: nn.Module, *, seed: int, total_steps: int, placement: Placement | None = None) -> Self:
        self._check_not_attached()
        if self.config.schedule != "constant" and total_steps < 1:
            raise RegularizerError(
                f"regularizer.schedule: {self.config.schedule} ramps over the optimizer steps, but there are "
                f"{total_steps}; give the number of steps, or use `constant`"
            )
        if self.config.scope != "step" and placement is not None and placement.pipelined:
            raise RegularizerError(
                f"regularizer.scope: {self.config.scope} draws for every micro-batch, and a pipeline has several in "
                "flight at once; use scope: step, or mesh.pp: 1"
            )
        placement = placement or SINGLE_PROCESS
        sites, others = find_lora_sites(model, placement)
        probes = self.config.probes if self.config.beta > 0 else 0
        branches: dict[tuple[torch.device, torch.dtype], list[NoiseBranch]] = {}
        for site in sites:
            rank = self.config.rank or default_rank(site.whole_rows, site.whole_columns)
            branch = NoiseBranch(site, rank, probes, accumulation_dtype(site.dtype))
            branches.setdefault((site.device, site.dtype), []).append(branch)
        groups = [NoiseScales(group, self.config, self._batches, placement) for group in branches.values()]
        self._device = groups[0].device if groups else placement.device
        # A pipeline stage may have no adapter, and its rows may be sharded; only the counts of the whole model matter.
        counts = torch.tensor([len(sites), sum(site.whole_rows for site in sites), len(others)], device=self._device)
        placement.sum_pipeline(counts)
        self._layers, self._rows, self._unperturbed_layers = counts.tolist()
        check_linear_layers(self._layers, others, self._name, "perturbs")
        self._finish_attach({site.name: site.layer for site in sites}, seed, placement)
        self._groups, self._model, self._total_steps, self._refreshed = groups, model, total_steps, -1
        return self

    @contextmanager
    def step(self, t: int, *, loss_scale: float = 1.0) -> Iterator[Iterable[int]]:
        with self._in_step(t):
            self._recomputed = 0
            sigma = scheduled_sigma(self.config.sigma, self.config.schedule, t, self._total_steps)
            if sigma == 0:  # not a branch of zeros: exactly the operations of plain LoRA
                for group in self._groups:
                    group.clear_metrics()
                yield range(1)
                return
            sketches = self.config.beta > 0 and t % self.config.sketch_every == 0
            assert self._model is not None
            self._perturbs = True
            try:
                self._perturb(t, sigma, sketches=sketches)
                with self._batches.watching(self._model) if self.config.scope == "sample" else nullcontext():
                    yield range(1)
                if sketches:
                    self._average_sketches(loss_scale)
            finally:
                self._remove_noise()

    def _remove_noise(self) -> None:
        for group in self._groups:
            group.restore()
        self._perturbs = False

    def on_micro_batch(self, index: int) -> None:
        if not self._perturbs or self.config.scope == "step":
            return
        self._batches.forget()
        for group in self._groups:
            group.set_micro_batch(micro_id(self._seed, self._step, index))

    @torch.no_grad()
    def _perturb(self, t: int, sigma: float, *, sketches: bool) -> None:
        """Refresh the row norms if due, share the noise power among the rows, and install the noise."""
        # Also if t is before the last refresh, as for a repeated step.
        if self._refreshed < 0 or not 0 <= t - self._refreshed < self.config.refresh:
            self._recomputed = sum(group.refresh_norms() for group in self._groups)
            self._refreshed = t
        step = step_id(self._seed, t)
        for group in self._groups:
            group.update_gradient_share(step)
        totals = None
        if self.config.normalize == "model":
            totals = torch.zeros(2, dtype=torch.float64, device=self._device)
            for group in self._groups:
                totals += group.totals().to(totals)
            self._placement.sum_pipeline(totals)
        for group in self._groups:
            group.scale(sigma, totals)
            group.install(step, sketches=sketches)

    @torch.no_grad()
    def _average_sketches(self, loss_scale: float) -> None:
        """Average this step's sketches in, unless one of them, on any rank, is not finite. Does not wait for the
        device."""
        sketches = [group.sketch(loss_scale) for group in self._groups]
        broken = torch.zeros((), device=self._device)
        for q, _ in sketches:
            broken += (~q.isfinite().all()).to(broken)
        self._placement.sum_tensor(broken)
        self._placement.sum_pipeline(broken)
        for group, (q, took_part) in zip(self._groups, sketches, strict=True):
            group.average_sketch(q, took_part, (broken == 0).to(group.device))

    def metric_tensors(self) -> MetricTensors:
        """Return the metrics of the last step.

        `sigma` (scheduled), `row_sigma_mean`, `gradient_share` (the gradient's part of the noise power), `guidance`
        (how much power the gradient moved between rows, 0 to 1: mean over layers, or with `normalize: model` of the
        whole model), layer counts, `norms_refreshed` (layers whose row norms were recomputed from W0), `sketches`
        averaged and `sketches_skipped` because they were not finite (means over layers).
        """
        sums = torch.zeros(len(METRIC_SUMS) + 1, dtype=torch.float64, device=self._device)
        for group in self._groups:
            sums[:-1] += group.metric_sums().to(sums)
        sums[-1] += self._recomputed
        self._placement.sum_pipeline(sums)
        sigma = scheduled_sigma(self.config.sigma, self.config.schedule, self._step, self._total_steps)
        rows, layers, unperturbed = max(self._rows, 1), self._layers, self._unperturbed_layers
        balanced = 1 if self.config.normalize == "model" else max(layers, 1)

        def named(numbers: Sequence[float]) -> dict[str, float]:
            power, gradient_power, sigma_sum, moved, sketches, skipped, recomputed = numbers
            return {
                "sigma": sigma,
                "row_sigma_mean": sigma_sum / rows,
                "gradient_share": gradient_power / power if power else 0.0,
                "guidance": moved / balanced,
                "perturbed_layers": float(layers),
                "layers_left_alone": float(unperturbed),
                "norms_refreshed": float(recomputed),
                "sketches": sketches / max(layers, 1),
                "sketches_skipped": skipped / max(layers, 1),
            }

        return MetricTensors(sums, named)

    def state_dict(self) -> dict[str, Tensor]:
        counters = {"seed": self._seed, "step": self._step, "refreshed": self._refreshed}
        state = {name: torch.tensor(value, dtype=torch.int64) for name, value in counters.items()}
        for group in self._groups:
            state |= group.state()
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        expected: dict[str, tuple[int, ...]] = {"seed": (), "step": (), "refreshed": ()}
        for group in self._groups:
            expected |= group.shapes()
        self._check_state(state, expected)
        self._step, self._refreshed = int(state["step"]), int(state["refreshed"])
        for group in self._groups:
            group.load(state)

    def detach(self) -> None:
        self._remove_noise()
        super().detach()
        self._groups, self._model, self._layers, self._rows, self._unperturbed_layers = [], None, 0, 0, 0


def flat_lora(config: FlatLora) -> GGPORegularizer:
    """Build Flat-LoRA (arXiv 2409.14396): GGPO whose noise power follows the weights' row norms alone (β = 0)."""
    same = {key: getattr(config, key) for key in ("sigma", "rank", "schedule", "refresh")}
    return GGPORegularizer(GGPO(beta=0.0, probes=0, **same), "Flat-LoRA")
