"""The tokens that transformers' heads find their place in a row by: the padding they skip, the end they judge at.

A head over a decoder judges a row at its last token that is not the config's pad token; one over an encoder-decoder at
its last end of sequence. Neither looks at the attention mask, so config, tokenizer and rows have to agree.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .backbone import load_tokenizer, read_config, resolve_backbone

_TOKENIZER = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
"""Files of which a directory with a tokenizer has one."""


def settle_padding(model: Any, name: str | Path) -> None:
    """Let the config name the token that rows are padded with (`load_tokenizer`): by it the heads of decoders find a
    row's last token, and many config.json name none, or another than their tokenizer pads with.

    A config from whose pad token positions are counted (RoBERTa) stays as it is. Without a tokenizer in the directory
    a missing one becomes the end-of-sequence token.
    """
    counted = (m for n, m in model.named_modules() if "position" in n.rsplit(".", 1)[-1])
    if any(getattr(module, "padding_idx", None) is not None for module in counted):
        return
    config, text = model.config, model.config.get_text_config()
    directory = resolve_backbone(name)
    pad = None
    if any(next(directory.glob(pattern), None) for pattern in _TOKENIZER):
        pad = load_tokenizer(name).pad_token_id
        vocabulary = getattr(text, "vocab_size", None)
        if vocabulary is not None and pad >= vocabulary:  # pads no row that the model takes
            pad = None
    if pad is None:
        owned = (getattr(owner, "pad_token_id", None) for owner in (config, text))
        pad = next((own for own in owned if own is not None), None)
    if pad is None:
        eos = getattr(text, "eos_token_id", None)
        pad = eos[0] if isinstance(eos, list) else eos
    config.pad_token_id = text.pad_token_id = pad


def judged_token(name: str | Path) -> int | None:
    """The token at which a head over the backbone `name` judges a row, where that is an encoder-decoder: the end of
    sequence, of which transformers wants equally many in the rows of a batch. None for others.

    Raises UserError as `resolve_backbone`.
    """
    config = read_config(name)
    return config.eos_token_id if config.is_encoder_decoder else None
