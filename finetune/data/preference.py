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
from .encoding import (
    ANY_LENGTH,
    DroppedRows,
    EncodedTask,
    RowEncoder,
    Truncation,
    describe_prompt_form,
    is_blank,
    iter_chunks,
    minimum_known,
)
from .example import IGNORE, EncodedRows, Example
from .rows import Row, missing_column_message, parse_turns, split_shared_prompt
from .template import Template, fit_completion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHUNK = 512
CHOSEN, REJECTED = "chosen", "rejected"

Ids = tuple[list[int], list[int]]
"""Ids of a prompt with an answer, and their labels."""
_TWO_KINDS = "rows before have pairs of answers or single ones, and this one has the other; give files of one kind"
_Result = tuple[Example, Truncation] | str
"""The example of a row and what it lost, or why it has none."""


def read_answers(values: Mapping[str, Any], *, single: bool) -> tuple[tuple[Any, ...], bool | None]:
    """Return the answers of a row, chosen before rejected; or its only one, and whether it is desirable. single: True
    if a row may have a single answer. Raises ValueError if answers are missing, or a single one has no label."""
    if values.get(CHOSEN) is not None and values.get(REJECTED) is not None:
        return (values[CHOSEN], values[REJECTED]), None
    if not single or values.get("completion") is None:
        missing = (
            "completion" if single and CHOSEN not in values else CHOSEN if values.get(CHOSEN) is None else REJECTED
        )
        raise ValueError(missing_column_message(missing, values))
    if not isinstance(values.get("label"), bool):
        raise ValueError("column 'label' does not say whether the completion is desirable; give true or false")
    return (values["completion"],), values["label"]


def build_conversation(row: Row, answer: Any, opposite: Any = None) -> list[Any]:
    """Return the turns of a prompt with one answer. Each may be a text or a list of turns, an answer also a single
    turn; it may repeat the prompt.

    opposite: the other answer; turns that both have in common are the prompt's. Raises ValueError for an answer with
    several turns, or none.
    """
    turns = parse_turns(row.values.get("prompt"), "user")
    if isinstance(answer, str):
        return [*turns, {"role": "assistant", "content": answer}]
    answer = [answer] if isinstance(answer, dict) else answer
    if not isinstance(answer, list):
        raise ValueError(f"an answer is a {type(answer).__name__}, not a text or a list of turns")
    if len(answer) > 1:
        shared = split_shared_prompt(answer, opposite).get("prompt", []) if opposite is not None else answer[:-1]
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
        **options: Any,
    ) -> None:
        """Take the arguments of `flatshift.finetune.data.encoding.encode`. Raises UserError as the encoders of
        completions and chats."""
        self.task, self.max_length, self.bad_rows, self.overlong = task, max_length, bad_rows, overlong
        # Encode conversations without a limit and collect bad ones: `_truncate` cuts both sides of a pair alike.
        self._chat = (
            ChatEncoder(task.as_chat, tokenizer, ANY_LENGTH, bad_rows="skip", truncation=truncation, room=max_length)
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
        losses = DroppedRows(self.bad_rows, self.overlong, self.max_length)
        examples: list[Example] = []
        for chunk in iter_chunks(rows, _CHUNK):
            self._form = self._form or chunk[0].form
            results = self._encode_texts(chunk) if self._chat is None else self._encode_chats(self._chat, chunk, losses)
            for row, result in zip(chunk, results, strict=True):
                if isinstance(result, str):
                    losses.bad(row, result)
                    continue
                example, cut = result
                single = example.rejected_ids is None
                if self._pairs if single else self._single:
                    losses.bad(row, _TWO_KINDS)
                    continue
                self._single += single
                self._pairs += not single
                if not (cut and losses.long(row, cut)):
                    examples.append(example)
        if self._chat is None:
            losses.at_least = self._text.losses.at_least
        return losses.encoded(examples)

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

    def _encode_texts(self, rows: Sequence[Row]) -> list[_Result]:
        encoder = self._text
        prompt, answer = self.task.templates()
        before = next(literal for literal, name in answer.parts if name == "answer")
        filled: list[tuple[list[str], bool | None] | str] = []
        for row in rows:
            try:
                answers, desirable = read_answers(row.values, single=self.task.is_unpaired)
                names = ("prompt", *((CHOSEN, REJECTED) if desirable is None else ("completion",)))
                lists = [name for name in names if isinstance(row.values.get(name), list)]
                if lists:
                    raise ValueError(f"column {lists[0]!r} holds turns of a conversation; set task.chat: true")
                if is_blank(row, prompt.columns):
                    raise ValueError("the prompt is empty")
                texts = [answer.fill(row, answer=_check_answer(text, before)) for text in answers]
                question = prompt.fill(row)
            except ValueError as error:
                filled.append(str(error))
            else:
                filled.append(([*encoder.within([question], left=encoder.left), *encoder.within(texts)], desirable))
        flat = [text for entry in filled if not isinstance(entry, str) for text in entry[0]]
        batch = encoder.tokens(flat) if flat else {"input_ids": []}
        results: list[_Result] = []
        index = 0
        for row, entry in zip(rows, filled, strict=True):
            if isinstance(entry, str):
                results.append(entry)
                continue
            texts, desirable = entry
            results.append(self._build_from_texts(row, texts, batch, index, desirable))
            index += len(texts)
        return results

    def _build_from_texts(
        self, row: Row, texts: Sequence[str], batch: Any, index: int, desirable: bool | None
    ) -> _Result:
        """Build an example from texts: prompt and answers, whose tokens are in the batch from `index` on."""
        encoder = self._text
        prompt, *answers = batch["input_ids"][index : index + len(texts)]
        prefix = list(encoder.specials.prefix)
        if not all(answers):
            return "an answer is empty"
        closed = [[*ids, *encoder.end] for ids in answers]
        reserve = max(map(len, closed))
        sides: list[Ids] = []
        cut_answer = cut = False
        for ids in closed:
            context, answer, shorter = fit_completion(
                prefix, prompt, ids, encoder.max_length, reserve=reserve, left=encoder.left
            )
            if not context:
                return "the prompt is empty, and an answer needs something to follow"
            sides.append(([*context, *answer], [IGNORE] * len(context) + answer))
            cut_answer, cut = cut_answer or len(answer) < len(ids), cut or shorter
        labels = sides[0][1]
        lost = bool(prompt) and labels.count(IGNORE) == len(prefix)
        truncation = Truncation(len(prefix) + len(prompt) + reserve, cut, answer=cut_answer, prompt=lost)
        targets = min(len(answers[0]), len(labels) - labels.count(IGNORE))
        size = encoder.bytes(texts[1], batch, index + 1, 0, targets)
        return _build_example(row, sides, size, desirable), truncation

    def _encode_chats(self, chat: ChatEncoder, rows: Sequence[Row], losses: DroppedRows) -> list[_Result]:
        conversations: list[Row] = []
        sides_of: dict[str, tuple[list[str], bool | None] | str] = {}
        for row in rows:
            try:
                answers, desirable = read_answers(row.values, single=self.task.is_unpaired)
                others = answers[::-1] if len(answers) == 2 else (None,)
                turns = [build_conversation(row, *pair) for pair in zip(answers, others, strict=True)]
            except ValueError as error:
                sides_of[row.where] = str(error)
                continue
            places = [f"{row.where}#{k}" for k in range(len(turns))]
            sides_of[row.where] = places, desirable
            beside = {name: row.values.get(name) for name in ("tools", "system")}
            conversations += [
                Row({"messages": messages, **beside}, row.id, place)
                for messages, place in zip(turns, places, strict=True)
            ]
        encoded = chat.add(conversations)
        losses.at_least = minimum_known(losses.at_least, encoded.at_least)
        by_place = {example.where: example for example in encoded.examples}
        results: list[_Result] = []
        for row in rows:
            sides = sides_of[row.where]
            if isinstance(sides, str):
                results.append(sides)
                continue
            places, desirable = sides
            pairs = [(f"{place}: ", reason) for place in places for reason in encoded.skipped]
            reasons = [reason.removeprefix(start) for start, reason in pairs if reason.startswith(start)]
            examples = [by_place[place] for place in places if place in by_place]
            results.append(reasons[0] if reasons else self._truncate(row, examples, len(places), desirable))
        return results

    def _truncate(self, row: Row, conversations: Sequence[Example], count: int, desirable: bool | None) -> _Result:
        """Return the example of `count` conversations; one whose answer begins far beyond the limit is not there."""
        limit = self.max_length
        whole = [(each.input_ids, each.labels) for each in conversations if isinstance(each.labels, list)]
        sides: list[Ids] = [(ids[:limit], labels[:limit]) for ids, labels in whole]
        needs = max((len(ids) for ids, _ in whole), default=limit + 1)
        if len(sides) < count or any(labels.count(IGNORE) == len(labels) for _, labels in sides):
            if self.overlong is None:
                return f"train.max_length = {limit} tokens leave nothing of an answer"
            return _build_example(row, [([], [])] * count, 0, desirable), Truncation(max(needs, limit + 1), True)
        beyond = any(label != IGNORE for _, labels in whole for label in labels[limit:])
        truncation = Truncation(needs, needs > limit, answer=beyond)
        return _build_example(row, sides, conversations[0].bytes, desirable), truncation


def _check_answer(answer: Any, before: str) -> str:
    """Return an answer, without its leading space where the template's text `before` it ends with one."""
    if not isinstance(answer, str):
        raise ValueError(f"an answer is a {type(answer).__name__}, not text")
    if not answer.strip():
        raise ValueError("an answer is empty")
    return answer.removeprefix(" ") if before.endswith(" ") else answer


def _build_example(row: Row, sides: Sequence[Ids], size: int, desirable: bool | None) -> Example:
    (ids, labels), *second = sides
    rejected_ids, rejected_labels = second[0] if second else (None, None)
    return Example(
        ids, labels, row.id, row.where, size, rejected_ids=rejected_ids, rejected_labels=rejected_labels,
        desirable=desirable,
    )  # fmt: skip


def swap_answers(row: Row) -> Row:
    """Return the row with its answers swapped, or its label negated."""
    values = row.values
    if values.get(CHOSEN) is not None and values.get(REJECTED) is not None:
        swapped = {CHOSEN: values[REJECTED], REJECTED: values[CHOSEN]}
    else:
        swapped = {"label": not values.get("label")}
    return dataclasses.replace(row, values={**values, **swapped})
