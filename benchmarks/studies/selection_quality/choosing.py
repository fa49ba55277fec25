"""A selection: the arm's rows for one target and seed, and what can be said of them before any training.

`selections/<key>.npy` has a line for each budget: the budget, its rows of the stored pool in rank order, and −1 to fill
it up.
"""

from __future__ import annotations

import functools
import re
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.studies.selection_quality.cells import SelectionCell
from benchmarks.studies.selection_quality.pool import (
    StoredPool,
    open_pool,
    pool_vectors,
    split_rows,
    target_texts,
    vectors,
)
from benchmarks.studies.selection_quality.texts import shapes
from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.select.embedding import backbone_tokenizer
from flatshift.finetune.atomic import atomic_file
from flatshift.finetune.errors import UserError
from flatshift.finetune.seeds import derive_seed
from flatshift.selection import Pool, TokenRows, build_selector
from flatshift.selection.config import MooreLewis, required_inputs

_WORD = re.compile(r"\w+")
_LENGTH_BINS = 10
Chosen = dict[int, np.ndarray]
"""Budget → rows of the stored pool in rank order."""


def selection_file(root: Path, key: str) -> Path:
    """Path of the rows of a selection of the study under `root`."""
    return root / "selections" / f"{key}.npy"


def chosen_rows(root: Path, key: str, budget: int) -> np.ndarray:
    """(budget,) rows of the stored pool in rank order."""
    lines = np.load(selection_file(root, key), allow_pickle=False)
    line = lines[int(np.flatnonzero(lines[:, 0] == budget)[0]), 1:]
    return np.asarray(line[line >= 0])


def choose(root: Path, cell: SelectionCell) -> dict[str, Any]:
    """Select, keep the rows, and return the figures of each budget."""
    started = time.process_time()
    stored = open_pool(root, cell.pool.key)
    if cell.unit == "passages" and max(cell.budgets) > len(stored):
        raise UserError(f"a budget of {max(cell.budgets):,} is above the pool's {len(stored):,} passages")
    texts = [str(row.values["text"]) for row in target_texts(cell.rows, cell.recipe.task, cell.seed)]
    pool = Pool(ids=stored.ids, texts=stored.texts, features=pool_vectors(root, cell.features))
    target = Pool(texts=texts, features=vectors(root, cell.features, texts))
    prepared = time.process_time()
    about: dict[str, Any] = {}
    chosen: Chosen = {}
    for budgets in [(budget,) for budget in cell.budgets] if cell.each else [cell.budgets]:
        if cell.like is None:
            result, about = _selected(root, cell, pool, target, budgets)
        else:
            followed = [chosen_rows(root, cell.like, budget) for budget in budgets]
            order = matched_draw(stored, followed[-1], tuple(map(len, followed)), derive_seed(cell.seed, "select"))
            result = {budget: order[: len(rows)] for budget, rows in zip(budgets, followed, strict=True)}
            about = {"shared": float(np.isin(order, followed[-1]).mean())}
        chosen |= result
    solved = time.process_time()
    lines = np.full((len(chosen), 1 + max(map(len, chosen.values()))), -1, dtype=np.int32)
    for line, (budget, rows) in zip(lines, chosen.items(), strict=True):
        line[0], line[1 : 1 + len(rows)] = budget, rows
    with atomic_file(selection_file(root, cell.key)) as temporary, temporary.open("wb") as handle:
        np.save(handle, lines, allow_pickle=False)
    figures = _figures(root, cell, stored, np.asarray(pool.features), chosen)
    seconds = {"features of the target": prepared - started, "scores": solved - prepared}
    seconds["figures"] = time.process_time() - solved
    seconds = {name: round(value, 3) for name, value in seconds.items()}
    return {"figures": figures, "about": about, "pool": len(stored), "seconds": seconds}


@functools.lru_cache(maxsize=1)
def pool_tokens(root: Path, key: str, backbone: str) -> TokenRows:
    """The tokens of a study's pool."""
    tokenize, size = backbone_tokenizer(Recipe(backbone=backbone))
    return TokenRows.of(tokenize(open_pool(root, key).texts), size)


def _selected(
    root: Path, cell: SelectionCell, pool: Pool, target: Pool, budgets: tuple[int, ...]
) -> tuple[Chosen, dict[str, Any]]:
    """The selector's choice for each budget, all from one order, and its diagnostics."""
    assert cell.recipe.select is not None
    method = MooreLewis() if cell.form else cell.recipe.select.method
    size = budgets[-1]
    lengths = np.empty(0)
    if cell.unit == "tokens" or "tokens" in required_inputs(method):
        tokens = pool_tokens(root, cell.pool.key, cell.recipe.backbone)
        tokenize, vocabulary = backbone_tokenizer(cell.recipe)
        texts = list(target.texts or ())
        pool, target = replace(pool, tokens=tokens), replace(target, tokens=TokenRows.of(tokenize(texts), vocabulary))
        lengths = tokens.lengths + 1  # a passage ends with a token of its own
        if cell.unit == "tokens":
            size = min(len(lengths), int(size * (1 - cell.own) / cell.times / lengths.mean()) + 1)
    if cell.form:
        pool = replace(pool, tokens=shapes(list(pool.texts or ())))
        target = replace(target, tokens=shapes(list(target.texts or ())))
    selector = build_selector(method, seed=derive_seed(cell.seed, "select"), budget=size, device="cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        selector.fit(pool, target)
    about = {name: v for name, v in selector.diagnostics_.items() if isinstance(v, bool | int | float | str)}
    if caught:
        about["warning"] = str(caught[0].message)
    if cell.unit == "passages":
        order = np.asarray(selector.select(size))
        return {budget: order[:budget] for budget in budgets}, about
    order = np.asarray(selector.select(len(lengths)))
    reached = np.cumsum(lengths[order])
    share = (1 - cell.own) / cell.times
    return {each: order[: int(np.searchsorted(reached, each * share)) + 1] for each in budgets}, about


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
        parts = [by_stratum[first : first + count] for first, count in zip(starts + taken, wanted, strict=True)]
        some = np.concatenate(parts)
        taken += wanted
        order.append(some[np.argsort(draw[some], kind="stable")])
    return np.concatenate(order)


def _figures(root: Path, cell: SelectionCell, stored: StoredPool, x: np.ndarray, chosen: Chosen) -> dict[str, Any]:
    """By budget: recall of the hidden domains, coverage of the test texts, length and mix of what was chosen."""
    evaluation = split_rows(cell.rows, cell.recipe.task, "test")[1]
    texts = [str(row.values["text"]) for row in evaluation]
    y = vectors(root, cell.features, texts)
    words = Counter(word for text in texts for word in _words(text))
    wanted = np.isin(stored.domains, list(cell.rows.domains))
    results: dict[str, dict[str, Any]] = {}
    for budget, order in chosen.items():
        rows = np.unique(order)  # a passage that is read again counts once
        seen = {word for row in rows.tolist() for word in _words(stored.texts[row])}
        hits = int(wanted[rows].sum())
        results[str(budget)] = {
            "recall": hits / min(len(rows), int(wanted.sum())) if wanted.any() else None,
            "precision": hits / len(rows),
            "distance": _distance(y, np.asarray(x[rows], dtype=np.float32)),
            "words": sum(count for word, count in words.items() if word in seen) / max(sum(words.values()), 1),
            "length": float(stored.words[rows].mean()),
            "domains": {name: n / len(rows) for name, n in Counter(stored.domains[rows].tolist()).most_common(5)},
        }
    return results


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _distance(y: np.ndarray, x: np.ndarray) -> float:
    """Mean squared distance of each y to its nearest x."""
    nearest = np.full(len(y), np.inf)
    for low in range(0, len(x), 4096):
        some = x[low : low + 4096]
        squared = (y * y).sum(1)[:, None] + (some * some).sum(1) - 2.0 * (y @ some.T)
        nearest = np.minimum(nearest, squared.min(axis=1))
    return float(np.maximum(nearest, 0.0).mean())
