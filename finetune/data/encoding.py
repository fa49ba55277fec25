"""Rows to token ids and labels: what the model reads, and what it is judged on.

- language-model: `prefix text eos`; every token after the first is supervised.
- completion: `prefix prompt completion eos`; the completion and its eos are supervised. Prompt and completion are
  tokenised apart and joined, so no token spans the boundary and generation continues from exactly this prompt.
  Too long: the prompt loses its left (or the end that `truncation` names), then the completion its right.
- seq2seq: the encoder reads the prompt and the decoder writes the target, both in the tokenizer's own template; the
  target is closed by eos and supervised throughout. The decoder reads the target behind its start token, one place
  later. Too long: each loses its right end.
- chat: the conversation as a chat template writes it; what the assistant has to write is supervised (`chat`).
- classify, regress: the tokenizer's own template around one text or a pair; too long: the longer text loses its right
  end first.
- masked-lm: the tokenizer's own template around the text, some of whose tokens are hidden and supervised
  (`finetune.data.masking`); too long: the text loses its right end.

With `truncation: left` texts and prompts lose their left end instead; what is supervised as an answer never does.

`prefix` is what the tokenizer puts in front, else its beginning-of-sequence token, else nothing. The first token of a
causal sample is never supervised, because nothing precedes it; so the supervised tokens of a sample are the labels
≠ −100.
Special tokens written out in the text are read as special tokens, as the tokenizer does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from ..config import ByExample, Chat, Completion, LanguageModel, MaskedLM, Projector, Regress, Seq2Seq, Task
from ..errors import UserError
from .example import IGNORE as IGNORE
from .example import Encoded as Encoded
from .example import Example as Example
from .labels import classes_of, several_hot, unknown_class
from .left_out import Cut, LeftOut
from .masking import SPECIAL, Masking
from .rows import Row, missing_column
from .specials import Specials
from .template import Template, fit_completion, longest_first
from .units import Units
from .vectors import with_features

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHUNK = 1024
_Each = TypeVar("_Each")


def required_columns(task: Task) -> tuple[str, ...]:
    """The columns that every row of `task` must have.

    Raises:
        UserError: a malformed template.
    """
    if isinstance(task, LanguageModel | MaskedLM):
        return ("text",)
    if isinstance(task, ByExample):
        return ("text", "label")
    if isinstance(task, Chat):
        return ("messages",)
    return tuple(dict.fromkeys([*Template(task.prompt, "task.prompt").columns, *_answer(task).columns]))


def used_columns(task: Task) -> tuple[str, ...]:
    """The canonical columns that a row of `task` may have beside those it must: what it learns from.

    A row's `id` is apart, as no task reads it.
    """
    return ("text2",) if isinstance(task, ByExample) else ("tools",) if isinstance(task, Chat) else ()


def _answer(task: Completion | Seq2Seq) -> Template:
    if isinstance(task, Seq2Seq):
        return Template(task.target, "task.target")
    return Template(task.completion, "task.completion")


def answer_columns(task: Completion | Seq2Seq) -> tuple[str, ...]:
    """The columns that only the answer shows.

    Raises:
        UserError: a malformed template, or an answer without a column of its own.
    """
    shown = Template(task.prompt, "task.prompt").columns
    own = tuple(name for name in _answer(task).columns if name not in shown)
    if not own:
        raise UserError(
            f"data.label_noise: the answer of task.kind: {task.kind} has no column that task.prompt does not show, so "
            "no other row's can be put in its place"
        )
    return own


def sort_labels(labels: Iterable[str]) -> tuple[str, ...]:
    """Distinct labels in head order: by number if all are integers, else by name."""
    distinct = set(labels)
    if all(label.removeprefix("-").isdecimal() for label in distinct):
        return tuple(sorted(distinct, key=lambda label: (int(label), label)))
    return tuple(sorted(distinct))


def label_index(row: Row, label_names: Sequence[str]) -> int:
    """The class of a row.

    Raises:
        UserError: the label is missing or not among `label_names`; names the nearest.
    """
    label = row.values.get("label")
    if label is None:
        raise UserError(f"{row.where}: {missing_column('label', row.record, 'data.columns.label')}")
    try:
        return label_names.index(label)
    except ValueError:
        raise unknown_class(label, label_names, row.where) from None


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
        decoder_start: the token that a decoder begins with (`finetune.backbone.decoder_start`); for seq2seq.
        truncation: the end that a longer text or prompt loses; None: a completion's prompt its left, others the right.
        overlong: longer samples are truncated (None), left out, or refused.
        units: how training is to see the targets of a regression; None: as they are.
        features: which vectors each row brings along, for language-model and completion; a row without them is bad.
    Raises:
        UserError: a label outside the classes, a column that a template needs, a row with nothing to supervise (unless
            skipped), a `max_length` that leaves no room, a longer sample (if refused).
    """
    if isinstance(task, Chat):
        from .chat.encode import encode_chats

        return encode_chats(
            rows,
            task=task,
            tokenizer=tokenizer,
            max_length=max_length,
            bad_rows=bad_rows,
            truncation=truncation,
            overlong=overlong,
        )
    specials = Specials.of(tokenizer, begin=not isinstance(task, Seq2Seq))
    room = (
        max_length - len(specials.prefix) - len(specials.middle) - max(len(specials.suffix), len(specials.pair_suffix))
    )
    if room < 2:
        raise UserError(f"train.max_length: {max_length} leaves no room beside the special tokens; give at least 8")
    left = truncation == "left" or (truncation is None and isinstance(task, Completion))
    if left and isinstance(task, Seq2Seq) and task.prefix:
        raise UserError("train.truncation: left would cut task.prefix off; leave one of them out")
    maker = _Maker(tokenizer, specials, max_length, decoder_start, left)
    rest = LeftOut(bad_rows, overlong, max_length)
    if isinstance(task, ByExample):
        return _encode_wholes(rows, task, maker, label_names, rest, units)
    return _encode_texts(rows, task, maker, label_names, rest, features)


def _encode_texts(
    rows: Iterable[Row],
    task: LanguageModel | Completion | MaskedLM | Seq2Seq,
    maker: _Maker,
    label_names: Sequence[str] | None,
    rest: LeftOut,
    features: Projector | None,
) -> Encoded:
    names = None
    if isinstance(task, Completion) and task.score == "rank":
        _check_ranked(task)
        if label_names is None:
            rows = list(rows)
            label_names = sort_labels(row.values["label"] for row in rows if row.values.get("label") is not None)
        names = tuple(label_names)
    examples: list[Example] = []
    masking = Masking.of(task, maker.tokenizer) if isinstance(task, MaskedLM) else None
    shown = [] if isinstance(task, LanguageModel | MaskedLM) else [Template(task.prompt, "task.prompt"), _answer(task)]
    for filled in _chunks(_filled(rows, shown, rest)):
        chunk, texts = [row for row, _ in filled], [text for _, text in filled]
        if masking is not None:
            made = maker.masked(chunk, masking)
        elif isinstance(task, Seq2Seq):
            made = maker.pairs(chunk, texts, task)
        elif isinstance(task, Completion):
            made = maker.completions(chunk, texts, task, names)
        else:
            made = maker.documents(chunk)
        for row, (example, cut) in zip(chunk, made, strict=True):
            if features is not None and not isinstance(example, str):
                example = with_features(example, row, features)
            if isinstance(example, str):
                rest.bad(row, example)
            elif not (cut and rest.long(row, cut)):
                examples.append(example)
    return Encoded(examples, rest.truncated, rest.skipped, names, rest.dropped, rest.cut_answers)


def _filled(rows: Iterable[Row], templates: Sequence[Template], rest: LeftOut) -> Iterator[tuple[Row, list[str]]]:
    """The rows that every template can show, and their texts; the others are bad ones."""
    for row in rows:
        try:
            texts = [template.fill(row) for template in templates]
        except ValueError as error:
            rest.bad(row, str(error))
        else:
            yield row, texts


def _paired(rows: Iterable[Row], rest: LeftOut) -> Iterator[Row]:
    """The rows whose second text is one, or is not there; the others are bad ones."""
    for row in rows:
        text2 = row.values.get("text2")
        if text2 is None or isinstance(text2, str):
            yield row
        else:
            rest.bad(row, f"column 'text2' is a {type(text2).__name__}, not text")


def _check_ranked(task: Completion) -> None:
    if "label" not in Template(task.completion, "task.completion").columns:
        raise UserError(f"task.score: rank needs {{label}} in task.completion, which is {task.completion!r}")
    if "label" in Template(task.prompt, "task.prompt").columns:
        raise UserError(f"task.score: rank needs a prompt that does not give {{label}} away; it is {task.prompt!r}")


def _encode_wholes(
    rows: Iterable[Row],
    task: ByExample,
    maker: _Maker,
    label_names: Sequence[str] | None,
    rest: LeftOut,
    units: Units | None,
) -> Encoded:
    kept: list[tuple[Row, list[int], list[int] | None]] = []
    for chunk in _chunks(_paired(rows, rest)):
        for row, (ids, segments, cut) in zip(chunk, maker.texts(chunk), strict=True):
            if not ids:
                rest.bad(row, "the text has no token")
            elif not (cut and rest.long(row)):
                kept.append((row, ids, segments))
    of = [row for row, _, _ in kept]
    names = None
    labels: Sequence[Any]
    if isinstance(task, Regress):
        labels = [_target(row) for row in of]
        units = units or Units(0.0)
    else:
        units = None
        names = tuple(label_names or task.labels or sort_labels(classes_of(of)))
        labels = several_hot(of, names) if task.multi else _classes(of, names)
    examples = [
        Example(ids, label, row.id, row.where, segments=segments, units=units)
        for (row, ids, segments), label in zip(kept, labels, strict=True)
    ]
    return Encoded(examples, rest.truncated, rest.skipped, names, rest.dropped)


def _classes(rows: Sequence[Row], names: tuple[str, ...]) -> list[int]:
    known = {name: i for i, name in enumerate(names)}
    found = (known.get(row.values.get("label", "")) for row in rows)
    return [index if index is not None else label_index(row, names) for index, row in zip(found, rows, strict=True)]


def _target(row: Row) -> float:
    target = row.values.get("label")
    if not isinstance(target, float):
        raise ValueError(f"{row.where}: read a regression's rows with label=finetune.data.label_reader(task)")
    return target


def _chunks(rows: Iterable[_Each]) -> Iterator[list[_Each]]:
    iterator = iter(rows)
    while chunk := list(islice(iterator, _CHUNK)):
        yield chunk


class _Maker:
    """Tokenises a chunk at once and puts the pieces together."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        specials: Specials,
        max_length: int,
        decoder_start: int | None,
        left: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.left = left  # texts and prompts lose their left
        self.decoder_start = decoder_start
        self.specials = specials
        self.max_length = max_length
        eos = tokenizer.eos_token_id
        # The end is learnt even where the template does not close with it (Llama-3 adds only its beginning).
        self.end: tuple[int, ...] = specials.suffix
        if eos is not None and eos not in specials.suffix:
            self.end = (*specials.suffix, eos)
        self._encoded_choices: dict[tuple[str, ...], tuple[tuple[int, ...], ...]] = {}

    def tokens(self, texts: list[str]) -> Any:
        return self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)

    def documents(self, rows: Sequence[Row]) -> list[tuple[Example | str, Cut]]:
        texts = [row.values["text"] for row in rows]
        batch = self.tokens(texts)
        prefix = list(self.specials.prefix)
        made: list[tuple[Example | str, Cut]] = []
        for i, (row, ids) in enumerate(zip(rows, batch["input_ids"], strict=True)):
            content, room = [*ids, *self.end], self.max_length - len(prefix)
            cut = Cut(len(content) > room)
            start = len(content) - room if cut and self.left else 0
            input_ids = [*prefix, *content[start : start + room]]
            if len(input_ids) < 2 or not ids:
                made.append(("the text is empty", cut))
                continue
            first = start if prefix else start + 1
            size = self._bytes(texts[i], batch, i, first, min(len(ids), start + room))
            made.append((Example(input_ids, [IGNORE, *input_ids[1:]], row.id, row.where, size), cut))
        return made

    def masked(self, rows: Sequence[Row], masking: Masking) -> list[tuple[Example | str, Cut]]:
        batch = self.tokens([row.values["text"] for row in rows])
        prefix, suffix = self.specials.prefix, self.specials.suffix
        room = self.max_length - len(prefix) - len(suffix)
        special = set(self.tokenizer.all_special_ids)
        made: list[tuple[Example | str, Cut]] = []
        for i, (row, ids) in enumerate(zip(rows, batch["input_ids"], strict=True)):
            of = batch.word_ids(i) if batch.is_fast else range(len(ids))
            kept = _shortened(ids, room, left=self.left)
            inner = [
                SPECIAL if token in special or word is None else word
                for token, word in zip(kept, _shortened(of, room, left=self.left), strict=True)
            ]
            words = [SPECIAL] * len(prefix) + inner + [SPECIAL] * len(suffix)
            if all(word == SPECIAL for word in inner):
                made.append(("the text has no token that could be hidden", Cut.NOTHING))
                continue
            whole = np.array([*prefix, *kept, *suffix], dtype=np.int64)
            read, labels = masking.fixed(whole, np.array(words), row.id)
            segments = [0] * len(whole) if self.specials.segments else None
            example = Example(read.tolist(), labels.tolist(), row.id, row.where, segments=segments, words=words)
            made.append((example, Cut(len(ids) > room)))
        return made

    def completions(
        self, rows: Sequence[Row], filled: Sequence[Sequence[str]], task: Completion, names: tuple[str, ...] | None
    ) -> list[tuple[Example | str, Cut]]:
        """filled: prompt and answer of each row."""
        prompts = self.tokens([prompt for prompt, _ in filled])["input_ids"]
        texts = [answer for _, answer in filled]
        batch = self.tokens(texts)
        choices = self._choices(rows, _answer(task), names) if names is not None else [None] * len(rows)
        prefix = list(self.specials.prefix)
        made: list[tuple[Example | str, Cut]] = []
        for i, (row, prompt, ids) in enumerate(zip(rows, prompts, batch["input_ids"], strict=True)):
            mine = choices[i]
            # All choices follow one prompt, so it is cut for the longest of them.
            reserve = max(map(len, mine)) if mine else 0
            context, kept, shorter = fit_completion(
                prefix, prompt, [*ids, *self.end], self.max_length, reserve=reserve, left=self.left
            )
            cut = Cut.ANSWER if len(kept) < len(ids) + len(self.end) else Cut(shorter)
            if not ids or len(context) + len(kept) < 2:
                made.append(("the completion is empty", cut))
                continue
            if not context and task.score != "perplexity":
                made.append((f"the prompt is empty, so score: {task.score} has nothing to start from", cut))
                continue
            # Without any context the first token of the answer has nothing that could predict it.
            labels = [IGNORE] * len(context) + kept if context else [IGNORE, *kept[1:]]
            size = self._bytes(texts[i], batch, i, 0 if context else 1, min(len(ids), len(kept)))
            example = Example(
                [*context, *kept],
                labels,
                row.id,
                row.where,
                size,
                choices=mine,
                gold=label_index(row, names) if names is not None else None,
                answer=texts[i] if task.score == "generate" else None,
            )
            made.append((example, cut))
        return made

    def pairs(
        self, rows: Sequence[Row], filled: Sequence[Sequence[str]], task: Seq2Seq
    ) -> list[tuple[Example | str, Cut]]:
        """filled: prompt and target of each row."""
        if self.decoder_start is None:
            raise ValueError("encode(task=Seq2Seq) needs decoder_start, the token that the decoder begins with")
        prompts = self.tokens([(task.prefix or "") + prompt for prompt, _ in filled])["input_ids"]
        texts = [target for _, target in filled]
        batch = self.tokens(texts)
        made: list[tuple[Example | str, Cut]] = []
        for i, (row, prompt, ids) in enumerate(zip(rows, prompts, batch["input_ids"], strict=True)):
            source, cut_prompt = self._closed(prompt, self.specials.suffix, left=self.left)
            labels, cut_target = self._closed(ids, self.end)
            cut = Cut.ANSWER if cut_target else Cut(cut_prompt)
            if not ids or not source:
                made.append((f"the {'prompt' if ids else 'target'} is empty", cut))
                continue
            room = self.max_length - len(self.specials.prefix) - len(self.end)
            example = Example(
                source,
                labels,
                row.id,
                row.where,
                self._bytes(texts[i], batch, i, 0, min(len(ids), room)),
                answer=texts[i] if task.score == "generate" else None,
                decoder_ids=[self.decoder_start, *labels[:-1]],
            )
            made.append((example, cut))
        return made

    def _closed(self, ids: Sequence[int], end: tuple[int, ...], *, left: bool = False) -> tuple[list[int], bool]:
        """The tokenizer's template around `ids`, closed by `end`, and whether the ids lost an end to fit."""
        room = self.max_length - len(self.specials.prefix) - len(end)
        return [*self.specials.prefix, *_shortened(ids, room, left=left), *end], len(ids) > room

    def _choices(
        self, rows: Sequence[Row], template: Template, names: tuple[str, ...]
    ) -> list[tuple[tuple[int, ...], ...] | None]:
        """Each row's completions for all classes; rows whose texts agree share one tuple."""
        texts = [tuple(template.fill(row, label=name) for name in names) for row in rows]
        for all_of_row in set(texts) - self._encoded_choices.keys():
            encoded = self.tokens(list(all_of_row))["input_ids"]
            self._encoded_choices[all_of_row] = tuple((*ids, *self.end)[: self.max_length - 1] for ids in encoded)
        return [self._encoded_choices[all_of_row] for all_of_row in texts]

    def texts(self, rows: Sequence[Row]) -> list[tuple[list[int], list[int] | None, bool]]:
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
            room = self.max_length - len(s.prefix) - len(s.suffix)
            ids = [*s.prefix, *_shortened(a, room, left=self.left), *s.suffix]
            return ids, [0] * len(ids) if s.segments else None, len(a) > room
        room = self.max_length - len(s.prefix) - len(s.middle) - len(s.pair_suffix)
        keep_a, keep_b = longest_first(len(a), len(b), room)
        one = [*s.prefix, *_shortened(a, keep_a, left=self.left), *s.middle]
        two = [*_shortened(b, keep_b, left=self.left), *s.pair_suffix]
        segments = [s.segments[0]] * len(one) + [s.segments[1]] * len(two) if s.segments else None
        return one + two, segments, keep_a + keep_b < len(a) + len(b)

    def _bytes(self, text: str, batch: Any, i: int, first: int, stop: int) -> int:
        """UTF-8 bytes of the tokens `first ≤ k < stop` of text i."""
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


def _shortened(ids: Sequence[Any], room: int, *, left: bool) -> Sequence[Any]:
    """At most `room` of `ids`, without their right or their left end."""
    return ids[max(len(ids) - room, 0) :] if left else ids[:room]
