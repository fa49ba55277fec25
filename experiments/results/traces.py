"""Traces that cells recorded along the steps, read from directories of cells that are in no table yet."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import json as arrow_json

from flatshift.experiments.results.cells import cell_status, unreached_status

STEP = "step"
"""Axis of a trace: finished optimizer steps."""

_TOGETHER = 1000
"""Most files parsed at once: one file of unusual form only slows its own batch."""


def read_late_traces(
    folders: Sequence[Path], cells: pa.Table, axes: Sequence[str], steps: Iterable[int]
) -> tuple[list[pa.Table], list[dict[str, Any]]]:
    """Return the curves.parquet content of cells missing from it: complete traces as tables, all others as rows.

    A cell that failed or stopped early gets rows without metrics for the planned steps it did not reach: those of its
    trace.json or, if it ended before that was written, the `steps` that others recorded.

    Raises:
        UserError: a line that is not a JSON object, other than a torn last one.
    """
    if not folders:
        return [], []
    names = [n for n in ("cell", "seed", "status", "diverged", *axes) if n in cells.column_names]
    about = cells.select(names)
    place = {key: at for at, key in enumerate(about.column("cell").to_pylist())}
    told = about.select([n for n in names if n not in ("status", "diverged")])
    tables: list[pa.Table] = []
    others: list[Path] = []
    for start in range(0, len(folders), _TOGETHER):
        batch = folders[start : start + _TOGETHER]
        lines, counts = _read_complete(batch)
        others += [folder for folder in batch if folder not in counts]
        if lines is None:
            continue
        rows = np.repeat([place[folder.name] for folder in counts], list(counts.values()))
        head = told.take(pa.array(rows))
        tables.append(pa.table([*head.columns, *lines.columns], names=[*head.column_names, *lines.column_names]))
    known = {*steps, *(step for table in tables for step in table.column(STEP).unique().to_pylist())}
    return tables, _read_individually(others, about, place, known)


def _read_complete(folders: Sequence[Path]) -> tuple[pa.Table | None, dict[Path, int]]:
    """Return the traces that can be parsed unchanged, and the number of lines per folder; (None, {}) without any.

    Such a trace has one line for each step that trace.json names, in its order; nothing was undone or rewritten.
    """
    from flatshift.finetune.run_directory import TRACE

    pieces: list[bytes] = []
    planned: dict[Path, list[int]] = {}
    for folder in folders:
        steps, file = _planned_steps(folder), folder / TRACE
        lines = file.read_bytes() if steps and file.is_file() else b""
        if steps and lines.endswith(b"\n") and lines.count(b"\n") == len(steps) and b"rewound_to" not in lines:
            pieces.append(lines)
            planned[folder] = steps
    table = _parse_lines(b"".join(pieces))
    ends = np.cumsum([0, *map(len, planned.values())]).tolist()
    if table is None or table.num_rows != ends[-1]:
        return None, {}
    found = table.column(STEP).to_pylist()
    good = [found[i:j] == steps for (i, j), steps in zip(pairwise(ends), planned.values(), strict=True)]
    counts = {folder: len(steps) for (folder, steps), right in zip(planned.items(), good, strict=True) if right}
    if not counts:
        return None, {}
    return table.filter(pa.array(np.repeat(good, np.diff(ends)))), counts


def _parse_lines(lines: bytes) -> pa.Table | None:
    """Parse JSON lines to a table of numbers and plain text; None for anything else, or if a step is missing."""
    try:
        table = arrow_json.read_json(io.BytesIO(lines), read_options=arrow_json.ReadOptions(use_threads=False))
    except pa.ArrowException:
        return None
    types = [field.type for field in table.schema]
    if any(pa.types.is_nested(t) or pa.types.is_temporal(t) for t in types):
        return None
    return table if STEP in table.column_names and pa.types.is_integer(table.column(STEP).type) else None


def _read_individually(
    folders: Sequence[Path], about: pa.Table, place: dict[str, int], known: set[int]
) -> list[dict[str, Any]]:
    """Return rows of the traces in `folders`; of two lines for a step the later one counts."""
    from flatshift.finetune.train.trace.files import align_to_plan, read_trace

    traces = {folder: read_trace(folder) for folder in folders}
    known = {*known, *(int(line[STEP]) for lines in traces.values() for line in lines if STEP in line)}
    rows = []
    for folder, lines in traces.items():
        (row,) = about.slice(place[folder.name], 1).to_pylist()
        status = cell_status({"status": row.pop("status", None), "diverged": row.pop("diverged", None)})
        planned = _planned_steps(folder)
        if planned is None:
            planned = [] if status == "done" else sorted(known)
        rows += [
            {**row, **line} for line in (align_to_plan(lines, planned, unreached_status(status)) if planned else lines)
        ]
    return rows


def _planned_steps(folder: Path) -> list[int] | None:
    from flatshift.finetune.train.trace.files import ABOUT

    try:
        steps = json.loads((folder / ABOUT).read_text(encoding="utf-8"))["steps"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return steps if isinstance(steps, list) else None
