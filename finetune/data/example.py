"""Encoded examples, the feature vectors of their rows, and the result of encoding with its losses.

Vectors of the wrong shape for the projector make a row bad: it is refused with its file:line, or skipped and counted.
"""

from __future__ import annotations

import dataclasses
import re
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..config import Projector
from .labels import Units
from .rows import Row, missing_column_message

IGNORE = -100
"""Label of a token that is not a target."""


@dataclass(frozen=True, slots=True)
class Example:
    """An encoded example."""

    input_ids: list[int]
    labels: list[int] | int | float | tuple[int, ...]
    """Token labels aligned with `input_ids` (the model shifts them; not for masked-lm) or with `decoder_ids`, −100
    for tokens that are no targets; or a class, 0 and 1 per class (multi-label), or the target of a regression."""
    id: str
    where: str
    bytes: int = 0
    """UTF-8 bytes of the target text (special tokens have none)."""
    segments: list[int] | None = None
    """token_type_ids if the model takes them."""
    choices: tuple[tuple[int, ...], ...] | None = None
    """Completions of all classes, in head order (score: rank)."""
    gold: int | None = None
    """Index of the row's own completion in `choices`."""
    answer: str | None = None
    """The whole completion or target as text (score: generate)."""
    decoder_ids: list[int] | None = None
    """Decoder input, as long as `labels`: the start token, then all labels but the last (seq2seq)."""
    prompt: list[int] | None = None
    """Ids from which generation starts, if not all before the first target token (chat)."""
    stop: int | None = None
    """Token that ends the answer, in addition to the end of sequence (chat)."""
    words: list[int] | None = None
    """Word number of each token, −1 for special tokens, which are never masked (masked-lm)."""
    units: Units | None = None
    rejected_ids: list[int] | None = None
    """The same prompt with the rejected answer (preference); `input_ids` has the chosen one."""
    rejected_labels: list[int] | None = None
    desirable: bool | None = None
    """True if a single answer is desirable (preference without pairs)."""
    features: tuple[array[float], ...] | None = None
    """The row's K vectors of d float32 numbers (`adapter.projector`)."""


def name_piece(row: Row, number: int) -> tuple[str, str]:
    """Return id and place of a document's piece, numbered from 0; the first has those of the document."""
    return (f"{row.id}#{number}", f"{row.where}#{number}") if number else (row.id, row.where)


def find_document_starts(examples: Sequence[Example]) -> np.ndarray | None:
    """Return for each example the index of the first piece of its document, (N,); None if no document was split."""
    places = [document_place(example.where) for example in examples]
    first: dict[str, int] = {}
    starts = np.array([first.setdefault(place, i) for i, place in enumerate(places)], dtype=np.int64)
    return None if len(first) == len(examples) else starts


def sum_by_document(values: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """Sum values (N,) of pieces by document: the sum is at the first piece, the others get 0."""
    return np.bincount(documents, weights=values, minlength=len(values)).astype(values.dtype)


def document_place(where: str) -> str:
    """Return the place of the document that a piece is of: file:line#piece without the piece."""
    return re.sub(r"(?<=\d)#\d+$", "", where)


@dataclass(frozen=True)
class GenerationPrompt:
    """Model input that waits for an answer."""

    id: str
    text: str
    ids: list[int]
    stop: int | None = None
    """Token that ends the answer, in addition to the end of sequence."""
    where: str = ""
    """Place of its row, file:line."""
    lead: str = ""
    """Text that a chat template writes between the prompt and the answer's own words, such as a space."""


@dataclass(kw_only=True)
class LossCounts:
    """Counts of what encoding loses."""

    truncated: int = 0
    """Examples longer than `max_length` that were truncated."""
    skipped: list[str] = field(default_factory=list)
    """`file:line: reason` of skipped rows."""
    dropped: int = 0
    """Examples longer than `max_length` that were dropped."""
    cut_answers: int = 0
    """Truncated examples that lost tokens of their answer (completion, seq2seq)."""
    lost_prompts: int = 0
    """Truncated examples that lost their whole prompt (completion)."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Counts of truncated and dropped examples by their number of tokens without truncation."""
    at_least: int | None = None
    """Smallest of these lengths that is only a lower bound, from texts not tokenised to their end; larger ones are too.
    None: all are exact."""
    split: int = 0
    """Examples longer than `max_length` that were split into pieces."""
    pieces: int = 0
    """Number of pieces of such examples."""


@dataclass
class EncodedRows(LossCounts):
    """Examples in row order, with the counts of what encoding lost."""

    examples: list[Example]
    label_names: tuple[str, ...] | None = None
    """Classes in head order."""
    notes: tuple[str, ...] = ()
    """Further notes to print before the first step, one sentence each."""


def add_features(example: Example, row: Row, projector: Projector) -> Example | str:
    """Return `example` with the vectors of its row, or the reason why they are invalid."""
    column = projector.features
    value = row.values.get(column)
    if value is None and column not in row.record:
        return missing_column_message(column, row.record, "adapter.projector.features")
    try:
        return dataclasses.replace(example, features=read_vectors(value, projector))
    except ValueError as error:
        return f"column {column!r} {error}"


def read_vectors(value: Any, projector: Projector) -> tuple[array[float], ...]:
    """Return the K vectors of d float32 numbers in a column: a list of d numbers if K is 1, or K lists. Raises
    ValueError for anything else, which says what the column holds."""
    if not isinstance(value, list | tuple):
        raise ValueError("is null" if value is None else f"is a {type(value).__name__}, not a list of numbers")
    nested = bool(value) and isinstance(value[0], list | tuple)
    setting = f"adapter.projector.{'vectors' if isinstance(projector.inject, str) else 'inject'}"
    if not nested and projector.count > 1:
        raise ValueError(f"is one list, not {projector.count} vectors ({setting})")
    vectors = value if nested else [value]
    if len(vectors) != projector.count:
        raise ValueError(f"holds {len(vectors)} vectors, not {projector.count} ({setting})")
    return tuple(_parse_vector(vector, projector.width) for vector in vectors)


def _parse_vector(value: Any, width: int) -> array[float]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"holds a {type(value).__name__} among lists")
    if len(value) != width:
        raise ValueError(f"holds a vector of {len(value)} numbers, not {width} (adapter.projector.width)")
    odd = next((number for number in value if type(number) not in (float, int)), 0)
    if type(odd) not in (float, int):
        raise ValueError(f"holds {'null' if odd is None else f'a {type(odd).__name__}'} among its numbers")
    try:
        with np.errstate(over="ignore"):
            packed = np.array(value, dtype=np.float64).astype(np.float32)
    except OverflowError:
        packed = np.full(1, np.inf, dtype=np.float32)
    if not np.isfinite(packed).all():
        raise ValueError("holds a number that is not finite in float32")
    return array("f", packed.tobytes())
