"""Rows split over context-parallel ranks give the loss, gradients and norm of whole rows, on 2 and 4 ranks.

Every rank compares with its own copy of the whole model on all rows.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flatshift.finetune.config import Mesh
from flatshift.finetune.errors import UserError
from flatshift.finetune.parallel.activation_checkpoint import checkpoint_activations
from flatshift.finetune.parallel.context import ContextParallel, check_context
from flatshift.finetune.parallel.engine import Engine
from flatshift.finetune.parallel.fsdp import shard
from flatshift.finetune.parallel.mesh import ProcessMesh
from flatshift.finetune.parallel.pipeline import PipelineRunner, build_rank_stages
from flatshift.finetune.parallel.tensor import tensor_parallel
from flatshift.finetune.tasks import LanguageModel
from flatshift.regularizers import GGPO, build
from tests.support.distributed_ranks import run_ranks
from tests.support.tensor_models import VOCABULARY, adapted, backbone

KINDS = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3", "gpt2", "gpt_neox")
TASK = LanguageModel()
ROWS, TOKENS = 4, 32


@dataclass(frozen=True)
class Micro:
    """Rows of samples that lie one behind the other (packed), or one padded sample each."""

    inputs: dict[str, Tensor]
    labels: Tensor

    @classmethod
    def of(cls, *, packed: bool, seed: int) -> Micro:
        """4 rows of 32 tokens; the padding of one row is longer than a sliding window and fills whole slices."""
        ids = torch.randint(3, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(seed))
        labels, mask = ids.clone(), torch.ones_like(ids)
        positions = torch.arange(TOKENS).repeat(ROWS, 1)
        if packed:
            for row, starts in enumerate([(0,), (0, 5, 6, 19), (0, 16), (0, 3, 30)]):
                for start in starts:
                    positions[row, start:] = torch.arange(TOKENS - start)
                    labels[row, start] = -100
            return cls({"input_ids": ids, "position_ids": positions}, labels)
        for row, length in enumerate([32, 9, 27, 17]):
            ids[row, length:], mask[row, length:], labels[row, length:] = 0, 0, -100
        labels[0, :12] = -100  # a prompt: the first run of every rank is unsupervised
        return cls({"input_ids": ids, "attention_mask": mask}, labels)

    def share(self, index: int, width: int) -> Micro:
        """One data rank's rows."""
        inputs = {name: tensor.chunk(width)[index] for name, tensor in self.inputs.items()}
        return Micro(inputs, self.labels.chunk(width)[index])

    def to(self, device: torch.device) -> Micro:
        return self


@dataclass(frozen=True)
class Case:
    """A model and the mesh it runs on."""

    mesh: Mesh
    kind: str = "llama"
    checkpointing: Any = "none"
    heads: bool = True
    """Whether the loss is made in the output head."""
    model: dict[str, Any] = field(default_factory=dict)


def laid_out(case: Case) -> Engine:
    """The model on its mesh, in the order of a real run."""

    def whole() -> Any:
        return adapted(case.kind, use_cache=False, **case.model)  # a cache would hide where samples end

    mesh, model = case.mesh, whole()
    if mesh.size == 1:
        checkpoint_activations(model, case.checkpointing)
        return Engine.alone(model)
    world = ProcessMesh.of(mesh, torch.device("cpu"))
    check_context(model)
    if mesh.pp > 1:
        model, _ = build_rank_stages(model, whole, mesh=mesh, world=world)
    layout = tensor_parallel(model, world=world, sequence_parallel=mesh.sequence_parallel)
    tokens = ContextParallel(world)
    tokens.attach(model)
    checkpoint_activations(model, case.checkpointing)
    sharding = shard(model, mesh=mesh, world=world)
    runner = PipelineRunner(model, mesh=mesh, world=world, tokens=tokens) if mesh.pp > 1 else None
    return Engine(model, world, layout=layout, sharding=sharding, runner=runner, tokens=tokens)


def micros(*, seed: int = 0) -> tuple[list[Micro], int]:
    """An update's micro-batches and its supervised tokens."""
    found = [Micro.of(packed=packed, seed=seed + packed) for packed in (False, True)]
    return found, sum(int((micro.labels[:, 1:] != -100).sum()) for micro in found)


def update(engine: Engine, *, heads: bool, seed: int = 0) -> tuple[float, dict[str, Tensor], float]:
    """Loss, whole gradients and their norm."""
    batch, count = micros(seed=seed)
    mine = [micro.share(*engine.share) for micro in batch]
    head = engine.find_head(mine[0].inputs, task=TASK) if heads else None
    assert (head is not None) == heads or engine.runner is not None
    context = lambda index: contextlib.nullcontext()  # noqa: E731
    loss = engine.forward_backward(mine, count, task=TASK, head=head, context=context)
    grads = {name: p.grad for name, p in engine.parameters.items() if p.grad is not None}
    assert grads.keys() == engine.parameters.keys()
    found = {name: grad.clone() for name, grad in engine.full_tensors(grads).items()}
    return float(loss), found, float(engine.clip(None))


def differences(case: Case) -> dict[str, float]:
    alone = Case(Mesh(), case.kind, heads=case.heads, model=case.model)
    loss, grads, norm = update(laid_out(alone), heads=case.heads)
    engine = laid_out(case)
    own_loss, own, own_norm = update(engine, heads=case.heads)
    assert own.keys() == grads.keys()
    for name, grad in grads.items():
        assert float(grad.abs().max()) > 1e-6, name
    return {
        "loss": abs(own_loss - loss) / loss,
        "grads": max(float((own[name] - grad).norm() / grad.norm()) for name, grad in grads.items()),
        "norm": abs(own_norm - norm) / norm,
    }


def every_case(cases: dict[str, Case]) -> dict[str, dict[str, float]]:
    return {name: differences(case) for name, case in cases.items()}


def judge(cases: dict[str, Case], ranks: int) -> None:
    for result in run_ranks(every_case, ranks, cases):
        for name, errors in result.items():
            for what, error in errors.items():
                assert error <= 1e-5, (name, what, error)


def test_two_ranks_equal_whole_rows() -> None:
    mesh = Mesh(cp=2)
    cases = {kind: Case(mesh, kind) for kind in KINDS}
    cases |= {f"{kind}, logits": Case(mesh, kind, heads=False) for kind in ("llama", "gpt2")}
    groups = {"num_key_value_heads": 2}
    cases["grouped heads"] = Case(mesh, "llama", model=groups)
    cases["recomputed"] = Case(mesh, "llama", checkpointing="full", model=groups)
    cases["attention recomputed"] = Case(mesh, "mistral", checkpointing="selective", heads=False)
    cases["adapters whole"] = Case(replace(mesh, adapters="replicate"))
    cases["weights whole"] = Case(replace(mesh, zero=2))
    judge(cases, 2)


@pytest.mark.slow
def test_four_ranks_equal_whole_rows() -> None:
    cases = {kind: Case(Mesh(cp=4), kind) for kind in ("llama", "mistral", "gpt2", "gemma3")}
    meshes = {
        "dp": Mesh(cp=2, dp=2),
        "replicate": Mesh(cp=2, replicate=2),
        "tp": Mesh(cp=2, tp=2),
        "tp, tokens": Mesh(cp=2, tp=2, sequence_parallel=True),
        "pp": Mesh(cp=2, pp=2),
    }
    cases |= {name: Case(mesh, "qwen3") for name, mesh in meshes.items()}
    cases |= {f"{name}, recomputed": Case(m, "mistral", checkpointing="full") for name, m in meshes.items()}
    cases["pp, interleaved"] = Case(Mesh(cp=2, pp=2, schedule="interleaved"), "llama", model={"num_hidden_layers": 4})
    cases["tp, logits"] = Case(meshes["tp"], "gpt2", heads=False)
    judge(cases, 4)


# --------------------------------------------------------------------------------------------- the rest, on one spawn


def rest() -> dict[str, Any]:
    return {"ggpo": [_noisy(mesh) for mesh in (Mesh(), Mesh(cp=2))], "whole rows": _whole_rows()}


def _noisy(mesh: Mesh) -> dict[str, Any]:
    """Six updates under GGPO."""
    engine = laid_out(Case(mesh, checkpointing="full" if mesh.cp > 1 else "none"))
    regularizer = build(GGPO(sigma=0.2, refresh=3, ema=0.5)).attach(
        engine.model, seed=5, total_steps=6, placement=engine.placement
    )
    optimizer = torch.optim.AdamW(engine.parameters.values(), lr=3e-3, eps=1e-6)
    losses, first = [], {}
    for step in range(6):
        with regularizer.step(step):
            loss, grads, _ = update(engine, heads=True, seed=10 * step)
        first = first or grads
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    found = {"losses": losses, "first": first, "state": engine.union(regularizer.state_dict())}
    regularizer.detach()
    return found


def _whole_rows() -> dict[str, Any]:
    """Outside of an update, rows are whole on each rank."""
    alone, engine = (laid_out(Case(mesh, "mistral")) for mesh in (Mesh(), Mesh(cp=2)))
    inputs = Micro.of(packed=False, seed=1).inputs
    packed = Micro.of(packed=True, seed=1).inputs
    prompts = {name: tensor[:, :6] for name, tensor in inputs.items()}
    alone.model.eval(), engine.model.eval()
    greedy = {"max_new_tokens": 6, "do_sample": False, "use_cache": True}
    with torch.no_grad():
        equal = [
            torch.equal(alone.eval_model(**rows).logits, engine.eval_model(**rows).logits) for rows in (inputs, packed)
        ]
        same = alone.eval_model.generate(**prompts, **greedy).equal(engine.eval_model.generate(**prompts, **greedy))
    engine.reshard()
    return {"logits": all(equal), "generation": same, "share": (engine.evaluation.index, engine.evaluation.width)}


def test_noise_evaluation_and_generation() -> None:
    for rank, result in enumerate(run_ranks(rest, 2)):
        alone, split = result["ggpo"]
        assert split["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert len(set(alone["losses"])) == 6
        for name, grad in alone["first"].items():
            assert float((split["first"][name] - grad).norm() / grad.norm()) <= 1e-5, name
        for name, tensor in alone["state"].items():
            torch.testing.assert_close(split["state"][name], tensor, rtol=1e-3, atol=1e-6)
        assert result["whole rows"] == {"logits": True, "generation": True, "share": (rank, 2)}


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(UserError, match=r"^mesh\.cp: bert models cannot be split by tokens"):
        check_context(backbone("bert", meta=True))
    with pytest.raises(UserError, match="not causal"):
        check_context(backbone("gemma3", meta=True, use_bidirectional_attention=True))
