"""Embedders: TF-IDF + SVD, pooled states of a callable, own `.npy` files."""

import numpy as np
import pytest
import torch

from flatshift.selection import SelectionError, TfIdfEmbedder, load_features, pool_features

SPORT = ["the team won the match", "a goal in the last minute of the match", "the coach praised the team and the goal"]
FOOD = ["bake the bread in an oven", "slow bread needs flour and water", "flour, water, salt and an oven"]
POOL = [f"{text} {i}" for i in range(20) for text in SPORT + FOOD]


def test_tfidf_shapes_norms_and_meaning():
    x, y = TfIdfEmbedder(dim=8, buckets=4096).fit_transform(POOL, ["match goal team", "bread oven flour"])
    assert x.shape == (120, 8) and y.shape == (2, 8) and x.dtype == y.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(x, axis=1), 1, atol=1e-6)
    sport = np.array([i % 6 < 3 for i in range(120)])
    near = x @ y.T
    assert (near[sport, 0] > near[sport, 1]).all() and (near[~sport, 1] > near[~sport, 0]).all()


def test_tfidf_is_seeded_and_leaves_global_state_alone():
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    one = TfIdfEmbedder(dim=8, seed=1, fit_rows=60).fit_transform(POOL, SPORT)
    two = TfIdfEmbedder(dim=8, seed=1, fit_rows=60).fit_transform(POOL, SPORT)
    assert all((a == b).all() for a, b in zip(one, two, strict=True))
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002
    other = TfIdfEmbedder(dim=8, seed=2, fit_rows=60).fit_transform(POOL, SPORT)
    assert not np.allclose(one[0], other[0])


def test_tfidf_transform_repeats_what_fit_transform_gave():
    embedder = TfIdfEmbedder(dim=6)
    x, _ = embedder.fit_transform(POOL, SPORT)
    np.testing.assert_allclose(embedder.transform(POOL[:5]), x[:5], atol=1e-6)
    again = TfIdfEmbedder(dim=6).fit([*POOL, *SPORT]).transform(POOL)
    np.testing.assert_allclose(again, x, atol=1e-5)


def test_tfidf_says_when_the_texts_span_less():
    embedder = TfIdfEmbedder(dim=64)
    with pytest.warns(UserWarning, match="using 4"):
        x, y = embedder.fit_transform(["one two", "two three", "three four"], ["one"])
    assert embedder.dim_ == x.shape[1] == y.shape[1] == 4


def test_tfidf_empty_texts():
    x, _ = TfIdfEmbedder(dim=4).fit_transform(["", *POOL], SPORT)
    assert (x[0] == 0).all() and np.isfinite(x).all()
    with pytest.raises(SelectionError, match="single word"):
        TfIdfEmbedder().fit_transform(["", " "], ["..."])
    with pytest.raises(SelectionError, match="no texts"):
        TfIdfEmbedder().fit([])
    with pytest.raises(SelectionError, match="not fitted"):
        TfIdfEmbedder().transform(["a"])
    with pytest.raises(SelectionError, match="dim"):
        TfIdfEmbedder(dim=0).fit(POOL)


def encode(texts):
    """Characters as one-hot-like states, padded with garbage that a mask must hide."""
    length = max(1, max(map(len, texts)))
    hidden = np.full((len(texts), length, 3), np.nan, dtype=np.float32)
    mask = np.zeros((len(texts), length), dtype=np.int64)
    for row, text in enumerate(texts):
        for place, char in enumerate(text):
            hidden[row, place] = [ord(char), 1.0, place]
            mask[row, place] = 1
    return hidden, mask


@pytest.mark.parametrize("as_torch", [False, True])
def test_pool_features_is_the_masked_mean(as_torch):
    texts = ["abc", "", "a much longer text than that", "zz"]
    sizes = []

    def encode_batch(batch):
        sizes.append(len(batch))
        parts = encode(batch)
        return tuple(map(torch.from_numpy, parts)) if as_torch else parts

    found = pool_features(texts, encode_batch, batch_size=2)
    for row, text in enumerate(texts):
        mean = np.mean([[ord(c), 1.0, i] for i, c in enumerate(text)], axis=0) if text else np.zeros(3)
        np.testing.assert_allclose(found[row], mean / max(np.linalg.norm(mean), 1e-30), atol=1e-6)
    assert sizes == [2, 2] and found.dtype == np.float32
    np.testing.assert_allclose(pool_features(texts, encode_batch, batch_size=3), found, atol=1e-6)


def test_pool_features_refuses():
    with pytest.raises(SelectionError, match=r"states \(B, T, D\)"):
        pool_features(["a"], lambda t: (np.zeros((1, 2)), np.zeros((1, 2))))
    with pytest.raises(SelectionError, match="text 1 are not finite"):
        pool_features(["aa", "bbb"], lambda t: (np.array([[[1.0]], [[np.nan]]]), np.ones((2, 1))), 2)
    with pytest.raises(SelectionError, match="no texts"):
        pool_features([], encode)
    with pytest.raises(SelectionError, match="batch_size"):
        pool_features(["a"], encode, 0)


@pytest.mark.parametrize("pooling", ["mean", "max", "cls", "last"])
def test_batches_of_texts_without_a_token(pooling):
    def none(texts):
        return np.zeros((len(texts), 0, 3), np.float32), np.zeros((len(texts), 0), np.int64)

    found = pool_features(["", "", ""], none, batch_size=2, pooling=pooling)
    assert found.shape == (3, 3) and (found == 0).all()


def test_load_features(tmp_path):
    x = np.arange(12.0).reshape(4, 3)
    np.save(tmp_path / "x.npy", x)
    found = load_features(tmp_path / "x.npy", rows=4)
    assert isinstance(found, np.memmap) and (found == x).all()
    with pytest.raises(ValueError, match="read-only"):
        found[0, 0] = 1
    with pytest.raises(SelectionError, match=r"--pool-features: .* has 4 rows for 5 records"):
        load_features(tmp_path / "x.npy", rows=5, flag="--pool-features")
    with pytest.raises(SelectionError, match="does not exist"):
        load_features(tmp_path / "y.npy")
    np.save(tmp_path / "flat.npy", x[0])
    with pytest.raises(SelectionError, match="matrix of numbers"):
        load_features(tmp_path / "flat.npy")
    np.save(tmp_path / "object.npy", np.array([[{}]], dtype=object), allow_pickle=True)
    with pytest.raises(SelectionError, match="not a readable"):
        load_features(tmp_path / "object.npy")
    (tmp_path / "text.npy").write_text("hello")
    with pytest.raises(SelectionError, match=r"is no \.npy file"):
        load_features(tmp_path / "text.npy")
    np.savez(tmp_path / "z.npz", x=x)
    with pytest.raises(SelectionError, match="archive"):
        load_features(tmp_path / "z.npz")
    np.save(tmp_path / "none.npy", x[:0])
    with pytest.raises(SelectionError, match="matrix of numbers"):
        load_features(tmp_path / "none.npy")
