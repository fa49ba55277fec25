"""Cleaning of a pool by the steps of `Hygiene`: rows kept, rows cut, and the cause of every drop.

    cleaned = clean_pool(texts, Hygiene(exact=True), references=[ReferenceTexts("eval", test_texts)])
    cleaned.kept                    # rows that stay, in their order
    cleaned.pieces                  # row → spans that stay of it, where decontamination split it
    for drop in cleaned.drops(ids): ...

The texts are read two or three times and never held: `texts` is anything that can be iterated repeatedly with the same
result (a list, a view of a file), not a generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np

from flatshift.selection.errors import SelectionError
from flatshift.selection.hygiene.decontaminate import Decontaminator, Spans
from flatshift.selection.hygiene.duplicates import ExactDuplicates, NearDuplicateGroups, normalise_text
from flatshift.selection.hygiene.filters import apply_filters
from flatshift.selection.hygiene.hygiene_config import WORKING_GIB, Hygiene
from flatshift.selection.hygiene.store import GrowingArray, block_ranges, bounded_batches, build_array
from flatshift.selection.shards import Arrays, Shard, ShardMap

Progress = Callable[[str, int], None]
"""Called as (stage, rows so far)."""

LISTED = "listed"  # cause of records that another tool listed for dropping
_AT_ONCE = 4096
CHARACTERS = 1 << 20  # characters per batch of texts, with at most 4,096 texts (one long text may be a batch by itself)


class DropList:
    """Entries of the drop lists of another tool, matched with a pool: `add` all, then `find` the pool's ids. memory:
    bytes for sorting digests of ids.

    entry: (N,) int64, for each record of the pool the number of its entry, −1 for none; unknown: the numbers of entries
    whose id no record has, ascending. Both are set by `find`. Memory does not grow with either side: ids are matched by
    their 128-bit digests, sorted on disk.
    """

    entry: np.ndarray
    unknown: np.ndarray

    def __init__(self, *, memory: int):
        self._digests = ExactDuplicates(memory=memory)
        self.matches, self.reasons = _StringArray(), _StringArray()
        """Match and reason of each entry, "" if missing."""
        self._count = 0

    def __len__(self) -> int:
        """Number of entries so far."""
        return self._count

    def add(self, ids: Sequence[str], matches: Sequence[str], reasons: Sequence[str]) -> None:
        """Add the next entries, each id once; "" for a missing match or reason."""
        self._digests.add(ids)
        self.matches.add(matches)
        self.reasons.add(reasons)
        self._count += len(ids)

    def find(self, ids: Iterable[str]) -> None:
        """Find the entries among the ids of a pool, in file order."""
        stream, records, count = iter(ids), 0, self._count
        while batch := list(islice(stream, _AT_ONCE)):
            self._digests.add(batch)
            records += len(batch)
        first_rows = self._digests.first(np.broadcast_to(np.True_, count + records))
        unmatched = build_array(count, np.bool_, lambda low, high: True)
        self.entry = build_array(records, np.int64, lambda low, high: -1)
        for low, high in block_ranges(records):
            entries = first_rows[count + low : count + high]
            listed = np.flatnonzero(entries < count)
            self.entry[low + listed] = entries[listed]
            unmatched[entries[listed]] = False
        unknown = GrowingArray(np.int64)
        for low, high in block_ranges(count):
            unknown.append(low + np.flatnonzero(unmatched[low:high]))
        self.unknown = unknown.array()


class _StringArray:
    """Texts concatenated in one array."""

    def __init__(self) -> None:
        self._bytes, self._borders = GrowingArray(np.uint8), GrowingArray(np.int64)
        self._borders.append(np.zeros(1))

    def add(self, texts: Sequence[str]) -> None:
        encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
        self._borders.append(self._bytes.length + np.cumsum([len(text) for text in encoded]))
        self._bytes.append(np.frombuffer(b"".join(encoded), np.uint8))

    def __getitem__(self, number: int) -> str:
        low, high = self._borders.array()[number : number + 2]
        return self._bytes.array()[low:high].tobytes().decode("utf-8", "surrogatepass")


@dataclass(frozen=True)
class ReferenceTexts:
    """Texts that the pool is compared with: of the target, or of the evaluation rows (`name`: "target" or "eval")."""

    name: str
    texts: Sequence[str]


@dataclass(frozen=True)
class CleaningResult:
    """Result of `clean_pool` for N rows.

    rule (N,) uint8: number of the rule that dropped the row, 0: kept. rules: (cause, rule in words) by number. value
    (N,) float64: the value checked by the rule; similarity with the match for duplicates; NaN if there is none. match
    (N,) int64: −1, or the match: row j of the pool as R + j, text j of the references (concatenated, R in all) as j.
    pieces: row → (start, end) of the pieces that stay of it, in characters; only rows that were cut. listed: the
    records of `drops`.
    """

    rule: np.ndarray
    rules: Sequence[tuple[str, str]]
    value: np.ndarray
    match: np.ndarray
    references: Sequence[ReferenceTexts]
    pieces: Mapping[int, Spans]
    listed: DropList | None = None
    diagnostics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kept(self) -> np.ndarray:
        """Rows that stay, whole or in pieces, ascending (int64)."""
        return np.flatnonzero(self.rule == 0)

    def counts(self) -> dict[str, int]:
        """Return the number of dropped rows by cause, including causes that dropped none."""
        counts = dict.fromkeys((cause for cause, _ in self.rules[1:]), 0)
        numbers = np.zeros(len(self.rules), dtype=np.int64)
        for low, high in block_ranges(len(self.rule)):
            numbers += np.bincount(self.rule[low:high], minlength=len(self.rules))
        for (cause, _), count in zip(self.rules[1:], numbers[1:].tolist(), strict=True):
            counts[cause] += count
        return counts

    def drops(
        self,
        ids: Sequence[str] | Callable[[np.ndarray], Sequence[str]],
        reference_ids: Mapping[str, Sequence[str]] | None = None,
    ) -> Iterator[dict]:
        """Yield one record for each row that was dropped or cut, in order: `id, cause, rule, value, match, match_in`.

        ids: N strings, or a function from row numbers to their ids. reference_ids: the ids of each reference's texts by
        its name; their positions if missing. `match` is the id of the record or text that the row repeats, `match_in`
        its source ("pool" or a reference's name); for a listed record both come from its list. A row that was cut has
        the cause "cut" and its `pieces`.
        """
        cut = np.sort(np.fromiter(self.pieces, dtype=np.int64, count=len(self.pieces)))
        skip = sum(len(reference.texts) for reference in self.references)
        for low in range(0, len(self.rule), _AT_ONCE):
            high = low + _AT_ONCE
            cut_here = cut[np.searchsorted(cut, low) : np.searchsorted(cut, high)]
            rows = np.union1d(low + np.flatnonzero(self.rule[low:high]), cut_here)
            if not len(rows):
                continue
            # Of matches in the pool; others get row 0, which is not used.
            twins = np.maximum(self.match[rows] - skip, 0)
            names, matches = (
                [ids[row] for row in numbers] if not callable(ids) else ids(numbers) for numbers in (rows, twins)
            )
            for row, name, twin in zip(rows.tolist(), names, matches, strict=True):
                yield self._drop(row, name, twin, reference_ids or {})

    def _drop(self, row: int, name: str, twin: str, reference_ids: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        cause, rule = self.rules[self.rule[row]] if self.rule[row] else ("cut", "words shared with eval cut out")
        value: float | None = None if np.isnan(self.value[row]) else float(self.value[row])
        match: str | None = None
        source: str | None = None
        if cause == LISTED and self.listed is not None:
            entry = int(self.listed.entry[row])
            match, rule, value = self.listed.matches[entry] or None, self.listed.reasons[entry] or rule, None
            source = None if match is None else "pool"
        elif self.match[row] >= 0:
            source, index = "pool", int(self.match[row])
            for reference in self.references:
                if index < len(reference.texts):
                    source = reference.name
                    break
                index -= len(reference.texts)
            match = twin if source == "pool" else str(index)
            if source in reference_ids:
                match = reference_ids[source][index]
        record = {"id": name, "cause": cause, "rule": rule, "value": value, "match": match, "match_in": source}
        return record | ({"pieces": self.pieces[row]} if row in self.pieces else {})


def clean_pool(
    texts: Iterable[str],
    settings: Hygiene,
    *,
    references: Sequence[ReferenceTexts] = (),
    seed: int = 0,
    listed: DropList | None = None,
    batch_characters: int = CHARACTERS,
    progress: Progress | None = None,
    shards: ShardMap | None = None,
) -> CleaningResult:
    """Decide for every row of a pool whether it stays.

    texts: the pool's in file order, read two or three times. references: their texts are never dropped. Those named in
    `settings.against` count as earlier rows for exact and near-duplicates; those called "eval" are searched for by
    decontamination. seed: of the hash functions of MinHash. listed: the entries of `settings.drops`, found among the
    pool's ids; these records are dropped before any step. batch_characters: at a time, without effect on the result.
    shards: maps the two passes over the texts; what compares them with one another stays in this process.

    Raises SelectionError if `texts` can be read only once or changes, decontamination has no evaluation texts, or
    `drops` are named and not passed in.
    """
    if settings.drops and listed is None:
        raise SelectionError("drops: clean_pool reads no files; read them into a DropList and pass it as listed")
    if isinstance(texts, Iterator):
        raise SelectionError(
            "hygiene reads the texts more than once; pass a list or a view of the file, not a generator"
        )
    return _CleaningRun(texts, settings, references, seed, listed, batch_characters, progress, shards).run()


@dataclass
class _CleaningRun:
    """One run of `clean_pool`: the rows are the references' texts first, then the pool's."""

    texts: Iterable[str]
    settings: Hygiene
    references: Sequence[ReferenceTexts]
    seed: int
    listed: DropList | None
    batch_characters: int = CHARACTERS
    progress: Progress | None = None
    shards: ShardMap | None = None

    def __post_init__(self) -> None:
        settings, references = self.settings, self.references
        self.earlier = [text for reference in references for text in reference.texts]
        self.compared = np.concatenate(
            [np.full(len(ref.texts), ref.name in settings.against) for ref in references] or [np.empty(0, dtype=bool)]
        )
        memory = int((settings.memory_gib - WORKING_GIB) * 2**30)
        self.exact = ExactDuplicates(memory=memory) if settings.exact else None
        self.near = None if settings.near is None else NearDuplicateGroups(settings.near, seed=self.seed, memory=memory)
        self.rules = [("kept", "")] if self.listed is None else [("kept", ""), (LISTED, "listed in drops")]
        self.diagnostics: dict[str, Any] = {}
        self.decontaminator = None
        if settings.decontaminate is not None:
            evaluation = [text for reference in references if reference.name == "eval" for text in reference.texts]
            if not evaluation:
                raise SelectionError("decontaminate has no evaluation text to look for; name the files to evaluate on")
            self.decontaminator = Decontaminator(settings.decontaminate, evaluation)

    def run(self) -> CleaningResult:
        self._first_pass()
        self._drop_listed()
        if self.exact is not None:
            self._drop_repeats(self.exact.first(self._alive()), "exact-duplicate", "the same text")
        if self.near is not None:
            self.near.propose(self._alive())
        if self.near is not None or self.decontaminator is not None:
            self._second_pass()
        if self.near is not None:
            first_rows, similarity = self.near.resolve()
            rule = f"Jaccard similarity of at least {self.near.settings.threshold:g}, or a chain of such pairs"
            self._drop_repeats(first_rows, "near-duplicate", rule, similarity)
            self.diagnostics["near"] = self.near.diagnostics
        pieces = self._decontaminate()
        return CleaningResult(
            self.rule, self.rules, self.value, self.match, self.references, pieces, self.listed, self.diagnostics
        )

    def _first_pass(self) -> None:
        """Apply filters, and compute digests of whole texts and band keys."""
        rules, values = GrowingArray(np.uint8), GrowingArray(np.float64)
        texts: Iterable[str] = self.earlier if self.shards is not None else chain(self.earlier, self.texts)
        for batch in self._batches(texts, "filters and signatures", whole=True):
            numbers = np.zeros(len(batch), np.uint8)
            batch_values = np.full(len(batch), np.nan)
            for cause, (rule, broken, value) in apply_filters(batch, self.settings):
                new = broken & (numbers == 0)
                numbers[new] = self._number(cause, rule)
                batch_values[new] = value[new]
            rules.append(numbers)
            values.append(batch_values)
            normalised = [normalise_text(text) for text in batch] if self.exact or self.near else []
            if self.exact is not None:
                self.exact.add(normalised)
            if self.near is not None:
                self.near.sign(normalised)
        if self.shards is not None:
            self._add_signatures(self.shards, rules, values)
        skip = len(self.earlier)
        self.rule, self.value = rules.array()[skip:], values.array()[skip:]
        self.match = build_array(len(self.rule), np.int64, lambda low, high: -1)

    def _add_signatures(self, shards: ShardMap, rules: GrowingArray, values: GrowingArray) -> None:
        """Do the first pass over the pool by shards."""
        alone = replace(self.settings, decontaminate=None, drops=())
        listed = self.listed is not None
        for cause, (rule, _, _) in apply_filters([], self.settings):
            self._number(cause, rule)
        for part in shards("filters and signatures", partial(_sign_shard, settings=alone, seed=self.seed)):
            rule_numbers = np.asarray(part["rules"])
            rules.append(rule_numbers + (listed * (rule_numbers > 0)).astype(np.uint8))
            values.append(part["values"])
            if self.exact is not None:
                self.exact.add_digests(part["digests"])
            if self.near is not None:
                self.near.add_keys(part["keys"], part["filled"])

    def _second_pass(self) -> None:
        """Compute shingle sets of proposed rows, and n-grams shared with evaluation texts."""
        if self.near is not None:
            for batch in self._batches(self.earlier, "", whole=False):
                self.near.collect([normalise_text(text) for text in batch])
        if self.shards is not None:
            self._add_pairs_and_ngrams(self.shards)
            return
        rows = 0
        for batch in self._batches(self.texts, "pairs and n-grams", whole=False):
            rows += len(batch)
            if self.near is not None:
                self.near.collect([normalise_text(text) for text in batch])
            if self.decontaminator is not None:
                self.decontaminator.match(batch)
        if rows != len(self.rule):
            raise SelectionError(
                f"the pool had {len(self.rule)} texts when it was read first and {rows} the second time; "
                "pass texts that stay the same"
            )

    def _add_pairs_and_ngrams(self, shards: ShardMap) -> None:
        """Do the second pass over the pool by shards."""
        inputs = {} if self.near is None else {"proposed": self.near.proposed(len(self.earlier), len(self.rule))}
        evaluation = [text for reference in self.references if reference.name == "eval" for text in reference.texts]
        search = partial(_search_shard, settings=self.settings, evaluation=evaluation, seed=self.seed)
        for part in shards("pairs and n-grams", search, inputs=inputs):
            if self.near is not None:
                self.near.add_sets(part["values"], part["sizes"])
            if self.decontaminator is not None:
                self.decontaminator.add_matches(part["rows"], part["hits"])

    def _drop_listed(self) -> None:
        if self.listed is None:
            return
        if len(self.listed.entry) != len(self.rule):
            raise SelectionError(
                f"listed: found among {len(self.listed.entry)} ids, and the pool has {len(self.rule)} texts; "
                "give DropList.find an id for every text"
            )
        for low, high in block_ranges(len(self.rule)):
            rows = low + np.flatnonzero(self.listed.entry[low:high] >= 0)
            self.rule[rows] = 1
            self.value[rows] = np.nan

    def _drop_repeats(self, first_rows: np.ndarray, cause: str, rule: str, value: np.ndarray | None = None) -> None:
        """Drop the pool's rows that have an earlier first row, each with its `value`; arrays include references."""
        number = self._number(cause, rule)
        skip = len(self.earlier)
        for low, high in block_ranges(len(self.rule)):
            block = first_rows[skip + low : skip + high]
            repeats = np.flatnonzero(block != np.arange(skip + low, skip + high))
            self.rule[low + repeats] = number
            self.match[low + repeats] = block[repeats]
            if value is not None:
                self.value[low + repeats] = value[skip + low + repeats]

    def _decontaminate(self) -> dict[int, Spans]:
        finder, settings = self.decontaminator, self.settings.decontaminate
        if finder is None or settings is None:
            return {}
        rows, owner = finder.contaminated(self._alive()[len(self.earlier) :])
        self.diagnostics["decontaminate"] = finder.diagnostics
        names = np.repeat([ref.name for ref in self.references], [len(ref.texts) for ref in self.references])
        self.match[rows] = np.flatnonzero(names == "eval")[owner]
        if settings.action == "drop":
            self.rule[rows] = self._number("contaminated", f"{settings.ngram} words in a row shared with eval")
            return {}
        nothing = self._number("contaminated", f"no piece of {settings.min_chars} characters left")
        many = self._number("contaminated", f"more than {settings.max_pieces} pieces left")
        pieces: dict[int, Spans] = {}
        row = 0
        for batch in self._batches(self.texts, "cutting", whole=False) if len(rows) else ():
            for hit in rows[np.searchsorted(rows, row) : np.searchsorted(rows, row + len(batch))].tolist():
                text = batch[hit - row]
                pairs = finder.cut(text)  # the blanks at their ends go
                stripped = [(b - len(text[a:b].lstrip()), a + len(text[a:b].rstrip())) for a, b in pairs]
                spans = [(start, end) for start, end in stripped if start < end]
                if 0 < len(spans) <= settings.max_pieces:
                    pieces[hit] = spans
                else:
                    self.rule[hit] = many if spans else nothing
                    self.value[hit] = len(spans)
            row += len(batch)
        return pieces

    def _alive(self) -> np.ndarray:
        """Return (R + N,) bool: rows that take part in a comparison."""
        alive = GrowingArray(np.bool_)
        alive.append(self.compared)
        for low, high in block_ranges(len(self.rule)):
            alive.append(self.rule[low:high] == 0)
        return alive.array()

    def _number(self, cause: str, rule: str) -> int:
        if (cause, rule) not in self.rules:
            self.rules.append((cause, rule))
        return self.rules.index((cause, rule))

    def _batches(self, texts: Iterable[str], stage: str, *, whole: bool) -> Iterator[list[str]]:
        """Yield the texts in lists of bounded size. `whole`: they begin with the references' texts."""
        done = -len(self.earlier) if whole else 0
        for batch in bounded_batches(texts, self.batch_characters, 4096):
            yield batch
            done += len(batch)
            if self.progress is not None and stage:
                self.progress(stage, max(done, 0))


def _sign_shard(shard: Shard, *, settings: Hygiene, seed: int) -> Arrays:
    """Return what the first pass computes of a shard's texts."""
    run = _CleaningRun(shard.texts, settings, (), seed, None)
    run._first_pass()
    arrays = {"rules": run.rule, "values": run.value}
    if run.exact is not None:
        arrays["digests"] = run.exact.digests
    if run.near is not None:
        arrays |= {"keys": run.near.keys, "filled": run.near.filled}
    return arrays


def _search_shard(shard: Shard, *, settings: Hygiene, evaluation: Sequence[str], seed: int) -> Arrays:
    """Return what the second pass computes of a shard's texts."""
    arrays: dict[str, np.ndarray] = {}
    decontaminator = None
    if settings.decontaminate is not None:
        decontaminator = Decontaminator(settings.decontaminate, evaluation)
    near = None
    if settings.near is not None:
        near = NearDuplicateGroups(settings.near, seed=seed, memory=0)
        near.choose(np.asarray(shard.inputs["proposed"][shard.low : shard.high]))
    for batch in bounded_batches(shard.texts, CHARACTERS, 4096):
        if near is not None:
            near.collect([normalise_text(text) for text in batch])
        if decontaminator is not None:
            decontaminator.match(batch)
    if near is not None:
        arrays["values"], arrays["sizes"] = near.sets
    if decontaminator is not None:
        arrays["rows"], arrays["hits"] = decontaminator.matches
        arrays["rows"] = arrays["rows"] + shard.low
    return arrays
