"""Doors by which something of a stranger's comes in: requests, programs, addresses, texts, templates, directories.

    python -m benchmarks.faults doors                          # all, into the table
    python -m benchmarks.faults.doors --most 50 --only serve   # some of them, each that is open shown

Every command runs in a fork of one process, `serve` too, which is looked at from outside: a case is what a stranger
sends or leaves, and what must not come of it. docs/security.md is the page of what may.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._harness import Benchmark
from benchmarks.faults.bad_inputs import make_sandbox
from benchmarks.faults.forks import BUG, fork

STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""What a terminal acts on."""
SECRET = "s3cret"
PATIENCE = 3.0
"""Seconds that the service waits for a request here; it waits longer for its users."""
_WALL_S = 120.0
_BEGIN = "flatshift: error: "


class Said(NamedTuple):
    """How a command ended: its exit code, and all that it printed."""

    code: int
    text: str

    def faults(self) -> str:
        """Return what no command may do, whoever wrote its input."""
        if self.code in (BUG, -signal.SIGKILL) or "Traceback" in self.text:
            return f"exit code {self.code}: {self.text.strip()[-300:]}"
        if (match := STEERS.search(self.text)) is not None:
            return f"prints {self.text[max(match.start() - 30, 0) : match.end() + 10]!r}"
        return f"prints a secret: {self.text[-300:]}" if SECRET in self.text else ""


class Place:
    """A folder with good rows and finished runs, made when the first case needs them, and a service for the others."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.kept: dict[str, Any] = {}
        """What cases share, by name."""
        self._count = 0
        self._ends = contextlib.ExitStack()

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    @cached_property
    def sandbox(self) -> Path:
        """`rows.jsonl`, `backbone`, `run` (which sorts) and `writer`."""
        (self.root / "sandbox").mkdir()
        with _silence():
            return make_sandbox(self.root / "sandbox")

    def folder(self) -> Path:
        """Return a new empty folder."""
        self._count += 1
        result = self.root / f"case-{self._count}"
        result.mkdir()
        return result

    def flatshift(
        self, *argv: str, cwd: Path, around: Callable[[], contextlib.AbstractContextManager[Any]] | None = None
    ) -> Said:
        """Run a command in a fork; it is killed if it does not end."""
        with tempfile.TemporaryFile() as out:
            child = fork(argv, cwd=cwd, out=out.fileno(), around=around or as_command)
            ends = time.monotonic() + _WALL_S
            while not (result := os.waitpid(child, os.WNOHANG))[0]:
                if time.monotonic() > ends:
                    os.killpg(child, signal.SIGKILL)
                time.sleep(0.01)
            out.seek(0)
            return Said(os.waitstatus_to_exitcode(result[1]), out.read().decode(errors="replace"))

    @cached_property
    def service(self) -> Service:
        """`flatshift serve` of the writer."""
        log = self.root / "service.log"
        with log.open("wb") as out:
            child = fork(
                ["serve", str(self.sandbox / "writer"), "--port", "0"], cwd=self.root, out=out.fileno(), around=_patient
            )
        self._ends.callback(os.waitpid, child, 0)
        self._ends.callback(os.killpg, child, signal.SIGKILL)
        ends = time.monotonic() + _WALL_S
        while (match := re.search(r"http://127\.0\.0\.1:(\d+)/v1", log.read_text(encoding="utf-8"))) is None:
            if time.monotonic() > ends:
                raise TimeoutError(f"the service did not start: {log.read_text(encoding='utf-8')[-500:]}")
            time.sleep(0.05)
        return Service(child, int(match[1]), log)


class Service(NamedTuple):
    """A running `flatshift serve`: its process, its port, and the file of what it prints."""

    process: int
    port: int
    said: Path

    def status(self, name: str) -> int:
        """Return a number of /proc/PID/status, such as `Threads`."""
        lines = Path(f"/proc/{self.process}/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


@dataclass(frozen=True)
class Case:
    """One try at a door. open_by: returns what came of it that must not; an empty text if the door is shut."""

    door: str
    name: str
    open_by: Callable[[Place], str]


@contextlib.contextmanager
def as_command() -> Iterator[None]:
    """Give the child nothing to read, and streams that take every text."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    yield


@contextlib.contextmanager
def _patient() -> Iterator[None]:
    from flatshift.experiments.workflows import serve

    serve._PATIENCE = PATIENCE
    with as_command():
        yield


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Send what forks print on stderr nowhere."""
    sys.stderr.flush()
    descriptor, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(descriptor, 2)
        os.close(descriptor)
        os.close(nothing)


def check_sentence(said: Said, *places: str) -> str:
    """Return what is wrong about a refusal: exit code 2, and one sentence that names one of `places`."""
    if wrong := said.faults():
        return wrong
    errors = [line for line in said.text.splitlines() if line.startswith(_BEGIN)]
    if said.code != 2 or len(errors) != 1 or not any(place in errors[0] for place in places):
        return f"exit code {said.code}, not one sentence on {' or '.join(places)}: {said.text[-300:]}"
    return "" if len(errors[0]) < 330 else f"{len(errors[0])} characters"


def write_rows(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows as JSONL."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def holders(folder: Path, word: str = SECRET) -> list[str]:
    """Return the files below `folder` that hold a word."""
    files = (file for file in sorted(folder.rglob("*")) if file.is_file() and not file.is_symlink())
    return [str(file.relative_to(folder)) for file in files if word.encode() in file.read_bytes()]


def all_cases() -> list[Case]:
    """Return every case, door by door."""
    from benchmarks.faults import door_requests, door_runs, door_texts
    from benchmarks.hostile_programs import FORGERIES, HOSTILE, is_contained
    from flatshift.finetune.errors import UserError
    from flatshift.finetune.evaluate.sandbox import check_sandbox_available

    def contain(name: str) -> Callable[[Place], str]:
        return lambda place: "" if is_contained(name) else "left the sandbox, or passed"

    programs = []
    with contextlib.suppress(UserError):  # no namespaces here, so no program is run
        check_sandbox_available()
        programs = [Case("sandbox", name, contain(name)) for name in (*HOSTILE, *FORGERIES)]
    return [*door_requests.cases(), *programs, *door_texts.cases(), *door_runs.cases()]


def try_cases(cases: Sequence[Case]) -> list[tuple[Case, str]]:
    """Return each case with what is open about it."""
    _import_commands()
    results = []
    with tempfile.TemporaryDirectory(prefix="flatshift-doors-") as folder, Place(Path(folder)) as place:
        for case in cases:
            try:
                wrong = case.open_by(place)
            except Exception as error:  # a peer that is gone, say: nothing that a door may do
                wrong = f"{type(error).__name__}: {error}"
            results.append((case, wrong))
            if wrong:
                print(f"! {case.door}: {case.name}: {wrong}"[:600], file=sys.stderr, flush=True)
            for result in place.root.glob("case-*"):
                shutil.rmtree(result, ignore_errors=True)
    return results


def _import_commands() -> None:
    """Import what commands import, so that no fork pays for it."""
    import importlib

    import torch

    os.environ |= {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
    torch.set_num_threads(1)
    workflows = ("train", "evaluate", "predict", "generate", "serve", "export")
    ours = [f"workflows.{name}" for name in workflows] + ["report", "select.select"]
    others = ("peft", "fsspec.implementations.memory", "rich.progress")
    for name in (*(f"flatshift.experiments.{each}" for each in ours), *others):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def draw(cases: Sequence[Case], most: int | None, seed: int) -> list[Case]:
    """Return `most` cases drawn by `seed`, in their order."""
    if most is None or most >= len(cases):
        return list(cases)
    chosen = sorted(random.Random(seed).sample(range(len(cases)), most))
    return [cases[index] for index in chosen]


def rows(bench: Benchmark, *, most: int | None = None, seed: int = 0, only: Sequence[str] = ()) -> None:
    """Add a row a door: cases that are open, of all that were tried. only: texts of a door's or a case's name."""
    cases = draw([case for case in all_cases() if _is_named(case, only)], most, seed)
    result = try_cases(cases)
    for door, count in Counter(case.door for case in cases).items():
        still = [case.name for case, wrong in result if wrong and case.door == door]
        bench.row(f"{door}: cases open, of {count}", ours=len(still), unit="cases", bar_op="==", bar_value=0)
    wanted = len(cases) if only or most is not None else 400
    bench.row("cases tried", ours=len(cases), unit="cases", bar_op=">=", bar_value=wanted)


def _is_named(case: Case, only: Sequence[str]) -> bool:
    return not only or any(text in f"{case.door}: {case.name}" for text in only)


def main() -> None:
    """Try cases and show those that are open; exit code 1 if there are any."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--most", type=int)
    parser.add_argument("--only", action="append", default=[], help="text of a door's or a case's name")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    result = try_cases(draw([case for case in all_cases() if _is_named(case, given.only)], given.most, given.seed))
    still = sum(bool(wrong) for _, wrong in result)
    print(f"{len(result)} cases, {still} open")
    raise SystemExit(1 if still else 0)


if __name__ == "__main__":
    main()
