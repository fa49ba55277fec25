"""Run directories made up for the report's tests: every file of the contract, with believable numbers.

Kept out of `test_*.py` so that a person can write them to disk and look at the page:
`python -m tests.support.report_runs OUT` (needs the repository root on the path).
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[2]
DOMAINS = ("cs_papers", "biomed", "novels", "wikipedia", "news", "reviews", "legal", "chat", "code_docs")
WORDS = [
    "we",
    "propose",
    "a",
    "method",
    "that",
    "improves",
    "citation",
    "intent",
    "labels",
    "over",
    "strong",
    "baselines",
    "the",
    "results",
    "show",
    "that",
    "prior",
    "work",
    "relied",
    "on",
    "features",
    "from",
    "parse",
    "trees",
    "and",
    "ours",
    "does",
    "not",
    "in",
    "contrast",
    "to",
    "earlier",
    "corpora",
]


def provenance(folder: Path, command: str, recipe: str | None = None) -> None:
    """command.txt, environment.json and maybe recipe.resolved.yaml."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "command.txt").write_text(command + "\n")
    environment = {
        "created": "2026-11-20T22:50:00Z",
        "python": "3.13.1",
        "platform": "Linux-6.1-x86_64",
        "cpu": "A CPU @ 2.4 GHz",
        "cores": 2,
        "memory": 25769803776,
        "commit": "1c1f027",
        "variables": {"OMP_NUM_THREADS": "1"},
        "threads": 1,
        "versions": {"flatshift": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0", "peft": "0.21.2", "x": None},
        "gpu": None,
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    if recipe is not None:
        (folder / "recipe.resolved.yaml").write_text(recipe)


RECIPE = """\
extends: warmup                     # command line
backbone: flatshift-5m              # default
task:
  kind: classify                    # recipe warmup.yaml:4
adapter:
  rank: 8                           # default
  alpha: null                       # default
regularizer:
  kind: ggpo                        # command line
  sigma: 0.05                       # default
select:
  budget: 1000                      # recipe warmup.yaml:12
  columns:
    text: text                      # default
"""


def cell(value: float, half: float, n: int) -> dict[str, Any]:
    """One metric of eval.json."""
    return {"value": value, "low": value - half, "high": value + half, "n": n}


def selection(folder: Path, *, size: int = 6000, budget: int = 400, seed: int = 0) -> None:
    """What `flatshift select` leaves: scores, chosen records, judging tags, map and manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    domain = rng.choice(len(DOMAINS), size, p=np.array([7, 14, 19, 22, 13, 9, 6, 6, 4]) / 100)
    score = rng.gamma(6, 0.02, size) - 0.05 + np.array([-0.07, -0.02, 0.05, 0.02, 0.02, 0.04, 0.03, 0.05, 0.0])[domain]
    rank = np.empty(size, dtype=np.int64)
    rank[np.argsort(score, kind="stable")] = np.arange(1, size + 1)
    ids = [f"0-{i}" for i in range(size)]
    near = [f"t-{i % 97}" for i in range(size)]
    table = {"id": ids, "score": score, "rank": rank, "selected": rank <= budget, "nearest_target": near}
    table["domain"] = pa.nulls(size, pa.string())
    pq.write_table(pa.table(table), folder / "scores.parquet")
    (folder / "judged_domains.tsv").write_text(
        "".join(f"{i}\t{DOMAINS[d]}\n" for i, d in zip(ids, domain, strict=True))
    )
    with (folder / "selected.jsonl").open("w") as handle:
        for i in np.argsort(score, kind="stable")[:budget]:
            text = " ".join(rng.choice(WORDS, rng.integers(18, 80))).capitalize() + "."
            handle.write(json.dumps({"id": ids[i], "text": text, "score": score[i], "rank": int(rank[i])}) + "\n")
    centre = rng.normal(0, 2.2, (len(DOMAINS), 2))
    xy = centre[domain] + rng.normal(0, 0.55, (size, 2))
    target = centre[0] * 1.1 + rng.normal(0, 0.5, (300, 2))
    chosen = np.flatnonzero(rank <= budget)
    others = rng.choice(np.flatnonzero(rank > budget), 2500, replace=False)
    points = np.concatenate([xy[others], xy[chosen], target]).astype(np.float32)
    kinds = ["pool"] * len(others) + ["selection"] * len(chosen) + ["target"] * len(target)
    mapped = pa.table({"x": points[:, 0], "y": points[:, 1], "kind": kinds})
    pq.write_table(mapped.replace_schema_metadata({"flatshift.explained": "[0.214, 0.096]"}), folder / "map.parquet")
    about = {
        "method": "gotd",
        "embedder": "tfidf",
        "budget": budget,
        "pool": size,
        "target": 300,
        "helpful": int((score < 0).sum()),
        "skipped": {"pool": ["pool.jsonl:17: no column text"], "target": []},
        "seconds": {"features": 3.21, "scores": 1.4},
        "epsilon": 0.05,
        "mean_cost": 1.683,
        "marginal_error": 3.1e-10,
        "dual_value": 0.0871,
        "iterations": 214,
    }
    inputs = [{"path": "pool.jsonl", "sha256": "ab" * 32, "bytes": 4_812_330, "rows": size}]
    (folder / "manifest.json").write_text(
        json.dumps({"created": "2026-11-20T22:50:05+00:00", "inputs": inputs, "selection": about})
    )


def training(folder: Path, *, steps: int = 120, seed: int = 0, gap: float = 0.0) -> None:
    """A finished `warmup` run: two stages, evaluation, selection."""
    provenance(folder, "flatshift train warmup --out runs/first --regularizer.kind ggpo", RECIPE)
    rng = np.random.default_rng(seed)
    lines = []
    for stage, length, start, end in (("warm-up", 40, 4.35, 3.9), ("fine-tune", steps, 1.12, 0.62)):
        for step in range(1, length + 1):
            loss = end + (start - end) * math.exp(-4 * step / length) + rng.normal(0, 0.05)
            lr = 1e-3 * 0.5 * (1 + math.cos(math.pi * step / length)) * min(1, step / 6)
            extra = {
                "grad_norm": 0.8 + 0.3 * rng.random(),
                "sigma": 0.05,
                "gradient_share": 0.4 + 0.3 * (1 - math.exp(-step / 20)),
            }
            lines.append(
                {
                    "stage": stage,
                    "attempt": 1,
                    "step": step,
                    "split": "train",
                    "loss": loss,
                    "tokens": step * 512,
                    "lr": lr,
                    "time_s": 0.31 * step,
                    **extra,
                }
            )
            if stage == "fine-tune" and step % 20 == 0:
                dev = 0.74 + 0.3 * math.exp(-3 * step / length) + 0.05 * (step / length) ** 3
                lines.append(
                    {
                        "stage": stage,
                        "attempt": 1,
                        "step": step,
                        "split": "dev",
                        "loss": dev,
                        "accuracy": 0.7,
                        "time_s": 0.31 * step,
                    }
                )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tree = {}
    for split, value, n in (("train", 0.83, 300), ("dev", 0.70 + gap, 500), ("test", 0.69 + gap, 1000)):
        tree[split] = {
            "loss": cell(1.3 - value, 0.03, n),
            "accuracy": cell(value, 0.9 / math.sqrt(n), n),
            "f1_macro": cell(value - 0.06, 1.0 / math.sqrt(n), n),
            "matthews": cell(value - 0.25, 1.3 / math.sqrt(n), n),
            "majority_floor": cell(0.53, 0.0, n),
        }
    (folder / "eval.json").write_text(json.dumps(tree))
    inputs = [{"path": "sample:scicite-train", "sha256": "cd" * 32, "bytes": 120_000, "rows": 300}]
    (folder / "manifest.json").write_text(json.dumps({"inputs": inputs}))
    for stage, done in (
        ("warm-up", {"steps": 40, "best_dev_loss": None, "best_step": 40}),
        ("fine-tune", {"steps": steps, "best_dev_loss": 0.741, "best_accuracy": 0.69, "best_step": 80}),
    ):
        (folder / "stages" / stage).mkdir(parents=True)
        (folder / "stages" / stage / "done.json").write_text(
            json.dumps({"target_steps": done["steps"], "stopped_early": False, **done})
        )
    for name, value in (("before", 88.2), ("eval", 71.4)):
        pair = {
            split: {"perplexity": cell(value + d, 1.9, 500), "bits_per_byte": cell(1.41 * value / 88, 0.01, 500)}
            for split, d in (("dev", 0.4), ("test", 0))
        }
        (folder / "stages" / "warm-up" / f"{name}.json").write_text(json.dumps(pair))
    (folder / "timings.json").write_text(json.dumps({"seconds": 67.2}))
    selection(folder / "selection", seed=seed)


def comparison(folder: Path) -> None:
    """The committed comparison of flat-minimum methods, in a directory of its own."""
    provenance(folder, "flatshift compare flat-comparison --out comparison")
    shutil.copyfile(ROOT / "benchmarks" / "results" / "flat_comparison" / "comparison.json", folder / "comparison.json")


def sweep(folder: Path, *, seeds: int = 3, limits: tuple[int, ...] = (), seed: int = 0) -> None:
    """sweep.json and cells.parquet over the rank, with `limits` also over data.train.limit."""
    provenance(
        folder,
        "flatshift sweep double-descent --grid adapter.rank=1,2,4,8,16,32,64 --seeds 3",
        "backbone: flatshift-5m\n",
    )
    rng = np.random.default_rng(seed)
    rows = []
    for limit in limits or (None,):
        for rank in (1, 2, 4, 8, 16, 32, 64):
            for s in range(seeds):
                size = 1.0 if limit is None else (limit / 500) ** 0.3
                train = max(0.0, 0.42 - 0.085 * math.log2(rank) / size + rng.normal(0, 0.012))
                test = (
                    0.36 / size
                    + 0.09 * math.exp(-((math.log2(rank) - 3.6) ** 2))
                    - 0.012 * math.log2(rank)
                    + rng.normal(0, 0.015)
                )
                row = {
                    "cell": f"{limit}-{rank}-{s}",
                    "adapter.rank": rank,
                    "seed": s,
                    "status": "done",
                    "reason": None,
                    "seconds": 12.5,
                }
                if limit is not None:
                    row["data.train.limit"] = limit
                row |= {
                    "train.accuracy": 1 - train,
                    "train.error": train,
                    "test.accuracy": 1 - test,
                    "test.error": test,
                    "test.loss": 2.1 * test,
                    "train.loss": 2 * train,
                }
                if rank == 64 and s == seeds - 1:
                    row |= {"status": "failed", "reason": "fine-tune: the loss at step 12 is not a finite number"}
                    row = {k: v for k, v in row.items() if not k.startswith(("train.a", "train.e", "train.l", "test."))}
                rows.append(row)
    names = list(dict.fromkeys(k for row in rows for k in row))
    pq.write_table(pa.table({k: [row.get(k) for row in rows] for k in names}), folder / "cells.parquet")
    grid = {"adapter.rank": ["1", "2", "4", "8", "16", "32", "64"]} | (
        {"data.train.limit": [str(x) for x in limits]} if limits else {}
    )
    cells = math.prod(map(len, grid.values())) * seeds
    plan = {"format": 2, "recipe": "double-descent", "grid": grid, "seeds": seeds, "cells": cells}
    (folder / "sweep.json").write_text(json.dumps(plan))


def laboratory(
    folder: Path,
    *,
    ranks: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64),
    rates: tuple[float, ...] = (0.0005, 0.002),
    kinds: tuple[str, ...] = ("plain", "ggpo"),
    seeds: int = 5,
    bump: float = 0.12,
    seed: int = 0,
) -> None:
    """A sweep of format 2 over rank, learning rate and regularizer, with traces: cells.parquet and curves.parquet.

    The mean test error has a bump of height `bump` where the train error vanishes, at every learning rate.
    """
    import itertools

    command = "flatshift sweep noisy --grid adapter.rank=1,2,4,8,16,32,64 optimizer.lr=5e-4,2e-3 --seeds 5"
    provenance(folder, command, "backbone: flatshift-5m\noptimizer:\n  betas: [0.9, 0.999]\n")
    rng = np.random.default_rng(seed)
    steps = (0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 100)
    cells, curves = [], []
    for rank, rate, kind, s in itertools.product(ranks, rates, kinds, range(seeds)):
        name = f"{rank:03d}{rate:g}{kind[0]}{s}"
        point = {"adapter.rank": rank, "optimizer.lr": rate, "regularizer.kind": kind, "seed": s}
        size = (1 + 0.5 * rank**0.7) * rng.normal(1, 0.03)
        line: dict[str, Any] = {}
        shared = rng.normal(0, 0.01)
        for step in steps:
            fit = math.log2(1 + rank) * (step / 100) ** 0.6
            train = min(max(0.55 * math.exp(-0.5 * fit) - 0.03 + rng.normal(0, 0.008), 0.0), 1.0)
            rise = bump * math.exp(-(((math.log2(rank) - 3) / 0.9) ** 2)) * (step / 100)
            test = 0.30 + 0.3 * math.exp(-0.6 * fit) + rise + shared + rng.normal(0, 0.01)
            spike = 4.0 if rate > 0.001 and step == 16 else 1.0
            line = {
                "train.loss": 2.1 * train + 0.02 * spike,
                "train.error": train,
                "test.loss": 2.4 * test,
                "test.error": test,
                "train.error_clean": 0.8 * train,
                "train.error_noisy": min(2.2 * train, 1.0),
                "train.memorised": 1 - min(2.2 * train, 1.0),
                "train.recovered": 0.3 * train,
                "grad.a": None if step == 0 else spike * 0.4 * rng.lognormal(0, 0.1),
                "grad.b": None if step == 0 else spike * 0.7 * rng.lognormal(0, 0.1),
                "update.ratio": 0.01 * size * step / 100,
                "update.relative": None if step == 0 else 0.01 * rng.lognormal(0, 0.1),
                "balance": 3.0 - size * step / 100,
                "stable_rank": 1 + 0.3 * size * step / 100,
                "participation": 1 + 0.6 * size * step / 100,
                "effective_params": 2048 * (1 + 0.6 * size * step / 100),
                "sharpness.preconditioned": 22.0 / rate * rng.lognormal(0, 0.1) if step in (16, 64) else None,
            }
            progress = {"stage": "fine-tune", "attempt": 1, "step": step, "tokens": 64 * step, "lr": rate}
            curves.append({"cell": name, **point, **progress, "time_s": 0.1 * step, **line})
        about = {"status": "done", "reason": None, "seconds": 11.5, "flatshift": "0.3.0", "code": "abc123"}
        cells.append({"cell": name, **point, **about, **line})
    for file, rows in (("cells.parquet", cells), ("curves.parquet", curves)):
        names = list(dict.fromkeys(k for row in rows for k in row))
        pq.write_table(pa.table({k: [row.get(k) for row in rows] for k in names}), folder / file)
    grid = {"adapter.rank": [*map(str, ranks)], "optimizer.lr": [*map(str, rates)], "regularizer.kind": [*kinds]}
    plan = {"format": 2, "recipe": "noisy", "grid": grid, "design": "grid", "seeds": seeds, "flatshift": "0.3.0"}
    plan["cells"] = len(ranks) * len(rates) * len(kinds) * seeds
    (folder / "sweep.json").write_text(json.dumps(plan))


def demo(folder: Path) -> None:
    """What `flatshift demo` leaves: a run, a comparison, a sweep."""
    training(folder / "warmup")
    comparison(folder / "comparison")
    sweep(folder / "sweep")
    provenance(folder, "flatshift demo --out flatshift-demo")


if __name__ == "__main__":
    out = Path(sys.argv[1])
    demo(out / "demo")
    sweep(out / "two-axes", limits=(250, 1000))
    laboratory(out / "laboratory")
    provenance(
        out / "select", "flatshift select --pool pool.jsonl --target target.jsonl --budget 400 --out select", RECIPE
    )
    selection(out / "select")
