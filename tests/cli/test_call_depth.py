"""The path from the command to the optimizer is short: a reader steps through six files' frames, not through a maze."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from flatshift.cli import run
from flatshift.finetune.train.optimizer import AdapterOptimizer
from tests.cli.test_mesh_contract import SMALL
from tests.support.commands import flags


def path_from_the_command() -> list[str]:
    """Names of the frames from the command's own `run` to the caller, without those of libraries."""
    frames = [
        f"{Path(frame.filename).parent.name}/{Path(frame.filename).name}:{frame.function}"
        for frame in inspect.stack()[1:]
    ]
    return frames[frames.index("commands/train.py:run") :: -1]


def test_six_frames_to_the_optimizer_and_seven_to_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[str]] = {}
    step, backward = AdapterOptimizer.step, torch.Tensor.backward

    def noting(name, call):
        def wrapper(*args, **kwargs):
            seen[name] = [*path_from_the_command()[:-1], name]  # the wrapper stands for the call
            return call(*args, **kwargs)

        return wrapper

    monkeypatch.setattr(AdapterOptimizer, "step", noting("optimizer.step", step))
    monkeypatch.setattr(torch.Tensor, "backward", noting("backward", backward))
    assert run(["train", "classify", "--out", str(tmp_path / "run"), *flags(SMALL)]) == 0
    assert len(seen["optimizer.step"]) <= 6, seen["optimizer.step"]
    assert len(seen["backward"]) <= 7, seen["backward"]
    assert "train/trainer.py:fit" in seen["backward"] and "train/trainer.py:step" in seen["backward"]
