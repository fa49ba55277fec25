"""Stages of the new objectives: resumed with the same bits, refused in a sentence."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flatshift.experiments.recipe import from_override, load_recipe
from flatshift.experiments.recipe.rules import check_recipe
from flatshift.experiments.recipe.schema import warm_up_task
from flatshift.finetune.adapters.adapter import attach_adapter, trainable
from flatshift.finetune.config import Adapter, Evaluate, Optimizer, Train
from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.data.encoding import encode
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.data.labels import Units
from flatshift.finetune.data.masking import Masking
from flatshift.finetune.errors import Interrupted, UserError
from flatshift.finetune.evaluate.evaluator import head_scores
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.run_directory import METRICS, RunDirectory, read_metrics
from flatshift.finetune.tasks import Classify, MaskedLM, Regress
from flatshift.finetune.train.stage import TrainingStage
from flatshift.finetune.train.trace.examples import score_examples
from flatshift.finetune.train.trainer import Trainer
from flatshift.regularizers import Plain, build
from tests.support.data_models import text_rows
from tests.support.finetune_models import PadOnly
from tests.support.objective_models import CLASSES, masked_tokenizer, numbered_rows, save_encoder, scatter, several_rows

TOKENIZER = masked_tokenizer()
TASKS = {"sets": Classify(multi=True), "numbers": Regress(), "masked": MaskedLM()}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save_encoder(tmp_path_factory.mktemp("encoder"))


def examples_of(task, count=24, seed=0):
    rows = {
        "classify": several_rows(count, seed=seed),
        "regress": numbered_rows(count, seed=seed),
        "masked-lm": text_rows(count, seed=seed, words=(5, 20)),
    }[task.kind]
    names = CLASSES if task.kind == "classify" else None
    units = Units(50.0, 50.0, 20.0, "classifier")
    return encode(rows, task=task, tokenizer=TOKENIZER, max_length=64, label_names=names, units=units).examples


def batches_of(task, *, seed=0, rows=4, accumulate=2):
    masking = Masking.of(task, TOKENIZER) if isinstance(task, MaskedLM) else None
    return TrainingDataLoader(
        examples_of(task, seed=seed), task=task, batch_size=rows, accumulate=accumulate, seed=seed, max_length=64,
        pad_id=0, masking=masking,
    )  # fmt: skip


def names_of(task):
    return {"label_names": CLASSES} if task.kind == "classify" else {}


def attempt(source, task, directory, *, stop_at=None):
    model = attach_adapter(load_backbone(source, task=task, **names_of(task)), Adapter(rank=4), task=task, seed=0)
    run = RunDirectory.open(directory) if directory.exists() else RunDirectory.create(directory)
    last = [0]
    Trainer(
        model, PadOnly(), TrainingStage(name="s", task=task, batches=batches_of(task), dev=examples_of(task, 8, seed=5),
        optimizer=Optimizer(lr=1e-2), train=Train(steps=8, eval_every=4, save_every=3, max_length=64, threads=1),
        evaluate=Evaluate(batch_size=4), regularizer=build(Plain()), run=run, seed=0,
        on_step=lambda line: last.__setitem__(0, line["step"]), stop=lambda: last[0] == stop_at),
    ).fit()  # fmt: skip
    return {name: p.detach().clone() for name, p in trainable(model).items()}, read_metrics(run.path / METRICS)


@pytest.mark.parametrize("name", TASKS)
def test_a_stage_resumes_with_the_same_bits(name, source, tmp_path):
    task = TASKS[name]
    whole, lines = attempt(source, task, tmp_path / "whole")
    with pytest.raises(Interrupted):
        attempt(source, task, tmp_path / "cut", stop_at=4)
    resumed, again = attempt(source, task, tmp_path / "cut")
    assert all(torch.equal(resumed[key], value) for key, value in whole.items())
    losses = [[line["loss"] for line in found if line["split"] == "train"] for found in (lines, again)]
    assert losses[0] == losses[1] and len(losses[0]) == 8
    dev = [line for line in lines if line["split"] == "dev"]
    assert len(dev) == 2 and all(("accuracy" in line) == (name == "sets") for line in dev)


def test_recorded_are_losses_and_wrong_sets_of_each_row(source):
    task = TASKS["sets"]
    model = scatter(
        attach_adapter(load_backbone(source, task=task, **names_of(task)), Adapter(rank=4), task=task, seed=0)
    )
    examples = examples_of(task, 10)
    judged = score_examples(model, examples, EvalBatching(4, 0), task=task)
    model.eval()
    losses, logits = head_scores(model, examples, EvalBatching(3, 0), task=task)
    assert judged.loss == pytest.approx(losses, rel=1e-5) and judged.predicted is None
    told = [e.labels for e in examples]
    assert judged.wrong.tolist() == [int(tuple(row) != own) for row, own in zip((logits > 0) * 1, told, strict=True)]


def recipe(name="classify", **settings):
    return load_recipe(name, [from_override(k.replace("__", "."), v) for k, v in settings.items()]).recipe


def test_the_warm_up_is_what_the_backbone_can_do(source):
    assert isinstance(recipe("encoder-warmup").warmup.task, MaskedLM)
    decoder = recipe("warmup")
    assert warm_up_task(decoder)[0].kind == "language-model" and "decoder" in warm_up_task(decoder)[1]
    encoder = dataclasses.replace(decoder, backbone=str(source))
    assert warm_up_task(encoder) == (MaskedLM(), f"because {source} is an encoder")
    told = recipe("warmup", warmup__task="masked-lm")
    assert warm_up_task(told) == (MaskedLM(), "as warmup.task says")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"task": "masked-lm", "data.label_noise": 0.1}, "has no labels to make wrong"),
        ({"task": "regress", "record.per_doubling": 2}, "record: task.kind: regress"),
        ({"task": "masked-lm", "mesh.cp": 2}, "mesh.cp > 1 does not go with task.kind: masked-lm"),
        ({"task": "regress", "mesh.pp": 2}, "mesh.pp > 1 does not go with task.kind: classify with multi or regress"),
        ({"task.multi": True, "mesh.pp": 2}, "mesh.pp > 1 does not go with task.kind: classify with multi or regress"),
        ({"task": "regress", "mesh.cp": 2}, "mesh.cp > 1 does not go with task.kind: classify or regress"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_runs(settings, says):
    made = load_recipe("classify", [from_override(key, value) for key, value in settings.items()]).recipe
    with pytest.raises(UserError) as refused:
        check_recipe(made)
    assert says in str(refused.value)
