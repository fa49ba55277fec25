"""A sweep's cells as a table: which columns are axes, and means with intervals over seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.report.formats import bounds
from experiments.stats import Interval, t_interval
from finetune.errors import UserError

INTERPOLATION = 0.1
"""ε of the effective model complexity: training data counts as fitted at a mean train error of at most this."""

_SPLITS = ("train", "dev", "test")
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
        "majority_floor",
    }
)
_OWN = frozenset({"cell", "seed", "status"})


@dataclass(frozen=True)
class SweepData:
    """Rows of cells.parquet; `axes` are the grid keys that vary, `fixed` those with one value."""

    rows: list[dict[str, Any]]
    axes: tuple[str, ...]
    fixed: dict[str, Any]

    @property
    def done(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row.get("status", "done") == "done"]

    @property
    def failed(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row.get("status", "done") != "done"]

    @property
    def seeds(self) -> int:
        return len({row.get("seed") for row in self.rows})

    def values(self, axis: str) -> list[Any]:
        """Distinct values of an axis: numbers in order, else in order of appearance."""
        found = list(dict.fromkeys(row[axis] for row in self.rows if row.get(axis) is not None))
        return sorted(found) if all(isinstance(v, int | float) for v in found) else found

    def has(self, column: str) -> bool:
        return any(_number(row.get(column)) is not None for row in self.done)

    def error_columns(self) -> tuple[str, str]:
        """(test column, train column): error where the task has one, else loss."""
        name = "error" if self.has("test.error") or self.has("train.error") else "loss"
        judged = "test" if self.has(f"test.{name}") or not self.has(f"dev.{name}") else "dev"
        return f"{judged}.{name}", f"train.{name}"

    def at(self, column: str, where: dict[str, Any]) -> Interval | None:
        """t-interval over seeds of the finished cells that match `where` (axis: value)."""
        rows = [row for row in self.done if all(row.get(k) == v for k, v in where.items())]
        values = [v for row in rows if (v := _number(row.get(column))) is not None]
        return t_interval(values, bounds=bounds(column.partition(".")[2])) if values else None

    def curve(self, column: str, axis: str, where: dict[str, Any]) -> list[tuple[Any, Interval]]:
        """(axis value, interval) along `axis` with the other axes held at `where`."""
        points = [(v, self.at(column, {**where, axis: v})) for v in self.values(axis)]
        return [(v, p) for v, p in points if p is not None]

    def settings(self) -> list[dict[str, Any]]:
        """Every combination of axis values that was run, numbers ascending."""
        seen = dict.fromkeys(tuple(row.get(a) for a in self.axes) for row in self.rows)

        def key(setting: tuple) -> list[tuple]:
            return [(v is not None, isinstance(v, str), v if v is not None else 0) for v in setting]

        return [dict(zip(self.axes, setting, strict=True)) for setting in sorted(seen, key=key)]

    def best(self, column: str) -> tuple[dict[str, Any], Interval] | None:
        """The setting with the lowest mean of `column`, and that mean; None if nothing was measured."""
        means = [(where, p) for where in self.settings() if (p := self.at(column, where)) is not None]
        return min(means, key=lambda item: item[1].value) if means else None

    def threshold(self, axis: str, where: dict[str, Any]) -> Any | None:
        """First value of `axis` whose mean train error is at most `INTERPOLATION`; None if never or not measured."""
        points = self.curve("train.error", axis, where) if self.has("train.error") else []
        return next((v for v, p in points if p.value <= INTERPOLATION), None)


def _number(value: Any) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None


def read_sweep(folder: Path) -> SweepData | None:
    """cells.parquet, or the finished cells/<hash>/result.json when it has not been written yet; None without either.

    Axes are the keys of `grid` in sweep.json or, without it, every dotted column that is not `<split>.<metric>`
    (`train.steps` is an axis, `train.loss` is not).
    """
    path = folder / "cells.parquet"
    declared: Sequence[str] | None = None
    plan = folder / "sweep.json"
    if plan.is_file():
        try:
            declared = list(json.loads(plan.read_text(encoding="utf-8"))["grid"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{plan}: has no `grid`; run the sweep again, it keeps its cells") from error
    if path.is_file():
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            table = pq.read_table(path)
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{path}: not a readable Parquet file; run the sweep again, it keeps its cells") from error
        rows = table.to_pylist()
    elif (folder / "cells").is_dir():
        rows = [_flat_result(file) for file in sorted((folder / "cells").glob("*/result.json"))]
    else:
        return None
    rows = [_tidy(row) for row in rows]
    columns = dict.fromkeys(key for row in rows for key in row)
    if declared is None:
        declared = [c for c in columns if c not in _OWN and "." in c and not _is_metric(c)]
    distinct = {c: list(dict.fromkeys(repr(r.get(c)) for r in rows)) for c in declared}
    fixed = {c: rows[0].get(c) for c in declared if len(distinct[c]) == 1}
    return SweepData(rows, tuple(c for c in declared if len(distinct[c]) > 1), fixed)


def _tidy(row: dict[str, Any]) -> dict[str, Any]:
    """Lists become text (they must compare and group); error is 1 − accuracy where only accuracy was measured."""
    row = {k: ", ".join(map(str, v)) if isinstance(v, list | tuple) else v for k, v in row.items()}
    for split in _SPLITS:
        accuracy = _number(row.get(f"{split}.accuracy"))
        if accuracy is not None and _number(row.get(f"{split}.error")) is None:
            row[f"{split}.error"] = 1 - accuracy
    return row


def _is_metric(column: str) -> bool:
    head, _, tail = column.partition(".")
    return head in _SPLITS and (tail in _METRICS or tail.split(".")[0] in _METRICS)


def _flat_result(file: Path) -> dict[str, Any]:
    """The row of cells.parquet that a result.json stands for."""
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
        row = {"cell": file.parent.name, **tree["point"], "seed": tree["seed"], "status": tree["status"]}
        row["reason"], row["seconds"] = tree.get("reason"), tree.get("seconds")
        for split, metrics in tree["metrics"].items():
            row |= {f"{split}.{name}": cell["value"] for name, cell in metrics.items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{file}: not a cell result; delete it and run the sweep again") from error
    return row
