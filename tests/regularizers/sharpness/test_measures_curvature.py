"""Eigenvalues and trace, against dense Hessians by double backward and matrices that are known."""

import copy
import math

import pytest
import torch

from flatshift.regularizers.sharpness import Sharpness, measure
from flatshift.regularizers.sharpness.measures import (
    Estimate,
    Hessian,
    hutchinson,
    lanczos,
    standard_error,
)
from tests.support.sharpness_models import IDS, SPACES, both_spaces, calibrated, hessian_of, loss_of, objective, tiny


@both_spaces
def test_the_ends_of_the_spectrum_and_the_vector(kind: str) -> None:
    product, space = calibrated(kind)
    values, vectors = torch.linalg.eigh(hessian_of(kind))
    assert space.size == len(values)
    found = lanczos(product, space.signs(0, "start", 0), steps=80, tolerance=1e-7)
    assert found.largest.n < 80 and product.error < 1e-4
    assert found.largest.value == pytest.approx(float(values[-1]), rel=1e-5)
    assert float(values[-1]) <= found.largest.high + 1e-5
    assert found.smallest.value == pytest.approx(float(values[0]), abs=2e-2 * float(values[-1]))
    assert abs(float(found.vector @ vectors[:, -1])) == pytest.approx(1, abs=1e-5)


def test_lanczos_on_a_known_matrix_finds_both_ends_and_stops_when_the_space_is_used_up() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.linalg.qr(torch.randn(30, 30, generator=generator, dtype=torch.float64))[0]
    values = torch.linspace(-3, 7, 30, dtype=torch.float64)
    matrix = q @ torch.diag(values) @ q.T
    start = torch.randn(30, generator=generator, dtype=torch.float64)
    found = lanczos(lambda v: matrix @ v, start, steps=99, tolerance=1e-12)
    assert found.largest.n <= 30
    assert (found.smallest.value, found.largest.value) == pytest.approx((-3, 7), rel=1e-10)
    early = lanczos(lambda v: matrix @ v, start, steps=5, tolerance=1e-12).largest
    assert early.n == 5 and early.value < 7  # unfinished: some eigenvalue is in the interval
    assert bool(((values >= early.low) & (values <= early.high)).any()) and early.high - early.low > 0.1


@both_spaces
def test_the_error_of_a_product_falls_with_the_square_of_the_step(kind: str) -> None:
    model = tiny()
    space, loss = SPACES[kind](model), objective(model)
    v = space.signs(3, "trace", 0)
    exact = hessian_of(kind) @ v
    lengths = [0.04 * space.weight_norm / 2**i for i in range(3)]
    products = [Hessian(space, loss, length) for length in lengths]
    errors = [float((product(v) - exact).norm() / exact.norm()) for product in products]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.1)
    assert products[2].check(v) == pytest.approx(3 * errors[2], rel=0.1)  # Richardson: T(2h) − T(h) = 3 T(h)
    assert products[2].error >= errors[2]


@both_spaces
def test_trace(kind: str) -> None:
    product, space = calibrated(kind)
    exact = float(hessian_of(kind).trace())
    basis = torch.eye(space.size, dtype=torch.float64) * math.sqrt(space.size)
    assert hutchinson(product, basis.unbind()).value == pytest.approx(exact, rel=1e-5)
    draws = [hutchinson(product, [space.signs(0, "trace", i)]).value for i in range(120)]
    found = Estimate.mean(draws, 0.95)
    assert abs(found.value - exact) < 3 * standard_error(draws)
    h = hessian_of(kind)
    spread = math.sqrt(2 * float(h.square().sum() - h.diagonal().square().sum()) / 120)  # of zᵀHz for random signs
    assert standard_error(draws) == pytest.approx(spread, rel=0.2)
    assert (found.n, found.low < found.value < found.high) == (120, True)


def test_single_precision_agrees_with_double() -> None:
    wide = tiny()
    narrow = copy.deepcopy(wide).float()
    values = []
    for model in (wide, narrow):
        found = measure(
            model,
            lambda m=model: loss_of(m, IDS),
            Sharpness(lanczos=30, tolerance=1e-3, probes=8, lines=0, plane_points=0),
        )
        for kind in SPACES:
            assert found.about[kind]["difference_error"] < 5e-3
        values.append({f"{s}.{k}": e.value for s, es in found.measures.items() for k, e in es.items()})
    for name, value in values[0].items():
        assert values[1][name] == pytest.approx(value, rel=2e-2, abs=2e-6), name


def test_estimates() -> None:
    found = Estimate.mean([1.0, 2.0, 3.0], 0.95)
    assert found.value == 2 and found.high == pytest.approx(2 + 4.30265 / math.sqrt(3), rel=1e-5)  # t.975 at 2 df
    assert Estimate.mean([1.0], 0.95) == Estimate(1.0, None, None, 1)
    assert Estimate.mean([1.0, math.inf], 0.95).as_dict() == {"value": None, "low": None, "high": None, "n": 2}
