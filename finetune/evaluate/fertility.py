"""Tokenizer statistics on texts: tokens per word, bytes per token, split words, and use of the vocabulary."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import regex
from numpy.typing import NDArray

from .text import count_graphemes, split_words

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SCRIPTS = (
    "Latin", "Cyrillic", "Greek", "Arabic", "Hebrew", "Devanagari", "Bengali", "Tamil", "Telugu", "Georgian",
    "Armenian", "Ethiopic", "Thai", "Lao", "Khmer", "Myanmar", "Han", "Hiragana", "Katakana", "Hangul",
)  # fmt: skip
_SCRIPT = {name: regex.compile(rf"\p{{{name}}}") for name in _SCRIPTS}
_BATCH = 512


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer and the properties of each of its tokens."""

    tokenizer: Any

    @cached_property
    def pieces(self) -> list[str]:
        """Decoded text of each token by itself."""
        count = len(self.tokenizer)
        return [str(self.tokenizer.decode([i])) for i in range(count)]

    @cached_property
    def part_of_character(self) -> NDArray[np.bool_]:
        """(V,) True if the token is a part of a character's bytes."""
        names = self.tokenizer.convert_ids_to_tokens(range(len(self.tokenizer)))
        return np.array(
            [
                "\ufffd" in piece or _BYTE.fullmatch(str(name)) is not None
                for piece, name in zip(self.pieces, names, strict=True)
            ]
        )

    @cached_property
    def one_character(self) -> NDArray[np.bool_]:
        """(V,) True if the token is one character, surrounding blanks aside."""
        return np.array([count_graphemes(piece.strip()) == 1 for piece in self.pieces]) & ~self.part_of_character

    @cached_property
    def scripts(self) -> Counter[str]:
        """Number of tokens that have a letter of each script."""
        return Counter(name for piece in self.pieces for name, of in _SCRIPT.items() if of.search(piece))


@dataclass(frozen=True)
class TokenizedTexts:
    """Statistics of tokenised texts; arrays of N documents."""

    tokens: NDArray[np.int64]
    words: NDArray[np.int64]
    continued: NDArray[np.int64]
    """Words of more than one token"""
    characters: NDArray[np.int64]
    bytes: NDArray[np.int64]
    parts: NDArray[np.int64]
    """Tokens that are part of a character's bytes"""
    unknown: NDArray[np.int64]
    single: NDArray[np.int64]
    """Tokens of one character"""
    used: Counter[int]
    """Number of occurrences of each token over all documents"""

    def of(self, rows: NDArray[np.int64] | slice) -> dict[str, float | None]:
        """Return the metrics over some of the documents."""

        def share(a: NDArray, b: NDArray) -> float | None:
            whole = int(b[rows].sum())
            return float(a[rows].sum()) / whole if whole else None

        return {
            "tokens_per_word": share(self.tokens, self.words),
            "characters_per_token": share(self.characters, self.tokens),
            "bytes_per_token": share(self.bytes, self.tokens),
            "continued_words": share(self.continued, self.words),
            "byte_tokens": share(self.parts, self.tokens),
            "unknown": share(self.unknown, self.tokens),
            "single_characters": share(self.single, self.tokens),
        }


def tokenize_texts(vocabulary: Vocabulary, texts: Sequence[str]) -> TokenizedTexts:
    """Tokenise every text, without special tokens."""
    tokenizer, unknown = vocabulary.tokenizer, vocabulary.tokenizer.unk_token_id
    rows: list[tuple[int, ...]] = []
    used: Counter[int] = Counter()
    for start in range(0, len(texts), _BATCH):
        batch = list(texts[start : start + _BATCH])
        found = tokenizer(
            batch, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False
        )
        for text, ids, offsets in zip(batch, found["input_ids"], found["offset_mapping"], strict=True):
            places = np.array(ids, dtype=np.int64)
            used.update(ids)
            words = split_words(text)
            rows.append(
                (
                    len(ids), len(words), _count_split_words(text, words, offsets), len(text), len(text.encode()),
                    int(vocabulary.part_of_character[places].sum()) if len(ids) else 0,
                    0 if unknown is None else int((places == unknown).sum()),
                    int(vocabulary.one_character[places].sum()) if len(ids) else 0,
                )
            )  # fmt: skip
    columns = np.array(rows, dtype=np.int64).T.reshape(8, -1)
    tokens, words_, continued, characters, size, parts, unknown_, single = list(columns)
    return TokenizedTexts(tokens, words_, continued, characters, size, parts, unknown_, single, used)


def _count_split_words(text: str, words: Sequence[str], offsets: Sequence[tuple[int, int]]) -> int:
    """Return the number of words that have a token starting inside them."""
    begins = np.unique([a for a, b in offsets if b > a])
    repeated = {a for (a, _), (c, _) in pairwise(offsets) if a == c}  # a character split into byte tokens
    found = at = 0
    for word in words:
        start = text.index(word, at)
        at = start + len(word)
        # the first token of a word may include the blank before it
        inside = np.searchsorted(begins, at) - np.searchsorted(begins, start + 1)
        found += bool(inside > 0 or any(start <= place < at for place in repeated))
    return found
