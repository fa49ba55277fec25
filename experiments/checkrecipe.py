"""What no run can do, refused before anything is read or trained."""

from __future__ import annotations

from dataclasses import replace

from experiments.data.sources import check_data
from experiments.data.splits import warm_up_task
from experiments.recipe.config import Recipe, WarmUp
from finetune.compute.presence import resolve_device
from finetune.errors import UserError
from finetune.models.backbone import open_backbone
from finetune.models.compiled import refuse_compile
from finetune.models.quantize import check_available
from finetune.models.task_support import check_task
from finetune.parallel.rules import Settings, check_settings
from finetune.train.adam8bit import check_optimizer
from finetune.train.stage import check_best
from finetune.train.trackers import check_trackers
from regularizers import build as build_regularizer


def check_recipe(recipe: Recipe) -> None:
    """Refuse what no run can do: settings that a mesh forbids, a warm-up without data, a regularizer's bad setting."""
    build_regularizer(recipe.regularizer)
    check_settings(Settings.of(recipe))
    check_available(recipe.train.quantization)
    check_data(recipe)
    _check_loop(recipe)
    check_best(recipe.train, recipe.task)
    if recipe.record is not None and (recipe.mesh.size > 1 or recipe.mesh.auto):
        raise UserError("record: a run on a mesh is not recorded; leave every axis of mesh at 1, or take the block out")
    of_factors = recipe.record is not None and (recipe.record.dynamics or recipe.record.sharpness)
    if of_factors and recipe.adapter.soft_tokens is not None:
        raise UserError(
            "record: dynamics and sharpness are of LoRA factors, and adapter.soft_tokens trains none; set "
            "record.dynamics: false and leave record.sharpness out"
        )
    if recipe.warmup is not None:
        _check_warm_up(recipe, recipe.warmup)
    recipe.task.template_record()
    if recipe.data.label_noise:
        recipe.task.refuse("data.label_noise")
    if recipe.record is not None:
        recipe.task.refuse("record")


def _check_warm_up(recipe: Recipe, warmup: WarmUp) -> None:
    """Refuse a warm-up that could not be trained, and a fine-tune after it that would be refused only then."""
    if recipe.adapter.soft_tokens is not None:
        why = "adapter.soft_tokens: a warm-up hands on the factors of LoRA, and its soft tokens would be thrown away"
        if recipe.adapter.projector is not None:
            why = "adapter.projector: the rows of a warm-up are texts without features"
        raise UserError(f"{why}; leave the recipe's `warmup` block out")
    if recipe.select is None:
        raise UserError("the recipe has a `warmup` block but no `select` block: name a pool in select.pool.files")
    ranks = recipe.mesh.replicate * recipe.mesh.dp
    if warmup.batch_size % ranks:
        raise UserError(
            f"warmup.batch_size: {warmup.batch_size} rows do not divide among the {ranks} data ranks of the mesh; take "
            "a multiple of them"
        )
    recipe.task.refuse("warmup")
    if open_backbone(recipe.backbone).has_both_sides:
        raise UserError(
            f"the recipe's `warmup` block trains a decoder or an encoder alone, and backbone {recipe.backbone!r} has "
            "both; leave it out"
        )
    task, _ = warm_up_task(recipe)
    try:
        check_task(recipe.backbone, task)
    except UserError as error:
        if warmup.task is None:
            raise
        raise UserError(f"warmup.task: {error}; without warmup.task the backbone decides") from None
    check_task(recipe.backbone, recipe.task)
    try:
        check_settings(replace(Settings.of(recipe), task=task))
    except UserError as error:
        raise UserError(f"the recipe's `warmup` block: {error}") from None
    begun = recipe.adapter.init != "default" or recipe.adapter.under is not None
    if begun and task.new_head:
        what = "adapter.under" if recipe.adapter.under is not None else f"adapter.init: {recipe.adapter.init}"
        raise UserError(
            f"{what} does not go with the warm-up of an encoder, whose stages differ in their heads; leave one out"
        )


def _check_loop(recipe: Recipe) -> None:
    """Refuse what the loop cannot do here: optimizers, compiled blocks, trackers."""
    kind = recipe.optimizer.kind
    if kind != "adamw" and recipe.mesh.auto:
        raise UserError(f"optimizer.kind: {kind} is for one process; leave mesh.auto off, or take adamw")
    check_optimizer(kind, device=resolve_device(recipe.train.device).type if kind.startswith("paged") else None)
    refuse_compile(
        recipe.train, mesh=recipe.mesh, adapter=recipe.adapter, task=recipe.task, regularizer=recipe.regularizer.kind
    )
    if recipe.train.compile and recipe.record is not None:
        raise UserError("train.compile does not go with record: what is recorded is of plain blocks; leave one out")
    check_trackers(recipe.tracker)
