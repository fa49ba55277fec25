"""The protocol, in the words that the page and the results file carry."""

from __future__ import annotations

from experiments.quality.plan import Plan


def protocol(plan: Plan, budget: int | None) -> list[str]:
    """Sentences, in order. budget: the one that endpoints are computed at."""
    study, recipe = plan.study, plan.resolved.recipe
    warmup, train = recipe.warmup, recipe.train
    assert warmup is not None
    rows = warmup.batch_size * warmup.accumulate
    supervised = warmup.steps * rows * (study.packed - 1)
    base, focus = study.baseline, study.focus
    sentences = [
        f"Primary endpoint, named beforehand: nats per token of the targets' test texts after the warm-up at a budget "
        f"of {study.primary_budget:,}, arm minus {base}, mean over targets, per seed; its mean over seeds with a "
        "two-sided paired t-test, Holm-corrected over all arms. Lower is better. Arms without a budget are compared as "
        f"they are. A second family is {focus} minus every other arm; the same two families are formed for accuracy. "
        "Recall, coverage, other budgets and per-target figures are secondary; their p-values are not corrected.",
        f"Every warm-up takes {warmup.steps} steps of {rows} rows of {study.packed} tokens ({supervised:,} supervised "
        "tokens), whatever the budget: passages of the selection in a seeded order, end to end; a larger budget is a "
        "wider choice to draw them from, not a longer training.",
        f"Every arm gets {len(study.lr)} learning rates and {study.rounds} further "
        f"trial{'s' if study.rounds != 1 else ''} on every target, at the budget {study.primary_budget:,}, judged by "
        f"nats on validation texts under the seed {study.tuning_seed}, which no final run uses; the rate serves all "
        "budgets of the arm.",
        f"The fine-tune takes {train.steps} steps of {train.batch_size * train.accumulate} rows; its learning rate is "
        f"chosen once per target without a warm-up, from {len(study.fine_tune_lr)} trials, and serves every arm: if "
        "that favours anyone, it is the cold backbone.",
        "A seed draws the target's texts that selectors see, the labelled rows among them, the selection where it is a "
        "draw, the order of training and the adapter. Validation and test rows are the same for all; test rows are "
        "judged once, in the final runs.",
        f"{study.seeds} seeds for every arm; intervals are 95 % t-intervals of seed-paired differences. The detectable "
        "effect is (t.975 + t.80)·s_d/√S.",
        "Recall: the share of the hidden domains' passages among those chosen, of what the budget could hold. "
        "Coverage: the share of running words in the test texts that the selection contains, and the mean squared "
        "distance from a test text to its nearest chosen passage in the study's features (which gotd, knn and tsds use "
        "and dsir does not). Tags of domains are read for these figures and for the matched draw only.",
        "The pool is cleaned before any selector sees it: duplicates inside it, and whatever repeats a target's "
        "training, validation or test text.",
        "A diverged run has no figure: its seed is left out for both sides, and it is listed.",
    ]
    if budget != study.primary_budget:
        at = "at no common budget" if budget is None else f"at a budget of {budget:,}"
        sentences.insert(
            0,
            f"This part of the study was run without its primary budget of {study.primary_budget:,}: its figures, "
            f"{at}, are exploratory.",
        )
    if study.embedders:
        sentences.append(
            f"The embedder comparison is exploratory: every embedder takes the learning rate that was tuned for "
            f"{focus} on the study's own features."
        )
    return [*sentences, *study.notes]
