"""Render chapters as one self-contained HTML file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatshift.experiments.report.blocks import SIDE_BY_SIDE, Chapter, ChapterPart
from flatshift.experiments.report.figure import FONT, PALETTE, Chart

if TYPE_CHECKING:
    from jinja2 import Environment

_TEMPLATES = Path(__file__).parent / "templates"


def render(chapters: Sequence[Chapter]) -> str:
    """Return the page as text."""
    from markupsafe import Markup

    script = (_TEMPLATES / "theme.js").read_text(encoding="utf-8")
    # The page's Content-Security-Policy allows this one script.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    main = max(chapters, key=lambda chapter: chapter.weight)
    names = [chapter.name for chapter in chapters if chapter.name != SIDE_BY_SIDE]
    single = len(chapters) == 1
    kicker = (main.name if main.name == main.kind else f"{main.kind} {main.name}") if single else f"{len(names)} runs"
    css = (_TEMPLATES / "style.css").read_text(encoding="utf-8")
    for index, theme in enumerate(("light", "dark")):
        values = " ".join(f"--{token}: {colours[index]};" for token, colours in PALETTE.items())
        css = css.replace(f"/* {theme} palette */", values)
    css = css.replace("/* font */", f"font-family: {FONT};")
    numbers = count(1)

    def svg(chart: Chart) -> Markup:
        # Safe: serialised from an XML tree, which escapes every text.
        return Markup(chart.inline(f"c{next(numbers)}"))

    template = _jinja_environment().get_template("report.html.j2")
    return template.render(
        title=", ".join(names[:4]) + (", …" if len(names) > 4 else ""),
        headline=main.finding or main.name,
        kicker=kicker,
        chapters=chapters,
        main=main,
        single=single,
        svg=svg,
        digest=digest,
        style=Markup(css),
        script=Markup(script),
    )


def render_document(part: ChapterPart, document: Mapping[str, Any], *, name: str, slug: str) -> str:
    """Return the page of one result file; `slug` is the anchor of its only chapter."""
    finding, *details = part.findings or [""]
    command = str(document.get("command", ""))
    return render(
        [Chapter(name, part.kind, finding, part.facts, part.tiles, part.sections, slug, command, details=details)]
    )


@cache
def _jinja_environment() -> Environment:
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
