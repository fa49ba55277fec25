"""Rows with intervals: a dot with its bar on each row, and a text at the right."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flatshift.experiments.report.figure import WIDE, Canvas, Chart, colour
from flatshift.experiments.report.formats import mean_and_interval


@dataclass(frozen=True)
class IntervalRow:
    """One value with its interval and a text at its right."""

    name: str
    value: float
    low: float | None
    high: float | None
    text: str
    token: str
    hollow: bool = False


def interval_chart(
    name: str,
    rows: Sequence[IntervalRow | str],
    *,
    title: str,
    caption: str,
    x: str,
    width: int,
    height: int,
    left: float,
    right: float,
    zero: bool = False,
    note: tuple[str, str] | None = None,
) -> Chart:
    """Draw the rows from top to bottom; a text among them is a heading. zero: draw a line at 0, the reference of
    differences. note: (text, colour) below the axis."""
    with Canvas(width, height) as canvas:
        ax = canvas.axes(left=left, right=right, top=20, bottom=42, x=x)
        use_vertical_grid(ax)
        if zero:
            ax.axvline(0, color=colour("muted"), linewidth=1.3)
        for y, row in enumerate(rows):
            if isinstance(row, IntervalRow):
                draw_row(ax, row, y)
        label_rows(ax, [row if isinstance(row, str) else row.name for row in rows])
        for label, row in zip(ax.get_yticklabels(), rows, strict=True):
            if isinstance(row, str):
                label.set(color=colour("muted"), style="italic")
        ax.margins(x=0.06)
        if width < WIDE:
            ax.locator_params(axis="x", nbins=6)
        if note is not None:
            canvas.text(left, height - 9, note[0], colour=note[1], weight="bold")
        return canvas.chart(name, title=title, caption=caption)


def effect_chart(
    name: str,
    effects: Sequence[tuple[str, Mapping[str, Any], bool]],
    *,
    title: str,
    caption: str,
    x: str,
    left: float,
    scale: float,
    lower_is_better: bool,
) -> Chart:
    """Draw (name, {value, low, high, p_holm}, hollow) as rows, multiplied by `scale`. Rows whose Holm-corrected p is
    below 0.05 are coloured (blue better, orange worse)."""
    rows = []
    for label, effect, hollow in effects:
        p, better = effect["p_holm"], (effect["value"] < 0) == lower_is_better
        token = "muted" if p is None or p >= 0.05 else "blue" if better else "orange"
        low, high = (None if effect[end] is None else scale * effect[end] for end in ("low", "high"))
        text = mean_and_interval(effect, scale)[0]
        rows.append(IntervalRow(label, scale * effect["value"], low, high, text, token, hollow))
    note = ("← better" if lower_is_better else "better →", "blue")
    size: dict[str, Any] = {"width": WIDE, "height": 70 + 27 * len(rows), "left": left, "right": 90}
    return interval_chart(name, rows, title=title, caption=caption, x=x, zero=True, note=note, **size)


def use_vertical_grid(ax: Any) -> None:
    """Draw vertical grid lines only, because rows are read across."""
    ax.grid(axis="x")
    ax.grid(visible=False, axis="y")


def draw_row(ax: Any, row: IntervalRow, y: float) -> None:
    """Draw a dot on row `y` with its interval as a bar, and its text."""
    token = colour(row.token)
    if row.low is not None and row.high is not None and math.isfinite(row.low) and math.isfinite(row.high):
        ax.plot([row.low, row.high], [y, y], color=token, linewidth=3, alpha=0.45, solid_capstyle="round")
    face = colour("surface") if row.hollow else token
    ax.plot([row.value], [y], "o", markersize=8, markerfacecolor=face, markeredgecolor=token, markeredgewidth=2)
    annotate_row(ax, y, row.text, row.token, fontweight="bold")


def annotate_row(ax: Any, y: float, text: str, token: str, **style: Any) -> None:
    """Write a text at the right end of row `y`."""
    place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "xytext": (8, 0), "textcoords": "offset points"}
    ax.annotate(text, (1, y), va="center", color=colour(token), **place, **style)


def label_rows(ax: Any, labels: Sequence[str]) -> None:
    """Label rows 0, 1, … from the top at their left."""
    ax.set_ylim(len(labels) - 0.4, -0.6)
    ax.set_yticks(range(len(labels)), labels, color=colour("ink"))
