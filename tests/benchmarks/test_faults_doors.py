"""Every door that a stranger's things come in by is shut, and one that is open is told."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.faults import doors
from benchmarks.faults.door_requests import _judge
from benchmarks.faults.door_texts import _formulas
from benchmarks.faults.doors import Case, Place, Said, all_cases, check_sentence, draw, holders

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("share", [40, pytest.param(1, marks=pytest.mark.slow)])
def test_doors_are_shut(share: int) -> None:
    """A fortieth of the cases, always the same, and all of them; in a process that forks before it computes."""
    command = [sys.executable, "-m", "benchmarks.faults.doors", "--most", str(len(all_cases()) // share)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-300:]
    assert done.stdout.endswith(" cases, 0 open\n")


def test_there_are_cases_of_every_door() -> None:
    cases = all_cases()
    assert len(cases) >= 400 and len({(case.door, case.name) for case in cases}) == len(cases)
    assert {case.door for case in cases} >= {"serve", "secrets", "console", "templates", "directories"}
    assert draw(cases, 40, 0) == draw(cases, 40, 0) != draw(cases, 40, 1) and draw(cases, None, 0) == cases


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (Said(70, "Traceback"), "exit code 70"), (Said(0, "Traceback (most recent"), "exit code 0"),
        (Said(-9, ""), "exit code -9"), (Said(0, "a\x1b[31m"), "prints"), (Said(0, "\u202e"), "prints"),
        (Said(2, "https://ann:s3cret@h"), "secret"),
    ],
)  # fmt: skip
def test_what_no_command_may_do_is_seen(said: Said, words: str) -> None:
    assert words in said.faults() and not Said(2, "flatshift: error: \\u001b\n").faults()
    assert check_sentence(said, "place")


def test_what_came_of_a_case_is_seen(tmp_path: Path) -> None:
    error = "flatshift: error: the place is wrong"
    assert not check_sentence(Said(2, f"note\n{error}\n"), "place") and check_sentence(Said(2, error), "other")
    assert check_sentence(Said(1, error), "place") and check_sentence(Said(2, f"{error}\n{error}"), "place")
    assert "status 200" in _judge((200, "{}"), 403) and not _judge((200, "{}"), 200)
    refusal = '{"error": {"type": "invalid_request_error", "message": "no", "param": "n"}}'
    assert not _judge((400, refusal), 400, "n") and "names n" in _judge((400, refusal), 400, "seed")
    (tmp_path / "a.csv").write_text("id,text\n'=1,x\n")
    assert not _formulas(tmp_path)
    (tmp_path / "b.tsv").write_text("id\ttext\n1\t=1\n")
    assert "b.tsv has the cell '=1'" in _formulas(tmp_path)
    assert not holders(tmp_path) and holders(tmp_path, "=1") == ["a.csv", "b.tsv"]


def test_a_door_that_is_open_is_told(monkeypatch, capsys) -> None:
    monkeypatch.setattr(doors, "_import_commands", lambda: None)

    @contextlib.contextmanager
    def prints() -> Iterator[None]:
        os.write(1, b"\x1b]0;x\x07")
        yield

    def steers(place: Place) -> str:
        return place.flatshift("--version", cwd=place.folder(), around=prints).faults()

    def fails(place: Place) -> str:
        raise ConnectionResetError("gone")

    def shut(place: Place) -> str:
        return place.flatshift("--version", cwd=place.folder()).faults()

    found = doors.try_cases([Case("console", "a", steers), Case("serve", "b", fails), Case("console", "c", shut)])
    assert [bool(wrong) for _, wrong in found] == [True, True, False]
    assert "ConnectionResetError: gone" in capsys.readouterr().err
