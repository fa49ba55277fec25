"""Row norms of W' = W0 + sBA without ever forming W'.

    |w'_i|² = |w0_i|² + 2 b_i·C_i + b_i K b_iᵀ,   C = W0 Aᵀ (m, r),  K = A Aᵀ (r, r),  b_i = row of sB

|w0_i|² is constant and computed once; the rest costs one skinny product with W0. The distance between the norms is
bounded without touching W0: | |w'_i| − |w0_i| | ≤ |b_i A| = (b_i K b_iᵀ)^½.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 14
"""Elements of W0 widened to float32 at a time (64 KiB): memory of this size is used again, where larger pieces are asked
of the system each time, which costs more than the sums (`benchmarks.any_machine`)."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Norms are summed in float32, or in float64 for float64 weights."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _chunks(weight: Tensor) -> list[Tensor]:
    return list(weight.split(max(1, _CHUNK // max(1, weight.shape[1]))))


@torch.no_grad()
def squared_row_norms(weight: Tensor) -> Tensor:
    """|w_i|² (m,) of `weight` (m, n), summed in float32 a few rows at a time, whatever the weight's dtype."""
    dtype = accumulation_dtype(weight.dtype)
    return torch.cat([rows.to(dtype).square().sum(1) for rows in _chunks(weight)])


@torch.no_grad()
def squared_update_norms(a: Tensor, sb: Tensor) -> Tensor:
    """|b_i A|² (m,) of the update sBA from `a` (r, n) and `sb` = sB (m, r); the square of the skip bound."""
    return ((sb @ (a @ a.T)) * sb).sum(1).clamp_min(0)


@torch.no_grad()
def adapted_squared_row_norms(weight: Tensor, a: Tensor, sb: Tensor, *, base: Tensor | None = None) -> Tensor:
    """|w'_i|² (m,) of `weight` + `sb` @ `a`, in float32 (float64 for float64 weights).

    weight (m, n), a (r, n), sb = s·B (m, r); base: `squared_row_norms(weight)` if known. The weight may lie on another
    device than the others; it is brought to theirs a few rows at a time.
    """
    dtype = accumulation_dtype(weight.dtype)
    base = squared_row_norms(weight).to(a.device) if base is None else base
    a, sb = a.to(dtype), sb.to(dtype)
    cross = torch.cat([rows.to(a) @ a.T for rows in _chunks(weight)])
    return (base + 2 * (sb * cross).sum(1) + squared_update_norms(a, sb)).clamp_min(0)
