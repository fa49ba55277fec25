"""A chat run's own copy of its template: the file that the recipe names may change, what the run reads must not.

runs/first/template.jinja      the Jinja text that it trained with; manifest.json has its digest
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from experiments.recipe.config import Recipe
from finetune.atomic import read_object
from finetune.config import Chat
from finetune.data.chat import shipped_templates, template_record, template_text
from finetune.errors import UserError

COPY = "template.jinja"


def names_file(recipe: Recipe) -> bool:
    """Whether `task.template` is a file of the user's, not a shipped name or the tokenizer's own."""
    task = recipe.task
    return isinstance(task, Chat) and task.template is not None and task.template not in shipped_templates()


def template_copy(recipe: Recipe) -> dict[str, str]:
    """What a new run directory keeps of the user's template: file name → text; nothing where there is none."""
    if not names_file(recipe):
        return {}
    assert isinstance(recipe.task, Chat) and recipe.task.template is not None
    return {COPY: template_text(recipe.task.template)}


def with_own_template(run: Path, recipe: Recipe) -> Recipe:
    """`recipe` with the copy of its template that the run directory `run` keeps.

    Raises UserError where the template (of runs of earlier versions: the live file) is not the one that
    manifest.json notes.
    """
    task, file = recipe.task, run / "manifest.json"
    if not isinstance(task, Chat) or task.template is None:
        return recipe
    if names_file(recipe) and (run / COPY).is_file():
        task = dataclasses.replace(task, template=str((run / COPY).absolute()))
    noted = read_object(file).get("chat_template") if file.is_file() else None
    if noted is not None:
        now = template_record(task)
        assert now is not None
        if now["sha256"] != noted["sha256"]:
            raise UserError(f"task.template: {task.template} changed since the run began; restore it or train anew")
    return dataclasses.replace(recipe, task=task)
