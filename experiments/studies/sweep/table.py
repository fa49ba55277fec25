"""Tables of a sweep: cells.parquet and points.csv have a row per cell, curves.parquet one per recorded step.

A cell that failed or stopped early keeps the steps that it recorded; the remaining steps of its plan follow without
metrics, marked with its `status` (`diverged`, `stopped early`, or `failed` for another reason), so that curves along
the steps can account for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flatshift.experiments.results.cells import CURVES, read_result, result_metrics, unreached_status
from flatshift.experiments.studies.cell import Cell
from flatshift.finetune.atomic import atomic_file
from flatshift.finetune.train.trace.files import align_to_plan, read_trace, recorded_steps

_PROGRESS = ("stage", "attempt", "step", "tokens", "lr", "time_s", "record_s")
"""Keys of a trace line that describe its position, not a measurement."""

Row = dict[str, Any]


def write_table(out: Path, cells: Sequence[Cell], *, columns: Mapping[str, Row] | None = None) -> list[Row]:
    """Write cells.parquet, curves.parquet and points.csv, each atomically; return the rows of cells.parquet.

    Rows follow the plan. Cells without a result are left out; if none has one, nothing is written. columns: further
    ones of a cell's row, by its key.
    """
    import pyarrow.parquet as pq

    from flatshift.experiments.results.sweep import concat_tables, rows_to_table, write_cells

    rows: list[Row] = []
    curves = []
    for cell in cells:
        directory = out / "cells" / cell.key
        result = read_result(directory)
        if result is None:
            continue
        trace = read_trace(directory)
        row = {"cell": cell.key, **{key: _to_cell(value) for key, value in cell.point.items()}, "seed": cell.seed}
        if lines := _planned_trace(cell, result, trace):
            curves.append(rows_to_table([{**row, **line} for line in lines]))
        row |= (columns or {}).get(cell.key, {})
        row |= {key: result.get(key) for key in ("status", "reason", "seconds", "flatshift", "code")}
        rows.append(row | (_measured_metrics(result, trace) if result["status"] == "done" else {}))
    if not rows:
        return rows
    write_cells(out, rows)
    if curves:
        with atomic_file(out / CURVES) as temporary:
            pq.write_table(concat_tables(curves, []), temporary)
    else:
        (out / CURVES).unlink(missing_ok=True)
    return rows


def final_metrics(directory: Path) -> Row:
    """Return `<split>.<metric>` and the trace's metrics of the evaluated adapter; empty for a cell that failed."""
    result = read_result(directory)
    if result is None or result["status"] != "done":
        return {}
    return _measured_metrics(result, read_trace(directory))


def _planned_trace(cell: Cell, result: Mapping[str, Any], trace: Sequence[Row]) -> list[Row]:
    """Return a cell's trace at the steps that its recipe records; steps it did not reach are marked."""
    recipe = cell.resolved.recipe
    if recipe.record is None or (result["status"] == "done" and not trace):
        return list(trace)
    return align_to_plan(trace, recorded_steps(recipe.record, recipe.train.steps), unreached_status(result["status"]))


def _measured_metrics(result: Mapping[str, Any], trace: Sequence[Row]) -> Row:
    """Return final metrics: the trace's at the evaluated adapter's step, overridden by those of the evaluation. That
    step is the last, or the best on dev; if it was not recorded, the trace contributes nothing."""
    best = result.get("best_step")
    lines = trace[-1:] if best is None else [line for line in trace if line["step"] == best]
    row = {key: value for key, value in lines[-1].items() if key not in _PROGRESS} if lines else {}
    return row | result_metrics(result)


def _to_cell(value: Any) -> Any:
    """Convert a setting to a table cell: lists to text, NaN to None, infinities unchanged."""
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return None if isinstance(value, float) and math.isnan(value) else value
