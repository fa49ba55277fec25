"""On a mesh all ranks leave out, and go back from, the same updates, though only one of them met what was wrong."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from flatshift.finetune.config import Adapter, Evaluate, Mesh, Optimizer, SpikeRecovery, Train
from flatshift.finetune.parallel.build import build_engine
from flatshift.finetune.parallel.mesh import ProcessMesh
from flatshift.finetune.run_directory import RunDirectory, read_metrics
from flatshift.finetune.tasks import LanguageModel
from flatshift.finetune.train.stage import TrainingStage
from flatshift.finetune.train.trainer import Trainer
from flatshift.regularizers import GGPO, build
from tests.support.distributed_ranks import run_ranks
from tests.support.finetune_models import Micro, PadOnly, RandomBatches, save_backbone

TASK = LanguageModel()
NAN, JUMP = 3, 9


@dataclasses.dataclass(frozen=True)
class Numbered(Micro):
    """A micro-batch that knows which batch it is of."""

    batch: int = 0


class Shared(RandomBatches):
    """One data rank's rows of numbered batches."""

    def __init__(self, share: tuple[int, int]) -> None:
        super().__init__(rows=4)
        self.share = share

    def at(self, step: int) -> list[Any]:
        found = []
        for micro in super().at(step):
            index, width = self.share
            each = len(micro.labels) // width
            mine = slice(index * each, (index + 1) * each)
            inputs = {name: value[mine] for name, value in micro.inputs.items()}
            supervised = int((micro.labels[mine][:, 1:] != -100).sum())
            found.append(Numbered(inputs, micro.labels[mine], supervised, each, batch=step))
        return found

    def supervised(self, step: int) -> int:
        return sum(micro.supervised for micro in RandomBatches(rows=4).at(step))


def train(source: str, folder: str, mesh: Mesh) -> dict[str, Any]:
    """A stage whose last data rank meets a loss that is no number, and later one that is far too high."""
    world = ProcessMesh.alone() if mesh.size == 1 else ProcessMesh.of(mesh, torch.device("cpu"))
    settings = Train(
        steps=12,
        save_every=2,
        skip_nonfinite=1,
        spikes=SpikeRecovery(window=4, back=3, skip=4),
        threads=1,
        batch_size=4,
    )
    engine = build_engine(source, task=TASK, adapter=Adapter(rank=4), train=settings, mesh=mesh, world=world)
    index, width = engine.share
    whole = engine._loss

    def sick(micro: Any, **how: Any) -> torch.Tensor:
        loss = whole(micro, **how)
        if index + 1 == width and micro.batch == NAN:
            return loss * float("nan")
        return loss + 1000 if index + 1 == width and micro.batch == JUMP else loss

    engine._loss = sick  # type: ignore[method-assign]
    result = Trainer(
        engine,
        PadOnly(),  # type: ignore[arg-type]
        TrainingStage(
            name="s",
            task=TASK,
            batches=Shared(engine.share),  # type: ignore[arg-type]
            dev=[],
            optimizer=Optimizer(lr=1e-2),
            train=settings,
            evaluate=Evaluate(),
            regularizer=build(GGPO(sigma=0.02, refresh=3)),
            run=RunDirectory(Path(folder), writes=world.is_main),
            seed=0,
        ),
    ).fit()
    return {"result": dataclasses.asdict(result), "adapter": engine.full_tensors(engine.parameters)}


def test_two_ranks_do_what_one_process_does(tmp_path: Path) -> None:
    source = str(save_backbone("llama", tmp_path / "model"))
    alone = train(source, str(RunDirectory.create(tmp_path / "alone").path), Mesh())
    assert (alone["result"]["skipped"], alone["result"]["rewinds"], alone["result"]["steps"]) == (1, 1, 12)
    folder = RunDirectory.create(tmp_path / "two").path
    first, second = run_ranks(train, 2, source, str(folder), Mesh(dp=2))
    assert first["result"] == second["result"] == alone["result"]
    for name, value in alone["adapter"].items():
        assert torch.equal(first["adapter"][name], second["adapter"][name])
        assert torch.allclose(first["adapter"][name], value, rtol=1e-3, atol=1e-5), name
    lines = read_metrics(folder / "metrics.jsonl")
    assert [line["step"] for line in lines if line.get("skipped")] == [NAN + 1]
    (spike,) = [line for line in lines if line["split"] == "spike"]
    assert (spike["step"], spike["rewound_to"], spike["left_out"]) == (JUMP + 1, 6, [[6, 10]])
