"""Blocks below the lowest adapted one: what several cells ask of them is computed once.

Cells of one seed see the same rows in the same order (a sweep pairs its points by seed). Where their adapters begin
above the first blocks, these blocks are given the same rows once for every cell; here each distinct row goes through
once and its result is handed to all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..models.anatomy import blocks

_PLAIN = (Tensor, bool, int, float, str, type(None))


@dataclass(frozen=True)
class Distinct:
    """Which of the R rows of a batch are the same."""

    first: Tensor
    """(U,) a row of each kind."""
    kind: Tensor
    """(R,) of each row."""

    @classmethod
    def of(cls, inputs: Mapping[str, Tensor]) -> Distinct | None:
        """Of a model's inputs, (R, T) integers each; None where no two rows are the same."""
        rows = torch.cat([inputs[name] for name in sorted(inputs)], 1)
        found, kind = torch.unique(rows, dim=0, return_inverse=True)
        count = len(rows)
        if len(found) == count:
            return None
        places = torch.arange(count, device=kind.device)
        first = torch.full((len(found),), count, device=kind.device).scatter_reduce_(0, kind, places, "amin")
        return cls(first, kind)

    def narrow(self, values: Any) -> Any | None:
        """`values` (arguments of a block, nested) with one row of each kind.

        None where a block's rows may depend on something else than themselves: unless every tensor of two or more
        dimensions has a row for each of the batch's, equal where the rows are the same, or one for all. None also for
        objects that blocks hand on to others, and where a gradient is wanted, which would reach one row of a kind only.
        """
        leaves, tree = pytree.tree_flatten(values)
        narrowed = []
        for leaf in leaves:
            if not isinstance(leaf, _PLAIN) or (isinstance(leaf, Tensor) and leaf.requires_grad):
                return None
            if isinstance(leaf, Tensor) and leaf.ndim > 1 and leaf.shape[0] != 1:
                rows = leaf.index_select(0, self.first) if self._of_rows(leaf) else None
                if rows is None or not torch.equal(rows.index_select(0, self.kind), leaf):
                    return None
                leaf = rows
            narrowed.append(leaf)
        return pytree.tree_unflatten(narrowed, tree)

    def _of_rows(self, values: Tensor) -> bool:
        return values.shape[0] == len(self.kind) and not (values.ndim == 2 and values.shape[1] == len(self.kind))

    def widen(self, values: Any) -> Any:
        """What a block gave for one row of each kind, for the rows of the batch."""

        def wide(leaf: Any) -> Any:
            of_rows = isinstance(leaf, Tensor) and leaf.ndim > 1 and leaf.shape[0] == len(self.first)
            return leaf.index_select(0, self.kind) if of_rows else leaf

        return pytree.tree_map(wide, values)


def blocks_below(backbone: nn.Module, trained: Collection[str]) -> tuple[list[nn.Module], float]:
    """The blocks before the first that holds one of the modules `trained`, and their share of all blocks.

    No block where a module that is trained comes before all of them.
    """
    every = blocks(backbone)
    order = {name: place for place, (name, _) in enumerate(backbone.named_modules())}
    names = {module: name for name, module in backbone.named_modules()}
    if not every or min(order[name] for name in trained) < order[names[every[0]]]:
        return [], 0.0
    below = []
    for block in every:
        if any(name == names[block] or name.startswith(f"{names[block]}.") for name in trained):
            break
        below.append(block)
    return below, len(below) / len(every)


def once_a_row(
    block: nn.Module, distinct: Callable[[], Distinct | None], *, refused: Callable[[], None]
) -> Callable[..., Any]:
    """A forward for `block` that computes the rows of the same kind once, as `distinct` says of the batch at hand.

    refused: told that the rows of this block may depend on one another.
    """
    plain = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        same = distinct()
        if same is None:
            return plain(*args, **kwargs)
        narrowed = same.narrow((args, kwargs))
        if narrowed is None:
            refused()
            return plain(*args, **kwargs)
        few, named = narrowed
        return same.widen(plain(*few, **named))

    return forward
