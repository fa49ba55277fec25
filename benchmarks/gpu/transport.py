"""GOT-D's solver with its tiles on the GPU: seconds of a pass and of a solve, beside passes that others would make.

The pool is made in float16 on the device, block by block, from the clusters of `gotd_solver.data`, and lies in host
memory; the solver reads it tile by tile. A pass is one exact evaluation of the semi-dual: the potentials of all pool
rows and the column sums, from one product a tile. A baseline needs both as well, by two sweeps of log-sum-exp (pool
side, then target side), with the pool already on the device in float32: in plain torch, a block of the product at a
time, and online by KeOps, which is what geomloss runs for large problems.
"""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.gpu.devices import Device, first_line, out_of_memory
from benchmarks.gpu.measurements import Figures

SEED, CLUSTERS, BLOCK = 0, 200, 1 << 18
TORCH, KEOPS = "torch, blocks of logsumexp", "KeOps, online as geomloss"
GOAL, OVERLAP = 1e-3, 0.995


def data(n: int, m: int, d: int, device: str) -> tuple[np.ndarray, np.ndarray]:
    """(n, d) float16 and (m, d) float32, rows of length one in clusters with a power-law spectrum; the target lives in
    rare and frequent ones."""
    import torch

    where = Device(device).torch
    r = np.random.default_rng(SEED)
    spectrum = (1.0 + np.arange(d)) ** -0.5
    spectrum /= np.linalg.norm(spectrum)
    centres = r.standard_normal((CLUSTERS, d)) * spectrum
    share = r.dirichlet(np.full(CLUSTERS, 0.5))
    order = np.argsort(share)
    pool = np.empty((n, d), dtype=np.float16)
    generator = torch.Generator(where).manual_seed(SEED)
    scale, middle = (torch.from_numpy(a).float().to(where) for a in (0.8 * spectrum, centres))
    for low in range(0, n, BLOCK):
        count = min(BLOCK, n - low)
        home = torch.from_numpy(r.choice(CLUSTERS, count, p=share)).to(where)
        rows = torch.randn(count, d, device=where, generator=generator) * scale + middle[home]
        pool[low : low + count] = (rows / rows.norm(dim=1, keepdim=True)).half().cpu().numpy()
    homes = np.concatenate([r.choice(order[20:30], m // 2), r.choice(order[-5:], m - m // 2)])
    y = centres[homes] + (0.8 * r.standard_normal((m, d)) + 0.15 * r.standard_normal(d)) * spectrum
    return pool, (y / np.linalg.norm(y, axis=1, keepdims=True)).astype(np.float32)


def solve(
    *,
    device: str,
    n: int,
    m: int,
    d: int = 384,
    epsilon: float = 0.05,
    memory_bytes: int = 32 << 30,
    passes: int = 3,
    baselines: bool = True,
    sample: int = 1_000_000,
) -> Figures:
    """Seconds of a pass (`passes` of them, after one that is not counted), of a whole solve, its error; baselines.

    sample: pool rows that a baseline's pass is timed on at most, in proportion to all of them.
    """
    from flatshift.selection.transport.solver import sinkhorn_potentials

    where = Device(device)
    x, y = data(n, m, d, device)
    took, absolute, g = _passes(x, y, epsilon, where, passes)
    results: Figures = {"pass": {"ours": took}}
    options: dict[str, Any] = {"epsilon": epsilon, "method": "streamed", "memory_bytes": memory_bytes, "device": device}
    start = where.now()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what was not reached stands in its row
        answer = sinkhorn_potentials(x, y, tolerance=GOAL, overlap=OVERLAP, **options)
    results["solve"] = {
        "ours": where.now() - start,
        "reason": f"{answer.passes} passes, reading the pool once included",
    }
    results["error"] = {"ours": answer.marginal_error}
    if baselines:
        part = x[: min(n, sample)]
        times: dict[str, Callable[[], Figures]] = {
            TORCH: lambda: _baseline(_blocks, part, y, g, absolute, where, n, passes),
            KEOPS: lambda: _baseline(_online, part, y, g, absolute, where, n, passes),
        }
        for name, run in times.items():
            results[f"pass|{name}"] = {"ours": took, **run()["pass"]}
    return results


def agreement(*, device: str, n: int, m: int, d: int = 64, budget: float = 0.05) -> Figures:
    """GOT-D's scores on the device beside the CPU's: the largest difference as a share of their spread, and how much of
    the best `budget` of the pool is chosen by both."""
    from flatshift.selection import GotDSelector, Pool

    x, y = data(n, m, d, "cpu")
    pool, target, scores = Pool(features=x), Pool(features=y), []
    for where in ("cpu", device):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what was not reached was so on both
            scores.append(np.asarray(GotDSelector(device=where).fit(pool, target).scores_, dtype=np.float64))
    reference, ours = scores
    best = [set(np.argsort(values)[: max(1, int(budget * n))].tolist()) for values in scores]
    return {
        "scores": {"ours": float(np.abs(ours - reference).max() / np.ptp(reference))},
        "chosen": {"ours": len(best[0] & best[1]) / len(best[0])},
    }


def _passes(
    x: np.ndarray, y: np.ndarray, epsilon: float, where: Device, passes: int
) -> tuple[list[float], float, np.ndarray]:
    """Seconds of each of our passes, ε in units of cost, and the g that they were made at."""
    import torch

    from flatshift.selection.transport.kernel import StreamedEvaluator
    from flatshift.selection.transport.problem import pose_problem
    from flatshift.selection.transport.rows import StreamedRows

    with torch.inference_mode():
        problem = pose_problem(x, y, None, None, chunk=None, progress=None)
        absolute = epsilon * problem.mean_cost
        full = StreamedEvaluator(StreamedRows(problem, torch.float32, where.torch), absolute)
        zero = torch.zeros(len(y), dtype=torch.float64, device=where.torch)
        at = full.evaluate(zero)
        g = zero + absolute * (full.rows.b / at.column.clamp_min(1e-300)).log().clamp(-2, 2)
        took = []
        for _ in range(passes):
            start = time.perf_counter()
            at = full.evaluate(g, start=at)  # ends with a number on the host
            took.append(time.perf_counter() - start)
    return took, absolute, g.cpu().numpy()


def _baseline(
    sweep: Callable[..., Any],
    x: np.ndarray,
    y: np.ndarray,
    g: np.ndarray,
    absolute: float,
    where: Device,
    n: int,
    passes: int,
) -> Figures:
    """Seconds of a pass over n rows by `sweep`, from those over the rows of x; or why there are none."""
    import torch

    if sweep is _online:
        if importlib.util.find_spec("pykeops") is None:
            return {"pass": {"reason": "peer: not installed: pykeops"}}
        if not where.cuda:
            return {"pass": {"reason": "peer: KeOps compiles for CUDA here only"}}
    try:
        left, right = torch.from_numpy(x).to(where.torch).float(), torch.from_numpy(y).to(where.torch)
        potential = torch.from_numpy(g).to(left)
        times = [where.seconds(lambda: sweep(left, right, potential, absolute)) for _ in range(passes + 1)]
    except Exception as error:
        failed = f"failed: {type(error).__name__}: {first_line(error)}"
        why = "out of the device's memory" if out_of_memory(error) else failed
        return {"pass": {"reason": f"peer: {why}"}}
    note = {} if len(x) == n else {"reason": f"peer: timed on {len(x):,} rows, in proportion"}
    return {"pass": {"peer": [t * n / len(x) for t in times[1:]], **note}}


def _blocks(x: Any, y: Any, g: Any, absolute: float) -> tuple[Any, Any]:
    """f (n,) and the marginal's logarithm (m,), in units of ε, up to constants: two log-sum-exps of each block."""
    import torch

    squared = (y * y).sum(1)
    rows = max(1, (64 << 20) // len(y))
    f = torch.empty(len(x), device=x.device)
    column = torch.full((len(y),), -torch.inf, device=x.device)
    for low in range(0, len(x), rows):
        part = x[low : low + rows]
        block = (2.0 * part @ y.T - (part * part).sum(1, keepdim=True) - squared) / absolute
        f[low : low + rows] = -torch.logsumexp(block + g / absolute, 1)
        column = torch.logaddexp(column, torch.logsumexp(block + f[low : low + rows, None], 0))
    return f, column


def _online(x: Any, y: Any, g: Any, absolute: float) -> tuple[Any, Any]:
    """The same by KeOps, with the formula of geomloss' online soft minimum, whose cost is |x − y|²/2."""
    import torch
    from pykeops.torch import generic_logsumexp

    width = x.shape[1]
    reduce = generic_logsumexp(
        "(B - P * SqDist(X, Y) / IntCst(2))",
        "A = Vi(1)",
        f"X = Vi({width})",
        f"Y = Vj({width})",
        "B = Vj(1)",
        "P = Pm(1)",
    )
    half = absolute / 2
    scale = torch.tensor([1 / half], dtype=x.dtype, device=x.device)
    f = -reduce(x, y, (g / absolute)[:, None], scale)
    return f, reduce(y, x, f, scale)
