"""Output files of a selection: scores of the whole pool, the selected records, and a map of both sides."""

from __future__ import annotations

import json
import lzma
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatshift.experiments.recipe.schema import Recipe, Select
from flatshift.experiments.select.pool import PoolAndTarget, select_settings
from flatshift.finetune.assets import pool_tags_path
from flatshift.finetune.atomic import json_text, to_json_values
from flatshift.finetune.data.rows import read_id
from flatshift.finetune.data.view import RowView, set_aside
from flatshift.finetune.seeds import derive_seed
from flatshift.selection.methods.base import Selector

if TYPE_CHECKING:
    import pyarrow as pa

_MAX_CHARACTERS = 600
"""Maximum characters of a target's text."""
_GROUP_ROWS = 1 << 16
"""Rows of scores.parquet written at a time."""
_FIT_ROWS = 4096
"""Rows of each side that the axes of the map are fitted on."""
_MAX_FEATURE = 1e30
"""Features beyond are drawn in units of the largest: coordinates are float32, their variances products."""


def write_selection(
    recipe: Recipe, directory: Path, sides: PoolAndTarget, selector: Selector, chosen: np.ndarray
) -> None:
    """Write scores.parquet and selected.jsonl, and map.parquet if there are vectors.

    chosen: row numbers, repeated for a row that is to be trained on more than once.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    spec = select_settings(recipe)
    rows, rank = sides.pool.rows, selector.ranks()
    scores = np.asarray(selector.scores_, dtype=np.float64)
    times = np.bincount(chosen, minlength=len(rank))
    selected = times > 0
    nearest = selector.nearest_target_
    table: dict[str, Any] = {
        "id": rows.ids,
        "score": scores,
        "rank": rank,
        "selected": selected,
        "times": times,
        "nearest_target": None if nearest is None else np.array([r.id for r in sides.target.rows], object)[nearest],
        "domain": sides.domains[0],
    }
    # In the order of `table`; a column that is None is null throughout.
    kinds = (pa.string(), pa.float64(), pa.int64(), pa.bool_(), pa.int32(), pa.string(), pa.string())
    schema = pa.schema(list(zip(table, kinds, strict=True)))
    with pq.ParquetWriter(directory / "scores.parquet", schema) as writer:
        for low in range(0, len(rank), _GROUP_ROWS):
            group = slice(low, min(low + _GROUP_ROWS, len(rank)))
            arrays = [
                pa.nulls(group.stop - low, kind) if column is None else pa.array(column[group], kind)
                for column, kind in zip(table.values(), kinds, strict=True)
            ]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
    _write_selected(directory, rows.take(chosen), scores[chosen], rank[chosen], spec)
    if nearest is not None:
        targets = [sides.target.rows[number] for number in dict.fromkeys(nearest[chosen].tolist())]
        with (directory / "targets.jsonl").open("w", encoding="utf-8") as handle:  # for the page
            for row in targets:
                text = " ".join(str(row.values.get("text", "")).split())
                handle.write(json_text({"id": row.id, "text": text[:_MAX_CHARACTERS]}) + "\n")
    if sides.x is not None and sides.y is not None:
        coordinates = project(sides.x, sides.y, selected, seed=derive_seed(recipe.train.seed, "map"), max_points=4000)
        pq.write_table(coordinates, directory / "map.parquet")
    if spec.pool.files == ("sample:pool",):
        _write_hidden_domains(directory, rows.ids)


def _write_selected(directory: Path, rows: RowView, scores: np.ndarray, ranks: np.ndarray, spec: Select) -> None:
    """Write the selected records in selection order, plus id, score and rank; colliding input keys move under `source`,
    or `source_2` where records have that. A repeated record has a line each time, with a new id and the record's id as
    `repeat_of`. The column that ids are read from has the line's id."""
    columns = spec.columns
    names: set[str] = set(rows.ids)
    written: set[str] = set()
    with (directory / "selected.jsonl").open("w", encoding="utf-8") as handle:
        for row, score, rank in zip(rows, scores, ranks, strict=True):
            added = {"id": row.id, "score": float(score), "rank": int(rank)}
            record = dict(row.record)
            if row.id in written:
                name = next(name for n in count(2) if (name := f"{row.id} ({n})") not in names)
                names.add(name)
                added |= {"id": name, "repeat_of": row.id}
            written.add(row.id)
            if columns.id in record and read_id(record[columns.id], columns.id) != added["id"]:
                record[columns.id] = added["id"]
            keys = {"id", "rank", "repeat_of", "score"} & record.keys() - {columns.id}
            differ = [key for key in keys if key not in added or record[key] != added[key]]
            set_aside(record, differ, (columns.text, spec.domain_column))
            handle.write(json_text(to_json_values({**record, **added}), default=str) + "\n")


def project(
    X: np.ndarray, Y: np.ndarray, selected: Sequence[int] | np.ndarray, *, seed: int, max_points: int = 4000
) -> pa.Table:
    """Principal-axis coordinates of a seeded sample of pool, selection and target.

    X: (N, d) pool features, may be a memmap (only sampled rows are read). Y: (M, d) target features. `selected`: row
    numbers of X, or a mask of length N. The axes are fitted on target and pool with half the weight each, so that a
    small target shapes them as much as a large pool. At most a quarter of `max_points` is target, a quarter selection,
    the rest unchosen pool.
    Returns a table with x, y (float32) and kind (pool, target, selection); the schema metadata
    `flatshift.explained` holds the shares of the weighted variance on the two axes. Deterministic in `seed`.
    Coordinates are in units of the features, or of the largest of them where float32 would be too small for those.
    Raises ValueError if the widths differ.
    """
    import pyarrow as pa

    if X.ndim != 2 or Y.ndim != 2 or X.shape[1] != Y.shape[1]:
        raise ValueError(f"pool features {X.shape} and target features {Y.shape} must be N×d and M×d with one d")
    rng = np.random.default_rng(derive_seed(seed, "report map"))

    def sample(rows: np.ndarray, count: int) -> np.ndarray:
        return rows if len(rows) <= count else np.sort(rng.choice(rows, count, replace=False))

    fits = [np.asarray(side[sample(np.arange(len(side)), _FIT_ROWS)], np.float64) for side in (X, Y)]
    chosen = np.asarray(selected)
    chosen = np.flatnonzero(chosen) if chosen.dtype == bool else np.unique(chosen.astype(np.int64))
    target = sample(np.arange(len(Y)), max_points // 4)
    selection = sample(chosen, max_points // 4)
    others = sample(np.setdiff1d(np.arange(len(X)), chosen), max_points - len(target) - len(selection))
    parts = [np.asarray(side[rows], np.float64) for side, rows in ((X, others), (X, selection), (Y, target))]
    if (largest := max(float(np.abs(rows).max(initial=0.0)) for rows in (*fits, *parts))) > _MAX_FEATURE:
        fits, parts = [rows / largest for rows in fits], [rows / largest for rows in parts]
    sides = [side for side in fits if len(side)]
    if not sides:
        raise ValueError("nothing to project: pool and target are empty")
    center = np.mean([side.mean(axis=0) for side in sides], axis=0)
    covariance = np.mean([(side - center).T @ (side - center) / len(side) for side in sides], axis=0)
    values, vectors = np.linalg.eigh(covariance)
    axes = vectors[:, ::-1][:, :2]
    # An eigenvector's sign is arbitrary: the largest component shall be positive.
    axes = axes * np.where(axes[np.abs(axes).argmax(axis=0), np.arange(axes.shape[1])] < 0, -1.0, 1.0)
    explained = np.maximum(values[::-1][:2], 0) / max(values.clip(min=0).sum(), np.finfo(float).tiny)
    if axes.shape[1] == 1:  # d = 1: a line
        axes, explained = np.hstack([axes, np.zeros_like(axes)]), np.append(explained, 0.0)

    xy = np.concatenate([(rows - center) @ axes for rows in parts]).astype(np.float32)
    kinds = [kind for rows, kind in zip(parts, ("pool", "selection", "target"), strict=True) for _ in rows]
    table = pa.table({"x": xy[:, 0], "y": xy[:, 1], "kind": kinds})
    return table.replace_schema_metadata({"flatshift.explained": json.dumps([round(float(e), 6) for e in explained])})


def _write_hidden_domains(directory: Path, ids: Sequence[str]) -> None:
    """Write the shipped pool's hidden tags (of pieces that of their text), for the report and after the selection."""
    with lzma.open(pool_tags_path(), "rt", encoding="utf-8") as tags:
        domains = dict(line.split("\t", 2)[:2] for line in tags)
    text = "".join(f"{name}\t{domains[name.partition('#')[0]]}\n" for name in ids)
    (directory / "judged_domains.tsv").write_text(text, encoding="utf-8")
