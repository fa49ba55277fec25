"""Training runs in closed form: one that becomes unstable on the way, one that overfits, one that only falls, noise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flatshift.experiments.statistics.curve import Curve
from flatshift.finetune.seeds import numpy_generator

STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def unstable_curve(
    *, momentum: float = 0.9, seeds: int = 5, top: float = 1.6, steps: Sequence[int] = STEPS, seed: int = 0
) -> Curve:
    """Descent whose learning rate rises past its stability threshold and sinks again.

    The loss is a quadratic in each of 20 directions within a distance of 1 of its minimum and linear beyond, so that
    instability saturates as it does in networks. Update: m ← β₁ m + (1 − β₁) g, w ← w − η m, as Adam with a frozen
    preconditioner does. It is stable while λ_max η < 2 (1 + β₁)/(1 − β₁): 2 for β₁ = 0, 38 for 0.9. `top`: the largest
    η relative to that, reached in the middle of the run on a log axis. Each seed draws the starting point, about 1 away
    in every direction, and how far the minimum of the test loss lies away.
    """
    eigenvalues = np.geomspace(1.0, 1e-3, 20)
    limit = 2 * (1 + momentum) / (1 - momentum)
    middle = float(np.sqrt(steps[0] * steps[-1]))
    recorded = {step: j for j, step in enumerate(steps)}
    train, test, gradient, sharpness = (np.empty((seeds, len(steps))) for _ in range(4))
    generators = [numpy_generator(seed, "unstable", s) for s in range(seeds)]
    w = np.stack([np.sign(g.standard_normal(20)) * (1 + 0.1 * g.standard_normal(20)) for g in generators])
    shift = 0.1 * np.stack([g.standard_normal(20) for g in generators])
    velocity = np.zeros_like(w)
    for step in range(1, steps[-1] + 1):
        distance = np.log(step / middle) / np.log(steps[-1] / middle)  # −1 … 1 over the run
        rate = limit * max(0.05, top * (1 - (distance / 0.45) ** 2))
        if step in recorded:
            j = recorded[step]
            train[:, j] = _bounded(w) @ eigenvalues
            test[:, j] = _bounded(w - shift) @ eigenvalues
            gradient[:, j] = np.linalg.norm(eigenvalues * w.clip(-1, 1), axis=1)
            sharpness[:, j] = rate * eigenvalues[0] / limit
        velocity = momentum * velocity + (1 - momentum) * eigenvalues * w.clip(-1, 1)
        w = w - rate * velocity
    return Curve(
        axis="steps",
        values=list(steps),
        test=test,
        train_loss=train,
        gradient_norm=gradient,
        sharpness=sharpness,
        metric="test loss",
    )


def _bounded(w: np.ndarray) -> np.ndarray:
    """w²/2 within 1 of zero, linear beyond."""
    size = np.abs(w)
    return np.where(size <= 1, 0.5 * size**2, size - 0.5)


def gradient_flow_curve(
    *,
    rows: int = 60,
    features: int = 50,
    noise: float = 1.0,
    seeds: int = 5,
    times: Sequence[float] = (0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 100, 300),
    seed: int = 0,
) -> Curve:
    """Gradient flow on noisy least squares with fewer features than rows, solved by eigenvalues.

    With noise the expected test error falls and then rises for good: overfitting. Without noise it only falls. The
    training loss always falls.
    """
    train, test, gradient = (np.empty((seeds, len(times))) for _ in range(3))
    for s in range(seeds):
        generator = numpy_generator(seed, "gradient flow", s)
        beta = generator.standard_normal(features) / np.sqrt(features)
        x = generator.standard_normal((rows, features))
        y = x @ beta + np.sqrt(noise) * generator.standard_normal(rows)
        values, vectors = np.linalg.eigh(x.T @ x / rows)
        target = vectors.T @ (x.T @ y / rows)
        for j, time in enumerate(times):
            w = vectors @ (target * -np.expm1(-values * time) / values)
            train[s, j] = float(np.square(y - x @ w).mean())
            test[s, j] = float(np.square(w - beta).sum() + noise)  # expected over test rows, exact
            gradient[s, j] = float(np.linalg.norm(x.T @ (y - x @ w) / rows))
    return Curve(
        axis="steps",
        values=list(times),
        test=test,
        train_error=train / (1 + noise),
        train_loss=train,
        gradient_norm=gradient,
        metric="test squared error",
    )


def noise_curve(*, seeds: int = 5, points: int = 9, level: float = 0.5, sd: float = 0.02, seed: int = 0) -> Curve:
    """A test error that no point of the axis changes, beside a training error that falls to zero."""
    generator = numpy_generator(seed, "noise only")
    values = [2**j for j in range(points)]
    falling = np.linspace(0.4, 0.0, points) + 0.005 * np.abs(generator.standard_normal((seeds, points)))
    return Curve(
        axis="rank",
        values=values,
        test=level + sd * generator.standard_normal((seeds, points)),
        train_error=falling,
        train_loss=3 * falling,
    )
