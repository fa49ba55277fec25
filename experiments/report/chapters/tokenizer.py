"""Page that compares tokenizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flatshift.experiments.report import formats
from flatshift.experiments.report.blocks import Bars, Block, ChapterPart, KeyFigure, Notes, Section, Table
from flatshift.experiments.report.html import render_document
from flatshift.experiments.results.run import RunResults

Document = Mapping[str, Any]
_FIGURES = (
    ("tokens_per_word", "tokens per word"),
    ("characters_per_token", "characters per token"),
    ("bytes_per_token", "bytes per token"),
    ("continued_words", "words cut up"),
    ("byte_tokens", "tokens of bytes"),
    ("single_characters", "tokens of one character"),
    ("unknown", "unknown"),
)
_SHARES = {"continued_words", "byte_tokens", "single_characters", "unknown"}


def part(run: RunResults) -> ChapterPart | None:
    """Return the part for a directory of `flatshift tokenizer --out`."""
    return _part(run.tokenizers) if run.tokenizers else None


def page(document: Document) -> str:
    """Return the whole page as HTML; the template escapes everything from files and settings."""
    return render_document(_part(document), document, name=", ".join(document["tokenizers"]), slug="tokenizers")


def _part(document: Document) -> ChapterPart:
    tokenizers = document["tokenizers"]
    best = max(tokenizers, key=lambda name: tokenizers[name]["all"]["bytes_per_token"] or 0.0)
    finding = f"{best} needs {formats.number(tokenizers[best]['all']['tokens_per_word'])} tokens a word on these texts"
    sizes = {name: formats.number(figures["all"]["bytes_per_token"]) for name, figures in tokenizers.items()}
    alike = list(sizes.values()).count(sizes[best]) > 1
    finding += "." if len(sizes) == 1 else ", as many a byte as others." if alike else ", the fewest a byte."
    tiles = [KeyFigure("bytes per token", size, note=name) for name, size in sizes.items()]
    head = ["tokenizer", "vocabulary", "of it used", *(title for _, title in _FIGURES)]
    rows = [
        [
            name,
            f"{figures['vocabulary']:,}",
            formats.percent(figures["used"] / figures["vocabulary"]),
            *_metric_cells(figures["all"]),
        ]
        for name, figures in tokenizers.items()
    ]
    sections = [Section("All texts", [Table(head, rows, numeric=frozenset(range(1, len(head))))])]
    if document.get("models"):
        sections.insert(0, _model_section(document))
        bits = {name: model["bits_per_byte"]["value"] for name, model in document["models"].items()}
        first, *others = sorted(bits, key=lambda name: bits[name])
        fewest = formats.number(bits[first])
        second = f", {'like' if formats.number(bits[others[0]]) == fewest else 'before'} {others[0]}" if others else ""
        finding = f"{first} has the fewest bits per byte: {fewest}{second}."
    if document["group_by"]:
        sections += [_group_section(document, name) for name in tokenizers]
    scripts: list[Block] = []
    for name, figures in tokenizers.items():
        total = figures["vocabulary"]
        counts = list(figures["scripts"].items())[:12]
        longest = max((count for _, count in counts), default=1)
        scripts.append(Bars([(f"{name}: {script}", formats.percent(n / total), n / longest) for script, n in counts]))
    sections.append(Section("Vocabulary by script", scripts, "Tokens that have a letter of it.", folded=True))
    notes = [
        *document["notes"],
        "Tokens are not comparable between tokenizers; compare what models make of a text by byte, character or word.",
    ]
    sections.append(Section("What to know", [Notes(notes)]))
    return ChapterPart("tokenizers", [finding], tiles[:6], sections, [("texts", f"{sum(document['rows'].values()):,}")])


def _model_section(document: Document) -> Section:
    """Tabulate the bits per byte of the small models by scheme."""
    models, trained = document["models"], document["trained"]
    first = next(iter(models))
    head = ["scheme", "bits per byte", f"compared with {first}", "p", "tokens seen"]
    rows = []
    for name, model in models.items():
        difference = model["beside"]
        p = formats.number(difference["p"]) if difference else "–"
        cells = [formats.with_interval(model["bits_per_byte"]), formats.with_interval(difference), p]
        rows.append([name, *cells, f"{model['tokens']:,.0f}"])
    caption = (
        f"{trained['seeds']} decoders each, of {trained['parameters']:,} parameters, trained on the same "
        f"{trained['bytes']:,} bytes of {trained['documents']:,} documents; evaluated on {trained['held_out']:,} "
        "others. Intervals are Student's t over seeds; differences are paired by seed."
    )
    return Section("Small models trained alike", [Table(head, rows, caption, frozenset(range(1, len(head))))])


def _metric_cells(figures: Mapping[str, Any]) -> list[str]:
    return [(formats.percent if name in _SHARES else formats.number)(figures[name]) for name, _ in _FIGURES]


def _group_section(document: Document, name: str) -> Section:
    rows = []
    groups = document["tokenizers"][name]["groups"]
    for group in sorted(groups, key=lambda g: (document["families"].get(g, ""), g)):
        figures, (low, high) = groups[group], groups[group]["interval"]
        cells = _metric_cells(figures)
        cells[0] = formats.with_interval({"value": figures["tokens_per_word"], "low": low, "high": high})
        label = f"{group} {document['names'].get(group, '')}".strip()
        parity = [formats.number(figures["parity"])] if document["reference"] else []
        rows.append([document["families"].get(group, ""), label, f"{document['rows'][group]:,}", *parity, *cells])
    parity = [f"parity to {document['reference']}"] if document["reference"] else []
    head = ["family", document["group_by"], "rows", *parity, *(title for _, title in _FIGURES)]
    caption = "Parity: tokens of the same sentences, over those of the reference." if parity else ""
    table = Table(head, rows, caption, frozenset(range(2, len(head))))
    return Section(f"{name} by {document['group_by']}", [table])
