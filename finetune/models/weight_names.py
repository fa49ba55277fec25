"""Match the tensors of a checkpoint with those of a model, by transformers' own renaming rules.

transformers renames between a checkpoint and its modules (ViT), adds or drops the base model's prefix (GPT-2 from the
hub), ties weights that the files hold only once, and converts (stacked experts). The result equals that of
`from_pretrained`, derived from names and shapes alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from .safetensors_index import TensorEntry, read_index

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

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
    """Model name → name in the files, for every tensor that can be read as is; tied weights have an entry for every
    name."""
    converted: tuple[str, ...]
    """Model names whose tensors transformers builds from several or from parts of one; these need `from_pretrained`."""
    missing: tuple[str, ...]
    """Model names missing from the files."""
    mismatched: tuple[str, ...]
    """Model names with another shape in the files."""
    shapes: dict[str, tuple[int, ...]]
    """Unsharded shape of every parameter and persistent buffer of the model."""
    model_class: type[PreTrainedModel]
    config: PretrainedConfig
    dtype: torch.dtype

    @classmethod
    def of(cls, model: PreTrainedModel, directory: Path) -> CheckpointFiles:
        """Match the files of `directory` with `model`, unwrapped and unsharded, on meta.

        Weights that are tied in `model` but have different values in the files are untied, as in transformers.

        Raises:
            UserError: as `read_index`.
        """
        entries = read_index(directory)
        state = model.state_dict()
        keys, converted = _match_names(model, sorted(entries, key=_natural_sort_key), state)
        _untie_different(model, keys, entries)
        for target, source in model.all_tied_weights_keys.items():
            for name, other in ((target, source), (source, target)):
                if name in state and name not in keys and other in keys:
                    keys[name] = keys[other]
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        mismatched = {name for name, key in keys.items() if entries[key].shape != shapes[name]}
        optional = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
        missing = [name for name in state if name not in keys and name not in converted]
        missing = [name for name in missing if not any(pattern.search(name) for pattern in optional)]
        return cls(
            directory=directory,
            entries=entries,
            keys={name: key for name, key in keys.items() if name not in mismatched},
            converted=tuple(name for name in state if name in converted),
            missing=tuple(missing),
            mismatched=tuple(sorted(mismatched)),
            shapes=shapes,
            model_class=type(model),
            config=model.config,
            dtype=model.dtype,
        )


def _natural_sort_key(key: str) -> list[tuple[int, int | str]]:
    """Return a sort key that puts `layers.10` after `layers.9`, the order in which transformers reads a checkpoint."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in key.split(".")]


def _match_names(model: PreTrainedModel, names: list[str], state: dict[str, Any]) -> tuple[dict[str, str], set[str]]:
    """Return model name → file name, and the model names that need a conversion."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    targets = {pattern: rule.target_patterns for rule in converters for pattern in rule.source_patterns}
    prefix = model.base_model_prefix
    keys: dict[str, str] = {}
    converted: set[str] = set()
    for key in names:
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if pattern is not None:
            # one source may become several tensors, one name per target pattern
            made = {name.replace(targets[pattern][0], target) for target in targets[pattern]}
            converted |= made & state.keys()
        elif name in state:
            keys.setdefault(name, key)
    return {name: key for name, key in keys.items() if name not in converted}, converted


def stacked_expert_keys(model: PreTrainedModel, checkpoint: CheckpointFiles, name: str) -> list[list[str]]:
    """Return the files' keys of the parameter `name` (E, out, in) that transformers stacks: for each projection in it,
    top to bottom, the keys of its experts in order. Empty if it is built in any other way."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        Concatenate,
        MergeModulelist,
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    state = model.state_dict()
    keys: dict[str, list[str]] = {}
    for key in sorted(checkpoint.entries, key=_natural_sort_key):
        made, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if made == name and pattern is not None:
            keys.setdefault(pattern, []).append(key)
    for rule in converters:
        if keys and set(rule.source_patterns) == set(keys):
            steps = [(type(step), step.dim) for step in rule.operations if hasattr(step, "dim")]
            whole = len(steps) == len(rule.operations)
            if whole and steps in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]):
                return [keys[pattern] for pattern in rule.source_patterns]
    return []


def weight_reader(model: PreTrainedModel) -> Callable[[str], Tensor]:
    """Return a function that reads a weight of a skeleton (`flatshift.finetune.models.meta.build_skeleton`) from its
    files, by its name in the model.

    When called, it raises UserError for a tensor that transformers builds from several in a way other than stacking
    experts.
    """
    from safetensors import safe_open

    checkpoint: Any = model.checkpoint  # type: ignore[assignment]

    def tensor(key: str) -> Tensor:
        with safe_open(checkpoint.entries[key].file, "pt") as file:
            found: Tensor = file.get_tensor(key)
        return found

    def read(name: str) -> Tensor:
        if name in checkpoint.keys:
            return tensor(checkpoint.keys[name])
        parts = stacked_expert_keys(model, checkpoint, name)
        if not parts:
            raise UserError(f"{checkpoint.directory}: {name} can only be read with all other weights")
        return torch.cat([torch.stack([tensor(key) for key in keys]) for keys in parts], dim=1)

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


def _are_tensors_equal(one: str, other: str, entries: dict[str, TensorEntry]) -> bool:
    """True if two tensors of the files have the same values, compared a few rows at a time."""
    from safetensors import safe_open

    a, b = entries[one], entries[other]
    if a.shape != b.shape:
        return False
    with safe_open(a.file, "pt") as first, safe_open(b.file, "pt") as second:
        left, right = first.get_slice(one), second.get_slice(other)
        rows = max(1, (4 << 20) // max(1, a.bytes // max(1, a.shape[0])))
        starts = range(0, a.shape[0], rows)
        return all(torch.equal(left[s : s + rows], right[s : s + rows]) for s in starts)


def canonical_name(name: str) -> str:
    """Return a parameter's or module's name as in the backbone, without the parts added by wrappers.

    Removes PEFT's prefix, adapter name, `base_layer` and `modules_to_save`, checkpoint wrappers and a pipeline's
    `part0.`: `part1.base_model.model.model.layers.3.q_proj.base_layer.weight` → `model.layers.3.q_proj.weight`.
    """
    name = _WRAPPER.sub("", _PART.sub("", name))
    name = _BASE_LAYER.sub("", name.removeprefix("base_model.model."))
    name = name.replace(".modules_to_save.default", "").replace(".original_module", "").replace(".default", "")
    return f"{name}.weight" if name.endswith(".lora_magnitude_vector") else name
