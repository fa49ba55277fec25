"""Parameters that FSDP2 shards between forward passes: the local part, and the all-gather of many at once.

A sharded parameter is a DTensor, recognised by its `device_mesh`; it has one `Shard(dim)` placement, and for hybrid
sharding also a `Replicate`. Along `dim` the ranks hold chunks of ⌈size/ranks⌉, the last ones shorter or empty. Inside a
forward pass the same parameter is a plain tensor, and it may stay so after an evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def is_sharded(parameter: Tensor) -> bool:
    """True if `parameter` is sharded (a DTensor)."""
    return hasattr(parameter, "device_mesh")


def compute_device(parameter: Tensor) -> torch.device:
    """Return the device on which `parameter` is used; its parts may be offloaded to host memory."""
    if not is_sharded(parameter):
        return parameter.device
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    return torch.empty(0, device=mesh.device_type).device


@dataclass(frozen=True)
class ParameterShard:
    """This process's part of a parameter."""

    tensor: Tensor
    dim: int
    bounds: tuple[tuple[int, int], ...]
    """Half-open range along `dim` of every rank of `group`; one range if the parameter is whole here."""
    rank: int
    group: Any
    """Process group whose ranks hold the other parts; None if the parameter is whole here."""

    @classmethod
    def of(cls, parameter: Tensor) -> ParameterShard:
        """Read the local part of `parameter`, without communication."""
        parameter = parameter.detach()
        if not is_sharded(parameter):
            return cls(parameter, 0, ((0, parameter.shape[0]),), 0, None)
        sharded: Any = parameter
        mesh, local = sharded.device_mesh, sharded.to_local()
        cuts = [(axis, placement.dim) for axis, placement in enumerate(sharded.placements) if placement.is_shard()]
        assert len(cuts) <= 1, sharded.placements
        if not cuts:
            return cls(local, 0, ((0, local.shape[0]),), 0, None)
        axis, dim = cuts[0]
        size, ranks = sharded.shape[dim], mesh.size(axis)
        chunk = -(-size // ranks)
        bounds = tuple((min(rank * chunk, size), min((rank + 1) * chunk, size)) for rank in range(ranks))
        shard = cls(local, dim, bounds, mesh.get_local_rank(axis), mesh.get_group(axis))
        assert local.shape[dim] == shard.stop - shard.start, (local.shape, shard.bounds, shard.rank)
        return shard

    @property
    def start(self) -> int:
        """First index along `dim`."""
        return self.bounds[self.rank][0]

    @property
    def stop(self) -> int:
        """One past the last index along `dim`."""
        return self.bounds[self.rank][1]


@torch.no_grad()
def gather_parameters(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return each parameter in full, on its compute device. Collective if any of them is sharded: one all-gather for
    each process group and dtype, whatever the number of parameters."""
    import torch.distributed as dist

    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    shards = [ParameterShard.of(parameter) for parameter in parameters]
    whole = [shard.tensor for shard in shards]
    batches: dict[tuple[Any, torch.dtype], list[int]] = {}
    for index, shard in enumerate(shards):
        if shard.group is not None:
            batches.setdefault((shard.group, shard.tensor.dtype), []).append(index)
    for (group, dtype), members in batches.items():
        device, ranks = compute_device(parameters[members[0]]), len(shards[members[0]].bounds)
        widths = [parameters[index].numel() // parameters[index].shape[shards[index].dim] for index in members]
        counts = [
            [(stop - start) * width for start, stop in shards[index].bounds]
            for index, width in zip(members, widths, strict=True)
        ]
        longest = max(sum(count[rank] for count in counts) for rank in range(ranks))
        local = torch.cat([shards[index].tensor.reshape(-1).to(device) for index in members])
        sent = torch.zeros(longest, dtype=dtype, device=device)
        sent[: len(local)] = local
        received = torch.empty(ranks, longest, dtype=dtype, device=device)
        all_gather(received.view(-1), sent, group=group)
        pieces = [
            row[: sum(lengths)].split(lengths) for row, lengths in zip(received, zip(*counts, strict=True), strict=True)
        ]
        for position, index in enumerate(members):
            shape, dim = list(parameters[index].shape), shards[index].dim
            chunks = [
                pieces[rank][position].view(*shape[:dim], stop - start, *shape[dim + 1 :])
                for rank, (start, stop) in enumerate(shards[index].bounds)
            ]
            whole[index] = torch.cat(chunks, dim)
    return whole
