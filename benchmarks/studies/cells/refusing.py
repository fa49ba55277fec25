"""What a run may have and the cells of a sweep or study may not."""

from __future__ import annotations

from flatshift.experiments.recipe.rules import CELL_RULES, check_rules
from flatshift.experiments.recipe.schema import Recipe
from flatshift.finetune.config import DATA_INITS
from flatshift.finetune.errors import UserError


def refuse_beginning(recipe: Recipe) -> None:
    """Raise UserError for an adapter that begins with data or another adapter; also of a method's own settings."""
    if recipe.adapter.init in DATA_INITS or recipe.adapter.start is not None:
        raise UserError("adapter.start and an adapter.init that looks at data go with flatshift train and sweep only")


def refuse_in_study(recipe: Recipe) -> None:
    """Raise UserError for what the cells of a study, which train in memory, do not do."""
    check_rules(recipe, CELL_RULES)
    if recipe.adapter.projector is not None:
        raise UserError("adapter.projector: a study's cells encode their rows without features; leave it out")
    if recipe.train.compile:
        raise UserError("train.compile: a study's cells are too short to be compiled; leave it off")
    check_rules(recipe)
    refuse_beginning(recipe)
    if recipe.optimizer.kind != "adamw":
        raise UserError(f"optimizer.kind: a study trains with adamw, not {recipe.optimizer.kind}; leave it out")
