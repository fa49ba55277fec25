"""`flatshift tokenizer`: compare tokenizers on your texts, or train new ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from flatshift.command_line import parse_flags, print_json, print_result
from flatshift.finetune.data.config import Columns
from flatshift.finetune.data.tokenizer_schemes import SCHEMES, Scheme
from flatshift.finetune.errors import UserError
from flatshift.finetune.redaction import join_command


@dataclass(frozen=True)
class Flags:
    """Compare tokenizers on texts: tokens per word and byte, split words, byte tokens, unknowns, by language."""

    names: Positional[tuple[str, ...]]
    """Backbones (shipped name, directory, GGUF file, hub name), directories with a tokenizer, or tokenizer.json files;
    or `train` alone, which trains tokenizers (`flatshift tokenizer train --help`)."""
    data: tuple[str, ...] = ()
    """Files of texts."""
    text_column: str = "text"
    """Column of text."""
    group_by: str | None = None
    """A column of the rows, for example their language: every metric for each of its values."""
    reference: str | None = None
    """Reference group for parity: tokens of the same sentences, divided by those of this group."""
    parallel: str | None = None
    """Column that identifies rows with the same sentence; `id` by default."""
    out: Path | None = None
    """New directory for tokenizers.json and a page."""
    json: bool = False
    """Print the contents of tokenizers.json."""


@dataclass(frozen=True)
class TrainFlags:
    """Train tokenizers by the schemes of the mGPT study, and evaluate each with small models trained identically."""

    data: tuple[str, ...]
    """Files of texts."""
    out: Path
    """New directory for tokenizers.json, a page, and a folder for each scheme that transformers loads. An unfinished
    one is continued."""
    schemes: tuple[Scheme, ...] = SCHEMES
    """Schemes to train; differences are relative to the first."""
    vocabulary: int = 2048
    """Maximum vocabulary size of each."""
    seeds: int = 3
    """Small models per tokenizer; 0: only the tokenizers."""
    bytes: int = 500_000
    """Bytes of text that each model is trained on."""
    hidden: int = 96
    """Width of the models, a multiple of 32."""
    layers: int = 3
    """Number of blocks of the models."""
    held_out: float = 0.1
    """Fraction of the documents held out for evaluation (200 kB at most)."""
    text_column: str = "text"
    """Column of text."""
    group_by: str | None = None
    """A column, for example the language: tokenizer statistics for each of its values."""
    json: bool = False
    """Print the contents of tokenizers.json."""


def run(argv: list[str]) -> int:
    if argv[:1] == ["train"]:
        return _run_train(argv[1:])
    flags = parse_flags(Flags, "tokenizer", argv)
    from flatshift.experiments.report.chapters.tokenizer import page
    from flatshift.experiments.workflows.tokenizer import compare_tokenizers, format_document

    document = compare_tokenizers(
        flags.names, data=flags.data, group_by=flags.group_by, reference=flags.reference, parallel=flags.parallel,
        columns=Columns(text=flags.text_column), out=flags.out, command=join_command(["flatshift", "tokenizer", *argv]),
        quiet=flags.json, page=page,
    )  # fmt: skip
    print_result(document, format_document(document), as_json=flags.json)
    if flags.out is not None and not flags.json:
        print(flags.out / "report.html")
    return 0


def _run_train(argv: list[str]) -> int:
    flags = parse_flags(TrainFlags, "tokenizer train", argv)
    from flatshift.experiments.report.chapters.tokenizer import page
    from flatshift.experiments.workflows.tokenizer import format_document, format_scheme_comparison, train_schemes
    from flatshift.finetune.train.small_decoder import SmallDecoder

    try:
        model = SmallDecoder(bytes=flags.bytes, hidden=flags.hidden, layers=flags.layers)
    except ValueError as error:
        raise UserError(f"tokenizer train: {error}") from None
    if not flags.seeds and model != SmallDecoder():
        raise UserError("--bytes, --hidden and --layers are of models, and --seeds 0 trains none; leave them out")
    document = train_schemes(
        flags.schemes, data=flags.data, out=flags.out, vocabulary=flags.vocabulary, seeds=flags.seeds,
        held_out=flags.held_out, group_by=flags.group_by, columns=Columns(text=flags.text_column), model=model,
        command=join_command(["flatshift", "tokenizer", "train", *argv]), quiet=flags.json, page=page,
    )  # fmt: skip
    if flags.json:
        print_json(document)
    else:
        print(format_scheme_comparison(document) or format_document(document), flags.out / "report.html", sep="\n")
    return 0
