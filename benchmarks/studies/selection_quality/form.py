"""Texts without their words: case, digits, marks and spacing alone, as numbers that a selector can read.

A selector that sees only these is the control of what target nats owe to form: whatever it wins, no word won.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from flatshift.selection import TokenRows

_PARTS = re.compile(r"(\s*)(\w+|[^\w\s])")
_WORDS = ("lower", "title", "upper", "mixed", "number", "letters and digits")
_MARKS = 256
SIZE = 2 * (len(_WORDS) + _MARKS)
"""Kinds of parts: a word's case or a mark, each with or without a space before it."""


def shapes(texts: Sequence[str]) -> TokenRows:
    """The parts of each text as numbers below SIZE. Marks beyond Latin-1 share numbers."""
    return TokenRows.of([list(_numbers(text)) for text in texts], SIZE)


def _numbers(text: str) -> Iterator[int]:
    for space, part in _PARTS.findall(text):
        kind = _WORDS.index(_case(part)) if part[0].isalnum() or part[0] == "_" else len(_WORDS) + ord(part) % _MARKS
        yield 2 * kind + bool(space)


def _case(word: str) -> str:
    if word.isdigit():
        return "number"
    if not word.isalpha():
        return "letters and digits"
    if word.islower():
        return "lower"
    if word.istitle():
        return "title"
    return "upper" if word.isupper() else "mixed"
