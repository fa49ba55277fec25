"""What a stage will hold in memory on one device, by cause, said before step 1.

Weights, gradients and optimizer state are counted; activations are measured: a short row goes forward in training
mode while autograd's saved tensors are summed, at the run's own length if that is short, else at two lengths, and the
line through them is read off at the row length and batch size of the run. Not in it: the allocator's slack, the
libraries, and short-lived temporaries except the slice of logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters.adapter import trainable
from ..adapters.projector import blank_features
from ..config import Optimizer, OptimizerKind, Train
from ..devices.capabilities import kept_draws
from ..devices.precision import autocast, settled
from ..quantised import scales
from ..train.adam8bit import state_bytes
from ..train.numerics import SHORT, attention, without_input_casts

_PROBE = (SHORT + 8, SHORT + 24)
"""Tokens: on a CPU shorter rows are attended to in another way."""
_NAMES = {"adamw": "AdamW"}


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by cause."""

    backbone: int
    """Frozen parameters and buffers, and scales of quantised weights."""
    adapter: int
    """Trained parameters, float32."""
    gradients: int
    """As large as the adapter."""
    optimizer: int
    """Two moments of the adapter, as `optimizer.kind` keeps them."""
    activations: int
    """Kept between forward and backward by one micro-batch of the longest rows."""

    @property
    def total(self) -> int:
        """Sum of all causes."""
        return self.backbone + self.adapter + self.gradients + self.optimizer + self.activations


def memory_plan(model: nn.Module, *, train: Train, kind: OptimizerKind = "adamw") -> MemoryPlan:
    """Count and measure (see the module's text); the model's mode and the global random state are left as they were."""
    train = settled(train, model)
    adapter = sum(p.nbytes for p in trainable(model).values())
    frozen = {p.data_ptr(): p.nbytes for p in model.parameters() if not p.requires_grad}
    frozen |= {b.data_ptr(): b.nbytes for b in (*model.buffers(), *scales(model).values())}
    per_row = at_length(lambda tokens: _saved_bytes(model, tokens, train), train.max_length)
    return MemoryPlan(
        backbone=sum(frozen.values()),
        adapter=adapter,
        gradients=adapter,
        optimizer=state_bytes([p.numel() for p in trainable(model).values()], kind),
        activations=round(per_row * train.batch_size),
    )


def _saved_bytes(model: Any, tokens: int, train: Train) -> int:
    """Bytes of the storages that autograd keeps for one row of `tokens` tokens, parameters apart."""
    device = next(model.parameters()).device
    ids = torch.zeros(1, tokens, dtype=torch.long, device=device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if getattr(model.config, "is_encoder_decoder", False):
        if model.can_generate():
            inputs["decoder_input_ids"] = ids
        else:  # a head: it judges the row at its end-of-sequence token, and its decoder reads what the encoder does
            ids[:, -1] = model.config.eos_token_id
    inputs |= blank_features(model, rows=1)
    training = model.training
    model.train()
    try:
        with (
            kept_draws([device]),
            autocast(train, device),
            without_input_casts(model, train),
            attention(inputs),
        ):
            return saved_bytes(model, lambda: model(**inputs).logits)
    finally:
        model.train(training)


def at_length(saved: Callable[[int], int], tokens: int) -> float:
    """`saved(tokens)`: taken there if rows are short, else drawn through two short lengths, since bytes grow evenly."""
    if tokens <= _PROBE[1]:
        return saved(tokens)
    short, long = (saved(length) for length in _PROBE)
    return short + max(long - short, 0) / (_PROBE[1] - _PROBE[0]) * (tokens - _PROBE[0])


def saved_bytes(model: nn.Module, forward: Callable[[], object]) -> int:
    """Bytes of the storages that autograd keeps while what `forward` returns lives, the model's own apart."""
    weights = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # with its history, an output that its own node saves would keep the graph alive

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        output = forward()  # lives until the sum is taken: freed storages would hand their addresses on
        total = sum(storages.values())
        del output
    return total


def plan_lines(model: nn.Module, *, train: Train, optimizer: Optimizer) -> list[str]:
    """The plan as text, one cause a line, for printing before step 1."""
    plan = memory_plan(model, train=train, kind=optimizer.kind)
    causes = [
        ("backbone, frozen", plan.backbone, f"{_dtypes(model)}"),
        ("adapter", plan.adapter, f"{sum(p.numel() for p in trainable(model).values()):,} parameters, float32"),
        ("gradients", plan.gradients, "of the adapter only"),
        (
            "optimizer state",
            plan.optimizer,
            f"{_NAMES.get(optimizer.kind, optimizer.kind)}, two moments, lr {optimizer.lr:g}, {optimizer.schedule}",
        ),
        ("activations", plan.activations, f"estimate, {train.batch_size} rows × {train.max_length} tokens"),
        ("together", plan.total, "without temporaries and libraries"),
    ]
    width = max(len(name) for name, _, _ in causes)
    device = next(model.parameters()).device
    head = f"plan: {train.steps} steps × {train.accumulate} × {train.batch_size} rows on {device}, {train.precision}"
    return [head, *(f"  {name.ljust(width)}  {size(value):>11}  {note}" for name, value, note in causes)]


def size(count: int) -> str:
    """Bytes as MiB or GiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _dtypes(model: nn.Module) -> str:
    frozen = [p for p in model.parameters() if not p.requires_grad]
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in frozen})
    return f"{sum(p.numel() for p in frozen):,} parameters, {'/'.join(kinds)}"
