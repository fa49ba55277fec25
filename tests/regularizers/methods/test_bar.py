"""BAR against its algorithm written down, its schedule, what makes it pass over a step, and its refusals."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatshift.regularizers import BAR, MGPO, RegularizerError, build
from flatshift.regularizers.methods.bar import BARRegularizer, factor_pairs, scheduled_alpha
from tests.support.regularizer_models import clear, frozen_checksums, loss_of, tiny_gpt2, tiny_llama, tokens, with_lora
from tests.support.regularizer_stage import run_stage, same_course

NBAR, OBAR = BAR(alpha=2.0), BAR(form="obar", alpha=2.0, schedule="cosine")
RATE = 1e-2


def attached(config: BAR, model: Any, *, steps: int = 10, seed: int = 3) -> BARRegularizer:
    regularizer = build(config).attach(model, seed=seed, total_steps=steps)
    assert isinstance(regularizer, BARRegularizer)
    return regularizer


def trained(model: Any) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained(model).values(), lr=RATE, weight_decay=0.0)


def exact_loss(model: Any, ids: Tensor) -> Tensor:
    """Mean next-token loss in the model's own dtype; transformers' own is in float32."""
    return nn.functional.cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def exact_model(**settings: Any) -> Any:
    """Without a float32 island, as Llama's normalisation is."""
    return with_lora(tiny_gpt2(dtype=torch.float64), fan_in_fan_out=True, **settings)


def train(model: Any, regularizer: BARRegularizer, first: int, last: int, optimizer: Any) -> list[Tensor]:
    losses = []
    for t in range(first, last):
        total = torch.zeros((), dtype=torch.float64)
        with regularizer.step(t):
            for index in range(2):
                loss = exact_loss(model, tokens(seed=10 * t + index)) / 2
                loss.backward()
                total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        regularizer.after_optimizer_step(RATE)
        losses.append(total)
    return losses


def naive(config: BAR, model: Any, steps: int) -> list[float]:
    """The published order: gradients, rescaling, the optimizer's update."""
    optimizer, losses = optimizer_of(model), []
    for t in range(steps):
        loss = sum(exact_loss(model, tokens(seed=10 * t + index)) / 2 for index in range(2))
        loss.backward()
        reach = (
            RATE
            * config.alpha
            * (1 - t / steps if config.schedule == "linear" else (1 + math.cos(math.pi * t / steps)) / 2)
        )
        for module in model.modules():
            if not hasattr(module, "lora_A"):
                continue
            a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
            with torch.no_grad():
                if config.form == "obar":
                    (a if a.norm() >= b.norm() else b).mul_(1 - reach)
                else:
                    grows, shrinks = (a, b) if a.grad.norm() >= b.grad.norm() else (b, a)
                    grows.mul_(1 + reach), shrinks.mul_(1 - reach)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("config", [NBAR, OBAR], ids=["nbar", "obar"])
@pytest.mark.parametrize("fresh", [False, True], ids=["trained", "fresh"])
def test_ten_steps_with_accumulation_equal_the_algorithm(config: BAR, fresh: bool) -> None:
    model = exact_model(trained=not fresh)
    twin, still = copy.deepcopy(model), copy.deepcopy(model)
    frozen = frozen_checksums(model)
    losses = train(model, attached(config, model), 0, 10, optimizer_of(model))
    assert [float(loss) for loss in losses] == pytest.approx(naive(config, twin, 10), rel=1e-11)
    others = trained(twin)
    assert all(torch.allclose(p, others[n], rtol=1e-9, atol=1e-14) for n, p in trained(model).items())
    naive(replace(config, alpha=0.0), still, 10)
    moved = trained(still)
    assert any(not torch.allclose(p, moved[n], rtol=1e-3) for n, p in trained(model).items())
    assert frozen_checksums(model) == frozen


def test_the_larger_gradient_decides_for_nbar_and_the_larger_factor_for_obar() -> None:
    """A fresh adapter has B = 0, hence g_A = 0 and |A| > |B|: both forms shrink A, and B stays zero."""
    for config in (NBAR, OBAR):
        model = with_lora(tiny_llama(), trained=False)
        regularizer = attached(config, model)
        before = {n: p.detach().clone() for n, p in trained(model).items()}
        with regularizer.step(0):
            loss_of(model, tokens()).backward()
        regularizer.after_optimizer_step(0.1)
        for name, p in trained(model).items():
            assert torch.allclose(p, before[name] * (0.8 if "lora_A" in name else 0.0), rtol=1e-6)
        metrics = regularizer.metrics()
        assert metrics["balance"] == 1 and metrics["alpha"] == 2.0
        assert metrics["grown_a"] == 0
        kept = {n: p.detach().clone() for n, p in trained(model).items()}
        regularizer.after_optimizer_step(0.1)  # not a second time for the same step
        assert all(torch.equal(p, kept[n]) for n, p in trained(model).items())


def test_obar_balances() -> None:
    model = with_lora(tiny_llama())
    for name, p in trained(model).items():
        if "lora_A" in name:
            p.data *= 3
    regularizer = attached(replace(OBAR, alpha=0.5, schedule="constant"), model)
    seen = [abs(regularizer.metrics()["balance"])]
    for t in range(20):
        with regularizer.step(t):
            pass
        regularizer.after_optimizer_step(0.1)
        seen.append(abs(regularizer.metrics()["balance"]))
    assert seen[0] > 0.5 and seen[-1] < 0.2 * seen[0]


@pytest.mark.parametrize(("schedule", "middle"), [("constant", 0.3), ("linear", 0.15), ("cosine", 0.15)])
def test_alpha_falls_to_zero_over_the_steps(schedule: Any, middle: float) -> None:
    config = BAR(alpha=0.3, schedule=schedule)
    assert scheduled_alpha(config, 0, 8) == 0.3 and scheduled_alpha(config, 4, 8) == pytest.approx(middle)
    values = [scheduled_alpha(config, t, 8) for t in range(11)]
    assert values == sorted(values, reverse=True) and values[9] == (0.3 if schedule == "constant" else 0)


def test_zero_alpha_is_plain_to_the_bit() -> None:
    model, other = with_lora(tiny_llama()), with_lora(tiny_llama())
    losses = train(model, attached(replace(NBAR, alpha=0.0), model), 0, 4, optimizer_of(model))
    assert [float(loss) for loss in losses] == naive_plain(other, 4)


def naive_plain(model: Any, steps: int) -> list[float]:
    optimizer, losses = optimizer_of(model), []
    for t in range(steps):
        total = torch.zeros((), dtype=torch.float64)
        for index in range(2):
            loss = exact_loss(model, tokens(seed=10 * t + index)) / 2
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
    return losses


def test_a_loss_scale_or_clipping_changes_nothing_and_a_broken_gradient_rescales_nothing() -> None:
    ends = []
    for scale, clip in ((1.0, False), (2.0**16, False), (1.0, True)):
        model = with_lora(tiny_llama())
        regularizer = attached(NBAR, model)
        with regularizer.step(0, loss_scale=scale):
            (loss_of(model, tokens()) * scale).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        regularizer.after_optimizer_step(RATE)
        ends.append({n: p.detach().clone() for n, p in trained(model).items()})
        clear(model)
        with regularizer.step(1):
            loss_of(model, tokens()).backward()
            next(iter(trained(model).values())).grad.view(-1)[0] = float("nan")
        regularizer.after_optimizer_step(RATE)
        assert all(torch.equal(p, ends[-1][n]) for n, p in trained(model).items())
        assert regularizer.metrics()["grown_a"] == 0
    before = trained(with_lora(tiny_llama()))
    assert not any(torch.equal(end, before[n]) for n, end in ends[0].items())
    assert all(torch.equal(end[n], ends[0][n]) for end in ends for n in end)


def test_an_exception_in_a_step_rescales_nothing() -> None:
    model = with_lora(tiny_llama())
    regularizer = attached(NBAR, model)
    before = {n: p.detach().clone() for n, p in trained(model).items()}
    with pytest.raises(KeyboardInterrupt), regularizer.step(0):
        loss_of(model, tokens()).backward()
        raise KeyboardInterrupt
    regularizer.after_optimizer_step(RATE)
    assert all(torch.equal(p, before[n]) for n, p in trained(model).items())


def test_the_two_factors_of_a_layer_are_found(caplog: pytest.LogCaptureFixture) -> None:
    model = with_lora(tiny_llama(), target_modules=["embed_tokens", "q_proj"])
    pairs = factor_pairs(name for name, _ in model.named_parameters())
    assert len(pairs) == 3 and all(a.replace("_A", "_B") == b for a, b in pairs)
    for name, p in model.named_parameters():  # as LoRA-FA trains
        if "layers.0" in name and "lora_A" in name:
            p.requires_grad_(False)
    regularizer = attached(NBAR, model)
    assert len(regularizer._pairs) == 2 and "layers.0" in caplog.text
    regularizer.detach()
    for name, p in model.named_parameters():
        if "_A." in name:
            p.requires_grad_(False)
    with pytest.raises(RegularizerError, match="trains both"):
        attached(NBAR, model)


def test_misuse_and_foreign_states_are_refused() -> None:
    for key, value in (("alpha", -1.0), ("alpha", float("nan")), ("form", "bar"), ("schedule", "step")):
        with pytest.raises(RegularizerError, match=rf"regularizer\.{key}: .*is not"):
            build(replace(NBAR, **{key: value}))
    with pytest.raises(RegularizerError, match=r"regularizer\.schedule"):
        attached(NBAR, with_lora(tiny_llama()), steps=0)
    with pytest.raises(RegularizerError, match=r"bfloat16.*float32"):
        attached(NBAR, with_lora(tiny_llama()).bfloat16())
    with pytest.raises(RegularizerError, match=r"trains no LoRA factor.*is_trainable=True"):
        attached(NBAR, tiny_llama())
    fresh = build(NBAR)
    assert fresh.metrics() == {}
    fresh.after_optimizer_step(1.0)
    for use in (lambda: fresh.step(0).__enter__(), lambda: fresh.load_state_dict({})):
        with pytest.raises(RegularizerError, match="not attached"):
            use()
    model = with_lora(tiny_llama())
    traces = {n: sorted(vars(module)) for n, module in model.named_modules()}
    regularizer = attached(NBAR, model)
    with pytest.raises(RegularizerError, match="attached already"):
        regularizer.attach(model, seed=0, total_steps=1)
    with pytest.raises(RegularizerError, match="another regularizer"):
        attached(OBAR, model)
    with pytest.raises(RegularizerError, match=r"step\(1\)"), regularizer.step(0), regularizer.step(1):
        pass
    good = regularizer.state_dict()
    for other in ({}, build(MGPO()).attach(with_lora(tiny_llama()), seed=3, total_steps=1).state_dict()):
        with pytest.raises(RegularizerError, match="does not belong"):
            regularizer.load_state_dict(other)
    with pytest.raises(RegularizerError, match=r"train\.seed"):
        regularizer.load_state_dict(good | {"bar.seed": torch.tensor(9)})
    regularizer.load_state_dict(good)
    regularizer.detach()
    regularizer.detach()
    assert {n: sorted(vars(module)) for n, module in model.named_modules()} == traces


@pytest.mark.parametrize("config", [NBAR, OBAR], ids=["nbar", "obar"])
def test_the_public_loop_trains_logs_and_resumes(config: BAR, tmp_path: Any) -> None:
    lines, adapter = run_stage(config, tmp_path)
    assert [line["alpha"] for line in lines] == sorted((line["alpha"] for line in lines), reverse=True)
    assert lines[0]["balance"] > 0.5 and lines[-1]["loss"] < lines[0]["loss"]
    assert same_course(run_stage(config, tmp_path, stop_at=3), (lines, adapter))
