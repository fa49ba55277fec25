"""Recipes from the YAML of axolotl, LLaMA-Factory and torchtune: each of its keys becomes a setting, a note or an
unknown key."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatshift.experiments.recipe.build import to_python
from flatshift.experiments.recipe.resolve import recipe_tree, resolve_tree
from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.recipe.tree import Branch, Items, Leaf, Tree, dump, from_mapping, merge, parse_file
from flatshift.finetune.atomic import read_json_object
from flatshift.finetune.data.files import expand_files
from flatshift.finetune.data.formats import HUB, count_records
from flatshift.finetune.errors import UserError, is_remote

_FILES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".md", ".gz", ".xz", ".zst")
_OBJECTIVES = ("dpo", "ipo", "kto", "simpo", "orpo")
_BATCH = "train.batch_size is that of all devices together: multiply it by their number"
_FEWER = "max_samples: data.train.first is refused above the number of rows; leave it out then"


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

    def value(self, key: str, default: Any = None) -> Any:
        """Return the value of a key of the file; `default` if it is absent or empty."""
        value = to_python(self.keys.children.get(key, Leaf(None, "", "")))
        return default if value in (None, "") else value

    @property
    def max_steps(self) -> int | None:
        """Number of steps that takes the place of epochs; None: epochs count."""
        steps, of_each = self.value("max_steps"), self.value("max_steps_per_epoch")
        if isinstance(of_each, int):
            steps = of_each * (self.value("epochs") or 1)
        return steps if isinstance(steps, int) and steps > 0 else None

    def count_steps(self) -> int | None:
        """Return the number of steps: that of the file, else of its epochs of rows that can be counted; else None."""
        settings = to_python(self.settings)
        data, train = settings["data"], settings["train"]
        sizes = [_count_used(each) for each in data["train"].get("sources", {"": data["train"]}).values()]
        numbers = [train[name] for name in ("epochs", "batch_size", "accumulate")]
        is_counted = all(isinstance(number, int | float) and 0 < number < math.inf for number in numbers)
        if self.max_steps is not None or None in sizes or not is_counted or settings.get("task", {}).get("pack"):
            return self.max_steps
        rows = sum(size for size in sizes if size is not None)
        rows -= round(rows * data["holdout"]) if not data["dev"]["files"] else 0
        return math.ceil(train["epochs"] * rows / (train["batch_size"] * train["accumulate"])) or None


def _count_used(rows: Mapping[str, Any]) -> int | None:
    """Return the number of training rows that `files`, `first` and `limit` have; None: not known here."""
    cap: int | None = rows.get("limit") or rows.get("first")
    return cap or _count_rows(rows["files"])


@dataclass(frozen=True)
class _RowSet:
    """Rows of one data set; `form`: rows of the same form can be read together."""

    name: str
    files: list[str]
    form: Any = None
    columns: dict[str, str] = field(default_factory=dict)
    first: int | None = None
    limit: int | None = None


def translate_recipe(file: Path) -> Translated:
    """Translate a YAML file of axolotl, LLaMA-Factory or torchtune, known by its keys.

    Raises UserError with file:line for a file of none of them, an objective that recipes lack, and a value that no
    recipe takes.
    """
    tree = _change_leaves(parse_file(file), _read_yaml_1_1)
    if not isinstance(tree, Branch):
        raise UserError(f"{file}:1: a recipe is a mapping of settings")
    if "base_model" in tree.children:
        tool = "axolotl"
    elif "model_name_or_path" in tree.children:
        tool = "LLaMA-Factory"
    elif "_component_" in getattr(tree.children.get("model"), "children", {}):
        tool, tree = "torchtune", _flatten_components(tree)
    else:
        raise UserError(
            f"{file} is of no known tool: axolotl's have base_model, LLaMA-Factory's model_name_or_path, torchtune's "
            "model._component_"
        )
    translation = _Translation(file, tree, Branch({}, str(file)), [_BATCH])
    table = _read_table()
    same = table["same"] | table[tool]["same"]
    translation.set(table["defaults"] | table[tool]["defaults"], f"{file}: {tool}'s default")
    for key, child in sorted(tree.children.items(), key=lambda item: table["order"].get(item[0], 0)):
        if to_python(child) not in (None, "", [], {}):
            try:
                _translate_key(translation, key, child, same)
            except UserError:
                raise
            except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError):
                translation.reject(key, child, "its value is not of the form that the tool takes")
    if tool == "axolotl" and translation.value("adapter") is None:
        translation.unknown.append(f"{file}:1: adapter is not set ({table['hints']['adapter']})")
    if tool == "torchtune" and translation.value("tokenizer.max_seq_len") is None:
        translation.notes.append("tokenizer.max_seq_len: train.max_length is that of the recipe it extends; set yours")
    _settle_packing(translation)
    _settle_length(translation)
    settings = translation.settings
    values = to_python(settings)
    own = {key: tree for key, tree in settings.children.items() if key != "extends"}
    resolve_tree(recipe_tree(values["extends"]), [dataclasses.replace(settings, children=own)], name=file.stem)
    if "sources" in values["data"]["train"]:
        del values["data"]["train"]["files"]
    recipe = {key.name: values[key.name] for key in dataclasses.fields(Recipe) if key.name in values}
    notes = "".join(f"# {note}\n" for note in translation.notes)
    text = f"# Translated from {file.name} of {tool}\n{notes}{dump(recipe)}"
    return Translated(tool, recipe, text, tuple(translation.notes), tuple(translation.unknown))


def _change_leaves(tree: Tree, change: Callable[[str, Any], Any], key: str = "") -> Tree:
    """Return the tree with the value of each scalar changed, by the key that it is of."""
    if isinstance(tree, Branch):
        children = {name: _change_leaves(each, change, name) for name, each in tree.children.items()}
        return dataclasses.replace(tree, children=children)
    if isinstance(tree, Items):
        return dataclasses.replace(tree, items=tuple(_change_leaves(each, change, key) for each in tree.items))
    return dataclasses.replace(tree, value=change(key, tree.value))


def _read_yaml_1_1(key: str, value: Any) -> Any:
    """Return `1_000` as a number, and `yes` and `no` as true and false except for strategies."""
    text, words = str(value).lower(), {} if key.endswith("_strategy") else _read_table()["words"]
    return int(text) if re.fullmatch(r"[-+]?\d{1,3}(_\d{3}){1,5}", text) else words.get(text, value)


def _translate_key(translation: _Translation, key: str, tree: Tree, same: Mapping[str, str]) -> None:
    value, table = to_python(tree), _read_table()
    parts = value if isinstance(value, dict) else _flatten(value)
    if key in _SPECIAL:
        _SPECIAL[key](translation, key, tree)
    elif key in same:
        loss = to_python(translation.settings).get("task", {}).get("loss")
        setting = table["weights"].get(f"{loss}.{key}", same[key])
        if loss not in table["losses"].get(setting, [loss]) or (key == "save_steps" and 0 < value < 1):
            translation.reject(key, tree)
        else:
            translation.set({setting: value} | table["with"].get(key, {}), tree.location)
    elif key in table["choices"]:
        name = str(value).lower() if isinstance(value, bool) else str(value)
        settings = table["choices"][key].get(name)
        if settings is None:
            translation.reject(key, tree)
        else:
            translation.set(settings, tree.location)
    elif key in table["notes"] and (key not in table["parts"] or set(parts) <= set(table["parts"][key])):
        translation.notes.append(f"{key}: {table['notes'][key]}")
    else:
        translation.reject(key, tree)


def _epochs(translation: _Translation, key: str, tree: Tree) -> None:
    if translation.max_steps is None:
        translation.set({"train.epochs": to_python(tree)}, tree.location)
    else:
        translation.notes.append(f"{key}: max_steps takes its place")


def _steps(translation: _Translation, key: str, tree: Tree) -> None:
    if not isinstance(to_python(tree), int):
        translation.reject(key, tree)
    elif translation.max_steps is not None:  # -1: not set
        translation.set({"train.epochs": None, "train.steps": translation.max_steps}, tree.location)


def _warmup_steps(translation: _Translation, key: str, tree: Tree) -> None:
    warmup, steps = to_python(tree), translation.count_steps()
    if warmup == 0 and translation.value("warmup_ratio"):  # which counts then
        return
    if isinstance(warmup, int | float) and 0 <= warmup < 1:  # a fraction already
        translation.set({"optimizer.warmup": float(warmup)}, tree.location)
    elif isinstance(warmup, int) and steps is not None and warmup <= steps:
        translation.set({"optimizer.warmup": round(warmup / steps, 4)}, tree.location)
        translation.notes.append(f"{key}: {warmup} of {steps} steps")
    else:
        translation.reject(key, tree)


def _samples(translation: _Translation, key: str, tree: Tree) -> None:
    if translation.value("dataset") is None or not _find_index(translation).is_file():
        translation.set({"data.train.first": to_python(tree)}, tree.location)
        translation.notes.append(_FEWER)


def _settle_packing(translation: _Translation) -> None:
    """Leave packing out where rows are pairs of answers."""
    task, base = translation.settings.children.get("task"), to_python(translation.settings)["extends"]
    if base == "preference" and to_python(getattr(task, "children", {}).pop("pack", Leaf(None, "", ""))):
        translation.notes.append("packing: pairs of answers are not packed")


def _settle_length(translation: _Translation) -> None:
    """Replace epochs by steps where rows are mixed: sources end their epochs at different times."""
    settings = to_python(translation.settings)
    epochs = settings["train"]["epochs"]
    if "sources" not in settings["data"]["train"] or epochs is None:
        return
    steps, location = translation.count_steps(), f"{translation.file}:1"
    if steps is None:
        translation.unknown.append(f"{location}: epochs, {epochs} (a mixture of sources has none: set train.steps)")
    else:
        translation.notes.append(f"train.steps are {epochs} epochs of all rows")
    translation.set({"train.epochs": None, **({} if steps is None else {"train.steps": steps})}, location)


def _holdout(translation: _Translation, key: str, tree: Tree) -> None:
    share = to_python(tree)
    if isinstance(share, int | float) and share < 1:
        splits = {"data.holdout_splits": ["dev"]} if share else {}
        translation.set({"data.holdout": share, **splits}, tree.location)
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
        is_counted = isinstance(times, int | float) and translation.max_steps is None
        settings = {"train.eval_every": 1 / (times * epochs) if times * epochs > 1 else 0} if is_counted else None
    if settings is None:
        translation.reject(key, tree)
    else:
        translation.set(settings, tree.location)


def _clip(translation: _Translation, key: str, tree: Tree) -> None:
    translation.set({"optimizer.clip": to_python(tree) or None}, tree.location)


def _betas(translation: _Translation, key: str, tree: Tree) -> None:
    betas = [translation.value("adam_beta1", 0.9), translation.value("adam_beta2", 0.999)]
    translation.set({"optimizer.betas": betas}, tree.location)


def _modules(translation: _Translation, key: str, tree: Tree) -> None:
    """Set the layers of adapters, or those that are trained whole: a list, or names between commas; `all`: all."""
    names = to_python(tree)
    if isinstance(names, str) and re.search(r"[\[\](|*+\\]", names):
        return translation.reject(key, tree, "a pattern; list the names")
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    setting = "adapter.train_whole" if key == "additional_target" else "adapter.targets"
    everything = setting == "adapter.targets" and names in (["all"], ["all-linear"])
    translation.set({setting: "all-linear" if everything else names}, tree.location)


def _objective(translation: _Translation, key: str, tree: Tree) -> None:
    """Choose the recipe to extend by axolotl's `rl` or LLaMA-Factory's `stage`."""
    name = to_python(tree)
    if name in _OBJECTIVES:
        loss = {"extends": "preference", "task.loss": name, "task.chat": True, "task.answer": "{answer}"}
        translation.set(loss | _read_table()["choices"]["pref_loss"].get(name, {}), tree.location)
        if name == "simpo" and translation.value("cpo_alpha") is None:
            translation.reject("cpo_alpha", Leaf(1.0, "1.0, by default", tree.location))
    elif name == "pt":
        translation.set({"extends": "language-model", "task.pack": True}, tree.location)  # unless `packing` says no
    elif name != "sft":
        raise UserError(f"{tree.location}: {key} {name} has no recipe; sft, pt, {', '.join(_OBJECTIVES)} have one")


def _set_rows(translation: _Translation, key: str, tree: Tree, sets: Sequence[_RowSet]) -> None:
    """Set training rows (`dataset`, `datasets`) or dev rows: files of one form together, else sources, weighted by
    their numbers of rows."""
    split = "train" if key in ("dataset", "datasets") else "dev"
    head = dataclasses.replace(sets[0], name="", files=[])
    are_alike = all(dataclasses.replace(each, name="", files=[]) == head for each in sets)
    if split == "train" and len(sets) > 1 and (not are_alike or head.first or head.limit):
        sizes = [_count_used(vars(each)) for each in sets]
        if None in sizes:
            hint = "set the weight of each of data.train.sources to its number of rows, which is not known here"
            translation.reject(key, tree, hint)
        sources = dict[str, Any]()
        for each, size in zip(sets, sizes, strict=True):
            values: dict[str, Any] = {"files": each.files, "weight": size, "columns": each.columns or None}
            values |= {"first": each.first, "limit": each.limit}
            name = each.name.replace(".", "_")
            name = f"{name}-{len(sources) + 1}" if name in sources else name
            sources[name] = {setting: value for setting, value in values.items() if value is not None}
        translation.set({"data.train.sources": sources}, tree.location)
        return
    values = {f"data.{split}.files": [name for each in sets for name in each.files]}
    data = to_python(translation.settings)["data"]
    has_other_columns = "sources" not in data["train"] and data.get("columns", {}) != head.columns
    if split == "dev" and (has_other_columns or not are_alike):
        translation.reject(key, tree, "its columns are not those of the training rows; rename them")
    else:
        values |= {f"data.columns.{name}": own for name, own in head.columns.items()}
    limits = {"first": head.first, "limit": head.limit} if split == "train" else {"limit": head.limit or head.first}
    values |= {f"data.{split}.{name}": value for name, value in limits.items() if value is not None}
    translation.set(values, tree.location)


def _count_rows(files: Sequence[str]) -> int | None:
    """Return the number of rows of local files; None for others."""
    if not any(name.startswith(HUB) or is_remote(name) for name in files):
        with contextlib.suppress(UserError):
            return sum(count_records(path) for path in expand_files(files))
    return None


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


def _find_index(translation: _Translation) -> Path:
    """Return the path of LLaMA-Factory's dataset_info.json."""
    folder = Path(translation.value("dataset_dir") or "data")
    return (folder if folder.is_dir() else translation.file.parent / folder) / "dataset_info.json"


def _named_datasets(translation: _Translation, key: str, tree: Tree) -> None:
    """Set the rows of LLaMA-Factory's `dataset` or `eval_dataset`: names in dataset_info.json, or torchtune's."""
    names = [to_python(tree)] if isinstance(tree, Leaf) else to_python(tree)
    if isinstance(names, dict) or not all(isinstance(name, str) for name in names):
        _listed_datasets(translation, key, tree)
        return
    index = _find_index(translation)
    if not index.is_file():
        translation.reject(key, tree, f"there is no {index}; name the files with --data")
        return
    known, sets = read_json_object(index), list[_RowSet]()
    for name in (part.strip() for part in ",".join(names).split(",")):
        entry = known.get(name, {})
        if "file_name" in entry:
            files = [str(index.parent / entry["file_name"])]
        elif "hf_hub_url" in entry:
            values = {"path": entry["hf_hub_url"], "name": entry.get("subset"), "split": entry.get("split")}
            files = _dataset_names(values)
        else:
            translation.reject(key, tree, f"{index} names no file or hub data set of {name}")
            continue
        columns, problems = _read_columns(entry, is_plain=translation.value("stage") == "pt")
        for problem in problems:
            translation.reject(key, tree, f"{name} in {index}: {problem}")
        first, limit = _read_caps(translation, key, tree, name, files, entry.get("num_samples"))
        form = [entry.get("formatting"), entry.get("columns")]
        sets.append(_RowSet(name, files, form, columns, first, limit))
    if sets:
        _set_rows(translation, key, tree, sets)


def _read_columns(entry: Mapping[str, Any], *, is_plain: bool) -> tuple[dict[str, str], list[str]]:
    """Return `data.columns` of an entry of dataset_info.json, and sentences on what has no counterpart in it."""
    table, columns, problems = _read_table()["columns"], dict[str, str](), list[str]()
    given, tags = dict(entry.get("columns") or {}), entry.get("tags") or {}
    pair = [given.pop(name) for name in ("prompt", "response") if name in given]
    if is_plain and pair:
        columns["text"] = pair[0]
    elif pair and pair not in table["pairs"]:
        problems.append(f"rename its columns {' and '.join(pair)} to {' and '.join(table['pairs'][0][: len(pair)])}")
    problems += ["folder has no counterpart; name its files in file_name"] if entry.get("folder") else []
    for name, own in given.items():
        if own not in (table["named"].get(name), *table["known"].get(name, ())):
            if name in table["named"]:
                columns[table["named"][name]] = own
            else:
                problems.append(f"columns.{name} {own} has no counterpart")
    for name, own in tags.items():
        if own not in table["tags"].get(name, ()):
            problems.append(f"tags.{name} {own} is none of {', '.join(table['tags'].get(name, ())) or 'ours'}")
    return columns, problems


def _read_caps(
    translation: _Translation, key: str, tree: Tree, name: str, files: list[str], number: int | None
) -> tuple[int | None, int | None]:
    """Return `first` and `limit` of a data set by LLaMA-Factory's `max_samples` and `num_samples`."""
    cap, count = translation.value("max_samples"), _count_rows(files)
    if number is not None and count is not None and number > count:
        translation.reject(key, tree, f"{name}: num_samples {number} is above its {count} rows, and would repeat some")
        number = None
    if number is not None:
        return None, min(number, cap or number)
    if cap is None:
        return None, None
    if count is None:
        translation.notes.append(f"{name}: {_FEWER}")
    elif cap >= count:
        translation.notes.append(f"max_samples: {name} has {count} rows, and all are read")
        return None, None
    return cap, None


def _flatten_components(tree: Branch) -> Branch:
    """Return torchtune's settings by dotted keys, data sets as they are; `${key}` becomes the value of that key, and a
    component its last name."""
    children, keys = dict[str, Tree](), dict[str, str]()

    def add(path: str, child: Tree, location: str) -> None:
        if isinstance(child, Branch) and path not in ("dataset", "dataset_val", "profiler"):
            for name, below in child.children.items():
                add(f"{path}.{name}", below, child.keys.get(name, below.location))
            return
        if path.endswith("._component_") and isinstance(child, Leaf):
            child = dataclasses.replace(child, value=str(child.value).rpartition(".")[2])
        children[path], keys[path] = child, location

    def fill(key: str, value: Any) -> Any:
        values = {f"${{{path}}}": child.value for path, child in children.items() if isinstance(child, Leaf)}
        if value in values or not isinstance(value, str):
            return values.get(value, value)
        return re.sub(r"\$\{[\w.]+\}", lambda match: str(values.get(match[0], match[0])), value)

    for name, child in tree.children.items():
        add(name, child, tree.keys.get(name, child.location))
    for path, child in children.items():
        children[path] = _change_leaves(child, fill)
    return Branch(children, tree.location, keys)


def _model(translation: _Translation, key: str, tree: Tree) -> None:
    """Check that torchtune's model has LoRA, on 4 bits for `qlora_…`."""
    name = str(to_python(tree))
    if name.startswith("qlora_"):
        translation.set({"train.quantization": "nf4-double"}, tree.location)
    elif not name.startswith("lora_"):
        translation.reject(key, tree)


def _lora_modules(translation: _Translation, key: str, tree: Tree) -> None:
    """Set the layers of adapters by torchtune's lists and switches, under the names that they have in hub files."""
    table = _read_table()["modules"]
    names = [table["names"].get(name, name) for name in _flatten(to_python(tree))]
    for switch, more in table["switches"].items():
        names += more if translation.value(switch) else []
    if "phi" in str(translation.value("model._component_")):
        translation.reject(key, tree, "phi's files join some of them: adapter.targets is all-linear instead")
        translation.set({"adapter.targets": "all-linear"}, tree.location)
    else:
        translation.set({"adapter.targets": names}, tree.location)


def _listed_datasets(translation: _Translation, key: str, tree: Tree) -> None:
    """Set the rows of axolotl's `datasets` or torchtune's `dataset`, one or several, and the recipe to extend."""
    share, is_paired = _read_holdout(translation), translation.value("rl") is not None
    if share is not None and key == "dataset_val":
        translation.set({"data.holdout": share, "data.holdout_splits": ["dev"]}, tree.location)
        return
    table = _read_table()["listed"]["axolotl" if key.endswith("datasets") else "torchtune"]
    columns = {name: own for name, own in table["columns"].items() if not (is_paired and own == "messages")}
    sets, bases = list[_RowSet](), list[str]()
    for item in tree.items if isinstance(tree, Items) else (tree,):
        known = item.children if isinstance(item, Branch) else {}
        values = {name: to_python(child) for name, child in known.items()}
        kind = str(values.pop(table["kind"], None)).removeprefix("torchtune.datasets.")
        own = table["kinds"].get(kind, {})
        if not own or "problem" in own:
            translation.reject(f"{key}.{table['kind']}", known.get(table["kind"], item), own.get("problem"))
        bases += [own["extends"]] if own else []
        translation.notes += [f"{kind}: {own['note']}"] if "note" in own else []
        own_columns = dict(own.get("columns", {}))
        for name, value in values.items():
            if name in columns:
                own_columns[columns[name]] = value
            elif name in table["same"]:
                translation.set({table["same"][name]: value}, known[name].location)
            elif name not in table["rows"] and not _is_read(value, table["read"].get(name, [])):
                translation.reject(f"{key}.{name}", known[name], table["hints"].get(name))
        split, bracket, _ = str(values.get("split") or "train").partition("[")
        if bracket and share is None:
            translation.reject(f"{key}.split", known["split"], "a hub data set is read whole; data.train.first caps it")
        path = values.get("path", values.get("source", own.get("source")))
        if path is not None:
            rows = {"data_files": values.get("data_files"), "path": path, "split": split}
            files = _dataset_names(rows | {"name": values.get("name", values.get("subset"))})
            sets.append(_RowSet(Path(files[0]).stem, files, kind, own_columns))
        elif own:
            translation.reject(key, item, "each of them is a mapping with a path or source")
    if bases and not is_paired and key in ("dataset", "datasets"):
        base = bases[0] if len(set(bases)) == 1 else "chat"  # which reads conversations and instructions
        if base == "chat" and not {"chat", "instruction"} >= set(bases):
            translation.reject(key, tree, "plain text or pairs are not trained on beside others")
        translation.set({"extends": base} | table["bases"].get(base, {}), tree.location)
    if sets:
        _set_rows(translation, key, tree, sets)


def _is_read(value: Any, read: Any) -> bool:
    """Return True if a value, or each part of it, is among those that are read as they are; in a mapping, by key."""
    if isinstance(value, dict) and isinstance(read, dict):
        return all(_is_read(part, read.get(name, [])) for name, part in value.items())
    return value in read or (not isinstance(value, dict) and all(part in (None, *read) for part in _flatten(value)))


def _read_holdout(translation: _Translation) -> float | None:
    """Return the share of the rows that torchtune's `dataset_val` takes from the end of those of `dataset`; None if
    they are others."""
    train, dev = translation.value("dataset"), translation.value("dataset_val")
    if not (isinstance(train, dict) and isinstance(dev, dict)):
        return None
    sources = [{name: each.get(name) for name in ("_component_", "source", "data_files")} for each in (train, dev)]
    begin = re.fullmatch(r"(\w+)\[:(\d+)%\]", str(train.get("split")))
    if begin is None or sources[0] != sources[1] or dev.get("split") != f"{begin[1]}[{begin[2]}%:]":
        return None
    return round(1 - int(begin[2]) / 100, 2)


_SPECIAL: dict[str, Callable[[_Translation, str, Tree], None]] = {
    **dict.fromkeys(("num_epochs", "num_train_epochs", "epochs"), _epochs),
    **dict.fromkeys(("evals_per_epoch", "eval_strategy"), _evaluations),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), _betas),
    **dict.fromkeys(("lora_target_modules", "lora_target", "additional_target"), _modules),
    **dict.fromkeys(("rl", "stage"), _objective),
    **dict.fromkeys(("datasets", "test_datasets", "dataset_val"), _listed_datasets),
    **dict.fromkeys(("dataset", "eval_dataset"), _named_datasets),
    "max_samples": _samples,
    **dict.fromkeys(("max_steps", "max_steps_per_epoch"), _steps),
    **dict.fromkeys(("warmup_steps", "lr_scheduler.num_warmup_steps"), _warmup_steps),
    **dict.fromkeys(("val_set_size", "val_size"), _holdout),
    **dict.fromkeys(("max_grad_norm", "clip_grad_norm"), _clip),
    "model._component_": _model,
    "model.lora_attn_modules": _lora_modules,
}
"""Keys that need more than a new name."""
