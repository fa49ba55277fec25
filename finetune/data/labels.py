"""What the label column of a task holds: a class, a set of classes, or a number; read from any value, checked, encoded.

A value that is not of the task's kind is a bad row like any other: refused with its file:line, or skipped and counted.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from .rows import Row, canonical_label, missing_column

if TYPE_CHECKING:
    from torch import Tensor


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


# ---------------------------------------------------------------------------------------------- units of a number


@dataclass(frozen=True)
class Units:
    """How targets y are seen in training: (y − offset) / scale; the saved head answers in the user's own units.

    The head of a backbone is linear last, so that y = offset + scale · (w·h + b) is a head again: scale·w and
    offset + scale·b. Before a run is judged and saved, its head becomes that one (`fold_units`), in place. A head
    without a bias (decoders in transformers have none) has no place for an offset, so there targets are only scaled.
    """

    mean: float
    """Of the training targets: what a model that has learnt nothing answers."""
    offset: float = 0.0
    scale: float = 1.0
    head: str | None = None
    """The linear layer that answers, as `offset` and `scale` are to be folded into it; None: nothing is to be."""

    def seen(self, target: float) -> float:
        """A target as training sees it."""
        return (target - self.offset) / self.scale


@dataclass(frozen=True)
class OutputLayer:
    """The last layer of a head of one output."""

    name: str
    bias: bool


def units_of(targets: Sequence[float], layer: OutputLayer | None) -> Units:
    """The units of training `targets`; `layer`: the head that standardised ones would be folded into, None: as given.

    Standardised: mean 0 and deviation 1, or, without a bias, root mean square 1. Targets that are all alike keep their
    scale.
    """
    mean = math.fsum(targets) / len(targets)
    if layer is None:
        return Units(mean)
    offset = mean if layer.bias else 0.0
    scale = math.sqrt(math.fsum((y - offset) ** 2 for y in targets) / len(targets))
    return Units(mean, offset, scale or 1.0, layer.name)


def fold_units(parameters: Mapping[str, Tensor], units: Units | None) -> None:
    """Make the head among `parameters` (by plain name) answer in the targets' own units, in place.

    Elementwise, so a shard of the head is folded like the whole of it.
    """
    import torch

    if units is None or units.head is None:
        return
    with torch.no_grad():
        for name, parameter in parameters.items():
            if name == f"{units.head}.weight":
                parameter.mul_(units.scale)
            elif name == f"{units.head}.bias":
                parameter.mul_(units.scale).add_(units.offset)
