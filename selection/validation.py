"""Validation of callers' input: feature matrices, weights, names and texts, and settings shared by several parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from inspect import signature
from math import inf
from typing import Any, TypeVar

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


def check_no_overflow(values: Any, what: str = "squared distances") -> None:
    """Raise SelectionError unless all of `values`, the product `what` of features, are finite."""
    if not np.isfinite(values).all():
        raise SelectionError(f"features are so large that {what} overflow; rescale them")


def to_weights(value: Any, side: str) -> np.ndarray:
    """Copy to a float64 array. Raises SelectionError for anything but numbers."""
    try:
        return np.array(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise SelectionError(f"{side} weights must be real numbers ({error})") from None


def check_strings(value: Any, name: str) -> None:
    """Raise SelectionError naming the first entry of `value` that is no string, if it is held in memory."""
    held = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(held, list | tuple):  # read from disk in parts, which only store text
        return
    bad = next((row for row, entry in enumerate(held) if not isinstance(entry, str)), None)
    if bad is not None:
        raise SelectionError(f"{name}: row {bad} is {held[bad]!r}, which is no string; give a string for each row")


def is_real(value: Any) -> bool:
    """True if `value` is a finite real number of Python's or NumPy's."""
    return isinstance(value, int | float | np.integer | np.floating) and math.isfinite(value)


def check_chunk(chunk: Any) -> None:
    """Raise SelectionError unless `chunk`, rows read at a time, is None or a whole number of at least 1."""
    whole = isinstance(chunk, int | np.integer) and not isinstance(chunk, bool)
    if chunk is not None and not (whole and chunk >= 1):
        raise SelectionError(f"chunk must be a whole number of at least 1 row, not {chunk!r}")


# ------------------------------------------------------------------------------------------------------------- settings


Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True)
class SelectorContext:
    """Arguments of a selector other than its settings.

    seed: for random draws. budget: for methods that optimise their selection for one size (gotd in rounds, domains),
    and for the overlap that gotd measures. measure: texts → mean −log p per token, for perplexity. device: of the
    transport solver. state: directory in which a long solve of gotd saves its state for resuming after a kill.
    """

    seed: int
    budget: int | None = None
    measure: Callable[..., Any] | None = None
    device: str = "cpu"
    state: str | None = None


def from_settings(selector: type[Made], settings: Any, around: SelectorContext, **more: Any) -> Made:
    """Build `selector` with each parameter found in `more`, `settings` or `around`, by name."""
    known = {field.name: getattr(part, field.name) for part in (around, settings) for field in fields(part)} | more
    return selector(**{name: known[name] for name in signature(selector).parameters if name in known})


def check_fields(settings: Any, *names: str, above: float = -inf, least: float = -inf, most: float = inf) -> None:
    """Raise ValueError for fields that are not finite, not above `above`, below `least` or over `most`; None passes.

    The message begins with the field's name, so that a recipe loader can add where it was set.
    """
    for name in names:
        value = getattr(settings, name)
        if value is None or (above < value < inf and least <= value <= most):
            continue
        low = f"above {above:,g}" if above > -inf else f"at least {least:,g}"
        high = "" if most == inf else f" and at most {most:,g}"
        raise ValueError(f"{name} must be {low}{high}{' and finite' * (value == inf)}, got {value:g}")
