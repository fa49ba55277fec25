"""LoRA layers of a PEFT model, recognised by their attributes (`lora_A`, `base_layer`, ...), not by their class."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flatshift.regularizers.config import RegularizerError
from flatshift.regularizers.layers.frozen import (
    adapted_squared_row_norms,
    base_weight,
    base_weight_dtype,
    base_weight_shape,
    is_quantised,
    squared_row_norms,
    squared_update_norms,
    stored_tensors,
)
from flatshift.regularizers.layers.sharded import ParameterShard, compute_device, gather_parameters, is_sharded
from flatshift.regularizers.mesh import SINGLE_PROCESS, Placement, ShardSlice

_log = logging.getLogger(__name__)

_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_STAGE = re.compile(r"^part\d+\.")


def canonical_name(name: str) -> str:
    """Return a module's name without the parts inserted by wrappers (DDP, compile, FSDP, checkpointing), and without
    the `part0.` of a pipeline's stage."""
    return ".".join(part for part in _STAGE.sub("", name).split(".") if part not in _WRAPPERS)


@dataclass(frozen=True)
class _LocalBlock:
    """Block of W0 (m, n) that this process counts: `weight()` covers exactly these rows and columns."""

    rows: slice
    columns: slice
    weight: Callable[[], Tensor]
    """Computed on demand; collective if FSDP2 shards a quantised weight."""


@dataclass(eq=False)
class LoraSite:
    """One linear layer with LoRA adapters: y = x (W0 + Σ sBA)ᵀ, W0 of shape (m, n).

    m and n are those of this process: under tensor parallelism W0 is the `row_cut` and `column_cut` of a larger one.
    FSDP2 may keep a part of W0 (m, n) here, and less of A and B. W0 may be quantised
    (`flatshift.regularizers.layers.frozen`). For a model whose quantised weights FSDP2 shards, creating sites and
    computing norms is collective: all ranks must do so in the same order.
    """

    name: str
    layer: Any
    base: Any
    transposed: bool
    """True for GPT-2's Conv1D, which stores its weight as (n, m)."""
    rows: int
    columns: int
    row_cut: ShardSlice | None = None
    column_cut: ShardSlice | None = None
    _base_norms: dict[tuple[int | None, ...], Tensor] = field(default_factory=dict, init=False, repr=False)
    """|w0_i|² over the local block of W0, keyed by that block: computed once, or twice if an evaluation left W0
    gathered."""

    def __post_init__(self) -> None:
        self._block_norms(self._local_block())

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values of W0."""
        return base_weight_dtype(self.base)

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
        """Device on which the layer computes."""
        return compute_device(self.base.weight)

    def active(self) -> list[str]:
        """Return the adapters that take part in a forward pass."""
        return active_adapters(self.layer)

    def factors(self) -> list[Tensor]:
        """Return the tensors that determine the row norms together with W0: the magnitude vector for DoRA, else A of
        every active adapter, then B of every one, then the diagonal between the two (KaSA) of those that have one."""
        adapters = self.active()
        magnitudes = getattr(self.layer, "lora_magnitude_vector", None) or {}
        if len(adapters) == 1 and adapters[0] in magnitudes:
            return [magnitudes[adapters[0]].weight]
        pairs = [part[name].weight for part in (self.layer.lora_A, self.layer.lora_B) for name in adapters]
        diagonals = getattr(self.layer, "lora_diag", None) or {}
        return pairs + [diagonals[name] for name in adapters if name in diagonals]

    @torch.no_grad()
    def squared_norms(self, factors: Sequence[Tensor]) -> Tensor:
        """Return |w'_i|² (m,) of the adapted weight over the local block of W0, zero for rows outside it.

        The sum over the ranks with the other parts (FSDP2's, and those with the other columns) is the full norm.
        factors: the full tensors of `factors()`. For DoRA the result is the squared magnitude vector.
        """
        block = self._local_block()
        base = self._block_norms(block)
        rows = block.rows
        if len(factors) == 1:
            squares = factors[0].detach().reshape(-1)[rows].to(base.dtype).square()
            others_begin = self.column_cut is not None and int(self.column_cut.indices()[0]) > 0
            norms = torch.zeros_like(squares) if block.columns.start or others_begin else squares
        elif not factors:
            norms = base.clone()
        else:
            a, sb = self._update([factor.detach() for factor in factors])
            norms = adapted_squared_row_norms(block.weight(), a[:, block.columns], sb[rows], base=base)
        return self._scatter(norms, rows)

    @torch.no_grad()
    def bound(self, factors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return |w0_i|² and |s b_i A|² (m,) over the same block as `squared_norms`, without reading W0.

        The root of the second bounds the distance of |w'_i| from |w0_i|. It is infinite if the norms need no product
        with W0 (DoRA).
        """
        block = self._local_block()
        base = self._block_norms(block)
        update = torch.zeros_like(base)
        if len(factors) == 1:
            update += torch.inf
        elif factors:
            a, sb = (factor.to(base.dtype) for factor in self._update([factor.detach() for factor in factors]))
            update = squared_update_norms(a[:, block.columns], sb[block.rows])
        return self._scatter(base, block.rows), self._scatter(update, block.rows)

    def _scatter(self, norms: Tensor, rows: slice) -> Tensor:
        """Scatter `norms` of the rows `rows` into a vector over all rows (m,), zero elsewhere."""
        if rows == slice(None):
            return norms
        scattered = torch.zeros(self.rows, dtype=norms.dtype, device=norms.device)
        scattered[rows] = norms
        return scattered

    def _update(self, factors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return A of all active adapters stacked (Σr, n), and their sB concatenated (m, Σr)."""
        adapters, layer = self.active(), self.layer
        count = len(adapters)
        diagonals = iter(factors[2 * count :])
        has_diagonal = getattr(layer, "lora_diag", None) or {}
        stacked_a, joined_b = [], []
        for name, a, b in zip(adapters, factors[:count], factors[count : 2 * count], strict=True):
            scaled = whole_factor(layer.lora_B[name], b) * layer.scaling[name]
            stacked_a.append(whole_factor(layer.lora_A[name], a))
            joined_b.append(scaled * next(diagonals) if name in has_diagonal else scaled)
        return torch.cat(stacked_a), torch.cat(joined_b, 1)

    def _local_block(self) -> _LocalBlock:
        shard, whole = ParameterShard.of(self.base.weight), slice(None)
        if shard.group is None:
            return _LocalBlock(whole, whole, lambda: self._orient(base_weight(self.base)))
        if is_quantised(self.base):  # parts of packed bytes are not matrices: each rank unpacks some rows of the whole
            step = -(-self.rows // len(shard.bounds))
            rows = slice(min(shard.rank * step, self.rows), min((shard.rank + 1) * step, self.rows))
            return _LocalBlock(
                rows, whole, lambda: base_weight(self.base, gather_parameters(stored_tensors(self.base)))[rows]
            )
        local = slice(shard.start, shard.stop)
        rows, columns = (local, whole) if (shard.dim == 1) == self.transposed else (whole, local)
        return _LocalBlock(rows, columns, lambda: self._orient(shard.tensor))

    def _orient(self, weight: Tensor) -> Tensor:
        return weight.T if self.transposed else weight

    def _block_norms(self, block: _LocalBlock) -> Tensor:
        key = (block.rows.start, block.rows.stop, block.columns.start, block.columns.stop)
        if key not in self._base_norms:
            self._base_norms[key] = squared_row_norms(block.weight()).to(self.device)
        return self._base_norms[key]


def whole_factor(factor: Any, weight: Tensor) -> Tensor:
    """Return `weight` of the `factor`, with the zeros that a block-diagonal factor (BD-LoRA) does not store."""
    blocks = getattr(factor, "nblocks", None)
    return weight if blocks is None else torch.block_diag(*weight.chunk(blocks))


def _multiplies_input(factor: Any, columns: int) -> bool:
    """True if `factor` multiplies the layer's own input (QA-LoRA multiplies means over groups of it)."""
    return (isinstance(factor, nn.Linear) and factor.weight.shape[1] == columns) or hasattr(factor, "nblocks")


def _has_values(weight: Tensor) -> bool:
    """True if the weight has readable values (a weight on meta is stored elsewhere)."""
    return not weight.is_meta


def is_lora(module: nn.Module) -> bool:
    """True if PEFT adapts `module` by LoRA, whatever kind of layer it is."""
    return hasattr(module, "lora_A") and hasattr(module, "lora_B") and hasattr(module, "base_layer")


def active_adapters(layer: Any) -> list[str]:
    """Return the adapters of a LoRA layer that take part in its forward pass."""
    return [] if layer.disable_adapters else [name for name in layer.active_adapters if name in layer.lora_A]


def has_variant(layer: Any, adapter: str) -> bool:
    """True if PEFT computes this adapter of a LoRA layer by another rule than W0 + sBA (DoRA, aLoRA, ...)."""
    variants = getattr(layer, "lora_variant", None) or {}
    return adapter in variants or bool((getattr(layer, "use_dora", None) or {}).get(adapter))


def linear_shape(base: Any) -> tuple[int, int, bool] | None:
    """Return (m, n, transposed) of a layer that computes x W0ᵀ, or None for other kinds (embedding, convolution)."""
    if isinstance(base, nn.Linear):
        return base.out_features, base.in_features, False
    if type(base).__name__ == "Conv1D" and hasattr(base, "nf"):
        return base.nf, base.nx, True
    return None


def find_lora_sites(model: nn.Module, placement: Placement = SINGLE_PROCESS) -> tuple[list[LoraSite], list[str]]:
    """Return the linear LoRA layers of `model` in order, and the names of LoRA layers of other kinds, which are
    skipped.

    Raises RegularizerError if a weight cannot be read as an (m, n) matrix, or is sharded without a placement.
    """
    sites: list[LoraSite] = []
    others: list[str] = []
    for raw, module in model.named_modules():
        if not is_lora(module):
            continue
        layer: Any = module
        name = canonical_name(raw)
        base = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer.base_layer
        shape = linear_shape(base)
        if shape is None or not layer.lora_A or not all(_multiplies_input(a, shape[1]) for a in layer.lora_A.values()):
            others.append(name)
            continue
        rows, columns, transposed = shape
        weight = base.weight
        stored = (columns, rows) if transposed else (rows, columns)
        dtype = base_weight_dtype(base)  # torch computes nothing with 8-bit floats
        readable = dtype.is_floating_point and dtype.itemsize > 1 and _has_values(weight)
        if base_weight_shape(base) != stored or not readable:
            raise RegularizerError(
                f"layer {name} keeps its weight as {weight.dtype} {tuple(weight.shape)}, from which no {rows}x{columns}"
                " matrix can be read (of quantised weights those of bitsandbytes and torchao can); load the backbone "
                "unquantised or in one of these forms, or use regularizer.kind: plain"
            )
        if placement is SINGLE_PROCESS and is_sharded(weight):
            raise RegularizerError(
                f"layer {name} is sharded over processes, and its gradients are sums over them; give attach() the "
                "placement of this process in the mesh"
            )
        cuts = placement.rows(name), placement.columns(name)
        assert all(cut is None or len(cut.indices()) == n for cut, n in zip(cuts, (rows, columns), strict=True)), name
        sites.append(LoraSite(name, layer, base, transposed, rows, columns, *cuts))
    return sites, others


def check_linear_layers(count: int, others: list[str], method: str, verb: str, advice: str = "") -> None:
    """Raise RegularizerError if the model has no linear LoRA layer; warn about LoRA layers of other kinds.

    count: linear layers of the whole model. others: names of LoRA layers of other kinds. The message says that `method`
    `verb` adapted linear layers; advice: its further fix.
    """
    if count == 0:
        present = f"only LoRA layers of other kinds ({others[0]}, ...)" if others else "no LoRA layer"
        raise RegularizerError(
            f"the model has {present}, and {method} {verb} adapted linear layers; attach a LoRA adapter to linear "
            f"layers first (adapter.targets: all-linear){advice}"
        )
    if others:
        _log.warning(
            "%s leaves %d LoRA layers that are not linear alone, e.g. %s: they train unperturbed",
            method,
            len(others),
            others[0],
        )
