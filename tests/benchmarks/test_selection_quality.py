"""A whole study of selectors: tokens are equal, nothing runs twice, and the document is what the cells say."""

from __future__ import annotations

import dataclasses
import json
import lzma
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from benchmarks.selection_quality import STUDIES, folder
from benchmarks.studies.selection_quality.choosing import chosen_rows
from benchmarks.studies.selection_quality.plan import RECIPE, Plan
from benchmarks.studies.selection_quality.pool import open_pool, pool_file
from benchmarks.studies.selection_quality.runner import DOCUMENT, study_quality
from benchmarks.studies.selection_quality.settings import StudyRecipe
from flatshift.experiments.recipe import from_override, load_recipe
from flatshift.experiments.recipe.auto import resolve_auto
from flatshift.finetune.atomic import write_json
from flatshift.finetune.errors import UserError
from tests.support.quality_study import make_study

PUBLISHED = [study for study in STUDIES if study != "real" or (folder(study) / DOCUMENT).is_file()]
"""The study of a real decoder is published once its last cell has run."""

# --------------------------------------------------------------------------------------------- a whole study


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict]:
    """(recipe, its directory of results, document) of the miniature, run once."""
    place = tmp_path_factory.mktemp("quality")
    recipe = make_study(place)
    out = place / "out"
    return recipe, out, study_quality(str(recipe), out, data=place, jobs=1, quiet=True)


def cells(out: Path, kind: str = "") -> list[dict]:
    found = [json.loads(file.read_text()) for file in sorted((out / "cells").glob("*/result.json"))]
    return [cell for cell in found if not kind or cell["kind"] == kind]


def test_every_cell_ends_and_trials_are_equal(made) -> None:
    _, out, document = made
    assert all(cell["status"] == "done" for cell in cells(out)), [cell["reason"] for cell in cells(out)]
    assert document["cells"] == len(cells(out)) and not document["failed"]
    assert {row["trials"] for row in document["trials"]} == {2} and len(document["trials"]) == 6 * 2
    trials = cells(out, "trial") + cells(out, "fine-tune trial")
    assert {cell["seed"] for cell in trials} == {1_000_003} and {cell["judged"] for cell in trials} == {"validation"}
    finals = cells(out, "final")
    assert {cell["seed"] for cell in finals} == {0, 1} and {cell["judged"] for cell in finals} == {"test"}
    with_budget, without = 4 * (2 + 1), 3 * 2
    assert len(finals) == 2 * (with_budget + without)
    assert {cell["budget"] for cell in finals if "accuracy" not in cell["metrics"]} == {10}


def test_every_arm_trains_on_as_many_tokens(made) -> None:
    _, out, _ = made
    for cell in cells(out, "final"):
        if cell["arm"] == "no-warm-up":
            assert not cell["text"]
        else:
            assert cell["text"]["tokens"] * cell["text"]["epochs"] == pytest.approx(2 * 2 * 24, rel=2e-3)


def test_a_cold_backbone_is_the_same_under_every_seed_and_a_warmed_one_is_not(made) -> None:
    _, out, _ = made
    cold = {cell["metrics"]["nats"] for cell in cells(out, "final") if cell["arm"] == "no-warm-up"}
    assert len(cold) == 2  # one for each target
    warm = {cell["metrics"]["nats"] for cell in cells(out, "final") if cell["arm"] == "random"}
    assert len(warm) == 6


def test_a_remembered_warm_up_changes_nothing(made, monkeypatch, tmp_path: Path) -> None:
    from benchmarks.studies.selection_quality import training
    from benchmarks.studies.selection_quality.runner import run_cell

    recipe, out, document = made
    plan = Plan(str(recipe), [], data=recipe.parent)
    lr = {(row["arm"], row["target"]): row["lr"] for row in document["trials"]}
    for target in ("science", "bank"):
        cell = plan.final(
            "all", target, None, 0, lr=lr["all", target], fine_tune_lr=document["targets"][target]["fine_tune_lr"]
        )
        before = json.loads((out / "cells" / cell.key / "result.json").read_text())
        monkeypatch.setattr(training, "_WARM", type(training._WARM)())
        shutil.copytree(out / "pool", tmp_path / target / "pool")
        run_cell(tmp_path / target / "cells", cell, 1)
        after = json.loads((tmp_path / target / "cells" / cell.key / "result.json").read_text())
        assert after["metrics"] == before["metrics"] and not after["remembered"]


def test_recall_and_coverage_are_counts_of_the_chosen_rows(made) -> None:
    recipe, out, document = made
    plan = Plan(str(recipe), [], data=recipe.parent)
    stored = open_pool(out, plan.pool.key)
    tags = dict(line.split("\t")[:2] for line in (recipe.parent / "tags.tsv").read_text().splitlines() if line)
    assert all(tags[i] == d for i, d in zip(stored.ids, stored.domains, strict=True))
    rows = [chosen_rows(out, plan.selection("gotd", "science", s).key, 30) for s in (0, 1)]
    wanted = np.isin(stored.domains, ["arxiv_qbio", "medical_qa"])
    recalls = [wanted[r[:30]].sum() / min(30, wanted.sum()) for r in rows]
    found = document["targets"]["science"]["budgets"]["30"]["gotd"]["recall"]
    assert found["value"] == pytest.approx(np.mean(recalls)) and len(set(rows[0].tolist())) == 30
    cell = plan.selection("gotd", "science", 0)
    kept = json.loads((out / "cells" / cell.key / "result.json").read_text())["figures"]
    judged = [json.loads(line) for line in (recipe.parent / "scicite.jsonl").read_text().splitlines()]
    texts = [row["text"] for row in judged if row["split"] == "test"]
    assert 0 < kept["10"]["words"] <= kept["30"]["words"] <= 1 and len(texts) == 40
    assert kept["30"]["distance"] <= kept["10"]["distance"]
    assert kept["30"]["length"] == pytest.approx(np.mean([len(stored.texts[i].split()) for i in rows[0]]))


def test_the_endpoint_is_the_mean_over_targets_of_seed_paired_differences(made) -> None:
    from scipy.stats import ttest_rel

    _, out, document = made
    nats = {
        (cell["arm"], cell["target"], cell["seed"]): cell["metrics"]["nats"]
        for cell in cells(out, "final")
        if cell["budget"] in (30, None)
    }
    sides = [[np.mean([nats[arm, t, s] for t in ("science", "bank")]) for s in (0, 1)] for arm in ("gotd", "random")]
    found = document["arms"]["gotd"]["nats"]
    assert found["value"] == pytest.approx(np.mean(sides[0]) - np.mean(sides[1]))
    assert found["p"] == pytest.approx(ttest_rel(*sides).pvalue)
    assert found["p"] <= found["p_holm"] <= 1
    cold = document["against"]["no-warm-up"]["nats"]
    assert cold["value"] == pytest.approx(
        np.mean(sides[0]) - np.mean([nats["no-warm-up", t, 0] for t in ("science", "bank")])
    )
    one = next(cell for cell in cells(out, "final"))
    total, tokens = one["items"]["nats"]
    assert total / tokens == pytest.approx(one["metrics"]["nats"], rel=1e-3)
    assert one["metrics"]["perplexity"] == pytest.approx(math.exp(one["metrics"]["nats"]))


def test_the_page_is_whole_offline_and_escaped(made) -> None:
    _, out, document = made
    text = (out / "report.html").read_text(encoding="utf-8")
    assert "<b>transport</b>" not in text and "&lt;b&gt;transport" in text
    assert "http://" not in text.replace("http://www.w3.org", "") and "Holm" in text and "Equal trials" in text
    assert document["answers"] and any("recall" in sentence for sentence in document["answers"])
    for sentence in (*document["protocol"], *document["answers"]):
        assert sentence.split(":")[0].replace("'", "&#39;") in text


def test_running_again_runs_nothing_and_lost_rows_come_back(made) -> None:
    recipe, out, document = made
    before = {file: file.stat().st_mtime_ns for file in (out / "cells").iterdir()}
    again = study_quality(str(recipe), out, data=recipe.parent, jobs=1, quiet=True)
    assert {file: file.stat().st_mtime_ns for file in (out / "cells").iterdir()} == before
    assert again == document
    # cells that came from elsewhere: results are there, the pool and the rows are not; one run is missing
    plan = Plan(str(recipe), [], data=recipe.parent)
    lr = next(row["lr"] for row in document["trials"] if (row["arm"], row["target"]) == ("matched", "bank"))
    cell = plan.final("matched", "bank", 30, 1, lr=lr, fine_tune_lr=document["targets"]["bank"]["fine_tune_lr"])
    file = out / "cells" / cell.key / "result.json"
    lost = json.loads(file.read_text())
    file.unlink()
    pool_file(out, plan.pool.key).unlink()
    shutil.rmtree(out / "selections")
    open_pool.cache_clear()
    study_quality(str(recipe), out, data=recipe.parent, jobs=1, quiet=True)
    assert json.loads(file.read_text())["metrics"] == lost["metrics"]
    changed = {name for name, stamp in before.items() if name.stat().st_mtime_ns != stamp}
    assert len(changed) == 4  # the run, its rows, the rows that those follow, and the pool


def test_a_part_of_the_study_shares_its_cells(made) -> None:
    recipe, out, document = made
    before = set((out / "cells").iterdir())
    part = study_quality(
        str(recipe), out, data=recipe.parent, selectors=["gotd"], targets=["science"], jobs=1, quiet=True
    )
    assert set((out / "cells").iterdir()) == before
    assert set(part["arms"]) == {"random", "gotd"}
    assert part["exploratory"] and part["missing"] == {
        "arms": ["matched", "by-form", "all", "target-text", "no-warm-up"], "targets": ["bank"],
    }  # fmt: skip
    assert part["answers"][0] == part["protocol"][0] and part["protocol"][0].startswith(
        "This is a part of the study, run without its arms matched, by-form, all, target-text, no-warm-up; targets "
        "bank: its figures are exploratory"
    )
    assert not document["exploratory"] and "exploratory" not in document["protocol"][0] and not document["missing"]
    assert document["targets"]["science"]["fine_tune_edge"]  # of two rates, both are edges
    ours, whole = (d["targets"]["science"]["budgets"]["10"]["gotd"]["nats"] for d in (part, document))
    assert ours == whole


def test_a_method_that_shapes_its_choice_for_one_size_selects_anew_for_every_budget(made) -> None:
    from benchmarks.studies.selection_quality.choosing import choose

    recipe, out, _ = made

    def cells_of(*changes: tuple[str, str]) -> list:
        plan = Plan(str(recipe), [from_override(k, v, "--") for k, v in changes], data=recipe.parent)
        return [plan.selection(arm, "science", 0) for arm in ("gotd", "matched")]

    plain = cells_of(("quality.arms.gotd.note", "another"))
    assert [cell.key for cell in plain] == [cell.key for cell in cells_of()] and not any(cell.each for cell in plain)
    rounds = ("quality.arms.gotd.set", "{select.method.kind: gotd, select.method.rounds: 3}")
    both = cells_of(rounds)
    small = cells_of(rounds, ("quality.targets.science.budgets", "[10]"), ("quality.targets.bank.budgets", "[10]"),
                     ("quality.primary_budget", "10"))  # fmt: skip
    assert all(cell.each for cell in both) and not any(cell.each for cell in small)
    figures = [choose(out, cell)["figures"] for cell in (*both, *small)]
    for ours, alone in zip(both, small, strict=True):
        found = chosen_rows(out, ours.key, 10)
        assert found.tolist() == chosen_rows(out, alone.key, 10).tolist() and len(set(found.tolist())) == 10
    large = chosen_rows(out, both[0].key, 30)
    assert len(set(large.tolist())) == 30 and set(large[:10].tolist()) != set(
        chosen_rows(out, both[0].key, 10).tolist()
    )
    assert figures[0]["10"] == figures[2]["10"] and set(figures[0]) == {"10", "30"}


def test_what_is_told_to_readers_names_no_other_cell(made) -> None:
    recipe, _, _ = made
    plans = [
        Plan(str(recipe), [from_override("quality.notes", notes, "--")], data=recipe.parent)
        for notes in ("[]", "[TSDS was cut to fit.]")
    ]
    keys = [
        [plan.pool.key, plan.selection("gotd", "bank", 0).key, plan.trial("all", "bank", 1e-3).key,
         plan.final("gotd", "bank", 30, 0, lr=1e-3, fine_tune_lr=1e-2).key]
        for plan in plans
    ]  # fmt: skip
    assert keys[0] == keys[1]


def test_a_targets_own_settings_serve_all_its_arms_and_are_told(made) -> None:
    from benchmarks.studies.selection_quality.answers import protocol

    recipe, _, _ = made
    laid = [from_override("quality.targets.bank.set", "{warmup.steps: 3}", "--")]
    plan = Plan(str(recipe), laid, data=recipe.parent)
    for arm in plan.warm_arms():
        assert plan.trial(arm, "bank", 1e-3).recipe.warmup.steps == 3
        assert plan.trial(arm, "science", 1e-3).recipe.warmup.steps == 2
    told = protocol(plan)
    assert told[-1] == "Target bank has settings of its own, the same for every arm: warmup.steps 3."
    assert "Every warm-up (but where a target's own settings, named below, say otherwise) takes 2 steps" in told[1]


# --------------------------------------------------------------------------------------------- what is said


def test_accuracy_endpoints_have_an_interval_over_rows_and_nats_say_that_they_have_none(made) -> None:
    document = made[2]
    for name, arm in document["arms"].items():
        if name != "random":
            boot = arm["accuracy"]["bootstrap"]
            assert boot["low"] <= arm["accuracy"]["value"] <= boot["high"] and "bootstrap" not in arm["nats"]
    told = " ".join(document["protocol"])
    assert "hold for these test rows and targets; item sampling is not in them" in told
    assert "evaluated by the final runs" in told and "coverage of every selection" in told


# --------------------------------------------------------------------------------------------- bad input


def test_what_cannot_run_is_refused_before_anything_runs(made, tmp_path: Path) -> None:
    recipe, _, _ = made
    out = tmp_path / "out"

    def refuse(words: str, *keys: tuple[str, str], reference: str = str(recipe), **more) -> None:
        with pytest.raises(UserError, match=words):
            laid = [from_override(key, value, f"--{key}") for key, value in keys]
            study_quality(reference, out, data=recipe.parent, overrides=laid, quiet=True, **more)

    refuse("has no `quality` block", reference="classify")
    refuse("did you mean 'gotd'", selectors=["gotb"])
    refuse("matched follows gotd; name that too", selectors=["matched"])
    refuse("--jobs must be at least 1", jobs=0)
    refuse("select.budget: a study of selectors does not read it", ("select.budget", "7"))
    refuse("select.cache: a study", ("select.cache", "somewhere"))
    refuse("arms.gotd.set has 'select.cache', but an arm", ("quality.arms.gotd.set", "{select.cache: somewhere}"))
    refuse("targets.bank.set: .* not task.kind: regress", ("quality.targets.bank.set", "{task.kind: regress}"))
    refuse("targets.bank.set: train.overlong: a study", ("quality.targets.bank.set", "{train.overlong: drop}"))
    refuse("data: a study of selectors does not read it", ("data.holdout", "0.2"))
    refuse("no such file", ("quality.tags", "nowhere.tsv"))
    refuse("no such file", ("quality.pool", "nowhere.jsonl"))
    refuse("needs the blocks `select` and `warmup`", ("warmup", "null"))
    refuse("needs losses", ("quality.arms.gotd.set", "{select.method.kind: perplexity}"))
    refuse("passages of a study stay whole", ("select.hygiene.decontaminate", "{}"))
    with pytest.raises(UserError, match="--data"):
        study_quality(str(recipe), out, quiet=True)
    assert not out.exists()


def test_a_pool_that_cannot_serve_is_one_clear_error(made, tmp_path: Path) -> None:
    recipe, _, _ = made
    place = recipe.parent
    short = place / "short.tsv"
    short.write_text("\n".join((place / "tags.tsv").read_text().splitlines()[:9]))
    for number, (keys, words) in enumerate(
        [
            ({"quality.tags": "short.tsv"}, "has no domain for the passage"),
            ({"select.hygiene.length.min_words": "5000"}, "leaves no passage of the pool's 400"),
            ({"quality.targets.bank.domains": "[dialog]"}, r"bank\.domains: the pool .* did you mean 'dialogue'"),
            ({"quality.targets.bank.budgets": "[30, 399999]"}, r"399,999 for target bank is above the \d+ passages"),
        ]
    ):
        laid = [from_override(key, value, f"--{key}") for key, value in keys.items()]
        with pytest.raises(UserError, match=words):
            study_quality(str(recipe), tmp_path / str(number), data=place, overrides=laid, jobs=1, quiet=True)
        assert not [cell for cell in cells(tmp_path / str(number)) if cell["kind"] == "features"]


def inputs_of(plan: Plan, out: Path, monkeypatch) -> None:
    """The first cells of a study: its pool and features."""
    from benchmarks.studies.selection_quality import runner
    from flatshift.experiments.run.console import Console

    monkeypatch.setattr(plan, "arms_with_budget", list)
    for later in ("tune", "finals"):
        monkeypatch.setattr(runner._Stages, later, lambda self: None)
    runner.run_study(plan, out, jobs=1, console=Console(quiet=True))


def test_an_input_that_was_refused_is_tried_again(made, tmp_path: Path, monkeypatch) -> None:
    recipe, out, _ = made
    plan = Plan(str(recipe), [], data=recipe.parent)
    (tmp_path / "cells").mkdir()
    shutil.copyfile(out / "study.recipe.yaml", tmp_path / "study.recipe.yaml")
    for cell in (plan.pool, plan.features):
        result = {"cell": cell.key, "kind": cell.kind, "status": "failed", "reason": "mended since", "cpu_s": 0.0}
        write_json(tmp_path / "cells" / cell.key / "result.json", result)
    inputs_of(plan, tmp_path, monkeypatch)
    assert {cell["status"] for cell in cells(tmp_path)} == {"done"}
    assert {cell["kind"] for cell in cells(tmp_path)} == {"pool", "features"}


def test_bad_records_are_counted_and_skipping_them_is_another_pool(made, tmp_path: Path) -> None:
    from benchmarks.studies.selection_quality.pool import store_pool

    recipe, _, _ = made
    bad = recipe.parent / "bad.jsonl"
    bad.write_text('{"id": "x"}\n' + (recipe.parent / "pool.jsonl").read_text(encoding="utf-8"), encoding="utf-8")
    plans = [
        Plan(
            str(recipe),
            [from_override("quality.pool", "bad.jsonl", "--"), from_override("select.bad_rows", how, "--")],
            data=recipe.parent,
        )
        for how in ("refuse", "skip")
    ]
    assert plans[0].pool.key != plans[1].pool.key
    with pytest.raises(UserError, match=r"select\.columns|text"):
        store_pool(tmp_path, plans[0].pool)
    found = store_pool(tmp_path, plans[1].pool)
    assert (found["skipped"], found["passages"]) == (1, 400)


def test_a_budget_above_the_pool_fails_that_selection_with_its_reason(made, tmp_path: Path) -> None:
    from benchmarks.studies.selection_quality.choosing import choose

    recipe, out, _ = made
    plan = Plan(str(recipe), [], data=recipe.parent)
    cell = dataclasses.replace(plan.selection("gotd", "science", 0), budgets=(10, 1000))
    with pytest.raises(UserError, match=r"a budget of 1,000 is above the pool's \d+ passages"):
        choose(out, cell)


# --------------------------------------------------------------------------------------------- what ships


@pytest.mark.parametrize("study", STUDIES)
def test_a_shipped_study_resolves_in_every_setting(study: str, tmp_path: Path) -> None:
    file = RECIPE.with_name(f"selection-{study}.yaml")
    found = load_recipe(str(file), recipe_type=StudyRecipe).recipe.quality
    assert found is not None and found.seeds >= 3 and found.unit == "tokens" and found.focus.endswith("cynical")
    assert {"random", "dsir", "cynical"} <= {n for n, a in found.arms.items() if a.source == "selector"}
    for name in (found.pool, *(target.file for target in found.targets.values())):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(lzma.compress(name.encode()))
    (tmp_path / found.tags).write_bytes(lzma.compress(b""))
    plan = Plan(str(file), [], data=tmp_path)
    steps = {
        plan.final("dsir", next(iter(found.targets)), b, 0, lr=0.01, fine_tune_lr=0.01).recipe.warmup.steps
        for b in found.budgets
    }
    assert steps == {budget // 1024 for budget in found.budgets}, "as many tokens as were chosen"
    keys = {plan.selection(a, t, 0).key for a in plan.arms_with_budget() for t in found.targets}
    assert len(keys) == len(plan.arms_with_budget()) * len(found.targets)


def test_a_study_is_part_of_the_resolved_recipe(made) -> None:
    recipe, out, _ = made
    again = load_recipe(str(out / "study.recipe.yaml"), recipe_type=StudyRecipe)
    assert dataclasses.asdict(again.recipe) == dataclasses.asdict(
        resolve_auto(load_recipe(str(recipe), recipe_type=StudyRecipe)).recipe
    )


def test_results_and_guide_come_from_the_document_alone(made) -> None:
    from benchmarks._harness import Benchmark
    from benchmarks._study_results import read
    from benchmarks.selection_quality import PAGE, folder, guide, marks, rows

    document = json.loads(json.dumps(made[2]))
    bench = Benchmark("selection_quality")
    rows(bench, document, bars={"matched": 9.0})
    row = next(row for row in bench.rows if row["what"].startswith("nats/token, gotd"))
    assert row["ours"] - row["peer"] == pytest.approx(document["arms"]["gotd"]["nats"]["value"])
    judged = {row["what"]: row for row in bench.rows if row["bar"]}
    assert set(judged) == {
        f"perplexity after gotd beside matched, mean of {len(document['targets'])} targets",
        "the worst target beside either of matched",
    }
    found = document["against"]["matched"]["nats"]
    assert next(iter(judged.values()))["ours"] == pytest.approx(math.expm1(found["value"]))
    text = guide(document, "quality")
    assert "| `gotd` |" in text and "| `matched` |" in text and all(s in text for s in document["answers"])
    assert "cells failed" not in text and "| 95 % with test rows |" in text
    assert "- 1 of " in guide({**document, "failed": [{}]}, "quality") and all(s in text for s in document["protocol"])
    page = PAGE.read_text(encoding="utf-8")
    for study in PUBLISHED:
        begin, end = marks(study)
        assert page.count(begin) == page.count(end) == 1
        written = guide(read(folder(study) / "quality.json"), study)
        assert written in page, f"run: python -m benchmarks.selection_quality --study {study}"


def test_a_part_and_a_stopped_run_are_not_published(made, monkeypatch, tmp_path: Path, capsys) -> None:
    import sys

    import benchmarks.selection_quality as benchmark
    from flatshift.finetune.errors import Interrupted

    page = tmp_path / "selection.md"
    page.write_text("before {}\nkept\n{} after".format(*benchmark.marks("quality")), encoding="utf-8")
    monkeypatch.setattr(benchmark, "PAGE", page)
    monkeypatch.setattr(benchmark, "folder", lambda study: tmp_path / "published")
    monkeypatch.setattr(benchmark.Benchmark, "finish", lambda self: pytest.fail("rows of a part were written"))
    out = str(tmp_path / "out")
    monkeypatch.setattr(sys, "argv", ["x", "--data", "DIR", "--out", out, "--selectors", "gotd"])
    monkeypatch.setattr(benchmark, "study_quality", lambda *a, **k: {**made[2], "missing": {"arms": ["all"]}})
    benchmark.main()
    assert (
        "until `python -m benchmarks.selection_quality --study quality --data DIR` has run every cell"
        in capsys.readouterr().out
    )

    def stopped(*a, **k):
        raise Interrupted("finished cells are kept")

    monkeypatch.setattr(benchmark, "study_quality", stopped)
    with pytest.raises(
        SystemExit,
        match=r"stopped: selection\.md .* `python -m benchmarks\.selection_quality --study quality --data DIR`",
    ):
        benchmark.main()
    assert "kept" in page.read_text(encoding="utf-8") and not (tmp_path / "published" / "quality.json").exists()


@pytest.mark.parametrize("study", PUBLISHED)
def test_the_page_of_published_results_is_drawn_on_demand(study, monkeypatch, tmp_path: Path) -> None:
    import sys

    import benchmarks.selection_quality as benchmark

    monkeypatch.setattr(sys, "argv", ["x", "--study", study, "--report", str(tmp_path / "page.html")])
    monkeypatch.setattr(benchmark, "study_quality", lambda *a, **k: pytest.fail("cells were run"))
    benchmark.main()
    assert "Primary endpoint" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_rates_of_some_targets_serve_all_and_plain_form_may_be_judged_alone(tmp_path: Path) -> None:
    recipe = make_study(tmp_path)
    text = recipe.read_text()
    target = next(iter(load_recipe(str(recipe), recipe_type=StudyRecipe).recipe.quality.targets))
    more = ("fine_tune: false", "form_after: true", "forgetting: true", "elsewhere: 7", "budgets:")
    recipe.write_text(text.replace("budgets:", "\n  ".join((f"tune_on: [{target}]", *more)), 1))
    document = study_quality(
        str(recipe), tmp_path / "o", data=tmp_path, jobs=1, quiet=True, selectors=("random", "gotd")
    )
    assert not document["failed"] and {row["target"] for row in document["trials"]} == {target}
    assert not cells(tmp_path / "o", "fine-tune trial")
    finals = cells(tmp_path / "o", "final")
    assert len({(cell["arm"], cell["lr"]) for cell in finals}) == len({cell["arm"] for cell in finals})
    for cell in finals:
        assert set(cell["seconds"]) == {"warm-up", "perplexity", "forgetting", "plain form"}
        assert cell["metrics"]["form_nats"] != cell["metrics"]["nats"] and "accuracy" not in cell["metrics"]
    assert any("There is no fine-tune" in sentence for sentence in document["protocol"])
    assert any("same 7 passages" in sentence for sentence in document["protocol"])
    with pytest.raises(UserError, match="tune_on: 'nothing' is no target"):
        Plan(str(recipe), [from_override("quality.tune_on", "[nothing]")], data=tmp_path)


@pytest.mark.slow
def test_budgets_in_tokens_are_read_through_and_plain_form_is_an_endpoint_of_its_own(tmp_path: Path) -> None:
    recipe = make_study(tmp_path)
    unit = "unit: tokens\n  form: true\n  forgetting: true\n  budgets: [48, 960]"
    text = recipe.read_text().replace("budgets: [10, 30]", unit)
    text = text.replace("primary_budget: 30", "primary_budget: 960").replace("[30]", "[960]")
    text = text.replace("gotd: {set: {select.method.kind: gotd}", "gotd: {set: {select.method.kind: moore-lewis}")
    twice = "    twice: {set: {select.method.kind: moore-lewis}, times: 2}\n    matched:"
    recipe.write_text(text.replace("    matched:", twice, 1))
    names = ("random", "gotd", "matched", "twice")
    document = study_quality(str(recipe), tmp_path / "o", data=tmp_path, jobs=1, quiet=True, selectors=names)
    assert document["unit"] == "tokens" and not document["failed"]
    for cell in cells(tmp_path / "o", "final"):
        # One or twenty steps of 2 rows of 24 tokens: no passage twice, hardly one left out.
        if cell["arm"] == "twice" and cell["budget"] == 960:
            assert 1.3 < cell["text"]["epochs"] <= 2.0
            continue
        assert cell["text"]["epochs"] == 1.0 and cell["text"]["tokens"] == cell["budget"]
        assert len({cell["metrics"][name] for name in ("nats", "form_nats", "pool_nats")}) == 3
    assert {cell["budget"] for cell in cells(tmp_path / "o", "final")} == {48, 960}
    for arm in ("gotd", "matched"):
        assert document["arms"][arm]["form_nats"]["n"] == document["arms"][arm]["pool_nats"]["n"] == 2
    page = (tmp_path / "o" / "report.html").read_text(encoding="utf-8")
    assert "in plain form" in page and "Forgetting:" in page and "reads 2 rows of 24 tokens" in page
