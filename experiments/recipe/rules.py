"""Settings that no run can combine, refused before anything is read or trained; a table on top of the one for meshes.

`flatshift.finetune.planner.rules` lists the combinations that work on a mesh; this table lists the other conflicts in a
recipe, and the restrictions of cells of a sweep or study. docs/support-matrix.md prints both. Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from flatshift.experiments.recipe.schema import Recipe, WarmUp, warm_up_task
from flatshift.finetune.compute.cuda_status import resolve_device
from flatshift.finetune.config import FACTOR_OPTIMIZERS
from flatshift.finetune.errors import UserError
from flatshift.finetune.models.backbone import check_task, open_backbone
from flatshift.finetune.models.quantize import check_available
from flatshift.finetune.planner.rules import RuleSettings, check_settings
from flatshift.finetune.train.trackers import check_trackers
from flatshift.regularizers import build as build_regularizer
from flatshift.selection.config import GotD

COMPILED_REGULARIZERS = ("plain", "ggpo", "flat-lora")
"""Regularizers whose compiled steps are compared with eager ones in the tests."""


@dataclass(frozen=True)
class RecipeRule:
    """A message and the condition for raising it.

    says: the conflict, its reason and the nearest valid setting; `{it}` is the value that `broken` returned. broken:
    returns the offending value of a recipe; None or False if it obeys the rule.
    """

    says: str
    broken: Callable[[Recipe], Any]


def _compile_rule(setting: str, reason: str, broken: Callable[[Recipe], Any]) -> RecipeRule:
    return RecipeRule(
        f"train.compile does not go with {setting}: {reason}; leave one of them out",
        lambda recipe: recipe.train.compile and broken(recipe),
    )


def _find_split_conflict(recipe: Recipe) -> str | None:
    conflicts = {
        "train.truncation: nothing is cut": recipe.train.truncation is not None,
        "data.label_noise, which is drawn over whole rows": recipe.data.label_noise,
        "adapter.projector, whose vectors are of whole rows": recipe.adapter.projector is not None,
    }
    return next((setting for setting, broken in conflicts.items() if broken), None)


def _find_uneven_warm_up(recipe: Recipe) -> str | None:
    ranks = recipe.mesh.replicate * recipe.mesh.dp
    if recipe.warmup is None or recipe.warmup.batch_size % ranks == 0:
        return None
    return f"{recipe.warmup.batch_size} rows do not divide among the {ranks}"


def _find_gauss_newton_requirement(recipe: Recipe) -> str | None:
    train = recipe.train
    wrong = {
        "a squared loss: task.kind: regress, or classify with task.loss: squared": not recipe.task.squares,
        "regularizer.kind: plain, since it goes along no gradient": recipe.regularizer.kind != "plain",
        "train.precision: fp32": train.precision not in ("fp32", "auto"),
        "train.adapter_precision: auto or fp32": train.adapter_precision == "bf16",
        "LoRA without dora, soft tokens or dropout": recipe.adapter.dora
        or recipe.adapter.soft_tokens is not None
        or recipe.adapter.dropout > 0,
        "a plain backbone: leave train.quantization, train.compile and train.checkpointing out": train.compile
        or train.quantization is not None
        or train.checkpointing != "none",
        "no `warmup` block": recipe.warmup is not None,
    }
    return next((fix for fix, broken in wrong.items() if broken), None)


RULES: tuple[RecipeRule, ...] = (
    RecipeRule(
        "train.group: {it} has no use with task.pack: true, whose rows are full; leave it out, or set task.pack: false",
        lambda r: r.task.pack and r.train.group,
    ),
    RecipeRule(
        "train.overlong: split reads plain texts in pieces (task.kind: language-model or masked-lm), and task.kind: "
        "{it} has none; set it to null, drop or refuse",
        lambda r: r.train.overlong == "split" and not r.task.traits.splits_documents and r.task.kind,
    ),
    RecipeRule(
        "train.overlong: split does not go with {it}; leave one of them out",
        lambda r: r.train.overlong == "split" and _find_split_conflict(r),
    ),
    RecipeRule(
        "train.epochs: sources mixed by weight come round at different times, so that none of them ends an epoch; give "
        "train.steps",
        lambda r: r.train.epochs is not None and r.data.train.sources is not None,
    ),
    RecipeRule(
        "data.train.sources.{it}.when_over: refuse cannot be promised with train.spikes, which leaves batches out and "
        "reads on; set it to repeat, or leave spikes out",
        lambda r: r.train.spikes is not None
        and next((name for name, one in (r.data.train.sources or {}).items() if one.when_over == "refuse"), None),
    ),
    RecipeRule(
        "optimizer.kind: {it} is for one process; leave mesh.auto off, or take adamw",
        lambda r: r.mesh.auto and r.optimizer.kind not in ("adamw", *FACTOR_OPTIMIZERS) and r.optimizer.kind,
    ),
    RecipeRule(
        "optimizer.kind: gauss-newton solves least squares; it needs {it}",
        lambda r: r.optimizer.kind == "gauss-newton" and _find_gauss_newton_requirement(r),
    ),
    RecipeRule(
        "train.compile: mesh.auto does not plan compiled blocks; write the mesh out, or leave compile off",
        lambda r: r.train.compile and r.mesh.auto,
    ),
    _compile_rule(
        "train.quantization", "quantised products are the library's own kernels",
        lambda r: r.train.quantization is not None,
    ),
    _compile_rule(
        "train.checkpointing", "it replaces the blocks' own forward pass", lambda r: r.train.checkpointing != "none"
    ),
    _compile_rule(
        "adapter.dropout", "compiled masks are not those of the same seed", lambda r: r.adapter.dropout > 0
    ),
    _compile_rule(
        "adapter.projector", "features enter between the blocks", lambda r: r.adapter.projector is not None
    ),
    _compile_rule(
        "adapter.dora", "its norms are taken without a gradient inside of the graph", lambda r: r.adapter.dora
    ),
    _compile_rule(
        "regularizer.kind: {it}", "it has not been compared with eager steps",
        lambda r: r.regularizer.kind not in COMPILED_REGULARIZERS and r.regularizer.kind,
    ),
    RecipeRule(
        "train.compile does not go with record: what is recorded is of plain blocks; leave one out",
        lambda r: r.train.compile and r.record is not None,
    ),
    RecipeRule(
        "record: a run on a mesh is not recorded; leave every axis of mesh at 1, or take the block out",
        lambda r: r.record is not None and (r.mesh.size > 1 or r.mesh.auto),
    ),
    RecipeRule(
        "record: dynamics and sharpness are of LoRA factors, and adapter.soft_tokens trains none; set "
        "record.dynamics: false and leave record.sharpness out",
        lambda r: r.record is not None
        and (r.record.dynamics or r.record.sharpness)
        and r.adapter.soft_tokens is not None,
    ),
    RecipeRule(
        "record.sharpness is of a loss whose slope the gradient is, and that of task.dft leaves out its weights; leave "
        "one of them out",
        lambda r: r.record is not None and r.record.sharpness and r.task.dft,
    ),
    RecipeRule(
        "adapter.projector: the rows of a warm-up are texts without features; leave the recipe's `warmup` block out",
        lambda r: r.warmup is not None and r.adapter.projector is not None,
    ),
    RecipeRule(
        "adapter.soft_tokens: a warm-up hands on the factors of LoRA, and its soft tokens would be thrown away; leave "
        "the recipe's `warmup` block out",
        lambda r: r.warmup is not None and r.adapter.soft_tokens is not None,
    ),
    RecipeRule(
        "the recipe has a `warmup` block but no `select` block: name a pool in select.pool.files, or read the target's "
        "own texts alone with warmup.own: 1",
        lambda r: r.warmup is not None and r.select is None and r.warmup.own < 1,
    ),
    RecipeRule(
        "warmup.own: 1 reads own texts alone and no selection; leave the `select` block out (--select null) but for "
        "select.target and select.columns, or take a share below 1",
        lambda r: r.select is not None and r.selection is None and not r.select.is_target_alone,
    ),
    RecipeRule(
        "select.from: the recipe has no `warmup` block to train on that selection; add --warmup.steps 100, or train on "
        "its records alone, as --data.train.files DIR/selected.jsonl",
        lambda r: r.select is not None and r.select.from_ is not None and r.warmup is None,
    ),
    RecipeRule(
        "select: without a `warmup` block no training reads the selection; add --warmup.steps 100, or select first "
        "(`flatshift select`) and name its selected.jsonl in data.train.files",
        lambda r: r.select is not None and r.warmup is None,
    ),
    RecipeRule(
        "warmup.batch_size: {it} data ranks of the mesh; take a multiple of them", _find_uneven_warm_up,
    ),
)  # fmt: skip
CELL_RULES: tuple[RecipeRule, ...] = (
    RecipeRule(
        "tracker.kinds: the cells of a sweep or study are not tracked; leave the block out",
        lambda r: bool(r.tracker.kinds),  # there would be one run for each of hundreds of cells
    ),
    RecipeRule(
        "mesh: a cell of a sweep or study trains on one device; leave every axis at 1 and auto off",
        lambda r: r.mesh.size > 1 or r.mesh.auto,
    ),
    RecipeRule(
        "train.epochs: an axis of a sweep and a study are planned before their rows are counted; give train.steps",
        lambda r: r.train.epochs is not None,
    ),
)
"""Restrictions of a cell of a sweep or study, in addition to `RULES`."""
SPLIT_RULES: tuple[RecipeRule, ...] = (
    RecipeRule(
        "select.method.kind: {it} is not divided among processes, only gotd is, whose passes over the pool need no "
        "more of each other than sums; leave --processes out, or take gotd",
        lambda r: r.select is not None and not isinstance(r.select.method, GotD) and r.select.method.kind,
    ),
    RecipeRule(
        "select.method.rounds: {it} rounds are solved in one process; set it to 1, or leave --processes out",
        lambda r: r.select is not None and isinstance(r.select.method, GotD) and r.select.method.rounds > 1
        and r.select.method.rounds,
    ),
    RecipeRule(
        "select.method.debiased: the pool's potential to itself is found in one process; leave it or --processes out",
        lambda r: r.select is not None and isinstance(r.select.method, GotD) and r.select.method.debiased,
    ),
)  # fmt: skip
"""Restrictions of a selection over several processes."""


def check_rules(recipe: Recipe, rules: Iterable[RecipeRule] = RULES) -> None:
    """Raise UserError for the first rule that the recipe breaks."""
    for rule in rules:
        if value := rule.broken(recipe):
            raise UserError(rule.says.format(it=value))


def check_recipe(recipe: Recipe) -> None:
    """Raise UserError for a recipe that no run can carry out: conflicting settings, a missing package, an invalid
    regularizer setting, or a task that the backbone has no class for."""
    from flatshift.finetune.train.optimizer import check_optimizer
    from flatshift.finetune.train.stage import check_metric

    build_regularizer(recipe.regularizer)
    check_settings(RuleSettings.of(recipe))
    check_available(recipe.train.quantization)
    check_rules(recipe)
    kind = recipe.optimizer.kind
    check_optimizer(kind, device=resolve_device(recipe.train.device).type if kind.startswith("paged") else None)
    check_trackers(recipe.tracker)
    check_metric(recipe.train.best, recipe.task, "train.best")
    requested = {
        "train.compile": recipe.train.compile,
        "data.label_noise": recipe.data.label_noise,
        "record": recipe.record is not None,
    }
    for setting in filter(requested.get, requested):
        recipe.task.traits.refuse(setting)
    if recipe.warmup is not None:
        _check_warm_up(recipe, recipe.warmup)
    recipe.task.input_format.template_record()


def _check_warm_up(recipe: Recipe, warmup: WarmUp) -> None:
    """Refuse a warm-up that the backbone cannot be trained with, and a fine-tune that would fail after it."""
    recipe.task.traits.refuse("warmup")
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
        check_settings(replace(RuleSettings.of(recipe), task=task))
    except UserError as error:
        raise UserError(f"the recipe's `warmup` block: {error}") from None
    begun = recipe.adapter.init != "default" or recipe.adapter.under is not None
    if begun and task.traits.has_new_head:
        setting = "adapter.under" if recipe.adapter.under is not None else f"adapter.init: {recipe.adapter.init}"
        raise UserError(
            f"{setting} does not go with the warm-up of an encoder, whose stages differ in their heads; leave one out"
        )
