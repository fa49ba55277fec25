"""Bootstrap intervals: exact values, coverage, seeds, and what happens at the edges."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy.stats import binomtest

from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate.bootstrap import (
    ResampledMetric,
    bootstrap_interval,
    exact_share_interval,
    frequency_intervals,
    group_interval,
    ratio_interval,
    ratio_statistic,
)
from flatshift.finetune.evaluate.prediction_metrics import classification_metrics
from tests.support.counted_calls import python_calls


def test_ratio_is_weighted_by_its_denominator():
    figure = ratio_interval([1.0, 9.0], [1, 3], resamples=500, seed=0)
    assert figure["value"] == 2.5 and figure["n"] == 2
    assert (figure["low"], figure["high"]) == (1.0, 3.0)
    perplexity = ratio_interval([1.0, 9.0], [1, 3], transform=np.exp, resamples=500, seed=0)
    assert perplexity["value"] == pytest.approx(np.exp(2.5))
    assert perplexity["low"] == pytest.approx(np.exp(1.0)) and perplexity["high"] == pytest.approx(np.exp(3.0))


def test_intervals_cover_the_mean_as_often_as_they_say():
    rng = np.random.default_rng(0)
    covered = 0
    for seed in range(300):
        figure = ratio_interval(rng.normal(1.0, 1.0, 120), np.ones(120), resamples=400, confidence=0.9, seed=seed)
        covered += figure["low"] <= 1.0 <= figure["high"]
    assert 0.84 < covered / 300 < 0.95


def test_blocks_seeds_and_general_statistics():
    values = np.random.default_rng(0).normal(size=20_000)  # 210 resamples a block
    figure = bootstrap_interval([values], lambda x: np.median(x, axis=-1), resamples=300, seed=1)
    assert figure["value"] == np.median(values) and figure["low"] < figure["value"] < figure["high"]
    assert figure == bootstrap_interval([values], lambda x: np.median(x, axis=-1), resamples=300, seed=1)
    assert figure != bootstrap_interval([values], lambda x: np.median(x, axis=-1), resamples=300, seed=2)


def test_a_difference_is_of_the_same_rows_in_every_resample():
    """Of two models that differ by 0.1 on each row it has no width, though each of them has; the base covers fewer."""
    theirs = np.random.default_rng(0).normal(size=200)
    figure, base = (
        ResampledMetric.over([values], lambda x: x.mean(-1), rows)
        for values, rows in ((theirs + 0.1, np.arange(200)), (theirs[50:], np.arange(50, 200)))
    )
    found = group_interval(figure, [np.arange(180)], base, resamples=50)
    assert found is not None and found["n"] == 130
    assert [found["low"], found["value"], found["high"]] == pytest.approx([0.1, 0.1, 0.1])
    alone = group_interval(figure, [np.arange(180)], resamples=50)
    assert alone is not None and alone["high"] - alone["low"] > 0.1


def test_frequencies_agree_with_items():
    hits = np.random.default_rng(0).random(500) < 0.3
    by_item = ratio_interval(hits, np.ones(500), resamples=4000, seed=0)
    statistics = {"share": lambda counts: counts[:, 1] / counts.sum(-1)}
    by_kind = frequency_intervals(hits.astype(int), statistics, num_kinds=2, resamples=4000, seed=0)["share"]
    assert by_kind["value"] == by_item["value"]
    assert by_kind["low"] == pytest.approx(by_item["low"], abs=0.006)
    assert by_kind["high"] == pytest.approx(by_item["high"], abs=0.006)


def test_edges():
    assert ratio_interval([2.0], [1.0]) == {"value": 2.0, "low": None, "high": None, "n": 1}  # not that it is sure
    assert ratio_interval([2.0, 3.0], [1.0, 1.0], resamples=0) == {"value": 2.5, "low": None, "high": None, "n": 2}
    for numerator, denominator in (([np.nan, 1.0], [1, 1]), ([1.0, 2.0], [0, 0]), ([5000.0, 5000.0], [1, 1])):
        figure = ratio_interval(numerator, denominator, transform=np.exp, resamples=20)
        assert figure["value"] is None and figure["low"] is None
        json.dumps(figure, allow_nan=False)
    with pytest.raises(UserError, match="nothing to evaluate"):
        ratio_interval([], [])
    with pytest.raises(UserError, match="nothing to evaluate"):
        classification_metrics([], [], resamples=10, confidence=0.95, seed=0)
    with pytest.raises(UserError, match=r"eval\.confidence"):
        ratio_interval([1.0], [1.0], confidence=95)
    with pytest.raises(UserError, match=r"eval\.bootstrap"):
        ratio_interval([1.0], [1.0], resamples=-1)


def test_the_work_of_python_does_not_grow_with_resamples_or_items():
    rng = np.random.default_rng(0)
    true = rng.integers(0, 77, 5000)
    predicted = np.where(rng.random(5000) < 0.7, true, rng.integers(0, 77, 5000))

    def work(items: int, resamples: int) -> int:
        return python_calls(
            lambda: (
                classification_metrics(
                    true[:items].tolist(), predicted[:items].tolist(), resamples=resamples, confidence=0.95, seed=0
                ),
                ratio_interval(rng.random(items), rng.random(items), resamples=resamples),
            )
        )

    work(50, 10)  # what is imported late
    assert work(5000, 1000) < 2 * work(500, 100) < 2000


@pytest.mark.parametrize("right", [0, 12])
def test_a_share_of_all_or_of_none_has_the_interval_that_so_few_rows_leave(right):
    """Resamples of rows that are all alike are alike too; what n of them leave possible is Clopper and Pearson's."""
    exact = binomtest(right, 12).proportion_ci(0.9, method="exact")
    said = [0] * 12 if right else [1] * 12
    figures: dict[str, ResampledMetric] = {}
    draw = {"resamples": 100, "confidence": 0.9, "seed": 0}
    found = classification_metrics([0] * 12, said, **draw, figures=figures)
    assert (found["accuracy"]["low"], found["accuracy"]["high"]) == pytest.approx((exact.low, exact.high))
    assert group_interval(figures["accuracy"], [np.arange(12)], resamples=100, confidence=0.9) == found["accuracy"]
    assert classification_metrics([0] * 12, said, resamples=0, confidence=0.9, seed=0)["accuracy"]["low"] is None


def test_other_figures_and_single_rows_keep_their_interval():
    loss = ResampledMetric.over([np.arange(5.0), np.ones(5)], ratio_statistic())
    alone = group_interval(loss, [np.arange(5)], resamples=10)
    assert alone is not None and alone["low"] < alone["value"] == 2.0 < alone["high"]
    alike = group_interval(ResampledMetric.over([np.ones(5), np.ones(5)], ratio_statistic()), [np.arange(5)])
    assert alike == {"value": 1.0, "low": None, "high": None, "n": 5}  # as for a single row, not a certain 1
    share = ResampledMetric.over([np.ones(5), np.ones(5)], ratio_statistic(), share=True)
    one = group_interval(share, [np.arange(1)], resamples=10)
    assert one is not None and one["low"] is None
    inside = ratio_interval([1.0, 0.0], [1, 1], resamples=50)
    assert exact_share_interval(inside, 0.95) is inside
