"""Run directories: refused when not empty, repaired after a kill, readable line by line."""

from __future__ import annotations

import errno
import json
import os

import pytest

from flatshift.finetune.atomic import write_json
from flatshift.finetune.digests import DONE, FILES, file_digests
from flatshift.finetune.errors import Interrupted, UserError
from flatshift.finetune.lock import exclusive_lock
from flatshift.finetune.run_directory import (
    RunDirectory,
    check_empty,
    disk_full_interrupts,
    read_metrics,
    write_provenance,
)
from tests.support.kill_points import kill_points


def test_create_writes_provenance_and_refuses_what_is_not_empty(tmp_path):
    run = RunDirectory.create(tmp_path / "runs" / "first")
    environment = json.loads((run.path / "environment.json").read_text())
    assert {"python", "platform", "cpu", "cores", "memory", "commit", "versions"} <= environment.keys()
    assert environment["versions"]["torch"] and environment["memory"] > 2**20
    assert (run.path / "command.txt").read_text().strip()
    with pytest.raises(UserError, match=r"not empty.*--resume .*first`"):
        RunDirectory.create(run.path)
    with pytest.raises(UserError, match=r"not empty; name another directory$"):
        check_empty(run.path)
    (tmp_path / "empty").mkdir()
    check_empty(tmp_path / "empty")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        RunDirectory.create(tmp_path / "file")
    write_provenance(tmp_path / "empty", recipe_yaml="a: 1\n")
    assert (tmp_path / "empty" / "recipe.resolved.yaml").read_text() == "a: 1\n"


def test_open_refuses_what_is_not_a_run(tmp_path):
    with pytest.raises(UserError, match="no such run directory"):
        RunDirectory.open(tmp_path / "absent")
    with pytest.raises(UserError, match="is not a run directory"):
        RunDirectory.open(tmp_path)


def test_metrics_go_to_the_run_and_the_stage_and_the_last_line_for_a_step_wins(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    run.log_metrics("warm-up", step=1, split="train", loss=3.0)
    run.log_metrics("fine-tune", attempt=1, step=1, split="train", loss=2.0)
    run.log_metrics("fine-tune", attempt=1, step=1, split="dev", loss=float("nan"))
    run.log_metrics("fine-tune", attempt=2, step=1, split="train", loss=1.5)
    lines = read_metrics(run.path / "metrics.jsonl")
    assert [(r["stage"], r["split"], r["loss"]) for r in lines] == [
        ("warm-up", "train", 3.0),
        ("fine-tune", "dev", None),
        ("fine-tune", "train", 1.5),
    ]
    assert len(read_metrics(run.path / "stages" / "fine-tune" / "metrics.jsonl")) == 2
    assert read_metrics(run.path / "absent.jsonl") == []


def test_a_torn_tail_is_skipped_and_cut_when_the_run_is_opened_again(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    run.log_metrics("s", step=1, split="train", loss=1.0)
    metrics = run.path / "metrics.jsonl"
    whole = metrics.read_bytes()
    for torn in (b'{"stage": "s", "ste', '{"stage": "é'.encode()[:-1]):
        metrics.write_bytes(whole + torn)
        assert len(read_metrics(metrics)) == 1
        RunDirectory.open(run.path).log_metrics("s", step=2, split="train", loss=1.0)
        assert metrics.read_bytes().startswith(whole) and [r["step"] for r in read_metrics(metrics)] == [1, 2]
        metrics.write_bytes(whole)
    metrics.write_bytes(b"not json\n" + whole)
    with pytest.raises(UserError, match=r"metrics\.jsonl:1: not a JSON object"):
        read_metrics(metrics)


def test_what_a_machine_without_power_lost_of_the_metrics_is_cut(tmp_path):
    """Zeros where pages were not written yet, whole lines behind them or not."""
    run = RunDirectory.create(tmp_path / "run")
    for step in range(1, 5):
        run.log_metrics("s", step=step, split="train", loss=1.0)
    metrics = run.path / "metrics.jsonl"
    whole = metrics.read_bytes()
    lines = whole.splitlines(keepends=True)
    for lost in (slice(len(lines[0]) + 5, len(lines[0]) + 9), slice(len(lines[0]) + 5, None)):
        damaged = bytearray(whole)
        damaged[lost] = bytes(len(damaged[lost]))
        metrics.write_bytes(damaged)
        again = RunDirectory.open(run.path)
        assert metrics.read_bytes() == lines[0]
        again.log_metrics("s", step=2, split="train", loss=1.0)
        assert [line["step"] for line in read_metrics(metrics)] == [1, 2]


def test_nothing_is_cut_of_a_finished_run(tmp_path):
    """A byte that became a zero is damage there, not a line that was lost: the run's record is compared first."""
    run = RunDirectory.create(tmp_path / "run")
    for step in range(1, 5):
        run.log_metrics("s", step=step, split="train", loss=1.0)
    files = [run.path / "metrics.jsonl", run.path / "stages" / "s" / "metrics.jsonl"]
    write_json(run.path / DONE, {FILES: file_digests(run.path, files)})
    RunDirectory.open(run.path)
    for file in files:
        whole = file.read_bytes()
        for changed in (whole[:20] + b"\0" + whole[21:], whole[:-5]):
            file.write_bytes(changed)
            with pytest.raises(UserError, match=r"metrics\.jsonl is not what was saved"):
                RunDirectory.open(run.path)
            assert file.read_bytes() == changed
        file.write_bytes(whole)
    RunDirectory.open(run.path)


def test_a_run_that_was_killed_while_it_was_made_can_be_made_again(tmp_path):
    def make(path):
        with exclusive_lock(path):
            RunDirectory.create(path, recipe_yaml="a: 1\n", manifest={"inputs": []}, texts={"template.jinja": "x"})

    for path in kill_points(make, tmp_path):
        if not (path / "environment.json").exists():
            make(path)
        assert len(list(path.iterdir())) == 5 and not list(tmp_path.rglob("*.tmp"))


def test_a_line_that_finds_no_room_is_taken_back_whole(tmp_path, monkeypatch):
    run = RunDirectory.create(tmp_path / "run")
    run.log_metrics("s", step=1, split="train", loss=1.0)
    before = (run.path / "metrics.jsonl").read_bytes()
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
    with pytest.raises(Interrupted, match="disk is full"):
        run.log_metrics("s", step=2, split="train", loss=1.0)
    assert (run.path / "metrics.jsonl").read_bytes() == before


def test_only_a_full_disk_becomes_interrupted():
    for code in (errno.ENOSPC, errno.EDQUOT):
        with pytest.raises(Interrupted), disk_full_interrupts("testing"):
            raise OSError(code, "full")
    with pytest.raises(PermissionError), disk_full_interrupts("testing"):
        raise PermissionError(errno.EACCES, "no")


def test_log_lines_carry_the_time(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    run.log("one\ntwo")
    assert [line.split(" ", 1)[1] for line in (run.path / "log.txt").read_text().splitlines()] == ["one", "two"]
