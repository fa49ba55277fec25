"""List-like view of any number of rows on disk, for pools of millions.

    view = spill_rows(read_rows(files), path, columns=columns, domain_column="domain")
    view[7]                      # a Row, as it was read
    view.texts[1000:2000]        # only the texts
    view.take(kept)              # another view of the same file
    view.cut(spans)              # a view of pieces of the texts, each a row

The rows are written once, as an Arrow file that is then memory-mapped: texts are in the system's page cache, with at
most 64 MiB of them in the process. A view itself takes 8 bytes per row, or 28 after `cut`.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np

from ..errors import UserError, is_disk_full
from .config import Columns
from .rows import Row, SeenIds, read_canonical_values

_Item = TypeVar("_Item")
Span = tuple[int, int]
"""Start and end of a piece, in characters of its row's text."""

_ROWS = 4096
_CHARACTERS = 1 << 24
_RESIDENT = 1 << 26
"""Bytes of the file that may be read before its pages are released to the system, which may keep them cached."""
_OPEN_FILES = 64
_PIECE = re.compile(r"#[0-9]+$")


def spill_rows(rows: Iterable[Row], path: Path, *, columns: Columns, domain_column: str = "domain") -> RowView:
    """Write `rows` (of `read_rows`, each with a text) to `path` and return a view of them.

    The file is unlinked as soon as it is mapped, so its space is freed with the view or when the process is killed.
    Memory: one batch of rows.

    Raises UserError if the file cannot be written, or a domain is not text; OSError if the disk is full; and whatever
    `rows` raises.
    """
    try:
        write_rows(rows, path, columns=columns, domain_column=domain_column)
        return RowView(RowStore(lambda number: path, columns))
    except OSError as error:
        if is_disk_full(error):
            raise
        raise UserError(f"{path}: the pool's rows cannot be kept there ({error.strerror or error})") from error
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def write_rows(rows: Iterable[Row], path: Path, *, columns: Columns, domain_column: str = "domain") -> None:
    """Write `rows` to `path` for a `RowStore`. Raises UserError if a domain is not text, and whatever `rows` raises."""
    import pyarrow as pa

    names = ("id", "text", "domain", "where", "index", "rest")
    schema = pa.schema([(name, pa.int64() if name == "index" else pa.string()) for name in names])
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for batch in _batch_rows(rows, columns, domain_column):
            writer.write_batch(pa.record_batch(batch, schema=schema))


def _batch_rows(rows: Iterable[Row], columns: Columns, domain_column: str) -> Iterator[list[list[Any]]]:
    batch: list[tuple[Any, ...]] = []
    characters = 0
    for row in rows:
        text = row.values["text"]
        domain = read_domain(row.values.get(domain_column))
        if domain is not None and not domain.isascii():
            try:
                domain.encode("utf-8")
            except UnicodeEncodeError:
                raise UserError(f"{row.where}: the domain has half of a surrogate pair, which is not text") from None
        # Keep the position of the text among the columns, so that records are restored in their own order.
        others = {name: None if name == columns.text else value for name, value in row.record.items()}
        batch.append((row.id, text, domain, row.where, row.index, json.dumps(others, default=str)))
        characters += len(text) + len(batch[-1][-1])
        if len(batch) == _ROWS or characters > _CHARACTERS:
            yield [list(column) for column in zip(*batch, strict=True)]
            batch, characters = [], 0
    if batch:
        yield [list(column) for column in zip(*batch, strict=True)]


def set_aside(record: dict[str, Any], keys: Iterable[str], reserved: Iterable[str]) -> None:
    """Move these keys of a record under `source`, or `source_2` and so on where it has that or that is reserved."""
    if moved := {key: record.pop(key) for key in sorted(keys)}:
        taken = {*record, *reserved}
        record[next(name for n in count(1) if (name := f"source_{n}" if n > 1 else "source") not in taken)] = moved


def read_domain(value: Any) -> str | None:
    """Return the domain that is read from a column's `value`; an empty cell is none."""
    return None if value is None or value == "" else str(value)


class RowStore:
    """Rows of files that `write_rows` wrote, one file after another, memory-mapped; at most 64 files at a time.

    path: returns the file of a number. firsts: position of each file's first record among all records; lengths: number
    of rows of each file. lengths None: a single file, which is opened here and may then be removed.
    """

    def __init__(
        self, path: Callable[[int], Path], columns: Columns, firsts: Any = (0,), lengths: Sequence[int] | None = None
    ):
        self.columns, self._path, self._firsts = columns, path, firsts
        self._files: dict[int, _StoredFile] = {}
        self._read = 0
        self._starts = np.append(0, np.cumsum(self._file(0).starts[-1:] if lengths is None else lengths))

    def _file(self, number: int) -> _StoredFile:
        """Return a file, kept open until 64 others were read since."""
        file = self._files.pop(number, None) or _map_file(self._path(number))
        self._files[number] = file
        if len(self._files) > _OPEN_FILES:
            del self._files[next(iter(self._files))]
        return file

    def __len__(self) -> int:
        return int(self._starts[-1])

    def values(self, column: str, rows: np.ndarray) -> list[Any]:
        """Return the column's values at `rows` (any order), as Python objects."""
        import pyarrow as pa

        if len(rows) > 1 and (np.diff(rows) < 0).any():  # read in file order, so that each batch is opened once
            order = np.argsort(rows, kind="stable")
            unsorted: list[Any] = [None] * len(rows)
            for position, value in zip(order.tolist(), self.values(column, rows[order]), strict=True):
                unsorted[position] = value
            return unsorted
        out: list[Any] = []
        for number, batch, local in self._batches(rows):
            values = self._column(number, batch, column)
            if local[-1] - local[0] == len(local) - 1 and (len(local) == 1 or (np.diff(local) == 1).all()):
                values = values.slice(int(local[0]), len(local))
            else:
                values = values.take(pa.array(local))
            out.extend(values.to_pylist())
            self._read += values.nbytes
            if self._read > _RESIDENT and hasattr(mmap, "MADV_DONTNEED"):
                for file in self._files.values():
                    file.mapped.madvise(mmap.MADV_DONTNEED)
                self._read = 0
        return out

    def _batches(self, rows: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield file, batch and places in it of consecutive `rows`."""
        for number, some in _group_rows(rows, self._starts):
            for batch, places in _group_rows(some, self._file(number).starts):
                yield number, batch, places

    def is_empty(self, column: str) -> bool:
        """Return True if no row has a value in this column."""
        return all(values.null_count == len(values) for values in self._iter_batches(column))

    def indices(self) -> np.ndarray:
        """Return the whole column `index`, (N,) int64."""
        parts = (values.to_numpy() for values in self._iter_batches("index"))
        return np.concatenate([np.empty(0, np.int64), *parts])

    def _iter_batches(self, name: str) -> Iterator[Any]:
        for number in range(len(self._starts) - 1):
            for batch in range(len(self._file(number).starts) - 1):
                yield self._column(number, batch, name)

    def _column(self, number: int, batch: int, name: str) -> Any:
        """Return a column of a file's batch as an Arrow array; `index` counts from the first record of all files."""
        import pyarrow.compute as pc

        values = self._file(number).reader.get_batch(batch).column(name)
        first = int(self._firsts[number])
        return pc.add(values, first) if name == "index" and first else values


class _StoredFile(NamedTuple):
    """File of rows; starts: first row of each batch, and the end."""

    mapped: mmap.mmap
    reader: Any
    starts: np.ndarray


def _map_file(path: Path) -> _StoredFile:
    import pyarrow as pa

    with path.open("rb") as handle:
        mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    reader = pa.ipc.open_file(pa.py_buffer(mapped))
    lengths = [reader.get_batch(number).num_rows for number in range(reader.num_record_batches)]
    return _StoredFile(mapped, reader, np.append(0, np.cumsum(lengths, dtype=np.int64)))


def _group_rows(rows: np.ndarray, starts: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the number of a range between two `starts`, and those consecutive `rows` in it, counted from its start."""
    numbers = np.searchsorted(starts, rows, side="right") - 1
    borders = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(rows)]
    for low, high in pairwise(borders if len(rows) else []):
        number = int(numbers[low])
        yield number, rows[low:high] - starts[number]


class _StoredSequence(Sequence[_Item]):
    """Sequence that is read some items at a time; a slice is a list."""

    @abstractmethod
    def _read(self, rows: np.ndarray) -> list[_Item]:
        """Return the items with these numbers."""

    @overload
    def __getitem__(self, key: int) -> _Item: ...
    @overload
    def __getitem__(self, key: slice) -> list[_Item]: ...
    def __getitem__(self, key: int | slice) -> _Item | list[_Item]:
        if isinstance(key, slice):
            return self._read(np.arange(*key.indices(len(self))))
        if not -len(self) <= key < len(self):
            raise IndexError(f"row {key} of {len(self)}")
        return self._read(np.array([key % len(self)]))[0]

    def __iter__(self) -> Iterator[_Item]:
        for low in range(0, len(self), _ROWS):
            yield from self[low : low + _ROWS]


class RowView(_StoredSequence[Row]):
    """Rows of a store: all, some, or pieces of them. Immutable; `take` and `cut` return new views."""

    def __init__(
        self,
        store: RowStore,
        base: np.ndarray | None = None,
        spans: np.ndarray | None = None,
        numbers: tuple[np.ndarray, ...] = (),
    ):
        self._store = store
        self._base = np.arange(len(store)) if base is None else base
        self._spans = spans
        """(N, 2) int64: start and end in the stored text; start −1: the whole text."""
        self._numbers = numbers
        """One (N,) int32 array per `cut`: the piece's number, −1 if the row was not cut."""

    def __len__(self) -> int:
        return len(self._base)

    @property
    def texts(self) -> Sequence[str]:
        return _ViewColumn(self, self._texts)

    @property
    def ids(self) -> Sequence[str]:
        """Ids of the rows: `<id>#<k>` for piece k of a row that was cut."""
        return _ViewColumn(self, self._ids)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays that make this view of its store, for `of`."""
        spans = {} if self._spans is None else {"spans": self._spans}
        return {"base": self._base, **spans, **{f"cut{k}": level for k, level in enumerate(self._numbers)}}

    @classmethod
    def of(cls, store: RowStore, arrays: Mapping[str, np.ndarray], low: int, high: int) -> RowView:
        """Return rows [low, high) of the view of `store` that has these `arrays`."""
        base, spans, *numbers = (
            None if (array := arrays.get(name)) is None else np.asarray(array[low:high])
            for name in ("base", "spans", *sorted(name for name in arrays if name.startswith("cut")))
        )
        return cls(store, base, spans, tuple(level for level in numbers if level is not None))

    def domains(self) -> list[str | None] | None:
        """Return each row's domain, sharing equal strings; None if no row has one."""
        if self._store.is_empty("domain"):
            return None
        known: dict[str | None, str | None] = {}
        out: list[str | None] = []
        for low in range(0, len(self), _ROWS):
            names = self._store.values("domain", self._base[low : low + _ROWS])
            out.extend(known.setdefault(name, name) for name in names)
        return out if any(name is not None for name in known) else None

    def indices(self) -> np.ndarray:
        """Return each row's position among all records of its files, including bad ones, (N,) int64."""
        return np.asarray(self._store.indices()[self._base])

    def take(self, rows: np.ndarray | Sequence[int]) -> RowView:
        """Return a view of the rows with these numbers, in this order."""
        rows = np.asarray(rows, dtype=np.int64)
        spans = None if self._spans is None else self._spans[rows]
        return RowView(self._store, self._base[rows], spans, tuple(level[rows] for level in self._numbers))

    def cut(self, spans: Iterable[Sequence[Span] | None]) -> RowView:
        """Replace each row by pieces of its text; `spans` has an entry for every row in order, None for a whole row.

        A piece is a row with the id `<id>#<k>`, k from 0, and the columns `source_id` (of the record in the file),
        `start` and `end` (characters of that record's text); its own values of that name move under `source`. An empty
        entry drops its row. Raises UserError if a piece gets the id of another row.
        """
        parts: list[np.ndarray] = []  # rows (n, 4): number of the row, start and end in the stored text, piece
        batch: list[tuple[int, int, int, int]] = []
        count = 0
        for count, pieces in enumerate(spans, start=1):
            start, end = (-1, -1) if self._spans is None else self._spans[count - 1].tolist()
            if pieces is None:
                batch.append((count - 1, start, end, -1))
            else:
                shift = max(start, 0)
                batch.extend((count - 1, shift + low, shift + high, k) for k, (low, high) in enumerate(pieces))
            if len(batch) >= 1 << 16:
                parts.append(np.array(batch, dtype=np.int64))
                batch.clear()
        parts.append(np.array(batch, dtype=np.int64).reshape(-1, 4))
        if count != len(self):
            raise ValueError(f"{count} entries of spans for {len(self)} rows")
        table = np.concatenate(parts)
        rows = self.take(table[:, 0])
        numbers = (*rows._numbers, table[:, 3].astype(np.int32))
        view = RowView(self._store, rows._base, table[:, 1:3].copy(), numbers)
        view._check_unique_ids()
        return view

    def _check_unique_ids(self) -> None:
        """Raise UserError if a piece has the same id as another row, which was given an id of that form."""
        sources = _ViewColumn(self, lambda rows: self._store.values("id", self._base[rows]))
        if not any(_PIECE.search(name) for name in sources):
            return
        seen = SeenIds()
        repeated = [entry for number, name in enumerate(self.ids) for entry in seen.add(name, str(number))]
        for name, number in (*repeated, *seen.finish()):
            first = next(i for i, other in enumerate(self.ids) if other == name)
            if first != int(number):  # otherwise a hash collision
                there, here = self._store.values("where", self._base[[first, int(number)]])
                raise UserError(
                    f"{here}: id {name!r} is also that of a record or piece of {there}: pieces of a record are named "
                    "<id>#<k>; give one of the two records another id"
                )

    def _texts(self, rows: np.ndarray) -> list[str]:
        texts: list[str] = self._store.values("text", self._base[rows])
        if self._spans is None:
            return texts
        return [
            text if low < 0 else text[low:high]
            for text, (low, high) in zip(texts, self._spans[rows].tolist(), strict=True)
        ]

    def _ids(self, rows: np.ndarray) -> list[str]:
        ids: list[str] = self._store.values("id", self._base[rows])
        for level in self._numbers:
            ids = [name if k < 0 else f"{name}#{k}" for name, k in zip(ids, level[rows].tolist(), strict=True)]
        return ids

    def _read(self, rows: np.ndarray) -> list[Row]:
        base = self._base[rows]
        columns = self._store.columns
        texts, ids = self._texts(rows), self._ids(rows)
        spans = [(-1, -1)] * len(rows) if self._spans is None else self._spans[rows].tolist()
        stored = (self._store.values(name, base) for name in ("id", "where", "index", "rest"))
        out: list[Row] = []
        for text, name, (low, high), source, where, index, others in zip(texts, ids, spans, *stored, strict=True):
            record = json.loads(others)
            record[columns.text] = text
            values = read_canonical_values(record, columns)
            if low >= 0:
                piece = {"source_id": source, "start": low, "end": high}
                set_aside(record, piece.keys() & record.keys(), (columns.id,))
                record |= piece
                values |= {**piece, "id": name}
            out.append(Row(values, name, where, record, index))
        return out


class _ViewColumn(_StoredSequence[str]):
    def __init__(self, view: RowView, values: Callable[[np.ndarray], list[str]]):
        self._view, self._values = view, values

    def __len__(self) -> int:
        return len(self._view)

    def _read(self, rows: np.ndarray) -> list[str]:
        return self._values(rows)
