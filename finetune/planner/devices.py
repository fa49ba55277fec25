"""Devices: those of this machine, detected without torch, and clusters of equal devices in equal nodes, given to
`flatshift plan` or found here."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.metadata
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Literal

from ..compute.memory import available_memory
from ..errors import UserError
from ..machine import count_cores
from .calibration import cached_constants
from .throughput import CORE, DEVICES, GB, PUBLISHED, DeviceSpec, RooflineConstants, find_device

_QUERY = ["nvidia-smi", "--query-gpu=index,uuid,memory.free,memory.total,name", "--format=csv,noheader,nounits"]
_QUERY_SECONDS = 20.0
# Overhead on a device's free memory: its context and communication buffers, and the allocator's fragmentation.
_CONTEXT_BYTES = int(1.5 * 2**30)
_ALLOCATOR_SHARE = 0.9
_MAX_DEVICES = 1_000_000
_NETWORK = 25.0  # GB/s of a device to other nodes, unless given
_UNKNOWN = "A100-80"  # device whose rates rank the meshes of a device that is not in the table
_ROW = r"(?:(?P<count>\d+)\s*[x×*]\s*)?(?P<name>[A-Za-z0-9]+?(?:-\d+)?)(?:@(?P<memory>\d+(?:\.\d+)?))?"
"""Matches 64xH100-80, A100-80, L4@22, CPU@12."""
_CPU = {"CPU": DeviceSpec(16 * GB, 8 * CORE.flops, 5 * CORE.bandwidth, CORE.link)}
"""A machine without a CUDA device: rough rates of a laptop of eight cores, to be named with its own free memory."""


@dataclass(frozen=True)
class Devices:
    """Resources available to the ranks on this machine."""

    kind: Literal["cuda", "cpu"]
    count: int  # CUDA devices, or cores
    memory: int | None = None
    """Bytes: free on the fullest CUDA device, or available on this machine for all its processes; None: unknown."""
    limit: int | None = None  # bytes that one process may allocate (a resource limit); None: no limit
    row: str | None = None
    """Row of `flatshift.finetune.planner.throughput.DEVICES`; None: a device that is not in that table."""

    def each(self, ranks: int) -> int | None:
        """Return the bytes available to each of `ranks` ranks on this machine; None: unknown."""
        if self.kind == "cuda":
            return None if self.memory is None else int(_ALLOCATOR_SHARE * self.memory) - _CONTEXT_BYTES
        bounds = [bound for bound in (self.limit, self.memory and self.memory // ranks) if bound is not None]
        return min(bounds, default=None)


def detect_devices(device: str = "auto") -> Devices:
    """Return the devices that `train.device` selects on this machine."""
    if device != "cpu":
        free, row = _cuda_devices()
        if (number := device.removeprefix("cuda:")).isdecimal():
            free = free[int(number) :][:1]
        if free or device.startswith("cuda"):
            known = [bytes_ for bytes_ in free if bytes_ is not None]
            return Devices("cuda", max(1, len(free)), min(known, default=None), row=row)
    return Devices("cpu", count_cores(), available_memory(), _process_limit())


def _cuda_devices() -> tuple[list[int | None], str | None]:
    """Return each visible CUDA device's free bytes, None if unknown; and the table row of the machine's first one."""
    if "+cpu" in importlib.metadata.version("torch"):
        return [], None
    try:
        table = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return [], None
    cells = [cell.strip() for cell in table.partition("\n")[0].split(",", 4)]
    row = find_device(cells[4], int(cells[3]) << 20) if len(cells) == 5 and cells[3].isdigit() else None
    return visible_memory(table, os.environ.get("CUDA_VISIBLE_DEVICES")), row


def visible_memory(table: str, chosen: str | None) -> list[int | None]:
    """Return the free bytes of the devices in CUDA_VISIBLE_DEVICES, from nvidia-smi's `index, uuid, memory.free, …` in
    MiB.

    A name missing from the table (a slice of a device) counts with unknown memory; all after a negative one are hidden.
    """
    rows = [[cell.strip() for cell in line.split(",")][:3] for line in table.splitlines() if line.count(",") >= 2]
    free = {name: int(mib) << 20 if mib.isdigit() else None for *names, mib in rows for name in names}
    # a name may be a unique prefix of a device's UUID, as in CUDA_VISIBLE_DEVICES itself
    if chosen is None:
        return [free[index] for index, _, _ in rows]
    visible: list[int | None] = []
    for name in map(str.strip, chosen.split(",")):
        if not name or name.startswith("-") or (name.isdigit() and name not in free):
            break
        matches = [name] if name.isdigit() else [known for known in free if known.startswith(name)]
        visible.append(free[matches[0]] if matches else None)
    return visible


def _process_limit() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    soft = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    return min((limit for limit in soft if limit != resource.RLIM_INFINITY), default=None)


@dataclass(frozen=True)
class Cluster:
    """Equal devices in equal nodes."""

    count: int
    name: str
    device: DeviceSpec
    node: int
    network: float  # bytes/s of one device to other nodes
    room: int | None  # bytes available to a rank; None: unknown
    constants: RooflineConstants = PUBLISHED  # fractions of the device's data-sheet rates that are reached
    kind: str = "cuda"

    @classmethod
    def parse(
        cls, text: str, *, node: int | None = None, link: float | None = None, network: float | None = None
    ) -> Cluster:
        """Parse `64xH100-80`, `A100-80`, or `8xL4@22` for another memory in GB.

        node: devices per node, by default 8 or all of them. link, network: GB/s of a device inside and between nodes.
        Raises UserError for an unknown device, and if the devices do not divide into nodes.
        """
        match = re.fullmatch(_ROW, text.strip())
        rows = DEVICES | _CPU
        names = {name.split("-")[0].lower(): name for name in rows} | {name.lower(): name for name in rows}
        key = "" if match is None else match["name"].lower()
        name = names.get(key)
        if match is None or name is None:
            near = difflib.get_close_matches(key, names, n=1, cutoff=0.3)
            hint = names[near[0]] if near else "H100-80"
            raise UserError(
                f"--gpus {text}: write COUNTxNAME, for example 8x{hint}; known are {', '.join(rows)}; another "
                "memory is written NAME@GB"
            )
        count = int(match["count"] or 1)
        if not 1 <= count <= _MAX_DEVICES or (match["memory"] and not float(match["memory"]) > 0):
            raise UserError(f"--gpus {text}: give 1 to {_MAX_DEVICES:,} devices, and a memory above 0 GB")
        node = node or min(count, 8)
        if node < 1 or count % node:
            raise UserError(f"--node {node}: {count} devices do not divide into nodes of {node}; give a divisor")
        device = rows[name]
        if match["memory"]:
            device = dataclasses.replace(device, memory=float(match["memory"]) * GB)
        if link is not None:
            device = dataclasses.replace(device, link=link * GB)
        kind: Literal["cuda", "cpu"] = "cpu" if name in _CPU else "cuda"
        room = Devices(kind, node, int(device.memory)).each(1)
        constants = cached_constants(name) or PUBLISHED
        return cls(count, name, device, node, (network or _NETWORK) * GB, room, constants, kind)

    @classmethod
    def at_hand(cls, devices: Devices, ranks: int, node: int) -> Cluster:
        """Build from this machine's devices, or the shares of its cores: `ranks` ranks, `node` of them per machine."""
        cores = devices.count / min(ranks, node)  # of a rank; five fill the memory's bandwidth
        core = dataclasses.replace(CORE, flops=cores * CORE.flops, bandwidth=min(cores, 5) * CORE.bandwidth)
        name, rates = ("CPU", core) if devices.kind == "cpu" else ("another device", DEVICES[_UNKNOWN])
        row = devices.row or name
        device, room = DEVICES.get(row, rates), devices.each(min(ranks, node))
        return cls(ranks, row, device, node, _NETWORK * GB, room, cached_constants(row) or PUBLISHED, devices.kind)

    def __str__(self) -> str:
        nodes = self.count // self.node
        return f"{self.count} × {self.name}" + (f" in {nodes} nodes of {self.node}" if nodes > 1 else "")
