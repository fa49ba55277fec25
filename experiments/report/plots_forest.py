"""A forest plot: one effect a row, with its interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.report.figure import Canvas, Chart, colour
from experiments.report.formats import effect
from experiments.report.plots_run import WIDE, draw_interval, label_rows


@dataclass(frozen=True)
class Row:
    """One effect."""

    name: str
    found: Mapping[str, Any]
    """`value`, `low`, `high`, and `p_holm`, which decides whether it is drawn in colour."""
    hollow: bool


def forest(
    key: str, rows: Sequence[Row], *, x: str, title: str, caption: str, left: int, lower_is_better: bool, scale: float
) -> Chart:
    """Every row's effect times `scale`; in colour where Holm's correction leaves p below 0.05 (blue better)."""
    with Canvas(WIDE, 70 + 27 * len(rows)) as canvas:
        ax = canvas.axes(left=left, right=90, top=16, bottom=44, x=x)
        ax.grid(axis="x")
        ax.grid(visible=False, axis="y")
        ax.axvline(0, color=colour("muted"), linewidth=1.3)
        for y, row in enumerate(rows):
            found, p = row.found, row.found["p_holm"]
            better = (found["value"] < 0) == lower_is_better
            token = "muted" if p is None or p >= 0.05 else "blue" if better else "orange"
            ends = [None if found[k] is None else scale * found[k] for k in ("low", "high")]
            draw_interval(ax, scale * found["value"], ends[0], ends[1], y, token, hollow=row.hollow)
            ax.annotate(
                effect(found, scale)[0],
                (1, y),
                xycoords=("axes fraction", "data"),
                xytext=(8, 0),
                textcoords="offset points",
                va="center",
                color=colour(token),
                fontweight="bold",
            )
        label_rows(ax, [row.name for row in rows])
        ax.margins(x=0.06)
        canvas.text(left, 11, "← better" if lower_is_better else "better →", colour="blue", weight="bold")
        return canvas.chart(key, title=title, caption=caption)
