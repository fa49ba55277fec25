"""Embedding throughput: our hashing TF-IDF + SVD beside scikit-learn's own pipeline, static vectors, shards and views.

    python -m benchmarks.features            # about a minute of CPU

Texts are drawn from a Zipf vocabulary, 60 words each, or real ones: the first rows of a JSONL file (`--texts FILE`).
Rates are documents per CPU-second on one thread.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._harness import Benchmark, PeakMemory, cpu_seconds, limit_threads

DOCUMENTS = 100_000
PEER_DOCUMENTS = 10_000
WORDS = 60


def texts(count: int, seed: int = 0) -> list[str]:
    """Texts of 60 words, from a vocabulary of 50,000 by Zipf's law."""
    r = np.random.default_rng(seed)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    vocabulary = np.array(["".join(letters[r.integers(0, 26, size)]) for size in r.integers(2, 10, 50_000)])
    share = np.cumsum(1 / np.arange(1, 50_001))
    numbers = np.searchsorted(share, r.random((count, WORDS)) * share[-1])
    return [" ".join(vocabulary[row]) for row in numbers]


def given(path: str, count: int) -> list[str]:
    """The first texts of a file, as any reader of ours sees them."""
    from itertools import islice

    from flatshift.finetune.data.rows import read_rows

    return [row.values["text"] for row in islice(read_rows([path]), count)]


def peer(documents: list[str], dim: int) -> Any:
    """scikit-learn's pipeline as one would write it: fitted on as many texts as ours, then all transformed."""
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import HashingVectorizer, TfidfTransformer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import Normalizer

    hasher = HashingVectorizer(n_features=2**18, alternate_sign=False, norm=None, token_pattern=r"(?u)\b\w+\b")
    svd = TruncatedSVD(dim, n_iter=4, random_state=0)
    pipeline = make_pipeline(hasher, TfidfTransformer(sublinear_tf=True), svd, Normalizer())
    pipeline.fit(documents[:20_000])
    return pipeline.transform(documents)


def ours(documents: list[str], dim: int) -> np.ndarray:
    """Fit on a sample, transform all."""
    from flatshift.selection import TfIdfEmbedder

    return TfIdfEmbedder(dim=dim).fit(documents).transform(documents)


def static_directory(root: Path, dim: int = 256) -> Path:
    """A model2vec directory with random vectors for 30,000 words, looked up by a word tokenizer."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    root.mkdir()
    words = sorted({word for text in texts(5_000) for word in text.split()})[:30_000]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(["[UNK]", *words])}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(root / "tokenizer.json"))
    save_file({"embeddings": torch.randn(len(words) + 1, dim)}, root / "model.safetensors")
    return root


def view_rows(bench: Benchmark, folder: Path, documents: list[str]) -> None:
    """What a pool on disk costs: CPU and memory to read it, and to go through its texts."""
    from flatshift.finetune.data.config import Columns
    from flatshift.finetune.data.rows import read_rows
    from flatshift.finetune.data.view import spill_rows

    file = folder / "pool.jsonl"
    lines = (json.dumps({"id": f"r{i}", "text": text, "domain": "d"}) + "\n" for i, text in enumerate(documents))
    file.write_text("".join(lines), encoding="utf-8")
    kept: list[Any] = []
    with PeakMemory() as peak:
        seconds = cpu_seconds(
            lambda: kept.append(spill_rows(read_rows([str(file)]), folder / "spill", columns=Columns()))
        )
    bench.row("rows read into a view, per CPU-second", "rows/CPU-s", ours=len(documents) / seconds)
    bench.row(f"memory of reading {len(documents):,} rows", "MiB", ours=peak.bytes / 2**20, maximum=100)
    seconds = cpu_seconds(lambda: sum(len(text) for text in kept[0].texts))
    bench.row("texts of a view, per CPU-second", "rows/CPU-s", ours=len(documents) / seconds)


def main() -> None:
    limit_threads(1)
    bench = Benchmark("features", packages=("numpy", "scipy", "scikit-learn", "tokenizers", "pyarrow"))
    if "--texts" in sys.argv:
        documents = given(sys.argv[sys.argv.index("--texts") + 1], DOCUMENTS)
    else:
        documents = texts(DOCUMENTS)
    few = documents[:PEER_DOCUMENTS]
    ours(few[:2000], 8)
    peer(few[:2000], 8)
    bench.compare(
        f"TF-IDF + SVD 128, {len(few):,} documents, fit included",
        "CPU-s",
        lambda: ours(few, 128),
        lambda: peer(few, 128),
        "scikit-learn pipeline",
        rounds=1,
        maximum=0.5,
    )
    rate = len(documents) / cpu_seconds(lambda: ours(documents, 128))
    bench.row(f"TF-IDF + SVD 128, {len(documents):,} documents, fit included", "docs/CPU-s", ours=rate, minimum=10_000)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        from flatshift.selection import FeatureCache, StaticEmbedder

        static = StaticEmbedder(static_directory(folder / "static"))
        rate = len(few) / cpu_seconds(lambda: static.transform(few))
        bench.row("static vectors 256, word tokenizer", "docs/CPU-s", ours=rate)
        vectors = np.random.default_rng(0).normal(size=(len(documents), 128)).astype(np.float32)
        place = iter(range(0, len(documents), 8192))
        cache = FeatureCache(folder / "cache")

        def write() -> None:
            cache.features(
                documents, lambda some: vectors[(low := next(place)) : low + len(some)], key="k", dtype="float16"
            )

        bench.row("shards hashed and written", "docs/CPU-s", ours=len(documents) / cpu_seconds(write))
        rate = len(documents) / cpu_seconds(
            lambda: cache.features(documents, lambda some: vectors[:0], key="k", dtype="float16")
        )
        bench.row("shards hashed and verified", "docs/CPU-s", ours=rate)
        view_rows(bench, folder, documents)
    bench.finish()


if __name__ == "__main__":
    main()
