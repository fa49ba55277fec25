"""Which end a long sample loses, and what becomes of it: against cuts written out by hand."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from flatshift.finetune.config import Train
from flatshift.finetune.data.encoding import IGNORE, TruncationCounts, encode
from flatshift.finetune.data.example import EncodedRows, Example
from flatshift.finetune.errors import UserError
from flatshift.finetune.tasks import Classify, Completion, LanguageModel, Seq2Seq
from tests.support.data_models import bert_tokenizer, byte_tokenizer, row

TOKENIZER = byte_tokenizer()
BOS, EOS = 1, 2
TEXT = "über naïve the cat sat on the mat and the dog"


def ids(text: str, tokenizer=TOKENIZER) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def one(task, r, max_length, tokenizer=TOKENIZER, **options):
    encoded = encode([r], task=task, tokenizer=tokenizer, max_length=max_length, **options)
    return encoded.examples[0], encoded


def test_a_text_loses_the_end_that_is_named():
    whole = [*ids(TEXT), EOS]
    for truncation, kept in ((None, whole[:8]), ("right", whole[:8]), ("left", whole[-8:])):
        example, encoded = one(LanguageModel(), row(text=TEXT), 9, truncation=truncation)
        assert example.input_ids == [BOS, *kept] and example.labels == [IGNORE, *kept] and encoded.truncated == 1
    offsets = TOKENIZER(TEXT, return_offsets_mapping=True)["offset_mapping"]
    example, _ = one(LanguageModel(), row(text=TEXT), 9, truncation="left")
    assert example.bytes == len(TEXT[offsets[-7][0] :].encode())  # seven of its tokens and the end
    example, _ = one(LanguageModel(), row(text=TEXT), 9, byte_tokenizer(bos=False), truncation="left")
    assert example.input_ids == whole[-9:] and example.bytes == len(TEXT[offsets[-7][0] :].encode())
    for truncation in ("left", "right"):
        example, encoded = one(LanguageModel(), row(text=TEXT), 64, truncation=truncation)
        assert example.input_ids == [BOS, *whole] and encoded.truncated == 0


def test_a_prompt_loses_the_end_that_is_named_and_an_answer_its_right():
    task, answer = Completion(prompt="{text}", completion=" {label}"), [*ids(" good"), EOS]
    room = 11 - len(answer)
    for truncation, kept in ((None, ids(TEXT)[-room:]), ("left", ids(TEXT)[-room:]), ("right", ids(TEXT)[:room])):
        example, encoded = one(task, row(text=TEXT, label="good"), 12, truncation=truncation)
        assert example.input_ids == [BOS, *kept, *answer] and encoded.truncated == 1
        assert example.labels == [IGNORE] * (1 + room) + answer
    for truncation in ("left", "right"):
        example, _ = one(task, row(text="the", label=TEXT), 8, truncation=truncation)
        assert example.input_ids[1:] == ids(" " + TEXT)[:7]


def test_cut_answers_are_counted_apart_from_cut_prompts():
    rows = [row(0, text="the cat", label="good")]
    rows += [row(1, text="the cat " * 20, label="good"), row(2, text="the cat", label="good " * 40)]
    for task in (Completion(), Seq2Seq()):
        made = encode(rows, task=task, tokenizer=TOKENIZER, max_length=24, decoder_start=0)
        assert (made.truncated, made.cut_answers, len(made.examples)) == (2, 1, 3)
        dropped = encode(rows, task=task, tokenizer=TOKENIZER, max_length=24, decoder_start=0, overlong="drop")
        assert (dropped.dropped, dropped.cut_answers, len(dropped.examples)) == (2, 0, 1)


def test_more_losses_than_a_task_allows_are_refused():
    def lost(**counts):
        found = TruncationCounts("train (a)")
        for _ in range(2):
            lengths = Counter({30: 1, 31: 1})
            examples = [Example([1], [1], "0", "rows.jsonl:1")] * (5 - counts.get("dropped", 0))
            found.add(EncodedRows(examples, truncated=0 if "dropped" in counts else 2, lengths=lengths, **counts))
        return found

    short, ten = Train(max_length=24), Train(max_length=24, overlong="drop", max_dropped=0.2)
    for task in (Completion(), Seq2Seq()):
        with pytest.raises(
            UserError, match=r"^train \(a\): 2 of 10 samples have an answer .* = 24 tokens, more than task"
        ):
            lost(cut_answers=1).refuse(task.max_truncated, short)
        lost(cut_answers=1).refuse(0.2, short)
        assert list(lost(cut_answers=1).notes(short)) == [
            "train (a): 4 of 10 samples (40 %) are cut to train.max_length = 24 tokens, 2 of them in their answer; 31 "
            "tokens would hold 99 % of them whole"
        ]
    with pytest.raises(
        UserError, match=r"2 of 10 samples are longer than .*, more than train\.max_dropped \(0\.1\) allows"
    ):
        lost(dropped=1).refuse(LanguageModel().max_truncated, short)
    lost(dropped=1).refuse(LanguageModel().max_truncated, ten)
    assert not list(lost(dropped=1).notes(ten))
    with pytest.raises(UserError, match=r"^train \(a\): 2 of 10 samples lose their whole prompt at train\.max"):
        lost(lost_prompts=1).refuse(Completion().max_truncated, short)
    for called, advised in (("train (a)", True), ("test", False)):  # dev and test rows are cut, never left out
        with pytest.raises(UserError) as refused:
            dataclasses.replace(lost(cut_answers=1), called=called).refuse(0.1, short)
        assert ("train.overlong: drop" in str(refused.value)) is advised
    with pytest.raises(
        UserError, match=r"4 of 10 samples are cut at .* than train\.max_cut \(0\.3\) allows; raise .*; 31"
    ):
        lost().refuse(LanguageModel().max_truncated, dataclasses.replace(short, max_cut=0.3))
    lost(lost_prompts=1).refuse(Completion().max_truncated, dataclasses.replace(short, max_cut=0.4))


@pytest.mark.parametrize("task", [LanguageModel(), Completion(), Seq2Seq(), Classify()], ids=lambda task: task.kind)
def test_more_than_half_is_refused_with_the_length_that_would_do(task):
    """100 of 100 rows, as well as 51; and of a hundred, a length for 99 whole."""
    rows = [row(i, text="the cat " * (1 + i // 10), label="good") for i in range(100)]
    how = {"task": task, "tokenizer": TOKENIZER, "decoder_start": 0}
    needs = sorted(len(one.input_ids) for one in encode(rows, max_length=200, **how).examples)
    for limit in (needs[49], needs[30], needs[0] - 1):
        found = TruncationCounts("train")
        found.add(made := encode(rows, max_length=limit, **how))
        cut = sum(one > limit for one in needs)
        assert found.truncated == made.truncated == cut
        (said,) = found.notes(Train(max_length=limit))
        assert said.startswith(f"train: {cut} of 100 samples ({cut} %) are cut to") and f"; {needs[98]} tokens" in said
        if cut <= 50:
            found.refuse(task.max_truncated, Train(max_length=limit))
        else:
            with pytest.raises(UserError, match=rf"{cut} of 100 samples .*{needs[98]} tokens would hold 99"):
                found.refuse(task.max_truncated, Train(max_length=limit))
        told = dataclasses.replace(task, max_truncated=1.0) if isinstance(task, Completion | Seq2Seq) else task
        found.refuse(told.max_truncated, Train(max_length=limit, max_cut=1.0))


def test_prompts_cut_to_nothing_are_counted():
    answer = "the cat sat " * 4
    rows = [row(i, text=TEXT, label=answer) for i in range(3)] + [row(3, text=TEXT, label="on")]
    size = len(ids(f" {answer}")) + 2  # beside <bos> and <eos>
    made = encode(rows, task=Completion(), tokenizer=TOKENIZER, max_length=size)
    assert (made.lost_prompts, made.cut_answers) == (3, 0)
    assert [label for label in made.examples[0].labels if label == IGNORE] == [IGNORE], "<bos> alone stands before it"
    made = encode(rows, task=Completion(), tokenizer=TOKENIZER, max_length=size - 1)
    assert (made.lost_prompts, made.cut_answers) == (3, 3)


def test_an_encoder_loses_the_end_that_is_named_and_a_target_its_right():
    task = Seq2Seq(prompt="{text}", target="{label}")
    for truncation, kept in ((None, ids(TEXT)[:8]), ("left", ids(TEXT)[-8:])):
        example, _ = one(task, row(text=TEXT, label=TEXT), 8, truncation=truncation, decoder_start=0)
        assert example.input_ids == kept
        assert example.labels == [*ids(TEXT)[:7], EOS] and example.decoder_ids == [0, *example.labels[:-1]]


def test_a_text_or_pair_of_a_classifier():
    tokenizer = bert_tokenizer()
    a, b = "the cat sat on the mat", "and the dog sat on the log"
    left, right = ids(a, tokenizer), ids(b, tokenizer)
    alone, _ = one(Classify(), row(text=a, label="x"), 6, tokenizer, truncation="left")
    assert alone.input_ids == [2, *left[-4:], 3]
    pair, _ = one(Classify(), row(text=a, text2=b, label="x"), 9, tokenizer, truncation="left")
    assert pair.input_ids == [2, *left[-3:], 3, *right[-3:], 3] and pair.segments == [0] * 5 + [1] * 4
    pair, _ = one(Classify(), row(text=a, text2=b, label="x"), 9, tokenizer)
    assert pair.input_ids == [2, *left[:3], 3, *right[:3], 3]


@pytest.mark.parametrize("task", [LanguageModel(), Completion(), Classify()], ids=lambda task: task.kind)
def test_long_samples_are_dropped_and_counted_or_refused(task):
    rows = [row(i, text="the cat " * (1 + 9 * (i == 2)), label="good") for i in range(4)]
    settings = {"task": task, "tokenizer": TOKENIZER, "max_length": 16}
    cut = encode(rows, **settings)
    assert (len(cut.examples), cut.truncated, cut.dropped) == (4, 1, 0)
    dropped = encode(rows, overlong="drop", **settings)
    assert (dropped.truncated, dropped.dropped) == (0, 1)
    assert dropped.examples == [example for i, example in enumerate(cut.examples) if i != 2]
    with pytest.raises(UserError, match=r"rows\.jsonl:3: this sample is longer than train\.max_length = 16 tokens"):
        encode(rows, overlong="refuse", **settings)
    assert len(encode(rows[:2], overlong="refuse", **settings).examples) == 2


@pytest.mark.parametrize("overlong", [None, "refuse"])
def test_a_share_of_dropped_samples_is_of_dropping(overlong):
    with pytest.raises(ValueError, match=r"^max_dropped is of what `overlong: drop` leaves out"):
        Train(overlong=overlong, max_dropped=0.2)
