"""The names of all recipe keys as flags have them, from the dataclasses themselves: for help texts and near names."""

from __future__ import annotations

import dataclasses
import functools
import textwrap
import typing

from experiments.recipe.config import Recipe
from experiments.recipe.tree import key_of


@functools.cache
def dotted_keys() -> tuple[str, ...]:
    """Every key that takes a value, as `train.steps`, in the order of the dataclasses; of a component with kinds, the
    settings of all of them."""
    return tuple(dict.fromkeys(_below(Recipe, "")))


def _below(cls: type, path: str) -> typing.Iterator[str]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        key = f"{path}.{key_of(field.name)}" if path else field.name
        hint = hints[field.name]
        options = typing.get_args(hint) or (hint,)
        components = [option for option in options if dataclasses.is_dataclass(option)]
        for component in components:
            yield from _below(typing.cast(type, component), key)
        if not components:
            yield key


def keys_by_room(width: int = 100) -> str:
    """Paragraphs `train: steps, batch_size, …`, a room each, no line longer than `width` characters."""
    rooms: dict[str, list[str]] = {}
    for key in dotted_keys():
        room, _, rest = key.partition(".")
        rooms.setdefault(room if rest else "", []).append(rest or room)
    lines = ["recipe keys, each a flag, as --train.steps 100 (docs/recipes.md says what they mean):"]
    for room, names in sorted(rooms.items()):
        head = f"--{room}." if room else "--"
        lines += textwrap.wrap(
            f"{head} {', '.join(names)}",
            width,
            initial_indent="  ",
            subsequent_indent="      ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def ending_with(word: str) -> list[str]:
    """Keys whose last word is `word`: those of the training first, the deepest last."""
    found = [key for key in dotted_keys() if "." in key and key.rpartition(".")[2] == word]
    return sorted(found, key=lambda key: (not key.startswith("train."), key.count(".")))
