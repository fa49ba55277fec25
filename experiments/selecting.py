"""The selection journey: pool and target in, a directory with scores, chosen records and a report out.

flatshift select --pool pool.jsonl --target target.jsonl --budget 500 --out selection
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from experiments.cleaning import clean_rows
from experiments.config import Recipe, Select
from experiments.console import Console
from experiments.methods import backbone_surprise, check_method, watched
from experiments.preparing import read_splits
from experiments.recipe import Resolved
from finetune.atomic import replacing_directory, write_json
from finetune.config import Files
from finetune.data import Row, describe, limit_rows, read_rows, require_rows
from finetune.errors import UserError
from finetune.rundir import refuse_nonempty, write_provenance
from finetune.seeds import derive
from selection import Pool, build_selector
from selection.config import Backbone, Encoder, Features, TfIdf, needs

_SHIPPED_POOL = "sample:pool"


@dataclass(frozen=True)
class Records:
    """Rows that were kept, and where each stood among all records of its files (own features follow that order)."""

    rows: list[Row]
    skipped: list[str]
    total: int


def select(resolved: Resolved, out: Path, *, quiet: bool = False) -> dict[str, Any]:
    """Run a recipe's `select` block into the new directory `out` (whole or not at all) and return its manifest.

    Raises UserError for a non-empty `out`, missing settings, bad rows, or a budget above the pool.
    """
    recipe = resolved.recipe
    if recipe.select is None:
        raise UserError(
            f"recipe {resolved.name!r} has no `select` block: add one, or give --pool, --target and --budget"
        )
    refuse_nonempty(out)
    console = Console(quiet=quiet)
    with replacing_directory(out) as directory:
        write_provenance(directory, recipe_yaml=resolved.to_yaml())
        console.log = _appender(directory / "log.txt")
        manifest = select_into(recipe, directory, console)
        from experiments.report import build_report, write_plots

        write_plots(directory)
        build_report([directory], out=directory / "report.html")
    console.log = None  # the log has moved with its directory
    console.say(f"report: {out / 'report.html'}")
    return manifest


def _appender(path: Path) -> Callable[[str], None]:
    def append(line: str) -> None:
        with path.open("a", encoding="utf-8") as handle:
            handle.write(line + "\n")

    return append


def select_into(recipe: Recipe, directory: Path, console: Console) -> dict[str, Any]:
    """Score the pool, choose, and write scores.parquet, selected.jsonl and manifest.json into `directory`."""
    spec = recipe.select
    assert spec is not None
    started = time.monotonic()
    check_method(spec)
    seed = recipe.train.seed
    target_files = spec.target if spec.target.files else recipe.data.train
    pool = _read(spec.pool, spec, seed, "pool")
    target = _read(spec.target, spec, seed, "target") if spec.target.files else _training_rows(recipe)
    negative = _read(spec.negative, spec, seed, "negative") if spec.negative.files else None
    kept, hygiene = clean_rows(recipe, pool.rows, target.rows, directory, console)
    pool = replace(pool, rows=list(kept))
    if spec.budget > len(pool.rows):
        raise UserError(
            f"select.budget: {spec.budget} is above the pool's {len(pool.rows)} records; "
            f"ask for at most {len(pool.rows)} or add pool files"
        )
    for name, records in (("pool", pool), ("target", target)):
        if records.skipped:
            console.say(f"{name}: skipped {len(records.skipped)} bad records, first {records.skipped[0]}")
    console.say(
        f"pool {len(pool.rows):,} records, target {len(target.rows):,}, budget {spec.budget:,}, {spec.method.kind}"
    )

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        x, y, z = _features(recipe, spec, pool, target, negative, console)
    _say(caught, console)
    embedded = time.monotonic()
    ids, target_ids = [row.id for row in pool.rows], [row.id for row in target.rows]
    pool_set = Pool(
        ids=ids,
        texts=[row.values["text"] for row in pool.rows],
        features=x,
        domains=_domains(pool, spec),
    )
    target_set = Pool(
        ids=target_ids,
        texts=[row.values["text"] for row in target.rows],
        features=y,
        domains=_domains(target, spec),
    )
    more: dict[str, Any] = {} if z is None else {"negative": Pool(features=z)}
    selector = build_selector(
        spec.method, seed=derive(seed, "select"), budget=spec.budget, measure=backbone_surprise(recipe, spec.method)
    )
    with warnings.catch_warnings(record=True) as caught, watched(console) as progress:
        warnings.simplefilter("always", UserWarning)
        selector.fit(pool_set, target_set, progress=progress, **more)
    _say(caught, console)
    order = np.asarray(selector.select(len(pool.rows)))
    solved = time.monotonic()

    scores = np.asarray(selector.scores_, dtype=np.float64)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(1, len(order) + 1)
    nearest = selector.nearest_target_
    table = {
        "id": ids,
        "score": scores,
        "rank": rank,
        "selected": rank <= spec.budget,
        "nearest_target": [None] * len(ids) if nearest is None else [target_ids[j] for j in nearest],
        "domain": [_domain(row, spec) for row in pool.rows],
    }
    _write_scores(directory, table)
    _write_selected(directory, [pool.rows[i] for i in order[: spec.budget]], scores[order])
    if x is not None and y is not None:
        _write_map(directory, x, y, rank <= spec.budget, seed)
    if spec.pool.files == (_SHIPPED_POOL,):
        _write_judged_domains(directory, set(ids))
    solver = _plain(selector.diagnostics_)
    manifest = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "inputs": describe(spec.pool.files)
        + describe(target_files.files)
        + describe(spec.eval.files + spec.negative.files),
        "selection": {
            **{name: value for name, value in solver.items() if name != "method"},
            "solver": solver.get("method"),
            "method": spec.method.kind,
            "embedder": spec.embedder.kind if x is not None else None,
            "budget": spec.budget,
            "pool": len(pool.rows),
            "target": len(target.rows),
            "skipped": {"pool": pool.skipped, "target": target.skipped},
            "helpful": solver.get("helpful", int((scores < 0).sum())),
            "seconds": {"features": round(embedded - started, 3), "scores": round(solved - embedded, 3)},
        },
    }
    if hygiene is not None:
        manifest["hygiene"] = hygiene
    if spec.method.kind == "gotd" and manifest["selection"]["helpful"] < spec.budget:
        console.say(
            f"warning: only {manifest['selection']['helpful']} records have a negative score; "
            f"a budget of {spec.budget} adds some that move the pool away from the target"
        )
    write_json(directory / "manifest.json", manifest)
    console.say(f"selected {spec.budget:,} of {len(pool.rows):,} in {time.monotonic() - started:.1f} s")
    return manifest


def _say(caught: Sequence[warnings.WarningMessage], console: Console) -> None:
    """What a selector warned of, in the run's own voice and log."""
    for message in dict.fromkeys(str(item.message) for item in caught if issubclass(item.category, UserWarning)):
        console.say(f"warning: {message}")


def _read(files: Files, spec: Select, seed: int, name: str) -> Records:
    if not files.files:
        raise UserError(f"select.{name}.files is empty: name the files of the {name}")
    skipped: list[str] = []
    rows = read_rows(files.files, columns=spec.columns, bad_rows=spec.bad_rows, skipped=skipped)
    kept = require_rows(rows, files=files.files, what=name, skipped=skipped)
    total = len(kept) + len(skipped)
    return Records(limit_rows(kept, files.limit, seed=derive(seed, "limit", name)), skipped, total)


def _training_rows(recipe: Recipe) -> Records:
    """The run's own training rows as the target: after holdout and limit, so no judged text is seen."""
    rows = read_splits(recipe)
    without = next((row for row in rows.train if not isinstance(row.values.get("text"), str)), None)
    if without is not None:
        raise UserError(f"{without.where}: no text to select for; name select.target.files or set data.columns.text")
    return Records(rows.train, rows.skipped, rows.records)


def _domain(row: Row, spec: Select) -> str | None:
    value = row.values.get(spec.domain_column)
    return None if value is None else str(value)


def _domains(records: Records, spec: Select) -> list[str | None] | None:
    """Each record's domain, or None where no record has one."""
    names = [_domain(row, spec) for row in records.rows]
    return names if any(name is not None for name in names) else None


def _features(
    recipe: Recipe, spec: Select, pool: Records, target: Records, negative: Records | None, console: Console
) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
    """Feature matrices for pool, target and negative examples, or None where the method needs none."""
    if "features" not in needs(spec.method) and not isinstance(spec.embedder, Features):
        return None, None, None
    if negative is None:
        return *_embedded(recipe, spec, pool, target, console), None
    if isinstance(spec.embedder, Features):
        own = _own(spec.embedder.negative, negative, "negative")
        return *_embedded(recipe, spec, pool, target, console), own
    # Embedded with the target as one: TF-IDF must know their words too.
    both = Records(target.rows + negative.rows, [], len(target.rows) + len(negative.rows))
    x, y = _embedded(recipe, spec, pool, both, console)
    return x, y[: len(target.rows)], y[len(target.rows) :]


def _embedded(
    recipe: Recipe, spec: Select, pool: Records, target: Records, console: Console
) -> tuple[np.ndarray, np.ndarray]:
    texts = [row.values["text"] for row in pool.rows], [row.values["text"] for row in target.rows]
    embedder = spec.embedder
    if isinstance(embedder, Features):
        return _own(embedder.pool, pool, "pool"), _own(embedder.target, target, "target")
    if isinstance(embedder, TfIdf):
        from selection import TfIdfEmbedder

        tfidf = TfIdfEmbedder(dim=embedder.dim, buckets=embedder.buckets, seed=derive(recipe.train.seed, "tfidf"))
        return tfidf.fit_transform(*texts)
    assert isinstance(embedder, (Backbone, Encoder))
    name = embedder.path if isinstance(embedder, Encoder) else recipe.backbone
    if not name:
        raise UserError("select.embedder.path is empty: name a local directory or a hub encoder")
    from finetune.features import hidden_state_encoder
    from selection import pool_features

    encode = hidden_state_encoder(name, max_length=embedder.max_length, device=recipe.train.device)
    matrices = []
    for label, some in zip(("embed pool", "embed target"), texts, strict=True):
        with console.task(label, len(some), "texts") as task:
            matrices.append(pool_features(some, encode, batch_size=64, progress=lambda _, done, _total: task(done)))
    return matrices[0], matrices[1]


def _own(path: str, records: Records, name: str) -> np.ndarray:
    """The user's features for the kept records: row i of the file belongs to record i before any filter."""
    from selection import load_features

    matrix = load_features(path)
    if len(matrix) != records.total:
        raise UserError(
            f"--{name}-features: {path} has {len(matrix)} rows for {records.total} records; "
            "they must be in file order, one row per record"
        )
    return np.asarray(matrix[[row.index for row in records.rows]])


def _write_scores(directory: Path, columns: dict[str, Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = (pa.string(), pa.float64(), pa.int64(), pa.bool_(), pa.string(), pa.string())
    arrays = {name: pa.array(column, kind) for (name, column), kind in zip(columns.items(), kinds, strict=True)}
    pq.write_table(pa.table(arrays), directory / "scores.parquet")


def _write_selected(directory: Path, rows: Sequence[Row], scores: np.ndarray) -> None:
    """The chosen records whole, in rank order, plus id, score and rank; colliding input keys move under `source`."""
    with (directory / "selected.jsonl").open("w", encoding="utf-8") as handle:
        for rank, (row, score) in enumerate(zip(rows, scores, strict=False), start=1):
            added = {"id": row.id, "score": float(score), "rank": rank}
            record = dict(row.record)
            collides = {key for key in added if key in record and record[key] != added[key]}
            if collides:
                collides |= {"source"} & record.keys()
            moved = {key: record.pop(key) for key in sorted(collides)}
            if moved:
                record["source"] = moved
            handle.write(json.dumps({**record, **added}, ensure_ascii=False, default=str) + "\n")


def _write_map(directory: Path, x: np.ndarray, y: np.ndarray, selected: np.ndarray, seed: int) -> None:
    import pyarrow.parquet as pq

    from experiments.report.projection import project

    pq.write_table(project(x, y, selected, seed=derive(seed, "map"), max_points=4000), directory / "map.parquet")


def _write_judged_domains(directory: Path, ids: set[str]) -> None:
    """The shipped pool's hidden tags, for the report only: written after the choice was made."""
    import lzma

    from finetune.assets import pool_tags

    with lzma.open(pool_tags(), "rt", encoding="utf-8") as tags:
        lines = (line.rstrip("\n").split("\t") for line in tags)
        text = "".join(f"{identity}\t{domain}\n" for identity, domain, *_ in lines if identity in ids)
    (directory / "judged_domains.tsv").write_text(text, encoding="utf-8")


def _plain(value: Any) -> Any:
    """NumPy scalars and arrays as JSON values; non-finite numbers as null."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value
