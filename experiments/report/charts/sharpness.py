"""Charts of the loss around the weights: mean rise over noise, and slices along one and two random directions."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from flatshift.experiments.report import formats
from flatshift.experiments.report.figure import Canvas, Chart, colour, label_ends

SPACES = {"adapter": ("adapter", "blue"), "full": ("full weights", "orange")}
"""Space: (displayed name, colour token)."""
_RISE = "rise_sigma_"


def rise_chart(measures: dict[str, dict[str, Any]], *, loss_unit: str) -> Chart | None:
    """Draw E[L(w+ε)] − L(w) over σ, one line per space, with intervals; None with fewer than two values of σ."""
    curves = {
        space: sorted(
            (float(name.removeprefix(_RISE)), cell)
            for name, cell in found.items()
            if name.startswith(_RISE) and cell.get("value") is not None
        )
        for space, found in measures.items()
    }
    curves = {space: curve for space, curve in curves.items() if len(curve) > 1}
    if not curves:
        return None
    with Canvas(540, 300) as canvas:
        ax = canvas.axes(y=f"rise of the loss ({loss_unit})", x="σ, noise over row norm", left=58, right=104)
        ends = []
        for space, curve in curves.items():
            name, token = SPACES[space]
            sigmas, values = [s for s, _ in curve], [cell["value"] for _, cell in curve]
            bounds = [
                (cell["low"], cell["high"]) if cell.get("low") is not None else (cell["value"],) * 2
                for _, cell in curve
            ]
            ax.fill_between(
                sigmas, [b[0] for b in bounds], [b[1] for b in bounds], color=colour(token), alpha=0.2, linewidth=0
            )
            ax.plot(sigmas, values, color=colour(token), marker="o", markersize=5.5, markeredgecolor=colour("surface"))
            ends.append((sigmas[-1], values[-1], name, token))
        ax.axhline(0, color=colour("faint"), linewidth=1)
        ax.margins(x=0.03, y=0.08)
        label_ends(ax, ends, height=226)
        draws = max(cell["n"] for curve in curves.values() for _, cell in curve)
        return canvas.chart(
            "sharpness-rise",
            title="Mean rise of the loss under random noise on the weights",
            caption=f"What GGPO and Flat-LoRA keep low. Band: interval over {draws} antithetic pairs of noise.",
        )


def line_chart(space: str, found: dict[str, Any], *, loss_unit: str) -> Chart:
    """Draw the loss along each random direction, and their mean."""
    name, token = SPACES[space]
    at, losses = found["at"], found["losses"]
    rows = [[math.nan if value is None else value for value in row] for row in losses]
    with Canvas(540, 300) as canvas:
        ax = canvas.axes(y=f"loss ({loss_unit})", x="distance, in row norms of the weights", left=58)
        for row in rows:
            ax.plot(at, row, color=colour(token), linewidth=1, alpha=0.45)
        ax.plot(
            at,
            [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)],
            color=colour(token),
            linewidth=2.4,
        )
        ax.plot([0], [rows[0][len(at) // 2]], "o", color=colour("ink"), markersize=5)
        ax.margins(x=0.02, y=0.08)
        drawn = "Thin" if len(rows) > 1 else "The"
        caption = f"{drawn} line{'s' * (len(rows) > 1)}: {len(rows)} random direction{'s' * (len(rows) > 1)}"
        caption += ", bold: their mean. " if len(rows) > 1 else ". "
        return canvas.chart(
            f"sharpness-line-{space}",
            title=f"Loss along random directions, {name}",
            caption=caption + "Each row of a direction is as long as the weight's row. Dot: the trained weights.",
        )


def contour_chart(space: str, found: dict[str, Any], *, loss_unit: str) -> Chart | None:
    """Draw contours of the loss in the plane of two random directions; None if any value is not finite or all are
    equal."""
    import numpy as np

    name, token = SPACES[space]
    at = np.array(found["at"])
    losses = np.array([[np.nan if v is None else v for v in row] for row in found["losses"]], dtype=float)
    finite = losses[np.isfinite(losses)]
    if len(finite) < losses.size or finite.max() == finite.min():
        return None
    # Levels at even quantiles of the grid: close together where the loss is flat, and not set by a single peak.
    levels = np.unique(np.quantile(finite, np.linspace(0, 1, 9)))
    with Canvas(540, 430) as canvas:
        ax = canvas.axes(
            y="second direction, in row norms of the weights", x="first direction, in row norms", left=52, right=100
        )
        ax.grid(visible=False)
        for step, (low, high) in enumerate(pairwise(levels.tolist())):
            ax.contourf(at, at, losses, levels=[low, high], colors=[colour(token)], alpha=0.06 + 0.09 * step)
        drawn = ax.contour(at, at, losses, levels=levels[1:-1], colors=[colour(token)], linewidths=1)
        places = formats.decimals_for(float(np.median(np.diff(levels))), 1.0)
        ax.clabel(drawn, fmt=f"%.{places}f", fontsize=10, colors=[colour("ink")])
        ax.plot([0], [0], "o", color=colour("ink"), markersize=5)
        ax.set_aspect("equal")
        middle = losses[len(at) // 2, len(at) // 2]
        lowest = (
            "the lowest of the grid"
            if middle <= finite.min()
            else f"the grid's lowest is {formats.number(float(finite.min()))}"
        )
        return canvas.chart(
            f"sharpness-plane-{space}",
            title=f"Loss around the trained weights, {name}",
            caption=f"Contours of the loss ({loss_unit}) along two random directions; darker is higher. Dot: the "
            f"trained weights, loss {formats.number(float(middle))}, {lowest}.",
        )
