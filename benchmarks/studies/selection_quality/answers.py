"""The study in sentences: its protocol, and what the figures answer and no more; losses of the focus included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.studies.selection_quality.page import beside_focus, percent, recalls
from benchmarks.studies.selection_quality.plan import Plan
from flatshift.experiments.report import formats

Document = Mapping[str, Any]
_CONTROLS = {
    "matched": "a random draw with the domains and lengths of its choice",
    "form": "what is nearest to the target in form alone",
    "pool": "the whole pool",
    "target": "the target's own unlabelled texts",
    "none": "no warm-up",
}
_Family = dict[str, Mapping[str, Any]]


def answers(document: Document) -> list[str]:
    """One sentence for each question of the study that its figures can answer."""
    arms, base, focus = document["arms"], document["baseline"], document["focus"]
    nats = {n: arm["nats"] for n, arm in arms.items() if arm["nats"] is not None}
    against = {n: pair["nats"] for n, pair in document["against"].items() if pair["nats"] is not None}
    selectors = {name for name, arm in arms.items() if arm["source"] == "selector"}
    result = [str(document["protocol"][0])] if document["exploratory"] else []
    family = {n: f for n, f in nats.items() if n in selectors}
    words = (f"lower than after {base} with", "higher with", "not clearly different with")
    if family:
        outcome = _sides(family, words, _shown)
        result.append(f"Perplexity on the target after the warm-up is {'; '.join(outcome)}.")
    result += _accuracy(document)
    family = {n: f for n, f in against.items() if n in selectors}
    if family:
        outcome = _sides(family, ("is ahead of", "loses to", "cannot be told from"), lambda name, f: name)
        result.append(f"In perplexity {focus} {', and '.join(outcome)}.")
    for name, pair in against.items():
        if name not in selectors:
            verdict = "no clear difference" if not _clear(pair) else "lower" if pair["value"] < 0 else "higher"
            what = f"{_CONTROLS[arms[name]['source']]} ({name})"
            result.append(f"Perplexity after {focus} compared with {what}: {verdict} ({percent(pair)} %).")
    shares = recalls(document)
    if shares:
        ranks = sorted(shares.items(), key=lambda item: -item[1])
        outcome = [f"{name} {formats.percent(value)}" for name, value in ranks]
        result.append(
            f"Hidden-domain recall at {document['primary_budget']:,} {document['unit']}, mean over targets: "
            f"{', '.join(outcome)}."
        )
    result += _losses(document)
    weak = [name for name, target in document["targets"].items() if target["informative"] is False]
    if weak:
        result.append(
            f"The backbone is too weak for {_and(weak)}: its few-label accuracy is not 3 standard errors above the "
            "majority baseline."
        )
    return result


def _clear(results: Mapping[str, Any] | None) -> bool:
    return results is not None and results["p_holm"] is not None and results["p_holm"] < 0.05


def _sides(family: _Family, words: tuple[str, str, str], shown: Any) -> list[str]:
    """A family parted into clearly below, clearly above and neither, each with its words."""
    below = [shown(n, f) for n, f in family.items() if _clear(f) and f["value"] < 0]
    above = [shown(n, f) for n, f in family.items() if _clear(f) and f["value"] > 0]
    same = [name for name, f in family.items() if not _clear(f)]
    return [f"{word} {_and(names)}" for word, names in zip(words, (below, above, same), strict=True) if names]


def _shown(name: str, results: Mapping[str, Any]) -> str:
    return f"{name} ({percent(results)} %)"


def _accuracy(document: Document) -> list[str]:
    base = document["baseline"]
    arms = {n: a["accuracy"] for n, a in document["arms"].items() if a["accuracy"] is not None}
    clear = {name: f for name, f in arms.items() if _clear(f)}
    if clear:
        results = [f"{name} ({100 * f['value']:+.1f} points)".replace("-", "−") for name, f in clear.items()]
        wide = [n for n, f in clear.items() if f["bootstrap"] and f["bootstrap"]["low"] <= 0 <= f["bootstrap"]["high"]]
        beyond = f"; with other test rows too, by the bootstrap, {_and(wide)} may not differ" if wide else ""
        return [f"Few-label accuracy differs from {base}'s after Holm's correction with {_and(results)}{beyond}."]
    size = max((f["detectable"] for f in arms.values() if f["detectable"] is not None), default=1.0)
    seen = f"; a single uncorrected test finds {100 * size:.1f} points with 80 % power" if size < 1 else ""
    return [f"No warm-up changes the few-label accuracy clearly, compared with {base}'s{seen}."] if arms else []


def _losses(document: Document) -> list[str]:
    """Where the focus is worse than another selector, or the baseline: by intervals above zero, and by means alone."""
    focus = document["focus"]
    pairs = [
        (f"{target} at {budget} ({arm} {percent({'value': -result['value']})} %)", result)
        for target, budget, arm, result in beside_focus(document)
        if focus != document["baseline"] and document["arms"][arm]["source"] == "selector" and result["low"] is not None
    ]
    lost = [name for name, result in pairs if result["low"] > 0]
    behind = f"its mean is behind in {sum(f['value'] > 0 for _, f in pairs)} of {len(pairs)} comparisons."
    if lost:
        return [f"In perplexity, {len(lost)} of {len(pairs)} uncorrected 95 % intervals put {focus} behind: on "
                f"{_and(lost)}; {behind}"]  # fmt: skip
    return [f"In perplexity, on no target and budget does an uncorrected 95 % interval put {focus} behind another "
            f"selector; {behind}"] if pairs else []  # fmt: skip


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


# --------------------------------------------------------------------------------------------- protocol


def protocol(plan: Plan) -> list[str]:
    """The protocol's sentences, in order."""
    study, recipe = plan.study, plan.resolved.recipe
    warmup, train = recipe.warmup, recipe.train
    assert warmup is not None
    rows = warmup.batch_size * warmup.accumulate
    base, focus = study.baseline, study.focus
    own = {name: target.set for name, target in study.targets.items() if target.set}
    other = " (but where a target's own settings, named below, say otherwise)" * bool(own)
    sentences = [
        f"Primary endpoint, named beforehand: nats per token of the targets' test texts after the warm-up at a budget "
        f"of {study.primary_budget:,}, arm minus {base}, mean over targets, per seed; its mean over seeds with a "
        "two-sided paired t-test, Holm-corrected over all arms. Lower is better. Arms without a budget are compared as "
        f"they are. A second family is {focus} minus every other arm; the same two families are formed for accuracy. "
        "Recall, coverage, other budgets and per-target figures are secondary; their p-values are not corrected.",
        f"Every warm-up{other} takes {warmup.steps} steps of {rows} rows of {study.packed} tokens, whatever the "
        "budget: passages of the selection in a seeded order, end to end."
        if study.unit == "passages"
        else f"Every step of a warm-up{other} reads {rows} rows of {study.packed} tokens, passages of the selection in "
        "a seeded order, end to end. Budgets count tokens of the backbone: a selection is the best passages that hold "
        "so many, and its warm-up takes as many steps as read it through once, whatever the length of its passages. A "
        "passage that cynical takes again is read again, and counts each time.",
        f"Every arm gets {len(study.lr)} learning rates and {study.rounds} further trials on "
        f"{', '.join(study.tune_on) or 'every target'}, at the "
        f"budget {study.primary_budget:,}, evaluated by nats on validation texts under the seed {study.tuning_seed}, "
        f"which no final run uses; the rate serves all budgets of the arm{' and all targets' * bool(study.tune_on)}.",
        "There is no fine-tune with labels."
        if not study.fine_tune
        else f"The fine-tune{other} takes {train.steps} steps of {train.batch_size * train.accumulate} rows; its "
        f"learning rate is chosen once per target without a warm-up, from {len(study.fine_tune_lr)} trials, and serves "
        "every arm: if that favours anyone, it is the base model without warm-up.",
        "A seed draws the target's texts that selectors see, the labelled rows among them, the selection where it is a "
        "draw, the order of training and the adapter. Validation and test rows are the same for all. Learning rates "
        "are chosen on validation rows alone; test rows are evaluated by the final runs, once in each. Test texts are "
        "read before that too, without labels: to clear the pool of them, and for the coverage of every selection.",
        f"{study.seeds} seeds for every arm; intervals are 95 % t-intervals of seed-paired differences. The detectable "
        "effect is (t.975 + t.80)·s_d/√S. Where all seeds differ by the same amount, there is no spread to test by: no "
        "p and no interval are given, and Holm's correction counts that arm with p = 1.",
        "Intervals over seeds hold for these test rows and targets; item sampling is not in them. The interval over "
        "targets, of each one's mean over seeds, is for the mean over targets like these; a single target may lie "
        "outside. Accuracy endpoints have a second interval, the percentiles of a bootstrap over seeds and test rows, "
        "the same rows for both sides; of nats only totals are kept, and no such interval is given.",
        "Recall: the share of the hidden domains' passages among those chosen, of what the budget could hold. "
        "Coverage: the share of running words in the test texts that the selection contains, and the mean squared "
        "distance from a test text to its nearest chosen passage in the study's features (which gotd, knn and tsds use "
        "and dsir does not). Tags of domains are read for these figures and for the matched draw only.",
        "The pool is cleaned before any selector sees it: duplicates inside it, and whatever repeats a target's "
        "training, validation or test text.",
        "A diverged run has no figure: its seed is left out for both sides, and it is listed.",
    ]
    if forms := [name for name, arm in study.arms.items() if arm.source == "form"]:
        sentences.append(
            f"By form alone ({', '.join(forms)}): moore-lewis on case, digits, marks and spacing, without any word. "
            "What it wins shows what nats owe to form."
        )
    if study.form:
        sentences.append(
            "Nats in plain form come from a second warm-up at the same rate and seed: chosen passages and test texts "
            "alike in lower case, one space between words and runs of marks, so that case and spacing win nothing."
        )
    if study.form_after:
        sentences.append(
            "Nats in plain form are those of the same warm-up on the test texts in lower case, one space between words "
            "and runs of marks: what is learnt of case and spacing alone wins nothing there."
        )
    if study.forgetting:
        sentences.append(
            f"Forgetting: nats per token of the same {study.elsewhere} passages of the pool after every warm-up, some "
            "of which a selection may have read."
        )
    if any(plan.missing.values()):
        gone = "; ".join(f"{what} {', '.join(names)}" for what, names in plan.missing.items() if names)
        first = f"This is a part of the study, run without its {gone}: its figures are exploratory, and Holm's "
        sentences.insert(0, f"{first}correction counts no arm but those that ran.")
    for name, keys in own.items():
        text = ", ".join(f"{key} {formats.json_value(value)}" for key, value in keys.items())
        sentences.append(f"Target {name} has settings of its own, the same for every arm: {text}.")
    return [*sentences, *study.notes]
