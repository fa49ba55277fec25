"""One encoded sample, the features that its row brings along, and a list of samples with what was lost on the way.

Vectors that are not what the projector takes make a bad row like any other: refused with its file:line, or skipped and
counted.
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
from .rows import Row, missing_column

IGNORE = -100
"""Label of a token that is not supervised."""


@dataclass(frozen=True, slots=True)
class Example:
    """One encoded sample."""

    input_ids: list[int]
    labels: list[int] | int | float | tuple[int, ...]
    """Aligned with `input_ids` (the model shifts; not for masked-lm) or with `decoder_ids`, −100 where unsupervised; a
    class for classification, 0 and 1 of every class where a row has several; the target of a regression."""
    id: str
    where: str
    bytes: int = 0
    """UTF-8 bytes of the supervised text (special tokens have none)."""
    segments: list[int] | None = None
    """token_type_ids where the model takes them."""
    choices: tuple[tuple[int, ...], ...] | None = None
    """Completions of all classes, in head order (score: rank)."""
    gold: int | None = None
    """Which of `choices` is the row's own."""
    answer: str | None = None
    """The whole completion or target (score: generate)."""
    decoder_ids: list[int] | None = None
    """What the decoder reads, as long as `labels`: its start token, then the labels but the last (seq2seq)."""
    prompt: list[int] | None = None
    """What generation starts from, where it is not all before the first supervised token (chat)."""
    stop: int | None = None
    """The token that ends the answer, beside the end of sequence (chat)."""
    words: list[int] | None = None
    """Number of the word of each token, −1 for special ones, which are never hidden (masked-lm)."""
    units: Units | None = None
    """How training sees its target (regress)."""
    rejected_ids: list[int] | None = None
    """The same prompt with the answer that is liked less (preference); `input_ids` has the one that is chosen."""
    rejected_labels: list[int] | None = None
    """Aligned with `rejected_ids`, as `labels`."""
    desirable: bool | None = None
    """Whether the only answer of a row is one to have more of (preference without pairs)."""
    features: tuple[array[float], ...] | None = None
    """K vectors of d float32 numbers that the row brings along (`adapter.projector`)."""


def piece(row: Row, number: int) -> tuple[str, str]:
    """The id of a piece of a document, from 0, and where it stands; of the first those of the document."""
    return (f"{row.id}#{number}", f"{row.where}#{number}") if number else (row.id, row.where)


def documents_of(examples: Sequence[Example]) -> np.ndarray | None:
    """For each example the place of the first piece of its document, (N,); None where all are whole."""
    places = [_PIECE.sub("", example.where) for example in examples]
    first: dict[str, int] = {}
    found = np.array([first.setdefault(place, i) for i, place in enumerate(places)], dtype=np.int64)
    return None if len(first) == len(examples) else found


def summed(values: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """Values (N,) of pieces, each document's sum at its first piece and 0 at the others."""
    return np.bincount(documents, weights=values, minlength=len(values)).astype(values.dtype)


_PIECE = re.compile(r"(?<=\d)#\d+$")


@dataclass(frozen=True)
class Question:
    """What a model reads before it has to answer."""

    id: str
    text: str
    ids: list[int]
    stop: int | None = None
    """The token that ends the answer, beside the end of sequence."""
    lead: str = ""
    """Text that a chat template writes between the prompt and an answer's own words, such as a blank."""


@dataclass(frozen=True)
class Encoded:
    """Examples in row order, with what was lost on the way."""

    examples: list[Example]
    truncated: int
    """Samples that were longer than `max_length`, and cut."""
    skipped: list[str] = field(default_factory=list)
    """`file:line: reason` of rows left out."""
    label_names: tuple[str, ...] | None = None
    """Classes in head order."""
    dropped: int = 0
    """Samples that were longer than `max_length`, and left out."""
    cut_answers: int = 0
    """Of the truncated samples those that lost some of their answer (completion, seq2seq)."""
    lost_prompts: int = 0
    """Of the truncated samples those that lost their whole prompt (completion)."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Of the truncated and dropped samples, the tokens that each would have whole."""
    at_least: int | None = None
    """From where on these are least numbers, of texts that were not tokenised to their end; None: all are exact."""
    split: int = 0
    """Samples that were longer than `max_length`, and read in pieces."""
    pieces: int = 0
    """Number of pieces that such samples were read in."""
    notes: tuple[str, ...] = ()
    """What else there is to know before the first step, a sentence each."""


# ------------------------------------------------------------------------------------- features that a row brings along


def with_features(example: Example, row: Row, projector: Projector) -> Example | str:
    """`example` with the vectors of its row, or what is wrong with them."""
    column = projector.features
    value = row.values.get(column)
    if value is None and column not in row.record:
        return missing_column(column, row.record, "adapter.projector.features")
    try:
        return dataclasses.replace(example, features=read_vectors(value, projector))
    except ValueError as error:
        return f"column {column!r} {error}"


def read_vectors(value: Any, projector: Projector) -> tuple[array[float], ...]:
    """The K vectors of d float32 numbers each that a column holds: a list of d numbers where K is 1, or K lists.

    Raises:
        ValueError: anything else; says what is there.
    """
    if not isinstance(value, list | tuple):
        raise ValueError("is null" if value is None else f"is a {type(value).__name__}, not a list of numbers")
    nested = bool(value) and isinstance(value[0], list | tuple)
    if not nested and projector.count > 1:
        raise ValueError(f"is one list, not {projector.count} vectors ({_whence(projector)})")
    vectors = value if nested else [value]
    if len(vectors) != projector.count:
        raise ValueError(f"holds {len(vectors)} vectors, not {projector.count} ({_whence(projector)})")
    return tuple(_vector(vector, projector.width) for vector in vectors)


def _whence(projector: Projector) -> str:
    return f"adapter.projector.{'vectors' if isinstance(projector.inject, str) else 'inject'}"


def _vector(value: Any, width: int) -> array[float]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"holds a {type(value).__name__} beside lists")
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
