"""Everything once on the device by the code of a run: a step of each objective and regularizer, a resume, commands.

Each of them takes a second or two, and says nothing but that it works: a loss and an adapter that are numbers, a
command that ends with 0. `waits` counts how often the host waits for the device in an update.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import itertools
import math
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.measurements import Figures
from benchmarks.gpu.parity import objective, trained, unlike

SMALL = (
    *("--train.steps", "2", "--train.batch_size", "2", "--train.max_length", "128", "--eval.bootstrap", "10"),
    *("--data.train.limit", "16", "--data.dev.limit", "8", "--data.test.limit", "8"),
)
COMMANDS: dict[str, tuple[str, ...]] = {
    "doctor": ("doctor", "--deep"),
    "train": ("train", "language-model", *SMALL, "--train.checkpointing", "full", "--train.device", "DEVICE"),
    "eval": ("eval", "RUN:classify", "--train.device", "DEVICE"),
    "predict": ("predict", "RUN:classify", "--data", "sample:banking/dev", "--device", "DEVICE", "--out", "OUT.jsonl"),
    "generate": ("generate", "RUN:seq2seq", "--prompt", "My card is lost.", "--device", "DEVICE", "--out", "OUT.jsonl"),
    "select": (
        *("select", "--method", "gotd", "--pool", "sample:banking/train", "--target", "sample:banking/dev"),
        *("--budget", "20", "--train.device", "DEVICE", "--out", "OUT"),
    ),
    "select-embedded": (
        *("select", "--method", "gotd", "--pool", "sample:banking/dev", "--target", "sample:banking/test"),
        *("--budget", "20", "--embedder", "backbone", "--train.device", "DEVICE", "--out", "OUT"),
    ),
}
"""Command lines; `RUN:RECIPE` is the directory of a small finished run of it, on the same device."""


class _Stop(Exception):
    """Ends a run in the middle."""


def step(
    *,
    device: str,
    kind: str,
    regularizer: str = "plain",
    pack: bool | None = None,
    rows: int = 2,
    length: int = 128,
    limit: int = 16,
    updates: int = 2,
) -> Figures:
    """Two updates of an objective with a regularizer in bf16: seconds, with all that a stage needs before."""
    start = time.perf_counter()
    result = objective(kind, rows=rows, length=length, limit=limit, pack=pack)
    with tempfile.TemporaryDirectory() as folder:
        losses, moved = trained(
            result,
            updates=updates,
            device=device,
            precision="bf16",
            regularizer=regularizer,
            folder=Path(folder) / "run",
        )
    took = time.perf_counter() - start
    if len(losses) != updates or not all(map(math.isfinite, losses)):
        raise RuntimeError(f"losses {losses} of {updates} updates")
    sums = [float(by.abs().sum()) for by in moved.values()]
    if not all(map(math.isfinite, sums)) or not any(sums):
        raise RuntimeError(f"the adapter did not train: its tensors moved by {sorted(set(sums))[:4]}")
    return {"seconds": {"ours": took}}


def resume(*, device: str, updates: int = 4, limit: int = 16) -> Figures:
    """Numbers that differ between a run that was left after an update and went on, and one that was not."""
    result = objective("language-model", rows=2, length=64, limit=limit)

    def stop(line: dict[str, Any]) -> None:
        if line["step"] == updates - 1:
            raise _Stop

    def run(folder: Path, on_step: Any = None) -> dict[str, Any]:
        return trained(
            result,
            updates=updates,
            device=device,
            precision="bf16",
            regularizer="ggpo",
            folder=folder,
            save_every=2,
            on_step=on_step,
            deterministic=True,
        )[1]

    with tempfile.TemporaryDirectory() as place:
        whole = run(Path(place) / "whole")
        with contextlib.suppress(_Stop):
            run(Path(place) / "left", stop)
        return {"resumed": {"ours": float(unlike(run(Path(place) / "left"), whole))}}


# --------------------------------------------------------------------------------------------- commands


def command(*, device: str, line: str) -> Figures:
    """Seconds of a command of `COMMANDS`, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        words = [_word(word, device, Path(folder) / "out") for word in COMMANDS[line]]
        if words[0] == "train":
            words += ["--out", str(Path(folder) / "out")]
        start = time.perf_counter()
        _flatshift(words)
        return {"seconds": {"ours": time.perf_counter() - start}}


def _word(word: str, device: str, out: Path) -> str:
    if word.startswith("RUN:"):
        return str(_run(word.removeprefix("RUN:"), device))
    return {"DEVICE": device, "OUT": str(out), "OUT.jsonl": f"{out}.jsonl"}.get(word, word)


@functools.cache
def _run(recipe: str, device: str) -> Path:
    """A finished run, which lasts as long as this process."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _flatshift(["train", recipe, *SMALL, "--train.device", device, "--out", str(folder / "run")])
    return folder / "run"


def _flatshift(words: Sequence[str]) -> None:
    """Run a command; RuntimeError with what it said if it did not end with 0."""
    from flatshift.cli import run

    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = run(list(words))
    if code != 0:
        raise RuntimeError(f"flatshift {words[0]} ended with {code}\n{' '.join(words)}\n{output.getvalue()[-4000:]}")


# --------------------------------------------------------------------------------------------- waits


def waits(
    *,
    device: str,
    regularizer: str = "plain",
    shape: Sequence[Any] = (512, 1536, 4, 8, 4, 32_000, True),
    sequence: int = 256,
    warm: int = 3,
    updates: int = 12,
) -> Figures:
    """Waits of the host for the device in the update that waits most, with their places; lines come due on the way."""
    from benchmarks._rehearsal import REGULARIZERS
    from benchmarks.gpu.llama import Shape
    from benchmarks.gpu.speed import Case, stage_of
    from flatshift.finetune.train.trainer import Trainer

    marks: list[int] = []
    precision = "bf16" if device.startswith("cuda") else "fp32"  # autocast of a CPU is not that of the rehearsal
    case = Case(Shape(*shape), sequence, 2, rank=8, precision=precision)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder, _waits_of(device) as seen:

        def passed() -> bool:
            marks.append(len(seen))
            return False

        model, tokenizer, stage = stage_of(
            case, device, Path(folder) / "run", regularizer=REGULARIZERS[regularizer], stop=passed
        )
        Trainer(model, tokenizer, replace(stage, train=replace(stage.train, steps=warm + updates + 1))).fit()
        # The updates before are also those that find out what lasts for a stage; the last one saves.
        first, *later = marks[warm : warm + updates + 1]
        counts = [last - before for before, last in itertools.pairwise((first, *later))]
        places = Counter(map(str, seen[first : later[-1]])).most_common(4)
    where = "; ".join(f"{place}: {times}" for place, times in places) or "none"
    return {"most": {"ours": float(max(counts)), "reason": f"{sum(counts)} in {updates} updates ({where})"}}


@contextlib.contextmanager
def _waits_of(device: str) -> Iterator[list[Any]]:
    """The waits inside so far: as CUDA reports them, or as the rehearsal counts them on a CPU."""
    import torch

    from benchmarks.cuda_rehearsal import Rehearsal, place

    if torch.device(device).type != "cuda":
        with Rehearsal(on="cpu") as rehearsal:
            yield rehearsal.waits
        return
    results: list[Any] = []

    def note(message: Any, *about: Any, **more: Any) -> None:
        if "called a synchronizing CUDA operation" in str(message):
            results.append(place())

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield results
        finally:
            torch.cuda.set_sync_debug_mode("default")
