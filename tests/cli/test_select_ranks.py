"""`flatshift select` over several processes: the same files on any number, kills, torchrun, and what is refused."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from flatshift import cli
from flatshift.experiments.select.ranks import _CpuTimer, _slow_rank_warning
from flatshift.selection.transport.settings import ITERATIONS
from tests.support.patience import HANG_S

ROWS, TARGETS = 30_000, 400


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pool")
    r = np.random.default_rng(0)
    centres = 2 * r.standard_normal((6, 48))
    np.save(folder / "x.npy", (centres[r.integers(0, 6, ROWS)] + r.standard_normal((ROWS, 48))).astype(np.float16))
    np.save(folder / "y.npy", centres[r.integers(0, 3, TARGETS)] + 0.8 * r.standard_normal((TARGETS, 48)))
    for name, count in (("pool", ROWS), ("target", TARGETS)):
        rows = (json.dumps({"id": f"{name}-{i}", "text": f"{name} {i} {i * 7 % 13}"}) for i in range(count))
        (folder / f"{name}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return folder


def flags(folder, out, *more):
    given = {"pool": "pool.jsonl", "target": "target.jsonl", "pool-features": "x.npy", "target-features": "y.npy"}
    named = [word for name, file in given.items() for word in (f"--{name}", str(folder / file))]
    settings = ["--select.method.tolerance", "1e-7", "--select.checks", "false"]
    return ["select", *named, "--budget", "200", "--out", str(out), *settings, *more]


def started(arguments, module=("flatshift",)):
    return subprocess.Popen(
        [sys.executable, "-m", *module, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def done(process):
    said, _ = process.communicate(timeout=HANG_S)
    return process.returncode, said


def files(out):
    return [(Path(out) / name).read_bytes() for name in ("scores.parquet", "selected.jsonl")]


@pytest.fixture(scope="module")
def alone(inputs, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "out"
    assert cli.run(flags(inputs, out, "--processes", "1")) == 0
    return out


SLOW = """
import sys, time
from flatshift.selection.transport.large import _LargeSolver
solved = _LargeSolver.begin
_LargeSolver.begin = lambda self, drawn: (time.sleep(8), solved(self, drawn))[1]
from flatshift.cli import run
sys.exit(run(sys.argv[1:]))
"""
"""Rank 0 takes longer for the subsample than `mesh.stall`."""


def test_three_processes_write_the_files_of_one(inputs, alone, tmp_path):
    code, said = done(started(flags(inputs, tmp_path / "three", "--processes", "3")))
    assert code == 0, said
    assert files(tmp_path / "three") == files(alone)
    assert json.loads((tmp_path / "three" / "manifest.json").read_text())["selection"]["processes"] == 3


@pytest.mark.slow
def test_torchrun_writes_the_files_of_one(inputs, alone, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW, encoding="utf-8")
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "slow.py"))
    code, said = done(started(flags(inputs, tmp_path / "torchrun", "--mesh.stall", "5"), module=torchrun))
    assert code == 0, said
    assert "lags" not in said, "what rank 0 solves for all is no lag"
    assert files(tmp_path / "torchrun") == files(alone)


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_and_the_same_command_goes_on_to_the_same_bits(inputs, alone, tmp_path, rank):
    command = flags(inputs, tmp_path / "out", "--processes", "2")
    process = started(command)
    kept, deadline = tmp_path / "out" / "state" / "kept", time.monotonic() + HANG_S
    while not all(list(kept.glob(f"pass-*-process-{each}.npz")) for each in (0, 1)):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(child(process.pid, rank), signal.SIGKILL)
    code, said = done(process)
    assert code == 3, said
    assert f"rank {rank} (pid " in said and "run the same command again" in said and "train --resume" not in said
    code, said = done(started(command))
    assert code == 0, said
    assert "continuing the unfinished selection" in said and "the transport solve continued after pass" in said
    assert files(tmp_path / "out") == files(alone)


def child(launcher, rank):
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((place / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == launcher and f"RANK={rank}".encode() in (place / "environ").read_bytes().split(b"\0"):
                return int(place.name)
        except OSError:
            continue
    raise AssertionError(f"rank {rank} of {launcher} is not there")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--processes", "2", "--method", "knn"), "select.method.kind: knn is not divided among processes"),
        (("--processes", "2", "--select.method.rounds", "3"), "select.method.rounds: 3 rounds are solved in one"),
        (("--processes", "2", "--select.method.debiased", "true"), "select.method.debiased: "),
        (("--processes", "0"), "--processes must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_divided_is_refused_in_one_sentence(inputs, tmp_path, capsys, more, told):
    given = [
        word for word in flags(inputs, tmp_path / "out", *more) if word not in ("--select.method.tolerance", "1e-7")
    ]
    assert cli.run(given) == 2
    said = capsys.readouterr().err
    assert told in said and len(said.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_more_processes_than_blocks_and_bad_rows_are_told_by_record(inputs, tmp_path):
    x = np.load(inputs / "x.npy")
    few = tmp_path / "few.npy", tmp_path / "few.jsonl"
    np.save(few[0], x[:5000])
    few[1].write_text("\n".join((inputs / "pool.jsonl").read_text(encoding="utf-8").splitlines()[:5000]))
    words = flags(inputs, tmp_path / "out", "--processes", "3", "--pool-features", str(few[0]))
    words[words.index("--pool") + 1] = str(few[1])
    code, said = done(started(words))
    assert code == 2 and "--processes 3: 5,000 records are 2 blocks of 4,096 rows" in said, said
    x[20_000, 3] = np.nan
    np.save(tmp_path / "x.npy", x)
    bad = ["--pool-features", str(tmp_path / "x.npy")]
    code, said = done(started([*flags(inputs, tmp_path / "out", "--processes", "2"), *bad]))
    assert code == 2 and "pool features: row 20000 holds a NaN" in said and "'pool-20000'" in said, said
    assert not (tmp_path / "out").exists()


def test_a_rank_that_lags_is_named(monkeypatch):
    clock = iter([0.0, 9.0, 11.0, 50.0, 53.0, 90.0])
    monkeypatch.setattr(time, "process_time", lambda: next(clock))
    pace = _CpuTimer()
    for stage, done in (
        ("pass 1", 1),
        ("pass 1", 2),
        ("pass 1", 4),
        (ITERATIONS, 64),
        (ITERATIONS, 128),
        ("pass 2", 1),
    ):
        pace.note(stage, done)
    assert pace.seconds == 11.0 / 3 and _CpuTimer().seconds == 0.0
    assert _slow_rank_warning([("a:1", 0.0), ("b:2", 0.0), ("c:3", 1.0)]) is None
    assert _slow_rank_warning([("a:1", 1.0), ("b:2", 1.2), ("a:3", 1.1)]) is None
    assert _slow_rank_warning([("a:1", 1.0), ("b:2", 3.0), ("a:3", 1.0)]) == (
        "rank 1 (b:2) lags: 3.0 times the CPU time a row of the median"
    )
