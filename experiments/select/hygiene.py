"""Hygiene of a pool before selection, as set in `select.hygiene`.

Writes drops.jsonl (one line for every record that was dropped or cut, with its cause and the id of its match) into the
selection's directory; the counts go into manifest.json.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatshift.experiments.data.checks import iter_texts
from flatshift.experiments.data.splits import read_splits
from flatshift.experiments.recipe.schema import Recipe, Select
from flatshift.experiments.run.console import Console
from flatshift.experiments.select.pool import select_settings
from flatshift.finetune.atomic import json_text
from flatshift.finetune.data.config import Data, Files
from flatshift.finetune.data.rows import Row, limit_rows, read_rows, require_rows
from flatshift.finetune.data.view import RowView
from flatshift.finetune.errors import UserError
from flatshift.finetune.seeds import derive_seed
from flatshift.selection.shards import ShardMap

if TYPE_CHECKING:
    from flatshift.selection.hygiene import CleaningResult, DropList

_BLOCK_ROWS = 4096
_LIMITS = (
    ("decontaminate", "too_short", "evaluation texts are too short to be looked for by their words"),
    ("decontaminate", "common", "evaluation n-grams are so common in the pool that they count as phrases"),
    ("near", "left_out", "pairs in large crowds were not compared"),
)


def clean_rows(
    recipe: Recipe,
    rows: RowView,
    target: Sequence[Row],
    held_out: Sequence[Row],
    directory: Path,
    console: Console,
    shards: ShardMap | None = None,
) -> tuple[RowView, dict[str, Any] | None]:
    """Return the rows of the pool that are kept, in file order, and the manifest entry (None: no step is on).

    held_out: rows of the target's files held out for evaluation. shards: as in `clean_pool`. A record that
    decontamination cut becomes one row per piece, as in `RowView.cut`.

    Raises UserError: no evaluation text for decontamination, pieces together with the user's own features, no record
    left.
    """
    spec = select_settings(recipe)
    settings = spec.hygiene
    compared = set(settings.against) if settings.exact or settings.near is not None else set()
    compared |= {"eval"} if settings.decontaminate is not None else set()
    if spec.eval.files and "eval" not in compared:
        raise UserError(
            "select.eval.files: no step of select.hygiene that is on looks at it; turn on exact, near or decontaminate"
        )
    if not settings.on:
        return rows, None
    if settings.decontaminate is not None and settings.decontaminate.action == "split" and spec.own is not None:
        raise UserError(
            "select.hygiene.decontaminate: a record cut into pieces has no row in features of your own; "
            "set select.hygiene.decontaminate.action to drop"
        )
    from flatshift.selection.hygiene import ReferenceTexts, clean_pool

    started = time.monotonic()
    evaluation_rows = [*held_out, *_evaluation_rows(recipe, spec, console)] if "eval" in compared else []
    evaluation_texts = [(text, row.id) for row in evaluation_rows for text in _all_texts(row)]
    if settings.decontaminate is not None and not evaluation_texts:
        raise UserError(
            "select.hygiene.decontaminate has no evaluation text to look for; name files in select.eval.files, "
            "or data.dev.files and data.test.files"
        )
    references = [
        ReferenceTexts("target", [row.values["text"] for row in target]),
        ReferenceTexts("eval", [text for text, _ in evaluation_texts]),
    ]
    listed = _read_drop_list(spec, rows, console) if settings.drops else None
    with console.task("clean pool", len(rows), "texts") as task:
        cleaned = clean_pool(
            rows.texts, settings, references=references, listed=listed, seed=derive_seed(recipe.train.seed, "hygiene"),
            progress=lambda stage, done: task(done, stage), shards=shards,
        )  # fmt: skip
    named = {"target": [row.id for row in target], "eval": [identity for _, identity in evaluation_texts]}
    with (directory / "drops.jsonl").open("w", encoding="utf-8") as handle:
        for drop in cleaned.drops(lambda some: rows.take(some).ids[:], named):
            handle.write(json_text(drop) + "\n")
    remaining = rows.take(cleaned.kept)
    if cleaned.pieces:
        remaining = remaining.cut(cleaned.pieces.get(row) for row in cleaned.kept.tolist())
    if not len(remaining):
        raise UserError(
            f"select.hygiene leaves no record of the pool's {len(rows):,} ({_drop_summary(cleaned)}); loosen it"
        )
    manifest = {
        "records": len(rows),
        "kept": len(remaining),
        "dropped": cleaned.counts(),
        "cut": len(cleaned.pieces),
        "pieces": sum(map(len, cleaned.pieces.values())),
        "compared_with": {each.name: len(each.texts) for each in references if each.name in compared},
        **({} if listed is None else {"listed": {"entries": len(listed), "unknown": len(listed.unknown)}}),
        **cleaned.diagnostics,
        "seconds": round(time.monotonic() - started, 3),
    }
    console.say(
        f"hygiene: {len(rows):,} records, {len(remaining):,} kept; {_drop_summary(cleaned)}; drops.jsonl has each one"
    )
    for step, name, sentence in _LIMITS:
        if count := cleaned.diagnostics.get(step, {}).get(name):
            console.say(f"note: {count:,} {sentence}")
    return remaining, manifest


def _read_drop_list(spec: Select, rows: RowView, console: Console) -> DropList:
    """Return the entries of `drops`, looked up among the pool's ids.

    Raises UserError: an unreadable file, an entry without an id, or (if bad rows are refused and the whole pool is
    read) one whose id no record has.
    """
    from flatshift.selection.hygiene import DropList

    files = spec.hygiene.drops
    skipped: list[str] = []
    listed = DropList(memory=int(spec.hygiene.memory_gib * 2**29))
    entries = read_rows(files, required=("id",), bad_rows=spec.bad_rows, skipped=skipped, block="select")
    while block := list(islice(entries, _BLOCK_ROWS)):
        matches, reasons = (
            ["" if (value := row.record.get(name)) is None else str(value) for row in block]
            for name in ("match", "why")
        )
        listed.add([row.id for row in block], matches, reasons)
    listed.find(rows.ids)
    unknown = len(listed.unknown)
    if unknown and spec.bad_rows == "refuse" and spec.pool.limit is None:
        row = next(islice(read_rows(files, required=("id",)), int(listed.unknown[0]), None))
        raise UserError(
            f"{row.where}: the pool has no record {row.id!r} ({unknown:,} of {len(listed):,} ids in "
            "select.hygiene.drops are unknown); name the answer for this pool, or count unknown ids by --bad-rows skip"
        )
    if unknown or skipped:
        console.say(f"note: drops: {unknown:,} ids that no record of the pool has, {len(skipped):,} bad entries")
    return listed


def _evaluation_rows(recipe: Recipe, spec: Select, console: Console) -> list[Row]:
    """Return the evaluation rows: dev and test of the recipe (held out by `data.holdout` if no file is named), and
    `select.eval`."""
    rows: list[Row] = []
    data = recipe.data
    sources: list[tuple[str, Files, Data | Select]] = [("evaluation", spec.eval, spec)]
    if data.train.all_files:
        splits = read_splits(recipe)
        rows += [*splits.dev, *splits.test]
    else:
        sources = [("dev", data.dev, data), ("test", data.test, data), *sources]
    for name, files, settings in sources:
        if files.files:
            skipped: list[str] = []
            read = read_rows(
                files.files, columns=settings.columns, required=(), bad_rows=settings.bad_rows, skipped=skipped,
                setting="select.columns" if settings is spec else "data.columns",
            )  # fmt: skip
            good = require_rows(read, files=files.files, purpose=name, skipped=skipped)
            if skipped:
                console.say(f"{name}: skipped {len(skipped):,} bad records, first {skipped[0]}")
            setting = "select.eval.limit" if settings is spec else f"data.{name}.limit"
            draw = derive_seed(recipe.train.seed, "limit", name)
            rows += limit_rows(good, files.limit, seed=draw, setting=setting)
    return rows


def _all_texts(row: Row) -> list[str]:
    values = [row.values.get(name) for name in ("text", "text2")]
    texts = values if isinstance(values[0], str) else iter_texts(row.record)
    return [text for text in texts if isinstance(text, str) and text]


def _drop_summary(cleaned: CleaningResult) -> str:
    counts = [f"{count:,} {cause}" for cause, count in cleaned.counts().items()]
    if cleaned.pieces:
        counts.append(f"{len(cleaned.pieces):,} cut into {sum(map(len, cleaned.pieces.values())):,} pieces")
    return "dropped " + ", ".join(counts)
