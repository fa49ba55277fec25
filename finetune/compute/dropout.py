"""Counter-based random draws of a forward pass: dropout and router noise are the same on any mesh as in one process.

Each element is dropped or kept by 16 bits of a hash of (seed, optimizer step, module, call, global row of the step's
batch, token or head and query, feature or key): SplitMix64 as in `flatshift.regularizers.layers.signs`, one word for
four neighbours of the last dim. So every rank draws its part of one mask, and a recomputed block the same again. On a
GPU the hash is compiled into one kernel: its operations take longer to launch than a LoRA layer takes to compute.

Models call dropout in modules, in functions and inside attention, and draw noise for their routers, so a `DropoutPass`
intercepts these calls in a torch function mode; the module in the hash is the innermost one being called.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from flatshift.regularizers.layers.signs import counter_values, layer_uid, mix64, mix64_, step_id, to_int64

LANES = 4
"""Elements decided by one word."""
_ONE_KERNEL: dict[str, Any] = {"realize_opcount_threshold": 1 << 20, "realize_reads_threshold": 1 << 20}
"""Inductor's options under which it does not store the hash of the leading dims between two kernels."""
_STEPS = 1 << 16
"""Resolution of a rate: it is rounded to a multiple of 1/65536, and kept elements are scaled by exactly that."""


@dataclass(frozen=True)
class KeyedDropout:
    """Position of this rank's tensors in those of a single process; creates a `DropoutPass` for each forward pass."""

    names: Mapping[nn.Module, str]
    """Module names, the same on every mesh."""
    seed: int
    columns: Mapping[str, int] = field(default_factory=dict)
    """First global feature of a dropout module's input, if tensor parallelism splits features."""
    tensor: tuple[int, int] = (0, 1)
    """(i, n): this rank has the i-th of n equal groups of an attention's heads."""
    gathered: Collection[str] = ()
    """Attention modules of which this rank has all heads nevertheless."""
    splits_tokens: bool = False
    """True if these ranks also split the tokens between the regions (sequence parallelism)."""
    positions: Callable[[int], Tensor] | None = None
    """Maps a rank's number of tokens per row to their global positions; None if it has all."""

    def forward_pass(self, step: int, *, first_row: int, rows: int, tokens: int) -> DropoutPass:
        """Return the context for the forward pass of `rows` rows, starting at row `first_row` of the step's batch, at a
        step (from 0).

        tokens: per row, on this rank.
        """
        return DropoutPass(self, step_id(self.seed, step), first_row, rows, tokens, {}, {})


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.passes: list[DropoutPass] = []


_thread = _ThreadState()


class DropoutPass(TorchFunctionMode):
    """Context that draws the dropout masks for the rows of one forward pass."""

    def __init__(
        self,
        keyed: KeyedDropout,
        step: int,
        first_row: int,
        rows: int,
        tokens: int,
        calls: dict[tuple[str, int], int],
        counters: dict[tuple[Any, ...], Tensor],
    ) -> None:
        super().__init__()
        self._keyed, self._step, self._first, self._rows, self._tokens = keyed, step, first_row, rows, tokens
        self._calls = calls
        """Number of draws per module and first query."""
        self._counters = counters
        """Counter values of the indices drawn at so far: layers of one size share them."""
        self._query = 0
        """Global position of the first query of an attention."""

    def __enter__(self) -> DropoutPass:
        super().__enter__()
        _thread.passes.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _thread.passes.pop()
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        intercept = _INTERCEPTED.get(func)
        return func(*args, **(kwargs or {})) if intercept is None else intercept(self, *args, **(kwargs or {}))

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return input
        dropped: Tensor = _DropoutFunction.apply(input, *self._mask(input.shape, p, input.device))
        return input.copy_(dropped) if inplace else dropped

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attend as torch does, (B, H, T, D) → (B, H, T, D); with dropout, unfused, because no kernel takes a dropout
        mask."""
        if dropout_p == 0:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
        scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, torch.finfo(scores.dtype).min)
        elif attn_mask is not None:
            scores = scores + attn_mask
        weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
        return _DropoutFunction.apply(weights, *self._mask(weights.shape, dropout_p, weights.device)) @ value

    def _mask(self, shape: torch.Size, rate: float, device: torch.device) -> tuple[Tensor, float]:
        """Return the kept elements, bool of `shape`, and the factor that scales them."""
        threshold = round(rate * _STEPS)
        kept = (self._lanes(shape, device) >= threshold - _STEPS // 2).reshape(shape)
        return kept, _STEPS / (_STEPS - threshold) if threshold < _STEPS else 0.0

    def _uniform(self, like: Tensor) -> Tensor:
        """Return draws between 0 and 1, both excluded, of 23 bits each, float32 of the shape of `like`."""
        high, low = (self._lanes(like.shape, like.device).int() + _STEPS // 2 for _ in range(2))
        return ((high * 2**7 + low // 2**9 + 0.5) / 2**23).reshape(like.shape)

    def _lanes(self, shape: torch.Size, device: torch.device) -> Tensor:
        """Return 16 random bits for each element of `shape`, int16; a reshape gives that shape."""
        name = self._caller()
        call = self._calls.get((name, self._query), 0)
        self._calls[name, self._query] = call + 1
        # a later draw of the module over all its tokens has the same number on ranks without the first query
        self._calls[name, 0] = max(self._calls.get((name, 0), 0), call + 1)
        *leading, (start, size) = self._coordinates(name, shape, device)
        lowest, highest = start // LANES, -(-(start + size) // LANES)
        first, *others = *leading, self._count(lowest, highest - lowest, device)
        first = first + (to_int64(layer_uid(f"dropout {call} {name}")) ^ self._step)
        words = _hash_function(device.type == "cuda")(first, others)
        offset = start - lowest * LANES
        return words.view(torch.int16)[..., offset : offset + size]

    def _coordinates(self, name: str, shape: torch.Size, device: torch.device) -> list[Any]:
        """Return the counter values of every dim but the last, and the first index and size of the last.

        A tensor is read as (rows, features), (rows · tokens, features), (rows, tokens, features), (rows, heads,
        queries, keys) or (rows · heads, queries, keys). Others are shared by all rows, as the relative positions of
        `_SHARED` modules and of DeBERTa's adapters are; the latter cannot be distinguished on a rank with one row.
        """
        sizes = list(shape) or [1]
        shared = name.rpartition(".")[2] in _SHARED
        if sizes[0] != self._rows and sizes[0] % self._rows == 0 and len(sizes) > 1 and not shared:
            sizes[:1] = [self._rows, sizes[0] // self._rows]
        first_row = self._first if sizes[0] == self._rows and not shared else 0
        rows = self._count(first_row, sizes[0], device)
        if len(sizes) == 4:
            i = 0 if name in self._keyed.gathered else self._keyed.tensor[0]
            heads, queries = self._count(i * sizes[1], sizes[1], device), self._count(self._query, sizes[2], device)
            return [rows, heads, queries, (0, sizes[3])]
        others = [self._count(0, size, device) for size in sizes[2:-1]]
        tokens = [self._count_tokens(sizes[1], device)] if len(sizes) > 2 else []
        leading = [rows, *tokens, *others] if len(sizes) > 1 else []
        return [*leading, (self._keyed.columns.get(name, 0), sizes[-1])]

    def _count(self, first: int, size: int, device: torch.device) -> Tensor:
        """Return the counter values of `size` indices from `first`."""
        key = first, size, device
        if key not in self._counters:
            self._counters[key] = counter_values(torch.arange(first, first + size, device=device))
        return self._counters[key]

    def _count_tokens(self, tokens: int, device: torch.device) -> Tensor:
        """Return the counter values of this rank's tokens, if a row has `tokens` of them here."""
        keyed, (i, n) = self._keyed, self._keyed.tensor
        if not (keyed.splits_tokens and tokens * n == self._tokens):
            i, n = 0, 1
        if keyed.positions is None or tokens * n != self._tokens:
            return self._count(i * tokens, tokens, device)
        key = "tokens", tokens, device
        if key not in self._counters:
            own = keyed.positions(self._tokens).to(device)[i * tokens : (i + 1) * tokens]
            self._counters[key] = counter_values(own)
        return self._counters[key]

    def _caller(self) -> str:
        """Return the name of the module being called, found on the call stack: a function has no other way to identify
        it."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and (name := self._keyed.names.get(module)) is not None:
                return name
            frame = frame.f_back
        return ""


def _hash_counters(first: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Return a word for each combination of a key in `first` and a counter value of each of the `others`, int64."""
    words = first
    for counters in others:
        words = mix64(words)[..., None] + counters
    return mix64_(words)


@functools.cache
def _hash_function(compiled: bool) -> Callable[[Tensor, Sequence[Tensor]], Tensor]:
    """Return `_hash_counters`; if `compiled`, as one kernel, unless this machine cannot compile for its GPU."""
    if not compiled:
        return _hash_counters
    try:
        example = torch.zeros(2, dtype=torch.int64, device="cuda")
        compiled_hash(example, [example, example])
    except Exception:  # whatever keeps it from compiling, as a missing Triton: uncompiled it has the same bits
        return _hash_counters
    return compiled_hash


def compiled_hash(first: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Apply `_hash_counters` compiled, once for any sizes."""
    from torch._dynamo.decorators import mark_unbacked

    distinct = [counters.detach() for counters in others]  # two dims of one size have the same tensor
    for counters in (first, *distinct):
        mark_unbacked(counters, 0)
    with torch.no_grad():
        return _compile_hash()(first, distinct)


@functools.cache
def _compile_hash() -> Callable[[Tensor, Sequence[Tensor]], Tensor]:
    return torch.compile(_hash_counters, dynamic=True, options=_ONE_KERNEL)


_SHARED = ("pos_dropout", "sin_dropout", "cos_dropout")
"""Dropout modules of DeBERTa's and Funnel's relative positions."""
_INTERCEPTED: dict[Any, Callable[..., Tensor]] = {
    F.dropout: DropoutPass._dropout,
    torch.dropout: lambda own, input, p, train: own._dropout(input, p, train),
    F.scaled_dot_product_attention: DropoutPass._attention,
    Tensor.uniform_: lambda own, x, low=0.0, high=1.0: x.copy_(own._uniform(x) * (high - low) + low),
    Tensor.exponential_: lambda own, x, rate=1.0: x.copy_(-own._uniform(x).log() / rate),
    torch.rand_like: lambda own, x, **options: torch.empty_like(x, **options).copy_(own._uniform(x)),
}


class _DropoutFunction(torch.autograd.Function):
    """x · kept · scale; saves only the mask, one byte per element. Differentiable any number of times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return (x * mask).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (mask,) = ctx.saved_tensors
        return _DropoutFunction.apply(grad, mask, ctx.scale), None, None


def recompute_factory() -> Callable[[], DropoutPass] | None:
    """Return a factory of contexts in which a module about to be called draws the same masks when backward recomputes
    it, maybe often.

    None outside of a `DropoutPass`.
    """
    if not _thread.passes:
        return None
    now = _thread.passes[-1]
    calls = dict(now._calls)
    return lambda: DropoutPass(now._keyed, now._step, now._first, now._rows, now._tokens, dict(calls), now._counters)


@contextmanager
def with_query_offset(position: int) -> Iterator[None]:
    """Set the global position of the first query of attention inside."""
    active = _thread.passes[-1] if _thread.passes else None
    if active is not None:
        before, active._query = active._query, position
    try:
        yield
    finally:
        if active is not None:
            active._query = before
