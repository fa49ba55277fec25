"""The LoRA layers of a PEFT model, recognised by what they have (`lora_A`, `base_layer`, ...), not by their class."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from regularizers.errors import RegularizerError
from regularizers.mesh import ALONE, Cut, Placement
from regularizers.rownorms import adapted_squared_row_norms, squared_row_norms
from regularizers.sharded import Part, compute_device, is_sharded

_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_STAGE = re.compile(r"^part\d+\.")


def canonical_name(name: str) -> str:
    """A module's name without the parts that wrappers (DDP, compile, FSDP, checkpointing) insert, nor the `part0.` of
    a pipeline's stage."""
    return ".".join(part for part in _STAGE.sub("", name).split(".") if part not in _WRAPPERS)


@dataclass(eq=False)
class LoraSite:
    """One linear layer with LoRA adapters: y = x (W0 + Σ sBA)ᵀ, W0 of shape (m, n).

    m and n are those of this process: under tensor parallelism W0 has `row_cut` and `column_cut` of a larger one.
    FSDP2 may keep a part of W0 (m, n) here, and less of A and B.
    """

    name: str
    layer: Any
    base: Any
    transposed: bool
    """Conv1D of GPT-2 keeps its weight as (n, m)."""
    rows: int
    columns: int
    row_cut: Cut | None = None
    column_cut: Cut | None = None
    _base_norms: dict[tuple[int, int, bool], Tensor] = field(default_factory=dict, init=False, repr=False)
    """|w0_i|² over what is held of W0, by what that is: computed once, or twice if an evaluation left W0 gathered."""

    def __post_init__(self) -> None:
        self._held_norms(Part.of(self.base.weight))

    @property
    def whole_rows(self) -> int:
        """Rows of W0 on all tensor-parallel ranks."""
        return self.rows if self.row_cut is None else self.row_cut.size

    @property
    def whole_columns(self) -> int:
        """Columns of W0 on all tensor-parallel ranks."""
        return self.columns if self.column_cut is None else self.column_cut.size

    @property
    def device(self) -> torch.device:
        """Where the layer computes."""
        return compute_device(self.base.weight)

    def active(self) -> list[str]:
        """The adapters that take part in a forward pass."""
        if self.layer.disable_adapters:
            return []
        return [name for name in self.layer.active_adapters if name in self.layer.lora_A]

    def has_variant(self, adapter: str) -> bool:
        """Whether PEFT computes this adapter by another rule than W0 + sBA (DoRA, aLoRA, ...)."""
        variants = getattr(self.layer, "lora_variant", None) or {}
        return adapter in variants or bool((getattr(self.layer, "use_dora", None) or {}).get(adapter))

    def factors(self) -> list[Tensor]:
        """What the row norms depend on besides W0: the magnitude vector of DoRA, else A of every active adapter and
        then B of every one."""
        adapters = self.active()
        magnitudes = getattr(self.layer, "lora_magnitude_vector", None) or {}
        if len(adapters) == 1 and adapters[0] in magnitudes:
            return [magnitudes[adapters[0]].weight]
        return [part[name].weight for part in (self.layer.lora_A, self.layer.lora_B) for name in adapters]

    @torch.no_grad()
    def squared_norms(self, factors: Sequence[Tensor]) -> Tensor:
        """|w'_i|² (m,) of the adapted weight over the part of W0 that is held here, zero for rows of which nothing is:
        the sum over the ranks that hold the other parts (FSDP2's, and those with the other columns) is the whole.

        `factors`: the whole of what `factors()` names. For DoRA it is the squared magnitude vector.
        """
        part = Part.of(self.base.weight)
        base = self._held_norms(part)
        held = slice(part.start, part.stop) if part.group is not None else slice(None)
        rows, columns = (held, slice(None)) if (part.dim == 1) == self.transposed else (slice(None), held)
        adapters = self.active()
        if len(factors) == 1:
            squares = factors[0].detach().reshape(-1)[rows].to(base.dtype).square()
            norms = squares if not columns.start else torch.zeros_like(squares)
        elif not adapters:
            norms = base.clone()
        else:
            a = torch.cat([a.detach() for a in factors[: len(adapters)]])
            scaling = [self.layer.scaling[name] for name in adapters]
            sb = torch.cat([b.detach() * s for b, s in zip(factors[len(adapters) :], scaling, strict=True)], 1)
            weight = part.tensor.T if self.transposed else part.tensor
            norms = adapted_squared_row_norms(weight, a[:, columns], sb[rows], base=base)
        if rows == slice(None):
            return norms
        return torch.zeros(self.rows, dtype=norms.dtype, device=norms.device).index_copy_(
            0, torch.arange(rows.start, rows.stop, device=norms.device), norms
        )

    def _held_norms(self, part: Part) -> Tensor:
        key = (part.start, part.stop, part.group is None)
        if key not in self._base_norms:
            weight = part.tensor.T if self.transposed else part.tensor
            self._base_norms[key] = squared_row_norms(weight).to(self.device)
        return self._base_norms[key]


def _is_lora(module: nn.Module) -> bool:
    return hasattr(module, "lora_A") and hasattr(module, "lora_B") and hasattr(module, "base_layer")


def _linear_shape(base: Any) -> tuple[int, int, bool] | None:
    """(m, n, transposed) of a layer that computes x W0ᵀ, or None for other kinds (embedding, convolution)."""
    if isinstance(base, nn.Linear):
        return base.out_features, base.in_features, False
    if type(base).__name__ == "Conv1D" and hasattr(base, "nf"):
        return base.nf, base.nx, True
    return None


def find_lora_sites(model: nn.Module, placement: Placement = ALONE) -> tuple[list[LoraSite], list[str]]:
    """The linear LoRA layers of `model` in order, and the names of LoRA layers of other kinds, which are left alone.

    Raises RegularizerError if a weight is not readable as an (m, n) float matrix, or sharded without a placement.
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
                "float matrix (quantised or on meta); load the backbone unquantised, or use "
                "regularizer.kind: plain"
            )
        if placement is ALONE and is_sharded(weight):
            raise RegularizerError(
                f"layer {name} is sharded over processes, and its gradients are sums over them; give attach() the "
                "placement of this process in the mesh"
            )
        cuts = placement.rows(name), placement.columns(name)
        assert all(cut is None or len(cut.indices()) == n for cut, n in zip(cuts, (rows, columns), strict=True)), name
        sites.append(LoraSite(name, layer, base, transposed, rows, columns, *cuts))
    return sites, others


def refuse_none(layers: int, others: list[str]) -> None:
    """Raises RegularizerError if there is no linear LoRA layer; `others`: names of LoRA layers of other kinds."""
    if layers == 0:
        found = f"only LoRA layers of other kinds ({others[0]}, ...)" if others else "no LoRA layer"
        raise RegularizerError(
            f"the model has {found}, and GGPO perturbs adapted linear layers; attach a LoRA adapter to linear "
            "layers first (adapter.targets: all-linear)"
        )
