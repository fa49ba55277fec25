"""Flatshift: select data, adapt a frozen backbone to your target, train flat adapters, and measure what helps.

Public names are imported on first use, so that `import flatshift` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatshift.api import Run as Run
    from flatshift.api import Selection as Selection
    from flatshift.api import Sweep as Sweep
    from flatshift.api import compare as compare
    from flatshift.api import embedder as embedder
    from flatshift.api import load_recipe as load_recipe
    from flatshift.api import resume as resume
    from flatshift.api import select as select
    from flatshift.api import sweep as sweep
    from flatshift.api import train as train
    from flatshift.experiments.recipe.schema import Recipe as Recipe
    from flatshift.experiments.report.page import build_report as build_report
    from flatshift.experiments.workflows.evaluate import evaluate_run as evaluate_run
    from flatshift.finetune.data.rows import read_rows as read_rows
    from flatshift.finetune.errors import UserError as UserError
    from flatshift.regularizers import GGPO as GGPO
    from flatshift.selection import GotDSelector as GotDSelector
    from flatshift.selection import Pool as Pool
    from flatshift.selection import TfIdfEmbedder as TfIdfEmbedder
    from flatshift.selection import sinkhorn_potentials as sinkhorn_potentials
    from flatshift.selection.errors import SelectionError as SelectionError

__version__ = "0.3.0"

_API = ("Run", "Selection", "Sweep", "load_recipe", "train", "resume", "select", "embedder", "sweep", "compare")
_PUBLIC = {
    "Recipe": "flatshift.experiments.recipe.schema",
    "UserError": "flatshift.finetune.errors",
    "SelectionError": "flatshift.selection.errors",
    **dict.fromkeys(_API, "flatshift.api"),
    "evaluate_run": "flatshift.experiments.workflows.evaluate",
    "build_report": "flatshift.experiments.report.page",
    **dict.fromkeys(("sinkhorn_potentials", "GotDSelector", "TfIdfEmbedder", "Pool"), "flatshift.selection"),
    "GGPO": "flatshift.regularizers",
    "read_rows": "flatshift.finetune.data.rows",
}
__all__ = [*_PUBLIC, "__version__"]


if not TYPE_CHECKING:  # a type checker already knows every public name from the imports above

    def __getattr__(name: str) -> Any:
        if name not in _PUBLIC:
            raise AttributeError(f"module 'flatshift' has no attribute {name!r}")
        return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
