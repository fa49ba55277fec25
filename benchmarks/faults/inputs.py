"""Bad inputs over all commands: each must end with exit code 2 and one sentence that names the place.

    python -m benchmarks.faults.inputs --most 50     # 50 of them, each shown
    python -m benchmarks.faults inputs               # all, into the table; goes on where it was cut off

One process imports everything and forks a child for each input, so that a second is a second of the input's own. The
child runs the command line as `flatshift` would; what it says, how it ends, the CPU time it takes and what it leaves
behind are looked at from outside.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks._harness import Benchmark
from benchmarks.faults.bad_commands import bad_commands
from benchmarks.faults.bad_files import bad_files
from benchmarks.faults.bad_inputs import BadInput, make_sandbox
from benchmarks.faults.bad_requests import bad_requests
from benchmarks.faults.bad_settings import bad_settings
from benchmarks.faults.forks import fork

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
        found = []
        if self.code != 2:
            found.append(f"exit code {self.code}")
        if "Traceback" in self.said:
            found.append("a traceback")
        if len(errors) != 1 or not self.said.rstrip().endswith(errors[0]):
            found.append(f"{len(errors)} errors, or lines behind it")
        else:
            message = errors[0].removeprefix(_BEGIN)
            if len(message) > SENTENCE:
                found.append(f"{len(message)} characters")
            if not any(place in message for place in case.places):
                found.append(f"does not name {' or '.join(case.places)}")
        if self.left:
            found.append(f"left {', '.join(self.left[:3])}")
        if self.cpu > CPU_S:
            found.append(f"{self.cpu:.1f} CPU-seconds")
        return found


def rows(bench: Benchmark, *, most: int | None = None, seed: int = 0) -> None:
    """Run all bad inputs, or `most` of them drawn by `seed`, and add what they came to."""
    kept = Path(tempfile.gettempdir()) / f"flatshift-bad-inputs-{_code()}.jsonl"
    endings = run_all(most=most, seed=seed, kept=kept)
    bad = [f"{case.name}: {'; '.join(faults)}" for case, ending in endings if (faults := ending.faults(case))]
    for line in bad:
        print(line, file=sys.stderr)
    wanted = 900 if most is None else len(endings)
    bench.row("bad inputs", ours=len(endings), unit="inputs", bar_op=">=", bar_value=wanted)
    bench.row("bad inputs without exit 2 and one sentence that names the place, or with anything left behind",
              ours=len(bad), unit="inputs", bar_op="==", bar_value=0)  # fmt: skip
    lengths = [len(ending.said.splitlines()[-1]) - len(_BEGIN) if ending.said.strip() else 0 for _, ending in endings]
    bench.row("longest sentence", ours=max(lengths), unit="characters", bar_op="<=", bar_value=SENTENCE)
    bench.row("slowest bad input", ours=max(e.cpu for _, e in endings), unit="CPU-s", bar_op="<=", bar_value=CPU_S)
    ends = [ending.code for _, ending in endings]
    bench.row("bad inputs that were taken (exit code 0 or 1)", ours=sum(code in (0, 1) for code in ends), unit="inputs",
              bar_op="==", bar_value=0)  # fmt: skip
    bench.row("bad inputs that ended as our bug (exit code 70)", ours=ends.count(70), unit="inputs", bar_op="==",
              bar_value=0)  # fmt: skip
    kept.unlink(missing_ok=True)


def run_all(
    *, most: int | None = None, seed: int = 0, only: str = "", show: bool = False, kept: Path | None = None
) -> list[tuple[BadInput, Ending]]:
    """Each bad input (whose name has `only` in it) and its ending; `most` of them, drawn by `seed`.

    kept: a file of endings, which are not run again and to which others are added.
    """
    import random

    _import_everything()
    found = []
    with tempfile.TemporaryDirectory(prefix="flatshift-inputs-") as folder:
        root = make_sandbox(Path(folder))
        lists = (bad_commands, bad_settings, bad_requests, bad_files)
        cases = [case for bad in lists for case in bad(root) if only in case.name]
        if most is not None and most < len(cases):
            cases = random.Random(seed).sample(cases, most)
        before = _read(kept)
        for case in cases:
            if (ending := before.get(_key(case))) is None:
                ending = run_one(case, root)
                if kept is not None:
                    with kept.open("a", encoding="utf-8") as stream:
                        stream.write(json.dumps({"key": _key(case), **asdict(ending)}) + "\n")
            found.append((case, ending))
            if show:
                print(f"{case.name}: {ending.code} {ending.cpu:.2f} s | {ending.said.strip().splitlines()[-1:]}")
                for fault in ending.faults(case):
                    print(f"  FAULT {fault}")
    return found


def _read(kept: Path | None) -> dict[str, Ending]:
    """Endings of a run that was cut off, by `_key`; a torn last line is left out."""
    found = {}
    for line in kept.read_text(encoding="utf-8").splitlines() if kept is not None and kept.is_file() else ():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            found[record.pop("key")] = Ending(**{**record, "left": tuple(record["left"])})
    return found


def _key(case: BadInput) -> str:
    """Its name and where names agree its command line, without the sandbox's own path."""
    words = [Path(word).name if word.startswith(tempfile.gettempdir()) else word for word in case.argv]
    return hashlib.sha256(json.dumps([case.name, words]).encode()).hexdigest()[:16]


def _code() -> str:
    """12 hex digits of all that an ending depends on: the code and the lists of bad inputs."""
    digest = hashlib.sha256()
    for package in ("selection", "regularizers", "finetune", "experiments", "flatshift", "benchmarks/faults"):
        for file in sorted((Path(__file__).parents[2] / package).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def run_one(case: BadInput, root: Path) -> Ending:
    """The ending of one bad input, in a fresh copy of nothing: what it writes is noted and removed."""
    work = root / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    case.prepare(work)
    before = _state(root)
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as out:
        around = partial(_as_command, case)
        pid = fork(case.argv, cwd=work, out=out.fileno(), err=said.fileno(), around=around)
        usage, status = _wait(pid)
        said.seek(0)
        text = said.read().decode("utf-8", errors="replace")
    code = os.waitstatus_to_exitcode(status)
    after = _state(root)
    left = tuple(sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)))
    return Ending(code, text, usage.ru_utime + usage.ru_stime, left)


@contextlib.contextmanager
def _as_command(case: BadInput) -> Iterator[None]:
    """What is round a bad input's command in its child: nothing to read, and an end even without a parent."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_CPU, (int(_WALL_S), int(_WALL_S)))
    with case.around():
        yield


def _wait(pid: int) -> tuple[resource.struct_rusage, int]:
    deadline = time.monotonic() + _WALL_S
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            return usage, status
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.005)


def _state(root: Path) -> dict[str, str]:
    """Relative name → what it is, of all that lies under `root`; the content of files too."""
    found = {}
    for folder, names, files in os.walk(root):
        for name in (*names, *files):
            path = Path(folder, name)
            told = path.lstat()
            mark = f"{told.st_mode:o} {told.st_size if path.is_file() else ''}"
            if path.is_file() and told.st_size < 1 << 20:
                mark += hashlib.sha256(path.read_bytes()).hexdigest()
            found[os.fsencode(path.relative_to(root)).decode("utf-8", "backslashreplace")] = mark
    return found


def _import_everything() -> None:
    """What any command imports, so that no child pays for it."""
    import importlib
    import pkgutil

    import torch
    import transformers

    torch.set_num_threads(1)
    for package in ("flatshift",):
        home = importlib.import_module(package)
        for module in pkgutil.walk_packages(home.__path__, f"{package}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    for name in (
        "peft",
        "safetensors.torch",
        "pyarrow.parquet",
        "sklearn.decomposition",
        "scipy.stats",
        "rich.progress",
    ):
        importlib.import_module(name)
    _ = transformers.AutoTokenizer, transformers.AutoModelForCausalLM, transformers.AutoModelForSequenceClassification


def main() -> None:
    """Run them and show each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--most", type=int)
    parser.add_argument("--only", default="")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    endings = run_all(most=given.most, seed=given.seed, only=given.only, show=True)
    bad = sum(bool(ending.faults(case)) for case, ending in endings)
    print(f"{len(endings)} bad inputs, {bad} not as they should be, slowest {max(e.cpu for _, e in endings):.2f} CPU-s")
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
