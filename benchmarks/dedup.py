"""Near-duplicate removal beside datasketch, and the other steps of hygiene: documents a CPU-second.

    python -m benchmarks.dedup [--documents 20000]          needs the extra `bench` (datasketch)

Documents of about 68 words: two texts of the shipped pool glued together; a fifth of them are copies of others in
which 0 to 6 words were replaced. Both find groups at a Jaccard similarity of 0.8 of character 5-grams with 128 hash
functions, and both compare proposed pairs exactly. One process, one thread; texts in memory, reading is not charged.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from benchmarks._harness import Benchmark, PeakMemory, cpu_seconds, in_child, interleave, limit_threads
from flatshift.finetune.data.rows import read_rows
from flatshift.selection.hygiene import (
    Decontaminate,
    Hygiene,
    Language,
    LengthFilter,
    NearDuplicates,
    ReferenceTexts,
    Repetition,
    clean_pool,
)
from flatshift.selection.hygiene.duplicates import normalise_text

THRESHOLD = 0.8
_PEER = "datasketch"


def documents(count: int, seed: int = 0) -> tuple[list[str], list[tuple[int, int]]]:
    """Texts in random order, and the places of each copy and its original (an original has one copy at most)."""
    texts = [row.values["text"] for row in read_rows(("sample:pool",))]
    draw = np.random.default_rng(seed)
    fresh = count - count // 5
    firsts, seconds = draw.permutation(len(texts)), draw.permutation(len(texts))
    laps = np.arange(fresh) // len(texts)
    results = [
        f"{texts[firsts[i % len(texts)]]} {texts[seconds[(i + lap) % len(texts)]]}"
        for i, lap in enumerate(laps.tolist())
    ]
    originals = draw.permutation(fresh)[: count // 5]
    for i in originals.tolist():
        words = results[i].split()
        for changed in draw.integers(0, len(words), draw.integers(0, 7)).tolist():
            words[changed] = texts[draw.integers(len(texts))].split()[0]
        results.append(" ".join(words))
    place = draw.permutation(count)
    mixed = [""] * count
    for text, where in zip(results, place.tolist(), strict=True):
        mixed[where] = text
    return mixed, list(zip(place[fresh:].tolist(), place[originals].tolist(), strict=True))


def shingles(text: str) -> set[str]:
    text = normalise_text(text)
    return {text[i : i + 5] for i in range(max(len(text) - 4, 1))}


def jaccard(one: set[str], other: set[str]) -> float:
    return len(one & other) / len(one | other)


def our_groups(texts: Iterable[str]) -> np.ndarray:
    """The first row of each row's group."""
    match = clean_pool(texts, Hygiene(near=NearDuplicates(threshold=THRESHOLD))).match
    return np.where(match < 0, np.arange(len(match)), match)


def peer_groups(texts: list[str]) -> np.ndarray:
    """The same with datasketch: its MinHash and LSH with our bands, exact comparison of what it proposes."""
    from datasketch import MinHash, MinHashLSH

    index = MinHashLSH(num_perm=128, params=(18, 7))
    label = np.arange(len(texts))
    sets: list[set[str]] = []
    encoded = ([shingle.encode() for shingle in result] for result in _kept(map(shingles, texts), sets))
    for row, signature in enumerate(MinHash.generator(encoded, num_perm=128)):
        for other in index.query(signature):
            if label[other] != label[row] and jaccard(sets[row], sets[other]) >= THRESHOLD:
                low, high = sorted((label[row], label[other]))
                label[: row + 1][label[: row + 1] == high] = low
        index.insert(row, signature)
    return label


def _kept(results: Iterable[set[str]], sets: list[set[str]]) -> Iterator[set[str]]:
    for some in results:
        sets.append(some)
        yield some


class _Lines:
    """The texts of a JSONL file, read anew each time."""

    def __init__(self, path: Path):
        self.path = path

    def __iter__(self) -> Iterator[str]:
        with self.path.open(encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)


def peak_memory(path: str) -> int:
    """Anonymous bytes that near-duplicate removal takes at most, beside the texts, which stay in the file."""
    our_groups(list(islice(_Lines(Path(path)), 500)))
    with PeakMemory() as memory:
        our_groups(_Lines(Path(path)))
    return memory.bytes


def _peak_memory_of(count: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "texts.jsonl"
        path.write_text("".join(json.dumps(text) + "\n" for text in documents(count)[0]), encoding="utf-8")
        return int(in_child("benchmarks.dedup:peak_memory", path=str(path)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=20_000)
    count = parser.parse_args().documents
    limit_threads(1)
    texts, copies = documents(count)
    bench = Benchmark("dedup", packages=("numpy", "scipy", "datasketch"))
    groups: dict[str, np.ndarray] = {}

    def run(name: str, find: Callable[[list[str]], np.ndarray]) -> Callable[[], None]:
        return lambda: groups.__setitem__(name, find(texts))

    our_groups(texts[:100])
    mine, theirs = interleave(run("ours", our_groups), run("peer", peer_groups), rounds=1)
    bench.row(f"near-duplicates in {count:,} documents", "CPU-s", ours=mine, peer=theirs, peer_name=_PEER, maximum=1.0)
    bench.row("near-duplicate removal", "documents/CPU-s", ours=[count / seconds for seconds in mine], minimum=5000)
    similar = [pair for pair in copies if jaccard(*(shingles(texts[i]) for i in pair)) >= THRESHOLD]
    results = {name: float(np.mean([label[i] == label[j] for i, j in similar])) for name, label in groups.items()}
    title = f"of {len(similar):,} planted pairs with a Jaccard similarity of at least {THRESHOLD}, found"
    bench.row(title, "share", ours=results["ours"], minimum=0.95)
    bench.row(f"the same, {_PEER} with the same bands", "share", ours=results["peer"])
    sizes = (4 * count, 12 * count)
    peaks = [_peak_memory_of(size) for size in sizes]
    for size, peak in zip(sizes, peaks, strict=True):
        bench.row(f"near-duplicates in {size:,} documents read from a file, peak memory", "bytes", ours=peak)
    slope = (peaks[1] - peaks[0]) / (sizes[1] - sizes[0])
    bench.row("the same, growth", "bytes a document", ours=slope, maximum=150)
    reference = [ReferenceTexts("eval", texts[:1000])]
    for what, settings in (
        ("exact duplicates", Hygiene(exact=True)),
        ("13-gram decontamination against 1,000 texts", Hygiene(decontaminate=Decontaminate())),
        ("length", Hygiene(length=LengthFilter(min_words=5))),
        ("language", Hygiene(language=Language())),
        ("repetition", Hygiene(repetition=Repetition())),
    ):
        seconds = [cpu_seconds(lambda settings=settings: clean_pool(texts[1000:], settings, references=reference))]
        bench.row(f"{what}, alone", "documents/CPU-s", ours=[(count - 1000) / s for s in seconds])
    bench.finish()


if __name__ == "__main__":
    main()
