"""A tokenizer that itself puts special tokens around a text as training did: what is handed on with a model.

Many tokenizers of decoders add none, where training begins every row with the beginning of sequence; a model that is
asked through such a tokenizer reads rows that it never saw.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .encoding import Specials, plain_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encodes_as(tokenizer: PreTrainedTokenizerBase, specials: Specials, *, pairs: bool) -> bool:
    """Whether the tokenizer puts just these tokens around a text and, with `pairs`, between and around two."""
    a, b = plain_ids(tokenizer, "a"), plain_ids(tokenizer, "b")
    one = [*specials.prefix, *a, *specials.suffix]
    two = [*specials.prefix, *a, *specials.middle, *b, *specials.pair_suffix]
    return one == list(tokenizer("a")["input_ids"]) and (not pairs or two == list(tokenizer("a", "b")["input_ids"]))


def adopt(tokenizer: PreTrainedTokenizerBase, specials: Specials, *, pairs: bool) -> None:
    """Make the tokenizer, in place, put these tokens around texts and pairs, also when it is saved and read again.

    One that does so (with a text alone, where no `pairs` are read) is left as it is, and so is one without a backend
    of the `tokenizers` library, which has no post-processor: whoever saves it compares.
    """
    if encodes_as(tokenizer, specials, pairs=pairs) or not tokenizer.is_fast:
        return
    from tokenizers import processors

    backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    around = (*specials.prefix, *specials.middle, *specials.suffix, *specials.pair_suffix)
    names = dict(zip(around, tokenizer.convert_ids_to_tokens(list(around)), strict=True))
    # A template is written as words with `:` and `$`; a token with such a sign gets another name in it.
    called = {i: f"token-{i}" if {":", "$", " "} & set(name) else name for i, name in names.items()}
    second = specials.segments[1] if specials.segments else 0
    one = [*_words(specials.prefix, called, 0), "$A:0"]
    two = [*one, *_words(specials.middle, called, 0), f"$B:{second}", *_words(specials.pair_suffix, called, second)]
    template = processors.TemplateProcessing(
        single=[*one, *_words(specials.suffix, called, 0)],
        pair=two,
        special_tokens=[{"id": called[i], "ids": [i], "tokens": [name]} for i, name in names.items()],
    )
    trims = _trims_offsets(backend.post_processor)
    kept = [] if trims is None else [processors.ByteLevel(trim_offsets=trims)]
    backend.post_processor = processors.Sequence([*kept, template]) if kept else template


def _words(tokens: tuple[int, ...], called: dict[int, str], segment: int) -> Iterator[str]:
    return (f"{called[token]}:{segment}" for token in tokens)


def _trims_offsets(processor: Any) -> bool | None:
    """What a byte-level part says of offsets, all in which it differs from none; None without such a part."""
    state = {} if processor is None else json.loads(processor.__getstate__())
    for part in state.get("processors", [state]):
        if "trim_offsets" in part:
            return bool(part["trim_offsets"])
    return None
