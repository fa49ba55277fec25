"""The table of what a recipe cannot ask for: short sentences that name the setting, each told of a recipe that asks."""

import dataclasses

import pytest

from flatshift.experiments.recipe.rules import CELL_RULES, RULES, SPLIT_RULES, check_rules
from flatshift.experiments.recipe.schema import Recipe, Select, WarmUp
from flatshift.finetune.config import Adapter, Mesh, Optimizer, Projector, SpikeRecovery, TraceRecording, Tracker, Train
from flatshift.finetune.data.config import Source
from flatshift.finetune.errors import UserError
from flatshift.finetune.tasks import Completion, LanguageModel
from flatshift.regularizers.config import SAM
from flatshift.selection.config import KNN, GotD

BASE = Recipe(task=LanguageModel())
COMPILED = Train(compile=True)


def broken(**changes):
    return dataclasses.replace(BASE, **changes)


def strict():
    train = dataclasses.replace(BASE.data.train, sources={"wiki": Source(files=("a",), when_over="refuse")})
    return broken(data=dataclasses.replace(BASE.data, train=train), train=Train(spikes=SpikeRecovery()))


RECIPES = {
    "train.group: length": broken(task=LanguageModel(pack=True), train=Train(group="length")),
    "train.overlong: split reads plain texts": broken(task=Completion(), train=Train(overlong="split")),
    "train.overlong: split does not go with train.truncation": broken(train=Train(overlong="split", truncation="left")),
    "train.epochs: sources mixed by weight": broken(data=strict().data, train=Train(epochs=2.0)),
    "data.train.sources.wiki.when_over": strict(),
    "optimizer.kind: adamw-8bit": broken(optimizer=Optimizer(kind="adamw-8bit"), mesh=Mesh(auto=True)),
    "optimizer.kind: gauss-newton solves least squares": broken(optimizer=Optimizer(kind="gauss-newton", clip=None)),
    "train.compile: mesh.auto": broken(train=COMPILED, mesh=Mesh(auto=True)),
    "train.compile does not go with train.quantization": broken(train=Train(compile=True, quantization="nf4")),
    "train.compile does not go with train.checkpointing": broken(train=Train(compile=True, checkpointing="full")),
    "train.compile does not go with adapter.dropout": broken(train=COMPILED, adapter=Adapter(dropout=0.1)),
    "train.compile does not go with adapter.projector": broken(
        train=COMPILED, adapter=Adapter(soft_tokens=1, projector=Projector())
    ),
    "train.compile does not go with adapter.dora": broken(train=COMPILED, adapter=Adapter(dora=True)),
    "train.compile does not go with regularizer.kind: sam": broken(train=COMPILED, regularizer=SAM()),
    "train.compile does not go with record": broken(train=COMPILED, record=TraceRecording()),
    "record: a run on a mesh": broken(record=TraceRecording(), mesh=Mesh(dp=2)),
    "record: dynamics": broken(record=TraceRecording(), adapter=Adapter(soft_tokens=1)),
    "record.sharpness is of a loss": broken(task=LanguageModel(dft=True), record=TraceRecording(sharpness=(0,))),
    "adapter.projector: the rows": broken(warmup=WarmUp(), adapter=Adapter(soft_tokens=1, projector=Projector())),
    "adapter.soft_tokens: a warm-up": broken(warmup=WarmUp(), adapter=Adapter(soft_tokens=1)),
    "the recipe has a `warmup` block": broken(warmup=WarmUp()),
    "warmup.own: 1 reads": broken(warmup=WarmUp(own=1), select=Select(budget=30)),
    "select.from: the recipe has no `warmup` block": broken(select=Select(from_="picked")),
    "select: without a `warmup` block": broken(select=Select(budget=5)),
    "warmup.batch_size: 3 rows": broken(warmup=WarmUp(batch_size=3), select=Select(), mesh=Mesh(dp=2)),
}


CELLS = {
    "tracker.kinds: the cells": broken(tracker=Tracker(kinds=("wandb",))),
    "mesh: a cell of a sweep": broken(mesh=Mesh(dp=2)),
    "train.epochs: an axis": broken(train=Train(epochs=2.0)),
}


def test_every_rule_has_a_recipe_here():
    assert len(RECIPES) == len(RULES) and len(CELLS) == len(CELL_RULES)


@pytest.mark.parametrize("says", [*RECIPES, *CELLS])
def test_a_recipe_that_breaks_a_rule_is_told(says):
    with pytest.raises(UserError) as error:
        check_rules((RECIPES | CELLS)[says], CELL_RULES if says in CELLS else RULES)
    assert str(error.value).startswith(says) and len(str(error.value)) <= 300


def test_a_recipe_that_breaks_none_is_not():
    check_rules(BASE)
    check_rules(BASE, CELL_RULES)


def test_what_is_not_divided_among_processes():
    for method, told in ((KNN(), "kind: knn"), (GotD(rounds=3), "rounds: 3"), (GotD(debiased=True), "debiased")):
        with pytest.raises(UserError, match=rf"select\.method\.{told}"):
            check_rules(broken(select=Select(method=method)), SPLIT_RULES)
    check_rules(broken(select=Select(method=GotD())), SPLIT_RULES)


def test_a_cell_takes_no_mesh_that_is_yet_to_be_chosen():
    with pytest.raises(UserError, match="leave every axis at 1 and auto off"):
        check_rules(broken(mesh=Mesh(auto=True)), CELL_RULES)


def test_sentences_are_short():
    assert all(len(rule.says) <= 300 for rule in (*RULES, *CELL_RULES, *SPLIT_RULES))
