"""GOT-D scores on small problems beside independent references: converged POT, linear programme, finite differences.

Run: python -m benchmarks.gotd_exact
"""

from __future__ import annotations

from typing import Any

import numpy as np
import ot

from benchmarks._harness import Benchmark, limit_threads
from flatshift.selection import sinkhorn_potentials


def problem(n: int, m: int, d: int, *, weighted: bool, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Clustered pool, shifted target, weights that sum to 1."""
    r = np.random.default_rng(seed)
    centres = r.standard_normal((8, d))
    x = centres[r.integers(0, 8, n)] + 0.7 * r.standard_normal((n, d))
    y = centres[r.integers(0, 4, m)] + 0.7 * r.standard_normal((m, d)) + 0.2
    a = r.random(n) + 0.1 if weighted else np.ones(n)
    b = r.random(m) + 0.1 if weighted else np.ones(m)
    return x, y, a / a.sum(), b / b.sum()


def pot_scores(a: np.ndarray, b: np.ndarray, cost: np.ndarray, epsilon: float, stop: float = 1e-15) -> np.ndarray:
    """Converged POT potentials as calibrated gradients; POT's f holds ε log a, which is taken out first."""
    log: dict[str, Any] = ot.sinkhorn(
        a, b, cost, epsilon, method="sinkhorn_log", numItermax=500_000, stopThr=stop, log=True, warn=False
    )[1]
    f = epsilon * (log["log_u"] - np.log(a))
    return f - a @ f


def main() -> None:
    limit_threads(1)
    bench = Benchmark("gotd_exact", packages=("torch", "numpy", "POT"))
    for weighted in (False, True):
        for epsilon in (0.05, 0.01):
            x, y, a, b = problem(500, 100, 16, weighted=weighted)
            ours = sinkhorn_potentials(x, y, a=a, b=b, epsilon=epsilon)
            apart = float(np.abs(ours.scores - pot_scores(a, b, ot.dist(x, y), ours.epsilon)).max())
            name = f"500 x 100, {'weighted' if weighted else 'uniform'}, epsilon {epsilon}"
            what = f"scores beside converged POT sinkhorn_log: {name}"
            bench.row(what, "largest absolute difference", ours=apart, maximum=1e-6)
            bench.row(f"marginal error reached: {name}", "L1 error", ours=ours.marginal_error, maximum=1e-9)

    x, y, a, b = problem(60, 25, 4, weighted=True, seed=1)
    cost = ot.dist(x, y)
    lowest = float(ot.emd2(a, b, cost))
    for epsilon in (1e-3, 1e-4):
        ours = sinkhorn_potentials(x, y, a=a, b=b, epsilon=epsilon)
        plan = a[:, None] * b * np.exp((ours.f[:, None] + ours.g - cost) / ours.epsilon)
        what = f"plan's cost above the linear programme's: 60 x 25, weighted, epsilon {epsilon}"
        bench.row(what, "relative excess", ours=float((plan * cost).sum()) / lowest - 1.0, maximum=epsilon)

    base = sinkhorn_potentials(x, y, a=a, b=b, epsilon=0.1)

    def value(weights: np.ndarray) -> float:
        relative = base.epsilon / (weights @ cost @ b)
        return sinkhorn_potentials(x, y, a=weights, b=b, epsilon=relative, tolerance=1e-12).dual_value

    differences = []
    for i in range(len(a)):
        towards = np.eye(len(a))[i] - a
        numeric = (value(a + 1e-5 * towards) - value(a - 1e-5 * towards)) / 2e-5
        differences.append(abs(numeric - base.scores[i]))
    what = "scores beside central differences of OT in mass: 60 x 25, weighted, all rows"
    bench.row(what, "largest absolute difference", ours=max(differences), maximum=1e-6)

    x, y, a, b = problem(500, 100, 16, weighted=False)
    cost = ot.dist(x, y)
    scale = 0.01 * float(a @ cost @ b)
    bench.compare(
        "time to a marginal error of 1e-9, float64: 500 x 100, epsilon 0.01",
        "CPU-s",
        lambda: sinkhorn_potentials(x, y, epsilon=0.01),
        lambda: pot_scores(a, b, ot.dist(x, y), scale, stop=1e-10),
        "POT sinkhorn_log",
        rounds=3,
        maximum=1.0,
    )
    bench.finish()


if __name__ == "__main__":
    main()
