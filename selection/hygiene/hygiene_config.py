"""Settings of the cleaning of a pool before the selection; everything is off by default. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flatshift.selection.errors import SelectionError
from flatshift.selection.validation import Settings, bounded

KNOWN = (
    "en", "de", "fr", "es", "it", "pt", "nl", "sv", "da", "nb", "fi", "et", "pl", "cs",
    "hu", "ro", "tr", "id", "vi", "ru", "uk", "bg", "ar", "fa", "ur", "el", "he", "hi",
    "bn", "ta", "te", "th", "ka", "hy", "ko", "ja", "zh",
)  # fmt: skip
"""ISO 639-1 codes of the languages that `Language` detects, ties in this order."""
WORKING_GIB = 0.125  # GiB reserved for batches of texts and of pairs, in addition to the sorted keys


@dataclass(frozen=True, kw_only=True)
class LengthFilter(Settings):
    """Drop records that are too short or too long; blanks at both ends do not count."""

    min_chars: int = bounded(1, minimum=0)
    """Minimum number of characters; 1 drops only empty texts."""
    max_chars: int | None = bounded(None, minimum=1)
    """Maximum number of characters; null: no limit."""
    min_words: int = bounded(0, minimum=0)
    """Minimum number of words (runs of letters, digits and underscores). Megatron-LM's web text required 128 tokens."""
    max_words: int | None = bounded(None, minimum=1)
    """Maximum number of words; null: no limit."""

    def check(self) -> None:
        super().check()
        for unit in ("chars", "words"):
            low, high = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            if high is not None and high < low:
                raise SelectionError(f"max_{unit} must be ≥ min_{unit} {low}, got {high}")


@dataclass(frozen=True, kw_only=True)
class Language(Settings):
    """Drop records in another language, detected by script and common words. A heuristic without a download."""

    keep: tuple[str, ...] = ("en",)
    """ISO 639-1 codes to keep; `flatshift.selection.hygiene.hygiene_config.KNOWN` lists the detectable ones."""
    undecided: Literal["keep", "drop"] = "keep"
    """Action for a text with too few common words to decide, such as a headline or a formula."""

    def check(self) -> None:
        super().check()
        if not self.keep:
            raise SelectionError("keep must name at least one language, for example [en]")
        for code in self.keep:
            if code not in KNOWN:
                raise SelectionError(f"keep must hold codes out of {', '.join(KNOWN)}, got {code!r}")


@dataclass(frozen=True, kw_only=True)
class Repetition(Settings):
    """Drop records that repeat themselves (Rae et al. 2021, arXiv 2112.11446, Table A1); shares of characters."""

    lines: float = bounded(0.30, minimum=0, maximum=1)
    """Largest share of lines that repeat an earlier line; the same limit holds for paragraphs."""
    line_chars: float = bounded(0.20, minimum=0, maximum=1)
    """Largest share of characters in such lines; the same limit holds for paragraphs."""
    top_ngrams: tuple[float, ...] = (0.20, 0.18, 0.16)
    """Largest share of characters in all occurrences of the commonest n-gram (if it occurs twice), for n = 2, 3, 4."""
    repeated_ngrams: tuple[float, ...] = (0.15, 0.14, 0.13, 0.12, 0.11, 0.10)
    """Largest share of characters in n-grams that occurred earlier in the text, for n = 5, 6, …"""
    min_words: int = bounded(50, minimum=0)
    """Minimum number of words of a checked text: in a short text any phrase has a large share. The paper's documents
    have at least 50 words."""

    def check(self) -> None:
        super().check()
        for name, maximum in (("top_ngrams", 3), ("repeated_ngrams", 6)):
            values = getattr(self, name)
            if len(values) > maximum or any(not 0 <= value <= 1 for value in values):
                raise SelectionError(f"{name} must be at most {maximum} shares between 0 and 1, got {list(values)}")


@dataclass(frozen=True, kw_only=True)
class NearDuplicates(Settings):
    """Drop near-duplicates: MinHash and LSH propose pairs, their exact Jaccard similarity decides.

    Similar pairs are joined into groups (connected components) and the first record of each group is kept.
    """

    threshold: float = bounded(0.8, above=0, maximum=1)
    """Jaccard similarity of the shingle sets at or above which two texts count as duplicates; Megatron-LM used 0.7 in
    2019 and 0.9 in its later tool."""
    unit: Literal["char", "word"] = "char"
    """Unit of shingles: characters as in Megatron-LM, or words."""
    size: int = bounded(5, minimum=1, maximum=100)
    """Units per shingle."""
    permutations: int = bounded(128, minimum=1, maximum=1024)
    """Number of hash functions of a signature."""
    recall: float = 0.95
    """Probability that a pair exactly at the threshold is proposed (more similar pairs: higher); determines the
    bands."""

    def check(self) -> None:
        super().check()
        if not 0 < self.recall < 1:
            raise SelectionError(f"recall must be above 0 and below 1, got {self.recall}")


@dataclass(frozen=True, kw_only=True)
class Decontaminate(Settings):
    """Cut evaluation texts out of the pool, by the rules of Megatron-LM's task filter (used for MT-NLG).

    A record that shares `ngram` consecutive words with an evaluation text is split there: the shared words and `margin`
    characters on both sides are removed, up to the next end of a sentence; pieces that are too short are dropped, and a
    record that falls into too many pieces is dropped whole.
    """

    ngram: int = bounded(13, minimum=1, maximum=100)
    """Consecutive words that count as contamination."""
    shortest: int = bounded(8, minimum=1)
    """Evaluation texts of fewer words than `ngram` are searched for as a whole, down to this many words; shorter ones
    would match ordinary phrases and are only counted."""
    margin: int = bounded(200, minimum=0)
    """Characters removed on both sides."""
    min_chars: int = bounded(200, minimum=1)
    """Pieces with fewer characters are dropped."""
    max_pieces: int = bounded(10, minimum=1)
    """A record that falls into more pieces is dropped whole."""
    common: int | None = bounded(10, minimum=2)
    """An n-gram with this many occurrences in the pool (after the removal of duplicates) is an ordinary phrase, not
    contamination, as in Megatron-LM and GPT-3; null: every n-gram counts."""
    action: Literal["split", "drop"] = "split"
    """Split as above, or drop every contaminated record whole (required with your own features)."""

    def check(self) -> None:
        super().check()
        if self.shortest > self.ngram:
            raise SelectionError(f"shortest must be ≤ ngram {self.ngram}, got {self.shortest}")


@dataclass(frozen=True, kw_only=True)
class Hygiene(Settings):
    """Cleaning steps in this order: drops, length, language, repetition, exact duplicates, near-duplicates,
    decontamination.

    Every dropped record is listed in drops.jsonl with its cause and the id of its match, and counted in manifest.json.
    """

    drops: tuple[str, ...] = ()
    """Files of another tool, CSV, JSONL or Parquet with a line for each record to drop: its `id`, and optionally
    `match`, the id of the record it repeats, and `why`."""
    length: LengthFilter | None = None
    """Drop records that are too short or too long."""
    language: Language | None = None
    """Drop records in another language."""
    repetition: Repetition | None = None
    """Drop records that repeat themselves."""
    exact: bool = False
    """Drop a record whose text equals an earlier one, or one of `against`, except for case, blanks and Unicode form."""
    near: NearDuplicates | None = None
    """Drop near-duplicates of an earlier record, or of a text of `against`."""
    against: tuple[Literal["target", "eval"], ...] = ("target", "eval")
    """Texts that the pool must not repeat (exact and near): the target's; those used for evaluation."""
    decontaminate: Decontaminate | None = None
    """Remove consecutive words shared with evaluation texts."""
    memory_gib: float = bounded(1.0, minimum=2 * WORKING_GIB)
    """Memory of all steps together, GiB, whatever the size of the pool; the rest is sorted on disk (TMPDIR), with the
    same result. Pages of mapped files, which the system can reclaim, do not count."""

    def check(self) -> None:
        super().check()
        if self.against != ("target", "eval") and not self.exact and self.near is None:
            raise SelectionError("against has no effect without exact or near; turn one on, or leave it out")

    @property
    def on(self) -> bool:
        """True if any step is enabled."""
        steps = (self.length, self.language, self.repetition, self.near, self.decontaminate)
        return bool(self.drops) or self.exact or any(step is not None for step in steps)
