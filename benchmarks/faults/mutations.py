"""Valid recipes, rows, features, headers, metrics and grids, mutated by the million: no traceback, none over 2 s.

    python -m benchmarks.faults.mutations                              # what is left of 10^6 executions a parser
    python -m benchmarks.faults.mutations --only jsonl --most 20000    # so many of one
    python -m benchmarks.faults.mutations --only jsonl --atheris       # led by coverage (extra `fuzz`)

Execution i of a parser is made from (seed, parser, i) alone, so counts of several calls add up: they are kept beside
the results until the code changes. A mutation works on the structure (a value, a key, a header's length) or on bytes.
An execution is well where the parser accepts what it is given, or refuses it in an error of the user's.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._harness import RESULTS, ROOT, Benchmark
from benchmarks.faults.mutator import Mutator
from flatshift.finetune.errors import SENTENCE, Interrupted, UserError, format_error_message
from flatshift.regularizers.config import RegularizerError
from flatshift.selection.errors import SelectionError

WANTED = 1_000_000
LIMIT_S = 2.0
LEDGER = RESULTS / "faults" / "mutations.json"
_REFUSED = (UserError, SelectionError, RegularizerError, Interrupted)
_EVERY_S = 60.0


class TooSlow(BaseException):
    """An execution took more CPU time than `LIMIT_S`."""


@dataclass
class Count:
    """What the executions of one parser came to."""

    done: int = 0
    refused: int = 0
    slowest: float = 0.0
    """CPU-seconds of the slowest."""
    tracebacks: int = 0
    first: str = ""
    """Of the first that went wrong: which one, and its last words."""


# ------------------------------------------------------------------------------------------------------- parsers


def _parsers(folder: Path) -> dict[str, Callable[[bytes], None]]:
    """Name → what reads a file of that kind, given its bytes."""
    from flatshift.experiments.recipe.build import build_settings
    from flatshift.experiments.recipe.resolve import Resolved
    from flatshift.experiments.recipe.schema import Recipe
    from flatshift.experiments.recipe.tree import parse, parse_file
    from flatshift.experiments.results.run import read_metrics as read_back
    from flatshift.experiments.studies.sweep.axes import count_points, generate_points, parse_grid
    from flatshift.finetune.data.chat.conversation import read_conversation
    from flatshift.finetune.data.config import Columns
    from flatshift.finetune.data.rows import read_rows
    from flatshift.finetune.models.checkpoint import SINGLE, read_index
    from flatshift.finetune.run_directory import read_metrics
    from flatshift.selection.features.matrix import load_features

    def kept(name: str, data: bytes) -> Path:
        path = folder / name
        path.write_bytes(data)
        return path

    def recipe(data: bytes) -> None:
        resolved = Resolved(build_settings(Recipe, parse_file(kept("r.yaml", data))), "r", {})
        again = build_settings(Recipe, parse(resolved.to_yaml(), "again"))
        assert again == resolved.recipe, "a recipe does not survive its own writing"

    def rows(name: str, data: bytes) -> None:
        for row in read_rows([str(kept(name, data))], columns=Columns(), bad_rows="skip", skipped=[]):
            json.dumps(row.record, default=str)

    def chat(data: bytes) -> None:
        for row in read_rows([str(kept("c.jsonl", data))], required=("messages",), bad_rows="skip", skipped=[]):
            with contextlib.suppress(ValueError):
                read_conversation(row)

    def features(data: bytes) -> None:
        matrix = load_features(kept("x.npy", data))
        assert matrix.ndim == 2

    def header(data: bytes) -> None:
        kept(SINGLE, data)
        read_index(folder)

    def metrics(data: bytes) -> None:
        path = kept("metrics.jsonl", data)
        with contextlib.suppress(UserError):
            read_metrics(path)
        found = read_back(path)
        for stage in found.stages:
            found.series(stage, "train", "loss")

    def grid(data: bytes) -> None:
        axes = parse_grid(data.decode("utf-8", "replace").split("\n"))
        for design in ("grid", "paired", "random"):
            with contextlib.suppress(UserError):
                if count_points(axes, design, 5 if design == "random" else None) <= 1000:
                    list(generate_points(axes, design, count=5 if design == "random" else None, seed=0))

    return {
        "recipe": recipe,
        "jsonl": lambda data: rows("r.jsonl", data),
        "csv": lambda data: rows("r.csv", data),
        "parquet": lambda data: rows("r.parquet", data),
        "chat": chat,
        "npy": features,
        "safetensors": header,
        "metrics": metrics,
        "grid": grid,
    }


_ROWS = ("finetune/data/formats.py", "finetune/data/rows.py", "finetune/data/rows.py")
_SOURCES = {
    "recipe": (
        "experiments/recipe/*.py",
        "experiments/*/settings.py",
        "*/config.py",
        "*/*/config.py",
        "finetune/*s.py",
    ),
    "jsonl": _ROWS,
    "csv": _ROWS,
    "parquet": _ROWS,
    "chat": (*_ROWS, "finetune/data/chat/conversation.py"),
    "npy": ("selection/features/matrix.py",),
    "safetensors": ("finetune/models/checkpoint.py",),
    "metrics": ("finetune/run_directory.py", "experiments/results/run.py"),
    "grid": ("experiments/studies/sweep/axes.py",),
}
"""What each parser is made of: counts of other code do not add up."""
NAMES = ("recipe", "jsonl", "csv", "parquet", "chat", "npy", "safetensors", "metrics", "grid")


# ---------------------------------------------------------------------------------------------------------- runs


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Raise TooSlow after `LIMIT_S` CPU-seconds."""

    def ring(_number: int, _frame: Any) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def execute(parser: Callable[[bytes], None], data: bytes, count: Count, name: str) -> None:
    """One execution, counted."""
    start = time.process_time()
    wrong = ""
    try:
        with _limited():
            parser(data)
    except _REFUSED as error:
        count.refused += 1
        if len(format_error_message(str(error))) > SENTENCE or not str(error).strip():
            wrong = f"no sentence: {str(error)[:200]!r}"
    except TooSlow:
        wrong = f"over {LIMIT_S:g} CPU-seconds"
    except Exception:
        wrong = traceback.format_exc().strip()
    count.done += 1
    count.slowest = max(count.slowest, time.process_time() - start)
    if wrong:
        count.tracebacks += 1
        count.first = count.first or f"{name}: {wrong[-900:]}"


def run_parser(name: str, count: Count, *, upto: int, seed: int, until: float = float("inf")) -> None:
    """Executions of one parser, from `count.done` on up to `upto` or the time `until`."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        parser = _parsers(Path(folder))[name]
        mutator = Mutator(name)
        while count.done < upto and time.monotonic() < until:
            i = count.done
            execute(parser, mutator.mutated(random.Random(f"{seed} {name} {i}")), count, f"execution {i}")


def rows(bench: Benchmark, *, most: int | None = None, seed: int = 0) -> None:
    """Go on to `most` executions of every parser (None: `WANTED`) and add what all of them came to."""
    upto = WANTED if most is None else most
    counts = advance(upto, seed=seed) if most is None else {name: Count() for name in NAMES}
    if most is not None:
        for name, count in counts.items():
            run_parser(name, count, upto=upto, seed=seed)
    for name, count in counts.items():
        bench.row(f"{name}: mutations read", ours=count.done, unit="executions", bar_op=">=", bar_value=upto)
        bench.row(f"{name}: tracebacks, or executions of more than {LIMIT_S:g} CPU-s",
                  ours=count.tracebacks, unit="executions", bar_op="==", bar_value=0)  # fmt: skip
        bench.row(f"{name}: slowest", ours=round(count.slowest, 3), unit="CPU-s", bar_op="<=", bar_value=LIMIT_S)
        if count.first:
            print(count.first, file=sys.stderr)


def advance(upto: int, *, seed: int, only: tuple[str, ...] = NAMES, seconds: float = float("inf")) -> dict[str, Count]:
    """Go on where the ledger stands, each parser up to `upto` executions, for at most so many seconds in all."""
    counts = _read_ledger(seed)
    until = time.monotonic() + seconds
    for name in only:
        while counts[name].done < upto and time.monotonic() < until:
            run_parser(name, counts[name], upto=upto, seed=seed, until=min(until, time.monotonic() + _EVERY_S))
            _write_ledger(seed, counts)
            print(f"{name}: {counts[name].done:,} of {upto:,}, {counts[name].tracebacks} wrong", flush=True)
    return counts


def _code(name: str, seed: int) -> str:
    """What the executions of one parser depend on: its sources, the mutations and the seed."""
    digest = hashlib.sha256(f"{seed} {Mutator.digest()}".encode())
    for pattern in (*_SOURCES[name], "finetune/errors.py"):
        for path in sorted(ROOT.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _read_ledger(seed: int) -> dict[str, Count]:
    """What earlier calls counted with the same code and seed."""
    counts = {name: Count() for name in NAMES}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(LEDGER.read_text(encoding="utf-8"))
        for name in NAMES:
            found = kept.get(name, {"code": ""})
            if found.pop("code") == _code(name, seed):
                counts[name] = Count(**found)
    return counts


def _write_ledger(seed: int, counts: dict[str, Count]) -> None:
    from flatshift.finetune.atomic import write_json

    write_json(LEDGER, {name: {"code": _code(name, seed), **vars(count)} for name, count in counts.items()})


# ------------------------------------------------------------------------------------------------------- atheris


def led_by_coverage(name: str, runs: int, seed: int) -> None:
    """Atheris (libFuzzer) over one parser, `runs` executions; ends this process, with an error where one goes wrong."""
    import atheris

    parsers = [
        "flatshift.experiments.recipe",
        "flatshift.finetune.data",
        "flatshift.finetune.run_directory",
        "flatshift.selection.features.matrix",
        "yaml",
    ]
    with atheris.instrument_imports(include=[*parsers, "flatshift.finetune.models.checkpoint"]):
        folder = Path(tempfile.mkdtemp(prefix="flatshift-atheris-"))
        (folder / "corpus").mkdir()
        parser, mutator = _parsers(folder)[name], Mutator(name)
    for i, one in enumerate(mutator.seeds):
        (folder / "corpus" / str(i)).write_bytes(one)

    def test(data: bytes) -> None:
        with contextlib.suppress(*_REFUSED):
            parser(data)

    def mutate(data: bytes, most: int, number: int) -> bytes:
        draw = random.Random(number)
        if draw.random() < 0.5:
            return atheris.Mutate(data, most)
        return mutator.mutated(draw, data)[:most]

    options = [f"-runs={runs}", f"-seed={seed + 1}", f"-timeout={LIMIT_S:.0f}", "-max_len=65536"]
    options.append(str(folder / "corpus"))
    atheris.Setup([sys.argv[0], *options], test, custom_mutator=mutate)
    atheris.Fuzz()


def main() -> None:
    """Go on with the counts, or a run of one parser on its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--most", type=int, default=WANTED)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--atheris", action="store_true")
    given = parser.parse_args()
    if given.atheris:
        led_by_coverage(given.only[0], given.most, given.seed)
    counts = advance(given.most, seed=given.seed, only=tuple(given.only), seconds=given.seconds)
    for name in given.only:
        count = counts[name]
        print(f"{name}: {count.done:,} executions, {count.refused:,} refused, {count.tracebacks} wrong, slowest "
              f"{count.slowest:.2f} CPU-s {count.first}")  # fmt: skip
    raise SystemExit(1 if any(counts[name].tracebacks for name in given.only) else 0)


if __name__ == "__main__":
    main()
