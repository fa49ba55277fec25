"""Checks of a selection: change of the distance to the target, and targets that the pool cannot serve."""

from __future__ import annotations

from typing import Any

from flatshift.experiments.report import formats
from flatshift.experiments.report.blocks import Block, ChapterPart, ChartGroup, Notes, Section, Table
from flatshift.experiments.report.charts.selection import distance_chart, relative_changes, third_arm
from flatshift.experiments.results.run import RunResults


def part(run: RunResults) -> ChapterPart | None:
    """Return both sections for a checked selection."""
    found = run.selection.about.get("checks") if run.selection is not None else None
    if not isinstance(found, dict):
        return None
    return ChapterPart(sections=[*_distance_sections(found), *_coverage_sections(found.get("coverage"))])


def _distance_sections(found: dict[str, Any]) -> list[Section]:
    blocks: list[Block] = []
    if found["warnings"]:
        blocks.append(Notes([sentence[:1].upper() + sentence[1:] + "." for sentence in found["warnings"]]))
    sampled = found["rows"] < found["of"] or found["targets"] < found["of_targets"]
    blocks += [ChartGroup([distance_chart(found)]), _distance_table(found, sampled)]
    told = (
        f"Measured on {found['rows']:,} of {found['of']:,} records, drawn by seed and half of them among the best "
        f"ranks ({found['budget_rows']:,} stand for the selection), and {found['targets']:,} of "
        f"{found['of_targets']:,} targets."
        if sampled
        else "Measured on the whole pool and target."
    )
    lead = (
        "The change of the transport distance from pool to target when the selection becomes a share λ of the mixture. "
        f"{told}"
    )
    return [Section("Does the selection bring the pool nearer to the target?", blocks, lead)]


def _distance_table(found: dict[str, Any], sampled: bool) -> Table:
    """Build a row for each λ. sampled: the best possible value is an estimate, a bound for the sampled rows only."""
    distance = found["distance"]
    other = third_arm(found)
    held = found["held_out"]
    columns = ["share λ", "promised", "realised", "ratio", "best possible", "divergence"]
    columns += [f"unseen: {name}" for name in ("selection", "random", other)] if held else []
    rows = []
    for place, share in enumerate(found["shares"]):
        own = found["fitted"]["selection"][place]
        cells = [
            _format_change(own["predicted"] / distance),
            _format_change(own["realised"] / distance),
            "–" if own["ratio"] is None else formats.number(float(own["ratio"]), 2),
            f"{'≈' if sampled else '≥'} {_format_change((own['realised'] - own['gap']) / distance)}",
            _format_change(own["debiased"] / distance),
        ]
        if held:
            cells += [_format_range(relative_changes(found, name, place)) for name in ("selection", "random", other)]
        rows.append([f"{share:g}", *cells])
    bound = "an estimate from the sample, no bound for the whole pool" if sampled else "a bound"
    caption = (
        "All in per cent of the distance before. Promised: λ times the mean score. Best possible: no selection of this "
        f"size can change the distance by more ({bound}). Divergence: the change with entropy's own part taken out."
    )
    if held:
        caption += (
            f" Unseen: chosen with one half of the target and evaluated on the other, mean and range of "
            f"{len(held[other])} random halves."
        )
    return Table(columns, rows, caption, frozenset(range(1, len(columns))))


def _format_change(share: float) -> str:
    return f"{100 * share:+.1f} %".replace("-", "−")


def _format_range(values: list[float]) -> str:
    return (
        f"{_format_change(sum(values) / len(values))} ({_format_change(min(values))} to {_format_change(max(values))})"
    )


_WORDS = ("target", "id", "served", "nearest record")


def _coverage_sections(found: Any) -> list[Section]:
    if not isinstance(found, dict) or not found["worst"]:
        return []
    rows = [
        {
            "target": worst["text"] or "(no text)",
            "id": worst["id"],
            "potential g": formats.signed_number(float(worst["g"])),
            "cost of nearest record": formats.number(float(worst["cost"])),
            "served": "no" if worst["unserved"] else "yes" if found["limit"] is not None else "–",
            "nearest record": worst["nearest_text"] or worst["nearest"],
        }
        for worst in found["worst"]
    ]
    if found["limit"] is None:
        lead = "Fewer than ten targets differ, so there is no telling what is far. Listed by potential, largest first."
    elif found["unserved"]:
        looked = f"{found['looked_at']:,} targets" + " looked at" * (found["looked_at"] < found["of"])
        lead = (
            f"{found['unserved']:,} of {looked} have no record of the pool as near as targets are to one another (95 % "
            f"of them have another within a cost of {formats.number(float(found['limit']))}). "
        )
        if 2 * found["unserved"] > found["looked_at"]:
            lead += (
                "The pool as a whole is of another kind: a selection moves it towards the target without reaching it. "
            )
        else:
            lead += "No choice from this pool comes nearer to these. "
        lead += "Listed by potential, largest first."
    else:
        lead = (
            "Every target that was looked at has a record of the pool as near as targets are to one another. Listed by "
            "potential, largest first."
        )
    which = "" if found["looked_at"] == found["of"] else f"The {found['looked_at']:,} targets of largest potential. "
    caption = (
        f"{which}The potential g_j, in units of cost: what it costs the pool to reach a target, compared with the mean "
        "one. Nearest records are searched in the whole pool."
    )
    return [
        Section(
            "What the pool cannot serve",
            [Table.of(rows, caption, words=_WORDS)],
            lead,
        )
    ]
