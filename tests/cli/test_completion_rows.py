"""The recipe `completion` knows prompts and answers by their columns, and says which; escapes that a shell hands on."""

from __future__ import annotations

import csv
import json
import shlex
from pathlib import Path

import pytest

from flatshift.cli import run
from flatshift.experiments.data.splits import prepare_data
from flatshift.experiments.recipe import from_override, load_recipe
from flatshift.finetune.errors import UserError
from flatshift.finetune.models.backbone import open_backbone
from tests.support.data_models import write_jsonl


def first(path: Path, record: dict, *flags: tuple[str, str], recipe: str = "completion") -> tuple[str, str]:
    """The first training row in text, and what is said of the columns."""
    write_jsonl(path / "rows.jsonl", [{key: f"{value} {i}" for key, value in record.items()} for i in range(9)])
    laid = [("data.train.files", str(path / "rows.jsonl")), ("data.holdout", "0"), *flags]
    prepared = prepare_data(load_recipe(recipe, [from_override(*one) for one in laid]).recipe)
    text = open_backbone("flatshift-5m").tokenizer.decode(prepared.train[0].input_ids)
    assert not any(one.kind == "unread" for one in prepared.checks) or "x" in record.values(), "these columns are read"
    return text, next((note for note in prepared.notes if "columns" in note), "")


@pytest.mark.parametrize(
    ("record", "text", "said"),
    [
        ({"prompt": "why", "completion": "so"}, "why 0\nso 0", ""),
        ({"question": "why", "answer": "so"}, "why 0\nso 0", "question and answer"),
        ({"input": "why", "output": "so"}, "why 0\nso 0", "input and output"),
        ({"instruction": "say", "input": "why", "output": "so"}, "say 0\n\nwhy 0\nso 0", "instruction and output"),
        (
            {"instruction": "say", "context": "why", "response": "so"},
            "say 0\n\nwhy 0\nso 0",
            "instruction and response",
        ),
        ({"text": "why", "label": "so"}, "why 0\nso 0", "text and label"),
        ({"question": "why", "answer": "so", "text": "x", "label": "y"}, "why 0\nso 0", "question and answer"),
    ],
)
def test_columns_that_stand_for_a_prompt_and_its_answer(tmp_path: Path, record: dict, text: str, said: str) -> None:
    found, note = first(tmp_path, record)
    assert found == f"<bos>{text}<eos>"
    assert note == (f"train: prompt and completion are the columns {said}" if said else "")


def test_what_cannot_be_told_is_one_sentence(tmp_path: Path) -> None:
    for recipe, record, words in (
        (
            "completion",
            {"question": "a", "answer": "b", "input": "c", "output": "d"},
            r"'question' and 'input' may each",
        ),
        ("completion", {"messages": "a"}, r"no column 'prompt', but 'messages': the recipe chat .*train chat --data"),
        (
            "chat",
            {"question": "a", "answer": "b", "input": "c", "output": "d"},
            r"be the conversation; rename one",
        ),
        ("completion", {"q": "a", "a": "b"}, r"name yours: --task.prompt '{q}\\n' --task.completion '{a}'"),
        (
            "completion",
            {"type": "t", "query": "q", "original_question": "o"},
            r"name yours: --task.prompt '{QUESTION}\\n' --task.completion '{ANSWER}'",
        ),
    ):
        with pytest.raises(UserError, match=words):
            first(tmp_path, record, recipe=recipe)


@pytest.mark.parametrize(
    ("record", "asked"),
    [
        ({"question": "why", "answer": "so", "id": "n"}, "why 0"),
        ({"input": "why", "output": "so"}, "why 0"),
        ({"instruction": "say", "context": "why", "response": "so"}, "say 0\n\nwhy 0"),
        ({"prompt": "why", "completion": "so"}, "why 0"),
    ],
    ids=lambda one: "" if isinstance(one, str) else " ".join(one),
)
def test_a_chat_reads_pairs_as_two_turns(tmp_path: Path, record: dict, asked: str) -> None:
    text, note = first(tmp_path, record, recipe="chat")
    turns = {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": "so 0"}]}
    write_jsonl(tmp_path / "turns.jsonl", [turns])
    laid = [("data.train.files", str(tmp_path / "turns.jsonl")), ("data.holdout", "0")]
    prepared = prepare_data(load_recipe("chat", [from_override(*one) for one in laid]).recipe)
    assert text == open_backbone("flatshift-5m").tokenizer.decode(prepared.train[0].input_ids)
    assert note.startswith("train: turns read from ") and all(name in note for name in record if name != "id")


def test_the_command_that_an_error_prints_runs(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "my rows.jsonl", [{"q": f"what is {i}?", "a": f"it is {i}"} for i in range(24)])
    assert run(["train", "chat", "--data", "my rows.jsonl", "--out", "chat"]) == 2
    told = capsys.readouterr().err.partition("`flatshift ")[2].partition("`")[0]
    assert told.startswith("train completion --data ") and "--task.prompt '{q}\\n' --task.completion '{a}'" in told
    small = ["--train.steps", "1", "--train.max_length", "32", "--train.precision", "fp32", "--train.peak_tflops", "1"]
    assert run([*shlex.split(told), "--out", "run", "--eval.bootstrap", "10", *small]) == 0
    write_jsonl(tmp_path / "asked.jsonl", [{"question": f"what is {i}?", "answer": f"{i}"} for i in range(24)])
    assert run(["train", "chat", "--data", "asked.jsonl", "--out", "chat", "--eval.bootstrap", "10", *small]) == 0
    write_jsonl(tmp_path / "open.jsonl", [{"question": "what is 3?"}])
    assert run(["predict", "chat", "--data", "open.jsonl", "--out", "said.jsonl", "--max-new-tokens", "2"]) == 0
    assert "what is 3?" in json.loads((tmp_path / "said.jsonl").read_text(encoding="utf-8"))["prompt"]


def test_a_typed_escape_is_a_line_break(tmp_path: Path) -> None:
    typed = ("task.prompt", r"{question}\nIn short:\t"), ("task.completion", r"{answer} \\n")
    assert first(tmp_path, {"question": "why", "answer": "so"}, *typed)[0] == "<bos>why 0\nIn short:\tso 0 \\n<eos>"
    (tmp_path / "own.yaml").write_text('extends: completion\ntask: {prompt: "{question}\\\\n"}\n', encoding="utf-8")
    assert load_recipe(str(tmp_path / "own.yaml")).recipe.task.prompt == r"{question}\n", "YAML has escapes of its own"


def test_a_table_of_questions_is_trained_on_and_answered(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    with Path("faq.csv").open("w", encoding="utf-8", newline="") as handle:
        csv.writer(handle).writerows([("question", "answer"), *((f"what is {i}?", f"it is {i}") for i in range(24))])
    small = [
        "--train.epochs",
        "0.5",
        "--train.max_length",
        "32",
        "--train.precision",
        "fp32",
        "--train.peak_tflops",
        "1",
    ]
    assert run(["train", "completion", "--data", "faq.csv", "--out", "faq", "--eval.bootstrap", "10", *small]) == 0
    assert "prompt and completion are the columns question and answer" in capsys.readouterr().err
    write_jsonl(tmp_path / "new.jsonl", [{"question": "what is 30?"}])
    assert run(["predict", "faq", "--data", "new.jsonl", "--out", "answers.jsonl"]) == 0
    (line,) = (tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    assert "answer" in json.loads(line)
