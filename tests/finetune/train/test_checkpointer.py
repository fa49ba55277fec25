"""Checkpoints are whole or absent, damaged ones are passed over, and a full disk costs nothing already saved."""

from __future__ import annotations

import errno
import json

import pytest
import torch

from flatshift.finetune.errors import Interrupted
from flatshift.finetune.train import checkpointer as module
from flatshift.finetune.train.checkpointer import (
    checkpoint_steps,
    drop_checkpoints,
    flatten_groups,
    latest_checkpoint,
    save_checkpoint,
    select_group,
)


def tensors(value):
    return {"adapter/a": torch.full((3, 2), float(value)), "exp_avg/a": torch.arange(6.0).reshape(3, 2)}


def save(directory, step, *, stage="s", keep=3):
    return save_checkpoint(directory, step, tensors(step), {"stage": stage, "tokens": 10 * step}, keep=keep)


@pytest.fixture
def warnings():
    return []


def latest(directory, warnings, stage="s"):
    return latest_checkpoint(directory, stage=stage, warn=warnings.append)


def test_round_trip_and_retention(tmp_path, warnings):
    assert latest(tmp_path / "absent", warnings) is None
    for step in (9, 10, 100):
        save(tmp_path, step, keep=2)
    assert checkpoint_steps(tmp_path) == [100, 10]
    found = latest(tmp_path, warnings)
    assert found.step == 100 and found.meta["tokens"] == 1000 and warnings == []
    assert all(torch.equal(found.tensors[n], t) for n, t in tensors(100).items())
    assert sorted(p.name for p in found.path.iterdir()) == ["state.json", "state.safetensors"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: (d / "state.safetensors").write_bytes((d / "state.safetensors").read_bytes()[:-3]),
        lambda d: (d / "state.safetensors").unlink(),
        lambda d: (d / "state.json").write_text("{"),
        lambda d: (d / "state.json").unlink(),
        lambda d: flip(d / "state.safetensors"),
        lambda d: (d / "state.json").write_text(
            (d / "state.json").read_text().replace('"tokens": 200', '"tokens": 201')
        ),
    ],
)
def test_a_damaged_newest_falls_back_with_a_warning_and_does_not_count_among_the_kept(damage, tmp_path, warnings):
    save(tmp_path, 10)
    damage(save(tmp_path, 20))
    found = latest(tmp_path, warnings)
    assert found.step == 10 and len(warnings) == 1 and "step-20 is damaged" in warnings[0]
    save(tmp_path, 15, keep=1)
    assert checkpoint_steps(tmp_path) == [15]


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def test_leftovers_of_killed_saves_are_swept(tmp_path, warnings):
    save(tmp_path, 10)
    (tmp_path / ".step-20.abcd.tmp").mkdir()
    (tmp_path / ".step-20.abcd.tmp" / "state.safetensors").write_bytes(b"half")
    assert latest(tmp_path, warnings).step == 10
    assert [p.name for p in tmp_path.iterdir()] == ["step-10"]


def test_other_stages_are_not_taken_and_dropped_when_the_next_begins(tmp_path, warnings):
    save(tmp_path, 50, stage="warm-up")
    assert latest(tmp_path, warnings, stage="fine-tune") is None
    save(tmp_path, 5, stage="fine-tune")
    drop_checkpoints(tmp_path, other_than="fine-tune")
    assert checkpoint_steps(tmp_path) == [5] and warnings == []


@pytest.mark.parametrize("place", ["safetensors", "json"])
def test_a_full_disk_interrupts_and_keeps_what_was_there(place, tmp_path, warnings, monkeypatch):
    save(tmp_path, 10)

    def full(*arguments, **keywords):
        raise OSError(errno.ENOSPC, "No space left on device", "state")

    if place == "json":
        monkeypatch.setattr(module, "write_json", full)
    else:
        import safetensors.torch

        def worded(*arguments, **keywords):
            raise safetensors.SafetensorError(
                "Error while serializing: I/O error: No space left on device (os error 28)"
            )

        monkeypatch.setattr(safetensors.torch, "save_file", worded)
    with pytest.raises(Interrupted, match=r"disk is full.*resume"):
        save(tmp_path, 20)
    assert [p.name for p in tmp_path.iterdir()] == ["step-10"]
    assert latest(tmp_path, warnings).step == 10


def test_a_save_that_does_not_read_back_is_our_error(tmp_path, monkeypatch):
    digests = iter("abc")
    monkeypatch.setattr(module, "file_sha256", lambda path: next(digests))
    with pytest.raises(RuntimeError, match="does not read back"):
        save(tmp_path, 10)


def test_groups_and_the_json_half_is_readable_by_anyone(tmp_path):
    packed = flatten_groups(a={"x": torch.ones(1)}, b={"x": torch.zeros(1), "y/z": torch.ones(2)})
    assert select_group(packed, "b").keys() == {"x", "y/z"} and select_group(packed, "c") == {}
    record = json.loads((save(tmp_path, 3) / "state.json").read_text())
    assert record["step"] == 3 and record["stage"] == "s" and len(record["sha256"]) == 64
