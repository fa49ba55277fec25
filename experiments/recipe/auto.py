"""Values for the `auto` settings of a recipe: precisions, decided once, printed, saved and kept on every later machine;
and `mesh.auto`, one mesh for all ranks, returned as flags that every rank understands."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from flatshift.experiments.recipe.build import build_settings
from flatshift.experiments.recipe.resolve import Resolved, is_given, read_origins, resolve_tree
from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.recipe.tree import Branch, Tree, from_override, merge, parse_file
from flatshift.finetune import assets
from flatshift.finetune.config import MESH_AXES, Mesh, Precision, Train
from flatshift.finetune.data.chat.template import AUTO, describe_template, resolve_template
from flatshift.finetune.errors import UserError, user_path
from flatshift.finetune.figures import format_bytes
from flatshift.finetune.launch import consistency, job, spawn
from flatshift.finetune.models.families import LEAKS_PACKED
from flatshift.finetune.planner.footprint import recipe_footprint
from flatshift.finetune.planner.layouts import resolve_mesh
from flatshift.finetune.planner.rules import RuleSettings, broken_rule
from flatshift.finetune.planner.sizes import BackboneSizes

PRECISION, BACKBONE = "precision", "backbone_precision"


def resolve_auto(
    resolved: Resolved, *, log: Callable[[str], None] = lambda line: None, previous: Path | None = None
) -> Resolved:
    """Return `resolved` with `train.precision` and `train.backbone_precision` for the current device, and
    `task.template` for the backbone's tokenizer, in place of `auto`, and where they come from; with `task.pack: false`
    where nobody asked for packing and the backbone cannot keep samples apart.

    Collective: rank 0 decides for all ranks that a launcher started, and each of them must call this.

    log: Receives the decision with its numbers, and a note if an explicitly set precision is the slower one.
    previous: Resolved recipe of an earlier call for the same directory; precisions decided there are kept.
    Raises UserError: the device is not available, or does not support the precision that is set.
    """
    recipe, train = resolved.recipe, resolved.recipe.train
    values: dict[str, tuple[str, str]] = {}
    before, origins = read_decided_precisions(previous, type(recipe))
    if train.precision == "auto" and before is not None and before.precision != "auto":
        values[PRECISION] = before.precision, origins[PRECISION]
    else:
        decided = json.loads(consistency.broadcast_from_main(PRECISION, json.dumps(_choose_run_precision(recipe))))
        if decided["note"]:
            log(f"note: {decided['note']}")
        if train.precision == "auto":
            log(f"precision: {decided['precision']} (auto: {decided['why']})")
            values[PRECISION] = decided["precision"], f"auto: {decided['why']}"
    if train.backbone_precision == "auto":
        if before is not None and before.backbone_precision != "auto":
            values[BACKBONE] = before.backbone_precision, origins[BACKBONE]
        else:
            values[BACKBONE] = _choose_backbone_precision(resolved.with_values("train", values).recipe)
            if values[BACKBONE][0] != "same":
                log(f"backbone: kept in {values[BACKBONE][0]} ({values[BACKBONE][1]})")
    return _resolve_packing(_resolve_template(resolved.with_values("train", values), log), log)


def resolve_device_precision(recipe: Recipe) -> Recipe:
    """Return `recipe` for evaluation only, on a device that may lack the precision it was trained in.

    An fp16 run is computed in float32 on a CPU. Prints on stderr what changes, and whether the run's precision is slow
    here.
    """
    from flatshift.finetune.compute.cuda_status import resolve_device

    train = recipe.train
    if train.precision == "fp16" and resolve_device(train.device).type == "cpu":
        print("note: the run was trained in fp16, which a CPU has not; computing in fp32", file=sys.stderr)
        return dataclasses.replace(recipe, train=dataclasses.replace(train, precision="fp32"))
    if train.tf32 and resolve_device(train.device).type == "cpu":
        return dataclasses.replace(recipe, train=dataclasses.replace(train, tf32=False))
    decided = _choose_run_precision(recipe)
    if decided.get("note"):
        print(f"note: {decided['note']}", file=sys.stderr)
    return recipe


def resolve_auto_tree(
    tree: Tree,
    *,
    name: str,
    previous: Path | None,
    log: Callable[[str], None] = lambda line: None,
    recipe_type: type[Recipe] = Recipe,
) -> Tree:
    """Return a recipe's tree for cells, with `auto` resolved; keyword arguments as in `resolve_auto`."""
    before = resolve_tree(tree, (), name=name, recipe_type=recipe_type)
    after = resolve_auto(before, log=log, previous=previous)
    for block, key in (("train", PRECISION), ("train", BACKBONE), ("task", "pack")):
        value = getattr(getattr(after.recipe, block), key)
        if value != getattr(getattr(before.recipe, block), key):
            tree = merge(tree, from_override(f"{block}.{key}", value, after.origins[f"{block}.{key}"]))
    return tree


def _choose_run_precision(recipe: Recipe) -> dict[str, str | None]:
    train = recipe.train
    tokens = train.batch_size * train.max_length
    return _choose_precision(train.precision, train.tf32, train.device, train.threads, recipe.backbone, tokens)


def read_decided_precisions(
    file: Path | None, recipe_type: type[Recipe] = Recipe
) -> tuple[Train | None, Mapping[str, str]]:
    """Return the `train` block of a recipe file and the origins of both precisions; None if it cannot be read."""
    try:
        if file is None or not file.is_file():
            return None, {}
        recipe = build_settings(recipe_type, parse_file(file))
    except UserError:
        return None, {}
    origins = read_origins(file, recipe)
    return recipe.train, {name: origins.get(f"train.{name}", "auto") for name in (PRECISION, BACKBONE)}


@functools.cache
def _choose_precision(
    precision: Precision, tf32: bool, device: str, threads: int | None, backbone: str, tokens: int
) -> dict[str, str | None]:
    """Choose the precision for the device, as plain values. tokens: of a micro-batch of the longest rows.

    Empty on ranks other than 0, which do not decide.
    """
    from flatshift.finetune.compute.cuda_status import resolve_device
    from flatshift.finetune.compute.numerics import cpu_threads
    from flatshift.finetune.compute.precision import feed_forward_shape, resolve_precision
    from flatshift.finetune.models.backbone import open_backbone

    if job.rank() != 0:
        return {}
    # Rows are padded to the longest of their micro-batch, which is seldom as long as allowed: hence tokens // 2 below.
    try:
        directory = open_backbone(backbone).directory
    except UserError:  # loading the backbone reports the error later
        directory = None
    shape = feed_forward_shape(directory, tokens=tokens // 2)
    with cpu_threads(threads):
        return dataclasses.asdict(
            resolve_precision(Train(precision=precision, tf32=tf32), resolve_device(device), shape)
        )


def _choose_backbone_precision(recipe: Recipe) -> tuple[str, str]:
    """Return `train.backbone_precision` for `auto`, and the reason: bf16 weights only where float32 ones do not fit."""
    from flatshift.finetune.planner.devices import detect_devices

    train = recipe.train
    narrow = dataclasses.replace(train, backbone_precision="bf16")
    settings = dataclasses.replace(RuleSettings.of(recipe), train=narrow)
    devices = detect_devices(train.device)
    room = devices.each(1)
    if room is None or devices.kind != "cpu" or recipe.mesh.auto or broken_rule(settings) is not None:
        return "same", "auto"
    try:
        backbone = BackboneSizes.read(find_backbone_directory(recipe.backbone), recipe.adapter).under(recipe.task)
    except UserError:  # loading the backbone reports the error later
        return "same", "auto"
    size, narrow_size = (recipe_footprint(backbone, recipe, each, device="cpu").total for each in (train, narrow))
    if size <= room or narrow_size > room:
        return "same", "auto"
    return "bf16", f"auto: {format_bytes(size)} with float32 weights, {format_bytes(room)} are there"


def _resolve_template(resolved: Resolved, log: Callable[[str], None]) -> Resolved:
    """Replace `task.template: auto` by the shipped template where the tokenizer has none; report the one in use."""
    recipe, name = resolved.recipe, resolved.recipe.task.template
    if not recipe.task.input_format.uses_chat_template:
        return resolved
    from flatshift.finetune.models.backbone import open_backbone

    try:
        tokenizer = open_backbone(recipe.backbone).tokenizer
    except UserError:  # loading the backbone reports the error later
        return resolved
    log(describe_template(name, tokenizer))
    if name != AUTO:
        return resolved
    template = resolve_template(name, tokenizer)
    origin = "auto: the tokenizer's own" if template == AUTO else "auto: the tokenizer has none"
    return resolved.with_values("task", {"template": (template, origin)})


def _resolve_packing(resolved: Resolved, log: Callable[[str], None]) -> Resolved:
    """Set `task.pack: false` where packing is a default and the backbone's samples would see each other."""
    from flatshift.finetune.models.backbone import open_backbone

    recipe = resolved.recipe
    if not recipe.task.pack or is_given(resolved, "task.pack"):
        return resolved
    try:
        kind = open_backbone(recipe.backbone).config.get_text_config().model_type
    except UserError:  # loading the backbone reports the error later
        return resolved
    if kind not in LEAKS_PACKED:
        return resolved
    reason = f"auto: {kind} lets packed samples see each other"
    log(f"task.pack: false ({reason})")
    return resolved.with_values("task", {"pack": (False, reason)})


def mesh_flags(recipe: Recipe, *, set_axes: Collection[str] | None = None) -> list[str]:
    """Return flags that replace `mesh.auto` by a mesh; none if the recipe does not ask for one.

    The reasons go to stderr. Rank 0 decides for all ranks that a launcher started.

    set_axes: For a resumed run, the axes set on this command line; the others are chosen again. None: all axes that are
        set stay.

    Raises UserError: no mesh of that many ranks is possible, or the backbone cannot be found.
    """
    if not recipe.mesh.auto:
        return []
    requested, text = recipe.mesh, ""
    if set_axes is not None:
        free: dict[str, Any] = {axis: 1 for axis in MESH_AXES if axis not in set_axes}
        requested = dataclasses.replace(requested, **free)
    if job.rank() == 0:
        processes = node = None
        if spawn.is_launched_rank():
            processes = int(os.environ["WORLD_SIZE"])
            node = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
        mesh, reasons = resolve_mesh(
            requested, backbone=find_backbone_directory(recipe.backbone), adapter=recipe.adapter, train=recipe.train,
            task=recipe.task, optimizer=recipe.optimizer, regularizer=recipe.regularizer,
            batch_sizes=[] if recipe.warmup is None else [recipe.warmup.batch_size], processes=processes, node=node,
        )  # fmt: skip
        print("\n".join(reasons), file=sys.stderr, flush=True)
        text = json.dumps(axis_flags(mesh))
    return json.loads(consistency.broadcast_from_main("mesh", text))


def axis_flags(mesh: Mesh) -> list[str]:
    """Return the axes of `mesh` as flags."""
    return [*(f"--mesh.{axis}={getattr(mesh, axis)}" for axis in MESH_AXES), "--mesh.auto=false"]


def find_mesh_overrides(overrides: Iterable[Branch]) -> set[str]:
    """Return the mesh settings among command-line overrides."""
    meshes = [override.children.get("mesh") for override in overrides]
    return {name for mesh in meshes if isinstance(mesh, Branch) for name in mesh.children}


def find_backbone_directory(name: str) -> Path:
    """Return the directory of the backbone's files; only a hub name asks the hub, and so imports torch."""
    directory = assets.backbone_directory(name) or user_path(name)
    if (directory / "config.json").is_file():
        return directory
    from flatshift.finetune.models.backbone import open_backbone  # asks the hub, and imports torch

    return open_backbone(name).directory
