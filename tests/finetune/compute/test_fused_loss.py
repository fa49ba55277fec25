"""The choice of a loss kernel: faster and right is taken, anything else is not, and a resumed stage keeps its own."""

from __future__ import annotations

import json
import math
import sys
import time
import types

import pytest
import torch
import torch.nn.functional as F

from flatshift.finetune.adapters.adapter import attach_adapter, trainable
from flatshift.finetune.compute import fused_loss
from flatshift.finetune.compute.fused_loss import OURS, RECORD, available_kernels, benchmark_kernels, choose_loss_kernel
from flatshift.finetune.compute.loss import Head, batch_loss, linear_cross_entropy
from flatshift.finetune.config import Adapter, Optimizer, Train
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.parallel.engine import Engine
from flatshift.finetune.tasks import LanguageModel
from tests.support.finetune_models import RandomBatches
from tests.support.stage_runs import run_or_stop

LM = LanguageModel()
FP32 = Train(precision="fp32")


def whole(hidden, linear, targets, *, smoothing=0.0):
    """All logits at once, by torch."""
    logits = F.linear(hidden, linear.weight.to(hidden.dtype), linear.bias).float()
    return F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)


def wrong_loss(hidden, linear, targets, *, smoothing=0.0):
    return whole(hidden, linear, targets) * 1.01


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, loss):
        ctx.save_for_backward(hidden)
        return loss.detach()

    @staticmethod
    def backward(ctx, upstream):
        (hidden,) = ctx.saved_tensors
        return torch.ones_like(hidden) * upstream, None


def wrong_gradient(hidden, linear, targets, *, smoothing=0.0):
    return _WrongGradient.apply(hidden, whole(hidden.detach(), linear, targets))


def nothing(hidden, linear, targets, *, smoothing=0.0):
    return whole(hidden, linear, targets) * math.nan


def raising(hidden, linear, targets, *, smoothing=0.0):
    raise ImportError("cannot import name 'x' from 'triton'\nand more")


def slow(hidden, linear, targets, *, smoothing=0.0):
    time.sleep(0.05)
    return whole(hidden, linear, targets)


def engine_of(source):
    return Engine.alone(
        attach_adapter(load_backbone(source, task=LM, precision="fp32"), Adapter(rank=2), task=LM, seed=0)
    )


@pytest.fixture
def on_cuda(monkeypatch):
    """The CPU taken for a CUDA device by the choice alone, and our own slices for very slow ones."""
    monkeypatch.setattr(fused_loss, "is_cuda", lambda device: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def ours(*args, **how):
        time.sleep(0.02)
        return linear_cross_entropy(*args, **how)

    monkeypatch.setattr(fused_loss, "linear_cross_entropy", ours)


def choose(source, folder, kernels, *, train=FP32):
    engine, said = engine_of(source), []
    folder.mkdir(parents=True, exist_ok=True)
    head = engine.find_head(RandomBatches().at(0)[0].inputs, task=LM)
    assert head is not None
    engine.model.train()
    state = torch.random.get_rng_state()
    found = choose_loss_kernel(
        engine, head, RandomBatches(), task=LM, train=train, folder=folder, log=said.append, kernels=kernels
    )
    assert found is not None and found.linear is head.linear and engine.model.training
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(p.grad is None for p in engine.parameters.values())
    return found.kernel, said


def test_the_fastest_that_is_right_is_taken_and_kept(tmp_path, source, on_cuda):
    kernels = {"whole": whole, "slow": slow, "wrong": wrong_loss, "broken": raising}
    kernel, said = choose(source, tmp_path, kernels)
    assert kernel is whole and len(said) == 1
    assert said[0].startswith("loss: the kernel of whole, ") and " ms on the first micro-batch (slices " in said[0]
    assert "wrong its loss differs by 1.0e-02" in said[0] and "broken cannot import name 'x' from 'triton'" in said[0]
    assert "and more" not in said[0] and "\n" not in said[0]
    record = json.loads((tmp_path / RECORD).read_text())
    assert (
        record["kernel"] == "whole"
        and record["seconds"]["wrong"] is None
        and set(record["wrong"])
        == {
            "wrong",
            "broken",
        }
    )
    # a resumed stage does not measure again
    kernel, said = choose(source, tmp_path, {"whole": whole, "faster": whole})
    assert kernel is whole and not said
    kernel, said = choose(source, tmp_path, {})
    assert kernel is None and said == [
        "warning: loss: the stage began with the kernel whole, which is not here any more; "
        "pip install 'flatshift[cuda]'"
    ]


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (wrong_loss, "its loss differs by"),
        (wrong_gradient, "its gradient differs by"),
        (nothing, "its loss differs by nan"),
        (raising, "cannot import name"),
        (slow, " ms"),
    ],
)
def test_ours_is_kept_beside_a_kernel_that_is_wrong_slow_or_fails(tmp_path, source, on_cuda, kernel, words):
    found, said = choose(source, tmp_path, {"other": kernel})
    assert found is None and said[0].startswith("loss: our slices, ") and words in said[0]
    assert json.loads((tmp_path / RECORD).read_text())["kernel"] == OURS
    found, said = choose(source, tmp_path, {"whole": whole})  # what was measured once is kept
    assert found is None and not said


def test_a_gain_of_a_few_percent_is_not_worth_another_kernel(tmp_path, source, on_cuda, monkeypatch):
    trials = {OURS: fused_loss.KernelTrial(1.0), "other": fused_loss.KernelTrial(0.96)}
    monkeypatch.setattr(fused_loss, "benchmark_kernels", lambda *args, **how: trials)
    assert choose(source, tmp_path / "a", {"other": whole})[0] is None
    trials["other"] = fused_loss.KernelTrial(0.94)
    assert choose(source, tmp_path / "b", {"other": whole})[0] is whole


def test_absent_packages_are_said(tmp_path, source, on_cuda):
    found, said = choose(source, tmp_path, {})
    assert found is None and said == ["loss: our slices, no other kernel is here (pip install 'flatshift[cuda]')"]


def test_a_cpu_is_asked_nothing(tmp_path, source):
    found, said = choose(source, tmp_path, {"whole": whole})
    assert found is None and not said and not (tmp_path / RECORD).exists()


def test_half_precision_has_its_own_rounding(source):
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(32, 500, bias=True).requires_grad_(False)
    hidden = torch.randn(40, 32, generator=generator)
    targets = torch.randint(500, (40,), generator=generator)

    def rounded(hidden, linear, targets, *, smoothing=0.0):
        return whole(hidden.half().float(), linear, targets)

    assert benchmark_kernels({"rounded": rounded}, hidden, linear, targets)["rounded"].wrong
    with torch.autocast("cpu", torch.bfloat16):
        found = benchmark_kernels({"whole": whole, "rounded": rounded, "bad": wrong_loss}, hidden, linear, targets)
    assert not found["whole"].wrong and not found["rounded"].wrong and found["bad"].wrong
    assert all(math.isfinite(found[name].seconds) == (not found[name].wrong) for name in found)


@pytest.mark.skipif("torch" not in available_kernels(), reason="torch 2.13 brings the kernel")
def test_torchs_own_kernel_is_ours_within_rounding():
    """A real one, which runs on CPUs too."""
    generator = torch.Generator().manual_seed(1)
    for bias in (False, True):
        linear = torch.nn.Linear(32, 500, bias=bias).requires_grad_(False)
        hidden, targets = torch.randn(40, 32, generator=generator), torch.randint(500, (40,), generator=generator)
        found = benchmark_kernels({"torch": available_kernels()["torch"]}, hidden, linear, targets)
        assert not found["torch"].wrong and math.isfinite(found["torch"].seconds)
        assert (
            "label smoothing"
            in benchmark_kernels({"torch": available_kernels()["torch"]}, hidden, linear, targets, ratio=0.1)[
                "torch"
            ].wrong
        )
        assert linear.weight.grad is None


def test_ligers_kernel_is_called_as_it_wants(monkeypatch):
    """By its documented signature; the package itself needs a GPU."""
    asked = []

    def fused(input, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0,
              label_smoothing=0.0, reduction="mean", softcap=None, return_z_loss=False):  # fmt: skip
        assert not torch.is_autocast_enabled("cpu") and input.dtype == weight.dtype
        asked.append((input.dtype, reduction, label_smoothing, bias is None))
        return F.cross_entropy(F.linear(input, weight, bias).float(), target, reduction=reduction,
                               label_smoothing=label_smoothing, ignore_index=ignore_index)  # fmt: skip

    functional = types.ModuleType("liger_kernel.transformers.functional")
    functional.liger_fused_linear_cross_entropy = fused
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, functional.__name__, functional)
    generator = torch.Generator().manual_seed(1)
    linear = torch.nn.Linear(32, 500, bias=False).requires_grad_(False)
    hidden, targets = torch.randn(40, 32, generator=generator), torch.randint(500, (40,), generator=generator)
    found = benchmark_kernels({"liger": fused_loss._liger}, hidden, linear, targets, ratio=0.1)
    assert not found["liger"].wrong and asked[0] == (torch.float32, "sum", 0.1, True)
    with torch.autocast("cpu", torch.bfloat16):
        assert not benchmark_kernels({"liger": fused_loss._liger}, hidden, linear, targets)["liger"].wrong
    assert asked[-1][0] == torch.bfloat16


def test_training_takes_the_kernel_and_evaluation_does_not(source):
    engine, called = engine_of(source), []

    def counted(*args, **how):
        called.append(args[0].shape)
        return whole(*args, **how)

    micro = RandomBatches().at(0)[0]
    head = engine.find_head(micro.inputs, task=LM)
    fused = Head(head.linear, counted)
    plain = batch_loss(engine.model, micro, task=LM, head=head)
    assert torch.allclose(batch_loss(engine.model, micro, task=LM, head=fused), plain, rtol=1e-6) and len(called) == 1
    with torch.no_grad():
        assert torch.equal(batch_loss(engine.model, micro, task=LM, head=fused), plain) and len(called) == 1
    micro.labels.fill_(-100)  # a rank's rows may have nothing to learn
    assert batch_loss(engine.model, micro, task=LM, head=fused) == 0 and len(called) == 1


def test_a_stage_and_its_resumption_train_by_it(tmp_path, source, on_cuda, monkeypatch):
    called = []

    def counted(*args, **how):
        called.append(1)
        return whole(*args, **how)

    monkeypatch.setattr(fused_loss, "available_kernels", lambda: {"whole": counted})

    def stage(directory, **how):
        engine = engine_of(source)
        train = Train(steps=6, threads=1, precision="fp32")
        run_or_stop(
            engine, directory, task=LM, batches=RandomBatches(), optimizer=Optimizer(lr=1e-2), train=train, **how
        )
        return {name: p.detach().clone() for name, p in trainable(engine.model).items()}

    once = stage(tmp_path / "once")
    assert len(called) == 6 + 5  # the updates; the comparison and four turns
    assert "loss: the kernel of whole" in (tmp_path / "once" / "log.txt").read_text()
    stage(tmp_path / "twice", stop_at=3)
    called.clear()
    twice = stage(tmp_path / "twice")
    assert len(called) == 3 and all(torch.equal(once[name], twice[name]) for name in once)
    monkeypatch.setattr(fused_loss, "is_cuda", lambda device: False)
    plain = stage(tmp_path / "plain")
    assert len(called) == 3
    assert all((once[name] - plain[name]).norm() <= 1e-4 * plain[name].norm() for name in once)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_on_a_device_are_ours_within_rounding():
    generator = torch.Generator().manual_seed(1)
    linear = torch.nn.Linear(256, 4096, bias=False).requires_grad_(False).cuda()
    hidden = torch.randn(512, 256, generator=generator).cuda()
    targets = torch.randint(4096, (512,), generator=generator).cuda()
    for dtype in (torch.float32, torch.bfloat16):
        found = benchmark_kernels(available_kernels(), hidden.to(dtype), linear, targets)
        assert all(not trial.wrong for trial in found.values()), found
