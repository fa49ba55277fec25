"""Checks of the rows before step 1 (`data.checks`): compared with one another, and with the parts of them that are
read.

Each row is seen once, as it is encoded; two hashes and two numbers of it are kept in memory, 28 bytes. Near copies are
found by MinHash signatures, about 700 bytes a row, stored on disk.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from flatshift.experiments.data.holdout import SPLITS, Split, normalize_text
from flatshift.experiments.data.sources import list_source_files
from flatshift.experiments.recipe.schema import Recipe
from flatshift.finetune.data.columns import ColumnarExamples
from flatshift.finetune.data.config import DataChecks
from flatshift.finetune.data.example import EncodedRows, Example
from flatshift.finetune.data.preference import CHOSEN, REJECTED
from flatshift.finetune.data.rows import Row, form_columns
from flatshift.finetune.errors import UserError, shorten
from flatshift.finetune.seeds import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_EXAMPLES = 10
"""Maximum number of examples of a finding."""
_SHOWN = 12
"""Maximum number of classes, columns or keys in one sentence."""
_SHORTEST = 8
"""Minimum characters of a prompt for which an answer that begins with it counts as repeating it."""
_CONTEXT = ("text2", "tools", "system")
"""Optional columns that are read with the prompt; the others are answers."""
_TURN = {"role", "content", "weight", "from", "value"}
"""Keys of a turn that are always read."""

Place = tuple[Split, int]
"""A split and the index of an example in it."""


@dataclass
class _FindingCount:
    """Count of one kind of finding, with the places and the description of some examples."""

    count: int = 0
    examples: list[tuple[list[Place], str]] = field(default_factory=list)

    def add(self, *places: Place, what: str = "") -> None:
        self.count += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append((list(places), what))


def _count_findings(found: Iterable[str]) -> _FindingCount:
    tally = _FindingCount()
    for what in found:
        tally.add(what=what)
    return tally


@dataclass
class _RowHashes:
    """Hashes and numbers of the rows of a split, in order."""

    keys: array[int] = field(default_factory=lambda: array("q"))
    """Hash of the row: of its text for a classifier or regression, of all its columns otherwise."""
    texts: array[int] = field(default_factory=lambda: array("q"))
    """Hash of the model's input; only with classes."""
    labels: array[int] = field(default_factory=lambda: array("i"))
    """Number of the class, or set of classes; −1: not to be compared."""
    numbers: array[int] = field(default_factory=lambda: array("q"))
    """Index of the row's first example."""


class RowChecks:
    """Checks that take the rows of all splits as they are encoded; `close` returns the findings."""

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, *, wrong: Collection[str] = ()) -> None:
        """wrong: ids of rows whose label is noise, and so independent of their text."""
        self.settings, self.task, self._wrong = recipe.data.checks, recipe.task, frozenset(wrong)
        task, projector = recipe.task, recipe.adapter.projector
        self._prompt, optional = task.prompt_columns(), task.optional_columns()
        own = tuple(name for name in task.columns() if name not in self._prompt)
        self._read = (*self._prompt, *(name for name in optional if name in _CONTEXT))
        self._answers = (*own, *(name for name in optional if name not in _CONTEXT))
        self._all = (*self._read, *self._answers)
        self._parts = list_source_files(recipe.data)
        self._features = None if projector is None else projector.features
        off = self.settings.control_tokens == "off"
        self._control = None if off else _special_token_pattern(tokenizer)
        special = (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id)
        compared = not (task.is_sequence_level or task.hides_tokens or tokenizer.unk_token_id in special)
        self._unknown = tokenizer.unk_token_id if compared else None
        self._rows: dict[Split, _RowHashes] = {split: _RowHashes() for split in SPLITS}
        self._labels: dict[Any, int] = {}
        self._tallies: dict[str, _FindingCount] = {}
        self._in_answers = 0
        self._unread: dict[str, _FindingCount] = {}
        self._known: dict[tuple[Split, int, str], set[str]] = {}
        self._near = None if self.settings.near == "off" or self._features is not None else _NearDuplicateFinder()

    def add(self, split: Split, part: int, rows: Sequence[Row], encoded: EncodedRows, first: int, encoder: Any) -> None:
        """Check a chunk of rows with their encoding.

        first: examples of the split before these. encoder: of these rows; for conversations it knows which keys it
        reads.
        """
        found: dict[str, list[int]] = {}
        for number, example in enumerate(encoded.examples):
            found.setdefault(example.where, []).append(number)
        usable = [row for row in rows if row.where in found]
        for row in usable:
            numbers = found[row.where]
            place = (split, first + numbers[0])
            self._row(row, place)
            if self._unknown is not None and any(
                _has_target_token(encoded.examples[n], self._unknown) for n in numbers
            ):
                self._found("unknown_tokens").add(place)
            if self.settings.unread != "off":
                self._look_for_unread(row, place, part, encoder)
        if self._near is not None:
            names = self._read if self.task.is_sequence_level else self._all
            self._near.add(split, [" ".join(_iter_column_texts(row, names)) for row in usable])

    def _row(self, row: Row, place: Place) -> None:
        read, answers = (
            [normalize_text(text) for text in _iter_column_texts(row, names)] for names in (self._read, self._answers)
        )
        held = self._rows[place[0]]
        held.keys.append(hash(tuple(read) if self.task.is_sequence_level else (*read, None, *answers)))
        held.numbers.append(place[1])
        if self.task.has_classes:
            label = None if row.id in self._wrong else row.values.get("label")
            held.texts.append(hash(tuple(read)))
            held.labels.append(-1 if label is None else self._labels.setdefault(label, len(self._labels)))
        if self.task.by_answer and _is_same_text(row.values.get(CHOSEN), row.values.get(REJECTED)):
            self._found("same_answers").add(place)
        if self._repeats(row, answers):
            self._found("repeated_prompts").add(place)
        if self._control is not None:
            hits = [hit for text in _iter_column_texts(row, self._all) for hit in self._control.findall(text)]
            if hits:
                self._found("control_tokens").add(place, what=repr(hits[0]))
                self._in_answers += any(self._control.search(text) for text in self._spoken(row))

    def _repeats(self, row: Row, answers: Sequence[str]) -> bool:
        """Return True if an answer begins with its prompt, where the model sees both in sequence."""
        if not self.task.causal:
            return False
        prompts = [normalize_text(text) for name in self._prompt if isinstance(text := row.values.get(name), str)]
        pairs = [(prompt, answer) for prompt in prompts for answer in answers]
        if self.task.uses_chat_template:
            turns = [(turn, turn.get("content", turn.get("value"))) for turn in _iter_turns(row.values.get("messages"))]
            pairs += [
                (normalize_text(before), normalize_text(text))
                for (_, before), (turn, text) in pairwise(turns)
                if _is_assistant_turn(turn) and isinstance(before, str) and isinstance(text, str)
            ]
        return any(len(prompt) >= _SHORTEST and answer.startswith(prompt) for prompt, answer in pairs)

    def _spoken(self, row: Row) -> Iterator[str]:
        """Yield the texts of a row that are training targets."""
        yield from _iter_column_texts(
            row, self._answers if self._answers or self.task.uses_chat_template else self._read
        )
        for turn in _iter_turns(row.values.get("messages")) if self.task.uses_chat_template else ():
            if _is_assistant_turn(turn):
                yield from _iter_texts(turn)

    def _look_for_unread(self, row: Row, place: Place, part: int, encoder: Any) -> None:
        which = (place[0], part, row.form)
        if which not in self._known:
            self._known[which] = self._columns(*which)
        for name in row.record.keys() - self._known[which]:
            if row.record[name] not in _NOTHING:
                self._unread.setdefault(f"column {shorten(name)!r}", _FindingCount()).add(place)
        if not self.task.uses_chat_template:
            return
        lists = [row.values.get(name) for name in self._all if name != "tools"]
        turns = (turn for value in lists for turn in _iter_turns(value))
        for key in {key for turn in turns for key, value in turn.items() if value not in _NOTHING} - _TURN:
            if not encoder.reads_key(key):
                self._unread.setdefault(f"key {shorten(key)!r} of turns", _FindingCount()).add(place)

    def _columns(self, split: Split, part: int, form: str) -> set[str]:
        """Return the columns of a part's records that are read."""
        columns = (self._parts[split] or self._parts["train"])[part].columns
        names = (*self._all, "id", *form_columns(form, turns="messages" in self._read))
        return {*(getattr(columns, name, name) for name in names), self._features or "", *_CHOSEN}

    def _found(self, kind: str) -> _FindingCount:
        return self._tallies.setdefault(kind, _FindingCount())

    # ------------------------------------------------------------------------------------------------- all rows at once

    def close(self, train: ColumnarExamples, names: Sequence[str] | None) -> list[dict[str, Any]]:
        """Return the findings as plain values; `locate_findings` turns them into sentences.

        train: the training examples. names: the classes in head order.
        """
        made: list[dict[str, Any]] = []

        def note(kind: str, text: str, tally: _FindingCount | None, of: int | None = None) -> None:
            if tally is not None and tally.count and getattr(self.settings, kind) != "off":
                text = text if of is None else f"{tally.count:,} of {of:,} {text}"
                made.append({"kind": kind, "text": text, "count": tally.count, "of": of, "examples": tally.examples})

        for split in ("test", "dev"):
            count = len(self._rows[split].numbers)
            copied = self._copied(split)
            note("copies", f"{split} rows are training rows", self._copies(split, copied), count)
            note("near", f"{split} rows are nearly training rows", self._nearly(split, copied), count)
        if names is not None:
            note("conflicts", "texts stand under several classes", *self._conflicts())
            groups, counts = _group_similar_names(names), class_counts(train, names)
            alike = (
                f"{sum(map(len, groups)):,} of {len(names):,} classes differ from another only in case, white space "
            )
            note(
                "class_names",
                f"{alike}or Unicode form",
                _count_findings(" and ".join(map(ascii, group)) for group in groups),
            )
            empty = [repr(name) for name in names if not counts[name]]
            note(
                "empty_classes",
                f"{len(empty):,} of {len(names):,} classes have no training row",
                _count_findings(empty),
            )
        total = sum(len(rows.numbers) for rows in self._rows.values())
        learnt = f", {self._in_answers:,} of them in what is supervised" if self._in_answers else ""
        for kind, text in (
            ("same_answers", "rows have two answers that say the same"),
            ("repeated_prompts", "rows have an answer that begins with its prompt, which stands twice"),
            ("unknown_tokens", "rows have unknown tokens in what is supervised"),
            ("control_tokens", f"rows have special tokens written out in their text{learnt}"),
        ):
            note(kind, text, self._tallies.get(kind), total)
        unread = sorted(self._unread.items(), key=lambda one: (-one[1].count, one[0]))
        listed = ", ".join(f"{what} ({tally.count:,} rows)" for what, tally in unread[:_SHOWN])
        more = f", and {len(unread) - _SHOWN:,} more" if len(unread) > _SHOWN else ""
        where = [(tally.examples[0][0], what if len(unread) > 1 else "") for what, tally in unread[:_EXAMPLES]]
        note("unread", f"not read: {listed}{more}", _FindingCount(len(unread), where))
        return made

    def _copied(self, split: Split) -> np.ndarray:
        """Return for each row of a split (n,) the index of the first equal training row; −1 for none."""
        train, own = (np.asarray(self._rows[name].keys, np.int64) for name in ("train", split))
        if not len(train) or self._features is not None:  # rows of one text may differ in their features
            return np.full(len(own), -1)
        keys, first = np.unique(train, return_index=True)
        at = np.minimum(np.searchsorted(keys, own), len(keys) - 1)
        return np.where(keys[at] == own, first[at], -1)

    def _copies(self, split: Split, copied: np.ndarray) -> _FindingCount:
        own, train = self._rows[split].numbers, self._rows["train"].numbers
        found = np.flatnonzero(copied >= 0)
        pairs = [(own[row], train[copied[row]]) for row in found[:_EXAMPLES].tolist()]
        return _FindingCount(len(found), [([(split, one), ("train", other)], "") for one, other in pairs])

    def _nearly(self, split: Split, copied: np.ndarray) -> _FindingCount | None:
        if self._near is None:
            return None
        own, train = self._rows[split].numbers, self._rows["train"].numbers
        tally = _FindingCount()
        for row, other, similarity in self._near.pairs(split):
            if copied[row] < 0:
                tally.add((split, own[row]), ("train", train[other]), what=f"similarity about {similarity:.2f}")
        return tally

    def _conflicts(self) -> tuple[_FindingCount, int]:
        """Return the texts with several classes, over all splits, and the number of texts."""
        held = self._rows.values()
        texts, labels, numbers = (
            np.concatenate([np.asarray(getattr(rows, name), np.int64) for rows in held])
            for name in ("texts", "labels", "numbers")
        )
        split = np.repeat(np.arange(len(SPLITS)), [len(rows.numbers) for rows in held])
        kept = np.flatnonzero(labels >= 0)
        order = kept[np.lexsort((kept, texts[kept]))]
        texts, labels, names = texts[order], labels[order], list(self._labels)
        starts = np.flatnonzero(np.append(True, texts[1:] != texts[:-1])) if len(texts) else order
        ends = np.append(starts[1:], len(texts))
        mixed = [f.reduceat(labels, starts) if len(texts) else labels for f in (np.minimum, np.maximum)]
        found = np.flatnonzero(mixed[0] != mixed[1])
        tally = _FindingCount(len(found))
        for start, end in zip(starts[found][:_EXAMPLES].tolist(), ends[found].tolist(), strict=False):
            other = start + int(np.argmax(labels[start:end] != labels[start]))
            places = [(SPLITS[split[order[at]]], int(numbers[order[at]])) for at in (start, other)]
            tally.examples.append((places, " and ".join(repr(names[labels[at]]) for at in (start, other))))
        return tally, len(starts)


# ---------------------------------------------------------------------------------------------------- what a row says

_CHOSEN = ("rank", "score", "repeat_of")
"""Columns that a selection adds to the records that it chose."""
_NOTHING: tuple[Any, ...] = (None, "", [], {})


def _iter_column_texts(row: Row, names: Iterable[str]) -> Iterator[str]:
    """Yield the texts in these columns, those in lists and objects one by one."""
    for name in names:
        yield from _iter_texts(row.values.get(name))


def _iter_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _iter_texts(one)
    elif value is not None:
        yield str(value)


def _is_same_text(one: Any, other: Any) -> bool:
    """Return True if two answers, texts or turns, have the same text."""
    return one is not None and [normalize_text(text) for text in _iter_texts(one)] == [
        normalize_text(text) for text in _iter_texts(other)
    ]


def _iter_turns(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the turns in a column that holds a list, one turn, or the JSON text of a list."""
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        try:
            value = json.loads(value)
        except ValueError:
            return
    for turn in value if isinstance(value, list) else [value]:
        if isinstance(turn, Mapping):
            yield turn


def _is_assistant_turn(turn: Mapping[str, Any]) -> bool:
    """Return True for a turn of the assistant, in any format."""
    return turn.get("role", turn.get("from")) in ("assistant", "gpt", "function_call")


def _special_token_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Return a pattern that finds special tokens in a text as the tokenizer does; None if it has none."""
    added = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    special = {text for text in (*added, *map(str, tokenizer.all_special_tokens)) if text.strip()}
    return re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True)))) if special else None


def _has_target_token(example: Example, token: int) -> bool:
    """Return True if a token is among the target tokens."""
    return any(isinstance(labels, list) and token in labels for labels in (example.labels, example.rejected_labels))


# ------------------------------------------------------------------------------------------------------------- classes


def class_counts(train: ColumnarExamples, names: Sequence[str]) -> dict[str, int]:
    """Return the training rows of each class, in head order."""
    several = train.column("classes")
    if several is not None:
        counts = several.sum(axis=0)
    else:
        own = train.column("class")
        own = train.column("gold") if own is None else own
        counts = np.bincount(own if own is not None else [], minlength=len(names))
    return dict(zip(names, map(int, counts), strict=False))


def _group_similar_names(names: Sequence[str]) -> list[list[str]]:
    """Return groups of classes whose names differ only in case, white space and Unicode form."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(normalize_text(name).casefold(), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


# --------------------------------------------------------------------------------------------------------- near copies


class _NearDuplicateFinder:
    """Pairs of rows, of a split and of the training rows, with an estimated Jaccard similarity above a threshold."""

    def __init__(self) -> None:
        from flatshift.selection.hygiene.hygiene_config import NearDuplicates
        from flatshift.selection.hygiene.minhash import MinHasher, choose_bands
        from flatshift.selection.hygiene.shingles import Shingler

        how = NearDuplicates()
        self.threshold = how.threshold
        self.bands, self.rows = choose_bands(how.threshold, how.permutations, how.recall)
        self._shingler, self._hasher = Shingler(how.unit, how.size), MinHasher(how.permutations, derive_seed(0, "near"))
        self._permutations = how.permutations
        self._signatures: dict[Split, Any] = {}
        self._bands: dict[Split, list[Any]] = {}

    def add(self, split: Split, texts: Sequence[str]) -> None:
        """Add the next rows of a split."""
        from flatshift.selection.hygiene.duplicates import normalise_text
        from flatshift.selection.hygiene.minhash import band_keys
        from flatshift.selection.hygiene.store import GrowingArray

        if split not in self._signatures:
            self._signatures[split] = GrowingArray(np.uint32)
            self._bands[split] = [GrowingArray(np.uint64) for _ in range(self.bands)]
        signatures = self._hasher.signatures(*self._shingler([normalise_text(text) for text in texts]))
        self._signatures[split].append(signatures.T.ravel())
        for band, keys in zip(self._bands[split], band_keys(signatures, self.bands, self.rows), strict=True):
            band.append(keys)

    def pairs(self, split: Split) -> Iterator[tuple[int, int, float]]:
        """Yield each row of a split that is nearly a training row, that row, and their similarity.

        Only the first training row with a given key in a band is compared.
        """
        if split not in self._signatures or "train" not in self._signatures:
            return
        own, train = (self._signatures[name].array().reshape(-1, self._permutations) for name in (split, "train"))
        best, similarity = np.full(len(own), -1), np.zeros(len(own))
        for mine, others in zip(self._bands[split], self._bands["train"], strict=True):
            keys, first = np.unique(others.array(), return_index=True)
            at = np.minimum(np.searchsorted(keys, mine.array()), len(keys) - 1)
            for row in np.flatnonzero(keys[at] == mine.array()).tolist():
                other = int(first[at[row]])
                alike = float((own[row] == train[other]).mean())
                if alike > similarity[row]:
                    best[row], similarity[row] = other, alike
        for row in np.flatnonzero(similarity >= self.threshold).tolist():
            yield row, int(best[row]), float(similarity[row])


# ----------------------------------------------------------------------------------------------------------- reporting


@dataclass(frozen=True)
class Finding:
    """Result of one kind of check."""

    kind: str
    """Setting of `data.checks`."""
    text: str
    """Sentence with the count."""
    count: int
    of: int | None
    """Rows that were checked; None if any finding counts."""
    examples: tuple[str, ...]
    """`file:line` and content of some."""

    def __str__(self) -> str:
        first = f": {self.examples[0]}" if self.examples else ""
        return f"{self.text}{first}"


def locate_findings(
    noted: Iterable[Mapping[str, Any]], splits: Mapping[Split, ColumnarExamples]
) -> tuple[Finding, ...]:
    """Return the findings of `RowChecks.close`, with the places as `file:line`."""

    def shown(places: Iterable[Place], what: str) -> str:
        where = " and ".join(dict.fromkeys(splits[split][number].where for split, number in places))
        return ": ".join(filter(None, [where, what]))

    return tuple(
        Finding(one["kind"], one["text"], one["count"], one["of"], tuple(shown(*each) for each in one["examples"]))
        for one in noted
    )


def refuse_findings(found: Iterable[Finding], settings: DataChecks) -> None:
    """Raise UserError for findings that `data.checks` refuses."""
    refused = [
        one
        for one in found
        if getattr(settings, one.kind) == "refuse" and (one.of is None or one.count > settings.most * one.of)
    ]
    if refused:
        first, *more = dict.fromkeys(one.kind for one in refused)
        counted = "" if refused[0].of is None else f"; data.checks.most is {settings.most:g}"
        also = f" (and {len(more)} more kinds: {more[0]}, …)" if len(more) > 1 else f" (and {more[0]})" if more else ""
        raise UserError(f"{refused[0]}{counted}; mend the rows, or set data.checks.{first}: warn{also}")


def format_class_counts(counts: Mapping[str, int], *, whole: bool = False) -> str:
    """Format the classes with their training rows; only the first of many unless `whole`."""
    shown = list(counts.items())[: None if whole else _SHOWN]
    more = f", and {len(counts) - len(shown):,} more" if len(counts) > len(shown) else ""
    listed = ", ".join(f"{shorten(name)!r} {count:,}" for name, count in shown)
    return f"{len(counts):,} classes, with their training rows: {listed}{more}"
