"""Values of a frozen weight, stored as floats or quantised, and the row norms of W' = W0 + sBA.

Recognised by duck typing are the 4-bit and int8 layers of bitsandbytes (QLoRA, arXiv 2305.14314; LLM.int8(),
2208.07339) and torchao's tensor subclasses. Such a layer computes x Ŵᵀ with the dequantised Ŵ, so W0 means Ŵ here. It
is dequantised for one layer at a time, on demand; the stored weight is never written.

Row norms, without ever forming W':

    |w'_i|² = |w0_i|² + 2 b_i·C_i + b_i K b_iᵀ,   C = W0 Aᵀ (m, r),  K = A Aᵀ (r, r),  b_i = row of sB

|w0_i|² is constant and computed once; the rest costs one skinny product with W0. The distance between the norms is
bounded without reading W0: | |w'_i| − |w0_i| | ≤ |b_i A| = (b_i K b_iᵀ)^½.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from flatshift.regularizers.config import RegularizerError


def is_quantised(base: Any) -> bool:
    """True if the linear layer `base` stores something other than the float matrix it computes with."""
    return _four_bit_state(base) is not None or _int8_scales(base) is not None or _is_torchao(base.weight)


def base_weight_dtype(base: Any) -> torch.dtype:
    """Return the dtype of `base_weight(base)`."""
    state = _four_bit_state(base)
    if state is not None:
        dtype: torch.dtype = state.dtype
        return dtype
    return torch.float32 if _int8_scales(base) is not None else base.weight.dtype  # type: ignore[no-any-return]


def base_weight_shape(base: Any) -> tuple[int, ...]:
    """Return the shape of `base_weight(base)`."""
    state = _four_bit_state(base)
    return tuple(base.weight.shape if state is None else state.shape)


def stored_tensors(base: Any) -> list[Tensor]:
    """Return the parameters that hold W0: packed bytes, and the scales of their blocks if these are a parameter too."""
    return [part for name in ("weight", "absmax") if (part := base._parameters.get(name)) is not None]


@torch.no_grad()
def base_weight(base: Any, stored: Sequence[Tensor] = ()) -> Tensor:
    """Return W0 (m, n) as `base` computes with it, a copy if `base` is quantised.

    stored: the full `stored_tensors(base)`, if `base` itself has only a part of them (FSDP2).
    Raises RegularizerError if bitsandbytes has repacked the layer for inference on a CPU, which rounds its scales and
    lets no gradient through.
    """
    weight = stored[0] if stored else base.weight.detach()
    state = _four_bit_state(base)
    if state is not None:
        if getattr(state, "packing_format_for_cpu", False):
            raise RegularizerError(
                "a 4-bit layer was repacked by bitsandbytes for inference on the CPU, where no gradient passes; load "
                "the backbone again and set `support_avx512bf16_for_cpu = False` on its Linear4bit layers first"
            )
        if len(stored) > 1:
            state = copy.copy(state)
            state.absmax = stored[1]
        plain = weight.as_subclass(Tensor)  # the parameter's subclass would propagate into results
        dequantised: Tensor = import_module("bitsandbytes").functional.dequantize_4bit(plain, state)
        return dequantised
    scales = _int8_scales(base)
    if scales is not None:
        return weight.as_subclass(Tensor).float().mul_(scales.float().div(127)[:, None])
    if _is_torchao(weight):
        read = getattr(weight, "get_original_weight", None) or weight.dequantize  # only NF4Tensor has the former
        whole: Tensor = read()
        return whole
    return weight


def _four_bit_state(base: Any) -> Any:
    """Return bitsandbytes' `QuantState` of a 4-bit layer: from the parameter, or from the layer once FSDP2 has replaced
    the parameter by its own."""
    state = getattr(base.weight, "quant_state", None)
    return getattr(base, "quant_state", None) if state is None else state


def _int8_scales(base: Any) -> Tensor | None:
    """Return max |w_i| of each row (m,) of an int8 layer of bitsandbytes: from the parameter, or after the first
    forward pass from the layer's state."""
    if base.weight.dtype != torch.int8:
        return None
    scales: Tensor | None = getattr(base.weight, "SCB", None)
    return getattr(getattr(base, "state", None), "SCB", None) if scales is None else scales


def _is_torchao(weight: Tensor) -> bool:
    return type(weight).__module__.startswith("torchao.")


_CHUNK, _CUDA_CHUNK = 1 << 18, 1 << 24
"""Elements of W0 converted at a time for the product with A: 1 MiB in float32 on a CPU, where it stays in a cache, and
64 MiB on CUDA, where each piece costs two launches."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which norms are summed: float32, or float64 for float64 weights."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@torch.no_grad()
def squared_row_norms(weight: Tensor) -> Tensor:
    """Return |w_i|² (m,) of `weight` (m, n), summed in float32 whatever the weight's dtype, without copying it."""
    return torch.linalg.vector_norm(weight, dim=1, dtype=accumulation_dtype(weight.dtype)).square()


@torch.no_grad()
def squared_update_norms(a: Tensor, sb: Tensor) -> Tensor:
    """Return |b_i A|² (m,) of the update sBA from `a` (r, n) and `sb` = sB (m, r); the square of the skip bound."""
    return ((sb @ (a @ a.T)) * sb).sum(1).clamp_min(0)


@torch.no_grad()
def adapted_squared_row_norms(weight: Tensor, a: Tensor, sb: Tensor, *, base: Tensor | None = None) -> Tensor:
    """Return |w'_i|² (m,) of `weight` + `sb` @ `a`, in float32 (float64 for float64 weights).

    weight (m, n), a (r, n), sb = s·B (m, r); base: `squared_row_norms(weight)` if known. If the weight is on another
    device, it is copied over a few rows at a time.
    """
    dtype = accumulation_dtype(weight.dtype)
    base = squared_row_norms(weight).to(a.device) if base is None else base
    a, sb = a.to(dtype), sb.to(dtype)
    elements = _CUDA_CHUNK if weight.is_cuda else _CHUNK
    parts = weight.split(max(1, elements // max(1, weight.shape[1])))
    cross = torch.cat([rows.to(a) @ a.T for rows in parts])
    return (base + 2 * (sb * cross).sum(1) + squared_update_norms(a, sb)).clamp_min(0)
