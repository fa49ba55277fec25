"""Which tensor of a checkpoint belongs to which tensor of a model, by transformers' own renaming rules.

transformers renames between a checkpoint and its modules (ViT), adds or drops the base model's prefix (GPT-2 from the
hub), ties weights of which the files have only one, and converts (experts that are stacked). The result here is what
`from_pretrained` would do, decided from names and shapes alone.
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
# not where PEFT nests adapters of stacked experts: `experts.base_layer.lora_A` beside `experts.lora_A`


@dataclass(frozen=True)
class CheckpointFiles:
    """A checkpoint directory as seen by one model. Names are the model's before anything is wrapped or cut."""

    directory: Path
    entries: dict[str, TensorEntry]
    """The files' tensors, by the name that they have there."""
    keys: dict[str, str]
    """Model name → name in the files, for all that can be read as it is; of tied weights every name."""
    converted: tuple[str, ...]
    """Model names whose tensors transformers makes out of several or parts of one; `from_pretrained` is needed."""
    missing: tuple[str, ...]
    """Model names that the files lack."""
    mismatched: tuple[str, ...]
    """Model names that the files have in another shape."""
    shapes: dict[str, tuple[int, ...]]
    """Whole shape of every parameter and persistent buffer of the model."""
    model_class: type[PreTrainedModel]
    config: PretrainedConfig
    dtype: torch.dtype

    @classmethod
    def of(cls, model: PreTrainedModel, directory: Path) -> CheckpointFiles:
        """Match the files of `directory` with `model`, plain and whole, on meta.

        A tie of weights that the files hold with different values is undone in `model`, as transformers does.

        Raises:
            UserError: as `read_index`.
        """
        entries = read_index(directory)
        state = model.state_dict()
        keys, converted = _match(model, sorted(entries, key=_natural), state)
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


def _natural(key: str) -> list[tuple[int, int | str]]:
    """Sorts `layers.10` behind `layers.9`, as transformers goes through a checkpoint."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in key.split(".")]


def _match(model: PreTrainedModel, names: list[str], state: dict[str, Any]) -> tuple[dict[str, str], set[str]]:
    """Model name → file name, and the model names for which a conversion is needed."""
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
            # one source may become several tensors; their names differ where the target patterns do
            made = {name.replace(targets[pattern][0], target) for target in targets[pattern]}
            converted |= made & state.keys()
        elif name in state:
            keys.setdefault(name, key)
    return {name: key for name, key in keys.items() if name not in converted}, converted


def expert_sources(model: PreTrainedModel, checkpoint: CheckpointFiles, name: str) -> list[list[str]]:
    """The files' keys of the parameter `name` (E, out, in) that transformers stacks: for each projection that lies in
    it, from above, the keys of its experts in order. Empty where it is made in any other way."""
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
    for key in sorted(checkpoint.entries, key=_natural):
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


def read_weight(model: PreTrainedModel) -> Callable[[str], Tensor]:
    """Reads a weight of a skeleton (`flatshift.finetune.models.meta.build_skeleton`) from its files, by its name in the
    model.

    Raises UserError, when it is called, for one that transformers makes of several otherwise than by stacking experts.
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
        parts = expert_sources(model, checkpoint, name)
        if not parts:
            raise UserError(f"{checkpoint.directory}: {name} can only be read with all other weights")
        return torch.cat([torch.stack([tensor(key) for key in keys]) for keys in parts], dim=1)

    return read


def _untie_different(model: PreTrainedModel, keys: dict[str, str], entries: dict[str, TensorEntry]) -> None:
    for target, source in list(model.all_tied_weights_keys.items()):
        if target not in keys or source not in keys or keys[target] == keys[source]:
            continue
        if not _equal(keys[target], keys[source], entries):
            owner, _, leaf = target.rpartition(".")
            tied = model.get_parameter(target)
            setattr(
                model.get_submodule(owner), leaf, nn.Parameter(torch.empty_like(tied), requires_grad=tied.requires_grad)
            )
            del model.all_tied_weights_keys[target]


def _equal(one: str, other: str, entries: dict[str, TensorEntry]) -> bool:
    """Whether two tensors of the files have the same values, compared some rows at a time."""
    from safetensors import safe_open

    a, b = entries[one], entries[other]
    if a.shape != b.shape:
        return False
    with safe_open(a.file, "pt") as first, safe_open(b.file, "pt") as second:
        left, right = first.get_slice(one), second.get_slice(other)
        rows = max(1, (4 << 20) // max(1, a.bytes // max(1, a.shape[0])))
        starts = range(0, a.shape[0], rows)
        return all(torch.equal(left[s : s + rows], right[s : s + rows]) for s in starts)


def canonical(name: str) -> str:
    """A parameter's or module's name as in the backbone, whatever wraps it.

    PEFT's prefix, adapter name, `base_layer` and `modules_to_save`, checkpoint wrappers and a pipeline's `part0.` go:
    `part1.base_model.model.model.layers.3.q_proj.base_layer.weight` → `model.layers.3.q_proj.weight`.
    """
    name = _WRAPPER.sub("", _PART.sub("", name))
    name = _BASE_LAYER.sub("", name.removeprefix("base_model.model."))
    name = name.replace(".modules_to_save.default", "").replace(".original_module", "").replace(".default", "")
    return f"{name}.weight" if name.endswith(".lora_magnitude_vector") else name
