"""Page of `flatshift plan --out NAME.html`: memory and time of the best mesh by cause, and all meshes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flatshift.experiments.report import formats
from flatshift.experiments.report.blocks import Bars, ChapterPart, KeyFigure, Notes, PreformattedText, Section, Table
from flatshift.experiments.report.html import render_document
from flatshift.finetune.figures import format_bytes, format_duration
from flatshift.finetune.planner.layouts import CAUSES

_MOST, _NEAREST = 30, 10
"""Meshes in the table: limit for those that fit, and for those that do not."""


def page(document: Mapping[str, Any]) -> str:
    """Return the whole page as HTML; the template escapes everything from files and settings."""
    best, fits = document["layouts"][document["best"]], document["fits"]
    usable = document["usable_gib"]
    if fits:
        finding = f"It fits: {best['name']} holds {best['allocated_gib']:g} GiB on the fullest device"
        finding += "." if usable is None else f", of {usable:g} that may be used."
    else:
        finding = f"It does not fit: the nearest mesh, {best['name']}, is short of {best['short_gib']:g} GiB a device."
    causes = best["bytes"] | {cause: int(ends[1] * 2**30) for cause, ends in best["outside_gib"].items()}
    # At the memory peak logits of an evaluation and activations of training never coexist.
    training = causes["activations"] + causes["work"] >= causes["logits"]
    for absent in ("logits",) if training else ("activations", "work"):
        del causes[absent]
    memory = _cause_bars(causes, format_bytes)
    sections = [
        Section("Memory by cause", [memory], f"Of the fullest rank of {best['name']}."),
        Section("Time by cause", [_cause_bars(best["seconds"], format_duration)], f"Of a step on {best['name']}."),
        _mesh_section(document["layouts"], document["best"]),
        Section("How far to trust this", [Notes(document["notes"])]),
    ]
    if document["recipe"]:
        sections.insert(2, Section("For the recipe", [PreformattedText(document["recipe"])]))
    facts = [("backbone", f"{document['frozen']:,} frozen values"), ("adapter", f"{document['trained']:,} trained")]
    part = ChapterPart("plan", [finding], _tiles(document, best), sections, facts)
    return render_document(part, document, name=f"{document['model']} on {document['cluster']}", slug="plan")


def _cause_bars(values: Mapping[str, float], format_value: Callable[[float], str]) -> Bars:
    causes = sorted(((value, name) for name, value in values.items() if value > 0), reverse=True)
    return Bars([(CAUSES[name], format_value(value), value / causes[0][0]) for value, name in causes])


def _tiles(document: Mapping[str, Any], best: Mapping[str, Any]) -> list[KeyFigure]:
    low, high = best["nvidia_smi_gib"]
    note = f"nvidia-smi shows {low:g} to {high:g}" if document["kind"] == "cuda" else ""
    tiles = [
        KeyFigure("fullest device", f"{best['allocated_gib']:g} GiB", note=note),
        KeyFigure("a step", format_duration(best["update_s"]), note=f"{best['tokens_per_s']:,.0f} tokens/s"),
        KeyFigure("MFU", formats.percent(best["mfu"]), note="of the devices' bf16 peak"),
    ]
    if document["hours"] is not None:
        cost = "" if document["cost"] is None else f"costs {document['cost']:,.2f}"
        tiles.append(KeyFigure(f"{document['tokens']:,.0f} tokens", f"{document['hours']:,.3g} h", note=cost))
    return tiles


def _mesh_section(layouts: Sequence[Mapping[str, Any]], best: int) -> Section:
    fitting = [layout for layout in layouts if layout["fits"]]
    others = [layout for layout in layouts if not layout["fits"]]
    rows = [
        {
            "mesh": layout["name"] + (" (chosen)" if layout is layouts[best] and layout["fits"] else ""),
            "rows × micro": f"{layout['batch_size']} × {layout['accumulate']}",
            "recompute": layout["checkpointing"],
            "GiB": f"{layout['allocated_gib']:.2f}",
            "short of GiB": "–" if layout["fits"] else f"{layout['short_gib']:.2f}",
            "step": format_duration(layout["update_s"]),
            "tokens/s": f"{layout['tokens_per_s']:,.0f}",
            "MFU": formats.percent(layout["mfu"]),
        }
        for layout in (*fitting[:_MOST], *others[:_NEAREST])
    ]
    lead = (
        f"{len(fitting)} of {len(layouts)} fit; those first, the fastest first, then the nearest. Of meshes that the "
        "model cannot tell apart (2 %) the one with the fewest cuts is chosen."
    )
    if len(rows) < len(layouts):
        lead += f" {len(rows)} are shown; --json has all."
    return Section("Meshes", [Table.of(rows, words=("mesh", "recompute"))], lead)
