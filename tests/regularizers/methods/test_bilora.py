"""Bi-LoRA: the second adapter against a dense float64 reference, its ball, and that nobody else ever sees it."""

import math
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict
from torch import Tensor

from flatshift.regularizers import GGPO, BiLora, Regularizer, RegularizerError, build
from flatshift.regularizers.methods.bilora import BiLoraRegularizer, draw_a, squared_product_norm
from tests.regularizers.methods.test_sam import Split, bits, forwards, theta
from tests.support.regularizer_models import (
    base_weights,
    densely_perturbed,
    frozen_checksums,
    gradients,
    loss_of,
    tiny_gpt2,
    tiny_llama,
    tokens,
    with_lora,
)

RATE = 1e-2


def attached(model: Any, *, seed: int = 3, **settings: Any) -> BiLoraRegularizer:
    made = build(BiLora(**({"rho": 0.5, "rank": 3} | settings))).attach(model, seed=seed, total_steps=9)
    assert isinstance(made, BiLoraRegularizer)
    return made


def train(model: Any, regularizer: Regularizer, first: int, last: int, optimizer: Any, parts: int = 1) -> list[float]:
    losses = []
    for t in range(first, last):
        with regularizer.step(t):
            losses.append(0.0)
            for part in tokens(seed=t).tensor_split(parts):
                loss = loss_of(model, part) / parts
                loss.backward()
                losses[-1] += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        regularizer.after_optimizer_step(RATE)
    return losses


def adamw(model: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(theta(model).values(), lr=RATE, weight_decay=0.0)


def factors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name.endswith((".A", ".B"))}


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
@pytest.mark.parametrize("parts", [1, 4])
def test_eight_steps_equal_a_dense_reference(make: Any, parts: int) -> None:
    """The reference writes W0 + B₂A₂ out, gets ∂L/∂W from autograd, and ascends with a textbook Adam."""
    model = with_lora(make(dtype=torch.float64))
    regularizer = attached(model)
    losses = train(model, regularizer, 0, 8, adamw(model), parts)

    model = with_lora(make(dtype=torch.float64))
    optimizer, wanted, clips = adamw(model), [], 0
    aux, moments = {}, {}
    for name, weight in base_weights(model).items():
        conv = type(model.get_submodule(name).base_layer).__name__ == "Conv1D"
        m, n = weight.T.shape if conv else weight.shape
        aux[name] = [draw_a(3, name, 3, n).double(), torch.zeros(m, 3, dtype=torch.float64)]
        moments[name] = [[torch.zeros_like(f), torch.zeros_like(f)] for f in aux[name]]
    for t in range(8):
        twin = densely_perturbed(model, {name: b @ a for name, (a, b) in aux.items()})
        weights = base_weights(twin)
        for weight in weights.values():
            weight.requires_grad_()
        loss = loss_of(twin, tokens(seed=t))
        loss.backward()
        wanted.append(float(loss.detach()))
        for p, q in zip(theta(model).values(), theta(twin).values(), strict=True):
            p.grad = q.grad
        optimizer.step()
        for name, weight in weights.items():
            g = weight.grad.T if type(twin.get_submodule(name).base_layer).__name__ == "Conv1D" else weight.grad
            a, b = aux[name]
            for i, gradient in enumerate((b.T @ g, g @ a.T)):
                mean, square = moments[name][i]
                mean.mul_(0.9).add_(0.1 * gradient)
                square.mul_(0.999).add_(0.001 * gradient**2)
                debiased = mean / (1 - 0.9 ** (t + 1)), square / (1 - 0.999 ** (t + 1))
                aux[name][i] = aux[name][i] + RATE * debiased[0] / (debiased[1].sqrt() + 1e-8)
        c = math.sqrt(sum(float((b @ a).square().sum()) for a, b in aux.values()))
        if c > 0.5:
            clips += 1
            aux = {name: [f * math.sqrt(0.5 / c) for f in pair] for name, pair in aux.items()}
    assert 0 < clips < 8
    assert losses == pytest.approx(wanted, rel=1e-6)
    mine = factors(regularizer.state_dict())
    for name, (a, b) in aux.items():
        assert torch.allclose(mine[f"{name}.A"], a, atol=1e-6) and torch.allclose(mine[f"{name}.B"], b, atol=1e-6)
    metrics = regularizer.metrics()
    assert metrics["auxiliary_clips"] == clips and metrics["auxiliary_norm"] <= 0.5 + 1e-9


def test_product_norm_by_identity() -> None:
    a, b = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)), torch.ones(20, 3)
    dense = (b.double() @ a.double()).square().sum()
    assert float(squared_product_norm(a, b)) == pytest.approx(float(dense), rel=1e-6)


def test_it_ascends_inside_its_ball_while_the_first_adapter_stands_still() -> None:
    model, ids = with_lora(tiny_llama()), tokens()
    regularizer = attached(model, rho=1.0)
    losses = []
    for t in range(12):
        with regularizer.step(t):
            loss = loss_of(model, ids)
            loss.backward()
        losses.append(float(loss.detach()))
        regularizer.after_optimizer_step(RATE)
        model.zero_grad()
        assert regularizer.metrics()["auxiliary_norm"] <= 1.0 + 1e-6
    assert losses[0] == pytest.approx(float(loss_of(model, ids).detach()), rel=1e-6)  # B₂ = 0 at first
    assert losses[-1] > losses[0] + 0.1 and losses[6] > losses[1]
    assert regularizer.metrics()["auxiliary_clips"] > 0


def test_nobody_else_sees_the_second_adapter() -> None:
    model, ids = with_lora(tiny_llama(dtype=torch.bfloat16)), tokens()
    names, saved = [n for n, _ in model.named_parameters()], set(get_peft_model_state_dict(model))
    frozen, plain = frozen_checksums(model), loss_of(model, ids)
    regularizer = attached(model)
    for t in range(2):
        with regularizer.step(t):
            loss = loss_of(model, ids)
            assert forwards(model)
            assert [n for n, _ in model.named_parameters()] == names and set(get_peft_model_state_dict(model)) == saved
            loss.backward()
        model.zero_grad()
        regularizer.after_optimizer_step(RATE)
        assert forwards(model) == [] and torch.equal(loss_of(model, ids), plain)
    with pytest.raises(KeyboardInterrupt), regularizer.step(2):
        assert not torch.equal(loss_of(model, ids), plain)
        raise KeyboardInterrupt
    assert forwards(model) == []
    with model.disable_adapter():
        reference = loss_of(model, ids)
        with regularizer.step(2):
            assert torch.equal(loss_of(model, ids), reference)
    regularizer.detach()
    assert frozen_checksums(model) == frozen and torch.equal(loss_of(model, ids), plain)


@pytest.mark.parametrize("how", ["no update", "infinite", "no backward", "exception"])
def test_a_step_that_came_to_nothing_teaches_nothing(how: str) -> None:
    model, ids = with_lora(tiny_llama()), tokens()
    regularizer = attached(model)
    train(model, regularizer, 0, 2, adamw(model))
    before = regularizer.state_dict()
    if how == "exception":
        with pytest.raises(RuntimeError, match="mine"), regularizer.step(2):
            loss_of(model, ids).backward()
            raise RuntimeError("mine")
    else:
        with regularizer.step(2):
            loss = loss_of(model, ids)
            if how != "no backward":
                (loss * math.inf if how == "infinite" else loss).backward()
    if how == "no update":
        with regularizer.step(3):
            pass
    regularizer.after_optimizer_step(RATE)
    regularizer.after_optimizer_step(RATE)  # a second word about the same step
    after = regularizer.state_dict()
    assert all(torch.equal(before[n], after[n]) for n in before if n not in ("bi-lora.step", "bi-lora.skips"))
    assert regularizer.metrics()["auxiliary_skips"] == (how == "infinite")


def test_a_loss_scaler_changes_nothing() -> None:
    states = []
    for scale in (1.0, 2.0**12):
        model = with_lora(tiny_llama())
        regularizer = attached(model)
        for t in range(3):
            with regularizer.step(t, loss_scale=scale):
                (loss_of(model, tokens(seed=t)) * scale).backward()
            model.zero_grad()
            regularizer.after_optimizer_step(RATE)
        states.append(factors(regularizer.state_dict()))
    assert all(torch.allclose(states[0][n], states[1][n], rtol=0, atol=1e-6) for n in states[0])


@pytest.mark.parametrize("stop", [1, 5])
def test_resumed_equals_continuous_to_the_bit(stop: int) -> None:
    def run(*spans: tuple[int, int]) -> tuple[list[float], dict[str, Tensor], dict[str, float], dict[str, bytes]]:
        model = with_lora(tiny_llama())
        optimizer, losses, state = adamw(model), [], None
        for first, last in spans:
            regularizer = attached(model)
            if state is not None:
                regularizer.load_state_dict(state)
            losses += train(model, regularizer, first, last, optimizer)
            state, metrics = regularizer.state_dict(), regularizer.metrics()
            regularizer.detach()
        assert state is not None
        return losses, state, metrics, bits(model)

    losses, state, metrics, values = run((0, 8))
    resumed_losses, resumed, resumed_metrics, resumed_values = run((0, stop), (stop, 8))
    assert losses == resumed_losses and metrics == resumed_metrics and values == resumed_values
    assert set(state) == set(resumed) and all(torch.equal(value, resumed[name]) for name, value in state.items())


def test_a_state_before_the_first_update_resumes_too() -> None:
    model = with_lora(tiny_llama())
    regularizer = attached(model)
    state = regularizer.state_dict()
    regularizer.load_state_dict(state)
    train(model, regularizer, 0, 1, adamw(model))
    assert int(regularizer.state_dict()["bi-lora.updates"]) == 1
    assert regularizer.metrics()["auxiliary_norm"] > 0


def test_state_of_something_else_is_refused() -> None:
    model = with_lora(tiny_llama())
    regularizer = attached(model)
    good = regularizer.state_dict()
    with pytest.raises(RegularizerError, match="does not belong"):
        regularizer.load_state_dict({})
    with pytest.raises(RegularizerError, match=r"train\.seed"):
        regularizer.load_state_dict(good | {"bi-lora.seed": torch.tensor(4)})
    regularizer.detach()
    with pytest.raises(RegularizerError, match=r"shape.*regularizer\.rank"):
        attached(model, rank=2).load_state_dict(good)
    with pytest.raises(RegularizerError, match="attach before"):
        build(BiLora()).load_state_dict(good)


def test_a_draw_depends_on_seed_and_name_only() -> None:
    whole = factors(attached(with_lora(tiny_llama())).state_dict())
    part = factors(attached(with_lora(tiny_llama(), target_modules=["v_proj"])).state_dict())
    other = factors(attached(with_lora(tiny_llama()), seed=4).state_dict())
    assert part and all(torch.equal(value, whole[name]) for name, value in part.items())
    drawn = {name: value for name, value in whole.items() if name.endswith(".A")}
    assert not any(torch.equal(value, other[name]) for name, value in drawn.items())
    assert len({value[0, :8].numpy().tobytes() for value in drawn.values()}) == len(drawn)
    bound = 1 / math.sqrt(32)
    q = drawn["base_model.model.model.layers.0.self_attn.q_proj.A"]
    assert 0.8 * bound < float(q.abs().max()) <= bound and abs(float(q.mean())) < 0.2 * bound


def test_misuse_is_refused() -> None:
    model = with_lora(tiny_llama())
    for axis in ("tp", "pp"):
        with pytest.raises(RegularizerError, match=rf"mesh\.{axis}"):
            build(BiLora()).attach(model, seed=0, total_steps=1, placement=Split(axis))
    regularizer = attached(model)
    with pytest.raises(RegularizerError, match="attached already"):
        regularizer.attach(model, seed=0, total_steps=1)
    with pytest.raises(RegularizerError, match="another regularizer"):
        build(GGPO()).attach(model, seed=0, total_steps=1)
    with pytest.raises(RegularizerError, match=r"step\(1\)"), regularizer.step(0), regularizer.step(1):
        pass
    regularizer.detach()
    with pytest.raises(RegularizerError, match="not attached"), regularizer.step(0):
        pass
    model.get_submodule("base_model.model.model.layers.1.mlp.down_proj").merge()
    with pytest.raises(RegularizerError, match=r"down_proj.*merged"), attached(model).step(0):
        pass
    assert forwards(model) == []
    for settings in ({"rho": 0.0}, {"rank": 0}, {"lr_scale": -1.0}):
        with pytest.raises(RegularizerError, match=rf"regularizer\.{next(iter(settings))}"):
            build(BiLora(**settings))


def test_under_autocast_the_factors_stay_float32_and_gradients_reach_the_adapter() -> None:
    model = with_lora(tiny_llama(dtype=torch.bfloat16))
    regularizer = attached(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = train(model, regularizer, 0, 3, adamw(model))
    assert all(math.isfinite(loss) for loss in losses)
    assert all(value.dtype == torch.float32 for value in factors(regularizer.state_dict()).values())
    assert regularizer.metrics()["auxiliary_norm"] > 0 and not gradients(model)
