"""`train.epochs`: which layer of a recipe says how long to train, and what it comes to in updates."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from itertools import count

import pytest

from flatshift.api import _resolve_recipe
from flatshift.cli import run
from flatshift.experiments.data.sources import build_preview_loader, epochs_to_steps
from flatshift.experiments.data.splits import prepare_data
from flatshift.experiments.recipe import Resolved, from_mapping, from_override, load_recipe, resume_recipe
from flatshift.experiments.recipe.schema import Recipe, recipe_key
from flatshift.experiments.studies.sweep.sweep_plan import SweepBase
from flatshift.experiments.workflows.mesh_plan import plan_mesh
from flatshift.finetune.config import Train
from flatshift.finetune.errors import UserError


def loaded(text, tmp_path, **flags):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return load_recipe(str(path), [from_override(f"train.{key}", str(value)) for key, value in flags.items()])


def test_the_upper_layer_says_how_long(tmp_path):
    steps, epochs = "train: {steps: 60}", "train: {epochs: 2, batch_size: 3}"
    over = loaded(steps, tmp_path, epochs=1.5).recipe.train
    assert (over.epochs, over.steps) == (1.5, Train().steps)
    back = loaded(epochs, tmp_path, steps=7).recipe.train
    assert (back.epochs, back.steps, back.batch_size) == (None, 7, 3)
    (tmp_path / "base.yaml").write_text(steps)
    assert loaded("extends: base.yaml\ntrain: {epochs: 3}", tmp_path).recipe.train.epochs == 3
    assert loaded("train: {steps: 9, epochs: null}", tmp_path).recipe.train.steps == 9


def test_both_in_one_layer_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"recipe\.yaml:1: train\.epochs and train\.steps .*leave one of them out"):
        loaded("train: {steps: 60, epochs: 2}", tmp_path)
    with pytest.raises(UserError, match=r"--train\.epochs: .*\(--train\.steps\)"):
        loaded("", tmp_path, epochs=2, steps=60)
    for bad in (0, -1, ".inf"):
        with pytest.raises(UserError, match=r"train\.epochs must be"):
            loaded("", tmp_path, epochs=bad)


def test_written_and_read_again_it_is_the_same(tmp_path):
    one = loaded("train: {steps: 60}", tmp_path, epochs=2)
    assert "steps: 200" not in one.to_yaml()
    assert loaded(one.to_yaml(), tmp_path).recipe == one.recipe
    assert _resolve_recipe(Recipe(train=Train(epochs=2.0)), None, "train").recipe.train.epochs == 2
    assert _resolve_recipe(one, {"train.steps": 5}, "train").recipe.train.epochs is None
    assert SweepBase.of(one, [from_override("train.steps", "5")]).recipe.train.steps == 5


def test_a_run_by_steps_keeps_its_name():
    tree = dataclasses.asdict(Recipe())
    assert "epochs" in tree["train"]
    assert recipe_key(Recipe(), []) == recipe_key(Recipe(train=Train(epochs=None)), [])
    assert recipe_key(Recipe(), []) != recipe_key(Recipe(train=Train(epochs=1.0)), [])


def recipe_of(tmp_path, *, pack, rows=23, **train):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": "one fox and a dog " * (1 + i % 4)}) + "\n" for i in range(rows)))
    task = {"kind": "language-model", "pack": pack}
    data = {"train": {"files": [str(file)]}}
    train = {"max_length": 48, "batch_size": 2, "accumulate": 2, **train}
    return load_recipe(None, [from_mapping({"task": task, "data": data, "train": train})])


@pytest.mark.parametrize("epochs, rows", [(1, 23), (2.5, 23), (0.1, 40), (1.1, 40), (3, 4)])
def test_updates_are_the_fewest_that_give_every_row_its_turns(tmp_path, epochs, rows):
    resolved = recipe_of(tmp_path, pack=False, rows=rows, epochs=epochs)
    train = prepare_data(resolved.recipe).train
    found = epochs_to_steps(resolved, train, seed=1)
    batches = build_preview_loader(resolved.recipe, train, None, seed=1)
    seen: Counter[int] = Counter()
    for step in count(1):
        seen.update(i for micro in batches.rows_at(step - 1) for row in micro for i in row)
        if seen.total() >= round(epochs * rows, 6):
            break
    assert found.recipe.train.steps == step
    assert min(seen[i] for i in range(rows)) >= int(epochs)
    assert found.recipe.train.epochs is None
    assert found.origins["train.steps"] == f"train.epochs {epochs:g} of {rows} rows"


def test_packed_rows_are_counted_as_rows(tmp_path):
    resolved = recipe_of(tmp_path, pack=True, epochs=2)
    train = prepare_data(resolved.recipe).train
    rows = len(build_preview_loader(resolved.recipe, train, None, seed=1).epoch(0))
    found = epochs_to_steps(resolved, train, seed=1)
    assert rows < len(train) == 23
    assert found.recipe.train.steps == -(-2 * rows // 4)
    assert found.origins["train.steps"] == f"train.epochs 2 of {rows} packed rows"


def test_without_epochs_nothing_changes_and_too_many_are_refused(tmp_path):
    plain = recipe_of(tmp_path, pack=False, steps=5)
    assert epochs_to_steps(plain, [], seed=0) is plain
    many = recipe_of(tmp_path, pack=False, epochs=1e12)
    with pytest.raises(UserError, match="steps, above the 1,000,000,000"):
        epochs_to_steps(many, prepare_data(many.recipe).train, seed=0)


def test_plan_takes_the_tokens_that_are_told_before_epochs():
    flag = [from_override("train.epochs", "2")]
    told = plan_mesh("language-model", flag, tokens=1e6)
    assert told["tokens"] == 1e6 and told["data"] is None
    assert plan_mesh("language-model", flag)["data"]["updates"] > 0


def test_a_run_keeps_its_steps(tmp_path, capsys):
    recipe = recipe_of(tmp_path, pack=False, epochs=1, threads=1, precision="fp32", max_cut=1)
    text = Resolved(dataclasses.replace(recipe.recipe, backbone="flatshift-5m"), "own", recipe.origins).to_yaml()
    (tmp_path / "own.yaml").write_text(text)
    out = tmp_path / "run"
    assert run(["train", str(tmp_path / "own.yaml"), "--out", str(out), "--train.peak_tflops", "1"]) == 0
    assert "6 steps: 1.04 epochs of 23 rows" in capsys.readouterr().out + (out / "log.txt").read_text()
    assert "steps: 6  # train.epochs 1 of 23 rows" in (out / "recipe.resolved.yaml").read_text()
    kept = resume_recipe(out)
    assert (kept.recipe.train.steps, kept.recipe.train.epochs) == (6, None)
    assert kept.origins["train.steps"] == "train.epochs 1 of 23 rows"
    assert run(["train", "--resume", str(out), "--train.steps", "7"]) == 0
    with pytest.raises(UserError, match=r"--train\.epochs: a run keeps all but"):
        resume_recipe(out, [from_override("train.epochs", "2")])
