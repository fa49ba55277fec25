"""The study's pool and its features, each made once, and the rows of targets.

`pool/<key>.arrow` has the columns id, text, domain (hidden from selectors) and words; `features` has shards
(`flatshift.selection.features.FeatureCache`).
"""

from __future__ import annotations

import functools
import lzma
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.studies.selection_quality.cells import FeaturesCell, PoolCell, TargetRows
from flatshift.experiments.select.embedding import state_embedder
from flatshift.finetune.atomic import atomic_file
from flatshift.finetune.data.rows import Row, limit_rows, read_rows
from flatshift.finetune.errors import UserError
from flatshift.finetune.seeds import derive_seed, numpy_generator
from flatshift.finetune.tasks import Task
from flatshift.selection.config import Static, TfIdf
from flatshift.selection.features import StaticEmbedder, TfIdfEmbedder
from flatshift.selection.features.cache import FeatureCache
from flatshift.selection.features.tfidf import load_or_fit

_PART = 1 << 16
Embed = Callable[[list[str]], np.ndarray]


# --------------------------------------------------------------------------------------------- rows of a target


@functools.lru_cache(maxsize=64)
def split_rows(rows: TargetRows, task: Task, evaluation: str) -> tuple[list[Row], list[Row], tuple[str, ...] | None]:
    """(rows to draw training subsets from, rows of the split `judged`, classes); no draw depends on a run's seed.

    Validation rows come out of the training split, so that the official development split, where it serves as test, is
    seen once.
    """
    result = _read(rows.file, task)
    train = [row for row in result if row.values.get("split") == "train"]
    tested = [row for row in result if row.values.get("split") == rows.test_split]
    if not train or not tested:
        there = ", ".join(sorted({str(row.values.get("split")) for row in result}))
        raise UserError(
            f"{rows.file}: the column 'split' must mark 'train' and {rows.test_split!r} rows; it has {there}"
        )
    if rows.validation >= len(train):
        raise UserError(f"{rows.file}: {rows.validation} validation rows leave nothing of {len(train)} training rows")
    chosen = limit_rows(range(len(train)), rows.validation, seed=derive_seed(0, "comparison", "validation"))
    pool = [train[i] for i in sorted(set(range(len(train))) - set(chosen))]
    if evaluation == "validation":
        return pool, [train[i] for i in chosen], task.class_names(train)
    limited = limit_rows(tested, min(rows.test, len(tested)), seed=derive_seed(0, "comparison", "test rows"))
    return pool, limited, task.class_names(train)


@functools.lru_cache(maxsize=16)
def _read(file: str, task: Task) -> list[Row]:
    return list(read_rows([file], required=task.columns(), label=task.read_label))


def target_texts(rows: TargetRows, task: Task, seed: int) -> list[Row]:
    """The training rows whose texts selectors see under `seed`; the labelled ones are among them."""
    train = split_rows(rows, task, "test")[0]
    return limit_rows(train, min(rows.texts, len(train)), seed=derive_seed(seed, "limit", "train"))


# --------------------------------------------------------------------------------------------- the pool


@dataclass(frozen=True)
class StoredPool:
    """N passages. `domains` (N,) object evaluate a selection, no selector is given them; `words` (N,) int64: runs of
    anything but white space."""

    ids: list[str]
    texts: list[str]
    domains: np.ndarray
    words: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)


def pool_file(root: Path, key: str) -> Path:
    """Path of the pool of the study under `root`."""
    return root / "pool" / f"{key}.arrow"


@functools.lru_cache(maxsize=2)
def open_pool(root: Path, key: str) -> StoredPool:
    """The pool of a study, read into memory and kept there."""
    import pyarrow as pa

    with pa.memory_map(str(pool_file(root, key)), "r") as source:
        table = pa.ipc.open_file(source).read_all()
        ids, texts, domains = (table.column(name).to_pylist() for name in ("id", "text", "domain"))
        return StoredPool(
            ids, texts, np.array(domains, dtype=object), table.column("words").to_numpy().astype(np.int64)
        )


def store_pool(root: Path, cell: PoolCell) -> dict[str, Any]:
    """Read, clean and store the pool; returns its counts. Raises UserError for tags that do not fit the passages."""
    from flatshift.selection.hygiene import ReferenceTexts, clean_pool

    select, task = cell.recipe.select, cell.recipe.task
    assert select is not None
    skipped: list[str] = []
    rows = list(
        read_rows(
            [cell.file], columns=select.columns, bad_rows=select.bad_rows, skipped=skipped, setting="select.columns"
        )
    )
    if not rows:
        raise UserError(f"quality.pool: {cell.file} has no passage")
    ids, texts = [row.id for row in rows], [str(row.values["text"]) for row in rows]
    domains = _domains(cell.tags, ids)
    if cell.rows is not None and cell.rows < len(ids):
        keep = np.sort(numpy_generator(0, "quality", "pool rows").choice(len(ids), cell.rows, replace=False))
        ids, texts, domains = ([side[i] for i in keep.tolist()] for side in (ids, texts, domains))
    total, dropped = len(ids), {}
    if select.hygiene.on:
        split = {evaluation: [split_rows(target, task, evaluation) for target in cell.targets]
                 for evaluation in ("validation", "test")}  # fmt: skip
        train = [row for result in split["test"] for row in result[0]]
        evaluation = [
            row for pair in zip(split["validation"], split["test"], strict=True) for f in pair for row in f[1]
        ]
        references = [ReferenceTexts("target", _texts(train)), ReferenceTexts("eval", _texts(evaluation))]
        cleaned = clean_pool(texts, select.hygiene, references=references, seed=derive_seed(0, "quality", "hygiene"))
        dropped = cleaned.counts()
        ids, texts, domains = ([side[i] for i in cleaned.kept.tolist()] for side in (ids, texts, domains))
        if not ids:
            raise UserError(f"select.hygiene leaves no passage of the pool's {total:,}; loosen it")
    names, counts = np.unique(np.array(domains, dtype=object).astype(str), return_counts=True)
    _write(pool_file(root, cell.key), ids, texts, domains)
    return {
        "passages": total,
        "kept": len(ids),
        "skipped": len(skipped),
        "dropped": dropped,
        "domains": dict(zip(names.tolist(), counts.tolist(), strict=True)),
    }


def _domains(tags: str, ids: list[str]) -> list[str]:
    """The hidden domain of each passage."""
    opened = lzma.open if tags.endswith(".xz") else open
    with opened(tags, "rt", encoding="utf-8") as lines:
        named = {parts[0]: parts[1] for line in lines if len(parts := line.rstrip("\n").split("\t")) > 1}
    without = next((identity for identity in ids if identity not in named), None)
    if without is not None:
        raise UserError(f"quality.tags: {tags} has no domain for the passage {without!r}")
    return [named[identity] for identity in ids]


def _texts(rows: list[Row]) -> list[str]:
    return [row.values[name] for row in rows for name in ("text", "text2") if isinstance(row.values.get(name), str)]


def _write(path: Path, ids: list[str], texts: list[str], domains: list[str]) -> None:
    import pyarrow as pa

    schema = pa.schema([("id", pa.string()), ("text", pa.string()), ("domain", pa.string()), ("words", pa.int64())])
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table([ids, texts, domains, [len(text.split()) for text in texts]], schema=schema)
    with (
        atomic_file(path) as temporary,
        pa.OSFile(str(temporary), "wb") as sink,
        pa.ipc.new_file(sink, schema) as writer,
    ):
        writer.write_table(table, max_chunksize=_PART)


# --------------------------------------------------------------------------------------------- features


@functools.lru_cache(maxsize=4)
def pool_vectors(root: Path, cell: FeaturesCell) -> np.ndarray:
    """(N, d) features of the pool; computed where no shard has them."""
    assert cell.recipe.select is not None
    embed, key = _embedder(root, cell)
    cache = FeatureCache(root / "features")
    stored = open_pool(root, cell.pool.key)
    return np.asarray(cache.features(stored.texts, embed, key=key, dtype=cell.recipe.select.feature_type))


def vectors(root: Path, cell: FeaturesCell, texts: list[str]) -> np.ndarray:
    """(len(texts), d) float32 by the same embedder."""
    return np.asarray(_embedder(root, cell)[0](texts), dtype=np.float32)


@functools.lru_cache(maxsize=8)
def _embedder(root: Path, cell: FeaturesCell) -> tuple[Embed, str]:
    """texts → vectors, and the key that names it in the cache. Fitted on the pool alone: it serves every target."""
    recipe = cell.recipe
    assert recipe.select is not None
    embedder: Any = recipe.select.embedder
    if isinstance(embedder, TfIdf):
        seed = derive_seed(0, "quality", "tfidf")
        tfidf = TfIdfEmbedder(dim=embedder.dim, buckets=embedder.buckets, seed=seed, fit_rows=embedder.fit_rows)
        texts = open_pool(root, cell.pool.key).texts
        load_or_fit(root / "features" / f"tfidf-{cell.key}.npz", tfidf, lambda: tfidf.fit(texts))
        return tfidf.transform, f"tfidf {tfidf.fingerprint}"
    if isinstance(embedder, Static):
        static = StaticEmbedder(embedder.path, max_tokens=embedder.max_length)
        return static.transform, f"static {static.fingerprint}"
    return state_embedder(embedder, backbone=recipe.backbone, device=recipe.train.device, keyed=True)
