"""Page of a comparison: the primary endpoint as a forest plot, tables per task, trials, costs, the protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flatshift.experiments.report import formats
from flatshift.experiments.report.blocks import Block, ChapterPart, ChartGroup, KeyFigure, Notes, Section, Table
from flatshift.experiments.report.charts.intervals import effect_chart
from flatshift.experiments.report.html import render_document
from flatshift.experiments.results.run import RunResults
from flatshift.finetune.evaluate.metrics import find_metric

Document = Mapping[str, Any]


def part(run: RunResults) -> ChapterPart | None:
    """Return the part for a directory of `flatshift compare`."""
    return _part(run.comparison) if run.comparison else None


def page(document: Document) -> str:
    """Return the whole page as HTML; the template escapes everything from files and settings."""
    return render_document(_part(document), document, name=str(document["recipe"]), slug="comparison")


def _part(document: Document) -> ChapterPart:
    ranked = ranked_methods(document)
    clear = [name for name, m in ranked if m["primary"]["p_holm"] is not None and m["primary"]["p_holm"] < 0.05]
    base = document["baseline"]
    if not ranked:
        finding = "No informative task: the primary endpoint cannot be computed."
    else:
        names = " and ".join(filter(None, [", ".join(clear[:-1]), *clear[-1:]])) or "no method"
        finding = f"After Holm's correction {names} {'differ' if len(clear) > 1 else 'differs'} from {base}."
    facts = [
        ("tasks", ", ".join(document["tasks"])),
        ("informative", ", ".join(document["informative"]) or "none"),
        ("cells", f"{document['cells']:,}"),
        ("CPU time", formats.seconds(document["cpu_s"])),
    ]
    sections = [
        Section("Primary endpoint", _primary_blocks(document)),
        *(_task_section(document, task) for task in document["tasks"]),
        Section(
            "Costs",
            [_cost_table(document)],
            "CPU time of a step relative to the baseline's on the same task and seed. Cells run one after another and "
            "not in turns, so a drift of the machine is in these ratios.",
        ),
        Section(
            "Equal trials", [_trial_table(document)], "Chosen on validation rows under the tuning seeds.", folded=True
        ),
        Section("Runs that failed", [_failed_run_block(document)], folded=not document["diverged"]),
        Section("Protocol", [Notes(document["protocol"])]),
    ]
    tiles, metric = [], document["metric"]
    for name, m in [(name, m) for name, m in ranked if m["confirmatory"]][:4]:
        p = m["primary"]["p_holm"]
        note = f"{'no p' if p is None else f'p = {formats.number(p)} (Holm)'}, seeds: {m['primary']['n']}"
        mean, interval = formats.mean_and_interval(m["primary"], _display_factor(metric))
        tiles.append(KeyFigure(f"{name}, {_difference_unit(metric)}", mean, interval, note))
    return ChapterPart("comparison", [finding], tiles, sections, facts, is_conclusive=bool(ranked))


def summary_lines(document: Document) -> list[str]:
    """Return the primary endpoint as lines for a terminal."""
    lines, metric = [], document["metric"]
    endpoint, unit = find_metric(metric).title, _difference_unit(metric)
    for name, m in ranked_methods(document):
        mean, interval = formats.mean_and_interval(m["primary"], _display_factor(metric))
        p = "–" if m["primary"]["p_holm"] is None else f"{m['primary']['p_holm']:.3g}"
        kind = "confirmatory" if m["confirmatory"] else "exploratory"
        lines.append(f"{name}: {endpoint} {mean} {unit} [{interval}], p (Holm) {p}, {m['primary']['n']} seeds, {kind}")
    return lines or ["no informative task: no primary endpoint"]


def ranked_methods(document: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the methods that have a primary endpoint: confirmatory first, then by effect."""
    methods = [(name, m) for name, m in document["methods"].items() if m["primary"] is not None]
    sign = 1 if find_metric(document["metric"]).lower else -1
    return sorted(methods, key=lambda item: (not item[1]["confirmatory"], sign * item[1]["primary"]["value"]))


def _display_factor(metric: str) -> float:
    """Return the factor for displayed values: 100 for shares, which are shown as points."""
    return 100.0 if find_metric(metric).shown_as_share else 1.0


def _difference_unit(metric: str) -> str:
    return "points" if find_metric(metric).shown_as_share else find_metric(metric).unit


def _multiply(value: float | None, scale: float) -> float | None:
    return None if value is None else scale * value


def _primary_blocks(document: Document) -> list[Block]:
    ranked = ranked_methods(document)
    if not ranked:
        return [Notes(["No task of the endpoint is informative, or none was run."])]
    metric, rows = document["metric"], []
    scale, unit = _display_factor(metric), _difference_unit(metric)
    for name, m in ranked:
        primary = m["primary"]
        mean, interval = formats.mean_and_interval(primary, scale)
        bounds = primary.get("bootstrap")
        bootstrap = {"value": primary["value"], **bounds} if bounds else None
        rows.append(
            {
                "method": name,
                "kind": "confirmatory" if m["confirmatory"] else "exploratory",
                "seeds": str(primary["n"]),
                "tasks": ", ".join(primary["tasks"]),
                unit: mean,
                "95 % t": interval,
                "95 % bootstrap": formats.mean_and_interval(bootstrap, scale)[1],
                "p": formats.number(primary["p"]),
                "p (Holm)": formats.number(primary["p_holm"]),
                "detectable": formats.number(_multiply(primary["detectable"], scale)),
                "seeds won": f"{primary['wins']}/{primary['n']}",
            }
        )
    table = Table.of(
        rows,
        f"Test {find_metric(metric).title} minus {document['baseline']}'s, mean over tasks, {unit}. Detectable: the "
        "effect found with 80 % power at these seeds. With five seeds a sign-flip p cannot go below 0.0625.",
        words=("method", "kind", "tasks"),
    )
    # Every method's primary endpoint with its t-interval.
    forest = effect_chart(
        "comparison-forest",
        [(name, m["primary"], not m["confirmatory"]) for name, m in ranked],
        title="Primary endpoint of every method",
        caption="Mean over informative tasks, seed-paired, with 95 % t-intervals. Filled: confirmatory; hollow: "
        "exploratory. In colour where Holm's correction leaves p below 0.05 (blue better, orange worse).",
        x=f"test {find_metric(metric).title} minus {document['baseline']}, {unit}",
        left=170,
        scale=scale,
        lower_is_better=find_metric(metric).lower,
    )
    blocks: list[Block] = [ChartGroup([forest]), table]
    if document["controls"]:
        body = []
        for control in document["controls"]:
            difference = control["difference"]
            mean, interval = formats.mean_and_interval(difference, scale)
            contrast = f"{control['method']} − {control['control']}"
            p = formats.number(difference["p"]) if difference else "–"
            body.append({"contrast": contrast, unit: mean, "95 % t": interval, "p": p})
        caption = "Effect of the idea itself: method compared with its control, same seeds and tasks; not corrected."
        blocks.append(Table.of(body, caption, words=("contrast",)))
    return blocks


def _task_section(document: Document, task: str) -> Section:
    result, base = document["tasks"][task], document["baseline"]
    scale, classes = _display_factor(result["metric"]), result["floor"] is not None
    metric = find_metric(result["metric"])
    rows = []
    for name, m in result["methods"].items():
        difference = formats.mean_and_interval(m["difference"], scale)
        row = [name, *formats.mean_and_interval(m["mean"], scale, plus=False), *difference]
        row.append(formats.number(m["difference"]["p"]) if m["difference"] else "–")
        row.append(formats.number(_multiply(m["f1_macro"], 100.0)) if classes else "–")
        row += [formats.number(m["loss"]), formats.number(_multiply(m["train_error"], 100.0))]
        row.append(formats.number(m["sharpness"]))
        rows.append(row)
    lead = f"{result['rows']['train']} labelled rows a run, {result['steps']} steps. "
    lead += f"{result['rows']['skipped']} bad rows were left out. " if "skipped" in result["rows"] else ""
    if classes:
        verdict = "informative" if result["informative"] else "not informative, left out of the endpoint"
        lead += (
            f"Majority baseline {formats.number(_multiply(result['floor'], 100.0))} %; the accuracy of the tuned "
            f"{base} is {formats.number(result['margin_se'])} standard errors above it: {verdict}."
        )
    else:
        lead += f"{formats.capitalise(metric.title)}: {'lower' if metric.lower else 'higher'} is better"
        lead += "." if result["counts"] else "; not part of the primary endpoint."
    unit = "%" if metric.shown_as_share else metric.unit
    columns = ["method", f"{metric.title}, {unit}", "95 % t", f"− {base}", "95 % t", "p", "macro F1, %", "test loss"]
    columns += ["train error, %", "sharpness"]
    caption = "Secondary: p-values are not corrected. Sharpness: E[L(w+ε)] − L(w) on training rows, nats."
    return Section(f"Task {task}", [Table(columns, rows, caption, frozenset(range(1, 10)))], lead)


def _cost_table(document: Document) -> Block:
    rows = []
    for name, m in document["methods"].items():
        sharp, equal = m["sharpness"], m["equal_time"]
        cells = ("as above", "–")
        if equal:
            cells = formats.mean_and_interval(equal, _display_factor(document["metric"]))
        ratio = formats.number(sharp["ratio"]) if sharp else "–"
        bounds = f"{formats.number(sharp['low'])} to {formats.number(sharp['high'])}" if sharp and sharp["low"] else "–"
        rows.append([name, formats.number(m["step_ratio"]), *cells, ratio, bounds, m["note"]])
    equal_time = f"equal time, {_difference_unit(document['metric'])}"
    columns = ["method", "step time ÷", equal_time, "95 % t", "sharpness ÷", "95 % t", "what it is"]
    caption = (
        "Equal time: the endpoint again with as many steps as the baseline's time allows; `as above` where a step "
        "costs about the same."
    )
    return Table(columns, rows, caption, frozenset(range(1, 6)))


def _trial_table(document: Document) -> Block:
    rows = []
    for trial in document["trials"]:
        own = [f"{key.rpartition('.')[2]} = {value}" for key, value in trial["chosen"].items() if key != "optimizer.lr"]
        rows.append(
            {
                "task": trial["task"],
                "method": trial["method"],
                "trials": str(trial["trials"]),
                "failed": str(trial["failed"]),
                "learning rate": formats.number(trial["chosen"]["optimizer.lr"]),
                "tried": f"{formats.number(trial['lowest_lr'])} to {formats.number(trial['highest_lr'])}",
                "own settings": ", ".join(own) or "–",
                "validation by seed": ", ".join(formats.number(value, 3) for value in trial["validation"]),
                "still on an edge": "yes" if trial["on_edge"] else "no",
            }
        )
    words = ("task", "method", "tried", "own settings", "validation by seed", "still on an edge")
    return Table.of(rows, words=words)


def _failed_run_block(document: Document) -> Block:
    if not document["diverged"]:
        return Notes(["None: every trial and every final run ended."])
    rows = [
        {
            **{name: str(run[name]) for name in ("kind", "method", "task", "seed")},
            "settings": ", ".join(f"{key.rpartition('.')[2]} = {value}" for key, value in run["setting"].items()),
            "how": run["status"],
            "reason": run["reason"],
        }
        for run in document["diverged"]
    ]
    return Table.of(rows, words=list(rows[0]))
