"""Command-line parsing shared by every command.

Dotted flags (`--train.steps 100`) and plain recipe keys (`--backbone gpt2`) are merged into the recipe's YAML tree and
validated by the same strict builder. A command's own flags are a dataclass whose docstrings are the help texts, read by
tyro. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import itertools
import json
import math
import os
import re
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import tyro
from tyro import constructors

from flatshift.experiments.recipe import from_override, gallery_recipes, refuse_contradictions, schema, shipped_recipes
from flatshift.experiments.recipe.json_schema import field_docs
from flatshift.experiments.recipe.tree import kinds_first
from flatshift.experiments.run.console import pause_heartbeat
from flatshift.finetune.config import MAX_LENGTH
from flatshift.finetune.errors import UserError, is_remote, shorten, user_path
from flatshift.finetune.launch import spawn
from flatshift.finetune.models.quantize import check_available
from flatshift.finetune.planner.rules import RuleSettings, check_settings
from flatshift.finetune.redaction import hide_secrets

_RECIPE_KEYS = {field.name for field in dataclasses.fields(schema.Recipe)}
_OTHER_NAMES = {"model": "backbone", "model_name_or_path": "backbone", "learning_rate": "optimizer.lr"}
"""Flags of other tools, and what is one here."""
_SEED = (0, 2**63 - 1)
_BOUNDS: dict[str, tuple[float | None, float | None]] = {
    **dict.fromkeys(("seed", "sample_seed", "shot_seeds", "harness_seed", "sharpness_seed"), _SEED),
    **dict.fromkeys(("batch_size", "harness_batch_size", "harness_limit", "sharpness_batches"), (1, None)),
    **dict.fromkeys(
        ("top_k", "num_beams", "pass_at", "node", "draws", "jobs", "max_cells", "processes", "nodes"), (1, None)
    ),
    **dict.fromkeys(("shots", "harness_shots", "samples", "overlap", "more", "temperature"), (0, None)),
    "max_new_tokens": (1, MAX_LENGTH),
    "window": (2, MAX_LENGTH),
    "top_p": (1e-6, 1),
    "cpus": (1, 4096),
    "gpus": (0, 1024),
    "time": (1, 366 * 24 * 60),
    "retries": (0, 1000),
    "every": (1, 86_400),
}
"""Least and largest value of a flag; a flag name has the same bounds in every command."""
_MAY_BE_EMPTY = ("prompt",)
"""Flags that accept an empty text: a model can generate from an empty prompt."""


FlagsT = TypeVar("FlagsT")


def parse_command(flags: type[FlagsT], name: str, argv: list[str]) -> tuple[FlagsT, list[Any]]:
    """Return the parsed `flags` of the command `name` and the recipe keys among its arguments.

    Raises as `split_overrides` and `parse_flags` do.
    """
    words, overrides = split_overrides(argv, flags)
    return parse_flags(flags, name, words), overrides


def split_overrides(argv: list[str], flags: type) -> tuple[list[str], list[Any]]:
    """Take recipe keys out of a command line: `--a.b value`, `--a.b=value`, and undotted recipe fields.

    A key that takes a list takes several words (`--adapter.targets q_proj v_proj`); before the recipe is named, the
    last of them is the recipe, unless one need not be named and it is none.

    Raises UserError: a key without its value, two that contradict each other, or the last word of a key alone
    (`--steps`).
    """
    words, settings = _split_recipe_keys(argv, flags)
    settings.sort(key=lambda setting: kinds_first(setting[0]))
    overrides = [from_override(key, value, flag) for key, flag, value in settings]
    refuse_contradictions(overrides)
    return words, overrides


def recipe_arguments(argv: list[str], flags: type, *, without: str) -> list[str]:
    """Return the recipe keys of a command line as words for another command, without those of the block `without`."""
    _, settings = _split_recipe_keys(argv, flags)
    return [word for key, flag, value in settings if key.partition(".")[0] != without for word in (flag, value)]


def remove_flags(argv: Sequence[str], names: Collection[str], *, several: str | None = None) -> list[str]:
    """Return a command line without the flags `names` and the one value of each, and `several` with all its values."""
    words, tokens, skips = [], iter(argv), False
    for token in tokens:
        name, has_value, _ = token.partition("=")
        skips = name == f"--{several}" or (skips and not token.startswith("-"))
        if skips:
            continue
        if name not in {f"--{flag}" for flag in names}:
            words.append(token)
        elif not has_value:
            next(tokens)
    return words


def _split_recipe_keys(argv: list[str], flags: type) -> tuple[list[str], list[tuple[str, str, str]]]:
    flag_names = {field.name for field in dataclasses.fields(flags)}
    words: list[str] = []
    settings = []
    tokens = deque(argv)
    after_key = False  # `--data F --train.steps 3 RECIPE` would leave `--data F RECIPE`, whose last word is a file
    while tokens:
        token = tokens.popleft()
        name, has_value, value = token.removeprefix("--").partition("=")
        key = name.replace("-", "_")
        is_flag = token.startswith("--") and key not in flag_names
        if not is_flag or ("." not in key and key not in _RECIPE_KEYS):
            near = [_OTHER_NAMES[key]] if key in _OTHER_NAMES else schema.find_keys_ending_with(key)
            if is_flag and not near and not difflib.get_close_matches(key, flag_names):
                last = difflib.get_close_matches(
                    key, [name.rpartition(".")[2] for name in schema.dotted_keys()], 1, 0.85
                )
                near = schema.find_keys_ending_with(last[0]) if last else []
            if is_flag and near:
                listed = " or ".join(f"`--{near_key}`" for near_key in near[:3])
                raise UserError(f"--{name} is no flag of this command; did you mean {listed}?")
            after_key = after_key and not token.startswith("-")
            if after_key and _ends_in_list(words, flags):  # before the first flag
                words.insert(next(place for place, word in enumerate(words) if word.startswith("-")), token)
            else:
                words.append(token)
            continue
        if not has_value:
            if not tokens:
                raise UserError(f"--{name} needs a value")
            value = tokens.popleft()
            if schema.split_key(name)[1] in schema.list_keys() and not value.startswith(("[", "-")):
                more = list(itertools.takewhile(lambda word: not word.startswith("-"), tokens))
                if more and not _names_positional(words, flags) and _may_be_positional(more[-1], argv, flags):
                    more = more[:-1]
                if more:
                    value = f"[{', '.join(map(_list_item, (value, *more)))}]"
                for _ in more:
                    tokens.popleft()
        settings.append((".".join(schema.split_key(name)[0]), f"--{name}", value))
        after_key = True
    return words, settings


def _may_be_positional(word: str, argv: Sequence[str], flags: type) -> bool:
    """Return True if the last word after a key may be the recipe, or the run, rather than one more value."""
    if {"--like", "--resume"} & {token.partition("=")[0] for token in argv}:
        return False
    is_optional = hasattr(flags, "recipe") and not hasattr(flags, "like")  # a field with a default is an attribute
    return not is_optional or _names_recipe(word)


def _names_recipe(word: str) -> bool:
    """Return True for a file of YAML and for the name of a recipe that ships."""
    return word.endswith((".yaml", ".yml")) or word in shipped_recipes() or word in gallery_recipes()


def _names_positional(words: Sequence[str], flags: type) -> bool:
    """Return True if a word of `words` is not the value of a flag."""
    hints = get_type_hints(flags)
    for index, (before, word) in enumerate(itertools.pairwise(("", *words))):
        if _ends_in_list(words[:index], flags):
            continue
        takes_value = before.startswith("--") and "=" not in before
        is_switch = hints.get(before.removeprefix("--").replace("-", "_")) is bool
        if not word.startswith("-") and (is_switch or not takes_value):
            return True
    return False


def _ends_in_list(words: Sequence[str], flags: type) -> bool:
    """Return True if another word would be one more value of the last flag of `words`."""
    name = next((word for word in reversed(words) if word.startswith("-")), "").removeprefix("--").replace("-", "_")
    return _takes_several(get_type_hints(flags, include_extras=True).get(name))


def _takes_several(hint: Any) -> bool:
    """Return True for a flag with several values after it, False for one that is given several times, which an
    annotation (`UseAppendAction`) marks."""
    return get_origin(hint) is not Annotated and any(get_origin(part) is tuple for part in _hint_parts(hint))


def _list_item(word: str) -> str:
    """Return `word` as an item of a YAML list."""
    return word if re.fullmatch(r"[\w./+-]+", word) else json.dumps(word, ensure_ascii=False)


def data_override(files: tuple[str, ...], overrides: Sequence[Any]) -> list[Any]:
    """Return `overrides` with the files of `--data` as the training rows.

    Raises UserError if `--data.train.files` names other files, and for a recipe among the files.
    """
    if not files:
        return list(overrides)
    if _names_recipe(files[-1]):
        raise UserError(f"--data takes every word after it as a file, {files[-1]} too; write the recipe before --data")
    overrides = [*overrides, from_override("data.train.files", files, "--data")]
    refuse_contradictions(overrides)
    return overrides


def print_json(value: Any) -> None:
    """Print plain values as JSON."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_result(value: Any, text: str, *, as_json: bool) -> None:
    """Print plain values as JSON (`--json`), or a text on them."""
    if as_json:
        print_json(value)
    else:
        print(text)


def parse_flags(flags: type[FlagsT], name: str, argv: Sequence[str]) -> FlagsT:
    """Parse the `flags` of the command `name`; whole numbers may be written `1e9`.

    Raises UserError: an unreadable command line, in one sentence that names the flag. SystemExit: `--help` was asked
    for.
    """
    errors = io.StringIO()
    hints = get_type_hints(flags)
    kinds = {name: set(_hint_parts(hint)) for name, hint in hints.items()}
    _check_lists_given_once(argv, flags)
    try:
        with contextlib.redirect_stderr(errors), _wide_terminal(argv):
            words, form = _expand_exponents(argv, kinds), _HELP if {"--help", "-h"} & set(argv) else None
            parsed: FlagsT = tyro.cli(flags, prog=f"flatshift {name}", args=words, registry=form)
        _check_no_empty_values(argv)
        _check_bounds(parsed)
        return _clean_values(parsed)
    except SystemExit as stop:
        if not stop.code:
            raise
    raise UserError(f"{_parser_message(errors.getvalue(), kinds)}; see `flatshift {name} --help`")


_HELP = constructors.ConstructorRegistry()


@_HELP.struct_rule
def _describe_flags(info: constructors.StructTypeInfo) -> constructors.StructConstructorSpec | None:
    """Form of `--help`: positional arguments by name, no empty defaults, and the flags of the command itself first."""
    if not dataclasses.is_dataclass(info.type):
        return None
    docs, hints, fields = field_docs(info.type), get_type_hints(info.type, include_extras=True), []
    for field in sorted(dataclasses.fields(info.type), key=lambda field: field.name not in info.type.__annotations__):
        hint, required = hints[field.name], field.default is dataclasses.MISSING
        about = tyro.conf.arg(
            metavar=_name_value(field.name, hint, required=required),
            help_behavior_hint=lambda text: "" if text in ("", "None", "False") else f"(default: {text})",
        )
        kind, default = cast(Any, Annotated[hint, about]), constructors.MISSING if required else field.default
        fields.append(constructors.StructFieldSpec(field.name, kind, default, docs.get(field.name)))
    return constructors.StructConstructorSpec(info.type, tuple(fields))


def _name_value(name: str, hint: Any, *, required: bool) -> str | None:
    """Return `NAME...` or `[NAME]` for a positional argument, and `INT` or `{a,b}` for the value of a flag."""
    marks = [str(mark) for mark in getattr(hint, "__metadata__", ())]
    kind = schema.hint_options(get_args(hint)[0] if marks else hint)[0]
    several = get_origin(kind) is tuple
    item = get_args(kind)[0] if several else kind
    if item is bool:
        return None
    choices = get_origin(item) is Literal
    form = f"{{{','.join(get_args(item))}}}" if choices else item.__name__.upper()
    if "Positional" not in marks:
        return form + "..." * (several and not marks)  # with the mark, a flag that is given several times
    form = (form if choices else name.upper()) + "..." * several
    return form if required else f"[{form}]"


def _clean_values(flags: FlagsT) -> FlagsT:
    """Return `flags` with every address stripped of its secrets, and a leading `~` of paths expanded."""

    def clean(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(clean, value))
        if isinstance(value, Path) and not is_remote(value):
            return user_path(value)
        value = str(user_path(value)) if isinstance(value, str) and value.startswith("~/") else value
        return hide_secrets(value) if isinstance(value, str) else value

    names = [field.name for field in dataclasses.fields(flags) if field.name not in _MAY_BE_EMPTY]  # type: ignore[arg-type]
    return dataclasses.replace(flags, **{name: clean(getattr(flags, name)) for name in names})  # type: ignore[type-var]


def _check_lists_given_once(argv: Sequence[str], flags: type) -> None:
    """Raise UserError for a flag of several values that comes twice: the parser would drop the first ones."""
    hints = get_type_hints(flags, include_extras=True)
    names = [token.removeprefix("--").partition("=")[0].replace("-", "_") for token in argv if token.startswith("--")]
    for name in dict.fromkeys(names):
        if names.count(name) > 1 and _takes_several(hints.get(name)):
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} is given twice, and only the last would count; write all values after one {flag}")


def _check_no_empty_values(argv: Sequence[str]) -> None:
    flag = ""
    for token in argv:
        head, equals, value = token.partition("=")
        flag = head if token.startswith("--") else flag
        empty = not value if token.startswith("--") and equals else not token
        if empty and flag.removeprefix("--").replace("-", "_") not in _MAY_BE_EMPTY:
            raise UserError(f"{flag or 'an argument'} is empty (''); give it a value, or leave it out")


def _check_bounds(flags: Any) -> None:
    for field in dataclasses.fields(flags):
        value, flag = getattr(flags, field.name), f"--{field.name.replace('_', '-')}"
        low, high = _BOUNDS.get(field.name, (None, None))
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            if isinstance(number, float) and not math.isfinite(number):
                raise UserError(f"{flag} must be a finite number, got {number}")
            if low is not None and number < low:
                raise UserError(f"{flag} must be at least {low}, got {number}")
            if high is not None and number > high:
                raise UserError(f"{flag} must be at most {high}, got {number}")


def _hint_parts(hint: Any) -> Iterator[Any]:
    yield hint
    for inner in get_args(hint) if get_origin(hint) is not Literal else ():
        yield from _hint_parts(inner)


def _expand_exponents(argv: Sequence[str], kinds: dict[str, set[Any]]) -> list[str]:
    """Return `argv` with `1e9` after an integer flag written out in digits, as in a recipe."""
    words, flag = [], ""
    for token in argv:
        head, equals, value = token.partition("=")
        if not token.startswith("--"):
            head, equals, value = "", "", token
        else:
            flag = head
        kind = kinds.get(flag.removeprefix("--").replace("-", "_"), set())
        if int in kind and re.fullmatch(r"[-+]?[0-9.]+[eE][-+]?[0-9]{1,2}", value):
            with contextlib.suppress(ValueError):
                if (number := float(value)).is_integer():
                    value = str(int(number))
        words.append(head + equals + value)
    return words


@contextlib.contextmanager
def _wide_terminal(argv: Sequence[str]) -> Iterator[None]:
    """Widen the terminal so that tyro's error messages are not wrapped."""
    before = os.environ.get("COLUMNS")
    if not {"--help", "-h"} & set(argv):
        os.environ["COLUMNS"] = "100000"
    try:
        yield
    finally:
        os.environ.pop("COLUMNS", None)
        if before is not None:
            os.environ["COLUMNS"] = before


def _parser_message(text: str, kinds: dict[str, set[Any]]) -> str:
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [re.sub(r"^[│|]\s*|\s*[│|]$", "", line.strip()) for line in text.splitlines()]
    lines = [line for line in lines[1:] if line.strip("╰╯─+- ")] or ["this command line cannot be read"]
    wrong = re.search(r"Error parsing (\S+): .* from \[(.*?)\]", lines[0])
    if wrong is not None:
        kind = kinds.get(wrong[1].removeprefix("--").replace("-", "_"), set())
        expected = "a whole number" if int in kind else "a number" if float in kind else "another value"
        return f"{wrong[1]} must be {expected}, got {shorten(wrong[2])}"
    if lines[0].startswith("Missing from"):
        return f"{lines[1]} is missing" + (f": {lines[2].split('. (')[0]}" if len(lines) > 2 else "")
    message = re.sub(r", 'None'|'None', ", "", lines[0].rstrip(".")).replace(". Expected", "; expected")
    near = next((line.split()[0].rstrip(",") for line in lines[1:] if line.startswith("--")), None)
    return message[:1].lower() + shorten(message[1:], 160) + (f" (did you mean {near}?)" if near else "")


def spawn_ranks(command: str, argv: list[str], recipe: schema.Recipe, run: Path) -> int:
    """Run the same command line again, as the ranks of the recipe's mesh."""
    check_settings(RuleSettings.of(recipe))
    check_available(recipe.train.quantization)
    with pause_heartbeat():
        return spawn.spawn(
            ["-m", "flatshift", command, *argv], ranks=recipe.mesh.size, resume=run, threads=recipe.train.threads
        )
