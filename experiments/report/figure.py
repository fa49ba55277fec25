"""Matplotlib figures for the page: themed colours, readable text, deterministic bytes.

A figure is drawn once, in the light colours of `PALETTE`. `Chart.standalone` keeps them, so that any viewer shows them;
`Chart.inline` turns each into a CSS variable, so that the page's theme decides.
"""

from __future__ import annotations

import io
import itertools
import re
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE: dict[str, tuple[str, str]] = {
    # token: (light, dark). The hues follow Okabe and Ito, distinguishable with any colour vision.
    "ink": ("#1c2128", "#e8eaed"),
    "muted": ("#5d6672", "#a3abb6"),
    "faint": ("#aab1bb", "#69727e"),
    "grid": ("#e6e5e1", "#2c323b"),
    "surface": ("#fefefd", "#181c22"),
    "blue": ("#0b6bb0", "#62b2ee"),
    "orange": ("#c24c03", "#f58a4b"),
    "green": ("#08795a", "#45c79c"),
    "purple": ("#a34f86", "#e09bc8"),
    "amber": ("#946306", "#ecb63f"),
    # Ordered ramp, purple to olive like viridis: luminance grows from step to step, whatever the colour vision.
    "ramp0": ("#2e0f5b", "#9a86e3"),
    "ramp1": ("#3d2f86", "#8a97ec"),
    "ramp2": ("#31509a", "#74abee"),
    "ramp3": ("#1f6592", "#5fbde4"),
    "ramp4": ("#117076", "#5fcbc6"),
    "ramp5": ("#287856", "#7dd6a0"),
    "ramp6": ("#527b2c", "#a9dd74"),
    "ramp7": ("#847410", "#dfe05c"),
}
"""Light and dark value of each colour. Each light value belongs to one token only, because `inline` maps it back."""

RAMP = tuple(token for token in PALETTE if token.startswith("ramp"))
"""Tokens for ordered values (ranks, learning rates), smallest first."""

WIDE = 1112
"""Width in px of a chart that fills a row; a chart that shares its row is 540 px wide."""
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_SVG = "{http://www.w3.org/2000/svg}"
_XLINK = "{http://www.w3.org/1999/xlink}"
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
"""Characters that XML 1.0 forbids."""
_LIGHT = {light: token for token, (light, _) in PALETTE.items()}


def colour(token: str) -> str:
    """Return the light value that stands for `token` while drawing."""
    return PALETTE[token][0]


@dataclass(frozen=True)
class Chart:
    """Drawn figure. `name` is its file name in plots/; all fields except `raw` are plain text. verdict, evidence:
    result of a test on the curve and its reasons, a sentence each; printed above the figure."""

    name: str
    title: str
    caption: str
    width: int
    raw: str
    verdict: str = ""
    evidence: tuple[str, ...] = ()

    @property
    def wide(self) -> bool:
        """True if the chart fills a row of the page."""
        return self.width > 600

    @cached_property
    def standalone(self) -> str:
        """Return a complete SVG file in the light colours on a white background."""
        sentences = [self.caption, self.verdict and f"Verdict: {self.verdict}.", *self.evidence]
        description = " ".join(sentence for sentence in sentences if sentence)
        root = _clean_svg(self.raw, prefix="", title=self.title, description=description)
        # After <title> and <desc>, behind everything drawn.
        root.insert(2, ET.Element(f"{_SVG}rect", {"width": "100%", "height": "100%", "fill": colour("surface")}))
        root.set("font-family", FONT)
        ET.register_namespace("", _SVG[1:-1])
        return ET.tostring(root, encoding="unicode") + "\n"

    def inline(self, prefix: str) -> str:
        """Return the markup for an HTML page; `prefix` makes its ids unique there."""
        root = _clean_svg(self.raw, prefix=f"{prefix}-", title=self.title, description=self.caption)
        root.set("style", f"max-width:{self.width}px")
        for element in root.iter():
            element.tag = element.tag.removeprefix(_SVG)
        text = ET.tostring(root, encoding="unicode")
        # Replace colours inside style attributes only: text that looks like a colour is kept.
        return re.sub(r'style="[^"]*"', lambda style: _COLOUR.sub(_theme_variable, style.group()), text)


_COLOUR = re.compile(r"#[0-9a-f]{6}\b")


def _theme_variable(match: re.Match[str]) -> str:
    token = _LIGHT.get(match.group())
    return f"var(--{token})" if token else match.group()


def _clean_svg(raw: str, *, prefix: str, title: str, description: str) -> ET.Element:
    """Drop metadata and unused ids, shorten numbers, remove font families, and add a title for screen readers."""
    raw, title, description = (_NOT_XML.sub("\ufffd", text) for text in (raw, title, description))
    root = ET.fromstring(raw)
    for parent in list(root.iter()):
        for child in [c for c in parent if c.tag in (f"{_SVG}metadata", f"{_SVG}style")]:
            parent.remove(child)
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', raw))
    for element in root.iter():
        attributes = {}
        for key, value in element.attrib.items():
            if key == "id":
                if value not in used:
                    continue
                value = prefix + value
            elif key == f"{_XLINK}href":
                key, value = "href", f"#{prefix}{value.removeprefix('#')}"
            elif key == "clip-path":
                value = value.replace("url(#", f"url(#{prefix}")
            elif key in ("d", "x", "y", "transform", "width", "height", "viewBox"):
                # A rotation by −0° has no effect.
                if value.startswith("rotate(-0 "):
                    continue
                value = re.sub(r"\d+\.\d+", lambda m: f"{float(m.group()):.2f}".rstrip("0").rstrip("."), value)
                value = re.sub(r"\s+", " ", value).strip()
            elif key == "style":
                value = re.sub(r"font: ((?:\d+ |bold |italic )*)([\d.]+px) [^;]*", _simplify_font, value)
                value = re.sub(r"font-family: [^;]*(; |$)", "", value)
            attributes[key] = value
        element.attrib.clear()
        element.attrib.update(attributes)
        element.tail = None if element.tail is None or not element.tail.strip() else element.tail
        element.text = None if element.text is None or not element.text.strip() else element.text
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    # Matplotlib sets this in a <style> for `*`, which would apply to every other element of the page.
    root.set("stroke-linejoin", "round")
    root.set("role", "img")
    root.set("aria-labelledby", f"{prefix}title {prefix}desc")
    for position, (tag, text) in enumerate((("title", title), ("desc", description))):
        element = ET.Element(_SVG + tag, {"id": prefix + tag})
        element.text = text
        root.insert(position, element)
    return root


def _simplify_font(match: re.Match[str]) -> str:
    weight = "font-weight: 600; " if "bold" in match[1] or "600" in match[1] or "700" in match[1] else ""
    return f"{weight}font-size: {match[2]}"


_DRAWING = ContextVar("drawing", default=False)


@contextmanager
def chart_style() -> Iterator[None]:
    """Apply the chart settings to matplotlib. Enter it around many charts to pay for the setup once."""
    if _DRAWING.get():
        yield
        return
    import matplotlib

    settings = {
        # Text stays text: searchable, and in the page's own font.
        "svg.fonttype": "none",
        # Same ids, and so the same bytes, in every run.
        "svg.hashsalt": "flatshift",
        # A `$` in a text is not math.
        "text.parse_math": False,
        "font.size": 12,
        "font.family": "DejaVu Sans",
        "axes.unicode_minus": True,
        "path.simplify": True,
        "text.color": colour("ink"),
        "axes.labelcolor": colour("muted"),
        "axes.edgecolor": colour("faint"),
        "axes.linewidth": 1.0,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.color": colour("grid"),
        "grid.linewidth": 1.0,
        "xtick.color": colour("muted"),
        "ytick.color": colour("muted"),
        "xtick.labelsize": 11.5,
        "ytick.labelsize": 11.5,
        "axes.labelsize": 11.5,
        "ytick.left": False,
        "xtick.major.size": 4,
        "xtick.minor.size": 0,
        "ytick.minor.size": 0,
        "axes.facecolor": "none",
        "figure.facecolor": "none",
        "lines.solid_capstyle": "round",
        "lines.linewidth": 2.0,
        "axes.formatter.limits": (-4, 6),
    }
    with matplotlib.rc_context(settings):  # type: ignore[arg-type]
        token = _DRAWING.set(True)
        try:
            yield
        finally:
            _DRAWING.reset(token)


class Canvas:
    """Figure while it is drawn: `with Canvas(560, 300) as canvas: ax = canvas.axes(); …; canvas.chart(…)`."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height

    def __enter__(self) -> Canvas:
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        self._context = chart_style()
        self._context.__enter__()
        self.figure: Figure = Figure(figsize=(self.width / 72, self.height / 72))
        FigureCanvasSVG(self.figure)
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def axes(
        self, *, left: float = 48, right: float = 16, top: float = 30, bottom: float = 44, y: str = "", x: str = ""
    ) -> Axes:
        """Add axes with margins in px; the y title is written horizontally above the axis."""
        w, h = self.width, self.height
        ax = self.figure.add_axes((left / w, bottom / h, (w - left - right) / w, (h - top - bottom) / h))
        if y:
            self.text(4, h - 13, y, colour="muted")
        if x:
            self.text(w - right, 11, x, colour="muted", ha="right")
        ax.tick_params(axis="y", pad=4)
        return ax

    def text(
        self, x: float, y: float, text: str, *, colour: str = "ink", ha: str = "left", size: float = 11.5, **kw: Any
    ) -> None:
        """Write text at a pixel position from the lower left of the figure."""
        self.figure.text(
            x / self.width, y / self.height, text, color=PALETTE[colour][0], ha=ha, va="center", fontsize=size, **kw
        )

    def chart(self, name: str, *, title: str, caption: str, verdict: str = "", evidence: Sequence[str] = ()) -> Chart:
        """Save the figure as a `Chart`."""
        buffer = io.StringIO()
        undated = dict.fromkeys(("Date", "Creator", "Type", "Format"))
        with warnings.catch_warnings():  # text stays text: the reader's fonts draw it, not matplotlib's
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            self.figure.savefig(buffer, format="svg", metadata=undated)
        return Chart(name, title, caption, self.width, buffer.getvalue(), verdict, tuple(evidence))


def spread_apart(positions: Sequence[float], gap: float) -> list[float]:
    """Move positions apart so that neighbours are at least `gap` apart; order and centre are kept."""
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    result = list(positions)
    for _ in range(50):
        moved = False
        for low, high in itertools.pairwise(order):
            lack = gap - (result[high] - result[low])
            if lack > 1e-9 * max(abs(gap), 1e-12):
                result[low] -= lack / 2
                result[high] += lack / 2
                moved = True
        if not moved:
            break
    return result


def label_ends(ax: Axes, ends: Sequence[tuple[float, float, str, str]], *, height: float) -> None:
    """Write names at the right end of lines: (x, y, text, colour token), moved apart if they would touch. `height` is
    the axes' height in px. Call after the limits are final."""
    if not ends:
        return
    low, high = ax.get_ylim()
    rows = spread_apart([y for _, y, _, _ in ends], 15 * ((high - low) / height))
    style: dict[str, Any] = {"fontsize": 12, "fontweight": "bold", "va": "center", "ha": "left"}
    for (x, _, text, token), y in zip(ends, rows, strict=True):
        offset: dict[str, Any] = {"xytext": (7, 0), "textcoords": "offset points", "annotation_clip": False}
        ax.annotate(text, (x, y), color=colour(token), **offset, **style)


def draw_path(ax: Axes, shapes: Sequence[Sequence[tuple[float, float]]], *, limits: bool = False, **style: Any) -> None:
    """Draw many open lines or filled polygons as one path. limits: let them widen the limits of the axes."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    if not shapes:
        return
    codes = [Path.MOVETO if i == 0 else Path.LINETO for shape in shapes for i in range(len(shape))]
    path = Path([point for shape in shapes for point in shape], codes)
    path.should_simplify = False
    patch = PathPatch(path, **{"facecolor": "none", **style})
    if limits:
        ax.add_patch(patch)
    else:
        ax.add_artist(patch)


def draw_dots(
    ax: Axes, points: Sequence[tuple[float, float]], *, token: str, size: float, alpha: float, gid: str
) -> None:
    """Draw many round points as one path of zero-length strokes with round caps (a tenth of the bytes of markers)."""
    style: dict[str, Any] = {"edgecolor": colour(token), "linewidth": size, "alpha": alpha, "gid": gid}
    ends = {"capstyle": "round", "joinstyle": "round"}
    draw_path(ax, [(point, point) for point in points], limits=True, **style, **ends)
