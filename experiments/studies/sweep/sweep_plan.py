"""Cells of a sweep: the points of its axes, each resolved by the strict builder, each under every seed."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flatshift.experiments.recipe import Resolved, from_override
from flatshift.experiments.recipe.resolve import apply_overrides, get_dotted, recipe_tree, resolve_tree
from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.recipe.tree import Branch, Leaf, Tree, parse
from flatshift.experiments.studies.cell import Cell, make_cell, point_label
from flatshift.experiments.studies.sweep.axes import Axes, Design, ValueRange, Values, generate_points
from flatshift.finetune.errors import UserError


def plan_cells(
    recipe: str,
    overrides: Sequence[Branch],
    axes: Mapping[str, Values],
    seeds: int,
    *,
    design: Design = "grid",
    points: int | None = None,
) -> Iterator[Cell]:
    """Yield every cell of the sweep, point by point and there seed by seed.

    recipe: file or shipped name. overrides: applied to it. seeds: number of values of train.seed, starting at the
    recipe's own. points: how many to draw (design: random), by the recipe's own train.seed. Raises UserError for an
    unknown key, a wrong value, or axes that do not suit the design.
    """
    yield from SweepBase.of(recipe, overrides).plan(axes, seeds, design=design, points=points)


@dataclasses.dataclass(frozen=True)
class SweepBase:
    """Recipe of a sweep before any axis is applied; read once for all cells."""

    tree: Tree
    name: str
    resolved: Resolved

    @classmethod
    def of(cls, recipe: str | Resolved, overrides: Sequence[Branch]) -> SweepBase:
        """Build from the recipe file, shipped recipe or resolved recipe with `overrides` applied."""
        tree: Tree = recipe.tree() if isinstance(recipe, Resolved) else recipe_tree(recipe)
        tree = apply_overrides(tree, overrides)
        name = recipe.name if isinstance(recipe, Resolved) else Path(recipe).stem
        return cls(tree, name, resolve_tree(tree, (), name=name))

    def settled(self, *, kept: Path, say: Callable[[str], None]) -> SweepBase:
        """Return the same with its precision resolved; arguments as in
        `flatshift.experiments.recipe.auto.resolve_auto`."""
        from flatshift.experiments.recipe.auto import resolve_auto_tree

        tree = resolve_auto_tree(self.tree, name=self.name, previous=kept, log=say)
        return SweepBase(tree, self.name, resolve_tree(tree, (), name=self.name))

    def in_steps(self, *, say: Callable[[str], None]) -> SweepBase:
        """Return the same with epochs converted to steps of its own rows, equal in every cell. Raises UserError as
        `prepare`."""
        if self.recipe.train.epochs is None:
            return self
        from flatshift.experiments.data.sources import epochs_to_steps
        from flatshift.experiments.data.splits import prepare_data
        from flatshift.experiments.workflows.run_parts import FINE_TUNE
        from flatshift.finetune.seeds import derive_seed

        counted = epochs_to_steps(
            self.resolved, prepare_data(self.recipe).train, seed=derive_seed(self.recipe.train.seed, FINE_TUNE)
        )
        steps, why = counted.recipe.train.steps, counted.origins["train.steps"]
        say(f"steps: {steps:,} in every cell ({why})")
        tree = apply_overrides(self.tree, [from_override("train.steps", steps, why)])
        return SweepBase(tree, self.name, resolve_tree(tree, (), name=self.name))

    @property
    def recipe(self) -> Recipe:
        """Recipe that every cell starts from."""
        return self.resolved.recipe

    def plan(
        self, axes: Mapping[str, Values], seeds: int, *, design: Design = "grid", points: int | None = None
    ) -> Iterator[Cell]:
        """Yield every cell of a sweep over `axes`, as `plan_cells`."""
        drawn = generate_points(self.check(axes), design, count=points, seed=self.recipe.train.seed)
        yield from self.cells(drawn, seeds)

    def check(self, axes: Mapping[str, Values]) -> Axes:
        """Return the axes, with ranges over whole-number settings marked. Raises UserError for a key that cannot be an
        axis."""
        checked: Axes = {}
        for key, values in axes.items():
            if key == "train.seed":
                raise UserError("--grid train.seed: seeds are an axis of their own; use --seeds")
            if not any(key.startswith(f"{other}.") for other in axes):  # a component that another axis sets
                self._check_key(key)
            if isinstance(values, ValueRange) and self._is_whole(key, values):
                if not (values.low.is_integer() and values.high.is_integer()):
                    raise UserError(f"--grid {key}={values}: {key} is a whole number; give whole ends")
                values = dataclasses.replace(values, whole=True)
            checked[key] = values
        return checked

    def _check_key(self, key: str) -> None:
        owner = self._owner(key)
        if owner is None:  # a null block: the builder creates it and checks the rest
            return
        try:
            get_dotted(self.recipe, key)
        except UserError as error:
            block, _, name = key.rpartition(".")
            kinds = [str(getattr(one, "kind", "")) for one in self._components(block) if name in _field_names(one)]
            if kinds and hasattr(owner, "kind"):
                raise UserError(
                    f"--grid {key}: {block} is {owner.kind}, which has no {name}; set one that has "
                    f"({', '.join(kinds)}), as --{block}.kind {kinds[0]}"
                ) from None
            raise UserError(f"--grid: {error}") from None

    def _components(self, block: str) -> list[type]:
        """Return the possible classes of a recipe block (`regularizer`): dataclasses with a `kind`."""
        around = self._owner(block)
        if not dataclasses.is_dataclass(around):
            return []
        hint = typing.get_type_hints(type(around)).get(block.rpartition(".")[2])
        return [one for one in typing.get_args(hint) if isinstance(one, type) and hasattr(one, "kind")]

    def _is_whole(self, key: str, values: ValueRange) -> bool:
        block, _, name = key.rpartition(".")
        owner = self._owner(key)
        classes = [one for one in (type(owner), *self._components(block)) if name in _field_names(one)]
        if not classes:
            return values.low.is_integer() and values.high.is_integer()
        hint = typing.get_type_hints(classes[0])[name]
        return int in (hint, *typing.get_args(hint))

    def _owner(self, key: str) -> Any:
        """Return the block that contains a key; None if that, or a block around it, is null."""
        owner: Any = self.recipe
        for part in key.split(".")[:-1]:
            owner = getattr(owner, part, "") if owner is not None else None
        return owner

    def cells(self, points: Iterable[Mapping[str, Any]], seeds: int) -> Iterator[Cell]:
        """Yield every point under every seed: the recipe's own train.seed, the next one, …

        Raises UserError for a point that is not a valid run, and for two that would be the same run.
        """
        seen: dict[str, str] = {}
        first = self.recipe.train.seed
        for laid in points:
            whole_first = sorted(laid.items(), key=lambda item: item[0].count("."))  # a component, then its settings
            overrides = [from_override(key, value, f"--grid {key}") for key, value in whole_first]
            overrides.append(from_override("train.seed", first, "--seeds"))
            resolved = resolve_tree(self.tree, overrides, name=self.name)
            point = {key: _table_value(get_dotted(resolved.recipe, key), written) for key, written in laid.items()}
            label = point_label(laid)
            _check_point(resolved.recipe, label)
            for key, value in point.items():
                if isinstance(value, float) and not math.isfinite(value):
                    raise UserError(
                        f"--grid {key}={laid[key]}: an axis takes finite numbers; write a large one, or null"
                    )
            for seed in range(first, first + seeds):
                cell = make_cell(_with_seed(resolved, seed), point=point, seed=seed, laid=laid)
                if seed == first and (other := seen.setdefault(cell.key, label)) != label:
                    raise UserError(
                        f"--grid: {other} and {label} are the same run (0 is 0.0, and device and threads are no "
                        "part of a result); leave one of them out"
                    )
                yield cell


def _field_names(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()


def _check_point(recipe: Recipe, written: str) -> None:
    from flatshift.experiments.data.sources import list_source_files
    from flatshift.experiments.recipe.rules import CELL_RULES, check_recipe, check_rules

    try:
        list_source_files(recipe.data)  # rejects a recipe without training files
        check_recipe(recipe)
        check_rules(recipe, CELL_RULES)
    except ValueError as error:
        raise UserError(f"{f'--grid {written}: ' if written else ''}{error}") from None


def _table_value(value: Any, written: Any) -> Any:
    """Return a value for a table; a component (`regularizer=plain,ggpo`) as its kind with its written settings.

    written: in the grid; `{kind: ggpo, beta: 0}` becomes `ggpo beta=0`.
    """
    if not (dataclasses.is_dataclass(value) and hasattr(value, "kind")):
        return value
    tree = parse(written, "--grid") if isinstance(written, str) else None
    settings = tree.children if isinstance(tree, Branch) else {}
    return " ".join(
        [str(value.kind), *(f"{key}={_format_tree(one)}" for key, one in settings.items() if key != "kind")]
    )


def _format_tree(tree: Tree) -> str:
    if isinstance(tree, Leaf):
        return tree.text
    if isinstance(tree, Branch):
        return "{" + ", ".join(f"{key}: {_format_tree(one)}" for key, one in tree.children.items()) + "}"
    return "[" + ", ".join(map(_format_tree, tree.items)) + "]"


def _with_seed(resolved: Resolved, seed: int) -> Resolved:
    """Return the same recipe under another seed."""
    recipe = resolved.recipe
    return dataclasses.replace(
        resolved, recipe=dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, seed=seed))
    )
