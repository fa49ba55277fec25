"""A tiny random encoder-decoder with its tokenizer on disk, and rows for it; made here, nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.data_models import byte_tokenizer

TOKENIZER = byte_tokenizer()
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
_BART = {
    "d_model": 32,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "init_std": 0.2,
    "forced_eos_token_id": None,
}


def save_encoder_decoder(kind: str, directory: Path, **overrides: Any) -> Path:
    """Write a random `t5` (ReLU, scaled tied head), `t5-gated` (neither) or `bart` and a tokenizer into `directory`."""
    import transformers as tf

    ids: dict[str, Any] = {"vocab_size": 352, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    gated = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    model_class, config_class, own = {
        "t5": (tf.T5ForConditionalGeneration, tf.T5Config, {**_T5, "decoder_start_token_id": 0}),
        "t5-gated": (tf.T5ForConditionalGeneration, tf.T5Config, {**_T5, **gated, "decoder_start_token_id": 0}),
        "bart": (tf.BartForConditionalGeneration, tf.BartConfig, {**_BART, "decoder_start_token_id": 2}),
    }[kind]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = model_class(config_class(**{**ids, **own, **overrides}))
    model.save_pretrained(directory)
    TOKENIZER.save_pretrained(directory)
    return directory
