"""The target of a selection has no row that the run on the same files is judged on."""

from __future__ import annotations

import json

import pytest

from flatshift.experiments.data.splits import read_splits
from flatshift.experiments.recipe import from_mapping, load_recipe
from flatshift.experiments.run.console import Console
from flatshift.experiments.select.select import select
from flatshift.experiments.select.target import check_target, read_target
from flatshift.finetune.errors import UserError

ROWS = 40
POOL = {"select.method.kind": "random", "select.budget": 4, "select.checks": False}


@pytest.fixture
def files(tmp_path):
    """Forty rows of a task, the first half of them, and a pool that holds copies of all forty."""
    rows = [{"text": f"sentence number {i} about subject {i * 7}", "label": f"{i % 2}"} for i in range(ROWS)]
    others = [{"text": f"another passage, the one with the number {i}"} for i in range(20)]
    for name, some in {"rows": rows, "half": rows[: ROWS // 2], "pool": rows + others}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some), encoding="utf-8")
    return tmp_path


def selecting(files, holdout=None, target="rows.jsonl", **more):
    """The recipe of `flatshift select --pool … --target …`."""
    own = {"select.pool.files": [str(files / "pool.jsonl")], "select.target.files": [str(files / target)]}
    own |= {} if holdout is None else {"data.holdout": holdout}
    return load_recipe(None, [from_mapping({**own, **POOL, **more})])


def training(files, holdout=0.2, rows=("rows.jsonl",), **more):
    """The recipe of `flatshift train warmup` on the rows."""
    own = {"data.train.files": [str(files / name) for name in rows], "data.train.limit": None, "data.holdout": holdout}
    own |= {"data.dev.files": [], "data.test.files": []}
    return load_recipe("warmup", [from_mapping({**own, **more})]).recipe


def texts(rows):
    return [row.values["text"] for row in rows]


@pytest.mark.parametrize("limit", [None, 10])
def test_the_same_holdout_sets_the_same_rows_apart(files, limit):
    found, apart = read_target(selecting(files, 0.2, **{"select.target.limit": limit}).recipe, Console(quiet=True))
    splits = read_splits(training(files))
    assert len(splits.dev) == len(splits.test) == 8
    assert sorted(texts(apart)) == sorted(texts([*splits.dev, *splits.test]))
    assert set(texts(found.rows)) <= set(texts(splits.train)) and len(found.rows) == (limit or 24)


def test_without_a_holdout_the_target_is_all_of_its_rows(files):
    found, apart = read_target(selecting(files, 0).recipe, Console(quiet=True))
    assert len(found.rows) == ROWS and apart == []


def test_within_one_recipe_the_target_is_the_training_rows(files):
    recipe = training(files)
    found, apart = read_target(recipe, Console(quiet=True))
    assert texts(found.rows) == texts(read_splits(recipe).train) and apart == []


def test_decontamination_looks_for_the_rows_that_are_set_apart(files):
    resolved = selecting(files, 0.2, **{"select.hygiene.decontaminate": {"ngram": 4, "shortest": 4}})
    select(resolved, files / "picked", quiet=True)
    dropped = [json.loads(line) for line in (files / "picked" / "drops.jsonl").read_text().splitlines()]
    splits = read_splits(training(files))
    numbers = {row.id for row in (*splits.dev, *splits.test)}
    assert {drop["id"] for drop in dropped} == numbers, "the pool has the rows of the target first, by the same places"


CASES = {
    "the same draw": ({"holdout": 0.2}, {}, None),
    "more set apart than is judged": ({"holdout": 0.3}, {}, None),
    "dev rows of their own": ({"holdout": 0.2}, {"data.dev.files": ["half.jsonl"]}, None),
    "other rows": ({"target": "half.jsonl", "holdout": 0}, {}, None),
    "no holdout of the run": ({}, {"holdout": 0.0, "data.dev.files": ["half.jsonl"]}, None),
    "no holdout of the selection": ({"holdout": 0}, {}, "--data.holdout 0.2"),
    "less set apart than is judged": ({"holdout": 0.1}, {}, "--data.holdout 0.2"),
    "one of two files": ({"holdout": 0.2}, {"rows": ("rows.jsonl", "half.jsonl")}, "--target "),
    "fewer rows to draw from": ({"holdout": 0.2}, {"data.train.first": 30}, "set apart for evaluation"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_finished_selection_that_saw_judged_rows_is_refused(files, case):
    made, wanted, refused = CASES[case]
    select(selecting(files, **made), files / "picked", quiet=True)
    own = {
        key: [str(files / name) for name in value] if key.endswith("dev.files") else value
        for key, value in wanted.items()
    }
    recipe = training(files, **own, **{"select": {"from": str(files / "picked")}})
    if refused is None:
        check_target(recipe, ())
        return
    with pytest.raises(UserError, match=refused):
        check_target(recipe, ())


def test_a_row_that_only_the_run_skips_moves_the_draw(files):
    select(selecting(files, 0.2), files / "picked", quiet=True)
    recipe = training(files, **{"select": {"from": str(files / "picked")}, "data.bad_rows": "skip"})
    check_target(recipe, ())
    with pytest.raises(UserError, match="set apart for evaluation"):
        check_target(recipe, ("rows.jsonl:3: no label",))


@pytest.mark.parametrize("split", ["dev", "test"])
def test_a_target_of_the_rows_that_evaluate_is_refused(files, split):
    evaluated = {f"data.{split}.files": [str(files / "half.jsonl")]}
    (files / "copy.jsonl").write_bytes((files / "half.jsonl").read_bytes())
    for target in ("half.jsonl", "copy.jsonl"):
        own = training(files, **evaluated, **{"warmup.own": 0.5, "select.target.files": [str(files / target)]})
        with pytest.raises(UserError, match=rf"data\.{split}\.files: .*name other texts in select\.target\.files"):
            check_target(own, ())
    select(selecting(files, target="copy.jsonl"), files / "picked", quiet=True)
    recipe = training(files, **evaluated, **{"select": {"from": str(files / "picked")}})
    with pytest.raises(UserError, match=rf"data\.{split}\.files: .*select again with another --target"):
        check_target(recipe, ())


def test_a_recipe_that_names_its_training_rows_as_the_target_is_refused(files):
    named = training(files, **{"select.target.files": [str(files / "rows.jsonl")]})
    with pytest.raises(UserError, match=r"leave select\.target\.files out"):
        check_target(named, ())
    check_target(training(files, **{"select.target.files": [str(files / "pool.jsonl")]}), ())
