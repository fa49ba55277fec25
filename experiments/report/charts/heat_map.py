"""Heat maps of a sweep over two axes, with the contour where training data counts as fitted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flatshift.experiments.report import formats
from flatshift.experiments.report.figure import Canvas, Chart, colour
from flatshift.experiments.results.table import Setting, SweepTable

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes

_LEVELS = 12
"""Shades of a map; each is one path, so that a large map stays a small file."""


def heat_maps(
    table: SweepTable,
    x: str,
    y: str,
    where: Setting,
    columns: Sequence[str],
    *,
    name: str,
    epsilon: float,
    wide: bool = False,
) -> list[Chart]:
    """Draw the mean of each metric over the values of two axes, one map each, all with one colour scale.

    The contour of train error = ε is drawn on every map if the train error is on both sides of it.
    """
    import numpy as np

    xs, ys = [v for v in table.values(x) if not (x == "step" and v == 0)], table.values(y)
    first = len(table.values(x)) - len(xs)
    grids = {c: table.grid(c, x, y, where)[:, first:] for c in columns if table.has(c)}
    grids = {c: g for c, g in grids.items() if np.isfinite(g).sum() > 1}
    if not grids:
        return []
    finite = np.concatenate([g[np.isfinite(g)] for g in grids.values()])
    low, high = float(finite.min()), float(finite.max())
    fitted = table.grid("train.error", x, y, where)[:, first:] if table.has("train.error") else None
    return [
        _heat_map(
            grid,
            xs,
            ys,
            (x, y),
            (low, high),
            fitted,
            epsilon,
            where,
            column,
            f"{name}-{column.replace('.', '-')}",
            wide,
        )
        for column, grid in grids.items()
    ]


def _heat_map(
    grid: np.ndarray,
    xs: list[Any],
    ys: list[Any],
    axes: tuple[str, str],
    limits: tuple[float, float],
    fitted: np.ndarray | None,
    epsilon: float,
    where: Setting,
    column: str,
    name: str,
    wide: bool,
) -> Chart:
    import numpy as np

    width = 1112 if wide else 540
    height = max(300, 84 + (40 if len(ys) <= 8 else 22) * len(ys))
    left, right = 30 + 7.2 * max(len(formats.axis_value(v)) for v in ys), 74
    with Canvas(width, height) as canvas:
        ax = canvas.axes(
            left=left, right=right, top=30, bottom=48, y=formats.axis_name(axes[1]), x=formats.axis_name(axes[0])
        )
        ax.grid(visible=False)
        for spine in ax.spines.values():
            spine.set_visible(False)
        share = _scale_values(grid, limits)
        _draw_cells(ax, share)
        written = len(xs) <= (18 if wide else 9) and len(ys) <= 12
        if written:
            _write_values(ax, grid, lowest="train" not in column)
        drawn = fitted is not None and _draw_contour(ax, fitted, epsilon)
        ax.set_xlim(0, len(xs))
        ax.set_ylim(0, len(ys))
        room = (width - left - right) / max(len(xs), 1)
        every = max(1, math.ceil((7.2 * max(len(formats.axis_value(v)) for v in xs) + 6) / room))
        ax.set_xticks([i + 0.5 for i in range(len(xs))][::every], [formats.axis_value(v) for v in xs][::every])
        ax.set_yticks([j + 0.5 for j in range(len(ys))], [formats.axis_value(v) for v in ys])
        ax.tick_params(bottom=False)
        _draw_colour_bar(canvas, limits, width - right + 18, 48, height - 30)
        caption = f"Mean {formats.figure_name(column)} over seeds; stronger colour is higher"
        caption += "; the frame marks the lowest mean." if written and "train" not in column else "."
        if drawn:
            caption += f" Line: train error = {epsilon:g}, between the means of neighbouring cells."
        if np.isnan(grid).any():
            caption += " Empty: no finished cell."
        title = f"{formats.figure_name(column).capitalize()} over {formats.axis_name(axes[0])} and "
        title += formats.axis_name(axes[1])
        return canvas.chart(name, title=title + (f", {formats.setting(where)}" if where else ""), caption=caption)


def _scale_values(grid: np.ndarray, limits: tuple[float, float]) -> np.ndarray:
    """Scale values to 0–1 between the lowest and the highest."""
    low, high = limits
    return (grid - low) / (high - low) if high > low else grid * 0.0


def _shade_alpha(level: int) -> float:
    return 0.05 + 0.75 * level / (_LEVELS - 1)


def _draw_cells(ax: Axes, share: np.ndarray) -> None:
    """Draw the cells, those of one shade as one path."""
    import numpy as np
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
    import numpy as np
    from matplotlib.patches import Rectangle

    best = np.unravel_index(int(np.nanargmin(grid)), grid.shape) if lowest else None
    for (j, i), value in np.ndenumerate(grid):
        if not math.isfinite(value):
            continue
        framed = best == (j, i)
        ax.annotate(
            formats.number(float(value), 2 if abs(value) < 1 else 3),
            (i + 0.5, j + 0.5),
            ha="center",
            va="center",
            fontsize=10.5,
            fontweight="bold" if framed else "normal",
            color=colour("ink"),
        )
        if framed:
            frame = Rectangle((i + 0.02, j + 0.03), 0.96, 0.94, facecolor="none", edgecolor=colour("ink"))
            frame.set_linewidth(1.6)
            ax.add_patch(frame)


def _draw_contour(ax: Axes, fitted: np.ndarray, epsilon: float) -> bool:
    """Draw the line train error = ε through the cell centres up to the border; return True if it was drawn."""
    import numpy as np

    finite = fitted[np.isfinite(fitted)]
    if min(fitted.shape) < 2 or not len(finite) or not finite.min() <= epsilon < finite.max():
        return False
    # Means are at the cell centres; the outer half cells repeat them.
    padded = np.pad(fitted, 1, mode="edge")
    high, wide = fitted.shape
    at_x = np.concatenate([[0.0], np.arange(wide) + 0.5, [wide]])
    at_y = np.concatenate([[0.0], np.arange(high) + 0.5, [high]])
    drawn = ax.contour(
        at_x, at_y, np.ma.masked_invalid(padded), levels=[epsilon], colors=[colour("ink")], linewidths=2.0
    )
    drawn.set_gid("epsilon")
    return True


def _draw_colour_bar(canvas: Canvas, limits: tuple[float, float], x: float, bottom: float, top: float) -> None:
    """Draw the colour scale next to a map, from `bottom` to `top` px."""
    from matplotlib.patches import Rectangle

    ax = canvas.figure.add_axes(
        (x / canvas.width, bottom / canvas.height, 12 / canvas.width, (top - bottom) / canvas.height)
    )
    for level in range(_LEVELS):
        ax.add_patch(
            Rectangle(
                (0, level / _LEVELS), 1, 1 / _LEVELS, facecolor=colour("orange"), alpha=_shade_alpha(level), linewidth=0
            )
        )
    ax.set_axis_off()
    low, high = limits
    places = formats.decimals_for((high - low) / 4 or None, high)
    for share in (0.0, 0.5, 1.0):
        value = f"{low + share * (high - low) + 0.0:.{places}f}".replace("-", "−")
        canvas.text(x + 15, bottom + share * (top - bottom), value, colour="muted", size=10.5)
