"""Verdicts of a sweep as a table, caveats about them, and the effective model complexity."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from flatshift.experiments.report import formats
from flatshift.experiments.report.blocks import Table
from flatshift.experiments.results.analysis import AnalysedCurve, AxisAnalysis, SweepAnalysis, compare_settings
from flatshift.experiments.results.sweep import SweepData
from flatshift.experiments.statistics.curve import percents
from flatshift.experiments.statistics.emc import Crossing, emc_from_curve, format_complexity
from flatshift.experiments.statistics.peak import FEWEST_POINTS, FEWEST_SEEDS, PeakTest
from flatshift.finetune.errors import UserError


def verdict_table(curves: Sequence[AnalysedCurve], epsilon: float, level: float) -> Table | None:
    """Build one row per curve with a verdict; None without any."""
    if not curves:
        return None
    columns = ["along", "setting", "verdict", "peak test p", "peak at", "height", "found with 80 % power"]
    columns += ["threshold", "training loss p"]
    table = Table(columns, [_verdict_row(curve) for curve in curves], numeric=frozenset({3, 5, 6, 7, 8}))
    explanations = {
        "height": f"Height: above the higher flank, with its {percents(level)[1]} % interval, in the units of the "
        "curve; no peak was found where none is given.",
        "found with 80 % power": "Found with 80 % power: at the inner point where runs scatter most.",
        "threshold": f"Threshold: where the mean {curves[0].curve.fit} crosses {epsilon:g}, between points.",
        "training loss p": "Training loss p: of a peak of the training loss, which is no double descent.",
    }
    caption = (
        "One verdict per curve of the mean held-out figure; curves of more than 10 points are evaluated at 10 of them, "
        "evenly spread on a log axis."
    )
    return _with_caption(table, explanations, caption)


def _verdict_row(curve: AnalysedCurve) -> list[str]:
    peak, train = curve.verdict.peak, curve.verdict.train_peak
    row = [curve.axis.rpartition(".")[2], formats.setting(curve.setting) or "–", curve.verdict.kind]
    location = height = "–"
    if peak is not None and peak.rejected:
        location = ", ".join(_format_position(v) for v in curve.location)
        height = formats.with_interval(dataclasses.asdict(peak.height) | {"value": peak.height.estimate})
    detectable = "–" if peak is None else formats.number(peak.detectable.height, 2)
    row += ["–" if peak is None else _format_p(peak), location, height, detectable]
    return [*row, format_crossing(curve.verdict.crossing), "–" if train is None else _format_p(train)]


def format_crossing(crossing: Crossing | None) -> str:
    """Format the threshold: the point where the mean train error crosses it, or on which side every point is."""
    if crossing is None:
        return "–"
    if crossing.value is None:
        return {"all": "all points fitted", "none": "no point fitted"}.get(crossing.fitted, "–")
    return formats.number(float(crossing.value))


def _format_p(test: PeakTest) -> str:
    return f"{test.p_value:.2g}" if test.p_value >= 1e-4 else "< 0.0001"


def _format_position(value: float) -> str:
    return formats.axis_value(int(value) if float(value).is_integer() else float(value))


def regularizer_table(direction: AxisAnalysis) -> tuple[Table | None, list[str]]:
    """Compare every regularizer setting with the first value of its axis, on the same seeds.

    Returns a table and sentences: for drawn settings, and for any with a peak or a moved threshold. The reference is
    the unregularized value if there is one (`plain`, or a strength of 0). The table is None if no pair has enough
    seeds; both are empty without such an axis.
    """
    rows, sentences, epsilon, level = [], [], direction.data.epsilon, direction.data.level
    for axis in (a for a in direction.table.axes if a == "regularizer" or a.startswith("regularizer.")):
        levels = direction.table.values(axis)
        base = "plain" if "plain" in levels else levels[0]
        for setting in direction.settings:
            if setting.get(axis, base) == base:
                continue
            names, pair = [formats.setting(setting), formats.axis_value(base)], (setting, {**setting, axis: base})
            drawn = setting in direction.drawn
            try:
                curve, comparison = compare_settings(
                    direction.table, direction.axis, *pair, test=direction.test, epsilon=epsilon, level=level
                )
            except UserError as error:  # one of the two lacks seeds or values
                if drawn:
                    sentences.append(f"{' vs. '.join(names)}: cannot be said, {error}.")
                continue
            at = "–" if comparison.triple is None else _format_position(curve.values[comparison.triple[1]])
            p, peak_p = ("–" if value is None else f"{value:.2g}" for value in (comparison.p, comparison.peak_p))
            mean, peak = (formats.with_interval(each, plus=True) for each in (comparison.mean, comparison.peak))
            rows.append([*names, mean, p, at, peak, peak_p, formats.with_interval(comparison.threshold)])
            if drawn or comparison.peak is not None or comparison.moved:
                sentences.append(f"{' vs. '.join(names)}: {comparison.sentence(curve)}")
    if not rows:
        return None, sentences
    columns = ["setting", "vs.", "mean difference", "p", "peak at", "peak's height, difference", "p", "threshold ÷"]
    table = Table(columns, rows, numeric=frozenset({2, 3, 5, 6, 7}))
    explanations = {
        "mean difference": f"{direction.test.replace('.', ' ').replace('_', ' ')} minus the other's, on the same "
        f"seeds, with {percents(level)[1]} % intervals.",
        "peak at": "Peak: the one that the peak test finds in the mean of both curves; its height is taken above the "
        "mean of its flanks, so that neither curve chose the place.",
        "threshold ÷": f"Threshold: where the {curve.fit} crosses {epsilon:g}, as a ratio of positions.",
        "p": "No p is corrected for the number of rows.",
    }
    return _with_caption(table, explanations), sentences


def _with_caption(table: Table, explanations: Mapping[str, str], start: str = "") -> Table:
    """Return the table without empty columns, and a caption that explains those it has."""
    table = table.without_empty_columns()
    sentences = [sentence for column, sentence in explanations.items() if column in table.columns]
    return dataclasses.replace(table, caption=" ".join(filter(None, [start, *sentences])))


def verdict_shortfall(direction: AxisAnalysis) -> str:
    """Explain what is missing for a verdict along the axis and what the runs show anyway; empty if nothing is missing.

    `a verdict along rank r needs 5 seeds, but rank = 16 is lower than rank = 1 by 0.26, in each of 2 seeds`: compares
    the value with the lowest mean with the first value of the axis, or with the last if the first is the lowest.
    """
    tests = [curve.verdict.peak for curve in direction.curves]
    if any(test is not None for test in tests) or not (tests or direction.refused):
        return ""
    matrices = [direction.table.matrix(direction.test, direction.axis, setting) for setting in direction.settings]
    matrices = [m for m in matrices if len(m.values) > 1 and np.isfinite(m.y).any(axis=0).all()]
    if not matrices:
        return ""
    seeds = max(int(np.isfinite(m.y).all(axis=1).sum()) for m in matrices)
    missing = [f"{FEWEST_SEEDS} seeds"] if seeds < FEWEST_SEEDS else []
    missing += [f"{FEWEST_POINTS} values"] if max(len(m.values) for m in matrices) < FEWEST_POINTS else []
    if not missing:
        return ""
    need = f"a verdict along {formats.axis_name(direction.axis)} needs {' and '.join(missing)}"
    lowest = min(matrices, key=lambda m: float(np.nanmean(m.y, axis=0).min()))
    best = int(np.nanmean(lowest.y, axis=0).argmin())
    reference = 0 if best else len(lowest.values) - 1
    differences = lowest.y[:, reference] - lowest.y[:, best]
    differences = differences[np.isfinite(differences)]
    if not len(differences) or not (differences > 0).all():
        return need
    name = direction.axis.rpartition(".")[2]
    low, high = (f"{name} = {formats.axis_value(lowest.values[j])}" for j in (best, reference))
    unit = f" {direction.table.loss_unit.partition(',')[0]}" if direction.test.endswith("loss") else ""
    basis = f"in each of {len(differences)} seeds" if len(differences) > 1 else "in one seed"
    return f"{need}, but {low} is lower than {high} by {formats.number(float(differences.mean()), 2)}{unit}, {basis}"


def missing_verdict_reasons(analysis: SweepAnalysis) -> list[str]:
    """Explain why no curve has a verdict by the peak test: what is missing along each axis, else why curves could not
    be tested; empty if one has."""
    if any(curve.verdict.peak is not None for curve in analysis.curves):
        return []
    directions = analysis.directions
    shortfalls = [text for direction in directions if (text := verdict_shortfall(direction))]
    return shortfalls or [reason for direction in directions for reason in direction.refused]


def format_lowest(data: SweepData, column: str) -> str:
    """Format the setting with the lowest mean of `column`, and those that tie with it: `rank = 1`, or `rank = 1 ties
    with rank = 2, rank = 4 and 3 more`."""
    best = data.best(column)
    if best is None:
        return ""
    first, *ties = (formats.setting(data.whole(setting)) for setting in (best[0], *data.ties(column)))
    if not ties:
        return first
    more = f" and {len(ties) - _MAX_TIES:,} more" if len(ties) > _MAX_TIES else ""
    return f"{first} ties with {', '.join(ties[:_MAX_TIES])}{more}"


def verdict_notes(analysis: SweepAnalysis) -> list[str]:
    """Note how many verdicts were tested, and how many would be positive by chance."""
    curves = analysis.curves
    if not curves:
        return [f"No verdict: {reason}." for reason in missing_verdict_reasons(analysis)[:1]]
    tested = [curve.verdict.peak for curve in curves if curve.verdict.peak is not None]
    notes = []
    if len(tested) > 1:
        level = tested[0].level
        notes.append(
            f"{len(curves)} verdicts were asked, {len(tested)} with a peak test at {percents(level)[0]}%: if no curve "
            f"had a peak, about {level * len(tested):.1g} would show one by chance. Nothing is corrected for their "
            "number."
        )
    count = sum(d.total - len(d.settings) for d in analysis.directions if d.curves)
    if count:
        notes.append(f"{count:,} more curves were not evaluated; only those drawn are.")
    return notes


_COMPLEXITY, _MAX_TIES = "effective model complexity (training examples)", 3


def emc_table(direction: AxisAnalysis) -> Table | None:
    """Tabulate each setting's effective model complexity from its sample-wise curve; None without one."""
    table, rows = direction.table, []
    if not table.has(table.fitted_column):
        return None
    for setting in direction.settings:
        matrix = table.matrix(table.fitted_column, direction.axis, setting)
        try:  # a diverged run fits nothing, as in a bisection
            errors = np.where(matrix.diverged, 1.0, matrix.y)
            emc = emc_from_curve(matrix.values, errors, direction.data.epsilon)
        except UserError:  # too few sizes, or no seed that finished at all of them
            continue
        text = format_complexity(emc.value, emc.low, emc.high, emc.side, (emc.points[0][0], emc.points[-1][0]))
        rows.append([formats.setting(setting) or "all cells", text, str(int(np.isfinite(errors).all(axis=1).sum()))])
    if not rows:
        return None
    caption = (
        f"Effective model complexity: the most training examples that are still fitted to a mean {table.fit_name} of "
        f"{direction.data.epsilon:g}, with its 95 % interval over seeds, from the sample-wise curve."
    )
    return Table(["setting", _COMPLEXITY, "seeds"], rows, caption, frozenset({2}))


def bisection_table(data: SweepData) -> Table | None:
    """Tabulate the effective model complexity found by bisection, per point; None without a bisection."""
    if not data.searched:
        return None
    rows = []
    for p in data.searched:
        tried = [t["rows"] for t in p["tried"]]
        text = format_complexity(p["emc"], p["low"], p["high"], p["side"], (tried[0], tried[-1]))
        rows.append([formats.setting(p["point"]) or "the recipe", text, ", ".join(f"{n:,}" for n in tried)])
    caption = (
        "Effective model complexity by bisection: the most training examples that are still fitted to a mean "
        f"{data.fit_name} of {data.epsilon:g}, with its 95 % interval over seeds; from emc.json."
    )
    return Table(["setting", _COMPLEXITY, "sizes tried"], rows, caption)
