"""Files of a checkpoint: the index of their tensors, read from their headers and checked against their sizes; and the
match of those tensors with a model's, by transformers' own renaming rules.

A truncated or missing file is found here, before any rank has read or allocated anything. transformers renames between
a checkpoint and its modules (ViT), adds or drops the base model's prefix (GPT-2 from the hub), ties weights that the
files hold only once, and converts (stacked experts). The match equals that of `from_pretrained`, derived from names and
shapes alone.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..atomic import read_json_object
from ..compute.capabilities import seeded_rng
from ..errors import UserError, first_error_line
from .dequantize import QuantizedTensor, find_quantized

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# As in the safetensors format, without the dtypes that no weight of a transformers model has.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_LENGTH = 8  # bytes that hold the header's length, little endian
_LONGEST = 100_000_000  # bytes of a header, the limit of the format


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Byte offset of the tensor in its file, for reading in order."""
    quantized: QuantizedTensor | None = None
    """A weight that the files store quantised, of which this entry describes the floats."""

    @property
    def bytes(self) -> int:
        """Size of the tensor in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def chunks(self, size: int) -> Iterator[Any]:
        """Yield the tensor's bytes in order, at most `size` at once. Raises UserError if the file is cut short."""
        with self.file.open("rb") as stream:
            stream.seek(self.offset)
            for start in range(0, self.bytes, size):
                chunk = stream.read(min(size, self.bytes - start))
                if len(chunk) < min(size, self.bytes - start):
                    raise UserError(f"{self.file} became shorter while it was read")
                yield chunk


def read_index(directory: Path) -> dict[str, TensorEntry]:
    """Return the tensors of `model.safetensors`, or of the files in `model.safetensors.index.json`, by name. Raises
    UserError: neither exists; a file of the index is missing, cut short or not a safetensors file; a file lacks a
    tensor that the index assigns to it."""
    if (directory / SINGLE).is_file():
        return _read_header(directory / SINGLE)
    index = directory / INDEX
    if not index.is_file():
        raise UserError(f"{directory} has neither {SINGLE} nor {INDEX}, so its weights cannot be read in slices")
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{index} is damaged ({type(error).__name__}); fetch the backbone again") from error
    if any(Path(file).name != file for file in files):  # only names in the same directory, never a path out of it
        raise UserError(f"{index} names a file that is not next to it; fetch the backbone again")
    missing = [file for file in files if not (directory / file).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{directory / missing[0]}{more} is missing, though {INDEX} names it; fetch the backbone again")
    headers = {file: _read_header(directory / file) for file in files}
    for key, file in weight_map.items():
        if key not in headers[file]:
            raise UserError(f"{directory / file} lacks {key}, which {INDEX} says is in it; fetch the backbone again")
    return {key: headers[file][key] for key, file in weight_map.items()}


def _read_header(file: Path) -> dict[str, TensorEntry]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH), "little")
        if size < _LENGTH or length > _LONGEST:
            raise UserError(f"{file} is no safetensors file or is damaged; fetch the backbone again")
        if size < _LENGTH + length:
            raise UserError(f"{file} is cut short: it ends in its header, after {size} bytes; fetch the backbone again")
        text = stream.read(length)
    entries, end = {}, 0
    try:
        for key, value in json.loads(text).items():
            if key == "__metadata__":
                continue
            start, stop = value["data_offsets"]
            if not all(isinstance(number, int) and 0 <= number < 2**63 for number in (start, stop, *value["shape"])):
                raise ValueError(key)
            entries[key] = TensorEntry(file, DTYPES[value["dtype"]], tuple(value["shape"]), _LENGTH + length + start)
            if stop - start != entries[key].bytes:
                raise ValueError(key)
            end = max(end, stop)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{file} has a damaged header ({first_error_line(error)}); fetch the backbone again") from error
    if size < _LENGTH + length + end:
        raise UserError(
            f"{file} is cut short: it has {size} of {_LENGTH + length + end} bytes; fetch the backbone again"
        )
    return entries


def read_floats(directory: Path) -> dict[str, TensorEntry]:
    """Return the tensors of `read_index`, with one of floats for each weight that the files store quantised.

    Raises UserError as `read_index`, or for a quantisation that is not read (`flatshift.finetune.models.dequantize`).
    """
    entries, config = read_index(directory), directory / "config.json"
    settings = read_json_object(config, fix="fetch the backbone again").get("quantization_config")
    if settings is None:
        return entries
    weights = find_quantized(entries, settings if isinstance(settings, dict) else {}, context=str(directory))
    stored = {key for weight in weights.values() for key, _ in weight.parts.values()}
    floats = {key: entry for key, entry in entries.items() if key not in stored}
    bare = [key for key, entry in floats.items() if entry.dtype.is_floating_point and entry.dtype.itemsize == 1]
    if bare:
        raise UserError(f"{directory}: the scales of {bare[0]} are not among its weights; take the unquantised one")
    for name, weight in weights.items():
        (first, *_) = (entries[key] for key, _ in weight.parts.values())
        floats[name] = TensorEntry(first.file, torch.bfloat16, weight.shape, first.offset, weight)
    return floats


def open_slice(file: Any, key: str, entry: TensorEntry) -> Any:
    """Return a view of the tensor `key` of an open safetensors `file`, which reads what it is indexed with."""
    return file.get_slice(key) if entry.quantized is None else entry.quantized


_WRAPPER = re.compile(r"(^|\.)(_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)(?=\.|$)")
_PART = re.compile(r"^part\d+\.")
_BASE_LAYER = re.compile(r"\.base_layer(?!\.lora_)")
# the lookahead keeps PEFT's nesting for stacked experts: `experts.base_layer.lora_A` next to `experts.lora_A`


@dataclass(frozen=True)
class CheckpointFiles:
    """Checkpoint directory as seen by one model. Names are the model's before anything is wrapped or split."""

    directory: Path
    entries: dict[str, TensorEntry]
    """Tensors of the files, by their name there."""
    keys: dict[str, str]
    """Model name → name in the files of tensors that can be read as is; every name of tied weights has an entry."""
    converted: tuple[str, ...]
    """Model names whose tensors transformers builds from several or from parts of one."""
    stacked: dict[str, list[list[str]]]
    """Stacked experts (E, out, in) among `converted`: for each projection in it, top to bottom, the keys of
    its experts in order. The others need `from_pretrained`."""
    missing: tuple[str, ...]
    mismatched: tuple[str, ...]
    """Model names with another shape in the files."""
    computed: dict[str, Tensor]
    """Parameters that files never hold, because the model computes them (Marian's sinusoidal positions)."""
    shapes: dict[str, tuple[int, ...]]
    """Unsharded shape of every parameter and persistent buffer of the model."""
    model_class: type[PreTrainedModel]
    config: PretrainedConfig
    dtype: torch.dtype

    @classmethod
    def of(cls, model: PreTrainedModel, directory: Path) -> CheckpointFiles:
        """Match the files of `directory` with `model`, unwrapped and unsharded, on meta.

        Weights that are tied in `model` but have different values in the files are untied, as in transformers.

        Raises UserError as `read_floats`, or for quantised weights that need a conversion.
        """
        entries = read_floats(directory)
        state = model.state_dict()
        keys, sources = _match_names(model, sorted(entries, key=_natural_sort_key), state)
        _untie_different(model, keys, entries)
        for target, source in model.all_tied_weights_keys.items():
            for name, tied in ((target, source), (source, target)):
                if name in state and name not in keys and tied in keys:
                    keys[name] = keys[tied]
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        mismatched = {name for name, key in keys.items() if entries[key].shape != shapes[name]}
        optional = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
        absent = [name for name in state if name not in keys and name not in sources]
        missing = [name for name in absent if not any(pattern.search(name) for pattern in optional)]
        stacked = _find_stacked_experts(model, sources, entries, shapes)
        for name in sources.keys() - stacked.keys():
            if any(entries[key].quantized is not None for own in sources[name].values() for key in own):
                raise UserError(
                    f"{directory} is quantised, and transformers builds {name} from several of its tensors, which is "
                    "done with floats only; take the unquantised one"
                )
        return cls(
            directory=directory, entries=entries,
            keys={name: key for name, key in keys.items() if name not in mismatched},
            converted=tuple(name for name in state if name in sources), stacked=stacked, missing=tuple(missing),
            mismatched=tuple(sorted(mismatched)), computed=_compute_parameters(model, {*absent} - {*missing}),
            shapes=shapes, model_class=type(model), config=model.config, dtype=model.dtype,
        )  # fmt: skip

    def without(self, names: Collection[str]) -> CheckpointFiles:
        """Return the same checkpoint without the tensors of these model names."""
        keys = {name: key for name, key in self.keys.items() if name not in names}
        shapes = {name: shape for name, shape in self.shapes.items() if name not in names}
        return dataclasses.replace(self, keys=keys, shapes=shapes)


@torch.no_grad()
def _compute_parameters(model: PreTrainedModel, names: set[str]) -> dict[str, Tensor]:
    """Return the values that transformers gives to parameters without a file, of a model on meta."""
    values = {}
    for name in sorted(names & dict(model.named_parameters()).keys()):
        owner, _, leaf = name.rpartition(".")
        module = copy.deepcopy(model.get_submodule(owner)).to_empty(device="cpu")
        with seeded_rng(0, torch.device("cpu")):
            model._init_weights(module)
        values[name] = module.get_parameter(leaf).detach()
    return values


def _natural_sort_key(key: str) -> list[tuple[int, int | str]]:
    """Return a sort key that puts `layers.10` after `layers.9`, the order in which transformers reads a checkpoint."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in key.split(".")]


def _match_names(
    model: PreTrainedModel, names: list[str], state: dict[str, Any]
) -> tuple[dict[str, str], dict[str, dict[str, list[str]]]]:
    """Return model name → file name; and for the model names that need a conversion the file names by the pattern of
    transformers that they match."""
    from transformers.core_model_loading import rename_source_key

    renamings, converters = _conversion_rules(model)
    targets = {pattern: rule.target_patterns for rule in converters for pattern in rule.source_patterns}
    keys: dict[str, str] = {}
    sources: dict[str, dict[str, list[str]]] = {}
    for key in names:
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, state)
        if pattern is not None:
            # one source may become several tensors, one name per target pattern
            for built in {name.replace(targets[pattern][0], target) for target in targets[pattern]} & state.keys():
                sources.setdefault(built, {}).setdefault(pattern, []).append(key)
        elif name in state:
            keys.setdefault(name, key)
    return {name: key for name, key in keys.items() if name not in sources}, sources


def _find_stacked_experts(
    model: PreTrainedModel,
    sources: dict[str, dict[str, list[str]]],
    entries: dict[str, TensorEntry],
    shapes: dict[str, tuple[int, ...]],
) -> dict[str, list[list[str]]]:
    """Return `CheckpointFiles.stacked`: the tensors that transformers' rules stack, with files of the right shapes."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    rules = {frozenset(rule.source_patterns): rule for rule in _conversion_rules(model)[1]}
    stacked = {}
    for name, by_pattern in sources.items():
        rule = rules.get(frozenset(by_pattern))
        steps = [] if rule is None else [(type(step), getattr(step, "dim", None)) for step in rule.operations]
        if rule is None or steps not in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]):
            continue
        projections = [by_pattern[pattern] for pattern in rule.source_patterns]
        parts = [{entries[key].shape for key in keys} for keys in projections]
        counts = {len(keys) for keys in projections}
        if len(counts) == 1 and all(len(shapes_of) == 1 for shapes_of in parts):
            matrices = [shape for (shape,) in parts]
            if shapes[name] == (*counts, sum(shape[0] for shape in matrices), *matrices[0][1:]):
                stacked[name] = projections
    return stacked


def _conversion_rules(model: PreTrainedModel) -> tuple[list[Any], list[Any]]:
    """Return transformers' renamings and converters of the model's checkpoints."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    return renamings, [rule for rule in rules if isinstance(rule, WeightConverter)]


def weight_reader(model: PreTrainedModel) -> Callable[[str], Tensor]:
    """Return a function that reads a weight of a skeleton (`flatshift.finetune.models.meta.build_skeleton`) from its
    files, by its name in the model.

    When called, it raises UserError for a tensor that transformers builds from several in a way other than stacking
    experts.
    """
    from safetensors import safe_open

    checkpoint: Any = model.checkpoint  # type: ignore[assignment]

    def tensor(key: str) -> Tensor:
        entry = checkpoint.entries[key]
        if entry.quantized is not None:
            return entry.quantized[:]
        with safe_open(entry.file, "pt") as file:
            value: Tensor = file.get_tensor(key)
        return value

    def read(name: str) -> Tensor:
        if name in checkpoint.keys:
            return tensor(checkpoint.keys[name])
        if name not in checkpoint.stacked:
            raise UserError(f"{checkpoint.directory}: {name} can only be read with all other weights")
        return torch.cat([torch.stack([tensor(key) for key in keys]) for keys in checkpoint.stacked[name]], dim=1)

    return read


def _untie_different(model: PreTrainedModel, keys: dict[str, str], entries: dict[str, TensorEntry]) -> None:
    for target, source in list(model.all_tied_weights_keys.items()):
        if target not in keys or source not in keys or keys[target] == keys[source]:
            continue
        if not _are_tensors_equal(keys[target], keys[source], entries):
            owner, _, leaf = target.rpartition(".")
            tied = model.get_parameter(target)
            setattr(
                model.get_submodule(owner), leaf, nn.Parameter(torch.empty_like(tied), requires_grad=tied.requires_grad)
            )
            del model.all_tied_weights_keys[target]


def _are_tensors_equal(key_a: str, key_b: str, entries: dict[str, TensorEntry]) -> bool:
    """True if two tensors of the files have the same values, compared a few rows at a time."""
    from safetensors import safe_open

    a, b = entries[key_a], entries[key_b]
    if a.shape != b.shape:
        return False
    with safe_open(a.file, "pt") as file_a, safe_open(b.file, "pt") as file_b:
        rows_a, rows_b = open_slice(file_a, key_a, a), open_slice(file_b, key_b, b)
        rows = max(1, (4 << 20) // max(1, a.bytes // max(1, a.shape[0])))
        return all(torch.equal(rows_a[s : s + rows], rows_b[s : s + rows]) for s in range(0, a.shape[0], rows))


def canonical_name(name: str) -> str:
    """Return a parameter's or module's name as in the backbone, without the parts added by wrappers.

    Removes PEFT's prefix, adapter name, `base_layer` and `modules_to_save`, checkpoint wrappers and a pipeline's
    `part0.`: `part1.base_model.model.model.layers.3.q_proj.base_layer.weight` → `model.layers.3.q_proj.weight`.
    """
    name = _WRAPPER.sub("", _PART.sub("", name))
    name = _BASE_LAYER.sub("", name.removeprefix("base_model.model."))
    name = name.replace(".modules_to_save.default", "").replace(".original_module", "").replace(".default", "")
    return f"{name}.weight" if name.endswith(".lora_magnitude_vector") else name
