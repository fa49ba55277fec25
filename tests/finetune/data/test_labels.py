"""Labels that are sets of classes or numbers: read, refused or skipped, encoded, shown, made wrong, standardised."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flatshift.finetune.adapters.adapter import attach_adapter, trainable
from flatshift.finetune.config import Adapter
from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.data.encoding import encode
from flatshift.finetune.data.labels import (
    OutputLayer,
    Units,
    fit_units,
    fold_units,
    iter_classes,
    read_classes,
    read_number,
    sort_labels,
)
from flatshift.finetune.data.noise import replace_answers
from flatshift.finetune.data.panel import format_first_batch
from flatshift.finetune.data.rows import read_rows
from flatshift.finetune.errors import UserError
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.tasks import Classify, Regress
from flatshift.finetune.tasks.regress import standardised_layer
from tests.support.data_models import byte_tokenizer, row, write_jsonl
from tests.support.finetune_models import save_backbone
from tests.support.objective_models import CLASSES, numbered_rows, save_encoder, scatter, several_rows

MULTI, NUMBER = Classify(multi=True), Regress()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (["b", "a", "b"], ("a", "b")),
        ([], ()),
        ("", ()),
        (" b , a,", ("a", "b")),
        ([1, 2.0, "x"], ("1", "2", "x")),
        (3, ("3",)),
        (True, ("True",)),
        (' ["b, c", "a", 2]', ("2", "a", "b, c")),
        ("[]", ()),
    ],
)
def test_classes_of_any_value(value, expected):
    assert read_classes(value, separator=",") == expected


@pytest.mark.parametrize("value", [[None], [["a"]], {"a": 1}, [float("nan")], "['a', 'b']"])
def test_classes_that_are_none(value):
    with pytest.raises(ValueError):
        read_classes(value, separator=",")


@pytest.mark.parametrize(("value", "expected"), [(3, 3.0), ("3.80", 3.8), (-1e-3, -0.001), (" 2 ", 2.0)])
def test_numbers(value, expected):
    assert read_number(value) == expected


@pytest.mark.parametrize("value", ["high", "", "nan", "inf", float("nan"), True, None, [1.0], "1_000", 10**400, 1e200])
def test_what_is_no_number(value):
    with pytest.raises(ValueError, match="number"):
        read_number(value)


def test_a_target_that_is_text_is_refused_with_its_line_or_skipped_and_counted(tmp_path):
    rows = [{"text": "a", "label": 1.5}, {"text": "b", "label": "high"}, {"text": "c", "label": "2"}]
    path = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    how = {"required": ("text", "label"), "label": NUMBER.read_label}
    with pytest.raises(UserError, match=r"rows.jsonl:2: column 'label' is 'high', not a number"):
        list(read_rows([path], **how))
    skipped: list[str] = []
    kept = list(read_rows([path], **how, bad_rows="skip", skipped=skipped))
    assert [r.values["label"] for r in kept] == [1.5, 2.0] and len(skipped) == 1


def test_sets_from_lists_and_from_csv(tmp_path):
    task = Classify(multi=True, separator="|")
    listed = write_jsonl(tmp_path / "rows.jsonl", [{"text": "a", "label": ["y", "x"]}, {"text": "b", "label": []}])
    (tmp_path / "rows.csv").write_text("text,label\na,x|y\nb,\n", encoding="utf-8")
    for path in (listed, tmp_path / "rows.csv"):
        rows = list(read_rows([str(path)], required=("text", "label"), label=task.read_label))
        assert [r.values["label"] for r in rows] == [("x", "y"), ()]
    assert sort_labels(iter_classes(rows)) == ("x", "y")


def test_rows_of_several_classes_are_encoded_batched_and_shown():
    rows = several_rows(9)
    encoded = encode(rows, task=MULTI, tokenizer=byte_tokenizer(), max_length=64)
    assert encoded.label_names == CLASSES
    for made, given in zip(encoded.examples, rows, strict=True):
        assert made.labels == tuple(int(name in given.values["label"]) for name in CLASSES)
    batches = TrainingDataLoader(encoded.examples, task=MULTI, batch_size=4, seed=0, max_length=64, pad_id=0)
    (micro,) = batches.at(0)
    assert micro.labels.dtype == torch.float32 and micro.labels.shape == (4, 3) and micro.supervised == 4
    for (index,), labels in zip(micro.rows, micro.labels.tolist(), strict=True):
        assert tuple(labels) == encoded.examples[index].labels
    panel = format_first_batch(micro, byte_tokenizer(), MULTI, label_names=CLASSES)
    shown = rows[micro.rows[0][0]].values["label"]
    assert f"→ ⟦{', '.join(shown) or 'none'}⟧" in panel and "4 examples supervised" in panel
    with pytest.raises(UserError, match=r"rows.jsonl:8: label 'god' is not one of the 3 classes; nearest is 'good'"):
        encode([row(7, text="x", label=("god",))], task=MULTI, tokenizer=byte_tokenizer(), max_length=64,
               label_names=CLASSES)  # fmt: skip
    with pytest.raises(UserError, match="no training row has a class"):
        encode([row(text="x", label=())], task=MULTI, tokenizer=byte_tokenizer(), max_length=64)


def test_answers_are_right_only_as_whole_sets():
    logits = torch.tensor([[1.0, -1.0], [1.0, 1.0], [-1.0, -2.0]])
    labels = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    assert MULTI.answered_right(logits, labels).tolist() == [True, False, True]
    assert Classify().answered_right(logits, torch.tensor([0, 0, 1])).tolist() == [True, True, False]


@pytest.mark.parametrize("label", [["a", "\ud800"], "a,\ud800"])
def test_a_class_of_several_that_is_no_text(label):
    with pytest.raises(ValueError, match="has half of a surrogate pair"):
        MULTI.read_label(label)


@pytest.mark.parametrize(
    ("labels", "says"), [(("yes", "no", "yes"), "labels has 'yes' twice"), (("yes", ""), "labels has an empty name")]
)
def test_classes_have_a_name_each_of_their_own(labels, says):
    with pytest.raises(ValueError, match=says):
        Classify(labels=labels)


def test_the_separator_is_for_several_classes():
    for bad in ({"separator": ";"}, {"multi": True, "separator": " "}, {"multi": True, "separator": ""}):
        with pytest.raises(ValueError, match="separator"):
            Classify(**bad)


@pytest.mark.parametrize("rows", [several_rows(40), numbered_rows(40)], ids=["sets", "numbers"])
def test_label_noise_takes_another_rows_label(rows):
    noisy, ids = replace_answers(rows, columns=("label",), rate=0.25, seed=3)
    wrong = {r.id: (r.values["label"], o.values["label"]) for r, o in zip(noisy, rows, strict=True) if r != o}
    assert sorted(wrong) == sorted(ids) and len(ids) == 10
    assert all(new != old for new, old in wrong.values())


# Units


@pytest.mark.parametrize("bias", [True, False])
def test_units_are_mean_and_deviation_or_root_mean_square(bias):
    targets = [1.0, 2.0, 4.0, 9.0]
    units = fit_units(targets, OutputLayer("head", bias))
    seen = np.array([units.standardise(y) for y in targets])
    assert units.mean == 4.0
    assert np.sqrt(np.mean(seen**2)) == pytest.approx(1.0)
    assert seen.mean() == pytest.approx(0.0) if bias else units.offset == 0.0
    for constant in (5.0, 0.1):  # the sum of three 0.1 is rounded up
        assert fit_units([constant] * 3, OutputLayer("head", True)) == Units(constant, constant, 1.0, "head")
    assert fit_units(targets, None) == Units(4.0) and fit_units(targets, None).standardise(2.5) == 2.5


@pytest.mark.parametrize("kind", ["bert", "roberta", "llama", "gpt2"])
def test_a_folded_head_answers_in_the_targets_units(kind, tmp_path):
    source = save_backbone(kind, tmp_path)
    layer = standardised_layer(NUMBER, source)
    units = fit_units([900.0, 1100.0, 1000.0], layer)
    assert layer.bias == (kind in {"bert", "roberta"})
    model = scatter(attach_adapter(load_backbone(source, task=NUMBER), Adapter(rank=2), task=NUMBER, seed=0)).eval()
    ids = torch.arange(3, 27).reshape(2, 12)
    with torch.no_grad():
        seen = model(input_ids=ids).logits.double()
        fold_units(trainable(model), units)
        answer = model(input_ids=ids).logits.double()
    assert torch.allclose(answer, units.offset + units.scale * seen, rtol=1e-5)
    assert (answer - seen).abs().max() > 1


def test_targets_are_seen_standardised_and_shown_as_they_are():
    rows = numbered_rows(8)
    units = fit_units([r.values["label"] for r in rows], OutputLayer("head", True))
    encoded = encode(rows, task=NUMBER, tokenizer=byte_tokenizer(), max_length=64, units=units)
    assert encoded.label_names is None
    batches = TrainingDataLoader(encoded.examples, task=NUMBER, batch_size=8, seed=0, max_length=64, pad_id=0)
    (micro,) = batches.at(0)
    targets = np.array([rows[i].values["label"] for (i,) in micro.rows])
    assert np.allclose(micro.labels.numpy(), (targets - np.mean(targets)) / np.std(targets), atol=1e-6)
    panel = format_first_batch(micro, byte_tokenizer(), NUMBER, units=units)
    assert f"→ ⟦{targets[0]:.6g}⟧" in panel


def test_a_regression_head_is_one_number_and_says_so(tmp_path):
    model = load_backbone(save_encoder(tmp_path), task=NUMBER)
    assert model.config.num_labels == 1 and model.config.problem_type == "regression"
    model = load_backbone(tmp_path, task=MULTI, label_names=CLASSES)
    assert model.config.problem_type == "multi_label_classification" and not math.isnan(model.config.num_labels)
