"""Which part of each tensor this tensor-parallel rank holds.

Tensor parallelism replaces parameters by plain local tensors (no DTensor): a layer then computes on what it has, and
the collectives sit at the borders of its region. What was cut out of the whole is written down here, by canonical
parameter name, for loading, saving, gradient norms and regularizers. FSDP2 shards the local tensors afterwards as if
they were whole, along its own mesh axes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

_WRAPPER = re.compile(r"(^|\.)(_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)(?=\.|$)")
# not where PEFT nests adapters of stacked experts: `experts.base_layer.lora_A` beside `experts.lora_A`
_BASE_LAYER = re.compile(r"\.base_layer(?!\.lora_)")
_PART = re.compile(r"^part\d+\.")


def canonical(name: str) -> str:
    """A parameter's or module's name as in the backbone, whatever wraps it.

    PEFT's prefix, adapter name, `base_layer` and `modules_to_save`, checkpoint wrappers and a pipeline's `part0.` go:
    `part1.base_model.model.model.layers.3.q_proj.base_layer.weight` → `model.layers.3.q_proj.weight`.
    """
    name = _WRAPPER.sub("", _PART.sub("", name))
    name = _BASE_LAYER.sub("", name.removeprefix("base_model.model."))
    name = name.replace(".modules_to_save.default", "").replace(".original_module", "").replace(".default", "")
    return f"{name}.weight" if name.endswith(".lora_magnitude_vector") else name


@dataclass(frozen=True)
class Slice:
    """The indices along `dim` that this rank holds of a tensor whose `dim` has `size` entries in all."""

    dim: int
    size: int
    runs: tuple[tuple[int, int], ...]
    """Half-open runs of global indices, in local order; several for fused projections (GPT-2's qkv)."""

    @classmethod
    def even(cls, dim: int, size: int, *, rank: int, width: int, fused: int = 1) -> Slice:
        """The `rank`-th of `width` equal parts of each of `fused` equal blocks along `dim`."""
        assert size % (width * fused) == 0, (size, width, fused)
        block, part = size // fused, size // fused // width
        return cls(dim, size, tuple((b * block + rank * part, b * block + (rank + 1) * part) for b in range(fused)))

    def indices(self) -> Tensor:
        """Global indices in local order, int64 (local size,)."""
        return torch.cat([torch.arange(start, stop) for start, stop in self.runs])

    def take(self, whole: Tensor) -> Tensor:
        """The local part of `whole`."""
        return torch.cat([whole.narrow(self.dim, start, stop - start) for start, stop in self.runs], dim=self.dim)


@dataclass
class Layout:
    """The tensor-parallel cut of a model: empty without tensor parallelism."""

    slices: dict[str, Slice] = field(default_factory=dict)
    """By canonical name, for every parameter of which this rank holds a part; the others are whole on every tp rank."""
    partial: set[str] = field(default_factory=set)
    """Trainable parameters that are whole on every tp rank but whose gradient is a summand there: the gradient is the
    sum over tp (A of a column-parallel layer, B of a row-parallel one)."""

    splits_tokens: bool = False
    """Whether tp ranks have tokens of their own between the regions."""

    def first_features(self, modules: Iterable[str]) -> dict[str, int]:
        """First global feature of what each of these dropout modules is given, where features are cut: before the
        adapter of a row layer, and between the two layers of T5's feed-forward."""
        found = {}
        for name in modules:
            layer, _, what = name.rpartition(".")
            follows = {"lora_dropout": f"{layer}.lora_A.weight", "dropout": f"{layer}.wo.weight"}
            held = self.slices.get(follows.get(what, ""))
            if held is not None:
                found[name] = held.runs[0][0]
        return found

    def shape(self, name: str, local: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """The whole shape of the parameter `name` whose tensor-parallel part has the shape `local`."""
        shape = list(local)
        if name in self.slices:
            shape[self.slices[name].dim] = self.slices[name].size
        return tuple(shape)
