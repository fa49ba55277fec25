"""Chapters of a page: one module for each kind of run directory or of file in one.

Each module has `part(run)`, which returns its contribution to the run's chapter, or None if the run has nothing of its
kind. To add one, write a module here and list it in `PARTS`.
"""

from __future__ import annotations

from flatshift.experiments.report import formats
from flatshift.experiments.report.blocks import Bars, Chapter, NameValuePairs, PreformattedText, Section, Table
from flatshift.experiments.report.chapters import (
    comparison,
    evaluation,
    predictions,
    run,
    selection,
    sharpness,
    sweep,
    tokenizer,
)
from flatshift.experiments.results.run import RunResults, read_object
from flatshift.finetune.figures import format_bytes

PARTS = (
    sweep.forecast_part,
    comparison.part,
    evaluation.part,
    tokenizer.part,
    run.part,
    predictions.part,
    sharpness.part,
    selection.part,
    sweep.part,
)
"""In page order; of several chapters on a page, the one with the earliest kind gives the headline."""


def build_chapter(run: RunResults) -> Chapter:
    """Build the chapter of one run directory."""
    parts = [(index, part) for index, build_part in enumerate(PARTS) if (part := build_part(run)) is not None]
    finding, *details = [sentence for _, part in parts for sentence in part.findings if sentence] or [""]
    return Chapter(
        name=run.name,
        kind=" with ".join(part.kind for _, part in parts if part.kind) or "run",
        finding=finding,
        details=details,
        facts=[*_run_facts(run), *(fact for _, part in parts for fact in part.facts)],
        tiles=[tile for _, part in parts for tile in part.tiles][:8],
        sections=[*(section for _, part in parts for section in part.sections), *_provenance_sections(run)],
        command=run.command,
        weight=max((len(PARTS) - index for index, part in parts if part.kind and part.is_conclusive), default=0),
    )


def _run_facts(run: RunResults) -> list[tuple[str, str]]:
    versions = run.environment.get("versions")
    version = versions.get("flatshift") if isinstance(versions, dict) else None
    regularizer = run.recipe.get("regularizer")
    trained = bool(run.metrics.lines or run.eval or run.sweep)
    created = str(run.environment.get("created") or run.manifest.get("created") or "")
    facts = [
        ("made", created.replace("T", " ").replace("+00:00", "Z").replace("Z", " UTC")),
        ("recipe", _recipe_name(run)),
        ("backbone", str(run.recipe.get("backbone") or "") if trained else ""),
        ("regularizer", str(regularizer.get("kind") or "") if trained and isinstance(regularizer, dict) else ""),
        ("flatshift", str(version or "")),
        ("elapsed", formats.seconds(run.elapsed) if run.elapsed else ""),
    ]
    return [(name, value) for name, value in facts if value]


def _recipe_name(run: RunResults) -> str:
    """Return the recipe's name: as recorded by a sweep, else from `extends`, else from the command line."""
    plan = run.path / "sweep.json"
    if plan.is_file():
        return str(read_object(plan).get("recipe", ""))
    if run.recipe.get("extends"):
        return str(run.recipe["extends"])
    words = run.command.split()
    verbs = [i for i, w in enumerate(words[:-1]) if w in ("train", "select", "sweep")]
    name = words[verbs[0] + 1] if verbs else ""
    return "" if name.startswith("-") else name.rpartition("/")[2]


def _provenance_sections(run: RunResults) -> list[Section]:
    sections = []
    if run.stage_seconds:
        longest = max(run.stage_seconds.values()) or 1.0
        bars = [(name, formats.seconds(s), s / longest) for name, s in run.stage_seconds.items()]
        sections.append(Section("Time", [Bars(bars)], "Wall time of each part, with its evaluations and checkpoints."))
    inputs = run.manifest.get("inputs")
    if isinstance(inputs, list) and inputs:
        rows = [
            {
                "file": str(i.get("path", "")),
                "rows": formats.number(i["rows"]) if isinstance(i.get("rows"), int) else "–",
                "size": format_bytes(i["bytes"]) if isinstance(i.get("bytes"), int) else "–",
                "SHA-256": str(i.get("sha256", "")),
            }
            for i in inputs
            if isinstance(i, dict)
        ]
        sections.append(Section("Inputs", [Table.of(rows, words=("file", "SHA-256"))], folded=True))
    if run.environment:
        pairs = []
        for key, value in run.environment.items():
            if key == "memory" and isinstance(value, int):
                value = format_bytes(value)
            if isinstance(value, list | dict):  # `resumed` is a list of what differed at each resume
                changes = value if isinstance(value, list) else [value]
                value = "; ".join(", ".join(f"{k} {v}" for k, v in each.items() if v is not None) for each in changes)
            if value not in (None, ""):
                pairs.append((key, str(value)))
        sections.append(Section("Environment", [NameValuePairs(pairs)], folded=True))
    if run.recipe_text:
        sections.append(Section("Recipe, resolved", [PreformattedText(run.recipe_text.strip())], folded=True))
    return sections
