"""Encoded examples stored in columns: a sequence that builds an `Example` on access.

    writer = ExampleWriter(paths, folder)      # folder None: in memory
    writer.add(encode(chunk, ...).examples)
    examples = writer.close()                  # examples[7] is an Example, examples[:100] a view

Each token takes 4 bytes per token column, each row about 40 bytes and its id; labels take one number per token, one per
row, or one byte per class of a row. In a folder each column is a plain memory-mapped `.npy` file, so tokens are in the
page cache and not in the process; `open_examples` opens it again.
"""

from __future__ import annotations

import dataclasses
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, overload

import numpy as np

from .example import IGNORE, Example
from .labels import Units

_RAGGED = ("input_ids", "labels", "segments", "decoder_ids", "prompt", "words", "rejected_ids", "rejected_labels")
_TEXTS = ("id", "answer", "where")
_NUMBERS = ("bytes", "gold", "stop", "desirable")
_KNOWN = {*_RAGGED, *_TEXTS, *_NUMBERS, "choices", "units", "features"}
_NONE = np.iinfo(np.int64).min
_SUFFIX = ".npy"


class ExampleWriter:
    """Writer that appends examples in chunks and returns one `ColumnarExamples`."""

    def __init__(self, paths: Sequence[str], folder: Path | None = None) -> None:
        """paths: files that the examples come from, as named in their `where`. folder: directory to write the columns
        into; None keeps them in memory."""
        unknown = {field.name for field in dataclasses.fields(Example)} - _KNOWN
        assert not unknown, f"flatshift.finetune.data.columns does not store {', '.join(sorted(unknown))} of an Example"
        self.rows = 0
        self._paths = list(paths)
        self._file = {path: number for number, path in enumerate(paths)}
        self._folder = folder
        self._writers: dict[str, _ColumnWriter] = {}
        self._values: dict[str, dict[Any, int]] = {"choices": {}, "units": {}}

    def add(self, examples: Sequence[Example]) -> None:
        """Append `examples`. Their labels must all be of one form: lists of integers, classes, targets, or 0 and 1
        per class."""
        if not examples:
            return
        row_labels = self._add_row_labels([example.labels for example in examples])
        for name in _RAGGED:
            if not (name == "labels" and row_labels):
                self._add_ragged(name, [getattr(example, name) for example in examples])
        self._add_texts("id", [example.id for example in examples])
        self._add_texts("answer", [example.answer for example in examples])
        self._add_places([example.where for example in examples])
        for name in _NUMBERS:
            values = [getattr(example, name) for example in examples]
            if name in self._writers or any(value is not None for value in values):
                self._add(name, np.array([_NONE if value is None else value for value in values], dtype=np.int64))
        counts = [1 if row_labels else _count_targets(example.labels) for example in examples]
        self._add("supervised", np.array(counts, dtype=np.int32))
        self._add_indexed("choices", [example.choices for example in examples], lambda choices: choices)
        self._add_indexed("units", [example.units for example in examples], dataclasses.asdict)
        self._add_features([example.features for example in examples])
        self.rows += len(examples)

    def close(self) -> ColumnarExamples:
        """Return the examples; in a folder, all files are then complete."""
        columns = {name: writer.close() for name, writer in self._writers.items()}
        return ColumnarExamples(_ColumnTable(columns, self.rows, self._paths))

    def _writer(self, name: str, dtype: Any) -> _ColumnWriter:
        if name not in self._writers:
            path = None if self._folder is None else self._folder / f"{name}{_SUFFIX}"
            self._writers[name] = _ColumnWriter(np.dtype(dtype), path)
        return self._writers[name]

    def _add(self, name: str, values: np.ndarray, absent: int = _NONE) -> None:
        new = name not in self._writers
        writer = self._writer(name, values.dtype)
        if new and self.rows:  # the column was absent so far: fill earlier rows
            writer.add(np.full(self.rows, absent, dtype=values.dtype))
        writer.add(values)

    def _add_lengths(self, name: str, values: Sequence[Any]) -> int:
        """Store the length of each value, −1 for None, and return their sum. Nothing is stored while all values so
        far are None."""
        lengths = np.array([-1 if value is None else len(value) for value in values], dtype=np.int32)
        if f"{name}.length" in self._writers or (lengths >= 0).any():
            self._add(f"{name}.length", lengths, absent=-1)
        return int(lengths[lengths > 0].sum())

    def _add_ragged(self, name: str, values: Sequence[Any]) -> None:
        total = self._add_lengths(name, values)
        if f"{name}.length" in self._writers:
            flat = chain.from_iterable(value for value in values if value is not None)
            self._writer(name, np.int32).add(np.fromiter(flat, dtype=np.int32, count=total))

    def _add_texts(self, name: str, values: Sequence[str | None]) -> None:
        encoded = [None if text is None else text.encode("utf-8", "surrogatepass") for text in values]
        self._add_lengths(name, encoded)
        if f"{name}.length" in self._writers:
            joined = b"".join(text for text in encoded if text is not None)
            self._writer(name, np.uint8).add(np.frombuffer(joined, dtype=np.uint8))

    def _add_places(self, places: Sequence[str]) -> None:
        """Store each place as the file's number and the text after its name; −1 and the whole text if the file is
        not in `paths`."""
        files = [self._file.get(place.rpartition(":")[0], -1) for place in places]
        self._add("file", np.array(files, dtype=np.int32))
        pairs = zip(files, places, strict=True)
        self._add_texts("where", [place if file < 0 else place[len(self._paths[file]) :] for file, place in pairs])

    def _add_row_labels(self, labels: Sequence[Any]) -> bool:
        """Store labels that belong to whole rows; return False if they are lists of token labels."""
        if isinstance(labels[0], list):
            return False
        if isinstance(labels[0], tuple):
            self._add("classes", np.array(labels, dtype=np.uint8).ravel())
        elif isinstance(labels[0], float):
            self._add("target", np.array(labels, dtype=np.float64))
        else:
            self._add("class", np.array(labels, dtype=np.int64))
        return True

    def _add_indexed(self, name: str, values: Sequence[Any], to_json: Callable[[Any], Any]) -> None:
        """Store values as indices into a table of distinct ones, each serialised as JSON."""
        if name not in self._writers and all(value is None for value in values):
            return
        known = self._values[name]
        for value in values:
            if value is not None and value not in known:
                known[value] = len(known)
                text = json.dumps(to_json(value)).encode()
                self._writer(f"{name}.value.length", np.int32).add(np.array([len(text)], dtype=np.int32))
                self._writer(f"{name}.value", np.uint8).add(np.frombuffer(text, dtype=np.uint8))
        indices = [-1 if value is None else known[value] for value in values]
        self._add(name, np.array(indices, dtype=np.int32), absent=-1)

    def _add_features(self, values: Sequence[Any]) -> None:
        """Store vectors concatenated, and once the number per row; either all rows have the same number, or none has
        any."""
        if values[0] is None:
            assert "features" not in self._writers and all(vectors is None for vectors in values)
            return
        if not self.rows:
            self._writer("features.vectors", np.int32).add(np.array([len(values[0])], dtype=np.int32))
        self._writer("features", np.float32).add(np.array(values, dtype=np.float32).ravel())


def _count_targets(labels: Any) -> int:
    return len(labels) - labels.count(IGNORE)


def open_examples(folder: Path, rows: int, paths: Sequence[str]) -> ColumnarExamples:
    """Map the columns that an `ExampleWriter` wrote to `folder`; `paths` are the current file names."""
    columns = {path.name.removesuffix(_SUFFIX): _load_memory_mapped(path) for path in folder.glob(f"*{_SUFFIX}")}
    return ColumnarExamples(_ColumnTable(columns, rows, list(paths)))


def _load_memory_mapped(path: Path) -> np.ndarray:
    try:
        # A plain array over the same pages, because slicing an np.memmap is several times slower.
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except ValueError:  # an empty file cannot be mapped
        return np.load(path, allow_pickle=False)


class _ColumnWriter:
    """One-dimensional array that grows, in memory or in an .npy file."""

    def __init__(self, dtype: np.dtype, path: Path | None) -> None:
        self._dtype, self._path, self._rows = dtype, path, 0
        self._parts: list[np.ndarray] = []
        self._handle = path.open("wb") if path is not None else None
        self._write_header()

    def add(self, values: np.ndarray) -> None:
        self._rows += len(values)
        if self._handle is None:
            self._parts.append(values.astype(self._dtype, copy=False))
        else:
            self._handle.write(values.astype(self._dtype, copy=False).tobytes())

    def close(self) -> np.ndarray:
        if self._handle is None or self._path is None:
            return np.concatenate(self._parts) if self._parts else np.empty(0, self._dtype)
        self._handle.seek(0)
        self._write_header()  # same length as the first header: NumPy reserves room for the shape to grow
        self._handle.close()
        return _load_memory_mapped(self._path)

    def _write_header(self) -> None:
        if self._handle is not None:
            descr = np.lib.format.dtype_to_descr(self._dtype)
            header = {"descr": descr, "fortran_order": False, "shape": (self._rows,)}
            np.lib.format.write_array_header_1_0(self._handle, header)


class _RaggedColumn:
    def __init__(self, flat: np.ndarray, lengths: np.ndarray) -> None:
        self.flat, self.lengths = flat, lengths

    @cached_property
    def starts(self) -> np.ndarray:
        sizes = np.maximum(self.lengths, 0)
        return np.cumsum(sizes, dtype=np.int64) - sizes

    def get(self, i: int) -> np.ndarray | None:
        """Return list i; None if it is missing."""
        length = int(self.lengths[i])
        return None if length < 0 else self.flat[int(self.starts[i]) : int(self.starts[i]) + length]


class _ColumnTable:
    def __init__(self, columns: dict[str, np.ndarray], rows: int, paths: list[str]) -> None:
        self.columns, self.rows, self.paths = columns, rows, paths
        if "classes" in columns:
            columns["classes"] = columns["classes"].reshape(rows, -1)
        if "features" in columns:
            columns["features"] = columns["features"].reshape(rows, int(columns["features.vectors"][0]), -1)
        self.ragged = {
            name: _RaggedColumn(columns[name], columns[f"{name}.length"])
            for name in (*_RAGGED, *_TEXTS)
            if name in columns
        }
        self._choices = [tuple(map(tuple, choices)) for choices in self._distinct_values("choices")]
        self.units = [Units(**units) for units in self._distinct_values("units")]

    def _distinct_values(self, name: str) -> list[Any]:
        if f"{name}.value" not in self.columns:
            return []
        texts = _RaggedColumn(self.columns[f"{name}.value"], self.columns[f"{name}.value.length"])
        return [json.loads(np.asarray(texts.get(k)).tobytes()) for k in range(len(texts.lengths))]

    def _indexed(self, name: str, values: Sequence[Any], i: int) -> Any:
        index = int(self.columns[name][i]) if name in self.columns else -1
        return None if index < 0 else values[index]

    def _features(self, i: int) -> tuple[array[float], ...] | None:
        if "features" not in self.columns:
            return None
        return tuple(array("f", vector.tobytes()) for vector in self.columns["features"][i])

    def _labels(self, i: int) -> Any:
        for name in ("class", "target"):
            if name in self.columns:
                return self.columns[name][i].item()
        if "classes" in self.columns:
            return tuple(self.columns["classes"][i].tolist())
        return self._list("labels", i)

    def _list(self, name: str, i: int) -> list[int] | None:
        values = self.ragged[name].get(i) if name in self.ragged else None
        return None if values is None else values.tolist()

    def _text(self, name: str, i: int) -> str | None:
        characters = self.ragged[name].get(i) if name in self.ragged else None
        return None if characters is None else characters.tobytes().decode("utf-8", "surrogatepass")

    def _number(self, name: str, i: int) -> Any:
        value = self.columns[name][i].item() if name in self.columns else _NONE
        return None if value == _NONE else value

    def example(self, i: int) -> Example:
        ids, name, place = self._list("input_ids", i), self._text("id", i), self._text("where", i)
        assert ids is not None and name is not None and place is not None
        file, desirable = int(self.columns["file"][i]), self._number("desirable", i)
        lists = ("segments", "decoder_ids", "prompt", "words", "rejected_ids", "rejected_labels")
        values: dict[str, Any] = {column: self._list(column, i) for column in lists}
        values |= {column: self._number(column, i) for column in ("bytes", "gold", "stop")}
        return Example(
            ids, self._labels(i), name, place if file < 0 else self.paths[file] + place,
            choices=self._indexed("choices", self._choices, i), answer=self._text("answer", i),
            units=self._indexed("units", self.units, i), desirable=None if desirable is None else bool(desirable),
            features=self._features(i), **values,
        )  # fmt: skip


class ColumnarExamples(Sequence[Example]):
    """Examples of a table, or a subset of them."""

    def __init__(self, table: _ColumnTable, index: np.ndarray | None = None) -> None:
        self._table = table
        self._index = index

    @classmethod
    def of(cls, examples: Sequence[Example]) -> ColumnarExamples:
        """Return these examples as columns in memory."""
        if isinstance(examples, ColumnarExamples):
            return examples
        writer = ExampleWriter(list(dict.fromkeys(example.where.rpartition(":")[0] for example in examples)))
        writer.add(examples)
        return writer.close()

    def __len__(self) -> int:
        return self._table.rows if self._index is None else len(self._index)

    @overload
    def __getitem__(self, key: int) -> Example: ...
    @overload
    def __getitem__(self, key: slice) -> ColumnarExamples: ...
    def __getitem__(self, key: int | slice) -> Example | ColumnarExamples:
        if isinstance(key, slice):
            return self.take(np.arange(*key.indices(len(self))))
        if not -len(self) <= key < len(self):
            raise IndexError(f"example {key} of {len(self)}")
        key = int(key) % len(self)
        return self._table.example(key if self._index is None else int(self._index[key]))

    def __iter__(self) -> Iterator[Example]:
        return map(self._table.example, range(len(self)) if self._index is None else self._index.tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def take(self, rows: np.ndarray | Sequence[int]) -> ColumnarExamples:
        """Return the examples with these numbers, in this order, without copying."""
        rows = np.asarray(rows, dtype=np.int64)
        return ColumnarExamples(self._table, rows if self._index is None else self._index[rows])

    def column(self, name: str) -> np.ndarray | None:
        """Return a column that has one value per example: `class`, `target`, `units`, `desirable` or the number of
        target labels, (N,), or `classes`, (N, C) of 0 and 1; None if there is no such column."""
        values = self._table.columns.get(name)
        return values if values is None or self._index is None else values[self._index]

    def standardised_targets(self) -> np.ndarray | None:
        """Return targets in training units (`flatshift.finetune.data.labels.Units.standardise`), (N,) float64; None if
        there are none."""
        targets, indices = self.column("target"), self.column("units")
        if targets is None or indices is None:
            return targets
        units = [*self._table.units, Units(0.0)]  # index −1, rows without units, is the last
        offset, scale = (np.array([getattr(each, name) for each in units])[indices] for name in ("offset", "scale"))
        return (targets - offset) / scale

    def features(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the vectors of all rows of the table (R, K, d) float32, and each example's row in it (N,); None if
        there are none."""
        values = self._table.columns.get("features")
        if values is None:
            return None
        return values, np.arange(self._table.rows) if self._index is None else self._index

    def ragged(self, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Return a list column as all lists concatenated, and start and length of each, (N,); None if there is no
        such column."""
        column = self._table.ragged.get(name)
        if column is None or not self._table.rows:
            return None
        index = slice(None) if self._index is None else self._index
        return column.flat, column.starts[index], column.lengths[index]
