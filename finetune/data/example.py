"""One encoded sample, and a list of them with what was lost on the way."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field

from .labels import Units

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


@dataclass(frozen=True)
class Question:
    """What a model reads before it has to answer."""

    id: str
    text: str
    ids: list[int]
    stop: int | None = None
    """The token that ends the answer, beside the end of sequence."""


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
    notes: tuple[str, ...] = ()
    """What else there is to know before the first step, a sentence each."""
