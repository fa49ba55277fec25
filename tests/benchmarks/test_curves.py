"""Known answers: the closed form of least-norm risk, the tuned ridge, stability thresholds, gradient flow."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from scipy.stats import binom

from benchmarks.curves.dynamics import gradient_flow_curve, noise_curve, unstable_curve
from benchmarks.curves.known import NAMED_NULLS, NULLS, bump, bumps, log_normal, log_normal_peak
from benchmarks.curves.random_features import random_features_curve, ridge_fit
from benchmarks.curves.rates import rejections
from flatshift.experiments.statistics import peak_test
from flatshift.experiments.statistics.peak import plan_looks
from flatshift.experiments.statistics.scale import choose_scale
from flatshift.finetune.errors import UserError


def quasi_convex(mean: np.ndarray) -> bool:
    rising = np.diff(mean) > 0
    falling = np.diff(mean) < 0
    return not any(rising[k] and falling[k + 1 :].any() for k in range(len(rising)))


@pytest.mark.parametrize("kind", sorted(NULLS))
def test_nulls_have_no_peak_in_their_mean(kind):
    y = NULLS[kind](np.random.default_rng(0), 20_000, 3, 9)
    assert y.shape == (20_000, 3, 9)
    mean = np.nanmean(y[:, 1:], axis=(0, 1))  # the first seed is the one that may diverge
    assert quasi_convex(np.round(mean * 5) / 5)  # to a fifth of a standard deviation


def test_bumps_have_the_height_that_they_say():
    for points in (8, 9, 10):
        for broad in (False, True):
            mean = bumps(3.0, broad=broad)(np.random.default_rng(0), 4000, 3, points).mean((0, 1))
            middle = points // 2
            assert mean[middle] - max(mean[:middle].min(), mean[middle:].min()) == pytest.approx(3.0, abs=0.1)
    assert quasi_convex(bump(9, 0.0)) and not quasi_convex(bump(9, 1.0))


# --------------------------------------------------------------------------------------------- least squares


@dataclass(frozen=True)
class LinearModel:
    """y = x·β + noise with D independent standard normal features, of which the first p are used."""

    features: int = 400
    """D."""
    signal: float = 1.0
    """‖β‖², spread evenly over the features."""
    noise: float = 0.5
    """Variance of the noise on y (labels that nothing explains)."""

    def expected_risk(self, rows: int, used: int) -> float:
        """Expected squared error on a new row, its noise included, of the least-norm fit of `used` features to `rows`.

        Infinite where |used − rows| ≤ 1.
        """
        inside = self.signal * used / self.features
        outside = self.signal - inside + self.noise
        if used <= rows - 2:
            return outside * (1 + used / (rows - used - 1))
        if used >= rows + 2:
            return inside * (1 - rows / used) + outside * (1 + rows / (used - rows - 1))
        return float("inf")

    def best_ridge(self, used: int) -> float:
        """λ of ‖y − Xβ‖² + λ‖β‖² with the least expected risk for every number of rows: noise ÷ signal per feature.

        It is exact when β is drawn from a normal distribution of the same size, as here.
        """
        inside = self.signal * used / self.features
        return used * (self.signal - inside + self.noise) / inside

    def draw(self, rows: int, generator: np.random.Generator, beta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(x [rows, D], y [rows])."""
        x = generator.standard_normal((rows, self.features))
        return x, x @ beta + np.sqrt(self.noise) * generator.standard_normal(rows)


def mean_risk(model: LinearModel, rows: int, used: int, ridge: float | None, draws: int) -> float:
    """Average over draws of the exact risk of a fit: squared coefficient error + what no used feature explains."""
    generator = np.random.default_rng(used)
    total = 0.0
    for _ in range(draws):
        beta = generator.standard_normal(model.features)
        beta *= np.sqrt(model.signal) / np.linalg.norm(beta)
        x, y = model.draw(rows, generator, beta)
        if ridge is None:
            estimate = np.linalg.pinv(x[:, :used]) @ y
        else:
            estimate = np.linalg.solve(x[:, :used].T @ x[:, :used] + ridge * np.eye(used), x[:, :used].T @ y)
        total += np.square(estimate - beta[:used]).sum() + np.square(beta[used:]).sum() + model.noise
    return total / draws


@pytest.mark.parametrize("used", [4, 10, 14, 28, 40, 60])
def test_risk_of_the_least_norm_fit_is_the_closed_form(used):
    model = LinearModel(features=60, noise=0.5)
    assert mean_risk(model, 20, used, None, 3000) == pytest.approx(model.expected_risk(20, used), rel=0.06)


def test_closed_form_peaks_at_as_many_features_as_rows():
    model = LinearModel()
    risks = [model.expected_risk(40, p) for p in (5, 20, 38, 40, 42, 80, 320)]
    assert risks[3] == np.inf and risks[2] > 10 * risks[0] and risks[4] > 10 * risks[6]
    assert risks[6] < risks[5] < risks[4]


def test_best_ridge_is_best_and_leaves_no_peak():
    model = LinearModel(features=60, noise=0.5)
    best = model.best_ridge(20)
    at = {f: mean_risk(model, 20, 20, f * best, 1500) for f in (0.25, 1.0, 4.0)}
    assert at[1.0] < at[0.25] and at[1.0] < at[4.0]
    risks = [mean_risk(model, 20, p, model.best_ridge(p), 1500) for p in (5, 10, 15, 20, 25, 40, 60)]
    assert (np.diff(risks) < 0.01 * risks[0]).all()  # monotone, so no peak


def test_ridge_fit_is_the_normal_equations_and_its_traces_those_of_the_smoother():
    generator = np.random.default_rng(1)
    x, y = generator.normal(size=(12, 7)), generator.normal(size=12)
    x_test, y_test = generator.normal(size=(30, 7)), generator.normal(size=30)
    inverse = np.linalg.inv(x.T @ x + 0.8 * np.eye(7))
    fit = ridge_fit(x, y, x_test, y_test, 0.8)
    smoother, outside = x @ inverse @ x.T, x_test @ inverse @ x.T
    assert fit.train == pytest.approx(np.square(y - smoother @ y).mean())
    assert fit.test == pytest.approx(np.square(y_test - outside @ y).mean())
    assert fit.trace == pytest.approx(np.trace(smoother))
    assert fit.test_parameters == pytest.approx(12 * np.square(outside).sum(1).mean())


@pytest.mark.parametrize("features", [7, 12, 30])
def test_least_norm_fit_uses_as_many_parameters_as_its_rank(features):
    generator = np.random.default_rng(2)
    x, y = generator.normal(size=(12, features)), generator.normal(size=12)
    fit = ridge_fit(x, y, x[:3], y[:3])
    assert fit.trace == pytest.approx(min(12, features))
    assert (fit.train < 1e-12) == (features >= 12)


def test_effective_parameters_on_test_rows_turn_back_beyond_interpolation():
    generator = np.random.default_rng(3)
    x, y, x_test = generator.normal(size=(30, 300)), generator.normal(size=30), generator.normal(size=(200, 300))
    used = [ridge_fit(x[:, :p], y, x_test[:, :p], np.zeros(200)).test_parameters for p in (10, 30, 60, 300)]
    assert used[0] < used[1] > used[2] > used[3]


def test_random_features_peak_without_a_ridge_and_not_with_the_tuned_one():
    for seeds in (5, 8):
        free = random_features_curve(seeds=seeds)
        test = peak_test(free.test)
        assert test.rejected and free.values[test.triple[1]] == 60 and 5 in test.location
        assert free.train_error is not None and (free.train_error[:, 5:] < 0.1).all()
        assert not peak_test(random_features_curve(seeds=seeds, ridge="tuned").test).rejected
    with pytest.raises(UserError, match="at least 1 feature"):
        random_features_curve(features=(0, 5))


# --------------------------------------------------------------------------------------------- training in closed form


def test_plain_descent_rises_only_while_sharpness_exceeds_its_threshold():
    steps = tuple(range(1, 513))
    curve, stable = (unstable_curve(momentum=0.0, steps=steps, top=top) for top in (1.6, 0.99))
    assert curve.train_loss is not None and curve.sharpness is not None and stable.train_loss is not None
    assert curve.sharpness.max() == pytest.approx(1.6, rel=1e-3)
    rises = np.diff(curve.train_loss, axis=1) > 0  # the step from k to k + 1 takes the rate of k
    assert rises.any(1).all() and (curve.sharpness[:, :-1][rises] > 1).all()
    assert (np.diff(stable.train_loss, axis=1) <= 0).all()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_training_loss_peaks_where_the_threshold_is_crossed(momentum):
    curve = unstable_curve(momentum=momentum)
    assert curve.train_loss is not None and curve.sharpness is not None
    test = peak_test(curve.train_loss)
    assert test.triple is not None and curve.sharpness[0, test.triple[1] - 1 : test.triple[1] + 1].max() > 1


def test_the_training_loss_has_no_peak_below_the_threshold():
    stable = unstable_curve(momentum=0.0, top=0.8)  # with momentum descent swings below its threshold too
    assert stable.train_loss is not None
    assert not peak_test(stable.train_loss).rejected


def test_gradient_flow_is_gradient_descent_with_small_steps():
    curve = gradient_flow_curve(rows=20, features=8, seeds=1, times=(0.5, 2.0), seed=4)
    from flatshift.finetune.seeds import numpy_generator

    generator = numpy_generator(4, "gradient flow", 0)
    beta = generator.standard_normal(8) / np.sqrt(8)
    x = generator.standard_normal((20, 8))
    y = x @ beta + generator.standard_normal(20)
    w, found = np.zeros(8), []
    for step in range(1, 20_001):
        w -= 1e-4 * x.T @ (x @ w - y) / 20
        if step in (5000, 20_000):
            found.append((np.square(y - x @ w).mean(), np.square(w - beta).sum() + 1.0))
    assert curve.train_loss is not None
    np.testing.assert_allclose(np.stack([curve.train_loss[0], curve.test[0]], 1), found, rtol=1e-3)


def test_gradient_flow_overfits_noise_and_nothing_else():
    noisy, clean = gradient_flow_curve(), gradient_flow_curve(noise=0.0)
    means = noisy.test.mean(0)
    assert 1 < means.argmin() < 8 and means[-1] > 1.5 * means.min()
    assert (np.diff(clean.test.mean(0)) < 0).all()
    assert noisy.train_loss is not None and (np.diff(noisy.train_loss) < 0).all()


def test_the_same_seed_gives_the_same_curves():
    for make in (unstable_curve, gradient_flow_curve, noise_curve, random_features_curve):
        np.testing.assert_array_equal(make(seed=3).test, make(seed=3).test)
        assert (make(seed=3).test != make(seed=4).test).any()


# --------------------------------------------------------------------------------------------- the scale


def test_scales_go_there_and_back_and_have_the_variance_that_they_say():
    losses = np.array([[0.0, 0.5, 4.0], [0.1, 0.7, 9.0]])
    for metric, values, items in (("test loss", losses, None), ("test error", losses / 10, 50), ("bleu", losses, None)):
        scale = choose_scale(metric, values, items)
        assert [scale.back(z) for z in scale.to(values).ravel()] == pytest.approx(values.ravel(), abs=1e-9)
    assert choose_scale("test loss", losses).name == "log" and choose_scale("test error", losses / 10).name == "arcsine"
    assert choose_scale("test error", losses).name == "plain" and choose_scale("test loss", -losses).name == "plain"
    rates = np.random.default_rng(0).binomial(200, 0.1, (1, 20_000)) / 200
    scale = choose_scale("test error", rates, 200)
    assert scale.to(rates).var() == pytest.approx(scale.variance, rel=0.03)


def test_the_rule_keeps_its_level_and_names_scattered_spikes():
    most = binom.ppf(0.999, 200, 0.06)
    for name in ("log-normal loss, rise, then plateau", "binomial error, rise, then plateau"):
        metric, items, make = NAMED_NULLS[name]
        assert rejections(make(np.random.default_rng(3), 200, 5, 9), metric=metric, items=items).sum() <= most
    peaks = log_normal(log_normal_peak, 0.45)(np.random.default_rng(4), 200, 5, 9)
    assert rejections(peaks, metric="test loss").mean() > 0.88 > 0.7 > rejections(peaks).mean()


def test_many_curves_at_once_are_judged_as_one_is():
    metric, items, make = NAMED_NULLS["binomial error with runs of their own, rise, then plateau"]
    curves = make(np.random.default_rng(5), 12, 5, 9)
    curves[:6, :, 4] += 0.35
    alone = [peak_test(y, scale=choose_scale(metric, y, items)).rejected for y in curves]
    assert rejections(curves, metric=metric, items=items).tolist() == alone and any(alone)
    peaks = log_normal(log_normal_peak, 0.2)(np.random.default_rng(6), 1, 5, 9)[0]
    test = peak_test(peaks, scale=choose_scale("test loss", peaks))
    assert test.rejected and 2 < test.height.estimate < 4.5 and test.height.low < 3 < test.height.high


# --------------------------------------------------------------------------------------------- seeds one after another


def test_looks_spend_the_level_once():
    for budget in (5, 8, 20, 33):
        found = plan_looks(budget)
        assert found[0].seeds == 5 and found[-1].seeds == budget
        assert sum(look.level for look in found) == pytest.approx(0.05)
        assert all(a.seeds < b.seeds and b.level > 0 for a, b in itertools.pairwise(found))
    with pytest.raises(UserError, match="a verdict needs 5"):
        plan_looks(4)


def test_seeds_added_until_decided_keep_the_level():
    """Looking at 5 % each time the seeds come in names more nulls than the whole level; shares of it do not."""
    curves = NULLS["rise, then plateau"](np.random.default_rng(11), 300, 16, 9)
    shared, naive = np.zeros(300, dtype=bool), np.zeros(300, dtype=bool)
    for look in plan_looks(16):
        shared |= rejections(curves[:, : look.seeds], level=look.level)
        naive |= rejections(curves[:, : look.seeds])
    assert shared.sum() <= binom.ppf(0.999, 300, 0.05) and naive.sum() > 1.3 * shared.sum()
