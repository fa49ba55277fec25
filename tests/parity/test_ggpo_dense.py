"""GGPO against its naive form: the frozen weight really is W0 + ε, autograd does the rest; and the noise against
what is claimed of it: the covariance of dense Gaussian noise, the known rectangle moment, the same mean loss rise.
"""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn

from flatshift.regularizers import GGPO, build
from flatshift.regularizers.layers.signs import draw_signs
from tests.support.regularizer_models import (
    base_weights,
    clear,
    densely_perturbed,
    fitted,
    gradients,
    loss_of,
    perturbations,
    tiny_gpt2,
    tiny_llama,
    tokens,
    with_lora,
)

PASSAGE = """The river had risen in the night, and by morning the lower fields were under water. Nobody in the village
was surprised, for it happened every few years, and the oldest houses had been built on the hill for that reason."""
SHIPPED = Path(__file__).parents[2] / "finetune" / "backbones"


# --- the branch computes what it says ---------------------------------------------------------------------------------


def two_adapters() -> Any:
    model = with_lora(tiny_llama(dtype=torch.float64))
    second = LoraConfig(r=2, lora_alpha=6, target_modules="all-linear", init_lora_weights=False)
    model.add_adapter("second", second)
    model.base_model.set_adapter(["default", "second"])
    return model.double()


def llama(**settings: Any) -> Callable[[], Any]:
    return lambda: with_lora(tiny_llama(dtype=torch.float64), **settings)


LAYERS: dict[str, tuple[Callable[[], Any], bool]] = {
    "lora": (llama(), True),
    "rslora": (llama(use_rslora=True), True),
    "conv1d": (lambda: with_lora(tiny_gpt2(dtype=torch.float64), fan_in_fan_out=True), True),
    "dropout": (llama(lora_dropout=0.3), True),
    "lora-bias": (llama(lora_bias=True), False),
    "two-adapters": (two_adapters, False),
}


def run(model: nn.Module, embeds: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, its gradient with respect to the input embeddings, and with respect to the adapter; fixed dropout."""
    clear(model)
    embeds = embeds.clone().requires_grad_()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)
        loss = model(inputs_embeds=embeds, labels=labels).loss
    loss.backward()
    assert embeds.grad is not None
    return loss.detach(), embeds.grad, gradients(model)


def embeddings(ids: Tensor, width: int = 32) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(*ids.shape, width, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("case", LAYERS)
def test_loss_and_all_gradients_equal_autograd_through_dense_noise(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from flatshift.regularizers.layers.fused import FusedNoise

    make, fused = LAYERS[case]
    model, ids = make(), tokens()
    calls = []
    real = FusedNoise.apply
    monkeypatch.setattr(FusedNoise, "apply", lambda *inputs: calls.append(1) or real(*inputs))
    plain_loss, _, plain_grads = run(model, embeddings(ids), ids)
    regularizer = build(GGPO(sigma=0.3)).attach(model, seed=1, total_steps=2)
    with regularizer.step(0):
        noise = perturbations(regularizer)
        loss, dx, grads = run(model, embeddings(ids), ids)
    assert len(calls) == (len(noise) if fused else 0)
    regularizer.detach()
    assert abs(float(loss - plain_loss)) > 1e-4  # the noise is there
    dense_loss, dense_dx, dense_grads = run(densely_perturbed(model, noise), embeddings(ids), ids)
    assert float(loss) == pytest.approx(float(dense_loss), rel=1e-12)
    assert torch.allclose(dx, dense_dx, rtol=1e-9, atol=1e-14)
    assert set(grads) == set(dense_grads) == set(plain_grads)
    for name, grad in dense_grads.items():
        assert torch.allclose(grads[name], grad, rtol=1e-9, atol=1e-14), name


def test_dora_gets_the_branch_on_its_output() -> None:
    """DoRA's weight is m·(W0+sBA)/|W0+sBA|; ε is added to that, so the reference adds ε x after the layer."""
    model, ids = llama(use_dora=True)(), tokens()
    regularizer = build(GGPO(sigma=0.3)).attach(model, seed=1, total_steps=2)
    with regularizer.step(0):
        noise = perturbations(regularizer)
        loss, dx, grads = run(model, embeddings(ids), ids)
    regularizer.detach()
    twin = copy.deepcopy(model)
    for name, epsilon in noise.items():
        twin.get_submodule(name).register_forward_hook(lambda _, inputs, y, e=epsilon: y + inputs[0] @ e.T)
    dense_loss, dense_dx, dense_grads = run(twin, embeddings(ids), ids)
    assert any("magnitude" in name for name in grads)
    assert float(loss) == pytest.approx(float(dense_loss), rel=1e-12)
    assert torch.allclose(dx, dense_dx, rtol=1e-9, atol=1e-14)
    assert all(torch.allclose(grads[name], grad, rtol=1e-9, atol=1e-14) for name, grad in dense_grads.items())


def test_sigma_is_the_noise_over_the_signal_of_a_layer() -> None:
    """|ε_i|² has the mean σ²|W'_i|², layer by layer, over 100 steps."""
    model = with_lora(tiny_llama())
    regularizer = build(GGPO(sigma=0.3, beta=0.0)).attach(model, seed=1, total_steps=100)
    power: dict[str, Tensor] = {}
    for t in range(100):
        with regularizer.step(t):
            for name, epsilon in perturbations(regularizer).items():
                power[name] = power.get(name, torch.zeros(())) + epsilon.square().sum(1) / 100
    state = regularizer.state_dict()
    for name, mean in power.items():
        assert float((mean / state[f"{name}.norms"]).mean()) == pytest.approx(0.09, rel=0.05)


def test_a_trained_base_weight_gets_its_gradient_too() -> None:
    """Nothing in the fused backward assumes that W0 and the bias are frozen."""
    model, ids = LAYERS["conv1d"][0](), tokens()

    def unfrozen(model: Any) -> dict[str, nn.Parameter]:
        return {n: p.requires_grad_() for n, p in model.named_parameters() if ".base_layer." in n}

    regularizer = build(GGPO(sigma=0.3)).attach(model, seed=1, total_steps=2)
    with regularizer.step(0):
        noise, parameters = perturbations(regularizer), unfrozen(model)
        grads = torch.autograd.grad(loss_of(model, ids), list(parameters.values()))
    twin = densely_perturbed(model, noise)
    dense = torch.autograd.grad(loss_of(twin, ids), list(unfrozen(twin).values()))
    assert {name.rsplit(".", 1)[1] for name in parameters} == {"weight", "bias"}
    assert all(torch.allclose(g, d, rtol=1e-9, atol=1e-14) for g, d in zip(grads, dense, strict=True))


# --- the noise has the moments that are claimed -----------------------------------------------------------------------


def draws(count: int, m: int, n: int, k: int) -> Tensor:
    """ε/σ (count, m, n) of one layer at `count` optimizer steps."""
    out = torch.stack(
        [draw_signs(seed=0, step=t, layer="a", side="out", indices=range(m), columns=k) for t in range(count)]
    )
    into = torch.stack(
        [draw_signs(seed=0, step=t, layer="a", side="in", indices=range(n), columns=k) for t in range(count)]
    )
    return out @ into.transpose(1, 2) / math.sqrt(k)


def test_covariance_and_rectangle_moment() -> None:
    count, m, n, k = 8000, 6, 5, 8
    epsilon = draws(count, m, n, k)
    flat = epsilon.reshape(count, -1)
    covariance = flat.T @ flat / count
    assert float((covariance - torch.eye(m * n)).abs().max()) < 5 * math.sqrt(2 / count)
    i, j = torch.meshgrid(torch.arange(m), torch.arange(m), indexing="ij")
    rectangles = []
    for row, other in zip(i[i < j].tolist(), j[i < j].tolist(), strict=True):
        products = epsilon[:, row] * epsilon[:, other]  # (count, n)
        pairs = products[:, :, None] * products[:, None, :]
        rectangles.append(pairs[:, *torch.triu_indices(n, n, 1)])
    rectangle = torch.cat(rectangles, 1)
    assert float(rectangle.mean()) == pytest.approx(1 / k, abs=5 * float(rectangle.mean(1).std()) / math.sqrt(count))
    kurtosis = float(flat.pow(4).mean())
    assert kurtosis == pytest.approx(3 - 2 / k, abs=0.05)


def test_entries_of_a_row_are_independent() -> None:
    """Uncorrelated squares and no three- or four-way product moment: where rectangles show, rows do not."""
    count, n = 8000, 5
    row = draws(count, 2, n, 8)[:, 0]
    squares = row.square() - 1
    covariance = squares.T @ squares / count
    off = covariance - torch.diag(covariance.diag())
    assert float(off.abs().max()) < 5 * float(covariance.diag().max()) / math.sqrt(count)
    for entries in ((0, 1, 2), (0, 1, 2, 3), (1, 2, 3, 4)):
        assert abs(float(row[:, entries].prod(1).mean())) < 5 / math.sqrt(count)


# --- the sketch is of the gradient at the perturbed point -------------------------------------------------------------


@pytest.mark.parametrize("near_convergence", [False, True], ids=["start", "near-zero-loss"])
def test_sketch_is_unbiased_at_the_perturbed_point(near_convergence: bool) -> None:
    """50 draws at σ = .2: the ratio to |G_i(W+ε)|² averages to 1 ± .1, and the averages correlate above .95."""
    ids = tokens(3, 8)
    backbone = tiny_llama()
    backbone.lm_head.weight.data *= 6  # large enough logits, so that a rank-8 adapter can reach zero loss
    model = with_lora(backbone, trained=False, r=8)
    if near_convergence:
        model = fitted(model, ids, 0.01)
    regularizer = build(GGPO(sigma=0.2, ema=0.0, beta=1e-9)).attach(model, seed=4, total_steps=50)
    twin = copy.deepcopy(model)
    weights = {name: weight.requires_grad_() for name, weight in base_weights(twin).items()}
    ratios, sketched, true = [], dict.fromkeys(weights, 0), dict.fromkeys(weights, 0)
    for t in range(50):
        clear(model)
        with regularizer.step(t):
            noise = perturbations(regularizer)
            loss_of(model, ids).backward()
        state = regularizer.state_dict()
        for name, weight in base_weights(model).items():
            weights[name].data = weight.data + noise[name]
        grads = torch.autograd.grad(loss_of(twin, ids), list(weights.values()))
        for name, grad in zip(weights, grads, strict=True):
            q, norms = state[f"{name}.ema"], grad.square().sum(1)  # without averaging, ema is q itself
            ratios.append(float(q.sum() / norms.sum()))
            sketched[name] += q / norms.sum()  # every draw counts alike, however large its gradient
            true[name] += norms / norms.sum()
    assert abs(sum(ratios) / len(ratios) - 1) < 0.1
    pairs = [torch.stack([sketched[name], true[name]]).sqrt() for name in true]
    correlations = torch.stack([torch.corrcoef(pair)[0, 1] for pair in pairs])
    assert float(correlations.mean()) > 0.95 and float(correlations.min()) > 0.85


# --- the loss rises as under dense Gaussian noise ---------------------------------------------------------------------


def loss_rises(
    model: Any, ids: Tensor, sigma: float, pairs: int, *, dense: bool, rank: int | None = None
) -> tuple[Tensor, Tensor]:
    """Antithetic rises (L(W+ε) + L(W−ε))/2 − L(W) of `pairs` draws, and the mean adapter gradient over all of them.

    `dense`: iid Gaussian entries with the same row scales in place of the signed low-rank ones.
    """
    regularizer = build(GGPO(sigma=sigma, beta=0.0, rank=rank)).attach(model, seed=8, total_steps=pairs)
    generator = torch.Generator().manual_seed(8)
    weights = base_weights(model)
    kept = {name: weight.detach().clone() for name, weight in weights.items()}
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        base = loss_of(model, ids)
    rises, mean_gradient = [], torch.zeros(sum(p.numel() for p in parameters))
    for t in range(pairs):
        with regularizer.step(t):
            noise = perturbations(regularizer)
            norms = {name: regularizer.state_dict()[f"{name}.norms"] for name in noise}
        if dense:
            noise = {
                name: sigma * (norms[name] / e.shape[1]).sqrt()[:, None] * torch.randn(e.shape, generator=generator)
                for name, e in noise.items()
            }
        losses = []
        for sign in (1, -1):
            for name, weight in weights.items():
                weight.data = kept[name] + sign * noise[name]
            loss = loss_of(model, ids)
            grads = torch.autograd.grad(loss, parameters)
            mean_gradient += torch.cat([g.flatten() for g in grads]) / (2 * pairs)
            losses.append(loss.detach())
        rises.append(sum(losses) / 2 - base)
    for name, weight in weights.items():
        weight.data = kept[name]
    regularizer.detach()
    return torch.stack(rises), mean_gradient


def ratio_interval(ours: Tensor, dense: Tensor) -> tuple[float, float]:
    """95 % interval of E ours / E dense (delta method, independent samples)."""
    ratio = float(ours.mean() / dense.mean())
    relative = [float(x.std() / x.mean()) / math.sqrt(len(x)) for x in (ours, dense)]
    half = 1.96 * ratio * math.hypot(*relative)
    return ratio - half, ratio + half


def test_mean_loss_rise_is_that_of_dense_gaussian_noise() -> None:
    """On a tiny fitted model, equivalence and not `no difference`: the whole interval lies within ±15 %."""
    ids = tokens(4, 10)
    model = fitted(with_lora(tiny_llama(width=64), trained=False, r=8), ids, 0.5)
    ours, our_gradient = loss_rises(model, ids, 0.1, 150, dense=False)
    dense, dense_gradient = loss_rises(model, ids, 0.1, 100, dense=True)
    low, high = ratio_interval(ours, dense)
    assert 0.85 < low < high < 1.15, (low, high)
    assert float(torch.cosine_similarity(our_gradient, dense_gradient, dim=0)) > 0.97


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [0.05, 0.1, 0.2])
def test_mean_loss_rise_on_the_shipped_backbone(sigma: float) -> None:
    """The long form: ±5 % and gradient cosine ≥ .99 on a real pretrained backbone."""
    directories = sorted(path.parent for path in SHIPPED.glob("*/config.json"))
    if not directories:
        pytest.skip("no shipped backbone in this tree")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    backbone = AutoModelForCausalLM.from_pretrained(directories[0], dtype=torch.float32).requires_grad_(False)
    model = with_lora(backbone, trained=False, r=8)
    ids = AutoTokenizer.from_pretrained(directories[0])(PASSAGE, return_tensors="pt").input_ids
    ours, our_gradient = loss_rises(model, ids, sigma, 600, dense=False)
    dense, dense_gradient = loss_rises(model, ids, sigma, 300, dense=True)
    low, high = ratio_interval(ours, dense)
    assert 0.95 < low < high < 1.05, (low, high)
    assert float(torch.cosine_similarity(our_gradient, dense_gradient, dim=0)) >= 0.99
