"""`flatshift recipes`: list, show or copy the shipped recipes, or translate one of another tool."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from flatshift.command_line import parse_flags, print_json, print_result
from flatshift.experiments.recipe import gallery_recipes, read_shipped_recipe, shipped_recipes
from flatshift.finetune.atomic import write_text
from flatshift.finetune.errors import UserError, user_path
from flatshift.finetune.lock import exclusive_lock


@dataclass(frozen=True)
class Flags:
    """List, show or copy the shipped recipes and those of the gallery; or translate the YAML of axolotl,
    LLaMA-Factory or torchtune, with exit code 1 if it has keys that no recipe has."""

    action: Positional[Literal["list", "show", "copy", "from"]] = "list"
    """Action to perform."""
    name: Positional[str | None] = None
    """Recipe to show or copy; YAML file to translate (from); a part of the names to list."""
    to: Positional[Path | None] = None
    """File to write (copy); by default NAME.yaml in the current directory."""
    out: Path | None = None
    """File to write (from); by default the recipe is printed."""
    json: bool = False
    """Print the list, or the translated recipe with the keys left out, as JSON."""


def run(argv: list[str]) -> int:
    flags = parse_flags(Flags, "recipes", argv)
    if flags.to is not None and flags.action != "copy":
        raise UserError(f"recipes {flags.action} writes no file {flags.to}; leave it out")
    if flags.out is not None and flags.action != "from":
        raise UserError("--out is of `recipes from`; `recipes copy NAME FILE` copies a recipe")
    if flags.json and flags.action in ("show", "copy"):
        raise UserError(f"--json is of `recipes list` and `recipes from`; leave it out of recipes {flags.action}")
    if flags.action == "list":
        entries = _list_entries(flags.name or "")
        print_result(entries, "\n".join(_list_lines(entries)), as_json=flags.json)
        return 0
    if flags.name is None:
        tools = "axolotl, LLaMA-Factory or torchtune"
        wanted = f"FILE of {tools}" if flags.action == "from" else "NAME of `flatshift recipes`"
        raise UserError(f"recipes {flags.action} needs a {wanted}")
    if flags.action == "from":
        return _translate(flags, user_path(flags.name))
    text = read_shipped_recipe(flags.name)
    if flags.action == "show":
        sys.stdout.write(text)
        return 0
    target = flags.to or Path(f"{flags.name}.yaml")
    _write_new(target, text)
    print(target)
    return 0


def _list_entries(part: str) -> dict[str, dict[str, Any]]:
    """Return name → properties of the recipes whose names contain `part`; those of the gallery have a task, family and
    hardware. Raises UserError if there is none."""
    entries: dict[str, dict[str, Any]] = {}
    for name, path in shipped_recipes().items():
        entries[name] = {"summary": path.read_text(encoding="utf-8").splitlines()[0].removeprefix("#").strip()}
    for name, recipe in gallery_recipes().items():
        entries[name] = {key: value for key, value in asdict(recipe).items() if key not in ("name", "text")}
    entries = {name: entry for name, entry in entries.items() if part.lower() in name}
    if not entries:
        raise UserError(f"no recipe has {part!r} in its name; `flatshift recipes` lists all")
    return entries


def _list_lines(entries: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the shipped recipes with their summaries, then the gallery's names by task, family and hardware."""
    plain = {name: entry["summary"] for name, entry in entries.items() if "task" not in entry}
    width = max(map(len, plain), default=0)
    yield from (f"{name.ljust(width)}  {summary}" for name, summary in plain.items())
    shown = {name: entry for name, entry in entries.items() if "task" in entry}
    tasks = sorted(shown, key=lambda name: shown[name]["task"])  # stable: families stay in the table's order
    for (task, family), names in itertools.groupby(tasks, lambda name: (shown[name]["task"], shown[name]["family"])):
        yield from ("", f"{task}, {family}")
        by_hardware: dict[str, list[str]] = {}
        for name in names:
            by_hardware.setdefault(shown[name]["hardware"], []).append(name)
        yield from (f"  {hardware.ljust(6)}  {'  '.join(same)}" for hardware, same in by_hardware.items())


def _translate(flags: Flags, file: Path) -> int:
    from flatshift.experiments.recipe.translate import translate_recipe

    translated = translate_recipe(file)
    if flags.out is not None:
        _write_new(flags.out, translated.text)
    if flags.json:
        print_json(asdict(translated))
    else:
        sys.stdout.write(translated.text if flags.out is None else f"{flags.out}\n")
    if translated.unknown:
        lines = "".join(f"\n  {line}" for line in translated.unknown)
        print(f"{file}: these keys have no counterpart in a recipe and are left out:{lines}", file=sys.stderr)
    return 1 if translated.unknown else 0


def _write_new(target: Path, text: str) -> None:
    """Write a file. Raises UserError if it exists."""
    with exclusive_lock(target, alternative="name another file"):
        if target.exists():
            raise UserError(f"{target} exists; name another file or remove it")
        write_text(target, text)
