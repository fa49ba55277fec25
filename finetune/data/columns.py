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
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, overload

import numpy as np

from .encoding import IGNORE, Example
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
        """
        Arguments:
            paths: files that the examples come from, as named in their `where`.
            folder: directory to write the columns into; None keeps them in memory.
        """
        unknown = {field.name for field in dataclasses.fields(Example)} - _KNOWN
        assert not unknown, f"flatshift.finetune.data.columns does not keep {', '.join(sorted(unknown))} of an Example"
        self.rows = 0
        self._paths = list(paths)
        self._file = {path: number for number, path in enumerate(paths)}
        self._folder = folder
        self._sinks: dict[str, _ColumnWriter] = {}
        self._choices: dict[Any, int] = {}
        self._units: dict[Units, int] = {}

    def add(self, examples: Sequence[Example]) -> None:
        """Append `examples`. Their labels must all be of one form: lists of integers, classes, targets, or 0 and 1
        per class."""
        if not examples:
            return
        whole = self._put_whole_labels([example.labels for example in examples])
        for name in _RAGGED:
            if not (name == "labels" and whole):
                self._put_ragged(name, [getattr(example, name) for example in examples])
        self._put_texts("id", [example.id for example in examples])
        self._put_texts("answer", [example.answer for example in examples])
        self._put_places([example.where for example in examples])
        for name in _NUMBERS:
            given = [getattr(example, name) for example in examples]
            if name in self._sinks or any(value is not None for value in given):
                self._put(name, np.array([_NONE if value is None else value for value in given], dtype=np.int64))
        counts = [1 if whole else _count_targets(example.labels) for example in examples]
        self._put("supervised", np.array(counts, dtype=np.int32))
        self._put_choices([example.choices for example in examples])
        self._put_units([example.units for example in examples])
        self._put_features([example.features for example in examples])
        self.rows += len(examples)

    def close(self) -> ColumnarExamples:
        """Return the examples; in a folder, all files are then complete."""
        return ColumnarExamples(
            _ColumnTable({name: sink.close() for name, sink in self._sinks.items()}, self.rows, self._paths)
        )

    def _sink(self, name: str, dtype: Any) -> _ColumnWriter:
        if name not in self._sinks:
            path = None if self._folder is None else self._folder / f"{name}{_SUFFIX}"
            self._sinks[name] = _ColumnWriter(np.dtype(dtype), path)
        return self._sinks[name]

    def _put(self, name: str, values: np.ndarray, absent: int = _NONE) -> None:
        fresh = name not in self._sinks
        sink = self._sink(name, values.dtype)
        if fresh and self.rows:  # the column was absent so far: fill earlier rows
            sink.add(np.full(self.rows, absent, dtype=values.dtype))
        sink.add(values)

    def _put_lengths(self, name: str, values: Sequence[Any]) -> int:
        """Store the length of each value, −1 for None, and return their sum. Nothing is stored while all values so
        far are None."""
        lengths = np.array([-1 if value is None else len(value) for value in values], dtype=np.int32)
        if f"{name}.length" in self._sinks or (lengths >= 0).any():
            self._put(f"{name}.length", lengths, absent=-1)
        return int(lengths[lengths > 0].sum())

    def _put_ragged(self, name: str, values: Sequence[Any]) -> None:
        total = self._put_lengths(name, values)
        if f"{name}.length" in self._sinks:
            flat = chain.from_iterable(value for value in values if value is not None)
            self._sink(name, np.int32).add(np.fromiter(flat, dtype=np.int32, count=total))

    def _put_texts(self, name: str, values: Sequence[str | None]) -> None:
        coded = [None if text is None else text.encode("utf-8", "surrogatepass") for text in values]
        self._put_lengths(name, coded)
        if f"{name}.length" in self._sinks:
            joined = b"".join(text for text in coded if text is not None)
            self._sink(name, np.uint8).add(np.frombuffer(joined, dtype=np.uint8))

    def _put_places(self, places: Sequence[str]) -> None:
        """Store each place as the file's number and the text after its name; −1 and the whole text if the file is
        not in `paths`."""
        files = [self._file.get(place.rpartition(":")[0], -1) for place in places]
        self._put("file", np.array(files, dtype=np.int32))
        told = zip(files, places, strict=True)
        self._put_texts("where", [place if file < 0 else place[len(self._paths[file]) :] for file, place in told])

    def _put_whole_labels(self, labels: Sequence[Any]) -> bool:
        """Store labels that belong to whole rows; return False if they are lists of token labels."""
        if isinstance(labels[0], list):
            return False
        if isinstance(labels[0], tuple):
            self._put("classes", np.array(labels, dtype=np.uint8).ravel())
        elif isinstance(labels[0], float):
            self._put("target", np.array(labels, dtype=np.float64))
        else:
            self._put("class", np.array(labels, dtype=np.int64))
        return True

    def _put_units(self, given: Sequence[Units | None]) -> None:
        """Store units as indices into a table of distinct units, each serialised as JSON."""
        if "units" not in self._sinks and all(units is None for units in given):
            return
        for units in given:
            if units is not None and units not in self._units:
                self._units[units] = len(self._units)
                text = json.dumps(dataclasses.asdict(units)).encode()
                self._sink("unit.length", np.int32).add(np.array([len(text)], dtype=np.int32))
                self._sink("unit", np.uint8).add(np.frombuffer(text, dtype=np.uint8))
        numbers = [-1 if units is None else self._units[units] for units in given]
        self._put("units", np.array(numbers, dtype=np.int32), absent=-1)

    def _put_features(self, given: Sequence[Any]) -> None:
        """Store vectors concatenated, and once the number per row; either all rows have the same number, or none has
        any."""
        if given[0] is None:
            assert "features" not in self._sinks and all(vectors is None for vectors in given)
            return
        if not self.rows:
            self._sink("features.vectors", np.int32).add(np.array([len(given[0])], dtype=np.int32))
        self._sink("features", np.float32).add(np.array(given, dtype=np.float32).ravel())

    def _put_choices(self, given: Sequence[tuple[tuple[int, ...], ...] | None]) -> None:
        """Store choices as indices into a table of distinct sets, with one row per choice."""
        if "choices" not in self._sinks and all(choices is None for choices in given):
            return
        numbers = []
        for choices in given:
            if choices is not None and choices not in self._choices:
                self._choices[choices] = len(self._choices)
                for tokens in choices:
                    self._sink("choice.length", np.int32).add(np.array([len(tokens)], dtype=np.int32))
                    self._sink("choice", np.int32).add(np.array(tokens, dtype=np.int32))
                self._sink("choice.set", np.int32).add(np.array([len(choices)], dtype=np.int32))
            numbers.append(-1 if choices is None else self._choices[choices])
        self._put("choices", np.array(numbers, dtype=np.int32), absent=-1)


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
        self._header()

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
        self._header()  # same length as the first header: NumPy reserves room for the shape to grow
        self._handle.close()
        return _load_memory_mapped(self._path)

    def _header(self) -> None:
        if self._handle is not None:
            about = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self._rows,)}
            np.lib.format.write_array_header_1_0(self._handle, about)


class _RaggedColumn:
    """Lists of different lengths, concatenated."""

    def __init__(self, flat: np.ndarray, lengths: np.ndarray) -> None:
        self.flat, self.lengths = flat, lengths

    @cached_property
    def starts(self) -> np.ndarray:
        """Start index of each list, (N,) int64."""
        ends = np.cumsum(np.maximum(self.lengths, 0), dtype=np.int64)
        return ends - np.maximum(self.lengths, 0)

    def of(self, i: int) -> np.ndarray | None:
        """Return list i; None if it is missing."""
        length = int(self.lengths[i])
        return None if length < 0 else self.flat[int(self.starts[i]) : int(self.starts[i]) + length]


class _ColumnTable:
    """Columns of all rows."""

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
        self._sets: dict[int, tuple[tuple[int, ...], ...]] = {}

    @cached_property
    def _choice(self) -> tuple[_RaggedColumn, np.ndarray]:
        counts = self.columns["choice.set"]
        starts = np.cumsum(counts, dtype=np.int64) - counts
        return _RaggedColumn(self.columns["choice"], self.columns["choice.length"]), starts

    def choices(self, i: int) -> tuple[tuple[int, ...], ...] | None:
        number = int(self.columns["choices"][i]) if "choices" in self.columns else -1
        if number < 0:
            return None
        if number not in self._sets:
            tokens, starts = self._choice
            begin = int(starts[number])
            span = range(begin, begin + int(self.columns["choice.set"][number]))
            self._sets[number] = tuple(tuple(np.asarray(tokens.of(k)).tolist()) for k in span)
        return self._sets[number]

    @cached_property
    def units(self) -> list[Units]:
        """Distinct units, indexed by column `units`."""
        if "unit" not in self.columns:
            return []
        texts = _RaggedColumn(self.columns["unit"], self.columns["unit.length"])
        found = [np.asarray(texts.of(k)).tobytes() for k in range(len(texts.lengths))]
        return [Units(**json.loads(text)) for text in found]

    def units_of(self, i: int) -> Units | None:
        number = int(self.columns["units"][i]) if "units" in self.columns else -1
        return None if number < 0 else self.units[number]

    def features_of(self, i: int) -> tuple[array[float], ...] | None:
        if "features" not in self.columns:
            return None
        return tuple(array("f", vector.tobytes()) for vector in self.columns["features"][i])

    def labels(self, i: int) -> Any:
        for name in ("class", "target"):
            if name in self.columns:
                return self.columns[name][i].item()
        if "classes" in self.columns:
            return tuple(self.columns["classes"][i].tolist())
        return self.list_of("labels", i)

    def list_of(self, name: str, i: int) -> list[int] | None:
        found = self.ragged[name].of(i) if name in self.ragged else None
        return None if found is None else found.tolist()

    def text(self, name: str, i: int) -> str | None:
        found = self.ragged[name].of(i) if name in self.ragged else None
        return None if found is None else found.tobytes().decode("utf-8", "surrogatepass")

    def number(self, name: str, i: int) -> Any:
        value = self.columns[name][i].item() if name in self.columns else _NONE
        return None if value == _NONE else value

    def example(self, i: int) -> Example:
        tokens, name, where = self.list_of("input_ids", i), self.text("id", i), self.text("where", i)
        labels = self.labels(i)
        assert tokens is not None and labels is not None and name is not None and where is not None
        file = int(self.columns["file"][i])
        return Example(
            tokens,
            labels,
            name,
            where if file < 0 else self.paths[file] + where,
            bytes=self.number("bytes", i),
            segments=self.list_of("segments", i),
            choices=self.choices(i),
            gold=self.number("gold", i),
            answer=self.text("answer", i),
            decoder_ids=self.list_of("decoder_ids", i),
            prompt=self.list_of("prompt", i),
            stop=self.number("stop", i),
            words=self.list_of("words", i),
            units=self.units_of(i),
            rejected_ids=self.list_of("rejected_ids", i),
            rejected_labels=self.list_of("rejected_labels", i),
            desirable=None if (desirable := self.number("desirable", i)) is None else bool(desirable),
            features=self.features_of(i),
        )


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
        paths = list(dict.fromkeys(example.where.rpartition(":")[0] for example in examples))
        writer = ExampleWriter(paths)
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
        numbers = range(len(self)) if self._index is None else self._index.tolist()
        return map(self._table.example, numbers)

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

    def seen_targets(self) -> np.ndarray | None:
        """Return targets in training units (`flatshift.finetune.data.labels.Units.seen`), (N,) float64; None if
        there are none."""
        targets, numbers = self.column("target"), self.column("units")
        if targets is None or numbers is None:
            return targets
        units = [*self._table.units, Units(0.0)]  # index −1, rows without units, is the last
        offset, scale = (np.array([getattr(one, name) for one in units])[numbers] for name in ("offset", "scale"))
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
        found = self._table.ragged.get(name)
        if found is None or not self._table.rows:
            return None
        if self._index is None:
            return found.flat, found.starts, found.lengths
        return found.flat, found.starts[self._index], found.lengths[self._index]
