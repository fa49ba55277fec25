"""`flatshift generate`: generate text with a finished run."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional, UseAppendAction

from flatshift.command_line import parse_command, print_json
from flatshift.experiments.recipe import from_override, refuse_contradictions
from flatshift.finetune.errors import UserError


@dataclass(frozen=True)
class Flags:
    """Generate with a finished run: prompts in, answers out. Decoding is greedy unless --temperature is given."""

    run: Positional[Path]
    """Run directory."""
    prompt: UseAppendAction[tuple[str, ...]] = ()
    """A text that goes through the run's own prompt template; for a chat run, a user's turn. May be given several
    times. Without --prompt and --data: the lines of standard input."""
    data: tuple[str, ...] = ()
    """Files whose rows are prompts, through the run's own template; `--data.columns.NAME` names other columns."""
    raw: bool = False
    """Use prompts verbatim, without the template."""
    max_new_tokens: int | None = None
    """Longest answer, tokens; by default the task's own, else 64."""
    temperature: float | None = None
    """Sample from the softmax of logits / temperature; by default decoding is greedy."""
    top_p: float | None = None
    """Sample among the likeliest tokens that together have this probability."""
    top_k: int | None = None
    """Sample among this many likeliest tokens."""
    seed: int | None = None
    """Random seed of sampling; 0 by default. The batch size does not change the samples."""
    num_beams: int | None = None
    """Beams; 1 by default."""
    batch_size: int = 16
    """Batch size in prompts."""
    device: str | None = None
    """auto, cpu, cuda or cuda:N; by default the run's own."""
    out: Path | None = None
    """JSONL file to write: id, prompt, text, tokens, ended."""
    json: bool = False
    """Print these records as JSON."""


def run(argv: list[str]) -> int:
    flags, overrides = parse_command(Flags, "generate", argv)
    if flags.device is not None:
        overrides.append(from_override("train.device", flags.device, "--device"))
        refuse_contradictions(overrides)
    prompts = flags.prompt
    if not prompts and not flags.data and not sys.stdin.isatty():
        prompts = _lines_of_input()
    names = ("max_new_tokens", "temperature", "top_p", "top_k", "seed", "num_beams")
    decoding = {name: value for name in names if (value := getattr(flags, name)) is not None}
    from flatshift.experiments.workflows.generate import format_answers, generate_from_run

    records = generate_from_run(
        flags.run, prompts=prompts, data=flags.data, raw=flags.raw, decoding=decoding, batch_size=flags.batch_size,
        overrides=overrides, out=flags.out, quiet=flags.json,
    )  # fmt: skip
    if flags.json:
        print_json(records)
    else:
        print(format_answers(records) if flags.out is None else f"{flags.out}: {len(records):,} answers")
    return 0


def _lines_of_input() -> tuple[str, ...]:
    from flatshift.finetune.data.formats import has_lone_surrogate

    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")  # so that the error can name the line
    lines = [(number, line.rstrip("\n")) for number, line in enumerate(sys.stdin, start=1) if line.strip()]
    for number, line in lines:
        if has_lone_surrogate(line):
            raise UserError(f"standard input:{number}: not valid UTF-8; write it in that encoding")
    return tuple(line for _, line in lines)
