"""Rows to token ids and labels: what the model reads, and what it is judged on.

What is particular to a kind is its task's (`finetune.tasks`, `encode`); here is what they share. With `truncation:
left` texts and prompts lose their left end instead of their right; what is supervised as an answer never does.

`prefix` is what the tokenizer puts in front, else its beginning-of-sequence token, else nothing. The first token of a
causal sample is never supervised, because nothing precedes it; so the supervised tokens of a sample are the labels
≠ −100.
Special tokens written out in the text are read as special tokens, as the tokenizer does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ..config import Projector
from ..errors import UserError
from .example import IGNORE as IGNORE
from .example import Encoded as Encoded
from .example import Example as Example
from .left_out import Cut, LeftOut
from .rows import Row
from .specials import Specials
from .template import Template, longest_first
from .units import Units
from .vectors import with_features

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..tasks import Objective, Task

_CHUNK = 1024
_Each = TypeVar("_Each")
Made = tuple[Example | str, Cut]
"""What became of a row: its example, or why it is a bad row; and what it lost."""


def encode(
    rows: Iterable[Row],
    *,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    label_names: Sequence[str] | None = None,
    bad_rows: Literal["refuse", "skip"] = "refuse",
    decoder_start: int | None = None,
    truncation: Literal["left", "right"] | None = None,
    overlong: Literal["drop", "refuse"] | None = None,
    units: Units | None = None,
    features: Projector | None = None,
) -> Encoded:
    """Encode `rows` for `task` in rows of at most `max_length` tokens.

    Arguments:
        label_names: classes in head order; else the task's, else the sorted labels of these rows. Needed (and found)
            for classification and for completions that are ranked.
        bad_rows: refuse, or skip and count, rows that have nothing to supervise, a `text2` that is no text, or a column
            that a template cannot show.
        decoder_start: the token that a decoder begins with (`finetune.models.backbone.decoder_start`); for seq2seq.
        truncation: the end that a longer text or prompt loses; None: a completion's prompt its left, others the right.
        overlong: longer samples are truncated (None), left out, or refused.
        units: how training is to see the targets of a regression; None: as they are.
        features: which vectors each row brings along, for language-model and completion; a row without them is bad.
    Raises:
        UserError: a label outside the classes, a column that a template needs, a row with nothing to supervise (unless
            skipped), a `max_length` that leaves no room, a longer sample (if refused).
    """
    encoder = task.encoder(
        tokenizer,
        max_length,
        label_names=label_names,
        bad_rows=bad_rows,
        decoder_start=decoder_start,
        truncation=truncation,
        overlong=overlong,
        units=units,
        features=features,
    )
    encoded = encoder.add(rows)
    return replace(encoded, notes=encoder.close())


class Encoder:
    """Takes rows a run at a time: tokenises a chunk at once, and counts what is left out and cut."""

    def __init__(
        self,
        task: Objective,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        *,
        label_names: Sequence[str] | None = None,
        bad_rows: str = "refuse",
        decoder_start: int | None = None,
        truncation: Literal["left", "right"] | None = None,
        overlong: Literal["drop", "refuse"] | None = None,
        units: Units | None = None,
        features: Projector | None = None,
    ) -> None:
        """Arguments as of `encode`. Raises UserError for a `max_length` that leaves no room."""
        self.task, self.tokenizer, self.max_length = task, tokenizer, max_length
        self.label_names, self.decoder_start, self.units, self.features = label_names, decoder_start, units, features
        self.bad_rows, self.overlong = bad_rows, overlong
        self.left = (truncation or task.truncates) == "left"
        """Whether texts and prompts lose their left."""
        self.specials = specials = Specials.of(tokenizer, begin=not task.encoder_decoder)
        around = len(specials.prefix) + len(specials.middle) + max(len(specials.suffix), len(specials.pair_suffix))
        if max_length - around < 2:
            raise UserError(f"train.max_length: {max_length} leaves no room beside the special tokens; give at least 8")
        eos = tokenizer.eos_token_id
        self.end: tuple[int, ...] = specials.suffix
        """What closes an answer; learnt even where the template does not close with it (Llama-3 adds only its
        beginning)."""
        if eos is not None and eos not in specials.suffix:
            self.end = (*specials.suffix, eos)
        self.rest = LeftOut(bad_rows, overlong, max_length)

    def add(self, rows: Iterable[Row]) -> Encoded:
        """The examples of these rows, and what was cut or left out of them. Raises UserError as `encode`."""
        self.rest = rest = LeftOut(self.bad_rows, self.overlong, self.max_length)
        examples, names = self.task.encode(rows, self)
        return Encoded(examples, rest.truncated, rest.skipped, names, rest.dropped, rest.cut_answers)

    def close(self) -> tuple[str, ...]:
        """What there is to know of all rows, a sentence each."""
        return ()

    # --------------------------------------------------------------------------------------------- for tasks: rows

    def samples(
        self,
        rows: Iterable[Row],
        templates: Sequence[Template],
        make: Callable[[list[Row], list[list[str]]], list[Made]],
    ) -> list[Example]:
        """An example of each usable row, as `make` has it of a chunk of rows and the texts of their `templates`."""
        examples = []
        for filled in _chunks(self._filled(rows, templates)):
            chunk = [row for row, _ in filled]
            for row, (example, cut) in zip(chunk, make(chunk, [texts for _, texts in filled]), strict=True):
                if self.features is not None and not isinstance(example, str):
                    example = with_features(example, row, self.features)
                if isinstance(example, str):
                    self.rest.bad(row, example)
                elif not (cut and self.rest.long(row, cut)):
                    examples.append(example)
        return examples

    def _filled(self, rows: Iterable[Row], templates: Sequence[Template]) -> Iterator[tuple[Row, list[str]]]:
        """The rows that every template can show, and their texts; the others are bad ones."""
        for row in rows:
            try:
                texts = [template.fill(row) for template in templates]
            except ValueError as error:
                self.rest.bad(row, str(error))
            else:
                yield row, texts

    def wholes(self, rows: Iterable[Row]) -> list[tuple[Row, list[int], list[int] | None]]:
        """Each usable row with the ids and segments of its text, or of its pair `text`, `text2`, in the tokenizer's
        template; too long: the longer text loses first."""
        kept: list[tuple[Row, list[int], list[int] | None]] = []
        for chunk in _chunks(self._paired(rows)):
            for row, (ids, segments, cut) in zip(chunk, self._texts(chunk), strict=True):
                if not ids:
                    self.rest.bad(row, "the text has no token")
                elif not (cut and self.rest.long(row)):
                    kept.append((row, ids, segments))
        return kept

    def labelled(
        self,
        kept: Sequence[tuple[Row, list[int], list[int] | None]],
        labels: Sequence[Any],
        *,
        units: Units | None = None,
    ) -> list[Example]:
        """Examples of what `wholes` gave."""
        return [
            Example(ids, label, row.id, row.where, segments=segments, units=units)
            for (row, ids, segments), label in zip(kept, labels, strict=True)
        ]

    def _paired(self, rows: Iterable[Row]) -> Iterator[Row]:
        """The rows whose second text is one, or is not there; the others are bad ones."""
        for row in rows:
            text2 = row.values.get("text2")
            if text2 is None or isinstance(text2, str):
                yield row
            else:
                self.rest.bad(row, f"column 'text2' is a {type(text2).__name__}, not text")

    def _texts(self, rows: Sequence[Row]) -> list[tuple[list[int], list[int] | None, bool]]:
        firsts = self.tokens([row.values["text"] for row in rows])["input_ids"]
        paired = [i for i, row in enumerate(rows) if row.values.get("text2") is not None]
        seconds: dict[int, list[int]] = {}
        if paired:
            ids = self.tokens([rows[i].values["text2"] for i in paired])["input_ids"]
            seconds = dict(zip(paired, ids, strict=True))
        return [self._text(a, seconds.get(i)) for i, a in enumerate(firsts)]

    def _text(self, a: list[int], b: list[int] | None) -> tuple[list[int], list[int] | None, bool]:
        s = self.specials
        if b is None:
            ids, cut = self.closed(a, s.suffix, left=self.left)
            return ids, [0] * len(ids) if s.segments else None, cut
        room = self.max_length - len(s.prefix) - len(s.middle) - len(s.pair_suffix)
        keep_a, keep_b = longest_first(len(a), len(b), room)
        one = [*s.prefix, *shortened(a, keep_a, left=self.left), *s.middle]
        two = [*shortened(b, keep_b, left=self.left), *s.pair_suffix]
        segments = [s.segments[0]] * len(one) + [s.segments[1]] * len(two) if s.segments else None
        return one + two, segments, keep_a + keep_b < len(a) + len(b)

    # --------------------------------------------------------------------------------------------- for tasks: tokens

    def tokens(self, texts: list[str]) -> Any:
        """The tokenizer's batch of the texts alone, without special tokens."""
        return self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)

    def closed(self, ids: Sequence[int], end: tuple[int, ...], *, left: bool = False) -> tuple[list[int], bool]:
        """The tokenizer's template around `ids`, closed by `end`, and whether the ids lost an end to fit."""
        room = self.max_length - len(self.specials.prefix) - len(end)
        return [*self.specials.prefix, *shortened(ids, room, left=left), *end], len(ids) > room

    def bytes(self, text: str, batch: Any, i: int, first: int, stop: int) -> int:
        """UTF-8 bytes of the tokens `first ≤ k < stop` of text i of a batch."""
        ids = batch["input_ids"][i]
        if first == 0 and stop >= len(ids):
            return len(text.encode())
        if stop <= first:
            return 0
        if batch.is_fast:
            start, end = batch.token_to_chars(i, first), batch.token_to_chars(i, stop - 1)
            if start is not None and end is not None:
                return len(text[start.start : end.end].encode())
        return len(str(self.tokenizer.decode(ids[first:stop])).encode())


def _chunks(rows: Iterable[_Each]) -> Iterator[list[_Each]]:
    iterator = iter(rows)
    while chunk := list(islice(iterator, _CHUNK)):
        yield chunk


def shortened(ids: Sequence[Any], room: int, *, left: bool) -> Sequence[Any]:
    """At most `room` of `ids`, without their right or their left end."""
    return ids[max(len(ids) - room, 0) :] if left else ids[:room]
