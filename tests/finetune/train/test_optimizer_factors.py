"""Optimizers of pairs of factors: the steps of PEFT, those of the paper, and of one size at any rank; resumption."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from peft.optimizers.riemannian import create_riemannian_optimizer

from flatshift.finetune.adapters.adapter import attach_adapter, trainable
from flatshift.finetune.config import Adapter, Optimizer, Train
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.planner.memory import optimizer_bytes, plan_lines
from flatshift.finetune.tasks import Classify, LanguageModel
from flatshift.finetune.train import optimizer as module
from flatshift.finetune.train.optimizer import AdapterOptimizer, find_factor_pairs
from flatshift.regularizers import GGPO, MGPO, build
from tests.finetune.train.test_optimizer import advance, gradients
from tests.support.finetune_models import RandomBatches, save_backbone
from tests.support.stage_runs import run_or_stop

DAMPING = 1e-2


def parameters(rank=4, *, m=24, n=40, scale=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    shapes = {"x.lora_A.weight": (rank, n), "x.lora_B.weight": (m, rank), "head.weight": (3, n), "head.bias": (3,)}
    return {
        name: torch.nn.Parameter((torch.randn(shape, generator=generator) * scale).to(dtype))
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_riemannian_takes_the_steps_of_peft(tmp_path, decay):
    task = Classify(labels=("a", "b"))
    model = load_backbone(save_backbone("llama", tmp_path, classes=2), task=task, num_labels=2)
    model = attach_adapter(model, Adapter(rank=4), task=task, seed=0)
    other = copy.deepcopy(model)
    ours = AdapterOptimizer(trainable(model), Optimizer(kind="riemannian", weight_decay=decay))
    theirs = create_riemannian_optimizer(other, torch.optim.AdamW, lr=1e-2, reg=DAMPING, weight_decay=decay)
    start = {name: p.detach().clone() for name, p in trainable(model).items()}
    assert len(ours.pairs) > 1 and len(start) > 2 * len(ours.pairs)  # and a head
    for step in range(4):
        for name, grad in gradients(step, {n: p.shape for n, p in trainable(other).items()}).items():
            trainable(other)[name].grad = grad
        theirs.step()
    advance(ours, 0, 4)
    for name, parameter in trainable(model).items():
        moved, expected = parameter - start[name], trainable(other)[name] - start[name]
        assert (moved - expected).norm() < 1e-4 * expected.norm(), name


def power(gram, exponent):
    values, vectors = torch.linalg.eigh(gram + DAMPING * torch.eye(len(gram), dtype=gram.dtype))
    return vectors @ torch.diag(values**exponent) @ vectors.T


def exact_polar_factor(matrix):
    u, _, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    return (u @ vh).to(matrix.dtype)


def naive_lora_muon(values, steps, *, rate, decay, beta=0.9):
    """The paper's algorithm 1 with δ, in float64; its η makes a half lr/10 in root mean square."""
    a, b = (values[f"x.lora_{side}.weight"].detach().double() for side in "AB")
    momentum_a, momentum_b = torch.zeros_like(a), torch.zeros_like(b)
    for step in range(steps):
        found = gradients(step, {name: p.shape for name, p in values.items()})
        momentum_a = beta * momentum_a + (1 - beta) * found["x.lora_A.weight"].double()
        momentum_b = beta * momentum_b + (1 - beta) * found["x.lora_B.weight"].double()
        root_a, root_b = power(a @ a.T, -0.5), power(b.T @ b, -0.5)
        half = rate * 0.1 * math.sqrt(len(b) * a.shape[1] / len(a))
        step_a = -half * root_b @ exact_polar_factor(root_b @ momentum_a)
        step_b = -half * exact_polar_factor(momentum_b @ root_a) @ root_a
        shrink = math.sqrt(1 - decay * rate)
        a, b = shrink * a + step_a / shrink, shrink * b + step_b / shrink
    return {"x.lora_A.weight": a, "x.lora_B.weight": b}


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_lora_muon_takes_the_steps_of_the_paper(monkeypatch, decay):
    monkeypatch.setattr(module, "_polar_factor", exact_polar_factor)
    settings = Optimizer(kind="lora-muon", weight_decay=decay)
    ours = AdapterOptimizer(parameters(), settings)
    advance(ours, 0, 5)
    for name, expected in naive_lora_muon(parameters(), 5, rate=1e-2, decay=decay).items():
        start = parameters()[name].double()
        moved = ours.parameters[name].double() - start
        assert (moved - (expected - start)).norm() < 1e-4 * (expected - start).norm(), name
    plain = AdapterOptimizer({n: p for n, p in parameters().items() if "head" in n}, Optimizer(weight_decay=decay))
    for step in range(5):
        for name, grad in gradients(step, {n: p.shape for n, p in parameters().items()}).items():
            if name in plain.parameters:
                plain.parameters[name].grad = grad
        plain.step(1e-2)
    assert all(torch.equal(p, ours.parameters[name]) for name, p in plain.parameters.items())


def test_the_polar_factor_is_what_muon_approximates():
    matrix = torch.randn(8, 40, generator=torch.Generator().manual_seed(0))
    for each in (matrix, matrix.T):
        polar = module._polar_factor(each)
        assert torch.allclose(polar, exact_polar_factor(each), atol=1e-4)
        muon = torch.optim.Muon([torch.nn.Parameter(torch.zeros_like(each))], lr=1.0, weight_decay=0.0)
        (parameter,) = muon.param_groups[0]["params"]
        parameter.grad = each.clone()
        muon.step()
        assert torch.cosine_similarity(-parameter.detach().flatten(), polar.flatten(), dim=0) > 0.97
    assert torch.equal(module._polar_factor(torch.zeros(2, 3)), torch.zeros(2, 3))  # A's momentum while B = 0


@pytest.mark.parametrize("rank", [2, 8, 32])
def test_a_step_of_lora_muon_has_one_root_mean_square_at_every_rank(rank):
    ours = AdapterOptimizer(parameters(rank, m=64, n=96), Optimizer(kind="lora-muon", damping=1e-6))
    a, b = (ours.parameters[f"x.lora_{side}.weight"].detach().clone() for side in "AB")
    advance(ours, 0, 1, rate=1e-3)
    for product in (b @ (ours.parameters["x.lora_A.weight"] - a), (ours.parameters["x.lora_B.weight"] - b) @ a):
        values = torch.linalg.svdvals(product)[:rank]
        assert values.max() < 1.01 * values.min()
        assert float(product.detach().square().mean().sqrt()) == pytest.approx(1e-4, rel=0.01)


def test_lora_muon_takes_the_same_step_from_rescaled_factors():
    """BA is the same for (A·c, B/c), and so is its step, which AdamW's is not."""

    def change(settings, c):
        values = parameters()
        with torch.no_grad():
            values["x.lora_A.weight"].mul_(c)
            values["x.lora_B.weight"].div_(c)
        a, b = (values[f"x.lora_{side}.weight"] for side in "AB")
        before, whole = (b @ a).detach(), gradients(0, {"w": (24, 40)})["w"]
        optimizer = AdapterOptimizer({"x.lora_A.weight": a, "x.lora_B.weight": b}, settings)
        a.grad, b.grad = (b.detach().T @ whole), (whole @ a.detach().T)
        optimizer.step(1e-3)
        return (b @ a).detach() - before

    def apart(settings):
        one, other = change(settings, 1.0), change(settings, 8.0)
        return float((one - other).norm() / one.norm())

    assert apart(Optimizer(kind="lora-muon", damping=1e-6)) < 0.05 < 1 < apart(Optimizer())


def test_fixed_a_is_the_geometry_of_b():
    settings = Optimizer(kind="lora-muon", fixed=("a",))
    ours = AdapterOptimizer(parameters(), settings)
    start = parameters()
    advance(ours, 0, 2)
    assert "x.lora_A.weight" not in ours.parameters and len(ours.pairs) == 1
    assert not torch.equal(ours.parameters["x.lora_B.weight"], start["x.lora_B.weight"])
    assert torch.equal(ours.pairs[0][0], start["x.lora_A.weight"])
    stage = AdapterOptimizer({"score.weight": torch.nn.Parameter(torch.ones(2, 2))}, Optimizer(fixed=("head",)))
    stage.step(1.0)  # a pipeline's last stage may hold fixed parameters alone
    assert not stage.parameters and not any(stage.moments().values())


def test_embeddings_and_lone_factors_are_no_pairs():
    names = ("e.lora_embedding_A", "e.lora_embedding_B", "y.lora_A.weight", "z.lora_B.weight")
    assert find_factor_pairs({name: torch.zeros(2, 2) for name in names}) == []


def test_the_plan_counts_one_moment_of_factors(tmp_path):
    ours = AdapterOptimizer(parameters(), Optimizer(kind="lora-muon"))
    advance(ours, 0, 1)
    taken = sum(tensor.nbytes for of in ours.moments().values() for tensor in of.values())
    sizes = {name: p.numel() for name, p in parameters().items()}
    assert (
        optimizer_bytes(sizes, "lora-muon") == taken < optimizer_bytes(sizes, "riemannian") == 8 * sum(sizes.values())
    )
    task = LanguageModel()
    model = attach_adapter(load_backbone(save_backbone("llama", tmp_path), task=task), Adapter(), task=task, seed=0)
    lines = "\n".join(plan_lines(model, train=Train(max_length=32), optimizer=Optimizer(kind="lora-muon")))
    assert "lora-muon, one moment of factors" in lines


@pytest.mark.parametrize("kind", ["riemannian", "lora-muon"])
@pytest.mark.parametrize("regularizer", [GGPO(sigma=0.05), MGPO(rho=0.05, form="code")], ids=lambda c: c.kind)
def test_a_stage_of_a_bf16_adapter_resumes_with_the_same_bits(tmp_path, kind, regularizer):
    source, task = save_backbone("llama", tmp_path / "model"), LanguageModel()
    settings = {
        "task": task, "batches": RandomBatches(), "optimizer": Optimizer(kind=kind, clip=0.5, weight_decay=0.1),
        "train": Train(steps=8, accumulate=2, save_every=3, precision="bf16", adapter_precision="bf16"),
        "regularizer": regularizer,
    }  # fmt: skip

    def train(directory, **how):
        model = load_backbone(source, task=task, precision="bf16")
        model = attach_adapter(model, Adapter(rank=4), task=task, seed=0, dtype=torch.bfloat16)
        own = {**settings, "regularizer": build(settings["regularizer"])}
        stopped = run_or_stop(model, directory, **own, **how) is None
        return stopped, {name: p.detach().clone() for name, p in trainable(model).items()}

    _, whole = train(tmp_path / "whole")
    assert all(p.dtype == torch.bfloat16 for p in whole.values())
    assert train(tmp_path / "run", stop_at=5)[0]
    stopped, again = train(tmp_path / "run")
    assert not stopped and all(torch.equal(p, whole[name]) for name, p in again.items())


@pytest.mark.parametrize("kind", ["riemannian", "lora-muon"])
def test_no_diagonal_preconditioner(kind):
    ours = AdapterOptimizer(parameters(), Optimizer(kind=kind))
    advance(ours, 0, 1)
    assert ours.preconditioner() == {} == ours.first_preconditioner({n: p.detach() for n, p in parameters().items()})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "adamw", "damping": 0.1}, "damping is of riemannian and lora-muon; kind is adamw"),
        ({"kind": "lora-muon", "damping": 0.0}, "damping must be above 0, got 0"),
        ({"kind": "lora-muon", "lora_plus": 4.0}, "lora_plus: lora-muon gives A and B half of each step"),
        ({"kind": "lora-muon", "lr": 2.0, "weight_decay": 0.5}, "lr · weight_decay must be below 1"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        Optimizer(**settings)
