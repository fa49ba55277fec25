"""The committed studies of double descent: cells survive the way to the repository, and every curve is spoken of."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from benchmarks import descent_studies
from benchmarks._cell_table import read_cells, write_cells
from benchmarks._descent_cells import STUDIES, pack, planned, rebuild, table_of, unpack
from benchmarks._harness import Benchmark
from benchmarks.descent_studies import guide, read, rows
from flatshift.experiments.recipe import load_recipe
from flatshift.experiments.results.sweep import STEP
from flatshift.experiments.statistics.peak import FEWEST_POINTS, FEWEST_SEEDS

BY_NAME = {study.name: study for study in STUDIES}


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _cell(out: Path, key: str, trace: list[dict]) -> Path:
    directory = out / "cells" / key
    directory.mkdir(parents=True)
    (directory / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in trace))
    (directory / "result.json").write_text(json.dumps({"cell": key, "status": "done"}))
    return directory


def test_finished_cells_survive_the_way_to_the_repository_and_back(tmp_path: Path) -> None:
    out, table, again = tmp_path / "out", tmp_path / "x.parquet", tmp_path / "again"
    first = _cell(out, "aa", [{"step": 0, "test.error": 0.5}, {"step": 1, "test.error": 0.25}])
    (out / "cells" / "bb").mkdir()  # under way
    _cell(out, "dd", [])  # of another plan
    pack(out, table, {"x": "aa", "y": "bb"})
    assert list(read_cells(table)) == ["x"]
    unpack(table, again, {"x": "cc", "y": "bb"})  # where the file lies elsewhere, keys are others
    mine = again / "cells" / "cc"
    assert _lines(mine / "trace.jsonl") == _lines(first / "trace.jsonl")
    assert json.loads((mine / "result.json").read_text()) == {"cell": "cc", "status": "done"}
    assert not (again / "cells" / "bb").exists()
    (mine / "result.json").write_text("{}")
    unpack(table, again, {"x": "cc"})
    assert (mine / "result.json").read_text() == "{}"
    pack(again, table, {"x": "cc"})
    assert read_cells(table)["x"]["result"] == {}


def test_cells_are_known_by_contents_wherever_the_file_lies(tmp_path: Path) -> None:
    files = [tmp_path / name / "rows.jsonl" for name in ("here", "there")]
    for file in files:
        file.parent.mkdir()
        file.write_text('{"question": "1+1?", "answer": "2"}\n' * 40)
    here, there = (planned(BY_NAME["bump"], file) for file in files)
    assert here.keys() == there.keys() and len(here) == 240 and here != there
    files[1].write_text('{"question": "1+1?", "answer": "3"}\n' * 40)
    assert planned(BY_NAME["bump"], files[1]).keys().isdisjoint(here)


def _fake(out: Path, name: str, values: list, curve, *, seeds: int = 5, lost: tuple = ()) -> None:
    """A sweep whose cells recorded `curve(value, step)` = (train error, train loss, test error, test loss)."""
    axis = "adapter.rank" if name == "rank" else "regularizer"
    out.mkdir()
    grid = {axis: [str(v) for v in values]}
    plan = {"format": 2, "recipe": "r", "grid": grid, "seeds": seeds, "cells": seeds * len(values), "design": "grid"}
    (out / "sweep.json").write_text(json.dumps(plan))
    for place, value in enumerate(values):
        for seed in range(seeds):
            key, gone = f"{value}-{seed}", (value, seed) in lost
            trace = []
            for step in (0, 1, 2, 4, 8):
                found = [y + 0.003 * ((seed * (7 + place) + step) % 5) for y in curve(value, step)]
                names = ("train.error", "train.loss", "test.error", "test.loss")
                trace.append({"stage": "fine-tune", "step": step, **dict(zip(names, found, strict=True))})
            directory = _cell(out, key, trace[:3] if gone else trace)  # updates 4 and 8 were never reached
            last = trace[-1]
            metrics = {
                split: {
                    "loss": {"value": last[f"{split}.loss"]},
                    "accuracy": {"value": 1 - last[f"{split}.error"]},
                }
                for split in ("train", "test")
            }
            about = {"cell": key, "point": {axis: value}, "seed": seed, "seconds": 1.0, "flatshift": "0"}
            end = {"status": "diverged", "reason": "it diverged", "metrics": {}}
            end = end if gone else {"status": "done"}
            text = about | {"reason": None, "metrics": metrics} | end
            (directory / "result.json").write_text(json.dumps(text))


def test_a_peak_along_rank_is_named(tmp_path: Path) -> None:
    peak = {1: 0.5, 2: 0.4, 4: 0.6, 8: 0.3, 16: 0.25}
    fitted = {1: 0.3, 2: 0.2, 4: 0.08, 8: 0.0, 16: 0.0}
    _fake(tmp_path / "rank", "rank", list(peak), lambda rank, step: (fitted[rank], 1 / rank, peak[rank], 1.0))
    found = read(BY_NAME["rank"], tmp_path / "rank")
    (judged,) = found.curves
    assert judged.verdict.kind == "double descent", judged.evidence
    assert not found.missing
    text = "\n".join(guide(found))
    assert "| all | 0.2" in text and "double descent" in text and "1 peak tests at 5 %" in text
    assert "- all: double descent. Test error has a peak" in text and "Arms: " in text


def test_the_training_bump_is_read_from_the_training_loss_and_nothing_is_passed_over(tmp_path: Path) -> None:
    def curve(kind: str, step: int) -> tuple[float, float, float, float]:
        bump = {0: 3.0, 1: 2.5, 2: 6.0 if kind == "plain" else 2.2, 4: 2.0, 8: 1.5}[step]
        return 0.5, bump, 0.9, 9.0

    bench = Benchmark("descent_studies")
    _fake(tmp_path / "whole", "bump", ["plain", "ggpo"], curve)
    found = read(BY_NAME["bump"], tmp_path / "whole")
    plain, ggpo = sorted(found.curves, key=lambda each: each.setting["regularizer"], reverse=True)
    assert plain.verdict.peak.rejected and not ggpo.verdict.peak.rejected
    ((where, base, beside, _),) = found.beside
    assert (where["regularizer"], base) == ("ggpo", "plain")
    assert beside.mean.value == pytest.approx(-3.8 / 4, abs=0.01)  # of the training loss
    text = "\n".join(guide(found))
    assert "1.5" in text and "9.0" not in text
    assert text.count("Training loss has") == 2 and "Evaluated at steps 1, 2, 4, 8" in text
    assert "regularizer = ggpo − plain: It removes the peak at step 2" in text
    rows(bench, found)


def test_seeds_and_settings_that_diverged_are_spoken_of(tmp_path: Path) -> None:
    def curve(kind: str, step: int) -> tuple[float, float, float, float]:
        return 0.5, {0: 3.0, 1: 2.5, 2: 2.2, 4: 2.0, 8: 1.5}[step], 0.9, 9.0

    bench = Benchmark("descent_studies")
    _fake(tmp_path / "one", "bump", ["plain", "ggpo"], curve, seeds=6, lost=(("plain", 1),))
    found = read(BY_NAME["bump"], tmp_path / "one")
    (plain,) = [each for each in found.curves if each.setting["regularizer"] == "plain"]
    assert plain.verdict.peak.diverged == (1,) and plain.verdict.peak.seeds == 5
    assert "1 of 6 seeds diverged at step 4 to 8." in "\n".join(guide(found))
    whole = tuple(("plain", seed) for seed in range(5))
    _fake(tmp_path / "late", "bump", ["plain", "ggpo"], curve, lost=whole)
    text = "\n".join(guide(read(BY_NAME["bump"], tmp_path / "late")))
    assert "5 of 5 seeds diverged at step 4 to 8." in text and "− plain: 0 seeds are whole in both" in text
    _fake(tmp_path / "all", "bump", ["plain", "ggpo"], curve, lost=whole)
    for key, _ in whole:
        for trace in (tmp_path / "all" / "cells").glob(f"{key}-*/trace.jsonl"):
            trace.write_text("")
    found = read(BY_NAME["bump"], tmp_path / "all")
    rows(bench, found)
    assert dict(found.missing)["regularizer = plain"].startswith("5 of 5 seeds diverged: 0 values of step")
    assert [row["what"] for row in bench.rows if "plain" in row["what"]]


def test_below_five_seeds_a_study_says_how_many_it_needs(tmp_path: Path) -> None:
    _fake(tmp_path / "few", "rank", [1, 2, 4, 8], lambda rank, step: (0.5, 1 / rank, 1 / rank, 1.0), seeds=3)
    found = read(BY_NAME["rank"], tmp_path / "few")
    (judged,) = found.curves
    assert judged.verdict.kind == "undecided" and "sweep with --seeds 5" in "\n".join(guide(found))
    rows(bench := Benchmark("descent_studies"), found)
    assert "--seeds 5" in bench.rows[0]["reason"]


def test_rows_and_page_are_of_all_studies(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(descent_studies, "run", lambda *a: None)
    monkeypatch.setattr(descent_studies, "rebuilt", lambda *a: pytest.fail("a part was published"))
    monkeypatch.setattr(sys, "argv", ["x", "--trec", "rows.jsonl", "--studies", "rank"])
    descent_studies.main()
    assert "needs --trec FILE and --gsm8k FILE" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["x", "--trec", "rows.jsonl"])
    with pytest.raises(SystemExit):
        descent_studies.main()
    assert "--studies bump needs --gsm8k FILE" in capsys.readouterr().err


def test_a_study_is_judged_anew_from_committed_cells_without_running_any(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"question": f"{i}+1?", "answer": str(i + 1)}) + "\n" for i in range(40)))
    study, table, cells = BY_NAME["bump"], tmp_path / "bump.parquet", {}
    names = planned(study, file)
    for place, name in enumerate(names):
        steps = (0, 2, 8, 16, 32, 48, 64, 80, 96, 112, 128)
        trace = [{"stage": "fine-tune", "step": s, "train.loss": 5 - s / 99 + 0.01 * (place % 7)} for s in steps]
        metrics = {"test": {"loss": {"value": 1.0}}}
        result = {"status": "done", "reason": None, "metrics": metrics, "seconds": 1.0}
        cells[name] = {"result": result, "trace": trace}
    write_cells(table, cells)
    rebuild(study, file, table, tmp_path / "out")
    found = read(study, tmp_path / "out")
    assert found.data.done == len(names) and not found.missing
    assert len(found.curves) == len(names) // found.data.seeds
    assert len(found.curves[0].curve.values) == 10  # every recorded step is judged
    text = "\n".join(guide(found))
    assert "| setting | lr = 0.001 | lr = 0.003 | lr = 0.01 | lr = 0.03 |" in text and "- regularizer" not in text
    assert text.count("\n| rank = 64, regularizer = ggpo |") == 2, "its verdicts, and its differences to plain"
    monkeypatch.setattr(descent_studies, "rebuilt", lambda *a: nullcontext(tmp_path / "out"))
    monkeypatch.setattr(descent_studies, "sweep", lambda *a, **k: pytest.fail("cells were run"))
    asked = ["x", "--gsm8k", str(file), "--report", str(tmp_path / "pages")]
    monkeypatch.setattr(sys, "argv", asked)
    descent_studies.main()
    (page,) = (tmp_path / "pages").iterdir()
    assert page.name == "bump.html" and "rank = 64" in page.read_text(encoding="utf-8")


def test_every_study_has_a_shipped_recipe_with_its_axis_and_seeds_for_a_test() -> None:
    for study in STUDIES:
        recipe = load_recipe(study.recipe, []).recipe
        assert recipe.sweep is not None and recipe.sweep.seeds >= FEWEST_SEEDS
        assert study.axis == STEP or len(recipe.sweep.grid[study.axis]) >= FEWEST_POINTS
        assert recipe.record is not None
        assert "plain" in recipe.sweep.grid["regularizer"], "every arm is set beside it"


def test_committed_cells_are_whole() -> None:
    cells = [cell for study in STUDIES for cell in read_cells(table_of(study)).values()]
    assert len(cells) == 648
    for cell in cells:
        assert cell["result"]["status"] != "done" or cell["trace"][-1]["step"] > 0
