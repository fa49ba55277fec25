"""A Ray cluster of two nodes on this machine: the bits of local cells, killed workers and commands, what is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from flatshift.cli import run
from flatshift.experiments.results.cells import read_result
from flatshift.experiments.run.console import Console
from flatshift.experiments.studies import run_cells
from flatshift.experiments.studies.cell import Cell
from flatshift.experiments.studies.executors import Resources
from flatshift.finetune.errors import UserError
from tests.support.patience import HANG_S
from tests.support.sweep_cells import behave, cells_that

ray = pytest.importorskip("ray")
ROOT = Path(__file__).resolve().parents[4]
QUIET = Console(quiet=True)
TIMES = ("seconds", "wall_s", "cpu_s")
SMALL = [
    *("--backbone", "flatshift-encoder-3m", "--grid", "adapter.rank=1,2", "--seeds", "2", "--regularizer", "plain"),
    *("--train.steps", "2", "--train.eval_every", "0", "--train.max_length", "24", "--train.precision", "fp32"),
    *("--data.dev.limit", "8", "--data.test.limit", "8", "--eval.bootstrap", "20", "--train.threads", "1"),
    *("--train.device", "cpu"),
]


@pytest.fixture
def executor(address: str) -> Iterator[Callable[..., Any]]:
    """Open an executor on the cluster, which is left at the end."""
    from flatshift.experiments.studies.executors.ray import RayExecutor

    opened = []

    def make(resources: Resources | None = None, **options: Any) -> RayExecutor:
        opened.append(RayExecutor(address, resources or Resources(), **options))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def words(out: Path, *more: str, limit: int = 24) -> list[str]:
    return ["sweep", "classify", *SMALL, "--data.train.limit", str(limit), "--out", str(out), *more]


def deterministic(out: Path) -> dict[str, bytes]:
    """Contents of the files of all cells, without times."""
    contents = {}
    for file in sorted(out.glob("cells/*/**/*")):
        name = file.relative_to(out).as_posix()
        if file.name in ("predictions.jsonl", "recipe.resolved.yaml", "manifest.json", "eval.json"):
            contents[name] = file.read_bytes()
        if file.name == "result.json":
            result = json.loads(file.read_text(encoding="utf-8"))
            contents[name] = json.dumps([result[key] for key in ("cell", "point", "status", "metrics")]).encode()
    return contents


def test_a_sweep_on_ray_has_the_files_and_bits_of_a_local_one(address: str, tmp_path: Path, capsys) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    assert run(words(here)) == 0
    assert run(words(there, "--on", f"ray:{address}")) == 0, capsys.readouterr().err
    names = [sorted(file.relative_to(out).as_posix() for file in out.glob("cells/*/*")) for out in (here, there)]
    assert names[0] == names[1] and len(list(there.glob("cells/*/log.txt"))) == 4
    assert deterministic(there) == deterministic(here) and len(deterministic(here)) >= 8
    tables = [pq.read_table(out / "cells.parquet").to_pydict() for out in (here, there)]
    columns = [name for name in tables[0] if name.endswith(".loss") or name in ("cell", "status", "adapter.rank")]
    assert len(columns) > 3 and all(tables[0][name] == tables[1][name] for name in columns)
    starts = [line for line in (there / "log.txt").read_text(encoding="utf-8").splitlines() if " start " in line]
    assert len(starts) == 4 and not any(f"in process {os.getpid()}" in line for line in starts)


def test_a_killed_worker_costs_a_try_and_no_bit(executor: Callable[..., Any], tmp_path: Path) -> None:
    cells = cells_that(["ok", "die once", "stop once", "die", "boom", "ok"])
    lines: list[str] = []
    # `behave` notes in the study's directory whether a cell came before, which a worker elsewhere does not see.
    run_cells(tmp_path, cells, executor(), Console(quiet=True, log=lines.append), run=_Behave(tmp_path / "seen"))
    results = {cell.point["behaves"]: read_result(tmp_path / "cells" / cell.key) for cell in cells}
    assert all(result is not None for result in results.values())
    status = {name: result["status"] for name, result in results.items() if result is not None}
    assert status == {"ok": "done", "die once": "done", "stop once": "done", "die": "failed", "boom": "failed"}
    assert "its worker died (WorkerCrashedError), 2 times" in results["die"]["reason"]  # type: ignore[index]
    assert results["boom"]["reason"] == "RuntimeError: a device failed"  # type: ignore[index]
    assert "Traceback" in (tmp_path / "cells" / cells[4].key / "log.txt").read_text(encoding="utf-8")
    figures = results["ok"]["metrics"]["test"]  # type: ignore[index]
    assert figures["threads"]["value"] == figures["blas"]["value"] == 1
    assert figures["process"]["value"] != os.getpid()
    assert lines[-1].startswith("sweep: 6/6 cells, 2 failed") and not list(tmp_path.rglob("*.tmp"))


class _Behave:
    """`behave`, with the marks of a first try in a directory that all workers see."""

    def __init__(self, seen: Path) -> None:
        self.seen = seen

    def __call__(self, out: Path, cell: Cell, threads: int | None) -> bool:
        self.seen.mkdir(exist_ok=True)
        before = self.seen / f"seen-{cell.key}"
        if before.exists():
            shutil.copy(before, out)
        elif "once" in cell.point["behaves"]:
            before.touch()
        return behave(out, cell, threads)


def _ray_workers(text: str) -> list[int]:
    """Processes of this user whose title contains `text`, as Ray names its workers by their tasks."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                title = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if title.startswith("ray::") and text in title:
                found.append(int(entry.name))
    return found


def _command(address: str, out: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "flatshift", *words(out, "--on", f"ray:{address}", *more)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.slow  # several starts of commands and workers
def test_workers_and_the_command_are_killed_and_the_same_command_goes_on(address: str, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    assert run(words(here)) == 0
    command = _command(address, there)
    deadline = time.monotonic() + HANG_S
    while not (workers := _ray_workers("cell ")):
        assert command.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(workers[0], signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGKILL):
        before = set(there.glob("cells/[!.]*/result.json"))
        while set(there.glob("cells/[!.]*/result.json")) == before:
            assert command.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        if number == signal.SIGTERM:
            command.terminate()
            errors = command.communicate(timeout=HANG_S)[1]
            assert command.returncode == 3 and "the same command continues from there" in errors
            command = _command(address, there)
    os.killpg(command.pid, signal.SIGKILL)
    command.wait(HANG_S)
    stamps = {path: path.stat().st_mtime_ns for path in there.glob("cells/[!.]*/result.json")}
    assert len(stamps) >= 2
    again = _command(address, there)
    errors = again.communicate(timeout=HANG_S)[1]
    assert again.returncode == 0, errors
    assert f"sweep: 4 cells, {len(stamps)} done before" in errors
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps, "finished cells ran again"
    assert deterministic(there) == deterministic(here)


def test_a_failed_cell_runs_again_when_asked_and_jobs_bound_the_tasks(
    executor: Callable[..., Any], tmp_path: Path
) -> None:
    cells = cells_that(["ok", "ok", "ok"])
    bounded = executor(jobs=1)
    assert bounded.workers == 1
    run_cells(tmp_path, cells, bounded, QUIET, run=behave)
    before = {cell.key: read_result(tmp_path / "cells" / cell.key) for cell in cells}
    run_cells(tmp_path, cells, bounded, QUIET, run=behave, rerun={cells[0].key})
    stamps = (tmp_path / "log.txt").read_text(encoding="utf-8").splitlines()
    assert sum(f"start {cells[0].key}" in line for line in stamps) == 2 and len(stamps) == 4
    assert read_result(tmp_path / "cells" / cells[1].key) == before[cells[1].key]


# ------------------------------------------------------------------------------------------- refusals


def test_no_cluster_and_flags_without_a_use_are_one_sentence(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "tmp"))
    assert run(words(tmp_path / "out", "--on", "ray")) == 2
    assert "this machine belongs to no Ray cluster; start one" in capsys.readouterr().err.strip().splitlines()[-1]
    (tmp_path / "tmp" / "ray").mkdir(parents=True)
    (tmp_path / "tmp" / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")  # of a cluster that was killed
    assert run(words(tmp_path / "out", "--on", "ray")) == 2
    assert "no Ray cluster at 127.0.0.1:1" in capsys.readouterr().err.strip().splitlines()[-1]
    for flags, text in (
        (("--on", "ray:127.0.0.1:1"), "no Ray cluster at 127.0.0.1:1"),
        (("--on", "ray:head"), "write ray:HOST:PORT"),
        (("--on", "ray://head:10001"), "write ray:HOST:PORT"),
        (("--on", "kubernetes"), "--on kubernetes: write local, ray, ray:HOST:PORT, slurm or slurm:PARTITION"),
        (("--on", "local:2"), "--on local:2: write local"),
        (("--on", "slurm:"), "--on slurm:: write local"),
        (("--on", "ray:127.0.0.1:1", "--time", "5"), "--time has a meaning with --on slurm only"),
        (("--memory", "2"), "--memory has a meaning with --on ray or slurm only"),
        (("--on", "ray:127.0.0.1:1", "--cpus", "0"), "--cpus must be at least 1, got 0"),
        (("--on", "ray:127.0.0.1:1", "--memory", "nan"), "--memory must be"),
        (("--on", "slurm", "--merge", "parts"), "--merge trains nothing, so --on slurm has no meaning"),
        (("--retries", "-1"), "--retries must be at least 0"),
        (("--on", "ray:127.0.0.1:1", "--devices", "cpu"), "with --on ray, give --gpus"),
    ):
        assert run(words(tmp_path / "out", *flags)) == 2, flags
        errors = capsys.readouterr().err.strip().splitlines()
        assert text in errors[-1] and errors[-1].startswith("flatshift: error: "), errors
        assert not (tmp_path / "out").exists()


def test_resources_that_no_node_has_are_one_sentence(address: str, tmp_path: Path, capsys) -> None:
    on = ("--on", f"ray:{address}")
    for flags, text in (
        (("--cpus", "2"), "no node of the Ray cluster has 2 CPUs for a cell; the most on a node: 1 CPU"),
        (("--gpus", "1"), "no node of the Ray cluster has 1 CPU and 1 GPU for a cell"),
        (("--memory", "64"), "1 CPU and 64.0 GiB of memory for a cell; the most on a node: 1 CPU and 4.0 GiB"),
    ):
        assert run(words(tmp_path / "out", *on, *flags)) == 2, flags
        assert text in capsys.readouterr().err.strip().splitlines()[-1]
        assert not list((tmp_path / "out").glob("cells/*"))


def test_a_worker_without_the_data_is_one_sentence(executor: Callable[..., Any], tmp_path: Path) -> None:
    from flatshift.experiments.recipe import from_override
    from flatshift.experiments.studies.executors import ray as module
    from flatshift.experiments.studies.sweep.sweep_plan import SweepBase

    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"text": "word {i}", "label": "{i % 2}"}}\n' for i in range(40)), encoding="utf-8")
    base = SweepBase.of("classify", [from_override("data.train.files", str(rows)), from_override("train.steps", 2)])
    (cell,) = base.cells([{"adapter.rank": 1}], 1)
    assert module.StudyInputs.of(cell).digests[str(rows)]
    for change, text in (
        (lambda: rows.write_text("{}\n"), "rows.jsonl on .* differs"),
        (rows.unlink, "lacks input files"),
    ):
        change()
        with executor() as cluster, pytest.raises(UserError, match=text):
            run_cells(tmp_path / "out", [cell], cluster, QUIET)
    assert not list((tmp_path / "out").glob("cells/*"))


@pytest.mark.slow  # a cluster of its own, with another tree
def test_a_worker_with_other_code_is_one_sentence(tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    from flatshift.experiments.studies.executors.ray import RayExecutor

    tree = tmp_path / "tree"
    for room in ("experiments", "finetune", "regularizers", "selection"):
        shutil.copytree(
            ROOT / room,
            tree / room,
            ignore=lambda folder, names: [n for n in names if Path(n).suffix not in ("", ".py", ".tsv", ".yaml")],
        )
    shutil.copytree(ROOT / "flatshift", tree / "flatshift", symlinks=True)
    with (tree / "experiments" / "studies" / "cell.py").open("a", encoding="utf-8") as file:
        file.write("# other\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(tree))
        patch.chdir(tmp_path)
        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False},
        )
        try:
            with (
                RayExecutor(cluster.address, Resources()) as executor,
                pytest.raises(UserError, match=r"runs flatshift .* \(code .*install the same on every node"),
            ):
                run_cells(tmp_path / "out", cells_that(["ok"]), executor, QUIET)
        finally:
            cluster.shutdown()


@pytest.mark.slow
def test_forecast_and_compare_run_their_cells_there(address: str, tmp_path: Path, capsys) -> None:
    flags = ["--draws", "2", "--data.train.limit", "24", "--data.test.limit", "12", "--train.max_length", "16"]
    tables = []
    for name, on in (("here", ()), ("there", ("--on", f"ray:{address}"))):
        assert run(["forecast", "double-descent", "--out", str(tmp_path / name), *flags, *on]) == 0
        tables.append(pq.read_table(tmp_path / name / "cells.parquet").to_pydict())
    assert tables[0] == tables[1] and len(tables[0]["seed"]) > 10
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == sorted(
        path.name for path in (tmp_path / "there").iterdir()
    )
    assert "forecast: 2/2 cells" in capsys.readouterr().err
    assert run(["compare", "flat-comparison", "--out", str(tmp_path / "c"), "--on", "ray:127.0.0.1:1"]) == 2
