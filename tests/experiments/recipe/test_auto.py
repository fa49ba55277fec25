"""`mesh.auto` on the command line: decided once, handed to every rank as axes, chosen anew where a run is continued."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flatshift.cli import run
from flatshift.experiments.recipe import from_override, load_recipe
from flatshift.experiments.recipe.auto import find_mesh_overrides, mesh_flags
from flatshift.finetune.launch import consistency, spawn
from flatshift.finetune.launch.job import DirectoryKeyValueStore
from flatshift.finetune.planner import layouts
from flatshift.finetune.planner.devices import Devices

TWO = Devices("cuda", 2, 78 << 30)


def axes(flags: list[str]) -> dict[str, int]:
    """Axis flags as numbers, those that are not 1."""
    assert flags[-1] == "--mesh.auto=false"
    pairs = (flag.removeprefix("--mesh.").split("=") for flag in flags[:-1])
    return {name: int(width) for name, width in pairs if width != "1"}


def recipe(*flags: tuple[str, str]) -> Any:
    return load_recipe("language-model", [from_override(key, value) for key, value in flags]).recipe


@pytest.fixture(autouse=True)
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "detect_devices", lambda device: TWO)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_nothing_is_decided_unasked() -> None:
    assert mesh_flags(recipe(("mesh.dp", "4"))) == []


def test_axes_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert axes(mesh_flags(recipe(("mesh.auto", "true")))) == {"replicate": 2}
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("mesh.auto: 2 CUDA devices on this machine") and len(lines) == 3


def test_a_continued_run_keeps_only_what_is_named() -> None:
    stored = recipe(("mesh.dp", "4"), ("mesh.tp", "2"), ("mesh.auto", "true"))
    assert axes(mesh_flags(stored, set_axes=set())) == {"replicate": 2}
    assert axes(mesh_flags(stored, set_axes={"tp", "auto"})) == {"tp": 2}
    assert find_mesh_overrides([from_override("mesh.tp", "2"), from_override("train.steps", "3")]) == {"tp"}


def test_rank_0_decides_for_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    board = DirectoryKeyValueStore(tmp_path)
    monkeypatch.setattr(consistency, "require_board", lambda: board)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    asked = recipe(("mesh.auto", "true"))
    monkeypatch.setenv("RANK", "0")
    first = mesh_flags(asked)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr("flatshift.experiments.recipe.auto.resolve_mesh", None)
    assert mesh_flags(asked) == first and axes(first) == {"replicate": 4}


def test_the_ranks_get_axes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[Any] = []
    monkeypatch.setattr(spawn, "spawn", lambda command, **more: started.append((command, more)) or 0)
    command = ["train", "language-model", "--out", str(tmp_path / "run"), "--mesh.auto", "true", "--mesh.tp", "2"]
    assert run(command) == 0
    ((words, more),) = started
    assert words[: 2 + len(command)] == ["-m", "flatshift", *command] and more["ranks"] == 2
    assert axes(words[2 + len(command) :]) == {"tp": 2}


def test_deciding_needs_no_torch() -> None:
    code = "from flatshift import commands; import sys, flatshift.experiments.recipe.auto as _; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("kind", "chosen"), [("adamw", {"tp": 2}), ("lora-muon", {"pp": 2})])
def test_the_mesh_goes_with_the_optimizer(
    kind: str, chosen: dict[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(spawn, "spawn", lambda command, **more: started.append(command) or 0)
    monkeypatch.setattr(layouts, "detect_devices", lambda device: Devices("cuda", 2, 0))  # nothing fits
    command = ["train", "language-model", "--out", str(tmp_path / "run"), "--mesh.auto", "true"]
    command += ["--optimizer.kind", kind, "--train.batch_size", "1"]
    assert run(command) == 0
    assert axes(started[0][2 + len(command) :]) == chosen
