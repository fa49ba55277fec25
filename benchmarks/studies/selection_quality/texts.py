"""Texts as a study reads them: packed rows of a warm-up, their plain form, and their form without any word."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flatshift.finetune.data.encoding import SpecialTokens
from flatshift.finetune.data.example import Example
from flatshift.finetune.errors import UserError
from flatshift.finetune.seeds import numpy_generator
from flatshift.selection import TokenRows

_BATCH = 64
_PLAIN = re.compile(r"\w+|[^\w\s]+")
_PARTS = re.compile(r"(\s*)(\w+|[^\w\s])")
_WORDS = ("lower", "title", "upper", "mixed", "number", "letters and digits")
_MARKS = 256
SIZE = 2 * (len(_WORDS) + _MARKS)
"""Kinds of parts of a form: a word's case or a mark, each with or without a space before it."""


@dataclass(frozen=True)
class Packed:
    """Rows of a warm-up. passages: distinct ones; tokens: of each passage once; epochs: all tokens ÷ distinct ones."""

    examples: list[Example]
    passages: int
    tokens: int
    epochs: float


def packed_rows(texts: Sequence[str], tokenizer: Any, *, rows: int, length: int, seed: int) -> Packed:
    """`rows` rows of `length` tokens: passages end to end in an order drawn by `seed`, in a new order when all were
    used, so that every arm trains on as many tokens. A text that is there twice is one passage, read twice.

    A passage is `prefix text eos`. Raises UserError if no text holds a token.
    """
    specials = SpecialTokens.of(tokenizer)
    after = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    needed = rows * length
    flat: list[int] = []
    distinct, epoch = 0, -1
    seen: set[str] = set()
    while len(flat) < needed:
        epoch += 1
        order = numpy_generator(seed, "stream", epoch).permutation(len(texts)).tolist()
        for row, ids in zip(order, _encoded(texts, order, tokenizer), strict=False):
            before = len(flat)
            flat += [*specials.prefix, *ids, *after]
            if texts[row] not in seen:
                seen.add(texts[row])
                distinct += min(len(flat), needed) - before
            if len(flat) >= needed:
                break
        if not flat:
            raise UserError("the chosen passages hold no token; nothing can be trained on them")
    parts = [flat[row * length : (row + 1) * length] for row in range(rows)]
    examples = [Example(ids, list(ids), str(row), f"row {row}") for row, ids in enumerate(parts)]
    return Packed(examples, len(seen), distinct, needed / distinct)


def join_packed(first: Packed, second: Packed) -> Packed:
    """Join the rows of both under new numbers; their order in training is the loader's."""
    parts = [example.input_ids for example in (*first.examples, *second.examples)]
    examples = [Example(ids, list(ids), str(row), f"row {row}") for row, ids in enumerate(parts)]
    distinct = first.tokens + second.tokens
    return Packed(examples, first.passages + second.passages, distinct, sum(map(len, parts)) / distinct)


def _encoded(texts: Sequence[str], order: list[int], tokenizer: Any) -> Iterator[list[int]]:
    for low in range(0, len(order), _BATCH):
        some = [texts[i] for i in order[low : low + _BATCH]]
        yield from tokenizer(some, add_special_tokens=False, verbose=False)["input_ids"]


def plain_form(text: str) -> str:
    """Lower case, one space between words and runs of marks."""
    return " ".join(_PLAIN.findall(text.lower()))


def shapes(texts: Sequence[str]) -> TokenRows:
    """Case, digits, marks and spacing of each text as numbers below SIZE. Marks beyond Latin-1 share numbers.

    A selector that sees only these is the control of what target nats owe to form.
    """
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
