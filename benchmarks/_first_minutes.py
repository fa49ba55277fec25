"""How long a newcomer waits: the tutorial's first result, the demo, and the default tests.

Wall minutes on the machine that the file names, with nothing beside them. The first result is from an empty directory
with 200 rows and the source to predictions and a page, by the lines of docs/first-model.md as they stand, installation
included. The others are of the commands after installation, with AVX2 only: the rehearsal hides instruction sets but
leaves clock, memory and caches as they are, so a real machine of that kind is slower by what those differ.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

from benchmarks._harness import ROOT, Benchmark, cpu_clock
from benchmarks._instructions import rehearsal
from flatshift.finetune.data.rows import read_rows

REHEARSED = "AVX2 rehearsed"
TUTORIAL = ROOT / "docs" / "first-model.md"
ROWS = 200


def timed(command: list[str], environment: dict[str, str], where: Path = ROOT) -> tuple[float, float, str]:
    """Wall minutes, CPU-minutes and the last line of a command, which must succeed."""
    wall, cpu = time.perf_counter(), cpu_clock()
    done = subprocess.run(command, cwd=where, env={**os.environ, **environment}, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines() or [""]
    last = lines[-1]
    if done.returncode:
        named = "; ".join(line for line in lines if line.startswith("FAILED"))
        raise RuntimeError(f"{' '.join(command)} failed: {last} {named} {done.stderr[-500:]}")
    return (time.perf_counter() - wall) / 60, (cpu_clock() - cpu) / 60, last


def tutorial_rows(bench: Benchmark) -> None:
    """The first block of the tutorial, in a directory that has what it asks for."""
    block = re.findall(r"```console\n(.*?)```", TUTORIAL.read_text(encoding="utf-8"), flags=re.S)[0]
    lines = [line for line in block.splitlines() if line.strip()]
    bench.row("commands to the first result of the tutorial", "lines", ours=len(lines), maximum=6)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        given(home)
        _lift_limits()
        # An index that cannot be reached from here is given up at once, not after pip's minutes of retries.
        unreached = {"PIP_RETRIES": "0", "PIP_DEFAULT_TIMEOUT": "5"}
        wall, cpu, _ = timed(["bash", "-e", "-c", block], {"PYTHONPATH": "", **unreached}, home)
        if not ((home / "labels.csv").is_file() and (home / "first.html").is_file()):
            raise RuntimeError("the tutorial's lines left no labels.csv or no first.html")
    _row(
        bench,
        f"an empty machine to the first result by the tutorial, {ROWS} rows, MiniLM, installation included",
        wall,
        5,
        f"{cpu:.1f} CPU-minutes",
    )


def given(home: Path) -> None:
    """What the tutorial asks for: `rows.jsonl` with labels, `new.jsonl` without, the source in `flatshift/`."""
    for name, split, columns in (("rows", "train", ("text", "label")), ("new", "test", ("text",))):
        rows = islice(read_rows([f"sample:banking/{split}"]), ROWS)
        told = [{column: row.values[column] for column in columns} for row in rows]
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told), encoding="utf-8")
    source = home / "flatshift"
    source.mkdir()
    tree = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x"], cwd=source, input=tree, check=True)


def minute_rows(bench: Benchmark) -> None:
    """The demo and the default tests under the rehearsal; this process's own limit of threads is lifted."""
    _lift_limits()
    environment = {**rehearsal(), "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        demo = [sys.executable, "-m", "flatshift", "demo", "--out", str(Path(folder) / "demo")]
        wall, cpu, _ = timed(demo, environment)
        _row(bench, f"make demo, after installation, {REHEARSED}", wall, 4, f"{cpu:.1f} CPU-minutes")
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile"]
    wall, cpu, last = timed(tests, environment)
    counts = ", ".join(re.findall(r"\d+ (?:passed|skipped|failed)", last))
    _row(bench, f"the default tests of make test, {REHEARSED}", wall, 15, f"{cpu:.1f} CPU-minutes, {counts}")


def _lift_limits() -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.pop(name, None)


def _row(bench: Benchmark, what: str, wall: float, most: float, more: str) -> None:
    bench.row(f"{what} ({more})", "minutes", ours=wall, maximum=most)
