"""Causal attention by blocks of queries, for judging on a CPU in bf16: one batched product for all rows and heads.

torch's flash attention for CPUs calls two small matrix products for every row, head and block of queries. In bf16 such
a call costs more than the product itself where heads are narrow. Here a block of queries looks at the keys up to its
end, all rows and heads at once, by batched products of oneDNN: half to two thirds of the time for heads of 32 channels
at 96 to 1,024 tokens, for T·`BLOCK` scores a row and head. Scores are rounded to bf16, as every other product of such a
pass.

For passes that keep no gradient and need no mask: every token's figure depends on those before it alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .capabilities import capabilities
from .numerics import bf16_instructions

NAME = "flatshift_blocks"
"""The attention implementation, as transformers knows it."""
BLOCK = 32
"""Queries of one product; of 32, 64 and 128 the fastest at 96 to 512 tokens."""


def attend(query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> Tensor:
    """softmax(scale · q kᵀ) v over the keys up to each query.

    query (B, H, T, D), key (B, H_kv, T, D), value (B, H_kv, T, E) → (B, H, T, E); H is a multiple of H_kv.
    """
    rows, heads, tokens, width = query.shape
    groups = heads // key.shape[1]
    query = (query * scale).reshape(rows * key.shape[1], groups, tokens, width)
    key, value = key.flatten(0, 1).transpose(1, 2), value.flatten(0, 1)
    later = torch.full((BLOCK, BLOCK), float("-inf"), dtype=query.dtype, device=query.device).triu(1)
    out = query.new_empty(len(query), groups, tokens, value.shape[-1])
    for start in range(0, tokens, BLOCK):
        end = min(start + BLOCK, tokens)
        scores = torch.bmm(query[:, :, start:end].flatten(1, 2), key[:, :, :end]).unflatten(1, (groups, end - start))
        scores[..., start:] += later[: end - start, : end - start]
        block = torch.bmm(scores.softmax(-1).flatten(1, 2), value[:, :end])
        out[:, :, start:end] = block.unflatten(1, (groups, end - start))
    return out.reshape(rows, heads, tokens, -1)


@contextlib.contextmanager
def blocked(model: nn.Module, device: torch.device | str, dtype: torch.dtype | None) -> Iterator[None]:
    """Inside, `model` attends by blocks where that is the faster way: a CPU that multiplies bf16 matrices, attention
    that is transformers' `sdpa`, and calls of the whole text without a mask. All other calls go to `sdpa` as before.

    dtype: of autocast.
    """
    config: Any = getattr(model, "config", None)
    kind = capabilities(torch.device(device)).kind
    able = kind == "cpu" and dtype is torch.bfloat16 and bf16_instructions()
    if not able or getattr(config, "_attn_implementation", None) != "sdpa":
        yield
        return
    _register()
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    AttentionInterface.register(NAME, _forward)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: query (B, H, T, D), key and value (B, H_kv, T, ·) → (B, T, H, ·)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    plain = all(others.get(name) is None for name in ("sliding_window", "softcap", "s_aux", "position_bias"))
    if attention_mask is not None or not causal or dropout or not plain or query.shape[2] != key.shape[2]:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **others
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    with torch.autocast(query.device.type, enabled=False):
        query, key, value = (tensor.to(torch.bfloat16) for tensor in (query, key, value))
        return attend(query, key, value, scale=scale).transpose(1, 2).contiguous(), None
