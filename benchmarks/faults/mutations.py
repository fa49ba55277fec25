"""Valid recipes, rows, features, headers, metrics and grids, mutated by the million: no traceback, none over 2 s.

    python -m benchmarks.faults mutations                              # what is left of 10^6 executions a parser
    python -m benchmarks.faults mutations --only jsonl --most 20000    # so many of one

Execution i of a parser is made from (seed, parser, i) alone, so counts of several calls add up: they are kept beside
the results until the code changes. A mutation works on the structure (a value, a key, a header's length) or on bytes.
An execution is well where the parser accepts what it is given, or refuses it in an error of the user's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
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

    def write_case(name: str, data: bytes) -> Path:
        path = folder / name
        path.write_bytes(data)
        return path

    def recipe(data: bytes) -> None:
        resolved = Resolved(build_settings(Recipe, parse_file(write_case("r.yaml", data))), "r", {})
        again = build_settings(Recipe, parse(resolved.to_yaml(), "again"))
        assert again == resolved.recipe, "a recipe does not survive its own writing"

    def rows(name: str, data: bytes) -> None:
        for row in read_rows([str(write_case(name, data))], columns=Columns(), bad_rows="skip", skipped=[]):
            json.dumps(row.record, default=str)

    def chat(data: bytes) -> None:
        for row in read_rows([str(write_case("c.jsonl", data))], required=("messages",), bad_rows="skip", skipped=[]):
            with contextlib.suppress(ValueError):
                read_conversation(row)

    def features(data: bytes) -> None:
        matrix = load_features(write_case("x.npy", data))
        assert matrix.ndim == 2

    def header(data: bytes) -> None:
        write_case(SINGLE, data)
        read_index(folder)

    def metrics(data: bytes) -> None:
        path = write_case("metrics.jsonl", data)
        with contextlib.suppress(UserError):
            read_metrics(path)
        result = read_back(path)
        for stage in result.stages:
            result.series(stage, "train", "loss")

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


_ROWS = "finetune/data/formats.py finetune/data/rows.py"
_SOURCES = {
    "recipe": "experiments/recipe/*.py experiments/*/settings.py */config.py */*/config.py finetune/*s.py",
    "jsonl": _ROWS,
    "csv": _ROWS,
    "parquet": _ROWS,
    "chat": f"{_ROWS} finetune/data/chat/conversation.py",
    "npy": "selection/features/matrix.py",
    "safetensors": "finetune/models/checkpoint.py",
    "metrics": "finetune/run_directory.py experiments/results/run.py",
    "grid": "experiments/studies/sweep/axes.py",
}
"""Files that each parser is made of: counts of other code do not add up."""
NAMES = tuple(_SOURCES)


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


def rows(bench: Benchmark, *, most: int | None = None, seed: int = 0, only: Sequence[str] = NAMES) -> None:
    """Executions of every parser: `most` of each from the first, or (None) those of the ledger and what is left of
    `WANTED`; add what all of them came to."""
    counts = {name: Count() for name in NAMES} if most is not None else _read_ledger(seed)
    upto = WANTED if most is None else most
    for name in only:
        count = counts[name]
        while count.done < upto:
            run_parser(name, count, upto=upto, seed=seed, until=time.monotonic() + _EVERY_S)
            if most is None:
                _write_ledger(seed, counts)
            print(f"{name}: {count.done:,} of {upto:,}, {count.tracebacks} wrong {count.first}", flush=True)
        bench.row(f"{name}: mutations read", ours=count.done, unit="executions", bar_op=">=", bar_value=upto)
        bench.row(f"{name}: tracebacks, or executions of more than {LIMIT_S:g} CPU-s",
                  ours=count.tracebacks, unit="executions", bar_op="==", bar_value=0)  # fmt: skip
        bench.row(f"{name}: slowest", ours=round(count.slowest, 3), unit="CPU-s", bar_op="<=", bar_value=LIMIT_S)


def _code(name: str, seed: int) -> str:
    """What the executions of one parser depend on: its sources, the mutations and the seed."""
    digest = hashlib.sha256(f"{seed} {Mutator.digest()}".encode())
    for pattern in (*_SOURCES[name].split(), "finetune/errors.py"):
        for path in sorted(ROOT.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _read_ledger(seed: int) -> dict[str, Count]:
    """What earlier calls counted with the same code and seed."""
    counts = {name: Count() for name in NAMES}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        previous = json.loads(LEDGER.read_text(encoding="utf-8"))
        for name in NAMES:
            result = previous.get(name, {"code": ""})
            if result.pop("code") == _code(name, seed):
                counts[name] = Count(**result)
    return counts


def _write_ledger(seed: int, counts: dict[str, Count]) -> None:
    from flatshift.finetune.atomic import write_json

    write_json(LEDGER, {name: {"code": _code(name, seed), **vars(count)} for name, count in counts.items()})
