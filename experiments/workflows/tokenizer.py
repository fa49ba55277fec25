"""Comparison of tokenizers on given texts: tokens that a language costs, relative to one another and to a reference.

flatshift tokenizer flatshift-5m other/tokenizer.json --data texts.jsonl --group-by lang --reference en
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from flatshift.experiments.run.console import Console
from flatshift.finetune.atomic import atomic_directory, write_json
from flatshift.finetune.data.config import Columns
from flatshift.finetune.data.rows import Row, read_rows, require_rows
from flatshift.finetune.errors import UserError, first_error_line
from flatshift.finetune.evaluate.bootstrap import ratio_interval
from flatshift.finetune.evaluate.text import (
    TokenizedTexts,
    Vocabulary,
    find_language,
    missing_dictionary_note,
    tokenize_texts,
)
from flatshift.finetune.lock import exclusive_lock

DOCUMENT = "tokenizers.json"


def compare_tokenizers(
    names: Sequence[str],
    *,
    data: Sequence[str],
    group_by: str | None = None,
    reference: str | None = None,
    parallel: str = "id",
    columns: Columns | None = None,
    out: Path | None = None,
    command: str = "",
    quiet: bool = False,
    page: Callable[[Mapping[str, Any]], str] | None = None,
) -> dict[str, Any]:
    """Tokenize the texts of `data` with each tokenizer and compare the results.

    names: backbones, directories with a tokenizer, or `tokenizer.json` files.
    group_by: a column of the rows, for example their language.
    reference: the group that others are compared with, on rows with the same `parallel` column: tokens for the same
    sentences.
    out: a new directory for tokenizers.json and, by `page`, report.html; written completely or not at all.
    Returns the content of tokenizers.json.
    Raises UserError for a name without a tokenizer, a tokenizer without token offsets, and columns that rows lack.
    """
    if not names or not data:
        raise UserError("tokenizer: name one at least, and texts with --data FILE")
    if reference is not None and group_by is None:
        raise UserError("--reference names a group; add --group-by COLUMN")
    with nullcontext() if out is None else exclusive_lock(out):
        if out is not None and out.exists() and any(out.iterdir() if out.is_dir() else [out]):
            raise UserError(f"--out: {out} is not empty; name a new directory")
        rows = read_rows(
            data, columns=Columns(text=(columns or Columns()).text, id="\0"),
            required=("text", *([group_by] if group_by else [])),
        )  # fmt: skip
        document = tokenize_with_each(
            names, require_rows(rows, files=data, purpose="text"), group_by, reference, parallel, quiet
        )
        document |= {"data": list(data), "command": command}
        if out is not None:
            with atomic_directory(out) as temporary:
                write_json(temporary / DOCUMENT, document)
                if page is not None:
                    (temporary / "report.html").write_text(page(document), encoding="utf-8")
    return document


def open_tokenizer(name: str) -> Any:
    """Load the tokenizer of a backbone, a directory or a `tokenizer.json`. Raises UserError."""
    from transformers import AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerFast

    from flatshift.finetune.models.backbone import open_backbone, quiet_transformers

    path = Path(name)
    try:
        with quiet_transformers():
            if path.is_file():
                found: Any = PreTrainedTokenizerFast(tokenizer_file=str(path))
            elif path.is_dir() and not (path / "config.json").is_file():
                bare = (path / "vocab.json").is_file() and not (path / "tokenizer.json").is_file()
                if bare:
                    found = GPT2Tokenizer(vocab=str(path / "vocab.json"), merges=str(path / "merges.txt"))
                else:
                    found = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
            else:
                found = open_backbone(name).tokenizer
    except UserError:
        raise
    except Exception as error:  # the type depends on the file format
        raise UserError(
            f"{name}: no tokenizer that can be read ({first_error_line(error)}); name a tokenizer.json"
        ) from error
    if not found.is_fast:
        raise UserError(f"{name}: this tokenizer cannot say where each token starts; name one with a tokenizer.json")
    return found


def tokenize_with_each(
    names: Sequence[str],
    rows: Sequence[Row],
    group_by: str | None,
    reference: str | None,
    parallel: str,
    quiet: bool,
    opened: Callable[[str], Any] = open_tokenizer,
) -> dict[str, Any]:
    """Return the content of tokenizers.json for `rows`, tokenized with each of `names`; `opened` loads a tokenizer."""
    texts = [row.values["text"] for row in rows]
    values = [str(row.values[group_by]) if group_by else "all" for row in rows]
    groups = {value: np.flatnonzero([v == value for v in values]) for value in sorted(set(values))}
    if reference is not None and reference not in groups:
        raise UserError(f"--reference: no row has {group_by} {reference!r}; there are {', '.join(groups)}")
    notes = [note for note in [missing_dictionary_note(texts)] if note]
    pairs = _parallel_rows(rows, groups, reference, parallel, notes)
    found: dict[str, Any] = {}
    console = Console(quiet=quiet)
    for name in names:
        console.say(f"cutting by {name}")
        vocabulary = Vocabulary(opened(name))
        cut = tokenize_texts(vocabulary, texts)
        found[name] = {
            "vocabulary": len(vocabulary.tokenizer),
            "used": len(cut.used),
            "scripts": dict(vocabulary.scripts.most_common()),
            "all": {**cut.metrics(slice(None)), "interval": _fertility_interval(cut, np.arange(len(texts)))},
            "groups": {
                group: {
                    **cut.metrics(places),
                    "interval": _fertility_interval(cut, places),
                    "parity": _compute_parity(cut, *pairs[group]) if group in pairs else None,
                }
                for group, places in groups.items()
            },
        }
    described = {group: find_language(group) for group in groups}
    return {
        "tokenizers": found,
        "rows": {group: len(places) for group, places in groups.items()},
        "group_by": group_by,
        "reference": reference,
        "names": {group: told[0] for group, told in described.items() if told and group_by},
        "families": {group: told[1] for group, told in described.items() if told and group_by},
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
    again = 0
    for group, places in groups.items():
        for i in places:
            if (key := rows[i].record.get(parallel)) is not None:
                again += keys[group].setdefault(str(key), i) != i
    found, without = {}, []
    for group, own in keys.items():
        both = sorted(own.keys() & keys[reference].keys())
        if both:
            found[group] = ([own[key] for key in both], [keys[reference][key] for key in both])
        else:
            without.append(group)
    if without:
        notes.append(
            f"{len(without)} groups (first {without[0]!r}) share no {parallel!r} with {reference!r}: their text is not "
            "parallel, so they have no parity."
        )
    if again:
        notes.append(f"{again} rows have the {parallel!r} of an earlier row of their group: left out of parity.")
    return found


def _compute_parity(cut: TokenizedTexts, own: Sequence[int], theirs: Sequence[int]) -> float | None:
    whole = int(cut.tokens[list(theirs)].sum())
    return float(cut.tokens[list(own)].sum()) / whole if whole else None


def _fertility_interval(cut: TokenizedTexts, places: Any) -> list[float | None]:
    """Return the interval of tokens per word, over documents."""
    if len(places) < 2:
        return [None, None]
    interval = ratio_interval(cut.tokens[places], cut.words[places], resamples=500)
    return [interval["low"], interval["high"]]


def format_document(document: Mapping[str, Any]) -> str:
    """Format a line for each tokenizer and group."""
    lines = []
    for name, found in document["tokenizers"].items():
        share = found["used"] / found["vocabulary"]
        lines.append(f"{name}: {found['vocabulary']:,} tokens, {share:.0%} of them used")
        for group, figures in {**found["groups"], **({"all": found["all"]} if document["group_by"] else {})}.items():
            parity = figures.get("parity")
            label = f"{group} {document['names'].get(group, '')}".strip()
            lines.append(
                f"  {label:24} tokens/word {_format_number(figures['tokens_per_word'])}  bytes/token "
                f"{_format_number(figures['bytes_per_token'])}  words cut "
                f"{_format_number(figures['continued_words'])}  byte tokens "
                f"{_format_number(figures['byte_tokens'])}  unknown {_format_number(figures['unknown'])}"
                + (f"  parity {_format_number(parity)}" if parity is not None else "")
            )
    return "\n".join([*lines, *(f"note: {note}" for note in document["notes"])])


def _format_number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
