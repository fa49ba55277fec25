"""Tokenizers of several schemes trained on given texts, each evaluated by small models trained alike.

flatshift tokenizer train --data texts.jsonl --out DIR

The same training documents train the tokenizer of every scheme, and then `seeds` small decoders each, which see the
same bytes in the same order and have equally many parameters. Their loss on held-out documents is given in bits per
byte, the only metric that is comparable between tokenizers, with intervals over seeds; so is its difference to the
first scheme, seed by seed. Finished models survive a kill.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from flatshift.experiments.run.console import Console
from flatshift.experiments.run.resumable_directory import open_resumable
from flatshift.experiments.statistics.intervals import paired_test, t_interval
from flatshift.finetune.atomic import write_json
from flatshift.finetune.data.config import Columns
from flatshift.finetune.data.files import describe_files
from flatshift.finetune.data.rows import Row, read_rows, require_rows
from flatshift.finetune.data.tokenizer_schemes import LEAST, SCHEMES, Scheme, train_tokenizer
from flatshift.finetune.errors import UserError
from flatshift.finetune.figures import format_interval
from flatshift.finetune.lock import exclusive_lock
from flatshift.finetune.seeds import numpy_generator

from .tokenizer import DOCUMENT, tokenize_with_each

if TYPE_CHECKING:
    from flatshift.finetune.train.small_decoder import SmallDecoder

LARGEST_HELD_OUT = 200_000
"""Maximum bytes of held-out documents."""


def train_schemes(
    schemes: Sequence[Scheme] = SCHEMES,
    *,
    data: Sequence[str],
    out: Path,
    vocabulary: int = 2048,
    seeds: int = 3,
    held_out: float = 0.1,
    group_by: str | None = None,
    columns: Columns | None = None,
    model: SmallDecoder | None = None,
    command: str = "",
    quiet: bool = False,
    page: Callable[[Mapping[str, Any]], str] | None = None,
) -> dict[str, Any]:
    """Train a tokenizer of each scheme on `data` into `out/SCHEME`, and evaluate each.

    vocabulary: maximum tokens of each, and the rows of every model's embedding.
    seeds: models of each tokenizer; 0: no model, only the tokenizers and their tokens of the held-out documents.
    held_out: share of the documents that neither tokenizers nor models see (200 kB at most), drawn by name.
    Returns the content of tokenizers.json; under `models` of each scheme `{bits_per_byte, beside, tokens, cells}`.
    Raises UserError for settings out of range, too little text, and an `out` that holds something else.
    """
    from flatshift.finetune.train.small_decoder import SmallDecoder, count_parameters, train_and_evaluate

    model = model or SmallDecoder()
    _check_settings(schemes, vocabulary, seeds, held_out)
    console = Console(quiet=quiet)
    settings: dict[str, Any] = {
        "schemes": list(schemes), "data": describe_files(data), "vocabulary": vocabulary, "seeds": seeds,
        "held_out": held_out, "group_by": group_by, "text": (columns or Columns()).text, "model": asdict(model),
    }  # fmt: skip
    with exclusive_lock(out), open_resumable(out, yaml.safe_dump(settings, sort_keys=False)) as work:
        rows = require_rows(
            read_rows(
                data, columns=Columns(text=settings["text"], id="\0"),
                required=("text", *([group_by] if group_by else [])),
            ), files=data, purpose="text",
        )  # fmt: skip
        apart, training = _split_held_out(rows, held_out)
        texts, judged = [row.values["text"] for row in training], [row.values["text"] for row in apart]
        sizes = sum(len(text.encode()) for text in judged)
        made: dict[str, Any] = {}
        for scheme in schemes:
            console.say(f"{scheme}: learning at most {vocabulary:,} tokens from {len(texts):,} documents")
            made[scheme] = train_tokenizer(scheme, texts, vocabulary=vocabulary)
            made[scheme].save_pretrained(work.directory / scheme)
        document = tokenize_with_each(list(schemes), apart, group_by, None, "id", True, made.__getitem__)
        cells: dict[str, dict[int, dict[str, Any]]] = {scheme: {} for scheme in schemes}
        with console.task("small models", seeds * len(schemes), "models") as bar:
            for place in range(seeds * len(schemes)):
                seed, scheme = place // len(schemes), schemes[place % len(schemes)]
                kept = work.state / f"{scheme}-{seed}.json"
                if not kept.is_file():
                    nats, tokens = train_and_evaluate(
                        made[scheme], texts, judged, model, vocabulary=vocabulary, seed=seed
                    )  # fmt: skip
                    work.state.mkdir(parents=True, exist_ok=True)
                    write_json(kept, {"bits_per_byte": float(nats.sum()) / math.log(2) / sizes, "tokens": tokens})
                cells[scheme][seed] = json.loads(kept.read_text())
                bar(place + 1)
        document |= {"data": list(data), "command": command}
        if seeds:
            document["models"] = _compare_schemes(cells)
            document["trained"] = {
                **asdict(model), "parameters": count_parameters(model, vocabulary), "seeds": seeds,
                "documents": len(texts), "held_out": len(judged), "held_out_bytes": sizes,
            }  # fmt: skip
            document["notes"] = [*document["notes"], *_scheme_notes(schemes, seeds)]
        write_json(work.directory / DOCUMENT, document)
        if page is not None:
            (work.directory / "report.html").write_text(page(document), encoding="utf-8")
    return document


def format_document(document: Mapping[str, Any]) -> str:
    """Format a line for each scheme."""
    lines = []
    for scheme, found in document.get("models", {}).items():
        told = f"{scheme:12} {format_interval(found['bits_per_byte'], '.4f')} bits per byte"
        if found["beside"]:
            told += f", {format_interval(found['beside'], '+.4f')} compared with {next(iter(document['models']))}"
        lines.append(f"{told}; {found['tokens']:,.0f} tokens seen")
    return "\n".join(lines)


def _check_settings(schemes: Sequence[str], vocabulary: int, seeds: int, held_out: float) -> None:
    twice = [scheme for scheme in schemes if list(schemes).count(scheme) > 1]
    if not schemes or twice:
        raise UserError(f"--schemes: {'names ' + twice[0] + ' twice' if twice else 'name one at least'}")
    if vocabulary < LEAST:
        raise UserError(f"--vocabulary {vocabulary}: bytes and special tokens alone take {LEAST}")
    if seeds < 0:
        raise UserError(f"--seeds {seeds}: 0 or more")
    if not 0 < held_out < 1:
        raise UserError(f"--held-out {held_out:g}: a share between 0 and 1")


def _split_held_out(rows: Sequence[Row], share: float) -> tuple[list[Row], list[Row]]:
    """Return the held-out rows and the others, both in file order; copies of a held-out text are dropped from the
    others."""
    if len(rows) < 2:
        raise UserError("one document cannot be both trained on and held out; give several")
    wanted, room = max(1, round(share * len(rows))), LARGEST_HELD_OUT
    apart: set[int] = set()
    for i in numpy_generator(0, "tokenizer", "held-out").permutation(len(rows))[:wanted]:
        size = len(rows[i].values["text"].encode())
        if apart and size > room:
            break
        apart.add(int(i))
        room -= size
    known = {rows[i].values["text"] for i in apart}
    left = [row for row in rows if row.values["text"] not in known]
    if not left:
        raise UserError("all documents are alike, so none can be held out; give others")
    return [rows[i] for i in sorted(apart)], left


def _compare_schemes(cells: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> dict[str, Any]:
    first = next(iter(cells))
    base = {seed: cell["bits_per_byte"] for seed, cell in cells[first].items()}
    found: dict[str, Any] = {}
    for scheme, own in cells.items():
        bits = {seed: cell["bits_per_byte"] for seed, cell in own.items()}
        found[scheme] = {
            "bits_per_byte": asdict(t_interval(list(bits.values()))),
            "beside": None if scheme == first else paired_test(bits, base),
            "tokens": sum(cell["tokens"] for cell in own.values()) / len(own),
            "cells": {str(seed): cell for seed, cell in own.items()},
        }
    return found


def _scheme_notes(schemes: Sequence[str], seeds: int) -> list[str]:
    told = [
        "Each model saw the same bytes in the same order and has equally many parameters; a scheme that makes more "
        "tokens of a byte also computes more.",
        "Bits per byte are of the one way in which each tokenizer cuts a text; other ways would add to its "
        "probability, so they are upper bounds.",
    ]
    if seeds == 1:
        told.append("One seed has no interval; --seeds 3 gives one.")
    if len(schemes) > 2 and seeds > 1:
        told.append(f"p-values of {len(schemes) - 1} differences stand side by side and are not adjusted.")
    return told
