"""A stage that runs out of memory: the plan beside what was measured, the two cheapest changes, the right exit code."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import torch

from flatshift import cli
from flatshift.finetune.adapters.adapter import attach_adapter
from flatshift.finetune.config import Adapter, Evaluate, Mesh, Optimizer, Train
from flatshift.finetune.errors import OutOfMemory, is_out_of_memory
from flatshift.finetune.figures import format_bytes
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.parallel.engine import Engine
from flatshift.finetune.planner.memory import MemoryPlan, memory_plan
from flatshift.finetune.planner.rules import RuleSettings
from flatshift.finetune.run_directory import RunDirectory
from flatshift.finetune.tasks import LanguageModel
from flatshift.finetune.train import out_of_memory
from flatshift.finetune.train.out_of_memory import MemoryAtFailure, failed_allocation_bytes, propose_changes
from flatshift.finetune.train.stage import TrainingStage
from flatshift.finetune.train.trainer import Trainer
from flatshift.regularizers import BAR, GGPO, LoraSAM, Plain, build
from tests.cli.test_train_contract import SMALL
from tests.support.commands import flags
from tests.support.finetune_models import PadOnly, RandomBatches

LM = LanguageModel()
CUDA = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.20 GiB is free."
)
HOST = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4398046511104 bytes. Error code 12 (Cannot allocate memory)"
)
GIB = 1 << 30


class FullEngine(Engine):
    """Memory runs out in the forward and backward pass of one update, which then holds a large tensor."""

    breaks_in = 0
    error: BaseException = CUDA
    held: weakref.ref[torch.Tensor] | None = None
    asked = 0

    def forward_backward(self, micros, count, **how):
        self.asked += 1
        loss = super().forward_backward(micros, count, **how)
        if self.asked == self.breaks_in:
            activations = torch.zeros(1000)
            self.held = weakref.ref(activations)
            raise type(self.error)(*self.error.args)
        return loss


def engine_of(source, kind=FullEngine):
    return kind.alone(attach_adapter(load_backbone(source, task=LM), Adapter(rank=4), task=LM, seed=0))


def fit(engine, directory, *, regularizer=None, optimizer=None, dev=(), **train):
    run = RunDirectory.open(directory) if directory.exists() else RunDirectory.create(directory)
    settings = Train(**{"steps": 6, "save_every": 2, "threads": 1, "batch_size": 4, "max_length": 12, **train})
    return Trainer(
        engine,
        PadOnly(),
        TrainingStage(
            name="fine-tune",
            task=LM,
            batches=RandomBatches(rows=4),
            dev=list(dev),
            optimizer=optimizer or Optimizer(lr=1e-2),
            train=settings,
            evaluate=Evaluate(),
            regularizer=regularizer or build(Plain()),
            run=run,
            seed=0,
        ),
    ).fit()


@pytest.mark.parametrize("error", [CUDA, HOST, MemoryError("no room")], ids=["cuda", "host", "python"])
def test_the_message_has_plan_measure_and_two_changes(tmp_path, source, monkeypatch, error):
    seen = []
    monkeypatch.setattr(
        out_of_memory,
        "measure_memory",
        lambda device: seen.append(device) or MemoryAtFailure("cuda:0", 77 * GIB, 78 * GIB, 80 * GIB, others=GIB),
    )
    engine = engine_of(source)
    engine.breaks_in, engine.error = 4, error
    with pytest.raises(OutOfMemory) as caught:
        fit(engine, tmp_path / "run")
    told, plan = str(caught.value), memory_plan(engine.model, train=Train(batch_size=4, max_length=12))
    assert seen == [torch.device("cpu")] and caught.value.resumable and is_out_of_memory(caught.value)
    assert told.startswith("fine-tune: ran out of memory in step 4: 77.0 GiB allocated and 78.0 GiB reserved of ")
    assert ("and 2.5 GiB more asked for" in told) == (error is CUDA)
    assert f"planned {format_bytes(plan.total)} (backbone {format_bytes(plan.backbone)}, " in told
    first = "Cheapest changes: train.batch_size 2 with train.accumulate 2 (the same steps; saves "
    assert first + format_bytes(plan.activations // 2) in told and ", then train.checkpointing: full (" in told
    assert "The checkpoint of step 2 is kept" in told and f"train --resume {tmp_path / 'run'} --mesh.dp 2" in told
    assert "\n" not in told
    # what the failed pass held is free again, and the run goes on from its checkpoint
    gc.collect()
    assert engine.held is not None and engine.held() is None
    assert str(error) in (tmp_path / "run" / "log.txt").read_text()
    assert fit(engine_of(source), tmp_path / "run").steps == 6


def test_before_anything_is_kept_it_is_a_mistake_of_the_settings(tmp_path, source):
    engine = engine_of(source)
    engine.breaks_in = 1
    with pytest.raises(OutOfMemory, match=r"in step 1: .* held by the process of .*Nothing is kept") as caught:
        fit(engine, tmp_path / "run", steps=1)
    assert not caught.value.resumable


@pytest.mark.parametrize("config", [GGPO(sigma=0.01), LoraSAM(), BAR()], ids=lambda c: c.kind)
def test_a_regularizer_is_detached_before_the_plan_is_measured(tmp_path, source, config):
    engine = engine_of(source)
    plain = memory_plan(engine_of(source).model, train=Train(batch_size=4, max_length=12))
    engine.breaks_in = 2
    with pytest.raises(OutOfMemory, match=r"in step [12]: ") as caught:
        fit(engine, tmp_path / "run", regularizer=build(config))
    assert f"backbone {format_bytes(plain.backbone)}," in str(caught.value)
    assert f"activations {format_bytes(plain.activations)}, work {format_bytes(plain.work)})" in str(caught.value)


def test_a_dev_evaluation_is_named(tmp_path, source, monkeypatch):
    from flatshift.finetune.train import trainer

    def broken(*args, **how):
        raise type(CUDA)(*CUDA.args)

    monkeypatch.setattr(trainer, "dev_metrics", broken)
    with pytest.raises(OutOfMemory, match="in the dev evaluation after step 3: "):
        fit(engine_of(source), tmp_path / "run", dev=[object()], eval_every=3)


def test_other_errors_pass(tmp_path, source):
    engine = engine_of(source)
    engine.breaks_in, engine.error = 1, RuntimeError("a bug")
    with pytest.raises(RuntimeError, match=r"^a bug$"):
        fit(engine, tmp_path / "bug")


def plan_of(**causes):
    return MemoryPlan(**{"backbone": 0, "adapter": 0, "gradients": 0, "optimizer": 0, "activations": 0, **causes})


def test_changes_are_those_that_the_run_allows(source):
    engine = engine_of(source, Engine)

    def named(plan, *, kind="adamw", **train):
        train = Train(**{"batch_size": 4, "max_length": 12, **train})
        return [change.setting for change in propose_changes(engine, plan, train=train, optimizer=Optimizer(kind=kind))]

    much = plan_of(activations=100 << 20)
    rows, blocks, short = (
        "train.batch_size 2 with train.accumulate 2",
        "train.checkpointing: full",
        "train.max_length 6",
    )
    assert named(much) == [rows, blocks, short]
    assert named(much, checkpointing="full") == [rows, short]
    assert named(much, compile=True) == [rows, short]
    assert named(much, batch_size=1) == [blocks, short]
    # what saves next to nothing beside the rest is not named; an odd number of rows is divided as it can be
    assert named(much, batch_size=9, accumulate=2)[0] == "train.batch_size 3 with train.accumulate 6"
    small = plan_of(backbone=100_000, activations=1000)
    assert named(small) == ["train.quantization: nf4"]
    assert named(small, quantization="nf4") == []
    moments = sum(8 * p.numel() for p in engine.parameters.values())
    assert named(plan_of(optimizer=moments)) == ["train.quantization: nf4"]  # too small to be quantised
    (changed, *_) = propose_changes(engine, much, train=Train(batch_size=4, group="length"), optimizer=Optimizer())
    assert changed.cost == "other samples in a step"


@pytest.mark.parametrize("rows", [1, 2])
def test_no_change_is_one_that_the_rules_refuse(source, tmp_path, rows):
    train = Train(batch_size=rows, max_length=12, precision="fp32", backbone_precision="bf16", checkpointing="full")
    rules, engine = RuleSettings(Mesh(), train, Adapter(), LM), engine_of(source, Engine)
    plan = plan_of(backbone=100_000, activations=1000)
    changes = propose_changes(engine, plan, train=train, optimizer=Optimizer(), rules=rules)
    assert "train.quantization: nf4" not in {change.setting for change in changes}
    run = RunDirectory.create(tmp_path / "run")
    (run.state / "step-3").mkdir(parents=True)
    wide = dataclasses.replace(train, backbone_precision="same")
    stage = TrainingStage(
        name="fine-tune", task=LM, batches=RandomBatches(rows=rows), dev=[], optimizer=Optimizer(), train=wide,
        evaluate=Evaluate(), regularizer=build(Plain()), run=run, seed=0, rules=dataclasses.replace(rules, train=wide),
    )  # fmt: skip
    told = str(out_of_memory.OutOfMemoryHandler(engine, stage)._out_of_memory(MemoryError("x"), "step 4"))
    assert ("more memory, or by `" in told) == ("--mesh.dp 2`" in told) == (rows == 2)


def test_savings_are_those_of_the_plan(source):
    engine = engine_of(source, Engine)
    plan = plan_of(backbone=1 << 20, activations=8 << 20)
    settings = Train(batch_size=4, max_length=12, precision="fp32")
    found = {c.setting: c.saves for c in propose_changes(engine, plan, train=settings, optimizer=Optimizer())}
    assert found["train.batch_size 2 with train.accumulate 2"] == 4 << 20
    inputs = 4 * 12 * 32 * 4 * 2  # rows × tokens × width × float32 × blocks
    assert found["train.checkpointing: full"] == (8 << 20) - (8 << 20) // 2 - inputs
    linear = [p for name, p in engine.model.named_parameters() if "base_layer" in name]
    assert out_of_memory._four_bit_savings(engine.model) == sum(int(p.numel() * (4 - 0.5625)) for p in linear) > 0


def test_sizes_are_read_from_torchs_words():
    assert failed_allocation_bytes(CUDA) == round(2.5 * GIB) and failed_allocation_bytes(HOST) == 4398046511104
    assert failed_allocation_bytes(RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0)")) == 20 << 20
    assert failed_allocation_bytes(MemoryError()) is None
    host = out_of_memory.measure_memory(torch.device("cpu"))
    assert host.total is not None and 10 << 20 < host.used < host.total and "held by the process" in str(host)


@pytest.mark.parametrize(("breaks_in", "code"), [(2, 2), (4, 3)])
def test_the_front_door_ends_as_the_contract_says(tmp_path, monkeypatch, capsys, breaks_in, code):
    asked = [0]
    usual = Engine.forward_backward

    def forward_backward(self, *args, **how):
        asked[0] += 1
        if asked[0] == breaks_in:
            raise type(CUDA)(*CUDA.args)
        return usual(self, *args, **how)

    monkeypatch.setattr(Engine, "forward_backward", forward_backward)
    out = tmp_path / "run"
    settings = SMALL | {
        "train.save_every": 3,
        "train.eval_every": 0,
        "train.precision": "fp32",
        "train.peak_tflops": 1.0,
    }
    assert cli.run(["train", "language-model", "--out", str(out), *flags(settings)]) == code
    told = capsys.readouterr().err.strip().splitlines()
    said = [line for line in told if line.startswith("flatshift: ")]
    assert len(said) == 1 and f"ran out of memory in step {breaks_in}: " in said[0]
    assert said[0].startswith("flatshift: error: " if code == 2 else "flatshift: interrupted: ")
    if code == 3:
        monkeypatch.setattr(Engine, "forward_backward", usual)
        assert cli.run(["train", "--resume", str(out)]) == 0
    else:
        assert "no checkpoint had been written" in said[0]
