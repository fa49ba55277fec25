"""Realised against predicted gain: does mixing the selection into the pool lower the transport distance to the target?

Entropic transport is convex in the pool's weights, so a step of length λ towards the selection U changes it by at least
λ·mean_U s (s: calibrated gradients): the prediction is optimistic on the target that the scores were computed with, and
may be wrong on an unseen one. Both are measured at λ = 0.1, 0.25, 0.5 and 1, next to a random draw of the same size and
GOT-D in rounds, with

    gap(λ) = λ·(mean_U f_λ − mean of the k smallest f_λ) ≥ OT_ε(mixture) − min over all selections of the same size,

f_λ the potential at the mixture: a certificate that needs no other selection. (science.md §4.)

A few thousand rows represent a pool of any size and its selection. The kernel of all their mixtures is computed once,
and solves are warm-started from each other; the self-transport that turns OT_ε into the Sinkhorn divergence S = OT_ε(w,
y) − ½OT_ε(w, w) − ½OT_ε(y, y) is computed for all mixtures at once, one GEMM an iteration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from flatshift.selection.methods.base import (
    UNITS,
    Pool,
    Progress,
    mean_cost,
    scaled_features,
    squared_distances,
    unit_weights,
)
from flatshift.selection.methods.gotd import GotDSelector
from flatshift.selection.transport.dense import solve_dense
from flatshift.selection.transport.kernel import StoredKernel
from flatshift.selection.transport.problem import pose_problem
from flatshift.selection.transport.rows import StreamedRows

_NEAR = 5
"""Rows up to this rank, in multiples of the budget, are sampled as densely as the selection itself: most of what
another target or another round would choose is among them."""


@dataclass(frozen=True)
class PoolSample:
    """Sample of rows that represents a pool.

    rows (n,) int64, ascending. records (n,): number of pool records that each represents; they sum to N. mass (n,): its
    part of the pool's distribution; they sum to 1. chosen (n,) bool: the `budget` rows of the selection, each
    representing equally many records.
    """

    rows: np.ndarray
    records: np.ndarray
    mass: np.ndarray
    chosen: np.ndarray

    @property
    def budget(self) -> int:
        """Number of sampled rows that represent the whole budget."""
        return int(self.chosen.sum())

    def mixture(self, rows: np.ndarray, share: float) -> np.ndarray:
        """Return (n,): (1 − share)·pool + share·uniform over the sample's rows with these numbers."""
        weights = (1.0 - share) * self.mass
        weights[rows] += share / len(rows)
        return weights


def sample_pool(order: np.ndarray, budget: int, *, weights: np.ndarray | None, size: int, seed: int) -> PoolSample:
    """Sample the pool: all rows if there are at most `size`, else a seeded draw, half of it among the best ranks.

    order (N,): row numbers by rank, the first `budget` of them chosen. weights (N,): the pool's distribution, uniform
    when None. Three strata, each drawn without repeats: the selection, the ranks up to five budgets at the same rate,
    and the rest.
    """
    count = len(order)
    if count <= size:
        samples = [order[:budget], order[budget:]]
        sizes = [budget, count - budget]
    else:
        near = min(count, _NEAR * budget)
        from_near = size if near == count else min(near, size // 2)
        from_chosen = max(1, min(round(from_near * budget / near), from_near - (near > budget)))
        generator = np.random.Generator(np.random.PCG64([seed, 0xC4EC]))
        strata = [
            (order[:budget], from_chosen),
            (order[budget:near], from_near - from_chosen),
            (order[near:], size - from_near),
        ]
        samples = [generator.choice(rows, min(n, len(rows)), replace=False, shuffle=False) for rows, n in strata]
        sizes = [len(rows) for rows, _ in strata]
    records = np.concatenate([np.full(len(s), n / max(len(s), 1)) for s, n in zip(samples, sizes, strict=True)])
    rows = np.concatenate(samples)
    chosen = np.arange(len(rows)) < len(samples[0])
    ascending = np.argsort(rows, kind="stable")
    rows, records, chosen = rows[ascending], records[ascending], chosen[ascending]
    mass = records if weights is None else records * np.asarray(weights, dtype=np.float64)[rows]
    return PoolSample(rows, records, unit_weights(mass, len(rows)), chosen)


_TOLERANCE = 1e-6
_ITERATIONS = 5_000
_SELF_ITERATIONS = 2_000
_SELF_TOLERANCE = 1e-7


@dataclass(frozen=True)
class MixtureSolution:
    """Solution at one mixture, in units of cost.

    value: OT_ε. f (n,), g (M,): potentials. error: L1 of the target marginal.
    """

    value: float
    f: np.ndarray
    g: np.ndarray
    error: float


class MixtureTransport:
    """Transport problems from mixtures of a pool to one target, sharing one kernel.

    x (n, d), y (M, d): features. epsilon: absolute, in units of cost. Memory: 16·n·M bytes.
    """

    def __init__(self, x: np.ndarray, y: np.ndarray, *, epsilon: float, cost: str = "sqeuclidean"):
        with torch.inference_mode():
            problem = pose_problem(x, y, None, None, chunk=None, progress=None, cost=cost)
            self._unit = problem.unit
            self._rows = StreamedRows(problem, torch.float64).dense()
            self._kernel = StoredKernel(self._rows, epsilon / self._unit)

    def at(self, weights: np.ndarray, start: np.ndarray | None = None) -> MixtureSolution:
        """Solve for the mixture `weights` (n,), which sum to 1 and may be 0; start: g (M,) of a nearby solve."""
        unit = self._unit
        with torch.inference_mode():
            self._rows.a = torch.from_numpy(np.ascontiguousarray(weights, dtype=np.float64))
            b = self._rows.b
            g = torch.zeros_like(b) if start is None else torch.from_numpy(start / unit)
            at, _ = solve_dense(self._kernel, g, marginal=b, tolerance=_TOLERANCE, max_iterations=_ITERATIONS)
            return MixtureSolution(at.value * unit, at.f.numpy() * unit, at.g.numpy() * unit, at.error)


def self_transport(x: np.ndarray, mixtures: np.ndarray, *, epsilon: float, cost: str = "sqeuclidean") -> np.ndarray:
    """Return (K,): OT_ε(w, w) of each row w of `mixtures` (K, n) over the rows of x (n, d). Memory: 8·n² bytes.

    Both potentials are one function p = −ε log u, u_i = Σ_j w_j K_ij / u_j, and the value is 2 Σ w p.
    """
    points = scaled_features(x, cost)
    kernel = squared_distances(points - points.mean(0))
    np.fill_diagonal(kernel, 0.0)
    np.exp(np.divide(kernel, -epsilon / UNITS[cost], out=kernel), out=kernel)
    weights = np.ascontiguousarray(mixtures.T)
    positive = weights > 0
    u = np.ones_like(weights)
    for _ in range(_SELF_ITERATIONS):
        new = kernel @ (weights / u)
        change = float(np.abs(np.log(new[positive] / u[positive])).max())
        # The plain iteration oscillates between two points; their geometric mean converges.
        u = np.where(positive, np.sqrt(u * new), 1.0)
        if change <= _SELF_TOLERANCE:
            break
    return np.asarray(-2.0 * epsilon * (weights * np.log(u)).sum(0))


SHARES = (0.1, 0.25, 0.5, 1.0)  # λ: the share of the selection in the mixture
_MIN_TARGETS = 8
_COINCIDENT = 1e-12
"""Mean cost from the pool to half of the target, as a share of that to all of it, below which it is rounding."""

Refit = Callable[[np.ndarray, np.ndarray, np.ndarray, int], np.ndarray]
"""Function (pool rows (n,), target rows (m,), mass (n,), budget) → positions in the first argument that the method
chooses here."""


@dataclass(frozen=True)
class GainReading:
    """Values at one λ, in units of cost.

    realised, predicted: change of OT_ε. gap: upper bound on what the best selection could gain in addition. debiased:
    change of the Sinkhorn divergence.
    """

    share: float
    realised: float
    predicted: float
    gap: float
    debiased: float

    @property
    def ratio(self) -> float | None:
        """Realised ÷ predicted, at most 1 up to rounding; None if no gain is predicted."""
        return self.realised / self.predicted if self.predicted < 0 else None


_SUMMARISED = ("realised", "predicted", "ratio", "gap", "debiased")


@dataclass(frozen=True)
class SelectionCheck:
    """Result of `check_selection`.

    sample: rows that represent the pool; targets (m,): rows of the target. distance: OT_ε(pool, target) on these.
    fitted: arm → a reading for each of SHARES, on the target that the selection saw. held_out: arm → (R, 4), change of
    OT_ε to one half of the target, chosen with the other; held_distance (R,): OT_ε(pool, half) before. Both are empty
    if the target has too few rows, and lack the `left_out` splits of which a half coincides with the pool. g (m,): the
    targets' potentials. error: largest L1 marginal error. Arms: "selection", "random", "rounds" (or "one step").
    """

    sample: PoolSample
    targets: np.ndarray
    epsilon: float
    distance: float
    g: np.ndarray
    fitted: dict[str, list[GainReading]]
    held_out: dict[str, np.ndarray]
    held_distance: np.ndarray
    error: float
    left_out: int = 0

    def summary(self) -> dict[str, Any]:
        """Return plain values for a manifest."""
        return {
            "rows": len(self.sample.rows),
            "of": round(float(self.sample.records.sum())),
            "budget_rows": self.sample.budget,
            "targets": len(self.targets),
            "epsilon": self.epsilon,
            "distance": self.distance,
            "marginal_error": self.error,
            "shares": list(SHARES),
            "fitted": {
                arm: [{name: getattr(reading, name) for name in _SUMMARISED} for reading in readings]
                for arm, readings in self.fitted.items()
            },
            "held_out": {arm: values.tolist() for arm, values in self.held_out.items()} or None,
            "held_distance": self.held_distance.tolist(),
        }

    def warnings(self) -> list[str]:
        """Return a sentence for every check that failed."""
        warnings = []
        first, *_ = readings = self.fitted["selection"]
        half = readings[SHARES.index(0.5)]
        if abs(first.predicted) <= 1e-12 * self.distance:
            pass  # rounding, as of a selection of the whole pool
        elif first.predicted > 0:
            warnings.append(
                "to first order the selection moves the pool away from the target: the mean of its scores by GOT-D, "
                "which are negative for what brings the pool nearer, is not negative"
            )
        elif first.realised >= 0:
            warnings.append(
                f"even as {SHARES[0]:.0%} of the mixture the selection does not lower the transport distance to the "
                "target, although its scores promise it"
            )
        elif half.ratio is not None and half.ratio < 0.5:
            gain = "raises the transport distance" if half.ratio < 0 else f"gains {half.ratio:.0%} of what is promised"
            warnings.append(
                f"as half of the mixture the selection {gain}: its scores hold for a light warm-up only; "
                "use rounds, a larger budget or a lighter warm-up"
            )
        if self.left_out:
            warnings.append(
                f"of {self.left_out + len(self.held_distance)} splits of the target into halves, {self.left_out} have "
                "a half that coincides with the pool; they tell nothing of unseen target rows and were left out"
            )
        if self.held_out and self.sample.budget < len(self.sample.rows):  # else a random draw is the same
            if (self.held_out["random"] - self.held_out["selection"]).mean(0)[0] <= 0:
                warnings.append(
                    "on target rows that it has not seen, the selection brings the pool no nearer than a random draw"
                )
            if "rounds" in self.held_out:
                once, rounds = (self.held_out[arm][:, SHARES.index(0.5)] for arm in ("selection", "rounds"))
                if (rounds < once).all() and (once - rounds).mean() > 0.05 * self.held_distance.mean():
                    change = [f"{values.mean() / self.held_distance.mean():+.0%}" for values in (rounds, once)]
                    warnings.append(
                        f"chosen in rounds, half of the mixture changes the distance to unseen target rows by "
                        f"{change[0]} rather than {change[1]}: for more than a light warm-up use `--method gotd "
                        "--select.method.rounds 5`"
                    )
        return warnings


@dataclass
class _ArmChooser:
    """Choice of each arm's rows on the sample: x (n, d) of the pool, y (M, d) of the whole target."""

    x: np.ndarray
    y: np.ndarray
    sample: PoolSample
    epsilon: float
    cost: str
    in_rounds: bool
    seed: int
    generator: np.random.Generator

    def choose(self, targets: np.ndarray, selection: np.ndarray) -> dict[str, np.ndarray]:
        """Return the rows that each arm chooses for `targets` (row numbers); of the first arm they are given."""
        x, y, sample = self.x, self.y[targets], self.sample
        chances = sample.records / sample.records.sum()
        random = self.generator.choice(len(x), sample.budget, replace=False, p=chances)
        chooser = GotDSelector(
            epsilon=self.epsilon / mean_cost(x, y, weights=sample.mass, cost=self.cost), tolerance=1e-4,
            rounds=1 if self.in_rounds else 5, budget=sample.budget, cost=self.cost, seed=self.seed,
        )  # fmt: skip
        pool = Pool(ids=list(map(str, sample.rows.tolist())), features=x, weights=sample.mass)
        chooser.fit(pool, Pool(ids=list(map(str, targets.tolist())), features=y))
        third_arm = "one step" if self.in_rounds else "rounds"
        return {"selection": selection, "random": random, third_arm: chooser.select(sample.budget)}


def check_selection(
    x: Any,
    y: np.ndarray,
    order: np.ndarray,
    *,
    budget: int,
    refit: Refit,
    weights: np.ndarray | None = None,
    epsilon: float | None = None,
    relative: float = 0.05,
    cost: str = "sqeuclidean",
    in_rounds: bool = False,
    pool_rows: int = 2000,
    target_rows: int = 300,
    splits: int = 5,
    seed: int = 0,
    progress: Progress | None = None,
) -> SelectionCheck | None:
    """Check the first `budget` rows of `order` (N,), row numbers by rank, against pool x (N, d) and target y (M, d).

    weights (N,): the pool's distribution. epsilon: absolute, of the solve that gave the scores; None: `relative` times
    the mean cost. refit: the same method on less data. in_rounds: it works in rounds, so the third arm is one step.
    Larger pools and targets are sampled down to pool_rows and target_rows; the cost is at most some hundred solves of
    this size. Returns None if all features coincide.
    """
    generator = np.random.Generator(np.random.PCG64([seed, 0xC4EC4]))
    sample = sample_pool(order, budget, weights=weights, size=pool_rows, seed=seed)
    targets = np.arange(len(y))
    if len(targets) > target_rows:
        targets = np.sort(generator.choice(targets, target_rows, replace=False))
    rows = np.asarray(x[sample.rows], dtype=np.float64)
    target_features = np.asarray(y[targets], dtype=np.float64)
    scale = mean_cost(rows, target_features, weights=sample.mass, cost=cost)
    if not scale > 1e-30 * float(np.abs(scaled_features(rows, cost)).max()) ** 2 + 1e-290:
        return None
    epsilon = relative * scale if epsilon is None else epsilon
    done, total = 0, 2 + splits

    def report_step() -> None:
        nonlocal done
        done += 1
        if progress:
            progress("checking the selection", min(done, total), total)

    choose_arms = _ArmChooser(rows, y, sample, epsilon, cost, in_rounds, seed, generator).choose
    arms = choose_arms(targets, np.flatnonzero(sample.chosen))
    report_step()
    mixtures = MixtureTransport(rows, target_features, epsilon=epsilon, cost=cost)
    base = mixtures.at(sample.mass)
    fitted, error = _fit_readings(mixtures, base, sample, arms, rows, epsilon, cost)
    report_step()
    held_out: dict[str, list[list[float]]] = {name: [] for name in arms}
    held_distance = []
    left_out = 0
    for _ in range(splits if len(targets) >= _MIN_TARGETS else 0):
        shuffled = targets[generator.permutation(len(targets))]
        known, unseen = np.sort(shuffled[: len(targets) // 2]), np.sort(shuffled[len(targets) // 2 :])
        unit = min(mean_cost(rows, y[half], weights=sample.mass, cost=cost) for half in (known, unseen))
        if unit <= _COINCIDENT * scale:
            left_out += 1
            report_step()
            continue
        selection = np.asarray(refit(sample.rows, known, sample.mass, sample.budget))
        transport = MixtureTransport(rows, np.asarray(y[unseen], dtype=np.float64), epsilon=epsilon, cost=cost)
        before = transport.at(sample.mass)
        held_distance.append(before.value)
        for name, chosen in choose_arms(known, selection).items():
            solutions = [transport.at(sample.mixture(chosen, share), before.g) for share in SHARES]
            held_out[name].append([solution.value - before.value for solution in solutions])
            error = max(error, *(solution.error for solution in solutions))
        report_step()
    return SelectionCheck(
        sample=sample, targets=targets, epsilon=epsilon, distance=base.value, g=base.g, fitted=fitted,
        held_out={name: np.array(values) for name, values in held_out.items() if values},
        held_distance=np.array(held_distance), error=error, left_out=left_out,
    )  # fmt: skip


def _fit_readings(
    mixtures: MixtureTransport,
    base: MixtureSolution,
    sample: PoolSample,
    arms: dict[str, np.ndarray],
    rows: np.ndarray,
    epsilon: float,
    cost: str,
) -> tuple[dict[str, list[GainReading]], float]:
    """Return the readings of every arm, and the largest marginal error."""
    scores = base.f - sample.mass @ base.f
    weights = [sample.mixture(chosen, share) for chosen in arms.values() for share in SHARES]
    debiasing = iter(self_transport(rows, np.stack([sample.mass, *weights]), epsilon=epsilon, cost=cost))
    before = next(debiasing)
    solutions = [mixtures.at(mixture, base.g) for mixture in weights]
    remaining = iter(solutions)
    budget = float(sample.records[sample.chosen].sum())
    readings: dict[str, list[GainReading]] = {}
    for name, chosen in arms.items():
        readings[name] = []
        for share in SHARES:
            solution = next(remaining)
            realised = solution.value - base.value
            # the mean of the smallest f over as many records as the budget has, rows weighted by their records
            order = np.argsort(solution.f, kind="stable")
            filled = np.minimum(np.cumsum(sample.records[order]), budget)
            smallest = float(np.diff(filled, prepend=0.0) @ solution.f[order]) / budget
            reading = GainReading(
                share=share,
                realised=realised,
                predicted=share * float(scores[chosen].mean()),
                gap=share * (float(solution.f[chosen].mean()) - smallest),
                debiased=realised - 0.5 * float(next(debiasing) - before),
            )
            readings[name].append(reading)
    return readings, max(base.error, *(solution.error for solution in solutions))
