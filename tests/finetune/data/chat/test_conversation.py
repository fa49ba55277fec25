"""Rows of conversations: forms that are read, and bad input in one sentence or counted."""

from __future__ import annotations

import dataclasses
import json

import pytest

from flatshift.finetune.data.chat.conversation import read_conversation, read_unanswered_turns
from flatshift.finetune.data.config import Columns
from flatshift.finetune.data.encoding import encode
from flatshift.finetune.data.rows import read_rows
from flatshift.finetune.errors import UserError
from flatshift.finetune.tasks import Chat
from tests.support.chat_models import chat_tokenizer
from tests.support.data_models import byte_tokenizer, row, write_jsonl

TOKENIZER = chat_tokenizer("qwen3_instruct_2507")
ASK, SAY = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
TOOL = {"role": "tool", "content": "sun"}


def encoded(*conversations, tokenizer=TOKENIZER, max_length=256, bad_rows="refuse", **settings):
    rows = [row(i, **(told if isinstance(told, dict) else {"messages": told})) for i, told in enumerate(conversations)]
    return encode(rows, task=Chat(**settings), tokenizer=tokenizer, max_length=max_length, bad_rows=bad_rows)


def said(example, tokenizer=TOKENIZER):
    return tokenizer.decode([label for label in example.labels if label != -100])


def test_forms_of_one_conversation(tmp_path):
    turns = [{"role": "system", "content": "Be brief."}, ASK, SAY]
    sharegpt = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Hello"},
    ]
    sparse = [{**turn, "tool_calls": None, "name": None} for turn in turns]  # as Parquet fills its columns
    bare = [{**turn, "tool_calls": []} for turn in turns]
    forms = [turns, sharegpt, sparse, json.dumps(turns), bare]
    parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in turns]
    assert [read_conversation(row(messages=form)).messages for form in forms] == [turns] * 5
    assert read_conversation(row(messages=turns, tools="null")).tools is None
    assert read_conversation(row(messages=parts)).messages == parts
    assert len({str(example.input_ids) for example in encoded(*forms).examples}) == 1
    path = write_jsonl(tmp_path / "rows.jsonl", [{"conversations": form} for form in forms])
    rows = list(read_rows([str(path)], columns=Columns(messages="conversations"), required=Chat().columns()))
    assert read_conversation(rows[1]).messages == turns
    told = list(read_rows([str(path)], required=Chat().columns()))
    assert [read_conversation(one) for one in told] == [read_conversation(one) for one in rows]
    assert told[0].form == "ShareGPT" and not rows[0].form


def test_columns_of_other_toolkits(tmp_path):
    asked = {"instruction": "Translate.", "input": "ja", "output": "yes", "system": "Be brief."}
    records = [asked, {"instruction": "Hi", "input": "", "output": "Hello"}]
    (path := tmp_path / "alpaca.json").write_text(json.dumps(records, indent=1))
    rows = list(read_rows([str(path)], required=Chat().columns()))
    assert read_conversation(rows[0]).messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Translate.\n\nja"},
        {"role": "assistant", "content": "yes"},
    ]
    assert read_conversation(rows[1]).messages == [ASK, SAY]
    notes = encode(rows, task=Chat(), tokenizer=TOKENIZER, max_length=256).notes
    assert "turns read from Alpaca's columns: instruction, input, context, output, system, history" in notes
    for record, turns in (
        ({"instruction": "Translate.", "input": "ja", "response": "yes"}, ["Translate.\n\nja", "yes"]),
        ({"instruction": "Translate.", "context": "ja", "output": "yes"}, ["Translate.\n\nja", "yes"]),
        ({"question": "1 + 1?", "answer": 2}, ["1 + 1?", "2"]),
        ({"prompt": "Who?", "completion": '[{"name": "Bob"}]'}, ["Who?", '[{"name": "Bob"}]']),
    ):
        (one,) = read_rows([str(write_jsonl(tmp_path / "one.jsonl", [record]))], required=("messages",))
        assert [turn["content"] for turn in read_conversation(one).messages] == turns
    bare = list(read_rows([str(write_jsonl(tmp_path / "bare.jsonl", [{"instruction": "Hi"}]))], required=("messages",)))
    assert read_unanswered_turns(bare[0]) == [ASK]
    for second, reason in (
        ({"conversations": [], "instruction": "a"}, r"mixed\.jsonl:2: columns 'conversations' and 'instruction' may"),
        ({"messages": [ASK, SAY]}, r"mixed\.jsonl:2: a row with 'messages', and those before have 'instruction'"),
        ({"instruction": ["a"]}, r"mixed\.jsonl:2: column 'instruction' is a list"),
        ({"text": "a"}, r"mixed\.jsonl:2: no column 'messages'"),
    ):
        path = write_jsonl(tmp_path / "mixed.jsonl", [records[1], second])
        with pytest.raises(UserError, match=reason):
            list(read_rows([str(path)], required=Chat().columns()))


def test_a_system_turn_is_put_in_front_where_there_is_none():
    own = [{"role": "system", "content": "Mine."}, ASK, SAY]
    first, second = encoded([ASK, SAY], own, system="Yours.").examples
    assert TOKENIZER.decode(first.input_ids).startswith("<|im_start|>system\nYours.<|im_end|>")
    assert TOKENIZER.decode(second.input_ids).startswith("<|im_start|>system\nMine.<|im_end|>")


def test_a_weight_of_zero_leaves_a_turn_unsupervised():
    (example,) = encoded([ASK, {**SAY, "weight": 0}, ASK, {**SAY, "content": "Again", "weight": 1}]).examples
    assert said(example) == "Again<|im_end|>"
    with pytest.raises(UserError, match=r"turn 2 has weight 0\.5; give 0 .* or 1"):
        encoded([ASK, {**SAY, "weight": 0.5}])


def test_the_last_turn_alone_with_a_weight_of_zero_leaves_nothing_to_supervise():
    """The turn before it is not what was asked for, so it must not be learnt in its place."""
    none = [ASK, SAY, ASK, {**SAY, "content": "Again", "weight": 0}]
    with pytest.raises(UserError, match=r"^rows\.jsonl:1: turn 4, the assistant's last, has weight 0.*turns: all; or"):
        encoded(none, turns="last")
    found = encoded(none, [ASK, {**SAY, "weight": 0}, ASK, SAY], turns="last", bad_rows="skip")
    assert [said(example) for example in found.examples] == ["Hello<|im_end|>"] and len(found.skipped) == 1
    assert "1 bad rows (left out)" in found.notes[0]
    assert said(encoded(none).examples[0]) == "Hello<|im_end|>"  # all turns: the one that has a weight


BAD = {
    "messages is null, not a list": None,
    "messages is text but not JSON": "Hi there",
    "the conversation is empty": [],
    "turn 1 is a str, not an object with role and content": ["Hi"],
    "turn 1 has the role 'users'; did you mean 'user'?": [{"role": "users", "content": "Hi"}, SAY],
    "turn 1 has the role None; there are system, developer, user": [{"content": "Hi"}, SAY],
    r"turn 1 has the role \['user'\]; did you mean 'user'": [{"role": ["user"], "content": "Hi"}, SAY],
    r"turn 1 has the role \{'user': 1\}; ": [{"role": {"user": 1}, "content": "Hi"}, SAY],
    r"turn 1 is from \['human'\]; of ShareGPT's form": [{"from": ["human"], "value": "Hi"}, SAY],
    "messages is text but not JSON; give": "[" * 200_000,
    r"turn 1 \(user\) has no content": [{"role": "user"}, SAY],
    "the content of turn 1 is a int, not text": [{"role": "user", "content": 3}, SAY],
    "turn 1 has a part of type 'image'; only text": [{"role": "user", "content": [{"type": "image"}]}, SAY],
    "out of order: turn 1 is assistant at the beginning, and belongs after user or after tool": [SAY, ASK],
    "out of order: turn 2 is user after user, and belongs at the beginning or after": [ASK, ASK, SAY],
    "out of order: turn 3 is assistant after assistant": [ASK, SAY, SAY],
    "out of order: turn 2 is tool after user, and belongs after assistant or after tool": [ASK, TOOL, SAY],
    "out of order: turn 3 is system after assistant, and belongs at the beginning": [
        ASK, SAY, {"role": "system", "content": "x"}, ASK, SAY,
    ],
    "turn 2 of the assistant is empty": [ASK, {"role": "assistant", "content": " \n"}, ASK, SAY],
    "no turn of the assistant is there to learn from": [ASK],
    "a tool call of turn 2 names no function": [ASK, {"role": "assistant", "tool_calls": [{"type": "function"}]}],
    "tool_calls of turn 2 is an object, not a list": [ASK, {"role": "assistant", "tool_calls": {"name": "f"}}],
    r"turn 1 \(user\) has tool_calls, which belong to turns of the assistant": [{**ASK, "tool_calls": ["abc"]}, SAY],
    "turn 2 is from 'function_call', and its value is no JSON": [ASK, {"from": "function_call", "value": "f()"}],
    "turn 1 has 'markdown' beside from and value; leave it out": [{"from": "human", "value": "Hi", "markdown": 1}, SAY],
    "turn 1 is from 'narrator'; of ShareGPT's form only": [{"from": "narrator", "value": "f()"}, SAY],
    "the arguments of 'f' in turn 2 are text that is no JSON object": [
        ASK, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "x=1"}}]},
    ],
    "column 'system' and turn 1 are two system turns": {
        "messages": [{"role": "system", "content": "Be brief."}, ASK, SAY], "system": "Be long.",
    },
    "column 'system' is a list, not text": {"messages": [ASK, SAY], "system": ["Be long."]},
    "half of a surrogate pair": [{"role": "user", "content": "\ud800"}, SAY],
    "tools must be a list of objects": {"messages": [ASK, SAY], "tools": ["weather"]},
}  # fmt: skip


@pytest.mark.parametrize("reason", list(BAD))
def test_a_bad_row_is_refused_by_name_or_left_out_and_counted(reason):
    with pytest.raises(
        UserError, match=rf"^rows\.jsonl:1: .*{reason}.*; or leave such rows out with data.bad_rows: skip"
    ):
        encoded(BAD[reason])
    found = encoded([ASK, SAY], BAD[reason], bad_rows="skip")
    assert len(found.examples) == 1 and len(found.skipped) == 1 and found.skipped[0].startswith("rows.jsonl:2: ")
    assert "1 bad rows (left out)" in found.notes[0]


def test_rows_that_are_all_bad_are_refused_even_if_skipped():
    with pytest.raises(UserError, match=r"no usable conversation in rows.jsonl: .* rows.jsonl:1: no turn of the ass"):
        encoded([ASK], [ASK], bad_rows="skip")


def test_a_template_that_raises_is_a_bad_row(tmp_path):
    path = tmp_path / "strict.jinja"
    path.write_text(
        "{{ raise_exception('System role not supported') if messages[0].role == 'system' }}"
        "{{ messages[0].content }};{{ messages[1].content if messages[1] }}{{ eos_token if messages[1] }}"
    )
    with pytest.raises(UserError, match=r"rows.jsonl:1: task.template fails on it \(System role not supported\)"):
        encoded([ASK, SAY], template=str(path), system="Be brief.")
    found = encoded([{"role": "system", "content": "x"}, ASK, SAY], [ASK, SAY], template=str(path), bad_rows="skip")
    assert [said(example) for example in found.examples] == ["Hello<|im_end|>"] and len(found.skipped) == 1


def test_nulls_that_arrow_made_up_are_told_of():
    filled = dataclasses.replace(row(1, messages=[ASK, SAY]), nulls=3)
    found = encode([row(0, messages=[ASK, SAY]), filled], task=Chat(), tokenizer=TOKENIZER, max_length=256)
    assert "1 conversations came with 3 keys that hold null inside their calls and tools" in " ".join(found.notes)
    assert not any("null" in note for note in encoded([ASK, SAY]).notes)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ 1 // (messages[0].content|length - 2) }}", "integer division or modulo by zero"),
        ("{{ eos_token * 10 ** 15 }}", "MemoryError"),
        ("{{ eos_token * 10 ** 30 }}", "cannot fit"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "maximum recursion depth"),
    ],
)
def test_a_template_that_asks_too_much_of_python_is_a_bad_row(text, reason, tmp_path):
    path = tmp_path / "too-much.jinja"
    body = "{{ messages[0].content }};{{ messages[1].content if messages[1] }}{{ eos_token if messages[1] }}"
    path.write_text(f"{body}{{% if messages[0].content|length == 2 %}}{text}{{% endif %}}")
    with pytest.raises(UserError, match=rf"rows.jsonl:1: task.template fails on it \(.*{reason}.*; or leave such rows"):
        encoded([ASK, SAY], template=str(path))
    longer = [{"role": "user", "content": "Hello"}, SAY]
    found = encoded([ASK, SAY], longer, template=str(path), bad_rows="skip")
    assert [said(example) for example in found.examples] == ["Hello<|im_end|>"] and len(found.skipped) == 1


def test_settings_that_cannot_be(tmp_path):
    with pytest.raises(UserError, match=r"task.template: no file 'nowhere.jinja'; name a file .*, auto \(.*, plain$"):
        encoded([ASK, SAY], template="nowhere.jinja")
    with pytest.raises(UserError, match=r"task.template: no file 'chatlm'; did you mean 'chatml'\?"):
        encoded([ASK, SAY], template="chatlm")
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for message in messages %}")
    with pytest.raises(UserError, match=r"task.template is not valid Jinja \(line 1: "):
        encoded([ASK, SAY], template=str(broken))
    with pytest.raises(
        UserError, match=r"task.date: the tokenizer's chat template writes today's date.*for example 20"
    ):
        encoded([ASK, SAY], tokenizer=chat_tokenizer("gptoss"))
    with pytest.raises(ValueError, match="date must be written YYYY-MM-DD"):
        Chat(date="21.11.2026")
    for wrong in ({"max_truncated": 1.5}, {"max_unsupervised": -0.1}, {"max_new_tokens": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Chat(**wrong)


def test_a_tokenizer_without_a_pad_token_is_no_obstacle():
    tokenizer = byte_tokenizer(pad=False)
    (example,) = encoded([ASK, SAY], tokenizer=tokenizer, template="plain").examples
    assert tokenizer.decode(example.input_ids) == "<bos>User: Hi\nAssistant: Hello<eos>\n"
    assert said(example, tokenizer) == " Hello<eos>"
