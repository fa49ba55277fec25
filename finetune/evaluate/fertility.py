"""What a tokenizer makes of texts: tokens a word, bytes a token, words cut up, and what of the vocabulary is used."""

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

from .text import graphemes_of, words_of

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SCRIPTS = (
    "Latin", "Cyrillic", "Greek", "Arabic", "Hebrew", "Devanagari", "Bengali", "Tamil", "Telugu", "Georgian",
    "Armenian", "Ethiopic", "Thai", "Lao", "Khmer", "Myanmar", "Han", "Hiragana", "Katakana", "Hangul",
)  # fmt: skip
_SCRIPT = {name: regex.compile(rf"\p{{{name}}}") for name in _SCRIPTS}
_BATCH = 512


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer and what each of its tokens is."""

    tokenizer: Any

    @cached_property
    def pieces(self) -> list[str]:
        """What each token decodes to by itself."""
        count = len(self.tokenizer)
        return [str(self.tokenizer.decode([i])) for i in range(count)]

    @cached_property
    def part_of_character(self) -> NDArray[np.bool_]:
        """Whether a token is some of the bytes of a character."""
        names = self.tokenizer.convert_ids_to_tokens(range(len(self.tokenizer)))
        return np.array(
            [
                "\ufffd" in piece or _BYTE.fullmatch(str(name)) is not None
                for piece, name in zip(self.pieces, names, strict=True)
            ]
        )

    @cached_property
    def one_character(self) -> NDArray[np.bool_]:
        """Whether a token is one character, blanks around it aside."""
        return np.array([graphemes_of(piece.strip()) == 1 for piece in self.pieces]) & ~self.part_of_character

    @cached_property
    def scripts(self) -> Counter[str]:
        """How many tokens have a letter of each script."""
        return Counter(name for piece in self.pieces for name, of in _SCRIPT.items() if of.search(piece))


@dataclass(frozen=True)
class TokenizedTexts:
    """Texts as a tokenizer cuts them; arrays of N documents."""

    tokens: NDArray[np.int64]
    words: NDArray[np.int64]
    continued: NDArray[np.int64]
    """Words of more than one token"""
    characters: NDArray[np.int64]
    bytes: NDArray[np.int64]
    parts: NDArray[np.int64]
    """Tokens that are some bytes of a character"""
    unknown: NDArray[np.int64]
    single: NDArray[np.int64]
    """Tokens of one character"""
    used: Counter[int]
    """How often each token occurs, over all documents"""

    def of(self, rows: NDArray[np.int64] | slice) -> dict[str, float | None]:
        """The figures over some of the documents."""

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


def cut_texts(vocabulary: Vocabulary, texts: Sequence[str]) -> TokenizedTexts:
    """Cut every text, without special tokens."""
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
            words = words_of(text)
            rows.append(
                (
                    len(ids), len(words), _continued(text, words, offsets), len(text), len(text.encode()),
                    int(vocabulary.part_of_character[places].sum()) if len(ids) else 0,
                    0 if unknown is None else int((places == unknown).sum()),
                    int(vocabulary.one_character[places].sum()) if len(ids) else 0,
                )
            )  # fmt: skip
    columns = np.array(rows, dtype=np.int64).T.reshape(8, -1)
    tokens, words_, continued, characters, size, parts, unknown_, single = list(columns)
    return TokenizedTexts(tokens, words_, continued, characters, size, parts, unknown_, single, used)


def _continued(text: str, words: Sequence[str], offsets: Sequence[tuple[int, int]]) -> int:
    """How many of the words a token begins inside of."""
    begins = np.unique([a for a, b in offsets if b > a])
    repeated = {a for (a, _), (c, _) in pairwise(offsets) if a == c}  # a character in parts
    found = at = 0
    for word in words:
        start = text.index(word, at)
        at = start + len(word)
        # a token may begin with the blank before the word
        inside = np.searchsorted(begins, at) - np.searchsorted(begins, start + 1)
        found += bool(inside > 0 or any(start <= place < at for place in repeated))
    return found
