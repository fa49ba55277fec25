"""Records removed from a pool before selection, by cause."""

from __future__ import annotations

import json
from typing import Any

from flatshift.experiments.report import formats
from flatshift.experiments.report.blocks import Block, ChapterPart, Notes, Section, Table
from flatshift.experiments.results.run import RunResults, SelectionResults, read_object
from flatshift.finetune.errors import UserError

_EXAMPLES = 5


def part(run: RunResults) -> ChapterPart | None:
    """Return one section with counts by cause and some examples, if a hygiene step ran."""
    selection = run.selection
    told = read_object(selection.path / "manifest.json").get("hygiene") if selection is not None else None
    if selection is None or not isinstance(told, dict):
        return None
    records = told["records"]
    rows = [[cause, f"{count:,}", _format_share(count, records)] for cause, count in told["dropped"].items()]
    if told["cut"]:
        rows.append([f"cut (into {told['pieces']:,} pieces)", f"{told['cut']:,}", _format_share(told["cut"], records)])
    blocks: list[Block] = [Table(["cause", "records", "share of the pool"], rows, numeric=frozenset({1, 2}))]
    examples = _read_examples(selection)
    if examples:
        caption = f"The first {len(examples)} with a match; drops.jsonl has every one."
        blocks.append(Table(["record", "cause", "repeats", "in", "similarity"], examples, caption, frozenset({4})))
    notes = _notes(told)
    if notes:
        blocks.append(Notes(notes))
    lead = f"{records:,} records were read, {told['kept']:,} took part in the selection."
    return ChapterPart(sections=[Section("Removed from the pool", blocks, lead)])


def _format_share(count: int, of: int) -> str:
    return f"{100 * count / of:.2f} %" if of else "–"


def _read_examples(selection: SelectionResults) -> list[list[str]]:
    path = selection.path / "drops.jsonl"
    found: list[list[str]] = []
    if not path.is_file():
        return found
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                drop = json.loads(line)
                if drop["match"] is None:
                    continue
                similarity = drop["value"] if drop["cause"] == "near-duplicate" else None
                shown = "" if similarity is None else formats.number(similarity, 3)
                found.append([drop["id"], drop["cause"], drop["match"], drop["match_in"], shown])
            except (ValueError, KeyError, TypeError, RecursionError):
                raise UserError(f"{path}:{number}: not what a selection writes; make it again") from None
            if len(found) == _EXAMPLES:
                break
    return found


def _notes(told: dict[str, Any]) -> list[str]:
    notes = []
    ngrams, near = told.get("decontaminate", {}), told.get("near", {})
    if told.get("listed", {}).get("unknown"):
        notes.append(f"{told['listed']['unknown']:,} ids that were listed to drop are those of no record.")
    if ngrams.get("too_short"):
        notes.append(f"{ngrams['too_short']:,} evaluation texts are too short to be looked for by their words.")
    if ngrams.get("common"):
        notes.append(f"{ngrams['common']:,} evaluation n-grams are common in the pool and count as ordinary phrases.")
    if near.get("left_out"):
        notes.append(f"{near['left_out']:,} pairs in large crowds of texts that share a hash were not compared.")
    return notes
