"""The evaluation in the plan: the cache that writing takes, to the byte, and what grows with what."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import DynamicCache

from flatshift.finetune.config import Adapter, Train
from flatshift.finetune.models.anatomy import cache_argument
from flatshift.finetune.planner.footprint import EvaluationPlan, plan_evaluation
from flatshift.finetune.planner.sizes import BackboneSizes
from flatshift.finetune.tasks import Chat, Classify, Completion, LanguageModel, Preference, Task
from flatshift.regularizers.config import SAM
from tests.support.data_models import tiny_model

TRAIN = Train(precision="fp32")


def planned(sizes: BackboneSizes, task: Task, **settings: Any) -> EvaluationPlan:
    usual = {"batch_size": 4, "rows": 10, "tokens": 150, "longest": 20, "device": "cpu"}
    return plan_evaluation(sizes, task, TRAIN, **{**usual, **settings})


def test_what_an_evaluation_takes() -> None:
    model = tiny_model("llama", 300)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    sizes = BackboneSizes.of(model.config.to_dict(), shapes, Adapter(rank=2))
    read = planned(sizes, LanguageModel())
    assert read.read == 150 and read.written == 0 and read.passes == 150

    chat = Chat(score="generate", max_new_tokens=512)
    written, longer = planned(sizes, chat), planned(sizes, dataclasses.replace(chat, max_new_tokens=1024))
    assert written.read == 300 and written.written == 5120
    assert written.passes == 300 + 3 * 512 * 16  # three batches, whose tokens cost what sixteen cost
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.ones(4, 512, dtype=torch.long), use_cache=True, **cache_argument(cache))
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert longer.memory - written.memory == held

    assert planned(sizes, chat, batch_size=8).memory > written.memory > read.memory
    ranked = planned(sizes, Completion(score="rank"), classes=50)
    assert ranked.memory > read.memory and ranked.read == 300
    assert planned(sizes, Preference()).read == 300  # the backbone is asked too
    head = planned(sizes.under(Classify(labels=("a", "b"))), Classify(labels=("a", "b")))
    assert head.memory < read.memory

    assert read.updates(75) == 1.0
    assert planned(sizes, Preference()).updates(100) == 1.0  # as is a step, whose reference is a third pass
    assert planned(sizes, LanguageModel(), regularizer=SAM()).updates(75) == 0.5
    line = written.line("test 10", tokens=75, seconds=2.0)
    assert line.startswith(
        "evaluation: rows of test 10: 300 tokens are read and at most 5,120 written, about as long as"
    )
    assert "166 steps (332 s)" in line
