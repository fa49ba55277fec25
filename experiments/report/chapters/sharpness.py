"""Sharpness of the run's minimum: its measures, the mean rise of the loss over noise, and slices of the loss."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np

from flatshift.experiments.report import formats
from flatshift.experiments.report.blocks import ChapterPart, ChartGroup, Notes, Section, Table
from flatshift.experiments.report.figure import Canvas, Chart, colour, label_ends
from flatshift.experiments.results.run import RunResults
from flatshift.finetune.digests import adapter_digest
from flatshift.regularizers.config import measure_name

_SPACES = {"adapter": ("adapter", "blue"), "full": ("full weights", "orange")}
"""Space: (displayed name, colour token)."""
_RISE = "rise_sigma_"


def part(run: RunResults) -> ChapterPart | None:
    """Return the measures of both spaces side by side and the charts, if the run was measured."""
    sharpness = run.sharpness
    if not sharpness:
        return None
    unit = run.loss_unit("fine-tune")
    metadata, slices = sharpness["about"], sharpness["slices"]
    charts = [_rise_chart(sharpness["measures"], unit)]
    charts += [_line_chart(space, kinds["line"], unit) for space, kinds in slices.items() if "line" in kinds]
    charts += [_contour_chart(space, kinds["plane"], unit) for space, kinds in slices.items() if "plane" in kinds]
    lead = (
        f"Around the trained weights, on {metadata['rows']:,} fixed rows of {metadata['split']}, where the loss is "
        f"{formats.number(float(sharpness['loss']))} {unit}. Comparable between runs that were measured on the same "
        "rows with the same seed and settings."
    )
    table, notes = _measure_table(sharpness, unit), Notes(_notes(run, sharpness))
    return ChapterPart(sections=[Section("Sharpness", [table, ChartGroup(charts), notes], lead)])


def _measure_table(sharpness: dict[str, Any], unit: str) -> Table:
    measures, spaces = sharpness["measures"], sharpness["about"]["spaces"]
    rows = []
    for name in dict.fromkeys(name for cells in measures.values() for name in cells):
        rows.append([measure_name(name), *(formats.with_interval(cells.get(name)) for cells in measures.values())])
    rows.append(["weights in the space", *(formats.number(int(spaces[space]["dimensions"])) for space in measures)])
    rows.append(["norm of the weights", *(formats.number(spaces[space]["weight_norm"]) for space in measures)])
    columns = ["measure", *(_SPACES[space][0] for space in measures)]
    caption = (
        f"Rises in {unit}; eigenvalues and trace in the same per squared weight. Intervals of λ are ± the residual, "
        "others are over random draws; highest rises are found by gradient steps and are lower bounds."
    )
    return Table(columns, rows, caption, frozenset(range(1, len(columns))))


def _notes(run: RunResults, sharpness: dict[str, Any]) -> list[str]:
    notes = []
    for space, metadata in sharpness["about"]["spaces"].items():
        error = metadata.get("difference_error")
        if error is not None and error > 0.05:
            notes.append(
                f"Eigenvalues and trace of the {_SPACES[space][0]} are rough: products at two step "
                f"lengths differ by {formats.percent(error)}."
            )
    digest = sharpness["about"].get("adapter_sha256")
    if digest and digest != adapter_digest(run.path):
        notes.append("Measured before the adapter was trained further; run `flatshift eval RUN_DIR --sharpness` again.")
    return notes


def _rise_chart(measures: dict[str, dict[str, Any]], loss_unit: str) -> Chart | None:
    """Draw E[L(w+ε)] − L(w) over σ, one line per space, with intervals; None with fewer than two values of σ."""
    curves = {
        space: sorted(
            (float(name.removeprefix(_RISE)), cell)
            for name, cell in cells.items()
            if name.startswith(_RISE) and cell.get("value") is not None
        )
        for space, cells in measures.items()
    }
    curves = {space: curve for space, curve in curves.items() if len(curve) > 1}
    if not curves:
        return None
    with Canvas(540, 300) as canvas:
        ax = canvas.axes(y=f"rise of the loss ({loss_unit})", x="σ, noise over row norm", left=58, right=104)
        ends = []
        for space, curve in curves.items():
            name, token = _SPACES[space]
            sigmas, values = [s for s, _ in curve], [cell["value"] for _, cell in curve]
            lows, highs = (
                [cell[end] if cell.get("low") is not None else cell["value"] for _, cell in curve]
                for end in ("low", "high")
            )
            ax.fill_between(sigmas, lows, highs, color=colour(token), alpha=0.2, linewidth=0)
            ax.plot(sigmas, values, color=colour(token), marker="o", markersize=5.5, markeredgecolor=colour("surface"))
            ends.append((sigmas[-1], values[-1], name, token))
        ax.axhline(0, color=colour("faint"), linewidth=1)
        ax.margins(x=0.03, y=0.08)
        label_ends(ax, ends, height=226)
        draws = [cell["n"] for curve in curves.values() for _, cell in curve if cell.get("low") is not None]
        band = f" Band: interval over {max(draws)} antithetic pairs of noise." if draws else ""
        return canvas.chart(
            "sharpness-rise",
            title="Mean rise of the loss under random noise on the weights",
            caption=f"What GGPO and Flat-LoRA keep low.{band}",
        )


def _line_chart(space: str, slices: dict[str, Any], loss_unit: str) -> Chart:
    """Draw the loss along each random direction, and their mean."""
    name, token = _SPACES[space]
    at, losses = slices["at"], slices["losses"]
    rows = [[math.nan if value is None else value for value in row] for row in losses]
    with Canvas(540, 300) as canvas:
        ax = canvas.axes(y=f"loss ({loss_unit})", x="distance, in row norms of the weights", left=58)
        for row in rows:
            ax.plot(at, row, color=colour(token), linewidth=1, alpha=0.45)
        means = [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]
        ax.plot(at, means, color=colour(token), linewidth=2.4)
        ax.plot([0], [rows[0][len(at) // 2]], "o", color=colour("ink"), markersize=5)
        ax.margins(x=0.02, y=0.08)
        caption = "The line: 1 random direction. "
        if len(rows) > 1:
            caption = f"Thin lines: {len(rows)} random directions, bold: their mean. "
        return canvas.chart(
            f"sharpness-line-{space}",
            title=f"Loss along random directions, {name}",
            caption=caption + "Each row of a direction is as long as the weight's row. Dot: the trained weights.",
        )


def _contour_chart(space: str, slices: dict[str, Any], loss_unit: str) -> Chart | None:
    """Draw contours of the loss in the plane of two random directions; None if not all are finite or all are equal."""
    name, token = _SPACES[space]
    at = np.array(slices["at"])
    losses = np.array([[np.nan if v is None else v for v in row] for row in slices["losses"]], dtype=float)
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
        contours = ax.contour(at, at, losses, levels=levels[1:-1], colors=[colour(token)], linewidths=1)
        decimals = formats.decimals_for(float(np.median(np.diff(levels))), 1.0)
        ax.clabel(contours, fmt=f"%.{decimals}f", fontsize=10, colors=[colour("ink")])
        ax.plot([0], [0], "o", color=colour("ink"), markersize=5)
        ax.set_aspect("equal")
        middle, lowest = losses[len(at) // 2, len(at) // 2], float(finite.min())
        note = "the lowest of the grid" if middle <= lowest else f"the grid's lowest is {formats.number(lowest)}"
        return canvas.chart(
            f"sharpness-plane-{space}",
            title=f"Loss around the trained weights, {name}",
            caption=f"Contours of the loss ({loss_unit}) along two random directions; darker is higher. Dot: the "
            f"trained weights, loss {formats.number(float(middle))}, {note}.",
        )
