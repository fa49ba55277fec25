"""Points of a sweep: all combinations of its axes, their values in parallel, or random draws."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from flatshift.finetune.errors import UserError
from flatshift.finetune.redaction import hide_secrets
from flatshift.finetune.seeds import numpy_generator

Design = Literal["grid", "paired", "random"]

_NUMBER = r"[-+]?(?:\.\d+|\d+(?:\.\d*)?)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"^({_NUMBER})\.\.({_NUMBER})(:log)?$")
_LIKE_A_RANGE = re.compile(rf"^{_NUMBER}\s*\.\.")
"""Start of a range; a path such as `../rows.jsonl` does not match."""
_DIGITS = 6
"""Significant digits of a drawn number, so that the printed value is the exact one."""
_MAX_END = 2.0**62
"""Of a range: whole numbers up to there can be drawn."""
_MAX_REPEATS = 1000
"""Draws in a row without a new point after which a range counts as used up."""


@dataclass(frozen=True)
class ValueRange:
    """Numbers from `low` to `high`, ends included, drawn evenly on a linear or logarithmic scale; `whole` ones only."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def __str__(self) -> str:
        return f"{self.low:.12g}..{self.high:.12g}{':log' if self.log else ''}"

    def draw(self, generator: np.random.Generator) -> float | int:
        """Draw one number; every whole number of a linear range is equally likely."""
        if self.whole and not self.log:
            return int(generator.integers(int(self.low), int(self.high), endpoint=True))
        share = generator.random()
        if self.log:
            value = math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        else:
            value = self.low + share * (self.high - self.low)
        value = round(value) if self.whole else float(f"{value:.{_DIGITS}g}")
        return type(value)(min(max(value, self.low), self.high))


Values = list[Any] | ValueRange
Axes = dict[str, Values]


def parse_grid(grid: Sequence[str]) -> Axes:
    """Parse texts such as `adapter.rank=1,2` and `optimizer.lr=1e-4..1e-2:log` to {key: values}. Raises UserError for a
    missing `=`, no values, a repeated key, or an impossible range."""
    axes: Axes = {}
    for text in grid:
        key, equals, values = text.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not values.strip():
            raise UserError(f"--grid {text!r}: write it as key=v1,v2,…")
        if key in axes:
            raise UserError(f"--grid: the key {key!r} is given twice; put its values in one list")
        axes[key] = axis_values(key, _split_values(values))
    return axes


def _split_values(values: str) -> list[str]:
    """Split `1,{kind: ggpo, beta: 0}` at its commas, except those in brackets."""
    items, depth = [""], 0
    for character in values:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth <= 0:
            items.append("")
        else:
            items[-1] += character
    return [item.strip() for item in items]


def axis_values(key: str, items: Sequence[Any]) -> Values:
    """Return the values of one axis as written: a list, or the range given by a single text."""
    values = [hide_secrets(item, inside=True) if isinstance(item, str) else item for item in items]
    if len(values) == 1 and isinstance(values[0], str):
        if (value_range := parse_range(values[0], f"--grid {key}")) is not None:
            return value_range
        if _LIKE_A_RANGE.match(values[0].strip()):
            raise UserError(f"--grid {key}={values[0]}: not a range; write it as {key}=lo..hi or {key}=lo..hi:log")
    if not values or "" in values:
        raise UserError(f"--grid {key}: a value is missing; write key=v1,v2,…")
    return values


def parse_range(text: str, context: str) -> ValueRange | None:
    """Parse `lo..hi` or `lo..hi:log`; None if the text is not a range. Raises UserError for an empty range."""
    match = _RANGE.match(text.strip())
    if match is None:
        return None
    low, high, log = float(match[1]), float(match[2]), match[3] is not None
    if max(abs(low), abs(high)) > _MAX_END:
        raise UserError(f"{context}: the range {text} goes beyond {_MAX_END:g}; write smaller ends")
    if low >= high:
        raise UserError(f"{context}: the range {text} has no numbers in it; write the lower end first")
    if log and low <= 0:
        raise UserError(f"{context}: the range {text} cannot be logarithmic from {low:g}; begin above 0")
    return ValueRange(low, high, log)


def generate_points(
    axes: Mapping[str, Values], design: Design, *, count: int | None, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield the points of `axes`, each {key: value as written or drawn}.

    grid: the product, the last axis fastest. paired: first values together, second values together, … random: `count`
    different points; a larger count keeps the points of a smaller one. Raises UserError if the axes do not suit the
    design.
    """
    for key, values in axes.items():  # in parallel, one axis may stand still while another moves
        if design != "paired" and isinstance(values, list) and len(set(map(repr, values))) < len(values):
            raise UserError(f"--grid {key}: a value is given twice")
    if design == "random":
        if count is None:
            raise UserError("--design random: say with --points N how many points to draw")
        yield from _draw_points(axes, count, seed)
        return
    columns = []
    for key, values in axes.items():
        if isinstance(values, ValueRange):
            raise UserError(f"--grid {key}={values}: a range needs --design random; else list its values")
        columns.append(values)
    if count is not None:
        raise UserError(f"--points has a meaning with --design random only, not with {design}")
    if design == "paired" and len({len(values) for values in columns}) > 1:
        lengths = ", ".join(f"{key} {len(values)}" for key, values in zip(axes, columns, strict=True))
        raise UserError(f"--design paired: every axis needs equally many values, but got {lengths}")
    for row in zip(*columns, strict=True) if design == "paired" else itertools.product(*columns):
        yield dict(zip(axes, row, strict=True))


def _draw_points(axes: Mapping[str, Values], count: int, seed: int) -> Iterator[dict[str, Any]]:
    if count < 1:
        raise UserError(f"--points must be at least 1, got {count}")
    possible = math.prod(_axis_size(values) for values in axes.values())
    if count > possible:
        raise UserError(f"--points {count}: the axes have only {possible:.0f} different points")
    streams = {key: numpy_generator(seed, "sweep", key) for key in axes}
    previous: set[str] = set()
    repeats = 0
    while len(previous) < count:
        point = {key: _draw_value(values, streams[key]) for key, values in axes.items()}
        repeats = repeats + 1 if repr(point) in previous else 0
        if repeats > _MAX_REPEATS + 20 * count:
            raise UserError(
                f"--points {count}: the axes gave only {len(previous)} different points, as numbers are drawn to "
                f"{_DIGITS} digits; ask for fewer, or widen a range"
            )
        if not repeats:
            previous.add(repr(point))
            yield point


def count_points(axes: Mapping[str, Values], design: Design, count: int | None) -> float:
    """Return the largest number of points that `generate_points` can yield, without generating any."""
    if design == "random":
        return count or 0
    lengths = [len(values) for values in axes.values() if not isinstance(values, ValueRange)]
    return max(lengths, default=0) if design == "paired" else math.prod(lengths)


def _axis_size(values: Values) -> float:
    if not isinstance(values, ValueRange):
        return len(values)
    return values.high - values.low + 1 if values.whole else math.inf


def _draw_value(values: Values, generator: np.random.Generator) -> Any:
    if isinstance(values, ValueRange):
        return values.draw(generator)
    return values[int(generator.integers(len(values)))]
