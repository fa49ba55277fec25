"""`kill -9` at random moments of `flatshift sweep --jobs 4`, resumed each time: its tables beside an undisturbed one's.

    python -m benchmarks.sweep_kills [--kills 20]

A kill hits one worker (the sweep goes on), the main process alone (its workers find out that they are orphans), or the
main process and all its workers at once; during the start, or at a random moment after some cells were begun. A sweep
takes several kills before it is let finish; a worker at a cell that lost one before is spared, since two deaths make
a cell a failure. No cell may be lost, none that is finished may be started again, none may be started
twice without a kill in between, and the tables must be those of the sweep that nothing happened to.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq

from benchmarks._commands import QUICK, WAIT_S, children_of, finish, start, wait_until
from benchmarks._harness import Benchmark

JOBS, KILLS_A_SWEEP = 4, 10
RANKS, SEEDS = (1, 2, 3, 4, 6, 8), 4
SETTINGS = f"""{QUICK} --train.steps 3 --train.batch_size 2 --train.max_length 16 --adapter.dropout 0.05
    --data.train.limit 24 --data.test.limit 16 --record.per_doubling 1 --record.heldout_rows 8"""
VICTIMS = ("worker", "worker", "main", "all")
_ASIDE = ("seconds", "time_s", "record_s", "code")
"""Columns that are no figures: times, and the fingerprint of a source tree that may be edited meanwhile."""


def begin(out: Path, *more: str, jobs: int = JOBS) -> subprocess.Popen[str]:
    """The public command of the sweep into `out`, begun or gone on with, in a process group of its own."""
    grid = ["--grid", f"adapter.rank={','.join(map(str, RANKS))}", "--seeds", str(SEEDS), "--jobs", str(jobs), *more]
    words = ["sweep", "double-descent", "--out", str(out), *grid, *SETTINGS.split()]
    return start(*words, stderr=out.with_suffix(".err").open("ab"), start_new_session=True)


@dataclass
class Watch:
    """What the log of a sweep says between two kills, and which cells were finished at each."""

    out: Path
    segments: list[tuple[int, set[str]]] = field(default_factory=lambda: [(0, set())])
    stamps: dict[Path, int] = field(default_factory=dict)

    def starts(self) -> list[tuple[int, str, int]]:
        """(place in the log, cell, process) of every start."""
        file = self.out / "log.txt"
        if not file.is_file():
            return []
        results, place = [], 0
        for line in file.read_bytes().splitlines(keepends=True):
            words = line.decode().split()
            if len(words) > 2 and words[1] == "start":
                results.append((place, words[2], int(words[-1])))
            place += len(line)
        return results

    def killed(self) -> None:
        """A kill was just made: what is finished now must never be started again, or written again."""
        file = self.out / "log.txt"
        finished = list(self.out.glob("cells/*/result.json"))
        self.segments.append((file.stat().st_size if file.is_file() else 0, {path.parent.name for path in finished}))
        for path in finished:
            self.stamps.setdefault(path, path.stat().st_mtime_ns)

    def again(self) -> int:
        """Starts of cells that were finished, rewritten results, and second starts without a kill in between."""
        wrong = sum(path.stat().st_mtime_ns != stamp for path, stamp in self.stamps.items())
        ends = [place for place, _ in self.segments[1:]] + [sys.maxsize]
        for (begin, finished), end in zip(self.segments, ends, strict=True):
            keys = [key for place, key, _ in self.starts() if begin <= place < end]
            wrong += sum(key in finished for key in keys) + len(keys) - len(set(keys))
        return wrong


def reach(process: subprocess.Popen[str], watch: Watch, draw: random.Random) -> bool:
    """Wait for the moment of a kill; whether it came before the sweep ended."""
    if draw.random() < 0.25:
        time.sleep(draw.random() * 6)
        return process.poll() is None
    target = len(watch.starts()) + draw.randint(1, 4)
    if not wait_until(process, lambda: len(watch.starts()) >= target):
        return False
    time.sleep(draw.random())
    return process.poll() is None


def kill(process: subprocess.Popen[str], watch: Watch, hit: set[str], draw: random.Random) -> str | None:
    """Kill by SIGKILL; who it was, None if there was nobody.

    hit: cells whose worker was killed under this main process: a second one would rightly fail the cell, so these are
    let be.
    """
    who = draw.choice(VICTIMS)
    if who == "all":
        os.killpg(process.pid, signal.SIGKILL)
    elif who == "main":
        process.kill()
    else:
        at = {pid: key for _, key, pid in watch.starts()}
        able = [pid for pid in children_of(process.pid, b"spawn_main") if at.get(pid) not in hit]
        if not able:
            return None
        victim = draw.choice(able)
        os.kill(victim, signal.SIGKILL)
        watch.killed()
        if victim in at:
            hit.add(at[victim])
        return who
    process.wait(timeout=WAIT_S)
    time.sleep(1.0 if who == "main" else 0.0)  # orphans may finish a cell before they find out
    watch.killed()
    return who


def end(process: subprocess.Popen[str], out: Path) -> None:
    """Let the sweep come to its end."""
    try:
        finish(process)
    except RuntimeError as error:
        log = out.with_suffix(".err").read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(f"{error}{log.strip()[-2000:]}") from None


def tables(out: Path) -> list[dict[str, list]]:
    """Every figure of cells.parquet and curves.parquet."""
    results = [pq.read_table(out / name).to_pydict() for name in ("cells.parquet", "curves.parquet")]
    return [{name: column for name, column in table.items() if name not in _ASIDE} for table in results]


@dataclass
class Tally:
    """What a campaign of kills came to."""

    whole: Path
    """The sweep that nothing happened to."""
    kills: int = 0
    sweeps: int = 0
    lost: int = 0
    again: int = 0
    same: int = 0
    leftovers: int = 0

    def hit(self, watch: Watch, who: str) -> None:
        """A kill."""
        self.kills += 1
        print(f"  {self.kills:2}. sweep {self.sweeps}: {who}, {len(watch.segments[-1][1])} done", flush=True)

    def add(self, watch: Watch) -> None:
        """A sweep that came to its end."""
        keys = [{path.parent.name for path in one.glob("cells/*/result.json")} for one in (self.whole, watch.out)]
        equal = tables(watch.out) == tables(self.whole)
        self.lost += len(keys[0] - keys[1])
        self.again += watch.again()
        self.same += equal
        self.leftovers += len(list(watch.out.rglob(".*.tmp")))
        print(f"  sweep {self.sweeps}: {'same tables' if equal else 'OTHER TABLES'}", flush=True)

    def rows(self, bench: Benchmark, title: str) -> None:
        """A row for each promise."""
        title = f"after {self.kills} kills ({title}) of {self.sweeps} sweeps of {len(RANKS) * SEEDS} cells"
        bench.row(f"{title}: cells lost", "cells", ours=self.lost, exactly=0)
        bench.row(f"{title}: cells run twice", "cells", ours=self.again, exactly=0)
        same = f"{title}: sweeps with the tables of cells and steps of the undisturbed one, bit for bit"
        bench.row(same, "sweeps", ours=self.same, exactly=self.sweeps)
        bench.row(f"{title}: files left over", "files", ours=self.leftovers, exactly=0)


def kill_one_host(folder: Path, result: Tally, wanted: int, draw: random.Random) -> Tally:
    """Kills of a worker, the main process, or all."""
    while result.kills < wanted:
        result.sweeps += 1
        watch, last = Watch(folder / f"killed-{result.sweeps}"), min(result.kills + KILLS_A_SWEEP, wanted)
        process, hit = begin(watch.out), set[str]()
        while result.kills < last and reach(process, watch, draw):
            if (who := kill(process, watch, hit, draw)) is None:
                continue
            result.hit(watch, who)
            if who != "worker":
                process, hit = begin(watch.out), set()
        end(process, watch.out)
        result.add(watch)
    return result


def main() -> None:
    """Measure and write benchmarks/results/sweep_kills.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    asked = parser.parse_args()
    bench = Benchmark("sweep_kills", packages=("torch", "transformers", "peft", "pyarrow"))
    with tempfile.TemporaryDirectory() as name:
        folder, draw = Path(name), random.Random(60)
        whole = folder / "whole"
        end(begin(whole), whole)
        one = kill_one_host(folder, Tally(whole), asked.kills, draw)
        one.rows(bench, f"a worker of {JOBS}, the main process, or all")
    bench.finish()


if __name__ == "__main__":
    main()
