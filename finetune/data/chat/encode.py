"""Encoding of conversations into examples, with losses counted and limited.

An example longer than `max_length` is truncated from the right, as in most tools: the rest is the beginning of a valid
rendering, and every answer still follows its full context. Answers after the cut are lost; one across it is trained on
up to the cut (without its end of turn). With `train.overlong` such examples are dropped or refused instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from ...errors import UserError
from ..encoding import ANY_LENGTH, DroppedRows, Truncation, decode_answer, iter_chunks, minimum_known
from ..example import IGNORE, EncodedRows, Example, GenerationPrompt
from ..rows import FORMS, TWO_TURNS, Row
from .answers import AssistantSpans, RenderedConversation
from .conversation import read_conversation, read_unanswered_turns
from .template import ChatTemplate, TemplateSettings
from .tokens import ConversationTokeniser, TokenAlignmentError, TokenisedConversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHUNK = 256
_THINKS = "enable_thinking"


@dataclass
class _ChatCounts:
    rows: int = 0
    bad: int = 0
    samples: int = 0
    tokens: int = 0
    supervised: int = 0
    several: int = 0
    cut_answers: int = 0
    """Rows with an answer that is truncated or entirely after the cut."""
    unsupervised: int = 0
    in_pieces: int = 0
    """Examples with an answer that starts or ends inside a token."""
    null_rows: int = 0
    """Rows of Parquet or Arrow files whose turns or tools have null-valued keys."""
    null_keys: int = 0
    form: str = ""
    """Source of the turns (`flatshift.finetune.data.rows.FORMS`)."""
    lengths: list[int] = field(default_factory=list)
    at_least: int | None = None
    """Smallest of these lengths that is only a lower bound; None: all are exact."""


class ChatSettings(TemplateSettings, Protocol):
    """Settings of a task of conversations."""

    @property
    def turns(self) -> str: ...
    @property
    def system(self) -> str | None: ...
    @property
    def score(self) -> str: ...
    @property
    def empty_thoughts(self) -> bool: ...
    @property
    def max_truncated(self) -> float: ...
    @property
    def max_unsupervised(self) -> float: ...
    def replace(self, **settings: Any) -> Self: ...


class ChatEncoder:
    """Encoder of conversations in chunks that checks at the end how much was lost.

    A row may become several examples (`flatshift.finetune.data.chat.answers`); the one with its last turn is first and
    is the only one with an `answer` to generate (score: generate), the others have ids `<id>#1`, `#2`, ….
    """

    def __init__(
        self,
        task: ChatSettings,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        *,
        bad_rows: str = "refuse",
        truncation: Literal["left", "right"] | None = None,
        overlong: Literal["drop", "refuse"] | None = None,
        room: int | None = None,
    ) -> None:
        """Take the arguments of `flatshift.finetune.data.encoding.encode`; room: tokens that are kept of a sample that
        is no example yet, by default `max_length`. Raises UserError for an invalid template, or truncation from the
        left."""
        if truncation == "left":
            raise UserError(
                "train.truncation: a conversation (task.kind: chat) loses its right end, as no template writes one "
                "without its beginning; leave it out, or set train.overlong: drop"
            )
        self.task, self.tokenizer, self.max_length = task, tokenizer, max_length
        self.bad_rows, self.overlong = bad_rows, overlong
        self.room = max_length if room is None else room
        self.tokens = ConversationTokeniser(tokenizer)
        self.answers = AssistantSpans(
            ChatTemplate(tokenizer, task), self.tokens.token_spans, empty_thoughts=task.empty_thoughts
        )
        self.counts = _ChatCounts()
        self._added = set(tokenizer.added_tokens_decoder)
        self._first: Row | None = None
        self._first_bad = ""
        self._end: int | None = None  # last target token of the first example

    def add(self, rows: Iterable[Row]) -> EncodedRows:
        """Encode these rows; return the examples and the counts of dropped and truncated ones.

        Raises UserError: a row that is malformed, that the template rejects, or whose answers cannot be located exactly
        (unless skipped); an example that is too long (if refused); answers without a token at which generation could
        stop (score: generate).
        """
        losses = DroppedRows(self.bad_rows, self.overlong, self.max_length)
        examples: list[Example] = []
        for chunk in iter_chunks(rows, _CHUNK):
            self._first = self._first or chunk[0]
            for row, samples, tokenised in self._tokenise(chunk, losses):
                examples += self._build_examples(row, len(samples), tokenised, losses)
        return losses.encoded(examples)

    def close(self) -> tuple[str, ...]:
        """Return notes on all rows, one sentence each. Raises UserError if no row is left, or more is lost than the
        task allows."""
        if self._first is not None:
            self._refuse_losses(self._first)
        return tuple(self._notes())

    def reads_key(self, key: str) -> bool:
        """Return True if the template uses a key of turns."""
        return self.answers.template.reads_key(key)

    def _tokenise(
        self, chunk: Sequence[Row], losses: DroppedRows
    ) -> Iterator[tuple[Row, list[RenderedConversation], list[TokenisedConversation]]]:
        rendered = [(row, samples) for row in chunk if (samples := self._render(row, losses))]
        room = None if self.room >= ANY_LENGTH else self.room
        flat = iter(self.tokens.samples([sample for _, samples in rendered for sample in samples], room=room))
        for row, samples in rendered:
            tokenised = list(islice(flat, len(samples)))
            first = tokenised[0]
            if isinstance(first, TokenisedConversation) and first.more and self._generates(first):
                tokenised[:1] = self.tokens.samples(samples[:1])  # the answer to compare with is all of it
            errors = [sample for sample in tokenised if isinstance(sample, TokenAlignmentError)]
            if errors:
                self._skip(row, errors[0], losses)
            else:
                yield row, samples, [sample for sample in tokenised if isinstance(sample, TokenisedConversation)]

    def _generates(self, sample: TokenisedConversation) -> bool:
        """True if the last answer of a sample is compared with a generated one."""
        return self.task.score == "generate" and sample.last < self.max_length

    def _render(self, row: Row, losses: DroppedRows) -> list[RenderedConversation]:
        try:
            conversation = read_conversation(row, system=self.task.system)
            return self.answers.samples(conversation, last_only=self.task.turns == "last")
        except UserError:
            raise
        except ValueError as error:
            self._skip(row, error, losses)
            return []

    def _skip(self, row: Row, error: ValueError, losses: DroppedRows) -> None:
        problem = f"{row.where}: {error}"
        if self.bad_rows == "refuse":
            raise UserError(f"{problem}; or leave such rows out with data.bad_rows: skip") from error
        losses.skipped.append(problem)
        self._first_bad = self._first_bad or problem
        self.counts.bad += 1

    def _build_examples(
        self, row: Row, samples: int, tokenised: Sequence[TokenisedConversation], losses: DroppedRows
    ) -> list[Example]:
        counts, limit = self.counts, self.max_length
        counts.rows += 1
        counts.null_rows += row.nulls > 0
        counts.null_keys += row.nulls
        counts.form = row.form or counts.form
        counts.several += samples > 1
        counts.lengths.append(max(_count_needed_tokens(sample) for sample in tokenised))
        bounds = [len(sample.ids) for sample in tokenised if sample.beginning]
        losses.at_least = minimum_known(losses.at_least, *bounds)
        counts.at_least = minimum_known(counts.at_least, *bounds)
        remaining = [
            (k, sample)
            for k, sample in enumerate(tokenised)
            if not (len(sample.ids) > limit and losses.long(row, Truncation(len(sample.ids), True)))
        ]
        counts.in_pieces += sum(sample.cut for _, sample in remaining)
        counts.cut_answers += any(sample.more or any(sample.supervised[limit:]) for _, sample in remaining)
        examples = []
        for k, sample in remaining:
            example = self._build_example(row, k, sample)
            assert isinstance(example.labels, list)
            targets = [label for label in example.labels if label != IGNORE]
            if targets:
                examples.append(example)
                counts.tokens += len(example.input_ids)
                counts.supervised += len(targets)
                self._end = targets[-1] if self._end is None else self._end
        counts.unsupervised += bool(remaining) and not examples
        counts.samples += len(examples)
        return examples

    def _build_example(self, row: Row, number: int, sample: TokenisedConversation) -> Example:
        limit = self.max_length
        ids = sample.ids[:limit]
        # Nothing predicts the first token of an example.
        targets = zip(ids[1:], sample.supervised[1:limit], strict=True)
        labels = [IGNORE, *(token if supervised else IGNORE for token, supervised in targets)]
        size = sum(size for size, label in zip(sample.sizes, labels[: self.room], strict=False) if label != IGNORE)
        name = f"{row.id}#{number}" if number else row.id
        if self.task.score != "generate":
            return Example(ids, labels, name, row.where, size)
        prompt = ids[: sample.last]
        if number or not self._generates(sample):  # judged by perplexity alone: not the row's last answer, or cut off
            return Example(ids, labels, name, row.where, size, prompt=prompt)
        last = slice(sample.last, None)
        tokens = [token for token, yes in zip(sample.ids[last], sample.supervised[last], strict=True) if yes]
        answer = decode_answer(self.tokenizer, tokens)
        stop = self._find_stop(row, tokens)
        return Example(ids, labels, name, row.where, size, answer=answer, prompt=prompt, stop=stop)

    def _find_stop(self, row: Row, answer: list[int]) -> int:
        """Return the token at which a generated answer ends: the last of the answer, ignoring whitespace."""
        for token in reversed(answer):
            if token in self._added:
                return token
            if str(self.tokenizer.decode([token])).strip():
                break
        raise UserError(
            f"{row.where}: task.score: generate needs an end of turn that is a token of its own, and this answer ends "
            f"with {str(self.tokenizer.decode(answer[-8:]))!r}; take score: perplexity, or a template that writes "
            "{{ eos_token }} there"
        )

    def _refuse_losses(self, first: Row) -> None:
        counts, task = self.counts, self.task
        file = first.where.rpartition(":")[0]
        if not counts.rows:
            raise UserError(f"no usable conversation in {file}: all were left out, the first for {self._first_bad}")
        lengths = sorted(counts.lengths)
        enough = lengths[min(round(0.99 * len(lengths)), len(lengths) - 1)]
        more = " or more" if counts.at_least is not None and enough >= counts.at_least else ""
        for lost, setting, share, effect in (
            (counts.unsupervised, "max_unsupervised", task.max_unsupervised, "keep no target token"),
            (counts.cut_answers, "max_truncated", task.max_truncated, "have an answer that is cut"),
        ):
            if lost > share * counts.rows:
                raise UserError(
                    f"{file}: {lost:,} of {counts.rows:,} rows {effect} at train.max_length {self.max_length}, more "
                    f"than task.{setting} ({share:g}) allows; --train.max_length {enough}{more} would hold 99 % of "
                    "them whole"
                )

    def _notes(self) -> Iterator[str]:
        counts = self.counts
        if not counts.rows:
            return
        yield (
            f"{counts.rows:,} conversations: {counts.supervised:,} of {counts.tokens:,} tokens supervised, "
            f"{counts.cut_answers:,} truncated answers, {counts.unsupervised:,} without a target token (left out), "
            f"{counts.bad:,} bad rows (left out)"
        )
        if counts.form:
            origin = "the columns" if counts.form in TWO_TURNS else f"{counts.form}'s columns:"
            yield f"turns read from {origin} {', '.join(FORMS[counts.form])}"
        if counts.several:
            yield (
                f"{counts.several:,} conversations came apart into one sample for each rewritten turn, "
                f"{counts.samples:,} samples in all: the template rewrites earlier turns once later ones follow"
            )
        yield from self.template_notes()
        if counts.null_rows:
            yield (
                f"{counts.null_rows:,} conversations came with {counts.null_keys:,} keys that hold null inside their "
                "calls and tools, which were left out: Parquet and Arrow give every object the keys of all the others"
            )
        if counts.in_pieces:
            yield (
                f"{counts.in_pieces:,} samples have an answer that began or ended inside a token; they were tokenised "
                "in pieces there"
            )
        if (
            self._end is not None
            and not counts.cut_answers
            and not (self._end in self._added or not str(self.tokenizer.decode([self._end])).strip())
        ):
            yield (
                f"answers end with {str(self.tokenizer.decode([self._end]))!r}, which is no special token of this "
                "tokenizer: see in the panel below whether its end of turn is written in ordinary tokens"
            )

    def template_notes(self) -> Iterator[str]:
        """Yield notes on turns that the template renders in an unexpected way."""
        if self.answers.asked_otherwise:
            yield (
                f"{self.answers.asked_otherwise:,} answers do not follow the template's generation prompt word for "
                "word; they are supervised from their content on, behind what the template writes before it"
            )
        if self.answers.thoughts_left_out:
            yield f"{self.answers.thoughts_left_out:,} turns have thoughts that the template leaves out"
        if self.answers.empty_thoughts:
            asks = self.answers.template.reads(_THINKS) and _THINKS not in (self.task.template_arguments or {})
            yield (
                f"{self.answers.empty_thoughts:,} answers begin with thoughts without a word, which are not supervised "
                "(task.empty_thoughts: true supervises them)"
                + (f"; task.template_arguments: {{{_THINKS}: false}} asks without thoughts too" if asks else "")
            )
        if missing := self.answers.template.missing:
            yield (
                f"the template writes {' and '.join(missing)}, no tokens of this tokenizer, in ordinary ones: meant "
                "for a backbone that has them"
            )


def _count_needed_tokens(sample: TokenisedConversation) -> int:
    """Return the number of tokens up to the last target token; a lower bound where only the beginning was tokenised."""
    if sample.more:
        return len(sample.ids)
    return max((i + 1 for i, supervised in enumerate(sample.supervised) if supervised), default=0)


_PLACEHOLDER = "."


def build_prompts(
    rows: Iterable[Row], *, task: ChatSettings, tokenizer: PreTrainedTokenizerBase, bad_rows: str = "refuse"
) -> tuple[list[GenerationPrompt], list[str]]:
    """Return a prompt that waits for an answer for each row, in order, and `file:line: reason` of the skipped rows.
    Raises UserError as `ChatEncoder`, or for a conversation with nothing to answer (unless skipped)."""
    # The turns already include the system turn; empty thoughts are part of the answer, so the prompt ends before them.
    task_settings = task.replace(score="generate", system=None, empty_thoughts=True)
    encoder = ChatEncoder(task_settings, tokenizer, ANY_LENGTH, bad_rows=bad_rows)
    prompts: list[GenerationPrompt] = []
    skipped: list[str] = []
    for row in rows:
        try:
            turns = read_unanswered_turns(row, system=task.system)
        except ValueError as error:
            if bad_rows == "refuse":
                raise UserError(f"{row.where}: {error}; or leave such rows out with data.bad_rows: skip") from error
            skipped.append(f"{row.where}: {error}")
            continue
        in_parts = isinstance(turns[-1].get("content"), list)  # some templates require it
        text = _PLACEHOLDER
        turns.append({"role": "assistant", "content": [{"type": "text", "text": text}] if in_parts else text})
        encoded = encoder.add([dataclasses.replace(row, values={**row.values, "messages": turns})])
        skipped += encoded.skipped
        for example in encoded.examples:
            if example.answer is not None and example.prompt is not None and example.stop is not None:
                text = str(tokenizer.decode(example.prompt, clean_up_tokenization_spaces=False))
                lead = example.answer[: example.answer.rfind(_PLACEHOLDER)]
                prompts.append(GenerationPrompt(row.id, text, example.prompt, example.stop, row.where, lead))
    return prompts, skipped


def make_prompt_row(text: str, number: int) -> Row:
    """Return the row of a conversation that starts with this user turn."""
    return Row({"messages": [{"role": "user", "content": text}]}, f"prompt-{number}", f"--prompt {number}")
