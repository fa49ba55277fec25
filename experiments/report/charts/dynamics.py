"""Training dynamics of a sweep: quantities recorded along the steps, one panel per setting, one line per rank."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Any

from flatshift.experiments.report import formats
from flatshift.experiments.report.charts.facets import LineSeries, Panel, facet_chart
from flatshift.experiments.report.figure import RAMP, Chart, ramp_tokens
from flatshift.experiments.results.analysis import main_axis, sample_evenly
from flatshift.experiments.results.sweep import GRADIENT, SHARPNESS, STEP, SweepData
from flatshift.experiments.results.table import SweepTable

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
    said: str = ""


def recorded_quantities(trace: SweepTable, stability: float) -> list[Quantity]:
    """Return the recorded quantities. stability: threshold of the sharpness, for the caption."""
    error, loss = (next((s for s in ("test", "dev") if trace.has(f"{s}.{k}")), "test") for k in ("error", "loss"))
    known = [
        Quantity("train.loss", "training loss (nats)", "Training loss along the steps"),
        Quantity("train.error", "train error (share wrong)", "Train error along the steps"),
        Quantity(f"{error}.error", f"{error} error (share wrong)", f"{error.capitalize()} error along the steps"),
        Quantity(f"{loss}.loss", f"{loss} loss (nats)", f"{loss.capitalize()} loss along the steps"),
        Quantity(
            GRADIENT,
            "gradient norm",
            "Norm of the adapter's gradient",
            said="√(‖gA‖² + ‖gB‖²) of the last optimizer step before the recorded one.",
        ),
        Quantity(
            SHARPNESS,
            "sharpness over its threshold",
            "Preconditioned sharpness over its stability threshold",
            rule=1.0,
            said=f"lr·λ_max of the preconditioned Hessian over {stability:.3g}; above the dashed line Adam is "
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
    """Axes shown as lines, rows and columns of panels; each setting of the remaining axes gets its own figure."""

    lines: str | None
    rows: str | None
    columns: str | None
    rest: list[str]


def dynamics_charts(data: SweepData) -> list[Chart]:
    """Draw one figure per quantity and setting of the axes that neither lines nor panels show; none without a trace."""
    if data.trace is None:
        return []
    layout = _choose_layout(data)
    charts = []
    for number, where in enumerate(data.trace.settings(layout.rest)[:_FIGURES] if layout.rest else [{}]):
        for quantity in recorded_quantities(data.trace, data.stability):
            chart = _quantity_chart(data.trace, quantity, layout, where, number)
            charts += [chart] if chart is not None else []
    return charts


def _choose_layout(data: SweepData) -> _Layout:
    """Assign ranks to lines, learning rates to rows, words to columns; a random design has one panel, its mean."""
    if data.design == "random":
        return _Layout(None, None, None, [])
    lines = main_axis(data)
    rest = [a for a in data.axes if a != lines]
    columns = next((a for a in rest if not data.numeric(a)), None)
    rates = [a for a in rest if a.endswith("lr")]
    rows = next((a for a in [*rates, *rest] if a != columns), None)
    return _Layout(lines, rows, columns, [a for a in rest if a not in (rows, columns)])


def _quantity_chart(
    trace: SweepTable, quantity: Quantity, layout: _Layout, where: dict[str, Any], number: int
) -> Chart | None:
    across = sample_evenly(trace.levels(layout.columns), 4) if layout.columns else [None]
    down = sample_evenly(trace.levels(layout.rows), max(_PANELS // len(across), 1)) if layout.rows else [None]
    levels = sample_evenly(trace.values(layout.lines), len(RAMP)) if layout.lines else [None]
    ordered = layout.lines is None or trace.numeric(layout.lines)
    tokens = ramp_tokens(len(levels)) if ordered else [_KINDS[i % len(_KINDS)] for i in range(len(levels))]
    panels = []
    for row, column in itertools.product(down, across):
        at = {a: v for a, v in ((layout.rows, row), (layout.columns, column)) if a is not None}
        lines = []
        for level, token in zip(levels, tokens, strict=True):
            held = {**where, **at, **({layout.lines: level} if layout.lines else {})}
            name = formats.axis_value(level) if layout.lines else "mean"
            curve = trace.curve(quantity.column, STEP, held)
            if curve:  # none if every run failed before its first record
                lines.append(LineSeries(name, token, curve))
        panels.append(Panel(formats.setting(at) or "all cells", lines))
    caption = "Means over seeds; bands: 95 % t-intervals." if trace.seeds > 1 else "One seed: no interval can be given."
    if quantity.said:
        caption += f" {quantity.said}"
    shown = [a for a in (layout.rows, layout.columns, layout.lines) if a]
    if len(across) * len(down) * len(levels) < len(trace.settings(shown)):
        caption += " Some settings are left out; curves.parquet has all."
    return facet_chart(
        panels,
        STEP,
        columns=len(across) if len(across) > 1 else min(len(panels), 3),
        y=quantity.unit,
        name=f"sweep-steps-{re.sub('[._]', '-', quantity.column)}" + (f"-{number + 1}" if number else ""),
        title=quantity.title + (f", {formats.setting(where)}" if where else ""),
        caption=caption,
        legend=formats.axis_name(layout.lines) if layout.lines else "",
        rule=quantity.rule,
        linear=quantity.column.endswith(("loss", "error")),  # keep the true height of a bump
    )
