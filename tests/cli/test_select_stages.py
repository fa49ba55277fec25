"""Stages of `flatshift select --on`: the selection of one process, bit for bit, over shards of the pool."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from flatshift.cli import run
from flatshift.finetune.data.rows import read_rows

pytest.importorskip("datatrove")

FILES = 3
HYGIENE = [
    "--select.hygiene.exact", "true",
    "--select.hygiene.near", "{}",
    "--select.hygiene.length", "{min_words: 3}",
    "--select.hygiene.decontaminate", "{}",
]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a pool in several files, a target, and texts to evaluate on.

    The pool has copies, near copies and blank texts, each in another file than the original, and passages with a text
    of the evaluation in them.
    """
    root = tmp_path_factory.mktemp("data")
    texts = [row.values["text"] for row, _ in zip(read_rows(["sample:pool"]), range(540), strict=False)]
    evaluation = [text for text in texts[500:540] if len(text.split()) >= 20]
    texts = texts[:500]
    texts[300:310] = texts[20:30]
    texts[310:320] = [f"{text} Again." for text in texts[30:40]]
    texts[400:404] = [" ", "", "one two", "\t"]
    around = [" ".join(texts[low : low + 6]) for low in range(100, 160, 6)]
    texts[450:455] = [f"{around[k]} {text} {around[k + 5]}" for k, text in enumerate(evaluation[:5])]
    (root / "pool").mkdir()
    for number in range(FILES):
        rows = list(enumerate(texts))[number * 167 : (number + 1) * 167]
        lines = [json.dumps({"id": f"r{i}", "text": text, "domain": f"d{i % 3}"}) + "\n" for i, text in rows]
        (root / "pool" / f"{number}.jsonl").write_text("".join(lines), encoding="utf-8")
    target = [row.values["text"] for row, _ in zip(read_rows(["sample:banking/train"]), range(60), strict=False)]
    for name, side in (("target", target), ("eval", evaluation)):
        lines = [json.dumps({"text": text}) + "\n" for text in side]
        (root / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return root


def select(data: Path, out: Path, *more: str, pool: str = "pool/*.jsonl") -> int:
    words = ["select", "--pool", str(data / pool), "--target", str(data / "target.jsonl"), "--budget", "40"]
    return run([*words, "--data.holdout", "0", "--backbone", "flatshift-5m", "--out", str(out), *more])


def clean(data: Path) -> list[str]:
    return [*HYGIENE, "--select.eval.files", str(data / "eval.jsonl")]


def without_times(value: Any) -> Any:
    """Return a manifest without what two runs of one command differ in."""
    if isinstance(value, list):
        return [without_times(item) for item in value]
    if not isinstance(value, dict):
        return value
    names = ("created", "seconds", "peak_bytes")
    return {name: without_times(item) for name, item in value.items() if name not in names}


def check_equal(one: Path, other: Path) -> None:
    assert pq.read_table(one / "scores.parquet").equals(pq.read_table(other / "scores.parquet"))
    names = sorted(path.name for path in one.iterdir() if path.is_file())
    assert names == sorted(path.name for path in other.iterdir() if path.is_file())
    for name in ("selected.jsonl", "drops.jsonl", "recipe.resolved.yaml"):
        if (one / name).is_file():
            assert (one / name).read_bytes() == (other / name).read_bytes()
    manifests = [without_times(json.loads((out / "manifest.json").read_text(encoding="utf-8"))) for out in (one, other)]
    assert manifests[0] == manifests[1]


@pytest.mark.parametrize("method", ["dsir", "moore-lewis", "gotd", "knn", "classifier"])
def test_a_selection_by_shards_is_that_of_one_process(data: Path, tmp_path: Path, method: str) -> None:
    words = [*clean(data), "--method", method, "--domain-column", "domain"]
    words += ["--embedder", "tokens" if method == "knn" else "tfidf"] if method in ("gotd", "knn") else []
    assert select(data, tmp_path / "one", *words) == 0
    assert select(data, tmp_path / "shards", *words, "--on", "local:1") == 0
    check_equal(tmp_path / "one", tmp_path / "shards")
    drops = (tmp_path / "one" / "drops.jsonl").read_text(encoding="utf-8")
    for cause in ("length", "exact-duplicate", "near-duplicate", "cut"):
        assert f'"{cause}"' in drops
