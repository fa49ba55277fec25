"""Kernel least squares in closed form (predictions, leave-one-out, effective dimension), and extrapolated curves.

The kernel is that of gradient features (Jacot et al. 2018), K = J Jᵀ. A ridge λ gives α = (K + λ)⁻¹ y, predictions K*
α, leave-one-out residuals α_i / [(K + λ)⁻¹]_ii and the effective dimension Σ e/(e + λ); λ = 0 is the least-norm fit,
the result of training from zero to the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flatshift.experiments.statistics.intervals import Interval, t_quantile

NOISE = 1e-10
"""Smallest share of the largest eigenvalue that counts: features are computed in float32."""

INDEPENDENT = 1e-6
"""Smallest part of a row's label that the fit must leave open for the row to count as dependent on others."""


@dataclass(frozen=True)
class KernelFit:
    """One fit: [N, C] on the training rows, [M, C] on others, [N, C] each label by a fit of all others
    (where rows have a label an output, the row's other ones included)."""

    train: np.ndarray
    test: np.ndarray
    left_out: np.ndarray
    effective: float
    """Σ e/(e + λ): number of the rows' labels that the fit can choose freely."""

    def columns(self, selected: slice) -> KernelFit:
        """Return the fit of only these columns of labels; each column is fitted separately."""
        return KernelFit(self.train[:, selected], self.test[:, selected], self.left_out[:, selected], self.effective)


def kernel_fits(kernel: np.ndarray, cross: np.ndarray, targets: np.ndarray, ridges: Sequence[float]) -> list[KernelFit]:
    """Fit targets [N, C] by the kernel [N, N] for each λ of `ridges`, by one eigendecomposition; cross [M, N]."""
    values, vectors = np.linalg.eigh(kernel)
    significant = values > NOISE * max(values[-1], 0.0)
    projections, features = vectors.T @ targets, cross @ vectors
    fits = []
    for ridge in ridges:
        gains = np.divide(1.0, values + ridge, out=np.zeros_like(values), where=significant)
        shares = values * gains
        fitted = vectors @ (shares[:, None] * projections)
        full = np.where(significant, gains, 1.0 / ridge if ridge else np.inf)
        if np.isfinite(full).all():
            inverse = np.einsum("ij,j,ij->i", vectors, full, vectors)
            left_out = targets - (vectors @ (full[:, None] * projections)) / inverse[:, None]
        else:  # singular kernel: dependent rows by their residual, independent ones as above
            hat = np.einsum("ij,j,ij->i", vectors, shares, vectors)
            inverse = np.einsum("ij,j,ij->i", vectors, gains, vectors)
            apart = (1 - hat > INDEPENDENT)[:, None]
            with np.errstate(divide="ignore", invalid="ignore"):
                own = (vectors @ (gains[:, None] * projections)) / inverse[:, None]
                left_out = targets - np.where(apart, (targets - fitted) / (1 - hat)[:, None], np.nan_to_num(own))
        fits.append(KernelFit(fitted, features @ (gains[:, None] * projections), left_out, float(shares.sum())))
    return fits


def fastest_setting(errors: np.ndarray, speeds: np.ndarray) -> int:
    """Return the setting that gradient descent fits soonest among those with indistinguishable errors [S, J].

    Those are the settings whose mean error is at most one standard error above the least, paired by draw; the soonest
    has the greatest of speeds [J], the mean eigenvalue of its kernel.
    """
    apart = errors - errors[:, [int(errors.mean(0).argmin())]]
    scatter = apart.std(0, ddof=1) / np.sqrt(len(errors)) if len(errors) > 1 else np.zeros(len(speeds))
    return int(np.where(apart.mean(0) <= scatter, speeds, -np.inf).argmax())


_POWERS = np.linspace(0.1, 1.5, 29)


def extrapolate(rows: Sequence[int], errors: np.ndarray, more: int, *, confidence: float = 0.8) -> Interval:
    """Return the change in one run's error with `more` rows beyond the last: mean over draws and prediction interval.

    The interval is for a new run's own change; it includes the scatter of draws and that of a run about its curve at
    both ends. rows: ascending. errors: [S, J]. Each draw's curve is continued by a + b·n^−c, the form found for
    learning curves (Hestness et al. 2017), a ≥ 0 and b ≥ 0, with the c that fits it best between half and twice that of
    the mean curve, so that the uncertainty about c is in the spread of the draws.
    """
    n = np.asarray(rows, dtype=np.float64)

    def fit(y: np.ndarray, power: float) -> tuple[float, float, float]:
        x = n**-power
        slope = max(0.0, float(np.cov(x, y, bias=True)[0, 1] / x.var()))
        start = float(y.mean() - slope * x.mean())
        if start < 0:
            start, slope = 0.0, float((x * y).sum() / (x * x).sum())
        return float(np.square(y - start - slope * x).sum()), start, slope

    def change(y: np.ndarray, powers: np.ndarray) -> tuple[float, float]:
        best = min(powers.tolist(), key=lambda power: fit(y, power)[0])
        left, _, slope = fit(y, best)
        return slope * float((n[-1] + more) ** -best - n[-1] ** -best), left / max(1, len(n) - 2)

    usual = min(_POWERS.tolist(), key=lambda power: fit(errors.mean(0), power)[0])
    near = _POWERS[(usual / 2 <= _POWERS) & (2 * usual >= _POWERS)]
    changes, scatter = np.array([change(row, near) for row in errors]).T
    count = len(changes)
    sd = float(np.sqrt(changes.var(ddof=1) * (1 + 1 / count) + 2 * scatter.mean())) if count > 1 else np.inf
    half = t_quantile(0.5 + confidence / 2, max(1, count - 1)) * sd
    return Interval(float(changes.mean()), float(changes.mean() - half), float(changes.mean() + half), count)
