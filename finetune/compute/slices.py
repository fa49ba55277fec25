"""How many rows of logits are made at once; without torch, for the planner counts them too."""

from __future__ import annotations


def slice_rows(vocabulary: int, device: str, width: int) -> int:
    """Rows of one slice of logits (rows, `vocabulary`), on a device of this kind.

    width: bytes of a number in the products that make them.

    A product of few rows streams the whole head through the processor for them: below 128 rows that is what it costs,
    above 256 a CPU gains nothing, but its caches lose the slice where the vocabulary is small. So a CPU gets 256 rows,
    fewer where these are above 2²⁴ logits, of narrow products above 2²² (which are so much faster that the passes over
    a slice outside of the caches cost more than few rows), never below 128; more where they are below 2²⁰, which the
    calls of a slice would cost. A GPU gets 2²⁷ logits (`benchmarks.any_machine`).
    """
    if device != "cpu":
        return max((1 << 27) // vocabulary, 128)
    most = 1 << (24 if width >= 4 else 22)
    return min(max(256, (1 << 20) // vocabulary), max(128, most // vocabulary))
