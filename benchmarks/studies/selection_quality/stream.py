"""Passages end to end, cut into rows of one length: every arm trains on exactly as many tokens in as many steps.

As in the backbone's own pretraining, a row may hold several passages, and they see each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flatshift.finetune.data.encoding import SpecialTokens
from flatshift.finetune.data.example import Example
from flatshift.finetune.errors import UserError
from flatshift.finetune.seeds import numpy_generator

_BATCH = 64


@dataclass(frozen=True)
class Packed:
    """Rows of a warm-up."""

    examples: list[Example]
    passages: int
    """Distinct passages in it."""
    tokens: int
    """Distinct tokens: those of the passages, each passage counted once."""
    epochs: float
    """How often a passage was seen: all tokens ÷ distinct ones."""


def packed_rows(texts: Sequence[str], tokenizer: Any, *, rows: int, length: int, seed: int) -> Packed:
    """`rows` rows of `length` tokens: passages in an order drawn by `seed`, in a new order when all were used. A text
    that is there twice is one passage, read twice.

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
    examples = []
    for row in range(rows):
        ids = flat[row * length : (row + 1) * length]
        examples.append(Example(ids, list(ids), str(row), f"row {row}"))
    return Packed(examples, len(seen), distinct, needed / distinct)


def _encoded(texts: Sequence[str], order: list[int], tokenizer: Any) -> Iterator[list[int]]:
    for low in range(0, len(order), _BATCH):
        some = [texts[i] for i in order[low : low + _BATCH]]
        yield from tokenizer(some, add_special_tokens=False, verbose=False)["input_ids"]
