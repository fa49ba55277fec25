"""Reports: build one self-contained offline HTML page from run directories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatshift.experiments.report.page import build_report

__all__ = ["build_report"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flatshift.experiments.report import page

    return getattr(page, name)
