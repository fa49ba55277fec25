"""Two hosts at one sweep, of which one is killed: each cell once but what it was at, with the bits of one host."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from flatshift.cli import run
from tests.support.patience import HANG_S

FLAGS = [
    *("--backbone", "flatshift-encoder-3m", "--grid", "adapter.rank=1,2", "--seeds", "2", "--regularizer", "plain"),
    *("--train.steps", "2", "--train.eval_every", "0", "--train.max_length", "24", "--train.precision", "fp32"),
    *("--data.train.limit", "24", "--data.dev.limit", "8", "--data.test.limit", "8", "--eval.bootstrap", "20"),
    *("--train.threads", "1", "--devices", "cpu"),
]


def words(out: Path, *more: str) -> list[str]:
    return ["sweep", "classify", *FLAGS, "--out", str(out), *more]


def host(out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "flatshift", *words(out, "--shared", "--lease", "12")]
    return subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)


def starts(out: Path) -> list[str]:
    file = out / "log.txt"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [line.split(" start ")[1].split(" ")[0] for line in lines if " start " in line]


def results(out: Path) -> dict[str, object]:
    return {file.parent.name: json.loads(file.read_text())["metrics"] for file in out.glob("cells/*/result.json")}


def test_a_killed_host_loses_no_cell_and_none_is_done_twice(tmp_path: Path) -> None:
    alone, out = tmp_path / "alone", tmp_path / "shared"
    assert run(words(alone)) == 0
    hosts = [host(out) for _ in range(2)]
    deadline = time.monotonic() + HANG_S
    while not starts(out):
        assert hosts[0].poll() is hosts[1].poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(hosts[0].pid, signal.SIGKILL)
    assert hosts[1].wait(HANG_S) == 0, hosts[1].stderr.read().decode()  # type: ignore[union-attr]
    hosts[0].wait(HANG_S)
    assert results(out) == results(alone)
    begun = starts(out)
    assert set(begun) == set(results(alone)) and len(begun) <= len(set(begun)) + 1
    assert not (out / ".claims").exists()
