"""What is looked at in a sweep: the axes to draw along, the settings to hold the others at, and a verdict for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from experiments.results.sweep import SweepData
from experiments.results.table import SweepTable
from experiments.results.traces import STEP
from experiments.results.verdicts import Judged, is_judged, judge
from experiments.statistics.emc import Crossing, crossing
from finetune.errors import UserError

PANELS = 6
"""Settings of the other axes that are drawn for one axis; the tables have all."""
JUDGED = 48
"""Settings up to which all are judged; of more, those that are drawn."""


def main_axis(data: SweepData) -> str | None:
    """The axis that a sweep is drawn along first: the rank where it varies, else the numeric axis with most values."""

    def key(axis: str) -> tuple[bool, bool, int]:
        return (not axis.endswith("rank"), not data.numeric(axis), -len(data.values(axis)))

    return min(data.axes, key=key, default=None)


def axes_of(data: SweepData) -> list[str]:
    """Axes that are drawn along: the main one, then every other numeric one with three values or more."""
    first = main_axis(data)
    others = [a for a in data.axes if a != first and data.numeric(a) and len(data.values(a)) > 2]
    return [a for a in [first, *others] if a is not None]


def curves_along(table: SweepTable, axis: str, column: str) -> list[dict[str, Any]]:
    """Settings of the other axes at which `column` has two values of `axis` or more."""
    alone = len(table.axes) == 1  # a single point, which is still drawn
    return [where for where, count in table.reach(column, axis) if count > 1 or alone]


def evenly(values: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of `values`, evenly chosen, the first and the last among them; one alone is the middle one."""
    if len(values) <= most:
        return list(values)
    if most == 1:
        return [values[len(values) // 2]]
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def chosen(table: SweepTable, settings: Sequence[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """At most `most` of `settings`, in their order, evenly chosen.

    Every word (`regularizer`) at the same numbers, as far as there is room for all words.
    """
    if len(settings) <= most:
        return list(settings)
    alike: dict[tuple[Any, ...], list[int]] = {}
    for place, where in enumerate(settings):
        words = tuple(value for axis, value in where.items() if not table.numeric(axis))
        alike.setdefault(words, []).append(place)
    each = max(most // len(alike), 1)
    kept = sorted(place for places in alike.values() for place in evenly(places, each))
    return [settings[place] for place in evenly(kept, most)]


def left_out(drawn: Sequence[Any], every: Sequence[Any]) -> str:
    """That some settings are not drawn, to end a lead; nothing where all are."""
    if len(drawn) == len(every):
        return ""
    return f" {len(drawn)} of {len(every):,} settings are drawn, evenly chosen."


@dataclass(frozen=True)
class Direction:
    """One axis of a sweep, with the settings of the others."""

    data: SweepData
    table: SweepTable
    axis: str
    settings: list[dict[str, Any]]
    """Those that are judged."""
    total: int
    """Settings that there are; `settings` are all, or of more than `JUDGED` those that are drawn."""

    @cached_property
    def drawn(self) -> list[dict[str, Any]]:
        """At most `PANELS` of `settings`."""
        return chosen(self.table, self.settings, PANELS)

    @property
    def kind(self) -> str:
        """What the field calls curves along this axis."""
        last = self.axis.rpartition(".")[2]
        names = {"rank": "Model-wise", "step": "Epoch-wise", "steps": "Epoch-wise", "limit": "Sample-wise"}
        return names.get(last, "Sweep")

    @property
    def test(self) -> str:
        """The held-out figure that is judged: error before loss, test before dev."""
        columns = [self.data.error_columns()[0], "test.error", "dev.error", "test.loss", "dev.loss"]
        return next((c for c in columns if self.table.has(c)), columns[0])

    @cached_property
    def _found(self) -> list[Judged | str]:
        if not is_judged(self.axis):
            return []
        data, found = self.data, list[Judged | str]()
        planned = data.planned_seeds if data.unfinished else None
        for where in self.settings:
            try:
                found.append(judge(self.table, self.axis, where, test=self.test, epsilon=data.epsilon, planned=planned))
            except UserError as error:
                found.append(str(error))
        return found

    @property
    def judged(self) -> list[Judged]:
        """Verdicts of the curves that could be tested."""
        return [j for j in self._found if isinstance(j, Judged)]

    @property
    def refused(self) -> list[str]:
        """Why the others could not be, each reason once."""
        return list(dict.fromkeys(j for j in self._found if isinstance(j, str)))

    def judged_at(self, where: dict[str, Any]) -> Judged | None:
        """The verdict of one setting's curve."""
        return next((j for j in self.judged if j.where == where), None)

    def crossing_at(self, where: dict[str, Any]) -> Crossing | None:
        """Where the mean train error of one setting crosses ε: what its verdict says, so that a page says it once.

        None where the axis is none of capacity, or too little was measured.
        """
        judged = self.judged_at(where)
        if judged is not None:
            return judged.verdict.crossing
        if not (is_judged(self.axis) and self.table.numeric(self.axis)):
            return None
        found = self.table.matrix("train.error", self.axis, where)
        after = [j for j, v in enumerate(found.values) if not (self.axis == STEP and v == 0)]
        try:
            return crossing([found.values[j] for j in after], found.y[:, after], self.data.epsilon)
        except UserError:  # fewer than two values, or no seed that has all
            return None


class Analysis:
    """The directions of a sweep; verdicts are made on demand, once."""

    def __init__(self, data: SweepData) -> None:
        self.data = data

    @cached_property
    def directions(self) -> list[Direction]:
        """Along every axis of `axes_of`, then along the recorded steps; none for a random design."""
        if self.data.design == "random":
            return []
        places: list[tuple[str, SweepTable]] = [(axis, self.data) for axis in axes_of(self.data)]
        places += [(STEP, self.data.trace)] if self.data.trace is not None else []
        found = []
        for axis, table in places:
            drawn = [*self.data.error_columns(), "test.loss", "dev.loss", "train.loss"]
            column = next((c for c in drawn if table.has(c)), None)
            every = curves_along(table, axis, column) if column is not None else []
            if every:
                judged = every if len(every) <= JUDGED else chosen(table, every, PANELS)
                found.append(Direction(self.data, table, axis, judged, len(every)))
        return found

    def crossing(self, axis: str, where: dict[str, Any]) -> Crossing | None:
        """`Direction.crossing_at` along an axis; None along one that is not drawn."""
        found = next((d for d in self.directions if d.axis == axis), None)
        return found.crossing_at(where) if found is not None else None

    @property
    def judged(self) -> list[Judged]:
        """Every verdict, in page order."""
        return [j for direction in self.directions for j in direction.judged]
