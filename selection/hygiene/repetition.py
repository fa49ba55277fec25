"""How much of a text is repetition of itself (Rae et al. 2021, arXiv 2112.11446, Table A1), for many texts at a time.

All shares of n-grams are of the characters in words. Two readings are ours: an n-gram that occurs once is no
repetition, however short the text; and a character is counted once, in however many repeated n-grams it stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from selection.hygiene.shingles import WORDS, WordHashes, mix, windows

_PARAGRAPH = re.compile(r"\n{2,}")
_WORDS_AT_ONCE = 1 << 18


def shares(texts: Sequence[str], *, top: int = 3, repeated: int = 6) -> dict[str, np.ndarray]:
    """Name → (n,) float64 in [0, 1], 0 where a text is too short to have any.

    top: how many of n = 2, 3, … for the commonest n-gram. repeated: how many of n = 5, 6, … for repeated n-grams.
    """
    lines = np.array([_repeated(text.split("\n")) for text in texts]).reshape(-1, 2)
    paragraphs = np.array([_repeated(_PARAGRAPH.split(text)) for text in texts]).reshape(-1, 2)
    found = {
        "repeated lines": lines[:, 0],
        "characters in repeated lines": lines[:, 1],
        "repeated paragraphs": paragraphs[:, 0],
        "characters in repeated paragraphs": paragraphs[:, 1],
    }
    portions = list(_portions([WORDS.findall(text.lower()) for text in texts])) or [[]]
    parts = [_ngram_shares(portion, top, repeated) for portion in portions]
    for name in parts[0]:
        found[name] = np.concatenate([part[name] for part in parts])
    return found


def _repeated(pieces: list[str]) -> tuple[float, float]:
    """Share of the non-blank pieces that repeat an earlier one, and of the characters in them."""
    pieces = [stripped for piece in pieces if (stripped := piece.strip())]
    if len(pieces) < 2:
        return 0.0, 0.0
    seen: set[str] = set()
    count = characters = 0
    for piece in pieces:
        if piece in seen:
            count += 1
            characters += len(piece)
        seen.add(piece)
    return count / len(pieces), characters / sum(map(len, pieces))


def _portions(words: list[list[str]]) -> Iterator[list[list[str]]]:
    """Consecutive texts with a bounded number of words (a single text may have more)."""
    portion: list[list[str]] = []
    held = 0
    for some in words:
        if portion and held + len(some) > _WORDS_AT_ONCE:
            yield portion
            portion, held = [], 0
        portion.append(some)
        held += len(some)
    if portion:
        yield portion


def _ngram_shares(words: list[list[str]], top: int, repeated: int) -> dict[str, np.ndarray]:
    codes, counts = WordHashes().codes(words)
    lengths = np.fromiter((len(word) for some in words for word in some), dtype=np.int64, count=len(codes))
    text_of = np.repeat(np.arange(len(words)), counts)
    total = np.maximum(np.bincount(text_of, weights=lengths, minlength=len(words)), 1)
    before = np.append(0, np.cumsum(lengths))  # characters in all words before each one
    starts = np.cumsum(counts) - counts
    found = {}
    for n in range(2, 2 + top):
        place, owner, kind, times, _ = _occurrences(codes, counts, starts, n)
        size = before[place + n] - before[place]
        covered = np.where(times[kind] > 1, times[kind] * size, 0)
        # The commonest, and of equally common ones the longest; overlapping occurrences may exceed the text.
        rank = np.zeros(len(words), np.int64)
        np.maximum.at(rank, owner, times[kind])
        most = np.zeros(len(words))
        np.maximum.at(most, owner, np.where(times[kind] == rank[owner], covered, 0))
        found[f"characters in the commonest {n}-gram"] = np.minimum(most / total, 1.0)
    for n in range(5, 5 + repeated):
        place, _, _, _, again = _occurrences(codes, counts, starts, n)
        change = np.zeros(len(codes) + 1, np.int64)
        np.add.at(change, place[again], 1)
        np.add.at(change, place[again] + n, -1)
        inside = np.cumsum(change[:-1]) > 0
        covered = np.bincount(text_of, weights=lengths * inside, minlength=len(words))
        found[f"characters in repeated {n}-grams"] = covered / total
    return found


def _occurrences(
    codes: np.ndarray, counts: np.ndarray, starts: np.ndarray, n: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of every n-gram: its place among all words, its text, its kind within the text, how often each kind occurs, and
    whether it stood in the text before."""
    hashes, kept = windows(codes, counts, n)
    owner = np.repeat(np.arange(len(counts)), kept)
    place = np.arange(len(hashes)) - np.repeat(np.cumsum(kept) - kept, kept) + np.repeat(starts, kept)
    key = mix(hashes + owner.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    order = np.argsort(key, kind="stable")  # places ascend within a kind
    opens = np.ones(len(order), dtype=bool)
    opens[1:] = key[order][1:] != key[order][:-1]
    kind = np.empty(len(order), np.int64)
    kind[order] = np.cumsum(opens) - 1
    again = np.empty(len(order), dtype=bool)
    again[order] = ~opens
    return place, owner, kind, np.bincount(kind), again
