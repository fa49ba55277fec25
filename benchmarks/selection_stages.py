"""A selection by shards of the pool (`flatshift select --on`) beside one process, and what its command does alone.

Group `workers`: `flatshift select --on local:2` beside the same command without `--on`, over a pool of the documents of
`benchmarks.scale` in files: CPU-seconds of the command and all its processes, and the largest anonymous resident set of
a worker. Steps: exact and near-duplicates under 0.25 GiB, then the method. One thread a process; the report's checks
are off.

Group `simulate`: what the command does itself, without the workers. First the whole code over shards of such documents
that are drawn when they are asked for and kept nowhere; then, of as many rows as one likes, the parts that join the
shards, on drawn digests, keys and scores: repeated ids, exact duplicates, one band of near-duplicates, ranks. Work and
memory of drawing and of what workers do are not counted.

Run: python -m benchmarks.selection_stages workers --documents 10000000 --method dsir --method gotd
     python -m benchmarks.selection_stages simulate --documents 1000000 --rows 100000000
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from benchmarks._harness import Benchmark, PeakMemory, in_child, rows_by_group
from benchmarks.scale import DrawnDocuments
from flatshift.experiments.select.stages import _first_repeated_id
from flatshift.finetune.data.rows import read_rows
from flatshift.finetune.launch import spawn
from flatshift.selection import DSIRSelector, Pool
from flatshift.selection.hygiene import Hygiene, LengthFilter, NearDuplicates, clean_pool
from flatshift.selection.hygiene.duplicates import ExactDuplicates, NearDuplicateGroups
from flatshift.selection.shards import Arrays, Shard, ShardMap

_GROUPS = ("workers", "simulate")


def measured_command(command: list[str]) -> dict[str, float]:
    """CPU-seconds of a command and its processes, and of it alone; the largest anonymous resident sets of it and of a
    child."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | dict.fromkeys(spawn.THREAD_VARIABLES, "1")
    driver = worker = ticks = 0
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            for status in Path("/proc").glob("[0-9]*/status"):
                with contextlib.suppress(OSError):
                    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
                    size = int(lines.get("RssAnon", "0 kB").split()[0]) << 10
                    if int(lines["Pid"]) == process.pid:
                        driver = max(driver, size)
                        fields = (status.parent / "stat").read_text().rpartition(")")[2].split()
                        ticks = int(fields[11]) + int(fields[12])
                    elif int(lines["PPid"]) == process.pid:
                        worker = max(worker, size)
            time.sleep(0.1)
    if process.returncode:
        raise RuntimeError(f"{command} ended with code {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu": cpu, "own": ticks / os.sysconf("SC_CLK_TCK"), "driver": driver, "worker": worker}


def stage_rows(bench: Benchmark, *, documents: int, files: int, methods: Sequence[str]) -> None:
    """Selections from `documents` in `files`, by two workers and by one process."""
    with tempfile.TemporaryDirectory() as folder:
        drawn, before = DrawnDocuments(files, documents // files), []
        for number in range(files):
            texts = drawn._drawn(number, before)
            lines = [json.dumps({"id": f"{number}-{place}", "text": text}) + "\n" for place, text in enumerate(texts)]
            (Path(folder) / f"{number:05d}.jsonl").write_text("".join(lines), encoding="utf-8")
            before = texts
        command = [sys.executable, "-m", "flatshift", "select", "--pool", f"{folder}/*.jsonl"]
        command += ["--target", "sample:banking/train", "--data.holdout", "0", "--budget", "1000"]
        command += ["--select.hygiene.exact", "true", "--select.hygiene.near", "{}", "--select.checks", "false"]
        command += ["--select.hygiene.memory_gib", "0.25"]
        for method in methods:
            runs, scores = {}, {}
            for on in ("", "local:2"):
                out = f"{folder}/{method}{on}"
                more = ["--method", method, "--out", out, *(["--on", on] if on else [])]
                runs[on] = measured_command([*command, *more])
                scores[on] = pq.read_table(f"{out}/scores.parquet")
                print(f"    {method} {on or 'one process'}: {runs[on]}", flush=True)
            one, two = runs.values()
            what = f"{method} of {documents:,} documents in {files:,} files"
            title = f"{what}: CPU-seconds by two workers, times those of one process"
            bench.row(title, "x", ours=two["cpu"] / one["cpu"], maximum=1.15)
            bench.row(f"{what}: memory a worker", "MiB", ours=two["worker"] / 2**20, maximum=300)
            bench.row(f"{what}: memory of the command", "MiB", ours=two["driver"] / 2**20)
            bench.row(f"{what}: memory of one process", "MiB", ours=one["driver"] / 2**20)
            same = scores[""].equals(scores["local:2"])
            bench.row(f"{what}: the same scores", "selections", ours=float(same), exactly=1)


class DrawnShards(ShardMap):
    """Shards of `size` documents that are drawn when they are asked for; `cpu`: of that and of the functions."""

    def __init__(self, shards: int, size: int):
        self.drawn, self.cpu = DrawnDocuments(shards, size), 0.0
        self._last: tuple[int, list[str]] = -1, []

    def __call__(
        self,
        stage: str,
        function: Callable[[Shard], Arrays],
        *,
        inputs: Arrays | None = None,
        earlier: Sequence[Arrays] | None = None,
        align: int = 1,
    ) -> _DrawnResults:
        return _DrawnResults(self, function, inputs or {}, earlier)

    def texts(self, number: int) -> list[str]:
        """Those of a shard; shards are asked for in order."""
        last, texts = self._last
        if number != last:
            assert number in (0, last + 1)
            self._last = number, self.drawn._drawn(number, texts if number else [])
        return self._last[1]


class _DrawnResults(Sequence[Arrays]):
    def __init__(
        self, pool: DrawnShards, function: Callable[[Shard], Arrays], inputs: Arrays, earlier: Sequence[Arrays] | None
    ):
        self._pool, self._function, self._inputs, self._earlier = pool, function, inputs, earlier

    def __len__(self) -> int:
        return self._pool.drawn.shards

    def __getitem__(self, number: int) -> Arrays:
        number = range(len(self))[number]
        earlier = {} if self._earlier is None else self._earlier[number]
        began = time.thread_time()
        low = number * self._pool.drawn.size
        texts = self._pool.texts(number)
        result = self._function(Shard(texts, low, low + len(texts), self._inputs, earlier))
        self._pool.cpu += time.thread_time() - began
        return result


class _Count(Sequence[str]):
    """Stands for so many texts that nobody reads."""

    def __init__(self, count: int):
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> str:
        range(self._count)[number]
        return ""


def selected_from_drawn(step: str, shards: int, size: int, memory_gib: float) -> dict[str, float]:
    """Cleaning ("clean") or dsir ("score") by drawn shards: CPU-seconds outside and inside them, and memory."""
    target = [row.values["text"] for row in read_rows(("sample:banking/train",))]
    settings = Hygiene(length=LengthFilter(min_words=5), exact=True, near=NearDuplicates(), memory_gib=memory_gib)
    pool = DrawnShards(shards, size)
    began = time.thread_time()
    with PeakMemory(0.02) as peak:
        if step == "clean":
            assert len(clean_pool((), settings, shards=pool).kept) < shards * size
        else:
            selector = DSIRSelector().fit(Pool(texts=_Count(shards * size), shards=pool), Pool(texts=target))
            selector.ranks()
    return {"own": time.thread_time() - began - pool.cpu, "workers": pool.cpu, "memory": peak.bytes}


def joined(part: str, rows: int, memory_gib: float) -> dict[str, float]:
    """One of the parts that join the shards, over `rows` drawn numbers: its figures."""
    memory = int(memory_gib * 2**30)
    r = np.random.default_rng(11)
    blocks = [min(1 << 17, rows - low) for low in range(0, rows, 1 << 17)]
    alive = np.broadcast_to(np.True_, rows)
    near = NearDuplicateGroups(NearDuplicates(permutations=16, recall=0.01), seed=0, memory=memory)
    exact = ExactDuplicates(memory=memory)
    assert near.bands == 1
    drawn = 0.0

    def numbers(count: int) -> np.ndarray:
        nonlocal drawn
        before = time.process_time()
        out = r.integers(0, 1 << 64, count, dtype=np.uint64)
        drawn += time.process_time() - before
        return out

    began = time.process_time()
    with PeakMemory(0.02) as peak:
        if part == "ids":
            digests = np.empty(rows, np.uint64)
            for number, count in enumerate(blocks):
                digests[number << 17 :][:count] = numbers(count)
            assert _first_repeated_id([], digests) is None
        elif part == "exact":
            for count in blocks:
                exact.add_digests(numbers(2 * count))
            exact.first(alive)
        elif part == "band":
            for count in blocks:
                near.add_keys(numbers(count)[None], np.ones(count, bool))
            near.propose(alive)
        else:
            selector = DSIRSelector()
            selector.scores_ = np.concatenate([numbers(count) / 2.0**64 for count in blocks])
            selector.ranks()
    return {"cpu": time.process_time() - began - peak.cpu - drawn, "memory": peak.bytes}


def simulation_rows(bench: Benchmark, *, documents: int, rows: int, memory_gib: float) -> None:
    """The command's own part at several sizes."""
    shards, more = 100, documents - documents // 4
    for step, what in (("clean", "cleaning"), ("score", "dsir's scores and ranks")):
        small, large = (
            in_child("benchmarks.selection_stages:selected_from_drawn", wall_cap_s=5 * 3600, step=step, shards=shards,
                     size=count // shards, memory_gib=memory_gib)
            for count in (documents // 4, documents)
        )  # fmt: skip
        print(f"    {step}, {documents // 4:,} and {documents:,} documents: {small}, {large}", flush=True)
        title = f"{documents:,} drawn documents in {shards} shards, {what}"
        slope = {figure: (large[figure] - small[figure]) / more for figure in small}
        unit = "CPU-s a million documents"
        bench.row(f"{title}: the command's own CPU time", unit, ours=slope["own"] * 1e6)
        bench.row(f"{title}: that of workers, drawing included", unit, ours=slope["workers"] * 1e6)
        bench.row(f"{title}: memory of both", "bytes a document", ours=slope["memory"])
    for part in ("ids", "exact", "band", "ranks"):
        run = in_child(
            "benchmarks.selection_stages:joined", wall_cap_s=5 * 3600, part=part, rows=rows, memory_gib=memory_gib
        )
        print(f"    {part} of {rows:,}: {run}", flush=True)
        title = f"{_JOINED[part]} of {rows:,} rows"
        bench.row(f"{title}: CPU-seconds", "CPU-s", ours=run["cpu"])
        bench.row(f"{title}: memory", "bytes a row", ours=run["memory"] / rows)


_JOINED = {
    "ids": "repeated ids",
    "exact": "exact duplicates",
    "band": "one band of near-duplicates",
    "ranks": "scores joined and ranked",
}


def main() -> None:
    """`python -m benchmarks.selection_stages`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("groups", nargs="*", choices=[[], *_GROUPS], metavar="GROUP", help=", ".join(_GROUPS))
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--files", type=int, default=100, help="of the group workers")
    parser.add_argument("--method", action="append", help="of the group workers; dsir if none is named")
    parser.add_argument("--limit", type=float, default=0.25, help="of the group simulate, GiB")
    parser.add_argument("--rows", type=int, default=10_000_000, help="of the group simulate")
    asked = parser.parse_args()
    bench = Benchmark("selection_stages", command=" ".join(["python -m benchmarks.selection_stages", *sys.argv[1:]]))
    groups = {
        "workers": partial(stage_rows, documents=asked.documents, files=asked.files, methods=asked.method or ["dsir"]),
        "simulate": partial(simulation_rows, documents=asked.documents, rows=asked.rows, memory_gib=asked.limit),
    }
    rows_by_group(bench, groups, asked.groups)
    bench.finish()


if __name__ == "__main__":
    main()
