"""What a run said of each row (`predictions.parquet`), and the difference of two runs' figures on the same rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from finetune.errors import UserError
from finetune.evaluate.bootstrap import Figure, group_interval, ratio_statistic
from finetune.evaluate.classes import judge_classes
from finetune.evaluate.metrics import metric_of
from finetune.evaluate.regression import judge_numbers

NAME = "predictions.parquet"
_TEXTS = {"split", "row", "text", "label", "predicted", "probability", "reference", "answer"}
_RESAMPLES = 1000
_EXPONENTIALS = {"perplexity": "loss", "pseudo_perplexity": "loss"}


@dataclass(frozen=True)
class Predictions:
    """The rows of one split: columns by name, as `finetune.evaluate.judge.Judge.said` has them."""

    columns: dict[str, list[Any]]
    mean: float = 0.0
    """Of the training targets, of a regression."""

    def __len__(self) -> int:
        return len(self.columns["row"])

    @property
    def of_classes(self) -> bool:
        """Whether rows have a class, and were given one."""
        return isinstance(next((v for v in self.columns.get("label", []) if v is not None), None), str)

    @cached_property
    def classes(self) -> list[str]:
        """Classes that occur as label or as prediction, most labels first."""
        labels = self.columns["label"]
        counted = {name: labels.count(name) for name in {*labels, *self.columns["predicted"]}}
        return sorted(counted, key=lambda name: (-counted[name], name))

    @cached_property
    def confusion(self) -> np.ndarray:
        """(K, K) rows of each class (first) that were given each class (second), in the order of `classes`."""
        place = {name: number for number, name in enumerate(self.classes)}
        found = np.zeros((len(place), len(place)), dtype=np.int64)
        codes = [[place[name] for name in self.columns[column]] for column in ("label", "predicted")]
        np.add.at(found, tuple(np.array(code, dtype=np.int64) for code in codes), 1)
        return found

    def by_row(self) -> dict[str, int]:
        """Place of each row by its file and line."""
        return {str(row): place for place, row in enumerate(self.columns["row"])}

    def figures(self, rows: list[int]) -> dict[str, Figure]:
        """Every metric that these rows tell, as what can be asked of any draw of them."""
        made: dict[str, Figure] = {}
        for name, values in self.columns.items():
            if name in _TEXTS or name.endswith(".count"):
                continue
            counts = self.columns.get(f"{name}.count", [1.0] * len(self))
            sums = [[column[row] for row in rows] for column in (values, counts)]
            if any(value is None for column in sums for value in column):
                continue
            made[name] = Figure.over(sums, ratio_statistic())
            for other, of in _EXPONENTIALS.items():
                if of == name and f"{name}.count" in self.columns:
                    made[other] = Figure.over(sums, ratio_statistic(np.exp))
        draw: dict[str, Any] = {"resamples": 1, "confidence": 0.95, "seed": 0}
        pair = [[self.columns[name][row] for row in rows] for name in ("label", "predicted") if name in self.columns]
        if self.of_classes:
            codes = {name: number for number, name in enumerate(self.classes)}
            judge_classes(*([codes[name] for name in side] for side in pair), figures=made, **draw)
        elif len(pair) == 2:
            judge_numbers(*(np.array(side) for side in pair), mean=self.mean, figures=made, **draw)
        return made


def read_predictions(run: Path, name: str = NAME) -> dict[str, Predictions]:
    """Split → rows; empty where the run has none. Raises UserError for a file that cannot be read."""
    file = run / name
    if not file.is_file():
        return {}
    try:
        table = pq.read_table(file).to_pydict()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file}: not a readable Parquet file; run `flatshift train --resume {run}` again") from error
    if lost := {"split", "row"} - table.keys():
        raise UserError(f"{file}: no column {min(lost)!r}; make the run again")
    found: dict[str, list[int]] = {}
    for place, split in enumerate(table["split"]):
        found.setdefault(str(split), []).append(place)
    return {
        split: Predictions(
            {k: [v[place] for place in places] for k, v in table.items() if any(v[p] is not None for p in places)}
        )
        for split, places in found.items()
    }


@dataclass(frozen=True)
class Difference:
    """A figure of one run minus another's. paired: on the same rows, by one bootstrap over them."""

    value: float
    low: float | None = None
    high: float | None = None
    n: int = 0
    paired: bool = False

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


@dataclass(frozen=True)
class Judged:
    """What of a run is compared: eval.json of one split and, where they were kept, its rows."""

    metrics: Mapping[str, Mapping[str, Any]]
    rows: Predictions | None = None
    digest: str = field(default="")
    """Of the files that the split was read from."""


def differences(one: Judged, other: Judged) -> dict[str, Difference]:
    """Metric → `one` minus `other`, of the metrics that both have and that are no floors.

    Paired where both kept what they said of each row and share rows; else from the two intervals as if the runs had
    been judged on different rows: half-widths add in squares, which is too wide for the same rows.
    """
    paired = _paired(one, other)
    found = {}
    for name, cell in one.metrics.items():
        if name not in other.metrics or metric_of(name).is_floor:
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


def _paired(one: Judged, other: Judged) -> dict[str, Difference]:
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
