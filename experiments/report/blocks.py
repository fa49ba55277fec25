"""What a page is made of: plain values that the template turns into HTML (and escapes)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from flatshift.experiments.report.figure import Chart

SIDE_BY_SIDE = "Side by side"
"""The chapter that is of several runs and of none."""


@dataclass(frozen=True)
class KernelBlock:
    """A key figure: what it is, its value, its interval in words, and what to compare it with."""

    label: str
    value: str
    interval: str = ""
    note: str = ""


@dataclass(frozen=True)
class Figures:
    """Charts side by side; `small` ones get narrower columns."""

    kind: ClassVar[str] = "figures"
    charts: Sequence[Chart]
    small: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of texts; columns named in `numeric` are set flush right in tabular figures."""

    kind: ClassVar[str] = "table"
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    numeric: frozenset[int] = frozenset()

    def shown(self) -> Table:
        """Without columns that hold nothing in any row; the first stays."""
        full = [
            place
            for place in range(len(self.columns))
            if not place or not self.rows or any(row[place] not in ("", "–") for row in self.rows)
        ]
        numeric = frozenset(new for new, old in enumerate(full) if old in self.numeric)
        cut = [[row[place] for place in full] for row in self.rows]
        return Table([self.columns[place] for place in full], cut, self.caption, numeric)

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, str]], caption: str = "", *, words: Sequence[str]) -> Table:
        """Rows as column → text, each with the same columns; all are figures but those named in `words`."""
        columns = list(rows[0]) if rows else []
        numeric = frozenset(place for place, name in enumerate(columns) if name not in words)
        return cls(columns, [[row[name] for name in columns] for row in rows], caption, numeric)


@dataclass(frozen=True)
class ConfusionMatrixBlock:
    """Counts of classes (rows) by what was said (columns)."""

    kind: ClassVar[str] = "matrix"
    names: Sequence[str]
    counts: Sequence[Sequence[int]]

    def share(self, row: int, column: int) -> float:
        """The count as a share of its row."""
        return self.counts[row][column] / max(sum(self.counts[row]), 1)


@dataclass(frozen=True)
class Lookup:
    """Many records with a field to search them: (columns, rows of texts); `told` rows of how many."""

    kind: ClassVar[str] = "lookup"
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: frozenset[int] = frozenset()


@dataclass(frozen=True)
class NameValuePairs:
    """Name and value, many of them."""

    kind: ClassVar[str] = "pairs"
    items: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Card:
    """One chosen record."""

    rank: str
    text: str
    facts: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Cards:
    """Chosen records."""

    kind: ClassVar[str] = "cards"
    cards: Sequence[Card]


@dataclass(frozen=True)
class Bars:
    """Named amounts with a bar each: (name, text, share of the longest)."""

    kind: ClassVar[str] = "bars"
    items: Sequence[tuple[str, str, float]]


@dataclass(frozen=True)
class Notes:
    """Sentences a careful reader should see."""

    kind: ClassVar[str] = "notes"
    sentences: Sequence[str]


@dataclass(frozen=True)
class Pre:
    """A text file, as it is."""

    kind: ClassVar[str] = "pre"
    text: str


Block = Figures | Table | ConfusionMatrixBlock | Lookup | NameValuePairs | Cards | Bars | Notes | Pre


@dataclass(frozen=True)
class Section:
    """A titled part of a chapter; `folded` ones open on demand."""

    title: str
    blocks: Sequence[Block]
    lead: str = ""
    folded: bool = False


@dataclass(frozen=True)
class ChapterPart:
    """What one kind of directory gives to the chapter of a run; `kind` is empty where it only adds to another."""

    kind: str = ""
    findings: Sequence[str] = ()
    tiles: Sequence[KernelBlock] = ()
    sections: Sequence[Section] = ()
    facts: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Chapter:
    """All about one run."""

    name: str
    kind: str
    finding: str
    facts: Sequence[tuple[str, str]]
    tiles: Sequence[KernelBlock]
    sections: Sequence[Section]
    slug: str = ""
    command: str = ""
    weight: int = 0
    details: Sequence[str] = field(default_factory=tuple)
