"""n-gram decontamination by the rules of Megatron-LM's task filter (tools/openwebtext/filter_ngrams.py, MT-NLG).

13 consecutive words (runs of letters, digits and underscores in lower case) shared with an evaluation text are
contamination. The record is split there: the shared words and 200 characters on both sides are removed, and further
text up to the nearest end of a sentence (`.`, `!` or `?`); pieces under 200 characters are dropped; the rest of the
text is searched again; with more than 10 pieces, or none, the record is dropped. N-grams with 10 or more occurrences in
the pool are ordinary phrases. Two differences from the original: the end of the shared words is their end in the text
(there: the length of the words joined by blanks), and every occurrence of an n-gram counts (there: none that overlaps
an earlier match).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flatshift.selection.hashing import WORDS, WordHashes, window_hashes
from flatshift.selection.hygiene import hygiene_config
from flatshift.selection.hygiene.store import GrowingArray, block_ranges

Spans = list[tuple[int, int]]
_FILTER_BITS = 20


def lower_words(text: str) -> list[str]:
    """Return the words of a text in lower case, in the order and number found by `WORDS`."""
    if text.isascii():
        return WORDS.findall(text.lower())
    return [word.lower() for word in WORDS.findall(text)]  # lower() of the whole text might move the borders of words


class Decontaminator:
    """Finds evaluation n-grams in pool texts and cuts them out.

    finder = Decontaminator(settings, evaluation_texts); finder.match(batch) for every batch of the pool; then
    finder.contaminated(alive), and finder.cut(text) for each row that it returns.
    """

    def __init__(self, settings: hygiene_config.Decontaminate, evaluation: Sequence[str]):
        self.settings = settings
        self._words = WordHashes()
        hashes_of: dict[int, list[np.ndarray]] = {}
        owners: dict[int, list[np.ndarray]] = {}
        too_short = 0
        for row, text in enumerate(evaluation):
            codes, counts = self._words.codes([lower_words(text)])
            size = min(len(codes), settings.ngram)
            if size < settings.shortest:
                too_short += 1
                continue
            hashes, _ = window_hashes(codes, counts, size)
            hashes_of.setdefault(size, []).append(hashes)
            owners.setdefault(size, []).append(np.full(len(hashes), row))
        # For each length, longest first: the sorted hashes, the text of each, and the first of their numbers.
        self._tables: list[tuple[int, np.ndarray, np.ndarray, int]] = []
        self.ngrams = 0
        self._maybe = np.zeros(1 << _FILTER_BITS, dtype=bool)
        for size in sorted(hashes_of, reverse=True):
            hashes, index = np.unique(np.concatenate(hashes_of[size]), return_index=True)
            self._tables.append((size, hashes, np.concatenate(owners[size])[index], self.ngrams))
            self.ngrams += len(hashes)
            self._maybe[_filter_slot(hashes)] = True
        self._rows, self._hits = GrowingArray(np.int64), GrowingArray(np.int64)
        self._seen = 0
        self._leak = np.ones(self.ngrams, dtype=bool)
        self.diagnostics: dict[str, Any] = {"ngrams": self.ngrams, "too_short": too_short}

    def match(self, texts: Sequence[str]) -> None:
        """Match the next rows of the pool, as they are."""
        codes, counts = self._words.codes([lower_words(text) for text in texts])
        for size, table, _, base in self._tables:
            hashes, window_counts = window_hashes(codes, counts, size)
            index, number = self._lookup(hashes, table)
            if len(index):
                self._rows.append(self._seen + np.searchsorted(np.cumsum(window_counts), index, side="right"))
                self._hits.append(base + number)
        self._seen += len(texts)

    @property
    def matches(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows that share an n-gram, and the numbers of these n-grams."""
        return self._rows.array(), self._hits.array()

    def add_matches(self, rows: np.ndarray, hits: np.ndarray) -> None:
        """Add the `matches` of another finder of the same texts, with the pool's row numbers."""
        self._rows.append(rows)
        self._hits.append(hits)

    def contaminated(self, alive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (rows, owner): the contaminated rows, ascending, and the evaluation text that each shares words with.

        alive: (N,) bool, the rows not dropped yet; only they count for identifying ordinary phrases.
        """
        every_row, every_hit = self.matches
        if self.settings.common is not None:
            occurs = np.zeros(self.ngrams, dtype=np.int64)
            for low, high in block_ranges(len(every_row)):
                standing = alive[every_row[low:high]]
                occurs += np.bincount(every_hit[low:high][standing], minlength=self.ngrams)
            self._leak = occurs < self.settings.common
        self.diagnostics["common"] = int((~self._leak).sum())
        # N-grams that are not ordinary phrases have few occurrences, so these arrays are small.
        leaks = [
            low + np.flatnonzero(alive[every_row[low:high]] & self._leak[every_hit[low:high]])
            for low, high in block_ranges(len(every_row))
        ]
        hits_index = np.concatenate([np.empty(0, np.int64), *leaks])
        rows, hits = every_row[hits_index], every_hit[hits_index]
        owners = np.concatenate([owner for _, _, owner, _ in self._tables] or [np.empty(0, np.int64)])[hits]
        order = np.lexsort((owners, rows))
        contaminated, index = np.unique(rows[order], return_index=True)
        return contaminated, owners[order][index]

    def cut(self, text: str) -> Spans:
        """Return the pieces (start, end) left of a contaminated text; the whole text if nothing matches."""
        return split_text(text, self.spans(text), self.settings)

    def spans(self, text: str) -> Spans:
        """Return (start, end) in characters of every contaminated n-gram of the text, by start, the longest of each."""
        matches = list(WORDS.finditer(text))
        codes, counts = self._words.codes([[match.group().lower() for match in matches]])
        ends: dict[int, int] = {}
        for size, table, _, base in self._tables:
            hashes, _ = window_hashes(codes, counts, size)
            index, number = self._lookup(hashes, table)
            for word in index[self._leak[base + number]].tolist():
                ends.setdefault(word, word + size - 1)
        return [(matches[word].start(), matches[ends[word]].end()) for word in sorted(ends)]

    def _lookup(self, hashes: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions of `hashes` found in the sorted `table`, and their positions there."""
        index = np.flatnonzero(self._maybe[_filter_slot(hashes)])
        number = np.minimum(np.searchsorted(table, hashes[index]), len(table) - 1)
        equal = table[number] == hashes[index]
        return index[equal], number[equal]


def _filter_slot(hashes: np.ndarray) -> np.ndarray:
    return (hashes >> np.uint64(64 - _FILTER_BITS)).astype(np.int64)


def split_text(text: str, spans: Spans, settings: hygiene_config.Decontaminate) -> Spans:
    """Return the pieces that the rules leave of a text with contamination at `spans` (sorted by start)."""
    pieces: Spans = []
    low = 0
    for start, end in spans:
        if start < low:
            continue  # removed by an earlier cut
        # Left: the last end of a sentence at or before `margin` characters in front of the match.
        stop = max(text.rfind(mark, low + 1, max(start - settings.margin, 0) + 1) for mark in ".!?")
        if stop > low and stop + 1 - low >= settings.min_chars:
            pieces.append((low, stop + 1))
        # Right: after the first end of a sentence that is at least `margin` characters after the match.
        marks = [text.find(mark, end + settings.margin) for mark in ".!?"]
        low = min((mark for mark in marks if mark >= 0), default=len(text)) + 1
        if len(text) - low < settings.min_chars:
            return pieces
    pieces.append((low, len(text)))
    return pieces
