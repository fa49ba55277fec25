"""One stage as torch's schedules call it: received hidden states in, hidden states or a piece's loss out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..tensor import borders
from .other_stage_block import StageInput, StageOutput

Around = Callable[[int, int], contextlib.AbstractContextManager[Any]]
"""Context of the forward pass of (piece, stage): randomness and precision."""


class StageModules(nn.Module):
    """The stages of a rank as children `part0`, `part1`, …, prefixes that
    `flatshift.finetune.models.checkpoint.canonical_name` strips."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        for i, part in enumerate(parts):
            self.add_module(f"part{i}", part)

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, index: int) -> Any:
        return list(self.children())[index]


class StageModel(nn.Module):
    """A cut model with its input and output ports.

    Called as `stage(*received, piece=index)` between `begin` and `end`; `run` is a single forward pass.
    """

    def __init__(self, part: nn.Module, index: int, stages: int, *, scattered: dist.ProcessGroup | None = None) -> None:
        """Collect the ports of the stage.

        Args:
            part: the model, cut.
            index: number of this stage, of `stages`.
            scattered: tensor-parallel ranks of the stage, each of which sends its part of the hidden states' last dim;
                those of the next stage gather them (scatter/gather of PTD-P, 2104.04473 §4.1). None: each rank sends
                its hidden states whole.
        """
        super().__init__()
        self.part, self.index, self.total = part, index, stages
        self._scattered = scattered
        self.is_last = index == stages - 1
        self._inlets = sorted((m for m in part.modules() if isinstance(m, StageInput)), key=lambda inlet: inlet.slot)
        self._outlets = [m for m in part.modules() if isinstance(m, StageOutput)]
        assert bool(self._inlets) == (index > 0) and len(self._outlets) == (not self.is_last), index
        self._units = _fsdp_roots(part)
        self._pieces: list[Any] = []
        self._loss: Callable[[nn.Module, Any], Tensor]
        self._around: Around
        self._dtype: torch.dtype

    def begin(
        self, pieces: list[Any], *, loss: Callable[[nn.Module, Any], Tensor], around: Around, dtype: torch.dtype
    ) -> None:
        """Prepare for one step.

        Args:
            loss: called with (part, piece) on the last stage.
            around: context of each forward pass.
            dtype: of the hidden states that stages exchange.
        """
        self._pieces, self._loss, self._around, self._dtype = pieces, loss, around, dtype
        self._sync(False)  # FSDP2 adds up gradients and keeps gathered weights until the last piece's backward pass

    def end(self) -> None:
        """Drop the step's pieces and free gathered weights."""
        self._pieces = []
        self.release()

    def forward(self, *received: Tensor, piece: Tensor) -> Any:
        """Return hidden states for the next stage, or the loss of the piece (a scalar) on the last; during a step."""
        number = int(piece)
        with self._around(number, self.index):
            whole = tuple(self._gathered(tensor) for tensor in received) if self.index else ()
            out = self.run(whole, self._pieces[number], self._loss)
            if not self.is_last:
                out = tuple(self._own(tensor) for tensor in out)
        if not self.is_last and any(tensor.dtype != self._dtype for tensor in out):
            raise RuntimeError(f"stage {self.index} gives {[t.dtype for t in out]} where {self._dtype} was agreed")
        if number == len(self._pieces) - 1:
            self._reduce_in_backward_of(out)
        return out[0] if len(out) == 1 else out

    def run(
        self, received: tuple[Tensor, ...], piece: Any, function: Callable[[nn.Module, Any], Any]
    ) -> tuple[Any, ...]:
        """Run one forward pass.

        Args:
            received: hidden states (rows, T, D), and inside a decoder also the encoder's; empty on the first stage.
            function: called with (part, piece) on the last stage, where the part acts as the whole model.

        Returns:
            (the result of `function`,), or the input of the next stage.
        """
        for inlet, tensor in zip(self._inlets, received, strict=True):
            inlet.planted = tensor
        try:
            if self.is_last:
                return (function(self.part, piece),)
            self.part(**piece.inputs)
        finally:
            for inlet in self._inlets:
                inlet.planted = None
        (outlet,) = self._outlets
        out, outlet.taken = outlet.taken, ()
        # a tensor that is only passed on must not be the received leaf itself
        return tuple(t.view_as(t) if any(t is r for r in received) else t.contiguous() for t in out)

    def _own(self, tensor: Tensor) -> Tensor:
        """Return this rank's part: (rows, T, D) → (rows, T, D/tp)."""
        return tensor if self._scattered is None else borders.scatter_to_tp(tensor, -1, self._scattered)

    def _gathered(self, tensor: Tensor) -> Tensor:
        """Gather the parts: (rows, T, D/tp) → (rows, T, D)."""
        return tensor if self._scattered is None else borders.gather_from_tp(tensor, -1, self._scattered)

    # ------------------------------------------------------------------ FSDP2 inside a stage

    def _reduce_in_backward_of(self, out: tuple[Tensor, ...]) -> None:
        for tensor in out:
            if tensor.requires_grad and self._units:
                tensor.register_hook(lambda grad: self._sync(True))

    def _sync(self, last: bool) -> None:
        for unit in self._units:
            unit.set_requires_gradient_sync(last)
            unit.set_is_last_backward(last)
            unit.set_reshard_after_backward(last)

    def release(self) -> None:
        """Free gathered weights; without a backward pass nothing else frees those of a forward pass."""
        for unit in self._units:
            for module in unit.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


def _fsdp_roots(part: nn.Module) -> list[Any]:
    """Return the outermost FSDP2 modules."""
    roots: list[Any] = []
    inside: set[int] = set()
    for module in part.modules():
        if isinstance(module, FSDPModule) and id(module) not in inside:
            roots.append(module)
            inside.update(id(m) for m in module.modules())
    return roots
