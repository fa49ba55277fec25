"""Error against effective parameters, next to error against rank: shows if a curve folds over measured capacity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flatshift.experiments.report import formats
from flatshift.experiments.report.charts.curve import Series, curve_chart, metric_unit, train_test_series, y_limits
from flatshift.experiments.report.figure import Canvas, Chart, colour, label_ends
from flatshift.experiments.results.analysis import (
    PANELS,
    SweepAnalysis,
    plottable_settings,
    sample_settings,
    undrawn_note,
)
from flatshift.experiments.results.sweep import SweepData
from flatshift.experiments.statistics.intervals import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class CapacityMeasure:
    """Measure of the capacity an adapter uses: column, name with unit, and definition."""

    column: str
    name: str
    counted: str


CAPACITIES = (
    CapacityMeasure(
        "effective_params",
        "effective parameters",
        "Effective parameters: Σ p·(d_in + d_out − p) over the adapted layers, p the participation ratio of sBA.",
    ),
    CapacityMeasure(
        "participation",
        "participation ratio of sBA (directions)",
        "Participation ratio: (Σs²)²/Σs⁴ of the singular values of sBA, mean over the adapted layers.",
    ),
    CapacityMeasure(
        "stable_rank",
        "stable rank of sBA (directions)",
        "Stable rank: ‖sBA‖_F²/‖sBA‖₂², mean over the adapted layers.",
    ),
)


def capacity_charts(data: SweepData, axis: str, analysis: SweepAnalysis) -> tuple[list[Chart], str]:
    """Return (charts of the metrics over each recorded capacity measure and of the first measure over `axis`, a note on
    which settings are drawn)."""
    measured = [c for c in CAPACITIES if data.has(c.column)]
    kind = data.error_columns()[0].partition(".")[2]
    lines = train_test_series(data, kind)
    if not measured or not lines:
        return [], ""
    charts = []
    every = plottable_settings(data, axis, measured[0].column)
    drawn = sample_settings(data, every, PANELS)
    for number, where in enumerate(drawn):
        # The other measures mostly show the same; one setting is enough to see that.
        for capacity in measured if number == 0 else measured[:1]:
            made = [_metric_over_capacity_chart(data, axis, where, capacity, lines, kind, number)]
            made += [_capacity_chart(analysis, axis, where, capacity, number)] if capacity is measured[0] else []
            charts += [chart for chart in made if chart is not None]
    return charts, undrawn_note(drawn, every)


def _metric_over_capacity_chart(
    data: SweepData,
    axis: str,
    where: dict[str, Any],
    capacity: CapacityMeasure,
    lines: Sequence[Series],
    kind: str,
    number: int,
) -> Chart | None:
    """Draw metrics over mean capacity, points joined in the order of `axis`, intervals in both directions."""
    across = dict(data.curve(capacity.column, axis, where))
    curves = {line: [(v, p) for v, p in data.curve(line.column, axis, where) if v in across] for line in lines}
    curves = {line: curve for line, curve in curves.items() if len(curve) > 1}
    if not curves:
        return None
    log = _is_log([p.value for p in across.values()])
    with Canvas(540, 320) as canvas:
        ax = canvas.axes(y=metric_unit(kind), x=capacity.name + (" (log scale)" if log else ""), right=104)
        if log:
            _set_log_axis(ax, list(across.values()))
        ends = []
        for line, curve in curves.items():
            xs, ys = [across[v].value for v, _ in curve], [p.value for _, p in curve]
            ax.plot(xs, ys, color=colour(line.token), linewidth=1.3, alpha=0.6)
            for v, p in curve:
                _draw_intervals(ax, across[v], p, line.token)
            ax.plot(xs, ys, "o", color=colour(line.token), markersize=6, markeredgecolor=colour("surface"))
            if line is list(curves)[-1]:
                _label_points(ax, [(formats.axis_value(v), across[v].value, p.value) for v, p in curve])
            far = max(range(len(xs)), key=lambda i: xs[i])
            ends.append((xs[far], ys[far], line.name, line.token))
        ax.set_ylim(*y_limits(curves.values(), zero=kind == "error"))
        label_ends(ax, ends, height=canvas.height - 74)
        caption = (
            f"Points joined in the order of {axis}, whose value is next to the held-out ones; bars: 95 % "
            f"t-intervals over seeds, both ways. {capacity.counted}"
        )
        title = f"{kind.capitalize()} over {capacity.name.partition(' (')[0]}"
        return canvas.chart(
            f"sweep-capacity-{capacity.column.replace('_', '-')}-{number + 1}",
            title=title + (f", {formats.setting(where)}" if where else ""),
            caption=caption,
        )


def _capacity_chart(
    analysis: SweepAnalysis, axis: str, where: dict[str, Any], capacity: CapacityMeasure, number: int
) -> Chart | None:
    """Draw capacity over `axis`: the gain from a larger rank."""
    return curve_chart(
        analysis.data,
        axis,
        where,
        [Series(capacity.column, "purple", "mean")],
        name=f"sweep-capacity-along-{number + 1}",
        title=f"{capacity.name.capitalize()} along {formats.axis_name(axis)}"
        + (f", {formats.setting(where)}" if where else ""),
        unit=capacity.name,
        crossing=analysis.crossing(axis, where),
        epsilon=analysis.data.epsilon,
    )


def _is_log(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) / min(values) >= 8


def _set_log_axis(ax: Axes, points: Sequence[Interval]) -> None:
    """Set a logarithmic x axis whose ticks are plain numbers."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    low, high = min(p.value for p in points) / 1.25, max(p.value for p in points) * 1.25
    ax.set_xscale("log")
    ax.set_xlim(low, high)
    few = math.log10(high / low) < 2
    ticks = LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=8).tick_values(low, high)
    ax.xaxis.set_major_locator(FixedLocator([t for t in ticks if low <= t <= high]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: formats.axis_value(float(f"{value:.3g}"))))


def _draw_intervals(ax: Axes, x: Interval, y: Interval, token: str) -> None:
    """Draw the horizontal and vertical interval of one point."""
    if x.low is not None and x.high is not None:
        ax.plot([x.low, x.high], [y.value] * 2, color=colour(token), linewidth=2.2, alpha=0.4)
    if y.low is not None and y.high is not None:
        ax.plot([x.value] * 2, [y.low, y.high], color=colour(token), linewidth=2.2, alpha=0.4)


def _label_points(ax: Axes, points: Sequence[tuple[str, float, float]]) -> None:
    for text, x, y in points:
        ax.annotate(
            text,
            (x, y),
            xytext=(0, 7),
            textcoords="offset points",
            ha="center",
            fontsize=10,
            color=colour("muted"),
        )
