"""The loss: sums over supervised tokens, the sliced head equal to the model's own logits, unplain heads left alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from flatshift.finetune.adapters.adapter import attach_adapter, trainable
from flatshift.finetune.compute import loss as loss_module
from flatshift.finetune.compute.loss import (
    batch_loss,
    find_head,
    linear_cross_entropies,
    linear_cross_entropy,
    loss_sum,
)
from flatshift.finetune.compute.memory import slice_columns, slice_rows
from flatshift.finetune.config import Adapter
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.tasks import Classify, LanguageModel
from tests.support.finetune_models import IGNORED, RandomBatches, save_backbone

LM = LanguageModel()


def build(kind, directory, **overrides):
    model = attach_adapter(
        load_backbone(save_backbone(kind, directory, **overrides), task=LM), Adapter(rank=4), task=LM, seed=0
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def naive(model, micro):
    """Token by token, in float64."""
    logits = model(**micro.inputs).logits.double()
    total = torch.zeros((), dtype=torch.float64)
    for row in range(logits.shape[0]):
        for t in range(logits.shape[1] - 1):
            label = int(micro.labels[row, t + 1])
            if label != IGNORED:
                total = total - torch.log_softmax(logits[row, t], dim=-1)[label]
    return total


def gradients(model):
    found = {name: p.grad.clone() for name, p in trainable(model).items()}
    model.zero_grad()
    return found


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_sliced_and_whole_loss_agree_with_the_naive_sum_in_value_and_gradient(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(loss_module, "slice_rows", lambda vocabulary, device, width: 16)  # several slices
    model, micro = build(kind, tmp_path), RandomBatches(rows=5).at(0)[0]
    head = find_head(model, micro.inputs, task=LM)
    assert head is not None
    reference = naive(model, micro)
    reference.backward()
    expected = gradients(model)
    for route in (head, None):
        value = batch_loss(model, micro, task=LM, head=route)
        assert value.dtype == torch.float32 and abs(value.item() / reference.item() - 1) < 1e-6
        value.backward()
        for name, gradient in gradients(model).items():
            assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


def naive_dft(model, micro):
    """Token by token, in float64: −p·log p, of which p has no gradient."""
    logits = model(**micro.inputs).logits.double()
    total = torch.zeros((), dtype=torch.float64)
    for row, t in (micro.labels[:, 1:] != IGNORED).nonzero().tolist():
        nats = -torch.log_softmax(logits[row, t], dim=-1)[micro.labels[row, t + 1]]
        total = total + float(torch.exp(-nats)) * nats
    return total


@pytest.mark.parametrize(("kind", "settings"), [("llama", {}), ("gemma2", {"final_logit_softcapping": 0.5})])
def test_dft_weights_tokens_by_their_probability(kind, settings, tmp_path, monkeypatch):
    monkeypatch.setattr(loss_module, "slice_rows", lambda vocabulary, device, width: 16)  # several slices
    task, model, micro = LanguageModel(dft=True), build(kind, tmp_path, **settings), RandomBatches(rows=5).at(0)[0]
    head = find_head(model, micro.inputs, task=task)
    assert head is not None
    reference = naive_dft(model, micro)
    reference.backward()
    expected = gradients(model)
    for route in (head, dataclasses.replace(head, kernel=None if head.cap else lambda *_, **__: 0 / 0), None):
        value = batch_loss(model, micro, task=task, head=route)
        assert value.dtype == torch.float32 and abs(value.item() / reference.item() - 1) < 1e-6
        value.backward()
        for name, gradient in gradients(model).items():
            assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm(), name
        plain = batch_loss(model, micro, task=task.for_evaluation(), head=route and head)
        assert plain.item() == batch_loss(model, micro, task=LM, head=route and head).item() > 2 * value.item()


class SmoothedLanguageModel(LanguageModel):
    smoothing = 0.1


SCALED_AND_CAPPED = {
    "granite": ({"logits_scaling": 6.0}, 1 / 6, None),
    "cohere": ({"logit_scale": 0.0625}, 0.0625, None),
    "gemma2": ({"final_logit_softcapping": 0.5}, 1.0, 0.5),
}


@pytest.mark.parametrize("kind", SCALED_AND_CAPPED)
def test_scaled_and_soft_capped_logits_are_sliced_too(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(loss_module, "slice_rows", lambda vocabulary, device, width: 16)  # several slices
    monkeypatch.setattr(loss_module, "slice_columns", lambda vocabulary, device: 20)
    settings, scale, cap = SCALED_AND_CAPPED[kind]
    model, micro = build(kind, tmp_path, **settings), RandomBatches().at(0)[0]
    head = find_head(model, micro.inputs, task=LM)
    assert head is not None and head.scale == pytest.approx(scale) and head.cap == pytest.approx(cap)
    reference = naive(model, micro)
    reference.backward()
    expected = gradients(model)
    value = batch_loss(model, micro, task=LM, head=head)
    assert abs(value.item() / reference.item() - 1) < 1e-6
    value.backward()
    for name, gradient in gradients(model).items():
        assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm(), name
    if cap is not None:  # every logit has a slope of its own
        assert find_head(model, micro.inputs, task=SmoothedLanguageModel()) is None


def test_the_slope_of_a_soft_cap_holds_in_half_precision():
    torch.manual_seed(0)
    linear = torch.nn.Linear(16, 300, bias=False).requires_grad_(False)
    targets = torch.randint(300, (40,))
    hidden = (3 * torch.randn(40, 16)).requires_grad_()
    logits = loss_module.soft_cap(linear(hidden.double().float()), 2.0)
    expected = F.cross_entropy(logits, targets, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), hidden)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.float16, 0.004)):
        rows = hidden.detach().to(dtype).requires_grad_()
        terms = linear_cross_entropies(rows, linear, targets, cap=2.0)
        assert (terms - expected).abs().max() <= 4 * bound
        (ours,) = torch.autograd.grad(terms.sum(), rows)
        assert (ours.float() - gradient).norm() <= bound * gradient.norm()
        torch.testing.assert_close(linear_cross_entropy(rows, linear, targets, cap=2.0), terms.sum())


def test_a_head_whose_logits_are_changed_otherwise_takes_the_models_own_forward_pass(tmp_path, monkeypatch):
    model, micro = build("llama", tmp_path), RandomBatches().at(0)[0]
    causal = model.get_base_model()
    forward = causal.forward

    def shifted(*args, **options):
        output = forward(*args, **options)
        output.logits = output.logits + 0.25
        return output

    monkeypatch.setattr(causal, "forward", shifted)
    assert find_head(model, micro.inputs, task=LM) is None
    assert abs(batch_loss(model, micro, task=LM).item() / naive(model, micro).item() - 1) < 1e-6


def test_an_adapted_or_trained_head_is_not_taken_for_a_plain_one(tmp_path):
    source = save_backbone("llama", tmp_path, tie_word_embeddings=False)
    model = attach_adapter(load_backbone(source, task=LM), Adapter(rank=2, targets=("lm_head",)), task=LM, seed=0)
    assert find_head(model, RandomBatches().at(0)[0].inputs, task=LM) is None


def test_find_head_leaves_mode_and_gradients_alone(tmp_path):
    model = build("llama", tmp_path).train()
    assert find_head(model, RandomBatches().at(0)[0].inputs, task=LM) is not None
    assert model.training and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("bias", [True, False])
def test_linear_cross_entropy_gradient_by_finite_differences(bias):
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(6, 11, bias=bias).double().requires_grad_(False)
    hidden = torch.randn(7, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    targets = torch.randint(0, 11, (7,), generator=generator)
    (gradient,) = torch.autograd.grad(linear_cross_entropy(hidden, linear, targets), hidden)
    step = 1e-3  # the value itself is float32

    def value(shift):
        return F.cross_entropy(linear(hidden + shift), targets, reduction="sum").item()

    for index in [(0, 0), (3, 2), (6, 5)]:
        shift = torch.zeros_like(hidden)
        shift[index] = step
        numeric = (value(shift) - value(-shift)) / (2 * step)
        assert abs(gradient[index].item() - numeric) < 1e-5


@pytest.mark.parametrize(("vocabulary", "rows"), [(5000, 600), (70_001, 300), (140_003, 250)])
def test_slices_that_divide_neither_rows_nor_vocabulary_agree_with_dense_float64(vocabulary, rows):
    assert 0 < rows % slice_rows(vocabulary, "cpu", 4) < rows  # a whole slice and a part of one
    generator = torch.Generator().manual_seed(3)
    linear = torch.nn.Linear(8, vocabulary, bias=False).requires_grad_(False)
    linear.weight.copy_(torch.randn(vocabulary, 8, generator=generator))
    hidden = torch.randn(rows, 8, generator=generator, requires_grad=True)
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    wide = hidden.detach().double().requires_grad_()
    terms = F.cross_entropy(wide @ linear.weight.double().T, targets, reduction="none")
    weights = torch.rand(rows, generator=generator)
    (wanted,) = torch.autograd.grad(terms.sum(), wide, retain_graph=True)
    whole = F.cross_entropy(hidden @ linear.weight.T, targets, reduction="sum")
    (rounded,) = torch.autograd.grad(whole, hidden)  # sums over V in one chain on some CPUs, in several on others
    bound = 1e-6 + 1.5 * float((rounded - wanted).norm() / wanted.norm())
    (weighted,) = torch.autograd.grad((terms * weights).sum(), wide)
    for expected, value in (
        (wanted, linear_cross_entropy(hidden, linear, targets)),
        (weighted, (linear_cross_entropies(hidden, linear, targets) * weights).sum()),
    ):
        (gradient,) = torch.autograd.grad(value, hidden)
        assert (gradient - expected).norm() <= bound * expected.norm()
    assert abs(linear_cross_entropy(hidden, linear, targets).item() / terms.sum().item() - 1) < 1e-7


def test_slices_are_products_of_many_rows_and_bounded_memory():
    for vocabulary in (2, 999, 4096, 30_522, 32_000, 50_257, 128_256, 262_144):
        for width in (4, 2):
            rows = slice_rows(vocabulary, "cpu", width)
            assert rows >= 128
            assert rows * vocabulary * width <= max(1 << 27, 128 * vocabulary * width)
            assert 256 * slice_columns(vocabulary, "cpu") * 4 <= 1 << 23
            assert rows <= 256 or rows * vocabulary <= 1 << 20
            assert slice_rows(vocabulary, "cuda", width) >= max(128, rows)


def test_large_logits_and_no_supervised_token():
    linear = torch.nn.Linear(4, 9).requires_grad_(False)
    hidden = (torch.ones(3, 4) * 1e4).requires_grad_()
    targets = torch.tensor([0, 4, 8])
    value = linear_cross_entropy(hidden, linear, targets)
    assert torch.isfinite(value)
    assert abs(value.item() / F.cross_entropy(linear(hidden), targets, reduction="sum").item() - 1) < 1e-5
    empty = linear_cross_entropy(hidden[:0], linear, targets[:0])
    empty.backward()
    assert empty.item() == 0.0 and not hidden.grad.any()


def test_classification_sums_over_examples():
    logits, labels = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    parts = sum(loss_sum(logits[i : i + 1], labels[i : i + 1], task=Classify()) for i in range(4))
    assert torch.allclose(loss_sum(logits, labels, task=Classify()), parts)
