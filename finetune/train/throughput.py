"""Tokens a second, and what share of the device's peak goes into them: MFU and HFU (PaLM, 2204.02311, appendix B).

The model's operations (MFU) are those that the method takes for the tokens of the rows; the hardware's (HFU) those that
the device is made to do: padding, and what checkpointing computes again, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regularizers.protocol import Figures

from ..compute.capabilities import copied
from ..compute.loss import Head, batch_loss
from ..parallel.mesh import DATA, TOKENS
from .flops import Cost, Tally, attention_width

if TYPE_CHECKING:
    from ..data.batches import MicroBatch
    from ..parallel.engine import Engine
    from ..tasks import Task


EVERY = 10
"""Updates that one line of figures is of."""


class Meter:
    """Counts the work of an engine's updates and the time that they take; the first update is not in it."""

    def __init__(self, engine: Engine, *, peak_tflops: float | None) -> None:
        """peak_tflops: of one device, TFLOP/s; None: no MFU."""
        self._engine, self._peak = engine, peak_tflops
        self._cost: Cost | None = None
        self._first = True
        self._now, self._all = _Sums(), _Sums()

    @contextmanager
    def watching(self, micros: Sequence[MicroBatch], *, head: Head | None) -> Iterator[None]:
        """Around a forward and backward pass over an update's micro-batches of this rank."""
        if self._first:
            with self._counting(micros, head) if self._cost is None else nullcontext():
                yield
        else:
            yield
            self._now.work(micros, self._cost, ranks=self._engine.world.width("cp"))

    def ahead(self, micro: MicroBatch, *, task: Task, head: Head | None, around: AbstractContextManager[Any]) -> None:
        """Count in a forward pass of its own, where hooks in the first update would become part of what is compiled."""
        with self._counting([micro], head), around:
            batch_loss(self._engine.model, micro.to(self._engine.device), task=task, head=head)

    @contextmanager
    def _counting(self, micros: Sequence[MicroBatch], head: Head | None) -> Iterator[None]:
        world = self._engine.world
        width = attention_width(self._engine.peft.config)
        if width is None or any("decoder_input_ids" in micro.inputs for micro in micros):
            yield  # an encoder and a decoder have two kinds of rows: tokens are counted, operations are not
            return
        tally = Tally()
        # heads are cut along tp; along cp a rank has some of the queries and all keys
        with tally.watching(self._engine.model, width=width * world.width("cp") / world.width("tp"), head=head):
            yield
        if tally.lost is not None:
            return  # tokens are counted, operations are not
        shapes = [micro.inputs["input_ids"].shape for micro in micros]
        self._cost = tally.cost(
            positions=sum(b * t for b, t in shapes), pairs=sum(b * t * t for b, t in shapes), head=head
        )

    def updated(self, seconds: float) -> Figures:
        """An update has ended that took so long; every `EVERY` updates the figures of the last ones, else nothing.

        Collective then, on a mesh: all ranks get the same. No wait for the device.
        """
        nothing = Figures(torch.empty(0), lambda numbers: {})
        first, self._first = self._first, False
        if first or not self._now.passes:  # none: the work is somebody else's (`finetune.stacked`)
            return nothing
        self._now.updates += 1
        self._now.seconds += seconds
        if self._now.updates < EVERY:
            return nothing
        return self._close()

    def _close(self) -> Figures:
        now, self._now = self._now, _Sums()
        self._all.add(now)
        return self._figures(now)

    def whole(self) -> dict[str, float]:
        """Figures of all updates of this attempt but the first; empty where there were none. Collective."""
        self._all.add(self._now)
        self._now = _Sums()
        return self._figures(self._all).read() if self._all.updates else {}

    def _figures(self, sums: _Sums) -> Figures:
        """`tokens_s` of the whole mesh; `tflops` of one device, and `mfu` and `hfu`, its share of the peak."""
        world = self._engine.world
        work = torch.tensor([sums.model, sums.hardware, sums.tokens], dtype=torch.float64)
        if world.size > 1:
            work = copied(work, world.device)
            for axes in (TOKENS, ("tp",), ("pp",)):
                world.sum(work[:2], *axes)
            world.sum(work[2:], *DATA)
        seconds, known = sums.seconds, self._cost is not None

        def named(numbers: Sequence[float]) -> dict[str, float]:
            *both, tokens = numbers
            figures = {"tokens_s": tokens / seconds}
            if known:
                model, hardware = (w / seconds / world.size / 1e12 for w in both)
                figures["tflops"] = model
                if self._peak is not None:
                    self._peak = max(self._peak, hardware)  # what was done can be done: a busy machine was measured
                    figures |= {"mfu": model / self._peak, "hfu": hardware / self._peak}
            return {name: float(f"{value:.4g}") for name, value in figures.items()}

        return Figures(work, named)


class _Sums:
    """What some updates came to on this rank."""

    def __init__(self) -> None:
        self.passes = self.updates = 0
        self.tokens = self.model = self.hardware = self.seconds = 0.0

    def work(self, micros: Sequence[MicroBatch], cost: Cost | None, *, ranks: int) -> None:
        self.passes += 1
        for micro in micros:
            tokens, pairs = _real(micro)
            self.tokens += tokens
            if cost is not None:
                rows, width = micro.inputs["input_ids"].shape
                answers = getattr(micro, "sides", None) is not None  # which are counted, and not their tokens
                supervised = (len(micro.chosen) if answers and micro.chosen is not None else micro.supervised) / ranks
                self.model += cost.model(tokens, pairs, supervised)
                self.hardware += cost.hardware(rows * width, rows * width * width, supervised)

    def add(self, other: _Sums) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def _real(micro: MicroBatch) -> tuple[int, int]:
    """Tokens of a micro-batch without padding, and pairs of tokens that belong to one sample."""
    counted: tuple[int, int] | None = getattr(micro, "real", None)
    if counted is not None:
        return counted
    inputs: dict[str, Any] = micro.inputs
    if "position_ids" in inputs:  # packed: a sample begins where positions do, and what fills a row behind the last
        lengths = torch.cat(
            [_runs(row)[: len(held)] for row, held in zip(inputs["position_ids"], micro.rows, strict=True)]
        )
    elif "attention_mask" in inputs:
        lengths = inputs["attention_mask"].sum(1)
    else:
        lengths = torch.full((len(inputs["input_ids"]),), inputs["input_ids"].shape[1])
    more = inputs["decoder_input_ids"].numel() if "decoder_input_ids" in inputs else 0
    return int(lengths.sum()) + more, int(lengths.square().sum())


def _runs(positions: Tensor) -> Tensor:
    """Lengths of the runs 0, 1, 2, … that a row's positions are made of."""
    starts = (positions == 0).nonzero().flatten()
    return torch.diff(starts, append=torch.tensor([len(positions)], device=starts.device))


RATES = frozenset({"tokens_s", "tflops", "mfu", "hfu"})
"""What a line of metrics.jsonl has of them (`finetune.train.throughput`)."""
