"""Comparison of the demo: what it would run, without running it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from flatshift.experiments.studies import demo
from flatshift.experiments.studies.compare.comparison_plan import ComparisonPlan
from flatshift.experiments.studies.compare.tuning import first_trials


def test_the_comparison_of_the_demo_can_run(tmp_path: Path) -> None:
    demo._write_task(tmp_path / "scicite.jsonl")
    plan = ComparisonPlan("warmup", demo._as_overrides(demo._COMPARISON), data=tmp_path, out=tmp_path / "comparison")
    plan.check()
    plan.read_rows(tmp_path / "comparison")
    rows, study = plan.rows("scicite"), plan.study
    assert len(rows.train) >= study.tasks["scicite"].train and len(rows.validation) == len(rows.test) == 60
    cells = {
        run.cell.key: run.cell.resolved.recipe
        for method, task in plan.pairs
        for setting in first_trials(study, study.methods[method])[:1]
        for run in [
            *(plan.run("trial", method, task, seed, each) for seed in study.tuning_seeds for each in
              first_trials(study, study.methods[method])),
            *(plan.run("final", method, task, seed, setting) for seed in study.seeds_of(method)),
        ]
    }  # fmt: skip
    assert len(cells) == 16
    methods = Counter(
        (recipe.regularizer.kind, recipe.warmup and recipe.select and recipe.select.method.kind)
        for recipe in cells.values()
    )
    assert methods == dict.fromkeys([("plain", None), ("ggpo", None), ("plain", "random"), ("plain", "gotd")], 4)
