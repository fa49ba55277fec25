"""`flatshift schema`: the JSON schema of recipes, for editors."""

from __future__ import annotations

from dataclasses import dataclass

from flatshift.command_line import parse_flags, print_json
from flatshift.experiments.recipe.json_schema import recipe_schema


@dataclass(frozen=True)
class Flags:
    """Print the JSON schema of recipes: all keys, types, choices, defaults and meanings, for completion in editors."""


def run(argv: list[str]) -> int:
    parse_flags(Flags, "schema", argv)
    print_json(recipe_schema())
    return 0
