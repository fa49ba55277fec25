"""Several classes, numbers and hidden tokens on a mesh: updates, judging and saved heads are those of one process."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.distributed_ranks import run_ranks
from tests.support.mesh_updates import few_updates
from tests.support.objective_models import CLASSES, masked_tokenizer, numbered_rows, save_encoder, several_rows

STEPS = 3
# Few, because each costs seconds; the loss and its batches are one code for all tasks.
MESHES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("sets", {"tp": 2}),
    ("numbers", {"dp": 2}),
    ("masked", {"dp": 2}),
    ("masked", {"replicate": 2}),
    ("masked", {"tp": 2}),
    ("masked", {"pp": 2}),
)


def curve(source: str, warm: str | None, kind: str, mesh: Any) -> dict[str, Any]:
    """Losses, first gradients and figures of a few updates on `mesh`, and the saved head, on every rank."""
    from flatshift.finetune.adapters.adapter import read_adapter
    from flatshift.finetune.config import Adapter, Evaluate, Train
    from flatshift.finetune.data.batches import TrainingDataLoader
    from flatshift.finetune.data.encoding import encode
    from flatshift.finetune.data.eval_batching import EvalBatching
    from flatshift.finetune.data.labels import Units, fold_units
    from flatshift.finetune.data.masking import Masking
    from flatshift.finetune.evaluate.evaluator import evaluate
    from flatshift.finetune.parallel.build import build_engine
    from flatshift.finetune.parallel.mesh import ProcessMesh
    from flatshift.finetune.tasks import Classify, MaskedLM, Regress
    from tests.support.data_models import text_rows

    task = {"sets": Classify(multi=True), "numbers": Regress(), "masked": MaskedLM()}[kind]
    rows = {"sets": several_rows, "numbers": numbered_rows, "masked": lambda n: text_rows(n, words=(5, 15))}[kind](30)
    names = CLASSES if kind == "sets" else None
    units = Units(50.0, 50.0, 20.0, "classifier") if kind == "numbers" else None
    tokenizer, cpu = masked_tokenizer(), torch.device("cpu")
    world = ProcessMesh.alone(cpu) if mesh.size == 1 else ProcessMesh.of(mesh, cpu)
    train = Train(batch_size=4, max_length=48, device="cpu")
    engine = build_engine(
        source, task=task, adapter=Adapter(rank=4), train=train, mesh=mesh, world=world, label_names=names
    )
    generator = torch.Generator().manual_seed(1)
    start = engine.full_tensors(engine.parameters)
    alive = {name: torch.randn(t.shape, generator=generator) * 0.1 for name, t in sorted(start.items())}
    engine.load_full_tensors(alive, engine.parameters, context="test")
    if warm is not None:
        engine.load_adapter(Path(warm), partial=True)
    examples = encode(rows, task=task, tokenizer=tokenizer, max_length=48, label_names=names, units=units).examples
    batches = TrainingDataLoader(
        examples, task=task, batch_size=4, accumulate=2, seed=0, max_length=48, pad_id=0, share=engine.share,
        masking=Masking.of(task, tokenizer) if isinstance(task, MaskedLM) else None,
    )  # fmt: skip
    losses, first = few_updates(engine, batches, task, STEPS)
    fold_units(engine.parameters, units)
    found = evaluate(
        engine.eval_model, tokenizer, examples[:9], task=task, config=Evaluate(bootstrap=5),
        inference=EvalBatching.of(tokenizer, batch_size=4, share=engine.evaluation),
    )  # fmt: skip
    saved = engine.full_tensors(engine.parameters)
    if kind == "masked" and mesh.size == 1:
        with tempfile.TemporaryDirectory() as folder:
            engine.save_adapter(Path(folder) / "adapter")
            assert read_adapter(Path(folder) / "adapter").keys() == saved.keys()
    return {"losses": losses, "first": first, "saved": saved, "found": {n: f["value"] for n, f in found.items()}}


def all_meshes(source: str, warm: str) -> list[dict[str, Any]]:
    """`curve` on each of the meshes, one after the other, in the same processes."""
    from flatshift.finetune.config import Mesh

    return [curve(source, None if kind == "masked" else warm, kind, Mesh(**axes)) for kind, axes in MESHES]


def test_every_mesh_trains_and_judges_as_one_process(tmp_path: Path) -> None:
    from flatshift.finetune.adapters.adapter import attach_adapter, save_adapter
    from flatshift.finetune.config import Adapter, Mesh
    from flatshift.finetune.models.load import load_backbone
    from flatshift.finetune.tasks import MaskedLM
    from tests.support.objective_models import scatter

    torch.set_num_threads(1)
    source = str(save_encoder(tmp_path / "encoder", head=False))
    task = MaskedLM()
    warmed = scatter(attach_adapter(load_backbone(source, task=task), Adapter(rank=4), task=task, seed=7), seed=9)
    warm = str(save_adapter(warmed, tmp_path / "warm"))
    alone = {
        kind: curve(source, None if kind == "masked" else warm, kind, Mesh()) for kind in ("sets", "numbers", "masked")
    }
    assert 20 < alone["numbers"]["found"]["rmse"] < 80, "answers are in the targets' units"
    for rank, found in enumerate(run_ranks(all_meshes, 2, source, warm)):
        for (kind, axes), ours in zip(MESHES, found, strict=True):
            where, theirs = (rank, kind, axes), alone[kind]
            assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5), where
            assert ours["first"].keys() == theirs["first"].keys(), where
            for key, gradient in theirs["first"].items():
                assert (ours["first"][key] - gradient).norm() <= 2e-5 * gradient.norm() + 1e-9, (where, key)
            for key, tensor in theirs["saved"].items():
                assert torch.allclose(ours["saved"][key], tensor, rtol=1e-3, atol=2e-4 * float(tensor.abs().max())), (
                    where,
                    key,
                )
            for figure, value in theirs["found"].items():
                assert ours["found"][figure] == pytest.approx(value, rel=1e-4, abs=1e-6), (where, figure)
