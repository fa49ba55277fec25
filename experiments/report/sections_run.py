"""Sections and key figures of a training run and of a selection."""

from __future__ import annotations

from typing import Any

from experiments.report import findings, formats, plots_run
from experiments.report.blocks import Block, Card, Cards, Figures, Notes, Pairs, Section, Table, Tile
from experiments.report.load import Run, Selection
from finetune.figures import rate_text
from finetune.run_directory import SPIKE

_TILES = (
    "accuracy", "f1_micro", "spearman", "exact_match", "rmse", "chrf", "perplexity", "pseudo_perplexity", "f1_macro",
    "bits_per_byte", "loss",
)  # fmt: skip


def training_tiles(run: Run) -> list[Tile]:
    tiles = []
    split = findings.best_split(run.eval)
    if split is not None:
        cells = run.eval[split]
        shown = [m for m in _TILES if m in cells]
        for metric in shown[:2]:
            value, interval = formats.estimate(
                cells[metric]["value"], cells[metric].get("low"), cells[metric].get("high")
            )
            note = f"{cells[metric]['n']:,} items" if cells[metric].get("n") else ""
            floor = cells.get(formats.FLOORS.get(metric, ""), {}).get("value")
            if floor is not None:
                named = formats.FLOOR_NAMES[formats.FLOORS[metric]]
                note = ", ".join(filter(None, [f"{named} {formats.number(floor)}", note]))
            tiles.append(Tile(f"{split} {formats.metric_name(metric)}", value, interval, note))
    before, after = run.shift
    split = findings.best_split(before)
    for metric in ("perplexity", "pseudo_perplexity"):
        if not (split and metric in before[split] and metric in after.get(split, {})):
            continue
        cell = after[split][metric]
        value, interval = formats.estimate(cell["value"], cell.get("low"), cell.get("high"))
        cold = before[split][metric]
        shown_cold = formats.estimate(cold["value"], cold.get("low"), cold.get("high"))[0]
        name = f"target {formats.metric_name(metric)} after warm-up"
        tiles.append(Tile(name, value, interval, f"cold backbone {shown_cold}"))
    for stage, done in run.stages.items():
        if done.get("steps") and stage != "warm-up":
            note = "stopped early" if done.get("stopped_early") else ""
            if done.get("best_dev_loss") is not None:
                figures = [("accuracy", done.get("best_accuracy")), ("loss", done["best_dev_loss"])]
                best = ", ".join(
                    f"{name} {formats.number(float(value))}" for name, value in figures if value is not None
                )
                note = f"best on dev after {done.get('best_step')} ({best})" + (f", {note}" if note else "")
            tiles.append(Tile(f"{stage} updates", formats.number(int(done["steps"])), "", note))
    return tiles


def evaluation_sections(run: Run) -> list[Section]:
    found = []
    if run.eval:
        found.append(
            Section(
                "Evaluation",
                [
                    Figures(plots_run.evaluation(run.eval, loss_unit=run.loss_unit("fine-tune"))),
                    _metric_table(run.eval),
                ],
            )
        )
    before, after = run.shift
    if before and after:
        rows = []
        for split in before:
            for metric in ("perplexity", "bits_per_byte", "pseudo_perplexity"):
                if metric in before[split] and metric in after.get(split, {}):
                    pair = [before[split][metric], after[split][metric]]
                    cells = [findings.with_interval(c["value"], c.get("low"), c.get("high")) for c in pair]
                    change = pair[1]["value"] / pair[0]["value"] - 1
                    rows.append(
                        [
                            split,
                            formats.metric_name(metric),
                            *cells,
                            ("+" if change > 0 else "") + formats.percent(change),
                        ]
                    )
        lead = "How far the warm-up moved the backbone towards the target's own texts, labels unseen."
        table = Table(
            ["split", "metric", "cold backbone", "after warm-up", "change"],
            rows,
            "Both are judged on the same rows; intervals are bootstrap intervals of each, not of the difference.",
            frozenset({2, 3, 4}),
        )
        if rows:
            found.append(Section("The warm-up's shift", [table], lead))
    return found


def _metric_table(tree: dict[str, dict[str, dict[str, Any]]]) -> Table:
    """Metrics down, splits across; a floor below the metric it belongs to."""
    rows = []
    for metric in dict.fromkeys(m for cells in tree.values() for m in cells if m not in formats.FLOOR_NAMES):
        cells = [tree[split].get(metric) for split in tree]
        shown = [findings.with_interval(c["value"], c.get("low"), c.get("high")) if c else "–" for c in cells]
        rows.append([formats.metric_name(metric), *shown])
        floors = [tree[split].get(formats.FLOORS.get(metric, "")) for split in tree]
        if any(floors):
            named = formats.FLOOR_NAMES[formats.FLOORS[metric]]
            rows.append([named, *(formats.number(float(f["value"])) if f else "–" for f in floors)])
    counts = [max((int(c.get("n") or 0) for c in cells.values()), default=0) for cells in tree.values()]
    rows.append(["items", *(formats.number(n) if n else "–" for n in counts)])
    note = "Bootstrap intervals over items; they say nothing about other seeds."
    return Table(["metric", *tree], rows, note, frozenset(range(1, len(tree) + 1)))


def training_sections(run: Run) -> list[Section]:
    curves, small = plots_run.training(run.metrics, loss_unit=run.loss_unit), plots_run.small_multiples(run.metrics)
    if not curves:
        return []
    notes = []
    if run.metrics.unreadable:
        notes.append(f"{run.metrics.unreadable} torn lines of metrics.jsonl were left out (a writer was killed there).")
    notes += _mishaps(run)
    attempts = {ln.get("attempt") for ln in run.metrics.lines if ln.get("attempt") is not None}
    if len(attempts) > 1:
        notes.append(
            f"The run was resumed or went back: {len(attempts)} attempts; where steps overlap, the last one is shown."
        )
    blocks: list[Block] = [Figures(curves)]
    if small:
        blocks.append(Figures(small, small=True))
    if notes:
        blocks.append(Notes(notes))
    return [Section("Training", blocks)]


def _mishaps(run: Run) -> list[str]:
    """Updates that were left out, spikes that were gone back from, and how fast the stages went, in sentences."""
    found = []
    for stage, done in run.stages.items():
        if done.get("skipped"):
            found.append(f"{stage}: {done['skipped']} updates were left out, their loss or gradient was no number.")
        for line in run.metrics.lines:
            if line["split"] == SPIKE and line["stage"] == stage and isinstance(line.get("rewound_to"), int):
                gone = ", ".join(f"{first} to {stop - 1}" for first, stop in line.get("left_out") or [])
                found.append(
                    f"{stage}: a loss spike in update {line['step']} was gone back from, to step {line['rewound_to']}; "
                    f"batches {gone} are left out."
                )
        rates = done.get("rates")
        if isinstance(rates, dict) and (text := rate_text(rates)):
            hfu = f", HFU {100 * rates['hfu']:.0f} %" if "hfu" in rates else ""
            found.append(f"{stage}: {text}{hfu} (of the last attempt, without its first update).")
    return found


_DIAGNOSTICS = {
    "method": "method",
    "embedder": "embedder",
    "budget": "budget",
    "pool": "pool records",
    "target": "target records",
    "helpful": "records with a negative score",
    "ties": "records that tie at the cut",
    "epsilon": "ε, in units of the cost",
    "mean_cost": "mean cost",
    "marginal_error": "marginal L1 error reached",
    "tolerance": "marginal L1 error asked for",
    "converged": "converged",
    "iterations": "iterations",
    "dual_value": "dual value",
}


def selection_tiles(selection: Selection) -> list[Tile]:
    about = selection.about
    tiles = []
    if selection.table is not None and selection.table.num_rows:
        total, taken = selection.table.num_rows, selection.taken
        tiles.append(
            Tile("chosen", formats.number(taken), "", f"of {total:,} records, {formats.percent(taken / total)}")
        )
    checks = about.get("checks")
    if isinstance(checks, dict) and 0.1 in checks["shares"]:
        place = checks["shares"].index(0.1)
        share = checks["fitted"]["selection"][place]["realised"] / checks["distance"]
        change = f"{100 * share:+.1f} %".replace("-", "−")
        tiles.append(Tile("distance to the target", change, "", "with the selection as a tenth"))
    error = about.get("marginal_error")
    if isinstance(error, int | float):
        tiles.append(
            Tile("marginal L1 error", formats.number(float(error)), "", "how far the transport plan is from converged")
        )
    return tiles


def selection_sections(run: Run, selection: Selection) -> list[Section]:
    blocks: list[Block] = []
    charts = []
    if selection.table is not None and selection.table.num_rows:
        charts = [c for c in (plots_run.histogram(selection), plots_run.domain_mix(selection)) if c]
    mapped = plots_run.projection_map(selection)
    if mapped:
        charts.append(mapped)
    if charts:
        blocks.append(Figures(charts))
    notes = _selection_notes(selection)
    if notes:
        blocks.append(Notes(notes))
    about = {k: v for k, v in selection.about.items() if k not in ("seconds", "skipped", "checks", "peak_bytes")}
    order = [k for k in _DIAGNOSTICS if k in about] + [k for k in about if k not in _DIAGNOSTICS]
    facts = [(_DIAGNOSTICS.get(k, k.replace("_", " ")), formats.plain(about[k])) for k in order]
    peaks = selection.about.get("peak_bytes")
    if isinstance(peaks, dict):
        told = ", ".join(f"{formats.size(value)} after {stage}" for stage, value in peaks.items())
        facts.append(("peak memory, mapped files included", told))
    if facts:
        blocks.append(Pairs(facts))
    sections = [Section("Selection", blocks)] if blocks else []
    cards = _cards(run, selection)
    if cards:
        lead = f"The {len(cards)} records with the smallest scores, as the selector saw them."
        sections.append(Section("First choices", [Cards(cards)], lead))
    return sections


def _selection_notes(selection: Selection) -> list[str]:
    about, notes = selection.about, []
    helpful, budget = about.get("helpful"), about.get("budget")
    gotd = about.get("method") == "gotd"
    if gotd and isinstance(helpful, int) and isinstance(budget, int) and helpful < budget:
        notes.append(
            f"Only {helpful:,} records have a negative score; a budget of {budget:,} adds some that do not help."
        )
    ties = about.get("ties")
    if isinstance(ties, int) and ties:
        notes.append(f"{ties:,} records tie at the cut; file order decided which of them were chosen.")
    skipped = about.get("skipped")
    if isinstance(skipped, dict):
        notes += [
            f"{len(v):,} bad record{'s' * (len(v) > 1)} of the {k} left out, the first at {str(v[0])[:160]}"
            for k, v in skipped.items()
            if isinstance(v, list) and v
        ]
    return notes


def _cards(run: Run, selection: Selection) -> list[Card]:
    column = "text"
    select = run.recipe.get("select")
    if isinstance(select, dict) and isinstance(select.get("columns"), dict):
        column = str(select["columns"].get("text") or "text")
    nearest: dict[int, str] = {}
    if selection.table is not None and "nearest_target" in selection.table.column_names:
        import pyarrow.compute as pc

        top = selection.table.filter(pc.less_equal(selection.table.column("rank"), 12))
        nearest = dict(zip(top.column("rank").to_pylist(), top.column("nearest_target").to_pylist(), strict=True))
    cards = []
    for position, record in enumerate(selection.top[:9], 1):
        source = record.get("source")
        text = record.get(column) or (source.get(column) if isinstance(source, dict) else None)
        if not isinstance(text, str):
            text = next((v for k, v in record.items() if isinstance(v, str) and k != "id"), "")
        text = " ".join(text.split())
        id_ = str(record.get("id", ""))
        rank = record.get("rank", position)
        score = record.get("score")
        facts = [
            ("score", formats.number(float(score)) if isinstance(score, int | float) else ""),
            ("domain", str(record.get("domain") or selection.judged.get(id_, ""))),
            ("id", id_),
            ("nearest target", str(nearest.get(rank) or "")),
        ]
        clipped = text if len(text) <= 360 else text[:360].rsplit(" ", 1)[0] + " …"
        cards.append(Card(str(rank), clipped, [(k, v) for k, v in facts if v]))
    return cards
