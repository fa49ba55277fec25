"""Pairs of answers on a mesh: reference, drift, updates and figures are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.distributed_ranks import run_ranks
from tests.support.finetune_models import PadOnly, save_backbone
from tests.support.mesh_updates import few_updates

STEPS = 3
MESHES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("dpo", {"tp": 2}),
    ("orpo", {"tp": 2, "sequence_parallel": True}),
    ("kto", {"dp": 2}),
    ("kto", {"replicate": 2}),
)


def curve(source: str, loss: str, mesh: Any) -> dict[str, Any]:
    """Losses, first gradients and figures of a few updates on `mesh`, on every rank."""
    from flatshift.finetune.config import Adapter, Evaluate, Train
    from flatshift.finetune.data.batches import TrainingDataLoader
    from flatshift.finetune.data.eval_batching import EvalBatching
    from flatshift.finetune.data.example import IGNORE, Example
    from flatshift.finetune.evaluate.evaluator import evaluate
    from flatshift.finetune.parallel.build import build_engine
    from flatshift.finetune.parallel.mesh import ProcessMesh
    from flatshift.finetune.tasks import Preference

    task, cpu = Preference(loss=loss), torch.device("cpu")  # type: ignore[arg-type]
    world = ProcessMesh.alone(cpu) if mesh.size == 1 else ProcessMesh.of(mesh, cpu)
    train = Train(batch_size=4, max_length=24, device="cpu")
    engine = build_engine(source, task=task, adapter=Adapter(rank=4), train=train, mesh=mesh, world=world)
    generator = torch.Generator().manual_seed(1)
    start = engine.full_tensors(engine.parameters)
    alive = {name: torch.randn(t.shape, generator=generator) * 0.1 for name, t in sorted(start.items())}
    engine.load_full_tensors(alive, engine.parameters, context="test")
    examples = []
    for i in range(11):
        asked, *answers = (
            torch.randint(3, 60, (n,), generator=generator).tolist() for n in (2 + i % 5, 1 + i, 9 - i % 7)
        )
        sides = [(asked + answer, [IGNORE] * len(asked) + answer) for answer in answers]
        (ids, labels), (other, marked) = sides
        examples.append(Example(ids, labels, str(i), f"f:{i}", rejected_ids=other, rejected_labels=marked))
    batches = TrainingDataLoader(
        examples, task=task, batch_size=4, accumulate=2, seed=0, max_length=24, pad_id=0, share=engine.share,
        multiple=engine.multiple,
    )  # fmt: skip
    losses, first = few_updates(engine, batches, task, STEPS)
    found = evaluate(
        engine.eval_model, PadOnly(), examples, task=task, config=Evaluate(bootstrap=5),
        inference=EvalBatching.of(PadOnly(), batch_size=4, share=engine.evaluation),
    )  # fmt: skip
    return {"losses": losses, "first": first, "found": {n: f["value"] for n, f in found.items()}}


def all_meshes(source: str) -> list[dict[str, Any]]:
    """`curve` on each of the meshes, one after the other, in the same processes."""
    from flatshift.finetune.config import Mesh

    return [curve(source, loss, Mesh(**axes)) for loss, axes in MESHES]


def test_every_mesh_prefers_as_one_process(tmp_path: Path) -> None:
    from flatshift.finetune.config import Mesh

    torch.set_num_threads(1)
    source = str(save_backbone("llama", tmp_path / "llama"))
    alone = {loss: curve(source, loss, Mesh()) for loss in ("dpo", "orpo", "kto")}
    assert {"loss", "preference_accuracy", "reward_margin"} <= alone["kto"]["found"].keys()
    for rank, found in enumerate(run_ranks(all_meshes, 2, source)):
        for (loss, axes), ours in zip(MESHES, found, strict=True):
            where, theirs = (rank, loss, axes), alone[loss]
            assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5), where
            assert ours["first"].keys() == theirs["first"].keys(), where
            for key, gradient in theirs["first"].items():
                assert (ours["first"][key] - gradient).norm() <= 2e-5 * gradient.norm() + 1e-8, (where, key)
            for figure, value in theirs["found"].items():
                assert ours["found"][figure] == pytest.approx(value, rel=1e-4, abs=1e-5), (where, figure)
