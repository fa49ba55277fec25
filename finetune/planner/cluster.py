"""Clusters of equal devices in equal nodes, given to `flatshift plan` or found on this machine; and the sizes of a
backbone that need not be downloaded: shapes come from the headers of weight files or, without these, from a model on
the meta device built from config.json."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..atomic import read_json_object
from ..config import Adapter
from ..errors import UserError, first_error_line
from .calibration import cached_constants
from .devices import Devices
from .footprint import BackboneSizes
from .throughput import CORE, DEVICES, GB, PUBLISHED, DeviceSpec, RooflineConstants

_MOST_DEVICES = 1_000_000
_NETWORK = 25.0
"""GB/s of a device to other nodes, unless given."""
_UNKNOWN = "A100-80"
"""Device whose rates rank the meshes of a device that is not in the table."""
_ROW = r"(?:(?P<count>\d+)\s*[x×*]\s*)?(?P<name>[A-Za-z0-9]+?(?:-\d+)?)(?:@(?P<memory>\d+(?:\.\d+)?))?"
"""Matches 64xH100-80, A100-80, L4@22."""
_MAKERS = ("", "meta-llama", "mistralai", "qwen")
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")

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
"""Shapes of common models, copied from their config.json, for planning without a network."""


@dataclass(frozen=True)
class Cluster:
    """Equal devices in equal nodes."""

    count: int
    name: str
    device: DeviceSpec
    node: int
    network: float
    """Bytes/s of one device to other nodes."""
    room: int | None
    """Bytes available to a rank; None: unknown."""
    constants: RooflineConstants = PUBLISHED
    """Fractions of the device's data-sheet rates that are reached."""
    kind: str = "cuda"

    @classmethod
    def parse(
        cls, text: str, *, node: int | None = None, link: float | None = None, network: float | None = None
    ) -> Cluster:
        """Parse `64xH100-80`, `A100-80`, or `8xL4@22` for another memory in GB.

        node: devices per node, by default 8 or all of them. link, network: GB/s of a device inside and between nodes.
        Raises UserError for an unknown device, and if the devices do not divide into nodes.
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
        if not 1 <= count <= _MOST_DEVICES or (found["memory"] and not float(found["memory"]) > 0):
            raise UserError(f"--gpus {text}: give 1 to {_MOST_DEVICES:,} devices, and a memory above 0 GB")
        node = node or min(count, 8)
        if count < 1 or node < 1 or count % node:
            raise UserError(f"--node {node}: {count} devices do not divide into nodes of {node}; give a divisor")
        device = DEVICES[name]
        if found["memory"]:
            device = dataclasses.replace(device, memory=float(found["memory"]) * GB)
        if link is not None:
            device = dataclasses.replace(device, link=link * GB)
        room = Devices("cuda", node, int(device.memory)).each(1)
        return cls(count, name, device, node, (network or _NETWORK) * GB, room, cached_constants(name) or PUBLISHED)

    @classmethod
    def at_hand(cls, devices: Devices, ranks: int, node: int) -> Cluster:
        """Build from this machine's devices: `ranks` ranks, `node` of them per machine."""
        other, rates = ("CPU", CORE) if devices.kind == "cpu" else ("another device", DEVICES[_UNKNOWN])
        row = devices.row or other
        device, room = DEVICES.get(row, rates), devices.each(min(ranks, node))
        return cls(ranks, row, device, node, _NETWORK * GB, room, cached_constants(row) or PUBLISHED, devices.kind)

    def __str__(self) -> str:
        nodes = self.count // self.node
        return f"{self.count} × {self.name}" + (f" in {nodes} nodes of {self.node}" if nodes > 1 else "")


def read_sizes(model: str | Path, adapter: Adapter) -> BackboneSizes:
    """Return the sizes of a backbone by name: a shape in `KNOWN`, a directory or config.json, or any name other
    commands accept; of its weights only headers are read, and none need exist.

    Raises UserError for a name that is none of these, and for a config.json that lacks required keys.
    """
    name = str(model)
    maker, _, last = name.lower().rpartition("/")
    key = last.removesuffix("-hf").removesuffix("-instruct").replace("meta-llama-", "llama-")
    path = Path(name).expanduser()
    if path.is_file():
        path = path.parent if path.name == "config.json" else path
    if path.is_dir() and (path / "config.json").is_file():
        if any(path.glob("*.safetensors")):
            return BackboneSizes.read(path, adapter)
        config = read_json_object(path / "config.json", fix="name a model's folder or its config.json")
        return _sizes_from_config(config, adapter, str(path))
    if key in KNOWN and maker in _MAKERS:  # other makers' models of that name may have another shape
        return _sizes_from_config(dict(KNOWN[key]), adapter, name)
    if path.is_file():
        raise UserError(f"--model {name} is a file; name a directory with config.json, or that config.json")
    try:
        from ..models.backbone import open_backbone

        return BackboneSizes.read(open_backbone(name).directory, adapter)
    except UserError as error:
        near = difflib.get_close_matches(key, KNOWN, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"{hint}{error}; shapes known without it: {', '.join(KNOWN)}") from None


def _sizes_from_config(config: dict[str, Any], adapter: Adapter, where: str) -> BackboneSizes:
    """Return the shapes of the model that a configuration describes, built on the meta device."""
    import torch
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    from ..models.backbone import check_sizes

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise UserError(f"{where}: config.json names no model_type that transformers knows ({kind!r})")
    try:
        made = transformers.CONFIG_MAPPING[kind].from_dict(config)
        inner = made.get_text_config()
        check_sizes(made, Path(where) / "config.json")
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
    except StrictDataclassError as error:  # sizes that contradict each other, possibly through a default
        names = transformers.CONFIG_MAPPING[kind].attribute_map
        absent = [name for name in _NEEDED if not {name, names.get(name)} & config.keys()]
        hint = f"; it lacks {absent[0]}" if absent else ""
        raise UserError(
            f"{where}: its config.json does not describe a model ({error.__cause__ or error}){hint}"
        ) from None
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, ZeroDivisionError, ImportError) as error:
        raise UserError(f"{where}: its config.json does not describe a model ({first_error_line(error)})") from None
    if lacks:
        raise UserError(f"{where}: config.json lacks {lacks[0]}, and a default would be a guess; write it there")
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return BackboneSizes.of(made.to_dict() | config, shapes, adapter)
