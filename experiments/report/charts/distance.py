"""The chart of a selection's check: change of the transport distance over the share of the selection."""

from __future__ import annotations

from typing import Any

from experiments.report.figure import WIDE, Canvas, Chart, colour, label_ends

_COLOURS = {"selection": "blue", "random": "orange"}


def other_arm(found: dict[str, Any]) -> str:
    """What stands beside selection and random draw: "rounds" or "one step"."""
    return next(name for name in found["fitted"] if name not in _COLOURS)


def relative(found: dict[str, Any], arm: str, place: int) -> list[float]:
    """One number for each split at the λ of this place: the change as a share of the distance before."""
    return [
        values[place] / before for values, before in zip(found["held_out"][arm], found["held_distance"], strict=True)
    ]


def distance_change(found: dict[str, Any]) -> Chart:
    """Lines over λ: what the scores promise, and what each arm does to halves of the target that it did not see."""
    shares, distance = found["shares"], found["distance"]
    held = found["held_out"]
    with Canvas(WIDE, 330) as canvas:
        ax = canvas.axes(
            y="change of the transport distance, %", x="share λ of the selection in the mixture", right=168
        )
        ax.axhline(0, color=colour("ink"), linewidth=1)
        ends: list[tuple[float, float, str, str]] = []
        drawn = [0.0]
        own = found["fitted"]["selection"]
        promised = [100 * reading["predicted"] / distance for reading in own]
        ax.plot([0, *shares], [0, *promised], color=colour("muted"), linewidth=1.6, linestyle=(0, (4, 3)))
        ends.append((1.0, promised[-1], "promised", "muted"))
        for arm, readings in found["fitted"].items():
            token = _COLOURS.get(arm, "green")
            if held:
                lists = [[100 * v for v in relative(found, arm, place)] for place in range(len(shares))]
                ax.fill_between(
                    [0, *shares],
                    [0, *(min(values) for values in lists)],
                    [0, *(max(values) for values in lists)],
                    color=colour(token),
                    alpha=0.18,
                    linewidth=0,
                )
                line = [sum(values) / len(values) for values in lists]
            else:
                line = [100 * reading["realised"] / distance for reading in readings]
            ax.plot([0, *shares], [0, *line], color=colour(token), linewidth=2.2, marker="o", markersize=5)
            drawn += line
            ends.append((1.0, line[-1], arm if arm != "random" else "random draw", token))
        # The promise is a straight line that may leave the picture: what was measured decides the scale.
        low, high = min(drawn), max(drawn)
        room = 0.12 * max(high - low, 1.0)
        ax.set_ylim(min(low, max(promised[-1], 2 * low)) - room, high + room)
        ax.set_xlim(0, 1.0)
        bottom, top = ax.get_ylim()
        label_ends(ax, [(x, min(max(y, bottom), top), text, token) for x, y, text, token in ends], height=256)
        seen = (
            f"Lines: mean over {len(found['held_distance'])} halves of the target that were not used to choose; bands: "
            "their range."
            if held
            else "On the target that was used to choose: it has too few rows to hold half of them out."
        )
        caption = f"{seen} Dashed: what the scores promise to first order. Below zero is nearer to the target."
        return canvas.chart("selection-checks", title="Transport distance to the target", caption=caption)
