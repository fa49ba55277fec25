"""`kill -9` at ten random moments of `flatshift train`, resumed: the adapter's bytes beside an uninterrupted run.

    python -m benchmarks.resume_kills

Every run is a process of its own of the public command, with dropout, GGPO, dev evaluation and packing on. The
moments are stratified: anywhere in a step (from outside, at a random time), inside the save (tensor file half written;
tensors written but not state.json), around the rename (just before, just after), and while a resumed run loads
(before it reads, after it has read). Places inside save, rename and load are reached by a driver that wraps the
function in question and kills its own process there.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._commands import QUICK, Outcomes, finish, start, train_words, trained, wait_until
from benchmarks._harness import Benchmark

STEPS, SAVE_EVERY = 24, 5
SETTINGS = f"""{QUICK} --eval.train_limit 0 --train.steps {STEPS} --train.save_every {SAVE_EVERY} --train.eval_every 7
    --train.batch_size 4 --train.max_length 64 --regularizer.kind ggpo --adapter.dropout 0.05
    --data.train.limit 300 --data.dev.limit 24 --data.test.limit 24"""
PLACES = (
    "save: tensors half written",
    "save: before state.json",
    "rename: just before",
    "rename: just after",
    "load: before reading",
    "load: after reading",
)


def child(place: str, occasion: int, arguments: Sequence[str]) -> None:
    """Run the command line; at the `occasion`-th passage (from 1) of `place`, end this process by SIGKILL."""
    if place in PLACES:
        kill_at(place, occasion)
    from flatshift.cli import run

    raise SystemExit(run(list(arguments)))


def kill_at(place: str, occasion: int) -> None:
    """Wrap the function of that place."""
    import safetensors.torch

    from flatshift.finetune.train import checkpointer

    owners: tuple[tuple[Any, str], ...] = (
        (safetensors.torch, "save_file"),
        (checkpointer, "write_json"),
        (Path, "replace"),
        (Path, "replace"),
        (checkpointer, "latest_checkpoint"),
        (checkpointer, "latest_checkpoint"),
    )
    owner, name = owners[PLACES.index(place)]
    usual, before, passed = getattr(owner, name), "before" in place, 0

    def call(*arguments: Any, **keywords: Any) -> Any:
        nonlocal passed
        passed += name != "replace" or Path(arguments[1]).name.startswith("step-")
        hit = passed == occasion
        if hit and before:
            os.kill(os.getpid(), signal.SIGKILL)
        result = usual(*arguments, **keywords)
        if hit:
            if name == "save_file":
                os.truncate(arguments[1], Path(arguments[1]).stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, call)


def begin(out: Path, *, place: str = "nowhere", occasion: int = 1) -> subprocess.Popen[str]:
    """A child of its own that trains into `out`, or goes on with it."""
    words = train_words(out, SETTINGS)
    return start(code=f"from benchmarks.resume_kills import child; child({place!r}, {occasion}, {words!r})")


def kill_in_step(out: Path, first: int, draw: random.Random) -> None:
    """Start a run and kill it from outside, a little after some update from `first` on was logged."""
    process, step = begin(out), draw.randint(first, STEPS - 2)
    if wait_until(process, lambda: trained(out) >= step):
        time.sleep(draw.random() * 0.3)
        process.kill()
    finish(process, -signal.SIGKILL)


def survive(out: Path, place: str, draw: random.Random) -> int:
    """Kill the run at `place`, continue it to its end; returns the step that it continued after."""
    if place == "step":
        kill_in_step(out, 1, draw)
    elif place.startswith("load"):
        kill_in_step(out, SAVE_EVERY + 1, draw)
        finish(begin(out, place=place), -signal.SIGKILL)
    else:
        finish(begin(out, place=place, occasion=draw.randint(1, STEPS // SAVE_EVERY)), -signal.SIGKILL)
    finish(begin(out))
    log = (out / "log.txt").read_text(encoding="utf-8")
    return max((int(line.rsplit(" ", 1)[1]) for line in log.splitlines() if "continues after step" in line), default=0)


def main() -> None:
    """Measure and write benchmarks/results/resume_kills.json."""
    bench = Benchmark("resume_kills", packages=("torch", "transformers", "peft", "safetensors"))
    draw = random.Random(20)
    with tempfile.TemporaryDirectory() as folder:
        outcomes = Outcomes(Path(folder) / "whole")
        finish(begin(outcomes.whole))
        for number, place in enumerate(["step"] * 4 + list(PLACES), start=1):
            out = Path(folder) / f"killed-{number}"
            step = survive(out, place, draw)
            outcomes.add(out, f"{number:2}. {place}, continued after step {step}")
    kills = f"kills (4 in a step, 2 in a save, 2 at the rename, 2 in a load) of {outcomes.runs}"
    outcomes.rows(bench, f"{kills} after which the adapter has the bits of the uninterrupted run", "kills")
    bench.finish()


if __name__ == "__main__":
    main()
