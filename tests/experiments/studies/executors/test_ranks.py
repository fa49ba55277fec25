"""`flatshift train --on`: ranks on a Ray cluster of two nodes and a stand-in for Slurm, lost ones, what is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from flatshift.cli import run
from flatshift.experiments.data.sources import epochs_to_steps
from flatshift.experiments.recipe import from_override, load_recipe
from flatshift.experiments.studies import executors
from flatshift.experiments.studies.cell import Cell
from flatshift.experiments.studies.executors import Resources
from flatshift.experiments.studies.executors.ranks import RankEnd, RankJob, SlurmRanks, _restart_lost, check_same_run
from flatshift.finetune.errors import Interrupted, UserError
from flatshift.finetune.run_directory import RunDirectory
from tests.support import stand_in_slurm
from tests.support.patience import HANG_S

ROOT = Path(__file__).resolve().parents[4]
SMALL = [
    *("--backbone", "flatshift-encoder-3m", "--train.steps", "16", "--train.save_every", "2"),
    *("--train.eval_every", "0", "--train.max_length", "24", "--train.precision", "fp32", "--train.threads", "1"),
    *("--data.train.limit", "24", "--data.dev.limit", "8", "--data.test.limit", "8", "--eval.bootstrap", "20"),
    *("--train.device", "cpu", "--mesh.dp", "2"),
]


def words(out: Path, *more: str) -> list[str]:
    return ["train", "classify", *SMALL, "--out", str(out), *more]


def start(out: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "flatshift", *words(out, *more)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)


def finish(command: subprocess.Popen[str]) -> str:
    errors = command.communicate(timeout=HANG_S)[1]
    assert command.returncode == 0, errors
    return errors


def wait_for(there: Callable[[], Any], command: subprocess.Popen[str]) -> Any:
    deadline = time.monotonic() + HANG_S
    while not (found := there()):
        assert command.poll() is None, command.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def last_step(out: Path) -> int:
    return max((int(path.name.partition("-")[2]) for path in out.glob("state/step-*")), default=0)


def ranks_of(out: Path) -> list[int]:
    """Processes that are ranks of the run in `out`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            variables = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdecimal() else []
            line = (entry / "cmdline").read_bytes().split(b"\0") if variables else []
        except OSError:
            continue
        if str(out).encode() in line and any(name.startswith(b"FLATSHIFT_LAUNCHER=") for name in variables):
            found.append(int(entry.name))
    return found


def check_equal(there: Path, here: Path) -> None:
    """Check that two runs have the same bits."""
    for name in ("adapter/adapter_model.safetensors", "eval.json"):
        assert (there / name).read_bytes() == (here / name).read_bytes(), name
    losses = [
        [line["loss"] for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if "loss" in line]
        for out in (here, there)
    ]
    assert losses[0] == losses[1] and len(losses[0]) >= 16


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run by the launcher of one host."""
    out = tmp_path_factory.mktemp("here") / "run"
    finish(start(out))
    return out


def make_job(out: Path, *, nodes: int | None = None) -> RankJob:
    pairs = zip(SMALL[::2], SMALL[1::2], strict=True)
    resolved = load_recipe("classify", [from_override(key.removeprefix("--"), value) for key, value in pairs])
    return RankJob(tuple(words(out)), out, ROOT, Cell("", {}, 0, resolved), Resources(), nodes)


# ------------------------------------------------------------------------------------------- Ray


@pytest.mark.slow
def test_a_worker_and_the_command_are_killed_and_the_run_has_the_bits_of_one_host(
    address: str, here: Path, tmp_path: Path
) -> None:
    out, on = tmp_path / "run", ("--on", f"ray:{address}", "--nodes", "2")
    command = start(out, *on)
    wait_for(lambda: last_step(out) >= 4, command)
    rank = wait_for(lambda: ranks_of(out), command)[0]
    worker = int(Path(f"/proc/{rank}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(worker, signal.SIGKILL)
    step = last_step(out)
    wait_for(lambda: last_step(out) > step + 2, command)
    os.killpg(command.pid, signal.SIGKILL)
    errors = command.communicate(timeout=HANG_S)[1]
    assert re.search(
        r"rank \d lost its worker \(\w+\); all ranks start again from the last checkpoint \(1 more", errors
    )
    deadline = time.monotonic() + HANG_S
    while ranks_of(out):
        assert time.monotonic() < deadline, "ranks outlive their command"
        time.sleep(0.05)
    assert not (out / "eval.json").exists(), "the run ended before its command was killed"
    assert f"{out} holds a run, which continues from its last checkpoint" in finish(start(out, *on))
    assert (out / "log.txt").read_text(encoding="utf-8").count("continues after step") == 2
    check_equal(out, here)
    assert "--on" not in (out / "command.txt").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_request_to_stop_leaves_a_checkpoint_and_another_recipe_is_refused(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, on = tmp_path / "run", ("--on", f"ray:{address}", "--retries", "0")
    command = start(out, "--train.steps", "400", *on)
    wait_for(lambda: last_step(out) >= 2, command)
    command.terminate()
    errors = command.communicate(timeout=HANG_S)[1]
    assert command.returncode == 3 and "continue with the same command" in errors
    assert errors.count("SIGTERM: stopping after this step and saving") == 1 and last_step(out) < 400
    capsys.readouterr()
    assert run(words(out, *on)) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "holds a run with train.steps 400, and this command says 16; name another" in error
    command = start(out, "--train.steps", "400", *on)
    wait_for(lambda: len(ranks_of(out)) == 2, command)
    before = last_step(out)
    wait_for(lambda: last_step(out) > before, command)
    os.kill(ranks_of(out)[1], signal.SIGKILL)
    errors = command.communicate(timeout=HANG_S)[1]
    assert command.returncode == 3
    assert "was killed by SIGKILL; the last checkpoint is kept, and the same command goes on" in errors


@pytest.mark.slow
def test_what_a_cluster_cannot_do_is_one_sentence(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"text": "word {i}", "label": "{i % 2}"}}\n' for i in range(40)), encoding="utf-8")

    def refusal(*more: str) -> str:
        assert run(words(tmp_path / "out", "--on", f"ray:{address}", *more)) == 2
        assert not (tmp_path / "out").exists()
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("flatshift: error: ")]
        return line

    assert "no node of the Ray cluster has 2 CPUs for a rank; the most on a node: 1 CPU" in refusal("--cpus", "2")
    assert "no node of the Ray cluster has 1 CPU and 1 GPU for a rank" in refusal("--gpus", "1")
    assert "the mesh has 2 ranks on 1 nodes of 2 each, and the Ray cluster has room for 0 of them" in refusal(
        "--nodes", "1"
    )
    assert "the mesh has 4 ranks, and the Ray cluster has room for 2 of them" in refusal("--mesh.dp", "4")
    (bad := tmp_path / "bad.jsonl").write_text("{\n", encoding="utf-8")
    assert "bad.jsonl:1" in refusal("--data", str(bad)), "a rank alone reads rows"
    with monkeypatch.context() as patch:
        patch.setattr(executors, "flatshift_version", lambda: "0.0.1")
        assert re.search(r"runs flatshift .* the command 0\.0\.1 .*install the same on every node", refusal())
    with monkeypatch.context() as patch:
        patch.setattr(executors, "file_digest", lambda path: ["0" * 64])
        assert re.search(r"rows\.jsonl on \S+ differs from the command's", refusal("--data", str(rows)))


@pytest.mark.slow  # clusters of their own, with another tree on one node
@pytest.mark.parametrize("on_head", [True, False])
def test_a_worker_without_this_code_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, on_head: bool
) -> None:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    (tmp_path / "tree" / "flatshift").mkdir(parents=True)
    (tmp_path / "tree" / "flatshift" / "__init__.py").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(tmp_path / "tree" if on_head else ROOT))
        patch.chdir(tmp_path)
        node: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20}
        cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        try:
            patch.setenv("PYTHONPATH", str(ROOT if on_head else tmp_path / "tree"))
            cluster.add_node(**node)
            assert run(words(tmp_path / "out", "--on", f"ray:{cluster.address}")) == 2
        finally:
            cluster.shutdown()
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(r"a Ray worker cannot run a rank: ModuleNotFoundError.*install the same flatshift", error), error


@pytest.mark.slow  # a cluster of its own, which loses a node
def test_a_lost_node_is_replaced_or_the_same_command_goes_on(here: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(ROOT))
        node: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20, "memory": 4 << 30}
        head = {**node, "num_cpus": 0, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            nodes = [cluster.add_node(**node) for _ in range(3)]
            on = ("--on", f"ray:{cluster.address}", "--retries", "2")
            command = start(out, *on)
            wait_for(lambda: last_step(out) >= 2, command)
            for lost in nodes[:2]:  # of three, so at least one rank is lost
                cluster.remove_node(lost)
            errors = command.communicate(timeout=HANG_S)[1]
            assert command.returncode == 3, errors
            assert (
                "the Ray cluster has room for 1 of them; take a smaller mesh" in errors
                and "the same command goes on" in errors
            )
            cluster.add_node(**{**node, "num_cpus": 2})
            finish(start(out, *on, "--nodes", "1"))  # one worker of two ranks
        finally:
            cluster.shutdown()
    assert "continues after step" in (out / "log.txt").read_text(encoding="utf-8")
    check_equal(out, here)


# ------------------------------------------------------------------------------------------- Slurm


@pytest.mark.slow
def test_a_job_of_slurm_is_put_back_before_its_limit_and_waited_for_by_the_same_command(
    slurm: Path, here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    on = ("--on", "slurm:gpu", "--nodes", "2", "--cpus", "1", "--memory", "1.5", "--gpus", "0", "--time", "90")
    command = start(out, *on)
    wait_for(lambda: last_step(out) >= 4, command)
    os.killpg(command.pid, signal.SIGKILL)
    command.communicate()
    assert run(words(out, *on[:-1], "91")) == 2
    assert f"job 100 of another command is at work on {out}; wait for it" in capsys.readouterr().err
    command = start(out, *on)
    for task in (1, 0):  # Slurm signals every process of a job's step
        step = int((slurm / "state" / f"100.step.{task}").read_text())
        for pid in (step, *children(step)):
            os.kill(pid, signal.SIGUSR2)
    finish(command)
    (script,) = stand_in_slurm.scripts(slurm)
    flags = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", script, flags=re.M))
    assert {name: value for name, value in flags.items() if name not in ("output", "error")} == {
        "cpus-per-task": "1", "job-name": "flatshift-train", "mem": "1536MB", "nodes": "2", "ntasks-per-node": "1",
        "open-mode": "append", "partition": "gpu", "signal": "USR2@300", "time": "90", "wckey": "submitit",
    }  # fmt: skip
    assert "export OMP_NUM_THREADS=1" in script and "--kill-on-bad-exit=0" in script
    logs = "".join(file.read_text() for file in (tmp_path / "run.slurm").glob("*_log.*"))
    assert "Requeued job 100" in logs and "stopped after step" in logs
    assert (out / "log.txt").read_text(encoding="utf-8").count("continues after step") == 1
    check_equal(out, here)


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


@pytest.mark.slow
def test_a_lost_rank_of_slurm_is_a_new_job(slurm: Path, here: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = start(out, "--on", "slurm", "--gpus", "0")
    wait_for(lambda: last_step(out) >= 4, command)
    os.kill(max(ranks_of(out)), signal.SIGKILL)
    assert "was killed by SIGKILL; all ranks start again" in finish(command)
    one, two = stand_in_slurm.scripts(slurm)
    assert one == two and "#SBATCH --ntasks-per-node=2" in one
    check_equal(out, here)


@pytest.mark.slow
def test_submitit_runs_ranks_on_this_machine(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    out = tmp_path / "run"
    ends = SlurmRanks(make_job(out), minutes=60, cluster="local").run()
    assert [end.code for end in ends] == [0, 0]
    check_equal(out, here)


class Broken(RankJob):
    """Ranks that cannot be started."""

    def start(self, variables: Mapping[str, str], **options: Any) -> subprocess.Popen[bytes]:
        raise RuntimeError("no process")


@pytest.mark.slow
def test_a_job_that_cannot_start_a_rank_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    job = Broken(**vars(make_job(tmp_path / "run")))
    with pytest.raises(UserError, match=r"a node cannot run a rank: RuntimeError: no process; its log is .*log\.err$"):
        SlurmRanks(job, minutes=60, cluster="local").run()


def test_what_slurm_refuses_is_one_sentence(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STAND_IN_REFUSES", "1")
    assert run(words(tmp_path / "out", "--on", "slurm:gpu", "--memory", "4000")) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("flatshift: error: --on slurm: sbatch refused") and "is not available" in error
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv("PATH", os.environ["PATH"].partition(os.pathsep)[2])
    assert run(words(tmp_path / "out", "--on", "slurm")) == 2
    assert "this machine has no srun; start the command on a login node" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------- both


def test_flags_without_a_use_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray")
    out = tmp_path / "out"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    ray = ("--on", "ray:127.0.0.1:1")
    for line, text in (
        (words(out, *ray), "no Ray cluster at 127.0.0.1:1"),
        (
            words(out, "--on", "kubernetes"),
            "--on kubernetes: write local, ray, ray:HOST:PORT, slurm or slurm:PARTITION",
        ),
        (words(out, *ray, "--time", "5"), "--time has a meaning with --on slurm only"),
        (words(out, *ray, "--nodes", "3"), "--nodes 3: they cannot share the 2 ranks of the mesh evenly"),
        (words(out, *ray, "--nodes", "0"), "--nodes must be at least 1"),
        (words(out, "--nodes", "2"), "--nodes has a meaning with --on ray or slurm only"),
        (words(out, "--retries", "2"), "--retries has a meaning with --on ray or slurm only"),
        (words(out, "--memory", "2"), "--memory has a meaning with --on ray or slurm only"),
        (words(out, *ray, "--mesh.auto", "true"), "mesh.auto chooses for this machine; with --on write the axes"),
        (words(out, *ray, "--train.device", "cuda:1"), "train.device: cuda:N needs one rank"),
        (words(tmp_path / "other", *ray), "other is not empty"),
        ([*words(out)[:-2], *ray], "--out is missing: with --on name a new directory on a disk"),
        (["train", "--resume", str(out), *ray], "no recipe.resolved.yaml"),
    ):
        assert run(line) == 2, line
        errors = capsys.readouterr().err.strip().splitlines()
        assert text in errors[-1] and errors[-1].startswith("flatshift: error: "), errors
        assert not out.exists()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert run(words(out, *ray)) == 2
    assert "a launcher (torchrun) has started this process as a rank" in capsys.readouterr().err


def test_a_run_of_other_epochs_is_another_run(tmp_path: Path) -> None:
    epochs = {given: load_recipe("classify", [from_override("train.epochs", given)]) for given in ("2", "1.23456789")}
    for given, resolved in epochs.items():
        out = tmp_path / given
        rows: Any = range(24)
        RunDirectory.create(out, recipe_yaml=epochs_to_steps(resolved, rows, seed=0).to_yaml())
        check_same_run(out, resolved)
        other = load_recipe("classify", [from_override("train.epochs", 3)])
        with pytest.raises(UserError, match=rf"a run with train\.epochs {float(given):g}, and this command says 3;"):
            check_same_run(out, other)
    steps = load_recipe("classify", [from_override("train.steps", 6)])
    RunDirectory.create(tmp_path / "steps", recipe_yaml=steps.to_yaml())
    with pytest.raises(UserError, match=r"train\.epochs None, and this command says 2;"):
        check_same_run(tmp_path / "steps", epochs["2"])


def test_a_node_without_the_directory_is_named(tmp_path: Path) -> None:
    job = make_job(tmp_path / "runs" / "a")
    assert job.size == 2 and job.node_problem() is None
    for change, path in (({"directory": tmp_path / "away"}, "away"), ({"mark": tmp_path / "runs" / ".a-1"}, "runs")):
        problem = RankJob(**{**vars(job), **change}).node_problem()
        assert problem is not None and problem.startswith(f"{tmp_path / path} is not on ")


def test_ranks_start_again_until_the_retries_are_used_up(capsys: pytest.CaptureFixture[str]) -> None:
    report = "flatshift: interrupted: rank 0 lost contact with rank 1"
    lost, done = [RankEnd.of(3, f"a\n{report}"), RankEnd.of(-9, "")], [RankEnd.of(0, "")] * 2
    ends = iter([lost, done])
    assert _restart_lost(lambda: next(ends), 1) == 0
    assert "rank 1 was killed by SIGKILL; all ranks start again" in capsys.readouterr().err
    with pytest.raises(Interrupted, match="rank 1 was killed by SIGKILL; the last checkpoint is kept"):
        _restart_lost(lambda: lost, 2)
    assert capsys.readouterr().err.count("start again") == 2
    refused = [RankEnd.of(2, ""), RankEnd.of(2, "words\nflatshift: error: rank 1 cannot read its rows\n")]
    assert _restart_lost(lambda: refused[::-1], 2) == 2 and not capsys.readouterr().err
    assert _restart_lost(lambda: [RankEnd(3, report), refused[1]], 2) == 2
    assert _restart_lost(lambda: [RankEnd.of(2, "words"), refused[1]], 2) == 2
    assert capsys.readouterr().err == "flatshift: error: rank 1 cannot read its rows\n" * 2
    assert _restart_lost(lambda: [RankEnd.of(1, "No module named flatshift\n")] * 2, 2) == 1
    expected = "flatshift: rank 0 ended with code 1, and last printed No module named flatshift\n"
    assert capsys.readouterr().err == expected
