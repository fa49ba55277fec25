"""SAM and Bi-LoRA on quantised backbones: the dense float64 reference has the dequantised values as its weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flatshift.finetune.adapters.adapter import trainable
from flatshift.finetune.config import Quantization
from flatshift.finetune.models.fingerprint import checksum
from flatshift.finetune.models.quantize import KINDS
from flatshift.regularizers import ASAM, SAM, BiLora, LoraSAM, build
from tests.finetune.models.test_quantize import adapted, dense_twin, loss_and_gradients, needs_package, sources
from tests.support.regularizer_models import base_weights

__all__ = ["sources"]  # a fixture


def weight_gradients(twin: Any) -> dict[str, Tensor]:
    weights = base_weights(twin)
    for weight in weights.values():
        weight.requires_grad_()
    loss_and_gradients(twin)
    return {name: weight.grad for name, weight in weights.items() if weight.grad is not None}


@needs_package
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", [SAM(rho=0.3), LoraSAM(rho=0.3), ASAM(rho=1.0)], ids=lambda c: c.kind)
def test_both_passes_of_the_sam_kind(kind: Quantization, config: Any, sources: dict[str, Path]) -> None:
    model = adapted(sources["llama"], kind)
    before, plain = checksum(model), loss_and_gradients(model)[0]
    twin = dense_twin(sources["llama"], model, {})
    if isinstance(config, SAM):
        dense = weight_gradients(twin)
        norm = torch.cat([g.flatten() for g in dense.values()]).norm()
        twin = dense_twin(sources["llama"], model, {name: config.rho * g / norm for name, g in dense.items()})
    else:
        _, gradients = loss_and_gradients(twin)
        sizes = {
            n: p.detach().abs() + config.eta if isinstance(config, ASAM) else 1.0 for n, p in trainable(twin).items()
        }
        norm = torch.cat([(sizes[n] * g).flatten() for n, g in gradients.items()]).norm()
        for name, parameter in trainable(twin).items():
            parameter.data += config.rho * sizes[name] ** 2 * gradients[name] / norm
    wanted_loss, wanted = loss_and_gradients(twin)
    losses, found = [], {}
    regularizer = build(config).attach(model, seed=1, total_steps=1)
    with regularizer.step(0) as passes:
        for _ in passes:
            loss, found = loss_and_gradients(model)
            losses.append(float(loss))
    regularizer.detach()
    assert losses[0] == pytest.approx(float(plain), rel=1e-6) and losses[1] > losses[0] + 1e-3
    assert losses[1] == pytest.approx(float(wanted_loss), rel=1e-4)
    for name, gradient in wanted.items():
        assert float((found[name].double() - gradient).norm() / gradient.norm()) < 1e-3, name
    assert checksum(model) == before


@needs_package
@pytest.mark.parametrize("kind", KINDS)
def test_bi_lora_in_two_steps(kind: Quantization, sources: dict[str, Path]) -> None:
    model = adapted(sources["llama"], kind)
    before = checksum(model)
    regularizer = build(BiLora(rho=0.5, rank=2)).attach(model, seed=1, total_steps=2)
    with regularizer.step(0):
        loss_and_gradients(model)
    regularizer.after_optimizer_step(1e-2)
    state = regularizer.state_dict()
    noise = {name[:-2]: state[f"{name[:-2]}.B"] @ a for name, a in state.items() if name.endswith(".A")}
    assert len(noise) == 14 and all(float(value.norm()) > 0 for value in noise.values())
    with regularizer.step(1):
        loss, found = loss_and_gradients(model)
    wanted_loss, wanted = loss_and_gradients(dense_twin(sources["llama"], model, noise))
    assert float(loss) == pytest.approx(float(wanted_loss), rel=1e-4)
    for name, gradient in wanted.items():
        assert float((found[name].double() - gradient).norm() / gradient.norm()) < 1e-3, name
    assert checksum(model) == before
