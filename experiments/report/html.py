"""Render chapters as one self-contained HTML file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from flatshift.experiments.report.blocks import SIDE_BY_SIDE, Chapter
from flatshift.experiments.report.figure import FONT, PALETTE, Chart

if TYPE_CHECKING:
    from jinja2 import Environment

_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class _Page:
    """Values the template gets in addition to the chapters."""

    title: str
    headline: str
    kicker: str


def render(chapters: Sequence[Chapter]) -> str:
    """Return the page as text."""
    from markupsafe import Markup

    script = (_TEMPLATES / "theme.js").read_text(encoding="utf-8")
    # The page's Content-Security-Policy allows this one script.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    first = max(chapters, key=lambda c: c.weight)
    one = len(chapters) == 1
    named = [c.name for c in chapters if c.name != SIDE_BY_SIDE]
    title = ", ".join(named[:4]) + (", …" if len(named) > 4 else "")
    page = _Page(title, first.finding or first.name, _kicker(first) if one else f"{_count_runs(chapters)} runs")

    numbers = count(1)

    def svg(chart: Chart) -> Markup:
        # Safe: serialised from an XML tree, which escapes every text.
        return Markup(chart.inline(f"c{next(numbers)}"))

    return (
        _jinja_environment()
        .get_template("report.html.j2")
        .render(
            page=page,
            chapters=chapters,
            first=first,
            one=one,
            svg=svg,
            digest=digest,
            style=Markup(_stylesheet()),
            script=Markup(script),
        )
    )


def _count_runs(chapters: Sequence[Chapter]) -> int:
    return sum(made.name != SIDE_BY_SIDE for made in chapters)


def _kicker(made: Chapter) -> str:
    return made.name if made.name == made.kind else f"{made.kind} {made.name}"


def _stylesheet() -> str:
    css = (_TEMPLATES / "style.css").read_text(encoding="utf-8")
    for name, at in (("light", 0), ("dark", 1)):
        values = " ".join(f"--{token}: {pair[at]};" for token, pair in PALETTE.items())
        css = css.replace(f"/* {name} palette */", values)
    return css.replace("/* font */", f"font-family: {FONT};")


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
