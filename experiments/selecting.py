"""The selection journey: pool and target in, a directory with scores, chosen records and a report out.

flatshift select --pool pool.jsonl --target target.jsonl --budget 500 --out selection
"""

from __future__ import annotations

import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from experiments.blanks import drops_blanks, without_blank, without_unknown
from experiments.checking import can_check, check_choice
from experiments.cleaning import clean_rows
from experiments.embedding import Vectors, check_unread, check_vectors, naming_rows
from experiments.methods import (
    backbone_surprise,
    check_method,
    idle_setting,
    makes_vectors,
    naming_memory,
    solver_device,
    vectors_needed,
    watched,
)
from experiments.reading import chunked, domains_of, read_pool, read_records, training_rows
from experiments.recipe import Resolved
from experiments.recipe.config import Recipe, Select
from experiments.relevance import check_relevance, judge_domains
from experiments.run.console import Console
from experiments.run.resumable_directory import unfinished
from finetune.atomic import json_text, write_json
from finetune.data import Row, describe
from finetune.digests import DONE, FILES, sums
from finetune.errors import UserError
from finetune.lock import owned
from finetune.run_directory import disk_full_interrupts, write_provenance
from finetune.seeds import derive
from selection import Pool, build_selector

_SHIPPED_POOL = "sample:pool"
_GROUP = 1 << 16
"""Rows of scores.parquet written at a time."""


def select(resolved: Resolved, out: Path, *, quiet: bool = False) -> dict[str, Any]:
    """Run a recipe's `select` block into the new directory `out` (whole or not at all) and return its manifest.

    Called again after a kill, with the same recipe, it goes on with what `out`/state has: a long transport solve from
    its last full pass, to the same bits.

    Raises UserError for an `out` that holds anything else or is in use, missing settings, bad rows, or a budget above
    the pool.
    """
    recipe = resolved.recipe
    if recipe.select is None:
        raise UserError(
            f"recipe {resolved.name!r} has no `select` block: add one, or give --pool, --target and --budget"
        )
    console = Console(quiet=quiet)
    recipe_yaml = resolved.to_yaml()
    with disk_full_interrupts(f"selecting into {out}"), owned(out), unfinished(out, recipe_yaml) as work:
        directory = work.directory
        write_provenance(directory, recipe_yaml=recipe_yaml)
        console.log = _appender(directory / "log.txt")
        if work.continued:
            console.say(f"going on with the unfinished selection in {out}")
        manifest = select_into(recipe, directory, console, state=work.state)
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


def select_into(recipe: Recipe, directory: Path, console: Console, state: Path | None = None) -> dict[str, Any]:
    """Score the pool, choose, and write scores.parquet, selected.jsonl and manifest.json into `directory`.

    state: where a long transport solve leaves what it needs to go on after a kill; None: nowhere.
    """
    spec = recipe.select
    assert spec is not None
    started = time.monotonic()
    check_method(spec)
    check_relevance(spec)
    check_vectors(spec)
    seed = recipe.train.seed
    target_files = spec.target.files or recipe.data.train.all_files
    if (idle := idle_setting(spec)) is not None:
        console.say(f"note: select.{idle} has no effect: {spec.method.kind} looks at no vectors")
    pool = read_pool(spec, seed, directory, console)
    target = read_records(spec.target, spec, seed, "target") if spec.target.files else training_rows(recipe)
    negative = read_records(spec.negative, spec, seed, "negative") if spec.negative.files else None
    told = drops_blanks(spec)
    if told:
        target = without_blank(target, target_files, "target")
        negative = None if negative is None else without_blank(negative, spec.negative.files, "negative")
    kept, hygiene = clean_rows(recipe, pool.rows, target.rows, directory, console)
    pool = replace(pool, rows=chunked(recipe, kept, console))
    pieces = len(pool.rows)
    if told:
        pool = without_blank(pool, spec.pool.files, "pool")
    for name, records in (("pool", pool), ("target", target), ("negative", negative)):
        if records is not None and records.skipped:
            console.say(f"{name}: skipped {len(records.skipped):,} bad records, first {records.skipped[0]}")
    _check_budget(spec, len(pool.rows))
    console.say(
        f"pool {len(pool.rows):,} records, target {len(target.rows):,}, budget {spec.budget:,}, {spec.method.kind}"
    )

    vectors = Vectors(recipe, pool, target, negative, directory, console)
    x = y = z = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        with naming_rows(vectors, {"pool": pool, "target": target, "negative": negative}):
            pool, weights, relevance = judge_domains(spec, pool, vectors, seed, console)
        _check_budget(spec, len(pool.rows))
        if vectors_needed(spec):
            x, y, z = vectors.pool(pool.rows), vectors.target(), vectors.negative()
    _say(caught, console)
    if x is not None and y is not None and makes_vectors(spec):
        pool, x, known = without_unknown(pool, x, spec.pool.files, "pool", console)
        weights = weights if weights is None or known is None else weights[known]
        target, y, _ = without_unknown(target, y, target_files, "target", console)
        if negative is not None:
            negative, z, _ = without_unknown(negative, z, spec.negative.files, "negative", console)
        _check_budget(spec, len(pool.rows))
    embedded, peak = time.monotonic(), {"features": _peak_bytes()}
    ids, target_ids = pool.rows.ids, [row.id for row in target.rows]
    domains = domains_of(pool, spec)
    pool_set = Pool(ids=ids, texts=pool.rows.texts, features=x, domains=domains, weights=weights)
    target_set = Pool(
        ids=target_ids,
        texts=[row.values["text"] for row in target.rows],
        features=y,
        domains=domains_of(target, spec),
    )
    more: dict[str, Any] = {} if z is None else {"negative": Pool(features=z)}
    selector = build_selector(
        spec.method,
        seed=derive(seed, "select"),
        budget=spec.budget,
        measure=backbone_surprise(recipe, spec.method),
        device=solver_device(recipe),
        state=None if state is None else str(state),
    )
    sides = {"pool": pool, "target": target, "negative": negative}
    with (
        warnings.catch_warnings(record=True) as caught,
        watched(console) as progress,
        naming_rows(vectors, sides),
        naming_memory(spec),
    ):
        warnings.simplefilter("always", UserWarning)
        check_unread(spec, x, y)
        selector.fit(pool_set, target_set, progress=progress, **more)
    _say(caught, console)
    said = selector.diagnostics_
    if resumed := said.get("resumed") or said.get("inside", {}).get("resumed"):
        console.say(f"the transport solve went on after pass {resumed}")
    order = np.asarray(selector.select(len(pool.rows)))
    if ties := selector.ties(spec.budget):
        console.say(f"warning: {ties:,} records tie at the cut; file order decides which of them are chosen")
    solved = time.monotonic()
    peak["scores"] = _peak_bytes()
    checks = None
    if x is not None and y is not None and can_check(spec):
        with watched(console) as progress:
            checks = check_choice(
                spec,
                selector,
                pool,
                target,
                (x, y, z),
                (domains, target_set.domains),
                weights,
                order,
                seed=seed,
                console=console,
                progress=progress,
            )
    checked = time.monotonic()
    peak["checks"] = _peak_bytes()

    scores = np.asarray(selector.scores_, dtype=np.float64)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(1, len(order) + 1)
    nearest = selector.nearest_target_
    table = {
        "id": ids,
        "score": scores,
        "rank": rank,
        "selected": rank <= spec.budget,
        "nearest_target": None if nearest is None else _Named(target_ids, nearest),
        "domain": domains,
    }
    _write_scores(directory, table)
    _write_selected(directory, pool.rows.take(order[: spec.budget]), scores[order[: spec.budget]])
    if x is not None and y is not None:
        _write_map(directory, x, y, rank <= spec.budget, seed)
    if spec.pool.files == (_SHIPPED_POOL,):
        _write_judged_domains(directory, set(ids))
    solver = _plain(selector.diagnostics_)
    manifest: dict[str, Any] = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "inputs": describe(spec.pool.files) + describe(target_files) + describe(spec.eval.files + spec.negative.files),
        "selection": {
            **{name: value for name, value in solver.items() if name != "method"},
            "solver": solver.get("method"),
            "method": spec.method.kind,
            "embedder": spec.embedder.kind if x is not None else None,
            "budget": spec.budget,
            "pool": len(pool.rows),
            "target": len(target.rows),
            "skipped": {name: side.skipped for name, side in sides.items() if side is not None},
            "helpful": solver.get("helpful", int((scores < 0).sum())),
            "seconds": {
                "features": round(embedded - started, 3),
                "scores": round(solved - embedded, 3),
                "checks": round(checked - solved, 3),
            },
            "peak_bytes": peak,
        },
    }
    if ties:
        manifest["selection"]["ties"] = ties
    if checks is not None:
        manifest["selection"]["checks"] = _plain(checks)
    if hygiene is not None:
        manifest["hygiene"] = hygiene
    if spec.chunk is not None:
        manifest["chunk"] = {"unit": spec.chunk.unit, "size": spec.chunk.size, "records": len(kept), "pieces": pieces}
    if relevance is not None:
        manifest["relevance"] = relevance
    if vectors.about:
        manifest["cache"] = vectors.about
    if spec.method.kind == "gotd" and manifest["selection"]["helpful"] < spec.budget:
        console.say(
            f"warning: only {manifest['selection']['helpful']} records have a negative score; "
            f"a budget of {spec.budget} adds some that move the pool away from the target"
        )
    vectors.close()
    write_json(directory / "manifest.json", manifest)
    kept = [file for file in directory.iterdir() if file.is_file() and file.name != "log.txt"]
    write_json(directory / DONE, {FILES: sums(directory, kept)})
    console.say(f"selected {spec.budget:,} of {len(pool.rows):,} in {time.monotonic() - started:.1f} s")
    return manifest


def _say(caught: Sequence[warnings.WarningMessage], console: Console) -> None:
    """What a selector warned of, in the run's own voice and log."""
    for message in dict.fromkeys(str(item.message) for item in caught if issubclass(item.category, UserWarning)):
        console.say(f"warning: {message}")


def _peak_bytes() -> int:
    """Most that this process has held resident so far, mapped files included."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _check_budget(spec: Select, count: int) -> None:
    if spec.budget > count:
        raise UserError(
            f"select.budget: {spec.budget} is above the pool's {count} records; "
            f"ask for at most {count} or add pool files"
        )


class _Named:
    """Names by number, looked up a slice at a time."""

    def __init__(self, names: Sequence[str], numbers: np.ndarray):
        self.names = names
        self.numbers = numbers

    def __getitem__(self, key: slice) -> list[str]:
        return [self.names[j] for j in self.numbers[key]]


def _write_scores(directory: Path, columns: dict[str, Any]) -> None:
    """The table, written a group of rows at a time; a column that is None is null throughout."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = (pa.string(), pa.float64(), pa.int64(), pa.bool_(), pa.string(), pa.string())
    schema = pa.schema(list(zip(columns, kinds, strict=True)))
    count = len(columns["rank"])
    with pq.ParquetWriter(directory / "scores.parquet", schema) as writer:
        for low in range(0, count, _GROUP):
            part = slice(low, min(low + _GROUP, count))
            arrays = [
                pa.nulls(part.stop - low, field.type)
                if columns[field.name] is None
                else pa.array(columns[field.name][part], field.type)
                for field in schema
            ]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def _write_selected(directory: Path, rows: Iterable[Row], scores: np.ndarray) -> None:
    """The chosen records whole, in rank order, plus id, score and rank; colliding input keys move under `source`."""
    with (directory / "selected.jsonl").open("w", encoding="utf-8") as handle:
        for rank, (row, score) in enumerate(zip(rows, scores, strict=True), start=1):
            added = {"id": row.id, "score": float(score), "rank": rank}
            record = dict(row.record)
            collides = {key for key in added if key in record and record[key] != added[key]}
            if collides:
                collides |= {"source"} & record.keys()
            moved = {key: record.pop(key) for key in sorted(collides)}
            if moved:
                record["source"] = moved
            handle.write(json_text(_plain({**record, **added}), default=str) + "\n")


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
