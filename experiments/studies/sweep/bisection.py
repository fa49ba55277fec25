"""Effective model complexity of every point of a sweep: the most training rows that are still fitted, by bisection.

A point is fitted with n rows when its mean train error over the seeds, of a squared loss the unexplained share of its
labels' variance, is at most ε (Nakkiran et al. 2020, "Deep double descent", definition 1). Every n tried is an
ordinary cell: kept, shared, never run twice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.results.cells import EMC as EMC_FILE
from flatshift.experiments.results.cells import FITS, read_result
from flatshift.experiments.statistics.emc import EMC, effective_model_complexity
from flatshift.experiments.studies.cell import Cell, point_label
from flatshift.experiments.studies.sweep.axes import ValueRange, parse_range
from flatshift.experiments.studies.sweep.sweep_plan import SweepBase
from flatshift.experiments.studies.sweep.table import Row, final_metrics
from flatshift.finetune.atomic import write_json
from flatshift.finetune.errors import UserError
from flatshift.finetune.run_directory import disk_full_interrupts

KEY = "data.train.limit"
_EPSILON = 0.1
_MIN_ROWS = 8
"""Smallest number of rows of a search by default."""


@dataclass(frozen=True)
class Bisection:
    """Range of a search, and the mean train error up to which rows count as fitted."""

    key: str
    low: int
    high: int
    epsilon: float


def parse_bisection(text: str, epsilon: float | None, recipe: Recipe) -> Bisection:
    """Parse `data.train.limit`, searched from 8 rows to all, or `data.train.limit=lo..hi`; ε is 0.1 if None. Raises
    UserError for another key, an impossible range or ε."""
    key, equals, values = text.partition("=")
    key = key.strip().replace("-", "_")
    if key != KEY:
        raise UserError(f"--bisect {key}: only {KEY} can be searched, the number of training rows")
    epsilon = _EPSILON if epsilon is None else epsilon
    if not 0 < epsilon < 1:
        raise UserError(f"--epsilon must be between 0 and 1, got {epsilon}")
    if not equals:
        from flatshift.experiments.data.splits import read_splits

        train = dataclasses.replace(recipe.data.train, limit=None)
        whole = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, train=train))
        count = len(read_splits(whole).train)  # without bad and held-out rows
        if count <= _MIN_ROWS:
            raise UserError(
                f"--bisect {KEY}: there are only {count} training rows; say between which with {KEY}=lo..hi"
            )
        return Bisection(key, _MIN_ROWS, count, epsilon)
    rows = parse_range(values, f"--bisect {key}")
    if not isinstance(rows, ValueRange) or rows.log or not (rows.low.is_integer() and rows.high.is_integer()):
        raise UserError(f"--bisect {text}: write the rows to search between as {key}=lo..hi")
    if rows.low < 1:
        raise UserError(f"--bisect {text}: begin with at least 1 row")
    return Bisection(key, int(rows.low), int(rows.high), epsilon)


class _CellsMissing(Exception):
    """Raised when the search needs cells with this many rows, its only argument."""


class _PointSearch:
    """Search at the point of `cell`: the cells tried, and the answer once every needed train error is known."""

    def __init__(self, base: SweepBase, cell: Cell, search: Bisection, seeds: int) -> None:
        self.base, self.cell, self.search, self.seeds = base, cell, search, seeds
        self.tried: dict[int, list[Cell]] = {}
        self.answer: EMC | None = None

    def step(self, errors: Mapping[str, float]) -> list[Cell]:
        """Return the cells needed to continue; none when done."""

        def train_error(rows: int, seed: int) -> float:
            group = self.tried.get(rows)
            if group is None or group[seed].key not in errors:
                raise _CellsMissing(rows)
            return errors[group[seed].key]

        low, high, epsilon = self.search.low, self.search.high, self.search.epsilon
        try:
            self.answer = effective_model_complexity(
                train_error, epsilon=epsilon, low=low, high=high, seeds=range(self.seeds)
            )
        except _CellsMissing as missing:
            (rows,) = missing.args
            self.tried[rows] = list(self.base.cells([{**self.cell.written, self.search.key: rows}], self.seeds))
            return self.tried[rows]
        return []

    @property
    def cells(self) -> list[Cell]:
        """All cells tried, by rows."""
        return [cell for rows in sorted(self.tried) for cell in self.tried[rows]]

    def document(self, errors: Mapping[str, float]) -> dict[str, Any]:
        """Return its entry of emc.json."""
        answer, tried = self.answer, list[dict[str, Any]]()
        assert answer is not None
        for rows, cells in sorted(self.tried.items()):
            train_errors = [error if math.isfinite(error := errors[cell.key]) else None for cell in cells]
            tried.append({"rows": rows, "train_error": train_errors, "cells": [cell.key for cell in cells]})
        interval = {"emc": answer.value, "low": answer.low, "high": answer.high, "side": answer.side}
        return {"point": self.cell.point, **interval, "text": str(answer), "tried": tried}


def bisect(
    out: Path, base: SweepBase, cells: Sequence[Cell], search: Bisection, seeds: int, run: Callable[..., None]
) -> tuple[list[Cell], dict[str, Row], list[int]]:
    """Search at every point of `cells`, all points at the same time, and write emc.json.

    run: called with cells and a `label`, runs those without a result. Returns (all cells that were tried, key → the
    point's `emc` for the table, rows tried in ascending order). The search is a function of train errors: in each round
    it restarts with the known ones until none is missing, so a killed sweep resumes.
    """
    points = {point_label(cell.written): cell for cell in cells}
    searches = [_PointSearch(base, cell, search, seeds) for cell in points.values()]
    errors: dict[str, float] = {}
    turn = 0
    while missing := [cell for point in searches if point.answer is None for cell in point.step(errors)]:
        turn += 1
        run(missing, label=f"bisection, round {turn}")
        errors |= {cell.key: _train_error(out, cell) for cell in missing}
    entries = [point.document(errors) for point in searches]
    with disk_full_interrupts(f"writing {out / EMC_FILE}"):
        write_json(out / EMC_FILE, {"format": 1, **dataclasses.asdict(search), "seeds": seeds, "points": entries})
    columns = {cell.key: {"emc": p.answer.value if p.answer else None} for p in searches for cell in p.cells}
    rows = sorted({rows for point in searches for rows in point.tried})
    return [cell for point in searches for cell in point.cells], columns, rows


def _train_error(out: Path, cell: Cell) -> float:
    """Return what the final adapter of a cell leaves unfitted (`FITS`); NaN if it diverged, which fits nothing. Raises
    UserError if it failed in another way, which reveals nothing about rows, or if cells do not measure it."""
    directory = out / "cells" / cell.key
    result = read_result(directory)
    assert result is not None
    if result["status"] == "diverged":
        return math.nan
    if result["status"] == "failed":
        raise UserError(
            f"--bisect: cell {cell.key} ({cell.label}) failed: {result['reason']}; whether its rows are fitted is "
            "not known; --rerun-failed tries it again"
        )
    metrics = final_metrics(directory)
    error = next((metrics[name] for name in FITS if metrics.get(name) is not None), None)
    if error is None:
        raise UserError(
            f"--bisect: cell {cell.key} has no train error; evaluate training rows too (eval.train_limit) and, for "
            "language models, record them (record.steps) with train.eval_every at 0"
        )
    return float(error)
