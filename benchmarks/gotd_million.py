"""The transport solver on a million float16 rows: CPU-seconds, memory over the mapped file, and the floor of one GEMM.

    python -m benchmarks.gotd_million                                 1 M x 1 k at epsilon 0.05 and 0.01, two threads
    python -m benchmarks.gotd_million --features POOL.npy TARGET.npy  the same on features of your own (real text)
    python -m benchmarks.gotd_million --rows 10000000 --out 10m.json  ten million (a scratch file of 7.7 GB), and the
                                                                      first million of it: is the time linear in N?

The pool is a memory map of N x 384 float16 rows (the clusters of `gotd_solver.data`, drawn block by block), the target
has M = 1000 rows. Solved until the marginal error is 1e-3 and two successive passes agree on 99.5 % of the best 5 %.
The floor of P passes is P·2NMd flop at the rate of float32 torch.mm on tiles of the solver's own size and threads,
timed before and after the solve in the same process. Memory is the peak of the anonymous resident set over its level
before the call. The error is computed once more here, in float64 NumPy, from the g that was returned. On a GPU:
`python -m benchmarks.gpu`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._harness import Benchmark, PeakMemory, cpu_seconds, in_child

GOAL, OVERLAP, SHARE = 1e-3, 0.995, 0.05
MEMORY_PER_ROW = 500
"""Bytes that the solver may hold for each pool row, of a million rows or more."""
PART = 1_000_000
"""Rows of a longer pool that are solved by themselves beside the whole of it."""


def write_data(folder: Path, n: int, m: int, d: int, seed: int = 0) -> tuple[str, str]:
    """Write pool.npy (float16) and target.npy (float32); see `gotd_solver.data`, whose distribution this is."""
    r = np.random.default_rng(seed)
    spectrum = ((1.0 + np.arange(d)) ** -0.5).astype(np.float32)
    spectrum /= np.linalg.norm(spectrum)
    centres = r.standard_normal((200, d), dtype=np.float32) * spectrum
    share = r.dirichlet(np.full(200, 0.5))
    order = np.argsort(share)
    pool = np.lib.format.open_memmap(folder / "pool.npy", mode="w+", dtype=np.float16, shape=(n, d))
    for low in range(0, n, 50_000):
        home = r.choice(200, min(50_000, n - low), p=share)
        rows = centres[home] + 0.8 * r.standard_normal((len(home), d), dtype=np.float32) * spectrum
        pool[low : low + len(rows)] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    pool.flush()
    home = np.concatenate([r.choice(order[20:30], m // 2), r.choice(order[-5:], m - m // 2)])
    y = centres[home] + (0.8 * r.standard_normal((m, d)) + 0.15 * r.standard_normal(d)) * spectrum
    np.save(folder / "target.npy", (y / np.linalg.norm(y, axis=1, keepdims=True)).astype(np.float32))
    return str(folder / "pool.npy"), str(folder / "target.npy")


def memory_cap(n: int) -> int:
    """Bytes: the solver holds some vectors of N, and its subsample grows with N."""
    return MEMORY_PER_ROW * max(n, 1_000_000)


def measure(pool: str, target: str, epsilon: float, rows: int | None = None) -> dict[str, Any]:
    """Solve once with the threads that `in_child` allows: CPU-seconds, memory, what was reached, the floor of the
    passes it took. rows: the first ones alone."""
    from flatshift.selection import sinkhorn_potentials

    warnings.simplefilter("ignore")
    x, y = np.load(pool, mmap_mode="r")[:rows], np.load(target)
    sinkhorn_potentials(
        x[:3000], y[:200], tolerance=1e-2, epsilon=epsilon, method="streamed"
    )  # imports are not charged
    options: dict[str, Any] = {"tolerance": GOAL, "overlap": OVERLAP, "memory_bytes": memory_cap(len(x))}
    n, d = x.shape
    before, began = floor(n, d, len(y)), time.process_time()
    with PeakMemory() as peak:
        result = sinkhorn_potentials(x, y, epsilon=epsilon, method="streamed", **options)
    cpu = time.process_time() - began - peak.cpu
    return {
        "cpu": cpu,
        "memory": peak.bytes,
        "passes": result.passes,
        "floor": result.passes * (before + floor(n, d, len(y))) / 2,
        "verified": marginal_error(x, y, result.g, result.epsilon),
        "overlap": result.overlap,
        "estimate": result.overlap_estimate,
    }


def floor(n: int, d: int, m: int) -> float:
    """CPU-seconds of one pass that only multiplies: 2NMd flop in tiles of the solver's size."""
    import torch

    from flatshift.selection.transport.kernel import TILE_BYTES, tile_rows

    rows = tile_rows(m, torch.float32, None, TILE_BYTES["cpu"])
    left, right, out = torch.randn(rows, d), torch.randn(d, m), torch.empty(rows, m)
    count = max(20, int(0.2 * n / rows))
    for _ in range(5):
        torch.mm(left, right, out=out)
    return cpu_seconds(lambda: [torch.mm(left, right, out=out) for _ in range(count)]) * n / (rows * count)


def marginal_error(x: Any, y: np.ndarray, g: np.ndarray, absolute: float) -> float:
    """|Pᵀ1 − b|₁ at g in float64, in NumPy alone: nothing of the solver is used to judge it."""
    y = y.astype(np.float64)
    right, offset = 2.0 * y.T / absolute, (g - (y * y).sum(1)) / absolute
    column = np.zeros(len(y))
    for low in range(0, len(x), 4000):
        plan = np.asarray(x[low : low + 4000], dtype=np.float64) @ right
        plan += offset
        plan -= plan.max(1, keepdims=True)
        np.exp(plan, out=plan)
        column += (1.0 / plan.sum(1)) @ plan
    return float(np.abs(column / len(x) - 1.0 / len(y)).sum())


def report(bench: Benchmark, setting: str, runs: list[dict[str, Any]], *, bars: bool) -> None:
    """The rows of one setting; bars: also those on CPU-seconds and memory, which are of a million rows."""
    first, cpu = runs[0], [run["cpu"] for run in runs]
    unit = "share of the selection"
    bench.row(f"{setting}: solver, {first['passes']} passes", "CPU-s", ours=cpu, maximum=50.0 if bars else None)
    peer = {"peer": [run["floor"] for run in runs], "peer_name": "float32 torch.mm"}
    bench.row(f"{setting}: beside the floor of its passes", "CPU-s", ours=cpu, **peer, maximum=1.5)
    memory = [run["memory"] for run in runs]
    bench.row(f"{setting}: memory over the mapped file", "bytes", ours=memory, maximum=600e6 if bars else None)
    bench.row(f"{setting}: error, verified in float64", "L1 error", ours=first["verified"], maximum=GOAL)
    what, seen = f"{setting}: overlap@{SHARE:.0%}", first["overlap"]
    reason = "one pass only" if seen is None else None
    bench.row(f"{what} of the last two passes", unit, ours=seen, minimum=OVERLAP, reason=reason)
    bench.row(f"{what} with the converged selection, estimated", unit, ours=first["estimate"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=PART)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--features", nargs=2, metavar=("POOL.npy", "TARGET.npy"), help="instead of drawn rows")
    parser.add_argument("--out", type=Path, default=None, help="results file, if not the committed one")
    chosen = parser.parse_args()
    bench = Benchmark("gotd_million", packages=("torch", "numpy"))
    with tempfile.TemporaryDirectory() as folder:
        pool, target = chosen.features or write_data(Path(folder), chosen.rows, 1000, 384)
        n, d = np.load(pool, mmap_mode="r").shape
        for epsilon in (0.05, 0.01):
            setting = f"{n} x {len(np.load(target))} x {d} float16, {chosen.threads} threads, epsilon {epsilon}"
            runs: dict[int, list[dict[str, Any]]] = {n: [], PART: []}
            for _ in range(2):
                for rows in {n, min(n, PART)}:
                    call = {"pool": pool, "target": target, "epsilon": epsilon, "rows": rows}
                    runs[rows].append(in_child("benchmarks.gotd_million:measure", threads=chosen.threads, **call))
                    print(f"    {setting}, {rows} rows: {runs[rows][-1]}", flush=True)
            report(bench, setting, runs[n], bars=n <= PART)
            if n > PART:
                each = [[run["cpu"] / run["passes"] / rows * 1e6 for run in runs[rows]] for rows in (n, PART)]
                what, peer = f"{setting}: a million rows and a pass", f"the first {PART} rows"
                bench.row(what, "CPU-s", ours=each[0], peer=each[1], peer_name=peer)
    bench.finish(chosen.out)


if __name__ == "__main__":
    main()
