"""LoRA-MGPO (both forms) and Momentum-SAM against naive references; their states, refusals, and what they leave."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatshift.regularizers import GGPO, MGPO, MSAM, Regularizer, RegularizerError, build
from flatshift.regularizers.methods.momentum import LayerMomentumRegularizer, MomentumRegularizer
from tests.support.regularizer_models import (
    clear,
    densely_perturbed,
    frozen_checksums,
    gradients,
    loss_of,
    perturbations,
    tiny_gpt2,
    tiny_llama,
    tokens,
    with_lora,
)
from tests.support.regularizer_stage import run_stage, same_course

CONFIGS: dict[str, MGPO | MSAM] = {
    "mgpo": MGPO(rho=0.3),
    "mgpo-down": MGPO(rho=0.3, sign=-1, momentum=0.8, ema=0.7),
    "mgpo-code": MGPO(rho=0.3, form="code"),
    "msam": MSAM(rho=0.3),
    "msam-up": MSAM(rho=0.3, sign=1, momentum=0.5),
}
THREE = ("mgpo", "mgpo-code", "msam")


def attached(config: MGPO | MSAM, model: Any, *, seed: int = 3) -> Regularizer:
    return build(config).attach(model, seed=seed, total_steps=20)


def trained(model: Any) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def micros(t: int, count: int = 2) -> list[Tensor]:
    return [tokens(seed=10 * t + index) for index in range(count)]


def exact_loss(model: Any, ids: Tensor) -> Tensor:
    """Mean next-token loss in the model's own dtype; transformers' own is in float32."""
    return nn.functional.cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def exact_model() -> Any:
    """Without a float32 island, as Llama's normalisation is."""
    return with_lora(tiny_gpt2(dtype=torch.float64), fan_in_fan_out=True)


def train(model: Any, regularizer: Regularizer, first: int, last: int, optimizer: Any = None) -> list[Tensor]:
    """Steps first..last−1 of AdamW, two micro-batches each; the losses."""
    optimizer = optimizer or torch.optim.AdamW(trained(model).values(), lr=1e-2)
    losses = []
    for t in range(first, last):
        total = torch.zeros((), dtype=next(model.parameters()).dtype)
        with regularizer.step(t):
            for index, ids in enumerate(micros(t)):
                regularizer.on_micro_batch(index)
                loss = exact_loss(model, ids) / 2
                loss.backward()
                total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        regularizer.after_optimizer_step(1e-2)
        losses.append(total)
    return losses


# --- the methods are what their papers say ----------------------------------------------------------------------------


def naive(config: MGPO | MSAM, model: Any, steps: int) -> tuple[list[float], list[float]]:
    """Losses and |ε| of the method written down as in the paper: one long vector, new parameters in every step."""
    parameters = list(trained(model).values())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    vector = torch.nn.utils.parameters_to_vector
    sign = config.sign or 1
    m, average = torch.zeros_like(vector(parameters)), None
    losses, lengths = [], []
    for t in range(steps):
        theta = vector(parameters).detach().clone()
        epsilon = torch.zeros_like(theta)
        if t > 0:
            epsilon = sign * config.rho * m / m.norm()
            if isinstance(config, MGPO):
                epsilon = epsilon / average
        torch.nn.utils.vector_to_parameters(theta + epsilon, parameters)
        loss = sum(exact_loss(model, ids) / 2 for ids in micros(t))
        clear(model)
        loss.backward()
        g = vector([p.grad for p in parameters]).clone()
        torch.nn.utils.vector_to_parameters(theta, parameters)
        average = float(g.norm()) if average is None else average
        if isinstance(config, MGPO):
            m = config.momentum * m + g
            average = config.ema * average + (1 - config.ema) * float(g.norm())
        else:
            m = config.momentum * m + (1 - config.momentum) * g
        optimizer.step()
        losses.append(float(loss.detach()))
        lengths.append(float(epsilon.norm()))
    return losses, lengths


@pytest.mark.parametrize("name", ["mgpo", "mgpo-down", "msam", "msam-up"])
def test_ten_steps_with_accumulation_equal_the_paper(name: str) -> None:
    config = CONFIGS[name]
    model = exact_model()
    wanted, lengths = naive(config, copy.deepcopy(model), 10)
    regularizer = attached(config, model)
    optimizer = torch.optim.AdamW(trained(model).values(), lr=1e-2)
    losses, found = [], []
    for t in range(10):
        losses += train(model, regularizer, t, t + 1, optimizer)
        found.append(regularizer.metrics()["perturbation_norm"])
    assert [float(loss) for loss in losses] == pytest.approx(wanted, rel=1e-10)
    assert found == pytest.approx(lengths, rel=1e-10) and found[0] == 0 and min(found[1:]) > 0.01
    # and it matters: neither plain training nor the other sign goes the same way
    flipped = naive(replace(config, sign=-(config.sign or 1)), exact_model(), 10)[0]
    plain = naive(replace(config, rho=0.0), exact_model(), 10)[0]
    assert max(abs(a - b) for a, b in zip(wanted, flipped, strict=True)) > 1e-3
    assert max(abs(a - b) for a, b in zip(wanted, plain, strict=True)) > 1e-3


def test_signs_by_default() -> None:
    """Up for the paper's text, down for its code, down for Momentum-SAM: first-order change of the loss at step 2."""
    for config, sign in ((MGPO(rho=1e-4), 1), (MGPO(rho=1e-4, form="code"), -1), (MSAM(rho=1e-4), -1)):
        model, ids = with_lora(tiny_llama(dtype=torch.float64)), tokens()
        regularizer = attached(config, model)
        with regularizer.step(0):
            plain = loss_of(model, ids)
            plain.backward()
        with regularizer.step(1):
            moved = loss_of(model, ids)
        assert math.copysign(1, float((moved - plain).detach())) == sign, config


class Authors:
    """What lora_mgpo/trainer.py computes for each layer, dense; ḡ once per optimizer step."""

    def __init__(self, config: MGPO, optimizer: torch.optim.Optimizer) -> None:
        self.config, self.optimizer, self.average = config, optimizer, dict[str, float]()

    def layers(self, model: Any) -> dict[str, tuple[Tensor, Tensor, float]]:
        found = {n: m for n, m in model.named_modules() if hasattr(m, "lora_A")}
        return {
            n: (m.lora_A["default"].weight, m.lora_B["default"].weight, m.scaling["default"]) for n, m in found.items()
        }

    def noise(self, model: Any) -> dict[str, Tensor]:
        found = {}
        for name, (a, b, s) in self.layers(model).items():
            if a not in self.optimizer.state:
                found[name] = torch.zeros(b.shape[0], a.shape[1], dtype=a.dtype)
                continue
            ma, mb = (self.optimizer.state[p]["exp_avg"] for p in (a, b))
            direction = s * (mb @ a + b @ ma).detach()
            scale = min(1 / (self.average[name] + 1e-12), self.config.clamp)
            found[name] = (self.config.sign or -1) * self.config.rho * direction / (direction.norm() + 1e-12) * scale
        return found

    def learn(self, model: Any, grads: dict[str, Tensor]) -> None:
        for name, (a, b, s) in self.layers(model).items():
            ga, gb = (grads[f"{name}.lora_{side}.default.weight"] for side in "AB")
            norm = float((s * (gb @ a + b @ ga)).norm())
            before = self.average.get(name, norm)
            self.average[name] = self.config.ema * before + (1 - self.config.ema) * norm


CODE: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (tiny_llama, {}),
    "conv1d": (tiny_gpt2, {"fan_in_fan_out": True}),
    "rslora, fresh": (tiny_llama, {"use_rslora": True, "trained": False}),
}


@pytest.mark.parametrize("clamp", [10.0, 0.5])
@pytest.mark.parametrize("case", CODE)
def test_the_code_form_equals_the_authors_dense_one(case: str, clamp: float) -> None:
    """ε of every layer, losses and gradients of five steps in float64; the momentum is the optimizer's own."""
    make, settings = CODE[case]
    # Llama's normalisation is in float32, so that equal sums in another order differ there.
    tolerance = 1e-10 if make is tiny_gpt2 else 1e-6
    config = MGPO(rho=0.3, form="code", clamp=clamp)
    model = with_lora(make(dtype=torch.float64), **settings)
    optimizer = torch.optim.AdamW(trained(model).values(), lr=1e-2, betas=(config.momentum, 0.999))
    authors, regularizer = Authors(config, optimizer), attached(config, model)
    assert isinstance(regularizer, LayerMomentumRegularizer)
    frozen, scales = frozen_checksums(model), set()
    for t in range(5):
        epsilon, ids = authors.noise(model), tokens(seed=t)
        twin = densely_perturbed(model, epsilon)
        clear(twin)
        expected = exact_loss(twin, ids)
        expected.backward()
        with regularizer.step(t):
            mine = perturbations(regularizer)
            loss = exact_loss(model, ids)
            loss.backward()
        if t == 0:
            assert not mine and not any(bool(e.any()) for e in epsilon.values())
        else:
            assert mine.keys() == epsilon.keys()
            assert all(torch.allclose(mine[n], e, rtol=1e-9, atol=1e-13) for n, e in epsilon.items())
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=tolerance)
        grads, wanted = gradients(model), gradients(twin)
        assert all(float((grads[n] - g).norm()) <= 10 * tolerance * float(g.norm()) for n, g in wanted.items())
        total = sum(float(e.square().sum()) for e in epsilon.values()) ** 0.5
        assert regularizer.metrics()["perturbation_norm"] == pytest.approx(total, rel=1e-9)
        authors.learn(model, grads)
        average = sum(authors.average.values()) / len(authors.average)
        assert regularizer.metrics()["gradient_norm_average"] == pytest.approx(average, rel=1e-9)
        scales |= {round(float(e.norm()) / config.rho, 6) for e in epsilon.values()}
        optimizer.step()
        optimizer.zero_grad()
    assert frozen_checksums(model) == frozen
    assert min(scales) == 0 and max(scales) <= clamp
    assert max(scales) == 0.5 if clamp == 0.5 else len(scales) > 10


def test_the_code_form_knows_block_diagonal_factors() -> None:
    """BD-LoRA stores the blocks alone: ε is that of the factors with their zeros."""
    from peft.tuners.lora.config import BdLoraConfig

    blocks = BdLoraConfig(target_modules_bd_a=["o_proj"], target_modules_bd_b=["q_proj"], nblocks=2)
    model = with_lora(tiny_llama(), use_bdlora=blocks, target_modules=["q_proj", "o_proj"])
    regularizer = attached(MGPO(rho=0.3, form="code"), model)
    for t in range(2):
        with regularizer.step(t):
            epsilons = perturbations(regularizer) if t else {}
            loss_of(model, tokens(seed=t)).backward()
    assert len(epsilons) == 4 and all(float(e.norm()) > 0 for e in epsilons.values())
    for name, e in epsilons.items():
        assert e.shape == (model.get_submodule(name).out_features, model.get_submodule(name).in_features)


@pytest.mark.parametrize("config", [MGPO(), MSAM()])
def test_narrow_factors_are_refused(config: Any) -> None:
    with pytest.raises(RegularizerError, match="bfloat16, which rounds a small step away; keep the adapter in float32"):
        attached(config, with_lora(tiny_llama()).bfloat16())


def test_the_code_form_leaves_embeddings_alone_and_needs_a_linear_layer(caplog: pytest.LogCaptureFixture) -> None:
    model = with_lora(tiny_llama(), target_modules=["embed_tokens", "q_proj"])
    regularizer = attached(CONFIGS["mgpo-code"], model)
    assert "embed_tokens" in caplog.text
    train(model, regularizer, 0, 2)
    with regularizer.step(2):
        assert isinstance(regularizer, LayerMomentumRegularizer)
        assert len(perturbations(regularizer)) == 2
    only = with_lora(tiny_llama(), target_modules=["embed_tokens"])
    with pytest.raises(RegularizerError, match=r"embed_tokens.*form: code"):
        attached(CONFIGS["mgpo-code"], only)
    text = attached(CONFIGS["mgpo"], only)
    train(only, text, 0, 2)
    assert text.metrics()["perturbation_norm"] > 0


# --- what a step leaves behind ----------------------------------------------------------------------------------------


def test_the_first_step_and_zero_rho_are_plain_to_the_bit() -> None:
    plain = with_lora(tiny_llama())
    reference = train(plain, build(replace(CONFIGS["mgpo"], rho=0.0)).attach(plain, seed=0, total_steps=4), 0, 3)
    for name in THREE:
        model = with_lora(tiny_llama())
        assert torch.equal(train(model, attached(CONFIGS[name], model), 0, 3)[0], reference[0]), name
        model = with_lora(tiny_llama())
        still = attached(replace(CONFIGS[name], rho=0.0), model)
        assert train(model, still, 0, 3) == reference, name
        assert still.metrics()["perturbation_norm"] == 0 and still.metrics()["momentum_norm"] > 0


@pytest.mark.parametrize("name", THREE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapter_and_backbone_come_back_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    model = with_lora(tiny_llama(dtype=dtype))
    optimizer = torch.optim.SGD(trained(model).values(), lr=1e-2)
    regularizer = attached(CONFIGS[name], model)
    frozen = frozen_checksums(model)
    train(model, regularizer, 0, 2, optimizer)
    kept = {n: p.detach().clone() for n, p in trained(model).items()}
    plain = loss_of(model, tokens())

    def untouched() -> bool:
        return (
            frozen_checksums(model) == frozen
            and all(torch.equal(p, kept[n]) for n, p in trained(model).items())
            and torch.equal(loss_of(model, tokens()), plain)
        )

    before = regularizer.state_dict()
    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error), regularizer.step(2):
            loss_of(model, tokens()).backward()
            assert not torch.equal(loss_of(model, tokens()), plain)
            raise error
        assert untouched()
    after = regularizer.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before if not key.endswith(".step"))
    clear(model)
    with regularizer.step(2):
        loss_of(model, tokens()).backward()
    assert untouched() and not torch.equal(
        before[f"{regularizer.config.kind}.updates"], regularizer.state_dict()[f"{regularizer.config.kind}.updates"]
    )


@pytest.mark.parametrize("name", THREE)
def test_attach_and_detach_leave_no_trace(name: str) -> None:
    model = with_lora(tiny_llama())
    traces = {n: sorted(vars(module)) for n, module in model.named_modules()}
    regularizer = attached(CONFIGS[name], model)
    train(model, regularizer, 0, 3, torch.optim.SGD(trained(model).values(), lr=0.0))
    regularizer.detach()
    regularizer.detach()
    assert {n: sorted(vars(module)) for n, module in model.named_modules()} == traces
    assert torch.equal(loss_of(model, tokens()), loss_of(with_lora(tiny_llama()), tokens()))
    attached(CONFIGS[name], model)


# --- what it learns from ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", THREE)
def test_a_loss_scale_changes_nothing_and_a_broken_step_teaches_nothing(name: str) -> None:
    """With GradScaler, growth and an overflow in step 3 included: the very bits of training without one."""
    courses = []
    for scaling in (False, True):
        model = with_lora(tiny_llama())
        optimizer = torch.optim.SGD(trained(model).values(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", enabled=scaling, init_scale=2.0**16, growth_interval=1)
        regularizer = attached(CONFIGS[name], model)
        losses = []
        for t in range(6):
            with regularizer.step(t, loss_scale=scaler.get_scale()):
                loss = loss_of(model, tokens(seed=t))
                scaler.scale(loss).backward()
                if t == 3:
                    next(iter(trained(model).values())).grad.view(-1)[0] = float("inf")
            before = regularizer.state_dict()
            if scaling or t != 3:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if t == 3:
                assert regularizer.metrics()["momentum_skipped"] == 1
        courses.append((losses, before, trained(model)))
        assert regularizer.metrics()["momentum_updates"] == 5
    (one, state, parameters), (other, other_state, others) = courses
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert all(torch.equal(value, other_state[key]) for key, value in state.items())
    assert all(torch.equal(p, others[n]) for n, p in parameters.items())
    assert all(value.isfinite().all() for value in state.values())


@pytest.mark.parametrize("name", THREE)
def test_the_gradient_is_read_before_clipping_and_a_step_without_one_is_passed_over(name: str) -> None:
    states = []
    for clip in (False, True):
        model = with_lora(tiny_llama())
        regularizer = attached(CONFIGS[name], model)
        with regularizer.step(0):
            loss_of(model, tokens()).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        states.append(regularizer.state_dict())
        clear(model)
        with regularizer.step(1), torch.no_grad():
            loss_of(model, tokens())
        metrics, after = regularizer.metrics(), regularizer.state_dict()
        assert metrics["momentum_updates"] == 1 and metrics["momentum_skipped"] == 0
        assert all(torch.equal(states[-1][key], after[key]) for key in after if not key.endswith(".step"))
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


# --- states -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", THREE)
@pytest.mark.parametrize("stop", [1, 4])
def test_resumed_equals_continuous_to_the_bit(name: str, stop: int) -> None:
    def run(*spans: tuple[int, int]) -> tuple[Tensor, dict[str, Tensor], dict[str, float]]:
        model = with_lora(tiny_llama())
        optimizer = torch.optim.AdamW(trained(model).values(), lr=1e-2)
        losses, state, metrics = [], None, {}
        for first, last in spans:
            regularizer = attached(CONFIGS[name], model)
            if state is not None:
                regularizer.load_state_dict(state)
            losses += train(model, regularizer, first, last, optimizer)
            state, metrics = regularizer.state_dict(), regularizer.metrics()
            regularizer.detach()
        assert state is not None
        return torch.stack(losses), state, metrics

    losses, state, metrics = run((0, 6))
    resumed, resumed_state, resumed_metrics = run((0, stop), (stop, 6))
    assert torch.equal(losses, resumed) and metrics == resumed_metrics
    assert state.keys() == resumed_state.keys()
    assert all(torch.equal(state[key], resumed_state[key]) for key in state)


@pytest.mark.parametrize("name", THREE)
def test_states_of_anything_else_are_refused(name: str) -> None:
    model = with_lora(tiny_llama())
    others = {
        n: build(c).attach(with_lora(tiny_llama()), seed=3, total_steps=4) for n, c in CONFIGS.items() if n in THREE
    }
    others["ggpo"] = build(GGPO()).attach(with_lora(tiny_llama()), seed=3, total_steps=4)
    regularizer = attached(CONFIGS[name], model)
    good = regularizer.state_dict()
    for other, its in others.items():
        if other != name:
            with pytest.raises(RegularizerError, match="does not belong"):
                regularizer.load_state_dict(its.state_dict())
    with pytest.raises(RegularizerError, match="does not belong"):
        regularizer.load_state_dict({})
    moment = next(key for key in good if ".momentum." in key)
    with pytest.raises(RegularizerError, match="shape"):
        regularizer.load_state_dict(good | {moment: good[moment][:-1]})
    with pytest.raises(RegularizerError, match=r"train\.seed"):
        attached(CONFIGS[name], with_lora(tiny_llama()), seed=4).load_state_dict(good)
    regularizer.load_state_dict(good)
    assert all(isinstance(value, Tensor) for value in good.values())


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (MGPO(), "rho", -0.1),
        (MGPO(), "rho", float("nan")),
        (MGPO(), "momentum", 1.0),
        (MGPO(), "ema", -0.1),
        (MGPO(), "form", "prose"),
        (MGPO(), "sign", 0),
        (MGPO(form="code"), "sign", 2),
        (MGPO(form="code"), "clamp", 0.0),
        (MGPO(), "clamp", 5.0),
        (MSAM(), "rho", float("inf")),
        (MSAM(), "momentum", -0.5),
        (MSAM(), "sign", 3),
    ],
)
def test_a_setting_without_a_meaning_is_refused_by_name(config: Any, key: str, value: object) -> None:
    with pytest.raises(RegularizerError, match=rf"regularizer\.{key}: .*is not"):
        build(replace(config, **{key: value}))


@pytest.mark.parametrize("name", THREE)
def test_misuse_is_refused_and_changes_nothing(name: str) -> None:
    config = CONFIGS[name]
    with pytest.raises(RegularizerError, match="trains no LoRA factor"):
        attached(config, tiny_llama())
    fresh = build(config)
    assert isinstance(fresh, MomentumRegularizer) and fresh.metrics() == {}
    with pytest.raises(RegularizerError, match="not attached"), fresh.step(0):
        pass
    with pytest.raises(RegularizerError, match="not attached"):
        fresh.load_state_dict({})
    model = with_lora(tiny_llama())
    regularizer = attached(config, model)
    with pytest.raises(RegularizerError, match="attached already"):
        regularizer.attach(model, seed=0, total_steps=1)
    with pytest.raises(RegularizerError, match="another regularizer"):
        attached(MSAM(), model)
    with pytest.raises(RegularizerError, match="another regularizer"):
        build(GGPO()).attach(model, seed=0, total_steps=1)
    with pytest.raises(RegularizerError, match=r"step\(1\)"), regularizer.step(0), regularizer.step(1):
        pass
    train(model, regularizer, 0, 2)


# --- through the public loop ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", THREE)
def test_the_public_loop_trains_logs_and_resumes(name: str, tmp_path: Any) -> None:
    lines, adapter = run_stage(CONFIGS[name], tmp_path)
    assert [line["perturbation_norm"] > 0 for line in lines] == [False] + [True] * (len(lines) - 1)
    assert lines[-1]["momentum_updates"] == len(lines) and lines[-1]["loss"] < lines[0]["loss"]
    assert {"momentum_norm", "gradient_norm"} <= lines[0].keys()
    assert lines[0]["gradient_norm"] == pytest.approx(lines[0]["grad_norm"], rel=1e-5)
    assert same_course(run_stage(CONFIGS[name], tmp_path, stop_at=3), (lines, adapter))
