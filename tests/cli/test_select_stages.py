"""Stages of `flatshift select --on`: the selection of one process, bit for bit, over shards of the pool."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from flatshift.cli import run
from flatshift.finetune.data.rows import read_rows
from tests.support.patience import HANG_S

pytest.importorskip("datatrove")

ROOT = Path(__file__).resolve().parents[2]
FILES = 3
HYGIENE = [
    "--select.hygiene.exact", "true",
    "--select.hygiene.near", "{}",
    "--select.hygiene.length", "{min_words: 3}",
    "--select.hygiene.decontaminate", "{}",
    "--select.hygiene.repetition", "{}",
]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a pool in several files, a target, and texts to evaluate on.

    The pool has copies, near copies and blank texts, each in another file than the original, and passages with a text
    of the evaluation in them.
    """
    root = tmp_path_factory.mktemp("data")
    texts = [row.values["text"] for row, _ in zip(read_rows(["sample:pool"]), range(540), strict=False)]
    evaluation = [text for text in texts[500:540] if len(text.split()) >= 20]
    texts = texts[:500]
    texts[300:310] = texts[20:30]
    texts[310:320] = [f"{text} Again." for text in texts[30:40]]
    texts[400:404] = [" ", "", "one two", "\t"]
    around = [" ".join(texts[low : low + 6]) for low in range(100, 160, 6)]
    texts[450:455] = [f"{around[k]} {text} {around[k + 5]}" for k, text in enumerate(evaluation[:5])]
    (root / "pool").mkdir()
    for number in range(FILES):
        rows = list(enumerate(texts))[number * 167 : (number + 1) * 167]
        lines = [json.dumps({"id": f"r{i}", "text": text, "domain": f"d{i % 3}"}) + "\n" for i, text in rows]
        (root / "pool" / f"{number}.jsonl").write_text("".join(lines), encoding="utf-8")
    target = [row.values["text"] for row, _ in zip(read_rows(["sample:banking/train"]), range(60), strict=False)]
    for name, side in (("target", target), ("eval", evaluation)):
        lines = [json.dumps({"text": text}) + "\n" for text in side]
        (root / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return root


def select(data: Path, out: Path, *more: str, pool: str = "pool/*.jsonl") -> int:
    words = ["select", "--pool", str(data / pool), "--target", str(data / "target.jsonl"), "--budget", "40"]
    return run([*words, "--data.holdout", "0", "--backbone", "flatshift-5m", "--out", str(out), *more])


def clean(data: Path) -> list[str]:
    return [*HYGIENE, "--select.eval.files", str(data / "eval.jsonl")]


def without_times(value: Any) -> Any:
    """Return a manifest without what two runs of one command differ in."""
    if isinstance(value, list):
        return [without_times(item) for item in value]
    if not isinstance(value, dict):
        return value
    names = ("created", "seconds", "peak_bytes")
    return {name: without_times(item) for name, item in value.items() if name not in names}


def check_equal(one: Path, other: Path) -> None:
    assert pq.read_table(one / "scores.parquet").equals(pq.read_table(other / "scores.parquet"))
    names = sorted(path.name for path in one.iterdir() if path.is_file())
    assert names == sorted(path.name for path in other.iterdir() if path.is_file())
    for name in ("selected.jsonl", "drops.jsonl", "recipe.resolved.yaml"):
        if (one / name).is_file():
            assert (one / name).read_bytes() == (other / name).read_bytes()
    manifests = [without_times(json.loads((out / "manifest.json").read_text(encoding="utf-8"))) for out in (one, other)]
    assert manifests[0] == manifests[1]


@pytest.mark.parametrize("method", ["dsir", "moore-lewis", "cynical", "gotd", "knn", "classifier"])
def test_a_selection_by_shards_is_that_of_one_process(data: Path, tmp_path: Path, method: str) -> None:
    words = [*clean(data), "--method", method, "--domain-column", "domain"]
    words += ["--embedder", "tokens" if method == "knn" else "tfidf"] if method in ("gotd", "knn") else []
    assert select(data, tmp_path / "one", *words) == 0
    assert select(data, tmp_path / "shards", *words, "--on", "local:1") == 0
    check_equal(tmp_path / "one", tmp_path / "shards")
    drops = (tmp_path / "one" / "drops.jsonl").read_text(encoding="utf-8")
    for cause in ("length", "exact-duplicate", "near-duplicate", "cut"):
        assert f'"{cause}"' in drops


@pytest.mark.parametrize("repeats", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_cynical_by_shards_chooses_among_equal_texts_as_one_process(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repeats: int
) -> None:
    monkeypatch.setattr("flatshift.selection.methods.cynical._LOOKS", 20)
    monkeypatch.setattr("flatshift.selection.methods.cynical._BLOCK", 7)
    for module, name in (("finetune.data.view", "FILES"), ("selection.features.tokens", "SHARDS")):
        monkeypatch.setattr(f"flatshift.{module}._OPEN_{name}", 1)
    texts = [json.loads(line)["text"] for line in (data / "pool" / "0.jsonl").read_text(encoding="utf-8").splitlines()]
    (tmp_path / "pool").mkdir()
    for number in range(FILES):  # the same texts in every file
        lines = [json.dumps({"id": f"{number}-{i}", "text": text}) + "\n" for i, text in enumerate(texts)]
        (tmp_path / "pool" / f"{number}.jsonl").write_text("".join(lines), encoding="utf-8")
    for name in ("target.jsonl", "eval.jsonl"):
        shutil.copy(data / name, tmp_path)
    words = ["--method", "cynical", "--select.method.repeats", str(repeats)]
    words += [*HYGIENE[4:], "--select.eval.files", str(tmp_path / "eval.jsonl")]  # equal texts stay
    assert select(tmp_path, tmp_path / "one", *words) == 0
    assert select(tmp_path, tmp_path / "shards", *words, "--on", "local:2") == 0
    check_equal(tmp_path / "one", tmp_path / "shards")
    manifest = json.loads((tmp_path / "one" / "manifest.json").read_text(encoding="utf-8"))["selection"]
    assert manifest["passes"] > 1 and manifest["taken"] >= 40
    assert (manifest.get("most_times", 1) > 1) == (repeats > 1)


@pytest.mark.parametrize(
    "words",
    [
        [
            "dsir",
            "--select.method.hashing",
            "sha256",
            "--select.method.resample",
            "true",
            "--select.hygiene.drops",
            "DROPS",
        ],
        ["gotd", "--embedder", "backbone", "--select.chunk.size", "30", "--select.pool.limit", "80"],
        ["knn", "--pool-features", "POOL", "--target-features", "TARGET", "--bad-rows", "skip"],
    ],
    ids=["dsir", "gotd", "knn"],
)
def test_settings_hold_for_shards(data: Path, tmp_path: Path, words: list[str]) -> None:
    removed = [json.dumps({"id": f"r{number}", "why": "removed"}) + "\n" for number in (3, 250, 499)]
    (tmp_path / "drops.jsonl").write_text("".join(removed), encoding="utf-8")
    generator = np.random.default_rng(0)
    for name, rows in (("pool", 500), ("target", 60)):
        np.save(tmp_path / f"{name}.npy", generator.standard_normal((rows, 5)).astype(np.float32))
    files = {"DROPS": "drops.jsonl", "POOL": "pool.npy", "TARGET": "target.npy"}
    words = ["--method", *(str(tmp_path / files[word]) if word in files else word for word in words)]
    assert select(data, tmp_path / "one", *words) == 0
    assert select(data, tmp_path / "shards", *words, "--on", "local:1") == 0
    check_equal(tmp_path / "one", tmp_path / "shards")


def test_trigrams_beyond_the_memory_are_counted_in_one_process(data: Path, tmp_path: Path) -> None:
    texts = [row.values["text"] for row, _ in zip(read_rows(["sample:pool"]), range(1500), strict=False)]
    shutil.copy(data / "target.jsonl", tmp_path)
    (tmp_path / "pool").mkdir()
    for number in range(2):
        lines = [json.dumps({"text": text}) + "\n" for text in texts[number::2]]
        (tmp_path / "pool" / f"{number}.jsonl").write_text("".join(lines), encoding="utf-8")
    words = ["--method", "moore-lewis", "--select.method.memory_gib", "0.001"]
    assert select(tmp_path, tmp_path / "one", *words) == 0
    manifest = json.loads((tmp_path / "one" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["selection"]["ngrams_dropped_up_to"] > 0
    assert select(tmp_path, tmp_path / "shards", *words, "--on", "local:1") == 0
    check_equal(tmp_path / "one", tmp_path / "shards")


@pytest.mark.slow
def test_processes_divide_the_transport_over_the_vectors_of_shards(data: Path, tmp_path: Path) -> None:
    words = ["--method", "gotd", "--select.checks", "false", "--processes", "1"]
    assert select(data, tmp_path / "one", *words) == 0
    assert select(data, tmp_path / "shards", *words, "--on", "local:2") == 0
    check_equal(tmp_path / "one", tmp_path / "shards")


SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from flatshift.cli import run
from flatshift.selection.methods.dsir import NgramHasher

root, text = Path(sys.argv[1]), sys.argv[2]
batches = NgramHasher.batches


def batches_of_a_killed_command(self, texts, start=0):
    second = texts[0] == text
    with (root / ("second" if second else "other")).open("a") as calls:
        calls.write("x")
    victim = (root / "victim").read_text()
    if second and victim:
        while not list(root.glob("out/state/kept/shards/n-grams-*/00000.json")):
            time.sleep(0.02)
        (root / "victim").write_text("")
        (root / "pid").write_text(str(os.getpid()))
        os.kill(os.getpid() if victim == "worker" else os.getppid(), signal.SIGKILL)
        time.sleep(600)
    return batches(self, texts, start)


NgramHasher.batches = batches_of_a_killed_command
if __name__ == "__main__":
    sys.exit(run(sys.argv[3:]))
"""


@pytest.mark.slow
def test_the_same_command_continues_after_a_worker_and_the_driver_are_killed(data: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    words = ["--pool", str(data / "pool/*.jsonl"), "--target", str(data / "target.jsonl"), "--budget", "40"]
    words += ["--data.holdout", "0", "--backbone", "flatshift-5m", "--method", "dsir", "--on", "local:2"]
    second = list(read_rows([str(data / "pool" / "0.jsonl")]))[497 // FILES].values["text"]  # three are blank
    command = [sys.executable, "script.py", str(tmp_path), second, "select", *words, "--out", str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}

    def run_and_kill(victim: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "victim").write_text(victim, encoding="utf-8")
        return subprocess.run(
            command, check=False, cwd=tmp_path, env=environment, text=True, timeout=HANG_S, capture_output=True
        )

    killed = run_and_kill("worker")
    assert killed.returncode == 2
    assert "a worker was killed in the stage 'n-grams' (out of memory?); finished shards are kept" in killed.stderr
    killed = run_and_kill("driver")
    assert killed.returncode == -signal.SIGKILL
    wait_until_gone(int((tmp_path / "pid").read_text(encoding="utf-8")))
    before = (tmp_path / "other").read_text(encoding="utf-8")
    again = run_and_kill("")
    assert again.returncode == 0, again.stderr
    assert "read pool" not in again.stderr and "of 3 shards are finished" in again.stderr
    # The target is hashed again, the first shard is not; the third may have been under way.
    assert len((tmp_path / "other").read_text(encoding="utf-8")) - len(before) <= 2
    assert (tmp_path / "second").read_text(encoding="utf-8") == "xxx"
    assert select(data, tmp_path / "one", "--method", "dsir") == 0
    check_equal(tmp_path / "one", tmp_path / "out")


def wait_until_gone(pid: int) -> None:
    end = time.monotonic() + HANG_S
    while time.monotonic() < end:
        try:
            status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        except FileNotFoundError:
            return
        if status.rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError(f"worker {pid} lives on without the process that started it")


def interrupt(shard: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture
def unfinished(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """Return a directory with a copy of the data and the state of a selection interrupted in its last stage."""
    shutil.copytree(data, tmp_path / "data")
    monkeypatch.setattr("flatshift.experiments.select.stages._TASKS_A_WORKER", 1)  # so that a task has three shards
    with monkeypatch.context() as patch:
        patch.setattr("flatshift.selection.methods.dsir._sum_gains", interrupt)
        assert select(tmp_path / "data", tmp_path / "out", "--method", "dsir", "--on", "local:1") == 3
    assert "what was reached is kept" in capsys.readouterr().err
    return tmp_path


def test_a_shard_that_changed_or_is_missing_is_named_and_nothing_is_lost(
    unfinished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = unfinished / "data", unfinished / "out"
    file = data / "pool" / "1.jsonl"
    content = file.read_bytes()

    def refusal() -> str:
        capsys.readouterr()
        assert select(data, out, "--method", "dsir", "--on", "local:1") == 2
        return capsys.readouterr().err

    file.write_bytes(content.replace(b"the", b"teh", 1))
    assert f"{file} has changed since the unfinished selection read it; restore it, or name another --out" in refusal()
    file.unlink()
    assert f"{file} is missing, and the unfinished selection reads it; restore it" in refusal()
    file.write_bytes(content)
    (data / "pool" / "3.jsonl").write_bytes(content)
    assert f"{data / 'pool' / '3.jsonl'}: the unfinished selection reads other files" in refusal()
    (data / "pool" / "3.jsonl").unlink()
    lost = next((out / "state" / "kept" / "shards").glob("n-grams-*/00001.ngrams.npy"))
    lost.write_bytes(lost.read_bytes()[:-1])  # done again
    capsys.readouterr()
    assert select(data, out, "--method", "dsir", "--on", "local:1") == 0
    assert "n-grams: 2 of 3 shards are finished" in capsys.readouterr().err
    assert select(data, unfinished / "one", "--method", "dsir") == 0
    check_equal(unfinished / "one", out)


def test_mistakes_in_the_pool_are_those_of_one_process(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(data / "pool", tmp_path / "pool")
    shutil.copy(data / "target.jsonl", tmp_path)
    file = tmp_path / "pool" / "2.jsonl"
    content = file.read_bytes()
    for line in (b'{"id": "r3", "text": "twice"}\n', b'{"id": "r999", "txt": "none"}\n', b"{broken\n"):
        file.write_bytes(content + line)
        errors = []
        for more in ([], ["--on", "local:1"]):
            capsys.readouterr()
            assert select(tmp_path, tmp_path / "out", "--method", "dsir", *more) == 2
            errors.append(capsys.readouterr().err.splitlines()[-1])
        assert errors[0] == errors[1] and "2.jsonl:167" in errors[0]
    (tmp_path / "pool" / "1.jsonl").write_bytes(b"{broken\n" + (tmp_path / "pool" / "1.jsonl").read_bytes())
    words = ["--method", "dsir", "--bad-rows", "skip", "--select.pool.limit", "300", "--domain-column", "domain"]
    assert select(tmp_path, tmp_path / "one", *words) == 0
    assert select(tmp_path, tmp_path / "shards", *words, "--on", "local:1") == 0
    check_equal(tmp_path / "one", tmp_path / "shards")
    for columns in (["--domain-column", "nowhere"], ["--id-column", "nowhere"]):
        capsys.readouterr()
        assert select(tmp_path, tmp_path / "other", *words[:6], *columns, "--on", "local:1") == 2
        assert "no column 'nowhere'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--on", "locl:2", "--method", "dsir"], "--on 'locl:2' is no executor; take local[:WORKERS], slurm"),
        (["--on", "local:0", "--method", "dsir"], "--on local:0: the number of workers must be at least 1"),
        (["--on", "local:", "--method", "dsir"], "--on 'local:' is no executor"),
        (["--on", "local", "--method", "random"], "--on: random is scored by one process; leave --on out, or take a"),
        (["--on", "local", "--method", "gotd", "--embedder", "gradients"], "the second moments of gradients"),
        (["--on", "local", "--method", "knn", "--select.cache", "cache"], "select.cache: with --on"),
        (["--on", "slurm", "--method", "dsir"], "there is no sbatch here"),
        (["--on", "ray:127.0.0.1:1", "--method", "dsir"], "--on ray: no Ray cluster at 127.0.0.1:1"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    if words[1].startswith("ray"):
        pytest.importorskip("ray")
    assert select(data, tmp_path / "out", *words) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


SLURM = """#!/bin/bash
# sbatch: with RUNS every task of the array, one after another; squeue: the job has ended; srun: the command itself.
case "$(basename "$0")" in
  squeue) exit 0 ;;
  srun) while [[ "$1" == -* ]]; do [ "$1" = -n ] && shift; shift; done; exec "$@" ;;
  scontrol) echo localhost; exit 0 ;;
  merge_stats) exit 0 ;;
  launch_pickled_pipeline) exec "$PYTHON" -m datatrove.tools.launch_pickled_pipeline "$@" ;;
esac
script="${@: -1}"
cat "$script" >> "$SCRIPTS"
[ -n "$RUNS" ] || { echo "Submitted batch job 77"; exit 0; }
last=$(sed -n 's/^#SBATCH --array=0-//p' "$script")
export RUN_OFFSET=0 SLURM_NODELIST=localhost SLURM_JOB_ID=77
for SLURM_ARRAY_TASK_ID in $(seq 0 "$last"); do
  export SLURM_ARRAY_TASK_ID
  bash "$script" >> "$SCRIPTS.log" 2>&1 || exit 1
done
echo "Submitted batch job 77"
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file to which a stand-in of Slurm appends the scripts that it is given, and runs if RUNS is set."""
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "srun", "squeue", "scontrol", "merge_stats", "launch_pickled_pipeline"):
        (tmp_path / "bin" / name).write_text(SLURM, encoding="utf-8")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("SCRIPTS", str(tmp_path / "scripts"))
    # The programs next to Python come first in the job's PATH.
    monkeypatch.setattr("flatshift.experiments.select.stages.sys.executable", str(tmp_path / "bin" / "python"))
    return tmp_path / "scripts"


def read_jobs(scripts: Path) -> list[str]:
    """Return the scripts of stages, without those that merge datatrove's statistics."""
    texts = scripts.read_text(encoding="utf-8").split("#!/bin/bash\n")
    return [text for text in texts if "launch_pickled_pipeline" in text]


def test_a_stage_on_slurm_is_an_array_of_jobs(
    data: Path, tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("flatshift.experiments.select.stages._SETTLE_S", 0.0)
    monkeypatch.setattr("flatshift.experiments.select.stages._POLL_S", 0.01)
    assert select(data, tmp_path / "out", "--method", "dsir", "--on", "slurm:cpu") == 2
    assert "--on slurm: shard 0 of 3 of the stage 'read pool' was not finished" in capsys.readouterr().err
    logs = tmp_path / "out" / "state" / "kept" / "shards" / "read" / "datatrove"
    (job,) = read_jobs(slurm)
    assert job.splitlines() == [
        "#SBATCH --cpus-per-task=1",
        "#SBATCH --mem-per-cpu=2G",
        "#SBATCH --nodes=1",
        "#SBATCH --partition=cpu",
        "#SBATCH --job-name=flatshift-read-pool",
        f"#SBATCH --output={logs}/slurm_logs/%A_%a.out",
        f"#SBATCH --error={logs}/slurm_logs/%A_%a.out",
        "#SBATCH --array=0-2",
        "#SBATCH --requeue",
        'echo "Starting data processing job flatshift-read-pool"',
        f"export PATH={tmp_path / 'bin'}:$PATH",
        "set -xe",
        "export PYTHONUNBUFFERED=TRUE",
        f"srun  -l -n 1 launch_pickled_pipeline {logs}/executor.pik",
    ]


@pytest.mark.slow
def test_a_selection_on_slurm_is_that_of_one_process(
    data: Path, tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNS", "1")
    files = "pool/[01].jsonl"
    assert select(data, tmp_path / "slurm", "--method", "dsir", "--on", "slurm", pool=files) == 0
    jobs = read_jobs(slurm)
    names = [line.partition("=")[2] for job in jobs for line in job.splitlines() if "job-name" in line]
    assert names == [f"flatshift-{stage}" for stage in ("read-pool", "blank-texts", "n-grams", "weights")]
    assert not any("partition" in job for job in jobs)
    assert select(data, tmp_path / "one", "--method", "dsir", pool=files) == 0
    check_equal(tmp_path / "one", tmp_path / "slurm")


@pytest.mark.slow
def test_stages_run_on_a_cluster_of_ray(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "memory": 1 << 30})
    try:
        assert select(data, tmp_path / "ray", "--method", "dsir", "--on", f"ray:{cluster.address}") == 2
        assert "no node of the Ray cluster has 1 CPU and 2.0 GiB of memory for a task" in capsys.readouterr().err
        for _ in range(2):
            cluster.add_node(num_cpus=1, memory=4 << 30)
        assert select(data, tmp_path / "ray", "--method", "dsir", "--on", f"ray:{cluster.address}") == 0
    finally:
        cluster.shutdown()
    assert select(data, tmp_path / "one", "--method", "dsir") == 0
    check_equal(tmp_path / "one", tmp_path / "ray")
