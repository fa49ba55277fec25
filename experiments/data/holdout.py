"""Held-out rows: all copies of one text go to the same split, and each split has its share of every class.

The draw depends on the rows alone, not on the run's seed or task, so that a selection for some rows holds out the same
rows as a training on them.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from array import array
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from flatshift.finetune.data.config import Columns
from flatshift.finetune.data.rows import Row, canonical_label
from flatshift.finetune.errors import UserError
from flatshift.finetune.seeds import derive_seed, numpy_generator

Split = Literal["train", "dev", "test"]
SPLITS: tuple[Split, ...] = ("train", "dev", "test")
_FREQUENT = 1 / 20  # share of the rows above which a text is held out last: it would be most of the evaluation rows
_MIN_TEXTS = 5  # average number of texts per class from which on the draw is stratified by class


def normalize_text(text: str) -> str:
    """Return the text in Unicode form NFKC, with single spaces for white space."""
    return " ".join((text if text.isascii() else unicodedata.normalize("NFKC", text)).split())


class RowKeys:
    """Hashes of the rows' texts, and their classes, in order: the input of the draw (prompt: as of `content_hash`)."""

    def __init__(self, prompt: Collection[str]) -> None:
        self.texts, self.classes, self._prompt = array("q"), array("q"), prompt
        self._numbers: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.texts)

    def add(self, row: Row, columns: Columns) -> None:
        """Add the next row; columns: those that it was read with."""
        self.texts.append(content_hash(row, columns, self._prompt))
        try:
            name = canonical_label(row.record.get(columns.label))
        except ValueError:
            name = ""
        self.classes.append(self._numbers.setdefault(name, len(self._numbers)))


def content_hash(row: Row, columns: Columns, prompt: Collection[str]) -> int:
    """Return a hash, 64 bits with a sign, of a row read with `columns`: of its conversation, or prompt and answers, if
    these are of the task's `prompt`, else of its text or pair, else of its conversation, else of its prompt and
    answers, else of all but its id and class. Compatible characters (NFKC) and white space are normalised."""
    values = row.values
    own = next((name for name in ("messages", "prompt") if name in prompt and name in values), None)
    if own is None and isinstance(values.get("text"), str):
        second = values.get("text2")
        content = values["text"] if second is None else [values["text"], second]
    elif own != "prompt" and "messages" in values:
        content = values["messages"]
    elif "prompt" in values:
        content = [values.get(name) for name in ("prompt", "completion", "chosen", "rejected")]
    else:
        content = {key: value for key, value in row.record.items() if key not in (columns.id, columns.label)}
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, sort_keys=True, default=str)
    digest = hashlib.blake2b(normalize_text(text).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def split_holdout(
    keys: RowKeys, share: float, splits: Sequence[Split] = SPLITS[1:]
) -> tuple[np.ndarray, dict[Split, np.ndarray]]:
    """Return the indices of the rows that stay, and those of each of `splits`: about `share` of all, at least one text.

    The draw is the same for every run. The rows held out for fewer splits or a smaller share are a subset of those held
    out for more. Raises UserError if no text would be left to train on.
    """
    total = len(keys)
    if not share or not splits:
        return np.arange(total), {}
    _, first_rows, group = np.unique(np.asarray(keys.texts), return_index=True, return_inverse=True)
    sizes, classes = np.bincount(group), np.asarray(keys.classes)[first_rows]
    if _MIN_TEXTS * len(np.unique(classes)) > len(first_rows):  # the column has names or numbers rather than classes
        classes = np.zeros_like(classes)
    turn = np.empty(total, dtype=np.int64)
    turn[numpy_generator(derive_seed(0, "holdout"), "limit").permutation(total)] = np.arange(total)
    order = np.lexsort(
        (turn[first_rows], _position_in_class(classes, turn[first_rows], sizes), sizes > max(1, _FREQUENT * total))
    )
    target = len(splits) * max(1, round(share * total))
    count = max(int(np.searchsorted(np.cumsum(sizes[order]), target)) + 1, len(splits))
    if count >= len(order):
        raise UserError(
            f"data.holdout: {share:g} of {total} rows with {len(order)} different texts leaves none to train on; give "
            "more rows, or set data.holdout to 0 and evaluate on files of their own (data.test.files)"
        )
    owner = _assign_splits(order[:count], classes, first_rows, sizes, splits)[group]
    held_out = {split: np.flatnonzero(owner == number) for number, split in enumerate(splits, start=1)}
    return np.flatnonzero(owner == 0), held_out


_BREAKS = (re.compile(r"\n\s*\n\s*"), re.compile(r"\n\s*"), re.compile(r"(?<=[.!?。！？])\s+"), re.compile(r"\s+"))
"""Breaks at which a document is cut, the best first: paragraphs, lines, sentences, words."""


def cut_documents(rows: Sequence[Row], share: float, splits: Sequence[Split]) -> dict[Split, list[Row]] | None:
    """Cut each of very few documents: its beginning stays, and each of `splits` gets a piece of `share` of its
    characters from its end. Return None for more documents than splits, or if one is too short."""
    if not share or not splits or not 0 < len(rows) <= len(splits):
        return None
    pieces: dict[Split, list[Row]] = {split: [] for split in ("train", *splits)}
    for row in rows:
        text = row.values.get("text")
        if not isinstance(text, str):
            return None
        size, begin = share * len(text), 0
        for split, remaining in zip(pieces, range(len(splits), -1, -1), strict=True):
            end, after = _break_near(text, round(len(text) - remaining * size), size) if remaining else (len(text), 0)
            piece = text[begin:end]
            if not piece.strip():
                return None
            name = "" if split == "train" else f"#{split}"
            cut = replace(row, values={**row.values, "text": piece}, id=f"{row.id}{name}", where=f"{row.where}{name}")
            pieces[split].append(cut)
            begin = after
    return pieces


def _break_near(text: str, position: int, size: float) -> tuple[int, int]:
    """Return end and beginning of two pieces around a position, at the largest break within half of `size`."""
    low = max(0, round(position - size / 2))
    for kind in _BREAKS:
        near = [match.span() for match in kind.finditer(text, low, round(position + size / 2))]
        if near:
            return min(near, key=lambda span: abs(span[0] - position))
    return position, position


def _position_in_class(classes: np.ndarray, turn: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the position of each group among the rows of its class, from 0 to 1."""
    order = np.lexsort((turn, classes))
    ends = np.cumsum(sizes[order])
    totals = np.bincount(classes, weights=sizes)
    before = np.concatenate([[0], np.cumsum(totals)])[classes[order]]
    positions = np.empty(len(sizes))
    positions[order] = (ends - sizes[order] / 2 - before) / totals[classes[order]]
    return positions


def _assign_splits(
    chosen: np.ndarray, classes: np.ndarray, first_rows: np.ndarray, sizes: np.ndarray, splits: Sequence[Split]
) -> np.ndarray:
    """Return for each group the number of its split, from 1, or 0 if it stays. The groups are assigned class by class
    in the order of the rows, each to the split with the fewest rows; test gets the first."""
    owner = np.zeros(len(sizes), dtype=np.int8)
    rows = [0] * len(splits)
    for group in chosen[np.lexsort((first_rows[chosen], classes[chosen]))].tolist():
        number = min(range(len(splits)), key=lambda split: (rows[split], -split))
        rows[number] += int(sizes[group])
        owner[group] = number + 1
    return owner
