"""Short rows whose activations are computed again: by the kernel that the forward pass had, to the same bits."""

from __future__ import annotations

import pytest
import torch

from flatshift.finetune.adapters.adapter import attach_adapter
from flatshift.finetune.compute import numerics
from flatshift.finetune.compute.loss import batch_loss
from flatshift.finetune.compute.numerics import SHORT
from flatshift.finetune.config import Adapter
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.parallel.activation_checkpoint import checkpoint_activations
from flatshift.finetune.tasks import LanguageModel
from tests.support.finetune_models import RandomBatches

LM = LanguageModel()


def gradients(source, mode, length):
    """Of one bf16 pass; the backward pass comes after all that surrounded the forward pass, as in the loop."""
    model = attach_adapter(load_backbone(source, task=LM, precision="bf16"), Adapter(rank=2), task=LM, seed=0)
    checkpoint_activations(model, mode)
    model.train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = batch_loss(model, RandomBatches(length=length).at(0)[0], task=LM)
    loss.backward(retain_graph=True)
    first = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    loss.backward()  # what is computed again may be asked for twice
    return first, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("length", [12, SHORT, SHORT + 32])
def test_it_is_the_gradient_of_kept_activations(source, monkeypatch, mode, length):
    monkeypatch.setattr(numerics, "has_bf16_matmul", lambda: True)  # as on a CPU that attends so
    (kept, _), (again, twice) = gradients(source, "none", length), gradients(source, mode, length)
    assert kept.keys() == again.keys() and any(grad.any() for grad in kept.values())
    assert all(torch.equal(again[name], grad) and torch.equal(twice[name], grad) for name, grad in kept.items())
