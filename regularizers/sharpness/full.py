"""The full space: W' = W0 + sBA of every adapted linear layer, moved by an added term and never written.

    y = layer(x) + x Δᵀ        Δ (m, n): a dense piece of a vector, or a product U S_Vᵀ

∂L/∂Δ is the gradient G = ∂L/∂W', whatever W0 is kept in (4-bit and int8 too) and whatever PEFT makes of the adapter
(DoRA adds the term to its output). A dense vector takes as much memory as the adapted weights in float32, and λ_max
keeps one for each of its steps; random directions are of rank k and take (m + n) k numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regularizers.errors import RegularizerError
from regularizers.guidance import default_rank
from regularizers.layers import LoraSite, find_lora_sites
from regularizers.sharpness.objective import Objective
from regularizers.sharpness.spaces import Purpose, Space, purpose_seed, refuse_merged
from regularizers.signs import Side, signs

Term = Callable[[Tensor], Tensor]
"""From a layer's input (..., n) to what is added to its output (..., m)."""


@contextmanager
def added(sites: Sequence[LoraSite], terms: Sequence[Term]) -> Iterator[None]:
    """The layers' forwards with a term each inside; without a trace afterwards, whatever happened."""
    before = [vars(site.layer).get("forward") for site in sites]
    try:
        for site, term in zip(sites, terms, strict=True):
            site.layer.forward = partial(_with_term, site.layer, site.layer.forward, term)
        yield
    finally:
        for site, forward in zip(sites, before, strict=True):
            if forward is not None:
                site.layer.forward = forward
            elif "forward" in vars(site.layer):
                del site.layer.forward


def _with_term(layer: Any, plain: Callable[..., Tensor], term: Term, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    y = plain(x, *args, **kwargs)
    if layer.disable_adapters:
        return y
    with torch.autocast(x.device.type, enabled=False):
        return (y + term(x)).to(y.dtype)


def _dense(delta: Tensor, x: Tensor) -> Tensor:
    return F.linear(x.to(delta.dtype), delta)


def _sides(site: LoraSite) -> tuple[tuple[Side, int], tuple[Side, int]]:
    return ("in", site.columns), ("out", site.rows)


def _factored(into: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return F.linear(F.linear(x.to(into.dtype), into.T), out)


class FullSpace(Space):
    """See the module's text. Layers that are no linear LoRA layers (embeddings) are no part of it."""

    name = "full"

    def __init__(self, model: nn.Module) -> None:
        """Raises RegularizerError if the model has no adapted linear layer, is merged, or is sharded."""
        refuse_merged(model)
        self._sites, others = find_lora_sites(model)
        if not self._sites:
            found = f"only LoRA layers of other kinds ({others[0]}, ...)" if others else "no LoRA layer"
            raise RegularizerError(
                f"the model has {found}, and sharpness in the full space is that of adapted linear layers; measure "
                "with spaces=('adapter',), or attach a LoRA adapter to linear layers (adapter.targets: all-linear)"
            )
        dtypes = [site.dtype for site in self._sites]
        self.dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self.device = self._sites[0].device
        # Δ is added in float32, but the loss is computed in what the model computes in.
        self.resolution = max(torch.finfo(dtype).eps for dtype in dtypes)
        self._shapes = [(site.rows, site.columns) for site in self._sites]
        self._lengths = [rows * columns for rows, columns in self._shapes]
        self.size = sum(self._lengths)
        squares = [site.squared_norms(site.factors()).to(self.dtype) for site in self._sites]
        self._row_norms = [each.sqrt() for each in squares]
        self.weight_norm = float(sum(each.double().sum() for each in squares)) ** 0.5

    def gradient(self, objective: Objective, at: Tensor | None = None) -> tuple[float, Tensor]:
        flat = torch.zeros(self.size, dtype=self.dtype, device=self.device) if at is None else at
        leaves = [
            part.view(shape).detach().to(site.device).requires_grad_()
            for part, shape, site in zip(flat.split(self._lengths), self._shapes, self._sites, strict=True)
        ]
        with added(self._sites, [partial(_dense, leaf) for leaf in leaves]):
            value, grads = objective.gradient(leaves)
        return value, torch.cat([grad.reshape(-1).to(self.device) for grad in grads])

    def value(self, objective: Objective, at: Tensor) -> float:
        parts = zip(at.split(self._lengths), self._shapes, self._sites, strict=True)
        deltas = [part.view(shape).to(site.device) for part, shape, site in parts]
        with added(self._sites, [partial(_dense, delta) for delta in deltas]):
            return objective.value()

    def draw(self, seed: int, purpose: Purpose, index: int, *, exact: bool) -> list[tuple[Tensor, Tensor]]:
        """(S_V (n, k), U (m, k)) of each layer: diag(|w'_i|) S_U S_Vᵀ/√(n k), the covariance of GGPO's noise with β = 0
        at σ = 1. With `exact`, each row of U is divided by the length that its product has."""
        key = purpose_seed(seed, purpose)
        factors = []
        for site, norms in zip(self._sites, self._row_norms, strict=True):
            rank = default_rank(site.rows, site.columns)
            into, out = (
                signs(
                    seed=key,
                    step=index,
                    layer=site.name,
                    side=side,
                    indices=range(count),
                    columns=rank,
                    dtype=self.dtype,
                ).to(site.device)
                for side, count in _sides(site)
            )
            if exact:
                lengths = ((out @ (into.T @ into)) * out).sum(1).clamp_min(torch.finfo(self.dtype).tiny).sqrt()
            else:
                lengths = torch.full_like(norms, (site.columns * rank) ** 0.5)
            factors.append((into, out * (norms / lengths)[:, None]))
        return factors

    def value_along(self, objective: Objective, parts: Sequence[tuple[float, Any]]) -> float:
        terms: list[Term] = []
        for layer in range(len(self._sites)):
            into = torch.cat([direction[layer][0] for _, direction in parts], 1)
            out = torch.cat([c * direction[layer][1] for c, direction in parts], 1)
            terms.append(partial(_factored, into, out))
        with added(self._sites, terms):
            return objective.value()
