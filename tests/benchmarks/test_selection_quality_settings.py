"""Studies of selectors, without a run: which keys are taken, what is said of figures, and the intervals under it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.studies.selection_quality.settings import QualityArm, QualityTarget

REFUSED_KEYS = [
    (QualityArm, {"warmup.steps": 200}, "set has 'warmup.steps', but an arm sets select.method"),
    (QualityArm, {"train": {"steps": 99}}, "set has 'train.steps'"),
    (QualityArm, {"select.method.kind": "gotd", "adapter.rank": 64}, "set has 'adapter.rank'"),
    (QualityArm, {"select.embedder.kind": "backbone"}, "set has 'select.embedder.kind'"),
    (QualityArm, {"select.feature-type": "float32"}, "set has 'select.feature_type'"),
    (QualityTarget, {"select.embedder.kind": "backbone"}, "'select.embedder.kind', but a target"),
    (QualityTarget, {"backbone": "x"}, "set has 'backbone'"),
    (QualityTarget, {"train.seed": 3}, "'train.seed', which the study overwrites in every run"),
    (QualityTarget, {"warmup.lr": 0.1}, "set has 'warmup.lr', which"),
]


@pytest.mark.parametrize(("kind", "keys", "words"), REFUSED_KEYS)
def test_keys_that_would_be_ignored_or_make_arms_unlike_are_refused(kind, keys: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kind(set=keys, **({"file": "a.jsonl"} if kind is QualityTarget else {}))


def test_keys_of_a_method_and_of_how_a_target_trains_are_taken() -> None:
    QualityArm(set={"select.method": {"kind": "gotd", "rounds": 5}, "select.method.epsilon": 0.1})
    QualityTarget(file="a.jsonl", set={"train.max_length": 32, "warmup.steps": 8, "eval.batch_size": 4})
    with pytest.raises(ValueError, match=r"'select\.method\.kind', but an arm of source pool runs no selector"):
        QualityArm(source="pool", set={"select.method.kind": "knn"})


# --------------------------------------------------------------------------------------------- what is said


def losses(*differences: tuple[float, float]) -> str:
    """What is said of gotd − knn, given as (mean, lower end), one a target."""
    from benchmarks.studies.selection_quality.answers import _losses

    targets = {
        f"t{i}": {"budgets": {"30": {"knn": {"nats_focus": {"value": mean, "low": low, "high": 2 * mean - low}}}}}
        for i, (mean, low) in enumerate(differences)
    }
    arms = {name: {"source": "selector"} for name in ("random", "gotd", "knn")}
    return "".join(_losses({"focus": "gotd", "baseline": "random", "arms": arms, "targets": targets}))


def test_a_mean_that_is_behind_is_told_where_no_interval_is() -> None:
    assert losses((0.2, -0.1), (-0.1, -0.3)) == (
        "In perplexity, on no target and budget does an uncorrected 95 % interval put gotd behind another selector; "
        "its mean is behind in 1 of 2 comparisons."
    )
    lost = losses((0.2, 0.1), (-0.1, -0.3), (0.1, -0.1))
    assert lost.startswith(
        "In perplexity, 1 of 3 uncorrected 95 % intervals put gotd behind: on t0 at 30 (knn −18.1 %)"
    )
    assert lost.endswith("its mean is behind in 2 of 3 comparisons.") and losses() == ""


def test_accuracy_that_holds_for_these_rows_only_is_told() -> None:
    from benchmarks.studies.selection_quality.answers import _accuracy

    found = {"value": 0.05, "p_holm": 0.01, "detectable": 0.1}
    arms = {
        "a": {"accuracy": {**found, "bootstrap": {"low": -0.01, "high": 0.1}}},
        "b": {"accuracy": {**found, "bootstrap": {"low": 0.01, "high": 0.1}}},
    }
    (told,) = _accuracy({"baseline": "random", "arms": arms})
    assert told.endswith(
        "with a (+5.0 points) and b (+5.0 points); with other test rows too, by the bootstrap, a may not differ."
    )


def test_a_bootstrap_over_seeds_and_rows_is_the_naive_one() -> None:
    from flatshift.experiments.statistics.intervals import seed_item_bootstrap

    rng = np.random.default_rng(0)
    tables = [rng.choice([-1.0, 0.0, 1.0], size=(5, 40), p=[0.2, 0.5, 0.3]), rng.choice([0.0, 1.0], size=(5, 60))]
    found = seed_item_bootstrap(tables, resamples=4000, rng=np.random.default_rng(1))
    naive = []
    for _ in range(4000):
        seeds = rng.integers(0, 5, 5)
        naive.append(
            np.mean([table[seeds][:, rng.integers(0, table.shape[1], table.shape[1])].mean() for table in tables])
        )
    mean = float(np.mean([table.mean() for table in tables]))
    wider = 2.776 / 1.96 * math.sqrt(5 / 4)  # five seeds resampled vary by 4/5 of their variance, and t is not normal
    low, high = mean + wider * (np.quantile(naive, [0.025, 0.975]) - mean)
    assert found["low"] == pytest.approx(low, abs=0.015) and found["high"] == pytest.approx(high, abs=0.015)
    seeds_alone = np.mean([table.mean(1) for table in tables], axis=0).std()
    assert found["high"] - found["low"] > 2 * 2.776 * seeds_alone / math.sqrt(4)  # rows are a chance of their own


def test_an_arm_without_a_p_keeps_the_family_as_large() -> None:
    from benchmarks.studies.selection_quality.analysis import _correct
    from flatshift.experiments.statistics.intervals import paired_test

    alike = paired_test({0: 0.71, 1: 0.62}, {0: 0.7, 1: 0.61})
    assert alike is not None and alike["p"] is None and alike["low"] is alike["high"] is alike["detectable"] is None
    same = paired_test({0: 0.7, 1: 0.6}, {0: 0.7, 1: 0.6})
    assert same is not None and same["p"] == 1.0 and same["low"] == same["high"] == 0.0
    family = [{"p": 0.01}, {**alike, "p_holm": None}, None, {"p": 0.03}]
    _correct(family)
    assert family[0]["p_holm"] == pytest.approx(0.04) and family[3]["p_holm"] == pytest.approx(0.09)
    assert family[1]["p_holm"] is None
