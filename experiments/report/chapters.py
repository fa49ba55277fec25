"""From a run directory's pieces to a chapter of the page: which sections, with what in them."""

from __future__ import annotations

import json
from typing import Any

from experiments.report import findings, formats, plots_run, plots_study
from experiments.report.blocks import Bars, Block, Card, Cards, Chapter, Figures, Notes, Pairs, Pre, Section, Table, Tile
from experiments.report.figure import Chart
from experiments.report.load import Run, Selection, Study
from experiments.report.sweepdata import INTERPOLATION, SweepData
from experiments.stats import t_interval


def chapter(run: Run) -> Chapter:
    """Everything that one run directory has to show."""
    kinds = []
    parts: list[str] = []
    tiles: list[Tile] = []
    sections: list[Section] = []
    weight = 0
    if run.study is not None:
        kinds.append("study")
        weight = 4
        parts.append(findings.study_finding(run.study))
        tiles += _study_tiles(run.study)
        sections += _study(run.study)
    if run.metrics.lines or run.eval or run.stages:
        kinds.append("training run")
        weight = max(weight, 3)
        parts.append(findings.train_finding(run))
        tiles += _train_tiles(run)
        sections += [*_evaluation(run), *_training(run)]
    if run.selection is not None:
        kinds.append("selection")
        weight = max(weight, 2)
        parts.append(findings.selection_finding(run.selection))
        tiles += _selection_tiles(run.selection)
        sections += _selection(run, run.selection)
    if run.sweep is not None:
        kinds.append("sweep")
        weight = max(weight, 1)
        parts.append(findings.sweep_finding(run.sweep))
        tiles += _sweep_tiles(run.sweep)
        sections += _sweep(run.sweep)
    sections += _circumstances(run)
    parts = [p for p in parts if p]
    return Chapter(
        name=run.name, kind=" with ".join(kinds) or "run", finding=parts[0] if parts else "", details=parts[1:],
        facts=_facts(run), tiles=tiles[:8], sections=sections, command=run.command, weight=weight,
    )  # fmt: skip


def charts_of(made: Chapter) -> list[Chart]:
    """Every chart of a chapter, in page order."""
    return [c for section in made.sections for block in section.blocks if isinstance(block, Figures) for c in block.charts]


def _facts(run: Run) -> list[tuple[str, str]]:
    versions = run.environment.get("versions")
    version = versions.get("flatshift") if isinstance(versions, dict) else None
    regularizer = run.recipe.get("regularizer")
    facts = [
        ("made", str(run.environment.get("created") or run.manifest.get("created") or "").replace("T", " ").replace("+00:00", "Z").replace("Z", " UTC")),
        ("recipe", _recipe_name(run)),
        ("backbone", str(run.recipe.get("backbone") or "")),
        ("regularizer", str(regularizer.get("kind") or "") if isinstance(regularizer, dict) else ""),
        ("flatshift", str(version or "")),
        ("elapsed", formats.seconds(run.elapsed) if run.elapsed else ""),
    ]
    return [(name, value) for name, value in facts if value]


def _recipe_name(run: Run) -> str:
    """The recipe's name: as a sweep or study recorded it, else from `extends`, else from the command line."""
    plan = run.path / "sweep.json"
    if plan.is_file():
        return str(json.loads(plan.read_text(encoding="utf-8")).get("recipe", ""))
    if run.study is not None and run.study.about.get("recipe"):
        return str(run.study.about["recipe"])
    if run.recipe.get("extends"):
        return str(run.recipe["extends"])
    words = run.command.split()
    verbs = [i for i, w in enumerate(words[:-1]) if w in ("train", "select", "sweep")]
    name = words[verbs[0] + 1] if verbs else ""
    return "" if name.startswith("-") else name.rpartition("/")[2]


# ---------------------------------------------------------------------------------------------- study


def _study_tiles(study: Study) -> list[Tile]:
    question = findings.study_question(study)
    if question is None:
        return []
    ours, base = (plots_study.arm_name(*arm) for arm in question)
    tiles = []
    for metric, d in findings.study_differences(study)[:3]:
        value, interval = formats.estimate(d.value, d.low, d.high, plus=True)
        note = f"{ours} − {base}, {d.n} paired seeds" if d.n > 1 else f"{ours} − {base}, one seed: no interval"
        if d.low is not None and not d.excludes_zero:
            note += "; the interval holds zero"
        tiles.append(Tile(f"Δ {formats.metric_name(metric)}", value, interval, note))
    return tiles


def _study(study: Study) -> list[Section]:
    metrics = findings.headline_metrics(study.metrics)
    charts = [c for m in metrics[:3] for c in plots_study.study_charts(study, m)]
    rows = []
    for arm in plots_study.arms(study):
        row = [plots_study.arm_name(*arm)]
        count = 0
        for metric in metrics:
            values = list(study.values(*arm, metric).values())
            count = max(count, len(values))
            mean = t_interval(values, bounds=formats.bounds(metric)) if values else None
            row.append(findings.with_interval(mean.value, mean.low, mean.high) if mean else "–")
        rows.append([*row, str(count)])
    names = [formats.metric_name(m) for m in metrics]
    table = Table(["arm", *names, "seeds"], rows, "Mean over seeds with its 95 % t-interval.", frozenset(range(1, len(names) + 2)))
    differences = []
    for metric in metrics:
        for c in plots_study.contrasts(study, metric):
            value, interval = formats.estimate(c.interval.value, c.interval.low, c.interval.high, plus=True)
            verdict = "no interval" if c.interval.low is None else "excludes zero" if c.interval.excludes_zero else "holds zero"
            against = c.group.removeprefix("against ") if c.group.startswith("against") else ""
            pair = f"{c.name} − {against}" if against else c.name
            differences.append([formats.metric_name(metric), pair, value, interval or "–", verdict, str(c.interval.n)])
    blocks: list[Block] = [Figures(charts), table]
    blocks.append(Notes(_study_notes(study, differences)))
    target = study.about.get("target")
    title = f"Cold, random and GOT-D warm-up × plain and GGPO{f' on {target}' if target else ''}"
    found = [Section(title, [b for b in blocks if not (isinstance(b, Notes) and not b.sentences)], _described(study))]
    if differences:
        paired = Table(["metric", "difference", "mean", "95 % interval", "it", "pairs"], differences,
                       "Seed-paired differences. Not corrected for the number of comparisons.", frozenset({2, 3, 5}))  # fmt: skip
        found.append(Section("All paired differences", [paired], folded=True))
    tuned = study.about.get("tuned")
    if isinstance(tuned, dict) and tuned:
        keys = list(dict.fromkeys(k for v in tuned.values() if isinstance(v, dict) for k in v))
        cells = [[arm, *(_plain(v.get(k)) for k in keys)] for arm, v in tuned.items() if isinstance(v, dict)]
        found.append(Section("Learning rates, tuned on dev with a seed of their own", [Table(
            ["arm", *(k.replace("_", " ") for k in keys)], cells, "Equal trials for every arm.", frozenset(range(1, len(keys) + 1)))], folded=True))  # fmt: skip
    return found


def _described(study: Study) -> str:
    """What each metric was measured on, where the study says so."""
    said = study.about.get("describe")
    return " ".join(f"{formats.metric_name(k).capitalize()}: {v}" for k, v in said.items()) if isinstance(said, dict) else ""


def _study_notes(study: Study, differences: list[list[str]]) -> list[str]:
    notes = []
    clear = sum(row[4] == "excludes zero" for row in differences)
    asked = sum(row[4] != "no interval" for row in differences)
    if asked:
        notes.append(f"{clear} of {asked} intervals exclude zero; if nothing differed at all, about {max(round(asked * 0.05), 1)} would by chance.")
    seeds = {c["seed"] for c in study.cells}
    if 1 < len(seeds) < 5:
        notes.append(f"With {len(seeds)} seeds a t-interval is wide, {formats.number(_t(len(seeds)), 2)} standard errors either way: "
                     "read this as a demonstration, not as evidence.")  # fmt: skip
    for metric, floor in study.floor.items():
        values = [v for arm in plots_study.arms(study) for v in study.values(*arm, metric).values()]
        if values and max(values) <= floor:
            notes.append(f"No run rises above the majority {metric} of {formats.number(floor)}: the task is uninformative here.")
    return notes


def _t(n: int) -> float:
    from experiments.stats import t_quantile

    return t_quantile(0.975, n - 1)


# ---------------------------------------------------------------------------------------------- training


def _train_tiles(run: Run) -> list[Tile]:
    tiles = []
    split = findings.best_split(run.eval)
    if split is not None:
        cells = run.eval[split]
        floor = cells.get("majority_floor", {}).get("value")
        shown = [m for m in ("accuracy", "exact_match", "perplexity", "f1_macro", "bits_per_byte", "loss") if m in cells]
        for metric in shown[:2]:
            value, interval = formats.estimate(cells[metric]["value"], cells[metric].get("low"), cells[metric].get("high"))
            note = f"{cells[metric]['n']:,} items" if cells[metric].get("n") else ""
            if metric == "accuracy" and floor is not None:
                note = ", ".join(filter(None, [f"majority floor {formats.number(floor)}", note]))
            tiles.append(Tile(f"{split} {formats.metric_name(metric)}", value, interval, note))
    before, after = run.shift
    split = findings.best_split(before)
    if split and split in after and "perplexity" in before[split] and "perplexity" in after[split]:
        cell = after[split]["perplexity"]
        value, interval = formats.estimate(cell["value"], cell.get("low"), cell.get("high"))
        cold = before[split]["perplexity"]
        shown_cold = formats.estimate(cold["value"], cold.get("low"), cold.get("high"))[0]
        tiles.append(Tile("target perplexity after warm-up", value, interval, f"cold backbone {shown_cold}"))
    for stage, done in run.stages.items():
        if done.get("steps") and stage != "warm-up":
            note = "stopped early" if done.get("stopped_early") else ""
            if done.get("best_dev_loss") is not None:
                note = f"best dev loss {formats.number(float(done['best_dev_loss']))} after {done.get('best_step')}" + (f", {note}" if note else "")
            tiles.append(Tile(f"{stage} updates", formats.number(int(done["steps"])), "", note))
    return tiles


def _evaluation(run: Run) -> list[Section]:
    found = []
    if run.eval:
        found.append(Section("Evaluation", [Figures(plots_run.evaluation(run.eval)), _metric_table(run.eval)]))
    before, after = run.shift
    if before and after:
        rows = []
        for split in before:
            for metric in ("perplexity", "bits_per_byte"):
                if metric in before[split] and metric in after.get(split, {}):
                    pair = [before[split][metric], after[split][metric]]
                    cells = [findings.with_interval(c["value"], c.get("low"), c.get("high")) for c in pair]
                    change = pair[1]["value"] / pair[0]["value"] - 1
                    rows.append([split, formats.metric_name(metric), *cells, ("+" if change > 0 else "") + formats.percent(change)])
        lead = "How far the warm-up moved the backbone towards the target's own texts, labels unseen."
        table = Table(["split", "metric", "cold backbone", "after warm-up", "change"], rows,
                      "Both are judged on the same rows; intervals are bootstrap intervals of each, not of the difference.", frozenset({2, 3, 4}))  # fmt: skip
        if rows:
            found.append(Section("The warm-up's shift", [table], lead))
    return found


def _metric_table(tree: dict[str, dict[str, dict[str, Any]]]) -> Table:
    rows = []
    for split, cells in tree.items():
        floor = cells.get("majority_floor", {}).get("value")
        for metric, cell in cells.items():
            if metric == "majority_floor":
                continue
            value, interval = formats.estimate(cell["value"], cell.get("low"), cell.get("high"))
            beside = formats.number(floor) if metric == "accuracy" and floor is not None else ""
            n = formats.number(int(cell["n"])) if cell.get("n") else ""
            rows.append([split, formats.metric_name(metric), value, interval, beside, n])
    columns = ["split", "metric", "value", "interval", "majority floor", "items"]
    if not any(row[4] for row in rows):
        columns.pop(4)
        rows = [row[:4] + row[5:] for row in rows]
    return Table(columns, rows, "Bootstrap intervals over items; they say nothing about other seeds.", frozenset(range(2, len(columns))))


def _training(run: Run) -> list[Section]:
    curves, small = plots_run.training(run.metrics), plots_run.small_multiples(run.metrics)
    if not curves:
        return []
    notes = []
    if run.metrics.unreadable:
        notes.append(f"{run.metrics.unreadable} torn lines of metrics.jsonl were left out (a writer was killed there).")
    attempts = {ln.get("attempt") for ln in run.metrics.lines if ln.get("attempt") is not None}
    if len(attempts) > 1:
        notes.append(f"The run was resumed: {len(attempts)} attempts; where steps overlap, the last one is shown.")
    blocks: list[Block] = [Figures(curves)]
    if small:
        blocks.append(Figures(small, small=True))
    if notes:
        blocks.append(Notes(notes))
    return [Section("Training", blocks)]


# ---------------------------------------------------------------------------------------------- selection

_DIAGNOSTICS = {
    "method": "method", "embedder": "embedder", "budget": "budget", "pool": "pool records", "target": "target records",
    "helpful": "records with a negative score", "epsilon": "ε, relative to the mean cost", "epsilon_relative": "ε, relative to the mean cost",
    "epsilon_absolute": "ε, absolute", "mean_cost": "mean cost", "marginal_error": "marginal L1 error",
    "dual_value": "dual value", "iterations": "iterations", "tolerance": "tolerance asked for",
}  # fmt: skip


def _selection_tiles(selection: Selection) -> list[Tile]:
    about = selection.about
    tiles = []
    if selection.table is not None and selection.table.num_rows:
        total, taken = selection.table.num_rows, sum(selection.table.column("selected").to_pylist())
        tiles.append(Tile("chosen", formats.number(int(taken)), "", f"of {total:,} records, {formats.percent(taken / total)}"))
    error = about.get("marginal_error")
    if isinstance(error, int | float):
        tiles.append(Tile("marginal L1 error", formats.number(float(error)), "", "how far the transport plan is from converged"))
    return tiles


def _selection(run: Run, selection: Selection) -> list[Section]:
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
    facts = [(_DIAGNOSTICS.get(k, k.replace("_", " ")), _plain(v)) for k, v in selection.about.items() if k not in ("seconds", "skipped")]
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
        notes.append(f"Only {helpful:,} records have a negative score; a budget of {budget:,} adds some that do not help.")
    skipped = about.get("skipped")
    if isinstance(skipped, dict):
        notes += [f"{len(v):,} bad record{'s' * (len(v) > 1)} of the {k} left out, the first at {str(v[0])[:160]}" for k, v in skipped.items() if isinstance(v, list) and v]
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
        facts = [("score", formats.number(float(score)) if isinstance(score, int | float) else ""),
                 ("domain", str(record.get("domain") or selection.judged.get(id_, ""))), ("id", id_),
                 ("nearest target", str(nearest.get(rank) or ""))]  # fmt: skip
        clipped = text if len(text) <= 360 else text[:360].rsplit(" ", 1)[0] + " …"
        cards.append(Card(str(rank), clipped, [(k, v) for k, v in facts if v]))
    return cards


# ---------------------------------------------------------------------------------------------- sweep


def _sweep_tiles(data: SweepData) -> list[Tile]:
    axis, _, _ = plots_study.sweep_axes(data)
    test, _ = data.error_columns()
    tiles = []
    lowest = data.best(test)
    if axis is not None and lowest is not None:
        where, best = lowest
        at = ", ".join(f"{k} = {v}" for k, v in where.items())
        split, _, metric = test.partition(".")
        shown, interval = formats.estimate(best.value, best.low, best.high)
        tiles.append(Tile(f"lowest {split} {formats.metric_name(metric)}", shown, interval, f"at {at}; {best.n} runs"))
        first = data.threshold(axis, {}) if len(data.axes) == 1 else None
        if data.has("train.error") and len(data.axes) == 1:
            shown = str(first) if first is not None else "not reached"
            tiles.append(Tile("interpolation threshold", shown, "", f"first {axis} with train error ≤ {INTERPOLATION:g}"))
    note = f"{data.seeds} seeds each" + (f", {len(data.failed)} failed" if data.failed else "")
    tiles.append(Tile("cells finished", f"{len(data.done)} / {len(data.rows)}", "", note))
    return tiles


def _sweep(data: SweepData) -> list[Section]:
    blocks: list[Block] = []
    charts = plots_study.sweep_curves(data)
    heat = plots_study.heat_map(data)
    if charts or heat:
        blocks.append(Figures([*([heat] if heat else []), *charts]))
    columns = [c for c in dict.fromkeys([*data.error_columns(), "test.loss", "train.loss"]) if data.has(c)]
    if data.axes and columns:
        axes = [*data.axes]
        rows = []
        for where in data.settings():
            points = [data.at(c, where) for c in columns]
            cells = [findings.with_interval(p.value, p.low, p.high) if p else "–" for p in points]
            rows.append([*map(str, where.values()), *cells, str(max((p.n for p in points if p), default=0))])
        names = [*axes, *(c.replace(".", " ").replace("_", " ") for c in columns), "runs"]
        blocks.append(Table(names, rows, "Mean over seeds with its 95 % t-interval.", frozenset(range(len(axes), len(names)))))
    notes = []
    if data.fixed:
        notes.append("The same in every cell: " + ", ".join(f"{k} = {v}" for k, v in data.fixed.items()) + ".")
    if len(charts) == 12:
        notes.append("Only the first 12 settings of the other axes are drawn; the table has all.")
    notes += [f"Cell {row.get('cell')} failed: {row.get('reason')}" for row in data.failed[:5]]
    if len(data.failed) > 5:
        notes.append(f"{len(data.failed) - 5} more cells failed; cells.parquet has their reasons.")
    if charts:
        notes.append("Bands are pointwise: with many points some will look like a bump by chance. There is no formal peak test in this version.")
    if notes:
        blocks.append(Notes(notes))
    return [Section("Sweep", blocks)] if blocks else []


# ---------------------------------------------------------------------------------------------- circumstances


def _circumstances(run: Run) -> list[Section]:
    sections = []
    if run.stage_seconds:
        longest = max(run.stage_seconds.values()) or 1.0
        bars = [(name, formats.seconds(s), s / longest) for name, s in run.stage_seconds.items()]
        sections.append(Section("Time", [Bars(bars)], "Wall time of each part, with its evaluations and checkpoints."))
    inputs = run.manifest.get("inputs")
    folded: list[Section] = []
    if isinstance(inputs, list) and inputs:
        rows = [[str(i.get("path", "")), formats.number(i["rows"]) if isinstance(i.get("rows"), int) else "–",
                 formats.size(i["bytes"]) if isinstance(i.get("bytes"), int) else "–", str(i.get("sha256", ""))]
                for i in inputs if isinstance(i, dict)]  # fmt: skip
        folded.append(Section("Inputs", [Table(["file", "rows", "size", "SHA-256"], rows, numeric=frozenset({1, 2}))], folded=True))
    if run.environment:
        pairs = []
        for key, value in run.environment.items():
            if key == "memory" and isinstance(value, int):
                value = formats.size(value)
            if isinstance(value, dict):
                value = ", ".join(f"{k} {v}" for k, v in value.items() if v is not None)
            if value not in (None, ""):
                pairs.append((key, str(value)))
        folded.append(Section("Environment", [Pairs(pairs)], folded=True))
    if run.recipe_text:
        folded.append(Section("Recipe, resolved", [Pre(run.recipe_text.strip())], folded=True))
    return sections + folded


def _plain(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, int | float):
        return formats.number(value)
    if isinstance(value, dict | list):
        text = json.dumps(value, ensure_ascii=False)
        return text if len(text) <= 120 else text[:119] + "…"
    return str(value)
