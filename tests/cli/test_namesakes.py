"""One import name: ours are modules of `flatshift`, whatever else carries the names of our rooms."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path

import pytest

from flatshift.commands.eval import Flags
from flatshift.experiments.recipe import load_recipe
from flatshift.experiments.run.console import Console
from flatshift.experiments.workflows.evaluation_target import resolve_subjects
from flatshift.experiments.workflows.tokenizer import open_tokenizer
from tests.cli.test_mesh_contract import SMALL, flatshift
from tests.support.commands import flags

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("finetune", "experiments", "selection", "regularizers")
BARE = re.compile(rf"^\s*(?:>>> )?(?:from|import) (?:{'|'.join(ROOMS)})\b", re.M)


def sources(*suffixes: str) -> list[Path]:
    """Every committed file of these kinds."""
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name.endswith(suffixes) and (ROOT / name).is_file()]


def test_a_folder_of_that_name_is_no_shipped_backbone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example the results of its evaluation."""
    monkeypatch.chdir(tmp_path)
    Path("flatshift-5m").mkdir()
    assert load_recipe("classify").recipe.backbone == "flatshift-5m"
    assert len(open_tokenizer("flatshift-5m")) == 4096
    assert not Flags._is_run("flatshift-5m")
    (subject,) = resolve_subjects(["flatshift-5m"], [], True, Console(quiet=True))
    assert subject.recipe.backbone == "flatshift-5m"


def test_nothing_of_ours_is_imported_by_another_name() -> None:
    found = []
    for file in sources(".py", ".pyi"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            found += [f"{file}:{node.lineno}: {name}" for name in names if name.split(".")[0] in ROOMS]
    assert found == []


def test_no_page_shows_another_name() -> None:
    assert [
        str(page) for page in sources(".md", ".ipynb", ".yaml") if BARE.search(page.read_text(encoding="utf-8"))
    ] == []


@pytest.mark.slow
def test_the_three_journeys_run_in_a_folder_of_namesakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the command as a module, nor its ranks, nor the workers of a study import what the user wrote."""
    monkeypatch.chdir(tmp_path)
    for name in ("finetune", "random", "regularizers", "selection", "json"):
        Path(f"{name}.py").write_text("raise SystemExit('what the user wrote runs')\n")
    Path("experiments").mkdir()
    Path("experiments/__init__.py").write_text("raise SystemExit('what the user wrote runs')\n")
    pool, target = "sample:banking/train", "sample:banking/dev"
    flatshift("select", "--pool", pool, "--target", target, "--budget", "5", "--out", "picked")
    assert len(Path("picked/selected.jsonl").read_text(encoding="utf-8").splitlines()) == 5
    small = flags(SMALL | {"train.steps": 2, "train.eval_every": 0, "train.save_every": 0, "eval.cold": 0})
    for out, mesh in ("alone", ()), ("mesh", ("--mesh.dp", "2")):
        flatshift("train", "classify", "--out", out, *small, *mesh)
        assert Path(out, "eval.json").is_file()
    flatshift(
        "sweep", "classify", "--out", "sweep", *small, "--grid", "adapter.rank=1,2", "--seeds", "1", "--jobs", "1"
    )
    results = [json.loads(file.read_text())["status"] for file in Path("sweep", "cells").glob("*/result.json")]
    assert results == ["done", "done"]
