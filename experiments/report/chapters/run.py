"""Results of a training run: its evaluation, the shift by the warm-up, and the curves of its stages."""

from __future__ import annotations

from typing import Any

from flatshift.experiments.report import formats
from flatshift.experiments.report.blocks import (
    Bars,
    Block,
    ChapterPart,
    ChartGroup,
    KeyFigure,
    Notes,
    SearchableTable,
    Section,
    Table,
)
from flatshift.experiments.report.charts import training as training_charts
from flatshift.experiments.results.predictions import RunEvaluation, metric_differences
from flatshift.experiments.results.run import RunResults, best_split, headline_metric
from flatshift.finetune.evaluate.metrics import find_metric, tile_metrics
from flatshift.finetune.figures import compare_plan, format_bytes, format_throughput
from flatshift.finetune.run_directory import SPIKE

_UNFOLDED = ("lr-", "grad-norm-")
"""Per-step charts that are shown unfolded; the others open on demand."""


def part(run: RunResults) -> ChapterPart | None:
    """Return the part for a directory of `flatshift train`."""
    if not (run.metrics.lines or run.eval or run.stages):
        return None
    sections = [*_evaluation_sections(run), _data_section(run), *training_sections(run)]
    training = ", ".join(run.split_files("train")) or "the training files"
    files = {split: run.split_files(split) for split in ("test", "dev") if split in run.eval}
    facts = [(f"{split} rows", ", ".join(names) or f"held out of {training}") for split, names in files.items()]
    return ChapterPart("training run", [_finding(run)], _tiles(run), sections, facts)


def _finding(run: RunResults) -> str:
    """Return a sentence on the headline metric, compared with the majority baseline if there is one."""
    split = best_split(run.eval)
    if split is None:
        steps = max((ln["step"] for ln in run.metrics.lines), default=0)
        return f"Not evaluated yet; {steps:,} steps logged." if steps else ""
    metric = headline_metric(run.eval[split])
    if metric is None:
        return ""
    cell = run.eval[split][metric]
    sentence = f"{split.capitalize()} {find_metric(metric).title} is {formats.with_interval(cell)}"
    floor = run.eval[split].get("majority_floor", {}).get("value")
    if metric == "accuracy" and floor is not None:
        low, high = cell.get("low"), cell.get("high")
        side = "which is not clearly different from"
        if low is not None and low > floor:
            side = "above"
        elif high is not None and high < floor:
            side = "below"
        sentence += f", {side} the majority baseline of {formats.number(floor)}"
    return sentence + "."


def _tiles(run: RunResults) -> list[KeyFigure]:
    tiles = []
    split = best_split(run.eval)
    if split is not None:
        cells = run.eval[split]
        for metric in tile_metrics(cells)[:2]:
            notes = [f"{cells[metric]['n']:,} items"] if cells[metric].get("n") else []
            floor = find_metric(metric).floor or ""
            if (value := cells.get(floor, {}).get("value")) is not None:
                notes.insert(0, f"{find_metric(floor).title} {formats.number(value)}")
            estimate = formats.estimate_figure(cells[metric])
            tiles.append(KeyFigure(f"{split} {find_metric(metric).title}", *estimate, ", ".join(notes)))
    before, after = run.shift
    split = best_split(before)
    for metric in ("perplexity", "pseudo_perplexity"):
        if split and metric in before[split] and metric in after.get(split, {}):
            note = f"base model without adapter {formats.estimate_figure(before[split][metric])[0]}"
            name = f"target {find_metric(metric).title} after warm-up"
            tiles.append(KeyFigure(name, *formats.estimate_figure(after[split][metric]), note))
    for stage, done in run.stages.items():
        if done.get("steps") and stage != "warm-up":
            notes, attempts = [], done.get("attempts", 1)
            if done.get("best_dev_loss") is not None:
                figures = [("accuracy", done.get("best_accuracy")), ("loss", done["best_dev_loss"])]
                best = [f"{name} {formats.number(float(value))}" for name, value in figures if value is not None]
                notes.append(f"best on dev after {done.get('best_step')} ({', '.join(best)})")
            if done.get("stopped_early"):
                notes.append(f"stopped early, {done.get('target_steps', 0):,} asked for")
            if attempts > 1:
                notes.append(f"in {attempts} attempts")
            tiles.append(KeyFigure(f"{stage} steps", formats.number(int(done["steps"])), "", ", ".join(notes)))
    return tiles


def _evaluation_sections(run: RunResults) -> list[Section]:
    sections = []
    if run.eval:
        charts = training_charts.evaluation_charts(run.eval, loss_unit=run.loss_unit("fine-tune"))
        sections.append(Section("Evaluation", [ChartGroup(charts), _metric_table(run.eval)]))
    for split, cold in run.cold.items():
        table = _baseline_comparison(run, split, cold)
        sections.append(Section("Compared with the base model without adapter", [table]))
    before, after = run.shift
    rows = []
    for split in before:
        for metric in ("perplexity", "bits_per_byte", "pseudo_perplexity"):
            if metric in before[split] and metric in after.get(split, {}):
                base, warm = before[split][metric], after[split][metric]
                change = warm["value"] / base["value"] - 1
                rows.append(
                    {
                        "split": split,
                        "metric": find_metric(metric).title,
                        "base model without adapter": formats.with_interval(base),
                        "after warm-up": formats.with_interval(warm),
                        "change": ("+" if change > 0 else "") + formats.percent(change),
                    }
                )
    if rows:
        lead = "How far the warm-up moved the backbone towards the target's own texts, labels unseen."
        caption = "Both are evaluated on the same rows; intervals are of each, not of the difference."
        sections.append(Section("The warm-up's shift", [Table.of(rows, caption, words=("split", "metric"))], lead))
    return sections


def _baseline_comparison(run: RunResults, split: str, cold: RunEvaluation) -> Table | None:
    """Tabulate what the adapter changed, on the rows that the base model was evaluated on too."""
    differences = metric_differences(run.split_evaluation(split), cold)
    paired = {name: difference for name, difference in differences.items() if difference.paired}
    if not paired:
        return None
    rows = [
        {
            "metric": find_metric(name).title,
            "backbone": formats.with_interval(cold.metrics[name]),
            "with the adapter, minus that": formats.with_interval(difference, plus=True),
        }
        for name, difference in paired.items()
    ]
    count = max(difference.n for difference in paired.values())
    caption = (
        f"The first {count:,} rows of {split}; the difference is paired: both are asked about the same draws of rows."
    )
    return Table.of(rows, caption, words=("metric",))


def _metric_table(tree: dict[str, dict[str, dict[str, Any]]]) -> Table:
    """Tabulate metrics (rows) by split (columns); a baseline is below its metric."""
    rows = []
    for metric in dict.fromkeys(m for cells in tree.values() for m in cells if not find_metric(m).is_floor):
        rows.append([find_metric(metric).title, *(formats.with_interval(cells.get(metric)) for cells in tree.values())])
        floor = find_metric(metric).floor or ""
        if any(cells.get(floor) for cells in tree.values()):
            values = [float(cells[floor]["value"]) if cells.get(floor) else None for cells in tree.values()]
            rows.append([find_metric(floor).title, *map(formats.number, values)])
    counts = [max((int(c.get("n") or 0) for c in cells.values()), default=0) for cells in tree.values()]
    rows.append(["items", *(formats.number(n) if n else "–" for n in counts)])
    note = "Intervals are over items; they say nothing about other seeds."
    return Table(["metric", *tree], rows, note, frozenset(range(1, len(tree) + 1)))


def training_sections(run: RunResults) -> list[Section]:
    curves = training_charts.loss_charts(run.metrics, loss_unit=run.loss_unit)
    if not curves:
        return []
    small = training_charts.small_multiples(run.metrics)
    unfolded = [chart for chart in small if chart.name.startswith(_UNFOLDED)]
    folded = [chart for chart in small if chart not in unfolded]
    notes = []
    if run.metrics.unreadable:
        notes.append(f"{run.metrics.unreadable} torn lines of metrics.jsonl were left out (a writer was killed there).")
    notes += _incident_notes(run)
    attempts = {ln.get("attempt") for ln in run.metrics.lines if ln.get("attempt") is not None}
    if len(attempts) > 1:
        notes.append(
            f"The run was resumed or went back: {len(attempts)} attempts; where steps overlap, the last one is shown."
        )
    charts = [curves, training_charts.preference_charts(run.metrics)]
    groups = [*map(ChartGroup, charts), ChartGroup(unfolded, small=True)]
    counters = Section("Counters of the regularizer and the machine", [ChartGroup(folded, small=True)], folded=True)
    return [Section("Training", [*groups, Notes(notes)]), _plan_section(run), counters]


def _plan_section(run: RunResults) -> Section:
    """Compare predicted with measured step time and memory; bars of memory by cause for each stage."""
    blocks: list[Block] = []
    for stage, done in run.stages.items():
        plan = done.get("plan")
        if not isinstance(plan, dict) or not isinstance(plan.get("bytes"), dict):
            continue
        largest = max(plan["bytes"].values(), default=0) or 1
        blocks.append(Bars([(f"{stage}: {cause}", format_bytes(n), n / largest) for cause, n in plan["bytes"].items()]))
        if text := compare_plan(plan):
            blocks.append(Notes([f"{stage}: {text}."]))
    lead = (
        "Bars are the plan's bytes by cause. Measured on a CUDA device is what its allocator gave out in steps; on a "
        "CPU, how much the process's own memory grew in them, sampled, so weights and adapter are not in it."
    )
    return Section("Predicted and measured", blocks, lead)


def _data_section(run: RunResults) -> Section:
    """Return the classes and the findings of the data check before step 1."""
    checks = run.manifest.get("checks", {})
    blocks: list[Block] = []
    if findings := checks.get("findings"):
        rows = [[str(finding["text"]), "; ".join(finding["examples"][:3])] for finding in findings]
        blocks.append(Table(["found", "examples"], rows))
    if counts := checks.get("classes"):
        rows = [[name, f"{count:,}"] for name, count in counts.items()]
        blocks.append(SearchableTable(["class", "training rows"], rows, numeric=frozenset({1})))
    lead = "What the check of the rows found before step 1 (data.checks)." if findings else ""
    return Section("Rows", blocks, lead)


def _incident_notes(run: RunResults) -> list[str]:
    """Return sentences on skipped steps, on rollbacks after loss spikes, and on each stage's throughput."""
    notes = []
    for stage, done in run.stages.items():
        if done.get("skipped"):
            notes.append(f"{stage}: {done['skipped']} steps were skipped, as their loss or gradient was not finite.")
        for line in run.metrics.lines:
            if line["split"] == SPIKE and line["stage"] == stage and isinstance(line.get("rewound_to"), int):
                skipped = ", ".join(f"{start} to {stop - 1}" for start, stop in line.get("left_out") or [])
                notes.append(
                    f"{stage}: after a loss spike in step {line['step']} it rolled back to step "
                    f"{line['rewound_to']}; batches {skipped} are left out."
                )
        rates = done.get("rates")
        if isinstance(rates, dict) and (text := format_throughput(rates)):
            hfu = f", {100 * rates['hfu']:.0f} % with recomputation" if "hfu" in rates else ""
            notes.append(f"{stage}: {text}{hfu} (of the last attempt, without its first step).")
    return notes
