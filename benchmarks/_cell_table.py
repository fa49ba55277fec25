"""One Parquet file a study: a line a cell, a column a key; what is read back equals what was written.

    write_cells(file, {"9ca67f32": {"status": "done", "metrics": {"loss": 0.58}}})
    read_cells(file)["9ca67f32"]["metrics"]["loss"]

Dictionaries are structs and lists are lists; values of several types, and keys in several orders, are JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flatshift.finetune.atomic import atomic_file

Cells = dict[str, dict[str, Any]]
_CELL = "cell file"
_SCALARS: dict[type, pa.DataType] = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
_FORM = b"flatshift"
_JSON, _OPTIONAL = {_FORM: b"json"}, {_FORM: b"no key where null"}
_ABSENT = object()


class _NoType(Exception):
    """Values that no one Arrow type holds."""


def write_cells(file: Path, cells: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the cells, sorted by name. Raises ValueError for cells without keys."""
    names = sorted(cells)
    own = dict.fromkeys(key for name in names for key in cells[name])
    if not own:
        raise ValueError(f"{file}: the cells have no keys")
    try:
        struct = _struct([cells[name] for name in names])
    except _NoType:  # cells of other versions of the code have their own keys in another order
        struct = _struct([{key: cells[name][key] for key in own if key in cells[name]} for name in names])
    rows = [{_CELL: name, **_encode(cells[name], struct)} for name in names]
    table = pa.Table.from_pylist(rows, schema=pa.schema([pa.field(_CELL, pa.string()), *struct]))
    with atomic_file(file) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def read_cells(file: Path) -> Cells:
    """The cells of a file by name; none where there is no file."""
    if not file.is_file():
        return {}
    table = pq.read_table(file)
    struct = pa.struct([field for field in table.schema if field.name != _CELL])
    return {row.pop(_CELL): _decode(row, struct) for row in table.to_pylist()}


def _struct(rows: Sequence[Mapping[str, Any]]) -> pa.StructType:
    """Raises _NoType where the rows have their keys in several orders, or none."""
    after: dict[str, set[str]] = {key: set() for row in rows for key in row}
    for before, key in (pair for row in rows for pair in pairwise(row)):
        after[key].add(before)
    try:
        keys = list(TopologicalSorter(after).static_order())
    except CycleError:
        raise _NoType from None
    if not keys:
        raise _NoType
    return pa.struct([_field(key, [row.get(key, _ABSENT) for row in rows]) for key in keys])


def _field(key: str, values: Sequence[Any]) -> pa.Field:
    """A column with the type of its values, else with their JSON; a null is an absent key, or None where none is."""
    optional, null = (any(value is kind for value in values) for kind in (_ABSENT, None))
    try:
        if optional and null:
            raise _NoType
        kind = _type(value for value in values if value is not _ABSENT)
        return pa.field(key, kind, metadata=_OPTIONAL if optional else None)
    except _NoType:
        return pa.field(key, pa.string(), metadata=_JSON)


def _type(values: Iterable[Any]) -> pa.DataType:
    some = [value for value in values if value is not None]
    kinds = {type(value) for value in some}
    if kinds == {dict}:
        return _struct(some)
    if kinds == {list}:
        return pa.list_(_type(item for value in some for item in value))
    if len(kinds) == 1 and (scalar := _SCALARS.get(kinds.pop())):
        return scalar
    raise _NoType


def _encode(value: Any, kind: pa.DataType) -> Any:
    """A value as Arrow takes it."""
    if pa.types.is_struct(kind) and value is not None:
        results = {field.name: field for field in kind}
        return {
            key: json.dumps(one) if results[key].metadata == _JSON else _encode(one, results[key].type)
            for key, one in value.items()
        }
    if pa.types.is_list(kind) and value is not None:
        return [_encode(item, kind.value_type) for item in value]
    return value


def _decode(value: Any, kind: pa.DataType) -> Any:
    """The value that `_encode` was given."""
    if pa.types.is_struct(kind) and value is not None:
        return {
            field.name: json.loads(value[field.name])
            if field.metadata == _JSON
            else _decode(value[field.name], field.type)
            for field in kind
            if value[field.name] is not None or field.metadata is None
        }
    if pa.types.is_list(kind) and value is not None:
        return [_decode(item, kind.value_type) for item in value]
    return value
