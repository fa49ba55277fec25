"""TSDS, LESS, perplexity, length and domains, each against a naive reference of its own definition."""

import heapq
from collections import Counter

import numpy as np
import pytest

from flatshift.selection import (
    DomainsSelector,
    KNNSelector,
    LengthSelector,
    LessSelector,
    PerplexitySelector,
    Pool,
    RandomProjection,
    RandomSelector,
    SelectionError,
    TSDSSelector,
)
from flatshift.selection.methods import tsds
from flatshift.selection.methods.domains import allocate_quotas
from flatshift.selection.methods.neighbours import kernel_densities, nearest_rows

R = np.random.default_rng(5)


def named(count, **parts):
    return Pool(ids=[f"r{i}" for i in range(count)], **parts)


# ------------------------------------------------------------------------------------------------ tsds


def naive_tsds(x, y, neighbours, alpha, scale, sigma):
    """The event queue of arXiv 2410.11303, target by target; returns the probability of every pool row."""
    distance = np.sqrt(((y[:, None] - x[None]) ** 2).sum(-1))
    rows = np.argsort(distance, axis=1, kind="stable")[:, :neighbours]
    near = np.take_along_axis(distance, rows, 1)
    union = sorted(set(rows.ravel().tolist()))
    gaps = ((x[union][:, None] - x[union][None]) ** 2).sum(-1)
    kernel = np.maximum(1 - gaps / sigma**2, 0).sum(1) if sigma else np.ones(len(union))
    density = dict(zip(union, kernel, strict=True))
    weight = np.array([[1 / density[i] for i in line] for line in rows])
    m = len(y)
    queue = [(weight[j, 0], 0, j) for j in range(m)]
    heapq.heapify(queue)
    filled, cost, spread = weight[:, 0] * near[:, 0], np.zeros(m), 0.0
    while queue:
        spread, k, j = heapq.heappop(queue)
        cost[j] = near[j, k + 1] * spread - filled[j]
        if alpha / scale * cost.sum() >= (1 - alpha) * m:
            break
        if k < neighbours - 2:
            heapq.heappush(queue, (spread + weight[j, k + 1], k + 1, j))
            filled[j] += near[j, k + 1] * weight[j, k + 1]
    p = np.zeros(len(x))
    for j in range(m):
        left = 1 / m
        for k in range(neighbours):
            part = min(left, weight[j, k] / m / spread) if k < neighbours - 1 else left
            p[rows[j, k]] += part
            left -= part
    return p


@pytest.mark.parametrize(
    ("alpha", "scale", "sigma"), [(0.5, 5.0, 1.5), (0.6, 1.0, 0.0), (0.05, 5.0, 1.0), (0.99, 0.1, 2.0)]
)
def test_tsds_equals_the_event_queue(alpha, scale, sigma):
    x, y = R.standard_normal((250, 4)), R.standard_normal((15, 4)) + 0.4
    x[:20] = x[20] + 0.05 * R.standard_normal((20, 4))
    found = TSDSSelector(alpha=alpha, scale=scale, sigma=sigma, neighbours=30, chunk=17)
    found.fit(named(250, features=x), Pool(features=y))
    naive = naive_tsds(x, y, 30, alpha, scale, sigma)
    np.testing.assert_allclose(found.probabilities_, naive, atol=1e-10)
    assert found.probabilities_.sum() == pytest.approx(1.0)
    assert found.diagnostics_["support"] == int((naive > 0).sum())


@pytest.mark.parametrize("scale", [0.05, 1.0, 20.0])
def test_tsds_looks_no_further_than_mass_reaches(monkeypatch, scale):
    x, y = R.standard_normal((400, 4)), R.standard_normal((9, 4))
    looked = {}
    for first in (2, 400):
        monkeypatch.setattr(tsds, "_FIRST", first)
        found = TSDSSelector(scale=scale, sigma=1.0, neighbours=200).fit(named(400, features=x), Pool(features=y))
        looked[first] = found
    np.testing.assert_allclose(looked[2].probabilities_, looked[400].probabilities_, atol=1e-12)
    assert (looked[2].scores_ == looked[400].scores_).all() or np.allclose(looked[2].scores_, looked[400].scores_)


def test_tsds_counts_by_target_where_all_neighbours_are_too_many(monkeypatch):
    x, y = R.standard_normal((300, 4)), R.standard_normal((6, 4))
    x[:20] = x[20] + 0.02 * R.standard_normal((20, 4))
    monkeypatch.setattr(tsds, "_FIRST", 40)
    monkeypatch.setattr(tsds, "_PAIRS", 0.0)
    found = TSDSSelector(scale=2.0, sigma=0.9, neighbours=40).fit(named(300, features=x), Pool(features=y))
    assert found.diagnostics_["densities"] == "by target"
    rows = nearest_rows(x, y, 40)
    union, place = np.unique(rows.rows, return_inverse=True)
    density = np.zeros(len(union))
    for near in place.reshape(rows.rows.shape):
        for i in near:
            gap = ((x[union[i]] - x[union[near]]) ** 2).sum(1)
            density[i] = max(density[i], np.maximum(0.0, 1.0 - gap / 0.81).sum())
    mass, _, _ = tsds.assign_mass(np.sqrt(rows.squared), density[place.reshape(rows.rows.shape)], alpha=0.5, scale=2.0)
    p = np.zeros(300)
    np.add.at(p, rows.rows, mass)
    np.testing.assert_allclose(found.probabilities_, p / p.sum(), atol=1e-6)


def test_tsds_draws_in_proportion_and_near_duplicates_share():
    x = np.concatenate([np.zeros((30, 2)), [[0.3, 0.0], [0.0, 0.3]]])
    target = Pool(features=np.zeros((1, 2)))
    settings = {"sigma": 0.1, "neighbours": 32, "scale": 0.1}
    share = TSDSSelector(**settings).fit(named(32, features=x), target).probabilities_
    assert share[30] == pytest.approx(30 * share[0]) or share[30] == 0.0
    draws = [int(TSDSSelector(**settings, seed=s).fit(named(32, features=x), target).select(1)[0]) for s in range(200)]
    expected = share[30:].sum()
    assert abs(np.mean(np.array(draws) >= 30) - expected) < 4 * np.sqrt(max(expected * (1 - expected), 0.01) / 200)


def test_tsds_rows_without_mass_follow_by_distance():
    x, y = R.standard_normal((120, 3)), R.standard_normal((4, 3))
    found = TSDSSelector(neighbours=5, sigma=0.0).fit(named(120, features=x), Pool(features=y))
    support = found.probabilities_ > 0
    order = found.select(120)
    assert set(order[: support.sum()].tolist()) == set(np.flatnonzero(support).tolist())
    nearest = ((x[:, None] - y[None]) ** 2).sum(-1).min(1)
    assert (np.diff(nearest[order[support.sum() :]]) >= 0).all()


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_neighbours_and_densities_are_exact(dtype):
    x, y = (R.standard_normal((300, 5)) + 9).astype(dtype), (R.standard_normal((11, 5)) + 9).astype(dtype)
    x[5:9] = x[4]
    found = nearest_rows(x, y, 40, chunk=13)
    cost = ((x[:, None].astype(float) - y.astype(float)) ** 2).sum(-1)
    order = np.lexsort((np.tile(np.arange(300), (11, 1)), cost.T), axis=1)[:, :40]
    assert (found.rows == order).all()
    np.testing.assert_allclose(found.squared, np.take_along_axis(cost.T, order, 1), rtol=1e-12)
    assert (found.row_nearest == cost.argmin(1)).all()
    np.testing.assert_allclose(found.row_squared, cost.min(1), rtol=1e-12)
    wide = x.astype(float)
    kernel = np.maximum(1 - ((wide[:, None] - wide[None]) ** 2).sum(-1) / 4.0, 0).sum(1)
    np.testing.assert_allclose(kernel_densities(wide, np.arange(300), 2.0, chunk=37), kernel, rtol=1e-9)


# ------------------------------------------------------------------------------------------------ less


@pytest.mark.parametrize("similarity", ["cosine", "inner"])
def test_less_is_the_best_subsets_mean_similarity(similarity):
    x, y = R.standard_normal((50, 8)), R.standard_normal((12, 8))
    x[3] = 0.0
    domains = ["mmlu", "bbh", None] * 4
    weights = (3.0, 1.0)
    found = LessSelector(similarity=similarity, checkpoint_weights=weights, chunk=9)
    found.fit(Pool(features=x), Pool(features=y, domains=domains))

    def product(u, v):
        size = np.linalg.norm(u) * np.linalg.norm(v) if similarity == "cosine" else 1.0
        return float(u @ v) / size if size else 0.0

    for i in range(50):
        by_subset = {}
        for name in set(domains):
            rows = [j for j in range(12) if domains[j] == name]
            by_subset[name] = np.mean(
                [0.75 * product(x[i, :4], y[j, :4]) + 0.25 * product(x[i, 4:], y[j, 4:]) for j in rows]
            )
        assert found.scores_[i] == pytest.approx(-max(by_subset.values()), abs=1e-12)
        assert by_subset[found.subset_[i]] == pytest.approx(max(by_subset.values()), abs=1e-12)


@pytest.mark.parametrize(("kind", "dim"), [("rademacher", 1024), ("srht", 1024)])
def test_projections_keep_inner_products(kind, dim):
    x = R.standard_normal((40, 3000)).astype(np.float32)
    x[20:] = x[:20] + 0.5 * x[20:]
    made = RandomProjection(dim, seed=2, kind=kind)
    low = made.project(x)
    assert low.shape == (40, dim) and low.dtype == np.float32
    size = np.linalg.norm(x, axis=1)
    gap = (low @ low.T - x @ x.T) / np.outer(size, size)
    assert abs(gap.mean()) < 0.02 and gap.std() < 1.5 * np.sqrt(2 / dim)
    np.testing.assert_allclose(made.project(x, chunk=7), low, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(made.project(x[3:4] + x[5:6])[0], low[3] + low[5], atol=1e-3)  # linear
    assert (RandomProjection(dim, seed=2, kind=kind).project(x) == low).all()
    assert not np.allclose(RandomProjection(dim, seed=3, kind=kind).project(x), low)


def test_srht_is_the_hadamard_matrix_with_signs_and_rows_drawn():
    from scipy.linalg import hadamard

    made = RandomProjection(16, seed=1, kind="srht")
    columns = made.project(np.eye(13, dtype=np.float32)) * np.sqrt(16)
    signed = hadamard(16)[:13]
    assert np.abs(columns).max() == np.abs(columns).min() == 1.0
    for row, reference in zip(columns, signed, strict=True):
        assert (row == reference).all() or (row == -reference).all()


def test_projection_refuses():
    with pytest.raises(SelectionError, match="ask for at most 16"):
        RandomProjection(17, kind="srht").project(np.ones((2, 13)))
    with pytest.raises(SelectionError, match="row 1 holds a NaN"):
        RandomProjection(3).project(np.array([[1.0, 2.0], [np.nan, 1.0]]))
    with pytest.raises(SelectionError, match="kind"):
        RandomProjection(3, kind="gaussian")


# ------------------------------------------------------------------------------------------------ perplexity, length


def test_perplexity_low_middle_high():
    losses = np.array([3.0, 1.0, 2.0, 9.0, 4.0, 5.0, 2.0])
    pool = named(7, losses=losses)
    assert PerplexitySelector(keep="low").fit(pool, pool).select(3).tolist() == [1, 2, 6]
    assert PerplexitySelector(keep="high").fit(pool, pool).select(2).tolist() == [3, 5]
    middle = PerplexitySelector(keep="middle").fit(pool, pool)
    assert middle.select(1).tolist() == [0]  # the median
    assert middle.scores_[2] == middle.scores_[6]  # equal losses score alike
    texts = named(7, texts=[str(loss) for loss in losses])
    measured = PerplexitySelector(keep="low", measure=lambda batch: [float(text) for text in batch]).fit(texts, texts)
    assert (measured.losses_ == losses).all() and measured.select(3).tolist() == [1, 2, 6]


def test_length_by_both_units():
    pool = named(4, texts=["a b c", "longestword", "", "a b"])
    target = Pool(texts=["x"])
    assert LengthSelector(prefer="long").fit(pool, target).select(4).tolist() == [0, 3, 1, 2]
    assert LengthSelector(prefer="short", unit="characters").fit(pool, target).select(4).tolist() == [2, 3, 0, 1]


def test_length_draw_follows_the_target():
    r = np.random.default_rng(0)
    pool = named(20_000, texts=["w " * n for n in r.integers(1, 101, 20_000)])
    target = Pool(texts=["w " * n for n in np.clip(r.normal(30, 6, 500).round().astype(int), 1, None)])
    found = LengthSelector(seed=1).fit(pool, target)
    lengths = found.lengths_[found.select(1000)]
    assert abs(lengths.mean() - 30) < 1.5 and abs(np.median(lengths) - 30) < 1.5
    aims = [len(text.split()) for text in target.texts]
    assert np.mean((lengths >= min(aims)) & (lengths <= max(aims))) > 0.97
    assert found.lengths_.mean() > 45


# ------------------------------------------------------------------------------------------------ domains


def test_quotas_are_largest_remainders():
    sizes = np.array([100, 100, 100])
    assert allocate_quotas(np.array([0.5, 0.3, 0.2]), sizes, 7).tolist() == [4, 2, 1]
    assert allocate_quotas(np.array([1, 1, 1]) / 3, sizes, 100).tolist() == [34, 33, 33]
    assert allocate_quotas(np.array([0.5, 0.3, 0.2]), np.array([2, 100, 100]), 50).tolist() == [2, 29, 19]
    assert allocate_quotas(np.array([1.0, 0.0, 0.0]), np.array([5, 30, 10]), 25).tolist() == [5, 15, 5]
    for _ in range(200):
        shares, sizes = R.dirichlet(np.ones(6)), R.integers(0, 40, 6)
        budget = int(R.integers(1, max(2, sizes.sum() + 1)))
        if budget > sizes.sum():
            continue
        given = allocate_quotas(shares, sizes, budget)
        assert given.sum() == budget and (given >= 0).all() and (given <= sizes).all()
        exact = shares * budget
        if (sizes >= np.ceil(exact)).all():
            assert (np.abs(given - exact) < 1).all()


def test_domains_fill_their_quota_with_the_best_inside():
    x = R.standard_normal((300, 3))
    domains = [("a", "b", "c", None)[i] for i in R.integers(4, size=300)]
    pool = named(300, features=x, domains=domains)
    target = Pool(features=np.zeros((4, 3)), domains=["a", "a", "c", "z"])
    with pytest.warns(UserWarning, match="too few rows for the shares of z; others get the rest"):
        found = DomainsSelector(budget=40, inside=KNNSelector()).fit(pool, target)
    assert found.quotas_ == {"a": 27, "b": 0, "c": 13}
    assert found.diagnostics_["absent"] == ["z"]
    inner = KNNSelector().fit(pool, target).scores_
    chosen = found.select(40)
    for name, quota in (("a", 27), ("c", 13)):
        rows = [i for i in range(300) if domains[i] == name]
        best = sorted(rows, key=lambda i: inner[i])[:quota]
        assert set(best) == {i for i in chosen if domains[i] == name}
    counts = Counter(domains[i] for i in chosen[:20])
    assert abs(counts["a"] - 20 * 27 / 40) <= 1  # every prefix mixes as the whole does


def test_domains_without_enough_rows_hand_their_share_on():
    pool = named(50, domains=["a"] * 5 + ["b"] * 45)
    with pytest.warns(UserWarning, match="too few rows for the shares of a; others get the rest"):
        found = DomainsSelector(budget=30, shares={"a": 1.0, "b": 1.0}, seed=2).fit(pool, pool)
    assert found.quotas_ == {"a": 5, "b": 25} and found.diagnostics_["short"] == ["a"]
    inside = RandomSelector(seed=2).fit(pool, pool).scores_
    taken = [i for i in found.select(30) if i >= 5]
    assert set(taken) == set((5 + np.argsort(inside[5:])[:25]).tolist())


def test_ties_at_the_cut_of_a_domain_are_counted():
    texts = ["w " * n for n in [5] * 30 + [6] * 30 + [9] * 30]
    pool = named(90, texts=texts, domains=["a", "b", "c"] * 30)
    inside = LengthSelector(prefer="short")
    found = DomainsSelector(budget=12, shares={"a": 2.0, "b": 2.0}, inside=inside).fit(pool, pool)
    assert found.quotas_ == {"a": 6, "b": 6, "c": 0} and found.ties(12) == 20
    found.set_params(budget=20).fit(pool, pool)
    assert found.ties(20) == 0 and RandomSelector(seed=0).fit(pool, pool).ties(20) == 0


def test_domains_of_the_target_count_by_weight():
    pool = named(50, domains=["a"] * 25 + ["b"] * 25)
    target = Pool(domains=["a", "b", "b"], weights=np.array([6.0, 1.0, 1.0]))
    assert DomainsSelector(budget=20).fit(pool, target).quotas_ == {"a": 15, "b": 5}
