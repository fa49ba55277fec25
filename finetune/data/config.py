"""Settings of a run's data: files, columns, sources and checks. Every field's docstring is its help text. Imports
nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..config import check_bounds


@dataclass(frozen=True, kw_only=True)
class Files:
    """Examples from JSONL (.gz .xz .zst), CSV, Parquet, a saved `datasets` directory, or a hub data set."""

    files: tuple[str, ...] = ()
    """Paths, globs (sorted), `sample:NAME` for a file shipped with Flatshift, or `hub:NAME[CONFIG]@REVISION:SPLIT`."""
    limit: int | None = None
    """Use this many examples, and refuse fewer: the first of a shuffle keyed by `train.seed`, so larger limits contain
    smaller ones."""

    def __post_init__(self) -> None:
        check_bounds(self, limit=(1, None))


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Column names of the input files."""

    text: str = "text"
    """The text, or the first text of a pair."""
    text2: str = "text2"
    """The second text of a pair."""
    label: str = "label"
    """The class, a name or a number."""
    messages: str = "messages"
    """The turns of a conversation (task.kind: chat)."""
    tools: str = "tools"
    """Definitions of the functions that the assistant of a conversation may call (task.kind: chat)."""
    system: str = "system"
    """The system turn of a conversation that has none among its turns (task.kind: chat)."""
    id: str = "id"
    """Identifier of the example."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One of several sources of training examples."""

    files: tuple[str, ...] = ()
    """Same formats as `data.train.files`."""
    weight: float = 1.0
    """Share of the training examples (`weigh: tokens`: of their tokens), relative to the weights of the other sources;
    0: not read."""
    first: int | None = None
    """Read this many rows from the beginning, and refuse fewer; null: all."""
    limit: int | None = None
    """Use this many of the rows, as `data.train.limit`."""
    when_over: Literal["repeat", "refuse"] = "repeat"
    """If the run needs more examples than there are: repeat them in another order (counted), or refuse the run."""
    columns: Columns | None = None
    """Column names of this source; null: `data.columns`."""

    def __post_init__(self) -> None:
        check_bounds(self, weight=(0, 1e12), first=(1, None), limit=(1, None))


@dataclass(frozen=True, kw_only=True)
class TrainFiles(Files):
    """Training examples: from `files`, or from several sources mixed by weight."""

    first: int | None = None
    """Read this many rows from the beginning, and refuse fewer (of a hub stream: fetch no more); null: all."""
    sources: dict[str, Source] | None = None
    """Name → source, instead of `files`: examples are interleaved in proportion to the weights, to within one example
    in every prefix of the run."""
    weigh: Literal["rows", "tokens"] = "rows"
    """Unit of the sources' weights: examples (`rows`), or all their tokens, target or not (`tokens`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, first=(1, None))
        if self.sources is None:
            if self.weigh != "rows":
                raise ValueError(f"weigh: {self.weigh} is of the weights of sources, and there are none; leave it out")
            return
        if self.files:
            raise ValueError("sources and data.train.files cannot both be set; move the files to a source of their own")
        for name in ("first", "limit"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} is of data.train.files alone; give each source its own {name}")
        if not sum(source.weight for source in self.sources.values()):
            raise ValueError("sources have no weight above 0, so there is nothing to train on")
        for name, source in self.sources.items():
            if not source.files:
                raise ValueError(f"sources.{name}.files is empty: name the rows of this source")

    @property
    def all_files(self) -> tuple[str, ...]:
        """Return `files`, or those of every source that has a weight."""
        if self.sources is None:
            return self.files
        return tuple(name for source in self.sources.values() if source.weight for name in source.files)


Severity = Literal["refuse", "warn", "off"]


@dataclass(frozen=True, kw_only=True)
class DataChecks:
    """Checks of the data before step 1. Each kind stops the run above the share `most` (`refuse`), is only reported
    (`warn`), or is skipped (`off`)."""

    copies: Severity = "refuse"
    """Dev or test examples that are also training examples, ignoring white space and Unicode form (NFKC)."""
    near: Severity = "off"
    """Dev or test examples that are nearly training examples: a Jaccard similarity of character 5-grams of 0.8 or more,
    estimated by MinHash."""
    conflicts: Severity = "warn"
    """Texts that occur under several classes."""
    class_names: Severity = "warn"
    """Classes whose names differ only in case, white space or Unicode form."""
    empty_classes: Severity = "warn"
    """Classes without a training example."""
    same_answers: Severity = "warn"
    """Pairs whose two answers are the same (task.kind: preference)."""
    repeated_prompts: Severity = "warn"
    """Answers that start with their prompt, which would then appear twice."""
    unknown_tokens: Severity = "warn"
    """Answers that contain the tokenizer's unknown token, which the model would learn to write."""
    control_tokens: Severity = "warn"
    """Examples whose text spells out a special token, which the tokenizer parses as that token."""
    unread: Severity = "warn"
    """Columns of the rows, and keys of their turns, that are never read."""
    most: float = 0.1
    """Largest share of examples that `refuse` tolerates, with a warning; 0: none. Classes, columns and keys are never
    tolerated."""

    def __post_init__(self) -> None:
        check_bounds(self, most=(0, 1))


@dataclass(frozen=True, kw_only=True)
class Data:
    """Data sources and the treatment of bad rows."""

    train: TrainFiles = field(default_factory=TrainFiles)
    """Training examples."""
    dev: Files = field(default_factory=Files)
    """Examples that select the best step; may be empty."""
    test: Files = field(default_factory=Files)
    """Examples evaluated once, at the end; may be empty."""
    columns: Columns = field(default_factory=Columns)
    """Column names."""
    holdout: float = 0.0
    """Share of the training rows set apart as test rows, and as many again as dev rows, where those name no files
    (`holdout_splits: [dev]`: as dev rows only); one row each at least. Copies of one text (after NFKC, blanks folded)
    go to one side, and classes keep their shares. Of documents too few for that, the end of each is set apart. The draw
    does not depend on `train.seed`, so every seed is evaluated on the same rows. In a selection that names no training
    rows: of the target's files, so that its target is what a run on the same files trains on. It is 0.1 where training
    rows of your own take the place of a shipped recipe's sample, whose dev and test sets then do not apply, unless dev,
    test or this is named; so it is for a target of your own."""
    holdout_splits: tuple[Literal["dev", "test"], ...] = ("dev", "test")
    """Splits that `holdout` sets rows apart for, unless they name files."""
    label_noise: float = 0.0
    """Share of training examples given a wrong label, drawn by seed and written to `label_noise.json`; larger shares
    contain smaller ones. The draw is over all training examples before any limit: an example that is wrong under one
    limit is wrong under every other, and a limited subset holds this share up to chance. A class becomes another one; a
    completion or seq2seq target is replaced by that of an example with a different answer; the tokens of a plain
    language-model example are shuffled."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """Malformed rows stop the run with file:line (`refuse`), or are skipped and counted (`skip`)."""
    checks: DataChecks = field(default_factory=DataChecks)
    """Checks of the data before step 1."""
    cache: str | None = "auto"
    """Directory that keeps encoded examples for later runs, keyed by the content they were made from. `auto`: for
    inputs above 8 MB, under FLATSHIFT_CACHE or the user's cache directory; null: nothing is kept."""

    def __post_init__(self) -> None:
        check_bounds(self, label_noise=(0, 1), holdout=(0, 0.4))
        if self.holdout and self.dev.files and self.test.files:
            raise ValueError(
                f"holdout {self.holdout:g} would set nothing apart: dev and test name files; set it to 0, or clear "
                f"one of them: --data.test.files '[]'"
            )
        if self.holdout and not self.splits_to_fill:
            raise ValueError("holdout_splits names no split without files; name dev or test, or set holdout to 0")

    @property
    def splits_to_fill(self) -> tuple[Literal["dev", "test"], ...]:
        """Splits that `holdout` sets rows apart for: those of `holdout_splits` without files; none if it is 0."""
        files = {"dev": self.dev.files, "test": self.test.files}
        return tuple(split for split in files if split in self.holdout_splits and self.holdout and not files[split])
