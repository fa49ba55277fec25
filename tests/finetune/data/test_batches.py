"""Micro-batches: pure in the step, nothing dropped, counts exact; the panel shows what is supervised."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from flatshift.finetune.data.batches import TrainingDataLoader, pack_order
from flatshift.finetune.data.encoding import IGNORE, encode
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.data.example import Example
from flatshift.finetune.data.panel import format_first_batch, split_batch_spans
from flatshift.finetune.errors import UserError
from flatshift.finetune.tasks import Classify, Completion, LanguageModel
from tests.support.data_models import bert_tokenizer, byte_tokenizer, row, text_rows

TOKENIZER = byte_tokenizer()


def made(task, count=37, max_length=48, **options) -> TrainingDataLoader:
    examples = encode(text_rows(count), task=task, tokenizer=TOKENIZER, max_length=max_length).examples
    settings = {"batch_size": 4, "accumulate": 2, "seed": 5, "max_length": max_length, "pad_id": 0, **options}
    return TrainingDataLoader(examples, task=task, **settings)


TASKS = [LanguageModel(pack=False), LanguageModel(pack=True), Completion(pack=True), Classify()]


@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_at_is_a_pure_function_of_the_step(task):
    one, other = made(task), made(task)
    forward = [one.at(step) for step in range(12)]
    for step in reversed(range(12)):
        for a, b in zip(forward[step], other.at(step), strict=True):
            assert a.rows == b.rows and torch.equal(a.labels, b.labels)
            assert a.inputs.keys() == b.inputs.keys()
            assert all(torch.equal(a.inputs[name], b.inputs[name]) for name in a.inputs)
    assert made(task, seed=6).rows_at(0) != one.rows_at(0)


@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_epochs_follow_each_other_and_nothing_is_dropped(task):
    batches = made(task, batch_size=3, accumulate=1)
    stream = [row for step in range(60) for micro in batches.rows_at(step) for row in micro]
    assert all(len(micro) == 3 for step in range(60) for micro in batches.rows_at(step))
    place = 0
    for e in range(3):
        epoch = batches.epoch(e)
        assert stream[place : place + len(epoch)] == epoch
        assert sorted(i for row in epoch for i in row) == list(range(37))
        place += len(epoch)
    assert batches.epoch(0) != batches.epoch(1)


@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_counts_are_what_the_loss_sums_over(task):
    batches = made(task)
    for step in range(6):
        micros = batches.at(step)
        assert len(micros) == 2
        for micro in micros:
            labels = micro.labels
            counted = len(labels) if isinstance(task, Classify) else int((labels[:, 1:] != IGNORE).sum())
            assert micro.supervised == counted
            assert micro.samples == sum(map(len, micro.rows))
        assert batches.supervised(step) == sum(micro.supervised for micro in micros)


def test_unpacked_rows_are_the_examples_padded_on_the_right():
    task = Completion(pack=False)
    rows = text_rows(9)
    examples = encode(rows, task=task, tokenizer=TOKENIZER, max_length=48).examples
    batches = TrainingDataLoader(examples, task=task, batch_size=4, seed=0, max_length=48, pad_id=0)
    for micro in batches.at(0) + batches.at(1):
        for r, (i,) in enumerate(micro.rows):
            n = len(examples[i].input_ids)
            assert micro.inputs["input_ids"][r].tolist()[:n] == examples[i].input_ids
            assert micro.labels[r].tolist()[:n] == examples[i].labels
            assert micro.inputs["attention_mask"][r].tolist() == [1] * n + [0] * (micro.labels.shape[1] - n)
            assert (micro.labels[r, n:] == IGNORE).all() and (micro.inputs["input_ids"][r, n:] == 0).all()
        assert micro.inputs.keys() == {"input_ids", "attention_mask"}


def test_packed_rows_restart_positions_and_never_predict_across():
    batches = made(LanguageModel(), count=80)
    packed = [micro for step in range(4) for micro in batches.at(step)]
    assert any(len(row) > 2 for micro in packed for row in micro.rows)
    for micro in packed:
        assert "attention_mask" not in micro.inputs
        for r in range(len(micro.rows)):
            positions = micro.inputs["position_ids"][r]
            starts = positions == 0
            assert starts[0] and (micro.labels[r][starts] == IGNORE).all()
            assert (positions[1:][~starts[1:]] == positions[:-1][~starts[1:]] + 1).all()
            assert int(starts.sum()) - len(micro.rows[r]) in (0, 1)  # the padding is one more


def test_pack_order_is_a_partition_that_fits_and_fills():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 129, size=3000).tolist()
    rows = pack_order(lengths, 128)
    assert Counter(i for row in rows for i in row) == Counter(range(3000))
    fill = [sum(lengths[i] for i in row) for row in rows]
    assert max(fill) <= 128
    assert sum(lengths) / (128 * len(rows)) > 0.95
    assert pack_order([128, 128], 128) == [[0], [1]]
    # Order: a sample does not wander far from its turn.
    place = {i: p for p, row in enumerate(rows) for i in row}
    assert np.corrcoef(range(3000), [place[i] for i in range(3000)])[0, 1] > 0.95


def test_segments_reach_the_model():
    rows = [row(0, text="the cat", text2="the dog sat", label="a"), row(1, text="the", label="b")]
    examples = encode(rows, task=Classify(), tokenizer=bert_tokenizer(), max_length=16).examples
    (micro,) = EvalBatching(4, 0).batches(examples, Classify())
    segments = micro.inputs["token_type_ids"].tolist()
    assert segments[0] == examples[0].segments and set(segments[1]) == {0}


def test_evaluation_takes_every_example_once_longest_first():
    examples = encode(text_rows(50), task=LanguageModel(), tokenizer=TOKENIZER, max_length=48).examples
    micros = list(EvalBatching(8, 0).batches(examples, LanguageModel(), max_tokens=100))
    seen = [i for micro in micros for (i,) in micro.rows]
    assert sorted(seen) == list(range(50))
    lengths = [len(examples[i].input_ids) for i in seen]
    assert lengths == sorted(lengths, reverse=True)
    assert all(micro.labels.numel() <= 100 or len(micro.rows) == 1 for micro in micros)


def test_what_cannot_be_batched():
    good = Example([1, 2, 3], [IGNORE, 2, 3], "a", "rows.jsonl:1")
    settings = {"task": LanguageModel(), "batch_size": 1, "seed": 0, "max_length": 3, "pad_id": 0}
    with pytest.raises(UserError, match="no training examples"):
        TrainingDataLoader([], **settings)
    with pytest.raises(UserError, match=r"rows\.jsonl:2: this sample has no target token"):
        TrainingDataLoader([good, Example([1, 2], [IGNORE, IGNORE], "b", "rows.jsonl:2")], **settings)
    with pytest.raises(UserError, match=r"rows\.jsonl:1: 3 tokens do not fit train\.max_length 2"):
        TrainingDataLoader([good], **{**settings, "max_length": 2})
    with pytest.raises(UserError, match=r"train\.batch_size: 0"):
        TrainingDataLoader([good], **{**settings, "batch_size": 0})


def test_panel_marks_exactly_the_supervised_tokens():
    task = Completion(prompt="{text} =>", completion=" {label}", pack=True)
    rows = [row(0, text="größe", label="good"), row(1, text="the 🙂", label="bad")]
    examples = encode(rows, task=task, tokenizer=TOKENIZER, max_length=64).examples
    micro = TrainingDataLoader(examples, task=task, batch_size=1, seed=0, max_length=64, pad_id=0).at(0)[0]
    assert micro.samples == 2
    panel = format_first_batch(micro, TOKENIZER, task)
    assert "<bos>größe =>⟦ good<eos>⟧" in panel and "<bos>the 🙂 =>⟦ bad<eos>⟧" in panel
    assert f"1 rows, 2 samples, {sum(len(e.input_ids) for e in examples)} tokens" in panel
    assert "<pad>" not in panel
    spans = split_batch_spans(micro, TOKENIZER)
    assert [[span.supervised for span in sample] for sample in spans] == [[False, True]] * 2


def test_panel_of_classes_and_of_long_texts():
    examples = encode(text_rows(3), task=Classify(), tokenizer=TOKENIZER, max_length=64).examples
    (micro,) = EvalBatching(3, 0).batches(examples, Classify())
    panel = format_first_batch(micro, TOKENIZER, Classify(), label_names=("bad", "good", "neutral"), samples=2)
    name = ("bad", "good", "neutral")[int(micro.labels[0])]
    assert f"→ ⟦{name}⟧" in panel and "… and 1 more" in panel
    examples = encode([row(text="the cat " * 300)], task=LanguageModel(), tokenizer=TOKENIZER, max_length=900).examples
    (micro,) = EvalBatching(1, 0).batches(examples, LanguageModel())
    panel = format_first_batch(micro, TOKENIZER, LanguageModel(), width=100)
    assert panel.count("⟦") == panel.count("⟧") == 3 and len(panel) < 250  # the first is the legend


def test_panel_refuses_a_batch_with_nothing_supervised():
    example = Example([1, 5, 6], [IGNORE] * 3, "a", "rows.jsonl:1")
    (micro,) = EvalBatching(1, 0).batches([example], LanguageModel())
    with pytest.raises(UserError, match="no target token"):
        format_first_batch(micro, TOKENIZER, LanguageModel())
