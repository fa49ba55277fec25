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
from flatshift.experiments.workflows.run_parts import INITIAL, check_run, read_adapted_recipe, to_single_process
from flatshift.finetune.adapters.adapter import attach_adapter, load_adapter
from flatshift.finetune.adapters.offsets import folded_offsets
from flatshift.finetune.compute.cuda_status import resolve_device
from flatshift.finetune.compute.precision import adapter_dtype
from flatshift.finetune.digests import adapter_digest
from flatshift.finetune.errors import UserError
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.run_directory import RECIPE


@dataclass(frozen=True)
class EvaluationTarget:
    """Subject of an evaluation: a run's adapter on its backbone, or a base model."""

    name: str
    recipe: Recipe
    run: Path | None = None
    """Run directory; None: the base model."""
    template: Path | None = None
    """For a base model, the run whose evaluation it copies."""

    @property
    def digest(self) -> str:
        """Digest of all its weights: the adapter's, if any, and the backbone's."""
        return (adapter_digest(self.run) if self.run else "") + open_backbone(self.recipe.backbone).fingerprint


def resolve_subjects(
    names: Sequence[str], overrides: Sequence[Branch], has_data: bool, console: Console
) -> list[EvaluationTarget]:
    """Return the subjects that `names` refer to: run directories, and base models evaluated like the first run on them,
    else as language models.

    Raises UserError for a name that is neither, and a base model that cannot be evaluated so.
    """
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserError(f"eval: {repeated[0]} is named twice; name it once")
    runs = {
        name: to_single_process(read_adapted_recipe(Path(name), overrides, other_rows=has_data))
        for name in names
        if (Path(name) / RECIPE).is_file()
    }
    subjects = []
    for name in names:
        if name in runs:
            check_run(Path(name), runs[name], rows=not has_data)
            subjects.append(EvaluationTarget(name, runs[name], Path(name)))
            continue
        try:
            backbone = open_backbone(name)
        except UserError as error:
            raise UserError(f"{name} is not a run directory, and {error}") from None
        if runs:
            directory = backbone.directory.resolve()
            template = next((r for r in runs if open_backbone(runs[r].backbone).directory.resolve() == directory), None)
            recipe = dataclasses.replace(runs[next(iter(runs))], backbone=name) if template is None else runs[template]
            if recipe.task.traits.is_sequence_level:
                raise UserError(
                    f"{name}: the head of task.kind: {recipe.task.kind} is trained with the adapter, so a base "
                    "model has none to evaluate; name runs only"
                )
            subjects.append(EvaluationTarget(name, recipe, template=Path(template or next(iter(runs)))))
            continue
        if not has_data:
            raise UserError(f"{name} is a bare backbone, which has no rows of its own; give --data FILE")
        tree: Any = Branch({}, "defaults")
        kind = "masked-lm" if backbone.reads_both_ways else "language-model"
        for branch in (from_override("backbone", name, "eval"), from_override("task.kind", kind, "eval"), *overrides):
            tree = merge(tree, branch)
        recipe = to_single_process(build_settings(Recipe, tree))
        if recipe.task.pack:  # nothing is trained
            recipe = dataclasses.replace(recipe, task=recipe.task.replace(pack=False))
        recipe = resolve_auto(Resolved(recipe, name, {}), log=console.say).recipe
        if recipe.task.traits.is_sequence_level:
            raise UserError(
                f"{name}: a bare backbone has no head for task.kind: {recipe.task.kind}; take language-model"
            )
        subjects.append(EvaluationTarget(name, recipe))
    return subjects


class AdapterSwitcher:
    """Models of subjects, one at a time, with as few loads of a backbone as possible."""

    def __init__(self) -> None:
        self.loads = 0
        self._key: Any = None
        self._base: Any = None
        self._model: Any = None

    def load(self, subject: EvaluationTarget, label_names: tuple[str, ...] | None) -> Any:
        """Return the model of `subject` in evaluation precision; the previous model becomes unusable."""
        recipe, train = subject.recipe, subject.recipe.train
        device = resolve_device(train.device)
        key = (
            recipe.backbone, recipe.task.traits.auto_class, label_names if recipe.task.traits.has_new_head else None,
            train.precision, train.backbone_precision, train.quantization, device,
        )  # fmt: skip
        if self._model is not None and self._base is not None:
            self._base = self._model.unload()
        self._model = None
        if key != self._key or self._base is None:
            self._base = None
            gc.collect()
            self._base = load_backbone(
                recipe.backbone, task=recipe.task, label_names=label_names, precision=train.precision,
                narrow=train.backbone_precision == "bf16", quantization=train.quantization, device=device,
            )  # fmt: skip
            self._key = key
            self.loads += 1
        if subject.run is None:
            if getattr(self._base, "new_parameters", ()):
                raise UserError(
                    f"{subject.name}: its checkpoint has no head for task.kind: {recipe.task.kind}, so its base "
                    "model cannot be evaluated; name runs only"
                )
            return self._base
        folder, initial = subject.run / "adapter", subject.run / INITIAL
        folded = recipe.adapter.init != "default" or recipe.adapter.under is not None
        settings = recipe.adapter if folded else dataclasses.replace(recipe.adapter, init_rows=None, start=None)
        begin, dtype = (initial if initial.is_dir() else folder) if folded else None, adapter_dtype(train)
        self._model = attach_adapter(
            self._base, settings, task=recipe.task, seed=train.seed, dtype=dtype, initial=begin
        )
        load_adapter(self._model, folder)
        changes_base = (recipe.adapter.train_whole, recipe.adapter.bias, recipe.adapter.soft_tokens) != (None,) * 3
        if changes_base or folded_offsets(self._model) or recipe.task.traits.has_new_head:
            self._base = None  # such changes cannot be removed again
        return self._model
