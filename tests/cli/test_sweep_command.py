"""`flatshift sweep`: its directory over several calls, a clear sentence per mistake, bisection, a real tiny sweep."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

import flatshift.experiments.data.splits
import flatshift.experiments.report.page
import flatshift.experiments.studies.cell
import flatshift.experiments.workflows.train
from flatshift.cli import run
from flatshift.experiments.data.splits import prepare_data
from flatshift.experiments.recipe import auto, from_override, load_recipe
from flatshift.experiments.report.chapters.sweep import sweep_finding
from flatshift.experiments.report.chapters.sweep_verdicts import emc_table
from flatshift.experiments.results.analysis import SweepAnalysis
from flatshift.experiments.results.sweep import read_sweep
from flatshift.experiments.run.console import Console
from flatshift.experiments.workflows.context import run_context
from flatshift.experiments.workflows.train import execute_parts
from flatshift.finetune.lock import exclusive_lock
from flatshift.finetune.run_directory import RECIPE, RunDirectory
from flatshift.finetune.train.divergence import Diverged
from tests.support.commands import flags

Sweep = Callable[..., int]


@pytest.fixture
def cheap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """`flatshift sweep double-descent --out sweep …` whose cells cost nothing.

    A cell of rank r fits 40·r rows; of n > 40·r rows it gets a share 1 − 40·r/n wrong. Rank 7 fails,
    rank 9 diverges.
    """

    def fitted(context: Any, prepared: None) -> dict[str, Any]:
        rank, rows = context.recipe.adapter.rank, context.recipe.data.train.limit
        if rank == 7:
            raise ValueError("rank 7 is unlucky")
        if rank == 9:
            raise Diverged("the loss is not a finite number")
        error = max(0.0, 1 - 40 * rank / rows)
        return {"train": {"error": {"value": error}}, "test": {"accuracy": {"value": 1 - error}}}

    monkeypatch.setattr(flatshift.experiments.workflows.train, "execute_parts", fitted)
    monkeypatch.setattr(
        flatshift.experiments.data.splits, "prepare_data", lambda recipe: SimpleNamespace(skipped=(), checks=())
    )
    monkeypatch.setattr(flatshift.experiments.studies.cell.gc, "collect", lambda: 0)  # there are no models to collect
    monkeypatch.setattr(flatshift.experiments.report.page, "build_report", lambda runs, out, plots: out)
    out = tmp_path / "sweep"
    fixed = ["--out", str(out), "--devices", "cpu", "--train.precision", "fp32"]
    return lambda *words: run(["sweep", "double-descent", *fixed, *words])


def started(out: Path) -> Counter[str]:
    lines = (out / "log.txt").read_text(encoding="utf-8").splitlines()
    return Counter(line.split(" start ")[1].split(" ")[0] for line in lines if " start " in line)


def table(out: Path) -> dict[str, list[Any]]:
    return pq.read_table(out / "cells.parquet").to_pydict()


# ------------------------------------------------------------------------------------------- several calls


def test_grid_may_change_and_no_cell_runs_twice(
    cheap: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sweep"
    assert cheap("--grid", "adapter.rank=1,4", "--seeds", "2") == 0
    assert table(out)["adapter.rank"] == [1, 1, 4, 4]
    assert cheap("--grid", "adapter.rank=4,16", "--seeds", "2") == 0
    assert "2 finished cells" in (said := capsys.readouterr().err) and "not of this plan" in said
    assert table(out)["adapter.rank"] == [4, 4, 16, 16], "the tables hold what is asked for now"
    assert cheap("--grid", "adapter.rank=1,4,16", "--seeds", "2") == 0
    assert table(out)["adapter.rank"] == [1, 1, 4, 4, 16, 16]
    assert table(out)["train.error"][:2] == [1 - 40 / 300] * 2
    counts = started(out)
    assert len(counts) == 6 and set(counts.values()) == {1}
    marker = json.loads((out / "sweep.json").read_text(encoding="utf-8"))
    assert marker["format"] == 2 and marker["grid"] == {"adapter.rank": ["1", "4", "16"]}
    assert (marker["design"], marker["seeds"], marker["cells"]) == ("grid", 2, 6)
    result = json.loads(next(out.glob("cells/*/result.json")).read_text(encoding="utf-8"))
    assert len(result["code"]) == 12 and result["flatshift"] == marker["flatshift"]


def test_recipe_says_design_and_flags_win(cheap: Sweep, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    words = ["--sweep.grid", "{adapter.rank: [16..256:log], optimizer.lr: [1e-4..1e-2:log]}", "--sweep.seeds", "1"]
    assert cheap(*words, "--sweep.design", "random", "--sweep.points", "5") == 0
    first = table(out)["cell"]
    assert len(first) == 5
    assert cheap(*words, "--sweep.design", "random", "--points", "8") == 0
    assert table(out)["cell"][:5] == first and len(started(out)) == 8
    recipe = tmp_path / "own.yaml"
    block = "{grid: {adapter.rank: [16, 32, 64]}, design: random, points: 2, seeds: 1}"
    recipe.write_text(f"extends: double-descent\nsweep: {block}\n", encoding="utf-8")
    own = ["sweep", str(recipe), "--devices", "cpu", "--train.precision", "fp32", "--out", str(tmp_path / "own")]
    assert run(own) == 0 and len(table(tmp_path / "own")["cell"]) == 2
    assert run([*own, "--design", "grid"]) == 0, "its points are of its own design"
    assert table(tmp_path / "own")["adapter.rank"] == [16, 32, 64]
    assert run([*own, "--grid", "adapter.rank=2"]) == 0
    assert table(tmp_path / "own")["adapter.rank"] == [2]


def test_in_parallel_one_axis_may_stand_still_while_another_moves(cheap: Sweep, tmp_path: Path, capsys) -> None:
    words = ["--design", "paired", "--seeds", "1", "--grid", "adapter.rank=1,2,4"]
    assert cheap(*words, "data.train.limit=100,100,200") == 0
    rows = table(tmp_path / "sweep")
    assert (rows["adapter.rank"], rows["data.train.limit"]) == ([1, 2, 4], [100, 100, 200])
    assert cheap("--design", "paired", "--grid", "adapter.rank=1,1", "data.train.limit=100,100") == 2
    assert "adapter.rank=1 data.train.limit=100 are the same run" in capsys.readouterr().err


def test_an_axis_over_a_whole_block_is_shown_as_written(cheap: Sweep, tmp_path: Path) -> None:
    assert cheap("--grid", "record={per_doubling: 2},null", "--seeds", "1") == 0
    assert table(tmp_path / "sweep")["record"] == ["{per_doubling: 2}", None]
    results = [json.loads(file.read_text(encoding="utf-8")) for file in tmp_path.glob("sweep/cells/*/result.json")]
    assert {result["point"]["record"] for result in results} == {"{per_doubling: 2}", None}
    assert read_sweep(tmp_path / "sweep").levels("record") == [None, "{per_doubling: 2}"]  # type: ignore[union-attr]


def test_failure_is_a_result_and_the_exit_code(
    cheap: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cheap("--grid", "adapter.rank=7,8", "--seeds", "1") == 1
    assert table(tmp_path / "sweep")["reason"] == ["rank 7 is unlucky", None]
    assert "rank 7 is unlucky" in capsys.readouterr().err
    assert cheap("--grid", "adapter.rank=7,8", "--seeds", "1") == 1
    assert set(started(tmp_path / "sweep").values()) == {1}


def test_what_failed_is_tried_again_when_asked_but_not_what_diverged(
    cheap: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = ["--grid", "adapter.rank=7,8,9", "--seeds", "1"]
    assert cheap(*grid) == 1
    assert "--rerun-failed tries again those that did not diverge" in (said := capsys.readouterr().err)
    assert "sweep: 3/3 cells, 1 failed, 1 diverged" in said
    assert cheap(*grid, "--rerun-failed") == 1
    counts = started(tmp_path / "sweep")
    rows = table(tmp_path / "sweep")
    assert [counts[key] for key in rows["cell"]] == [2, 1, 1] and rows["status"] == ["failed", "done", "diverged"]


def test_a_sweep_that_records_nothing_says_how_to(cheap: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    assert cheap("--grid", "adapter.rank=1,2", "--seeds", "1") == 0
    assert "--record.steps" not in capsys.readouterr().err
    assert cheap("--grid", "adapter.rank=1,2", "--seeds", "1", "--record", "null") == 0
    assert "cells record nothing along the steps; --record.steps log" in capsys.readouterr().err
    for words in (["--train.compile", "true"], ["--task.kind", "regress"], ["--grid", "record.per_doubling=1,2"]):
        cheap("--grid", "adapter.rank=1,2", "--seeds", "1", "--record", "null", *words)
        assert "cells record nothing" not in capsys.readouterr().err, "what is advised would be refused, or is set"


def test_other_code_is_said_and_run_anew_when_asked(
    cheap: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sweep"
    assert cheap("--grid", "adapter.rank=1,2", "--seeds", "1") == 0
    path = next(out.glob("cells/*/result.json"))
    old = {key: value for key, value in json.loads(path.read_text(encoding="utf-8")).items() if key != "seal"}
    path.write_text(json.dumps(old | {"code": "an old one"}), encoding="utf-8")
    (out / "done.json").unlink()  # which would speak of a changed file
    capsys.readouterr()
    assert cheap("--grid", "adapter.rank=1,2", "--seeds", "1") == 0
    said = capsys.readouterr().err
    assert "1 finished cells were made by other code" in said and "an old one" in said and "--rerun-stale" in said
    assert max(started(out).values()) == 1
    assert cheap("--grid", "adapter.rank=1,2", "--seeds", "1", "--rerun-stale") == 0
    assert started(out)[path.parent.name] == 2 and sum(started(out).values()) == 3


# ------------------------------------------------------------------------------------------- mistakes


def test_parts_are_merged_into_the_whole_sweep(
    cheap: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = ["--grid", "adapter.rank=1,4,9", "--seeds", "2"]
    assert cheap(*plan) == 1  # rank 9 diverges
    whole = table(tmp_path / "sweep")
    parts = [tmp_path / f"part-{i}" for i in (1, 2, 3, 4)]
    for i, part in enumerate(parts, 1):
        cheap(*plan, "--part", f"{i}/4", "--out", str(part))
    keys = [set(table(part)["cell"]) for part in parts]
    assert set.union(*keys) == set(whole["cell"]) and sum(map(len, keys)) == 6, "none twice, none left out"

    together = tmp_path / "together"
    capsys.readouterr()
    assert cheap(*plan, "--merge", *map(str, parts[:3]), "--out", str(together)) == 2
    assert "1 of 6 cells are in none" in (said := capsys.readouterr().err) and "the same paths of data" in said
    assert cheap(*plan, "--merge", str(parts[3]), "--out", str(together)) == 1
    found = table(together)
    for column in ("cell", "status", "seed", "train.error"):
        assert found[column] == whole[column]
    assert not (together / "log.txt").exists(), "nothing ran"

    damaged = parts[0] / "cells" / next(iter(keys[0])) / "result.json"
    damaged.write_text(damaged.read_text(encoding="utf-8").replace('"seed"', '"sead"'), encoding="utf-8")
    assert cheap(*plan, "--merge", *map(str, parts), "--out", str(tmp_path / "again")) == 2
    assert "result.json" in capsys.readouterr().err


def test_parts_keep_the_precision_of_their_machines(
    cheap: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def on_a_machine_of(precision: str) -> None:
        choice = {"precision": precision, "why": "measured", "note": None}
        monkeypatch.setattr(auto, "_choose_run_precision", lambda recipe: choice)

    plan = ["--grid", "adapter.rank=1,2,4", "--seeds", "1", "--train.precision", "auto"]
    one, two, other, whole = (tmp_path / name for name in ("one", "two", "other", "whole"))
    on_a_machine_of("bf16")
    assert cheap(*plan, "--part", "1/2", "--out", str(one)) == cheap(*plan, "--part", "2/2", "--out", str(two)) == 0
    on_a_machine_of("fp32")
    assert cheap(*plan, "--part", "2/2", "--out", str(other)) == 0
    capsys.readouterr()
    assert cheap(*plan, "--merge", str(one), str(other), "--out", str(whole)) == 2
    assert f"train.precision was resolved to bf16 in {one} and to fp32 in {other}" in capsys.readouterr().err
    assert not whole.exists()
    assert cheap(*plan, "--merge", str(other), "--out", str(whole)) == 2, "one cell of three"
    assert cheap(*plan, "--merge", str(one), str(two), "--out", str(whole)) == 0
    assert table(whole)["adapter.rank"] == [1, 2, 4]
    assert load_recipe(str(whole / RECIPE)).recipe.train.precision == "bf16"
    said = capsys.readouterr().err
    (more,) = [line for line in said.splitlines() if line.startswith("  flatshift sweep double-descent")]
    assert "--merge" not in more and str(one) not in more and more.endswith(f" --out {whole} --seeds 5")
    axis = ["--grid", "train.precision=fp32,bf16", *plan[2:]]
    assert cheap(*axis, "--part", "1/2", "--out", str(tmp_path / "a")) == 0
    on_a_machine_of("bf16")
    assert cheap(*axis, "--part", "2/2", "--out", str(tmp_path / "b")) == 0
    assert cheap(*axis, "--merge", *(str(tmp_path / name) for name in "ab"), "--out", str(tmp_path / "c")) == 0


def test_a_cell_that_failed_is_replaced_by_a_later_part(
    cheap: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, part, whole = ["--grid", "adapter.rank=1,7", "--seeds", "1"], tmp_path / "part", tmp_path / "whole"
    assert cheap(*plan, "--part", "1/1", "--out", str(part)) == 1
    assert cheap(*plan, "--merge", str(part), "--out", str(whole)) == 1
    assert sorted(table(whole)["status"]) == ["done", "failed"]
    shutil.copytree(part, tmp_path / "older")
    monkeypatch.setattr(flatshift.experiments.workflows.train, "execute_parts", lambda *_: {"test": {}, "train": {}})
    assert cheap(*plan, "--part", "1/1", "--rerun-failed", "--out", str(part)) == 0
    assert cheap(*plan, "--merge", str(tmp_path / "older"), str(part), "--out", str(whole)) == 0
    assert table(whole)["status"] == ["done", "done"]


def test_a_setting_of_which_a_seed_diverged_is_not_the_lowest(
    cheap: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lucky(context: Any, prepared: None) -> dict[str, Any]:
        if context.recipe.adapter.rank == 9 and context.recipe.train.seed:
            raise Diverged("the loss is not a finite number")
        error = 0.1 if context.recipe.adapter.rank == 9 else 0.3 + 0.01 * context.recipe.train.seed
        return {"train": {"error": {"value": error}}, "test": {"accuracy": {"value": 1 - error}}}

    monkeypatch.setattr(flatshift.experiments.workflows.train, "execute_parts", lucky)
    assert cheap("--grid", "adapter.rank=4,9", "--seeds", "3", "--train.seed", "0", "--json") == 1
    best = json.loads(capsys.readouterr().out)["best"]
    assert best["setting"] == {"adapter.rank": 4} and best["n"] == 3


def test_directory_of_something_else(cheap: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sweep"
    grid = ["--grid", "adapter.rank=1", "--seeds", "1"]

    def refused(words: str) -> None:
        assert cheap(*grid) == 2
        said = capsys.readouterr().err.strip()
        assert words in said and len(said.splitlines()) == 1 and said.startswith("flatshift: error: ")

    out.write_text("a file", encoding="utf-8")
    refused("is a file")
    out.unlink()
    out.mkdir()
    (out / "notes.txt").write_text("mine", encoding="utf-8")
    refused("is not a sweep directory")
    (out / "sweep.json").write_text('{"format": 3, "grid": {}}', encoding="utf-8")
    refused("format 3")
    (out / "sweep.json").write_text("{", encoding="utf-8")
    refused("not valid JSON")
    assert not (out / "cells").exists() and not (out / "log.txt").exists()
    with exclusive_lock(out):
        (out / "sweep.json").write_text('{"format": 2, "grid": {}}', encoding="utf-8")
        refused(f"(process {os.getpid()})")
    assert cheap(*grid) == 0, "a directory without a cell is gone on with"
    assert json.loads((out / "sweep.json").read_text(encoding="utf-8"))["format"] == 2
    (out / "sweep.json").unlink()
    assert cheap(*grid) == 0, "cells are kept without the marker, which was broken and is deleted"
    assert max(started(out).values()) == 1
    (out / "sweep.json").rename(out / "study.recipe.yaml")
    assert (out / ".workers.lock").exists() and capsys.readouterr()
    refused("is not a sweep directory")  # a comparison has cells and workers too


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--grid", "adapter.rnk=1"], "'adapter.rank'"),
        (["--grid", "adapter.rank=1,x"], "whole number"),
        (["--grid", "regularizer.sigma=0,0.1"], "regularizer is plain, which has no sigma; set one that has (ggpo"),
        (["--grid", "regularizer=plain,ggpo", "regularizer.sigma=0,0.1"], "unknown key 'regularizer.sigma'"),
        (["--grid", "optimizer.clip=1,.inf"], "--grid optimizer.clip=.inf: an axis takes finite numbers"),
        (["--sweep", "null"], "give --grid"),
        (["--grid"], "recipe's own `sweep.grid`"),
        (["--grid", "optimizer.lr=1..2..3", "--design", "random", "--points", "2"], "optimizer.lr=lo..hi"),
        (["--data.train.files", "[]", "--grid", "adapter.rank=1"], "adapter.rank=1: data.train.files is empty"),
        (["--seeds", "0"], "--seeds"),
        (["--jobs", "0"], "--jobs"),
        (["--seeds", "1000000000"], "--max-cells"),
        (["--design", "random", "--points", "1000000000"], "--max-cells"),
        (["--max-cells", "1"], "--max-cells"),
        (["--seeds", "2", "--train.seed", "9223372036854775807"], "--seeds 2: from train.seed"),
        (["--devices", "tpu"], "--devices"),
        (["--design", "paired", "--grid", "adapter.rank=1,2", "train.steps=1"], "adapter.rank 2, train.steps 1"),
        (["--points", "3"], "--design random"),
        (["--part", "0/4"], "3/8"),
        (["--part", "7/9", "--grid", "adapter.rank=1", "--seeds", "2"], "2 cells, so this part has none"),
        (["--part", "1/2", "--bisect", "data.train.limit"], "takes no --part"),
        (["--merge", "nowhere"], "nowhere is not a sweep directory"),
        (["--epsilon", "0.2"], "--bisect"),
        (["--bisect", "adapter.rank"], "data.train.limit"),
        (["--bisect", "data.train.limit", "--grid", "data.train.limit=5"], "axis of the grid"),
        (["--sweep.grid", "{adapter.rank: [1]}", "--grid", "adapter.rank=2"], "--sweep.grid has no effect beside --gr"),
        (["--sweep.design", "random", "--grid", "adapter.rank=2"], "beside --grid; leave it out, or write --design"),
        (["--sweep.points", "3", "--grid", "adapter.rank=2"], "beside --grid; leave it out, or write --points"),
        (["--sweep.points", "3", "--design", "grid"], "--sweep.points has no effect beside --design"),
        (["--record", "null", "--grid", "mesh.dp=1,2"], "--grid mesh.dp=2: mesh: a cell of a sweep or study trains"),
        (["--record", "null", "--mesh.auto", "true", "--grid", "adapter.rank=1"], "leave every axis at 1 and auto off"),
    ],
)
def test_mistakes_cost_nothing(
    cheap: Sweep, tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cheap(*words) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and len(error.splitlines()) == 1
    assert not (tmp_path / "sweep").exists()


def test_full_disk_keeps_what_was_finished(
    cheap: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sweep"
    whole = flatshift.experiments.studies.cell.write_sealed
    calls = 0

    def write_sealed(path: Path, *args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        whole(path, *args, **kwargs)

    monkeypatch.setattr(flatshift.experiments.studies.cell, "write_sealed", write_sealed)
    grid = ["--grid", "adapter.rank=1,2,3", "--seeds", "1"]
    assert cheap(*grid) == 3
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("flatshift: ")]
    assert len(said) == 1 and "the disk is full" in said[0]
    assert len(list(out.glob("cells/*/result.json"))) == 1 and not list(out.rglob(".*.tmp"))
    assert table(out)["adapter.rank"] == [1], "the tables hold what there is"
    assert cheap(*grid) == 0
    assert table(out)["adapter.rank"] == [1, 2, 3] and sorted(started(out).values()) == [1, 1, 2]


# ------------------------------------------------------------------------------------------- bisection


def test_bisection_finds_how_many_rows_each_point_fits(cheap: Sweep, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    words = ["--grid", "adapter.rank=1,2,9,64", "--seeds", "2", "--bisect", "data.train.limit=10..1000"]
    assert cheap(*words, "--epsilon", "0.2") == 1  # rank 9 diverges everywhere
    found = json.loads((out / "emc.json").read_text(encoding="utf-8"))
    assert (found["key"], found["epsilon"], found["seeds"]) == ("data.train.limit", 0.2, 2)
    one, two, unlucky, all_rows = found["points"]
    # 1 − 40 r / n ≤ 0.2 up to n = 50 r; the search stops within a tenth
    assert one["point"] == {"adapter.rank": 1} and one["emc"] == pytest.approx(50, rel=0.1)
    assert two["emc"] == pytest.approx(100, rel=0.1)
    assert (unlucky["emc"], unlucky["side"]) == (None, "before") and unlucky["tried"][0]["train_error"] == [None, None]
    assert (all_rows["emc"], all_rows["side"]) == (None, "beyond")
    for entry in one["tried"]:
        assert entry["train_error"] == [max(0.0, 1 - 40 / entry["rows"])] * 2
        assert all((out / "cells" / key / "result.json").is_file() for key in entry["cells"])
    rows = table(out)
    assert {emc for emc, rank in zip(rows["emc"], rows["adapter.rank"], strict=True) if rank == 1} == {one["emc"]}
    tried = sorted({entry["rows"] for point in found["points"] for entry in point["tried"]})
    marker = json.loads((out / "sweep.json").read_text(encoding="utf-8"))
    assert marker["grid"]["data.train.limit"] == [str(n) for n in tried] and marker["cells"] == len(rows["cell"])
    counts = started(out)
    assert set(counts.values()) == {1}
    assert cheap(*words, "--epsilon", "0.2") == 1
    assert started(out) == counts and json.loads((out / "emc.json").read_text(encoding="utf-8")) == found


@pytest.mark.parametrize("own", ["classes", "numbers"])
def test_of_a_squared_loss_the_unexplained_share_says_which_rows_are_fitted(
    cheap: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    """As it does for the threshold: its classes are right long before their labels are fitted; numbers have none."""

    def fitted(context: Any, prepared: None) -> dict[str, Any]:
        left = max(0.0, 1 - 40 * context.recipe.adapter.rank / context.recipe.data.train.limit)
        of_numbers = {"rmse": {"value": 3 * left**0.5}, "mean_floor": {"value": 3.0}}
        train = of_numbers if own == "numbers" else {"error": {"value": 0.0}, "unexplained": {"value": left}}
        return {"train": train, "test": {"loss": {"value": 1.0}}}

    monkeypatch.setattr(flatshift.experiments.workflows.train, "execute_parts", fitted)
    assert cheap("--grid", "adapter.rank=1", "--seeds", "2", "--bisect", "data.train.limit=10..1000") == 0
    (point,) = json.loads((tmp_path / "sweep" / "emc.json").read_text(encoding="utf-8"))["points"]
    assert point["emc"] == pytest.approx(40 / 0.9, rel=0.1)
    assert cheap("--grid", "data.train.limit=10,40,80,400", "adapter.rank=1", "--seeds", "2") == 0
    data = read_sweep(tmp_path / "sweep")
    assert data is not None
    found = emc_table(SweepAnalysis(data).directions[0])
    assert found is not None and "unexplained share of the training labels of 0.1" in found.caption
    assert int(found.rows[0][1].split()[0]) in range(40, 48)


def test_bisection_at_a_kind_with_settings_of_its_own(cheap: Sweep, tmp_path: Path) -> None:
    grid = "regularizer=plain,{kind: ggpo, sigma: 0.15}"
    assert cheap("--grid", grid, "--seeds", "1", "--bisect", "data.train.limit=10..1000") == 0
    found = json.loads((tmp_path / "sweep" / "emc.json").read_text(encoding="utf-8"))["points"]
    assert [point["point"] for point in found] == [{"regularizer": "plain"}, {"regularizer": "ggpo sigma=0.15"}]
    assert found[0]["emc"] == found[1]["emc"]


def test_bisection_ends_at_a_cell_that_fails_otherwise(
    cheap: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cheap("--grid", "adapter.rank=7", "--seeds", "1", "--bisect", "data.train.limit=10..100") == 2
    assert "rank 7 is unlucky" in (said := capsys.readouterr().err) and "--rerun-failed tries it again" in said
    marker = json.loads((tmp_path / "sweep" / "sweep.json").read_text(encoding="utf-8"))
    assert marker["keys"] == list(started(tmp_path / "sweep")) and "cells" not in marker  # a page shows these alone


# ------------------------------------------------------------------------------------------- for real


def test_real_cells_of_two_workers_equal_single_runs(tmp_path: Path) -> None:
    settings = {
        "train.batch_size": 4,
        "train.max_length": 32,
        "train.max_cut": 1,
        "train.threads": 1,
        "train.precision": "fp32",
        "data.train.limit": 16,
        "data.test.limit": 12,
        "eval.bootstrap": 20,
    }
    out = tmp_path / "sweep"
    words = [*flags(settings), "--design", "paired", "--seeds", "1", "--jobs", "2", "--record.per_doubling", "1"]
    grid = ["--grid", "adapter.rank=1,2", "train.steps=2,3"]
    assert run(["sweep", "double-descent", "--out", str(out), *words, *grid]) == 0
    rows = table(out)
    assert rows["adapter.rank"] == [1, 2] and rows["train.steps"] == [2, 3] and rows["status"] == ["done"] * 2
    curves = pq.read_table(out / "curves.parquet").to_pydict()
    assert curves["step"] == [0, 1, 2, 0, 1, 2, 3] and curves["adapter.rank"] == [1] * 3 + [2] * 4
    assert all(0 <= error <= 1 for error in curves["test.error"])
    assert (out / "report.html").is_file() and (out / "points.csv").is_file()
    laid = [from_override(key, value) for key, value in {**settings, "adapter.rank": 2, "train.steps": 3}.items()]
    recipe = load_recipe("double-descent", laid).recipe
    alone = RunDirectory.create(tmp_path / "alone")
    with run_context(recipe, alone, Console(quiet=True), cell=True) as context:
        judged = execute_parts(context, prepare_data(recipe))
    for split in ("train", "test"):
        assert rows[f"{split}.loss"][1] == judged[split]["loss"]["value"], "recording and sweeping change no bit"
    kept = load_recipe(str(out / "cells" / rows["cell"][1] / "recipe.resolved.yaml")).recipe
    assert (kept.adapter.rank, kept.train.steps, kept.train.seed) == (2, 3, 0)


def test_ties_at_the_floor_and_what_a_verdict_lacks_are_said(cheap: Sweep, tmp_path: Path, capsys) -> None:
    """Ranks 16 and 32 fit every row: neither is called the lowest, and two seeds are too few for a verdict."""
    words = ("--grid", "adapter.rank=4,16,32", "--seeds", "2", "--data.train.limit", "400")
    assert cheap(*words) == 0
    err = capsys.readouterr().err
    (line,) = [line for line in err.splitlines() if line.startswith("lowest test error")]
    assert "rank = 16 ties with rank = 32" in line
    reason = "verdict along rank r needs 5 seeds, but rank = 16 is lower than rank = 4 by 0.60, in each of 2 seeds"
    assert f"A {reason}." in err
    assert cheap(*words, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["best"]["setting"] == {"adapter.rank": 16} and summary["ties"] == [{"adapter.rank": 32}]
    assert summary["missing"] == [f"a {reason}"]
    data = read_sweep(tmp_path / "sweep")
    assert data is not None
    finding = sweep_finding(data, SweepAnalysis(data))
    assert finding == f"Mean test error: rank = 16 ties with rank = 32, at 0.00; a {reason}."


def test_a_sweep_with_one_lowest_value_names_it_alone(cheap: Sweep, capsys) -> None:
    words = ("--grid", "adapter.rank=2,4,8", "--seeds", "5", "--data.train.limit", "400", "--json")
    assert cheap(*words) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["best"]["setting"] == {"adapter.rank": 8} and summary["ties"] == []
