"""Every durable call of every command: killed before it, killed half-way, out of room, an I/O error, a short write.

A command runs in a fork of a process that has imported everything. One of its durable calls (`durable_calls`) is
struck, then its user does what the message says (the same command once more, or `train --resume`), and what is there
at the end must be, bit for bit, what an undisturbed command leaves. A kill before call n+1 leaves the disk as a kill
after call n.

What may go wrong has a name: *lost* (the second command refuses, or something is missing), *stuck* (a command did not
end), *other bits*, *traceback* (a fault that ends in our own bug's code 70), *left over* (temporaries that stay).
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from benchmarks._harness import ROOT, Benchmark
from benchmarks.faults import durable_calls as durable
from benchmarks.faults.forks import BUG, fork
from benchmarks.faults.scenarios import SCENARIOS, Scenario, write_inputs

STUCK_S = 240.0
"""A command on these inputs takes seconds."""
RARE = 10
"""Of so many turns, the commands that start processes (which take ten times as long) get one."""
TRIES = 3
"""Commands that a user may need after a fault: one that ends as the first one did is not the end."""


@dataclass
class Strike:
    """One fault and what came of it. exits: of the struck command, and of those after it."""

    scenario: str
    mode: str
    target: int
    hit: bool = False
    exits: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """Names of what went wrong; empty for a fault that was survived."""
    seconds: float = 0.0


# ------------------------------------------------------------------------------------------------ inside the server


def run_forked(argv: Sequence[str], said: Path, around: Callable[[], Any], disk: Path) -> int:
    """The exit code of a command in a fork of this process, in a group of its own; −9 for a killed one.

    said: file that gets its output. around: makes the context that it runs in. Raises TimeoutError if it does not end.
    """

    @contextlib.contextmanager
    def child_of_disk() -> Iterator[None]:
        os.environ["FLATSHIFT_CACHE"] = str(disk / "cache")
        os.environ["PYTHONPATH"] = str(ROOT)
        from flatshift.cli import _on_terminate

        signal.signal(signal.SIGTERM, _on_terminate)
        with around():
            yield

    with said.open("ab") as out:
        child = fork(argv, cwd=disk, out=out.fileno(), around=child_of_disk)
    ends = time.monotonic() + STUCK_S
    while time.monotonic() < ends:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # ranks that it left
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise TimeoutError(f"{argv[0]} did not end in {STUCK_S:.0f} s")


def undisturbed(scenario: Scenario, inputs: Path, disk: Path, *, log: Path | None = None) -> dict[str, str]:
    """What a command leaves that nothing happens to, on the new directory `disk`; its calls are recorded in `log`."""
    disk.mkdir(parents=True)
    out, control = disk / "out", disk.with_suffix(".control")
    said = disk.with_suffix(".said")
    code = run_forked(scenario.command(inputs, out), said, lambda: durable.struck(control, disk, log=log), disk)
    if code:
        raise RuntimeError(f"{scenario.name} ends with {code}: {said.read_text()[-2000:]}")
    return scenario.result(out)


def strike(scenario: Scenario, inputs: Path, disk: Path, wanted: dict[str, str], mode: str, target: int) -> Strike:
    """Strike one call of a command, go on as its user would, and compare."""
    found = Strike(scenario.name, mode, target)
    started = time.monotonic()
    disk.mkdir(parents=True)
    out, control, said = disk / "out", disk.with_suffix(".control"), disk.with_suffix(".said")
    try:
        around = lambda: durable.struck(control, disk, mode=durable.MODES[mode], target=target)  # noqa: E731
        found.exits.append(run_forked(scenario.command(inputs, out), said, around, disk))
        found.hit = durable.block(control).hit >= 0
        judge_ending(found, said)
        go_on(scenario, inputs, disk, wanted, found)
    except TimeoutError as error:
        found.wrong.append("stuck")
        found.said.append(str(error))
    found.seconds = time.monotonic() - started
    return found


def judge_ending(found: Strike, said: Path) -> None:
    """A command that was not killed says what happened, and not by a traceback."""
    text = said.read_text(errors="replace") if said.is_file() else ""
    found.said.append(text.strip().splitlines()[-1] if text.strip() else "")
    if found.exits[-1] == BUG or "Traceback" in text:
        found.wrong.append("traceback")
        found.said[-1] = text[-1500:]


def go_on(scenario: Scenario, inputs: Path, disk: Path, wanted: dict[str, str], found: Strike) -> None:
    """Do what the user of a disturbed command does, and compare what is there at the end."""
    out = disk / "out"
    again = scenario.again or scenario.command
    for turn in range(TRIES):
        if turn and differing(scenario.result(out), wanted) == []:
            break  # it was whole: asked once more, a finished directory may be refused
        said = disk.with_suffix(f".said{turn}")
        found.exits.append(run_forked(again(inputs, out), said, contextlib.nullcontext, disk))
        before = len(found.wrong)
        judge_ending(found, said)
        if len(found.wrong) > before:
            return
    if different := differing(scenario.result(out), wanted):
        missing = [name for name in different if "missing" in scenario.result(out).get(name, "missing")]
        found.wrong.append("lost" if missing else "other bits")
        found.said.append(", ".join(different[:6]))
    if left := [str(path.relative_to(disk)) for path in disk.rglob(".*.tmp")]:
        found.wrong.append("left over")
        found.said.append(", ".join(left[:6]))


def remove_disk(disk: Path) -> None:
    """Remove a disk that has nothing more to show, and what was noted beside it."""
    shutil.rmtree(disk)
    for path in disk.parent.glob(f"{disk.name}.*"):
        path.unlink()


def differing(found: dict[str, str], wanted: dict[str, str]) -> list[str]:
    """Names of results that are not as wanted."""
    return sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))


def serve() -> None:
    """Answer jobs from standard input, one JSON document a line, until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = {"done": _JOBS[job.pop("job")](**job)}
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _import(names: list[str]) -> int:
    import gc

    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.freeze()
    return len(list(Path("/proc/self/task").iterdir()))


def _modules(scenario: str, inputs: str, disk: str) -> list[str]:
    """Names of modules that a command loads."""
    place = Path(disk)
    place.mkdir(parents=True)

    @contextlib.contextmanager
    def naming() -> Iterator[None]:
        yield
        place.with_suffix(".modules").write_text("\n".join(sys.modules))

    argv = SCENARIOS[scenario].command(Path(inputs), place / "out")
    code = run_forked(argv, place.with_suffix(".said"), naming, place)
    if code:
        raise RuntimeError(f"{scenario} ends with {code}: {place.with_suffix('.said').read_text()[-2000:]}")
    return place.with_suffix(".modules").read_text().splitlines()


def _undisturbed(scenario: str, inputs: str, disk: str, log: str | None = None) -> dict[str, str]:
    return undisturbed(SCENARIOS[scenario], Path(inputs), Path(disk), log=None if log is None else Path(log))


def _strike(scenario: str, inputs: str, disk: str, wanted: dict[str, str], mode: str, target: int) -> dict[str, Any]:
    found = strike(SCENARIOS[scenario], Path(inputs), Path(disk), wanted, mode, target)
    if not found.wrong:
        remove_disk(Path(disk))
    return asdict(found)


def _resume(scenario: str, inputs: str, disk: str, wanted: dict[str, str]) -> dict[str, Any]:
    """Go on with a disk as something left it."""
    found = Strike(scenario, "power cut", -1, hit=True)
    try:
        go_on(SCENARIOS[scenario], Path(inputs), Path(disk), wanted, found)
    except TimeoutError as error:
        found.wrong.append("stuck")
        found.said.append(str(error))
    return asdict(found)


_JOBS: dict[str, Callable[..., Any]] = {
    "import": _import,
    "modules": _modules,
    "undisturbed": _undisturbed,
    "strike": _strike,
    "resume": _resume,
}


# ----------------------------------------------------------------------------------------------------- the campaign


class Server:
    """A process that has imported everything and runs commands in forks of itself, the library in front of libc."""

    def __init__(self, library: Path) -> None:
        threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.faults.crash"],
            cwd=ROOT,
            env={**os.environ, **threads, "LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, job: str, **arguments: Any) -> Any:
        """What the server answers to one job."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"job": job, **arguments}) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline() or '{"failed": "the server ended"}')
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        return answer["done"]


class Campaign:
    """Servers, inputs, and the undisturbed results of each scenario; a context."""

    def __init__(self, *, servers: int | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="faults-")
        self.folder = Path(self._folder.name).resolve()
        self.inputs = self.folder / "inputs"
        self._numbers = itertools.count()
        self._count = servers or max(1, min(4, os.cpu_count() or 1))
        self.wanted: dict[str, dict[str, str]] = {}
        self.disks: dict[str, Path] = {}
        self.calls: dict[str, list[durable.Call]] = {}

    def __enter__(self) -> Campaign:
        write_inputs(self.inputs)
        library = durable.build(self.folder)
        self.free: SimpleQueue[Server] = SimpleQueue()
        first = Server(library)
        about = {"scenario": "train of three stages", "inputs": str(self.inputs), "disk": str(self.new_disk())}
        modules = first.ask("modules", **about)
        self.servers = [first, *(Server(library) for _ in range(self._count - 1))]
        for server in self.servers:
            server.ask("import", names=modules)
            self.free.put(server)
        return self

    def __exit__(self, *error: object) -> None:
        for server in self.servers:
            server.process.kill()
        self._folder.cleanup()

    def new_disk(self) -> Path:
        """A name for a directory that nobody has used."""
        return self.folder / f"disk{next(self._numbers)}"

    def ask(self, job: str, **arguments: Any) -> Any:
        """Have one of the servers do a job on a disk of its own."""
        server = self.free.get()
        try:
            return server.ask(job, inputs=str(self.inputs), **{"disk": str(self.new_disk()), **arguments})
        finally:
            self.free.put(server)

    def settle(self, name: str) -> None:
        """Run a scenario undisturbed, twice: what it leaves is wanted, and must be the same both times."""
        if name in self.wanted:
            return
        for other in SCENARIOS[name].prepare:
            if not (self.inputs / other).exists():
                disk = self.new_disk()
                self.ask("undisturbed", scenario=other, disk=str(disk))
                shutil.copytree(disk / "out", self.inputs / other)
        disk = self.new_disk()
        log = disk.with_suffix(".log")
        wanted = self.ask("undisturbed", scenario=name, disk=str(disk), log=str(log))
        once_more = self.ask("undisturbed", scenario=name)
        if different := differing(wanted, once_more):
            raise RuntimeError(f"{name} does not leave the same twice: {different}")
        self.wanted[name], self.calls[name], self.disks[name] = wanted, durable.read_log(log), disk

    def strikes(self, faults: Sequence[tuple[str, str, int]], say: Callable[[Strike], None]) -> list[Strike]:
        """Strike (scenario, mode, call) one after another, on all servers."""

        def one(fault: tuple[str, str, int]) -> Strike:
            name, mode, target = fault
            found = Strike(**self.ask("strike", scenario=name, wanted=self.wanted[name], mode=mode, target=target))
            say(found)
            return found

        with ThreadPoolExecutor(len(self.servers)) as pool:
            return list(pool.map(one, faults))


def faults_of(campaign: Campaign, names: Sequence[str], *, most: int, seed: int) -> list[tuple[str, str, int]]:
    """Every call × mode of `names`, or `most` of them drawn by `seed`, in equal parts of scenarios and modes."""
    draw = random.Random(seed)
    groups = []
    for name in names:
        campaign.settle(name)
        for mode in durable.MODES:
            group = [(name, mode, call.number) for call in campaign.calls[name] if mode in durable.modes_of(call)]
            draw.shuffle(group)
            groups.append(group)
    chosen: list[tuple[str, str, int]] = []
    turn = 0
    while len(chosen) < most and any(groups):
        for group in groups:
            passed_over = bool(group) and SCENARIOS[group[0][0]].starts_ranks and turn % RARE
            if group and not passed_over and len(chosen) < most:
                chosen.append(group.pop())
        turn += 1
    return chosen


def add_row(
    bench: Benchmark, what: str, found: Sequence[Strike] | None, *, unit: str, reason: str | None = None
) -> None:
    """How many of `found` were not survived, and how; none may be. reason: why nothing was tried (`found` None)."""
    wrong = Counter(each for strike in found or () for each in strike.wrong)
    words = ", ".join(f"{count} {each}" for each, count in wrong.items())
    bench.row(
        what + (f" ({words})" if words else ""),
        ours=None if found is None else sum(bool(strike.wrong) for strike in found),
        unit=unit,
        bar_op="==",
        bar_value=0,
        reason=reason,
    )


def rows(bench: Benchmark, *, most: int | None = None, seed: int = 0, only: Sequence[str] = ()) -> None:
    """A row a command: faults, and how many of them were not survived."""
    names = [name for name in SCENARIOS if not only or name in only]
    if reason := durable.missing():
        for name in names:
            add_row(bench, f"{name}: faults not survived", None, unit="faults", reason=reason)
        return
    with Campaign() as campaign:
        faults = faults_of(campaign, names, most=most or 10**9, seed=seed)
        done = 0

        def say(found: Strike) -> None:
            nonlocal done
            done += 1
            if found.wrong:
                print(f"! {json.dumps(asdict(found), ensure_ascii=False)}", flush=True)
            elif done % 50 == 0:
                print(f"  {done:,} of {len(faults):,}", flush=True)

        found = campaign.strikes(faults, say)
    for name in names:
        mine = [strike for strike in found if strike.scenario == name]
        hit = sum(strike.hit for strike in mine)
        about = f"faults not survived, of {hit:,} at {len(campaign.calls[name]):,} durable calls"
        add_row(bench, f"{name}: {about}", mine, unit="faults")
    total = sum(strike.hit for strike in found)
    bench.row("faults in all", ours=total, unit="faults", bar_op=">=", bar_value=1000)


if __name__ == "__main__":
    serve()
