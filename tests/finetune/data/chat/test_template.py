"""Templates that ship: each rendering beside the published form, written by hand; their masks; arguments; refusals."""

from __future__ import annotations

import copy
import json

import pytest

from flatshift.finetune.data.chat.template import (
    ChatTemplate,
    describe_template,
    list_shipped_templates,
    resolve_template,
    set_template,
)
from flatshift.finetune.data.encoding import IGNORE, encode
from flatshift.finetune.errors import UserError
from flatshift.finetune.tasks import Chat
from tests.support.chat_models import CONVERSATIONS, chat_tokenizer
from tests.support.data_models import byte_tokenizer, row

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who wrote Faust?"},
    {"role": "assistant", "content": "Goethe."},
    {"role": "user", "content": "When?"},
    {"role": "assistant", "content": "1808."},
]
PARTS = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in TALK]
CONTROL = {
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "hermes": ["<|im_start|>", "<|im_end|>"],
    "llama3": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "gemma": ["<start_of_turn>", "<end_of_turn>"],
    "mistral": ["[INST]", "[/INST]"],
}
CHATML = (
    "<bos><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho wrote Faust?<|im_end|>\n"
    "<|im_start|>assistant\n⟦Goethe.<|im_end|>⟧\n<|im_start|>user\nWhen?<|im_end|>\n"
    "<|im_start|>assistant\n⟦1808.<|im_end|>⟧\n"
)
WRITTEN = {
    "chatml": CHATML,
    "hermes": CHATML,
    "llama3": (
        "<bos><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWho wrote Faust?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Goethe.<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\nWhen?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦1808.<|eot_id|>⟧"
    ),
    "gemma": (
        "<bos><start_of_turn>user\nBe brief.\n\nWho wrote Faust?<end_of_turn>\n"
        "<start_of_turn>model\n⟦Goethe.<end_of_turn>⟧\n<start_of_turn>user\nWhen?<end_of_turn>\n"
        "<start_of_turn>model\n⟦1808.<end_of_turn>⟧\n"
    ),
    "mistral": (
        "<bos>[INST] Be brief.\n\nWho wrote Faust?[/INST]⟦ Goethe.<eos>⟧[INST] When?[/INST]⟦ 1808.<eos>⟧"
    ),
    "alpaca": (
        "<bos>Be brief.\n\n### Instruction:\nWho wrote Faust?\n\n### Response:\n⟦Goethe.<eos>⟧\n\n"
        "### Instruction:\nWhen?\n\n### Response:\n⟦1808.<eos>⟧\n\n"
    ),
    "plain": (
        "<bos>Be brief.\n\nUser: Who wrote Faust?\nAssistant:⟦ Goethe.<eos>⟧\nUser: When?\nAssistant:⟦ 1808.<eos>⟧\n"
    ),
    "base": (
        "<bos><|system|>\nBe brief.\n<|user|>\nWho wrote Faust?\n<|assistant|>\n⟦Goethe.<eos>⟧\n"
        "<|user|>\nWhen?\n<|assistant|>\n⟦1808.<eos>⟧\n"
    ),
}  # fmt: skip
ASKED = {
    "chatml": "<|im_start|>assistant\n",
    "hermes": "<|im_start|>assistant\n",
    "llama3": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma": "<start_of_turn>model\n",
    "mistral": "",
    "alpaca": "### Response:\n",
    "plain": "Assistant:",
    "base": "<|assistant|>\n",
}


def tokenizer_of(name):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": CONTROL.get(name, [])})
    return tokenizer


def marked(found, tokenizer):
    """The text of the only example, with what is supervised in ⟦ ⟧."""
    (example,) = found.examples
    text, inside = "", False
    for token, label in zip([*example.input_ids, None], [*example.labels, IGNORE], strict=True):
        if (label != IGNORE) != inside:
            text, inside = text + ("⟦" if not inside else "⟧"), not inside
        text += "" if token is None else tokenizer.decode([token])
    return text


def encoded(name, talk, **settings):
    tokenizer = tokenizer_of(name)
    rows = [row(0, **(talk if isinstance(talk, dict) else {"messages": talk}))]
    found = encode(rows, task=Chat(template=name, **settings), tokenizer=tokenizer, max_length=4096)
    return found, tokenizer


def test_every_template_that_ships_is_written_down_here():
    assert set(WRITTEN) == set(ASKED) == set(list_shipped_templates())


@pytest.mark.parametrize("name", list(WRITTEN))
def test_the_published_form_and_its_supervised_tokens(name):
    assert marked(*encoded(name, TALK)) == WRITTEN[name]
    assert marked(*encoded(name, PARTS)) == WRITTEN[name]
    tokenizer = tokenizer_of(name)
    template = ChatTemplate(tokenizer, Chat(template=name))
    before = template.render(TALK[:-1], None)
    assert template.render(TALK[:-1], None, prompt=True) == before + ASKED[name]
    assert WRITTEN[name].replace("⟦", "").replace("⟧", "").startswith(before + ASKED[name])
    # As anybody renders it, from a tokenizer that was handed on.
    set_template(tokenizer, Chat(template=name))
    theirs = tokenizer.apply_chat_template(TALK[:-1], tokenize=False, add_generation_prompt=True)
    assert theirs == before + ASKED[name]


def test_alpaca_begins_with_its_own_words_where_there_is_no_system_turn():
    text = marked(*encoded("alpaca", TALK[1:3]))
    assert text == (
        "<bos>Below is an instruction that describes a task. Write a response that appropriately completes the "
        "request.\n\n### Instruction:\nWho wrote Faust?\n\n### Response:\n⟦Goethe.<eos>⟧\n\n"
    )


@pytest.mark.parametrize("name", ["hermes", "base"])
def test_tools_are_written_and_their_calls_supervised(name):
    talk = copy.deepcopy(CONVERSATIONS["tools"])
    talk["messages"].insert(0, {"role": "system", "content": "Be brief."})
    found, tokenizer = encoded(name, talk)
    text = marked(found, tokenizer)
    call = '⟦<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
    assert call + ("<|im_end|>⟧" if name == "hermes" else "<eos>⟧") in text
    if name == "base":
        assert "Be brief.\n\n# Tools\n\n" in text and "<|tool|>\n" in text
        return
    theirs = chat_tokenizer("qwen2_5")  # Qwen2.5 publishes the same form; its template is in tests/data
    published = theirs.apply_chat_template(talk["messages"], tools=talk["tools"], tokenize=False)
    assert text.replace("⟦", "").replace("⟧", "") == "<bos>" + published


@pytest.mark.parametrize("name", sorted(set(WRITTEN) - {"hermes", "base"}))
def test_a_template_without_tools_names_one_that_has_them(name):
    advice = "hermes" if "<|im_end|>" in CONTROL.get(name, []) else "base"
    for talk in (CONVERSATIONS["tools"], {**CONVERSATIONS["single"], "tools": CONVERSATIONS["tools"]["tools"]}):
        with pytest.raises(
            UserError, match=rf"^rows\.jsonl:1: .*; task\.template: {advice} ships and writes tools; or"
        ):
            encoded(name, talk)


@pytest.mark.parametrize("name", ["chatml", "hermes", "llama3", "gemma"])
def test_an_end_of_turn_that_the_vocabulary_has_not_is_refused(name):
    with pytest.raises(
        UserError, match=rf"^task\.template: {name} ends a turn with .* take base, which ends it with '<eos>'"
    ):
        ChatTemplate(byte_tokenizer(), Chat(template=name))


def test_other_control_tokens_that_it_has_not_are_counted_out_loud():
    rows = [row(0, messages=TALK)]
    found = encode(rows, task=Chat(template="mistral"), tokenizer=byte_tokenizer(), max_length=512)
    assert "the template writes [INST] and [/INST], no tokens of this tokenizer, in ordinary ones: " in found.notes[-1]
    assert not any("no tokens of" in note for note in encoded("mistral", TALK)[0].notes)


def test_auto_is_the_tokenizers_own_else_the_one_for_bases():
    own, none = chat_tokenizer("qwen2_5"), byte_tokenizer()
    rows = [row(0, messages=TALK[1:3])]
    found = encode(rows, task=Chat(), tokenizer=own, max_length=512)
    assert encode([row(0, messages=PARTS[1:3])], task=Chat(), tokenizer=own, max_length=512).examples == found.examples
    assert own.decode(found.examples[0].input_ids) == own.apply_chat_template(TALK[1:3], tokenize=False)
    assert marked(encode(rows, task=Chat(), tokenizer=none, max_length=512), none) == (
        "<bos><|user|>\nWho wrote Faust?\n<|assistant|>\n⟦Goethe.<eos>⟧\n"
    )
    assert (resolve_template("auto", own), resolve_template("auto", none)) == ("auto", "base")
    assert describe_template("auto", own) == "chat template: the tokenizer's own"
    assert describe_template("auto", none).startswith("chat template: base, as the tokenizer has none: <|user|> and ")
    assert describe_template("plain", own) == "chat template: plain, in place of the tokenizer's own"
    assert describe_template("plain", none) == "chat template: plain"


def test_arguments_reach_the_template_and_travel_with_the_tokenizer():
    tokenizer, rows = chat_tokenizer("qwen3"), [row(0, messages=TALK[1:3])]
    task = Chat(template_arguments={"enable_thinking": False}, score="generate")
    (example,) = encode(rows, task=task, tokenizer=tokenizer, max_length=512).examples
    (asked,), _ = task.input_format.build_prompts([row(0, messages=TALK[1:2])], tokenizer)
    wanted = tokenizer.apply_chat_template(TALK[1:2], tokenize=False, add_generation_prompt=True, enable_thinking=False)
    assert wanted.endswith("assistant\n<think>\n\n</think>\n\n") and asked.text == wanted
    assert asked.ids == example.prompt and example.answer == "Goethe."
    saved = copy.deepcopy(tokenizer)
    task.input_format.prepare_tokenizer(saved)
    assert saved.apply_chat_template(TALK[1:2], tokenize=False, add_generation_prompt=True) == wanted
    both = saved.apply_chat_template(TALK[1:2], tokenize=False, add_generation_prompt=True, enable_thinking=True)
    assert both == tokenizer.apply_chat_template(TALK[1:2], tokenize=False, add_generation_prompt=True)
    assert task.input_format.matches_saved(saved, rows[0], example, 512)


def test_arguments_of_any_kind_that_json_has(tmp_path):
    text = "{% for m in messages %}{{ m.content }};{{ deep | tojson }}{{ eos_token }}{% endfor %}"
    (path := tmp_path / "deep.jinja").write_text("{% macro f() %}{{ deep.a[0] }}{% endmacro %}{{ f() }}" + text)
    value = {"a": ['it\'s "x"\n', 1.5, None, True, -2], "ü": {}}
    tokenizer = byte_tokenizer()
    written = ChatTemplate(tokenizer, Chat(template=str(path), template_arguments={"deep": value})).render(
        TALK[:1], None
    )
    assert written.startswith('it\'s "x"\n') and json.loads(written.partition(";")[2].removesuffix("<eos>")) == value


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"enable_thnking": True}, r"reads no 'enable_thnking'; did you mean 'enable_thinking'\?"),
        ({"sauce": True}, "reads no 'sauce'; leave it out"),
    ],
)
def test_arguments_that_the_template_does_not_read_are_refused(arguments, says):
    with pytest.raises(UserError, match=rf"^task\.template_arguments: the tokenizer's chat template {says}"):
        ChatTemplate(chat_tokenizer("qwen3"), Chat(template_arguments=arguments))


@pytest.mark.parametrize(
    "arguments", [{"messages": []}, {"bos_token": "x"}, {"a b": 1}, {"x": float("nan")}, {"x": {1}}]
)
def test_arguments_that_are_none_are_refused(arguments):
    with pytest.raises(ValueError, match=r"^template_arguments"):
        Chat(template_arguments=arguments)
