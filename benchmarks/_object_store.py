"""Reading records from an object store beside reading the same files from disk, in CPU time of the reader.

The store is a process of its own (`tests.support.object_store`: moto's S3 server on localhost), whose CPU time does not
count: what the reader spends is what its client adds, requests, signatures, checks and copies. Both sides read every
record with `read_rows`; client and connection are there before the first measured pass, as are pyarrow and the files'
pages.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks._harness import Benchmark, interleave
from flatshift.finetune.data.rows import read_rows

SHARDS = 4
WORDS = 60


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
            sides = [_reader(f"s3://scale/*{form}", records), _reader(f"{folder}/*{form}", records)]
            for read in sides:
                read()
            ours, peer = interleave(*sides, rounds=rounds)
            title = f"{whats[form]} ({sum(file.stat().st_size for file in files) / 1e6:.1f} MB)"
            bench.row(title, "CPU-s", ours=ours, peer=peer, peer_name="the same files on disk", maximum=1.3)


def _reader(pattern: str, records: int) -> Callable[[], None]:
    def read() -> None:
        count = sum(1 for _ in read_rows([pattern]))
        assert count == records, f"{pattern}: {count} records"

    return read


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
