"""Comparisons: trials are equal, statistics are the textbook's, and a study gives what its cells say."""

from __future__ import annotations

import dataclasses
import json
import lzma
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from flatshift.experiments.recipe import from_override, load_recipe
from flatshift.experiments.recipe.auto import resolve_auto
from flatshift.experiments.recipe.schema import Comparison, StudyMethod, StudyTask
from flatshift.experiments.report.chapters.comparison import page
from flatshift.experiments.statistics.intervals import detectable_effect, holm_adjust, paired_p
from flatshift.experiments.studies import cell
from flatshift.experiments.studies.compare.analysis import compute_endpoint, describe_protocol
from flatshift.experiments.studies.compare.comparison_plan import ComparisonPlan, ComparisonProbe
from flatshift.experiments.studies.compare.run import ComparisonResults, compare
from flatshift.experiments.studies.compare.tuning import (
    FAILED,
    TrialScore,
    TrialSetting,
    best_trial,
    first_trials,
    is_on_edge,
    mean_score,
    next_trial,
    select_finalists,
)
from flatshift.experiments.studies.study import locate_file
from flatshift.experiments.workflows.export import require_finished
from flatshift.finetune.errors import Interrupted, UserError
from tests.support.comparison_study import make_study

# --------------------------------------------------------------------------------------------- trials


def scored(**by_rate: float) -> dict[TrialSetting, TrialScore]:
    return {TrialSetting(float(rate)): TrialScore(value, 0.0) for rate, value in by_rate.items()}


def test_a_further_trial_goes_beyond_an_edge_by_the_grids_own_step() -> None:
    assert next_trial(scored(**{"1e-3": 0.5, "2e-3": 0.6, "4e-3": 0.7})).lr == 8e-3
    assert next_trial(scored(**{"1e-3": 0.7, "2e-3": 0.6, "4e-3": 0.5})).lr == 5e-4
    assert is_on_edge(scored(**{"1e-3": 0.7, "2e-3": 0.6}), TrialSetting(1e-3))


def test_a_further_trial_halves_the_gap_to_the_better_neighbour() -> None:
    inside = scored(**{"1e-3": 0.5, "2e-3": 0.9, "8e-3": 0.6})
    assert next_trial(inside).lr == pytest.approx(math.sqrt(2e-3 * 8e-3), rel=1e-2)
    assert not is_on_edge(inside, TrialSetting(2e-3))


def test_further_trials_never_repeat_one() -> None:
    def accuracy(rate: float) -> float:
        return -abs(math.log(rate / 3.3e-2))  # far beyond the grid's upper edge

    scores = scored(**{str(rate): accuracy(rate) for rate in (1e-3, 2e-3)})
    for _ in range(30):
        new = next_trial(scores)
        assert new not in scores
        scores[new] = TrialScore(accuracy(new.lr), 0.0)
    best = best_trial(scores)
    assert best is not None and abs(math.log(best.lr / 3.3e-2)) < 0.1 and not is_on_edge(scores, best)
    assert all(setting.lr == float(f"{setting.lr:.3g}") for setting in [*scores][:8]), "three digits suffice at first"


def test_ties_are_settled_by_loss_and_diverged_trials_lose() -> None:
    low, mid, high = TrialSetting(1e-3), TrialSetting(2e-3), TrialSetting(4e-3)
    assert best_trial({low: TrialScore(0.5, 0.9), mid: TrialScore(0.5, 0.8), high: FAILED}) == mid
    assert best_trial({low: FAILED, mid: FAILED}) is None
    assert next_trial({low: FAILED, mid: FAILED}).lr == 5e-4


def test_the_best_few_are_judged_by_their_mean_and_one_divergence_loses() -> None:
    a, b, c, d = (TrialSetting(rate) for rate in (1e-3, 2e-3, 4e-3, 8e-3))
    scores = {a: TrialScore(0.5, 1.0), b: TrialScore(0.7, 1.0), c: TrialScore(0.7, 0.9), d: FAILED}
    assert select_finalists(scores, 2) == [c, b] and select_finalists(scores, 9) == [c, b, a]
    assert mean_score([TrialScore(0.5, 1.0), TrialScore(0.25, 3.0)]) == TrialScore(0.375, 2.0)
    assert mean_score([TrialScore(0.9, 0.1), FAILED]) == FAILED
    assert (
        best_trial({c: mean_score([scores[c], TrialScore(0.2, 2.0)]), b: mean_score([scores[b], TrialScore(0.6, 1.0)])})
        == b
    )


def test_only_rates_with_the_best_knobs_count_for_the_edge() -> None:
    a, b = (("regularizer.sigma", 0.05),), (("regularizer.sigma", 0.2),)
    scores = {TrialSetting(r, a): TrialScore(0.5, 0.0) for r in (1e-3, 8e-3)} | {
        TrialSetting(1e-3, b): TrialScore(0.4, 0.0),
        TrialSetting(2e-3, b): TrialScore(0.9, 0.0),
    }
    assert next_trial(scores) == TrialSetting(4e-3, b)


def study(**changes: object) -> Comparison:
    methods = {
        "plain": StudyMethod(),
        "ggpo": StudyMethod(lr=(1e-3, 3e-3), knobs={"regularizer.sigma": (0.05, 0.1)}, confirmatory=True),
    }
    settings = {"tasks": {"a": StudyTask(file="a.jsonl")}, "methods": methods, **changes}
    return Comparison(**settings)  # type: ignore[arg-type]


def test_every_method_has_as_many_first_trials() -> None:
    made = study()
    assert [len(set(first_trials(made, m))) for m in made.methods.values()] == [4, 4]
    unequal = {**made.methods, "sam": StudyMethod(knobs={"regularizer.rho": (0.05, 0.1)})}
    with pytest.raises(ValueError, match="sam would have 8 first trials and plain has 4"):
        study(methods=unequal)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"baseline": "lora"}, "baseline is 'lora'"),
        ({"lr": (1e-3,)}, "at least two rising"),
        ({"lr": (2e-3, 1e-3)}, "at least two rising"),
        ({"tuning_seeds": (1_000_003, 5)}, "5 is also the seed of a final run"),
        ({"tuning_seeds": (1_000_003, 1_000_003)}, "all different"),
        ({"finalists": 7}, "finalists is 7, but a method has 6 trials"),
        ({"controls": {"none": "ggpo"}}, "controls names 'none'"),
        ({"methods": {"plain": StudyMethod(), "flat-x": StudyMethod(), "flat_x": StudyMethod()}}, "twice"),
        ({"methods": {"plain": StudyMethod(), "x": StudyMethod(tasks=("b",))}}, "none of a"),
    ],
)
def test_a_study_that_cannot_be_is_refused(changes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        study(**changes)


# --------------------------------------------------------------------------------------------- statistics


def test_paired_p_is_scipys() -> None:
    from scipy.stats import ttest_rel

    rng = np.random.default_rng(0)
    a, b = rng.normal(size=10), rng.normal(size=10)
    assert paired_p(list(a - b)) == pytest.approx(ttest_rel(a, b).pvalue, rel=1e-10)
    assert paired_p([0.0, 0.0]) == 1.0 and paired_p([0.5]) is None
    assert paired_p([0.5, 0.5]) is None and paired_p([0.1 + 0.2, 0.3]) is None  # no spread but rounding: no test


def test_holm_is_the_step_down_procedure() -> None:
    p = {"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}
    assert holm_adjust(p) == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
    rng = np.random.default_rng(1)
    for _ in range(50):  # rejecting adjusted p ≤ α is rejecting step by step, from the smallest, at α/(m − i)
        values = {str(i): float(v) for i, v in enumerate(rng.uniform(0, 0.1, size=6))}
        rejected = set()
        for i, (name, value) in enumerate(sorted(values.items(), key=lambda item: item[1])):
            if value > 0.05 / (6 - i):
                break
            rejected.add(name)
        assert rejected == {name for name, value in holm_adjust(values).items() if value <= 0.05}


def test_the_detectable_effect_is_the_protocols() -> None:
    assert detectable_effect([0, 1, 0, 1, 0.5]) == pytest.approx(1.66 * np.std([0, 1, 0, 1, 0.5], ddof=1), rel=5e-3)
    ten = list(np.random.default_rng(2).normal(size=10))
    assert detectable_effect(ten) == pytest.approx(0.99 * np.std(ten, ddof=1), rel=5e-3)


# --------------------------------------------------------------------------------------------- a whole study


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict]:
    """(recipe, its directory of results, document) of the miniature, run once."""
    place = tmp_path_factory.mktemp("study")
    recipe = make_study(place)
    out = place / "out"
    return recipe, out, compare(str(recipe), out, data=place, jobs=1, quiet=True, page=page)


def cells(out: Path) -> list[dict]:
    return [json.loads(file.read_text()) for file in sorted((out / "cells").glob("*/result.json"))]


def test_trials_are_equal_and_use_a_seed_of_their_own(made) -> None:
    _, out, document = made
    # two rates, two rounds, and the better half again under two more seeds
    assert {row["trials"] for row in document["trials"]} == {8} and len(document["trials"]) == 4
    assert all(len(row["validation"]) == 3 for row in document["trials"])
    found = cells(out)
    trials = [c for c in found if c["point"]["kind"] == "trial"]
    assert {c["seed"] for c in trials} == {1_000_003, 1_000_033, 1_000_037}
    finals = [c for c in found if c["point"]["kind"] == "final"]
    assert sorted({c["seed"] for c in finals}) == [0, 1, 2]
    for some, judged in ((trials, "validation.jsonl"), (finals, "test.jsonl")):
        read = [
            load_recipe(str(out / "cells" / c["cell"] / "recipe.resolved.yaml")).recipe.data.test.files for c in some
        ]
        assert {Path(file).name for (file,) in read} == {judged}
    assert all(c["status"] == "done" for c in found), [c["reason"] for c in found]


def test_the_document_is_what_the_cells_say(made) -> None:
    _, out, document = made
    finals = [c for c in cells(out) if c["point"]["kind"] == "final" and c["point"]["task"] == "easy"]
    values = {(c["point"]["method"], c["seed"]): c["metrics"]["test"]["accuracy"]["value"] for c in finals}
    for c in finals:
        items = c["figures"]["items"]
        assert items.count("1") / len(items) == pytest.approx(c["metrics"]["test"]["accuracy"]["value"])
    differences = [values["ggpo", s] - values["plain", s] for s in range(3)]
    task = document["tasks"]["easy"]
    assert task["methods"]["ggpo"]["difference"]["value"] == pytest.approx(np.mean(differences))
    assert task["methods"]["plain"]["mean"]["value"] == pytest.approx(np.mean([values["plain", s] for s in range(3)]))
    if task["informative"]:
        assert document["methods"]["ggpo"]["primary"]["value"] == pytest.approx(np.mean(differences))
    generation = document["tasks"]["answers"]
    assert generation["metric"] == "loss" and generation["informative"] is None and generation["floor"] is None
    answers = [c["point"] | c["metrics"]["test"] for c in cells(out) if c["point"]["task"] == "answers"]
    nats = [c["loss"]["value"] for c in answers if (c["kind"], c["method"]) == ("final", "plain")]
    assert generation["methods"]["plain"]["mean"]["value"] == pytest.approx(np.mean(nats))
    assert task["methods"]["ggpo"]["sharpness"] is not None and math.isfinite(task["methods"]["ggpo"]["sharpness"])


def test_the_page_is_whole_offline_and_escaped(made) -> None:
    _, out, document = made
    text = (out / "report.html").read_text(encoding="utf-8")
    assert "<b>noise</b>" not in text and "&lt;b&gt;noise" in text
    assert "http://" not in text.replace("http://www.w3.org", "") and "Holm" in text and "Equal trials" in text
    for sentence in document["protocol"]:
        assert sentence.split(":")[0].replace("'", "&#39;") in text


def test_running_again_runs_nothing_and_says_the_same(made) -> None:
    recipe, out, document = made
    before = {file: file.stat().st_mtime_ns for file in (out / "cells").glob("*/*")}
    again = compare(str(recipe), out, data=recipe.parent, jobs=1, quiet=True)
    assert {file: file.stat().st_mtime_ns for file in (out / "cells").glob("*/*")} == before
    assert again == document


def test_a_finished_comparison_is_sealed_and_its_next_start_is_unfinished(made, tmp_path: Path, monkeypatch) -> None:
    recipe, out, _ = made
    copy = tmp_path / "out"
    shutil.copytree(out, copy)
    require_finished(copy)
    cell = next((copy / "cells").glob("*/result.json"))
    cell.write_text(cell.read_text(encoding="utf-8").replace('"done"', '"lost"'), encoding="utf-8")
    with pytest.raises(UserError, match="not what was saved"):
        require_finished(copy)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flatshift.experiments.studies.compare.run._tune_methods", killed)
    with pytest.raises(Interrupted):
        compare(str(recipe), copy, data=recipe.parent, jobs=1, quiet=True)
    with pytest.raises(UserError, match="is not finished"):
        require_finished(copy)


def test_committed_cells_are_those_that_the_shipped_comparison_asks_for(tmp_path: Path) -> None:
    from benchmarks._cell_table import read_cells
    from benchmarks._study_results import CELLS, packed
    from benchmarks.flat_comparison import folder
    from flatshift.experiments.results.cells import read_result

    table = folder("comparison") / CELLS
    with packed(tmp_path, table):
        found = {name: read_result(tmp_path / "cells" / name) for name in read_cells(table)}
    assert len(found) == 1195 and found == read_cells(table)
    study = load_recipe("flat-comparison").recipe.comparison
    assert study is not None
    assert {result["point"]["method"] for result in found.values() if result} <= study.methods.keys()


def test_what_train_can_do_can_be_compared(tmp_path: Path) -> None:
    """A task without classes, and a warm-up on a selection."""
    recipe, pool = make_study(tmp_path), tmp_path / "pool.jsonl"
    with (tmp_path / "scores.jsonl").open("w", encoding="utf-8") as handle:
        for i in range(30):
            row = {"text": f"the cat sat {i % 7}", "label": i % 5 / 2, "split": "train" if i < 22 else "test"}
            handle.write(json.dumps(row) + "\n")
    pool.write_text("\n".join(json.dumps({"text": f"the dog {i} and the log"}) for i in range(20)), encoding="utf-8")
    laid = {
        "task": "regress", "backbone": str(tmp_path / "gpt2"), "train.steps": "2",
        "comparison.tasks": "{scores: {file: scores.jsonl, train: 12, validation: 6, test: 8}}",
        "comparison.methods": f"{{plain: {{}}, warm: {{set: {{select.pool.files: {pool}, select.budget: 8, "
        "select.checks: false, warmup.steps: 1, warmup.batch_size: 4}}}",
        "comparison.rounds": "0", "comparison.finalists": "1", "comparison.tuning_seeds": "[1000003]",
        "comparison.seeds": "2", "comparison.sharpness_seeds": "0", "comparison.equal_time_above": "1000",
        "comparison.metric": "rmse",
    }  # fmt: skip
    overrides = [from_override(key, value) for key, value in laid.items()]
    out, how = tmp_path / "out", {"methods": ["warm"], "tasks": ["scores"]}
    document = compare(str(recipe), out, data=tmp_path, overrides=overrides, jobs=1, quiet=True, page=page, **how)
    table = document["tasks"]["scores"]
    assert document["diverged"] == [] and (table["metric"], table["informative"]) == ("rmse", None)
    found = {
        (c["point"]["method"], c["seed"]): c["metrics"]["test"]["rmse"]["value"]
        for c in cells(out)
        if c["point"]["kind"] == "final"
    }
    differences = [found["warm", seed] - found["plain", seed] for seed in (0, 1)]
    primary = document["methods"]["warm"]["primary"]
    assert primary["value"] == pytest.approx(np.mean(differences)) and primary["bootstrap"] is None
    assert primary["wins"] == sum(d < 0 for d in differences), "of an error the lower one wins"
    for trial in document["trials"]:
        tried = {
            c["point"]["optimizer.lr"]: c["metrics"]["test"]["rmse"]["value"]
            for c in cells(out)
            if (c["point"]["kind"], c["point"]["method"]) == ("trial", trial["method"])
        }
        assert trial["validation"] == [min(tried.values())] == [tried[trial["chosen"]["optimizer.lr"]]]
    assert "test RMSE minus plain" in (out / "report.html").read_text(encoding="utf-8")
    with pytest.raises(UserError, match=r"comparison\.metric: f1_macro is not evaluated for task\.kind: regress"):
        compare(
            str(recipe), tmp_path / "other", data=tmp_path, jobs=1, quiet=True,
            overrides=[*overrides, from_override("comparison.metric", "f1_macro")], **how,
        )  # fmt: skip
    warmed = [cell for cell in cells(out) if cell["point"]["method"] == "warm"]
    stages = [out / "cells" / cell["cell"] / "stages" for cell in warmed]
    assert len(stages) == 4 and all((place / "warm-up" / "eval.json").is_file() for place in stages)


def test_rows_that_a_killed_save_left_half_written_are_swept(made, tmp_path: Path) -> None:
    plan = ComparisonPlan(str(made[0]), [], data=made[0].parent)
    plan.read_rows(tmp_path)
    plan.write_rows()
    folder = next((tmp_path / "rows").iterdir())
    (folder / ".test.jsonl.fb00eb8f.tmp").write_text("{")
    plan.write_rows()
    assert sorted(file.name for file in folder.iterdir()) == ["test.jsonl", "train.jsonl", "validation.jsonl"]
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    assert rows and not any("split" in row for row in rows)  # no cell says that it does not read that column


def test_changed_weights_and_rows_left_out_are_seen(tmp_path: Path) -> None:
    recipe = make_study(tmp_path)
    keys = []
    for _ in range(2):
        plan = ComparisonPlan(str(recipe), [], data=tmp_path, tasks=["easy"])
        keys.append(plan.run("final", "plain", "easy", 0, TrialSetting(1e-2)).cell.key)
        weights = tmp_path / "bert" / "model.safetensors"
        raw = bytearray(weights.read_bytes())
        raw[-1] ^= 1
        weights.write_bytes(raw)
        cell.backbone_digests.cache_clear()
    assert keys[0] != keys[1]
    for part in ("00", "01"):
        (tmp_path / f"model.gguf.part{part}").write_text(part)
    assert [name for name, _ in cell.backbone_digests(str(tmp_path / "model.gguf"))] == [
        "model.gguf.part00", "model.gguf.part01",
    ]  # fmt: skip
    with (tmp_path / "easy.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"text": 7, "split": "train"}\n')
    bad = [from_override("data.bad_rows", "skip"), from_override("comparison.tasks.easy.train", "4000")]
    plan = ComparisonPlan(str(recipe), bad, data=tmp_path, tasks=["easy"])
    plan.read_rows(tmp_path)
    rows = plan.rows("easy")
    assert len(rows.skipped) == 1 and "easy.jsonl" in rows.skipped[0]
    counts = {"train": len(rows.train), "validation": 20, "test": len(rows.test), "skipped": 1}
    assert rows.counts(plan.study.tasks["easy"]) == counts and len(rows.train) < 4000


def test_methods_that_are_the_same_are_refused(tmp_path: Path) -> None:
    recipe = make_study(tmp_path)
    text = recipe.read_text(encoding="utf-8")
    recipe.write_text(f"{text}    again: {{set: {{regularizer.kind: ggpo}}}}\n", encoding="utf-8")
    with pytest.raises(UserError, match="methods 'ggpo' and 'again' are the same on task 'easy'; leave one out"):
        ComparisonPlan(str(recipe), [], data=tmp_path).check()
    recipe.write_text(text.replace("plain: {}", "plain: {tasks: [easy]}"), encoding="utf-8")
    with pytest.raises(UserError, match=r"methods\.plain\.tasks: the baseline runs on all tasks"):
        ComparisonPlan(str(recipe), [], data=tmp_path)


def test_a_comparison_that_was_cut_off_is_no_sweep(tmp_path: Path) -> None:
    from flatshift.experiments.results.run import list_directories, read_run

    (tmp_path / "cut" / "cells").mkdir(parents=True)
    (tmp_path / "cut" / "study.recipe.yaml").write_text("task: classify\n", encoding="utf-8")
    (tmp_path / "cut" / "command.txt").write_text("flatshift compare", encoding="utf-8")
    assert read_run(tmp_path / "cut").sweep is None
    (entry,) = list_directories(tmp_path)
    assert (entry.kind, entry.status) == ("comparison", "unfinished")


def test_a_seed_fixes_subset_and_initialisation_for_all_methods(made, tmp_path: Path) -> None:
    from flatshift.experiments.data.splits import prepare_data
    from flatshift.experiments.workflows.build import load_model

    recipe, _, _ = made
    plan = ComparisonPlan(str(recipe), [], data=recipe.parent)
    plan.read_rows(tmp_path)
    plan.write_rows()
    one, other, later = (
        plan.run("final", m, "easy", s, TrialSetting(1e-2)).cell for m, s in (("plain", 0), ("ggpo", 0), ("plain", 1))
    )
    trial = plan.run("trial", "plain", "easy", 1_000_003, TrialSetting(1e-2)).cell
    prepared = {cell.key: prepare_data(cell.resolved.recipe) for cell in (one, other, later, trial)}
    assert len(prepared) == 4
    rows = [[example.id for example in prepared[cell.key].train] for cell in (one, other, later)]
    assert rows[0] == rows[1] != rows[2] and len(rows[0]) == 40 and not prepared[one.key].dev

    def lines(split: str) -> set[str]:
        return {json.dumps(record, sort_keys=True) for record in getattr(plan.rows("easy"), split)}

    assert not lines("validation") & lines("train") or len(lines("train")) < 55, "rows are drawn apart by place"
    assert [len(getattr(plan.rows("easy"), s)) for s in ("train", "validation", "test")] == [55, 20, 30]
    a, b = (
        load_model(cell.resolved.recipe, cell.resolved.recipe.task, ("bad", "good"))[0].parameters
        for cell in (one, other)
    )
    assert all(a[name].equal(b[name]) for name in a)


def test_a_sharpness_that_is_not_finite_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flatshift.experiments.data.splits import prepare_data
    from flatshift.experiments.workflows.build import load_model
    from flatshift.regularizers.sharpness import measures

    plan = ComparisonPlan(str(make_study(tmp_path)), [], data=tmp_path, tasks=["easy"])
    plan.read_rows(tmp_path / "out")
    plan.write_rows()
    recipe = plan.run("final", "plain", "easy", 0, TrialSetting(1e-2)).cell.resolved.recipe
    engine, tokenizer = load_model(recipe, recipe.task, ("bad", "good"))
    monkeypatch.setattr(measures, "expected_rise", lambda *_, **__: [measures.Estimate.exact(math.inf)])
    probe = ComparisonProbe(final=False, sharpness=0.5)
    probe.on_evaluation(recipe, engine, tokenizer, prepare_data(recipe))
    assert probe.figures()["sharpness"] is None


def test_the_protocol_counts_the_seeds_that_are_run() -> None:
    sentences = " ".join(describe_protocol(study(seeds=3, exploratory_seeds=5)))
    assert "3 seeds: plain, ggpo. 3 seeds: the others" in sentences


@pytest.mark.parametrize(
    ("name", "problem"),
    [("*.jsonl", r"\*\.jsonl is 2 files"), ("rows", "rows is 2 files"), ("~/one/a.jsonl", None), ("one", None)],
)
def test_a_task_has_one_file(tmp_path: Path, name: str, problem: str | None, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("rows/a.jsonl", "rows/b.jsonl", "one/a.jsonl"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("{}\n", encoding="utf-8")
    folder = tmp_path / "rows" if name.startswith("*") else tmp_path
    if problem is None:
        assert locate_file(name, folder, "comparison.tasks.a.file") == str(tmp_path / "one" / "a.jsonl")
        return
    with pytest.raises(UserError, match=rf"comparison\.tasks\.a\.file: {problem}"):
        locate_file(name, folder, "comparison.tasks.a.file")


def test_a_diverged_run_counts_with_the_floor_and_a_failed_one_not(made) -> None:
    recipe, _, _ = made
    plan = ComparisonPlan(str(recipe), [], data=recipe.parent)

    def run(seed: int, accuracy: float, status: str = "done") -> dict:
        metrics = {"accuracy": accuracy, "majority_floor": 0.5} if status == "done" else {}
        return {"seed": seed, "status": status, "metrics": metrics}

    outcome = ComparisonResults()
    outcome.finals["plain", "easy"] = [run(0, 0.9), run(1, 0.8), run(2, 0.8)]
    outcome.finals["ggpo", "easy"] = [run(0, 0.9), run(1, 0.0, "diverged"), run(2, 0.0, "failed")]
    found = compute_endpoint(plan, outcome, "ggpo", "plain", ["easy"])
    assert found is not None and found["by_seed"] == pytest.approx({"0": 0.0, "1": -0.3})


def test_the_endpoint_its_test_and_its_bootstrap_from_known_answers(tmp_path: Path, monkeypatch) -> None:
    from scipy.stats import ttest_rel

    from flatshift.experiments.report.chapters.comparison import page
    from flatshift.experiments.statistics.intervals import t_interval
    from flatshift.experiments.studies.compare.analysis import (
        _analyse_method,
        _bootstrap_endpoint,
        _margin_over,
        _sharpness_ratio,
        analyse,
    )
    from flatshift.experiments.studies.compare.run import _equal_steps

    recipe = make_study(tmp_path, seeds=6)
    plan = ComparisonPlan(str(recipe), [], data=tmp_path, tasks=["easy"])
    plan.read_rows(tmp_path / "out")
    rng = np.random.default_rng(5)
    outcome = ComparisonResults(step_ratio={"plain": 1.0, "ggpo": 1.1})
    shares = {}
    for method, share in (("plain", 0.8), ("ggpo", 0.93)):
        outcome.trials[method, "easy"] = []
        setting = outcome.chosen[method, "easy"] = TrialSetting(1e-2)
        outcome.on_edge[method, "easy"] = False
        finals = []
        for seed in range(6):
            cell = plan.run("final", method, "easy", seed, setting).cell
            right = rng.uniform(size=200) < share
            metrics = {"accuracy": right.mean(), "f1_macro": 0.5, "loss": 0.4, "majority_floor": 0.5}
            finals.append(
                {"cell": cell.key, "kind": "final", "method": method, "task": "easy", "seed": seed, "status": "done",
                 "metrics": metrics, "items": "".join(map(str, right.astype(int))), "cpu_s": 1.0, "step_cpu_s": 0.1,
                 "sharpness": 0.01 * (1 + 0.1 * seed * (method == "ggpo")), "setting": {}, "reason": None}
            )  # fmt: skip
        outcome.finals[method, "easy"] = finals
        outcome.trials[method, "easy"] = [(plan.run("trial", method, "easy", 1_000_003, setting), finals[0])]
        shares[method] = [run["metrics"]["accuracy"] for run in finals]
    document = json.loads(json.dumps(analyse(plan, outcome)))
    primary = document["methods"]["ggpo"]["primary"]
    difference = np.mean(shares["ggpo"]) - np.mean(shares["plain"])
    assert document["informative"] == ["easy"] and primary["value"] == pytest.approx(difference)
    ratio = document["methods"]["ggpo"]["sharpness"]
    gap = np.log1p(0.1 * np.arange(6)).mean()
    assert math.log(ratio["ratio"]) == pytest.approx(gap) and (ratio["n"], ratio["low"]) == (6, None)  # of one task
    outcome.finals["plain", "again"] = outcome.finals["plain", "easy"]
    outcome.finals["ggpo", "again"] = [run | {"sharpness": 0.02} for run in outcome.finals["ggpo", "easy"]]
    monkeypatch.setattr(type(plan.study), "runs_on", lambda self, name: ["easy", "again"])
    assert _analyse_method(plan, outcome, "ggpo", ["easy"], ["easy"])["sharpness"] == ratio  # of the endpoint's tasks
    both = _sharpness_ratio(plan, outcome, "ggpo", ["easy", "again"])
    assert both is not None and both["n"] == 12
    assert math.log(both["low"]) == pytest.approx(t_interval([gap, math.log(2)]).low)
    monkeypatch.undo()
    assert primary["p"] == pytest.approx(ttest_rel(shares["ggpo"], shares["plain"]).pvalue)
    assert primary["p_holm"] == primary["p"] and primary["wins"] == 6
    # independent items and seeds: the bootstrap's spread is that of a difference of two shares of 6 × 200 answers,
    # widened for six seeds
    wider = 2.571 / 1.96 * math.sqrt(6 / 5)
    width = primary["bootstrap"]["high"] - primary["bootstrap"]["low"]
    each = sum(np.mean(s) * (1 - np.mean(s)) for s in shares.values())
    assert 0.8 < width / wider / (2 * 1.96 * math.sqrt(each / 1200)) < 1.8
    assert primary["bootstrap"]["low"] < primary["value"] < primary["bootstrap"]["high"]
    failed = outcome.finals["ggpo", "easy"][0] | {"status": "failed", "items": None}
    outcome.finals["ggpo", "easy"][0] = failed  # in no analysis, where a diverged one counts as the majority baseline
    without = _bootstrap_endpoint(plan, outcome, "ggpo", "plain", ["easy"])
    failed["status"] = "diverged"
    worst = _bootstrap_endpoint(plan, outcome, "ggpo", "plain", ["easy"])
    assert without is not None and worst is not None
    low = primary["bootstrap"]["low"]
    assert abs(without["low"] - low) < 0.02 and worst["low"] < low - 0.03
    # the ratio that was measured for equal time is of these settings: other runs have their own
    found = [_equal_steps(plan, tmp_path, outcome, ("ggpo", "easy"))]
    for ratio, rate in ((2.0, 1e-2), (2.0, 2e-2), (4.0, 2e-2)):
        outcome.step_ratio["ggpo"], outcome.chosen["ggpo", "easy"] = ratio, TrialSetting(rate)
        found.append(_equal_steps(plan, tmp_path, outcome, ("ggpo", "easy")))
    steps = plan.steps("easy")
    assert found == [round(steps / 1.1)] * 2 + [round(steps / 2)] * 2
    share = (200 * np.mean(shares["plain"]) + 0.5) / 201
    error = math.sqrt(np.var(shares["plain"], ddof=1) / 6 + share * (1 - share) / 200)
    assert document["tasks"]["easy"]["margin_se"] == pytest.approx((np.mean(shares["plain"]) - 0.5) / error)
    for final in outcome.finals["plain", "easy"]:
        final["metrics"]["accuracy"] = 1.0
    error = math.sqrt(200.5 / 201 * 0.5 / 201 / 200)  # of rows that are all right, not none
    assert _margin_over(0.5, plan, outcome, "easy") == pytest.approx(0.5 / error)
    text = page(document)
    assert "Primary endpoint of every method" in text and "After Holm&#39;s correction ggpo differs from plain" in text


def test_what_cannot_run_is_refused_before_anything_runs(made, tmp_path: Path, monkeypatch) -> None:
    recipe, _, _ = made
    out = tmp_path / "out"
    with pytest.raises(UserError, match="has no `comparison` block"):
        compare("classify", out)
    with pytest.raises(UserError, match="did you mean 'ggpo'"):
        compare(str(recipe), out, data=recipe.parent, methods=["gppo"])
    with pytest.raises(UserError, match="--data"):
        compare(str(recipe), out)
    import flatshift.regularizers.protocol as protocol
    from flatshift.regularizers.config import GGPO

    monkeypatch.setitem(protocol._HOMES, GGPO, "nowhere:gone")
    with pytest.raises(UserError, match="method 'ggpo' cannot run"):
        compare(str(recipe), out, data=recipe.parent)
    assert not out.exists()


def test_the_shipped_study_resolves_in_every_setting(tmp_path: Path) -> None:
    resolved = load_recipe("flat-comparison")
    study = resolved.recipe.comparison
    assert study is not None and study.trials >= 4 and study.seeds == 10
    assert {"ggpo", "flat-lora", "mgpo"} <= {name for name, m in study.methods.items() if m.confirmatory}
    for task in study.tasks.values():
        file = tmp_path / task.file
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(lzma.compress(b""))
    plan = ComparisonPlan("flat-comparison", [], data=tmp_path)
    assert len(plan.pairs) == sum(len(study.runs_on(m)) for m in study.methods)


@pytest.mark.slow
def test_the_arm_of_the_loss_by_probability(tmp_path: Path) -> None:
    """On the only task of the shipped study that a decoder answers."""
    from flatshift.cli import run

    rows = [
        {"question": f"{i} and {i}?", "answer": f"{2 * i}", "split": "train" if i < 24 else "test"} for i in range(34)
    ]
    (tmp_path / "instruct").mkdir()
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "instruct" / "gsm8k.jsonl.xz").write_bytes(lzma.compress(text.encode()))
    small = {
        "comparison.seeds": 2, "comparison.exploratory_seeds": 2,
        "comparison.rounds": 0, "comparison.finalists": 1, "comparison.tuning_seeds": "[1000003]",
        "comparison.sharpness_seeds": 0, "comparison.tasks.gsm8k.train": 12, "comparison.tasks.gsm8k.validation": 6,
        "comparison.tasks.gsm8k.test": 8, "train.steps": 2, "train.precision": "fp32",
    }  # fmt: skip
    words = [word for key, value in small.items() for word in (f"--{key}", str(value))]
    out = tmp_path / "out"
    command = ["compare", "flat-comparison", "--data", str(tmp_path), "--methods", "dft", "--tasks", "gsm8k"]
    assert run([*command, "--jobs", "1", "--out", str(out), *words]) == 0
    found = {(c["point"]["method"], c["seed"]): c["metrics"]["test"]["loss"]["value"] for c in cells(out)
             if c["point"]["kind"] == "final"}  # fmt: skip
    methods = {method for method, _ in found}
    assert methods == {"plain", "dft"} and len(set(found.values())) == len(found) == 4


def test_a_study_is_part_of_the_resolved_recipe(made, tmp_path: Path) -> None:
    recipe, out, _ = made
    again = load_recipe(str(out / "study.recipe.yaml"))
    assert dataclasses.asdict(again.recipe) == dataclasses.asdict(resolve_auto(load_recipe(str(recipe))).recipe)
    changed = load_recipe(str(recipe), [from_override("comparison.methods.ggpo.lr", "[1e-3, 2e-3]")])
    assert changed.recipe.comparison is not None and changed.recipe.comparison.methods["ggpo"].lr == (1e-3, 2e-3)


def test_results_and_guide_come_from_the_document_alone(made) -> None:
    from benchmarks._harness import Benchmark
    from benchmarks._study_results import read
    from benchmarks.flat_comparison import PAGE, folder, guide, marks, rows

    document = json.loads(json.dumps(made[2]))
    document["informative"], primary = ["easy"], {"value": 0.02, "low": -0.01, "high": 0.05, "n": 3, "by_seed": {}}
    primary |= {"p": 0.2, "p_holm": 0.2, "detectable": 0.04, "bootstrap": None, "wins": 2, "tasks": ["easy"]}
    document["methods"]["ggpo"]["primary"] = primary
    bench = Benchmark("flat_comparison")
    rows(bench, document)
    row = bench.rows[0]
    assert row["ours"] - row["peer"] == pytest.approx(0.02) and row["difference"]["mean"] == 0.02
    text = guide(document)
    assert "| `ggpo` | +2.0 |" in text and "No method is better than tuned plain LoRA" in text and "4.0 points" in text
    page = PAGE.read_text(encoding="utf-8")
    begin, end = marks("comparison")
    assert page.count(begin) == page.count(end) == 1
    assert guide(read(folder("comparison") / "comparison.json")) in page, (
        "run: python -m benchmarks.flat_comparison --data DIR"
    )


def test_the_guide_of_training_to_the_end_has_intervals_over_tasks() -> None:
    from benchmarks._harness import Benchmark
    from benchmarks.flat_comparison import MODELS, RECIPES, group_differences, group_rows, noise_groups, noise_guide

    for name in MODELS:
        study = load_recipe(RECIPES[name]).recipe.comparison
        assert study is not None and study.trials == (4 if name == "decoder-rates" else 8)
        assert set(study.methods) == {"plain", "ggpo", "ggpo-paper", "mgpo", "sam"}
    gains = {
        "trec": 0.01,
        "sst2": 0.03,
        "polarity": 0.02,
        "trec-noise": -0.02,
        "sst2-noise": 0.0,
        "polarity-noise": 0.02,
    }

    def result(gain: float, sharpness: float) -> dict:
        by_seed = {str(seed): gain + 0.01 * (seed - 2) for seed in range(5)}
        return {
            "mean": {"value": 0.8 + gain}, "difference": {"value": gain, "by_seed": by_seed}, "train_error": 0.005,
            "sharpness": sharpness, "sharpness_ratio": sharpness / 0.1,
        }  # fmt: skip

    document = {
        "baseline": "plain",
        "protocol": ["A sentence."],
        "methods": {name: {"step_ratio": 1.0, "equal_time": None} for name in ("plain", "ggpo")},
        "tasks": {
            task: {
                "rows": {"train": 200},
                "floor": 0.5,
                "steps": 120,
                "methods": {"plain": result(0.0, 0.1), "ggpo": result(gain, 0.05)},
            }
            for task, gain in gains.items()
        },
    }
    groups = noise_groups(document)
    assert groups == {
        "right labels": ["trec", "sst2", "polarity"],
        "a fifth wrong": ["trec-noise", "sst2-noise", "polarity-noise"],
    }
    gaps = group_differences(document, "ggpo", groups["right labels"])
    assert gaps["tasks"].value == pytest.approx(0.02) and gaps["tasks"].n == 3
    assert gaps["tasks"].high == pytest.approx(0.02 + 4.302653 * 0.01 / 3**0.5)
    assert gaps["seeds"].n == 5 and gaps["seeds"].value == pytest.approx(0.02)
    assert math.exp(gaps["sharpness"].value) == pytest.approx(0.5)
    text = noise_guide(document, "decoder")
    assert "Gemma 3 270M" in text
    assert "| `ggpo` | right labels | +2.0 (−0.5 to +4.5) |" in text and "| 0.5" in text and "at most 0.5 %" in text
    bench = Benchmark("flat_noise")
    group_rows(bench, document, "right labels", groups["right labels"])
    assert bench.rows[0]["difference"]["mean"] == pytest.approx(0.02)
