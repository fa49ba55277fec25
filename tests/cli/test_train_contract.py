"""`train`, `eval`, `report`, `--resume` and `sweep` to the letter of their contract, on real rows and real kills."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from flatshift.cli import run
from tests.support.commands import flags
from tests.support.patience import HANG_S

pytestmark = pytest.mark.usefixtures("warm_checks")

SMALL = {
    "train.steps": 6,
    "train.batch_size": 4,
    "train.max_length": 32,
    "train.max_cut": 1,
    "train.eval_every": 3,
    "train.save_every": 2,
    "train.threads": 1,
    "train.precision": "fp32",
    "data.train.limit": 40,
    "data.dev.limit": 20,
    "data.test.limit": 30,
    "eval.bootstrap": 50,
}
WARM = SMALL | {
    "warmup.steps": 4,
    "warmup.batch_size": 2,
    "select.budget": 20,
    "select.pool.limit": 300,
    "select.embedder.dim": 16,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run with both stages, made through the public command."""
    out = tmp_path_factory.mktemp("runs") / "both"
    assert run(["train", "warmup", "--out", str(out), *flags(WARM)]) == 0
    return out


def test_run_directory_is_complete(finished: Path) -> None:
    for name in (
        "recipe.resolved.yaml",
        "command.txt",
        "environment.json",
        "manifest.json",
        "metrics.jsonl",
        "eval.json",
        "adapter/adapter_model.safetensors",
        "report.html",
        "log.txt",
        "selection/scores.parquet",
        "stages/warm-up/adapter/adapter_config.json",
        "stages/warm-up/metrics.jsonl",
        "stages/fine-tune/adapter/adapter_config.json",
        "stages/fine-tune/metrics.jsonl",
        "state/step-6/state.safetensors",
        "state/step-6/state.json",
    ):
        assert (finished / name).stat().st_size > 0, name
    assert list((finished / "plots").glob("*.svg"))
    manifest = json.loads((finished / "manifest.json").read_text(encoding="utf-8"))
    assert all(len(entry["sha256"]) == 64 and entry["rows"] > 0 for entry in manifest["inputs"])
    assert not [p for p in finished.rglob("*") if p.suffix in (".pt", ".pth", ".bin", ".pkl")]


def test_metrics_lines(finished: Path) -> None:
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    for line in lines:
        assert {"stage", "attempt", "step", "split", "loss", "tokens", "time_s"} <= line.keys()
    train = [line for line in lines if line["stage"] == "fine-tune" and line["split"] == "train"]
    assert [line["step"] for line in train] == [1, 2, 3, 4, 5, 6]
    assert [line["tokens"] for line in train] == [4, 8, 12, 16, 20, 24], "examples count as tokens for classification"
    assert [line["step"] for line in lines if line["split"] == "dev"] == [3, 6]
    assert [line["step"] for line in lines if line["stage"] == "warm-up"] == [1, 2, 3, 4]


def test_eval_json_and_eval_command_agree(finished: Path, capsys) -> None:
    stored = json.loads((finished / "eval.json").read_text(encoding="utf-8"))
    for metrics in stored.values():
        for figure in metrics.values():
            assert set(figure) == {"value", "low", "high", "n"}
            assert figure["low"] <= figure["value"] <= figure["high"]
    assert run(["eval", str(finished), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == stored


def test_intervals_have_the_coverage_that_is_asked_for(tmp_path: Path, capsys) -> None:
    out, small = tmp_path / "run", {"train.steps": 1, "train.eval_every": 0, "train.save_every": 0}
    own = {"eval.bootstrap": 200, "eval.confidence": 0.5}
    capsys.readouterr()
    assert run(["train", "classify", "--out", str(out), *flags(SMALL | small | own)]) == 0
    assert "value (50 %)" in capsys.readouterr().err
    half = json.loads((out / "eval.json").read_text(encoding="utf-8"))["test"]["loss"]
    assert run(["eval", str(out), "--eval.confidence", "0.95", "--json"]) == 0
    usual = json.loads(capsys.readouterr().out)["test"]["loss"]
    assert usual["value"] == half["value"]
    assert 0.2 < (half["high"] - half["low"]) / (usual["high"] - usual["low"]) < 0.5  # .34 of a normal distribution


def test_adapter_loads_in_plain_peft(finished: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    from flatshift.finetune.assets import backbone_directory

    base = AutoModelForSequenceClassification.from_pretrained(
        backbone_directory("flatshift-5m"), num_labels=3, dtype=torch.float32
    )
    model = PeftModel.from_pretrained(base, finished / "adapter")
    saved = load_file(finished / "adapter" / "adapter_model.safetensors")
    live = {name.replace(".default", ""): value for name, value in model.state_dict().items()}
    assert any("lora_B" in name and tensor.abs().sum() > 0 for name, tensor in saved.items())
    for name, tensor in saved.items():
        found = live.get(name, live.get(name.replace("score.", "score.modules_to_save.")))
        assert found is not None and torch.equal(found.float(), tensor.float()), name


def test_resuming_a_finished_run_changes_nothing(finished: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in finished.rglob("*") if p.is_file() and p.name != "log.txt"}
    assert run(["train", "--resume", str(finished)]) == 0
    assert before == {p: p.stat().st_mtime_ns for p in finished.rglob("*") if p.is_file() and p.name != "log.txt"}


def test_a_resumed_run_says_what_happened(tmp_path: Path, capsys, monkeypatch) -> None:
    """Origins stay, commands append, and card and page tell the updates that were made and in how many attempts."""
    out = tmp_path / "run"
    words = ["train", "classify", "--out", str(out), *flags(SMALL | {"train.steps": 2, "eval.bootstrap": 10})]
    monkeypatch.setattr("sys.argv", ["flatshift", *words])
    assert run(words) == 0
    assert "resumed" not in json.loads((out / "environment.json").read_text())
    before = (out / "recipe.resolved.yaml").read_text(encoding="utf-8").splitlines()
    again = ["train", "--resume", str(out), "--train.steps", "3"]
    monkeypatch.setattr("sys.argv", ["flatshift", *again])
    monkeypatch.setattr("flatshift.finetune.run_directory._PACKAGES", ("flatshift", "torch"))
    assert run(again) == 0
    assert (out / "command.txt").read_text().splitlines() == [shlex.join(["flatshift", *w]) for w in (words, again)]
    after = (out / "recipe.resolved.yaml").read_text(encoding="utf-8").splitlines()
    changed = [(old.strip(), new.strip()) for old, new in zip(before, after, strict=True) if old != new]
    assert changed == [("steps: 2  # --train.steps", "steps: 3  # --train.steps")]
    (resumed,) = json.loads((out / "environment.json").read_text())["resumed"]
    assert set(resumed) >= {"created", "versions"} and "cpu" not in resumed, "what was another then"
    assert run(["export", str(out), "--out", str(tmp_path / "hub")]) == 0
    card = (tmp_path / "hub" / "README.md").read_text(encoding="utf-8")
    assert "3 steps of" in card and "in 2 attempts" in card and "Resumed with flatshift" in card
    assert "--resume run --train.steps 3" in card and "| `train.steps` | `3` |" in card
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "in 2 attempts" in page and page.count("<code>flatshift train ") == 2


def test_resume_refuses_another_setting(finished: Path, capsys) -> None:
    assert run(["train", "--resume", str(finished), "--optimizer.lr", "1"]) == 2
    assert "--optimizer.lr" in capsys.readouterr().err


def test_resume_refuses_fewer_steps_than_were_made(finished: Path, capsys) -> None:
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    assert run(["train", "--resume", str(finished), "--train.steps", "5"]) == 2
    assert "train.steps: 5 is below the 6 steps" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before


def test_eval_on_other_rows(finished: Path, tmp_path: Path, capsys) -> None:
    rows = tmp_path / "more.jsonl"
    rows.write_text('{"text": "We used the method of Smith [1].", "label": "method"}\n' * 3, encoding="utf-8")
    assert run(["eval", str(finished), "--data", str(rows), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["data"]["accuracy"]["n"] == 3
    rows.write_text('{"text": "x", "label": "metod"}\n', encoding="utf-8")
    assert run(["eval", str(finished), "--data", str(rows)]) == 2
    message = capsys.readouterr().err
    assert f"{rows}:1" in message and "'method'" in message


def test_merged_model_equals_backbone_plus_adapter(finished: Path, tmp_path: Path, capsys) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    assert run(["merge", str(finished), "--out", str(tmp_path / "merged"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["dtype"] == "bfloat16" and 0 < result["max_logit_difference"] < 0.05 * result["largest_logit"]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert model.config.num_labels == 3 and AutoTokenizer.from_pretrained(tmp_path / "merged").vocab_size > 4000
    assert not any("lora" in name for name, _ in model.named_parameters())
    assert run(["merge", str(finished), "--out", str(tmp_path / "merged")]) == 2


def test_export_is_a_plain_adapter_folder_with_a_card(finished: Path, tmp_path: Path) -> None:
    assert run(["export", str(finished), "--out", str(tmp_path / "hub")]) == 0
    folder = tmp_path / "hub"
    assert (folder / "adapter_model.safetensors").read_bytes() == adapter_bytes(finished)
    text = (folder / "README.md").read_text(encoding="utf-8")
    accuracy = json.loads((finished / "eval.json").read_text())["test"]["accuracy"]["value"]
    assert f"| test | accuracy | {accuracy:.4g} |" in text and "scicite" in (finished / "manifest.json").read_text()
    assert (folder / "tokenizer.json").is_file()


def start(*words: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "flatshift", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def wait_for_step(process: subprocess.Popen, out: Path, step: int) -> None:
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline and process.poll() is None:
        metrics = out / "metrics.jsonl"
        if metrics.is_file() and len(metrics.read_bytes().splitlines()) >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"the run ended early: {process.stderr.read() if process.stderr else ''}")


def adapter_bytes(out: Path) -> bytes:
    return (out / "adapter" / "adapter_model.safetensors").read_bytes()


LONG = SMALL | {"train.steps": 16, "train.eval_every": 0, "train.save_every": 5, "regularizer.kind": "ggpo"}


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGTERM, signal.SIGUSR1))],
)
def test_stopped_and_resumed_equals_uninterrupted(tmp_path: Path, number: signal.Signals) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    words = ["train", "classify", *flags(LONG)]
    assert run([*words, "--out", str(whole)]) == 0
    process = start(*words, "--out", str(cut))
    wait_for_step(process, cut, 7)
    process.send_signal(number)
    code = process.wait(timeout=HANG_S)
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else 3)
    assert not (cut / "eval.json").exists()
    assert run(["train", "--resume", str(cut)]) == 0
    assert adapter_bytes(cut) == adapter_bytes(whole)
    assert json.loads((cut / "eval.json").read_text()) == json.loads((whole / "eval.json").read_text())


def test_resume_refuses_a_changed_input(tmp_path: Path, capsys) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"text": "word {i} here", "label": "{i % 2}"}}\n' for i in range(20)), encoding="utf-8")
    settings = {**SMALL, "data.train.files": rows, "data.train.limit": "null", "data.holdout": 0.2}
    settings |= {"data.dev.files": "[]", "data.test.files": "[]", "data.dev.limit": "null", "data.test.limit": "null"}
    out = tmp_path / "out"
    assert run(["train", "classify", "--out", str(out), *flags(settings)]) == 0
    (out / "report.html").unlink()
    assert run(["train", "--resume", str(out)]) == 0, "only the missing part is made again"
    assert (out / "report.html").is_file()
    (out / "report.html").unlink()
    rows.write_text(rows.read_text(encoding="utf-8") + '{"text": "new", "label": "1"}\n', encoding="utf-8")
    capsys.readouterr()
    assert run(["train", "--resume", str(out)]) == 2
    assert "changed since" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data.train.files", "nowhere.jsonl"], "no such file"),
        (["--data.columns.label", "labell"], "'label'"),
        (["--task.labels", "[a, b]"], "not one of the 2 classes"),
        (["--backbone", "flatshift-6m"], "'flatshift-5m'"),
        (["--backbone", "EMPTY"], "config.json"),
        (["--adapter.targets", "[q_prj]"], "q_proj"),
        (["--data.train.limit", "99999"], "99999"),
        (["--task.kind", "completion", "--task.prompt", "{txt}"], "'text'"),
        (["--adapter.rank", "1000000000"], "adapter.rank: at 1,000,000,000 the factors"),
        (["--train.batch_size", "1000000000"], "train.batch_size times train.accumulate: a step of 1,000,000,000"),
        (["--train.accumulate", "1000000000"], "train.batch_size times train.accumulate"),
    ],
)
def test_bad_training_input(tmp_path: Path, monkeypatch, capsys, words: list[str], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").mkdir()
    settings = SMALL | {"train.steps": 1}
    assert run(["train", "classify", "--out", "out", *flags(settings), *words]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_a_torchao_that_peft_refuses_is_one_sentence(tmp_path: Path, monkeypatch, capsys) -> None:
    def refuse() -> bool:
        raise ImportError("Found an incompatible version of torchao. Found version 0.9.0")

    monkeypatch.setattr("peft.tuners.lora.torchao.is_torchao_available", refuse)
    assert run(["train", "classify", "--out", str(tmp_path / "out"), *flags(SMALL)]) == 2
    error = capsys.readouterr().err
    assert "PEFT refuses an installed package; upgrade or remove it: Found an incompatible version of torchao" in error
    assert not (tmp_path / "out").exists()


def test_a_batch_that_no_memory_holds_is_refused(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("flatshift.finetune.compute.memory.machine_memory", lambda: 1 << 24)
    words = ["train", "classify", "--out", str(tmp_path / "run"), *flags(SMALL | {"train.batch_size": 40})]
    assert run(words) == 2
    assert "train.batch_size: 40 rows at once keep about" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_more_processes_than_ranks_are_refused(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert run(["train", "classify", "--out", str(tmp_path / "out")]) == 2
    assert "2 processes" in capsys.readouterr().err and not (tmp_path / "out").exists()


BF16 = {"train.precision": "bf16", "train.accumulate": 2, "train.batch_size": 2, "train.max_length": 16}
BF16 |= {
    "train.steps": 2,
    "train.eval_every": 0,
    "train.peak_tflops": 1,
    "data.train.limit": 8,
    "data.dev.limit": 4,
    "data.test.limit": 4,
}


@pytest.mark.parametrize(
    "settings",
    [
        {"adapter.dora": "true", "adapter.dropout": 0.1, "regularizer.kind": "ggpo"},
        {"data.label_noise": 0.2, "train.accumulate": 2},
        pytest.param(BF16, marks=pytest.mark.bf16),
    ],
    ids=["dora-dropout-ggpo", "noise-accumulate", "bf16"],
)
def test_settings_run_together(tmp_path: Path, settings: dict) -> None:
    out = tmp_path / "out"
    short = SMALL | {"train.steps": 3} | settings
    assert run(["train", "classify", "--out", str(out), *flags(short)]) == 0
    test = json.loads((out / "eval.json").read_text(encoding="utf-8"))["test"]
    assert "matthews" in test


def test_sweep_is_idempotent_and_keeps_failures(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    words = ["sweep", "double-descent", "--out", str(out), "--seeds", "1", "--jobs", "1"]
    words += flags(SMALL | {"train.steps": 2})
    words = [w for w in words if w not in ("--data.dev.limit", "20")]
    assert run([*words, "--grid", "adapter.rank=1,2"]) == 0
    table = pq.read_table(out / "cells.parquet").to_pydict()
    assert table["adapter.rank"] == [1, 2] and table["seed"] == [0, 0]
    assert table["status"] == ["done"] * 2 and all(0 <= e <= 1 for e in table["test.error"])
    stamps = {p: p.stat().st_mtime_ns for p in out.glob("cells/*/result.json")}
    assert len(stamps) == 2
    assert run([*words, "--grid", "adapter.rank=1,2,4"]) == 0
    after = {p: p.stat().st_mtime_ns for p in out.glob("cells/*/result.json")}
    assert len(after) == 3 and all(after[p] == stamp for p, stamp in stamps.items()), "done cells are never run again"
    assert run([*words, "--grid", "data.train.limit=10,99999"]) == 1
    table = pq.read_table(out / "cells.parquet").to_pydict()
    assert sorted(set(table["status"])) == ["done", "failed"]
    assert any("99999" in (reason or "") for reason in table["reason"])
