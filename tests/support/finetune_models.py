"""Tiny random backbones on disk and fixed batches, for the tests of the loop; made here, nothing is downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCABULARY = 64
IGNORED = -100


def save_backbone(kind: str, directory: Path, **overrides: Any) -> Path:
    """Write a random `kind` backbone (config.json, model.safetensors) into `directory`."""
    import transformers as tf

    small: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    dry = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    table = {
        "llama": (tf.LlamaForCausalLM, tf.LlamaConfig, {**sizes, "num_key_value_heads": 2}),
        "llama4": (
            tf.Llama4ForCausalLM,
            tf.Llama4TextConfig,
            {**sizes, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2},
        ),
        "gemma2": (tf.Gemma2ForCausalLM, tf.Gemma2Config, {**sizes, "num_key_value_heads": 2, "head_dim": 8}),
        "granite": (tf.GraniteForCausalLM, tf.GraniteConfig, {**sizes, "num_key_value_heads": 2}),
        "cohere": (tf.CohereForCausalLM, tf.CohereConfig, {**sizes, "num_key_value_heads": 2}),
        "gpt2": (tf.GPT2LMHeadModel, tf.GPT2Config, {**gpt2, **dry}),
        "gpt2-dropout": (tf.GPT2LMHeadModel, tf.GPT2Config, gpt2),
        "bert": (tf.BertForMaskedLM, tf.BertConfig, {**sizes, "max_position_embeddings": 64}),
        "electra": (
            tf.ElectraForMaskedLM,
            tf.ElectraConfig,
            {**sizes, "embedding_size": 16, "max_position_embeddings": 64},
        ),
        "roberta": (tf.RobertaForMaskedLM, tf.RobertaConfig, {**sizes, "max_position_embeddings": 66}),
        "deberta": (
            tf.DebertaV2ForMaskedLM,
            tf.DebertaV2Config,
            {
                **sizes,
                "max_position_embeddings": 64,
                "type_vocab_size": 0,
                "relative_attention": True,
                "position_buckets": 16,
                "pos_att_type": ["p2c", "c2p"],
                "share_att_key": True,
            },
        ),
    }
    model_class, config_class, own = table[kind]
    config = config_class(**{**small, **own, "initializer_range": 0.1, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = model_class(config)
    model.save_pretrained(directory)
    return directory


@dataclass(frozen=True)
class Micro:
    """What the loop reads of a micro-batch."""

    inputs: dict[str, Tensor]
    labels: Tensor
    supervised: int
    samples: int

    def to(self, device: torch.device | str) -> Micro:
        return self


class RandomBatches:
    """`at(step)`: `accumulate` micro-batches of language-model rows with random masks, a pure function of the step."""

    packed = False
    max_length = 0

    def __init__(self, *, rows: int = 3, length: int = 12, accumulate: int = 1, vocabulary: int = VOCABULARY) -> None:
        self.rows, self.length, self.accumulate, self.vocabulary = rows, length, accumulate, vocabulary

    def at(self, step: int) -> list[Micro]:
        return [self._one(1000 * step + index) for index in range(self.accumulate)]

    def supervised(self, step: int) -> int:
        return sum(micro.supervised for micro in self.at(step))

    def _one(self, seed: int) -> Micro:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, self.vocabulary, (self.rows, self.length), generator=generator)
        # a quarter of the range only, so that there is something to learn
        ids = ids % max(self.vocabulary // 4, 4) + 3
        labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.3, IGNORED, ids)
        supervised = int((labels[:, 1:] != IGNORED).sum())
        return Micro({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, labels, supervised, self.rows)


class ListBatches:
    """The same micro-batches at every step."""

    packed = False
    max_length = 0

    def __init__(self, micros: Sequence[Micro]) -> None:
        self.micros = list(micros)

    def at(self, step: int) -> list[Micro]:
        return self.micros

    def supervised(self, step: int) -> int:
        return sum(micro.supervised for micro in self.micros)


class PadOnly:
    """As much of a tokenizer as the loop reads."""

    pad_token_id = 0
