"""The report's statistics: t-intervals on means and on paired differences."""

import math

import numpy as np
import pytest
from scipy import stats

from flatshift.experiments.statistics.intervals import paired_difference, t_interval


@pytest.mark.parametrize("n", [2, 3, 5, 30])
@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_t_interval_agrees_with_scipy(n, confidence):
    values = np.random.default_rng(n).normal(3.0, 2.0, n)
    ours = t_interval(list(values), confidence=confidence)
    low, high = stats.t.interval(confidence, n - 1, loc=values.mean(), scale=stats.sem(values))
    assert ours.n == n
    np.testing.assert_allclose([ours.value, ours.low, ours.high], [values.mean(), low, high], rtol=1e-12)


def test_interval_covers_as_often_as_it_says():
    rng = np.random.default_rng(7)
    draws = rng.normal(0.0, 1.0, (4000, 4))
    covered = np.mean([i.low <= 0 <= i.high for i in (t_interval(list(row)) for row in draws)])
    assert abs(covered - 0.95) < 0.012  # 3.5 standard errors of 4,000 draws


def test_one_value_has_no_interval():
    ours = t_interval([1.5])
    assert (ours.value, ours.low, ours.high, ours.n) == (1.5, None, None, 1)
    assert not ours.excludes_zero


def test_equal_differences_exclude_nothing():
    """A few seeds that agree to the last row are no certainty: `paired_test` has no p for them either."""
    difference = paired_difference({0: 0.52, 1: 0.54, 2: 0.53}, {0: 0.50, 1: 0.52, 2: 0.51})
    assert difference is not None and difference.value == pytest.approx(0.02) and not difference.excludes_zero
    assert not t_interval([0.0, 0.0, 0.0]).excludes_zero and t_interval([0.02, 0.021, 0.02]).excludes_zero
    assert t_interval([-0.02, -0.021, -0.02]).excludes_zero and not t_interval([0.02, -0.021, 0.02]).excludes_zero


def test_bounds_cut_the_interval_but_not_the_mean():
    ours = t_interval([0.01, 0.09], bounds=(0.0, 1.0))
    assert ours.low == 0.0 and ours.value == pytest.approx(0.05) and 0.05 < ours.high < 1


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_nothing_and_not_finite_are_refused(values):
    with pytest.raises(ValueError, match="t_interval needs"):
        t_interval(values)


def test_pairing_removes_what_a_seed_does_to_both():
    seeds = {0: 0.0, 1: 10.0, 2: -30.0, 3: 100.0}
    ours = {s: base + 1.0 + 0.01 * s for s, base in seeds.items()}
    difference = paired_difference({**ours, 9: 5.0}, {**seeds, 8: 1.0})
    assert difference.n == 4 and difference.excludes_zero
    assert difference.value == pytest.approx(1.015)
    assert paired_difference({1: 2.0}, {2: 2.0}) is None
