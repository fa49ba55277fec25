"""SIGKILL at random moments of `flatshift train` over (dp 2, tp 2), resumed each time: bits beside an undisturbed run.

    python -m benchmarks.sharding_kills [--kills 50]

Every job is the public command that spawns its own four ranks, with GGPO, dropout and packing on. A kill hits a random
rank or the launcher itself, at a random moment: during the start, in a step, in a save (waited for by its temporary
directory), or while a resumed job loads. A run takes several kills, one after the other, before it is let finish; a
killed rank must end the job within 60 s with one message and code 3, a killed launcher must take its ranks with it.
The adapter at the end must have the bits of the run that nothing happened to.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks._harness import ROOT, Benchmark
from benchmarks.resume_kills import adapter, curve
from flatshift.finetune.run_directory import read_metrics

RANKS, KILLS_A_RUN = 4, 5
STEPS, SAVE_EVERY = 40, 3
SETTINGS = {
    "mesh.dp": 2,
    "mesh.tp": 2,
    "train.steps": STEPS,
    "train.save_every": SAVE_EVERY,
    "train.batch_size": 4,
    "train.max_length": 32,
    "train.max_cut": 1,
    "train.threads": 1,
    "train.precision": "fp32",
    "train.device": "cpu",
    "regularizer.kind": "ggpo",
    "adapter.dropout": 0.05,
    "data.train.limit": 200,
    "data.dev.limit": 8,
    "data.test.limit": 8,
    "eval.bootstrap": 10,
    "eval.train_limit": 0,
}
MOMENTS = ("start", "step", "step", "save", "load")
LIMIT_S, WAIT_S = 60.0, 600.0


def start(out: Path) -> subprocess.Popen[str]:
    """The public command of the run into `out`, or its continuation where `out` is a run already."""
    if (out / "recipe.resolved.yaml").exists():
        words = ["--resume", str(out)]
    else:
        words = ["language-model", "--out", str(out)]
        words += [text for key, value in SETTINGS.items() for text in (f"--{key}", str(value))]
    return subprocess.Popen(
        [sys.executable, "-m", "flatshift", "train", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def ranks_of(launcher: int) -> list[int]:
    """Process ids of the launcher's children, in the order of their ranks."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:2]
        except OSError:
            continue
        if int(parent) == launcher and state != "Z":
            found.append(int(folder.name))
    return sorted(found)


def wait_until(process: subprocess.Popen[str], there: Callable[[], bool]) -> bool:
    """Whether `there()` came true before the job ended."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and process.poll() is None:
        if there():
            return True
        time.sleep(0.002)
    return False


def trained(out: Path) -> int:
    """The newest logged update."""
    return max((line["step"] for line in read_metrics(out / "metrics.jsonl") if line["split"] == "train"), default=0)


def reach(process: subprocess.Popen[str], out: Path, moment: str, draw: random.Random) -> bool:
    """Wait for the moment of a kill; whether it came before the job ended."""
    if moment in ("start", "load"):
        if not wait_until(process, lambda: len(ranks_of(process.pid)) == RANKS):
            return False
        time.sleep(draw.random() * 6)
    else:
        target = trained(out) + draw.randint(1, 6)
        if not wait_until(process, lambda: trained(out) >= target):
            return False
        if moment == "save":
            return wait_until(process, lambda: any((out / "state").glob(".step-*.tmp")))
        time.sleep(draw.random() * 0.3)
    return process.poll() is None


def survive(process: subprocess.Popen[str], draw: random.Random) -> tuple[str, bool, float]:
    """Kill one of the job's processes; who it was, whether the end was in order, and seconds until all were gone."""
    ranks = ranks_of(process.pid)
    victim = draw.choice([process.pid, *ranks])
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    _, errors = process.communicate(timeout=WAIT_S)
    while any(Path(f"/proc/{pid}").exists() and _state(pid) != "Z" for pid in ranks):
        time.sleep(0.01)
    seconds = time.monotonic() - began
    if victim == process.pid:
        return "launcher", process.returncode == -signal.SIGKILL, seconds
    messages = [line for line in errors.splitlines() if line.startswith("flatshift: ")]
    right = process.returncode == 3 and len(messages) == 1 and "was killed by signal 9" in messages[0]
    if not right:
        print(f"    code {process.returncode}: {errors.strip()[-1500:]}", flush=True)
    return f"rank {ranks.index(victim)}", right, seconds


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


def finish(out: Path) -> None:
    """Let the run come to its end."""
    process = start(out)
    _, errors = process.communicate(timeout=WAIT_S)
    if process.returncode != 0:
        raise RuntimeError(f"the run ended with {process.returncode}: {errors.strip()[-2000:]}")


def main() -> None:
    """Measure and write benchmarks/results/sharding_kills.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    wanted = parser.parse_args().kills
    bench = Benchmark("sharding_kills", packages=("torch", "transformers", "peft", "safetensors"))
    draw = random.Random(30)
    kills = orderly = runs = same = curves = leftovers = 0
    slowest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        finish(whole)
        while kills < wanted:
            runs += 1
            out = Path(folder) / f"killed-{runs}"
            hits = 0
            while hits < KILLS_A_RUN and kills < wanted:
                moment = draw.choice(MOMENTS)
                process = start(out)
                if not reach(process, out, moment, draw):
                    _, errors = process.communicate(timeout=WAIT_S)
                    if process.returncode != 0:
                        raise RuntimeError(f"ended by itself with {process.returncode}: {errors.strip()[-2000:]}")
                    break  # it was done before the moment came
                who, right, seconds = survive(process, draw)
                hits, kills, orderly, slowest = hits + 1, kills + 1, orderly + right, max(slowest, seconds)
                print(f"  {kills:2}. run {runs}, {moment}: {who}, gone after {seconds:.1f} s", flush=True)
            finish(out)
            equal = adapter(out) == adapter(whole)
            same, curves = same + equal, curves + (curve(out) == curve(whole))
            leftovers += len(list(out.rglob(".*.tmp")))
            print(f"  run {runs} after {hits} kills: {'same bits' if equal else 'OTHER BITS'}", flush=True)
    bench.row(
        f"kills of {kills} (a random rank or the launcher) after which the job ended with one message and its code",
        unit="kills",
        ours=orderly,
        bar_op="==",
        bar_value=kills,
    )
    bench.row("slowest end of a job after a kill", unit="s", ours=slowest, bar_op="<=", bar_value=LIMIT_S)
    bench.row(
        f"runs of {runs}, together killed {kills} times, whose adapter has the bits of the undisturbed run",
        unit="runs",
        ours=same,
        bar_op="==",
        bar_value=runs,
    )
    bench.row(
        "of these, runs whose whole loss curve is the same", unit="runs", ours=curves, bar_op="==", bar_value=runs
    )
    bench.row("temporary files left in finished runs", unit="files", ours=leftovers, bar_op="==", bar_value=0)
    bench.finish()


if __name__ == "__main__":
    main()
