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

from flatshift.experiments.statistics.intervals import Interval
from flatshift.finetune.data.example import document_place
from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate.bootstrap import ResampledMetric, group_interval, ratio_statistic
from flatshift.finetune.evaluate.metrics import find_metric
from flatshift.finetune.evaluate.prediction_metrics import classification_metrics, regression_metrics
from flatshift.finetune.run_directory import resume_command

NAME = "predictions.parquet"
_LONG = ("text", "reference", "answer")
_TEXTS = {"split", "row", "label", "predicted", "probability"}
_RESAMPLES = 1000
_EXPONENTIALS = {"perplexity": "loss", "pseudo_perplexity": "loss"}
_LOSSES = {"loss", *_EXPONENTIALS}


@dataclass(frozen=True)
class Predictions:
    """Rows of one split, with the non-empty columns of `flatshift.finetune.evaluate.evaluator.Evaluator.columns`.

    table: all rows, without the long text columns. shown: complete rows whose text was kept: the first ones of the
    split. mean: of the training targets, for a regression.
    """

    table: pa.Table
    shown: list[dict[str, Any]] = field(default_factory=list)
    mean: float = 0.0

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
        counts = dict.fromkeys(self.table["predicted"].unique().to_pylist(), 0)
        for label in self.table["label"].value_counts().to_pylist():
            counts[label["values"]] = label["counts"]
        return sorted(counts, key=lambda name: (-counts[name], name))

    @cached_property
    def confusion(self) -> np.ndarray:
        """(K, K) counts by true class (first axis) and predicted class, in the order of `classes`."""
        counts = np.zeros((len(self.classes), len(self.classes)), dtype=np.int64)
        np.add.at(counts, tuple(self._codes(self.table)), 1)
        return counts

    def _codes(self, rows: pa.Table) -> list[np.ndarray]:
        known = pa.array(self.classes, pa.string())
        return [compute.index_in(rows[name], known).to_numpy() for name in ("label", "predicted")]

    def index_rows(self) -> dict[str, int]:
        """Return the index of each row by its file and line."""
        return {row: i for i, row in enumerate(self.table["row"].to_pylist())}

    def figures(self, rows: list[int]) -> dict[str, ResampledMetric]:
        """Return every metric these rows determine, in a form that can be evaluated on any resample of them; of pieces,
        on any resample of their documents."""
        metrics: dict[str, ResampledMetric] = {}
        table = self.table.take(rows)
        codes: dict[str, int] = {}
        documents = [codes.setdefault(document_place(row), len(codes)) for row in table["row"].to_pylist()]
        for name in table.column_names:
            if name in _TEXTS or name.endswith(".count"):
                continue
            columns = [table[column] for column in (name, f"{name}.count") if column in self]
            if any(column.null_count for column in columns):
                continue
            sums = [column.cast(pa.float64()).to_numpy() for column in columns]
            sums += [np.ones(len(rows))] * (2 - len(sums))
            sums = [np.bincount(documents, weights=values) for values in sums]
            metrics[name] = ResampledMetric.over(sums, ratio_statistic())
            for exponential, loss in _EXPONENTIALS.items():
                if loss == name and f"{name}.count" in self:
                    metrics[exponential] = ResampledMetric.over(sums, ratio_statistic(np.exp))
        # Only `figures` is used, so a single resample is enough.
        draw: dict[str, Any] = {"resamples": 1, "confidence": 0.95, "seed": 0}
        if self.of_classes:
            classification_metrics(*(codes.tolist() for codes in self._codes(table)), figures=metrics, **draw)
        elif {"label", "predicted"} <= set(table.column_names):
            pair = (table[name].to_numpy() for name in ("label", "predicted"))
            regression_metrics(*pair, mean=self.mean, figures=metrics, **draw)
        return metrics


def read_predictions(run: Path, name: str = NAME) -> dict[str, Predictions]:
    """Return split → predictions, read batch by batch; empty if the run has none. Raises UserError if unreadable."""
    file = run / name
    if not file.is_file():
        return {}
    narrow: dict[str, list[pa.Table]] = {}
    complete: dict[str, list[dict[str, Any]]] = {}
    try:
        with pq.ParquetFile(file) as source:
            names = source.schema_arrow.names
            if missing := {"split", "row"} - {*names}:
                raise UserError(f"{file}: no column {min(missing)!r}; make the run again")
            for batch in source.iter_batches():
                rows = pa.Table.from_batches([batch])
                for split in rows["split"].unique().to_pylist():
                    split_rows = rows.filter(compute.field("split") == split)
                    short = [column for column in names if column not in _LONG]
                    narrow.setdefault(split, []).append(split_rows.select(short))
                    texts = split_rows.filter(compute.field("text").is_valid()).to_pylist() if "text" in names else []
                    complete.setdefault(split, []).extend(texts)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file}: not a readable Parquet file; run `{resume_command(run)}` again") from error
    predictions = {}
    for split, parts in narrow.items():
        table = pa.concat_tables(parts)
        filled = [one for one in table.column_names if table[one].null_count < len(table)]
        predictions[split] = Predictions(table.select(filled), complete[split])
    return predictions


@dataclass(frozen=True)
class Difference(Interval):
    """Metric of one run minus another's. paired: on the same `n` rows, by one bootstrap over them."""

    low: float | None = None
    high: float | None = None
    n: int = 0
    paired: bool = False


@dataclass(frozen=True)
class RunEvaluation:
    """Comparable results of a run: eval.json of one split and, if kept, its per-row predictions.

    digest: SHA-256 of the files that the split was read from. loss: what the loss is of: only equal ones are
    comparable.
    """

    metrics: Mapping[str, Mapping[str, Any]]
    rows: Predictions | None = None
    digest: str = ""
    loss: tuple[Any, ...] = ()


def metric_differences(evaluation: RunEvaluation, base: RunEvaluation) -> dict[str, Difference]:
    """Return metric → `evaluation` minus `base` for metrics that both have, without baselines and without losses of
    different tasks or tokens.

    Paired if both kept per-row predictions and share rows. Otherwise computed from the two intervals as if the runs had
    been evaluated on different rows: half-widths add in squares, which is too wide if the rows are in fact the same.
    """
    paired = _paired_differences(evaluation, base)
    differences = {}
    for name, cell in evaluation.metrics.items():
        other_loss = name in _LOSSES and evaluation.loss != base.loss
        if name not in base.metrics or find_metric(name).is_floor or other_loss:
            continue
        if name in paired:
            differences[name] = paired[name]
            continue
        base_cell = base.metrics[name]
        value, base_value = float(cell["value"]), float(base_cell["value"])
        difference = value - base_value
        ends = [cell.get("low"), cell.get("high"), base_cell.get("low"), base_cell.get("high")]
        if any(end is None for end in ends):
            differences[name] = Difference(difference)
            continue
        low, high, base_low, base_high = (float(end) for end in ends if end is not None)
        down, up = math.hypot(value - low, base_high - base_value), math.hypot(high - value, base_value - base_low)
        differences[name] = Difference(difference, difference - down, difference + up)
    return differences


def _paired_differences(evaluation: RunEvaluation, base: RunEvaluation) -> dict[str, Difference]:
    if evaluation.rows is None or base.rows is None or evaluation.digest != base.digest:
        return {}
    rows, base_rows = evaluation.rows.index_rows(), base.rows.index_rows()
    shared = [row for row in rows if row in base_rows]
    if len(shared) < 2 or len(rows) != len(evaluation.rows) or len(base_rows) != len(base.rows):
        return {}
    figures = evaluation.rows.figures([rows[row] for row in shared])
    base_figures = base.rows.figures([base_rows[row] for row in shared])
    differences = {}
    for name in sorted(figures.keys() & base_figures.keys()):
        group = [np.arange(len(shared))]
        interval = group_interval(figures[name], group, base_figures[name], resamples=_RESAMPLES)
        if interval is not None and interval["value"] is not None:
            differences[name] = Difference(interval["value"], interval["low"], interval["high"], interval["n"], True)
    return differences
