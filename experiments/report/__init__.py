"""Reports: run directories in, one self-contained offline HTML page out.

from experiments.report import build_report, write_plots
build_report([Path("runs/first")], out=Path("runs/first/report.html"))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.report.page import build_report, write_plots
    from experiments.report.projection import project
    from experiments.report.sweepdata import read_sweep

__all__ = ["build_report", "project", "read_sweep", "write_plots"]

_HOMES = {"build_report": "page", "write_plots": "page", "project": "projection", "read_sweep": "sweepdata"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
