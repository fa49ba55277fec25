"""Figures of a sweep that are computed from recorded ones: gradient norm, and sharpness over its threshold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from experiments.results.sweep import SweepData
from experiments.results.traces import STEP

if TYPE_CHECKING:
    import numpy as np

GRADIENT, SHARPNESS = "grad.norm", "sharpness.ratio"


def derive(data: SweepData) -> None:
    """Add `grad.norm` = √(‖gA‖² + ‖gB‖²) and `sharpness.ratio` = lr·λ_max / `data.stability` to trace and cells.

    A cell's own figures are the largest of its trace: of the gradient over the second half of its steps (the first
    steps from B = 0 are large for every rank), of the sharpness over all. A failed cell has none.
    """
    import numpy as np

    trace = data.trace
    if trace is None:
        return
    if trace.has("grad.a") and trace.has("grad.b"):
        norm = np.hypot(trace.column("grad.a"), trace.column("grad.b"))
        trace.add(GRADIENT, norm)
        place = _cells(data)
        steps = trace.column(STEP)
        last = np.full(len(data), -1.0)
        known = (place >= 0) & np.isfinite(steps)  # the steps that a failed cell did not reach have no figures
        np.maximum.at(last, place[known], steps[known])
        late = known & (steps >= last[place] / 2)
        data.add(GRADIENT, np.where(data.finished, _largest(norm, place, late, len(data)), np.nan))
    if trace.has("sharpness.preconditioned") and trace.has("lr"):
        ratio = trace.column("sharpness.preconditioned") * trace.column("lr") / data.stability
        trace.add(SHARPNESS, ratio)
        place = _cells(data)
        data.add(SHARPNESS, np.where(data.finished, _largest(ratio, place, place >= 0, len(data)), np.nan))


def _cells(data: SweepData) -> np.ndarray:
    """int64 [rows of the trace]: row of each one's cell in `data`, −1 where it has none."""
    import numpy as np
    import pyarrow.compute as pc

    assert data.trace is not None
    if "cell" not in data.table.column_names or "cell" not in data.trace.table.column_names:
        return np.full(len(data.trace), -1)
    found = pc.index_in(data.trace.table.column("cell"), value_set=data.table.column("cell").combine_chunks())
    return found.fill_null(-1).to_numpy().astype(np.int64)


def _largest(values: np.ndarray, place: np.ndarray, among: np.ndarray, count: int) -> np.ndarray:
    """float64 [count]: the largest finite value at each place, NaN where there is none."""
    import numpy as np

    good = among & np.isfinite(values)
    top = np.full(count, -np.inf)
    np.maximum.at(top, place[good], values[good])
    return np.where(np.isfinite(top), top, np.nan)
