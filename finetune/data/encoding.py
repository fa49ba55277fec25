"""Encoding of rows into token ids and labels.

Each task encodes its own rows (`flatshift.finetune.tasks`, `encode`); this module has the shared parts. With
`truncation: left`, texts and prompts are truncated from the left; answers always from the right.

`prefix` is the special tokens that the tokenizer puts in front, else its beginning-of-sequence token, else nothing. The
first token of a causal example is never a target, because nothing precedes it; the target tokens of an example are its
labels ≠ −100.
Special tokens written out in the text are parsed as special tokens, as the tokenizer does.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from ..compute.protocols import TraitsTask
from ..config import Projector, Train
from ..errors import UserError
from .example import IGNORE as IGNORE
from .example import EncodedRows as EncodedRows
from .example import Example as Example
from .example import add_features
from .labels import Units
from .rows import PAIRS, PROMPTS, SHARED, Row
from .template import Template, truncate_longest_first

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHUNK = 1024
_CHARACTERS = 1 << 14
"""Minimum number of characters of a long text that are tokenised."""
_Each = TypeVar("_Each")


class TruncatedTask(Protocol):
    """Limit on truncated answers."""

    @property
    def max_truncated(self) -> float | None: ...


class EncoderTask(Protocol):
    """Task that makes its own encoder."""

    def encoder(self, tokenizer: PreTrainedTokenizerBase, max_length: int, **how: Any) -> Any: ...


def encode(
    rows: Iterable[Row],
    *,
    task: EncoderTask,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    label_names: Sequence[str] | None = None,
    bad_rows: Literal["refuse", "skip"] = "refuse",
    decoder_start: int | None = None,
    truncation: Literal["left", "right"] | None = None,
    overlong: Literal["drop", "refuse", "split"] | None = None,
    units: Units | None = None,
    features: Projector | None = None,
) -> EncodedRows:
    """Encode `rows` for `task` into rows of at most `max_length` tokens.

    Arguments:
        label_names: classes in head order; else the task's, else the sorted labels of these rows. Required (and found)
            for classification and for ranked completions.
        bad_rows: refuse, or skip and count, rows without target tokens, with a `text2` that is not text, or without a
            column that a template needs.
        decoder_start: first token of the decoder (`Backbone.decoder_start`); for seq2seq.
        truncation: side from which a text or prompt that is too long is truncated; None: left for a completion's
            prompt, right otherwise.
        overlong: examples that are too long are truncated (None), dropped, refused, or split into pieces (only for
            language-model and masked-lm).
        units: standardisation of the targets of a regression; None: unchanged.
        features: vectors that each row must provide, for language-model and completion; a row without them is bad.
    Raises:
        UserError: a label outside the classes, a missing column of a template, a row without target tokens (unless
            skipped), a `max_length` without room for content, an example that is too long (if refused).
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


_SHARE = 0.1
"""Default maximum share of examples that may be dropped or have a truncated answer."""
_CUT_SHARE = 0.5
"""Default maximum share of examples that may be truncated at all."""


def _value_or_default(given: float | None, default: float) -> float:
    return default if given is None else given


# ------------------------------------------------------------------------------------------- truncated and dropped rows


@dataclass(frozen=True, slots=True)
class Truncation:
    """Tokens that an example lost to fit; false if none."""

    needs: int
    """Tokens of the example without truncation."""
    something: bool
    answer: bool = False
    """True if tokens of the answer are lost, perhaps also of the prompt."""
    prompt: bool = False
    """True if the whole prompt is lost."""

    def __bool__(self) -> bool:
        return self.something


@dataclass
class DroppedRows:
    """Counts of rows that are skipped, dropped or truncated."""

    bad_rows: str
    overlong: str | None
    max_length: int
    skipped: list[str] = field(default_factory=list)
    dropped: int = 0
    truncated: int = 0
    cut_answers: int = 0
    lost_prompts: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    """Counts of truncated and dropped examples by their number of tokens without truncation."""
    at_least: int | None = None
    """Smallest of these lengths that is only a lower bound (`RowEncoder.within`); larger ones are too. None: all are
    exact."""
    split: int = 0
    pieces: int = 0

    def encoded(self, examples: list[Example], names: tuple[str, ...] | None = None) -> EncodedRows:
        """Return these examples with the counts."""
        return EncodedRows(
            examples,
            self.truncated,
            self.skipped,
            names,
            self.dropped,
            self.cut_answers,
            lost_prompts=self.lost_prompts,
            lengths=self.lengths,
            at_least=self.at_least,
            split=self.split,
            pieces=self.pieces,
        )

    def bad(self, row: Row, reason: str) -> None:
        """Refuse or skip a bad row, by `bad_rows`."""
        if self.bad_rows == "refuse":
            raise UserError(f"{row.where}: {reason}; leave the row out, or set data.bad_rows: skip")
        self.skipped.append(f"{row.where}: {reason}")

    def long(self, row: Row, cut: Truncation) -> bool:
        """Count an example that is too long; return True if it is dropped.

        cut: what it loses if it is truncated instead.
        """
        if self.overlong == "refuse":
            raise UserError(
                f"{row.where}: this sample is longer than train.max_length = {self.max_length} tokens; raise it, leave "
                "the row out, or set train.overlong: drop"
            )
        self.lengths[cut.needs] += 1
        if self.overlong == "drop":
            self.dropped += 1
            return True
        self.truncated += 1
        self.cut_answers += cut.answer
        self.lost_prompts += cut.prompt
        return False


@dataclass
class TruncationCounts:
    """Truncation statistics of one split or source. Truncated answers of chats are counted by their encoder."""

    called: str
    """Name of these rows in messages, such as `train` or `train (SOURCE)`."""
    samples: int = 0
    dropped: int = 0
    truncated: int = 0
    cut_answers: int = 0
    lost_prompts: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    at_least: int | None = None
    """See `DroppedRows.at_least`."""
    split: int = 0
    pieces: int = 0

    def add(self, encoded: EncodedRows) -> None:
        """Add the counts of a chunk."""
        self.samples += len(encoded.examples) - encoded.pieces + encoded.split + encoded.dropped
        self.split += encoded.split
        self.pieces += encoded.pieces
        self.dropped += encoded.dropped
        self.truncated += encoded.truncated
        self.cut_answers += encoded.cut_answers
        self.lost_prompts += encoded.lost_prompts
        self.lengths.update(encoded.lengths)
        if encoded.at_least is not None:
            self.at_least = min(self.at_least or encoded.at_least, encoded.at_least)

    def refuse(self, task: TruncatedTask, train: Train) -> None:
        """Raise UserError if more was lost than `train.max_dropped`, `task.max_truncated` and `train.max_cut` allow."""
        cut = max(_CUT_SHARE, task.max_truncated or 0) if train.max_cut is None else train.max_cut
        bare = _value_or_default(train.max_cut, task.max_truncated or 0)
        for lost, setting, share, what in (
            (self.dropped, "train.max_dropped", _value_or_default(train.max_dropped, _SHARE), "are longer than"),
            (
                self.cut_answers,
                "task.max_truncated",
                _value_or_default(task.max_truncated, _SHARE),
                "have an answer that is cut at",
            ),
            (self.lost_prompts, "train.max_cut", bare, "lose their whole prompt at"),
            (self.truncated, "train.max_cut", cut, "are cut at"),
        ):
            if lost > share * self.samples:
                leave = "" if self.dropped else ", or leave such rows out (train.overlong: drop)"
                raise UserError(
                    f"{self.called}: {lost:,} of {self.samples:,} samples {what} train.max_length = {train.max_length} "
                    f"tokens, more than {setting} ({share:g}) allows; raise one of the two{leave}; {self._remedy()}"
                )

    def notes(self, train: Train) -> Iterator[str]:
        """Yield notes to print before the first step, one sentence each."""
        if self.split:
            yield (
                f"{self.called}: {self.split:,} of {self.samples:,} documents are longer than train.max_length = "
                f"{train.max_length} tokens and read in {self.pieces:,} pieces (train.overlong: split)"
            )
        if not self.truncated:
            return
        parts = [f"{self.cut_answers:,} of them in their answer"] if self.cut_answers else []
        parts += [f"{self.lost_prompts:,} to no prompt at all"] if self.lost_prompts else []
        share = 100 * self.truncated / max(self.samples, 1)  # all examples of a chat may have been dropped
        percent = f"{share:.0f}" if share >= 1 else f"{share:.1g}"
        yield (
            f"{self.called}: {self.truncated:,} of {self.samples:,} samples ({percent} %) are "
            f"cut to train.max_length = {train.max_length} tokens{''.join(f', {part}' for part in parts)}; "
            f"{self._remedy()}"
        )

    def _remedy(self) -> str:
        """Suggest a `max_length`: one that fits 99 of 100 examples, or all of them if that many fit already."""
        missing = -(-99 * self.samples // 100) - (self.samples - self.lengths.total())
        for length, count in sorted(self.lengths.items()):
            missing -= count
            if missing <= 0 < missing + count:
                return f"{self._or_more(length)} tokens would hold 99 % of them whole"
        return f"{self._or_more(max(self.lengths))} tokens would hold all of them whole"

    def _or_more(self, length: int) -> str:
        return f"{length:,}" if self.at_least is None or length < self.at_least else f"at least {length:,}"


EncodingResult = tuple[Example | list[Example] | str, Truncation]
"""Result of a row: its example, the pieces of its document, or the reason why it is bad; and its truncation."""


class EncodedTask(TraitsTask, Protocol):
    """Members of a task that `RowEncoder` uses."""

    def encode(self, rows: Iterable[Row], encoder: RowEncoder) -> tuple[list[Example], tuple[str, ...] | None]: ...


class RowEncoder:
    """Encoder of rows in chunks that counts what is dropped and truncated."""

    def __init__(
        self,
        task: EncodedTask,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        *,
        label_names: Sequence[str] | None = None,
        bad_rows: str = "refuse",
        decoder_start: int | None = None,
        truncation: Literal["left", "right"] | None = None,
        overlong: Literal["drop", "refuse", "split"] | None = None,
        units: Units | None = None,
        features: Projector | None = None,
    ) -> None:
        """Take the arguments of `encode`. Raises UserError for a `max_length` without room for content."""
        self.task, self.tokenizer, self.max_length = task, tokenizer, max_length
        self.label_names, self.decoder_start, self.units, self.features = label_names, decoder_start, units, features
        self.bad_rows, self.overlong = bad_rows, overlong
        self.left = (truncation or task.traits.truncation_side) == "left"
        """True if texts and prompts are truncated from the left."""
        self.specials = specials = SpecialTokens.of(tokenizer, begin=not task.traits.encoder_decoder)
        around = len(specials.prefix) + len(specials.middle) + max(len(specials.suffix), len(specials.pair_suffix))
        if max_length - around < 2:
            raise UserError(f"train.max_length: {max_length} leaves no room except for special tokens; give at least 8")
        eos = tokenizer.eos_token_id
        self.end: tuple[int, ...] = specials.suffix
        """Tokens that close an answer. They include eos even if the tokenizer adds none at the end (Llama-3 only
        adds a beginning-of-sequence token), so that the model learns to stop."""
        if eos is not None and eos not in specials.suffix:
            self.end = (*specials.suffix, eos)
        self.rest = DroppedRows(bad_rows, overlong, max_length)
        self.form = ""
        """Source of the first row's prompt (`flatshift.finetune.data.rows.PROMPTS`)."""

    def add(self, rows: Iterable[Row]) -> EncodedRows:
        """Encode these rows; return the examples and the counts of dropped and truncated ones. Raises UserError as
        `encode`."""
        self.rest = rest = DroppedRows(self.bad_rows, self.overlong, self.max_length)
        examples, names = self.task.encode(rows, self)
        return rest.encoded(examples, names)

    def close(self) -> tuple[str, ...]:
        """Return notes on all rows, one sentence each."""
        return (describe_prompt_form(self.form),) if self.form else ()

    # -------------------------------------------------------------------------------------------------- for tasks: rows

    def samples(
        self,
        rows: Iterable[Row],
        templates: Sequence[Template],
        make: Callable[[list[Row], list[list[str]]], Iterable[EncodingResult]],
    ) -> list[Example]:
        """Return an example of each usable row. `make` gets a chunk of rows and their filled `templates`."""
        examples = []
        for filled in iter_chunks(self._filled(rows, templates), _CHUNK):
            chunk = [row for row, _ in filled]
            for row, (example, cut) in zip(chunk, make(chunk, [texts for _, texts in filled]), strict=True):
                if self.features is not None and isinstance(example, Example):
                    example = add_features(example, row, self.features)
                if isinstance(example, str):
                    self.rest.bad(row, example)
                elif isinstance(example, list):
                    self.rest.split += 1
                    self.rest.pieces += len(example)
                    examples += example
                elif not (cut and self.rest.long(row, cut)):
                    examples.append(example)
        return examples

    def _filled(self, rows: Iterable[Row], templates: Sequence[Template]) -> Iterator[tuple[Row, list[str]]]:
        """Yield the rows that every template can render, with their texts; report the others as bad."""
        for row in rows:
            self.form = self.form or row.form
            try:
                texts = [template.fill(row) for template in templates]
            except ValueError as error:
                self.rest.bad(row, str(error))
                continue
            if blank := self._blank(row, templates):
                self.rest.bad(row, blank)
            else:
                yield row, texts

    def _blank(self, row: Row, templates: Sequence[Template]) -> str:
        """Return the reason if the row's input is only whitespace, else "". With feature vectors a blank prompt is
        accepted."""
        if not templates:
            return EMPTY_TEXT if is_blank(row, ["text"]) else ""
        read = templates[0].columns
        return "the prompt is empty" if read and self.features is None and is_blank(row, read) else ""

    def wholes(self, rows: Iterable[Row]) -> list[tuple[Row, list[int], list[int] | None]]:
        """Return each usable row with ids and segments of its text, or of the pair `text`, `text2`, including
        special tokens. If too long, the longer text is truncated first."""
        kept: list[tuple[Row, list[int], list[int] | None]] = []
        for chunk in iter_chunks(self._paired(rows), _CHUNK):
            for row, (ids, segments, cut) in zip(chunk, self._texts(chunk), strict=True):
                if not ids:
                    self.rest.bad(row, "the text has no token")
                elif not (cut and self.rest.long(row, cut)):
                    kept.append((row, ids, segments))
        return kept

    def labelled(
        self,
        kept: Sequence[tuple[Row, list[int], list[int] | None]],
        labels: Sequence[Any],
        *,
        units: Units | None = None,
    ) -> list[Example]:
        """Build examples from the result of `wholes`."""
        return [
            Example(ids, label, row.id, row.where, segments=segments, units=units)
            for (row, ids, segments), label in zip(kept, labels, strict=True)
        ]

    def _paired(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yield the rows whose second text is text or missing; report the others as bad."""
        for row in rows:
            text2 = row.values.get("text2")
            if text2 is not None and not isinstance(text2, str):
                self.rest.bad(row, f"column 'text2' is a {type(text2).__name__}, not text")
            elif is_blank(row, ["text"]):
                self.rest.bad(row, EMPTY_TEXT)
            else:
                yield row

    def _texts(self, rows: Sequence[Row]) -> list[tuple[list[int], list[int] | None, Truncation]]:
        firsts = self.tokens(self.within((row.values["text"] for row in rows), left=self.left))["input_ids"]
        paired = [i for i, row in enumerate(rows) if row.values.get("text2") is not None]
        seconds: dict[int, list[int]] = {}
        if paired:
            texts = self.within((rows[i].values["text2"] for i in paired), left=self.left)
            ids = self.tokens(texts)["input_ids"]
            seconds = dict(zip(paired, ids, strict=True))
        return [self._text(a, seconds.get(i)) for i, a in enumerate(firsts)]

    def _text(self, a: list[int], b: list[int] | None) -> tuple[list[int], list[int] | None, Truncation]:
        s = self.specials
        if b is None:
            ids, cut = self.closed(a, s.suffix, left=self.left)
            return ids, [0] * len(ids) if s.segments else None, cut
        room = self.max_length - len(s.prefix) - len(s.middle) - len(s.pair_suffix)
        keep_a, keep_b = truncate_longest_first(len(a), len(b), room)
        one = [*s.prefix, *truncate_tokens(a, keep_a, left=self.left), *s.middle]
        two = [*truncate_tokens(b, keep_b, left=self.left), *s.pair_suffix]
        segments = [s.segments[0]] * len(one) + [s.segments[1]] * len(two) if s.segments else None
        lost = len(a) + len(b) - keep_a - keep_b
        return one + two, segments, Truncation(len(one) + len(two) + lost, lost > 0)

    # --------------------------------------------------------------------------------------------- for tasks: tokens

    def tokens(self, texts: list[str]) -> Any:
        """Tokenise the texts as a batch, without special tokens."""
        return self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)

    def within(self, texts: Iterable[str], *, left: bool = False) -> list[str]:
        """Return the texts; one that is far longer than a row is shortened to a beginning (left: an end) that fills a
        row.

        Tokenising megabytes of text takes 200 bytes of memory per character, for tokens that are cut anyway. A
        shortened text still has more than `max_length` tokens, and those kept are the same as of the whole text:
        checked by tokenising twice as much of it, and one character more. Its length, `Truncation.needs`, is then a
        lower bound; if both texts of a pair are that long, an odd token goes to the second. Texts that are split into
        pieces stay whole.
        """
        if self.overlong == "split":
            return list(texts)
        return [self._within(text, left) if is_far_longer(text, self.max_length) else text for text in texts]

    def _within(self, text: str, left: bool) -> str:
        def tokens(sizes: Sequence[int]) -> list[Sequence[int]]:
            return list(self.tokens([text[-n:] if left else text[:n] for n in sizes])["input_ids"])

        found = enough_of(text, self.max_length, tokens, self.tokenizer, left=left)
        if found is None:
            return text
        size, least = found
        self.rest.at_least = min(self.rest.at_least or least, least)
        return text[-size:] if left else text[:size]

    def closed(self, ids: Sequence[int], end: tuple[int, ...], *, left: bool = False) -> tuple[list[int], Truncation]:
        """Return `ids` with the tokenizer's prefix and `end` around them, and what the ids lost to fit."""
        around = len(self.specials.prefix) + len(end)
        kept = truncate_tokens(ids, self.max_length - around, left=left)
        return [*self.specials.prefix, *kept, *end], Truncation(len(ids) + around, len(kept) < len(ids))

    def bytes(self, text: str, batch: Any, i: int, first: int, stop: int) -> int:
        """Return the number of UTF-8 bytes of the tokens `first ≤ k < stop` of text i of a batch."""
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


def _looked_at(max_length: int) -> int:
    """Characters that are looked at first: as many as most rows need many times over."""
    return max(_CHARACTERS, 32 * max_length)


def is_far_longer(text: str, max_length: int) -> bool:
    """True if a text is worth to be cut before it is tokenised."""
    return len(text) > 4 * _looked_at(max_length)


def enough_of(
    text: str,
    max_length: int,
    tokens: Callable[[Sequence[int]], Sequence[Sequence[Any]]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    left: bool = False,
) -> tuple[int, int] | None:
    """Characters of a text that hold more than `max_length` of its tokens, and how many; None: only all of it does.

    Counted in tokens, so it holds for a normalizer that makes a character many or none; one that makes different
    characters equal is asked first.
    tokens: the tokens of so many of its first (left: last) characters, for each number.
    """
    size = _looked_at(max_length)
    while 2 * size + 1 < len(text):
        # One sign more, since a run of equal signs is cut in pieces that depend on where it begins or ends.
        whole = tokens((size, 2 * size, 2 * size + 1))
        held = [list(truncate_tokens(ids, max_length + 1, left=left)) for ids in whole]
        if held[0] == held[1] == held[2] and len(held[0]) > max_length:
            part = _normalised(text[-size:] if left else text[:size], tokenizer)
            end = part[: len(part) // 8] if left else part[-len(part) // 8 :]
            if _has_stable_boundaries(part) and _has_stable_boundaries(end, longest=16):
                return size, len(whole[0])
        size *= 2
    return None


def _normalised(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """A text as a fast tokenizer splits it."""
    normalizer = tokenizer.backend_tokenizer.normalizer if tokenizer.is_fast else None
    return text if normalizer is None else str(normalizer.normalize_str(text))


def _has_stable_boundaries(text: str, *, longest: int = 256) -> bool:
    """True if pieces of a text have edges that no tokenizer misses: words, or signs that do not repeat. In a long run
    that repeats, where a tokenizer sets its edges may depend on what is far away.

    longest: characters of a word, on average.
    """
    if longest * len(text.split()) >= len(text):
        return True
    data = text.encode()
    return 10 * len(zlib.compress(data, 1)) > len(data)


EMPTY_TEXT = "the text is empty"


def is_blank(row: Row, columns: Iterable[str]) -> bool:
    """Return True if each of these columns is missing or only whitespace."""
    values = [row.values.get(name) for name in columns]
    return all(value is None or (isinstance(value, str) and not value.strip()) for value in values)


def describe_prompt_form(form: str) -> str:
    """Return the note on rows whose `prompt` was read from other columns."""
    if form in PAIRS:
        return f"prompt and completion are the columns {form}"
    if form == SHARED:
        return f"prompts are {SHARED}"
    return f"prompts read from {form}'s columns: {', '.join(PROMPTS[form])}"


def iter_chunks(rows: Iterable[_Each], size: int) -> Iterator[list[_Each]]:
    """Yield lists of `size` rows; the last may be shorter."""
    iterator = iter(rows)
    while chunk := list(islice(iterator, size)):
        yield chunk


def truncate_tokens(ids: Sequence[Any], room: int, *, left: bool) -> Sequence[Any]:
    """Return at most `room` of `ids`, truncated from the right or the left."""
    return ids[max(len(ids) - room, 0) :] if left else ids[:room]


# ------------------------------------------------------------------------------------------------------ special tokens


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids around the content: `prefix A suffix`, or `prefix A middle B pair_suffix`."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    middle: tuple[int, ...]
    pair_suffix: tuple[int, ...]
    segments: tuple[int, int] | None
    """token_type_ids of A and its special tokens, and of B and those after it; None if the model takes none."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, *, begin: bool = True) -> SpecialTokens:
        """Return the tokenizer's own special tokens.

        If it adds none (GPT-2, most small decoders): its beginning-of-sequence token, if any, as the prefix (unless
        `begin` is false: a decoder of an encoder-decoder starts with another token), and the separator or
        end-of-sequence token between the texts of a pair.
        """
        prefix, _, suffix = _find_special_tokens(tokenizer, "a")
        pair_prefix, middle, pair_suffix = _find_special_tokens(tokenizer, "a", "b")
        if begin and not prefix and not suffix and tokenizer.bos_token_id is not None:
            prefix = (tokenizer.bos_token_id,)
        if not middle and not pair_prefix and not pair_suffix:
            joint = tokenizer.sep_token_id if tokenizer.sep_token_id is not None else tokenizer.eos_token_id
            middle = (joint,) if joint is not None else tuple(tokenizer("\n", add_special_tokens=False)["input_ids"])
            pair_suffix = suffix
        segments = (0, 1) if "token_type_ids" in tokenizer.model_input_names else None
        # Some tokenizers list token_type_ids but use only one segment.
        if segments and tokenizer("a", "b", return_token_type_ids=True)["token_type_ids"][-1] == 0:
            segments = (0, 0)
        return cls(prefix, suffix, middle, pair_suffix, segments)


def tokenize_plain(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokenise a text without special tokens."""
    return list(tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"])


def get_end_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the token that closes every trained answer: end of sequence, else the first token of the tokenizer's
    suffix; None if it has neither."""
    if tokenizer.eos_token_id is not None:
        return int(tokenizer.eos_token_id)
    suffix = SpecialTokens.of(tokenizer).suffix
    return suffix[0] if suffix else None


_ENDS_OF = 2000
"""Number of examples sampled to find the tokens that end an answer."""


def find_end_tokens(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, *, max_length: int
) -> dict[str, int]:
    """Return the tokens that were trained as the end of an example's (last) answer, by their text.

    That is the last target token, ignoring whitespace after it, if it is the end of sequence or an added token.
    Examples that fill `max_length` may be truncated and are ignored.
    """
    added = set(tokenizer.added_tokens_decoder) | {get_end_token(tokenizer)}
    blank: dict[int, bool] = {}
    found: Counter[int] = Counter()
    for place in range(0, len(examples), -(-len(examples) // _ENDS_OF) or 1):
        labels = examples[place].labels
        if not isinstance(labels, list) or len(labels) >= max_length:
            continue
        for token in reversed(labels):
            if token == IGNORE:
                continue
            if token in added:
                found[token] += 1
                break
            if not blank.setdefault(token, not str(tokenizer.decode([token])).strip()):
                break
    return {str(tokenizer.convert_ids_to_tokens(token)): token for token in sorted(found)}


def _find_special_tokens(
    tokenizer: PreTrainedTokenizerBase, *texts: str
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the special tokens before, between and after the content of an encoded text or pair."""
    encoded = tokenizer(*texts, return_special_tokens_mask=True)
    ids, special = encoded["input_ids"], encoded["special_tokens_mask"]
    content = [i for i, is_special in enumerate(special) if not is_special]
    if not content:
        return tuple(ids), (), ()
    first, last = content[0], content[-1]
    between = tuple(ids[i] for i in range(first, last) if special[i])
    return tuple(ids[:first]), between, tuple(ids[last + 1 :])
