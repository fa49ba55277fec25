"""The transport solver beside independent references: POT's Sinkhorn, the linear programme, finite differences."""

import numpy as np
import pytest

from flatshift.selection import sinkhorn_potentials

ot = pytest.importorskip("ot")


def problem(n, m, d, seed, weighted):
    r = np.random.default_rng(seed)
    x, y = r.standard_normal((n, d)), 0.7 * r.standard_normal((m, d)) + 0.4
    a, b = (r.random(n) + 0.1, r.random(m) + 0.1) if weighted else (np.ones(n), np.ones(m))
    return x, y, a / a.sum(), b / b.sum()


def pot(x, y, a, b, epsilon, method="sinkhorn_log"):
    """POT's potentials in our convention: its plan is exp((f + g − C)/ε) without weights, so its f holds ε log a."""
    cost = ot.dist(x, y)
    log = ot.sinkhorn(a, b, cost, epsilon, method=method, numItermax=200_000, stopThr=1e-14, log=True)[1]
    u, v = (log["log_u"], log["log_v"]) if "log_u" in log else (np.log(log["u"]), np.log(log["v"]))
    return epsilon * (u - np.log(a)), epsilon * (v - np.log(b))


@pytest.mark.parametrize("weighted", [False, True], ids=["uniform", "weighted"])
@pytest.mark.parametrize(
    ("n", "m", "d", "epsilon", "method"),
    [
        (500, 100, 16, 0.05, "sinkhorn_log"),
        (500, 100, 16, 0.05, "sinkhorn"),
        (60, 20, 4, 0.02, "sinkhorn_log"),
        (20, 60, 4, 0.1, "sinkhorn_log"),
        (33, 33, 3, 0.5, "sinkhorn"),
    ],
)
def test_scores_equal_converged_pot(n, m, d, epsilon, method, weighted):
    x, y, a, b = problem(n, m, d, n + m, weighted)
    ours = sinkhorn_potentials(x, y, a=a, b=b, epsilon=epsilon)
    cost = ot.dist(x, y)
    assert ours.mean_cost == pytest.approx(a @ cost @ b, rel=1e-12)
    assert ours.epsilon == pytest.approx(epsilon * (a @ cost @ b), rel=1e-12)
    f, g = pot(x, y, a, b, ours.epsilon, method)
    assert ours.converged and ours.marginal_error <= 1e-9
    assert np.abs(ours.scores - (f - a @ f)).max() <= 1e-6
    assert np.abs((ours.g - b @ ours.g) - (g - b @ g)).max() <= 1e-6
    assert (np.argsort(ours.scores)[:10] == np.argsort(f - a @ f)[:10]).all()


def test_the_error_reported_is_the_error_of_the_plan():
    x, y, a, b = problem(200, 50, 5, 0, True)
    ours = sinkhorn_potentials(x, y, a=a, b=b, epsilon=0.05, tolerance=1e-4)
    plan = a[:, None] * b * np.exp((ours.f[:, None] + ours.g - ot.dist(x, y)) / ours.epsilon)
    assert np.abs(plan.sum(1) - a).sum() < 1e-12
    assert np.abs(plan.sum(0) - b).sum() == pytest.approx(ours.marginal_error, rel=1e-6)
    assert ours.marginal_error <= 1e-4
    value = (plan * ot.dist(x, y)).sum() + ours.epsilon * (plan * np.log(plan / (a[:, None] * b))).sum()
    assert ours.dual_value == pytest.approx(value, abs=1e-3 * value)


def test_small_epsilon_approaches_the_linear_programme():
    x, y, a, b = problem(30, 12, 3, 7, True)
    cost = ot.dist(x, y)
    exact = ot.emd2(a, b, cost)
    gaps = []
    for epsilon in (0.1, 0.01, 0.001):
        ours = sinkhorn_potentials(x, y, a=a, b=b, epsilon=epsilon)
        assert ours.converged
        gaps.append(ours.dual_value - exact)
    # OT_ε lies between OT and OT + ε·H, H ≤ log of the smaller side
    assert 0 <= gaps[2] <= gaps[1] <= gaps[0]
    assert gaps[2] <= 0.001 * ours.mean_cost * np.log(12 / b.min())
    plan = a[:, None] * b * np.exp((ours.f[:, None] + ours.g - cost) / ours.epsilon)
    assert (plan * cost).sum() == pytest.approx(exact, rel=1e-3)
    f, g = ours.f, ours.g
    assert (f[:, None] + g - cost).max() <= 0.001 * ours.mean_cost * (-np.log(a.min() * b.min()))


def test_scores_are_the_gradient_of_the_cost_in_mass():
    x, y, a, b = problem(25, 9, 3, 5, True)
    base = sinkhorn_potentials(x, y, a=a, b=b, epsilon=0.2)

    def value(weights):
        moved = weights / weights.sum()
        mean_cost = moved @ ot.dist(x, y) @ b
        return sinkhorn_potentials(x, y, a=moved, b=b, epsilon=base.epsilon / mean_cost, tolerance=1e-12).dual_value

    h = 1e-5
    for i in range(0, 25, 4):
        towards = np.eye(25)[i] - a
        numeric = (value(a + h * towards) - value(a - h * towards)) / (2 * h)
        assert numeric == pytest.approx(base.scores[i], abs=1e-6)
    best = int(np.argmin(base.scores))
    assert base.scores[best] < 0 and value(a + 0.01 * (np.eye(25)[best] - a)) < base.dual_value


def test_splitting_a_row_into_two_changes_no_score():
    x, y, a, b = problem(40, 15, 3, 11, True)
    whole = sinkhorn_potentials(x, y, a=a, b=b, epsilon=0.05)
    halves = np.concatenate([a, [a[0] / 2]])
    halves[0] /= 2
    split = sinkhorn_potentials(np.vstack([x, x[:1]]), y, a=halves, b=b, epsilon=0.05)
    np.testing.assert_allclose(split.scores[:-1], whole.scores, atol=1e-7)
    assert split.scores[-1] == pytest.approx(whole.scores[0], abs=1e-7)
