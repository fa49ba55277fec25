"""Linear layers over the rows of many cells: one product with the frozen weight, batched ones with what is each cell's.

    y = x W0ᵀ + b + s (x Aᵀ) Bᵀ          LoRA: x (cells·tokens, n), A (cells, r, n), B (cells, m, r)
    y = x Wᵀ + b                         a trained head: W (cells, m, n), b (cells, m)

with explicit backward passes that write the gradients of A, B, W and b where they belong (`Run`), so autograd
never sees a parameter of a cell. Cells under a noise branch of `flatshift.regularizers.layers.branch` have its columns
beside A and B, in the same fused form: z = x [S_V; A; S_P]ᵀ, y = x W0ᵀ + z [U, sB]ᵀ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flatshift.regularizers.layers.fused import shaped

from ..parallel.engine import Engine

if TYPE_CHECKING:
    from flatshift.regularizers.layers.branch import NoiseBranch


@dataclass(frozen=True)
class Noise:
    """The noise of a run's cells in one layer."""

    into: Tensor
    """S_V, (cells, n, k)."""
    out: Tensor
    """U, (cells, m, k)."""
    probe: Tensor
    """S_P, (cells, n, p), p = 0 in a step without probes."""
    leaves: tuple[Tensor, ...]
    """U_P of each cell, (m, p) zeros that receive a gradient."""

    @classmethod
    def of(cls, branches: Sequence[NoiseBranch]) -> Noise:
        """What is installed in these branches now."""
        parts = [(branch.noise_in, branch.noise_out, branch.probe_in) for branch in branches]
        into, out, probe = (torch.stack(each) for each in zip(*parts, strict=True))
        return cls(into, out, probe, tuple(branch.probe for branch in branches))


@dataclass(frozen=True)
class Part:
    """A run of cells in one LoRA layer."""

    run: Run
    a: str
    """Plain name of A."""
    b: str
    """Plain name of B."""
    scale: float
    noise: Noise | None = None

    def factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
        """What x is multiplied by (cells, K, n), what comes after (cells, m, k + r), and the scale of both."""
        a, b = self.run.value(self.a), self.run.value(self.b)
        if self.noise is None:
            return a.to(dtype), b.to(dtype), self.scale
        noise = self.noise
        down = torch.cat([noise.into.mT, a, noise.probe.mT], 1).to(dtype)
        return down, torch.cat([noise.out, b * self.scale], 2).to(dtype), 1.0

    def learn(self, x: Tensor, z: Tensor, dy: Tensor, dz: Tensor) -> None:
        """Write the gradients: x (cells, t, n), z (cells, t, r + p), dy (cells, t, m), dz (cells, t, r)."""
        self.run.put(self.a, dz.mT, x)
        if self.noise is None:
            self.run.put(self.b, dy.mT, z, scale=self.scale)
            return
        up, rank = torch.bmm(dy.mT, z), dz.shape[2]
        self.run.put_value(self.b, up[..., :rank].to(self.run.value(self.b).dtype) * self.scale)
        if up.shape[2] > rank:
            for leaf, found in zip(self.noise.leaves, up[..., rank:].to(self.noise.leaves[0].dtype), strict=True):
                leaf.grad = found.clone() if leaf.grad is None else leaf.grad + found

    @property
    def columns(self) -> int:
        """k, columns of noise."""
        return 0 if self.noise is None else self.noise.into.shape[2]


class StackedLora(torch.autograd.Function):
    """x (R, ..., n), weight (m, n), bias (m,) | None, all of one dtype → (R, ..., m).

    anchor: a leaf that requires a gradient, so that autograd comes by where x needs none; parts: in order of rows,
    together all R of them.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, parts: Sequence[Part], rows: int
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        each = len(flat) // rows
        y = F.linear(flat, weight, bias)
        kept = []
        for part in parts:
            tokens, count, k = part.run.tokens(each), part.run.count, part.columns
            down, up, scale = part.factors(x.dtype)
            z = torch.bmm(flat[tokens].view(count, -1, flat.shape[1]), down.mT)
            out = y[tokens].view(count, -1, y.shape[1])
            out.baddbmm_(z[..., : up.shape[2]], up.mT, alpha=scale)
            kept.append(z[..., k:].contiguous())
        ctx.save_for_backward(flat, weight, *kept)
        ctx.parts, ctx.each = parts, each
        return shaped(y, (*x.shape[:-1], y.shape[-1]))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        flat, weight, *kept = ctx.saved_tensors
        dy = grad.reshape(-1, grad.shape[-1])
        dx = dy @ weight if ctx.needs_input_grad[1] else None
        for part, z in zip(ctx.parts, kept, strict=True):
            tokens, count, k = part.run.tokens(ctx.each), part.run.count, part.columns
            down, up, scale = part.factors(dy.dtype)
            x, d = (each[tokens].view(count, -1, each.shape[1]) for each in (flat, dy))
            # z gives the shape only
            dz = torch.bmm(d, up) if part.noise is not None else torch.baddbmm(z, d, up, beta=0.0, alpha=scale)
            if dx is not None:
                dx[tokens].view(count, -1, dx.shape[1]).baddbmm_(dz, down[:, : up.shape[2]])
            part.learn(x, z, d, dz[..., k:])
        return None, None if dx is None else dx.view(*grad.shape[:-1], -1), None, None, None, None


@dataclass(frozen=True)
class HeadPart:
    """A run of cells in one trained linear layer."""

    run: Run
    weight: str
    bias: str | None


class StackedLinear(torch.autograd.Function):
    """x (R, ..., n) → (R, ..., m) by each cell's own trained layer; anchor and parts as in `StackedLora`."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, parts: Sequence[HeadPart], rows: int) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        each = len(flat) // rows
        found = []
        for part in parts:
            mine = flat[part.run.tokens(each)].view(part.run.count, -1, flat.shape[1])
            weight = part.run.value(part.weight).to(x.dtype)
            if part.bias is None:
                found.append(torch.bmm(mine, weight.mT).flatten(0, 1))
            else:
                bias = part.run.value(part.bias).to(x.dtype)[:, None]
                found.append(torch.baddbmm(bias, mine, weight.mT).flatten(0, 1))
        ctx.save_for_backward(flat)
        ctx.parts, ctx.each = parts, each
        y = torch.cat(found)
        return shaped(y, (*x.shape[:-1], y.shape[-1]))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (flat,) = ctx.saved_tensors
        dy = grad.reshape(-1, grad.shape[-1])
        found = []
        for part in ctx.parts:
            run, tokens = part.run, part.run.tokens(ctx.each)
            x, d = (each[tokens].view(run.count, -1, each.shape[1]) for each in (flat, dy))
            run.put(part.weight, d.mT, x)
            if part.bias is not None:
                run.put_value(part.bias, d.sum(1))
            found.append(torch.bmm(d, run.value(part.weight).to(d.dtype)).flatten(0, 1))
        dx = torch.cat(found).view(*grad.shape[:-1], -1) if ctx.needs_input_grad[1] else None
        return None, dx, None, None


class Group:
    """Values and gradients of cells of one rank: each cell's parameters become slices of the stacked tensors."""

    def __init__(self, engines: Sequence[Engine], number: int = 0) -> None:
        """number: among the groups of a stack."""
        self.number = number
        self.values: dict[str, Tensor] = {}
        """By plain name, (cells, *shape)."""
        self.gradients: dict[str, Tensor] = {}
        for name in engines[0].parameters:
            stacked = torch.stack([engine.parameters[name].detach() for engine in engines])
            for place, engine in enumerate(engines):
                engine.parameters[name].data = stacked[place]
            self.values[name], self.gradients[name] = stacked, torch.empty_like(stacked)
        self._own = [{name: g[place] for name, g in self.gradients.items()} for place in range(len(engines))]

    def hand_out(self, place: int, engine: Engine, names: set[str]) -> None:
        """Make the gradients of one cell those that were written; the others have none, as in a loop alone."""
        own = self._own[place]
        for name, parameter in engine.parameters.items():
            parameter.grad = own[name] if name in names else None


@dataclass
class Run:
    """Neighbouring cells of a group in one pass, with equally many rows each."""

    group: Group
    cells: slice
    """Of the group."""
    rows: slice
    """Of the pass."""
    adds: bool
    """Whether the gradients of this pass come on top of those of earlier micro-batches."""
    written: set[str] = field(default_factory=set)
    """Plain names of the parameters whose gradient this pass has written already."""

    @property
    def count(self) -> int:
        """How many cells."""
        return self.cells.stop - self.cells.start

    def tokens(self, each: int) -> slice:
        """Its part of a flat batch with `each` tokens a row."""
        return slice(self.rows.start * each, self.rows.stop * each)

    def value(self, name: str) -> Tensor:
        """(cells, *shape) of a parameter."""
        return self.group.values[name][self.cells]

    def put(self, name: str, left: Tensor, right: Tensor, *, scale: float = 1.0) -> None:
        """Add scale · `left` @ `right`, (cells, p, q), to the gradient of a parameter; the first time it is set."""
        gradient = self.group.gradients[name][self.cells]
        adds = self._adds(name)
        if gradient.dtype == left.dtype:
            gradient.baddbmm_(left, right, beta=float(adds), alpha=scale)
            return
        self._store(gradient, torch.bmm(left, right).to(gradient.dtype).mul_(scale), adds)

    def put_value(self, name: str, value: Tensor) -> None:
        """Add `value`, (cells, *shape), to the gradient of a parameter; the first time it is set."""
        adds = self._adds(name)
        self._store(self.group.gradients[name][self.cells], value, adds)

    def _adds(self, name: str) -> bool:
        adds = self.adds or name in self.written
        self.written.add(name)
        return adds

    def _store(self, gradient: Tensor, value: Tensor, adds: bool) -> None:
        gradient.add_(value) if adds else gradient.copy_(value)
