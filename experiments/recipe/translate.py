"""Recipes from the YAML of axolotl and LLaMA-Factory: each of its keys becomes a setting, a note or an unknown key."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatshift.experiments.recipe.build import to_python
from flatshift.experiments.recipe.resolve import apply_overrides, recipe_tree, resolve_tree
from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.recipe.tree import Branch, Leaf, Tree, dump, from_mapping, merge, parse_file
from flatshift.finetune.atomic import read_json_object
from flatshift.finetune.data.formats import HUB
from flatshift.finetune.errors import UserError

_FILES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".md", ".gz", ".xz", ".zst")
_OBJECTIVES = ("dpo", "ipo", "kto", "simpo", "orpo")
_BATCH = "train.batch_size is that of all devices together: multiply it by their number"


@functools.cache
def _read_table() -> dict[str, Any]:
    """Return translate.yaml, with the note of each key."""
    table = to_python(parse_file(Path(__file__).with_suffix(".yaml")))
    notes = {key: note for note, keys in table["notes"].items() for key in _flatten(keys)}
    return {**table, "notes": notes}


@dataclass(frozen=True)
class Translated:
    """A recipe made from the YAML of another tool."""

    tool: str
    recipe: dict[str, Any]
    text: str
    """The recipe as YAML, with the notes as comments."""
    notes: tuple[str, ...]
    unknown: tuple[str, ...]
    """FILE:LINE and key of each setting without a counterpart."""


@dataclass
class _Translation:
    """Settings, notes and unknown keys of a file so far."""

    file: Path
    keys: Branch
    settings: Branch
    notes: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def set(self, values: Mapping[str, Any], location: str) -> None:
        """Set settings by dotted keys, over those so far."""
        for key, value in values.items():
            merged = merge(self.settings, from_mapping({key: value}, location))
            assert isinstance(merged, Branch)
            self.settings = merged

    def reject(self, key: str, tree: Tree, hint: str | None = None) -> None:
        """Report a key, or a value of it, that has no counterpart."""
        value = f": {tree.text}" if isinstance(tree, Leaf) else ""
        hint = hint or _read_table()["hints"].get(key)
        location = self.keys.keys.get(key, tree.location)  # of the key, where its value begins in the next line
        self.unknown.append(f"{location}: {key}{value}" + (f" ({hint})" if hint else ""))

    def value(self, key: str) -> Any:
        """Return the value of a key of the file; None if it is absent or empty."""
        tree = self.keys.children.get(key)
        return None if tree is None else to_python(tree) or None

    @property
    def steps(self) -> int | None:
        """Number of steps that takes the place of epochs; None: epochs count."""
        steps = self.value("max_steps")
        return steps if isinstance(steps, int) and steps > 0 else None


def translate_recipe(file: Path) -> Translated:
    """Translate a YAML file of axolotl or LLaMA-Factory, known by its keys.

    Raises UserError with file:line for a file of neither tool, an objective that recipes lack, and a value that no
    recipe takes.
    """
    tree = parse_file(file)
    if not isinstance(tree, Branch):
        raise UserError(f"{file}:1: a recipe is a mapping of settings")
    if "base_model" in tree.children:
        tool = "axolotl"
    elif "model_name_or_path" in tree.children:
        tool = "LLaMA-Factory"
    else:
        raise UserError(f"{file} is neither of axolotl (no base_model) nor of LLaMA-Factory (no model_name_or_path)")
    translation = _Translation(file, tree, Branch({}, str(file)), [_BATCH])
    table = _read_table()
    same = table["same"] | table[tool]["same"]
    translation.set(table["defaults"] | table[tool]["defaults"], f"{file}: {tool}'s default")
    lengths = {"num_epochs", "num_train_epochs"}  # first: intervals of evaluation are fractions of them
    for key, child in sorted(tree.children.items(), key=lambda item: item[0] not in lengths):
        if not (isinstance(child, Leaf) and child.value in (None, "")):
            _translate_key(translation, key, child, same)
    if tool == "axolotl" and translation.value("adapter") is None:
        translation.unknown.append(f"{file}:1: adapter is not set ({table['hints']['adapter']})")
    _settle_packing(translation)
    settings = translation.settings
    base = to_python(settings)["extends"]
    resolve_tree(apply_overrides(recipe_tree(base), [settings]), (), name=file.stem)
    values = to_python(settings)
    recipe = {key.name: values[key.name] for key in dataclasses.fields(Recipe) if key.name in values}
    notes = "".join(f"# {note}\n" for note in translation.notes)
    text = f"# Translated from {file.name} of {tool}\n{notes}{dump(recipe)}"
    return Translated(tool, recipe, text, tuple(translation.notes), tuple(translation.unknown))


def _translate_key(translation: _Translation, key: str, tree: Tree, same: Mapping[str, str]) -> None:
    value, table = to_python(tree), _read_table()
    if key in _SPECIAL:
        _SPECIAL[key](translation, key, tree)
    elif key in same:
        translation.set({same[key]: value}, tree.location)
    elif key in table["choices"]:
        name = str(value).lower() if isinstance(value, bool) else str(value)
        settings = table["choices"][key].get(name)
        if settings is None:
            translation.reject(key, tree)
        else:
            translation.set(settings, tree.location)
    elif key in table["notes"]:
        translation.notes.append(f"{key}: {table['notes'][key]}")
    else:
        translation.reject(key, tree)


def _epochs(translation: _Translation, key: str, tree: Tree) -> None:
    if translation.steps is None:
        translation.set({"train.epochs": to_python(tree)}, tree.location)
    else:
        translation.notes.append(f"{key}: max_steps takes its place")


def _steps(translation: _Translation, key: str, tree: Tree) -> None:
    if not isinstance(to_python(tree), int):
        translation.reject(key, tree)
    elif translation.steps is not None:  # -1: not set
        translation.set({"train.epochs": None, "train.steps": translation.steps}, tree.location)


def _warmup_steps(translation: _Translation, key: str, tree: Tree) -> None:
    warmup = to_python(tree)
    if isinstance(warmup, int | float) and 0 <= warmup < 1:  # a fraction already
        translation.set({"optimizer.warmup": float(warmup)}, tree.location)
    elif isinstance(warmup, int) and translation.steps is not None:
        translation.set({"optimizer.warmup": warmup / translation.steps}, tree.location)
    else:
        translation.reject(key, tree)


def _samples(translation: _Translation, key: str, tree: Tree) -> None:
    if "," in str(translation.value("dataset")):
        translation.reject(key, tree, "it caps each data set; set `first` of each of data.train.sources")
        return
    translation.set({"data.train.first": to_python(tree)}, tree.location)
    translation.notes.append(f"{key}: data.train.first is refused above the number of rows; leave it out then")


def _settle_packing(translation: _Translation) -> None:
    """Leave packing out where rows are pairs of answers; LLaMA-Factory packs plain text if nothing is said."""
    task = translation.settings.children.get("task")
    base = to_python(translation.settings)["extends"]
    if base == "preference" and isinstance(task, Branch) and (pack := task.children.pop("pack", None)) is not None:
        if to_python(pack):
            translation.notes.append("packing: pairs of answers are not packed")
    elif base == "language-model" and translation.value("stage") == "pt" and "packing" not in translation.keys.children:
        translation.set({"task.pack": True}, "LLaMA-Factory's default of stage: pt")


def _holdout(translation: _Translation, key: str, tree: Tree) -> None:
    share = to_python(tree)
    if isinstance(share, int | float) and share < 1:
        translation.set({"data.holdout": share}, tree.location)
    else:
        translation.reject(key, tree, "data.holdout is a share of the rows")


def _evaluations(translation: _Translation, key: str, tree: Tree) -> None:
    """Set the interval of `evals_per_epoch`, or of `eval_strategy: epoch`, as a fraction of the steps."""
    count = to_python(tree)
    if key == "eval_strategy" and count != "epoch":
        settings = {"no": {"train.eval_every": 0}, "steps": {}}.get(count)
    else:
        epochs = to_python(translation.settings)["train"]["epochs"]
        times = 1 if count == "epoch" else count
        is_counted = isinstance(times, int | float) and translation.steps is None
        settings = {"train.eval_every": 1 / (times * epochs) if times * epochs > 1 else 0} if is_counted else None
    if settings is None:
        translation.reject(key, tree)
    else:
        translation.set(settings, tree.location)


def _clip(translation: _Translation, key: str, tree: Tree) -> None:
    translation.set({"optimizer.clip": to_python(tree) or None}, tree.location)


def _betas(translation: _Translation, key: str, tree: Tree) -> None:
    betas = [translation.value("adam_beta1") or 0.9, translation.value("adam_beta2") or 0.999]
    translation.set({"optimizer.betas": betas}, tree.location)


def _noise(translation: _Translation, key: str, tree: Tree) -> None:
    translation.set({"regularizer.kind": "neftune", "regularizer.alpha": to_python(tree)}, tree.location)


def _wandb(translation: _Translation, key: str, tree: Tree) -> None:
    translation.set({"tracker.kinds": ["wandb"], "tracker.project": to_python(tree)}, tree.location)


def _modules(translation: _Translation, key: str, tree: Tree) -> None:
    """Set the layers of adapters, or those that are trained whole: a list, or names between commas; `all`: all."""
    names = to_python(tree)
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    setting = "adapter.train_whole" if key == "additional_target" else "adapter.targets"
    everything = setting == "adapter.targets" and names in (["all"], ["all-linear"])
    translation.set({setting: "all-linear" if everything else names}, tree.location)


def _objective(translation: _Translation, key: str, tree: Tree) -> None:
    """Choose the recipe to extend by axolotl's `rl` or LLaMA-Factory's `stage`."""
    name = to_python(tree)
    if name in _OBJECTIVES:
        loss = {"extends": "preference", "task.loss": name, "task.chat": True, "task.answer": "{answer}"}
        translation.set(loss, tree.location)
    elif name == "pt":
        translation.set({"extends": "language-model"}, tree.location)
    elif name != "sft":
        raise UserError(f"{tree.location}: {key} {name} has no recipe; sft, pt, {', '.join(_OBJECTIVES)} have one")


def _datasets(translation: _Translation, key: str, tree: Tree) -> None:
    """Set the rows of axolotl's `datasets` or `test_datasets`, and the recipe to extend by their type."""
    names, table = list[str](), _read_table()
    for item in getattr(tree, "items", ()):
        known = item.children if isinstance(item, Branch) else {}
        values = {name: to_python(child) for name, child in known.items()}
        names += _dataset_names(values)
        is_paired = translation.value("rl") is not None
        types, read = table["types"], table["read"]
        read = read | ({"type": [*types, "chat_template.default"]} if is_paired else {"field_messages": []})
        for name, child in known.items():
            if name in read and set(_flatten(values[name])) <= set(read[name]):
                continue
            if name == "type" and str(values[name]) in types:
                translation.set({"extends": types[values[name]]}, child.location)
            elif name == "field_messages" and is_paired:
                translation.reject(f"{key}.{name}", child, "rename the column to prompt")
            elif name == "field_messages":
                translation.set({"data.columns.messages": values[name]}, child.location)
            elif name == "field":
                translation.set({"data.columns.text": values[name]}, child.location)
            elif name not in ("path", "data_files", "name", "split", "ds_type") and values[name] is not None:
                translation.reject(f"{key}.{name}", child)
    translation.set({"data.train.files" if key == "datasets" else "data.dev.files": names}, tree.location)


def _flatten(value: Any) -> list[Any]:
    """Return the values in lists and mappings of any depth."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return [value] if parts is None else [inner for part in parts for inner in _flatten(part)]


def _dataset_names(values: Mapping[str, Any]) -> list[str]:
    """Return the files of a data set, or its name on the hub."""
    if files := values.get("data_files"):
        return [files] if isinstance(files, str) else files
    path = str(values.get("path"))
    if path.endswith(_FILES) or Path(path).exists():
        return [path]
    return [
        f"{HUB}{path}" + (f"[{values['name']}]" if values.get("name") else "") + f":{values.get('split') or 'train'}"
    ]


def _named_datasets(translation: _Translation, key: str, tree: Tree) -> None:
    """Set the rows of LLaMA-Factory's `dataset` or `eval_dataset`: names in dataset_info.json."""
    folder = Path(translation.value("dataset_dir") or "data")
    folder = folder if folder.is_dir() else translation.file.parent / folder
    index = folder / "dataset_info.json"
    if not index.is_file():
        translation.reject(key, tree, f"there is no {index}; name the files with --data")
        return
    known, names = read_json_object(index), []
    for name in (part.strip() for part in str(to_python(tree)).split(",")):
        entry = known.get(name, {})
        if "file_name" in entry:
            names.append(str(folder / entry["file_name"]))
        elif "hf_hub_url" in entry:
            names += _dataset_names(
                {"path": entry["hf_hub_url"], "name": entry.get("subset"), "split": entry.get("split")}
            )
        else:
            translation.reject(key, tree, f"{index} names no file or hub data set of {name}")
        if "messages" in entry.get("columns", {}) and translation.value("stage") == "kto":
            translation.reject(key, tree, f"{name}: kto reads the columns prompt, completion and label")
        elif "columns" in entry:
            translation.notes.append(f"{name}: columns are recognised by their names, else set data.columns")
    translation.set({"data.train.files" if key == "dataset" else "data.dev.files": names}, tree.location)


_SPECIAL: dict[str, Callable[[_Translation, str, Tree], None]] = {
    **dict.fromkeys(("num_epochs", "num_train_epochs"), _epochs),
    **dict.fromkeys(("evals_per_epoch", "eval_strategy"), _evaluations),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), _betas),
    **dict.fromkeys(("lora_target_modules", "lora_target", "additional_target"), _modules),
    **dict.fromkeys(("rl", "stage"), _objective),
    **dict.fromkeys(("datasets", "test_datasets"), _datasets),
    **dict.fromkeys(("dataset", "eval_dataset"), _named_datasets),
    "max_samples": _samples,
    "max_steps": _steps,
    "warmup_steps": _warmup_steps,
    **dict.fromkeys(("val_set_size", "val_size"), _holdout),
    "max_grad_norm": _clip,
    "neftune_noise_alpha": _noise,
    "wandb_project": _wandb,
}
"""Keys that need more than a new name."""
