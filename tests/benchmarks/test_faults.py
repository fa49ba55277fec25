"""The campaign's own parts: which faults a call can have, what a power cut leaves, and that a strike is seen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults import durable_calls as durable
from benchmarks.faults.power import Disk, disks_of
from benchmarks.faults.scenarios import SCENARIOS, SMALL

ROOT = Path("/root-of-a-record")


def call(kind: str, name: str, other: str | None = None, at: int = 0, data: bytes = b"") -> durable.Call:
    return durable.Call(kind, ROOT / name, None if other is None else ROOT / other, at, data)


WRITTEN = [
    call("open", ".a.tmp"),
    call("write", ".a.tmp", data=b"new"),
    call("sync", ".a.tmp"),
    call("rename", ".a.tmp", "a"),
    call("sync directory", "."),
]


def test_an_atomic_write_is_there_whole_or_not_at_all_after_any_power_cut():
    for kind, _, files in disks_of(WRITTEN, ROOT).values():
        assert files.get("a") in (None, b"new"), kind
    disk = Disk()
    for each in WRITTEN:
        disk.apply(each, ROOT)
    assert disk.after("strict") == {"a": b"new"}


def test_a_write_that_is_not_synced_is_torn_by_some_power_cut():
    careless = [each for each in WRITTEN if not each.kind.startswith("sync")]
    left = [files.get("a") for _, _, files in disks_of(careless, ROOT).values()]
    assert b"" in left and b"\0\0\0" in left


def test_names_and_bytes_follow_the_record():
    disk = Disk()
    more = [
        call("mkdir", "d"),
        call("open", "d/b"),
        call("write", "d/b", data=b"0123"),
        call("write", "d/b", at=2, data=b"xyz"),
        call("truncate", "d/b", at=4),
        call("link", "d/b", "d/c"),
        call("rename", "d", "e"),
        call("unlink", "e/b"),
    ]
    for each in [*WRITTEN, *more]:
        disk.apply(each, ROOT)
    assert disk.after("journal") == {"a": b"new", "e": None, "e/c": b""}
    assert disk.after("zeros") == {"a": b"new", "e": None, "e/c": b"\0" * 4}
    assert disk.after("strict") == {"a": b"new"}


def test_each_call_has_the_faults_that_make_a_difference():
    assert durable.modes_of(call("sync", "a")) == ["I/O error"]
    assert set(durable.modes_of(call("write", "a", data=b"12"))) == set(durable.MODES)
    assert "short write" not in durable.modes_of(call("write", "a", data=b"1"))
    assert SMALL["train.save_every"] == 1 and len(SCENARIOS) >= 9


@pytest.mark.skipif(durable.missing() is not None, reason=str(durable.missing()))
def test_a_strike_is_made_and_counted(tmp_path):
    """In a process of its own, behind the compiled library: the second write falls short, then the disk is full."""
    code = """
import os, sys
from pathlib import Path
from benchmarks.faults import durable_calls as durable
disk = Path(sys.argv[1])
def write():
    fd = os.open(disk / "f", os.O_WRONLY | os.O_CREAT)
    sizes = [os.write(fd, b"1234"), os.write(fd, b"5678")]
    os.close(fd)
    (disk / "f").rename(disk / "g")
    (disk / "g").unlink()
    return sizes
with durable.struck(disk.parent / "c", disk, log=disk.parent / "log"):
    assert write() == [4, 4]
calls = durable.read_log(disk.parent / "log")
assert [each.kind for each in calls] == ["open", "write", "write", "rename", "unlink"], calls
assert [each.data for each in calls[1:3]] == [b"1234", b"5678"] and [each.at for each in calls[1:3]] == [0, 4]
assert [each.number for each in calls] == [0, 1, 2, 3, 4]
with durable.struck(disk.parent / "c2", disk, mode=durable.SHORT, target=2) as control:
    assert write() == [4, 2] and control.hit == 2
for mode, number in ((durable.FULL, 28), (durable.IO_ERROR, 5)):
    with durable.struck(disk.parent / f"c{mode}", disk, mode=mode, target=0):
        try:
            write()
        except OSError as error:
            assert error.errno == number
        else:
            raise AssertionError(mode)
assert write() == [4, 4]
"""
    (tmp_path / "disk").mkdir()
    library = durable.build(tmp_path)
    environment = {"LD_PRELOAD": str(library), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "disk")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
