"""Sweep directory as tables: plan, cells, their traces along the steps, and progress."""

from __future__ import annotations

import csv
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from flatshift.experiments.results.cells import (
    CELLS,
    POINTS,
    RESULT,
    read_marker,
    read_result,
    result_metrics,
    unreached_status,
)
from flatshift.experiments.results.table import Setting, SweepTable, encode_column, float_column, read_parquet
from flatshift.finetune.atomic import atomic_file
from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate.metrics import METRICS, find_metric, loss_form
from flatshift.finetune.train.trace.files import ABOUT, align_to_plan, read_trace, stability_threshold

STEP = "step"
"""Axis of a trace: finished optimizer steps."""
GRADIENT, SHARPNESS = "grad.norm", "sharpness.ratio"
"""Metrics of a sweep that are computed from recorded ones."""
INTERPOLATION = 0.1
"""Default ε of the effective model complexity: training data counts as fitted up to this mean train error."""


@dataclass(frozen=True)
class FailedCell:
    """Cell without metrics, and the reason. diverged: its loss or a gradient was not finite."""

    cell: str
    setting: dict[str, Any]
    seed: Any
    reason: str
    diverged: bool


@dataclass(frozen=True)
class CoupledAxis:
    """Axis of a paired design that moves with `leader`; values: its value at each value of the leader."""

    axis: str
    leader: str
    values: Mapping[Any, Any]


@dataclass(eq=False)
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

    table: pa.Table
    axes: Sequence[str]
    _: KW_ONLY
    fixed: dict[str, Any] = field(default_factory=dict)
    trace: SweepTable | None = None
    design: str = "grid"
    planned: int | None = None
    files: Sequence[str] = ()
    stability: float = 38.0
    searched: Sequence[Mapping[str, Any]] = ()
    epsilon: float = INTERPOLATION
    together: Sequence[CoupledAxis] = ()
    planned_seeds: int | None = None
    level: float = 0.05
    metric: str | None = None

    def __post_init__(self) -> None:
        super().__init__(self.table, self.axes)

    @property
    def done(self) -> int:
        """Number of finished cells."""
        return int(self.finished.sum())

    @cached_property
    def failed(self) -> list[FailedCell]:
        """Cells that failed, in file order; a cell that has not run yet is not among them."""
        names = [n for n in ("cell", "status", "reason") if n in self.table.column_names]
        return [
            FailedCell(
                str(row.get("cell", "?")),
                {a: self._levels[a][self._codes[a][i]] for a in self.axes},
                self._levels["seed"][self._codes["seed"][i]],
                str(row.get("reason") or "no reason was recorded"),
                row["status"] == "diverged",
            )
            for i, row in enumerate(self.table.select(names).to_pylist())
            if row.get("status") in ("failed", "diverged")
        ]

    @property
    def total(self) -> int:
        """Number of planned cells, or of those there if that is more or unknown."""
        return max(self.planned or 0, len(self))

    @property
    def unfinished(self) -> int:
        """Number of planned cells without a result."""
        return self.total - self.done - len(self.failed)

    @cached_property
    def versions(self) -> list[tuple[str, int]]:
        """(version and digest of the code, number of its cells), most cells first."""
        names = [n for n in ("flatshift", "code") if n in self.table.column_names]
        rows = zip(*(self.table.column(n).to_pylist() for n in names), strict=True)
        counts = Counter(" ".join(str(word) for word in row if word is not None) for row in rows)
        return sorted(((version, n) for version, n in counts.items() if version), key=lambda item: (-item[1], item[0]))

    def whole(self, setting: Setting) -> dict[str, Any]:
        """Return a setting with the values of the axes that move with its own."""
        return {**setting, **{coupled.axis: coupled.values[setting[coupled.leader]] for coupled in self.together}}

    def error_columns(self) -> tuple[str, str]:
        """Return (test column, train column): of the requested metric, else error if the task has one, else loss."""
        known = any(self.has(f"{split}.error") for split in SPLITS)
        name = self.metric or ("error" if known else "loss")
        return f"{self.held_out_split(name)}.{name}", f"train.{name}"

    def held_out_split(self, name: str) -> str:
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
    if not (folder / "cells.parquet").is_file() and not (folder / "cells").is_dir():
        return None
    plan = read_plan(folder / "sweep.json")
    searched, epsilon = _read_bisection(folder / "emc.json")
    planned: int | None = plan.get("cells")
    files = tuple(n for n in ("cells.parquet", "curves.parquet", "points.csv") if (folder / n).is_file())
    cells, curves = (
        read_parquet(folder / name, fix=AGAIN) if name in files else None
        for name in ("cells.parquet", "curves.parquet")
    )
    known = set(cells.column("cell").to_pylist()) if cells is not None and "cell" in cells.column_names else set()
    if cells is not None:  # the tables may still be those of an earlier plan
        total, cells = cells.num_rows, filter_planned_cells(cells, plan)
        if cells.num_rows < total and curves is not None and "cell" in curves.column_names:
            curves = curves.filter(pc.is_in(curves.column("cell"), value_set=cells.column("cell").combine_chunks()))
    late: list[Path] = []
    if cells is None or (planned is not None and cells.num_rows < planned):
        late = [f.parent for f in sorted((folder / "cells").glob(f"*/{RESULT}")) if f.parent.name not in known]
    rows = filter_planned_rows(map(_result_row, late), plan)
    requested = plan.get("metric")
    metric = loss_form(requested) if isinstance(requested, str) and requested in METRICS else None
    cells = _with_metric_loss(concat_tables([cells], rows), metric)
    axes, fixed = _split_axes(cells, plan)
    together: list[CoupledAxis] = []
    if plan.get("design") == "paired":
        axes, together = _split_coupled_axes(cells, axes)
    curves = concat_tables([curves], _read_late_traces(folder, [str(row["cell"]) for row in rows], cells, axes, curves))
    # Steps restart in each stage, and only the last one trains on the task's labels.
    if "stage" in curves.column_names and len(stages := curves.column("stage").unique()) > 1:
        curves = curves.filter(pc.equal(curves.column("stage"), stages[-1]))
    trace = SweepTable(curves, (*axes, STEP)) if STEP in curves.column_names and curves.num_rows else None
    search, level = plan.get("bisection"), plan.get("level")
    data = SweepData(
        cells,
        axes,
        fixed=fixed,
        trace=trace,
        design=str(plan.get("design") or "grid"),
        planned=planned,
        files=files,
        stability=stability_threshold(_adam_beta1(folder / "recipe.resolved.yaml")),
        searched=searched,
        together=together,
        planned_seeds=plan["seeds"] if isinstance(plan.get("seeds"), int) else None,
        epsilon=(_valid_epsilon(search) if isinstance(search, dict) else None) or epsilon or INTERPOLATION,
        # the plan's share of 5 % at this look (`flatshift.experiments.statistics.peak`)
        level=float(level) if isinstance(level, float) and 0 < level < 0.5 else 0.05,
        metric=metric,
    )
    add_derived_metrics(data)
    return data


def concat_tables(tables: Sequence[pa.Table | None], rows: list[dict[str, Any]]) -> pa.Table:
    """Return tables, and rows after them, as one; a column of mixed types becomes text."""
    existing = [table for table in tables if table is not None]
    if rows or not existing:
        existing.append(rows_to_table(rows))
    try:
        return pa.concat_tables(existing, promote_options="permissive") if len(existing) > 1 else existing[0]
    except pa.ArrowException:  # a column is text in one and a number in the other
        return rows_to_table([row for table in existing for row in table.to_pylist()])


def rows_to_table(rows: list[dict[str, Any]]) -> pa.Table:
    """Return rows as a table: columns in order of appearance, null where a row lacks one."""
    names = list(dict.fromkeys(key for row in rows for key in row))
    return pa.table({name: to_array([row.get(name) for row in rows]) for name in names})


def write_cells(out: Path, rows: list[dict[str, Any]]) -> None:
    """Write cells.parquet and points.csv of these rows, each atomically."""
    table = rows_to_table(rows)
    with atomic_file(out / CELLS) as temporary:
        pq.write_table(table, temporary)
    with atomic_file(out / POINTS) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, table.column_names, restval="")
        writer.writeheader()
        writer.writerows(rows)


def to_array(values: list[Any]) -> pa.Array:
    """Return values as a column; as text if they are lists or of incompatible types."""
    try:
        column = pa.array(values)
        if not pa.types.is_nested(column.type):
            return column
    except (pa.ArrowException, TypeError):
        pass
    values = [", ".join(map(str, v)) if isinstance(v, list | tuple) else v for v in values]
    return pa.array([None if v is None else str(v) for v in values])


def _with_metric_loss(table: pa.Table, metric: str | None) -> pa.Table:
    """Add the loss form of the requested metric, 1 − its value, where only the metric itself was measured."""
    if metric is None or metric in METRICS:
        return table
    score = next(name for name in METRICS if loss_form(name) == metric)
    for split in SPLITS:
        name = f"{split}.{metric}"
        if f"{split}.{score}" in table.column_names and name not in table.column_names:
            table = table.append_column(name, pa.array(1 - float_column(table, f"{split}.{score}")))
    return table


def _result_row(directory: Path) -> dict[str, Any]:
    result = read_result(directory)
    assert result is not None
    try:
        row = {"cell": directory.name, **result["point"], "seed": result["seed"]}
        row |= {key: result.get(key) for key in ("status", "reason", "seconds", "flatshift")}
        return row | result_metrics(result)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{directory / RESULT}: not a cell result; delete it and run the sweep again") from error


def add_derived_metrics(data: SweepData) -> None:
    """Add `grad.norm` = √(‖gA‖² + ‖gB‖²) and `sharpness.ratio` = lr·λ_max / `data.stability` to trace and cells.

    A cell's value is the largest of its trace: of the gradient over the second half of its steps (the first steps from
    B = 0 are large for every rank), of the sharpness over all. A failed cell has none.
    """
    trace = data.trace
    if trace is None:
        return
    cells, steps = np.full(len(trace), -1), trace.column(STEP)  # −1: a row whose cell is not in the table
    if "cell" in data.table.column_names and "cell" in trace.table.column_names:
        rows = pc.index_in(trace.table.column("cell"), value_set=data.table.column("cell").combine_chunks())
        cells = rows.fill_null(-1).to_numpy().astype(np.int64)

    def add(name: str, values: np.ndarray, rows: np.ndarray) -> None:
        trace.add(name, values)
        largest, rows = np.full(len(data), -np.inf), rows & np.isfinite(values)
        np.maximum.at(largest, cells[rows], values[rows])
        data.add(name, np.where(data.finished & np.isfinite(largest), largest, np.nan))

    if trace.has("grad.a") and trace.has("grad.b"):
        last = np.full(len(data), -1.0)
        known = (cells >= 0) & np.isfinite(steps)  # steps that a failed cell did not reach have no values
        np.maximum.at(last, cells[known], steps[known])
        add(GRADIENT, np.hypot(trace.column("grad.a"), trace.column("grad.b")), known & (steps >= last[cells] / 2))
    if trace.has("sharpness.preconditioned") and trace.has("lr"):
        add(SHARPNESS, trace.column("sharpness.preconditioned") * trace.column("lr") / data.stability, cells >= 0)


SPLITS = ("train", "dev", "test")
_RECORDED = ("grad.", "update.", "sharpness.")
_OWN = frozenset({"cell", "seed", "status"})


def _split_axes(table: pa.Table, plan: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Return (columns that vary, {column: value} of those that do not) among the plan's keys, the searched one too."""
    declared = [c for c in table.column_names if c not in _OWN and "." in c and not _is_metric_column(c)]
    if plan:
        search = plan.get("bisection")
        searched = [str(search["key"])] if isinstance(search, dict) and "key" in search else []
        declared = list(dict.fromkeys([*plan["grid"], *searched]))
    levels = {c: encode_column(table, c)[0] for c in declared} if table.num_rows else {}
    return [c for c, v in levels.items() if len(v) > 1], {c: v[0] for c, v in levels.items() if len(v) == 1}


def _is_metric_column(column: str) -> bool:
    head, _, tail = column.partition(".")
    return column.startswith(_RECORDED) or (head in SPLITS and tail.split(".")[0] in METRICS)


def _split_coupled_axes(table: pa.Table, axes: list[str]) -> tuple[list[str], list[CoupledAxis]]:
    """Return (axes of a paired design to draw along, those that move with the first of them).

    The first is the rank, else a numeric axis.
    """
    cells = SweepTable(table, axes)
    leader = min(axes, key=lambda a: (not a.endswith("rank"), not cells.numeric(a), axes.index(a)), default=None)
    if leader is None:
        return axes, []
    pairs = {a: [(s[leader], s[a]) for s in cells.settings([leader, a])] for a in axes if a != leader}
    together = [CoupledAxis(a, leader, dict(p)) for a, p in pairs.items() if len(p) == len(cells.levels(leader))]
    moving = {coupled.axis for coupled in together}
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


def _valid_epsilon(record: Mapping[str, Any]) -> float | None:
    """Return the mean train error up to which a bisection counts rows as fitted."""
    epsilon = record.get("epsilon")
    return float(epsilon) if isinstance(epsilon, int | float) and 0 < epsilon < 1 else None


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


def _read_bisection(path: Path) -> tuple[list[dict[str, Any]], float | None]:
    """Return (points, ε) of emc.json, each with `point`, `emc`, `low`, `high`, `side`, `tried`; empty without it."""
    if not path.is_file():
        return [], None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        keys = ("point", "emc", "low", "high", "side", "tried")
        points = [{key: point[key] for key in keys} for point in document["points"]]
        tried = [point["tried"] for point in points]
        if not all(tried) or any(not isinstance(trial["rows"], int) for trials in tried for trial in trials):
            raise ValueError("no rows")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: not what a bisection writes; {AGAIN}") from error
    return points, _valid_epsilon(document)


def _adam_beta1(recipe: Path) -> float:
    """Return Adam's first decay rate from the recipe; 0.9 by default."""
    import yaml

    try:
        betas = yaml.safe_load(recipe.read_text(encoding="utf-8"))["optimizer"]["betas"]
        return float(betas[0])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, IndexError):
        return 0.9


def _read_late_traces(
    folder: Path, late: Sequence[str], cells: pa.Table, axes: Sequence[str], curves: pa.Table | None
) -> list[dict[str, Any]]:
    """Return the rows that curves.parquet lacks: the traces of the `late` cells.

    A cell that failed or stopped early gets rows without metrics for the planned steps it did not reach: those of its
    trace.json or, if it ended before that was written, the steps that others recorded.

    Raises UserError: a line that is not a JSON object, other than a torn last one.
    """
    if not late:
        return []
    names = [name for name in ("cell", "seed", "status", *axes) if name in cells.column_names]
    records = {record["cell"]: record for record in cells.select(names).to_pylist()}
    traces = {cell: read_trace(folder / "cells" / cell) for cell in late}
    known = {int(line[STEP]) for lines in traces.values() for line in lines if STEP in line}
    if curves is not None and STEP in curves.column_names:
        known |= {int(step) for step in curves.column(STEP).unique().to_pylist() if step is not None}
    rows = []
    for cell, lines in traces.items():
        record = records[cell]
        status = record.pop("status")
        planned = _planned_steps(folder / "cells" / cell)
        if planned is None:
            planned = [] if status == "done" else sorted(known)
        lines = align_to_plan(lines, planned, unreached_status(status)) if planned else lines
        rows += [{**record, **line} for line in lines]
    return rows


def _planned_steps(folder: Path) -> list[int] | None:
    try:
        steps = json.loads((folder / ABOUT).read_text(encoding="utf-8"))["steps"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return steps if isinstance(steps, list) else None
