"""What the label column of a task holds: a class, a set of classes, or a number; read from any value, checked, encoded.

A value that is not of the task's kind is a bad row like any other: refused with its file:line, or skipped and counted.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import UserError
from .rows import Row, canonical_label, missing_column


def read_classes(value: Any, *, separator: str) -> tuple[str, ...]:
    """The distinct classes of a label, sorted: of a list, or of a text that `separator` divides; none is allowed.

    Raises:
        ValueError: null, an object, or a list with something else than names and numbers.
    """
    if isinstance(value, str):
        value = [part.strip() for part in value.split(separator) if part.strip()]
    elif not isinstance(value, list | tuple):
        value = [value]
    return tuple(sorted({canonical_label(part) for part in value}))


def read_number(value: Any) -> float:
    """A target as a float: a finite number, or a text that is one (`"3.80"`).

    Raises:
        ValueError: anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"is a {type(value).__name__}, not a number")
    try:
        if isinstance(value, str) and "_" in value:
            raise ValueError
        number = float(value)
    except (ValueError, OverflowError):
        raise ValueError(f"is {_shown(value)}, not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"is {_shown(value)}, not a finite number")
    return number


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"


def classes_of(rows: Iterable[Row]) -> Iterable[str]:
    """Every class that the rows name, as often as they do."""
    for row in rows:
        label = row.values.get("label")
        if isinstance(label, tuple):
            yield from label
        elif label is not None:
            yield label


def sort_labels(labels: Iterable[str]) -> tuple[str, ...]:
    """Distinct labels in head order: by number if all are integers, else by name."""
    distinct = set(labels)
    if all(label.removeprefix("-").isdecimal() for label in distinct):
        return tuple(sorted(distinct, key=lambda label: (int(label), label)))
    return tuple(sorted(distinct))


def label_index(row: Row, label_names: Sequence[str]) -> int:
    """The class of a row.

    Raises:
        UserError: the label is missing or not among `label_names`; names the nearest.
    """
    label = row.values.get("label")
    if label is None:
        raise UserError(f"{row.where}: {missing_column('label', row.record, 'data.columns.label')}")
    try:
        return label_names.index(label)
    except ValueError:
        raise unknown_class(label, label_names, row.where) from None


def class_indices(rows: Sequence[Row], label_names: Sequence[str]) -> list[int]:
    """The class of each row. Raises UserError as `label_index`."""
    known = {name: i for i, name in enumerate(label_names)}
    found = (known.get(row.values.get("label", "")) for row in rows)
    return [at if at is not None else label_index(row, label_names) for at, row in zip(found, rows, strict=True)]


def unknown_class(label: Any, label_names: Sequence[str], where: str) -> UserError:
    """The sentence for a label outside the classes; it names the nearest."""
    nearest = difflib.get_close_matches(str(label), label_names, n=1, cutoff=0.4)
    known = ", ".join(map(repr, label_names[:12])) + (", …" if len(label_names) > 12 else "")
    hint = f"nearest is {nearest[0]!r}; " if nearest else ""
    return UserError(f"{where}: label {label!r} is not one of the {len(label_names)} classes; {hint}known are {known}")


def several_hot(rows: Sequence[Row], label_names: Sequence[str]) -> list[tuple[int, ...]]:
    """Each row's classes as 0 and 1 in head order, (C,); rows with the same classes share a tuple.

    Raises:
        UserError: a label outside the classes, or no class at all.
    """
    if not label_names:
        raise UserError("no training row has a class; check data.columns.label, or name them in task.labels")
    known = {name: i for i, name in enumerate(label_names)}
    made: dict[tuple[str, ...], tuple[int, ...]] = {}
    for row in rows:
        labels = row.values["label"]
        if labels not in made:
            for label in labels:
                if label not in known:
                    raise unknown_class(label, label_names, row.where)
            made[labels] = tuple(int(name in labels) for name in label_names)
    return [made[row.values["label"]] for row in rows]
