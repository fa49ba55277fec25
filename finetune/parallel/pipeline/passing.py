"""Forward passes without gradients over the stages: for evaluation, generation and first looks at a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...config import Mesh
from ...train.loss import Batch
from ..mesh import World
from .pieces import Piece
from .plan import rank_of
from .stage import Around, Stage

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
_DIMS = 6


class Passing:
    """Sends hidden states on from stage to stage. Every rank along `pp` calls every verb at once."""

    def __init__(self, stages: Sequence[Stage], *, mesh: Mesh, world: World) -> None:
        """
        Args:
            stages: this rank's, ascending.
        """
        self.stages, self.world = stages, world
        self._group = world.group("pp")
        self._ranks = [rank_of(k, pp=mesh.pp, schedule=mesh.schedule) for k in range(stages[0].total)]
        self._here = world.index("pp")

    @torch.no_grad()
    def forward(
        self,
        batches: Sequence[dict[str, Tensor]],
        function: Callable[[nn.Module, Piece], Any],
        *,
        share: bool = True,
    ) -> list[Any]:
        """`function(model, piece)` of each batch on the last stage, where `model` is as good as the whole.

        With one stage a rank the batches follow each other through the pipeline without waiting.

        Args:
            batches: model keyword arguments on the device, as many on every data rank.
            share: the function gives a tensor, and every rank gets it; else ranks without the last stage get None.
        """
        results: list[Any] = []
        sent: list[tuple[Any, Tensor]] = []
        for batch in batches:
            piece = Piece(batch, torch.zeros(0))
            out: tuple[Any, ...] = ()
            for stage in self.stages:
                out = stage.run(self._received(stage, out), piece, function)
                if not stage.is_last:
                    sent += self._send(stage, out)
            results.append(out[0] if self.stages[-1].is_last else None)
        for work, _ in sent:
            work.wait()
        for stage in self.stages:
            stage.release()
        return [self._share(result) for result in results] if share else results

    def _received(self, stage: Stage, before: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """What comes from the previous stage, `before` if it is this rank's."""
        if stage.index == 0 or self._ranks[stage.index - 1] == self._here:
            return before if stage.index else ()
        peer = self._ranks[stage.index - 1]
        return tuple(self._recv(peer) for _ in range(int(self._recv_header(peer)[0])))

    def _send(self, stage: Stage, out: tuple[Tensor, ...]) -> list[tuple[Any, Tensor]]:
        peer = self._ranks[stage.index + 1]
        if peer == self._here:
            return []
        many = torch.zeros(2 + _DIMS, dtype=torch.int64, device=self.world.device)
        many[0] = len(out)
        tensors = [many, *(t for tensor in out for t in (_header(tensor), tensor))]
        return [(dist.isend(t, group=self._group, group_dst=peer), t) for t in tensors]

    def _recv_header(self, peer: int) -> Tensor:
        header = torch.empty(2 + _DIMS, dtype=torch.int64, device=self.world.device)
        dist.recv(header, group=self._group, group_src=peer)
        return header

    def _recv(self, peer: int) -> Tensor:
        tensor = _shaped(self._recv_header(peer))
        dist.recv(tensor, group=self._group, group_src=peer)
        return tensor

    def _share(self, result: Tensor | None) -> Tensor:
        """The last stage's tensor, on every rank."""
        source = dist.get_global_rank(self._group, self._ranks[-1])
        empty = torch.empty(2 + _DIMS, dtype=torch.int64, device=self.world.device)
        header = empty if result is None else _header(result)
        dist.broadcast(header, source, group=self._group)
        tensor = _shaped(header) if result is None else result.contiguous()
        dist.broadcast(tensor, source, group=self._group)
        return tensor

    @torch.no_grad()
    def dtype(self, piece: Batch, around: Around) -> torch.dtype:
        """Of the hidden states between stages, as the first stage finds: autocast and the family's norms decide."""
        told = torch.zeros(1, dtype=torch.int64, device=self.world.device)
        first = self.stages[0]
        if first.index == 0:
            with around(0, 0):
                told[0] = _DTYPES.index(first.run((), piece, lambda part, piece: None)[0].dtype)
        return _DTYPES[int(self.world.sum(told, "pp"))]


def _header(tensor: Tensor) -> Tensor:
    """Type and shape of a tensor, int64."""
    numbers = [_DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape, *[0] * (_DIMS - tensor.ndim)]
    return torch.tensor(numbers, device=tensor.device)


def _shaped(header: Tensor) -> Tensor:
    """An empty tensor as `header` says."""
    kind, dims, *shape = header.tolist()
    return torch.empty(shape[:dims], dtype=_DTYPES[kind], device=header.device)
