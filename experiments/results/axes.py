"""Which columns of a sweep's table are axes, and which of a paired design merely move with another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from experiments.results.table import SweepTable, encode
from finetune.evaluate.metrics import METRICS

SPLITS = ("train", "dev", "test")
_RECORDED = ("grad.", "update.", "sharpness.")
_OWN = frozenset({"cell", "seed", "status"})


def axes_of_table(table: pa.Table, declared: Iterable[str] | None) -> tuple[list[str], dict[str, Any]]:
    """(columns that vary, {column: value} of those that do not)."""
    if declared is None:
        declared = [c for c in table.column_names if c not in _OWN and "." in c and not _is_figure(c)]
    levels = {c: encode(table, c)[0] for c in declared} if table.num_rows else {}
    return [c for c, v in levels.items() if len(v) > 1], {c: v[0] for c, v in levels.items() if len(v) == 1}


def _is_figure(column: str) -> bool:
    head, _, tail = column.partition(".")
    return column.startswith(_RECORDED) or (head in SPLITS and tail.split(".")[0] in METRICS)


@dataclass(frozen=True)
class Together:
    """An axis of a paired design that merely moves with another one, so that no curve runs along it."""

    axis: str
    first: str
    """The axis that it moves with."""
    at: Mapping[Any, Any]
    """Its value at each value of `first`."""


def leading(table: pa.Table, axes: list[str]) -> tuple[list[str], list[Together]]:
    """(axes of a paired design that curves run along, those that merely move with the first of them).

    The first is the rank, else a numeric axis.
    """
    found = SweepTable(table, axes)
    first = min(axes, key=lambda a: (not a.endswith("rank"), not found.numeric(a), axes.index(a)), default=None)
    if first is None:
        return axes, []
    pairs = {a: [(w[first], w[a]) for w in found.settings([first, a])] for a in axes if a != first}
    together = [Together(a, first, dict(p)) for a, p in pairs.items() if len(p) == len(found.levels(first))]
    moving = {one.axis for one in together}
    return [a for a in axes if a not in moving], together
