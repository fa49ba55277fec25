"""What a stack that is laid out will hold in memory, by cause: counted and measured, beside what it then holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flatshift.finetune.compute.capabilities import capabilities
from flatshift.finetune.compute.precision import autocast
from flatshift.finetune.config import Train
from flatshift.finetune.data.micro_batch import MicroBatch
from flatshift.finetune.planner.memory import at_length, saved_bytes
from flatshift.finetune.stacked.host import Host
from flatshift.finetune.stacked.passes import split

_PROBE = 16  # tokens


@dataclass(frozen=True)
class StackPlan:
    """Bytes by cause."""

    backbone: int
    """Frozen parameters and buffers, once."""
    adapters: int
    """Trained parameters of all cells, float32."""
    gradients: int
    """As large as the adapters."""
    optimizer: int
    """Two moments of every adapter."""
    activations: int
    """Kept between forward and backward by the largest pass."""

    @property
    def total(self) -> int:
        """Sum of all causes."""
        return self.backbone + self.adapters + self.gradients + self.optimizer + self.activations


def stack_plan(host: Host, shapes: Sequence[tuple[int, int]], *, train: Train) -> StackPlan:
    """The plan of a stack that is laid out and entered, for micro-batches of `shapes` (rows, tokens), seat by seat.

    train: has the cells' precision. Activations are measured as in `flatshift.finetune.planner.memory`: short rows go
    forward while the tensors that autograd saves are summed, at two lengths, for every pass that these micro-batches
    would make; cells whose adapters leave blocks below them alone are taken to see the same rows, which makes the
    longest passes.
    """
    cells = sum(p.nbytes for seat in host.seats for p in seat.engine.parameters.values())
    frozen = {p.data_ptr(): p.nbytes for p in (*host.backbone.parameters(), *host.backbone.buffers())}
    kept = {}
    plain = _has_plain_head(host, train)
    shared = host.shared(plain=plain)
    for chosen in split(shapes, device=capabilities(host.backbone.device).kind, same=[0] * len(shapes), shared=shared):
        seats = sorted(chosen, key=host.order)
        kind = tuple((host.seats[seat].shape, shapes[seat]) for seat in seats)
        if kind not in kept:
            kept[kind] = _kept(host, seats, shapes, train, plain)
    return StackPlan(
        backbone=sum(frozen.values()),
        adapters=cells,
        gradients=cells,
        optimizer=2 * cells,
        activations=max(kept.values()),
    )


def _kept(host: Host, seats: Sequence[int], shapes: Sequence[tuple[int, int]], train: Train, plain: bool) -> int:
    """Bytes that one pass keeps for its backward pass."""
    width = max(shapes[seat][1] for seat in seats)

    def saved(tokens: int) -> int:
        micros = {seat: _micro(host, shapes[seat][0], tokens) for seat in seats}
        with autocast(train, host.backbone.device):
            return saved_bytes(host.backbone, lambda: host.forward(seats, micros, plain=plain)[0])

    return round(at_length(saved, width))


def _has_plain_head(host: Host, train: Train) -> bool:
    inputs = _micro(host, 1, _PROBE).to(host.backbone.device).inputs
    with autocast(train, host.backbone.device):
        return host.seats[0].engine.find_head(inputs, task=host.task) is not None


def _micro(host: Host, rows: int, tokens: int) -> MicroBatch:
    """Rows of one token over and over."""
    ids = torch.zeros(rows, tokens, dtype=torch.long)
    labels = host.task.blank_labels(rows, host.backbone.config.num_labels or 0) if host.task.is_sequence_level else ids
    # two samples a row where they are packed: attention then keeps what a mask makes it keep
    halves = {"position_ids": torch.arange(tokens).remainder(tokens // 2).expand(rows, -1)}
    told = halves if host.task.pack else {"attention_mask": torch.ones_like(ids)}
    return MicroBatch({"input_ids": ids, **told}, labels, 1, rows, ())
