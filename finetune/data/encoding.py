"""Encoding of rows into token ids and labels.

Each task encodes its own rows (`flatshift.finetune.tasks`, `encode`); this module has the shared parts. With
`truncation: left`, texts and prompts are truncated from the left; answers always from the right.

`prefix` is the special tokens that the tokenizer puts in front, else its beginning-of-sequence token, else nothing. The
first token of a causal example is never a target, because nothing precedes it; the target tokens of an example are its
labels ≠ −100.
Special tokens written out in the text are parsed as special tokens, as the tokenizer does.
"""

from __future__ import annotations

import copy
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from ..compute.protocols import TraitsTask
from ..config import Projector, Train
from ..errors import UserError
from .example import IGNORE as IGNORE
from .example import EncodedRows as EncodedRows
from .example import Example as Example
from .example import LossCounts, add_features
from .labels import Units
from .rows import PAIRS, PROMPTS, SHARED, TURNS_WITH_LABEL, Row
from .template import Template, truncate_longest_first

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHUNK = 1024
_CHARACTERS = 1 << 14
"""Minimum number of characters of a long text that are tokenised."""
ANY_LENGTH = 1 << 40
_Each = TypeVar("_Each")


class EncoderTask(Protocol):
    """Task that makes its own encoder."""

    def encoder(self, tokenizer: PreTrainedTokenizerBase, max_length: int, **options: Any) -> Any: ...


def encode(
    rows: Iterable[Row], *, task: EncoderTask, tokenizer: PreTrainedTokenizerBase, max_length: int, **options: Any
) -> EncodedRows:
    """Encode `rows` for `task` into rows of at most `max_length` tokens. Options:

    label_names: classes in head order; else the task's, else the sorted labels of these rows. Required (and found) for
        classification and for ranked completions.
    bad_rows: refuse, or skip and count, rows without target tokens, with a `text2` that is not text, or without a
        column that a template needs.
    decoder_start: first token of the decoder (`Backbone.decoder_start`); for seq2seq.
    truncation: side from which a text or prompt that is too long is truncated; None: left for a completion's prompt,
        right otherwise.
    overlong: examples that are too long are truncated (None), dropped, refused, or split into pieces (only for
        language-model and masked-lm).
    units: standardisation of the targets of a regression; None: unchanged.
    features: vectors that each row must provide, for language-model and completion; a row without them is bad.

    Raises UserError: a label outside the classes, a missing column of a template, a row without target tokens (unless
    skipped), a `max_length` without room for content, an example that is too long (if refused).
    """
    encoder = task.encoder(tokenizer, max_length, **options)
    encoded = encoder.add(rows)
    return replace(encoded, notes=encoder.close())


_SHARE = 0.1
"""Default maximum share of examples that may be dropped or have a truncated answer."""
_CUT_SHARE = 0.5
"""Default maximum share of examples that may be truncated at all."""


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
class DroppedRows(LossCounts):
    """Counts of rows that are skipped, dropped or truncated, with the rules by which they are."""

    bad_rows: str
    overlong: str | None
    max_length: int

    def encoded(self, examples: list[Example], names: tuple[str, ...] | None = None) -> EncodedRows:
        """Return these examples with the counts."""
        return EncodedRows(examples, names, **{count.name: getattr(self, count.name) for count in fields(LossCounts)})

    def bad(self, row: Row, reason: str) -> None:
        """Refuse or skip a bad row, by `bad_rows`."""
        if self.bad_rows == "refuse":
            raise UserError(f"{row.where}: {reason}; leave the row out, or set data.bad_rows: skip")
        self.skipped.append(f"{row.where}: {reason}")

    def long(self, row: Row, cut: Truncation) -> bool:
        """Count an example that is too long; return True if it is dropped. cut: what it loses if it is truncated
        instead."""
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
class TruncationCounts(LossCounts):
    """Truncation statistics of one split or source. Truncated answers of chats are counted by their encoder."""

    called: str
    """Name of these rows in messages, such as `train` or `train (SOURCE)`."""
    samples: int = 0

    def add(self, encoded: EncodedRows) -> None:
        """Add the counts of a chunk."""
        self.samples += len(encoded.examples) - encoded.pieces + encoded.split + encoded.dropped
        for name in ("dropped", "truncated", "cut_answers", "lost_prompts", "split", "pieces"):
            setattr(self, name, getattr(self, name) + getattr(encoded, name))
        self.lengths.update(encoded.lengths)
        self.at_least = minimum_known(self.at_least, encoded.at_least)

    def refuse(self, max_truncated: float | None, train: Train) -> None:
        """Raise UserError if more was lost than `train.max_dropped`, `task.max_truncated` and `train.max_cut` allow."""
        max_cut = max(_CUT_SHARE, max_truncated or 0) if train.max_cut is None else train.max_cut
        max_lost_prompts = max_truncated or 0 if train.max_cut is None else train.max_cut
        max_dropped = _SHARE if train.max_dropped is None else train.max_dropped
        max_cut_answers = _SHARE if max_truncated is None else max_truncated
        for lost, setting, share, effect in (
            (self.dropped, "train.max_dropped", max_dropped, "are longer than"),
            (self.cut_answers, "task.max_truncated", max_cut_answers, "have an answer that is cut at"),
            (self.lost_prompts, "train.max_cut", max_lost_prompts, "lose their whole prompt at"),
            (self.truncated, "train.max_cut", max_cut, "are cut at"),
        ):
            if lost > share * self.samples:
                kept = self.called in ("dev", "test")  # whatever train.overlong is
                drop = "" if self.dropped or kept else ", or leave such rows out (train.overlong: drop)"
                raise UserError(
                    f"{self.called}: {lost:,} of {self.samples:,} samples {effect} train.max_length = "
                    f"{train.max_length} tokens, more than {setting} ({share:g}) allows; raise one of the two{drop}; "
                    f"{self._suggest_length()}"
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
            f"{self._suggest_length()}"
        )

    def _suggest_length(self) -> str:
        """Suggest a `max_length`: one that fits 99 of 100 examples, or all of them if that many fit already."""
        missing = -(-99 * self.samples // 100) - (self.samples - self.lengths.total())
        enough, share = max(self.lengths), "all"
        for length, count in sorted(self.lengths.items()):
            missing -= count
            if missing <= 0 < missing + count:
                enough, share = length, "99 %"
                break
        bound = "" if self.at_least is None or enough < self.at_least else "at least "
        return f"{bound}{enough:,} tokens would hold {share} of them whole"


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
        self._set_side("text")
        specials = self.specials
        fixed = len(specials.prefix) + len(specials.middle) + max(len(specials.suffix), len(specials.pair_suffix))
        if max_length - fixed < 2:
            raise UserError(f"train.max_length: {max_length} leaves no room except for special tokens; give at least 8")
        self.losses = DroppedRows(bad_rows, overlong, max_length)
        self.form = ""
        """Source of the first row's prompt (`flatshift.finetune.data.rows.PROMPTS`)."""

    def _set_side(self, side: str) -> None:
        self.side = side
        self.specials = SpecialTokens.of(self.tokenizer, begin=not self.task.traits.encoder_decoder, side=side)
        eos, suffix = self.tokenizer.eos_token_id, self.specials.suffix
        # Tokens that close an answer include eos even if the tokenizer adds none at the end (Llama-3 only adds a
        # beginning-of-sequence token), so that the model learns to stop.
        self.end = suffix if eos is None or eos in suffix else (*suffix, eos)

    def for_targets(self) -> RowEncoder:
        """Return an encoder of a decoder's texts, which a tokenizer for translation writes in other tokens."""
        encoder = copy.copy(self)
        encoder._set_side("text_target")
        return encoder

    def add(self, rows: Iterable[Row]) -> EncodedRows:
        """Encode these rows; return the examples and the counts of dropped and truncated ones. Raises UserError as
        `encode`."""
        self.losses = losses = DroppedRows(self.bad_rows, self.overlong, self.max_length)
        examples, names = self.task.encode(rows, self)
        return losses.encoded(examples, names)

    def close(self) -> tuple[str, ...]:
        """Return notes on all rows, one sentence each."""
        return (describe_prompt_form(self.form),) if self.form else ()

    def samples(
        self,
        rows: Iterable[Row],
        templates: Sequence[Template],
        build: Callable[[list[Row], list[list[str]]], Iterable[EncodingResult]],
    ) -> list[Example]:
        """Return an example of each usable row. `build` gets a chunk of rows and their filled `templates`."""
        examples = []
        for filled in iter_chunks(self._fill(rows, templates), _CHUNK):
            chunk = [row for row, _ in filled]
            for row, (example, cut) in zip(chunk, build(chunk, [texts for _, texts in filled]), strict=True):
                if self.features is not None and isinstance(example, Example):
                    example = add_features(example, row, self.features)
                if isinstance(example, str):
                    self.losses.bad(row, example)
                elif isinstance(example, list):
                    self.losses.split += 1
                    self.losses.pieces += len(example)
                    examples += example
                elif not (cut and self.losses.long(row, cut)):
                    examples.append(example)
        return examples

    def _fill(self, rows: Iterable[Row], templates: Sequence[Template]) -> Iterator[tuple[Row, list[str]]]:
        for row in rows:
            self.form = self.form or row.form
            try:
                texts = [template.fill(row) for template in templates]
            except ValueError as error:
                self.losses.bad(row, str(error))
                continue
            columns = templates[0].columns if templates else ("text",)
            # With feature vectors a blank prompt is accepted.
            if columns and is_blank(row, columns) and not (templates and self.features is not None):
                self.losses.bad(row, "the prompt is empty" if templates else EMPTY_TEXT)
            else:
                yield row, texts

    def wholes(self, rows: Iterable[Row]) -> list[tuple[Row, list[int], list[int] | None]]:
        """Return each usable row with ids and segments of its text, or of the pair `text`, `text2`, including
        special tokens. If too long, the longer text is truncated first."""
        usable: list[tuple[Row, list[int], list[int] | None]] = []
        for chunk in iter_chunks(self._check_texts(rows), _CHUNK):
            for row, (ids, segments, cut) in zip(chunk, self._encode_texts(chunk), strict=True):
                if not ids:
                    self.losses.bad(row, "the text has no token")
                elif not (cut and self.losses.long(row, cut)):
                    usable.append((row, ids, segments))
        return usable

    def labelled(
        self,
        rows: Sequence[tuple[Row, list[int], list[int] | None]],
        labels: Sequence[Any],
        *,
        units: Units | None = None,
    ) -> list[Example]:
        """Build examples from the result of `wholes`."""
        return [
            Example(ids, label, row.id, row.where, segments=segments, units=units)
            for (row, ids, segments), label in zip(rows, labels, strict=True)
        ]

    def _check_texts(self, rows: Iterable[Row]) -> Iterator[Row]:
        for row in rows:
            text2 = row.values.get("text2")
            if text2 is not None and not isinstance(text2, str):
                self.losses.bad(row, f"column 'text2' is a {type(text2).__name__}, not text")
            elif is_blank(row, ["text"]):
                self.losses.bad(row, EMPTY_TEXT)
            else:
                yield row

    def _encode_texts(self, rows: Sequence[Row]) -> list[tuple[list[int], list[int] | None, Truncation]]:
        firsts = self.tokens(self.within((row.values["text"] for row in rows), left=self.left))["input_ids"]
        paired = [i for i, row in enumerate(rows) if row.values.get("text2") is not None]
        seconds: dict[int, list[int]] = {}
        if paired:
            texts = self.within((rows[i].values["text2"] for i in paired), left=self.left)
            seconds = dict(zip(paired, self.tokens(texts)["input_ids"], strict=True))
        return [self._frame(a, seconds.get(i)) for i, a in enumerate(firsts)]

    def _frame(self, a: list[int], b: list[int] | None) -> tuple[list[int], list[int] | None, Truncation]:
        s = self.specials
        if b is None:
            ids, cut = self.closed(a, s.suffix, left=self.left)
            return ids, [0] * len(ids) if s.segments else None, cut
        room = self.max_length - len(s.prefix) - len(s.middle) - len(s.pair_suffix)
        length_a, length_b = truncate_longest_first(len(a), len(b), room)
        first = [*s.prefix, *truncate_tokens(a, length_a, left=self.left), *s.middle]
        second = [*truncate_tokens(b, length_b, left=self.left), *s.pair_suffix]
        segments = [s.segments[0]] * len(first) + [s.segments[1]] * len(second) if s.segments else None
        lost = len(a) + len(b) - length_a - length_b
        return first + second, segments, Truncation(len(first) + len(second) + lost, lost > 0)

    def tokens(self, texts: list[str]) -> Any:
        """Tokenise the texts as a batch, without special tokens."""
        options: dict[str, Any] = {self.side: texts, "return_attention_mask": False, "verbose": False}
        return self.tokenizer(**options, add_special_tokens=False)

    def within(self, texts: Iterable[str], *, left: bool = False) -> list[str]:
        """Return the texts; one that is far longer than a row is shortened to a beginning (left: an end) that fills a
        row.

        Tokenising megabytes of text takes 200 bytes of memory per character, for tokens that are cut anyway. A
        shortened text still has more than `max_length` tokens, and those that remain are the same as of the whole text:
        checked by tokenising twice as much of it, and one character more. Its length, `Truncation.needs`, is then a
        lower bound; if both texts of a pair are that long, an odd token goes to the second. Texts that are split into
        pieces stay whole.
        """
        if self.overlong == "split":
            return list(texts)
        return [self._shorten(text, left) if is_far_longer(text, self.max_length) else text for text in texts]

    def _shorten(self, text: str, left: bool) -> str:
        def tokens(sizes: Sequence[int]) -> list[Sequence[int]]:
            return list(self.tokens([text[-n:] if left else text[:n] for n in sizes])["input_ids"])

        enough = find_sufficient_size(text, self.max_length, tokens, self.tokenizer, left=left)
        if enough is None:
            return text
        size, length = enough
        self.losses.at_least = minimum_known(self.losses.at_least, length)
        return text[-size:] if left else text[:size]

    def closed(self, ids: Sequence[int], end: tuple[int, ...], *, left: bool = False) -> tuple[list[int], Truncation]:
        """Return `ids` with the tokenizer's prefix and `end` around them, and what the ids lost to fit."""
        fixed = len(self.specials.prefix) + len(end)
        content = truncate_tokens(ids, self.max_length - fixed, left=left)
        return [*self.specials.prefix, *content, *end], Truncation(len(ids) + fixed, len(content) < len(ids))

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


def _initial_size(max_length: int) -> int:
    """Return the characters that are tried first: as many as most rows need many times over."""
    return max(_CHARACTERS, 32 * max_length)


def is_far_longer(text: str, max_length: int) -> bool:
    """Return True if a text is worth to be cut before it is tokenised."""
    return len(text) > 4 * _initial_size(max_length)


def find_sufficient_size(
    text: str,
    max_length: int,
    tokens: Callable[[Sequence[int]], Sequence[Sequence[Any]]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    left: bool = False,
) -> tuple[int, int] | None:
    """Return the characters of a text that hold more than `max_length` of its tokens, and how many; None: only all of
    it does.

    Counted in tokens, so it holds for a normalizer that makes a character many or none, but one that makes different
    characters equal is applied first. tokens: returns the tokens of so many of its first (left: last) characters, for
    each number.
    """
    size = _initial_size(max_length)
    while 2 * size + 1 < len(text):
        # One sign more, since a run of equal signs is cut in pieces that depend on where it begins or ends.
        candidates = tokens((size, 2 * size, 2 * size + 1))
        first, *others = (list(truncate_tokens(ids, max_length + 1, left=left)) for ids in candidates)
        if len(first) > max_length and all(ids == first for ids in others):
            beginning = text[-size:] if left else text[:size]
            normalizer = tokenizer.backend_tokenizer.normalizer if tokenizer.is_fast else None
            if normalizer is not None:
                beginning = str(normalizer.normalize_str(beginning))
            edge = beginning[: len(beginning) // 8] if left else beginning[-len(beginning) // 8 :]
            if _has_stable_boundaries(beginning) and _has_stable_boundaries(edge, longest=16):
                return size, len(candidates[0])
        size *= 2
    return None


def _has_stable_boundaries(text: str, *, longest: int = 256) -> bool:
    """True if pieces of a text have edges that no tokenizer misses: words of at most `longest` characters on average,
    or signs that do not repeat. In a long run that repeats, where a tokenizer sets its edges may depend on what is far
    away."""
    if longest * len(text.split()) >= len(text):
        return True
    data = text.encode()
    return 10 * len(zlib.compress(data, 1)) > len(data)


def minimum_known(*values: int | None) -> int | None:
    """Return the smallest of the values that are not None; None if all are."""
    return min((value for value in values if value is not None), default=None)


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
    if form == TURNS_WITH_LABEL:
        return "the last turn of each conversation is its answer, and the turns before are its prompt"
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
    def of(cls, tokenizer: PreTrainedTokenizerBase, *, begin: bool = True, side: str = "text") -> SpecialTokens:
        """Return the tokenizer's own special tokens; with side `text_target` those of a decoder's single text.

        If it adds none (GPT-2, most small decoders): its beginning-of-sequence token, if any, as the prefix (unless
        `begin` is false: a decoder of an encoder-decoder starts with another token), and the separator or
        end-of-sequence token between the texts of a pair.
        """
        a = "a"
        if not tokenize_plain(tokenizer, a):  # of bases or signs alone
            words = (word for word in tokenizer.get_vocab() if word not in tokenizer.all_special_tokens)
            a = next((word for word in words if tokenize_plain(tokenizer, word)), a)
        prefix, _, suffix = _find_special_tokens(tokenizer, **{side: a})
        pair_prefix, middle, pair_suffix = _find_special_tokens(tokenizer, text=a, text_pair=a)
        if begin and not prefix and not suffix and tokenizer.bos_token_id is not None:
            prefix = (tokenizer.bos_token_id,)
        if not middle and not pair_prefix and not pair_suffix:
            joint = tokenizer.sep_token_id if tokenizer.sep_token_id is not None else tokenizer.eos_token_id
            middle = (joint,) if joint is not None else tuple(tokenizer("\n", add_special_tokens=False)["input_ids"])
            pair_suffix = suffix
        segments = (0, 1) if "token_type_ids" in tokenizer.model_input_names else None
        # Some tokenizers list token_type_ids but use only one segment.
        if segments and tokenizer(a, a, return_token_type_ids=True)["token_type_ids"][-1] == 0:
            segments = (0, 0)
        return cls(prefix, suffix, middle, pair_suffix, segments)


def tokenize_plain(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokenise a text without special tokens."""
    return list(tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"])


def decode_answer(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return the text of generated tokens as it was written: without special tokens, with the spaces before signs."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def get_end_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the token that closes every trained answer: end of sequence, else the first token of the tokenizer's
    suffix; None if it has neither."""
    if tokenizer.eos_token_id is not None:
        return int(tokenizer.eos_token_id)
    suffix = SpecialTokens.of(tokenizer).suffix
    return suffix[0] if suffix else None


_END_SAMPLES = 2000


def find_end_tokens(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, *, max_length: int
) -> dict[str, int]:
    """Return the tokens that were trained as the end of an example's (last) answer, by their text.

    That is the last target token, ignoring whitespace after it, if it is the end of sequence or an added token.
    Examples that fill `max_length` may be truncated and are ignored.
    """
    added = set(tokenizer.added_tokens_decoder) | {get_end_token(tokenizer)}
    blank: dict[int, bool] = {}
    counts: Counter[int] = Counter()
    for index in range(0, len(examples), -(-len(examples) // _END_SAMPLES) or 1):
        labels = examples[index].labels
        if not isinstance(labels, list) or len(labels) >= max_length:
            continue
        for token in reversed(labels):
            if token == IGNORE:
                continue
            if token in added:
                counts[token] += 1
                break
            if not blank.setdefault(token, not str(tokenizer.decode([token])).strip()):
                break
    return {str(tokenizer.convert_ids_to_tokens(token)): token for token in sorted(counts)}


def _find_special_tokens(
    tokenizer: PreTrainedTokenizerBase, **texts: Any
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    encoded = tokenizer(**texts, return_special_tokens_mask=True)
    ids, special = encoded["input_ids"], encoded["special_tokens_mask"]
    content = [i for i, is_special in enumerate(special) if not is_special]
    if not content:
        return tuple(ids), (), ()
    first, last = content[0], content[-1]
    between = tuple(ids[i] for i in range(first, last) if special[i])
    return tuple(ids[:first]), between, tuple(ids[last + 1 :])
