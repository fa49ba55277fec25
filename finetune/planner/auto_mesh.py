"""`mesh.auto`: the axes for a backbone and the devices at hand, each with its reason and the numbers behind it.

Frozen weights never change, so whole copies cost no traffic at all: replicate first, then shards inside a node with
copies across nodes (HSDP), then shards over all. Tensor parallelism comes in where a block's gathered weights and the
activations of one rank's rows do not fit, or rows are fewer than ranks; the pipeline, across nodes, where full shards
would wait for their gathers. Every layout that the settings allow is priced by `footprint` and the first in that
order that fits is taken. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regularizers.config import RegularizerConfig

from ..config import Adapter, Mesh, Train
from ..errors import UserError
from ..figures import gib
from ..models.families import FAMILIES, pipeline_families
from .devices import Devices, at_hand
from .footprint import Footprint, Sizes, footprint
from .rules import Settings, broken_rule, check_settings

if TYPE_CHECKING:
    from ..tasks import Task

AXES = ("pp", "replicate", "dp", "cp", "tp")
_HIDING_TOKENS = {"none": 8000, "selective": 8000, "full": 5333}
"""Tokens of a micro-batch on one rank under which gathering weights between nodes takes longer than computing, by
`train.checkpointing`: X/W, with recomputation two thirds of it, for X = 400e12 FLOP/s and W = 50e9 bytes/s a device."""


@dataclass(frozen=True)
class _Layout:
    """One way to lay the backbone out, priced."""

    mesh: Mesh
    needs: Footprint
    room: int | None
    """Bytes that a rank has; None: unknown."""
    waits: bool
    """Whether shards lie over several nodes and a rank has too few tokens to hide their gathers."""

    @property
    def fits(self) -> bool:
        return self.room is None or self.needs.total <= self.room

    @property
    def order(self) -> tuple[bool, int, int, int]:
        return self.waits, self.mesh.pp, self.mesh.tp, self.mesh.dp

    def __str__(self) -> str:
        room = "" if self.room is None else f" of {gib(self.room)}"
        return f"{gib(self.needs.total)} a rank{room} ({self.needs})"


def resolve(
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
    """`mesh` with `auto` settled, and a sentence for each decision. Axes that are set (not 1) stay as they are.

    Args:
        backbone: directory with config.json and safetensors files, of which only headers are read.
        batch_sizes: of further stages, whose rows the data ranks must divide as those of `train.batch_size`.
        processes: ranks that a launcher has started; None: as many as are worth starting here.
        node: ranks on one node, under a launcher; by default all.
        devices: of one node; by default those of this machine.

    Raises:
        UserError: no layout has so many ranks, naming what stands in the way.
    """
    if processes is not None and processes % mesh.size:
        raise UserError(
            f"mesh.auto: {processes} processes are no multiple of the {mesh.size} ranks of the axes that are set "
            f"({_name(mesh)}); start another number, or set fewer axes"
        )
    devices = devices or at_hand(train.device)
    sizes = Sizes.read(backbone, adapter)
    rows = math.gcd(train.batch_size, *batch_sizes)
    node = node or processes or devices.count
    # the cores of one machine share its memory, so there only a limit on each process calls for shards
    growing = ("dp",) if processes is None and devices.kind == "cpu" else ("replicate", "dp", "tp", "pp")
    free = [axis for axis in growing if getattr(mesh, axis) == 1]
    settings = Settings(mesh, dataclasses.replace(train, batch_size=rows), adapter, task, regularizer=regularizer)
    totals = _totals(mesh, devices, processes)
    possible = [o for n in totals for o in options(mesh, n, free) if allowed(o, mesh, settings, sizes, node)]
    if not possible:
        for ranks in totals:
            for option in options(mesh, ranks, free):
                check_settings(dataclasses.replace(settings, mesh=option))
        raise UserError(
            f"mesh.auto: {processes or devices.count} ranks do not divide among {rows} rows, {sizes.heads} heads in "
            f"{sizes.groups} groups and {len(sizes.blocks)} blocks with the axes that are set; start another number "
            "of processes, or change train.batch_size"
        )
    layouts = [_priced(option, sizes, adapter, task.as_read(train), devices, node) for option in possible]
    chosen = _choose(layouts, few=devices.kind == "cpu")
    here = devices if processes is None else None
    reasons = [
        _found(devices, processes, node),
        *_reasons(chosen, layouts, given=mesh, train=train, rows=rows, devices=here),
    ]
    return dataclasses.replace(chosen.mesh, auto=False), [f"mesh.auto: {reason}" for reason in reasons]


def _totals(mesh: Mesh, devices: Devices, processes: int | None) -> list[int]:
    """Numbers of ranks to look at."""
    if processes is not None:
        return [processes]
    return [ranks for ranks in range(mesh.size, max(devices.count, mesh.size) + 1) if ranks % mesh.size == 0]


def options(mesh: Mesh, ranks: int, free: Sequence[str]) -> Iterator[Mesh]:
    """Every mesh of so many ranks in which only `free` axes grow."""
    left, rest = divmod(ranks, mesh.size)
    for widths in itertools.product(_divisors(left), repeat=len(free)):
        if rest == 0 and math.prod(widths) == left:
            axes: dict[str, Any] = dict(zip(free, widths, strict=True))
            yield dataclasses.replace(mesh, **axes)


def allowed(option: Mesh, given: Mesh, settings: Settings, sizes: Sizes, node: int) -> bool:
    """Whether settings and backbone allow a mesh; of axes that are set, only the settings are asked."""
    if broken_rule(dataclasses.replace(settings, mesh=option)) is not None:
        return False
    if option.tp > given.tp:
        parts = (sizes.heads, sizes.groups, sizes.feed_forward, sizes.vocabulary, node)
        if sizes.kind not in FAMILIES or any(part % option.tp for part in parts):
            return False
    if option.pp > given.pp:
        stages = option.pp * (option.virtual or 1)
        if sizes.kind not in pipeline_families() or stages > len(sizes.blocks):
            return False
    # A is (rank × inputs): shards that divide neither pad every adapter up to their number
    shards = option.dp * option.cp
    pads = option.adapters == "shard" and settings.adapter.rank % shards and sizes.hidden % shards
    return not (option.dp > given.dp and pads)


def _priced(mesh: Mesh, sizes: Sizes, adapter: Adapter, train: Train, devices: Devices, node: int) -> _Layout:
    apart = mesh.zero == 3 and (mesh.dp * mesh.cp * mesh.tp > node or node % (mesh.dp * mesh.cp * mesh.tp) != 0)
    tokens = train.batch_size // (mesh.replicate * mesh.dp) * train.max_length
    return _Layout(
        mesh,
        footprint(sizes, mesh=mesh, adapter=adapter, train=train),
        devices.each(min(mesh.size, node)),
        waits=apart and mesh.dp > 1 and tokens < _HIDING_TOKENS[train.checkpointing],
    )


def _choose(layouts: Sequence[_Layout], *, few: bool) -> _Layout:
    """The first in order among those that fit; else the one that is nearest to.

    few: rather few ranks than many (cores of one machine share its memory, and one process uses all of them).
    """
    fitting = [layout for layout in layouts if layout.fits]
    if not fitting:
        return min(layouts, key=lambda layout: (layout.needs.total / max(layout.room or 1, 1), layout.order))
    return min(fitting, key=lambda layout: (layout.mesh.size if few else -layout.mesh.size, layout.order))


def _found(devices: Devices, processes: int | None, node: int) -> str:
    each = devices.each(min(processes or 1, node))
    room = "memory unknown" if each is None else f"{gib(each)} for a rank"
    kind = {"cuda": "CUDA device", "cpu": "core"}[devices.kind] + ("s" if devices.count > 1 else "")
    if processes is None:
        return f"{devices.count} {kind} on this machine, {room}"
    return f"{processes} processes, {node} on a node with {devices.count} {kind}, {room}"


def _reasons(
    chosen: _Layout, layouts: Sequence[_Layout], *, given: Mesh, train: Train, rows: int, devices: Devices | None
) -> Iterator[str]:
    """devices: None under a launcher."""
    mesh = chosen.mesh
    same = [layout for layout in layouts if layout.mesh.size == mesh.size]
    if kept := [f"{axis} {getattr(given, axis)}" for axis in AXES if getattr(given, axis) > 1]:
        yield f"{', '.join(kept)} as set"
    if mesh.pp > given.pp:
        yield f"pp {mesh.pp}: {_why_pipeline(mesh, same, train, rows)}"
    if mesh.tp > given.tp:
        like = [o for o in same if (o.waits, o.mesh.pp) <= (chosen.waits, mesh.pp)]
        yield f"tp {mesh.tp}: {_why_not_less(_best(like, 'tp', mesh.tp), 'tp', rows)}"
    if mesh.dp > given.dp:
        like = [o for o in layouts if (o.mesh.tp, o.mesh.pp) == (mesh.tp, mesh.pp) and o.mesh.size <= mesh.size]
        yield f"dp {mesh.dp}: {_why_not_less(_best(like, 'dp', mesh.dp), 'dp', rows)}"
    if mesh.replicate > given.replicate:
        what = "the shards" if mesh.dp > 1 else "the backbone"
        yield f"replicate {mesh.replicate}: further copies of {what} exchange adapter gradients only"
    if devices is not None:
        yield from _why_few(chosen, layouts, devices)
    yield f"{_name(mesh)} needs {chosen}"
    if not chosen.fits:
        yield (
            "by this estimate it does not fit: take more or larger devices, train.precision: bf16, "
            "train.checkpointing: full, or a smaller train.batch_size with more train.accumulate"
        )


def _why_pipeline(mesh: Mesh, layouts: Sequence[_Layout], train: Train, rows: int) -> str:
    less = _best(layouts, "pp", mesh.pp)
    if less is None or not less.fits:
        return _why_not_less(less, "pp", rows)
    tokens = train.batch_size // (less.mesh.replicate * less.mesh.dp) * train.max_length
    return (
        f"{less.mesh.dp} shards over several nodes would wait for their gathers, since a rank has {tokens} tokens a "
        f"micro-batch and hides them from about {_HIDING_TOKENS[train.checkpointing]} on; stages send activations only"
    )


def _why_not_less(less: _Layout | None, axis: str, rows: int) -> str:
    """Why the best layout with fewer ranks along `axis`, if there is any, would not do."""
    if less is None:
        return f"{rows} rows of a micro-batch do not divide among so many data ranks"
    hint = ""
    if axis != "dp" and less.needs.activations > less.needs.total / 2:
        hint = "; train.checkpointing: full would make that small"
    return f"with {axis} {getattr(less.mesh, axis)} a rank needs at least {gib(less.needs.total)} ({less.needs}){hint}"


def _why_few(chosen: _Layout, layouts: Sequence[_Layout], devices: Devices) -> Iterator[str]:
    idle = devices.count - chosen.mesh.size
    if devices.kind == "cpu":
        if chosen.mesh.size == 1 and idle > 0:
            yield "one process: it may use all cores, and further ones would share them"
    elif idle > 0:
        possible = any(layout.mesh.size > chosen.mesh.size for layout in layouts)
        why = "fits" if possible else "goes with the rows of a micro-batch and the sizes of the backbone"
        yield f"{idle} of {devices.count} devices stay idle: no mesh of more {why}"


def _name(mesh: Mesh) -> str:
    return " × ".join(f"{axis} {getattr(mesh, axis)}" for axis in AXES if getattr(mesh, axis) > 1) or "one process"


def _best(layouts: Sequence[_Layout], axis: str, width: int) -> _Layout | None:
    """The layout to be chosen if `axis` had to be narrower than `width`."""
    less = [layout for layout in layouts if getattr(layout.mesh, axis) < width]
    return _choose(less, few=False) if less else None


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
