"""Inputs of a selection: pools of any size as views of a file on disk, targets as lists; pieces of texts.

Rows without information for a selector are skipped and counted like bad records: blank texts, and texts without a token
that the embedder knows. Such a row's vector is zero, at squared distance 1 from every unit vector and so nearer than
most texts are to one another: if kept, blanks would rank as the best of the pool. Zero rows of the user's own features
are kept: only the user knows their meaning.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from flatshift.experiments.recipe.schema import Recipe, Select
from flatshift.experiments.run.console import Console
from flatshift.experiments.select.stages import Stages
from flatshift.finetune.data.config import Columns, Files
from flatshift.finetune.data.rows import Row, count_records, limit_rows, read_rows, require_rows
from flatshift.finetune.data.view import RowView, read_domain, spill_rows
from flatshift.finetune.errors import UserError
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.seeds import derive_seed
from flatshift.selection.config import Domains, TextChunks, required_inputs
from flatshift.selection.features.matrix import IndexedRows
from flatshift.selection.shards import Arrays, Shard, ShardMap


def select_settings(recipe: Recipe) -> Select:
    """Return the recipe's `select` block, which it must have."""
    assert recipe.select is not None
    return recipe.select


@dataclass(frozen=True)
class Records:
    """Kept rows, and the position of each among all records of its files (own features follow that order)."""

    rows: Sequence[Row]
    skipped: list[str]
    total: int


@dataclass(frozen=True)
class PoolRecords(Records):
    """Pool records: the rows are a view of a file."""

    rows: RowView


@dataclass
class PoolAndTarget:
    """Inputs of a selection, updated after each step: rows and everything known about them.

    records: number of pool records after hygiene, before they were cut into `pieces`. weights (N,) of its rows in the
    transport problem, None: uniform. x (N, d), y (M, d), z (K, d): vectors of pool, target and negative examples, if
    made. tokens, if the method reads them, and domains: of pool and target. target_entry, hygiene, relevance: of
    manifest.json.
    """

    pool: PoolRecords
    target: Records
    negative: Records | None
    target_files: tuple[str, ...]
    records: int
    pieces: int
    target_entry: dict[str, Any]
    hygiene: dict[str, Any] | None = None
    relevance: dict[str, Any] | None = None
    weights: np.ndarray | None = None
    x: Any = None
    y: np.ndarray | None = None
    z: np.ndarray | None = None
    tokens: tuple[Any, Any] = (None, None)
    domains: tuple[Sequence[str | None] | None, Sequence[str | None] | None] = (None, None)

    @property
    def by_name(self) -> dict[str, Records | None]:
        return {"pool": self.pool, "target": self.target, "negative": self.negative}


def read_pool(spec: Select, seed: int, directory: Path, console: Console, stages: Stages | None = None) -> PoolRecords:
    """Read the pool's rows into a temporary file in `directory` that is deleted with the view; with `stages` into files
    of theirs. Raises UserError."""
    skipped: list[str] = []
    if stages is None:
        rows = _read_rows(spec.pool, spec, "pool", skipped, spec.columns)
        view = spill_rows(
            _with_progress(rows, console),
            directory / ".pool.arrow",
            columns=spec.columns,
            domain_column=spec.domain_column,
        )
    else:
        view, skipped = stages.read(spec, _named_columns(spec, "pool"))
    if not len(view):
        require_rows([], files=spec.pool.files, purpose="pool", skipped=skipped)
    total = count_records(len(view), skipped)
    if spec.pool.limit is not None:
        draw = derive_seed(seed, "limit", "pool")
        view = view.take(limit_rows(range(len(view)), spec.pool.limit, seed=draw, setting="select.pool.limit"))
    return PoolRecords(view, skipped, total)


def read_records(files: Files, spec: Select, seed: int, name: str, columns: Columns) -> Records:
    """Read the rows of a target, or of negative examples, into memory. Raises UserError."""
    skipped: list[str] = []
    rows = _read_rows(files, spec, name, skipped, columns)
    good = require_rows(rows, files=files.files, purpose=name, skipped=skipped)
    limited = limit_rows(good, files.limit, seed=derive_seed(seed, "limit", name), setting=f"select.{name}.limit")
    return Records(limited, skipped, count_records(len(good), skipped))


def cut_pool(recipe: Recipe, view: RowView, console: Console) -> RowView:
    """Cut the pool to the length of `select.chunk`; unchanged without it. Raises UserError."""
    spec = select_settings(recipe)
    if spec.chunk is None:
        return view
    if spec.own is not None:
        raise UserError(
            "select.chunk: pieces of a record have no row in features of your own; cut the pool first, "
            "then embed it and select from the pieces"
        )
    pieces = view.cut(_piece_spans(recipe, spec.chunk, view.texts))
    console.say(f"pool cut to {spec.chunk.size} {spec.chunk.unit}: {len(view):,} records, {len(pieces):,} pieces")
    if not len(pieces):
        raise UserError(
            f"select.chunk: no text of the pool's {len(view):,} records has a single {spec.chunk.unit[:-1]}"
        )
    return pieces


def _piece_spans(recipe: Recipe, chunk: TextChunks, texts: Iterable[str]) -> Iterator[list[tuple[int, int]]]:
    """Yield the pieces of each text; none for a text without a unit."""
    if chunk.unit == "chars":
        for text in texts:
            yield [(low, min(low + chunk.size, len(text))) for low in range(0, len(text), chunk.size)]
        return
    if chunk.unit == "words":
        for text in texts:
            yield _group_units([match.span() for match in re.finditer(r"\S+", text)], chunk.size)
        return
    tokenizer = open_backbone(recipe.backbone).tokenizer
    if not tokenizer.is_fast:
        raise UserError(
            f"select.chunk.unit: the tokenizer of {recipe.backbone!r} cannot say where each token starts; use words"
        )
    for text in texts:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        # Byte-level tokens of one character share its span.
        yield _group_units([(low, high) for low, high in encoded["offset_mapping"] if high > low], chunk.size)


def _group_units(units: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    pieces: list[tuple[int, int]] = []
    for low in range(0, len(units), size):
        start, end = units[low][0], units[min(low + size, len(units)) - 1][1]
        pieces.append((max(start, pieces[-1][1]) if pieces else start, end))
    return [(start, end) for start, end in pieces if end > start]


def record_domains(records: Records, spec: Select) -> list[str | None] | None:
    """Return each record's domain, or None if no record has one."""
    if isinstance(records.rows, RowView):
        return records.rows.domains()
    names = [read_domain(row.values.get(spec.domain_column)) for row in records.rows]
    return names if any(name is not None for name in names) else None


def _read_rows(files: Files, spec: Select, name: str, skipped: list[str], columns: Columns) -> Iterator[Row]:
    if not files.files:
        raise UserError(f"select.{name}.files is empty: name the files of the {name}")
    return read_rows(
        files.files, columns=columns, bad_rows=spec.bad_rows, skipped=skipped,
        setting="data.columns" if name == "target" else "select.columns", block="select",
        named=_named_columns(spec, name),
    )  # fmt: skip


def target_columns(recipe: Recipe) -> Columns:
    """Return the columns of a target in files of its own: `data.columns` if the recipe sets any, else the pool's."""
    return select_settings(recipe).columns if recipe.data.columns == Columns() else recipe.data.columns


def _named_columns(spec: Select, side: str) -> dict[str, str]:
    """Return the columns that at least one row of a side must have, each with its setting: the pool's id column if the
    user named it, the domain column (for `less` the target's) if the user set it or the method requires it."""
    named = {spec.columns.id: "select.columns.id"} if side == "pool" and spec.columns.id != Columns().id else {}
    required = spec.domain_column != Select().domain_column or isinstance(spec.method, Domains)
    if required and side == ("target" if spec.method.kind == "less" else "pool"):
        named[spec.domain_column] = "select.domain_column or --domain-column"
    return named


def _with_progress(rows: Iterable[Row], console: Console) -> Iterator[Row]:
    """Yield the rows and print a line every ten seconds, because their number is unknown."""
    start = last = time.monotonic()
    for count, row in enumerate(rows, start=1):
        yield row
        if count % 4096 == 0 and time.monotonic() - last > 10:
            last = time.monotonic()
            console.say(f"read pool: {count:,} records, {count / (last - start):,.0f} records/s")


_BLOCK_ROWS = 1 << 16
AnyRecords = TypeVar("AnyRecords", bound=Records)


def skips_blank_texts(spec: Select) -> bool:
    """Return True if blank texts are skipped; also for a method without texts, so that controls draw from the same
    pool."""
    return spec.own is None or bool(required_inputs(spec.method) & {"texts", "losses"})


def drop_blank_texts(
    records: AnyRecords, files: Sequence[str], name: str, shards: ShardMap | None = None
) -> AnyRecords:
    """Return `records` without those whose text is only white space. shards: search by shards. Raises UserError if
    nothing is left."""
    rows = records.rows
    if shards is not None:
        blank = np.concatenate([part["blank"] for part in shards("blank texts", _find_blank)])
    else:
        texts = rows.texts if isinstance(rows, RowView) else (row.values["text"] for row in rows)
        blank = _blank_texts(texts, len(rows))
    return _filter_records(records, ~blank, "the text is blank", files, name)


def _blank_texts(texts: Iterable[str], count: int) -> np.ndarray:
    return np.fromiter((not text or text.isspace() for text in texts), bool, count)


def _find_blank(shard: Shard) -> Arrays:
    return {"blank": _blank_texts(shard.texts, len(shard.texts))}


def nonzero_rows(x: Any) -> np.ndarray:
    """Return (N,) bool: rows of vectors `x` (N, d), in memory or on disk, that are not exactly zero."""
    blocks = [np.asarray(x[low : low + _BLOCK_ROWS]).any(axis=1) for low in range(0, len(x), _BLOCK_ROWS)]
    return np.concatenate([np.zeros(0, dtype=bool), *blocks])


def drop_unknown_texts(
    records: AnyRecords, x: Any, files: Sequence[str], name: str, console: Console
) -> tuple[AnyRecords, Any, np.ndarray | None]:
    """Return `records` and their vectors without zero vectors, and a mask of the kept rows (None: all).

    Prints the number of skipped records. Raises UserError if nothing is left.
    """
    known = nonzero_rows(x)
    if known.all():
        return records, x, None
    fewer = _filter_records(records, known, "the embedder knows no token of the text", files, name)
    dropped = fewer.skipped[len(records.skipped) :]
    console.say(f"{name}: skipped {len(dropped):,} records, first {dropped[0]}")
    return fewer, x[known] if isinstance(x, np.ndarray) else IndexedRows(x, np.flatnonzero(known)), known


def _filter_records(records: AnyRecords, keep: np.ndarray, reason: str, files: Sequence[str], name: str) -> AnyRecords:
    """Return the records where `keep` is true; the others are listed in `skipped`."""
    if keep.all():
        return records
    rows: Any = records.rows

    def take(mask: np.ndarray) -> Sequence[Row]:
        numbers = np.flatnonzero(mask)
        return rows.take(numbers) if isinstance(rows, RowView) else [rows[i] for i in numbers.tolist()]

    skipped = [*records.skipped, *(f"{row.where}: {reason}" for row in take(~keep))]
    if not keep.any():
        require_rows([], files=files, purpose=name, skipped=skipped)
    return replace(records, rows=take(keep), skipped=skipped)
