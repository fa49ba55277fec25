"""Bad inputs over all commands: each must end with exit code 2 and one sentence that names the place.

    python -m benchmarks.faults inputs --most 50                # 50 of them
    python -m benchmarks.faults inputs --only "yaml: tag"       # those with this in their name

One process imports everything and forks a child for each input, so that a second is a second of the input's own. The
child runs the command line as `flatshift` would; what it says, how it ends, the CPU time it takes and what it leaves
behind are looked at from outside.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks._harness import Benchmark
from benchmarks.faults.bad_commands import bad_commands
from benchmarks.faults.bad_files import bad_files
from benchmarks.faults.bad_inputs import BadInput, make_sandbox
from benchmarks.faults.bad_requests import bad_requests
from benchmarks.faults.bad_settings import bad_settings
from benchmarks.faults.forks import BUG, Ended, cpu_limit, fork, import_all, wait

SENTENCE = 300
CPU_S = 2.0
_WALL_S = 60.0
_BEGIN = "flatshift: error: "


@dataclass(frozen=True)
class Ending:
    """How one bad input ended."""

    code: int
    """Exit code; negative for a signal."""
    said: str
    """What it wrote to stderr."""
    cpu: float
    """Seconds of the child and of what it started."""
    left: tuple[str, ...]
    """What is other than before in the folder that it ran in."""

    def faults(self, case: BadInput) -> list[str]:
        """What is wrong about it; nothing where it is as it should be."""
        errors = [line for line in self.said.splitlines() if line.startswith(_BEGIN)]
        results = []
        if self.code != 2:
            results.append(f"exit code {self.code}")
        if "Traceback" in self.said:
            results.append("a traceback")
        if len(errors) != 1 or not self.said.rstrip().endswith(errors[0]):
            results.append(f"{len(errors)} errors, or lines behind it")
        else:
            message = errors[0].removeprefix(_BEGIN)
            if len(message) > SENTENCE:
                results.append(f"{len(message)} characters")
            if not any(place in message for place in case.places):
                results.append(f"does not name {' or '.join(case.places)}")
        if self.left:
            results.append(f"left {', '.join(self.left[:3])}")
        if self.cpu > CPU_S:
            results.append(f"{self.cpu:.1f} CPU-seconds")
        return results


def rows(bench: Benchmark, *, most: int | None = None, seed: int = 0, only: Sequence[str] = ()) -> None:
    """Run all bad inputs (whose name has one of `only` in it), or `most` of them drawn by `seed`, and add what they
    came to."""
    endings = run_all(most=most, seed=seed, only=only)
    ends = [ending for _, ending in endings]
    bad = sum(bool(ending.faults(case)) for case, ending in endings)
    wanted = 900 if most is None and not only else len(endings)
    lengths = [len(end.said.splitlines()[-1]) - len(_BEGIN) if end.said.strip() else 0 for end in ends]
    bench.row("bad inputs", ours=len(endings), unit="inputs", bar_op=">=", bar_value=wanted)
    bench.row("longest sentence", ours=max(lengths), unit="characters", bar_op="<=", bar_value=SENTENCE)
    bench.row("slowest bad input", ours=max(end.cpu for end in ends), unit="CPU-s", bar_op="<=", bar_value=CPU_S)
    for what, count in (
        ("bad inputs without exit 2 and one sentence that names the place, or with anything left behind", bad),
        ("bad inputs that were taken (exit code 0 or 1)", sum(end.code in (0, 1) for end in ends)),
        ("bad inputs that ended as our bug (exit code 70)", sum(end.code == BUG for end in ends)),
    ):
        bench.row(what, ours=count, unit="inputs", bar_op="==", bar_value=0)


def run_all(*, most: int | None = None, seed: int = 0, only: Sequence[str] = ()) -> list[tuple[BadInput, Ending]]:
    """Each bad input and its ending; those that are not as they should be are printed."""
    import_all()
    results = []
    with tempfile.TemporaryDirectory(prefix="flatshift-inputs-") as folder:
        root = make_sandbox(Path(folder))
        lists = (bad_commands, bad_settings, bad_requests, bad_files)
        cases = [case for bad in lists for case in bad(root)]
        cases = [case for case in cases if not only or any(part in case.name for part in only)]
        if most is not None and most < len(cases):
            cases = random.Random(seed).sample(cases, most)
        for case in cases:
            ending = run_one(case, root)
            results.append((case, ending))
            if faults := ending.faults(case):
                print(f"{case.name}: {'; '.join(faults)} | {ending.said.strip().splitlines()[-1:]}", flush=True)
    return results


def run_one(case: BadInput, root: Path) -> Ending:
    """The ending of one bad input, in a fresh copy of nothing: what it writes is noted and removed."""
    work = root / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    case.prepare(work)
    before = _state(root)
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as out:
        around = partial(_as_command, case)
        pid = fork(case.argv, cwd=work, out=out.fileno(), err=output.fileno(), around=around)
        ended = wait(pid, _WALL_S) or Ended(-9, _WALL_S)
        output.seek(0)
        text = output.read().decode("utf-8", errors="replace")
    after = _state(root)
    left = tuple(sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)))
    return Ending(ended.code, text, ended.cpu, left)


@contextlib.contextmanager
def _as_command(case: BadInput) -> Iterator[None]:
    """What is round a bad input's command in its child: nothing to read, and an end even without a parent."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    cpu_limit(_WALL_S)
    with case.around():
        yield


def _state(root: Path) -> dict[str, str]:
    """Relative name → what it is, of all that lies under `root`; the content of files too."""
    results = {}
    for folder, names, files in os.walk(root):
        for name in (*names, *files):
            path = Path(folder, name)
            result = path.lstat()
            mark = f"{result.st_mode:o} {result.st_size if path.is_file() else ''}"
            if path.is_file() and result.st_size < 1 << 20:
                mark += hashlib.sha256(path.read_bytes()).hexdigest()
            results[os.fsencode(path.relative_to(root)).decode("utf-8", "backslashreplace")] = mark
    return results
