"""The study of selectors through its own command: a kill survived, exit codes, light imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.studies.selection_quality.__main__ import main
from flatshift.cli import run
from tests.support.killed_study import SELECTORS, kill_and_go_on
from tests.support.quality_study import make_study


@pytest.mark.slow
def test_a_killed_study_goes_on_and_keeps_its_cells(tmp_path: Path) -> None:
    recipe, out = make_study(tmp_path), tmp_path / "out"
    printed, _ = kill_and_go_on(SELECTORS, recipe, out, "--targets", "bank", "--selectors", "gotd", cells=6)
    document = json.loads((out / "quality.json").read_text(encoding="utf-8"))
    assert set(document["arms"]) == {"random", "gotd"} and set(document["targets"]) == {"bank"}
    assert document["answers"][0] in printed


def test_mistakes_exit_with_2_and_leave_nothing(tmp_path: Path, capsys) -> None:
    recipe = make_study(tmp_path)
    out = str(tmp_path / "x")
    data = ["--data", str(tmp_path)]
    with pytest.raises(SystemExit):
        main([str(recipe)])
    assert main([str(recipe), "--out", out, *data, "--targets", "bnk"]) == 2
    assert "did you mean 'bank'" in capsys.readouterr().err
    assert main([str(recipe), "--out", out, *data, "--set", "quality.seeds=1"]) == 2
    assert "--set quality.seeds: quality.seeds must be between 2 and 10000" in capsys.readouterr().err
    assert main(["flat-comparison", "--out", out, *data]) == 2
    assert "has no `quality` block" in capsys.readouterr().err
    assert run(["compare", str(recipe), "--out", out, *data]) == 2
    assert "unknown key 'quality'" in capsys.readouterr().err
    assert main([str(recipe), "--out", str(tmp_path), *data]) == 2
    assert "not a study's directory" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_settings_do_not_import_torch() -> None:
    code = "import sys; import benchmarks.studies.selection_quality.settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
