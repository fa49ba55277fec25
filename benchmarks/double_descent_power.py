"""The peak test and the verdict on curves whose answer is known: false alarms, power, names.

    python -m benchmarks.double_descent_power

2,000 draws of each null and each bump and 500 of each curve that is named, nine points, five and eight seeds; in the
curves that are named a draw is a set of training runs or a series of least-squares fits. Nulls "as a loss", log-normal
and binomial ones go through the whole rule: the scale is that of their metric, and n items have their variance. The
peer is the test that is often used: resample the seeds, and call a peak what exceeds the lowest mean on either side in
95 % of the resamples.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks._harness import Benchmark
from benchmarks.curves.dynamics import gradient_flow_curve, noise_curve, unstable_curve
from benchmarks.curves.known import NAMED_NULLS, NULLS, bumps, log_normal, log_normal_peak
from benchmarks.curves.random_features import random_features_curve
from benchmarks.curves.rates import rejections
from flatshift.experiments.statistics import determine_verdict, peak_test
from flatshift.finetune.seeds import numpy_generator

DRAWS, NAMED = 2000, 500
SCATTER = 0.45
"""Sd of the logarithm of losses: on the plain scale five seeds then name half of the peaks four times the valley."""
POINTS = 9
SEEDS = (5, 8)
BAR = 0.06


def bootstrap_of_the_maximum(curves: np.ndarray, generator: np.random.Generator, resamples: int = 400) -> np.ndarray:
    """[N] booleans: in 95 % of resamples of the seeds, the largest inner mean exceeds the lowest on its left and right.

    curves: [N, S, J]. Not a valid test: it is here to be compared with.
    """
    seeds = curves.shape[1]
    weights = generator.multinomial(seeds, np.full(seeds, 1 / seeds), size=resamples) / seeds
    result = np.empty(len(curves), dtype=bool)
    for n, curve in enumerate(curves):
        means = weights @ curve  # [resamples, J]
        top = 1 + means[:, 1:-1].argmax(1)
        rows = np.arange(resamples)
        left = np.minimum.accumulate(means, 1)[rows, top - 1]
        right = np.minimum.accumulate(means[:, ::-1], 1)[:, ::-1][rows, top + 1]
        heights = means[rows, top] - np.maximum(left, right)
        result[n] = np.quantile(heights, 0.05) > 0
    return result


def draws_of(name: str, make: Callable[..., np.ndarray], seeds: int) -> np.ndarray:
    """[DRAWS, S, J]; where a seed has no values there is one more, so that S are whole."""
    whole = seeds + ("without values" in name)
    return make(numpy_generator(0, "benchmark", name, seeds), DRAWS, whole, POINTS)


def rate(curves: np.ndarray) -> float:
    """Share of curves in which the test finds a peak; seeds without values are left out as `peak_test` does."""
    broken = np.isnan(curves).any((1, 2))
    result = rejections(curves[~broken]).sum() if (~broken).any() else 0
    return float(result + sum(peak_test(curve).rejected for curve in curves[broken])) / len(curves)


def peer_rate(curves: np.ndarray, name: str) -> float:
    """The same by the bootstrap of the maximum, which drops seeds without values."""
    generator = numpy_generator(0, "benchmark", "bootstrap", name)
    if np.isnan(curves).any():
        return float(np.mean([bootstrap_of_the_maximum(c[None, np.isfinite(c).all(1)], generator)[0] for c in curves]))
    return float(bootstrap_of_the_maximum(curves, generator).mean())


def main() -> None:
    """Measure all and write benchmarks/results/double_descent_power.json."""
    bench = Benchmark("double_descent_power", packages=("numpy", "scipy"))
    for seeds in SEEDS:
        for name, make in NULLS.items():
            curves = draws_of(name, make, seeds)
            ours, peer = rate(curves), peer_rate(curves, name)
            bench.row(f"false alarms, {seeds} seeds: {name}", "share", ours=ours, maximum=BAR)
            what = f"false alarms beside the peer, {seeds} seeds: {name}"
            bench.row(what, "share", ours=ours, peer=peer, peer_name="bootstrap of the maximum")
        for name, (metric, items, make) in NAMED_NULLS.items():
            curves = make(numpy_generator(0, "benchmark", name, seeds), DRAWS, seeds, POINTS)
            ours = float(rejections(curves, metric=metric, items=items).mean())
            bench.row(f"false alarms, {seeds} seeds: {name}", "share", ours=ours, maximum=BAR)
        peaks = log_normal(log_normal_peak, SCATTER)(numpy_generator(0, "log-normal", seeds), DRAWS, seeds, POINTS)
        ours, what = float(rejections(peaks, metric="loss").mean()), "log-normal peak of four times the valley"
        bench.row(f"power, {seeds} seeds: {what}", "share", ours=ours, minimum=0.9)
        what = f"power beside the plain scale, {seeds} seeds: {what}"
        bench.row(what, "share", ours=ours, peer=rate(peaks), peer_name="plain scale")
        for height in (2, 3, 4):
            power = rate(draws_of(f"bump {height}", bumps(height), seeds))
            what, least = f"power, {seeds} seeds: peak of {height} sd", {(5, 3): 0.9, (8, 2): 0.8}
            bench.row(what, "share", ours=power, minimum=least.get((seeds, height)))
            broad = rate(draws_of(f"broad bump {height}", bumps(height, broad=True), seeds))
            what = f"power, {seeds} seeds: broad peak of {height} sd, one low point on its left"
            bench.row(what, "share", ours=broad)
        calm, unstable = ("monotone", "undecided"), ("instability",)
        for what, curve_of, right, settings in (
            ("double descent: random features, vanishing ridge", random_features_curve, ("double descent",), {}),
            ("no peak: random features, tuned ridge", random_features_curve, calm, {"ridge": "tuned"}),
            ("instability: descent past 2/λ", unstable_curve, unstable, {"momentum": 0.0}),
            ("instability: momentum past 38/λ", unstable_curve, unstable, {}),
            ("overfitting: gradient flow on noisy rows", gradient_flow_curve, ("overfitting",), {}),
            ("monotone or undecided: gradient flow without noise", gradient_flow_curve, calm, {"noise": 0.0}),
            ("undecided: noise only", noise_curve, ("undecided",), {}),
        ):
            kinds = [determine_verdict(curve_of(seed=seed, seeds=seeds, **settings)).kind for seed in range(NAMED)]
            share = float(np.mean([kind in right for kind in kinds]))
            bench.row(f"verdict, {seeds} seeds: {what}", "share named so", ours=share, minimum=0.9)
    bench.finish()


if __name__ == "__main__":
    main()
