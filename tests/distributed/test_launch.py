"""A job of several ranks ends with one message from the cause, the right code, in time, and leaves nobody behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from flatshift.finetune.errors import UserError
from flatshift.finetune.launch.job import DirectoryKeyValueStore, slurm_rank_variables
from flatshift.finetune.launch.spawn import spawn
from flatshift.finetune.launch.watchdog import Heartbeat, Watchdog
from tests.support import warm_commands
from tests.support.commands import flags
from tests.support.patience import HANG_S

CHILD = Path(__file__).resolve().parents[1] / "support" / "launch_children.py"
PARENT = """
import sys
from pathlib import Path
from flatshift.finetune.launch.spawn import spawn
code = spawn(sys.argv[2:], ranks=int(sys.argv[1]), resume=Path(sys.argv[4]))
sys.exit(99 if "torch" in sys.modules else code)
"""
LIMIT_S = 120.0
"""Until a job whose rank sleeps for an hour has ended, on a busy machine too."""


@dataclass
class Ended:
    code: int
    out: str
    errors: str
    seconds: float


def job(
    folder: Path, scenario: str, *, ranks: int = 2, act: Callable[[subprocess.Popen[str]], None] | None = None
) -> Ended:
    """Run the scenario under our launcher; `act` is called when rank 0 has made some steps."""
    command = [sys.executable, "-c", PARENT, str(ranks), str(CHILD), scenario, str(folder), "5"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    started = time.monotonic()
    if act is not None:
        while not (folder / "step").exists() or int((folder / "step").read_text() or 0) < 5:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() - started < HANG_S
            time.sleep(0.02)
        started = time.monotonic()
        act(process)
    out, errors = process.communicate(timeout=HANG_S)
    ended = Ended(process.returncode, out, errors, time.monotonic() - started)
    assert not [rank for rank in range(ranks) if runs(pid_of(folder, rank))]
    assert ended.seconds < LIMIT_S
    return ended


def pid_of(folder: Path, rank: int) -> int:
    return int((folder / f"pid-{rank}").read_text())


def runs(pid: int) -> bool:
    """Whether the process is there and no zombie that nobody waits for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def messages(ended: Ended) -> list[str]:
    return [line for line in ended.errors.splitlines() if line.startswith("flatshift: ")]


@pytest.mark.parametrize(
    ("scenario", "code", "words"),
    [
        pytest.param("product", 2, "dp 3 makes 3 ranks, but 2 processes", marks=pytest.mark.slow),
        pytest.param("early", 2, "rank 1 cannot read its rows", marks=pytest.mark.slow),
        ("user", 2, "the rows of this rank are bad"),
        pytest.param("memory", 3, "rank 1 ran out of memory", marks=pytest.mark.slow),
        ("bug", 70, "KeyError: 'ours'"),
        ("hang", 3, "in happen (step 5, update)"),
    ],
)
def test_one_message_from_the_cause(tmp_path: Path, scenario: str, code: int, words: str) -> None:
    ended = job(tmp_path, scenario)
    assert ended.code == code, ended.errors
    assert len(messages(ended)) == 1 and words in ended.errors
    assert ended.errors.count("Traceback") == (scenario == "bug")


def test_only_rank_0_has_the_terminal(tmp_path: Path) -> None:
    ended = job(tmp_path, "done")
    assert (ended.code, ended.out) == (0, "rank 0 is done\n")
    # On a busy machine the launcher says that it is still at work.
    assert not [line for line in ended.errors.splitlines() if "at work for" not in line]


def test_another_recipe_on_a_rank(tmp_path: Path) -> None:
    ended = job(tmp_path, "recipe", ranks=3)
    assert ended.code == 2 and len(messages(ended)) == 1
    assert "rank 2 runs train.seed: 1, rank 0 train.seed: 0" in ended.errors


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_rank(tmp_path: Path, rank: int) -> None:
    ended = job(tmp_path, "steps", act=lambda _: os.kill(pid_of(tmp_path, rank), signal.SIGKILL))
    assert ended.code == 3 and len(messages(ended)) == 1, ended.errors
    assert f"rank {rank} (pid {pid_of(tmp_path, rank)}) was killed by signal 9 (SIGKILL)" in ended.errors
    assert f"--resume {tmp_path}" in ended.errors


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_stopped_rank(tmp_path: Path, rank: int) -> None:
    ended = job(tmp_path, "steps", act=lambda _: os.kill(pid_of(tmp_path, rank), signal.SIGSTOP))
    assert ended.code == 3 and len(messages(ended)) == 1, ended.errors
    assert f"rank {rank} (" in ended.errors and "has not answered for" in ended.errors


@pytest.mark.parametrize(
    "number",
    [signal.SIGUSR1, *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGTERM))],
)
def test_a_request_to_stop(tmp_path: Path, number: signal.Signals) -> None:
    ended = job(tmp_path, "steps", act=lambda process: process.send_signal(number))
    assert ended.code == 3 and len(messages(ended)) == 1, ended.errors
    assert "interrupted: stopped after step" in ended.errors


def test_ranks_end_with_a_killed_launcher(tmp_path: Path) -> None:
    def kill(process: subprocess.Popen[str]) -> None:
        process.kill()
        time.sleep(1)

    assert job(tmp_path, "steps", act=kill).code == -signal.SIGKILL


@pytest.mark.parametrize(
    ("scenario", "words"),
    [pytest.param("user", "the rows of this rank are bad", marks=pytest.mark.slow), ("killed", "rank 1 (")],
)
def test_under_torchrun(tmp_path: Path, scenario: str, words: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(CHILD)]
    done = subprocess.run([*command, scenario, str(tmp_path), "5"], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode != 0
    assert words in done.stderr and done.stderr.count("flatshift: ") == 1, done.stderr


SHORT = {
    "train.batch_size": 4,
    "train.max_length": 32,
    "train.max_cut": 1,
    "train.precision": "fp32",
    "data.train.limit": 20,
}
SHORT |= {"data.dev.limit": 4, "data.test.limit": 4, "eval.bootstrap": 10}


def under_torchrun(
    launcher: list[str], out: Path, *, before: Sequence[str] = (), **settings: object
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, "-m", "flatshift", "train", "classify"]
    return subprocess.Popen(
        [*before, *command, "--out", str(out), *flags(SHORT | settings)], stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_the_first_sigterm_ends_an_evaluation_on_a_mesh(tmp_path: Path) -> None:
    """Of a command that starts two ranks itself: code 3, nobody left behind, and the run is evaluated later."""
    out = tmp_path / "run"
    settings = SHORT | {"mesh.dp": 2, "train.steps": 2, "data.test.limit": 301, "eval.batch_size": 1}
    command = [sys.executable, "-m", "flatshift", "train", "classify", "--out", str(out), *flags(settings)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not (out / "adapter").exists():  # it is written when the evaluation begins
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    ranks = [pid for pid in (int(p.name) for p in Path("/proc").glob("[0-9]*")) if parent_of(pid) == process.pid]
    process.terminate()
    said = process.communicate(timeout=HANG_S)[1]
    assert process.returncode == 3, said
    assert len(ranks) == 2 and not any(map(runs, ranks))
    (line,) = [line for line in said.splitlines() if line.startswith("flatshift: ") and "stopping" not in line]
    assert re.match(r"flatshift: interrupted: evaluating (dev|test) stopped after \d+ of \d+ rows; ", line)
    assert f"`flatshift train --resume {out}` continues" in line
    assert "SIGTERM: stopping" in said and not (out / "eval.json").exists() and not (out / "done.json").exists()
    steps = (out / "metrics.jsonl").read_bytes()
    warm_commands.flatshift("train", "--resume", str(out), "--eval.batch_size", "32")
    assert json.loads((out / "eval.json").read_text(encoding="utf-8"))["test"]["loss"]["n"] == 301
    assert (out / "metrics.jsonl").read_bytes() == steps, "nothing was trained"


TASK = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_NODELIST": "a[08-10,12]-x[1-2],b"}


def test_a_task_of_srun_is_a_rank() -> None:
    found = slurm_rank_variables({**TASK, "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_ID": "123456"})
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("3", "4", "1", "2")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("a08-x1", "18456")
    assert slurm_rank_variables({**TASK, "SLURM_GPUS_PER_TASK": "1"})["LOCAL_RANK"] == "0"
    steps = [slurm_rank_variables({**TASK, "SLURM_JOB_ID": "123456", "SLURM_STEP_ID": step}) for step in "01"]
    assert all(steps[0][name] != steps[1][name] for name in ("MASTER_PORT", "FLATSHIFT_JOB"))
    kept = slurm_rank_variables({**TASK, "MASTER_ADDR": "c", "MASTER_PORT": "7"})
    assert (kept["MASTER_ADDR"], kept["MASTER_PORT"]) == ("c", "7")
    # a rank of torchrun, one task, a batch script without a step
    for more in ({"RANK": "0"}, {"SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_SUBMIT_DIR": "/home"}):
        assert slurm_rank_variables({**TASK, **more}) == {}
    assert slurm_rank_variables({**TASK, "SLURM_SUBMIT_DIR": "/home", "SLURM_STEP_ID": "0"})["RANK"] == "3"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"SLURM_NTASKS": ""}, "SLURM_PROCID is set, but SLURM_NTASKS is not; start every rank with srun"),
        ({"SLURM_LOCALID": "x"}, "SLURM_LOCALID is 'x'"),
        ({"SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST is not"),
        ({"SLURM_PROCID": "4"}, "SLURM_PROCID 4, SLURM_LOCALID 1 and SLURM_NTASKS 4 contradict each other"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE 2 and SLURM_NTASKS 4 contradict each other"),
    ],
)
def test_variables_of_slurm_that_make_no_rank(change: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        slurm_rank_variables(TASK | change)


@pytest.mark.slow
def test_srun_alone_starts_a_job(tmp_path: Path) -> None:
    """Two tasks with the variables that Slurm sets: the losses of one process; without its number a task is refused."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {**SHORT, "train.steps": 3, "train.device": "cpu"}
    command = [sys.executable, "-m", "flatshift", "train", "classify", *flags(settings)]
    command += ["--adapter.targets", "q_proj", "v_proj"]
    slurm = {"SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "127.0.0.1,n[1-3]", "MASTER_PORT": str(port)}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}

    def start(words: list[str], variables: dict[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*command, *words],
            env=environment | variables,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    both = ["--mesh.dp", "2", "--out", str(tmp_path / "srun")]
    jobs = [start(both, {**slurm, "SLURM_PROCID": n, "SLURM_LOCALID": n}) for n in "01"]
    jobs.append(start(["--out", str(tmp_path / "alone")], {}))
    said = [process.communicate(timeout=HANG_S)[1] for process in jobs]
    assert [process.returncode for process in jobs] == [0, 0, 0], said
    found = [losses(tmp_path / name) for name in ("srun", "alone")]
    assert len(found[0]) == 3 and max(abs(a - b) for a, b in zip(*found, strict=True)) <= 3e-5

    lost = start(["--out", str(tmp_path / "lost")], {**slurm, "SLURM_PROCID": "0"})
    (line,) = lost.communicate(timeout=HANG_S)[1].splitlines()
    assert lost.returncode == 2 and "SLURM_PROCID is set, but SLURM_LOCALID is not" in line


@pytest.mark.slow
def test_torchrun_restarts_into_the_same_run(tmp_path: Path) -> None:
    """One of two ranks is killed: torchrun ends the other, starts both again, and they continue the run."""
    out = tmp_path / "run"
    mesh = {"mesh.dp": 2, "train.steps": 20, "train.save_every": 2}
    process = under_torchrun(["--nproc-per-node", "2", "--max-restarts", "1"], out, **mesh)
    while not (out / "state" / "step-4").exists():
        assert process.poll() is None
        time.sleep(0.05)
    ranks = [pid for pid in (int(p.name) for p in Path("/proc").glob("[0-9]*")) if parent_of(pid) == process.pid]
    os.kill(max(ranks), signal.SIGKILL)
    assert process.communicate(timeout=HANG_S) and process.returncode == 0
    assert (out / "eval.json").is_file() and "continues after step" in (out / "log.txt").read_text()


@pytest.mark.slow
def test_two_nodes(tmp_path: Path) -> None:
    """Two launchers that only know each other by a rendezvous, two ranks each: the numbers of one process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "flatshift"]
    nodes += ["--rdzv-endpoint", f"127.0.0.1:{port}"]
    short = {"train.steps": 6}
    mesh = {"mesh.replicate": 2, "mesh.dp": 2, **short}
    both = [under_torchrun(nodes, tmp_path / "nodes", **mesh) for _ in range(2)]
    alone = under_torchrun(["--nproc-per-node", "1"], tmp_path / "alone", **short)
    words = [process.communicate(timeout=HANG_S)[1] for process in (*both, alone)]
    assert [process.returncode for process in (*both, alone)] == [0, 0, 0], words
    found = [losses(tmp_path / name) for name in ("nodes", "alone")]
    assert len(found[0]) == 6 and max(abs(a - b) for a, b in zip(*found, strict=True)) <= 3e-5


@pytest.fixture
def two_hosts() -> Iterator[list[list[str]]]:
    """What to put before a command so that it runs in either of two network namespaces, joined by one cable."""
    names = [f"flatshift{os.getpid()}{side}" for side in "ab"]
    cables = [f"fs{os.getpid() % 100_000}{side}" for side in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", cables[0], "netns", names[0], "type", "veth", "peer", "name", cables[1], "netns", names[1])
        for number, (name, cable) in enumerate(zip(names, cables, strict=True), start=1):
            ip("-n", name, "addr", "add", f"10.231.77.{number}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError):
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        pytest.skip("network namespaces cannot be made here")
    try:
        yield [
            ["ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={cable}", f"TP_SOCKET_IFNAME={cable}"]
            for name, cable in zip(names, cables, strict=True)
        ]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.mark.slow
def test_two_hosts_and_then_one(tmp_path: Path, two_hosts: list[list[str]]) -> None:
    """Copies over a real network of shards within each host; one host dies, and the other goes on alone."""
    out, steps = tmp_path / "hosts", {"train.steps": 8, "train.save_every": 2}
    nodes = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "flatshift"]
    nodes += ["--rdzv-endpoint", "10.231.77.1:29511"]
    both = [
        under_torchrun(
            [*nodes, "--local-addr", f"10.231.77.{number}", "--rdzv-conf", f"is_host={int(number == 1)}"],
            out,
            before=before,
            **{"mesh.replicate": 2, "mesh.dp": 2, **steps},
        )
        for number, before in enumerate(two_hosts, start=1)
    ]
    alone = under_torchrun(["--nproc-per-node", "1"], tmp_path / "alone", **steps)
    while not (out / "state" / "step-4").exists():
        assert both[0].poll() is both[1].poll() is None, [
            end.communicate()[1] for end in both if end.poll() is not None
        ]
        time.sleep(0.02)
    ended = subprocess.run(["ip", "netns", "pids", two_hosts[1][3]], check=True, capture_output=True, text=True)
    for pid in ended.stdout.split():  # the launcher and its ranks, at once
        os.kill(int(pid), signal.SIGKILL)
    said = [process.communicate(timeout=HANG_S)[1] for process in both]
    assert both[0].returncode != 0, said
    again = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "flatshift", "train"]
    done = subprocess.run(
        [*two_hosts[0], *again, "--resume", str(out), "--mesh.replicate", "1"],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    assert alone.communicate(timeout=HANG_S) and alone.returncode == 0
    found = [losses(tmp_path / name) for name in ("hosts", "alone")]
    assert len(found[0]) == 8 and max(abs(a - b) for a, b in zip(*found, strict=True)) <= 3e-5


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["split"] == "train"]


def parent_of(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return None


def watch(board: DirectoryKeyValueStore, ended: list[int], *, stall: float = 5.0) -> Watchdog:
    return Watchdog(board, rank=0, size=3, stall=stall, end=ended.append)


def beat(number: int, *, count: int, idle: float, hurried: bool = True) -> Heartbeat:
    return Heartbeat(number, "elsewhere", 1, count, count, "update", idle, 0.2, hurried, "x.py:1 in f")


@pytest.mark.parametrize(
    ("beats", "words"),
    [
        ([(9, 9.0), (8, 9.0), (9, 8.0)], "rank 1 (elsewhere:1) hangs at x.py:1 in f (step 8, update)"),
        ([(9, 9.0), (9, 9.0), (9, 8.0)], "no rank has made progress for 8 s (all are at step 9, update)"),
        ([(9, 9.0), (8, 4.0), (9, 8.0)], None),
        ([(1, 90.0), (1, 90.0), (1, 90.0)], None),
    ],
    ids=["one behind", "all alike", "one moved", "before the first updates"],
)
def test_who_is_furthest_behind(tmp_path: Path, beats: list[tuple[int, float]], words: str | None) -> None:
    board = DirectoryKeyValueStore(tmp_path)
    eye = watch(board, [])
    eye._check_progress({r: beat(1, count=count, idle=idle) for r, (count, idle) in enumerate(beats)})
    cause = board.get("cause")
    assert (cause is None) if words is None else (words in str(cause))


def test_an_unhurried_rank_is_waited_for(tmp_path: Path) -> None:
    board = DirectoryKeyValueStore(tmp_path)
    beats = {0: beat(1, count=9, idle=99.0, hurried=False), 1: beat(1, count=9, idle=99.0)}
    watch(board, [])._check_progress(beats)
    assert board.get("cause") is None


def test_a_wait_without_a_limit_sets_none(tmp_path: Path) -> None:
    eye = watch(DirectoryKeyValueStore(tmp_path), [])
    for phase, seconds, has_timeout in (("update", 0.5, True), ("dev evaluation", 120, False), ("update", 0.7, True)):
        with eye.pace(phase, has_timeout=has_timeout):
            for step in range(3):
                eye.moved -= seconds
                eye.progress(step, phase)
    assert 0.7 <= eye.longest < 20


def test_a_board_of_files(tmp_path: Path) -> None:
    board = DirectoryKeyValueStore(tmp_path)
    assert board.get("a") is None
    board.put("a", "1")
    board.put("a", "2")
    assert board.get("a") == "2" and not board.claim("a", "3") and board.claim("b", "4")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_ranks_get_the_threads_that_they_are_to_have(tmp_path: Path) -> None:
    """In the environment, before torch and BLAS look."""
    code = f"""
import os, pathlib
names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
pathlib.Path({str(tmp_path)!r}, os.environ["RANK"]).write_text(" ".join(os.environ[name] for name in names))
"""
    assert spawn(["-c", code], ranks=2, threads=3) == 0
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["3 3 3"] * 2
