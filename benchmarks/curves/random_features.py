"""Least squares on random features: the peak of the test error at as many features as rows, known in closed form.

Sources: Belkin, Hsu & Xu, "Two models of double descent for weak features" (2020), for the risk of the least-norm fit;
Nakkiran, Venkat, Kakade & Ma, "Optimal regularization can mitigate double descent" (2021), for the ridge that removes
the peak; Curth, Jeffares & van der Schaar, "A U-turn on double descent" (2023), for effective parameters on test rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flatshift.experiments.statistics.curve import Curve
from flatshift.finetune.errors import UserError
from flatshift.finetune.seeds import numpy_generator

Ridge = Literal["vanishing", "tuned"]
VANISHING = 1e-4
"""λ of the vanishing ridge, for features of mean square 1/p; it keeps the mean error at p = rows finite."""
_RIDGES = np.geomspace(VANISHING, 100.0, 16)
"""What the tuned ridge is chosen from."""


@dataclass(frozen=True)
class Fit:
    """Errors of one ridge fit, and how many parameters it effectively uses."""

    train: float
    """Mean squared error on the training rows."""
    test: float
    """Mean squared error on the test rows."""
    trace: float
    """Trace of the smoother on the training rows, Σ s²/(s² + λ): its effective number of parameters there."""
    test_parameters: float
    """rows × mean over test rows of ‖smoother weights‖²: effective parameters where the error is measured."""


def ridge_fits(
    x: np.ndarray, y: np.ndarray, x_test: np.ndarray, y_test: np.ndarray, ridges: Sequence[float | None]
) -> list[Fit]:
    """Fit ‖y − xβ‖² + λ‖β‖² for each λ of `ridges` by one singular value decomposition.

    None: the least-norm fit, relative singular values below 1e-10 dropped.
    """
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    targets, outside = u.T @ y, x_test @ vt.T
    fits = []
    for ridge in ridges:
        if ridge is None:
            gain = np.divide(1.0, s, out=np.zeros_like(s), where=s > 1e-10 * s[0])
        else:
            gain = s / (s**2 + ridge)
        weights = outside * gain  # rows of the smoother in the basis of u
        fits.append(
            Fit(
                float(np.square(y - u @ (s * gain * targets)).mean()),
                float(np.square(y_test - weights @ targets).mean()),
                float((s * gain).sum()),
                float(len(y) * np.square(weights).sum(1).mean()),
            )
        )
    return fits


def ridge_fit(x: np.ndarray, y: np.ndarray, x_test: np.ndarray, y_test: np.ndarray, ridge: float | None = None) -> Fit:
    """One of `ridge_fits`."""
    return ridge_fits(x, y, x_test, y_test, [ridge])[0]


def random_features_curve(
    *,
    rows: int = 60,
    features: Sequence[int] = (2, 4, 8, 16, 32, 60, 120, 240, 960),
    inputs: int = 10,
    signal: float = 4.0,
    noise: float = 0.5,
    seeds: int = 5,
    ridge: Ridge = "vanishing",
    judged_rows: int = 400,
    seed: int = 0,
) -> Curve:
    """Model-wise curve of ridge regression on random ReLU features: a peak at `rows` features, none with a tuned ridge.

    y is linear in `inputs` normal inputs (variance `signal`) plus noise of variance `noise`; feature k is √(2/p) times
    the positive part of a random projection. The tuned ridge is the best of 16 on rows of its own. `test` is log₁₀ of
    the mean squared error on new rows; `train_error` is the mean squared training error ÷ `noise` (0: the noise is
    fitted too), `train_loss` the mean squared training error. Each seed draws everything anew, shared along the curve:
    smaller models use the first of the features.

    Raises UserError for numbers of features that are not positive.
    """
    if min(features) < 1:
        raise UserError(f"random features: needs at least 1 feature, got {min(features)}")
    test, train = np.empty((seeds, len(features))), np.empty((seeds, len(features)))
    for s in range(seeds):
        generator = numpy_generator(seed, "random features", s)
        direction = generator.standard_normal(inputs)
        direction *= np.sqrt(signal) / np.linalg.norm(direction)
        projections = generator.standard_normal((inputs, max(features))) / np.sqrt(inputs)
        sets = []
        for count in (rows, judged_rows, judged_rows):  # training, choosing the ridge, test
            x = generator.standard_normal((count, inputs))
            y = x @ direction + np.sqrt(noise) * generator.standard_normal(count)
            sets.append((np.maximum(x @ projections, 0.0) * np.sqrt(2.0), y))
        for j, p in enumerate(features):
            fitted, choosing, evaluation = [(z[:, :p] / np.sqrt(p), y) for z, y in sets]
            strength = VANISHING
            if ridge == "tuned":
                tried = ridge_fits(*fitted, *choosing, _RIDGES.tolist())
                strength = float(_RIDGES[np.argmin([fit.test for fit in tried])])
            fit = ridge_fit(*fitted, *evaluation, strength)
            test[s, j], train[s, j] = np.log10(fit.test), fit.train
    return Curve(
        axis="features",
        values=list(features),
        test=test,
        train_error=train / noise,
        train_loss=train,
        metric="log10 test error",
    )
