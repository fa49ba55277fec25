"""Tensors and configuration of a GGUF file in the form of transformers; imports nothing of this project, so that
`flatshift.experiments.workflows.plain_check` can run it where this project is not installed.

Tensors are dequantised by the package `gguf`, and what llama.cpp's converter does to them is undone. Everything that
llama.cpp reads from the file replaces the configuration's value, and what the file lacks, llama.cpp lacks too.
transformers' own reader of these files ignores much of that (`attention.key_length` of Qwen 3, the experts of Mixtral,
every scaling of rotary positions), so `load` uses it for other architectures only.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ARCHITECTURES = ("gemma3", "gpt2", "gptneox", "llama", "phi3", "qwen2", "qwen3", "qwen3moe", "t5")
"""Architectures whose conversion is undone here."""
_SETTINGS = {
    "context_length": ("max_position_embeddings",),
    "block_count": ("num_hidden_layers",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size", "n_inner", "d_ff"),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon"),
    "attention.relative_buckets_count": ("relative_attention_num_buckets",),
    "attention.sliding_window": ("sliding_window",),
    "expert_count": ("num_local_experts", "num_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "use_parallel_residual": ("use_parallel_residual",),
    "decoder_start_token_id": ("decoder_start_token_id",),
}
"""Keys of a file, and their names in configurations."""
_ROPE_BASE = 10_000.0
"""llama.cpp's own, for a file without one."""
_CHUNK = 1 << 24
"""Numbers dequantised at once."""
_FACTORS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
"""Tensors that llama.cpp scales positions by; transformers has them in its configuration."""
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Forms of `struct` by a file's kinds of values; 8 is a text, 9 a list."""


class StoredTensor(NamedTuple):
    """A tensor of a file: its `shape`, outermost first, and its rows of bytes."""

    name: str
    shape: tuple[int, ...]
    tensor_type: Any
    data: Any


class _Values:
    """Values of a file from its beginning, one after another."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.position = data, 0

    def read(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self.data, self.position)
        self.position += struct.calcsize(f"<{form}")
        return values

    def read_value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.read(_NUMBERS[kind])[0]
        if kind == 8:
            (length,) = self.read("Q")
            return self.read(f"{length}s")[0].decode("utf-8")
        if kind != 9:
            raise ValueError(f"a value of the unknown kind {kind}")
        inner, count = self.read("IQ")
        if inner in _NUMBERS:
            return list(self.read(f"{count}{_NUMBERS[inner]}"))
        return [self.read_value(inner) for _ in range(count)]


def read_file(file: Path) -> tuple[dict[str, Any], list[StoredTensor]]:
    """Return the fields and the tensors of a GGUF file, which stays mapped.

    `gguf.GGUFReader` makes an array of numpy of every text: ten seconds for a vocabulary of 262,144, and more for
    merges. Raises ValueError or `struct.error` for a file that is damaged or not of version 2 or 3.
    """
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    with file.open("rb") as handle:
        values = _Values(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ))
    magic, version, tensors, fields = values.read("4sIQQ")
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"version {version} of the format")
    found = {values.read_value(8): values.read_value(*values.read("I")) for _ in range(fields)}
    table = []
    for _ in range(tensors):
        name, (rank,) = values.read_value(8), values.read("I")
        table.append((name, values.read(f"{rank}Q")[::-1], *values.read("IQ")))
    alignment = found.get("general.alignment", 32)
    begin, whole, stored = -(-values.position // alignment) * alignment, np.frombuffer(values.data, np.uint8), []
    for name, shape, number, offset in table:
        kind = GGMLQuantizationType(number)
        block, width = GGML_QUANT_SIZES[kind]
        rows = (*shape[:-1], shape[-1] // block * width)
        end = begin + offset + math.prod(rows)
        if end > len(whole):
            raise ValueError(f"it ends before {name} does")
        stored.append(StoredTensor(name, shape, kind, whole[begin + offset : end].reshape(rows)))
    return found, stored


def load(asked: Mapping[str, Any], kind: Any) -> tuple[Any, list[str]]:
    """The file's model in float32, by transformers' class `kind`, and the settings that llama.cpp has otherwise.

    Raises ValueError, or what transformers raises, for a file that is not read.
    """
    import torch

    told = asked["gguf"]
    fields, tensors = read_file(Path(asked["folder"]) / told["file"])
    fields = {name.removeprefix(f"{told['architecture']}."): value for name, value in fields.items()}
    config, other = configuration(told["config"], fields, {tensor.name for tensor in tensors})
    if told["architecture"] not in ARCHITECTURES:
        return _by_transformers(told, asked["folder"], kind, config), other
    model = kind.from_config(config, dtype=torch.float32)
    fill(model, tensors, told["architecture"])
    return model, other


def _by_transformers(told: Mapping[str, Any], folder: str, kind: Any, config: Any) -> Any:
    """Load the file by transformers' own reader, which looks for a distribution `gguf`; the converter brings the
    package in a distribution of its own."""
    import torch
    from transformers import modeling_gguf_pytorch_utils as reader

    reader.is_gguf_available = lambda *args, **more: True
    model, info = kind.from_pretrained(
        folder, gguf_file=told["file"], config=config, dtype=torch.float32, output_loading_info=True
    )
    if info["missing_keys"]:
        raise ValueError(f"transformers does not find {min(info['missing_keys'])} in a GGUF file")
    return model


def configuration(own: Mapping[str, Any], fields: Mapping[str, Any], tensors: set[str]) -> tuple[Any, list[str]]:
    """The configuration `own` with what llama.cpp reads from the file instead, and without what it does not have;
    and what of it that changed, in words."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[own["model_type"]].from_dict(dict(own))
    before = config.to_dict()
    heads = fields["attention.head_count"]
    read = {"attention.key_length": fields["embedding_length"] // heads, "attention.head_count_kv": heads, **fields}
    read["attention.sliding_window"] = fields.get("attention.sliding_window") or None
    for key, names in _SETTINGS.items():
        for name in names:
            if key in read and hasattr(config, name):
                setattr(config, name, read[key])
    config.tie_word_embeddings = "output.weight" not in tensors
    if hasattr(config, "norm_topk_prob"):
        config.norm_topk_prob = True  # in llama.cpp's graph of the architecture, not in its files
    if config.model_type == "gemma3_text":
        width = read["embedding_length"] // heads if read.get("block_count") == 62 else read["attention.key_length"]
        config.query_pre_attn_scalar = width  # in llama.cpp's graph, where 27 B (62 layers) is an exception
    rope = getattr(config, "rope_parameters", None) or {}
    for layers, base in (("full_attention", "rope.freq_base"), ("sliding_attention", "rope.freq_base_swa")):
        one = rope.get(layers, rope if layers == "full_attention" else None)
        if one:
            one["rope_theta"] = fields.get(base, _ROPE_BASE)
    for one in (rope, rope.get("full_attention", {})):
        _scale(one, fields, tensors, read["attention.key_length"])
    after = config.to_dict()
    changed = [name for name in after if before.get(name) is not None and not _equal(before[name], after[name])]
    return config, [f"{name} {after[name]} instead of {before[name]}" for name in changed]


def _equal(one: Any, other: Any) -> bool:
    """True if two settings are the same up to float32, which a file has."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)
    both = isinstance(one, (int, float)) and isinstance(other, (int, float))
    return math.isclose(one, other, rel_tol=1e-6) if both else one == other


def _scale(rope: dict[str, Any], fields: Mapping[str, Any], tensors: set[str], width: int) -> None:
    """Have rotary positions scaled as the file says."""
    kind = rope.get("rope_type")
    if kind in ("linear", "yarn"):
        rope["factor"] = fields.get("rope.scaling.factor", 1.0)
    elif kind in ("llama3", "longrope") and not _FACTORS & tensors:
        rope["rope_type"] = "default"
    if kind is not None and fields.get("rope.dimension_count", width) != int(
        rope.get("partial_rotary_factor", 1.0) * width
    ):
        rope["partial_rotary_factor"] = fields["rope.dimension_count"] / width


def fill(model: Any, tensors: Any, architecture: str) -> None:
    """Set the parameters of `model` to the file's tensors, in float32. Raises ValueError as `convert_tensors`."""
    import torch

    parameters = dict(model.named_parameters())
    for name, value in convert_tensors(model, tensors, architecture, dtype=torch.float32):
        parameters[name].data = value


def convert_tensors(model: Any, tensors: Iterable[Any], architecture: str, *, dtype: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and value of every parameter of `model` (its own may be on meta), one at a time, from the file's
    `tensors`: matrices in `dtype`, others in float32.

    Raises ValueError for a tensor that the file or the model lacks, or has in another shape.
    """
    import gguf
    import torch

    known = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(known, model.config.num_hidden_layers)
    stored, used = {tensor.name: tensor for tensor in tensors}, set()

    def read(name: str) -> Any:
        if name not in stored:
            raise ValueError(f"the GGUF file has no tensor {name}")
        used.add(name)
        return dequantize(stored[name], dtype)

    for name, parameter in model.named_parameters():
        expert = re.fullmatch(r".*\.layers\.(\d+)\..*experts\.(gate_up|down)_proj", name)
        if expert is not None:
            number, parts = expert[1], expert[2].split("_")
            value = torch.cat([read(f"blk.{number}.ffn_{part}_exps.weight") for part in parts], dim=1)
        else:
            base, dot, leaf = name.rpartition(".")
            value = undone(architecture, name, read(f"{names.get_name(base)}{dot}{leaf}"), model.config)
        if value.shape != parameter.shape:
            shapes = f"{list(value.shape)} instead of {list(parameter.shape)}"
            raise ValueError(f"the GGUF file has {name} in the shape {shapes}")
        yield name, value
    if surplus := stored.keys() - used - _FACTORS:
        raise ValueError(f"transformers has no place for the GGUF file's tensor {min(surplus)}")


def dequantize(tensor: Any, dtype: Any) -> Any:
    """Return a tensor of a file in `dtype`, a vector in float32.

    Some rows are dequantised at a time, because `gguf` returns float32. Raises ValueError for a quantisation that it
    does not know.
    """
    import gguf
    import torch

    data, kind, shape = tensor.data, tensor.tensor_type, tensor.shape
    try:
        if len(shape) == 1:
            return torch.tensor(gguf.dequantize(data, kind), dtype=torch.float32)
        rows = data.reshape(-1, data.shape[-1])
        out = torch.empty(len(rows), shape[-1], dtype=dtype)
        step = max(1, _CHUNK // shape[-1])
        for start in range(0, len(rows), step):
            out[start : start + step] = torch.tensor(gguf.dequantize(rows[start : start + step], kind))
    except NotImplementedError:
        raise ValueError(f"the GGUF file has {tensor.name} in {kind.name}, which `gguf` cannot dequantise") from None
    return out.view(shape)


def undone(architecture: str, name: str, value: Any, config: Any) -> Any:
    """A tensor as transformers has it: without what llama.cpp's converter does to those of its architecture."""
    import torch

    heads = config.num_attention_heads
    if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):  # pairs lie side by side
        count = heads if "q_proj" in name else config.num_key_value_heads
        return value.reshape(count, -1, 2, value.shape[-1]).transpose(1, 2).reshape(value.shape)
    if architecture == "gptneox" and ".query_key_value." in name:  # by head first
        return torch.stack([part.unflatten(0, (heads, -1)) for part in value.chunk(3)], dim=1).reshape(value.shape)
    if architecture == "gpt2" and re.search(r"\.c_(attn|proj|fc)\.weight$", name):
        return value.T.contiguous()
    return value - 1 if architecture == "gemma3" and name.endswith("norm.weight") else value
