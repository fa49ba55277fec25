"""Cells of a sweep: the points of its axes, each resolved by the strict builder, each under every seed."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flatshift.experiments.recipe import Resolved, from_override
from flatshift.experiments.recipe.auto import resolve_auto_tree
from flatshift.experiments.recipe.resolve import apply_overrides, get_dotted, recipe_tree, resolve_tree
from flatshift.experiments.recipe.rules import CELL_RULES, check_recipe, check_rules
from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.recipe.tree import Branch, Leaf, Tree, kinds_first
from flatshift.experiments.studies.cell import Cell, make_cell, point_label
from flatshift.experiments.studies.sweep.axes import Axes, Design, ValueRange, Values, generate_points
from flatshift.finetune.errors import UserError
from flatshift.finetune.seeds import derive_seed


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

    def settled(self, *, earlier: Path, log: Callable[[str], None]) -> SweepBase:
        """Return the same with its precision resolved, as `flatshift.experiments.recipe.auto.resolve_auto` does."""
        tree = resolve_auto_tree(self.tree, name=self.name, previous=earlier, log=log)
        return SweepBase(tree, self.name, resolve_tree(tree, (), name=self.name))

    def in_steps(self, *, log: Callable[[str], None]) -> SweepBase:
        """Return the same with epochs converted to steps, equal in every cell. Raises UserError for bad rows."""
        if self.recipe.train.epochs is None:
            return self
        from flatshift.experiments.data.sources import epochs_to_steps
        from flatshift.experiments.data.splits import prepare_data
        from flatshift.experiments.workflows.run_parts import FINE_TUNE

        rows, seed = prepare_data(self.recipe).train, derive_seed(self.recipe.train.seed, FINE_TUNE)
        resolved = epochs_to_steps(self.resolved, rows, seed=seed)
        steps, origin = resolved.recipe.train.steps, resolved.origins["train.steps"]
        log(f"steps: {steps:,} in every cell ({origin})")
        tree = apply_overrides(self.tree, [from_override("train.steps", steps, origin)])
        return SweepBase(tree, self.name, resolve_tree(tree, (), name=self.name))

    @property
    def recipe(self) -> Recipe:
        """Recipe that every cell starts from."""
        return self.resolved.recipe

    def plan(
        self, axes: Mapping[str, Values], seeds: int, *, design: Design = "grid", points: int | None = None
    ) -> Iterator[Cell]:
        """Yield every cell of a sweep over `axes`, point by point and there seed by seed.

        seeds: number of values of train.seed, starting at the recipe's own. points: how many to draw (design: random),
        by the recipe's own train.seed. Raises UserError for an unknown key, a wrong value, or axes that do not suit the
        design.
        """
        yield from self.cells(
            generate_points(self.check(axes), design, count=points, seed=self.recipe.train.seed), seeds
        )

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
            kinds = [str(getattr(cls, "kind", "")) for cls in self._components(block) if name in _field_names(cls)]
            if kinds and hasattr(owner, "kind"):
                raise UserError(
                    f"--grid {key}: {block} is {owner.kind}, which has no {name}; set one that has "
                    f"({', '.join(kinds)}), as --{block}.kind {kinds[0]}"
                ) from None
            raise UserError(f"--grid: {error}") from None

    def _components(self, block: str) -> list[type]:
        """Return the possible classes of a recipe block (`regularizer`): dataclasses with a `kind`."""
        owner = self._owner(block)
        if not dataclasses.is_dataclass(owner):
            return []
        hint = typing.get_type_hints(type(owner)).get(block.rpartition(".")[2])
        return [cls for cls in typing.get_args(hint) if isinstance(cls, type) and hasattr(cls, "kind")]

    def _is_whole(self, key: str, values: ValueRange) -> bool:
        block, _, name = key.rpartition(".")
        classes = [cls for cls in (type(self._owner(key)), *self._components(block)) if name in _field_names(cls)]
        if not classes:
            return values.low.is_integer() and values.high.is_integer()
        hint = typing.get_type_hints(classes[0])[name]
        return int in (hint, *typing.get_args(hint))

    def _owner(self, key: str) -> Any:
        """Return the block that contains a key; None if that, or a block around it, is null."""
        owner: Any = self.recipe
        for name in key.split(".")[:-1]:
            owner = getattr(owner, name, "") if owner is not None else None
        return owner

    def cells(self, points: Iterable[Mapping[str, Any]], seeds: int) -> Iterator[Cell]:
        """Yield every point under every seed: the recipe's own train.seed, the next one, … Raises UserError for a point
        that is not a valid run, and for two that would be the same run."""
        from flatshift.experiments.data.sources import list_source_files

        labels: dict[str, tuple[int, str]] = {}
        first_seed = self.recipe.train.seed
        for number, written in enumerate(points):
            components_first = sorted(written.items(), key=lambda item: kinds_first(item[0]))
            overrides = [from_override(key, value, f"--grid {key}") for key, value in components_first]
            overrides.append(from_override("train.seed", first_seed, "--seeds"))
            resolved = resolve_tree(self.tree, overrides, name=self.name)
            point = {key: _table_value(get_dotted(resolved.recipe, key), value) for key, value in written.items()}
            label = point_label(written)
            try:
                list_source_files(resolved.recipe.data)  # rejects a recipe without training files
                check_recipe(resolved.recipe)
                check_rules(resolved.recipe, CELL_RULES)
            except ValueError as error:
                raise UserError(f"{f'--grid {label}: ' if label else ''}{error}") from None
            for key, value in point.items():
                if isinstance(value, float) and not math.isfinite(value):
                    raise UserError(
                        f"--grid {key}={written[key]}: an axis takes finite numbers; write a large one, or null"
                    )
            for seed in range(first_seed, first_seed + seeds):
                train = dataclasses.replace(resolved.recipe.train, seed=seed)
                seeded = dataclasses.replace(resolved, recipe=dataclasses.replace(resolved.recipe, train=train))
                cell = make_cell(seeded, point=point, seed=seed, written=written)
                if seed == first_seed and (other := labels.setdefault(cell.key, (number, label)))[0] != number:
                    raise UserError(
                        f"--grid: {other[1]} and {label} are the same run (0 is 0.0, and device and threads are no "
                        "part of a result); leave one of them out"
                    )
                yield cell


def _field_names(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()


def _table_value(value: Any, written: Any) -> Any:
    """Return a value for a table; a component (`regularizer=plain,ggpo`) as its kind with its written settings, another
    block (`warmup={own: 1},null`) as written. written: in the grid; `{kind: ggpo, beta: 0}` becomes `ggpo beta=0`."""
    if not isinstance(value, Mapping) and not dataclasses.is_dataclass(value):
        return value
    tree = from_override("value", written).children["value"]
    if (kind := getattr(value, "kind", None)) is None:
        return _format_tree(tree)
    settings = tree.children.items() if isinstance(tree, Branch) else ()
    return " ".join([str(kind), *(f"{key}={_format_tree(child)}" for key, child in settings if key != "kind")])


def _format_tree(tree: Tree) -> str:
    if isinstance(tree, Leaf):
        return tree.text
    if isinstance(tree, Branch):
        return "{" + ", ".join(f"{key}: {_format_tree(child)}" for key, child in tree.children.items()) + "}"
    return "[" + ", ".join(map(_format_tree, tree.items)) + "]"
