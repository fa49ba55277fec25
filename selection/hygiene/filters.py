"""Filters that judge a text by itself: length, language, repetition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from selection.hygiene import config
from selection.hygiene.language import detect
from selection.hygiene.repetition import shares
from selection.hygiene.shingles import WORDS

Verdict = tuple[str, np.ndarray, np.ndarray]
"""(rule in words, (n,) bool: broken, (n,) float64: the figure that was judged)"""


def judge(texts: Sequence[str], settings: config.Hygiene) -> Iterator[tuple[str, Verdict]]:
    """(cause, verdict) of every rule that is turned on, in the order in which they are charged with a drop."""
    if settings.length is not None:
        for verdict in by_length(texts, settings.length):
            yield "length", verdict
    if settings.language is not None:
        yield "language", by_language(texts, settings.language)
    if settings.repetition is not None:
        for verdict in by_repetition(texts, settings.repetition):
            yield "repetition", verdict


def by_length(texts: Sequence[str], limits: config.Length) -> Iterator[Verdict]:
    """Characters without the blanks at both ends, and words."""
    characters = np.array([len(text.strip()) for text in texts], dtype=np.float64)
    yield f"fewer than {limits.min_chars} characters", characters < limits.min_chars, characters
    if limits.max_chars is not None:
        yield f"more than {limits.max_chars} characters", characters > limits.max_chars, characters
    if limits.min_words > 0 or limits.max_words is not None:
        words = np.array([len(WORDS.findall(text)) for text in texts], dtype=np.float64)
        yield f"fewer than {limits.min_words} words", words < limits.min_words, words
        if limits.max_words is not None:
            yield f"more than {limits.max_words} words", words > limits.max_words, words


def by_language(texts: Sequence[str], wanted: config.Language) -> Verdict:
    """The figure is the share of words that are common ones of the detected language (1 for its own script)."""
    found = [detect(text, prefer=wanted.keep) for text in texts]
    broken = [wanted.undecided == "drop" if code is None else code not in wanted.keep for code, _ in found]
    return f"not {' or '.join(wanted.keep)}", np.array(broken, dtype=bool), np.array([share for _, share in found])


def by_repetition(texts: Sequence[str], limits: config.Repetition) -> Iterator[Verdict]:
    """Each share of `repetition.shares` against its limit, in texts of at least `limits.min_words` words."""
    of = {"repeated lines": limits.lines, "repeated paragraphs": limits.lines}
    of |= {"characters in repeated lines": limits.line_chars, "characters in repeated paragraphs": limits.line_chars}
    of |= {f"characters in the commonest {n}-gram": limit for n, limit in enumerate(limits.top_ngrams, start=2)}
    of |= {f"characters in repeated {n}-grams": limit for n, limit in enumerate(limits.repeated_ngrams, start=5)}
    long = np.array([len(WORDS.findall(text)) >= limits.min_words for text in texts])
    judged = [text for text, enough in zip(texts, long, strict=True) if enough]
    for name, found in shares(judged, top=len(limits.top_ngrams), repeated=len(limits.repeated_ngrams)).items():
        values = np.full(len(texts), np.nan)
        values[long] = found
        yield f"{name} above {of[name]:g}", values > of[name], values
