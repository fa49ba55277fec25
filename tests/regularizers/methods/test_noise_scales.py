"""How noise power is shared: sums that must not depend on β, and the literal form."""

import pytest
import torch
from torch import Tensor

from flatshift.regularizers.config import default_rank
from flatshift.regularizers.methods.noise_scales import (
    debias_ema,
    gradient_share_scale,
    layer_means,
    power_shares,
    scheduled_sigma,
    unscaled_gradient_share,
)

SIZES = [5, 8, 3]
OWNER = torch.repeat_interleave(torch.tensor(SIZES))
GENERATOR = torch.Generator().manual_seed(0)
NORMS = torch.rand(16, generator=GENERATOR, dtype=torch.float64) + 0.5
V = 1e-9 * torch.rand(16, generator=GENERATOR, dtype=torch.float64)
LAYER = slice(5, 13)


def shares(beta: float, mode: str = "relative", v: Tensor = V, *, model: bool = False) -> tuple[Tensor, Tensor]:
    form = unscaled_gradient_share(NORMS, v, mode)
    if model:
        level = gradient_share_scale(NORMS.sum(), form.sum()).expand(16)
    else:
        level = gradient_share_scale(layer_means(NORMS, SIZES), layer_means(form, SIZES))[OWNER]
    return power_shares(NORMS, form, level, beta=beta, mode=mode)


@pytest.mark.parametrize("mode", ["relative", "relative-product"])
@pytest.mark.parametrize("beta", [0.0, 0.1, 1.0, 30.0])
def test_power_of_every_layer_is_independent_of_beta(beta: float, mode: str) -> None:
    for guided, plain in zip(shares(beta, mode)[0].split(SIZES), NORMS.split(SIZES), strict=True):
        assert float(guided.sum()) == pytest.approx(float(plain.sum()), rel=1e-12)


@pytest.mark.parametrize("mode", ["relative", "relative-product"])
def test_over_the_model_power_moves_between_layers_and_none_is_made(mode: str) -> None:
    v = V.clone()
    v[LAYER] *= 100
    guided = shares(1.0, mode, v, model=True)[0]
    assert float(guided.sum()) == pytest.approx(float(NORMS.sum()), rel=1e-12)
    assert float(guided[LAYER].sum()) > 1.3 * float(NORMS[LAYER].sum())
    assert float(guided[:5].sum()) < 0.7 * float(NORMS[:5].sum())


def test_relative_is_the_formula() -> None:
    guided, gradient = shares(1.0)
    expected = (NORMS[LAYER] + V[LAYER] * NORMS[LAYER].mean() / V[LAYER].mean()) / 2
    assert torch.allclose(guided[LAYER], expected, rtol=1e-12)
    assert float(gradient.sum() / guided.sum()) == pytest.approx(0.5)


def test_relative_product_is_the_formula() -> None:
    norms, v = NORMS[LAYER], V[LAYER]
    guided, gradient = shares(2.0, "relative-product")
    expected = norms * (1 + 2 * v / ((norms * v).sum() / norms.sum())) / 3
    assert torch.allclose(guided[LAYER], expected, rtol=1e-12)
    assert float(gradient.sum() / guided.sum()) == pytest.approx(2 / 3)
    assert not torch.allclose(guided, shares(2.0)[0], rtol=1e-3)


@pytest.mark.parametrize("mode", ["relative", "relative-product"])
def test_relative_does_not_see_the_unit_of_the_loss(mode: str) -> None:
    assert torch.allclose(shares(1.0, mode)[0], shares(1.0, mode, v=V * 1e6)[0], rtol=1e-12)


@pytest.mark.parametrize("mode", ["relative", "relative-product"])
def test_relative_with_no_gradient_yet_uses_weights_alone(mode: str) -> None:
    v = V.clone()
    v[LAYER] = 0
    guided, gradient = shares(1.0, mode, v=v)
    assert torch.equal(guided[LAYER], NORMS[LAYER]) and not gradient[LAYER].any()
    assert not torch.equal(guided[:5], NORMS[:5])
    assert torch.equal(shares(1.0, mode, v=0 * v, model=True)[0], NORMS)


@pytest.mark.parametrize("mode", ["relative", "relative-product"])
def test_a_gradient_that_has_faded_away_scales_nothing(mode: str) -> None:
    assert torch.equal(shares(1.0, mode, v=V * 1e-36)[0], NORMS)


def test_paper_is_the_literal_sum() -> None:
    guided, gradient = shares(0.01, "paper")
    assert torch.equal(guided, NORMS + 0.01 * V) and torch.equal(gradient, 0.01 * V)


def test_bias_correction_makes_a_constant_its_own_average() -> None:
    q, ema, updates = torch.tensor([2.0, 5.0]), torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    assert not debias_ema(ema, updates, 0.95).any()
    for _ in range(3):
        ema, updates = 0.95 * ema + 0.05 * q, updates + 1
        assert torch.allclose(debias_ema(ema, updates, 0.95), q, rtol=1e-5)


@pytest.mark.parametrize(
    ("shape", "rank"),
    [((64, 64), 8), ((256, 4096), 8), ((2048, 2048), 8), ((4096, 4096), 16), ((11008, 8192), 32), ((65536, 65536), 32)],
)
def test_default_rank(shape: tuple[int, int], rank: int) -> None:
    assert default_rank(*shape) == rank


def test_schedules_ramp_from_zero() -> None:
    assert scheduled_sigma(0.2, "constant", 0, 0) == 0.2
    for schedule in ("linear", "cosine"):
        values = [scheduled_sigma(0.2, schedule, t, 10) for t in range(12)]
        assert values[0] == 0 and values[5] == pytest.approx(0.1) and values[10] == values[11] == 0.2
        assert values == sorted(values)
