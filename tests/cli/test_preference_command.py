"""`flatshift train preference` to the row: curves, figures, the page, and what predict says of each pair."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from flatshift import Run
from flatshift.cli import run
from flatshift.finetune.errors import UserError
from flatshift.finetune.run_directory import read_metrics

SMALL = [
    "--data.train.limit", "12", "--data.dev.limit", "6", "--data.test.limit", "8", "--train.steps", "4",
    "--train.eval_every", "2", "--train.batch_size", "2", "--train.accumulate", "2", "--train.max_length", "48",
    "--train.precision", "fp32", "--train.threads", "1", "--train.device", "cpu", "--eval.bootstrap", "20",
    "--eval.train_limit", "0", "--eval.cold", "4",
]  # fmt: skip
FIGURES = {"loss", "preference_accuracy", "reward_margin", "chosen_reward", "rejected_reward", "reference_distance"}


def test_conversations_of_a_base_model_are_written_as_a_chat_run_writes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, call = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
    rows, out = tmp_path / "pairs.jsonl", tmp_path / "run"
    pair = {"system": "Be brief.", "prompt": [asked], "chosen": [call], "rejected": [{**call, "content": "No."}]}
    rows.write_text((json.dumps(pair) + "\n") * 4)
    own = [
        "--data.train.files",
        str(rows),
        "--data.dev.files",
        "[]",
        "--data.test.files",
        "[]",
        "--train.eval_every",
        "0",
    ]
    chat = ["--task.chat", "true", "--task.answer", "{answer}", "--data.train.limit", "4", "--data.dev.limit", "null"]
    words = ["train", "preference", *SMALL, *own, *chat, "--data.test.limit", "null"]
    assert run([*words, "--out", str(out)]) == 0
    assert "chat template: base, as the tokenizer has none" in (out / "log.txt").read_text()
    assert "template: base  # auto: the tokenizer has none" in (out / "recipe.resolved.yaml").read_text()
    assert "<|system|>\n" in (log := (out / "log.txt").read_text()) and "Be brief." in log
    capsys.readouterr()
    assert run(["generate", str(out), "--prompt", "Hi", "--max-new-tokens", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["prompt"] == "<bos><|user|>\nHi\n<|assistant|>\n"
    for given, says in (
        (["--task.template_arguments", "{tone: 1}"], "task.template_arguments: task.template reads no 'tone'"),
        (["--task.chat", "false", "--task.template", "plain"], "template is of conversations; set chat: true"),
    ):
        assert run([*words, *given, "--out", str(tmp_path / "other")]) == 2
        assert says in capsys.readouterr().err


def test_a_run_prefers_and_says_so_of_every_row(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run(["train", "preference", "--out", str(out), *SMALL, "--train.best", "preference_accuracy"]) == 0
    said = (out / "log.txt").read_text()
    assert "12 pairs of answers, known by the columns chosen and rejected" in said and "supervised in 2 pairs" in said

    lines = list(read_metrics(out / "metrics.jsonl"))
    train = [line for line in lines if line["split"] == "train"]
    dev = [line for line in lines if line["split"] == "dev"]
    assert train[0]["loss"] == pytest.approx(math.log(2), abs=1e-5) and train[-1]["tokens"] == 16
    assert [line["step"] for line in dev] == [2, 4] and all(line.keys() >= FIGURES for line in dev)

    judged = json.loads((out / "eval.json").read_text())["test"]
    assert judged.keys() == FIGURES and judged["reward_margin"]["n"] == 8
    cold = json.loads((out / "cold.json").read_text())["test"]
    assert cold["loss"]["value"] == pytest.approx(math.log(2)) and cold["preference_accuracy"]["value"] == 0.5
    assert cold["reference_distance"]["value"] == 0.0 < judged["reference_distance"]["value"]
    page = (out / "report.html").read_text()
    assert "Rewards of dev answers" in page and "Preference accuracy on dev" in page
    assert "Distance of dev answers" in page

    given, rows = tmp_path / "given.jsonl", tmp_path / "rows.jsonl"
    given.write_text("".join(json.dumps({"question": "It rains.", "chosen": " Wet.", "rejected": f" {i}"}) + "\n"
                             for i in range(5)))  # fmt: skip
    assert run(["predict", str(out), "--data", str(given), "--out", str(rows)]) == 0
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert len(found) == 5 and {"prompt", "chosen", "rejected", "chosen_reward", "rejected_reward"} <= found[0].keys()
    for row in found:
        assert row["reward_margin"] == pytest.approx(row["chosen_reward"] - row["rejected_reward"], abs=1e-9)
        assert row["preferred"] == ("chosen" if row["reward_margin"] > 0 else "rejected")
    (same,) = Run(out).predict([{"question": "It rains.", "chosen": " Wet.", "rejected": " 0"}])
    # Alone and in a batch: a margin is beta = .1 times four float32 log-probabilities of some 20 nats, each to 1e-5.
    assert same["reward_margin"] == pytest.approx(found[0]["reward_margin"], abs=0.1 * 4 * 20 * 1e-6)
    with pytest.raises(UserError, match="row 1: no column 'chosen'"):
        Run(out).predict([{"prompt": "It rains.", "rejected": " 0"}])


SINGLES = [{"prompt": f"Is it {i}?", "completion": f" It is {i}.", "label": bool(i % 2)} for i in range(16)]
LABELLED = [
    {
        "messages": [{"role": "user", "content": f"Is it {i}?"}, {"role": "assistant", "content": f"It is {i}."}],
        "label": bool(i % 2),
    }
    for i in range(16)
]
SHAREGPT = [
    {
        "conversations": [{"from": "human", "value": f"Is it {i}?"}, {"from": "gpt", "value": f"It is {i}."}],
        "label": bool(i % 2),
    }
    for i in range(16)
]
PAIRS = [{"prompt": f"Is it {i}?", "chosen": f" It is {i}.", "rejected": " No."} for i in range(16)]


@pytest.mark.parametrize(
    ("rows", "told", "columns"),
    [
        pytest.param(None, "pairs of answers", {"chosen_reward", "preferred"}, marks=pytest.mark.slow),
        pytest.param(PAIRS, "pairs of answers", {"chosen_reward", "preferred"}, marks=pytest.mark.slow),
        pytest.param(SINGLES, "single answers", {"reward"}, marks=pytest.mark.slow),
        ([row | {"label": str(row["label"]).lower()} for row in SINGLES], "single answers", {"reward"}),
        (LABELLED, "the last turn of each conversation is its answer", {"reward"}),
        pytest.param(SHAREGPT, "the last turn of each conversation", {"reward"}, marks=pytest.mark.slow),
    ],
)
def test_kto_learns_from_pairs_and_from_single_answers(
    tmp_path: Path, rows: list[dict[str, object]] | None, told: str, columns: set[str]
) -> None:
    """The sample; rows of the user's; labels that are words, as in a CSV file; conversations with a label."""
    given, own = tmp_path / "given.jsonl", list[str]()
    if rows is not None:
        given.write_text("".join(json.dumps(row) + "\n" for row in rows))
        own = ["--data.train.files", str(given), "--data.train.limit", "null", "--data.holdout", "0.25"]
        own += [word for split in ("dev", "test") for word in (f"--data.{split}.files", "[]")]
        own += ["--data.dev.limit", "null", "--data.test.limit", "null"]
        own += [] if "prompt" in rows[0] else ["--task.chat", "true", "--task.answer", "{answer}"]
    else:
        given.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    run_directory, said = tmp_path / "run", tmp_path / "said.jsonl"
    words = ["train", "preference", "--task.loss", "kto", "--out", str(run_directory), *SMALL, *own]
    assert run([*words, "--eval.cold", "0", "--train.steps", "2"]) == 0
    assert told in (run_directory / "log.txt").read_text()
    assert json.loads((run_directory / "eval.json").read_text())["test"]["loss"]["value"] > 0
    assert run(["predict", str(run_directory), "--data", str(given), "--out", str(said)]) == 0
    found = [json.loads(line) for line in said.read_text().splitlines()]
    assert len(found) == 16 and all(row.keys() >= columns for row in found)
    assert run(["eval", str(run_directory), "--data", str(given), "--json"]) == 0


def test_what_cannot_be_is_one_sentence(tmp_path: Path, capsys) -> None:
    def refused(*words: str) -> str:
        assert run(["train", "preference", "--out", str(tmp_path / "no"), *words]) == 2
        told = capsys.readouterr().err.strip().splitlines()[-1]
        assert len(told) <= 320 and not (tmp_path / "no").exists()
        return told

    assert "task.pack" in refused("--task.pack", "true")
    assert "mesh.pp > 1 does not go with task.kind: preference" in refused("--mesh.pp", "2")
    assert "the reference is the backbone as it came" in refused("--adapter.init", "pissa")
    assert "gamma is of loss: simpo" in refused("--task.gamma", "1")
    single = tmp_path / "single.jsonl"
    single.write_text('{"prompt": "a", "completion": "b", "label": true}\n')
    assert "no column 'chosen'" in refused("--data.train.files", str(single))
