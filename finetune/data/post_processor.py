"""Post-processor that makes a saved tokenizer add the special tokens used in training.

Many tokenizers of decoders add none, although training starts every row with the beginning-of-sequence token; called
with such a tokenizer, a model would read rows unlike any it was trained on.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from .encoding import SpecialTokens, tokenize_plain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def adds_special_tokens(tokenizer: PreTrainedTokenizerBase, specials: SpecialTokens, *, pairs: bool) -> bool:
    """Return True if the tokenizer adds exactly these tokens around a text and, with `pairs`, between and around
    two."""
    a, b = tokenize_plain(tokenizer, "a"), tokenize_plain(tokenizer, "b")
    single = [*specials.prefix, *a, *specials.suffix]
    pair = [*specials.prefix, *a, *specials.middle, *b, *specials.pair_suffix]
    if single != list(tokenizer("a")["input_ids"]):
        return False
    return not pairs or pair == list(tokenizer("a", "b")["input_ids"])


def set_post_processor(tokenizer: PreTrainedTokenizerBase, specials: SpecialTokens, *, pairs: bool) -> None:
    """Make the tokenizer, in place, add these tokens around texts and pairs, also after it is saved and loaded.

    It is unchanged if it already does (for single texts only, unless `pairs`), or if it has no backend of the
    `tokenizers` library and so no post-processor: the caller compares after saving.
    """
    if adds_special_tokens(tokenizer, specials, pairs=pairs) or not tokenizer.is_fast:
        return
    from tokenizers import processors

    backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    ids = (*specials.prefix, *specials.middle, *specials.suffix, *specials.pair_suffix)
    tokens = dict(zip(ids, tokenizer.convert_ids_to_tokens(list(ids)), strict=True))
    # `:`, `$` and spaces have a meaning in the template language, so tokens that contain them get another name.
    names = {i: f"token-{i}" if {":", "$", " "} & set(token) else token for i, token in tokens.items()}

    def pieces(ids: tuple[int, ...], segment: int) -> list[str]:
        return [f"{names[i]}:{segment}" for i in ids]

    second = specials.segments[1] if specials.segments else 0
    first = [*pieces(specials.prefix, 0), "$A:0"]
    template = processors.TemplateProcessing(
        single=[*first, *pieces(specials.suffix, 0)],
        pair=[*first, *pieces(specials.middle, 0), f"$B:{second}", *pieces(specials.pair_suffix, second)],
        special_tokens=[{"id": names[i], "ids": [i], "tokens": [token]} for i, token in tokens.items()],
    )
    # Keep an existing byte-level part, which adjusts offsets; the template replaces everything else.
    trim_offsets = _get_trim_offsets(backend.post_processor)
    byte_level = [] if trim_offsets is None else [processors.ByteLevel(trim_offsets=trim_offsets)]
    backend.post_processor = processors.Sequence([*byte_level, template]) if byte_level else template


def _get_trim_offsets(processor: Any) -> bool | None:
    """Return `trim_offsets` of the byte-level part, the only setting in which it differs from none; None without
    such a part."""
    state = {} if processor is None else json.loads(processor.__getstate__())
    for part in state.get("processors", [state]):
        if "trim_offsets" in part:
            return bool(part["trim_offsets"])
    return None
