"""fp16: losses are scaled, an overflow costs a repetition and no row; weights kept in bf16 compute in float32."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from flatshift.finetune.adapters.adapter import attach_adapter, trainable
from flatshift.finetune.compute.loss import batch_loss, find_head
from flatshift.finetune.compute.precision import WidenedEmbedding, WidenedLinear, infer_precision, widen_on_use
from flatshift.finetune.config import Adapter, Optimizer, Train
from flatshift.finetune.errors import UserError
from flatshift.finetune.models.fingerprint import checksum
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.parallel.engine import Engine
from flatshift.finetune.run_directory import read_metrics
from flatshift.finetune.tasks import LanguageModel
from flatshift.finetune.train.divergence import FIRST, GROWTH_EVERY, LARGEST, Diverged, LossScale
from flatshift.regularizers import GGPO, MGPO, LoraSAM, Plain, build
from tests.support.finetune_models import RandomBatches, save_backbone
from tests.support.stage_runs import run_or_stop

LM = LanguageModel()
TRAIN = Train(steps=6, save_every=2, batch_size=4, max_length=12, precision="fp16")


class SmallRange(Engine):
    """Gradients overflow where the scale is above `limit`, as in a type of smaller range."""

    limit = math.inf
    seen: list[float]

    def forward_backward(self, micros, count, **how):
        loss = super().forward_backward(micros, count, **how)
        self.seen.append(self.loss_scale)
        if self.loss_scale > self.limit:
            next(iter(self.parameters.values())).grad.view(-1)[0] = math.inf
        return loss


def engine_of(source, *, precision="fp32", limit=math.inf):
    model = attach_adapter(load_backbone(source, task=LM, precision=precision), Adapter(rank=4), task=LM, seed=0)
    engine = SmallRange.alone(model)
    engine.limit, engine.seen = limit, []
    return engine


def run(engine, directory, *, train=TRAIN, regularizer=None, **more):
    stage = {"task": LM, "batches": RandomBatches(accumulate=2), "optimizer": Optimizer(lr=1e-2), "train": train}
    run_or_stop(engine, directory, regularizer=build(regularizer or Plain()), **stage, **more)
    lines = read_metrics(directory / "stages" / "fine-tune" / "metrics.jsonl")
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


def bits(engine):
    return {name: p.detach().clone() for name, p in trainable(engine.model).items()}


def test_a_scale_halves_on_overflow_and_doubles_after_a_long_time():
    scale = LossScale(on=True)
    assert scale.value == FIRST and scale.shrink() and scale.value == FIRST / 2
    for _ in range(GROWTH_EVERY):
        scale.step_applied()
    assert scale.value == FIRST and scale.good == 0
    scale.value = LARGEST
    for _ in range(GROWTH_EVERY):
        scale.step_applied()
    assert scale.value == LARGEST
    scale.value = 1.0
    assert not scale.shrink()
    off = LossScale(on=False)
    off.step_applied()
    assert off.value == 1.0 and off.state() == {}


@pytest.mark.parametrize("regularizer", [Plain(), GGPO(sigma=0.05), MGPO(), LoraSAM()], ids=lambda r: r.kind)
def test_scaling_changes_no_bit_of_a_float32_gradient(source, tmp_path, regularizer):
    """A power of two in, a power of two out: the whole stage, regularizer and all, is that without a scale."""
    found = {}
    for name, scale in (("scaled", 2.0**10), ("plain", 1.0)):
        engine = engine_of(source)  # float32 products, so that nothing but the scale differs
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("flatshift.finetune.train.divergence.FIRST", scale)
            patch.setattr(
                "flatshift.finetune.train.trainer.autocast", lambda train, device: torch.autocast("cpu", enabled=False)
            )
            lines = run(engine, tmp_path / name, regularizer=regularizer)
        assert set(engine.seen) == {scale}
        found[name] = lines, bits(engine)
    assert found["scaled"][0] == found["plain"][0]
    for name, tensor in found["plain"][1].items():
        assert torch.equal(tensor, found["scaled"][1][name]), name


def test_an_overflow_repeats_the_update_with_half_the_scale_and_loses_no_row(source, tmp_path):
    calm, narrow = engine_of(source, precision="fp16"), engine_of(source, precision="fp16", limit=FIRST / 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flatshift.finetune.train.divergence.FIRST", FIRST / 8)
        expected = run(calm, tmp_path / "calm")
    assert run(narrow, tmp_path / "narrow") == expected
    assert narrow.seen[:4] == [FIRST, FIRST / 2, FIRST / 4, FIRST / 8] and set(narrow.seen[4:]) == {FIRST / 8}
    for name, tensor in bits(calm).items():
        assert torch.equal(tensor, bits(narrow)[name]), name


def test_fp16_trains_as_float32_does_up_to_its_rounding(source, tmp_path):
    wide = run(engine_of(source), tmp_path / "wide", train=dataclasses.replace(TRAIN, precision="fp32"))
    half = run(engine_of(source, precision="fp16"), tmp_path / "half")
    assert [s for s, _, _ in wide] == [s for s, _, _ in half]
    for (_, a, n), (_, b, m) in zip(wide, half, strict=True):
        assert b == pytest.approx(a, rel=5e-3) and m == pytest.approx(n, rel=5e-2) and a != b


def test_a_resumed_run_goes_on_with_its_scale_and_the_same_bits(source, tmp_path):
    whole = engine_of(source, precision="fp16", limit=FIRST / 4)
    lines = run(whole, tmp_path / "whole")
    first = engine_of(source, precision="fp16", limit=FIRST / 4)
    run(first, tmp_path / "parts", stop_at=3)
    second = engine_of(source, precision="fp16", limit=FIRST / 4)
    assert run(second, tmp_path / "parts") == lines
    assert set(second.seen) == {FIRST / 4}  # it did not begin again at the top
    for name, tensor in bits(whole).items():
        assert torch.equal(tensor, bits(second)[name]), name


def test_a_gradient_that_is_no_number_at_any_scale_stops_the_run(source, tmp_path):
    engine = engine_of(source, precision="fp16", limit=0.5)
    with pytest.raises(Diverged, match="the gradient at step 1 is not a finite number"):
        run(engine, tmp_path / "run")
    assert engine.seen[-1] == 1.0


# ------------------------------------------------------------------------- float32 compute over bf16 weights


@pytest.mark.parametrize("kind", ["llama", "gpt2-dropout", "bert"])
def test_a_backbone_kept_in_bf16_computes_in_float32_what_its_rounded_weights_give(kind, tmp_path):
    from flatshift.finetune.tasks import MaskedLM

    task = MaskedLM() if kind == "bert" else LM
    directory = save_backbone(kind, tmp_path)
    if kind.startswith("gpt2"):  # its weights are Conv1D's
        with pytest.raises(UserError, match=r"train\.backbone_precision: same"):
            load_backbone(directory, task=task, narrow=True)
        return
    narrow = load_backbone(directory, task=task, narrow=True)
    rounded = load_backbone(directory, task=task)
    for parameter in rounded.parameters():
        parameter.data = parameter.data.bfloat16().float()
    kinds = {type(m) for m in narrow.modules()}
    assert {WidenedLinear, WidenedEmbedding} <= kinds and nn.Linear not in kinds
    assert not any(b.dtype == torch.bfloat16 for b in narrow.buffers())
    held = sum(p.nbytes for p in narrow.parameters())
    assert held < 0.55 * sum(p.nbytes for p in rounded.parameters())
    kept = [p.clone() for p in narrow.parameters()]
    frozen = list(narrow.parameters())
    micro = RandomBatches().at(0)[0]
    losses, gradients = [], []
    for model in (narrow, rounded):
        adapted = attach_adapter(model, Adapter(rank=4), task=task, seed=0)
        for name, p in trainable(adapted).items():
            if "lora_B" in name:
                p.data.fill_(0.01)
        assert infer_precision(Train(), adapted.eval()).precision == "fp32"
        loss = batch_loss(adapted, micro, task=task, head=find_head(adapted, micro.inputs, task=task))
        loss.backward()
        losses.append(loss)
        gradients.append({name: p.grad for name, p in trainable(adapted).items()})
    assert losses[0].dtype == torch.float32 and losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], gradient, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(frozen, kept, strict=True))


def test_a_stage_on_narrow_weights_keeps_them_and_resumes_to_the_same_bits(source, tmp_path):
    def engine():
        model = attach_adapter(load_backbone(source, task=LM, narrow=True), Adapter(rank=4), task=LM, seed=0)
        made = SmallRange.alone(model)
        made.seen = []
        return made

    train = dataclasses.replace(TRAIN, precision="fp32", backbone_precision="bf16")
    whole = engine()
    before = checksum(whole.model)
    lines = run(whole, tmp_path / "whole", train=train, regularizer=GGPO(sigma=0.05))
    run(engine(), tmp_path / "parts", train=train, regularizer=GGPO(sigma=0.05), stop_at=3)
    again = engine()
    assert run(again, tmp_path / "parts", train=train, regularizer=GGPO(sigma=0.05)) == lines
    assert checksum(whole.model) == before
    for name, tensor in bits(whole).items():
        assert torch.equal(tensor, bits(again)[name]), name


def test_widening_leaves_a_trained_model_alone():
    with pytest.raises(UserError, match="somewhere"):
        widen_on_use(nn.Sequential(nn.Conv1d(4, 4, 3)), context="somewhere")
