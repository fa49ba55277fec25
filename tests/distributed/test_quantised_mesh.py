"""Quantised backbones on a mesh: what every rank trains is what one process trains, each keeps its bytes, and FSDP2
really holds a part of the packed values on each rank."""

from __future__ import annotations

import contextlib
import importlib.util
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flatshift.finetune.compute.precision import autocast
from flatshift.finetune.config import Adapter, Mesh, Quantization, Train
from flatshift.finetune.models.quantize import quantization_scales
from flatshift.finetune.parallel.build import build_engine
from flatshift.finetune.parallel.engine import Engine
from flatshift.finetune.parallel.layout import local_part
from flatshift.finetune.parallel.mesh import ProcessMesh
from flatshift.finetune.tasks import LanguageModel
from flatshift.regularizers import GGPO, build
from tests.support.distributed_ranks import run_ranks
from tests.support.finetune_models import save_backbone
from tests.support.regularizer_models import tokens

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs the extra `quant` (bitsandbytes)"
)
STEPS = 4


@dataclass(frozen=True)
class Case:
    """A quantised model, and the mesh it runs on."""

    mesh: Mesh = field(default_factory=Mesh)
    kind: Quantization = "nf4"
    source: str = "llama"
    dora: bool = False
    precision: Any = "fp32"
    checkpointing: Any = "none"


@dataclass(frozen=True)
class Micro:
    """Rows with all tokens supervised."""

    ids: torch.Tensor

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids}

    @property
    def labels(self) -> torch.Tensor:
        return self.ids

    def to(self, device: torch.device) -> Micro:
        return self


def stored(engine: Engine) -> dict[str, bytes]:
    """The bytes of what is frozen on this rank, scales included."""
    held = {name: local_part(p) for name, p in engine.model.named_parameters() if not p.requires_grad}
    return {
        name: tensor.as_subclass(torch.Tensor).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in (held | quantization_scales(engine.model)).items()
    }


def course(case: Case, sources: dict[str, Path], adapter: Path | None) -> dict[str, Any]:
    """Some updates with GGPO, and what is to be the same on any mesh."""
    device = torch.device("cpu")
    train = Train(quantization=case.kind, precision=case.precision, checkpointing=case.checkpointing)
    said: list[str] = []
    engine = build_engine(
        str(sources[case.source]),
        task=LanguageModel(),
        adapter=Adapter(rank=4, dora=case.dora),
        train=train,
        mesh=case.mesh,
        world=ProcessMesh.alone(device) if case.mesh.size == 1 else ProcessMesh.of(case.mesh, device),
        log=said.append,
    )
    settings = GGPO(sigma=0.2, refresh=2, ema=0.5)
    regularizer = build(settings).attach(engine.model, seed=5, total_steps=STEPS, placement=engine.placement)
    optimizer = torch.optim.AdamW(engine.parameters.values(), lr=1e-2)
    found: dict[str, Any] = {"losses": [], "said": said}
    part, parts = engine.share
    before: dict[str, bytes] = {}
    for step in range(STEPS):
        batch = [Micro(tokens(4, 12, seed=10 * step + i).chunk(parts)[part]) for i in range(2)]
        with regularizer.step(step):
            loss = engine.forward_backward(
                batch, 2 * 4 * 11, task=LanguageModel(), head=None, context=lambda index: autocast(train, device)
            )
        if step == 0:
            engine.reshard()
            before = stored(engine)
        if step == 1:  # at first B is zero, and so is A's gradient
            found["gradients"] = engine.full_tensors(
                {n: p.grad for n, p in engine.parameters.items() if p.grad is not None}
            )
            found["first_state"] = regularizer.state_dict()
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(float(loss))
        if step == 2:
            with torch.no_grad(), autocast(train, device):
                engine.eval_model.eval()(**batch[0].inputs)
            engine.model.train()
    with contextlib.suppress(KeyboardInterrupt), regularizer.step(STEPS):
        raise KeyboardInterrupt
    engine.reshard()
    found["untouched"] = stored(engine) == before
    packed = [p for p in engine.model.parameters() if p.dtype == torch.uint8]
    found["packed"] = sum(local_part(p).numel() for p in packed), sum(p.numel() for p in packed)
    found["sharded"] = bool(engine.sharding is not None and engine.sharding.units)
    found["state"] = regularizer.state_dict()
    regularizer.detach()
    if adapter is not None:
        engine.save_adapter(adapter)
        engine.load_adapter(adapter)
    return found


def courses(cases: dict[str, Case], sources: dict[str, Path], out: Path) -> dict[str, dict[str, Any]]:
    return {name: course(case, sources, out / name) for name, case in cases.items()}


BOUNDS = {"fp32": (3e-5, 1e-4, 1e-5), "bf16": (1e-2, 1e-1, 5e-2)}
"""Worst distances from the single process: loss (nats), gradients and the regularizer's state (relative)."""


def far(one: torch.Tensor, other: torch.Tensor) -> float:
    """Relative distance."""
    return float((one.double() - other.double()).norm() / other.double().norm())


def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    from flatshift.finetune.adapters.adapter import read_adapter

    sources = {
        "llama": save_backbone("llama", tmp_path / "llama", hidden_size=64, intermediate_size=128),
        "gpt2": save_backbone("gpt2", tmp_path / "gpt2", n_embd=64),
    }
    cases = {
        "replicate nf4-double": Case(Mesh(replicate=2), kind="nf4-double"),
        "replicate int8": Case(Mesh(replicate=2), kind="int8"),
        "dp nf4": Case(Mesh(dp=2)),
        "dp nf4-double full recomputation": Case(Mesh(dp=2), kind="nf4-double", checkpointing="full"),
        "dp nf4 kept gathered, gpt2": Case(Mesh(dp=2, reshard=False), source="gpt2"),
        "dp nf4 DoRA": Case(Mesh(dp=2), dora=True),
        "dp nf4 bf16": Case(Mesh(dp=2), precision="bf16"),
        "dp int8 adapters only": Case(Mesh(dp=2, zero=2), kind="int8"),
        "cp nf4": Case(Mesh(cp=2)),
    }
    plain = {name: replace(case, mesh=Mesh(), checkpointing="none") for name, case in cases.items()}
    once = {case: course(case, sources, None) for case in dict.fromkeys(plain.values())}
    alone = {name: once[case] for name, case in plain.items()}
    ranks = run_ranks(courses, 2, cases, sources, tmp_path / "adapters")
    for name, case in cases.items():
        loss_bound, gradient_bound, state_bound = BOUNDS[case.precision]
        for rank in ranks:
            mine, wanted = rank[name], alone[name]
            assert mine["untouched"] and wanted["untouched"], name
            assert mine["losses"] == pytest.approx(wanted["losses"], abs=loss_bound), name
            worst = max(far(mine["gradients"][key], value) for key, value in wanted["gradients"].items())
            print(name, f"{worst:.1e}")
            assert worst < gradient_bound and mine["gradients"].keys() == wanted["gradients"].keys(), (name, worst)
            for key, value in wanted["first_state"].items():
                if key.endswith((".norms", ".ema")):
                    assert far(mine["first_state"][key], value) < state_bound, (name, key)
            assert set(mine["state"]) == set(wanted["state"]), name
            sharded = case.mesh.zero == 3 and case.mesh.replicate == 1
            assert mine["sharded"] == (case.mesh.replicate == 1), name
            if case.kind != "int8":
                here, whole = mine["packed"]
                assert whole == wanted["packed"][1] > 0 and here == (whole // 2 if sharded else whole), name
            assert any("adapted layers" in line for line in mine["said"]), name
        saved = read_adapter(tmp_path / "adapters" / name)
        assert saved and all(bool(tensor.isfinite().all()) for tensor in saved.values()), name
