"""`mesh.offload`: gradients in host memory are clipped by a norm that the device has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.cuda_rehearsal import Rehearsal
from flatshift.finetune.compute.capabilities import CUDA
from flatshift.finetune.parallel.engine import Engine
from flatshift.finetune.parallel.mesh import ProcessMesh


class Two(nn.Module):
    """Two trained factors, of which `host` lies in host memory."""

    def __init__(self, host: str, device: str) -> None:
        super().__init__()
        self.here = nn.Parameter(torch.ones(3, 2, device=host))
        self.there = nn.Parameter(torch.ones(2, 4, device=device))
        for parameter in self.parameters():
            parameter.grad = torch.full_like(parameter, 2.0)


def test_gradients_of_the_host_are_clipped_without_the_device_meeting_them() -> None:
    model = Two("cpu", "meta")
    engine = Engine(model, ProcessMesh(torch.device("meta"), size=2))
    with Rehearsal(CUDA, on="meta") as seen:
        norm = engine.clip(1.0)
    assert norm.device.type == "meta" and model.here.grad is not None and model.here.grad.device.type == "cpu"
    assert [wait.operator for wait in seen.waits] == ["copy to the host"]  # once, however many gradients there are


def test_the_bound_is_the_same_wherever_gradients_lie() -> None:
    model = Two("cpu", "cpu")
    norm = Engine(model, ProcessMesh(torch.device("cpu"), size=2)).clip(1.0)
    assert float(norm) == pytest.approx((4 * 14) ** 0.5)
    assert float(sum(p.grad.square().sum() for p in model.parameters())) == pytest.approx(1.0, rel=1e-5)
