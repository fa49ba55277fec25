"""JSON schema (draft 7) of recipes, for completion in editors, from the settings' dataclasses and their docstrings."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import typing
from collections.abc import Iterator
from typing import Any, Literal

from flatshift.experiments.recipe.schema import Recipe, hint_options, setting_key

_SCALARS = {int: "integer", float: "number", bool: "boolean", str: "string", type(None): "null"}
_ANY = {"type": ["boolean", "null", "number", "string"]}


def recipe_schema() -> dict[str, Any]:
    """Return the schema that a recipe file must match: all keys, types, choices, defaults and meanings.

    Keys of a component without its `kind` may be those of any kind, since the recipe that it extends may name it.
    """
    definitions: dict[str, Any] = {}
    _define(Recipe, definitions)
    root = definitions.pop(Recipe.__name__)
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Flatshift recipe"}
    named = {"comparison": {"properties": {"tasks": {"additionalProperties": {"required": ["file"]}}}}}
    alone = {"if": {"not": {"required": ["extends"]}}, "then": {"properties": named}}
    return {**head, **root, **alone, "definitions": dict(sorted(definitions.items()))}


def _define(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return a reference to the schema of a dataclass, which is added to `definitions`."""
    name = cls.__name__
    if name not in definitions:
        definitions[name] = {}  # a component may hold itself
        docs, properties = field_docs(cls), {}
        for field, hint, components in iter_fields(cls):
            schema = _value_schema(hint, definitions)
            if "$ref" in schema:  # draft 7 ignores what stands next to a reference
                schema = {"allOf": [schema]}
            default = _plain_default(field, components)
            properties[setting_key(field.name)] = {"description": docs.get(field.name, ""), **schema, **default}
        definitions[name] = {
            "type": "object",
            "description": " ".join((cls.__doc__ or "").split("\n\n")[0].split()),
            "properties": properties,
            "additionalProperties": False,
        }
    return {"$ref": f"#/definitions/{name}"}


def _plain_default(field: dataclasses.Field[Any], components: list[type]) -> dict[str, Any]:
    default: Any = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    if default is dataclasses.MISSING:
        return {}
    if components and default is not None:
        return {"default": getattr(default, "kind", None)} if len(components) > 1 else {}
    return {"default": list(default) if isinstance(default, tuple) else default}


def _value_schema(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    options = [option for option in hint_options(hint) if option is not type(None)]
    choices = [_option_schema(option, definitions, is_list=len(options) > 1) for option in hint_options(hint)]
    components = [option for option in hint_options(hint) if isinstance(option, type) and hasattr(option, "kind")]
    kinds = [kind for each in components for kind in typing.get_args(typing.get_type_hints(each)["kind"])]
    if len(kinds) > 1:
        choices.insert(0, {"enum": kinds})
    return choices[0] if len(choices) == 1 else {"anyOf": choices}


def _option_schema(hint: Any, definitions: dict[str, Any], *, is_list: bool) -> dict[str, Any]:
    """Return the schema of a type; is_list: a tuple is written as a list even if it has one value."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _define(hint, definitions)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _value_schema(arguments[1], definitions)}
    if hint is tuple or (origin is tuple and arguments[-1] is Ellipsis):
        item = _value_schema(arguments[0], definitions) if arguments else _ANY
        several = {"type": "array", "items": item}
        return several if is_list else {"anyOf": [several, item]}
    if origin is tuple:
        items = [_value_schema(argument, definitions) for argument in arguments]
        return {"type": "array", "items": items, "minItems": len(items), "maxItems": len(items)}
    return {"type": _SCALARS[hint]} if hint in _SCALARS else {}


def field_docs(cls: type) -> dict[str, str]:
    """Return field name → the string literal that follows it in the class body, or in that of a base."""
    docs = {}
    for base in reversed([base for base in cls.__mro__ if dataclasses.is_dataclass(base)]):
        (tree,) = ast.parse(inspect.cleandoc(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for here, after in zip(tree.body, tree.body[1:], strict=False):
            output = after.value if isinstance(after, ast.Expr) else None
            if isinstance(here, ast.AnnAssign) and isinstance(output, ast.Constant):
                assert isinstance(here.target, ast.Name)
                docs[here.target.id] = " ".join(str(output.value).split())
    return docs


def iter_fields(cls: type) -> Iterator[tuple[dataclasses.Field[Any], Any, list[type]]]:
    """Yield every field of a dataclass with its type and the components that it may hold."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        types = [option for option in hint_options(hint) if isinstance(option, type)]
        yield field, hint, [option for option in types if dataclasses.is_dataclass(option)]
