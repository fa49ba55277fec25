"""Conversion of a tree to frozen dataclasses: an unknown key, a wrong type or a value out of range is an error."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import typing
from typing import Any, Literal

from flatshift.experiments.recipe.schema import find_keys_ending_with, hint_options, setting_key
from flatshift.experiments.recipe.tree import MAX_WHOLE, Branch, Items, Leaf, Tree
from flatshift.finetune.errors import UserError, shorten

Origins = dict[str, str]
_MAX_WORD = 200  # characters of a word whose near match is searched: the search is quadratic
_MAY_BE_EMPTY = ("task.prompt", "task.system", "task.prefix")
"""Texts placed before others, for which an empty text is a valid value."""
_WRITTEN = tuple(f"task.{name}" for name in ("prompt", "completion", "target", "answer", "prefix", "system"))
"""Texts that models read or generate; in these `\\n` on a command line means a line break."""
_type_hints = functools.cache(typing.get_type_hints)  # they cost more than the rest of this module
_MAX_LIST = 160  # characters of a list of known names


def suggest_nearest(word: str, known: typing.Iterable[str], path: str = "") -> str:
    """Return `; did you mean 'path.x'?` for the nearest name, or for a key of `train` that another section has; the
    list of known names if there is none."""
    known = sorted(known)
    begins = [name for name in known if len(name) > 3 and word.startswith(name)][-1:]
    cutoff = 0.7 if begins else 0.5
    close = (difflib.get_close_matches(word, known, 1, cutoff) if len(word) <= _MAX_WORD else []) or begins
    near = [_join_path(path, name) for name in close]
    if near := near or (find_keys_ending_with(word) if path == "train" else []):
        return f"; did you mean {near[0]!r}?"
    listed = [name for i, name in enumerate(known) if len(", ".join(known[: i + 1])) <= _MAX_LIST]
    return f"; known: {', '.join(listed)}{', …' * (len(listed) < len(known))}"


def build_settings(cls: type, tree: Tree, *, path: str = "", origins: Origins | None = None) -> Any:
    """Fill the dataclass `cls` from `tree`; `origins` receives dotted path → place for every value that is set.

    Raises UserError with the place of the offending key or value.
    """
    origins = {} if origins is None else origins
    if not isinstance(tree, Branch):
        raise UserError(
            f"{tree.location}: {path or 'a recipe'} must be a mapping of settings, got {_describe_tree(tree)}"
        )
    hints = _type_hints(cls)
    names = field_names(cls)
    values: dict[str, Any] = {}
    for key, child in tree.children.items():
        location = tree.keys.get(key, tree.location)
        if key not in names:
            raise UserError(
                f"{location}: unknown key {_quote(_join_path(path, key))}{suggest_nearest(key, names, path)}"
            )
        values[names[key]] = _build_value(hints[names[key]], child, _join_path(path, key), origins)
    for field in dataclasses.fields(cls):
        value, key = values.get(field.name), setting_key(field.name)
        name, empty = _join_path(path, key), value == "" or (type(value) is tuple and "" in value)
        if field.name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise UserError(f"{tree.location}: {name} is missing; it has no default")
        if empty and field.default != "" and name not in _MAY_BE_EMPTY:
            location = tree.keys.get(key, tree.location)
            raise UserError(f"{location}: {name} cannot be ''; give it a value, or leave it out")
    try:
        return cls(**values)
    except ValueError as error:
        location = tree.keys.get(str(error).split(" ", 1)[0], tree.location)
        raise UserError(f"{location}: {_join_path(path, str(error))}") from None


@functools.cache
def field_names(cls: type) -> dict[str, str]:
    """Return the keys of a class's settings and the fields they fill."""
    return {setting_key(f.name): f.name for f in dataclasses.fields(cls)}


def _join_path(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _quote(value: Any) -> str:
    return shorten(repr(value))


def _describe_tree(tree: Tree) -> str:
    if isinstance(tree, Leaf):
        return _quote(tree.value)
    return "a list" if isinstance(tree, Items) else "a mapping"


def _build_value(hint: Any, tree: Tree, path: str, origins: Origins) -> Any:
    options = list(hint_options(hint))
    if type(None) in options:
        if isinstance(tree, Leaf) and tree.value is None:
            origins[path] = tree.location
            return None
        options.remove(type(None))
    if components := [o for o in options if dataclasses.is_dataclass(o) and isinstance(o, type)]:
        return _build_component(components, tree, path, origins)
    if len(options) > 1:  # e.g. str | tuple[str, ...]: a list means the tuple
        wants_tuple = isinstance(tree, Items)
        lists = any(typing.get_origin(o) is tuple for o in options)
        options = [o for o in options if (typing.get_origin(o) is tuple) == wants_tuple] or options
        wants_word = isinstance(tree, Leaf) and isinstance(tree.value, str)  # float | Literal["rank"]
        options = [o for o in options if (typing.get_origin(o) is Literal) == wants_word] or options
        if lists and isinstance(tree, Leaf) and typing.get_origin(options[0]) is Literal:
            words = typing.get_args(options[0])
            known, word = suggest_nearest(str(tree.value), map(str, words)), shorten(str(tree.value), 40)
            if tree.value not in words and "did you mean" not in known:
                raise UserError(
                    f"{tree.location}: {path} cannot be {_quote(tree.value)}{known}, or a list, as [{word}]"
                )
        if {int, float} <= set(options):
            options = [int if isinstance(tree, Leaf) and isinstance(tree.value, int) else float]
    return _build_plain(options[0], tree, path, origins)


def _build_component(components: list[type], tree: Tree, path: str, origins: Origins) -> Any:
    """Build the single dataclass, or the one of a union that `kind` names (by default the first)."""
    # a field's default is its class attribute
    kinds = {getattr(component, "kind", ""): component for component in components}
    if "" not in kinds and isinstance(tree, Leaf) and isinstance(tree.value, str):
        tree = Branch({"kind": tree}, tree.location, {"kind": tree.location})
    if "" in kinds or len(components) == 1:  # a single component may have a `kind` field itself (optimizer)
        return build_settings(components[0], tree, path=path, origins=origins)
    if not isinstance(tree, Branch):
        raise UserError(f"{tree.location}: {path} must name a kind{suggest_nearest('', kinds)}")
    kind = tree.children.get("kind")
    name = next(iter(kinds))
    if kind is not None:
        if not isinstance(kind, Leaf) or kind.value not in kinds:
            raise UserError(
                f"{kind.location}: unknown kind {_describe_tree(kind)} for "
                f"{path}{suggest_nearest(str(getattr(kind, 'value', '')), kinds)}"
            )
        name = kind.value
    for key in (key for key in tree.children if key not in field_names(kinds[name])):
        having = ", ".join(kind_name for kind_name, component in kinds.items() if key in field_names(component))
        location = tree.keys.get(key, tree.location)
        if having and kind is None:
            raise UserError(f"{location}: without {path}.kind there is no {key!r}; name {path}.kind too ({having})")
        if having:
            owned = f"{path} is {name}, and {key} is a setting of {having}"
            known = suggest_nearest(key, field_names(kinds[name]), path)
            raise UserError(f"{location}: unknown key {_quote(_join_path(path, key))}: {owned}{known}")
    return build_settings(kinds[name], tree, path=path, origins=origins)


def _build_plain(hint: Any, tree: Tree, path: str, origins: Origins) -> Any:
    origin = typing.get_origin(hint)
    if hint is tuple or origin is tuple:
        hints = typing.get_args(hint) or (Any, ...)
        items = tree.items if isinstance(tree, Items) else (tree,)
        if hints[-1] is Ellipsis:
            hints = hints[:1] * len(items)
        if len(items) != len(hints):
            raise UserError(f"{tree.location}: {path} needs {len(hints)} values, got {len(items)}")
        origins[path] = tree.location
        pairs = enumerate(zip(hints, items, strict=True))
        return tuple(_build_value(item_hint, item, f"{path}[{i}]", {}) for i, (item_hint, item) in pairs)
    if origin is dict:
        if not isinstance(tree, Branch):
            raise UserError(f"{tree.location}: {path} must be a mapping, got {_describe_tree(tree)}")
        value_hint = typing.get_args(hint)[1]
        origins[path] = tree.location
        if value_hint is Any:
            return to_python(tree)
        return {key: _build_value(value_hint, child, f"{path}.{key}", {}) for key, child in tree.children.items()}
    if hint is str and tree.location.startswith("--") and tree.text:
        origins[path] = tree.location  # text is taken as typed: `{text}` is a template, not a mapping; 1 is "1"
        typed = _unescape(getattr(tree, "whole", tree.text)) if path in _WRITTEN else tree.text
        return _check_text(typed, Leaf(typed, typed, tree.location), path)
    if not isinstance(tree, Leaf):
        raise UserError(f"{tree.location}: {path} must be a single value, got {_describe_tree(tree)}")
    origins[path] = tree.location
    if origin is Literal:
        allowed, value = typing.get_args(hint), tree.value
        found = [word for word in allowed if word == value and isinstance(word, bool) is isinstance(value, bool)]
        if not found:
            raise UserError(
                f"{tree.location}: {path} cannot be {_quote(value)}{suggest_nearest(str(value), map(str, allowed))}"
            )
        return found[0]
    return _build_scalar(hint, tree, path)


def to_python(tree: Tree) -> Any:
    if isinstance(tree, Leaf):
        return tree.value
    if isinstance(tree, Items):
        return [to_python(item) for item in tree.items]
    return {key: to_python(child) for key, child in tree.children.items()}


def _unescape(text: str) -> str:
    """Replace `\\n`, `\\t` and `\\\\`, which a shell passes on as two characters each, by their characters."""
    return re.sub(r"\\([nt\\])", lambda match: {"n": "\n", "t": "\t"}.get(match[1], "\\"), text)


def _build_scalar(hint: Any, leaf: Leaf, path: str) -> Any:
    value = leaf.value
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is Any:
        return value
    if hint is bool and isinstance(value, bool):
        return value
    if number and isinstance(value, int) and abs(value) > MAX_WHOLE:
        raise UserError(f"{leaf.location}: {path} is above 2^63 - 1, the largest whole number")
    if hint is int and number and float(value).is_integer() and abs(value) <= MAX_WHOLE:
        return int(value)
    if hint is float and number and value == value:  # NaN is not a valid setting
        return float(value)
    if hint is str and isinstance(value, str):
        return _check_text(leaf.whole if path in _WRITTEN else value, leaf, path)
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text (quote it)"}
    raise UserError(f"{leaf.location}: {path} must be {words.get(hint, hint)}, got {_quote(value)}")


def _check_text(value: str, leaf: Leaf, path: str) -> str:
    """Return `value` if files and tokenizers can take it. Raises UserError."""
    if "\0" in value:
        raise UserError(
            f"{leaf.location}: {path} holds the character U+0000, which no name and no text may; take it out"
        )
    if any("\ud800" <= sign <= "\udfff" for sign in value):
        raise UserError(
            f"{leaf.location}: {path} {_quote(value)} is not valid UTF-8; rename a file of another encoding, or retype "
            "it"
        )
    return value
