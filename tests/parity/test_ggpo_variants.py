"""GGPO beside what else a training step may have: PEFT's LoRA variants, autocast, a gradient scaler, recomputation.

The reference is naive: ε is added to a frozen weight, or to the weight that PEFT itself merges, and autograd does the
rest.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from flatshift.regularizers import GGPO, build
from flatshift.regularizers.layers.sites import find_lora_sites
from tests.support.regularizer_models import (
    clear,
    densely_perturbed,
    gradients,
    loss_of,
    perturbations,
    tiny_llama,
    tokens,
    with_lora,
)

INVOCATION = 5
"""The token from whose last occurrence on an aLoRA adapter is active."""
EXACT = {"rtol": 1e-9, "atol": 1e-13}


def ids() -> Tensor:
    rows = tokens()
    rows[:, 3] = INVOCATION
    return rows


def bd_lora() -> Any:
    from peft.tuners.lora.config import BdLoraConfig

    return BdLoraConfig(
        target_modules_bd_a=["o_proj", "down_proj"],
        target_modules_bd_b=["q_proj", "k_proj", "v_proj", "up_proj", "gate_proj"],
        nblocks=2,
    )


def kasa() -> Any:
    from peft.tuners.lora.config import KasaConfig

    return KasaConfig()


VARIANTS: dict[str, Any] = {
    "rslora": lambda: {"use_rslora": True},
    "dora": lambda: {"use_dora": True},
    "alora": lambda: {"alora_invocation_tokens": [INVOCATION]},
    "bdlora": lambda: {"use_bdlora": bd_lora()},
    "kasa": lambda: {"kasa_config": kasa()},
    "mica": lambda: {"init_lora_weights": "mica"},
}


def variant(name: str) -> Any:
    """A float64 model with that variant, trained a little: no factor is zero."""
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    settings = VARIANTS[name]() | {"r": 4, "lora_alpha": 8, "target_modules": targets, "task_type": "CAUSAL_LM"}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        try:
            model = get_peft_model(tiny_llama(), LoraConfig(**settings)).double()
        except (TypeError, ValueError) as error:
            if name in ("rslora", "dora"):
                raise
            pytest.skip(f"this version of PEFT has no {name}: {error}")
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                parameter.data.normal_(0, 0.1)
    return model.train()


def step(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    clear(model)
    loss = loss_of(model, ids())
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "dora"])
def test_a_variant_with_the_branch_is_the_variant_on_a_dense_noisy_weight(name: str) -> None:
    model = variant(name)
    plain, _ = step(model)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    regularizer: Any = build(GGPO(sigma=0.3)).attach(model, seed=1, total_steps=2)
    with regularizer.step(0):
        noise = perturbations(regularizer)
        loss, grads = step(model)
    assert regularizer.metrics()["perturbed_layers"] == len(noise) == 14
    regularizer.detach()
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
    assert abs(float(loss - plain)) > 1e-4  # the noise is there
    dense, dense_grads = step(densely_perturbed(model, noise))
    assert torch.allclose(loss, dense, **EXACT) and grads.keys() == dense_grads.keys()
    for key, wanted in dense_grads.items():
        assert torch.allclose(grads[key], wanted, **EXACT), key


@pytest.mark.parametrize("name", ["rslora", "dora", "bdlora", "kasa", "mica"])
def test_norms_and_loss_are_those_of_the_merged_weight(name: str) -> None:
    """What PEFT merges is W'; its rows have the norms, and W' + ε in plain linear layers gives the same loss."""
    model = variant(name)
    merged = copy.deepcopy(model).merge_and_unload()
    prefix = "base_model.model."
    for site in find_lora_sites(model)[0]:
        weight = merged.get_submodule(site.name.removeprefix(prefix)).weight
        assert torch.allclose(site.squared_norms(site.factors()), weight.square().sum(1), rtol=1e-9), site.name
    regularizer: Any = build(GGPO(sigma=0.3)).attach(model, seed=1, total_steps=2)
    with regularizer.step(0), torch.no_grad():
        loss = loss_of(model, ids())
        for layer, epsilon in perturbations(regularizer).items():
            merged.get_submodule(layer.removeprefix(prefix)).weight.add_(epsilon)
    with torch.no_grad():
        assert torch.allclose(loss, loss_of(merged, ids()), rtol=1e-9)


# --------------------------------------------------------------------------------------------- precision


@pytest.mark.bf16
@pytest.mark.parametrize("backbone", [torch.float32, torch.bfloat16])
def test_under_autocast_the_step_is_that_of_dense_noise_up_to_rounding(backbone: torch.dtype) -> None:
    """Loss and gradients in bfloat16 beside float64; dense noise in the same precision is as far from it."""
    exact = with_lora(tiny_llama(dtype=backbone).double())
    model = copy.deepcopy(exact)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else backbone)
    regularizer: Any = build(GGPO(sigma=0.2)).attach(model, seed=1, total_steps=2)
    with regularizer.step(0):
        noise = perturbations(regularizer)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            clear(model)
            loss = loss_of(model, ids())
        loss.backward()
        grads = gradients(model)
    regularizer.detach()
    wanted, wanted_grads = step(densely_perturbed(exact, noise))
    assert float(loss) == pytest.approx(float(wanted), rel=1e-2)
    flat, flat_wanted = (
        torch.cat([g.flatten().double() for _, g in sorted(part.items())]) for part in (grads, wanted_grads)
    )
    assert float(torch.cosine_similarity(flat, flat_wanted, dim=0)) > 0.995
    assert float(flat.norm() / flat_wanted.norm()) == pytest.approx(1, abs=0.03)


def scaled_course(
    scale: float | None, *, broken: int | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    """Four steps; with a scaler if there is a scale; the loss of step `broken` is not finite."""
    model = with_lora(tiny_llama())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, growth_interval=100, enabled=scale is not None)
    regularizer: Any = build(GGPO(sigma=0.2, ema=0.5)).attach(model, seed=1, total_steps=4)
    for t in range(4):
        clear(model)
        with regularizer.step(t, loss_scale=scaler.get_scale()):
            loss = loss_of(model, tokens(seed=t)) * (float("inf") if t == broken else 1.0)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    metrics, state = regularizer.metrics(), regularizer.state_dict()
    regularizer.detach()
    return {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}, state, (metrics, scaler.get_scale())


def test_a_gradient_scaler_changes_no_bit() -> None:
    """By a power of two, so that scaling and unscaling are exact: adapters, sketches and norms."""
    plain, plain_state, _ = scaled_course(None)
    scaled, state, (_, scale) = scaled_course(2.0**10)
    assert scale == 2.0**10
    assert all(torch.equal(plain[name], scaled[name]) for name in plain)
    assert (
        all(torch.equal(plain_state[name], state[name]) for name in plain_state) and plain_state.keys() == state.keys()
    )


def test_a_step_that_the_scaler_skips_teaches_the_regularizer_nothing() -> None:
    _, state, (metrics, scale) = scaled_course(2.0**10, broken=1)
    assert scale == 2.0**9 and metrics["sketches"] == 3 and metrics["sketches_skipped"] == 1
    assert all(bool(tensor.isfinite().all()) for tensor in state.values() if tensor.is_floating_point())


# --------------------------------------------------------------------------------------------- recomputation


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"lora_dropout": 0.3}], ids=["lora", "dora", "dropout"])
def test_gradient_checkpointing_sees_the_same_noise(settings: dict[str, Any], reentrant: bool) -> None:
    """Loss, gradients and the sketch (not counted twice) with and without recomputation."""
    found = []
    for checkpointing in (False, True):
        model = with_lora(tiny_llama(dtype=torch.float64), **settings)
        if checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        regularizer: Any = build(GGPO(sigma=0.3)).attach(model, seed=1, total_steps=1)
        with torch.random.fork_rng(devices=[]), regularizer.step(0):
            torch.default_generator.manual_seed(3)
            loss, grads = step(model)
        state = regularizer.state_dict()
        found.append((loss, grads, {name: tensor for name, tensor in state.items() if name.endswith(".ema")}))
        regularizer.detach()
    (loss, grads, sketches), (again, again_grads, again_sketches) = found
    assert torch.allclose(loss, again, **EXACT) and grads.keys() == again_grads.keys()
    assert all(torch.allclose(grads[name], again_grads[name], **EXACT) for name in grads)
    assert sketches and all(torch.allclose(sketches[name], again_sketches[name], rtol=1e-9) for name in sketches)
