"""Rows that say nothing to a selector: blank texts, and texts of which the embedder knows no token.

Such a row's vector is zero, which lies at squared distance 1 from every vector of length one, nearer than most texts
lie to one another: left in, blanks come out as the best of the pool. They are skipped and counted as bad records are.
Rows of the user's own features stay: what they say is the user's to know.
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
from flatshift.selection.config import needs

BLANK = "the text is blank"
UNKNOWN = "the embedder knows no token of the text"
_ROWS = 1 << 16
AnyRecords = TypeVar("AnyRecords", bound=Records)


def drops_blanks(spec: Select) -> bool:
    """Whether blank texts are left out: a control that looks at none too, or it would draw from another pool."""
    return spec.own is None or bool(needs(spec.method) & {"texts", "losses"})


def without_blank(records: AnyRecords, files: Sequence[str], name: str) -> AnyRecords:
    """`records` less those whose text is white space alone. Raises UserError where nothing is left."""
    rows = records.rows
    texts = rows.texts if isinstance(rows, RowView) else (row.values["text"] for row in rows)
    blank = np.fromiter((not text or text.isspace() for text in texts), bool, len(rows))
    return _kept(records, ~blank, BLANK, files, name)


def known_rows(x: Any) -> np.ndarray:
    """(N,) bool: the rows of vectors `x` (N, d), in memory or on disk, that are not exactly zero."""
    found = [np.asarray(x[low : low + _ROWS]).any(axis=1) for low in range(0, len(x), _ROWS)]
    return np.concatenate(found) if found else np.zeros(0, dtype=bool)


def without_unknown(
    records: AnyRecords, x: Any, files: Sequence[str], name: str, console: Console
) -> tuple[AnyRecords, Any, np.ndarray | None]:
    """`records` and their vectors less those whose vector is zero, and which rows stay (None: all). Says how many went.

    Raises UserError where nothing is left.
    """
    from flatshift.selection.features import TakenRows

    known = known_rows(x)
    if known.all():
        return records, x, None
    fewer = _kept(records, known, UNKNOWN, files, name)
    gone = fewer.skipped[len(records.skipped) :]
    console.say(f"{name}: skipped {len(gone):,} records, first {gone[0]}")
    return fewer, x[known] if isinstance(x, np.ndarray) else TakenRows(x, np.flatnonzero(known)), known


def _kept(records: AnyRecords, keep: np.ndarray, reason: str, files: Sequence[str], name: str) -> AnyRecords:
    """The records where `keep` is true; the others are told of in `skipped`."""
    if keep.all():
        return records
    rows: Any = records.rows
    numbers, gone = np.flatnonzero(keep), np.flatnonzero(~keep)

    def take(some: np.ndarray) -> Sequence[Row]:
        return rows.take(some) if isinstance(rows, RowView) else [rows[i] for i in some.tolist()]

    skipped = [*records.skipped, *(f"{row.where}: {reason}" for row in take(gone))]
    if not len(numbers):
        require_rows([], files=files, what=name, skipped=skipped)
    return replace(records, rows=take(numbers), skipped=skipped)
