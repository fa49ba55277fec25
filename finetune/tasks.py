"""What a run learns: a frozen dataclass for each objective, chosen in a recipe by its `kind:` tag."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Literal

from .bounds import check_bounds


@dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """Plain causal language modelling: every token of `text` is supervised."""

    kind: Literal["language-model"] = "language-model"
    pack: bool = True
    """Fill rows of `train.max_length` with several samples; no sample attends to another."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Causal language modelling of an answer: only the completion is supervised."""

    kind: Literal["completion"] = "completion"
    prompt: str = "{text}"
    """Template over the row's columns, not supervised."""
    completion: str = " {label}"
    """Template over the row's columns, supervised, followed by the end-of-sequence token."""
    pack: bool = True
    """Fill rows of `train.max_length` with several samples; no sample attends to another."""
    score: Literal["perplexity", "rank", "generate"] = "perplexity"
    """How dev and test are judged besides perplexity: `rank` the completions of all labels by likelihood
    (accuracy, F1, Matthews), or `generate` greedily and compare (exact match)."""
    max_new_tokens: int = 64
    """Longest generated answer, tokens (score: generate)."""
    max_truncated: float | None = None
    """Largest share of rows whose completion `train.max_length` cuts; more is refused. Null: 0.1."""

    def __post_init__(self) -> None:
        check_bounds(self, max_new_tokens=(1, None), max_truncated=(0, 1))


@dataclass(frozen=True, kw_only=True)
class MaskedLM:
    """Masked language modelling of an encoder (BERT): some tokens of `text` are hidden and supervised."""

    kind: Literal["masked-lm"] = "masked-lm"
    share: float = 0.15
    """Share of a row's tokens that are chosen (at least one): the number is exact, special tokens do not count. Of the
    chosen 80 % become the mask token, 10 % a random token, 10 % stay (BERT). Training draws anew in every epoch;
    judged rows keep one draw, which no seed changes."""
    whole_words: bool = False
    """Choose words with all their tokens, in random order, as far as they fit the share."""

    def __post_init__(self) -> None:
        check_bounds(self, share=(0.01, 0.9))


@dataclass(frozen=True, kw_only=True)
class Classify:
    """Sequence classification with a new head over `text` (or the pair `text`, `text2`)."""

    kind: Literal["classify"] = "classify"
    labels: tuple[str, ...] | None = None
    """Class names in head order; by default the sorted labels of all training rows, those beyond `limit` too."""
    multi: bool | None = None
    """A row has any number of classes, or none: `label` is a list of them, or a text that `separator` divides. Each
    class is a yes or no of its own; a row's loss is the sum of their binary cross entropies."""
    separator: str | None = None
    """Between the classes of a label that is a text (multi); blanks around it do not count. Null: a comma."""

    def __post_init__(self) -> None:
        for place, name in enumerate(self.labels or ()):
            if not name:
                raise ValueError("labels has an empty name; a class needs one")
            if name in (self.labels or ())[:place]:
                raise ValueError(f"labels has {name!r} twice; name each class once")
        if self.separator is not None and not (self.multi and self.separator.strip()):
            raise ValueError("separator is for `multi: true`, and is no blank")


@dataclass(frozen=True, kw_only=True)
class Regress:
    """A number for `text` (or the pair `text`, `text2`) by a new head of one output: mean squared error."""

    kind: Literal["regress"] = "regress"
    standardise: bool = True
    """Train on targets less their mean over the training rows, divided by their deviation (only divided, by their root
    mean square, where the backbone's head has no bias). The head that is saved and judged answers in your own units."""


@dataclass(frozen=True, kw_only=True)
class Seq2Seq:
    """An encoder-decoder reads the prompt and writes the target (T5, BART); the whole target is supervised."""

    kind: Literal["seq2seq"] = "seq2seq"
    prompt: str = "{text}"
    """Template over the row's columns, read by the encoder; at most `train.max_length` tokens."""
    target: str = "{label}"
    """Template over the row's columns, written by the decoder and closed by the end-of-sequence token; at most
    `train.max_length` tokens."""
    prefix: str | None = None
    """Text in front of every prompt, as T5 was trained with (`summarize: `); braces mean themselves."""
    label_smoothing: float | None = None
    """ε: each target counts 1 − ε and ε is spread evenly over the vocabulary. In training only: judged is the loss
    without it."""
    score: Literal["perplexity", "generate"] = "perplexity"
    """How dev and test are judged besides perplexity: `generate` an answer and compare (exact match, chrF)."""
    max_new_tokens: int = 64
    """Longest generated answer, tokens (score: generate)."""
    num_beams: int | None = None
    """Beams of the search for an answer (score: generate); null: greedy."""
    max_truncated: float | None = None
    """Largest share of rows whose target `train.max_length` cuts; more is refused. Null: 0.1."""

    def __post_init__(self) -> None:
        check_bounds(self, max_new_tokens=(1, None), label_smoothing=(0, 0.99), num_beams=(1, None))
        check_bounds(self, max_truncated=(0, 1))
        if self.num_beams is not None and self.score != "generate":
            raise ValueError(f"num_beams is for `score: generate`, got {self.num_beams} with score: {self.score}")


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Causal language modelling of conversations: what the assistant says is supervised, with the end of each turn."""

    kind: Literal["chat"] = "chat"
    turns: Literal["all", "last"] = "all"
    """Which turns of the assistant are supervised."""
    template: str | None = None
    """How a conversation is written: a file of Jinja text, or `plain` (User: …, Assistant: …), which ships and needs no
    special token but the end of sequence. Null: the tokenizer's own chat template."""
    system: str | None = None
    """System turn for the rows that have none."""
    date: str | None = None
    """What templates that write today's date are told, as YYYY-MM-DD; they need it, so that a resumed run sees the
    same rows."""
    pack: bool = True
    """Fill rows of `train.max_length` with several samples; no sample attends to another."""
    score: Literal["perplexity", "generate"] = "perplexity"
    """How dev and test are judged besides perplexity: `generate` the last turn greedily and compare (exact match)."""
    max_new_tokens: int = 64
    """Longest generated answer, tokens (score: generate)."""
    max_truncated: float = 0.1
    """Largest share of rows with an answer that `train.max_length` cuts; more is refused."""
    max_unsupervised: float = 0.01
    """Largest share of rows that `train.max_length` leaves without a supervised token; these are left out, more is
    refused."""

    def __post_init__(self) -> None:
        check_bounds(self, max_new_tokens=(1, None), max_truncated=(0, 1), max_unsupervised=(0, 1))
        if self.date is not None:
            try:
                datetime.date.fromisoformat(self.date)
            except ValueError:
                raise ValueError(f"date must be written YYYY-MM-DD, got {self.date!r}") from None


Task = LanguageModel | Completion | Chat | MaskedLM | Classify | Regress | Seq2Seq
ByExample = Classify | Regress
"""Tasks with a head over a whole row: the loss is divided by examples."""
