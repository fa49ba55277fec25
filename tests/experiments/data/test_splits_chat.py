"""Conversations with what rows of other tasks have: columns, mixtures, streams, the token cache, long rows, prompts."""

from __future__ import annotations

import json

import pytest

from flatshift.experiments.data import encode as tokens
from flatshift.experiments.data.splits import prepare_data, read_splits
from flatshift.experiments.recipe import from_override, load_recipe
from flatshift.finetune.data.chat.encode import build_prompts, make_prompt_row
from flatshift.finetune.data.chat.template import read_template
from flatshift.finetune.data.columns import ColumnarExamples
from flatshift.finetune.data.encoding import encode
from flatshift.finetune.errors import UserError
from flatshift.finetune.tasks import Chat
from tests.support.chat_models import CONVERSATIONS, chat_tokenizer
from tests.support.data_models import byte_tokenizer, row, write_jsonl

MIXED = """
backbone: flatshift-5m
task: {kind: chat, template: plain, pack: false}
data:
  train: {sources: {sums: {files: [DIR/sums.jsonl], weight: 3}, talk: {files: [DIR/talk.jsonl]}}}
  dev: {files: [DIR/dev.jsonl]}
  cache: DIR/cache
train: {max_length: 64, steps: 4, batch_size: 4}
"""


def talk(answer: str) -> dict:
    return {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}]}


@pytest.fixture
def folder(tmp_path):
    for name, count in (("sums", 30), ("talk", 12), ("dev", 6)):
        write_jsonl(tmp_path / f"{name}.jsonl", [talk(f"{name} {i} " * (1 + i % 3)) for i in range(count)])
    return tmp_path


def recipe_of(folder, **overrides):
    path = folder / "recipe.yaml"
    path.write_text(MIXED.replace("DIR", str(folder)), encoding="utf-8")
    typed = [from_override(k, v if isinstance(v, str) else json.dumps(v)) for k, v in overrides.items()]
    return load_recipe(str(path), typed).recipe


def test_conversations_with_one_text_beside_them_are_held_out(folder):
    for name, count in (("sums", 30), ("talk", 12)):
        write_jsonl(folder / f"{name}.jsonl", [{**talk(f"{name} {i}"), "text": "topic"} for i in range(count)])
    splits = read_splits(recipe_of(folder, **{"data.dev.files": [], "data.holdout": 0.1}))
    assert (len(splits.train), len(splits.dev), len(splits.test)) == (34, 4, 4)


def test_columns_give_back_what_was_encoded():
    tokenizer = chat_tokenizer("qwen3")
    rows = [row(i, **CONVERSATIONS[name]) for i, name in enumerate(("single", "multi", "system"))]
    for score in ("generate", "perplexity"):
        found = encode(rows, task=Chat(score=score), tokenizer=tokenizer, max_length=512).examples
        assert ColumnarExamples.of(found) == found and len(found) > len(rows)
        assert (found[0].prompt is None) == (found[0].stop is None) == (score == "perplexity")


def test_a_mixture_streamed_or_cached_is_what_is_read_at_once(folder, monkeypatch):
    plain = prepare_data(recipe_of(folder, **{"data.cache": "null"}))
    assert (
        plain.mixture.sizes == (30, 12)
        and [e.id.split("/")[0] for e in plain.train[28:32]] == ["sums"] * 2 + ["talk"] * 2
    )
    counted = [note.split(": ")[:2] for note in plain.notes if "conversations" in note]
    assert [(split, said.split()[0]) for split, said in counted] == [
        ("train (sums)", "30"), ("train (talk)", "12"), ("dev", "6"),
    ]  # fmt: skip
    made, again = prepare_data(recipe_of(folder)), prepare_data(recipe_of(folder))
    assert "kept in" in made.notes[0] and "read from" in again.notes[0]
    monkeypatch.setattr(tokens, "IN_MEMORY", 0)
    monkeypatch.setattr(tokens, "_CHUNK", 7)
    for other in (made, again, prepare_data(recipe_of(folder, **{"data.cache": "null"}))):
        assert (other.train, other.dev, other.mixture) == (plain.train, plain.dev, plain.mixture)
        assert other.notes[-3:] == plain.notes[-3:]


def test_another_text_of_the_template_is_another_entry_of_the_cache(folder):
    mine = folder / "mine.jinja"
    mine.write_text(read_template("plain"), encoding="utf-8")
    first = prepare_data(recipe_of(folder, **{"task.template": str(mine)}))
    mine.write_text(read_template("plain").replace("User: ", "Q: "), encoding="utf-8")
    second = prepare_data(recipe_of(folder, **{"task.template": str(mine)}))
    assert "kept in" in second.notes[0] and first.train != second.train


def test_shares_are_of_all_rows_of_a_part_however_they_come(folder, monkeypatch):
    write_jsonl(folder / "talk.jsonl", [talk("word " * (1 if i else 60)) for i in range(12)])
    monkeypatch.setattr(tokens, "_CHUNK", 2)  # in the first chunk one row of two is cut
    assert len(prepare_data(recipe_of(folder)).train) == 42
    with pytest.raises(UserError, match=r"talk\.jsonl: 1 of 12 rows have an answer that is cut"):
        prepare_data(recipe_of(folder, **{"task.max_truncated": 0.05}))


def test_longer_samples_are_left_out_or_refused_where_that_is_asked_for(folder):
    write_jsonl(folder / "talk.jsonl", [talk("word " * (1 if i else 60)) for i in range(12)])
    dropped = prepare_data(recipe_of(folder, **{"train.overlong": "drop"}))
    assert dropped.dropped == 1 and dropped.mixture.sizes == (30, 11) and dropped.truncated == 0
    with pytest.raises(UserError, match=r"talk\.jsonl:1: this sample is longer than train.max_length = 64"):
        prepare_data(recipe_of(folder, **{"train.overlong": "refuse"}))
    with pytest.raises(UserError, match=r"train.truncation: a conversation .* loses its right end"):
        prepare_data(recipe_of(folder, **{"train.truncation": "left"}))
    assert prepare_data(recipe_of(folder, **{"train.truncation": "right"})).truncated == 1


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "phi3", "deepseek_r1_distill", "gptoss", "gemma4", None])
def test_prompts_are_those_that_a_trained_answer_follows(name):
    tokenizer = byte_tokenizer() if name is None else chat_tokenizer(name)
    task = Chat(score="generate", date="2026-11-21", template="auto" if name else "plain", empty_thoughts=True)
    rows = [row(i, **CONVERSATIONS[one]) for i, one in enumerate(("single", "multi"))]
    trained = [
        e for e in encode(rows, task=task, tokenizer=tokenizer, max_length=4096).examples if e.answer is not None
    ]
    without = [row(i, messages=r.values["messages"][:-1]) for i, r in enumerate(rows)]
    for some in (rows, without):
        asked, skipped = build_prompts(some, task=task, tokenizer=tokenizer)
        assert [(one.ids, one.stop) for one in asked] == [(e.prompt, e.stop) for e in trained] and not skipped


def test_a_question_is_a_turn_of_the_user_behind_the_system_turn_of_the_task():
    (one,), _ = build_prompts(
        [make_prompt_row("Why?", 1)], task=Chat(template="plain", system="Be brief."), tokenizer=byte_tokenizer()
    )
    assert one.text == "<bos>Be brief.\n\nUser: Why?\nAssistant:" and one.id == "prompt-1"
    bad = row(0, messages=[{"role": "system", "content": "x"}])
    with pytest.raises(UserError, match=r"rows\.jsonl:1: the conversation has no turn that the assistant"):
        build_prompts([bad], task=Chat(template="plain"), tokenizer=byte_tokenizer())
    asked, skipped = build_prompts([bad], task=Chat(template="plain"), tokenizer=byte_tokenizer(), bad_rows="skip")
    assert not asked and len(skipped) == 1
