"""Every mesh that the rules and sizes allow, with its bytes and seconds by cause: ranked by `flatshift plan` for a
cluster and by `mesh.auto` for the available devices.

`plan` also tries every number of micro-batches that divides the examples of a step and every recomputation setting;
`mesh.auto` keeps both, and gives each axis its reason. Both take the shortest predicted step among the meshes that fit
(`best_layout`). Imports nothing heavy.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatshift.regularizers.config import RegularizerConfig

from ..config import MESH_AXES, WIDTHS, Adapter, Mesh, Optimizer, Train
from ..errors import UserError
from ..figures import format_bytes, format_duration
from ..models.families import block_stacks, find_family, has_expert_plan, is_tried, tensor_plan
from ..models.quantize import BLOCK
from ..parallel.pipeline_plan import split_step, virtual_stages
from .devices import Cluster, Devices, detect_devices
from .footprint import PACKED_BYTES, Footprint, predict_footprint, step_passes
from .rules import RuleSettings, broken_rule, check_settings
from .sizes import BackboneSizes
from .throughput import FORWARD_KERNELS, StepLayout, StepSeconds, kernels_per_block, predict_seconds

if TYPE_CHECKING:
    from ..tasks import Task

_RESERVED = (1.03, 1.10)  # memory reserved by the allocator ÷ memory in use, low and high
_OUTSIDE = {"context": (0.5, 1.0), "nccl": (1.0, 2.0)}
"""GiB that nvidia-smi counts on top: a process's CUDA context, and NCCL's buffers with more than one rank."""
CAUSES = {f.name: f.metadata["title"] for kind in (Footprint, StepSeconds) for f in dataclasses.fields(kind)} | {
    "context": "CUDA context, at most",
    "nccl": "NCCL's buffers, at most",
}
"""Every cause of bytes or seconds of a layout → its title on a page."""
_TIME_NOISE = 1.02  # ratio of times that the model cannot tell apart
_RECOMPUTE = ("none", "selective", "full")
_UNCOUNTED = ("train_whole", "soft_tokens", "bias")
"""Adapter settings not covered by the formulas: parameters trained in addition to LoRA, or instead of it."""


@dataclass(frozen=True)
class Layout:
    """One mesh with one way to split its examples, and its memory and time."""

    mesh: Mesh
    train: Train
    needs: Footprint
    time: StepSeconds
    flops: float
    """Model FLOPs of a step: 4 per frozen weight and token that it multiplies, plus attention."""
    cluster: Cluster
    rows: int = 1  # token rows of an example of `train`

    @property
    def room(self) -> int | None:
        """Bytes available to a rank; None: unknown."""
        return self.cluster.room

    @property
    def reserved(self) -> float:
        """Bytes of the fullest rank; on a CUDA device with the allocator's overhead."""
        return self.needs.total * (_RESERVED[1] if self.cluster.kind == "cuda" else 1.0)

    @property
    def fits(self) -> bool:
        """True if the fullest rank has enough memory."""
        return self.room is None or self.reserved <= self.room

    @property
    def short(self) -> int:
        """Bytes that the fullest rank lacks."""
        return max(0, int(self.reserved) - (self.room or int(self.reserved)))

    @property
    def order(self) -> tuple[bool, float]:
        """Sort key: layouts that fit first, by time; then the others, by excess memory."""
        return not self.fits, self.time.total if self.fits else self.needs.total / max(self.room or 1, 1)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.rows * self.train.batch_size * self.train.accumulate * self.train.max_length

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: fraction of the devices' bf16 peak."""
        return self.flops / (self.time.total * self.cluster.count * self.cluster.device.flops)

    @property
    def outside(self) -> dict[str, tuple[float, float]]:
        """Least and most GiB that a device uses outside the allocator's pool, by cause; empty for a CPU."""
        if self.cluster.kind != "cuda":
            return {}
        return _OUTSIDE if self.mesh.size > 1 else {"context": _OUTSIDE["context"]}

    @property
    def name(self) -> str:
        """Name of the layout, made of its axes."""
        name = mesh_name(self.mesh) or "one device"
        return name + (" (sequence)" if self.mesh.sequence_parallel and self.mesh.tp > 1 else "")

    def document(self) -> dict[str, Any]:
        """Return the layout as a dictionary for JSON and pages."""
        gib = self.needs.total / 2**30
        outside = [sum(ends) for ends in zip(*self.outside.values(), strict=True)] or [0.0, 0.0]
        return {
            "name": self.name,
            "mesh": wide_axes(self.mesh),
            "batch_size": self.train.batch_size,
            "accumulate": self.train.accumulate,
            "checkpointing": self.train.checkpointing,
            "fits": self.fits,
            "bytes": dict(vars(self.needs)),
            "allocated_gib": round(gib, 2),
            "reserved_gib": [round(gib * share, 2) for share in _RESERVED],
            "outside_gib": {cause: list(ends) for cause, ends in self.outside.items()},
            "nvidia_smi_gib": [round(gib * share + more, 2) for share, more in zip(_RESERVED, outside, strict=True)],
            "short_gib": round(self.short / 2**30, 2),
            "seconds": {name: float(f"{value:.4g}") for name, value in vars(self.time).items()},
            "update_s": float(f"{self.time.total:.4g}"),
            "tokens_per_s": round(self.tokens / self.time.total, 1),
            "mfu": round(self.mfu, 4),
        }

    @property
    def recipe(self) -> str:
        """Recipe lines to paste."""
        values = [(each.name, getattr(self.mesh, each.name), each.default) for each in dataclasses.fields(self.mesh)]
        given = ", ".join(f"{name}: {str(value).lower()}" for name, value, default in values if value != default)
        lines = [f"mesh: {{{given}}}"] if given else []
        rows = f"batch_size: {self.train.batch_size}, accumulate: {self.train.accumulate}"
        return "\n".join([*lines, f"train: {{{rows}, checkpointing: {self.train.checkpointing}}}"])


def best_layout(layouts: Sequence[Layout]) -> Layout:
    """Return the fastest layout that fits; among those about as fast, the one with the fewest cuts, preferring replicas
    to shards to tensor parallelism to pipeline stages. If none fits, the closest."""
    fastest = min(layouts, key=lambda layout: layout.order)
    if not fastest.fits:
        return fastest
    similar = [layout for layout in layouts if layout.fits and layout.time.total <= _TIME_NOISE * fastest.time.total]
    # if all wait for the host, prefer the one with the least device work
    return min(similar, key=lambda o: (o.mesh.ep, o.mesh.pp, o.mesh.tp, o.mesh.dp, o.time.total - o.time.host))


def wide_axes(mesh: Mesh) -> dict[str, int]:
    """Return the ranks along each axis that has more than one."""
    return {axis: getattr(mesh, axis) for axis in MESH_AXES if getattr(mesh, axis) > 1}


def mesh_name(mesh: Mesh) -> str:
    """Return the axes that are not 1, as `dp 2 × tp 2`; empty if all are."""
    return " × ".join(f"{axis} {width}" for axis, width in wide_axes(mesh).items())


def enumerate_layouts(
    sizes: BackboneSizes,
    cluster: Cluster,
    settings: RuleSettings,
    *,
    recompute: tuple[str, ...] = _RECOMPUTE,
    batch_sizes: Sequence[int] = (),
) -> list[Layout]:
    """Return every layout of all the cluster's devices that the rules and sizes allow: those that fit first, by time;
    for each mesh only its best.

    The examples per step, `train.batch_size × train.accumulate`, are kept. Axes that are set are kept. batch_sizes: as
    in `resolve_mesh`.
    Raises UserError with the reason if there is none.
    """
    requested, train = settings.mesh, settings.train
    check_supported(sizes, settings)
    _check_axes_divide(sizes, requested, train)
    rows = train.batch_size * train.accumulate
    if cluster.count % requested.size:
        raise UserError(f"mesh: {requested.size} ranks of the axes that are set do not divide {cluster.count} devices")
    free = [axis for axis in ("replicate", "dp", "tp", "pp") if getattr(requested, axis) == 1]
    best: dict[tuple[int, ...], Layout] = {}
    for mesh in enumerate_meshes(requested, cluster.count, free):
        variants = expert_variants(mesh, settings, sizes)
        if mesh.tp > 1 and not mesh.sequence_parallel and tensor_plan(sizes.kind).sequence_parallel:
            variants.append(dataclasses.replace(mesh, sequence_parallel=True))
        for accumulate in _divisors(rows):
            if math.gcd(rows // accumulate, *batch_sizes) % (mesh.replicate * mesh.dp):
                continue
            batch = dataclasses.replace(train, batch_size=rows // accumulate, accumulate=accumulate)
            if not is_allowed(
                mesh, requested, dataclasses.replace(settings, mesh=mesh, train=batch), sizes, cluster.node
            ):
                continue
            for checkpointing, variant in itertools.product(recompute, variants):
                trained = dataclasses.replace(batch, checkpointing=checkpointing)  # type: ignore[arg-type]
                read = dataclasses.replace(settings, mesh=variant, train=settings.task.traits.count_token_rows(trained))
                layout = price_layout(read, sizes, cluster)
                if variant.pp > 1 and variant.reshard is None and 0 < layout.short < 1.1 * layout.needs.gathered:
                    freeing = dataclasses.replace(read, mesh=dataclasses.replace(variant, reshard=True))
                    layout = min(layout, price_layout(freeing, sizes, cluster), key=lambda each: each.order)
                layout = dataclasses.replace(layout, train=trained, rows=settings.task.traits.rows_per_example)
                key = tuple(getattr(variant, axis) for axis in MESH_AXES)
                if key not in best or layout.order < best[key].order:
                    best[key] = layout
    if not best:
        # a broken rule, if there is one, is the better message
        check_settings(dataclasses.replace(settings, mesh=requested))
        if meshes := [*enumerate_meshes(requested, cluster.count, free)]:
            check_settings(*(dataclasses.replace(settings, mesh=mesh) for mesh in meshes))
        raise UserError(
            f"no mesh of {cluster.count} devices goes with {' and '.join(map(str, (rows, *batch_sizes)))} rows per "
            f"step, {sizes.heads} heads in {sizes.groups} groups and {len(sizes.blocks)} "
            "blocks; raise train.batch_size or train.accumulate to a multiple of the data ranks, or take fewer devices"
        )
    return sorted(best.values(), key=lambda layout: layout.order)


def _check_axes_divide(sizes: BackboneSizes, requested: Mesh, train: Train) -> None:
    if requested.tp > 1 or requested.sequence_parallel:
        tensor_plan(sizes.kind, sequence_parallel=requested.sequence_parallel)
    if requested.cp > 1 and not find_family(sizes.kind).context:
        raise UserError(f"mesh.cp: {sizes.kind} models cannot be split by tokens; leave it at 1, use mesh.dp")
    shares = (1, *_divisors(sizes.experts)) if has_expert_plan(sizes.kind) else (1,)
    if requested.ep not in shares:
        raise UserError(
            f"mesh.ep: {requested.ep} ranks cannot share the {sizes.experts} experts of a block of {sizes.kind}; "
            f"nearest: {max(share for share in shares if share < requested.ep)}"
        )
    if _cuts_scales(sizes, train, requested.tp):
        raise UserError(
            f"mesh.tp: {requested.tp} ranks would cut blocks of {BLOCK} values with one scale; take fewer, or mesh.dp"
        )
    if requested.pp > 1:
        block_stacks(sizes.kind)
    if sizes.heads % requested.tp:
        nearest = max(n for n in _divisors(sizes.heads) if n <= requested.tp)
        raise UserError(
            f"mesh.tp: {requested.tp} does not divide the {sizes.heads} attention heads of this backbone; nearest that "
            f"does: {nearest}"
        )
    virtual = virtual_stages(requested.schedule, requested.virtual)
    if requested.pp > 1 and requested.pp * virtual > len(sizes.blocks):
        raise UserError(
            f"mesh.pp: {requested.pp} × {virtual} stages are more than the {len(sizes.blocks)} blocks of this "
            f"backbone; take at most {len(sizes.blocks) // virtual}"
        )


def check_supported(sizes: BackboneSizes, settings: RuleSettings) -> None:
    """Raise UserError for settings that the formulas leave out, rather than plan on a guess."""
    adapter, longest = settings.adapter, settings.train.max_length
    if uncounted := [name for name in _UNCOUNTED if getattr(adapter, name) is not None]:
        raise UserError(f"plan: adapter.{uncounted[0]} is not counted yet; it knows LoRA alone, so leave that out")
    if (last := max(adapter.layers or (0,))) >= (count := sizes.depth):
        raise UserError(f"adapter.layers: there is no block {last}; this backbone has {count}, from 0 to {count - 1}")
    if not sizes.adapter:
        raise UserError(f"adapter.targets: {adapter.targets!r} names no linear layer of {sizes.kind}; take all-linear")
    if sizes.positions is not None and longest > sizes.positions:
        raise UserError(
            f"train.max_length {longest} is more than the {sizes.positions} positions of the backbone; take "
            f"{sizes.positions}, or write what it can do into its config.json"
        )


def step_seconds(sizes: BackboneSizes, cluster: Cluster, settings: RuleSettings) -> float | None:
    """Return a step's seconds with these settings; None if the formulas do not cover them, and for float32 products."""
    if settings.train.precision not in ("bf16", "fp16"):
        return None
    try:
        check_supported(sizes, settings)
    except UserError:
        return None
    read = settings.task.traits.count_token_rows(settings.train)
    return price_layout(dataclasses.replace(settings, train=read), sizes, cluster).time.total


def price_layout(settings: RuleSettings, sizes: BackboneSizes, cluster: Cluster) -> Layout:
    """Return one layout of all the cluster's devices with its bytes and seconds; `settings.train` describes the
    sequences the model reads (`Task.as_read`), `sizes` the backbone under the task."""
    mesh, train, adapter = settings.mesh, settings.train, settings.adapter
    width = WIDTHS[train.precision]
    packed = PACKED_BYTES.get(train.quantization or "", width)
    rows = train.batch_size // (mesh.replicate * mesh.dp)
    piece, pieces = split_step(mesh, rows, train.accumulate)
    blocks, shards = len(sizes.blocks), mesh.dp * mesh.cp
    repeats, references = step_passes(settings.task, settings.regularizer)
    gathered = 0.0
    if shards > 1 and mesh.zero == 3:
        times = (2 if mesh.reshards else 1) * repeats + references
        experts, sharing = blocks * sizes.expert_elements, shards // mesh.ep
        groups = ((packed * (sum(sizes.blocks) - experts), shards), (width * experts / mesh.ep, sharing))
        gathered = times * sum(part * (n - 1) / n for part, n in groups) / (mesh.tp * mesh.pp)
    if mesh.pp > 1 and not mesh.reshards:
        gathered /= max(pieces, 1)
    adapter_shards = shards if mesh.adapters == "shard" else 1
    copies = mesh.replicate * shards // adapter_shards
    # reduce-scatter to the shards, then all-reduce among their copies
    reduced = (adapter_shards - 1) / adapter_shards + 2 * (copies - 1) / copies / adapter_shards
    sequence = train.max_length // mesh.cp
    dispatched = (4 * repeats + 2 * references) * piece * sequence * sizes.hidden * sizes.routed * width
    share = sizes.routed / max(sizes.experts, 1)  # of the experts that a token meets
    met = sizes.adapter - sizes.expert_adapter * (1 - share)
    products = sizes.products + (sizes.adapter - sizes.expert_adapter) / blocks
    if adapter.experts is not None:  # experts with BA added, and their dense gradient: a third pass beside two
        products += sizes.expert_elements * (adapter.experts / max(piece * sequence, 1) + share / 2)
    kernels = 0.0
    if cluster.kind == "cuda" and not train.compile:  # torch.compile fuses most of them
        kernels = kernels_per_block(len(sizes.layers) / max(blocks, 1), recompute=train.checkpointing) * repeats
        kernels += FORWARD_KERNELS * references
    work = StepLayout(
        layers=blocks, hidden=sizes.hidden, heads=sizes.heads, products=products, head=sizes.outputs * sizes.hidden,
        sequence=sequence, rows=piece, micro=pieces, tp=mesh.tp, pp=mesh.pp,
        virtual=virtual_stages(mesh.schedule, mesh.virtual), recompute=train.checkpointing,
        sequence_parallel=mesh.sequence_parallel, gathered=gathered, gathered_inside=shards * mesh.tp <= cluster.node,
        reduced=4 * sizes.adapter / (mesh.tp * mesh.pp) * reduced, reduced_inside=cluster.count <= cluster.node,
        tp_inside=mesh.tp <= cluster.node, exchanged=dispatched * (mesh.ep - 1) / mesh.ep,
        exchanged_inside=mesh.ep * mesh.tp <= cluster.node, kernels=kernels, repeats=repeats, references=references,
    )  # fmt: skip
    tokens = train.batch_size * train.accumulate * train.max_length * repeats
    attention = 12 * train.max_length * sizes.hidden * blocks
    flops = tokens * (4 * (blocks * sizes.products + work.head) + 6 * met + attention)
    needs = predict_footprint(
        sizes, mesh=mesh, adapter=adapter, train=train, device=cluster.kind, packed=settings.task.pack,
        regularizer=settings.regularizer, optimizer=settings.optimizer.kind,
    )  # fmt: skip
    seconds = predict_seconds(work, cluster.device, network=cluster.network, constants=cluster.constants)
    return Layout(mesh, train, needs, seconds, flops, cluster)


def enumerate_meshes(mesh: Mesh, ranks: int, free: Sequence[str]) -> Iterator[Mesh]:
    """Yield every mesh of `ranks` ranks in which only `free` axes grow."""
    factor, remainder = divmod(ranks, mesh.size)
    for widths in itertools.product(_divisors(factor), repeat=len(free)):
        if remainder == 0 and math.prod(widths) == factor:
            axes: dict[str, Any] = dict(zip(free, widths, strict=True))
            yield dataclasses.replace(mesh, **axes)


def expert_variants(mesh: Mesh, settings: RuleSettings, sizes: BackboneSizes) -> list[Mesh]:
    """Return `mesh`, and the ways to divide a mixture's experts among its dp ranks."""
    variants = [mesh]
    if mesh.tp == mesh.ep == 1 and has_expert_plan(sizes.kind):
        shares = [ep for ep in _divisors(mesh.dp)[1:] if sizes.experts % ep == 0]
        variants += [dataclasses.replace(mesh, ep=ep) for ep in shares]
    return [each for each in variants if each is mesh or not broken_rule(dataclasses.replace(settings, mesh=each))]


def is_allowed(option: Mesh, requested: Mesh, settings: RuleSettings, sizes: BackboneSizes, node: int) -> bool:
    """True if settings and backbone allow a mesh; axes that are set are only checked against the settings."""
    if broken_rule(dataclasses.replace(settings, mesh=option)) is not None:
        return False
    family = find_family(sizes.kind)
    grown = dataclasses.replace(option, replicate=1, dp=1)
    if (option.tp > requested.tp or option.pp > requested.pp) and not is_tried(sizes.kind, grown):
        return False
    splits_widths = family.tensor is not None and not (sizes.heads % option.tp or node % option.tp)
    splits_widths &= not _cuts_scales(sizes, settings.train, option.tp)
    stages = option.pp * virtual_stages(option.schedule, option.virtual)
    splits_blocks = bool(family.stacks) and stages <= len(sizes.blocks)
    if (option.tp > requested.tp and not splits_widths) or (option.pp > requested.pp and not splits_blocks):
        return False
    # A is (rank × inputs): if the shards divide neither dimension, every adapter is padded to a multiple of their
    # number
    shards = option.dp * option.cp
    pads = option.adapters == "shard" and settings.adapter.rank % shards and sizes.hidden % shards
    return not (option.dp > requested.dp and pads)


def _cuts_scales(sizes: BackboneSizes, train: Train, tp: int) -> bool:
    """True if `tp` ranks would split a 4-bit layer's inputs inside a block of scales."""
    widths = (sizes.heads * sizes.head, sizes.feed_forward) if train.quantization in ("nf4", "nf4-double") else ()
    return tp > 1 and any(-(-width // tp) % BLOCK for width in widths if width % BLOCK == 0)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def format_table(layouts: list[Layout], cluster: Cluster, sizes: BackboneSizes, *, maximum: int = 8) -> list[str]:
    """Format as lines the backbone, the best meshes, and the memory missing for those that do not fit."""
    room = layouts[0].room
    fitting = [layout for layout in layouts if layout.fits]
    lines = [
        f"{sizes.kind}, {sizes.elements / 1e9:.3g} B frozen, {sizes.adapter / 1e6:.3g} M trained, on {cluster}, "
        f"{'an unknown part' if room is None else format_bytes(room)} of each to be used, "
        f"rows of {layouts[0].train.max_length:,} tokens",
        f"  {'mesh':46} {'rows × micro':>13} {'recompute':>10} {'memory':>10} {'step':>9} {'tokens/s':>10} {'MFU':>6}",
    ]
    for layout in (fitting or layouts)[:maximum]:
        lines.append(
            f"  {layout.name:46} {f'{layout.train.batch_size} × {layout.train.accumulate}':>13} "
            f"{layout.train.checkpointing:>10} {format_bytes(layout.needs.total):>10} "
            f"{format_duration(layout.time.total):>9} "
            f"{layout.tokens / layout.time.total:>10,.0f} {layout.mfu:>6.1%}"
        )
    if len(layouts) > len(fitting):
        nearest = min((layout for layout in layouts if not layout.fits), key=lambda layout: layout.needs.total)
        lines.append(
            f"{len(layouts) - len(fitting)} of {len(layouts)} meshes do not fit; the nearest, {nearest.name}, is "
            f"short of {format_bytes(nearest.short)} a device ({nearest.needs})"
        )
    return lines


def resolve_mesh(
    mesh: Mesh,
    *,
    backbone: Path,
    adapter: Adapter,
    train: Train,
    task: Task,
    optimizer: Optimizer,
    regularizer: RegularizerConfig,
    batch_sizes: Sequence[int] = (),
    processes: int | None = None,
    node: int | None = None,
    devices: Devices | None = None,
) -> tuple[Mesh, list[str]]:
    """Return `mesh` with `auto` resolved, and a sentence for each decision. Axes that are set (not 1) are kept.

    backbone: directory with config.json and safetensors files, of which only headers are read.
    batch_sizes: batch sizes of further stages, which the data ranks must divide too.
    processes: ranks started by a launcher; None: as many as are worth starting here.
    node: ranks per node, under a launcher; by default all.
    devices: devices of one node; by default those of this machine.

    Raises UserError: no layout has this many ranks; the message has the reason.
    """
    if processes is not None and processes % mesh.size:
        raise UserError(
            f"mesh.auto: {processes} processes are no multiple of the {mesh.size} ranks of the axes that are set "
            f"({mesh_name(mesh) or 'one process'}); start another number, or set fewer axes"
        )
    devices = devices or detect_devices(train.device)
    if train.precision == "auto" and devices.kind == "cuda":  # two bytes there, in bf16 or fp16
        train = dataclasses.replace(train, precision="bf16")
    sizes = BackboneSizes.read(backbone, adapter).under(task)
    rows = math.gcd(train.batch_size, *batch_sizes)
    node = node or processes or devices.count
    # the cores of one machine share its memory, so there only a limit per process calls for shards
    growing = ("dp",) if processes is None and devices.kind == "cpu" else ("replicate", "dp", "tp", "pp")
    free = [axis for axis in growing if getattr(mesh, axis) == 1]
    settings = RuleSettings(mesh, dataclasses.replace(train, batch_size=rows), adapter, task, optimizer, regularizer)
    counts = [processes] if processes is not None else range(mesh.size, max(devices.count, mesh.size) + 1)
    options = [
        variant
        for ranks in counts
        for option in enumerate_meshes(mesh, ranks, free)
        for variant in expert_variants(option, settings, sizes)
    ]
    allowed = [option for option in options if is_allowed(option, mesh, settings, sizes, node)]
    if not allowed:
        # a broken rule, if there is one, is the better message
        for option in options:
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
        for option in allowed
    ]
    chosen = _choose_layout(layouts, few=devices.kind == "cpu")
    local_devices = devices if processes is None else None
    reasons = [
        _describe_devices(devices, processes, node),
        *_explain_axes(chosen, layouts, requested=mesh, rows=rows, devices=local_devices),
    ]
    return dataclasses.replace(chosen.mesh, auto=False), [f"mesh.auto: {reason}" for reason in reasons]


def _choose_layout(layouts: Sequence[Layout], *, few: bool) -> Layout:
    """Return the fastest layout that fits; else the one closest to fitting.

    few: prefer few ranks (cores of one machine share its memory, and one process uses all of them).
    """
    fitting = [layout for layout in layouts if layout.fits]
    if few and fitting:
        ranks = min(layout.mesh.size for layout in fitting)
        return best_layout([layout for layout in fitting if layout.mesh.size == ranks])
    return best_layout(layouts)


def _describe_devices(devices: Devices, processes: int | None, node: int) -> str:
    each = devices.each(min(processes or 1, node))
    room = "memory unknown" if each is None else f"{format_bytes(each)} for a rank"
    kind = {"cuda": "CUDA device", "cpu": "core"}[devices.kind] + ("s" if devices.count > 1 else "")
    if processes is None:
        return f"{devices.count} {kind} on this machine, {room}"
    return f"{processes} processes, {node} on a node with {devices.count} {kind}, {room}"


def _explain_axes(
    chosen: Layout, layouts: Sequence[Layout], *, requested: Mesh, rows: int, devices: Devices | None
) -> Iterator[str]:
    """Yield the reasons for the chosen axes. devices: None under a launcher."""
    mesh = chosen.mesh
    if wide := [f"{axis} {width}" for axis, width in wide_axes(requested).items()]:
        yield f"{', '.join(wide)} as set"
    for axis in ("pp", "tp", "dp", "ep"):
        if getattr(mesh, axis) > getattr(requested, axis):
            peers = [layout for layout in layouts if layout.mesh.size == mesh.size]
            if axis == "dp":
                peers = [
                    o for o in layouts if (o.mesh.tp, o.mesh.pp) == (mesh.tp, mesh.pp) and o.mesh.size <= mesh.size
                ]
            yield f"{axis} {getattr(mesh, axis)}: {_explain_axis_width(chosen, peers, axis, rows)}"
    if mesh.replicate > requested.replicate:
        copied = "the shards" if mesh.dp > 1 else "the backbone"
        yield f"replicate {mesh.replicate}: further copies of {copied} exchange adapter gradients only"
    if devices is not None:
        yield from _explain_idle_devices(chosen, layouts, devices)
    limit = "" if chosen.room is None else f" of {format_bytes(chosen.room)}"
    yield f"{mesh_name(mesh) or 'one process'} needs {format_bytes(chosen.needs.total)} a rank{limit} ({chosen.needs})"
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
    best = best_layout(narrow)
    if best.fits and best.time.total > chosen.time.total:
        return (
            f"a step is predicted to take {1 - chosen.time.total / best.time.total:.0%} less than on "
            f"{mesh_name(best.mesh) or 'one process'}, the fastest with less of it"
        )
    hint = ""
    if axis != "dp" and best.needs.activations > best.needs.total / 2:
        hint = "; train.checkpointing: full would make that small"
    return (
        f"with {axis} {getattr(best.mesh, axis)} a rank needs at least {format_bytes(best.needs.total)} "
        f"({best.needs}){hint}"
    )


def _explain_idle_devices(chosen: Layout, layouts: Sequence[Layout], devices: Devices) -> Iterator[str]:
    idle = devices.count - chosen.mesh.size
    if devices.kind == "cpu":
        if chosen.mesh.size == 1 and idle > 0:
            yield "one process: it may use all cores, and further ones would share them"
    elif idle > 0:
        larger = [layout for layout in layouts if layout.mesh.size > chosen.mesh.size]
        reason = "goes with the rows of a micro-batch and the sizes of the backbone"
        if larger:
            reason = "is faster" if any(layout.fits for layout in larger) else "fits"
        yield f"{idle} of {devices.count} devices stay idle: no mesh of more {reason}"
