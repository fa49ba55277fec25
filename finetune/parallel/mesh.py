"""Position of this process in the device mesh, and sums over the mesh's axes.

The mesh has the used ones of six axes, in this order:

    pp          pipeline stages, farthest apart: they exchange one activation per micro-batch
    replicate   whole copies (DDP; with dp: HSDP)
    dp          parameter shards (FSDP2, ZeRO-3)
    ep          parameter shards too, but of a mixture's experts each rank has whole ones (`mesh.ep` of `mesh.dp` ranks)
    cp          context: slices of the tokens
    tp          tensor parallel, nearest: neighbouring ranks, four collectives a block

`replicate`, `dp` and `ep` ranks see different rows (the *data* axes), `cp` ranks different tokens of the same rows,
`tp` and `pp` ranks the same rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import MESH_AXES, Mesh
from ..errors import UserError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DATA = ("replicate", "dp", "ep")
TOKENS = (*DATA, "cp")
SHARDS = ("dp", "ep", "cp")
"""Ranks over which FSDP2 shards; only `EXPERT_SHARDS` for the experts that a rank has."""
EXPERT_SHARDS = ("dp", "cp")
TIMEOUT = timedelta(days=7)
"""Practically none: one rank may work for long while the others wait, and the watchdog distinguishes a slow step from a
hung one."""
# public in torch 2.14, which warns where the old name is called
_set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout


@dataclass(frozen=True)
class ProcessMesh:
    """A rank of the mesh. `ProcessMesh.alone()` is a single process: every width is 1 and every sum is free."""

    device: torch.device
    mesh: DeviceMesh | None = None
    """Mesh of the axes of several ranks, in the order of `MESH_AXES`; None in a single process."""
    rank: int = 0
    size: int = 1
    _groups: dict[tuple[str, ...], Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def alone(cls, device: torch.device | str = "cpu") -> ProcessMesh:
        """Return the mesh of a single process."""
        return cls(torch.device(device))

    @classmethod
    def of(cls, mesh: Mesh, device: torch.device) -> ProcessMesh:
        """Return this rank's position in `mesh`; the default process group must exist and have as many ranks as the
        mesh, else UserError. Collective: every rank calls it together."""
        from torch.distributed.device_mesh import init_device_mesh

        size = dist.get_world_size()
        check_mesh_size(mesh, size)
        if size == 1:
            return cls.alone(device)
        widths = {axis: mesh.dp // mesh.ep if axis == "dp" else getattr(mesh, axis) for axis in MESH_AXES}
        shape = {axis: width for axis, width in widths.items() if width > 1}
        devices = init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
        for group in devices.get_all_groups():  # torch gives them 10 or 30 minutes
            _set_timeout(TIMEOUT, group)
        return cls(device, devices, dist.get_rank(), size)

    def width(self, *axes: str) -> int:
        """Return the number of ranks along `axes` together."""
        if self.mesh is None:
            return 1
        used: tuple[str, ...] = self.mesh.mesh_dim_names or ()
        return math.prod(self.mesh.size(used.index(axis)) for axis in axes if axis in used)

    def index(self, *axes: str) -> int:
        """Return this rank's number along `axes`, the last of them counting fastest."""
        index = 0
        for axis in axes:
            if self.mesh is not None and self.width(axis) > 1:
                index = index * self.width(axis) + self.mesh.get_local_rank(axis)
        return index

    def submesh(self, *axes: str) -> DeviceMesh:
        """Return the mesh of the ranks that differ from this one only along `axes` (in mesh order), with these axes as
        dims.

        Its one-dimensional form over several axes is `flat`.
        """
        assert self.mesh is not None
        return self.mesh[axes if len(axes) > 1 else axes[0]]

    def flat(self, *axes: str) -> DeviceMesh:
        """Return a one-dimensional mesh over `axes` together, of several ranks. Collective at its first call."""
        axes = tuple(axis for axis in MESH_AXES if axis in axes and self.width(axis) > 1)
        if axes not in self._groups:  # cached: slicing a mesh is slower than many a collective
            mesh = self.submesh(*axes)
            if len(axes) > 1:
                mesh = mesh._flatten("_".join(axes))
                _set_timeout(TIMEOUT, mesh.get_group())
            self._groups[axes] = mesh
        return self._groups[axes]

    def group(self, *axes: str) -> dist.ProcessGroup:
        """Return the process group over `axes` together. Collective at its first call."""
        return self.flat(*axes).get_group()

    def sum(self, tensor: Tensor, *axes: str) -> Tensor:
        """Sum `tensor` over the ranks along `axes`, in place; free for a single rank."""
        if self.width(*axes) > 1:
            dist.all_reduce(tensor, group=self.group(*axes))
        return tensor

    def any(self, flag: bool) -> bool:
        """Return True if `flag` holds on any rank (a signal reaches the ranks at different times)."""
        if self.size == 1:
            return flag
        result = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(result, dist.ReduceOp.MAX)
        return bool(result.item())

    def wait(self) -> None:
        """Wait until all ranks are here."""
        self.any(False)

    @property
    def is_main(self) -> bool:
        """True if this rank writes files and prints to the user."""
        return self.rank == 0

    def __str__(self) -> str:
        widths = {axis: self.width(*(("dp", "ep") if axis == "dp" else (axis,))) for axis in MESH_AXES}
        return " × ".join(f"{axis} {width}" for axis, width in widths.items() if width > 1) or "one device"


def check_mesh_size(mesh: Mesh, processes: int) -> None:
    """Raise UserError unless the axes of `mesh` multiply to `processes`."""
    if mesh.size != processes:
        named = " × ".join(f"{axis} {getattr(mesh, axis)}" for axis in MESH_AXES if getattr(mesh, axis) > 1)
        raise UserError(
            f"mesh: {named or 'every axis 1'} makes {mesh.size} ranks, but {processes} processes were launched; "
            f"change one of them, or start without a launcher and {mesh.size} processes are spawned"
        )
