"""Cells of a sweep on one backbone on the GPU, stacked beside one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from benchmarks.gpu.measurements import Figures


def stacked(
    *,
    device: str,
    tokens: int = 64,
    rounds: int = 3,
    turn: int = 3,
    ranks: Sequence[int] = (1, 4, 16, 64),
    seeds: int = 8,
    precision: Literal["fp32", "bf16"] = "bf16",
) -> Figures:
    """Seconds per cell and update, stacked and alone."""
    from benchmarks.sweep_stacked import times

    found = times(tokens, rounds, turn, device=device, ranks=tuple(ranks), seeds=seeds, precision=precision)
    return {"seconds": {"ours": found["stacked"], "peer": found["alone"]}}
