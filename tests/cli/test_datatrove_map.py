"""Features made by datatrove's executor: a map that breaks off, goes on where it stopped, and is selected from; and its
list of removed documents, followed as `drops`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from flatshift.cli import run
from flatshift.selection.features import ShardWriter, TfIdfEmbedder, load_or_fit, write_manifest
from flatshift.selection.features.tfidf import HashedNgrams

pytest.importorskip("datatrove")

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.filters import LambdaFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
TEXTS = [f"row{i} " + " ".join(WORDS[(i + k * (i % 3)) % 8] for k in range(8)) for i in range(60)]
FILES = 3


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    folder = tmp_path / "pool"
    folder.mkdir()
    for file in range(FILES):
        lines = [json.dumps({"text": TEXTS[i], "id": f"r{i}"}) + "\n" for i in range(20 * file, 20 * file + 20)]
        (folder / f"{file}.jsonl").write_text("".join(lines), encoding="utf-8")
    (tmp_path / "target.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:4]))
    return folder


class Interrupted:
    """An embedder whose machine is taken away once, in the task that reads this text."""

    def __init__(self, embed, text: str, mark: Path):
        self.embed, self.text, self.mark = embed, text, mark

    def __call__(self, texts):
        if self.text in texts and not self.mark.exists():
            self.mark.touch()
            raise KeyboardInterrupt
        return self.embed(texts)


def executor(pool: Path, logs: Path, *steps) -> LocalPipelineExecutor:
    return LocalPipelineExecutor([JsonlReader(str(pool)), *steps], tasks=FILES, workers=1, logging_dir=str(logs))


def select(pool: Path, out: Path, *more: str) -> int:
    target = str(pool.parent / "target.jsonl")
    words = [
        "select",
        "--pool",
        str(pool / "*.jsonl"),
        "--data.holdout",
        "0",
        "--target",
        target,
        "--budget",
        "5",
        "--method",
        "knn",
    ]
    return run([*words, "--out", str(out), *more])


def test_an_interrupted_map_goes_on_and_is_selected_from(pool: Path, tmp_path: Path) -> None:
    tfidf = TfIdfEmbedder(dim=6)
    load_or_fit(tmp_path / "tfidf.npz", tfidf, lambda: tfidf.fit(TEXTS))
    ngrams = HashedNgrams(32)
    np.save(tmp_path / "target.npy", tfidf.transform(TEXTS[:4]))
    breaks = Interrupted(tfidf.transform, TEXTS[25], tmp_path / "taken")
    steps = ShardWriter(tmp_path / "features", breaks), ShardWriter(tmp_path / "ngrams", ngrams)
    with pytest.raises(KeyboardInterrupt):
        executor(pool, tmp_path / "logs", *steps).run()
    assert [file.name for file in sorted((tmp_path / "logs" / "completions").iterdir())] == ["00000"]
    first = (tmp_path / "features" / "part-00000.npy").stat()
    assert not (tmp_path / "features" / "part-00001.npy").exists()
    executor(pool, tmp_path / "logs", *steps).run()
    assert (tmp_path / "features" / "part-00000.npy").stat().st_mtime_ns == first.st_mtime_ns, "done once"
    for name in ("features", "ngrams"):
        write_manifest(tmp_path / name)
    own = ["--pool-features", str(tmp_path / "features"), "--target-features", str(tmp_path / "target.npy")]
    assert select(pool, tmp_path / "out", *own) == 0
    np.save(tmp_path / "whole.npy", tfidf.transform(TEXTS))
    assert select(pool, tmp_path / "whole", "--pool-features", str(tmp_path / "whole.npy"), *own[2:]) == 0
    tables = [pq.read_table(tmp_path / out / "scores.parquet") for out in ("out", "whole")]
    assert tables[0].equals(tables[1])
    np.save(tmp_path / "target.npy", ngrams(TEXTS[:4]))
    own[1] = str(tmp_path / "ngrams")
    assert select(pool, tmp_path / "by-ngrams", *own) == 0


def test_tasks_that_read_several_files_are_refused(pool: Path, tmp_path: Path) -> None:
    step = ShardWriter(tmp_path / "features", HashedNgrams(8))
    map_ = LocalPipelineExecutor([JsonlReader(str(pool)), step], tasks=2, workers=1, logging_dir=str(tmp_path / "logs"))
    with pytest.raises(ValueError, match=r"task 0 of 2 reads .*0.jsonl and .*2.jsonl; give the executor as many tasks"):
        map_.run()


def test_what_datatrove_removed_is_dropped(pool: Path, tmp_path: Path) -> None:
    removed = JsonlWriter(str(tmp_path / "removed"))
    keeps = LambdaFilter(lambda document: int(document.id[1:]) % 7 != 0, exclusion_writer=removed)
    executor(pool, tmp_path / "logs", keeps).run()
    files = str(tmp_path / "removed" / "*.jsonl.gz")
    assert select(pool, tmp_path / "out", "--select.hygiene.drops", files) == 0
    kept = pq.read_table(tmp_path / "out" / "scores.parquet")["id"].to_pylist()
    assert kept == [f"r{i}" for i in range(60) if i % 7]
