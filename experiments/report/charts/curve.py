"""Curves of a sweep along one axis, with intervals, threshold and peak location, and over measured capacity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flatshift.experiments.report import formats
from flatshift.experiments.report.charts.facets import AxisScale, axis_scale
from flatshift.experiments.report.figure import WIDE, Canvas, Chart, colour, draw_dots, label_ends
from flatshift.experiments.results.analysis import (
    PANELS,
    AnalysedCurve,
    SweepAnalysis,
    plottable_settings,
    sample_settings,
    undrawn_note,
)
from flatshift.experiments.results.sweep import INTERPOLATION, SweepData
from flatshift.experiments.results.table import Setting, SweepTable
from flatshift.experiments.statistics.emc import Crossing
from flatshift.finetune.evaluate.metrics import find_metric

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    split = "test" if table.has(f"test.{kind}") else "dev"
    lines = [Series(f"train.{kind}", "blue", "train"), Series(f"{split}.{kind}", "orange", split)]
    return [line for line in lines if table.has(line.column)]


def metric_unit(table: SweepTable, kind: str) -> str:
    """Return the unit of a metric for an axis."""
    return {"error": "error (share wrong)", "loss": f"loss ({table.loss_unit})"}.get(kind, find_metric(kind).title)


def curve_chart(
    table: SweepTable,
    axis: str,
    setting: Setting,
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

    title: the setting is added. analysed: its peak location is shaded, and its verdict goes above the chart. crossing:
    a dashed line where training rows count as fitted. limits: of the y axis.
    """
    curves = {line: curve for line in lines if (curve := table.curve(line.column, axis, setting))}
    measured = {v for curve in curves.values() for v, _ in curve}
    # Step 0, before any training, would rule out a log axis.
    values = [v for v in table.values(axis) if v in measured and not (axis == "step" and v == 0)]
    if not values:
        return None
    scale = axis_scale(axis, values)
    width = WIDE if wide else 540
    with Canvas(width, 360 if wide else 300) as canvas:
        ax = canvas.axes(y=unit, x=scale.title, right=104)
        threshold = crossing.value if crossing is not None else None
        shaded = analysed is not None and _shade_peak(ax, analysed, scale)
        if threshold is not None:
            at, (low, high) = scale.position(threshold), (min(scale.at.values()), max(scale.at.values()))
            left = at < low + 0.3 * (high - low)  # near the y axis the label would not fit on the left
            ax.axvline(at, color=colour("muted"), linewidth=1.3, linestyle=(0, (3, 2)), gid="threshold")
            place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "va": "top"}
            place |= {"xytext": (5 if left else -5, -2), "ha": "left" if left else "right"}
            ax.annotate(
                f"{formats.figure_name(table.fitted_column)} = {epsilon:g}", (at, 1.0), color=colour("muted"), **place
            )
        ends = []
        for line, curve in curves.items():
            points = [(scale.at[v], p) for v, p in curve if v in scale.at]
            if not points:
                continue
            if bounded := [(x, p.low, p.high) for x, p in points if p.low is not None and p.high is not None]:
                band, lows, highs = zip(*bounded, strict=True)
                ax.fill_between(band, lows, highs, color=colour(line.token), alpha=0.16, linewidth=0)
            dots: dict[str, Any] = {"marker": "o", "markersize": 5.5, "markeredgecolor": colour("surface")}
            ax.plot([x for x, _ in points], [p.value for _, p in points], color=colour(line.token), **dots)
            if table.seeds > 1 and len(table.rows(setting)) <= _SINGLE_RUNS:
                xs, ys = table.points(line.column, axis, setting)
                runs = [(scale.at[x], y) for x, y in zip(xs, ys, strict=True) if x in scale.at]
                draw_dots(ax, runs, token=line.token, size=2.6, alpha=0.5, gid="runs")
            last = points[-1][1].value
            _, upper = find_metric(line.column.partition(".")[2]).bounds or (0.0, math.inf)
            figure = f"{last:.2f}" if math.isfinite(upper) else formats.number(last, 2)
            ends.append((points[-1][0], last, f"{line.name} {figure}", line.token))
        scale.draw(ax, width - 152)
        ax.set_ylim(*(limits if limits is not None else y_limits(curves.values(), zero="error" in unit)))
        label_ends(ax, ends, height=canvas.height - 74)
        counts = [p.n for curve in curves.values() for _, p in curve]
        caption = _caption(min(counts), max(counts))
        if threshold is not None:
            where = f"where the mean {table.fit_name} crosses {epsilon:g}"
            caption += f" Dashed: {axis} = {formats.number(threshold)}, {where}."
        caption += " Shaded: where the peak test puts the peak." if shaded else ""
        kind, evidence = (analysed.verdict.kind, analysed.evidence) if analysed is not None else ("", ())
        title = formats.title_at(title, setting)
        return canvas.chart(name, title=title, caption=caption, verdict=kind, evidence=evidence)


def scatter_chart(data: SweepData, axis: str, lines: Sequence[Series], *, name: str, unit: str) -> Chart | None:
    """Draw single cells along one axis of a random design, where no two cells share a setting and no mean exists."""
    points = {line: list(zip(*data.points(line.column, axis, {}), strict=True)) for line in lines}
    points = {line: pairs for line, pairs in points.items() if pairs}
    if not points:
        return None
    scale = axis_scale(axis, sorted({x for pairs in points.values() for x, _ in pairs}))
    with Canvas(540, 300) as canvas:
        ax = canvas.axes(y=unit, x=scale.title)
        left = 48.0
        for line, pairs in points.items():
            draw_dots(ax, [(scale.at[x], y) for x, y in pairs], token=line.token, size=4, alpha=0.45, gid=line.name)
            canvas.text(left, 275, f"● {line.name}", colour=line.token, weight="bold")
            left += 30 + 7 * len(line.name)
        scale.draw(ax, 476)
        ys = [y for pairs in points.values() for _, y in pairs]
        ax.set_ylim(*_pad_limits(min([0.0, *ys]) if "error" in unit else min(ys), max(ys)))
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


def _shade_peak(ax: Axes, analysed: AnalysedCurve, scale: AxisScale) -> bool:
    """Shade the peak's location set, halfway to the neighbours; return True if it has points on the axis."""
    location = sorted(scale.at[v] for v in analysed.location if v in scale.at)
    if not location:
        return False
    xs = sorted(scale.at.values())
    start, end = xs.index(location[0]), xs.index(location[-1])
    left, right = (xs[max(start - 1, 0)] + xs[start]) / 2, (xs[end] + xs[min(end + 1, len(xs) - 1)]) / 2
    ax.axvspan(left, right, color=colour("amber"), alpha=0.14, linewidth=0, gid="location")
    return True


def _caption(minimum: int, maximum: int) -> str:
    if maximum < 2:
        return "One seed: no interval can be given."
    runs = f"{maximum}" if minimum == maximum else f"{minimum} to {maximum}"
    return f"Lines: means over {runs} seeds; bands: 95 % t-intervals, pointwise; small dots: single runs."


_Capacity = tuple[str, str, str]
"""Measure of the capacity an adapter uses: its column, its name with the unit, and its definition."""
_CAPACITIES: tuple[_Capacity, ...] = (
    (
        "effective_params",
        "effective parameters",
        "Effective parameters: Σ p·(d_in + d_out − p) over the adapted layers, p the participation ratio of sBA.",
    ),
    (
        "participation",
        "participation ratio of sBA (directions)",
        "Participation ratio: (Σs²)²/Σs⁴ of the singular values of sBA, mean over the adapted layers.",
    ),
    ("stable_rank", "stable rank of sBA (directions)", "Stable rank: ‖sBA‖_F²/‖sBA‖₂², mean over the adapted layers."),
)


def capacity_charts(data: SweepData, axis: str, analysis: SweepAnalysis) -> tuple[list[Chart | None], str]:
    """Return (charts of the metrics over each capacity measure and of the first along `axis`, note on settings)."""
    measures = [measure for measure in _CAPACITIES if data.has(measure[0])]
    kind = data.error_columns()[0].partition(".")[2]
    lines = train_test_series(data, kind)
    if not measures or not lines:
        return [], ""
    charts: list[Chart | None] = []
    settings = plottable_settings(data, axis, measures[0][0])
    drawn = sample_settings(data, settings, PANELS)
    for number, setting in enumerate(drawn, 1):
        # The other measures mostly show the same; one setting is enough to see that.
        for capacity in measures if number == 1 else measures[:1]:
            charts.append(_metric_over_capacity_chart(data, axis, setting, capacity, lines, kind, number))
            if capacity is measures[0]:
                column, measure, _ = capacity
                along = curve_chart(
                    data, axis, setting, [Series(column, "purple", "mean")], name=f"sweep-capacity-along-{number}",
                    title=f"{measure.capitalize()} along {formats.axis_name(axis)}", unit=measure,
                    crossing=analysis.crossing(axis, setting), epsilon=data.epsilon,
                )  # fmt: skip
                charts.append(along)
    return charts, undrawn_note(drawn, settings)


def _metric_over_capacity_chart(
    data: SweepData,
    axis: str,
    setting: dict[str, Any],
    capacity: _Capacity,
    lines: Sequence[Series],
    kind: str,
    number: int,
) -> Chart | None:
    """Draw metrics over mean capacity, points joined in the order of `axis`, intervals in both directions."""
    column, measure, definition = capacity
    across = dict(data.curve(column, axis, setting))
    curves = {line: [(v, p) for v, p in data.curve(line.column, axis, setting) if v in across] for line in lines}
    curves = {line: curve for line, curve in curves.items() if len(curve) > 1}
    if not curves:
        return None
    sizes = [p.value for p in across.values()]
    log = min(sizes) > 0 and max(sizes) / min(sizes) >= 8
    with Canvas(540, 320) as canvas:
        ax = canvas.axes(y=metric_unit(data, kind), x=measure + (" (log scale)" if log else ""), right=104)
        if log:
            _set_log_axis(ax, min(sizes) / 1.25, max(sizes) * 1.25)
        ends = []
        for line, curve in curves.items():
            xs, ys = [across[v].value for v, _ in curve], [p.value for _, p in curve]
            ax.plot(xs, ys, color=colour(line.token), linewidth=1.3, alpha=0.6)
            bars: dict[str, Any] = {"color": colour(line.token), "linewidth": 2.2, "alpha": 0.4}
            for x, y in [(across[v], p) for v, p in curve]:
                if x.low is not None and x.high is not None:
                    ax.plot([x.low, x.high], [y.value] * 2, **bars)
                if y.low is not None and y.high is not None:
                    ax.plot([x.value] * 2, [y.low, y.high], **bars)
            ax.plot(xs, ys, "o", color=colour(line.token), markersize=6, markeredgecolor=colour("surface"))
            if line is list(curves)[-1]:
                style: dict[str, Any] = {"ha": "center", "fontsize": 10, "color": colour("muted")}
                for (v, _), at in zip(curve, zip(xs, ys, strict=True), strict=True):
                    ax.annotate(formats.axis_value(v), at, xytext=(0, 7), textcoords="offset points", **style)
            far = max(range(len(xs)), key=lambda i: xs[i])
            ends.append((xs[far], ys[far], line.name, line.token))
        ax.set_ylim(*y_limits(curves.values(), zero=kind == "error"))
        label_ends(ax, ends, height=canvas.height - 74)
        caption = (
            f"Points joined in the order of {axis}, whose value is next to the held-out ones; bars: 95 % "
            f"t-intervals over seeds, both ways. {definition}"
        )
        name = f"sweep-capacity-{column.replace('_', '-')}-{number}"
        title = f"{formats.capitalise(find_metric(kind).title)} over {measure.partition(' (')[0]}"
        return canvas.chart(name, title=formats.title_at(title, setting), caption=caption)


def _set_log_axis(ax: Axes, low: float, high: float) -> None:
    """Set a logarithmic x axis from `low` to `high` whose ticks are plain numbers."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    ax.set_xscale("log")
    ax.set_xlim(low, high)
    few = math.log10(high / low) < 2
    ticks = LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=8).tick_values(low, high)
    ax.xaxis.set_major_locator(FixedLocator([t for t in ticks if low <= t <= high]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: formats.axis_value(float(f"{value:.3g}"))))
