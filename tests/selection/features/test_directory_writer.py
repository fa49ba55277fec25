"""Shards of features as a map writes them, task by task, and the n-gram features that need no fit."""

from __future__ import annotations

import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from flatshift.selection import SelectionError
from flatshift.selection.features import HashedNgrams, ShardWriter, open_directory, write_manifest

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
TEXTS = [" ".join(WORDS[(i + k * (i % 3) + k * k) % 8] for k in range(3 + i % 9)) for i in range(1300)]


def documents(low: int, high: int, file: str = "a.jsonl") -> list[SimpleNamespace]:
    return [SimpleNamespace(text=TEXTS[i], id=f"r{i}", metadata={"file_path": file}) for i in range(low, high)]


def ngrams(text: str, longest: int) -> Counter[str]:
    words = re.findall(r"\w+", text.lower())
    return Counter(" ".join(words[i : i + n]) for n in range(1, longest + 1) for i in range(len(words) - n + 1))


def cosine(a: Counter[str], b: Counter[str]) -> float:
    return sum(a[key] * b[key] for key in a) / np.sqrt(sum(v * v for v in a.values()) * sum(v * v for v in b.values()))


@pytest.mark.parametrize("longest", [1, 3])
def test_hashed_ngrams_keep_the_angles_of_counts(longest: int) -> None:
    texts = [*TEXTS[:40], "A b, a B!", "a b a b"]
    rows = HashedNgrams(1 << 18, longest)(texts)
    naive = [[cosine(ngrams(a, longest), ngrams(b, longest)) for b in texts] for a in texts]
    np.testing.assert_allclose(rows @ rows.T, naive, atol=1e-6)
    few = HashedNgrams(64, longest)
    rows = few(texts)
    assert rows.shape == (42, 64) and rows.dtype == np.float32
    assert np.abs(rows @ rows.T - naive).max() > 0 and np.abs(rows @ rows.T - naive).mean() < 0.1
    np.testing.assert_array_equal(rows, np.concatenate([few([text]) for text in texts]))
    assert not few(["", "—"]).any()
    with pytest.raises(SelectionError, match="longest must be at least 1, got 0"):
        HashedNgrams(longest=0)


def test_tasks_leave_a_directory_that_is_read_as_one_matrix(tmp_path) -> None:
    embed = HashedNgrams(16)
    step = ShardWriter(tmp_path / "features", embed, dtype="float16")
    borders = [0, 700, 700, 1300]  # the second file is empty
    for rank in (2, 0, 1):
        part = documents(borders[rank], borders[rank + 1], f"{rank}.jsonl")
        assert list(step(iter(part), rank, 3)) == part, "documents go on to the next step"
    write_manifest(tmp_path / "features")
    found = open_directory(tmp_path / "features")
    assert list(found.ids()) == [f"r{i}" for i in range(1300)]
    np.testing.assert_array_equal(np.asarray(found), embed(TEXTS).astype(np.float16))
    numbered = [SimpleNamespace(text="a", id=7, metadata={})]  # as datatrove reads {"id": 7}
    assert list(ShardWriter(tmp_path / "numbered", embed)(numbered)) == numbered
    assert (tmp_path / "numbered" / "part-00000.ids").read_text() == "7\n"
    bare = ShardWriter(tmp_path / "bare", embed, ids=False)
    list(bare(documents(0, 3) + documents(3, 9, "b.jsonl")))
    assert [file.name for file in (tmp_path / "bare").iterdir()] == ["part-00000.npy"], "one task may read all files"


def test_a_task_that_breaks_off_leaves_nothing_of_its_own(tmp_path) -> None:
    embed = HashedNgrams(16)

    def breaks(texts):
        if TEXTS[600] in texts:
            raise RuntimeError("the machine was taken away")
        return embed(texts)

    step = ShardWriter(tmp_path, breaks)
    list(step(documents(0, 10), 0, 2))
    before = (tmp_path / "part-00000.npy").read_bytes()
    with pytest.raises(RuntimeError):
        list(step(documents(10, 1300), 1, 2))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["part-00000.ids", "part-00000.npy"]
    list(ShardWriter(tmp_path, embed)(documents(0, 10), 0, 2))
    assert (tmp_path / "part-00000.npy").read_bytes() == before, "again: the same file"


@pytest.mark.parametrize(
    ("part", "embed", "words"),
    [
        (documents(0, 3) + documents(3, 4, "b.jsonl"), HashedNgrams(4), "task 1 of 2 reads a.jsonl and b.jsonl; give"),
        ([SimpleNamespace(text="a", id="a\nb", metadata={})], HashedNgrams(4), "has a line break"),
        (documents(0, 3), lambda texts: np.zeros((2, 4)), r"embed gave \(2, 4\) for 3 texts"),
    ],
)
def test_what_would_not_follow_the_pool_is_refused(tmp_path, part, embed, words: str) -> None:
    with pytest.raises(SelectionError, match=words):
        list(ShardWriter(tmp_path, embed)(part, 1, 2))
    assert not list(tmp_path.iterdir())
