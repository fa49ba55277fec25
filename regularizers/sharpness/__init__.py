"""How sharp is the minimum that an adapter lies in: named measures in two spaces, by ordinary passes only.

    from regularizers.sharpness import Sharpness, measure

    found = measure(peft_model, loss, Sharpness(spaces=("adapter",)), seed=0)
    found.measures["adapter"]["lambda_max"].value

`loss` is a callable without arguments that gives the loss over fixed batches: a scalar tensor, or an iterable of terms
(one per micro-batch, made one at a time) whose sum it is. It is called with the model in evaluation mode, and must give
the same value whenever it is called at the same weights. Nothing here takes a second derivative by autograd, writes a
frozen weight or leaves a gradient behind: curvature comes from central differences of gradients,

    H v ≈ (g(w + h v) − g(w − h v)) / 2h,

so fused attention and any backbone that has a backward pass for its inputs will do.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regularizers.sharpness.config import Sharpness
    from regularizers.sharpness.curvature import Hessian, hutchinson, lanczos, power_iteration
    from regularizers.sharpness.estimates import Estimate
    from regularizers.sharpness.full import FullSpace
    from regularizers.sharpness.measuring import Measured, measure
    from regularizers.sharpness.neighbourhood import ascent_rise, expected_rise
    from regularizers.sharpness.objective import Objective
    from regularizers.sharpness.slices import line, plane
    from regularizers.sharpness.spaces import AdapterSpace, Space

_HOMES = {
    "AdapterSpace": "spaces",
    "Estimate": "estimates",
    "FullSpace": "full",
    "Hessian": "curvature",
    "Measured": "measuring",
    "Objective": "objective",
    "Sharpness": "config",
    "Space": "spaces",
    "ascent_rise": "neighbourhood",
    "expected_rise": "neighbourhood",
    "hutchinson": "curvature",
    "lanczos": "curvature",
    "line": "slices",
    "measure": "measuring",
    "plane": "slices",
    "power_iteration": "curvature",
}

__all__ = [
    "AdapterSpace",
    "Estimate",
    "FullSpace",
    "Hessian",
    "Measured",
    "Objective",
    "Sharpness",
    "Space",
    "ascent_rise",
    "expected_rise",
    "hutchinson",
    "lanczos",
    "line",
    "measure",
    "plane",
    "power_iteration",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
