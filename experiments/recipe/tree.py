"""YAML 1.2 (core schema) as a tree that records where every key and value was written.

PyYAML parses the syntax; its YAML 1.1 scalar rules (`no` is false, `5e-4` is text, `1:30` is ninety) are replaced by
those of the core schema, and mappings keep `file:line` for error messages.
"""

from __future__ import annotations

import dataclasses
import numbers
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from flatshift.experiments.recipe.schema import setting_key, split_key
from flatshift.finetune.errors import UserError, shorten
from flatshift.finetune.redaction import hide_secrets

_MAX_DEPTH = 32
_MAX_BYTES = 1 << 20  # of a recipe file: PyYAML reads about a MiB in ten seconds, and no recipe needs a hundredth of it
_MAX_NODES = 100_000  # values of a recipe, with every alias expanded
MAX_WHOLE = 2**63 - 1
_TOO_DEEP = f"nested deeper than {_MAX_DEPTH} levels; a recipe needs no more than five"


@dataclass(frozen=True)
class Leaf:
    """A scalar: its value, its text as written, and its place.

    Both are without the secrets of an address, which no recipe holds; `whole` is the text of a template, which may look
    like one.
    """

    value: Any
    text: str
    location: str
    whole: str = field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "whole", self.whole or self.text)
        if isinstance(self.value, str):
            object.__setattr__(self, "value", hide_secrets(self.value))
            object.__setattr__(self, "text", hide_secrets(self.text))


@dataclass(frozen=True)
class Items:
    """A sequence; `text` is the text typed on the command line, for a value from a flag."""

    items: tuple[Tree, ...]
    location: str
    text: str = ""


@dataclass(frozen=True)
class Branch:
    """A mapping; `keys` has the location of each key, `text` the text typed on the command line."""

    children: dict[str, Tree]
    location: str
    keys: dict[str, str] = field(default_factory=dict)
    text: str = ""


Tree = Leaf | Items | Branch


class _CoreLoader(yaml.SafeLoader):
    """SafeLoader with the YAML 1.2 core schema's implicit types and nothing else."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 - the base class declares it as an instance variable
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Call the base class up to `_MAX_DEPTH` levels: it is recursive, and quadratic in the depth."""
        if self.depth > _MAX_DEPTH:
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, _TOO_DEEP, mark)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


_CORE = [
    ("null", r"^(?:null|Null|NULL|~|)$", ["n", "N", "~", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", list("-+0123456789")),
    (
        "float",
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        list("-+.0123456789"),
    ),
]
_PATTERNS = {name: re.compile(pattern) for name, pattern, _ in _CORE}
for _name, _, _initials in _CORE:
    _CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _PATTERNS[_name], _initials)


def _parse_scalar(node: yaml.ScalarNode, location: str) -> Any:
    kind = node.tag.rpartition(":")[2]
    text = node.value
    if kind == "str":
        return text
    if kind not in _PATTERNS or not node.tag.startswith("tag:yaml.org,2002:"):
        raise _foreign_tag_error(node, location)
    if not _PATTERNS[kind].match(text):  # an explicit tag: `!!int abc`
        raise UserError(f"{location}: {shorten(text)!r} is no {kind}; leave the tag out")
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        base = 8 if text.startswith("0o") else 16 if text.startswith("0x") else 10
        # more digits than any setting needs; Python refuses to parse thousands of them
        value = int(text, base) if len(text) <= 70 else MAX_WHOLE + 1
        if abs(value) > MAX_WHOLE:
            raise UserError(
                f"{location}: {shorten(text)} is above 2^63 - 1, the largest whole number; quote it as text"
            )
        return value
    return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))


def _foreign_tag_error(node: yaml.Node, location: str) -> UserError:
    return UserError(f"{location}: the tag {shorten(node.tag)!r} is not allowed; recipes hold plain values only")


class _TreeBuilder:
    """Converts the nodes of one document into a tree and counts them; an alias counts each time it is used."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.count = 0

    def tree(self, node: yaml.Node, depth: int = 0) -> Tree:
        location = f"{self.source}:{node.start_mark.line + 1}"
        self.count += 1
        if self.count > _MAX_NODES:
            raise UserError(f"{location}: more than {_MAX_NODES:,} values, each alias counted in full; write fewer")
        if depth > _MAX_DEPTH:  # an alias inside the node it refers to
            raise UserError(f"{location}: {_TOO_DEEP}")
        if isinstance(node, yaml.ScalarNode):
            return Leaf(_parse_scalar(node, location), node.value, location)
        if node.tag not in ("tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"):
            raise _foreign_tag_error(node, location)
        if isinstance(node, yaml.SequenceNode):
            return Items(tuple(self.tree(item, depth + 1) for item in node.value), location)
        assert isinstance(node, yaml.MappingNode)
        children: dict[str, Tree] = {}
        keys: dict[str, str] = {}
        for key_node, value_node in node.value:
            at = f"{self.source}:{key_node.start_mark.line + 1}"
            if not isinstance(key_node, yaml.ScalarNode):
                raise UserError(f"{at}: a key must be a plain word")
            key = key_node.value
            if key in children:
                raise UserError(f"{at}: the key {shorten(key)!r} was already given at {keys[key]}; keep one of them")
            children[key] = self.tree(value_node, depth + 1)
            keys[key] = at
        return Branch(children, location, keys)


def parse(text: str, source: str) -> Tree:
    """Parse one YAML document; `source` names it in errors.

    Raises UserError with `source:line` for a syntax error, a duplicate key or a tag.
    """
    loader = None
    try:
        loader = _CoreLoader(text)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        if error.problem == _TOO_DEEP:
            raise UserError(f"{source}:{line}: {error.problem}") from None
        raise UserError(f"{source}:{line}: not valid YAML ({shorten(error.problem or 'unreadable', 120)})") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        sign = f"U+{error.character:04X}" if isinstance(error.character, int) else "a character"
        raise UserError(
            f"{source}:{line}: {sign} cannot stand in YAML as it is; write it in double quotes as an escape"
        ) from None
    except ValueError:  # an escape such as `"\U00110000"`
        line = loader.line + 1 if loader is not None else 1
        raise UserError(f"{source}:{line}: not valid YAML (an escape or number that names no character)") from None
    return Branch({}, f"{source}:1") if node is None else _TreeBuilder(source).tree(node)


def parse_file(path: Path) -> Tree:
    """Parse a recipe file. Raises UserError if it cannot be read or is too large."""
    try:
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise UserError(f"{path}: {size:,} bytes are too many for a recipe (at most {_MAX_BYTES:,}); is it one?")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    return parse(text, str(path))


def dump(values: Mapping[str, Any]) -> str:
    """Return plain values as YAML, with mappings and lists of scalars in one line each."""
    text: str = yaml.safe_dump(dict(values), default_flow_style=None, sort_keys=False, allow_unicode=True, width=120)
    return text


_ONE_CLASS = "optimizer"


def merge(lower: Tree, upper: Tree, key: str = "") -> Tree:
    """Merge `upper` over `lower`, the values of `key`: mappings merge key by key, everything else is replaced.

    Where `upper` changes a component's `kind`, the settings of the other kind are dropped; but for `optimizer`, whose
    kinds share one class of settings. A component written as its bare kind (`regularizer: ggpo`) merges like the
    mapping it stands for: over the same kind it keeps the settings, over another kind it starts from that kind's
    defaults.
    """
    if not isinstance(upper, Branch):
        kind = lower.children.get("kind") if isinstance(lower, Branch) else None
        if not (isinstance(lower, Branch) and isinstance(upper, Leaf) and isinstance(upper.value, str)):
            return upper
        if key != _ONE_CLASS and not (isinstance(kind, Leaf) and kind.value == upper.value):
            return upper
        upper = Branch({"kind": upper}, lower.location, {"kind": upper.location}, lower.text)
    if isinstance(lower, Leaf) and isinstance(lower.value, str):
        lower = Branch({"kind": lower}, lower.location, {"kind": lower.location})
    if not isinstance(lower, Branch):
        return upper
    new_kind, old_kind = upper.children.get("kind"), lower.children.get("kind")
    kinds = [kind.value for kind in (new_kind, old_kind) if isinstance(kind, Leaf)]
    if key != _ONE_CLASS and len(kinds) == 2 and kinds[0] != kinds[1]:
        return upper
    children, keys = dict(lower.children), dict(lower.keys)
    for name, value in upper.children.items():
        children[name] = merge(children[name], value, name) if name in children else value
        keys[name] = upper.keys.get(name, upper.location)
    return Branch(children, upper.location, keys, upper.text)


def from_override(dotted: str, value: Any, location: str | None = None) -> Branch:
    """Return the tree of one command-line override, `--a.b value`, to be merged over a recipe.

    dotted: the key, `-` and `_` alike but in names of the user's own. value: text as typed, parsed as a YAML value, or
    another plain Python value. location: the flag to name in errors, by default `--dotted`.
    """
    location = location or f"--{dotted}"
    tree = _parse_flag(value, location) if isinstance(value, str) else _from_python(value, dotted, location)
    return _nest(dotted, tree, location)


def _nest(dotted: str, tree: Tree, location: str) -> Branch:
    """Return the mapping with `tree` at a dotted key."""
    for key in reversed(split_key(dotted)[0]):
        tree = Branch({key: tree}, location, {key: location})
    assert isinstance(tree, Branch)
    return tree


def from_mapping(values: Mapping[str, Any], location: str = "overrides") -> Branch:
    """Return the tree of plain Python values, to be merged over a recipe: `{"train": {"steps": 4}}` or `{"train.steps":
    4}`.

    Values are numbers, texts, paths, None, lists, mappings, and settings as dataclasses (`GotD(epsilon=0.1)`). Dots
    separate levels in the outermost keys only: below, a name may be the user's own.
    location: the name to use in errors. Raises UserError for any other type, or for a key that is given twice.
    """
    if not isinstance(values, Mapping):
        raise UserError(f"{location} must be a mapping of recipe keys, got {_describe_value(values)}")
    whole: Tree = Branch({}, location)
    for key, value in values.items():
        if not isinstance(key, str) or not key:
            raise UserError(f"{location}: a key must be a text such as 'train.steps', got {shorten(repr(key), 60)}")
        whole = _merge_disjoint(whole, _nest(key, _from_python(value, key, location), location), "")
    assert isinstance(whole, Branch)
    return whole


def _merge_disjoint(lower: Tree, upper: Tree, path: str) -> Tree:
    if not (isinstance(lower, Branch) and isinstance(upper, Branch)):
        raise UserError(f"{upper.location}: {path} is given twice; keep one of them")
    children = dict(lower.children)
    for key, tree in upper.children.items():
        children[key] = _merge_disjoint(children[key], tree, f"{path}.{key}".strip(".")) if key in children else tree
    return Branch(children, lower.location, dict.fromkeys(children, lower.location))


def _from_python(value: Any, key: str, location: str) -> Tree:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {setting_key(f.name): getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        children = {str(name): _from_python(item, f"{key}.{name}", location) for name, item in value.items()}
        return Branch(children, location, dict.fromkeys(children, location))
    if isinstance(value, list | tuple):
        return Items(tuple(_from_python(item, key, location) for item in value), location)
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        value = int(value)  # NumPy integers too
    elif isinstance(value, numbers.Real) and not isinstance(value, bool):
        value = float(value)
    elif isinstance(value, Path):
        value = str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return Leaf(value, str(value), location)
    raise UserError(
        f"{location}: {key} cannot be {_describe_value(value)}; give a number, a text, a list, a mapping or None"
    )


def _describe_value(value: Any) -> str:
    return f"{shorten(repr(value), 60)} ({type(value).__name__})"


def kinds_first(key: str) -> tuple[int, bool]:
    """Sort keys of one layer by this, so that no `kind` drops the settings that were given with it."""
    return key.count("."), not key.endswith(".kind")


def refuse_contradictions(overrides: Iterable[Branch]) -> None:
    """Raise UserError where two flags of one command line set the same key to different values.

    If a flag is repeated under the same name, the last one counts.
    """
    before: dict[str, tuple[Leaf | Items, str]] = {}
    for override in overrides:
        for key, tree, text in _iter_values(override):
            other, said = before.setdefault(key, (tree, text))
            equal = getattr(tree, "value", _flag_text(tree)) == getattr(other, "value", _flag_text(other))
            if other.location != tree.location and not equal:
                raise UserError(f"{tree.location} {text} and {other.location} {said} contradict each other; keep one")
            before[key] = tree, text


def _iter_values(tree: Tree, key: str = "", text: str = "") -> Iterator[tuple[str, Leaf | Items, str]]:
    """Yield every value of an override with its key and the text typed for it, or for the mapping that holds it."""
    if isinstance(tree, Branch):
        for name, child in tree.children.items():
            yield from _iter_values(child, f"{key}.{name}".lstrip("."), text or tree.text)
    else:  # a component's bare name is its kind
        yield key.removesuffix(".kind"), tree, text or _flag_text(tree)


def _flag_text(tree: Leaf | Items) -> str:
    if isinstance(tree, Items):
        return " ".join(_flag_text(item) for item in tree.items if isinstance(item, Leaf | Items))
    return tree.text


def _parse_flag(text: str, location: str) -> Tree:
    """Parse a typed value as YAML if possible, and keep the text itself: a text setting takes it as typed."""
    try:
        tree = _relabel(parse(text, location), location)
    except UserError:
        return Leaf(text, text, location)
    if isinstance(tree, Leaf) or not text.strip():
        return Leaf(tree.value if isinstance(tree, Leaf) else text, text, location)
    return dataclasses.replace(tree, text=text)


def _relabel(tree: Tree, location: str) -> Tree:
    if isinstance(tree, Leaf):
        return dataclasses.replace(tree, location=location)
    if isinstance(tree, Items):
        return Items(tuple(_relabel(item, location) for item in tree.items), location)
    return Branch(
        {k: _relabel(v, location) for k, v in tree.children.items()}, location, dict.fromkeys(tree.children, location)
    )
