"""Data pipeline: read files, hold out, subset, add label noise, tokenise. Finds bad input early."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatshift.experiments.data.checks import (
    Finding,
    RowChecks,
    class_counts,
    format_class_counts,
    locate_findings,
    refuse_findings,
)
from flatshift.experiments.data.encode import (
    Routed,
    encode_rows,
    input_paths,
    is_large,
    open_token_cache,
    stream_rows,
    survey_rows,
)
from flatshift.experiments.data.holdout import SPLITS, RowKeys, Split, content_hash, cut_documents
from flatshift.experiments.data.lengths import check_answer_room, iter_position_warnings
from flatshift.experiments.data.sources import (
    SourceFiles,
    assign_rows,
    build_mixture,
    check_classes,
    check_eos_counts,
    check_token_ids,
    iter_source_rows,
    list_source_files,
)
from flatshift.experiments.recipe.schema import Recipe
from flatshift.finetune.atomic import read_json_object
from flatshift.finetune.data.columns import ColumnarExamples, ExampleWriter, open_examples
from flatshift.finetune.data.config import Columns
from flatshift.finetune.data.example import Example
from flatshift.finetune.data.files import expand_files
from flatshift.finetune.data.formats import SAMPLE
from flatshift.finetune.data.labels import Units, fit_units, label_index
from flatshift.finetune.data.mixture import Mixture
from flatshift.finetune.data.noise import flip_preferences, flip_row_labels, replace_answers, shuffle_tokens
from flatshift.finetune.data.preference import swap_answers
from flatshift.finetune.data.rows import Row, read_rows, require_rows
from flatshift.finetune.data.token_cache import CacheError
from flatshift.finetune.errors import UserError
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.seeds import derive_seed
from flatshift.finetune.tasks import Task
from flatshift.finetune.tasks.regress import standardised_layer
from flatshift.finetune.train.trace.examples import Recording


@dataclass(frozen=True)
class SplitRows:
    """Rows of each split as read; empty for a split without files.

    skipped: `file:line: reason` of each bad row, if those are skipped. records: number of records in the training
    files, including bad and held-out rows. label_names: classes in head order, those of the task, or of all training
    rows before any was held out or dropped. sizes: training rows of each source; the sources follow one another in
    `train`. pool: training rows before any limit, in the same order: label noise is drawn over them, so that it is the
    same one whatever the limit. notes: on how dev and test rows were held out.
    """

    train: list[Row]
    dev: list[Row]
    test: list[Row]
    skipped: list[str]
    records: int
    label_names: tuple[str, ...] | None
    sizes: list[int]
    pool: list[Row]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class PreparedData:
    """Encoded examples of each split, with counts and notes from their preparation.

    flipped: ids of the training rows whose label was changed by noise. true_labels: original class of each of them by
    id, for classification. dropped: training rows longer than `train.max_length`. mixture: of the sources in `train`,
    if there are several. units: normalisation of the targets of a regression. checks: findings of `data.checks`.
    """

    train: Sequence[Example]
    dev: Sequence[Example]
    test: Sequence[Example]
    label_names: tuple[str, ...] | None
    truncated: int
    skipped: list[str]
    flipped: list[str]
    true_labels: dict[str, int] = field(default_factory=dict)
    dropped: int = 0
    mixture: Mixture | None = None
    notes: tuple[str, ...] = ()
    units: Units | None = None
    checks: tuple[Finding, ...] = ()


def read_splits(recipe: Recipe) -> SplitRows:
    """Read train, dev and test rows; hold out `data.holdout` where dev or test name no files; apply limits.

    Raises UserError for missing files or columns, bad rows, and splits without a usable row.
    """
    data, task = recipe.data, recipe.task
    sources = list_source_files(data)
    skipped: list[str] = []
    rows: dict[Split, list[Row]] = {}
    counts: dict[Split, list[int]] = {split: [] for split in SPLITS}
    records = 0
    keys = RowKeys(task.input_format.columns()) if data.splits_to_fill else None
    for split in SPLITS:
        train_keys = keys if split == "train" else None
        source_rows = iter_source_rows(data, task, sources[split], counts[split], skipped=skipped, keys=train_keys)
        rows[split] = list(source_rows)
        records = records or len(rows["train"]) + len(skipped)
    names = task.class_names(rows["train"])
    cut = None
    if keys is not None and task.traits.splits_documents:
        cut = cut_documents(rows["train"], data.holdout, data.splits_to_fill)
    if cut is not None:  # by their text, not by rows
        rows |= cut
        keys = None
    train = rows["train"]
    assignment = assign_rows(data, sources, counts, recipe.train.seed, keys)
    for split in SPLITS[1:]:
        if split in assignment.own:
            rows[split] = [rows[split][i] for i in assignment.own[split]]
        elif split in assignment.apart:
            rows[split] = [train[i] for i in assignment.apart[split]]
    return SplitRows(
        [train[i] for source in assignment.train for i in source], rows["dev"], rows["test"], skipped, records, names,
        sizes=[len(source) for source in assignment.train], pool=[train[i] for i in assignment.pool],
        notes=() if cut is None else (describe_cut(cut, data.holdout),),
    )  # fmt: skip


def describe_cut(cut: Mapping[Split, Sequence[Row]], share: float) -> str:
    """Return the sentence on documents of which an end is set apart."""
    train, *splits = cut
    documents = "the document is" if len(cut[train]) == 1 else f"each of {len(cut[train])} documents is"
    ends = " and ".join(splits) + " from its end" + (" each" if len(splits) > 1 else "")
    return f"data.holdout: {documents} cut, {share:g} of it for {ends}"


def prepare_data(recipe: Recipe) -> PreparedData:
    """Read and encode a recipe's rows, or load them from `data.cache`.

    Raises UserError for missing files, columns or labels, empty splits, labels that do not fit, fewer than two classes,
    findings that `data.checks` refuses, and a cache directory that cannot be written to.
    """
    cache = open_token_cache(recipe)
    if cache is None or isinstance(cache, str):
        return _with_notes(_prepare(recipe, None)[0], () if cache is None else (cache,))
    store, key = cache
    try:
        entry = store.get(key, lambda folder: _prepare(recipe, folder)[1])
    except CacheError as error:
        if recipe.data.cache != "auto":
            raise UserError(f"data.cache: {error}; name a directory with room that can be written to") from error
        return _with_notes(_prepare(recipe, None)[0], (f"token cache: not used ({error})",))
    paths = [str(path) for path in input_paths(recipe)]
    splits = {split: open_examples(entry.folder / split, entry.metadata["rows"][split], paths) for split in SPLITS}
    return _with_notes(_build_prepared(recipe, splits, entry.metadata), entry.notes)


def sample_split_warning(recipe: Recipe) -> list[str]:
    """Warn if the user's own training rows would be evaluated on a shipped sample that the recipe names."""
    data = recipe.data
    if not data.train.all_files or any(name.startswith(SAMPLE) for name in data.train.all_files):
        return []
    return [
        f"{split}: {', '.join(files.files)} of the recipe, next to training rows of your own; --data.{split}.files "
        f"names others, '[]' with --data.holdout 0.2 takes some of the training rows"
        for split, files in (("dev", data.dev), ("test", data.test))
        if any(name.startswith(SAMPLE) for name in files.files)
    ]


def missing_class_notes(prepared: PreparedData) -> list[str]:
    """Return a note for each split that has no row of some class."""
    names, notes = prepared.label_names, []
    for split, effect in (("train", "cannot be learned"), ("dev", "are not measured"), ("test", "are not measured")):
        if names is not None and (examples := getattr(prepared, split)):
            missing = [name for name, count in class_counts(ColumnarExamples.of(examples), names).items() if not count]
            if 0 < len(missing) < len(names):
                few = f"{len(missing):,} of {len(names):,} classes"
                notes.append(f"{split}: no row of {few}, which {effect} (first {missing[0]!r})")
    return notes


_KNOWN = {"train": "were trained on", "dev": "are dev rows of the run, by which its best step was chosen"}


class KnownRows:
    """Texts that a run has read before it is evaluated on other files, and the rows of those that have them."""

    def __init__(self, recipe: Recipe) -> None:
        """Read the rows of the run's recipe again; `warnings` names the reason if that is not possible."""
        self._uses: dict[int, str] = {}
        self._matches: dict[str, list[str]] = {}
        self._total, self._problem, self._prompt = 0, "", recipe.task.input_format.columns()
        try:
            if is_large(recipe):
                self._problem = "its rows are too many"
                return
            splits = read_splits(recipe)
            for use, rows in (("dev", splits.dev), ("train", splits.train)):
                self._uses |= {content_hash(row, recipe.data.columns, self._prompt): use for row in rows}
        except UserError as error:
            self._problem = str(error)

    def compare(self, rows: Iterable[Row], columns: Columns) -> Iterator[Row]:
        """Yield `rows`, read with `columns`, and count those with a known text."""
        for row in rows:
            self._total += 1
            if (use := self._uses.get(content_hash(row, columns, self._prompt))) is not None:
                self._matches.setdefault(use, []).append(f"{row.id!r} ({row.where})")
            yield row

    def warnings(self) -> list[str]:
        """Return a sentence for each use of rows that were compared, with their number and an example."""
        if self._problem:
            return [f"the rows are not compared with those of the run: {self._problem}"]
        return [
            f"warning: {len(examples):,} of {self._total:,} rows {_KNOWN[use]}, for example {examples[0]}: they say "
            "little about new rows"
            for use, examples in self._matches.items()
        ]


def prepare_eval_data(
    recipe: Recipe, files: Sequence[str], *, run: Path, known: KnownRows | None = None
) -> PreparedData:
    """Encode the rows of `files` as test rows of a finished run, with the classes and units that it was trained with.

    These come from its manifest (`build_label_record`), so the run's own data files are not needed. known: compares
    the rows.
    Raises UserError for missing files or columns, rows without a class of the run, and files without a usable row.
    """
    labels, units = read_label_record(recipe, run)
    source = SourceFiles("--data", None, tuple(files), recipe.data.columns, "data.columns")
    skipped: list[str] = []
    rows = source.rows(recipe.data, recipe.task, skipped)
    if known is not None:
        rows = known.compare(rows, recipe.data.columns)
    encoded = encode_rows(
        recipe, (("test", 0, row) for row in rows), task=recipe.task, labels=labels, units=units,
        paths=[str(path) for path in expand_files(files)], name="--data",
    )  # fmt: skip
    skipped += encoded.skipped
    test = encoded.splits["test"]
    if not test:
        source.refuse_none(skipped)
    check_eos_counts(recipe, [test])
    check_token_ids(recipe, [test])
    notes = (*encoded.notes, *(known.warnings() if known is not None else ()))
    return PreparedData([], [], test, labels, encoded.truncated, skipped, [], notes=notes, units=units)


def build_check_record(prepared: PreparedData) -> dict[str, Any]:
    """Return the training rows of each class and the findings of `data.checks`, for the manifest."""
    return {"classes": _class_counts(prepared), "findings": [dataclasses.asdict(one) for one in prepared.checks]}


def format_data_checks(prepared: PreparedData, *, whole: bool = False) -> list[str]:
    """Format the classes and findings of `data.checks`, one per line; `whole`: every class and known example."""
    counts = _class_counts(prepared)
    lines = [] if counts is None else [format_class_counts(counts, whole=whole)]
    for finding in prepared.checks:
        lines.append(f"{finding} (data.checks.{finding.kind})")
        lines += [f"  {example}" for example in finding.examples[1:]] if whole else []
    return [f"data: {line}" for line in lines]


def _class_counts(prepared: PreparedData) -> dict[str, int] | None:
    names = prepared.label_names
    return None if names is None else class_counts(ColumnarExamples.of(prepared.train), names)


def build_label_record(prepared: PreparedData) -> dict[str, Any]:
    """Return the classes in head order and the units of targets, both of the training rows, for the manifest."""
    units = None if prepared.units is None else dataclasses.asdict(prepared.units)
    return {"label_names": prepared.label_names, "units": units}


def read_label_record(recipe: Recipe, run: Path) -> tuple[tuple[str, ...] | None, Units | None]:
    """Return the classes in head order and the units of targets that `run` was trained with, from its manifest."""
    task = recipe.task
    if task.labels is not None or not (task.has_classes or task.traits.has_targets):
        return task.labels, None
    file = run / "manifest.json"
    if not file.is_file():
        raise UserError(f"{file} is missing, which tells the run's classes or units; copy it along with the rest")
    manifest = read_json_object(file, "label_names", "units")
    names, units = manifest["label_names"], manifest["units"]
    return (None if names is None else tuple(names)), (None if units is None else Units(**units))


def _with_notes(prepared: PreparedData, notes: Sequence[str]) -> PreparedData:
    return dataclasses.replace(prepared, notes=(*notes, *prepared.notes))


def _prepare(recipe: Recipe, folder: Path | None) -> tuple[PreparedData, dict[str, Any]]:
    """Return the encoded splits, in `folder` if given, and everything else about them as plain values."""
    noise, task = recipe.data.label_noise, recipe.task
    paths = [str(path) for path in input_paths(recipe)]
    flipped: list[str] = []
    pool: list[str] = []
    true: dict[str, int] = {}
    notes: tuple[str, ...] = ()
    targets: Sequence[float]
    if noise or not is_large(recipe):
        rows = read_splits(recipe)
        skipped, labels, source_count, notes = rows.skipped, rows.label_names, len(rows.sizes), rows.notes
        train, flipped = _add_label_noise(recipe, rows)
        pool = [row.id for row in rows.pool]
        routed = _route_rows(train, rows)
        targets = [row.values["label"] for row in train] if task.traits.has_targets else []
        if flipped and labels is not None and task.one_class:
            wrong = set(flipped)
            true = {row.id: label_index(row, labels) for row in rows.train if row.id in wrong}
    else:
        survey = survey_rows(recipe)
        skipped, labels, source_count = [], survey.labels, len(list_source_files(recipe.data)["train"])
        routed = stream_rows(recipe, survey, skipped)
        targets = survey.targets
    units = fit_units(targets, standardised_layer(task, recipe.backbone)) if task.traits.has_targets else None
    check_classes(recipe, labels)
    tokenizer = open_backbone(recipe.backbone).tokenizer
    shuffle = bool(noise) and task.traits.noise_level == "tokens"
    encoded = encode_rows(
        recipe, routed, task=task, labels=labels, units=units, paths=paths, folder=None if shuffle else folder,
        source_count=source_count, checks=RowChecks(recipe, tokenizer, wrong=flipped),
    )  # fmt: skip
    splits = encoded.splits
    if shuffle:
        examples, flipped = shuffle_tokens(
            splits["train"], rate=noise, fixed=set(tokenizer.all_special_ids), seed=_noise_seed(recipe), pool=pool
        )
        splits["train"] = ColumnarExamples.of(examples)
        if folder is not None:
            for split in SPLITS:
                (folder / split).mkdir()
                writer = ExampleWriter(paths, folder / split)
                writer.add(splits[split])
                writer.close()
    if (encoded.dropped or encoded.skipped) and flipped:  # such rows are not training rows
        train_ids = {example.id for example in splits["train"]}
        flipped = [name for name in flipped if name in train_ids]
        true = {name: label for name, label in true.items() if name in train_ids}
    record = {
        "rows": {split: len(examples) for split, examples in splits.items()},
        "sizes": encoded.sizes,
        "label_names": labels,
        "truncated": encoded.truncated,
        "dropped": encoded.dropped,
        "skipped": [*skipped, *encoded.skipped],
        "flipped": flipped,
        "true_labels": true,
        "notes": [*notes, *encoded.notes],
        "units": None if units is None else dataclasses.asdict(units),
        "checks": encoded.checks,
    }
    return _build_prepared(recipe, splits, record), record


def _build_prepared(
    recipe: Recipe, splits: Mapping[Split, ColumnarExamples], record: Mapping[str, Any]
) -> PreparedData:
    check_eos_counts(recipe, splits.values())
    check_token_ids(recipe, splits.values())
    check_answer_room(recipe, splits)
    findings = locate_findings(record["checks"], splits)
    refuse_findings(findings, recipe.data.checks)
    names, units = record["label_names"], record["units"]
    return PreparedData(
        splits["train"], splits["dev"], splits["test"], label_names=None if names is None else tuple(names),
        truncated=record["truncated"], skipped=record["skipped"], flipped=record["flipped"],
        true_labels=record["true_labels"], dropped=record["dropped"],
        mixture=build_mixture(recipe.data, record["sizes"]),
        notes=(*record["notes"], *iter_position_warnings(recipe, splits.values())),
        units=None if units is None else Units(**units), checks=findings,
    )  # fmt: skip


def _route_rows(train: Sequence[Row], rows: SplitRows) -> Routed:
    start = 0
    for number, size in enumerate(rows.sizes):
        yield from (("train", number, row) for row in train[start : start + size])
        start += size
    yield from (("dev", 0, row) for row in rows.dev)
    yield from (("test", 0, row) for row in rows.test)


def _noise_seed(recipe: Recipe) -> int:
    return derive_seed(recipe.train.seed, "label-noise")


def _add_label_noise(recipe: Recipe, rows: SplitRows) -> tuple[list[Row], list[str]]:
    """Return the training rows with `data.label_noise`, if applied before encoding, and the ids of changed rows."""
    rate, task, seed = recipe.data.label_noise, recipe.task, _noise_seed(recipe)
    if not rate or task.traits.noise_level != "rows":
        return rows.train, []
    if task.traits.is_answer_level:
        noisy, flipped = flip_preferences(rows.pool, exchange=swap_answers, rate=rate, seed=seed)
    elif rows.label_names is not None and not task.multi:
        noisy, flipped = flip_row_labels(rows.pool, rate=rate, label_names=rows.label_names, seed=seed)
    else:
        columns = task.input_format.answer_columns()
        noisy, flipped = replace_answers(rows.pool, columns=columns, rate=rate, seed=seed)
    noisy_rows, wrong = {row.id: row for row in noisy}, set(flipped)
    return [noisy_rows[row.id] for row in rows.train], [row.id for row in rows.train if row.id in wrong]


def noise_record(recipe: Recipe, prepared: PreparedData) -> dict[str, Any]:
    """Return the content of `label_noise.json`: rate, ids of training rows with a wrong label, original classes."""
    names = prepared.label_names
    true = {name: names[index] for name, index in prepared.true_labels.items()} if names is not None else {}
    return {"rate": recipe.data.label_noise, "rows": len(prepared.train), "ids": prepared.flipped, "true": true}


def choose_recording(recipe: Recipe, prepared: PreparedData) -> Recording | None:
    """Return the rows to record for the `record` block; None without it."""
    if recipe.record is None:
        return None
    return Recording.choose(
        recipe.record, train=prepared.train, dev=prepared.dev, test=prepared.test, seed=recipe.train.seed,
        flipped=prepared.flipped if recipe.data.label_noise else None, true_labels=prepared.true_labels,
    )  # fmt: skip


def prepare_warm_up_data(
    recipe: Recipe, files: Sequence[str], columns: Columns, task: Task, own: Sequence[Row] = ()
) -> PreparedData:
    """Encode the rows of `files` and the target's `own` as training examples of `task`, for a warm-up that reads
    `warmup.own` of its tokens from the latter."""
    assert recipe.warmup is not None
    selected = require_rows(read_rows(files, columns=columns), files=files, purpose="warm-up") if files else ()
    sources = {"selected": selected, "own": (Row({"text": row.values["text"]}, row.id, row.where) for row in own)}
    used = [name for name, there in (("selected", files), ("own", own)) if there]
    encoded = encode_rows(
        recipe, (("train", number, row) for number, name in enumerate(used) for row in sources[name]), task=task,
        labels=None, paths=[str(path) for path in expand_files(files)], source_count=len(used), name="warm-up",
    )  # fmt: skip
    train, notes = encoded.splits["train"], tuple(iter_position_warnings(recipe, encoded.splits.values()))
    weights = {"selected": 1 - recipe.warmup.own, "own": recipe.warmup.own}
    mixture = Mixture(tuple(used), tuple(weights[name] for name in used), tuple(encoded.sizes), weigh="tokens")
    return PreparedData(
        train, [], [], None, encoded.truncated, encoded.skipped, [], dropped=encoded.dropped,
        mixture=mixture if len(used) > 1 else None, notes=notes,
    )  # fmt: skip
