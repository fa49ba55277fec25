"""A run that is stopped in its evaluation: what takes its adapter all the same, what is kept of the evaluation, and
what a resumed run may evaluate, or train, otherwise."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from flatshift.cli import run
from flatshift.experiments.results.predictions import NAME as PREDICTIONS
from flatshift.experiments.run.console import Console
from flatshift.experiments.workflows.generate import GenerativeRuns
from flatshift.finetune.evaluate import generation
from flatshift.finetune.run_directory import read_metrics

pytestmark = pytest.mark.usefixtures("warm_checks")

ROWS = [{"text": f"is my card number {i} lost", "label": ("yes", "no")[i % 2]} for i in range(12)]
NOTE = "is trained, and its evaluation is not finished"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("rows")
    made = {name: home / f"{name}.jsonl" for name in ("train", "dev", "test")}
    for number, path in enumerate(made.values()):
        rows = ROWS if number == 0 else [{**row, "text": f"{row['text']} {number}"} for row in ROWS[: 6 + number]]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    made["recipe"] = home / "recipe.yaml"
    made["recipe"].write_text("task: completion\n", encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, files: dict[str, Path]) -> tuple[Path, str]:
    """A run that got SIGTERM at the third token of its test rows, and what it said."""
    out, said = tmp_path_factory.mktemp("run") / "run", []
    tokens = {"count": 0}
    usual, evaluating, say = generation._HeartbeatCriterion.__call__, Console.evaluating, Console.outline

    def heard(self: Any, *inputs: Any, **more: Any) -> Any:
        if tokens["count"]:
            tokens["count"] += 1
            if tokens["count"] == 4:
                os.kill(os.getpid(), signal.SIGTERM)
        return usual(self, *inputs, **more)

    def followed(self: Any, label: str, rows: int, **more: Any) -> Any:
        tokens["count"] = int(label == "evaluating test")
        return evaluating(self, label, rows, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation._HeartbeatCriterion, "__call__", heard)
        patch.setattr(Console, "evaluating", followed)
        patch.setattr(Console, "outline", lambda self, short, whole: said.extend(short) or say(self, short, whole))
        code = run(
            [
                *("train", str(files["recipe"]), "--out", str(out), "--task.score", "generate"),
                *("--data.train.files", str(files["train"]), "--data.dev.files", str(files["dev"])),
                *("--data.test.files", str(files["test"]), "--train.steps", "3", "--train.batch_size", "2"),
                *("--train.max_length", "24", "--train.precision", "fp32", "--train.threads", "1", "--eval.cold", "0"),
                *("--eval.bootstrap", "20", "--task.max_new_tokens", "6"),
            ]
        )
    assert code == 3
    return out, "\n".join(said)


def test_the_first_signal_ends_an_evaluation_and_what_ended_before_is_kept(stopped: tuple[Path, str]) -> None:
    out, said = stopped
    assert "SIGTERM: stopping" in said and not (out / "eval.json").exists() and not (out / "done.json").exists()
    assert (out / "adapter" / "adapter_model.safetensors").is_file()
    assert sorted(path.name for path in (out / "state" / "evaluated").iterdir()) == ["dev.json", "dev.parquet"]
    assert "evaluation: rows of dev 7, test 8: " in said and " and at most 90 written, about as long as " in said
    assert "train:" not in said  # training rows are evaluated only where that is asked


def test_an_adapter_is_used_before_its_evaluation(
    stopped: tuple[Path, str], files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(stopped[0])
    commands = [
        ["export", out, "--out", str(tmp_path / "exported")],
        ["merge", out, "--out", str(tmp_path / "merged")],
        ["predict", out, "--data", str(files["test"]), "--out", str(tmp_path / "said.csv")],
        ["generate", out, "--prompt", "is my card lost", "--max-new-tokens", "2"],
        ["eval", out, "--data", str(files["dev"]), "--task.max_new_tokens", "2"],
        ["eval", out, "flatshift-5m", "--data", str(files["dev"])],
    ]
    for words in commands:
        capsys.readouterr()
        assert run(words) == 0, words
        assert capsys.readouterr().err.count(NOTE) == 1, words
    assert "handed on before its evaluation" in (tmp_path / "exported" / "README.md").read_text(encoding="utf-8")
    GenerativeRuns([Path(out)])  # chat and serve
    assert capsys.readouterr().err.count(NOTE) == 1

    weights = Path(out) / "adapter" / "adapter_model.safetensors"
    whole = weights.read_bytes()
    try:
        weights.write_bytes(whole[:-4] + b"\0\0\0\1")
        assert run(["export", out, "--out", str(tmp_path / "changed")]) == 2
        assert "is not finished" in capsys.readouterr().err and not (tmp_path / "changed").exists()
    finally:
        weights.write_bytes(whole)


def test_a_resumed_run_evaluates_the_rest_or_otherwise(
    stopped: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = stopped[0]
    resume = ["train", "--resume", str(out)]
    assert run([*resume, "--train.batch_size", "4"]) == 2
    assert "--train.batch_size: a run keeps all but mesh" in capsys.readouterr().err

    assert run(resume) == 0
    said = capsys.readouterr().err
    assert "dev: evaluated before" in said and "test: evaluated before" not in said and "lr" not in said
    stored = json.loads((out / "eval.json").read_text(encoding="utf-8"))
    assert set(stored) == {"dev", "test"} and not (out / "state" / "evaluated").exists()
    assert run(["eval", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == stored
    assert pq.read_table(out / PREDICTIONS)["split"].to_pylist() == ["dev"] * 7 + ["test"] * 8

    steps = read_metrics(out / "metrics.jsonl")
    changed = ["--task.max_new_tokens", "2", "--eval.bootstrap", "30", "--eval.train_limit", "4", "--eval.cold", "3"]
    assert run([*resume, *changed]) == 0
    said = capsys.readouterr().err
    assert "nothing to do" not in said and "evaluated before" not in said and "backbone alone, 3 rows of test: " in said
    assert "test, backbone alone" in said  # in the table at the end
    resolved = (out / "recipe.resolved.yaml").read_text(encoding="utf-8")
    assert "max_new_tokens: 2  # --task.max_new_tokens" in resolved and "bootstrap: 30  # --eval.bootstrap" in resolved
    anew = json.loads((out / "eval.json").read_text(encoding="utf-8"))
    assert set(anew) == {"train", "dev", "test"} and anew["train"]["loss"]["n"] == 4 and anew["dev"] != stored["dev"]
    assert read_metrics(out / "metrics.jsonl") == steps, "nothing was trained"
    assert run([*resume, *changed]) == 0 and "nothing to do" in capsys.readouterr().err

    assert run([*resume, "--train.steps", "6", "--train.extend", "keep-end", "--eval.cold", "0"]) == 0
    rates = [line["lr"] for line in read_metrics(out / "metrics.jsonl") if line["split"] == "train"]
    assert rates[3:] == [rates[2]] * 3 and rates[2] < rates[1]
    said = capsys.readouterr().err
    assert f"learning rate: it ended at {rates[2]:.3g}; steps 4 to 6 go from {rates[2]:.3g} to " in said
    assert not (out / "cold.json").exists()


@pytest.mark.parametrize(("every", "count"), [("1", 4), ("0.5", 2), ("1.0", 1)])
def test_dev_rows_are_read_every_step_or_after_a_share_of_them(
    every: str, count: int, files: dict[str, Path], tmp_path: Path
) -> None:
    words = ["train", str(files["recipe"]), "--data", str(files["train"]), "--data.dev.files", str(files["dev"])]
    words += ["--train.steps", "4", "--train.batch_size", "2", "--train.max_length", "24", "--train.eval_every", every]
    assert run([*words, "--out", str(tmp_path / "run"), "--eval.bootstrap", "20", "--train.threads", "1"]) == 0
    records = [record for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if record["split"] == "dev"]
    assert len(records) == count
    log = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    assert (f"dev 7 (dev also every {4 // count} steps)" in log) == (count > 1)
