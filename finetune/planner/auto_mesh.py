"""Choose mesh axes for a backbone and the available devices (`mesh.auto`), each with its reason and numbers.

The search is that of `flatshift plan` (`flatshift.finetune.planner.layouts`): among the meshes that the rules and sizes
allow and that fit, the one with the shortest predicted step; among equally fast ones that with the fewest cuts,
preferring replicas to shards to tensor parallelism to pipeline stages. Examples per step and recomputation stay as in
the recipe. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flatshift.regularizers.config import RegularizerConfig

from ..config import Adapter, Mesh, Train
from ..errors import UserError
from ..figures import format_bytes
from .cluster import Cluster
from .devices import Devices, detect_devices
from .footprint import BackboneSizes
from .layouts import AXES, Layout, best_layout, enumerate_meshes, is_allowed, mesh_name, price_layout
from .rules import RuleSettings, check_settings

if TYPE_CHECKING:
    from ..tasks import Task


def resolve_mesh(
    mesh: Mesh,
    *,
    backbone: Path,
    adapter: Adapter,
    train: Train,
    task: Task,
    regularizer: RegularizerConfig,
    batch_sizes: Sequence[int] = (),
    processes: int | None = None,
    node: int | None = None,
    devices: Devices | None = None,
) -> tuple[Mesh, list[str]]:
    """Return `mesh` with `auto` resolved, and a sentence for each decision. Axes that are set (not 1) are kept.

    Args:
        backbone: directory with config.json and safetensors files, of which only headers are read.
        batch_sizes: batch sizes of further stages, which the data ranks must divide too.
        processes: ranks started by a launcher; None: as many as are worth starting here.
        node: ranks per node, under a launcher; by default all.
        devices: devices of one node; by default those of this machine.

    Raises:
        UserError: no layout has this many ranks; the message has the reason.
    """
    if processes is not None and processes % mesh.size:
        raise UserError(
            f"mesh.auto: {processes} processes are no multiple of the {mesh.size} ranks of the axes that are set "
            f"({mesh_name(mesh) or 'one process'}); start another number, or set fewer axes"
        )
    devices = devices or detect_devices(train.device)
    sizes = BackboneSizes.read(backbone, adapter).under(task)
    rows = math.gcd(train.batch_size, *batch_sizes)
    node = node or processes or devices.count
    # the cores of one machine share its memory, so there only a limit per process calls for shards
    growing = ("dp",) if processes is None and devices.kind == "cpu" else ("replicate", "dp", "tp", "pp")
    free = [axis for axis in growing if getattr(mesh, axis) == 1]
    settings = RuleSettings(mesh, dataclasses.replace(train, batch_size=rows), adapter, task, regularizer=regularizer)
    totals = _rank_counts(mesh, devices, processes)
    possible = [
        o for n in totals for o in enumerate_meshes(mesh, n, free) if is_allowed(o, mesh, settings, sizes, node)
    ]
    if not possible:
        # a broken rule, if there is one, is the better message
        for ranks in totals:
            for option in enumerate_meshes(mesh, ranks, free):
                check_settings(dataclasses.replace(settings, mesh=option))
        raise UserError(
            f"mesh.auto: {processes or devices.count} ranks do not divide among {rows} rows, {sizes.heads} heads in "
            f"{sizes.groups} groups and {len(sizes.blocks)} blocks with the axes that are set; start another number "
            "of processes, or change train.batch_size"
        )
    read = task.traits.count_token_rows(train)
    layouts = [
        price_layout(
            dataclasses.replace(settings, mesh=option, train=read),
            sizes,
            Cluster.at_hand(devices, option.size, min(node, option.size)),
        )
        for option in possible
    ]
    chosen = _choose_layout(layouts, few=devices.kind == "cpu")
    here = devices if processes is None else None
    reasons = [
        _describe_devices(devices, processes, node),
        *_explain_axes(chosen, layouts, given=mesh, rows=rows, devices=here),
    ]
    return dataclasses.replace(chosen.mesh, auto=False), [f"mesh.auto: {reason}" for reason in reasons]


def _rank_counts(mesh: Mesh, devices: Devices, processes: int | None) -> list[int]:
    """Return the numbers of ranks to try."""
    if processes is not None:
        return [processes]
    return [ranks for ranks in range(mesh.size, max(devices.count, mesh.size) + 1) if ranks % mesh.size == 0]


def _choose_layout(layouts: Sequence[Layout], *, few: bool) -> Layout:
    """Return the fastest layout that fits; else the one closest to fitting.

    few: prefer few ranks (cores of one machine share its memory, and one process uses all of them).
    """
    fitting = [layout for layout in layouts if layout.fits]
    if few and fitting:
        least = min(layout.mesh.size for layout in fitting)
        return best_layout([layout for layout in fitting if layout.mesh.size == least])
    return best_layout(layouts)


def _describe_devices(devices: Devices, processes: int | None, node: int) -> str:
    each = devices.each(min(processes or 1, node))
    room = "memory unknown" if each is None else f"{format_bytes(each)} for a rank"
    kind = {"cuda": "CUDA device", "cpu": "core"}[devices.kind] + ("s" if devices.count > 1 else "")
    if processes is None:
        return f"{devices.count} {kind} on this machine, {room}"
    return f"{processes} processes, {node} on a node with {devices.count} {kind}, {room}"


def _explain_axes(
    chosen: Layout, layouts: Sequence[Layout], *, given: Mesh, rows: int, devices: Devices | None
) -> Iterator[str]:
    """Yield the reasons for the chosen axes. devices: None under a launcher."""
    mesh = chosen.mesh
    same = [layout for layout in layouts if layout.mesh.size == mesh.size]
    if kept := [f"{axis} {getattr(given, axis)}" for axis in AXES if getattr(given, axis) > 1]:
        yield f"{', '.join(kept)} as set"
    for axis in ("pp", "tp", "dp"):
        if getattr(mesh, axis) > getattr(given, axis):
            among = same
            if axis == "dp":
                among = [
                    o for o in layouts if (o.mesh.tp, o.mesh.pp) == (mesh.tp, mesh.pp) and o.mesh.size <= mesh.size
                ]
            yield f"{axis} {getattr(mesh, axis)}: {_explain_axis_width(chosen, among, axis, rows)}"
    if mesh.replicate > given.replicate:
        what = "the shards" if mesh.dp > 1 else "the backbone"
        yield f"replicate {mesh.replicate}: further copies of {what} exchange adapter gradients only"
    if devices is not None:
        yield from _explain_idle_devices(chosen, layouts, devices)
    room = "" if chosen.room is None else f" of {format_bytes(chosen.room)}"
    yield f"{mesh_name(mesh) or 'one process'} needs {format_bytes(chosen.needs.total)} a rank{room} ({chosen.needs})"
    if not chosen.fits:
        yield (
            "by this estimate it does not fit: take more or larger devices, train.precision: bf16, "
            "train.checkpointing: full, or a smaller train.batch_size with more train.accumulate"
        )


def _explain_axis_width(chosen: Layout, layouts: Sequence[Layout], axis: str, rows: int) -> str:
    """Explain why the best layout with fewer ranks along `axis`, if there is any, was not chosen."""
    narrow = [layout for layout in layouts if getattr(layout.mesh, axis) < getattr(chosen.mesh, axis)]
    if not narrow:
        return f"{rows} rows of a micro-batch do not divide among so many data ranks"
    less = _choose_layout(narrow, few=False)
    if less.fits and less.time.total > chosen.time.total:
        return (
            f"a step is predicted to take {1 - chosen.time.total / less.time.total:.0%} less than on "
            f"{mesh_name(less.mesh) or 'one process'}, the fastest with less of it"
        )
    hint = ""
    if axis != "dp" and less.needs.activations > less.needs.total / 2:
        hint = "; train.checkpointing: full would make that small"
    return (
        f"with {axis} {getattr(less.mesh, axis)} a rank needs at least {format_bytes(less.needs.total)} "
        f"({less.needs}){hint}"
    )


def _explain_idle_devices(chosen: Layout, layouts: Sequence[Layout], devices: Devices) -> Iterator[str]:
    idle = devices.count - chosen.mesh.size
    if devices.kind == "cpu":
        if chosen.mesh.size == 1 and idle > 0:
            yield "one process: it may use all cores, and further ones would share them"
    elif idle > 0:
        more = [layout for layout in layouts if layout.mesh.size > chosen.mesh.size]
        why = "goes with the rows of a micro-batch and the sizes of the backbone"
        if more:
            why = "is faster" if any(layout.fits for layout in more) else "fits"
        yield f"{idle} of {devices.count} devices stay idle: no mesh of more {why}"
