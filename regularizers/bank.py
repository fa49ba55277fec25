"""The vectors of many layers in one piece: a step's signs, scales and sketches are a few operations in all.

A bank holds the layers of one device and weight dtype. Rows of all its layers lie one after another, and so do
columns; per-layer factors are views. A model with hundreds of layers costs the same handful of calls as one with six,
and as few collectives on a mesh (`regularizers.rows`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from regularizers.branch import NoiseBranch
from regularizers.config import GGPO
from regularizers.guidance import debiased, power_shares
from regularizers.mesh import ALONE, Cut, Placement
from regularizers.rows import Rows
from regularizers.sharded import gathered
from regularizers.signs import Side, counters, sign_words, stream_id, stream_keys, unpack

FIGURES = ("power", "gradient_power", "sigma_sum", "moved", "sketches", "skipped")


def _global(cut: Cut | None, length: int) -> Tensor:
    return torch.arange(length) if cut is None else cut.indices()


class Bank:
    """Row scales, noise factors and gradient sketches of `branches`."""

    def __init__(self, branches: list[NoiseBranch], config: GGPO, placement: Placement = ALONE) -> None:
        self.branches = branches
        self.config = config
        self._placement = placement
        sites = [branch.site for branch in branches]
        self._probes = branches[0].probe.shape[1]
        self.device, dtype = branches[0].probe.device, branches[0].probe.dtype
        self.rows = Rows(sites, placement, self.device)
        self._widths = [site.columns for site in sites]
        self._factor_dtype = sites[0].base.weight.dtype
        device = self.device
        per_layer: dict[str, Any] = {"device": device, "dtype": dtype}
        # σ_i² n/σ² → entry of U: 1/√(n k)
        self._unit = torch.tensor(
            [(s.whole_columns * b.rank) ** -0.5 for s, b in zip(sites, branches, strict=True)], **per_layer
        )
        self._row_widths = torch.tensor([site.whole_columns for site in sites], device=device)[self.rows.owner]
        self._root_rank = torch.tensor([b.rank**0.5 for b in branches], **per_layer)
        self._rank = max(branch.rank for branch in branches)

        into = [_global(site.column_cut, site.columns) for site in sites]
        sides: list[tuple[Side, list[Tensor]]] = [("out", [_global(s.row_cut, s.rows) for s in sites]), ("in", into)]
        if self._probes:
            sides.append(("probe", into))
        self._streams = torch.tensor([stream_id(s.name, side) for side, _ in sides for s in sites], device=device)
        indices = [part for _, parts in sides for part in parts]
        self._lengths = torch.tensor([len(part) for part in indices], device=device)
        self._words = sum(len(part) for part in indices)
        self._counters = counters(torch.cat(indices).to(device))

        rows = sum(self.rows.sizes)
        self.norms = torch.zeros(rows, **per_layer)
        self.ema = torch.zeros(rows, **per_layer)
        self.updates = torch.zeros(len(branches), device=device, dtype=torch.int64)
        self.skipped = torch.zeros_like(self.updates)
        self._sigma: Tensor | None = None
        self._shares: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def refresh_norms(self) -> None:
        """|W'_i|² of all rows from the weights as they are; collective on a mesh."""
        factors = [branch.site.factors() for branch in self.branches]
        whole = iter(gathered([factor for layer in factors for factor in layer]))
        parts = [
            branch.site.squared_norms([next(whole) for _ in layer]).to(self.norms.dtype)
            for branch, layer in zip(self.branches, factors, strict=True)
        ]
        self.norms = torch.cat(parts)
        self.rows.sum_parts(self.norms)

    def rest(self) -> None:
        """A step without noise: nothing to report."""
        self._sigma = self._shares = None

    @torch.no_grad()
    def perturb(self, sigma: float, step: int) -> None:
        """Draw the noise of one step (`step` from `signs.step_id`) and switch it on in every layer."""
        config, owner, sizes = self.config, self.rows.owner, self.rows.sizes
        v = debiased(self.ema, self.updates[owner], config.ema)
        shares = power_shares(self.norms, v, beta=config.beta, mode=config.mode, owner=owner, means=self.rows.means)
        entry = sigma * shares[0].sqrt() * self._unit[owner]
        self._shares, self._sigma = shares, entry * self._root_rank[owner]

        keys = torch.repeat_interleave(stream_keys(self._streams, step), self._lengths, output_size=self._words)
        words = sign_words(keys, self._counters)
        rows, noisy = sum(sizes), sum(sizes) + sum(self._widths)
        noise_out = unpack(words[:rows], self._rank, dtype=self._factor_dtype) * entry[:, None].to(self._factor_dtype)
        noise_in = unpack(words[rows:noisy], self._rank, dtype=self._factor_dtype)
        probe_in = unpack(words[noisy:], self._probes, dtype=self._factor_dtype) if self._probes else noise_in[:, :0]
        parts = zip(
            self.branches,
            noise_in.split(self._widths),
            noise_out.split(sizes),
            probe_in.split(self._widths),
            strict=True,
        )
        for branch, into, out, probe in parts:
            branch.install(into[:, : branch.rank], out[:, : branch.rank], probe)

    @torch.no_grad()
    def sketch(self) -> tuple[Tensor, Tensor]:
        """q_i = |(∂L/∂U_P)_i|²/k_p (rows,) of this step, and which layers got a gradient, bool (layers,). On a mesh
        the gradient is summed before it is squared: two collectives for all layers."""
        grads = [branch.probe.grad for branch in self.branches]
        took_part = torch.tensor([grad is not None for grad in grads], device=self.device)
        filled = [branch.probe if grad is None else grad for branch, grad in zip(self.branches, grads, strict=True)]
        gradient = torch.cat(filled)
        if self._placement is not ALONE:
            self.rows.sum_columns(gradient)
            flat = torch.cat([gradient.view(-1), took_part.to(gradient)])
            self._placement.sum_data(flat)
            gradient = flat[: gradient.numel()].view_as(gradient) / self._placement.gradient_scale
            took_part = flat[gradient.numel() :] > 0
        return gradient.square().sum(1) / self._probes, took_part

    @torch.no_grad()
    def learn(self, q: Tensor, took_part: Tensor, finite: Tensor) -> None:
        """Average a `sketch` in, unless it is not `finite` (bool, ()); layers without a gradient are passed over."""
        learns = took_part & finite
        decay = self.config.ema
        self.ema = torch.where(learns[self.rows.owner], decay * self.ema + (1 - decay) * q, self.ema)
        self.updates = self.updates + learns
        self.skipped = self.skipped + (took_part & ~finite)

    def restore(self) -> None:
        """Switch the noise off everywhere and forget the sketch's gradients."""
        for branch in self.branches:
            branch.remove()
            branch.probe.grad = None

    def figures(self) -> dict[str, float]:
        """Sums over layers from which the regularizer makes its metrics, of the last perturbed step; one wait for the
        device. Collective on a mesh."""
        zero = torch.zeros((), device=self.device, dtype=self.ema.dtype)
        sums = [zero] * 4
        if self._shares is not None and self._sigma is not None:
            (total, gradient), owner = self._shares, self.rows.owner
            row_power = self._sigma.square() * self._row_widths
            gradient_power = row_power * gradient / total.clamp_min(torch.finfo(total.dtype).tiny)
            # Total variation between the guided sharing of each layer's power and that by weights alone.
            means = self.rows.means(total, self.norms)
            guided, plain = (
                part / (mean * self.rows.whole_sizes)[owner]
                for part, mean in zip((total, self.norms), means, strict=True)
            )
            sums = list(self.rows.totals(row_power, gradient_power, self._sigma, (guided - plain).abs()))
            sums[3] = 0.5 * sums[3]
        counts = (self.updates.sum().to(zero), self.skipped.sum().to(zero))
        return dict(zip(FIGURES, torch.stack([*sums, *counts]).tolist(), strict=True))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The names and shapes of `state`."""
        sites = [branch.site for branch in self.branches]
        per_row = {f"{s.name}.{what}": (s.whole_rows,) for s in sites for what in ("norms", "ema")}
        return per_row | {f"{s.name}.{what}": () for s in sites for what in ("updates", "skipped")}

    def state(self) -> dict[str, Tensor]:
        """Copies per layer, so that the state does not depend on how layers are banked, with all rows of a layer, so
        that it does not depend on how they are cut. Collective on a mesh."""
        norms, ema = self.rows.whole(self.norms, self.ema)
        whole: dict[str, Sequence[Tensor] | Tensor] = {
            "norms": norms,
            "ema": ema,
            "updates": self.updates,
            "skipped": self.skipped,
        }
        return {
            f"{branch.site.name}.{what}": parts[index].clone()
            for index, branch in enumerate(self.branches)
            for what, parts in whole.items()
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """The reverse of `state`."""

        def layers(what: str, like: Tensor) -> list[Tensor]:
            return [state[f"{branch.site.name}.{what}"].to(like).reshape(-1) for branch in self.branches]

        self.norms, self.ema = (self.rows.take(layers("norms", self.norms)), self.rows.take(layers("ema", self.ema)))
        self.updates = torch.cat(layers("updates", self.updates))
        self.skipped = torch.cat(layers("skipped", self.skipped))
