"""Placeholders for modules of other pipeline stages: no parameters, the right shapes, next to no work.

A stage runs the family's own forward pass from end to end. The embedding is a dummy of zeros that takes no memory; the
absent block just before the stage's first inserts the received hidden states (`StageInput`), whatever happened to the
dummy until then (positions added, scaled, normalised); the absent block just after its last takes out the stage's
result (`StageOutput`) and continues with a dummy. So nothing of a family's forward pass needs to be known beyond its
list of blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


def dummy_like(like: Tensor) -> Tensor:
    """Return zeros of the shape of `like` that occupy one element and have no autograd history."""
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape)


class OtherStageBlock(nn.Module):
    """Placeholder for a module of another stage: token ids (...) become zeros (..., width), hidden states pass
    through."""

    def __init__(self, width: int, dtype: torch.dtype, *, t5: bool = False) -> None:
        """Create the placeholder.

        Args:
            width: D.
            dtype: of an embedding's output.
            t5: True for a block of T5, called with (hidden, mask, position bias, encoder states, …), that returns
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
        """Return the output for the hidden states `value`."""
        return value


class StageInput(OtherStageBlock):
    """Returns the tensor that the stage received while one is planted; otherwise passes its input on."""

    def __init__(self, width: int, dtype: torch.dtype, *, t5: bool = False, slot: int = 0) -> None:
        """Create the input port.

        Args:
            slot: index of the received tensor: 0 hidden states, 1 the encoder's states.
        """
        super().__init__(width, dtype, t5=t5)
        self.slot = slot
        self.planted: Tensor | None = None

    def passed(self, value: Tensor, args: tuple[Any, ...]) -> Tensor:
        return value if self.planted is None else self.planted


class StageOutput(OtherStageBlock):
    """Stores the hidden states that reach it (and the encoder's, if the block is called with them) for the runner.

    `encoder_at` is the position of the encoder's states among a decoder block's arguments; None without them.
    """

    def __init__(self, width: int, dtype: torch.dtype, *, t5: bool = False, encoder_at: int | None = None) -> None:
        super().__init__(width, dtype, t5=t5)
        self.encoder_at = encoder_at
        self.taken: tuple[Tensor, ...] = ()

    def passed(self, value: Tensor, args: tuple[Any, ...]) -> Tensor:
        self.taken = (value,) if self.encoder_at is None else (value, args[self.encoder_at])
        return dummy_like(value)


class PositionBiasBlock(OtherStageBlock):
    """Placeholder for the first block of a T5 stack: keeps the (frozen) relative bias that all blocks of the stack use.

    The module tree down to the embedding is the block's own, so its parameter keeps its name.
    """

    def __init__(self, block: nn.Module, port: OtherStageBlock) -> None:
        """Create the placeholder.

        Args:
            block: the T5 block; all but its relative bias is dropped.
            port: placeholder that handles the hidden states.
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
        """Return (hidden, position bias (1, heads, T, T), None), like the block."""
        attention: Any = self.layer[0].SelfAttention
        value, *_ = self.port(hidden, *args)
        return value, attention.compute_bias(hidden.shape[1], hidden.shape[1], device=hidden.device), None
