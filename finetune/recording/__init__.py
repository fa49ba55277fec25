"""What a run writes down on its way: losses and errors, what the adapter has become, and how curved its place is.

    recorded_steps(Record(), 100)                # (0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 100)
    judged = per_example(model, examples, task=task, batch_size=32, pad_id=0, device=device)
    split_figures("train", judged, recording.flipped)
    adapter_figures(AdaptedLayers(model).factors())

`finetune.loop` drives a `Recorder` made of these pieces; the rest are functions of what they are given.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "recorded_steps": "steps",
    "stability_threshold": "steps",
    "Flipped": "figures",
    "Judged": "figures",
    "split_figures": "figures",
    "per_example": "judging",
    "AdaptedLayers": "factors",
    "LayerFactors": "factors",
    "adapter_figures": "factors",
    "global_norm": "factors",
    "gradient_figures": "factors",
    "curvature_figures": "curvature",
    "Recorder": "recorder",
    "Recording": "recorder",
    "ABOUT": "trace",
    "about": "trace",
    "read_trace": "trace",
    "as_planned": "trace",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
