"""Plan of a comparison: its cells, each a resolved recipe with a key, their rows, and what is measured besides metrics.

A task's file marks its rows by `split`. They are written to separate files once, next to the cells, so that a cell is
an ordinary recipe: `flatshift train` of its recipe.resolved.yaml is the same run.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from flatshift.experiments.recipe import Resolved, from_override, list_input_files, recipe_key
from flatshift.experiments.recipe.auto import resolve_auto
from flatshift.experiments.recipe.resolve import resolve_tree
from flatshift.experiments.recipe.rules import CELL_RULES, check_recipe, check_rules
from flatshift.experiments.recipe.schema import Comparison, Recipe, StudyTask, short_hash
from flatshift.experiments.recipe.tree import Branch, kinds_first
from flatshift.experiments.studies.cell import Cell, backbone_digests, file_digest, settings_digests
from flatshift.experiments.studies.compare.tuning import TrialSetting, first_trials
from flatshift.experiments.studies.study import filter_by_flag, locate_file, study_recipe
from flatshift.finetune.atomic import remove_leftovers, write_text
from flatshift.finetune.data.config import Files, TrainFiles
from flatshift.finetune.data.rows import limit_rows, read_rows
from flatshift.finetune.errors import UserError
from flatshift.finetune.seeds import derive_seed
from flatshift.regularizers import build
from flatshift.regularizers.config import RegularizerConfig

if TYPE_CHECKING:
    from torch import Tensor

    from flatshift.experiments.data.splits import PreparedData
    from flatshift.finetune.data.example import Example
    from flatshift.finetune.parallel.engine import Engine

Kind = Literal["trial", "final", "equal-time"]
EvaluationRows = Literal["validation", "test"]
Result = dict[str, Any]
"""Output of `run_result` for a run."""
Pair = tuple[str, str]
"""Method and task."""


@dataclass(frozen=True)
class ComparisonRun:
    """One run of a comparison: a method on a task with a seed and a setting."""

    kind: Kind
    method: str
    task: str
    seed: int
    setting: TrialSetting
    steps: int
    cell: Cell


class ComparisonPlan:
    """Cells of one comparison; all input errors are found here, before any runs."""

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
        """Plan the comparison.

        reference: recipe file or shipped name with a `comparison` block. out: directory of the study, whose earlier
        choice for `train.precision: auto` is kept. data: directory that tasks' files are relative to; None: the working
        directory. methods, tasks: only these, and the baseline; empty: all. Raises UserError for no such block, an
        unknown name, a missing file, or a method that cannot be built.
        """
        self.resolved, self._tree = study_recipe(
            reference, overrides, block="comparison", example="`flatshift recipes copy flat-comparison`", out=out
        )
        assert self.resolved.recipe.comparison is not None
        self.study = _restrict_comparison(self.resolved.recipe.comparison, methods, tasks)
        self.files = {
            name: locate_file(task.file, data, f"comparison.tasks.{name}.file")
            for name, task in self.study.tasks.items()
        }
        self._digests = {name: file_digest(file) for name, file in self.files.items()}
        self._rows: dict[str, tuple[TaskRows, Path]] = {}
        self._recipes: dict[tuple[str, str], Recipe] = {}
        self._tried: list[tuple[str, RegularizerConfig]] = []
        for method in self.study.methods:
            for task in self.study.runs_on(method):
                self._recipes[method, task] = self._resolved(method, task).recipe
                for setting in first_trials(self.study, self.study.methods[method]):
                    self._tried.append((method, self._resolved(method, task, setting).recipe.regularizer))

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Every (method, task) to run, task by task."""
        return [(m, t) for t in self.study.tasks for m in self.study.methods if t in self.study.runs_on(m)]

    def classifies(self, task: str) -> bool:
        """Return True if a task has a majority baseline."""
        return self._recipes[self.study.baseline, task].task.one_class

    def metric(self, task: str) -> str:
        """Return the metric of a task."""
        if self.study.metric != "auto":
            return self.study.metric
        return "accuracy" if self.classifies(task) else "loss"

    def counts(self, task: str) -> bool:
        """Return True if the task belongs to the primary endpoint when it is informative."""
        return self.study.metric != "auto" or self.classifies(task)

    def steps(self, task: str) -> int:
        """Return the optimizer steps of a run at equal steps."""
        return self._recipes[self.study.baseline, task].train.steps

    def check(self) -> None:
        """Raise UserError for runs that cannot work here, as `flatshift train` does."""
        from flatshift.finetune.train.stage import check_metric

        for method, regularizer in self._tried:
            try:
                build(regularizer)
            except ImportError as error:
                raise UserError(
                    f"method {method!r} cannot run: its regularizer {regularizer.kind!r} is not there ({error}); leave "
                    "it out with --methods"
                ) from None
        for task in self.study.tasks:
            same: dict[str, str] = {}
            for method in (m for m, t in self._recipes if t == task):
                own = self.study.methods[method]
                key = recipe_key(self._recipes[method, task], [self.study.rates(own), own.knobs])
                if (other := same.setdefault(key, method)) != method:
                    raise UserError(f"methods {other!r} and {method!r} are the same on task {task!r}; leave one out")
        for (method, task), recipe in self._recipes.items():
            try:
                check_rules(recipe, CELL_RULES)
                check_recipe(recipe)
                check_metric(self.study.metric, recipe.task, "comparison.metric")
            except UserError as error:
                raise UserError(f"method {method!r} on task {task!r}: {error}") from None

    def read_rows(self, out: Path) -> None:
        """Read the rows of every task, which `write_rows` writes into `out`. Raises UserError for bad rows. Runs
        created from now on have rows to train on."""
        for name, own in self.study.tasks.items():
            recipe = self._recipes[self.study.baseline, name]
            inputs = [self._digests[name], own.validation, own.test, own.test_split, repr(recipe.data.columns)]
            folder = out.absolute() / "rows" / f"{name}-{short_hash(inputs)}"
            self._rows[name] = read_task_rows(self.files[name], recipe, own), folder

    def rows(self, task: str) -> TaskRows:
        """Return the rows of a task after `read_rows`."""
        return self._rows[task][0]

    def write_rows(self) -> None:
        """Write the rows of every task to the files its cells read, unless they exist."""
        for rows, folder in self._rows.values():
            remove_leftovers(folder)
            rows.write(folder)

    def run(
        self, kind: Kind, method: str, task: str, seed: int, setting: TrialSetting, *, steps: int | None = None
    ) -> ComparisonRun:
        """Return one run. steps: a number of steps other than the task's."""
        changes: dict[str, Any] = {"train.seed": seed}
        if steps is not None:
            changes["train.steps"] = steps
        resolved = self._resolved(method, task, setting, changes)
        recipe, study, own = resolved.recipe, self.study, self.study.tasks[task]
        sharpness = study.sharpness_sigma if kind == "final" and seed < study.sharpness_seeds else None
        evaluated: EvaluationRows = "validation" if kind == "trial" else "test"  # trials never see test rows
        rows = (own.train, own.validation, own.test, own.test_split)
        # of files that it reads besides its task's rows; usually none
        digests: list[Any] = [*backbone_digests(recipe.backbone), *settings_digests(recipe)]
        if recipe.select is not None:
            digests += map(file_digest, list_input_files(recipe))
        key = recipe_key(recipe, [rows, evaluated, sharpness, self._digests[task], *digests])
        if task in self._rows:
            task_rows, folder = self._rows[task]
            resolved = dataclasses.replace(resolved, recipe=task_rows.apply_to(recipe, own, folder, evaluated))
        point = {"kind": kind, "method": method, "task": task, **setting.overrides()}
        if steps is not None:
            point["train.steps"] = steps
        probe = functools.partial(ComparisonProbe, final=kind != "trial", sharpness=sharpness)
        cell = Cell(key, point, seed, resolved, probe=probe)
        return ComparisonRun(kind, method, task, seed, setting, recipe.train.steps, cell)

    def _resolved(
        self, method: str, task: str, setting: TrialSetting | None = None, changes: Mapping[str, Any] | None = None
    ) -> Resolved:
        """Return the recipe of a method on a task: the base, then the task, the method, the setting, the changes."""
        overrides: list[Branch] = []
        for origin, keys in (
            (f"--comparison.tasks.{task}.set", self.study.tasks[task].set),
            (f"--comparison.methods.{method}.set", self.study.methods[method].set),
            (f"--comparison.methods.{method}", setting.overrides() if setting else {}),
            ("--", changes or {}),
        ):
            overrides += [from_override(key, keys[key], origin) for key in sorted(keys, key=kinds_first)]
        return resolve_auto(resolve_tree(self._tree, overrides, name=self.resolved.name))


@dataclass
class ComparisonResults:
    """All results of a comparison.

    chosen: settings of the final runs. on_edge: the best learning rate is still on an edge of those tried. finals:
    ordered by seed. step_ratio: CPU time of a method's step ÷ the baseline's, median over tasks and seeds.
    """

    trials: dict[Pair, list[tuple[ComparisonRun, Result]]] = field(default_factory=dict)
    chosen: dict[Pair, TrialSetting] = field(default_factory=dict)
    on_edge: dict[Pair, bool] = field(default_factory=dict)
    finals: dict[Pair, list[Result]] = field(default_factory=dict)
    step_ratio: dict[str, float] = field(default_factory=dict)
    equal_time: dict[Pair, list[Result]] = field(default_factory=dict)


def _restrict_comparison(study: Comparison, methods: Sequence[str], tasks: Sequence[str]) -> Comparison:
    """Return the comparison restricted to some methods (the baseline stays) and tasks."""
    if not study.tasks or len(study.methods) < 2:
        raise UserError("comparison.tasks and comparison.methods must name at least one task and two methods")
    own_tasks = {name: study.tasks[name] for name in filter_by_flag("--tasks", tasks, study.tasks)}
    names = {*filter_by_flag("--methods", methods, study.methods), study.baseline}
    own_methods = {}
    for name, method in study.methods.items():
        runs_on = tuple(task for task in method.tasks if task in own_tasks)
        if name in names and (runs_on or not method.tasks):
            own_methods[name] = dataclasses.replace(method, tasks=runs_on)
    if len(own_methods) < 2:
        raise UserError(f"nothing to compare with {study.baseline!r}: name another method with --methods")
    controls = {c: method for c, method in study.controls.items() if c in own_methods and method in own_methods}
    return dataclasses.replace(study, tasks=own_tasks, methods=own_methods, controls=controls)


_SPLIT = "split"


@dataclass(frozen=True)
class TaskRows:
    """Records of one task. classes: of its training and validation rows; None for a task without classes. skipped:
    `file:line: reason` of bad rows."""

    train: list[dict[str, Any]]
    validation: list[dict[str, Any]]
    test: list[dict[str, Any]]
    classes: tuple[str, ...] | None
    skipped: list[str]

    def counts(self, own: StudyTask) -> dict[str, int]:
        """Return the rows of a run by split, and the skipped ones if there are any."""
        counts = {"train": min(own.train, len(self.train)), "validation": len(self.validation), "test": len(self.test)}
        return counts | ({"skipped": len(self.skipped)} if self.skipped else {})

    def write(self, folder: Path) -> None:
        """Write one file per split, without the column that names it."""
        for split in ("train", "validation", "test"):
            records = [{key: record[key] for key in record if key != _SPLIT} for record in getattr(self, split)]
            lines = [json.dumps(record, ensure_ascii=False, default=str) for record in records]
            write_text(folder / f"{split}.jsonl", "\n".join(lines) + "\n")

    def apply_to(self, recipe: Recipe, own: StudyTask, folder: Path, evaluated: EvaluationRows) -> Recipe:
        """Return `recipe` on these rows, stored in `folder`: trained on a subset drawn by its seed. There is no dev
        set, so the last step's adapter is used."""
        train = TrainFiles(files=(str(folder / "train.jsonl"),), limit=min(own.train, len(self.train)))
        test = Files(files=(str(folder / f"{evaluated}.jsonl"),))
        data = dataclasses.replace(recipe.data, train=train, dev=Files(), test=test, holdout=0.0)
        task = recipe.task
        if task.has_classes and task.traits.is_sequence_level:
            task = task.replace(labels=self.classes)
        return dataclasses.replace(recipe, data=data, task=task, eval=dataclasses.replace(recipe.eval, train_limit=0))


def read_task_rows(file: str, recipe: Recipe, own: StudyTask) -> TaskRows:
    """Return the rows of a task; the draws do not depend on any seed of a run.

    Validation rows come from the training split, so that the official development split, if it serves as test, is seen
    only once. Raises UserError for bad rows, rows without a `split`, or too few of them.
    """
    task, data = recipe.task, recipe.data
    options: dict[str, Any] = {"required": task.columns(), "label": task.read_label, "bad_rows": data.bad_rows}
    skipped: list[str] = []
    rows = list(read_rows([file], columns=data.columns, skipped=skipped, **options))
    train = [row for row in rows if row.values.get(_SPLIT) == "train"]
    test = [row for row in rows if row.values.get(_SPLIT) == own.test_split]
    if not train or not test:
        splits = ", ".join(sorted({str(row.values.get(_SPLIT)) for row in rows}))
        raise UserError(f"{file}: the column 'split' must mark 'train' and {own.test_split!r} rows; it has {splits}")
    if own.validation >= len(train):
        raise UserError(f"{file}: {own.validation} validation rows leave nothing of {len(train)} rows to train on")
    validation = limit_rows(range(len(train)), own.validation, seed=derive_seed(0, "comparison", "validation"))
    limited = limit_rows(test, min(own.test, len(test)), seed=derive_seed(0, "comparison", "test rows"))
    return TaskRows(
        [train[i].record for i in sorted(set(range(len(train))).difference(validation))],
        [train[i].record for i in validation],
        [row.record for row in limited],
        task.class_names(train),
        skipped,
    )


_PAIRS, _ROWS = 3, 48
"""Pairs of noise and training rows behind the sharpness of a cell."""
_UNTIMED_STEPS = 3


@dataclass
class ComparisonProbe:
    """Measurements of one cell besides its metrics, a `flatshift.experiments.workflows.context.FineTuneProbe`. final:
    keep its answers row by row. sharpness: σ of E[L(w+ε)] − L(w); None: not measured."""

    final: bool
    sharpness: float | None
    _start: float = field(default_factory=time.process_time)
    _steps: list[float] = field(default_factory=list)
    _measured: dict[str, Any] = field(default_factory=dict)

    def step(self, line: Mapping[str, Any]) -> None:
        """Record the CPU time."""
        self._steps.append(time.process_time())

    def on_evaluation(self, recipe: Recipe, engine: Engine, tokenizer: Any, prepared: PreparedData) -> None:
        """Measure the trained adapter."""
        if self.final and recipe.task.one_class:
            self._measured["items"] = _correct_answers(recipe, engine, tokenizer, prepared.test)
            training = _correct_answers(recipe, engine, tokenizer, prepared.train)
            self._measured["train_error"] = training.count("0") / len(training)
        if self.sharpness is not None and prepared.units is None:  # a regression's head is now in its targets' units
            self._measured["sharpness"] = _measure_sharpness(recipe, engine, tokenizer, prepared, sigma=self.sharpness)

    def figures(self) -> dict[str, Any]:
        """Return CPU seconds of the cell and of a step (median; None for too few steps), and the measurements."""
        seconds = np.diff(self._steps)[_UNTIMED_STEPS:]
        step = float(np.median(seconds)) if len(seconds) else None
        return {"cpu_s": round(time.process_time() - self._start, 3), "step_cpu_s": step, **self._measured}


def _correct_answers(recipe: Recipe, engine: Engine, tokenizer: Any, rows: Sequence[Example]) -> str:
    """Return right (1) or wrong (0) for every row by its label, which may be a wrong one of `data.label_noise`."""
    from flatshift.finetune.compute.numerics import evaluation_mode
    from flatshift.finetune.data.eval_batching import EvalBatching
    from flatshift.finetune.evaluate.evaluator import head_scores

    batching = EvalBatching.of(tokenizer, recipe.train, batch_size=recipe.eval.batch_size, device=engine.device)
    with evaluation_mode(engine.eval_model):
        _, logits = head_scores(engine.eval_model, rows, batching, task=recipe.task)
    answers = zip(logits.argmax(-1).tolist(), rows, strict=True)
    return "".join("1" if predicted == example.labels else "0" for predicted, example in answers)


def _measure_sharpness(
    recipe: Recipe, engine: Engine, tokenizer: Any, prepared: PreparedData, *, sigma: float
) -> float | None:
    """Return the mean rise of the loss (nats per target token or example) over antithetic pairs of noise; None if it is
    not finite. The noise is in the full weight space: the same training rows and raw draws for every method with one
    seed."""
    from flatshift.finetune.compute.loss import add_reference, batch_loss
    from flatshift.finetune.compute.numerics import evaluation_mode
    from flatshift.finetune.compute.precision import autocast
    from flatshift.finetune.data.eval_batching import EvalBatching
    from flatshift.regularizers.sharpness.measures import expected_rise
    from flatshift.regularizers.sharpness.spaces import FullSpace, LossFunction

    rows = [prepared.train[i] for i in range(min(_ROWS, len(prepared.train)))]
    batches = list(EvalBatching.of(tokenizer, batch_size=recipe.eval.batch_size).batches(rows, recipe.task))
    count = sum(micro.supervised for micro in batches)
    if recipe.task.has_reference:  # log-probabilities of the unperturbed weights
        with autocast(recipe.train, engine.device):
            batches = add_reference(engine.model, [micro.to(engine.device) for micro in batches], task=recipe.task)

    def terms() -> Iterator[Tensor]:
        for micro in batches:
            with autocast(recipe.train, engine.device):
                yield batch_loss(engine.model, micro.to(engine.device), task=recipe.task) / count

    objective = LossFunction(engine.model, terms)
    seed = derive_seed(recipe.train.seed, "sharpness") % 2**62
    with evaluation_mode(engine.model):
        options: dict[str, Any] = {"base": objective.value(), "draws": _PAIRS, "seed": seed, "confidence": 0.95}
        (estimate,) = expected_rise(FullSpace(engine.model), objective, [sigma], **options)
    return estimate.as_dict()["value"]
