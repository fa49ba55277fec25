"""Command-line parsing shared by every command.

Dotted flags (`--train.steps 100`) and plain recipe keys (`--backbone gpt2`) are merged into the recipe's YAML tree and
validated by the same strict builder. A command's own flags are a dataclass whose docstrings are the help texts, read by
tyro. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import tyro

from flatshift.experiments.recipe import from_override, refuse_contradictions
from flatshift.experiments.recipe.schema import Recipe, find_keys_ending_with
from flatshift.experiments.run.console import pause_heartbeat
from flatshift.finetune.config import MAX_LENGTH
from flatshift.finetune.errors import UserError, shorten
from flatshift.finetune.launch import spawn
from flatshift.finetune.models.quantize import check_available
from flatshift.finetune.planner.rules import RuleSettings, check_settings

_RECIPE_KEYS = {field.name for field in dataclasses.fields(Recipe)}
_OTHER_NAMES = {"model": "backbone", "model_name_or_path": "backbone", "learning_rate": "optimizer.lr"}
"""Flags of other tools, and what is one here."""
_SEED = (0, 2**63 - 1)
_BOUNDS: dict[str, tuple[float | None, float | None]] = {
    **dict.fromkeys(("seed", "sample_seed", "shot_seeds", "harness_seed", "sharpness_seed"), _SEED),
    **dict.fromkeys(("batch_size", "harness_batch_size", "harness_limit", "sharpness_batches"), (1, None)),
    **dict.fromkeys(("top_k", "num_beams", "pass_at", "node", "draws", "jobs", "max_cells", "processes"), (1, None)),
    **dict.fromkeys(("shots", "harness_shots", "samples", "overlap", "more", "temperature"), (0, None)),
    "max_new_tokens": (1, MAX_LENGTH),
    "window": (2, MAX_LENGTH),
    "top_p": (1e-6, 1),
    "lease": (1, 86_400),
    "every": (1, 86_400),
}
"""Least and largest value of a flag; a flag name has the same bounds in every command."""
_MAY_BE_EMPTY = ("prompt",)
"""Flags that accept an empty text: a model can generate from an empty prompt."""


def split_overrides(argv: list[str], flags: type) -> tuple[list[str], list[Any]]:
    """Take recipe keys out of a command line: `--a.b value`, `--a.b=value`, and undotted recipe fields.

    Raises:
        UserError: a key without its value, two that contradict each other, or the last word of a key alone (`--steps`).
    """
    rest, given = _split_recipe_keys(argv, flags)
    overrides = [from_override(key, value, where) for key, where, value in given]
    refuse_contradictions(overrides)
    return rest, overrides


def recipe_arguments(argv: list[str], flags: type, *, without: str) -> list[str]:
    """Return the recipe keys of a command line as words for another command, without those of the block `without`."""
    _, given = _split_recipe_keys(argv, flags)
    return [word for key, where, value in given if key.partition(".")[0] != without for word in (where, value)]


def _split_recipe_keys(argv: list[str], flags: type) -> tuple[list[str], list[tuple[str, str, str]]]:
    """Split a command line into the remaining words and its recipe keys: (key, flag, value)."""
    own = {field.name for field in dataclasses.fields(flags)}
    rest: list[str] = []
    given = []
    tokens = iter(argv)
    for token in tokens:
        name, has_value, value = token.removeprefix("--").partition("=")
        key = name.replace("-", "_")
        head = key.split(".", 1)[0]
        if not token.startswith("--") or key in own or ("." not in key and head not in _RECIPE_KEYS):
            meant = [_OTHER_NAMES[key]] if key in _OTHER_NAMES else find_keys_ending_with(key)
            if token.startswith("--") and key not in own and meant:
                near = " or ".join(f"`--{one}`" for one in meant[:3])
                raise UserError(f"--{name} is no flag of this command; did you mean {near}?")
            rest.append(token)
            continue
        if not has_value:
            try:
                value = next(tokens)
            except StopIteration:
                raise UserError(f"--{name} needs a value") from None
        given.append((key, f"--{name}", value))
    return rest, given


def data_override(files: tuple[str, ...], overrides: Sequence[Any]) -> list[Any]:
    """Return `overrides` with the files of `--data` as the training rows.

    Raises UserError if `--data.train.files` names other files.
    """
    if not files:
        return list(overrides)
    found = [*overrides, from_override("data.train.files", files, "--data")]
    refuse_contradictions(found)
    return found


def parse_flags(flags: type, name: str, argv: Sequence[str]) -> Any:
    """Parse the `flags` of the command `name`; whole numbers may be written `1e9`.

    Raises:
        UserError: an unreadable command line, in one sentence that names the flag. SystemExit: `--help` was asked for.
    """
    said = io.StringIO()
    hints = get_type_hints(flags)
    kinds = {one.name: set(_hint_parts(hints[one.name])) for one in dataclasses.fields(flags)}
    try:
        with contextlib.redirect_stderr(said), _wide_terminal(argv):
            made: Any = tyro.cli(flags, prog=f"flatshift {name}", args=_expand_exponents(argv, kinds))
        _check_no_empty_values(argv)
        _check_bounds(made)
        return made
    except SystemExit as stop:
        if not stop.code:
            raise
        text = said.getvalue()
    raise UserError(f"{_parser_message(text, kinds)}; see `flatshift {name} --help`")


def _check_no_empty_values(argv: Sequence[str]) -> None:
    """Raise UserError for a flag or an argument that is an empty text."""
    flag = ""
    for token in argv:
        head, equals, value = token.partition("=")
        flag = head if token.startswith("--") else flag
        empty = not value if token.startswith("--") and equals else not token
        if empty and flag.removeprefix("--").replace("-", "_") not in _MAY_BE_EMPTY:
            raise UserError(f"{flag or 'an argument'} is empty (''); give it a value, or leave it out")


def _check_bounds(flags: Any) -> None:
    """Raise UserError for a number outside the bounds of its flag."""
    for one in dataclasses.fields(flags):
        value, shown = getattr(flags, one.name), f"--{one.name.replace('_', '-')}"
        low, high = _BOUNDS.get(one.name, (None, None))
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            if isinstance(number, float) and not math.isfinite(number):
                raise UserError(f"{shown} must be a finite number, got {number}")
            if (low is not None and number < low) or (high is not None and number > high):
                wanted = f"at least {low}" if low is not None and number < low else f"at most {high}"
                raise UserError(f"{shown} must be {wanted}, got {number}")


def _hint_parts(hint: Any) -> Iterator[Any]:
    yield hint
    for inner in get_args(hint) if get_origin(hint) is not Literal else ():
        yield from _hint_parts(inner)


def _expand_exponents(argv: Sequence[str], kinds: dict[str, set[Any]]) -> list[str]:
    """Return `argv` with `1e9` after an integer flag written out in digits, as in a recipe."""
    found, flag = [], ""
    for token in argv:
        head, equals, value = token.partition("=")
        if token.startswith("--"):
            flag = head
        kind = kinds.get(flag.removeprefix("--").replace("-", "_"), set())
        text = value if token.startswith("--") else token
        if int in kind and re.fullmatch(r"[-+]?[0-9.]+[eE][-+]?[0-9]{1,2}", text):
            with contextlib.suppress(ValueError):
                if (number := float(text)).is_integer():
                    text = str(int(number))
        found.append(head + equals + text if token.startswith("--") else text)
    return found


@contextlib.contextmanager
def _wide_terminal(argv: Sequence[str]) -> Iterator[None]:
    """Widen the terminal so that tyro's error messages are not wrapped."""
    before = os.environ.get("COLUMNS")
    if not {"--help", "-h"} & set(argv):
        os.environ["COLUMNS"] = "100000"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("COLUMNS", None)
        else:
            os.environ["COLUMNS"] = before


def _parser_message(text: str, kinds: dict[str, set[Any]]) -> str:
    """Convert tyro's multi-line error box into one clause."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [re.sub(r"^[│|]\s*|\s*[│|]$", "", line.strip()) for line in text.splitlines()]
    said = [line for line in lines[1:] if line.strip("╰╯─+- ")] or ["this command line cannot be read"]
    odd = re.search(r"Error parsing (\S+): .* from \[(.*?)\]", said[0])
    if odd is not None:
        kind = kinds.get(odd[1].removeprefix("--").replace("-", "_"), set())
        wanted = "a whole number" if int in kind else "a number" if float in kind else "another value"
        return f"{odd[1]} must be {wanted}, got {shorten(odd[2])}"
    if said[0].startswith("Missing from"):
        return f"{said[1]} is missing" + (f": {said[2].split('. (')[0]}" if len(said) > 2 else "")
    first = re.sub(r", 'None'|'None', ", "", said[0].rstrip(".")).replace(". Expected", "; expected")
    near = next((line.split()[0].rstrip(",") for line in said[1:] if line.startswith("--")), None)
    return first[:1].lower() + shorten(first[1:], 160) + (f" (did you mean {near}?)" if near else "")


def spawn_ranks(command: str, argv: list[str], recipe: Recipe, run: Path) -> int:
    """Run the same command line again, as the ranks of the recipe's mesh."""
    check_settings(RuleSettings.of(recipe))
    check_available(recipe.train.quantization)
    with pause_heartbeat():
        return spawn.spawn(
            ["-m", "flatshift", command, *argv], ranks=recipe.mesh.size, resume=run, threads=recipe.train.threads
        )
