"""The check of a selection against naive solutions, finite differences, exhaustive search and planted rows."""

from itertools import combinations

import numpy as np
import pytest

from flatshift.selection import GotDSelector, Pool
from flatshift.selection.checks.check import SHARES, MixtureTransport, check_selection, sample_pool, self_transport
from flatshift.selection.checks.coverage import target_coverage
from flatshift.selection.methods.base import mean_cost

R = np.random.default_rng(11)


def costs(x, y, cost="sqeuclidean"):
    if cost == "cosine":
        x, y = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in (x, y))
        return 1.0 - x @ y.T
    return ((x[:, None] - y[None]) ** 2).sum(-1)


def naive(weights, x, y, epsilon, cost="sqeuclidean", iterations=1000):
    """OT_ε and the row potential, by plain Sinkhorn in logarithms; rows of weight 0 have a potential too."""
    matrix = -costs(x, y, cost) / epsilon
    with np.errstate(divide="ignore"):
        log_a, log_b = np.log(weights), np.full(len(y), -np.log(len(y)))
    g = np.zeros(len(y))
    for _ in range(iterations):
        f = -np.logaddexp.reduce(matrix + g + log_b, axis=1)
        g = -np.logaddexp.reduce(matrix + f[:, None] + log_a[:, None], axis=0)
    f = -np.logaddexp.reduce(matrix + g + log_b, axis=1)
    return epsilon * (float(weights @ f) + g.mean()), epsilon * f


def naive_self(x, weights, epsilon, cost="sqeuclidean"):
    held = weights > 0
    matrix = -costs(x[held], x[held], cost) / epsilon
    log_a, p = np.log(weights[held]), np.zeros(held.sum())
    for _ in range(500):
        p = 0.5 * (p - np.logaddexp.reduce(matrix + p[None] + log_a[None], axis=1))
    return 2.0 * epsilon * float(weights[held] @ p)


def refit(x, y):
    """GOT-D again, as the command does it."""

    def choose(rows, targets, mass, budget):
        chooser = GotDSelector(budget=budget).fit(Pool(features=x[rows], weights=mass), Pool(features=y[targets]))
        return chooser.select(budget)

    return choose


@pytest.mark.parametrize("cost", ["sqeuclidean", "cosine"])
def test_values_at_mixtures_are_the_naive_ones(cost):
    x, y = R.standard_normal((30, 4)) + 1.0, R.standard_normal((9, 4)) + 2.0
    epsilon = 0.1 * costs(x, y, cost).mean()
    mixtures = MixtureTransport(x, y, epsilon=epsilon, cost=cost)
    assert mean_cost(x, y, weights=np.full(30, 1 / 30), cost=cost) == pytest.approx(costs(x, y, cost).mean(), rel=1e-12)
    start = None
    for share in (0.0, *SHARES):
        weights = np.full(30, (1 - share) / 30)
        weights[[3, 7, 8]] += share / 3
        value, f = naive(weights, x, y, epsilon, cost)
        found = mixtures.at(weights, start)
        start = found.g
        assert found.value == pytest.approx(value, abs=1e-7 * epsilon) and found.error <= 1e-6
        np.testing.assert_allclose(found.f - weights @ found.f, f - weights @ f, atol=1e-4 * epsilon)
        own = self_transport(x, weights[None], epsilon=epsilon, cost=cost)
        assert own[0] == pytest.approx(naive_self(x, weights, epsilon, cost), abs=1e-6 * epsilon)


def test_a_check_of_a_small_problem_is_exact():
    x, y = R.standard_normal((40, 3)), R.standard_normal((12, 3)) + np.array([1.5, 0.0, 0.0])
    selector = GotDSelector(budget=4).fit(Pool(features=x), Pool(features=y))
    order, epsilon = selector.select(40), selector.potentials_.epsilon
    found = check_selection(x, y, order, budget=4, epsilon=epsilon, refit=refit(x, y), splits=2)
    uniform = np.full(40, 1 / 40)
    before, f = naive(uniform, x, y, epsilon)
    assert found.distance == pytest.approx(before, rel=1e-7) and found.sample.budget == 4
    own = naive_self(x, uniform, epsilon)
    for reading in found.fitted["selection"]:
        weights = (1 - reading.share) * uniform
        weights[order[:4]] += reading.share / 4
        after, moved = naive(weights, x, y, epsilon)
        assert reading.realised == pytest.approx(after - before, abs=1e-6 * before)
        assert reading.predicted == pytest.approx(reading.share * (f[order[:4]].mean() - f.mean()), rel=1e-4)
        gap = reading.share * (moved[order[:4]].mean() - np.sort(moved)[:4].mean())
        assert reading.gap == pytest.approx(gap, abs=1e-4 * before) and reading.gap >= -1e-9
        change = after - before - 0.5 * (naive_self(x, weights, epsilon) - own)
        assert reading.debiased == pytest.approx(change, abs=1e-6 * before)
        assert reading.ratio <= 1 + 1e-6, "convexity: the promise is optimistic"
    # The derivative at λ = 0 is the prediction.
    step = np.full(40, (1 - 1e-4) / 40)
    step[order[:4]] += 1e-4 / 4
    slope = (naive(step, x, y, epsilon)[0] - before) / 1e-4
    assert found.fitted["selection"][0].predicted / SHARES[0] == pytest.approx(slope, rel=1e-2)


def test_the_gap_bounds_the_best_selection_of_all():
    x, y = R.standard_normal((12, 2)), R.standard_normal((10, 2)) + np.array([1.0, 0.5])
    selector = GotDSelector(budget=3).fit(Pool(features=x), Pool(features=y))
    epsilon = selector.potentials_.epsilon
    found = check_selection(x, y, selector.select(12), budget=3, epsilon=epsilon, refit=refit(x, y), splits=1)
    mixtures = MixtureTransport(x, y, epsilon=epsilon)
    for reading in found.fitted["selection"]:
        best = np.inf
        for rows in combinations(range(12), 3):
            weights = np.full(12, (1 - reading.share) / 12)
            weights[list(rows)] += reading.share / 3
            best = min(best, mixtures.at(weights).value)
        assert found.distance + reading.realised - reading.gap <= best + 1e-6 * found.distance
        assert found.distance + reading.realised >= best - 1e-6 * found.distance


def test_unseen_halves_are_judged_with_what_the_other_half_chose():
    x, y = R.standard_normal((60, 3)), R.standard_normal((20, 3)) + 1.0
    asked = []

    def choose(rows, targets, mass, budget):
        asked.append((rows, targets, mass, budget))
        return np.array([5, 6, 7])

    found = check_selection(x, y, R.permutation(60), budget=3, epsilon=1.0, refit=choose, splits=3, seed=4)
    assert len(asked) == 3 and found.held_out["selection"].shape == (3, len(SHARES))
    for split, (rows, targets, mass, budget) in enumerate(asked):
        assert (rows == np.arange(60)).all() and budget == 3 and mass.sum() == pytest.approx(1)
        unseen = np.setdiff1d(np.arange(20), targets)
        assert len(targets) == len(unseen) == 10
        before, _ = naive(mass, x, y[unseen], 1.0)
        assert found.held_distance[split] == pytest.approx(before, rel=1e-7)
        for place, share in enumerate(SHARES):
            weights = (1 - share) * mass
            weights[[5, 6, 7]] += share / 3
            after, _ = naive(weights, x, y[unseen], 1.0)
            assert found.held_out["selection"][split, place] == pytest.approx(after - before, abs=1e-6 * before)
    again = check_selection(x, y, np.arange(60), budget=3, epsilon=1.0, refit=choose, splits=3, seed=4)
    assert (again.held_out["random"] == found.held_out["random"]).all(), "a seed fixes halves and draws"


def test_a_sample_stands_for_the_pool():
    order = np.random.default_rng(1).permutation(10_000)
    weights = np.random.default_rng(2).random(10_000)
    sample = sample_pool(order, 200, weights=weights, size=1000, seed=3)
    assert len(sample.rows) == 1000 and (np.diff(sample.rows) > 0).all()
    assert sample.records.sum() == pytest.approx(10_000) and sample.mass.sum() == pytest.approx(1)
    assert set(sample.rows[sample.chosen]) <= set(order[:200]) and sample.budget == 100
    assert np.isin(sample.rows, order[:1000]).sum() == 500, "half of it among five budgets' best ranks"
    near = sample.records[np.isin(sample.rows, order[:1000])]
    assert (near == 2.0).all(), "the selection and the ranks behind it are drawn at one rate"
    assert sample.mass @ np.arange(10_000)[sample.rows] == pytest.approx(
        weights @ np.arange(10_000) / weights.sum(), rel=0.05
    )
    small = sample_pool(np.array([2, 0, 1]), 1, weights=None, size=1000, seed=3)
    assert small.rows.tolist() == [0, 1, 2] and small.chosen.tolist() == [False, False, True]
    assert small.mixture(np.array([2]), 0.4) == pytest.approx([0.2, 0.2, 0.6])
    for budget in (1, 2500, 9999, 10_000):
        part = sample_pool(order, budget, weights=None, size=1000, seed=3)
        assert part.records.sum() == pytest.approx(10_000) and len(part.rows) <= 1000 and part.budget >= 1
        assert part.records[part.chosen].sum() == pytest.approx(budget, rel=0.01)


def test_a_sampled_check_is_near_the_whole_one():
    centres = R.standard_normal((6, 8)) * 2
    x = centres[R.choice(6, 6000, p=[0.4, 0.3, 0.15, 0.1, 0.04, 0.01])] + 0.4 * R.standard_normal((6000, 8))
    y = centres[R.choice(6, 200, p=[0.05, 0.05, 0.1, 0.1, 0.3, 0.4])] + 0.4 * R.standard_normal((200, 8))
    selector = GotDSelector(budget=120).fit(Pool(features=x), Pool(features=y))
    order, epsilon = selector.select(6000), selector.potentials_.epsilon
    whole = MixtureTransport(x, y, epsilon=epsilon)
    uniform = np.full(6000, 1 / 6000)
    before = whole.at(uniform)
    found = check_selection(x, y, order, budget=120, epsilon=epsilon, refit=refit(x, y), splits=1)
    assert len(found.sample.rows) == 2000
    for reading in found.fitted["selection"]:
        weights = (1 - reading.share) * uniform
        weights[order[:120]] += reading.share / 120
        realised = whole.at(weights, before.g).value - before.value
        assert reading.realised == pytest.approx(realised, abs=0.03 * before.value)


def test_warnings_say_what_failed():
    # Six corners, all equally wanted; the best rows all lie in the farthest one, so half of the mixture overshoots.
    corners = 5.0 * np.eye(6)
    corners[0] *= 1.1
    pool = [R.normal(0, 0.3, (300, 6)), *(corner + R.normal(0, 0.1, (20, 6)) for corner in corners)]
    x, y = np.concatenate(pool), np.concatenate([corner + R.normal(0, 0.1, (10, 6)) for corner in corners])
    selector = GotDSelector(budget=12).fit(Pool(features=x), Pool(features=y))
    found = check_selection(
        x, y, selector.select(420), budget=12, epsilon=selector.potentials_.epsilon, refit=refit(x, y), seed=1
    )
    told = " ".join(found.warnings())
    assert (
        "as half of the mixture the selection raises the transport distance" in told
        and "use `--method gotd --select.method.rounds 5`" in told
    )
    assert (
        "rounds" in found.held_out and found.held_out["rounds"][:, 2].mean() < found.held_out["selection"][:, 2].mean()
    )
    # The worst rows as a selection: nothing is promised.
    worst = selector.select(420)[::-1].copy()
    wrong = check_selection(x, y, worst, budget=12, epsilon=selector.potentials_.epsilon, refit=lambda *_: worst[:12])
    assert "away from the target" in wrong.warnings()[0]
    assert any("no nearer than a random draw" in sentence for sentence in wrong.warnings())
    assert wrong.fitted["selection"][0].ratio is None
    # The whole pool as a selection: what is promised is rounding.
    for rows in (x, np.ones((40, 6))):
        whole = check_selection(rows, y, np.arange(len(rows)), budget=len(rows), refit=lambda r, *_: np.arange(len(r)))
        assert len(whole.held_out) == 3 and whole.warnings() == [], "a random draw is the same"


def test_few_targets_are_not_halved_and_points_that_coincide_are_not_checked():
    x, y = R.standard_normal((30, 2)), R.standard_normal((3, 2))
    found = check_selection(x, y, np.arange(30), budget=5, refit=refit(x, y))
    assert found.held_out == {} and found.summary()["held_out"] is None and len(found.fitted["selection"]) == 4
    same = np.ones((30, 2))
    assert check_selection(same, same[:3], np.arange(30), budget=5, refit=refit(same, same[:3])) is None
    x, y = 1e-20 * x, 1e-20 * y  # however small they are
    assert check_selection(x, y, np.arange(30), budget=5, refit=refit(x, y)) is not None


def test_a_half_that_coincides_with_the_pool_is_left_out_and_told():
    x = np.ones((30, 3))
    y = np.concatenate([np.ones((11, 3)), np.eye(3)[:1]])  # one half never has the odd row
    found = check_selection(x, y, np.arange(30), budget=3, refit=refit(x, y))
    assert found.left_out == 5 and found.held_out == {} and len(found.held_distance) == 0
    assert any("of 5 splits of the target into halves, 5 have a half that coincides" in s for s in found.warnings())
    y[5] = [0.0, 1.0, 0.0]
    some = check_selection(x, y, np.arange(30), budget=3, refit=refit(x, y), splits=8)
    assert 0 < some.left_out < 8 and some.left_out + len(some.held_distance) == 8
    assert (some.held_distance > 0).all()


@pytest.mark.parametrize("cost", ["sqeuclidean", "cosine"])
def test_planted_targets_are_the_ones_that_cannot_be_served(cost):
    r = np.random.default_rng(8)
    away = np.array([6.0, 0, 0, 0, 0, 0])
    x, y = r.standard_normal((2000, 6)) + away, r.standard_normal((60, 6)) + away
    planted = [7, 31, 32]
    y[planted] = [[-9, 0, 0, 0, 0, 0], [0, 12, 0, 0, 0, 0], [0, 12.1, 0, 0, 0, 0]]
    selector = GotDSelector(cost=cost).fit(Pool(features=x), Pool(features=y))
    found = target_coverage(x, y, selector.potentials_.g, cost=cost)
    assert sorted(found.targets[found.unserved].tolist()) == planted
    assert set(found.targets[:3].tolist()) == set(planted), "and theirs are the largest potentials"
    nearest = costs(x, y[found.targets], cost)
    np.testing.assert_array_equal(found.rows, nearest.argmin(0))
    np.testing.assert_allclose(found.costs, nearest.min(0), rtol=1e-9)
    few = target_coverage(x, y[:5], np.zeros(5), cost=cost)
    assert few.limit is None and not few.unserved.any()
