"""What the benchmark of forecasts says of ranks."""

from __future__ import annotations

from benchmarks.forecast import NOISES, RANKS, ROWS, rank_choices


def test_ranks_that_are_forecast_alike_are_no_choice() -> None:
    """Until 27 November 2026 the page counted 20 of 35 ties as rightly signed differences."""
    places = [(rows, noise) for rows in ROWS for noise in NOISES]
    low, high = RANKS

    def errors(small: list[float], large: list[float]) -> dict[str, float]:
        by_rank = {low: small, high: large}
        return {f"{rank:g}|{r:g}|{n:g}": by_rank[rank][i] for rank in RANKS for i, (r, n) in enumerate(places)}

    few = len(places) - 2
    said = errors([0.5, 0.5] + [0.5] * few, [0.4, 0.6] + [0.5] * few)
    forecast = {"error": {key: [value, value] for key, value in said.items()}}
    trained = {"error": errors([0.5] * len(places), [0.4] * len(places))}
    found = rank_choices({"task": (forecast, trained)})
    assert (found["same"], found["differ"], found["right"]) == (few, 2, 1)
    assert abs(found["by error"] - (0 + 10 + 5 * few) / len(places)) < 1e-9
    assert abs(found["coin"] - 5) < 1e-9 and abs(found["largest"]) < 1e-9
