"""From a recipe's `quality` block to cells, each with a key; what is wrong is refused here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies.selection_quality.cells import FeaturesCell, PoolCell, SelectionCell, TargetRows, TrainingCell
from benchmarks.studies.selection_quality.settings import Quality, StudyRecipe, check_cells, check_study, settings_tree
from flatshift.experiments.recipe import from_override, recipe_key
from flatshift.experiments.recipe.auto import resolve_auto
from flatshift.experiments.recipe.resolve import resolve_tree
from flatshift.experiments.recipe.schema import Recipe, drop_default_keys, drop_nulls, short_hash
from flatshift.experiments.recipe.tree import Branch
from flatshift.experiments.studies.cell import file_digest as digest
from flatshift.experiments.studies.study import filter_by_flag, locate_file, study_recipe
from flatshift.finetune.digests import file_sha256 as file_digest
from flatshift.finetune.errors import UserError
from flatshift.selection.config import (
    Auto,
    Cynical,
    Domains,
    GotD,
    Method,
    PrecomputedFeatures,
    TokenNgrams,
    required_inputs,
)

RECIPE = Path(__file__).resolve().parent / "selection-quality.yaml"
"""The study that is published."""


class Plan:
    """The cells of one study; everything about it that can be wrong is found here, before any runs."""

    def __init__(
        self,
        reference: str,
        overrides: Sequence[Branch],
        *,
        data: Path | None = None,
        out: Path | None = None,
        selectors: Sequence[str] = (),
        targets: Sequence[str] = (),
    ) -> None:
        """
        Args:
            reference: recipe file with a `quality` block.
            out: directory of the study, whose earlier choice of `train.precision: auto` holds.
            data: directory that files are relative to; None: the working directory.
            selectors: only these arms and the baseline; empty: all.
            targets: only these; empty: all.

        Raises:
            UserError: no such block, an unknown name, a missing file, settings that cannot serve.
        """
        self.resolved, self._tree = study_recipe(
            reference, overrides, block="quality", example=str(RECIPE), out=out, recipe_class=StudyRecipe
        )
        recipe = self.resolved.recipe
        assert isinstance(recipe, StudyRecipe) and recipe.quality is not None
        whole = recipe.quality
        check_study(recipe, whole)
        files = {name: locate_file(t.file, data, f"quality.targets.{name}.file") for name, t in whole.targets.items()}
        self._rows = {
            name: TargetRows(
                file, digest(file)[0], t.texts, t.labels, t.validation, t.test, t.test_split, tuple(t.domains)
            )
            for (name, t), file in zip(whole.targets.items(), files.values(), strict=True)
        }
        self.study = _only(whole, selectors, targets)
        self.missing = {
            "arms": [name for name in whole.arms if name not in self.study.arms],
            "targets": [name for name in whole.targets if name not in self.study.targets],
        }
        """What the recipe has and this part of it leaves out: names of arms and targets."""
        # judged rows of every target, not only of those that run: the pool is the same for any part of the study
        self.pool = self._pool(whole, data)
        self.features = self._features()
        for target in self.study.targets:
            check_cells(self.resolve("", target), f"quality.targets.{target}.set: ")
            for arm, spec in self.study.arms.items():
                if spec.source == "selector":
                    _check_method(self.resolve(arm, target).select.method, f"quality.arms.{arm}")  # type: ignore[union-attr]

    # ---------------------------------------------------------------------------------------- what runs

    def arms_with_budget(self) -> list[str]:
        """Arms that select, those matched to another last."""
        results = [name for name in self.study.arms if self.study.has_budget(name)]
        return sorted(results, key=lambda name: self.study.arms[name].source == "matched")

    def warm_arms(self) -> list[str]:
        """Arms that warm up."""
        return [name for name, arm in self.study.arms.items() if arm.source != "none"]

    def points(self) -> list[tuple[str, str, int | None]]:
        """(arm, target, budget) of all final runs, target by target."""
        return [
            (arm, target, budget)
            for target in self.study.targets
            for arm in self.study.arms
            for budget in (self.study.budgets_of(target) if self.study.has_budget(arm) else (None,))
        ]

    # ---------------------------------------------------------------------------------------- cells

    def selection(self, arm: str, target: str, seed: int) -> SelectionCell:
        """The selection of `arm` for `target` under `seed`."""
        study, spec = self.study, self.study.arms[arm]
        recipe = self.resolve(arm, target, {"train.seed": seed})
        assert recipe.select is not None
        followed = self.selection(spec.like, target, seed) if spec.source == "matched" else None
        like = followed.key if followed else None
        rows, budgets = self._rows[target], study.budgets_of(target)
        form = spec.source == "form"
        tokens = study.unit == "tokens" or "tokens" in required_inputs(recipe.select.method)
        each = followed.each if followed else len(budgets) > 1 and _one_size(recipe.select.method)
        key = short_hash(
            [
                "selection", self.features.key, settings_tree(recipe.select.method), rows.identity, list(rows.domains),
                seed, list(budgets), like, *(["a selection for each budget"] if each else []),
                *([study.unit, recipe.backbone] if tokens else []), *(["by form alone"] if form else []),
                *([spec.times] if spec.times > 1 else []), *(["own", spec.own] if spec.own else []),
            ]
        )  # fmt: skip
        return SelectionCell(
            key,
            arm,
            target,
            seed,
            recipe,
            self.features,
            rows,
            budgets,
            each,
            like,
            study.unit,
            form,
            spec.times,
            spec.own,
        )

    def trial(self, arm: str, target: str, lr: float) -> TrainingCell:
        """A warm-up of one learning rate, evaluated on validation texts."""
        budget = self.study.primary_budget if self.study.has_budget(arm) else None
        return self._training("trial", arm, target, budget, self.study.tuning_seed, lr=lr)

    def fine_tune_trial(self, target: str, lr: float) -> TrainingCell:
        """A fine-tune without warm-up, evaluated on validation rows."""
        return self._training("fine-tune trial", "", target, None, self.study.tuning_seed, fine_tune_lr=lr)

    def final(
        self, arm: str, target: str, budget: int | None, seed: int, *, lr: float | None, fine_tune_lr: float | None
    ) -> TrainingCell:
        """A run that is evaluated on test rows."""
        rate = fine_tune_lr if self.study.fine_tunes(budget) else None
        return self._training("final", arm, target, budget, seed, lr=lr, fine_tune_lr=rate)

    def _training(
        self,
        kind: str,
        arm: str,
        target: str,
        budget: int | None,
        seed: int,
        *,
        lr: float | None = None,
        fine_tune_lr: float | None = None,
    ) -> TrainingCell:
        study, rows = self.study, self._rows[target]
        changes: dict[str, Any] = {"train.seed": seed}
        if lr is not None:
            changes["warmup.lr"] = lr
        if fine_tune_lr is not None:
            changes["optimizer.lr"] = fine_tune_lr
        recipe = self.resolve(arm, target, changes)
        if budget is not None and study.unit == "tokens" and recipe.warmup is not None:
            step = recipe.warmup.batch_size * recipe.warmup.accumulate * study.packed
            recipe = self.resolve(arm, target, changes | {"warmup.steps": max(1, round(budget / step))})
        selection = self.selection(arm, target, seed) if budget is not None else None
        source = study.arms[arm].source if arm else "none"
        own = study.arms[arm].own if arm else 0.0
        form, after, forgetting = (
            wanted if kind == "final" else type(wanted)()
            for wanted in (study.form, study.form_after, study.elsewhere * study.forgetting)
        )
        key = recipe_key(
            dataclasses.replace(recipe, select=None, warmup=recipe.warmup if source != "none" else None),
            [
                kind, source, budget, selection.key if selection else None, rows.identity,
                self.pool.key if source == "pool" else None, study.packed, study.judged_length, fine_tune_lr is None,
                *(["in plain form, too"] if form else []), *(["in plain form afterwards"] if after else []),
                *(["on the pool, too", self.pool.key] if forgetting else []),
                *([forgetting] if forgetting not in (0, Quality.elsewhere) else []), *(["own", own] if own else []),
            ],
        )  # fmt: skip
        return TrainingCell(
            key, kind, arm, source, target, budget, seed, lr, fine_tune_lr, recipe,
            selection.key if selection else None, self.pool, rows, study.packed, study.judged_length, form, after,
            forgetting, own,
        )  # fmt: skip

    def resolve(self, arm: str, target: str, changes: Mapping[str, Any] | None = None) -> Recipe:
        """The recipe of an arm on a target: the base, then the target, the arm, the changes."""
        laid: list[Branch] = []
        for where, keys in (
            (f"--quality.targets.{target}.set", self.study.targets[target].set if target else {}),
            (f"--quality.arms.{arm}.set", self.study.arms[arm].set if arm else {}),
            ("--", changes or {}),
        ):
            laid += [from_override(key, value, where) for key, value in keys.items()]
        return resolve_auto(resolve_tree(self._tree, laid, name=self.resolved.name)).recipe

    # ---------------------------------------------------------------------------------------- inputs

    def _pool(self, whole: Quality, data: Path | None) -> PoolCell:
        from flatshift.finetune.assets import pool_tags_path

        file = locate_file(whole.pool, data, "quality.pool")
        if whole.tags:
            tags = whole.tags if Path(whole.tags).is_absolute() else str(((data or Path()) / whole.tags).absolute())
            if not Path(tags).is_file():
                raise UserError(f"quality.tags: {tags}: no such file")
        elif whole.pool == "sample:pool":
            tags = str(pool_tags_path())
        else:
            raise UserError("quality.tags is empty: name the .tsv of the pool's hidden domains")
        recipe = self.resolve("", "")
        assert recipe.select is not None
        rows = tuple(self._rows.values())
        key = short_hash(
            [
                "pool", digest(file), file_digest(Path(tags)), whole.pool_rows,
                _hygiene_tree(recipe),
                settings_tree(recipe.select.columns), recipe.select.bad_rows,
                [r.identity for r in rows] if recipe.select.hygiene.on else None,
            ]
        )  # fmt: skip
        return PoolCell(key, file, tags, whole.pool_rows, recipe, rows)

    def _features(self) -> FeaturesCell:
        recipe = resolve_tree(self._tree, (), name=self.resolved.name).recipe
        assert recipe.select is not None
        embedder = recipe.select.embedder
        if isinstance(embedder, TokenNgrams | PrecomputedFeatures):
            raise UserError(f"select.embedder: {embedder.kind} serves one target, not many; take another")
        backbone = recipe.backbone if embedder.kind == "backbone" else None
        stored = recipe.select.feature_type
        key = short_hash(["features", self.pool.key, settings_tree(embedder), "", None, backbone, stored])
        return FeaturesCell(key, recipe, self.pool)


def _only(whole: Quality, selectors: Sequence[str], targets: Sequence[str]) -> Quality:
    """The study cut down to some arms (the baseline stays) and targets."""
    wanted = filter_by_flag("--selectors", selectors, whole.arms)
    arms = {name: arm for name, arm in whole.arms.items() if name in wanted or name == whole.baseline}
    for name, arm in arms.items():
        if arm.source == "matched" and arm.like not in arms:
            raise UserError(f"--selectors: {name} follows {arm.like}; name that too")
    if len(arms) < 2:
        raise UserError(f"nothing to compare with {whole.baseline!r}: name another arm with --selectors")
    tasks = {name: whole.targets[name] for name in filter_by_flag("--targets", targets, whole.targets)}
    if absent := [name for name in whole.tune_on if name not in tasks]:
        raise UserError(f"--targets: {absent[0]} chooses the rates of every arm; name it too")
    focus = whole.focus if whole.focus in arms else whole.baseline
    return dataclasses.replace(whole, arms=arms, targets=tasks, focus=focus)


def _one_size(method: Method) -> bool:
    """Return True where a selection is shaped for its budget: the first k of a larger one are not that of k."""
    return isinstance(method, Domains | Auto | Cynical) or (isinstance(method, GotD) and method.rounds > 1)


def _check_method(method: Method, where: str) -> None:
    short = required_inputs(method) - {"features", "texts", "tokens"}
    if short:
        raise UserError(f"{where}: method {method.kind} needs {', '.join(sorted(short))}, which a study does not have")


def _hygiene_tree(recipe: Recipe) -> Any:
    """Return the settings of hygiene as plain values, without the keys that `recipe_key` leaves out."""
    assert recipe.select is not None
    tree = {"hygiene": dataclasses.asdict(recipe.select.hygiene)}
    drop_default_keys(tree)
    return drop_nulls(tree)["hygiene"]
