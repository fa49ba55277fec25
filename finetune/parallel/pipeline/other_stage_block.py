"""What stands where a pipeline stage lacks a module: no parameters, the right shapes, next to no work.

A stage runs the family's own forward pass from end to end. The embedding is a dummy of zeros that takes no memory; the
absent block just before the stage's first puts the received hidden states in (`StageInput`), whatever was made of the
dummy until then (positions added, scaled, normalised); the absent block just after its last takes the stage's result
out (`StageOutput`) and goes on with a dummy. So nothing of a family's forward pass has to be known beyond its list of
blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


def dummy(like: Tensor) -> Tensor:
    """Zeros of the shape of `like` that hold one element and have no history."""
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape)


class OtherStageBlock(nn.Module):
    """Stands for a module of another stage: token ids (...) become zeros (..., width), hidden states pass through."""

    def __init__(self, width: int, dtype: torch.dtype, *, t5: bool = False) -> None:
        """
        Args:
            width: D.
            dtype: of what an embedding returns.
            t5: it is a block of T5, called with (hidden, mask, position bias, encoder states, …), that returns
                (hidden, position bias, bias of cross attention).
        """
        super().__init__()
        self.width, self.dtype, self.t5 = width, dtype, t5

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        value = _first_tensor(args, kwargs)
        if not value.is_floating_point():
            value = torch.zeros((), dtype=self.dtype, device=value.device).expand(*value.shape, self.width)
        value = self.passed(value, args)
        return (value, args[2], None) if self.t5 else value

    def passed(self, value: Tensor, args: tuple[Any, ...]) -> Tensor:
        """What comes out for the hidden states `value`."""
        return value


class StageInput(OtherStageBlock):
    """Returns what the stage received, while something is planted; it passes on what it gets else."""

    def __init__(self, width: int, dtype: torch.dtype, *, t5: bool = False, slot: int = 0) -> None:
        """
        Args:
            slot: which of the received tensors goes here: 0 hidden states, 1 the encoder's states.
        """
        super().__init__(width, dtype, t5=t5)
        self.slot = slot
        self.planted: Tensor | None = None

    def passed(self, value: Tensor, args: tuple[Any, ...]) -> Tensor:
        return value if self.planted is None else self.planted


class StageOutput(OtherStageBlock):
    """Keeps the hidden states that reach it (and, where the block is called with them, the encoder's) for the runner.

    `encoder_at` is the position of the encoder's states among a decoder block's arguments; None without them.
    """

    def __init__(self, width: int, dtype: torch.dtype, *, t5: bool = False, encoder_at: int | None = None) -> None:
        super().__init__(width, dtype, t5=t5)
        self.encoder_at = encoder_at
        self.taken: tuple[Tensor, ...] = ()

    def passed(self, value: Tensor, args: tuple[Any, ...]) -> Tensor:
        self.taken = (value,) if self.encoder_at is None else (value, args[self.encoder_at])
        return dummy(value)


class BiasOnly(OtherStageBlock):
    """Stands for the first block of a T5 stack: keeps the (frozen) relative bias that all blocks of the stack use.

    The module tree down to the embedding is the block's own, so its parameter keeps its name.
    """

    def __init__(self, block: nn.Module, port: OtherStageBlock) -> None:
        """
        Args:
            block: the T5 block; all but its relative bias is given up.
            port: what hidden states do here.
        """
        super().__init__(port.width, port.dtype, t5=True)
        attention: Any = block.layer[0].SelfAttention  # type: ignore[index, union-attr]
        for name in ("q", "k", "v", "o"):
            delattr(attention, name)
        holder = nn.Module()
        holder.SelfAttention = attention
        self.layer = nn.ModuleList([holder])
        self.port = port

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """(hidden, position bias (1, heads, T, T), None), as the block returns."""
        attention: Any = self.layer[0].SelfAttention
        value, *_ = self.port(hidden, *args)
        return value, attention.compute_bias(hidden.shape[1], hidden.shape[1], device=hidden.device), None
