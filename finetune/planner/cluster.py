"""`flatshift plan`: which meshes of a cluster hold a run, how fast each is, and what the others lack.

Every mesh that the rules allow is priced by `footprint` (bytes by cause) and `throughput` (seconds by cause), with the
rows of an update cut into every number of micro-batches that divides them. Nothing is loaded: shapes come from the
headers of weight files or, where there are none, from a model on meta that config.json describes.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import WIDTHS, Adapter, Mesh, Train
from ..errors import UserError
from ..figures import gib
from .auto_mesh import AXES, allowed, options
from .devices import Devices
from .footprint import Footprint, Sizes, footprint
from .rules import Settings, check_settings
from .throughput import DEVICES, GB, Device, Seconds, Work, seconds

_RESERVED = (1.03, 1.10)
"""The allocator's pool ÷ what is in use."""
_OUTSIDE = (1.5, 3.0)
"""GiB of CUDA context and NCCL buffers, which nvidia-smi counts besides."""
_ROW = r"(?:(?P<count>\d+)\s*[x×*]\s*)?(?P<name>[A-Za-z0-9]+?(?:-\d+)?)(?:@(?P<memory>\d+(?:\.\d+)?))?"
"""64xH100-80, A100-80, L4@22."""
_RECOMPUTE = ("none", "selective", "full")
_MAKERS = ("", "meta-llama", "mistralai", "qwen")
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")
_UNCOUNTED = ("train_whole", "soft_tokens", "experts", "bias")
"""Of the adapter: what trains beside LoRA, or in its place."""

KNOWN: Mapping[str, Mapping[str, Any]] = {
    name: {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": positions,
    }
    for name, kind, hidden, inner, layers, heads, groups, vocabulary, tied, positions in (
        ("llama-2-7b", "llama", 4096, 11008, 32, 32, 32, 32000, False, 4096),
        ("llama-2-13b", "llama", 5120, 13824, 40, 40, 40, 32000, False, 4096),
        ("llama-2-70b", "llama", 8192, 28672, 80, 64, 8, 32000, False, 4096),
        ("llama-3.1-8b", "llama", 4096, 14336, 32, 32, 8, 128256, False, 131072),
        ("llama-3.1-70b", "llama", 8192, 28672, 80, 64, 8, 128256, False, 131072),
        ("llama-3.1-405b", "llama", 16384, 53248, 126, 128, 8, 128256, False, 131072),
        ("llama-3.2-3b", "llama", 3072, 8192, 28, 24, 8, 128256, True, 131072),
        ("mistral-7b", "mistral", 4096, 14336, 32, 32, 8, 32000, False, 32768),
        ("qwen2.5-0.5b", "qwen2", 896, 4864, 24, 14, 2, 151936, True, 32768),
        ("qwen2.5-7b", "qwen2", 3584, 18944, 28, 28, 4, 152064, False, 131072),
        ("qwen2.5-72b", "qwen2", 8192, 29568, 80, 64, 8, 152064, False, 131072),
    )
}
"""Shapes of common models as their config.json has them, for a plan without a network."""


@dataclass(frozen=True)
class Cluster:
    """Equal devices in equal nodes."""

    count: int
    name: str
    device: Device
    node: int
    network: float
    """Bytes/s of one device to other nodes."""

    @classmethod
    def parse(
        cls, text: str, *, node: int | None = None, link: float | None = None, network: float | None = None
    ) -> Cluster:
        """`64xH100-80`, `A100-80`, or `8xL4@22` for another memory in GB.

        node: devices of one node, by default 8 or all of them. link, network: GB/s of a device inside and between
        nodes.
        Raises UserError for a device that is not known, and nodes that do not divide.
        """
        found = re.fullmatch(_ROW, text.strip())
        names = {name.lower(): name for name in DEVICES}
        short = {name.split("-")[0].lower(): name for name in DEVICES}
        key = "" if found is None else found["name"].lower()
        name = names.get(key) or short.get(key)
        if found is None or name is None:
            near = difflib.get_close_matches(key, [*names, *short], n=1, cutoff=0.3)
            hint = names.get(near[0]) or short[near[0]] if near else "H100-80"
            raise UserError(
                f"--gpus {text}: write COUNTxNAME, for example 8x{hint}; known are {', '.join(DEVICES)}; another "
                "memory is written NAME@GB"
            )
        count = int(found["count"] or 1)
        node = node or min(count, 8)
        if count < 1 or node < 1 or count % node:
            raise UserError(f"--node {node}: {count} devices do not divide into nodes of {node}; give a divisor")
        device = DEVICES[name]
        if found["memory"]:
            device = dataclasses.replace(device, memory=float(found["memory"]) * GB)
        if link is not None:
            device = dataclasses.replace(device, link=link * GB)
        return cls(count, name, device, node, (25.0 if network is None else network) * GB)

    def __str__(self) -> str:
        nodes = self.count // self.node
        return f"{self.count} × {self.name}" + (f" in {nodes} nodes of {self.node}" if nodes > 1 else "")


@dataclass(frozen=True)
class Layout:
    """One mesh with one way to cut its rows, priced."""

    mesh: Mesh
    train: Train
    needs: Footprint
    room: int
    time: Seconds
    flops: float
    """Of the model in an update: 4 per frozen weight and token that it multiplies with, attention besides."""
    devices: int
    peak: float

    @property
    def fits(self) -> bool:
        """Whether the rank that has most has room, the allocator's slack included."""
        return self.needs.total * _RESERVED[1] <= self.room

    @property
    def tokens(self) -> int:
        """Of an update."""
        return self.train.batch_size * self.train.accumulate * self.train.max_length

    @property
    def mfu(self) -> float:
        """Share of the devices' bf16 peak."""
        return self.flops / (self.time.total * self.devices * self.peak)

    def document(self) -> dict[str, Any]:
        """For JSON and pages."""
        axes = {axis: getattr(self.mesh, axis) for axis in AXES if getattr(self.mesh, axis) > 1}
        gigabytes = self.needs.total / 2**30
        return {
            "mesh": axes,
            "batch_size": self.train.batch_size,
            "accumulate": self.train.accumulate,
            "checkpointing": self.train.checkpointing,
            "fits": self.fits,
            "bytes": {**{f.name: getattr(self.needs, f.name) for f in dataclasses.fields(self.needs)}},
            "allocated_gib": round(gigabytes, 2),
            "reserved_gib": [round(gigabytes * share, 2) for share in _RESERVED],
            "nvidia_smi_gib": [
                round(gigabytes * share + more, 2) for share, more in zip(_RESERVED, _OUTSIDE, strict=True)
            ],
            "short_gib": round(max(0.0, self.needs.total * _RESERVED[1] - self.room) / 2**30, 2),
            "seconds": {name: round(value, 5) for name, value in vars(self.time).items()},
            "update_s": round(self.time.total, 4),
            "tokens_per_s": round(self.tokens / self.time.total, 1),
            "mfu": round(self.mfu, 4),
        }

    @property
    def recipe(self) -> str:
        """The lines to paste."""
        axes = ", ".join(f"{axis}: {getattr(self.mesh, axis)}" for axis in AXES if getattr(self.mesh, axis) > 1)
        more = ", sequence_parallel: true" if self.mesh.sequence_parallel and axes else ""
        lines = [f"mesh: {{{axes}{more}}}"] if axes else []
        cut = f"batch_size: {self.train.batch_size}, accumulate: {self.train.accumulate}"
        return "\n".join([*lines, f"train: {{{cut}, checkpointing: {self.train.checkpointing}}}"])


def read_sizes(model: str | Path, adapter: Adapter) -> Sizes:
    """The sizes of a backbone by name: a shape that is known here, a directory or config.json, or what any command
    takes; of its weights only headers are read, and none need be there.

    Raises UserError for a name that is nothing of these, and a config.json that lacks what is needed.
    """
    name = str(model)
    maker, _, last = name.lower().rpartition("/")
    key = last.removesuffix("-hf").removesuffix("-instruct").replace("meta-llama-", "llama-")
    path = Path(name).expanduser()
    if path.is_file():
        path = path.parent if path.name == "config.json" else path
    if path.is_dir() and (path / "config.json").is_file():
        if any(path.glob("*.safetensors")):
            return Sizes.read(path, adapter)
        return _of_config(json.loads((path / "config.json").read_text(encoding="utf-8")), adapter, str(path))
    if key in KNOWN and maker in _MAKERS:  # anybody else's model of that name may have another shape
        return _of_config(dict(KNOWN[key]), adapter, name)
    if path.is_file():
        raise UserError(f"--model {name} is a file; name a directory with config.json, or that config.json")
    try:
        from ..models.backbone import open_backbone

        return Sizes.read(open_backbone(name).directory, adapter)
    except UserError as error:
        raise UserError(f"{error}; shapes known without it: {', '.join(KNOWN)}") from None


def _of_config(config: dict[str, Any], adapter: Adapter, where: str) -> Sizes:
    """Shapes of the model that a configuration describes, built on meta."""
    import torch
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise UserError(f"{where}: config.json names no model_type that transformers knows ({kind!r})")
    try:
        made = transformers.CONFIG_MAPPING[kind].from_dict(config)
        inner = made.get_text_config()
        written = {**config, **(config.get("text_config") or {})}
        lacks = [
            name
            for name in _NEEDED
            if getattr(inner, name, None) is not None and not {name, inner.attribute_map.get(name)} & written.keys()
        ]
        with torch.device("meta"):
            auto: Any = transformers.AutoModelForCausalLM
            if type(made) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
                auto = transformers.AutoModel
            model = auto.from_config(made)
    except StrictDataclassError as error:  # sizes that contradict each other, perhaps by a default
        names = transformers.CONFIG_MAPPING[kind].attribute_map
        absent = [name for name in _NEEDED if not {name, names.get(name)} & config.keys()]
        hint = f"; it lacks {absent[0]}" if absent else ""
        raise UserError(
            f"{where}: its config.json does not describe a model ({error.__cause__ or error}){hint}"
        ) from None
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, ZeroDivisionError) as error:
        raise UserError(f"{where}: its config.json does not describe a model ({str(error).splitlines()[0]})") from None
    if lacks:
        raise UserError(f"{where}: config.json lacks {lacks[0]}, and a default would be a guess; write it there")
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return Sizes.of(made.to_dict() | config, shapes, adapter)


def layouts(
    sizes: Sizes, cluster: Cluster, settings: Settings, *, recompute: tuple[str, ...] = _RECOMPUTE
) -> list[Layout]:
    """Every layout of all the cluster's devices that rules and sizes allow, those that fit first, fastest first; of
    one mesh only its best.

    The rows of an update, `train.batch_size × train.accumulate`, stay what they are. Axes that are set stay.
    Raises UserError if there is none, with what stands in the way.
    """
    given, train = settings.mesh, settings.train
    _check_counted(sizes, settings)
    rows = train.batch_size * train.accumulate
    if cluster.count % given.size:
        raise UserError(f"mesh: {given.size} ranks of the axes that are set do not divide {cluster.count} devices")
    free = [axis for axis in ("replicate", "dp", "tp", "pp") if getattr(given, axis) == 1]
    found: dict[tuple[int, ...], Layout] = {}
    for mesh in _meshes(given, cluster.count, free):
        for cut in _divisors(rows):
            batch = dataclasses.replace(train, batch_size=rows // cut, accumulate=cut)
            if (rows // cut) % (mesh.replicate * mesh.dp):
                continue
            if not allowed(mesh, given, dataclasses.replace(settings, mesh=mesh, train=batch), sizes, cluster.node):
                continue
            for how in recompute:
                cut_so = dataclasses.replace(batch, checkpointing=how)  # type: ignore[arg-type]
                layout = priced(mesh, settings.task.as_read(cut_so), sizes, settings.adapter, cluster)
                layout = dataclasses.replace(layout, train=cut_so)
                key = tuple(getattr(mesh, axis) for axis in AXES)
                if key not in found or _order(layout) < _order(found[key]):
                    found[key] = layout
    if not found:
        check_settings(dataclasses.replace(settings, mesh=given))
        raise UserError(
            f"no mesh of {cluster.count} devices goes with {rows} rows of an update, {sizes.heads} heads in "
            f"{sizes.groups} groups and {len(sizes.blocks)} blocks; raise train.batch_size or train.accumulate to a "
            f"multiple of the data ranks, or take fewer devices"
        )
    return sorted(found.values(), key=_order)


def _check_counted(sizes: Sizes, settings: Settings) -> None:
    """Raise UserError for what the formulas leave out: nothing fits on a guess."""
    adapter, longest = settings.adapter, settings.train.max_length
    if sizes.experts > 1:
        raise UserError(
            f"plan: {sizes.kind} has {sizes.experts} experts a block, which it cannot count yet; mesh.auto true shards "
            "its weights, and the memory of a short training tells the rest"
        )
    if uncounted := [name for name in _UNCOUNTED if getattr(adapter, name) is not None]:
        raise UserError(f"plan: adapter.{uncounted[0]} is not counted yet; it knows LoRA alone, so leave that out")
    if not sizes.adapter:
        raise UserError(f"adapter.targets: {adapter.targets!r} names no linear layer of {sizes.kind}; take all-linear")
    if sizes.positions is not None and longest > sizes.positions:
        raise UserError(
            f"train.max_length {longest} is more than the {sizes.positions} positions of the backbone; take "
            f"{sizes.positions}, or write what it can do into its config.json"
        )


def _order(layout: Layout) -> tuple[bool, float]:
    return not layout.fits, layout.time.total if layout.fits else layout.needs.total / layout.room


def _meshes(given: Mesh, count: int, free: list[str]) -> Iterator[Mesh]:
    for mesh in options(given, count, free):
        yield mesh
        if mesh.tp > 1 and not mesh.sequence_parallel:
            yield dataclasses.replace(mesh, sequence_parallel=True)


def update_seconds(sizes: Sizes, cluster: Cluster, settings: Settings) -> float | None:
    """Of an update of these settings on `cluster`; None for what the formulas do not count, and float32 products."""
    if settings.train.precision not in ("bf16", "fp16"):
        return None
    try:
        _check_counted(sizes, settings)
    except UserError:
        return None
    train = settings.task.as_read(settings.train)
    return priced(settings.mesh, train, sizes, settings.adapter, cluster).time.total


def priced(mesh: Mesh, train: Train, sizes: Sizes, adapter: Adapter, cluster: Cluster) -> Layout:
    """One layout of all the cluster's devices, with its bytes and seconds."""
    width = WIDTHS[train.precision]
    data = mesh.replicate * mesh.dp
    rows = train.batch_size // data
    pieces = train.accumulate
    of_piece = rows
    if mesh.pp > 1:
        of_piece = math.ceil(rows / (mesh.microbatches or min(rows, 4 * mesh.pp)))
        pieces = train.accumulate * math.ceil(rows / of_piece)
    blocks = len(sizes.blocks)
    weights = sum(sizes.blocks) * width / (mesh.tp * mesh.pp)
    shards = mesh.dp * mesh.cp
    times = 1 if not mesh.reshard or mesh.pp > 1 else 2
    gathered = times * weights * (shards - 1) / shards if shards > 1 and mesh.zero == 3 else 0.0
    if mesh.pp > 1:
        gathered /= max(pieces, 1)
    inside = shards * mesh.tp <= cluster.node
    adapters = 4 * sizes.adapter / (mesh.tp * mesh.pp)
    reduced = 2 * adapters * (data - 1) / data / (shards if mesh.zero == 3 and mesh.adapters == "shard" else 1)
    work = Work(
        layers=blocks,
        hidden=sizes.hidden,
        heads=sizes.heads,
        products=sizes.products + sizes.adapter / blocks,
        head=sizes.vocabulary * sizes.hidden,
        sequence=train.max_length // mesh.cp,
        rows=of_piece,
        micro=pieces,
        tp=mesh.tp,
        pp=mesh.pp,
        virtual=1 if mesh.schedule in ("1f1b", "gpipe") else mesh.virtual or 2,
        recompute=train.checkpointing,
        sequence_parallel=mesh.sequence_parallel,
        gathered=gathered,
        gathered_inside=inside,
        reduced=reduced if data > 1 else 0.0,
        tp_inside=mesh.tp <= cluster.node,
    )
    tokens = train.batch_size * train.accumulate * train.max_length
    attention = 12 * train.max_length * sizes.hidden * blocks
    flops = tokens * (4 * (blocks * sizes.products + work.head) + 6 * sizes.adapter + attention)
    room = Devices("cuda", cluster.node, int(cluster.device.memory)).each(1)
    assert room is not None
    needs = footprint(sizes, mesh=mesh, adapter=adapter, train=train)
    took = seconds(work, cluster.device, network=cluster.network)
    return Layout(mesh, train, needs, room, took, flops, cluster.count, cluster.device.flops)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def table(found: list[Layout], cluster: Cluster, sizes: Sizes, *, most: int = 8) -> list[str]:
    """For a person: the backbone, the best meshes, and what those that do not fit lack."""
    fitting = [layout for layout in found if layout.fits]
    lines = [
        f"{sizes.kind}, {sizes.elements / 1e9:.3g} B frozen, {sizes.adapter / 1e6:.3g} M trained, on {cluster}, "
        f"{found[0].room / 2**30:.1f} GiB of each to be used"
    ]
    head = (
        f"  {'mesh':46} {'rows × micro':>13} {'recompute':>10} {'memory':>10} {'update':>9} {'tokens/s':>10} {'MFU':>6}"
    )
    shown = (fitting or found)[:most]
    lines.append(head)
    for layout in shown:
        lines.append(
            f"  {_name(layout.mesh):46} {f'{layout.train.batch_size} × {layout.train.accumulate}':>13} "
            f"{layout.train.checkpointing:>10} {gib(layout.needs.total):>10} {_duration(layout.time.total):>9} "
            f"{layout.tokens / layout.time.total:>10,.0f} {layout.mfu:>6.1%}"
        )
    if len(found) > len(fitting):
        least = min((layout for layout in found if not layout.fits), key=lambda layout: layout.needs.total)
        short = least.needs.total * _RESERVED[1] - least.room
        lines.append(
            f"{len(found) - len(fitting)} of {len(found)} meshes do not fit; the nearest, {_name(least.mesh)}, is "
            f"short of {gib(int(short))} a device ({least.needs})"
        )
    return lines


def _name(mesh: Mesh) -> str:
    name = " × ".join(f"{axis} {getattr(mesh, axis)}" for axis in AXES if getattr(mesh, axis) > 1) or "one device"
    return name + (" (sequence)" if mesh.sequence_parallel and mesh.tp > 1 else "")


def _duration(value: float) -> str:
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.3g} s"
