"""An update on a mesh of eight ranks of which only the first is there: its collectives in their order, and its waits.

    python -m tests.support.rehearsal_mesh '{"dp": 8}' '{"dp": 4, "tp": 2}'

torch's fake process group answers every collective at once, with what this rank gave. So the training loop goes as on
one of eight processes, on tensors of the host that stand for a CUDA device's (`benchmarks.cuda_rehearsal`).
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._sized import Sizes, save_backbone

RANKS = 8
STEPS = 3
SIZES = Sizes(hidden=64, inner=96, blocks=3, vocabulary=512, rows=1, tokens=12)


@dataclass
class MeshFound:
    """What the rehearsal of a mesh came to; JSON by `vars`."""

    mesh: dict[str, Any]
    regularizer: str
    updates: list[list[str]] = field(default_factory=list)
    """`axis kind` of each collective of each update but the first, in order."""
    waits: list[list[str]] = field(default_factory=list)
    """And its waits."""
    lines: list[int] = field(default_factory=list)
    """Steps whose lines were written, in order."""


def rehearse_mesh(mesh: dict[str, Any], backbone: Path, *, regularizer: str = "plain", steps: int = STEPS) -> MeshFound:
    """Train `steps` updates on rank 0 of `mesh`, eight ranks in all.

    There must be no process group yet; there is none afterwards.
    """
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from benchmarks._collectives import Collectives
    from benchmarks._rehearsal import REGULARIZERS, dry_stage, rows
    from benchmarks.cuda_rehearsal import Rehearsal
    from benchmarks.gpu.llama import Padder, stage
    from flatshift.finetune.compute.capabilities import CUDA, override_capabilities
    from flatshift.finetune.config import Adapter, Mesh, Optimizer, Train
    from flatshift.finetune.data.batches import TrainingDataLoader
    from flatshift.finetune.parallel.build import build_engine
    from flatshift.finetune.parallel.mesh import ProcessMesh
    from flatshift.finetune.tasks import LanguageModel
    from flatshift.finetune.train.trainer import Trainer

    class Order(Collectives):
        """The collectives one after another."""

        def __init__(self, world: ProcessMesh) -> None:
            super().__init__(world)
            self.order: list[str] = []

        def _note(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
            before = dict(self.calls)
            super()._note(func, args, kwargs)
            self.order += [" ".join(key) for key, count in self.calls.items() if count != before.get(key, 0)]

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        layout, task = Mesh(**mesh), LanguageModel(pack=False)
        world = ProcessMesh.of(layout, torch.device("cpu"))
        share = world.index("replicate", "dp"), world.width("replicate", "dp")
        train = Train(steps=steps, batch_size=share[1], max_length=SIZES.tokens, save_every=0, precision="fp32")
        with override_capabilities(CUDA, on="cpu"):  # what FSDP2 gathers ahead is settled there
            engine = build_engine(
                backbone,
                task=task,
                adapter=Adapter(rank=8),
                train=train,
                mesh=layout,
                world=world,
                log=lambda line: None,
            )
        examples = rows("completion", 3 * RANKS)
        batches = TrainingDataLoader(
            examples,
            task=task,
            batch_size=share[1],
            accumulate=1,
            seed=0,
            max_length=SIZES.tokens,
            pad_id=0,
            share=share,
            multiple=engine.multiple,
        )
        found, marks = MeshFound(mesh, regularizer), [(0, 0)]
        with (
            tempfile.TemporaryDirectory() as folder,
            Order(world) as sent,
            Rehearsal(CUDA, on="cpu") as seen,
            dry_stage(),
        ):

            def passed() -> bool:
                marks.append((len(sent.order), len(seen.waits)))
                return False

            made = stage(
                task, batches, train, Path(folder) / "run", optimizer=Optimizer(lr=1e-3),
                regularizer=REGULARIZERS[regularizer], on_step=lambda line: found.lines.append(line["step"]),
                stop=passed,
            )  # fmt: skip
            Trainer(engine, Padder(), made).fit()  # type: ignore[arg-type]
        for (first, early), (last, late) in itertools.pairwise(marks[1:]):
            found.updates.append(sent.order[first:last])
            found.waits.append([str(wait) for wait in seen.waits[early:late]])
        return found
    finally:
        dist.destroy_process_group()


def main(wanted: list[str]) -> None:
    """Print a JSON list of what each mesh came to; a mesh may name a `regularizer` beside its axes."""
    with tempfile.TemporaryDirectory() as folder:
        backbone = Path(folder) / "backbone"
        save_backbone(SIZES, backbone)
        answers = []
        for text in wanted:
            mesh = json.loads(text)
            answers.append(vars(rehearse_mesh(mesh, backbone, regularizer=mesh.pop("regularizer", "plain"))))
    print(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1:])
