"""`flatshift compare` through the public command: kills survived, exit codes, help without torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flatshift.cli import run
from tests.support.commands import flags
from tests.support.comparison_study import make_study
from tests.support.killed_study import COMPARE, kill_and_go_on


@pytest.mark.slow
def test_a_killed_study_goes_on_and_keeps_its_cells(tmp_path: Path) -> None:
    recipe, out = make_study(tmp_path), tmp_path / "out"
    kill_and_go_on(COMPARE, recipe, out, "--tasks", "easy", "--comparison.seeds", "2", cells=3)
    document = json.loads((out / "comparison.json").read_text(encoding="utf-8"))
    assert {row["trials"] for row in document["trials"]} == {8}


def test_sharpness_is_the_rise_within_the_noise_that_is_asked_for(tmp_path: Path, capsys) -> None:
    recipe, rises = make_study(tmp_path), {}
    quick = {"tuning_seeds": "[1000003]", "finalists": 1, "rounds": 0, "lr": "[0.005,0.01]", "seeds": 2}
    quick |= {"exploratory_seeds": 2, "equal_time_above": 1000}
    words = ["compare", str(recipe), "--data", str(tmp_path), "--tasks", "easy", "--jobs", "1", "--train.steps", "1"]
    words += flags({f"comparison.{key}": value for key, value in quick.items()})
    for sigma in (0.05, 0.2):
        out = tmp_path / f"sigma-{sigma}"
        assert run([*words, "--comparison.sharpness_sigma", str(sigma), "--out", str(out), "--json"]) == 0
        document = json.loads((out / "comparison.json").read_text(encoding="utf-8"))
        assert json.loads(capsys.readouterr().out) == document
        rises[sigma] = document["tasks"]["easy"]["methods"]["plain"]["sharpness"]
    assert abs(rises[0.2]) > 4 * abs(rises[0.05]) > 0  # about 16 times: in proportion to σ²


def test_mistakes_exit_with_2_and_leave_nothing(tmp_path: Path, capsys) -> None:
    recipe = make_study(tmp_path)
    assert run(["compare", str(recipe)]) == 2
    assert run(["compare", "classify", "--out", str(tmp_path / "x")]) == 2
    assert run(["compare", str(recipe), "--out", str(tmp_path / "x"), "--data", str(tmp_path), "--tasks", "esy"]) == 2
    assert "did you mean 'easy'" in capsys.readouterr().err
    assert run(["compare", str(recipe), "--out", str(tmp_path), "--data", str(tmp_path)]) == 2
    assert "not a comparison's directory" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_trials_without_a_metric_end_in_a_sentence_and_are_counted_once(tmp_path: Path, capsys) -> None:
    recipe, scores = make_study(tmp_path), tmp_path / "scores.jsonl"
    rows = ({"text": f"the cat {i}", "label": i % 5, "split": "train" if i < 22 else "test"} for i in range(30))
    scores.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    laid = {
        "task": "regress", "backbone": tmp_path / "gpt2", "train.steps": 1, "comparison.metric": "pearson",
        "comparison.tasks": "{scores: {file: scores.jsonl, train: 12, validation: 1, test: 8}}",
        "comparison.rounds": 0,
    }  # fmt: skip
    words = ["compare", str(recipe), "--data", str(tmp_path), "--out", str(tmp_path / "out"), "--jobs", "1"]
    words += ["--tasks", "scores"]
    assert run([*words, *flags(laid)]) == 2
    assert "pearson is undefined on the rows of comparison.tasks.scores.validation" in capsys.readouterr().err
    _, *others = cells = sorted((tmp_path / "out" / "cells").iterdir())
    shutil.rmtree(cells[0])
    assert run([*words, *flags(laid)]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.endswith(("to run", "done before"))]
    assert said == [f"compare, first trials: {len(cells)} cells, {len(others)} done before, 1 to run"]


def test_help_and_plan_mistakes_do_not_import_torch() -> None:
    code = (
        "import sys; from flatshift.cli import run; run(['compare', '--help']); "
        "import flatshift.experiments.recipe.schema; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
