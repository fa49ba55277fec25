"""Which columns of a sweep's table are axes, and which of a paired design merely move with another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from experiments.report.sweeptable import SweepTable, _encode

if TYPE_CHECKING:
    import pyarrow as pa

SPLITS = ("train", "dev", "test")
_METRICS = frozenset(
    {
        "loss",
        "error",
        "accuracy",
        "perplexity",
        "bits_per_byte",
        "f1_macro",
        "matthews",
        "exact_match",
        "chrf",
        "f1_micro",
        "average_precision",
        "pearson",
        "spearman",
        "rmse",
        "mae",
        "pseudo_perplexity",
        "majority_floor",
        "f1_floor",
        "mean_floor",
        "exact_error",
        "error_clean",
        "error_noisy",
        "memorised",
        "recovered",
    }
)
_RECORDED = ("grad.", "update.", "sharpness.")
_OWN = frozenset({"cell", "seed", "status"})


def axes_of_table(table: pa.Table, declared: Iterable[str] | None) -> tuple[list[str], dict[str, Any]]:
    """(columns that vary, {column: value} of those that do not)."""
    if declared is None:
        declared = [c for c in table.column_names if c not in _OWN and "." in c and not _is_figure(c)]
    levels = {c: _encode(table, c)[0] for c in declared} if table.num_rows else {}
    return [c for c, v in levels.items() if len(v) > 1], {c: v[0] for c, v in levels.items() if len(v) == 1}


def _is_figure(column: str) -> bool:
    head, _, tail = column.partition(".")
    return column.startswith(_RECORDED) or (head in SPLITS and tail.split(".")[0] in _METRICS)


def leading(table: pa.Table, axes: list[str]) -> list[str]:
    """The axes of a paired design without those that merely move with the first one: the rank, else a numeric one."""
    found = SweepTable(table, axes)
    first = min(axes, key=lambda a: (not a.endswith("rank"), not found.numeric(a), axes.index(a)), default=None)
    if first is None:
        return axes
    count = len(found.levels(first))
    together = [a for a in axes if a != first and len(found.settings([first, a])) == count]
    return [a for a in axes if a not in together]
