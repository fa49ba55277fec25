"""The backbone under a light adapter: gradients of single texts beside autograd, and the loss gap of a target."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.select import adapted
from flatshift.experiments.select.methods import backbone_nll
from flatshift.selection.config import Gradients, LossGap, Perplexity
from tests.support.data_models import byte_tokenizer
from tests.support.finetune_models import save_backbone

TEXTS = ["a short text", "", "quite another one, and longer than that", "zzz", "a short text again"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Recipe:
    place = tmp_path_factory.mktemp("tiny")
    tokenizer = byte_tokenizer()
    save_backbone("llama", place, vocab_size=max(len(tokenizer), 64))
    tokenizer.save_pretrained(place)
    return replace(Recipe(), backbone=str(place))


def test_gradients_of_single_texts_are_autograds(recipe: Recipe) -> None:
    model, tokenizer, device = adapted._load_adapted_backbone(recipe, 2, 5)
    gradients = adapted.SampleGradients(model, device, pad_id=0, batch_size=3)
    examples = adapted.encode_texts(TEXTS, tokenizer, 24)
    found, numbers = gradients.of(examples)
    assert sorted(numbers) == [0, 2, 3, 4] and found.shape == (4, gradients.width)
    factors = [m.weight for n, m in sorted(model.named_modules()) if ".lora_B." in n and hasattr(m, "weight")]
    for row, number in zip(found, numbers, strict=True):
        ids = next(torch.tensor([one.input_ids]) for one in examples if int(one.id) == number)
        logits = model(input_ids=ids).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:])
        expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, factors)])
        np.testing.assert_allclose(row, expected.numpy(), rtol=2e-3, atol=2e-6)


@pytest.mark.parametrize("adam", [False, True])
def test_projected_gradients_keep_products_and_do_not_see_their_neighbours(recipe: Recipe, adam: bool) -> None:
    embed, key = adapted.gradient_embedder(
        recipe, Gradients(rank=2, dim=256, max_length=24, batch_size=2, adam=adam), TEXTS, keyed=False
    )
    rows = embed(TEXTS)
    assert rows.shape == (5, 256) and not rows[1].any() and key.startswith("gradients")
    np.testing.assert_allclose(embed(TEXTS[2:4]), rows[2:4], rtol=1e-3, atol=1e-5 * np.abs(rows).max())
    unit = rows[[0, 2, 3, 4]] / np.linalg.norm(rows[[0, 2, 3, 4]], axis=1, keepdims=True)
    near = unit @ unit.T
    assert near[0, 3] > max(near[0, 1], near[0, 2])  # the texts that begin alike


def test_the_gap_is_negative_for_what_the_adapter_read(recipe: Recipe) -> None:
    target = ["the cat sat on the mat"] * 8
    gap = adapted.train_loss_gap(recipe, LossGap(steps=15, batch_size=4, lr=1e-2, rank=2, max_length=32), target)
    values = gap(["the cat sat on a mat", "ZQXJ 9917 ####", ""])
    assert values[0] < values[1] and values[0] < -0.05 and np.isnan(values[2])


def test_a_normalised_gap_is_the_share_of_the_loss_that_is_gone(recipe: Recipe) -> None:
    target, texts = ["the cat sat on the mat"] * 8, ["the cat sat on a mat", "ZQXJ 9917 ####"]
    settings = LossGap(steps=15, batch_size=4, lr=1e-2, rank=2, max_length=32)
    gaps, shares = (
        adapted.train_loss_gap(recipe, replace(settings, normalised=on), target)(texts) for on in (False, True)
    )
    before = backbone_nll(recipe, Perplexity(max_length=32), target)
    assert before is not None
    np.testing.assert_allclose(shares, gaps / before(texts), rtol=1e-3)
