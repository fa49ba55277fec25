"""Checks of the rows before step 1 (`data.checks`): compared with one another, and with the columns that are read.

Each row is seen once, as it is encoded; two hashes and two numbers of it are kept in memory, 28 bytes. Near copies are
found by MinHash signatures, about 700 bytes a row, stored on disk.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import defaultdict
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
from flatshift.finetune.data.example import EncodedRows
from flatshift.finetune.data.preference import CHOSEN, REJECTED
from flatshift.finetune.data.rows import Row, form_columns
from flatshift.finetune.errors import UserError, shorten
from flatshift.finetune.seeds import derive_seed
from flatshift.selection.hashing import Shingler
from flatshift.selection.hygiene.hygiene_config import NearDuplicates

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_EXAMPLES = 10  # of a finding
_MAX_NAMES = 12  # classes, columns or keys in one sentence
_MIN_PROMPT = 8  # characters of a prompt for which an answer that begins with it counts as repeating it
_CONTEXT_COLUMNS = ("text2", "tools", "system")  # optional columns read with the prompt; the others are answers
_TURN_KEYS = {"role", "content", "weight", "from", "value"}  # always read

Place = tuple[Split, int]
"""A split and the index of an example in it."""


@dataclass
class _FindingCount:
    count: int = 0
    examples: list[tuple[list[Place], str]] = field(default_factory=list)

    def add(self, *places: Place, description: str = "") -> None:
        self.count += 1
        if len(self.examples) < _MAX_EXAMPLES:
            self.examples.append((list(places), description))


@dataclass
class _RowHashes:
    """Hashes and numbers of the rows of a split, in order. keys: of the text for a classifier or regression, of all
    columns otherwise. texts: of the model's input; only with classes. labels: number of the class, or set of classes;
    −1: not to be compared. numbers: index of the first example."""

    keys: array[int] = field(default_factory=lambda: array("q"))
    texts: array[int] = field(default_factory=lambda: array("q"))
    labels: array[int] = field(default_factory=lambda: array("i"))
    numbers: array[int] = field(default_factory=lambda: array("q"))


class RowChecks:
    """Checks that take the rows of all splits as they are encoded; `close` returns the findings."""

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, *, wrong: Collection[str] = ()) -> None:
        """wrong: ids of rows whose label is noise, and so independent of their text."""
        self.settings, self.task, self._wrong = recipe.data.checks, recipe.task, frozenset(wrong)
        task, projector = recipe.task, recipe.adapter.projector
        self._prompt, optional = task.input_format.columns(), task.optional_columns()
        self._is_chat = task.input_format.uses_chat_template
        targets = (name for name in task.columns() if name not in self._prompt)
        self._read = (*self._prompt, *(name for name in optional if name in _CONTEXT_COLUMNS))
        self._answers = (*targets, *(name for name in optional if name not in _CONTEXT_COLUMNS))
        self._all = (*self._read, *self._answers)
        self._sources = list_source_files(recipe.data)
        self._features = None if projector is None else projector.features
        self._control = None if self.settings.control_tokens == "off" else _special_token_pattern(tokenizer)
        special = (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id)
        compared = not (task.traits.is_sequence_level or task.traits.masks_tokens or tokenizer.unk_token_id in special)
        self._unknown = tokenizer.unk_token_id if compared else None
        self._rows: dict[Split, _RowHashes] = {split: _RowHashes() for split in SPLITS}
        self._labels: dict[Any, int] = {}
        self._tallies: defaultdict[str, _FindingCount] = defaultdict(_FindingCount)
        self._in_answers = 0
        self._unread: defaultdict[str, _FindingCount] = defaultdict(_FindingCount)
        self._known: dict[tuple[Split, int, str], set[str]] = {}
        self._near = None if self.settings.near == "off" or self._features is not None else _NearDuplicateFinder()

    def add(
        self, split: Split, source: int, rows: Sequence[Row], encoded: EncodedRows, start: int, encoder: Any
    ) -> None:
        """Check a chunk of rows with their encoding.

        source: index of their source in the split. start: examples of the split before these. encoder: of these rows;
        for conversations it knows which keys it reads.
        """
        examples: dict[str, list[int]] = {}
        for number, example in enumerate(encoded.examples):
            examples.setdefault(example.where, []).append(number)
        usable = [row for row in rows if row.where in examples]
        for row in usable:
            numbers = examples[row.where]
            place = (split, start + numbers[0])
            self._check_row(row, place)
            own = [encoded.examples[n] for n in numbers]
            targets = [labels for each in own for labels in (each.labels, each.rejected_labels)]
            if self._unknown is not None and any(isinstance(t, list) and self._unknown in t for t in targets):
                self._tallies["unknown_tokens"].add(place)
            if self.settings.unread != "off":
                self._find_unread(row, place, source, encoder)
        if self._near is not None:
            names = self._read if self.task.traits.is_sequence_level else self._all
            self._near.add(split, [" ".join(_iter_column_texts(row, names)) for row in usable])

    def _check_row(self, row: Row, place: Place) -> None:
        read, answers = (
            [normalize_text(text) for text in _iter_column_texts(row, names)] for names in (self._read, self._answers)
        )
        hashes = self._rows[place[0]]
        hashes.keys.append(hash(tuple(read) if self.task.traits.is_sequence_level else (*read, None, *answers)))
        hashes.numbers.append(place[1])
        if self.task.has_classes:
            label = None if row.id in self._wrong else row.values.get("label")
            hashes.texts.append(hash(tuple(read)))
            hashes.labels.append(-1 if label is None else self._labels.setdefault(label, len(self._labels)))
        if self.task.traits.is_answer_level and row.values.get(CHOSEN) is not None:
            first, second = (
                [normalize_text(text) for text in iter_texts(row.values.get(n))] for n in (CHOSEN, REJECTED)
            )
            if first == second:
                self._tallies["same_answers"].add(place)
        if self._repeats_prompt(row, answers):
            self._tallies["repeated_prompts"].add(place)
        if self._control is not None:
            hits = [hit for text in _iter_column_texts(row, self._all) for hit in self._control.findall(text)]
            if hits:
                self._tallies["control_tokens"].add(place, description=repr(hits[0]))
                self._in_answers += any(self._control.search(text) for text in self._iter_target_texts(row))

    def _repeats_prompt(self, row: Row, answers: Sequence[str]) -> bool:
        """Return True if an answer begins with its prompt, where the model sees both in sequence."""
        if not self.task.traits.causal:
            return False
        prompts = [normalize_text(text) for name in self._prompt if isinstance(text := row.values.get(name), str)]
        pairs = [(prompt, answer) for prompt in prompts for answer in answers]
        if self._is_chat:
            turns = [(turn, turn.get("content", turn.get("value"))) for turn in _iter_turns(row.values.get("messages"))]
            pairs += [
                (normalize_text(before), normalize_text(text))
                for (_, before), (turn, text) in pairwise(turns)
                if _is_assistant_turn(turn) and isinstance(before, str) and isinstance(text, str)
            ]
        return any(len(prompt) >= _MIN_PROMPT and answer.startswith(prompt) for prompt, answer in pairs)

    def _iter_target_texts(self, row: Row) -> Iterator[str]:
        yield from _iter_column_texts(row, self._answers if self._answers or self._is_chat else self._read)
        for turn in _iter_turns(row.values.get("messages")) if self._is_chat else ():
            if _is_assistant_turn(turn):
                yield from iter_texts(turn)

    def _find_unread(self, row: Row, place: Place, source: int, encoder: Any) -> None:
        form = (place[0], source, row.form)
        if form not in self._known:
            self._known[form] = self._columns(*form)
        for name in row.record.keys() - self._known[form]:
            if row.record[name] not in _EMPTY_VALUES:
                self._unread[f"column {shorten(name)!r}"].add(place)
        if not self._is_chat:
            return
        lists = [row.values.get(name) for name in self._all if name != "tools"]
        turns = (turn for value in lists for turn in _iter_turns(value))
        for key in {key for turn in turns for key, value in turn.items() if value not in _EMPTY_VALUES} - _TURN_KEYS:
            if not encoder.reads_key(key):
                self._unread[f"key {shorten(key)!r} of turns"].add(place)

    def _columns(self, split: Split, source: int, form: str) -> set[str]:
        """Return the columns of a source's records that are read."""
        named = self._sources[split]
        possible = [named[source]] if named else self._sources["train"]  # a row held out may be of any source
        names = (*self._all, "id", *form_columns(form, turns="messages" in self._read))
        columns = (getattr(one.columns, name, name) for one in possible for name in names)
        return {*columns, self._features or "", *_SELECTION_COLUMNS}

    def close(self, train: ColumnarExamples, names: Sequence[str] | None) -> list[dict[str, Any]]:
        """Return the findings as plain values; `locate_findings` turns them into sentences.

        train: the training examples. names: the classes in head order.
        """
        findings: list[dict[str, Any]] = []

        def note(kind: str, text: str, tally: _FindingCount, total: int | None = None) -> None:
            if tally.count and getattr(self.settings, kind) != "off":
                text = text if total is None else f"{tally.count:,} of {total:,} {text}"
                findings.append(
                    {"kind": kind, "text": text, "count": tally.count, "of": total, "examples": tally.examples}
                )

        for split in ("test", "dev"):
            copies, near = self._compare_with_training(split)
            count = len(self._rows[split].numbers)
            note("copies", f"{split} rows are training rows", copies, count)
            note("near", f"{split} rows are nearly training rows", near, count)
        if names is not None:
            note("conflicts", "texts stand under several classes", *self._conflicts())
            by_text: dict[str, list[str]] = {}
            for name in names:
                by_text.setdefault(normalize_text(name).casefold(), []).append(name)
            groups, counts = [group for group in by_text.values() if len(group) > 1], class_counts(train, names)
            differing = f"{sum(map(len, groups)):,} of {len(names):,} classes differ from another only in case, "
            similar = [" and ".join(map(ascii, group)) for group in groups]
            note("class_names", f"{differing}white space or Unicode form", _count_descriptions(similar))
            empty = [repr(name) for name in names if not counts[name]]
            without = f"{len(empty):,} of {len(names):,} classes have no training row"
            note("empty_classes", without, _count_descriptions(empty))
        total = sum(len(rows.numbers) for rows in self._rows.values())
        supervised = f", {self._in_answers:,} of them in what is supervised" if self._in_answers else ""
        for kind, text in (
            ("same_answers", "rows have two answers that say the same"),
            ("repeated_prompts", "rows have an answer that begins with its prompt, which stands twice"),
            ("unknown_tokens", "rows have unknown tokens in what is supervised"),
            ("control_tokens", f"rows have special tokens written out in their text{supervised}"),
        ):
            note(kind, text, self._tallies[kind], total)
        unread = sorted(self._unread.items(), key=lambda item: (-item[1].count, item[0]))
        listed = ", ".join(f"{name} ({tally.count:,} rows)" for name, tally in unread[:_MAX_NAMES])
        more = f", and {len(unread) - _MAX_NAMES:,} more" if len(unread) > _MAX_NAMES else ""
        examples = [(tally.examples[0][0], name if len(unread) > 1 else "") for name, tally in unread[:_MAX_EXAMPLES]]
        note("unread", f"not read: {listed}{more}", _FindingCount(len(unread), examples))
        return findings

    def _compare_with_training(self, split: Split) -> tuple[_FindingCount, _FindingCount]:
        """Return the rows of a split that equal a training row, and those that only nearly do."""
        keys, train_keys = (np.asarray(self._rows[name].keys, np.int64) for name in (split, "train"))
        copied = np.zeros(len(keys), bool)
        originals = np.zeros(len(keys), np.int64)
        if len(train_keys) and self._features is None:  # rows of one text may differ in their features
            unique, first_rows = np.unique(train_keys, return_index=True)
            at = np.minimum(np.searchsorted(unique, keys), len(unique) - 1)
            copied, originals = unique[at] == keys, first_rows[at]
        numbers, train_numbers = self._rows[split].numbers, self._rows["train"].numbers
        rows = np.flatnonzero(copied)
        pairs = [(numbers[row], train_numbers[originals[row]]) for row in rows[:_MAX_EXAMPLES].tolist()]
        copies = _FindingCount(len(rows), [([(split, row), ("train", original)], "") for row, original in pairs])
        near = _FindingCount()
        for row, original, similarity in () if self._near is None else self._near.pairs(split):
            if not copied[row]:
                description = f"similarity about {similarity:.2f}"
                near.add((split, numbers[row]), ("train", train_numbers[original]), description=description)
        return copies, near

    def _conflicts(self) -> tuple[_FindingCount, int]:
        """Return the texts with several classes, over all splits, and the number of texts."""
        hashes = self._rows.values()
        texts, labels, numbers = (
            np.concatenate([np.asarray(getattr(rows, name), np.int64) for rows in hashes])
            for name in ("texts", "labels", "numbers")
        )
        split = np.repeat(np.arange(len(SPLITS)), [len(rows.numbers) for rows in hashes])
        labelled = np.flatnonzero(labels >= 0)
        order = labelled[np.lexsort((labelled, texts[labelled]))]
        texts, labels, names = texts[order], labels[order], list(self._labels)
        starts = np.flatnonzero(np.append(True, texts[1:] != texts[:-1])) if len(texts) else order
        ends = np.append(starts[1:], len(texts))
        lowest, highest = (f.reduceat(labels, starts) if len(texts) else labels for f in (np.minimum, np.maximum))
        mixed = np.flatnonzero(lowest != highest)
        tally = _FindingCount(len(mixed))
        for start, end in zip(starts[mixed][:_MAX_EXAMPLES].tolist(), ends[mixed].tolist(), strict=False):
            pair = (start, start + int(np.argmax(labels[start:end] != labels[start])))
            places = [(SPLITS[split[order[at]]], int(numbers[order[at]])) for at in pair]
            tally.examples.append((places, " and ".join(repr(names[labels[at]]) for at in pair)))
        return tally, len(starts)


_SELECTION_COLUMNS = ("rank", "score", "repeat_of")  # added by a selection to the records that it chose
_EMPTY_VALUES: tuple[Any, ...] = (None, "", [], {})


def _count_descriptions(descriptions: Sequence[str]) -> _FindingCount:
    return _FindingCount(len(descriptions), [([], text) for text in descriptions[:_MAX_EXAMPLES]])


def _iter_column_texts(row: Row, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        yield from iter_texts(row.values.get(name))


def iter_texts(value: Any) -> Iterator[str]:
    """Yield every text and number in lists and mappings of any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from iter_texts(item)
    elif value is not None:
        yield str(value)


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
    return turn.get("role", turn.get("from")) in ("assistant", "gpt", "function_call")


def _special_token_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Return a pattern that finds special tokens in a text as the tokenizer does; None if it has none."""
    added = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    special = {text for text in (*added, *map(str, tokenizer.all_special_tokens)) if text.strip()}
    return re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True)))) if special else None


def class_counts(train: ColumnarExamples, names: Sequence[str]) -> dict[str, int]:
    """Return the training rows of each class, in head order."""
    several, classes = train.column("classes"), train.column("class")
    if several is not None:
        counts = several.sum(axis=0)
    else:
        classes = train.column("gold") if classes is None else classes
        counts = np.bincount([] if classes is None else classes, minlength=len(names))
    return dict(zip(names, map(int, counts), strict=False))


class _NearDuplicateFinder:
    """Pairs of rows, of a split and of the training rows, with an estimated Jaccard similarity above a threshold."""

    def __init__(self) -> None:
        from flatshift.selection.hygiene.duplicates import MinHasher, choose_bands

        self._settings = settings = NearDuplicates()
        self._layout = choose_bands(settings.threshold, settings.permutations, settings.recall)
        self._shingler = Shingler(settings.unit, settings.size)
        self._hasher = MinHasher(settings.permutations, derive_seed(0, "near"))
        self._signatures: dict[Split, Any] = {}
        self._bands: dict[Split, list[Any]] = {}

    def add(self, split: Split, texts: Sequence[str]) -> None:
        """Add the next rows of a split."""
        from flatshift.selection.hygiene.duplicates import band_keys, normalise_text
        from flatshift.selection.hygiene.store import GrowingArray

        if split not in self._signatures:
            self._signatures[split] = GrowingArray(np.uint32)
            self._bands[split] = [GrowingArray(np.uint64) for _ in range(self._layout[0])]
        signatures = self._hasher.signatures(*self._shingler([normalise_text(text) for text in texts]))
        self._signatures[split].append(signatures.T.ravel())
        for band, keys in zip(self._bands[split], band_keys(signatures, *self._layout), strict=True):
            band.append(keys)

    def pairs(self, split: Split) -> Iterator[tuple[int, int, float]]:
        """Yield each row of a split that is nearly a training row, that row, and their similarity.

        Only the first training row with a given key in a band is compared.
        """
        if split not in self._signatures or "train" not in self._signatures:
            return
        shape = (-1, self._settings.permutations)
        signatures, train = (self._signatures[name].array().reshape(shape) for name in (split, "train"))
        best, similarity = np.full(len(signatures), -1), np.zeros(len(signatures))
        for band, train_band in zip(self._bands[split], self._bands["train"], strict=True):
            keys, first_rows = np.unique(train_band.array(), return_index=True)
            at = np.minimum(np.searchsorted(keys, band.array()), len(keys) - 1)
            for row in np.flatnonzero(keys[at] == band.array()).tolist():
                candidate = int(first_rows[at[row]])
                agreement = float((signatures[row] == train[candidate]).mean())
                if agreement > similarity[row]:
                    best[row], similarity[row] = candidate, agreement
        for row in np.flatnonzero(similarity >= self._settings.threshold).tolist():
            yield row, int(best[row]), float(similarity[row])


@dataclass(frozen=True)
class Finding:
    """Result of one kind of check (setting of `data.checks`): a sentence with the count.

    of: rows that were checked; None if any finding counts. examples: `file:line` and content of some.
    """

    kind: str
    text: str
    count: int
    of: int | None
    examples: tuple[str, ...]

    def __str__(self) -> str:
        return ": ".join([self.text, *self.examples[:1]])


def locate_findings(
    records: Iterable[Mapping[str, Any]], splits: Mapping[Split, ColumnarExamples]
) -> tuple[Finding, ...]:
    """Return the findings of `RowChecks.close`, with the places as `file:line`."""

    def locate(places: Iterable[Place], description: str) -> str:
        lines = " and ".join(dict.fromkeys(splits[split][number].where for split, number in places))
        return ": ".join(filter(None, [lines, description]))

    return tuple(
        Finding(**{**record, "examples": tuple(locate(*example) for example in record["examples"])})
        for record in records
    )


def refuse_findings(findings: Iterable[Finding], settings: DataChecks) -> None:
    """Raise UserError for findings that `data.checks` refuses."""
    refused = [
        finding
        for finding in findings
        if getattr(settings, finding.kind) == "refuse"
        and (finding.of is None or finding.count > settings.most * finding.of)
    ]
    if refused:
        kind, *more = dict.fromkeys(finding.kind for finding in refused)
        counted = "" if refused[0].of is None else f"; data.checks.most is {settings.most:g}"
        also = f" (and {len(more)} more kinds: {more[0]}, …)" if len(more) > 1 else f" (and {more[0]})" if more else ""
        raise UserError(f"{refused[0]}{counted}; mend the rows, or set data.checks.{kind}: warn{also}")


def format_class_counts(counts: Mapping[str, int], *, whole: bool = False) -> str:
    """Format the classes with their training rows; only the first of many unless `whole`."""
    listed = list(counts.items())[: None if whole else _MAX_NAMES]
    more = f", and {len(counts) - len(listed):,} more" if len(counts) > len(listed) else ""
    names = ", ".join(f"{shorten(name)!r} {count:,}" for name, count in listed)
    return f"{len(counts):,} classes, with their training rows: {names}{more}"
