"""Sums and means over the rows of many layers, of which this process may have a part.

Under tensor parallelism a layer's rows may be cut (column-parallel: each rank has some that no other has) or its
columns (row-parallel: every rank has all rows, and what is summed along a row is a sum over the ranks too). All
layers share one collective. In a single process nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regularizers.guidance import layer_means
from regularizers.layers import LoraSite
from regularizers.mesh import Placement
from regularizers.sharded import Part


class Rows:
    """The rows of `sites`, one layer after another; a vector over them is called (rows,)."""

    def __init__(self, sites: Sequence[LoraSite], placement: Placement, device: torch.device) -> None:
        self._sites = sites
        self._placement = placement
        self._device = device
        self.sizes = [site.rows for site in sites]
        self._chosen: dict[tuple[bool, ...], Tensor] = {}
        self.owner = self._spread(range(len(sites)), self.sizes)
        """Which layer each row belongs to, (rows,)."""
        self.whole_sizes = torch.tensor([site.whole_rows for site in sites], device=device)
        """Rows of each layer on all tensor-parallel ranks, (layers,)."""
        cut = [site.row_cut is not None for site in sites]
        self._cut_layers = self._indices(cut) if any(cut) else None
        if any(cut):
            of_row = torch.tensor(cut, device=device)[self.owner]
            self._cut_sizes = torch.tensor(self.sizes, device=device)[self._cut_layers]
            self._cut_rows, self._other_rows = of_row.nonzero()[:, 0], (~of_row).nonzero()[:, 0]
            self._cut_in_whole = self._spread(cut, [site.whole_rows for site in sites]).nonzero()[:, 0]
            starts = [0, *self.whole_sizes.cumsum(0).tolist()]
            self._place = torch.cat(
                [
                    start + (torch.arange(site.rows) if site.row_cut is None else site.row_cut.indices())
                    for start, site in zip(starts, sites, strict=False)
                ]
            ).to(device)
        self._summed = self._rows_of([site.column_cut is not None for site in sites])

    def means(self, *values: Tensor) -> list[Tensor]:
        """Mean of each layer's rows on all ranks, (layers,), for each of `values` (rows,)."""
        means = [layer_means(each, self.sizes) for each in values]
        if self._cut_layers is not None:
            cut = self._cut_layers
            sums = torch.stack([mean[cut] * self._cut_sizes for mean in means])
            self._placement.sum_tensor(sums)
            for mean, total in zip(means, sums, strict=True):
                mean[cut] = total / self.whole_sizes[cut]
        return means

    def totals(self, *values: Tensor) -> Tensor:
        """Sum over all rows on all ranks, (len(values),), of each of `values` (rows,)."""
        if self._cut_layers is None:
            return torch.stack([each.sum() for each in values])
        sums = torch.stack([each[self._cut_rows].sum() for each in values])
        self._placement.sum_tensor(sums)
        return sums + torch.stack([each[self._other_rows].sum() for each in values])

    def sum_columns(self, values: Tensor) -> None:
        """Add up `values` (rows, ...) over the ranks that have the other columns of a row, in place."""
        if self._summed is not None:
            part = values[self._summed]
            self._placement.sum_tensor(part)
            values[self._summed] = part

    def sum_parts(self, values: Tensor) -> None:
        """Add up `values` (rows,) over all processes that hold something else of the same rows, in place: the other
        columns, or another part of what FSDP2 shards."""
        import torch.distributed as dist

        groups: dict[Any, list[bool]] = {}
        for index, site in enumerate(self._sites):
            group = Part.of(site.base.weight).group
            if group is not None:
                groups.setdefault(group, [False] * len(self._sites))[index] = True
        for group, members in groups.items():
            rows = self._rows_of(members)
            part = values[rows]
            dist.all_reduce(part, group=group)
            values[rows] = part
        self.sum_columns(values)

    def whole(self, *values: Tensor) -> list[Sequence[Tensor]]:
        """Each of `values` (rows,) as one vector over all rows of each layer, on every tensor-parallel rank."""
        if self._cut_layers is None:
            return [each.split(self.sizes) for each in values]
        lengths = [site.whole_rows for site in self._sites]
        wholes = torch.zeros(len(values), sum(lengths), dtype=values[0].dtype, device=self._device)
        wholes[:, self._place] = torch.stack(values)
        part = wholes[:, self._cut_in_whole]
        self._placement.sum_tensor(part)
        wholes[:, self._cut_in_whole] = part
        return [each.split(lengths) for each in wholes]

    def take(self, wholes: Sequence[Tensor]) -> Tensor:
        """The reverse of `whole` for one vector: the rows (rows,) of this process."""
        values = torch.cat(list(wholes))
        return values if self._cut_layers is None else values[self._place]

    def _spread(self, values: Sequence[Any], counts: list[int]) -> Tensor:
        return torch.repeat_interleave(torch.tensor(values), torch.tensor(counts)).to(self._device)

    def _indices(self, chosen: list[bool]) -> Tensor:
        return torch.tensor(chosen, device=self._device).nonzero()[:, 0]

    def _rows_of(self, layers: list[bool]) -> Tensor | None:
        """Indices of the rows of the chosen layers, found on the host once; None if no layer is chosen."""
        if not any(layers):
            return None
        key = tuple(layers)
        if key not in self._chosen:
            whole = torch.repeat_interleave(torch.tensor(layers), torch.tensor(self.sizes))
            self._chosen[key] = whole.nonzero()[:, 0].to(self._device)
        return self._chosen[key]
