"""GGPO on a mesh is GGPO in one process: the same noise, row norms, sketches, losses and gradients, on 2 and 4 ranks.

Every rank trains with the noise that belongs to its rows and columns; the single process runs in the test itself.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from flatshift.finetune.config import Mesh
from flatshift.finetune.parallel.activation_checkpoint import checkpoint_activations
from flatshift.finetune.parallel.engine import Engine
from flatshift.finetune.parallel.fsdp import shard
from flatshift.finetune.parallel.mesh import ProcessMesh
from flatshift.finetune.parallel.pipeline import PipelineRunner, build_rank_stages
from flatshift.finetune.parallel.tensor import tensor_parallel
from flatshift.finetune.tasks import LanguageModel
from flatshift.regularizers import GGPO, RegularizerError, build
from flatshift.regularizers.layers.sharded import ParameterShard
from flatshift.regularizers.methods.ggpo import GGPORegularizer
from tests.support.distributed_ranks import run_ranks
from tests.support.regularizer_models import tiny_gpt2, tiny_llama, tokens, with_lora

STEPS = 10
SEED = 5


@dataclass(frozen=True)
class Case:
    """A model and a regularizer, and the mesh they run on."""

    mesh: Mesh = field(default_factory=Mesh)
    kind: str = "llama"
    layers: int = 2
    dtype: str = "float32"
    lora: dict[str, Any] = field(default_factory=dict)
    checkpointing: Any = "none"
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Micro:
    """Rows with all tokens supervised."""

    ids: Tensor

    @property
    def inputs(self) -> dict[str, Tensor]:
        return {"input_ids": self.ids}

    @property
    def labels(self) -> Tensor:
        return self.ids

    def to(self, device: torch.device) -> Micro:
        return self


def micros(step: int, part: int, parts: int) -> tuple[list[Micro], int]:
    """Two micro-batches of 4 rows each, of which a rank takes its run of rows, and the update's supervised tokens."""
    whole = [tokens(4, 10, seed=10 * step + index) for index in range(2)]
    return [Micro(ids.chunk(parts)[part]) for ids in whole], 2 * 4 * 9


def build_engine(case: Case) -> Engine:
    """The model on its mesh, in the order of a real run."""

    def whole() -> Any:
        make = tiny_gpt2 if case.kind == "gpt2" else partial(tiny_llama, layers=case.layers)
        return with_lora(make(dtype=getattr(torch, case.dtype)), **case.lora)

    mesh, model = case.mesh, whole()
    if mesh.size == 1:
        return Engine.alone(model)
    world = ProcessMesh.of(mesh, torch.device("cpu"))
    if mesh.pp > 1:
        model, _ = build_rank_stages(model, whole, mesh=mesh, world=world)
    layout = tensor_parallel(model, world=world, sequence_parallel=mesh.sequence_parallel)
    checkpoint_activations(model, case.checkpointing)
    sharding = shard(model, mesh=mesh, world=world)
    engine = Engine(model, world, layout=layout, sharding=sharding)
    if mesh.pp > 1:
        engine.runner = PipelineRunner(model, mesh=mesh, world=world)
    return engine


def attached(case: Case, engine: Engine) -> GGPORegularizer:
    settings = {"sigma": 0.2, "refresh": 4, "ema": 0.5} | case.settings
    regularizer = build(GGPO(**settings)).attach(engine.model, seed=SEED, total_steps=STEPS, placement=engine.placement)
    assert isinstance(regularizer, GGPORegularizer)
    return regularizer


def noise(regularizer: GGPORegularizer) -> dict[str, dict[str, Tensor]]:
    """Factors of this rank, and which global rows and columns they are for."""
    found = {}
    for group in regularizer._groups:
        for branch in group.branches:
            site = branch.site
            rows, columns = (
                torch.arange(size) if cut is None else cut.indices()
                for cut, size in ((site.row_cut, site.rows), (site.column_cut, site.columns))
            )
            assert branch.noise_in is not None and branch.noise_out is not None and branch.probe_in is not None
            found[site.name] = {
                "rows": rows,
                "columns": columns,
                "in": branch.noise_in.clone(),
                "out": branch.noise_out.clone(),
                "probe": branch.probe_in.clone(),
            }
    return found


def checksums(engine: Engine) -> dict[str, bytes]:
    return {
        name: p.detach().contiguous().view(torch.uint8).numpy().tobytes()
        for name, parameter in engine.model.named_parameters()
        if not parameter.requires_grad
        for p in [parameter.to_local() if hasattr(parameter, "to_local") else parameter]
    }


def course(case: Case, other: dict[str, Tensor] | None = None) -> dict[str, Any]:
    """Ten updates; what is to be the same on any mesh. `other`: a state to load in the end."""
    engine = build_engine(case)
    regularizer = attached(case, engine)
    before = checksums(engine)
    optimizer = torch.optim.AdamW([{"params": list(engine.parameters.values())}], lr=3e-3)  # a stage may have none

    def context(index: int) -> contextlib.AbstractContextManager[Any]:
        regularizer.on_micro_batch(index)
        if case.dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast("cpu", dtype=getattr(torch, case.dtype))

    found: dict[str, Any] = {"losses": []}
    for step in range(STEPS):
        batch, count = micros(step, *engine.share)
        with regularizer.step(step):
            loss = engine.forward_backward(batch, count, task=LanguageModel(), head=None, context=context)
            if step in (0, 1):
                found[f"noise{step}"] = noise(regularizer)
        if step == 0:
            grads = {name: p.grad for name, p in engine.parameters.items() if p.grad is not None}
            found["gradients"] = {name: g.clone() for name, g in engine.full_tensors(grads).items()}
            found["first_state"] = engine.union(regularizer.state_dict())
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(float(loss))
        found["metrics"] = regularizer.metrics()
        if step == 3:  # may leave weights gathered, and the next step looks at them
            with torch.no_grad():
                engine.eval_model(**batch[0].inputs)
    if engine.sharding is not None:
        engine.sharding.reshard()
    found["untouched"] = checksums(engine) == before
    found["state"] = engine.union(regularizer.state_dict())
    if other is not None:
        regularizer.load_state_dict(other)
        again = engine.union(regularizer.state_dict())
        found["took"] = set(again) == set(other) and all(torch.equal(again[name], other[name]) for name in other)
    regularizer.detach()
    return found


def courses(cases: dict[str, Case], others: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Any]]:
    return {name: course(case, others[name]) for name, case in cases.items()}


# Worst relative distances from the single process that are allowed (loss: absolute), in float32.
BOUNDS = {"noise": 1e-6, "guided noise": 1e-5, "gradients": 1e-5, "norms": 1e-6, "sketches": 1e-5, "loss": 3e-5}


def compare(cases: dict[str, Case], world_size: int) -> None:
    """Run every case on `world_size` ranks and demand what the single process computes."""
    alone = {name: course(replace(case, mesh=Mesh(), checkpointing="none")) for name, case in cases.items()}
    ranks = run_ranks(courses, world_size, cases, {name: run["state"] for name, run in alone.items()})
    for name, case in cases.items():
        scale = 1 if case.dtype == "float32" else 1e3
        worst = dict.fromkeys(BOUNDS, 0.0)
        for rank in ranks:
            for kind, value in distances(alone[name], rank[name]).items():
                worst[kind] = max(worst[kind], value)
            assert rank[name]["metrics"] == pytest.approx(alone[name]["metrics"], rel=1e-3 * scale), name
            assert rank[name]["untouched"] and rank[name]["took"], name
        print(name, {kind: f"{value:.1e}" for kind, value in worst.items()})
        assert all(value <= BOUNDS[kind] * scale for kind, value in worst.items()), (name, worst)
        state_is_portable(replace(case, mesh=Mesh()), ranks[0][name]["state"])


def distances(alone: dict[str, Any], run: dict[str, Any]) -> dict[str, float]:
    """How far a rank's course is from the single one's, in the words of `BOUNDS`; signs and counts must be equal."""
    far_apart = {"noise": 0.0, "guided noise": 0.0, "norms": 0.0, "sketches": 0.0}
    for step, kind in enumerate(("noise", "guided noise")):
        assert run[f"noise{step}"].keys() <= alone[f"noise{step}"].keys()
        for layer, mine in run[f"noise{step}"].items():
            whole = alone[f"noise{step}"][layer]
            assert torch.equal(mine["in"], whole["in"][mine["columns"]]), layer
            assert torch.equal(mine["probe"], whole["probe"][mine["columns"]]), layer
            out = whole["out"][mine["rows"]]
            assert torch.equal(mine["out"].sign(), out.sign()), layer
            far_apart[kind] = max(far_apart[kind], far(mine["out"], out))
    for name, wanted in alone["first_state"].items():
        mine = run["first_state"][name]
        if name.endswith(".norms"):
            far_apart["norms"] = max(far_apart["norms"], float((mine / wanted - 1).abs().max()))
        elif name.endswith(".ema"):
            assert float(wanted.sum()) > 0, name
            far_apart["sketches"] = max(far_apart["sketches"], far(mine, wanted))
        else:
            assert torch.equal(mine, wanted), name
    assert run["gradients"].keys() == alone["gradients"].keys() and run["metrics"]["sketches"] == STEPS
    gradients = max(far(run["gradients"][name], wanted) for name, wanted in alone["gradients"].items())
    loss = max(abs(a - b) for a, b in zip(run["losses"], alone["losses"], strict=True))
    return far_apart | {"gradients": gradients, "loss": loss}


def far(one: Tensor, other: Tensor) -> float:
    """Relative distance."""
    assert one.shape == other.shape
    return float((one.double() - other.double()).norm() / other.double().norm())


def state_is_portable(case: Case, state: dict[str, Tensor]) -> None:
    """What a mesh saved, one process loads, and continues with the same noise scales."""
    regularizer = attached(case, build_engine(case))
    regularizer.load_state_dict(state)
    again = regularizer.state_dict()
    assert set(again) == set(state) and all(torch.equal(again[name], state[name]) for name in state)


GPT2 = {"kind": "gpt2", "lora": {"fan_in_fan_out": True}}


def test_two_ranks_equal_one_process() -> None:
    compare(
        {
            "tp": Case(Mesh(tp=2), settings={"rank": 3}),
            "tp, tokens split": Case(Mesh(tp=2, sequence_parallel=True), checkpointing="selective"),
            "dp": Case(Mesh(dp=2), checkpointing="full"),
            "dp, bfloat16": Case(Mesh(dp=2), dtype="bfloat16"),
            "replicate, literal form": Case(Mesh(replicate=2), settings={"mode": "paper", "beta": 1e3}),
            "pp, over the model": Case(Mesh(pp=2), settings={"normalize": "model"}),
            "tp, each sample": Case(Mesh(tp=2), settings={"scope": "sample", "tolerance": 0.72}),
            "pp, two stages a rank": Case(Mesh(pp=2, schedule="zbv"), layers=4, checkpointing="full"),
            "pp, nothing on the first stage": Case(Mesh(pp=2), lora={"target_modules": r".*layers\.1\..*_proj"}),
        },
        2,
    )


@pytest.mark.slow
def test_two_ranks_equal_one_process_in_other_layouts() -> None:
    compare(
        {
            "tp, fused projection": Case(Mesh(tp=2), **GPT2),
            "dp, columns first": Case(Mesh(dp=2), **GPT2),
            "dp, DoRA": Case(Mesh(dp=2), lora={"use_dora": True}),
            "tp, DoRA": Case(Mesh(tp=2), lora={"use_dora": True}),
            "dp, adapters replicated": Case(Mesh(dp=2, adapters="replicate", reshard=False)),
            "dp, adapters only": Case(Mesh(dp=2, zero=2)),
            "pp": Case(Mesh(pp=2)),
            "tp, shuffled": Case(
                Mesh(tp=2), settings={"control": "shuffled", "normalize": "model", "mode": "relative-product"}
            ),
            "dp, each sample": Case(Mesh(dp=2), checkpointing="full", settings={"scope": "sample", "tolerance": 0.72}),
            "replicate, each micro-batch": Case(Mesh(replicate=2), settings={"scope": "microbatch"}),
        },
        2,
    )


@pytest.mark.slow
def test_four_ranks_equal_one_process() -> None:
    compare(
        {
            "tp × dp": Case(Mesh(tp=2, dp=2)),
            "tp × dp, fused projection": Case(Mesh(tp=2, dp=2), **GPT2),
            "replicate × dp, above the rank": Case(Mesh(replicate=2, dp=2), lora={"r": 1}),
            "pp × dp": Case(Mesh(pp=2, dp=2)),
            "pp × tp": Case(Mesh(pp=2, tp=2)),
        },
        4,
    )


def odd_ends() -> dict[str, Any]:
    """Four ranks: parts of unequal size, some empty; a faulty gradient on one rank alone."""
    found: dict[str, Any] = {}
    case = Case(Mesh(dp=4))
    world = ProcessMesh.of(case.mesh, torch.device("cpu"))
    model = odd_layers()
    fully_shard(model, mesh=world.submesh("dp"))
    empty = sum(part.tensor.numel() == 0 for part in map(ParameterShard.of, model.parameters()))
    with pytest.raises(RegularizerError, match="sharded"):
        build(GGPO()).attach(model, seed=SEED, total_steps=STEPS)
    regularizer = attached(case, Engine(model, world))
    with regularizer.step(0):
        pass
    found["state"], found["empty"] = regularizer.state_dict(), empty

    case = Case(Mesh(tp=2, dp=2))
    engine = build_engine(case)
    regularizer = attached(case, engine)
    batch, count = micros(0, *engine.share)
    for step in range(2):
        with regularizer.step(step):
            engine.forward_backward(batch, count, task=LanguageModel(), head=None, context=contextlib.nullcontext)
            column_layer = regularizer._groups[0].branches[0]
            assert column_layer.site.row_cut is not None and column_layer.probe.grad is not None
            if step == 1 and engine.world.rank == 1:
                column_layer.probe.grad.fill_(float("inf"))
        found[f"metrics{step}"] = regularizer.metrics()
        found[f"ema{step}"] = {name: v for name, v in regularizer.state_dict().items() if name.endswith(".ema")}
    return found


def odd_layers() -> Any:
    """Two layers of 5 and 3 outputs with adapters of rank 3."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        layers = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)).requires_grad_(False)
    return with_lora(layers, r=3, target_modules=["0", "1"], task_type=None)


def test_unequal_parts_and_a_fault_on_one_rank() -> None:
    regularizer = attached(Case(), Engine.alone(odd_layers()))
    with regularizer.step(0):
        pass
    wanted = regularizer.state_dict()
    runs = run_ranks(odd_ends, 4)
    assert runs[3]["empty"] > 0
    for run in runs:
        assert set(run["state"]) == set(wanted)
        assert all(torch.allclose(run["state"][name], value, rtol=1e-6, atol=0) for name, value in wanted.items())
        assert run["metrics0"]["sketches"] == run["metrics1"]["sketches"] == 1
        assert run["metrics0"]["sketches_skipped"] == 0 and run["metrics1"]["sketches_skipped"] == 1
        assert all(torch.equal(value, run["ema1"][name]) for name, value in run["ema0"].items())
