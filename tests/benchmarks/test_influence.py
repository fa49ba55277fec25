"""LDS of selectors: halves of a pool, and the correlation of predicted with measured losses."""

import numpy as np

from benchmarks.influence import POOL, SUBSETS, ceiling, correlate, halves


def test_halves_are_halves_and_repeat() -> None:
    subsets = halves()
    assert subsets.shape == (SUBSETS, POOL) and (subsets.sum(1) == POOL // 2).all()
    np.testing.assert_array_equal(subsets, halves())
    assert len(np.unique(subsets, axis=0)) == SUBSETS


def test_additive_losses_are_predicted_by_their_parts_and_not_by_others() -> None:
    rng, subsets = np.random.default_rng(0), halves()
    parts = rng.standard_normal(POOL)
    value, low, high = correlate(subsets @ parts, subsets @ parts + 3.0)
    assert min(value, low, high) > 1 - 1e-9
    value, low, high = correlate(subsets @ rng.standard_normal(POOL), subsets @ parts)
    assert low < 0.3 and high > -0.3 and abs(value) < 0.4


def test_the_ceiling_is_what_a_prediction_without_error_reaches() -> None:
    """The agreement of two seeds is below it, since methods predict the mean of both."""
    rng = np.random.default_rng(1)
    truth = rng.standard_normal(20_000)
    first, second = (truth + rng.standard_normal(20_000) for _ in range(2))
    agreement = float(np.corrcoef(first, second)[0, 1])
    reached = float(np.corrcoef(truth, (first + second) / 2)[0, 1])
    assert abs(ceiling(agreement) - reached) < 0.02 and reached > agreement + 0.2
    assert ceiling(-0.1) == 0.0 and ceiling(1.0) == 1.0
