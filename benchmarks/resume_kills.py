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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks._commands import adapter, curve, finish, start, train_words, trained, wait_until
from benchmarks._harness import Benchmark

STEPS, SAVE_EVERY = 24, 5
SETTINGS = {
    "train.steps": STEPS,
    "train.save_every": SAVE_EVERY,
    "train.eval_every": 7,
    "train.batch_size": 4,
    "train.max_length": 64,
    "train.max_cut": 1,
    "train.threads": 1,
    "train.precision": "fp32",
    "regularizer.kind": "ggpo",
    "adapter.dropout": 0.05,
    "data.train.limit": 300,
    "data.dev.limit": 24,
    "data.test.limit": 24,
    "eval.bootstrap": 20,
    "eval.train_limit": 0,
}

# --------------------------------------------------------------------------------------------- the killed child


def child(place: str, occasion: int, arguments: Sequence[str]) -> None:
    """Run the command line; at the `occasion`-th passage (from 1) of `place`, end this process by SIGKILL."""
    if place != "nowhere":
        _PLACES[place](_counter(occasion))
    from flatshift.cli import run

    raise SystemExit(run(list(arguments)))


def _counter(occasion: int) -> Callable[[], bool]:
    passed = 0

    def now() -> bool:
        nonlocal passed
        passed += 1
        return passed == occasion

    return now


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _half_tensors(now: Callable[[], bool]) -> None:
    import safetensors.torch

    whole = safetensors.torch.save_file

    def save_file(tensors: Any, path: Any, *arguments: Any, **keywords: Any) -> None:
        whole(tensors, path, *arguments, **keywords)
        if now():
            os.truncate(path, Path(path).stat().st_size // 2)
            _die()

    safetensors.torch.save_file = save_file


def _no_json(now: Callable[[], bool]) -> None:
    from flatshift.finetune.train import checkpointer

    whole = checkpointer.write_json

    def write_json(path: Any, value: Any) -> None:
        if now():
            _die()
        whole(path, value)

    checkpointer.write_json = write_json


def _rename(*, after: bool) -> Callable[[Callable[[], bool]], None]:
    def install(now: Callable[[], bool]) -> None:
        whole = Path.replace

        def replace(self: Path, target: Any) -> Path:
            hit = Path(target).name.startswith("step-") and now()
            if hit and not after:
                _die()
            result = whole(self, target)
            if hit:
                _die()
            return result

        Path.replace = replace  # type: ignore[method-assign, assignment]

    return install


def _load(*, after: bool) -> Callable[[Callable[[], bool]], None]:
    def install(now: Callable[[], bool]) -> None:
        from flatshift.finetune.train import checkpointer

        whole = checkpointer.latest_checkpoint

        def latest_checkpoint(*arguments: Any, **keywords: Any) -> Any:
            hit = now()
            if hit and not after:
                _die()
            found = whole(*arguments, **keywords)
            if hit:
                _die()
            return found

        checkpointer.latest_checkpoint = latest_checkpoint

    return install


_PLACES: dict[str, Callable[[Callable[[], bool]], None]] = {
    "save: tensors half written": _half_tensors,
    "save: before state.json": _no_json,
    "rename: just before": _rename(after=False),
    "rename: just after": _rename(after=True),
    "load: before reading": _load(after=False),
    "load: after reading": _load(after=True),
}

# --------------------------------------------------------------------------------------------- the parent


def begin(out: Path, *, place: str = "nowhere", occasion: int = 1) -> subprocess.Popen[str]:
    """A child of its own that trains into `out`, or goes on with it."""
    words = train_words(out, SETTINGS)
    return start(code=f"from benchmarks.resume_kills import child; child({place!r}, {occasion}, {words!r})")


def kill_in_step(out: Path, step: int, delay_s: float) -> None:
    """Start a run and kill it from outside, `delay_s` after update `step` was logged."""
    process = begin(out)
    if not wait_until(process, lambda: trained(out) >= step):
        finish(process, -signal.SIGKILL)
    time.sleep(delay_s)
    process.kill()
    finish(process, -signal.SIGKILL)


def survive(out: Path, place: str, draw: random.Random) -> int:
    """Kill the run at `place`, continue it to its end; returns the step that it continued after."""
    if place == "step":
        kill_in_step(out, draw.randint(1, STEPS - 2), draw.random() * 0.3)
    elif place.startswith("load"):
        kill_in_step(out, draw.randint(SAVE_EVERY + 1, STEPS - 2), draw.random() * 0.3)
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
    places = ["step"] * 4 + list(_PLACES)
    same = curves = leftovers = 0
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        finish(begin(whole))
        for number, place in enumerate(places, start=1):
            out = Path(folder) / f"killed-{number}"
            step = survive(out, place, draw)
            equal = adapter(out) == adapter(whole)
            same += equal
            curves += curve(out) == curve(whole)
            leftovers += len(list(out.rglob(".*.tmp")))
            print(
                f"  {number:2}. {place}: continued after step {step}, {'same bits' if equal else 'OTHER BITS'}",
                flush=True,
            )
    count = len(places)
    bench.row(
        f"kills (4 in a step, 2 in a save, 2 at the rename, 2 in a load) of {count} after which the adapter has the "
        "bits of the uninterrupted run",
        unit="kills",
        ours=same,
        bar_op="==",
        bar_value=count,
    )
    bench.row(
        "of these, runs whose whole loss curve is the same",
        unit="kills",
        ours=curves,
        bar_op="==",
        bar_value=count,
    )
    bench.row("temporary files left in finished runs", unit="files", ours=leftovers, bar_op="==", bar_value=0)
    bench.finish()


if __name__ == "__main__":
    main()
