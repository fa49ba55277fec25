"""The work queue: dead workers, cells that kill, full disks, two sweeps in one directory, results of other code."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from flatshift.experiments.recipe import load_recipe
from flatshift.experiments.recipe.schema import SweepOptions
from flatshift.experiments.results.cells import RESULT, read_result
from flatshift.experiments.run.console import Console
from flatshift.experiments.studies import run_cells
from flatshift.experiments.studies.cell import CellResult, finish_cell
from flatshift.experiments.studies.directory import await_orphans, read_results, stale_results, study_lock
from flatshift.experiments.studies.executors.local import LocalExecutor, choose_devices, uses_cuda, with_device
from flatshift.experiments.studies.progress import CellProgress, CostModel, cost_terms
from flatshift.experiments.studies.sweep import sweep
from flatshift.experiments.studies.sweep.directory import check_directory, claim_directory, write_marker
from flatshift.finetune.errors import Interrupted, UserError
from flatshift.finetune.lock import exclusive_lock
from tests.support.kill_points import kill_points
from tests.support.sweep_cells import Unloadable, behave, cells_that, starts

QUIET = Console(quiet=True)


def spoken() -> tuple[Console, list[str]]:
    lines: list[str] = []
    return Console(quiet=True, log=lines.append), lines


# ------------------------------------------------------------------------------------------- workers that end


def test_no_cell_is_lost_and_none_runs_twice_while_workers_die(tmp_path: Path) -> None:
    cells = cells_that(["ok", "die once", "ok", "die", "boom", "stop once", "ok", "ok"], seeds=2)
    console, lines = spoken()
    run_cells(tmp_path, cells, LocalExecutor(2), console, run=behave)
    results = {cell.key: read_result(tmp_path / "cells" / cell.key) for cell in cells}
    assert all(results.values()), "a cell was lost"
    tries = Counter(starts(tmp_path))
    for cell in cells:
        result, name = results[cell.key], cell.point["behaves"]
        assert result is not None
        assert result["status"] == ("failed" if name in ("die", "boom") else "done")
        assert tries[cell.key] == (2 if name in ("die", "die once", "stop once") else 1), name
        if name == "die":
            assert "SIGKILL" in result["reason"] and "2 times" in result["reason"]
        if name == "boom":
            assert result["reason"] == "RuntimeError: a device failed"
            assert "Traceback" in (tmp_path / "cells" / cell.key / "log.txt").read_text(encoding="utf-8")
        if name == "ok":
            figures = result["metrics"]["test"]
            assert figures["threads"]["value"] == figures["blas"]["value"] == max(1, len(os.sched_getaffinity(0)) // 2)
            assert figures["process"]["value"] != os.getpid()
    assert lines[0] == "sweep: 16 cells, 0 done before, 16 to run"
    assert lines[-1].startswith("sweep: 16/16 cells, 4 failed")
    assert not list(tmp_path.rglob("*.tmp")), "what dead workers were making is still there"
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("cells/*/result.json")}
    (tmp_path / "cells" / ".0000.0123.tmp").mkdir()
    run_cells(tmp_path, cells, LocalExecutor(2), console, run=behave)
    assert not list(tmp_path.rglob("*.tmp"))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("cells/*/result.json")} == stamps
    assert Counter(starts(tmp_path)) == tries, "finished cells ran again"


def test_retries_bound_the_workers_that_a_cell_may_end(tmp_path: Path) -> None:
    (cell,) = cells_that(["die once"])
    run_cells(tmp_path, [cell], LocalExecutor(2, retries=0), QUIET, run=behave)
    result = read_result(tmp_path / "cells" / cell.key)
    assert result is not None and result["status"] == "failed" and "SIGKILL), once; perhaps" in result["reason"]


def test_a_worker_that_is_stopped_gives_back_its_cell(tmp_path: Path) -> None:
    cells = cells_that(["ok", "stop once", "ok"])
    run_cells(tmp_path, cells, LocalExecutor(2), QUIET, run=behave)
    found = [read_result(tmp_path / "cells" / cell.key) for cell in cells]
    assert [r["status"] for r in found if r] == ["done"] * 3
    assert Counter(starts(tmp_path)) == {cells[0].key: 1, cells[1].key: 2, cells[2].key: 1}


def test_a_cell_that_comes_back_goes_to_an_idle_worker(tmp_path: Path) -> None:
    cells = cells_that(["ok", "ok", "die late once"])
    run_cells(tmp_path, cells, LocalExecutor(3), QUIET, run=behave)
    found = [read_result(tmp_path / "cells" / cell.key) for cell in cells]
    assert [result["status"] for result in found if result] == ["done"] * 3


def test_a_cuda_device_has_processes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from flatshift.finetune.planner import devices

    cells = cells_that(["ok"])
    monkeypatch.setattr(devices, "_cuda_devices", lambda: ([1 << 30], None))
    assert uses_cuda(("cuda:0",), cells) and uses_cuda((), cells), "auto is that device"
    assert not uses_cuda(("cpu",), cells)
    monkeypatch.setattr(devices, "_cuda_devices", lambda: ([], None))
    assert not uses_cuda((), cells)


def test_tables_survive_the_same_bisection_and_no_other_plan(tmp_path: Path) -> None:
    base = load_recipe("double-descent")
    search = {"key": "data.train.limit", "low": 8, "high": 90, "epsilon": 0.1}
    plan = {"recipe": "x", "grid": {"data.train.limit": []}, "design": "grid", "seeds": 2, "bisection": search}
    claim_directory(tmp_path, plan, base)
    write_marker(tmp_path, {**plan, "grid": {"data.train.limit": ["8", "27"]}, "cells": 4})
    made = [tmp_path / name for name in ("cells.parquet", "points.csv", "emc.json")]
    for path in made:
        path.touch()
    claim_directory(tmp_path, plan, base)
    assert all(path.exists() for path in made)
    claim_directory(tmp_path, {**plan, "bisection": {**search, "high": 91}}, base)
    assert not any(path.exists() for path in made)


def test_workers_that_cannot_start_end_the_sweep_and_blame_no_cell(tmp_path: Path) -> None:
    cells = cells_that(["ok", "ok"])
    with pytest.raises(Interrupted, match="3 workers in a row ended with code 7"):
        run_cells(tmp_path, cells, LocalExecutor(2), QUIET, run=Unloadable())  # type: ignore[arg-type]
    assert not list(tmp_path.glob("cells/*"))


def test_a_full_disk_leaves_nothing_of_what_other_workers_were_writing(tmp_path: Path) -> None:
    out = tmp_path / "writing"
    out.mkdir()
    with pytest.raises(Interrupted, match="the disk is full"):
        run_cells(out, cells_that(["writing", "full"]), LocalExecutor(2), QUIET, run=behave)
    assert not list(out.rglob(".*.tmp"))


@pytest.mark.parametrize("jobs", [1, 2])
def test_full_disk_ends_the_sweep_and_keeps_what_was_finished(tmp_path: Path, jobs: int) -> None:
    cells = cells_that(["ok", "ok", "full", "ok"])
    with pytest.raises(Interrupted, match="the disk is full"):
        run_cells(tmp_path, cells[:3], LocalExecutor(jobs), QUIET, run=behave)
    kept = read_results(tmp_path, cells)
    assert cells[2].key not in kept and kept.keys() <= {cells[0].key, cells[1].key}
    assert jobs == 2 or len(kept) == 2
    assert not list(tmp_path.rglob(".*.tmp"))
    again = [cell for cell in cells if cell.point["behaves"] == "ok"]
    run_cells(tmp_path, again, LocalExecutor(jobs), QUIET, run=behave)
    tries = Counter(starts(tmp_path))
    assert all(tries[key] == 1 for key in kept)


def test_ctrl_c_says_how_far_it_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(self: CellProgress, note: str = "") -> None:
        if self.finished == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(CellProgress, "tick", pressed)
    with pytest.raises(Interrupted, match="2 of 4 cells finished; the same command continues"):
        run_cells(tmp_path, cells_that(["ok"] * 4), LocalExecutor(1), QUIET, run=behave)


def test_signal_to_the_only_process_stops_the_sweep(tmp_path: Path) -> None:
    with pytest.raises(Interrupted, match="1 of 2 cells finished"):
        run_cells(tmp_path, cells_that(["ok", "stop once"]), LocalExecutor(1), QUIET, run=behave)


def test_whole_seeds_come_first(tmp_path: Path) -> None:
    cells = cells_that(["ok", "ok", "ok"], seeds=2)
    run_cells(tmp_path, cells, LocalExecutor(1), QUIET, run=behave)
    assert starts(tmp_path) == [c.key for c in cells if c.seed == 0] + [c.key for c in cells if c.seed == 1]


# ------------------------------------------------------------------------------------------- whose directory it is


@pytest.mark.parametrize("error", [None, errno.ENOSPC])
def test_a_sweep_that_ends_before_it_has_its_marker_can_be_begun_again(tmp_path: Path, error: int | None) -> None:
    base = load_recipe("double-descent")
    plan = {"recipe": "x", "grid": {}, "design": "grid", "seeds": 2}

    def begin(out: Path) -> None:
        with exclusive_lock(out):
            check_directory(out)
            claim_directory(out, plan, base)

    ended = 0
    for out in kill_points(begin, tmp_path, error=error):
        ended += 1
        begin(out)
        assert json.loads((out / "sweep.json").read_text(encoding="utf-8"))["seeds"] == 2
        assert (out / "recipe.resolved.yaml").is_file() and not list(tmp_path.rglob(".*"))
    assert ended > 10


def test_of_two_sweeps_the_second_is_refused(tmp_path: Path) -> None:
    with exclusive_lock(tmp_path / "out"), pytest.raises(UserError, match=rf"process {os.getpid()}\b"):
        sweep("double-descent", [], tmp_path / "out", SweepOptions(grid=("adapter.rank=1",), seeds=1), quiet=True)
    assert not list(tmp_path.iterdir())


def test_sweep_waits_for_the_workers_of_a_killed_one(tmp_path: Path) -> None:
    code = (
        "import time\nfrom pathlib import Path\nfrom flatshift.experiments.studies.directory import study_lock\n"
        f"with study_lock(Path({str(tmp_path)!r})):\n    print('held', flush=True); time.sleep(0.5)\n"
    )
    orphan = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert orphan.stdout is not None and orphan.stdout.readline() == "held\n"
    began = time.monotonic()
    await_orphans(tmp_path)
    assert time.monotonic() - began > 0.3
    orphan.wait()
    with study_lock(tmp_path), study_lock(tmp_path):
        pass  # workers do not exclude each other


def test_results_of_other_code_are_kept_and_run_anew_only_when_asked(tmp_path: Path) -> None:
    cells = cells_that(["ok"] * 3)
    run_cells(tmp_path, cells, LocalExecutor(1), QUIET, run=behave)
    for cell, other in ((cells[0], {"code": "0" * 12}), (cells[1], {"flatshift": "0.0.1"})):
        path = tmp_path / "cells" / cell.key / RESULT
        found = json.loads(path.read_text(encoding="utf-8")) | other
        del found["seal"]  # as results were before they had one
        path.write_text(json.dumps(found), encoding="utf-8")
    made = stale_results(read_results(tmp_path, cells))
    assert made.keys() == {cells[0].key, cells[1].key}
    assert made[cells[0].key].endswith("0" * 12) and made[cells[1].key].startswith("0.0.1 ")
    run_cells(tmp_path, cells, LocalExecutor(1), QUIET, run=behave)
    assert len(starts(tmp_path)) == 3
    run_cells(tmp_path, cells, LocalExecutor(1), QUIET, run=behave, rerun=set(made))
    assert Counter(starts(tmp_path)) == {cells[0].key: 2, cells[1].key: 2, cells[2].key: 1}
    assert not stale_results(read_results(tmp_path, cells))


def test_damaged_result_is_named(tmp_path: Path) -> None:
    (cell,) = cells_that(["ok"])
    path = tmp_path / "cells" / cell.key / RESULT
    path.parent.mkdir(parents=True)
    path.write_text('{"status": "do', encoding="utf-8")
    with pytest.raises(UserError, match=r"result\.json.*; delete it"):
        run_cells(tmp_path, [cell], LocalExecutor(1), QUIET, run=behave)


@pytest.mark.parametrize("name", [RESULT, "trace.jsonl"])
def test_a_changed_byte_of_a_finished_cell_is_noticed(tmp_path: Path, name: str) -> None:
    cells = cells_that(["ok", "ok"])
    (folder := tmp_path / "cells" / cells[0].key).mkdir(parents=True)
    (folder / "trace.jsonl").write_text('{"stage": "fine-tune", "step": 1, "seconds": 0.25}\n')
    finish_cell(folder, cells[0], CellResult("done", metrics={"test": {"loss": {"value": 1.5, 2: "an int key"}}}))
    assert read_result(folder)["metrics"]["test"]["loss"]["value"] == 1.5  # type: ignore[index]
    file = folder / name
    file.write_text(file.read_text().replace("1.5" if name == RESULT else "0.25", "9.5"))
    with pytest.raises(UserError, match=rf"{name} is not what was saved \(SHA-256 in {RESULT}\); delete"):
        run_cells(tmp_path, cells, LocalExecutor(1), QUIET, run=behave)
    (folder / RESULT).unlink()
    run_cells(tmp_path, cells, LocalExecutor(1), QUIET, run=behave)
    assert all(read_result(tmp_path / "cells" / cell.key) for cell in cells)


# ------------------------------------------------------------------------------------------- devices


def test_devices() -> None:
    assert choose_devices("auto", "auto", count=lambda: 2) == ("cuda:0", "cuda:1")
    assert choose_devices("auto", "auto", count=lambda: 0) == ()
    assert choose_devices("auto", "cpu", count=lambda: 2) == ()
    assert choose_devices("cpu", "auto", count=lambda: 2) == ("cpu",)
    assert choose_devices("1,cuda:0", "auto", count=lambda: 2) == ("cuda:1", "cuda:0")
    for flag, words in (("3", "no cuda:3"), ("gpu", "CUDA numbers"), ("0,0", "twice")):
        with pytest.raises(UserError, match=words):
            choose_devices(flag, "auto", count=lambda: 2)
    assert [LocalExecutor(4, ("cuda:0", "cuda:1")).device(worker) for worker in range(4)] == ["cuda:0", "cuda:1"] * 2
    (cell,) = cells_that(["ok"])
    moved = with_device(cell, "cuda:1")
    assert moved.resolved.recipe.train.device == "cuda:1" and moved.key == cell.key
    assert with_device(cell, None) is cell


# ------------------------------------------------------------------------------------------- what is said


def test_cost_is_learned() -> None:
    from flatshift.experiments.recipe import from_override
    from flatshift.experiments.studies.sweep.sweep_plan import SweepBase

    base = SweepBase.of("double-descent", [from_override("train.max_length", 64)])
    points = [{"adapter.rank": r, "train.steps": s} for r in (1, 4, 16, 64) for s in (50, 200)]
    cells = list(base.cells(points, 1))
    truth = {c.key: 2 + 3e-5 * cost_terms(c)[1] + 4e-6 * cost_terms(c)[2] for c in cells}
    model = CostModel()
    assert model.predict(cells) is None
    model.observe(cells[0], truth[cells[0].key])
    ratio = cost_terms(cells[1])[1] / cost_terms(cells[0])[1]
    assert model.predict([cells[1]]) == pytest.approx(truth[cells[0].key] * ratio)
    for cell in cells[1:6]:
        model.observe(cell, truth[cell.key])
    for cell in cells[6:]:
        assert model.predict([cell]) == pytest.approx(truth[cell.key], rel=1e-6)
    assert model.predict(cells) == pytest.approx(sum(truth.values()), rel=1e-6)


def test_progress_counts_by_point_and_weighs_what_is_left() -> None:
    now = [0.0]
    cells = cells_that(["ok"] * 3, seeds=2)
    console, lines = spoken()
    before = {cells[0].key: {"status": "done", "seconds": 10.0, "reason": None}}
    progress = CellProgress(cells, before, console, label="sweep", workers=2, clock=lambda: now[0])
    for cell in cells[1:3]:
        progress.began(cell)
    # 3 wait at 10 s each, 2 run and count half: 40 s for two workers
    assert progress.eta() == pytest.approx(20)
    now[0] = 30.0
    progress.ended(cells[1], {"status": "done", "seconds": 10.0, "reason": None})
    assert lines == ["sweep: 2/6 cells, 2 cells/min, ETA 18 s  behaves=ok place=0 seed=1"]
    progress.ended(cells[2], {"status": "failed", "seconds": 1.0, "reason": "no rows"})
    progress.began(cells[3])
    assert lines[1] == f"failed {cells[2].key} (behaves=ok place=1 seed=0): no rows"
    rows, hidden = progress.rows()
    assert rows == [
        ("behaves=ok place=0", 2, 2, 0, 0, 0),
        ("behaves=ok place=1", 2, 0, 1, 1, 0),
        ("behaves=ok place=2", 2, 0, 0, 0, 0),
    ]
    assert hidden == 0
    assert [row[0] for row in progress.rows(limit=1)[0]] == ["behaves=ok place=1"] and progress.rows(limit=1)[1] == 2
    assert "ok" in str(progress._renderable().columns[0]._cells)
