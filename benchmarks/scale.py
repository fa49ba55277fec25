"""The transport solver over several processes, inputs in an object store, and cleaning under a limit of memory.

Group `ranks`: the same bits on 1, 2 and 4 processes, their CPU-seconds, memory a process. The pool is drawn block by
block from its seed whenever it is read and kept nowhere: N x 32 float16 rows around 200 centres, M = 64 targets,
epsilon 0.05, to a marginal error of 1e-3, main targets found. Each process has one thread and its part of the blocks.
CPU-seconds are those of the solve in all processes, the drawing of rows included, which every pass repeats. Memory is
the peak of a process' anonymous resident set, the interpreter and torch included. Scores are compared by the digests of
their blocks. Ranks are started as `flatshift select --processes` starts them.

Group `remote`: reading records from an S3 server on localhost beside the same files on disk (`_object_store`).

Group `dedup`: a pool from 1,000 shards cleaned and deduplicated under a limit of memory (`_document_shards`).

Run: python -m benchmarks.scale                                    eight million rows on 1, 2 and 4 processes; ten
                                                                   million on two
     python -m benchmarks.scale --rows 100000000 --processes 2     the second part with so many rows and processes
     python -m benchmarks.scale remote                             only this group; the other rows stay
     python -m benchmarks.scale dedup --documents 10000000         so many documents; else a million
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks._document_shards import dedup_rows
from benchmarks._harness import Benchmark, PeakMemory, anonymous_rss, rows_by_group
from benchmarks._object_store import remote_rows
from flatshift.finetune.config import Mesh
from flatshift.finetune.launch import spawn
from flatshift.selection import sinkhorn_potentials
from flatshift.selection.features.matrix import _LazyRows
from flatshift.selection.transport.blocks import BLOCK

DIM, TARGETS, CENTRES = 32, 64, 200
SMALL, COUNTS = 8_000_000, (1, 2, 4)
GIB = 2.0**30
_GROUPS = ("ranks", "remote", "dedup")


class DrawnRows(_LazyRows):
    """Rows [low, low + count) of an endless pool that is drawn as it is read; low begins a block."""

    def __init__(self, low: int, count: int):
        self.first = low // BLOCK
        self.shape = (count, DIM)
        self.dtype = np.dtype(np.float16)
        r = np.random.default_rng(0)
        self.centres = (2 * r.standard_normal((CENTRES, DIM))).astype(np.float16)
        self._noise = np.sort(r.standard_normal(256)).astype(np.float16)
        self._kept = threading.local()

    def _block(self, number: int) -> np.ndarray:
        if getattr(self._kept, "number", None) != number:
            r = np.random.default_rng([1, self.first + number])
            rows = self._noise[r.integers(0, 256, (BLOCK, DIM), dtype=np.uint8)]
            rows += self.centres[r.integers(0, CENTRES, BLOCK)]
            self._kept.number, self._kept.rows = number, rows
        return self._kept.rows

    def _span(self, low: int, high: int) -> np.ndarray:
        first, last = low // BLOCK, -(-high // BLOCK)
        parts = [self._block(n)[max(low - n * BLOCK, 0) : high - n * BLOCK] for n in range(first, last)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _gather(self, rows: np.ndarray) -> np.ndarray:
        out = np.empty((len(rows), DIM), dtype=np.float16)
        for number in np.unique(rows // BLOCK).tolist():
            here = rows // BLOCK == number
            out[here] = self._block(number)[rows[here] - number * BLOCK]
        return out


def targets() -> np.ndarray:
    """(M, d): around twenty of the pool's centres."""
    r = np.random.default_rng(2)
    return DrawnRows(0, BLOCK).centres[r.integers(0, 20, TARGETS)] + 0.8 * r.standard_normal((TARGETS, DIM))


def solve(rows: int, folder: Path) -> None:
    """One rank's part; leaves its figures in `folder`."""
    torch.set_num_threads(1)
    size = int(os.environ["WORLD_SIZE"])
    world = spawn.join_mesh(Mesh(dp=size), "cpu")
    if size == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    blocks = -(-rows // BLOCK)
    low, high = (min(rows, BLOCK * (blocks * rank // size)) for rank in (world.rank, world.rank + 1))
    x, base, began = DrawnRows(low, high - low), anonymous_rss(), time.process_time()
    with PeakMemory(0.02) as peak:
        found = sinkhorn_potentials(
            x, targets(), tolerance=1e-3, nearest=True, memory_bytes=1 << 29, group=dist.group.WORLD
        )
    told = {
        "cpu": time.process_time() - began - peak.cpu,
        "memory": base + peak.bytes,
        "passes": found.passes,
        "error": found.marginal_error,
        "digests": [hashlib.sha256(found.scores[i : i + BLOCK]).hexdigest() for i in range(0, high - low, BLOCK)],
    }
    (folder / f"{world.rank}.json").write_text(json.dumps(told), encoding="utf-8")
    spawn.destroy_process_group(world)


def measure(rows: int, processes: int) -> dict[str, Any]:
    """A solve on so many processes: CPU-seconds of all, the largest memory of one, and one digest of all scores."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["-m", "benchmarks.scale", "--rows", str(rows), "--rank-of", folder]
        code = spawn.spawn(command, ranks=processes, threads=1)
        if code:
            raise RuntimeError(f"{processes} ranks ended with code {code}")
        told = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(processes)]
    digests = [digest for part in told for digest in part["digests"]]
    run = {
        "cpu": sum(part["cpu"] for part in told),
        "memory": max(part["memory"] for part in told),
        "passes": told[0]["passes"],
        "error": told[0]["error"],
        "digest": hashlib.sha256("".join(digests).encode()).hexdigest(),
    }
    print(f"    {rows:,} rows, {processes} processes: {run}", flush=True)
    return run


def rank_rows(bench: Benchmark, *, rows: int, processes: int, repeats: int) -> None:
    """A small pool on 1, 2 and 4 processes, then `rows` on `processes`."""
    runs: dict[int, list[dict[str, Any]]] = {count: [] for count in COUNTS}
    for repeat in range(repeats):
        for count in COUNTS if repeat % 2 == 0 else COUNTS[::-1]:
            runs[count].append(measure(SMALL, count))
    what = f"{SMALL:,} x {TARGETS} x {DIM}"
    for count in COUNTS[1:]:
        bench.row(
            f"{what}: {count} processes, CPU-seconds of all together",
            "CPU-s",
            ours=[run["cpu"] for run in runs[count]],
            peer=[run["cpu"] for run in runs[1]],
            peer_name="one process",
            maximum=1.1,
        )
    different = len({run["digest"] for some in runs.values() for run in some})
    title = f"{what}: different scores among runs on 1, 2 and 4 processes, to the bit"
    bench.row(title, "digests", ours=different - 1, maximum=0)
    large = measure(rows, processes)
    what = f"{rows:,} x {TARGETS} x {DIM} on {processes} processes, {large['passes']} passes"
    bench.row(f"{what}: memory of a process", "GiB", ours=large["memory"] / GIB, maximum=4.0)
    bench.row(f"{what}: CPU-seconds of all together", "CPU-s", ours=large["cpu"])
    bench.row(f"{what}: marginal error", "L1 error", ours=large["error"], maximum=1e-3)
    small = max(run["memory"] for run in runs[processes]) if processes in runs else None
    bench.row(
        f"memory a row of a process' part, from {SMALL:,} to {rows:,} rows",
        "bytes",
        ours=None if small is None else (large["memory"] - small) / (rows - SMALL) * processes,
        reason=None if small is not None else f"{processes} processes were not run on the smaller pool",
    )


def main() -> None:
    """`python -m benchmarks.scale`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("groups", nargs="*", choices=[[], *_GROUPS], metavar="GROUP", help=", ".join(_GROUPS))
    parser.add_argument("--records", type=int, default=200_000, help="of the group remote")
    parser.add_argument("--documents", type=int, default=1_000_000, help="of the group dedup")
    parser.add_argument("--shards", type=int, default=1000, help="of the group dedup")
    parser.add_argument("--limit", type=float, default=0.25, help="of the group dedup, GiB")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rank-of", type=Path)
    asked = parser.parse_args()
    if asked.rank_of is not None:
        solve(asked.rows, asked.rank_of)
        return
    bench = Benchmark("scale", command=" ".join(["python -m benchmarks.scale", *sys.argv[1:]]))
    groups = {
        "ranks": partial(rank_rows, rows=asked.rows, processes=asked.processes, repeats=asked.repeats),
        "remote": partial(remote_rows, records=asked.records),
        "dedup": partial(dedup_rows, documents=asked.documents, shards=asked.shards, memory_gib=asked.limit),
    }
    rows_by_group(bench, groups, asked.groups)
    bench.finish()


if __name__ == "__main__":
    main()
