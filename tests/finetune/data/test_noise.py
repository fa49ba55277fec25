"""Label noise is exact, uniform over the other classes, nested in its rate, and reported."""

from __future__ import annotations

import numpy as np
import pytest

from flatshift.finetune.data.noise import flip_labels, flip_row_labels
from flatshift.finetune.errors import UserError
from tests.support.data_models import row


@pytest.mark.parametrize(("rate", "n"), [(0.0, 10), (0.1, 995), (0.25, 10), (1.0, 7)])
def test_exactly_the_share_is_replaced_by_another_class(rate, n):
    labels = [i % 4 for i in range(n)]
    noisy, flipped = flip_labels(labels, rate=rate, num_labels=4, seed=3)
    assert len(flipped) == int(rate * n + 0.5)
    assert [i for i in range(n) if noisy[i] != labels[i]] == flipped
    assert set(noisy) <= set(range(4))


def test_other_classes_are_equally_likely_and_rates_are_nested():
    labels = [2] * 30_000
    noisy, flipped = flip_labels(labels, rate=0.5, num_labels=4, seed=0)
    counts = np.bincount(noisy, minlength=4)
    assert counts[2] == 15_000
    assert np.abs(counts[[0, 1, 3]] - 5000).max() < 4 * np.sqrt(15_000 * 2 / 9)  # four binomial deviations
    fewer, some = flip_labels(labels, rate=0.1, num_labels=4, seed=0)
    assert set(some) < set(flipped) and all(fewer[i] == noisy[i] for i in some)
    assert flip_labels(labels, rate=0.1, num_labels=4, seed=1)[1] != some


def test_rows_get_the_new_label_and_their_ids_are_reported():
    rows = [row(i, text="t", label="ab"[i % 2]) for i in range(10)]
    new, ids = flip_row_labels(rows, rate=0.3, label_names=("a", "b", "c"), seed=0)
    changed = [old.id for old, now in zip(rows, new, strict=True) if old.values["label"] != now.values["label"]]
    assert sorted(ids) == sorted(changed) and len(ids) == 3
    assert [r.values["label"] for r in rows] == ["a", "b"] * 5  # the input is untouched


def test_what_cannot_be_noised():
    with pytest.raises(UserError, match=r"data\.label_noise: 1\.5 is not a share"):
        flip_labels([0], rate=1.5, num_labels=2, seed=0)
    with pytest.raises(UserError, match="only one"):
        flip_labels([0], rate=1.0, num_labels=1, seed=0)
    with pytest.raises(UserError, match=r"rows\.jsonl:1: label 'goood' is not one of the 2 classes; nearest is 'good'"):
        flip_row_labels([row(0, text="t", label="goood")], rate=1.0, label_names=("bad", "good"), seed=0)
