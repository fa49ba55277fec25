"""A selection: the arm's rows for one target and seed, and what can be said of them before any training.

`selections/<key>.npy` has the rows of the stored pool in rank order, as many as the largest budget asks for. Where
budgets count tokens, or a method shapes its choice for one size, it has a line for each budget: the budget, its rows,
and −1 to fill it up.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.studies.cells.rows import split_rows
from benchmarks.studies.selection_quality.cells import SelectionCell, TargetRows
from benchmarks.studies.selection_quality.features import pool_vectors, vectors
from benchmarks.studies.selection_quality.form import shapes
from benchmarks.studies.selection_quality.pool import StoredPool, open_pool
from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.select.embedding import backbone_tokenizer
from flatshift.finetune.atomic import atomic_file
from flatshift.finetune.data.rows import Row, limit_rows
from flatshift.finetune.errors import UserError
from flatshift.finetune.seeds import derive_seed
from flatshift.finetune.tasks import Task
from flatshift.selection import Pool, TokenRows, build_selector
from flatshift.selection.config import MooreLewis, required_inputs

_WORD = re.compile(r"\w+")
_LENGTH_BINS = 10


def selection_file(root: Path, key: str) -> Path:
    """Where a study under `root` keeps the rows of a selection."""
    return root / "selections" / f"{key}.npy"


def chosen_rows(root: Path, key: str, budget: int) -> np.ndarray:
    """(budget,) rows of the stored pool in rank order: a selection's own for this budget, or the beginning of one."""
    kept = np.load(selection_file(root, key), allow_pickle=False)
    if kept.ndim == 2:
        line = kept[int(np.flatnonzero(kept[:, 0] == budget)[0]), 1:]
        return np.asarray(line[line >= 0])
    return np.asarray(kept[:budget])


def target_texts(rows: TargetRows, task: Task, seed: int) -> list[Row]:
    """The training rows whose texts selectors see under `seed`; the labelled ones are among them."""
    train, _, _ = split_rows(rows.file, task, (rows.validation, rows.test, rows.test_split), "test")
    return limit_rows(train, min(rows.texts, len(train)), seed=derive_seed(seed, "limit", "train"))


def choose(root: Path, cell: SelectionCell) -> dict[str, Any]:
    """Select, keep the rows, and return the figures of each budget."""
    import time

    recipe = cell.recipe
    assert recipe.select is not None
    started = time.process_time()
    stored = open_pool(root, cell.pool.key)
    rows, x = pool_vectors(root, cell.features)
    if cell.unit == "passages" and max(cell.budgets) > len(rows):
        raise UserError(f"a budget of {max(cell.budgets):,} is above the pool's {len(rows):,} passages")
    texts = [str(row.values["text"]) for row in target_texts(cell.rows, recipe.task, cell.seed)]
    y = vectors(root, cell.features, texts)
    prepared = time.process_time()
    about: dict[str, Any] = {}
    orders = []
    counts: dict[int, int] = {}
    """Passages of each budget."""
    for budgets in _together(cell):
        if cell.like is not None:
            counts |= {budget: len(chosen_rows(root, cell.like, budget)) for budget in budgets}
            followed = chosen_rows(root, cell.like, budgets[-1])
            sizes = tuple(counts[budget] for budget in budgets)
            orders.append(matched_draw(stored, followed, sizes, derive_seed(cell.seed, "select")))
            about = {"shared": float(np.isin(orders[-1], followed).mean())}
        else:
            order, about, found = _selected(root, cell, stored, rows, x, texts, y, budgets)
            counts |= found
            orders.append(order)
    solved = time.process_time()
    path = selection_file(root, cell.key)
    with atomic_file(path) as temporary, temporary.open("wb") as handle:
        lined = cell.each or cell.unit == "tokens"
        np.save(handle, _lines(cell, orders, counts) if lined else orders[0].astype(np.int32), allow_pickle=False)
    figures: dict[str, dict[str, Any]] = {}
    for budgets, order in zip(_together(cell), orders, strict=True):
        figures |= _figures(root, cell, stored, rows, x, order, {budget: counts[budget] for budget in budgets})
    seconds = {
        "features of the target": prepared - started,
        "scores": solved - prepared,
        "figures": time.process_time() - solved,
    }
    return {
        "figures": figures,
        "about": about,
        "pool": len(rows),
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
    }


def _together(cell: SelectionCell) -> list[tuple[int, ...]]:
    """Budgets that one order serves."""
    return [(budget,) for budget in cell.budgets] if cell.each else [cell.budgets]


def _lines(cell: SelectionCell, orders: list[np.ndarray], counts: dict[int, int]) -> np.ndarray:
    """(budgets, 1 + most passages) int32: each budget and its rows on a line, filled up with −1."""
    lines = np.full((len(counts), 1 + max(counts.values())), -1, dtype=np.int32)
    pairs = [(budget, order) for some, order in zip(_together(cell), orders, strict=True) for budget in some]
    for line, (budget, order) in zip(lines, pairs, strict=True):
        line[0], line[1 : 1 + counts[budget]] = budget, order[: counts[budget]]
    return lines


@functools.lru_cache(maxsize=1)
def pool_tokens(root: Path, key: str, backbone: str) -> TokenRows:
    """The tokens of a study's pool."""
    tokenize, size = backbone_tokenizer(Recipe(backbone=backbone))
    return TokenRows.of(tokenize(open_pool(root, key).texts), size)


def _selected(
    root: Path,
    cell: SelectionCell,
    stored: StoredPool,
    rows: np.ndarray,
    x: np.ndarray,
    texts: list[str],
    y: np.ndarray,
    budgets: tuple[int, ...],
) -> tuple[np.ndarray, dict[str, Any], dict[int, int]]:
    """Rows of the stored pool in rank order, what the selector says of itself, and the passages of each budget."""
    assert cell.recipe.select is not None
    method = MooreLewis() if cell.form else cell.recipe.select.method
    whole = len(rows) == len(stored)
    pool = Pool(
        ids=stored.ids if whole else [stored.ids[i] for i in rows.tolist()],
        texts=stored.texts if whole else [stored.texts[i] for i in rows.tolist()],
        features=x,
    )
    target = Pool(texts=texts, features=y)
    budget = budgets[-1]
    lengths = None
    if cell.unit == "tokens" or "tokens" in required_inputs(method):
        tokens = pool_tokens(root, cell.pool.key, cell.recipe.backbone)
        tokens = tokens if whole else tokens.take(rows)
        tokenize, size = backbone_tokenizer(cell.recipe)
        pool, target = replace(pool, tokens=tokens), replace(target, tokens=TokenRows.of(tokenize(texts), size))
        lengths = tokens.lengths + 1  # a passage ends with a token of its own
        if cell.unit == "tokens":
            budget = min(len(rows), int(budget / cell.times / lengths.mean()) + 1)
    if cell.form:
        pool, target = replace(pool, tokens=shapes(pool.texts or ())), replace(target, tokens=shapes(texts))
    selector = build_selector(method, seed=derive_seed(cell.seed, "select"), budget=budget, device="cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        selector.fit(pool, target)
    kept = bool | int | float | str
    about = {name: value for name, value in selector.diagnostics_.items() if isinstance(value, kept)}
    if caught:
        about["warning"] = str(caught[0].message)
    if cell.unit == "passages" or lengths is None:
        return rows[np.asarray(selector.select(budget))], about, {each: each for each in budgets}
    order = np.asarray(selector.select(len(rows)))
    reached = np.cumsum(lengths[order])
    counts = {each: min(int(np.searchsorted(reached, each / cell.times)) + 1, len(rows)) for each in budgets}
    return rows[order[: max(counts.values())]], about, counts


def matched_draw(stored: StoredPool, followed: np.ndarray, budgets: tuple[int, ...], seed: int) -> np.ndarray:
    """A random draw with the hidden domains and lengths of `followed`, at every budget; rows in an order whose first k
    rows are the draw for budget k.

    Lengths are matched in tenths of the pool's words. followed: rows in rank order.
    """
    edges = np.quantile(stored.words, np.arange(1, _LENGTH_BINS) / _LENGTH_BINS)
    bins = np.searchsorted(edges, stored.words, side="right")
    names, domain = np.unique(stored.domains.astype(str), return_inverse=True)
    stratum = bins * len(names) + domain
    draw = Pool(ids=stored.ids).draw(seed, "matched draw")
    by_stratum = np.lexsort((draw, stratum))
    sizes = np.bincount(stratum, minlength=_LENGTH_BINS * len(names))
    starts = np.cumsum(sizes) - sizes
    taken = np.zeros_like(sizes)
    order = []
    for low, high in zip((0, *budgets[:-1]), budgets, strict=True):
        wanted = np.bincount(stratum[followed[low:high]], minlength=len(sizes))
        some = np.concatenate(
            [by_stratum[:0]]
            + [by_stratum[starts[s] + taken[s] : starts[s] + taken[s] + wanted[s]] for s in np.flatnonzero(wanted)]
        )
        taken += wanted
        order.append(some[np.argsort(draw[some], kind="stable")])
    return np.concatenate(order)


def _figures(
    root: Path,
    cell: SelectionCell,
    stored: StoredPool,
    rows: np.ndarray,
    x: np.ndarray,
    order: np.ndarray,
    counts: dict[int, int],
) -> dict[str, dict[str, Any]]:
    """By budget: recall of the hidden domains, coverage of the judged texts, length and mix of what was chosen.

    counts: how many passages at the beginning of `order` each budget takes.
    """
    spec = (cell.rows.validation, cell.rows.test, cell.rows.test_split)
    _, judged, _ = split_rows(cell.rows.file, cell.recipe.task, spec, "test")
    texts = [str(row.values["text"]) for row in judged]
    y = vectors(root, cell.features, texts)
    words = Counter(word for text in texts for word in _words(text))
    wanted = np.isin(stored.domains, list(cell.rows.domains))
    there = int(wanted[rows].sum())
    place = np.full(len(stored), -1)
    place[rows] = np.arange(len(rows))
    found: dict[str, dict[str, Any]] = {}
    seen: set[str] = set()
    nearest = np.full(len(y), np.inf)
    for low, (budget, high) in zip((0, *counts.values()), counts.items(), strict=False):
        new = order[low:high]
        for row in new.tolist():
            seen.update(_words(stored.texts[row]))
        if len(new):  # two budgets in tokens may end in one passage
            nearest = np.minimum(nearest, _nearest(y, np.asarray(x[place[new]], dtype=np.float32)))
        chosen = np.unique(order[:high])  # a passage that is read again counts once
        hits = int(wanted[chosen].sum())
        mix = Counter(stored.domains[chosen].tolist())
        found[str(budget)] = {
            "recall": hits / min(len(chosen), there) if there else None,
            "precision": hits / len(chosen),
            "distance": float(nearest.mean()),
            "words": sum(count for word, count in words.items() if word in seen) / max(sum(words.values()), 1),
            "length": float(stored.words[chosen].mean()),
            "domains": {name: count / len(chosen) for name, count in mix.most_common(5)},
        }
    return found


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _nearest(y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """(M,) squared distance of each y to its nearest x."""
    squared = (y * y).sum(1)[:, None] + (x * x).sum(1) - 2.0 * (y @ x.T)
    return np.maximum(squared.min(axis=1), 0.0)
