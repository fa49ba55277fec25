"""The plan beside what the allocator counts in an update of a small random model: heads that judge rows, hidden tokens,
pairs of answers, packed rows, and what regularizers hold. Words are many, so that logits of them would be seen."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks._harness import held_bytes, peak_bytes
from flatshift import regularizers
from flatshift.finetune.compute import attention
from flatshift.finetune.compute.micro_batch import MicroBatch, PreferenceTargets
from flatshift.finetune.compute.numerics import without_input_casts
from flatshift.finetune.compute.precision import autocast
from flatshift.finetune.config import Adapter, Mesh, Optimizer, Train
from flatshift.finetune.parallel.build import build_engine
from flatshift.finetune.parallel.mesh import ProcessMesh
from flatshift.finetune.planner.footprint import predict_footprint
from flatshift.finetune.planner.memory import count_saved_bytes, memory_plan, plan_lines
from flatshift.finetune.planner.sizes import read_sizes
from flatshift.finetune.tasks import Classify, LanguageModel, MaskedLM, Preference, Task
from flatshift.finetune.train.optimizer import AdapterOptimizer
from flatshift.regularizers.config import ASAM, GGPO, MGPO, SAM, BiLora, FlatLora, Plain, RegularizerConfig

ROWS, TOKENS, WORDS, CLASSES = 4, 160, 12_000, 3
ADAPTER = Adapter(rank=8)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def backbones(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("backbones")
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4}
    about = {**sizes, "vocab_size": WORDS, "max_position_embeddings": 512, "pad_token_id": 0}
    llama = transformers.LlamaConfig(**about, num_key_value_heads=2, tie_word_embeddings=False, use_cache=False)
    bert = transformers.BertConfig(**about, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        transformers.LlamaForCausalLM(llama).save_pretrained(folder / "llama")
        transformers.BertForMaskedLM(bert).save_pretrained(folder / "bert")
    return {"llama": folder / "llama", "bert": folder / "bert"}


def _micro(task: Task) -> tuple[MicroBatch, int]:
    drawn = torch.Generator().manual_seed(1)
    rows = ROWS * task.traits.rows_per_example
    ids = torch.randint(5, WORDS, (rows, TOKENS), generator=drawn)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    each = tuple((row,) for row in range(rows))
    if task.traits.is_sequence_level:
        return MicroBatch(inputs, torch.arange(rows) % CLASSES, rows, rows, each, padded=False), rows
    labels = ids.clone()
    labels[:, 0] = -100
    if task.traits.masks_tokens:
        labels[:, int(TOKENS * task.supervised) :] = -100
    if task.pack:
        half = torch.arange(TOKENS // 2).repeat(2)
        labels[:, TOKENS // 2] = -100
        inputs = {"input_ids": ids, "position_ids": half.expand(rows, -1)}
    count, sides = int((labels != -100).sum()), None
    chosen = (labels != -100).flatten().nonzero().flatten()
    if task.traits.is_answer_level:
        signs = torch.tensor([1.0, -1.0]).repeat(ROWS)
        sides, count = PreferenceTargets(signs, (labels != -100).sum(1).float(), paired=True), ROWS
    return MicroBatch(inputs, labels, count, rows, each, chosen=chosen, padded=False, preference=sides), count


def _allocated(
    backbone: Path, task: Task, train: Train, config: RegularizerConfig | None = None, adapter: Adapter = ADAPTER
) -> tuple[float, dict[str, int]]:
    """Bytes at the worst moment of the third update, and what a training would say before its first one, by cause."""
    before = held_bytes()  # tests that ran before this one in its process keep models of theirs
    names = [str(number) for number in range(CLASSES)] if task.traits.is_sequence_level else None
    engine = build_engine(
        str(backbone),
        task=task,
        adapter=adapter,
        train=train,
        mesh=Mesh(),
        world=ProcessMesh.alone(CPU),
        label_names=names,
    )
    said = memory_plan(engine.model, train=task.traits.count_token_rows(train), task=task, regularizer=config).causes
    optimizer, regularizer = AdapterOptimizer(engine.parameters, Optimizer()), regularizers.build(config or Plain())
    regularizer.attach(engine.model, seed=0, total_steps=10)
    engine.model.train()
    (micro, count), steps, head = _micro(task), itertools.count(), []

    def update() -> None:
        with without_input_casts(engine.model, train), attention.packed_attention(engine.model, CPU):
            if not head:
                with autocast(train, CPU):
                    head.append(engine.find_head(micro.inputs, task=task))
                engine.reshard()
            with regularizer.step(next(steps)) as passes:
                for _ in passes:
                    engine.forward_backward(
                        [micro], count, task=task, head=head[0], context=lambda _: autocast(train, CPU)
                    )
        engine.clip(1.0)
        optimizer.step(1e-3)
        regularizer.after_optimizer_step(1e-3)

    update()
    update()
    found = peak_bytes(update) - before
    regularizer.detach()
    return found, said


def _planned(
    backbone: Path, task: Task, train: Train, config: RegularizerConfig | None = None, adapter: Adapter = ADAPTER
) -> int:
    sizes = read_sizes(backbone, adapter).under(task, classes=CLASSES)
    needs = predict_footprint(
        sizes,
        mesh=Mesh(),
        adapter=adapter,
        train=task.traits.count_token_rows(train),
        device="cpu",
        packed=task.pack,
        regularizer=config,
    )
    return dataclasses.replace(needs, logits=0).total


TRAIN = Train(batch_size=ROWS, max_length=TOKENS, precision="fp32")
TASKS = {
    "classes": ("llama", Classify(), {}),
    "classes, bf16": ("llama", Classify(), {"precision": "bf16"}),
    "classes of an encoder": ("bert", Classify(), {}),
    "hidden tokens": ("bert", MaskedLM(), {}),
    "pairs of answers": ("llama", Preference(), {}),
    "packed rows": ("llama", LanguageModel(), {}),
    "packed rows, recomputed": ("llama", LanguageModel(), {"checkpointing": "full", "precision": "bf16"}),
}


@pytest.mark.parametrize("name", TASKS)
def test_what_the_loss_reads_is_planned(name: str, backbones: dict[str, Path]) -> None:
    kind, task, changed = TASKS[name]
    train: Any = dataclasses.replace(TRAIN, **changed)
    measured, said = _allocated(backbones[kind], task, train)
    planned = _planned(backbones[kind], task, train)
    assert planned == pytest.approx(measured, rel=0.05)
    assert sum(said.values()) == pytest.approx(measured, rel=0.05)


def test_masters_of_a_narrow_adapter_are_planned(backbones: dict[str, Path]) -> None:
    task, train = LanguageModel(pack=False), dataclasses.replace(TRAIN, precision="bf16", adapter_precision="bf16")
    folder, alone = backbones["llama"], ProcessMesh.alone(CPU)
    engine = build_engine(str(folder), task=task, adapter=ADAPTER, train=train, mesh=Mesh(), world=alone)
    said, optimizer = memory_plan(engine.model, train=train), AdapterOptimizer(engine.parameters, Optimizer())
    assert said.optimizer == 8 * said.adapter // 2 + sum(master.nbytes for master in optimizer.masters.values())
    planned = predict_footprint(read_sizes(folder, ADAPTER), mesh=Mesh(), adapter=ADAPTER, train=train).adapter
    assert planned == said.adapter + said.gradients + said.optimizer
    lines = plan_lines(engine.model, train=train, optimizer=Optimizer(), plan=said)
    assert next(line for line in lines if line.startswith("  adapter ")).endswith(" parameters, bfloat16")


@pytest.mark.parametrize("rate", [None, 0.0])
def test_dropout_in_attention_keeps_weights_of_each_pair(rate: float | None, tmp_path: Path) -> None:
    tokens = 2 * TOKENS
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=tokens, vocab_size=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    task, train = LanguageModel(pack=False), dataclasses.replace(TRAIN, max_length=tokens, backbone_dropout=rate)
    alone = ProcessMesh.alone(CPU)
    engine = build_engine(str(tmp_path), task=task, adapter=ADAPTER, train=train, mesh=Mesh(), world=alone)
    said = memory_plan(engine.model, train=train, task=task).activations / ROWS
    engine.model.train()
    ids = torch.ones(1, tokens, dtype=torch.int64)
    with engine.dropout(0).forward_pass(0, first_row=0, rows=1, tokens=tokens):
        kept = count_saved_bytes(engine.model, lambda: engine.model(input_ids=ids, use_cache=False).logits)
    planned = predict_footprint(read_sizes(tmp_path, ADAPTER), mesh=Mesh(), adapter=ADAPTER, train=train).activations
    assert said == pytest.approx(kept, rel=0.02) and planned / ROWS == pytest.approx(kept, rel=0.1)
    assert (kept > 2 * 4 * tokens**2 * 9) == (rate is None)


@pytest.mark.parametrize(
    "changed", [{}, {"precision": "bf16"}, {"checkpointing": "full", "precision": "bf16"}], ids=str
)
def test_dora_is_planned(changed: dict[str, Any], backbones: dict[str, Path]) -> None:
    """Its magnitudes' gradient keeps two outputs of each layer, and its norms take a weight's worth of temporaries."""
    train: Any = dataclasses.replace(TRAIN, **changed)
    task, dora = LanguageModel(pack=False), dataclasses.replace(ADAPTER, dora=True)
    measured, said = _allocated(backbones["llama"], task, train, adapter=dora)
    planned = _planned(backbones["llama"], task, train, adapter=dora)
    assert planned > 1.1 * _planned(backbones["llama"], task, train)
    assert planned == pytest.approx(measured, rel=0.05)
    assert sum(said.values()) == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    "config",
    [
        GGPO(),
        pytest.param(GGPO(rank=32, probes=8), marks=pytest.mark.slow),
        FlatLora(schedule="constant"),
        MGPO(),
        pytest.param(MGPO(form="code"), marks=pytest.mark.slow),
        pytest.param(ASAM(), marks=pytest.mark.slow),
        BiLora(),
        SAM(),
    ],
    ids=lambda config: f"{config.kind}-{getattr(config, 'form', getattr(config, 'rank', None))}",
)
def test_what_a_regularizer_holds_is_planned(config: RegularizerConfig, backbones: dict[str, Path]) -> None:
    """Beside plain LoRA, so that an error elsewhere does not hide one here."""
    task = LanguageModel(pack=False)
    measured, plain = (_allocated(backbones["llama"], task, TRAIN, each)[0] for each in (config, None))
    planned, bare = (_planned(backbones["llama"], task, TRAIN, each) for each in (config, None))
    assert planned - bare == pytest.approx(measured - plain, rel=0.15)
    assert planned == pytest.approx(measured, rel=0.05)
