"""Every file of a finished run damaged, for every command that reads it: refused by name, or provably harmless.

Harmless means that the command leaves, or says, what it does on the run as it was; a cell of an unfinished sweep whose
result is gone is one that has not run, so its page must be that of the sweep without the cell. Anything else is
*silent* (another result and exit code 0), a *traceback*, or *unnamed* (a refusal that does not name the file, or in
over 300 characters).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks._harness import Benchmark
from benchmarks.faults import scenarios
from benchmarks.faults.forks import BUG, import_all, run_forked
from benchmarks.faults.scenarios import SCENARIOS, differing, digest, leavings, write_inputs

LONGEST = 300
REFUSED = 2
Runner = Callable[[Sequence[str], Path], int]
"""Runs a command with its output in a file; returns its exit code."""


class Reader(NamedTuple):
    """A command that reads a directory. command: its arguments. result: what it leaves, given its output's text."""

    name: str
    command: Callable[[Path, Path], list[str]]
    result: Callable[[Path, str], dict[str, str]]


def _run(run: Path) -> dict[str, str]:
    """What a run must leave, its recipe without the comments that say where each setting came from."""
    import yaml

    result = scenarios._run(run)
    file = run / "recipe.resolved.yaml"
    return result | {file.name: str(yaml.safe_load(file.read_text(encoding="utf-8"))) if file.is_file() else "missing"}


def _page(run: Path, said: str) -> dict[str, str]:
    file = run / "page.html"
    return {"page": digest(file.read_bytes()) if file.is_file() else "missing"}


def _made(run: Path, said: str) -> dict[str, str]:
    return leavings(run.parent / "made", ("*",))


def _figures(run: Path, said: str) -> dict[str, str]:
    """What `eval` prints, but for the line that tells of a run whose files nobody can compare."""
    return {"said": "".join(line for line in said.splitlines(True) if f"{run} has no done.json: " not in line)}


def _reader(name: str, result: Callable[[Path, str], dict[str, str]], *words: str) -> Reader:
    """A command of `words`, of which RUN is the directory that it reads and MADE one beside it."""

    def command(run: Path, inputs: Path) -> list[str]:
        places = {"RUN": str(run), "MADE": str(run.parent / "made"), "PAGE": str(run / "page.html")}
        return [places.get(word, word) for word in words]

    return Reader(name, command, result)


def _left(run: Path, said: str) -> dict[str, str]:
    return _run(run)


def _start(run: Path, inputs: Path) -> list[str]:
    train = scenarios._train(inputs, run.parent / "made")
    return [*train, "--adapter.start", str(run), "--adapter.dropout", "0"]


_REPORT = _reader("report", _page, "report", "RUN", "--out", "PAGE")
_DRAWS = ("--sharpness", "--sharpness-draws", "2", "--sharpness-batches", "1")
READERS: dict[str, tuple[Reader, ...]] = {
    "train of three stages": (
        _reader("eval", _figures, "eval", "RUN"),
        _reader("export", _made, "export", "RUN", "--out", "MADE"),
        _reader("merge", _made, "merge", "RUN", "--out", "MADE"),
        _REPORT,
        _reader("resume", _left, "train", "--resume", "RUN"),
        _reader("resume for longer", _left, "train", "--resume", "RUN", "--train.steps", "3"),
        Reader("adapter.start", _start, lambda run, said: _run(run.parent / "made")),
        _reader("sharpness", lambda run, said: leavings(run, ("sharpness.json",)), "eval", "RUN", *_DRAWS),
    ),
    "select": (_REPORT,),
    "sweep": (
        _REPORT,
        Reader(
            "sweep", lambda run, inputs: scenarios._sweep(inputs, run), lambda run, said: SCENARIOS["sweep"].result(run)
        ),
    ),
}


UNFINISHED = {"sweep": ("done.json", "cells.parquet", "curves.parquet", "points.csv", "report.html")}
"""What a directory lacks whose command was killed when its last cell was done; its cells alone are damaged then."""


# --------------------------------------------------------------------------------------------------------- damages


def _flip(file: Path, other: Path | None) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)


def _swap(file: Path, other: Path | None) -> None:
    assert other is not None
    shutil.copyfile(other, file)


DAMAGES: dict[str, Callable[[Path, Path | None], None]] = {
    "missing": lambda file, other: file.unlink(),
    "empty": lambda file, other: file.write_bytes(b""),
    "flipped": _flip,
    "truncated": lambda file, other: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "another run's": _swap,
}


def _no_cell(file: Path, other: Path | None) -> None:
    shutil.rmtree(file.parent)


@dataclass(frozen=True)
class Tampered:
    """One damage to one file and what a command made of it."""

    scenario: str
    file: str
    damage: str
    reader: str
    wrong: str = ""
    """Empty: refused by name, or harmless."""
    said: str = ""
    refused: bool = False


class Matrix:
    """Finished directories of one scenario, the one and another, and the undisturbed result of each reader."""

    def __init__(self, scenario: str, folder: Path, run: Runner, *, unfinished: bool = False) -> None:
        self.scenario, self.folder, self.run, self.unfinished = scenario, folder, run, unfinished
        without, self.damaged = (UNFINISHED[scenario], "cells/*/*") if unfinished else ((), "**/*")
        self.inputs = folder / "inputs"
        if not self.inputs.is_dir():
            write_inputs(self.inputs)
        self.place = folder / "disk"
        """Where each trial happens: always the same path, as results may name it."""
        self.runs: dict[str, Path] = {}
        differs = ["--select.embedder.dim", "4"] if scenario == "select" else ["--train.seed", "5"]
        for name, more in (("this", []), ("other", differs)):
            self._clear()
            argv = [*SCENARIOS[scenario].command(self.inputs, self.place / "out"), *more]
            if code := run(argv, folder / "said"):
                raise RuntimeError(f"{scenario} ends with {code}: {(folder / 'said').read_text()[-2000:]}")
            self.runs[name] = folder / f"{scenario} {name}"
            shutil.copytree(self.place / "out", self.runs[name], copy_function=shutil.copy2)
            for file in without:
                (self.runs[name] / file).unlink(missing_ok=True)
        self.wanted: dict[tuple[str, str | None], dict[str, str]] = {}
        """By reader, and by the result file whose cell has not run."""

    def _clear(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir(parents=True)

    def trials(self, readers: Sequence[Reader]) -> Iterator[tuple[str, str, Reader]]:
        """Every (file, damage, reader); no damage that changes nothing."""
        for file in sorted(path for path in self.runs["this"].glob(self.damaged) if path.is_file()):
            name = str(file.relative_to(self.runs["this"]))
            other = self.runs["other"] / name
            for damage, reader in itertools.product(DAMAGES, readers):
                if damage == "another run's" and (not other.is_file() or other.read_bytes() == file.read_bytes()):
                    continue
                if file.stat().st_size == 0 and damage != "missing":
                    continue
                yield name, damage, reader

    def _read(
        self, reader: Reader, file: str | None = None, damage: Callable[[Path, Path | None], None] = _no_cell
    ) -> tuple[int, str, dict[str, str]]:
        self._clear()
        out, log = self.place / "out", self.folder / "said"
        shutil.copytree(self.runs["this"], out, copy_function=shutil.copy2)
        if file is not None:
            damage(out / file, self.runs["other"] / file)
        log.unlink(missing_ok=True)
        code = self.run(reader.command(out, self.inputs), log)
        text = log.read_text(encoding="utf-8", errors="replace")
        return code, text, reader.result(out, text) if code == 0 else {}

    def judge(self, file: str, damage: str, reader: Reader) -> Tampered:
        """Do one damage to a copy, have the command read it, and compare."""
        without = file if self.unfinished and damage == "missing" and Path(file).name == "result.json" else None
        if (reader.name, without) not in self.wanted:
            code, text, self.wanted[reader.name, without] = self._read(reader, without)
            if code:
                raise RuntimeError(f"{reader.name} on the undisturbed {self.scenario} ends with {code}: {text[-2000:]}")
        code, text, result = self._read(reader, file, DAMAGES[damage])
        wrong, output = "", text.strip().splitlines()[-1] if text.strip() else ""
        wanted = self.wanted[reader.name, without]
        different = differing(result, wanted)
        named = Path(file).name in output or f"{Path(file).parent}/" in output
        if code == BUG or "Traceback" in text:
            wrong, output = "traceback", text[-1500:]
        elif code == 0 and different:
            wrong, output = "silent", ", ".join(different[:4])
        elif code and (code != REFUSED or not named or len(output.replace(str(self.place), "")) > LONGEST):
            wrong = "unnamed"
        return Tampered(self.scenario, file, damage, reader.name, wrong, output, refused=code == REFUSED)


def forked(disk: Path) -> Runner:
    """A runner of commands in forks of this process, which imports what they need first."""
    os.environ |= {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
    import_all()
    disk.mkdir(parents=True, exist_ok=True)
    return lambda argv, said: run_forked(argv, said, contextlib.nullcontext, disk)


def rows(bench: Benchmark, *, most: int | None = None, seed: int = 0, only: Sequence[str] = ()) -> None:
    """A row a scenario: damages × commands, and how many of them were neither refused by name nor harmless.

    most: trials of a scenario, drawn by `seed`.
    """
    total = 0
    kinds = [*((scenario, False) for scenario in READERS), *((scenario, True) for scenario in UNFINISHED)]
    with tempfile.TemporaryDirectory(prefix="tamper-") as name:
        run = forked(Path(name).resolve() / "work")
        for scenario, unfinished in kinds:
            if only and scenario not in only:
                continue
            called = f"unfinished {scenario}" if unfinished else scenario
            folder, readers = Path(name).resolve() / called, READERS[scenario]
            folder.mkdir()
            matrix = Matrix(scenario, folder, run, unfinished=unfinished)
            trials = list(matrix.trials(readers))
            random.Random(seed).shuffle(trials)
            results = []
            for trial in trials[:most]:
                results.append(matrix.judge(*trial))
                if results[-1].wrong:
                    print(f"! {results[-1]}", flush=True)
            wrong = Counter(one.wrong for one in results if one.wrong)
            words = f" ({', '.join(f'{count} {what}' for what, count in wrong.items())})" if wrong else ""
            refused = sum(one.refused for one in results)
            bench.row(
                f"{called}: damages to its files neither refused by name nor harmless, of {len(results):,} tried, "
                f"{refused:,} refused{words}",
                ours=wrong.total(),
                unit="damages",
                bar_op="==",
                bar_value=0,
            )
            total += len(results)
    if most is None:
        bench.row("damages in all", ours=total, unit="damages", bar_op=">=", bar_value=1000)
