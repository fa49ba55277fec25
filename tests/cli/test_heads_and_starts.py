"""Heads over narrow weights, heads of other classes, folders that leave, and runs extended after an early stop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from flatshift.cli import run
from flatshift.finetune.assets import backbone_directory
from tests.support.data_models import write_jsonl

FAST = [
    *("--train.batch_size", "4", "--train.max_length", "16", "--train.eval_every", "0", "--train.threads", "1"),
    *("--train.precision", "fp32", "--eval.bootstrap", "10", "--eval.train_limit", "0", "--regularizer", "plain"),
    *("--data.holdout", "0.25", "--train.epochs", "null", "--train.patience", "null"),
]


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    labels = ("alpha", "beta", "gamma")
    texts = [{"text": f"{labels[i % 3]} is what number {i} says", "label": labels[i % 3]} for i in range(36)]
    return write_jsonl(tmp_path / "rows.jsonl", texts)


def head(folder: str) -> torch.Tensor:
    (tensor,) = [
        t for name, t in load_file(Path(folder, "adapter_model.safetensors")).items() if "score.weight" in name
    ]
    return tensor


def test_a_head_trains_where_frozen_weights_are_narrow(rows: Path) -> None:
    words = ["train", "classify", "--data", "rows.jsonl", *FAST, "--train.backbone_precision", "bf16"]
    for steps in ("1", "6"):
        assert run([*words, "--optimizer.warmup", "0", "--train.steps", steps, "--out", f"run-{steps}"]) == 0
    first, later = head("run-1/adapter"), head("run-6/adapter")
    assert later.dtype == torch.float32 and not torch.equal(first, later)
    assert not torch.equal(later, later.bfloat16().float())


def test_a_start_keeps_its_head_for_the_same_classes_only(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "classify", *FAST, "--train.steps"]
    assert run([*words, "2", "--data", "rows.jsonl", "--out", "first"]) == 0
    start = ["--adapter.start", "first", "--optimizer.lr", "1e-9"]
    assert run([*words, "1", "--data", "rows.jsonl", *start, "--out", "same"]) == 0
    torch.testing.assert_close(head("same/adapter"), head("first/adapter"), rtol=0, atol=1e-6)
    renamed = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    write_jsonl(Path("other.jsonl"), [r | {"label": r["label"].replace("alpha", "zeta")} for r in renamed])
    capsys.readouterr()
    assert run([*words, "1", "--data", "other.jsonl", *start, "--out", "other"]) == 0
    assert "first has other classes, or in another order, and stays behind" in capsys.readouterr().err
    assert not torch.allclose(head("other/adapter"), head("first/adapter"), atol=1e-3)
    first, other = (load_file(Path(name, "adapter/adapter_model.safetensors")) for name in ("first", "other"))
    factors = [name for name in first if ".lora_" in name]
    assert factors and all(torch.allclose(first[name], other[name], atol=1e-6) for name in factors)


def test_weights_kept_narrow_leave_as_they_are(rows: Path) -> None:
    own = backbone_directory("flatshift-5m")
    model = AutoModelForCausalLM.from_pretrained(own, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.001)  # which bf16 does not hold
    model.save_pretrained("wide")
    AutoTokenizer.from_pretrained(own).save_pretrained("wide")
    words = ["train", "language-model", "--data", "rows.jsonl", "--backbone", "wide", *FAST, "--train.steps", "1"]
    assert run([*words, "--train.backbone_precision", "bf16", "--out", "run"]) == 0
    assert run(["export", "run", "--out", "folder"]) == 0


def test_a_run_that_stopped_early_is_extended(rows: Path) -> None:
    words = ["train", "classify", "--data", "rows.jsonl", *FAST, "--train.eval_every", "1", "--train.patience", "1"]
    assert run([*words, "--optimizer.lr", "3", "--train.steps", "8", "--out", "run"]) == 0
    done = Path("run/stages/fine-tune/done.json")
    before = json.loads(done.read_text(encoding="utf-8"))
    assert before["stopped_early"] and before["steps"] < 8
    assert run(["train", "--resume", "run", "--train.steps", "16"]) == 0
    assert json.loads(done.read_text(encoding="utf-8"))["steps"] > before["steps"]


def test_a_run_that_made_all_its_steps_did_not_stop_early(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "classify", "--data", "rows.jsonl", *FAST, "--train.eval_every", "1", "--train.patience", "1"]
    assert run([*words, "--optimizer.lr", "1e-30", "--train.steps", "2", "--out", "run"]) == 0  # no better at step 2
    assert json.loads(Path("run/stages/fine-tune/done.json").read_text(encoding="utf-8"))["steps"] == 2
    capsys.readouterr()
    assert run(["runs", "."]) == 0
    assert "finished" in (said := capsys.readouterr().out) and "stopped early" not in said


def test_patience_without_evaluations_is_said(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "classify", "--data", "rows.jsonl", *FAST, "--train.patience", "1", "--train.steps", "2"]
    assert run([*words, "--out", "run"]) == 0
    assert "train.patience stops nothing: dev rows are evaluated once" in capsys.readouterr().err
    words += ["--data.holdout_splits", "[test]", "--train.eval_every", "1", "--train.best", "loss"]
    assert run([*words, "--out", "blind"]) == 0
    assert "train.patience and train.best without effect: there are no dev rows" in capsys.readouterr().err
