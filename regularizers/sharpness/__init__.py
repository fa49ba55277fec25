"""Sharpness of the minimum found by an adapter: named measures in two spaces, by ordinary passes only.

    from flatshift.regularizers.sharpness import Sharpness, measure

    result = measure(peft_model, loss, Sharpness(spaces=("adapter",)), seed=0)
    result.measures["adapter"]["lambda_max"].value

`loss` is a callable without arguments that returns the loss over fixed batches: a scalar tensor, or an iterable of
terms (one per micro-batch, computed one at a time) to be summed. It is called with the model in evaluation mode, and
must be deterministic at the same weights. Nothing here takes a second derivative by autograd, writes a frozen weight or
leaves a gradient behind: curvature comes from central differences of gradients,

    H v ≈ (g(w + h v) − g(w − h v)) / 2h,

so fused attention and any backbone that has a backward pass for its inputs will do.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flatshift.regularizers.config import Sharpness

if TYPE_CHECKING:
    from flatshift.regularizers.sharpness.measures import measure

__all__ = ["Sharpness", "measure"]


def __getattr__(name: str) -> Any:
    if name == "measure":  # imports torch
        return import_module("flatshift.regularizers.sharpness.measures").measure
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
