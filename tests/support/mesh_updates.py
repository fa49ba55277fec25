"""A few updates of an engine, as the training loop makes them, on whatever mesh it lies."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from torch import Tensor


def few_updates(engine: Any, batches: Any, task: Any, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of `steps` updates, and the whole gradients of the first one."""
    from flatshift.finetune.config import Optimizer
    from flatshift.finetune.train.optimizer import AdapterOptimizer

    settings = Optimizer(lr=1e-3, eps=1e-6)
    optimizer = AdapterOptimizer(engine.parameters, settings)
    head = engine.find_head(batches.at(0)[0].inputs, task=task)
    engine.reshard()
    engine.model.train()
    losses, first = [], {}
    for step in range(steps):
        micros = batches.at(step)
        if task.has_reference:
            sides = engine.reference_log_probs(micros, task=task, head=head, precision=contextlib.nullcontext)
            micros = [dataclasses.replace(micro, preference=known) for micro, known in zip(micros, sides, strict=True)]
        loss = engine.forward_backward(
            micros, batches.supervised(step), task=task, head=head, context=lambda i: contextlib.nullcontext()
        )
        losses.append(float(loss))
        if step == 0:
            gradients = {name: p.grad for name, p in engine.parameters.items()}
            first = {name: grad.clone() for name, grad in engine.full_tensors(gradients).items()}
        engine.clip(settings.clip)
        optimizer.step(settings.lr)
    return losses, first
