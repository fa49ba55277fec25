"""A sweep of 10,000 points reported: time and memory of `flatshift report` on a synthetic sweep directory.

    python -m benchmarks.sweep_report [--cells 10000]

Points are cells: 10 ranks × 5 learning rates × 2 regularizers × 5 sizes of the training set × 4 shares of label noise ×
5 seeds, each with a trace of 15 recorded steps (150,000 rows). Twice: with the tables that a sweep writes at its end,
and as a kill leaves it, with nothing but 10,000 directories of cells. The page is made in a fresh process with one
thread, imports and reading included; memory is that of the whole process.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._harness import Benchmark, in_child
from flatshift.finetune.seeds import numpy_generator

RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
RATES = tuple(float(f"{1e-4 * 4**i:.6g}") for i in range(5))
REGULARIZERS = ("plain", "ggpo")
AXES = ("adapter.rank", "optimizer.lr", "regularizer", "data.train.limit", "data.label_noise")
LIMITS = (125, 250, 500, 1000, 2000)
NOISE = (0.0, 0.1, 0.2, 0.4)
SEEDS = 5
STEPS = (0, 1, 2, 4, 8, 16, 32, 64, 91, 128, 181, 256, 362, 512, 600)


def write_sweep(folder: Path, cells: int = 10_000, seed: int = 0) -> None:
    """sweep.json, cells.parquet and curves.parquet of about `cells` cells; fewer cells have fewer learning rates.

    The curves are smooth functions of the axes with a bump where the train error vanishes, plus noise; one cell in 200
    failed.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    each = len(RANKS) * len(REGULARIZERS) * len(LIMITS) * len(NOISE) * SEEDS
    rates = RATES[: max(round(cells / each), 1)]
    axes = np.meshgrid(RANKS, rates, REGULARIZERS, LIMITS, NOISE, np.arange(SEEDS), indexing="ij")
    rank, rate, regularizer, limit, noise, run = (a.ravel() for a in axes)
    count = len(rank)
    draw = numpy_generator(seed, "benchmarks", "sweep_report")
    failed = draw.random(count) < 1 / 200
    ids = np.array([f"{i:016x}" for i in range(count)])
    shared = dict(zip(AXES, (rank, rate, regularizer, limit, noise), strict=True))
    shared = {"cell": ids, **shared, "seed": run}
    last = _figures(rank, limit, noise, np.full(count, STEPS[-1]), draw)
    status = np.where(failed, "failed", "done")
    reasons = [f"the loss at step {i % 600} is not a finite number" if bad else None for i, bad in enumerate(failed)]
    table = {**shared, "status": status, "reason": reasons, "seconds": draw.gamma(9, 2, count)}
    table |= {"flatshift": ["0.3.0"] * count}
    table |= {name: pa.array(values, mask=failed) for name, values in last.items()}
    pq.write_table(pa.table(table), folder / "cells.parquet")
    done = np.flatnonzero(~failed)
    place = np.repeat(done, len(STEPS))
    step = np.tile(STEPS, len(done))
    trace = {name: column[place] for name, column in shared.items()}
    trace |= {"stage": ["fine-tune"] * len(place), "attempt": np.ones(len(place), dtype=int), "step": step}
    trace |= {"tokens": step * 512, "lr": rate[place], "time_s": step * 0.05}
    trace |= _figures(rank[place], limit[place], noise[place], step, draw)
    pq.write_table(pa.table(trace), folder / "curves.parquet")
    levels = (RANKS, rates, REGULARIZERS, LIMITS, NOISE)
    grid = {name: [str(v) for v in values] for name, values in zip(AXES, levels, strict=True)}
    plan = {"format": 2, "recipe": "synthetic", "grid": grid, "design": "grid", "seeds": SEEDS, "flatshift": "0.3.0"}
    plan |= {"cells": count, "keys": ids.tolist()}
    (folder / "sweep.json").write_text(json.dumps(plan))


def write_cells(tables: Path, folder: Path) -> None:
    """The same sweep as directories of cells, without its tables."""
    import pyarrow.parquet as pq

    traces: dict[str, list[str]] = {}
    for line in pq.read_table(tables / "curves.parquet").to_pylist():
        figures = {key: value for key, value in line.items() if key not in ("cell", "seed", *AXES)}
        traces.setdefault(line["cell"], []).append(json.dumps(figures) + "\n")
    for row in pq.read_table(tables / "cells.parquet").to_pylist():
        cell = folder / "cells" / row["cell"]
        cell.mkdir(parents=True)
        metrics: dict[str, dict[str, Any]] = {}
        for name, value in row.items():
            split, _, metric = name.partition(".")
            if split in ("train", "test") and value is not None:
                metrics.setdefault(split, {})[metric] = {"value": value}
        result = {key: row[key] for key in ("cell", "seed", "status", "reason", "seconds", "flatshift")}
        result |= {"point": {axis: row[axis] for axis in AXES}, "metrics": metrics, "diverged": row["status"] != "done"}
        (cell / "result.json").write_text(json.dumps(result))
        (cell / "trace.json").write_text(json.dumps({"steps": STEPS}))
        (cell / "trace.jsonl").write_text("".join(traces.get(row["cell"], [])))
    (folder / "sweep.json").write_bytes((tables / "sweep.json").read_bytes())


def _figures(
    rank: np.ndarray, limit: np.ndarray, noise: np.ndarray, step: np.ndarray, draw: np.random.Generator
) -> dict[str, np.ndarray]:
    """What a trace line holds, as believable functions of the setting."""
    count = len(rank)
    fit = np.log2(rank + 1) * np.sqrt(step / STEPS[-1]) * (500 / limit) ** 0.5
    train = np.clip(0.6 * np.exp(-0.45 * fit) + 0.01 * draw.standard_normal(count), 0, 1)
    bump = noise * 0.6 * np.exp(-(((train - 0.1) / 0.08) ** 2))
    test = np.clip(0.25 + 0.4 * np.exp(-0.3 * fit) + bump + 0.02 * draw.standard_normal(count), 0, 1)
    size = rank**0.6 * np.sqrt(step / STEPS[-1] + 1e-3)
    return {
        "train.loss": 2.2 * train,
        "train.error": train,
        "test.loss": 2.5 * test,
        "test.error": test,
        "train.error_clean": train * 0.8,
        "train.error_noisy": np.clip(train * 2, 0, 1),
        "train.memorised": np.clip(1 - train * 2, 0, 1),
        "grad.a": np.where(step > 0, 0.5 * draw.lognormal(0, 0.2, count), np.nan),
        "grad.b": np.where(step > 0, 0.8 * draw.lognormal(0, 0.2, count), np.nan),
        "update.ratio": 0.01 * size,
        "update.relative": 0.002 * draw.lognormal(0, 0.2, count),
        "balance": 3.0 - size,
        "stable_rank": 1 + 0.4 * size,
        "participation": 1 + 0.7 * size,
        "effective_params": 1024 * (1 + 0.7 * size) * 12,
    }


def report(folder: str) -> dict[str, Any]:
    """Make the page in this (fresh) process: {"cpu", "wall", "peak", "bytes"}; called in a child."""
    start = time.monotonic()
    from flatshift.experiments.report import build_report

    page = build_report([Path(folder)], out=Path(folder) / "report.html")
    wall = time.monotonic() - start
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "cpu": used.ru_utime + used.ru_stime,
        "wall": wall,
        "peak": used.ru_maxrss * 1024,
        "bytes": page.stat().st_size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=10_000)
    cells = parser.parse_args().cells
    bench = Benchmark("sweep_report", packages=("numpy", "scipy", "pyarrow", "matplotlib"))
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder) / "whole", Path(folder) / "killed"
        write_sweep(whole, cells)
        write_cells(whole, killed)
        for place, left in ((whole, ""), (killed, ", without tables")):
            runs = [in_child("benchmarks.sweep_report:report", folder=str(place)) for _ in range(3)]
            what = f"report of {cells:,} cells with {len(STEPS)} recorded steps each{left}"
            bench.row(f"{what}, CPU time", "CPU-s", ours=[r["cpu"] for r in runs], maximum=10)
            bench.row(f"{what}, wall time", "s", ours=[r["wall"] for r in runs], maximum=10)
            peak = [r["peak"] for r in runs]
            bench.row(f"{what}, peak resident memory", "bytes", ours=peak, maximum=2**30)
            bench.row(f"{what}, the page", "bytes", ours=[r["bytes"] for r in runs])
    bench.finish()


if __name__ == "__main__":
    main()
