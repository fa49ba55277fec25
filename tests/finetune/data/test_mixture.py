"""Mixtures: the bound that is claimed, in whole numbers, against a brute count; epochs of each source; batches."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.data.encoding import encode
from flatshift.finetune.data.mixture import EpochSampler, Mixture, MixtureSampler, SampleProportions
from flatshift.finetune.errors import UserError
from flatshift.finetune.tasks import Classify, Completion, LanguageModel
from tests.support.data_models import byte_tokenizer, epochs_at, text_rows

TOKENIZER = byte_tokenizer()
SIZES, WEIGHTS = (20, 7, 10), (0.5, 0.2, 0.3)
MIXTURE = Mixture(("a", "b", "c"), WEIGHTS, SIZES)


def worst(weights, length) -> Fraction:
    """The largest |c_i(n) − n w_i| over every prefix; in whole numbers, ten-thousandths of the weights."""
    whole = np.array([round(Fraction(repr(weight)) * 10**4) for weight in weights])
    drawn = SampleProportions(weights).sources(0, length)
    counts = np.cumsum(drawn[:, None] == np.arange(len(weights)), axis=0)
    places = np.arange(1, length + 1)[:, None]
    return Fraction(int(np.abs(counts * whole.sum() - places * whole).max()), int(whole.sum()))


def lagging_most(weights, length) -> float:
    """The same for the usual rule, the largest deficit first."""
    shares = [weight / sum(weights) for weight in weights]
    behind, most = [0.0] * len(weights), 0.0
    for _ in range(length):
        behind = [b + share for b, share in zip(behind, shares, strict=True)]
        behind[behind.index(max(behind))] -= 1
        most = max(most, max(behind), -min(behind))
    return most


def test_every_prefix_is_within_the_best_bound_there_is():
    rng = np.random.default_rng(0)
    cases = [[0.7, 0.3], [1, 1, 1], [0.9, *[0.1 / 9] * 9], [1e-3, 1], [5, 4, 3, 2, 1], [0.34, 0.33, 0.33]]
    cases += [np.round(rng.dirichlet(np.full(k, 0.5)) + 1e-4, 4).tolist() for k in (2, 3, 4, 6, 9) for _ in range(6)]
    for weights in cases:
        k = len(weights)
        assert worst(weights, 1200) <= 1 - Fraction(1, 2 * k - 2), weights


def test_the_largest_deficit_first_would_not_keep_it():
    """Why the rule is what it is: the usual one leaves a source a whole sample and more behind."""
    rng = np.random.default_rng(1)
    cases = [np.round(rng.dirichlet(np.full(8, 0.4)) + 1e-3, 3).tolist() for _ in range(25)]
    assert max(lagging_most(weights, 600) for weights in cases) > 1
    assert max(worst(weights, 600) for weights in cases) <= 1 - Fraction(1, 14)


def test_the_sequence_repeats_and_any_place_can_be_asked_for_first():
    proportions = SampleProportions([0.7, 0.2, 0.1])
    assert (proportions.parts, proportions.period) == ([7, 2, 1], 10)
    assert Counter(proportions.sources(0, 10).tolist()) == {0: 7, 1: 2, 2: 1}
    long = [0.3333, 0.6667, 0.0123]
    forward, fresh = SampleProportions(long), SampleProportions(long)
    whole = forward.sources(0, 30_000)
    assert (fresh.sources(20_123, 20_200) == whole[20_123:20_200]).all()
    for n in (0, 1, 4095, 4096, 4097, 20_000, 10_123 * 7 + 5):
        assert (SampleProportions(long).counts(n) == np.bincount(forward.sources(0, n), minlength=3)).all() or n == 0
    assert SampleProportions(long).counts(0).tolist() == [0, 0, 0]
    assert (SampleProportions([2, 0, 1]).sources(0, 9) != 1).all()
    assert SampleProportions([4.2]).sources(3, 6).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("weights", "words"),
    [([0.0, 0.0], "sum to 0"), ([1, -1], "numbers ≥ 0"), ([1, float("nan")], "≥ 0"), ([float("inf")], "≥ 0")],
)
def test_weights_that_are_none(weights, words):
    with pytest.raises(UserError, match=words):
        SampleProportions(weights)


def test_each_source_goes_through_its_own_epochs():
    stream = MixtureSampler(MIXTURE, seed=3)
    drawn, epochs = stream.draw(0, 500)
    starts = np.concatenate([[0], np.cumsum(SIZES)])
    for i, size in enumerate(SIZES):
        mine = (drawn >= starts[i]) & (drawn < starts[i + 1])
        own, turn = drawn[mine] - starts[i], epochs[mine]
        assert len(own) == stream.counts(500)[i]
        for e in range(len(own) // size):
            assert sorted(own[e * size : (e + 1) * size]) == list(range(size))
            assert (turn[e * size : (e + 1) * size] == e).all()
        assert own[:size].tolist() != own[size : 2 * size].tolist()
    for first in (0, 1, 123, 499):
        again = MixtureSampler(MIXTURE, seed=3).draw(first, 500)
        assert (again[0] == drawn[first:]).all() and (again[1] == epochs[first:]).all()
    # Another source, or none, changes nothing in the order of this one.
    alone = MixtureSampler(Mixture(("a",), (1.0,), (20,)), seed=3).draw(0, 40)[0]
    assert alone.tolist() == drawn[drawn < 20][:40].tolist()


def test_epochs_are_the_permutations_one_behind_another():
    stream = EpochSampler(7, 4)
    naive = np.concatenate([EpochSampler(7, 4).order(e) for e in range(5)])
    for first, stop in itertools.combinations(range(0, 35, 3), 2):
        drawn, epochs = stream.draw(first, stop)
        assert drawn.tolist() == naive[first:stop].tolist()
        assert epochs.tolist() == [n // 7 for n in range(first, stop)]


TASKS = [LanguageModel(pack=False), LanguageModel(pack=True), Completion(pack=True), Classify()]


def batches(task, *, group=None, mixture=MIXTURE, share=(0, 1), batch_size=4, count=37, seed=5) -> TrainingDataLoader:
    examples = encode(text_rows(count), task=task, tokenizer=TOKENIZER, max_length=48).examples
    settings = {"batch_size": batch_size, "accumulate": 2, "seed": seed, "max_length": 48, "pad_id": 0, "share": share}
    return TrainingDataLoader(examples, task=task, mixture=mixture, group=group, **settings)


@pytest.mark.parametrize("task", TASKS, ids=repr)
@pytest.mark.parametrize("group", [None, "length"])
def test_batches_of_a_mixture_are_a_pure_function_of_the_step(task, group):
    if group and getattr(task, "pack", False):
        with pytest.raises(UserError, match=r"train\.group: length has no use"):
            batches(task, group=group)
        return
    one, other = batches(task, group=group), batches(task, group=group)
    forward = [(one.rows_at(step), epochs_at(one, step)) for step in range(40)]
    for step in (39, 3, 17, 0, 38):
        assert (other.rows_at(step), epochs_at(other, step)) == forward[step]
    rows = [row for made, _ in forward for micro in made for row in micro]
    turns = [turn for _, made in forward for micro in made for turn in micro]
    seen = Counter()
    for (row, turn), *_ in zip(zip(rows, turns, strict=True), strict=True):
        for i, e in zip(row, turn, strict=True):
            seen[i, e] += 1
    assert set(seen.values()) == {1}  # an example once in each of its source's epochs
    assert batches(task, group=group, seed=6).rows_at(0) != forward[0][0]


@pytest.mark.parametrize("group", [None, "length"])
def test_ranks_share_the_rows_of_one_process(group):
    alone = batches(Classify(), group=group)
    ranks = [batches(Classify(), group=group, share=(i, 2)) for i in range(2)]
    for step in range(9):
        whole = alone.at(step)
        parts = [rank.at(step) for rank in ranks]
        assert [m.rows for m in whole] == [a.rows + b.rows for a, b in zip(*parts, strict=True)]
        assert alone.supervised(step) == ranks[0].supervised(step) == sum(m.supervised for p in parts for m in p)


def test_samples_of_unpacked_rows_keep_the_proportions_and_packed_ones_after_each_round():
    plain = batches(Classify())
    drawn = [i for step in range(25) for micro in plain.rows_at(step) for (i,) in micro]
    borders = np.cumsum(SIZES)
    for n in range(1, len(drawn) + 1):
        counts = np.bincount(np.searchsorted(borders, drawn[:n], side="right"), minlength=3)
        assert np.abs(counts - n * np.array(WEIGHTS)).max() <= 0.75
    packed = batches(LanguageModel())
    for e in range(3):
        found = [i for row in packed.epoch(e) for i in row]
        expected = packed.samples.draw(e * 37, (e + 1) * 37)[0]
        assert sorted(found) == sorted(expected.tolist())


def test_length_groups_save_padding_and_lose_no_sample():
    task = Classify()
    lengths = np.array(
        [len(e.input_ids) for e in encode(text_rows(400), task=task, tokenizer=TOKENIZER, max_length=48).examples]
    )

    def naive_padding(made: TrainingDataLoader, steps: int) -> float:
        micros = [micro for step in range(steps) for micro in made.rows_at(step)]
        widths = [max(lengths[i] for (i,) in micro) * len(micro) for micro in micros]
        return 1 - sum(lengths[i] for micro in micros for (i,) in micro) / sum(widths)

    by_chance = batches(task, mixture=None, count=400)
    grouped = batches(task, mixture=None, count=400, group="length")
    for made in (by_chance, grouped):
        assert made.padding(20) == pytest.approx(naive_padding(made, 20))
    assert grouped.padding(20) < by_chance.padding(20) / 3
    # A window is 50 micro-batches: as many samples, the same ones as without groups, in another order.
    window = [[i for step in range(25) for m in made.rows_at(step) for (i,) in m] for made in (by_chance, grouped)]
    assert sorted(window[0]) == sorted(window[1]) and window[0] != window[1]
    means = [lengths[[i for (i,) in m]].mean() for step in range(25) for m in grouped.rows_at(step)]
    assert abs(np.corrcoef(np.arange(len(means)), means)[0, 1]) < 0.5  # long ones do not come first
    few = batches(task, mixture=None, count=9, group="length")
    assert max(Counter(i for m in few.rows_at(0) for (i,) in m).values()) == 1  # no window is longer than an epoch


@pytest.mark.parametrize(("task", "group"), [(Classify(), None), (Classify(), "length"), (LanguageModel(), None)])
def test_a_source_comes_again_exactly_when_its_examples_are_used_up(task, group):
    made = batches(task, batch_size=2, group=group)
    borders = np.concatenate([[0], np.cumsum(SIZES)])
    for source in range(3):
        for steps in range(1, 16):
            drawn = [i for step in range(steps) for micro in made.rows_at(step) for row in micro for i in row]
            own = [i for i in drawn if borders[source] <= i < borders[source + 1]]
            assert made.repeats_source(steps, source) == (len(own) > len(set(own))), (source, steps)


def test_a_source_without_samples_is_refused():
    with pytest.raises(UserError, match=r"data\.train\.sources\.b has no usable row"):
        MixtureSampler(Mixture(("a", "b"), (1, 1), (3, 0)), seed=0)
