"""Columns of a sweep: rows that match a setting, and means with intervals over seeds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from flatshift.experiments.results.cells import FITS
from flatshift.experiments.statistics.curve import Lost
from flatshift.experiments.statistics.intervals import Interval, paired_difference, t_interval
from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate.metrics import find_metric

Setting = Mapping[str, Any]
"""Axis → value."""
_DENSE = 4_000_000  # combinations of levels counted in an array; codes of more are sorted, which is slower


@dataclass(frozen=True)
class SeedMatrix:
    """Values of one metric along an axis by seed: `y[s, j]` is that of `seeds[s]` at `values[j]`, NaN if missing.

    present: bool [S, J], True if there is a row at all, finished or failed. lost: True if that row is not finished.
    diverged: True if its run diverged.
    """

    values: tuple[Any, ...]
    seeds: tuple[Any, ...]
    y: np.ndarray
    present: np.ndarray
    lost: np.ndarray
    diverged: np.ndarray


class SweepTable:
    """One row per cell, or per cell and recorded step; `axes` are the columns that make up a setting.

    A value that is not finite counts as not measured; only finished rows are read (`status` done, or no status).
    """

    loss_unit = "nats"

    def __init__(self, table: pa.Table, axes: Sequence[str]) -> None:
        self.table = table
        self.axes: Sequence[str] = tuple(axes)
        self._levels: dict[str, list[Any]] = {}
        self._codes: dict[str, np.ndarray] = {}
        for axis in (*self.axes, "seed"):
            self._levels[axis], self._codes[axis] = encode_column(table, axis)
        self._columns: dict[str, np.ndarray] = {}
        self._rows: dict[tuple, np.ndarray] = {}
        known = "status" in table.column_names
        status = np.array(table.column("status").to_pylist() if known else [None] * table.num_rows, dtype=object)
        self.finished = np.array([value in (None, "done") for value in status], dtype=bool)
        self._stopped, self._diverged = status == "stopped early", status == "diverged"

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def seeds(self) -> int:
        return len(self._levels["seed"])

    @property
    def fitted_column(self) -> str:
        """Return the column that places the interpolation threshold."""
        return next((column for column in FITS if self.has(column)), "train.error")

    @property
    def fit_name(self) -> str:
        """Return the name of what `fitted_column` measures, for sentences."""
        return FITS[self.fitted_column]

    def levels(self, axis: str) -> list[Any]:
        """Return the distinct values of an axis: None first, numbers in order, else in order of appearance."""
        return self._levels[axis]

    def values(self, axis: str) -> list[Any]:
        """Return `levels` without None."""
        return [v for v in self._levels[axis] if v is not None]

    def numeric(self, axis: str) -> bool:
        """True if the axis has values and all are numbers."""
        values = self.values(axis)
        return bool(values) and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)

    def column(self, name: str) -> np.ndarray:
        """Return float64 [N]: a column's value in every row, NaN if it was not measured or is not finite."""
        if name not in self._columns:
            values = float_column(self.table, name)
            self._columns[name] = np.where(np.isfinite(values) & self.finished, values, np.nan)
        return self._columns[name]

    def add(self, name: str, values: np.ndarray) -> None:
        """Add a column [N] computed from others."""
        self._columns[name] = values

    def has(self, name: str) -> bool:
        """True if any row has a value in the column."""
        return bool(np.isfinite(self.column(name)).any())

    def rows(self, setting: Setting) -> np.ndarray:
        """Return int64 [n]: indices of the rows that match `setting`, in file order."""
        key = tuple(sorted((axis, repr(value)) for axis, value in setting.items()))
        if key not in self._rows:
            mask = np.ones(len(self), dtype=bool)
            for axis, value in setting.items():
                levels = self._levels[axis]
                mask &= self._codes[axis] == (levels.index(value) if value in levels else -1)
            self._rows[key] = np.flatnonzero(mask)
        return self._rows[key]

    def curve(self, column: str, axis: str, setting: Setting) -> list[tuple[Any, Interval]]:
        """Return (axis value, interval) along `axis` at `setting` of the other axes; unmeasured values are skipped."""
        rows = self.rows(setting)
        figures, codes = self.column(column)[rows], self._codes[axis][rows]
        good = np.isfinite(figures)
        order = np.argsort(codes[good], kind="stable")
        figures, codes = figures[good][order], codes[good][order]
        groups = np.split(figures, np.searchsorted(codes, np.arange(1, len(self._levels[axis]))))
        points = [(v, metric_interval(column, groups[c])) for c, v in enumerate(self._levels[axis]) if v is not None]
        return [(v, p) for v, p in points if p is not None]

    def points(self, column: str, axis: str, setting: Setting) -> tuple[list[Any], list[float]]:
        """Return (axis values, metric values) of the single rows that match `setting`."""
        rows = self.rows(setting)
        figures = self.column(column)[rows]
        keep = np.isfinite(figures) & np.array([self._levels[axis][c] is not None for c in self._codes[axis][rows]])
        return [self._levels[axis][c] for c in self._codes[axis][rows][keep]], figures[keep].tolist()

    def matrix(self, column: str, axis: str, setting: Setting) -> SeedMatrix:
        """Return values by seed and axis value, only at axis values for which `setting` has rows (finished or not).

        If several rows share a seed and a value (an axis that `setting` does not hold), the last one counts.
        """
        rows = self.rows(setting)
        seeds, codes = self._codes["seed"][rows], self._codes[axis][rows]
        levels, names = self._levels[axis], self._levels["seed"]
        columns = [c for c in np.unique(codes).tolist() if levels[c] is not None]
        y = np.full((len(names), len(levels)), np.nan)
        present, lost, diverged = (np.zeros(y.shape, dtype=bool) for _ in range(3))
        y[seeds, codes] = self.column(column)[rows]
        present[seeds, codes] = True
        lost[seeds, codes] = ~self.finished[rows]
        diverged[seeds, codes] = self._diverged[rows]
        used = np.unique(seeds).tolist()
        cells = np.ix_(used, columns)
        values, seeds = tuple(levels[c] for c in columns), tuple(names[s] for s in used)
        return SeedMatrix(values, seeds, y[cells], present[cells], lost[cells], diverged[cells])

    def lost(self, setting: Setting) -> Lost:
        """Return one word for the fate of all unfinished runs of `setting`."""
        rows = self.rows(setting)
        rows = rows[~self.finished[rows]]
        if self._diverged[rows].all():
            return "diverged"
        if self._stopped[rows].all():
            return "stopped early"
        return "ended early" if (self._diverged | self._stopped)[rows].all() else "failed"

    def grid(self, column: str, x: str, y: str, setting: Setting) -> np.ndarray:
        """Return float64 [Y, X]: mean over the rows of each pair of axis values, NaN if there is none."""
        rows = self.rows(setting)
        figures = self.column(column)[rows]
        good = np.isfinite(figures)
        wide, high = len(self._levels[x]), len(self._levels[y])
        flat = self._codes[y][rows][good] * wide + self._codes[x][rows][good]
        count = np.bincount(flat, minlength=wide * high)
        total = np.bincount(flat, weights=figures[good], minlength=wide * high)
        with np.errstate(invalid="ignore"):
            mean = np.where(count > 0, total / np.maximum(count, 1), np.nan).reshape(high, wide)
        return mean[np.ix_(*([i for i, v in enumerate(self._levels[axis]) if v is not None] for axis in (y, x)))]

    def settings(self, axes: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Return every combination of values of `axes` (default: all) that was run, in the order of their levels."""
        names = list(self.axes if axes is None else axes)
        if not len(self):
            return []
        if not names:
            return [{}]
        codes = self._distinct(names, np.ones(len(self), dtype=bool))
        return [{a: self._levels[a][c] for a, c in zip(names, row, strict=True)} for row in codes.tolist()]

    def _distinct(self, axes: Sequence[str], keep: np.ndarray) -> np.ndarray:
        """Return int64 [n, axes]: codes of every combination of values of `axes` among the rows `keep`, in order."""
        sizes = [len(self._levels[a]) for a in axes]
        columns = [self._codes[a][keep] for a in axes]
        if math.prod(sizes) > _DENSE:
            return np.unique(np.column_stack(columns), axis=0)
        flat = np.flatnonzero(np.bincount(np.ravel_multi_index(columns, sizes), minlength=1))
        return np.column_stack(np.unravel_index(flat, sizes))

    def reach(self, column: str, axis: str) -> list[tuple[dict[str, Any], int]]:
        """Return (setting of the other axes, number of measured `axis` values) of settings with any, in order."""
        others = [a for a in self.axes if a != axis]
        levels = np.array([value is not None for value in self._levels[axis]], dtype=bool)
        good = np.isfinite(self.column(column)) & levels[self._codes[axis]]
        if not good.any():
            return []
        codes = self._distinct([*others, axis], good)[:, :-1].tolist()
        return [
            ({a: self._levels[a][c] for a, c in zip(others, key, strict=True)}, len(list(same)))
            for key, same in itertools.groupby(codes)
        ]

    def seeds_each(self) -> tuple[int, int]:
        """Return (fewest, most) seeds of which a setting has a row, finished or failed; (0, 0) without rows."""
        if not len(self):
            return 0, 0
        codes = np.unique(np.column_stack([self._codes[a] for a in (*self.axes, "seed")]), axis=0)
        counts = np.unique(codes[:, :-1], axis=0, return_counts=True)[1]
        return int(counts.min()), int(counts.max())

    def means(self, column: str) -> list[tuple[dict[str, Any], Interval]]:
        """Return (setting, interval) of every measured setting."""
        figures = self.column(column)
        means = [(setting, metric_interval(column, figures[rows])) for setting, rows in self._measured_rows(column)]
        return [(setting, interval) for setting, interval in means if interval is not None]

    def _measured_rows(self, column: str) -> list[tuple[dict[str, Any], np.ndarray]]:
        """Return (setting, indices of its rows with a value of `column`), in one pass over the rows."""
        good = np.flatnonzero(np.isfinite(self.column(column)))
        if not len(good):
            return []
        codes = np.column_stack([self._codes[a][good] for a in self.axes] or [np.zeros(len(good), dtype=np.int64)])
        keys, groups = np.unique(codes, axis=0, return_inverse=True)
        order = np.argsort(groups.ravel(), kind="stable")
        starts = np.searchsorted(groups.ravel()[order], np.arange(1, len(keys)))
        return [
            ({a: self._levels[a][c] for a, c in zip(self.axes, key, strict=False)}, rows)
            for key, rows in zip(keys.tolist(), np.split(good[order], starts), strict=True)
        ]

    def best(self, column: str) -> tuple[dict[str, Any], Interval] | None:
        """Return the setting with the lowest mean of `column`, and that mean; None if nothing was measured.

        A setting of which a seed diverged is behind all others: the mean of its other seeds flatters it.
        """
        means = self.means(column)
        return min(means, key=lambda item: (self._diverges(item[0]), item[1].value)) if means else None

    def _diverges(self, setting: Setting) -> bool:
        return bool(self._diverged.any() and self._diverged[self.rows(setting)].any())

    def ties(self, column: str) -> list[dict[str, Any]]:
        """Return the other settings that tie with the `best` one: the 95 % interval of their difference, paired by
        seed, holds zero. A single seed ties only with an equal value."""
        best = self.best(column)
        if best is None:
            return []
        figures, seeds = self.column(column), self._codes["seed"]
        by_seed = [
            (setting, dict(zip(seeds[rows].tolist(), figures[rows].tolist(), strict=True)))
            for setting, rows in self._measured_rows(column)
        ]
        lowest = next(values for setting, values in by_seed if setting == best[0])
        ties = []
        for setting, values in by_seed:
            difference = paired_difference(values, lowest)
            if setting != best[0] and difference is not None and not self._diverges(setting):
                low, high = (difference.value if end is None else end for end in (difference.low, difference.high))
                if low <= 0 <= high:  # not where all seeds differ alike: too little for a claim, but no tie
                    ties.append(setting)
        return ties


def metric_interval(column: str, values: Any) -> Interval | None:
    """Return the t-interval of a metric's values, clipped to its bounds; None for no values."""
    if values is None or not len(values):
        return None
    return t_interval(values.tolist(), bounds=find_metric(column.partition(".")[2]).bounds)


def encode_column(table: pa.Table, name: str) -> tuple[list[Any], np.ndarray]:
    """Return (levels, int64 codes [N]) of a column: None first, then numbers in order and NaN last, or the others in
    order of appearance. Lists become text, so that they can be compared and grouped."""
    column = table.column(name).combine_chunks() if name in table.column_names else pa.nulls(table.num_rows)
    if pa.types.is_nested(column.type):
        column = pa.array([", ".join(map(str, v)) if v is not None else None for v in column.to_pylist()], pa.string())
    if pa.types.is_null(column.type):
        return [None], np.zeros(table.num_rows, dtype=np.int64)
    encoded = column.dictionary_encode(null_encoding="encode")
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    levels = encoded.dictionary.to_pylist()
    numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in levels if v is not None)

    def sort_key(i: int) -> tuple[bool, bool, float]:
        value = levels[i]
        if value is None or not numeric:
            return value is not None, False, i
        return True, math.isnan(value), 0 if math.isnan(value) else value

    order = sorted(range(len(levels)), key=sort_key)
    codes = np.empty(max(len(levels), 1), dtype=np.int64)
    codes[order] = np.arange(len(levels))
    return [levels[i] for i in order], codes[encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)]


def read_parquet(path: Path, *, fix: str, columns: Sequence[str] = ()) -> pa.Table:
    """Read a Parquet file. Raises UserError that advises `fix` if it is unreadable or lacks one of `columns`."""
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable Parquet file; {fix}") from error
    if missing := [column for column in columns if column not in table.column_names]:
        raise UserError(f"{path}: no column {missing[0]!r} (has {', '.join(table.column_names)}); {fix}")
    return table


def float_column(table: pa.Table, name: str) -> np.ndarray:
    """Return a column as float64 [N]; NaN for nulls, and all NaN for a missing or non-numeric column."""
    column = table.column(name) if name in table.column_names else None
    if column is None or not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        return np.full(table.num_rows, np.nan)
    return column.cast(pa.float64()).to_numpy().astype(np.float64)
