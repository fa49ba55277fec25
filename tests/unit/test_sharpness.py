"""The sharpness instruments against dense Hessians by double backward, closed forms, and weights that really move."""

import copy
import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from regularizers.errors import RegularizerError
from regularizers.layers import find_lora_sites
from regularizers.sharpness import (
    AdapterSpace,
    Estimate,
    FullSpace,
    Hessian,
    Objective,
    Sharpness,
    Space,
    ascent_rise,
    expected_rise,
    hutchinson,
    lanczos,
    line,
    measure,
    plane,
    power_iteration,
)
from regularizers.sharpness.estimates import standard_error
from tests.regularizer_models import (
    base_weights,
    densely_perturbed,
    frozen_checksums,
    tiny_gpt2,
    tiny_llama,
    tokens,
    with_lora,
)

IDS = tokens(6, 8)
SMALL = Sharpness(
    lanczos=4, probes=2, sigmas=(0.05,), draws=2, rhos=(0.05,), ascent=2, lines=1, line_points=3, plane_points=3
)


class Toy(nn.Module):
    """A classifier with fused attention, all of it in float64 (transformers computes norms and losses in float32)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 8)
        self.q, self.v, self.up, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 12), nn.Linear(12, 5)
        self.drop = nn.Dropout(0.4)

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        x = self.embed(input_ids)
        x = x + F.scaled_dot_product_attention(self.q(x), x, self.v(x))
        return self.head(self.drop(torch.tanh(self.up(x)).mean(1)))


def tiny(**settings: Any) -> Any:
    """Few enough weights for a dense Hessian in both spaces."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        backbone = Toy().double().requires_grad_(False)
    chosen = {"r": 2, "target_modules": ["q", "v", "up"], "task_type": None} | settings
    model = with_lora(backbone, **chosen)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data *= 3
    return model


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """Mean cross entropy of the toy, or the next-token loss of a language model."""
    logits = model(input_ids=ids)
    if isinstance(logits, Tensor):
        return F.cross_entropy(logits, ids.sum(1) % 5)
    return F.cross_entropy(logits.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def gpt2(**settings: Any) -> Any:
    return with_lora(tiny_gpt2(dtype=torch.float64), fan_in_fan_out=True, **settings)


def objective(model: Any) -> Objective:
    return Objective(model, lambda: loss_of(model, IDS))


def dense_loss(model: Any, kind: str) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The loss as a function of all weights of a space in one vector, by replacing parameters; and that vector."""
    if kind == "adapter":
        moved = {n: p for n, p in model.named_parameters() if "lora_A" in n or "lora_B" in n}
    else:
        moved = {n: p for n, p in model.named_parameters() if n.endswith("base_layer.weight")}
    shapes = [p.shape for p in moved.values()]

    def loss(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes])
        weights = {n: part.view(shape) for n, part, shape in zip(moved, parts, shapes, strict=True)}
        logits = torch.func.functional_call(model, weights, kwargs={"input_ids": IDS})
        return F.cross_entropy(logits, IDS.sum(1) % 5)

    return loss, torch.cat([p.detach().reshape(-1) for p in moved.values()])


@cache
def hessian_of(kind: str) -> Tensor:
    """Dense, by double backward through the math kernel of attention."""
    loss, at = dense_loss(tiny().eval(), kind)
    with sdpa_kernel(SDPBackend.MATH):
        return torch.autograd.functional.hessian(loss, at).detach()


SPACES: dict[str, Callable[[Any], Space]] = {"adapter": AdapterSpace, "full": FullSpace}
both_spaces = pytest.mark.parametrize("kind", SPACES)


def calibrated(kind: str) -> tuple[Hessian, Space]:
    model = tiny()
    space = SPACES[kind](model)
    return Hessian.calibrated(space, objective(model), space.signs(0, "start", 0)), space


# --- curvature ------------------------------------------------------------------------------------------------------


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
    largest = max(values, key=abs)
    power, vector = power_iteration(product, space.signs(0, "start", 0), steps=400, tolerance=1e-4)
    assert power.value == pytest.approx(float(largest), rel=1e-4)
    assert float(vector.norm()) == pytest.approx(1)


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


# --- neighbourhood --------------------------------------------------------------------------------------------------


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


def adapted(model: Any, name: str) -> Tensor:
    """W' of a layer, dense."""
    layer = model.get_submodule(name)
    stored = layer.base_layer.weight.detach()
    w = stored.T if type(layer.base_layer).__name__ == "Conv1D" else stored
    return w + layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight


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


class Quadratic(Space):
    """L(x) = b·x + ½ xᵀHx around x = 0, in place of a model."""

    name, dtype, device, weight_norm, resolution = "adapter", torch.float64, torch.device("cpu"), 1.0, 1e-16

    def __init__(self, h: Tensor, b: Tensor) -> None:
        self.h, self.b, self.size = h, b, len(b)

    def gradient(self, objective: Any, at: Tensor | None = None) -> tuple[float, Tensor]:
        at = torch.zeros(self.size, dtype=self.dtype) if at is None else at
        return self.value(objective, at), self.b + self.h @ at

    def value(self, objective: Any, at: Tensor) -> float:
        return float(self.b @ at + 0.5 * at @ self.h @ at)

    def draw(self, seed: int, purpose: Any, index: int, *, exact: bool) -> Tensor:
        return self.signs(seed, purpose, index)

    def value_along(self, objective: Any, parts: Any) -> float:
        return self.value(objective, sum(c * d for c, d in parts))


def rises(space: Quadratic, rho: float, steps: int) -> tuple[float, float]:
    one, several = ascent_rise(space, Any, rho, base=0.0, gradient=space.gradient(None)[1], steps=steps, seed=0)
    return one.value, several.value


def test_highest_rise_in_a_ball_of_a_quadratic() -> None:
    b = torch.tensor([0.6, 0.8, 0.0], dtype=torch.float64)
    sphere = Quadratic(2.0 * torch.eye(3, dtype=torch.float64), b)
    assert rises(sphere, 0.5, 1) == pytest.approx((0.5 + 0.25,) * 2)  # ρ|b| + ½ h ρ²
    assert rises(sphere, 0.5, 6) == pytest.approx((0.75, 0.75))
    # an ellipse, whose maximum is not where the gradient points: ε = (λ − H)⁻¹ b with |ε| = ρ, λ > 5
    h, rho = torch.diag(torch.tensor([5.0, 1.0, 0.2], dtype=torch.float64)), 0.7
    low, high = 5.0 + 1e-9, 50.0
    for _ in range(200):
        middle = (low + high) / 2
        too_long = (b / (middle - h.diagonal())).norm() > rho
        low, high = (middle, high) if too_long else (low, middle)
    best = Quadratic(h, b).value(None, b / (low - h.diagonal()))
    one, several = rises(Quadratic(h, b), rho, 30)
    assert one < 0.9 * best and several == pytest.approx(best, rel=1e-4) and several <= best + 1e-9
    # no gradient at all: a random start, and the largest eigenvalue decides
    assert rises(Quadratic(h, 0 * b), rho, 60)[1] == pytest.approx(0.5 * 5 * rho**2, rel=1e-4)
    # a maximum: one step falls, and the best of the ball is its middle
    one, several = rises(Quadratic(-h, 0 * b), rho, 4)
    assert one < 0 and several == 0


def test_slices_of_a_quadratic() -> None:
    space = Quadratic(
        torch.diag(torch.tensor([5.0, 1.0, -0.2], dtype=torch.float64)), torch.zeros(3, dtype=torch.float64)
    )
    found = line(space, Any, base=0.0, points=5, reach=0.4, directions=2, seed=0)
    assert found.at == pytest.approx([-0.4, -0.2, 0, 0.2, 0.4]) and found.at[2] == 0
    for losses in found.losses:
        assert losses == pytest.approx([0.5 * 5.8 * a * a for a in found.at])
        assert losses == losses[::-1]
    flat = plane(space, Any, base=0.0, points=5, reach=0.4, seed=0)
    assert flat.losses[2] == found.losses[0]
    assert [row[2] for row in flat.losses] == found.losses[1]
    tilted = Quadratic(space.h, torch.tensor([1.0, 0, 0], dtype=torch.float64))
    corner = plane(tilted, Any, base=0.0, points=3, reach=1.0, seed=0).losses[0][2]  # a = 1, b = −1
    first, second = (tilted.draw(0, "slice", i, exact=True) for i in (0, 1))
    assert corner == pytest.approx(tilted.value(None, first - second))


# --- the model is left alone ----------------------------------------------------------------------------------------


def everything(model: Any) -> tuple[Any, ...]:
    """All that could be touched, but the global generator's state is compared on its own."""
    return (
        frozen_checksums(model),
        {n: p.detach().clone().view(torch.uint8).tolist() for n, p in model.named_parameters() if p.requires_grad},
        {n: p.grad is None for n, p in model.named_parameters()},
        {n: p.requires_grad for n, p in model.named_parameters()},
        {n: (m.training, "forward" in vars(m), len(m._forward_hooks)) for n, m in model.named_modules()},
    )


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"lora_dropout": 0.5}], ids=["lora", "dora", "dropout"])
def test_measuring_leaves_no_trace(settings: dict[str, Any]) -> None:
    model = tiny(**settings)
    model.get_submodule("base_model.model.head").eval()  # a mode of its own stays
    before, generator = everything(model), torch.get_rng_state()
    found = measure(model, lambda: loss_of(model, IDS), SMALL, seed=3)
    assert everything(model) == before
    assert torch.equal(torch.get_rng_state(), generator)
    assert set(found.measures) == {"adapter", "full"}
    assert all(math.isfinite(e.value) for es in found.measures.values() for e in es.values())
    again = measure(model, lambda: loss_of(model, IDS), SMALL, seed=3)
    assert again.as_dict()["measures"] == found.as_dict()["measures"]  # dropout is off, draws are fixed
    other = measure(model, lambda: loss_of(model, IDS), SMALL, seed=4)
    for kind in SPACES:
        assert other.measures[kind]["trace"].value != found.measures[kind]["trace"].value


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@both_spaces
def test_an_exception_leaves_no_trace(kind: Any, error: type[BaseException]) -> None:
    model = tiny()
    before = everything(model)
    settings = Sharpness(spaces=(kind,), lanczos=2, probes=1, sigmas=(0.05,), draws=1, rhos=(0.1,), plane_points=0)
    calls: list[int] = []
    for at in (4, 18, 24, 28):  # in a gradient, the noise, the ascent, a slice
        calls.clear()

        def loss(at: int = at) -> Iterator[Tensor]:
            calls.append(1)
            yield 0.5 * loss_of(model, IDS)
            if len(calls) == at:
                raise error
            yield 0.5 * loss_of(model, IDS)

        with pytest.raises(error):
            measure(model, loss, settings)
        assert len(calls) == at
        assert everything(model) == before


def test_terms_of_a_loss_are_its_sum_and_progress_stays_within_what_was_announced() -> None:
    model = tiny()
    told: list[tuple[int, str]] = []
    halves = [IDS[:2], IDS[2:]]

    def terms() -> Iterator[Tensor]:
        for rows in halves:
            yield loss_of(model, rows) * len(rows) / len(IDS)

    parts = measure(model, terms, SMALL, progress=lambda passes, what: told.append((passes, what)))
    whole = measure(model, lambda: loss_of(model, IDS), SMALL)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-12)
    for kind in SPACES:
        for name, each in whole.measures[kind].items():
            assert parts.measures[kind][name].value == pytest.approx(each.value, rel=1e-4, abs=1e-10), name
    counts = [passes for passes, _ in told]
    assert counts == sorted(counts) and 0.8 * SMALL.passes() < counts[-1] <= SMALL.passes()
    assert {"adapter: λ_max", "full: plane"} <= {what for _, what in told}


def test_what_is_only_asked_for_is_measured() -> None:
    model = tiny()
    settings = Sharpness(
        spaces=("adapter",), lanczos=0, probes=0, sigmas=(), rhos=(0.1,), ascent=1, lines=0, plane_points=0
    )
    found = measure(model, lambda: loss_of(model, IDS), settings)
    assert list(found.measures) == ["adapter"] and list(found.measures["adapter"]) == ["sam_rho_0.1"]
    assert not found.lines and not found.planes
    gradient = AdapterSpace(model).gradient(objective(model))[1]
    assert found.about["adapter"]["gradient_norm"] == pytest.approx(float(gradient.norm()))
    assert found.measures["adapter"]["sam_rho_0.1"].value == pytest.approx(0.1 * float(gradient.norm()), rel=0.5)


def test_a_head_trained_whole_is_held_fixed() -> None:
    model = tiny(modules_to_save=["head"])
    assert AdapterSpace(model).size == AdapterSpace(tiny()).size == 2 * (8 + 8) * 2 + 2 * (8 + 12)
    assert FullSpace(model).size == 8 * 8 * 2 + 12 * 8


# --- mistakes -------------------------------------------------------------------------------------------------------


@both_spaces
def test_models_that_cannot_be_measured(kind: str) -> None:
    with pytest.raises(RegularizerError, match="LoRA"):
        SPACES[kind](tiny_llama())
    assert SPACES[kind](with_lora(tiny_llama())).size > 0
    merged = tiny()
    merged.merge_adapter()
    with pytest.raises(RegularizerError, match=r"model.q is merged .*unmerge_adapter"):
        SPACES[kind](merged)


def test_losses_that_cannot_be_measured() -> None:
    model = tiny()
    before = everything(model)
    with pytest.raises(RegularizerError, match="loss at the weights themselves is nan"):
        measure(model, lambda: loss_of(model, IDS) * math.nan, SMALL)
    with pytest.raises(RegularizerError, match=r"no gradient .* switch the adapters on"), model.disable_adapter():
        measure(model, lambda: loss_of(model, IDS), Sharpness(spaces=("full",)))
    drawn = iter(range(100))
    with pytest.raises(RegularizerError, match=r"at one time .* at another.*fixed batches"):
        measure(model, lambda: loss_of(model, tokens(6, 8, seed=next(drawn))), SMALL)
    assert everything(model) == before


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"sigmas": (0.1, -0.1)}, r"sharpness\.sigmas.*numbers > 0"),
        ({"rhos": (math.nan,)}, r"sharpness\.rhos"),
        ({"rhos": (0.1, 0.1)}, "different"),
        ({"spaces": ("adapters",)}, r"sharpness\.spaces.*`adapter`, `full`"),
        ({"spaces": ()}, r"sharpness\.spaces"),
        ({"draws": 0}, r"sharpness\.draws: 0 is not a number ≥ 1"),
        ({"line_points": 4}, "odd"),
        ({"plane_points": 1}, "0 or an odd number ≥ 3"),
        ({"reach": 0.0}, "reach"),
        ({"confidence": 1.0}, "confidence"),
    ],
)
def test_settings_without_a_meaning(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RegularizerError, match=message):
        Sharpness(**settings)


def test_estimates() -> None:
    found = Estimate.mean([1.0, 2.0, 3.0], 0.95)
    assert found.value == 2 and found.high == pytest.approx(2 + 4.30265 / math.sqrt(3), rel=1e-5)  # t.975 at 2 df
    assert Estimate.mean([1.0], 0.95) == Estimate(1.0, None, None, 1)
    assert Estimate.mean([1.0, math.inf], 0.95).as_dict() == {"value": None, "low": None, "high": None, "n": 2}
