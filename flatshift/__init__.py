"""Flatshift: pick the data, shift a frozen backbone towards your target, train flat adapters, and see what helps.

The public names, loaded when first used, so that `import flatshift` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Recipe": "experiments.config",
    "load_recipe": "experiments.recipe",
    "train": "experiments.pipeline",
    "resume": "experiments.pipeline",
    "select": "experiments.selecting",
    "sweep": "experiments.sweep",
    "evaluate_run": "experiments.evaluating",
    "build_report": "experiments.report",
    "sinkhorn_potentials": "selection",
    "GotDSelector": "selection",
    "Pool": "selection",
    "GGPO": "regularizers",
    "read_rows": "finetune.data",
    "UserError": "finetune.errors",
}
__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'flatshift' has no attribute {name!r}")
    from flatshift.installation import foreign

    if (told := foreign()) is not None:
        raise ImportError(told)
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
