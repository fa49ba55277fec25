"""Sentences on a forecast, from its forecast.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FORECAST = "forecast.json"


def forecast_sentences(found: Mapping[str, Any]) -> list[str]:
    """Return the forecast as sentences."""
    metric, n = found["metric"], found["rows"][-1]

    def shown(value: float) -> str:
        return f"{100 * value:.1f} %" if metric == "error" else f"{value:.3g}"

    said = [
        f"Predicted, nothing was trained: test {metric} {shown(found['best'])} with {n:,} rows at rank {found['rank']} "
        f"and the best ridge ({found['best_decay']:g} of the kernel's mean eigenvalue), {shown(found['end'])} trained "
        f"to the end; leave-one-out on the training rows says {shown(found['left_out'])}."
    ]
    more = found["more"]
    if more is not None and more["low"] is not None:
        points = 100 if metric == "error" else 1
        unit = " points" if metric == "error" else ""
        said.append(
            f"{found['more_rows']:,} more labels: {points * more['value']:+.2g}{unit} (80 % interval "
            f"{points * more['low']:+.2g} to {points * more['high']:+.2g}, over {found['draws']} draws)."
        )
    said.append(f"The fit uses {found['effective']:.0f} effective parameters at that ridge.")
    if found["threshold_rank"] is not None:
        said.append(f"Training labels can just be fitted at rank {found['threshold_rank']:.3g}: expect a peak there.")
    elif found["threshold_note"]:
        said.append(f"No peak can show along rank: {found['threshold_note']}.")
    if len(found["ranks"]) > 1:
        said.append(
            f"Take rank {found['best_rank']}: of those with the lowest predicted {metric} at the best ridge, as far as "
            "the draws can tell, the one that trains soonest."
        )
    said.append(
        "It holds as far as training stays near its start: compare it with one run of the recipe before relying on it."
    )
    return said
