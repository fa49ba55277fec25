"""Labels of a task: a class, a set of classes, or a number; parsed from any value, checked and encoded.

A value of the wrong kind makes the row bad: it is refused with its file:line, or skipped and counted.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UserError, shorten
from .rows import Row, canonical_label, missing_column_message

if TYPE_CHECKING:
    from torch import Tensor


def read_classes(value: Any, *, separator: str) -> tuple[str, ...]:
    """Return the sorted distinct classes of a label: of a list, also in JSON, or of a text split at `separator`; may be
    empty. Raises ValueError for null, an object, or a list with anything but names and numbers."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError(f'begins with [ and is no JSON list ["a", "b"]; write one, or a{separator}b') from None
    elif isinstance(value, str):
        value = [part.strip() for part in value.split(separator) if part.strip()]
    elif not isinstance(value, list | tuple):
        value = [value]
    return tuple(sorted({canonical_label(part) for part in value}))


def read_number(value: Any) -> float:
    """Convert a target to a float: a finite number, or a text that is one (`"3.80"`). Raises ValueError for anything
    else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"is a {type(value).__name__}, not a number")
    text = shorten(repr(value), 40)
    try:
        if isinstance(value, str) and "_" in value:
            raise ValueError
        number = float(value)
    except (ValueError, OverflowError):
        raise ValueError(f"is {text}, not a number") from None
    if not abs(number) < 1e38:  # float32, in which a head answers, ends a little later
        raise ValueError(f"is {text}, not a finite number below 1e38")
    return number


def iter_classes(rows: Iterable[Row]) -> Iterable[str]:
    """Yield every class in the rows, with repetitions."""
    for row in rows:
        label = row.values.get("label")
        if isinstance(label, tuple):
            yield from label
        elif label is not None:
            yield label


def sort_labels(labels: Iterable[str]) -> tuple[str, ...]:
    """Return distinct labels in head order: numerically if all are integers, else by name."""
    distinct = set(labels)
    if all(label.removeprefix("-").isdecimal() for label in distinct):
        return tuple(sorted(distinct, key=lambda label: (int(label), label)))
    return tuple(sorted(distinct))


def label_index(row: Row, label_names: Sequence[str]) -> int:
    """Return the class index of a row. Raises UserError if the label is missing or not in `label_names`; names the
    nearest."""
    label = row.values.get("label")
    if label is None:
        raise UserError(f"{row.where}: {missing_column_message('label', row.record, 'data.columns.label')}")
    try:
        return label_names.index(label)
    except ValueError:
        raise unknown_class_error(label, label_names, row.where) from None


def class_indices(rows: Sequence[Row], label_names: Sequence[str]) -> list[int]:
    """Return the class index of each row. Raises UserError as `label_index`."""
    known = {name: i for i, name in enumerate(label_names)}
    indices = (known.get(row.values.get("label", "")) for row in rows)
    return [label_index(row, label_names) if i is None else i for i, row in zip(indices, rows, strict=True)]


def unknown_class_error(label: Any, label_names: Sequence[str], context: str) -> UserError:
    """Return the error for a label outside the classes; it names the nearest."""
    nearest = difflib.get_close_matches(str(label), label_names, n=1, cutoff=0.4)
    known = ", ".join(map(repr, label_names[:12])) + (", …" if len(label_names) > 12 else "")
    hint = f"nearest is {nearest[0]!r}; " if nearest else ""
    count = len(label_names)
    return UserError(f"{context}: label {label!r} is not one of the {count} classes; {hint}known are {known}")


def encode_multi_hot(rows: Sequence[Row], label_names: Sequence[str]) -> list[tuple[int, ...]]:
    """Return each row's classes as 0 and 1 in head order, (C,); rows with the same classes share a tuple. Raises
    UserError for a label outside the classes, or no classes at all."""
    if not label_names:
        raise UserError("no training row has a class; check data.columns.label, or name them in task.labels")
    encoded: dict[tuple[str, ...], tuple[int, ...]] = {}
    for row in rows:
        labels = row.values["label"]
        if labels not in encoded:
            for label in labels:
                if label not in label_names:
                    raise unknown_class_error(label, label_names, row.where)
            encoded[labels] = tuple(int(name in labels) for name in label_names)
    return [encoded[row.values["label"]] for row in rows]


@dataclass(frozen=True)
class Units:
    """Standardisation of targets y for training: (y − offset) / scale; the saved head predicts in the user's own units.

    The last layer of the head is linear, so y = offset + scale · (w·h + b) is again such a head, with weights scale·w
    and bias offset + scale·b. Before a model is evaluated and saved, `fold_units` changes its head accordingly, in
    place. A head without a bias (as of decoders in transformers) cannot hold an offset, so its targets are only scaled.
    """

    mean: float
    """Mean of the training targets, the constant baseline."""
    offset: float = 0.0
    scale: float = 1.0
    head: str | None = None
    """Name of the linear output layer into which `offset` and `scale` are folded; None: nothing to fold."""

    def standardise(self, target: float) -> float:
        return (target - self.offset) / self.scale


@dataclass(frozen=True)
class OutputLayer:
    """Last layer of a head with one output."""

    name: str
    bias: bool


def fit_units(targets: Sequence[float], layer: OutputLayer | None) -> Units:
    """Return the units of training `targets`; `layer`: the head into which standardisation would be folded, None: do
    not standardise.

    Standardised targets have mean 0 and standard deviation 1 or, without a bias, root mean square 1. Constant targets
    keep their scale.
    """
    mean = min(max(math.fsum(targets) / len(targets), min(targets)), max(targets))  # rounding may leave this range
    if layer is None:
        return Units(mean)
    offset = mean if layer.bias else 0.0
    scale = math.sqrt(math.fsum((y - offset) ** 2 for y in targets) / len(targets))
    return Units(mean, offset, scale or 1.0, layer.name)


def fold_units(parameters: Mapping[str, Tensor], units: Units | None) -> None:
    """Change the head among `parameters` (by plain name), in place, so that it predicts in the targets' own units;
    elementwise, so also on a shard of the head."""
    import torch

    if units is None or units.head is None:
        return
    with torch.no_grad():
        for name, parameter in parameters.items():
            if name == f"{units.head}.weight":
                parameter.mul_(units.scale)
            elif name == f"{units.head}.bias":
                parameter.mul_(units.scale).add_(units.offset)
