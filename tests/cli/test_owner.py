"""Whose directory it is: two commands on one path, and what stays of a run that failed by its settings."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from flatshift.cli import run
from flatshift.finetune.lock import exclusive_lock
from tests.support.commands import flags

QUICK = {
    "train.steps": 2,
    "train.batch_size": 2,
    "train.max_length": 16,
    "train.max_cut": 1,
    "train.threads": 1,
    "train.precision": "fp32",
    "train.eval_every": 0,
    "train.peak_tflops": 1,
    "data.train.limit": 20,
    "data.dev.limit": 4,
    "data.test.limit": 4,
    "eval.bootstrap": 20,
    "eval.train_limit": 4,
}
WARM = QUICK | {
    "warmup.steps": 1,
    "warmup.batch_size": 1,
    "select.budget": 10,
    "select.pool.limit": 100,
    "select.method.kind": "random",
}


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    assert run(["train", "language-model", "--out", str(out), *flags(QUICK)]) == 0
    return out


@pytest.mark.parametrize(
    "words",
    [
        ["train", "classify", "--out", "OUT"],
        ["train", "--resume", "RUN"],
        ["select", "warmup", "--out", "OUT"],
        ["sweep", "double-descent", "--out", "OUT"],
        ["compare", "flat-comparison", "--out", "OUT"],
        ["merge", "RUN", "--out", "OUT"],
        ["merge", "RUN"],
        ["export", "RUN", "--out", "OUT"],
        ["export", "RUN"],
        ["generate", "RUN", "--prompt", "a", "--out", "OUT"],
        ["report", "RUN", "--out", "OUT"],
        ["demo", "--out", "OUT"],
        ["recipes", "copy", "classify", "OUT"],
    ],
    ids=lambda words: " ".join(words),
)
def test_a_path_in_use_is_refused_with_its_owner(words: list[str], finished: Path, tmp_path: Path, capsys) -> None:
    out, before = tmp_path / "out", contents(finished)
    owner = {"--resume": finished, "merge": finished / "merged", "export": finished / "export"}
    path = out if "OUT" in words else next(owner[word] for word in words if word in owner)
    with exclusive_lock(path):
        assert run([{"RUN": str(finished), "OUT": str(out)}.get(word, word) for word in words]) == 2
    told = capsys.readouterr().err
    assert f"{path} is in use by another command (process {os.getpid()}); wait for its end" in told
    assert len(told.strip().splitlines()) == 1
    assert contents(finished) == before and not list(tmp_path.iterdir())


def test_a_finished_selection_outlives_what_fails_after_it(tmp_path: Path, capsys) -> None:
    out, short = tmp_path / "out", tmp_path / "short.jsonl"
    short.write_text("".join(json.dumps({"text": f"row {i}", "label": "ab"[i % 2]}) + "\n" for i in range(20)))
    # Own rows fit, those that are selected do not: known only once they are chosen, and on every machine.
    sets = {f"data.{split}.files": short for split in ("train", "dev", "test")}
    wild = {**WARM, **sets, "train.max_cut": 0, "data.checks.copies": "off"}
    assert run(["train", "warmup", "--out", str(out), *flags(wild)]) == 2
    told = capsys.readouterr()
    assert "train.max_cut" in told.err
    assert str(out / "selection" / "selected.jsonl") in told.out + told.err
    chosen = contents(out / "selection")
    assert {"manifest.json", "scores.parquet", "selected.jsonl"} <= chosen.keys()
    assert run(["train", "--resume", str(out)]) == 2, "the setting is still what it was"
    assert contents(out / "selection") == chosen, "what is finished is not made again"
    limits = {f"data.{split}.limit": "null" for split in ("train", "dev", "test")}
    again = flags({**QUICK, **limits, "data.train.files": out / "selection" / "selected.jsonl"})
    assert run(["train", "language-model", "--out", str(tmp_path / "other"), *again]) == 0


def test_a_run_in_which_nothing_was_finished_goes(tmp_path: Path, monkeypatch, capsys) -> None:
    from flatshift.experiments.workflows import train
    from flatshift.finetune.errors import UserError

    def fail(*_: object, **__: object) -> None:
        raise UserError("no such thing")

    monkeypatch.setattr(train, "select_into", fail)
    assert run(["train", "warmup", "--out", str(tmp_path / "deep" / "out"), *flags(WARM)]) == 2
    assert not list(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    assert run(["train", "warmup", *flags(WARM)]) == 2
    assert not list(tmp_path.iterdir()), "nor does the default directory stay"


def test_metrics_are_durable_before_a_checkpoint_says_that_their_updates_are_done(tmp_path: Path, monkeypatch) -> None:
    from flatshift.finetune import run_directory
    from flatshift.finetune.train import checkpointer

    calls: list[str] = []
    save, sync = checkpointer.save_checkpoint, run_directory.atomic.sync_files

    def saving(*args, **kwargs):
        calls.append("save")
        return save(*args, **kwargs)

    def syncing(*paths: Path) -> None:
        steps = [json.loads(line)["step"] for line in paths[0].read_text(encoding="utf-8").splitlines()]
        calls.append(f"sync {max(steps)}")
        sync(*paths)

    monkeypatch.setattr(checkpointer, "save_checkpoint", saving)
    monkeypatch.setattr(run_directory.atomic, "sync_files", syncing)
    settings = QUICK | {"train.save_every": 1}
    assert run(["train", "classify", "--out", str(tmp_path / "out"), *flags(settings)]) == 0
    assert calls[:4] == ["sync 1", "save", "sync 2", "save"] and calls[4:] == ["sync 2"]
