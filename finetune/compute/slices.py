"""Rows of logits computed at once; without torch, because the planner uses it too."""

from __future__ import annotations


def slice_rows(vocabulary: int, device: str, width: int) -> int:
    """Return the rows of one slice of logits (rows, `vocabulary`) on this kind of device.

    width: bytes per number in the products that compute them.

    A product of few rows streams the whole head through the processor: below 128 rows that dominates, above 256 a CPU
    gains nothing. So a CPU gets 256 rows, fewer if these exceed 2²⁷ bytes, but at least 128; more if 256 rows are below
    2²⁰ logits, to amortise the calls per slice. A GPU gets 2²⁷ logits (`benchmarks.any_machine`).
    """
    if device != "cpu":
        return max((1 << 27) // vocabulary, 128)
    return min(max(256, (1 << 20) // vocabulary), max(128, (1 << 27) // (vocabulary * width)))


def slice_columns(vocabulary: int, device: str) -> int:
    """Return the columns of a slice of logits whose exponentials are computed at once, in float32.

    256 rows of some 4,096 columns stay in a CPU's second-level cache while several passes go over them.
    """
    return -(-vocabulary // max(vocabulary // 4096, 1)) if device == "cpu" else vocabulary
