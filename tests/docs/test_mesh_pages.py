"""The pages about meshes: generated ones are fresh, commands are valid recipes, tables are what the code computes."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flatshift.experiments.recipe import from_override, load_recipe
from flatshift.finetune.config import Adapter, Mesh, Train
from flatshift.finetune.parallel.pipeline_plan import bubble_fraction, virtual_stages
from flatshift.finetune.planner.footprint import predict_footprint
from flatshift.finetune.planner.rules import RuleSettings, check_settings
from flatshift.finetune.planner.sizes import BackboneSizes
from tests.finetune.planner.test_layouts import llama
from tests.support.patience import HANG_S

ROOT = Path(__file__).resolve().parents[2]
START = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
CHOOSE = (ROOT / "docs" / "which-mesh.md").read_text(encoding="utf-8")
# hidden, feed-forward, blocks, heads, key-value heads, vocabulary
MODELS = {
    "Llama 2 7 B": (4096, 11008, 32, 32, 32, 32000),
    "Llama 3.1 8 B": (4096, 14336, 32, 32, 8, 128256),
    "Llama 3.1 70 B": (8192, 28672, 80, 64, 8, 128256),
    "Llama 3.1 405 B": (16384, 53248, 126, 128, 8, 128256),
}
TINY = shlex.split(
    "--train.steps 2 --train.batch_size 4 --train.max_length 32 --train.max_cut 1 --train.device cpu "
    "--train.precision fp32 --train.eval_every 0 "
    "--data.train.limit 40 --data.dev.limit 8 --data.test.limit 8 --eval.train_limit 0 "
    "--eval.bootstrap 10"
)


def load(path: Path) -> Any:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands() -> list[list[str]]:
    """The words of every command on the page that trains a recipe."""
    lines = [line for block in re.findall(r"```bash\n(.*?)```", START, re.DOTALL) for line in block.splitlines()]
    return [shlex.split(line) for line in lines if "flatshift train" in line and "--resume" not in line]


def overrides(words: list[str]) -> dict[str, str]:
    """The dotted flags after `train`."""
    own = words[words.index("train") :]
    return {name[2:]: value for name, value in itertools.pairwise(own) if name.startswith("--") and "." in name}


def table(page: str, first: str) -> dict[str, dict[str, str]]:
    """Rows by their first cell, cells by their heading, of the table that has a row called `first`."""
    lines = page.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    while lines[at - 1].startswith("|"):
        at -= 1
    rows = []
    while at < len(lines) and lines[at].startswith("|"):
        rows.append([cell.strip() for cell in lines[at].strip("|").split("|")])
        at += 1
    head, _, *body = rows
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in body}


def test_support_matrix_is_fresh() -> None:
    script = load(ROOT / "scripts" / "write_support_matrix.py")
    assert script.PAGE.read_text(encoding="utf-8") == script.render_page(), (
        "run: python scripts/write_support_matrix.py"
    )


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_are_valid(words: list[str]) -> None:
    flags = overrides(words)
    recipe = load_recipe("language-model", [from_override(key, value) for key, value in flags.items()]).recipe
    check_settings(RuleSettings(recipe.mesh, recipe.train, recipe.adapter, recipe.task))
    if words[0] != "flatshift":
        counts = [
            int(words[i + 1])
            for i, word in enumerate(words)
            if word.startswith(("--nnodes", "--nodes", "--nproc", "--ntasks", "--num_"))
        ]
        assert math.prod(counts) == recipe.mesh.size


def test_memory_table(tmp_path: Path) -> None:
    for model, cells in table(CHOOSE, "Llama 2 7 B").items():
        sizes = BackboneSizes.read(llama(tmp_path / model, *MODELS[model]), Adapter(rank=16))
        for axis, shown in cells.items():
            name, width = axis.strip("`").split()
            mesh = Mesh(**{name: int(width)})
            train = Train(batch_size=mesh.dp, max_length=2048, precision="bf16", checkpointing="full")
            total = predict_footprint(sizes, mesh=mesh, adapter=Adapter(rank=16), train=train).total / 2**30
            assert shown == (f"{total:.0f} GiB" if total >= 10 else f"{total:.1f} GiB"), (model, axis)


def test_bubble_table() -> None:
    for name, cells in table(CHOOSE, "`pp 2`, `1f1b`").items():
        pp, schedule = re.findall(r"`(?:pp )?([\w-]+)`", name)
        for heading, shown in cells.items():
            pieces = int(heading.split()[0])
            if pieces < int(pp):
                assert shown == "–"
            else:
                assert shown == f"{bubble_fraction(int(pp), virtual_stages(schedule, None), pieces, schedule):.0%}"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_launchers_of_the_page(launcher: str, tmp_path: Path) -> None:
    (words,) = [words for words in commands() if words[0] == launcher and "--nnodes" not in words]
    out = words[words.index("--out") + 1]
    module = {"torchrun": ["torch.distributed.run"], "accelerate": ["accelerate.commands.accelerate_cli"]}[launcher]
    result = subprocess.run(
        [sys.executable, "-m", *module, *words[1:], *TINY],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "on dp 2, cpu" in (tmp_path / out / "log.txt").read_text(encoding="utf-8")
    assert json.loads((tmp_path / out / "eval.json").read_text(encoding="utf-8"))["test"]["loss"]["value"] > 0
