"""Token n-grams in the target's span: distances, and GOT-D on them, are those of the dense float64 TF-IDF."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from flatshift.selection import GotDSelector, Pool, SelectionError
from flatshift.selection.features.tokens import TokenNgramEmbedder

R = np.random.default_rng(4)
SIZE = 30


def texts(count, shift=0):
    return [" ".join(map(str, (R.integers(0, 12, R.integers(2, 14)) + shift))) for _ in range(count)]


def tokenize(some):
    return [[int(word) for word in text.split()] for text in some]


def dense(pool, target):
    """TF-IDF by dictionaries, on all n-grams of both sides."""
    bags = [Counter([(a,) for a in ids] + list(pairwise(ids))) for ids in tokenize([*pool, *target])]
    names = sorted({gram for bag in bags for gram in bag})
    place = {name: i for i, name in enumerate(names)}
    counts = np.zeros((len(bags), len(names)))
    for row, bag in zip(counts, bags, strict=True):
        for gram, count in bag.items():
            row[place[gram]] = count
    idf = np.log((1 + len(bags)) / (1 + (counts > 0).sum(0))) + 1
    weights = np.where(counts > 0, 1 + np.log(np.maximum(counts, 1)), 0) * idf
    norms = np.linalg.norm(weights, axis=1, keepdims=True)
    rows = weights / np.where(norms > 0, norms, 1)
    return rows[: len(pool)], rows[len(pool) :]


def squared(x, y):
    return ((x[:, None] - y[None]) ** 2).sum(-1)


def test_distances_are_those_of_the_dense_rows():
    pool, target = [*texts(60), *texts(20, 9), "29", ""], [*texts(15, 3), "4 5", "4 5"]
    embedder = TokenNgramEmbedder(tokenize, SIZE).fit(pool, target)
    x, y = embedder.transform(pool), embedder.transform_target(target)
    assert x.dtype == np.float32 and x.shape[1] == y.shape[1] <= len(target) + 2
    wide = dense(pool, target)
    np.testing.assert_allclose(squared(x.astype(float), y.astype(float)), squared(*wide), atol=2e-6)
    assert not x[-1].any() and x[-2].any()  # no token; and one that the target does not hold
    ours, theirs = (
        GotDSelector(epsilon=0.1).fit(Pool(features=a), Pool(features=b)).scores_ for a, b in ((x, y), wide)
    )
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_span_that_is_cut_keeps_its_strongest_directions():
    pool, target = texts(50), texts(40, 3)
    embedder = TokenNgramEmbedder(tokenize, SIZE, dim=20).fit(pool, target)
    x, y = embedder.transform(pool).astype(float), embedder.transform_target(target).astype(float)
    assert x.shape == (50, 22)
    np.testing.assert_allclose((x * x).sum(1), 1.0, atol=1e-5)
    np.testing.assert_allclose((y * y).sum(1), 1.0, atol=1e-5)
    a, b = dense(pool, target)
    basis = np.linalg.svd(b, full_matrices=False)[2][:20].T
    np.testing.assert_allclose(x[:, :20] @ y[:, :20].T, (a @ basis) @ (b @ basis).T, atol=2e-5)


def test_rows_do_not_depend_on_their_neighbours_and_a_target_without_tokens_is_refused():
    pool, target = texts(30), texts(9, 2)
    embedder = TokenNgramEmbedder(tokenize, SIZE, fit_rows=10, seed=3).fit(pool, target)
    again = TokenNgramEmbedder(tokenize, SIZE, fit_rows=10, seed=3).fit(pool, target)
    assert embedder.fingerprint == again.fingerprint
    np.testing.assert_allclose(embedder.transform(pool)[7:9], embedder.transform(pool[7:9]), atol=1e-6)
    with pytest.raises(SelectionError, match="no target text holds a single token"):
        TokenNgramEmbedder(tokenize, SIZE).fit(pool, ["", ""])
