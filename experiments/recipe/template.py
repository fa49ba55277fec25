"""A chat run's own copy of its template: the file that the recipe names may change, what the run reads must not.

runs/first/template.jinja      the Jinja text that it trained with; manifest.json has its digest
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from experiments.recipe.config import Recipe
from finetune.atomic import read_object
from finetune.data.chat.template import shipped_templates, template_text
from finetune.errors import UserError

COPY = "template.jinja"


def names_file(recipe: Recipe) -> bool:
    """Whether `task.template` is a file of the user's, not a shipped name or the tokenizer's own."""
    return recipe.task.template is not None and recipe.task.template not in shipped_templates()


def template_copy(recipe: Recipe) -> dict[str, str]:
    """What a new run directory keeps of the user's template: file name → text; nothing where there is none."""
    template = recipe.task.template
    return {COPY: template_text(template)} if template is not None and names_file(recipe) else {}


def with_own_template(run: Path, recipe: Recipe) -> Recipe:
    """`recipe` with the copy of its template that the run directory `run` keeps.

    Raises UserError where the template (of runs of earlier versions: the live file) is not the one that
    manifest.json notes.
    """
    task, file = recipe.task, run / "manifest.json"
    if task.template is None:
        return recipe
    if names_file(recipe) and (run / COPY).is_file():
        task = task.altered(template=str((run / COPY).absolute()))
    noted = read_object(file).get("chat_template") if file.is_file() else None
    if noted is not None:
        now = task.template_record()
        assert now is not None
        if now["sha256"] != noted["sha256"]:
            raise UserError(f"task.template: {task.template} changed since the run began; restore it or train anew")
    return dataclasses.replace(recipe, task=task)
