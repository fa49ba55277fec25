"""Tiny encoders with a tokenizer on disk and rows for several classes, numbers and hidden tokens; made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from flatshift.finetune.adapters.adapter import trainable
from flatshift.finetune.data.rows import Row
from tests.support.data_models import CORPUS, row
from tests.support.finetune_models import save_backbone

CLASSES = ("bad", "good", "long")


def masked_tokenizer() -> PreTrainedTokenizerFast:
    """A WordPiece of one to three letters a piece, so that most words have several, with BERT's template and mask.

    Its vocabulary is written down, not trained: training orders ties differently in every process.
    """
    words = {word for line in CORPUS for word in line.split()}
    starts = {word[:n] for word in words for n in (1, 3)}
    inner = {f"##{word[i : i + n]}" for word in words for i in range(1, len(word)) for n in (1, 2)}
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {piece: number for number, piece in enumerate([*special, *sorted(starts | inner), "##zz"])}  # even
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def save_encoder(directory: Path, *, head: bool = True, **overrides: Any) -> Path:
    """Write a random BERT with `masked_tokenizer` into `directory`; without `head`: as a sentence encoder ships."""
    from safetensors.torch import load_file, save_file

    tokenizer = masked_tokenizer()
    dry = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    save_backbone("bert", directory, vocab_size=len(tokenizer), **dry, **overrides)
    if not head:
        file = directory / "model.safetensors"
        body = {n: t for n, t in load_file(file).items() if not n.startswith("cls.")}
        save_file(body, file, metadata={"format": "pt"})
    tokenizer.save_pretrained(directory)
    return directory


def several_rows(count: int, *, seed: int = 0) -> list[Row]:
    """Rows of random words with a sorted tuple of classes, some of them empty."""
    rng = np.random.default_rng(seed)
    words = " ".join(CORPUS[:2]).split()
    made = []
    for i in range(count):
        picked = rng.choice(words, size=rng.integers(2, 12))
        chosen = tuple(name for name in CLASSES if rng.random() < 0.4)
        made.append(row(i, text=" ".join(picked), label=chosen))
    return made


def numbered_rows(count: int, *, seed: int = 0, mean: float = 50.0, spread: float = 20.0) -> list[Row]:
    """Rows of random words whose number is how often they say `cat`, around `mean`."""
    rng = np.random.default_rng(seed)
    words = ["cat", "dog", "the", "mat"]
    made = []
    for i in range(count):
        picked = rng.choice(words, size=8)
        target = mean + spread * (float((picked == "cat").sum()) - 2.0) / 1.2
        made.append(row(i, text=" ".join(picked), label=target))
    return made


def scatter(model: torch.nn.Module, *, seed: int = 1, size: float = 0.1) -> torch.nn.Module:
    """Random values in everything that trains."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    return model
