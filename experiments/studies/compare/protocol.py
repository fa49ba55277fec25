"""The protocol, in the words that the page and the results file carry."""

from __future__ import annotations

from experiments.recipe.comparison import Comparison


def protocol(study: Comparison) -> list[str]:
    """Sentences, in order."""
    confirmatory = [name for name, method in study.methods.items() if method.confirmatory and name != study.baseline]
    return [
        f"Primary endpoint, named beforehand: the mean over informative classification tasks of test accuracy, method "
        f"minus {study.baseline}, per seed; its mean over seeds with a two-sided paired t-test. Per-task figures, "
        "generation, macro F1, sharpness and equal-time runs are secondary.",
        f"Every method, {study.baseline} included, gets {study.trials} first trials on every task it runs on and "
        f"{study.rounds} further ones: beyond the edge where its best learning rate lies on one, else between its best "
        "and the better neighbour. A method's own knobs come out of the same trials.",
        f"Trials use the seed {study.tuning_seeds[0]}{_again(study)} No final run uses such a seed. Trials are judged "
        "on validation rows by the task's metric, ties by loss. Test rows are judged once, in the final runs; the last "
        "step's adapter is taken.",
        "A seed fixes the labelled subset, the order, the adapter's initialisation (where methods share it) and "
        "dropout for all methods.",
        f"{study.seeds} seeds: {', '.join([study.baseline, *confirmatory])}. {study.exploratory_seeds} seeds: the "
        "others, exploratory, compared with the baseline on the same seeds.",
        "p-values are Holm-corrected over all methods together. The detectable effect is (t.975 + t.80)·s_d/√S.",
        f"A task is informative if the tuned {study.baseline} exceeds the majority floor by three standard errors "
        "(seeds and test items).",
        "The bootstrap resamples seeds and test items, the same for both sides of a difference.",
        f"Equal time: a method whose step takes more than {study.equal_time_above:g} × the baseline's CPU time is run "
        "again, same seeds and settings, with as many steps as the baseline's time allows.",
        "A diverged final run counts with its task's majority floor and is listed; a diverged trial is lost. For a "
        "generation task, where there is no floor, its seed is left out for both sides.",
    ]


def _again(study: Comparison) -> str:
    """What happens to the best trials before one is chosen."""
    further = study.tuning_seeds[1:]
    if not further:
        return "."
    return (
        f"; the best {study.finalists} of each method and task run again under {', '.join(map(str, further))}, and the "
        "one with the best mean over all tuning seeds is taken."
    )
