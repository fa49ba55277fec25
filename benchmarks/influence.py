"""Do the scores of selectors say what the loss on the target becomes? Linear data-modelling scores (LDS).

    python -m benchmarks.influence --data DIR        # resumable; some 50 CPU-minutes on one thread

DIR holds `pool/pool-0.text.jsonl.xz` and the targets' files of benchmarks/studies/selection_quality. Of every target,
the shipped decoder trains `SUBSETS` times, each time on a random half of the same `POOL` passages, read once, by one
rate and seed; what counts is the mean loss of test texts that no method saw. A method's prediction for a half is the
sum of its scores over the passages in it (places in the order, where a method has an order and no scores). LDS is
Spearman's correlation of the two over the halves (Park et al. 2023, arXiv 2303.14186), its interval a bootstrap over
them. Methods predict the mean of two seeds; the ceiling of that follows from how far the losses of both seeds agree
(Spearman-Brown): a prediction without error has it, and it is above the agreement.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from scipy.stats import spearmanr

from benchmarks._harness import RESULTS, ROOT, Benchmark, limit_threads
from benchmarks._study_results import once, read_xz, write_rows
from flatshift.cli import run
from flatshift.experiments.statistics.intervals import t_interval
from flatshift.finetune.seeds import numpy_generator

NAME = "influence"
RESULT, WORK = RESULTS / NAME / "losses.json", ROOT / ".bench" / NAME
FILES = {"chemprot": "chemprot", "banking": "banking77", "agnews": "agnews_official_test_resplit"}
POOL, SUBSETS, SEEDS, TEXTS, TESTED = 384, 64, 2, 200, 150
BATCH, LENGTH, LR = 8, 64, 3e-3
GRADIENTS = ("--embedder", "gradients", "--select.embedder.dim", "1024")
METHODS: dict[str, tuple[str, ...]] = {
    "less": GRADIENTS,
    "round-robin": GRADIENTS,
    "gotd": (),
    "knn": (),
    "dsir": (),
    "moore-lewis": (),
    "classifier": (),
    "cynical": (),
    "loss-gap": ("--select.method.max_length", str(LENGTH)),
    "loss-gap, normalised": ("--select.method.max_length", str(LENGTH), "--select.method.normalised", "true"),
    "random": (),
}


def halves() -> np.ndarray:
    """(SUBSETS, POOL) bool: the passages of each half."""
    rng = numpy_generator(0, NAME, "halves")
    return np.array([rng.permutation(POOL) < POOL // 2 for _ in range(SUBSETS)])


def write_texts(name: str, data: Path) -> dict[str, Path]:
    """Write the pool, the texts that methods see, and the test texts; returns their files."""
    passages = read_xz(data / "pool" / "pool-0.text.jsonl.xz")
    rows = read_xz(data / "tasks" / f"{FILES[name]}.jsonl.xz")
    drawn = {
        "pool": ([{"id": r["id"], "text": r["text"]} for r in passages], POOL),
        "train": ([{"text": r["text"]} for r in rows if r["split"] == "train"], TEXTS),
        "test": ([{"text": r["text"]} for r in rows if r["split"] == "test"], TESTED),
    }
    files = {}
    for split, (every, count) in drawn.items():
        order = numpy_generator(0, NAME, split).permutation(len(every))[:count]
        files[split] = write_rows(WORK / name / f"{split}.jsonl", (every[i] for i in sorted(order.tolist())))
    return files


def measure_losses(files: dict[str, Path], seed: int) -> list[float]:
    """Return the loss of the test texts, nats per token, after training on each half."""
    from benchmarks.studies.selection_quality.training import fresh_engine, kept_tokenizer, train_examples
    from flatshift.experiments.recipe import from_override, load_recipe
    from flatshift.finetune.compute.numerics import evaluation_mode
    from flatshift.finetune.data.encoding import encode
    from flatshift.finetune.data.eval_batching import EvalBatching
    from flatshift.finetune.data.rows import Row
    from flatshift.finetune.evaluate.perplexity import document_nats
    from flatshift.finetune.tasks import LanguageModel

    settings = {
        "train.epochs": None, "train.steps": POOL // 2 // BATCH, "train.batch_size": BATCH, "train.max_length": LENGTH,
        "train.precision": "fp32", "train.seed": seed, "train.save_every": 0, "train.eval_every": 0,
        "optimizer.lr": LR,
    }  # fmt: skip
    recipe = load_recipe("language-model", [from_override(key, value) for key, value in settings.items()]).recipe
    tokenizer, task = kept_tokenizer(recipe.backbone), LanguageModel(pack=False)

    def examples(file: Path) -> list[Any]:
        rows = [Row({"text": r["text"]}, str(i), f"row {i}") for i, r in enumerate(read_rows(file))]
        return list(encode(rows, task=task, tokenizer=tokenizer, max_length=LENGTH).examples)

    pool, test = examples(files["pool"]), examples(files["test"])
    losses = []
    for chosen in halves():
        engine = fresh_engine(recipe, task, None)
        own = [pool[i] for i in np.flatnonzero(chosen).tolist()]
        train_examples(recipe, engine, own, task, recipe.optimizer, recipe.train)
        batching = EvalBatching.of(tokenizer, recipe.train, batch_size=64, device=engine.device)
        with evaluation_mode(engine.eval_model):
            nats, tokens = document_nats(engine.eval_model, test, batching, task=task)
        losses.append(round(float(nats.sum() / tokens.sum()), 6))
    return losses


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def score_pool(name: str, method: str, files: dict[str, Path]) -> list[float]:
    """Return a method's score of each passage, lower is better, by the public command."""
    out = WORK / name / "selection"
    shutil.rmtree(out, ignore_errors=True)
    command = ["select", "--pool", str(files["pool"]), "--target", str(files["train"]), "--data.holdout", "0"]
    command += [
        "--backbone",
        "flatshift-5m",
        "--budget",
        str(POOL),
        "--method",
        method.partition(",")[0],
        *METHODS[method],
    ]
    if run([*command, "--budget", str(POOL), "--select.checks", "false", "--out", str(out)]):
        raise SystemExit(f"the selection by {method} failed")
    scores = pq.read_table(out / "scores.parquet", columns=["score", "rank"]).to_pydict()
    own, places = np.array(scores["score"], float), np.array(scores["rank"], float)
    return [float(value) for value in (own if len(np.unique(own)) > POOL // 2 else places)]


def correlate(predicted: np.ndarray, losses: np.ndarray) -> tuple[float, float, float]:
    """Return Spearman's correlation and its 95 % bootstrap interval over the halves."""
    rng = numpy_generator(0, NAME, "bootstrap")
    draws = [rng.integers(0, len(losses), len(losses)) for _ in range(1000)]
    values = [float(spearmanr(predicted[d], losses[d]).statistic) for d in draws]
    low, high = np.quantile(values, [0.025, 0.975])
    return float(spearmanr(predicted, losses).statistic), float(low), float(high)


def ceiling(agreement: float) -> float:
    """Return the correlation of an errorless prediction with the mean of two seeds whose own correlation is given."""
    return (2 * max(agreement, 0.0) / (1 + max(agreement, 0.0))) ** 0.5


def add_ceiling(bench: Benchmark, name: str, first: Sequence[float], second: Sequence[float]) -> None:
    """Add the agreement of two seeds, and the ceiling of a prediction of their mean."""
    value, low, high = correlate(np.asarray(first), np.asarray(second))
    for what, figures in (
        ("agreement: the same halves under another seed", (value, low, high)),
        ("ceiling: an errorless prediction of the mean of both seeds", (ceiling(value), ceiling(low), ceiling(high))),
    ):
        row = bench.row(f"{name}: {what}", "Spearman", ours=figures[0])
        row["interval"] = {"low": figures[1], "high": figures[2], "confidence": 0.95}


def add_row(bench: Benchmark, what: str, predicted: Sequence[float], losses: Sequence[float]) -> float:
    value, low, high = correlate(np.asarray(predicted), np.asarray(losses))
    row = bench.row(what, "Spearman", ours=value)
    row["interval"] = {"low": low, "high": high, "confidence": 0.95}
    return value


def chance(losses: np.ndarray, subsets: np.ndarray) -> float:
    """Return the size of LDS that 95 % of random orderings of the pool stay below."""
    rng = numpy_generator(0, NAME, "chance")
    found = [abs(spearmanr(subsets @ rng.permutation(POOL), losses).statistic) for _ in range(2000)]
    return float(np.quantile(found, 0.95))


def main() -> None:
    """Run what is missing and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory with tasks/ and pool/")
    asked = parser.parse_args()
    limit_threads(1)
    bench = Benchmark(
        NAME, packages=("torch", "transformers", "peft", "scipy"), command=f"python -m benchmarks.{NAME} --data DIR"
    )
    subsets = halves()
    found: dict[str, list[float]] = {method: [] for method in METHODS}
    for name in FILES:
        files = write_texts(name, asked.data)
        losses = [
            once(RESULT, f"{name}, seed {seed}", lambda files=files, seed=seed: measure_losses(files, seed))
            for seed in range(SEEDS)
        ]
        add_ceiling(bench, name, losses[1], losses[0])
        mean = np.mean(losses, axis=0)
        bench.row(f"{name}: size that 95 % of random orderings stay below", "Spearman", ours=chance(mean, subsets))
        for method in METHODS:
            scores = once(
                RESULT, f"{name}, {method}", lambda m=method, files=files, name=name: score_pool(name, m, files)
            )
            found[method].append(add_row(bench, f"{name}: LDS of {method}", subsets @ np.array(scores), mean))
    for method, values in found.items():
        over = t_interval(values)
        row = bench.row(f"LDS of {method}, mean of {len(values)} targets", "Spearman", ours=over.value)
        row["interval"] = {"low": over.low, "high": over.high, "confidence": 0.95}
        row["reason"] = "over targets"
    bench.finish()


if __name__ == "__main__":
    main()
