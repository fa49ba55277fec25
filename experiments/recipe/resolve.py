"""Recipe = defaults < `extends:` < YAML < command line, resolved once and written with each value's origin.

A chat run reads its own copy of the template, `template.jinja` in its directory, whose digest is in manifest.json: the
file that the recipe names may change, the copy must not.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from flatshift.experiments.recipe.build import Origins, build_settings, field_names, suggest_nearest
from flatshift.experiments.recipe.gallery import gallery_recipes
from flatshift.experiments.recipe.schema import Recipe, setting_key
from flatshift.experiments.recipe.tree import (
    Branch,
    Items,
    Leaf,
    Tree,
    from_mapping,
    from_override,
    merge,
    parse,
    parse_file,
)
from flatshift.finetune.atomic import read_json_object
from flatshift.finetune.data.chat.template import AUTO, list_shipped_templates, read_template
from flatshift.finetune.data.config import Files, Source, TrainFiles
from flatshift.finetune.digests import check_entries
from flatshift.finetune.errors import UserError, is_remote, shorten, user_path
from flatshift.finetune.launch.consistency import flatten_settings
from flatshift.finetune.run_directory import resume_command

Named = TypeVar("Named", Files, TrainFiles, Source)
Text = TypeVar("Text", str, str | None)
_SHIPPED = Path(__file__).resolve().parent.parent / "recipes"
_GALLERY = "gallery recipe "
"""Beginning of the origins of a gallery recipe's values, before its name and line."""
_SHIPPED_ORIGINS = (str(_SHIPPED), _GALLERY)
_DEFAULT = "default"
"""Origin of values that nobody set."""
_OBJECT = "Recipe"
"""Origin of the values of a recipe made in Python."""
_HOLDOUT = 0.1
"""`data.holdout` where the training rows are the user's own and no other evaluation rows are named."""
_OWN_ROWS = "names rows of your own"
"""Ending of the origins of settings that follow from the user's own training rows."""
_REPLACED = {
    "train.steps": ("train.epochs",),
    "train.epochs": ("train.steps",),
    "data.train.files": ("data.train.sources", "data.train.weigh"),
    "data.train.sources": ("data.train.files", "data.train.first", "data.train.limit"),
}
"""Key → keys of a lower layer that it replaces: they say the same in another way."""
_ROW_SETTINGS = ("data.columns.", "data.bad_rows")
"""Settings on how rows are read; they may differ for files other than the run's own."""
_MAY_CHANGE_ON_RESUME = (
    *("mesh.", "train.steps", "train.extend", "train.device", "data.cache"),
    *("eval.", "task.score", "task.max_new_tokens", "task.num_beams", "task.metrics"),
)


@dataclass(frozen=True)
class Resolved:
    """A recipe with its name and the origin of each value that was set."""

    recipe: Recipe
    name: str
    origins: Origins

    def to_yaml(self) -> str:
        """Return the whole tree as YAML that loads to the same recipe, with one origin comment per value."""
        return "\n".join(_dump_yaml(self.recipe, self.origins)) + "\n"

    def tree(self) -> Tree:
        """Return the whole tree for merging with others; each value keeps its origin."""
        return _with_origins(parse(self.to_yaml(), self.name), self.origins)

    def with_values(self, block: str, values: Mapping[str, tuple[Any, str]]) -> Resolved:
        """Return the recipe with other values in a block, each with its origin."""
        settings = {key: value for key, (value, _) in values.items()}
        changed = {block: dataclasses.replace(getattr(self.recipe, block), **settings)}
        origins = {f"{block}.{key}": origin for key, (_, origin) in values.items()}
        return Resolved(dataclasses.replace(self.recipe, **changed), self.name, {**self.origins, **origins})


def _with_origins(tree: Tree, origins: Origins, path: str = "") -> Tree:
    if isinstance(tree, Branch):
        children = {key: _with_origins(c, origins, f"{path}.{key}".lstrip(".")) for key, c in tree.children.items()}
        return dataclasses.replace(tree, children=children, location=origins.get(path, tree.location))
    return dataclasses.replace(tree, location=origins.get(path, _DEFAULT))


def shipped_recipes() -> dict[str, Path]:
    """Return name → file of the recipes that ship with Flatshift, without those of the gallery."""
    return {path.stem: path for path in sorted(_SHIPPED.glob("*.yaml"))}


def read_shipped_recipe(name: str) -> str:
    """Return the YAML of a shipped recipe or one of the gallery. Raises UserError with the nearest name."""
    shipped, gallery = shipped_recipes(), gallery_recipes()
    if name in gallery:
        return gallery[name].text
    if name not in shipped:
        raise UserError(f"no shipped recipe is called {name!r}{suggest_nearest(name, (*shipped, *gallery))}")
    return shipped[name].read_text(encoding="utf-8")


def _find_recipe(reference: str, beside: Path | None = None) -> Path | str:
    """Return the file of a recipe, or the name of one of the gallery."""
    path, shipped = user_path(reference), shipped_recipes()
    candidate = beside.parent / path if beside is not None and not path.is_absolute() else path
    if candidate.is_file():
        return candidate
    if reference in shipped:
        return shipped[reference]
    if reference in gallery_recipes():
        return reference
    if candidate.is_dir():
        raise UserError(
            f"{reference} is a directory, not a recipe; to continue a run use `{resume_command(reference)}`"
        )
    if candidate.exists():
        raise UserError(f"{reference} is a pipe, socket or device, not a recipe; write it to a file first")
    near = [str(path.parent / file.name) for file in candidate.parent.glob("*.y*ml")]
    raise UserError(
        f"recipe {reference!r} is neither a file nor a shipped recipe"
        f"{suggest_nearest(reference, (*near, *shipped, *gallery_recipes()))}"
    )


def _read_recipe(recipe: Path | str, parents: tuple[Path, ...] = ()) -> Tree:
    """Return the tree of a file, or of the gallery's recipe of that name, merged over what it extends."""
    path = recipe.resolve() if isinstance(recipe, Path) else _SHIPPED / recipe
    if path in parents:
        raise UserError(f"{path}: `extends` goes in a circle: {' → '.join(str(p.name) for p in (*parents, path))}")
    tree = parse_file(path) if isinstance(recipe, Path) else parse(gallery_recipes()[recipe].text, _GALLERY + recipe)
    if not isinstance(tree, Branch):
        raise UserError(f"{path}:1: a recipe is a mapping of settings")
    base = tree.children.get("extends")
    if isinstance(base, Leaf) and isinstance(base.value, str) and base.value:
        try:
            base_recipe = _find_recipe(base.value, path)
        except UserError as error:
            raise UserError(f"{base.location}: {error}") from None
        tree = apply_overrides(_read_recipe(base_recipe, (*parents, path)), (_without(tree, ("extends",)),))
    return tree


def load_recipe(
    reference: str | None, overrides: Sequence[Branch] = (), *, recipe_type: type[Recipe] = Recipe
) -> Resolved:
    """Load a recipe file or shipped recipe and apply overrides (`from_override`), later ones on top.

    reference: a path, a shipped name, or None for the defaults alone. recipe_type: the class to fill.
    Raises UserError with file:line or flag, and the nearest valid name.
    """
    tree = Branch({}, "defaults") if reference is None else recipe_tree(reference)
    return resolve_tree(tree, overrides, name=Path(reference).stem if reference else "recipe", recipe_type=recipe_type)


def recipe_tree(reference: str) -> Branch:
    """Return the tree of a recipe file or shipped recipe, merged over what it extends and not yet validated."""
    tree = _read_recipe(_find_recipe(reference))
    assert isinstance(tree, Branch)
    return tree


def resolve_tree(tree: Tree, overrides: Sequence[Branch], *, name: str, recipe_type: type[Recipe] = Recipe) -> Resolved:
    """Apply overrides to a tree and build the recipe, as `load_recipe` does."""
    origins: Origins = {}
    recipe = build_settings(
        recipe_type, _replace_sample_splits(_set_embedder_method(apply_overrides(tree, overrides))), origins=origins
    )
    if recipe.train.epochs is not None and "train.steps" in origins:
        raise UserError(
            f"{origins['train.epochs']}: train.epochs and train.steps ({origins['train.steps']}) both say how long to "
            "train; leave one of them out"
        )
    recipe, origins = _with_finished_selection(*_drop_shipped_split(recipe, origins))
    return Resolved(_with_absolute_paths(recipe), name, origins)


def resolve_object(recipe: Recipe) -> Resolved:
    """Resolve a recipe made in Python, whose values are given where they are not the default."""
    return resolve_tree(from_mapping(_given_values(recipe), _OBJECT), (), name="recipe")


def _given_values(settings: Any) -> dict[str, Any]:
    """Return the settings of a dataclass that differ from their defaults, and its `kind`, by key."""
    values = {}
    for field in dataclasses.fields(settings):
        value, factory = getattr(settings, field.name), field.default_factory
        if field.name == "kind" or value != (field.default if factory is dataclasses.MISSING else factory()):
            values[setting_key(field.name)] = _given_values(value) if dataclasses.is_dataclass(value) else value
    return values


def _set_embedder_method(tree: Tree) -> Tree:
    """Choose the method `gotd` where an embedder is given and no method."""
    embedder, method = (_without_defaults(_get_subtree(tree, "select", name)) for name in ("embedder", "method"))
    if embedder is None or isinstance(method, Leaf | Items) or (method is not None and "kind" in method.children):
        return tree
    while isinstance(embedder, Branch) and embedder.children:  # a mapping read from a run has no origin
        embedder = next(iter(embedder.children.values()))
    assert isinstance(tree, Branch)
    tree = _without(tree, ("select", "method"))
    if method is not None:
        tree = merge(tree, Branch({"select": Branch({"method": method}, method.location)}, method.location))
    return merge(tree, from_override("select.method.kind", "gotd", embedder.location))


def _without_defaults(tree: Tree | None) -> Tree | None:
    """Return the tree without the values that nobody set; None if it has no others."""
    if not isinstance(tree, Branch):
        return None if tree is None or tree.location == _DEFAULT else tree
    children = {key: child for key, each in tree.children.items() if (child := _without_defaults(each)) is not None}
    return dataclasses.replace(tree, children=children) if children or not tree.children else None


def _replace_sample_splits(tree: Tree) -> Tree:
    """Replace the dev and test sample of a shipped recipe where the training rows are the user's own.

    Unless something else is set, a tenth of those rows is held out instead, and so it is for a selection target when
    the recipe names no training rows. What an earlier resolution set so is not set.
    """
    holdout = _get_subtree(tree, "data", "holdout")
    if holdout is not None and holdout.location.endswith(_OWN_ROWS):
        assert isinstance(tree, Branch)
        holdout, tree = None, _without(tree, ("data", "holdout"))
    train = [_get_subtree(tree, "data", "train", name) for name in ("sources", "files")]
    rows = next((files for files in train if files is not None and not _is_shipped(files)), None)
    evaluated = {split: _get_subtree(tree, "data", split, "files") for split in ("dev", "test")}
    samples = {split: files for split, files in evaluated.items() if files is not None and _is_replaced(files, rows)}
    if rows is None and not any(train):
        rows, samples = _get_subtree(tree, "select", "target", "files"), {}
    elif (
        not samples
        or rows is None
        or _leaf_texts(rows)
        in (_shipped_train_files(_origin_layer(files.location)) for files in samples.values() if _is_shipped(files))
    ):
        return tree
    if rows is None or not (_leaf_texts(rows) or isinstance(rows, Branch)) or _is_shipped(rows):
        return tree
    reason = f"{rows.location} {_OWN_ROWS}"
    changes: dict[str, Any] = {f"data.{split}.files": () for split in samples}
    if holdout is None and all(evaluated[split] is samples.get(split) for split in evaluated):
        changes["data.holdout"] = _HOLDOUT
    for key, value in changes.items():
        tree = merge(tree, from_override(key, value, reason))
    return tree


def _drop_shipped_split(recipe: Recipe, origins: Origins) -> tuple[Recipe, Origins]:
    """Drop a shipped recipe's `train.overlong: split` if the task has no pieces or `train.truncation` is set."""
    train = recipe.train
    if train.overlong != "split" or not origins.get("train.overlong", "").startswith(_SHIPPED_ORIGINS):
        return recipe, origins
    if recipe.task.traits.splits_documents and train.truncation is None:
        return recipe, origins
    name = "train.truncation" if recipe.task.traits.splits_documents else "task.kind"
    why = f"{origins.get(name, origins.get('task', _DEFAULT))} goes without pieces"
    changed = dataclasses.replace(recipe, train=dataclasses.replace(train, overlong=None))
    return changed, {**origins, "train.overlong": why}


def is_given(resolved: Resolved, key: str) -> bool:
    """True if the user set a key, rather than a default or a shipped recipe."""
    origin = resolved.origins.get(key, _DEFAULT)
    return origin != _DEFAULT and not origin.startswith(_SHIPPED_ORIGINS)


def _get_subtree(tree: Tree, *path: str) -> Tree | None:
    """Return the subtree at a path; None if it is missing, null or a default."""
    for key in path:
        child = tree.children.get(key) if isinstance(tree, Branch) else None
        if child is None or child.location == _DEFAULT or (isinstance(child, Leaf) and child.value is None):
            return None
        tree = child
    return tree


def _is_shipped(tree: Tree) -> bool:
    return tree.location.startswith(_SHIPPED_ORIGINS)


def _is_replaced(files: Tree, rows: Tree | None) -> bool:
    """Return True for files to evaluate by that own training rows replace: those of a shipped recipe, also if rows have
    replaced them before, and the samples of an object whose rows an override replaces."""
    from flatshift.finetune.data.formats import SAMPLE

    if files.location != _OBJECT or rows is None or rows.location == _OBJECT:
        return _is_shipped(files) or files.location.endswith(_OWN_ROWS)
    is_sample, are_samples = (all(name.startswith(SAMPLE) for name in _leaf_texts(each)) for each in (files, rows))
    return is_sample and (isinstance(rows, Branch) or not are_samples)


def _leaf_texts(tree: Tree) -> list[str]:
    items = tree.items if isinstance(tree, Items) else (tree,)
    return [str(one.value) for one in items if isinstance(one, Leaf)]


@functools.cache
def _shipped_train_files(file: str) -> list[str] | None:
    files = _get_subtree(_read_recipe(Path(file)), "data", "train", "files")
    return None if files is None else _leaf_texts(files)


def describe_held_out_rows(resolved: Resolved) -> list[str]:
    """Return sentences on the rows that evaluate a run with the user's own training rows."""
    origins, share = resolved.origins, resolved.recipe.data.holdout
    emptied = [split for split in ("dev", "test") if origins.get(f"data.{split}.files", "").endswith(_OWN_ROWS)]
    if (why := origins.get("data.holdout", "")).endswith(_OWN_ROWS):
        names = " and as much for ".join(resolved.recipe.data.holdout_splits)
        return [f"data.holdout: {_HOLDOUT:g} for {names} ({why})"]
    if emptied and (splits := resolved.recipe.data.splits_to_fill):
        return [f"{' and '.join(splits)}: {share:g} of the training rows each are held out (data.holdout)"]
    if emptied:
        return [f"{' and '.join(emptied)}: no rows to evaluate by; set data.holdout, or name data.{emptied[-1]}.files"]
    return []


def _with_finished_selection(recipe: Recipe, origins: Origins) -> tuple[Recipe, Origins]:
    """Return the recipe with the `select` block of the finished selection `select.from`, whose file becomes its origin.

    Raises UserError for a directory without a finished selection, or flags that contradict it.
    """
    if recipe.select is None or recipe.select.from_ is None:
        return recipe, origins
    origin, folder = origins["select.from"], user_path(recipe.select.from_)
    file = folder / "recipe.resolved.yaml"
    if not all((folder / name).is_file() for name in ("selected.jsonl", "done.json", file.name)):
        raise UserError(
            f"{origin}: {folder} holds no finished selection (selected.jsonl, done.json, {file.name}); name what "
            "`flatshift select --out` made"
        )
    block = build_settings(type(recipe), parse_file(file)).select
    if block is None:
        raise UserError(f"{file} has no `select` block; name what `flatshift select --out` made")
    requested, finished = (flatten_settings(dataclasses.asdict(select), "select") for select in (recipe.select, block))
    layer = _origin_layer(origin)
    for key, other in origins.items():
        if key in requested and _origin_layer(other) == layer and requested[key] != finished.get(key):
            raise UserError(f"{origin}: the selection in {folder} is finished, and {key} would change it; keep one")
    remaining = {key: value for key, value in origins.items() if key == "select.from" or not key.startswith("select.")}
    block = dataclasses.replace(block, from_=recipe.select.from_)
    selected = dict.fromkeys(finished.keys() - {"select.from_"}, str(file))
    return dataclasses.replace(recipe, select=block), {**selected, **remaining}


def _origin_layer(origin: str) -> str:
    """Return the layer that set a value: `--` for the command line, else the file without its line."""
    return "--" if origin.startswith("--") else origin.rpartition(":")[0] or origin


def apply_overrides(tree: Tree, overrides: Sequence[Branch]) -> Tree:
    """Return `tree` with all of `overrides` applied, later ones on top.

    A key of `_REPLACED` that they set takes the place of its alternatives in `tree`, which are dropped.
    Raises UserError for an `extends` among them.
    """
    if isinstance(tree, Branch):
        for key, alternatives in _REPLACED.items():
            if _is_set(overrides, key):
                for other in alternatives:
                    tree = tree if _is_set(overrides, other) else _without(tree, other.split("."))
    for override in overrides:
        if "extends" in override.children:
            raise UserError(f"{override.location}: `extends` is for recipe files; name that recipe itself instead")
        tree = merge(tree, override)
    return tree


def _is_set(trees: Sequence[Tree], key: str) -> bool:
    """Return True if one of the trees has a value other than null or an empty list for a dotted key."""
    values = (_get_subtree(tree, *key.split(".")) for tree in trees)
    return any(value is not None and not (isinstance(value, Items) and not value.items) for value in values)


def list_input_files(recipe: Recipe) -> list[str]:
    """Return every input file that the recipe names, once each."""
    files = [*recipe.data.train.all_files, *recipe.data.dev.files, *recipe.data.test.files]
    if recipe.select is not None and recipe.select.from_ is not None:
        files.append(str(Path(recipe.select.from_) / "selected.jsonl"))
    elif recipe.select is not None:
        files += [*recipe.select.pool.files, *recipe.select.target.files, *recipe.select.eval.files]
        files += [*recipe.select.negative.files, *recipe.select.hygiene.drops]
    return list(dict.fromkeys(files))


def _without(tree: Branch, path: Sequence[str]) -> Branch:
    """Return the tree without the value at a path, if it has one."""
    name, *below = path
    child = tree.children.get(name)
    children = {key: value for key, value in tree.children.items() if below or key != name}
    if below and isinstance(child, Branch):
        children[name] = _without(child, below)
    return dataclasses.replace(tree, children=children)


def _with_absolute_paths(recipe: Recipe) -> Recipe:
    """Make relative paths absolute, so that a run directory still finds its inputs from another working directory."""
    from flatshift.finetune.assets import backbone_directory
    from flatshift.finetune.data.formats import HUB, SAMPLE

    def absolute(path: Text) -> Text:
        return str(user_path(path).absolute()) if path else path

    def names(files: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f if f.startswith((SAMPLE, HUB)) or is_remote(f) else absolute(f) for f in files)

    def files(value: Named) -> Named:
        return dataclasses.replace(value, files=names(value.files))

    train = files(recipe.data.train)
    if train.sources is not None:
        train = dataclasses.replace(train, sources={name: files(source) for name, source in train.sources.items()})
    cache = recipe.data.cache
    cache = cache if cache in (None, "auto") else absolute(cache)
    dev, test = files(recipe.data.dev), files(recipe.data.test)
    data = dataclasses.replace(recipe.data, train=train, dev=dev, test=test, cache=cache)
    select = recipe.select
    if select is not None:
        sides: dict[str, Any] = {name: files(getattr(select, name)) for name in ("pool", "target", "negative", "eval")}
        hygiene = dataclasses.replace(select.hygiene, drops=names(select.hygiene.drops))
        sides |= {"cache": absolute(select.cache), "from_": absolute(select.from_)}
        paths: dict[str, Any] = {}
        if (features := select.own) is not None:
            paths = {name: getattr(features, name) for name in ("pool", "target", "negative")}
            paths = {name: path if is_remote(path) else absolute(path) for name, path in paths.items()}
        elif (path := getattr(select.embedder, "path", "")) and Path(path).exists():
            paths = {"path": absolute(path)}
        sides["embedder"] = dataclasses.replace(select.embedder, **paths)
        select = dataclasses.replace(select, hygiene=hygiene, **sides)
    is_own = backbone_directory(recipe.backbone) is None and Path(recipe.backbone).exists()
    backbone = absolute(recipe.backbone) if is_own else recipe.backbone
    start, under = absolute(recipe.adapter.start), absolute(recipe.adapter.under)
    adapter = dataclasses.replace(recipe.adapter, start=start, under=under)
    task = recipe.task
    if has_template_file(recipe):
        task = task.replace(template=absolute(task.template))
    return dataclasses.replace(recipe, task=task, data=data, select=select, backbone=backbone, adapter=adapter)


def resume_recipe(run: Path, overrides: Sequence[Branch] = (), *, other_rows: bool = False) -> Resolved:
    """The recipe of an existing run directory, with its own copy of the chat template; only mesh, device,
    `train.steps` and what concerns evaluation alone may be overridden.

    other_rows: files are read that are not the run's own, so `data.columns` and `data.bad_rows` may be too.

    Raises UserError if `run` is no run directory or leads out of itself (`check_entries`), its template changed, or an
    override changes anything else.
    """
    path = run / "recipe.resolved.yaml"
    if not path.is_file():
        raise UserError(f"{run} is not a run directory: it has no recipe.resolved.yaml")
    check_entries(run)
    tree = parse_file(path)
    if isinstance(tree, Branch) and not tree.children:
        raise UserError(f"{path} is empty; restore it from a copy of the run, or train again")
    before = build_settings(Recipe, tree)
    for override in overrides:
        tree = merge(tree, override)
    origins: Origins = {}
    after = build_settings(Recipe, tree, origins=origins)
    old, new = flatten_settings(dataclasses.asdict(before)), flatten_settings(dataclasses.asdict(after))
    free = (*_MAY_CHANGE_ON_RESUME, *(_ROW_SETTINGS if other_rows else ()))
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key) and not key.startswith(free):
            others = "; `flatshift eval RUN --data FILE` evaluates other rows" if key.startswith("data.") else ""
            if key.startswith(_ROW_SETTINGS):
                others += ", and takes this"
            key = ".".join(map(setting_key, key.split(".")))
            raise UserError(
                f"--{key}: a run keeps all but mesh, train.device, train.steps, train.extend, data.cache and its "
                f"evaluation (eval, task.score, task.max_new_tokens); start a new run for {key}{others}"
            )
    changed = {key: origin for key, origin in origins.items() if old.get(key) != new.get(key)}
    return Resolved(with_template_copy(run, after), run.name, read_origins(path, before) | changed)


def recipe_like(run: Path, overrides: Sequence[Branch] = ()) -> Resolved:
    """The recipe of an existing run directory for a new run, with any overrides on top.

    Steps that the run counted from `train.epochs` are epochs again. Raises UserError as `resume_recipe` and
    `load_recipe` do.
    """
    before = resume_recipe(run)
    tree = before.tree()
    origin = before.origins.get("train.steps", _DEFAULT)
    if counted := re.match(r"train\.epochs (\S+) of ", origin):
        tree = apply_overrides(tree, (from_override("train.epochs", counted[1], origin),))
    return resolve_tree(tree, overrides, name=run.resolve().name)


def read_origins(path: Path, recipe: Recipe) -> Origins:
    """Return the origins written in the file of a resolved recipe; values that were edited by hand have none.

    recipe: the recipe that the file holds.
    """
    origins: Origins = {}
    # Dump the recipe again with each key as its origin, and match the lines: an edited value no longer matches.
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for line, dumped in zip(lines, _dump_yaml(recipe, _KeyOrigins()), strict=False):
        value, mark, key = dumped.rpartition("  # at ")
        if mark and line.startswith(f"{value}  # "):
            origins[key] = line[len(value) + len("  # ") :]
    return origins


class _KeyOrigins(dict[str, str]):
    def get(self, key: str, default: Any = None) -> Any:
        return f"at {key}"


def get_dotted(recipe: Recipe, key: str) -> Any:
    """Return the value at a dotted key. Raises UserError with the nearest name if a part does not exist."""
    value: Any = recipe
    parts = key.replace("-", "_").split(".")
    for depth, name in enumerate(parts):
        known = field_names(value.__class__) if dataclasses.is_dataclass(value) else {}
        if name not in known:
            raise UserError(f"unknown key {shorten(key)!r}{suggest_nearest(name, known, '.'.join(parts[:depth]))}")
        value = getattr(value, known[name])
    return value


_SAFE_TEXT = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_MAX_KEY = 1000  # characters of a key as `key: value`; YAML looks for the colon within 1,024 characters only


def _escape_text(text: str) -> str:
    """Replace the characters that YAML cannot hold, or would read as a line end, by escapes."""

    def escape(code: int) -> str:
        return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

    return "".join(sign if sign.isprintable() else escape(ord(sign)) for sign in text)


def _quote(text: str) -> str:
    return '"' + _escape_text(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def _format_scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else repr(value).replace("inf", ".inf").replace("nan", ".nan")
    if isinstance(value, int):
        return str(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_format_scalar(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_quote(key)}: {_format_scalar(item)}" for key, item in value.items()) + "}"
    if _SAFE_TEXT.fullmatch(value):
        leaf = parse(value, "value")
        if isinstance(leaf, Leaf) and isinstance(leaf.value, str):
            return str(value)
    return _quote(value)


def _dump_yaml(value: Any, origins: Origins, path: str = "", depth: int = 0) -> list[str]:
    pad = "  " * depth
    lines: list[str] = []

    def origin(key: str) -> str:
        return f"  # {_escape_text(origins.get(key, _DEFAULT))}"

    for field in dataclasses.fields(value):
        name, child = setting_key(field.name), getattr(value, field.name)
        child_path = f"{path}.{name}" if path else name
        if child_path == "extends":
            continue  # already merged; the resolved file stands alone
        if child_path == "train.steps" and value.epochs is not None:
            continue  # unknown until the rows are counted
        if dataclasses.is_dataclass(child):
            lines.append(f"{pad}{name}:")
            lines += _dump_yaml(child, origins, child_path, depth + 1)
        elif isinstance(child, dict):
            lines.append(f"{pad}{name}:" + ("" if child else " {}") + origin(child_path))
            for inner, item in child.items():
                key = _quote(inner)
                lines += [f"{pad}  ? {key}", f"{pad}  :"] if len(key) > _MAX_KEY else [f"{pad}  {key}:"]
                if dataclasses.is_dataclass(item):
                    lines += _dump_yaml(item, origins, f"{child_path}.{inner}", depth + 2)
                else:
                    lines[-1] += f" {_format_scalar(item)}"
        else:
            lines.append(f"{pad}{name}: {_format_scalar(child)}{origin(child_path)}")
    return lines


COPY = "template.jinja"


def has_template_file(recipe: Recipe) -> bool:
    """Return True if `task.template` is a file of the user, not a shipped name or the tokenizer's own template."""
    return recipe.task.template not in (AUTO, *list_shipped_templates())


def read_template_file(recipe: Recipe) -> dict[str, str]:
    """Return the template file to copy into a new run directory, as file name → text; empty without a template file."""
    return {COPY: read_template(recipe.task.template)} if has_template_file(recipe) else {}


def with_template_copy(run: Path, recipe: Recipe) -> Recipe:
    """Return `recipe` with the copy of its template in the run directory `run`.

    Raises UserError if the template differs from the digest in manifest.json.
    """
    task, file = recipe.task, run / "manifest.json"
    if has_template_file(recipe) and (run / COPY).is_file():
        task = task.replace(template=str((run / COPY).absolute()))
    record = read_json_object(file).get("chat_template") if file.is_file() else None
    if (
        record is not None
        and (now := task.input_format.template_record()) is not None
        and now["sha256"] != record["sha256"]
    ):
        raise UserError(f"task.template: {task.template} changed since the run began; restore it or train again")
    return dataclasses.replace(recipe, task=task)
