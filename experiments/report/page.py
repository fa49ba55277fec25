"""Chapters laid out as one HTML file that needs nothing but itself."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.report.blocks import Chapter
from experiments.report.chapters import chapter, charts_of
from experiments.report.figure import FONT, PALETTE, Chart, drawing
from experiments.report.load import discover
from finetune.atomic import sweep_leftovers, write_text
from finetune.errors import UserError

if TYPE_CHECKING:
    from jinja2 import Environment

_OURS, _HEAD = b'<meta name="generator" content="flatshift"', 4096
_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class _Page:
    """What the template gets besides the chapters."""

    title: str
    headline: str
    kicker: str


def build_report(paths: Sequence[str | Path], *, out: str | Path) -> Path:
    """Write one offline page about the runs in `paths` to `out` (whole or not at all) and return `out`.

    paths: run directories of `train`, `select` or `sweep`, studies, or folders that hold several of these. Only files
    of the run directory contract (design §4) are read; what is missing is left out of the page. The same files give
    the same bytes.
    Raises UserError for a path that is no run directory, a file in it that cannot be read or is not what the run saved,
    and an `out` that is there and no page of ours.
    """
    refuse_foreign(Path(out))
    runs = discover([Path(p) for p in paths])
    with drawing():
        chapters = _with_slugs([chapter(run) for run in runs])
    write_text(out, render(chapters))
    return Path(out)


def refuse_foreign(out: Path) -> None:
    """Raise UserError for a plain file that is no page of ours (what is no plain file, no writer replaces)."""
    if not out.is_file() or out.is_symlink():
        return
    with out.open("rb") as stream:
        if _OURS not in stream.read(_HEAD):
            raise UserError(
                f"--out: {out} is no report of ours and is not replaced; name another file, or move it away"
            )


def write_plots(run: str | Path) -> list[Path]:
    """Write the charts of one run directory as `plots/*.svg`, files of their own, and return their paths.

    Raises UserError like `build_report`.
    """
    written = []
    for found in discover([Path(run)]):
        sweep_leftovers(found.path / "plots")
        seen: dict[str, int] = {}
        with drawing():
            charts = charts_of(chapter(found))
        for chart in charts:
            seen[chart.name] = seen.get(chart.name, 0) + 1
            name = chart.name if seen[chart.name] == 1 else f"{chart.name}-{seen[chart.name]}"
            path = found.path / "plots" / f"{name}.svg"
            write_text(path, chart.standalone)
            written.append(path)
    return written


def render(chapters: Sequence[Chapter]) -> str:
    """The page as text."""
    from markupsafe import Markup

    script = (_TEMPLATES / "theme.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    first = max(chapters, key=lambda c: c.weight)
    one = len(chapters) == 1
    title = first.name if one else ", ".join(c.name for c in chapters[:4]) + (", …" if len(chapters) > 4 else "")
    page = _Page(title, first.finding or first.name, _kicker(first) if one else f"{len(chapters)} runs")

    numbers = count(1)

    def svg(chart: Chart) -> Markup:
        # Safe: serialised from an XML tree, which escapes every text.
        return Markup(chart.inline(f"c{next(numbers)}"))

    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            page=page,
            chapters=chapters,
            first=first,
            one=one,
            svg=svg,
            digest=digest,
            style=Markup(_style()),
            script=Markup(script),
        )
    )


def _kicker(made: Chapter) -> str:
    return made.name if made.name == made.kind else f"{made.kind} {made.name}"


def _with_slugs(chapters: list[Chapter]) -> list[Chapter]:
    """Each chapter with an anchor of its own."""
    return [replace(c, slug=f"run{i}") for i, c in enumerate(chapters, 1)]


def _style() -> str:
    css = (_TEMPLATES / "style.css").read_text(encoding="utf-8")
    for name, at in (("light", 0), ("dark", 1)):
        values = " ".join(f"--{token}: {pair[at]};" for token, pair in PALETTE.items())
        css = css.replace(f"/* {name} palette */", values)
    return css.replace("/* font */", f"font-family: {FONT};")


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["width"] = lambda share: f"{100 * max(min(float(share), 1.0), 0.0):.1f}%"
    return environment
