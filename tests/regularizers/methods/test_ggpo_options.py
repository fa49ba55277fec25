"""GGPO's options one by one: product form, whole-model normalisation, shuffled control, rarer sketches, the skip bound
of the row norms, loss scaling.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from flatshift.regularizers import GGPO, RegularizerError, build
from flatshift.regularizers.methods.ggpo import GGPORegularizer
from tests.support.regularizer_models import base_weights, clear, loss_of, tiny_llama, tokens, with_lora

PREFIX = "base_model.model.model.layers.0.self_attn."
Q = PREFIX + "q_proj"


def attached(model: Any, *, seed: int = 3, **settings: Any) -> GGPORegularizer:
    config = GGPO(**({"sigma": 0.2} | settings))
    regularizer = build(config).attach(model, seed=seed, total_steps=40)
    assert isinstance(regularizer, GGPORegularizer)
    return regularizer


def learned(regularizer: GGPORegularizer, *, seed: int = 0) -> dict[str, Tensor]:
    """Give it averaged gradient norms of very different sizes; the state."""
    generator = torch.Generator().manual_seed(seed)
    with regularizer.step(0):
        pass
    state = regularizer.state_dict()
    for index, name in enumerate(sorted(state)):
        if name.endswith(".ema"):
            state[name] = 10.0 ** (index % 4 - 6) * torch.rand(state[name].shape, generator=generator)
        if name.endswith(".updates"):
            state[name] += 1000
    regularizer.load_state_dict(state)
    return state


def row_powers(regularizer: GGPORegularizer, t: int) -> dict[str, Tensor]:
    """n·σ_i²/σ² of every row at step t, from the factor U = diag(σ_i/√k) signs."""
    with regularizer.step(t):
        return {
            branch.site.name: branch.noise_out.double().square().sum(1) * branch.site.columns / 0.2**2
            for group in regularizer._groups
            for branch in group.branches
            if branch.noise_out is not None
        }


@pytest.mark.parametrize("mode", ["relative", "relative-product"])
@pytest.mark.parametrize("normalize", ["layer", "model"])
def test_noise_follows_the_formula_over_every_kind_of_group(mode: str, normalize: str) -> None:
    """Layers of two dtypes are kept in two banks; a model's sums are over both."""
    model = with_lora(tiny_llama())
    for name, weight in base_weights(model).items():
        if "mlp" in name:
            weight.data = weight.data.bfloat16()
    regularizer = attached(model, mode=mode, normalize=normalize, beta=2.0)
    assert len(regularizer._groups) == 2
    state = learned(regularizer)
    names = list(base_weights(model))
    norms = {name: state[f"{name}.norms"].double() for name in names}
    v = {name: state[f"{name}.ema"].double() for name in names}
    form = {name: norms[name] * v[name] if mode == "relative-product" else v[name] for name in names}
    whole = sum(norms[n].sum() for n in names) / sum(form[n].sum() for n in names)
    powers = row_powers(regularizer, 1)
    for name in names:
        level = norms[name].sum() / form[name].sum() if normalize == "layer" else whole
        expected = (norms[name] + 2.0 * level * form[name]) / 3
        assert torch.allclose(powers[name], expected, rtol=2e-2 if "mlp" in name else 1e-4), name
    metrics = regularizer.metrics()
    assert metrics["gradient_share"] == pytest.approx(2 / 3, rel=1e-4)
    plain, guided = torch.cat([norms[n] for n in names]), torch.cat([powers[n] for n in names])
    if normalize == "model":
        assert metrics["guidance"] == pytest.approx(float((guided - plain).abs().sum() / plain.sum() / 2), rel=1e-2)
    else:
        moved = [float((powers[n] - norms[n]).abs().sum() / norms[n].sum() / 2) for n in names]
        assert metrics["guidance"] == pytest.approx(sum(moved) / len(moved), rel=1e-2)


def test_shuffled_gives_the_gradients_to_other_rows_of_their_layer_anew_at_every_step() -> None:
    model = with_lora(tiny_llama())
    parts: dict[str, list[dict[str, Tensor]]] = {}
    metrics = {}
    for control, seed in (("none", 3), ("shuffled", 3), ("shuffled", 4)):
        regularizer = attached(model, control=control, seed=seed)
        state = learned(regularizer)
        gradient = []
        for t in (1, 2, 1):
            powers = row_powers(regularizer, t)
            gradient.append({name: 2 * power - state[f"{name}.norms"].double() for name, power in powers.items()})
        assert all(torch.equal(gradient[0][name], gradient[2][name]) for name in gradient[0])
        after = regularizer.state_dict()
        assert all(torch.equal(after[name], state[name]) for name in state if name.endswith((".ema", ".norms")))
        parts[f"{control} {seed}"], metrics[f"{control} {seed}"] = gradient, regularizer.metrics()
        regularizer.detach()
    own, shuffled, other = (parts[key] for key in ("none 3", "shuffled 3", "shuffled 4"))
    for name in own[0]:
        for step in shuffled + other:
            assert torch.allclose(step[name].sort().values, own[0][name].sort().values, rtol=1e-3, atol=1e-6)
            assert not torch.allclose(step[name], own[0][name], rtol=0.1)
        assert not torch.allclose(shuffled[0][name], shuffled[1][name], rtol=0.1)
        assert not torch.allclose(shuffled[0][name], other[0][name], rtol=0.1)
        if not name.endswith("q_proj"):
            continue
        beside = name.replace("q_proj", "o_proj")  # of the same size, but with an order of its own
        orders = [torch.argsort(shuffled[0][n]).argsort()[own[0][n].argsort()] for n in (name, beside)]
        assert not torch.equal(*orders)
    for key in ("gradient_share", "sigma", "sketches", "row_sigma_mean"):
        assert metrics["shuffled 3"][key] == pytest.approx(metrics["none 3"][key], rel=0.2)


def test_a_shuffle_takes_every_row_everywhere() -> None:
    """Over 400 steps each of 24 rows gets each row's value about equally often (χ² below its 99.9 % quantile)."""
    model = with_lora(tiny_llama(width=16, layers=1), target_modules=r".*layers\.0\.self_attn\.(q|v)_proj")
    regularizer = attached(model, control="shuffled")
    group = regularizer._groups[0]
    rows = sum(group.rows.sizes)
    assert rows == 24
    counts = torch.zeros(rows, rows)
    for step in range(400):
        taken = group._shuffle_rows(torch.arange(24.0), step * 1_000_003).long()
        counts[torch.arange(rows), taken] += 1
    layers = [slice(0, 16), slice(16, 24)]
    assert not counts[layers[0], layers[1]].any() and not counts[layers[1], layers[0]].any()
    for part, bound in zip(layers, (292.0, 86.0), strict=True):  # χ² of (size − 1)² = 225 and 49 degrees of freedom
        expected = 400 / (part.stop - part.start)
        assert float(((counts[part, part] - expected).square() / expected).sum()) < bound


def test_sketches_every_third_step_and_probe_columns_in_those_alone() -> None:
    model, ids = with_lora(tiny_llama()), tokens()
    regularizer = attached(model, sketch_every=3)
    seen, columns = [], []
    for t in range(8):
        with regularizer.step(t):
            columns.append({b.probe_in.shape[1] for group in regularizer._groups for b in group.branches})
            loss_of(model, ids).backward()
            assert all((b.probe.grad is None) == (t % 3 > 0) for group in regularizer._groups for b in group.branches)
        clear(model)
        seen.append(regularizer.state_dict()[f"{Q}.ema"])
    assert columns == [{4} if t % 3 == 0 else {0} for t in range(8)]
    changed = [t for t, (one, other) in enumerate(pairwise([torch.zeros(32), *seen])) if not torch.equal(one, other)]
    assert changed == [0, 3, 6] and regularizer.metrics()["sketches"] == 3


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}], ids=["fused", "added"])
def test_the_noise_does_not_depend_on_how_often_sketches_are_taken(settings: dict) -> None:
    losses = []
    for every in (1, 1000):
        model = with_lora(tiny_llama(), **settings)
        regularizer = attached(model, sketch_every=every, mode="paper", beta=1e-30)
        with regularizer.step(1):
            losses.append(loss_of(model, tokens()))
    assert float(losses[0].detach()) == pytest.approx(float(losses[1].detach()), rel=1e-6)


def test_resumed_equals_continuous_to_the_bit_with_every_option() -> None:
    options = {
        "sketch_every": 2,
        "control": "shuffled",
        "normalize": "model",
        "mode": "relative-product",
        "tolerance": 0.3,
        "refresh": 3,
        "scope": "sample",
        "schedule": "cosine",
    }

    def run(*spans: tuple[int, int]) -> tuple[list[Tensor], dict[str, Tensor], dict[str, float]]:
        model = with_lora(tiny_llama())
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        losses: list[Tensor] = []
        state, metrics = None, {}
        for first, last in spans:
            regularizer = attached(model, **options)
            if state is not None:
                regularizer.load_state_dict(state)
            for t in range(first, last):
                with regularizer.step(t):
                    regularizer.on_micro_batch(0)
                    loss = loss_of(model, tokens(seed=t))
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            state, metrics = regularizer.state_dict(), regularizer.metrics()
            regularizer.detach()
        assert state is not None
        return losses, state, metrics

    losses, state, metrics = run((0, 9))
    for stop in (3, 4):
        again, again_state, again_metrics = run((0, stop), (stop, 9))
        assert torch.equal(torch.stack(losses), torch.stack(again)) and metrics == again_metrics
        assert all(torch.equal(value, again_state[name]) for name, value in state.items())


# --- row norms --------------------------------------------------------------------------------------------------------


def true_norms(model: Any) -> dict[str, Tensor]:
    found = {}
    for name, weight in base_weights(model).items():
        layer = model.get_submodule(name)
        update = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        found[name] = (weight.double() + update.double()).norm(dim=1)
    return found


def test_a_refresh_skips_layers_within_the_bound_and_is_never_further_off_than_the_tolerance() -> None:
    model = with_lora(tiny_llama(), trained=False)
    regularizer = attached(model, beta=0.0, probes=0, refresh=2, tolerance=0.05)
    layer = model.get_submodule(Q)
    refreshed = []
    for t in range(8):
        with regularizer.step(t):
            norms = {name: regularizer.state_dict()[f"{name}.norms"].double().sqrt() for name in base_weights(model)}
        refreshed.append(regularizer.metrics()["norms_refreshed"])
        exact = true_norms(model)
        if t % 2 == 0:
            for name, weight in base_weights(model).items():
                error = (norms[name] - exact[name]).abs() / weight.double().norm(dim=1)
                assert float(error.detach().max()) <= (1e-6 if name == Q and t >= 6 else 0.05)
                if name != Q:
                    assert torch.allclose(norms[name], weight.double().norm(dim=1), rtol=1e-6)
        # One row of one layer moves: by a little before step 4, by a lot before step 6.
        a = layer.lora_A["default"].weight
        step = {3: 0.02, 5: 0.2}.get(t, 0.0) * layer.base_layer.weight[7].norm() / (2.0 * a[0].norm())
        layer.lora_B["default"].weight.data[7, 0] += step.detach()
    assert refreshed == [0, 0, 0, 0, 0, 0, 1, 0]


@pytest.mark.parametrize(("settings", "tolerance"), [({}, 0.0), ({"use_dora": True}, 10.0)], ids=["exact", "dora"])
def test_without_tolerance_or_product_every_layer_is_taken_exactly(settings: dict, tolerance: float) -> None:
    model = with_lora(tiny_llama(), **settings)
    regularizer = attached(model, refresh=2, tolerance=tolerance)
    counts = []
    for t in range(3):
        with regularizer.step(t):
            pass
        counts.append(regularizer.metrics()["norms_refreshed"])
    layers = regularizer.metrics()["perturbed_layers"]
    assert counts == [layers, 0, layers]
    expected = {
        name: model.get_submodule(name).lora_magnitude_vector["default"].weight.double() if settings else norms
        for name, norms in true_norms(model).items()
    }
    state = regularizer.state_dict()
    assert all(torch.allclose(state[f"{n}.norms"].double().sqrt(), e, rtol=1e-6) for n, e in expected.items())


# --- loss scaling -----------------------------------------------------------------------------------------------------


def test_noise_scales_are_the_same_under_a_loss_scaler() -> None:
    """GradScaler from 2¹⁶ with growth at every third step and one step of infinite loss."""

    def run(scaled: bool) -> tuple[list[Tensor], list[float], dict[str, float]]:
        model = with_lora(tiny_llama())
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3, enabled=scaled)
        regularizer = attached(model, refresh=1, ema=0.5)
        sigmas, scales = [], []
        for t in range(9):
            scales.append(scaler.get_scale())
            with regularizer.step(t, loss_scale=scaler.get_scale()):
                sigmas.append(
                    torch.cat([b.noise_out.norm(dim=1) for group in regularizer._groups for b in group.branches])
                )
                loss = loss_of(model, tokens(seed=t)) * (float("inf") if t == 4 else 1.0)
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            if scaled or t != 4:
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return sigmas, scales, regularizer.metrics()

    plain, _, metrics = run(False)
    scaled, scales, scaled_metrics = run(True)
    assert scales[0] == 2.0**16 and max(scales) > 2.0**16 and scales[5] < scales[4]
    for one, other in zip(plain, scaled, strict=True):
        assert torch.allclose(one, other, rtol=1e-5)
    assert not torch.allclose(plain[1], plain[0], rtol=0.01)
    assert metrics["sketches"] == scaled_metrics["sketches"] == 8 and scaled_metrics["sketches_skipped"] == 1


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"normalize": "model", "mode": "paper"}, r"regularizer\.normalize: model.*mode: paper.*normalize: layer"),
        ({"control": "shuffled", "beta": 0.0}, r"regularizer\.control: shuffled.*beta: 0.*control: none"),
    ],
)
def test_settings_that_cannot_go_together_are_refused(settings: dict, words: str) -> None:
    with pytest.raises(RegularizerError, match=words):
        build(GGPO(**settings))
