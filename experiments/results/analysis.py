"""Analysis of a sweep: curves along its axes, settings at which the other axes are held, and verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from flatshift.experiments.results.sweep import GRADIENT, SHARPNESS, STEP, SweepData
from flatshift.experiments.results.table import SweepTable
from flatshift.experiments.statistics.curve import Curve
from flatshift.experiments.statistics.curve_comparison import CurveComparison, compare_curves
from flatshift.experiments.statistics.emc import Crossing, find_crossing
from flatshift.experiments.statistics.peak import FEWEST_POINTS, FEWEST_SEEDS, thin
from flatshift.experiments.statistics.verdict import CurveVerdict, determine_verdict
from flatshift.finetune.errors import UserError

_SHORT = {"data.train.limit": "training rows", "train.steps": "steps"}
_CAPACITY = ("adapter.rank", "adapter.alpha", "train.steps", "step", "data.train.limit")


@dataclass(frozen=True)
class AnalysedCurve:
    """Curve of a sweep along `axis`, at `setting` of the other axes, with its verdict."""

    axis: str
    setting: Mapping[str, Any]
    curve: Curve
    verdict: CurveVerdict

    @property
    def evidence(self) -> tuple[str, ...]:
        """Return the reasons for the verdict as sentences, and the smallest peak the data could have shown."""
        peak, sentences = self.verdict.peak, list(self.verdict.evidence)
        if peak is not None and peak.rejected and not self.curve.training:
            sentences.append(
                f"With {peak.seeds} seeds and {len(peak.points)} points a peak of {peak.detectable.height:.2g} is "
                f"found with a power of 80 % at {self.curve.at(peak.detectable.point)}, where runs scatter most."
            )
        if self.axis == "step":
            steps = ", ".join(f"{value:g}" for value in self.curve.values)
            sentences.append(f"Evaluated at steps {steps}: what rises and falls again between two of them is not seen.")
        return tuple(sentences)

    @property
    def location(self) -> tuple[Any, ...]:
        """Return the axis values that may hold the peak at the test's level; empty if there is none."""
        peak = self.verdict.peak
        return tuple(self.curve.values[i] for i in peak.location) if peak is not None else ()


def is_capacity_axis(axis: str) -> bool:
    """Return True for axes along which the fit of the training data grows or shrinks.

    A peak over a learning rate or a share of noise is not double descent, whatever its shape.
    """
    return axis in _CAPACITY


def build_curve(
    table: SweepTable, axis: str, setting: Mapping[str, Any], *, test: str, epsilon: float, planned: int | None = None
) -> Curve:
    """Return the curve of the column `test` along a numeric axis, other axes held at `setting`.

    Seeds count if they have a cell at every value, finished or failed (a failed one is NaN: the seed diverged there).
    Values that were not measured are left out, and so is step 0 of a trace, before any training. Longer curves are
    thinned by `thin`, which does not look at them. A curve is returned even with too few seeds for a verdict. planned:
    number of seeds in the plan, if cells are still missing.

    Raises UserError naming what is missing, if there are too few values for the peak test or no seed has all.
    """
    if not table.numeric(axis):
        raise UserError(f"{axis} has no order; a peak needs numbers")
    matrix = table.matrix(test, axis, setting)
    after = np.array([not (axis == "step" and v == 0) for v in matrix.values], dtype=bool)
    measured, lost = np.isfinite(matrix.y).any(axis=0) & after, matrix.lost.any(axis=0) & after
    keep = np.flatnonzero(measured | lost).tolist()
    if len(keep) < FEWEST_POINTS or not measured.any():
        reason = ""
        if lost.any():
            reason = f"{matrix.lost.any(axis=1).sum()} of {len(matrix.seeds)} seeds {table.lost(setting)}: "
        raise UserError(f"{reason}{measured.sum()} values of {axis} have figures; the peak test needs {FEWEST_POINTS}")
    values = _thin_values([matrix.values[j] for j in keep])
    whole = np.flatnonzero(matrix.present[:, [matrix.values.index(value) for value in values]].all(axis=1))
    if not len(whole):
        raise UserError(
            f"no seed has a cell at every value; the peak test needs {FEWEST_SEEDS}"
            if planned is None
            else "no seed has a cell at every value yet; continue with the same command"
        )
    seeds = [matrix.seeds[i] for i in whole]
    return replace(_curve_at(table, axis, setting, seeds, values, test, epsilon), planned=planned)


def _thin_values(values: list[Any]) -> list[Any]:
    numbers = [float(value) for value in values]
    return [values[i] for i in thin(numbers)] if numbers[0] >= 0 else values


def _curve_at(
    table: SweepTable,
    axis: str,
    setting: Mapping[str, Any],
    seeds: Sequence[Any],
    values: Sequence[Any],
    test: str,
    epsilon: float,
) -> Curve:
    matrix = table.matrix(test, axis, setting)
    rows, columns = [matrix.seeds.index(s) for s in seeds], [matrix.values.index(v) for v in values]
    cells = np.ix_(np.array(rows, dtype=int), np.array(columns, dtype=int))
    undefined = matrix.present[cells] & ~matrix.lost[cells] & ~np.isfinite(matrix.y[cells])

    def column(name: str) -> np.ndarray | None:
        if not table.has(name):
            return None
        y = table.matrix(name, axis, setting).y[cells]
        return y if np.isfinite(y).any() else None

    split, _, metric = test.partition(".")
    items = table.column(f"{test}.items")
    items = np.unique(items[np.isfinite(items)])
    return Curve(
        axis=_SHORT.get(axis, axis.rpartition(".")[2]), values=[float(v) for v in values], test=matrix.y[cells],
        train_error=column(table.fitted_column), fit=table.fit_name, train_loss=column("train.loss"),
        gradient_norm=column(GRADIENT), sharpness=column(SHARPNESS), metric=f"{split} {metric.replace('_', ' ')}",
        unit=table.loss_unit.partition(",")[0] if metric == "loss" else "",
        items=int(items[0]) if len(items) == 1 else None,
        epsilon=epsilon, training=test == "train.loss", lost="had no value" if undefined.any() else table.lost(setting),
    )  # fmt: skip


def compare_settings(
    table: SweepTable,
    axis: str,
    setting: Mapping[str, Any],
    base: Mapping[str, Any],
    *,
    test: str,
    epsilon: float = 0.1,
    level: float = 0.05,
) -> tuple[Curve, CurveComparison]:
    """Compare a setting with `base` along `axis`, each test at `level`: (curve of the setting, comparison).

    Uses the seeds and values that both have, thinned as for a verdict. Raises UserError for an axis without order,
    fewer than three seeds, or fewer than three values.
    """
    if not table.numeric(axis):
        raise UserError(f"{axis} has no order; curves along it cannot be compared")
    matrix, base_matrix = table.matrix(test, axis, setting), table.matrix(test, axis, base)
    seeds = [s for s in matrix.seeds if s in base_matrix.seeds]
    values = [v for v in matrix.values if v in base_matrix.values and not (axis == "step" and v == 0)]
    if len(values) < FEWEST_POINTS:
        raise UserError(f"{len(values)} values of {axis} are in both curves; a comparison needs {FEWEST_POINTS}")
    values = _thin_values(values)
    curves = [_curve_at(table, axis, each, seeds, values, test, epsilon) for each in (setting, base)]
    if not is_capacity_axis(axis):  # a fit that does not grow along it has no threshold
        curves = [replace(curve, train_error=None) for curve in curves]
    return curves[0], compare_curves(*curves, level=level)


def analyse_curve(
    table: SweepTable,
    axis: str,
    setting: Mapping[str, Any],
    *,
    test: str,
    epsilon: float = 0.1,
    planned: int | None = None,
    level: float = 0.05,
) -> AnalysedCurve:
    """Test one curve at `level` per test. Raises UserError as `build_curve` and the peak test do."""
    curve = build_curve(table, axis, setting, test=test, epsilon=epsilon, planned=planned)
    return AnalysedCurve(axis, dict(setting), curve, determine_verdict(curve, level=level))


PANELS = 6
"""Most settings of the other axes drawn for one axis; the tables have all."""
MAX_VERDICTS = 48
"""Most settings for which all get a verdict; with more, only the drawn ones do."""


def main_axis(data: SweepData) -> str | None:
    """Return the axis drawn first: the rank if it varies, else the numeric axis with most values."""

    def key(axis: str) -> tuple[bool, bool, int]:
        return (not axis.endswith("rank"), not data.numeric(axis), -len(data.values(axis)))

    return min(data.axes, key=key, default=None)


def plotted_axes(data: SweepData) -> list[str]:
    """Return the axes to draw along: the main one, then every other numeric one with at least three values."""
    main = main_axis(data)
    further = [a for a in data.axes if a != main and data.numeric(a) and len(data.values(a)) > 2]
    return [a for a in [main, *further] if a is not None]


def plottable_settings(table: SweepTable, axis: str, column: str) -> list[dict[str, Any]]:
    """Return the settings of the other axes at which `column` has at least two values of `axis`."""
    alone = len(table.axes) == 1  # with one axis, a single point is still drawn
    return [setting for setting, count in table.reach(column, axis) if count > 1 or alone]


def sample_evenly(values: Sequence[Any], maximum: int) -> list[Any]:
    """Return at most `maximum` of `values`, evenly spaced with first and last; a single one is the middle one."""
    if len(values) <= maximum:
        return list(values)
    if maximum == 1:
        return [values[len(values) // 2]]
    return [values[round(i * (len(values) - 1) / (maximum - 1))] for i in range(maximum)]


def sample_settings(table: SweepTable, settings: Sequence[dict[str, Any]], maximum: int) -> list[dict[str, Any]]:
    """Return at most `maximum` of `settings`, evenly spaced, in their order.

    Every word value (`regularizer`) is taken at the same numbers, as far as there is room for all words.
    """
    if len(settings) <= maximum:
        return list(settings)
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, setting in enumerate(settings):
        words = tuple(value for axis, value in setting.items() if not table.numeric(axis))
        groups.setdefault(words, []).append(i)
    size = max(maximum // len(groups), 1)
    sampled = sorted(i for group in groups.values() for i in sample_evenly(group, size))
    return [settings[i] for i in sample_evenly(sampled, maximum)]


def undrawn_note(selected: Sequence[Any], settings: Sequence[Any]) -> str:
    """Return a note for the lead if some settings are not drawn, else an empty text."""
    note = f" {len(selected)} of {len(settings):,} settings are drawn, evenly chosen."
    return note if len(selected) < len(settings) else ""


@dataclass(frozen=True)
class AxisAnalysis:
    """One axis of a sweep, with the settings of the others that get a verdict.

    total: number of all settings; `settings` are all of them, or the drawn ones if there are more than `MAX_VERDICTS`.
    """

    data: SweepData
    table: SweepTable
    axis: str
    settings: list[dict[str, Any]]
    total: int

    @cached_property
    def drawn(self) -> list[dict[str, Any]]:
        """At most `PANELS` of `settings`."""
        return sample_settings(self.table, self.settings, PANELS)

    @property
    def kind(self) -> str:
        """Return the field's name for curves along this axis."""
        last = self.axis.rpartition(".")[2]
        names = {"rank": "Model-wise", "step": "Epoch-wise", "steps": "Epoch-wise", "limit": "Sample-wise"}
        return names.get(last, "Sweep")

    @property
    def test(self) -> str:
        """Return the held-out column of the verdicts: error before loss, test before dev."""
        columns = [self.data.error_columns()[0], "test.error", "dev.error", "test.loss", "dev.loss"]
        return next((c for c in columns if self.table.has(c)), columns[0])

    @cached_property
    def _tested(self) -> list[AnalysedCurve | str]:
        """Verdict of each setting's curve, or the reason why it could not be tested."""
        if not is_capacity_axis(self.axis):
            return []
        data, curves = self.data, list[AnalysedCurve | str]()
        planned = data.planned_seeds if data.unfinished else None
        options: dict[str, Any] = {"test": self.test, "epsilon": data.epsilon, "level": data.level, "planned": planned}
        for setting in self.settings:
            try:
                curves.append(analyse_curve(self.table, self.axis, setting, **options))
            except UserError as error:
                curves.append(str(error))
        return curves

    @property
    def curves(self) -> list[AnalysedCurve]:
        """Verdicts of the curves that could be tested."""
        return [j for j in self._tested if isinstance(j, AnalysedCurve)]

    @property
    def refused(self) -> list[str]:
        """Distinct reasons why the others could not be tested."""
        return list(dict.fromkeys(j for j in self._tested if isinstance(j, str)))

    def curve_at(self, setting: dict[str, Any]) -> AnalysedCurve | None:
        """Return the verdict of one setting's curve."""
        return next((j for j in self.curves if j.setting == setting), None)

    def crossing_at(self, setting: dict[str, Any]) -> Crossing | None:
        """Return where the mean train error of one setting crosses ε, as in its verdict if it has one.

        None if the axis is not a capacity axis, or if too little was measured.
        """
        analysed = self.curve_at(setting)
        if analysed is not None:
            return analysed.verdict.crossing
        if not (is_capacity_axis(self.axis) and self.table.numeric(self.axis)):
            return None
        matrix = self.table.matrix(self.table.fitted_column, self.axis, setting)
        after = [j for j, v in enumerate(matrix.values) if not (self.axis == STEP and v == 0)]
        try:
            return find_crossing([matrix.values[j] for j in after], matrix.y[:, after], self.data.epsilon)
        except UserError:  # fewer than two values, or no seed that has all
            return None


class SweepAnalysis:
    """Directions of a sweep; verdicts are computed on demand, once."""

    def __init__(self, data: SweepData) -> None:
        self.data = data

    @cached_property
    def directions(self) -> list[AxisAnalysis]:
        """Directions along every axis of `plotted_axes`, then along the recorded steps; none for a random design."""
        if self.data.design == "random":
            return []
        axes: list[tuple[str, SweepTable]] = [(axis, self.data) for axis in plotted_axes(self.data)]
        axes += [(STEP, self.data.trace)] if self.data.trace is not None else []
        directions = []
        for axis, table in axes:
            columns = [*self.data.error_columns(), "test.loss", "dev.loss", "train.loss"]
            column = next((c for c in columns if table.has(c)), None)
            settings = plottable_settings(table, axis, column) if column is not None else []
            if settings:
                tested = settings if len(settings) <= MAX_VERDICTS else sample_settings(table, settings, PANELS)
                directions.append(AxisAnalysis(self.data, table, axis, tested, len(settings)))
        return directions

    def crossing(self, axis: str, setting: dict[str, Any]) -> Crossing | None:
        """Return `AxisAnalysis.crossing_at` along an axis; None along one that is not drawn."""
        direction = next((d for d in self.directions if d.axis == axis), None)
        return direction.crossing_at(setting) if direction is not None else None

    @property
    def curves(self) -> list[AnalysedCurve]:
        """Every verdict, in page order."""
        return [j for direction in self.directions for j in direction.curves]
