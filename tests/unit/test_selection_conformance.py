"""One suite that every selector passes."""

import inspect

import numpy as np
import pytest
from sklearn.base import clone

from selection import (
    DSIRSelector,
    GotDSelector,
    KNNSelector,
    Pool,
    RandomSelector,
    SelectionError,
    Target,
    build_selector,
)
from selection.config import DSIR, KNN, GotD, Random

N, M, D = 300, 40, 6
CASES = {
    "gotd": GotDSelector(seed=3),
    "random": RandomSelector(seed=3),
    "knn": KNNSelector(),
    "dsir": DSIRSelector(buckets=500, seed=3),
    "dsir-resample": DSIRSelector(buckets=500, resample=True, seed=3),
}
WORDS = [f"w{i}" for i in range(60)]


def samples(count, seed, shift=0.0):
    r = np.random.default_rng(seed)
    words = [" ".join(r.choice(WORDS[: 20 + int(10 * shift) + i % 30], size=3 + i % 9)) for i in range(count)]
    return Pool(ids=[f"{seed}-{i}" for i in range(count)], texts=words, features=r.standard_normal((count, D)) + shift)


@pytest.fixture(params=list(CASES))
def selector(request):
    return clone(CASES[request.param])


@pytest.fixture
def pool():
    return samples(N, 1)


@pytest.fixture
def target():
    return samples(M, 2, shift=0.5)


def reordered(pool, order):
    return Pool(
        ids=[pool.ids[i] for i in order],
        texts=[pool.texts[i] for i in order],
        features=np.asarray(pool.features)[order],
    )


def test_scores_and_shapes(selector, pool, target):
    assert selector.fit(pool, target) is selector
    assert selector.scores_.shape == (N,) and selector.scores_.dtype == np.float64
    assert np.isfinite(selector.scores_).all()
    if selector.nearest_target_ is not None:
        assert selector.nearest_target_.shape == (N,) and selector.nearest_target_.dtype == np.int64
        assert selector.nearest_target_.min() >= 0 and selector.nearest_target_.max() < M
    assert isinstance(selector.diagnostics_, dict)


def test_budget_is_met_without_duplicates_smallest_first(selector, pool, target):
    selector.fit(pool, target)
    for k in (1, 7, N):
        chosen = selector.select(k)
        assert chosen.dtype == np.int64 and len(chosen) == k == len(set(chosen.tolist()))
        assert (np.diff(selector.scores_[chosen]) >= 0).all()
        assert selector.scores_[chosen].max() <= np.delete(selector.scores_, chosen).min(initial=np.inf)
        assert (np.sort(selector.ranks()[chosen]) == np.arange(1, k + 1)).all()


def test_nested_budgets(selector, pool, target):
    selector.fit(pool, target)
    assert (selector.select(50)[:20] == selector.select(20)).all()


def test_deterministic_by_seed(selector, pool, target):
    first, again = clone(selector).fit(pool, target), clone(selector).fit(pool, target)
    assert (first.scores_ == again.scores_).all()
    if isinstance(selector, RandomSelector) or getattr(selector, "resample", False):
        other = clone(selector).set_params(seed=4).fit(pool, target)
        assert set(other.select(30).tolist()) != set(first.select(30).tolist())


def test_follows_the_rows(selector, pool, target):
    order = np.random.default_rng(0).permutation(N)
    straight = clone(selector).fit(pool, target)
    moved = clone(selector).fit(reordered(pool, order), target)
    np.testing.assert_allclose(moved.scores_, straight.scores_[order], rtol=1e-7, atol=1e-8)
    assert set(order[moved.select(25)].tolist()) == set(straight.select(25).tolist())
    if straight.nearest_target_ is not None:
        assert (moved.nearest_target_ == straight.nearest_target_[order]).all()


def test_target_order_does_not_matter(selector, pool, target):
    order = np.random.default_rng(0).permutation(M)
    straight = clone(selector).fit(pool, target)
    moved = clone(selector).fit(pool, reordered(target, order))
    np.testing.assert_allclose(moved.scores_, straight.scores_, rtol=1e-7, atol=1e-8)
    if straight.nearest_target_ is not None:
        assert (order[moved.nearest_target_] == straight.nearest_target_).all()


def test_chunk_size_does_not_matter(selector, pool, target):
    if "chunk" not in selector.get_params():
        pytest.skip("has no chunks")
    whole = clone(selector).fit(pool, target)
    for chunk in (1, 7, 64):
        cut = clone(selector).set_params(chunk=chunk).fit(pool, target)
        np.testing.assert_allclose(cut.scores_, whole.scores_, rtol=1e-9, atol=1e-9)
        assert (cut.select(25) == whole.select(25)).all()


def test_inputs_stay_as_they_were(selector, pool, target):
    before = [np.array(p.features) for p in (pool, target)]
    for p in (pool, target):
        p.features.setflags(write=False)
    texts = list(pool.texts)
    selector.fit(pool, target)
    assert all((p.features == b).all() for p, b in zip((pool, target), before, strict=True))
    assert list(pool.texts) == texts


def test_memory_maps_give_the_same(selector, pool, target, tmp_path):
    np.save(tmp_path / "x.npy", pool.features)
    mapped = Pool(ids=pool.ids, texts=pool.texts, features=np.load(tmp_path / "x.npy", mmap_mode="r"))
    assert (clone(selector).fit(mapped, target).scores_ == clone(selector).fit(pool, target).scores_).all()


def test_parameters_round_trip(selector):
    params = selector.get_params()
    assert set(params) == set(inspect.signature(type(selector)).parameters)
    assert clone(selector).get_params() == params
    assert eval(repr(selector), {type(selector).__name__: type(selector)}).get_params() == params  # noqa: S307
    with pytest.raises(SelectionError, match="no parameter"):
        selector.set_params(no_such=1)


def test_bad_budgets_and_early_selects(selector, pool, target):
    with pytest.raises(SelectionError, match="fit"):
        selector.select(1)
    selector.fit(pool, target)
    for bad, told in ((N + 1, f"above the pool size {N}"), (0, "at least 1"), (2.5, "whole number"), (True, "whole")):
        with pytest.raises(SelectionError, match=told):
            selector.select(bad)


def test_a_missing_part_is_named(selector, target):
    bare = Pool(ids=["a", "b"])
    if isinstance(selector, RandomSelector):
        assert len(selector.fit(bare, target).scores_) == 2
    else:
        with pytest.raises(SelectionError, match=r"texts|features"):
            selector.fit(bare, target)


def test_pools_are_checked():
    with pytest.raises(SelectionError, match="2 ids, 3 texts"):
        Pool(ids=["a", "b"], texts=["a", "b", "c"])
    with pytest.raises(SelectionError, match="empty"):
        Pool(texts=[])
    with pytest.raises(SelectionError, match="at least one"):
        Target()


def test_build_selector_passes_every_setting_on():
    assert build_selector(GotD(epsilon=0.2, tolerance=1e-5), seed=9).get_params() == {
        **GotDSelector(epsilon=0.2, tolerance=1e-5, seed=9).get_params()
    }
    assert build_selector(Random(), seed=9).seed == 9
    assert isinstance(build_selector(KNN(), seed=9), KNNSelector)
    built = build_selector(DSIR(buckets=77, resample=True), seed=9)
    assert (built.buckets, built.resample, built.seed) == (77, True, 9)
    assert DSIR().resample is False
    with pytest.raises(SelectionError, match="no selector"):
        build_selector(object(), seed=0)
