"""Run a comparison: trials, further rounds, final runs, equal-time runs, and the analysis; resumable.

Intermediate decisions (best settings, steps at equal time) are computed from the results, so a restart repeats them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from flatshift.experiments.recipe.schema import ExecutorOptions, short_hash
from flatshift.experiments.recipe.tree import Branch
from flatshift.experiments.run.console import Console
from flatshift.experiments.studies.compare import tuning
from flatshift.experiments.studies.compare.analysis import analyse
from flatshift.experiments.studies.compare.comparison_plan import (
    ComparisonPlan,
    ComparisonResults,
    ComparisonRun,
    Kind,
    Pair,
    Result,
)
from flatshift.experiments.studies.executors import Executor
from flatshift.experiments.studies.executors.local import LocalExecutor
from flatshift.experiments.studies.queue import open_executor, parse_executor
from flatshift.experiments.studies.study import CellBatches, claim_study, run_study_cells
from flatshift.finetune.atomic import read_json_object, write_json
from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate.metrics import find_metric

_EQUAL_TIME = "equal_time.json"


def run_study(plan: ComparisonPlan, out: Path, executor: Executor, *, console: Console) -> ComparisonResults:
    """Run cells without a result and gather all results.
    Raises UserError if `out`, locked by the caller, holds something else."""
    plan.check()
    plan.read_rows(out)
    for task in plan.study.tasks:
        if skipped := plan.rows(task).skipped:
            console.say(f"{task}: skipped {len(skipped):,} bad rows, first {skipped[0]}")
    claim_study(out, plan.resolved.to_yaml(), "comparison")
    plan.write_rows()
    batches = CellBatches(out, executor, console=console, label="compare")
    outcome = ComparisonResults()
    _tune_methods(plan, batches, outcome)
    study = plan.study

    def runs(kind: Kind, pair: Pair, steps: int | None = None) -> list[ComparisonRun]:
        return [plan.run(kind, *pair, seed, outcome.chosen[pair], steps=steps) for seed in study.seeds_of(pair[0])]

    finals = {pair: runs("final", pair) for pair in plan.pairs}
    outcome.finals = _run_groups(batches, finals, "final runs")
    outcome.step_ratio = step_ratios(plan, outcome)
    shorter = {
        pair: runs("equal-time", pair, steps)
        for pair in plan.pairs
        if (steps := _equal_steps(plan, out, outcome, pair)) is not None
    }
    outcome.equal_time = _run_groups(batches, shorter, "runs at equal time")
    return outcome


def run_result(batches: CellBatches, run: ComparisonRun) -> Result:
    """Return the outcome of a run: metrics on the evaluation rows together with those of `ComparisonProbe`."""
    result = batches.result(run.cell)
    metadata = {"kind": run.kind, "method": run.method, "task": run.task, "seed": run.seed, "steps": run.steps}
    metadata["setting"] = run.setting.overrides()
    metrics = {name: figure["value"] for name, figure in result["metrics"].get("test", {}).items()}
    outcome = {"status": result["status"], "reason": result["reason"], "metrics": metrics}
    unmeasured = {"items": None, "sharpness": None, "step_cpu_s": None, "cpu_s": 0.0}
    return metadata | outcome | unmeasured | (result.get("figures") or {})


def _run_groups(
    batches: CellBatches, groups: Mapping[Pair, Sequence[ComparisonRun]], title: str
) -> dict[Pair, list[Result]]:
    batches.run([run.cell for runs in groups.values() for run in runs], title)
    return {pair: [run_result(batches, run) for run in runs] for pair, runs in groups.items()}


def _tune_methods(plan: ComparisonPlan, batches: CellBatches, outcome: ComparisonResults) -> None:
    study = plan.study

    def trial(pair: Pair, setting: tuning.TrialSetting) -> ComparisonRun:
        return plan.run("trial", *pair, study.tuning_seeds[0], setting)

    grids = {
        pair: {setting: trial(pair, setting) for setting in tuning.first_trials(study, study.methods[pair[0]])}
        for pair in plan.pairs
    }
    batches.run([run.cell for grid in grids.values() for run in grid.values()], "first trials")
    for turn in range(study.rounds):
        new = {}
        for pair, grid in grids.items():
            setting = tuning.next_trial(_score_grid(batches, plan, grid))
            new[pair] = grid[setting] = trial(pair, setting)
        batches.run([run.cell for run in new.values()], f"further trials, round {turn + 1}")
    finalists = {
        pair: {
            setting: [plan.run("trial", *pair, seed, setting) for seed in study.tuning_seeds]
            for setting in tuning.select_finalists(_score_grid(batches, plan, grid), study.finalists)
        }
        for pair, grid in grids.items()
    }
    further = {pair: [run for runs in settings.values() for run in runs[1:]] for pair, settings in finalists.items()}
    batches.run([run.cell for runs in further.values() for run in runs], "finalists")
    for pair, grid in grids.items():
        means = {
            setting: tuning.mean_score([score_trial(run_result(batches, run), plan.metric(pair[1])) for run in runs])
            for setting, runs in finalists[pair].items()
        }
        best = tuning.best_trial(means)
        outcome.trials[pair] = [(run, run_result(batches, run)) for run in [*grid.values(), *further[pair]]]
        if best is None:
            undefined = f"{plan.metric(pair[1])} is undefined on the rows of comparison.tasks.{pair[1]}.validation"
            reason = next((r["reason"] for _, r in outcome.trials[pair] if r["status"] != "done"), undefined)
            raise UserError(
                f"every trial of {pair[0]} on {pair[1]} failed, or every finalist under one of the tuning seeds, for "
                f"example: {reason}"
            )
        outcome.chosen[pair] = best
        outcome.on_edge[pair] = tuning.is_on_edge(grid, best)


def _score_grid(
    batches: CellBatches, plan: ComparisonPlan, grid: Mapping[tuning.TrialSetting, ComparisonRun]
) -> dict[tuning.TrialSetting, tuning.TrialScore]:
    return {setting: score_trial(run_result(batches, run), plan.metric(run.task)) for setting, run in grid.items()}


def score_trial(result: Result, metric: str) -> tuning.TrialScore:
    """Return the score of a trial by `metric`; an undefined value (a correlation of equal numbers) counts as failed."""
    if result["status"] != "done":
        return tuning.FAILED
    metrics = result["metrics"]
    value = metrics[metric]
    if value is None:
        return tuning.FAILED
    return tuning.TrialScore(-value if find_metric(metric).lower else value, metrics["loss"])


def step_ratios(plan: ComparisonPlan, outcome: ComparisonResults) -> dict[str, float]:
    """Return the median ratio of a step's CPU time to the baseline's on the same task and seed, by method."""
    base = plan.study.baseline
    medians = {}
    for method in plan.study.methods:
        ratios = [
            ours["step_cpu_s"] / peer["step_cpu_s"]
            for task in plan.study.runs_on(method)
            for ours, peer in zip(outcome.finals[method, task], outcome.finals[base, task], strict=False)
            if ours.get("step_cpu_s") and peer.get("step_cpu_s")
        ]
        if ratios:
            medians[method] = median(ratios)
    return medians


def _equal_steps(plan: ComparisonPlan, out: Path, outcome: ComparisonResults, pair: Pair) -> int | None:
    """Return the steps of a method in the baseline's time; None if its step costs about the same. The measured ratio is
    stored in equal_time.json, so that rerun cells do not change it, for the settings whose steps were measured."""
    method, task = pair
    file = out / _EQUAL_TIME
    ratios: dict[str, float] = read_json_object(file, fix="delete it") if file.is_file() else {}
    if method not in outcome.step_ratio:
        return None
    sides = [[plan.study.methods[name].set, vars(outcome.chosen[name, on])]
             for name in (method, plan.study.baseline) for on in plan.study.runs_on(method)]  # fmt: skip
    key = f"{method} {short_hash(sides)}"
    if key not in ratios:
        ratios[key] = round(outcome.step_ratio[method], 2)
        write_json(file, ratios)
    if ratios[key] <= plan.study.equal_time_above:
        return None
    return max(1, round(plan.steps(task) / ratios[key]))


DOCUMENT = "comparison.json"


def compare(
    recipe: str,
    out: Path,
    *,
    data: Path | None = None,
    overrides: Sequence[Branch] = (),
    methods: Sequence[str] = (),
    tasks: Sequence[str] = (),
    jobs: int | None = None,
    execution: ExecutorOptions | None = None,
    quiet: bool = False,
    page: Callable[[dict[str, Any]], str] | None = None,
) -> dict[str, Any]:
    """Run the comparison of `recipe` into `out` and return the contents of comparison.json.

    recipe: file or shipped name with a `comparison` block. data: directory of the tasks' files. methods, tasks: only
    these (the baseline always); empty: all. jobs: cells at the same time, one thread each; by default 2 here, and as
    many as a cluster has room for. execution: where cells run; None: here. page: draws report.html of the
    document. Raises UserError for bad input, before any cell runs; Interrupted when stopped: the same call resumes.
    """
    processes, execution = 2 if jobs is None else jobs, execution or ExecutorOptions()
    parse_executor(execution)

    def measure(plan: ComparisonPlan, console: Console) -> dict[str, Any]:
        with open_executor(execution, LocalExecutor(processes, own_threads=1), jobs=jobs) as executor:
            return analyse(plan, run_study(plan, out, executor, console=console))

    def plan() -> ComparisonPlan:
        return ComparisonPlan(recipe, overrides, data=data, out=out, methods=methods, tasks=tasks)

    options: dict[str, Any] = {"jobs": processes, "quiet": quiet, "inputs": (_EQUAL_TIME,)}
    command = f"flatshift compare {recipe}"
    return run_study_cells(command, out, DOCUMENT, plan=plan, measure=measure, page=page, **options)
