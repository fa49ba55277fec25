"""Compare the information an adapter can store with that of its training labels, before step 1.

    Capacity.of(engine.parameters, rank=8, labels=batches.labels(steps), each=1.0, counted="tokens").line()

The rule is that of "LoRA Without Regret" (Schulman and Thinking Machines Lab, 2025): a language model stores about 2
bits of knowledge per parameter (Allen-Zhu and Li, arXiv 2404.05405), a data set asks for at most its description
length, about 1 bit (0.69 nats) per target token or log2 of the number of classes per label, and LoRA learns like full
fine-tuning while the first exceeds the second. Patterns that examples share take less (`benchmarks.rate_advice`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from ..tasks import Task

BITS_OF_PARAMETER = 2.0
BITS_OF_TOKEN = 1.0


def bits_per_label(task: Task, classes: int | None) -> float | None:
    """Return the bits needed to memorise one label: of a token, of which answer is preferred, of one class among
    `classes`, or one bit for each of them; None for a number, which has no such count."""
    if task.traits.has_targets:
        return None
    if not task.traits.is_sequence_level:
        return BITS_OF_TOKEN
    assert classes is not None
    return float(classes) if task.multi else math.log2(classes)


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Bits an adapter can store and bits its labels need."""

    parameters: int
    factors: int  # number of these in LoRA factors, proportional to the rank
    rank: int
    labels: int  # distinct training labels that the run sees
    each: float  # bits per label
    counted: str  # unit of `labels` for printing, such as "tokens"

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor], *, rank: int, labels: int, each: float, counted: str) -> Self:
        """Build from the trained tensors (unsharded), by name."""
        sizes = {name: tensor.numel() for name, tensor in parameters.items()}
        factors = sum(size for name, size in sizes.items() if ".lora_" in name)
        return cls(
            parameters=sum(sizes.values()), factors=factors, rank=rank, labels=labels, each=each, counted=counted
        )

    @property
    def ratio(self) -> float:
        """Return the bits that the adapter could store ÷ bits of the labels."""
        return BITS_OF_PARAMETER * self.parameters / (self.each * self.labels)

    @property
    def enough(self) -> int | None:
        """Return the smallest rank at which the ratio is 1; None if no LoRA factor trains."""
        if not self.factors:
            return None
        fixed = self.parameters - self.factors
        missing = self.each * self.labels / BITS_OF_PARAMETER - fixed
        return max(1, math.ceil(missing * self.rank / self.factors))

    def line(self) -> str:
        """Format both numbers in one line."""
        counted = "target tokens" if self.counted == "tokens" else self.counted
        stored, required = BITS_OF_PARAMETER * self.parameters, self.each * self.labels
        text = (
            f"capacity: {self.parameters:,} trained numbers hold some {_format_bits(stored)} ({BITS_OF_PARAMETER:g} "
            f"each); to memorise the run's {self.labels:,} {counted} takes up to {_format_bits(required)} "
            f"({self.each:.3g} each)"
        )
        if self.enough is None:
            return text
        holds = "holds" if self.ratio >= 1 else "would hold"
        return f"{text}, what adapter.rank {self.enough:,} {holds} (now {self.rank:,})"


def _format_bits(count: float) -> str:
    for unit in ("bit", "kbit", "Mbit"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} Gbit"
