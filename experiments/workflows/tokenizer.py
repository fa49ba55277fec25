"""Comparison of tokenizers on given texts: tokens that a language costs, relative to one another and to a reference;
and tokenizers of several schemes trained on given texts, each evaluated by small models trained alike.

flatshift tokenizer flatshift-5m other/tokenizer.json --data texts.jsonl --group-by lang --reference en
flatshift tokenizer train --data texts.jsonl --out DIR

The same training documents train the tokenizer of every scheme, and then `seeds` small decoders each, which see the
same bytes in the same order and have equally many parameters. Their loss on held-out documents is given in bits per
byte, the only metric that is comparable between tokenizers, with intervals over seeds; so is its difference to the
first scheme, seed by seed. Finished models survive a kill.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from flatshift.experiments.run.console import Console
from flatshift.experiments.run.resumable_directory import open_resumable
from flatshift.experiments.statistics.intervals import paired_test, t_interval
from flatshift.experiments.workflows.run_parts import lock_new_output
from flatshift.finetune.assets import backbone_directory
from flatshift.finetune.atomic import atomic_directory, write_json
from flatshift.finetune.data.config import Columns
from flatshift.finetune.data.files import describe_files
from flatshift.finetune.data.rows import Row, read_rows, require_rows
from flatshift.finetune.data.tokenizer_schemes import LEAST, SCHEMES, Scheme, train_tokenizer
from flatshift.finetune.errors import UserError, first_error_line
from flatshift.finetune.evaluate.bootstrap import ratio_interval
from flatshift.finetune.evaluate.text import (
    TokenizedTexts,
    Vocabulary,
    find_language,
    missing_dictionary_note,
    tokenize_texts,
)
from flatshift.finetune.figures import format_interval
from flatshift.finetune.lock import exclusive_lock
from flatshift.finetune.models.backbone import open_backbone, quiet_transformers
from flatshift.finetune.seeds import numpy_generator
from flatshift.finetune.train.small_decoder import SmallDecoder, count_parameters, train_and_evaluate

DOCUMENT = "tokenizers.json"


def compare_tokenizers(
    names: Sequence[str],
    *,
    data: Sequence[str],
    group_by: str | None = None,
    reference: str | None = None,
    parallel: str | None = None,
    columns: Columns | None = None,
    out: Path | None = None,
    command: str = "",
    quiet: bool = False,
    page: Callable[[Mapping[str, Any]], str] | None = None,
) -> dict[str, Any]:
    """Tokenize the texts of `data` with each tokenizer and compare the results.

    names: backbones, directories with a tokenizer, or `tokenizer.json` files.
    group_by: a column of the rows, for example their language.
    reference: the group that others are compared with, on rows with the same `parallel` column (None: `id`): tokens for
    the same sentences.
    out: a new directory for tokenizers.json and, by `page`, report.html; written completely or not at all.
    Returns the content of tokenizers.json.
    Raises UserError for a name without a tokenizer, a tokenizer without token offsets, and columns that rows lack.
    """
    if not names or not data:
        raise UserError("tokenizer: name one at least, and texts with --data FILE")
    if reference is not None and group_by is None:
        raise UserError("--reference names a group; add --group-by COLUMN")
    if parallel is not None and reference is None:
        raise UserError("--parallel names the sentences that --reference compares; add that, or leave it out")
    with lock_new_output(out):
        tokenizers = {name: functools.partial(open_tokenizer, name) for name in names}
        rows = _read_texts(data, (columns or Columns()).text, group_by)
        document = _tokenize_with_each(tokenizers, rows, group_by, reference, parallel or "id", quiet)
        document |= {"data": list(data), "command": command}
        if out is not None:
            with atomic_directory(out) as temporary:
                write_json(temporary / DOCUMENT, document)
                if page is not None:
                    (temporary / "report.html").write_text(page(document), encoding="utf-8")
    return document


def _read_texts(data: Sequence[str], column: str, group_by: str | None) -> list[Row]:
    required = ("text", *([group_by] if group_by else []))
    return require_rows(
        read_rows(data, columns=Columns(text=column, id="\0"), required=required), files=data, purpose="text"
    )


def open_tokenizer(name: str) -> Any:
    """Load the tokenizer of a backbone, a directory or a `tokenizer.json`. Raises UserError."""
    from transformers import AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerFast

    path = Path(name)
    try:
        with quiet_transformers():
            if path.is_file() and path.suffix != ".gguf":
                tokenizer: Any = PreTrainedTokenizerFast(tokenizer_file=str(path))
            elif backbone_directory(name) or not path.is_dir() or (path / "config.json").is_file():
                tokenizer = open_backbone(name).tokenizer
            elif (path / "vocab.json").is_file() and not (path / "tokenizer.json").is_file():
                tokenizer = GPT2Tokenizer(vocab=str(path / "vocab.json"), merges=str(path / "merges.txt"))
            else:
                tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except UserError:
        raise
    except Exception as error:  # the type depends on the file format
        raise UserError(
            f"{name}: no tokenizer that can be read ({first_error_line(error)}); name a tokenizer.json"
        ) from error
    if not tokenizer.is_fast:
        raise UserError(f"{name}: this tokenizer cannot say where each token starts; name one with a tokenizer.json")
    return tokenizer


def _tokenize_with_each(
    tokenizers: Mapping[str, Callable[[], Any]],
    rows: Sequence[Row],
    group_by: str | None,
    reference: str | None = None,
    parallel: str = "id",
    quiet: bool = True,
) -> dict[str, Any]:
    """Return the content of tokenizers.json for `rows`; tokenizers: functions that load each of them, by name."""
    texts = [row.values["text"] for row in rows]
    values = [str(row.values[group_by]) if group_by else "all" for row in rows]
    groups = {value: np.flatnonzero([v == value for v in values]) for value in sorted(set(values))}
    if reference is not None and reference not in groups:
        raise UserError(f"--reference: no row has {group_by} {reference!r}; there are {', '.join(groups)}")
    notes = [note for note in [missing_dictionary_note(texts)] if note]
    pairs = _parallel_rows(rows, groups, reference, parallel, notes)
    records: dict[str, Any] = {}
    console = Console(quiet=quiet)
    for name, load in tokenizers.items():
        console.say(f"cutting by {name}")
        vocabulary = Vocabulary(load())
        tokens = tokenize_texts(vocabulary, texts)
        records[name] = {
            "vocabulary": len(vocabulary.tokenizer),
            "used": len(tokens.used),
            "scripts": dict(vocabulary.scripts.most_common()),
            "all": {**tokens.metrics(slice(None)), "interval": _fertility_interval(tokens, np.arange(len(texts)))},
            "groups": {
                group: {
                    **tokens.metrics(indices),
                    "interval": _fertility_interval(tokens, indices),
                    "parity": _compute_parity(tokens, *pairs[group]) if group in pairs else None,
                }
                for group, indices in groups.items()
            },
        }
    languages = {group: language for group in groups if group_by and (language := find_language(group))}
    return {
        "tokenizers": records,
        "rows": {group: len(indices) for group, indices in groups.items()},
        "group_by": group_by,
        "reference": reference,
        "names": {group: name for group, (name, _) in languages.items()},
        "families": {group: family for group, (_, family) in languages.items()},
        "notes": notes,
    }


def _parallel_rows(
    rows: Sequence[Row], groups: Mapping[str, Any], reference: str | None, parallel: str, notes: list[str]
) -> dict[str, tuple[Any, Any]]:
    """Return for each group the rows that the reference has too, and those of the reference, pair by pair.

    If several rows of a group have the same key, the first one counts.
    """
    if reference is None:
        return {}
    keys: dict[str, dict[str, int]] = {group: {} for group in groups}
    repeated = 0
    for group, indices in groups.items():
        for i in indices:
            if (key := rows[i].record.get(parallel)) is not None:
                repeated += keys[group].setdefault(str(key), i) != i
    if not keys[reference]:
        raise UserError(f"--parallel: no row of {reference!r} has a column {parallel!r}; name the one of the sentences")
    pairs, alone = {}, []
    for group, own in keys.items():
        both = sorted(own.keys() & keys[reference].keys())
        if both:
            pairs[group] = ([own[key] for key in both], [keys[reference][key] for key in both])
        else:
            alone.append(group)
    if alone:
        notes.append(
            f"{len(alone)} groups (first {alone[0]!r}) share no {parallel!r} with {reference!r}: their text is not "
            "parallel, so they have no parity."
        )
    if repeated:
        notes.append(f"{repeated} rows have the {parallel!r} of an earlier row of their group: left out of parity.")
    return pairs


def _compute_parity(texts: TokenizedTexts, own: list[int], reference: list[int]) -> float | None:
    total = int(texts.tokens[reference].sum())
    return float(texts.tokens[own].sum()) / total if total else None


def _fertility_interval(texts: TokenizedTexts, indices: Any) -> list[float | None]:
    if len(indices) < 2:
        return [None, None]
    interval = ratio_interval(texts.tokens[indices], texts.words[indices], resamples=500)
    return [interval["low"], interval["high"]]


def format_document(document: Mapping[str, Any]) -> str:
    """Format a line for each tokenizer and group."""

    def number(value: float | None) -> str:
        return "–" if value is None else f"{value:.3g}"

    lines = []
    for name, record in document["tokenizers"].items():
        share = record["used"] / record["vocabulary"]
        lines.append(f"{name}: {record['vocabulary']:,} tokens, {share:.0%} of them used")
        for group, figures in {**record["groups"], **({"all": record["all"]} if document["group_by"] else {})}.items():
            label = f"{group} {document['names'].get(group, '')}".strip()
            names = {"tokens/word": "tokens_per_word", "bytes/token": "bytes_per_token", "words cut": "continued_words",
                     "byte tokens": "byte_tokens", "unknown": "unknown"}  # fmt: skip
            columns = [f"{title} {number(figures[key])}" for title, key in names.items()]
            if figures.get("parity") is not None:
                columns.append(f"parity {number(figures['parity'])}")
            lines.append(f"  {label:24} {'  '.join(columns)}")
    return "\n".join([*lines, *(f"note: {note}" for note in document["notes"])])


_MAX_HELD_OUT = 200_000
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
    model = model or SmallDecoder()
    _check_settings(schemes, vocabulary, seeds, held_out)
    console = Console(quiet=quiet)
    settings: dict[str, Any] = {
        "schemes": list(schemes), "data": describe_files(data), "vocabulary": vocabulary, "seeds": seeds,
        "held_out": held_out, "group_by": group_by, "text": (columns or Columns()).text, "model": asdict(model),
    }  # fmt: skip
    with exclusive_lock(out), open_resumable(out, yaml.safe_dump(settings, sort_keys=False)) as work:
        held_rows, training = _split_held_out(_read_texts(data, settings["text"], group_by), held_out)
        texts, held_texts = ([row.values["text"] for row in rows] for rows in (training, held_rows))
        held_bytes = sum(len(text.encode()) for text in held_texts)
        tokenizers: dict[str, Any] = {}
        for scheme in schemes:
            console.say(f"{scheme}: learning at most {vocabulary:,} tokens from {len(texts):,} documents")
            tokenizers[scheme] = train_tokenizer(scheme, texts, vocabulary=vocabulary)
            tokenizers[scheme].save_pretrained(work.directory / scheme)
        loaders = {str(scheme): functools.partial(tokenizers.__getitem__, scheme) for scheme in schemes}
        document = _tokenize_with_each(loaders, held_rows, group_by)
        cells: dict[str, dict[int, dict[str, Any]]] = {scheme: {} for scheme in schemes}
        with console.task("small models", seeds * len(schemes), "models", brief=not seeds) as bar:
            for done, (seed, scheme) in enumerate(itertools.product(range(seeds), schemes), start=1):
                file = work.state / f"{scheme}-{seed}.json"
                if not file.is_file():
                    nats, tokens = train_and_evaluate(
                        tokenizers[scheme], texts, held_texts, model, vocabulary=vocabulary, seed=seed
                    )
                    work.state.mkdir(parents=True, exist_ok=True)
                    write_json(file, {"bits_per_byte": float(nats.sum()) / math.log(2) / held_bytes, "tokens": tokens})
                cells[scheme][seed] = json.loads(file.read_text())
                bar(done)
        document |= {"data": list(data), "command": command}
        if seeds:
            document["models"] = _compare_schemes(cells)
            document["trained"] = {
                **asdict(model), "parameters": count_parameters(model, vocabulary), "seeds": seeds,
                "documents": len(texts), "held_out": len(held_texts), "held_out_bytes": held_bytes,
            }  # fmt: skip
            document["notes"] = [*document["notes"], *_scheme_notes(schemes, seeds)]
        write_json(work.directory / DOCUMENT, document)
        if page is not None:
            (work.directory / "report.html").write_text(page(document), encoding="utf-8")
    return document


def format_scheme_comparison(document: Mapping[str, Any]) -> str:
    """Format a line for each scheme."""
    lines = []
    for scheme, record in document.get("models", {}).items():
        line = f"{scheme:12} {format_interval(record['bits_per_byte'], '.4f')} bits per byte"
        if record["beside"]:
            line += f", {format_interval(record['beside'], '+.4f')} compared with {next(iter(document['models']))}"
        lines.append(f"{line}; {record['tokens']:,.0f} tokens seen")
    return "\n".join(lines)


def _check_settings(schemes: Sequence[str], vocabulary: int, seeds: int, held_out: float) -> None:
    repeated = [scheme for scheme in schemes if list(schemes).count(scheme) > 1]
    if not schemes or repeated:
        raise UserError(f"--schemes: {'names ' + repeated[0] + ' twice' if repeated else 'name one at least'}")
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
    count, room = max(1, round(share * len(rows))), _MAX_HELD_OUT
    held_out: set[int] = set()
    for i in numpy_generator(0, "tokenizer", "held-out").permutation(len(rows))[:count]:
        size = len(rows[i].values["text"].encode())
        if held_out and size > room:
            break
        held_out.add(int(i))
        room -= size
    texts = {rows[i].values["text"] for i in held_out}
    training = [row for row in rows if row.values["text"] not in texts]
    if not training:
        raise UserError("all documents are alike, so none can be held out; give others")
    return [rows[i] for i in sorted(held_out)], training


def _compare_schemes(cells: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> dict[str, Any]:
    bits = {scheme: {seed: cell["bits_per_byte"] for seed, cell in own.items()} for scheme, own in cells.items()}
    base = next(iter(cells))
    return {
        scheme: {
            "bits_per_byte": asdict(t_interval(list(bits[scheme].values()))),
            "beside": None if scheme == base else paired_test(bits[scheme], bits[base]),
            "tokens": sum(cell["tokens"] for cell in own.values()) / len(own),
            "cells": {str(seed): cell for seed, cell in own.items()},
        }
        for scheme, own in cells.items()
    }


def _scheme_notes(schemes: Sequence[str], seeds: int) -> list[str]:
    notes = [
        "Each model saw the same bytes in the same order and has equally many parameters; a scheme that makes more "
        "tokens of a byte also computes more.",
        "Bits per byte are of the one way in which each tokenizer cuts a text; other ways would add to its "
        "probability, so they are upper bounds.",
    ]
    if seeds == 1:
        notes.append("One seed has no interval; --seeds 3 gives one.")
    if len(schemes) > 2 and seeds > 1:
        notes.append(f"p-values of {len(schemes) - 1} differences stand side by side and are not adjusted.")
    return notes
