"""A study from plan to page: what is the same for every kind of study that `flatshift compare` runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from experiments.recipe import Resolved
from experiments.recipe.config import Recipe
from experiments.recipe.resolve import recipe_tree, resolve_tree
from experiments.recipe.tree import Branch, Tree, merge
from experiments.run.console import Console
from finetune.atomic import write_json, write_text
from finetune.errors import Interrupted, UserError
from finetune.lock import owned

RECIPE = "study.recipe.yaml"


class Planned(Protocol):
    """What a kind of study plans its cells by."""

    @property
    def resolved(self) -> Resolved:
        """Its recipe."""


P = TypeVar("P", bound=Planned)
Document = dict[str, Any]


def study_recipe(
    reference: str,
    overrides: Sequence[Branch],
    *,
    block: str,
    example: str,
    out: Path | None = None,
    of: type[Recipe] = Recipe,
) -> tuple[Resolved, Branch]:
    """The recipe of a study, its precision settled, and the tree that its cells are resolved from, which knows nothing
    of the study.

    Args:
        block: the recipe's key that makes it a study.
        example: how to get a recipe to start from, for the refusal.
        out: the study's directory; what it has settled holds.
        of: what the recipe fills.

    Raises:
        UserError: a recipe without the block, or one that cannot be built.
    """
    from experiments.recipe.precision import settled_tree

    tree: Tree = recipe_tree(reference)
    for override in overrides:
        tree = merge(tree, override)
    name = Path(reference).stem
    tree = settled_tree(tree, name=name, kept=None if out is None else out / RECIPE, of=of)
    resolved = resolve_tree(tree, (), name=name, of=of)
    assert isinstance(tree, Branch)
    if getattr(resolved.recipe, block) is None:
        raise UserError(f"recipe {resolved.name!r} has no `{block}` block; start from {example}")
    return resolved, dataclasses.replace(tree, children={k: v for k, v in tree.children.items() if k != block})


def carry_out(
    command: str,
    out: Path,
    name: str,
    *,
    plan: Callable[[], P],
    measure: Callable[[P, Console], Document],
    page: Callable[[Document], str],
    jobs: int,
    quiet: bool,
) -> Document:
    """Plan, run and judge a study; write what it found to `out`/`name` and its page to `out`/report.html.

    command: what the page says made it.

    Raises:
        UserError: bad input, before any cell runs; another command is at work on `out`. Interrupted: stopped; the same
            call goes on.
    """
    if jobs < 1:
        raise UserError(f"--jobs must be at least 1, got {jobs}")
    with owned(out):
        planned, console = plan(), Console(quiet=quiet)
        train = planned.resolved.recipe.train
        console.say(f"precision: {train.precision} ({planned.resolved.origins.get('train.precision', 'default')})")
        try:
            found = measure(planned, console)
        except KeyboardInterrupt as error:
            raise Interrupted("finished cells are kept; the same command goes on from there") from error
        document = {**found, "command": f"{command} --data DIR --out OUT"}
        write_json(out / name, document)
        write_text(out / "report.html", page(document))
        return document
