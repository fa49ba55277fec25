"""Shards of features: computed once, verified, resumed; and the array-like rows they make."""

import errno
import os
import time
from pathlib import Path

import numpy as np
import pytest

from flatshift.selection import FeatureCache, SelectionError, TfIdfEmbedder
from flatshift.selection.features.cache import atomic_file, embed_in_shards
from flatshift.selection.features.matrix import IndexedRows, ShardedRows
from flatshift.selection.features.tfidf import load_or_fit

TEXTS = [f"text number {i}" for i in range(25)]


class Embed:
    """Lengths and code points; counts the texts it is asked for, and may be killed after some calls."""

    def __init__(self, calls: int | None = None):
        self.asked: list[str] = []
        self.calls = calls

    def __call__(self, texts):
        if self.calls is not None:
            if not self.calls:
                raise KeyboardInterrupt
            self.calls -= 1
        self.asked += texts
        return np.array([[len(text), sum(map(ord, text)) / 100, 1.0] for text in texts])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_cached_features_are_those_of_memory(tmp_path: Path, dtype):
    wanted = Embed()(TEXTS).astype(dtype)
    cache = FeatureCache(tmp_path / "cache")
    embed = Embed()
    found = cache.features(TEXTS, embed, key="k", dtype=dtype, shard_rows=10)
    assert (cache.computed, cache.reused) == (3, 0) and found.shape == (25, 3) and found.dtype == dtype
    assert (np.asarray(found) == wanted).all()
    assert (embed_in_shards(TEXTS, Embed(), dtype=dtype, shard_rows=10) == wanted).all()
    again = cache.features(TEXTS, embed, key="k", dtype=dtype, shard_rows=10)
    assert (cache.computed, cache.reused) == (0, 3) and len(embed.asked) == 25
    assert (np.asarray(again) == wanted).all()
    plain = np.load(found.files[0], allow_pickle=False)
    assert (plain == wanted[:10]).all(), "a shard is a plain .npy file"


def test_a_kill_loses_at_most_the_shard_at_hand(tmp_path: Path):
    cache = FeatureCache(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        cache.features(TEXTS, Embed(calls=2), key="k", shard_rows=10)
    embed = Embed()
    cache.features(TEXTS, embed, key="k", shard_rows=10)
    assert embed.asked == TEXTS[20:] and (cache.computed, cache.reused) == (1, 2)


def test_a_changed_byte_is_another_key(tmp_path: Path):
    cache = FeatureCache(tmp_path)
    cache.features(TEXTS, Embed(), key="k", shard_rows=10)
    embed = Embed()
    changed = [*TEXTS[:12], TEXTS[12] + ".", *TEXTS[13:]]
    cache.features(changed, embed, key="k", shard_rows=10)
    assert embed.asked == changed[10:20], "only the shard that holds it"
    for other in ({"key": "K"}, {"key": "k", "dtype": "float16"}):
        cache.features(TEXTS, Embed(), shard_rows=10, **other)
        assert cache.reused == 0
    cache.features(["ab", "c"], Embed(), key="k")
    cache.features(["a", "bc"], Embed(), key="k")
    assert cache.computed == 1, "where one text ends is part of the key"


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_shard_is_computed_again(tmp_path: Path, damage: str):
    cache = FeatureCache(tmp_path)
    found = cache.features(TEXTS, Embed(), key="k", shard_rows=10)
    content = bytearray(found.files[1].read_bytes())
    content[150] ^= 1
    found.files[1].write_bytes({"flip": bytes(content), "cut": bytes(content[:-40]), "empty": b""}[damage])
    embed = Embed()
    again = cache.features(TEXTS, embed, key="k", shard_rows=10)
    assert embed.asked == TEXTS[10:20] and (cache.computed, cache.reused, cache.broken) == (1, 2, 1)
    assert (np.asarray(again) == Embed()(TEXTS).astype(np.float32)).all()


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path):
    dead = tmp_path / ".x.npy.ab.tmp"
    dead.write_bytes(b"part")
    os.utime(dead, (time.time() - 2 * 86400,) * 2)
    with atomic_file(tmp_path / "y.npy") as handle:  # as another machine would, whose processes are not known here
        handle.write(b"whole")
        FeatureCache(tmp_path).features(TEXTS, Embed(), key="k")
    assert not dead.exists() and (tmp_path / "y.npy").read_bytes() == b"whole"


@pytest.mark.parametrize(
    ("embed", "dtype", "words"),
    [
        (lambda texts: np.ones((1, 2)), "float32", r"must return \(10, d\)"),
        (lambda texts: np.full((len(texts), 2), np.nan), "float32", "text 0 are not finite"),
        (lambda texts: np.full((len(texts), 2), 1e6), "float16", "not finite in float16"),
        (lambda texts: np.ones((len(texts), len(texts))), "float32", "10 columns before text 20 and 5"),
    ],
)
def test_what_cannot_be_kept_is_refused(tmp_path: Path, embed, dtype, words):
    with pytest.raises(SelectionError, match=words):
        FeatureCache(tmp_path).features(TEXTS, embed, key="k", dtype=dtype, shard_rows=10)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SelectionError, match="nothing can be written there"):
        FeatureCache(tmp_path / "file").features(TEXTS, Embed(), key="k")
    with pytest.raises(SelectionError, match="no texts"):
        FeatureCache(tmp_path).features([], Embed(), key="k")


def test_a_full_disk_is_no_mistake_of_the_users(tmp_path: Path):
    with pytest.raises(OSError, match="No space left") as caught, atomic_file(tmp_path / "shard.npy"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert not isinstance(caught.value, ValueError) and not list(tmp_path.iterdir())


def test_rows_on_disk_behave_like_an_array(tmp_path: Path):
    wanted = np.random.default_rng(0).normal(size=(25, 3)).astype(np.float32)
    files = []
    for low in range(0, 25, 10):
        files.append(tmp_path / f"{low}.npy")
        np.save(files[-1], wanted[low : low + 10])
    sharded = ShardedRows(files, [10, 10, 5], 3, np.float32)
    index = np.random.default_rng(1).permutation(25)[:17]
    for rows, expected in ((sharded, wanted), (IndexedRows(sharded, index), wanted[index])):
        n = len(expected)
        assert rows.shape == expected.shape and len(rows) == n and rows.nbytes == expected.nbytes
        keys = [slice(3, 15), slice(None), slice(8, 2), slice(0, 14, 3), slice(-4, None), slice(90, 99), 4, -1]
        keys += [np.array([7, 0, 7, -1]), np.array([], dtype=int), np.arange(n) % 3 == 0, [2, 12]]
        for key in keys:
            assert (rows[key] == expected[key]).all() and rows[key].shape == expected[key].shape
        assert (np.asarray(rows, dtype=np.float64) == expected).all()
        for key in (n, -n - 1, np.array([n]), np.ones(n + 1, dtype=bool)):
            with pytest.raises(IndexError):
                rows[key]


def test_the_solver_reads_rows_on_disk(tmp_path: Path):
    from flatshift.selection import sinkhorn_potentials

    r = np.random.default_rng(2)
    x, y = r.normal(size=(300, 4)).astype(np.float32), r.normal(size=(20, 4)).astype(np.float32)
    cache = FeatureCache(tmp_path)
    rows = cache.features([str(i) for i in range(300)], lambda t: x[[int(i) for i in t]], key="x", shard_rows=70)
    for method in ("exact", "streamed"):
        found, wanted = (sinkhorn_potentials(some, y, method=method, tolerance=1e-6) for some in (rows, x))
        np.testing.assert_allclose(found.scores, wanted.scores, atol=1e-9)


def test_a_fit_is_kept_and_a_broken_one_is_made_again(tmp_path: Path):
    texts = [f"word{i % 7} word{i % 5} other{i % 3}" for i in range(60)]
    fits = []

    def load():
        embedder = TfIdfEmbedder(dim=4)
        load_or_fit(tmp_path / "fit.npz", embedder, lambda: fits.append(embedder.fit(texts)))
        return embedder

    first, second = load(), load()
    assert len(fits) == 1 and first.fingerprint == second.fingerprint
    assert (first.transform(texts) == second.transform(texts)).all()
    content = (tmp_path / "fit.npz").read_bytes()
    for broken in (content[: len(content) // 2], b"", content[:200] + bytes([content[200] ^ 1]) + content[201:]):
        (tmp_path / "fit.npz").write_bytes(broken)
        assert (load().transform(texts) == first.transform(texts)).all()
