"""The vectors of many layers in one piece: a step's signs, scales and sketches are a few operations in all.

A bank holds the layers of one device and weight dtype. Rows of all its layers lie one after another, and so do
columns; per-layer factors are views. A model with hundreds of layers costs the same handful of calls as one with six.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from regularizers.branch import NoiseBranch
from regularizers.config import GGPO
from regularizers.guidance import debiased, layer_means, power_shares
from regularizers.signs import Side, counters, sign_words, stream_id, stream_keys, unpack


class Bank:
    """Row scales, noise factors and gradient sketches of `branches`."""

    def __init__(self, branches: list[NoiseBranch], config: GGPO) -> None:
        self.branches = branches
        self.config = config
        self._probes = branches[0].probe.shape[1]
        self.sizes = [branch.site.rows for branch in branches]
        self._widths = [branch.site.columns for branch in branches]
        weight = branches[0].site.base.weight
        self._factor_dtype = weight.dtype
        device, dtype = weight.device, branches[0].probe.dtype
        self._owner = torch.repeat_interleave(torch.tensor(self.sizes)).to(device)
        per_layer = {"device": device, "dtype": dtype}
        # σ_i² n/σ² → entry of U: 1/√(n k)
        self._unit = torch.tensor(
            [(w * b.rank) ** -0.5 for w, b in zip(self._widths, branches, strict=True)], **per_layer
        )
        self._sizes = torch.tensor(self.sizes, device=device)
        self._row_widths = torch.tensor(self._widths, device=device)[self._owner]
        self._root_rank = torch.tensor([b.rank**0.5 for b in branches], **per_layer)
        self._rank = max(branch.rank for branch in branches)

        sides: list[tuple[Side, list[int]]] = [("out", self.sizes), ("in", self._widths)]
        if self._probes:
            sides.append(("probe", self._widths))
        self._streams = torch.tensor(
            [stream_id(b.site.name, side) for side, _ in sides for b in branches], device=device
        )
        lengths = [length for _, part in sides for length in part]
        self._lengths = torch.tensor(lengths, device=device)
        self._words = sum(lengths)
        self._counters = torch.cat([counters(torch.arange(length, device=device)) for length in lengths])

        rows = sum(self.sizes)
        self.norms = torch.zeros(rows, **per_layer)
        self.ema = torch.zeros(rows, **per_layer)
        self.updates = torch.zeros(len(branches), device=device, dtype=torch.int64)
        self.skipped = torch.zeros_like(self.updates)
        self._sigma: Tensor | None = None
        self._shares: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def refresh_norms(self) -> None:
        """|W'_i|² of all rows from the weights as they are."""
        self.norms = torch.cat([branch.site.squared_norms().to(self.norms.dtype) for branch in self.branches])

    def rest(self) -> None:
        """A step without noise: nothing to report."""
        self._sigma = self._shares = None

    @torch.no_grad()
    def perturb(self, sigma: float, step: int) -> None:
        """Draw the noise of one step (`step` from `signs.step_id`) and switch it on in every layer."""
        config = self.config
        v = debiased(self.ema, self.updates[self._owner], config.ema)
        shares = power_shares(self.norms, v, beta=config.beta, mode=config.mode, sizes=self.sizes, owner=self._owner)
        entry = sigma * shares[0].sqrt() * self._unit[self._owner]
        self._shares, self._sigma = shares, entry * self._root_rank[self._owner]

        keys = torch.repeat_interleave(stream_keys(self._streams, step), self._lengths, output_size=self._words)
        words = sign_words(keys, self._counters)
        rows, noisy = sum(self.sizes), sum(self.sizes) + sum(self._widths)
        noise_out = unpack(words[:rows], self._rank, dtype=self._factor_dtype) * entry[:, None].to(self._factor_dtype)
        noise_in = unpack(words[rows:noisy], self._rank, dtype=self._factor_dtype)
        probe_in = unpack(words[noisy:], self._probes, dtype=self._factor_dtype) if self._probes else noise_in[:, :0]
        parts = zip(
            self.branches,
            noise_in.split(self._widths),
            noise_out.split(self.sizes),
            probe_in.split(self._widths),
            strict=True,
        )
        for branch, into, out, probe in parts:
            branch.install(into[:, : branch.rank], out[:, : branch.rank], probe)

    @torch.no_grad()
    def learn(self) -> None:
        """Average this step's sketch q_i = |(∂L/∂U_P)_i|²/k_p in; layers without a gradient and steps with a
        non-finite one are passed over. No wait for the device."""
        grads = [branch.probe.grad for branch in self.branches]
        if not self._probes or all(grad is None for grad in grads):
            return
        took_part = torch.tensor([grad is not None for grad in grads], device=self.ema.device)
        filled = [branch.probe if grad is None else grad for branch, grad in zip(self.branches, grads, strict=True)]
        q = torch.cat(filled).square().sum(1) / self._probes
        finite = q.isfinite().all()
        learns = took_part & finite
        decay = self.config.ema
        self.ema = torch.where(learns[self._owner], decay * self.ema + (1 - decay) * q, self.ema)
        self.updates = self.updates + learns
        self.skipped = self.skipped + (took_part & ~finite)

    def restore(self) -> None:
        """Switch the noise off everywhere and forget the sketch's gradients."""
        for branch in self.branches:
            branch.remove()
            branch.probe.grad = None

    def figures(self) -> dict[str, float]:
        """Sums from which the regularizer makes its metrics, of the last perturbed step; one wait for the device."""
        zero = torch.zeros((), device=self.ema.device, dtype=self.ema.dtype)
        power = gradient_power = sigma_sum = moved = zero
        if self._shares is not None and self._sigma is not None:
            (total, gradient), sizes, owner = self._shares, self._sizes, self._owner
            row_power = self._sigma.square() * self._row_widths
            power, sigma_sum = row_power.sum(), self._sigma.sum()
            gradient_power = (row_power * gradient / total.clamp_min(torch.finfo(total.dtype).tiny)).sum()
            # Total variation between the guided sharing of each layer's power and that by weights alone.
            guided, plain = (part / (layer_means(part, self.sizes) * sizes)[owner] for part in (total, self.norms))
            moved = 0.5 * (guided - plain).abs().sum()
        counts = (self.updates.max(), self.skipped.max())
        values = torch.stack([power, gradient_power, sigma_sum, moved, *(count.to(zero) for count in counts)]).tolist()
        return dict(zip(("power", "gradient_power", "sigma_sum", "moved", "sketches", "skipped"), values, strict=True))

    def state(self) -> dict[str, Tensor]:
        """Copies per layer, so that the state does not depend on how layers are banked."""
        norms, ema = self.norms.split(self.sizes), self.ema.split(self.sizes)
        whole = {"norms": norms, "ema": ema, "updates": self.updates, "skipped": self.skipped}
        return {
            f"{branch.site.name}.{what}": parts[index].clone()
            for index, branch in enumerate(self.branches)
            for what, parts in whole.items()
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """The reverse of `state`."""

        def whole(what: str, like: Tensor) -> Tensor:
            return torch.cat([state[f"{b.site.name}.{what}"].to(like).reshape(-1) for b in self.branches])

        self.norms, self.ema = whole("norms", self.norms), whole("ema", self.ema)
        self.updates, self.skipped = whole("updates", self.updates), whole("skipped", self.skipped)
