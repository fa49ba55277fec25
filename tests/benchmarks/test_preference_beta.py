"""The study of preferences over β: who tells pairs apart and how often wrongly, and when a curve is said to turn."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import preference_beta as study
from benchmarks._study_results import read


def runs_of(dev, test, figure="loss"):
    """Runs of as many β as `dev` has values, a hundredth apart over the seeds on test."""
    return [
        {
            "beta": 10.0**place,
            "seed": seed,
            "dev": {figure: dev[place]},
            "test": {figure: test[place] + 0.01 * seed},
        }
        for seed in range(study.SEEDS)
        for place in range(len(dev))
    ]


def test_a_curve_is_judged_at_the_value_that_dev_rows_chose():
    runs = runs_of([3.0, 1.0, 1.1, 2.0], [2.5, 1.2, 0.9, 1.9])  # on test another one is lowest
    best, small, large = study.turned(runs, "loss")
    assert best == 10.0
    assert small.value == pytest.approx(1.3) and large.value == pytest.approx(0.7)
    assert small.low == pytest.approx(1.3), "differences are paired by seed"


def test_more_is_better_of_anything_but_the_loss():
    best, small, large = study.turned(runs_of([1.0, 5.0, 2.0], [1.0, 4.0, 2.0], "gold"), "gold")
    assert best == 10.0 and small.value == pytest.approx(3.0) and large.value == pytest.approx(2.0)


@pytest.mark.parametrize(("dev", "none"), [([1.0, 2.0, 3.0], 1), ([3.0, 2.0, 1.0], 2)])
def test_no_end_is_worse_than_itself(dev, none):
    found = study.turned(runs_of(dev, dev), "loss")
    assert found[none] is None and found[3 - none] is not None


def test_pairs_are_told_right_the_more_often_the_more_they_differ():
    many = 2000
    for ahead in (1, 6):
        drawn = [("p", "b" * ahead, "") if i % 2 else ("p", "", "b" * ahead) for i in range(many)]
        right = np.mean([pair["chosen"] != "" for pair in study.pairs(drawn, len)])
        assert right == pytest.approx(1 / (1 + np.exp(-ahead / study.NOISE)), abs=0.03)


def test_the_gold_reward_counts_different_words_that_are_often_in_the_pool():
    reward = study.gold_reward()
    assert reward("the way of the people") == 4 and reward("The THE the") == 1
    assert reward("quabbel frizzonk") == 0 == reward("")


def test_the_page_says_what_the_results_say():
    found = read(study.RUNS)
    page = study.PAGE.read_text(encoding="utf-8")
    told = page.split(study.BEGIN)[1].split(study.END)[0]
    assert told.strip() == study.words(found).strip(), f"run: python -m benchmarks.{study.NAME}"
