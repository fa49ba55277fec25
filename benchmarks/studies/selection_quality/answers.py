"""What the figures answer, in sentences, and no more than they answer; losses of the focus included."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flatshift.experiments.report import formats

Document = Mapping[str, Any]


def answers(document: Document) -> list[str]:
    """One sentence for each question of the study that its figures can answer."""
    found = [
        _exploratory(document),
        _primary(document),
        _accuracy(document),
        _against(document),
        *_controls(document),
        _recall(document),
    ]
    found += [_losses(document), _embedders(document), _uninformative(document)]
    return [sentence for sentence in found if sentence]


def _percent(nats: float) -> str:
    """A difference of nats as a change of perplexity."""
    return f"{100 * math.expm1(nats):+.1f} %".replace("-", "−")


def _clear(found: Mapping[str, Any] | None) -> bool:
    return found is not None and found["p_holm"] is not None and found["p_holm"] < 0.05


def _exploratory(document: Document) -> str:
    """The protocol's own first sentence, which says what a part of a study lacks."""
    return str(document["protocol"][0]) if document["exploratory"] else ""


def _primary(document: Document) -> str:
    base = document["baseline"]
    arms = {
        name: arm["nats"]
        for name, arm in document["arms"].items()
        if arm["nats"] is not None and arm["source"] == "selector"
    }
    if not arms:
        return ""
    better = [f"{name} ({_percent(f['value'])})" for name, f in arms.items() if _clear(f) and f["value"] < 0]
    worse = [f"{name} ({_percent(f['value'])})" for name, f in arms.items() if _clear(f) and f["value"] > 0]
    same = [name for name, f in arms.items() if not _clear(f)]
    parts = []
    if better:
        parts.append(f"lower than after {base} with {_and(better)}")
    if worse:
        parts.append(f"higher with {_and(worse)}")
    if same:
        parts.append(f"not clearly different with {_and(same)}")
    return f"Perplexity on the target after the warm-up is {'; '.join(parts)}."


def _accuracy(document: Document) -> str:
    base = document["baseline"]
    arms = {n: a["accuracy"] for n, a in document["arms"].items() if a["accuracy"] is not None}
    if not arms:
        return ""
    clear = {name: f for name, f in arms.items() if _clear(f)}
    if clear:
        told = [f"{name} ({_points(f['value'])})" for name, f in clear.items()]
        boots = {name: f["bootstrap"] for name, f in clear.items() if f["bootstrap"] is not None}
        wide = [name for name, boot in boots.items() if boot["low"] <= 0 <= boot["high"]]
        beyond = f"; with other test rows too, by the bootstrap, {_and(wide)} may not differ" if wide else ""
        return f"Few-label accuracy differs from {base}'s after Holm's correction with {_and(told)}{beyond}."
    size = max((f["detectable"] for f in arms.values() if f["detectable"] is not None), default=1.0)
    seen = f"; a single uncorrected test finds {100 * size:.1f} points with 80 % power" if size < 1 else ""
    return f"No warm-up changes the few-label accuracy clearly, compared with {base}'s{seen}."


def _against(document: Document) -> str:
    focus = document["focus"]
    found = {
        name: pair["nats"]
        for name, pair in document["against"].items()
        if pair["nats"] is not None and document["arms"][name]["source"] == "selector"
    }
    if not found:
        return ""
    wins = [name for name, f in found.items() if _clear(f) and f["value"] < 0]
    losses = [name for name, f in found.items() if _clear(f) and f["value"] > 0]
    ties = [name for name in found if name not in wins and name not in losses]
    parts = []
    if wins:
        parts.append(f"is ahead of {_and(wins)}")
    if losses:
        parts.append(f"loses to {_and(losses)}")
    if ties:
        parts.append(f"cannot be told from {_and(ties)}")
    return f"In perplexity {focus} {', and '.join(parts)}."


def _controls(document: Document) -> list[str]:
    focus, found = document["focus"], []
    for name, pair in document["against"].items():
        difference, source = pair["nats"], document["arms"][name]["source"]
        if difference is None or source == "selector":
            continue
        verdict = "no clear difference" if not _clear(difference) else "lower" if difference["value"] < 0 else "higher"
        what = {
            "matched": f"a random draw with the domains and lengths of its choice ({name})",
            "form": f"what is nearest to the target in form alone ({name})",
            "pool": f"the whole pool ({name})",
            "target": f"the target's own unlabelled texts ({name})",
            "none": f"no warm-up ({name})",
        }[source]
        found.append(f"Perplexity after {focus} compared with {what}: {verdict} ({_percent(difference['value'])}).")
    return found


def _recall(document: Document) -> str:
    """Mean recall at the primary budget, best arm first."""
    budget = str(document["primary_budget"])
    means: dict[str, float] = {}
    for arm in document["arms"]:
        cells = [t["budgets"].get(budget, {}).get(arm) for t in document["targets"].values()]
        values = [cell["recall"]["value"] for cell in cells if cell is not None and cell["recall"] is not None]
        if values and len(values) == len(document["targets"]):
            means[arm] = math.fsum(values) / len(values)
    if not means:
        return ""
    ranked = sorted(means.items(), key=lambda item: -item[1])
    told = ", ".join(f"{name} {formats.percent(value)}" for name, value in ranked)
    return f"Hidden-domain recall at {int(budget):,} {document['unit']}, mean over targets: {told}."


def _losses(document: Document) -> str:
    """Where the focus is worse than another selector, or the baseline: by intervals above zero, and by means alone."""
    focus = document["focus"]
    if focus == document["baseline"]:
        return ""
    lost: list[str] = []
    seen = behind = 0
    for target, found in document["targets"].items():
        for budget, arms in found["budgets"].items():
            for arm, cell in arms.items():
                difference = cell["nats_focus"]
                if document["arms"][arm]["source"] != "selector" or difference is None or difference["low"] is None:
                    continue
                seen += 1
                behind += difference["value"] > 0
                if difference["low"] > 0:
                    lost.append(f"{target} at {int(budget):,} ({arm} {_percent(-difference['value'])})")
    if not seen:
        return ""
    if not lost:
        return (
            f"In perplexity, on no target and budget does an uncorrected 95 % interval put {focus} behind another "
            f"selector; its mean is behind in {behind} of {seen} comparisons."
        )
    return (
        f"In perplexity, {len(lost)} of {seen} uncorrected 95 % intervals put {focus} behind: on {_and(lost)}; its "
        f"mean is behind in {behind} of {seen} comparisons."
    )


def _embedders(document: Document) -> str:
    found = {name: e for name, e in document["embedders"].items() if e["nats"] is not None and e["recall"] is not None}
    if len(found) < 2:
        return ""
    first, *others = found
    by_recall = max(found, key=lambda name: found[name]["recall"]["value"])
    told: dict[str, list[str]] = {"lower": [], "higher": [], "not clearly different": []}
    for name in others:
        told[_side(found[name]["difference"])].append(name)
    parts = [f"{verdict} with {_and(names)}" for verdict, names in told.items() if names]
    return (
        f"Perplexity after {document['focus']} by another embedder than {first} is {'; '.join(parts)} (uncorrected "
        f"intervals, exploratory); mean recall is highest with {by_recall} "
        f"({formats.percent(found[by_recall]['recall']['value'])})."
    )


def _side(difference: Mapping[str, Any] | None) -> str:
    """Where a paired interval of nats lies."""
    if difference is None or difference["low"] is None or difference["low"] <= 0 <= difference["high"]:
        return "not clearly different"
    return "lower" if difference["high"] < 0 else "higher"


def _uninformative(document: Document) -> str:
    names = [name for name, target in document["targets"].items() if target["informative"] is False]
    if not names:
        return ""
    return (
        f"The backbone is too weak for {_and(names)}: its few-label accuracy is not 3 standard errors above the "
        "majority baseline."
    )


def _points(share: float) -> str:
    return f"{100 * share:+.1f} points".replace("-", "−")


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
