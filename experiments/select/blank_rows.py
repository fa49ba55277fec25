"""Rows without information for a selector: blank texts, and texts without a token that the embedder knows.

Such a row's vector is zero, at squared distance 1 from every unit vector and so nearer than most texts are to one
another: if kept, blanks would rank as the best of the pool. They are skipped and counted like bad records. Zero rows of
the user's own features are kept: only the user knows their meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from flatshift.experiments.recipe.schema import Select
from flatshift.experiments.run.console import Console
from flatshift.experiments.select.pool import Records
from flatshift.finetune.data.rows import Row, require_rows
from flatshift.finetune.data.view import RowView
from flatshift.selection.config import required_inputs

BLANK = "the text is blank"
UNKNOWN = "the embedder knows no token of the text"
_ROWS = 1 << 16
AnyRecords = TypeVar("AnyRecords", bound=Records)


def skips_blank_texts(spec: Select) -> bool:
    """Return True if blank texts are skipped; also for a method without texts, so that controls draw from the same
    pool."""
    return spec.own is None or bool(required_inputs(spec.method) & {"texts", "losses"})


def drop_blank_texts(records: AnyRecords, files: Sequence[str], name: str) -> AnyRecords:
    """Return `records` without those whose text is only white space. Raises UserError if nothing is left."""
    rows = records.rows
    texts = rows.texts if isinstance(rows, RowView) else (row.values["text"] for row in rows)
    blank = np.fromiter((not text or text.isspace() for text in texts), bool, len(rows))
    return _filter_records(records, ~blank, BLANK, files, name)


def nonzero_rows(x: Any) -> np.ndarray:
    """Return (N,) bool: rows of vectors `x` (N, d), in memory or on disk, that are not exactly zero."""
    found = [np.asarray(x[low : low + _ROWS]).any(axis=1) for low in range(0, len(x), _ROWS)]
    return np.concatenate(found) if found else np.zeros(0, dtype=bool)


def drop_unknown_texts(
    records: AnyRecords, x: Any, files: Sequence[str], name: str, console: Console
) -> tuple[AnyRecords, Any, np.ndarray | None]:
    """Return `records` and their vectors without zero vectors, and a mask of the kept rows (None: all).

    Prints the number of skipped records. Raises UserError if nothing is left.
    """
    from flatshift.selection.features import IndexedRows

    known = nonzero_rows(x)
    if known.all():
        return records, x, None
    fewer = _filter_records(records, known, UNKNOWN, files, name)
    gone = fewer.skipped[len(records.skipped) :]
    console.say(f"{name}: skipped {len(gone):,} records, first {gone[0]}")
    return fewer, x[known] if isinstance(x, np.ndarray) else IndexedRows(x, np.flatnonzero(known)), known


def _filter_records(records: AnyRecords, keep: np.ndarray, reason: str, files: Sequence[str], name: str) -> AnyRecords:
    """Return the records where `keep` is true; the others are listed in `skipped`."""
    if keep.all():
        return records
    rows: Any = records.rows
    numbers, gone = np.flatnonzero(keep), np.flatnonzero(~keep)

    def take(some: np.ndarray) -> Sequence[Row]:
        return rows.take(some) if isinstance(rows, RowView) else [rows[i] for i in some.tolist()]

    skipped = [*records.skipped, *(f"{row.where}: {reason}" for row in take(gone))]
    if not len(numbers):
        require_rows([], files=files, purpose=name, skipped=skipped)
    return replace(records, rows=take(numbers), skipped=skipped)
