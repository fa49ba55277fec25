"""A cell in a stack is the cell alone: every line that the loop writes, and the adapter that it ends with."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import pytest
import torch

from flatshift.experiments.recipe import from_override, load_recipe
from flatshift.experiments.studies.cell import cell_of, run_cell
from flatshift.experiments.studies.stack import run_stack
from flatshift.finetune.adapters.adapter import attach_adapter, trainable
from flatshift.finetune.config import Adapter, Evaluate, Optimizer, Record, Train
from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.data.example import Example
from flatshift.finetune.models.fingerprint import checksum
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.run_directory import METRICS, RunDirectory, read_metrics
from flatshift.finetune.stacked.host import Host
from flatshift.finetune.stacked.together import cell_engine, run_together, stage_work
from flatshift.finetune.tasks import Classify, Completion, LanguageModel
from flatshift.finetune.train.loop import TrainingStage, train_stage
from flatshift.finetune.train.throughput import RATES
from flatshift.finetune.train.trace.files import read_trace
from flatshift.finetune.train.trace.recorder import Recording
from flatshift.regularizers import BAR, GGPO, MGPO, FlatLora, LoraSAM, Plain, RegularizerConfig, build
from tests.finetune_models import IGNORED, PadOnly, save_backbone

LABELS = ("a", "b", "c")
DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DRY_HEAD = DRY | {"summary_last_dropout": 0.0}


@dataclass
class Made:
    """A cell as a test describes it."""

    rank: int = 4
    seed: int = 0
    lr: float = 3e-3
    rows: int = 4
    steps: int = 50
    accumulate: int = 1
    regularizer: RegularizerConfig = Plain()  # noqa: RUF009 - frozen
    lora_plus: float | None = None
    weight_decay: float = 0.0
    clip: float | None = 1.0
    eval_every: int = 0
    patience: int | None = None
    precision: str = "fp32"
    targets: str | tuple[str, ...] = "all-linear"

    @property
    def adapter(self):
        return Adapter(rank=self.rank, targets=self.targets)

    @property
    def train(self):
        return Train(
            steps=self.steps, batch_size=self.rows, accumulate=self.accumulate, seed=self.seed, max_length=24,
            eval_every=self.eval_every, patience=self.patience, precision=self.precision, save_every=0,
        )  # fmt: skip

    def arguments(self, task, run):
        examples = examples_of(task, self.seed)
        # one cell's curvature, not too early: at first Adam's preconditioner of A is of the size of its ε
        record = Record(steps=(1, 8), sharpness=(16,) if self.seed == 3 else (), sharpness_rows=4)
        return {
            "name": "s",
            "task": task,
            "batches": TrainingDataLoader(
                examples, task=task, batch_size=self.rows, accumulate=self.accumulate, seed=self.seed, max_length=24,
                pad_id=0,
            ),
            "dev": examples_of(task, 99)[:10],
            "optimizer": Optimizer(
                lr=self.lr, lora_plus=self.lora_plus, weight_decay=self.weight_decay, clip=self.clip
            ),
            "train": self.train,
            "evaluate": Evaluate(),
            "regularizer": build(self.regularizer),
            "run": run,
            "seed": self.seed,
            "recording": Recording.choose(record, train=examples, dev=[], test=examples[:7], seed=self.seed),
        }  # fmt: skip


MIXED = [
    Made(rank=2, lora_plus=4.0),
    Made(rank=2, seed=1, lr=1e-2, eval_every=10, clip=None),
    Made(rank=8, seed=2, rows=3, steps=30, accumulate=2, weight_decay=0.1),
    Made(rank=4, seed=3, regularizer=GGPO(sigma=0.1, refresh=4)),
    Made(rank=4, seed=4, lr=1e-2, regularizer=GGPO(sigma=0.2, scope="microbatch"), accumulate=2, rows=2),
    Made(rank=4, seed=5, steps=40, regularizer=FlatLora(sigma=0.1), eval_every=8, patience=2),
]


def examples_of(task, seed, count=30):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        length = int(torch.randint(3, 24, (1,), generator=generator))
        ids = torch.randint(3, 20, (length,), generator=generator).tolist()
        hidden = 1 if isinstance(task, LanguageModel) else length // 2
        labels = sum(ids) % 3 if isinstance(task, Classify) else [IGNORED] * hidden + ids[hidden:]
        made.append(Example(input_ids=ids, labels=labels, id=str(index), where=f"f:{index}"))
    return made


def backbone_of(kind, task, directory, precision="fp32"):
    source = directory / kind
    if not source.is_dir():
        more = {"bert": DRY, "electra": DRY_HEAD, "gpt2": {"summary_first_dropout": 0.0}}.get(kind, {})
        save_backbone(kind, source, **more)
    labels = LABELS if isinstance(task, Classify) else None
    return load_backbone(source, task=task, label_names=labels, precision=precision)


def alone(cell, kind, task, directory):
    model = attach_adapter(backbone_of(kind, task, directory, cell.precision), cell.adapter, task=task, seed=cell.seed)
    run = RunDirectory.create(directory / f"alone-{cell.rank}-{cell.seed}")
    train_stage(model, PadOnly(), TrainingStage(**cell.arguments(task, run)))
    return run, trainable(model)


def together(cells, kind, task, directory):
    """(run directory, engine, end) of each cell."""
    backbone = backbone_of(kind, task, directory, cells[0].precision)
    engines = [cell_engine(backbone, c.adapter, task=task, train=c.train) for c in cells]
    runs = [RunDirectory.create(directory / f"stacked-{i}") for i in range(len(cells))]
    stages = [
        stage_work(engine, PadOnly(), TrainingStage(**cell.arguments(task, run)))
        for cell, engine, run in zip(cells, engines, runs, strict=True)
    ]
    with Host(backbone, engines, task=task, pad_id=0) as host:
        ends = dict(run_together(host, stages))
    return [(run, engine, ends[i]) for i, (run, engine) in enumerate(zip(runs, engines, strict=True))]


def assert_lines_agree(stacked, by_itself, *, rel):
    assert len(stacked) == len(by_itself) > 0
    for mine, theirs in zip(stacked, by_itself, strict=True):
        assert mine.keys() - RATES == theirs.keys() - RATES  # a stack's time is not a cell's own
        for name, value in theirs.items():
            if name in {"time_s", "record_s", *RATES}:
                continue
            # curvature is found by iterations that stop at 1e-2 or so, and differences of near numbers are looser
            loose = 1e-2 if name.startswith("sharpness.") else 1e-4 if name in {"balance", "guidance"} else rel
            assert mine[name] == (pytest.approx(value, rel=loose, abs=1e-9) if isinstance(value, float) else value), (
                name
            )


def assert_same(found, expected, *, rel=1e-5):
    (run, engine, _), (own_run, parameters) = found, expected
    assert_lines_agree(read_metrics(run.path / METRICS), read_metrics(own_run.path / METRICS), rel=rel)
    assert_lines_agree(read_trace(run.path), read_trace(own_run.path), rel=rel)
    gap = sum((engine.parameters[n] - p).detach().double().square().sum().item() for n, p in parameters.items())
    size = sum(p.detach().double().square().sum().item() for p in parameters.values())
    assert math.sqrt(gap / size) <= rel


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        ("llama", LanguageModel()),
        pytest.param("llama", Completion(pack=False), marks=pytest.mark.slow),
        ("bert", Classify()),
        pytest.param("gpt2", Completion(), marks=pytest.mark.slow),
    ],
    ids=["packed-llama", "padded-llama", "bert-head", "packed-gpt2"],
)
def test_every_cell_of_a_mixed_stack_is_the_cell_alone(kind, task, tmp_path):
    cells = MIXED if kind == "llama" and task.kind == "language-model" else MIXED[1:4]
    found = together(cells, kind, task, tmp_path)
    for cell, of_stack in zip(cells, found, strict=True):
        assert_same(of_stack, alone(cell, kind, task, tmp_path))


def test_regularizers_of_adapter_space_work_in_a_stack(tmp_path):
    task = LanguageModel()
    kinds = [MGPO(rho=0.05), MGPO(rho=0.05, form="code"), LoraSAM(), BAR()]
    cells = [Made(seed=i, steps=12, regularizer=kind) for i, kind in enumerate(kinds)]
    for cell, of_stack in zip(cells, together(cells, "llama", task, tmp_path), strict=True):
        assert_same(of_stack, alone(cell, "llama", task, tmp_path))


@pytest.mark.parametrize(
    ("kind", "task", "targets", "rows"),
    [
        ("llama", LanguageModel(), ["layers.1.mlp.down_proj"], [8, 16]),
        pytest.param("bert", Classify(), ["layer.1.output.dense"], [8, 16], marks=pytest.mark.slow),
        pytest.param("gpt2", Completion(pack=False), ["h.1.mlp.c_proj"], [8, 16], marks=pytest.mark.slow),
        ("electra", Classify(), ["embeddings_project", "layer.1.output.dense"], [16, 16]),  # trained below its blocks
    ],
    ids=["packed-llama", "bert", "padded-gpt2", "electra"],
)
def test_frozen_blocks_are_computed_once_for_cells_that_see_the_same_rows(kind, task, targets, rows, tmp_path):
    common = {"seed": 1, "steps": 12, "targets": tuple(targets)}
    cells = [
        Made(rank=2, **common),
        Made(rank=4, lr=1e-2, **common),
        Made(rank=8, regularizer=GGPO(sigma=0.1), **common),
        Made(rank=3, **{**common, "seed": 2}),
    ]
    backbone = backbone_of(kind, task, tmp_path)
    engines = [cell_engine(backbone, cell.adapter, task=task, train=cell.train) for cell in cells]
    micros = {seat: cell.arguments(task, None)["batches"].at(0)[0] for seat, cell in enumerate(cells)}
    seen = []
    for block in next(m for m in backbone.modules() if isinstance(m, torch.nn.ModuleList)):
        inner = next(iter(block.children()))
        inner.register_forward_hook(lambda m, given, out: seen.append(len(out[0] if isinstance(out, tuple) else out)))
    with Host(backbone, engines, task=task, pad_id=0) as host, torch.no_grad():
        host.forward(list(micros), micros, plain=False)
    assert seen == rows
    for cell, of_stack in zip(cells, together(cells, kind, task, tmp_path), strict=True):
        assert_same(of_stack, alone(cell, kind, task, tmp_path))


@pytest.mark.bf16
def test_bf16_agrees_to_its_rounding(tmp_path):
    task = LanguageModel()
    cells = [Made(seed=i, rank=r, steps=8, precision="bf16") for i, r in enumerate((2, 4, 4))]
    for cell, (run, _, _) in zip(cells, together(cells, "llama", task, tmp_path), strict=True):
        own, _ = alone(cell, "llama", task, tmp_path)
        mine, theirs = (
            [line["loss"] for line in read_metrics(each.path / METRICS) if line["split"] == "train"]
            for each in (run, own)
        )
        assert mine == pytest.approx(theirs, rel=2e-2)


def test_a_cell_that_diverges_ends_alone_with_the_message_of_the_loop(tmp_path):
    task = Completion(pack=False)
    wild = Made(seed=1, lr=1e30, clip=None, steps=20)
    cells = [Made(seed=0, steps=20), wild, Made(seed=2, steps=20)]
    found = together(cells, "llama", task, tmp_path)
    with pytest.raises(ValueError, match="not a finite number") as own:
        alone(wild, "llama", task, tmp_path)
    assert str(found[1][2]) == str(own.value)
    for place in (0, 2):
        assert_same(found[place], alone(cells[place], "llama", task, tmp_path))


def test_the_backbone_is_left_as_it_was(tmp_path):
    task = Classify()
    backbone = backbone_of("bert", task, tmp_path)
    before, keys = checksum(backbone), [set(vars(module)) for module in backbone.modules()]
    cells = [Made(rank=2, steps=3), Made(rank=4, seed=1, steps=5)]
    engines = [cell_engine(backbone, c.adapter, task=task, train=c.train) for c in cells]
    stages = [
        stage_work(engine, PadOnly(), TrainingStage(**cell.arguments(task, RunDirectory.create(tmp_path / f"r{i}"))))
        for i, (cell, engine) in enumerate(zip(cells, engines, strict=True))
    ]
    with Host(backbone, engines, task=task, pad_id=0) as host:
        assert all(not isinstance(end, ValueError) for _, end in run_together(host, stages))
    assert checksum(backbone) == before
    assert [set(vars(module)) for module in backbone.modules()] == keys
    assert not any(module.training for module in backbone.modules())


def test_run_stack_leaves_what_run_cell_leaves(tmp_path):
    base = {
        "data.train.limit": 24, "train.steps": 4, "train.batch_size": 4, "eval.train_limit": 8, "eval.bootstrap": 20,
        "record.steps": "[2]", "data.label_noise": 0.25, "data.test.limit": 16, "data.dev.limit": 8,
        "train.precision": "fp32",
    }  # fmt: skip
    points = [{"adapter.rank": 1}, {"adapter.rank": 4}, {"optimizer.lr": 1e30}, {"data.train.limit": 10**9}]

    def cell(point, seed):
        laid = [from_override(k, v, "test") for k, v in {**base, **point, "train.seed": seed}.items()]
        return cell_of(load_recipe("classify", laid), point=point, seed=seed)

    cells = [cell(point, seed) for seed, point in enumerate(points)]
    for each in cells:
        run_cell(tmp_path / "alone" / each.key, each, 1)
    run_stack([tmp_path / "stack" / each.key for each in cells], cells, 1)
    for place, each in enumerate(cells):
        own, mine = (tmp_path / side / each.key for side in ("alone", "stack"))
        theirs, result = (json.loads((d / "result.json").read_text()) for d in (own, mine))
        assert result["status"] == theirs["status"] == ("done", "done", "diverged", "failed")[place]
        assert result["reason"] == theirs["reason"]
        assert result["stacked"] and theirs["stacked"] is None
        if place >= 2:
            continue
        files = [sorted(str(p.relative_to(d)) for p in d.rglob("*") if p.is_file()) for d in (own, mine)]
        assert files[0] == files[1]
        assert_lines_agree(read_trace(mine), read_trace(own), rel=1e-5)
        for split, metrics in theirs["metrics"].items():
            for name, figure in metrics.items():
                assert result["metrics"][split][name] == pytest.approx(figure, rel=1e-5), (split, name)
