"""Two and three processes at one path at once: one of them owns it, the others say so, and nothing is lost or torn.

Contenders are forked from one process that has imported everything, so a race costs what its winner computes. They
begin a drawn moment apart: together, or anywhere within the time that one of them takes. What lies there afterwards
must be, bit for bit, what the winner leaves when it is alone.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._commands import flags
from benchmarks._harness import Benchmark, cpu_clock
from benchmarks.faults.forks import Server, fork, wait
from benchmarks.faults.scenarios import SCENARIOS, SMALL, differing, leavings, write_inputs

HANG_S = 600.0
WORKERS = ".workers.lock"
"""What a sweep's directory keeps: by it the next sweep waits for workers of a killed one."""
Found = dict[str, str]


def run_together(starts: list[dict[str, Any]]) -> list[int]:
    """Fork commands, `[{"argv", "delay", "cwd", "said"}, …]`; returns their exit codes."""
    children = [_fork(start) for start in starts]
    ends = [wait(child, HANG_S) for child in children]
    return [-9 if ended is None else ended.code for ended in ends]


def _fork(start: Mapping[str, Any]) -> int:
    @contextlib.contextmanager
    def late() -> Iterator[None]:
        time.sleep(start["delay"])
        yield

    with Path(start["said"]).open("wb") as output:
        return fork(start["argv"], cwd=Path(start["cwd"]), out=output.fileno(), around=late)


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
    counts = Counter(record["step"] for record in map(json.loads, lines) if record["split"] == "train")
    steps = json.loads((out / "stages" / "fine-tune" / "done.json").read_text(encoding="utf-8"))["target_steps"]
    output = f"  steps: {steps} " in (out / "recipe.resolved.yaml").read_text(encoding="utf-8")
    return SCENARIOS["train"].result(out) | {"updates": str(sorted(counts.items())), "recipe says so": str(output)}


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
        self._server = Server()
        train = SCENARIOS["train"].command(self.inputs, self.inputs / "train")
        self._must([*train, "--train.keep", "2"])
        return self

    def __exit__(self, *error: object) -> None:
        self._server.close()

    def start(self, commands: Sequence[Sequence[str]], delays: Sequence[float], cwd: Path) -> list[tuple[int, str]]:
        """Run `commands`, each its delay (seconds) after the call, and return exit codes with what was said."""
        lines = [self.folder / f"said-{place}" for place in range(len(commands))]
        starts = [
            {"argv": list(argv), "delay": delay, "cwd": str(cwd), "said": str(file)}
            for argv, delay, file in zip(commands, delays, lines, strict=True)
        ]
        codes = self._server.ask("benchmarks.faults.races:run_together", starts=starts)
        return [(code, file.read_text(encoding="utf-8")) for code, file in zip(codes, lines, strict=True)]

    def _must(self, argv: Sequence[str], cwd: Path | None = None) -> None:
        ((code, output),) = self.start([argv], [0.0], cwd or self.folder)
        if code != 0:
            raise _Refused(f"alone, {' '.join(argv)} ended with {code}: {output[-1000:]}")

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
        for code, output in ends:
            if code not in (0, 2) or (code == 2 and not _sentence(output)):
                outcome.wrong.append(f"exit {code}: {output[-300:]}")
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
            outcome.wrong.append(f"other than undisturbed: {', '.join(differing(there, promised[0]))}")

    def _for_names(self, kind: Kind, draw: random.Random, count: int, folder: Path, outcome: Outcome) -> None:
        """Contenders of different seeds that name no directory: each gets its own."""
        train = next(kind for kind in KINDS if kind.name == "train")
        seeds = [draw.randrange(2) for _ in range(count)]
        command = [word for word in SCENARIOS["train"].command(self.inputs, folder / "out")]
        place = command.index("--out")
        words = command[:place] + command[place + 2 :]
        commands = [[*words, *(["--train.seed", "1"] if seed else [])] for seed in seeds]
        ends = self.start(commands, [draw.uniform(0, 0.05) for _ in range(count)], folder)
        outcome.wrong += [f"exit {code}: {output[-300:]}" for code, output in ends if code != 0]
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
    with (
        tempfile.TemporaryDirectory(prefix="flatshift-races-") as temporary,
        Field(folder or Path(temporary)) as result,
    ):
        yield result


def run_races(count: int, *, seed: int = 0, only: Sequence[str] = ()) -> list[Outcome]:
    """`count` races in the kinds' shares, drawn by `seed`."""
    order = [kind for kind in KINDS if not only or kind.name in only for _ in range(kind.share)]
    random.Random(seed).shuffle(order)
    results = []
    with field_of() as field:
        for number in range(count):
            kind = order[number % len(order)]
            results.append(field.race(kind, random.Random(f"{seed}-{number}")))
            for wrong in results[-1].wrong:
                print(f"race {number} ({kind.name}): {wrong}", flush=True)
    return results


def rows(bench: Benchmark, *, most: int | None = None, seed: int = 0, only: Sequence[str] = ()) -> None:
    """Two-process races: how many, and how many lost or broke something."""
    count = TOTAL if most is None else most
    began = cpu_clock()
    result = run_races(count, seed=seed, only=only)
    spent = cpu_clock() - began
    by_kind = Counter(outcome.kind for outcome in result)
    text = ", ".join(f"{name} {number}" for name, number in sorted(by_kind.items()))
    three = sum(outcome.contenders == 3 for outcome in result)
    what = f"races of two or three processes for one path ({text}; {three} of three)"
    if most is None:
        bench.row(what, ours=count, unit="races", bar_op=">=", bar_value=200)
    else:
        bench.row(what, ours=count, unit="races")
    lost = sum(bool(outcome.wrong) for outcome in result)
    bench.row("races that lost, tore or changed something", ours=lost, unit="races", bar_op="==", bar_value=0)
    bench.row("CPU time of the races", ours=spent, unit="CPU-s")
