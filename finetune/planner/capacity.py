"""What an adapter could hold beside what its rows could ask of it, before step 1.

    Capacity.of(engine.parameters, rank=8, labels=batches.labels(steps), each=1.0, counted="tokens").line()

The rule is that of "LoRA Without Regret" (Schulman and Thinking Machines Lab, 2025): a language model holds some 2 bits
of knowledge a parameter (Allen-Zhu and Li, arXiv 2404.05405), a data set asks for at most its description length, about
1 bit (0.69 nats) a supervised token, and LoRA learns as full fine-tuning does while the first exceeds the second. Of a
class the description length is log2 of how many there are. It is what knowing every label by heart would take; what
rows have in common takes less (`benchmarks.rate_advice` says how much the ratio predicts).
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


def bits_each(task: Task, classes: int | None) -> float | None:
    """Bits that knowing one label takes: of a token, of which answer is liked, of one class among `classes`, or of each
    of them; None for a number, which has no such count."""
    if task.has_targets:
        return None
    if not task.is_sequence_level:
        return BITS_OF_TOKEN
    assert classes is not None
    return float(classes) if task.multi else math.log2(classes)


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Two numbers of bits."""

    parameters: int
    """All that trains."""
    factors: int
    """Of these, numbers of LoRA's factors, which are as many times more as the rank is."""
    rank: int
    labels: int
    """Different supervised labels that the run sees."""
    each: float
    """Bits of one."""
    counted: str
    """What labels are, for a reader."""

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor], *, rank: int, labels: int, each: float, counted: str) -> Self:
        """Of what trains, whole tensors by name."""
        sizes = {name: tensor.numel() for name, tensor in parameters.items()}
        factors = sum(size for name, size in sizes.items() if ".lora_" in name)
        return cls(
            parameters=sum(sizes.values()), factors=factors, rank=rank, labels=labels, each=each, counted=counted
        )

    @property
    def ratio(self) -> float:
        """Bits that the adapter could hold ÷ bits of the labels."""
        return BITS_OF_PARAMETER * self.parameters / (self.each * self.labels)

    @property
    def enough(self) -> int | None:
        """The smallest rank at which the ratio is 1; None where no factor trains."""
        if not self.factors:
            return None
        fixed = self.parameters - self.factors
        missing = self.each * self.labels / BITS_OF_PARAMETER - fixed
        return max(1, math.ceil(missing * self.rank / self.factors))

    def line(self) -> str:
        """For a person, in one line."""
        held, asked = BITS_OF_PARAMETER * self.parameters, self.each * self.labels
        said = (
            f"capacity: {self.parameters:,} trained numbers hold some {_bits(held)} ({BITS_OF_PARAMETER:g} each); to "
            f"know the run's {self.labels:,} supervised {self.counted} by heart takes up to {_bits(asked)} "
            f"({self.each:.3g} each)"
        )
        if self.enough is None:
            return said
        holds = "holds" if self.ratio >= 1 else "would hold"
        return f"{said}, what adapter.rank {self.enough:,} {holds} (now {self.rank:,})"


def _bits(count: float) -> str:
    """As 12 kbit."""
    for unit in ("bit", "kbit", "Mbit"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} Gbit"
