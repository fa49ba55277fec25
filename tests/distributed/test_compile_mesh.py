"""Compiled blocks and weights that are asked for ahead, on data axes: the course of plain blocks in one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule

from flatshift.finetune.adapters.adapter import attach_adapter
from flatshift.finetune.compute.capabilities import capabilities
from flatshift.finetune.config import Adapter, Evaluate, Mesh, Optimizer, Train
from flatshift.finetune.models.anatomy import transformer_blocks
from flatshift.finetune.models.compiled import CompiledBlocks
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.parallel import fsdp as sharding
from flatshift.finetune.parallel.build import build_engine
from flatshift.finetune.parallel.engine import Engine
from flatshift.finetune.parallel.fsdp import sort_by_forward_order
from flatshift.finetune.parallel.mesh import ProcessMesh
from flatshift.finetune.run_directory import RunDirectory, read_metrics
from flatshift.finetune.tasks import LanguageModel
from flatshift.finetune.train.stage import TrainingStage
from flatshift.finetune.train.trainer import Trainer
from flatshift.regularizers import GGPO, FlatLora, Plain, build
from tests.support.distributed_ranks import run_ranks
from tests.support.finetune_models import Micro, PadOnly, RandomBatches, save_backbone

LM = LanguageModel()
REGULARIZERS: dict[str, Any] = {"plain": Plain(), "ggpo": GGPO(sigma=0.05), "flat-lora": FlatLora()}
STEPS = 3


class SharedBatches(RandomBatches):
    """Four rows in each of two micro-batches, of which a data rank takes its run."""

    def __init__(self, share: tuple[int, int]) -> None:
        super().__init__(rows=4, accumulate=2)
        self.part, self.parts = share

    def at(self, step: int) -> list[Micro]:
        def mine(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.chunk(self.parts)[self.part]

        return [
            Micro(
                {name: mine(t) for name, t in m.inputs.items()}, mine(m.labels), m.supervised, m.samples // self.parts
            )
            for m in super().at(step)
        ]


def course(engine: Engine, directory: str, kind: str, *, compiled: bool, backend: str) -> dict[str, Any]:
    """Three updates by the loop itself; losses, norms, whole parameters and how many graphs were made."""
    torch._dynamo.reset()
    counters.clear()
    if engine.is_main:
        RunDirectory.create(Path(directory))
    engine.world.wait()
    run = RunDirectory(Path(directory), writes=engine.is_main)
    blocks = partial(CompiledBlocks, backend=backend)
    with mock.patch("flatshift.finetune.train.trainer.CompiledBlocks", blocks):
        Trainer(
            engine,
            PadOnly(),
            TrainingStage(
                name="s",
                task=LM,
                batches=SharedBatches(engine.share),
                dev=[],
                optimizer=Optimizer(lr=1e-2),
                train=Train(steps=STEPS, compile=compiled, threads=1),
                evaluate=Evaluate(),
                regularizer=build(REGULARIZERS[kind]),
                run=run,
                seed=0,
            ),
        ).fit()
    own = [vars(block) for block in transformer_blocks(engine.model)]
    assert all("forward" not in names and not names.get("_compiled_call_impl") for names in own)
    engine.world.wait()
    return {
        "lines": [(line["loss"], line["grad_norm"]) for line in read_metrics(Path(directory) / "metrics.jsonl")],
        "adapter": {name: tensor.clone() for name, tensor in engine.full_tensors(engine.parameters).items()},
        "graphs": counters["stats"]["unique_graphs"],
        "units": sum(isinstance(block, FSDPModule) for block in transformer_blocks(engine.model)),
    }


def on_mesh(source: str, folder: str, cases: list[tuple[dict[str, Any], str, bool, bool]], backend: str) -> list[Any]:
    """Each of (mesh, regularizer, compiled, ahead) on these ranks."""
    found = []
    for number, (mesh, kind, compiled, ahead) in enumerate(cases):
        settings = Mesh(**mesh)
        world = ProcessMesh.of(settings, torch.device("cpu"))
        record = replace(capabilities(torch.device("cpu")), kind="cuda" if ahead else "cpu")
        with mock.patch.object(sharding, "capabilities", lambda device, record=record: record):
            engine = build_engine(
                source,
                task=LM,
                adapter=Adapter(rank=4),
                train=Train(),
                mesh=settings,
                world=world,
                label_names=None,
                log=lambda line: None,
            )
        found.append(course(engine, f"{folder}/{number}", kind, compiled=compiled, backend=backend))
    return found


def alone(source: Path, directory: Path, kind: str) -> dict[str, Any]:
    model = attach_adapter(load_backbone(source, task=LM), Adapter(rank=4), task=LM, seed=0)
    return course(Engine.alone(model), str(directory), kind, compiled=False, backend="eager")


def compare(found: dict[str, Any], wanted: dict[str, Any], case: Any) -> None:
    for one, other in zip(wanted["lines"], found["lines"], strict=True):
        assert other == pytest.approx(one, rel=2e-5), case
    for name, tensor in wanted["adapter"].items():
        assert torch.allclose(found["adapter"][name], tensor, rtol=1e-3, atol=2e-5), (case, name)


FSDP = {"dp": 2}
USUAL: list[tuple[dict[str, Any], str, bool, bool]] = [
    (FSDP, "plain", False, False),
    (FSDP, "plain", False, True),
    (FSDP, "plain", True, True),
]
RARE: list[tuple[dict[str, Any], str, bool, bool]] = [
    ({**FSDP, "reshard": False}, "plain", False, True),
    ({**FSDP, "reshard": False}, "plain", True, True),
    (FSDP, "plain", True, False),
    (FSDP, "ggpo", True, False),
    (FSDP, "flat-lora", True, False),
    ({**FSDP, "zero": 1}, "plain", True, False),
    ({"replicate": 2}, "plain", True, False),
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cases", [USUAL, RARE], ids=["usual", "rare"])
def test_two_ranks_have_the_course_of_one_process(
    tmp_path: Path, cases: list[tuple[dict[str, Any], str, bool, bool]]
) -> None:
    source = save_backbone("llama", tmp_path / "model")
    wanted = {kind: alone(source, tmp_path / kind, kind) for kind in {kind for _, kind, _, _ in cases}}
    ranks = run_ranks(on_mesh, 2, str(source), str(tmp_path), cases, "aot_eager", anew=True)
    for case, first, second in zip(cases, *ranks, strict=True):
        mesh, kind, compiled, _ = case
        compare(first, wanted[kind], case)
        assert first["units"] == (0 if "replicate" in mesh else 2), case
        assert first["graphs"] == second["graphs"] and (first["graphs"] >= 1) == compiled, case
        assert first["graphs"] <= 6, case  # blocks of one make share theirs
    if cases is USUAL:
        plain, ahead = ranks[0][:2]
        assert plain["lines"] == ahead["lines"], "when weights come makes no difference"
        assert all(torch.equal(plain["adapter"][name], tensor) for name, tensor in ahead["adapter"].items())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_inductor_on_two_ranks(tmp_path: Path) -> None:
    source = save_backbone("llama", tmp_path / "model")
    wanted = alone(source, tmp_path / "plain", "plain")
    case = (FSDP, "plain", True, True)
    for found in run_ranks(on_mesh, 2, str(source), str(tmp_path), [case], "inductor", anew=True):
        compare(found[0], wanted, case)
        assert found[0]["graphs"] >= 1


def test_units_are_asked_for_in_the_order_of_a_pass(tmp_path: Path) -> None:
    model = load_backbone(save_backbone("llama", tmp_path), task=LM)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    first, second = transformer_blocks(model)
    assert sort_by_forward_order(model, [first, second, embedding, head]) == [embedding, first, second, head]
    assert sort_by_forward_order(model, [first, second]) == [first, second]

    asked: list[tuple[str, Any, Any]] = []

    class Unit:
        def set_modules_to_forward_prefetch(self, units: list[Any]) -> None:
            asked.append(("forward", self, units))

        def set_modules_to_backward_prefetch(self, units: list[Any]) -> None:
            asked.append(("backward", self, units))

    a, b, c = Unit(), Unit(), Unit()
    sharding.set_prefetch([a, b, c])
    assert asked == [("forward", a, [b]), ("backward", b, [a]), ("forward", b, [c]), ("backward", c, [b])]
