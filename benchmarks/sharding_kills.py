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
import tempfile
import time
from pathlib import Path

from benchmarks._commands import (
    QUICK,
    WAIT_S,
    Outcomes,
    children_of,
    finish,
    start,
    state_of,
    train_words,
    trained,
    wait_until,
)
from benchmarks._harness import Benchmark

RANKS, KILLS_A_RUN = 4, 5
SETTINGS = f"""{QUICK} --eval.train_limit 0 --mesh.dp 2 --mesh.tp 2 --train.steps 40 --train.save_every 3
    --train.batch_size 4 --train.max_length 32 --regularizer.kind ggpo --adapter.dropout 0.05
    --data.train.limit 200 --data.dev.limit 8 --data.test.limit 8"""
MOMENTS = ("start", "step", "step", "save", "load")
LIMIT_S = 60.0


def begin(out: Path) -> subprocess.Popen[str]:
    """The public command of the run into `out`, or its continuation where `out` is a run already."""
    return start(*train_words(out, SETTINGS))


def reach(process: subprocess.Popen[str], out: Path, moment: str, draw: random.Random) -> bool:
    """Wait for the moment of a kill; whether it came before the job ended."""
    if moment in ("start", "load"):
        if not wait_until(process, lambda: len(children_of(process.pid)) == RANKS):
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
    ranks = children_of(process.pid)
    victim = draw.choice([process.pid, *ranks])
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    _, errors = process.communicate(timeout=WAIT_S)
    while any(state_of(pid)[0] != "Z" for pid in ranks):
        time.sleep(0.01)
    seconds = time.monotonic() - began
    if victim == process.pid:
        return "launcher", process.returncode == -signal.SIGKILL, seconds
    messages = [line for line in errors.splitlines() if line.startswith("flatshift: ")]
    right = process.returncode == 3 and len(messages) == 1 and "was killed by signal 9" in messages[0]
    if not right:
        print(f"    code {process.returncode}: {errors.strip()[-1500:]}", flush=True)
    return f"rank {ranks.index(victim)}", right, seconds


def main() -> None:
    """Measure and write benchmarks/results/sharding_kills.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    wanted = parser.parse_args().kills
    bench = Benchmark("sharding_kills", packages=("torch", "transformers", "peft", "safetensors"))
    draw = random.Random(30)
    kills = orderly = 0
    slowest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        outcomes = Outcomes(Path(folder) / "whole")
        finish(begin(outcomes.whole))
        while kills < wanted:
            run, hits = outcomes.runs + 1, 0
            out = Path(folder) / f"killed-{run}"
            while hits < KILLS_A_RUN and kills < wanted:
                moment, process = draw.choice(MOMENTS), begin(out)
                if not reach(process, out, moment, draw):
                    finish(process)
                    break  # it was done before the moment came
                who, right, seconds = survive(process, draw)
                hits, kills, orderly, slowest = hits + 1, kills + 1, orderly + right, max(slowest, seconds)
                print(f"  {kills:2}. run {run}, {moment}: {who}, gone after {seconds:.1f} s", flush=True)
            finish(begin(out))
            outcomes.add(out, f"run {run} after {hits} kills")
    what = f"kills of {kills} (a random rank or the launcher) after which the job ended with one message and its code"
    bench.row(what, "kills", ours=orderly, exactly=kills)
    bench.row("slowest end of a job after a kill", "s", ours=slowest, maximum=LIMIT_S)
    runs = f"runs of {outcomes.runs}, together killed {kills} times"
    outcomes.rows(bench, f"{runs}, whose adapter has the bits of the undisturbed run", "runs")
    bench.finish()


if __name__ == "__main__":
    main()
