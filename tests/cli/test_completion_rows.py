"""The recipe `completion` knows prompts and answers by their columns, and says which; escapes that a shell hands on."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from flatshift.cli import run
from flatshift.experiments.data.splits import prepare
from flatshift.experiments.recipe import from_override, load_recipe
from flatshift.finetune.errors import UserError
from flatshift.finetune.models.backbone import open_backbone
from tests.data_models import write_jsonl


def first(path: Path, record: dict, *flags: tuple[str, str], recipe: str = "completion") -> tuple[str, str]:
    """The first training row in text, and what is said of the columns."""
    write_jsonl(path / "rows.jsonl", [{key: f"{value} {i}" for key, value in record.items()} for i in range(9)])
    laid = [("data.train.files", str(path / "rows.jsonl")), ("data.holdout", "0"), *flags]
    prepared = prepare(load_recipe(recipe, [from_override(*one) for one in laid]).recipe)
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
        ("completion", {"messages": "a"}, r"no column 'prompt', but 'messages': the recipe chat"),
        (
            "chat",
            {"question": "a", "answer": "b"},
            r"'question' and 'answer': the recipe completion \(task\.kind: compl",
        ),
        ("instruction", {"input": "a", "output": "b"}, r"'input' and 'output': the recipe completion"),
    ):
        with pytest.raises(UserError, match=words):
            first(tmp_path, record, recipe=recipe)


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
