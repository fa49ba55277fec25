"""Validation of callers' input: feature matrices, weights, names and texts, and settings shared by several parts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from math import inf
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_origin, get_type_hints

from flatshift.selection.errors import SelectionError
from flatshift.selection.lazy import np


def feature_matrix(value: Any, side: str) -> Any:
    """Return `value` if it is a non-empty matrix of real numbers: arrays and memory maps as they are, never copied.

    Tensors and nested lists become arrays. Raises SelectionError.
    """
    array = value
    if hasattr(value, "detach"):  # a torch tensor; NumPy has no bfloat16
        tensor = value.detach().cpu()
        array = (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    elif not (hasattr(value, "shape") and hasattr(value, "dtype")):
        try:
            array = np.asarray(value)
        except (TypeError, ValueError):
            raise SelectionError(f"{side} features must be rows of real numbers, all of one length") from None
    if array.dtype.kind not in "fiu":
        raise SelectionError(f"{side} features must be real numbers, not {array.dtype}")
    if len(array.shape) != 2:
        raise SelectionError(
            f"{side} features must have two dimensions (rows, columns), not shape {tuple(array.shape)}"
        )
    if 0 in array.shape:
        raise SelectionError(f"{side} features are empty: shape {tuple(array.shape)}")
    return array


def check_same_width(x: Any, y: Any) -> None:
    """Raise SelectionError unless pool features x (N, d) and target features y (M, d) have equally many columns."""
    if x.shape[1] != y.shape[1]:
        raise SelectionError(
            f"pool features have {x.shape[1]} columns and target features {y.shape[1]}; embed both the same way"
        )


def check_no_overflow(values: Any, name: str = "squared distances") -> None:
    """Raise SelectionError unless all of `values`, products of features with this `name`, are finite."""
    if not np.isfinite(values).all():
        raise SelectionError(f"features are so large that {name} overflow; rescale them")


def to_weights(value: Any, side: str) -> np.ndarray:
    """Copy to a float64 array. Raises SelectionError for anything but numbers."""
    try:
        return np.array(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise SelectionError(f"{side} weights must be real numbers ({error})") from None


def check_strings(value: Any, name: str) -> None:
    """Raise SelectionError naming the first entry of `value` that is no string, if it is held in memory."""
    entries = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(entries, list | tuple):  # read from disk in parts, which only store text
        return
    for row, entry in enumerate(entries):
        if not isinstance(entry, str):
            raise SelectionError(f"{name}: row {row} is {entry!r}, which is no string; give a string for each row")


def is_real(value: Any) -> bool:
    """True if `value` is a finite real number of Python's or NumPy's."""
    return isinstance(value, Real) and math.isfinite(value)


def is_whole(value: Any) -> bool:
    """True if `value` is a whole number of Python's or NumPy's, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_chunk(chunk: Any) -> None:
    """Raise SelectionError unless `chunk`, rows read at a time, is None or a whole number of at least 1."""
    if chunk is not None and not (is_whole(chunk) and chunk >= 1):
        raise SelectionError(f"chunk must be a whole number of at least 1 row, not {chunk!r}")


# ------------------------------------------------------------------------------------------------------------- settings


def bounded(default: Any, *, above: float = -inf, minimum: float = -inf, maximum: float = inf) -> Any:
    """Return a dataclass field with a default and the bounds that `Settings.check` tests."""
    return field(default=default, metadata={"above": above, "minimum": minimum, "maximum": maximum})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of settings, which are checked by their types (whole numbers, numbers, choices) and bounds (`bounded`)."""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise SelectionError for a value that cannot work; classes add what concerns several fields.

        The message begins with the field's name, so that a recipe loader can add where it was set.
        """
        for name, hint, bounds in _checked_fields(type(self)):  # type: ignore[arg-type]
            value = getattr(self, name)
            if value is None and type(None) in get_args(hint):
                continue
            if get_origin(hint) is Literal and value not in get_args(hint):
                raise SelectionError(f"{name} must be {' or '.join(map(json.dumps, get_args(hint)))}, got {value!r}")
            if hint in (int, int | None) and not is_whole(value):
                raise SelectionError(f"{name} must be a whole number, got {value!r}")
            if bounds:
                check_number(name, value, **bounds)


@cache
def _checked_fields(cls: type) -> list[tuple[str, Any, Mapping[str, float]]]:
    """Return each setting's name, type and bounds."""
    settings = next(base for base in cls.__mro__ if "__dataclass_fields__" in vars(base))
    hints = get_type_hints(settings)
    return [(item.name, hints[item.name], item.metadata) for item in fields(settings)]


def check_number(name: str, value: Any, *, above: float = -inf, minimum: float = -inf, maximum: float = inf) -> None:
    """Raise SelectionError unless `value` is a finite number > above, ≥ minimum and ≤ maximum."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if number and above < value < inf and minimum <= value <= maximum:
        return
    bounds = [f"above {above:,g}"] * (above > -inf) + [f"at least {minimum:,g}"] * (minimum > -inf)
    bounds += [f"at most {maximum:,g}"] * (maximum < inf) + ["finite"] * (value == inf)
    shown = f"{value:g}" if number else repr(value)
    raise SelectionError(f"{name} must be {' and '.join(bounds) or 'a finite number'}, got {shown}")
