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
from flatshift.experiments.report.charts.training import (
    evaluation_charts,
    loss_charts,
    preference_charts,
    small_multiples,
)
from flatshift.experiments.results.predictions import RunEvaluation, metric_differences
from flatshift.experiments.results.run import RunResults, best_split, headline_metric
from flatshift.finetune.evaluate.metrics import find_metric, tile_metrics
from flatshift.finetune.figures import compare_plan, format_bytes, format_throughput
from flatshift.finetune.run_directory import SPIKE

_FIRST = ("lr-", "grad-norm-")
"""Per-step charts that are shown unfolded; the others open on demand."""


def part(run: RunResults) -> ChapterPart | None:
    """Return the part for a directory of `flatshift train`."""
    if not (run.metrics.lines or run.eval or run.stages):
        return None
    sections = [*evaluation_sections(run), *data_sections(run), *training_sections(run)]
    return ChapterPart("training run", [train_finding(run)], training_tiles(run), sections)


def train_finding(run: RunResults) -> str:
    """Return a sentence on the headline metric, compared with the majority baseline if there is one."""
    split = best_split(run.eval)
    if split is None:
        steps = max((ln["step"] for ln in run.metrics.lines), default=0)
        return f"Not evaluated yet; {steps:,} steps logged." if steps else ""
    metric = headline_metric(run.eval[split])
    if metric is None:
        return ""
    cell = run.eval[split][metric]
    value = formats.with_interval(cell)
    sentence = f"{split.capitalize()} {find_metric(metric).title} is {value}"
    floor = run.eval[split].get("majority_floor", {}).get("value")
    if metric == "accuracy" and floor is not None:
        low, high = cell.get("low"), cell.get("high")
        if low is not None and low > floor:
            sentence += f", above the majority baseline of {formats.number(floor)}"
        elif high is not None and high < floor:
            sentence += f", below the majority baseline of {formats.number(floor)}"
        else:
            sentence += f", which is not clearly different from the majority baseline of {formats.number(floor)}"
    return sentence + "."


def training_tiles(run: RunResults) -> list[KeyFigure]:
    tiles = []
    split = best_split(run.eval)
    if split is not None:
        cells = run.eval[split]
        shown = tile_metrics(cells)
        for metric in shown[:2]:
            value, interval = formats.estimate(
                cells[metric]["value"], cells[metric].get("low"), cells[metric].get("high")
            )
            note = f"{cells[metric]['n']:,} items" if cells[metric].get("n") else ""
            floor = cells.get(find_metric(metric).floor or "", {}).get("value")
            if floor is not None:
                named = find_metric(find_metric(metric).floor or "").title
                note = ", ".join(filter(None, [f"{named} {formats.number(floor)}", note]))
            tiles.append(KeyFigure(f"{split} {find_metric(metric).title}", value, interval, note))
    before, after = run.shift
    split = best_split(before)
    for metric in ("perplexity", "pseudo_perplexity"):
        if not (split and metric in before[split] and metric in after.get(split, {})):
            continue
        cell = after[split][metric]
        value, interval = formats.estimate(cell["value"], cell.get("low"), cell.get("high"))
        cold = before[split][metric]
        shown_cold = formats.estimate(cold["value"], cold.get("low"), cold.get("high"))[0]
        name = f"target {find_metric(metric).title} after warm-up"
        tiles.append(KeyFigure(name, value, interval, f"base model without adapter {shown_cold}"))
    for stage, done in run.stages.items():
        if done.get("steps") and stage != "warm-up":
            asked, attempts = done.get("target_steps", 0), done.get("attempts", 1)
            notes = [f"stopped early, {asked:,} asked for"] if done.get("stopped_early") else []
            note = ", ".join([*notes, *([f"in {attempts} attempts"] if attempts > 1 else [])])
            if done.get("best_dev_loss") is not None:
                figures = [("accuracy", done.get("best_accuracy")), ("loss", done["best_dev_loss"])]
                best = ", ".join(
                    f"{name} {formats.number(float(value))}" for name, value in figures if value is not None
                )
                note = f"best on dev after {done.get('best_step')} ({best})" + (f", {note}" if note else "")
            tiles.append(KeyFigure(f"{stage} steps", formats.number(int(done["steps"])), "", note))
    return tiles


def evaluation_sections(run: RunResults) -> list[Section]:
    found = []
    if run.eval:
        found.append(
            Section(
                "Evaluation",
                [
                    ChartGroup(evaluation_charts(run.eval, loss_unit=run.loss_unit("fine-tune"))),
                    _metric_table(run.eval),
                ],
            )
        )
    for split, cold in run.cold.items():
        table = _baseline_comparison(run, split, cold)
        found += [Section("Compared with the base model without adapter", [table])] if table is not None else []
    before, after = run.shift
    if before and after:
        rows = []
        for split in before:
            for metric in ("perplexity", "bits_per_byte", "pseudo_perplexity"):
                if metric in before[split] and metric in after.get(split, {}):
                    pair = [before[split][metric], after[split][metric]]
                    cells = [formats.with_interval(c) for c in pair]
                    change = pair[1]["value"] / pair[0]["value"] - 1
                    rows.append(
                        {
                            "split": split,
                            "metric": find_metric(metric).title,
                            "base model without adapter": cells[0],
                            "after warm-up": cells[1],
                            "change": ("+" if change > 0 else "") + formats.percent(change),
                        }
                    )
        lead = "How far the warm-up moved the backbone towards the target's own texts, labels unseen."
        caption = "Both are evaluated on the same rows; bootstrap intervals are of each, not of the difference."
        table = Table.of(rows, caption, words=("split", "metric"))
        if rows:
            found.append(Section("The warm-up's shift", [table], lead))
    return found


def _baseline_comparison(run: RunResults, split: str, cold: RunEvaluation) -> Table | None:
    """Tabulate what the adapter changed, on the rows that the base model was evaluated on too."""
    changed = {name: one for name, one in metric_differences(run.judged(split), cold).items() if one.paired}
    if not changed:
        return None
    rows = []
    for name, one in changed.items():
        shown, interval = formats.estimate(one.value, one.low, one.high, plus=True)
        rows.append(
            {
                "metric": find_metric(name).title,
                "backbone": formats.with_interval(cold.metrics[name]),
                "with the adapter, minus that": f"{shown} ({interval})" if interval else shown,
            }
        )
    count = max(one.n for one in changed.values())
    caption = (
        f"The first {count:,} rows of {split}; the difference is paired: both are asked about the same draws of rows."
    )
    return Table.of(rows, caption, words=("metric",))


def _metric_table(tree: dict[str, dict[str, dict[str, Any]]]) -> Table:
    """Tabulate metrics (rows) by split (columns); a baseline is below its metric."""
    rows = []
    for metric in dict.fromkeys(m for cells in tree.values() for m in cells if not find_metric(m).is_floor):
        cells = [tree[split].get(metric) for split in tree]
        shown = [formats.with_interval(cell) for cell in cells]
        rows.append([find_metric(metric).title, *shown])
        floors = [tree[split].get(find_metric(metric).floor or "") for split in tree]
        if any(floors):
            named = find_metric(find_metric(metric).floor or "").title
            rows.append([named, *(formats.number(float(f["value"])) if f else "–" for f in floors)])
    counts = [max((int(c.get("n") or 0) for c in cells.values()), default=0) for cells in tree.values()]
    rows.append(["items", *(formats.number(n) if n else "–" for n in counts)])
    note = "Bootstrap intervals over items; they say nothing about other seeds."
    return Table(["metric", *tree], rows, note, frozenset(range(1, len(tree) + 1)))


def training_sections(run: RunResults) -> list[Section]:
    curves, small = loss_charts(run.metrics, loss_unit=run.loss_unit), small_multiples(run.metrics)
    if not curves:
        return []
    notes = []
    if run.metrics.unreadable:
        notes.append(f"{run.metrics.unreadable} torn lines of metrics.jsonl were left out (a writer was killed there).")
    notes += _incident_notes(run)
    attempts = {ln.get("attempt") for ln in run.metrics.lines if ln.get("attempt") is not None}
    if len(attempts) > 1:
        notes.append(
            f"The run was resumed or went back: {len(attempts)} attempts; where steps overlap, the last one is shown."
        )
    blocks: list[Block] = [ChartGroup(curves)]
    if rewards := preference_charts(run.metrics):
        blocks.append(ChartGroup(rewards))
    first = [chart for chart in small if chart.name.startswith(_FIRST)]
    if first:
        blocks.append(ChartGroup(first, small=True))
    if notes:
        blocks.append(Notes(notes))
    found = [Section("Training", blocks)]
    found += _plan_sections(run)
    if rest := [chart for chart in small if chart not in first]:
        found.append(
            Section("Counters of the regularizer and the machine", [ChartGroup(rest, small=True)], folded=True)
        )
    return found


def _plan_sections(run: RunResults) -> list[Section]:
    """Compare predicted with measured step time and memory; bars of memory by cause for each stage."""
    blocks: list[Block] = []
    for stage, done in run.stages.items():
        plan = done.get("plan")
        if not isinstance(plan, dict) or not isinstance(plan.get("bytes"), dict):
            continue
        most = max(plan["bytes"].values(), default=0) or 1
        blocks.append(Bars([(f"{stage}: {cause}", format_bytes(n), n / most) for cause, n in plan["bytes"].items()]))
        if text := compare_plan(plan):
            blocks.append(Notes([f"{stage}: {text}."]))
    lead = (
        "Bars are the plan's bytes by cause. Measured on a CUDA device is what its allocator gave out in steps; on a "
        "CPU, how much the process's own memory grew in them, sampled, so weights and adapter are not in it."
    )
    return [Section("Predicted and measured", blocks, lead)] if blocks else []


def data_sections(run: RunResults) -> list[Section]:
    """Return the classes and the findings of the data check before step 1."""
    checks = run.manifest.get("checks")
    if not isinstance(checks, dict):
        return []
    blocks: list[Block] = []
    if found := checks.get("findings"):
        rows = [{"found": str(one["text"]), "examples": "; ".join(one["examples"][:3])} for one in found]
        blocks.append(Table.of(rows, words=("found", "examples")))
    if counts := checks.get("classes"):
        blocks.append(
            SearchableTable(["class", "training rows"], [[n, f"{c:,}"] for n, c in counts.items()], frozenset({1}))
        )
    lead = "What the check of the rows found before step 1 (data.checks)." if found else ""
    return [Section("Rows", blocks, lead)] if blocks else []


def _incident_notes(run: RunResults) -> list[str]:
    """Return sentences on skipped steps, on rollbacks after loss spikes, and on each stage's throughput."""
    found = []
    for stage, done in run.stages.items():
        if done.get("skipped"):
            found.append(f"{stage}: {done['skipped']} steps were skipped, as their loss or gradient was not finite.")
        for line in run.metrics.lines:
            if line["split"] == SPIKE and line["stage"] == stage and isinstance(line.get("rewound_to"), int):
                gone = ", ".join(f"{first} to {stop - 1}" for first, stop in line.get("left_out") or [])
                found.append(
                    f"{stage}: after a loss spike in step {line['step']} it rolled back to step "
                    f"{line['rewound_to']}; batches {gone} are left out."
                )
        rates = done.get("rates")
        if isinstance(rates, dict) and (text := format_throughput(rates)):
            hfu = f", HFU {100 * rates['hfu']:.0f} %" if "hfu" in rates else ""
            found.append(f"{stage}: {text}{hfu} (of the last attempt, without its first step).")
    return found
