"""Compiled blocks train with the numbers of plain ones, and only while a training pass is under way."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from flatshift.experiments.recipe.rules import COMPILED_REGULARIZERS, check_recipe, check_rules
from flatshift.experiments.recipe.schema import Recipe
from flatshift.finetune.adapters.adapter import attach_adapter, trainable
from flatshift.finetune.config import Adapter, Evaluate, Mesh, Optimizer, Train
from flatshift.finetune.errors import UserError
from flatshift.finetune.models import compiled as compiling
from flatshift.finetune.models.anatomy import transformer_blocks
from flatshift.finetune.models.compiled import CompiledBlocks
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.run_directory import RunDirectory, read_metrics
from flatshift.finetune.tasks import LanguageModel, Seq2Seq
from flatshift.finetune.train.stage import TrainingStage
from flatshift.finetune.train.trainer import Trainer
from flatshift.regularizers import GGPO, SAM, FlatLora, Plain, build
from tests.support.finetune_models import PadOnly, RandomBatches, save_backbone

LM = LanguageModel()


def fit(source, directory, config, *, compiled, backend, monkeypatch, steps=3):
    torch._dynamo.reset()
    counters.clear()
    made = []

    class Chosen(CompiledBlocks):
        def __init__(self, model):
            super().__init__(model, backend=backend)
            made.append(self)

    monkeypatch.setattr("flatshift.finetune.train.trainer.CompiledBlocks", Chosen)
    model = attach_adapter(load_backbone(source, task=LM), Adapter(rank=4), task=LM, seed=0)
    run = RunDirectory.create(directory)
    Trainer(
        model,
        PadOnly(),
        TrainingStage(
            name="s",
            task=LM,
            batches=RandomBatches(),
            dev=[],
            optimizer=Optimizer(lr=1e-2),
            train=Train(steps=steps, compile=compiled),
            evaluate=Evaluate(),
            regularizer=build(config),
            run=run,
            seed=0,
        ),
    ).fit()
    assert len(made) == compiled and all(block._compiled_call_impl is None for block in transformer_blocks(model))
    lines = read_metrics(run.path / "metrics.jsonl")
    return trainable(model), [(r["loss"], r["grad_norm"]) for r in lines], counters["stats"]["unique_graphs"]


def compare(source, tmp_path, config, backend, monkeypatch):
    how = {"backend": backend, "monkeypatch": monkeypatch}
    plain, course, none = fit(source, tmp_path / "plain", config, compiled=False, **how)
    fast, same, graphs = fit(source, tmp_path / "fast", config, compiled=True, **how)
    assert none == 0 and graphs >= 1
    for one, other in zip(course, same, strict=True):
        assert other == pytest.approx(one, rel=1e-5)
    for name, parameter in plain.items():
        assert torch.allclose(parameter, fast[name], rtol=1e-3, atol=2e-5), name
    return graphs


@pytest.mark.parametrize(
    "config",
    [GGPO(sigma=0.05), *(pytest.param(config, marks=pytest.mark.slow) for config in (Plain(), FlatLora()))],
    ids=lambda config: config.kind,
)
def test_a_compiled_course_is_the_plain_one(config, tmp_path, monkeypatch):
    assert config.kind in COMPILED_REGULARIZERS
    source = save_backbone("llama", tmp_path / "model")
    graphs = compare(source, tmp_path, config, "aot_eager", monkeypatch)
    assert graphs <= 6  # blocks of one make share theirs, and later steps make none


@pytest.mark.slow
def test_a_course_compiled_by_inductor_is_the_plain_one(tmp_path, monkeypatch):
    compare(save_backbone("llama", tmp_path / "model"), tmp_path, Plain(), "inductor", monkeypatch)


def test_what_it_does_not_go_with_is_refused(tmp_path):
    how = {"train": Train(compile=True, device="cpu"), "task": LM}
    check_recipe(Recipe(train=Train(device="cpu"), task=LM, regularizer=SAM()))
    check_recipe(Recipe(**how))
    for changes, said in [
        ({"train": Train(compile=True, checkpointing="full", device="cpu")}, r"train\.checkpointing"),
        ({"adapter": Adapter(dropout=0.1)}, r"adapter\.dropout"),
        ({"adapter": Adapter(dora=True)}, r"adapter\.dora"),
        ({"task": Seq2Seq()}, "seq2seq"),
        ({"regularizer": SAM()}, r"regularizer\.kind: sam"),
        ({"mesh": Mesh(auto=True)}, "mesh.auto does not plan"),
    ]:
        with pytest.raises(UserError, match=said):
            check_recipe(Recipe(**{**how, **changes}))
    with pytest.raises(UserError, match=r"train\.quantization"):  # whether or not the package is here
        check_rules(Recipe(**{**how, "train": Train(compile=True, quantization="nf4")}))
    dropout = load_backbone(save_backbone("gpt2-dropout", tmp_path), task=LM)
    with pytest.raises(UserError, match="draws dropout masks"):
        compiling.CompiledBlocks(dropout)
