"""Perplexity of whole documents, per token, word, character and byte, from one pass; and a tokenizer's statistics on
texts: tokens per word, bytes per token, split words, and use of the vocabulary.

Every token of a document is scored exactly once, however long the document: in windows of equal width, each of which
repeats the end of the previous one as context. The first token is predicted from the tokens that start a text in
training, else from the end-of-sequence token, as in lm-eval. The end of a document is not scored: only its text counts.

Words are the segments of Unicode's default word boundaries (UAX #29) that contain a letter or a digit. Scripts without
blanks (Thai, Lao, Khmer, Burmese, Chinese, Japanese) are segmented by ICU's dictionaries if the package `icu4py` is
installed (extra `words`); without it each of their segments is a syllable or a sign, which `missing_dictionary_note`
reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import regex
from numpy.typing import NDArray

from ..compute.protocols import LossTask
from ..data.encoding import SpecialTokens
from ..data.eval_batching import EvalBatching
from ..data.example import IGNORE, Example
from ..errors import UserError
from .perplexity import DocumentCounts, document_nats

_BOUNDARY = regex.compile(r"\b", regex.WORD | regex.V1)
_WORDLIKE = regex.compile(r"[\p{L}\p{N}]")
_NO_BLANKS = regex.compile(r"[\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Han}\p{Hiragana}\p{Katakana}]")
_GRAPHEME = regex.compile(r"\X")
_BYTE = regex.compile(r"<0x[0-9A-Fa-f]{2}>")
_SCRIPTS = (
    "Latin", "Cyrillic", "Greek", "Arabic", "Hebrew", "Devanagari", "Bengali", "Tamil", "Telugu", "Georgian",
    "Armenian", "Ethiopic", "Thai", "Lao", "Khmer", "Myanmar", "Han", "Hiragana", "Katakana", "Hangul",
)  # fmt: skip
_SCRIPT = {name: regex.compile(rf"\p{{{name}}}") for name in _SCRIPTS}
_BATCH = 256
"""Documents tokenised at once."""


def split_words(text: str) -> list[str]:
    """Return the words of `text`, in order."""
    if _NO_BLANKS.search(text) and (breaker := _word_breaker()) is not None:
        segments = breaker(text)
    else:
        segments = _BOUNDARY.split(text)
    return [segment for segment in segments if _WORDLIKE.search(segment)]


def count_graphemes(text: str) -> int:
    """Return the number of user-perceived characters: extended grapheme clusters of UAX #29."""
    return len(text) if text.isascii() and "\r" not in text else sum(1 for _ in _GRAPHEME.finditer(text))


def missing_dictionary_note(texts: Sequence[str]) -> str | None:
    """Return a note about word counts if some texts have a script without blanks and ICU is not installed."""
    count = 0 if _word_breaker() is not None else sum(1 for text in texts if _NO_BLANKS.search(text))
    if not count:
        return None
    return (
        f"{count:,} texts have words without blanks between them (Thai, Lao, Khmer, Burmese, Chinese, Japanese), "
        "counted by syllable or sign; for ICU's dictionaries: pip install 'flatshift[words]'"
    )


def _word_breaker() -> Callable[[str], list[str]] | None:
    try:
        from icu4py.breakers import WordBreaker
    except ImportError:
        return None
    return lambda text: list(WordBreaker(text, "en"))


def score_texts(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    inference: EvalBatching,
    *,
    task: LossTask,
    window: int,
    overlap: int,
    locations: Sequence[str] | None = None,
) -> DocumentCounts:
    """Score every token of every text once.

    window: tokens that the model reads at once.
    overlap: tokens at the start of every window but a document's first that are context, scored before.
    locations: of each text, for messages.
    Raises UserError: an overlap that leaves nothing to score, or a text without a token.
    """
    if not 1 <= overlap < window:
        raise UserError(f"--overlap: {overlap} is not from 1 to {window - 1}, below the window of {window} tokens")
    begin = beginning_tokens(tokenizer)
    pieces: list[Example] = []
    documents: list[int] = []
    for start in range(0, len(texts), _BATCH):
        encoded = tokenizer(
            list(texts[start : start + _BATCH]), add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        for i, ids in enumerate(encoded, start=start):
            if not ids:
                raise UserError(f"{locations[i] if locations else f'text {i + 1}'}: the text is empty")
            for piece, labels in sliding_windows([*begin, *ids], window, overlap, first=len(begin)):
                pieces.append(Example(piece, labels, str(i), ""))
                documents.append(i)
    nats, tokens = document_nats(model, pieces, inference, task=task, masked=bool(getattr(model, "soft_tokens", 0)))
    n = len(texts)
    return DocumentCounts(
        nats=np.bincount(documents, weights=nats, minlength=n).astype(np.float64),
        tokens=np.bincount(documents, weights=tokens, minlength=n).astype(np.int64),
        words=np.array([len(split_words(text)) for text in texts], dtype=np.int64),
        characters=np.array([len(text) for text in texts], dtype=np.int64),
        bytes=np.array([len(text.encode()) for text in texts], dtype=np.int64),
    )


def beginning_tokens(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens before a document: those of training, else its end-of-sequence token, so that every token is
    scored. Raises UserError: the tokenizer has neither."""
    prefix = SpecialTokens.of(tokenizer).prefix
    if not prefix and tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no token that could stand before a text; name a backbone with bos or eos")
    return prefix or (tokenizer.eos_token_id,)


def sliding_windows(
    ids: Sequence[int], window: int, overlap: int, *, first: int = 1
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield input tokens and labels (IGNORE: context) of each window; every token from `first` on is a label exactly
    once."""
    done = first
    while done < len(ids):
        start = 0 if done == first else done - overlap
        end = min(start + window, len(ids))
        yield list(ids[start:end]), [IGNORE] * (done - start) + list(ids[done:end])
        done = end


@cache
def _language_table() -> dict[str, tuple[str, str]]:
    """Return name and family by code: ISO 639-1, 639-3, and codes of single varieties that stand for the language."""
    lines = (Path(__file__).parent / "languages.tsv").read_text(encoding="utf-8").splitlines()
    rows = (line.split("\t") for line in lines)
    return {code: (name, family) for codes, name, family in rows for code in codes.split()}


def find_language(code: str) -> tuple[str, str] | None:
    """Return name and family of a language by its code, ignoring region and script (`zh-CN`, `deu_1901`); None if
    unknown."""
    return _language_table().get(regex.split(r"[-_]", code.strip().lower())[0])


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer and the properties of each of its tokens."""

    tokenizer: Any

    @cached_property
    def pieces(self) -> list[str]:
        """Decoded text of each token by itself."""
        return [str(self.tokenizer.decode([i])) for i in range(len(self.tokenizer))]

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
        return Counter(name for piece in self.pieces for name, pattern in _SCRIPT.items() if pattern.search(piece))


@dataclass(frozen=True)
class TokenizedTexts:
    """Statistics of tokenised texts; arrays of N documents."""

    used: Counter[int]
    """Number of occurrences of each token over all documents"""
    tokens: NDArray[np.int64]
    words: NDArray[np.int64]
    split_words: NDArray[np.int64]
    """Words of more than one token"""
    characters: NDArray[np.int64]
    bytes: NDArray[np.int64]
    byte_tokens: NDArray[np.int64]
    """Tokens that are part of a character's bytes"""
    unknown: NDArray[np.int64]
    single_characters: NDArray[np.int64]
    """Tokens of one character"""

    def metrics(self, rows: NDArray[np.int64] | slice) -> dict[str, float | None]:
        """Return the metrics over some of the documents."""
        tokens, words = self.tokens, self.words
        ratios = {
            "tokens_per_word": (tokens, words),
            "characters_per_token": (self.characters, tokens),
            "bytes_per_token": (self.bytes, tokens),
            "continued_words": (self.split_words, words),
            "byte_tokens": (self.byte_tokens, tokens),
            "unknown": (self.unknown, tokens),
            "single_characters": (self.single_characters, tokens),
        }
        sums = {name: (float(a[rows].sum()), int(b[rows].sum())) for name, (a, b) in ratios.items()}
        return {name: part / whole if whole else None for name, (part, whole) in sums.items()}


def tokenize_texts(vocabulary: Vocabulary, texts: Sequence[str]) -> TokenizedTexts:
    """Tokenise every text, without special tokens."""
    tokenizer, unknown = vocabulary.tokenizer, vocabulary.tokenizer.unk_token_id
    rows: list[tuple[int, ...]] = []
    used: Counter[int] = Counter()
    for start in range(0, len(texts), _BATCH):
        batch = list(texts[start : start + _BATCH])
        encoded = tokenizer(
            batch, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False
        )
        for text, ids, offsets in zip(batch, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            tokens, words = np.array(ids, dtype=np.int64), split_words(text)
            used.update(ids)
            rows.append(
                (
                    len(ids), len(words), _count_split_words(text, words, offsets), len(text), len(text.encode()),
                    int(vocabulary.part_of_character[tokens].sum()),
                    0 if unknown is None else int((tokens == unknown).sum()),
                    int(vocabulary.one_character[tokens].sum()),
                )
            )  # fmt: skip
    return TokenizedTexts(used, *np.array(rows, dtype=np.int64).reshape(-1, 8).T)


def _count_split_words(text: str, words: Sequence[str], offsets: Sequence[tuple[int, int]]) -> int:
    """Return the number of words that have a token starting inside them."""
    starts = np.unique([start for start, end in offsets if end > start])
    repeated = {a for (a, _), (b, _) in pairwise(offsets) if a == b}  # a character split into byte tokens
    count = end = 0
    for word in words:
        start = text.index(word, end)
        end = start + len(word)
        # the first token of a word may include the blank before it
        inner = np.searchsorted(starts, end) - np.searchsorted(starts, start + 1)
        count += bool(inner > 0 or any(start <= place < end for place in repeated))
    return count
