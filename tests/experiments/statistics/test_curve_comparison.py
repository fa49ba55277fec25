"""Two curves on the same seeds: intervals that cover, a peak that is compared where neither was looked for alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom, ttest_rel

from flatshift.experiments.statistics import Curve, compare_curves
from flatshift.experiments.statistics.curve_comparison import peak_heights
from flatshift.experiments.statistics.pairs import rises_and_falls
from flatshift.finetune.errors import UserError

VALUES = [1, 2, 4, 8, 16, 32, 64, 128]
BUMP = np.array([0.3, 0.3, 0.3, 0.45, 0.5, 0.4, 0.25, 0.2])


def curve(test: np.ndarray, train: np.ndarray | None = None) -> Curve:
    return Curve(axis="rank", values=VALUES, test=test, train_error=train)


def draws(count: int, seeds: int, seed: int, *, mean: np.ndarray | float = 0.0) -> np.ndarray:
    """[count, 2, seeds, J]: two curves of equal means, a part of the errors shared as seeds do."""
    rng = np.random.default_rng(seed)
    shared = rng.normal(size=(count, 1, seeds, 8))
    return mean + 0.05 * (shared + rng.normal(size=(count, 2, seeds, 8)))


def highest_triple(mean: np.ndarray) -> tuple[int, int, int] | None:
    """What looking at one curve alone finds: the triple i < j < l with the largest min(y_j − y_i, y_j − y_l)."""
    rise, fall = rises_and_falls(mean[None, :] - mean[:, None])
    middle = int(np.argmax(np.minimum(rise, fall)))
    if not min(rise[middle], fall[middle]) > 0:
        return None
    return int(np.argmin(mean[:middle])), middle, middle + 1 + int(np.argmin(mean[middle + 1 :]))


def test_differences_are_the_paired_t_tests() -> None:
    ours, base = draws(1, 6, 0)[0]
    found = compare_curves(curve(ours), curve(base))
    reference = ttest_rel(ours.mean(1), base.mean(1))
    assert found.p == pytest.approx(reference.pvalue)
    ends = reference.confidence_interval(0.95)
    assert (found.mean.low, found.mean.high) == pytest.approx((ends.low, ends.high))
    wide = ttest_rel(ours[:, 3], base[:, 3]).confidence_interval(1 - 0.05 / 8)
    assert (found.points[3].low, found.points[3].high) == pytest.approx((wide.low, wide.high))
    assert found.seeds == 6 and found.threshold is None


def test_without_a_difference_the_peak_is_seldom_said_to_change() -> None:
    """Equal curves, flat and with a peak: at most 6 %; looking in one of the two only is wrong far oftener."""
    for seed, mean in ((2, 0 * BUMP), (3, BUMP)):
        alarms = naive = shown = 0
        for place, (ours, base) in enumerate(draws(2000, 5, seed, mean=mean)):
            if place < 200:
                found = compare_curves(curve(ours), curve(base))
                alarms += found.peak_p is not None and found.peak_p < 0.05
                shown += found.peak is not None
            alone = highest_triple(base.mean(0))
            if alone is not None and not mean.any():
                naive += ttest_rel(peak_heights(ours, alone), peak_heights(base, alone)).pvalue < 0.05
        most = binom.ppf(0.999, 200, 0.06)
        assert alarms <= most
        assert mean.any() or (naive > 0.08 * 2000 and shown <= most)


def test_a_peak_that_is_gone_is_found_and_measured() -> None:
    rng = np.random.default_rng(4)
    found = compare_curves(curve(0.3 + 0.02 * rng.normal(size=(8, 8))), curve(BUMP + 0.02 * rng.normal(size=(8, 8))))
    assert found.triple is not None and found.triple[1] in (3, 4)
    assert found.peak is not None and found.peak.high is not None and found.peak.high < -0.1
    assert found.removed and "It removes the peak at rank" in found.sentence(curve(BUMP[None]))


def test_what_happens_to_the_peak_is_said_in_a_sentence() -> None:
    rng = np.random.default_rng(8)

    def said(ours: np.ndarray, base: np.ndarray, seeds: int = 8) -> str:
        noise = 0.01 * rng.normal(size=(2, seeds, 8))
        return compare_curves(curve(ours + noise[0]), curve(base + noise[1])).sentence(curve(noise[0]))

    low = np.minimum(BUMP, 0.4)
    assert "It lowers the peak at rank" in said(low, BUMP) and "is not shown to remove it" in said(low, BUMP)
    assert "It raises the peak" in said(BUMP, low)
    assert "That it moves the peak is not shown" in said(low, BUMP)
    assert "Whether it lowers the peak" in said(BUMP, BUMP)
    late = np.array([0.3, 0.3, 0.3, 0.3, 0.3, 0.5, 0.6, 0.2])
    early = np.array([0.3, 0.6, 0.5, 0.3, 0.3, 0.3, 0.3, 0.2])
    assert "It moves the peak from rank 2 to 64" in said(late, early)
    assert "No peak is shown in either (p = " in said(0 * BUMP, np.linspace(0.5, 0, 8))
    assert "It is lower at rank 16 (all intervals at once)" in said(np.where(BUMP == 0.5, 0.4, BUMP), BUMP)
    assert "At no rank alone" in said(BUMP, BUMP)
    assert "cannot be said: too few seeds" in said(low, BUMP, seeds=4)


@pytest.mark.parametrize("seeds", [5, 8])
def test_of_two_humps_none_is_said_to_move_to_the_other(seeds: int) -> None:
    """Each test sits on the hump that its own errors favour; the sets of both are of the same range."""
    rng = np.random.default_rng(8)
    humps = np.array([0, 0, 6, 0, 0, 0, 6, 0.0])
    apart = said = 0
    for _ in range(40):
        ours, base = humps + rng.normal(size=(2, seeds, 8))
        found = compare_curves(curve(ours), curve(base))
        _, one, other = found.tests
        apart += (
            one is not None
            and other is not None
            and bool(one.location and other.location)
            and not (set(one.location) & set(other.location))
        )
        said += "It moves the peak" in found.sentence(curve(ours))
    assert apart >= 4 and said == 0


def test_a_shoulder_on_the_left_is_no_place_of_the_peak() -> None:
    rng = np.random.default_rng(9)
    base = np.array([0.9, 0.7, 0.3, 0.3, 0.5, 0.3, 0.2, 0.2])
    ours = np.array([0.2, 0.3, 0.3, 0.3, 0.5, 0.3, 0.2, 0.2])
    noise = 0.01 * rng.normal(size=(2, 8, 8))
    found = compare_curves(curve(ours + noise[0]), curve(base + noise[1]))
    assert "It moves the peak" not in found.sentence(curve(noise[0]))


def test_what_is_compared_is_the_peak_that_was_tested() -> None:
    """A noisy hump may be higher than the one that the test finds; it is not the one to compare."""
    rng = np.random.default_rng(10)
    mean, scatter = np.array([0, 0, 0, 1, 0, 0.8, 0, 0]), np.array([0.1, 0.1, 0.1, 0.1, 0.1, 2, 0.1, 0.1])
    places = []
    for _ in range(20):
        noise = scatter * rng.normal(size=(2, 8, 8))
        found = compare_curves(curve(np.where(mean == 1, 0, mean) + noise[0]), curve(mean + noise[1]))
        places += [found.triple[1]] if found.triple is not None else []
    assert len(places) > 10 and set(places) == {3}


def test_a_threshold_that_moves_is_given_as_a_ratio() -> None:
    rng = np.random.default_rng(5)
    x = np.log2(np.array(VALUES))

    def train(at: float) -> np.ndarray:
        return np.clip(0.1 + 0.1 * (at - x), 0, 1) + 0.002 * rng.normal(size=(5, 8))

    test = 0.3 + 0.01 * rng.normal(size=(2, 5, 8))
    found = compare_curves(curve(test[0], train(4.0)), curve(test[1], train(3.0)))
    assert found.threshold is not None and found.threshold.value == pytest.approx(2, rel=0.1) and found.moved
    never = compare_curves(curve(test[0], 0.5 + 0 * train(4.0)), curve(test[1], train(3.0)))
    assert never.threshold is None and not never.moved
    shown = curve(test[0], train(4.0))
    assert "not every seed crosses it on the axis" in never.sentence(shown)
    unknown = compare_curves(curve(test[0]), curve(test[1]))
    assert unknown.threshold is None and "threshold" not in unknown.sentence(curve(test[0]))
    zero = [replace(one, values=[0, *VALUES[1:]]) for one in (shown, curve(test[1], train(3.0)))]
    assert "threshold" not in compare_curves(*zero).sentence(zero[0]), "positions from 0 on have no ratio"


def test_seeds_that_diverged_in_either_curve_are_left_out_and_misfits_refused() -> None:
    ours, base = draws(1, 5, 6)[0]
    ours[2, 1] = np.nan
    assert compare_curves(curve(ours), curve(base)).seeds == 4
    ours[:3, 1] = np.nan
    with pytest.raises(UserError, match="2 seeds are whole"):
        compare_curves(curve(ours), curve(base))
    with pytest.raises(UserError, match="same positions"):
        compare_curves(curve(ours[:4]), curve(base))
