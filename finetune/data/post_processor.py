"""Post-processor that makes a saved tokenizer add the special tokens used in training.

Many tokenizers of decoders add none, although training starts every row with the beginning-of-sequence token; called
with such a tokenizer, a model would read rows unlike any it was trained on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .encoding import SpecialTokens, tokenize_plain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def adds_special_tokens(tokenizer: PreTrainedTokenizerBase, specials: SpecialTokens, *, pairs: bool) -> bool:
    """Return True if the tokenizer adds exactly these tokens around a text and, with `pairs`, between and around
    two."""
    a, b = tokenize_plain(tokenizer, "a"), tokenize_plain(tokenizer, "b")
    one = [*specials.prefix, *a, *specials.suffix]
    two = [*specials.prefix, *a, *specials.middle, *b, *specials.pair_suffix]
    return one == list(tokenizer("a")["input_ids"]) and (not pairs or two == list(tokenizer("a", "b")["input_ids"]))


def set_post_processor(tokenizer: PreTrainedTokenizerBase, specials: SpecialTokens, *, pairs: bool) -> None:
    """Make the tokenizer, in place, add these tokens around texts and pairs, also after it is saved and loaded.

    It is unchanged if it already does (for single texts only, unless `pairs`), or if it has no backend of the
    `tokenizers` library and so no post-processor: the caller compares after saving.
    """
    if adds_special_tokens(tokenizer, specials, pairs=pairs) or not tokenizer.is_fast:
        return
    from tokenizers import processors

    backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    around = (*specials.prefix, *specials.middle, *specials.suffix, *specials.pair_suffix)
    names = dict(zip(around, tokenizer.convert_ids_to_tokens(list(around)), strict=True))
    # `:`, `$` and spaces have a meaning in the template language, so tokens that contain them get another name.
    called = {i: f"token-{i}" if {":", "$", " "} & set(name) else name for i, name in names.items()}
    second = specials.segments[1] if specials.segments else 0
    one = [*_format_pieces(specials.prefix, called, 0), "$A:0"]
    two = [
        *one,
        *_format_pieces(specials.middle, called, 0),
        f"$B:{second}",
        *_format_pieces(specials.pair_suffix, called, second),
    ]
    template = processors.TemplateProcessing(
        single=[*one, *_format_pieces(specials.suffix, called, 0)],
        pair=two,
        special_tokens=[{"id": called[i], "ids": [i], "tokens": [name]} for i, name in names.items()],
    )
    # Keep an existing byte-level part, which adjusts offsets; the template replaces everything else.
    trims = _get_trim_offsets(backend.post_processor)
    kept = [] if trims is None else [processors.ByteLevel(trim_offsets=trims)]
    backend.post_processor = processors.Sequence([*kept, template]) if kept else template


def _format_pieces(tokens: tuple[int, ...], called: dict[int, str], segment: int) -> Iterator[str]:
    return (f"{called[token]}:{segment}" for token in tokens)


def _get_trim_offsets(processor: Any) -> bool | None:
    """Return `trim_offsets` of the byte-level part, the only setting in which it differs from none; None without
    such a part."""
    state = {} if processor is None else json.loads(processor.__getstate__())
    for part in state.get("processors", [state]):
        if "trim_offsets" in part:
            return bool(part["trim_offsets"])
    return None
