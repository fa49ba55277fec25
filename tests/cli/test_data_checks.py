"""`data.checks` through the command: what is found in the rows is said, refused, or not looked for."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flatshift.cli import run
from flatshift.finetune.data.config import DataChecks
from tests.support.data_models import tiny_model, write_jsonl

SMALL = [
    "--train.steps", "1", "--train.eval_every", "1", "--train.batch_size", "2", "--train.accumulate", "1",
    "--train.precision", "fp32", "--train.threads", "1", "--train.device", "cpu", "--train.peak_tflops", "1",
    "--train.max_length", "64", "--train.max_cut", "1", "--eval.bootstrap", "20", "--eval.train_limit", "0",
    "--regularizer.kind", "plain", "--data.dev.files", "[]",
]  # fmt: skip
KINDS = [field.name for field in fields(DataChecks) if field.name != "most"]
LONG = "The pump beside the old mill stopped after the storm and was repaired by the smith of the town"


def _classified() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    train = [{"text": f"The pump stopped on day {i}.", "label": "fault"} for i in range(20)]
    train += [{"text": f"A new pump came on day {i}.", "label": "order"} for i in range(20)]
    train[0]["label"], train[1]["label"] = "Fault ", "caf\u00e9"
    train[2]["label"] = "cafe\u0301"
    train[3]["source"], train[4]["source"] = "a book", ""
    train += [{"text": f"{LONG}, number 3.", "label": "fault"}, {"text": "It ends with <eos> here.", "label": "order"}]
    test = [{"text": f"Nobody knows of the {what}.", "label": "order"} for what in "abcdefghijklmnop"]
    test[0] = {"text": "A  new pump\tcame on day\u00a05.", "label": "fault"}  # the training row, blanks aside
    test[1] = {"text": f"{LONG}, number 4.", "label": "fault"}
    return train, test


def _preferred() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    train = [{"prompt": f"Who built mill {i}?", "chosen": f" The smith {i}.", "rejected": " Nobody."} for i in range(8)]
    train[3] |= {"chosen": " The  same.", "rejected": " The same.", "note": 7}
    train[4]["rejected"] = "Who built mill 4? Ask <eos> again."
    return train, [{"prompt": "Who built mill 2?", "chosen": " The smith 2.", "rejected": " Nobody."}]


def _talked() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    train = [
        {
            "messages": [
                {"role": "user", "content": f"How high is dam {i}?"},
                {"role": "assistant", "content": f"{i} m."},
            ]
        }
        for i in range(8)
    ]
    train[2]["messages"][1]["reasoning_content"] = "look it up"
    train[2]["mood"] = "calm"
    train[5]["messages"][1]["content"] = "A turn ends with <eos> here."
    train[6]["messages"][0]["content"] = "And with <pad>?"
    train[7]["messages"][1]["content"] = "How high is dam 7? Seven metres."
    return train, [train[0]]


def _completed() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    train = [{"text": "the pump", "label": "is old"}, {"text": "the pump is", "label": "the pump is new"}]
    return [*train, {"text": "the mill", "label": "is zzz"}], [{"text": "old mill", "label": "is the pump"}]


CASES: dict[str, tuple[Any, list[str], dict[str, str]]] = {
    "classify": (
        _classified,
        ["--task.labels", json.dumps(["fault", "Fault ", "order", "café", "cafe\u0301", "tea", "a, b"])],
        {
            "copies": "1 of 16 test rows are training rows: TEST:1 and TRAIN:26",
            "near": "1 of 16 test rows are nearly training rows: TEST:2 and TRAIN:41: similarity about 0.9",
            "conflicts": "1 of 57 texts stand under several classes: TRAIN:26 and TEST:1: 'order' and 'fault'",
            "class_names": "4 of 7 classes differ from another only in case, white space or Unicode form: "
            "'fault' and 'Fault '",
            "empty_classes": "2 of 7 classes have no training row: 'tea'",
            "control_tokens": "1 of 58 rows have special tokens written out in their text: TRAIN:42: '<eos>'",
            "unread": "not read: column 'source' (1 rows): TRAIN:4",
        },
    ),
    "preference": (
        _preferred,
        [],
        {
            "copies": "1 of 1 test rows are training rows: TEST:1 and TRAIN:3",
            "same_answers": "1 of 9 rows have two answers that say the same: TRAIN:4",
            "repeated_prompts": "1 of 9 rows have an answer that begins with its prompt, which stands twice: TRAIN:5",
            "control_tokens": "1 of 9 rows have special tokens written out in their text, 1 of them in what is "
            "supervised: TRAIN:5: '<eos>'",
            "unread": "not read: column 'note' (1 rows): TRAIN:4",
        },
    ),
    "chat": (
        _talked,
        [],
        {
            "copies": "1 of 1 test rows are training rows: TEST:1 and TRAIN:1",
            "repeated_prompts": "1 of 9 rows have an answer that begins with its prompt, which stands twice: TRAIN:8",
            "control_tokens": "2 of 9 rows have special tokens written out in their text, 1 of them in what is "
            "supervised: TRAIN:6: '<eos>'",
            "unread": "not read: column 'mood' (1 rows), key 'reasoning_content' of turns (1 rows): TRAIN:3: "
            "column 'mood'",
        },
    ),
    "completion": (
        _completed,
        ["--task.prompt", "{text}", "--task.completion", " {label}"],
        {
            "repeated_prompts": "1 of 4 rows have an answer that begins with its prompt, which stands twice: TRAIN:2",
            "unknown_tokens": "1 of 4 rows have unknown tokens in what is supervised: TRAIN:3",
        },
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows of each case, and a tiny decoder with an unknown token."""
    path = tmp_path_factory.mktemp("rows")
    for name, (rows, _, _) in CASES.items():
        train, test = rows()
        write_jsonl(path / f"{name}-train.jsonl", train)
        write_jsonl(path / f"{name}-test.jsonl", test)
    words = ["[UNK]", "<pad>", "<eos>", "the", "pump", "mill", "is", "old", "new"]
    words_only = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    words_only.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = {"unk_token": "[UNK]", "pad_token": "<pad>", "eos_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=words_only, **tokens).save_pretrained(path / "words")
    tiny_model("llama", 16).save_pretrained(path / "words")
    return path


def _train(folder: Path, name: str, out: Path, **checks: Any) -> int:
    more = [word for kind, value in checks.items() for word in (f"--data.checks.{kind}", str(value))]
    files = [f"--data.{split}.files" for split in ("train", "test")]
    given = [files[0], str(folder / f"{name}-train.jsonl"), files[1], str(folder / f"{name}-test.jsonl")]
    backbone = ["--backbone", str(folder / "words")] if name == "completion" else []
    return run(["train", name, "--out", str(out), *given, *backbone, *CASES[name][1], *SMALL, *more])


def _said(name: str, folder: Path) -> dict[str, str]:
    places = {"TRAIN": str(folder / f"{name}-train.jsonl"), "TEST": str(folder / f"{name}-test.jsonl")}
    found = dict(CASES[name][2])
    for word, place in places.items():
        found = {kind: text.replace(word, place) for kind, text in found.items()}
    return found


def test_every_kind_has_a_case() -> None:
    assert set(KINDS) == {kind for _, _, said in CASES.values() for kind in said}


@pytest.mark.parametrize("name", CASES)
def test_what_is_found_stands_on_the_console_in_the_manifest_and_on_the_page(name, folder, tmp_path, capsys) -> None:
    out = tmp_path / "run"
    assert _train(folder, name, out, **dict.fromkeys(KINDS, "warn")) == 0
    console, page = capsys.readouterr().err, (out / "report.html").read_text()
    checks = json.loads((out / "manifest.json").read_text())["checks"]
    assert [one["kind"] for one in checks["findings"]] == [kind for kind in KINDS if kind in CASES[name][2]]
    for kind, text in _said(name, folder).items():
        (line,) = [line for line in console.splitlines() if line.endswith(f"(data.checks.{kind})")]
        assert line.startswith(f"data: {text}")
        (one,) = [one for one in checks["findings"] if one["kind"] == kind]
        assert line.startswith(f"data: {one['text']}: {one['examples'][0]}")
        assert one["text"].partition("'")[0] in page
    if name == "classify":
        assert "data: 7 classes, with their training rows: 'fault' 18, 'Fault ' 1, 'order' 21, " in console
        assert checks["classes"]["tea"] == 0
        assert "'cafe\\u0301'" not in console and "  'caf\\xe9' and 'cafe\\u0301'" in (out / "log.txt").read_text()


@pytest.mark.parametrize("name", CASES)
def test_a_kind_is_refused_alone_and_not_looked_for_where_it_is_off(name, folder, tmp_path, capsys) -> None:
    said = _said(name, folder)
    for kind, text in said.items():
        assert _train(folder, name, tmp_path / "run", **{**dict.fromkeys(KINDS, "off"), kind: "refuse", "most": 0}) == 2
        refused = capsys.readouterr().err
        assert text in refused and refused.strip().endswith(f"or set data.checks.{kind}: warn")
        others = {**dict.fromkeys(KINDS, "refuse"), kind: "off", "most": 0}
        assert _train(folder, name, tmp_path / "run", **others) == 2
        first, *more = [other for other in said if other != kind]
        refused = capsys.readouterr().err
        assert f"set data.checks.{first}: warn" in refused and said[first].partition(":")[0] in refused
        assert (
            f"(and {len(more)} more kinds: {more[0]}, …)" if len(more) > 1 else f"(and {more[0]})" if more else ""
        ) in refused
        assert not (tmp_path / "run").exists()


def test_copies_are_refused_unasked_above_a_tenth(folder, tmp_path, capsys) -> None:
    assert _train(folder, "chat", tmp_path / "run") == 2
    refused = capsys.readouterr().err
    assert "data.checks.most is 0.1; mend the rows, or set data.checks.copies: warn" in refused
    assert _train(folder, "classify", tmp_path / "run", conflicts="refuse") == 0
    assert "1 of 16 test rows are training rows" in capsys.readouterr().err


TALK = [{"from": "human", "value": "How high is it?"}, {"from": "gpt", "value": "Forty metres."}]
THOUGHT = [{"role": "user", "content": "How high?"}, {"role": "assistant", "content": "A.", "reasoning_content": "b"}]
FORMS = {
    "ShareGPT": ("chat", {"conversations": TALK, "system": "Be brief."}, []),
    "Alpaca": ("chat", {"instruction": "a", "input": "b", "output": "c", "history": [["d", "e"]]}, []),
    "messages": ("chat", {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, []),
    "thoughts": ("chat", {"messages": THOUGHT}, ["--task.template", "TEMPLATE"]),
    "own names": ("classify", {"body": "a", "id": "7", "label": "x"}, ["--data.columns.text", "body"]),
    "questions": ("completion", {"question": "a", "answer": "b"}, []),
    "instructions": ("completion", {"instruction": "a", "context": "b", "response": "c"}, []),
    "Orca": ("preference", {"question": "a", "system": "b", "chosen": "c", "rejected": "d"}, ["--task.chat", "true"]),
    "single answers": ("preference", {"prompt": "a", "completion": "b", "label": True}, ["--task.loss", "kto"]),
}


@pytest.mark.parametrize("form", FORMS)
def test_only_what_no_form_reads_is_called_unread(form, tmp_path, capsys) -> None:
    recipe, row, more = FORMS[form]
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role + ': ' + (m.reasoning_content or '') + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    rows = [row | {"id": f"row {i}", "level": 3, "empty": None} for i in range(4)]
    if recipe == "classify":
        rows[0]["label"] = "y"
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    if "--task.chat" in more:
        more = ["--task.prompt", "{prompt}", "--task.answer", "{answer}", "--task.template", "plain", *more]
    command = [
        "train",
        recipe,
        "--out",
        str(tmp_path / "run"),
        "--data.train.files",
        str(file),
        "--data.test.files",
        "[]",
    ]
    command += [word.replace("TEMPLATE", str(template)) for word in more]
    assert run([*command, *SMALL, "--data.checks.unread", "refuse"]) == 2
    assert f"not read: column 'level' (4 rows): {file}:1; mend" in capsys.readouterr().err


def test_what_the_cells_of_a_sweep_find_is_said_once_and_what_is_refused_fails_them(folder, tmp_path, capsys) -> None:
    files = ["--data.train.files", str(folder / "classify-train.jsonl"), "--data.test.files"]
    cells = ["--grid", "adapter.rank=1,2", "--seeds", "2", "--jobs", "1"]
    given = [*files, str(folder / "classify-test.jsonl"), *CASES["classify"][1], *SMALL, *cells]
    assert run(["sweep", "classify", "--out", str(tmp_path / "some"), *given]) == 0
    console = capsys.readouterr().err
    for kind in ("copies", "conflicts", "class_names", "empty_classes", "unread"):
        assert console.count(f"data: {_said('classify', folder)[kind]}") == 1
    assert "data: 7 classes, with" in next((tmp_path / "some" / "cells").glob("*/log.txt")).read_text()
    assert run(["sweep", "classify", "--out", str(tmp_path / "none"), *given, "--data.checks.unread", "refuse"]) == 1
    assert "4 cells diverged or failed" in (said := capsys.readouterr().err) and "set data.checks.unread: warn" in said


def test_streamed_cached_and_resumed_rows_have_the_same_findings(folder, tmp_path, monkeypatch, capsys) -> None:
    from flatshift.experiments.data import encode, splits

    def lines() -> list[str]:
        return [line for line in capsys.readouterr().err.splitlines() if line.startswith("data: ")]

    more = ["--data.cache", str(tmp_path / "cache")]
    known = _train(folder, "classify", tmp_path / "memory", near="warn"), lines()
    monkeypatch.setattr(encode, "IN_MEMORY", 0)
    monkeypatch.setitem(CASES, "classify", (CASES["classify"][0], [*CASES["classify"][1], *more], {}))
    assert known == (_train(folder, "classify", tmp_path / "streamed", near="warn"), lines())
    monkeypatch.setattr(splits, "encode_rows", None)
    assert known == (_train(folder, "classify", tmp_path / "cached", near="warn"), lines())
    assert _train(folder, "classify", tmp_path / "run", near="warn", most=0, copies="refuse") == 2
    assert run(["train", "--resume", str(tmp_path / "cached"), "--train.steps", "2"]) == 0
    assert lines() == known[1]


def test_noise_is_no_conflict(tmp_path, capsys) -> None:
    twice = [{"text": f"Pump {i // 2}.", "label": "ab"[i % 4 // 2]} for i in range(40)]
    file = write_jsonl(tmp_path / "twice.jsonl", twice)
    command = ["train", "classify", "--data.train.files", str(file), "--data.test.files", "[]", *SMALL]
    assert run([*command, "--out", str(tmp_path / "run"), "--data.label_noise", "0.3"]) == 0
    assert "several classes" not in capsys.readouterr().err


TEXTS = ["--task.prompt", "{text}", "--task.completion", " {label}"]
EMPTY = {
    "classify": ({"text": " \n\t", "label": "order"}, [], "the text is empty"),
    "regress": ({"text": "", "label": 1.5}, ["--task.kind", "regress"], "the text is empty"),
    "language-model": ({"text": "\u3000"}, [], "the text is empty"),
    "masked-lm": ({"text": " "}, ["--task.kind", "masked-lm", "--backbone", "flatshift-encoder-3m"], "the text is"),
    "completion": ({"text": " ", "label": "a"}, TEXTS, "the prompt is empty"),
    "completed": ({"text": "a", "label": " "}, TEXTS, "the completion is empty"),
    "seq2seq": ({"text": "a", "label": " "}, [], "the target is empty"),
    "preference": ({"prompt": " ", "chosen": "a", "rejected": "b"}, [], "the prompt is empty"),
    "preferred": ({"prompt": "a", "chosen": " \n", "rejected": "b"}, [], "an answer is empty"),
    "chat": ({"messages": [{"role": "user", "content": " "}, {"role": "assistant", "content": "a"}]},
             [], "turn 1 of the user is empty"),
}  # fmt: skip
RECIPES = {"regress": "classify", "masked-lm": "language-model", "completed": "completion", "preferred": "preference"}


@pytest.mark.parametrize("name", EMPTY)
def test_a_row_without_a_text_is_a_bad_one(name, tmp_path, capsys) -> None:
    row, more, words = EMPTY[name]
    file = write_jsonl(tmp_path / "rows.jsonl", [row] * 2)
    given = ["--data.train.files", str(file), "--data.test.files", str(file), *more, *SMALL]
    command = ["train", RECIPES.get(name, name), "--out", str(tmp_path / "run"), *given]
    if name == "classify":
        command += ["--task.labels", "[order, fault]"]
    assert run(command) == 2
    assert f"{file}:1: {words}" in capsys.readouterr().err
    assert run([*command, "--data.bad_rows", "skip"]) == 2
    assert "2 were skipped" in (said := capsys.readouterr().err) or "all were left out" in said


def test_classes_without_a_row_of_a_split_are_named(tmp_path: Path, capsys) -> None:
    rows = [{"text": f"A pump came on day {i}.", "label": ("fault", "order")[i % 2]} for i in range(12)]
    train = write_jsonl(tmp_path / "train.jsonl", [*rows, {"text": "It rained.", "label": "other"}])
    test = write_jsonl(tmp_path / "test.jsonl", rows[:1])
    files = ["--data.train.files", str(train), "--data.test.files", str(test), "--data.checks.copies", "warn"]
    words = ["train", "classify", "--backbone", "flatshift-encoder-3m", *SMALL, *files]
    assert run([*words, "--data.test.limit", "null", "--data.train.limit", "null", "--out", str(tmp_path / "a")]) == 0
    said = capsys.readouterr().err
    assert "test: no row of 2 of 3 classes, which are not measured (first 'order')" in said
    assert "train: no row of" not in said
    words += ["--task.labels", "[fault, none, order, other]", "--data.train.limit", "null"]
    assert run([*words, "--out", str(tmp_path / "b")]) == 0
    said = capsys.readouterr().err
    assert "train: no row of 1 of 4 classes, which cannot be learned (first 'none')" in said
    assert "test: no row of 3 of 4 classes" in said


def test_held_out_rows_of_a_source_are_read_by_its_columns(tmp_path: Path, capsys) -> None:
    rows = [{"text": f"A pump came on day {i}.", "label": ("fault", "order")[i % 2]} for i in range(20)]
    others = [{"body": f"Day {i} saw a new pump.", "kind": row["label"]} for i, row in enumerate(rows)]
    sources = {"a": {"files": [str(write_jsonl(tmp_path / "a.jsonl", rows))]}}
    columns = {"text": "body", "label": "kind"}
    sources["b"] = {"files": [str(write_jsonl(tmp_path / "b.jsonl", others))], "columns": columns}
    words = ["train", "classify", "--backbone", "flatshift-encoder-3m", *SMALL, "--data.train.limit", "null"]
    words += ["--data.train.sources", json.dumps(sources), "--data.test.files", "[]", "--data.test.limit", "null"]
    words += ["--data.dev.limit", "null", "--data.holdout", "0.2", "--data.checks.unread", "refuse"]
    assert run([*words, "--out", str(tmp_path / "run")]) == 0, capsys.readouterr().err
