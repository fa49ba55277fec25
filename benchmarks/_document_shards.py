"""Cleaning of a pool whose documents are drawn shard by shard whenever they are read, and kept nowhere.

A document is three halves of texts of the shipped pool, about 51 words; a fifth of them copy an earlier document of
the same shard, or (half of these) one of the shard before, with 0 to 6 words replaced. Steps: length, exact duplicates,
near-duplicates at a Jaccard similarity of 0.8 of character 5-grams. One process, one thread. Memory is the peak of the
anonymous resident set above its level before, CPU-seconds are those of the cleaning, what drawing costs taken off.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from benchmarks._harness import Benchmark, PeakMemory, in_child
from flatshift.finetune.data.rows import read_rows
from flatshift.selection.hygiene import Hygiene, LengthFilter, NearDuplicates, clean_pool

MIB = 2**20


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
        found = clean_pool(texts, settings)
    cpu = time.process_time() - began - peak.cpu - texts.cpu
    counts = found.counts()
    return {
        "cpu": cpu,
        "memory": peak.bytes,
        "exact": counts["exact-duplicate"],
        "near": counts["near-duplicate"],
        "left_out": found.diagnostics["near"]["left_out"],
    }


def dedup_rows(bench: Benchmark, *, documents: int, shards: int, memory_gib: float) -> None:
    """`documents` from `shards`, beside an eighth of them: memory under the limit and its growth a document."""
    runs = {}
    for count in (documents // 8, documents):
        runs[count] = in_child(
            "benchmarks._document_shards:cleaned",
            wall_cap_s=5 * 3600,
            shards=shards,
            size=count // shards,
            memory_gib=memory_gib,
        )
        print(f"    {count:,} documents: {runs[count]}", flush=True)
    small, large = runs.values()
    what = f"{documents:,} documents of {shards:,} shards cleaned and deduplicated"
    title = f"{what}: memory under a limit of {memory_gib * 1024:g} MiB"
    bench.row(title, "MiB", ours=large["memory"] / MIB, maximum=memory_gib * 1024)
    title = f"{what}: memory a document, from {documents // 8:,} to {documents:,}"
    bench.row(title, "bytes", ours=(large["memory"] - small["memory"]) / (documents - documents // 8), maximum=10)
    bench.row(f"{what}: documents a CPU-second", "documents/CPU-s", ours=documents / large["cpu"])
    bench.row(f"{what}: dropped as near-duplicates", "documents", ours=large["near"])
    bench.row(f"{what}: pairs of large crowds that were not compared", "pairs", ours=large["left_out"])
