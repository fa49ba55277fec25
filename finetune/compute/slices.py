"""How many rows of logits are made at once; without torch, for the planner counts them too."""

from __future__ import annotations


def slice_rows(vocabulary: int, device: str) -> int:
    """Rows of one slice of logits (rows, `vocabulary`), on a device of this kind.

    A product of few rows streams the whole head through the processor for them: below 128 rows that is what it costs,
    above 256 a CPU gains nothing, but its caches lose the slice where the vocabulary is small. So a CPU gets 256 rows,
    fewer where these are above 2²² logits (16 MiB in float32), never below 128; more where they are below 2²⁰, which
    the calls of a slice would cost. A GPU gets 2²⁷ logits (`benchmarks.any_machine`).
    """
    if device != "cpu":
        return max((1 << 27) // vocabulary, 128)
    return min(max(256, (1 << 20) // vocabulary), max(128, (1 << 22) // vocabulary))
