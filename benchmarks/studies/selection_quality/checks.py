"""Recipes that cannot serve a study of selectors are refused here, before any cell is made."""

from __future__ import annotations

from benchmarks.studies.cells.refusing import refuse_in_study
from benchmarks.studies.selection_quality.settings import Quality
from flatshift.experiments.recipe.schema import Recipe, Select
from flatshift.finetune.data.config import Data
from flatshift.finetune.errors import UserError
from flatshift.selection.config import required_inputs

_UNREAD = {
    "pool": "name the pool in quality.pool",
    "target": "name targets in quality.targets",
    "negative": "leave it out",
    "eval": "leave it out, its pool is kept clear of every target's rows",
    "budget": "set quality.budgets",
    "chunk": "leave it out and cut the pool's file beforehand",
    "relevance": "leave it out",
    "cache": "leave it out, features are kept in its own directory",
    "domain_column": "name domains in quality.tags",
}
"""Keys of `select` that a study never reads, and what to do instead."""


def check_study(recipe: Recipe, study: Quality) -> None:
    """Raise UserError for a recipe whose blocks do not make a study."""
    if not study.targets or not study.arms or not study.pool:
        raise UserError("quality.pool, quality.targets and quality.arms must name a pool, a target and two arms")
    if recipe.select is None or recipe.warmup is None:
        raise UserError("a study of selectors needs the blocks `select` and `warmup`: both are its settings")
    _check_read(recipe)
    near = recipe.select.hygiene.decontaminate
    if near is not None and near.action == "split":
        raise UserError("select.hygiene.decontaminate.action: passages of a study stay whole; set it to drop")
    check_cells(recipe)


def check_cells(recipe: Recipe, where: str = "") -> None:
    """Raise UserError for settings that the runs of a study cannot have; where: who set them, for the error."""
    from flatshift.finetune.planner.rules import RuleSettings, check_settings

    assert recipe.warmup is not None
    if not recipe.task.one_class:
        kind = f"{recipe.task.kind} with multi" if recipe.task.multi else recipe.task.kind
        raise UserError(f"{where}a study of selectors fine-tunes classifiers of one class a row, not task.kind: {kind}")
    if recipe.warmup.task is not None:
        raise UserError(
            f"{where}warmup.task: a study of selectors warms up a decoder by its own packed rows; leave it out"
        )
    if recipe.mesh.size > 1 or recipe.train.quantization is not None:
        raise UserError(f"{where}a study of selectors runs each cell in one process on the backbone as it is")
    for name in ("truncation", "overlong"):
        if getattr(recipe.train, name) is not None:
            raise UserError(
                f"{where}train.{name}: a study of selectors cuts longer texts at their right end; leave it out"
            )
    refuse_in_study(recipe)
    check_settings(RuleSettings.of(recipe))


def check_method(recipe: Recipe, where: str) -> None:
    """Raise UserError for a selector that needs what a study does not hand in; where: the arm."""
    assert recipe.select is not None
    short = required_inputs(recipe.select.method) - {"features", "texts", "tokens"}
    if short:
        raise UserError(
            f"{where}: method {recipe.select.method.kind} needs {', '.join(sorted(short))}, which a study of selectors "
            "does not hand in"
        )


def _check_read(recipe: Recipe) -> None:
    """Raise UserError for a setting that says something to other commands and nothing to a study."""
    if recipe.data != Data():
        raise UserError("data: a study of selectors does not read it; name its files in quality.targets")
    default = Select()
    for name, instead in _UNREAD.items():
        if getattr(recipe.select, name) != getattr(default, name):
            raise UserError(f"select.{name}: a study of selectors does not read it; {instead}")
