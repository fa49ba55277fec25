"""LoRA-SAM, ASAM, SAM and Bi-LoRA on a mesh equal one process; so does our callback in a Trainer under DDP."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import SequentialSampler

from flatshift.finetune.config import Mesh
from flatshift.finetune.tasks import LanguageModel
from flatshift.regularizers import ASAM, GGPO, SAM, BiLora, LoraSAM, PlainRegularizer, RegularizerError, build
from tests.distributed.test_ggpo_mesh import STEPS, Case, build_engine, checksums, far, micros
from tests.support.distributed_ranks import run_ranks
from tests.support.regularizer_models import tiny_llama, tokens, with_lora

RATE = 3e-3
CONFIGS = {"lora-sam": LoraSAM(rho=0.3), "asam": ASAM(rho=2.0), "sam": SAM(rho=0.3), "bi-lora": BiLora(rho=0.5)}


def course(kind: str, case: Case, other: dict[str, Any] | None = None) -> dict[str, Any]:
    """Ten updates through the Engine. `other`: a state to load in the end."""
    engine = build_engine(case)
    regularizer = build(CONFIGS[kind]).attach(engine.model, seed=5, total_steps=STEPS, placement=engine.placement)
    before = checksums(engine)
    optimizer = torch.optim.AdamW([{"params": list(engine.parameters.values())}], lr=RATE)
    found: dict[str, Any] = {"losses": [], "perturbed": []}
    for step in range(STEPS):
        batch, count = micros(step, *engine.share)
        at_rest = {name: tensor.clone() for name, tensor in engine.full_tensors(engine.parameters).items()}
        losses = []
        with regularizer.step(step) as passes:
            for _ in passes:
                losses.append(
                    engine.forward_backward(
                        batch, count, task=LanguageModel(), head=None, context=lambda index: contextlib.nullcontext()
                    )
                )
        back = engine.full_tensors(engine.parameters)
        found["restored"] = all(torch.equal(back[name], value) for name, value in at_rest.items())
        assert found["restored"], step
        if step in (0, 3):
            grads = {name: p.grad for name, p in engine.parameters.items() if p.grad is not None}
            found[f"gradients{step}"] = {name: g.clone() for name, g in engine.full_tensors(grads).items()}
        optimizer.step()
        optimizer.zero_grad()
        regularizer.after_optimizer_step(RATE)
        found["losses"].append(float(losses[0]))
        found["perturbed"].append(float(losses[-1]))
        found["metrics"] = regularizer.metrics()
        if step == 3:  # may leave weights gathered
            with torch.no_grad():
                engine.eval_model(**batch[0].inputs)
            engine.reshard()
    found["untouched"] = checksums(engine) == before
    found["state"] = engine.union(regularizer.state_dict())
    if other is not None:
        regularizer.load_state_dict(other)
        again = engine.union(regularizer.state_dict())
        found["took"] = set(again) == set(other) and all(torch.equal(again[name], other[name]) for name in other)
    regularizer.detach()
    return found


def courses(cases: dict[str, tuple[str, Case]], others: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: course(kind, case, others[kind, case.layers]) for name, (kind, case) in cases.items()}


def compare(cases: dict[str, tuple[str, Case]], world_size: int) -> None:
    alone: dict[Any, dict[str, Any]] = {}
    for kind, case in cases.values():
        if (kind, case.layers) not in alone:
            alone[kind, case.layers] = course(kind, replace(case, mesh=Mesh(), checkpointing="none"))
    states = {key: run["state"] for key, run in alone.items()}
    ranks = run_ranks(courses, world_size, cases, states)
    for name, (kind, case) in cases.items():
        wanted = alone[kind, case.layers]
        assert kind == "bi-lora" or all(
            b > a + 1e-3 for a, b in zip(wanted["losses"], wanted["perturbed"], strict=True)
        )
        for rank in ranks:
            run = rank[name]
            for what in ("losses", "perturbed"):
                worst = max(abs(a - b) for a, b in zip(run[what], wanted[what], strict=True))
                assert worst <= 1e-5, (name, what, worst)
            for what in ("gradients0", "gradients3"):
                assert run[what].keys() == wanted[what].keys()
                worst = max(far(run[what][n], value) for n, value in wanted[what].items())
                assert worst <= (1e-5 if what == "gradients0" else 1e-3), (name, what, worst)
            assert run["metrics"] == pytest.approx(wanted["metrics"], rel=1e-3), name
            assert run["untouched"] and run["took"] and run["restored"], name
            assert set(run["state"]) == set(wanted["state"])
            for key, value in wanted["state"].items():
                assert torch.allclose(run["state"][key].double(), value.double(), rtol=1e-3, atol=1e-4), (name, key)


def test_two_ranks_equal_one_process() -> None:
    compare(
        {
            "lora-sam, dp": ("lora-sam", Case(Mesh(dp=2), checkpointing="full")),
            "lora-sam, tp": ("lora-sam", Case(Mesh(tp=2))),
            "lora-sam, pp": ("lora-sam", Case(Mesh(pp=2))),
            "asam, replicate": ("asam", Case(Mesh(replicate=2))),
            "sam, replicate": ("sam", Case(Mesh(replicate=2))),
            "bi-lora, dp": ("bi-lora", Case(Mesh(dp=2), checkpointing="full")),
        },
        2,
    )


@pytest.mark.slow
def test_two_ranks_equal_one_process_in_every_other_way() -> None:
    compare(
        {
            "lora-sam, replicate": ("lora-sam", Case(Mesh(replicate=2))),
            "lora-sam, dp, kept gathered": ("lora-sam", Case(Mesh(dp=2, reshard=False))),
            "lora-sam, dp, adapters only": ("lora-sam", Case(Mesh(dp=2, zero=2))),
            "lora-sam, tp, tokens split": ("lora-sam", Case(Mesh(tp=2, sequence_parallel=True))),
            "asam, dp": ("asam", Case(Mesh(dp=2))),
            "asam, tp": ("asam", Case(Mesh(tp=2))),
            "asam, pp, two stages a rank": ("asam", Case(Mesh(pp=2, schedule="zbv"), layers=4)),
            "bi-lora, replicate": ("bi-lora", Case(Mesh(replicate=2))),
        },
        2,
    )


def refusals() -> list[str]:
    said = []
    for mesh, kind in ((Mesh(dp=2), "sam"), (Mesh(tp=2), "sam"), (Mesh(pp=2), "sam"), (Mesh(tp=2), "bi-lora")):
        engine = build_engine(Case(mesh))
        with pytest.raises(RegularizerError) as error:
            build(CONFIGS[kind]).attach(engine.model, seed=5, total_steps=STEPS, placement=engine.placement)
        said.append(str(error.value))
    return said


class Reader(PlainRegularizer):
    """Reads the adapter's gradient, averaged over the replicas, when its step is left."""

    def attach(self, model: Any, **kwargs: Any) -> Any:
        self.model = model
        return self

    def __init__(self) -> None:
        self.norms: list[float] = []

    @contextlib.contextmanager
    def step(self, t: int, *, loss_scale: float = 1.0) -> Iterator[Any]:
        yield range(1)
        grads = [p.grad.flatten() for p in self.model.parameters() if p.requires_grad]
        self.norms.append(float(torch.cat(grads).norm()))


TRAINED = ("ggpo", "lora-sam", "sam", "bi-lora", "reader")


def trained(kind: str, rows: int) -> dict[str, Any]:
    """Four steps of the Trainer, with `rows` rows of each micro-batch in this process."""
    from transformers import Trainer, TrainingArguments

    from flatshift.regularizers import RegularizerCallback, TwoPassMixin

    class InOrder(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return SequentialSampler(self.train_dataset)

    class TwoPassTrainer(TwoPassMixin, InOrder):
        pass

    model = with_lora(tiny_llama())
    reader = Reader()
    config = {"ggpo": GGPO(sigma=0.2), "reader": reader}.get(kind) or CONFIGS[kind]
    with tempfile.TemporaryDirectory() as folder:
        run = (TwoPassTrainer if "sam" in kind else InOrder)(
            model,
            TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=rows,
                gradient_accumulation_steps=2,
                max_steps=4,
                max_grad_norm=0.05,
                learning_rate=RATE,
                lr_scheduler_type="constant",
                use_cpu=True,
                report_to=[],
                disable_tqdm=True,
                logging_steps=1,
                save_strategy="no",
            ),
            train_dataset=[{"input_ids": ids, "labels": ids} for ids in tokens(64, 10)],
            callbacks=[RegularizerCallback(config)],
        )
        run.train()
    found = [{k: v for k, v in line.items() if k == "loss" or "/" in k} for line in run.state.log_history[:4]]
    return {
        "log": found,
        "norms": reader.norms,
        "theta": {n: p.detach() for n, p in model.named_parameters() if p.requires_grad},
    }


def on_ranks() -> dict[str, Any]:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    assert dist.get_world_size() == 2
    return {"refusals": refusals(), **{kind: trained(kind, 2) for kind in TRAINED}}


def test_refusals_and_the_trainer_under_ddp() -> None:
    ranks = run_ranks(on_ranks, 2)
    for said, axis in zip(ranks[0]["refusals"], ("dp", "tp", "pp", "tp"), strict=True):
        assert f"mesh.{axis}" in said and "lora-sam" in said
    for kind in TRAINED:
        alone = trained(kind, 4)
        for rank in ranks:
            for mine, wanted in zip(rank[kind]["log"], alone["log"], strict=True):
                assert mine == pytest.approx(wanted, rel=2e-3, abs=2e-4), kind
            assert rank[kind]["norms"] == pytest.approx(alone["norms"], rel=1e-4)
            for name, value in alone["theta"].items():
                assert far(rank[kind]["theta"][name], value) < 1e-4, (kind, name)  # Adam magnifies tiny gradients
