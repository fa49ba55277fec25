"""Two and three processes at one path at once: one of them owns it, the others say so, and nothing is lost or torn.

Contenders are forked from one process that has imported everything, so a race costs what its winner computes. They
begin a drawn moment apart: together, or anywhere within the time that one of them takes. What lies there afterwards
must be, bit for bit, what the winner leaves when it is alone.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._commands import flags
from benchmarks._harness import ROOT, Benchmark, cpu_clock
from benchmarks.faults.forks import fork
from benchmarks.faults.scenarios import SCENARIOS, SMALL, leavings, write_inputs

HANG_S = 600.0
WORKERS = ".workers.lock"
"""What a sweep's directory keeps: by it the next sweep waits for workers of a killed one."""
Found = dict[str, str]


# --------------------------------------------------------------------------------------------- the process that forks


def serve() -> None:
    """Read starts as JSON lines, `[{"argv", "delay", "cwd", "said"}, …]`; fork them, answer with their exit codes."""
    for name in _COMMANDS:
        __import__(name)
    learnt = False
    for line in sys.stdin:
        starts = json.loads(line)
        children = [_fork(start, None if learnt else starts[0]["said"] + ".modules") for start in starts]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if not learnt:  # what the first needed, all others get from here
            learnt = True
            for name in json.loads(Path(starts[0]["said"] + ".modules").read_text(encoding="utf-8")):
                with contextlib.suppress(Exception):
                    __import__(name)
        print(json.dumps(codes), flush=True)


_COMMANDS = (
    "flatshift.experiments.workflows.train",
    "flatshift.experiments.select.select",
    "flatshift.experiments.workflows.export",
    "flatshift.experiments.workflows.generate",
    "flatshift.experiments.report.page",
    "flatshift.experiments.studies.sweep.command",
    "flatshift.experiments.studies.compare.run",
)


def _fork(start: Mapping[str, Any], modules: str | None) -> int:
    @contextlib.contextmanager
    def late() -> Iterator[None]:
        time.sleep(start["delay"])
        yield
        if modules is not None:
            Path(modules).write_text(json.dumps(list(sys.modules)), encoding="utf-8")

    with Path(start["said"]).open("wb") as said:
        return fork(start["argv"], cwd=Path(start["cwd"]), out=said.fileno(), around=late)


# --------------------------------------------------------------------------------------------- the races


@dataclass(frozen=True)
class Kind:
    """Commands that race for one path.

    commands: given the inputs and the path, what contenders may run; each draws one. result: digests of what the path
    holds. begin: lays out what is there before. several: whether more than one contender may come to its end: those
    after another one find its work finished, and add nothing to it. share: of all races.
    """

    name: str
    commands: tuple[Callable[[Path, Path], list[str]], ...]
    result: Callable[[Path], Found]
    share: int
    begin: Callable[[Path, Path], None] = lambda inputs, out: None
    several: bool = False


def _scenario(name: str, share: int, *others: Callable[[Path, Path], list[str]], **more: Any) -> Kind:
    one = SCENARIOS[name]
    return Kind(name, (one.command, *others), one.result, share, **more)


def _with(name: str, *words: str) -> Callable[[Path, Path], list[str]]:
    return lambda inputs, out: [*SCENARIOS[name].command(inputs, out), *words]


def _generate(prompt: str) -> Callable[[Path, Path], list[str]]:
    def command(inputs: Path, out: Path) -> list[str]:
        run = str(inputs / "writer")
        return ["generate", run, "--prompt", prompt, "--max-new-tokens", "4", "--out", str(out / "answers.jsonl")]

    return command


def _resume(*words: str) -> Callable[[Path, Path], list[str]]:
    return lambda inputs, out: ["train", "--resume", str(out), *words]


def _finished(inputs: Path, out: Path) -> None:
    shutil.copytree(inputs / "train", out)


def _killed(inputs: Path, out: Path) -> None:
    """The run as a kill after its second update leaves it: lines of both, a checkpoint of the first."""
    _finished(inputs, out)
    stage = out / "stages" / "fine-tune"
    for path in (out / "adapter", stage / "adapter", out / "state" / "step-2"):
        shutil.rmtree(path)
    for path in (out / "eval.json", out / "report.html", out / "done.json", stage / "done.json"):
        path.unlink()


def _resumed(out: Path) -> Found:
    """Of a run, also how often an update was made: two at work at once would make it more often than one."""
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    made = Counter(record["step"] for record in map(json.loads, lines) if record["split"] == "train")
    steps = json.loads((out / "stages" / "fine-tune" / "done.json").read_text(encoding="utf-8"))["target_steps"]
    said = f"  steps: {steps} " in (out / "recipe.resolved.yaml").read_text(encoding="utf-8")
    return SCENARIOS["train"].result(out) | {"updates": str(sorted(made.items())), "recipe says so": str(said)}


def _cells(out: Path) -> Found:
    """Of a comparison: what its cells found, without what they took."""
    return leavings(out, ("cells/*/result.json",), whole=("report.html",))


def _whichever(out: Path) -> Found:
    """The result of whichever command came to its end."""
    return leavings(out, ("*.safetensors", "adapter/*.safetensors", "selected.jsonl", "eval.json", "README.md"))


KINDS = (
    _scenario("train", 34, _with("train", "--train.seed", "1")),
    _scenario("train, dp 2", 2),
    _scenario("select", 26, _with("select", "--epsilon", "0.2")),
    _scenario("merge", 18),
    _scenario("export", 14, _with("export", "--license", "mit")),
    _scenario("report", 6, several=True),
    _scenario("sweep", 14, several=True),
    Kind("compare", (SCENARIOS["compare"].command,), _cells, 12, several=True),
    Kind("resume", (_resume(),), _resumed, 30, _killed, several=True),
    Kind(
        "resume for longer",
        (_resume("--train.steps", "3"), _resume("--train.steps", "4")),
        _resumed,
        12,
        _finished,
        several=True,
    ),
    Kind("generate", (_generate("A"), _generate("The")), lambda out: leavings(out, ("answers.jsonl",)), 10),
    Kind(
        "different commands",
        tuple(SCENARIOS[name].command for name in ("train", "select", "merge", "export")),
        _whichever,
        14,
    ),
    Kind("default names", (), SCENARIOS["train"].result, 12),
)
TOTAL = sum(kind.share for kind in KINDS)


@dataclass
class Outcome:
    """What was wrong about a race; nothing where it went as promised."""

    kind: str
    contenders: int
    wrong: list[str] = field(default_factory=list)


class Field:
    """Inputs, undisturbed results and the forking process, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.inputs = folder, folder / "inputs"
        self._alone: dict[str, tuple[Found, float]] = {}
        self._number = 0

    def __enter__(self) -> Field:
        write_inputs(self.inputs)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._server = subprocess.Popen(
            [sys.executable, "-c", "from benchmarks.faults.races import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=self.folder,
        )
        train = SCENARIOS["train"].command(self.inputs, self.inputs / "train")
        self._must([*train, "--train.keep", "2"])
        return self

    def __exit__(self, *error: object) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(HANG_S)

    def start(self, commands: Sequence[Sequence[str]], delays: Sequence[float], cwd: Path) -> list[tuple[int, str]]:
        """Run `commands`, each its delay (seconds) after the call, and return exit codes with what was said."""
        assert self._server.stdin is not None and self._server.stdout is not None
        said = [self.folder / f"said-{place}" for place in range(len(commands))]
        starts = [
            {"argv": list(argv), "delay": delay, "cwd": str(cwd), "said": str(file)}
            for argv, delay, file in zip(commands, delays, said, strict=True)
        ]
        self._server.stdin.write(json.dumps(starts) + "\n")
        self._server.stdin.flush()
        codes = json.loads(self._server.stdout.readline())
        return [(code, file.read_text(encoding="utf-8")) for code, file in zip(codes, said, strict=True)]

    def _must(self, argv: Sequence[str], cwd: Path | None = None) -> None:
        ((code, said),) = self.start([argv], [0.0], cwd or self.folder)
        if code != 0:
            raise _Refused(f"alone, {' '.join(argv)} ended with {code}: {said[-1000:]}")

    def alone(self, kind: Kind, *order: int) -> tuple[Found, float]:
        """What the commands of `kind`, one after another, leave undisturbed, and the seconds that they take."""
        key = f"{kind.name} {order}"
        if key not in self._alone:
            if kind.name == "generate" and not (self.inputs / "writer").exists():
                self._must(["train", "language-model", "--out", str(self.inputs / "writer"), *flags(_WRITER)])
            with tempfile.TemporaryDirectory(prefix="alone-", dir=self.folder) as folder:
                out = Path(folder) / "out"
                kind.begin(self.inputs, out)
                began = time.monotonic()
                for place in order:
                    self._must(kind.commands[place](self.inputs, out))
                self._alone[key] = kind.result(out), time.monotonic() - began
        return self._alone[key]

    def race(self, kind: Kind, draw: random.Random) -> Outcome:
        """One race of two or three contenders."""
        self._number += 1
        folder = self.folder / f"race-{self._number}"
        folder.mkdir()
        count = draw.choice((2, 2, 3))
        outcome = Outcome(kind.name, count)
        if kind.commands:
            self._for_one_path(kind, draw, count, folder, outcome)
        else:
            self._for_names(kind, draw, count, folder, outcome)
        if left := [str(path.relative_to(folder)) for path in folder.rglob(".*") if path.name != WORKERS]:
            outcome.wrong.append(f"left over: {', '.join(left)}")
        if not outcome.wrong:
            shutil.rmtree(folder)
        return outcome

    def _for_one_path(self, kind: Kind, draw: random.Random, count: int, folder: Path, outcome: Outcome) -> None:
        out = folder / "out"
        kind.begin(self.inputs, out)
        drawn = [draw.randrange(len(kind.commands)) for _ in range(count)]
        longest = max(self.alone(kind, place)[1] for place in set(drawn))
        spread = draw.choice((0.03, 1.1 * longest))
        delays = [0.0, *(draw.uniform(0, spread) for _ in range(count - 1))]
        ends = self.start([kind.commands[place](self.inputs, out) for place in drawn], delays, folder)
        codes = [code for code, _ in ends]
        winners = [place for place, code in zip(drawn, codes, strict=True) if code == 0]
        for code, said in ends:
            if code not in (0, 2) or (code == 2 and not _sentence(said)):
                outcome.wrong.append(f"exit {code}: {said[-300:]}")
        if not winners or (len(winners) > 1 and not kind.several):
            outcome.wrong.append(f"exit codes {codes}")
        if outcome.wrong:
            return
        there = kind.result(out)
        orders = {(place,) for place in winners}
        if len(winners) > 1:  # one after another, in whichever order the draws made of them
            orders |= set(itertools.permutations(winners, 2))
        promised = []
        for order in sorted(orders):
            with contextlib.suppress(_Refused):  # fewer steps after more
                promised.append(self.alone(kind, *order)[0])
        if there not in promised:
            odd = sorted(name for name in there.keys() | promised[0].keys() if there.get(name) != promised[0].get(name))
            outcome.wrong.append(f"other than undisturbed: {', '.join(odd)}")

    def _for_names(self, kind: Kind, draw: random.Random, count: int, folder: Path, outcome: Outcome) -> None:
        """Contenders of different seeds that name no directory: each gets its own."""
        train = next(kind for kind in KINDS if kind.name == "train")
        seeds = [draw.randrange(2) for _ in range(count)]
        command = [word for word in SCENARIOS["train"].command(self.inputs, folder / "out")]
        place = command.index("--out")
        words = command[:place] + command[place + 2 :]
        commands = [[*words, *(["--train.seed", "1"] if seed else [])] for seed in seeds]
        ends = self.start(commands, [draw.uniform(0, 0.05) for _ in range(count)], folder)
        outcome.wrong += [f"exit {code}: {said[-300:]}" for code, said in ends if code != 0]
        there = [kind.result(run) for run in sorted((folder / "runs").iterdir())]
        wanted = [self.alone(train, seed)[0] for seed in seeds]
        if sorted(map(str, there)) != sorted(map(str, wanted)):
            outcome.wrong.append(f"{len(there)} directories of {count}, or other than undisturbed")


class _Refused(Exception):
    """A command that is alone did not come to its end."""


def _sentence(said: str) -> bool:
    """Whether a refusal is one sentence of at most 300 characters, without a traceback."""
    last = said.strip().splitlines()[-1]
    return (
        last.startswith("flatshift: error: ")
        and "Traceback" not in said
        and len(last) <= 300 + len("flatshift: error: ")
    )


_WRITER = {key: value for key, value in SMALL.items() if not key.startswith("data.")} | {
    "data.train.limit": 4,
    "data.dev.limit": 2,
    "data.test.limit": 2,
}


@contextlib.contextmanager
def field_of(folder: Path | None = None) -> Iterator[Field]:
    """A field in `folder`, or in a temporary one."""
    with tempfile.TemporaryDirectory(prefix="flatshift-races-") as temporary, Field(folder or Path(temporary)) as made:
        yield made


def run_races(count: int, *, seed: int = 0) -> list[Outcome]:
    """`count` races in the kinds' shares, drawn by `seed`."""
    order = [kind for kind in KINDS for _ in range(kind.share)]
    random.Random(seed).shuffle(order)
    found = []
    with field_of() as field:
        for number in range(count):
            kind = order[number % len(order)]
            found.append(field.race(kind, random.Random(f"{seed}-{number}")))
            for wrong in found[-1].wrong:
                print(f"race {number} ({kind.name}): {wrong}", flush=True)
    return found


def rows(bench: Benchmark, *, most: int | None = None, seed: int = 0) -> None:
    """Two-process races: how many, and how many lost or broke something."""
    count = TOTAL if most is None else most
    began = cpu_clock()
    found = run_races(count, seed=seed)
    spent = cpu_clock() - began
    by_kind = Counter(outcome.kind for outcome in found)
    told = ", ".join(f"{name} {number}" for name, number in sorted(by_kind.items()))
    three = sum(outcome.contenders == 3 for outcome in found)
    what = f"races of two or three processes for one path ({told}; {three} of three)"
    if most is None:
        bench.row(what, ours=count, unit="races", bar_op=">=", bar_value=200)
    else:
        bench.row(what, ours=count, unit="races")
    lost = sum(bool(outcome.wrong) for outcome in found)
    bench.row("races that lost, tore or changed something", ours=lost, unit="races", bar_op="==", bar_value=0)
    bench.row("CPU time of the races", ours=spent, unit="CPU-s")
