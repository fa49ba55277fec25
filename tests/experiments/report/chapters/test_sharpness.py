"""The chart of the loss over noise says of how many draws its band is, and of none without one."""

from __future__ import annotations

import pytest

from flatshift.experiments.report.chapters.sharpness import _rise_chart


@pytest.mark.parametrize("pairs", [1, 8])
def test_only_a_band_that_is_drawn_is_explained(pairs: int) -> None:
    ends = {"low": None, "high": None} if pairs == 1 else {"low": 0.01, "high": 0.2}
    cells = {f"rise_sigma_{sigma}": {"value": sigma, **ends, "n": pairs} for sigma in (0.02, 0.05)}
    chart = _rise_chart({"adapter": cells}, "nats")
    assert chart is not None
    assert ("Band: interval over 8 antithetic pairs" in chart.caption) == (pairs == 8) == ("Band" in chart.caption)
