"""How fast a stage went, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RATES = frozenset({"tokens_s", "tflops", "mfu", "hfu"})
"""What a line of metrics.jsonl has of them (`finetune.train.throughput`)."""


def rate_text(figures: Mapping[str, Any]) -> str:
    """`12.3k tokens/s, 35 GFLOP/s, MFU 41 %`, as far as it is known."""
    parts = []
    if figures.get("tokens_s"):
        rate = figures["tokens_s"]
        parts.append(f"{rate / 1000:.3g}k tokens/s" if rate >= 1000 else f"{rate:.3g} tokens/s")
    if figures.get("tflops"):
        rate = figures["tflops"]
        parts.append(f"{rate:.3g} TFLOP/s" if rate >= 1 else f"{1000 * rate:.3g} GFLOP/s")
    if figures.get("mfu"):
        parts.append(f"MFU {100 * figures['mfu']:.0f} %")
    return ", ".join(parts)
