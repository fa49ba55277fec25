"""Selectors on n-grams of the backbone's tokens, beside DSIR: CPU-seconds from JSONL files to scores.

    python -m benchmarks.moore_lewis [--data DIR] [--passages 60000]

One process, one thread. DIR holds `pool/pool-0.text.jsonl.xz`; without it the texts are the shipped pool's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from pathlib import Path

import numpy as np

from benchmarks._harness import Benchmark, interleave, limit_threads
from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.select.embedding import backbone_tokenizer
from flatshift.finetune.data.rows import read_rows
from flatshift.selection import ClassifierSelector, CynicalSelector, DSIRSelector, MooreLewisSelector, Pool, TokenRows
from flatshift.selection.methods.base import Selector
from flatshift.selection.methods.ngrams import ROW_BYTES, TrigramCounts

_TARGET = 400


def passages(data: Path | None, count: int) -> tuple[list[str], list[str]]:
    """`count` texts of the pool in an order drawn by seed (all there are, where they are fewer), and 400 others."""
    name = "sample:pool" if data is None else str(data / "pool" / "pool-0.text.jsonl.xz")
    rows = itertools.islice(read_rows((name,)), 5 * (count + _TARGET))
    texts = [str(row.values["text"]) for row in rows]
    order = np.random.default_rng(0).permutation(len(texts)).tolist()
    return [texts[i] for i in order[_TARGET : _TARGET + count]], [texts[i] for i in order[:_TARGET]]


def read(path: Path) -> list[str]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def scored(folder: Path, selector: Selector, tokens: bool = True) -> Selector:
    """Files to scores; the pool's tokens lie on disk."""
    pool, target = (read(folder / f"{name}.jsonl") for name in ("pool", "target"))
    ids = [str(i) for i in range(len(pool))]
    if not tokens:
        return selector.fit(Pool(ids=ids, texts=pool), Pool(texts=target))
    tokenize, size = backbone_tokenizer(Recipe())
    rows = TokenRows.spilled(pool, tokenize, size, folder / "tokens")
    return selector.fit(Pool(ids=ids, tokens=rows), Pool(tokens=TokenRows.of(tokenize(target), size)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--passages", type=int, default=60_000)
    options = parser.parse_args()
    limit_threads(1)
    bench = Benchmark("moore_lewis", packages=("numpy", "tokenizers", "scikit-learn"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pool, target = passages(options.data, options.passages)
        for part, texts in (("pool", pool), ("target", target)):
            lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
            (folder / f"{part}.jsonl").write_text("".join(lines), encoding="utf-8")
        count = len(pool)
        backbone_tokenizer(Recipe())[0](pool[:10])  # imports are not timed
        selectors: dict[str, Selector] = {
            "cynical": CynicalSelector(budget=count // 50, repeats=8),
            "moore-lewis": MooreLewisSelector(),
            "classifier": ClassifierSelector(),
        }
        for what, selector in selectors.items():
            ours, peers = interleave(
                lambda selector=selector: scored(folder, selector),
                lambda: scored(folder, DSIRSelector(), tokens=False),
                rounds=1,
            )
            bench.row(
                f"{what}: files to scores, {count:,} passages", "CPU-s", ours=ours, peer=peers, peer_name="our dsir"
            )
            bench.row(
                f"{what}: passages a CPU-minute, tokenised",
                "passages/CPU-minute",
                ours=[60.0 * count / seconds for seconds in ours],
                **{"minimum": 4e5} if what != "classifier" else {},
            )
        tokenize, size = backbone_tokenizer(Recipe())
        rows = TokenRows.of(tokenize(pool), size)
        keys, counts = TrigramCounts(size).add_all(rows).table()
        bench.row(
            f"distinct trigrams a token, {len(rows.flat):,} tokens", "trigrams/token", ours=len(keys) / len(rows.flat)
        )
        title = "bytes of a distinct trigram in its table; while it is made, the cap counts with more"
        bench.row(title, "bytes", ours=float(keys.itemsize + counts.itemsize), maximum=float(ROW_BYTES))
    bench.finish()


if __name__ == "__main__":
    main()
