"""The neighbourhood of the weights, against dense Hessians and weights that really move."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flatshift.regularizers.layers.sites import find_lora_sites
from flatshift.regularizers.sharpness.measures import Estimate, expected_rise, standard_error
from tests.support.regularizer_models import base_weights, densely_perturbed
from tests.support.sharpness_models import IDS, SPACES, adapted, both_spaces, gpt2, hessian_of, loss_of, objective, tiny


def expected_curvature_rise(model: Any, kind: str, sigma: float) -> float:
    """½ Σ σ²|w_i|²/n H_ij,ij over the rows of a space's weights."""
    rows = []
    if kind == "adapter":
        weights = [p.detach() for n, p in model.named_parameters() if "lora_A" in n or "lora_B" in n]
    else:
        weights = [adapted(model, name) for name in base_weights(model)]
    for weight in weights:
        power = weight.square().sum(1, keepdim=True) / weight.shape[1]
        rows.append(power.expand_as(weight).reshape(-1))
    return float(0.5 * sigma**2 * (torch.cat(rows) * hessian_of(kind).diagonal()).sum())


def flat(direction: Any) -> Tensor:
    """A drawn direction as a dense vector (N,)."""
    return direction if isinstance(direction, Tensor) else torch.cat([(u @ v.T).reshape(-1) for v, u in direction])


@both_spaces
def test_mean_rise_is_half_the_weighted_trace_at_small_noise(kind: str) -> None:
    model, sigma, draws = tiny(), 0.003, 300
    space, loss = SPACES[kind](model), objective(model)
    (found,) = expected_rise(space, loss, [sigma], base=loss.value(), draws=draws, seed=1)
    directions = [flat(space.draw(1, "noise", index, exact=False)) for index in range(draws)]
    quadratic = [float(0.5 * sigma**2 * d @ hessian_of(kind) @ d) for d in directions]
    assert found.value == pytest.approx(Estimate.mean(quadratic, 0.95).value, rel=1e-3)  # draw by draw
    assert found.high - found.value == pytest.approx(1.968 * standard_error(quadratic), rel=1e-2)
    exact = expected_curvature_rise(model, kind, sigma)
    assert abs(found.value - exact) < 3 * standard_error(quadratic) < abs(exact)
    assert found.n == draws


@both_spaces
@pytest.mark.parametrize("make", [tiny, gpt2], ids=["linear", "conv1d"])
def test_weights_are_moved_by_what_is_said(kind: str, make: Callable[[], Any]) -> None:
    """Losses and gradients at w + vector against a copy whose weights really are there."""
    model = make()
    space, loss = SPACES[kind](model), objective(model)
    first, second = (space.draw(5, "slice", i, exact=False) for i in (0, 1))
    value = space.value_along(loss, [(0.3, first), (-0.2, second)])
    at = torch.randn(space.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 0.02
    moved_loss, moved_gradient = space.gradient(loss, at)
    twin = copy.deepcopy(model).eval()
    if kind == "adapter":
        parameters = [p for n, p in twin.named_parameters() if "lora_" in n]
        twin_gradients, dense = _moved_twin(parameters, at, 0.3 * first - 0.2 * second, twin)
    else:
        sites = find_lora_sites(model)[0]
        noise = {
            site.name: 0.3 * a[1] @ a[0].T - 0.2 * b[1] @ b[0].T
            for site, a, b in zip(sites, first, second, strict=True)
        }
        dense = float(loss_of(densely_perturbed(model, noise).eval(), IDS))
        parts = at.split([site.rows * site.columns for site in sites])
        whole = {s.name: part.view(s.rows, s.columns) for s, part in zip(sites, parts, strict=True)}
        twin = densely_perturbed(model, whole).eval()
        weights = base_weights(twin)
        for weight in weights.values():
            weight.requires_grad_()
        grads = torch.autograd.grad(loss_of(twin, IDS), list(weights.values()))
        stored = [g.T if site.transposed else g for g, site in zip(grads, sites, strict=True)]
        twin_gradients = torch.cat([g.reshape(-1) for g in stored])
    assert value == pytest.approx(dense, rel=1e-12)
    assert abs(value - loss.value()) > 1e-4
    assert moved_loss == pytest.approx(float(loss_of(twin, IDS).detach()), rel=1e-12)
    assert torch.allclose(moved_gradient, twin_gradients, rtol=1e-8, atol=1e-13)
    assert space.value(loss, at) == pytest.approx(moved_loss, rel=1e-12)


def _moved_twin(parameters: list[Any], at: Tensor, along: Tensor, twin: Any) -> tuple[Tensor, float]:
    """The loss at θ + `along`; then leaves θ + `at` in the twin and gives the gradient there."""
    before = [p.detach().clone() for p in parameters]

    def put(vector: Tensor) -> None:
        for p, b, part in zip(parameters, before, vector.split([p.numel() for p in parameters]), strict=True):
            p.data = b + part.view(p.shape)

    put(along)
    dense = float(loss_of(twin, IDS).detach())
    put(at)
    grads = torch.autograd.grad(loss_of(twin, IDS), parameters)
    return torch.cat([g.reshape(-1) for g in grads]), dense


@both_spaces
def test_rows_of_a_slice_are_as_long_as_the_weights_rows(kind: str) -> None:
    model = tiny()
    space = SPACES[kind](model)
    for exact in (True, False):
        if kind == "full":
            sites = find_lora_sites(model)[0]
            drawn = [space.draw(2, "slice", i, exact=exact) for i in range(40)]
            pairs = [
                (torch.stack([(d[at][1] @ d[at][0].T).square().sum(1) for d in drawn]), adapted(model, site.name))
                for at, site in enumerate(sites)
            ]
        else:
            weights = [p.detach() for n, p in model.named_parameters() if "lora_" in n]
            drawn = [space.draw(2, "slice", i, exact=exact).split([w.numel() for w in weights]) for i in range(40)]
            pairs = [
                (torch.stack([d[at].view(w.shape).square().sum(1) for d in drawn]), w) for at, w in enumerate(weights)
            ]
        for squares, weight in pairs:
            wanted = weight.square().sum(1)
            if exact:
                assert torch.allclose(squares, wanted.expand_as(squares), rtol=1e-10)
            else:
                assert float((squares.mean(0) / wanted).mean()) == pytest.approx(1, abs=0.35)
                assert not torch.allclose(squares, wanted.expand_as(squares), rtol=1e-3)
