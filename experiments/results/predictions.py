"""Per-row predictions of a run (`predictions.parquet`), and metric differences of two runs on the same rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as pq

from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate.bootstrap import ResampledMetric, group_interval, ratio_statistic
from flatshift.finetune.evaluate.classes import classification_metrics
from flatshift.finetune.evaluate.metrics import find_metric
from flatshift.finetune.evaluate.regression import regression_metrics
from flatshift.finetune.run_directory import resume_command

NAME = "predictions.parquet"
_LONG = ("text", "reference", "answer")
_TEXTS = {"split", "row", "label", "predicted", "probability"}
_RESAMPLES = 1000
_EXPONENTIALS = {"perplexity": "loss", "pseudo_perplexity": "loss"}


@dataclass(frozen=True)
class Predictions:
    """Rows of one split, with the non-empty columns of `flatshift.finetune.evaluate.evaluator.Evaluator.said`."""

    table: pa.Table
    """All rows, without the long text columns."""
    shown: list[dict[str, Any]] = field(default_factory=list)
    """Complete rows whose text was kept: the first ones of the split."""
    mean: float = 0.0
    """Mean of the training targets, for a regression."""

    def __len__(self) -> int:
        return len(self.table)

    def __contains__(self, column: str) -> bool:
        return column in self.table.column_names

    @property
    def of_classes(self) -> bool:
        """True if rows have a class label and a predicted class."""
        return "label" in self and pa.types.is_string(self.table.schema.field("label").type)

    @cached_property
    def classes(self) -> list[str]:
        """Classes that occur as label or as prediction, most frequent labels first."""
        counted = {name: 0 for name in self.table["predicted"].unique().to_pylist()}
        for one in self.table["label"].value_counts().to_pylist():
            counted[one["values"]] = one["counts"]
        return sorted(counted, key=lambda name: (-counted[name], name))

    @cached_property
    def confusion(self) -> np.ndarray:
        """(K, K) counts by true class (first axis) and predicted class, in the order of `classes`."""
        found = np.zeros((len(self.classes), len(self.classes)), dtype=np.int64)
        np.add.at(found, tuple(self._codes(self.table)), 1)
        return found

    def _codes(self, rows: pa.Table) -> list[np.ndarray]:
        known = pa.array(self.classes, pa.string())
        return [compute.index_in(rows[name], known).to_numpy() for name in ("label", "predicted")]

    def by_row(self) -> dict[str, int]:
        """Return the index of each row by its file and line."""
        return {row: place for place, row in enumerate(self.table["row"].to_pylist())}

    def figures(self, rows: list[int]) -> dict[str, ResampledMetric]:
        """Return every metric these rows determine, in a form that can be evaluated on any resample of them."""
        made: dict[str, ResampledMetric] = {}
        taken = self.table.take(rows)
        for name in taken.column_names:
            if name in _TEXTS or name.endswith(".count"):
                continue
            columns = [taken[one] for one in (name, f"{name}.count") if one in self]
            if any(column.null_count for column in columns):
                continue
            sums = [column.cast(pa.float64()).to_numpy() for column in columns]
            sums += [np.ones(len(rows))] * (2 - len(sums))
            made[name] = ResampledMetric.over(sums, ratio_statistic())
            for other, of in _EXPONENTIALS.items():
                if of == name and f"{name}.count" in self:
                    made[other] = ResampledMetric.over(sums, ratio_statistic(np.exp))
        # Only `figures` is used, so a single resample is enough.
        draw: dict[str, Any] = {"resamples": 1, "confidence": 0.95, "seed": 0}
        if self.of_classes:
            classification_metrics(*(codes.tolist() for codes in self._codes(taken)), figures=made, **draw)
        elif {"label", "predicted"} <= set(taken.column_names):
            pair = (taken[name].to_numpy() for name in ("label", "predicted"))
            regression_metrics(*pair, mean=self.mean, figures=made, **draw)
        return made


def read_predictions(run: Path, name: str = NAME) -> dict[str, Predictions]:
    """Return split → predictions, read batch by batch; empty if the run has none. Raises UserError if unreadable."""
    file = run / name
    if not file.is_file():
        return {}
    narrow: dict[str, list[pa.Table]] = {}
    shown: dict[str, list[dict[str, Any]]] = {}
    try:
        with pq.ParquetFile(file) as source:
            names = source.schema_arrow.names
            if lost := {"split", "row"} - {*names}:
                raise UserError(f"{file}: no column {min(lost)!r}; make the run again")
            for batch in source.iter_batches():
                rows = pa.Table.from_batches([batch])
                for split in rows["split"].unique().to_pylist():
                    part = rows.filter(compute.field("split") == split)
                    narrow.setdefault(split, []).append(part.drop_columns([one for one in _LONG if one in names]))
                    whole = part.filter(compute.field("text").is_valid()) if "text" in names else part.slice(0, 0)
                    shown.setdefault(split, []).extend(whole.to_pylist())
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file}: not a readable Parquet file; run `{resume_command(run)}` again") from error
    found = {}
    for split, parts in narrow.items():
        table = pa.concat_tables(parts)
        filled = [one for one in table.column_names if table[one].null_count < len(table)]
        found[split] = Predictions(table.select(filled), shown[split])
    return found


@dataclass(frozen=True)
class Difference:
    """Metric of one run minus another's. paired: on the same rows, by one bootstrap over them."""

    value: float
    low: float | None = None
    high: float | None = None
    n: int = 0
    paired: bool = False

    @property
    def clear(self) -> bool:
        """True if the interval excludes zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


@dataclass(frozen=True)
class RunEvaluation:
    """Comparable results of a run: eval.json of one split and, if kept, its per-row predictions."""

    metrics: Mapping[str, Mapping[str, Any]]
    rows: Predictions | None = None
    digest: str = field(default="")
    """SHA-256 of the files that the split was read from."""


def metric_differences(one: RunEvaluation, other: RunEvaluation) -> dict[str, Difference]:
    """Return metric → `one` minus `other` for metrics that both have, baselines excluded.

    Paired if both kept per-row predictions and share rows. Otherwise computed from the two intervals as if the runs had
    been evaluated on different rows: half-widths add in squares, which is too wide if the rows are in fact the same.
    """
    paired = _paired_differences(one, other)
    found = {}
    for name, cell in one.metrics.items():
        if name not in other.metrics or find_metric(name).is_floor:
            continue
        if name in paired:
            found[name] = paired[name]
            continue
        theirs = other.metrics[name]
        value = float(cell["value"]) - float(theirs["value"])
        ends = [cell.get("low"), cell.get("high"), theirs.get("low"), theirs.get("high")]
        if any(end is None for end in ends):
            found[name] = Difference(value)
            continue
        low, high, below, above = (float(end) for end in ends if end is not None)
        down = math.hypot(float(cell["value"]) - low, above - float(theirs["value"]))
        up = math.hypot(high - float(cell["value"]), float(theirs["value"]) - below)
        found[name] = Difference(value, value - down, value + up)
    return found


def _paired_differences(one: RunEvaluation, other: RunEvaluation) -> dict[str, Difference]:
    if one.rows is None or other.rows is None or one.digest != other.digest:
        return {}
    mine, theirs = one.rows.by_row(), other.rows.by_row()
    shared = [row for row in mine if row in theirs]
    if len(shared) < 2 or len(mine) != len(one.rows) or len(theirs) != len(other.rows):
        return {}
    ours = one.rows.figures([mine[row] for row in shared])
    base = other.rows.figures([theirs[row] for row in shared])
    every = np.arange(len(shared))
    found = {}
    for name in sorted(ours.keys() & base.keys()):
        interval = group_interval(ours[name], [every], base[name], resamples=_RESAMPLES)
        if interval is not None and interval["value"] is not None:
            found[name] = Difference(interval["value"], interval["low"], interval["high"], len(shared), True)
    return found
