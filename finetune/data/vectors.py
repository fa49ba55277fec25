"""The features that a row brings along (`adapter.projector`): lists of numbers in a column, checked and packed.

Vectors that are not what the projector takes make a bad row like any other: refused with its file:line, or skipped and
counted.
"""

from __future__ import annotations

import dataclasses
from array import array
from typing import Any

import numpy as np

from ..config import Projector
from .example import Example
from .rows import Row, missing_column


def with_features(example: Example, row: Row, projector: Projector) -> Example | str:
    """`example` with the vectors of its row, or what is wrong with them."""
    column = projector.features
    value = row.values.get(column)
    if value is None and column not in row.record:
        return missing_column(column, row.record, "adapter.projector.features")
    try:
        return dataclasses.replace(example, features=read_vectors(value, projector))
    except ValueError as error:
        return f"column {column!r} {error}"


def read_vectors(value: Any, projector: Projector) -> tuple[array[float], ...]:
    """The K vectors of d float32 numbers each that a column holds: a list of d numbers where K is 1, or K lists.

    Raises:
        ValueError: anything else; says what is there.
    """
    if not isinstance(value, list | tuple):
        raise ValueError("is null" if value is None else f"is a {type(value).__name__}, not a list of numbers")
    nested = bool(value) and isinstance(value[0], list | tuple)
    if not nested and projector.count > 1:
        raise ValueError(f"is one list, not {projector.count} vectors ({_whence(projector)})")
    vectors = value if nested else [value]
    if len(vectors) != projector.count:
        raise ValueError(f"holds {len(vectors)} vectors, not {projector.count} ({_whence(projector)})")
    return tuple(_vector(vector, projector.width) for vector in vectors)


def _whence(projector: Projector) -> str:
    return f"adapter.projector.{'vectors' if isinstance(projector.inject, str) else 'inject'}"


def _vector(value: Any, width: int) -> array[float]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"holds a {type(value).__name__} beside lists")
    if len(value) != width:
        raise ValueError(f"holds a vector of {len(value)} numbers, not {width} (adapter.projector.width)")
    odd = next((number for number in value if type(number) not in (float, int)), 0)
    if type(odd) not in (float, int):
        raise ValueError(f"holds {'null' if odd is None else f'a {type(odd).__name__}'} among its numbers")
    try:
        with np.errstate(over="ignore"):
            packed = np.array(value, dtype=np.float64).astype(np.float32)
    except OverflowError:
        packed = np.full(1, np.inf, dtype=np.float32)
    if not np.isfinite(packed).all():
        raise ValueError("holds a number that is not finite in float32")
    return array("f", packed.tobytes())
