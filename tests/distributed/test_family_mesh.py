"""The methods of adapter space on a mesh are those of one process: losses, figures, adapters, states of ten steps.

Another method joins by a line in `METHODS`. The meshes, models and batches are those of `test_ggpo_mesh`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flatshift.finetune.config import Mesh
from flatshift.finetune.tasks import LanguageModel
from flatshift.regularizers import BAR, MGPO, MSAM, NEFTune, Plain, RegularizerConfig, RegularizerError, build
from tests.distributed.test_ggpo_mesh import Case, build_engine, checksums, far, micros
from tests.support.distributed_ranks import run_ranks

STEPS = 10
SEED = 5
RATE = 1e-3


@dataclass(frozen=True)
class Run:
    """A regularizer on a mesh."""

    config: RegularizerConfig
    case: Case


METHODS: dict[str, RegularizerConfig] = {
    "mgpo": MGPO(rho=0.1),
    "mgpo, code": MGPO(rho=0.1, form="code"),
    "msam": MSAM(rho=0.1),
    "nbar": BAR(alpha=100.0),
    "obar": BAR(form="obar", alpha=100.0),
    "neftune": NEFTune(alpha=5.0),
}
TWO: dict[str, Mesh] = {
    "replicate": Mesh(replicate=2),
    "dp": Mesh(dp=2),
    "tp": Mesh(tp=2),
    "pp": Mesh(pp=2),
}
LORA: dict[str, dict[str, Any]] = {"llama": {}, "gpt2": {"fan_in_fan_out": True}}
"""Adapter settings by kind of model."""
GPT2: dict[str, Any] = {"kind": "gpt2", "lora": LORA["gpt2"]}
# Worst distance from the single process in float32: of losses, absolute; of the rest, relative.
BOUNDS = {"loss": 5e-6, "figures": 1e-5, "adapter": 1e-6, "state": 1e-5}


def course(run: Run, other: dict[str, Tensor] | None = None) -> dict[str, Any]:
    """Ten updates of two micro-batches; what is to be the same on any mesh. `other`: a state to load in the end."""
    engine = build_engine(run.case)
    regularizer = build(run.config).attach(engine.model, seed=SEED, total_steps=STEPS, placement=engine.placement)
    before = checksums(engine)
    optimizer = torch.optim.AdamW([{"params": list(engine.parameters.values())}], lr=RATE, weight_decay=0.0)
    found: dict[str, Any] = {"losses": [], "metrics": []}
    for step in range(STEPS):
        batch, count = micros(step, *engine.share)

        def context(index: int) -> contextlib.AbstractContextManager[None]:
            regularizer.on_micro_batch(index)
            return contextlib.nullcontext()

        with regularizer.step(step) as passes:
            losses = [
                engine.forward_backward(batch, count, task=LanguageModel(), head=None, context=context) for _ in passes
            ]
        optimizer.step()
        optimizer.zero_grad()
        regularizer.after_optimizer_step(RATE)
        found["losses"] += [float(loss) for loss in losses]
        found["metrics"].append(regularizer.metrics())
        if step == 3:  # may leave weights gathered
            with torch.no_grad():
                engine.eval_model(**batch[0].inputs)
            engine.reshard()
    engine.reshard()
    found["untouched"] = checksums(engine) == before
    found["adapter"] = {name: tensor.clone() for name, tensor in engine.full_tensors(engine.parameters).items()}
    found["state"] = engine.union(regularizer.state_dict())
    if other is not None:
        regularizer.load_state_dict(other)
        again = engine.union(regularizer.state_dict())
        found["took"] = set(again) == set(other) and all(torch.equal(again[name], other[name]) for name in other)
    regularizer.detach()
    return found


def courses(runs: dict[str, Run], others: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Any]]:
    if dist.get_world_size() == 2:
        refusals()
    return {name: course(run, others[name]) for name, run in runs.items()}


def compare(runs: dict[str, Run], world_size: int) -> None:
    """Run everything on `world_size` ranks and demand what the single process computes."""
    singles: dict[tuple[RegularizerConfig, str], dict[str, Any]] = {}
    for run in runs.values():
        key = (run.config, run.case.kind)
        if key not in singles:
            singles[key] = course(replace(run, case=replace(run.case, mesh=Mesh(), checkpointing="none")))
    alone = {name: singles[run.config, run.case.kind] for name, run in runs.items()}
    plain = {kind: course(Run(Plain(), Case(kind=kind, lora=lora)))["losses"] for kind, lora in LORA.items()}
    for name, run in runs.items():  # what is compared is there
        away = max(abs(a - b) for a, b in zip(alone[name]["losses"], plain[run.case.kind], strict=True))
        assert away > 20 * BOUNDS["loss"], (name, away)
    ranks = run_ranks(courses, world_size, runs, {name: one["state"] for name, one in alone.items()})
    misses = []
    for name in runs:
        worst = dict.fromkeys(BOUNDS, 0.0)
        for rank in ranks:
            for kind, value in distances(alone[name], rank[name]).items():
                worst[kind] = max(worst[kind], value)
            assert rank[name]["untouched"] and rank[name]["took"], name
        print(name, {kind: f"{value:.1e}" for kind, value in worst.items()})
        if any(value > BOUNDS[kind] for kind, value in worst.items()):
            misses.append((name, worst))
        regularizer = build(runs[name].config)  # what a mesh saved, one process takes over
        engine = build_engine(Case(kind=runs[name].case.kind, lora=runs[name].case.lora))
        regularizer.attach(engine.model, seed=SEED, total_steps=STEPS)
        state = ranks[0][name]["state"]
        regularizer.load_state_dict(state)
        again = regularizer.state_dict()
        assert set(again) == set(state) and all(torch.equal(again[key], state[key]) for key in state)
    assert not misses, misses


def distances(alone: dict[str, Any], run: dict[str, Any]) -> dict[str, float]:
    """How far a rank's course is from the single one's, in the words of `BOUNDS`."""
    assert len(run["losses"]) == len(alone["losses"]) and run["adapter"].keys() == alone["adapter"].keys()
    assert run["state"].keys() == alone["state"].keys()
    figures = 0.0
    for mine, wanted in zip(run["metrics"], alone["metrics"], strict=True):
        assert mine.keys() == wanted.keys()
        figures = max([figures, *(abs(mine[key] - value) / max(abs(value), 1e-2) for key, value in wanted.items())])
    return {
        "loss": max(abs(a - b) for a, b in zip(run["losses"], alone["losses"], strict=True)),
        "figures": figures,
        "adapter": max(far(run["adapter"][name], wanted) for name, wanted in alone["adapter"].items()),
        "state": max(
            [far(run["state"][name], wanted) for name, wanted in alone["state"].items() if float(wanted.abs().sum())]
        ),
    }


def refusals() -> None:
    """What a mesh cannot carry, and parameters sharded without a placement."""
    engine = build_engine(Case(Mesh(pp=2)))
    with pytest.raises(RegularizerError, match=r"mesh\.pp"):
        build(NEFTune()).attach(engine.model, seed=0, total_steps=1, placement=engine.placement)
    engine = build_engine(Case(Mesh(dp=2)))
    for config in (MGPO(), MSAM(), BAR(), MGPO(form="code")):
        with pytest.raises(RegularizerError, match="sharded"):
            build(config).attach(engine.model, seed=0, total_steps=1)


@pytest.mark.slow
def test_two_ranks_equal_one_process() -> None:
    layers = METHODS["mgpo, code"]
    compare(
        {f"mgpo, {place}": Run(METHODS["mgpo"], Case(mesh)) for place, mesh in TWO.items()}
        | {
            "mgpo, code, dp": Run(layers, Case(Mesh(dp=2))),
            "mgpo, code, tp, fused projection": Run(layers, Case(Mesh(tp=2), **GPT2)),
            "msam, dp, adapters replicated": Run(
                METHODS["msam"], Case(Mesh(dp=2, adapters="replicate", reshard=False))
            ),
            "nbar, dp": Run(METHODS["nbar"], Case(Mesh(dp=2))),
            "obar, tp": Run(METHODS["obar"], Case(Mesh(tp=2))),
            "neftune, tp, tokens split": Run(METHODS["neftune"], Case(Mesh(tp=2, sequence_parallel=True))),
        },
        2,
    )


@pytest.mark.slow
def test_two_ranks_equal_one_process_in_every_other_way() -> None:
    everywhere = {
        f"{method}, {place}": Run(METHODS[method], Case(mesh))
        for method in ("msam", "nbar")
        for place, mesh in TWO.items()
    }
    compare(
        everywhere
        | {
            "mgpo, code, pp": Run(METHODS["mgpo, code"], Case(Mesh(pp=2))),
            "mgpo, dp, adapters only": Run(METHODS["mgpo"], Case(Mesh(dp=2, zero=2))),
            "neftune, dp": Run(METHODS["neftune"], Case(Mesh(dp=2))),
        },
        2,
    )


@pytest.mark.slow
def test_four_ranks_equal_one_process() -> None:
    compare(
        {
            "mgpo, pp × dp": Run(METHODS["mgpo"], Case(Mesh(pp=2, dp=2))),
            "mgpo, code, tp × dp": Run(METHODS["mgpo, code"], Case(Mesh(tp=2, dp=2))),
            "nbar, tp × dp": Run(METHODS["nbar"], Case(Mesh(tp=2, dp=2))),
        },
        4,
    )
