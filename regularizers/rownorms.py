"""Row norms of W' = W0 + sBA without ever forming W'.

    |w'_i|² = |w0_i|² + 2 b_i·C_i + b_i K b_iᵀ,   C = W0 Aᵀ (m, r),  K = A Aᵀ (r, r),  b_i = row of sB

|w0_i|² is constant and computed once; the rest costs one skinny product with W0. The distance between the norms is
bounded without touching W0: | |w'_i| − |w0_i| | ≤ |b_i A| = (b_i K b_iᵀ)^½.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 18
"""Elements of W0 widened at a time for the product with A (1 MiB in float32)."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Norms are summed in float32, or in float64 for float64 weights."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@torch.no_grad()
def squared_row_norms(weight: Tensor) -> Tensor:
    """|w_i|² (m,) of `weight` (m, n), summed in float32 whatever the weight's dtype, which is not copied."""
    return torch.linalg.vector_norm(weight, dim=1, dtype=accumulation_dtype(weight.dtype)).square()


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
    parts = weight.split(max(1, _CHUNK // max(1, weight.shape[1])))
    cross = torch.cat([rows.to(a) @ a.T for rows in parts])
    return (base + 2 * (sb * cross).sum(1) + squared_update_norms(a, sb)).clamp_min(0)
