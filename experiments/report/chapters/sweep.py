"""Sections and key figures of a sweep."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flatshift.experiments.report import formats
from flatshift.experiments.report.blocks import ChapterPart, ChartGroup, KeyFigure, Notes, Section, Table
from flatshift.experiments.report.chapters import sweep_verdicts
from flatshift.experiments.report.charts import curve as curve_charts
from flatshift.experiments.report.charts.curve import Series
from flatshift.experiments.report.charts.facets import LineSeries, dynamics_charts, facet_chart
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
from flatshift.experiments.results.cells import FORECAST
from flatshift.experiments.results.run import RunResults, read_object
from flatshift.experiments.results.sweep import STEP, FailedCell, SweepData
from flatshift.experiments.statistics.intervals import t_interval
from flatshift.finetune.evaluate.metrics import find_metric

_MAX_VERDICTS, _MAX_PAIRS, _MAX_LOST = 12, 6, 8
"""At the top: verdicts in one table, values of a paired axis, and settings whose diverged seeds are counted."""
_MAX_MAP_AXES, _MAX_ROWS, _MAX_FAILURES = 4, 200, 50
"""Pairs of axes with maps, and rows in the tables of settings (points.csv has all) and of failed cells."""


def part(run: RunResults) -> ChapterPart | None:
    """Return the part for a directory of `flatshift sweep`."""
    if run.sweep is None:
        return None
    analysis = SweepAnalysis(run.sweep)
    others = [direction for direction in analysis.directions if direction.curves][1:]
    text = "; ".join(f"along {formats.axis_name(other.axis)}: {_format_verdicts(other)}" for other in others)
    findings = [sweep_finding(run.sweep, analysis), next_value_effects(run.sweep, analysis)]
    findings.append(f"{formats.capitalise(text)}." if text else "")
    return ChapterPart("sweep", findings, sweep_tiles(run.sweep, analysis), sweep_sections(run.sweep, analysis))


def forecast_part(run: RunResults) -> ChapterPart | None:
    """Return the sentences of forecast.json, if the directory has one; its curves are drawn like those of a sweep."""
    forecast = read_object(run.path / FORECAST)
    if not forecast:
        return None
    decay = "the recipe's own" if forecast.get("own_decay") else "in units of the kernel's mean eigenvalue"
    note = (
        "Everything below that looks measured is computed: the model is linearised where it starts and solved in "
        "closed form; each seed on this page is a draw of rows and of starting values, not a training run. Weight "
        f"decay is the ridge, {decay}."
    )
    return ChapterPart("forecast", forecast_sentences(forecast), sections=[Section("What this is", [Notes([note])])])


def sweep_finding(data: SweepData, analysis: SweepAnalysis) -> str:
    """Return a sentence on the lowest mean test error and the verdict along the first axis that has one."""
    axis = main_axis(data)
    test, _ = data.error_columns()
    lowest = data.best(test)
    if axis is None or lowest is None:
        return f"{data.done:,} of {data.total:,} cells are finished; there is no curve to draw yet."
    start = "Mean" if data.done == data.total else f"With {data.done:,} of {data.total:,} cells finished, mean"
    position, mean = sweep_verdicts.format_lowest(data, test), formats.with_interval(lowest[1])
    sentence = f"{start} {formats.figure_name(test)} is lowest at {position}: {mean}"
    if data.ties(test):
        sentence = f"{start} {formats.figure_name(test)}: {position}, at {mean}"
    if reasons := sweep_verdicts.missing_verdict_reasons(analysis):
        return f"{sentence}; {reasons[0]}."
    tested = [d for d in analysis.directions if d.curves]
    if tested:
        return f"{sentence}; along {formats.axis_name(tested[0].axis)}: {_format_verdicts(tested[0])}."
    return f"{sentence}."


def next_value_effects(data: SweepData, analysis: SweepAnalysis) -> str:
    """Describe what the next larger value of each axis changes at the best setting, paired by seed. Also on which side
    of the interpolation threshold that setting is."""
    test, _ = data.error_columns()
    lowest = data.best(test)
    if lowest is None or data.design == "random":
        return ""
    setting, parts = lowest[0], []
    for axis in (axis for axis in data.axes if data.numeric(axis) and setting.get(axis) is not None):
        matrix = data.matrix(test, axis, {key: value for key, value in setting.items() if key != axis})
        column = matrix.values.index(setting[axis])
        name, value = formats.axis_name(axis), formats.axis_value(setting[axis])
        if column + 1 == len(matrix.values):
            reason = "more was not tried" if data.done == data.total else "as far as cells are finished"
            parts.append(f"{name} ends at {value}, {reason}")
            continue
        change = matrix.y[:, column + 1] - matrix.y[:, column]
        change = change[np.isfinite(change)]
        if len(change):
            following = formats.axis_value(matrix.values[column + 1])
            interval = formats.with_interval(t_interval(change.tolist()))
            parts.append(f"{name} {value} → {following} changes it by {interval}")
    main = main_axis(data)
    crossing = analysis.crossing(main, {k: v for k, v in setting.items() if k != main}) if main is not None else None
    if parts and crossing and main is not None and setting[main] is not None and crossing.value is not None:
        side = "before" if (setting[main] < crossing.value) != crossing.rising else "past"
        position = f"{formats.axis_name(main)} {sweep_verdicts.format_crossing(crossing)}"
        parts.append(f"that is {side} the point where training rows become fitted ({position})")
    start = formats.setting(setting) if data.ties(test) else "there"
    return f"One more from {start}: {'; '.join(parts)}." if parts else ""


def _format_verdicts(direction: AxisAnalysis) -> str:
    """Format verdicts: `double descent` for one curve, `2 × double descent, 1 × undecided` for several."""
    kinds = Counter(j.verdict.kind for j in direction.curves)
    if len(direction.curves) == 1:
        return next(iter(kinds))
    return ", ".join(f"{n} × {kind}" for kind, n in sorted(kinds.items(), key=lambda item: (-item[1], item[0])))


def sweep_tiles(data: SweepData, analysis: SweepAnalysis) -> list[KeyFigure]:
    """Return tiles: lowest held-out error, majority baseline, interpolation threshold and progress."""
    axis = main_axis(data)
    test = data.error_columns()[0]
    tiles = []
    lowest = data.best(test)
    if axis is not None and lowest is not None:
        best = lowest[1]
        split, _, metric = test.partition(".")
        name = f"lowest {split} {find_metric(metric).title}"
        note = f"{sweep_verdicts.format_lowest(data, test)}; {best.n} run{'s' * (best.n != 1)}"
        tiles.append(KeyFigure(name, *formats.estimate_figure(best), note))
        floor = data.majority_error(test)
        if floor is not None:
            note = f"{split} error of always the commonest class"
            tiles.append(KeyFigure("majority baseline", formats.number(floor), "", note))
        crossing = analysis.crossing(axis, {}) if len(data.axes) == 1 else None
        if crossing is not None:
            note = f"{axis} at which the {data.fit_name} crosses {data.epsilon:g}"
            tiles.append(KeyFigure("interpolation threshold", sweep_verdicts.format_crossing(crossing), "", note))
    low, high = data.seeds_each()
    note = f"{low} to {high} seeds" if low < high else f"{high} seed{'s' * (high != 1)} each"
    note += f", {len(data.failed)} failed" if data.failed else ""
    tiles.append(KeyFigure("cells finished", f"{data.done:,} / {data.total:,}", "", note))
    return tiles


def sweep_sections(data: SweepData, analysis: SweepAnalysis) -> list[Section]:
    """Return all sections of a sweep, the verdicts first."""
    sections = [_overview_section(data, analysis)]
    top = _top_directions(analysis)
    sections += [_axis_section(data, direction, verdicts=direction not in top) for direction in analysis.directions]
    sections += [_random_cell_section(data) if data.design == "random" else _map_section(data)]
    axis = main_axis(data)
    if axis is not None and data.design != "random":
        charts, note = curve_charts.capacity_charts(data, axis, analysis)
        lead = (
            "The same errors over what the adapter uses instead of over what it is allowed. Where a line turns back on "
            f"itself, {axis} is more than one axis of capacity, and a peak along it may be no more than the turn.{note}"
        )
        sections += [Section("Effective parameters", [ChartGroup(charts)], lead), _memorisation_section(data, analysis)]
    sections.append(Section("Training dynamics", [ChartGroup(dynamics_charts(data))]))
    return [section for section in [*sections, *_table_sections(data)] if section.blocks]


def _overview_section(data: SweepData, analysis: SweepAnalysis) -> Section:
    curves = [curve for direction in _top_directions(analysis) for curve in direction.curves]
    tables = (sweep_verdicts.verdict_table(curves, data.epsilon, data.level), sweep_verdicts.bisection_table(data))
    notes = []
    if data.unfinished:
        note = f"{data.unfinished:,} of {data.total:,} cells have no result yet; this page shows the others"
        if data.has("seconds"):
            each = float(np.nanmean(data.column("seconds")))
            whole = formats.seconds(each * data.unfinished)
            note += f". At {formats.seconds(each)} a cell they take {whole} one by one"
        notes.append(note + ". `flatshift sweep` with the same arguments continues.")
    if data.fixed:
        fixed = ", ".join(f"{k} = {formats.axis_value(v)}" for k, v in data.fixed.items())
        notes.append(f"The same in every cell: {fixed}.")
    for coupled in data.together:  # axes of a paired design that move with the plotted one
        pairs = [f"{formats.axis_value(v)}: {formats.axis_value(own)}" for v, own in coupled.values.items()]
        listed = ", ".join(pairs[:_MAX_PAIRS]) + (", …" if len(pairs) > _MAX_PAIRS else "")
        notes.append(
            f"Paired: {coupled.axis} moves with {coupled.leader} ({listed}); what is seen may come from either."
        )
    notes += _threshold_notes(analysis)
    notes += sweep_verdicts.verdict_notes(analysis)
    notes += _failed_seed_notes(data)
    notes += [f"Cell {f.cell} failed: {f.reason}" for f in data.failed[:3]]
    if len(data.failed) > 3:
        notes.append(f"{len(data.failed) - 3:,} more cells failed; their reasons are listed at the end.")
    if len(data.versions) > 1:
        versions = ", ".join(f"{version} ({count:,} cells)" for version, count in data.versions)
        notes.append(f"Cells were made by different code: {versions}.")
    return Section("Sweep", [*tables, Notes(notes)])


def _top_directions(analysis: SweepAnalysis) -> list[AxisAnalysis]:
    """Return the directions whose verdicts are at the top: all, or only the first if there are too many verdicts."""
    directions = [direction for direction in analysis.directions if direction.curves]
    return directions if len(analysis.curves) <= _MAX_VERDICTS else directions[:1]


def _failed_seed_notes(data: SweepData) -> list[str]:
    """Count the seeds of each setting that diverged or failed otherwise: curves over the steps lose these seeds."""
    lost: dict[tuple[Any, ...], list[FailedCell]] = {}
    for failure in data.failed:
        lost.setdefault(tuple(failure.setting.items()), []).append(failure)
    notes = []
    for items, failures in list(lost.items())[:_MAX_LOST]:
        setting = dict(items)
        verb = "diverged" if all(failure.diverged for failure in failures) else "failed"
        at = f" at {formats.setting(setting)}" if setting else ""
        notes.append(f"{len(failures)} of {len(data.rows(setting))} seeds {verb}{at}.")
    if len(lost) > _MAX_LOST:
        notes.append(f"At {len(lost) - _MAX_LOST:,} more settings seeds diverged or failed.")
    return notes


def _threshold_notes(analysis: SweepAnalysis) -> list[str]:
    """Note axes that cannot show an interpolation peak: a curve must start above the threshold and end below it."""
    data, axis = analysis.data, main_axis(analysis.data)
    direction = next((d for d in analysis.directions if d.axis == axis), None)
    if direction is None:
        return []
    sides: dict[str, list[str]] = {"none": [], "all": []}
    for setting in direction.settings:
        crossing = direction.crossing_at(setting)
        if crossing is not None and crossing.fitted != "some":
            sides[crossing.fitted].append(formats.setting(setting))
    notes, fit = [], formats.capitalise(direction.table.fit_name)
    for side, names in sides.items():
        if not names:
            continue
        at = "" if len(names) == len(direction.settings) else f" ({'; '.join(names)})"
        if len(names) > _MAX_LOST and at:
            at = f" ({len(names)} of {len(direction.settings)} settings)"
        notes.append(
            f"{fit} stays above {data.epsilon:g}: nothing interpolates, so this axis shows no peak there{at}."
            if side == "none"
            else f"{fit} is at most {data.epsilon:g} from the smallest {axis} on: every value interpolates, so "
            f"this axis cannot show an interpolation peak; take more rows, more label noise or fewer steps{at}."
        )
    return notes


def _axis_section(data: SweepData, direction: AxisAnalysis, *, verdicts: bool) -> Section:
    """Build the charts of error and loss along one axis. verdicts: add their table as well."""
    axis, table = direction.axis, direction.table
    title, charts = f"{direction.kind}: along {formats.axis_name(axis)}", ChartGroup(_axis_charts(data, direction))
    if not charts:
        return Section(title, [])
    comparison, notes = sweep_verdicts.regularizer_table(direction)
    tables = (
        sweep_verdicts.verdict_table(direction.curves, data.epsilon, data.level) if verdicts else None,
        sweep_verdicts.emc_table(direction) if axis.endswith("limit") else None,
        comparison,
    )
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
    return Section(title, [charts, *tables, Notes(notes)])


def _axis_charts(data: SweepData, direction: AxisAnalysis) -> list[Chart | None]:
    axis, table = direction.axis, direction.table
    main = data.error_columns()[0].partition(".")[2]
    kinds = [kind for kind in dict.fromkeys((main, "error", "loss")) if curve_charts.train_test_series(table, kind)]
    charts: list[Chart | None] = []
    for kind in kinds:
        lines = curve_charts.train_test_series(table, kind)
        unit = curve_charts.metric_unit(table, kind)
        names = " and ".join(line.name for line in lines).capitalize()
        title = f"{names} {find_metric(kind).title} along {formats.axis_name(axis)}"
        name = f"sweep-{axis.rpartition('.')[2].replace('_', '-')}-{kind}"
        if len(direction.drawn) > 1 and (kind != kinds[0] or not is_capacity_axis(axis)):
            charts.append(_faceted_chart(direction, lines, name, title, unit))
            continue
        # One y range for all settings, so that their charts are comparable.
        curves = [table.curve(line.column, axis, setting) for line in lines for setting in direction.drawn]
        trained = [[(v, p) for v, p in curve if not (axis == STEP and v == 0)] for curve in curves]
        trained = [curve for curve in trained if curve]
        limits = curve_charts.y_limits(trained, zero=kind == "error") if trained else None
        for number, setting in enumerate(direction.drawn):
            chart = curve_charts.curve_chart(
                table, axis, setting, lines, name=f"{name}-{number}", title=title, unit=unit,
                limits=limits, analysed=direction.curve_at(setting) if kind == kinds[0] else None,
                crossing=direction.crossing_at(setting), epsilon=data.epsilon,
                wide=len(direction.drawn) == 1 and len(kinds) == 1,
            )  # fmt: skip
            charts.append(chart)
    return charts


def _faceted_chart(direction: AxisAnalysis, lines: Sequence[Series], name: str, title: str, y: str) -> Chart | None:
    panels = []
    for setting in direction.drawn:
        curves = [direction.table.curve(line.column, direction.axis, setting) for line in lines]
        series = [LineSeries(line.name, line.token, curve) for line, curve in zip(lines, curves, strict=True)]
        panels.append((formats.setting(setting), series))
    return facet_chart(
        panels, direction.axis, columns=3 if len(panels) > 4 else 2, y=y, name=name, title=title,
        caption="Means over seeds; bands: 95 % t-intervals.", linear=True,
    )  # fmt: skip


def _random_cell_section(data: SweepData) -> Section:
    kind = data.error_columns()[0].partition(".")[2]
    lines, unit = curve_charts.train_test_series(data, kind), curve_charts.metric_unit(data, kind)
    charts = [
        curve_charts.scatter_chart(data, axis, lines, name=f"sweep-cells-{number}", unit=unit)
        for number, axis in enumerate(a for a in data.axes if data.numeric(a))
    ]
    return Section("Cells", [ChartGroup(charts)])


def _map_section(data: SweepData) -> Section:
    """Draw rank × steps from the trace, then every pair of numeric axes; word axes only if there are just two axes."""
    charts: list[Chart] = []
    note = ""
    axis, columns, epsilon = main_axis(data), data.error_columns(), data.epsilon
    if data.trace is not None and axis is not None and len(data.levels(axis)) > 1:
        settings = data.trace.settings([other for other in data.axes if other != axis])
        drawn = sample_settings(data.trace, settings, PANELS)
        note = undrawn_note(drawn, settings)
        for number, setting in enumerate(drawn):
            name = f"sweep-map-steps-{number}"
            charts += heat_maps(data.trace, STEP, axis, setting, columns, name=name, epsilon=epsilon)
    pairs = list(itertools.combinations(data.axes, 2))
    pairs = [(x, y) for x, y in pairs if len(data.axes) == 2 or (data.numeric(x) and data.numeric(y))]
    for x, y in pairs[:_MAX_MAP_AXES]:
        if y == axis or not data.numeric(x):
            x, y = y, x
        settings = data.settings([other for other in data.axes if other not in (x, y)])
        names = "-".join(a.rpartition(".")[2].replace("_", "-") for a in (x, y))
        for number, setting in enumerate(sample_settings(data, settings, 1 if len(pairs) > 1 else PANELS)):
            charts += heat_maps(data, x, y, setting, columns, name=f"sweep-map-{names}-{number}", epsilon=epsilon)
    lead = f"The line is the interpolation threshold, where the mean {data.fit_name} is {epsilon:g}.{note}"
    return Section("Maps", [ChartGroup(charts)], lead)


def _memorisation_section(data: SweepData, analysis: SweepAnalysis) -> Section:
    """Draw train error on clean and on noisy labels: learning compared with memorisation."""
    series = [
        Series("train.error_clean", "blue", "clean"),
        Series("train.error_noisy", "orange", "noisy"),
        Series("train.memorised", "purple", "memorised"),
        Series("train.recovered", "green", "recovered"),
    ]
    charts = []
    for direction in analysis.directions:
        lines = [line for line in series if direction.table.has(line.column)]
        name = f"sweep-memorised-{direction.axis.rpartition('.')[2]}"
        title = f"Clean and noisy labels along {formats.axis_name(direction.axis)}"
        unit = "share of the clean or of the noisy rows"
        if lines and len(direction.drawn) > 1:
            charts.append(_faceted_chart(direction, lines, name, title, unit))
        elif lines:
            (setting,) = direction.drawn
            curve, crossing = (direction.table, direction.axis, setting, lines), direction.crossing_at(setting)
            charts.append(
                curve_charts.curve_chart(
                    *curve, name=name, title=title, unit=unit, crossing=crossing, epsilon=data.epsilon
                )
            )
    lead = (
        "Errors against the label that was trained on, on rows with clean and with noisy labels. Memorised: noisy rows "
        "predicted as their wrong label; recovered: predicted as their true one."
    )
    return Section("Memorised labels", [ChartGroup(charts)], lead)


def _table_sections(data: SweepData) -> list[Section]:
    """Tabulate all settings, failed cells, and the code versions that produced them."""
    sections = []
    candidates = dict.fromkeys([*data.error_columns(), f"{data.held_out_split('loss')}.loss", "train.loss"])
    columns = [column for column in candidates if data.has(column)]
    if data.axes and columns:
        means = [{tuple(s.values()): mean for s, mean in data.means(column)} for column in columns]
        settings = data.settings()
        rows = []
        for setting in settings[:_MAX_ROWS]:
            points = [by_setting.get(tuple(setting.values())) for by_setting in means]
            runs = str(max((point.n for point in points if point), default=0))
            values = map(formats.axis_value, data.whole(setting).values())
            rows.append([*values, *map(formats.with_interval, points), runs])
        keys = [*data.axes, *(coupled.axis for coupled in data.together)]
        names = [*keys, *map(formats.figure_name, columns), "runs"]
        caption = "Mean over seeds with its 95 % t-interval."
        if len(settings) > _MAX_ROWS:
            caption += f" The first {_MAX_ROWS} of {len(settings):,} settings; cells.parquet has all cells."
        numeric = frozenset(range(len(keys), len(names)))
        sections.append(Section("All settings", [Table(names, rows, caption, numeric)], folded=len(rows) > 24))
    if data.failed:
        rows = [[f.cell, formats.setting(f.setting), str(f.seed), f.reason] for f in data.failed[:_MAX_FAILURES]]
        more = f"; the first {_MAX_FAILURES} are listed, cells.parquet has all" if len(data.failed) > len(rows) else ""
        table = Table(["cell", "setting", "seed", "reason"], rows, f"{len(data.failed):,} cells failed{more}.")
        sections.append(Section("Failed cells", [table], folded=True))
    contents = {
        "cells.parquet": "one row per cell",
        "points.csv": "the same, for spreadsheets",
        "curves.parquet": "one row per cell and recorded step",
    }
    rows = [["flatshift " + version, f"{count:,}"] for version, count in data.versions]
    code = Table(["made by", "cells"], rows, numeric=frozenset({1})) if rows else None
    notes = Notes([f"{name} next to this page: {contents[name]}." for name in data.files])
    return [*sections, Section("Code and tables", [code, notes], folded=True)]


def forecast_sentences(forecast: Mapping[str, Any]) -> list[str]:
    """Return the forecast as sentences."""
    metric, n = forecast["metric"], forecast["rows"][-1]

    def format_value(value: float) -> str:
        return f"{100 * value:.1f} %" if metric == "error" else f"{value:.3g}"

    own = forecast.get("own_decay")  # solved with this ridge only, so not to the end
    ridge = "the recipe's weight decay" if own else "the best ridge"
    scale = f"{own:g}" if own else f"{forecast['best_decay']:g} of the kernel's mean eigenvalue"
    end = "" if own else f", {format_value(forecast['end'])} trained to the end"
    sentences = [
        f"Predicted, nothing was trained: test {metric} {format_value(forecast['best'])} with {n:,} rows at rank "
        f"{forecast['rank']} and {ridge} ({scale}){end}; leave-one-out on the training rows says "
        f"{format_value(forecast['left_out'])}."
    ]
    more = forecast["more"]
    if more is not None and more["low"] is not None:
        points, unit = (100, " points") if metric == "error" else (1, "")
        sentences.append(
            f"{forecast['more_rows']:,} more labels: {points * more['value']:+.2g}{unit} (80 % interval "
            f"{points * more['low']:+.2g} to {points * more['high']:+.2g}, over {forecast['draws']} draws)."
        )
    sentences.append(f"The fit uses {forecast['effective']:.0f} effective parameters at that ridge.")
    if not own and forecast["threshold_rank"] is not None:
        sentences.append(
            f"Training labels can just be fitted at rank {forecast['threshold_rank']:.3g}: expect a peak there."
        )
    elif not own and forecast["threshold_note"]:
        sentences.append(f"No peak can show along rank: {forecast['threshold_note']}.")
    if len(forecast["ranks"]) > 1:
        sentences.append(
            f"Take rank {forecast['best_rank']}: of those with the lowest predicted {metric} at {ridge}, as far "
            "as the draws can tell, the one that trains soonest."
        )
    sentences.append(
        "It holds as far as training stays near its start: compare it with one run of the recipe before relying on it."
    )
    return sentences
