"""Small multiples: one figure of many panels with the same axes and the same lines.

Everything is drawn in px on one axes, lines of one colour as one path: one matplotlib axes per panel would take longer
than the rest of the page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flatshift.experiments.report import formats
from flatshift.experiments.report.figure import WIDE, Canvas, Chart, colour
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


@dataclass(frozen=True)
class Panel:
    """One small chart."""

    title: str
    lines: Sequence[LineSeries]


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
    panels = [panel for panel in panels if any(line.points for line in panel.lines)]
    values = list(dict.fromkeys(v for panel in panels for line in panel.lines for v, _ in line.points))
    # Step 0, before any training, would rule out a log axis.
    values = [v for v in values if not (axis == "step" and v == 0)]
    if len(values) < 2:
        return None
    numbers = all(isinstance(v, int | float) for v in values)
    place = axis_scale(axis, sorted(values) if numbers else values)
    shown = [(v, p) for panel in panels for line in panel.lines for v, p in line.points if v in place.at]
    level = _choose_y_axis([p for _, p in shown], rule, linear=linear)
    columns = max(min(columns, len(panels)), 1)
    rows = math.ceil(len(panels) / columns)
    width = WIDE if columns > 1 else 540
    wide = (width - _LEFT - _RIGHT - _GAP * (columns - 1)) / columns
    tall = {1: 230, 2: 190}.get(rows, _ROW)
    height = _HEAD + _FOOT + rows * tall
    low, high = min(place.at.values()), max(place.at.values())
    ticks = place.ticks(wide)
    with Canvas(width, height) as canvas:
        sheet = _Sheet()
        for number, panel in enumerate(panels):
            row, column = divmod(number, columns)
            left, bottom = _LEFT + column * (wide + _GAP), height - _HEAD - (row + 1) * tall + 20
            box = _PanelBox(left, bottom, wide, tall - 38)
            canvas.text(left, bottom + tall - 28, panel.title, size=10.5, weight="bold")
            across = {v: left + wide * (0.03 + 0.94 * (at - low) / (high - low)) for v, at in place.at.items()}
            for line in panel.lines:
                sheet.line(line, across, level, box)
            for value in level.ticks:
                sheet.grid.append([(left, box.y(level.share(value))), (left + wide, box.y(level.share(value)))])
                if column == 0:
                    said = formats.axis_value(float(f"{value:.3g}"))
                    canvas.text(left - 5, box.y(level.share(value)), said, colour="muted", ha="right", size=10.5)
            if rule is not None:
                sheet.rule.append([(left, box.y(level.share(rule))), (left + wide, box.y(level.share(rule)))])
            sheet.frame.append([(left, bottom), (left + wide, bottom)])
            for value in ticks:
                sheet.frame.append([(across[value], bottom), (across[value], bottom - 4)])
                if number + columns >= len(panels):
                    canvas.text(
                        across[value], bottom - 11, formats.axis_value(value), colour="muted", ha="center", size=10.5
                    )
        sheet.draw(canvas)
        canvas.text(4, height - 13, y + (" (log scale)" if level.log else ""), colour="muted")
        canvas.text(width - _RIGHT, 9, place.title, colour="muted", ha="right")
        _draw_legend(canvas, panels, legend)
        return canvas.chart(name, title=title, caption=caption)


@dataclass(frozen=True)
class _YAxis:
    """y axis: limits, log flag and ticks."""

    low: float
    high: float
    log: bool
    ticks: Sequence[float]

    def share(self, value: float) -> float:
        """Return the relative position of a value: 0 at the lower limit, 1 at the upper; clipped."""
        if self.log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(max(share, 0.0), 1.0)


@dataclass(frozen=True)
class _PanelBox:
    """Position of a panel in px from the lower left of the figure."""

    left: float
    bottom: float
    width: float
    height: float

    def y(self, share: float) -> float:
        return self.bottom + share * self.height


@dataclass
class _Sheet:
    """Shapes to draw, by kind and colour, in px."""

    grid: list[list[Point]] = field(default_factory=list)
    frame: list[list[Point]] = field(default_factory=list)
    rule: list[list[Point]] = field(default_factory=list)
    bands: dict[str, list[list[Point]]] = field(default_factory=dict)
    lines: dict[str, list[list[Point]]] = field(default_factory=dict)

    def line(self, line: LineSeries, across: dict[Any, float], level: _YAxis, box: _PanelBox) -> None:
        points = [(across[v], p) for v, p in line.points if v in across]
        if not points:
            return
        if len(points) == 1:  # a short stroke: a path of one point is invisible
            points = [(points[0][0] - 3, points[0][1]), (points[0][0] + 3, points[0][1])]
        self.lines.setdefault(line.token, []).append([(x, box.y(level.share(p.value))) for x, p in points])
        bounded = [(x, p.low, p.high) for x, p in points if p.low is not None and p.high is not None]
        if len(bounded) > 1:
            upper = [(x, box.y(level.share(high))) for x, _, high in bounded]
            lower = [(x, box.y(level.share(low))) for x, low, _ in reversed(bounded)]
            self.bands.setdefault(line.token, []).append([*upper, *lower])

    def draw(self, canvas: Canvas) -> None:
        """Draw everything on one invisible axes that covers the figure."""
        ax = canvas.figure.add_axes((0, 0, 1, 1))
        ax.set_axis_off()
        ax.set_xlim(0, canvas.width)
        ax.set_ylim(0, canvas.height)
        _draw_path(ax, self.grid, edgecolor=colour("grid"), linewidth=1.0, gid="grid")
        for token, polygons in self.bands.items():
            _draw_path(ax, polygons, facecolor=colour(token), alpha=0.13, linewidth=0, gid="bands")
        _draw_path(ax, self.frame, edgecolor=colour("faint"), linewidth=1.0, gid="frame")
        _draw_path(ax, self.rule, edgecolor=colour("muted"), linewidth=1.2, linestyle=(0, (3, 2)), gid="rule")
        for token, lines in self.lines.items():
            _draw_path(
                ax, lines, edgecolor=colour(token), linewidth=1.7, joinstyle="round", capstyle="round", gid="lines"
            )


def _draw_path(ax: Axes, parts: Sequence[Sequence[Point]], **style: Any) -> None:
    """Draw many open lines or filled polygons as one path."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    if not parts:
        return
    vertices = [point for part in parts for point in part]
    codes = [Path.MOVETO if i == 0 else Path.LINETO for part in parts for i in range(len(part))]
    path = Path(vertices, codes)
    path.should_simplify = False
    ax.add_artist(PathPatch(path, **{"facecolor": "none", **style}))  # `add_patch` would change the limits


def _choose_y_axis(points: Sequence[Interval], rule: float | None, *, linear: bool) -> _YAxis:
    """Return an axis that contains all means, and intervals up to one range of the means beyond them."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    means = [p.value for p in points] + ([rule] if rule is not None else [])
    low, high = min(means), max(means)
    if not linear and low > 0 and high / low >= 50:
        low, high = low / 1.4, high * 1.4
        ticks = [t for t in LogLocator(numticks=6).tick_values(low, high) if low <= t <= high]
        return _YAxis(low, high, True, ticks)
    room = (high - low) or abs(high) or 1.0
    low = min([low, *(max(p.low, low - room) for p in points if p.low is not None)]) - 0.05 * room
    high = max([high, *(min(p.high, high + room) for p in points if p.high is not None)]) + 0.05 * room
    return _YAxis(low, high, False, [t for t in MaxNLocator(nbins=4).tick_values(low, high) if low <= t <= high])


def _draw_legend(canvas: Canvas, panels: Sequence[Panel], legend: str) -> None:
    """Write the line names in their colours, in one row above the panels."""
    names = list({line.name: line.token for panel in panels for line in panel.lines}.items())
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

    def place(self, value: float) -> float:
        """Return the x position of any number, which need not be one of the values."""
        return math.log2(value) if self.log else value

    def ticks(self, width: float) -> list[Any]:
        """Return the values to print along `width` px: all if they fit, else powers of a base, else every k-th."""
        if self.log:
            regular = [[v for v in self.values if _is_power(v, base)] for base in _BASES]
        else:
            regular = []
        every = [list(self.values[::k]) for k in range(2, max(len(self.values), 3))]
        choices = [list(self.values), *(r for r in regular if len(r) > 2), *every]
        return next((c for c in choices if self._fit(c, width)), list(self.values[:1]))

    def draw(self, ax: Axes, width: float, *, names: bool = True) -> None:
        """Set the x ticks and limits of `ax`, which is `width` px wide."""
        ends = (min(self.at.values()), max(self.at.values()))
        margin = 0.03 * ((ends[1] - ends[0]) or 1.0)
        ax.set_xlim(ends[0] - margin, ends[1] + margin)
        shown = self.ticks(width)
        ax.set_xticks([self.at[v] for v in shown], [formats.axis_value(v) if names else "" for v in shown])

    def _fit(self, shown: Sequence[Any], width: float) -> bool:
        low, high = min(self.at.values()), max(self.at.values())
        per_unit = width / ((high - low) * 1.06 or 1.0)
        wide = [_CHARACTER * len(formats.axis_value(v)) for v in shown]
        places = [self.at[v] * per_unit for v in shown]
        return all(places[i + 1] - places[i] >= (wide[i] + wide[i + 1]) / 2 + 4 for i in range(len(shown) - 1))


def axis_scale(axis: str, values: Sequence[Any]) -> AxisScale:
    """Build the scale of an axis with these values, in their order; None and words count as words."""
    numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    if numeric and min(values) > 0 and max(values) / min(values) >= 8:
        return AxisScale(axis, tuple(values), {v: math.log2(v) for v in values}, log=True)
    at = {v: float(v) if numeric else float(i) for i, v in enumerate(values)}
    return AxisScale(axis, tuple(values), at, log=False)


def _is_power(value: float, base: int) -> bool:
    power = math.log(value) / math.log(base)
    return abs(power - round(power)) < 1e-9
