"""Encoding of preference rows: a prompt with a chosen and a rejected answer, or with one desirable or undesirable
answer.

Both answers of a pair follow the same context, so the prompt is truncated to fit the longer one. In chat form, a pair
is two conversations that differ in the assistant's last turn (`flatshift.finetune.data.chat`), and both are truncated
from the right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from .chat.encode import ChatEncoder, ChatSettings
from .encoding import DroppedRows, EncodedTask, RowEncoder, Truncation, describe_prompt_form, is_blank, iter_chunks
from .example import IGNORE, EncodedRows, Example
from .rows import Row, missing_column_message, split_shared_prompt
from .template import Template, fit_completion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHUNK = 512
_ANY_LENGTH = 1 << 40
CHOSEN, REJECTED = "chosen", "rejected"

Ids = tuple[list[int], list[int]]
"""Ids of a prompt with an answer, and their labels."""


def read_answers(values: Mapping[str, Any], *, single: bool) -> tuple[tuple[Any, ...], bool | None]:
    """Return the answers of a row, chosen before rejected; or its only one, and whether it is desirable.

    single: True if a row may have a single answer.
    Raises:
        ValueError: answers are missing, or a single one has no label.
    """
    if values.get(CHOSEN) is not None and values.get(REJECTED) is not None:
        return (values[CHOSEN], values[REJECTED]), None
    if not single or values.get("completion") is None:
        wanted = "completion" if single and CHOSEN not in values else CHOSEN if values.get(CHOSEN) is None else REJECTED
        raise ValueError(missing_column_message(wanted, values))
    if not isinstance(values.get("label"), bool):
        raise ValueError("column 'label' does not say whether the completion is desirable; give true or false")
    return (values["completion"],), values["label"]


def build_conversation(row: Row, answer: Any, other: Any = None) -> list[Any]:
    """Return the turns of a prompt with one answer. Each may be a text or a list of turns, an answer also a single
    turn; it may repeat the prompt.

    other: the other answer; turns that both have in common are the prompt's.
    Raises:
        ValueError: an answer with several turns, or none.
    """
    prompt = row.values.get("prompt")
    turns = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if isinstance(answer, str):
        return [*turns, {"role": "assistant", "content": answer}]
    answer = [answer] if isinstance(answer, dict) else answer
    if not isinstance(answer, list):
        raise ValueError(f"an answer is a {type(answer).__name__}, not a text or a list of turns")
    if len(answer) > 1:
        shared = split_shared_prompt(answer, other).get("prompt", []) if other is not None else answer[:-1]
        turns, answer = shared or turns, answer[len(shared) :]
    if len(answer) != 1:
        raise ValueError(f"an answer has {len(answer)} turns behind its prompt; give the assistant's one")
    return [*turns, *answer]


class PreferenceTask(EncodedTask, Protocol):
    """Members of a task that `PreferenceEncoder` uses."""

    @property
    def chat(self) -> bool: ...

    @property
    def as_chat(self) -> ChatSettings: ...

    @property
    def is_unpaired(self) -> bool: ...

    def templates(self) -> tuple[Template, Template]: ...


class PreferenceEncoder:
    """Encoder of preference rows in chunks, with the interface of `flatshift.finetune.data.encoding.RowEncoder`."""

    def __init__(
        self,
        task: PreferenceTask,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        *,
        bad_rows: str = "refuse",
        truncation: Literal["left", "right"] | None = None,
        overlong: Literal["drop", "refuse"] | None = None,
        **how: Any,
    ) -> None:
        """Take the arguments of `flatshift.finetune.data.encoding.encode`. Raises UserError as the encoders of
        completions and chats."""
        self.task, self.max_length = task, max_length
        self._how = {"bad_rows": bad_rows, "overlong": overlong}
        # Encode conversations without a limit and collect bad ones: `_shortened` truncates both sides of a pair alike.
        self._chat = (
            ChatEncoder(task.as_chat, tokenizer, _ANY_LENGTH, bad_rows="skip", truncation=truncation, room=max_length)
            if task.chat
            else None
        )
        self._text = RowEncoder(
            task, tokenizer, max_length, bad_rows=bad_rows, truncation=truncation, overlong=overlong
        )
        self._pairs = self._single = 0
        self._form = ""

    def add(self, rows: Iterable[Row]) -> EncodedRows:
        """Encode these rows; return the examples and the counts of dropped and truncated ones. Raises UserError as
        `encode`."""
        rest = DroppedRows(self._how["bad_rows"] or "refuse", self._how["overlong"], self.max_length)
        examples: list[Example] = []
        for chunk in iter_chunks(rows, _CHUNK):
            self._form = self._form or chunk[0].form
            found = self._conversations(chunk, rest) if self._chat is not None else self._texts(chunk)
            for row, made in zip(chunk, found, strict=True):
                if isinstance(made, str):
                    rest.bad(row, made)
                    continue
                example, cut = made
                if self._one_kind(example):
                    rest.bad(row, "rows before have pairs of answers or single ones, and this one has the other; "
                             "give files of one kind")  # fmt: skip
                elif not (cut and rest.long(row, cut)):
                    examples.append(example)
        if self._chat is None:
            rest.at_least = self._text.rest.at_least
        return rest.encoded(examples)

    def close(self) -> tuple[str, ...]:
        """Return notes on all rows, one sentence each."""
        notes = [describe_prompt_form(self._form)] if self._form else []
        if self._pairs:
            notes.append(f"{self._pairs:,} pairs of answers, known by the columns chosen and rejected")
        if self._single:
            notes.append(f"{self._single:,} single answers, known by the columns completion and label")
        if self._chat is not None:
            notes += self._chat.template_notes()
        return tuple(notes)

    def reads_key(self, key: str) -> bool:
        """Return True if the chat template uses a key of turns (chat)."""
        return self._chat is not None and self._chat.reads_key(key)

    def _one_kind(self, example: Example) -> bool:
        """Count an example; return True if earlier examples are of the other kind (pairs or single answers)."""
        single = example.rejected_ids is None
        if self._pairs if single else self._single:
            return True
        self._single += single
        self._pairs += not single
        return False

    # ------------------------------------------------------------------------------------------------------------ texts

    def _texts(self, rows: Sequence[Row]) -> list[tuple[Example, Truncation] | str]:
        """Return the example of each row whose prompt and answers are texts, or why it has none."""
        prompt, answer = self.task.templates()
        filled: list[tuple[list[str], bool | None] | str] = []
        for row in rows:
            try:
                answers, desirable = read_answers(row.values, single=self.task.is_unpaired)
                lists = [name for name in ("prompt", CHOSEN, REJECTED) if isinstance(row.values.get(name), list)]
                if lists:
                    raise ValueError(f"column {lists[0]!r} holds turns of a conversation; set task.chat: true")
                if is_blank(row, prompt.columns):
                    raise ValueError("the prompt is empty")
                texts = [answer.fill(row, answer=self._text_of(one)) for one in answers]
                filled.append(([prompt.fill(row), *texts], desirable))
            except ValueError as error:
                filled.append(str(error))
        to = self._text
        filled = [
            one if isinstance(one, str) else ([*to.within(one[0][:1], left=to.left), *to.within(one[0][1:])], one[1])
            for one in filled
        ]
        flat = [text for one in filled if not isinstance(one, str) for text in one[0]]
        batch = self._text.tokens(flat) if flat else {"input_ids": []}
        made: list[tuple[Example, Truncation] | str] = []
        place = 0
        for row, one in zip(rows, filled, strict=True):
            if isinstance(one, str):
                made.append(one)
                continue
            texts, desirable = one
            made.append(self._fitted(row, texts, batch, place, desirable))
            place += len(texts)
        return made

    @staticmethod
    def _text_of(answer: Any) -> str:
        if not isinstance(answer, str):
            raise ValueError(f"an answer is a {type(answer).__name__}, not text")
        if not answer.strip():
            raise ValueError("an answer is empty")
        return answer

    def _fitted(
        self, row: Row, texts: Sequence[str], batch: Any, place: int, desirable: bool | None
    ) -> tuple[Example, Truncation] | str:
        """Build an example from texts.

        texts: prompt and answers, whose tokens are in the batch from index `place` on.
        """
        to = self._text
        prompt, *answers = batch["input_ids"][place : place + len(texts)]
        prefix = list(to.specials.prefix)
        if not all(answers):
            return "an answer is empty"
        closed = [[*ids, *to.end] for ids in answers]
        reserve = max(map(len, closed))
        sides: list[Ids] = []
        cut_answer = something = False
        for ids in closed:
            context, kept, shorter = fit_completion(prefix, prompt, ids, to.max_length, reserve=reserve, left=to.left)
            if not context:
                return "the prompt is empty, and an answer needs something to follow"
            sides.append(([*context, *kept], [IGNORE] * len(context) + kept))
            cut_answer, something = cut_answer or len(kept) < len(ids), something or shorter
        lost = bool(prompt) and sides[0][1].count(IGNORE) == len(prefix)
        cut = Truncation(len(prefix) + len(prompt) + reserve, something, answer=cut_answer, prompt=lost)
        kept_tokens = min(len(answers[0]), len(sides[0][1]) - sides[0][1].count(IGNORE))
        size = to.bytes(texts[1], batch, place + 1, 0, kept_tokens)
        return _build_example(row, sides, size, desirable), cut

    # --------------------------------------------------------------------------------------------------- conversations

    def _conversations(self, rows: Sequence[Row], rest: DroppedRows) -> list[tuple[Example, Truncation] | str]:
        """The example of each row as its conversations are written, or why there is none."""
        assert self._chat is not None
        talks: list[Row] = []
        reasons: dict[str, str] = {}
        known: dict[str, tuple[int, bool | None]] = {}
        for row in rows:
            try:
                answers, desirable = read_answers(row.values, single=self.task.is_unpaired)
                turns = [build_conversation(row, one, answers[1 - k] if len(answers) == 2 else None)
                         for k, one in enumerate(answers)]  # fmt: skip
            except ValueError as error:
                reasons[row.where] = str(error)
                continue
            known[row.where] = (len(turns), desirable)
            talks += [
                Row(
                    {"messages": each, **{name: row.values.get(name) for name in ("tools", "system")}},
                    f"{row.id}",
                    f"{row.where}#{k}",
                )
                for k, each in enumerate(turns)
            ]
        encoded = self._chat.add(talks)
        rest.at_least = min((n for n in (rest.at_least, encoded.at_least) if n is not None), default=None)
        by_place = {example.where: example for example in encoded.examples}
        made: list[tuple[Example, Truncation] | str] = []
        for row in rows:
            if row.where in reasons:
                made.append(reasons[row.where])
                continue
            count, desirable = known[row.where]
            places = [f"{row.where}#{k}" for k in range(count)]
            told = [
                (place, reason) for place in places for reason in encoded.skipped if reason.startswith(f"{place}: ")
            ]
            bad = next((reason[len(place) + 2 :] for place, reason in told), None)
            sides = [by_place[place] for place in places if place in by_place]
            if bad is None and len(sides) < count:  # an answer begins far beyond
                bad = self._nothing_left
            made.append(bad or self._shortened(row, sides, desirable))
        return made

    @property
    def _nothing_left(self) -> str:
        return f"train.max_length = {self.max_length} tokens leave nothing of an answer"

    def _shortened(
        self, row: Row, talks: Sequence[Example], desirable: bool | None
    ) -> tuple[Example, Truncation] | str:
        """Build an example from conversations, truncated from the right."""
        limit = self.max_length
        whole = [(one.input_ids, one.labels) for one in talks if isinstance(one.labels, list)]
        sides: list[Ids] = [(ids[:limit], labels[:limit]) for ids, labels in whole]
        if any(labels.count(IGNORE) == len(labels) for _, labels in sides):
            return self._nothing_left
        needs = max(len(ids) for ids, _ in whole)
        beyond = any(label != IGNORE for _, labels in whole for label in labels[limit:])
        return _build_example(row, sides, talks[0].bytes, desirable), Truncation(needs, needs > limit, answer=beyond)


def _build_example(row: Row, sides: Sequence[Ids], size: int, desirable: bool | None) -> Example:
    (ids, labels), *other = sides
    rejected_ids, rejected_labels = other[0] if other else (None, None)
    return Example(
        ids, labels, row.id, row.where, size,
        rejected_ids=rejected_ids, rejected_labels=rejected_labels, desirable=desirable,
    )  # fmt: skip


def swap_answers(row: Row) -> Row:
    """Return the row with its answers swapped, or its label negated."""
    values = row.values
    if values.get(CHOSEN) is not None and values.get(REJECTED) is not None:
        other = {CHOSEN: values[REJECTED], REJECTED: values[CHOSEN]}
    else:
        other = {"label": not values.get("label")}
    return dataclasses.replace(row, values={**values, **other})
