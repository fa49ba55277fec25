"""The two-pass methods against naive references: LoRA-SAM and ASAM over the factors, SAM over the merged weights."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from flatshift.regularizers import ASAM, GGPO, SAM, LoraSAM, Regularizer, RegularizerError, build
from flatshift.regularizers.mesh import Placement
from tests.support.regularizer_models import (
    base_weights,
    clear,
    densely_perturbed,
    frozen_checksums,
    gradients,
    loss_of,
    tiny_gpt2,
    tiny_llama,
    tokens,
    with_lora,
)

KINDS: dict[str, Any] = {"lora-sam": LoraSAM(rho=0.3), "asam": ASAM(rho=2.0, eta=0.02), "sam": SAM(rho=0.3)}


def attached(kind: str, model: Any) -> Regularizer:
    return build(KINDS[kind]).attach(model, seed=1, total_steps=5)


def two_passes(model: Any, regularizer: Regularizer, ids: Tensor, parts: int = 1, scaler: Any = None) -> list[float]:
    """Step 0 over `parts` micro-batches; the loss of each pass."""
    losses = []
    with regularizer.step(0, loss_scale=1.0 if scaler is None else scaler.get_scale()) as passes:
        for _ in passes:
            losses.append(0.0)
            for index, part in enumerate(ids.tensor_split(parts)):
                regularizer.on_micro_batch(index)
                loss = loss_of(model, part) / parts
                (loss if scaler is None else scaler.scale(loss)).backward()
                losses[-1] += float(loss.detach())
    return losses


def theta(model: Any) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if "lora_" in name}


def bits(model: Any) -> dict[str, bytes]:
    return {n: p.detach().contiguous().view(torch.uint8).numpy().tobytes() for n, p in model.named_parameters()}


def forwards(model: Any) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


def perturbed_twin(kind: str, model: Any, ids: Tensor) -> Any:
    """A copy of `model` moved by the formula, from gradients that autograd makes."""
    config = KINDS[kind]
    if isinstance(config, SAM):
        seen = copy.deepcopy(model)
        weights = base_weights(seen)
        for weight in weights.values():
            weight.requires_grad_()
        loss_of(seen, ids).backward()
        conv = {n: type(seen.get_submodule(n).base_layer).__name__ == "Conv1D" for n in weights}
        dense = {n: (w.grad.T if conv[n] else w.grad) for n, w in weights.items()}
        norm = torch.cat([g.flatten() for g in dense.values()]).norm()
        return densely_perturbed(model, {n: config.rho * g / norm for n, g in dense.items()})
    twin = copy.deepcopy(model)
    loss_of(twin, ids).backward()
    factors = list(theta(twin).values())
    g = torch.cat([p.grad.flatten() for p in factors])
    w = torch.cat([p.detach().flatten() for p in factors])
    if isinstance(config, ASAM):
        t = w.abs() + config.eta
        epsilon = config.rho * t**2 * g / (t * g).norm()
    else:
        epsilon = config.rho * g / g.norm()
    with torch.no_grad():
        for p, part in zip(factors, epsilon.split([p.numel() for p in factors]), strict=True):
            p += part.view_as(p)
    clear(twin)
    return twin


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [1, 4])
def test_the_gradient_is_that_of_the_perturbed_weights(kind: str, make: Callable[..., Any], parts: int) -> None:
    model, ids = with_lora(make(dtype=torch.float64)), tokens()
    twin = perturbed_twin(kind, model, ids)
    wanted = loss_of(twin, ids)
    wanted.backward()
    before = bits(model)
    regularizer = attached(kind, model)
    plain, perturbed = two_passes(model, regularizer, ids, parts)
    assert plain == pytest.approx(float(loss_of(model, ids).detach()), rel=1e-6)
    assert perturbed == pytest.approx(float(wanted.detach()), rel=1e-6) and perturbed > plain + 1e-3
    theirs = gradients(twin)
    tolerance = 1e-9 if parts == 1 else 1e-5  # transformers takes losses in float32, which round by their batch
    for name, mine in gradients(model).items():
        assert float((mine - theirs[name]).norm() / theirs[name].norm()) < tolerance, name
    assert bits(model) == before and forwards(model) == []
    assert {n for n, p in model.named_parameters() if p.requires_grad} == set(theta(model))
    metrics = regularizer.metrics()
    assert metrics["unperturbed_steps"] == 0
    if kind != "asam":
        assert metrics["perturbation_norm"] == pytest.approx(0.3, rel=1e-6)
    after = math.sqrt(sum(float(g.square().sum()) for g in theirs.values()))
    assert metrics["perturbed_gradient_norm"] == pytest.approx(after, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_the_first_pass_are_taken_away_everywhere(kind: str) -> None:
    """ρ = 0: the second pass is the first again, for a head outside θ too."""
    settings = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    model, ids = get_peft_model(tiny_llama(), settings), tokens()
    loss_of(model, ids).backward()
    plain = gradients(model)
    clear(model)
    regularizer = build(type(KINDS[kind])(rho=0.0)).attach(model, seed=1, total_steps=5)
    two_passes(model, regularizer, ids)
    mine = gradients(model)
    assert any("lm_head" in name for name in mine)
    assert all(torch.equal(mine[name], plain[name]) for name in plain)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_scaler_changes_nothing_and_unscales_once(kind: str) -> None:
    results = []
    for scaled in (False, True):
        model, ids = with_lora(tiny_llama()), tokens()
        optimizer = torch.optim.AdamW(theta(model).values(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if scaled else None
        regularizer = attached(kind, model)
        two_passes(model, regularizer, ids, parts=2, scaler=scaler)
        if scaler is None:
            norm = torch.nn.utils.clip_grad_norm_(theta(model).values(), 0.5)
            optimizer.step()
        else:
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(theta(model).values(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        metrics = regularizer.metrics()
        assert metrics["perturbed_gradient_norm"] == pytest.approx(float(norm), rel=1e-5)
        results.append((metrics, {n: p.detach().clone() for n, p in theta(model).items()}))
    (plain, values), (scaled_metrics, scaled_values) = results
    assert scaled_metrics == pytest.approx(plain, rel=1e-6)
    assert all(torch.allclose(values[n], scaled_values[n], rtol=0, atol=1e-7) for n in values)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [0.0, float("inf"), float("nan")])
def test_a_first_gradient_without_a_direction_leaves_the_second_pass_plain(kind: str, bad: float) -> None:
    model, ids = with_lora(tiny_llama()), tokens()
    loss_of(model, ids).backward()
    plain = gradients(model)
    clear(model)
    regularizer = attached(kind, model)
    with regularizer.step(0) as passes:
        for index in passes:
            loss = loss_of(model, ids)
            (loss * bad if index == 0 else loss).backward()
    assert all(torch.equal(grad, plain[name]) for name, grad in gradients(model).items())
    metrics = regularizer.metrics()
    assert metrics["unperturbed_steps"] == 1 and metrics["perturbation_norm"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_an_abandoned_step_is_no_unperturbed_one(kind: str) -> None:
    model = with_lora(tiny_llama())
    regularizer = attached(kind, model)
    with pytest.raises(KeyError), regularizer.step(0) as passes:
        for _ in passes:
            (loss_of(model, tokens()) * 0).backward()
        raise KeyError
    assert not regularizer.state_dict()[f"{kind}.unperturbed"]


@pytest.mark.parametrize("kind", ["lora-sam", "asam"])
def test_narrow_factors_are_refused(kind: str) -> None:
    with pytest.raises(RegularizerError, match="bfloat16, which rounds a small step away; keep the adapter in float32"):
        attached(kind, with_lora(tiny_llama()).bfloat16())


@pytest.mark.parametrize("kind", KINDS)
def test_one_pass_is_refused_with_the_loop_to_write(kind: str) -> None:
    model, ids = with_lora(tiny_llama()), tokens()
    before = bits(model)
    regularizer = attached(kind, model)
    with pytest.raises(RegularizerError, match=r"two passes.*got 0.*for _ in passes"), regularizer.step(0):
        loss_of(model, ids).backward()
    with pytest.raises(RegularizerError, match=r"got 1"), regularizer.step(0) as passes:
        next(iter(passes))
        loss_of(model, ids).backward()
    kept = []
    with pytest.raises(RegularizerError), regularizer.step(0) as passes:
        kept.append(iter(passes))
    with pytest.raises(RegularizerError, match="after the step"):
        next(kept[0])
    assert bits(model) == before and forwards(model) == []
    two_passes(model, regularizer, ids)  # still of use


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("when", [0, 1])
def test_an_exception_in_either_pass_leaves_the_weights_as_they_were(kind: str, error: type, when: int) -> None:
    model, ids = with_lora(tiny_llama(dtype=torch.bfloat16)), tokens()
    before, frozen, plain = bits(model), frozen_checksums(model), loss_of(model, ids)
    regularizer = attached(kind, model)
    with pytest.raises(error), regularizer.step(0) as passes:
        for index in passes:
            loss = loss_of(model, ids)
            assert torch.equal(loss, plain) == (index == 0)
            loss.backward()
            if index == when:
                raise error
    assert bits(model) == before and forwards(model) == []
    assert frozen_checksums(model) == frozen and torch.equal(loss_of(model, ids), plain)


@pytest.mark.parametrize("kind", KINDS)
def test_attaching_and_detaching(kind: str) -> None:
    model, ids = with_lora(tiny_llama()), tokens()
    first = attached(kind, model)
    with pytest.raises(RegularizerError, match="attached already"):
        first.attach(model, seed=0, total_steps=1)
    with pytest.raises(RegularizerError, match="another regularizer"):
        build(GGPO()).attach(model, seed=0, total_steps=1)
    with pytest.raises(RegularizerError, match=r"step\(1\)"), first.step(0), first.step(1):
        pass
    two_passes(model, first, ids)
    first.detach()
    first.detach()
    with pytest.raises(RegularizerError, match="not attached"), first.step(0):
        pass
    build(GGPO()).attach(model, seed=0, total_steps=1)
    with pytest.raises(RegularizerError, match="all-linear"):
        attached(kind, tiny_llama())


def test_lora_on_embeddings_is_moved_too_but_has_no_weight_that_sam_serves(caplog: Any) -> None:
    model, ids = with_lora(tiny_llama(), target_modules=["embed_tokens", "q_proj"]), tokens()
    regularizer = attached("lora-sam", model)
    name = next(n for n in theta(model) if "lora_embedding_A" in n)
    before = theta(model)[name].detach().clone()
    with regularizer.step(0) as passes:
        for index in passes:
            assert torch.equal(theta(model)[name], before) == (index == 0)
            loss_of(model, ids).backward()
    regularizer.detach()
    two_passes(model, attached("sam", model), ids)
    assert "embed_tokens" in caplog.text
    only = with_lora(tiny_llama(), target_modules=["embed_tokens"])
    with pytest.raises(RegularizerError, match="only LoRA layers of other kinds"):
        attached("sam", only)


@pytest.mark.parametrize("kind", KINDS)
def test_state_belongs_to_its_kind(kind: str) -> None:
    model, ids = with_lora(tiny_llama()), tokens()
    regularizer = attached(kind, model)
    two_passes(model, regularizer, ids)
    clear(model)
    with regularizer.step(1) as passes:
        for _ in passes:
            (loss_of(model, ids) * 0.0).backward()
    state = regularizer.state_dict()
    regularizer.detach()
    again = attached(kind, model)
    again.load_state_dict(state)
    assert again.metrics()["unperturbed_steps"] == 1
    assert all(torch.equal(value, state[name]) for name, value in again.state_dict().items())
    for other in set(KINDS) - {kind}:
        stranger = attached(other, with_lora(tiny_llama()))
        with pytest.raises(RegularizerError, match="does not belong"):
            stranger.load_state_dict(state)
    with pytest.raises(RegularizerError, match="attach before"):
        build(KINDS[kind]).load_state_dict(state)


@pytest.mark.parametrize("config", [LoraSAM(rho=-1.0), SAM(rho=math.nan), ASAM(rho=math.inf), ASAM(eta=-0.1)])
def test_settings_without_a_meaning_are_refused_by_name(config: Any) -> None:
    with pytest.raises(RegularizerError, match=r"regularizer\.(rho|eta): .*is not a number ≥ 0"):
        build(config)


class Split(Placement):
    """Two ranks along one axis, as far as a refusal asks."""

    def __init__(self, axis: str) -> None:
        self.axis = axis

    def sum_tensor(self, tensor: Tensor) -> None:
        tensor *= 2 if self.axis == "tp" else 1

    def sum_pipeline(self, tensor: Tensor) -> None:
        tensor *= 2 if self.axis == "pp" else 1


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_sam_over_the_weights_refuses_layers_that_are_cut(axis: str) -> None:
    model = with_lora(tiny_llama())
    with pytest.raises(RegularizerError, match=rf"mesh\.{axis}.*lora-sam"):
        build(SAM()).attach(model, seed=0, total_steps=1, placement=Split(axis))
    attached("sam", model)  # nothing was claimed


@pytest.mark.parametrize("kind", ["lora-sam", "sam"])
def test_checkpointed_recomputation_changes_nothing(kind: str) -> None:
    model, ids = with_lora(tiny_llama()), tokens()
    results = []
    for reentrant in (None, False, True):
        if reentrant is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.enable_input_require_grads()
        regularizer = attached(kind, model)
        losses = two_passes(model, regularizer, ids)
        results.append((losses, gradients(model), regularizer.metrics()))
        regularizer.detach()
        clear(model)
    (losses, grads, metrics), *recomputed = results
    for other_losses, other_grads, other_metrics in recomputed:
        assert losses == other_losses and metrics == other_metrics
        assert all(torch.equal(grads[name], other_grads[name]) for name in grads)


@pytest.mark.bf16
@pytest.mark.parametrize("kind", KINDS)
def test_bf16_backbone_under_autocast_is_close_to_float32(kind: str) -> None:
    exact = with_lora(tiny_llama(dtype=torch.bfloat16).float())
    mixed = with_lora(tiny_llama(dtype=torch.bfloat16))
    with torch.no_grad():
        for p, value in zip(theta(mixed).values(), theta(exact).values(), strict=True):
            p.data = value.clone()
    figures, grads = [], []
    for model, enabled in ((exact, False), (mixed, True)):  # a small radius: not chaos, but rounding is compared
        small = type(KINDS[kind])(rho=0.3 if kind == "asam" else 0.05)
        regularizer = build(small).attach(model, seed=1, total_steps=5)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            two_passes(model, regularizer, tokens())
        grads.append(torch.cat([g.flatten() for g in gradients(model).values()]))
        figures.append(regularizer.metrics())
    assert grads[1].dtype == torch.float32
    assert float(torch.nn.functional.cosine_similarity(grads[0], grads[1], dim=0)) > 0.98
    assert figures[1] == pytest.approx(figures[0], rel=0.05)
