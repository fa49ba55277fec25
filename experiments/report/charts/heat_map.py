"""Heat maps of a sweep over two axes, with the contour where training data counts as fitted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flatshift.experiments.report import formats
from flatshift.experiments.report.figure import Canvas, Chart, colour
from flatshift.experiments.results.table import Setting, SweepTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEVELS = 12
"""Shades of a map; each is one path, so that a large map stays a small file."""
_LONGEST = 29
"""Characters of a label, so that labels take at most 45 % of the width."""


def heat_maps(
    table: SweepTable, x: str, y: str, setting: Setting, columns: Sequence[str], *, name: str, epsilon: float
) -> list[Chart]:
    """Draw the mean of each metric over the values of two axes, one map each, all with one colour scale. The contour
    where training rows count as fitted is drawn on every map if they are on both sides of ε."""
    start = 1 if x == "step" and 0 in table.values(x) else 0  # step 0, before any training
    values = (table.values(x)[start:], table.values(y))
    grids = {column: table.grid(column, x, y, setting)[:, start:] for column in columns if table.has(column)}
    grids = {column: grid for column, grid in grids.items() if np.isfinite(grid).sum() > 1}
    if not grids:
        return []
    finite = np.concatenate([grid[np.isfinite(grid)] for grid in grids.values()])
    limits = float(finite.min()), float(finite.max())
    fit = table.fitted_column
    fitted = table.grid(fit, x, y, setting)[:, start:] if table.has(fit) else None
    wide, high = map(len, values)
    x_labels, y_labels = (formats.shorten_labels([*map(formats.axis_value, each)], _LONGEST) for each in values)
    left, right = 30 + 7.2 * max(map(len, y_labels)), 74
    x_title, y_title = formats.axis_name(x), formats.axis_name(y)
    written = wide <= 9 and high <= 12
    charts = []
    for column, grid in grids.items():
        with Canvas(540, max(300, 84 + (40 if high <= 8 else 22) * high)) as canvas:
            ax = canvas.axes(left=left, right=right, top=30, bottom=48, y=y_title, x=x_title)
            ax.grid(visible=False)
            for spine in ax.spines.values():
                spine.set_visible(False)
            lowest, extent = limits[0], limits[1] - limits[0]
            _draw_cells(ax, (grid - lowest) / extent if extent else grid * 0.0)
            if written:
                _write_values(ax, grid, lowest="train" not in column)
            contour = fitted is not None and _draw_contour(ax, fitted, epsilon)
            ax.set_xlim(0, wide)
            ax.set_ylim(0, high)
            cell_width = (canvas.width - left - right) / max(wide, 1)
            step = max(1, math.ceil((7.2 * max(map(len, x_labels)) + 6) / cell_width))
            ax.set_xticks([i + 0.5 for i in range(wide)][::step], x_labels[::step])
            ax.set_yticks([j + 0.5 for j in range(high)], y_labels)
            ax.tick_params(bottom=False)
            _draw_colour_bar(canvas, limits, canvas.width - right + 18, 48, canvas.height - 30)
            caption = f"Mean {formats.figure_name(column)} over seeds; stronger colour is higher"
            caption += "; the frame marks the lowest mean." if written and "train" not in column else "."
            if contour:
                caption += f" Line: {formats.figure_name(fit)} = {epsilon:g}, between the means of neighbouring cells."
            caption += " Empty: no finished cell." if np.isnan(grid).any() else ""
            title = f"{formats.capitalise(formats.figure_name(column))} over {x_title} and {y_title}"
            chart = f"{name}-{column.replace('.', '-')}"
            charts.append(canvas.chart(chart, title=formats.title_at(title, setting), caption=caption))
    return charts


def _shade_alpha(level: int) -> float:
    return 0.05 + 0.75 * level / (_LEVELS - 1)


def _draw_cells(ax: Axes, share: np.ndarray) -> None:
    """Draw the cells, those of one shade as one path."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    box = [(0.02, 0.03), (0.98, 0.03), (0.98, 0.97), (0.02, 0.97), (0.02, 0.03)]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    levels = np.where(np.isfinite(share), np.rint(share * (_LEVELS - 1)), -1).astype(int)
    for level in range(_LEVELS):
        rows, columns = np.nonzero(levels == level)
        if not len(rows):
            continue
        vertices = [(i + dx, j + dy) for j, i in zip(rows.tolist(), columns.tolist(), strict=True) for dx, dy in box]
        path = Path(vertices, codes * len(rows))
        ax.add_patch(PathPatch(path, facecolor=colour("orange"), alpha=_shade_alpha(level), linewidth=0, gid="cells"))


def _write_values(ax: Axes, grid: np.ndarray, *, lowest: bool) -> None:
    """Write the values into the cells and frame the lowest one."""
    from matplotlib.patches import Rectangle

    best = np.unravel_index(int(np.nanargmin(grid)), grid.shape) if lowest else None
    for (j, i), value in np.ndenumerate(grid):
        if not math.isfinite(value):
            continue
        framed = best == (j, i)
        text = formats.number(float(value), 2 if abs(value) < 1 else 3)
        style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 10.5, "color": colour("ink")}
        ax.annotate(text, (i + 0.5, j + 0.5), fontweight="bold" if framed else "normal", **style)
        if framed:
            edge: dict[str, Any] = {"facecolor": "none", "edgecolor": colour("ink"), "linewidth": 1.6}
            ax.add_patch(Rectangle((i + 0.02, j + 0.03), 0.96, 0.94, **edge))


def _draw_contour(ax: Axes, fitted: np.ndarray, epsilon: float) -> bool:
    """Draw the line train error = ε through the cell centres up to the border; return True if it was drawn."""
    finite = fitted[np.isfinite(fitted)]
    if min(fitted.shape) < 2 or not len(finite) or not finite.min() <= epsilon < finite.max():
        return False
    # Means are at the cell centres; the outer half cells repeat them.
    padded = np.pad(fitted, 1, mode="edge")
    high, wide = fitted.shape
    at_x = np.concatenate([[0.0], np.arange(wide) + 0.5, [wide]])
    at_y = np.concatenate([[0.0], np.arange(high) + 0.5, [high]])
    style: dict[str, Any] = {"colors": [colour("ink")], "linewidths": 2.0}
    ax.contour(at_x, at_y, np.ma.masked_invalid(padded), levels=[epsilon], **style).set_gid("epsilon")
    return True


def _draw_colour_bar(canvas: Canvas, limits: tuple[float, float], x: float, bottom: float, top: float) -> None:
    """Draw the colour scale next to a map, from `bottom` to `top` px."""
    from matplotlib.patches import Rectangle

    width, height = canvas.width, canvas.height
    ax = canvas.figure.add_axes((x / width, bottom / height, 12 / width, (top - bottom) / height))
    for level in range(_LEVELS):
        style: dict[str, Any] = {"facecolor": colour("orange"), "alpha": _shade_alpha(level), "linewidth": 0}
        ax.add_patch(Rectangle((0, level / _LEVELS), 1, 1 / _LEVELS, **style))
    ax.set_axis_off()
    low, high = limits
    decimals = formats.decimals_for((high - low) / 4 or None, high)
    for share in (0.0, 0.5, 1.0):
        value = f"{low + share * (high - low) + 0.0:.{decimals}f}".replace("-", "−")
        canvas.text(x + 15, bottom + share * (top - bottom), value, colour="muted", size=10.5)
