"""GOT-D in rounds, debiased and with negatives, against finite differences and naive solutions of their definitions."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from flatshift.selection import GotDContrastSelector, GotDSelector, Pool, sinkhorn_potentials
from flatshift.selection.methods.base import mean_cost
from flatshift.selection.methods.debias import self_potential
from flatshift.selection.methods.rounds import _hold_out, choose_in_rounds
from flatshift.selection.transport.solver import Potentials

R = np.random.default_rng(3)
CENTRES = R.standard_normal((8, 5)) * 2


def clustered(count, shares, seed):
    r = np.random.default_rng(seed)
    return CENTRES[r.choice(8, count, p=shares)] + 0.5 * r.standard_normal((count, 5))


def named(features, prefix, weights=None):
    return Pool(ids=[f"{prefix}{i}" for i in range(len(features))], features=features, weights=weights)


def cost_of(x, y):
    return ((x[:, None] - y[None]) ** 2).sum(-1)


def transport(weights, x, y, epsilon):
    """OT_ε at an absolute ε, uniform target."""
    relative = epsilon / float(weights @ cost_of(x, y).mean(1))
    return sinkhorn_potentials(x, y, a=weights, epsilon=relative, tolerance=1e-12).dual_value


def naive_self(x, a, epsilon):
    """OT_ε(α, α) by damped symmetric iterations in logarithms; returns potential and value."""
    kernel = -cost_of(x, x) / epsilon
    p = np.zeros(len(x))
    with np.errstate(divide="ignore"):
        log_a = np.log(a)
    for _ in range(3000):
        p = 0.5 * (p - epsilon * np.logaddexp.reduce(kernel + p[None] / epsilon + log_a[None], axis=1))
    return p, 2.0 * float(a @ p)


# ------------------------------------------------------------------------------------------------ debiased


@pytest.mark.parametrize("weighted", [False, True])
def test_the_potential_of_a_pool_to_itself(weighted):
    x = R.standard_normal((60, 3)) + 4.0
    a = R.random(60) + 0.1 if weighted else np.ones(60)
    a[:5] = 0.0 if weighted else 1.0
    p, sample, change = self_potential(named(x, "p", a), epsilon=0.3, sample=60, seed=0, chunk=7)
    naive, _ = naive_self(x, a / a.sum(), 0.3)
    np.testing.assert_allclose(p, naive, atol=1e-8)
    assert sample == int((a > 0).sum()) and change < 1e-9


def test_the_debiased_score_is_the_gradient_of_the_divergence():
    x, y = R.standard_normal((40, 3)), R.standard_normal((15, 3)) + 0.5
    a = R.random(40) + 0.2
    a /= a.sum()
    found = GotDSelector(epsilon=0.2, tolerance=1e-12, debiased=True).fit(named(x, "p", a), named(y, "t"))
    epsilon = found.potentials_.epsilon

    def divergence(weights):
        return transport(weights, x, y, epsilon) - 0.5 * naive_self(x, weights, epsilon)[1]

    for i in (0, 7, 19, 33):
        towards = np.eye(40)[i] - a
        numeric = (divergence(a + 1e-5 * towards) - divergence(a - 1e-5 * towards)) / 2e-5
        assert found.scores_[i] == pytest.approx(numeric, abs=1e-6)
    assert abs(a @ found.scores_) < 1e-12


def test_cosine_is_the_squared_distance_of_unit_rows():
    x, y = R.standard_normal((120, 4)) + 0.5, R.standard_normal((30, 4)) + 1.0
    unit = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (x, y)]
    for settings in ({"debiased": True}, {"rounds": 3, "budget": 12}):
        cosine = GotDSelector(cost="cosine", tolerance=1e-11, **settings).fit(named(x, "p"), named(y, "t"))
        given = GotDSelector(tolerance=1e-11, **settings).fit(named(unit[0], "p"), named(unit[1], "t"))
        np.testing.assert_allclose(2 * cosine.scores_, given.scores_, atol=1e-8)
        assert (cosine.select(12) == given.select(12)).all()


def test_a_sample_stands_for_the_pool_without_a_gap_between_drawn_and_not():
    # High dimension and small ε, where a row's own term outweighs all others: the trap of a naive subsample.
    x = R.standard_normal((900, 48))
    pool, epsilon = named(x, "p"), 0.05 * 2 * 48
    exact, _, _ = self_potential(pool, epsilon=epsilon, sample=900, seed=0)
    sampled, count, _ = self_potential(pool, epsilon=epsilon, sample=300, seed=0)
    assert count == 300
    assert np.abs(sampled - exact).max() < 0.02 * np.abs(exact).max()
    crowded = np.concatenate([R.standard_normal((600, 4)) * 0.3, R.standard_normal((300, 4)) * 2 + 3])
    pool = named(crowded, "c")
    exact, _, _ = self_potential(pool, epsilon=0.3, sample=900, seed=0)
    sampled, _, _ = self_potential(pool, epsilon=0.3, sample=400, seed=0)
    assert np.corrcoef(exact, sampled)[0, 1] > 0.99
    assert exact[:600].mean() < exact[600:].mean()  # low where the pool is dense: subtracting it raises those scores


def test_debiasing_takes_away_the_pull_to_the_middle():
    # Pool and target are draws of one distribution: entropy alone makes plain duals prefer its middle.
    x, y = R.standard_normal((500, 2)), R.standard_normal((500, 2))
    radius = np.linalg.norm(x, axis=1)
    plain = GotDSelector(epsilon=0.5).fit(named(x, "p"), named(y, "t")).scores_
    debiased = GotDSelector(epsilon=0.5, debiased=True).fit(named(x, "p"), named(y, "t")).scores_
    assert np.corrcoef(plain, radius)[0, 1] > 0.8
    assert abs(np.corrcoef(debiased, radius)[0, 1]) < 0.45
    assert debiased.std() < 0.6 * plain.std()


# ------------------------------------------------------------------------------------------------ rounds


@pytest.fixture(scope="module")
def shifted():
    pool_shares = np.array([0.3, 0.3, 0.2, 0.1, 0.04, 0.03, 0.02, 0.01])
    target_shares = pool_shares[::-1].copy()
    return (
        named(clustered(1200, pool_shares, 1), "p"),
        named(clustered(120, target_shares, 2), "t"),
        clustered(300, target_shares, 4),
    )


def mixture_cost(selector, pool, target, budget, share, epsilon):
    weights = np.full(len(pool), (1 - share) / len(pool))
    weights[selector.select(budget)] += share / budget
    return transport(weights, pool.features, target, epsilon)


def test_rounds_mend_what_one_step_overshoots(shifted):
    pool, target, fresh = shifted
    budget = 24
    once = GotDSelector().fit(pool, target)
    rounds = GotDSelector(rounds=6, budget=budget, seed=1).fit(pool, target)
    epsilon = once.potentials_.epsilon
    before = transport(np.full(len(pool), 1 / len(pool)), pool.features, fresh, epsilon)
    single = mixture_cost(once, pool, fresh, budget, 0.5, epsilon)
    several = mixture_cost(rounds, pool, fresh, budget, 0.5, epsilon)
    assert several < 0.8 * before and several < 0.8 * single
    held = rounds.diagnostics_["held_out"]
    assert len(held) == 6 and rounds.diagnostics_["rounds"] == [4] * np.argmin(held) + [24 - 4 * int(np.argmin(held))]


def test_a_round_is_the_naive_solution_at_its_mixture(shifted):
    pool, target, _ = shifted
    budget, parts, share = 12, 3, 0.4
    found = GotDSelector(rounds=parts, budget=budget, mixture=share, holdout=0.0, tolerance=1e-11).fit(pool, target)
    x, y = pool.features, target.features
    cost = cost_of(x, y)
    first = sinkhorn_potentials(x, y, tolerance=1e-11)
    weights = np.full(len(x), 1 / len(x))
    chosen: list[int] = []
    for _ in range(parts):
        solved = sinkhorn_potentials(
            x, y, a=weights, epsilon=first.epsilon / float(weights @ cost.mean(1)), tolerance=1e-11
        )
        assert solved.epsilon == pytest.approx(first.epsilon, rel=1e-9)
        free = [i for i in np.argsort(solved.scores) if i not in chosen][: budget // parts]
        np.testing.assert_allclose(found.gradients_[free], solved.scores[free], atol=1e-7)
        chosen += free
        weights = np.full(len(x), (1 - share) / len(x))
        weights[chosen] += share / len(chosen)
    assert found.select(budget).tolist() == chosen
    rest = np.setdiff1d(np.arange(len(x)), chosen)
    np.testing.assert_allclose(found.scores_[rest], solved.scores[rest], atol=1e-7)
    assert found.diagnostics_["held_out"] == [] and found.diagnostics_["rounds"] == [4, 4, 4]


def test_never_worse_than_one_step_on_what_was_held_out(shifted):
    pool, target, _ = shifted
    solver = GotDSelector()
    kept, held = _hold_out(target, 0.25, 5)
    assert len(held) == 30 and sorted([*kept, *held]) == list(range(120))
    found = choose_in_rounds(
        pool, target, solver._solve, epsilon=0.05, budget=400, rounds=4, mixture=0.05, holdout=0.25, seed=5
    )
    best = int(np.argmin(found.held_out))
    assert len(found.batches) == best + 1 and sum(map(len, found.batches)) == 400
    share = 0.05
    weights = np.full(len(pool), (1 - share) / len(pool))
    weights[np.concatenate(found.batches)] += share / 400
    measured = transport(weights, pool.features, target.features[held], found.one_shot.epsilon)
    assert measured == pytest.approx(found.held_out[best], rel=1e-7)


def test_small_targets_hold_nothing_out():
    target = named(R.standard_normal((3, 2)), "t")
    kept, held = _hold_out(target, 0.25, 0)
    assert kept.tolist() == [0, 1, 2] and len(held) == 0
    found = GotDSelector(rounds=9, budget=4).fit(named(R.standard_normal((30, 2)), "p"), target)
    assert found.diagnostics_["rounds"] == [1, 1, 1, 1]  # never more rounds than rows to choose


def test_rounds_on_points_that_coincide_go_by_file_order():
    pool, target = named(np.ones((30, 2)), "p"), named(np.ones((9, 2)), "t")
    found = GotDSelector(rounds=3, budget=6).fit(pool, target)
    assert found.select(6).tolist() == list(range(6)) and found.diagnostics_["converged"]


def test_rounds_hold_one_rounds_scores():
    n, calls = 100_000, []
    r = np.random.default_rng(0)
    x, y = r.standard_normal((n, 2)).astype(np.float32), r.standard_normal((40, 2))

    def solve(x, y, a, b, epsilon, held_bytes=0):
        calls.append(held_bytes)
        f = r.standard_normal(n)
        nearest = np.zeros(n, dtype=np.int64)
        found = Potentials(f, np.zeros(len(y)), f - f.mean(), nearest, 0.0, 1.0, 0.1, 2.0, 1e-3, True, 1, 1, "", "")
        return replace(found, dual_value=float(len(calls)))

    pool, target = named(x, "p"), named(y, "t")
    tracemalloc.start()
    found = choose_in_rounds(pool, target, solve, epsilon=0.05, budget=80, rounds=8, mixture=0.5, holdout=0.25, seed=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found.held_out) == 8 and calls[0] == 0 and set(calls[1:]) == {50 * n}
    assert peak < 130 * n  # a round's solution is 24 bytes a row: eight of them would be 192


def test_the_mean_cost_of_a_mixture_is_the_naive_one():
    x, y, b = R.standard_normal((50, 3)).astype(np.float32), R.standard_normal((9, 3)), R.random(9)
    a, index = R.random(50), np.array([3, 4, 40])
    cost = cost_of(x.astype(np.float64), y) @ (b / b.sum())
    assert mean_cost(x, y, weights=a, target_weights=b) == pytest.approx(a / a.sum() @ cost, rel=1e-12)
    assert mean_cost(x, y, target_weights=b, index=index) == pytest.approx(cost[index].mean(), rel=1e-12)
    unit = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (x.astype(np.float64), y)]
    cosine = (1 - unit[0] @ unit[1].T) @ (b / b.sum())
    assert mean_cost(x, y, target_weights=b, index=index, cost="cosine") == pytest.approx(
        cosine[index].mean(), rel=1e-12
    )


# ------------------------------------------------------------------------------------------------ negatives


def test_contrast_goes_to_the_target_and_away_from_the_negatives():
    x = np.concatenate([CENTRES[i] + 0.3 * R.standard_normal((50, 5)) for i in range(3)])
    target, negative = CENTRES[0] + 0.3 * R.standard_normal((20, 5)), CENTRES[1] + 0.3 * R.standard_normal((20, 5))
    pool, aim, avoid = named(x, "p"), named(target, "t"), Pool(features=negative)
    order = GotDContrastSelector().fit(pool, aim, negative=avoid).select(150) // 50
    assert (order[:45] == 0).all() and (order[-45:] == 1).all()
    only = GotDContrastSelector(attract=0.0).fit(pool, aim, negative=avoid)
    assert (only.select(150)[-45:] // 50 == 1).all()
    towards = GotDSelector().fit(pool, aim).scores_
    away = GotDSelector().fit(pool, avoid).scores_
    np.testing.assert_allclose(only.scores_, -away, atol=1e-12)
    weighed = GotDContrastSelector(attract=0.5, repel=2.0).fit(pool, aim, negative=avoid)
    np.testing.assert_allclose(weighed.scores_, 0.5 * towards - 2.0 * away, atol=1e-12)


def test_the_sign_of_contrast_by_moving_mass():
    x, y = R.standard_normal((80, 3)), R.standard_normal((20, 3)) + 0.7
    found = GotDContrastSelector(attract=0.0).fit(named(x, "p"), named(y, "t"), negative=Pool(features=y))
    a = np.full(80, 1 / 80)
    epsilon = sinkhorn_potentials(x, y).epsilon
    moved = {}
    for name, rows in (("best", found.select(8)), ("worst", found.select(80)[-8:])):
        weights = 0.98 * a
        weights[rows] += 0.02 / 8
        moved[name] = transport(weights, x, y, epsilon) - transport(a, x, y, epsilon)
    assert moved["best"] > 0 > moved["worst"]  # more of the best takes the pool away from the negatives
