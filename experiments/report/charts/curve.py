"""Curves of a sweep along one axis: train and held-out metrics with intervals, threshold and peak location."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flatshift.experiments.report import formats
from flatshift.experiments.report.charts.facets import AxisScale, axis_scale
from flatshift.experiments.report.figure import WIDE, Canvas, Chart, colour, draw_dots, label_ends
from flatshift.experiments.results.sweep import INTERPOLATION, SweepData
from flatshift.experiments.results.table import Setting, SweepTable
from flatshift.experiments.statistics.intervals import Interval
from flatshift.finetune.evaluate.metrics import find_metric

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from flatshift.experiments.results.analysis import AnalysedCurve
    from flatshift.experiments.statistics.emc import Crossing

_SINGLE_RUNS = 400
"""Most single runs drawn as dots in a chart; more would hide the lines."""


@dataclass(frozen=True)
class Series:
    """One line of a chart: metric column, colour and name."""

    column: str
    token: str
    name: str


def train_test_series(table: SweepTable, kind: str) -> list[Series]:
    """Return the train and the held-out line (test, else dev) of a metric, as far as `table` has them."""
    held = "test" if table.has(f"test.{kind}") else "dev"
    lines = [Series(f"train.{kind}", "blue", "train"), Series(f"{held}.{kind}", "orange", held)]
    return [line for line in lines if table.has(line.column)]


def metric_unit(kind: str) -> str:
    """Return the unit of a metric for an axis."""
    return {"error": "error (share wrong)", "loss": "loss (nats)"}.get(kind, find_metric(kind).title)


def curve_chart(
    table: SweepTable,
    axis: str,
    where: Setting,
    lines: Sequence[Series],
    *,
    name: str,
    title: str,
    unit: str,
    limits: tuple[float, float] | None = None,
    analysed: AnalysedCurve | None = None,
    crossing: Crossing | None = None,
    epsilon: float = INTERPOLATION,
    wide: bool = False,
) -> Chart | None:
    """Draw means over seeds along `axis` with t-intervals and single runs; None if nothing was measured.

    analysed: its peak location is shaded, and its verdict goes above the chart. crossing: a dashed line where the mean
    train error crosses epsilon. limits: of the y axis.
    """
    curves = {line: table.curve(line.column, axis, where) for line in lines}
    curves = {line: curve for line, curve in curves.items() if curve}
    if not curves:
        return None
    shown = {v for curve in curves.values() for v, _ in curve}
    # Step 0, before any training, would rule out a log axis.
    values = [v for v in table.values(axis) if v in shown and not (axis == "step" and v == 0)]
    if not values:
        return None
    place = axis_scale(axis, values)
    width = WIDE if wide else 540
    with Canvas(width, 360 if wide else 300) as canvas:
        ax = canvas.axes(y=unit, x=place.title, right=104)
        threshold = crossing.value if crossing is not None else None
        said = []
        if analysed is not None:
            said += _shade_peak(ax, analysed, place)
        if threshold is not None:
            _draw_threshold(ax, place, threshold, epsilon)
        ends = []
        for line, curve in curves.items():
            points = [(place.at[v], p) for v, p in curve if v in place.at]
            if not points:
                continue
            draw_band(ax, points, line.token)
            ax.plot(
                [x for x, _ in points],
                [p.value for _, p in points],
                color=colour(line.token),
                marker="o",
                markersize=5.5,
                markeredgecolor=colour("surface"),
            )
            if table.seeds > 1 and len(table.rows(where)) <= _SINGLE_RUNS:
                xs, ys = table.points(line.column, axis, where)
                kept = [(place.at[x], y) for x, y in zip(xs, ys, strict=True) if x in place.at]
                draw_dots(
                    ax, [x for x, _ in kept], [y for _, y in kept], token=line.token, size=2.6, alpha=0.5, gid="runs"
                )
            last = points[-1][1].value
            _, most = find_metric(line.column.partition(".")[2]).bounds or (0.0, math.inf)
            figure = f"{last:.2f}" if math.isfinite(most) else formats.number(last, 2)
            ends.append((points[-1][0], last, f"{line.name} {figure}", line.token))
        place.draw(ax, width - 152)
        low, high = limits if limits is not None else y_limits(curves.values(), zero="error" in unit)
        ax.set_ylim(low, high)
        label_ends(ax, ends, height=canvas.height - 74)
        counts = [p.n for curve in curves.values() for _, p in curve]
        caption = _caption(axis, min(counts), max(counts), threshold, epsilon)
        kind, evidence = (analysed.verdict.kind, analysed.evidence) if analysed is not None else ("", ())
        return canvas.chart(name, title=title, caption=" ".join([caption, *said]), verdict=kind, evidence=evidence)


def scatter_chart(data: SweepData, axis: str, lines: Sequence[Series], *, name: str, unit: str) -> Chart | None:
    """Draw single cells along one axis of a random design, where no two cells share a setting and no mean exists."""
    found = [(line, *data.points(line.column, axis, {})) for line in lines]
    found = [(line, xs, ys) for line, xs, ys in found if xs]
    if not found:
        return None
    place = axis_scale(axis, sorted({x for _, xs, _ in found for x in xs}))
    with Canvas(540, 300) as canvas:
        ax = canvas.axes(y=unit, x=place.title)
        x = 48.0
        for line, xs, ys in found:
            draw_dots(ax, [place.at[v] for v in xs], ys, token=line.token, size=4, alpha=0.45, gid=line.name)
            canvas.text(x, 275, f"● {line.name}", colour=line.token, weight="bold")
            x += 30 + 7 * len(line.name)
        place.draw(ax, 476)
        every = [y for _, _, ys in found for y in ys]
        ax.set_ylim(*_pad_limits(min([0.0, *every]) if "error" in unit else min(every), max(every)))
        caption = "Every dot is a cell; the other axes vary with it at random, so this shows a range, not a curve."
        return canvas.chart(name, title=f"Cells over {formats.axis_name(axis)}", caption=caption)


def y_limits(curves: Any, *, zero: bool) -> tuple[float, float]:
    """Return y limits that contain every mean and interval of `curves`, and 0 if `zero`."""
    points = [p for curve in curves for _, p in curve]
    top = max(p.high if p.high is not None else p.value for p in points)
    bottom = min([0.0 if zero else math.inf, *(p.low if p.low is not None else p.value for p in points)])
    return _pad_limits(bottom, top)


def _pad_limits(low: float, high: float) -> tuple[float, float]:
    pad = 0.06 * ((high - low) or 1.0)
    return low - pad, high + pad


def draw_band(ax: Axes, points: Sequence[tuple[float, Interval]], token: str, alpha: float = 0.16) -> None:
    """Draw the intervals of a line where they exist."""
    bounded = [(x, p) for x, p in points if p.low is not None and p.high is not None]
    if bounded:
        lows, highs = [p.low or 0.0 for _, p in bounded], [p.high or 0.0 for _, p in bounded]
        ax.fill_between([x for x, _ in bounded], lows, highs, color=colour(token), alpha=alpha, linewidth=0)


def _draw_threshold(ax: Axes, place: AxisScale, value: float, epsilon: float) -> None:
    """Draw the interpolation threshold as a labelled vertical line."""
    x, (first, last) = place.place(value), (min(place.at.values()), max(place.at.values()))
    left = x < first + 0.3 * (last - first)  # near the y axis the label would not fit on the left
    ax.axvline(x, color=colour("muted"), linewidth=1.3, linestyle=(0, (3, 2)), gid="threshold")
    ax.annotate(
        f"train error = {epsilon:g}",
        (x, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(5 if left else -5, -2),
        textcoords="offset points",
        color=colour("muted"),
        va="top",
        ha="left" if left else "right",
    )


def _shade_peak(ax: Axes, analysed: AnalysedCurve, place: AxisScale) -> list[str]:
    """Shade the peak's location set, halfway to the neighbours; return the sentence for the caption."""
    inside = [v for v in analysed.location if v in place.at]
    if not inside:
        return []
    every = sorted(place.at.values())

    def edge(x: float, step: int) -> float:
        other = every.index(x) + step
        return (x + every[other]) / 2 if 0 <= other < len(every) else x

    xs = sorted(place.at[v] for v in inside)
    ax.axvspan(edge(xs[0], -1), edge(xs[-1], 1), color=colour("amber"), alpha=0.14, linewidth=0, gid="location")
    return ["Shaded: where the peak test puts the peak."]


def _caption(axis: str, fewest: int, most: int, threshold: float | None, epsilon: float) -> str:
    if most < 2:
        caption = "One seed: no interval can be given."
    else:
        runs = f"{most}" if fewest == most else f"{fewest} to {most}"
        caption = f"Lines: means over {runs} seeds; bands: 95 % t-intervals, pointwise; small dots: single runs."
    if threshold is not None:
        caption += f" Dashed: {axis} = {formats.number(threshold)}, where the mean train error crosses {epsilon:g}."
    return caption
