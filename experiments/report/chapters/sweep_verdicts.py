"""Verdicts of a sweep as a table, caveats about them, and the effective model complexity."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from flatshift.experiments.report import formats
from flatshift.experiments.report.blocks import Table
from flatshift.experiments.results.analysis import AnalysedCurve, AxisAnalysis, SweepAnalysis, compare_settings
from flatshift.experiments.results.sweep import SweepData
from flatshift.experiments.statistics.curve import Curve
from flatshift.experiments.statistics.curve_comparison import CurveComparison
from flatshift.experiments.statistics.emc import Crossing, emc_from_curve
from flatshift.experiments.statistics.peak import FEWEST_POINTS, FEWEST_SEEDS, PeakTest
from flatshift.finetune.errors import UserError


def verdict_table(judged: Sequence[AnalysedCurve], epsilon: float) -> Table | None:
    """Build one row per curve with a verdict; None without any."""
    if not judged:
        return None
    rows = [_verdict_row(j) for j in judged]
    table = Table(
        [
            "along", "setting", "verdict", "peak test p", "peak at", "height", "found with 80 % power", "threshold",
            "training loss p",
        ],
        rows,
        numeric=frozenset({3, 5, 6, 7, 8}),
    ).shown()  # fmt: skip
    of_columns = {
        "height": "Height: above the higher flank, with its 95 % interval, in the units of the curve; no peak was "
        "found where none is given.",
        "found with 80 % power": "Found with 80 % power: at the inner point where runs scatter most.",
        "threshold": f"Threshold: where the mean train error crosses {epsilon:g}, between points.",
        "training loss p": "Training loss p: of a peak of the training loss, which is no double descent.",
    }
    caption = (
        "One verdict per curve of the mean held-out figure; curves of more than 10 points are evaluated at 10 of them, "
        "evenly spread on a log axis."
    )
    return _with_caption(table, of_columns, caption)


def _verdict_row(judged: AnalysedCurve) -> list[str]:
    peak, train = judged.verdict.peak, judged.verdict.train_peak
    row = [judged.axis.rpartition(".")[2], formats.setting(judged.setting) or "–", judged.verdict.kind]
    row += _peak_cells(peak, judged) if peak is not None else ["–"] * 4
    return [*row, format_crossing(judged.verdict.crossing), "–" if train is None else _format_p(train)]


def format_crossing(found: Crossing | None) -> str:
    """Format the threshold: the point where the mean train error crosses it, or on which side every point is."""
    if found is None:
        return "–"
    if found.value is None:
        return {"all": "all points fitted", "none": "no point fitted"}.get(found.fitted, "–")
    return formats.number(float(found.value))


def _format_p(test: PeakTest) -> str:
    return f"{test.p_value:.2g}" if test.p_value >= 1e-4 else "< 0.0001"


def _peak_cells(peak: PeakTest, judged: AnalysedCurve) -> list[str]:
    p = _format_p(peak)
    if not peak.rejected:
        return [p, "–", "–", formats.number(peak.detectable.height, 2)]
    low, high = peak.height.low, peak.height.high
    shown, interval = formats.estimate(peak.height.estimate, low, high if math.isfinite(high) else None)
    at = ", ".join(_format_position(v) for v in judged.location)
    return [p, at, f"{shown} ({interval})" if interval else shown, formats.number(peak.detectable.height, 2)]


def _format_position(value: float) -> str:
    return formats.axis_value(int(value) if float(value).is_integer() else float(value))


def regularizer_table(direction: AxisAnalysis) -> tuple[Table | None, list[str]]:
    """Compare every regularizer setting with the first value of its axis, on the same seeds.

    Returns a table and sentences: for drawn settings, and for any with a peak or a moved threshold. The reference is
    the unregularized value if there is one (`plain`, or a strength of 0). The table is None if no pair has enough
    seeds; both are empty without such an axis.
    """
    rows, said, drawn = [], [], direction.drawn
    for axis in (a for a in direction.table.axes if a == "regularizer" or a.startswith("regularizer.")):
        levels = direction.table.values(axis)
        base = "plain" if "plain" in levels else levels[0]
        for where in direction.settings:
            if where.get(axis, base) == base:
                continue
            try:
                curve, found = compare_settings(
                    direction.table, direction.axis, where, {**where, axis: base}, test=direction.test,
                    epsilon=direction.data.epsilon,
                )  # fmt: skip
            except UserError as error:  # one of the two lacks seeds or values
                if where in drawn:
                    said.append(f"{formats.setting(where)} vs. {formats.axis_value(base)}: cannot be said, {error}.")
                continue
            rows.append([formats.setting(where), formats.axis_value(base), *_comparison_cells(curve, found)])
            if where in drawn or found.peak is not None or found.moved:
                said.append(f"{formats.setting(where)} vs. {formats.axis_value(base)}: {found.sentence(curve)}")
    if not rows:
        return None, said
    table = Table(
        ["setting", "vs.", "mean difference", "p", "peak at", "peak's height, difference", "p", "threshold ÷"],
        rows,
        numeric=frozenset({2, 3, 5, 6, 7}),
    ).shown()
    of_columns = {
        "mean difference": f"{direction.test.replace('.', ' ').replace('_', ' ')} minus the other's, on the same "
        "seeds, with 95 % intervals.",
        "peak at": "Peak: the one that the peak test finds in the mean of both curves; its height is taken above the "
        "mean of its flanks, so that neither curve chose the place.",
        "threshold ÷": f"Threshold: where the train error crosses {direction.data.epsilon:g}, as a ratio of positions.",
        "p": "No p is corrected for the number of rows.",
    }
    return _with_caption(table, of_columns), said


def _with_caption(table: Table, of_columns: Mapping[str, str], first: str = "") -> Table:
    """Return the table with a caption that explains only the columns it has."""
    told = [sentence for column, sentence in of_columns.items() if column in table.columns]
    return dataclasses.replace(table, caption=" ".join(filter(None, [first, *told])))


def _comparison_cells(curve: Curve, found: CurveComparison) -> list[str]:
    at = "–" if found.triple is None else _format_position(curve.values[found.triple[1]])
    p, peak_p = ("–" if value is None else f"{value:.2g}" for value in (found.p, found.peak_p))
    mean, peak = (formats.with_interval(interval, plus=True) for interval in (found.mean, found.peak))
    return [mean, p, at, peak, peak_p, formats.with_interval(found.threshold)]


def verdict_shortfall(direction: AxisAnalysis) -> str:
    """Explain what is missing for a verdict along the axis and what the runs show anyway; empty if nothing is missing.

    `a verdict along rank r needs 5 seeds, but rank = 16 is lower than rank = 1 by 0.26, in each of 2 seeds`: compares
    the value with the lowest mean with the first value of the axis, or with the last if the first is the lowest.
    """
    tests = [judged.verdict.peak for judged in direction.judged]
    if any(test is not None for test in tests) or not (tests or direction.refused):
        return ""
    found = [direction.table.matrix(direction.test, direction.axis, where) for where in direction.settings]
    found = [one for one in found if len(one.values) > 1 and np.isfinite(one.y).any(axis=0).all()]
    if not found:
        return ""
    most = max(int(np.isfinite(one.y).all(axis=1).sum()) for one in found)
    lacks = [f"{FEWEST_SEEDS} seeds"] if most < FEWEST_SEEDS else []
    lacks += [f"{FEWEST_POINTS} values"] if max(len(one.values) for one in found) < FEWEST_POINTS else []
    if not lacks:
        return ""
    shown = min(found, key=lambda one: float(np.nanmean(one.y, axis=0).min()))
    values, best = shown.values, int(np.nanmean(shown.y, axis=0).argmin())
    other = 0 if best else len(values) - 1
    apart, name = shown.y[:, other] - shown.y[:, best], direction.axis.rpartition(".")[2]
    apart = apart[np.isfinite(apart)]
    if not len(apart) or apart.mean() <= 0:
        return f"a verdict along {formats.axis_name(direction.axis)} needs {' and '.join(lacks)}"
    low, high = (f"{name} = {formats.axis_value(values[place])}" for place in (best, other))
    unit = " nats" if direction.test.endswith("loss") else ""
    each = "in each of" if (apart > 0).all() else "in the mean of"
    how = f"{each} {len(apart)} seeds" if len(apart) > 1 else "in one seed"
    return (
        f"a verdict along {formats.axis_name(direction.axis)} needs {' and '.join(lacks)}, but {low} is lower than "
        f"{high} by {formats.number(float(apart.mean()), 2)}{unit}, {how}"
    )


def verdict_notes(analysis: SweepAnalysis) -> list[str]:
    """Note how many verdicts were tested, and how many would be positive by chance."""
    judged = analysis.judged
    if not judged:
        reasons = list(dict.fromkeys(r for d in analysis.directions for r in d.refused))
        return [f"No verdict: {reasons[0]}."] if reasons else []
    tested = [j.verdict.peak for j in judged if j.verdict.peak is not None]
    notes = []
    if len(tested) > 1:
        level = tested[0].level
        notes.append(
            f"{len(judged)} verdicts were asked, {len(tested)} with a peak test at {level:.0%}: if no curve had a "
            f"peak, about {level * len(tested):.1g} would show one by chance. Nothing is corrected for their number."
        )
    cut = sum(d.total - len(d.settings) for d in analysis.directions if d.judged)
    if cut:
        notes.append(f"{cut:,} more curves were not evaluated; only those drawn are.")
    return notes


def emc_table(direction: AxisAnalysis) -> Table | None:
    """Tabulate each setting's effective model complexity from its sample-wise curve; None without one."""
    if not direction.table.has("train.error"):
        return None
    rows = []
    for where in direction.settings:
        found = direction.table.matrix("train.error", direction.axis, where)
        try:  # a diverged run fits nothing, as in a bisection
            emc = emc_from_curve(found.values, np.where(found.diverged, 1.0, found.y), direction.data.epsilon)
        except UserError:  # too few sizes, or no seed that finished at all of them
            continue
        said = _format_complexity(emc.value, emc.low, emc.high, emc.side, (emc.points[0][0], emc.points[-1][0]))
        rows.append([formats.setting(where) or "all cells", said, str(len(found.seeds))])
    if not rows:
        return None
    return Table(
        ["setting", "effective model complexity (training examples)", "seeds"],
        rows,
        "Effective model complexity: the most training examples that are still fitted to a mean train error of "
        f"{direction.data.epsilon:g}, with its 95 % interval over seeds, from the sample-wise curve.",
        frozenset({2}),
    )


def bisection_table(data: SweepData) -> Table | None:
    """Tabulate the effective model complexity found by bisection, per point; None without a bisection."""
    if not data.searched:
        return None
    rows = []
    for p in data.searched:
        tried = [t["rows"] for t in p["tried"]]
        said = _format_complexity(p["emc"], p["low"], p["high"], p["side"], (tried[0], tried[-1]))
        rows.append([formats.setting(p["point"]) or "the recipe", said, ", ".join(f"{n:,}" for n in tried)])
    return Table(
        ["setting", "effective model complexity (training examples)", "sizes tried"],
        rows,
        "Effective model complexity by bisection: the most training examples that are still fitted to a mean train "
        f"error of {data.epsilon:g}, with its 95 % interval over seeds; from emc.json.",
    )


def _format_complexity(
    value: float | None, low: float | None, high: float | None, side: str, tried: tuple[float, float]
) -> str:
    """Format as `464 (411 to 518)`; open sides end at the fewest and the most rows that were tried."""
    first, last = (f"{round(n):,}" for n in tried)
    if side == "before":
        return f"below {first}"
    if value is None:
        return f"at least {last}"
    ends = [
        f"below {first}" if low is None else f"{round(low):,}",
        f"above {last}" if high is None else f"{round(high):,}",
    ]
    return f"{round(value):,} ({ends[0]} to {ends[1]})"
