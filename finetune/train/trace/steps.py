"""After which updates figures are taken, and the constant that curvature is compared with."""

from __future__ import annotations

from ...config import Record


def recorded_steps(record: Record, total_steps: int) -> tuple[int, ...]:
    """Ascending numbers of completed updates, from 0 (before any) to `total_steps`.

    `log`: the powers of 2^(1/per_doubling), rounded. Steps that are listed beyond `total_steps` are left out.
    """
    if record.steps == "log":
        wanted, power = [], 0
        while (step := round(2 ** (power / record.per_doubling))) <= total_steps:
            wanted.append(step)
            power += 1
    else:
        wanted = [step for step in record.steps if step <= total_steps]
    curved = [step for step in record.sharpness if step <= total_steps]
    return tuple(sorted({0, *wanted, *curved, total_steps}))


def stability_threshold(beta1: float) -> float:
    """λ_max(P^-½ H P^-½) · lr above which Adam oscillates: (2 + 2β1)/(1 − β1), which is 38 for β1 = 0.9.

    P is the preconditioner √v̂ + ε, taken as frozen (Cohen et al., arXiv 2207.14484).
    """
    return (2 + 2 * beta1) / (1 - beta1)
