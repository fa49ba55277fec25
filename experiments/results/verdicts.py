"""A sweep's table as the curves that the peak test and the verdict are about.

judged = judge(read_sweep(Path("sweeps/rank")), "adapter.rank", {}, test="test.error")
print(judged.verdict.kind, *judged.evidence)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from experiments.results.table import SweepTable
from experiments.statistics.beside import Beside, compare_curves
from experiments.statistics.curve import Curve
from experiments.statistics.peak import FEWEST_POINTS, FEWEST_SEEDS, thin
from experiments.statistics.verdict import Verdict, judge_curve
from finetune.errors import UserError

_SHORT = {"data.train.limit": "training rows", "train.steps": "steps"}
_CAPACITY = ("adapter.rank", "adapter.alpha", "train.steps", "step", "data.train.limit")


@dataclass(frozen=True)
class Judged:
    """A curve of a sweep with its verdict."""

    axis: str
    """The axis it runs along."""
    where: Mapping[str, Any]
    """The values that the other axes are held at."""
    curve: Curve
    verdict: Verdict

    @property
    def evidence(self) -> tuple[str, ...]:
        """Why the verdict is what it is, a sentence each, and what the data could have shown."""
        peak, found = self.verdict.peak, list(self.verdict.evidence)
        if peak is not None and peak.rejected and not self.curve.training:
            found.append(
                f"With {peak.seeds} seeds and {len(peak.points)} points a peak of {peak.detectable.height:.2g} is "
                f"found with a power of 80 % at {self.curve.at(peak.detectable.point)}, where runs scatter most."
            )
        if self.axis == "step":
            steps = ", ".join(f"{value:g}" for value in self.curve.values)
            found.append(f"Judged at steps {steps}: what rises and falls again between two of them is not seen.")
        return tuple(found)

    @property
    def location(self) -> tuple[Any, ...]:
        """Axis values among which the peak lies at the test's level; empty if there is none."""
        peak = self.verdict.peak
        return tuple(self.curve.values[i] for i in peak.location) if peak is not None else ()


def is_judged(axis: str) -> bool:
    """Whether a verdict about an axis means anything: those along which the fit of the training data grows or shrinks.

    A peak over a learning rate or a share of noise is no double descent, whatever its shape.
    """
    return axis in _CAPACITY


def curve_of(
    table: SweepTable, axis: str, where: Mapping[str, Any], *, test: str, epsilon: float, planned: int | None = None
) -> Curve:
    """The curve of the column `test` along a numeric axis, other axes held at `where`.

    Seeds count that have a cell at every value, finished or failed (a failed one is NaN: the seed diverged there);
    values that were not measured are left out, and of a trace those of step 0, before any update. Longer curves are
    thinned by `thin`, which does not look at them. Too few seeds for a verdict still make a curve. planned: seeds
    of the plan where cells of it still wait.

    Raises UserError, saying what is missing, where there are too few values for the peak test, or no seed has all.
    """

    if not table.numeric(axis):
        raise UserError(f"{axis} has no order; a peak needs numbers")
    found = table.matrix(test, axis, where)
    after = np.array([not (axis == "step" and v == 0) for v in found.values], dtype=bool)
    measured, lost = np.isfinite(found.y).any(axis=0) & after, found.lost.any(axis=0) & after
    keep = np.flatnonzero(measured | lost).tolist()
    if len(keep) < FEWEST_POINTS or not measured.any():
        said = f"{found.lost.any(axis=1).sum()} of {len(found.seeds)} seeds {table.lost(where)}: " if lost.any() else ""
        raise UserError(f"{said}{measured.sum()} values of {axis} have figures; the peak test needs {FEWEST_POINTS}")
    numbers = [float(found.values[j]) for j in keep]
    keep = [keep[i] for i in (thin(numbers) if numbers[0] >= 0 else range(len(numbers)))]
    whole = np.flatnonzero(found.present[:, keep].all(axis=1))
    if not len(whole):
        raise (
            UserError(f"no seed has a cell at every value; the peak test needs {FEWEST_SEEDS}")
            if planned is None
            else UserError("no seed has a cell at every value yet; go on with the same command")
        )
    seeds, values = [found.seeds[s] for s in whole], [found.values[j] for j in keep]
    return replace(_held(table, axis, where, seeds, values, test, epsilon), planned=planned)


def _held(
    table: SweepTable,
    axis: str,
    where: Mapping[str, Any],
    seeds: Sequence[Any],
    values: Sequence[Any],
    test: str,
    epsilon: float,
) -> Curve:
    """The curve at these seeds and values, all of which `where` has."""

    from experiments.results.sweep import GRADIENT, SHARPNESS

    found = table.matrix(test, axis, where)
    rows, columns = [found.seeds.index(s) for s in seeds], [found.values.index(v) for v in values]
    held = np.ix_(np.array(rows, dtype=int), np.array(columns, dtype=int))

    def column(name: str) -> np.ndarray | None:
        if not table.has(name):
            return None
        y = table.matrix(name, axis, where).y[held]
        return y if np.isfinite(y).any() else None

    split, _, metric = test.partition(".")
    return Curve(
        axis=_SHORT.get(axis, axis.rpartition(".")[2]),
        values=[float(v) for v in values],
        test=found.y[held],
        train_error=column("train.error"),
        train_loss=column("train.loss"),
        gradient_norm=column(GRADIENT),
        sharpness=column(SHARPNESS),
        metric=f"{split} {metric.replace('_', ' ')}",
        unit="nats" if metric == "loss" else "",
        epsilon=epsilon,
        training=test == "train.loss",
        lost=table.lost(where),
    )


def compared(
    table: SweepTable, axis: str, ours: Mapping[str, Any], base: Mapping[str, Any], *, test: str, epsilon: float = 0.1
) -> tuple[Curve, Beside]:
    """(the curve of the setting `ours`, how it lies beside that of `base`) along `axis`.

    At the seeds and values that both have, thinned as for a verdict. Raises UserError for an axis without order, fewer
    than three seeds, or fewer than three values.
    """
    if not table.numeric(axis):
        raise UserError(f"{axis} has no order; curves along it cannot be compared")
    found = [table.matrix(test, axis, where) for where in (ours, base)]
    seeds = [s for s in found[0].seeds if s in found[1].seeds]
    values = [v for v in found[0].values if v in found[1].values and not (axis == "step" and v == 0)]
    if len(values) < FEWEST_POINTS:
        raise UserError(f"{len(values)} values of {axis} are in both curves; a comparison needs {FEWEST_POINTS}")
    numbers = [float(v) for v in values]
    values = [values[i] for i in (thin(numbers) if numbers[0] >= 0 else range(len(numbers)))]
    curves = [_held(table, axis, where, seeds, values, test, epsilon) for where in (ours, base)]
    return curves[0], compare_curves(*curves)


def judge(
    table: SweepTable,
    axis: str,
    where: Mapping[str, Any],
    *,
    test: str,
    epsilon: float = 0.1,
    planned: int | None = None,
) -> Judged:
    """The verdict of one curve. Raises UserError as `curve_of` and the peak test do."""
    curve = curve_of(table, axis, where, test=test, epsilon=epsilon, planned=planned)
    return Judged(axis, dict(where), curve, judge_curve(curve))
