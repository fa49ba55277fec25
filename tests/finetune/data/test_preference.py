"""Pairs of answers: columns in every form, what is cut, what is refused, what a model says of each row."""

from __future__ import annotations

import json

import pytest
import torch

from flatshift.finetune.config import Adapter, Mesh, Train
from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.data.chat.template import read_template
from flatshift.finetune.data.columns import ColumnarExamples, ExampleWriter, open_examples
from flatshift.finetune.data.encoding import encode
from flatshift.finetune.data.example import IGNORE
from flatshift.finetune.data.noise import flip_preferences
from flatshift.finetune.data.panel import format_first_batch
from flatshift.finetune.data.preference import swap_answers
from flatshift.finetune.data.rows import Row, read_rows
from flatshift.finetune.errors import UserError
from flatshift.finetune.planner.rules import RuleSettings, check_settings
from flatshift.finetune.tasks import KINDS, LanguageModel, Preference
from tests.support.data_models import byte_tokenizer

SAID = "Why is the sky blue?"
GOOD, BAD = "It scatters light.", "Because."
TURN = {"role": "user", "content": SAID}
TALKS = [[{"role": "assistant", "content": answer}] for answer in (GOOD, BAD)]


@pytest.fixture(scope="module")
def tokenizer():
    made = byte_tokenizer()
    made.chat_template = read_template("plain")
    return made


def read(tmp_path, records, task):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return list(read_rows([str(file)], required=task.columns(), label=task.read_label))


def shown(ids, labels, tokenizer):
    """What is read of a row, its supervised tokens in brackets."""
    begin = next(i for i, label in enumerate(labels) if label != IGNORE)
    end = begin + len(labels) - labels.count(IGNORE)
    assert labels[begin:end] == ids[begin:end]
    return f"{tokenizer.decode(ids[:begin])}[{tokenizer.decode(ids[begin:end])}]"


# ------------------------------------------------------------------------------------------------------------- columns

FORMS = {
    "prompt": ({"prompt": SAID, "chosen": f" {GOOD}", "rejected": f" {BAD}"}, None),
    "Orca": ({"question": SAID, "chosen": f" {GOOD}", "rejected": f" {BAD}"}, "Orca's columns: question"),
    "Alpaca": ({"instruction": SAID, "chosen": f" {GOOD}", "rejected": f" {BAD}"}, "Alpaca's columns: instruction"),
    "none": ({"chosen": f"{SAID} {GOOD}", "rejected": f"{SAID} {BAD}"}, "what both answers begin with"),
}


@pytest.mark.parametrize("form", FORMS)
def test_texts_in_every_form_are_one_pair_and_the_form_is_said(form, tokenizer, tmp_path):
    record, told = FORMS[form]
    task = Preference()
    encoded = encode(read(tmp_path, [record], task), task=task, tokenizer=tokenizer, max_length=200)
    (one,) = encoded.examples
    assert shown(one.input_ids, one.labels, tokenizer) == f"<bos>{SAID}[ {GOOD}<eos>]"
    assert shown(one.rejected_ids, one.rejected_labels, tokenizer) == f"<bos>{SAID}[ {BAD}<eos>]"
    assert one.bytes == len(f" {GOOD}".encode())
    assert encoded.notes[-1] == "1 pairs of answers, known by the columns chosen and rejected"
    assert told is None or told in encoded.notes[0]


@pytest.mark.parametrize("form", FORMS)
def test_a_space_of_both_the_answer_and_its_template_is_one(form, tokenizer, tmp_path):
    task = Preference(answer=" {answer}")
    (one,) = encode(read(tmp_path, [FORMS[form][0]], task), task=task, tokenizer=tokenizer, max_length=200).examples
    assert shown(one.input_ids, one.labels, tokenizer) == f"<bos>{SAID}[ {GOOD}<eos>]"
    assert shown(one.rejected_ids, one.rejected_labels, tokenizer) == f"<bos>{SAID}[ {BAD}<eos>]"


CHATS = {
    "lists": {"prompt": [TURN], "chosen": TALKS[0], "rejected": TALKS[1]},
    "texts": {"prompt": SAID, "chosen": GOOD, "rejected": BAD},
    "whole": {"prompt": SAID, "chosen": [TURN, *TALKS[0]], "rejected": [TURN, *TALKS[1]]},
    "no prompt": {"chosen": [TURN, *TALKS[0]], "rejected": [TURN, *TALKS[1]]},
    "JSON": {"chosen": json.dumps([TURN, *TALKS[0]]), "rejected": json.dumps([TURN, *TALKS[1]])},
    "ShareGPT": {
        "conversations": [{"from": "human", "value": SAID}],
        "chosen": {"from": "gpt", "value": GOOD},
        "rejected": {"from": "gpt", "value": BAD},
    },
}


@pytest.mark.parametrize("form", CHATS)
def test_conversations_in_every_form_are_one_pair(form, tokenizer, tmp_path):
    task = Preference(chat=True)
    encoded = encode(read(tmp_path, [CHATS[form]], task), task=task, tokenizer=tokenizer, max_length=200)
    (one,) = encoded.examples
    text = shown(one.input_ids, one.labels, tokenizer)
    other = shown(one.rejected_ids, one.rejected_labels, tokenizer)
    assert SAID in text and text.partition("[")[0] == other.partition("[")[0]
    assert GOOD in text.partition("[")[2] and BAD in other.partition("[")[2]
    for prompt in ([TURN], json.dumps([TURN])):
        (asked,), _ = task.input_format.build_prompts([Row({"prompt": prompt}, "0", "f:1")], tokenizer)
        assert asked.ids == one.input_ids[: len(asked.ids)], "an answer is asked for as it was trained"


def test_a_template_that_leaves_something_out_of_pairs_is_told_of(tokenizer, tmp_path):
    pair = {"system": "Be brief.", "prompt": SAID, "chosen": {**TALKS[0][0], "reasoning": "hm"}, "rejected": BAD}
    task = Preference(chat=True, template="mistral")
    encoded = encode(read(tmp_path, [pair], task), task=task, tokenizer=tokenizer, max_length=200)
    (one,) = encoded.examples
    assert shown(one.input_ids, one.labels, tokenizer) == f"<bos>[INST] Be brief.\n\n{SAID}[/INST][ {GOOD}<eos>]"
    assert encoded.notes[-2:] == (
        "1 turns have thoughts that the template leaves out",
        "the template writes [INST] and [/INST], no tokens of this tokenizer, in ordinary ones: meant for a backbone "
        "that has them",
    )


def test_single_answers_are_for_kto_and_labels_say_which(tokenizer, tmp_path):
    task = Preference(loss="kto")
    records = [{"prompt": SAID, "completion": f" {GOOD}", "label": label} for label in (True, 0, "False", "1")]
    encoded = encode(read(tmp_path, records, task), task=task, tokenizer=tokenizer, max_length=200)
    assert [one.desirable for one in encoded.examples] == [True, False, False, True]
    assert encoded.examples[0].rejected_ids is None
    assert encoded.notes == ("4 single answers, known by the columns completion and label",)
    with pytest.raises(UserError, match="no column 'chosen'"):
        read(tmp_path, records, Preference())
    turns = [{"prompt": SAID, "completion": TALKS[0], "label": True}]
    with pytest.raises(UserError, match=r"column 'completion' holds turns of a conversation; set task.chat: true"):
        encode(read(tmp_path, turns, task), task=task, tokenizer=tokenizer, max_length=200)
    talk, chat = [TURN, *TALKS[0]], Preference(loss="kto", chat=True)
    forms = [read(tmp_path, [{"messages": form, "label": 1}], chat) for form in (talk, json.dumps(talk))]
    first, second = (encode(form, task=chat, tokenizer=tokenizer, max_length=200).examples for form in forms)
    assert first == second


def test_columns_on_disk_give_back_the_examples(tokenizer, tmp_path):
    pair = Row({"prompt": SAID, "chosen": GOOD, "rejected": BAD}, "0", "f:1")
    single = Row({"prompt": SAID, "completion": GOOD, "label": False}, "0", "f:1")
    for row, name in ((pair, "pair"), (single, "single")):
        examples = encode([row], task=Preference(loss="kto"), tokenizer=tokenizer, max_length=200).examples
        (tmp_path / name).mkdir()
        writer = ExampleWriter(["f"], tmp_path / name)
        writer.add(examples)
        assert list(writer.close()) == examples == list(open_examples(tmp_path / name, 1, ["f"]))


# ------------------------------------------------------------------------------------------------ what is cut, refused


def test_the_prompt_loses_its_left_for_the_longer_answer(tokenizer):
    row = Row({"prompt": "abcdefgh", "chosen": "1", "rejected": "23456"}, "0", "f:1")
    encoded = encode([row], task=Preference(), tokenizer=tokenizer, max_length=10)
    (one,) = encoded.examples
    assert shown(one.input_ids, one.labels, tokenizer) == "<bos>fgh[1<eos>]"
    assert shown(one.rejected_ids, one.rejected_labels, tokenizer) == "<bos>fgh[23456<eos>]"
    assert (encoded.truncated, encoded.cut_answers, encoded.lost_prompts) == (1, 0, 0)
    assert dict(encoded.lengths) == {15: 1}
    short = encode([row], task=Preference(), tokenizer=tokenizer, max_length=6)
    assert (short.cut_answers, short.lost_prompts) == (1, 1)


@pytest.mark.parametrize("prompt", ["word " * 10, "word " * 14_000], ids=["beyond", "far beyond"])
def test_a_pair_whose_answers_begin_beyond_the_limit_is_too_long(prompt, tokenizer):
    rows = [Row({"prompt": prompt, "chosen": GOOD, "rejected": BAD}, "0", "f:1")]
    how = {"task": Preference(chat=True), "tokenizer": tokenizer, "max_length": 40}
    dropped = encode(rows, overlong="drop", **how)
    assert (dropped.examples, dropped.dropped, dropped.skipped) == ([], 1, [])
    for overlong, says in (("refuse", "f:1: this sample is longer than"), (None, "f:1: .* leave nothing of an answer")):
        with pytest.raises(UserError, match=says):
            encode(rows, overlong=overlong, **how)


BAD_ROWS = {
    "an answer is empty": {"prompt": "a", "chosen": "", "rejected": "b"},
    "column 'prompt' holds turns of a conversation; set task.chat: true": {
        "prompt": [TURN], "chosen": "a", "rejected": "b",
    },
    "an answer is a int, not text": {"prompt": "a", "chosen": 1, "rejected": "b"},
}  # fmt: skip


@pytest.mark.parametrize("says", BAD_ROWS)
def test_a_bad_row_is_refused_by_its_line_or_skipped(says, tokenizer):
    row = Row(BAD_ROWS[says], "0", "f:7")
    with pytest.raises(UserError, match=f"f:7: {says}"):
        encode([row], task=Preference(), tokenizer=tokenizer, max_length=50)
    skipped = encode([row], task=Preference(), tokenizer=tokenizer, max_length=50, bad_rows="skip").skipped
    assert skipped and skipped[0].startswith("f:7: ")


def test_pairs_and_single_answers_are_not_mixed(tokenizer):
    rows = [
        Row({"prompt": "a", "chosen": "b", "rejected": "c"}, "0", "f:1"),
        Row({"prompt": "a", "completion": "b", "label": True}, "1", "f:2"),
    ]
    with pytest.raises(UserError, match="f:2: rows before have pairs"):
        encode(rows, task=Preference(loss="kto"), tokenizer=tokenizer, max_length=50)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"loss": "orpo", "beta": 0.1}, "beta is of loss: dpo or ipo or kto or simpo, .*odds_weight"),
        ({"gamma": 1.0}, "gamma is of loss: simpo, and loss is dpo"),
        ({"loss": "ipo", "per_token": True}, "per_token is of loss: dpo"),
        ({"loss": "kto", "label_smoothing": 0.1}, "label_smoothing is of loss: dpo or simpo"),
        ({"label_smoothing": 0.6}, "label_smoothing"),
        ({"system": "be brief"}, "system is of conversations; set chat: true"),
        ({"chat": True, "answer": " {answer}"}, "with chat: true a chat template writes both"),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        Preference(**settings)


@pytest.mark.parametrize(
    ("task", "adapter", "train", "says"),
    [
        (Preference(), Adapter(init="pissa"), Train(), "the reference is the backbone as it came"),
        (Preference(loss="kto"), Adapter(under="runs/a"), Train(), "the reference is the backbone as it came"),
        (Preference(), Adapter(bias="all"), Train(), "the reference is the backbone as it came"),
        (Preference(loss="kto"), Adapter(), Train(batch_size=1), "two examples per step"),
    ],
)
def test_what_leaves_no_reference_or_no_drift_is_a_rule(task, adapter, train, says):
    with pytest.raises(UserError, match=says):
        check_settings(RuleSettings(Mesh(), train, adapter, task))
    check_settings(RuleSettings(Mesh(), train, adapter, Preference(loss="simpo")))


# ------------------------------------------------------------------------------------------------------------- batches


def test_mismatched_answers_are_the_same_on_any_cut_and_rank(tokenizer):
    rows = [Row({"prompt": f"p{i}", "chosen": f"c{i}", "rejected": f"r{i} more"}, str(i), f"f:{i}") for i in range(8)]
    task = Preference(loss="kto")
    examples = ColumnarExamples.of(encode(rows, task=task, tokenizer=tokenizer, max_length=50).examples)

    def drawn(batch_size, accumulate, share=(0, 1)):
        batches = TrainingDataLoader(
            examples, task=task, batch_size=batch_size, accumulate=accumulate, seed=3, max_length=50, pad_id=0,
            share=share,
        )  # fmt: skip
        found = []
        for micro in batches.at(1):
            assert micro.supervised == len(micro.labels) == 2 * micro.samples
            others = micro.preference.mismatched
            for ids, mask in zip(others.inputs["input_ids"], others.inputs["attention_mask"], strict=True):
                found.append(tokenizer.decode(ids[mask.bool()]))
        return batches.supervised(1), found

    count, whole = drawn(8, 1)
    assert count == 16 and all(text[6] != text.partition("<eos>")[0][8:][0] for text in whole)
    assert drawn(2, 4) == (count, whole)
    ranks = [drawn(4, 2, share=(rank, 2))[1] for rank in (0, 1)]
    assert ranks[0][:4] + ranks[1][:4] + ranks[0][4:] + ranks[1][4:] == whole


def test_the_panel_marks_both_answers(tokenizer):
    row = Row({"prompt": SAID, "chosen": f" {GOOD}", "rejected": f" {BAD}"}, "0", "f:1")
    examples = encode([row], task=Preference(), tokenizer=tokenizer, max_length=200).examples
    batches = TrainingDataLoader(examples, task=Preference(), batch_size=1, seed=0, max_length=200, pad_id=0)
    lines = format_first_batch(batches.at(0)[0], tokenizer, Preference()).splitlines()
    assert "supervised in 1 pairs" in lines[0]
    assert lines[1].endswith(f"+ <bos>{SAID}⟦ {GOOD}<eos>⟧") and lines[2].endswith(f"− <bos>{SAID}⟦ {BAD}<eos>⟧")
    assert format_first_batch(batches.at(0)[0], tokenizer, Preference(), samples=1).splitlines() == lines


def test_label_noise_calls_the_worse_answer_the_better():
    rows = [Row({"prompt": "p", "chosen": f"c{i}", "rejected": f"r{i}"}, str(i), f"f:{i}") for i in range(10)]
    few, some = (flip_preferences(rows, exchange=swap_answers, rate=rate, seed=0) for rate in (0.2, 0.5))
    assert len(few[1]) == 2 and len(some[1]) == 5 and set(few[1]) < set(some[1])
    for row, before in zip(some[0], rows, strict=True):
        swapped = row.id in some[1]
        assert row.values["chosen"] == before.values["rejected" if swapped else "chosen"]


def test_the_odds_of_likely_answers_keep_their_gradient():
    from flatshift.finetune.tasks.preference import _log1mexp

    x = torch.tensor([-1e-6, -1e-3, -0.5, -0.7, -3.0, -40.0], requires_grad=True)
    _log1mexp(x).sum().backward()
    exact = x.detach().double()
    torch.testing.assert_close(_log1mexp(x).double(), (-torch.expm1(exact)).log(), rtol=1e-5, atol=1e-12)
    torch.testing.assert_close(x.grad.double(), -exact.exp() / -torch.expm1(exact), rtol=1e-5, atol=1e-12)
    certain = torch.zeros(1, requires_grad=True)
    _log1mexp(certain).backward()
    assert torch.isfinite(certain.grad).all()


def test_memory_is_planned_for_the_rows_that_are_read():
    assert Preference().traits.count_token_rows(Train(batch_size=4)).batch_size == 8
    assert LanguageModel().traits.count_token_rows(Train(batch_size=4)) == Train(batch_size=4)
    assert KINDS["preference"]().has_reference and not Preference(loss="orpo").has_reference
