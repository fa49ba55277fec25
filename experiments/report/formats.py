"""Number formats for readers: few digits, real minus signs, units."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from flatshift.experiments.statistics.curve import capitalise as capitalise
from flatshift.experiments.statistics.intervals import Interval
from flatshift.finetune.errors import escape_control_characters
from flatshift.finetune.evaluate.metrics import find_metric

SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float | int | None, digits: int = 3) -> str:
    """Format with at least `digits` significant digits and thousands separators; as 10ⁿ below 1e-3 and above 1e9."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if isinstance(value, int):
        return f"{value:,}".replace("-", "−")
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if exponent < -3 or exponent >= 9:
        mantissa, power = f"{value:.{max(digits - 2, 0)}e}".split("e")
        return f"{mantissa}\u202f×\u202f10{str(int(power)).translate(SUPERSCRIPT)}".replace("-", "−")
    return f"{value:,.{max(digits - 1 - exponent, 0)}f}".replace("-", "−")


def signed_number(value: float | None, digits: int = 3) -> str:
    """Format like `number`, with a plus sign on positive values."""
    return ("+" if value is not None and value > 0 else "") + number(value, digits)


def decimals_for(half_width: float | None, value: float) -> int:
    """Return the decimals that show an interval of this half width to two digits, so that ends and value align."""
    scale = half_width if half_width else abs(value) / 100
    return 2 if not scale or not math.isfinite(scale) else min(max(1 - math.floor(math.log10(scale)), 0), 6)


def estimate(
    value: float, low: float | None = None, high: float | None = None, *, plus: bool = False
) -> tuple[str, str]:
    """Return (value, "low to high") with a common number of decimals, or as powers of ten if one is 1e9 or more or
    all are small and take more than six. The second text is empty without an interval or for one of zero width."""
    if not math.isfinite(value):
        return number(value), ""
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return (signed_number if plus else number)(value), ""
    largest, width = max(abs(value), abs(low), abs(high)), (high - low) / 2 or abs(value) / 100
    if largest >= 1e9 or (largest < 1e-3 and 0 < width < 1e-5):
        # of small values as many digits as show the width to two
        digits = 3 if largest > 1 else 3 + max(math.floor(math.log10(largest)) - math.floor(math.log10(width)), 0)
        texts = [(signed_number if plus else number)(x, digits) for x in (value, low, high)]
    else:
        decimals = decimals_for((high - low) / 2, value)
        sign = "+" if plus else ""
        # Adding 0.0 turns a rounded −0.00 into 0.00.
        texts = [f"{round(x, decimals) + 0.0:{sign},.{decimals}f}".replace("-", "−") for x in (value, low, high)]
    return texts[0], f"{texts[1]} to {texts[2]}" if high > low else ""


def estimate_figure(figure: Mapping[str, Any] | Interval, *, plus: bool = False) -> tuple[str, str]:
    """Return the two texts of `estimate` for {value, low, high} or an interval; `low` and `high` may be missing."""
    if isinstance(figure, Interval):
        figure = asdict(figure)
    return estimate(figure["value"], figure.get("low"), figure.get("high"), plus=plus)


def with_interval(figure: Mapping[str, Any] | Interval | None, *, plus: bool = False) -> str:
    """Format as `0.71 (0.68 to 0.74)`, without brackets if there is no interval; a dash for no value."""
    if figure is None or (isinstance(figure, Mapping) and figure["value"] is None):
        return "–"
    text, interval = estimate_figure(figure, plus=plus)
    return f"{text} ({interval})" if interval else text


def mean_and_interval(figure: Mapping[str, Any] | None, scale: float = 1.0, *, plus: bool = True) -> tuple[str, str]:
    """Return (mean, interval) of {value, low, high}, a dash for whatever is missing; signed, as for differences."""
    if figure is None:
        return "–", "–"
    low, high = (None if figure[k] is None else scale * figure[k] for k in ("low", "high"))
    mean, interval = estimate(scale * figure["value"], low, high, plus=plus)
    return mean, interval or "–"


def percent(share: float | None) -> str:
    """Format a share as a percentage."""
    if share is None:
        return "–"
    places = 0 if abs(share) >= 0.1 or share == 0 else 1 if abs(share) >= 0.01 else 2
    return f"{100 * share:.{places}f}\u00a0%".replace("-", "−")


def seconds(value: float | None) -> str:
    """Format a duration."""
    if value is None or not math.isfinite(value):
        return "–"
    if value < 10:
        return f"{value:.1f}\u00a0s"
    if value < 60:
        return f"{value:.0f}\u00a0s"
    minutes, remainder = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes}\u00a0min {remainder:02d}\u00a0s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}\u00a0h {minutes:02d}\u00a0min"


def json_value(value: Any) -> str:
    """Format any JSON value on one line."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, dict | list):
        text = json.dumps(value, ensure_ascii=False)
        return text if len(text) <= 120 else text[:119] + "…"
    return str(value)


AXES = {
    "adapter.rank": "rank r",
    "adapter.alpha": "LoRA alpha",
    "train.steps": "optimizer steps of the run",
    "step": "optimizer steps",
    "data.train.limit": "training examples n",
    "data.label_noise": "label noise (share of labels)",
    "optimizer.lr": "learning rate",
    "regularizer.sigma": "noise σ, over row norm",
    "regularizer.rho": "radius ρ",
    "regularizer.kind": "regularizer",
    "train.batch_size": "batch size (examples)",
}
"""Readable names of sweep axes, with units."""


def figure_name(column: str) -> str:
    """Format a column: `test.error` → `test error`; `train.f1_macro` → `train macro F1`."""
    split, dot, metric = column.partition(".")
    return f"{split} {find_metric(metric).title}" if dot else find_metric(column).title


def axis_name(axis: str) -> str:
    """Return the readable name: `data.train.limit` → `training examples n`; unknown keys are returned unchanged."""
    return AXES.get(axis, axis)


def axis_value(value: Any) -> str:
    """Format a value of an axis: plain digits, `none` for null."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        short = float(f"{value:.6g}")
        plain = value == 0 or 1e-5 <= abs(value) < 1e6
        return (f"{short:.12f}".rstrip("0").rstrip(".") if plain else f"{short:g}").replace("-", "−")
    return f"{value:,}".replace("-", "−") if isinstance(value, int) else str(value)


def shorten_labels(labels: Sequence[str], longest: int) -> list[str]:
    """Cut labels to `longest` characters in the middle, and number them if some were equal then."""
    half = (longest - 1) // 2
    short = [text if len(text) <= longest else f"{text[:half]}…{text[-half:]}" for text in labels]
    alike = len(set(short)) < len(set(labels))
    return [f"{place}: {text}"[:longest] for place, text in enumerate(short, 1)] if alike else short


def setting(values: Mapping[str, Any]) -> str:
    """Format a setting: `{"adapter.rank": 4, "optimizer.lr": 0.001}` → `rank = 4, lr = 0.001`."""
    return ", ".join(f"{axis.rpartition('.')[2]} = {axis_value(value)}" for axis, value in values.items())


def title_at(title: str, values: Mapping[str, Any]) -> str:
    """Return the title followed by the setting, if that has any value."""
    return f"{title}, {setting(values)}" if values else title


def align_columns(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> str:
    """Format a table for a terminal, columns two spaces apart; columns with an index in `right` are right-aligned."""
    lines = [[escape_control_characters(text) for text in line] for line in (columns, *rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]

    def align(text: str, index: int) -> str:
        return text.rjust(widths[index]) if index in right else text.ljust(widths[index])

    return "\n".join("  ".join(align(text, index) for index, text in enumerate(line)).rstrip() for line in lines)
