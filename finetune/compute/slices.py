"""Rows of logits computed at once; without torch, because the planner uses it too."""

from __future__ import annotations


def slice_rows(vocabulary: int, device: str, width: int) -> int:
    """Return the rows of one slice of logits (rows, `vocabulary`) on this kind of device.

    width: bytes per number in the products that compute them.

    A product of few rows streams the whole head through the processor: below 128 rows that dominates; above 256 a CPU
    gains nothing, and with a small vocabulary the slice falls out of its caches. So a CPU gets 256 rows, fewer if these
    exceed 2²⁴ logits, or 2²² for narrow products (these are so fast that passes over an uncached slice cost more than
    having few rows), but at least 128; more if 256 rows are below 2²⁰ logits, to amortise the calls per slice. A GPU
    gets 2²⁷ logits (`benchmarks.any_machine`).
    """
    if device != "cpu":
        return max((1 << 27) // vocabulary, 128)
    most = 1 << (24 if width >= 4 else 22)
    return min(max(256, (1 << 20) // vocabulary), max(128, most // vocabulary))
