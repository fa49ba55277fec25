"""Small decoders trained alike: the same bytes in the same order whatever the tokenizer, and bits that add up."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from flatshift.finetune.data.tokenizer_schemes import train_tokenizer
from flatshift.finetune.errors import UserError
from flatshift.finetune.train.small_decoder import (
    SmallDecoder,
    batch_schedule,
    build_decoder,
    count_parameters,
    split_into_pieces,
    train_and_evaluate,
)

TEXTS = [f"the number {i} is {'even' if i % 2 == 0 else 'odd'}, größer als {i - 1}" for i in range(60)]
TINY = SmallDecoder(hidden=32, layers=1, bytes=8_000, piece=32, batch_size=4)


def test_pieces_are_the_text_again():
    for size in (16, 17, 33):
        found = split_into_pieces([*TEXTS, "日本語" * 30, ""], size)
        assert "".join(found) == "".join([*TEXTS, "日本語" * 30])
        assert all(0 < len(piece.encode()) <= size for piece in found)


def test_the_order_is_of_bytes_and_the_seed():
    sizes = [len(p.encode()) for p in split_into_pieces(TEXTS, 32)]
    steps = batch_schedule(sizes, 8_000, 4, seed=0)
    seen = [sum(sizes[i] for i in step) for step in steps]
    assert sum(seen) >= 8_000 > sum(seen[:-1]) and all(len(step) == 4 for step in steps)
    first = np.concatenate(steps)[: len(sizes)]
    assert sorted(first) == list(range(len(sizes)))  # an epoch has each piece once
    np.testing.assert_array_equal(np.concatenate(steps), np.concatenate(batch_schedule(sizes, 8_000, 4, seed=0)))
    assert not np.array_equal(first, np.concatenate(batch_schedule(sizes, 8_000, 4, seed=1))[: len(sizes)])


def test_first_values_and_parameters():
    one, same, other = (build_decoder(TINY, vocabulary=300, seed=s) for s in (0, 0, 1))
    state = torch.random.get_rng_state()
    build_decoder(TINY, vocabulary=300, seed=0)
    assert torch.equal(state, torch.random.get_rng_state())
    for (name, a), (_, b), (_, c) in zip(*(m.named_parameters() for m in (one, same, other)), strict=True):
        assert torch.equal(a, b) and (a.ndim == 1 or not torch.equal(a, c)), name
    assert count_parameters(TINY, 300) == sum(p.numel() for p in one.parameters())


def test_nats_are_those_of_a_plain_reading():
    """No training to speak of: a budget of one update at a learning rate of almost nothing leaves the first values."""
    still = SmallDecoder(hidden=32, layers=1, bytes=1, piece=32, batch_size=4, lr=1e-12)
    tokenizer = train_tokenizer("case", TEXTS, vocabulary=300)
    held_out = ["Ein Text, a text.", "日本語 " * 20]
    nats, tokens = train_and_evaluate(tokenizer, TEXTS, held_out, still, vocabulary=300, seed=3)
    model = build_decoder(still, vocabulary=300, seed=3).eval()
    for text, got in zip(held_out, nats, strict=True):
        wanted = 0.0
        for piece in split_into_pieces([text], 32):
            ids = torch.tensor([[1, *tokenizer(piece, add_special_tokens=False)["input_ids"]]])
            with torch.no_grad():
                wanted += float(F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum"))
        assert got == pytest.approx(wanted, rel=1e-4)
    assert tokens > 0


def test_training_learns_and_repeats():
    tokenizer = train_tokenizer("default", TEXTS[:50], vocabulary=300)
    size = sum(len(text.encode()) for text in TEXTS[50:])
    runs = [train_and_evaluate(tokenizer, TEXTS[:50], TEXTS[50:], TINY, vocabulary=300, seed=0) for _ in range(2)]
    np.testing.assert_array_equal(runs[0][0], runs[1][0])
    short = SmallDecoder(hidden=32, layers=1, bytes=1, piece=32, batch_size=4)
    before, _ = train_and_evaluate(tokenizer, TEXTS[:50], TEXTS[50:], short, vocabulary=300, seed=0)
    assert runs[0][0].sum() < 0.7 * before.sum()
    assert 0 < runs[0][0].sum() / math.log(2) / size < 8


def test_refusals():
    tokenizer = train_tokenizer("default", TEXTS, vocabulary=300)
    with pytest.raises(UserError, match="more than the model's 280"):
        train_and_evaluate(tokenizer, TEXTS, TEXTS, TINY, vocabulary=280, seed=0)
    with pytest.raises(UserError, match="give more text"):
        train_and_evaluate(tokenizer, ["a"], TEXTS, TINY, vocabulary=300, seed=0)
    with pytest.raises(ValueError, match="multiple of 32"):
        SmallDecoder(hidden=40)
