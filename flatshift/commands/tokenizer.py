"""What tokenizers make of your texts."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from finetune.config import Columns
from flatshift.command_line import parse


@dataclass(frozen=True)
class Flags:
    """Cut texts by one or several tokenizers: tokens a word and a byte, words cut up, bytes, unknowns, by language."""

    names: Positional[tuple[str, ...]]
    """Backbones (shipped name, directory, hub name), directories with a tokenizer, or tokenizer.json files."""
    data: tuple[str, ...] = ()
    """Files of texts."""
    text_column: str = "text"
    """Their column of text."""
    group_by: str | None = None
    """A column of the rows, for example their language: every figure for each of its values."""
    reference: str | None = None
    """The group that parity is told of: tokens of the same sentences, over those of this group."""
    parallel: str = "id"
    """The column that says which rows are the same sentence."""
    out: Path | None = None
    """New directory for tokenizers.json and a page."""
    json: bool = False
    """Print what tokenizers.json holds."""


def run(argv: list[str]) -> int:
    """`flatshift tokenizer`."""
    flags: Flags = parse(Flags, "tokenizer", argv)
    from experiments.report.chapters.tokenizer import page
    from experiments.workflows.tokenizer import judge_tokenizers, render

    document = judge_tokenizers(
        flags.names,
        data=flags.data,
        group_by=flags.group_by,
        reference=flags.reference,
        parallel=flags.parallel,
        columns=Columns(text=flags.text_column),
        out=flags.out,
        command=shlex.join(["flatshift", "tokenizer", *argv]),
        quiet=flags.json,
        page=page,
    )
    print(json.dumps(document, indent=2, ensure_ascii=False) if flags.json else render(document))
    return 0
