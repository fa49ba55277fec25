"""The first study: does a warm-up help, does the selector matter, does GGPO? On the shipped backbone and samples.

    python -m benchmarks.first_study            # about half an hour on two cores; resumable: cells are kept in .bench/

Two targets (SciCite, bank requests), few labels, six arms (cold, random, GOT-D warm-up × plain, GGPO). Learning rates
are tuned per arm with equally many runs, by dev loss, under a seed that is not used again; then five seeds, each
fixing the labelled subset, the data order and the initialisation for all arms. Two primary endpoints, named
beforehand: perplexity of the target's test texts after the warm-up, and test accuracy after fine-tuning; both as
paired differences with 95 % t-intervals, not corrected for their number. The majority-class floor stands beside every
accuracy. Whatever comes out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._harness import RESULTS, ROOT, Benchmark
from benchmarks._study_results import add
from benchmarks._warmup_arms import ARMS, Arm, arm_cell, read_cell_result, run_warmup_study
from flatshift.experiments.recipe import from_override
from flatshift.experiments.recipe.tree import Branch
from flatshift.experiments.run.console import Console
from flatshift.experiments.statistics.intervals import t_interval
from flatshift.experiments.studies import run_cells
from flatshift.experiments.studies.executors.local import LocalExecutor
from flatshift.finetune.errors import UserError

DOCUMENTS = RESULTS / "first_study" / "documents.json"
TUNING_SEED = 1_000_003


@dataclass(frozen=True)
class Trials:
    """Learning rates tried for every arm: equally many runs each (a cold arm, with no warm-up, gets finer steps)."""

    warmup_lr: tuple[float, ...]
    lr: tuple[float, ...]
    cold_lr: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.cold_lr) != len(self.warmup_lr) * len(self.lr):
            raise UserError("trials must be equal: give as many cold_lr as warmup_lr × lr")

    def of(self, arm: Arm) -> list[tuple[float | None, float]]:
        """(warm-up lr, lr) pairs of an arm."""
        if arm.warmup == "cold":
            return [(None, lr) for lr in self.cold_lr]
        return [(w, lr) for w in self.warmup_lr for lr in self.lr]


SEEDS = tuple(range(5))
TRIALS = Trials(warmup_lr=(1e-3, 4e-3), lr=(1e-3, 3e-3), cold_lr=(5e-4, 1e-3, 3e-3, 6e-3))
COMMON = {
    "train.steps": 80,
    "train.batch_size": 8,
    "train.eval_every": 40,
    "warmup.steps": 60,
    "warmup.batch_size": 4,
    "data.dev.limit": 150,
    "eval.train_limit": 0,
    "eval.bootstrap": 100,
}
TARGETS: dict[str, dict[str, Any]] = {
    "scicite": COMMON | {"data.train.limit": 300, "data.test.limit": 500},
    "banking": COMMON
    | {
        "data.train.files": ("sample:banking/train",),
        "data.dev.files": ("sample:banking/dev",),
        "data.test.files": ("sample:banking/test",),
        "data.train.limit": 100,
    },
}
Comparison = tuple[str, str, str, str]
COMPARISONS: tuple[Comparison, ...] = (
    ("random", "plain", "cold", "plain"),
    ("gotd", "plain", "cold", "plain"),
    ("gotd", "plain", "random", "plain"),
    ("cold", "ggpo", "cold", "plain"),
    ("gotd", "ggpo", "gotd", "plain"),
    ("gotd", "ggpo", "cold", "plain"),
)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--out", type=Path, default=ROOT / ".bench" / "first_study")
    flags.add_argument("--jobs", type=int, default=2)
    flags.add_argument("--seeds", type=int, default=len(SEEDS))
    flags.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    options = flags.parse_args()
    bench = Benchmark("first_study", packages=("torch", "transformers", "peft", "numpy", "scikit-learn"))
    for name, settings in TARGETS.items():
        if name not in options.targets:
            bench.row(
                f"{name}: all comparisons",
                unit="–",
                reason=f"left out of this run: --targets {' '.join(options.targets)}",
            )
            continue
        overrides = [from_override(key, value) for key, value in settings.items()]
        console = Console()
        best, tuned = tune("warmup", options.out / name, overrides, TRIALS, options.jobs, console)
        document = run_warmup_study(
            "warmup",
            options.out / name,
            name=name,
            seeds=SEEDS[: options.seeds],
            overrides=overrides,
            settings=best,
            tuned=tuned,
            jobs=options.jobs,
            console=console,
        )
        add(DOCUMENTS, name, document)
        rows(bench, name, document)
    bench.finish()


def rates(warmup_lr: float | None, lr: float | None) -> list[Branch]:
    laid = []
    if warmup_lr is not None:
        laid.append(from_override("warmup.lr", warmup_lr))
    if lr is not None:
        laid.append(from_override("optimizer.lr", lr))
    return laid


def tune(
    recipe: str,
    out: Path,
    overrides: Sequence[Branch],
    trials: Trials,
    jobs: int,
    console: Console,
    arms: Sequence[Arm] = ARMS,
) -> tuple[dict[Arm, list[Branch]], dict[str, Any]]:
    """The best (warm-up lr, lr) of each arm by dev loss, all arms with equally many runs; they see no test rows."""
    blind = from_override("data.test.files", "[]")
    cells = {
        (arm, pair): arm_cell(recipe, [*overrides, *arm.overrides(), *rates(*pair), blind], TUNING_SEED)
        for arm in arms
        for pair in trials.of(arm)
    }
    run_cells(out, list(cells.values()), LocalExecutor(jobs), console, label="tune")
    settings, tuned = {}, {}
    for arm in arms:
        losses = {
            pair: read_cell_result(out, cells[arm, pair])["metrics"]["dev"]["loss"]["value"] for pair in trials.of(arm)
        }
        best = min(losses, key=losses.__getitem__)
        settings[arm] = rates(*best)
        lrs = [lr for _, lr in losses]
        tuned[f"{arm.warmup}/{arm.regularizer}"] = {
            "warmup_lr": best[0],
            "lr": best[1],
            "dev_loss": losses[best],
            "trials": len(losses),
            "lr_on_edge": best[1] in (min(lrs), max(lrs)),
        }
    return settings, tuned


def rows(
    bench: Benchmark,
    name: str,
    document: dict,
    comparisons: Sequence[Comparison] = COMPARISONS,
    metrics: Sequence[str] = ("perplexity", "accuracy"),
) -> None:
    """One row per comparison and endpoint: both means, their ratio, and the paired difference with its interval."""

    def by_seed(warmup: str, regularizer: str, metric: str) -> np.ndarray:
        cells = [c for c in document["cells"] if (c["warmup"], c["regularizer"]) == (warmup, regularizer)]
        return np.array([c["metrics"][metric] for c in sorted(cells, key=lambda c: c["seed"])])

    for metric in metrics:
        for warmup, regularizer, other_warmup, other_regularizer in comparisons:
            if metric == "perplexity" and warmup == "cold":
                continue  # no training before the labels: nothing to compare
            ours = by_seed(warmup, regularizer, metric)
            peer = by_seed(other_warmup, other_regularizer, metric)
            interval = t_interval(list(ours - peer))
            row = bench.row(
                f"{name}: {metric}, {warmup}/{regularizer} − {other_warmup}/{other_regularizer}, {len(ours)} seeds",
                ours=list(ours),
                peer=list(peer),
                peer_name=f"{other_warmup}/{other_regularizer}",
                unit=metric,
            )
            row["difference"] = {"mean": interval.value, "low": interval.low, "high": interval.high, "confidence": 0.95}
            if metric == "accuracy":
                row["majority_floor"] = document["floor"]


if __name__ == "__main__":
    main()
