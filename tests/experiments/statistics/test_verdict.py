"""Verdicts: every kind is earned, nothing is named that the seeds do not show, and thresholds are where they cross."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from benchmarks.curves.dynamics import gradient_flow_curve, noise_curve, unstable_curve
from benchmarks.curves.known import bump
from benchmarks.curves.random_features import random_features_curve
from flatshift.experiments.results.analysis import is_capacity_axis
from flatshift.experiments.statistics import Curve, determine_verdict
from flatshift.experiments.statistics.emc import effective_model_complexity, emc_from_curve, find_crossing
from flatshift.finetune.errors import UserError

RANKS = [1, 2, 4, 8, 16, 32, 64, 128, 256]


def interpolating(seeds: int = 5, height: float = 6.0, *, seed: int = 0, sd: float = 0.01) -> Curve:
    """A first descent, a peak at rank 16 and a second descent; the training error reaches 0.1 just before it."""
    generator = np.random.default_rng(seed)
    fitted = np.array([0.45, 0.4, 0.3, 0.15, 0.05, 0.01, 0.0, 0.0, 0.0])
    noise = generator.standard_normal((3, seeds, 9))
    return Curve(
        axis="rank",
        values=RANKS,
        test=0.2 + sd * (noise[0] + bump(9, height)),
        train_error=np.clip(fitted + 0.004 * noise[1], 0, 1),
        train_loss=fitted * 3 + 0.01 * noise[2],
    )


def text(verdict) -> str:
    return " ".join(verdict.evidence)


# --------------------------------------------------------------------------------------------- kinds


def test_double_descent_needs_its_five_findings():
    curve = interpolating()
    verdict = determine_verdict(curve)
    assert verdict.kind == "double descent"
    assert verdict.peak.location == (4,) and 8 < verdict.crossing.value < 16
    for words in ("peak at rank 16", "first falls from", "crosses 0.1 at rank", "no peak by the same test"):
        assert words in text(verdict)

    early = replace(curve, train_error=np.tile([0.4, 0.05, *[0.0] * 7], (5, 1)) + 0 * curve.test)
    assert determine_verdict(early).kind == "undecided" and "outside the peak's location" in text(
        determine_verdict(early)
    )

    plateau = curve.test.copy()
    plateau[:, :3] = plateau[:, 3:4] + 0.001 * np.random.default_rng(1).standard_normal((5, 3))
    no_descent = determine_verdict(replace(curve, test=plateau))
    assert no_descent.kind == "undecided" and "No significant fall to the left" in text(no_descent)

    worse = curve.train_error + np.where(np.arange(9) > 4, 0.15, 0.0)
    unfitted = determine_verdict(replace(curve, train_error=worse))
    assert unfitted.kind == "undecided" and "Training error rises again from 0.05" in text(unfitted)
    little = determine_verdict(replace(curve, train_error=curve.train_error + np.where(np.arange(9) > 4, 0.06, 0.0)))
    assert little.kind == "double descent" and "rises again" not in text(little)  # still fitted

    unknown = determine_verdict(replace(curve, train_loss=None))
    assert unknown.kind == "undecided" and "Training loss was not measured" in text(unknown)
    unknown = determine_verdict(replace(curve, train_error=None))
    assert unknown.kind == "undecided" and "Training error was not measured" in text(unknown)


def test_a_peak_of_the_training_loss_makes_it_mixed():
    curve = interpolating()
    bumped = curve.train_loss + np.where(np.arange(9) == 5, 0.5, 0.0)
    verdict = determine_verdict(replace(curve, train_loss=bumped))
    assert verdict.kind == "mixed" and "Training loss has a peak too" in text(verdict)
    assert "Neither gradient norms nor sharpness" in text(verdict)


def test_a_third_rise_makes_it_mixed():
    curve = interpolating()
    again = curve.test.copy()
    again[:, -1] += 0.1
    verdict = determine_verdict(replace(curve, test=again))
    assert verdict.kind == "mixed" and "rises again" in text(verdict)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_instability_needs_a_spike_or_sharpness(momentum):
    curve = unstable_curve(momentum=momentum)
    verdict = determine_verdict(curve)
    assert verdict.kind == "instability"
    assert "a spike" in text(verdict) and "above it" in text(verdict)
    assert determine_verdict(replace(curve, gradient_norm=None)).kind == "instability"
    assert determine_verdict(replace(curve, sharpness=None)).kind == "instability"
    without = determine_verdict(replace(curve, gradient_norm=None, sharpness=None))
    assert without.kind == "undecided" and "record one" in text(without)
    calm = determine_verdict(
        replace(
            curve, gradient_norm=np.ones_like(curve.test) * [[1], [1.1], [0.9], [1], [1]], sharpness=curve.sharpness / 2
        )
    )
    assert calm.kind == "undecided" and "no spike" in text(calm) and "not shown to exceed it" in text(calm)


def test_runs_that_diverged_say_nothing_on_the_instability_of_others():
    rng = np.random.default_rng(0)
    tables = {
        "train_loss": np.array([3.0, 2.0, 1.0, 2.0, 0.8, 0.4]) * np.exp(0.03 * rng.standard_normal((9, 6))),
        "test": np.array([0.6, 0.5, 0.4, 0.45, 0.35, 0.3]) + 0.02 * rng.standard_normal((9, 6)),
    }
    steep = np.array([1, 1, 1, 1.4, 1, 1]) * np.exp(0.02 * rng.standard_normal((9, 6)))
    steep[5:, 3] *= 6  # of the four that are lost at the last step
    for table in tables.values():
        table[5:, 5] = np.nan
    for name in ("gradient_norm", "sharpness"):
        found = [
            determine_verdict(Curve(axis="step", values=[1, 2, 4, 8, 16, 32], **{k: t[rows] for k, t in given.items()}))
            for given in [tables | {name: steep * (0.5 if name == "sharpness" else 1)}]
            for rows in (slice(None), slice(5))
        ]
        said = [[sentence for sentence in verdict.evidence if " × " in sentence] for verdict in found]
        assert said[0] == said[1] and len(said[0]) == 1
        assert found[0].kind == found[1].kind == "undecided"


def test_overfitting_rises_and_stays():
    verdict = determine_verdict(gradient_flow_curve())
    assert verdict.kind == "overfitting" and "rises from" in text(verdict)
    generator = np.random.default_rng(2)
    mean = np.array([9, 4, 0, 3, 6, 9, 7.5, 6, 5])  # on its way back
    back = Curve(axis="steps", values=RANKS, test=mean + generator.standard_normal((5, 9)) * np.linspace(0.3, 6, 9))
    assert determine_verdict(back).kind != "overfitting"


def test_monotone_needs_a_fall_and_a_low_ceiling():
    generator = np.random.default_rng(3)
    mean = np.array([20, 12, 8, 5, 3, 2, 1.5, 1.2, 1.0])
    curve = Curve(axis="rank", values=RANKS, test=mean + 0.3 * generator.standard_normal((8, 9)))
    verdict = determine_verdict(curve)
    assert verdict.kind == "monotone" and "falls from" in text(verdict)
    strict = determine_verdict(curve, delta=0.1)
    assert strict.kind == "undecided" and "is not excluded" in text(strict)


def test_noise_is_undecided_and_says_what_would_decide():
    verdict = determine_verdict(noise_curve())
    assert verdict.kind == "undecided"
    assert "standard deviations of one run" in text(verdict) and "would" in text(verdict)
    assert verdict.seeds_needed is None or verdict.seeds_needed > 5


def test_an_axis_that_cannot_show_a_peak_is_told():
    curve = interpolating()
    all_fit = determine_verdict(replace(curve, train_error=np.full((5, 9), 0.01)))
    assert all_fit.kind == "undecided" and "the smallest value included" in text(all_fit)
    none_fit = determine_verdict(replace(noise_curve(), train_error=np.full((5, 9), 0.4)))
    assert none_fit.kind == "undecided" and "No point has a mean training error of at most 0.1" in text(none_fit)


def test_a_right_end_that_is_fitted_no_more_is_told():
    """The monotone fit of the training error hides its way back up; the sentence does not."""
    curve = interpolating(height=0.0)
    again = np.array([0.45, 0.4, 0.3, 0.15, 0.05, 0.01, 0.01, 0.02, 0.13])
    verdict = determine_verdict(replace(curve, train_error=again + 0.001 * np.arange(5)[:, None]))
    assert "above 0.1 again at rank 256: 0.132 (at least 0.13). The axis does not end with fitted data" in text(verdict)
    assert "again" not in text(determine_verdict(curve))
    scattered = replace(curve, train_error=again - 0.02 + 0.03 * np.array([-2, -1, 0, 1, 2.0])[:, None])
    assert "0.11 (not significantly). That the axis ends with fitted data is not shown" in text(
        determine_verdict(scattered)
    )
    bowl = np.array([0.23, 0.16, 0.09, 0.08, 0.2, 0.3, 0.4, 0.4, 0.4]) + 0 * curve.test
    for peaked in (curve, interpolating()):
        verdict = determine_verdict(replace(peaked, train_error=bowl))
        assert verdict.crossing.fitted == "some" and verdict.crossing.value is None
        assert "No point has" not in text(verdict)
    assert "at some points only" in text(verdict)


def test_sample_wise_curves_cross_upwards():
    curve = interpolating()
    verdict = determine_verdict(replace(curve, axis="rows", train_error=curve.train_error[:, ::-1]))
    assert verdict.crossing.rising and 16 < verdict.crossing.value < 32 and verdict.kind == "double descent"


def test_rates_of_verdicts():
    kinds = Counter(determine_verdict(random_features_curve(seed=s)).kind for s in range(20))
    assert kinds["double descent"] >= 17
    tuned = Counter(determine_verdict(random_features_curve(seed=s, ridge="tuned")).kind for s in range(20))
    assert set(tuned) <= {"monotone", "undecided"} or tuned["monotone"] + tuned["undecided"] >= 18
    noise = Counter(determine_verdict(noise_curve(seed=s)).kind for s in range(60))
    assert noise["undecided"] >= stats.binom.ppf(0.001, 60, 0.9)
    assert Counter(determine_verdict(unstable_curve(momentum=0.0, seed=s)).kind for s in range(5))["instability"] == 5
    assert Counter(determine_verdict(gradient_flow_curve(seed=s)).kind for s in range(20))["overfitting"] >= 17


def test_eight_seeds_are_confirmed_on_other_seeds():
    verdict = determine_verdict(interpolating(seeds=9, height=9))
    assert verdict.holdout.confirmed and "two paired t-tests confirm it" in text(verdict)
    assert determine_verdict(interpolating(seeds=7)).holdout is None


def test_diverged_seeds_are_told_and_too_few_are_no_error():
    curve = interpolating(seeds=6)
    test = curve.test.copy()
    test[0, 7:] = np.nan
    verdict = determine_verdict(replace(curve, test=test))
    assert verdict.kind == "double descent" and "1 of 6 seeds diverged" in text(verdict)
    few = determine_verdict(interpolating(seeds=2))
    assert few.kind == "undecided" and few.peak is None and "at least 5 seeds" in text(few)
    four = determine_verdict(interpolating(seeds=4, height=20))
    assert four.kind == "undecided" and four.peak is None and "--seeds 5" in text(four)
    assert four.crossing.value is not None


def training(mean: list[float], **tables) -> Curve:
    """A curve of the training loss itself, over ten recorded steps."""
    noise = 0.05 * np.random.default_rng(12).standard_normal((5, 10))
    steps = [2, 8, 32, 64, 96, 128, 160, 192, 224, 256]
    y = np.array(mean) + noise
    return Curve(axis="step", values=steps, test=y, train_loss=y, metric="train loss", training=True, **tables)


def test_a_training_loss_is_judged_as_itself_and_its_test_is_always_printed():
    falls = determine_verdict(training([5, 4.8, 4.5, 4.2, 3.9, 3.6, 3.3, 3, 2.7, 2.4]))
    assert falls.kind == "monotone" and "no peak by the same test (p =" in text(falls)
    rises = determine_verdict(training([5, 4.41, 4.5, 5, 6, 7, 7.5, 7.7, 7.8, 7.81]))
    assert rises.kind == "instability" and "Training loss rises from 4.4" in text(rises)
    assert "does not come back" in text(rises) and "no peak by the same test (p =" in text(rises)
    bump = [5, 4.5, 4, 3.5, 3, 6, 4, 2.8, 2.6, 2.5]
    assert determine_verdict(training(bump)).kind == "undecided"
    spike = np.where(np.arange(10) == 5, 4.0, 1.0) * np.random.default_rng(13).lognormal(0, 0.05, (5, 10))
    assert determine_verdict(training(bump, gradient_norm=spike)).kind == "instability"
    little = determine_verdict(training([9, 4.5, 4, 3.5, 3, 2.5, 2.5, 2.6, 2.8, 2.9]))
    assert little.kind == "undecided" and "less than a fifth of its fall" in text(little)


def test_a_training_loss_that_rises_for_good_is_no_overfitting():
    loss = training([5, 4.41, 4.5, 5, 6, 7, 7.5, 7.7, 7.8, 7.81])
    curve = Curve(axis="step", values=loss.values, test=loss.test / 10, train_loss=loss.test)
    assert determine_verdict(curve).kind == "instability"
    assert determine_verdict(replace(curve, axis="rows")).kind == "overfitting"


def test_every_verdict_says_that_its_axis_cannot_show_a_peak_and_what_the_test_found():
    mean = np.array([0.3, 0.32, 0.36, 0.42, 0.5, 0.6])
    for rising, kind in ((mean, "overfitting"), (mean[::-1], "monotone")):
        noise = np.random.default_rng(14).standard_normal((3, 8, 6))
        curve = Curve(
            axis="rank",
            values=RANKS[:6],
            test=rising + 0.005 * noise[0],
            train_error=0.01 + 0.001 * noise[1],
            train_loss=np.linspace(0.5, 0.05, 6) + 0.001 * noise[2],
        )
        verdict = determine_verdict(curve)
        assert verdict.kind == kind and "the smallest value included" in text(verdict)
        assert "where runs scatter most, in 80 % of cases" in text(verdict) and "no peak by the same" in text(verdict)


def test_seeds_that_do_not_differ_decide_nothing():
    falling, dips = np.linspace(0.5, 0.1, 9), np.array([0.5, 0.3, 0.1, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45])
    for mean in (0.2 + 0.01 * bump(9, 6), falling, dips, np.full(9, 0.5)):
        verdict = determine_verdict(Curve(axis="rank", values=RANKS, test=np.tile(mean, (6, 1))))
        assert verdict.kind == "undecided" and verdict.peak is None
        assert text(verdict) == "The seeds do not differ, so no test can be made."
    curve = interpolating()
    verdict = determine_verdict(replace(curve, train_loss=np.tile(curve.train_loss[0], (5, 1))))
    assert verdict.kind == "undecided" and "Training loss cannot be evaluated: the seeds do not differ" in text(verdict)


@pytest.mark.parametrize("unit", [1e-200, 1e200])
def test_no_unit_is_too_small_or_too_large(unit):
    fall = np.array([20, 12, 8, 5, 3, 2, 1.5, 1.2, 1.0])
    dip = np.array([9, 4, 0, 3, 6, 9, 9.5, 10, 10.1])
    for mean in (fall, dip):
        test = mean + 0.3 * np.random.default_rng(3).standard_normal((8, 9))
        one, other = (determine_verdict(Curve(axis="rank", values=RANKS, test=scale * test)) for scale in (1.0, unit))
        assert one.kind == other.kind == ("monotone" if mean is fall else "overfitting")


@pytest.mark.parametrize(
    ("gone", "said"),
    [([(0, 0), (1, 7)], "1 and 128"), ([(0, 0), (1, 3), (1, 7)], "1, 8 and 128"), ([(0, 6), (1, 7)], "64 to 128")],
)
def test_the_points_where_seeds_are_lost_are_named(gone, said):
    test = interpolating(seeds=8).test.copy()
    for place in gone:
        test[place] = np.nan
    assert Curve(axis="rank", values=RANKS, test=test).lost_sentence() == f"2 of 8 seeds diverged at rank {said}."


def test_points_that_most_seeds_do_not_reach_are_named():
    curve = interpolating(seeds=6)
    test = curve.test.copy()
    test[:4, 8] = np.nan
    said = text(determine_verdict(replace(curve, test=test)))
    assert "4 of 6 seeds diverged at rank 256." in said and "most seeds have no value there: rank 256" in said


def test_the_threshold_is_of_the_seeds_and_points_that_are_judged():
    curve = interpolating(seeds=6)
    test, train_error = curve.test.copy(), curve.train_error.copy()
    test[0, 7] = test[1:, 8] = np.nan
    train_error[0] = 0.45  # it diverged later, and never fitted
    train_error[1:, 8] = np.nan
    verdict = determine_verdict(replace(curve, test=test, train_error=train_error))
    assert verdict.peak.diverged == (0,) and verdict.peak.points == tuple(range(8))
    assert verdict.crossing == find_crossing(RANKS[:8], curve.train_error[1:, :8], 0.1)
    assert verdict.kind == "double descent"


def test_verdicts_are_given_along_axes_of_capacity():
    judged = ["adapter.rank", "adapter.alpha", "train.steps", "step", "data.train.limit"]
    assert all(map(is_capacity_axis, judged))
    assert not any(
        map(is_capacity_axis, ["data.test.limit", "warmup.steps", "optimizer.lr", "data.label_noise", "x.rank"])
    )


def test_bad_curves_are_refused():
    with pytest.raises(UserError, match="at most 10 points, got 12"):
        determine_verdict(Curve(axis="steps", values=range(1, 13), test=np.zeros((5, 12))))
    with pytest.raises(UserError, match=r"curve over rank: train_loss must be a table \[seeds, 2\]"):
        Curve(axis="rank", values=[1, 2], test=np.zeros((3, 2)), train_loss=np.zeros((3, 3)))
    with pytest.raises(UserError, match="ascend"):
        Curve(axis="rank", values=[2, 1], test=np.zeros((3, 2)))
    with pytest.raises(UserError, match="positions must be numbers"):
        Curve(axis="rank", values=list("abc"), test=np.zeros((3, 3)))
    with pytest.raises(UserError, match="train_error has 4 seeds and test 6"):
        Curve(axis="rank", values=[1, 2], test=np.zeros((6, 2)), train_error=np.zeros((4, 2)))
    with pytest.raises(UserError, match="delta"):
        determine_verdict(interpolating(), delta=-1.0)
    for curve in (interpolating(), interpolating(seeds=2)):
        with pytest.raises(UserError, match=r"determine_verdict: level must be .* got 0\.7"):
            determine_verdict(curve, level=0.7)


def test_statistics_never_import_torch():
    code = "import sys, flatshift.experiments.statistics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --------------------------------------------------------------------------------------------- thresholds


def test_crossing_is_interpolated_on_a_log_axis():
    errors = np.tile([0.5, 0.3, 0.2, 0.0], (4, 1))
    found = find_crossing([1, 2, 4, 16], errors, 0.1)
    assert found.value == pytest.approx(8.0) and not found.rising and found.fitted == "some"
    assert found.low == pytest.approx(8.0) and found.high == pytest.approx(8.0)
    rising = find_crossing([1, 2, 4, 16], errors[:, ::-1], 0.1)
    assert rising.value == pytest.approx(math.sqrt(2)) and rising.rising
    linear = find_crossing([0, 1, 2, 4], errors, 0.1)
    assert linear.value == pytest.approx(3.0)


def test_crossing_pools_what_does_not_descend():
    errors = np.tile([0.5, 0.05, 0.2, 0.2, 0.0], (3, 1))  # pooled: 0.5, 0.15, 0.15, 0.15, 0
    assert 8 < find_crossing([1, 2, 4, 8, 16], errors, 0.1).value < 16


def test_no_crossing_says_on_which_side():
    values = [1, 2, 4]
    assert find_crossing(values, np.full((3, 3), 0.01)).fitted == "all"
    found = find_crossing(values, np.tile([0.5, 0.4, 0.3], (3, 1)))
    assert found.fitted == "none" and found.value is None
    assert emc_from_curve(values, np.full((3, 3), 0.01)).side == "beyond"
    assert emc_from_curve(values, np.full((3, 3), 0.4)).side == "before"
    assert str(emc_from_curve(values, np.full((3, 3), 0.4))) == "below 1 rows"


@pytest.mark.parametrize("sd", [0.01, 0.05])
def test_interval_of_the_crossing_covers(sd):
    generator = np.random.default_rng(4)
    values = np.array([50, 100, 200, 400, 800, 1600])
    mean = np.array([0.0, 0.02, 0.07, 0.16, 0.26, 0.33])
    true = math.exp(np.interp(0.1, mean, np.log(values)))
    missed = 0
    for _ in range(400):
        found = emc_from_curve(values, mean + sd * generator.standard_normal((5, 6)))
        missed += not ((found.low or 0) <= true <= (found.high or math.inf))
    assert missed <= stats.binom.ppf(0.999, 400, 0.05)


def test_bisection_finds_the_largest_fitted_number_of_rows():
    tried: list[tuple[int, int]] = []

    def train_error(rows: int, seed: int) -> float:
        tried.append((rows, seed))
        return 0.0 if rows <= 300 else 0.5 * (1 - 300 / rows) + 0.001 * seed

    true = 300 / (1 - 2 * 0.099)  # the mean over seeds is 0.001 higher
    found = effective_model_complexity(train_error, epsilon=0.1, low=10, high=10_000, seeds=(0, 1, 2), resolution=0.05)
    assert found.side == "inside" and found.value == pytest.approx(true, rel=0.05)
    assert found.low <= true * 1.02 and found.high >= true * 0.98
    assert len({rows for rows, _ in tried}) == len(tried) / 3 < 15
    assert [n for n, _ in found.points] == sorted(n for n, _ in found.points)


@pytest.mark.parametrize(("error", "side", "calls"), [(0.0, "beyond", 2), (0.9, "before", 1), (math.nan, "before", 1)])
def test_bisection_stops_where_the_answer_is_outside(error, side, calls):
    count = []
    found = effective_model_complexity(lambda n, s: count.append(n) or error, low=8, high=64, seeds=(0,))
    assert found.side == side and found.value is None and len(count) == calls


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"low": 5, "high": 5}, "low < high"),
        ({"seeds": ()}, "at least one seed"),
        ({"epsilon": 1.5}, "between 0 and 1"),
        ({"resolution": 0.0}, "resolution"),
    ],
)
def test_bisection_refuses(arguments, words):
    with pytest.raises(UserError, match=words):
        effective_model_complexity(lambda n, s: 0.0, **{"low": 1, "high": 9, "seeds": (0,), **arguments})


def test_crossing_refuses_what_is_no_curve():
    with pytest.raises(UserError, match=r"table \[seeds, 3\]"):
        find_crossing([1, 2, 3], np.zeros((2, 2)))
    with pytest.raises(UserError, match="ascend"):
        find_crossing([1, 1, 3], np.zeros((2, 3)))
    with pytest.raises(UserError, match="no seed has finite"):
        find_crossing([1, 2, 3], np.full((2, 3), np.nan))
    with pytest.raises(UserError, match="positive"):
        emc_from_curve([0, 1], np.zeros((2, 2)))
