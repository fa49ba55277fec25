"""GGPO in a training step: σ = 0, exceptions, accumulation, checkpointing, resume, bf16, the frozen weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flatshift.regularizers import GGPO, Regularizer, build
from flatshift.regularizers.layers.signs import draw_signs
from tests.support.regularizer_models import (
    base_weights,
    clear,
    frozen_checksums,
    gradients,
    loss_of,
    perturbations,
    tiny_gpt2,
    tiny_llama,
    tokens,
    with_lora,
)


def attached(model: Any, *, seed: int = 3, steps: int = 20, **settings: Any) -> Regularizer:
    return build(GGPO(**({"sigma": 0.2} | settings))).attach(model, seed=seed, total_steps=steps)


def train(model: Any, regularizer: Regularizer, first: int, last: int, optimizer: Any = None) -> list[torch.Tensor]:
    """Steps first..last−1 of AdamW on data that depends on the step alone; the losses."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(parameters, lr=1e-2)
    losses = []
    for t in range(first, last):
        with regularizer.step(t):
            loss = loss_of(model, tokens(seed=t))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("settings", [{"sigma": 0.0}, {"schedule": "linear"}], ids=["zero", "start-of-ramp"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_zero_sigma_is_plain_to_the_bit(settings: dict, dropout: float) -> None:
    results = []
    for regularized in (False, True):
        model = with_lora(tiny_llama(), lora_dropout=dropout)
        regularizer = attached(model, **settings) if regularized else None
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(1)
            if regularizer is None:
                loss = loss_of(model, tokens())
                loss.backward()
            else:
                with regularizer.step(0):
                    loss = loss_of(model, tokens())
                    loss.backward()
                assert regularizer.metrics()["sigma"] == 0 and regularizer.metrics()["row_sigma_mean"] == 0
        results.append((loss, gradients(model)))
    (plain, plain_grads), (zero, zero_grads) = results
    assert torch.equal(plain, zero)
    assert all(torch.equal(plain_grads[name], zero_grads[name]) for name in plain_grads)


def test_vanishing_sigma_through_the_fused_path_agrees_with_plain() -> None:
    model, ids = with_lora(tiny_llama()), tokens()
    loss_of(model, ids).backward()
    plain, expected = loss_of(model, ids), gradients(model)
    clear(model)
    with attached(model, sigma=1e-8).step(0):
        loss = loss_of(model, ids)
        loss.backward()
    assert float(loss.detach()) == pytest.approx(float(plain.detach()), rel=1e-6)
    for name, grad in gradients(model).items():
        assert float((grad - expected[name]).norm() / expected[name].norm()) < 1e-5


@pytest.mark.bf16
def test_frozen_weights_survive_steps_exceptions_and_evaluation_in_bf16() -> None:
    model, ids = with_lora(tiny_llama(dtype=torch.bfloat16)), tokens()
    before = frozen_checksums(model)
    regularizer = attached(model, sigma=0.4, refresh=2)
    train(model, regularizer, 0, 5)
    assert frozen_checksums(model) == before
    with pytest.raises(KeyboardInterrupt), regularizer.step(5):
        loss_of(model, ids).backward()
        raise KeyboardInterrupt
    clear(model)
    assert frozen_checksums(model) == before
    with regularizer.step(6):
        loss_of(model, ids).backward()
        model.eval()
        loss_of(model, ids)
        model.train()
    assert frozen_checksums(model) == before


def test_an_exception_teaches_nothing_and_leaves_the_model_plain() -> None:
    model, ids = with_lora(tiny_llama()), tokens()
    plain = loss_of(model, ids)
    regularizer = attached(model)
    train(model, regularizer, 0, 1, torch.optim.SGD(model.parameters(), lr=0.0))
    before = regularizer.state_dict()
    with pytest.raises(RuntimeError, match="mine"), regularizer.step(1):
        loss_of(model, ids).backward()
        raise RuntimeError("mine")
    after = regularizer.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if name != "step")
    assert torch.equal(loss_of(model, ids), plain)
    with regularizer.step(1):
        assert not torch.equal(loss_of(model, ids), plain)


def test_evaluation_outside_a_step_is_unperturbed() -> None:
    model, ids = with_lora(tiny_llama(), lora_dropout=0.2), tokens()
    regularizer = attached(model)
    model.eval()
    plain = loss_of(model, ids)
    with regularizer.step(0):
        assert not torch.equal(loss_of(model, ids), plain)
    assert torch.equal(loss_of(model, ids), plain)


def test_the_reference_model_of_a_disabled_adapter_is_unperturbed() -> None:
    model, ids = with_lora(tiny_llama()), tokens()
    with model.disable_adapter():
        reference = loss_of(model, ids)
    with attached(model).step(0), model.disable_adapter():
        assert torch.equal(loss_of(model, ids), reference)


PATHS: dict[str, dict] = {"fused": {}, "dropout": {"lora_dropout": 0.3}, "added": {"use_dora": True}}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_checkpointed_recomputation_sees_the_same_noise(make: Callable[[], Any], path: str) -> None:
    model, ids = with_lora(make(), **PATHS[path]), tokens()
    results = []
    for reentrant in (None, False, True):
        regularizer = attached(model, ema=0.0)
        if reentrant is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.enable_input_require_grads()
        with torch.random.fork_rng(devices=[]), regularizer.step(0):
            torch.default_generator.manual_seed(1)
            loss = loss_of(model, ids)
            loss.backward()
        results.append((loss.detach(), gradients(model), regularizer.state_dict()))
        regularizer.detach()
        clear(model)
    (loss, grads, state), *recomputed = results
    for other_loss, other_grads, other_state in recomputed:
        assert torch.equal(loss, other_loss)
        assert all(torch.equal(grads[name], other_grads[name]) for name in grads)
        assert all(torch.equal(value, other_state[n]) for n, value in state.items())


def test_accumulation_in_eight_parts_equals_one() -> None:
    """Same noise for all micro-batches, and the sketch is of the accumulated gradient."""
    ids, results = tokens(8), []
    for parts in (1, 8):
        model = with_lora(tiny_llama(dtype=torch.float64))
        regularizer = attached(model, ema=0.0)
        with regularizer.step(0):
            for part in ids.tensor_split(parts):
                (loss_of(model, part) / parts).backward()
        results.append((gradients(model), regularizer.state_dict()))
    (one, one_state), (eight, eight_state) = results
    assert all(torch.allclose(one[name], eight[name], rtol=1e-9, atol=1e-12) for name in one)
    sketches = [name for name in one_state if name.endswith(".ema")]
    assert sketches and all(torch.allclose(one_state[n], eight_state[n], rtol=1e-9, atol=1e-15) for n in sketches)
    assert all(float(one_state[name].sum()) > 0 for name in sketches)


@pytest.mark.parametrize("stop", [1, 4, 7])
def test_resumed_equals_continuous_to_the_bit(stop: int) -> None:
    def run(*spans: tuple[int, int]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], dict[str, float]]:
        model = with_lora(tiny_llama())
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        losses, state = [], None
        for first, last in spans:
            regularizer = attached(model, refresh=3, schedule="cosine")
            if state is not None:
                regularizer.load_state_dict(state)
            losses += train(model, regularizer, first, last, optimizer)
            state, metrics = regularizer.state_dict(), regularizer.metrics()
            regularizer.detach()
        assert state is not None
        return losses, state | {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}, metrics

    losses, state, metrics = run((0, 9))
    resumed_losses, resumed_state, resumed_metrics = run((0, stop), (stop, 9))
    assert torch.equal(torch.stack(losses), torch.stack(resumed_losses))
    assert all(torch.equal(state[name], resumed_state[name]) for name in state)
    assert metrics == resumed_metrics


@pytest.mark.bf16
@pytest.mark.parametrize("path", PATHS)
def test_bf16_backbone_with_float32_adapter_under_autocast(path: str) -> None:
    """Close to the float32 computation of the same perturbed weights; gradients and state stay float32."""
    exact = with_lora(tiny_llama(dtype=torch.bfloat16).float(), **PATHS[path])
    mixed = with_lora(tiny_llama(dtype=torch.bfloat16), **PATHS[path])
    values = {n: p.detach() for n, p in exact.named_parameters() if "lora" in n}
    for name, parameter in mixed.named_parameters():
        if "lora" in name:
            parameter.data = values[name].clone()
    exact.eval(), mixed.eval()
    results = []
    for model, enabled in ((exact, False), (mixed, True)):
        regularizer = attached(model, ema=0.0)
        with regularizer.step(0):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                loss = loss_of(model, tokens())
            loss.backward()
        results.append((loss.detach().float(), gradients(model), regularizer.state_dict()))
    (loss, grads, state), (mixed_loss, mixed_grads, mixed_state) = results
    assert float(mixed_loss) == pytest.approx(float(loss), rel=1e-2)
    for name, grad in grads.items():
        assert mixed_grads[name].dtype == torch.float32
        assert float((mixed_grads[name] - grad).norm() / grad.norm()) < 0.15
    for name, value in state.items():
        if name.endswith(".ema"):
            assert mixed_state[name].dtype == torch.float32
            assert torch.corrcoef(torch.stack([mixed_state[name], value]))[0, 1] > 0.98


def test_a_non_finite_sketch_is_passed_over_and_counted() -> None:
    model, ids = with_lora(tiny_llama()), tokens()
    regularizer = attached(model)
    with regularizer.step(0):
        loss_of(model, ids).backward()
    before = regularizer.state_dict()
    with regularizer.step(1):
        (loss_of(model, ids) * float("inf")).backward()
    after = regularizer.state_dict()
    assert all(torch.equal(before[n], after[n]) for n in before if n.endswith((".ema", ".updates")))
    assert regularizer.metrics()["sketches"] == 1 and regularizer.metrics()["sketches_skipped"] == 1


def test_in_fp16_a_sketch_overflows_no_earlier_than_the_adapter() -> None:
    model, ids = with_lora(tiny_llama(dtype=torch.float16), trained=False), tokens()
    for parameter in model.parameters():
        parameter.data = parameter.data.float() if parameter.requires_grad else parameter.data
    regularizer, largest = attached(model), 0.0
    for step, exponent in enumerate(range(8, 30, 2)):
        clear(model)
        with regularizer.step(step, loss_scale=2.0**exponent):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_of(model, ids)
            (loss * 2.0**exponent).backward()
        if not all(bool(gradient.isfinite().all()) for gradient in gradients(model).values()):
            break
        largest, metrics = 2.0**exponent, regularizer.metrics()
        assert metrics["sketches_skipped"] == 0 and (step == 0 or metrics["guidance"] > 0)
    assert largest >= 2**16 and exponent < 28  # the adapter has overflowed in the end


def test_a_step_without_backward_changes_no_average() -> None:
    model = with_lora(tiny_llama())
    regularizer = attached(model)
    with regularizer.step(0), torch.no_grad():
        loss_of(model, tokens())
    assert regularizer.metrics()["sketches"] == 0


@pytest.mark.parametrize("rank", [None, 3, 12])
def test_noise_is_the_documented_hash_with_independent_keys(rank: int | None) -> None:
    model = with_lora(tiny_llama())
    regularizer = attached(model, rank=rank, seed=11)
    k = rank or 8
    with regularizer.step(4):
        noise = perturbations(regularizer)
    drawn = {}
    for name, weight in base_weights(model).items():
        m, n = weight.shape
        s_out, s_in = (
            draw_signs(seed=11, step=4, layer=name, side=side, indices=range(size), columns=k)
            for side, size in (("out", m), ("in", n))
        )
        drawn[name] = s_in
        shape = s_out @ s_in.T
        scale = (noise[name] * shape).sum(1) / shape.square().sum(1)  # σ_i/√k, by least squares
        assert torch.allclose(noise[name], scale[:, None] * shape, rtol=1e-4, atol=1e-8)
        site = model.get_submodule(name)
        update = site.scaling["default"] * site.lora_B["default"].weight @ site.lora_A["default"].weight
        expected = 0.2 / n**0.5 * (weight + update).norm(dim=1) / k**0.5
        assert torch.allclose(scale, expected, rtol=1e-4)
    prefix = "base_model.model.model.layers.0.self_attn."
    assert not torch.equal(drawn[prefix + "q_proj"], drawn[prefix + "k_proj"])
    with regularizer.step(5):
        assert not torch.equal(perturbations(regularizer)[prefix + "q_proj"], noise[prefix + "q_proj"])


def test_beta_moves_power_but_makes_none() -> None:
    powers = {}
    for beta in (0.0, 1.0, 10.0):
        model = with_lora(tiny_llama())
        regularizer = attached(model, beta=beta, probes=4)
        with regularizer.step(0):
            loss_of(model, tokens()).backward()
        with regularizer.step(1):
            # Σ_j ε_ij² has the mean n σ_i² but not that value; the factor U is diag(σ_i/√k) signs exactly.
            noise_out = {b.site.name: b.noise_out for group in regularizer._groups for b in group.branches}
            powers[beta] = {name: factor.square().sum(1) for name, factor in noise_out.items()}
        metrics = regularizer.metrics()
        assert metrics["gradient_share"] == pytest.approx(beta / (1 + beta), abs=1e-5)
        assert (metrics["guidance"] > 0.01) == (beta > 0)
    for name, plain in powers[0.0].items():
        for beta in (1.0, 10.0):
            assert float(powers[beta][name].sum()) == pytest.approx(float(plain.sum()), rel=1e-5)
            assert not torch.allclose(powers[beta][name], plain, rtol=0.01)


def test_row_norms_are_refreshed_on_schedule() -> None:
    model = with_lora(tiny_llama())
    regularizer = attached(model, beta=0.0, refresh=3)
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    seen = []
    for t in range(7):
        with regularizer.step(t):
            seen.append(regularizer.state_dict()[f"{name}.norms"])
        model.get_submodule(name).lora_B["default"].weight.data += 0.1
    changed = [t for t in range(1, 7) if not torch.equal(seen[t], seen[t - 1])]
    assert changed == [3, 6]
