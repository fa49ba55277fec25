"""The study's pool: read once, cleaned of what the targets hold, kept in one file that workers map.

`pool/<key>.arrow` has the columns id, text, domain (hidden from selectors) and words.
"""

from __future__ import annotations

import functools
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.studies.cells.rows import split_rows
from benchmarks.studies.selection_quality.cells import PoolCell
from flatshift.finetune.atomic import atomic_file
from flatshift.finetune.data.rows import read_rows
from flatshift.finetune.errors import UserError
from flatshift.finetune.seeds import derive_seed, numpy_generator

_PART = 1 << 16


@dataclass(frozen=True)
class StoredPool:
    """N passages. `domains` judge a selection; no selector is given them."""

    ids: list[str]
    texts: list[str]
    domains: np.ndarray
    """(N,) object."""
    words: np.ndarray
    """(N,) int64: runs of anything but white space."""

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, rows: int | None) -> np.ndarray:
        """Row numbers of a part of so many passages, ascending, drawn once for all; None: of all."""
        if rows is None or rows >= len(self):
            return np.arange(len(self))
        return np.sort(numpy_generator(0, "quality", "part").choice(len(self), rows, replace=False))


def pool_file(root: Path, key: str) -> Path:
    """Where a study under `root` keeps its pool."""
    return root / "pool" / f"{key}.arrow"


@functools.lru_cache(maxsize=2)
def open_pool(root: Path, key: str) -> StoredPool:
    """The pool of a study, read into memory and kept there."""
    import pyarrow as pa

    with pa.memory_map(str(pool_file(root, key)), "r") as source:
        table = pa.ipc.open_file(source).read_all()
        ids, texts, names = (table.column(name).to_pylist() for name in ("id", "text", "domain"))
        known: dict[str, str] = {}
        domains = np.array([known.setdefault(name, name) for name in names], dtype=object)
        return StoredPool(ids, texts, domains, table.column("words").to_numpy().astype(np.int64))


def store_pool(root: Path, cell: PoolCell) -> dict[str, Any]:
    """Read, clean and store the pool; returns its counts. Raises UserError for tags that do not fit the passages."""
    from flatshift.selection.hygiene import ReferenceTexts, clean_pool

    select = cell.recipe.select
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
        references = [ReferenceTexts("target", _texts(cell, "train")), ReferenceTexts("eval", _texts(cell, "judged"))]
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


def _texts(cell: PoolCell, which: str) -> list[str]:
    """Texts of all targets: those that runs may train on, or those they are judged on."""
    return [text for target in cell.targets for row in _target_rows(cell, target, which) for text in _both(row)]


def _target_rows(cell: PoolCell, target: Any, which: str) -> Iterator[Any]:
    for judged in ("validation", "test"):
        split = (target.validation, target.test, target.test_split)
        train, rows, _ = split_rows(target.file, cell.recipe.task, split, judged)
        if which == "judged":
            yield from rows
        elif judged == "test":
            yield from train


def _both(row: Any) -> list[str]:
    return [row.values[name] for name in ("text", "text2") if isinstance(row.values.get(name), str)]


def _write(path: Path, ids: list[str], texts: list[str], domains: list[str]) -> None:
    import pyarrow as pa

    schema = pa.schema([("id", pa.string()), ("text", pa.string()), ("domain", pa.string()), ("words", pa.int64())])
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        atomic_file(path) as temporary,
        pa.OSFile(str(temporary), "wb") as sink,
        pa.ipc.new_file(sink, schema) as writer,
    ):
        for low in range(0, len(ids), _PART):
            part = slice(low, low + _PART)
            words = [len(text.split()) for text in texts[part]]
            writer.write_batch(pa.record_batch([ids[part], texts[part], domains[part], words], schema=schema))
