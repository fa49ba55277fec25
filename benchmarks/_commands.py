"""Public commands as processes of their own, watched from outside: what benchmarks that kill them share."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks._harness import ROOT, Benchmark
from flatshift.finetune.run_directory import read_metrics

WAIT_S = 600.0
"""No command of these takes longer."""
QUICK = "--train.max_cut 1 --train.threads 1 --train.device cpu --train.precision fp32 --eval.bootstrap 10"
"""Flags of runs that are only there to be watched."""


def flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings as command-line flags."""
    return [text for key, value in settings.items() for text in (f"--{key}", str(value))]


def train_words(out: Path, settings: str) -> list[str]:
    """Words of `flatshift` for the run into `out`, or for its continuation where `out` is a run already."""
    if (out / "recipe.resolved.yaml").exists():
        return ["train", "--resume", str(out)]
    return ["train", "language-model", "--out", str(out), *settings.split()]


def start(
    *words: str, code: str | None = None, environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[str]:
    """Begin `flatshift WORDS`, or Python's `code`, on one thread; stderr is piped. options: of `Popen`."""
    program = ["-m", "flatshift", *words] if code is None else ["-c", code]
    return subprocess.Popen(
        [sys.executable, *program],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(environment or {})},
        stdout=subprocess.DEVNULL,
        text=True,
        **{"stderr": subprocess.PIPE, **options},
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    """Wait for the end of a process and return what it wrote to stderr. Raises RuntimeError for another exit code."""
    _, errors = process.communicate(timeout=WAIT_S)
    if process.returncode != code:
        raise RuntimeError(f"the run ended with {process.returncode}, not {code}: {(errors or '').strip()[-2000:]}")
    return errors or ""


def state_of(pid: int) -> tuple[str, int]:
    """Letter of a process's state and its parent; ("Z", 0) for one that is gone."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[:2]
        return state, int(parent)
    except OSError:
        return "Z", 0


def children_of(parent: int, command: bytes = b"") -> list[int]:
    """Process ids of the living children of a process that have `command` in their command line, the oldest first."""
    results = []
    for folder in Path("/proc").glob("[0-9]*"):
        state, above = state_of(int(folder.name))
        with contextlib.suppress(OSError):  # it is gone meanwhile
            if above == parent and state != "Z" and command in (folder / "cmdline").read_bytes():
                results.append(int(folder.name))
    return sorted(results)


def wait_until(process: subprocess.Popen[str], reached: Callable[[], bool]) -> bool:
    """Return True once `reached()` is, False where the process ends before."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and process.poll() is None:
        if reached():
            return True
        time.sleep(0.002)
    return False


def trained(out: Path) -> int:
    """Number of the newest logged step."""
    return max((line["step"] for line in read_metrics(out / "metrics.jsonl") if line["split"] == "train"), default=0)


def adapter(out: Path) -> str:
    """Digest of the final adapter."""
    return hashlib.sha256((out / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()


def curve(out: Path) -> str:
    """All losses by split and step, the last attempt of each."""
    lines = read_metrics(out / "metrics.jsonl")
    return json.dumps(sorted((line["split"], line["step"], line["loss"]) for line in lines))


class Outcomes:
    """Runs that were killed and resumed, beside one that nothing happened to."""

    def __init__(self, whole: Path) -> None:
        self.whole = whole
        self.runs = self.same = self.curves = self.leftovers = 0

    def add(self, out: Path, words: str) -> None:
        """A run that came to its end."""
        equal = adapter(out) == adapter(self.whole)
        self.runs, self.same = self.runs + 1, self.same + equal
        self.curves += curve(out) == curve(self.whole)
        self.leftovers += len(list(out.rglob(".*.tmp")))
        print(f"  {words}: {'same bits' if equal else 'OTHER BITS'}", flush=True)

    def rows(self, bench: Benchmark, what: str, unit: str) -> None:
        """Adapters, loss curves and leftovers."""
        bench.row(what, unit, ours=self.same, exactly=self.runs)
        bench.row("of these, runs whose whole loss curve is the same", unit, ours=self.curves, exactly=self.runs)
        bench.row("temporary files left in finished runs", "files", ours=self.leftovers, exactly=0)
