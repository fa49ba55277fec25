"""From a run directory's pieces to a chapter of the page: which sections, with what in them."""

from __future__ import annotations

from experiments.report import (
    findings,
    formats,
    sections_checks,
    sections_hygiene,
    sections_run,
    sections_sharpness,
    sections_study,
    sections_sweep,
)
from experiments.report.blocks import (
    Bars,
    Chapter,
    Figures,
    Pairs,
    Pre,
    Section,
    Table,
    Tile,
)
from experiments.report.figure import Chart
from experiments.report.load import Run, read_object
from experiments.report.sweepanalysis import Analysis


def chapter(run: Run) -> Chapter:
    """Everything that one run directory has to show."""
    kinds = []
    parts: list[str] = []
    tiles: list[Tile] = []
    sections: list[Section] = []
    weight = 0
    if run.study is not None:
        kinds.append("study")
        weight = 4
        parts.append(findings.study_finding(run.study))
        tiles += sections_study.study_tiles(run.study)
        sections += sections_study.study_sections(run.study)
    if run.metrics.lines or run.eval or run.stages:
        kinds.append("training run")
        weight = max(weight, 3)
        parts.append(findings.train_finding(run))
        tiles += sections_run.training_tiles(run)
        sections += [*sections_run.evaluation_sections(run), *sections_run.training_sections(run)]
        sections += sections_sharpness.sharpness_sections(run)
    if run.selection is not None:
        kinds.append("selection")
        weight = max(weight, 2)
        parts.append(findings.selection_finding(run.selection))
        tiles += sections_run.selection_tiles(run.selection)
        sections += sections_run.selection_sections(run, run.selection)
        sections += sections_checks.check_sections(run.selection)
        sections += sections_hygiene.hygiene_sections(run.selection)
    if run.sweep is not None:
        kinds.append("sweep")
        weight = max(weight, 1)
        analysis = Analysis(run.sweep)
        parts += [findings.sweep_finding(run.sweep, analysis), findings.sweep_details(analysis)]
        tiles += sections_sweep.sweep_tiles(run.sweep, analysis)
        sections += sections_sweep.sweep_sections(run.sweep, analysis)
    sections += _circumstances(run)
    parts = [p for p in parts if p]
    return Chapter(
        name=run.name,
        kind=" with ".join(kinds) or "run",
        finding=parts[0] if parts else "",
        details=parts[1:],
        facts=_facts(run),
        tiles=tiles[:8],
        sections=sections,
        command=run.command,
        weight=weight,
    )


def charts_of(made: Chapter) -> list[Chart]:
    """Every chart of a chapter, in page order."""
    return [
        c for section in made.sections for block in section.blocks if isinstance(block, Figures) for c in block.charts
    ]


def _facts(run: Run) -> list[tuple[str, str]]:
    versions = run.environment.get("versions")
    version = versions.get("flatshift") if isinstance(versions, dict) else None
    regularizer = run.recipe.get("regularizer")
    trained = bool(run.metrics.lines or run.eval or run.sweep)
    facts = [
        (
            "made",
            str(run.environment.get("created") or run.manifest.get("created") or "")
            .replace("T", " ")
            .replace("+00:00", "Z")
            .replace("Z", " UTC"),
        ),
        ("recipe", _recipe_name(run)),
        ("backbone", str(run.recipe.get("backbone") or "") if trained else ""),
        ("regularizer", str(regularizer.get("kind") or "") if trained and isinstance(regularizer, dict) else ""),
        ("flatshift", str(version or "")),
        ("elapsed", formats.seconds(run.elapsed) if run.elapsed else ""),
    ]
    return [(name, value) for name, value in facts if value]


def _recipe_name(run: Run) -> str:
    """The recipe's name: as a sweep or study recorded it, else from `extends`, else from the command line."""
    plan = run.path / "sweep.json"
    if plan.is_file():
        return str(read_object(plan).get("recipe", ""))
    if run.study is not None and run.study.about.get("recipe"):
        return str(run.study.about["recipe"])
    if run.recipe.get("extends"):
        return str(run.recipe["extends"])
    words = run.command.split()
    verbs = [i for i, w in enumerate(words[:-1]) if w in ("train", "select", "sweep")]
    name = words[verbs[0] + 1] if verbs else ""
    return "" if name.startswith("-") else name.rpartition("/")[2]


def _circumstances(run: Run) -> list[Section]:
    sections = []
    if run.stage_seconds:
        longest = max(run.stage_seconds.values()) or 1.0
        bars = [(name, formats.seconds(s), s / longest) for name, s in run.stage_seconds.items()]
        sections.append(Section("Time", [Bars(bars)], "Wall time of each part, with its evaluations and checkpoints."))
    inputs = run.manifest.get("inputs")
    folded: list[Section] = []
    if isinstance(inputs, list) and inputs:
        rows = [
            [
                str(i.get("path", "")),
                formats.number(i["rows"]) if isinstance(i.get("rows"), int) else "–",
                formats.size(i["bytes"]) if isinstance(i.get("bytes"), int) else "–",
                str(i.get("sha256", "")),
            ]
            for i in inputs
            if isinstance(i, dict)
        ]
        folded.append(
            Section(
                "Inputs", [Table(["file", "rows", "size", "SHA-256"], rows, numeric=frozenset({1, 2}))], folded=True
            )
        )
    if run.environment:
        pairs = []
        for key, value in run.environment.items():
            if key == "memory" and isinstance(value, int):
                value = formats.size(value)
            if isinstance(value, dict):
                value = ", ".join(f"{k} {v}" for k, v in value.items() if v is not None)
            if value not in (None, ""):
                pairs.append((key, str(value)))
        folded.append(Section("Environment", [Pairs(pairs)], folded=True))
    if run.recipe_text:
        folded.append(Section("Recipe, resolved", [Pre(run.recipe_text.strip())], folded=True))
    return sections + folded
