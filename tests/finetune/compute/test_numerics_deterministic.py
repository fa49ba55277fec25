"""`train.deterministic`: what it sets while a stage goes on, what it leaves behind; it changes no bit of a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.backends import cuda

from flatshift.finetune.adapters.adapter import attach_adapter
from flatshift.finetune.compute.capabilities import CUDA, override_capabilities
from flatshift.finetune.compute.fused_loss import choose_loss_kernel
from flatshift.finetune.compute.loss import Head
from flatshift.finetune.compute.numerics import deterministic_algorithms
from flatshift.finetune.config import Adapter, Optimizer, Train
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.parallel.engine import Engine
from flatshift.finetune.parallel.mesh import ProcessMesh
from flatshift.finetune.tasks import LanguageModel
from tests.support.finetune_models import RandomBatches, save_backbone
from tests.support.stage_runs import run_or_stop

TASK = LanguageModel(pack=False)


def kernels() -> tuple[bool, bool, bool, bool]:
    return (
        cuda.flash_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )


def test_attention_on_cuda_is_flash_or_plain_and_everything_is_put_back() -> None:
    before = kernels()
    with (
        override_capabilities(CUDA, on="meta"),
        deterministic_algorithms(Train(deterministic=True), torch.device("meta")),
    ):
        assert torch.are_deterministic_algorithms_enabled() and kernels() == (True, True, False, False)
    with deterministic_algorithms(Train(deterministic=True), torch.device("cpu")):
        assert torch.are_deterministic_algorithms_enabled() and kernels() == before
    with deterministic_algorithms(Train(), torch.device("cpu")):
        assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled() and kernels() == before
    with pytest.raises(ValueError), deterministic_algorithms(Train(deterministic=True), torch.device("cpu")):
        raise ValueError
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_stage_trains_inside_of_it_to_the_bits_of_a_cpu(tmp_path: Path) -> None:
    source = save_backbone("gpt2-dropout", tmp_path / "backbone")
    found = []
    for chosen in (False, True):
        model = attach_adapter(load_backbone(source, task=TASK), Adapter(rank=4, dropout=0.1), task=TASK, seed=0)
        seen: list[bool] = []
        model.register_forward_pre_hook(lambda *_, seen=seen: seen.append(torch.are_deterministic_algorithms_enabled()))
        folder = run_or_stop(
            model,
            tmp_path / str(chosen),
            task=TASK,
            batches=RandomBatches(),
            optimizer=Optimizer(lr=1e-2),
            train=Train(steps=3, precision="fp32", deterministic=chosen, checkpointing="full"),
        )
        assert folder is not None and len(seen) >= 3 and set(seen) == {chosen}
        found.append((folder / "adapter_model.safetensors").read_bytes())
    assert found[0] == found[1]


def test_the_loss_is_made_by_our_slices(tmp_path: Path) -> None:
    engine = Engine(torch.nn.Linear(2, 2), ProcessMesh(torch.device("cuda")))
    head = Head(torch.nn.Linear(2, 2))
    told: list[str] = []
    taken = choose_loss_kernel(
        engine, head, RandomBatches(), task=TASK, train=Train(deterministic=True), folder=tmp_path, log=told.append,
        kernels={"liger": None},  # type: ignore[dict-item]
    )  # fmt: skip
    assert taken is head and not told
