"""Cells by submitit: its local and debug executors, the scripts that Slurm gets, and what a stand-in for Slurm does."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from flatshift.cli import run
from flatshift.experiments.recipe import from_override, load_recipe
from flatshift.experiments.results.cells import read_result
from flatshift.experiments.run.console import Console
from flatshift.experiments.studies import run_cells
from flatshift.experiments.studies.cell import Cell
from flatshift.experiments.studies.executors import Resources, StudyInputs
from flatshift.experiments.studies.executors.slurm import CellJob, SlurmExecutor, load_submitit, submit_jobs
from flatshift.finetune.errors import UserError
from flatshift.finetune.planner.footprint import predict_footprint
from flatshift.finetune.planner.sizes import read_sizes
from tests.support import stand_in_slurm
from tests.support.patience import HANG_S
from tests.support.sweep_cells import behave, cells_that, starts

pytest.importorskip("submitit")
ROOT = Path(__file__).resolve().parents[4]
QUIET = Console(quiet=True)
SMALL = [
    *("--backbone", "flatshift-encoder-3m", "--grid", "adapter.rank=1,2", "--seeds", "1", "--regularizer", "plain"),
    *("--train.steps", "2", "--train.eval_every", "0", "--train.max_length", "24", "--train.precision", "fp32"),
    *("--data.dev.limit", "8", "--data.test.limit", "8", "--eval.bootstrap", "20", "--train.threads", "1"),
    *("--data.train.limit", "24", "--train.device", "cpu"),
]


def words(out: Path, *more: str) -> list[str]:
    return ["sweep", "classify", *SMALL, "--out", str(out), *more]


def metrics(out: Path) -> dict[str, object]:
    return {file.parent.name: json.loads(file.read_text())["metrics"] for file in out.glob("cells/*/result.json")}


def flags_of(script: str) -> dict[str, str]:
    found = re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", script, flags=re.M)
    return {name: value for name, value in found if name not in ("output", "error")}


@pytest.mark.parametrize("cluster", [pytest.param("local", marks=pytest.mark.slow), "debug"])
def test_submitit_runs_cells_and_those_that_die_come_back(tmp_path: Path, cluster: str) -> None:
    names = ["ok", "die once", "ok", "die"] if cluster == "local" else ["ok", "boom"]
    cells = cells_that(names)
    executor = SlurmExecutor(Resources(), cluster=cluster)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr("submitit.core.core.Job._results_timeout_s", 1)  # how long a slow disk is waited for
        run_cells(tmp_path, cells, executor, QUIET, run=behave)
    results = {cell.point["behaves"]: read_result(tmp_path / "cells" / cell.key) for cell in cells}
    status = {name: result["status"] for name, result in results.items() if result is not None}
    assert status == {name: "failed" if name in ("die", "boom") else "done" for name in names}
    tries = starts(tmp_path)
    assert all(tries.count(cell.key) == (2 if "die" in cell.point["behaves"] else 1) for cell in cells)
    if cluster == "local":
        assert "2 times" in results["die"]["reason"]  # type: ignore[index]
        assert results["ok"]["metrics"]["test"]["process"]["value"] != os.getpid()  # type: ignore[index]


def test_a_sweep_by_slurm_has_the_bits_of_a_local_one_and_its_last_job_writes_the_table(
    slurm: Path, tmp_path: Path, capsys
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    assert run(words(here)) == 0
    more = ("--on", "slurm:debug", "--cpus", "1", "--memory", "1.5", "--gpus", "0", "--time", "90", "--jobs", "1")
    assert run(words(there, *more)) == 0, capsys.readouterr().err
    assert metrics(there) == metrics(here) and len(metrics(here)) == 2
    tables = [pq.read_table(out / "cells.parquet").to_pydict() for out in (here, there)]
    assert tables[0]["cell"] == tables[1]["cell"] and tables[0]["test.loss"] == tables[1]["test.loss"]
    assert (there / "report.html").is_file() and (there / "done.json").is_file()
    array, last = stand_in_slurm.scripts(slurm)
    assert flags_of(array) == {
        "array": "0-1%1", "cpus-per-task": "1", "job-name": "flatshift-cells", "mem": "1536MB", "nodes": "1",
        "open-mode": "append", "partition": "debug", "signal": "USR2@90", "time": "90", "wckey": "submitit",
    }  # fmt: skip
    assert "export OMP_NUM_THREADS=1" in array
    assert flags_of(last) == {
        "cpus-per-task": "1", "dependency": "afterok:100", "job-name": "flatshift-tables", "nodes": "1",
        "open-mode": "append", "partition": "debug", "signal": "USR2@90", "time": "90", "wckey": "submitit",
    }  # fmt: skip
    completed = {name: "COMPLETED" for name in ("100", "100_0", "100_1", "101")}
    deadline = time.monotonic() + HANG_S
    while stand_in_slurm.states(slurm) != completed:  # a job ends after it has left its result
        assert time.monotonic() < deadline, stand_in_slurm.states(slurm)
        time.sleep(0.05)
    assert run(words(there, *more)) == 0 and len(stand_in_slurm.scripts(slurm)) == 2, "finished cells ran again"


@pytest.mark.slow  # four starts of Python in a row
def test_jobs_of_a_killed_command_are_waited_for_and_write_the_table(slurm: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "flatshift", *words(out, "--on", "slurm")]
    first = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + HANG_S
    while not (out / "slurm" / "jobs.json").is_file() or len(stand_in_slurm.scripts(slurm)) < 2:
        assert first.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.2)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    assert len(stand_in_slurm.scripts(slurm)) == 2, "the jobs were submitted again"
    assert len(metrics(out)) == 2 and (out / "cells.parquet").is_file()
    log = (out / "log.txt").read_text(encoding="utf-8")
    assert log.count(" start ") == 2


@dataclasses.dataclass(frozen=True)
class Patient:
    """A `RunCell` that does not end at the first time."""

    seen: Path

    def __call__(self, out: Path, cell: Cell, threads: int | None) -> bool:
        mark = self.seen / cell.key
        if not mark.exists():
            mark.touch()
            time.sleep(HANG_S)
        return behave(out, cell, threads)


@pytest.mark.slow
def test_a_cell_is_put_back_into_the_queue_before_its_time_limit(slurm: Path, tmp_path: Path) -> None:
    import threading

    (seen := tmp_path / "seen").mkdir()
    cells = cells_that(["ok"])
    executor = SlurmExecutor(Resources(), minutes=1)

    def warn() -> None:
        while not (seen / cells[0].key).exists():
            time.sleep(0.05)
        os.kill(int((slurm / "state" / "100.step").read_text()), signal.SIGUSR2)

    threading.Thread(target=warn, daemon=True).start()
    run_cells(tmp_path / "out", cells, executor, QUIET, run=Patient(seen))
    assert starts(tmp_path / "out") == [cells[0].key]
    assert len(stand_in_slurm.scripts(slurm)) == 1
    logs = "".join(file.read_text() for file in (tmp_path / "out" / "slurm").glob("*_log.*"))
    assert "Requeued job 100" in logs


def test_a_submission_leaves_no_link(slurm: Path, tmp_path: Path) -> None:
    executor = load_submitit("slurm").AutoExecutor(tmp_path / "out", cluster="slurm")
    job = submit_jobs(lambda executor: executor.submit(len, "four"), executor, timeout_min=1)
    assert job.result() == 4 and job.paths.submission_file.is_file()
    assert not [file for file in (tmp_path / "out").rglob("*") if file.is_symlink()], "a copy would lead out of itself"


def test_what_slurm_refuses_is_one_sentence(slurm: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("STAND_IN_REFUSES", "1")
    assert run(words(tmp_path / "out", "--on", "slurm", "--memory", "4000")) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("flatshift: error: --on slurm: sbatch refused") and "is not available" in error
    monkeypatch.setenv("PATH", os.environ["PATH"].partition(os.pathsep)[2])
    assert run(words(tmp_path / "other", "--on", "slurm")) == 2
    assert "this machine has no srun; start the command on a login node" in capsys.readouterr().err


def test_a_job_without_the_data_or_with_other_code_is_one_sentence(tmp_path: Path) -> None:
    (cell,) = cells_that(["ok"])
    inputs = StudyInputs.of(cell)
    file = next(iter(inputs.digests))
    for change, text in (
        ({"code": "0" * 12}, r"the worker on \S+ runs flatshift .*install the same on every node"),
        ({"digests": {**inputs.digests, file: ["0" * 64]}}, f"{file} on .* differs from the command's"),
    ):
        problem = CellJob(tmp_path, behave, 1)(cell, dataclasses.replace(inputs, **change))  # type: ignore[arg-type]
        assert problem is not None and re.search(text, problem)
    assert not list(tmp_path.iterdir())
    train = dataclasses.replace(cell.resolved.recipe.train, device="cuda:1")
    recipe = dataclasses.replace(cell.resolved.recipe, train=train)
    moved = dataclasses.replace(cell, resolved=dataclasses.replace(cell.resolved, recipe=recipe))
    with pytest.raises(UserError, match=r"train\.device cuda:1 names a device of one machine"):
        run_cells(tmp_path, [moved], SlurmExecutor(Resources(), cluster="debug"), QUIET, run=behave)


def test_a_refusal_of_a_job_ends_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CellJob, "__call__", lambda self, cell, inputs: "the worker on a lacks input files")
    with pytest.raises(UserError, match="the worker on a lacks"):
        run_cells(tmp_path, cells_that(["ok"]), SlurmExecutor(Resources(), cluster="debug"), QUIET, run=behave)


def test_memory_is_what_the_planner_predicts_for_a_calibrated_machine(tmp_path: Path, monkeypatch) -> None:
    from flatshift.finetune.planner import calibration

    small, large = cell_of_length(16), cell_of_length(128)
    monkeypatch.setattr(calibration, "cached_overhead", lambda: None)
    assert Resources().memory_bytes(small) is None and Resources(memory=5).memory_bytes(small) == 5
    overhead = calibration.MemoryOverhead(libraries=300 << 20, least=50 << 20, share=0.1)
    monkeypatch.setattr(calibration, "cached_overhead", lambda: overhead)
    needs = [Resources().memory_bytes(cell) for cell in (small, large)]
    assert 350 << 20 < needs[0] < needs[1] < 4 << 30  # type: ignore[operator]
    assert Resources(gpus=1).memory_bytes(small) is None
    pairs = Cell("0", {}, 0, load_recipe("preference"))
    recipe = pairs.resolved.recipe
    sizes = read_sizes(recipe.backbone, recipe.adapter).under(recipe.task)
    train = dataclasses.replace(recipe.train, batch_size=2 * recipe.train.batch_size)
    both = predict_footprint(sizes, mesh=recipe.mesh, adapter=recipe.adapter, train=train, device="cpu").total
    assert Resources().memory_bytes(pairs) == round(overhead.interval(both)[1]), "two answers are two rows"
    executor = SlurmExecutor(Resources(), cluster="debug")
    assert executor._parameters([small, large])["mem_gb"] == round(needs[1] / 2**30, 3)  # type: ignore[operator]


@pytest.mark.parametrize(("jobs", "most"), [(None, 300), (7, 7)])
def test_all_jobs_of_an_array_may_run_at_the_same_time(jobs: int | None, most: int) -> None:
    executor = SlurmExecutor(Resources(memory=1), jobs=jobs, cluster="debug")
    assert executor._parameters([cell_of_length(16)] * 300)["slurm_array_parallelism"] == most


def cell_of_length(length: int) -> Cell:
    """A cell of a causal model on rows of at most `length` tokens."""
    resolved = load_recipe("double-descent", [from_override("train.max_length", length)])
    return Cell("0", {}, 0, resolved)
