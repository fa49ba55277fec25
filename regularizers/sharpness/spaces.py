"""The space in which a neighbourhood is measured: what a vector of it is, and what the loss is at w + vector.

A vector is one flat tensor. Random directions are *row-normalised*: their rows have the length of the weight's rows
(Li et al., arXiv 1712.09913: "filter normalisation"), so that a layer's scale does not decide how flat it looks.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from regularizers.adapters import Adapters
from regularizers.errors import RegularizerError
from regularizers.sharpness.objective import Objective

_CHUNK = 1 << 15
"""Elements widened to float64 at a time: they stay in a cache (`benchmarks.any_machine`)."""

Purpose = Literal["noise", "slice", "trace", "start", "ascent"]
"""What a random vector is for: vectors for different purposes are independent."""


def dot(a: Tensor, b: Tensor) -> float:
    """a · b of flat vectors, summed in float64 a piece at a time (float32 sums of millions are off by 1e-4)."""
    pieces = zip(a.split(_CHUNK), b.split(_CHUNK), strict=True)
    return float(sum(torch.dot(x.double(), y.double()) for x, y in pieces))


def norm(a: Tensor) -> float:
    """|a|, as `dot`."""
    return dot(a, a) ** 0.5


def purpose_seed(seed: int, purpose: Purpose) -> int:
    """A 62-bit seed for one purpose."""
    return int.from_bytes(hashlib.sha256(f"sharpness:{seed}:{purpose}".encode()).digest()[:8], "big") >> 2


def generator(seed: int, purpose: Purpose, index: int) -> torch.Generator:
    """The generator of the `index`-th vector, on the CPU so that every device sees the same."""
    mixed = hashlib.sha256(f"{purpose_seed(seed, purpose)}:{index}".encode()).digest()[:8]
    return torch.Generator().manual_seed(int.from_bytes(mixed, "big") >> 2)


class Space(ABC):
    """Weights w of one kind in a model, and the vectors that can be added to them."""

    name: str
    size: int
    """N, entries of a vector."""
    dtype: torch.dtype
    """Of vectors: float32, or float64 for float64 weights."""
    device: torch.device
    weight_norm: float
    """|w|."""
    resolution: float
    """Relative spacing of numbers in which w is moved and the loss is computed."""

    @abstractmethod
    def gradient(self, objective: Objective, at: Tensor | None = None) -> tuple[float, Tensor]:
        """Loss and gradient (N,) at w + `at`; w is untouched afterwards, whatever happened."""

    @abstractmethod
    def value(self, objective: Objective, at: Tensor) -> float:
        """Loss at w + `at` (N,)."""

    @abstractmethod
    def draw(self, seed: int, purpose: Purpose, index: int, *, exact: bool) -> Any:
        """A random row-normalised direction, in whatever form `value_along` takes: independent entries of one
        covariance in each row, whose rows have the length |w_i| in the mean, or each of them with `exact`."""

    @abstractmethod
    def value_along(self, objective: Objective, parts: Sequence[tuple[float, Any]]) -> float:
        """Loss at w + Σ c·d over (c, d) in `parts`, d from `draw`."""

    def signs(self, seed: int, purpose: Purpose, index: int) -> Tensor:
        """Independent signs ±1 (N,)."""
        bits = torch.randint(0, 2, (self.size,), generator=generator(seed, purpose, index), dtype=torch.int8)
        return (bits * 2 - 1).to(device=self.device, dtype=self.dtype)


class AdapterSpace(Space):
    """θ = (A, B) of all trained LoRA factors (`regularizers.adapters`). They are moved in place and put back bit for
    bit. What is trained besides, such as a classifier's head, is held fixed."""

    name = "adapter"

    def __init__(self, model: nn.Module, adapters: Adapters | None = None) -> None:
        """adapters: another θ of this model, with its heads.

        Raises RegularizerError if the model trains no LoRA factor, is merged, or is sharded."""
        refuse_merged(model)
        self._adapters = adapters or Adapters(model)
        values = self._adapters.values()
        dtypes = [value.dtype for value in values.values()]
        self._lengths = [value.numel() for value in values.values()]
        self.size = sum(self._lengths)
        self.dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self.device = self._adapters.device
        self.resolution = max(torch.finfo(dtype).eps for dtype in dtypes)
        flat = self._flat([value.reshape(-1) for value in values.values()])
        self.weight_norm = norm(flat)
        rows = [value.to(self.dtype).reshape(len(value), -1) for value in values.values()]
        self._widths = [each.shape[1] for each in rows]
        self._row_norms = self._flat([each.square().sum(1).sqrt().repeat_interleave(each.shape[1]) for each in rows])

    def gradient(self, objective: Objective, at: Tensor | None = None) -> tuple[float, Tensor]:
        parameters = list(self._adapters.parameters.values())
        with self._moved(at):
            value, grads = objective.gradient(parameters)
        return value, self._flat([grad.reshape(-1) for grad in grads])

    def value(self, objective: Objective, at: Tensor) -> float:
        with self._moved(at):
            return objective.value()

    def draw(self, seed: int, purpose: Purpose, index: int, *, exact: bool) -> Tensor:
        """Gaussian, (N,)."""
        normal = torch.randn(self.size, generator=generator(seed, purpose, index), dtype=torch.float32).to(self.dtype)
        parts = []
        for part, width in zip(normal.split(self._lengths), self._widths, strict=True):
            rows = part.view(-1, width)
            lengths = rows.square().sum(1, keepdim=True).sqrt() if exact else torch.tensor(width**0.5)
            parts.append((rows / lengths).reshape(-1))
        return torch.cat(parts).to(self.device) * self._row_norms

    def value_along(self, objective: Objective, parts: Sequence[tuple[float, Any]]) -> float:
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


def refuse_merged(model: nn.Module) -> None:
    """Raises RegularizerError if an adapter is merged into the backbone: moving it would move nothing."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and getattr(module, "merged", False):
            raise RegularizerError(
                f"the adapter of layer {name} is merged into the backbone; call model.unmerge_adapter() before "
                "measuring sharpness"
            )
