"""Our weighted, vectorised metrics against scikit-learn, on test sets and on explicit resamples."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from flatshift.finetune.evaluate.prediction_metrics import (
    LabelPairs,
    accuracy,
    classification_metrics,
    f1_macro,
    matthews,
)

THEIRS = {
    "accuracy": accuracy_score,
    "f1_macro": lambda y, p: f1_score(y, p, average="macro", zero_division=0),
    "matthews": matthews_corrcoef,
}


def drawn(classes: int, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    true = rng.integers(0, classes, n)
    return true, np.where(rng.random(n) < 0.6, true, rng.integers(0, classes, n))


@pytest.mark.filterwarnings("ignore:A single label")
@pytest.mark.parametrize(("classes", "n"), [(2, 1), (2, 2), (2, 50), (3, 7), (5, 400), (77, 300), (400, 200)])
def test_values_are_scikit_learns(classes, n):
    for seed in range(3):
        true, predicted = drawn(classes, n, seed)
        ours = classification_metrics(true.tolist(), predicted.tolist(), resamples=5, confidence=0.95, seed=0)
        for name, metric in THEIRS.items():
            assert ours[name]["value"] == pytest.approx(metric(true, predicted), abs=1e-12), name
            assert ours[name]["n"] == n
        assert ours["majority_floor"]["value"] == np.bincount(true).max() / n


@pytest.mark.parametrize("name", list(THEIRS))
def test_each_resample_is_what_scikit_learn_says_of_it(name):
    true, predicted = drawn(4, 30, 0)
    pairs = LabelPairs.of(true.tolist(), predicted.tolist())
    rng = np.random.default_rng(1)
    index = rng.integers(0, 30, size=(40, 30))
    weights = np.stack([np.bincount(pairs.kinds[row], minlength=len(pairs.true)) for row in index]).astype(float)
    ours = {"accuracy": accuracy, "f1_macro": f1_macro, "matthews": matthews}[name](pairs, weights)
    theirs = [THEIRS[name](true[row], predicted[row]) for row in index]
    np.testing.assert_allclose(ours, theirs, atol=1e-12)


@pytest.mark.parametrize("name", list(THEIRS))
def test_intervals_agree_with_a_bootstrap_by_hand(name):
    true, predicted = drawn(3, 200, 2)
    ours = classification_metrics(true.tolist(), predicted.tolist(), resamples=4000, confidence=0.9, seed=0)[name]
    rng = np.random.default_rng(5)
    by_hand = [THEIRS[name](true[i], predicted[i]) for i in rng.integers(0, 200, size=(600, 200))]
    low, high = np.quantile(by_hand, [0.05, 0.95])
    spread = high - low
    assert abs(ours["low"] - low) < 0.12 * spread and abs(ours["high"] - high) < 0.12 * spread


@pytest.mark.parametrize(
    ("true", "predicted", "expected"),
    [
        ([0, 0, 0], [0, 0, 0], {"accuracy": 1.0, "f1_macro": 1.0, "matthews": 0.0, "majority_floor": 1.0}),
        ([1, 1], [0, 0], {"accuracy": 0.0, "f1_macro": 0.0, "matthews": 0.0, "majority_floor": 1.0}),
        ([5], [5], {"accuracy": 1.0, "f1_macro": 1.0, "matthews": 0.0, "majority_floor": 1.0}),
        ([0, 1], [1, 0], {"accuracy": 0.0, "f1_macro": 0.0, "matthews": -1.0, "majority_floor": 0.5}),
    ],
)
def test_degenerate_sets_are_defined(true, predicted, expected):
    ours = classification_metrics(true, predicted, resamples=50, confidence=0.95, seed=0)
    assert {name: figure["value"] for name, figure in ours.items()} == expected
    alone = len(true) == 1
    bounded = [f for f in ours.values() if f["low"] is not None]  # those whose resamples are alike have none
    assert not (alone and bounded) and all(f["low"] <= f["value"] <= f["high"] for f in bounded)
    assert alone or ours["accuracy"] in bounded
