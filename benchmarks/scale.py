"""The transport solver over several processes, inputs in an object store, and cleaning under a limit of memory.

Group `ranks`: the same bits on 1, 2 and 4 processes, their CPU-seconds, memory a process. The pool is drawn block by
block from its seed whenever it is read and kept nowhere: N x 32 float16 rows around 200 centres, M = 64 targets,
epsilon 0.05, to a marginal error of 1e-3, main targets found. Each process has one thread and its part of the blocks.
CPU-seconds are those of the solve in all processes, the drawing of rows included, which every pass repeats. Memory is
the peak of a process' anonymous resident set, the interpreter and torch included. Scores are compared by the digests of
their blocks. Ranks are started as `flatshift select --processes` starts them.

Group `remote`: reading records from an S3 server on localhost beside the same files on disk. The
store is a process of its own (`tests.support.object_store`: moto's server), whose CPU time does not count: what the
reader spends is what its client adds. Client and connection are there before the first measured pass, as are pyarrow
and the files' pages.

Group `dedup`: a pool from 1,000 shards cleaned and deduplicated under a limit of memory. Documents are
drawn shard by shard whenever they are read, and kept nowhere: three halves of texts of the shipped pool, about 51
words; a fifth of them copy an earlier document of the same shard, or (half of these) one of the shard before, with 0 to
6 words replaced. Steps: length, exact duplicates, near-duplicates at a Jaccard similarity of 0.8 of character 5-grams.
Memory is the peak of the anonymous resident set above its level before, CPU-seconds those of the cleaning alone.

Run: python -m benchmarks.scale                                    eight million rows on 1, 2 and 4 processes; ten
                                                                   million on two
     python -m benchmarks.scale --rows 100000000 --processes 2     the second part with so many rows and processes
     python -m benchmarks.scale remote                             only this group; the other rows stay
     python -m benchmarks.scale dedup --documents 10000000         so many documents; else a million
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib.util
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist

from benchmarks._harness import Benchmark, PeakMemory, anonymous_rss, in_child, rows_by_group
from flatshift.finetune.config import Mesh
from flatshift.finetune.data.rows import read_rows
from flatshift.finetune.launch import spawn
from flatshift.selection import sinkhorn_potentials
from flatshift.selection.features.matrix import _LazyRows
from flatshift.selection.hygiene import Hygiene, LengthFilter, NearDuplicates, clean_pool
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
        result = sinkhorn_potentials(
            x, targets(), tolerance=1e-3, nearest=True, memory_bytes=1 << 29, group=dist.group.WORLD
        )
    results = {
        "cpu": time.process_time() - began - peak.cpu,
        "memory": base + peak.bytes,
        "passes": result.passes,
        "error": result.marginal_error,
        "digests": [hashlib.sha256(result.scores[i : i + BLOCK]).hexdigest() for i in range(0, high - low, BLOCK)],
    }
    (folder / f"{world.rank}.json").write_text(json.dumps(results), encoding="utf-8")
    spawn.destroy_process_group(world)


def measure(rows: int, processes: int) -> dict[str, Any]:
    """A solve on so many processes: CPU-seconds of all, the largest memory of one, and one digest of all scores."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["-m", "benchmarks.scale", "--rows", str(rows), "--rank-of", folder]
        code = spawn.spawn(command, ranks=processes, threads=1)
        if code:
            raise RuntimeError(f"{processes} ranks ended with code {code}")
        results = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(processes)]
    digests = [digest for part in results for digest in part["digests"]]
    run = {
        "cpu": sum(part["cpu"] for part in results),
        "memory": max(part["memory"] for part in results),
        "passes": results[0]["passes"],
        "error": results[0]["error"],
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
        ours, one = ([run["cpu"] for run in runs[number]] for number in (count, 1))
        title = f"{what}: {count} processes, CPU-seconds of all together"
        bench.row(title, "CPU-s", ours=ours, peer=one, peer_name="one process", maximum=1.1)
    different = len({run["digest"] for some in runs.values() for run in some})
    title = f"{what}: different scores among runs on 1, 2 and 4 processes, to the bit"
    bench.row(title, "digests", ours=different - 1, maximum=0)
    large = measure(rows, processes)
    what = f"{rows:,} x {TARGETS} x {DIM} on {processes} processes, {large['passes']} passes"
    bench.row(f"{what}: memory of a process", "GiB", ours=large["memory"] / GIB, maximum=4.0)
    bench.row(f"{what}: CPU-seconds of all together", "CPU-s", ours=large["cpu"])
    bench.row(f"{what}: marginal error", "L1 error", ours=large["error"], maximum=1e-3)
    title = f"memory a row of a process' part, from {SMALL:,} to {rows:,} rows"
    if processes in runs:
        small = max(run["memory"] for run in runs[processes])
        bench.row(title, "bytes", ours=(large["memory"] - small) / (rows - SMALL) * processes)
    else:
        bench.row(title, "bytes", reason=f"{processes} processes were not run on the smaller pool")


SHARDS, WORDS = 4, 60


def remote_rows(bench: Benchmark, *, records: int, rounds: int = 3) -> None:
    """One row a format: CPU-seconds of reading `records` records from the store over those from disk."""
    missing = [name for name in ("s3fs", "moto") if importlib.util.find_spec(name) is None]
    forms = {".jsonl.gz": _jsonl_gz, ".jsonl": _jsonl, ".parquet": _parquet}
    whats = {form: f"{records:,} records of {SHARDS} {form} shards, read by range from an S3 server" for form in forms}
    if missing:
        for what in whats.values():
            bench.row(what, "CPU-s", peer_name="the same files on disk", reason=f"needs {' and '.join(missing)}")
        return
    from tests.support.object_store import object_store

    with tempfile.TemporaryDirectory() as folder, object_store() as store:
        os.environ.update(store.environment)
        client = store.client()
        client.mkdir("scale")
        for form, packed in forms.items():
            files = [Path(folder) / f"{shard}{form}" for shard in range(SHARDS)]
            for shard, file in enumerate(files):
                file.write_bytes(packed(_texts(shard, records // SHARDS)))
                client.pipe_file(f"scale/{file.name}", file.read_bytes())
            store_files, disk = (partial(read_all, f"{at}/*{form}", records) for at in ("s3://scale", folder))
            store_files(), disk()
            title = f"{whats[form]} ({sum(file.stat().st_size for file in files) / 1e6:.1f} MB)"
            bench.compare(title, "CPU-s", store_files, disk, "the same files on disk", rounds=rounds, maximum=1.3)


def read_all(pattern: str, records: int) -> None:
    count = sum(1 for _ in read_rows([pattern]))
    assert count == records, f"{pattern}: {count} records"


def _texts(shard: int, count: int) -> list[str]:
    words = [f"word{number:x}" for number in range(4000)]
    r = np.random.default_rng(shard)
    return [" ".join(words[i] for i in row) for row in r.integers(0, len(words), (count, WORDS)).tolist()]


def _jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def _jsonl_gz(texts: list[str]) -> bytes:
    return gzip.compress(_jsonl(texts), 6)


def _parquet(texts: list[str]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": texts}), sink, row_group_size=10_000)
    return bytes(sink.getvalue())


class DrawnDocuments:
    """The texts of all shards, drawn anew each time they are read; a shard depends on its number and the one before."""

    def __init__(self, shards: int, size: int):
        self.shards, self.size = shards, size
        words = [row.values["text"].split() for row in read_rows(("sample:pool",))]
        self._halves = [
            " ".join(half) for some in words for half in (some[: len(some) // 2], some[len(some) // 2 :]) if half
        ]
        self._words = sorted({word for some in words for word in some})
        self.cpu = 0.0

    def __iter__(self) -> Iterator[str]:
        before: list[str] = []
        for shard in range(self.shards):
            began = time.thread_time()
            texts = self._drawn(shard, before)
            self.cpu += time.thread_time() - began
            yield from texts
            before = texts

    def _drawn(self, shard: int, before: list[str]) -> list[str]:
        r = np.random.default_rng([7, shard])
        texts: list[str] = []
        halves = r.integers(0, len(self._halves), (self.size, 3)).tolist()
        copied, back = r.random(self.size).tolist(), r.random(self.size).tolist()
        changed = r.integers(0, 7, self.size).tolist()
        for place, three in enumerate(halves):
            source = texts if copied[place] < 0.1 else before if copied[place] < 0.2 else []
            if not source:
                texts.append(" ".join([self._halves[k] for k in three]))
                continue
            words = source[int(back[place] * len(source))].split()
            for k in r.integers(0, len(words), changed[place]).tolist():
                words[k] = self._words[k * 37 % len(self._words)]
            texts.append(" ".join(words))
        return texts


def cleaned(shards: int, size: int, memory_gib: float) -> dict[str, float]:
    """One pool cleaned: its figures."""
    settings = Hygiene(length=LengthFilter(min_words=5), exact=True, near=NearDuplicates(), memory_gib=memory_gib)
    clean_pool(DrawnDocuments(1, 500), settings)
    texts = DrawnDocuments(shards, size)
    began = time.process_time()
    with PeakMemory(0.02) as peak:
        result = clean_pool(texts, settings)
    cpu = time.process_time() - began - peak.cpu - texts.cpu
    counts = result.counts()
    return {
        "cpu": cpu,
        "memory": peak.bytes,
        "exact": counts["exact-duplicate"],
        "near": counts["near-duplicate"],
        "left_out": result.diagnostics["near"]["left_out"],
    }


def dedup_rows(bench: Benchmark, *, documents: int, shards: int, memory_gib: float) -> None:
    """`documents` from `shards`, beside an eighth of them: memory under the limit and its growth a document."""
    runs = {}
    for count in (documents // 8, documents):
        runs[count] = in_child(
            "benchmarks.scale:cleaned", wall_cap_s=5 * 3600, shards=shards, size=count // shards, memory_gib=memory_gib
        )
        print(f"    {count:,} documents: {runs[count]}", flush=True)
    small, large = runs.values()
    what = f"{documents:,} documents of {shards:,} shards cleaned and deduplicated"
    title = f"{what}: memory under a limit of {memory_gib * 1024:g} MiB"
    bench.row(title, "MiB", ours=large["memory"] / 2**20, maximum=memory_gib * 1024)
    title = f"{what}: memory a document, from {documents // 8:,} to {documents:,}"
    bench.row(title, "bytes", ours=(large["memory"] - small["memory"]) / (documents - documents // 8), maximum=10)
    bench.row(f"{what}: documents a CPU-second", "documents/CPU-s", ours=documents / large["cpu"])
    bench.row(f"{what}: dropped as near-duplicates", "documents", ours=large["near"])
    bench.row(f"{what}: pairs of large crowds that were not compared", "pairs", ours=large["left_out"])


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
