"""Loss of a neighbourhood and the space in which it is measured: vectors, and the loss at w + vector.

The model is restored after every evaluation. A vector is one flat tensor. Random directions are *row-normalised*: their
rows have the length of the weight's rows (Li et al., arXiv 1712.09913: "filter normalisation"), so that a layer's scale
does not affect its measured flatness.

The full space: W' = W0 + sBA of every adapted linear layer, moved by an added term and never written.

    y = layer(x) + x Δᵀ        Δ (m, n): a dense piece of a vector, or a product U S_Vᵀ

∂L/∂Δ is the gradient G = ∂L/∂W', whatever the storage of W0 (4-bit and int8 too) and whatever PEFT makes of the adapter
(for DoRA the term is added to its output). A dense vector takes as much memory as the adapted weights in float32, and
λ_max stores one for each of its steps; random directions are of rank k and take (m + n) k numbers.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatshift.regularizers.config import RegularizerError, default_rank
from flatshift.regularizers.layers.adapters import AdapterParameters
from flatshift.regularizers.layers.forward import ForwardSwap
from flatshift.regularizers.layers.frozen import is_quantised
from flatshift.regularizers.layers.signs import draw_signs
from flatshift.regularizers.layers.sites import LoraSite, find_lora_sites

Loss = Callable[[], Tensor | Iterable[Tensor]]
"""Function that returns the loss over fixed batches: a scalar, or an iterable of scalar terms to be summed. For several
micro-batches a generator is best: the graph of a term is freed before the next is computed."""


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode (dropout would drown a difference), and restore each module's mode afterwards.
    Quantised linear layers stay in training mode: in evaluation mode bitsandbytes repacks 4-bit weights for inference
    on a CPU, after which no gradient passes through them."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = isinstance(module, nn.Linear) and is_quantised(module)
        yield
    finally:
        for module, training in modes:
            module.training = training


class LossFunction:
    """`loss` of `model`; sums over terms are in float64."""

    def __init__(self, model: nn.Module, loss: Loss, count: Callable[[int], None] = lambda passes: None) -> None:
        """count: called for every evaluation, with 1 for a loss and 3 for a gradient."""
        self.model = model
        self._loss = loss
        self._count = count

    @torch.no_grad()
    def value(self) -> float:
        """Return the loss at the current weights."""
        with _evaluation_mode(self.model):
            total = sum(float(term) for term in self._terms())
        self._count(1)
        return total

    @torch.enable_grad()
    def gradient(self, inputs: Sequence[Tensor]) -> tuple[float, list[Tensor]]:
        """Return the loss and its gradients with respect to `inputs`, which must require grad.

        Gradients are in float32, or float64 for float64 inputs; zero for an input that does not affect the loss. No
        `.grad` is touched. Raises RegularizerError if the loss depends on none of them.
        """
        total = 0.0
        sums = [torch.zeros_like(each, dtype=torch.promote_types(each.dtype, torch.float32)) for each in inputs]
        with _evaluation_mode(self.model):
            for term in self._terms():
                if not term.requires_grad:
                    raise RegularizerError(
                        "the loss has no gradient with respect to the weights that are measured; switch the adapters "
                        "on, and compute the loss outside torch.no_grad()"
                    )
                for into, gradient in zip(sums, torch.autograd.grad(term, inputs, allow_unused=True), strict=True):
                    if gradient is not None:
                        into.add_(gradient)
                total += float(term.detach())
        self._count(3)
        return total, [each.detach() for each in sums]

    def _terms(self) -> Iterable[Tensor]:
        loss = self._loss()
        return (loss,) if isinstance(loss, Tensor) else loss


Term = Callable[[Tensor], Tensor]
"""Function from a layer's input (..., n) to the term added to its output (..., m)."""
_CHUNK = 1 << 17
"""Elements converted to float64 at a time: two buffers of 1 MiB that fit in a cache (`benchmarks.any_machine`)."""

Purpose = Literal["noise", "slice", "trace", "start", "ascent"]
"""Purpose of a random vector; vectors for different purposes are independent."""


def dot(a: Tensor, b: Tensor) -> float:
    """Return a · b of flat vectors, summed in float64 in chunks (float32 sums of millions are off by 1e-4)."""
    size = min(len(a), _CHUNK)
    wide_a, wide_b = (torch.empty(size, dtype=torch.float64, device=a.device) for _ in range(2))
    pieces = zip(a.split(_CHUNK), b.split(_CHUNK), strict=True)
    return float(sum(torch.dot(wide_a[: len(x)].copy_(x), wide_b[: len(y)].copy_(y)) for x, y in pieces))


def norm(a: Tensor) -> float:
    """Return |a|, summed as in `dot`."""
    return dot(a, a) ** 0.5


def purpose_seed(seed: int, purpose: Purpose) -> int:
    """Return a 62-bit seed."""
    return int.from_bytes(hashlib.sha256(f"sharpness:{seed}:{purpose}".encode()).digest()[:8], "big") >> 2


def seeded_generator(seed: int, purpose: Purpose, index: int) -> torch.Generator:
    """Return the generator of the `index`-th vector, on the CPU so that every device draws the same."""
    mixed = hashlib.sha256(f"{purpose_seed(seed, purpose)}:{index}".encode()).digest()[:8]
    return torch.Generator().manual_seed(int.from_bytes(mixed, "big") >> 2)


class Space(ABC):
    """Weights w of one kind in a model, and the vectors that can be added to them."""

    name: str
    size: int
    """N, number of entries of a vector."""
    dtype: torch.dtype
    """Of vectors: float32, or float64 for float64 weights."""
    device: torch.device
    weight_norm: float
    resolution: float
    """Relative spacing of the numbers in which w is moved and the loss is computed."""

    @abstractmethod
    def gradient(self, objective: LossFunction, at: Tensor | None = None) -> tuple[float, Tensor]:
        """Return loss and gradient (N,) at w + `at`; w is restored afterwards, even after an exception."""

    @abstractmethod
    def value(self, objective: LossFunction, at: Tensor) -> float:
        """Return the loss at w + `at` (N,)."""

    @abstractmethod
    def draw(self, seed: int, purpose: Purpose, index: int, *, exact: bool) -> Any:
        """Draw a random row-normalised direction, in the form that `value_along` takes. Entries are independent with
        one covariance in each row; rows have the length |w_i| in the mean, or exactly with `exact`."""

    @abstractmethod
    def value_along(self, objective: LossFunction, parts: Sequence[tuple[float, Any]]) -> float:
        """Return the loss at w + Σ c·d over (c, d) in `parts`, d from `draw`."""

    def signs(self, seed: int, purpose: Purpose, index: int) -> Tensor:
        """Draw independent signs ±1 (N,)."""
        bits = torch.randint(0, 2, (self.size,), generator=seeded_generator(seed, purpose, index), dtype=torch.int8)
        return (bits * 2 - 1).to(device=self.device, dtype=self.dtype)


class AdapterSpace(Space):
    """θ = (A, B) of all trained LoRA factors (`flatshift.regularizers.layers.adapters`). They are moved in place and
    restored bit for bit. Other trained parameters, such as a classifier's head, are fixed."""

    name = "adapter"

    def __init__(self, model: nn.Module, adapters: AdapterParameters | None = None) -> None:
        """adapters: another θ of this model, with its heads. Raises RegularizerError if the model trains no LoRA
        factor, is merged, or is sharded."""
        check_not_merged(model)
        self._adapters = adapters or AdapterParameters(model)
        values = self._adapters.values()
        dtypes = [value.dtype for value in values.values()]
        self._lengths = [value.numel() for value in values.values()]
        self.size = sum(self._lengths)
        self.dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self.device = self._adapters.device
        self.resolution = max(torch.finfo(dtype).eps for dtype in dtypes)
        self.weight_norm = norm(self._flat([value.reshape(-1) for value in values.values()]))
        rows = [value.to(self.dtype).reshape(len(value), -1) for value in values.values()]
        self._widths = [each.shape[1] for each in rows]
        self._row_norms = self._flat([each.square().sum(1).sqrt().repeat_interleave(each.shape[1]) for each in rows])

    def gradient(self, objective: LossFunction, at: Tensor | None = None) -> tuple[float, Tensor]:
        parameters = list(self._adapters.parameters.values())
        with self._moved(at):
            value, grads = objective.gradient(parameters)
        return value, self._flat([grad.reshape(-1) for grad in grads])

    def value(self, objective: LossFunction, at: Tensor) -> float:
        with self._moved(at):
            return objective.value()

    def draw(self, seed: int, purpose: Purpose, index: int, *, exact: bool) -> Tensor:
        """Draw a Gaussian direction (N,)."""
        normal = torch.randn(self.size, generator=seeded_generator(seed, purpose, index), dtype=torch.float32).to(
            self.dtype
        )
        parts = []
        for part, width in zip(normal.split(self._lengths), self._widths, strict=True):
            rows = part.view(-1, width)
            lengths = rows.square().sum(1, keepdim=True).sqrt() if exact else torch.tensor(width**0.5)
            parts.append((rows / lengths).reshape(-1))
        return torch.cat(parts).to(self.device) * self._row_norms

    def value_along(self, objective: LossFunction, parts: Sequence[tuple[float, Any]]) -> float:
        return self.value(objective, sum(c * direction for c, direction in parts) + torch.zeros_like(self._row_norms))

    def _flat(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.to(device=self.device, dtype=self.dtype) for part in parts])

    @contextmanager
    def _moved(self, at: Tensor | None) -> Iterator[None]:
        if at is None:
            yield
            return
        values = self._adapters.values()
        parts = at.split(self._lengths)
        direction = {
            name: part.view(value.shape).to(value.device)
            for (name, value), part in zip(values.items(), parts, strict=True)
        }
        with self._adapters.moved(direction):
            yield


def check_not_merged(model: nn.Module) -> None:
    """Raise RegularizerError if an adapter is merged into the backbone: moving it would have no effect."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and getattr(module, "merged", False):
            raise RegularizerError(
                f"the adapter of layer {name} is merged into the backbone; call model.unmerge_adapter() before "
                "measuring sharpness"
            )


@contextmanager
def _added_terms(sites: Sequence[LoraSite], terms: Sequence[Term]) -> Iterator[None]:
    """Add a term to each layer's output inside the context; restore the forwards afterwards, even after an
    exception."""
    layers = [ForwardSwap(site) for site in sites]
    try:
        for layer, term in zip(layers, terms, strict=True):
            layer.add_term(partial(_add_term, term))
        yield
    finally:
        for layer in layers:
            layer.restore()


def _add_term(term: Term, y: Tensor, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return (y + term(x)).to(y.dtype)


def _dense_term(delta: Tensor, x: Tensor) -> Tensor:
    return F.linear(x.to(delta.dtype), delta)


def _low_rank_term(into: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return F.linear(F.linear(x.to(into.dtype), into.T), out)


class FullSpace(Space):
    """W' of all adapted linear layers (see the module docstring); other LoRA layers (embeddings) are not part of it."""

    name = "full"

    def __init__(self, model: nn.Module) -> None:
        """Raises RegularizerError if the model has no adapted linear layer, is merged, or is sharded."""
        check_not_merged(model)
        self._sites, others = find_lora_sites(model)
        if not self._sites:
            present = f"only LoRA layers of other kinds ({others[0]}, ...)" if others else "no LoRA layer"
            raise RegularizerError(
                f"the model has {present}, and sharpness in the full space is that of adapted linear layers; measure "
                "with spaces=('adapter',), or attach a LoRA adapter to linear layers (adapter.targets: all-linear)"
            )
        dtypes = [site.dtype for site in self._sites]
        self.dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self.device = self._sites[0].device
        # Δ is added in float32, but the loss is computed in the model's own precision.
        self.resolution = max(torch.finfo(dtype).eps for dtype in dtypes)
        self._shapes = [(site.rows, site.columns) for site in self._sites]
        self._lengths = [rows * columns for rows, columns in self._shapes]
        self.size = sum(self._lengths)
        squares = [site.squared_norms(site.factors()).to(self.dtype) for site in self._sites]
        self._row_norms = [each.sqrt() for each in squares]
        self.weight_norm = float(sum(each.double().sum() for each in squares)) ** 0.5

    def gradient(self, objective: LossFunction, at: Tensor | None = None) -> tuple[float, Tensor]:
        flat = torch.zeros(self.size, dtype=self.dtype, device=self.device) if at is None else at
        leaves = [
            part.view(shape).detach().to(site.device).requires_grad_()
            for part, shape, site in zip(flat.split(self._lengths), self._shapes, self._sites, strict=True)
        ]
        with _added_terms(self._sites, [partial(_dense_term, leaf) for leaf in leaves]):
            value, grads = objective.gradient(leaves)
        return value, torch.cat([grad.reshape(-1).to(self.device) for grad in grads])

    def value(self, objective: LossFunction, at: Tensor) -> float:
        parts = zip(at.split(self._lengths), self._shapes, self._sites, strict=True)
        deltas = [part.view(shape).to(site.device) for part, shape, site in parts]
        with _added_terms(self._sites, [partial(_dense_term, delta) for delta in deltas]):
            return objective.value()

    def draw(self, seed: int, purpose: Purpose, index: int, *, exact: bool) -> list[tuple[Tensor, Tensor]]:
        """Draw (S_V (n, k), U (m, k)) of each layer: diag(|w'_i|) S_U S_Vᵀ/√(n k), the covariance of GGPO's noise with
        β = 0 at σ = 1. With `exact`, each row of U is divided by the actual length of its product."""
        key = purpose_seed(seed, purpose)
        factors = []
        for site, norms in zip(self._sites, self._row_norms, strict=True):
            rank = default_rank(site.rows, site.columns)
            draw = partial(draw_signs, seed=key, step=index, layer=site.name, columns=rank, dtype=self.dtype)
            into = draw(side="in", indices=range(site.columns)).to(site.device)
            out = draw(side="out", indices=range(site.rows)).to(site.device)
            if exact:
                lengths = ((out @ (into.T @ into)) * out).sum(1).clamp_min(torch.finfo(self.dtype).tiny).sqrt()
            else:
                lengths = torch.full_like(norms, (site.columns * rank) ** 0.5)
            factors.append((into, out * (norms / lengths)[:, None]))
        return factors

    def value_along(self, objective: LossFunction, parts: Sequence[tuple[float, Any]]) -> float:
        terms: list[Term] = []
        for layer in range(len(self._sites)):
            into = torch.cat([direction[layer][0] for _, direction in parts], 1)
            out = torch.cat([c * direction[layer][1] for c, direction in parts], 1)
            terms.append(partial(_low_rank_term, into, out))
        with _added_terms(self._sites, terms):
            return objective.value()
