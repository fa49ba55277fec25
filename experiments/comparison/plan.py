"""From a recipe's `comparison` block to cells, each a resolved recipe with a key; what is wrong is refused here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from experiments.cells.inputs import chosen, digest, locate
from experiments.cells.refusing import refuse_in_study
from experiments.cells.study import study_recipe
from experiments.comparison.settings import Comparison
from experiments.comparison.tuning import Setting, first_trials
from experiments.recipe import from_override, recipe_key
from experiments.recipe.config import Recipe
from experiments.recipe.precision import settled
from experiments.recipe.resolve import resolve_tree
from experiments.recipe.tree import Branch
from finetune.errors import UserError
from regularizers.config import RegularizerConfig

Kind = Literal["trial", "final", "equal-time"]


@dataclass(frozen=True)
class StudyCell:
    """One run: a method on a task with a seed and a setting."""

    key: str
    """Names its file: the hash of its resolved settings and inputs."""
    kind: Kind
    method: str
    task: str
    seed: int
    setting: Setting
    recipe: Recipe
    file: str
    """Rows of the task, an existing file."""
    rows: tuple[int, int, int, str]
    """Training rows, validation rows, test rows, and the `split` of test rows."""
    sharpness: float | None
    """σ at which sharpness is measured after training; None: not."""

    @property
    def judged(self) -> Literal["validation", "test"]:
        """Which rows it is judged on: trials never see test rows."""
        return "validation" if self.kind == "trial" else "test"

    @property
    def label(self) -> str:
        """For a person."""
        knobs = "".join(f" {key.rpartition('.')[2]}={value}" for key, value in self.setting.knobs)
        return f"{self.kind} {self.method} on {self.task}, lr={self.setting.lr:g}{knobs}, seed {self.seed}"


class Plan:
    """The cells of one comparison; everything about it that can be wrong is found here, before any runs."""

    def __init__(
        self,
        reference: str,
        overrides: Sequence[Branch],
        *,
        data: Path | None = None,
        out: Path | None = None,
        methods: Sequence[str] = (),
        tasks: Sequence[str] = (),
    ) -> None:
        """
        Args:
            reference: recipe file or shipped name with a `comparison` block.
            out: directory of the study, whose earlier choice of `train.precision: auto` holds.
            data: directory that tasks' files are relative to; None: the working directory.
            methods: only these and the baseline; empty: all.
            tasks: only these; empty: all.

        Raises:
            UserError: no such block, an unknown name, a missing file, a method that cannot be built.
        """
        self.resolved, self._tree = study_recipe(
            reference, overrides, block="comparison", example="`flatshift recipes copy flat-comparison`", out=out
        )
        assert self.resolved.recipe.comparison is not None
        self.study = _only(self.resolved.recipe.comparison, methods, tasks)
        self.files = {
            name: locate(task.file, data, f"comparison.tasks.{name}.file") for name, task in self.study.tasks.items()
        }
        self._digests = {name: digest(file) for name, file in self.files.items()}
        self._recipes: dict[tuple[str, str], Recipe] = {}
        self._tried: list[tuple[str, RegularizerConfig]] = []
        for method in self.study.methods:
            for task in self.study.runs_on(method):
                self._recipes[method, task] = self._resolve(method, task)
                for setting in first_trials(self.study, self.study.methods[method]):
                    self._tried.append((method, self._resolve(method, task, setting).regularizer))

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """(method, task) of all that runs, task by task."""
        return [(m, t) for t in self.study.tasks for m in self.study.methods if t in self.study.runs_on(m)]

    def classifies(self, task: str) -> bool:
        """Whether a task is judged by accuracy (else by its loss)."""
        return self._recipes[self.study.baseline, task].task.accuracy

    def steps(self, task: str) -> int:
        """Optimizer updates of a run at equal steps."""
        return self._recipes[self.study.baseline, task].train.steps

    def check_methods(self) -> None:
        """Refuse methods whose regularizer cannot be made here; nothing may turn into failed cells in silence."""
        from finetune.parallel.rules import Settings, check_settings
        from regularizers import build

        for (_, task), recipe in self._recipes.items():
            if not (recipe.task.accuracy or recipe.task.soft_tokens):  # rows of one class, or texts of a decoder
                raise UserError(
                    f"task {task!r}: a comparison judges classify, language-model and completion tasks only"
                )
            if recipe.task.multi:
                raise UserError(f"task {task!r}: a comparison judges rows of one class; leave task.multi off")
            if recipe.train.quantization is not None:
                raise UserError("a comparison trains on backbones as they are: leave train.quantization out")
            if recipe.mesh.size > 1 or recipe.warmup is not None or recipe.select is not None:
                raise UserError("a comparison runs each cell in one process, without selection and warm-up")
            refuse_in_study(recipe)
            check_settings(Settings.of(recipe))
        for method, regularizer in self._tried:
            try:
                build(regularizer)
            except ImportError as error:
                raise UserError(
                    f"method {method!r} cannot run: its regularizer {regularizer.kind!r} is not there ({error}); leave "
                    "it out with --methods"
                ) from None

    def cell(
        self, kind: Kind, method: str, task: str, seed: int, setting: Setting, *, steps: int | None = None
    ) -> StudyCell:
        """One cell. steps: another number of updates than the task's."""
        changes: dict[str, Any] = {"train.seed": seed}
        if steps is not None:
            changes["train.steps"] = steps
        recipe = self._resolve(method, task, setting, changes)
        study, own = self.study, self.study.tasks[task]
        measured = kind == "final" and seed < study.sharpness_seeds
        sharpness = study.sharpness_sigma if measured else None
        rows = (own.train, own.validation, own.test, own.test_split)
        judged = "validation" if kind == "trial" else "test"
        key = recipe_key(recipe, [rows, judged, sharpness, self._digests[task]])
        return StudyCell(key, kind, method, task, seed, setting, recipe, self.files[task], rows, sharpness)

    def _resolve(
        self, method: str, task: str, setting: Setting | None = None, changes: Mapping[str, Any] | None = None
    ) -> Recipe:
        """The recipe of a method on a task: the base, then the task, the method, the setting, the changes."""
        laid: list[Branch] = []
        for where, keys in (
            (f"--comparison.tasks.{task}.set", self.study.tasks[task].set),
            (f"--comparison.methods.{method}.set", self.study.methods[method].set),
            (f"--comparison.methods.{method}", setting.overrides() if setting else {}),
            ("--", changes or {}),
        ):
            laid += [from_override(key, value, where) for key, value in keys.items()]
        return settled(resolve_tree(self._tree, laid, name=self.resolved.name)).recipe


def _only(study: Comparison, methods: Sequence[str], tasks: Sequence[str]) -> Comparison:
    """The comparison cut down to some methods (the baseline stays) and tasks."""
    if not study.tasks or len(study.methods) < 2:
        raise UserError("comparison.tasks and comparison.methods must name at least one task and two methods")
    kept_tasks = {name: study.tasks[name] for name in chosen("--tasks", tasks, study.tasks)}
    wanted = chosen("--methods", methods, study.methods)
    kept = {}
    for name, method in study.methods.items():
        if name not in wanted and name != study.baseline:
            continue
        on = tuple(task for task in method.tasks if task in kept_tasks)
        if method.tasks and not on:
            continue
        kept[name] = dataclasses.replace(method, tasks=on)
    if len(kept) < 2:
        raise UserError(f"nothing to compare with {study.baseline!r}: name another method with --methods")
    controls = {control: of for control, of in study.controls.items() if control in kept and of in kept}
    return dataclasses.replace(study, tasks=kept_tasks, methods=kept, controls=controls)
