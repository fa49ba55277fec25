"""Any mesh drops what one process drops: losses and adapters of a few updates, with dropout of adapter and backbone."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from flatshift.finetune.config import Adapter, Mesh, Optimizer, Train
from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.data.example import Example
from flatshift.finetune.parallel.build import build_engine
from flatshift.finetune.parallel.mesh import ProcessMesh
from flatshift.finetune.run_directory import read_metrics
from flatshift.finetune.tasks import Classify, LanguageModel, Seq2Seq, Task
from flatshift.regularizers import GGPO, Plain, RegularizerConfig, build
from tests.support.distributed_ranks import run_ranks
from tests.support.finetune_models import save_backbone
from tests.support.seq2seq_models import save_encoder_decoder
from tests.support.stage_runs import run_or_stop

STEPS = 4
BOUND = 1e-5
"""Largest absolute difference of a loss or of an entry of the adapter, float32."""
LABELS = ("0", "1", "2")
ADAPTER = Adapter(rank=4, dropout=0.2)
WET: dict[str, dict[str, Any]] = {
    "llama": {"attention_dropout": 0.1},
    "llama-even": {"attention_dropout": 0.1},
    "llama-deep": {"attention_dropout": 0.1, "num_hidden_layers": 4},
    "gpt2-dropout": {},
    "bert": {},
    "roberta": {},
    "deberta": {},
    "gemma2": {"attention_dropout": 0.1},
    "t5": {"dropout_rate": 0.1},
    "t5-gated": {"dropout_rate": 0.1},
}
"""What differs from the small models of the other tests."""


@dataclass(frozen=True)
class Case:
    """A backbone and how it is trained."""

    kind: str = "llama"
    mesh: Mesh = field(default_factory=Mesh)
    checkpointing: Any = "none"
    accumulate: int = 2
    adapter: Adapter = ADAPTER
    regularizer: RegularizerConfig = field(default_factory=Plain)
    pack: bool = False

    @property
    def task(self) -> Task:
        if self.kind in ("bert", "roberta", "deberta"):
            return Classify()
        return Seq2Seq() if self.kind.startswith("t5") else LanguageModel(pack=self.pack)

    def train(self) -> Train:
        return Train(
            steps=STEPS, batch_size=8 // self.accumulate, accumulate=self.accumulate, max_length=24, precision="fp32",
            device="cpu", checkpointing=self.checkpointing, save_every=1,
        )  # fmt: skip

    def alone(self) -> Case:
        """In one process, kept rather than computed again."""
        return replace(self, mesh=Mesh(), checkpointing="none", accumulate=2)


def save(kind: str, folder: Path) -> Path:
    if kind.startswith("t5"):
        return save_encoder_decoder(kind, folder, **WET[kind])
    return save_backbone(kind.removesuffix("-deep").removesuffix("-even"), folder, **WET[kind])


def examples(task: Task, *, even: bool) -> list[Example]:
    """Rows of unlike length, so that ranks pad to unlike widths; or `even`, all of one."""
    found = []
    for i in range(24):
        ids = [3 + (7 * i + k) % 40 for k in range(8 if even else 5 + 5 * i % 9)]
        if isinstance(task, Classify):
            found.append(Example(ids, i % 3, str(i), str(i)))
        elif isinstance(task, Seq2Seq):
            found.append(Example(ids, [*ids[2:], 2], str(i), str(i), decoder_ids=[0, *ids[2:]]))
        else:
            found.append(Example(ids, [-100, *ids[1:]], str(i), str(i)))
    return found


def course(case: Case, source: str, folder: Path, *, stop_at: int | None = None) -> dict[str, Any]:
    """A stage by the loop; whether it was begun in `folder` before or not."""
    task, train = case.task, case.train()
    world = ProcessMesh.alone() if case.mesh.size == 1 else ProcessMesh.of(case.mesh, torch.device("cpu"))
    labels = LABELS if isinstance(task, Classify) else None
    engine = build_engine(
        source, task=task, adapter=case.adapter, train=train, mesh=case.mesh, world=world, label_names=labels
    )
    run_or_stop(
        engine,
        folder,
        stop_at=stop_at,
        writes=world.is_main,
        task=task,
        batches=TrainingDataLoader(
            examples(task, even=case.kind.endswith("even")), task=task, batch_size=train.batch_size,
            accumulate=train.accumulate, seed=0, max_length=24, pad_id=0, share=engine.share, multiple=engine.multiple,
        ),
        optimizer=Optimizer(lr=3e-3, eps=1e-4),
        train=train,
        regularizer=build(case.regularizer),
    )  # fmt: skip
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if line["split"] == "train"]
    losses = {line["step"]: line["loss"] for line in lines}
    adapter = {name: tensor.clone() for name, tensor in engine.full_tensors(engine.parameters).items()}
    return {"losses": list(losses.values()), "adapter": adapter}


def courses(cases: dict[str, Case], sources: dict[str, str], folder: str) -> dict[str, dict[str, Any]]:
    return {name: course(case, sources[case.kind], Path(folder) / name) for name, case in cases.items()}


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert len(one["losses"]) == len(other["losses"]) == STEPS and one["adapter"].keys() == other["adapter"].keys()
    entries = [float((tensor - other["adapter"][name]).abs().max()) for name, tensor in one["adapter"].items()]
    return max(*entries, *(abs(a - b) for a, b in zip(one["losses"], other["losses"], strict=True)))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {kind: str(save(kind, tmp_path_factory.mktemp(kind))) for kind in WET}


def compare(cases: dict[str, Case], ranks: int, sources: dict[str, str], tmp_path: Path) -> None:
    """Demand of every case what one process computes; and that dropout is felt there."""
    alone: dict[Case, dict[str, Any]] = {}
    for case in cases.values():
        if case.alone() not in alone:
            number = str(len(alone))
            alone[case.alone()] = course(case.alone(), sources[case.kind], tmp_path / f"alone-{number}")
            dry = replace(case.alone(), adapter=replace(case.adapter, dropout=0.0))
            felt = apart(alone[case.alone()], course(dry, sources[case.kind], tmp_path / f"dry-{number}"))
            assert felt > 100 * BOUND, felt
    with tempfile.TemporaryDirectory() as folder:
        run = courses if ranks == 1 else partial(run_ranks, courses, ranks)
        found = run(cases, sources, folder)
    worst = {
        name: apart((found if ranks == 1 else found[0])[name], alone[case.alone()]) for name, case in cases.items()
    }
    print({name: f"{far:.1e}" for name, far in worst.items()})
    assert all(far <= BOUND for far in worst.values()), worst


def test_recomputation_accumulation_and_resume_drop_alike(sources: dict[str, str], tmp_path: Path) -> None:
    cases = {
        "blocks": Case(checkpointing="full"),
        "attention": Case("gpt2-dropout", checkpointing="selective"),
        "one micro-batch": Case("gpt2-dropout", accumulate=1),
        "four micro-batches": Case(accumulate=4),
        "what rows share": Case("deberta", accumulate=1),
    }
    compare(cases, 1, sources, tmp_path)
    case, source = Case("gpt2-dropout"), sources["gpt2-dropout"]
    whole = course(case, source, tmp_path / "whole")
    course(case, source, tmp_path / "parts", stop_at=2)
    parts = course(case, source, tmp_path / "parts")
    assert whole["losses"] == parts["losses"]
    assert all(torch.equal(tensor, parts["adapter"][name]) for name, tensor in whole["adapter"].items())


def test_two_ranks_drop_what_one_process_drops(sources: dict[str, str], tmp_path: Path) -> None:
    cases = {
        "tp, tokens split": Case(mesh=Mesh(tp=2, sequence_parallel=True), checkpointing="full"),
        "tp, gpt2": Case("gpt2-dropout", Mesh(tp=2)),
        "pp": Case(mesh=Mesh(pp=2)),
        "cp": Case(mesh=Mesh(cp=2)),
        "dp": Case("gpt2-dropout", Mesh(dp=2), checkpointing="selective"),
        "dp, packed": Case(mesh=Mesh(dp=2), pack=True),
        "replicate, noise": Case(mesh=Mesh(replicate=2), regularizer=GGPO(sigma=0.05)),
    }
    compare(cases, 2, sources, tmp_path)


@pytest.mark.slow
def test_two_ranks_drop_alike_in_all_families(sources: dict[str, str], tmp_path: Path) -> None:
    cases = {
        "tp": Case(mesh=Mesh(tp=2)),
        "tp, t5": Case("t5", Mesh(tp=2)),
        "pp, t5": Case("t5", Mesh(pp=2)),
        "bert, tp": Case("bert", Mesh(tp=2)),
        "bert, pp": Case("bert", Mesh(pp=2)),
        "bert, dp": Case("bert", Mesh(dp=2), checkpointing="full"),
        "roberta, tp": Case("roberta", Mesh(tp=2)),
        "deberta, dp": Case("deberta", Mesh(dp=2), checkpointing="full"),
        "gemma2, tp": Case("gemma2", Mesh(tp=2, sequence_parallel=True)),
        "gemma2, pp": Case("gemma2", Mesh(pp=2)),
        "gpt2, pp": Case("gpt2-dropout", Mesh(pp=2), checkpointing="full"),
        "gpt2, cp": Case("gpt2-dropout", Mesh(cp=2), checkpointing="selective"),
        "t5-gated, tp": Case("t5-gated", Mesh(tp=2), checkpointing="full"),
        "t5, dp": Case("t5", Mesh(dp=2)),
        "t5, pp, gpipe": Case("t5", Mesh(pp=2, schedule="gpipe")),
        "zbv": Case("llama-deep", Mesh(pp=2, schedule="zbv"), checkpointing="full"),
        "zero-bubble": Case("llama-deep", Mesh(pp=2, schedule="zero-bubble")),
        "interleaved": Case("llama-deep", Mesh(pp=2, schedule="interleaved")),
        "pp, pieces": Case(mesh=Mesh(pp=2, microbatches=3), accumulate=2),
        "tp, noise": Case(mesh=Mesh(tp=2), regularizer=GGPO(sigma=0.05)),
        "pp, noise": Case(mesh=Mesh(pp=2), regularizer=GGPO(sigma=0.05)),
        "dora, pp": Case(mesh=Mesh(pp=2), adapter=replace(ADAPTER, dora=True)),
        "dora, tp": Case("gpt2-dropout", Mesh(tp=2), adapter=replace(ADAPTER, dora=True)),
        "gemma2, cp": Case("gemma2", Mesh(cp=2), checkpointing="full"),
        "gpt2, tokens split": Case("gpt2-dropout", Mesh(tp=2, sequence_parallel=True), checkpointing="full"),
        "bert, tokens split": Case("bert", Mesh(tp=2, sequence_parallel=True)),
        "tp, packed, tokens split": Case(mesh=Mesh(tp=2, sequence_parallel=True), pack=True),
        "pp, packed, pieces": Case("gpt2-dropout", Mesh(pp=2, microbatches=3), pack=True),
        "cp, packed": Case("gpt2-dropout", Mesh(cp=2), pack=True, checkpointing="full"),
        "dp, replicated": Case(mesh=Mesh(dp=2, adapters="replicate"), accumulate=1),
    }
    compare(cases, 2, sources, tmp_path)


@pytest.mark.slow
def test_four_ranks_drop_what_one_process_drops(sources: dict[str, str], tmp_path: Path) -> None:
    cases = {
        "dp × tp": Case("gpt2-dropout", Mesh(dp=2, tp=2)),
        "dp × tp, tokens split": Case(mesh=Mesh(dp=2, tp=2, sequence_parallel=True), checkpointing="full"),
        "pp × tp": Case("t5", Mesh(pp=2, tp=2)),
        "pp × dp": Case(mesh=Mesh(pp=2, dp=2)),
        "cp × tp, tokens split": Case(mesh=Mesh(cp=2, tp=2, sequence_parallel=True)),
        "cp × pp": Case(mesh=Mesh(cp=2, pp=2), checkpointing="selective"),
        "replicate × dp": Case("bert", Mesh(replicate=2, dp=2)),
    }
    compare(cases, 4, sources, tmp_path)
