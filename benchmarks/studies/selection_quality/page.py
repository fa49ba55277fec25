"""A study's tables: those of docs/selection.md, and the page of every target, budget, trial and failed run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flatshift.experiments.report import formats
from flatshift.experiments.report.blocks import Block, Chapter, ChartGroup, Notes, Section, Table
from flatshift.experiments.report.charts.intervals import effect_chart
from flatshift.experiments.report.html import render

Document = Mapping[str, Any]
Found = Mapping[str, Any] | None
Lines = tuple[list[str], list[list[str]]]
"""A table's head and its rows."""


def page(document: Document) -> str:
    """The whole page as HTML; the template escapes everything that came from files or settings."""
    pool = document["pool"]
    facts = [
        ("pool", f"{pool['kept']:,} of {pool['passages']:,} passages"), ("targets", ", ".join(document["targets"])),
        ("seeds", str(document["seeds"])), ("cells", f"{document['cells']:,}"),
        ("CPU time", formats.seconds(document["cpu_s"])),
    ]  # fmt: skip
    failed = [[str(run[n]) for n in ("kind", "arm", "target", "budget", "seed", "reason")]
              for run in document["failed"]]  # fmt: skip
    sections = [
        Section("Answers", [Notes(document["answers"])]),
        Section("Primary endpoint", _endpoint(document)),
        *(Section(f"Target {name}", list(_target(document, name))) for name in document["targets"]),
        Section("Equal trials", [_table(_trials(document))], "On validation texts under the tuning seed.", folded=True),
        Section("Runs that failed", [_table((["kind", "arm", "target", "budget", "seed", "reason"], failed))]
                if failed else [Notes(["None: every cell ended."])], folded=not failed),
        Section("Protocol", [Notes(document["protocol"])]),
    ]  # fmt: skip
    return render(
        [
            Chapter(
                name=str(document["recipe"]),
                kind="selection study",
                finding=next(iter(document["answers"]), "No endpoint can be computed."),
                facts=facts,
                tiles=[],
                sections=sections,
                slug="quality",
                command=str(document.get("command", "")),
            )
        ]
    )


def _table(lines: Lines, caption: str = "") -> Table:
    return Table(*lines, caption, frozenset(range(1, len(lines[0]))))


def _endpoint(document: Document) -> list[Block]:
    base, budget = document["baseline"], f"{document['primary_budget']:,} {document['unit']}"
    forest = effect_chart(
        "quality-forest",
        [(name, arm["nats"], arm["source"] != "selector") for name, arm in ranked(document)],
        title="Perplexity after the warm-up, every arm",
        caption="Seed-paired, with 95 % t-intervals. Filled: selectors; hollow: controls. In colour where Holm's "
        "correction leaves p below 0.05 (blue better, orange worse).",
        x=f"nats per token minus {base}, mean over targets",
        left=130,
        scale=1.0,
        lower_is_better=True,
    )
    caption = f"Test texts after the warm-up, minus {base}, at {budget}, mean over targets; lower is better."
    focus = f"{document['focus']} compared with the others, change of perplexity in %."
    return [ChartGroup([forest]), _table(arms_table(document), caption), _table(focus_table(document), focus)]


def ranked(document: Document) -> list[tuple[str, Mapping[str, Any]]]:
    """Arms with an endpoint, the best first."""
    results = [(name, arm) for name, arm in document["arms"].items() if arm["nats"] is not None]
    return sorted(results, key=lambda item: item[1]["nats"]["value"])


def arms_table(document: Document) -> Lines:
    """The endpoints, an arm a row, the best first."""
    share, accuracy = recalls(document), has_accuracy(document)
    further = [m for m in ("form_nats", "pool_nats") if any(arm.get(m) for arm in document["arms"].values())]
    names = {"form_nats": "in plain form, %", "pool_nats": "of the pool, % (forgetting)"}
    head = ["arm", "perplexity, %", "over targets, %", "nats/token", "over seeds", "p (Holm)"]
    head += [names[metric] for metric in further]
    head += ["accuracy, points", "95 % interval", "95 % with test rows"] * accuracy + ["recall, %", "what it is"]
    lines = []
    for name, arm in ranked(document):
        nats = arm["nats"]
        over = interval_over_targets(nats)
        cells = [name, percent(nats), over, *formats.mean_and_interval(nats), formats.number(nats["p_holm"])]
        cells += [percent(arm[metric]) for metric in further]
        if accuracy:
            result = arm["accuracy"]
            boot = {**result, **result["bootstrap"]} if result and result["bootstrap"] else None
            cells += [*formats.mean_and_interval(result, 100.0), formats.mean_and_interval(boot, 100.0)[1]]
        lines.append([*cells, formats.number(100 * share[name]) if name in share else "–", arm["note"]])
    return head, lines


def focus_table(document: Document) -> Lines:
    """The focus minus each other arm: mean with its interval and Holm's p, in plain form, and target by target."""
    single: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for target, budget, arm, result in beside_focus(document):
        single.setdefault((arm, budget), {})[target] = result
    form = any(pair.get("form_nats") for pair in document["against"].values())
    primary, targets = f"{document['primary_budget']:,}", list(document["targets"])
    sizes = {budget for _, budget in single}
    lines = []
    for (arm, size), by_target in single.items():
        whole = size == primary
        pair = document["arms"][document["focus"]] if arm == document["baseline"] else document["against"][arm]
        cells = [arm, *([size] * (len(sizes) > 1))]
        if whole and pair["nats"] is not None:
            over = interval_over_targets(pair["nats"])
            cells += [percent(pair["nats"], interval=True), over, formats.number(pair["nats"]["p_holm"])]
        else:
            mean = math.fsum(result["value"] for result in by_target.values()) / len(by_target)
            cells += [percent({"value": mean}), "–", "–"]
        cells += [percent(pair.get("form_nats") if whole else None, interval=True)] * form
        lines.append([*cells, *(percent(by_target.get(target)) for target in targets)])
    head = ["compared with", *(["budget"] * (len(sizes) > 1)), "mean (over seeds)", "over targets", "p (Holm)"]
    return [*head, *(["in plain form"] * form), *targets], lines


def _target(document: Document, name: str) -> Iterator[Block]:
    """A table a budget: level, difference to the baseline and to the focus, accuracy and coverage of every arm."""
    target = document["targets"][name]
    head = ["arm", "learning rate", "perplexity", f"nats − {document['baseline']}", f"{document['focus']} − arm",
            "accuracy, %", "recall, %", "words covered, %", "unique tokens", "epochs"]  # fmt: skip
    groups = {f"{int(budget):,} {document['unit']}": arms for budget, arms in target["budgets"].items()}
    for title, arms in {**groups, "Without a budget": target["controls"]}.items():
        lines = [
            [
                arm, formats.number(cell["lr"]), level(cell["nats"], math.exp),
                formats.with_interval(cell["nats_difference"], plus=True),
                formats.with_interval(cell["nats_focus"], plus=True), level(cell["accuracy"], _hundredfold),
                level(cell.get("recall"), _hundredfold), level(cell.get("words"), _hundredfold),
                formats.number(cell["tokens"] and round(cell["tokens"])), formats.number(cell["epochs"]),
            ]
            for arm, cell in arms.items()
        ]  # fmt: skip
        if lines:
            yield _table((head, lines), f"{title}; 95 % t-intervals, not corrected.")


def _trials(document: Document) -> Lines:
    head = ["target", "arm", "trials", "failed", "learning rate", "tried", "validation nats", "still on an edge"]
    return head, [
        [
            trial["target"], trial["arm"], str(trial["trials"]), str(trial["failed"]), formats.number(trial["lr"]),
            f"{formats.number(trial['lowest'])} to {formats.number(trial['highest'])}",
            formats.number(trial["nats"], 4), "yes" if trial["on_edge"] else "no",
        ]
        for trial in document["trials"]
    ]  # fmt: skip


# --------------------------------------------------------------------------------------------- figures


def level(result: Found, scale: Callable[[float], float]) -> str:
    """A mean with its interval on another scale."""
    if result is None:
        return "–"
    return formats.with_interval({key: result[key] and scale(result[key]) for key in ("value", "low", "high")})


def _hundredfold(share: float) -> float:
    return 100.0 * share


def percent(result: Found, *, interval: bool = False) -> str:
    """A difference of nats as a change of perplexity in percent."""
    if result is None:
        return "–"
    ends = [result[key] for key in ("value", "low", "high") if result.get(key) is not None]
    mean, *rest = (f"{100 * math.expm1(end):+.1f}".replace("-", "−") for end in ends)
    return f"{mean} ({' to '.join(rest)})" if interval and rest else mean


def interval_over_targets(result: Mapping[str, Any]) -> str:
    """The interval over targets of an endpoint, as a change of perplexity in percent."""
    over = result["over_targets"]
    return "–" if over is None else percent(over, interval=True).partition("(")[2].rstrip(")")


def beside_focus(document: Document) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
    """(target, budget, arm, focus minus it in nats), of every arm that selects."""
    for name, target in document["targets"].items():
        for budget, arms in target["budgets"].items():
            for arm, cell in arms.items():
                if cell["nats_focus"] is not None:
                    yield name, f"{int(budget):,}", arm, cell["nats_focus"]


def has_accuracy(document: Document) -> bool:
    """Return True where accuracy was asked after the primary budget."""
    return any(arm["accuracy"] is not None for arm in document["arms"].values())


def recalls(document: Document) -> dict[str, float]:
    """Arm → recall at the primary budget, mean over the targets with hidden domains."""
    budget = str(document["primary_budget"])
    results: dict[str, float] = {}
    for arm in document["arms"]:
        cells = [target["budgets"].get(budget, {}).get(arm) for target in document["targets"].values()]
        values = [cell["recall"]["value"] for cell in cells if cell is not None and cell["recall"] is not None]
        if values:
            results[arm] = math.fsum(values) / len(values)
    return results
