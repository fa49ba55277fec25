"""Operations by our own count are those that torch's counter sees in a real step, and rates are what they say."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from flatshift.finetune.adapters.adapter import attach_adapter
from flatshift.finetune.config import Adapter
from flatshift.finetune.figures import format_throughput
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.parallel.activation_checkpoint import checkpoint_activations
from flatshift.finetune.parallel.engine import Engine
from flatshift.finetune.tasks import Classify, LanguageModel
from flatshift.finetune.train import throughput
from flatshift.finetune.train.throughput import EVERY, ThroughputMeter
from tests.support.finetune_models import Micro, RandomBatches, save_backbone

LM = LanguageModel()
TOLERANCE = 0.01
"""Rotary embeddings are products too, which nobody calls work."""


def engine_of(kind, directory, *, targets="all-linear", task=LM, checkpointing="none"):
    source = save_backbone(kind, directory)
    labels = ("a", "b", "c") if isinstance(task, Classify) else None
    backbone = load_backbone(source, task=task, label_names=labels)
    backbone.set_attn_implementation("eager")  # of fused kernels torch's counter knows those of CUDA only
    model = attach_adapter(backbone, Adapter(rank=4, targets=targets), task=task, seed=0)
    checkpoint_activations(model, checkpointing)
    return Engine.alone(model)


def micro_of(rows, length, *, task=LM, seed=0):
    micro = RandomBatches(rows=rows, length=length)._one(seed)
    if isinstance(task, Classify):
        return Micro(micro.inputs, torch.arange(rows) % 3, rows, rows)
    return micro


def work(engine, micro, *, task, head, meter=None):
    """A step's operations by torch's counter."""
    engine.model.train()
    watching = meter.count([micro], head=head) if meter is not None else contextlib.nullcontext()
    with FlopCounterMode(display=False) as counter, watching:
        engine.forward_backward(
            [micro], micro.supervised, task=task, head=head, context=lambda index: contextlib.nullcontext()
        )
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("llama", {}),
        ("llama", {"targets": ("v_proj",)}),
        ("llama", {"targets": ("down_proj",)}),
        ("llama", {"checkpointing": "full"}),
        ("llama", {"checkpointing": "selective"}),
        ("gpt2", {}),
        ("gpt2", {"targets": ("c_fc",)}),
        ("bert", {"task": Classify()}),
        ("llama", {"task": Classify()}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_the_count_is_that_of_a_real_step(kind, how, tmp_path):
    task = how.get("task", LM)
    engine = engine_of(kind, tmp_path, **how)
    first, other = micro_of(3, 24, task=task), micro_of(2, 40, task=task, seed=1)
    head = engine.find_head(first.inputs, task=task)
    assert (head is None) == isinstance(task, Classify)
    meter = ThroughputMeter(engine, peak_tflops=None)
    counted = work(engine, first, task=task, head=head, meter=meter)
    cost = meter._cost

    def hardware(micro):
        rows, length = micro.inputs["input_ids"].shape
        return cost.hardware(rows * length, rows * length**2, micro.supervised)

    assert hardware(first) == pytest.approx(counted, rel=TOLERANCE)
    # and from one shape to another
    assert hardware(other) == pytest.approx(work(engine, other, task=task, head=head), rel=TOLERANCE)
    rows, length = first.inputs["input_ids"].shape
    model = cost.model(rows * length, rows * length**2, first.supervised)
    again = hardware(first) - model
    share = {"none": 0.0, "selective": 0.15, "full": 0.2}[how.get("checkpointing", "none")]
    assert again / model >= share and (again > 0) == (share > 0)


def test_frozen_weights_cost_four_and_not_six(tmp_path):
    """By hand, for the layers between: 4 a frozen weight, 6 an adapter's weight, each token."""
    engine = engine_of("llama", tmp_path)
    micro = micro_of(3, 24)
    head = engine.find_head(micro.inputs, task=LM)
    meter = ThroughputMeter(engine, peak_tflops=None)
    work(engine, micro, task=LM, head=head, meter=meter)
    wide, narrow, rank = 32, 48, 4
    layers = [(wide, wide), (wide, 16), (wide, 16), (wide, wide), (wide, narrow), (wide, narrow), (narrow, wide)]
    frozen, trained = sum(a * b for a, b in layers), sum(rank * (a + b) for a, b in layers)
    spared = sum(2 * a * b + 2 * rank * a for a, b in layers[:3])  # queries, keys, values of the first block
    assert meter._cost.token == pytest.approx(2 * (4 * frozen + 6 * trained) - spared)
    assert meter._cost.pair == 2 * 12 * wide and meter._cost.supervised == 4 * wide * 64


def test_rates_are_counts_over_time(tmp_path):
    engine = engine_of("llama", tmp_path)
    micro = micro_of(3, 24)
    mask = micro.inputs["attention_mask"].clone()
    mask[1, 9:] = 0
    padded = Micro({**micro.inputs, "attention_mask": mask}, micro.labels, micro.supervised, 3)
    head = engine.find_head(micro.inputs, task=LM)
    peak = 1e-3
    meter = ThroughputMeter(engine, peak_tflops=peak)
    work(engine, padded, task=LM, head=head, meter=meter)
    assert meter.end_step(100.0).read() == {}  # the first, which is not like the others
    for index in range(EVERY):
        for _ in range(2):  # passes over the same tokens
            with meter.count([padded], head=head):
                pass
        figures = meter.end_step(0.5).read()
        assert (figures == {}) == (index < EVERY - 1)
    tokens, pairs = 24 + 9 + 24, 24**2 + 9**2 + 24**2
    done = 2 * meter._cost.model(tokens, pairs, padded.supervised) / 0.5 / 1e12
    assert figures["tokens_s"] == pytest.approx(tokens / 0.5, rel=1e-3)
    assert figures["tflops"] == pytest.approx(done, rel=1e-3) and figures["mfu"] == pytest.approx(done / peak, rel=1e-3)
    busy = 2 * meter._cost.hardware(72, 3 * 24**2, padded.supervised) / 0.5 / 1e12
    assert figures["hfu"] == pytest.approx(busy / peak, rel=1e-3) and figures["hfu"] > figures["mfu"]
    assert meter.total_rates() == figures
    assert (
        format_throughput({"tokens_s": 12345.0, "tflops": 0.035, "mfu": 0.41})
        == "12,345 tokens/s, 35 GFLOP/s, MFU 41 %"
    )


def test_packed_rows_have_the_pairs_of_their_samples():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    packed = SimpleNamespace(inputs={"input_ids": positions, "position_ids": positions}, rows=[(0, 1), (2,)])
    assert throughput._count_real_tokens(packed) == (11, 9 + 4 + 36)  # what fills the first row is no sample


def test_no_share_of_the_peak_is_above_one(tmp_path):
    """What was done can be done: a peak that was measured too low is raised by it."""
    engine = engine_of("llama", tmp_path)
    micro = micro_of(3, 24)
    meter = ThroughputMeter(engine, peak_tflops=1e-12)
    work(engine, micro, task=LM, head=None, meter=meter)
    meter.end_step(1.0)
    for _ in range(EVERY):
        with meter.count([micro], head=None):
            pass
        figures = meter.end_step(0.5).read()
    assert figures["hfu"] == 1.0 and 0 < figures["mfu"] <= 1.0


def one_step(engine, micro, meter):
    with meter.count([micro], head=None):
        engine.forward_backward(
            [micro], micro.supervised, task=LM, head=None, context=lambda index: contextlib.nullcontext()
        )
    meter.end_step(1.0)


def test_a_layer_that_gives_a_tuple_is_counted(tmp_path):
    """Routers of Llama 4 are linear layers that give scores and logits."""
    engine = engine_of("llama4", tmp_path, targets=("q_proj", "v_proj"))
    meter = ThroughputMeter(engine, peak_tflops=None)
    one_step(engine, micro_of(2, 8), meter)
    assert meter._cost is not None and meter._cost.token > 0


def test_a_meter_ends_no_run(tmp_path, monkeypatch):
    engine, micro = engine_of("llama", tmp_path), micro_of(2, 8)
    monkeypatch.setattr("flatshift.finetune.train.throughput._layer_output", lambda output: SimpleNamespace(shape=()))
    meter = ThroughputMeter(engine, peak_tflops=1.0)
    for _ in range(EVERY + 1):
        one_step(engine, micro, meter)
    assert meter._cost is None and set(meter.total_rates()) == {"tokens_s"}
