"""Apply torch.compile to the transformer blocks, without changing the model, and only during a training pass.

A block keeps its module tree and its parameters; during a pass its call goes to a compiled twin (like torchtitan, which
compiles block by block because equal blocks share one graph). Evaluation, recording and saving see the original model.
Graphs are compiled for static shapes: the kernels for a shape must not depend on the shapes before it, or a resumed run
would not be bit-identical.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..compute.numerics import uses_dropout
from ..errors import UserError
from .anatomy import transformer_blocks


class CompiledBlocks:
    """Transformer blocks of a model and their compiled twins."""

    def __init__(self, model: nn.Module, *, backend: str = "inductor") -> None:
        """Prepare the twins; nothing is compiled before the first pass.

        Raises UserError for a backbone without blocks, or with dropout.
        """
        if uses_dropout(model):
            raise UserError(
                "train.compile: this backbone draws dropout masks, and compiled ones are others; leave it off, or set "
                "train.backbone_dropout: 0"
            )
        self._blocks = transformer_blocks(model)
        if not self._blocks:
            raise UserError("train.compile: this backbone has no list of blocks that could be compiled; leave it off")
        # FSDP2 gathers and frees in the block's hooks, which must stay outside the graph
        self._within = any(isinstance(block, FSDPModule) for block in self._blocks)
        self._twins: list[Any] = [
            torch.compile(block.forward if self._within else block._call_impl, backend=backend, dynamic=False)
            for block in self._blocks
        ]

    @contextmanager
    def replace_forwards(self) -> Iterator[None]:
        """Redirect calls of the blocks to their twins inside the context."""
        name, usual = ("forward", {}) if self._within else ("_compiled_call_impl", {"_compiled_call_impl": None})
        for block, twin in zip(self._blocks, self._twins, strict=True):
            vars(block)[name] = twin
        try:
            yield
        finally:
            for block in self._blocks:
                del vars(block)[name]
                vars(block).update(usual)
