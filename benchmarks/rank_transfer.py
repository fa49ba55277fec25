"""Does the best learning rate of one rank serve another? AdamW beside the optimizers of pairs of factors.

    python -m benchmarks.rank_transfer        # resumable; some 15 CPU-minutes on one thread

Language modelling of the shipped SciCite sentences on the shipped decoder, ranks 2 and 32, a grid of rates by factors
of 2, `SEEDS` seeds. The figures are of the loss on dev after equally many steps: the best rate of each rank, what rank
32 gives up at the best rate of rank 2, and how far both ranks are apart at one rate, in the mean over the rates that
are not above the best of either. A control: AdamW with a rate that falls with the root of the rank.
"""

from __future__ import annotations

import shutil

import numpy as np

import flatshift
from benchmarks._harness import RESULTS, ROOT, Benchmark, limit_threads
from benchmarks._study_results import once
from flatshift.experiments.results.sweep import read_sweep
from flatshift.finetune.config import FACTOR_OPTIMIZERS

NAME = "rank_transfer"
LOSSES, WORK = RESULTS / NAME / "losses.json", ROOT / ".bench" / NAME
KINDS = ("adamw", *FACTOR_OPTIMIZERS)
RANKS = (2, 32)
LOWEST = {"adamw": 1e-3, "riemannian": 1e-3, "lora-muon": 2.5e-4}
RATES = {kind: [LOWEST[kind] * 2**power for power in range(6)] for kind in KINDS}
SEEDS = 1
SETTINGS = {
    "train.epochs": None, "train.steps": 40, "train.batch_size": 4, "train.max_length": 64, "train.eval_every": 0,
    "train.precision": "fp32", "train.threads": 1, "eval.train_limit": 0, "eval.cold": 0, "eval.bootstrap": 10,
    "data.test.files": [], "data.dev.limit": 100, "regularizer.kind": "plain",
}  # fmt: skip


def measure_losses(kind: str) -> dict[str, list[list[float]]]:
    """Return the losses on dev [seed][rate] by rank."""
    out = WORK / kind
    grid = {"adapter.rank": list(RANKS), "optimizer.lr": RATES[kind]}
    overrides = {**SETTINGS, "optimizer.kind": kind}
    flatshift.sweep("language-model", grid, out=out, seeds=SEEDS, overrides=overrides, jobs=1, quiet=True)
    data = read_sweep(out)
    assert data is not None
    losses = {str(r): data.matrix("dev.loss", "optimizer.lr", {"adapter.rank": r}).y.tolist() for r in RANKS}
    shutil.rmtree(out)
    return losses


def judge(small: np.ndarray, large: np.ndarray) -> tuple[float, float, float, float]:
    """Return the figures of the rows from the losses of both ranks, rate by rate."""
    best = int(np.argmin(small)), int(np.argmin(large))
    apart = float(np.abs(small - large)[: min(best) + 1].mean())
    return 2.0 ** (best[1] - best[0]), float(large[best[0]] - large.min()), apart, float(large.min())


def main() -> None:
    """Measure every kind and write the rows."""
    limit_threads(1)
    bench = Benchmark(NAME, packages=("torch", "transformers", "peft", "numpy"))
    figures = {}
    for kind in KINDS:
        losses = once(LOSSES, kind, lambda kind=kind: measure_losses(kind))
        small, large = (np.array(losses[str(rank)]).mean(axis=0) for rank in RANKS)
        figures[kind] = judge(small, large)
        print(f"· {kind}: {RATES[kind]}, {small.round(3)}, {large.round(3)}", flush=True)
        if kind == "adamw":  # rank 32 at a quarter of the rate of rank 2
            figures["adamw, rate ÷ √rank"] = judge(small[2:], large[:-2])
    names = (
        ("best rate of rank 32 ÷ best rate of rank 2", "ratio"),
        ("loss that rank 32 gives up at the best rate of rank 2", "nats"),
        ("loss between the ranks at one rate", "nats"),
        ("best loss of rank 32", "nats"),
    )
    for index, (what, unit) in enumerate(names):
        for kind, own in figures.items():
            if kind != "adamw":
                bench.row(f"{what}, {kind}", unit, ours=own[index], peer=figures["adamw"][index], peer_name="adamw")
    bench.finish()


if __name__ == "__main__":
    main()
