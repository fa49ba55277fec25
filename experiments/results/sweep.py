"""Sweep directory as tables: plan, cells, their traces along the steps, and progress."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from flatshift.experiments.results.cells import cell_status, read_marker
from flatshift.experiments.results.table import SweepTable, Where, encode_column, float_column
from flatshift.experiments.results.traces import STEP, read_late_traces
from flatshift.finetune.digests import verify_sealed
from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate.metrics import METRICS, find_metric, loss_form

GRADIENT, SHARPNESS = "grad.norm", "sharpness.ratio"
"""Metrics of a sweep that are computed from recorded ones."""
INTERPOLATION = 0.1
"""Default ε of the effective model complexity: training data counts as fitted up to this mean train error."""


@dataclass(frozen=True)
class FailedCell:
    """Cell without metrics, and the reason."""

    cell: str
    setting: dict[str, Any]
    seed: Any
    reason: str
    diverged: bool
    """True if its loss or a gradient was not finite; also False if tables of an earlier version do not record it."""


class SweepData(SweepTable):
    """Cells of a sweep, one row each; `axes` are the grid keys that vary.

    fixed: grid keys with one value. trace: records of cells along the steps, with the further axis `step`; None if they
    recorded nothing. design: `grid`, `paired` (all axes move together) or `random`. planned: cells of the plan, None if
    sweep.json does not give it. files: names of the tables in the directory. stability: lr·λ_max of the preconditioned
    Hessian above which the recipe's Adam is unstable. searched: the points of emc.json, found by a bisection over the
    rows of training data. epsilon: mean train error up to which training data count as fitted. together: axes of a
    paired design that move with another one and are not axes here. planned_seeds: seeds per point of the plan. level:
    of every test, below 5 % if seeds were added until curves had a verdict. metric: metric requested by the plan, in
    the form that falls as it improves; None: error, else loss.
    """

    def __init__(
        self,
        table: pa.Table,
        axes: Sequence[str],
        *,
        fixed: dict[str, Any] | None = None,
        trace: SweepTable | None = None,
        design: str = "grid",
        planned: int | None = None,
        files: Sequence[str] = (),
        stability: float = 38.0,
        searched: Sequence[Mapping[str, Any]] = (),
        epsilon: float = INTERPOLATION,
        together: Sequence[CoupledAxis] = (),
        planned_seeds: int | None = None,
        level: float = 0.05,
        metric: str | None = None,
    ) -> None:
        super().__init__(table, axes)
        self.fixed = fixed or {}
        self.trace = trace
        self.design = design
        self.planned = planned
        self.files = tuple(files)
        self.stability = stability
        self.searched = tuple(searched)
        self.epsilon = epsilon
        self.together = tuple(together)
        self.planned_seeds = planned_seeds
        self.level = level
        self.metric = metric

    @property
    def done(self) -> int:
        """Number of finished cells."""
        return int(self.finished.sum())

    @cached_property
    def failed(self) -> list[FailedCell]:
        """Cells that failed, in file order; a cell that has not run yet is not among them."""
        names = [n for n in ("cell", "status", "reason", "diverged") if n in self.table.column_names]
        texts = self.table.select(names).to_pydict()
        statuses = texts.get("status", [])
        return [
            FailedCell(
                str(texts["cell"][i]) if "cell" in texts else "?",
                {a: self._levels[a][self._codes[a][i]] for a in self.axes},
                self._levels["seed"][self._codes["seed"][i]],
                str((texts.get("reason") or [None] * len(self))[i] or "no reason was recorded"),
                status == "diverged" or (texts.get("diverged") or [None] * len(self))[i] is True,
            )
            for i, status in enumerate(statuses)
            if status in ("failed", "diverged")
        ]

    @property
    def unfinished(self) -> int:
        """Number of planned cells without a result."""
        return max((self.planned if self.planned is not None else len(self)) - self.done - len(self.failed), 0)

    @cached_property
    def seconds(self) -> list[float]:
        """Wall seconds of every finished cell that recorded them."""
        values = self.column("seconds")
        return [v for v in values.tolist() if math.isfinite(v)]

    @cached_property
    def versions(self) -> list[tuple[str, int]]:
        """(version and digest of the code, number of its cells), most cells first."""
        names = [n for n in ("flatshift", "code") if n in self.table.column_names]
        found = zip(*(self.table.column(n).to_pylist() for n in names), strict=True)
        counted = Counter(" ".join(str(part) for part in made if part is not None) for made in found)
        return sorted(((made, n) for made, n in counted.items() if made), key=lambda item: (-item[1], item[0]))

    def whole(self, where: Where) -> dict[str, Any]:
        """Return a setting with the values of the axes that move with its own."""
        return {**where, **{one.axis: one.at[where[one.first]] for one in self.together}}

    def error_columns(self) -> tuple[str, str]:
        """Return (test column, train column): of the requested metric, else error if the task has one, else loss."""
        name = self.metric or ("error" if self.has("test.error") or self.has("train.error") else "loss")
        return f"{self.judged(name)}.{name}", f"train.{name}"

    def judged(self, name: str) -> str:
        """Return the held-out split that has the metric `name`: test, else dev."""
        return "test" if self.has(f"test.{name}") or not self.has(f"dev.{name}") else "dev"

    def majority_error(self, test: str) -> float | None:
        """Return the mean error of always predicting the most frequent class; None unless `test` is a class error."""
        split, _, metric = test.partition(".")
        floor = f"{split}.{find_metric('accuracy').floor}"
        if metric != "error" or not self.has(floor):
            return None
        shares = self.column(floor)
        return 1 - statistics.fmean(shares[np.isfinite(shares)].tolist())


def read_sweep(folder: Path) -> SweepData | None:
    """Read the tables of a sweep directory; None if it has none.

    Reads cells.parquet and curves.parquet, and for cells that finished after these were written (or without them)
    cells/<hash>/result.json and trace.jsonl. Axes are the keys of `grid` in sweep.json or, without it, every dotted
    column that is not `<split>.<metric>` (`train.steps` is an axis, `train.loss` is not).
    """
    from flatshift.finetune.train.trace.files import stability_threshold

    if not (folder / "cells.parquet").is_file() and not (folder / "cells").is_dir():
        return None
    plan = read_plan(folder / "sweep.json")
    searched, epsilon = read_bisection(folder / "emc.json")
    planned = planned_cell_count(plan)
    names = [n for n in ("cells.parquet", "curves.parquet", "points.csv") if (folder / n).is_file()]
    cells = _read_parquet(folder / "cells.parquet")
    known = set(cells.column("cell").to_pylist()) if cells is not None and "cell" in cells.column_names else set()
    curves = _read_parquet(folder / "curves.parquet")
    if cells is not None:  # the tables may still be those of an earlier plan
        whole, cells = cells.num_rows, filter_planned_cells(cells, plan)
        if cells.num_rows < whole and curves is not None:
            curves = _curves_of_cells(curves, cells)
    late: list[Path] = []
    if cells is None or (planned is not None and cells.num_rows < planned):
        late = [f for f in sorted((folder / "cells").glob("*/result.json")) if f.parent.name not in known]
    rows = filter_planned_rows(map(_result_row, late), plan)
    metric = declared_metric(plan)
    cells = _with_errors(_concat([cells], rows), metric)
    axes, fixed = split_axes(cells, declared_axes(plan))
    together: list[CoupledAxis] = []
    if plan.get("design") == "paired":
        axes, together = split_coupled_axes(cells, axes)
    late = [folder / "cells" / str(row["cell"]) for row in rows]
    traces, rows = read_late_traces(late, cells, axes, _recorded_steps(curves))
    curves = _concat([curves, *traces], rows)
    trace = (
        SweepTable(_last_stage_rows(curves), (*axes, STEP)) if STEP in curves.column_names and curves.num_rows else None
    )
    design = str(plan.get("design") or "grid")
    data = SweepData(
        cells,
        axes,
        fixed=fixed,
        trace=trace,
        design=design,
        planned=planned,
        files=names,
        stability=stability_threshold(adam_beta1(folder / "recipe.resolved.yaml")),
        searched=searched,
        together=together,
        planned_seeds=plan["seeds"] if isinstance(plan.get("seeds"), int) else None,
        epsilon=declared_epsilon(plan) or epsilon or INTERPOLATION,
        level=declared_level(plan),
        metric=metric,
    )
    add_derived_metrics(data)
    return data


def _read_parquet(path: Path) -> pa.Table | None:
    if not path.is_file():
        return None
    try:
        return pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable Parquet file; {AGAIN}") from error


def _curves_of_cells(curves: pa.Table, cells: pa.Table) -> pa.Table:
    if "cell" not in curves.column_names or "cell" not in cells.column_names:
        return curves
    return curves.filter(pc.is_in(curves.column("cell"), value_set=cells.column("cell").combine_chunks()))


def _concat(tables: Sequence[pa.Table | None], rows: list[dict[str, Any]]) -> pa.Table:
    there = [table for table in tables if table is not None]
    if rows or not there:
        names = list(dict.fromkeys(key for row in rows for key in row))
        there.append(pa.table({name: _to_array([row.get(name) for row in rows]) for name in names}))
    try:
        return pa.concat_tables(there, promote_options="permissive") if len(there) > 1 else there[0]
    except pa.ArrowException:  # a column is text in one and a number in the other
        both = [row for table in there for row in table.to_pylist()]
        names = list(dict.fromkeys(name for table in there for name in table.column_names))
        return pa.table({name: _to_array([row.get(name) for row in both]) for name in names})


def _to_array(values: list[Any]) -> pa.Array:
    """Return values as a column; as text if they are lists or of incompatible types."""
    try:
        found = pa.array(values)
        if not pa.types.is_nested(found.type):
            return found
    except (pa.ArrowException, TypeError):
        pass
    values = [", ".join(map(str, v)) if isinstance(v, list | tuple) else v for v in values]
    return pa.array([None if v is None else str(v) for v in values])


def _with_errors(table: pa.Table, metric: str | None) -> pa.Table:
    """Add error = 1 − accuracy where only accuracy was measured, and likewise for the requested metric's loss form."""
    derived = {"accuracy": "error"}
    if metric is not None and metric not in METRICS:
        derived[next(name for name in METRICS if loss_form(name) == metric)] = metric
    for split, (whole, lack) in itertools.product(SPLITS, derived.items()):
        name = f"{split}.{lack}"
        if f"{split}.{whole}" not in table.column_names:
            continue
        error = float_column(table, name)
        error = np.where(np.isfinite(error), error, 1 - float_column(table, f"{split}.{whole}"))
        at = table.schema.get_field_index(name)
        table = table.append_column(name, pa.array(error)) if at < 0 else table.set_column(at, name, pa.array(error))
    return table


def _last_stage_rows(table: pa.Table) -> pa.Table:
    """Return the rows of the last stage: steps restart in each, and only the last trains on the task's labels."""
    if "stage" not in table.column_names:
        return table
    stages = list(dict.fromkeys(table.column("stage").to_pylist()))
    return table.filter(pc.equal(table.column("stage"), stages[-1])) if len(stages) > 1 else table


def _result_row(file: Path) -> dict[str, Any]:
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
        row = {"cell": file.parent.name, **tree["point"], "seed": tree["seed"], "status": cell_status(tree)}
        row |= {key: tree.get(key) for key in ("reason", "seconds", "flatshift")}
        for split, metrics in tree["metrics"].items():
            row |= {f"{split}.{name}": cell["value"] for name, cell in metrics.items()}
            row[f"{split}.error.items"] = metrics.get("accuracy", {}).get("n")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise UserError(f"{file}: not a cell result; delete it and run the sweep again") from error
    verify_sealed(file, tree, fix="delete it and run the sweep again")
    return row


def _recorded_steps(curves: pa.Table | None) -> set[int]:
    if curves is None or STEP not in curves.column_names:
        return set()
    return {int(step) for step in curves.column(STEP).unique().to_pylist() if step is not None}


def add_derived_metrics(data: SweepData) -> None:
    """Add `grad.norm` = √(‖gA‖² + ‖gB‖²) and `sharpness.ratio` = lr·λ_max / `data.stability` to trace and cells.

    A cell's value is the largest of its trace: of the gradient over the second half of its steps (the first steps from
    B = 0 are large for every rank), of the sharpness over all. A failed cell has none.
    """
    trace = data.trace
    if trace is None:
        return
    if trace.has("grad.a") and trace.has("grad.b"):
        norm = np.hypot(trace.column("grad.a"), trace.column("grad.b"))
        trace.add(GRADIENT, norm)
        place = _cell_rows(data)
        steps = trace.column(STEP)
        last = np.full(len(data), -1.0)
        known = (place >= 0) & np.isfinite(steps)  # steps that a failed cell did not reach have no values
        np.maximum.at(last, place[known], steps[known])
        late = known & (steps >= last[place] / 2)
        data.add(GRADIENT, np.where(data.finished, _largest_by_cell(norm, place, late, len(data)), np.nan))
    if trace.has("sharpness.preconditioned") and trace.has("lr"):
        ratio = trace.column("sharpness.preconditioned") * trace.column("lr") / data.stability
        trace.add(SHARPNESS, ratio)
        place = _cell_rows(data)
        data.add(SHARPNESS, np.where(data.finished, _largest_by_cell(ratio, place, place >= 0, len(data)), np.nan))


def _cell_rows(data: SweepData) -> np.ndarray:
    """Return int64 [rows of the trace]: the row in `data` of each one's cell, −1 if it has none."""
    assert data.trace is not None
    if "cell" not in data.table.column_names or "cell" not in data.trace.table.column_names:
        return np.full(len(data.trace), -1)
    found = pc.index_in(data.trace.table.column("cell"), value_set=data.table.column("cell").combine_chunks())
    return found.fill_null(-1).to_numpy().astype(np.int64)


def _largest_by_cell(values: np.ndarray, place: np.ndarray, among: np.ndarray, count: int) -> np.ndarray:
    """Return float64 [count]: the largest finite value at each place, NaN if there is none."""
    good = among & np.isfinite(values)
    top = np.full(count, -np.inf)
    np.maximum.at(top, place[good], values[good])
    return np.where(np.isfinite(top), top, np.nan)


SPLITS = ("train", "dev", "test")
_RECORDED = ("grad.", "update.", "sharpness.")
_OWN = frozenset({"cell", "seed", "status"})


def split_axes(table: pa.Table, declared: Iterable[str] | None) -> tuple[list[str], dict[str, Any]]:
    """Return (columns that vary, {column: value} of those that do not)."""
    if declared is None:
        declared = [c for c in table.column_names if c not in _OWN and "." in c and not _is_metric_column(c)]
    levels = {c: encode_column(table, c)[0] for c in declared} if table.num_rows else {}
    return [c for c, v in levels.items() if len(v) > 1], {c: v[0] for c, v in levels.items() if len(v) == 1}


def _is_metric_column(column: str) -> bool:
    head, _, tail = column.partition(".")
    return column.startswith(_RECORDED) or (head in SPLITS and tail.split(".")[0] in METRICS)


@dataclass(frozen=True)
class CoupledAxis:
    """Axis of a paired design that moves with another one, so that no curve runs along it."""

    axis: str
    first: str
    """Axis that it moves with."""
    at: Mapping[Any, Any]
    """Its value at each value of `first`."""


def split_coupled_axes(table: pa.Table, axes: list[str]) -> tuple[list[str], list[CoupledAxis]]:
    """Return (axes of a paired design to draw along, those that move with the first of them).

    The first is the rank, else a numeric axis.
    """
    found = SweepTable(table, axes)
    first = min(axes, key=lambda a: (not a.endswith("rank"), not found.numeric(a), axes.index(a)), default=None)
    if first is None:
        return axes, []
    pairs = {a: [(w[first], w[a]) for w in found.settings([first, a])] for a in axes if a != first}
    together = [CoupledAxis(a, first, dict(p)) for a, p in pairs.items() if len(p) == len(found.levels(first))]
    moving = {one.axis for one in together}
    return [a for a in axes if a not in moving], together


AGAIN = "run the sweep again, it keeps its cells"


def read_plan(path: Path) -> dict[str, Any]:
    """Read sweep.json; empty if it does not exist. Raises UserError as `flatshift sweep` does, and without a grid."""
    if not path.is_file():
        return {}
    plan = read_marker(path.parent)
    try:
        list(plan["grid"])
        if "keys" in plan:
            plan["keys"] = frozenset(plan["keys"])
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: has no `grid`; {AGAIN}") from error
    return plan


def declared_axes(plan: dict[str, Any]) -> list[str] | None:
    """Return the keys of the grid and the searched one; None without a plan."""
    if not plan:
        return None
    search = plan.get("bisection")
    searched = [str(search["key"])] if isinstance(search, dict) and "key" in search else []
    return list(dict.fromkeys([*plan["grid"], *searched]))


def declared_epsilon(plan: dict[str, Any]) -> float | None:
    """Return the mean train error up to which a bisection counts rows as fitted; None without a bisection."""
    search = plan.get("bisection")
    return _valid_epsilon(search.get("epsilon")) if isinstance(search, dict) else None


def declared_level(plan: dict[str, Any]) -> float:
    """Return the level of every test: the plan's share at this look (`flatshift.experiments.statistics.peak`), else 5
    %."""
    found = plan.get("level")
    return float(found) if isinstance(found, float) and 0 < found < 0.5 else 0.05


def declared_metric(plan: dict[str, Any]) -> str | None:
    """Return the loss form of the metric that the plan requests, which falls as it improves; None: use the default."""
    found = plan.get("metric")
    return loss_form(found) if isinstance(found, str) and found in METRICS else None


def _valid_epsilon(found: Any) -> float | None:
    return float(found) if isinstance(found, int | float) and 0 < found < 1 else None


def planned_cell_count(plan: dict[str, Any]) -> int | None:
    """Return the number of cells in the plan, if it can be derived."""
    if isinstance(plan.get("cells"), int):
        return int(plan["cells"])
    grid, seeds = plan.get("grid"), plan.get("seeds")
    if not isinstance(grid, dict) or not isinstance(seeds, int) or plan.get("design", "grid") not in ("grid", "paired"):
        return None
    lengths = [len(values) for values in grid.values()]
    points = math.prod(lengths) if plan.get("design", "grid") == "grid" else max(lengths, default=0)
    return points * seeds or None


def filter_planned_rows(rows: Iterable[dict[str, Any]], plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the finished cells that belong to the plan: a directory may also hold cells of an earlier grid.

    All of them if the plan does not name its cells.
    """
    return [row for row in rows if "keys" not in plan or row["cell"] in plan["keys"]]


def filter_planned_cells(table: pa.Table, plan: dict[str, Any]) -> pa.Table:
    """Filter a table of cells like `filter_planned_rows`."""
    if "keys" not in plan or "cell" not in table.column_names:
        return table
    return table.filter(pc.is_in(table.column("cell"), value_set=pa.array(sorted(plan["keys"]), pa.string())))


def read_bisection(path: Path) -> tuple[list[dict[str, Any]], float | None]:
    """Return (points, ε) of emc.json, each with `point`, `emc`, `low`, `high`, `side`, `tried`; empty without it."""
    if not path.is_file():
        return [], None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        points = document["points"]
        found = [{key: p[key] for key in ("point", "emc", "low", "high", "side", "tried")} for p in points]
        if any(not isinstance(t["rows"], int) for p in found for t in p["tried"]) or not all(p["tried"] for p in found):
            raise ValueError("no rows")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: not what a bisection writes; {AGAIN}") from error
    return found, _valid_epsilon(document.get("epsilon"))


def adam_beta1(recipe: Path) -> float:
    """Return Adam's first decay rate from the recipe; 0.9 by default."""
    import yaml

    try:
        betas = yaml.safe_load(recipe.read_text(encoding="utf-8"))["optimizer"]["betas"]
        return float(betas[0])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, IndexError):
        return 0.9
