"""Tiny tokenizers, random models and rows for the tests of data and evaluation; made here, nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.data.rows import Row

CORPUS = [
    "the cat sat on the mat and the dog sat on the log",
    "good bad neutral positive negative label text question answer",
    "größe über naïve 日本語 emoji 🙂 Ελλάδα",
]
SPECIALS = ["<pad>", "<bos>", "<eos>"]


def byte_tokenizer(*, bos: bool = True, pad: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level BPE that adds no special token by itself, as GPT-2's and the shipped one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    special: dict[str, Any] = {"eos_token": "<eos>"}
    if bos:
        special["bos_token"] = "<bos>"
    if pad:
        special["pad_token"] = "<pad>"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def bert_tokenizer() -> PreTrainedTokenizerFast:
    """A WordPiece with the template `[CLS] A [SEP] B [SEP]` and segment ids."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def tiny_model(kind: str, vocabulary: int, *, attention: str = "sdpa", **overrides: Any) -> Any:
    """A random float32 model of one of the kinds below, in evaluation mode; mistral has a window of 6."""
    import transformers as tf

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": vocabulary}
    gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96}
    dry = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    table: dict[str, Any] = {
        "llama": (tf.LlamaForCausalLM, tf.LlamaConfig, {**sizes, "num_key_value_heads": 2}),
        "gpt2": (tf.GPT2LMHeadModel, tf.GPT2Config, {**gpt2, **dry}),
        "mistral": (tf.MistralForCausalLM, tf.MistralConfig, {**sizes, "num_key_value_heads": 2, "sliding_window": 6}),
        "bloom": (tf.BloomForCausalLM, tf.BloomConfig, {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
        "llama-classes": (
            tf.LlamaForSequenceClassification,
            tf.LlamaConfig,
            {**sizes, "num_key_value_heads": 2, "num_labels": 3},
        ),
        "bert-classes": (tf.BertForSequenceClassification, tf.BertConfig, {**sizes, "num_labels": 3}),
    }
    model_class, config_class, own = table[kind]
    config = config_class(**{**ids, **own, "initializer_range": 0.2, **overrides})
    config._attn_implementation = "eager" if kind == "bloom" else attention  # bloom has no other
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = model_class(config).eval()
    model.config.use_cache = False  # as load_backbone does
    return model


def row(number: int = 0, /, **values: Any) -> Row:
    """A row as `read_rows` would give it, from line `number` of rows.jsonl."""
    return Row(values, f"0-{number}", f"rows.jsonl:{number + 1}", dict(values), number)


def text_rows(count: int, *, seed: int = 0, words: tuple[int, int] = (1, 12)) -> list[Row]:
    """Rows of random words with a label."""
    rng = np.random.default_rng(seed)
    vocabulary = " ".join(CORPUS).split()
    made = []
    for i in range(count):
        picked = rng.choice(vocabulary, size=rng.integers(*words))
        made.append(row(i, text=" ".join(picked), label=["bad", "good", "neutral"][int(rng.integers(3))]))
    return made


def write_jsonl(path: Path, records: list[Any]) -> Path:
    """One JSON value a line."""
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def epochs_at(batches: TrainingDataLoader, step: int) -> list[list[tuple[int, ...]]]:
    """The 0-based epoch of each example (in a mixture: of its source), in the layout of `rows_at`."""
    rows = batches._step_rows(step)
    return batches._split_micro_batches(rows.split_by_row(rows.epochs))
