"""Building blocks of a page: plain values that the template turns into escaped HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from flatshift.experiments.report.figure import Chart

SIDE_BY_SIDE = "Side by side"
"""Name of the chapter that compares several runs; it is not counted as a run."""


@dataclass(frozen=True)
class KeyFigure:
    """Large figure at the top of a page, with its interval as text and a note to compare it with."""

    label: str
    value: str
    interval: str = ""
    note: str = ""


@dataclass(frozen=True)
class ChartGroup:
    """Charts side by side, without those that there is nothing to draw of; `small` ones get narrower columns."""

    kind: ClassVar[str] = "figures"
    charts: Sequence[Chart | None]
    small: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "charts", [chart for chart in self.charts if chart is not None])

    def __bool__(self) -> bool:
        return bool(self.charts)


@dataclass(frozen=True)
class Table:
    """Rows of texts; columns whose index is in `numeric` are right-aligned with tabular digits."""

    kind: ClassVar[str] = "table"
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    numeric: frozenset[int] = frozenset()

    def without_empty_columns(self) -> Table:
        """Return the table without columns that are empty in every row; the first column stays."""
        used = [
            index
            for index in range(len(self.columns))
            if not index or not self.rows or any(row[index] not in ("", "–") for row in self.rows)
        ]
        return self.select_columns(used)

    def select_columns(self, indices: Sequence[int]) -> Table:
        """Return the table with only these columns."""
        numeric = frozenset(new for new, old in enumerate(indices) if old in self.numeric)
        rows = [[row[index] for index in indices] for row in self.rows]
        return replace(self, columns=[self.columns[index] for index in indices], rows=rows, numeric=numeric)

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, str]], caption: str = "", *, words: Sequence[str]) -> Table:
        """Build a table from column → text mappings with the same keys; columns not named in `words` are numeric."""
        columns = list(rows[0]) if rows else []
        numeric = frozenset(index for index, name in enumerate(columns) if name not in words)
        return cls(columns, [[row[name] for name in columns] for row in rows], caption, numeric)


@dataclass(frozen=True)
class ConfusionMatrixBlock:
    """Confusion matrix: counts by true class (rows) and predicted class (columns)."""

    kind: ClassVar[str] = "matrix"
    names: Sequence[str]
    counts: Sequence[Sequence[int]]

    def share(self, row: int, column: int) -> float:
        """Return the count as a share of its row."""
        return self.counts[row][column] / max(sum(self.counts[row]), 1)


@dataclass(frozen=True)
class SearchableTable(Table):
    """Table of many records with a search field."""

    kind: ClassVar[str] = "lookup"


@dataclass(frozen=True)
class NameValuePairs:
    """List of names with their values."""

    kind: ClassVar[str] = "pairs"
    items: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Card:
    """One selected record."""

    rank: str
    text: str
    facts: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Cards:
    """Selected records."""

    kind: ClassVar[str] = "cards"
    cards: Sequence[Card]

    def __bool__(self) -> bool:
        return bool(self.cards)


@dataclass(frozen=True)
class Bars:
    """Named amounts with a bar each: (name, text, share of the longest)."""

    kind: ClassVar[str] = "bars"
    items: Sequence[tuple[str, str, float]]


@dataclass(frozen=True)
class Notes:
    """Sentences that a careful reader should see."""

    kind: ClassVar[str] = "notes"
    sentences: Sequence[str]

    def __bool__(self) -> bool:
        return bool(self.sentences)


@dataclass(frozen=True)
class PreformattedText:
    """Preformatted text, unchanged."""

    kind: ClassVar[str] = "pre"
    text: str


Block = ChartGroup | Table | ConfusionMatrixBlock | NameValuePairs | Cards | Bars | Notes | PreformattedText


@dataclass(frozen=True)
class Section:
    """Titled part of a chapter; `folded` sections open on demand. Blocks without content are left out."""

    title: str
    blocks: Sequence[Block | None]
    lead: str = ""
    folded: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", [block for block in self.blocks if block])


@dataclass(frozen=True)
class ChapterPart:
    """Contribution of one kind of directory to a run's chapter; `kind` is empty if it only adds to another kind."""

    kind: str = ""
    findings: Sequence[str] = ()
    tiles: Sequence[KeyFigure] = ()
    sections: Sequence[Section] = ()
    facts: Sequence[tuple[str, str]] = ()
    is_conclusive: bool = True
    """False if it found nothing that a page of several chapters could begin with."""


@dataclass(frozen=True)
class Chapter:
    """Everything about one run; sections without a block are left out."""

    name: str
    kind: str
    finding: str
    facts: Sequence[tuple[str, str]]
    tiles: Sequence[KeyFigure]
    sections: Sequence[Section]
    slug: str = ""
    command: str = ""
    weight: int = 0
    details: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "sections", [section for section in self.sections if section.blocks])
