"""`kill -9` at random moments of `flatshift sweep --jobs 4`, resumed each time: its tables beside an undisturbed one's.

    python -m benchmarks.sweep_kills [--kills 20]

A kill hits one worker (the sweep goes on), the main process alone (its workers find out that they are orphans), or the
main process and all its workers at once; during the start, or at a random moment after some cells were begun. A sweep
takes several kills before it is let finish; a worker at a cell that lost one before is spared, since two deaths make
a cell a failure. No cell may be lost, none that is finished may be started again, none may be started twice without a
kill in between, and the tables must be those of the sweep that nothing happened to.
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

from benchmarks._harness import ROOT, Benchmark

JOBS, KILLS_A_SWEEP, WAIT_S = 4, 10, 600.0
RANKS, SEEDS = (1, 2, 3, 4, 6, 8), 4
SETTINGS = {
    "train.steps": 3,
    "train.batch_size": 2,
    "train.max_length": 16,
    "train.max_cut": 1,
    "train.threads": 1,
    "train.device": "cpu",
    "train.precision": "fp32",
    "adapter.dropout": 0.05,
    "data.train.limit": 24,
    "data.test.limit": 16,
    "eval.bootstrap": 5,
    "record.per_doubling": 1,
    "record.heldout_rows": 8,
}
VICTIMS = ("worker", "worker", "main", "all")
_ASIDE = ("seconds", "time_s", "record_s", "code")
"""Columns that are no figures: times, and the fingerprint of a source tree that may be edited meanwhile."""


def start(out: Path) -> subprocess.Popen[bytes]:
    """The public command of the sweep into `out`, begun or gone on with, in a process group of its own."""
    flags = [text for key, value in SETTINGS.items() for text in (f"--{key}", str(value))]
    grid = ["--grid", f"adapter.rank={','.join(map(str, RANKS))}", "--seeds", str(SEEDS), "--jobs", str(JOBS)]
    return subprocess.Popen(
        [sys.executable, "-m", "flatshift", "sweep", "double-descent", "--out", str(out), *grid, *flags],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=out.with_suffix(".err").open("ab"),
        start_new_session=True,
    )


def workers_of(main: int) -> list[int]:
    """Process ids of the workers of a sweep."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            if int(parent) == main and state != "Z" and b"spawn_main" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return sorted(found)


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
        found, place = [], 0
        for line in file.read_bytes().splitlines(keepends=True):
            words = line.decode().split()
            if len(words) > 2 and words[1] == "start":
                found.append((place, words[2], int(words[-1])))
            place += len(line)
        return found

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


def reach(process: subprocess.Popen[bytes], watch: Watch, draw: random.Random) -> bool:
    """Wait for the moment of a kill; whether it came before the sweep ended."""
    if draw.random() < 0.25:
        time.sleep(draw.random() * 6)
        return process.poll() is None
    target = len(watch.starts()) + draw.randint(1, 4)
    deadline = time.monotonic() + WAIT_S
    while len(watch.starts()) < target:
        if process.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    time.sleep(draw.random())
    return process.poll() is None


def kill(process: subprocess.Popen[bytes], watch: Watch, hit: set[str], draw: random.Random) -> str | None:
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
        able = [pid for pid in workers_of(process.pid) if at.get(pid) not in hit]
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


def finish(process: subprocess.Popen[bytes], out: Path) -> None:
    """Let the sweep come to its end."""
    if process.wait(timeout=WAIT_S) != 0:
        text = out.with_suffix(".err").read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(f"the sweep ended with {process.returncode}: {text.strip()[-2000:]}")


def tables(out: Path) -> list[dict[str, list]]:
    """Every figure of cells.parquet and curves.parquet."""
    found = [pq.read_table(out / name).to_pydict() for name in ("cells.parquet", "curves.parquet")]
    return [{name: column for name, column in table.items() if name not in _ASIDE} for table in found]


def main() -> None:
    """Measure and write benchmarks/results/sweep_kills.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    wanted = parser.parse_args().kills
    bench = Benchmark("sweep_kills", packages=("torch", "transformers", "peft", "pyarrow"))
    draw = random.Random(60)
    count = len(RANKS) * SEEDS
    kills = sweeps = lost = again = same = leftovers = 0
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        finish(start(whole), whole)
        while kills < wanted:
            sweeps += 1
            out = Path(folder) / f"killed-{sweeps}"
            watch, hits = Watch(out), 0
            process, hit = start(out), set[str]()
            while hits < KILLS_A_SWEEP and kills < wanted and reach(process, watch, draw):
                if (who := kill(process, watch, hit, draw)) is None:
                    continue
                hits, kills = hits + 1, kills + 1
                done = len(watch.segments[-1][1])
                print(f"  {kills:2}. sweep {sweeps}: {who}, with {done} of {count} cells finished", flush=True)
                if who != "worker":
                    process, hit = start(out), set()
            finish(process, out)
            finished = {path.parent.name for path in out.glob("cells/*/result.json")}
            lost += count - len(finished & {path.parent.name for path in whole.glob("cells/*/result.json")})
            again += watch.again()
            equal = tables(out) == tables(whole)
            same += equal
            leftovers += len(list(out.rglob(".*.tmp")))
            print(f"  sweep {sweeps} after {hits} kills: {'same tables' if equal else 'OTHER TABLES'}", flush=True)
    title = f"after {kills} kills (a worker, the main process, or all) of {sweeps} sweeps with {JOBS} workers"
    bench.row(f"{title} and {count} cells: cells lost", unit="cells", ours=lost, bar_op="==", bar_value=0)
    bench.row("of these, cells run twice", unit="cells", ours=again, bar_op="==", bar_value=0)
    bench.row(
        "sweeps whose tables of cells and of steps have the figures of the undisturbed sweep, bit for bit",
        unit="sweeps",
        ours=same,
        bar_op="==",
        bar_value=sweeps,
    )
    bench.row("temporary files left in finished sweeps", unit="files", ours=leftovers, bar_op="==", bar_value=0)
    bench.finish()


if __name__ == "__main__":
    main()
