"""What a person sees while a command works: nothing for long is silent, and plans are told in short."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from flatshift.experiments.run.console import Console, pause_heartbeat, print_heartbeat
from flatshift.finetune.errors import Interrupted


def test_silence_is_broken_unless_somebody_else_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    with print_heartbeat("flatshift merge", every=0.05):
        time.sleep(0.4)
    told = capsys.readouterr().err.splitlines()
    assert 2 <= len(told) <= 4 and set(told) == {"flatshift merge: at work for 0 s"}  # ever more rarely into a pipe
    console = Console()
    with print_heartbeat("flatshift train", every=0.05), console.task("fine-tune", 8):
        time.sleep(0.2)
    assert "flatshift train: at work for 0 s (fine-tune)\n" in capsys.readouterr().err
    with pytest.raises(Interrupted), console.task("upload", 8):
        raise Interrupted("as a signal does")
    with print_heartbeat("flatshift train", every=0.05), console.task("outer", 8):
        with console.task("inner", 8):
            pass
        time.sleep(0.2)
    lines = [line for line in capsys.readouterr().err.splitlines() if "at work" in line]
    assert lines and set(lines) == {"flatshift train: at work for 0 s (outer)"}
    with print_heartbeat("flatshift train", every=1.0):
        for _ in range(12):
            console.say("loss")
            time.sleep(0.1)
    assert "at work" not in capsys.readouterr().err
    with print_heartbeat("flatshift train", every=0.05), pause_heartbeat():
        time.sleep(0.2)
    time.sleep(0.1)  # and none after its end
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("quiet", "verbose", "shown"), [(False, False, "a\n"), (False, True, "a\nb\n"), (True, True, "")]
)
def test_an_outline_is_printed_and_the_whole_is_logged(capsys, quiet: bool, verbose: bool, shown: str) -> None:
    log: list[str] = []
    Console(quiet=quiet, verbose=verbose, log=log.append).outline(["a"], ["a", "b"])
    assert capsys.readouterr().err == shown and log == ["a", "b"]


def test_the_pace_after_a_resume_is_that_of_this_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("flatshift.experiments.run.console.time.monotonic", lambda: now[0])
    with Console().task("fine-tune", 400, "steps") as bar:
        now[0] = 10.0
        bar(236)
        for step in (237, 238):
            now[0] += 4.5
            bar(step)
        assert "ETA" not in capsys.readouterr().err, "two steps are no pace"
        now[0] += 1.0
        bar(239)
        for step in range(240, 246):
            now[0] += 0.5
            bar(step)
    assert capsys.readouterr().err.splitlines()[-1] == "fine-tune: 245/400, 0.692 steps/s, 23 s, ETA 78 s"


def test_a_slow_first_step_and_a_rollback_do_not_move_the_estimate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nine steps of a second, whatever the first one took; one that is rolled back is made again."""
    now = [0.0]
    monkeypatch.setattr("flatshift.experiments.run.console.time.monotonic", lambda: now[0])
    with Console().task("fine-tune", 20, "steps") as bar:
        bar(0)
        for step, seconds in ((1, 90.0), (2, 1.0), (3, 1.0), (4, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 1.0)):
            now[0] += seconds
            bar(step)
    assert capsys.readouterr().err.splitlines()[-1] == "fine-tune: 5/20, 1 steps/s, 97 s, ETA 15 s"


def test_an_evaluation_is_followed_row_by_row_and_token_by_token(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [100.0]
    monkeypatch.setattr("flatshift.experiments.run.console.time", SimpleNamespace(monotonic=lambda: clock[0]))
    with Console().evaluating("evaluating test", 8) as beat:
        beat(0)
    assert capsys.readouterr().err == ""  # nothing is said of what takes no time
    stop = [False]
    ended = pytest.raises(Interrupted, match="evaluating test stopped after 4 of 8 rows")
    with ended, Console().evaluating("evaluating test", 8, stop=lambda: stop[0]) as beat:
        for rows in (0, 4, 0, 0):
            clock[0] += 5
            beat(rows)
        stop[0] = True
        beat(0)
    said = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[1:] for line in said] == [
        ["token 1 of the next answers"], [], ["token 1 of the next answers"], ["token 2 of the next answers"],
    ]  # fmt: skip
    assert said[1] == "evaluating test: 4/8, 0.8 rows/s, 10 s", "one batch is no pace"
