"""The page of a study of selectors: answers first, then perplexity, accuracy, recall, embedders, trials, costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from flatshift.experiments.report import formats
from flatshift.experiments.report.blocks import (
    Block,
    Chapter,
    ChartGroup,
    KeyFigure,
    NameValuePairs,
    Notes,
    Section,
    Table,
)
from flatshift.experiments.report.charts.intervals import effect_chart
from flatshift.experiments.report.figure import Chart
from flatshift.experiments.report.html import render

Document = Mapping[str, Any]
Found = Mapping[str, Any] | None


def page(document: Document) -> str:
    """The whole page as HTML; everything that came from files or settings is escaped by the template."""
    return render([chapter(document)])


def chapter(document: Document) -> Chapter:
    """A study laid out."""
    pool = document["pool"]
    facts = [
        ("pool", f"{pool['kept']:,} of {pool['passages']:,} passages"),
        ("targets", ", ".join(document["targets"])),
        ("seeds", str(document["seeds"])),
        ("cells", f"{document['cells']:,}"),
        ("CPU time", formats.seconds(document["cpu_s"])),
    ]
    sections = [
        Section("Answers", [Notes(document["answers"])]),
        Section("Primary endpoint", _primary(document)),
        Section("Few-label accuracy", _accuracy(document)),
        Section("Recall and coverage", _recall(document), "Before any training: what was chosen."),
        *(_target_section(document, target) for target in document["targets"]),
        Section("Embedders", _embedders(document)),
        Section("Equal trials", _trials(document), "Chosen on validation texts under the tuning seed.", folded=True),
        Section("Costs", _costs(document), "CPU-seconds of all cells."),
        Section("The pool", [_pool(document)], folded=True),
        Section("Runs that failed", [_failed(document)], folded=not document["failed"]),
        Section("Protocol", [Notes(document["protocol"])]),
    ]
    return Chapter(
        name=str(document["recipe"]),
        kind="selection study",
        finding=next(iter(document["answers"]), "No endpoint can be computed."),
        facts=facts,
        tiles=[_tile(name, arm) for name, arm in ranked(document) if arm["source"] == "selector"][:4],
        sections=[section for section in sections if section.blocks],
        slug="quality",
        command=str(document.get("command", "")),
    )


def ranked(document: Document, metric: str = "nats") -> list[tuple[str, Mapping[str, Any]]]:
    """Arms with an endpoint, the best first."""
    found = [(name, arm) for name, arm in document["arms"].items() if arm[metric] is not None]
    return sorted(found, key=lambda item: item[1][metric]["value"] * (1 if metric == "nats" else -1))


def level(found: Found, scale: float = 1.0) -> str:
    """A mean with its interval in one text."""
    if found is None:
        return "–"
    low, high = (None if found[k] is None else scale * found[k] for k in ("low", "high"))
    mean, interval = formats.estimate(scale * found["value"], low, high)
    return f"{mean} ({interval})" if interval else mean


def perplexity(found: Found) -> str:
    """Nats as perplexity, with its interval."""
    if found is None:
        return "–"
    keys = {k: None if found[k] is None else math.exp(found[k]) for k in ("value", "low", "high")}
    return level(keys)


def bootstrap(found: Mapping[str, Any], scale: float) -> str:
    """The interval of an accuracy endpoint over seeds and test rows."""
    boot = found["bootstrap"]
    return formats.mean_and_interval({"value": found["value"], **boot}, scale)[1] if boot else "–"


def _tile(name: str, arm: Mapping[str, Any]) -> KeyFigure:
    mean, interval = formats.mean_and_interval(arm["nats"])
    p = arm["nats"]["p_holm"]
    note = f"{'no p' if p is None else f'p = {formats.number(p)} (Holm)'}, seeds: {arm['nats']['n']}"
    return KeyFigure(f"{name}, nats", mean, interval, note)


def _tests(pairs: Sequence[tuple[str, Mapping[str, Any], str]], scale: float, unit: str) -> list[list[str]]:
    rows = []
    for name, found, note in pairs:
        mean, interval = formats.mean_and_interval(found, scale)
        row = [name, mean, interval, str(found["n"]), formats.number(found["p"]), formats.number(found["p_holm"])]
        detectable = found["detectable"]
        row.append(formats.number(None if detectable is None else scale * detectable))
        if unit == "nats":
            row.append(f"{100 * math.expm1(found['value']):+.1f}".replace("-", "−"))
        else:
            row.insert(3, bootstrap(found, scale))
        rows.append([*row, note])
    return rows


def _table(rows: list[list[str]], head: str, caption: str, unit: str) -> Table:
    columns = [head, unit, "95 % t", "seeds", "p", "p (Holm)", "detectable", "what it is"]
    if unit == "nats":
        columns.insert(-1, "perplexity, %")
    else:
        columns.insert(3, "95 % bootstrap")
    return Table(columns, rows, caption, frozenset(range(1, len(columns) - 1)))


def _primary(document: Document) -> list[Block]:
    arms = ranked(document)
    if not arms:
        return [Notes(["No two arms ran at one budget: there is no endpoint."])]
    base, budget = document["baseline"], document["primary_budget"]
    blocks: list[Block] = [
        ChartGroup([forest(document)]),
        _table(
            _tests([(name, arm["nats"], arm["note"]) for name, arm in arms], 1.0, "nats"),
            "arm",
            f"Nats per token of test texts minus {base}'s at {budget:,} {_unit(document)}, mean over targets; lower is "
            "better.",
            "nats",
        ),
    ]
    against = [(f"{document['focus']} − {n}", pair["nats"], document["arms"][n]["note"])
               for n, pair in document["against"].items() if pair["nats"] is not None]  # fmt: skip
    if against:
        caption = f"{document['focus']} compared with every other arm; corrected as a family of its own."
        blocks.append(_table(_tests(against, 1.0, "nats"), "contrast", caption, "nats"))
    plain = [(n, arm["form_nats"], arm["note"]) for n, arm in document["arms"].items() if arm.get("form_nats")]
    if plain:
        caption = (
            f"The same in plain form: chosen passages and test texts in lower case, one space between words and marks; "
            f"minus {base}'s, corrected as a family of its own."
        )
        plain.sort(key=lambda row: row[1]["value"])
        blocks.append(_table(_tests(plain, 1.0, "nats"), "arm", caption, "nats"))
    plain = [
        (f"{document['focus']} − {n}", pair["form_nats"], document["arms"][n]["note"])
        for n, pair in document["against"].items()
        if pair.get("form_nats")
    ]
    if plain:
        blocks.append(_table(_tests(plain, 1.0, "nats"), "contrast", "In plain form.", "nats"))
    forgotten = [(n, arm["pool_nats"], arm["note"]) for n, arm in document["arms"].items() if arm.get("pool_nats")]
    if forgotten:
        forgotten.sort(key=lambda row: row[1]["value"])
        caption = f"Forgetting: nats per token of passages of the pool minus {base}'s; lower is better."
        blocks.append(_table(_tests(forgotten, 1.0, "nats"), "arm", caption, "nats"))
    return blocks


def _unit(document: Document) -> str:
    return str(document.get("unit", "passages"))


def forest(document: Document) -> Chart:
    """Every arm's primary endpoint with its t-interval; filled selectors, hollow controls."""
    return effect_chart(
        "quality-forest",
        [(name, arm["nats"], arm["source"] != "selector") for name, arm in ranked(document)],
        title="Perplexity after the warm-up, every arm",
        caption="Seed-paired, with 95 % t-intervals. Filled: selectors; hollow: controls. In colour where Holm's "
        "correction leaves p below 0.05 (blue better, orange worse).",
        x=f"nats per token minus {document['baseline']}, mean over targets",
        left=130,
        scale=1.0,
        lower_is_better=True,
    )


def _accuracy(document: Document) -> list[Block]:
    arms = ranked(document, "accuracy")
    if not arms:
        return []
    rows = _tests([(name, arm["accuracy"], arm["note"]) for name, arm in arms], 100.0, "points")
    caption = (
        f"Test accuracy after the fine-tune minus {document['baseline']}'s at {document['primary_budget']:,} "
        f"{_unit(document)}, mean over targets, percentage points; higher is better. The bootstrap resamples seeds "
        "and test rows."
    )
    floors = []
    for name, target in document["targets"].items():
        if target["margin_se"] is not None:
            verdict = "informative" if target["informative"] else "not informative"
            floors.append(
                f"{name}: majority baseline {formats.percent(target['floor'])}; without a warm-up the accuracy is "
                f"{formats.number(target['margin_se'])} standard errors above it: {verdict}."
            )
    return [_table(rows, "arm", caption, "points"), Notes(floors)]


def _recall(document: Document) -> list[Block]:
    budgets = sorted({int(b) for target in document["targets"].values() for b in target["budgets"]})
    blocks: list[Block] = []
    for budget in budgets:
        targets = {n: t for n, t in document["targets"].items() if str(budget) in t["budgets"]}
        arms = next(iter(targets.values()))["budgets"][str(budget)]
        rows = [
            [arm, *(_share(target["budgets"][str(budget)][arm]["recall"]) for target in targets.values())]
            for arm in arms
        ]
        caption = f"Recall of the hidden domains at {budget:,} {_unit(document)}, %."
        blocks.append(Table(["arm", *targets], rows, caption, frozenset(range(1, len(targets) + 1))))
    return blocks


def _share(found: Found) -> str:
    return level(found, 100.0)


def _target_section(document: Document, name: str) -> Section:
    target = document["targets"][name]
    base, focus = document["baseline"], document["focus"]
    blocks: list[Block] = []
    groups = [(f"{int(budget):,} {_unit(document)}", arms) for budget, arms in target["budgets"].items()]
    groups.append(("Without a budget", target["controls"]))
    for title, arms in groups:
        rows = []
        for arm, cell in arms.items():
            own, interval = formats.mean_and_interval(cell["nats_difference"])
            mine, spread = formats.mean_and_interval(cell["accuracy_difference"], 100.0)
            rows.append(
                [
                    arm,
                    perplexity(cell["nats"]),
                    f"{own} ({interval})" if own != "–" else "–",
                    formats.mean_and_interval(cell["nats_focus"])[0],
                    level(cell["accuracy"], 100.0),
                    f"{mine} ({spread})" if mine != "–" else "–",
                    _share(cell.get("words")),
                    level(cell.get("distance")),
                    formats.number(cell["passages"] and round(cell["passages"])),
                    formats.number(cell["tokens"] and round(cell["tokens"])),
                    formats.number(cell["epochs"]),
                ]
            )
        columns = [
            "arm", "perplexity", f"nats − {base}", f"{focus} − arm", "accuracy, %", f"− {base}, points",
            "words covered, %", "distance", "passages read", "unique tokens", "epochs",
        ]  # fmt: skip
        if rows:
            blocks.append(Table(columns, rows, f"{title}; 95 % t-intervals, not corrected.", frozenset(range(1, 11))))
    lead = (
        f"{_counted(target, 'texts')} texts for the selectors, {_counted(target, 'labels')} labels, "
        f"{_counted(target, 'test')} test rows; served by {', '.join(target['domains'])}. Fine-tune learning rate "
        f"{formats.number(target['fine_tune_lr'])}{', on the edge of those tried' * target['fine_tune_edge']}."
    )
    return Section(f"Target {name}", blocks, lead)


def _counted(target: Mapping[str, Any], what: str) -> str:
    """How many rows there were, and how many were asked for where that is more."""
    asked = target["asked"][what]
    return str(target[what]) if target[what] == asked else f"{target[what]} (not the {asked} asked for)"


def _embedders(document: Document) -> list[Block]:
    found = document["embedders"]
    if not found:
        return []
    first = next(iter(found))
    rows = []
    for name, e in found.items():
        mean, interval = formats.mean_and_interval(e["difference"])
        rows.append(
            [
                name, _share(e["recall"]), perplexity(e["nats"]), mean, interval, str(e["dim"]),
                formats.seconds(e["features_cpu_s"]), e["note"],
            ]
        )  # fmt: skip
    columns = ["embedder", "recall, %", "perplexity", f"nats − {first}", "95 % t", "columns", "CPU time", "what it is"]
    one = found[first]
    caption = (
        f"{document['focus']} at {one['budget']:,} of {one['rows']:,} passages, {one['seeds']} seeds, mean over "
        "targets; CPU time of the pool's features. Not corrected."
    )
    per_target = [
        [name, *(formats.number(None if v is None else 100 * v) for v in e["recalls"].values())]
        for name, e in found.items()
    ]
    targets = list(one["recalls"])
    return [
        Table(columns, rows, caption, frozenset(range(1, 7))),
        Table(["embedder", *targets], per_target, "Recall by target, %.", frozenset(range(1, len(targets) + 1))),
    ]


def _trials(document: Document) -> list[Block]:
    rows = [
        [
            trial["target"], trial["arm"], str(trial["trials"]), str(trial["failed"]), formats.number(trial["lr"]),
            f"{formats.number(trial['lowest'])} to {formats.number(trial['highest'])}",
            formats.number(trial["nats"], 4), "yes" if trial["on_edge"] else "no",
        ]
        for trial in document["trials"]
    ]  # fmt: skip
    columns = ["target", "arm", "trials", "failed", "learning rate", "tried", "validation nats", "still on an edge"]
    tuned = [
        [target, formats.number(document["targets"][target]["fine_tune_lr"]),
         ", ".join(f"{lr}: {formats.percent(value)}" for lr, value in some.items()),
         "yes" if document["targets"][target]["fine_tune_edge"] else "no"]
        for target, some in document["fine_tune_trials"].items()
    ]  # fmt: skip
    return [
        Table(columns, rows, "Warm-up.", frozenset({2, 3, 4, 6})),
        Table(
            ["target", "learning rate", "validation accuracy by rate", "on an edge"],
            tuned,
            "Fine-tune, without a warm-up.",
        ),
    ]


def _costs(document: Document) -> list[Block]:
    costs = document["costs"]
    kinds = [
        [kind, f"{c['cells']:,}", formats.seconds(c["cpu_s"]), formats.seconds(c["wall_s"]),
         formats.seconds(c["cpu_s"] / c["cells"])]
        for kind, c in costs["kinds"].items()
    ]  # fmt: skip
    stages = [[stage, formats.seconds(seconds)] for stage, seconds in costs["training"].items()]
    scores = [[arm, formats.seconds(seconds)] for arm, seconds in costs["scores"].items() if seconds is not None]
    return [
        Table(["cells", "number", "CPU time", "wall time", "each"], kinds, "", frozenset({1, 2, 3, 4})),
        Table(["stage of training runs", "CPU time"], stages, "A remembered warm-up costs nothing.", frozenset({1})),
        Table(["selector", "CPU time of one selection"], scores, "Scores alone, features given.", frozenset({1})),
    ]


def _pool(document: Document) -> Block:
    pool = document["pool"]
    items = [("read", f"{pool['passages']:,}"), ("kept", f"{pool['kept']:,}")]
    if pool["skipped"]:
        items.append(("skipped as malformed", f"{pool['skipped']:,}"))
    items += [(f"dropped: {cause}", f"{count:,}") for cause, count in pool["dropped"].items()]
    return NameValuePairs([*items, *((f"domain {name}", f"{count:,}") for name, count in pool["domains"].items())])


def _failed(document: Document) -> Block:
    if not document["failed"]:
        return Notes(["None: every cell ended."])
    columns = ["kind", "arm", "target", "budget", "seed", "how", "reason"]
    names = ("kind", "arm", "target", "budget", "seed", "status", "reason")
    return Table(columns, [["" if r[n] is None else str(r[n]) for n in names] for r in document["failed"]])
