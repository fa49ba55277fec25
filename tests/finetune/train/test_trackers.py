"""Trackers take the lines of metrics.jsonl, stay on this machine, and cannot stop a run."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest

from flatshift.finetune.config import Tracker
from flatshift.finetune.errors import UserError
from flatshift.finetune.run_directory import RunDirectory
from flatshift.finetune.train.trackers import Trackers, check_trackers, open_trackers, run_id

LINES = [
    {"stage": "warm-up", "attempt": 1, "split": "train", "step": 1, "loss": 3.0, "lr": 0.1, "note": "text"},
    {"stage": "fine-tune", "attempt": 1, "split": "train", "step": 1, "loss": 2.5, "grad_norm": float("nan")},
    {"stage": "fine-tune", "attempt": 1, "split": "train", "step": 2, "loss": 2.25},
    {"stage": "fine-tune", "attempt": 1, "split": "dev", "step": 2, "loss": 2.75, "accuracy": 0.5},
]


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(tmp_path / "run")


def feed(kinds, run, said, **more):
    trackers = open_trackers(Tracker(kinds=kinds, **more), run, config={"seed": 3}, log=said.append)
    for line in LINES:
        trackers.log(line)
    trackers.close()


class FakeWandb(ModuleType):
    """As much of wandb as is used; remembers what it is told."""

    def __init__(self):
        super().__init__("wandb")
        self.asked, self.rows, self.axes, self.finished = {}, [], {}, 0

    def init(self, **how):
        self.asked = how
        return SimpleNamespace(
            log=self.rows.append,
            define_metric=lambda name, step_metric: self.axes.__setitem__(name, step_metric),
            finish=lambda: setattr(self, "finished", self.finished + 1),
        )


@pytest.mark.parametrize("online", [False, True])
def test_wandb_is_offline_unless_it_is_asked_to_send(online, run, monkeypatch):
    fake, said = FakeWandb(), []
    monkeypatch.setitem(sys.modules, "wandb", fake)
    feed(("wandb",), run, said, online=online, project="p")
    assert fake.asked["mode"] == ("online" if online else "offline") and fake.asked["dir"] == str(run.path / "trackers")
    assert fake.asked["id"] == run_id(run.path) and fake.asked["resume"] == "allow" and fake.asked["project"] == "p"
    assert fake.asked["config"] == {"seed": 3}
    assert fake.rows == [
        {"warm-up/step": 1, "warm-up/train/loss": 3.0, "warm-up/train/lr": 0.1},
        {"fine-tune/step": 1, "fine-tune/train/loss": 2.5},
        {"fine-tune/step": 2, "fine-tune/train/loss": 2.25},
        {"fine-tune/step": 2, "fine-tune/dev/loss": 2.75, "fine-tune/dev/accuracy": 0.5},
    ]
    assert fake.axes == {"warm-up/*": "warm-up/step", "fine-tune/*": "fine-tune/step"}
    assert fake.finished == 1 and said == []


def test_trackio_is_told_names_and_steps(run, monkeypatch):
    fake = ModuleType("trackio")
    calls = []
    fake.init = lambda **how: calls.append(how)
    fake.log = lambda metrics, step: calls.append((step, metrics))
    fake.finish = lambda: calls.append("end")
    monkeypatch.setitem(sys.modules, "trackio", fake)
    feed(("trackio",), run, [])
    assert calls[0]["project"] == "flatshift" and calls[0]["resume"] == "allow" and "space_id" not in calls[0]
    assert calls[-2:] == [(2, {"fine-tune/dev/loss": 2.75, "fine-tune/dev/accuracy": 0.5}), "end"]


def test_a_run_keeps_its_name_when_it_is_moved(run, tmp_path):
    before = run_id(run.path)
    run.path.rename(tmp_path / "elsewhere")
    assert run_id(tmp_path / "elsewhere") == before


def test_a_tracker_that_fails_is_let_go_with_one_warning():
    said, kept = [], []

    class Broken:
        def log(self, line):
            raise ConnectionError("no route")

        def close(self):
            raise AssertionError("was let go")

    class Fine:
        def log(self, line):
            kept.append(line)

        def close(self):
            kept.append("end")

    trackers = Trackers(said.append)
    trackers.add("broken", Broken)
    trackers.add("fine", Fine)
    trackers.add("absent", lambda: 1 / 0)
    for line in LINES:
        trackers.log(line)
    trackers.close()
    assert kept == [*LINES, "end"]
    assert len(said) == 2 and any("broken failed" in line and "no route" in line for line in said)


def test_ranks_that_do_not_write_have_none(run):
    silent = RunDirectory(run.path, writes=False)
    feed(("tensorboard",), silent, said := [])
    assert not (run.path / "trackers").exists() and said == []


def test_what_is_missing_or_would_send_is_refused(monkeypatch):
    check_trackers(Tracker())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"tracker\.kinds: wandb needs .*flatshift\[track-wandb\]"):
        check_trackers(Tracker(kinds=("wandb",)))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("TRACKIO_SPACE_ID", "me/space")
    with pytest.raises(UserError, match=r"tracker\.online: TRACKIO_SPACE_ID is set"):
        check_trackers(Tracker(kinds=("trackio",)))
    check_trackers(Tracker(kinds=("trackio",), online=True))


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not here")
def test_tensorboard_files_read_back_without_the_steps_that_were_taken_again(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    feed(("tensorboard",), run, said := [])
    # resumed from step 1: step 2 comes once more, and is another
    again = open_trackers(Tracker(kinds=("tensorboard",)), run, config={}, log=said.append)
    again.log({"stage": "fine-tune", "attempt": 2, "split": "train", "step": 2, "loss": 2.125})
    again.close()
    assert said == []
    folder = run.path / "trackers" / "tensorboard"
    found = EventAccumulator(str(folder / "fine-tune"))
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("train/loss")] == [(1, 2.5), (2, 2.125)]
    other = EventAccumulator(str(folder / "warm-up"))
    other.Reload()
    assert sorted(other.Tags()["scalars"]) == ["train/loss", "train/lr"]
