"""Regularizers added to a training step to find flat minima. Pure torch; PEFT models are recognised by duck typing.

    from flatshift.regularizers import GGPO, build

    regularizer = build(GGPO(sigma=0.05)).attach(peft_model, seed=0, total_steps=200)
    with regularizer.step(t):
        loss.backward()

GGPO's signed low-rank noise has the *same covariance* as the dense Gaussian noise of the published method, never the
same distribution. Its default mode is our dimensionless reading of the published idea; the literal form (`mode: paper`)
is Flat-LoRA in practice, because squared gradient norms are many orders below squared weight norms.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flatshift.regularizers.config import (
    ASAM,
    BAR,
    GGPO,
    MGPO,
    MSAM,
    SAM,
    BiLora,
    FlatLora,
    LoraSAM,
    NEFTune,
    Plain,
    RegularizerConfig,
    RegularizerError,
)

if TYPE_CHECKING:
    from flatshift.regularizers.methods.ggpo import GGPORegularizer
    from flatshift.regularizers.protocol import PlainRegularizer, Regularizer, build
    from flatshift.regularizers.trainer import RegularizerCallback, TwoPassMixin

_HOMES = {
    "GGPORegularizer": "methods.ggpo",
    "PlainRegularizer": "protocol",
    "Regularizer": "protocol",
    "RegularizerCallback": "trainer",
    "TwoPassMixin": "trainer",
    "build": "protocol",
}
"""Public names whose modules import torch; loaded on first use."""

__all__ = [
    "ASAM",
    "BAR",
    "GGPO",
    "MGPO",
    "MSAM",
    "SAM",
    "BiLora",
    "FlatLora",
    "GGPORegularizer",
    "LoraSAM",
    "NEFTune",
    "Plain",
    "PlainRegularizer",
    "Regularizer",
    "RegularizerCallback",
    "RegularizerConfig",
    "RegularizerError",
    "TwoPassMixin",
    "build",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
