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
import itertools
import json
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from benchmarks._harness import Benchmark
from benchmarks.faults import durable_calls as durable
from benchmarks.faults.forks import BUG, Server, run_forked
from benchmarks.faults.scenarios import SCENARIOS, Scenario, differing, write_inputs

HERE = "benchmarks.faults.crash"
RARE = 10
"""Of so many turns, the commands that start processes (which take ten times as long) get one."""
TRIES = 3
"""Commands that a user may need after a fault: one that ends as the first one did is not the end."""


@dataclass
class Strike:
    """One fault and what came of it. exits: of the struck command, and of those after it. wrong: names of what went
    wrong; empty for a fault that was survived."""

    scenario: str
    mode: str
    target: int
    hit: bool = False
    exits: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


# ------------------------------------------------------------------------------------------------ inside the server


def undisturbed(scenario: str, inputs: str, disk: str, log: str | None = None) -> dict[str, str]:
    """Digests of what a command leaves that nothing happens to, on the new directory `disk`; its durable calls are
    recorded in `log`."""
    place, control, output = _on_disk(disk)
    argv = SCENARIOS[scenario].command(Path(inputs), place / "out")
    record = None if log is None else Path(log)
    if code := run_forked(argv, output, lambda: durable.struck(control, place, log=record), place):
        raise RuntimeError(f"{scenario} ends with {code}: {output.read_text()[-2000:]}")
    return SCENARIOS[scenario].result(place / "out")


def strike(scenario: str, inputs: str, disk: str, wanted: dict[str, str], mode: str, target: int) -> dict[str, Any]:
    """Strike one call of a command, go on as its user would, and compare."""
    result = Strike(scenario, mode, target)
    place, control, output = _on_disk(disk)
    argv = SCENARIOS[scenario].command(Path(inputs), place / "out")
    try:
        around = lambda: durable.struck(control, place, mode=durable.MODES[mode], target=target)  # noqa: E731
        result.exits.append(run_forked(argv, output, around, place))
        result.hit = durable.block(control).hit >= 0
        _check_ending(result, output)
        _go_on(SCENARIOS[scenario], Path(inputs), place, wanted, result)
    except TimeoutError as error:
        result.wrong.append("stuck")
        result.said.append(str(error))
    if not result.wrong:
        remove_disk(place)
    return asdict(result)


def go_on(scenario: str, inputs: str, disk: str, wanted: dict[str, str]) -> dict[str, Any]:
    """Go on with a disk as something left it."""
    result = Strike(scenario, "power cut", -1, hit=True)
    try:
        _go_on(SCENARIOS[scenario], Path(inputs), Path(disk), wanted, result)
    except TimeoutError as error:
        result.wrong.append("stuck")
        result.said.append(str(error))
    return asdict(result)


def _on_disk(disk: str) -> tuple[Path, Path, Path]:
    """A new directory, its control block and its file of output."""
    place = Path(disk)
    place.mkdir(parents=True)
    return place, place.with_suffix(".control"), place.with_suffix(".said")


def _check_ending(result: Strike, said: Path) -> bool:
    """A command that was not killed says what happened, and not by a traceback."""
    text = said.read_text(errors="replace") if said.is_file() else ""
    result.said.append(text.strip().splitlines()[-1] if text.strip() else "")
    if result.exits[-1] != BUG and "Traceback" not in text:
        return True
    result.wrong.append("traceback")
    result.said[-1] = text[-1500:]
    return False


def _go_on(scenario: Scenario, inputs: Path, disk: Path, wanted: dict[str, str], outcome: Strike) -> None:
    """Do what the user of a disturbed command does, and compare what is there at the end."""
    out = disk / "out"
    again = scenario.again or scenario.command
    for turn in range(TRIES):
        if turn and differing(scenario.result(out), wanted) == []:
            break  # it was whole: asked once more, a finished directory may be refused
        log = disk.with_suffix(f".said{turn}")
        outcome.exits.append(run_forked(again(inputs, out), log, contextlib.nullcontext, disk))
        if not _check_ending(outcome, log):
            return
    if different := differing(scenario.result(out), wanted):
        missing = [name for name in different if "missing" in scenario.result(out).get(name, "missing")]
        outcome.wrong.append("lost" if missing else "other bits")
        outcome.said.append(", ".join(different[:6]))
    if left := [str(path.relative_to(disk)) for path in disk.rglob(".*.tmp")]:
        outcome.wrong.append("left over")
        outcome.said.append(", ".join(left[:6]))


def remove_disk(disk: Path) -> None:
    """Remove a disk that has nothing more to show, and what was noted beside it."""
    shutil.rmtree(disk)
    for path in disk.parent.glob(f"{disk.name}.*"):
        path.unlink()


# ----------------------------------------------------------------------------------------------------- the campaign


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
        self.servers = [Server(library) for _ in range(self._count)]
        self.free: SimpleQueue[Server] = SimpleQueue()
        for server in self.servers:
            self.free.put(server)
        return self

    def __exit__(self, *error: object) -> None:
        for server in self.servers:
            server.close()
        self._folder.cleanup()

    def new_disk(self) -> Path:
        """A name for a directory that nobody has used."""
        return self.folder / f"disk{next(self._numbers)}"

    def ask(self, function: str, disk: Path, scenario: str, **arguments: Any) -> Any:
        """Have one of the servers do a job on a disk of its own."""
        server = self.free.get()
        try:
            return server.ask(
                f"{HERE}:{function}", inputs=str(self.inputs), disk=str(disk), scenario=scenario, **arguments
            )
        finally:
            self.free.put(server)

    def settle(self, name: str) -> None:
        """Run a scenario undisturbed, twice: what it leaves is wanted, and must be the same both times."""
        if name in self.wanted:
            return
        for other in SCENARIOS[name].prepare:
            if not (self.inputs / other).exists():
                disk = self.new_disk()
                self.ask("undisturbed", disk, other)
                shutil.copytree(disk / "out", self.inputs / other)
        disk = self.new_disk()
        log = disk.with_suffix(".log")
        wanted = self.ask("undisturbed", disk, name, log=str(log))
        if different := differing(wanted, self.ask("undisturbed", self.new_disk(), name)):
            raise RuntimeError(f"{name} does not leave the same twice: {different}")
        self.wanted[name], self.calls[name], self.disks[name] = wanted, durable.read_log(log), disk

    def each(self, tries: Sequence[Any], one: Callable[[Any], Strike]) -> list[Strike]:
        """`one` of each try, on all servers; what was not survived is printed."""
        results = []
        with ThreadPoolExecutor(len(self.servers)) as pool:
            for number, strike in enumerate(pool.map(one, tries), start=1):
                results.append(strike)
                if strike.wrong:
                    print(f"! {json.dumps(asdict(strike), ensure_ascii=False)}", flush=True)
                elif number % 50 == 0:
                    print(f"  {number:,} of {len(tries):,}", flush=True)
        return results


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
    bench: Benchmark, what: str, results: Sequence[Strike] | None, *, unit: str, reason: str | None = None
) -> None:
    """How many of `found` were not survived, and how; none may be. reason: why nothing was tried (`found` None)."""
    wrong = Counter(each for strike in results or () for each in strike.wrong)
    words = ", ".join(f"{count} {each}" for each, count in wrong.items())
    bench.row(
        what + (f" ({words})" if words else ""),
        ours=None if results is None else sum(bool(strike.wrong) for strike in results),
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

        def one(fault: tuple[str, str, int]) -> Strike:
            name, mode, target = fault
            wanted = campaign.wanted[name]
            return Strike(**campaign.ask("strike", campaign.new_disk(), name, wanted=wanted, mode=mode, target=target))

        result = campaign.each(faults_of(campaign, names, most=most or 10**9, seed=seed), one)
    for name in names:
        mine = [strike for strike in result if strike.scenario == name]
        hit = sum(strike.hit for strike in mine)
        about = f"faults not survived, of {hit:,} at {len(campaign.calls[name]):,} durable calls"
        add_row(bench, f"{name}: {about}", mine, unit="faults")
    total = sum(strike.hit for strike in result)
    bench.row("faults in all", ours=total, unit="faults", bar_op=">=", bar_value=1000)
