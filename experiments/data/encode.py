"""Encoding of rows, on disk or in memory, and the cache of encoded rows.

Small inputs are read once, into memory. Large ones, and hub data sets, are streamed (twice if the classes or the number
of rows must be known first), so that memory does not grow with them.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from flatshift.experiments.data.checks import RowChecks
from flatshift.experiments.data.holdout import SPLITS, RowKeys, Split
from flatshift.experiments.data.sources import assign_rows, iter_source_rows, list_source_files
from flatshift.experiments.recipe.schema import Recipe
from flatshift.finetune.assets import non_weight_files
from flatshift.finetune.cache_directory import cache_root
from flatshift.finetune.data.columns import ColumnarExamples, ExampleWriter
from flatshift.finetune.data.encoding import TruncationCounts
from flatshift.finetune.data.files import expand_files
from flatshift.finetune.data.formats import split_suffix
from flatshift.finetune.data.labels import Units, iter_classes, sort_labels
from flatshift.finetune.data.remote import DataFile, RemoteFile
from flatshift.finetune.data.rows import Row
from flatshift.finetune.data.token_cache import TokenCache, content_key
from flatshift.finetune.errors import UserError, user_path
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.tasks import Task
from flatshift.finetune.tasks.regress import standardised_layer

IN_MEMORY = 128 << 20
"""Bytes of input files up to which rows are held in memory."""
WORTH_KEEPING = 8 << 20
"""Bytes of input files from which on `data.cache: auto` stores the encoded rows."""
_AS_FLOATS = 8  # size of features as Python floats in lists, 32 bytes a number, relative to a Parquet file of float32
_CHUNK = 1024

Routed = Iterable[tuple[Split, int, Row]]
"""Rows with their split and the number of their source (0 outside training)."""


@dataclass
class EncodedSplits:
    """Encoded splits, with the counts of what was lost in encoding.

    sizes: training examples of each source. notes: other losses, as `split: sentence`. checks: findings of `RowChecks`.
    """

    splits: dict[Split, ColumnarExamples]
    sizes: list[int]
    truncated: int = 0
    dropped: int = 0
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)


def encode_rows(
    recipe: Recipe,
    rows: Routed,
    *,
    task: Task,
    labels: tuple[str, ...] | None,
    units: Units | None = None,
    paths: Sequence[str],
    folder: Path | None = None,
    source_count: int = 1,
    name: str | None = None,
    checks: RowChecks | None = None,
) -> EncodedSplits:
    """Encode routed rows into columns, chunk by chunk.

    units: Normalisation of the targets of a regression.
    paths: Files that the rows come from.
    folder: Directory of the columns, with one subdirectory per split; None: memory.
    source_count: Number of training sources.
    name: Name of the rows in messages, if they belong to no split of the recipe.
    checks: Checks to run on the rows.
    Raises UserError: as `encode`; or no row of a split is left, because all are bad or, in training, too long; or more
    of a split or source is truncated or dropped than the recipe allows (`TruncationCounts.refuse`).
    """
    backbone = open_backbone(recipe.backbone)
    settings: dict[str, Any] = {
        "label_names": labels,
        "bad_rows": recipe.data.bad_rows,
        "decoder_start": backbone.decoder_start if task.traits.encoder_decoder else None,
        "truncation": recipe.train.truncation,
        "units": units,
        "features": recipe.adapter.projector,
    }
    encoders: dict[tuple[Split, int], Any] = {}  # one per source: each counts its losses over all rows of the source
    losses: dict[tuple[Split, int], TruncationCounts] = {}
    writers: dict[Split, ExampleWriter] = {}
    for split in SPLITS:
        directory = None if folder is None else folder / split
        if directory is not None:
            directory.mkdir()
        writers[split] = ExampleWriter(paths, directory)
    result = EncodedSplits({}, [0] * source_count)
    skipped: dict[Split, list[str]] = {}
    for split, source, chunk in _iter_chunks(rows):
        if (split, source) not in encoders:
            overlong = recipe.train.overlong
            settings["overlong"] = None if overlong == "drop" and split != "train" else overlong
            # an evaluation split may be so small that one long answer exceeds any allowed share
            split_task = task if split == "train" else task.without_limits()
            encoders[split, source] = split_task.encoder(backbone.tokenizer, recipe.train.max_length, **settings)
            losses[split, source] = TruncationCounts(_describe_source(recipe, split, source, name))
        encoded = encoders[split, source].add(chunk)
        losses[split, source].add(encoded)
        if checks is not None:
            checks.add(split, source, chunk, encoded, writers[split].rows, encoders[split, source])
        writers[split].add(encoded.examples)
        result.truncated += encoded.truncated
        result.dropped += encoded.dropped
        result.skipped += encoded.skipped
        skipped.setdefault(split, []).extend(encoded.skipped)
        if split == "train":
            result.sizes[source] += len(encoded.examples)
    for (split, source), encoder in encoders.items():
        result.notes += [f"{_describe_source(recipe, split, source, name)}: {note}" for note in encoder.close()]
    result.splits = {split: writer.close() for split, writer in writers.items()}
    if checks is not None:
        result.checks = checks.close(result.splits["train"], labels)
    if result.dropped and not result.splits["train"]:
        raise UserError(
            f"train.overlong: drop leaves no training row, as all {result.dropped:,} are longer than train.max_length "
            f"= {recipe.train.max_length} tokens; raise it"
        )
    for (split, _), counts in losses.items():
        if name is None or split == "train":  # the limits of a finished run, evaluated on other rows, cannot be raised
            counts.refuse(task.max_truncated, recipe.train)
        result.notes += counts.notes(recipe.train)
    for split, bad_rows in skipped.items():
        if bad_rows and not result.splits[split]:
            raise UserError(
                f"no {name or split} row is left: {len(bad_rows):,} were skipped, the first for {bad_rows[0]}"
            )
    return result


def _describe_source(recipe: Recipe, split: Split, number: int, name: str | None) -> str:
    source = list_source_files(recipe.data)[split][number].name if split == "train" and name is None else None
    return (name or split) if source is None else f"{split} ({source})"


def _iter_chunks(rows: Routed) -> Iterator[tuple[Split, int, list[Row]]]:
    chunks: dict[tuple[Split, int], list[Row]] = {}
    for split, source, row in rows:
        key = (split, source)
        if key not in chunks:
            for previous in [previous for previous in chunks if previous[0] == split]:  # sources must stay contiguous
                yield *previous, chunks.pop(previous)
        chunk = chunks.setdefault(key, [])
        chunk.append(row)
        if len(chunk) == _CHUNK:
            yield *key, chunks.pop(key)
    for key, chunk in chunks.items():
        yield *key, chunk


def is_large(recipe: Recipe) -> bool:
    """Return True if the rows must be streamed: too large for memory, or of unknown size."""
    sizes = [_file_size(path) for path in input_paths(recipe)]
    known = sum(size for size in sizes if size is not None)
    grown = known * (1 if recipe.adapter.projector is None else _AS_FLOATS)
    return None in sizes or grown > IN_MEMORY


def input_paths(recipe: Recipe) -> list[DataFile]:
    """Return the files of all splits, in reading order."""
    return [
        path
        for sources in list_source_files(recipe.data).values()
        for source in sources
        for path in expand_files(source.files)
    ]


def _file_size(path: DataFile) -> int | None:
    if isinstance(path, RemoteFile):
        return path.size
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size if path.is_file() else None


@dataclass
class RowSurvey:
    """Result of the pass over the rows before encoding.

    routes: for each stream, the number of the split of every row, from 1, or 0 to drop it; None: no row changes its
    split. targets: of the training rows of a regression, in order.
    """

    routes: dict[Split, np.ndarray | None]
    labels: tuple[str, ...] | None
    targets: Sequence[float] = ()


def survey_rows(recipe: Recipe) -> RowSurvey:
    """Count the rows and collect the classes or targets, if they must be known, without keeping a row.

    Raises UserError for bad rows, a split without rows, and whatever `assign_rows` refuses.
    """
    data, task = recipe.data, recipe.task
    sources = list_source_files(data)
    needs_labels = task.has_classes and task.labels is None
    keys = RowKeys(task.input_format.columns()) if data.splits_to_fill else None
    limited = any(source.limit is not None for split in SPLITS for source in sources[split])
    targets = array("d") if task.traits.has_targets else None
    if not (needs_labels or keys is not None or limited or targets is not None):
        return RowSurvey(dict.fromkeys(SPLITS), task.labels)
    counts: dict[Split, list[int]] = {split: [] for split in SPLITS}
    labels: set[str] = set()
    for split in SPLITS:
        train_keys = keys if split == "train" else None
        for row in iter_source_rows(data, task, sources[split], counts[split], skipped=[], keys=train_keys):
            if split == "train" and targets is not None:
                targets.append(row.values["label"])
            elif split == "train":
                labels.update(iter_classes((row,)))
    assignment = assign_rows(data, sources, counts, recipe.train.seed, keys)
    routes: dict[Split, Any] = {split: np.zeros(sum(counts[split]), dtype=np.uint8) for split in SPLITS}
    for rows in assignment.train:
        routes["train"][rows] = 1
    for number, split in enumerate(SPLITS[1:], start=2):
        if split in assignment.apart:
            routes["train"][assignment.apart[split]] = number
        if split in assignment.own:
            routes[split][assignment.own[split]] = number
    trained = () if targets is None else np.asarray(targets)[routes["train"] == 1].tolist()
    return RowSurvey(routes, sort_labels(labels) if needs_labels else task.labels, trained)


def stream_rows(recipe: Recipe, survey: RowSurvey, skipped: list[str]) -> Routed:
    """Stream the rows of every split.

    Raises UserError as `read_rows`, for a source without rows, and if the number of rows differs from that of
    `survey_rows`.
    """
    for split, sources in list_source_files(recipe.data).items():
        route, position, counts = survey.routes[split], 0, list[int]()
        for row in iter_source_rows(recipe.data, recipe.task, sources, counts, skipped=skipped):
            if route is not None and position == len(route):
                raise _row_count_error(split, len(route), "more")
            target = split if route is None else (None, *SPLITS)[route[position]]
            position += 1
            if target is not None:
                yield target, len(counts) - 1 if target == "train" else 0, row
        if route is not None and position < len(route):
            raise _row_count_error(split, len(route), f"only {position:,}")


def _row_count_error(split: Split, counted: int, now: str) -> UserError:
    return UserError(
        f"data.{split}: {counted:,} rows were counted and {now} came when they were read: a file changed, or a hub "
        "data set ended early; start again"
    )


def open_token_cache(recipe: Recipe) -> tuple[TokenCache, str] | str | None:
    """Return the cache for this recipe's rows and their key; the reason if there can be none; None if it is off."""
    setting = recipe.data.cache
    if setting is None:
        return None
    paths = input_paths(recipe)
    sizes = [_file_size(path) for path in paths]
    if setting == "auto" and None not in sizes and sum(size or 0 for size in sizes) < WORTH_KEEPING:
        return None
    names = []
    for path in paths:
        name = content_key(path)
        # the suffix determines the reader
        names.append(None if name is None else f"{name}{''.join(split_suffix(path))}")
        if name is None:
            return f"token cache: not used, as {path} names no commit (hub:NAME@COMMIT:SPLIT)"
    root = cache_root() if setting == "auto" else user_path(setting)
    return TokenCache(root), _cache_key(recipe, names)


def _cache_key(recipe: Recipe, names: Sequence[str | None]) -> str:
    """Return a digest of everything that the encoded splits depend on, except the place of the files."""
    data = dataclasses.asdict(recipe.data)
    data.pop("cache")
    # kinds that are not even searched for
    data["checks"] = [name for name, value in data["checks"].items() if value == "off"]
    sources: list[tuple[str, int, dict[str, Any]]] = []
    for split, split_sources in list_source_files(recipe.data).items():
        data.pop(split)
        for source in split_sources:
            settings = dataclasses.asdict(source)
            settings.pop("files")
            sources.append((split, len(expand_files(source.files)), settings))
    seeded = recipe.data.label_noise or any(settings["limit"] is not None for _, _, settings in sources)
    limits = ("max_length", "truncation", "overlong", "max_dropped", "max_cut")
    train = {name: getattr(recipe.train, name) for name in limits}
    task = dataclasses.asdict(recipe.task)
    task.pop("template", None)  # its text counts, not its path
    template, head = recipe.task.input_format.template_record(), standardised_layer(recipe.task, recipe.backbone)
    # the backbone's files other than weights: tokenizer, configuration and templates
    tokenizer = hashlib.sha256(f"{version('tokenizers')} {version('transformers')}".encode())
    for file in non_weight_files(open_backbone(recipe.backbone).directory):
        tokenizer.update(f"\x1f{file.name}\x1f".encode())
        with file.open("rb") as handle:
            tokenizer.update(hashlib.file_digest(handle, "sha256").digest())
    values = {
        "inputs": names,
        "parts": sources,
        "data": data,
        "task": task,
        "template": template and template["sha256"],
        "head": None if head is None else dataclasses.asdict(head),  # a regression's units are made for it
        "features": None if recipe.adapter.projector is None else dataclasses.asdict(recipe.adapter.projector),
        "train": train,
        "seed": recipe.train.seed if seeded else None,
        "tokenizer": tokenizer.hexdigest(),
        "code": _code_digest(),
    }
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:32]


@functools.cache
def _code_digest() -> str:
    """Return a digest of the source code that encoded rows depend on: another version gets separate cache entries."""
    digest = hashlib.sha256()
    for file in _code_files():
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _code_files() -> list[Path]:
    """Return the source files that encoded rows depend on; their other imports are in the key or affect no row."""
    import flatshift.finetune.compute.protocols
    import flatshift.finetune.data
    import flatshift.finetune.models.backbone
    import flatshift.finetune.seeds
    import flatshift.finetune.tasks

    modules = (flatshift.finetune.compute.protocols, flatshift.finetune.models.backbone, flatshift.finetune.seeds)
    files = [Path(str(module.__file__)) for module in modules]
    for package in (flatshift.finetune.data, flatshift.finetune.tasks):
        files += sorted(Path(str(package.__file__)).resolve().parent.rglob("*.py"))
    here = Path(__file__).resolve().parent
    return [*files, *(here / name for name in ("checks.py", "encode.py", "holdout.py", "sources.py", "splits.py"))]
