"""The units of a regression's targets: training sees them standardised, the saved head answers in the user's own.

The head of a backbone is linear last, so that y = offset + scale · (w·h + b) is a head again: scale·w and
offset + scale·b. Before a run is judged and saved, its head becomes that one (`fold_units`), in place. A head without
a bias (decoders in transformers have none) has no place for an offset, so there targets are only scaled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Units:
    """How targets y are seen in training: (y − offset) / scale."""

    mean: float
    """Of the training targets: what a model that has learnt nothing answers."""
    offset: float = 0.0
    scale: float = 1.0
    head: str | None = None
    """The linear layer that answers, as `offset` and `scale` are to be folded into it; None: nothing is to be."""

    def seen(self, target: float) -> float:
        """A target as training sees it."""
        return (target - self.offset) / self.scale


@dataclass(frozen=True)
class OutputLayer:
    """The last layer of a head of one output."""

    name: str
    bias: bool


def units_of(targets: Sequence[float], layer: OutputLayer | None) -> Units:
    """The units of training `targets`; `layer`: the head that standardised ones would be folded into, None: as given.

    Standardised: mean 0 and deviation 1, or, without a bias, root mean square 1. Targets that are all alike keep their
    scale.
    """
    mean = math.fsum(targets) / len(targets)
    if layer is None:
        return Units(mean)
    offset = mean if layer.bias else 0.0
    scale = math.sqrt(math.fsum((y - offset) ** 2 for y in targets) / len(targets))
    return Units(mean, offset, scale or 1.0, layer.name)


def fold_units(parameters: Mapping[str, Tensor], units: Units | None) -> None:
    """Make the head among `parameters` (by plain name) answer in the targets' own units, in place.

    Elementwise, so a shard of the head is folded like the whole of it.
    """
    import torch

    if units is None or units.head is None:
        return
    with torch.no_grad():
        for name, parameter in parameters.items():
            if name == f"{units.head}.weight":
                parameter.mul_(units.scale)
            elif name == f"{units.head}.bias":
                parameter.mul_(units.scale).add_(units.offset)
