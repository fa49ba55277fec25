"""How long a newcomer waits: the demo, the default tests and the slow ones, as they are and with AVX2 only.

Wall minutes of the commands after installation, on the machine that the file names, with nothing beside them; the
rehearsal hides instruction sets but leaves clock, memory and caches as they are, so a real machine of that kind is
slower by what those differ.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks._harness import ROOT, Benchmark, cpu_clock
from benchmarks._instructions import rehearsal

TESTS = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "--dist"]


def timed(command: list[str], environment: dict[str, str]) -> tuple[float, float, str]:
    """Wall minutes, CPU-minutes and the last line of a command, which must succeed."""
    wall, cpu = time.perf_counter(), cpu_clock()
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    lines = done.stdout.strip().splitlines() or [""]
    last = lines[-1]
    if done.returncode:
        named = "; ".join(line for line in lines if line.startswith("FAILED"))
        raise RuntimeError(f"{' '.join(command)} failed: {last} {named} {done.stderr[-500:]}")
    return (time.perf_counter() - wall) / 60, (cpu_clock() - cpu) / 60, last


def minute_rows(bench: Benchmark) -> None:
    """The demo and the default tests under the rehearsal."""
    environment = _as_found()
    with tempfile.TemporaryDirectory() as folder:
        demo = [sys.executable, "-m", "flatshift", "demo", "--out", str(Path(folder) / "demo")]
        wall, cpu, _ = timed(demo, environment)
        _row(bench, "make demo, after installation", wall, 4, f"{cpu:.1f} CPU-minutes")
    wall, cpu, last = timed([*TESTS, "loadfile"], environment)
    _row(bench, "the default tests of make test", wall, 15, f"{cpu:.1f} CPU-minutes, {_counts(last)}")


def slow_rows(bench: Benchmark) -> None:
    """The tests that are left out of those, under the rehearsal."""
    wall, cpu, last = timed([*TESTS, "worksteal", "-m", "slow"], _as_found())
    _row(bench, "make slow", wall, 45, f"{cpu:.1f} CPU-minutes, {_counts(last)}")


def _as_found() -> dict[str, str]:
    """The rehearsal's variables; this process's own limit of threads is lifted."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.pop(name, None)
    return rehearsal()


def _row(bench: Benchmark, what: str, wall: float, most: float, more: str) -> None:
    bench.row(f"{what}, AVX2 rehearsed ({more})", ours=wall, unit="minutes", bar_op="<=", bar_value=most)


def _counts(last: str) -> str:
    return ", ".join(re.findall(r"\d+ (?:passed|skipped|failed)", last))
