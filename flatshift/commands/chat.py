"""`flatshift chat`: talk to finished generative runs in the terminal."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from flatshift.command_line import parse_flags
from flatshift.experiments.recipe import from_override
from flatshift.finetune.data.formats import has_lone_surrogate
from flatshift.finetune.errors import UserError, format_error_message

_HELP = "/use NAME  another run    /new  forget the conversation    /runs  their names    /quit  or Ctrl-D"


@dataclass(frozen=True)
class Flags:
    """Talk to finished runs in the terminal; several share one loaded backbone and are switched by name.

    Runs trained on conversations remember earlier turns; others read each line on its own, in their own template.
    """

    runs: Positional[tuple[Path, ...]]
    """Run directories."""
    system: str | None = None
    """System turn of every conversation; by default the runs' own `task.system`."""
    max_new_tokens: int | None = None
    """Longest answer, tokens; by default the task's own, else 64."""
    temperature: float | None = None
    """Sample from the softmax of logits / temperature; by default decoding is greedy."""
    top_p: float | None = None
    """Sample among the likeliest tokens that together have this probability."""
    seed: int | None = None
    """Random seed of sampling; 0 by default. Each turn derives its own."""
    device: str | None = None
    """auto, cpu, cuda or cuda:N; by default the runs' own."""


def run(argv: list[str]) -> int:
    """Run `flatshift chat`."""
    flags: Flags = parse_flags(Flags, "chat", argv)
    from flatshift.experiments.workflows.generate import GenerativeRuns
    from flatshift.finetune.evaluate.generation import Decoding

    given = {key: getattr(flags, key) for key in ("max_new_tokens", "temperature", "top_p")}
    decoding: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    Decoding(**decoding)  # refuses settings that contradict each other before a model is loaded
    if flags.seed is not None and not flags.temperature:
        raise UserError("--seed is of draws, which --temperature makes; set that, or leave --seed out")
    overrides = [] if flags.device is None else [from_override("train.device", flags.device, "--device")]
    print(f"loading {', '.join(map(str, flags.runs))}", file=sys.stderr, flush=True)
    runs = GenerativeRuns(flags.runs, overrides=overrides)
    if flags.system is not None:
        runs.check_system()
    first = [] if flags.system is None else [{"role": "system", "content": flags.system}]
    name, turns, count, number = runs.names[0], list[dict[str, str]](first), 0, 0
    print(f"{', '.join(runs.names)}; {_HELP}", file=sys.stderr)
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")  # so that the error can name a line that is not UTF-8
    while (line := _read_line(name)) is not None:
        number += 1
        word, _, rest = line.partition(" ")
        if has_lone_surrogate(line):
            _reject_line(f"standard input:{number}: not valid UTF-8; write it in that encoding")
            continue
        if not line:
            continue
        if word == "/quit":
            break
        if word == "/new":
            turns = list(first)
        elif word == "/runs":
            print("\n".join(runs.names))
        elif word == "/use" and rest.strip() in runs.names:
            name, turns = rest.strip(), list(first)
        elif word.startswith("/"):
            print(f"{line}: not a command here, or no run of that name; {_HELP}", file=sys.stderr)
        else:
            count += 1
            asked = [*turns, {"role": "user", "content": line}]
            try:
                seeded = {**decoding, "seed": ((flags.seed or 0) + count) % 2**63}
                question = runs.ask(name, asked, decoding=seeded, on_text=partial(print, end="", flush=True))
                runs.answer([question])
            except UserError as error:  # concerns this turn only; the next may fit
                print(f"flatshift: error: {format_error_message(str(error))}", file=sys.stderr)
                continue
            print(flush=True)
            if not question.ended:
                print(f"(cut after {len(question.tokens):,} tokens; --max-new-tokens N allows more)", file=sys.stderr)
            turns = [*asked, {"role": "assistant", "content": question.text}]
    return 0


def _read_line(name: str) -> str | None:
    """Read the user's next line; None at the end of the input."""
    if sys.stdin.isatty():
        print(f"{name}> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    return line.strip() if line else None


def _reject_line(message: str) -> None:
    """Reject a line: print why at a terminal, where the user can write another; else raise UserError."""
    if not sys.stdin.isatty():
        raise UserError(message)
    print(f"flatshift: error: {message}", file=sys.stderr)
