"""A model small enough for dense Hessians in both spaces, its loss, and those Hessians by double backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flatshift.regularizers.sharpness import Sharpness
from flatshift.regularizers.sharpness.measures import Hessian
from flatshift.regularizers.sharpness.spaces import AdapterSpace, FullSpace, LossFunction, Space
from tests.support.regularizer_models import frozen_checksums, tiny_gpt2, tokens, with_lora

IDS = tokens(6, 8)
SMALL = Sharpness(
    lanczos=4, probes=2, sigmas=(0.05,), draws=2, rhos=(0.05,), ascent=2, lines=1, line_points=3, plane_points=3
)


class Toy(nn.Module):
    """A classifier with fused attention, all of it in float64 (transformers computes norms and losses in float32)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 8)
        self.q, self.v, self.up, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 12), nn.Linear(12, 5)
        self.drop = nn.Dropout(0.4)

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        x = self.embed(input_ids)
        x = x + F.scaled_dot_product_attention(self.q(x), x, self.v(x))
        return self.head(self.drop(torch.tanh(self.up(x)).mean(1)))


def tiny(**settings: Any) -> Any:
    """Few enough weights for a dense Hessian in both spaces."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        backbone = Toy().double().requires_grad_(False)
    chosen = {"r": 2, "target_modules": ["q", "v", "up"], "task_type": None} | settings
    model = with_lora(backbone, **chosen)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data *= 3
    return model


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """Mean cross entropy of the toy, or the next-token loss of a language model."""
    logits = model(input_ids=ids)
    if isinstance(logits, Tensor):
        return F.cross_entropy(logits, ids.sum(1) % 5)
    return F.cross_entropy(logits.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def gpt2(**settings: Any) -> Any:
    return with_lora(tiny_gpt2(dtype=torch.float64), fan_in_fan_out=True, **settings)


def objective(model: Any) -> LossFunction:
    return LossFunction(model, lambda: loss_of(model, IDS))


def dense_loss(model: Any, kind: str) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The loss as a function of all weights of a space in one vector, by replacing parameters; and that vector."""
    if kind == "adapter":
        moved = {n: p for n, p in model.named_parameters() if "lora_A" in n or "lora_B" in n}
    else:
        moved = {n: p for n, p in model.named_parameters() if n.endswith("base_layer.weight")}
    shapes = [p.shape for p in moved.values()]

    def loss(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes])
        weights = {n: part.view(shape) for n, part, shape in zip(moved, parts, shapes, strict=True)}
        logits = torch.func.functional_call(model, weights, kwargs={"input_ids": IDS})
        return F.cross_entropy(logits, IDS.sum(1) % 5)

    return loss, torch.cat([p.detach().reshape(-1) for p in moved.values()])


@cache
def hessian_of(kind: str) -> Tensor:
    """Dense, by double backward through the math kernel of attention."""
    loss, at = dense_loss(tiny().eval(), kind)
    with sdpa_kernel(SDPBackend.MATH):
        return torch.autograd.functional.hessian(loss, at).detach()


SPACES: dict[str, Callable[[Any], Space]] = {"adapter": AdapterSpace, "full": FullSpace}
both_spaces = pytest.mark.parametrize("kind", SPACES)


def calibrated(kind: str) -> tuple[Hessian, Space]:
    model = tiny()
    space = SPACES[kind](model)
    return Hessian.calibrated(space, objective(model), space.signs(0, "start", 0)), space


def adapted(model: Any, name: str) -> Tensor:
    """W' of a layer, dense."""
    layer = model.get_submodule(name)
    stored = layer.base_layer.weight.detach()
    w = stored.T if type(layer.base_layer).__name__ == "Conv1D" else stored
    return w + layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight


def everything(model: Any) -> tuple[Any, ...]:
    """All that could be touched, but the global generator's state is compared on its own."""
    return (
        frozen_checksums(model),
        {n: p.detach().clone().view(torch.uint8).tolist() for n, p in model.named_parameters() if p.requires_grad},
        {n: p.grad is None for n, p in model.named_parameters()},
        {n: p.requires_grad for n, p in model.named_parameters()},
        {n: (m.training, "forward" in vars(m), len(m._forward_hooks)) for n, m in model.named_modules()},
    )
