"""The protocol, in the words that the page and the results file carry."""

from __future__ import annotations

from benchmarks.studies.selection_quality.plan import Plan
from benchmarks.studies.selection_quality.settings import Quality
from flatshift.experiments.report import formats


def protocol(plan: Plan, budget: int | None) -> list[str]:
    """Sentences, in order. budget: the one that endpoints are computed at."""
    study, recipe = plan.study, plan.resolved.recipe
    warmup, train = recipe.warmup, recipe.train
    assert warmup is not None
    rows = warmup.batch_size * warmup.accumulate
    supervised = warmup.steps * rows * (study.packed - 1)
    base, focus = study.baseline, study.focus
    other = " (but where a target's own settings, named below, say otherwise)" * any(
        target.set for target in study.targets.values()
    )
    sentences = [
        f"Primary endpoint, named beforehand: nats per token of the targets' test texts after the warm-up at a budget "
        f"of {study.primary_budget:,}, arm minus {base}, mean over targets, per seed; its mean over seeds with a "
        "two-sided paired t-test, Holm-corrected over all arms. Lower is better. Arms without a budget are compared as "
        f"they are. A second family is {focus} minus every other arm; the same two families are formed for accuracy. "
        "Recall, coverage, other budgets and per-target figures are secondary; their p-values are not corrected.",
        f"Every warm-up{other} takes {warmup.steps} steps of {rows} rows of {study.packed} tokens ({supervised:,} "
        "supervised tokens), whatever the budget: passages of the selection in a seeded order, end to end; a larger "
        "budget is a wider choice to draw them from, not a longer training."
        if study.unit == "passages"
        else f"Every step of a warm-up{other} reads {rows} rows of {study.packed} tokens, passages of the selection in "
        "a seeded order, end to end. Budgets count tokens of the backbone: a selection is the best passages that hold "
        "so many, and its warm-up takes as many steps as read it through once, whatever the length of its passages. A "
        "passage that cynical takes again is read again, and counts each time.",
        f"Every arm gets {len(study.lr)} learning rates and {study.rounds} further "
        f"trial{'s' if study.rounds != 1 else ''} on every target, at the budget {study.primary_budget:,}, evaluated "
        f"by nats on validation texts under the seed {study.tuning_seed}, which no final run uses; the rate serves all "
        "budgets of the arm.",
        f"The fine-tune{other} takes {train.steps} steps of {train.batch_size * train.accumulate} rows; its learning "
        f"rate is chosen once per target without a warm-up, from {len(study.fine_tune_lr)} trials, and serves every "
        "arm: if that favours anyone, it is the base model without warm-up.",
        "A seed draws the target's texts that selectors see, the labelled rows among them, the selection where it is a "
        "draw, the order of training and the adapter. Validation and test rows are the same for all. Learning rates "
        f"are chosen on validation rows alone; {_test_rows(study)}.",
        f"{study.seeds} seeds for every arm; intervals are 95 % t-intervals of seed-paired differences. The detectable "
        "effect is (t.975 + t.80)·s_d/√S. Where all seeds differ by the same amount, there is no spread to test by: no "
        "p and no interval are given, and Holm's correction counts that arm with p = 1.",
        "The t-intervals hold for these test rows and targets; item sampling is not in them. Accuracy endpoints have a "
        "second interval, the percentiles of a bootstrap over seeds and test rows, the same rows for both "
        "sides; of nats only totals are kept, and no such interval is given.",
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
    if study.forgetting:
        sentences.append(
            "Forgetting: nats per token of the same passages of the pool after every warm-up, some of which a "
            "selection may have read."
        )
    if any(plan.missing.values()):
        sentences.insert(0, _exploratory(plan, budget))
    if study.embedders:
        sentences.append(
            f"The embedder comparison is exploratory: every embedder takes the learning rate that was tuned for "
            f"{focus} on the study's own features."
        )
    sentences += [
        f"Target {name} has settings of its own, the same for every arm: "
        + ", ".join(f"{key} {formats.json_value(value)}" for key, value in target.set.items())
        + "."
        for name, target in study.targets.items()
        if target.set
    ]
    return [*sentences, *study.notes]


def _exploratory(plan: Plan, budget: int | None) -> str:
    """What a part of a study lacks."""
    gone = "; ".join(f"{what} {', '.join(names)}" for what, names in plan.missing.items() if names)
    at = "its figures"
    if budget != plan.study.primary_budget:
        where = "at no common budget" if budget is None else f"at a budget of {budget:,}"
        at = f"its figures, {where} instead of the primary {plan.study.primary_budget:,},"
    return (
        f"This is a part of the study, run without its {gone}: {at} are exploratory, and Holm's correction counts no "
        "arm but those that ran."
    )


def _test_rows(study: Quality) -> str:
    """What reads test rows."""
    embedders = " and the embedder comparison's" if study.embedders else ""
    return (
        f"test rows are evaluated by the final runs{embedders}, once in each, and nothing is chosen by that. Test "
        "texts are read before that too, without labels: to clear the pool of them, and for the coverage of every "
        "selection"
    )
