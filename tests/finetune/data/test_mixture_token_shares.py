"""Mixtures weighed by tokens: the bound that is claimed, in whole numbers, against a brute count; what hangs on it."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc

import numpy as np
import pytest

from flatshift.experiments.data.sources import count_source_epochs, format_source_epochs, mixture_record
from flatshift.experiments.data.splits import prepare_data
from flatshift.experiments.recipe import from_override, load_recipe, recipe_key
from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.data.config import Source, TrainFiles
from flatshift.finetune.data.encoding import encode
from flatshift.finetune.data.mixture import Mixture, MixtureSampler, SampleProportions, TokenProportions
from flatshift.finetune.errors import UserError
from flatshift.finetune.tasks import Classify, LanguageModel
from tests.support.data_models import byte_tokenizer, epochs_at, row, write_jsonl

TOKENIZER = byte_tokenizer()
SIZES, WEIGHTS = (20, 7, 10), (0.5, 0.2, 0.3)
MIXTURE = Mixture(("a", "b", "c"), WEIGHTS, SIZES, weigh="tokens")
WORDS = (1, 4, 9)
"""Words of a text: sources whose samples are of unlike lengths."""


def drifts(weights, lengths, drawn) -> np.ndarray:
    """(c_i(n) − T(n) w_i) Σ weights, for every prefix and source, in whole ten-thousandths of the weights."""
    whole = np.array([round(weight * 10**4) for weight in weights], dtype=object)
    taken, total, places = [0] * len(weights), 0, [0] * len(weights)
    found = []
    for source in drawn:
        own = lengths[source]
        length = int(own[places[source] % len(own)])
        places[source] += 1
        taken[source] += length
        total += length
        found.append([c * whole.sum() - total * w for c, w in zip(taken, whole, strict=True)])
    return np.array(found, dtype=object)


def cases():
    rng = np.random.default_rng(0)
    fixed = [[0.7, 0.3], [1, 1, 1], [0.9, *[0.02] * 5], [1e-3, 1], [5, 4, 3, 2, 1], [3], [2, 0, 1]]
    drawn = [np.round(rng.dirichlet(np.full(k, 0.5)) + 1e-3, 3).tolist() for k in (2, 3, 5, 9) for _ in range(4)]
    for weights in [*fixed, *drawn]:
        scales = rng.choice([2, 20, 400], len(weights))
        yield weights, [rng.integers(1, scale, size=rng.integers(1, 40)) for scale in scales]


def tokens_of(weights, lengths) -> TokenProportions:
    """Sources whose epochs all have the same order."""
    return TokenProportions(weights, [lambda e, own=own: own for own in lengths])


def test_every_prefix_is_within_one_sample_of_its_share():
    for weights, lengths in cases():
        order = tokens_of(weights, lengths)
        drawn = order.sources(0, 800)
        found = drifts(weights, lengths, drawn)
        whole = [round(weight * 10**4) for weight in weights]
        used = [own.max() for own, weight in zip(lengths, weights, strict=True) if weight]
        assert found.min() >= -int(max(used)) * sum(whole), weights
        for i, own in enumerate(lengths):
            assert found[:, i].max() <= int(own.max()) * (sum(whole) - whole[i]), (weights, i)
        assert sum(order.shares) == pytest.approx(1) and set(drawn.tolist()) <= {i for i, w in enumerate(weights) if w}


def test_shares_of_samples_would_not_keep_it():
    lengths = [np.array([2]), np.array([100])]
    by_rows = drifts([1, 1], lengths, SampleProportions([1, 1]).sources(0, 400))
    by_tokens = drifts([1, 1], lengths, tokens_of([1, 1], lengths).sources(0, 400))
    assert np.abs(by_rows).max() > 50 * 100 * 20000 and np.abs(by_tokens).max() <= 100 * 20000


def test_any_place_can_be_asked_for_first():
    rng = np.random.default_rng(2)
    lengths = [rng.integers(1, 50, size=(9, 11)), rng.integers(1, 9, size=(9, 30))]  # an order for each epoch

    def made():
        return TokenProportions([0.3333, 0.6667], [lambda e, own=own: own[e % 9] for own in lengths])

    forward = made()
    whole = forward.sources(0, 9000)
    assert (made().sources(8123, 8200) == whole[8123:8200]).all() and len(made().sources(5, 5)) == 0
    for n in (0, 1, 4095, 4096, 4097, 8999):
        assert made().counts(n).tolist() == np.bincount(whole[:n], minlength=2).tolist() == forward.counts(n).tolist()


def lengths_of(examples) -> np.ndarray:
    return np.array([len(example.input_ids) for example in examples])


def examples_of(task):
    texts = [" ".join(["word"] * (1 + (i * 7) % WORDS[k])) for k, size in enumerate(SIZES) for i in range(size)]
    rows = [row(i, text=text, label="ab"[i % 2]) for i, text in enumerate(texts)]
    return encode(rows, task=task, tokenizer=TOKENIZER, max_length=64).examples


def batches(task, **more) -> TrainingDataLoader:
    how = {"batch_size": 4, "accumulate": 2, "seed": 5, "max_length": 64, "pad_id": 0, "mixture": MIXTURE}
    return TrainingDataLoader(examples_of(task), task=task, **{**how, **more})


def test_each_source_goes_through_its_own_epochs_as_without():
    """What a source gives is what it gives where samples are weighed; only when it is asked differs."""
    lengths = lengths_of(examples_of(Classify()))
    stream = MixtureSampler(MIXTURE, 3, lengths)
    drawn, epochs = stream.draw(0, 300)
    by_rows = MixtureSampler(dataclasses.replace(MIXTURE, weigh="rows"), 3).draw(0, 900)
    starts = np.concatenate([[0], np.cumsum(SIZES)])
    for i in range(3):
        mine, theirs = ((d >= starts[i]) & (d < starts[i + 1]) for d in (drawn, by_rows[0]))
        count = int(mine.sum())
        assert count == stream.counts(300)[i]
        assert (drawn[mine] == by_rows[0][theirs][:count]).all() and (epochs[mine] == by_rows[1][theirs][:count]).all()
    for first in (0, 1, 123, 299):
        again = MixtureSampler(MIXTURE, 3, lengths).draw(first, 300)
        assert (again[0] == drawn[first:]).all() and (again[1] == epochs[first:]).all()
    counts = stream.counts(300)
    assert counts / 300 == pytest.approx(stream.shares, abs=0.02)
    assert np.abs(counts / 300 - WEIGHTS).max() > 0.1  # it is not the samples that have these shares
    first_again = int(np.flatnonzero(epochs > 0)[0])
    assert 0.6 < stream.epoch_size / first_again < 1.5


@pytest.mark.parametrize("group", [None, "length"])
def test_batches_keep_the_shares_of_tokens_and_are_a_pure_function_of_the_step(group):
    made, other = batches(Classify(), group=group), batches(Classify(), group=group)
    forward = [(made.rows_at(step), epochs_at(made, step)) for step in range(30)]
    for step in (29, 3, 17, 0, 28):
        assert (other.rows_at(step), epochs_at(other, step)) == forward[step]
    halves = [batches(Classify(), group=group, share=(i, 2)).at(7) for i in range(2)]
    whole = made.at(7)
    assert [m.rows for m in whole] == [a.rows + b.rows for a, b in zip(*halves, strict=True)]
    drawn = [i for rows, _ in forward for micro in rows for (i,) in micro]
    window = 1 if group is None else made._window  # inside a window the order is that of lengths
    assert len(drawn) == 240 and window <= 80
    lengths = lengths_of(examples_of(Classify()))
    assert np.abs(off_share(drawn, lengths)[window - 1 :: window]).max() <= lengths.max()


def off_share(drawn, lengths) -> np.ndarray:
    """After each of the samples `drawn`, how many tokens every source has more than its share, (n, 3)."""
    mine = np.searchsorted(np.cumsum(SIZES), drawn, side="right")[:, None] == np.arange(3)
    tokens = lengths[drawn][:, None]
    return np.cumsum(tokens * mine, axis=0) - np.cumsum(tokens, axis=0) * WEIGHTS


def test_packed_rows_keep_them_after_each_round():
    lengths, off = lengths_of(examples_of(LanguageModel())), {}
    for weigh in ("tokens", "rows"):
        made = batches(LanguageModel(), mixture=dataclasses.replace(MIXTURE, weigh=weigh))
        drawn = [i for e in range(4) for packed in made.epoch(e) for i in packed]
        assert len(drawn) == 4 * 37
        off[weigh] = np.abs(off_share(drawn, lengths)[36::37]).max(axis=1)
    assert (off["tokens"] <= lengths.max()).all() and (off["rows"] > lengths.max()).all()


def test_a_long_epoch_is_not_held_as_python_numbers():
    epoch = np.random.default_rng(0).integers(1000, 2000, 200_000)
    order = TokenProportions([1, 1], [lambda e: epoch, lambda e: epoch[::-1]])
    tracemalloc.start()
    drawn = order.sources(0, 9000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < epoch.nbytes / 2  # as Python numbers it is more than four times as large
    assert np.abs(drifts([1, 1], [epoch, epoch[::-1]], drawn)).max() <= 2000 * 20000


@pytest.mark.parametrize("task", [Classify(), LanguageModel()], ids=lambda task: task.kind)
def test_a_source_comes_again_exactly_when_its_examples_are_used_up(task):
    made = batches(task, batch_size=2)
    borders = np.concatenate([[0], np.cumsum(SIZES)])
    for source in range(3):
        for steps in range(1, 14):
            drawn = [i for step in range(steps) for micro in made.rows_at(step) for packed in micro for i in packed]
            own = [i for i in drawn if borders[source] <= i < borders[source + 1]]
            assert made.repeats_source(steps, source) == (len(own) > len(set(own))), (source, steps)


RECIPE = """
backbone: flatshift-5m
task: {kind: classify}
data:
  cache: null
  train:
    sources:
      short: {files: [DIR/short.jsonl], weight: 1}
      long: {files: [DIR/long.jsonl], weight: 1, when_over: refuse}
train: {max_length: 48, steps: 6, batch_size: 4}
"""


def test_a_recipe_says_so_and_only_then_is_it_another_run(tmp_path):
    for name, words in (("short", 1), ("long", 12)):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": "word " * words + str(i), "label": i % 2} for i in range(30)])
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("DIR", str(tmp_path)), encoding="utf-8")
    plain, rows, tokens = (
        load_recipe(str(path), [from_override("data.train.weigh", json.dumps(w)) for w in told]).recipe
        for told in ((), ("rows",), ("tokens",))
    )
    assert recipe_key(plain, []) == recipe_key(rows, []) != recipe_key(tokens, [])
    prepared = prepare_data(tokens)
    assert prepare_data(plain).mixture.weigh == "rows" and prepared.mixture.weigh == "tokens"
    made = TrainingDataLoader(
        prepared.train, task=tokens.task, batch_size=4, seed=0, max_length=48, pad_id=0, mixture=prepared.mixture
    )
    told = count_source_epochs(made, prepared.mixture, 6)
    assert told[0]["drawn"] > 3 * told[1]["drawn"] and sum(one["drawn"] for one in told) == 24
    assert format_source_epochs(told, 6, approximate=False)[0].startswith("source short: 50.0% of tokens, 30 samples, ")
    assert [one["of"] for one in mixture_record(prepared.mixture)] == ["tokens", "tokens"]
    with pytest.raises(UserError, match=r"sources\.long: its 30 samples are over before the 90 steps are"):
        count_source_epochs(made, prepared.mixture, 90)


def test_what_it_cannot_be():
    with pytest.raises(ValueError, match=r"weigh: tokens is of the weights of sources, and there are none"):
        TrainFiles(files=("x.jsonl",), weigh="tokens")
    assert TrainFiles(sources={"a": Source(files=("x.jsonl",))}, weigh="tokens").weigh == "tokens"
    with pytest.raises(UserError, match="sum to 0"):
        TokenProportions([0.0, 0.0], [lambda e: np.array([1])] * 2)
