"""Data pipeline: read files, hold out, subset, add label noise, tokenise. Finds bad input early."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from flatshift.experiments.data.holdout import SPLITS, RowKeys, Split, cut_documents
from flatshift.experiments.data.lengths import check_answer_room, iter_position_warnings
from flatshift.experiments.data.sources import (
    SourceFiles,
    assign_rows,
    build_mixture,
    check_classes,
    check_eos_counts,
    has_holdout,
    list_source_files,
)
from flatshift.experiments.recipe.schema import Recipe
from flatshift.finetune.atomic import read_json_object
from flatshift.finetune.config import Columns
from flatshift.finetune.data.columns import ColumnarExamples, ExampleWriter, open_examples
from flatshift.finetune.data.example import Example
from flatshift.finetune.data.files import expand_files
from flatshift.finetune.data.formats import SAMPLE
from flatshift.finetune.data.labels import Units, label_index
from flatshift.finetune.data.mixture import Mixture
from flatshift.finetune.data.noise import shuffle_tokens
from flatshift.finetune.data.rows import Row, read_rows, require_rows
from flatshift.finetune.data.token_cache import CacheError
from flatshift.finetune.errors import UserError
from flatshift.finetune.seeds import derive_seed
from flatshift.finetune.tasks import Task

if TYPE_CHECKING:
    from flatshift.finetune.train.trace.recording import Recording


@dataclass(frozen=True)
class SplitRows:
    """Rows of each split as read; empty for a split without files."""

    train: list[Row]
    dev: list[Row]
    test: list[Row]
    skipped: list[str]
    """`file:line: reason` of each bad row, if those are skipped."""
    records: int
    """Records in the training files, including bad and held-out rows."""
    label_names: tuple[str, ...] | None
    """Classes in head order: those of the task, or of all training rows before any was held out or dropped."""
    sizes: list[int] = field(default_factory=list)
    """Training rows of each source; the sources follow one another in `train`."""
    pool: list[Row] = field(default_factory=list)
    """The training rows before any limit, in the same order: label noise is drawn over them, so that it is the same one
    whatever the limit"""
    notes: tuple[str, ...] = ()
    """Notes on how dev and test rows were held out."""


@dataclass(frozen=True)
class PreparedData:
    """Encoded examples of each split, with counts and notes from their preparation."""

    train: Sequence[Example]
    dev: Sequence[Example]
    test: Sequence[Example]
    label_names: tuple[str, ...] | None
    truncated: int
    skipped: list[str]
    flipped: list[str]
    """Ids of the training rows whose label was changed by noise."""
    true_labels: dict[str, int] = field(default_factory=dict)
    """Original class of each of them by id; for classification."""
    dropped: int = 0
    """Training rows dropped because they are longer than `train.max_length`."""
    mixture: Mixture | None = None
    """Mixture of the sources in `train`, if there are several."""
    notes: tuple[str, ...] = ()
    """Notes for the user on the preparation and the encoding of each split."""
    units: Units | None = None
    """Normalisation of the targets of a regression."""
    checks: tuple[Finding, ...] = ()
    """Findings of `data.checks`."""


def read_splits(recipe: Recipe) -> SplitRows:
    """Read train, dev and test rows; hold out `data.holdout` where dev or test name no files; apply limits.

    Raises UserError for missing files or columns, bad rows, and splits without a usable row.
    """
    data, task = recipe.data, recipe.task
    parts = list_source_files(data)
    skipped: list[str] = []
    rows: dict[Split, list[Row]] = {split: [] for split in SPLITS}
    counts: dict[Split, list[int]] = {split: [] for split in SPLITS}
    records = 0
    keys = RowKeys() if has_holdout(data) else None
    for split in SPLITS:
        for part in parts[split]:
            before = len(skipped)
            found = list(part.rows(data, task, skipped))
            if keys is not None and split == "train":
                for row in found:
                    keys.add(row, part.columns)
            if not found:
                part.refuse_none(skipped[before:])
            rows[split] += found
            counts[split].append(len(found))
        records = records or len(rows["train"]) + len(skipped)
    names = task.class_names(rows["train"])
    cut = None
    if keys is not None and task.documents:
        cut = cut_documents(rows["train"], data.holdout, [split for split in SPLITS[1:] if not parts[split]])
    if cut is not None:  # by their text, not by rows
        rows |= cut
        keys = None
    train = rows["train"]
    chosen = assign_rows(data, parts, counts, recipe.train.seed, keys)
    held: dict[Split, list[Row]] = {split: [] for split in SPLITS}
    for split in SPLITS[1:]:
        if split in chosen.own:
            held[split] = [rows[split][i] for i in chosen.own[split]]
        elif split in chosen.apart:
            held[split] = [train[i] for i in chosen.apart[split]]
        elif cut is not None:
            held[split] = rows[split]
    kept = [train[i] for places in chosen.train for i in places]
    sizes = [len(places) for places in chosen.train]
    pool = [train[i] for i in chosen.pool]
    notes = () if cut is None else (cut_line(cut, data.holdout),)
    return SplitRows(kept, held["dev"], held["test"], skipped, records, names, sizes, pool, notes)


def cut_line(cut: Mapping[Split, Sequence[Row]], share: float) -> str:
    """The sentence on documents of which an end is set apart."""
    train, *others = cut
    what = "the document is" if len(cut[train]) == 1 else f"each of {len(cut[train])} documents is"
    ends = " and ".join(f"{split}" for split in others)
    return f"data.holdout: {what} cut, {share:g} of it for {ends} from its end" + (" each" if len(others) > 1 else "")


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
        found = store.get(key, lambda folder: _prepare(recipe, folder)[1])
    except CacheError as error:
        if recipe.data.cache != "auto":
            raise UserError(f"data.cache: {error}; name a directory with room that can be written to") from error
        return _with_notes(_prepare(recipe, None)[0], (f"token cache: not used ({error})",))
    paths = [str(path) for path in input_paths(recipe)]
    splits = {split: open_examples(found.folder / split, found.metadata["rows"][split], paths) for split in SPLITS}
    return _with_notes(_build_prepared(recipe, splits, found.metadata), found.notes)


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


def prepare_eval_data(recipe: Recipe, files: Sequence[str], *, run: Path) -> PreparedData:
    """Encode the rows of `files` as test rows of a finished run, with the classes and units that it was trained with.

    These come from its manifest (`build_label_record`), so the run's own data files are not needed.
    Raises UserError for missing files or columns, rows without a class of the run, and files without a usable row.
    """
    from flatshift.finetune.models.backbone import open_backbone

    labels, units = read_label_record(recipe, run)
    part = SourceFiles("--data", None, tuple(files), recipe.data.columns, "data.columns")
    skipped: list[str] = []
    rows = part.rows(recipe.data, recipe.task, skipped)
    made = encode_rows(
        recipe,
        open_backbone(recipe.backbone).tokenizer,
        (("test", 0, row) for row in rows),
        task=recipe.task,
        labels=labels,
        units=units,
        paths=[str(path) for path in expand_files(files)],
        what="--data",
    )
    skipped += made.skipped
    if not made.splits["test"]:
        part.refuse_none(skipped)
    check_eos_counts(recipe, [made.splits["test"]])
    notes = tuple(made.notes)
    return PreparedData([], [], made.splits["test"], labels, made.truncated, skipped, [], notes=notes, units=units)


def build_check_record(prepared: PreparedData) -> dict[str, Any]:
    """Return the training rows of each class and the findings of `data.checks`, for the manifest."""
    counts = (
        None
        if prepared.label_names is None
        else class_counts(ColumnarExamples.of(prepared.train), prepared.label_names)
    )
    return {"classes": counts, "findings": [dataclasses.asdict(one) for one in prepared.checks]}


def format_data_checks(prepared: PreparedData, *, whole: bool = False) -> list[str]:
    """Format the classes and the findings of `data.checks`, one per line; `whole`: every class and every known
    example."""
    lines = []
    if prepared.label_names is not None:
        lines.append(
            format_class_counts(class_counts(ColumnarExamples.of(prepared.train), prepared.label_names), whole=whole)
        )
    for one in prepared.checks:
        lines.append(f"{one} (data.checks.{one.kind})")
        lines += [f"  {example}" for example in one.examples[1:]] if whole else []
    return [f"data: {line}" for line in lines]


def build_label_record(prepared: PreparedData) -> dict[str, Any]:
    """Return the classes in head order and the units of targets, which are derived from training rows, for the
    manifest."""
    units = None if prepared.units is None else dataclasses.asdict(prepared.units)
    return {"label_names": prepared.label_names, "units": units}


def read_label_record(recipe: Recipe, run: Path) -> tuple[tuple[str, ...] | None, Units | None]:
    """Return the classes in head order and the units of targets that `run` was trained with, from its manifest."""
    task = recipe.task
    if task.given_classes is not None or not (task.has_classes or task.has_targets):
        return task.given_classes, None
    file = run / "manifest.json"
    if not file.is_file():
        raise UserError(f"{file} is missing, which tells the run's classes or units; copy it along with the rest")
    noted = read_json_object(file, "label_names", "units")
    names, units = noted["label_names"], noted["units"]
    return (None if names is None else tuple(names)), (None if units is None else Units(**units))


def _with_notes(prepared: PreparedData, notes: Sequence[str]) -> PreparedData:
    """Return `prepared` with `notes` before its own."""
    return dataclasses.replace(prepared, notes=(*notes, *prepared.notes))


def _prepare(recipe: Recipe, folder: Path | None) -> tuple[PreparedData, dict[str, Any]]:
    """Return the encoded splits, in `folder` if given, and everything else about them as plain values."""
    from flatshift.finetune.models.backbone import open_backbone

    noise, task = recipe.data.label_noise, recipe.task
    paths = [str(path) for path in input_paths(recipe)]
    flipped: list[str] = []
    pool: list[str] = []
    true: dict[str, int] = {}
    said: tuple[str, ...] = ()
    if noise or not is_large(recipe):
        rows = read_splits(recipe)
        skipped, labels, parts, said = rows.skipped, rows.label_names, len(rows.sizes), rows.notes
        train, flipped = _add_label_noise(recipe, rows)
        pool = [row.id for row in rows.pool]
        routed = _route_rows(train, rows)
        units = task.units([row.values["label"] for row in train] if task.has_targets else (), recipe.backbone)
        if flipped and labels is not None and task.one_class:
            wrong = set(flipped)
            true = {row.id: label_index(row, labels) for row in rows.train if row.id in wrong}
    else:
        known = survey_rows(recipe)
        skipped, labels, parts = [], known.labels, len(list_source_files(recipe.data)["train"])
        routed = stream_rows(recipe, known, skipped)
        units = task.units(known.targets, recipe.backbone)
    check_classes(recipe, labels)
    tokenizer = open_backbone(recipe.backbone).tokenizer
    shuffle = bool(noise) and task.noise == "tokens"
    made = encode_rows(
        recipe,
        tokenizer,
        routed,
        task=recipe.task,
        labels=labels,
        units=units,
        paths=paths,
        folder=None if shuffle else folder,
        parts=parts,
        checks=RowChecks(recipe, tokenizer, wrong=flipped),
    )
    if shuffle:
        examples, flipped = shuffle_tokens(
            made.splits["train"], rate=noise, fixed=set(tokenizer.all_special_ids), seed=_noise_seed(recipe), pool=pool
        )
        made.splits["train"] = ColumnarExamples.of(examples)
        if folder is not None:
            for split in SPLITS:
                (folder / split).mkdir()
                writer = ExampleWriter(paths, folder / split)
                writer.add(made.splits[split])
                writer.close()
    if made.dropped and flipped:  # rows that `train.overlong` dropped are not training rows
        there = {example.id for example in made.splits["train"]}
        flipped = [name for name in flipped if name in there]
        true = {name: label for name, label in true.items() if name in there}
    about = {
        "rows": {split: len(examples) for split, examples in made.splits.items()},
        "sizes": made.sizes,
        "label_names": labels,
        "truncated": made.truncated,
        "dropped": made.dropped,
        "skipped": [*skipped, *made.skipped],
        "flipped": flipped,
        "true_labels": true,
        "notes": [*said, *made.notes],
        "units": None if units is None else dataclasses.asdict(units),
        "checks": made.checks,
    }
    return _build_prepared(recipe, made.splits, about), about


def _build_prepared(recipe: Recipe, splits: Mapping[Split, ColumnarExamples], about: Mapping[str, Any]) -> PreparedData:
    check_eos_counts(recipe, splits.values())
    check_answer_room(recipe, splits)
    found = locate_findings(about["checks"], splits)
    refuse_findings(found, recipe.data.checks)
    return PreparedData(
        splits["train"],
        splits["dev"],
        splits["test"],
        label_names=None if about["label_names"] is None else tuple(about["label_names"]),
        truncated=about["truncated"],
        skipped=about["skipped"],
        flipped=about["flipped"],
        true_labels=about["true_labels"],
        dropped=about["dropped"],
        mixture=build_mixture(recipe.data, about["sizes"]),
        notes=(*about["notes"], *iter_position_warnings(recipe, splits.values())),
        units=None if about["units"] is None else Units(**about["units"]),
        checks=found,
    )


def _route_rows(train: Sequence[Row], rows: SplitRows) -> Routed:
    """Yield the rows of all splits, each with its split and its source."""
    start = 0
    for number, size in enumerate(rows.sizes):
        yield from (("train", number, row) for row in train[start : start + size])
        start += size
    yield from (("dev", 0, row) for row in rows.dev)
    yield from (("test", 0, row) for row in rows.test)


def _noise_seed(recipe: Recipe) -> int:
    return derive_seed(recipe.train.seed, "label-noise")


def _add_label_noise(recipe: Recipe, rows: SplitRows) -> tuple[list[Row], list[str]]:
    """Return the training rows with `data.label_noise`, if it is applied before encoding, and the ids of the changed
    rows."""
    rate, task, seed = recipe.data.label_noise, recipe.task, _noise_seed(recipe)
    if not rate or task.noise != "rows":
        return rows.train, []
    noisy, flipped = task.with_noise(rows.pool, rate=rate, label_names=rows.label_names, seed=seed)
    by_id, wrong = {row.id: row for row in noisy}, set(flipped)
    return [by_id[row.id] for row in rows.train], [row.id for row in rows.train if row.id in wrong]


def noise_record(recipe: Recipe, prepared: PreparedData) -> dict[str, Any]:
    """Return the content of `label_noise.json`: the rate, the ids of the training rows with a wrong label, and their
    original classes, if any."""
    names = prepared.label_names
    own = {name: names[index] for name, index in prepared.true_labels.items()} if names is not None else {}
    return {"rate": recipe.data.label_noise, "rows": len(prepared.train), "ids": prepared.flipped, "true": own}


def choose_recording(recipe: Recipe, prepared: PreparedData) -> Recording | None:
    """Return the rows to record for the `record` block; None without it."""
    if recipe.record is None:
        return None
    from flatshift.finetune.train.trace.recording import Recording

    return Recording.choose(
        recipe.record,
        train=prepared.train,
        dev=prepared.dev,
        test=prepared.test,
        seed=recipe.train.seed,
        flipped=prepared.flipped if recipe.data.label_noise else None,
        true_labels=prepared.true_labels,
    )


def prepare_warm_up_data(recipe: Recipe, files: Sequence[str], columns: Columns, task: Task) -> PreparedData:
    """Encode the rows of `files` as training examples of `task`, for a warm-up."""
    from flatshift.finetune.models.backbone import open_backbone

    rows = require_rows(read_rows(files, columns=columns), files=files, purpose="warm-up")
    made = encode_rows(
        recipe,
        open_backbone(recipe.backbone).tokenizer,
        (("train", 0, row) for row in rows),
        task=task,
        labels=None,
        paths=[str(path) for path in expand_files(files)],
        what="warm-up",
    )
    notes = tuple(iter_position_warnings(recipe, made.splits.values()))
    return PreparedData(
        made.splits["train"], [], [], None, made.truncated, made.skipped, [], dropped=made.dropped, notes=notes
    )
