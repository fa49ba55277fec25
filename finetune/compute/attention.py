"""Attention based on what the host knows about the rows: flash attention for packed rows, masks without a device
synchronisation, and blocked queries on a CPU. Any call outside of these cases computes exactly what `sdpa` does.

**Packed rows.** torch's flash attention over samples of any length (`torch.nn.attention.varlen`), where a CPU uses a
dense mask of T² per row. transformers passes a four-dimensional mask unchanged to every attention layer; here it is the
offsets where samples start, int32 (1, 1, L, N + 1) for N samples of at most L tokens in the concatenated rows of a
micro-batch (a view; L is read off the shape, so no layer asks the device). `check_packing_isolation` measures whether a
base model keeps its samples apart; those that build their masks otherwise (recurrent ones, ALiBi) would leak silently.

**Masks.** transformers inspects every mask, and positions; on a GPU each inspection synchronises. The host built the
rows and knows. A causal model padded on the right needs no mask for the padding, which has no target tokens.

**Blocks of queries**, for evaluation on a CPU in bf16, where torch's flash attention calls two small matrix products
for every row, head and block of queries, which cost more to call than to compute if heads are narrow. Here a block of
queries attends to the keys up to its end, all rows and heads at once: half to two thirds of the time for heads of 32
channels at 96 to 1,024 tokens, for T·`BLOCK` scores per row and head, rounded to bf16.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import Train
from .capabilities import capabilities
from .cuda_status import is_cuda, product_dtype
from .numerics import dropout_rates, has_bf16_matmul

NAME = "flatshift_rows"
"""Name of the attention implementation in transformers."""
_WIDEST = 256
"""Largest head width that the kernel takes, in multiples of 8."""
_OLDEST = (8, 0)
"""Lowest compute capability with flash attention."""


def sample_offsets(position_ids: Tensor) -> tuple[Tensor, int]:
    """Return the offsets of samples in packed rows (B, T) in host memory, and the tokens of the longest sample.

    Offsets count in the concatenated rows and include the end: int32 (N + 1,).
    """
    flat = position_ids.reshape(-1)
    starts = torch.cat([(flat == 0).nonzero().flatten(), torch.tensor([len(flat)])])
    return starts.to(torch.int32), int(starts.diff().max())


def offsets_as_mask(starts: Tensor, longest: int) -> Tensor:
    """Return the offsets in the form of the model's attention mask; a view of `starts`."""
    return starts[None, None, None].expand(1, 1, longest, -1)


def drop_sample_offsets(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return model inputs without sample offsets, for rows that may be sliced: positions alone then separate
    samples."""
    return {name: value for name, value in inputs.items() if name != "attention_mask" or value.dtype != torch.int32}


Kernel = Callable[..., Tensor]
"""(query (Σ, H, D), key and value (Σ, H_kv, D), starts, longest, scale, window) → (Σ, H, D); window: tokens that a
query sees, including itself, or None for all before it."""


def flash_attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, *, scale: float | None, window: int | None
) -> Tensor:
    """Run torch's flash attention, causal within each sample."""
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": scale, "window_size": (-1 if window is None else window - 1, 0)}
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    elif groups > 1:  # torch 2.11 requires equal numbers of heads
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    output = varlen_attn(query, key, value, starts, starts, longest, longest, **options)
    assert isinstance(output, Tensor)
    return output


def _make_attention_function(kernel: Kernel) -> Callable[..., tuple[Tensor, None]]:
    """Return the attention function for transformers: `kernel` if it receives sample offsets, else sdpa."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Attend: query (B, H, T, D), key and value (B, H_kv, T, D) → (B, T, H, D)."""
        if attention_mask is None or attention_mask.dtype != torch.int32:
            return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
        rows, _, tokens, width = query.shape
        value_width, window = value.shape[-1], options.get("sliding_window")
        # the kernel takes one width only: pad narrower values, and cut the output back below
        if value_width < width:
            value = F.pad(value, (0, width - value_width))
        dtype = product_dtype(query)  # autocast treats scaled_dot_product_attention the same way
        flat = [tensor.to(dtype).transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
        starts, longest = attention_mask[0, 0, 0], attention_mask.shape[2]
        output = kernel(*flat, starts, longest, scale=scaling, window=window)
        return output.unflatten(0, (rows, tokens))[..., :value_width], None

    return forward


def flash_attention_problem(base: Any, train: Train, device: torch.device, *, splits_rows: bool) -> str | None:
    """Return the reason packed rows of the model `base` need a dense mask here; None if the kernel may be tried.

    splits_rows: tokens of a row are on several ranks.
    """
    if not is_cuda(device):
        return "no CUDA device"
    if torch.cuda.get_device_capability(device) < _OLDEST or not torch.backends.cuda.is_flash_attention_available():
        return "this device or build has no flash attention"
    return _model_problem(base, train, splits_rows=splits_rows)


def _model_problem(base: Any, train: Train, *, splits_rows: bool) -> str | None:
    """Return a reason given by the run or its base model, as for `flash_attention_problem`; None if there is none."""
    if splits_rows:
        return "tokens are on several ranks"
    config = base.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    reasons = {
        "float32 products": train.precision == "fp32",
        "train.compile wants one shape": train.compile,
        f"attention is {base.config._attn_implementation}": base.config._attn_implementation != "sdpa",
        "attention is not chosen by its interface": not base._can_set_attn_implementation(),
        f"heads are {width} channels wide": bool(width % 8) or width > _WIDEST,
        "attention dropout": any(rate > 0 and "att" in key for _, key, rate in dropout_rates(base.config)),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def register_packed_attention(kernel: Kernel) -> None:
    """Register `kernel` with transformers under `NAME`."""
    register_attention(NAME, _make_attention_function(kernel))


@dataclass(frozen=True)
class PackedRows:
    """Host-side facts about the rows of the current forward pass.

    padded: True if any row is shorter than the others (padded on the right).
    positions: (B, T) int64 of packed rows, restarting at 0 for each sample; None: one sample per row.
    """

    padded: bool
    positions: Tensor | None


_ROWS: ContextVar[PackedRows | None] = ContextVar("packed rows", default=None)
_BUILDS_MASKS: ContextVar[bool] = ContextVar("whether masks are made here", default=False)


@contextlib.contextmanager
def packed_attention(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Build the masks of `model` from `packed_batch` inside, if inspecting them would synchronise with `device`.

    A base model with masks other than those of `sdpa` and `eager` attention keeps its own.
    """
    changed: dict[str, Any] = {}
    if not capabilities(device).reads_masks:
        from transformers.masking_utils import (
            ALL_MASK_ATTENTION_FUNCTIONS,
            AttentionMaskInterface,
            eager_mask,
            sdpa_mask,
        )

        registry: Any = ALL_MASK_ATTENTION_FUNCTIONS
        configs = (getattr(module, "config", None) for module in model.modules())
        names = {str(getattr(config, "_attn_implementation", None)) for config in configs} & set(registry)
        if all(registry[name] in (sdpa_mask, eager_mask) for name in names):
            changed = {name: registry[name] for name in names}
    for name, usual in changed.items():
        AttentionMaskInterface.register(name, partial(_make_mask, usual))
    token = _BUILDS_MASKS.set(bool(changed))
    try:
        yield
    finally:
        _BUILDS_MASKS.reset(token)
        for name, usual in changed.items():
            AttentionMaskInterface.register(name, usual)


@contextlib.contextmanager
def packed_batch(batch: Any) -> Iterator[dict[str, Tensor]]:
    """Surround the forward pass of `batch` (`flatshift.finetune.compute.loss.Batch`); yield the model's keyword
    arguments."""
    inputs: dict[str, Tensor] = batch.inputs
    padded = getattr(batch, "padded", None)
    # transformers passes masks of more than two dims through unchanged
    if padded is None or not _BUILDS_MASKS.get() or getattr(inputs.get("attention_mask"), "ndim", 2) > 2:
        yield inputs
        return
    positions = inputs.get("position_ids")
    if positions is not None:  # without a mask transformers would search the positions for samples
        inputs = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}
    token = _ROWS.set(PackedRows(padded, positions))
    try:
        yield inputs
    finally:
        _ROWS.reset(token)


def _restrict_to_samples(mask: Any, positions: Tensor) -> Callable[..., Tensor]:
    """Restrict transformers' `mask` function to each sample of packed rows, by positions in the sample (B, T).

    The oldest transformers that we support has no such function.
    """
    sample = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1).ne(1).cumsum(-1)

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = sample[row, query] == sample[row, key]
        return same & mask(row, head, positions[row, query], positions[row, key])

    return sees


def _make_mask(usual: Callable[..., Tensor | None], **options: Any) -> Tensor | None:
    """Compute transformers' mask by the `usual` function: the keys that each query sees, bool (B, 1, T, T) (for `eager`
    the bias added to their scores); None if the kernel's own causal masking suffices."""
    from transformers.masking_utils import causal_mask_function

    rows, mask = _ROWS.get(), options.get("mask_function")
    if rows is None or options.get("attention_mask") is None:
        return usual(**options)
    if rows.positions is not None:
        options["mask_function"] = _restrict_to_samples(mask, rows.positions)
        return usual(**{**options, "attention_mask": None, "allow_is_causal_skip": False})
    is_causal = options.get("allow_is_causal_skip", True) and mask is causal_mask_function
    if is_causal or not rows.padded:
        return usual(**{**options, "attention_mask": None})
    return usual(**{**options, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


_BLOCKS = "flatshift_blocks"
"""Name of the attention implementation in transformers."""
BLOCK = 32
"""Queries per product; of 32, 64 and 128 the fastest at 96 to 512 tokens."""


def blocked_causal_attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> Tensor:
    """Compute softmax(scale · q kᵀ) v over the keys up to each query.

    query (B, H, T, D), key (B, H_kv, T, D), value (B, H_kv, T, E) → (B, H, T, E); H is a multiple of H_kv.
    """
    rows, heads, tokens, width = query.shape
    groups = heads // key.shape[1]
    query = (query * scale).reshape(rows * key.shape[1], groups, tokens, width)
    key, value = key.flatten(0, 1).transpose(1, 2), value.flatten(0, 1)
    later = torch.full((BLOCK, BLOCK), float("-inf"), dtype=query.dtype, device=query.device).triu(1)
    output = query.new_empty(len(query), groups, tokens, value.shape[-1])
    for start in range(0, tokens, BLOCK):
        end = min(start + BLOCK, tokens)
        scores = torch.bmm(query[:, :, start:end].flatten(1, 2), key[:, :, :end]).unflatten(1, (groups, end - start))
        scores[..., start:] += later[: end - start, : end - start]
        block = torch.bmm(scores.softmax(-1).flatten(1, 2), value[:, :end])
        output[:, :, start:end] = block.unflatten(1, (groups, end - start))
    return output.reshape(rows, heads, tokens, -1)


@contextlib.contextmanager
def use_blocked_attention(model: nn.Module, device: torch.device | str, dtype: torch.dtype | None) -> Iterator[None]:
    """Make `model` attend by blocks inside if that is faster, and restore `sdpa` on exit.

    Applies on a CPU that multiplies bf16 matrices, with transformers' `sdpa` attention, to calls over the whole text
    without a mask. All other calls go to `sdpa`.

    dtype: of autocast.
    """
    config: Any = getattr(model, "config", None)
    faster = capabilities(device).kind == "cpu" and dtype is torch.bfloat16 and has_bf16_matmul()
    if not faster or getattr(config, "_attn_implementation", None) != "sdpa":
        yield
        return
    register_attention(_BLOCKS, _blocked_attention_forward)
    config._attn_implementation = _BLOCKS
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"


def register_attention(name: str, attention: Callable[..., tuple[Tensor, None]]) -> None:
    """Register `attention` with transformers under `name`, with the masks of `sdpa`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def _blocked_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers: query (B, H, T, D), key and value (B, H_kv, T, ·) → (B, T, H, ·)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    plain = all(options.get(name) is None for name in ("sliding_window", "softcap", "s_aux", "position_bias"))
    if attention_mask is not None or not causal or dropout or not plain or query.shape[2] != key.shape[2]:
        options |= {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    with torch.autocast(query.device.type, enabled=False):
        query, key, value = (tensor.to(torch.bfloat16) for tensor in (query, key, value))
        return blocked_causal_attention(query, key, value, scale=scale).transpose(1, 2).contiguous(), None
