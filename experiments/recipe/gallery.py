"""Gallery of recipes by task, model family and hardware: YAML texts of a few lines, generated from gallery.yaml."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatshift.experiments.recipe.build import to_python
from flatshift.experiments.recipe.tree import dump, parse_file

_TABLE = Path(__file__).with_name("gallery.yaml")
_BLOCKS = ("task", "adapter", "optimizer", "train", "mesh", "eval")
_FOUR_BITS = ', in four bits (needs pip install "flatshift[quant]")'


@dataclass(frozen=True)
class GalleryRecipe:
    """One recipe of the gallery."""

    name: str
    summary: str
    task: str  # also the shipped recipe that it extends
    family: str
    backbone: str
    hardware: str
    gpus: str
    """Cluster of `flatshift plan --gpus`."""
    text: str
    """Whole YAML, with comments."""


@functools.cache
def gallery_recipes() -> Mapping[str, GalleryRecipe]:
    """Return name → recipe, in the order of the table."""
    table = to_python(parse_file(_TABLE))
    recipes = {}
    for family, lines in table["families"].items():
        for model, backbone, task, places, *settings in lines:
            for hardware, train in places.items():
                name, layers = f"{model}-{task}-{hardware}", (*settings, {"train": train})
                recipe = _write_recipe(table, family, name, backbone, task, hardware, layers)
                recipes[recipe.name] = recipe
    return recipes


def _write_recipe(
    table: dict[str, Any],
    family: str,
    name: str,
    backbone: str,
    task: str,
    hardware: str,
    layers: Sequence[dict[str, Any]],
) -> GalleryRecipe:
    """Return a recipe of the settings of its hardware, its task, and `layers`, later ones on top."""
    machine, kind = table["hardware"][hardware], table["tasks"][task]
    layers = (machine["settings"], kind["settings"], *layers)
    tree: dict[str, Any] = {"extends": task, "backbone": backbone}
    for block in _BLOCKS:
        if values := {key: value for layer in layers for key, value in layer.get(block, {}).items()}:
            tree[block] = values
    bits = _FOUR_BITS if "quantization" in tree["train"] else ""
    summary = f"{kind['title']}: {backbone.rpartition('/')[2]} on {machine['title']}{bits}"
    text = (
        f"# {summary}\n#\n#   flatshift train {name} --data {kind['rows']} --out runs/mine\n"
        f"#   flatshift plan {name}      # for {machine['gpus']}\n"
        f"{dump(tree)}"
    )
    return GalleryRecipe(name, summary, task, family, backbone, hardware, machine["gpus"], text)
