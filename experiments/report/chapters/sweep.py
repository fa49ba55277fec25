"""Sections and key figures of a sweep."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from flatshift.experiments.report import formats
from flatshift.experiments.report.blocks import Block, ChapterPart, ChartGroup, KeyFigure, Notes, Section, Table
from flatshift.experiments.report.chapters.sweep_verdicts import (
    bisection_table,
    emc_table,
    format_crossing,
    regularizer_table,
    verdict_notes,
    verdict_shortfall,
    verdict_table,
)
from flatshift.experiments.report.charts.capacity import capacity_charts
from flatshift.experiments.report.charts.curve import (
    Series,
    curve_chart,
    metric_unit,
    scatter_chart,
    train_test_series,
    y_limits,
)
from flatshift.experiments.report.charts.dynamics import dynamics_charts
from flatshift.experiments.report.charts.facets import LineSeries, Panel, facet_chart
from flatshift.experiments.report.charts.heat_map import heat_maps
from flatshift.experiments.report.figure import Chart
from flatshift.experiments.results.analysis import (
    PANELS,
    AxisAnalysis,
    SweepAnalysis,
    is_capacity_axis,
    main_axis,
    sample_settings,
    undrawn_note,
)
from flatshift.experiments.results.run import RunResults
from flatshift.experiments.results.sweep import STEP, CoupledAxis, FailedCell, SweepData
from flatshift.experiments.statistics.intervals import t_interval
from flatshift.finetune.evaluate.metrics import find_metric

_TOGETHER = 12
"""Most verdicts in one table at the top."""
_PAIRED_MAPS = 4
"""Most pairs of axes for which maps are drawn."""
_PAIRS = 6
"""Most values of a paired axis listed at the top; the table of all settings has all."""
_LOST = 8
"""Most settings whose diverged seeds are counted at the top."""
_ROWS = 200
"""Most settings in a table of the page; points.csv has every cell."""
_FAILURES = 50


def part(run: RunResults) -> ChapterPart | None:
    """Return the part for a directory of `flatshift sweep`."""
    if run.sweep is None:
        return None
    analysis = SweepAnalysis(run.sweep)
    findings = [sweep_finding(run.sweep, analysis), next_value_effects(run.sweep, analysis), other_verdicts(analysis)]
    return ChapterPart("sweep", findings, sweep_tiles(run.sweep, analysis), sweep_sections(run.sweep, analysis))


def sweep_finding(data: SweepData, analysis: SweepAnalysis) -> str:
    """Return a sentence on the lowest mean test error and the verdict along the first axis that has one."""
    axis = main_axis(data)
    test, _ = data.error_columns()
    lowest = data.best(test)
    if axis is None or lowest is None:
        return f"{data.done:,} of {len(data):,} cells are finished; there is no curve to draw yet."
    where, best = lowest
    mean = formats.with_interval(best)
    whole = data.done == len(data)
    begin = "Mean" if whole else f"With {data.done:,} of {len(data):,} cells finished, mean"
    sentence = f"{begin} {formats.figure_name(test)} is lowest at {formats.setting(data.whole(where))}: {mean}"
    lacking = [said for direction in analysis.directions if (said := verdict_shortfall(direction))]
    if lacking and not any(j.verdict.peak is not None for j in analysis.judged):
        return f"{sentence}; {lacking[0]}."
    judged = [d for d in analysis.directions if d.judged]
    if judged:
        return f"{sentence}; along {formats.axis_name(judged[0].axis)}: {_format_verdicts(judged[0])}."
    refused = any(d.refused for d in analysis.directions)
    return sentence + ("; too few seeds or values for a verdict." if refused else ".")


def next_value_effects(data: SweepData, analysis: SweepAnalysis) -> str:
    """Describe what the next larger value of each axis changes at the best setting, paired by seed, and on which side
    of the interpolation threshold that setting is."""
    test, _ = data.error_columns()
    lowest = data.best(test)
    if lowest is None or data.design == "random":
        return ""
    where, said = lowest[0], []
    for axis in (axis for axis in data.axes if data.numeric(axis) and axis in where):
        found = data.matrix(test, axis, {key: value for key, value in where.items() if key != axis})
        here = found.values.index(where[axis])
        if here + 1 == len(found.values):
            more = "more was not tried" if data.done == len(data) else "as far as cells are finished"
            said.append(f"{formats.axis_name(axis)} ends at {formats.axis_value(where[axis])}, {more}")
            continue
        change = found.y[:, here + 1] - found.y[:, here]
        change = change[np.isfinite(change)]
        if len(change):
            by_how_much = formats.with_interval(t_interval(change.tolist()))
            said.append(
                f"{formats.axis_name(axis)} {formats.axis_value(where[axis])} → "
                f"{formats.axis_value(found.values[here + 1])} changes it by {by_how_much}"
            )
    main = main_axis(data)
    crossing = analysis.crossing(main, {k: v for k, v in where.items() if k != main}) if main is not None else None
    if said and crossing is not None and main is not None and crossing.value is not None:
        side = "before" if (where[main] < crossing.value) != crossing.rising else "past"
        words = f"{formats.axis_name(main)} {format_crossing(crossing)}"
        said.append(f"that is {side} the point where training rows become fitted ({words})")
    return f"One more from there: {'; '.join(said)}." if said else ""


def other_verdicts(analysis: SweepAnalysis) -> str:
    """Return the verdicts along the other axes."""
    judged = [d for d in analysis.directions if d.judged][1:]
    said = "; ".join(f"along {formats.axis_name(d.axis)}: {_format_verdicts(d)}" for d in judged)
    return f"{said[:1].upper()}{said[1:]}." if said else ""


def _format_verdicts(direction: AxisAnalysis) -> str:
    """Format verdicts: `double descent` for one curve, `2 × double descent, 1 × undecided` for several."""
    kinds = Counter(j.verdict.kind for j in direction.judged)
    if len(direction.judged) == 1:
        return next(iter(kinds))
    return ", ".join(f"{n} × {kind}" for kind, n in sorted(kinds.items(), key=lambda item: (-item[1], item[0])))


def sweep_tiles(data: SweepData, analysis: SweepAnalysis) -> list[KeyFigure]:
    """Return tiles: lowest held-out error, majority baseline, interpolation threshold and progress."""
    axis = main_axis(data)
    test = data.error_columns()[0]
    tiles = []
    lowest = data.best(test)
    if axis is not None and lowest is not None:
        where, best = lowest
        at = ", ".join(f"{k} = {formats.axis_value(v)}" for k, v in data.whole(where).items())
        split, _, metric = test.partition(".")
        shown, interval = formats.estimate(best.value, best.low, best.high)
        tiles.append(
            KeyFigure(f"lowest {split} {find_metric(metric).title}", shown, interval, f"at {at}; {best.n} runs")
        )
        floor = data.majority_error(test)
        if floor is not None:
            note = f"{split} error of always the commonest class"
            tiles.append(KeyFigure("majority baseline", formats.number(floor), "", note))
        crossing = analysis.crossing(axis, {}) if len(data.axes) == 1 else None
        if crossing is not None:
            note = f"{axis} at which train error crosses {data.epsilon:g}"
            tiles.append(KeyFigure("interpolation threshold", format_crossing(crossing), "", note))
    fewest, most = data.seeds_each()
    note = f"{fewest} to {most} seeds" if fewest < most else f"{most} seed{'s' * (most != 1)} each"
    note += f", {len(data.failed)} failed" if data.failed else ""
    total = data.planned if data.planned is not None else len(data)
    tiles.append(KeyFigure("cells finished", f"{data.done:,} / {max(total, len(data)):,}", "", note))
    return tiles


def sweep_sections(data: SweepData, analysis: SweepAnalysis) -> list[Section]:
    """Return all sections of a sweep, the verdicts first."""
    sections = [_overview_section(data, analysis)]
    top = _top_directions(analysis)
    sections += [s for d in analysis.directions if (s := _axis_section(data, d, verdicts=d not in top)) is not None]
    sections += _random_cell_sections(data)
    sections += _map_sections(data)
    axis = main_axis(data)
    if axis is not None and data.design != "random":
        folds, said = capacity_charts(data, axis, analysis)
        if folds:
            lead = (
                "The same errors over what the adapter uses instead of over what it is allowed. Where a line turns "
                f"back on itself, {axis} is more than one axis of capacity, and a peak along it may be no more than "
                f"the turn.{said}"
            )
            sections.append(Section("Effective parameters", [ChartGroup(folds)], lead))
        sections += _memorisation_sections(data, analysis)
    along = dynamics_charts(data)
    if along:
        sections.append(Section("Training dynamics", [ChartGroup(along)]))
    return [s for s in [*sections, *sweep_tables(data)] if s.blocks]


def _overview_section(data: SweepData, analysis: SweepAnalysis) -> Section:
    blocks: list[Block] = []
    table = verdict_table([j for direction in _top_directions(analysis) for j in direction.judged], data.epsilon)
    if table is not None:
        blocks.append(table)
    searched = bisection_table(data)
    if searched is not None:
        blocks.append(searched)
    notes = _progress_notes(data)
    if data.fixed:
        fixed = ", ".join(f"{k} = {formats.axis_value(v)}" for k, v in data.fixed.items())
        notes.append(f"The same in every cell: {fixed}.")
    notes += [_coupled_axis_note(one) for one in data.together]
    notes += _threshold_notes(analysis)
    notes += verdict_notes(analysis)
    notes += _failed_seed_notes(data)
    notes += [f"Cell {f.cell} failed: {f.reason}" for f in data.failed[:3]]
    if len(data.failed) > 3:
        notes.append(f"{len(data.failed) - 3:,} more cells failed; their reasons are listed at the end.")
    if len(data.versions) > 1:
        notes.append(
            "Cells were made by different code: " + ", ".join(f"{v} ({n:,} cells)" for v, n in data.versions) + "."
        )
    if notes:
        blocks.append(Notes(notes))
    return Section("Sweep", blocks)


def _top_directions(analysis: SweepAnalysis) -> list[AxisAnalysis]:
    """Return the directions whose verdicts are at the top: all, or only the first if there are too many verdicts."""
    found = [direction for direction in analysis.directions if direction.judged]
    return found if len(analysis.judged) <= _TOGETHER else found[:1]


def _progress_notes(data: SweepData) -> list[str]:
    """Describe the cells that an unfinished sweep still lacks."""
    if not data.unfinished:
        return []
    said = f"{data.unfinished:,} of {data.planned or len(data):,} cells have no result yet; this page shows the others"
    if data.seconds:
        mean = statistics.fmean(data.seconds)
        said += f". At {formats.seconds(mean)} a cell they take {formats.seconds(mean * data.unfinished)} one by one"
    return [said + ". `flatshift sweep` with the same arguments continues."]


def _coupled_axis_note(one: CoupledAxis) -> str:
    """Note that an axis of a paired design moves with the plotted one."""
    pairs = [f"{formats.axis_value(v)}: {formats.axis_value(other)}" for v, other in one.values.items()]
    shown = ", ".join(pairs[:_PAIRS]) + (", …" if len(pairs) > _PAIRS else "")
    return f"Paired: {one.axis} moves with {one.leader} ({shown}); what is seen may come from either."


def _failed_seed_notes(data: SweepData) -> list[str]:
    """Count the seeds of each setting that diverged or failed otherwise: curves over the steps lose these seeds."""
    lost: dict[tuple[Any, ...], list[FailedCell]] = {}
    for failure in data.failed:
        lost.setdefault(tuple(failure.setting.items()), []).append(failure)
    said = []
    for setting, failures in list(lost.items())[:_LOST]:
        where = dict(setting)
        does = "diverged" if all(f.diverged for f in failures) else "failed"
        at = f" at {formats.setting(where)}" if where else ""
        said.append(f"{len(failures)} of {len(data.rows(where))} seeds {does}{at}.")
    if len(lost) > _LOST:
        said.append(f"At {len(lost) - _LOST:,} more settings seeds diverged or failed.")
    return said


def _threshold_notes(analysis: SweepAnalysis) -> list[str]:
    """Note axes that cannot show an interpolation peak: a curve must start above the threshold and end below it."""
    data, axis = analysis.data, main_axis(analysis.data)
    direction = next((d for d in analysis.directions if d.axis == axis), None)
    if direction is None:
        return []
    sides: dict[str, list[str]] = {"none": [], "all": []}
    for where in direction.settings:
        crossing = direction.crossing_at(where)
        if crossing is not None and crossing.fitted != "some":
            sides[crossing.fitted].append(formats.setting(where))
    said = []
    for side, names in sides.items():
        if not names:
            continue
        at = "" if len(names) == len(direction.settings) else f" ({'; '.join(names)})"
        if len(names) > _LOST and at:
            at = f" ({len(names)} of {len(direction.settings)} settings)"
        said.append(
            f"Train error stays above {data.epsilon:g}: nothing interpolates, so this axis shows no peak there{at}."
            if side == "none"
            else f"Train error is at most {data.epsilon:g} from the smallest {axis} on: every value interpolates, so "
            f"this axis cannot show an interpolation peak; take more rows, more label noise or fewer steps{at}."
        )
    return said


def _axis_section(data: SweepData, direction: AxisAnalysis, *, verdicts: bool) -> Section | None:
    """Build the charts of error and loss along one axis. verdicts: add their table as well."""
    axis, table = direction.axis, direction.table
    named = formats.axis_name(axis)
    first = data.error_columns()[0].partition(".")[2]
    kinds = [kind for kind in dict.fromkeys((first, "error", "loss")) if train_test_series(table, kind)]
    charts: list[Chart] = []
    for kind in kinds:
        lines = train_test_series(table, kind)
        words = f"{' and '.join(line.name for line in lines).capitalize()} {find_metric(kind).title} along {named}"
        if len(direction.drawn) > 1 and (kind != kinds[0] or not is_capacity_axis(axis)):
            name = f"sweep-{axis.rpartition('.')[2].replace('_', '-')}-{kind}"
            made = _faceted_chart(direction, lines, name, words, metric_unit(kind))
            charts += [made] if made is not None else []
            continue
        limits = _shared_y_limits(direction, lines, kind)
        for number, where in enumerate(direction.drawn):
            chart = curve_chart(
                table,
                axis,
                where,
                lines,
                name=f"sweep-{axis.rpartition('.')[2].replace('_', '-')}-{kind}-{number}",
                title=words + (f", {formats.setting(where)}" if where else ""),
                unit=metric_unit(kind),
                limits=limits,
                analysed=direction.judged_at(where) if kind == kinds[0] else None,
                crossing=direction.crossing_at(where),
                epsilon=data.epsilon,
                wide=len(direction.drawn) == 1 and len(kinds) == 1,
            )
            charts += [chart] if chart is not None else []
    if not charts:
        return None
    blocks: list[Block] = [ChartGroup(charts)]
    if verdicts and (judged := verdict_table(direction.judged, data.epsilon)) is not None:
        blocks.append(judged)
    if axis.endswith("limit"):
        found = emc_table(direction)
        blocks += [found] if found is not None else []
    against, notes = regularizer_table(direction)
    blocks += [against] if against is not None else []
    if direction.total > len(direction.drawn):
        notes.append(
            f"{len(direction.drawn)} of {direction.total:,} settings of the other axes are drawn, evenly chosen; "
            f"{'the verdicts and ' if direction.total == len(direction.settings) else ''}the tables have all."
        )
    if table.numeric(axis) and None in table.levels(axis):
        notes.append(
            f"{axis.rpartition('.')[2]} = {formats.axis_value(None)} is not on the axis: it is in the tables, and "
            "in no curve or verdict."
        )
    notes += [f"Not evaluated: {reason}." for reason in direction.refused[:3]]
    if notes:
        blocks.append(Notes(notes))
    return Section(f"{direction.kind}: along {named}", blocks)


def _shared_y_limits(direction: AxisAnalysis, lines: Sequence[Series], kind: str) -> tuple[float, float] | None:
    """Return one y range for all settings, so that their charts are comparable."""
    curves = [direction.table.curve(line.column, direction.axis, w) for line in lines for w in direction.drawn]
    curves = [[(v, p) for v, p in c if not (direction.axis == STEP and v == 0)] for c in curves]
    return y_limits([c for c in curves if c], zero=kind == "error") if any(curves) else None


def _faceted_chart(direction: AxisAnalysis, lines: Sequence[Series], name: str, title: str, y: str) -> Chart | None:
    """Draw a small panel for each chosen setting."""
    panels = [
        Panel(
            formats.setting(where),
            [
                LineSeries(line.name, line.token, direction.table.curve(line.column, direction.axis, where))
                for line in lines
            ],
        )
        for where in direction.drawn
    ]
    return facet_chart(
        panels,
        direction.axis,
        columns=3 if len(panels) > 4 else 2,
        y=y,
        name=name,
        title=title,
        caption="Means over seeds; bands: 95 % t-intervals.",
        linear=True,
    )


def _random_cell_sections(data: SweepData) -> list[Section]:
    if data.design != "random":
        return []
    kind = data.error_columns()[0].partition(".")[2]
    lines = train_test_series(data, kind)
    charts = [
        scatter_chart(data, axis, lines, name=f"sweep-cells-{number}", unit=metric_unit(kind))
        for number, axis in enumerate(a for a in data.axes if data.numeric(a))
    ]
    drawn = [c for c in charts if c is not None]
    return [Section("Cells", [ChartGroup(drawn)])] if drawn else []


def _map_sections(data: SweepData) -> list[Section]:
    """Draw rank × steps from the trace, then every pair of numeric axes; word axes only if there are just two axes."""
    if data.design == "random":
        return []
    charts: list[Chart] = []
    said = ""
    axis = main_axis(data)
    test, train = data.error_columns()
    if data.trace is not None and axis is not None and len(data.levels(axis)) > 1:
        rest = [a for a in data.axes if a != axis]
        every = data.trace.settings(rest)
        drawn = sample_settings(data.trace, every, PANELS)
        said = undrawn_note(drawn, every)
        for number, where in enumerate(drawn):
            charts += heat_maps(
                data.trace,
                STEP,
                axis,
                where,
                (test, train),
                name=f"sweep-map-steps-{number}",
                epsilon=data.epsilon,
            )
    pairs = [(x, y) for i, x in enumerate(data.axes) for y in data.axes[i + 1 :]]
    pairs = [(x, y) for x, y in pairs if len(data.axes) == 2 or (data.numeric(x) and data.numeric(y))]
    for x, y in pairs[:_PAIRED_MAPS]:
        if y == axis or not data.numeric(x):
            x, y = y, x
        rest = [a for a in data.axes if a not in (x, y)]
        for number, where in enumerate(sample_settings(data, data.settings(rest), 1 if len(pairs) > 1 else PANELS)):
            names = "-".join(a.rpartition(".")[2].replace("_", "-") for a in (x, y))
            charts += heat_maps(
                data, x, y, where, (test, train), name=f"sweep-map-{names}-{number}", epsilon=data.epsilon
            )
    if not charts:
        return []
    lead = f"The line is the interpolation threshold, a mean train error of {data.epsilon:g}.{said}"
    return [Section("Maps", [ChartGroup(charts)], lead)]


def _memorisation_sections(data: SweepData, analysis: SweepAnalysis) -> list[Section]:
    """Draw train error on clean and on noisy labels: learning compared with memorisation."""
    split = [
        Series("train.error_clean", "blue", "clean"),
        Series("train.error_noisy", "orange", "noisy"),
        Series("train.memorised", "purple", "memorised"),
        Series("train.recovered", "green", "recovered"),
    ]
    charts = []
    for direction in analysis.directions:
        lines = [line for line in split if direction.table.has(line.column)]
        name = f"sweep-memorised-{direction.axis.rpartition('.')[2]}"
        title = f"Clean and noisy labels along {formats.axis_name(direction.axis)}"
        unit = "share of the clean or of the noisy rows"
        if lines and len(direction.drawn) > 1:
            charts.append(_faceted_chart(direction, lines, name, title, unit))
        elif lines:
            (where,) = direction.drawn
            crossing = direction.crossing_at(where)
            charts.append(
                curve_chart(
                    direction.table,
                    direction.axis,
                    where,
                    lines,
                    name=name,
                    title=title + (f", {formats.setting(where)}" if where else ""),
                    unit=unit,
                    crossing=crossing,
                    epsilon=data.epsilon,
                )
            )
    drawn = [chart for chart in charts if chart is not None]
    if not drawn:
        return []
    lead = (
        "Errors against the label that was trained on, on rows with clean and with noisy labels. Memorised: noisy rows "
        "predicted as their wrong label; recovered: predicted as their true one."
    )
    return [Section("Memorised labels", [ChartGroup(drawn)], lead)]


def sweep_tables(data: SweepData) -> list[Section]:
    """Tabulate all settings, failed cells, and the code versions that produced them."""
    sections = []
    columns = dict.fromkeys([*data.error_columns(), f"{data.judged('loss')}.loss", "train.loss"])
    shown = [c for c in columns if data.has(c)]
    if data.axes and shown:
        means = {c: {tuple(w.values()): p for w, p in data.means(c)} for c in shown}
        settings = data.settings()
        rows = []
        for where in settings[:_ROWS]:
            points = [means[c].get(tuple(where.values())) for c in shown]
            cells = [formats.with_interval(p) for p in points]
            runs = str(max((p.n for p in points if p), default=0))
            rows.append([*map(formats.axis_value, data.whole(where).values()), *cells, runs])
        keys = [*data.axes, *(one.axis for one in data.together)]
        names = [*keys, *(formats.figure_name(c) for c in shown), "runs"]
        caption = "Mean over seeds with its 95 % t-interval."
        if len(settings) > _ROWS:
            caption += f" The first {_ROWS} of {len(settings):,} settings; cells.parquet has all cells."
        numeric = frozenset(range(len(keys), len(names)))
        sections.append(Section("All settings", [Table(names, rows, caption, numeric)], folded=len(rows) > 24))
    if data.failed:
        lines = [[f.cell, formats.setting(f.setting), str(f.seed), f.reason] for f in data.failed[:_FAILURES]]
        caption = f"{len(data.failed):,} cells failed" + (
            f"; the first {_FAILURES} are listed, cells.parquet has all." if len(data.failed) > _FAILURES else "."
        )
        sections.append(
            Section("Failed cells", [Table(["cell", "setting", "seed", "reason"], lines, caption)], folded=True)
        )
    about = [["flatshift " + version, f"{count:,}"] for version, count in data.versions]
    contents = {
        "cells.parquet": "one row per cell",
        "points.csv": "the same, for spreadsheets",
        "curves.parquet": "one row per cell and recorded step",
    }
    blocks: list[Block] = []
    if about:
        blocks.append(Table(["made by", "cells"], about, numeric=frozenset({1})))
    if data.files:
        blocks.append(Notes([f"{name} next to this page: {contents[name]}." for name in data.files]))
    if blocks:
        sections.append(Section("Code and tables", blocks, folded=True))
    return sections
