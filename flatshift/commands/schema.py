"""`flatshift schema`: the JSON schema of recipes, for editors."""

from __future__ import annotations

import json
from dataclasses import dataclass

from flatshift.command_line import parse_flags
from flatshift.experiments.recipe.json_schema import recipe_schema


@dataclass(frozen=True)
class Flags:
    """Print the JSON schema of recipes: all keys, types, choices, defaults and meanings, for completion in editors."""


def run(argv: list[str]) -> int:
    parse_flags(Flags, "schema", argv)
    print(json.dumps(recipe_schema(), indent=2, ensure_ascii=False))
    return 0
