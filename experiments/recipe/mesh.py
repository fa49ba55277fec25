"""`mesh.auto` of a recipe: one mesh for all ranks, decided once, as flags that every rank understands."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from experiments.recipe.config import Recipe
from experiments.recipe.tree import Branch
from finetune import assets
from finetune.config import Mesh
from finetune.errors import user_path
from finetune.launch import consistency, failure, spawn
from finetune.planner.auto_mesh import resolve
from finetune.planner.layouts import AXES


def mesh_flags(recipe: Recipe, *, given: Collection[str] | None = None) -> list[str]:
    """Flags that put a mesh in place of `mesh.auto`; none where the recipe does not ask for one.

    The reasons go to stderr. Among ranks that a launcher started, rank 0 decides for all.

    Args:
        given: where a run is continued, the axes that were named now; the others are chosen anew. None: all that are
            set stay.

    Raises:
        UserError: no mesh of so many ranks is possible; or the backbone cannot be found.
    """
    if not recipe.mesh.auto:
        return []
    asked = recipe.mesh
    if given is not None:
        anew: dict[str, Any] = {axis: 1 for axis in AXES if axis not in given}
        asked = dataclasses.replace(asked, **anew)
    text = ""
    if failure.rank() == 0:
        mesh, reasons = _resolve(recipe, asked)
        print("\n".join(reasons), file=sys.stderr, flush=True)
        text = json.dumps(axis_flags(mesh))
    return json.loads(consistency.word_of_main("mesh", text))


def axis_flags(mesh: Mesh) -> list[str]:
    """The axes of `mesh` as flags."""
    return [*(f"--mesh.{axis}={getattr(mesh, axis)}" for axis in AXES), "--mesh.auto=false"]


def named_axes(overrides: Iterable[Branch]) -> set[str]:
    """The mesh settings among command-line overrides."""
    meshes = [override.children.get("mesh") for override in overrides]
    return {name for mesh in meshes if isinstance(mesh, Branch) for name in mesh.children}


def _resolve(recipe: Recipe, asked: Mesh) -> tuple[Mesh, list[str]]:
    processes = node = None
    if spawn.launched():
        processes = int(os.environ["WORLD_SIZE"])
        node = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    return resolve(
        asked,
        backbone=backbone_directory(recipe.backbone),
        adapter=recipe.adapter,
        train=recipe.train,
        task=recipe.task,
        regularizer=recipe.regularizer,
        batch_sizes=[] if recipe.warmup is None else [recipe.warmup.batch_size],
        processes=processes,
        node=node,
    )


def backbone_directory(name: str) -> Path:
    """Where the files of the backbone `name` lie; asks the hub, and so imports torch, only for a hub name."""
    found = assets.backbone(name) or user_path(name)
    if (found / "config.json").is_file():
        return found
    from finetune.models.backbone import open_backbone  # asks the hub, and imports torch

    return open_backbone(name).directory
