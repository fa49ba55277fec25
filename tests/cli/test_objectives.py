"""The objectives through the public command: both recipes as they stand, several classes, numbers, and their merges."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from flatshift.cli import run
from tests.support.commands import flags
from tests.support.data_models import write_jsonl
from tests.support.objective_models import masked_tokenizer, numbered_rows, save_encoder, several_rows

pytestmark = pytest.mark.usefixtures("warm_checks")

SMALL = {
    "train.steps": 4,
    "train.batch_size": 4,
    "train.max_length": 48,
    "train.max_cut": 1,
    "train.eval_every": 2,
    "train.threads": 1,
    "train.precision": "fp32",
    "eval.bootstrap": 50,
    "eval.train_limit": 20,
}


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def judged_again(path: Path, capsys: pytest.CaptureFixture) -> dict:
    capsys.readouterr()
    assert run(["eval", str(path), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


LIMITS = {"data.train.limit": 40, "data.dev.limit": 16, "data.test.limit": 16}


@pytest.mark.slow
def test_the_recipe_encoder_warmup(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "run"
    warm = {"warmup.steps": 3, "warmup.batch_size": 4, "select.budget": 30, "select.pool.limit": 400}
    assert run(["train", "encoder-warmup", "--out", str(out), *flags(SMALL | LIMITS | warm)]) == 0
    said = (out / "log.txt").read_text(encoding="utf-8")
    assert "warm-up: masked-lm, as warmup.task says" in said and "<mask>" in said
    before, after = (read(out / "stages" / "warm-up" / name) for name in ("before.json", "eval.json"))
    assert before["test"].keys() == {"loss", "pseudo_perplexity"} == after["test"].keys()
    assert before["test"]["loss"]["value"] != after["test"]["loss"]["value"]
    assert "pseudo-perplexity" in (out / "report.html").read_text(encoding="utf-8")
    assert judged_again(out, capsys) == read(out / "eval.json")


@pytest.mark.parametrize(
    ("share", "block"),
    [
        (0.5, {"select.budget": 30, "select.pool.limit": 400}),
        pytest.param(1, {"select": "null"}, marks=pytest.mark.slow),
        pytest.param(
            1,
            {"select": "null", "select.target.files": "sample:scicite/train", "select.target.limit": 50},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_warm_up_on_own_texts(share: float, block: dict, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """As many tokens as its share whatever the number of texts, and the same bits by the same command."""
    warm = {"warmup.steps": 3, "warmup.batch_size": 4, "warmup.own": share} | block
    words = ["train", "warmup", *flags(SMALL | LIMITS | warm)]
    assert run([*words, "--out", str(tmp_path / "run")]) == 0
    said = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    if share == 1:
        rows = block.get("select.target.limit", LIMITS["data.train.limit"])
        assert f"{rows} rows" in said and not (tmp_path / "run" / "selection").exists()
    else:
        assert (
            "source selected: 50.0% of tokens, 30 samples" in said and "source own: 50.0% of tokens, 40 samples" in said
        )
    assert "for more raise warmup.steps, or set warmup.task: {kind: language-model, pack: false}" in said
    before, after = (read(tmp_path / "run" / "stages" / "warm-up" / name) for name in ("before.json", "eval.json"))
    assert after["test"]["perplexity"]["value"] < before["test"]["perplexity"]["value"]
    assert run([*words, "--out", str(tmp_path / "again")]) == 0
    adapters = [(tmp_path / name / "adapter" / "adapter_model.safetensors").read_bytes() for name in ("run", "again")]
    assert adapters[0] == adapters[1]


def warm_up(out: Path, recipe: str, **settings: object) -> list[dict]:
    """The training lines of a warm-up of two steps on own texts, and a step of fine-tuning."""
    quick = {"train.steps": 1, "train.eval_every": 0, "eval.train_limit": 0, "data.test.files": "[]", "select": "null"}
    own = {"warmup.own": 1, "warmup.steps": 2, "warmup.batch_size": 2} | settings
    assert (
        run(["train", recipe, "--out", str(out), *flags(SMALL | {**LIMITS, "data.test.limit": "null"} | quick | own)])
        == 0
    )
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if (line["stage"], line["split"]) == ("warm-up", "train")]


def test_steps_and_objective_of_a_warm_up(encoder: Path, tmp_path: Path) -> None:
    """Twice the micro-batches, texts that are not packed, tokens weighted by their probability; more tokens hidden."""
    kind = {"warmup.task.kind": "language-model"}
    usual = warm_up(tmp_path / "usual", "warmup")
    twice = warm_up(tmp_path / "twice", "warmup", **{"warmup.accumulate": 2})
    assert 1.8 < twice[-1]["tokens"] / usual[-1]["tokens"] < 2.2  # tokens of packed rows
    alone = warm_up(tmp_path / "alone", "warmup", **kind, **{"warmup.task.pack": "false"})
    assert alone[-1]["tokens"] <= usual[-1]["tokens"] and alone[0]["loss"] != usual[0]["loss"]
    weighted = warm_up(tmp_path / "weighted", "warmup", **kind, **{"warmup.task.dft": "true"})
    assert weighted[0]["tokens"] == usual[0]["tokens"] and 0 < weighted[0]["loss"] < 0.5 * usual[0]["loss"]
    hidden = {"backbone": encoder, "warmup.task.kind": "masked-lm"}
    some, half, words = (
        warm_up(tmp_path / name, "encoder-warmup", **hidden, **more)
        for name, more in (
            ("some", {}),
            ("half", {"warmup.task.share": 0.5}),
            ("words", {"warmup.task.whole_words": "true"}),
        )
    )
    assert 2.5 < half[-1]["tokens"] / some[-1]["tokens"] < 4
    assert words[-1]["tokens"] <= some[-1]["tokens"] and words[0]["loss"] != some[0]["loss"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--warmup.own", "1"], "leave the `select` block out (--select null)"),
        (
            ["--warmup.own", "1", "--select", "null", "--select.budget", "30"],
            "but for select.target and select.columns",
        ),
        (["--select", "null"], "own texts alone with warmup.own: 1"),
        (["--warmup.own", "1.5"], "own"),
    ],
)
def test_own_texts_and_a_selection_that_do_not_go_together(
    words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert run(["train", "warmup", *words, "--out", str(tmp_path / "run")]) == 2
    assert sentence in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_the_recipe_seq2seq(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from transformers import AutoModelForSeq2SeqLM

    out = tmp_path / "run"
    assert run(["train", "seq2seq", "--out", str(out), *flags(SMALL | LIMITS)]) == 0
    figures = read(out / "eval.json")
    assert {"exact_match", "chrf", "perplexity"} <= figures["test"].keys()
    assert "banking intent: " in (out / "log.txt").read_text(encoding="utf-8")
    assert judged_again(out, capsys) == figures
    assert run(["merge", str(out), "--out", str(tmp_path / "merged")]) == 0
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "merged")
    assert model.config.decoder_start_token_id == 0


def recipe_file(folder: Path, encoder: Path, rows: list, task: str) -> str:
    data = write_jsonl(folder / "rows.jsonl", [{"text": r.values["text"], "label": r.values["label"]} for r in rows])
    file = folder / "own.yaml"
    file.write_text(
        f"backbone: {encoder}\ntask: {task}\ndata: {{train: {{files: [{data}]}}, holdout: 0.2}}\n"
        "optimizer: {lr: 1e-2}\n",
        encoding="utf-8",
    )
    return str(file)


def test_numbers_come_out_in_the_users_units(tmp_path: Path, encoder: Path, capsys: pytest.CaptureFixture) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    rows = numbered_rows(120, mean=5000.0, spread=100.0)
    own = recipe_file(tmp_path, encoder, rows, "regress")
    out = tmp_path / "run"
    assert run(["train", own, "--out", str(out), *flags(SMALL | {"train.steps": 60, "train.eval_every": 20})]) == 0
    figures = read(out / "eval.json")["test"]
    assert figures.keys() == {"loss", "pearson", "spearman", "rmse", "mae", "mean_floor"}
    assert figures["rmse"]["value"] < 0.8 * figures["mean_floor"]["value"] < 200
    assert "→ ⟦5" in (out / "log.txt").read_text(encoding="utf-8") or "→ ⟦4" in (out / "log.txt").read_text()
    assert judged_again(out, capsys)["test"] == figures

    assert run(["merge", str(out), "--out", str(tmp_path / "merged")]) == 0
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").eval()
    base = AutoModelForSequenceClassification.from_pretrained(encoder, num_labels=1)
    adapted = PeftModel.from_pretrained(base, out / "adapter").eval()
    tokenizer = masked_tokenizer()
    with torch.no_grad():
        inputs = [tokenizer(r.values["text"], return_tensors="pt") for r in rows[:20]]
        said = [[float(model(**one).logits) for one in inputs] for model in (merged, adapted)]
    assert np.allclose(*said, rtol=1e-5)
    assert np.corrcoef(said[0], [r.values["label"] for r in rows[:20]])[0, 1] > 0.5
    assert abs(np.mean(said[0]) - 5000) < 150


def test_several_classes(tmp_path: Path, encoder: Path, capsys: pytest.CaptureFixture) -> None:
    own = recipe_file(tmp_path, encoder, several_rows(80), "{kind: classify, multi: true}")
    out = tmp_path / "run"
    noisy = {"data.label_noise": 0.1, "record.per_doubling": 1}
    assert run(["train", own, "--out", str(out), *flags(SMALL | noisy)]) == 0
    figures = read(out / "eval.json")
    wanted = {"loss", "accuracy", "f1_micro", "f1_macro", "average_precision", "majority_floor", "f1_floor"}
    assert all(split.keys() == wanted for split in figures.values())
    assert len(read(out / "label_noise.json")["ids"]) == 5
    assert judged_again(out, capsys) == figures
    assert run(["merge", str(out), "--out", str(tmp_path / "merged")]) == 0
    assert read(tmp_path / "merged" / "config.json")["problem_type"] == "multi_label_classification"


def test_bad_labels_are_one_sentence(tmp_path: Path, encoder: Path, capsys: pytest.CaptureFixture) -> None:
    own = recipe_file(tmp_path, encoder, numbered_rows(20), "regress")
    with (tmp_path / "rows.jsonl").open("a", encoding="utf-8") as lines:
        lines.write('{"text": "cat", "label": "high"}\n')
    assert run(["train", own, "--out", str(tmp_path / "run"), *flags(SMALL)]) == 2
    assert "rows.jsonl:21: column 'label' is 'high', not a number" in capsys.readouterr().err
    skip = flags(SMALL | {"data.bad_rows": "skip"})
    assert run(["train", own, "--out", str(tmp_path / "run"), *skip]) == 0
    assert "skipped 1 bad rows" in (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")


def test_few_steps_of_packed_rows_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = {"data.train.limit": 30, "data.dev.limit": 8, "data.test.limit": 8}
    small = {"train.steps": 3, "train.max_length": 256, "train.threads": 1, "eval.bootstrap": 10}
    words = ["train", "language-model", *flags(small | rows)]
    assert run([*words, "--out", str(tmp_path / "packed")]) == 0
    assert "a packed row holds several of yours, so this is " in capsys.readouterr().err
    assert run([*words, "--task.pack", "false", "--out", str(tmp_path / "alone")]) == 0
    assert "a packed row holds" not in capsys.readouterr().err


@pytest.mark.slow
def test_an_encoder_with_its_own_head_is_evaluated_without_an_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Its head is the checkpoint's, so `eval.cold` has something to compare with; texts longer than it are refused."""
    backbone = save_encoder(tmp_path / "whole")
    words = "the cat sat on the mat " * 5
    data = write_jsonl(tmp_path / "texts.jsonl", [{"text": f"{words} {n}"} for n in range(8)])
    own = {"backbone": backbone, "task.kind": "masked-lm", "data.train.files": f"[{data}]", "data.dev.files": "[]"}
    own |= {"data.test.files": f"[{data}]", "data.checks.copies": "warn", "eval.cold": 4, "train.steps": 1}
    out = tmp_path / "run"
    assert run(["train", "language-model", "--out", str(out), *flags(SMALL | own | {"train.eval_every": 0})]) == 0
    assert read(out / "cold.json")["test"]["pseudo_perplexity"]["n"] == 4
    capsys.readouterr()
    long = write_jsonl(tmp_path / "long.jsonl", [{"text": words * 4}])
    assert run(["eval", str(backbone), "--data", str(long), "--train.precision", "fp32"]) == 2
    said = capsys.readouterr().err
    assert "long.jsonl:1" in said and "64 positions" in said and "--train.max_length 64" in said
    assert run(["eval", str(backbone), "--data", str(long), "--train.precision", "fp32", "--train.max_length", "64",
                "--train.max_cut", "1"]) == 0  # fmt: skip
