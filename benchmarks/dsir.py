"""DSIR beside PyPI's data-selection: the same log weights, and CPU-seconds from JSONL files to log weights.

    python -m benchmarks.dsir [--documents 20000]          needs the extra `bench` (data-selection)

Both read the same JSONL files and use one process. Texts are the shipped pool's, in an order drawn by seed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from pathlib import Path

import numpy as np

from benchmarks._harness import Benchmark, interleave, limit_threads
from flatshift.finetune.data.rows import read_rows
from flatshift.selection import DSIRSelector, Pool

_PEER = "data-selection"
_LIKE_PEER = {"hashing": "sha256", "smoothing": 0.0, "floor": 1e-8}


def documents(count: int) -> tuple[list[str], list[str]]:
    """`count` texts of the shipped pool (glued in pairs where there are not as many), and 500 others for a target."""
    texts = [row.values["text"] for row in read_rows(("sample:pool",))]
    order = np.random.default_rng(0).permutation(len(texts))
    target, rest = ([texts[i] for i in part] for part in (order[:500], order[500:]))
    glued = (f"{rest[i % len(rest)]} {rest[7 * i % len(rest)]}" for i in range(count - len(rest)))
    return [*rest[:count], *glued], target


def read(path: Path) -> list[str]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def peer_log_weights(folder: Path) -> np.ndarray:
    from data_selection import HashedNgramDSIR

    # Its progress bars go to stderr and would be timed on a terminal.
    with contextlib.redirect_stderr(io.StringIO()):
        peer = HashedNgramDSIR(
            [str(folder / "pool.jsonl")], [str(folder / "target.jsonl")], cache_dir=str(folder / "cache"), num_proc=1
        )
        peer.fit_importance_estimator(num_tokens_to_fit="all")
        peer.compute_importance_weights()
    return np.asarray(np.load(folder / "cache" / "log_importance_weights" / "0.npy"))


def our_log_weights(folder: Path, **settings: object) -> np.ndarray:
    pool, target = (Pool(texts=read(folder / f"{name}.jsonl")) for name in ("pool", "target"))
    return DSIRSelector(**settings).fit(pool, target).log_weights_  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=20_000)
    count = parser.parse_args().documents
    limit_threads(1)
    bench = Benchmark("dsir", packages=("numpy", "data-selection", "nltk"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pool, target = documents(count)
        for part, texts in (("pool", pool), ("target", target)):
            lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
            (folder / f"{part}.jsonl").write_text("".join(lines), encoding="utf-8")
        theirs, ours = peer_log_weights(folder), our_log_weights(folder, **_LIKE_PEER)
        title = f"log weights of {count:,} documents, its hashing and smoothing"
        bench.row(title, "largest absolute difference", ours=float(np.abs(theirs - ours).max()), maximum=1e-8)
        cut = count // 20
        overlap = len(set(np.argsort(-theirs)[:cut]) & set(np.argsort(-ours)[:cut])) / cut
        bench.row("selected 5 %, the same", "share", ours=overlap, minimum=1.0)
        for what, settings in (("its hashing and smoothing", _LIKE_PEER), ("the default fast hashing", {})):
            mine, peers = interleave(
                lambda settings=settings: our_log_weights(folder, **settings),
                lambda: peer_log_weights(folder),
                rounds=1,
            )
            title = f"files to log weights, {count:,} documents, {what}"
            bench.row(title, "CPU-s", ours=mine, peer=peers, peer_name=_PEER, maximum=1.0)
            bench.row(f"documents a CPU-second, {what}", "documents/CPU-s", ours=[count / second for second in mine])
    bench.finish()


if __name__ == "__main__":
    main()
