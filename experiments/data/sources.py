"""Training rows of a run: the sources of its recipe, held-out rows, limits, and `train.epochs` as optimizer steps."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from flatshift.experiments.data.holdout import SPLITS, RowKeys, Split, split_holdout
from flatshift.experiments.recipe.resolve import Resolved
from flatshift.experiments.recipe.schema import Recipe
from flatshift.finetune.config import MAX_STEPS, Train
from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.data.columns import ColumnarExamples
from flatshift.finetune.data.config import Columns, Data
from flatshift.finetune.data.example import Example
from flatshift.finetune.data.mixture import Mixture, SampleProportions
from flatshift.finetune.data.rows import Row, limit_rows, read_rows, require_rows
from flatshift.finetune.errors import UserError
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.seeds import derive_seed
from flatshift.finetune.tasks import Task

_PADDING_STEPS = 50  # optimizer steps whose padding is counted
_HIGH_PADDING = 0.2
_UNITS = {"rows": "samples", "tokens": "tokens"}  # words for the values of `data.train.weigh`


@dataclass(frozen=True)
class SourceFiles:
    """Files that are read one after another, with one set of columns.

    setting: names the files: `data.dev`, `data.train.sources.code`. name: of the source; None for files outside one.
    """

    setting: str
    name: str | None
    files: tuple[str, ...]
    columns: Columns
    columns_setting: str
    first: int | None = None
    limit: int | None = None

    def rows(self, data: Data, task: Task, skipped: list[str]) -> Iterator[Row]:
        """Stream the usable rows; the id of a row of a source is `NAME/ID`. Raises UserError."""
        rows = read_rows(
            self.files, columns=self.columns, required=task.columns(), bad_rows=data.bad_rows, skipped=skipped,
            setting=self.columns_setting, first=self.first, label=task.read_label, used=self._used(task),
        )  # fmt: skip
        try:
            for row in rows:
                yield row if self.name is None else dataclasses.replace(row, id=f"{self.name}/{row.id}")
        except UserError as error:
            raise UserError(f"{self.setting}.{error}" if str(error).startswith("first:") else str(error)) from None

    def _used(self, task: Task) -> tuple[str, ...]:
        """Return the columns with a custom name that at least one row must have.

        Dev and test rows may lack ids and tools, since they cannot name those columns separately; a pair without its
        second text is not a row of the task.
        """
        if self.setting.startswith("data.train"):
            return (*task.optional_columns(), "id")
        return tuple(name for name in task.optional_columns() if name == "text2")

    def refuse_none(self, skipped: Sequence[str]) -> None:
        """Raise UserError because there is no usable row."""
        name = self.setting.removeprefix("data.").removeprefix("train.sources.")
        require_rows([], files=self.files, purpose=name, skipped=skipped)


def iter_source_rows(
    data: Data,
    task: Task,
    sources: Iterable[SourceFiles],
    counts: list[int],
    *,
    skipped: list[str],
    keys: RowKeys | None = None,
) -> Iterator[Row]:
    """Stream the usable rows of the sources of a split, and append the number of each source's rows to `counts`.

    keys: receives every row. Raises UserError as `SourceFiles.rows`, and for a source without a usable row.
    """
    records = len(skipped)
    for source in sources:
        counts.append(0)
        before = len(skipped)
        first = sum(counts) + before - records  # place of the source's first record among those of all
        for row in source.rows(data, task, skipped):
            counts[-1] += 1
            if keys is not None:
                keys.add(row, source.columns)
            yield dataclasses.replace(row, index=row.index + first) if first else row
        if not counts[-1]:
            source.refuse_none(skipped[before:])


def list_source_files(data: Data) -> dict[Split, list[SourceFiles]]:
    """Return the source files of each split; an empty list if the recipe names none. Raises UserError: no training
    files."""
    sources: dict[Split, list[SourceFiles]] = {"train": [], "dev": [], "test": []}
    train = data.train
    for name, source in (train.sources or {}).items():
        if source.weight:
            setting = f"data.train.sources.{name}"
            own = source.columns
            columns = (data.columns, "data.columns") if own is None else (own, f"{setting}.columns")
            sources["train"].append(SourceFiles(setting, name, source.files, *columns, source.first, source.limit))
    if train.files:
        named = SourceFiles("data.train", None, train.files, data.columns, "data.columns", train.first, train.limit)
        sources["train"] = [named]
    if not sources["train"]:
        raise UserError("data.train.files is empty: name the training rows, for example --data.train.files rows.jsonl")
    for split in SPLITS[1:]:
        files = getattr(data, split)
        if files.files:
            setting = f"data.{split}"
            sources[split] = [SourceFiles(setting, None, files.files, data.columns, "data.columns", None, files.limit)]
    return sources


@dataclass(frozen=True)
class RowAssignment:
    """Rows of each split, as indices into the stream that they are read from.

    train: for each training source, indices into the rows of all of them; sorted. pool: training rows that are not held
    out, before any limit; sorted. apart: for dev and test held out from the training rows: indices into those. own: for
    dev and test with separate files: indices into the rows of those files.
    """

    train: list[np.ndarray]
    pool: np.ndarray
    apart: dict[Split, np.ndarray]
    own: dict[Split, np.ndarray]


def assign_rows(
    data: Data, sources: dict[Split, list[SourceFiles]], counts: dict[Split, list[int]], seed: int, keys: RowKeys | None
) -> RowAssignment:
    """Hold out `data.holdout` of the training rows where dev or test name no files, and apply limits.

    counts: usable rows of each source. keys: of the training rows, if some are held out.
    Raises UserError for a holdout without rows, a limit above the number of rows, and a source of which nothing is
    left.
    """
    pool = np.arange(sum(counts["train"]))
    apart: dict[Split, np.ndarray] = {}
    if keys is not None:
        pool, apart = split_holdout(keys, data.holdout, data.splits_to_fill)
    train, start = [], 0
    for source, count in zip(sources["train"], counts["train"], strict=True):
        rows = pool[(pool >= start) & (pool < start + count)]
        names = () if source.name is None else (source.name,)
        if not len(rows):
            raise UserError(f"{source.setting}: data.holdout leaves none of its {count} rows; give more rows")
        train.append(_apply_limit(rows, source.limit, derive_seed(seed, "limit", "train", *names), source.setting))
        start += count
    own = {split: np.arange(sum(counts[split])) for split in SPLITS[1:] if sources[split]}
    for split_rows in (own, apart):
        for split in split_rows:
            limit, limit_seed = getattr(data, split).limit, derive_seed(seed, "limit", split)
            split_rows[split] = _apply_limit(split_rows[split], limit, limit_seed, f"data.{split}")
    return RowAssignment(train, pool, apart, own)


def _apply_limit(rows: np.ndarray, limit: int | None, seed: int, setting: str) -> np.ndarray:
    if limit is None or not len(rows):
        return rows
    try:
        return np.asarray(limit_rows(rows.tolist(), limit, seed=seed), dtype=rows.dtype)
    except UserError as error:
        raise UserError(f"{setting}.{error}") from None


def build_mixture(data: Data, sizes: Sequence[int]) -> Mixture | None:
    """Return the mixture of the training examples, `sizes` of each source with a weight; None without sources."""
    used = {name: source for name, source in (data.train.sources or {}).items() if source.weight}
    if not used:
        return None
    strict = frozenset(name for name, source in used.items() if source.when_over == "refuse")
    weights = tuple(source.weight for source in used.values())
    return Mixture(tuple(used), weights, tuple(sizes), strict, data.train.weigh)


def count_source_epochs(batches: TrainingDataLoader, mixture: Mixture | None, steps: int) -> list[dict[str, Any]]:
    """Return for each source its share, its examples, and the epochs that `steps` optimizer steps take.

    Raises UserError: a source with `when_over: refuse` ends before the run does.
    """
    total = batches.samples_in(steps)
    if mixture is None:
        return [{"name": None, "share": 1.0, "examples": len(batches), "drawn": total, "epochs": total / len(batches)}]
    records = mixture_record(mixture)
    for i, (record, count) in enumerate(zip(records, batches.samples.counts(total).tolist(), strict=True)):
        name, size = record["name"], record["examples"]
        if name in mixture.strict and batches.repeats_source(steps, i):
            raise UserError(
                f"data.train.sources.{name}: its {size:,} samples are over before the {steps:,} steps are, which take "
                f"{count:,}; give more rows, a smaller weight or fewer steps, or set when_over: repeat"
            )
        del record["weight"]
        record |= {"drawn": count, "epochs": count / size}
    return records


def format_source_epochs(sources: Sequence[dict[str, Any]], steps: int, *, approximate: bool) -> list[str]:
    """Format the result of `count_source_epochs`; `approximate` for packed examples, whose number is an estimate."""
    word = "about " if approximate else ""
    if sources[0]["name"] is None:
        epochs = f"{sources[0]['epochs']:.2f}".removesuffix(".00")
        count = "one epoch" if epochs == "1" else f"{epochs} epochs"
        return [f"{steps:,} step{'s' * (steps != 1)}: {word}{count} of {sources[0]['examples']:,} rows"]
    return [
        f"source {source['name']}: {source['share']:.1%} of {source['of']}, {source['examples']:,} samples, {word}"
        f"{source['epochs']:.2f} epochs in {steps:,} steps"
        for source in sources
    ]


def mixture_record(mixture: Mixture) -> list[dict[str, Any]]:
    """Return each source's weight, share of the examples or tokens, and number of examples, for the manifest."""
    shares, unit = SampleProportions(mixture.weights).shares, _UNITS[mixture.weigh]
    return [
        {"name": name, "weight": weight, "share": share, "of": unit, "examples": size}
        for name, weight, share, size in zip(mixture.names, mixture.weights, shares, mixture.sizes, strict=True)
    ]


def check_classes(recipe: Recipe, names: Sequence[str] | None) -> None:
    """Raise UserError if a classifier has fewer than two classes.

    names: the classes in head order; None for a task without classes.
    """
    task = recipe.task
    if names is None or len(names) > 1 or task.multi:
        return
    present = f"there is only {names[0]!r}" if names else "there is none"
    raise UserError(
        f"task.kind: {task.kind} chooses among two classes or more, and {present}; data.columns.label (now "
        f"{recipe.data.columns.label!r}) says where the rows have theirs, and task.labels of classify names them all"
    )


def sample_train_for_eval(recipe: Recipe, train: Sequence[Example]) -> Sequence[Example]:
    """Return the training examples to evaluate: `eval.train_limit` of them, drawn by seed because a file may be sorted
    by class. A larger limit contains a smaller one."""
    limit = recipe.eval.train_limit or 0
    if limit >= len(train):
        return train
    return limit_rows(train, limit, seed=derive_seed(recipe.train.seed, "judge", "train")) if limit else []


def check_eos_counts(recipe: Recipe, splits: Iterable[Sequence[Example]]) -> None:
    """Refuse rows of a split that a head over an encoder-decoder cannot take in one batch: those with different numbers
    of end-of-sequence tokens, such as pairs and single texts. Raises UserError."""
    if not recipe.task.traits.is_sequence_level:
        return
    token = open_backbone(recipe.backbone).judged_token
    for examples in splits if token is not None else ():
        rows = ColumnarExamples.of(examples).ragged("input_ids")
        if rows is None:
            continue
        flat, starts, lengths = rows
        before = np.concatenate([[0], np.cumsum(flat == token)])
        ends = before[starts + lengths] - before[starts]
        if ends.min() == 0:
            line = examples[int(ends.argmin())].where
            raise UserError(
                f"{line}: this row ends without the end-of-sequence token at which the head of {recipe.backbone!r} "
                "reads it; take a backbone whose tokenizer adds it"
            )
        if ends.min() != ends.max():
            few, many = examples[int(ends.argmin())].where, examples[int(ends.argmax())].where
            raise UserError(
                f"{many}: this row has {ends.max()} end-of-sequence tokens and {few} has {ends.min()}, and the head of "
                f"{recipe.backbone!r} takes no such rows together; let all of them have a second text "
                "(data.columns.text2) or none, and no text that token"
            )


def check_token_ids(recipe: Recipe, splits: Iterable[Sequence[Example]]) -> None:
    """Refuse rows with a token that the tokenizer added and the backbone's embedding lacks. Raises UserError."""
    backbone = open_backbone(recipe.backbone)
    size = getattr(backbone.config.get_text_config(), "vocab_size", None)
    if size is None or len(backbone.tokenizer) <= size:
        return
    for examples, name in itertools.product(splits, ("input_ids", "decoder_ids", "rejected_ids")):
        rows = ColumnarExamples.of(examples).ragged(name)
        if rows is not None:
            flat, starts, lengths = rows
            before = np.concatenate([[0], np.cumsum(flat >= size)])
            beyond = before[starts + lengths] > before[starts]
            if beyond.any():
                raise UserError(
                    f"{examples[int(beyond.argmax())].where}: the tokenizer of {recipe.backbone!r} has a token for a "
                    f"part of this row, and its embedding, of {size:,} tokens, does not; leave the row out"
                )


def check_strict_sources(recipe: Recipe, train: Sequence[Example], mixture: Mixture | None, *, seed: int) -> None:
    """Refuse a source with `when_over: refuse` that ends before the fine-tune, before anything is trained.

    seed: of the stage. Raises UserError as `count_source_epochs` does.
    """
    if mixture is None or not mixture.strict:
        return
    count_source_epochs(build_preview_loader(recipe, train, mixture, seed=seed), mixture, recipe.train.steps)


def build_preview_loader(
    recipe: Recipe, train: Sequence[Example], mixture: Mixture | None, *, seed: int
) -> TrainingDataLoader:
    """Return a data loader of the stage for counting, before there is a model; rows are padded with zeros.

    seed: of the stage. Raises UserError as `TrainingDataLoader` does.
    """
    settings, task = recipe.train, recipe.task
    masking = task.masking(open_backbone(recipe.backbone).tokenizer) if task.traits.masks_tokens else None
    return TrainingDataLoader(
        train, task=recipe.task, batch_size=settings.batch_size, accumulate=settings.accumulate,
        seed=seed, max_length=settings.max_length, pad_id=0, mixture=mixture,
        group=settings.group, masking=masking,
    )  # fmt: skip


def format_padding(batches: TrainingDataLoader, train: Train) -> str:
    """Format the share of padding in the first optimizer steps."""
    steps = min(train.steps, _PADDING_STEPS)
    share = batches.padding(steps)
    advice = "" if batches.packed or train.group or share < _HIGH_PADDING else "; train.group: length would leave less"
    return f"padding: {share:.1%} of the tokens of the first {steps} steps{advice}"


def epochs_to_steps(resolved: Resolved, train: Sequence[Example], *, seed: int) -> Resolved:
    """Return `resolved` with `train.steps` in place of `train.epochs`, if set, and the number of rows in the origin.

    The number of optimizer steps is ⌈epochs · rows / (batch_size · accumulate)⌉: epochs follow each other without a
    gap, so each row is used at least ⌊epochs⌋ times. For packed rows this is approximate: those of the first epoch are
    counted, and each epoch is packed again.

    train: The encoded training examples.
    seed: Seed of the stage, by which rows are packed.
    Raises UserError: more optimizer steps than a stage may have.
    """
    recipe, epochs = resolved.recipe, resolved.recipe.train.epochs
    if epochs is None:
        return resolved
    packed = recipe.task.pack
    rows = len(build_preview_loader(recipe, train, None, seed=seed).epoch(0)) if packed else len(train)
    each = recipe.train.batch_size * recipe.train.accumulate
    steps = math.ceil(Fraction(repr(epochs)) * rows / each)  # exact, from the number as written: 1.1 · 10 rows are 11
    origin = f"train.epochs {epochs:g} of {rows:,} {'packed ' if packed else ''}rows"
    if steps > MAX_STEPS:
        raise UserError(f"{origin} are {steps:,} steps, above the {MAX_STEPS:,} that a stage may have; give fewer")
    return resolved.with_values("train", {"steps": (steps, origin), "epochs": (None, "counted as train.steps")})
