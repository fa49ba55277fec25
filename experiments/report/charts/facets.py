"""Small multiples: one figure of many panels with the same axes and lines, as the training dynamics of a sweep.

Everything is drawn in px on one axes, lines of one colour as one path: one matplotlib axes per panel would take longer
than the rest of the page.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from flatshift.experiments.report import formats
from flatshift.experiments.report.figure import RAMP, WIDE, Canvas, Chart, colour, draw_path
from flatshift.experiments.results.analysis import main_axis, sample_evenly
from flatshift.experiments.results.sweep import GRADIENT, SHARPNESS, STEP, SweepData
from flatshift.experiments.results.table import SweepTable
from flatshift.experiments.statistics.intervals import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_LEFT, _RIGHT, _GAP, _HEAD, _FOOT, _ROW = 58, 20, 38, 48, 24, 150
"""Pixels left and right of the panels, between columns, above, below, and per panel with title and ticks."""

Point = tuple[float, float]


@dataclass(frozen=True)
class LineSeries:
    """Means with intervals at axis values."""

    name: str
    token: str
    points: Sequence[tuple[Any, Interval]]


Panel = tuple[str, Sequence[LineSeries]]
"""Title and lines of one small chart."""


def facet_chart(
    panels: Sequence[Panel],
    axis: str,
    *,
    columns: int,
    y: str,
    name: str,
    title: str,
    caption: str,
    legend: str = "",
    rule: float | None = None,
    linear: bool = False,
) -> Chart | None:
    """Draw all `panels` in one figure, row by row, with shared axes; None with fewer than two axis values in total.

    legend: title in front of the line names. rule: a level marked by a dashed line in every panel. The y axis is
    logarithmic if positive means span a factor of 50, unless `linear`.
    """
    panels = [(title, lines) for title, lines in panels if any(line.points for line in lines)]
    values = list(dict.fromkeys(v for _, lines in panels for line in lines for v, _ in line.points))
    # Step 0, before any training, would rule out a log axis.
    values = [v for v in values if not (axis == "step" and v == 0)]
    if len(values) < 2:
        return None
    numbers = all(isinstance(v, int | float) for v in values)
    scale = axis_scale(axis, sorted(values) if numbers else values)
    points = [p for _, lines in panels for line in lines for v, p in line.points if v in scale.at]
    y_axis = _choose_y_axis(points, rule, linear=linear)
    columns = max(min(columns, len(panels)), 1)
    rows = math.ceil(len(panels) / columns)
    width = WIDE if columns > 1 else 540
    panel_width = (width - _LEFT - _RIGHT - _GAP * (columns - 1)) / columns
    row_height = {1: 230, 2: 190}.get(rows, _ROW)
    height = _HEAD + _FOOT + rows * row_height
    low, high = min(scale.at.values()), max(scale.at.values())
    small: dict[str, Any] = {"colour": "muted", "size": 10.5}
    with Canvas(width, height) as canvas:
        sheet = _Sheet()
        for number, (heading, lines) in enumerate(panels):
            row, column = divmod(number, columns)
            left, bottom = _LEFT + column * (panel_width + _GAP), height - _HEAD - (row + 1) * row_height + 20
            right = left + panel_width
            canvas.text(left, bottom + row_height - 28, heading, size=10.5, weight="bold")
            xs = {v: left + panel_width * (0.03 + 0.94 * (at - low) / (high - low)) for v, at in scale.at.items()}
            placed = replace(y_axis, bottom=bottom, height=row_height - 38)
            for line in lines:
                sheet.add_line(line, xs, placed)
            for value in placed.ticks:
                sheet.grid.append([(left, placed.y(value)), (right, placed.y(value))])
                if column == 0:
                    text = formats.axis_value(float(f"{value:.3g}"))
                    canvas.text(left - 5, placed.y(value), text, ha="right", **small)
            if rule is not None:
                sheet.rule.append([(left, placed.y(rule)), (right, placed.y(rule))])
            sheet.frame.append([(left, bottom), (right, bottom)])
            for value in scale.ticks(panel_width):
                sheet.frame.append([(xs[value], bottom), (xs[value], bottom - 4)])
                if number + columns >= len(panels):
                    canvas.text(xs[value], bottom - 11, formats.axis_value(value), ha="center", **small)
        sheet.draw(canvas)
        canvas.text(4, height - 13, y + (" (log scale)" if y_axis.log else ""), colour="muted")
        canvas.text(width - _RIGHT, 9, scale.title, colour="muted", ha="right")
        _draw_legend(canvas, panels, legend)
        return canvas.chart(name, title=title, caption=caption)


@dataclass(frozen=True)
class _YAxis:
    """y axis of a panel that begins `bottom` px above the lower end of the figure."""

    low: float
    high: float
    log: bool
    ticks: Sequence[float]
    bottom: float = 0.0
    height: float = 1.0

    def y(self, value: float) -> float:
        """Return the position of a value in px, clipped to the panel."""
        if self.log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.bottom + min(max(share, 0.0), 1.0) * self.height


@dataclass
class _Sheet:
    """Shapes to draw, by kind and colour, in px."""

    grid: list[list[Point]] = field(default_factory=list)
    frame: list[list[Point]] = field(default_factory=list)
    rule: list[list[Point]] = field(default_factory=list)
    bands: dict[str, list[list[Point]]] = field(default_factory=dict)
    lines: dict[str, list[list[Point]]] = field(default_factory=dict)

    def add_line(self, line: LineSeries, xs: dict[Any, float], y_axis: _YAxis) -> None:
        points = [(xs[v], p) for v, p in line.points if v in xs]
        if not points:
            return
        if len(points) == 1:  # a short stroke: a path of one point is invisible
            points = [(points[0][0] - 3, points[0][1]), (points[0][0] + 3, points[0][1])]
        self.lines.setdefault(line.token, []).append([(x, y_axis.y(p.value)) for x, p in points])
        bounded = [(x, p.low, p.high) for x, p in points if p.low is not None and p.high is not None]
        if len(bounded) > 1:
            upper = [(x, y_axis.y(high)) for x, _, high in bounded]
            lower = [(x, y_axis.y(low)) for x, low, _ in reversed(bounded)]
            self.bands.setdefault(line.token, []).append([*upper, *lower])

    def draw(self, canvas: Canvas) -> None:
        """Draw everything on one invisible axes that covers the figure."""
        ax = canvas.figure.add_axes((0, 0, 1, 1))
        ax.set_axis_off()
        ax.set_xlim(0, canvas.width)
        ax.set_ylim(0, canvas.height)
        draw_path(ax, self.grid, edgecolor=colour("grid"), linewidth=1.0, gid="grid")
        for token, polygons in self.bands.items():
            draw_path(ax, polygons, facecolor=colour(token), alpha=0.13, linewidth=0, gid="bands")
        draw_path(ax, self.frame, edgecolor=colour("faint"), linewidth=1.0, gid="frame")
        draw_path(ax, self.rule, edgecolor=colour("muted"), linewidth=1.2, linestyle=(0, (3, 2)), gid="rule")
        ends: dict[str, Any] = {"joinstyle": "round", "capstyle": "round"}
        for token, lines in self.lines.items():
            draw_path(ax, lines, edgecolor=colour(token), linewidth=1.7, gid="lines", **ends)


def _choose_y_axis(points: Sequence[Interval], rule: float | None, *, linear: bool) -> _YAxis:
    """Return an axis that contains all means, and intervals up to one range of the means beyond them."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    means = [p.value for p in points] + ([rule] if rule is not None else [])
    low, high = min(means), max(means)
    if not linear and low > 0 and high / low >= 50:
        low, high = low / 1.4, high * 1.4
        ticks = [t for t in LogLocator(numticks=6).tick_values(low, high) if low <= t <= high]
        return _YAxis(low, high, True, ticks)
    extent = (high - low) or abs(high) or 1.0
    low = min([low, *(max(p.low, low - extent) for p in points if p.low is not None)]) - 0.05 * extent
    high = max([high, *(min(p.high, high + extent) for p in points if p.high is not None)]) + 0.05 * extent
    return _YAxis(low, high, False, [t for t in MaxNLocator(nbins=4).tick_values(low, high) if low <= t <= high])


def _draw_legend(canvas: Canvas, panels: Sequence[Panel], legend: str) -> None:
    """Write the line names in their colours, in one row above the panels."""
    names = list({line.name: line.token for _, lines in panels for line in lines}.items())
    if len(names) < 2 and not legend:
        return
    x, y = float(_LEFT), canvas.height - 31.0
    if legend:
        canvas.text(x, y, legend, colour="muted")
        x += 10 + 6.6 * len(legend)
    for name, token in names:
        canvas.text(x, y, f"● {name}", colour=token, weight="bold")
        x += 26 + 7.4 * len(name)


_BASES = (2, 4, 10, 16, 100, 256)
_CHARACTER = 7.2
"""Width of a digit of a tick label in px, rounded up."""


@dataclass(frozen=True)
class AxisScale:
    """x positions of axis values: log₂ if positive numbers span a factor of 8; words by their order."""

    axis: str
    values: tuple[Any, ...]
    at: dict[Any, float]
    log: bool

    @property
    def title(self) -> str:
        """Return the axis' name with its unit and kind."""
        return formats.axis_name(self.axis) + (" (log scale)" if self.log else "")

    def position(self, value: float) -> float:
        """Return the x position of any number, which need not be one of the values."""
        return math.log2(value) if self.log else value

    def ticks(self, width: float) -> list[Any]:
        """Return the values to print along `width` px: all if they fit, else powers of a base, else every k-th."""
        logs = {v: math.log(v) for v in self.values} if self.log else {}
        powers = [[v for v in logs if abs(math.remainder(logs[v], math.log(base))) < 1e-9] for base in _BASES]
        spaced = [list(self.values[::k]) for k in range(2, max(len(self.values), 3))]
        choices = [list(self.values), *(values for values in powers if len(values) > 2), *spaced]
        return next((values for values in choices if self._fit(values, width)), list(self.values[:1]))

    def draw(self, ax: Axes, width: float) -> None:
        """Set the x ticks and limits of `ax`, which is `width` px wide."""
        low, high = min(self.at.values()), max(self.at.values())
        margin = 0.03 * ((high - low) or 1.0)
        ax.set_xlim(low - margin, high + margin)
        ticks = self.ticks(width)
        ax.set_xticks([self.at[v] for v in ticks], [formats.axis_value(v) for v in ticks])

    def _fit(self, values: Sequence[Any], width: float) -> bool:
        low, high = min(self.at.values()), max(self.at.values())
        per_unit = width / ((high - low) * 1.06 or 1.0)
        labels = [(self.at[v] * per_unit, _CHARACTER * len(formats.axis_value(v))) for v in values]
        return all(x2 - x1 >= (width1 + width2) / 2 + 4 for (x1, width1), (x2, width2) in itertools.pairwise(labels))


def axis_scale(axis: str, values: Sequence[Any]) -> AxisScale:
    """Build the scale of an axis with these values, in their order; None and words count as words."""
    numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    if numeric and min(values) > 0 and max(values) / min(values) >= 8:
        return AxisScale(axis, tuple(values), {v: math.log2(v) for v in values}, log=True)
    at = {v: float(v) if numeric else float(i) for i, v in enumerate(values)}
    return AxisScale(axis, tuple(values), at, log=False)


_PANELS = 12
_FIGURES = 2
_KINDS = ("orange", "blue", "green", "purple", "amber")


@dataclass(frozen=True)
class Quantity:
    """Quantity recorded along the steps: column, y title with unit, chart title, level to mark."""

    column: str
    unit: str
    title: str
    rule: float | None = None
    definition: str = ""


def _recorded_quantities(trace: SweepTable, stability: float) -> list[Quantity]:
    """Return the recorded quantities. stability: threshold of the sharpness, for the caption."""
    error, loss = (next((s for s in ("test", "dev") if trace.has(f"{s}.{k}")), "test") for k in ("error", "loss"))
    known = [
        Quantity("train.loss", f"training loss ({trace.loss_unit})", "Training loss along the steps"),
        Quantity("train.error", "train error (share wrong)", "Train error along the steps"),
        Quantity(f"{error}.error", f"{error} error (share wrong)", f"{error.capitalize()} error along the steps"),
        Quantity(f"{loss}.loss", f"{loss} loss ({trace.loss_unit})", f"{loss.capitalize()} loss along the steps"),
        Quantity(
            GRADIENT,
            "gradient norm",
            "Norm of the adapter's gradient",
            definition="√(‖gA‖² + ‖gB‖²) of the last optimizer step before the recorded one.",
        ),
        Quantity(
            SHARPNESS,
            "sharpness over its threshold",
            "Preconditioned sharpness over its stability threshold",
            rule=1.0,
            definition=f"lr·λ_max of the preconditioned Hessian over {stability:.3g}; above the dashed line Adam is "
            "unstable on a quadratic.",
        ),
        Quantity("update.ratio", "‖sBA‖ / ‖W₀‖", "Size of the adapter's change of the weights"),
        Quantity("update.relative", "‖Δθ‖ / ‖θ‖", "Size of a step, relative to the adapter's weights"),
        Quantity("balance", "Σ‖A‖² − ‖B‖²", "Balance of the factors"),
        Quantity("effective_params", "effective parameters", "Effective parameters along the steps"),
    ]
    return [q for q in known if trace.has(q.column)]


@dataclass(frozen=True)
class _Layout:
    """Axes shown as lines, rows and columns of panels; each setting of the other axes gets its own figure."""

    lines: str | None = None
    rows: str | None = None
    columns: str | None = None
    figures: Sequence[str] = ()


def dynamics_charts(data: SweepData) -> list[Chart | None]:
    """Draw one figure per quantity and setting of the axes that neither lines nor panels show; none without a trace."""
    if data.trace is None:
        return []
    layout = _choose_layout(data)
    return [
        _quantity_chart(data.trace, quantity, layout, setting, number)
        for number, setting in enumerate(data.trace.settings(layout.figures)[:_FIGURES] if layout.figures else [{}])
        for quantity in _recorded_quantities(data.trace, data.stability)
    ]


def _choose_layout(data: SweepData) -> _Layout:
    """Assign ranks to lines, learning rates to rows, words to columns; a random design has one panel, its mean."""
    if data.design == "random":
        return _Layout()
    lines = main_axis(data)
    axes = [a for a in data.axes if a != lines]
    columns = next((a for a in axes if not data.numeric(a)), None)
    rows = next((a for a in [*(a for a in axes if a.endswith("lr")), *axes] if a != columns), None)
    return _Layout(lines, rows, columns, [a for a in axes if a not in (rows, columns)])


def _quantity_chart(
    trace: SweepTable, quantity: Quantity, layout: _Layout, setting: dict[str, Any], number: int
) -> Chart | None:
    across = sample_evenly(trace.levels(layout.columns), 4) if layout.columns else [None]
    down = sample_evenly(trace.levels(layout.rows), max(_PANELS // len(across), 1)) if layout.rows else [None]
    levels = sample_evenly(trace.values(layout.lines), len(RAMP)) if layout.lines else [None]
    ordered = layout.lines is None or trace.numeric(layout.lines)
    tokens = sample_evenly(RAMP, len(levels)) if ordered else [_KINDS[i % len(_KINDS)] for i in range(len(levels))]
    panels = []
    for row, column in itertools.product(down, across):
        panel = {axis: v for axis, v in ((layout.rows, row), (layout.columns, column)) if axis is not None}
        lines = []
        for level, token in zip(levels, tokens, strict=True):
            own = {layout.lines: level} if layout.lines else {}
            name = formats.axis_value(level) if layout.lines else "mean"
            if curve := trace.curve(quantity.column, STEP, {**setting, **panel, **own}):
                lines.append(LineSeries(name, token, curve))  # none if every run failed before its first record
        panels.append((formats.setting(panel) or "all cells", lines))
    caption = "Means over seeds; bands: 95 % t-intervals." if trace.seeds > 1 else "One seed: no interval can be given."
    if quantity.definition:
        caption += f" {quantity.definition}"
    axes = [axis for axis in (layout.rows, layout.columns, layout.lines) if axis]
    if len(across) * len(down) * len(levels) < len(trace.settings(axes)):
        caption += " Some settings are left out; curves.parquet has all."
    return facet_chart(
        panels,
        STEP,
        columns=len(across) if len(across) > 1 else min(len(panels), 3),
        y=quantity.unit,
        name=f"sweep-steps-{re.sub('[._]', '-', quantity.column)}" + (f"-{number + 1}" if number else ""),
        title=formats.title_at(quantity.title, setting),
        caption=caption,
        legend=formats.axis_name(layout.lines) if layout.lines else "",
        rule=quantity.rule,
        linear=quantity.column.endswith(("loss", "error")),  # keep the true height of a bump
    )
