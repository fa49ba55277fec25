"""Distribution of GGPO's noise power over the rows of many layers, and their noise and sketches, in a few operations.

`NoiseScales` holds the layers of one device and weight dtype. Rows of all its layers are concatenated, and so are
columns; per-layer factors are views. A model with hundreds of layers costs the same handful of calls as one with six,
and as few collectives on a mesh, whose processes may each have a part of the rows (`SiteRows`).

Under tensor parallelism a layer's rows may be sharded (column-parallel: each rank has some that no other has) or its
columns (row-parallel: every rank has all rows, and sums along a row are also sums over the ranks). All layers share one
collective. In a single process nothing is communicated.

Sources: LoRA-GGPO (arXiv 2502.14538 v1) for the sum of weight and gradient norms, Flat-LoRA (arXiv 2409.14396) for
σ²/n·|W'_i|² and the ramp; the `relative` scalings of β are our own readings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from flatshift.regularizers.config import GGPO
from flatshift.regularizers.layers.fused import NoiseBranch
from flatshift.regularizers.layers.sharded import ParameterShard, gather_parameters
from flatshift.regularizers.layers.signs import SampleCounts, SampleSigns, SignStreams, stream_id, unpack_signs
from flatshift.regularizers.layers.sites import LoraSite
from flatshift.regularizers.mesh import SINGLE_PROCESS, Placement, ShardSlice

Mode = Literal["relative", "relative-product", "paper"]
Schedule = Literal["constant", "linear", "cosine"]


def scheduled_sigma(sigma: float, schedule: Schedule, step: int, total_steps: int) -> float:
    """Return σ of optimizer step `step` (from 0) of `total_steps`: constant, or a ramp from 0 to σ."""
    if schedule == "constant":
        return sigma
    done = min(1.0, step / total_steps)
    return sigma * (done if schedule == "linear" else 0.5 * (1 - math.cos(math.pi * done)))


# Below, vectors (rows,) have the rows of all layers one after another.


def layer_means(values: Tensor, sizes: list[int]) -> Tensor:
    """Return the mean of each layer's rows, (layers,), of `values` ≥ 0: sums as 1-norms, which CUDA takes of all layers
    in a few launches."""
    sums = torch._foreach_norm(values.split(sizes), 1)
    return torch.stack(torch._foreach_div(sums, [float(size) for size in sizes]))


def debias_ema(ema: Tensor, updates: Tensor, decay: float) -> Tensor:
    """Return v = EMA / (1 − b^t) per row, zero before the first estimate (`updates` is t per row)."""
    weight = 1 - decay ** updates.to(ema.dtype)
    return torch.where(updates > 0, ema / weight.clamp_min(torch.finfo(ema.dtype).tiny), torch.zeros_like(ema))


def unscaled_gradient_share(norms: Tensor, v: Tensor, mode: Mode) -> Tensor:
    """Return the unscaled gradient part of each row's power, (rows,): v_i, or |W'_i|² v_i for the product."""
    return norms * v if mode == "relative-product" else v


def gradient_share_scale(norms: Tensor, shares: Tensor) -> Tensor:
    """Return the factor that scales `unscaled_gradient_share` to the size of |W'|², from the sums (or means) of both
    over the same rows; zero while no gradient is known, or where the average of an earlier one has faded away."""
    known = shares > 1e-30 * norms
    return torch.where(known, norms / torch.where(known, shares, torch.ones_like(shares)), 0.0)


def power_shares(norms: Tensor, share: Tensor, scale: Tensor, *, beta: float, mode: Mode) -> tuple[Tensor, Tensor]:
    """Return n·σ_i²/σ² of every row, and its part that comes from the gradient; both (rows,).

    norms: |W'_i|²; share: `unscaled_gradient_share`; scale: `gradient_share_scale` over the row's layer, or over the
    whole model.

        relative: (|W'_i|² + β v_i·Σ|W'|²/Σv)/(1+β).
        relative-product: |W'_i|² (1 + β v_i·Σ|W'|²/Σ|W'|²v)/(1+β).
        paper: |W'_i|² + β v_i; scale is not used.

    For the first two, the sum over the rows that `scale` was computed over does not depend on β. While no gradient is
    known they share the power by the weights alone: |W'_i|², the same sum.
    """
    if mode == "paper":
        gradient = beta * share
        return norms + gradient, gradient
    gradient = beta / (1 + beta) * scale * share
    return torch.where(scale > 0, norms / (1 + beta) + gradient, norms), gradient


class SiteRows:
    """The rows of `sites`, one layer after another; a vector over them has shape (rows,)."""

    def __init__(self, sites: Sequence[LoraSite], placement: Placement, device: torch.device) -> None:
        self._sites, self._placement, self._device = sites, placement, device
        self.sizes = [site.rows for site in sites]
        self._indices_of: dict[tuple[bool, ...], Tensor] = {}
        self.layer = self._spread(range(len(sites)), self.sizes)
        """Layer index of each row, (rows,)."""
        self.whole_sizes = torch.tensor([site.whole_rows for site in sites], device=device)
        """Rows of each layer on all tensor-parallel ranks, (layers,)."""
        cut = [site.row_cut is not None for site in sites]
        self._cut_layers = torch.tensor(cut, device=device).nonzero()[:, 0] if any(cut) else None
        if any(cut):
            row_is_cut = torch.tensor(cut, device=device)[self.layer]
            self._cut_sizes = torch.tensor(self.sizes, device=device)[self._cut_layers]
            self._cut_rows, self._other_rows = row_is_cut.nonzero()[:, 0], (~row_is_cut).nonzero()[:, 0]
            self._cut_in_whole = self._spread(cut, [site.whole_rows for site in sites]).nonzero()[:, 0]
            starts = [0, *self.whole_sizes.cumsum(0).tolist()]
            indices = [
                start + global_indices(site.row_cut, site.rows) for start, site in zip(starts, sites, strict=False)
            ]
            self._position_in_whole = torch.cat(indices).to(device)
        self._column_cut = self._rows_of([site.column_cut is not None for site in sites])

    def means(self, *values: Tensor) -> list[Tensor]:
        """Return the mean of each layer's rows on all ranks, (layers,), for each of `values` (rows,)."""
        means = [layer_means(each, self.sizes) for each in values]
        if self._cut_layers is not None:
            cut = self._cut_layers
            sums = torch.stack([mean[cut] * self._cut_sizes for mean in means])
            self._placement.sum_tensor(sums)
            for mean, total in zip(means, sums, strict=True):
                mean[cut] = total / self.whole_sizes[cut]
        return means

    def totals(self, *values: Tensor) -> Tensor:
        """Return the sum over all rows on all ranks, (len(values),), of each of `values` (rows,)."""
        if self._cut_layers is None:
            return torch.stack([each.sum() for each in values])
        sums = torch.stack([each[self._cut_rows].sum() for each in values])
        self._placement.sum_tensor(sums)
        return sums + torch.stack([each[self._other_rows].sum() for each in values])

    def sum_columns(self, values: Tensor) -> None:
        """Sum `values` (rows, ...) in place over the ranks that have the other columns of a row."""
        if self._column_cut is not None:
            part = values[self._column_cut]
            self._placement.sum_tensor(part)
            values[self._column_cut] = part

    def sum_parts(self, values: Tensor) -> None:
        """Sum `values` (rows,) in place over all processes that hold other parts of the same rows: the other columns,
        or another FSDP2 shard."""
        import torch.distributed as dist

        groups: dict[Any, list[bool]] = {}
        for index, site in enumerate(self._sites):
            group = ParameterShard.of(site.base.weight).group
            if group is not None:
                groups.setdefault(group, [False] * len(self._sites))[index] = True
        for group, members in groups.items():
            rows = self._rows_of(members)
            part = values[rows]
            dist.all_reduce(part, group=group)
            values[rows] = part
        self.sum_columns(values)

    def whole(self, *values: Tensor) -> list[Sequence[Tensor]]:
        """Return each of `values` (rows,) as one vector over all rows of each layer, on every tensor-parallel rank."""
        if self._cut_layers is None:
            return [each.split(self.sizes) for each in values]
        lengths = [site.whole_rows for site in self._sites]
        wholes = torch.zeros(len(values), sum(lengths), dtype=values[0].dtype, device=self._device)
        wholes[:, self._position_in_whole] = torch.stack(values)
        part = wholes[:, self._cut_in_whole]
        self._placement.sum_tensor(part)
        wholes[:, self._cut_in_whole] = part
        return [each.split(lengths) for each in wholes]

    def local(self, wholes: Sequence[Tensor]) -> Tensor:
        """Return this process's rows (rows,) of one vector: the reverse of `whole`."""
        values = torch.cat(list(wholes))
        return values if self._cut_layers is None else values[self._position_in_whole]

    def _spread(self, values: Sequence[Any], counts: list[int]) -> Tensor:
        return torch.repeat_interleave(torch.tensor(values), torch.tensor(counts)).to(self._device)

    def _rows_of(self, layers: list[bool]) -> Tensor | None:
        """Return the indices of the rows of the chosen layers, computed on the host once; None if no layer is
        chosen."""
        if not any(layers):
            return None
        key = tuple(layers)
        if key not in self._indices_of:
            chosen = torch.repeat_interleave(torch.tensor(layers), torch.tensor(self.sizes))
            self._indices_of[key] = chosen.nonzero()[:, 0].to(self._device)
        return self._indices_of[key]


def global_indices(cut: ShardSlice | None, length: int) -> Tensor:
    """Return the global indices of this process's rows or columns of a layer, int64 (length,)."""
    return torch.arange(length) if cut is None else cut.indices()


_PROBE = 2.0**-10
"""Size of the entries of S_P: as small as those of A, so that in fp16 a sketch overflows no earlier than B's gradient.
A power of two changes no other bit."""
METRIC_SUMS = ("power", "gradient_power", "sigma_sum", "moved", "sketches", "skipped")


class NoiseScales:
    """Row scales, noise factors and gradient sketches of `branches`."""

    def __init__(
        self, branches: list[NoiseBranch], config: GGPO, batches: SampleCounts, placement: Placement = SINGLE_PROCESS
    ) -> None:
        self.branches, self.config, self._placement = branches, config, placement
        sites = [branch.site for branch in branches]
        names = [site.name for site in sites]
        self._probes = config.probes if config.beta > 0 else 0
        self.device, dtype = branches[0].probe.device, branches[0].probe.dtype
        self.rows = SiteRows(sites, placement, self.device)
        self._widths = [site.columns for site in sites]
        self._factor_dtype = sites[0].dtype
        device = self.device
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        # factor from σ_i² n/σ² to an entry of U: 1/√(n k)
        entries = [(s.whole_columns * b.rank) ** -0.5 for s, b in zip(sites, branches, strict=True)]
        self._unit = torch.tensor(entries, **options)
        self._layer_widths = torch.tensor([site.whole_columns for site in sites], device=device)
        self._root_rank = torch.tensor([b.rank**0.5 for b in branches], **options)
        self._rank = max(branch.rank for branch in branches)

        out = [global_indices(site.row_cut, site.rows) for site in sites]
        into = [global_indices(site.column_cut, site.columns) for site in sites]
        streams = [stream_id(name, side) for side in ("out", "in") for name in names]  # type: ignore[arg-type]
        self._noise = SignStreams(streams, [*out, *into], device)
        self._probe_in = SignStreams([stream_id(name, "probe") for name in names], into, device)
        if config.control == "shuffled":
            whole = [torch.arange(site.whole_rows) for site in sites]
            self._shuffle = SignStreams([stream_id(name, "shuffle") for name in names], whole, device)
            self._whole_layer = torch.repeat_interleave(self.rows.whole_sizes)
        self._samples: SampleSigns | None = None
        if config.scope == "sample":
            ranks = [branch.rank for branch in branches]
            self._samples = SampleSigns(names, ranks, batches, placement.share, device, self._factor_dtype)
            for layer, branch in enumerate(branches):
                branch.signs = self._samples.of_layer(layer)

        rows = sum(self.rows.sizes)
        self.norms = torch.zeros(rows, **options)
        self.ema = torch.zeros(rows, **options)
        self.updates = torch.zeros(len(branches), device=device, dtype=torch.int64)
        self.skipped = torch.zeros_like(self.updates)
        self._gradient_share = self.ema
        self._entry: Tensor | None = None
        self._factors: list[tuple[Tensor, Tensor]] = []
        self._model_sums: Tensor | None = None
        self._power: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def refresh_norms(self) -> int:
        """Recompute |W'_i|² of all rows from the current weights, or use |w0_i|² in layers where the bound allows it.
        Returns the number of layers that computed the product with W0. Collective on a mesh."""
        factors = [branch.site.factors() for branch in self.branches]
        flat = iter(gather_parameters([factor for layer in factors for factor in layer]))
        whole = [[next(flat) for _ in layer] for layer in factors]
        base, exact = self._beyond_tolerance(whole) if self.config.tolerance > 0 else (None, [True] * len(whole))
        parts = [
            branch.site.squared_norms(layer).to(self.norms.dtype) if needed else self.norms.new_zeros(branch.site.rows)
            for branch, layer, needed in zip(self.branches, whole, exact, strict=True)
        ]
        norms = torch.cat(parts)
        self.rows.sum_parts(norms)
        if base is not None:
            needed = torch.tensor(exact).to(self.device, non_blocking=True)
            norms = torch.where(needed[self.rows.layer], norms, base)
        self.norms = norms
        return sum(exact)

    def _beyond_tolerance(self, factors: Sequence[Sequence[Tensor]]) -> tuple[Tensor, list[bool]]:
        """Return |w0_i|² of all rows, and the layers in which the bound | |w'_i| − |w0_i| | ≤ |s b_i A| exceeds the
        tolerance for some row: the same answer on all ranks that have a part of the layer."""
        bounds = [branch.site.bound(layer) for branch, layer in zip(self.branches, factors, strict=True)]
        base, update = (torch.cat(parts).to(self.norms.dtype) for parts in zip(*bounds, strict=True))
        self.rows.sum_parts(base)
        self.rows.sum_parts(update)
        beyond = (update > self.config.tolerance**2 * base).to(base)
        return base, (self.rows.means(beyond)[0] > 0).tolist()

    def clear_metrics(self) -> None:
        """Mark a step without noise."""
        self._entry = self._power = None

    @torch.no_grad()
    def update_gradient_share(self, step: int) -> None:
        """Convert the averaged gradient to the form by which step `step` (a `signs.step_id`) shares power. Collective
        on a mesh."""
        v = debias_ema(self.ema, self.updates[self.rows.layer], self.config.ema)
        if self.config.control == "shuffled":
            v = self._shuffle_rows(v, step)
        self._gradient_share = unscaled_gradient_share(self.norms, v, self.config.mode)

    def _shuffle_rows(self, v: Tensor, step: int) -> Tensor:
        """Return `v` (rows,) with the rows of each layer permuted, the same on any mesh."""
        whole = torch.cat(list(self.rows.whole(v)[0]))
        order = self._shuffle.words(step).argsort()
        order = order[self._whole_layer[order].argsort(stable=True)]
        return self.rows.local([whole[order]])

    def totals(self) -> Tensor:
        """Return the sums of |W'|² and of the gradient share, after `update_gradient_share`, over these rows on all
        tensor-parallel ranks, (2,). Collective on a mesh."""
        return self.rows.totals(self.norms, self._gradient_share)

    @torch.no_grad()
    def scale(self, sigma: float, model_sums: Tensor | None) -> None:
        """Share the power of the noise among the rows, after `update_gradient_share`. model_sums: the `totals` over all
        layers, (2,), to balance them together; None: layer by layer."""
        config, layer = self.config, self.rows.layer
        if config.mode == "paper":
            scale = torch.zeros_like(self.norms)
        elif model_sums is None:
            scale = gradient_share_scale(*self.rows.means(self.norms, self._gradient_share))[layer]
        else:
            scale = gradient_share_scale(*model_sums.to(self.norms)).expand_as(self.norms)
        self._power = power_shares(self.norms, self._gradient_share, scale, beta=config.beta, mode=config.mode)
        self._entry = sigma * self._power[0].sqrt() * self._unit[layer]
        self._model_sums = model_sums

    @torch.no_grad()
    def install(self, step: int, *, sketches: bool) -> None:
        """Install the perturbation in every layer, after `scale`. step: a `signs.step_id`, whose noise is used; with
        scopes other than `step` the noise waits for `set_micro_batch`. sketches: add probe columns."""
        scope, layers = self.config.scope, len(self.branches)
        if scope != "microbatch":
            self._factors = self._draw(step)
        probes = self.norms.new_empty(sum(self._widths), 0)
        if sketches:
            probes = unpack_signs(self._probe_in.words(step), self._probes, dtype=self._factor_dtype) * _PROBE
            zeros = self.branches[0].probe.shape[1] - self._probes
            probes = F.pad(probes, (0, zeros)) if zeros else probes
        noise = self._factors if scope == "step" else [(None, None)] * layers
        for branch, factors, probe in zip(self.branches, noise, probes.split(self._widths), strict=True):
            branch.install(*factors, probe)

    @torch.no_grad()
    def set_micro_batch(self, key: int) -> None:
        """Set the noise, or its samples' signs, for the next micro-batch `key` (a `signs.micro_id`)."""
        if self._samples is None:
            self._factors = self._draw(key)
        else:
            self._samples.set_micro_batch(key)
        for branch, factors in zip(self.branches, self._factors, strict=True):
            branch.redraw(*factors)

    def _draw(self, key: int) -> list[tuple[Tensor, Tensor]]:
        assert self._entry is not None
        rows, dtype = sum(self.rows.sizes), self._factor_dtype
        words = self._noise.words(key)
        noise_out = unpack_signs(words[:rows], self._rank, dtype=dtype) * self._entry[:, None].to(dtype)
        noise_in = unpack_signs(words[rows:], self._rank, dtype=dtype)
        parts = zip(self.branches, noise_in.split(self._widths), noise_out.split(self.rows.sizes), strict=True)
        return [(into[:, : branch.rank], out[:, : branch.rank]) for branch, into, out in parts]

    @torch.no_grad()
    def sketch(self, loss_scale: float) -> tuple[Tensor, Tensor]:
        """Return q_i = |G_i S_Pᵀ|²/k_p (rows,) of this step, and which layers got a gradient, bool (layers,).

        The gradient is divided by `loss_scale` and, on a mesh, summed before it is squared: two collectives for all
        layers.
        """
        probes = [branch.probe for branch in self.branches]
        took_part = torch.tensor([probe.grad is not None for probe in probes]).to(self.device, non_blocking=True)
        gradient = torch.cat([probe if probe.grad is None else probe.grad for probe in probes])
        if self._placement is not SINGLE_PROCESS:
            self.rows.sum_columns(gradient)
            flat = torch.cat([gradient.view(-1), took_part.to(gradient)])
            self._placement.sum_data(flat)
            gradient = flat[: gradient.numel()].view_as(gradient) / self._placement.gradient_scale
            took_part = flat[gradient.numel() :] > 0
        return (gradient / (loss_scale * _PROBE)).square().sum(1) / self._probes, took_part

    @torch.no_grad()
    def average_sketch(self, q: Tensor, took_part: Tensor, finite: Tensor) -> None:
        """Average a `sketch` in, unless it is not `finite` (bool, ()); layers without a gradient are skipped."""
        averaged = took_part & finite
        decay = self.config.ema
        self.ema = torch.where(averaged[self.rows.layer], decay * self.ema + (1 - decay) * q, self.ema)
        self.updates = self.updates + averaged
        self.skipped = self.skipped + (took_part & ~finite)

    def restore(self) -> None:
        """Remove the noise everywhere and drop the sketch's gradients."""
        for branch in self.branches:
            branch.remove()
            branch.probe.grad = None
        self._factors = []

    def metric_sums(self) -> Tensor:
        """Return sums over layers for the regularizer's metrics of the last perturbed step: `METRIC_SUMS`, float64.
        Does not wait for the device. Collective on a mesh."""
        zero = torch.zeros((), device=self.device, dtype=self.ema.dtype)
        sums = [zero] * 4
        if self._power is not None and self._entry is not None:
            (total, gradient), layer = self._power, self.rows.layer
            tiny = torch.finfo(total.dtype).tiny  # a layer of zeros has no power
            sigma = self._entry * self._root_rank[layer]
            row_power = sigma.square() * self._layer_widths[layer]
            gradient_power = row_power * gradient / total.clamp_min(tiny)
            # Total variation between the guided distribution of a layer's (or the model's) power and that by weights
            # alone.
            if self._model_sums is None:
                powers = [(mean * self.rows.whole_sizes)[layer] for mean in self.rows.means(total, self.norms)]
            else:
                powers = [self._model_sums[0].to(total)] * 2
            moved = (total / powers[0].clamp_min(tiny) - self.norms / powers[1].clamp_min(tiny)).abs()
            sums = list(self.rows.totals(row_power, gradient_power, sigma, moved))
            sums[3] = 0.5 * sums[3]
        return torch.stack([*sums, self.updates.sum().to(zero), self.skipped.sum().to(zero)]).double()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of `state`."""
        sites = [branch.site for branch in self.branches]
        per_row = {f"{s.name}.{quantity}": (s.whole_rows,) for s in sites for quantity in ("norms", "ema")}
        return per_row | {f"{s.name}.{quantity}": () for s in sites for quantity in ("updates", "skipped")}

    def state(self) -> dict[str, Tensor]:
        """Return copies per layer with all rows of each layer, so that the state does not depend on how layers are
        grouped or sharded. Collective on a mesh."""
        norms, ema = self.rows.whole(self.norms, self.ema)
        counts = {"updates": self.updates, "skipped": self.skipped}
        whole: dict[str, Sequence[Tensor] | Tensor] = {"norms": norms, "ema": ema, **counts}
        return {
            f"{branch.site.name}.{quantity}": parts[index].clone()
            for index, branch in enumerate(self.branches)
            for quantity, parts in whole.items()
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load a `state`."""

        def layers(quantity: str, template: Tensor) -> list[Tensor]:
            return [state[f"{branch.site.name}.{quantity}"].to(template).reshape(-1) for branch in self.branches]

        self.norms, self.ema = (self.rows.local(layers("norms", self.norms)), self.rows.local(layers("ema", self.ema)))
        self.updates = torch.cat(layers("updates", self.updates))
        self.skipped = torch.cat(layers("skipped", self.skipped))
