"""Workers of a study that die: no cell is lost, the one that ends its workers is known, and the study goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.studies.selection_quality.cells import Runner
from flatshift.experiments.results.cells import read_result
from flatshift.experiments.run.console import Console
from flatshift.experiments.studies.study import claim_study
from flatshift.finetune.errors import UserError
from tests.support.kill_points import kill_points
from tests.support.study_cells import StandIn, run_stand_in


def test_a_dead_worker_costs_one_cell_and_not_the_study(tmp_path: Path) -> None:
    behaves = ["ok", "die", "slow", "die once", "ok"]
    cells = [StandIn(str(i), name) for i, name in enumerate(behaves)]
    lines: list[str] = []
    (tmp_path / "cells").mkdir()
    runner = Runner(
        tmp_path / "cells",
        run_stand_in,
        jobs=2,
        console=Console(quiet=True, log=lines.append),
        label="study",
    )
    runner.run(cells)
    results = [runner.result(cell) for cell in cells]
    assert [result["status"] for result in results] == ["done", "failed", "done", "done", "done"]
    assert results[1]["figure"] is None and "SIGKILL" in results[1]["reason"] and "2 times" in results[1]["reason"]
    assert all((tmp_path / "cells" / cell.key / "result.json").is_file() for cell in cells)
    assert all(runner.done(cell) for cell in cells), "no cell is tried twice by one start"
    again = Runner(tmp_path / "cells", run_stand_in, jobs=1, console=Console(quiet=True), label="")
    assert not again.done(cells[1]) and again.done(cells[3]), "a failed cell runs again with the next start"
    tries = {cell.key: len((tmp_path / "cells" / f"seen-{cell.key}").read_text()) for cell in cells}
    assert tries["1"] == tries["3"] == 2
    assert any(line.startswith("failed 1 (die 1): its worker") for line in lines)


def test_a_cell_that_ended_its_workers_is_not_run_for_its_result(tmp_path: Path) -> None:
    run_stand_in(tmp_path, StandIn("a", "die"), 1, died="its worker process ended")
    found = read_result(tmp_path / "a")
    assert found is not None
    assert (found["status"], found["reason"], found["figure"]) == ("failed", "its worker process ended", None)
    assert not (tmp_path / "seen-a").exists()
    file = tmp_path / "a" / "result.json"
    file.write_text(file.read_text().replace("worker", "porker"))
    with pytest.raises(UserError, match=r"a/result\.json is not what was saved .*; delete it"):
        read_result(tmp_path / "a")


def test_a_study_takes_its_own_directory_and_no_other(tmp_path: Path) -> None:
    out = tmp_path / "study"
    for text in ("a: 1\n", "b: 2\n"):
        claim_study(out, text, "study")
        assert (out / "study.recipe.yaml").read_text() == text, "one after another"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(UserError, match="is not a study's directory"):
        claim_study(tmp_path / "other", "a: 1\n", "study")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["notes.txt"]


def test_a_study_that_was_killed_while_it_claimed_its_directory_can_be_begun_again(tmp_path: Path) -> None:
    for out in kill_points(lambda out: claim_study(out, "a: 1\n", "study"), tmp_path):
        claim_study(out, "a: 1\n", "study")
        assert (out / "cells").is_dir() and not list(out.rglob("*.tmp"))
