"""One update is the same however it is cut: whole batch = micro-batches = packed rows = a naive float64 loop."""

from __future__ import annotations

import pytest
import torch

from flatshift.finetune.adapters.adapter import attach_adapter, trainable
from flatshift.finetune.config import Adapter, Evaluate, Optimizer, Train
from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.data.example import Example
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.run_directory import RunDirectory, read_metrics
from flatshift.finetune.tasks import Completion, LanguageModel
from flatshift.finetune.train.stage import TrainingStage
from flatshift.finetune.train.trainer import Trainer
from flatshift.regularizers import Plain, build
from tests.support.finetune_models import IGNORED, PadOnly


def model_of(source, task):
    model = attach_adapter(load_backbone(source, task=task), Adapter(rank=4), task=task, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # B away from zero, so that every gradient is alive
        for parameter in trainable(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def examples():
    """Very unequal lengths and masks: averages of averages would show."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for index, length in enumerate([3, 17, 5, 9, 2, 12, 7, 4]):
        ids = torch.randint(3, 60, (length,), generator=generator).tolist()
        hidden = min(length - 1, 1 + 5 * (index % 2))  # prompt tokens
        made.append(Example(input_ids=ids, labels=[IGNORED] * hidden + ids[hidden:], id=str(index), where=f"f:{index}"))
    return made


def one_update(source, task, directory, *, batch_size, accumulate, clip=None):
    """Loss and gradients of the first update: AdamW with a huge eps moves by lr·gradient/eps."""
    model = model_of(source, task)
    start = {n: p.detach().clone() for n, p in trainable(model).items()}
    batches = TrainingDataLoader(
        examples(), task=task, batch_size=batch_size, accumulate=accumulate, seed=0, max_length=20, pad_id=0
    )
    Trainer(
        model,
        PadOnly(),
        TrainingStage(
            name="s",
            task=task,
            batches=batches,
            dev=[],
            optimizer=Optimizer(lr=1.0, eps=1e2, clip=clip, schedule="constant", warmup=0.0),
            train=Train(steps=1, batch_size=batch_size, accumulate=accumulate, max_length=20),
            evaluate=Evaluate(),
            regularizer=build(Plain()),
            run=RunDirectory.create(directory),
            seed=0,
        ),
    ).fit()
    (line,) = read_metrics(directory / "metrics.jsonl")
    return line, {n: start[n] - p.detach() for n, p in trainable(model).items()}


def naive(source, task):
    """The definition: every sample alone, token by token, float64 sums over one count."""
    model = model_of(source, task)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for example in examples():
        ids, labels = torch.tensor(example.input_ids), torch.tensor(example.labels)
        logits = torch.log_softmax(model(input_ids=ids[None]).logits[0].double(), dim=-1)
        for t in range(len(ids) - 1):
            if labels[t + 1] != IGNORED:
                total, count = total - logits[t, labels[t + 1]], count + 1
    (total / count).backward()
    gradients = {n: p.grad for n, p in trainable(model).items()}
    return (total / count).item(), count, gradients


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_every_cut_of_the_update_gives_the_naive_loss_and_gradient(kind, sources, tmp_path):
    padded, packed = LanguageModel(pack=False), Completion(pack=True)
    loss, count, gradients = naive(sources[kind], padded)
    rows = len(
        TrainingDataLoader(examples(), task=packed, batch_size=1, accumulate=1, seed=0, max_length=20, pad_id=0).epoch(
            0
        )
    )
    assert 1 < rows < len(examples()), "samples do share rows"
    cuts = {
        "whole": (padded, 8, 1),
        "two": (padded, 4, 2),
        "uneven": (padded, 1, 8),
        "packed": (packed, rows, 1),
        "packed apart": (packed, 1, rows),
    }
    for name, (task, batch_size, accumulate) in cuts.items():
        line, moved = one_update(sources[kind], task, tmp_path / name, batch_size=batch_size, accumulate=accumulate)
        assert line["tokens"] == count, name
        assert line["loss"] == pytest.approx(loss, rel=1e-6), name
        norm = sum(g.square().sum().item() for g in gradients.values()) ** 0.5
        assert line["grad_norm"] == pytest.approx(norm, rel=1e-5), name
        for parameter, gradient in gradients.items():
            # the first update is u = g/(|g| + eps), so g = eps·u/(1 − |u|); u is a difference of float32 weights
            recovered = 1e2 * moved[parameter] / (1 - moved[parameter].abs())
            error = (recovered - gradient).abs().max().item()
            assert error <= 1e-4 * gradient.abs().max().item() + 2e-5, (name, parameter)
