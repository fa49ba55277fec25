"""A frozen backbone kept in bf16 that computes in float32: half the memory, each weight widened when it is used.

For machines whose memory cannot hold the float32 weights and whose products are slow in bf16. A product's weight is
widened for the product and dropped; the backward pass widens it again instead of keeping it. Widening is exact, so the
step is that of a float32 backbone with these (rounded) weights, up to the order of sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import UserError


class _Product(torch.autograd.Function):
    """x (…, n) times the frozen weight (m, n), narrower than x, transposed: (…, m)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return upstream @ weight.to(upstream.dtype), None


class WidenedLinear(nn.Linear):
    """nn.Linear whose frozen weight is kept narrow; its bias is in the dtype of the product."""

    def forward(self, input: Tensor) -> Tensor:
        out = _Product.apply(input, self.weight)
        return out if self.bias is None else out + self.bias


class WidenedEmbedding(nn.Embedding):
    """nn.Embedding whose frozen rows are kept narrow and come out in float32."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).float()


_WIDENED = {nn.Linear: WidenedLinear, nn.Embedding: WidenedEmbedding}


@torch.no_grad()
def widen_on_use(model: nn.Module, *, where: str) -> None:
    """Let `model`, frozen and loaded in bf16, compute in float32 with the weights it has, in place.

    Weights of linear layers and embeddings stay in bf16; everything else (norms, biases, buffers) becomes float32.
    PEFT wraps the layers like any others.

    Raises:
        UserError: beginning with `where`: most of the weights are not of such layers.
    """
    narrow: set[int] = set()
    for module in model.modules():
        if type(module) in _WIDENED:
            module.__class__ = _WIDENED[type(module)]
            narrow.add(id(module.weight))
    for parameter in model.parameters():
        if id(parameter) not in narrow:
            parameter.data = parameter.data.float()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype == torch.bfloat16:
                module._buffers[name] = buffer.float()
    kept = sum(p.numel() for p in model.parameters() if id(p) in narrow)
    if 2 * kept < sum(p.numel() for p in model.parameters()):
        raise UserError(
            f"{where}: most of its weights are in layers that cannot be kept in bf16 under fp32 compute; set "
            "train.backbone_precision: same"
        )
    model.config.dtype = torch.float32
