"""The peak test: the statistic is the formula's, false alarms and power are what is claimed, intervals cover."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from benchmarks.curves.known import NULLS, bump, bumps
from benchmarks.curves.rates import rejections
from flatshift.experiments.statistics import peak_test
from flatshift.experiments.statistics.pairs import (
    critical_value,
    null_distribution,
    p_value,
    point_pairs,
    point_variances,
)
from flatshift.experiments.statistics.peak import detectable_sd, holdout_test, seeds_needed, thin
from flatshift.finetune.errors import UserError

POINTS = 9


def curves(kind: str, count: int, seeds: int, *, start: int = 0) -> np.ndarray:
    whole = seeds + ("without values" in kind)  # one more, so that `seeds` are whole
    return NULLS[kind](np.random.default_rng(1000 + start), count, whole, POINTS)


def naive(y: np.ndarray) -> tuple[float, tuple[int, int, int]]:
    """T and its triple by the formula, one triple at a time."""
    seeds, points = y.shape
    v = {}
    for i, j in itertools.combinations(range(points), 2):
        v[i, j] = np.var(y[:, j] - y[:, i], ddof=1)
    mean = np.mean(list(v.values()))

    def t(i: int, j: int) -> float:
        shrunken = (4 * mean + (seeds - 1) * v[min(i, j), max(i, j)]) / (seeds + 3)
        return math.sqrt(seeds) * float(np.mean(y[:, j] - y[:, i])) / math.sqrt(shrunken)

    return max((min(t(i, j), t(l, j)), (i, j, l)) for i, j, l in itertools.combinations(range(points), 3))


# --------------------------------------------------------------------------------------------- the statistic


@pytest.mark.parametrize("shape", [(5, 3), (5, 9), (8, 10), (20, 5)])
def test_statistic_and_triple_are_those_of_every_triple_in_turn(shape):
    generator = np.random.default_rng(sum(shape))
    for _ in range(5):
        y = generator.normal(size=shape) * generator.uniform(0.5, 3, shape[1]) + generator.normal(size=(shape[0], 1))
        found, expected = peak_test(y), naive(y)
        assert found.statistic == pytest.approx(expected[0], rel=1e-9)
    y = generator.normal(size=shape)
    y[:, shape[1] // 2] += 20
    assert peak_test(y).triple[1] == naive(y)[1][1] == shape[1] // 2


def test_units_and_what_a_seed_does_to_all_points_do_not_matter():
    y = np.random.default_rng(0).normal(size=(5, 9)) + bump(9, 4)
    test = peak_test(y)
    for scale in (1e-12, 1e150):
        other = peak_test(scale * (y + np.array([[5.0], [0], [-40], [7], [100]])))
        assert other.statistic == pytest.approx(test.statistic, rel=1e-6)
        assert other.location == test.location and other.rejected == test.rejected
        assert other.height.estimate == pytest.approx(scale * test.height.estimate, rel=1e-6)
        assert other.ceiling == pytest.approx(scale * test.ceiling, rel=1e-6)


def test_critical_value_is_the_quantile_of_simulated_flat_curves():
    y = np.random.default_rng(1).standard_normal((20_000, 5, 7))
    t = point_pairs(y).t
    left, right = np.triu_indices(7, 1)
    assert critical_value(null_distribution(5, 7, 20_000, 0).extremes()[0], 0.05) == pytest.approx(
        np.quantile(t[:, left, right].max(1), 0.95), abs=0.05
    )
    variances = np.array([1.0, 1, 4, 1, 9, 1, 1])
    t = point_pairs(y * np.sqrt(variances)).t
    rise, both = null_distribution(5, 7, 20_000, 0).extremes(variances)
    assert critical_value(rise, 0.05) == pytest.approx(np.quantile(t[:, left, right].max(1), 0.95), abs=0.06)
    assert critical_value(both, 0.05) == pytest.approx(np.quantile(np.abs(t[:, left, right]).max(1), 0.95), abs=0.06)


def test_rejection_and_p_value_agree():
    draws = np.random.default_rng(2).normal(size=1999)
    limit = critical_value(draws, 0.05)
    for value in (limit - 1e-9, limit, limit + 1e-9, *draws[:50]):
        assert (value > limit) == (p_value(value, draws) <= 0.05)
    assert critical_value(draws[:18], 0.05) == math.inf and p_value(1e9, draws[:18]) > 0.05


def test_point_variances_are_those_of_many_seeds():
    sd = np.array([1.0, 2, 3, 0.5, 1])
    y = np.random.default_rng(3).normal(size=(4000, 5)) * sd + np.random.default_rng(4).normal(size=(4000, 1)) * 10
    np.testing.assert_allclose(point_variances(point_pairs(y).variance, 4000), sd**2, rtol=0.12, atol=0.06)


# --------------------------------------------------------------------------------------------- rates


@pytest.mark.parametrize("kind", sorted(NULLS))
@pytest.mark.parametrize("seeds", [5, 8])
def test_false_alarms(kind, seeds):
    y = curves(kind, 400, seeds)
    if np.isnan(y).any():
        alarms = sum(peak_test(one).rejected for one in y)
    else:
        alarms = int(rejections(y).sum())
    assert alarms <= stats.binom.ppf(0.999, 400, 0.06)  # 39 of 400


def test_the_least_favourable_null_comes_close_to_the_level():
    assert rejections(curves("rise, then plateau", 2000, 5)).mean() > 0.025


@pytest.mark.parametrize(("height", "seeds", "power"), [(3, 5, 0.9), (4, 5, 0.97), (2, 8, 0.8), (3, 8, 0.97)])
def test_power(height, seeds, power):
    y = bumps(height)(np.random.default_rng(height), 400, seeds, POINTS)
    assert rejections(y).sum() >= stats.binom.ppf(0.001, 400, power)


def test_many_curves_are_decided_as_one_by_one():
    y = np.concatenate(
        [bumps(h)(np.random.default_rng(h), 40, 5, POINTS) for h in (1, 2, 3)] + [curves("rise, then plateau", 80, 5)]
    )
    single = [peak_test(one).rejected for one in y]
    assert rejections(y).tolist() == single
    assert 20 < sum(single) < 180


def test_detectable_height_is_found_in_four_of_five_cases():
    for seeds, points in ((5, 9), (8, 5)):
        mean = np.full(points, 30.0)
        middle = (points - 1) // 2
        mean[middle - 1 : middle + 2] = 0.0, detectable_sd(seeds, points), 0.0
        y = np.random.default_rng(seeds).standard_normal((1500, seeds, points)) + mean
        assert rejections(y).mean() == pytest.approx(0.8, abs=0.045)


def test_the_detectable_height_is_that_of_the_noisiest_inner_point():
    """A point that scatters three times as much: the printed height is found there in four of five cases, as said."""
    sd = np.ones(8)
    sd[3] = 3.0
    generator = np.random.default_rng(11)
    found = [peak_test(y).detectable for y in generator.standard_normal((20, 20, 8)) * sd]
    assert np.mean([one.point == 3 for one in found]) >= 0.8
    height = float(np.median([one.height for one in found]))
    assert height > 1.3 * np.median([one.even for one in found])
    mean = np.full(8, 30.0)
    mean[2:5] = 0.0, height, 0.0
    y = generator.standard_normal((600, 20, 8)) * sd + mean
    assert rejections(y).mean() == pytest.approx(0.8, abs=0.07)


def test_seeds_needed_is_the_smallest_sufficient_number():
    needed = seeds_needed(2.0, 9)
    assert needed is not None
    assert detectable_sd(needed, 9, draws=2000) <= 2.0 < detectable_sd(needed - 1, 9, draws=2000)
    assert seeds_needed(0.01, 9) is None and seeds_needed(0.0, 9) is None and seeds_needed(50.0, 9) == 5


# --------------------------------------------------------------------------------------------- where and how high


@pytest.mark.parametrize("kind", ["point", "plateau", "far flanks"])
def test_location_holds_the_peak(kind):
    mean = {
        "point": np.array([6.0, 3, 0, 0, 3, 0, 0, 0, 0]),
        "plateau": np.array([6.0, 3, 0, 2.9, 3, 2.8, 0, -1, -1]),
        "far flanks": np.array([0.0, 0.5, 1, 1.5, 3.5, 2, 1.5, 1, 0]),
    }[kind]
    y = np.random.default_rng(5).standard_normal((400, 5, 9)) + mean
    tests = [peak_test(one, draws=4000) for one in y]
    found = [test for test in tests if test.rejected]
    assert len(found) > 150
    wrong = sum(4 not in test.location for test in found)
    assert wrong <= stats.binom.ppf(0.999, 400, 0.05)
    if kind == "point":
        assert np.mean([len(test.location) for test in found]) < 3
    if kind == "plateau":
        assert np.mean([3 in test.location and 5 in test.location for test in found]) > 0.9


@pytest.mark.parametrize("height", [0.0, 1.5, 4.0])
@pytest.mark.parametrize("sd", [1.0, 3.0])
def test_height_and_ceiling_cover(height, sd):
    spread = np.ones(9)
    spread[4] = sd  # unequal variances at the peak
    y = np.random.default_rng(6).standard_normal((400, 5, 9)) * spread + bump(9, height)
    tests = [peak_test(one, draws=4000) for one in y]
    limit = stats.binom.ppf(0.999, 400, 0.05)
    assert sum(not test.height.low <= height <= test.height.high for test in tests) <= limit
    assert sum(test.ceiling < height for test in tests) <= limit
    assert all(test.height.low <= test.height.estimate <= test.height.high for test in tests)
    assert all(
        test.height.low == 0 and test.triple is None and test.location == () for test in tests if not test.rejected
    )
    if sd == 1 and height == 4:
        estimates = [test.height.estimate for test in tests if test.rejected]
        assert 3.5 < np.mean(estimates) < 5.2 and np.mean([test.height.low > 0 for test in tests]) > 0.9


def test_the_ceiling_is_above_every_peak():
    y = 0.01 * np.random.default_rng(7).standard_normal((8, 6)) + np.array([9.0, 5, 3, 2, 2, 2])
    test = peak_test(y)
    assert 0 < test.ceiling <= 0.1
    falling = peak_test(0.01 * np.random.default_rng(7).standard_normal((8, 6)) - np.arange(6))
    assert falling.ceiling == 0


# --------------------------------------------------------------------------------------------- runs without values


def test_a_diverged_seed_is_left_out_whole():
    y = np.random.default_rng(8).standard_normal((6, 9)) + bump(9, 6)
    broken = y.copy()
    broken[2, 5:] = np.inf
    test, without = peak_test(broken), peak_test(np.delete(y, 2, axis=0))
    assert test.diverged == (2,) and test.seeds == 5
    assert (test.statistic, test.triple, test.height) == (without.statistic, without.triple, without.height)


def test_a_point_where_most_seeds_diverge_is_left_out_and_columns_keep_their_names():
    y = np.random.default_rng(9).standard_normal((5, 9)) * 0.1 + bump(9, 6)
    y[:3, 2] = np.nan
    test = peak_test(y)
    assert test.points == (0, 1, 3, 4, 5, 6, 7, 8) and test.diverged == ()
    assert test.triple[1] == 4 and test.location == (4,)


def test_seeds_that_do_not_differ_show_nothing():
    for y in (np.ones((5, 4)), np.tile([3.0, 1, 5, 2], (5, 1))):
        test = peak_test(y)
        assert not test.rejected and test.p_value > 0.9 and test.ceiling == math.inf
        assert test.detectable.height == test.detectable.even == math.inf


@pytest.mark.parametrize(
    ("y", "words"),
    [
        (np.ones((5, 11)), "at most 10 points, got 11"),
        (np.ones((4, 5)), "at least 5 seeds .* got 4 of 4: sweep with --seeds 5"),
        (np.ones((5, 2)), "at least 3 points"),
        (np.ones(5), "a table"),
        (np.where(np.eye(5) > 0, np.nan, 1.0), "at least 5 seeds .* got 0 of 5"),
    ],
)
def test_what_cannot_be_tested_is_refused(y, words):
    with pytest.raises(UserError, match=words):
        peak_test(y)
    with pytest.raises(UserError, match="level"):
        peak_test(np.ones((5, 5)), level=0.7)


# --------------------------------------------------------------------------------------------- thinning, other seeds


def test_thin_spreads_points_on_a_log_axis():
    steps = [0, *range(1, 1001)]
    chosen = thin(steps)
    picked = np.array([steps[j] for j in chosen])
    assert len(chosen) == 10 and picked[0] == 0 and picked[-1] == 1000 and (np.diff(picked) > 0).all()
    ratios = np.diff(np.log1p(picked[3:]))
    assert ratios.max() < 1.35 * ratios.min()
    assert thin([1, 2, 4]) == (0, 1, 2)
    crowded = thin([1, 1.001, 1.002, 1.003, 1.004, 1000], 5)
    assert len(set(crowded)) == 5 and crowded[0] == 0 and crowded[-1] == 5


@pytest.mark.parametrize("values", [[3, 2, 1], [-1, 2, 3], [1, 1, 2], [1, math.nan, 2]])
def test_thin_refuses_what_is_no_axis(values):
    with pytest.raises(UserError, match="ascend"):
        thin(values)


def test_the_check_on_other_seeds_is_two_paired_t_tests():
    y = np.random.default_rng(10).standard_normal((9, 9)) + bump(9, 5)
    found = holdout_test(y)
    i, j, l = found.triple
    assert naive(y[:3])[1][1] == j == 4
    expected = max(stats.ttest_rel(y[3:, j], y[3:, k], alternative="greater").pvalue for k in (i, l))
    assert found.p_value == pytest.approx(expected) and found.confirmed == (expected <= 0.05) and found.seeds == 6
    with pytest.raises(UserError, match="at least 8 seeds"):
        holdout_test(y[:7])


def test_the_check_on_other_seeds_rarely_confirms_a_plateau():
    y = curves("rise, then plateau", 400, 8)
    assert sum(holdout_test(one).confirmed for one in y) <= stats.binom.ppf(0.999, 400, 0.05)
