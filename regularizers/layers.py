"""The LoRA layers of a PEFT model, recognised by what they have (`lora_A`, `base_layer`, ...), not by their class."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from regularizers.errors import RegularizerError
from regularizers.rownorms import adapted_squared_row_norms, squared_row_norms

_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def canonical_name(name: str) -> str:
    """A module's name without the parts that wrappers (DDP, compile, FSDP, checkpointing) insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@dataclass(eq=False)
class LoraSite:
    """One linear layer with LoRA adapters: y = x (W0 + Σ sBA)ᵀ, W0 of shape (m, n)."""

    name: str
    layer: Any
    base: Any
    transposed: bool
    """Conv1D of GPT-2 keeps its weight as (n, m)."""
    rows: int
    columns: int
    base_norms: Tensor = field(init=False, repr=False)
    """|w0_i|² (m,), computed once."""

    def __post_init__(self) -> None:
        self.base_norms = squared_row_norms(self.weight)

    @property
    def weight(self) -> Tensor:
        """W0 as (m, n), a view."""
        weight = self.base.weight.detach()
        return weight.T if self.transposed else weight

    def active(self) -> list[str]:
        """The adapters that take part in a forward pass."""
        if self.layer.disable_adapters:
            return []
        return [name for name in self.layer.active_adapters if name in self.layer.lora_A]

    def has_variant(self, adapter: str) -> bool:
        """Whether PEFT computes this adapter by another rule than W0 + sBA (DoRA, aLoRA, ...)."""
        variants = getattr(self.layer, "lora_variant", None) or {}
        return adapter in variants or bool((getattr(self.layer, "use_dora", None) or {}).get(adapter))

    @torch.no_grad()
    def squared_norms(self) -> Tensor:
        """|w'_i|² (m,) of the adapted weight; for DoRA the squared magnitude vector, which is just that."""
        adapters = self.active()
        magnitudes = getattr(self.layer, "lora_magnitude_vector", None) or {}
        if len(adapters) == 1 and adapters[0] in magnitudes:
            magnitude = magnitudes[adapters[0]].weight.detach().reshape(-1)
            return magnitude.to(self.base_norms.dtype).square()
        if not adapters:
            return self.base_norms.clone()
        a = torch.cat([self.layer.lora_A[name].weight.detach() for name in adapters])
        sb = torch.cat([self.layer.lora_B[name].weight.detach() * self.layer.scaling[name] for name in adapters], 1)
        return adapted_squared_row_norms(self.weight, a, sb, base=self.base_norms)


def _is_lora(module: nn.Module) -> bool:
    return hasattr(module, "lora_A") and hasattr(module, "lora_B") and hasattr(module, "base_layer")


def _linear_shape(base: Any) -> tuple[int, int, bool] | None:
    """(m, n, transposed) of a layer that computes x W0ᵀ, or None for other kinds (embedding, convolution)."""
    if isinstance(base, nn.Linear):
        return base.out_features, base.in_features, False
    if type(base).__name__ == "Conv1D" and hasattr(base, "nf"):
        return base.nf, base.nx, True
    return None


def find_lora_sites(model: nn.Module) -> tuple[list[LoraSite], list[str]]:
    """The linear LoRA layers of `model` in order, and the names of LoRA layers of other kinds, which are left alone.

    Raises RegularizerError if there is no linear one, or if a weight is not readable as an (m, n) float matrix.
    """
    sites: list[LoraSite] = []
    others: list[str] = []
    for raw, module in model.named_modules():
        if not _is_lora(module):
            continue
        layer: Any = module
        name = canonical_name(raw)
        base = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer.base_layer
        shape = _linear_shape(base)
        linear = all(isinstance(part, nn.Linear) for part in layer.lora_A.values()) and len(layer.lora_A) > 0
        if shape is None or not linear:
            others.append(name)
            continue
        rows, columns, transposed = shape
        weight = base.weight
        stored = (columns, rows) if transposed else (rows, columns)
        if tuple(weight.shape) != stored or not weight.is_floating_point() or weight.is_meta:
            raise RegularizerError(
                f"layer {name} keeps its weight as {weight.dtype} {tuple(weight.shape)}, not as a {rows}x{columns} "
                "float matrix (quantised, sharded or on meta); load the backbone unquantised, or use "
                "regularizer.kind: plain"
            )
        sites.append(LoraSite(name, layer, base, transposed, rows, columns))
    if not sites:
        found = f"only LoRA layers of other kinds ({others[0]}, ...)" if others else "no LoRA layer"
        raise RegularizerError(
            f"the model has {found}, and GGPO perturbs adapted linear layers; attach a LoRA adapter to linear "
            "layers first (adapter.targets: all-linear)"
        )
    return sites, others
