"""Every kind of label with what rows have: columns, mixtures, streams, the token cache, long rows, prompts."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from flatshift.experiments.data import encode as tokens
from flatshift.experiments.data.splits import prepare_data
from flatshift.experiments.recipe import from_override, load_recipe
from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.data.columns import ColumnarExamples
from flatshift.finetune.data.encoding import encode
from flatshift.finetune.data.labels import Units, fit_units
from flatshift.finetune.data.masking import Masking, unmask_tokens
from flatshift.finetune.errors import UserError
from flatshift.finetune.seeds import numpy_generator
from flatshift.finetune.tasks import Classify, MaskedLM, Regress, Seq2Seq
from tests.support.data_models import epochs_at, row, text_rows, write_jsonl
from tests.support.objective_models import masked_tokenizer, numbered_rows, several_rows

TOKENIZER = masked_tokenizer()
ROWS = {"several": several_rows, "numbers": numbered_rows, "hidden": lambda n: text_rows(n, words=(5, 20))}
TASKS = {"several": Classify(multi=True), "numbers": Regress(), "hidden": MaskedLM()}
SETTINGS = {"several": "{kind: classify, multi: true}", "numbers": "regress", "hidden": "masked-lm"}
MIXED = """
backbone: BACKBONE
task: TASK
data:
  train: {sources: {one: {files: [DIR/one.jsonl], weight: 3}, two: {files: [DIR/two.jsonl]}}}
  holdout: 0.1
  cache: DIR/cache
train: {max_length: 48, steps: 4, batch_size: 4}
"""


@pytest.fixture
def recipe_of(tmp_path, encoder):
    def made(kind, **overrides):
        rows = ROWS[kind](60)
        for name, some in (("one", rows[:40]), ("two", rows[40:])):
            records = [{"text": r.values["text"], "label": r.values.get("label")} for r in some]
            write_jsonl(tmp_path / f"{name}.jsonl", records)
        path = tmp_path / "recipe.yaml"
        text = MIXED.replace("DIR", str(tmp_path)).replace("BACKBONE", str(encoder)).replace("TASK", SETTINGS[kind])
        path.write_text(text, encoding="utf-8")
        typed = [from_override(k, v if isinstance(v, str) else json.dumps(v)) for k, v in overrides.items()]
        return load_recipe(str(path), typed).recipe

    return made


@pytest.mark.parametrize("kind", ROWS)
def test_columns_give_back_what_was_encoded(kind):
    units = Units(50.0, 50.0, 20.0, "classifier") if kind == "numbers" else None
    rows = ROWS[kind](12)
    found = encode(rows, task=TASKS[kind], tokenizer=TOKENIZER, max_length=32, units=units).examples
    kept = ColumnarExamples.of(found)
    assert kept == found and kept[3:9] == found[3:9] and type(kept[0].labels) is type(found[0].labels)
    if kind == "numbers":
        assert kept[2:].standardised_targets().tolist() == [units.standardise(example.labels) for example in found[2:]]


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_a_mixture_streamed_or_cached_is_what_is_read_at_once(kind, noise, recipe_of, monkeypatch):
    if noise and kind == "hidden":
        return
    plain = prepare_data(recipe_of(kind, **{"data.cache": "null", "data.label_noise": noise}))
    assert plain.mixture.names == ("one", "two") and sum(plain.mixture.sizes) == len(plain.train) == 48
    made, again = (prepare_data(recipe_of(kind, **{"data.label_noise": noise})) for _ in range(2))
    assert "kept in" in made.notes[0] and "read from" in again.notes[0]
    monkeypatch.setattr(tokens, "IN_MEMORY", 0)
    monkeypatch.setattr(tokens, "_CHUNK", 7)
    for other in (made, again, prepare_data(recipe_of(kind, **{"data.cache": "null", "data.label_noise": noise}))):
        for name in ("train", "dev", "test", "mixture", "units", "label_names", "flipped"):
            assert getattr(other, name) == getattr(plain, name), name
    assert (plain.units is None) == (kind != "numbers")
    if plain.units is not None:
        layer = None if plain.units.head is None else type("Layer", (), {"name": plain.units.head, "bias": True})()
        assert plain.units == fit_units([example.labels for example in plain.train], layer)
        assert {example.units for example in [*plain.train, *plain.dev]} == {plain.units}


def test_a_skipped_row_has_no_wrong_label(recipe_of, tmp_path):
    recipe = recipe_of("numbers", **{"data.cache": "null", "data.label_noise": 1, "data.bad_rows": "skip"})
    write_jsonl(tmp_path / "two.jsonl", [{"text": " " if i % 2 else f"of {i}", "label": i} for i in range(20)])
    prepared = prepare_data(recipe)
    assert prepared.skipped and sorted(prepared.flipped) == sorted(example.id for example in prepared.train)


def test_several_classes_and_targets_are_batched_as_floats(recipe_of):
    for kind in ("several", "numbers"):
        prepared = prepare_data(recipe_of(kind, **{"data.cache": "null"}))
        how = {"batch_size": 4, "seed": 0, "max_length": 48, "pad_id": 0, "mixture": prepared.mixture}
        batches = TrainingDataLoader(prepared.train, task=TASKS[kind], group="length", **how)
        for step in range(3):
            (micro,) = batches.at(step)
            assert micro.labels.dtype == torch.float32 and micro.supervised == batches.supervised(step) == 4
            for target, (i,) in zip(micro.labels.tolist(), micro.rows, strict=True):
                own = prepared.train[i].labels
                expected = list(own) if kind == "several" else prepared.units.standardise(own)
                assert target == pytest.approx(expected, rel=1e-6)


def test_masks_of_a_mixture_follow_each_sources_epochs(recipe_of):
    prepared = prepare_data(recipe_of("hidden", **{"data.cache": "null"}))
    masking = Masking.of(TASKS["hidden"], TOKENIZER)
    how = {"batch_size": 4, "seed": 3, "max_length": 48, "pad_id": 0, "mixture": prepared.mixture, "masking": masking}
    batches = TrainingDataLoader(prepared.train, task=TASKS["hidden"], group="length", **how)
    seen: set[tuple[int, int]] = set()
    for step in range(40):
        (micro,) = batches.at(step)
        for r, ((i,), (epoch,)) in enumerate(zip(micro.rows, epochs_at(batches, step)[0], strict=True)):
            example = prepared.train[i]
            own = unmask_tokens(np.array(example.input_ids), np.array(example.labels))
            read, labels = masking.draw(own, np.array(example.words), numpy_generator(3, "mask", i, epoch))
            assert micro.inputs["input_ids"][r, : len(own)].tolist() == read.tolist()
            assert micro.labels[r, : len(own)].tolist() == labels.tolist()
            assert (i, epoch) not in seen
            seen.add((i, epoch))
        assert batches.supervised(step) == int((micro.labels != -100).sum())
    first = prepared.mixture.sizes[0]
    rounds = [{epoch for i, epoch in seen if (i < first) == one} for one in (True, False)]
    assert len(rounds[0]) > 2 and len(rounds[1]) > 1 and len(rounds[0]) != len(rounds[1])


def test_long_rows_lose_the_end_that_is_asked_for_or_are_left_out():
    rows = [row(0, text="cat " * 50 + "dog"), row(1, text="cat")]
    how = {"task": MaskedLM(), "tokenizer": TOKENIZER, "max_length": 16}
    ends = {}
    for truncation in ("left", "right"):
        (cut, _) = encode(rows, truncation=truncation, **how).examples
        own = unmask_tokens(np.array(cut.input_ids), np.array(cut.labels)).tolist()
        assert len(own) == 16 and own[0] == TOKENIZER.cls_token_id and own[-1] == TOKENIZER.sep_token_id
        ends[truncation] = TOKENIZER.decode(own[1:-1])
    assert ends["left"].endswith("dog") and not ends["right"].endswith("dog")
    assert encode(rows, overlong="drop", **how).dropped == 1
    task = Seq2Seq(prefix="say: ")
    with pytest.raises(UserError, match=r"train.truncation: left would cut task.prefix off"):
        encode(rows, task=task, tokenizer=TOKENIZER, max_length=16, truncation="left", decoder_start=1)
    assert task.input_format.render(row(0, text="why")) == "say: why"
