"""Recipes: strict YAML 1.2 in, frozen dataclasses out, with the origin of every value."""

from flatshift.experiments.recipe.gallery import gallery_recipes
from flatshift.experiments.recipe.resolve import (
    Resolved,
    list_input_files,
    load_recipe,
    read_shipped_recipe,
    recipe_like,
    resume_recipe,
    shipped_recipes,
)
from flatshift.experiments.recipe.schema import recipe_key
from flatshift.experiments.recipe.tree import from_mapping, from_override, refuse_contradictions

__all__ = [
    "Resolved",
    "from_mapping",
    "from_override",
    "gallery_recipes",
    "list_input_files",
    "load_recipe",
    "read_shipped_recipe",
    "recipe_key",
    "recipe_like",
    "refuse_contradictions",
    "resume_recipe",
    "shipped_recipes",
]
