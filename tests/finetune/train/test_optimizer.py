"""AdamW in its variants: the same updates, a state that is put back to the last bit, refusals where it cannot run."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from flatshift.finetune.adapters.adapter import attach_adapter, trainable
from flatshift.finetune.config import Adapter, Evaluate, Optimizer, Train
from flatshift.finetune.errors import Interrupted, UserError
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.planner.memory import optimizer_bytes, plan_lines
from flatshift.finetune.run_directory import RunDirectory
from flatshift.finetune.tasks import LanguageModel
from flatshift.finetune.train import optimizer as module
from flatshift.finetune.train.optimizer import AdapterOptimizer, check_optimizer
from flatshift.finetune.train.stage import TrainingStage
from flatshift.finetune.train.trainer import Trainer
from flatshift.regularizers import Plain, build
from tests.support.finetune_models import PadOnly, RandomBatches, save_backbone

LM = LanguageModel()
needs_library = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not here")


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = {"x.lora_A.weight": (8, 640), "x.lora_B.weight": (640, 8), "small.lora_A.weight": (4, 10)}
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()
    }


def gradients(step, shapes):
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def advance(optimizer, first, stop, rate=1e-2):
    for step in range(first, stop):
        for name, grad in gradients(step, {n: p.shape for n, p in optimizer.parameters.items()}).items():
            optimizer.parameters[name].grad = grad.to(optimizer.parameters[name].dtype)
        optimizer.step(rate)


def adamw(values, steps, *, rate=1e-2, decay=0.1, betas=(0.9, 0.999), eps=1e-8, plus=1.0):
    """Loshchilov & Hutter's algorithm 2, float64; and P of the last step."""
    found, scale = {}, {}
    for name, value in values.items():
        w, m, v = value.detach().double().clone(), 0.0, 0.0
        lr = rate * (plus if ".lora_B." in name else 1.0)
        for t in range(1, steps + 1):
            g = gradients(t - 1, {n: p.shape for n, p in values.items()})[name].double()
            m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g**2
            p = (v / (1 - betas[1] ** t)).sqrt() + eps
            w = w - lr * decay * w - lr * (m / (1 - betas[0] ** t)) / p
        found[name], scale[name] = w, p / (plus if ".lora_B." in name else 1.0)
    return found, scale


@pytest.mark.parametrize("kind", ["adamw", pytest.param("adamw-8bit", marks=needs_library)])
def test_updates_and_preconditioner_are_adams(kind):
    ours = AdapterOptimizer(parameters(), Optimizer(kind=kind, weight_decay=0.1, lora_plus=2.0))
    start = {name: p.detach().clone() for name, p in ours.parameters.items()}
    advance(ours, 0, 6)
    wanted, scale = adamw(parameters(), 6, plus=2.0)
    for name, parameter in ours.parameters.items():
        moved, expected = parameter.double() - start[name], wanted[name] - start[name]
        quantised = kind == "adamw-8bit" and parameter.numel() >= module.QUANTISED_FROM
        assert (moved - expected).norm() < (0.05 if quantised else 1e-5) * expected.norm(), name
        if quantised:  # not the float32 ones under another name
            assert (moved - expected).norm() > 1e-4 * expected.norm()
        found = ours.preconditioner()[name].double()
        assert (found - scale[name]).norm() < (0.05 if quantised else 1e-5) * scale[name].norm(), name
    assert {name: float(n) for name, n in ours.counters().items()} == dict.fromkeys(start, 6.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["adamw", "riemannian", "lora-muon", pytest.param("adamw-8bit", marks=needs_library)])
def test_a_state_that_is_put_back_continues_with_the_same_bits(kind, dtype):
    settings = Optimizer(kind=kind, weight_decay=0.1)
    whole = AdapterOptimizer(parameters(dtype), settings)
    advance(whole, 0, 3)
    saved = {kind: {n: t.detach().clone() for n, t in of.items()} for kind, of in whole.moments().items()}
    counters = {name: n.clone() for name, n in whole.counters().items()}
    values = {name: p.detach().clone() for name, p in whole.parameters.items()}
    advance(whole, 3, 6)
    again = AdapterOptimizer(parameters(dtype), settings)
    advance(again, 7, 9)  # what it had before is forgotten
    room = again.expect(counters)
    assert {kind: of.keys() for kind, of in room.items()} == {kind: of.keys() for kind, of in saved.items()}
    with torch.no_grad():
        for name, value in values.items():
            again.parameters[name].copy_(value)
        for kept, of in saved.items():
            for name, tensor in of.items():
                room[kept][name].copy_(tensor)
    advance(again, 3, 6)
    assert all(torch.equal(p, whole.parameters[name]) for name, p in again.parameters.items())
    if kind == "adamw-8bit":
        assert saved["state1"]["x.lora_A.weight"].dtype == torch.uint8
        assert saved["state1"]["small.lora_A.weight"].dtype == torch.float32


def test_dropped_gradients_leave_no_trace():
    ours = AdapterOptimizer(parameters(torch.bfloat16), Optimizer())
    advance(ours, 0, 2)
    before = {name: p.detach().clone() for name, p in ours.parameters.items()}
    for parameter in ours.parameters.values():
        parameter.grad = torch.full_like(parameter, float("nan"))
    ours.zero_grad()
    assert all(p.grad is None for p in ours.parameters.values())
    assert all(torch.equal(p, before[name]) for name, p in ours.parameters.items())
    assert all(float(n) == 2 for n in ours.counters().values())


@needs_library
def test_a_stage_in_eight_bits_resumes_with_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "QUANTISED_FROM", 64)  # the tiny model's factors are smaller than the library quantises
    source = save_backbone("llama", tmp_path / "model")

    def train(directory, stop_at=None):
        model = attach_adapter(load_backbone(source, task=LM), Adapter(rank=4), task=LM, seed=0)
        run = RunDirectory.open(directory) if directory.exists() else RunDirectory.create(directory)
        seen = [0]
        try:
            Trainer(
                model,
                PadOnly(),
                TrainingStage(
                    name="s",
                    task=LM,
                    batches=RandomBatches(),
                    dev=[],
                    optimizer=Optimizer(kind="adamw-8bit"),
                    train=Train(steps=8, save_every=3),
                    evaluate=Evaluate(),
                    regularizer=build(Plain()),
                    run=run,
                    seed=0,
                    on_step=lambda line: seen.append(line["step"]),
                    stop=lambda: seen[-1] == stop_at,
                ),
            ).fit()
        except Interrupted:
            return None
        return {name: p.detach().clone() for name, p in trainable(model).items()}

    whole = train(tmp_path / "whole")
    assert train(tmp_path / "run", stop_at=5) is None
    again = train(tmp_path / "run")
    assert all(torch.equal(p, whole[name]) for name, p in again.items())


def test_what_cannot_run_here_is_refused(monkeypatch):
    check_optimizer("adamw", device="cpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"optimizer\.kind: adamw-8bit needs the package bitsandbytes; pip install"):
        check_optimizer("adamw-8bit")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(UserError, match=r"pages host memory into a CUDA device, and this is cpu; take adamw-8bit"):
        AdapterOptimizer(parameters(), Optimizer(kind="paged-adamw-8bit"))
    with pytest.raises(UserError, match=r"this is cpu; take adamw$"):
        check_optimizer("paged-adamw", device="cpu")


@needs_library
def test_the_plan_counts_what_the_state_takes(tmp_path):
    ours = AdapterOptimizer(parameters(), Optimizer(kind="adamw-8bit"))
    advance(ours, 0, 1)
    taken = sum(tensor.nbytes for of in ours.moments().values() for tensor in of.values())
    sizes = {name: p.numel() for name, p in parameters().items()}
    assert optimizer_bytes(sizes, "adamw-8bit") == taken < optimizer_bytes(sizes, "adamw") == 8 * sum(sizes.values())
    model = attach_adapter(load_backbone(save_backbone("llama", tmp_path), task=LM), Adapter(), task=LM, seed=0)
    lines = "\n".join(plan_lines(model, train=Train(max_length=32), optimizer=Optimizer(kind="adamw-8bit")))
    assert "adamw-8bit, two moments" in lines
