"""Neither training nor evaluation holds the logits of all tokens: every allocation is watched."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flatshift.finetune.adapters.adapter import attach_adapter, trainable
from flatshift.finetune.compute import loss as loss_module
from flatshift.finetune.compute.loss import batch_loss, find_head, head_probe
from flatshift.finetune.compute.numerics import evaluation_mode
from flatshift.finetune.config import Adapter
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.data.example import Example
from flatshift.finetune.evaluate import perplexity
from flatshift.finetune.evaluate.perplexity import document_nats
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.tasks import LanguageModel
from tests.support.finetune_models import IGNORED, Micro, save_backbone

LM = LanguageModel()
VOCABULARY, LENGTH, ROWS = 4096, 96, 4
ALL = ROWS * LENGTH * VOCABULARY
"""Logits of a micro-batch, 6 MiB in float32; everything else of the tiny model is far smaller."""


class Largest(TorchDispatchMode):
    """The most elements that any operation gave out."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            # a storage: views of all logits, and buffers that are filled in place, count as what they are of
            if isinstance(tensor, torch.Tensor) and tensor.shape != (VOCABULARY, 32):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


class Slices(TorchDispatchMode):
    """The most storages of a slice's size that were there at once."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.bytes, self.there, self.most = 4 * elements, set(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage()
            if storage.nbytes() == self.bytes and storage._cdata not in self.there:
                self.there.add(storage._cdata)
                weakref.finalize(storage, self.there.discard, storage._cdata)
        self.most = max(self.most, len(self.there))
        return out


def test_a_slice_is_gone_before_the_next_is_made(monkeypatch):
    monkeypatch.setattr(loss_module, "slice_rows", lambda vocabulary, device, width: 16)
    linear = torch.nn.Linear(8, 500, bias=False).requires_grad_(False)
    hidden = torch.ones(64, 8, requires_grad=True)
    with Slices(16 * 500) as watching:
        loss_module.linear_cross_entropy(hidden, linear, torch.arange(64)).backward()
    assert watching.most == 1


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    source = save_backbone("llama", tmp_path_factory.mktemp("llama"), vocab_size=VOCABULARY, tie_word_embeddings=True)
    model = attach_adapter(load_backbone(source, task=LM), Adapter(rank=4), task=LM, seed=0)
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter.add_(0.02)
    return model


def micro():
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return Micro({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ids, ROWS * (LENGTH - 1), ROWS)


def gradients(model):
    found = {name: p.grad.clone() for name, p in trainable(model).items()}
    model.zero_grad()
    return found


def test_training_holds_one_slice_and_loses_no_digit(model, monkeypatch):
    monkeypatch.setattr(loss_module, "slice_rows", lambda vocabulary, device, width: ALL // 16 // vocabulary)
    batch = micro()
    with Largest() as watching:
        head = find_head(model, head_probe(batch.inputs), task=LM)
        assert watching.elements < ALL // 4  # it is found on a few tokens
        model.train()
        sliced = batch_loss(model, batch, task=LM, head=head)
        sliced.backward()
    assert watching.elements <= max(ALL // 16, VOCABULARY * 64)
    with_slices = gradients(model)
    with Largest() as watching:
        whole = batch_loss(model, batch, task=LM)
        whole.backward()
    assert watching.elements >= ALL - ROWS * VOCABULARY  # the watch can see them
    assert abs(sliced.item() / whole.item() - 1) < 1e-6
    for name, gradient in gradients(model).items():
        assert (with_slices[name] - gradient).norm() <= 1e-6 * gradient.norm() + 1e-9, name


def test_evaluation_holds_one_slice_and_gives_the_same_figures(model, monkeypatch):
    monkeypatch.setattr(loss_module, "slice_rows", lambda vocabulary, device, width: ALL // 16 // vocabulary)
    ids = micro().inputs["input_ids"].tolist()
    examples = [Example(row, [IGNORED, *row[1:]], str(i), f"f:{i}") for i, row in enumerate(ids)]
    with evaluation_mode(model):
        with Largest() as watching:
            nats, tokens = document_nats(model, examples, EvalBatching(ROWS, 0), task=LM)
        monkeypatch.setattr(perplexity, "find_head", lambda *args, **how: None)
        with Largest() as seeing:
            wanted, same = document_nats(model, examples, EvalBatching(ROWS, 0), task=LM)
    assert watching.elements <= max(ALL // 16, VOCABULARY * 64) and seeing.elements >= ALL - ROWS * VOCABULARY
    assert nats == pytest.approx(wanted, rel=1e-6) and tokens.tolist() == same.tolist()
