"""Noise for each micro-batch and for each sample against its naive form: every row b of a batch really goes through
W0 + ε_b, autograd does the rest.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from flatshift.regularizers import GGPO, RegularizerError, build
from flatshift.regularizers.layers.signs import draw_signs
from flatshift.regularizers.mesh import Placement
from flatshift.regularizers.methods.ggpo import GGPORegularizer
from tests.support.regularizer_models import (
    base_weights,
    clear,
    fitted,
    frozen_checksums,
    gradients,
    loss_of,
    perturbations,
    tiny_gpt2,
    tiny_llama,
    tokens,
    with_lora,
)

ROWS = 3
SCOPES = ["step", "microbatch", "sample"]
PATHS: dict[str, dict[str, Any]] = {
    "fused": {},
    "conv1d": {"fan_in_fan_out": True},
    "dropout": {"lora_dropout": 0.3},
    "added": {"lora_bias": True},
    "dora": {"use_dora": True},
}


def made(path: str) -> Any:
    backbone = (tiny_gpt2 if path == "conv1d" else tiny_llama)(dtype=torch.float64)
    return with_lora(backbone, **PATHS[path])


def attached(model: nn.Module, scope: str, **settings: Any) -> GGPORegularizer:
    config = GGPO(**({"sigma": 0.3, "scope": scope, "ema": 0.0} | settings))
    regularizer = build(config).attach(model, seed=3, total_steps=60)
    assert isinstance(regularizer, GGPORegularizer)
    return regularizer


def noise_of(regularizer: GGPORegularizer, rows: int) -> list[dict[str, Tensor]]:
    """ε of every row of the micro-batch at hand."""
    return [perturbations(regularizer, row, rows) for row in range(rows)]


@contextmanager
def dense(model: nn.Module, noise: list[dict[str, Tensor]]) -> Iterator[None]:
    """Row b of a batch sees W0 + ε_b in every layer, added to the layer's output from its own (undropped) input."""

    def adding(epsilon: Tensor) -> Any:
        return lambda _, inputs, y: y + torch.einsum("b...n,bmn->b...m", inputs[0], epsilon)

    handles = [
        model.get_submodule(name).register_forward_hook(adding(torch.stack([each[name] for each in noise])))
        for name in noise[0]
    ]
    yield
    for handle in handles:
        handle.remove()


def seeded_loss(model: nn.Module, ids: Tensor, seed: int) -> Tensor:
    """The loss with fixed dropout."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return loss_of(model, ids)


# --- it computes what it says -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("scope", SCOPES)
def test_loss_gradients_and_sketch_equal_autograd_through_dense_noise(scope: str, path: str) -> None:
    """Two micro-batches. The probes' gradient is G S_Pᵀ of the accumulated gradient, with the same S_P in both."""
    model, batch = made(path), tokens(2 * ROWS).split(ROWS)
    twin = copy.deepcopy(model)
    regularizer = attached(model, scope)
    losses, dense_losses, all_noise, sketches = [], [], [], {}
    with regularizer.step(0):
        for index, ids in enumerate(batch):
            regularizer.on_micro_batch(index)
            all_noise.append(noise_of(regularizer, ROWS))
            loss = seeded_loss(model, ids, index)
            loss.backward()
            losses.append(loss.detach())
        branches = {branch.site.name: branch for group in regularizer._groups for branch in group.branches}
        for name, branch in branches.items():
            assert branch.probe.grad is not None and branch.probe_in is not None
            sketches[name] = branch.probe.grad.clone(), branch.probe_in.clone()
    weights = {name: weight.requires_grad_() for name, weight in base_weights(twin).items()}
    for index, ids in enumerate(batch):
        with dense(twin, all_noise[index]):
            loss = seeded_loss(twin, ids, index)
            loss.backward()
        dense_losses.append(loss.detach())
    assert torch.allclose(torch.stack(losses), torch.stack(dense_losses), rtol=1e-12)
    wanted = {name: grad for name, grad in gradients(twin).items() if "base_layer" not in name}
    mine = gradients(model)
    assert set(mine) == set(wanted)
    assert all(torch.allclose(mine[name], grad, rtol=1e-8, atol=1e-13) for name, grad in wanted.items())
    if path == "dora":  # there ∂L/∂W0 is not ∂L/∂(W'+ε)
        return
    for name, (gradient, probe_in) in sketches.items():
        dense_gradient = weights[name].grad
        assert dense_gradient is not None
        dense_gradient = dense_gradient.T if path == "conv1d" else dense_gradient
        assert torch.allclose(gradient, dense_gradient @ probe_in, rtol=1e-8, atol=1e-13), name


def test_what_has_a_noise_of_its_own() -> None:
    """Who shares noise with whom, and that the draws are the documented hash."""
    name, model = "base_model.model.model.layers.0.self_attn.q_proj", with_lora(tiny_llama())
    noise: dict[str, list[Tensor]] = {}
    for scope in SCOPES:
        regularizer = attached(model, scope)
        with regularizer.step(4):
            noise[scope] = []
            for micro in (0, 1):
                regularizer.on_micro_batch(micro)
                noise[scope] += [each[name] for each in noise_of(regularizer, 2)]
            regularizer.on_micro_batch(0)  # the second pass of a two-pass method
            assert torch.equal(perturbations(regularizer, 1, 2)[name], noise[scope][1])
        regularizer.detach()
    first, *others = noise["step"]
    assert all(torch.equal(first, other) for other in others)
    assert torch.equal(noise["microbatch"][0], noise["microbatch"][1])
    assert not torch.equal(noise["microbatch"][1], noise["microbatch"][2])
    drawn = {"seed": 3, "step": 4, "layer": name, "columns": 8}

    def is_drawn_from(epsilon: Tensor, s_out: Tensor, s_in: Tensor) -> bool:
        """Whether ε is diag(scale) S_U S_V."""
        return bool((torch.cosine_similarity(epsilon, s_out @ s_in.T, dim=1) > 1 - 1e-5).all())

    of_step = [draw_signs(**drawn, side=side, indices=range(32)) for side in ("out", "in")]
    for micro in (0, 1):
        of_micro = [draw_signs(**drawn, side=side, micro=micro, indices=range(32)) for side in ("out", "in")]
        assert is_drawn_from(noise["microbatch"][2 * micro], *of_micro)
        own = draw_signs(**drawn, side="sample", micro=micro, indices=range(2))
        for row in (0, 1):
            assert is_drawn_from(noise["sample"][2 * micro + row], of_step[0] * own[row], of_step[1])
    cosines = [
        torch.cosine_similarity(one.flatten(), other.flatten(), dim=0)
        for at, one in enumerate(noise["sample"])
        for other in noise["sample"][:at]
    ]
    assert float(torch.stack(cosines).abs().max()) < 0.99
    power = torch.stack([each.square().sum() for scope in SCOPES for each in noise[scope]])
    assert float(power.max() / power.min()) < 1.2


def test_samples_do_not_see_over_how_many_processes_they_are_spread() -> None:
    """Rows 0–3 in one process, and 0–1 and 2–3 in two: the same losses, gradients and sketches."""

    class Half(Placement):
        def __init__(self, index: int) -> None:
            self._index = index

        @property
        def share(self) -> tuple[int, int]:
            return self._index, 2

    def run(ids: Tensor, weight: float, placement: Placement | None) -> tuple[Tensor, dict[str, Tensor]]:
        model = with_lora(tiny_llama(dtype=torch.float64))
        config = GGPO(sigma=0.3, scope="sample")
        regularizer = build(config).attach(model, seed=3, total_steps=2, placement=placement)
        total = torch.zeros((), dtype=torch.float64)
        with regularizer.step(0):
            for micro in range(2):
                regularizer.on_micro_batch(micro)
                loss = loss_of(model, ids.roll(micro, 1)) * weight
                loss.backward()
                total += loss.detach()
            found = gradients(model) | {
                branch.site.name: branch.probe.grad.clone()  # type: ignore[union-attr]
                for group in regularizer._groups
                for branch in group.branches
            }
        return total, found

    ids = tokens(4)
    loss, grads = run(ids, 1.0, None)
    (first, first_grads), (second, second_grads) = (run(ids.chunk(2)[i], 0.5, Half(i)) for i in (0, 1))
    assert float(first + second) == pytest.approx(float(loss), rel=1e-6)  # transformers takes the loss in float32
    assert all(torch.allclose(first_grads[n] + second_grads[n], g, rtol=1e-5, atol=1e-9) for n, g in grads.items())
    other, _ = run(ids.chunk(2)[1], 0.5, Half(0))
    assert abs(float(other - second)) > 1e-6  # another place in the batch, another noise


@pytest.mark.parametrize("path", ["fused", "dropout", "dora"])
@pytest.mark.parametrize("scope", ["microbatch", "sample"])
def test_checkpointed_recomputation_sees_the_noise_of_its_own_micro_batch(scope: str, path: str) -> None:
    model, batch = with_lora(tiny_llama(), **PATHS[path]), tokens(2 * ROWS).split(ROWS)
    results = []
    for reentrant in (None, False, True):
        regularizer = attached(model, scope)
        if reentrant is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.enable_input_require_grads()
        with torch.random.fork_rng(devices=[]), regularizer.step(0):
            torch.default_generator.manual_seed(1)
            for index, ids in enumerate(batch):
                regularizer.on_micro_batch(index)
                loss_of(model, ids).backward()
        results.append((gradients(model), regularizer.state_dict()))
        regularizer.detach()
        clear(model)
    (grads, state), *recomputed = results
    for other_grads, other_state in recomputed:
        assert all(torch.equal(grads[name], other_grads[name]) for name in grads)
        assert all(torch.equal(value, other_state[n]) for n, value in state.items())


def test_a_backward_after_the_next_draw_uses_the_noise_of_its_forward() -> None:
    model, batch = with_lora(tiny_llama(dtype=torch.float64)), tokens(2 * ROWS).split(ROWS)
    results = []
    for interleaved in (False, True):
        regularizer = attached(model, "microbatch")
        with regularizer.step(0):
            losses = []
            for index, ids in enumerate(batch):
                regularizer.on_micro_batch(index)
                losses.append(loss_of(model, ids))
                if not interleaved:
                    losses.pop().backward()
            for loss in losses:
                loss.backward()
        results.append(gradients(model))
        regularizer.detach()
        clear(model)
    one, other = results
    assert all(torch.allclose(one[name], other[name], rtol=1e-9, atol=1e-14) for name in one)


# --- the sketch is of the accumulated gradient at the perturbed points ------------------------------------------------


@pytest.fixture(scope="module", params=["start", "near-zero-loss"])
def trained(request: pytest.FixtureRequest) -> tuple[Any, Tensor]:
    ids = tokens(4, 8)
    backbone = tiny_llama(layers=1)
    backbone.lm_head.weight.data *= 6  # large enough logits, so that a rank-8 adapter can reach zero loss
    model = with_lora(backbone, trained=False, r=8)
    return (fitted(model, ids, 0.01) if request.param == "near-zero-loss" else model), ids


@pytest.mark.parametrize("scope", ["microbatch", "sample"])
def test_sketch_is_unbiased_for_the_sum_over_draws(scope: str, trained: tuple[Any, Tensor]) -> None:
    """50 steps of two micro-batches at σ = .2: q over |Σ G_i(W + ε)|², which has as many ε as the scope draws,
    averages to 1 ± .1, and the averages correlate above .95."""
    model, batch = trained[0], trained[1].split(2)
    regularizer = attached(model, scope, sigma=0.2, beta=1e-9)
    twin = copy.deepcopy(model)
    weights = {name: weight.requires_grad_() for name, weight in base_weights(twin).items()}
    ratios, sketched, true = [], dict.fromkeys(weights, 0), dict.fromkeys(weights, 0)
    for t in range(50):
        total = dict.fromkeys(weights, 0)
        with regularizer.step(t):
            for index, ids in enumerate(batch):
                regularizer.on_micro_batch(index)
                noise = noise_of(regularizer, 2)
                loss_of(model, ids).backward()
                with dense(twin, noise):
                    grads = torch.autograd.grad(loss_of(twin, ids), list(weights.values()))
                for name, grad in zip(weights, grads, strict=True):
                    total[name] = total[name] + grad
        clear(model)
        state = regularizer.state_dict()
        for name, grad in total.items():
            q, norms = state[f"{name}.ema"], grad.square().sum(1)  # without averaging, ema is q itself
            ratios.append(float(q.sum() / norms.sum()))
            sketched[name] += q / norms.sum()
            true[name] += norms / norms.sum()
    regularizer.detach()
    assert abs(sum(ratios) / len(ratios) - 1) < 0.1
    pairs = [torch.stack([sketched[name], true[name]]).sqrt() for name in true]
    correlations = torch.stack([torch.corrcoef(pair)[0, 1] for pair in pairs])
    assert float(correlations.mean()) > 0.95 and float(correlations.min()) > 0.85


# --- misuse -----------------------------------------------------------------------------------------------------------


class Flattening(nn.Module):
    """Like a mixture of experts: its second layer sees tokens without their batch."""

    def __init__(self, from_the_start: bool) -> None:
        super().__init__()
        self.from_the_start = from_the_start
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.flatten(0, 1) if self.from_the_start else x)
        return self.second(hidden.reshape(-1, 5))


@pytest.mark.parametrize(("from_the_start", "layer"), [(False, "second"), (True, "first")])
def test_a_layer_whose_input_has_no_batch_is_refused_by_name(from_the_start: bool, layer: str) -> None:
    model = get_peft_model(Flattening(from_the_start), LoraConfig(target_modules=["first", "second"]))
    before = frozen_checksums(model)
    regularizer = attached(model, "sample")
    with (
        pytest.raises(RegularizerError, match=rf"scope: sample.*{layer} gets \(8, .*microbatch"),
        regularizer.step(0),
    ):
        regularizer.on_micro_batch(0)
        model(torch.randn(2, 4, 6))
    assert frozen_checksums(model) == before
    assert not any("forward" in vars(module) or module._forward_pre_hooks for module in model.modules())
    regularizer.detach()
    regularizer = attached(model, "microbatch")
    with regularizer.step(0):
        regularizer.on_micro_batch(0)
        model(torch.randn(2, 4, 6))


@pytest.mark.parametrize("scope", ["microbatch", "sample"])
def test_a_loop_that_names_no_micro_batch_is_told_so(scope: str) -> None:
    model, ids = with_lora(tiny_llama()), tokens()
    plain = loss_of(model, ids)
    regularizer = attached(model, scope)
    with regularizer.step(0):
        regularizer.on_micro_batch(0)
        loss_of(model, ids).backward()
    with pytest.raises(RegularizerError, match=r"q_proj.*on_micro_batch\(index\)"), regularizer.step(1):
        loss_of(model, ids)
    assert torch.equal(loss_of(model, ids), plain)


@pytest.mark.parametrize("scope", ["microbatch", "sample"])
def test_a_pipeline_is_refused(scope: str) -> None:
    class Stage(Placement):
        pipelined = True

    model = with_lora(tiny_llama())
    with pytest.raises(RegularizerError, match=rf"regularizer\.scope: {scope}.*pipeline.*scope: step"):
        build(GGPO(scope=scope)).attach(model, seed=0, total_steps=1, placement=Stage())  # type: ignore[arg-type]
    build(GGPO()).attach(model, seed=0, total_steps=1, placement=Stage())
