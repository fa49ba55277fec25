"""Subjects of an evaluation: runs and base models by their names, and their models, one at a time.

A backbone is loaded once; adapters are attached to it in turn and removed again. A subject with other frozen weights,
or other names for them, is loaded again.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatshift.experiments.recipe.auto import resolve_auto
from flatshift.experiments.recipe.build import build_settings
from flatshift.experiments.recipe.resolve import Resolved
from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.recipe.tree import Branch, from_override, merge
from flatshift.experiments.run.console import Console
from flatshift.experiments.workflows.generate import read_adapted_recipe, to_single_process
from flatshift.experiments.workflows.run_parts import check_run
from flatshift.finetune.errors import UserError


@dataclass(frozen=True)
class EvaluationTarget:
    """Subject of an evaluation: a run's adapter on its backbone, or a base model."""

    name: str
    recipe: Recipe
    run: Path | None = None
    """Run directory; None: the base model."""
    like: Path | None = None
    """For a base model, the run whose evaluation it copies."""


def is_run(name: str) -> bool:
    """Return True if `name` is a run directory, not a backbone."""
    return (Path(name) / "recipe.resolved.yaml").is_file()


def resolve_subjects(
    names: Sequence[str], overrides: Sequence[Branch], has_data: bool, console: Console
) -> list[EvaluationTarget]:
    """Return the subjects that `names` refer to: run directories, and base models evaluated like the first run on them,
    else as language models.

    Raises UserError for a name that is neither, and a base model that cannot be evaluated so.
    """
    from flatshift.finetune.models.backbone import open_backbone

    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"eval: {twice} is named twice; name it once")
    runs = {
        name: to_single_process(read_adapted_recipe(Path(name), overrides, other_rows=has_data))
        for name in names
        if is_run(name)
    }
    found = []
    for name in names:
        if name in runs:
            check_run(Path(name), runs[name])
            found.append(EvaluationTarget(name, runs[name], Path(name)))
            continue
        if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
            raise UserError(f"{name} is neither a run directory (recipe.resolved.yaml) nor a backbone (config.json)")
        try:
            backbone = open_backbone(name)
        except UserError as error:
            raise UserError(f"{name} is not a run directory, and {error}") from None
        beside = next(
            (r for r, recipe in runs.items() if _is_same_backbone(open_backbone(recipe.backbone), backbone)), None
        )
        if runs:
            like = beside or next(iter(runs))
            recipe = dataclasses.replace(runs[like], backbone=runs[like].backbone if beside else name)
            if recipe.task.traits.is_sequence_level:
                raise UserError(
                    f"{name}: the head of task.kind: {recipe.task.kind} is trained with the adapter, so a base "
                    "model has none to evaluate; name runs only"
                )
            found.append(EvaluationTarget(name, recipe, like=Path(like)))
            continue
        if not has_data:
            raise UserError(f"{name} is a bare backbone, which has no rows of its own; give --data FILE")
        tree: Any = Branch({}, "defaults")
        kind = "masked-lm" if backbone.reads_both_ways else "language-model"
        given = [from_override("backbone", name, "eval"), from_override("task.kind", kind, "eval"), *overrides]
        for one in given:
            tree = merge(tree, one)
        recipe = to_single_process(build_settings(Recipe, tree))
        if recipe.task.pack:  # nothing is trained
            recipe = dataclasses.replace(recipe, task=recipe.task.replace(pack=False))
        recipe = resolve_auto(Resolved(recipe, name, {}), log=console.say).recipe
        if recipe.task.traits.is_sequence_level:
            raise UserError(
                f"{name}: a bare backbone has no head for task.kind: {recipe.task.kind}; take language-model"
            )
        found.append(EvaluationTarget(name, recipe))
    return found


def _is_same_backbone(a: Any, b: Any) -> bool:
    return bool(a.directory.resolve() == b.directory.resolve())


class AdapterSwitcher:
    """Models of subjects, one at a time, with as few loads of a backbone as possible."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.loads = 0
        self._key: Any = None
        self._base: Any = None
        self._model: Any = None

    def of(self, subject: EvaluationTarget, label_names: tuple[str, ...] | None) -> Any:
        """Return the model of `subject` in evaluation precision; the previous model becomes unusable."""
        from flatshift.finetune.adapters.adapter import attach_adapter, load_adapter
        from flatshift.finetune.adapters.offsets import folded_offsets
        from flatshift.finetune.compute.cuda_status import resolve_device
        from flatshift.finetune.compute.precision import adapter_dtype
        from flatshift.finetune.models.load import load_backbone

        recipe, train = subject.recipe, subject.recipe.train
        device = resolve_device(train.device)
        key = (
            recipe.backbone, recipe.task.traits.auto_class, label_names if recipe.task.traits.has_new_head else None,
            train.precision, train.backbone_precision, train.quantization, device,
        )  # fmt: skip
        self._take_off()
        if key != self._key or self._base is None:
            self._base = self._model = None
            gc.collect()
            self._base = load_backbone(
                recipe.backbone,
                task=recipe.task,
                label_names=label_names,
                precision=train.precision,
                narrow=train.backbone_precision == "bf16",
                quantization=train.quantization,
                device=device,
            )
            self._key = key
            self.loads += 1
        if subject.run is None:
            if getattr(self._base, "new_parameters", ()):
                raise UserError(
                    f"{subject.name}: its checkpoint has no head for task.kind: {recipe.task.kind}, so its base "
                    "model cannot be evaluated; name runs only"
                )
            return self._base
        folder = subject.run / "adapter"
        initial = subject.run / "initial"
        folded = recipe.adapter.init != "default" or recipe.adapter.under is not None
        settings = recipe.adapter if folded else dataclasses.replace(recipe.adapter, init_rows=None, start=None)
        self._model = attach_adapter(
            self._base,
            settings,
            task=recipe.task,
            seed=train.seed,
            dtype=adapter_dtype(train),
            initial=(initial if initial.is_dir() else folder) if folded else None,
        )
        load_adapter(self._model, folder)
        if folded_offsets(self._model) or recipe.task.traits.has_new_head or recipe.adapter.soft_tokens is not None:
            self._base = None  # such changes cannot be removed again
        return self._model

    def _take_off(self) -> None:
        if self._model is not None and self._base is not None:
            self._base = self._model.unload()
        self._model = None
