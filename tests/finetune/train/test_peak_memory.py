"""`train` says its plan before step 1 and puts what updates took beside it: on terminal, run and page."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from types import SimpleNamespace

import pytest
import torch

from flatshift import cli
from flatshift.experiments.recipe import from_override
from flatshift.experiments.report.blocks import Bars, Notes
from flatshift.experiments.report.chapters.run import training_sections
from flatshift.experiments.results.run import find_runs
from flatshift.experiments.workflows import context as workflow
from flatshift.experiments.workflows.mesh_plan import plan_mesh
from flatshift.finetune.config import Adapter, Mesh, Train
from flatshift.finetune.figures import compare_plan
from flatshift.finetune.planner.devices import Cluster
from flatshift.finetune.planner.layouts import step_seconds
from flatshift.finetune.planner.memory import MemoryPlan
from flatshift.finetune.planner.rules import RuleSettings
from flatshift.finetune.planner.sizes import read_sizes
from flatshift.finetune.planner.throughput import find_device
from flatshift.finetune.tasks import LanguageModel
from flatshift.finetune.train import peak_memory
from flatshift.finetune.train.peak_memory import PlannedStep, StepMemoryMeter
from flatshift.regularizers.config import ASAM
from tests.cli.test_train_contract import SMALL
from tests.support.commands import flags

PLAN = MemoryPlan(backbone=1000, adapter=100, gradients=100, optimizer=200, activations=5 << 20)
GB = 10**9


def test_the_log_tells_both(tmp_path, capsys):
    out = tmp_path / "run"
    assert cli.run(["train", "language-model", "--out", str(out), *flags(SMALL)]) == 0
    printed, said = "".join(capsys.readouterr()), (out / "log.txt").read_text(encoding="utf-8")
    assert "plan: " in printed and not any(word in printed for word in ("memory of a step", "peak: ", "padding: "))
    assert "peak: " in said and "padding: " in said
    before, after = said.index("plan: "), said.index("memory of a step ")
    assert before < after and "predicted" in said[after:] and "the process grew by " in said
    assert re.search(r"a step [\d.e-]+ s predicted, [\d.e-]+ s measured", said)
    plan = json.loads((out / "stages" / "fine-tune" / "done.json").read_text(encoding="utf-8"))["plan"]
    assert plan["predicted"] == sum(plan["bytes"][name] for name in ("gradients", "activations", "work", "regularizer"))
    assert plan["what"] == "growth" and plan["measured"] > 0 and plan["measured_s"] > 0 and plan["predicted_s"] > 0
    found = [section for section in training_sections(find_runs([out])[0]) if section.title == "Predicted and measured"]
    bars, notes = found[0].blocks
    assert isinstance(bars, Bars) and [name for name, _, _ in bars.items] == [
        f"fine-tune: {name}" for name in plan["bytes"]
    ]
    assert max(share for _, _, share in bars.items) == 1.0
    assert isinstance(notes, Notes) and compare_plan(plan) in notes.sentences[0]


@pytest.mark.parametrize("seconds", [0.0, 1e6])
def test_a_busy_machine_is_said_where_the_time_is(seconds, tmp_path, capsys, monkeypatch):
    waits = itertools.count(0, seconds)
    monkeypatch.setattr(workflow, "core_wait_s", lambda: next(waits))
    monkeypatch.setattr(workflow, "_LONG_S", 0)
    assert cli.run(["train", "language-model", "--out", str(tmp_path / "run"), *flags(SMALL)]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "other programs are at work" in line]
    assert len(said) == (seconds > 0) and all("--train.threads 1" in line for line in said)


def test_rows_shorter_than_the_limit_are_planned_as_they_are(tmp_path):
    """They are padded to the longest of their batch, whatever `train.max_length` would let in."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"text": "short text {n}", "label": "{"ab"[n % 2]}"}}\n' for n in range(99)), "utf-8")
    where = {"data.train.files": str(rows), "data.dev.files": "[]", "data.test.files": "[]", "data.holdout": "0.2"}
    kept = []
    for limit in (16, 128):
        out = tmp_path / str(limit)
        short = {
            **SMALL,
            **where,
            "data.dev.limit": "null",
            "data.test.limit": "null",
            "train.steps": "2",
            "train.max_length": str(limit),
        }
        assert cli.run(["train", "classify", "--out", str(out), *flags(short)]) == 0
        told = json.loads((out / "stages" / "fine-tune" / "done.json").read_text(encoding="utf-8"))["plan"]
        kept.append(told["bytes"]["activations"])
    assert kept[0] == kept[1]


def test_what_an_update_holds_is_seen_and_what_was_there_before_is_not():
    before = torch.ones(16 << 20, dtype=torch.uint8)
    meter = StepMemoryMeter(torch.device("cpu"))
    for _ in range(2):
        with meter.measure_step():
            held = torch.ones(64 << 20, dtype=torch.uint8)
            meter._sample()  # as the thread does; a busy machine may not let it
            del held
    outside = torch.ones(256 << 20, dtype=torch.uint8)
    found = meter.compare(PlannedStep(PLAN))
    assert found["measured"] == pytest.approx(64 << 20, rel=0.1)
    assert found["predicted"] == PLAN.gradients + PLAN.activations and found["measured_s"] > 0
    assert found["reserved"] >= found["measured"] * 0.9
    assert before.numel() and outside.numel()


def test_on_a_cuda_device_the_allocator_is_asked_and_evaluations_are_left_out(monkeypatch):
    peak = SimpleNamespace(now=10)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: setattr(peak, "now", 10))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak.now)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 2 * peak.now)
    peak.now = 99  # of loading
    meter = StepMemoryMeter(torch.device("cuda", 0))
    with meter.measure_step():
        peak.now = 50
    peak.now = 80  # an evaluation
    with meter.measure_step():
        pass
    found = meter.compare(PlannedStep(PLAN, seconds=0.5))
    assert (found["measured"], found["reserved"], found["what"]) == (50, 100, "allocated")
    assert found["predicted"] == PLAN.total and found["predicted_s"] == 0.5


def test_where_nobody_counts_nothing_is_said(monkeypatch):
    monkeypatch.setattr(peak_memory, "process_bytes", lambda field: None)
    monkeypatch.setattr(peak_memory, "malloc_bytes", lambda: None)
    meter = StepMemoryMeter(torch.device("cpu"))
    with meter.measure_step():
        pass
    assert compare_plan(meter.compare(PlannedStep(PLAN))) == ""


def test_words():
    plan = {"predicted": 100 << 20, "measured": 110 << 20, "what": "allocated", "reserved": 120 << 20}
    told = "memory allocated 100.0 MiB predicted, 110.0 MiB measured (+10%); 120.0 MiB reserved"
    assert compare_plan(plan) == told
    assert compare_plan({**plan, "predicted_s": 0.5, "measured_s": 0.25}).endswith(
        "; a step 0.5 s predicted, 0.25 s measured"
    )


@pytest.mark.parametrize(
    ("name", "memory", "row"),
    [
        ("NVIDIA H100 80GB HBM3", 85 * GB, "H100-80"),
        ("NVIDIA A100-SXM4-40GB", 42 * GB, "A100-40"),
        ("NVIDIA A100-SXM4-80GB", 85 * GB, "A100-80"),
        ("NVIDIA H200", 150 * GB, "H200-141"),
        ("Tesla T4", 16 * GB, "T4"),
        ("NVIDIA GeForce RTX 4090", 25 * GB, "RTX4090"),
        ("NVIDIA L40S", 47 * GB, "L40S"),
        ("NVIDIA L40", 47 * GB, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10 * GB, None),
    ],
)
def test_devices_by_their_own_names(name, memory, row):
    assert find_device(name, memory) == row


def test_seconds_are_those_of_plan_or_nothing():
    sizes, cluster = read_sizes("llama-3.2-3b", Adapter()), Cluster.parse("1xH100-80")
    words = [from_override("train.precision", "bf16"), from_override("train.max_length", "1024")]
    (planned,) = plan_mesh("language-model", words, model="llama-3.2-3b", gpus="1xH100-80")["layouts"]
    taken = {key: planned[key] for key in ("batch_size", "accumulate", "checkpointing")}
    settings = RuleSettings(Mesh(), Train(precision="bf16", max_length=1024, **taken), Adapter(), LanguageModel())
    assert step_seconds(sizes, cluster, settings) == pytest.approx(planned["update_s"], rel=1e-3)
    fp32 = RuleSettings(Mesh(), Train(precision="fp32"), Adapter(), LanguageModel())
    assert step_seconds(sizes, cluster, fp32) is None
    long = RuleSettings(Mesh(), Train(precision="bf16", max_length=10**6), Adapter(), LanguageModel())
    assert step_seconds(sizes, cluster, long) is None


@pytest.mark.parametrize(
    ("name", "key", "value", "passes"),
    [("language-model", "regularizer.kind", "lora-sam", 2), ("preference", "task.loss", "ipo", 1.5)],
)
def test_a_cpu_is_timed_for_all_passes_of_a_step(name, key, value, passes, monkeypatch):
    from flatshift.experiments.recipe import from_override, load_recipe

    monkeypatch.setattr(workflow, "token_seconds", lambda model, tokens, train: 0.5)
    engine = SimpleNamespace(device=torch.device("cpu"), model=None)
    batches = SimpleNamespace(tokens=lambda steps: (0, 64 * steps))
    recipe = load_recipe(name, [from_override(key, value)]).recipe
    assert workflow._predict_step_seconds(recipe, recipe.task, Train(), engine, batches) == 32 * passes


def test_a_known_device_has_its_time_predicted(monkeypatch, tmp_path):
    from flatshift.experiments.recipe import load_recipe

    recipe = load_recipe("language-model", []).recipe
    engine = SimpleNamespace(device=torch.device("cuda", 0))
    about = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=85 * GB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    train = Train(precision="bf16", max_length=64)
    found = workflow._predict_step_seconds(recipe, recipe.task, train, engine, None)
    assert found is not None and 0 < found < 1
    twice = dataclasses.replace(recipe, regularizer=ASAM())
    assert workflow._predict_step_seconds(twice, recipe.task, train, engine, None) == pytest.approx(2 * found)
    about.name = "Somebody's accelerator"
    assert workflow._predict_step_seconds(recipe, recipe.task, train, engine, None) is None
