"""Each selector against a naive reference of its own definition."""

import itertools
import math
import os
import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from flatshift.selection import (
    DSIRSelector,
    GotDSelector,
    KNNSelector,
    Pool,
    RandomSelector,
    SelectionError,
    sinkhorn_potentials,
)
from flatshift.selection.methods.dsir import NgramHasher

R = np.random.default_rng(0)
TEXTS = ["The cat sat, the CAT ran.", "", "a b a b", "naïve 東京 x_1 ...!", "cat", "dogs and cats and dogs " * 5]


def naive_log_weights(pool, target, buckets):
    """DSIR word by word: dictionaries of buckets, no arrays."""
    hasher = NgramHasher(buckets)

    def bag(text):
        words = re.findall(r"\w+|[^\w\s]+", text.lower())
        grams = [[w] for w in words] + [list(pair) for pair in itertools.pairwise(words)]
        found = []
        for gram in grams:
            unit = [int(i) for i in next(hasher.batches([" ".join(gram)]))[0]]
            found.append(unit[-1])  # the last bucket of a two-word text is its bigram
        return found

    bags, aims = [bag(t) for t in pool], [bag(t) for t in target]
    have, want = Counter(i for b in bags for i in b), Counter(i for b in aims for i in b)
    size, aim = sum(have.values()) + buckets, sum(want.values()) + buckets
    return [sum(math.log((want[i] + 1) / aim) - math.log((have[i] + 1) / size) for i in b) for b in bags]


def test_dsir_equals_the_word_by_word_definition():
    target = ["cats and dogs", "the cat", ""]
    found = DSIRSelector(buckets=97).fit(Pool(texts=TEXTS), Pool(texts=target))
    np.testing.assert_allclose(found.log_weights_, naive_log_weights(TEXTS, target, 97), atol=1e-10)
    assert (found.scores_ == -found.log_weights_).all()
    assert found.scores_[1] == 0  # a text without words has weight one


def test_dsir_prefers_the_targets_words():
    words = ["alpha beta gamma", "delta epsilon zeta"]
    pool = Pool(texts=[words[i % 2] for i in range(40)])
    chosen = DSIRSelector().fit(pool, Pool(texts=["alpha gamma beta"])).select(20)
    assert (chosen % 2 == 0).all()


def test_dsir_hashes_are_the_same_in_every_process():
    code = (
        "from flatshift.selection.methods.dsir import NgramHasher;"
        "print([int(i) for i in next(NgramHasher(1000).batches(['The cat sat, naïve 東京']))[0]])"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    here = [int(i) for i in next(NgramHasher(1000).batches(["The cat sat, naïve 東京"]))[0]]
    assert runs == {f"{here}\n"} and len(set(here)) > 8


def test_dsir_batches_do_not_leak_into_one_another():
    many = [TEXTS[i % len(TEXTS)] for i in range(5000)]
    found = DSIRSelector(buckets=97).fit(Pool(texts=many), Pool(texts=TEXTS[:1]))
    for i in range(len(TEXTS)):
        assert len(set(found.scores_[i :: len(TEXTS)])) == 1


@pytest.mark.parametrize("hashing", ["fast", "sha256"])
def test_dsir_within_memory_gives_the_same(hashing):
    many = [TEXTS[i % len(TEXTS)] for i in range(9000)]
    pool, target = Pool(texts=many), Pool(texts=TEXTS[:1])
    whole = DSIRSelector(hashing=hashing).fit(pool, target)
    for memory in (0, 200_000):
        assert (DSIRSelector(hashing=hashing, memory_bytes=memory).fit(pool, target).scores_ == whole.scores_).all()


def test_dsir_resampling_draws_in_proportion_to_the_weights():
    texts = ["aa"] * 500 + ["bb"] * 500
    pool = Pool(texts=texts, ids=[str(i) for i in range(1000)])
    target = Pool(texts=["aa"] * 3 + ["bb"])
    plain = DSIRSelector(buckets=1000).fit(pool, target)
    ratio = math.exp(plain.log_weights_[0] - plain.log_weights_[-1])
    firsts = [int(DSIRSelector(buckets=1000, resample=True, seed=s).fit(pool, target).select(1)[0]) for s in range(300)]
    share = np.mean(np.array(firsts) < 500)
    expected = ratio / (1 + ratio)
    assert 0.55 < expected < 0.9
    assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / 300)


def test_dsir_refuses():
    with pytest.raises(SelectionError, match="single word"):
        DSIRSelector().fit(Pool(texts=TEXTS), Pool(texts=["", " "]))
    with pytest.raises(SelectionError, match="buckets"):
        DSIRSelector(buckets=0).fit(Pool(texts=TEXTS), Pool(texts=TEXTS))


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_knn_is_the_squared_distance_to_the_nearest(dtype):
    x = (R.standard_normal((200, 5)) + 3).astype(dtype)
    y = (R.standard_normal((30, 5)) + 3).astype(dtype)
    x[7] = y[3]
    found = KNNSelector(chunk=33).fit(Pool(features=x), Pool(features=y))
    cost = ((x[:, None].astype(float) - y.astype(float)) ** 2).sum(-1)
    np.testing.assert_allclose(found.scores_, cost.min(1), rtol=1e-6, atol=1e-12)
    assert (found.nearest_target_ == cost.argmin(1)).all()
    assert found.scores_[7] < 1e-12 and found.select(1)[0] == 7


def test_ties_go_by_file_order():
    x = np.zeros((6, 2))
    x[4] = 1
    found = KNNSelector().fit(Pool(features=x), Pool(features=np.ones((1, 2))))
    assert found.select(6).tolist() == [4, 0, 1, 2, 3, 5]
    assert found.ranks().tolist() == [2, 3, 4, 5, 1, 6]


def test_ties_are_counted_at_the_cut_alone():
    x = np.array([[2.0], [1.0], [2.0], [3.0], [2.0], [0.0]])
    chooser = KNNSelector().fit(Pool(features=x), Pool(features=np.zeros((1, 1))))
    assert [chooser.ties(k) for k in range(1, 7)] == [0, 0, 3, 3, 0, 0]
    with pytest.raises(SelectionError, match="at most 6"):
        chooser.ties(7)


def test_gotd_hands_weights_and_settings_to_the_solver():
    x, y = R.standard_normal((80, 4)), R.standard_normal((20, 4)) + 0.5
    a, b = R.random(80) + 0.1, R.random(20) + 0.1
    found = GotDSelector(epsilon=0.1).fit(Pool(features=x, weights=a), Pool(features=y, weights=b))
    direct = sinkhorn_potentials(x, y, a=a, b=b, epsilon=0.1, nearest=True)
    assert (found.scores_ == direct.scores).all() and (found.nearest_target_ == direct.nearest).all()
    assert {"marginal_error", "dual_value", "epsilon", "mean_cost", "converged", "iterations"} <= set(
        found.diagnostics_
    )
    assert all(v is None or isinstance(v, int | float | str | bool) for v in found.diagnostics_.values())


def test_gotd_fills_what_the_pool_lacks():
    # Half of the target lives where the pool is thin: nearest neighbours take whatever is close, GOT-D the rare half.
    x = np.concatenate([R.normal(0, 0.3, (950, 2)), R.normal(5, 0.3, (50, 2))])
    y = np.concatenate([R.normal(0, 0.3, (20, 2)), R.normal(5, 0.3, (20, 2))])
    chosen = GotDSelector().fit(Pool(features=x), Pool(features=y)).select(50)
    assert (chosen >= 950).mean() > 0.95
    assert (KNNSelector().fit(Pool(features=x), Pool(features=y)).select(50) >= 950).mean() < 0.5


def test_random_is_uniform_and_keyed_by_id():
    pool = Pool(ids=[f"r{i}" for i in range(20_000)])
    draws = RandomSelector(seed=1).fit(pool, pool).scores_
    assert draws.min() > 0 and draws.max() < 1 and len(np.unique(draws)) == 20_000
    counts = np.histogram(draws, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 50  # χ² with 19 degrees of freedom
    twice = RandomSelector(seed=1).fit(Pool(ids=["a", "a", "b"]), pool).scores_
    assert len(set(twice)) == 3
    assert RandomSelector(seed=1).fit(Pool(ids=["b", "a", "a"]), pool).scores_[0] == twice[2]
