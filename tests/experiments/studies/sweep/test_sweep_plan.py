"""Points of a sweep (grid, paired, random), its cells beside those of single recipes, and its tables."""

from __future__ import annotations

import csv
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from flatshift.experiments.recipe import from_override, load_recipe
from flatshift.experiments.recipe.resolve import get_dotted
from flatshift.experiments.results.sweep import rows_to_table
from flatshift.experiments.studies import CellResult, finish_cell, make_cell
from flatshift.experiments.studies.cell import backbone_digests, capture_result
from flatshift.experiments.studies.sweep import parse_grid, write_table
from flatshift.experiments.studies.sweep.axes import ValueRange, generate_points
from flatshift.experiments.studies.sweep.bisection import _train_error, parse_bisection
from flatshift.experiments.studies.sweep.sweep_plan import SweepBase
from flatshift.finetune.errors import UserError
from flatshift.finetune.train.divergence import Diverged
from flatshift.regularizers.config import GGPO, Plain
from tests.support.counted_calls import python_calls

# ------------------------------------------------------------------------------------------- points


def test_grid_and_paired_points() -> None:
    axes = parse_grid(["adapter.rank=1, 2,4", "optimizer.lr=1e-3,1e-2,0.1"])
    grid = list(generate_points(axes, "grid", count=None, seed=0))
    product = itertools.product(["1", "2", "4"], ["1e-3", "1e-2", "0.1"])
    assert [tuple(point.values()) for point in grid] == list(product)
    paired = list(generate_points(axes, "paired", count=None, seed=0))
    assert [tuple(point.values()) for point in paired] == [("1", "1e-3"), ("2", "1e-2"), ("4", "0.1")]


def test_random_points_are_distinct_and_grow() -> None:
    axes = {
        "adapter.rank": ValueRange(1, 256, log=True, whole=True),
        "optimizer.lr": ValueRange(1e-4, 1e-2, log=True),
        "x": ["a", "b"],
    }
    few = list(generate_points(axes, "random", count=20, seed=3))
    many = list(generate_points(axes, "random", count=400, seed=3))
    assert many[:20] == few, "a larger sweep keeps the cells of a smaller one"
    assert len({repr(p) for p in many}) == 400
    assert list(generate_points(axes, "random", count=20, seed=4)) != few
    ranks = [p["adapter.rank"] for p in many]
    assert all(isinstance(r, int) and 1 <= r <= 256 for r in ranks)
    assert all(isinstance(p["optimizer.lr"], float) and 1e-4 <= p["optimizer.lr"] <= 1e-2 for p in many)
    # evenly spread in the logarithm: the mean of 400 uniform draws has a standard error of .0144
    share = [(math.log(p["optimizer.lr"]) - math.log(1e-4)) / math.log(100) for p in many]
    assert abs(np.mean(share) - 0.5) < 0.06 and abs(np.std(share) - 12**-0.5) < 0.04
    assert {p["x"] for p in many} == {"a", "b"}


def test_small_random_space_is_exhausted_without_repeats() -> None:
    axes = {"n": ValueRange(1, 4, whole=True), "x": ["a", "b"]}
    points = list(generate_points(axes, "random", count=8, seed=0))
    assert {tuple(p.values()) for p in points} == set(itertools.product([1, 2, 3, 4], ["a", "b"]))
    with pytest.raises(UserError, match="only 8 different points"):
        list(generate_points(axes, "random", count=9, seed=0))


@pytest.mark.parametrize(
    ("grid", "design", "count", "words"),
    [
        (["adapter.rank=1,2", "optimizer.lr=1e-3"], "paired", None, r"adapter\.rank 2, optimizer\.lr 1"),
        (["adapter.rank=1..8"], "grid", None, "--design random"),
        (["adapter.rank=1..8"], "random", None, "--points N"),
        (["adapter.rank=1..8"], "random", 0, "at least 1"),
        (["adapter.rank=1,2"], "grid", 3, "--design random only"),
        (["adapter.rank=8..1"], "random", 3, "lower end first"),
        (["optimizer.lr=0..1:log"], "random", 3, "begin above 0"),
        (["adapter.rank=1..2.5"], "random", 3, "whole ends"),
        (["adapter.rank"], "grid", None, "key=v1"),
        (["adapter.rank="], "grid", None, "key=v1"),
        (["adapter.rank=1,,2"], "grid", None, "a value is missing"),
        (["adapter.rank=1,1"], "grid", None, "given twice"),
        (["adapter.rank=1,1", "train.steps=2,3"], "random", 2, "given twice"),
        (["adapter.rank=1", "adapter.rank=2"], "grid", None, "given twice"),
        (["adapter.rnk=1"], "grid", None, "'adapter.rank'"),
        (["adapter.rank=x"], "grid", None, "whole number"),
        (["train.seed=1"], "grid", None, "--seeds"),
        (["train.threads=1,2"], "grid", None, r"train\.threads=1 and train\.threads=2 are the same run"),
        (["data.label_noise=0,0.0"], "grid", None, "=0 and data.label_noise=0.0 are the same run"),
        (["train.steps=3", "mesh.dp=1,2"], "grid", None, r"train\.steps=3 mesh\.dp=2: record"),
    ],
)
def test_bad_grids_are_refused_before_anything_runs(
    grid: list[str], design: str, count: int | None, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        list(SweepBase.of("double-descent", []).plan(parse_grid(grid), 1, design=design, points=count))  # type: ignore[arg-type]


def test_path_with_dots_is_no_range() -> None:
    assert parse_grid(["data.train.files=../rows.jsonl"]) == {"data.train.files": ["../rows.jsonl"]}


# ------------------------------------------------------------------------------------------- cells


def test_cells_are_those_of_single_recipes() -> None:
    laid = [from_override("train.steps", "7", "--train.steps"), from_override("regularizer", "ggpo", "--regularizer")]
    axes = parse_grid(["adapter.rank=1,4", "regularizer.sigma=0.01,0.02", "adapter.alpha=null,3"])
    cells = list(SweepBase.of("double-descent", laid).plan(axes, 2))
    expected = []
    for rank, sigma, alpha, seed in itertools.product(["1", "4"], ["0.01", "0.02"], ["null", "3"], range(2)):
        values = zip(axes, (rank, sigma, alpha), strict=True)
        more = [from_override(key, value, f"--grid {key}") for key, value in values]
        resolved = load_recipe("double-descent", [*laid, *more, from_override("train.seed", seed, "--seeds")])
        expected.append(make_cell(resolved, point={k: get_dotted(resolved.recipe, k) for k in axes}, seed=seed))
    assert [(c.key, c.point, c.seed) for c in cells] == [(c.key, c.point, c.seed) for c in expected]
    assert [c.resolved.to_yaml() for c in cells] == [c.resolved.to_yaml() for c in expected]
    assert len({c.key for c in cells}) == len(cells) == 16


def test_a_local_backbone_is_known_by_its_bytes(tmp_path: Path) -> None:
    def key() -> str:
        backbone_digests.cache_clear()
        laid = {"backbone": str(tmp_path / "model"), "train.precision": "fp32", "train.backbone_precision": "same"}
        (cell,) = SweepBase.of("double-descent", [from_override(name, value) for name, value in laid.items()]).plan(
            {}, 1
        )
        return cell.key

    absent = key()
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "model" / name).write_bytes(b"1")
    first = key()
    (tmp_path / "model" / "README.md").write_bytes(b"x")
    assert key() == first != absent, "a name that is no directory is only a name"
    (tmp_path / "model" / "tokenizer.json").write_bytes(b"other tokens")
    assert key() != first
    (tmp_path / "model" / "tokenizer.json").unlink()
    assert key() == first
    (tmp_path / "model" / "model.safetensors").write_bytes(b"2")
    assert key() != first
    assert backbone_digests("flatshift-5m") == backbone_digests("package:x/y") == []


def test_component_is_shown_by_its_kind() -> None:
    cells = list(SweepBase.of("double-descent", []).plan(parse_grid(["regularizer=plain,ggpo"]), 1))
    assert [c.point for c in cells] == [{"regularizer": "plain"}, {"regularizer": "ggpo"}]
    grid = parse_grid(["regularizer.sigma=0.2", "regularizer.kind=ggpo,flat-lora"])  # the kind does not drop the sigma
    base = SweepBase.of("double-descent", [from_override("regularizer", "ggpo", "--regularizer")])
    cells = list(base.plan(grid, 1))
    assert [(c.resolved.recipe.regularizer.kind, c.resolved.recipe.regularizer.sigma) for c in cells] == [
        ("ggpo", 0.2), ("flat-lora", 0.2),
    ]  # fmt: skip


def test_one_kind_may_stand_in_a_grid_with_several_settings(tmp_path: Path) -> None:
    recipe = tmp_path / "own.yaml"
    recipe.write_text(
        "extends: double-descent\nregularizer: {kind: ggpo, sigma: 0.15}\n"
        'sweep: {grid: {regularizer: [plain, ggpo, "{kind: ggpo, beta: 0.0}", "{kind: ggpo, control: shuffled}"]}}\n'
    )
    block = load_recipe(str(recipe)).recipe.sweep
    assert block is not None
    axes = {"regularizer": list(block.grid["regularizer"])}
    cells = list(SweepBase.of(str(recipe), []).plan(axes, 1))
    assert [c.point["regularizer"] for c in cells] == ["plain", "ggpo", "ggpo beta=0.0", "ggpo control=shuffled"]
    shuffled = GGPO(sigma=0.15, control="shuffled")
    expected = [Plain(), GGPO(sigma=0.15), GGPO(sigma=0.15, beta=0.0), shuffled]
    assert [c.resolved.recipe.regularizer for c in cells] == expected


def test_a_kind_with_settings_may_be_written_on_the_command_line() -> None:
    axes = parse_grid(["regularizer=plain,{kind: ggpo, beta: 0},{kind: ggpo, beta: 0.5}", "adapter.targets=[q,k],[v]"])
    assert axes["adapter.targets"] == ["[q,k]", "[v]"]
    cells = list(SweepBase.of("double-descent", []).plan(axes, 1))
    assert [c.point["regularizer"] for c in cells][::2] == ["plain", "ggpo beta=0", "ggpo beta=0.5"]
    assert cells[2].written == {"regularizer": "{kind: ggpo, beta: 0}", "adapter.targets": "[q,k]"}
    (again,) = SweepBase.of("double-descent", []).cells([cells[2].written], 1)
    assert again == cells[2]


def test_an_axis_may_be_of_a_kind_that_another_axis_sets() -> None:
    axes = parse_grid(["regularizer=ggpo,mgpo", "regularizer.rho=0.1,0.2"])
    with pytest.raises(UserError, match=r"unknown key 'regularizer.rho'"):
        list(SweepBase.of("double-descent", []).plan(axes, 1))
    axes = parse_grid(["regularizer=mgpo,sam", "regularizer.rho=0.1,0.2"])
    cells = list(SweepBase.of("double-descent", []).plan(axes, 1))
    assert [c.resolved.recipe.regularizer.kind for c in cells] == ["mgpo", "mgpo", "sam", "sam"]
    first = parse_grid(["regularizer.rho=0.1,0.2", "regularizer=mgpo,sam"])  # its settings before the component
    other = list(SweepBase.of("double-descent", []).plan(first, 1))
    assert [c.resolved.recipe.regularizer.rho for c in other] == [0.1, 0.1, 0.2, 0.2]
    assert {c.key for c in other} == {c.key for c in cells} and list(other[0].point) == list(first)
    drawn = parse_grid(["regularizer=mgpo,sam", "regularizer.rho=0.1..1"])
    points = list(SweepBase.of("double-descent", []).plan(drawn, 1, design="random", points=3))
    assert all(isinstance(c.resolved.recipe.regularizer.rho, float) for c in points)


def test_seeds_begin_at_the_recipes_own() -> None:
    axes = parse_grid(["adapter.rank=1,2"])
    cells = list(SweepBase.of("double-descent", [from_override("train.seed", 100)]).plan(axes, 2))
    assert [(c.seed, c.resolved.recipe.train.seed) for c in cells] == [(100, 100), (101, 101)] * 2
    keys = [c.key for c in SweepBase.of("double-descent", []).plan(axes, 102)]
    assert [c.key for c in cells] == [*keys[100:102], *keys[202:204]], "a seed has one name wherever a sweep begins"


def test_random_whole_settings_stay_whole() -> None:
    axes = parse_grid(["data.train.limit=10..1000:log", "optimizer.lr=1e-4..1e-2:log"])
    cells = list(SweepBase.of("double-descent", []).plan(axes, 1, design="random", points=30))
    limits = [c.resolved.recipe.data.train.limit for c in cells]
    assert all(isinstance(n, int) and 10 <= n <= 1000 for n in limits) and len(set(limits)) > 20


def test_a_thousand_points_are_planned_with_little_work_each() -> None:
    def plan(count: int) -> None:
        axes = parse_grid([f"train.steps={','.join(map(str, range(1, count + 1)))}"])
        assert len(list(SweepBase.of("double-descent", []).plan(axes, 1))) == count

    plan(1)  # digests of the inputs
    assert python_calls(lambda: plan(1000)) < 10_000 * 1000, "some 5,200 functions a point: milliseconds"


def test_import_leaves_the_thread_pools_alone() -> None:
    """A worker sets its share of the cores after this import and before BLAS is loaded."""
    code = "import sys, flatshift.experiments.studies.queue, flatshift.experiments.studies.executors.local; "
    code += "sys.exit(bool({'numpy', 'torch', 'pyarrow'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ------------------------------------------------------------------------------------------- bisection flags


@pytest.mark.parametrize(
    ("text", "epsilon", "words"),
    [
        ("adapter.rank", 0.1, "only data.train.limit"),
        ("data.train.limit=5", 0.1, "lo..hi"),
        ("data.train.limit=1..9:log", 0.1, "lo..hi"),
        ("data.train.limit=0..9", 0.1, "at least 1 row"),
        ("data.train.limit", 1.0, "--epsilon"),
    ],
)
def test_bad_bisections(text: str, epsilon: float, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_bisection(text, epsilon, load_recipe("double-descent").recipe)


def test_bisection_reaches_from_few_rows_to_all() -> None:
    from flatshift.finetune.data.files import describe_files

    recipe = load_recipe("double-descent", [from_override("data.holdout", "0.25")]).recipe
    (train,) = describe_files(recipe.data.train.files)
    found = parse_bisection("data.train.limit", 0.1, recipe)
    assert (found.low, found.high) == (8, train["rows"] - round(train["rows"] * 0.25))  # test has its file, dev has not


def test_bisection_counts_the_rows_that_a_cell_gets(tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"row {i}", "label": "ab"[i % 2]}) for i in range(13)]
    (tmp_path / "rows.jsonl").write_text("\n".join([*rows, "{"]), encoding="utf-8")
    laid = {"data.train.files": str(tmp_path / "rows.jsonl"), "data.bad_rows": "skip", "data.holdout": 0.1}
    laid |= {"data.test.files": "sample:banking/test"}
    recipe = load_recipe("double-descent", [from_override(key, value) for key, value in laid.items()]).recipe
    assert parse_bisection("data.train.limit", None, recipe).high == 12  # 13 usable, a tenth rounded for dev
    fewer = load_recipe("double-descent", [from_override(k, v) for k, v in (laid | {"data.holdout": 0.4}).items()])
    with pytest.raises(UserError, match="only 8 training rows"):
        parse_bisection("data.train.limit", None, fewer.recipe)


def test_own_features_are_part_of_a_cells_key(tmp_path: Path) -> None:
    own = {side: tmp_path / f"{side}.npy" for side in ("pool", "target")}
    laid = {"select.embedder.kind": "features"} | {f"select.embedder.{side}": str(path) for side, path in own.items()}
    keys = []
    for rows in (np.ones((4, 2)), np.zeros((4, 2))):
        for path in own.values():
            np.save(path, rows)
        resolved = load_recipe("warmup", [from_override(key, value) for key, value in laid.items()])
        keys.append(make_cell(resolved, point={}, seed=0).key)
    assert keys[0] != keys[1]


def test_only_a_diverged_cell_has_fitted_nothing(tmp_path: Path) -> None:
    def diverge() -> dict:
        raise Diverged("the loss at step 3 is not a finite number")

    (cell,) = SweepBase.of("double-descent", []).cells([{"adapter.rank": 1}], 1)
    directory = tmp_path / "cells" / cell.key
    finish_cell(directory, cell, capture_result(diverge, directory)[0])
    assert math.isnan(_train_error(tmp_path, cell))
    finish_cell(directory, cell, CellResult("failed", "limit: 400 is above the 300 rows"))
    with pytest.raises(UserError, match=rf"{cell.key} \(adapter\.rank=1 seed=0\) failed: limit: 400"):
        _train_error(tmp_path, cell)


# ------------------------------------------------------------------------------------------- tables


def trace(step: int, **figures: float | None) -> str:
    return json.dumps(
        {"stage": "fine-tune", "attempt": 1, "step": step, "tokens": 10 * step, "lr": 1e-3, "time_s": 0.1} | figures
    )


def test_tables(tmp_path: Path) -> None:
    base = SweepBase.of("double-descent", [])
    cells = list(
        base.cells([{"adapter.rank": r, "adapter.targets": t} for r, t in ((1, "all-linear"), (2, ("q", "k")))], 2)
    )
    for place, cell in enumerate(cells[:3]):
        directory = tmp_path / "cells" / cell.key
        directory.mkdir(parents=True)
        lines = [
            trace(0, **{"train.error": 0.9, "stable_rank": None}),
            trace(4, **{"train.error": 0.5, "stable_rank": 1}),
        ]
        lines += [trace(2, **{"train.error": 0.7}), trace(4, **{"train.error": 0.25 + place, "stable_rank": 2.5})]
        (directory / "trace.jsonl").write_text("\n".join(lines) + '\n{"stage": "fine', encoding="utf-8")
        failed = place == 2
        if place == 1:  # its own last step, which is no recorded one
            stopped = trace(5, **{"train.error": 1.25, "stable_rank": 2.5}) + "\n"
            (directory / "trace.jsonl").write_text("\n".join(lines) + "\n" + stopped, encoding="utf-8")
        metrics = {} if failed else {"test": {"accuracy": {"value": 0.75}, "loss": {"value": place}}}
        finish_cell(
            directory, cell, CellResult("failed" if failed else "done", "boom" if failed else None, metrics, 1.5)
        )
    rows = write_table(tmp_path, cells, columns={cells[0].key: {"emc": 44.5}})
    assert [row["cell"] for row in rows] == [cell.key for cell in cells[:3]], "cells without a result are left out"
    table = pq.read_table(tmp_path / "cells.parquet").to_pydict()
    assert table["adapter.rank"] == [1, 1, 2] and table["adapter.targets"] == ["all-linear", "all-linear", "q, k"]
    assert table["seed"] == [0, 1, 0] and table["status"] == ["done", "done", "failed"]
    assert table["reason"] == [None, None, "boom"] and table["seconds"] == [1.5] * 3
    assert table["test.error"] == [0.25, 0.25, None] and table["test.loss"] == [0.0, 1.0, None]
    assert table["train.error"] == [0.25, 1.25, None], "the last line of the last step"
    assert table["stable_rank"] == [2.5, 2.5, None] and table["emc"] == [44.5, None, None]
    assert not {"step", "lr", "tokens", "stage"} & table.keys()
    curves = pq.read_table(tmp_path / "curves.parquet").to_pydict()
    rows = list(zip(curves["cell"], curves["step"], curves["status"], curves["train.error"], strict=True))
    for place, (cell, how) in enumerate(zip(cells[:3], ("stopped early", "stopped early", "failed"), strict=True)):
        lines = [row[1:] for row in rows if row[0] == cell.key]
        assert lines[:4] == [(0, None, 0.9), (2, None, 0.7), (4, None, 0.25 + place), (6, how, None)], "what it left"
        assert lines[-1] == (100, how, None)
    assert curves["adapter.rank"][:6] == [1] * 6 and curves["seed"][:3] == [0] * 3
    with (tmp_path / "points.csv").open(newline="", encoding="utf-8") as file:
        points = list(csv.DictReader(file))
    assert [p["adapter.rank"] for p in points] == ["1", "1", "2"] and points[2]["test.loss"] == ""
    assert not list(tmp_path.rglob(".*.tmp"))


def test_row_takes_the_trace_of_the_judged_step(tmp_path: Path) -> None:
    cells = list(SweepBase.of("double-descent", []).cells([{"adapter.rank": r} for r in (1, 2)], 1))
    for cell, best in zip(cells, (2, 3), strict=True):
        stage = tmp_path / "cells" / cell.key / "stages" / "fine-tune"
        stage.mkdir(parents=True)
        (stage / "done.json").write_text(json.dumps({"steps": 4, "best_step": best}), encoding="utf-8")
        lines = [trace(2, **{"train.error": 0.2}), trace(4, **{"train.error": 0.4})]
        (stage.parent.parent / "trace.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        finish_cell(stage.parent.parent, cell, CellResult("done", None, {"test": {"loss": {"value": 1.0}}}))
    rows = write_table(tmp_path, cells)
    assert [row.get("train.error") for row in rows] == [0.2, None], "step 3 was judged and not recorded"
    assert [row["test.loss"] for row in rows] == [1.0, 1.0]


def test_columns_fill_what_rows_lack() -> None:
    table = rows_to_table([{"a": 1}, {"b": 3, "c": "x"}, {"a": 2.5, "c": 4}])
    assert table.to_pydict() == {"a": [1.0, None, 2.5], "b": [None, 3, None], "c": [None, "x", "4"]}


def test_tables_without_traces_have_no_curves(tmp_path: Path) -> None:
    cells = list(SweepBase.of("double-descent", []).cells([{"adapter.rank": 1}], 1))
    (tmp_path / "curves.parquet").write_bytes(b"of an older plan")
    finish_cell(
        tmp_path / "cells" / cells[0].key, cells[0], CellResult("done", None, {"test": {"loss": {"value": None}}})
    )
    (row,) = write_table(tmp_path, cells)
    assert row["test.loss"] is None and not (tmp_path / "curves.parquet").exists()


def test_steps_that_a_cell_did_not_reach_are_marked_by_its_status() -> None:
    from flatshift.experiments.results.cells import unreached_status

    assert [unreached_status(status) for status in ("done", "diverged", "failed")] == [
        "stopped early",
        "diverged",
        "failed",
    ]
