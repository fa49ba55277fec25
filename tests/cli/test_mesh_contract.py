"""The public commands on a mesh: the same numbers as one process, on any mesh, also after a resume on another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from flatshift.cli import run
from tests.support import warm_commands
from tests.support.commands import flags
from tests.support.patience import HANG_S

SMALL = {
    "train.steps": 6,
    "train.batch_size": 4,
    "train.max_length": 32,
    "train.max_cut": 1,
    "train.eval_every": 3,
    "train.save_every": 3,
    "train.precision": "fp32",
    "train.device": "cpu",
    "data.train.limit": 40,
    "data.dev.limit": 18,
    "data.test.limit": 21,
    "eval.bootstrap": 50,
    "eval.batch_size": 5,
    "optimizer.eps": 1e-6,
    "optimizer.schedule": "constant",
    "regularizer.kind": "ggpo",
}


def flatshift(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, as a user would."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        [sys.executable, "-m", "flatshift", *words], env=environment, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == code, done.stderr[-3000:]
    return done


def losses(run: Path) -> dict[tuple[str, int], float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {(line["split"], line["step"]): line["loss"] for line in lines}


def assert_same_figures(one: dict[str, Any], other: dict[str, Any]) -> None:
    for split, metrics in one.items():
        for name, figure in metrics.items():
            for key in ("value", "low", "high", "n"):
                assert other[split][name][key] == pytest.approx(figure[key], abs=1e-3), (split, name, key)


def test_one_recipe_on_three_meshes_and_in_one_process(tmp_path: Path) -> None:
    one, mesh = tmp_path / "one", tmp_path / "mesh"
    assert run(["train", "classify", "--out", str(one), *flags(SMALL | {"train.threads": 1})]) == 0
    half = flags(SMALL | {"train.steps": 3})
    said = warm_commands.flatshift("train", "classify", "--out", str(mesh), *half, "--mesh.dp", "2").stderr
    assert "on dp 2" in said and said.count("plan:") == 1
    assert "gathered along dp" in (mesh / "log.txt").read_text(encoding="utf-8"), "the whole plan"
    warm_commands.flatshift("train", "--resume", str(mesh), "--train.steps", "6", "--mesh.dp", "1", "--mesh.tp", "2")
    assert "the same curve to rounding" in (mesh / "log.txt").read_text(encoding="utf-8")

    ours, theirs = losses(mesh), losses(one)
    assert ours.keys() == theirs.keys()
    assert max(abs(ours[key] - theirs[key]) for key in ours) < 3e-5
    files = [load_file(run / "adapter" / "adapter_model.safetensors") for run in (one, mesh)]
    assert files[0].keys() == files[1].keys()
    for name, tensor in files[0].items():
        assert (tensor - files[1][name]).abs().max() < 1e-4, name
    configs = [json.loads((run / "adapter" / "adapter_config.json").read_text()) for run in (one, mesh)]
    for config in configs:
        config["target_modules"].sort()  # a set
    assert configs[0] == configs[1]

    figures = json.loads((one / "eval.json").read_text(encoding="utf-8"))
    assert_same_figures(figures, json.loads((mesh / "eval.json").read_text(encoding="utf-8")))
    again = warm_commands.flatshift("eval", str(mesh), "--mesh.tp", "1", "--mesh.pp", "2", "--json").stdout
    assert_same_figures(figures, json.loads(again))


@pytest.mark.slow
def test_every_part_of_a_warm_up_run_on_a_mesh(tmp_path: Path) -> None:
    """Select on one rank, warm up and fine-tune on four, rank labels, answer by generation."""
    warm = {"warmup.steps": 4, "warmup.batch_size": 2, "select.budget": 40, "select.pool.limit": 800}
    warm |= {"select.embedder.dim": 16}
    for name, mesh in (("one", []), ("mesh", ["--mesh.dp", "2", "--mesh.tp", "2"])):
        flatshift("train", "warmup", "--out", str(tmp_path / name), *flags(SMALL | warm), *mesh)
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "mesh"), abs=3e-5)
    for kind in ("before", "eval"):
        file = Path("stages") / "warm-up" / f"{kind}.json"
        one, mesh = (json.loads((tmp_path / name / file).read_text()) for name in ("one", "mesh"))
        assert_same_figures(one, mesh)
    short = SMALL | {"train.steps": 2, "task.kind": "completion", "task.max_new_tokens": 4, "data.test.limit": 7}
    for score in ("rank", "generate"):
        outs = {}
        for name, mesh in (("one", []), ("dp", ["--mesh.dp", "2"]), ("pp", ["--mesh.pp", "2"])):
            out = tmp_path / f"{score}-{name}"
            flatshift("train", "classify", "--out", str(out), *flags(short | {"task.score": score}), *mesh)
            outs[name] = json.loads((out / "eval.json").read_text(encoding="utf-8"))
        assert_same_figures(outs["one"], outs["dp"])
        assert_same_figures(outs["one"], outs["pp"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mesh.dp", "3"], "train.batch_size"),
        pytest.param(["--mesh.tp", "3"], "mesh.tp", marks=pytest.mark.slow),
        pytest.param(["--mesh.pp", "4", "--mesh.schedule", "interleaved"], "mesh.pp", marks=pytest.mark.slow),
        (["--mesh.xp", "2"], "mesh"),
        (["--mesh.cp", "2"], "a head takes the last token"),
    ],
)
def test_a_mesh_that_cannot_be_is_one_sentence(tmp_path: Path, words: list[str], message: str) -> None:
    done = flatshift("train", "classify", "--out", str(tmp_path / "out"), *flags(SMALL), *words, code=2)
    error = [line for line in done.stderr.splitlines() if "error" in line]
    assert len(error) == 1 and message in error[0] and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
