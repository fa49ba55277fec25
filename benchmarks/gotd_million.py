"""The transport solver on a million float16 rows: CPU-seconds, memory over the mapped file, and the floor of one GEMM.

The pool is a memory map of N x 384 float16 rows (the clusters of `gotd_solver.data`, drawn block by block), the target
has M = 1000 rows. Solved until the marginal error is 1e-3 and two successive passes agree on 99.5 % of the best 5 %.
The floor of P passes is P·2NMd flop at the rate of float32 torch.mm on tiles of the solver's own size and threads,
timed before and after the solve in the same process. Memory is the peak of the anonymous resident set over its level
before the call. The error is computed once more here, in float64 NumPy, from the g that was returned.

Run: python -m benchmarks.gotd_million                                 1 M x 1 k at epsilon 0.05 and 0.01, two threads
     python -m benchmarks.gotd_million --features POOL.npy TARGET.npy  the same on features of your own (real text)
     python -m benchmarks.gotd_million --rows 10000000 --out 10m.json  ten million (a scratch file of 7.7 GB), and the
                                                                       first million of it: is the time linear in N?
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._harness import Benchmark, CapReached, PeakMemory, in_child

THIS = "benchmarks.gotd_million"
GOAL, OVERLAP, SHARE = 1e-3, 0.995, 0.05
MEMORY_PER_ROW = 500
"""Bytes that the solver may hold for each pool row, of a million rows or more."""
PART = 1_000_000
"""Rows of a longer pool that are solved by themselves beside the whole of it."""
BARS = {"cpu": 50.0, "floor": 1.5, "memory": 600e6}


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


# ------------------------------------------------------------------------------------- inside the child


def measure(pool: str, target: str, epsilon: float, cost: str, device: str, rows: int | None = None) -> dict[str, Any]:
    """Solve once with the threads that `in_child` allows: CPU- and wall-seconds, memory, what was reached, the floor of
    the passes it took. rows: the first ones alone."""
    from flatshift.selection import sinkhorn_potentials

    warnings.simplefilter("ignore")
    x, y = np.load(pool, mmap_mode="r")[:rows], np.load(target)
    options: dict[str, Any] = {"method": "streamed", "cost": cost, "device": device}
    sinkhorn_potentials(x[:3000], y[:200], tolerance=1e-2, epsilon=epsilon, **options)  # lazy imports are not charged
    n, d = x.shape
    before = _floor(n, d, len(y), device)
    began, wall = time.process_time(), time.perf_counter()
    with PeakMemory() as peak:
        found = sinkhorn_potentials(
            x, y, epsilon=epsilon, tolerance=GOAL, overlap=OVERLAP, memory_bytes=_memory(n), **options
        )
    cpu, wall = time.process_time() - began - peak.cpu, time.perf_counter() - wall
    after = _floor(n, d, len(y), device)
    kind = 0 if device == "cpu" else 1
    return {
        "cpu": cpu,
        "wall": wall,
        "memory": peak.bytes,
        "passes": found.passes,
        "floor": found.passes * (before[kind] + after[kind]) / 2,
        "error": found.marginal_error,
        "verified": None if cost == "cosine" else _verify(x, y, found.g, found.epsilon),
        "overlap": found.overlap,
        "estimate": found.overlap_estimate,
        "flop": found.passes * 2.0 * n * d * len(y),
    }


def _memory(n: int) -> int:
    """The cap in bytes: the solver holds some vectors of N, and its subsample grows with N."""
    return MEMORY_PER_ROW * max(n, 1_000_000)


def _floor(n: int, d: int, m: int, device: str) -> tuple[float, float]:
    """CPU-seconds and wall-seconds of one pass that only multiplies: 2NMd flop in tiles of the solver's size."""
    import torch

    from flatshift.selection.transport.kernel import TILE_BYTES, tile_rows

    rows = tile_rows(m, torch.float32, None, TILE_BYTES[device])
    left, right = torch.randn(rows, d, device=device), torch.randn(d, m, device=device)
    out = torch.empty(rows, m, device=device)
    count = max(20, int(0.2 * n / rows))
    for _ in range(5):
        torch.mm(left, right, out=out)
    if device != "cpu":
        torch.cuda.synchronize()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(count):
        torch.mm(left, right, out=out)
    if device != "cpu":
        torch.cuda.synchronize()
    scale = n / (rows * count)
    return (time.process_time() - cpu) * scale, (time.perf_counter() - wall) * scale


def _verify(x: Any, y: np.ndarray, g: np.ndarray, absolute: float) -> float:
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


# ------------------------------------------------------------------------------------- the rows


def _report(bench: Benchmark, setting: str, runs: list[dict[str, Any]], bars: bool) -> None:
    def all_of(name: str) -> list[float]:
        return [run[name] for run in runs]

    ceiling: dict[str, Any] = {"maximum": BARS["cpu"]} if bars else {}
    bench.row(f"{setting}: solver, {runs[0]['passes']} passes", "CPU-s", ours=all_of("cpu"), **ceiling)
    what = f"{setting}: beside the floor of its passes"
    bench.row(
        what, "CPU-s", ours=all_of("cpu"), peer=all_of("floor"), peer_name="float32 torch.mm", maximum=BARS["floor"]
    )
    bench.row(
        f"{setting}: memory over the mapped file",
        "bytes",
        ours=all_of("memory"),
        bar_op="<=" if bars else None,
        bar_value=BARS["memory"] if bars else None,
    )
    error = runs[0]["verified"] if runs[0]["verified"] is not None else runs[0]["error"]
    bench.row(f"{setting}: error, verified in float64", "L1 error", ours=error, maximum=GOAL)
    seen = runs[0]["overlap"]
    what = f"{setting}: overlap@{SHARE:.0%} of the last two passes"
    bench.row(
        what, "share of the selection", ours=seen, minimum=OVERLAP, reason="one pass only" if seen is None else None
    )
    what = f"{setting}: overlap@{SHARE:.0%} with the converged selection, estimated"
    bench.row(what, "share of the selection", ours=runs[0]["estimate"])


def _gpu(bench: Benchmark, folder: Path, n: int, m: int) -> None:
    """Ten million by ten thousand where a device is at hand: rate beside the device's own GEMM."""
    import torch

    what = f"{n} x {m} x 384 on a GPU, epsilon 0.05: solve beside the GEMM floor of its passes"
    if not torch.cuda.is_available():
        bench.row(what, "s", peer_name="float32 torch.mm", reason="no CUDA device at hand")
        return
    try:
        pool, target = write_data(folder, n, m, 384)
        run = in_child(
            f"{THIS}:measure", pool=pool, target=target, epsilon=0.05, cost="sqeuclidean", threads=4, device="cuda"
        )
    except (CapReached, RuntimeError, OSError) as error:  # the rows that were measured before must not be lost
        told = str(error).strip().splitlines()[-1]
        bench.row(what, "s", peer_name="float32 torch.mm", reason=f"not finished: {told}")
        return
    print(f"    {run}", flush=True)
    bench.row(what, "s", ours=run["wall"], peer=run["floor"], peer_name="float32 torch.mm")
    bench.row(f"{n} x {m} x 384 on a GPU: rate", "TFLOP/s", ours=run["flop"] / run["wall"] / 1e12)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--targets", type=int, default=1_000)
    parser.add_argument("--epsilon", type=float, nargs="+", default=(0.05, 0.01))
    parser.add_argument("--cost", choices=("sqeuclidean", "cosine"), default="sqeuclidean")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--features", nargs=2, metavar=("POOL.npy", "TARGET.npy"), help="instead of drawn rows")
    parser.add_argument("--gpu", type=int, nargs=2, default=(10_000_000, 10_000), metavar=("N", "M"))
    parser.add_argument("--scratch", type=Path, default=None, help="where the drawn pool is written")
    parser.add_argument("--out", type=Path, default=None, help="results file, if not the committed one")
    chosen = parser.parse_args()
    bench = Benchmark("gotd_million", packages=("torch", "numpy"))
    with tempfile.TemporaryDirectory(dir=chosen.scratch) as folder:
        pool, target = chosen.features or write_data(Path(folder), chosen.rows, chosen.targets, 384)
        n, d = np.load(pool, mmap_mode="r").shape
        m = len(np.load(target, mmap_mode="r"))
        for epsilon in chosen.epsilon:
            setting = f"{n} x {m} x {d} float16, {chosen.threads} threads, epsilon {epsilon}"
            runs, parts = [], []
            for _ in range(chosen.runs):
                call: dict[str, Any] = {
                    "threads": chosen.threads,
                    "pool": pool,
                    "target": target,
                    "epsilon": epsilon,
                    "cost": chosen.cost,
                    "device": "cpu",
                }
                runs.append(in_child(f"{THIS}:measure", **call))
                print(f"    {setting}: {runs[-1]}", flush=True)
                if n > PART:
                    parts.append(in_child(f"{THIS}:measure", rows=PART, **call))
                    print(f"    its first {PART} rows: {parts[-1]}", flush=True)
            _report(bench, setting, runs, bars=n <= PART)
            if parts:
                bench.row(
                    f"{setting}: a million rows and a pass",
                    "CPU-s",
                    ours=[run["cpu"] / run["passes"] / n * 1e6 for run in runs],
                    peer=[part["cpu"] / part["passes"] / PART * 1e6 for part in parts],
                    peer_name=f"the first {PART} rows",
                )
        Path(folder, "pool.npy").unlink(missing_ok=True)
        _gpu(bench, Path(folder), *chosen.gpu)
    bench.finish(chosen.out)


if __name__ == "__main__":
    main()
