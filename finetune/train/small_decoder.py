"""A small Llama decoder trained from scratch to evaluate a tokenizer or a pool.

Weights, order and steps depend on a seed and on bytes of text, never on tokens: two tokenizers get the same pieces of
the same documents in the same order, and their models have the same number of parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from ..config import Optimizer, check_bounds
from ..data.eval_batching import EvalBatching
from ..data.example import IGNORE, Example
from ..errors import UserError
from ..evaluate.generation import pad_rows
from ..evaluate.perplexity import document_nats
from ..seeds import numpy_generator, torch_generator
from ..tasks import LanguageModel
from .optimizer import AdapterOptimizer
from .schedule import learning_rate

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


@dataclass(frozen=True, kw_only=True)
class SmallDecoder:
    """Architecture and training settings of the small decoder."""

    hidden: int = 96
    """Width; a multiple of 32, the width of a head."""
    layers: int = 3
    """Number of blocks."""
    bytes: int = 500_000
    """UTF-8 bytes of training text; a shorter text is repeated in another order."""
    piece: int = 256
    """Documents are cut into pieces of at most this many bytes; a piece is a row."""
    batch_size: int = 8
    """Pieces per optimizer step."""
    lr: float = 3e-3
    """Peak learning rate of AdamW; linear warm-up over the first tenth of the steps, then a cosine."""

    def __post_init__(self) -> None:
        check_bounds(self, hidden=(32, None), layers=(1, None), bytes=(1, None), piece=(16, None), batch_size=(1, None))
        if self.hidden % 32:
            raise ValueError(f"hidden must be a multiple of 32, got {self.hidden}")


def split_into_pieces(texts: Sequence[str], size: int) -> list[str]:
    """Return `texts` in pieces of at most `size` bytes of UTF-8, cut between characters; in order, none empty."""
    pieces = []
    for text in texts:
        raw, start = text.encode(), 0
        while start < len(raw):
            stop = min(start + size, len(raw))
            while stop < len(raw) and raw[stop] & 0xC0 == 0x80:  # within a character
                stop -= 1
            pieces.append(raw[start:stop].decode())
            start = stop
    return pieces


def batch_schedule(sizes: Sequence[int], budget: int, batch: int, *, seed: int) -> list[np.ndarray]:
    """Return the pieces of each step by number, drawn without replacement within an epoch, until `budget` bytes.

    sizes: bytes of each piece. The last step is a full one, so the budget is exceeded by at most one batch.
    """
    steps: list[np.ndarray] = []
    bytes_read, epoch, queue = 0, 0, np.empty(0, dtype=np.int64)
    lengths = np.asarray(sizes)
    while bytes_read < budget:
        if len(queue) < batch:
            order = numpy_generator(seed, "small-decoder", "order", epoch).permutation(len(lengths))
            queue, epoch = np.concatenate([queue, order]), epoch + 1
            continue
        steps.append(queue[:batch])
        queue = queue[batch:]
        bytes_read += int(lengths[steps[-1]].sum())
    return steps


def build_decoder(settings: SmallDecoder, *, vocabulary: int, seed: int) -> LlamaForCausalLM:
    """Return the decoder in float32 with tied embeddings; its values depend only on `seed` and each parameter's
    name."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=settings.hidden,
        intermediate_size=settings.hidden * 8 // 3 // 32 * 32,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.hidden // 32,
        max_position_embeddings=2 * settings.piece + 2,  # a byte is at most two tokens, for an escape or a capital
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):  # the constructor draws from the global generator; ours replaces it below
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                generator = torch_generator(seed, "small-decoder", "init", name)
                parameter.normal_(0.0, config.initializer_range, generator=generator)
    return model


def train_and_evaluate(
    tokenizer: PreTrainedTokenizerFast,
    training: Sequence[str],
    held_out: Sequence[str],
    settings: SmallDecoder,
    *,
    vocabulary: int,
    seed: int,
) -> tuple[np.ndarray, int]:
    """Train a decoder on `training` and evaluate it on `held_out`.

    Return nats (N,) float64 of each held-out document, its pieces summed, and the number of tokens seen in training.
    Raises UserError for a tokenizer of more tokens than `vocabulary`, or fewer pieces than one step needs.

    tokenizer: with <bos>; at most `vocabulary` tokens.
    vocabulary: rows of the embedding, so that models of several tokenizers have the same parameters.
    """
    if len(tokenizer) > vocabulary:
        raise UserError(f"this tokenizer has {len(tokenizer)} tokens, more than the model's {vocabulary}")
    pieces = split_into_pieces(training, settings.piece)
    if len(pieces) < settings.batch_size:
        raise UserError(
            f"the training texts are {len(pieces)} pieces of {settings.piece} bytes, less than one step of "
            f"{settings.batch_size}; give more text"
        )
    examples = _examples(tokenizer, pieces)
    steps = batch_schedule([e.bytes for e in examples], settings.bytes, settings.batch_size, seed=seed)
    model = build_decoder(settings, vocabulary=vocabulary, seed=seed).train()
    rates = Optimizer(lr=settings.lr, weight_decay=0.1, betas=(0.9, 0.95), warmup=0.1)
    optimizer = AdapterOptimizer(dict(model.named_parameters()), rates)
    tokens = 0
    for step, rows in enumerate(steps):
        # Padding on the right needs no mask: a causal model never attends to it.
        inputs, _ = pad_rows([examples[i].input_ids for i in rows], 0, left=False)
        labels, _ = pad_rows([examples[i].labels for i in rows], IGNORE, left=False)
        logits = model(input_ids=inputs, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), rates.clip or float("inf"))
        optimizer.step(learning_rate(step, steps=len(steps), optimizer=rates))
        tokens += int((labels[:, 1:] != IGNORE).sum())
    model.eval()
    documents = [split_into_pieces([text], settings.piece) for text in held_out]
    examples = _examples(tokenizer, [piece for document in documents for piece in document])
    nats, _ = document_nats(model, examples, EvalBatching(settings.batch_size, 0), task=LanguageModel(), masked=False)
    document_index = np.repeat(np.arange(len(documents)), [len(pieces) for pieces in documents])
    return np.bincount(document_index, weights=nats, minlength=len(documents)), tokens


def count_parameters(settings: SmallDecoder, vocabulary: int) -> int:
    """Return the number of the decoder's parameters, counting the tied embedding once."""
    return sum(p.numel() for p in build_decoder(settings, vocabulary=vocabulary, seed=0).parameters())


def _examples(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[Example]:
    """Return one example `<bos> text` per text; every token of the text is a target."""
    bos = tokenizer.bos_token_id
    ids = tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return [
        Example([bos, *own], [IGNORE, *own], str(i), f"piece {i}", bytes=len(text.encode()))
        for i, (own, text) in enumerate(zip(ids, texts, strict=True))
    ]
