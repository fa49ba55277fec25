"""One stage: its model cut out of the whole one, as torch's schedules call it.

A stage runs the family's own forward pass from end to end. Modules of other stages are placeholders without parameters:
the embedding is a dummy of zeros that takes no memory; the absent block just before the stage's first inserts the
received hidden states (`StageInput`), whatever happened to the dummy until then (positions added, scaled, normalised);
the absent block just after its last takes out the stage's result (`StageOutput`) and continues with a dummy. So nothing
of a family's forward pass needs to be known beyond its list of blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..tensor import borders

StageContext = Callable[[int, int], contextlib.AbstractContextManager[Any]]
"""Context of the forward pass of (piece, stage): randomness and precision."""


# --------------------------------------------------------------------------------------------- placeholders


def zeros_of(width: int | None, dtype: torch.dtype, template: Tensor) -> Tensor:
    """Return zeros of the shape of `template`, with a last dim of `width` added if given, that occupy one element and
    have no autograd history."""
    shape = template.shape if width is None else (*template.shape, width)
    return torch.zeros((), dtype=dtype, device=template.device).expand(shape)


class OtherStageBlock(nn.Module):
    """Placeholder for a module of another stage: token ids (...) become zeros (..., width), hidden states pass
    through."""

    def __init__(self, width: int, dtype: torch.dtype, *, t5: bool = False) -> None:
        """Create the placeholder.

        width: D.
        dtype: of an embedding's output.
        t5: True for a block of T5, called with (hidden, mask, position bias, encoder states, …), that returns
            (hidden, position bias, bias of cross attention).
        """
        super().__init__()
        self.width, self.dtype, self.t5 = width, dtype, t5

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        value = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        if not value.is_floating_point():
            value = zeros_of(self.width, self.dtype, value)
        value = self.replace(value, args)
        return (value, args[2], None) if self.t5 else value

    def replace(self, value: Tensor, args: tuple[Any, ...]) -> Tensor:
        """Return the output for the hidden states `value`."""
        return value


class StageInput(OtherStageBlock):
    """Returns the tensor that the stage received (`received`) in its place; otherwise passes its input on."""

    def __init__(self, width: int, dtype: torch.dtype, *, t5: bool = False, slot: int = 0) -> None:
        super().__init__(width, dtype, t5=t5)
        self.slot = slot  # of the received tensors: 0 hidden states, 1 the encoder's states
        self.received: Tensor | None = None

    def replace(self, value: Tensor, args: tuple[Any, ...]) -> Tensor:
        return value if self.received is None else self.received


class StageOutput(OtherStageBlock):
    """Stores the hidden states that reach it (and the encoder's, if the block is called with them) for the runner.

    encoder_at: position of the encoder's states among a decoder block's arguments; None without them.
    """

    def __init__(self, width: int, dtype: torch.dtype, *, t5: bool = False, encoder_at: int | None = None) -> None:
        super().__init__(width, dtype, t5=t5)
        self.encoder_at = encoder_at
        self.result: tuple[Tensor, ...] = ()

    def replace(self, value: Tensor, args: tuple[Any, ...]) -> Tensor:
        self.result = (value,) if self.encoder_at is None else (value, args[self.encoder_at])
        return zeros_of(None, value.dtype, value)


class PositionBiasBlock(OtherStageBlock):
    """Placeholder for the first block of a T5 stack: keeps the (frozen) relative bias that all blocks of the stack use.

    The module tree down to the embedding is the block's own, so its parameter keeps its name.
    """

    def __init__(self, block: nn.Module, port: OtherStageBlock) -> None:
        """Create the placeholder of a T5 block, of which all but the relative bias is dropped; `port` handles the
        hidden states."""
        super().__init__(port.width, port.dtype, t5=True)
        attention: Any = block.layer[0].SelfAttention  # type: ignore[index, union-attr]
        for name in ("q", "k", "v", "o"):
            delattr(attention, name)
        holder = nn.Module()
        holder.SelfAttention = attention
        self.layer = nn.ModuleList([holder])
        self.port = port

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return (hidden, position bias (1, heads, T, T), None), like the block."""
        attention: Any = self.layer[0].SelfAttention
        value, *_ = self.port(hidden, *args)
        return value, attention.compute_bias(hidden.shape[1], hidden.shape[1], device=hidden.device), None


# --------------------------------------------------------------------------------------------- the stage


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
    """A cut model with its input and output ports: received hidden states in, hidden states or a piece's loss out.

    Called as `stage(*received, piece=index)` between `begin` and `end`; `run` is a single forward pass.
    """

    def __init__(
        self,
        part: nn.Module,
        index: int,
        stages: int,
        *,
        scatter: dist.ProcessGroup | None = None,
        reshards: bool = False,
    ) -> None:
        """Collect the ports of the stage.

        part: the model, cut.
        index: number of this stage, of `stages`.
        scatter: tensor-parallel ranks of the stage, each of which sends its part of the hidden states' last dim;
            those of the next stage gather them (scatter/gather of PTD-P, 2104.04473 §4.1). None: each rank sends
            its hidden states whole.
        reshards: True if FSDP2 frees gathered weights after every pass, False if after the step's last one.
        """
        super().__init__()
        self.part, self.index, self.total = part, index, stages
        self._scatter, self._reshards = scatter, reshards
        self.is_last = index == stages - 1
        self._inputs = sorted((m for m in part.modules() if isinstance(m, StageInput)), key=lambda port: port.slot)
        self._outputs = [m for m in part.modules() if isinstance(m, StageOutput)]
        assert bool(self._inputs) == (index > 0) and len(self._outputs) == (not self.is_last), index
        self._units: list[Any] = [module for module in part.modules() if isinstance(module, FSDPModule)]
        nested = {inner for unit in self._units for inner in unit.modules() if inner is not unit}
        self._roots = [unit for unit in self._units if unit not in nested]
        self._pieces: list[Any] = []
        self._loss: Callable[[nn.Module, Any], Tensor]
        self._context: StageContext
        self._dtype: torch.dtype

    def begin(
        self, pieces: list[Any], *, loss: Callable[[nn.Module, Any], Tensor], context: StageContext, dtype: torch.dtype
    ) -> None:
        """Prepare for one step.

        loss: called with (part, piece) on the last stage.
        context: of each forward pass.
        dtype: of the hidden states that stages exchange.
        """
        self._pieces, self._loss, self._context, self._dtype = pieces, loss, context, dtype
        self._sync(False)  # FSDP2 adds up gradients until the last piece's backward pass

    def end(self) -> None:
        """Drop the step's pieces and free gathered weights."""
        self._pieces = []
        self.release()

    def forward(self, *received: Tensor, piece: Tensor) -> Any:
        """Return hidden states for the next stage, or the loss of the piece (a scalar) on the last; during a step.

        Among tensor-parallel ranks that scatter, hidden states are (rows, T, D/tp) between stages.
        """
        number, scatter = int(piece), self._scatter
        with self._context(number, self.index):
            whole = received if self.index else ()
            if scatter is not None:
                whole = tuple(borders.gather_from_tp(tensor, -1, scatter) for tensor in whole)
            outputs = self.run(whole, self._pieces[number], self._loss)
            if scatter is not None and not self.is_last:
                outputs = tuple(borders.scatter_to_tp(tensor, -1, scatter) for tensor in outputs)
        if not self.is_last and any(tensor.dtype != self._dtype for tensor in outputs):
            raise RuntimeError(f"stage {self.index} gives {[t.dtype for t in outputs]} where {self._dtype} was agreed")
        if number == len(self._pieces) - 1 and self._roots:
            for tensor in outputs:
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad: self._sync(True))
        return outputs[0] if len(outputs) == 1 else outputs

    def run(
        self, received: tuple[Tensor, ...], piece: Any, function: Callable[[nn.Module, Any], Any]
    ) -> tuple[Any, ...]:
        """Run one forward pass; return (the result of `function`,), or the input of the next stage.

        received: hidden states (rows, T, D), and inside a decoder also the encoder's; empty on the first stage.
        function: called with (part, piece) on the last stage, where the part acts as the whole model.
        """
        for port, tensor in zip(self._inputs, received, strict=True):
            port.received = tensor
        try:
            if self.is_last:
                return (function(self.part, piece),)
            self.part(**piece.inputs)
        finally:
            for port in self._inputs:
                port.received = None
        (output,) = self._outputs
        result, output.result = output.result, ()
        # a tensor that is only passed on must not be the received leaf itself
        return tuple(t.view_as(t) if any(t is r for r in received) else t.contiguous() for t in result)

    def _sync(self, last: bool) -> None:
        for root in self._roots:
            root.set_requires_gradient_sync(last)
            root.set_is_last_backward(last)
            root.set_reshard_after_backward(last or self._reshards)

    def release(self) -> None:
        """Free gathered weights; without a backward pass nothing else frees those of a forward pass."""
        for unit in self._units:
            unit.reshard()
