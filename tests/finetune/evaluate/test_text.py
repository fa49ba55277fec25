"""Whole documents: every token once, words as UAX #29 has them, and what the units of perplexity have to do with one
another."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate import text
from flatshift.finetune.evaluate.bootstrap import group_interval
from flatshift.finetune.evaluate.perplexity import DocumentCounts
from flatshift.finetune.evaluate.text import find_language, score_texts, sliding_windows, split_words
from flatshift.finetune.tasks import LanguageModel
from tests.support.data_models import byte_tokenizer, tiny_model

TOKENIZER = byte_tokenizer()
NO_DRAW = {"resamples": 0, "confidence": 0.95, "seed": 0}


def counts(nats, tokens, words, characters, size) -> DocumentCounts:
    values = {"nats": nats, "tokens": tokens, "words": words, "characters": characters}
    return DocumentCounts(**{name: np.atleast_1d(np.array(v)) for name, v in (values | {"bytes": size}).items()})


def test_the_unit_row():
    found = counts(100.0, 50, 25, 150, 200).metrics(figures={}, **NO_DRAW)
    assert found["perplexity"]["value"] == pytest.approx(7.389056, abs=5e-7)
    assert found["word_perplexity"]["value"] == pytest.approx(54.598150, abs=5e-7)
    assert found["character_perplexity"]["value"] == pytest.approx(1.947734, abs=5e-7)
    assert found["bits_per_byte"]["value"] == pytest.approx(0.721348, abs=5e-7)


def test_a_word_is_a_token_to_the_power_of_fertility():
    rng = np.random.default_rng(0)
    tokens = rng.integers(5, 50, 40)
    found = counts(tokens * rng.uniform(1, 3, 40), tokens, tokens // 2, tokens * 4, tokens * 5).metrics(
        figures={}, **NO_DRAW
    )
    power = found["perplexity"]["value"] ** found["fertility"]["value"]
    assert found["word_perplexity"]["value"] == pytest.approx(power, rel=1e-9)


@pytest.mark.parametrize(("length", "window", "overlap"), [(2, 8, 1), (9, 8, 1), (30, 8, 3), (31, 8, 7), (100, 64, 16)])
def test_every_token_is_scored_once(length, window, overlap):
    ids = list(range(length))
    scored = []
    for piece, labels in sliding_windows(ids, window, overlap):
        assert len(piece) == len(labels) <= window and labels[0] == -100
        scored += [label for label in labels if label != -100]
        assert all(label in (-100, token) for label, token in zip(labels, piece, strict=True))
    assert scored == ids[1:]
    labels = [label for _, own in sliding_windows(ids, window, overlap, first=2) for label in own if label != -100]
    assert labels == ids[2:]  # of a tokenizer that begins texts with two tokens


def test_windows_score_as_a_naive_reading_does():
    model = tiny_model("llama", len(TOKENIZER))
    texts = ["short", "a longer text of some twenty words, " * 3]
    found = score_texts(
        model, TOKENIZER, texts, EvalBatching.of(TOKENIZER, batch_size=3), task=LanguageModel(), window=24, overlap=8
    )
    for place, one in enumerate(texts):
        ids = [*text.beginning_tokens(TOKENIZER), *TOKENIZER(one, add_special_tokens=False)["input_ids"]]
        nats, done = 0.0, 1
        while done < len(ids):
            start = max(0, done - 8) if done > 1 else 0
            end = min(start + 24, len(ids))
            with torch.no_grad():
                logp = model(input_ids=torch.tensor([ids[start:end]])).logits[0].double().log_softmax(-1)
            nats -= sum(float(logp[t - 1 - start, ids[t]]) for t in range(done, end))
            done = end
        assert found.nats[place] == pytest.approx(nats, rel=1e-5)
        assert found.tokens[place] == len(ids) - 1 and found.bytes[place] == len(one.encode())


def test_an_overlap_that_leaves_nothing_and_a_text_without_tokens():
    model = tiny_model("llama", len(TOKENIZER))
    how = {"inference": EvalBatching(2, 0), "task": LanguageModel()}
    with pytest.raises(UserError, match="--overlap: 8 is not from 1 to 7"):
        score_texts(model, TOKENIZER, ["a"], window=8, overlap=8, **how)
    with pytest.raises(UserError, match="here:2: the text is empty"):
        score_texts(model, TOKENIZER, ["a", ""], window=8, overlap=2, locations=["here:1", "here:2"], **how)


def test_words_are_those_of_unicode():
    assert split_words("Hello, world! It's 3.14 o'clock — naïve café.") == [
        "Hello", "world", "It's", "3.14", "o'clock", "naïve", "café",
    ]  # fmt: skip
    assert split_words("…!?") == [] and text.count_graphemes("e\u0301👩‍👩‍👧") == 2


def test_scripts_without_blanks_are_told_of_or_cut_by_a_dictionary(monkeypatch):
    monkeypatch.setattr(text, "_word_breaker", lambda: None)
    assert "1 texts have words without blanks" in text.missing_dictionary_note(["สวัสดีครับ", "hello"])
    assert text.missing_dictionary_note(["hello"]) is None
    monkeypatch.setattr(text, "_word_breaker", lambda: lambda one: ["สวัสดี", "ครับ"])
    assert split_words("สวัสดีครับ") == ["สวัสดี", "ครับ"] and text.missing_dictionary_note(["สวัสดีครับ"]) is None


def test_codes_of_languages():
    assert find_language("zh-CN") == ("Chinese", "Sino-Tibetan") == find_language("cmn_hans")
    assert find_language("sv-SE")[0] == "Swedish" and find_language("xx") is None


def test_groups_and_differences_ask_the_same_rows():
    tokens = np.full(60, 10)
    here, there = {}, {}
    nats = np.random.default_rng(1).uniform(10, 30, 60)
    counts(nats, tokens, tokens, tokens, tokens).metrics(figures=here, **NO_DRAW)
    counts(nats + 1.0, tokens, tokens, tokens, tokens).metrics(figures=there, **NO_DRAW)
    group = np.arange(0, 60, 3)
    alone = group_interval(here["loss"], [group], resamples=200)
    assert alone["value"] == pytest.approx(nats[group].sum() / 200) and alone["n"] == 20
    # what differs by the same for every row differs by it in every draw
    paired = group_interval(there["loss"], [group], here["loss"], resamples=200)
    assert paired["low"] == pytest.approx(0.1) and paired["high"] == pytest.approx(0.1)
    macro = group_interval(here["loss"], [group[:4], group[4:]], resamples=200)
    halves = [group_interval(here["loss"], [part], resamples=0)["value"] for part in (group[:4], group[4:])]
    assert macro["value"] == pytest.approx(sum(halves) / 2)
    one = group_interval(here["loss"], [group[:1]])
    assert one["low"] is None and math.isfinite(one["value"])
    assert group_interval(here["loss"], [np.array([99])]) is None
